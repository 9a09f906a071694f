//! `farwire sim` as its users meet it.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on should say where")]

use std::process::{Command, Output};

use serde_json::Value;

fn farwire(arguments: &str) -> Output {
    Command::new(env!("CARGO_BIN_EXE_farwire")).args(arguments.split_whitespace()).output().unwrap()
}

fn json(arguments: &str) -> Value {
    let output = farwire(arguments);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8(output.stdout).unwrap();
    assert_eq!(text.lines().count(), 1, "one object on one line: {text}");
    serde_json::from_str(&text).unwrap()
}

fn words(arguments: &str) -> String {
    let output = farwire(arguments);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

fn refusal(arguments: &str) -> String {
    let output = farwire(arguments);
    assert!(!output.status.success(), "`farwire {arguments}` should be refused");
    assert!(output.stdout.is_empty());
    let text = String::from_utf8(output.stderr).unwrap();
    assert!(!text.contains("panicked"), "{text}");
    text
}

#[test]
fn hosts_with_several_ranks_take_the_least_time() {
    let network = "--ranks 8 --hosts 4 --size 100MB --latency 100us --json";
    let two_level = json(&format!("sim all_reduce {network}"));
    assert_eq!(two_level["algorithm"], "two-level");
    let ms = |run: &Value| run["virtual_ms"].as_f64().unwrap();
    assert!(ms(&two_level) <= 1.05 * two_level["bound_ms"].as_f64().unwrap(), "{two_level}");
    let flat = json(&format!("sim all_reduce {network} --algorithm two-phase"));
    assert!(ms(&two_level) <= 0.6 * ms(&flat), "{two_level} {flat}");
    let said = refusal("sim all_reduce --ranks 4 --hosts 5");
    assert!(said.contains("--hosts 5 does not fit 4 ranks"), "{said}");
}

#[test]
fn json_has_the_promised_fields() {
    let run = json("sim all_reduce --ranks 8 --size 100MB --bandwidth 1gbit --latency 20ms --json");
    assert_eq!(run["op"], "all_reduce");
    assert_eq!(run["ranks"], 8);
    assert_eq!(run["bytes"], 100_000_000);
    assert_eq!(run["algorithm"], "two-phase");
    assert_eq!(run["segment"], 65_536);
    assert_eq!(run["rounds"], 2);
    let number =
        |field: &str| run[field].as_f64().unwrap_or_else(|| panic!("{field} is a number: {run}"));
    assert!(number("wire_bytes_mean") <= number("wire_bytes_max"));
    assert!(number("bound_ms") <= number("virtual_ms"));
    assert!(number("virtual_ms") <= 1.05 * number("bound_ms"));
}

#[test]
fn a_run_that_is_not_checked_is_the_same_and_says_so() {
    let long = "sim all_reduce --ranks 8 --size 100MB";
    assert_eq!(json(&format!("{long} --json")), json(&format!("{long} --json --unchecked")));
    assert!(words(&format!("{long} --unchecked")).contains("not checked, as asked"));
}

#[test]
fn a_world_of_256_ranks_sends_the_least_volume() {
    let run = json("sim all_reduce --ranks 256 --size 100MB --json");
    let least = 2.0 * 255.0 / 256.0 * 100e6;
    assert!(run["wire_bytes_max"].as_f64().unwrap() <= 1.02 * least, "{run}");
}

#[test]
fn every_operation_runs_with_every_algorithm_and_is_checked() {
    for kind in farwire_proto::Kind::ALL {
        for algorithm in kind.algorithms() {
            let run = words(&format!(
                "sim {kind} -n 5 --size 4004 --algorithm {algorithm} --dtype bf16 --jitter 1ms"
            ));
            let checked =
                run.contains("every rank's result is right, bit for bit, on 2002 random elements");
            assert!(checked || kind == farwire_proto::Kind::Barrier, "{run}");
            assert!(run.contains("virtual time"), "{run}");
        }
    }
}

#[test]
fn one_rank_and_nothing_to_send_work() {
    for kind in
        farwire_proto::Kind::ALL.into_iter().filter(|kind| *kind != farwire_proto::Kind::Message)
    {
        words(&format!("sim {kind} -n 1 --size 400"));
        words(&format!("sim {kind} -n 3 --size 0"));
    }
}

#[test]
fn the_seed_decides_the_run() {
    let run = |seed| {
        words(&format!(
            "sim all_reduce -n 4 --size 1MB --jitter 5ms --loss 1% --seed {seed} --json"
        ))
    };
    assert_eq!(run(1), run(1));
    assert_ne!(run(1), run(2));
}

#[test]
fn a_crash_is_shown_on_every_rank() {
    let run = words("sim all_reduce -n 4 --size 1MB --crash 2@5");
    for rank in [0, 1, 3] {
        let line =
            run.lines().find(|line| line.contains(&format!("rank {rank}: all_reduce"))).unwrap();
        assert!(line.contains("rank 2 is lost"), "{line}");
    }
    assert!(run.contains("rank 2: crashed, as asked"), "{run}");
    let run = json("sim all_reduce -n 4 --size 1MB --crash 2@5 --json");
    assert_eq!(run["failed_ranks"], serde_json::json!([0, 1, 2, 3]));
}

#[test]
fn wrong_flags_are_refused_with_what_to_write_instead() {
    for (arguments, says) in [
        ("sim all_reduce --size 100Mb", "100MB"),
        ("sim all_reduce --size=-5", "64MiB"),
        ("sim all_reduce --segment 0", "at least one byte"),
        ("sim all_reduce --size 5", "not a whole number of f32 elements"),
        ("sim all_reduce --bandwidth 1gb", "1gbit"),
        ("sim all_reduce --bandwidth 0gbit", "1gbit"),
        ("sim all_reduce --latency 20", "20ms"),
        ("sim all_reduce --loss 2", "0.1%"),
        ("sim all_reduce --ranks 0", "1..=1024"),
        ("sim all_reduce --ranks 1e9", "invalid digit"),
        ("sim all_reduce --algorithm tree", "use one of: two-phase, gather-reduce, ring"),
        ("sim all_reduce --algorithm best", "two-phase"),
        ("sim all_reduce --dtype i32 --reduce mean", "use sum and divide"),
        ("sim scan --reduce mean", "use sum and divide"),
        ("sim broadcast --root 8", "use 0 to 7"),
        ("sim all_reduce --crash 2", "RANK@STEP"),
        ("sim all_reduce --crash 9@1", "use 0 to 7"),
        ("sim send_recv --ranks 1", "at least 2"),
        ("sim allreduce", "all_reduce"),
        ("sim", "OP"),
        ("learn", "unrecognized subcommand"),
    ] {
        let message = refusal(arguments);
        assert!(message.contains(says), "`farwire {arguments}` says {message:?}, not {says:?}");
    }
}

/// Values at the edge of what can be counted: a slow run, not a panic.
#[test]
fn extreme_networks_are_slow_not_broken() {
    for flags in [
        "--latency 1000000000s",
        "--bandwidth 1bit",
        "--latency 1000000000s --jitter 1000000000s",
        "--latency 1000000000s --loss 90%",
        "--latency 0 --loss 5%",
        "--bandwidth 1mbit --latency 1ms --loss 1%",
        "--jitter 36000s",
        "--latency 1s --window 1 --segment 4",
        "--latency 1ns --bandwidth 999999999tbit",
        "--window 0",
    ] {
        let run = words(&format!("sim all_reduce --size 40KB -n 3 {flags}"));
        assert!(run.contains("every rank's result is right"), "{flags}: {run}");
    }
}

#[test]
fn a_reader_that_leaves_early_is_no_error() {
    let shell = format!("{} sim all_reduce -n 2 --size 4MB | true", env!("CARGO_BIN_EXE_farwire"));
    let output = Command::new("bash").args(["-o", "pipefail", "-c", &shell]).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let shell = format!("{} sim barrier > /dev/full", env!("CARGO_BIN_EXE_farwire"));
    let output = Command::new("bash").args(["-c", &shell]).output().unwrap();
    assert!(!output.status.success());
    assert!(String::from_utf8_lossy(&output.stderr).contains("could not write the result"));
}

#[test]
fn a_crash_that_never_comes_is_said() {
    let run = words("sim all_reduce -n 4 --size 1MB --crash 2@99999");
    assert!(run.contains("rank 2 did not crash: it took only"), "{run}");
    assert!(run.contains("every rank's result is right"), "{run}");
}

#[test]
fn output_fits_a_terminal_of_eighty_columns() {
    for arguments in
        ["sim all_reduce -n 12", "sim barrier", "sim all_reduce --size 1MB --dtype bf16", "sim -h"]
    {
        // Flags are wrapped to the terminal automatically; the examples after them are not.
        let run = words(arguments);
        let run = run.split_once("Examples:").map_or(&run[..], |(_, examples)| examples);
        let widest = run.lines().map(|line| line.chars().count()).max().unwrap_or(0);
        let line = run.lines().find(|line| line.chars().count() == widest).unwrap_or_default();
        assert!(widest <= 80, "{widest} columns: {line}");
    }
}

#[test]
fn help_teaches() {
    let help = words("sim --help");
    for says in ["Examples:", "--bandwidth", "all_to_all", "two-phase", "64KiB", "RANK@STEP"] {
        assert!(help.contains(says), "{help}");
    }
}

/// What a slow machine has measured: a codec at 1 GB/s, a network at 10 ns a byte, a relay at 2.
const SPEEDS: &str = r#"{"codec":"int8","encode_gbs":1.0,"decode_gbs":2.0,"add_gbs":10.0}
{"codec":"topk:0.01","encode_gbs":1.0,"decode_gbs":20.0,"add_gbs":10.0}
{"op":"all_reduce","link":"quic","ranks":2,"wire_bytes":1000000,"cpu_s":0.02,"iters":1}
{"relay_cpu_s":0.002,"relay_bytes":1000000}
"#;

#[test]
fn work_takes_time_and_cores_are_shared() {
    let speeds = std::path::Path::new(env!("CARGO_TARGET_TMPDIR")).join("speeds.json");
    std::fs::write(&speeds, SPEEDS).unwrap();
    let ms = |flags: &str| json(&format!("sim all_reduce -n 4 --latency 100us --json {flags}"));
    let ms = |flags: &str| ms(flags)["virtual_ms"].as_f64().unwrap();
    let real = |flags: &str| ms(&format!("--speeds {} {flags}", speeds.display()));
    for codec in ["none", "int8", "topk:0.01"] {
        let free = ms(&format!("--codec {codec}"));
        let enough = real(&format!("--codec {codec}"));
        let eight = real(&format!("--codec {codec} --cores 8"));
        let two = real(&format!("--codec {codec} --cores 2"));
        let one = real(&format!("--codec {codec} --cores 1"));
        let all = format!("{codec}: {free} {enough} {eight} {two} {one}");
        assert!(free < enough && enough <= eight && eight <= two && two < one, "{all}");
        assert!(one > 1.6 * two, "two cores do nearly twice as much: {all}");
    }
    // Four ranks encode 100 MB and a quarter of that, and decode it twice, on one core.
    let one = real("--codec topk:0.01 --cores 1 --bandwidth 100gbit");
    assert!((500.0..650.0).contains(&one), "{one}");
    let said = refusal(&format!("sim all_reduce --codec randk:0.01 --speeds {}", speeds.display()));
    assert!(said.contains("bench codec --codec randk:0.01"), "{said}");
    let said = refusal("sim all_reduce --codec powersgd:2");
    assert!(said.contains("only if it sends shards"), "{said}");
    let said = refusal("sim broadcast --codec int8");
    assert!(said.contains("for all_reduce of f32 alone"), "{said}");
    let said = refusal("sim all_reduce --cores 2");
    assert!(said.contains("--speeds"), "{said}");
}

#[test]
fn what_was_measured_is_used_where_it_belongs() {
    let said = |name: &str, more: &str| {
        let speeds = std::path::Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
        std::fs::write(&speeds, format!("{SPEEDS}{more}\n")).unwrap();
        format!("sim all_reduce -n 4 --latency 100us --json --speeds {}", speeds.display())
    };
    let ms = |arguments: &str| json(arguments)["virtual_ms"].as_f64().unwrap();
    let barrier = |link: &str| {
        let costs = r#""ranks":2,"wire_bytes":64,"cpu_s":0.004,"iters":1"#;
        format!(r#"{{"op":"barrier","link":"{link}",{costs}}}"#)
    };
    // The costs of frames and of bytes are those of the same link.
    let without = ms(&said("no_frames.json", ""));
    assert!(ms(&said("frames.json", &barrier("quic"))) > without);
    let message = refusal(&said("other_frames.json", &barrier("tcp")));
    assert!(message.contains("bench barrier --ranks 8 --link quic"), "{message}");
    // The share of a line that flows fill counts at its rate only.
    let half = said("half.json", r#"{"line_share":0.475,"bandwidth":12500000}"#);
    let whole = said("whole.json", "");
    let ratio = |rate: &str| {
        ms(&format!("{half} --bandwidth {rate}")) / ms(&format!("{whole} --bandwidth {rate}"))
    };
    assert!((1.9..2.1).contains(&ratio("100mbit")), "{}", ratio("100mbit"));
    assert_eq!(ratio("200mbit"), 1.0);
}
