//! `farwire launch`, `farwire bench` and `farwire token` as their users meet them.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on should say where")]

use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};

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

#[test]
fn every_rank_is_told_where_it_stands_and_its_lines_are_marked() {
    let script = "echo rank $RANK of $WORLD_SIZE, local $LOCAL_RANK of $LOCAL_WORLD_SIZE at $MASTER_ADDR";
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

/// Nothing that ranks say can make the launcher remember much, and what they say at once stays apart.
#[test]
fn long_lines_come_in_pieces_and_do_not_mix() {
    let script =
        "i=0; while [ $i -lt 20 ]; do head -c 200000 /dev/zero | tr '\\0' $RANK; echo; i=$((i+1)); done";
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
        // Gone, or dead and not yet reaped by whoever inherited it.
        let state = || std::fs::read_to_string(format!("/proc/{pid}/stat"));
        while state().is_ok_and(|state| !state.contains(") Z ")) {
            std::thread::yield_now();
        }
    }
}

/// What a rank started and left behind neither hides its end nor outlives the job.
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
        (&["launch", "--nnodes", "2", "--node-rank", "2", "--", "true"], "machines count from 0"),
        (&["launch", "--nnodes", "2", "--master", "nohost", "--", "true"], "HOST:PORT"),
        (&["launch", "--nnodes", "2", "--", "true"], "export FARWIRE_TOKEN=$(farwire token)"),
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
    for link in ["inproc", "shm", "quic"] {
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
            let rows: Vec<Value> = said.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
            assert_eq!(rows.len(), 3, "{said}");
            for row in rows {
                assert_eq!(row["wrong"], 0, "{link}: {row}");
                assert_eq!(
                    (&row["op"], &row["link"], &row["codec"]),
                    (&kind.name().into(), &link.into(), &"none".into())
                );
                for field in
                    ["ranks", "bytes", "p50_us", "p99_us", "algbw_gbs", "busbw_gbs", "wire_bytes", "cpu_s"]
                {
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
            let arguments = ["--ranks", "3", "--link", "quic", "--size", "12,120000,3145728", "--iters", "2"];
            let said = succeeds(
                &[&["bench", op, "--codec", codec][..], &arguments, &["--check", "--json"]].concat(),
            );
            let rows: Vec<Value> = said.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
            assert_eq!(rows.len(), 3, "{said}");
            for row in &rows {
                assert_eq!((&row["wrong"], &row["codec"]), (&0.into(), &codec.into()), "{row}");
                let chosen = row["chosen"].as_str().unwrap();
                assert!(["none", "bf16", "int8", "topk:0.01"].contains(&chosen), "{row}");
            }
            assert_eq!(rows[0]["chosen"], "none", "what is shorter than all that is measured stays dense");
        }
    }
}

/// The examples that newcomers copy, as a job of processes.
#[test]
fn examples_run_under_launch() {
    let examples = PathBuf::from(env!("CARGO_BIN_EXE_farwire")).with_file_name("examples");
    for (name, says) in [
        ("all_reduce", "sum 6"),
        ("send_recv", "the others add up to 6"),
        ("split", "sum 4"),
        ("call", "works on batch 7"),
        ("foreign_memory", "of 4: 1.5"),
    ] {
        let program = examples.join(name);
        if !program.exists() {
            let built = Command::new(env!("CARGO"))
                .args(["build", "-p", "farwire", "--example", name])
                .status()
                .unwrap();
            assert!(built.success());
        }
        let said = succeeds(&["launch", "-n", "4", "--", program.to_str().unwrap()]);
        assert!(said.contains(says), "{name}: {said}");
    }
}
