//! `farwire launch`, `farwire bench` and `farwire token` as their users meet them.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on should say where")]

use std::io::{BufRead, BufReader};
use std::net::UdpSocket;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Output, Stdio};
use std::sync::mpsc;
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

fn farwire(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_farwire")).args(arguments).output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn succeeds(arguments: &[&str]) -> String {
    let output = farwire(arguments);
    assert!(output.status.success(), "{}{}", text(&output.stdout), text(&output.stderr));
    text(&output.stdout)
}

/// A launcher that is killed if it takes too long.
struct Running {
    child: Child,
    lines: std::io::Lines<BufReader<ChildStdout>>,
    _ended: mpsc::Sender<()>,
}

impl Running {
    fn start(arguments: &[&str]) -> Self {
        Self::start_with(arguments, Stdio::inherit())
    }

    fn start_with(arguments: &[&str], stderr: Stdio) -> Self {
        let mut child = Command::new(env!("CARGO_BIN_EXE_farwire"))
            .args(arguments)
            .stdout(Stdio::piped())
            .stderr(stderr)
            .spawn()
            .unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let (ended, end) = mpsc::channel();
        let pid = pid(&child);
        std::thread::spawn(move || {
            if end.recv_timeout(Duration::from_secs(60)) == Err(mpsc::RecvTimeoutError::Timeout) {
                let _ = kill_process(pid, Signal::KILL);
            }
        });
        Self { child, lines, _ended: ended }
    }

    fn line(&mut self) -> Option<String> {
        self.lines.next().map(Result::unwrap)
    }

    fn signal(&self, signal: Signal) {
        kill_process(pid(&self.child), signal).unwrap();
    }
}

fn pid(child: &Child) -> Pid {
    Pid::from_raw(child.id() as i32).unwrap()
}

/// Each wish to end is passed on, and none gives the ranks more time than the first did.
#[test]
fn a_second_signal_does_not_postpone_the_kill() {
    use std::os::unix::process::ExitStatusExt;
    let script = "trap 'sleep 0.2; echo no' TERM; echo up; while :; do sleep 1; done";
    let mut job = Running::start(&["launch", "-n", "1", "--", "sh", "-c", script]);
    assert_eq!(job.line().as_deref(), Some("[0] up"));
    loop {
        job.signal(Signal::TERM);
        match job.line() {
            Some(line) => assert_eq!(line, "[0] no"),
            None => break,
        }
    }
    let status = job.child.wait().unwrap();
    assert_eq!(
        status.signal(),
        None,
        "it was the ranks that had to be killed, and not the launcher"
    );
    assert_eq!(status.code(), Some(128 + 9));
}

/// Ranks ask for any free port; they must not get the one that rank 0 was promised.
#[test]
fn the_port_of_rank_0_is_kept_for_it() {
    let script = "echo $MASTER_PORT; exec sleep 600";
    let mut job = Running::start(&["launch", "-n", "1", "--", "sh", "-c", script]);
    let line = job.line().unwrap();
    let port: u16 = line.strip_prefix("[0] ").unwrap().parse().unwrap();
    let taken = UdpSocket::bind(("127.0.0.1", port));
    assert_eq!(taken.unwrap_err().kind(), std::io::ErrorKind::AddrInUse);
    job.signal(Signal::TERM);
    job.child.wait().unwrap();
}

#[test]
fn every_job_has_a_name_that_its_ranks_share() {
    let names = |arguments: &[&str], variable: Option<&str>| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_farwire"));
        command.args(["launch", "-n", "2"]).args(arguments);
        command.args(["--", "sh", "-c", "echo \"$FARWIRE_JOB\""]).env_remove("FARWIRE_JOB");
        let output = command.envs(variable.map(|name| ("FARWIRE_JOB", name))).output().unwrap();
        assert!(output.status.success(), "{}", text(&output.stderr));
        let said = text(&output.stdout);
        let mut names: Vec<_> = said.lines().map(|line| line[4..].to_owned()).collect();
        names.dedup();
        assert_eq!(names.len(), 1, "{said}");
        names.remove(0)
    };
    let (one, other) = (names(&[], None), names(&[], None));
    assert!(!one.is_empty() && one != other, "{one} {other}");
    assert_eq!(names(&["--job", "mine"], None), "mine");
    assert_eq!(names(&[], Some("theirs")), "theirs");
    assert_eq!(names(&["--job", "mine"], Some("theirs")), "mine");
}

