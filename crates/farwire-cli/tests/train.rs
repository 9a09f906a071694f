//! `farwire train` as its users meet it.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on should say where")]

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

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
    command(dir, arguments).output().unwrap()
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

struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("farwire-train-{name}-{}", std::process::id()));
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
    for says in
        ["2 ranks (dp=2)", "step 6/6 loss", "tokens/s", "ratio", "hidden", "what it writes", "report.html"]
    {
        assert!(said.contains(says), "{says}: {said}");
    }
    let page = std::fs::read_to_string(dir.0.join("report.html")).unwrap();
    for has in
        ["<!doctype html>", "Loss by step", "Loss by bytes sent", "Time of a step", "Bytes per step", "<svg"]
    {
        assert!(page.contains(has), "{has}");
    }
    assert!(!page.contains("http") && !page.contains("<script"), "nothing to load");
    assert!(!page.contains("NaN") && !page.contains("inf"), "all places are numbers");
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
        assert!(line["wire_bytes"].as_u64() >= line["dense_bytes"].as_u64(), "{line}");
    }
    let summary = &lines[9];
    assert_eq!((&summary["event"], &summary["codec"]), (&"summary".into(), &"none".into()));
    let page = std::fs::read_to_string(dir.0.join("report.html")).unwrap();
    assert_eq!(page.matches("Time of a step on rank 0: none").count(), 2);
}

#[test]
fn every_axis_works_from_the_command_line_and_under_launch() {
    let dir = Folder::new("axes");
    let alone = losses(&json(&dir.0, "--ranks 1 --steps 3"));
    let mixed = losses(&json(&dir.0, "--ranks 4 --tp 2 --pp 2 --micro-batches 2 --schedule gpipe --steps 3"));
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
    assert!(output.status.success() && said.contains("[0] a GPT") && said.contains("dp=2"), "{said}");
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

/// Ctrl-C ends a run with a checkpoint, and the run that goes on from it is the one that was not interrupted.
#[test]
fn an_interrupted_run_leaves_a_checkpoint_and_goes_on() {
    let dir = Folder::new("interrupt");
    std::fs::write(dir.0.join("data.txt"), "a text of one's own, again and again. ".repeat(50)).unwrap();
    let job = "--ranks 2 --data data.txt --seed 5 --steps 60";
    let whole = losses(&json(&dir.0, job));

    let arguments = format!("{job} --checkpoint kept --json");
    let mut child = command(&dir.0, &arguments).stdout(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    for _ in 0..5 {
        lines.next().unwrap().unwrap();
    }
    // As `timeout` does it, which signals a process and then its group: that is one wish to end, not two. Two kinds, for two of one kind may arrive as one.
    for wish in [Signal::INT, Signal::TERM] {
        kill_process(Pid::from_raw(child.id() as i32).unwrap(), wish).unwrap();
    }
    let rest: Vec<Value> = lines.map(|line| serde_json::from_str(&line.unwrap()).unwrap()).collect();
    assert!(child.wait().unwrap().success());
    let summary = rest.last().unwrap();
    assert_eq!((&summary["event"], &summary["stopped"]), (&"summary".into(), &true.into()));
    let done = summary["steps"].as_u64().unwrap();
    assert!((5..60).contains(&done), "{done}");

    let lines = json(&dir.0, &format!("{job} --checkpoint kept --resume"));
    assert_eq!(losses(&lines), whole[done as usize..]);
    assert_eq!(lines.last().unwrap()["steps"], 60, "the report has the whole run");
}

/// A terminal that goes away takes nothing with it.
#[test]
fn a_run_whose_terminal_goes_away_leaves_a_checkpoint() {
    let dir = Folder::new("hangup");
    let arguments = "--ranks 2 --steps 4000 --checkpoint kept --json";
    let mut child = command(&dir.0, arguments).stdout(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    for _ in 0..3 {
        lines.next().unwrap().unwrap();
    }
    kill_process(Pid::from_raw(child.id() as i32).unwrap(), Signal::HUP).unwrap();
    let rest: Vec<Value> = lines.map(|line| serde_json::from_str(&line.unwrap()).unwrap()).collect();
    assert!(child.wait().unwrap().success());
    let summary = rest.last().unwrap();
    assert_eq!((&summary["event"], &summary["stopped"]), (&"summary".into(), &true.into()));
    assert!(dir.0.join("kept").read_dir().unwrap().next().is_some());
}

#[test]
fn wrong_flags_are_refused_with_what_to_use() {
    let dir = Folder::new("wrong");
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
        ("--data /no/such/file", "could not read /no/such/file"),
        ("--ranks 1 --checkpoint none-here --resume --report r.html", "start without resuming"),
        ("--ranks 1 --steps 1 --report /no/such/folder/r.html", "could not write"),
        ("--ranks 1 --init /no/such/file", "/no/such/file"),
    ] {
        let output = farwire(&dir.0, arguments);
        let said = text(&output.stderr);
        assert!(!output.status.success() && said.contains(says), "`{arguments}`: {said}");
        assert!(!said.contains("panicked"), "{said}");
    }
    let output = command(&dir.0, "--ranks 3")
        .envs([("RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "29500")])
        .output()
        .unwrap();
    assert!(text(&output.stderr).contains("leave --ranks out"), "{}", text(&output.stderr));
}
