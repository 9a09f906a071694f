//! Tier 3: processes that are killed, and a group that goes on without them; processes that join
//! it.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on should say where")]

mod common;

use std::process::{Child, Command, Stdio};
use std::time::Instant;

use common::{assert_succeeds, start_processes, start_processes_with};
use farwire::{Communicator, Error, Fault, MembershipError, ReduceOp, Token};
use rustix::process::{Signal, getpid, kill_process};

/// The sum of everyone's number, over enough elements for several frames.
fn sum(comm: &Communicator, mine: u32) -> Result<u32, Error> {
    let sums = comm.all_reduce(vec![mine; 50_000], ReduceOp::Sum).wait()?;
    assert!(sums.iter().all(|sum| *sum == sums[0]));
    Ok(sums[0])
}

/// Works until a rank is lost, and goes on with the rest.
fn outlive(mut comm: Communicator, victims: &[usize]) {
    let me = comm.rank();
    let all: u32 = (0..comm.size() as u32).map(|rank| 1 << rank).sum();
    let left: u32 = all - victims.iter().map(|rank| 1 << rank).sum::<u32>();
    // A slow rank may hear of the death before it has its sum.
    if let Ok(sum) = sum(&comm, 1 << me) {
        assert_eq!(sum, all);
    }
    if victims.contains(&me) {
        kill_process(getpid(), Signal::KILL).unwrap();
    }
    let mut lost = None;
    loop {
        match sum(&comm, 1 << me) {
            Ok(sum) if sum == left => break,
            // Some of several victims may still have been there.
            Ok(_) => {}
            Err(error) => {
                assert!(matches!(error.fault(), Some(Fault::PeerLost(_))), "{error}");
                lost.get_or_insert(Instant::now());
                let before = comm.epoch().unwrap();
                comm = comm.shrink().unwrap();
                assert!(comm.epoch().unwrap() > before);
            }
        }
    }
    let took = lost.expect("somebody was lost").elapsed();
    let rank = (0..me).filter(|rank| !victims.contains(rank)).count();
    assert_eq!((comm.rank(), comm.size()), (rank, left.count_ones() as usize), "no gaps");
    println!("from the error to the first result: {} µs", took.as_micros());
    if comm.size() > 1 {
        let half = comm.split(comm.rank() as u32 % 2, 0).unwrap();
        half.barrier().wait().unwrap();
    }
    comm.shutdown().unwrap();
}

fn survive(test: &str, n: usize, link: &str, victims: &[usize]) {
    let children = start_processes(test, n, link, |comm| outlive(comm, victims));
    for (rank, mut child) in children.into_iter().enumerate() {
        if victims.contains(&rank) {
            assert!(!child.wait().unwrap().success(), "it was killed");
        } else {
            let said = assert_succeeds(child, &format!("rank {rank} of {n} over {link}"));
            let line = said.lines().find(|line| line.starts_with("from the error"));
            println!("{link}, {n} ranks without {victims:?}: rank {rank} {}", line.unwrap());
        }
    }
}

#[test]
fn a_group_goes_on_without_rank_0() {
    for link in common::links() {
        survive("a_group_goes_on_without_rank_0", 4, link, &[0]);
    }
}

#[test]
fn one_of_two_goes_on_when_rank_0_is_killed() {
    survive("one_of_two_goes_on_when_rank_0_is_killed", 2, "shm", &[0]);
}

/// No majority is left, but it is known for certain that the others have ended.
#[test]
fn two_of_five_go_on_when_three_are_killed_at_once() {
    survive("two_of_five_go_on_when_three_are_killed_at_once", 5, "shm", &[0, 2, 3]);
}

/// Ranks 0 and 1 share a group of their own. Rank 1 learns of the death of another rank first, and
/// goes on to the new group. What rank 0 waits for in their own group will never come.
#[test]
fn what_waits_on_a_group_of_living_ranks_ends_when_the_world_changes() {
    std::thread::scope(|scope| {
        for comm in farwire::local(3).unwrap() {
            scope.spawn(move || {
                let pair = comm.split(comm.rank() as u32 / 2, 0).unwrap();
                // Rank 2 leaves once both others are here: a death ends what is under way.
                match comm.rank() {
                    2 => (0..2).for_each(|rank| drop(comm.recv::<u32>(1, rank, 0).wait().unwrap())),
                    _ => drop(comm.send(vec![0_u32], 2, 0)),
                }
                match comm.rank() {
                    0 => {
                        let error = pair.recv::<u32>(1, 1, 0).wait().unwrap_err();
                        assert!(matches!(error.fault(), Some(Fault::Replaced { .. })), "{error}");
                    }
                    1 => drop(comm.recv::<u32>(1, 2, 0).wait().unwrap_err()),
                    _ => return, // lost
                }
                let comm = comm.shrink().unwrap();
                assert_eq!(sum(&comm, 1).unwrap(), 2);
                comm.shutdown().unwrap();
            });
        }
    });
}