/// Another user may have put a link, or a folder of theirs, where records would go.
#[test]
fn flight_records_do_not_go_where_others_prepared_a_place() {
    let folder = std::env::temp_dir().join(format!("farwire-planted-{}", std::process::id()));
    let _ = std::fs::remove_dir_all(&folder);
    std::fs::create_dir_all(folder.join("elsewhere")).unwrap();
    let mine = folder.join(format!("farwire-{}", rustix::process::geteuid().as_raw()));
    let fails = |says: &str| {
        // Ranks that call different things fail, and have something to record.
        let exe = env!("CARGO_BIN_EXE_farwire");
        let script = format!(
            "[ $RANK = 0 ] && op=all_reduce || op=broadcast; exec {exe} bench $op --size 4"
        );
        let output = Command::new(exe)
            .args(["launch", "-n", "2", "--", "sh", "-c", &script])
            .env("TMPDIR", &folder)
            .env_remove("XDG_RUNTIME_DIR")
            .env_remove("FARWIRE_FLIGHT_DIR")
            .output()
            .unwrap();
        let said = text(&output.stderr);
        assert!(!output.status.success() && said.contains(says), "{said}");
    };
    let entries = |path: &Path| std::fs::read_dir(path).unwrap().count();
    symlink(folder.join("elsewhere"), &mine).unwrap();
    fails("is not safe: it is not a folder");
    assert_eq!(entries(&folder.join("elsewhere")), 0);
    std::fs::remove_file(&mine).unwrap();
    std::fs::create_dir(&mine).unwrap();
    let mode = std::os::unix::fs::PermissionsExt::from_mode;
    std::fs::set_permissions(&mine, mode(0o777)).unwrap();
    fails("chmod 700");
    assert_eq!(entries(&mine), 0);
    std::fs::set_permissions(&mine, mode(0o700)).unwrap();
    fails("who was missing? farwire doctor");
    assert_eq!(entries(&mine), 1, "the folder of the job");
    std::fs::remove_dir_all(folder).unwrap();
}

/// Otherwise users find out when a job has failed, and its records are gone.
#[test]
fn a_folder_for_flight_records_that_cannot_be_used_is_noticed_at_joining() {
    let file = std::env::temp_dir().join(format!("farwire-not-a-folder-{}", std::process::id()));
    std::fs::write(&file, "").unwrap();
    for path in [file.clone(), file.join("inside")] {
        let bench = ["bench", "barrier", "--ranks", "2", "--size", "4", "--iters", "1"];
        let mut command = Command::new(env!("CARGO_BIN_EXE_farwire"));
        let output = command.args(bench).env("FARWIRE_FLIGHT_DIR", &path).output().unwrap();
        assert!(output.status.success());
        let said = text(&output.stderr);
        assert!(
            said.contains("FARWIRE_FLIGHT_DIR") && said.contains(path.to_str().unwrap()),
            "{said}"
        );
    }
    // A folder that can be made is not made until there is something to write.
    std::fs::remove_file(&file).unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_farwire"));
    command.args(["bench", "barrier", "--ranks", "2", "--size", "4", "--iters", "1"]);
    let output = command.env("FARWIRE_FLIGHT_DIR", file.join("inside")).output().unwrap();
    assert_eq!((output.status.success(), text(&output.stderr)), (true, String::new()));
    assert!(!file.exists());
}

/// Its peers notice and fail, while it neither fails nor ends.
#[test]
fn a_rank_that_is_stopped_is_named_by_the_last_line() {
    let exe = env!("CARGO_BIN_EXE_farwire");
    let script = format!("echo pid $$; exec {exe} bench all_reduce --size 4 --iters 1000000000");
    let mut job =
        Running::start_with(&["launch", "-n", "3", "--", "sh", "-c", &script], Stdio::piped());
    let (mut victim, mut running) = (None, false);
    while victim.is_none() || !running {
        let line = job.line().unwrap();
        victim = line.strip_prefix("[2] pid ").map(|pid| pid.parse().unwrap()).or(victim);
        running |= line.contains("over 3 ranks"); // all have joined
    }
    kill_process(Pid::from_raw(victim.unwrap()).unwrap(), Signal::STOP).unwrap();
    let said = std::io::read_to_string(job.child.stderr.take().unwrap()).unwrap();
    assert!(!job.child.wait().unwrap().success());
    let last = said.lines().last().unwrap();
    assert!(last.contains("rank 2 was lost") && last.contains("stopped"), "{said}");
}

