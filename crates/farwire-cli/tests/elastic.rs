//! `farwire launch --elastic` and `farwire train --join` as their users meet them: ranks are
//! killed, and others take their place.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on should say where")]

use std::collections::HashMap;
use std::io::{BufRead, BufReader, Lines, Read};
use std::path::Path;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::time::Duration;

use farwire::LinkChoice;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

/// A run of small steps that goes on until it is told to stop.
const TRAIN: &str = "train --layers 2 --heads 2 --width 16 --context 16 --batch 12 --codec int8 \
                     --json --steps 1000000";

fn kill(pid: u32, signal: Signal) {
    kill_process(Pid::from_raw(pid as i32).unwrap(), signal).unwrap();
}

/// Kills a process after two minutes, unless the returned value is dropped before.
fn limit(child: &Child) -> Sender<()> {
    let (ended, end) = mpsc::channel();
    let pid = child.id();
    std::thread::spawn(move || {
        if end.recv_timeout(Duration::from_secs(120)) == Err(RecvTimeoutError::Timeout) {
            kill(pid, Signal::KILL);
        }
    });
    ended
}

/// A launcher and its ranks.
struct Job {
    launcher: Child,
    lines: Lines<BufReader<ChildStdout>>,
    /// The last change of the group that was reported.
    epoch: u64,
    _limit: Sender<()>,
}

impl Job {
    fn start(folder: &Path, link: &str, restarts: &str, more: &[&str]) -> Self {
        let more = [&TRAIN.split_whitespace().collect::<Vec<_>>(), more].concat();
        Self::launch(folder, link, &["-n", "3", "--restarts", restarts], &more)
    }

    fn launch(folder: &Path, link: &str, launch: &[&str], train: &[&str]) -> Self {
        Self::launch_with(folder, &[("FARWIRE_LINK", link)], launch, train)
    }

    fn launch_with(
        folder: &Path,
        variables: &[(&str, &str)],
        launch: &[&str],
        train: &[&str],
    ) -> Self {
        Self::of(&mut Self::command(folder, variables, launch, train))
    }

    fn command(
        folder: &Path,
        variables: &[(&str, &str)],
        launch: &[&str],
        train: &[&str],
    ) -> Command {
        let farwire = env!("CARGO_BIN_EXE_farwire");
        let mut command = Command::new(farwire);
        command
            .args(["launch", "--elastic"])
            .args(launch)
            .args(["--", farwire])
            .args(train)
            .arg("--elastic")
            .current_dir(folder)
            .envs(variables.iter().copied())
            .env("FARWIRE_FLIGHT_DIR", "");
        command
    }

    fn of(command: &mut Command) -> Self {
        let mut launcher = command.stdout(Stdio::piped()).spawn().unwrap();
        let _limit = limit(&launcher);
        let lines = BufReader::new(launcher.stdout.take().unwrap()).lines();
        Self { launcher, lines, epoch: 0, _limit }
    }

    /// The next event of a kind, from whichever rank speaks for the others by then.
    fn next(&mut self, event: &str) -> Value {
        for line in &mut self.lines {
            let line = line.unwrap();
            let said = line.split_once("] ").and_then(|(_, said)| serde_json::from_str(said).ok());
            if let Some(said) = said.filter(|said: &Value| said["event"] == event) {
                return said;
            }
        }
        panic!("the job ended before its next {event}");
    }

    /// Waits until the group has changed to `ranks` ranks. A change is reported again if the rank
    /// that reported it was lost before the next in line had ended its step.
    fn changed_to(&mut self, ranks: u64) -> Value {
        let change = loop {
            let change = self.next("change");
            if change["epoch"].as_u64().unwrap() > self.epoch {
                break change;
            }
        };
        self.epoch = change["epoch"].as_u64().unwrap();
        assert_eq!(change["ranks"].as_u64(), Some(ranks), "{change}");
        self.next("step");
        change
    }

