//! `farwire train` as its users meet it.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on should say where")]

use std::io::{BufRead, BufReader, Lines};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Output, Stdio};
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

/// A model that takes no time.
const SMALL: &str = "--layers 2 --heads 2 --width 16 --context 16 --batch 4";

fn command(dir: &Path, arguments: &str) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_farwire"));
    command.current_dir(dir).arg("train").args(SMALL.split(' ')).args(arguments.split_whitespace());
    command
}

fn farwire(dir: &Path, arguments: &str) -> Output {
    ended(&mut command(dir, arguments))
}

/// The output of a command, which has to end within two minutes.
fn ended(command: &mut Command) -> Output {
    let limited = Command::new("timeout")
        .args(["-k", "5", "120"])
        .arg(command.get_program())
        .args(command.get_args())
        .envs(command.get_envs().filter_map(|(name, value)| Some((name, value?))))
        .current_dir(command.get_current_dir().unwrap_or(Path::new(".")))
        .output()
        .unwrap();
    assert!(!matches!(limited.status.code(), Some(124 | 137) | None), "{command:?} did not end");
    limited
}

/// The same command as each of two ranks of a launcher's job.
fn launched(dir: &Path, arguments: &str) -> Command {
    let plain = command(dir, arguments);
    let mut command = Command::new(env!("CARGO_BIN_EXE_farwire"));
    command.current_dir(dir).args(["launch", "-n", "2", "--"]).arg(plain.get_program());
    command.args(plain.get_args());
    command
}

/// Starts a run and lets it make a few steps. It is killed after two minutes, unless the last of
/// the returned values is dropped before.
fn started(mut command: Command) -> (Child, Lines<BufReader<ChildStdout>>, Sender<()>) {
    let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
    let limit = limit(&child);
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    for _ in 0..3 {
        lines.next().unwrap().unwrap();
    }
    (child, lines, limit)
}

fn limit(child: &Child) -> Sender<()> {
    let (ended, end) = mpsc::channel();
    let pid = Pid::from_raw(child.id() as i32).unwrap();
    std::thread::spawn(move || {
        if end.recv_timeout(Duration::from_secs(120)) == Err(RecvTimeoutError::Timeout) {
            let _ = kill_process(pid, Signal::KILL);
        }
    });
    ended
}