/// Runs a job whose ranks may open few files.
fn with_open_files(limit: &str) -> Output {
    let script =
        format!("ulimit {limit}; exec \"$0\" bench barrier --ranks 12 --size 4 --iters 2 --json");
    Command::new("sh").args(["-c", &script, env!("CARGO_BIN_EXE_farwire")]).output().unwrap()
}

#[test]
fn a_low_limit_on_open_files_is_raised_or_said() {
    let output = with_open_files("-Sn 80");
    let row: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((&row["link"], &row["links"]["shm"]), (&"shm".into(), &66.into()), "{row}");
    let output = with_open_files("-n 80");
    let said = text(&output.stderr);
    assert!(!output.status.success() && said.contains("ulimit -n"), "{said}");
    assert!(said.contains("FARWIRE_LINK=quic"), "{said}");
}

#[test]
fn bench_shows_the_link_that_was_used() {
    for (arguments, heading) in [
        (&["--ranks", "2"][..], "2 ranks, link shm"),
        (&["--ranks", "2", "--link", "quic"], "2 ranks, link quic"),
        (&["--ranks", "2", "--link", "tcp"], "2 ranks, link tcp"),
        (&["--ranks", "2", "--link", "inproc"], "2 ranks, link inproc"),
        (&["--ranks", "1"], "1 ranks, link none"),
    ] {
        let said = succeeds(&[&["bench", "barrier", "--iters", "2"], arguments].concat());
        assert!(said.contains(heading), "{said}");
    }
    let exe = env!("CARGO_BIN_EXE_farwire");
    let tcp = format!("FARWIRE_LINK=tcp exec {exe} bench barrier --iters 2 --ranks 2");
    let output = Command::new("sh").args(["-c", &tcp]).output().unwrap();
    assert!(text(&output.stdout).contains("2 ranks, link tcp"), "{}", text(&output.stderr));
    // One of three was told to use QUIC: its two pairs do.
    let script =
        format!("[ $RANK = 2 ] && export FARWIRE_LINK=quic; exec {exe} bench barrier --iters 2");
    let said = succeeds(&["launch", "-n", "3", "--", "sh", "-c", &script]);
    assert!(said.contains("link shm (1 pairs), quic (2 pairs)"), "{said}");
    let said = succeeds(&["launch", "-n", "3", "--", "sh", "-c", &format!("{script} --json")]);
    assert!(
        said.contains(
            "\"link\":\"shm+quic\",\"links\":{\"shm\":1,\"tcp\":0,\"quic\":2,\"inproc\":0}"
        ),
        "{said}"
    );
}

#[test]
fn doctor_measures_both_links_between_hosts() {
    let doctor = env!("CARGO_BIN_EXE_farwire");
    let on_hosts = |link: &str| {
        let rank = format!("{link} FARWIRE_HOST=host$RANK exec {doctor} doctor");
        succeeds(&["launch", "-n", "2", "--", "sh", "-c", &rank])
    };
    let said = on_hosts("");
    assert!(said.contains("The same over quic, which is not taken here"), "{said}");
    assert!(
        said.contains("over quic, and ") && said.contains("bit/s over what is taken"),
        "{said}"
    );
    let bandwidths = |said: &str| said.matches("bit/s\n").count();
    assert_eq!(bandwidths(&said), 2 * bandwidths(&on_hosts("FARWIRE_LINK=tcp")), "{said}");
}

#[test]
fn every_rank_is_told_where_it_stands_and_its_lines_are_marked() {
    let script =
        "echo rank $RANK of $WORLD_SIZE, local $LOCAL_RANK of $LOCAL_WORLD_SIZE at $MASTER_ADDR";
    let said = succeeds(&["launch", "-n", "3", "--", "sh", "-c", script]);
    let mut lines: Vec<_> = said.lines().collect();
    lines.sort_unstable();
    let expected: Vec<_> =
        (0..3).map(|r| format!("[{r}] rank {r} of 3, local {r} of 3 at 127.0.0.1")).collect();
    assert_eq!(lines, expected);
}