    /// Kills the process that was started as this rank.
    fn kill(&self, rank: u32) {
        kill(self.rank(rank).0, Signal::KILL);
    }

    /// Tells the job to stop, and checks that it ends with replicas that have the same bits.
    fn end_alike(mut self) {
        kill(self.launcher.id(), Signal::TERM);
        let summary = self.next("summary");
        let last = summary["changes"].as_array().unwrap().last().unwrap();
        assert_eq!(last, "at the end, all replicas have the same bits", "{summary}");
        assert_eq!(self.launcher.wait().unwrap().code(), Some(128 + 15), "it was told to stop");
    }

    /// The launcher's children, and the letters of their states.
    fn children(&self) -> impl Iterator<Item = (u32, String)> {
        let processes = std::fs::read_dir("/proc").unwrap();
        let ids = processes.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
        ids.filter_map(|id: u32| {
            let stat = std::fs::read_to_string(format!("/proc/{id}/stat")).ok()?;
            let mut words = stat.rsplit_once(") ")?.1.split(' ');
            let (state, parent) = (words.next()?, words.next()?.parse::<u32>().ok()?);
            (self.launcher.id() == parent).then(|| (id, state.to_owned()))
        })
    }

    /// The process that was started as a rank, and its environment.
    fn rank(&self, rank: u32) -> (u32, HashMap<String, String>) {
        let environment = |(id, _): (u32, String)| {
            let text = std::fs::read_to_string(format!("/proc/{id}/environ")).ok()?;
            let variables = text.split('\0').filter_map(|it| it.split_once('='));
            let variables: HashMap<_, _> =
                variables.map(|(name, value)| (name.to_owned(), value.to_owned())).collect();
            Some((id, variables))
        };
        let mut ranks = self.children().filter_map(environment);
        let is_it = |variables: &HashMap<_, _>| variables.get("RANK") == Some(&rank.to_string());
        ranks.find(|(_, variables)| is_it(variables)).unwrap()
    }
}

/// Rank 0, which speaks for the others, is killed: one that the launcher starts takes its place.
/// Then the next one is killed, and a rank that was started by hand takes its place. All end with
/// the same weights.
#[test]
fn a_run_goes_on_when_those_that_speak_for_it_are_killed_and_others_join() {
    let name = format!("farwire-elastic-{}", std::process::id());
    let folder = std::env::temp_dir().join(name);
    std::fs::create_dir_all(&folder).unwrap();
    for link in LinkChoice::all().skip(1).map(LinkChoice::name) {
        let mut job = Job::start(&folder, link, "1", &[]);
        job.next("step");
        kill(job.rank(0).0, Signal::KILL);
        job.changed_to(2);
        job.changed_to(3);
        assert!(job.children().all(|(_, state)| state != "Z"), "nothing is kept of the lost");
        kill(job.rank(1).0, Signal::KILL);
        job.changed_to(2);

        let (_, variables) = job.rank(2);
        let join = |more: &[&str]| {
            Command::new(env!("CARGO_BIN_EXE_farwire"))
                .args(TRAIN.split_whitespace())
                .args(more)
                .args(["--join", &format!("127.0.0.1:1,127.0.0.1:{}", variables["FARWIRE_PORT"])])
                .current_dir(&folder)
                .envs(["FARWIRE_TOKEN", "FARWIRE_JOB"].map(|name| (name, &variables[name])))
                .envs([("FARWIRE_LINK", link), ("FARWIRE_FLIGHT_DIR", "")])
                .stdout(Stdio::null())
                .stderr(Stdio::piped())
                .spawn()
                .unwrap()
        };
        let other_data = folder.join("data");
        std::fs::write(&other_data, "another text, long enough to learn from. ".repeat(9)).unwrap();
        for (more, says) in [
            (["--lr", "0.5"], "wants to join has \"learning_rate 0.5\", rank"),
            (["--data", other_data.to_str().unwrap()], "wants to join has \"data of 369 bytes"),
        ] {
            let stranger = join(&more);
            let _limit = limit(&stranger);
            let ended = stranger.wait_with_output().unwrap();
            let said = String::from_utf8_lossy(&ended.stderr).into_owned();
            assert_eq!(ended.status.code(), Some(69), "{said}");
            assert!(said.contains(says), "{said}");
        }
        let before = job.epoch;

        let mut joiner = join(&[]);
        let _limit = limit(&joiner);
        job.changed_to(3);
        assert_eq!(job.epoch, before + 1, "the one that was refused has cost the others nothing");

        // The one that speaks is told to leave: the others go on, and none is started in its place.
        kill(job.rank(2).0, Signal::USR1);
        job.changed_to(2);

        kill(job.launcher.id(), Signal::TERM);
        let summary = job.next("summary");
        let last = summary["changes"].as_array().unwrap().last().unwrap();
        assert_eq!(last, "at the end, all replicas have the same bits", "{summary}");
        assert_eq!(job.launcher.wait().unwrap().code(), Some(128 + 15), "it was told to stop");
        assert_eq!(joiner.wait().unwrap().code(), Some(128 + 15), "and it told the others");
    }
    std::fs::remove_dir_all(folder).unwrap();
}