/// Over QUIC nobody knows whether the other has ended or cannot be reached. Of two, the lower rank
/// goes on; the higher one gets an error that says why it does not.
#[test]
fn of_two_that_lose_sight_of_each_other_only_the_lower_goes_on() {
    const TEST: &str = "of_two_that_lose_sight_of_each_other_only_the_lower_goes_on";
    const VICTIM: &str = "FARWIRE_TEST_VICTIM";
    for victim in [0, 1] {
        let setting = victim.to_string();
        if common::is_another_case(VICTIM, &setting) {
            continue;
        }
        let settings = [(VICTIM, &setting[..])];
        let mut children = start_processes_with(TEST, 2, "quic", &settings, |comm| {
            let _maybe_lost = comm.barrier().wait();
            if comm.rank() == victim {
                kill_process(getpid(), Signal::KILL).unwrap();
            }
            comm.barrier().wait().unwrap_err();
            match (comm.rank(), comm.shrink()) {
                (0, Ok(alone)) => assert_eq!((alone.rank(), alone.size()), (0, 1)),
                (1, Err(Error::Membership { source: MembershipError::NoQuorum { .. } })) => {}
                (rank, other) => panic!("rank {rank}: {other:?}"),
            }
        });
        if children.is_empty() {
            continue;
        }
        let mut dead = children.remove(victim);
        assert_succeeds(children.remove(0), &format!("the one that is left, without {victim}"));
        dead.wait().unwrap();
    }
}

/// The members work and let others in, until there are enough; rank 0 is killed on the way, and the
/// newcomers know of nobody else. All that are left have the same sums.
#[test]
fn processes_join_a_running_group_that_has_lost_rank_0() {
    const TEST: &str = "processes_join_a_running_group_that_has_lost_rank_0";
    const JOIN: &str = "FARWIRE_TEST_JOIN";
    if let Ok(address) = std::env::var(JOIN) {
        common::end_after(common::CHILD_LIMIT);
        let begin = Instant::now();
        let comm = Communicator::builder().join_running(&address).unwrap();
        println!("joined as rank {} of {} in {:?}", comm.rank(), comm.size(), begin.elapsed());
        return work_until(comm, 4, None);
    }
    for link in common::links() {
        let token = Token::generate();
        let port = common::free_port();
        let settings = [("FARWIRE_ELASTIC", "1")];
        let mut children =
            common::start_processes_at(TEST, &[port; 3], &token, link, &settings, |comm| {
                let victim = Some(0).filter(|victim| *victim == comm.rank());
                work_until(comm, 4, victim);
            });
        if children.is_empty() {
            continue;
        }
        let join = || start_joiner(TEST, JOIN, port, &token, link);
        children.extend([join(), join()]);
        let mut dead = children.remove(0);
        for (index, child) in children.into_iter().enumerate() {
            let said = assert_succeeds(child, &format!("process {index} over {link}"));
            said.lines()
                .filter(|line| line.starts_with("joined"))
                .for_each(|line| println!("{link}: {line}"));
        }
        dead.wait().unwrap();
    }
}

/// A process that waits to join, and is not let in before the job ends, is told so, and does not
/// wait for as long as it may.
#[test]
fn one_that_waits_hears_that_the_job_has_ended() {
    const TEST: &str = "one_that_waits_hears_that_the_job_has_ended";
    const JOIN: &str = "FARWIRE_TEST_JOIN";
    if let Ok(address) = std::env::var(JOIN) {
        common::end_after(common::CHILD_LIMIT);
        let error = Communicator::builder().join_running(&address).unwrap_err().to_string();
        assert!(error.contains("all its ranks have left or are lost"), "{error}");
        return;
    }
    for link in common::links() {
        let token = Token::generate();
        let port = common::free_port();
        let settings = [("FARWIRE_ELASTIC", "1")];
        let mut children =
            common::start_processes_at(TEST, &[port; 2], &token, link, &settings, |comm| {
                let all_know = |waiting| comm.all_reduce(vec![waiting], ReduceOp::Min).wait();
                while all_know(comm.waiting() as u32).unwrap() == [0] {}
                comm.shutdown().unwrap();
            });
        if children.is_empty() {
            continue;
        }
        children.push(start_joiner(TEST, JOIN, port, &token, link));
        for (index, child) in children.into_iter().enumerate() {
            assert_succeeds(child, &format!("process {index} over {link}"));
        }
    }
}

/// Starts a process that joins the job of a test.
fn start_joiner(test: &str, mark: &str, port: u16, token: &Token, link: &str) -> Child {
    Command::new(std::env::current_exe().unwrap())
        .args([test, "--exact", "--nocapture"])
        .env(mark, format!("127.0.0.1:{port}"))
        .env("FARWIRE_TOKEN", token.reveal())
        .env("FARWIRE_LINK", link)
        .env("FARWIRE_FLIGHT_DIR", "")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap()
}

/// Works and lets others in until the group has one member more than `wanted`. The victim then
/// kills itself, and the others make one more step.
fn work_until(mut comm: Communicator, wanted: usize, victim: Option<usize>) {
    let mut complete = false;
    loop {
        // Set even if the step fails: the victim may have its result, and end before all others
        // have theirs.
        complete |= comm.size() > wanted;
        let step = || {
            let mine = vec![1u32, u32::from(complete)];
            let sum = comm.all_reduce(mine, ReduceOp::Sum).wait()?;
            assert_eq!(sum[0] as usize, comm.size());
            let all = comm.all_gather(vec![comm.rank() as u32]).wait()?;
            assert_eq!(all, (0..comm.size() as u32).collect::<Vec<_>>());
            let complete = sum[1] > 0; // the same on all
            Ok::<_, Error>((complete, if complete { comm.clone() } else { comm.admit()? }))
        };
        match step() {
            Ok((true, _)) if comm.size() == wanted => break,
            Ok((true, _)) if victim == Some(comm.rank()) => {
                kill_process(getpid(), Signal::KILL).unwrap();
            }
            Ok((now_complete, next)) => (complete, comm) = (now_complete, next),
            Err(error) => {
                assert!(error.fault().is_some(), "{error}");
                comm = comm.shrink().unwrap();
            }
        }
    }
    comm.shutdown().unwrap();
}