#[test]
fn one_ranks_failure_ends_the_rest_with_its_code_and_last_lines() {
    let script = "if [ $RANK = 1 ]; then echo about to fail; exit 7; else exec sleep 600; fi";
    let output = farwire(&["launch", "-n", "3", "--", "sh", "-c", script]);
    assert_eq!(output.status.code(), Some(7));
    let said = text(&output.stderr);
    assert!(said.contains("rank 1 failed first") && said.contains("about to fail"), "{said}");
}

/// Nothing that ranks print can make the launcher remember much, and lines printed at once stay
/// apart.
#[test]
fn long_lines_come_in_pieces_and_do_not_mix() {
    let script = "i=0; while [ $i -lt 20 ]; do head -c 200000 /dev/zero | tr '\\0' $RANK; echo; i=$((i+1)); done";
    let said = succeeds(&["launch", "-n", "4", "--", "sh", "-c", script]);
    let mut bytes = [0; 4];
    for line in said.lines() {
        let rank = line[1..].chars().next().unwrap();
        let text = line.strip_prefix(&format!("[{rank}] ")).unwrap();
        assert!(text.len() <= 64 << 10);
        assert!(text.chars().all(|digit| digit == rank), "lines of two ranks have mixed");
        bytes[rank.to_digit(10).unwrap() as usize] += text.len();
    }
    assert_eq!(bytes, [20 * 200_000; 4], "nothing is lost");
}

#[test]
fn ranks_do_not_outlive_a_killed_launcher() {
    let mut launcher = Command::new(env!("CARGO_BIN_EXE_farwire"))
        .args(["launch", "-n", "3", "--", "sh", "-c", "echo $$; exec sleep 600"])
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let lines = BufReader::new(launcher.stdout.take().unwrap()).lines().take(3);
    let pids: Vec<String> =
        lines.map(|line| line.unwrap().split_whitespace().nth(1).unwrap().to_owned()).collect();
    launcher.kill().unwrap();
    launcher.wait().unwrap();
    for pid in pids {
        // Gone, or dead and not yet reaped by the process that inherited it.
        let state = || std::fs::read_to_string(format!("/proc/{pid}/stat"));
        while state().is_ok_and(|state| !state.contains(") Z ")) {
            std::thread::yield_now();
        }
    }
}

/// A process that a rank started and left behind neither hides its end nor outlives the job.
#[test]
fn leftovers_of_a_failed_rank_hold_nothing_up() {
    let output = farwire(&[
        "launch",
        "-n",
        "2",
        "--",
        "sh",
        "-c",
        "if [ $RANK = 1 ]; then sleep 600 & exit 3; fi; sleep 600",
    ]);
    assert_eq!(output.status.code(), Some(3));
}

#[test]
fn a_rank_killed_by_a_signal_ends_the_rest_as_shells_do() {
    let output = farwire(&[
        "launch",
        "-n",
        "2",
        "--",
        "sh",
        "-c",
        "if [ $RANK = 0 ]; then kill -9 $$; else exec sleep 600; fi",
    ]);
    assert_eq!(output.status.code(), Some(128 + 9));
}

#[test]
fn wrong_launches_are_refused_with_what_to_do() {
    for (arguments, says) in [
        (&["launch", "-n", "2", "--", "/no/such/program"][..], "could not start"),
        (&["launch", "-n", "2"], "COMMAND"),
        (&["launch", "-n", "0", "--", "true"], "1..=1024"),
        (&["launch", "--job", "", "--", "true"], "write 1 to 255"),
        (&["launch", "--job", &"x".repeat(10 << 10), "--", "true"], "write 1 to 255"),
        (&["launch", "--nnodes", "2", "--node-rank", "2", "--", "true"], "machines count from 0"),
        (&["launch", "--nnodes", "2", "--master", "nohost", "--", "true"], "HOST:PORT"),
        (&["launch", "--nnodes", "2", "--", "true"], "export FARWIRE_TOKEN=$(farwire token)"),
        (&["launch", "--elastic", "--max", "3", "-n", "4", "--", "true"], "start fewer"),
        (&["launch", "--elastic", "--min", "5", "-n", "4", "--", "true"], "end at once"),
        (&["train", "--elastic", "--shard-optimizer"], "the only copy of its share"),
        (&["train", "--elastic", "--dp", "2"], "as many replicas as the ranks make"),
        (&["bench", "all_reduce", "--size", "5", "--ranks", "2"], "whole number of f32 elements"),
        (&["bench", "all_reduce", "--link", "inproc"], "say how many with --ranks"),
        (&["bench", "all_reduce", "--codec", "zip"], "none"),
        (&["bench", "codec", "--codec", "auto"], "name one"),
        (&["bench", "broadcast", "--codec", "auto"], "--codec auto cannot serve broadcast"),
        (&["bench", "all_reduce"], "farwire launch -n 4"),
    ] {
        let output = Command::new(env!("CARGO_BIN_EXE_farwire"))
            .args(arguments)
            .env_remove("FARWIRE_TOKEN")
            .output()
            .unwrap();
        assert!(!output.status.success(), "{arguments:?}");
        let said = text(&output.stderr);
        assert!(said.contains(says) && !said.contains("panicked"), "{arguments:?}: {said}");
    }
}