/// The step of the newest checkpoint in a folder.
fn newest(kept: &Path) -> Option<u64> {
    let names = std::fs::read_dir(kept).unwrap();
    let names = names.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
    names.filter_map(|name| name.strip_prefix("step-")?.parse::<u64>().ok()).max()
}

/// Rank 0, which writes checkpoints, is killed: the next writes them. Then all are killed, and
/// another job goes on from there.
#[test]
fn a_run_whose_ranks_are_all_lost_goes_on_from_its_checkpoint() {
    let name = format!("farwire-elastic-kept-{}", std::process::id());
    let folder = std::env::temp_dir().join(name);
    std::fs::create_dir_all(&folder).unwrap();
    let newest = || newest(&folder.join("kept"));
    let keep = ["--checkpoint", "kept", "--checkpoint-every", "2"];
    let mut job = Job::start(&folder, "shm", "0", &keep);
    (0..3).for_each(|_| drop(job.next("step")));
    let before = newest().unwrap();
    kill(job.rank(0).0, Signal::KILL);
    job.changed_to(2);
    (0..4).for_each(|_| drop(job.next("step")));
    let after = newest().unwrap();
    assert!(after > before, "{after}, {before}: another rank has written one");
    for rank in [1, 2] {
        kill(job.rank(rank).0, Signal::KILL);
    }
    job.launcher.wait().unwrap();

    let after = newest().unwrap();
    let mut job = Job::start(&folder, "shm", "0", &[&keep[..], &["--resume"]].concat());
    let first = job.next("step");
    assert_eq!(first["step"].as_u64(), Some(after), "steps count from 0: {first}");
    kill(job.launcher.id(), Signal::TERM);
    let summary = job.next("summary");
    let last = summary["changes"].as_array().unwrap().last().unwrap();
    assert_eq!(last, "at the end, all replicas have the same bits", "{summary}");
    assert_eq!(job.launcher.wait().unwrap().code(), Some(128 + 15));
    assert!(newest().unwrap() > after, "and one was written at the end");
    std::fs::remove_dir_all(&folder).unwrap();
}