fn signal(child: &Child, signal: Signal) {
    kill_process(Pid::from_raw(child.id() as i32).unwrap(), signal).unwrap();
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// The JSON lines of a run that succeeds.
fn json(dir: &Path, arguments: &str) -> Vec<Value> {
    let output = farwire(dir, &format!("{arguments} --json"));
    assert!(output.status.success(), "{}", text(&output.stderr));
    text(&output.stdout).lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

fn losses(lines: &[Value]) -> Vec<(u64, f64)> {
    let steps = lines.iter().filter(|line| line["event"] == "step");
    steps.map(|line| (line["step"].as_u64().unwrap(), line["loss"].as_f64().unwrap())).collect()
}

/// The folders and files in a folder, hidden ones too.
fn names(dir: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(dir).unwrap();
    let mut names: Vec<_> =
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        let path =
            std::env::temp_dir().join(format!("farwire-train-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&path).unwrap();
        Self(path)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

#[test]
fn a_run_says_how_it_goes_and_leaves_a_report() {
    let dir = Folder::new("run");
    let output = farwire(&dir.0, "--ranks 2 --steps 6");
    let said = text(&output.stdout);
    assert!(output.status.success(), "{said}{}", text(&output.stderr));
    for says in [
        "2 ranks (dp=2)",
        "step 6/6 loss",
        "tokens/s",
        "cpu/step",
        "ratio",
        "hidden",
        "what it writes",
        "report.html",
    ] {
        assert!(said.contains(says), "{says}: {said}");
    }
    let page = std::fs::read_to_string(dir.0.join("report.html")).unwrap();
    for has in [
        "<!doctype html>",
        "Loss by step",
        "Loss by bytes sent",
        "Time of a step",
        "Bytes per step",
        "<svg",
    ] {
        assert!(page.contains(has), "{has}");
    }
    assert!(!page.contains("http") && !page.contains("<script"), "nothing to load");
    assert!(!page.contains("NaN") && !page.contains("inf"), "all places are numbers");
}

/// The bug: it trained on the CPU, or said that there is no such flag.
#[cfg(not(feature = "train-cuda"))]
#[test]
fn a_card_without_the_feature_is_an_error_that_says_how_to_get_it() {
    let dir = Folder::new("no-cuda");
    for ranks in ["--ranks 2", "--ranks 1 --elastic"] {
        let output = farwire(&dir.0, &format!("{ranks} --steps 1 --device cuda"));
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success() && said.lines().count() <= 4, "{said}");
        for part in ["without the feature train-cuda", "--features train-cuda", "nvcc"] {
            assert!(said.contains(part), "{said}");
        }
    }
    let output = farwire(&dir.0, "--ranks 1 --steps 1 --device tpu");
    assert!(String::from_utf8_lossy(&output.stderr).contains("possible values: cpu, cuda"));
}

#[test]
fn json_has_a_line_per_step_and_a_summary_per_codec() {
    let dir = Folder::new("json");
    let lines = json(&dir.0, "--ranks 2 --steps 4 --compare none,none");
    assert_eq!(lines.len(), 2 * 4 + 2);
    let steps: Vec<_> = losses(&lines);
    // The same start, the same data: the same run.
    assert_eq!(steps[..4], steps[4..]);
    for line in lines.iter().filter(|line| line["event"] == "step") {
        for field in ["loss", "wire_bytes", "dense_bytes", "hidden", "tokens_per_second", "norm"] {
            assert!(line[field].is_number(), "{field} in {line}");
        }
        assert!(line["times"]["cpu"].as_f64() > Some(0.0), "{line}");
        assert!(line["wire_bytes"].as_u64() >= line["dense_bytes"].as_u64(), "{line}");
    }
    let summary = &lines[9];
    assert!(summary["cpu_seconds_per_step"].as_f64() > Some(0.0), "{summary}");
    assert_eq!((&summary["event"], &summary["codec"]), (&"summary".into(), &"none".into()));
    let page = std::fs::read_to_string(dir.0.join("report.html")).unwrap();
    assert_eq!(page.matches("Time of a step on rank 0: none").count(), 2);
}

#[test]
fn every_axis_works_from_the_command_line_and_under_launch() {
    let dir = Folder::new("axes");
    let alone = losses(&json(&dir.0, "--ranks 1 --steps 3"));
    let mixed = losses(&json(
        &dir.0,
        "--ranks 4 --tp 2 --pp 2 --micro-batches 2 --schedule gpipe --steps 3",
    ));
    for ((_, alone), (_, mixed)) in alone.iter().zip(&mixed) {
        assert!((alone - mixed).abs() < 1e-4 * alone, "{alone} and {mixed}");
    }
    let output = Command::new(env!("CARGO_BIN_EXE_farwire"))
        .current_dir(&dir.0)
        .args(["launch", "-n", "2", "--", env!("CARGO_BIN_EXE_farwire"), "train", "--steps", "2"])
        .args(SMALL.split(' '))
        .output()
        .unwrap();
    let said = text(&output.stdout);
    assert!(
        output.status.success() && said.contains("[0] a GPT") && said.contains("dp=2"),
        "{said}"
    );
    assert!(!said.contains("[1]"), "only rank 0 speaks: {said}");
}

#[test]
fn a_codec_can_be_left_to_measuring_and_a_run_goes_on_with_what_was_chosen() {
    let dir = Folder::new("auto");
    let job = "--ranks 2 --steps 4 --dense-steps 1 --codec auto --checkpoint kept";
    let output = farwire(&dir.0, job);
    let said = text(&output.stdout);
    assert!(output.status.success(), "{said}{}", text(&output.stderr));
    let chosen = said.lines().find_map(|line| line.strip_prefix("  auto is ")).unwrap();
    assert!(said.contains(&format!("codec auto: {chosen}")), "{said}");
    let page = std::fs::read_to_string(dir.0.join("report.html")).unwrap();
    assert!(page.contains(&format!("auto is {chosen}")), "{chosen}");
    let lines = json(&dir.0, &format!("{} --resume", job.replace("--steps 4", "--steps 6")));
    let summary = lines.last().unwrap();
    assert_eq!((&summary["codec"], &summary["chosen"]), (&"auto".into(), &chosen.into()));
    assert_eq!(losses(&lines).len(), 2);
}

/// Ctrl-C ends a run with a checkpoint, and a run that is resumed from it is the same as one that
/// was not interrupted.
#[test]
fn an_interrupted_run_leaves_a_checkpoint_and_goes_on() {
    let dir = Folder::new("interrupt");
    std::fs::write(dir.0.join("data.txt"), "a text of one's own, again and again. ".repeat(50))
        .unwrap();
    let job = "--ranks 2 --data data.txt --seed 5 --steps 60";
    let whole = losses(&json(&dir.0, job));

    let arguments = format!("{job} --checkpoint kept --json");
    let mut child = command(&dir.0, &arguments).stdout(Stdio::piped()).spawn().unwrap();
    let _limit = limit(&child);
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    for _ in 0..5 {
        lines.next().unwrap().unwrap();
    }
    // As `timeout` does, which signals a process and then its group: that is one wish to end, not
    // two. The signals are of two kinds, since two of one kind may arrive as one.
    for wish in [Signal::INT, Signal::TERM] {
        signal(&child, wish);
    }
    let rest: Vec<Value> =
        lines.map(|line| serde_json::from_str(&line.unwrap()).unwrap()).collect();
    // Either may be seen first.
    assert!(matches!(child.wait().unwrap().code(), Some(130 | 143)));
    let summary = rest.last().unwrap();
    assert_eq!((&summary["event"], &summary["stopped"]), (&"summary".into(), &true.into()));
    let done = summary["steps"].as_u64().unwrap();
    assert!((5..60).contains(&done), "{done}");

    let lines = json(&dir.0, &format!("{job} --checkpoint kept --resume"));
    assert_eq!(losses(&lines), whole[done as usize..]);
    assert_eq!(lines.last().unwrap()["steps"], 60, "the report has the whole run");
}

/// With a learning rate that no model survives: the first update ruins it, the second step shows
/// it.
#[test]
fn a_run_that_diverges_stops_with_an_error_and_keeps_its_good_checkpoints() {
    let dir = Folder::new("diverges");
    for layout in
        ["--codec none", "--codec int8", "--codec topk:0.1 --shard-optimizer", "--tp 2", "--pp 2"]
    {
        let job = format!(
            "--ranks 2 {layout} --lr 1e9 --steps 30 --checkpoint kept --checkpoint-every 1"
        );
        let output = farwire(&dir.0, &job);
        let said = text(&output.stderr);
        assert!(!output.status.success(), "{layout}: {}", text(&output.stdout));
        for says in ["step 2: the gradient of `", "on rank ", "no weight has moved"] {
            assert!(said.contains(says), "{layout}: {said}");
        }
        assert!(!said.contains("panicked"), "{said}");
        assert_eq!(names(&dir.0.join("kept")), ["step-00000001"], "{layout}");
        std::fs::remove_dir_all(dir.0.join("kept")).unwrap();
    }
}

/// The run's history then has NaNs, for which JSON has no number; they must not cost the rest of
/// it.
#[test]
fn skipped_steps_are_counted_and_a_run_with_some_can_be_resumed() {
    let dir = Folder::new("skips");
    let job = "--ranks 4 --tp 2 --codec topk:0.1 --shard-optimizer --lr 1e9 --on-nan skip --checkpoint kept";
    let lines = json(&dir.0, &format!("{job} --steps 6"));
    let skipped: Vec<bool> = lines[..6].iter().map(|line| line["skipped"].is_string()).collect();
    assert_eq!(skipped, [false, true, true, true, true, true]);
    assert_eq!(lines[6]["skipped"], 5);
    assert!(lines[5]["norm"].is_string(), "not a number in JSON: {}", lines[5]);
    let weights = |step: &str| {
        std::fs::read(dir.0.join("kept").join(step).join("model.safetensors")).unwrap()
    };
    let before = weights("step-00000006");
    let output = farwire(&dir.0, &format!("{job} --steps 8 --resume"));
    let said = text(&output.stdout);
    assert!(output.status.success(), "{said}{}", text(&output.stderr));
    assert!(said.contains("step 8/8 loss") && said.contains("  skipped 7\n"), "{said}");
    assert!(
        said.contains("skipped 7 of these steps; the last one, since the gradient of `"),
        "{said}"
    );
    assert!(before == weights("step-00000008"), "nothing moves");
    let page = std::fs::read_to_string(dir.0.join("report.html")).unwrap();
    assert!(page.contains("7 of these steps were skipped"), "the report says so");
    assert!(!page.contains("NaN,") && !page.contains(",NaN"), "all places are numbers");
    let lines = json(&dir.0, &format!("{job} --steps 9 --resume"));
    assert_eq!(lines.last().unwrap()["steps"], 9, "the whole history");
}

/// Checkpoints of a model that no longer moves would push out those of when it did.
#[test]
fn skipped_steps_leave_older_checkpoints_alone() {
    let dir = Folder::new("streak");
    let job =
        "--ranks 1 --lr 1e9 --on-nan skip --steps 150 --checkpoint kept --checkpoint-every 10";
    let output = farwire(&dir.0, job);
    let said = text(&output.stderr);
    assert!(
        !output.status.success() && said.contains("100 steps in a row were left out"),
        "{said}"
    );
    assert_eq!(names(&dir.0.join("kept")), ["step-00000010"]);
}

#[test]
fn a_damaged_checkpoint_is_named_and_the_one_before_taken() {
    let dir = Folder::new("damaged");
    let job = "--ranks 2 --seed 9007199254740992 --checkpoint kept --checkpoint-every 2";
    let whole = losses(&json(&dir.0, &format!("{job} --steps 6")));
    std::fs::write(dir.0.join("kept/step-00000006/job.json"), "").unwrap();
    let output = farwire(&dir.0, &format!("{job} --steps 6 --resume --json"));
    let said = text(&output.stderr);
    assert!(output.status.success(), "{said}");
    let says =
        "checkpoint step-00000006 is damaged: job.json is empty; resuming from step-00000004";
    assert_eq!(said.matches(says).count(), 1, "once: {said}");
    let stdout = text(&output.stdout);
    let lines: Vec<Value> =
        stdout.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(losses(&lines), whole[4..]);
    assert_eq!(names(&dir.0.join("kept")), ["step-00000004", "step-00000006"]);
    // Another text, another seed (by its last bit), and a new run in a used folder.
    std::fs::write(dir.0.join("data.txt"), "a text of one's own, again and again. ".repeat(50))
        .unwrap();
    for (arguments, says) in [
        (format!("{job} --steps 8 --resume --data data.txt"), "another text"),
        (
            format!("{job} --steps 8 --resume").replace("740992", "740993"),
            "seed 9007199254740992, not 9007199254740993",
        ),
        (format!("{job} --steps 8"), "is a checkpoint of an earlier run"),
    ] {
        let output = farwire(&dir.0, &arguments);
        let said = text(&output.stderr);
        assert!(!output.status.success() && said.contains(says), "`{arguments}`: {said}");
    }
    assert_eq!(
        names(&dir.0.join("kept")),
        ["step-00000004", "step-00000006"],
        "nothing was touched"
    );
}

/// As on a full disk. A limit on the length of files stands in for that, and stops the larger one.
#[test]
fn a_full_disk_is_an_error_and_the_older_checkpoint_stays() {
    let dir = Folder::new("full");
    let job = "--ranks 1 --checkpoint kept --checkpoint-every 2";
    let lines = json(&dir.0, &format!("{job} --steps 2"));
    assert_eq!(lines.len(), 3);
    let longest =
        std::fs::metadata(dir.0.join("kept/step-00000002/optimizer.safetensors")).unwrap().len();
    let limited = format!(
        "trap '' XFSZ; ulimit -f {}; exec \"$0\" \"$@\"",
        longest / 512 - 8 // in blocks of 512 bytes
    );
    let plain = command(&dir.0, &format!("{job} --steps 4 --resume"));
    let output = Command::new("sh")
        .current_dir(&dir.0)
        .args(["-c", &limited])
        .arg(plain.get_program())
        .args(plain.get_args())
        .output()
        .unwrap();
    let said = text(&output.stderr);
    assert!(!output.status.success() && said.contains("optimizer.safetensors"), "{said}");
    assert!(said.contains("File too large") && !said.contains("panicked"), "{said}");
    assert_eq!(names(&dir.0.join("kept")), ["step-00000002"], "no half of one");
    let lines = json(&dir.0, &format!("{job} --steps 4 --resume"));
    assert_eq!(losses(&lines).len(), 2);
}

/// A terminal that goes away takes nothing with it.
#[test]
fn a_run_whose_terminal_goes_away_leaves_a_checkpoint() {
    let dir = Folder::new("hangup");
    let plain = command(&dir.0, "--ranks 2 --steps 4000 --checkpoint kept --json");
    // Tests that run under nohup ignore the signal, and a child would inherit that.
    let mut heeding = Command::new("env");
    heeding.arg("--default-signal=HUP").arg(plain.get_program()).args(plain.get_args());
    heeding.current_dir(&dir.0);
    let (mut child, lines, _limit) = started(heeding);
    signal(&child, Signal::HUP);
    let rest: Vec<Value> =
        lines.map(|line| serde_json::from_str(&line.unwrap()).unwrap()).collect();
    assert_eq!(child.wait().unwrap().code(), Some(128 + 1));
    let summary = rest.last().unwrap();
    assert_eq!((&summary["event"], &summary["stopped"]), (&"summary".into(), &true.into()));
    assert!(dir.0.join("kept").read_dir().unwrap().next().is_some());
}

/// A scheduler that stopped a job must not take it for one that was complete.
#[test]
fn a_run_stopped_by_a_signal_says_so_by_its_exit_code() {
    let dir = Folder::new("code");
    let arguments = "--steps 4000 --checkpoint kept --json";
    let (mut child, lines, _limit) = started(command(&dir.0, &format!("{arguments} --ranks 2")));
    signal(&child, Signal::TERM);
    lines.for_each(drop);
    assert_eq!(child.wait().unwrap().code(), Some(128 + 15));
    assert!(names(&dir.0.join("kept")).iter().all(|name| name.starts_with("step-")));
    let (mut child, lines, _limit) = started(launched(&dir.0, &format!("{arguments} --resume")));
    signal(&child, Signal::INT);
    lines.for_each(drop);
    assert_eq!(child.wait().unwrap().code(), Some(128 + 2), "as of a launcher");
    // All ranks end with the signal that one of them got.
    let exe = env!("CARGO_BIN_EXE_farwire");
    let script = format!("echo pid $$; exec {exe} train {SMALL} {arguments} --resume");
    let mut launch = Command::new(exe);
    launch.current_dir(&dir.0).args(["launch", "-n", "2", "--", "sh", "-c", &script]);
    let mut child = launch.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let _limit = limit(&child);
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines().map(Result::unwrap);
    let pid = lines.find_map(|line| line.strip_prefix("[1] pid ")?.parse().ok()).unwrap();
    lines.find(|line| line.contains("\"event\":\"step\"")).unwrap();
    kill_process(Pid::from_raw(pid).unwrap(), Signal::TERM).unwrap();
    lines.for_each(drop);
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(128 + 15), "{}", text(&output.stderr));
}

/// Not even jobs that write at different moments.
#[test]
fn two_jobs_cannot_keep_checkpoints_in_one_folder() {
    let dir = Folder::new("two-jobs");
    let job = "--ranks 2 --steps 4000 --checkpoint kept --checkpoint-every 4000 --json";
    let (mut child, lines, _limit) = started(command(&dir.0, job));
    for second in ["--ranks 2 --steps 5 --checkpoint kept", "--ranks 2 --checkpoint kept --resume"]
    {
        let output = farwire(&dir.0, second);
        let said = text(&output.stderr);
        assert!(!output.status.success(), "{}", text(&output.stdout));
        assert_eq!(
            said.matches("kept: another job is using this checkpoint folder").count(),
            1,
            "{said}"
        );
        assert!(said.contains("or use another folder"), "{said}");
    }
    // A job that is killed leaves nothing that blocks the next.
    signal(&child, Signal::KILL);
    lines.for_each(drop);
    child.wait().unwrap();
    assert_eq!(losses(&json(&dir.0, "--ranks 2 --steps 3 --checkpoint kept")).len(), 3);
    assert_eq!(names(&dir.0.join("kept")), ["step-00000003"]);
}

#[test]
fn a_report_that_cannot_be_written_is_noticed_before_training() {
    let dir = Folder::new("report");
    for path in ["/no/such/folder/r.html", "."] {
        let output = farwire(&dir.0, &format!("--ranks 2 --steps 3 --json --report {path}"));
        let said = text(&output.stderr);
        assert!(!output.status.success() && output.stdout.is_empty(), "{}", text(&output.stdout));
        assert!(said.contains(&format!("no report could be written to {path}: ")), "{said}");
        assert!(!said.contains("lost") && !said.contains("failed first"), "{said}");
    }
    // An older report is not touched by a run that fails.
    std::fs::write(dir.0.join("old.html"), "old").unwrap();
    farwire(&dir.0, "--ranks 1 --steps 3 --report old.html --data /no/such/file");
    assert_eq!(std::fs::read(dir.0.join("old.html")).unwrap(), b"old");
    // The folder goes away while it trains.
    std::fs::create_dir(dir.0.join("gone")).unwrap();
    let mut command = command(&dir.0, "--ranks 2 --steps 400 --json --report gone/r.html");
    command.stderr(Stdio::piped());
    let (child, lines, _limit) = started(command);
    std::fs::remove_dir(dir.0.join("gone")).unwrap();
    let last = lines.last().unwrap().unwrap();
    let said = text(&child.wait_with_output().unwrap().stderr);
    assert!(last.contains("\"event\":\"summary\""), "the numbers are there: {last}");
    assert!(said.contains("could not write the report to gone/r.html"), "{said}");
    assert!(said.contains("its results are printed above") && !said.contains("lost"), "{said}");
    assert!(!said.contains("failed first"), "{said}");
}

#[test]
fn sizes_beyond_the_machine_are_refused_with_the_memory_they_need() {
    let dir = Folder::new("absurd");
    for (arguments, says) in [
        ("--width 4000000000", "bytes of memory, more than a process can have"),
        ("--width 10000000", "GB of memory here, but this machine has"),
        ("--layers 4000000000", "GB of memory here, but this machine has"),
        ("--context 4000000000", "bytes of memory, more than a process can have"),
        ("--context 10000000", "GB of memory here, but this machine has"),
        ("--batch 1000000 --context 10000", "GB of memory here, but this machine has"),
        ("--batch 4000000000", "use at least 1 and at most"),
        ("--heads 4294967292 --width 4294967292", "bytes of memory, more than a process can have"),
    ] {
        // The last of each flag counts, over those of the small model.
        let mut command = Command::new(env!("CARGO_BIN_EXE_farwire"));
        let output = ended(
            command.args(["train", "--ranks", "1"]).args(arguments.split(' ')).current_dir(&dir.0),
        );
        let said = text(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "`{arguments}`: {said}");
        assert!(said.contains(says) && said.contains("use"), "`{arguments}`: {said}");
    }
}

#[test]
fn data_that_never_ends_is_refused() {
    let dir = Folder::new("endless");
    let pipe = dir.0.join("pipe");
    assert!(Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    for (path, says) in
        [("pipe", " is a pipe"), ("/dev/zero", " is a device"), (".", " is a folder")]
    {
        for mut command in [
            command(&dir.0, &format!("--ranks 2 --data {path}")),
            launched(&dir.0, &format!("--data {path}")),
        ] {
            let output = ended(&mut command);
            let said = text(&output.stderr);
            assert_eq!(output.status.code(), Some(1), "{said}");
            assert!(
                said.contains(says) && said.contains("copy its content to a file first"),
                "{said}"
            );
        }
    }
    let output = farwire(&dir.0, "--ranks 2 --init pipe");
    let said = text(&output.stderr);
    assert!(!output.status.success() && said.contains("pipe: it is not a file"), "{said}");
    let long = std::fs::File::create(dir.0.join("long")).unwrap();
    long.set_len((4 << 30) + 1).unwrap();
    let said = text(&farwire(&dir.0, "--ranks 1 --data long").stderr);
    assert!(said.contains("long has more than 4 GiB; give a part of it"), "{said}");
}

/// Users should not have to find out that four long lines are the same.
#[test]
fn an_error_of_all_ranks_is_said_once() {
    let dir = Folder::new("once");
    std::fs::write(dir.0.join("a-file"), "not a folder").unwrap();
    for (arguments, says) in [
        ("--ranks 4 --lr 1e9", "farwire: all 4 ranks: step 2: the gradient of `"),
        ("--ranks 2 --checkpoint a-file", "farwire: rank 0: a-file: Not a directory"),
        (
            "--ranks 2 --checkpoint none --resume",
            "farwire: rank 0: none: there is no checkpoint here",
        ),
        ("--ranks 2 --init a-file", "farwire: rank 0: a-file: "),
        ("--ranks 1 --checkpoint a-file", "farwire: a-file: Not a directory"),
    ] {
        let output = farwire(&dir.0, arguments);
        let said = text(&output.stderr);
        let lines: Vec<&str> = said.lines().filter(|line| line.starts_with("farwire: ")).collect();
        assert!(lines.len() == 1 && lines[0].starts_with(says), "`{arguments}`: {said}");
        assert_eq!(output.status.code(), Some(1), "`{arguments}`");
    }
    // On several machines each says it, and where it comes from.
    let said = text(&ended(&mut launched(&dir.0, "--checkpoint a-file")).stderr);
    assert!(said.contains("[0] farwire: a-file: Not a directory"), "{said}");
    assert!(said.contains("[1] farwire: rank 0 says: a-file: Not a directory"), "{said}");
}

#[test]
fn wrong_flags_are_refused_with_what_to_use() {
    let dir = Folder::new("wrong");
    std::fs::write(dir.0.join("a-file"), "not a folder").unwrap();
    for (arguments, says) in [
        ("--ranks 4 --dp 3", "is not 4 ranks"),
        ("--ranks 4 --tp 3", "does not divide 4 ranks"),
        ("--ranks 0", "1..=256"),
        ("--codec int9", "int8"),
        ("--compare none,zip", "accepted: none"),
        ("--schedule 2f2b", "use gpipe, 1f1b, or interleaved:2"),
        ("--ranks 3", "use a multiple of 3"),
        ("--ranks 2 --pp 2 --schedule interleaved --micro-batches 2", "use a multiple of 4 layers"),
        ("--lr 0", "use a number above 0"),
        ("--resume", "--checkpoint"),
        ("--on-nan ignore", "neither stop nor skip"),
        ("--data /no/such/file", "could not read /no/such/file"),
        ("--ranks 1 --checkpoint none-here --resume --report r.html", "start without resuming"),
        (
            "--ranks 1 --steps 1 --report /no/such/folder/r.html",
            "could be written to /no/such/folder",
        ),
        ("--ranks 1 --init /no/such/file", "/no/such/file"),
        ("--ranks 2 --checkpoint a-file", "a-file: Not a directory"),
        ("--ranks 2 --checkpoint a-file/below", "Not a directory"),
        ("--ranks 2 --checkpoint a-file --resume", "a-file: Not a directory"),
    ] {
        let output = farwire(&dir.0, arguments);
        let said = text(&output.stderr);
        assert!(!output.status.success() && said.contains(says), "`{arguments}`: {said}");
        assert!(!said.contains("panicked"), "{said}");
    }
    let output = command(&dir.0, "--ranks 3")
        .envs([
            ("RANK", "0"),
            ("WORLD_SIZE", "2"),
            ("MASTER_ADDR", "127.0.0.1"),
            ("MASTER_PORT", "29500"),
        ])
        .output()
        .unwrap();
    assert!(text(&output.stderr).contains("leave --ranks out"), "{}", text(&output.stderr));
}