#[test]
fn tokens_are_random_and_accepted() {
    let tokens = [succeeds(&["token"]), succeeds(&["token"])];
    assert_ne!(tokens[0], tokens[1]);
    for token in tokens {
        assert!(token.trim().parse::<farwire::Token>().is_ok());
    }
}

#[test]
fn bench_measures_and_checks_every_operation_over_every_link() {
    for link in farwire::link_names() {
        for kind in farwire_proto::Kind::ALL {
            let arguments = [
                "bench",
                kind.name(),
                "--ranks",
                "3",
                "--link",
                link,
                "--size",
                "0,12,120000",
                "--iters",
                "3",
                "--check",
                "--json",
            ];
            let said = succeeds(&arguments);
            let rows: Vec<Value> =
                said.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
            assert_eq!(rows.len(), 3, "{said}");
            for row in rows {
                assert_eq!(row["wrong"], 0, "{link}: {row}");
                assert_eq!(
                    (&row["op"], &row["link"], &row["codec"]),
                    (&kind.name().into(), &link.into(), &"none".into())
                );
                for field in [
                    "ranks",
                    "bytes",
                    "p50_us",
                    "p99_us",
                    "algbw_gbs",
                    "busbw_gbs",
                    "wire_bytes",
                    "cpu_s",
                    "bare_cpu_s",
                ] {
                    assert!(row[field].is_number(), "{field} in {row}");
                }
            }
        }
    }
}

#[test]
fn bench_says_what_auto_chose_and_gets_what_that_gives() {
    for op in ["all_reduce", "reduce_scatter", "all_gather"] {
        for codec in ["auto", "auto:topk:0.01"] {
            let arguments =
                ["--ranks", "3", "--link", "quic", "--size", "12,120000,3145728", "--iters", "2"];
            let said = succeeds(
                &[&["bench", op, "--codec", codec][..], &arguments, &["--check", "--json"]]
                    .concat(),
            );
            let rows: Vec<Value> =
                said.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
            assert_eq!(rows.len(), 3, "{said}");
            for row in &rows {
                assert_eq!((&row["wrong"], &row["codec"]), (&0.into(), &codec.into()), "{row}");
                let chosen = row["chosen"].as_str().unwrap();
                assert!(["none", "bf16", "int8", "topk:0.01"].contains(&chosen), "{row}");
            }
            assert_eq!(
                rows[0]["chosen"], "none",
                "what is shorter than all that is measured stays dense"
            );
        }
    }
}

/// The examples that newcomers copy, as a job of processes.
#[test]
fn examples_run_under_launch() {
    for (name, says) in [
        ("all_reduce", "sum 6"),
        ("send_recv", "the others add up to 6"),
        ("split", "sum 4"),
        ("call", "works on batch 7"),
        ("foreign_memory", "of 4: 1.5"),
    ] {
        let program = example(name);
        let said = succeeds(&["launch", "-n", "4", "--", program.to_str().unwrap()]);
        assert!(said.contains(says), "{name}: {said}");
    }
}

/// Builds an example of the library as it is now. All crates are built together, as for the tests:
/// one crate alone has its dependencies built once more, with other features.
fn example(name: &str) -> PathBuf {
    let mut build = Command::new(env!("CARGO"));
    build.args(["build", "--workspace", "--example", name]);
    let built = build.args((!cfg!(debug_assertions)).then_some("--release")).status();
    assert!(built.unwrap().success());
    Path::new(env!("CARGO_BIN_EXE_farwire")).with_file_name("examples").join(name)
}