/// A folder for a test, which is removed when it has succeeded.
fn with_folder(name: &str, test: impl FnOnce(&Path)) {
    let folder = std::env::temp_dir().join(format!("farwire-{name}-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    test(&folder);
    std::fs::remove_dir_all(&folder).unwrap();
}

/// Rank 0 is killed, and then two others, and each time another joins: all steps are made, the loss
/// is that of an undisturbed run, the bits are the same after every step, and the report has all
/// six changes.
#[test]
fn three_kills_and_three_joins_end_with_the_loss_of_an_undisturbed_run() {
    let short = TRAIN.replace("--steps 1000000", "--steps 400 --audit");
    with_folder("six", |folder| {
        for codec in ["int8", "topk:0.01"] {
            let train = short.replace("int8", codec);
            let train: Vec<_> = train.split_whitespace().collect();
            let run = |kills: usize| {
                let restarts = kills.to_string();
                let launch = ["-n", "4", "--restarts", &restarts];
                let mut job = Job::launch(folder, "shm", &launch, &train);
                let mut seen = 0;
                // The oldest, which is rank 0, and then those that took the places of others.
                for victim in [0, 4, 5].into_iter().take(kills) {
                    (0..50).for_each(|_| seen = job.next("step")["step"].as_u64().unwrap());
                    job.kill(victim);
                    job.changed_to(3);
                    job.changed_to(4);
                }
                let summary = job.next("summary");
                assert!(seen < 400, "the kills come before the end");
                let changes = summary["changes"].as_array().unwrap();
                assert_eq!(changes.len(), 2 * kills + 1, "{summary}");
                assert_eq!(changes[2 * kills], "at the end, all replicas have the same bits");
                let report = std::fs::read_to_string(folder.join("report.html")).unwrap();
                for change in changes {
                    assert!(report.contains(change.as_str().unwrap()), "{change}");
                }
                assert_eq!(summary["steps"].as_u64(), Some(400), "{summary}");
                assert!(job.launcher.wait().unwrap().success());
                summary["final_loss"].as_f64().unwrap()
            };
            let (whole, disturbed) = (run(0), run(3));
            println!("{codec}: loss {disturbed:.4}, undisturbed {whole:.4}");
            assert!((disturbed / whole - 1.0).abs() < 0.02, "{codec}: {disturbed} and {whole}");
        }
    });
}

/// Two replicas of two ranks each: with layers in common, and with stages.
const LAYOUTS: [&[&str]; 2] = [&["--tp", "2"], &["--pp", "2", "--micro-batches", "2"]];

/// A rank is killed, even rank 0: the other replica finishes the run, and ends with the loss of a
/// run that was not disturbed.
#[test]
fn the_other_replica_finishes_a_run_that_has_lost_a_rank() {
    let short = TRAIN.replace("--steps 1000000", "--steps 150");
    let train: Vec<_> = short.split_whitespace().collect();
    with_folder("replica", |folder| {
        for layout in LAYOUTS {
            let train = [&train[..], layout].concat();
            let run = |victim: Option<u32>| {
                let mut job = Job::launch(folder, "shm", &["-n", "4", "--restarts", "0"], &train);
                (0..10).for_each(|_| drop(job.next("step")));
                if let Some(victim) = victim {
                    job.kill(victim);
                    let change = job.changed_to(3);
                    assert_eq!((&change["replicas"], &change["waiting"]), (&1.into(), &1.into()));
                }
                let summary = job.next("summary");
                let last = summary["changes"].as_array().unwrap().last().unwrap();
                assert_eq!(last, "at the end, all replicas have the same bits", "{summary}");
                assert!(job.launcher.wait().unwrap().success());
                summary["final_loss"].as_f64().unwrap()
            };
            let whole = run(None);
            for victim in [0, 3] {
                let left = run(Some(victim));
                println!("{layout:?} without {victim}: loss {left:.4}, undisturbed {whole:.4}");
                assert!((left / whole - 1.0).abs() < 0.04, "{layout:?}: {left} and {whole}");
            }
        }
    });
}

/// The launcher starts another in place of the rank that was killed: together with the one that
/// waits, it makes a whole replica. Then two ranks of different replicas are killed at once, and
/// the two that are left make a whole one.
#[test]
fn a_broken_replica_is_whole_again_when_another_joins() {
    let train: Vec<_> = TRAIN.split_whitespace().collect();
    with_folder("whole", |folder| {
        for layout in LAYOUTS {
            let train = [&train[..], layout].concat();
            let mut job = Job::launch(folder, "shm", &["-n", "4", "--restarts", "3"], &train);
            job.next("step");
            job.kill(1);
            job.changed_to(3);
            let change = job.changed_to(4);
            assert_eq!((&change["replicas"], &change["waiting"]), (&2.into(), &0.into()));
            // By now ranks 2 and 3 are a replica, and 0 and the new one are the other.
            for rank in [0, 3] {
                job.kill(rank);
            }
            while job.next("change")["ranks"] != 4 {}
            job.next("step");
            job.end_alike();
        }
    });
}

/// A replica is broken, and the first rank of the other one becomes the first of all: it writes
/// checkpoints, while the rank that wrote them before lives on.
#[test]
fn checkpoints_go_on_when_the_one_that_wrote_them_gets_another_place() {
    let train: Vec<_> = TRAIN.split_whitespace().collect();
    with_folder("writers", |folder| {
        let keep = ["--checkpoint", "kept", "--checkpoint-every", "2"];
        let train = [&train[..], LAYOUTS[0], &keep].concat();
        let mut job = Job::launch(folder, "shm", &["-n", "4", "--restarts", "1"], &train);
        (0..3).for_each(|_| drop(job.next("step")));
        job.kill(1);
        job.changed_to(3);
        job.changed_to(4);
        let before = newest(&folder.join("kept"));
        (0..6).for_each(|_| drop(job.next("step")));
        assert!(newest(&folder.join("kept")) > before, "{before:?}");
        job.end_alike();
    });
}

/// A rank that waits for others in vain leaves after a while, and says how to come back. Two ranks
/// that are started by hand come back, as a whole replica.
#[test]
fn a_rank_without_a_replica_leaves_and_others_join_as_a_whole_one() {
    let train: Vec<_> = TRAIN.split_whitespace().collect();
    with_folder("leaves", |folder| {
        let train = [&train[..], LAYOUTS[0]].concat();
        let impatient = [&train[..], &["--wait", "100ms"]].concat();
        let mut job = Job::launch(folder, "shm", &["-n", "4", "--restarts", "0"], &impatient);
        job.next("step");
        job.kill(3);
        job.changed_to(3);
        job.changed_to(2);
        let (_, variables) = job.rank(0);
        let address = format!("127.0.0.1:{}", variables["MASTER_PORT"]);
        let train = [&train[..], &["--join", &address]].concat();
        let joiners = [(); 2].map(|()| {
            Command::new(env!("CARGO_BIN_EXE_farwire"))
                .args(&train)
                .current_dir(folder)
                .envs(["FARWIRE_TOKEN", "FARWIRE_JOB"].map(|name| (name, &variables[name])))
                .envs([("FARWIRE_LINK", "shm"), ("FARWIRE_FLIGHT_DIR", "")])
                .stdout(Stdio::null())
                .stderr(Stdio::piped())
                .spawn()
                .unwrap()
        });
        let _limits = joiners.each_ref().map(limit);
        let change = job.changed_to(3);
        assert_eq!((&change["replicas"], &change["waiting"]), (&1.into(), &1.into()), "{change}");
        let change = job.changed_to(4);
        assert_eq!((&change["replicas"], &change["waiting"]), (&2.into(), &0.into()), "{change}");
        job.end_alike();
        for joiner in joiners {
            let ended = joiner.wait_with_output().unwrap();
            let said = String::from_utf8_lossy(&ended.stderr).into_owned();
            assert_eq!(ended.status.code(), Some(128 + 15), "{said}");
            for line in ["calling 127.0.0.1:", "joined as rank", "the run was stopped after step"] {
                assert!(said.contains(line), "{said}");
            }
        }
    });
}

/// Both ranks that had a share of the model are killed: the others end, say where to go on from,
/// and no other is started in their place.
#[test]
fn a_run_without_a_whole_replica_ends_and_names_its_checkpoint() {
    let train: Vec<_> = TRAIN.split_whitespace().collect();
    with_folder("broken", |folder| {
        let keep = ["--checkpoint", "kept", "--checkpoint-every", "2"];
        let train = [&train[..], LAYOUTS[0], &keep].concat();
        // Stopped first, so that neither can be missed before the other.
        let launch = ["-n", "4", "--restarts", "9"];
        let mut command = Job::command(folder, &[("FARWIRE_LINK", "shm")], &launch, &train);
        let mut job = Job::of(command.stderr(Stdio::piped()));
        (0..3).for_each(|_| drop(job.next("step")));
        for signal in [Signal::STOP, Signal::KILL] {
            for rank in [0, 2] {
                kill(job.rank(rank).0, signal);
            }
        }
        assert_eq!(job.launcher.wait().unwrap().code(), Some(75));
        let mut said = String::new();
        job.launcher.stderr.take().unwrap().read_to_string(&mut said).unwrap();
        assert!(
            !said.contains("killing"),
            "those that wait to join end when they are told: {said}"
        );
        let again = [&train[..], &["--resume"]].concat();
        let mut job = Job::launch(folder, "shm", &["-n", "4", "--restarts", "0"], &again);
        assert!(job.next("step")["step"].as_u64() >= Some(2));
        job.end_alike();
    });
}

/// All ranks are killed at once. None is left to let others in: the job is over.
#[test]
fn a_job_that_has_lost_all_its_ranks_ends() {
    let train: Vec<_> = TRAIN.split_whitespace().collect();
    with_folder("lost", |folder| {
        let launch = ["-n", "2", "--restarts", "9"];
        let mut command = Job::command(folder, &[("FARWIRE_LINK", "shm")], &launch, &train);
        let mut job = Job::of(command.stderr(Stdio::piped()));
        job.next("step");
        for signal in [Signal::STOP, Signal::KILL] {
            for rank in [0, 1] {
                kill(job.rank(rank).0, signal);
            }
        }
        let mut said = String::new();
        job.launcher.stderr.take().unwrap().read_to_string(&mut said).unwrap();
        assert_eq!(job.launcher.wait().unwrap().code(), Some(128 + 9), "{said}");
        assert!(!said.contains("was not let in"), "who was to join ends with it: {said}");
        assert!(!said.contains("[3]"), "nobody is started for the last: {said}");
    });
}

/// A command whose rank `lost` ends at once, `times` times, and the others train.
fn with_a_false_start(folder: &Path, lost: u32, times: u32) -> Command {
    let script = format!(
        "if [ $RANK = {lost} ] && [ $(ls false-start.* 2>/dev/null | wc -l) -lt {times} ]; then \
         touch false-start.$$; exit 1; fi"
    );
    after(folder, &script, "shm")
}

/// There is nothing to join yet: the others wait for this very rank.
#[test]
fn a_rank_that_dies_before_all_have_come_is_started_again_as_itself() {
    for lost in [0, 2] {
        with_folder("early", |folder| {
            let mut job = Job::of(&mut with_a_false_start(folder, lost, 2));
            job.next("step");
            assert_eq!(job.rank(lost).1["RANK"], lost.to_string());
            job.kill(1);
            job.changed_to(2);
            job.changed_to(3);
            job.end_alike();
        });
    }
}

/// Rank 0, which rank 1 has called, is killed while both wait for rank 2. Rank 1 calls again.
#[test]
fn rank_0_may_die_while_all_wait_for_the_last() {
    let farwire = env!("CARGO_BIN_EXE_farwire");
    with_folder("waiting", |folder| {
        let script = "while [ $RANK = 2 ] && ! [ -e go ]; do sleep 0.1; done; exec \"$0\" \"$@\"";
        let mut command = Command::new(farwire);
        command
            .args(["launch", "--elastic", "-n", "3", "--restarts", "1", "--", "sh", "-c", script])
            .arg(farwire)
            .args(TRAIN.split_whitespace())
            .arg("--elastic")
            .current_dir(folder)
            .envs([("FARWIRE_LINK", "shm"), ("FARWIRE_FLIGHT_DIR", "")]);
        let mut job = Job::of(&mut command);
        std::thread::sleep(Duration::from_secs(2)); // rank 1 has called, or calls the next
        job.kill(0);
        std::thread::sleep(Duration::from_secs(1));
        std::fs::write(folder.join("go"), "").unwrap();
        job.next("step");
        job.end_alike();
    });
}

/// A command whose ranks do what `script` says, and then train.
fn after(folder: &Path, script: &str, link: &str) -> Command {
    let farwire = env!("CARGO_BIN_EXE_farwire");
    let script = format!("notes=${{FARWIRE_BEGINNING#*:}}; {script}; exec \"$0\" \"$@\"");
    let mut command = Command::new(farwire);
    command
        .args(["launch", "--elastic", "-n", "3", "--restarts", "3", "--", "sh", "-c", &script])
        .arg(farwire)
        .args(TRAIN.split_whitespace())
        .arg("--elastic")
        .current_dir(folder)
        .envs([("FARWIRE_LINK", link), ("FARWIRE_FLIGHT_DIR", "")]);
    command
}

/// Rank 0 is part of the group, rank 1 ends, and rank 2 would wait for it in vain.
#[test]
fn all_begin_again_when_one_dies_while_others_meet() {
    with_folder("meeting", |folder| {
        let script = "if ! [ -e again ]; then case $RANK in \
                      0) printf '\\002' 1<> $notes; sleep 100;; \
                      1) while ! [ -s $notes ]; do sleep 0.01; done; touch again; exit 1;; \
                      2) sleep 100;; esac; fi";
        let mut job = Job::of(after(folder, script, "shm").stderr(Stdio::piped()));
        let mut stderr = job.launcher.stderr.take().unwrap();
        let said = std::thread::spawn(move || {
            let mut said = String::new();
            stderr.read_to_string(&mut said).map(|_| said)
        });
        job.next("step");
        job.kill(0);
        job.changed_to(2);
        job.changed_to(3);
        job.end_alike();
        let said = said.join().unwrap().unwrap();
        let what = "rank 1 has ended (exit status 1) before all ranks had come; all begin again";
        assert!(said.contains(what), "{said}");
    });
}

/// Whether that rank was part of the group by then, or others were, is left to chance.
#[test]
fn a_job_goes_on_when_a_rank_is_killed_as_soon_as_ranks_meet() {
    for (link, lost) in [("quic", 0), ("quic", 2), ("tcp", 1), ("shm", 2), ("shm", 0)] {
        with_folder("as-soon", |folder| {
            let script = format!(
                "if [ $RANK = {lost} ] && ! [ -e once ]; then touch once; \"$0\" \"$@\" & \
                 while ! [ -s $notes ]; do :; done; kill -9 $!; exit 1; fi"
            );
            let mut job = Job::of(&mut after(folder, &script, link));
            job.next("step");
            job.end_alike();
        });
    }
}

/// The others would wait for it in vain.
#[test]
fn a_job_with_a_rank_that_never_comes_ends() {
    with_folder("never", |folder| {
        let mut job = Job::of(with_a_false_start(folder, 1, 9).stderr(Stdio::piped()));
        let mut said = String::new();
        job.launcher.stderr.take().unwrap().read_to_string(&mut said).unwrap();
        assert_eq!(job.launcher.wait().unwrap().code(), Some(1), "{said}");
        let tries = said.matches("rank 1 has ended (exit status 1) before all ranks had come");
        assert_eq!(tries.count(), 4, "{said}");
        assert!(said.contains("farwire: rank 1 failed"), "{said}");
    });
}

/// A mistake in how ranks were started would be one for others, too.
#[test]
fn nobody_is_started_in_place_of_a_rank_with_wrong_flags_or_files() {
    let farwire = env!("CARGO_BIN_EXE_farwire");
    with_folder("wrong", |folder| {
        for (program, train, says, code) in [
            (farwire, "--elastic --codec nonsense", "is not a codec", 2),
            (farwire, "--elastic --data nowhere.txt", "could not read nowhere.txt", 2),
            (farwire, "--codec int8", "add --elastic after `train`", 2),
            ("/no/such/program", "--elastic", "could not start", 127),
            ("/", "--elastic", "could not start", 126),
        ] {
            let mut command = Command::new(farwire);
            command.args(["launch", "--elastic", "-n", "2", "--", program]);
            command.args(
                TRAIN.split_whitespace().filter(|flag| *flag != "--codec" && *flag != "int8"),
            );
            let command = command.args(train.split_whitespace()).current_dir(folder);
            let mut launcher =
                command.stderr(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap();
            let _limit = limit(&launcher);
            let mut said = String::new();
            launcher.stderr.take().unwrap().read_to_string(&mut said).unwrap();
            assert_eq!(launcher.wait().unwrap().code(), Some(code), "{said}");
            assert!(said.contains(says) && !said.contains("[2]"), "{said}");
        }
    });
}

/// A script must not take such a run for done.
#[test]
fn a_run_whose_ranks_have_all_left_does_not_end_well() {
    with_folder("left", |folder| {
        let mut job = Job::start(folder, "shm", "0", &[]);
        job.next("step");
        (0..3).for_each(|rank| kill(job.rank(rank).0, Signal::USR1));
        assert_eq!(job.launcher.wait().unwrap().code(), Some(128 + 10));
    });
}

/// Two launchers, as on two hosts. One starts another rank in place of one of its own that was
/// killed, and the new rank joins. With the most ranks allowed there, no other is let in. Then that
/// launcher is killed, with its ranks; those of the other go on.
#[test]
fn launchers_restart_their_own_ranks_and_the_death_of_one_ends_only_those() {
    let train: Vec<_> = TRAIN.split_whitespace().collect();
    with_folder("launchers", |folder| {
        let token = farwire::Token::generate().reveal();
        let socket = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
        let master = socket.local_addr().unwrap().to_string();
        drop(socket);
        let variables =
            [("FARWIRE_LINK", "shm"), ("FARWIRE_TOKEN", &token[..]), ("FARWIRE_JOB", "launchers")];
        let [mut job, mut other] = ["0", "1"].map(|node| {
            let place = ["-n", "2", "--nnodes", "2", "--node-rank", node, "--master", &master];
            let launch = [&place[..], &["--restarts", "1", "--max", "4"]].concat();
            Job::launch_with(folder, &variables, &launch, &train)
        });
        job.next("step");
        other.kill(3);
        job.changed_to(3);
        job.changed_to(4);
        assert_eq!(other.rank(5).1["LOCAL_RANK"], "2", "a number that no other launcher gives");

        let fifth = Command::new(env!("CARGO_BIN_EXE_farwire"))
            .args(&train)
            .args(["--join", &master])
            .current_dir(folder)
            .envs(variables)
            .env("FARWIRE_JOIN_TIMEOUT", "5s")
            .stderr(Stdio::piped())
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        let _limit = limit(&fifth);
        let ended = fifth.wait_with_output().unwrap();
        let said = String::from_utf8_lossy(&ended.stderr).into_owned();
        assert!(!ended.status.success() && said.contains("as many ranks as"), "{said}");

        kill(other.launcher.id(), Signal::KILL);
        other.launcher.wait().unwrap();
        while job.next("change")["ranks"] != 2 {}
        job.next("step");
        job.end_alike();
    });
}
