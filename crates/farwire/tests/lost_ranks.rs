//! Tier 3: processes that die or stop in the middle. The others get the error that names them, and
//! their input back.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on should say where")]

mod common;

use std::time::Instant;

use common::{assert_succeeds, start_processes};
use farwire::{Communicator, Fault, Peer, ReduceOp};
use rustix::process::{Pid, Signal, getpid, kill_process};

const VICTIM: usize = 1;

/// Makes all-reduces until one fails; the victim sends itself the signal on the way.
fn loop_until_lost(comm: &Communicator, signal: Signal) {
    for round in 0.. {
        if round == 100 && comm.rank() == VICTIM {
            kill_process(getpid(), signal).unwrap();
        }
        let mine = vec![comm.rank() as f32 + round as f32; 50_000];
        let start = Instant::now();
        match comm.all_reduce(mine.clone(), ReduceOp::Sum).wait() {
            Ok(sum) => assert_eq!(sum[0], 3.0 + 3.0 * round as f32),
            Err(mut error) => {
                assert_eq!(error.fault(), Some(&Fault::PeerLost(Peer(VICTIM as u32))), "{error}");
                assert_eq!(error.take_input::<f32>(), Some(mine), "the input comes back as it was");
                println!("milliseconds to the error: {}", start.elapsed().as_millis());
                assert!(comm.barrier().wait().is_err(), "the group is of no more use");
                return;
            }
        }
    }
}

/// Starts three ranks, waits for the two that survive, and only then ends the victim.
fn survivors_learn(test: &str, link: &str, signal: Signal) {
    let mut children = start_processes(test, 3, link, |comm| loop_until_lost(&comm, signal));
    if children.is_empty() {
        return; // this is one of them
    }
    let mut victim = children.remove(VICTIM);
    for child in children {
        let said = assert_succeeds(child, &format!("a survivor over {link}"));
        let line = said.lines().find(|line| line.contains("milliseconds to the error"));
        println!("{link}, {signal:?}: {}", line.expect("a survivor says how long it took"));
    }
    let pid = Pid::from_raw(victim.id() as i32).unwrap();
    let _ = kill_process(pid, Signal::KILL);
    victim.wait().unwrap();
}

#[test]
fn a_killed_rank_is_an_error_for_the_others() {
    for link in common::links() {
        survivors_learn("a_killed_rank_is_an_error_for_the_others", link, Signal::KILL);
    }
}

/// A rank that dies with an in-place call under way: the memory is the caller's again once the
/// error is there.
#[test]
fn a_rank_killed_during_an_in_place_call_leaves_the_others_their_memory() {
    const TEST: &str = "a_rank_killed_during_an_in_place_call_leaves_the_others_their_memory";
    const LEN: usize = 8 << 20;
    for link in common::links() {
        let mut children = start_processes(TEST, 3, link, |comm| {
            // All have joined. (A slow rank may hear of the death before it has left the barrier.)
            let _maybe_lost = comm.barrier().wait();
            let mut mine = vec![1.0f32; LEN];
            if comm.rank() == VICTIM {
                let _under_way = comm.in_place().all_reduce(mine, ReduceOp::Sum);
                // The first of it has left; the rest never will.
                kill_process(getpid(), Signal::KILL).unwrap();
                unreachable!("it is dead");
            }
            let error = comm.all_reduce_in_place(&mut mine, ReduceOp::Sum).unwrap_err();
            assert_eq!(error.fault(), Some(&Fault::PeerLost(Peer(VICTIM as u32))), "{error}");
            mine.fill(5.0);
            for len in [LEN, 10] {
                let mut error = comm
                    .in_place()
                    .all_reduce(vec![2.0f32; len], ReduceOp::Sum)
                    .wait()
                    .unwrap_err();
                assert_eq!(error.take_input::<f32>(), Some(vec![2.0; len]), "it did not begin");
            }
            assert!(mine.iter().all(|x| *x == 5.0), "nobody else writes here");
        });
        if children.is_empty() {
            continue;
        }
        let mut victim = children.remove(VICTIM);
        for child in children {
            assert_succeeds(child, &format!("a survivor over {link}"));
        }
        victim.wait().unwrap();
    }
}

#[test]
fn a_stopped_rank_is_an_error_for_the_others() {
    for link in common::links() {
        survivors_learn("a_stopped_rank_is_an_error_for_the_others", link, Signal::STOP);
    }
}
