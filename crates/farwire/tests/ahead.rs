//! Ranks that run ahead of others: they wait, and neither side's memory grows.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on should say where")]

mod common;

use std::time::Duration;

use common::{assert_succeeds, on_processes, on_threads, resident_megabytes, start_processes};
use farwire::{Communicator, Fault, Options, ReduceOp};

fn hurried(comm: &Communicator, deadline: Duration) -> Communicator {
    comm.with_options(Options { deadline: Some(deadline), ..Options::default() })
}

/// Sends that miss their deadline, since nobody receives, do no harm to those after them.
#[test]
fn the_message_after_one_that_timed_out_arrives() {
    on_threads(2, |comm| {
        if comm.rank() == 0 {
            let brief = hurried(&comm, Duration::from_millis(300));
            let sends: Vec<_> = (0..300u32).map(|i| brief.send(vec![i; 25_000], 1, 7)).collect();
            let sent: Vec<_> = sends.into_iter().map(|send| send.wait()).collect();
            let lost = sent.iter().find_map(|send| send.as_ref().err()).expect("there is a bound");
            assert!(
                matches!(lost.fault(), Some(Fault::TimedOut { waiting_for: farwire::Peer(1), .. })),
                "{lost}"
            );
            assert!(lost.to_string().contains("rank 1"), "{lost}");
            let count = sent.iter().filter(|send| send.is_ok()).count() as u32;
            comm.send(vec![count], 1, 8).wait().unwrap();
            comm.send(vec![1_000_000u32; 25_000], 1, 7).wait().unwrap();
        } else {
            let count = comm.recv::<u32>(1, 0, 8).wait().unwrap()[0];
            for i in 0..count {
                assert_eq!(comm.recv::<u32>(25_000, 0, 7).wait().unwrap(), vec![i; 25_000]);
            }
            assert_eq!(comm.recv::<u32>(25_000, 0, 7).wait().unwrap(), vec![1_000_000; 25_000]);
        }
        comm.barrier().wait().unwrap();
    });
}

/// Nobody receives: the sender is stopped, both processes stay small, and everything else goes on.
/// Then all messages arrive.
#[test]
fn messages_that_nobody_receives_are_held_back() {
    hold_back("messages_that_nobody_receives_are_held_back", 70_000);
}

/// The same for long enough to see a leak of a few bytes per message.
#[test]
#[ignore = "takes half a minute"]
fn a_million_messages_are_held_back_and_arrive_in_order() {
    hold_back("a_million_messages_are_held_back_and_arrive_in_order", 1_000_000);
}

fn hold_back(test: &str, messages: u32) {
    for link in common::links() {
        let children = start_processes(test, 2, link, |comm| {
            let other = comm.split(0, 0).unwrap();
            let before = resident_megabytes();
            let message = |i: u32| vec![i; 250];
            if comm.rank() == 1 {
                let brief = hurried(&comm, Duration::from_millis(500));
                let sends = (0..messages).map(|i| brief.send(message(i), 0, 1).wait());
                let held = sends.enumerate().find_map(|(i, sent)| Some((i, sent.err()?)));
                let (sent, error) = held.expect("sends are held back");
                assert!(error.to_string().contains("rank 0"), "{error}");
                comm.send(vec![1u8], 0, 2).wait().unwrap(); // another tag is not held back
                let sum = other.all_reduce(vec![1f32; 1_000_000], ReduceOp::Sum).wait().unwrap();
                assert_eq!(sum, vec![2.0; 1_000_000]);
                assert_small(link, "sender, held back", before);
                (sent as u32..messages).for_each(|i| comm.send(message(i), 0, 1).wait().unwrap());
                assert_small(link, "sender, at the end", before);
            } else {
                comm.recv::<u8>(1, 1, 2).wait().unwrap();
                let sum = other.all_reduce(vec![1f32; 1_000_000], ReduceOp::Sum).wait().unwrap();
                assert_eq!(sum, vec![2.0; 1_000_000]);
                assert_small(link, "receiver, before it receives", before);
                for i in 0..messages {
                    assert_eq!(comm.recv::<u32>(250, 1, 1).wait().unwrap(), message(i));
                }
                assert_small(link, "receiver, at the end", before);
            }
            comm.shutdown().unwrap();
        });
        for child in children {
            let said = assert_succeeds(child, link);
            said.lines().filter(|line| line.contains("MiB")).for_each(|line| println!("{line}"));
        }
    }
}

fn assert_small(link: &str, who: &str, before: usize) {
    let grown = resident_megabytes().saturating_sub(before);
    println!("{link}: {who}: grown by {grown} MiB");
    assert!(grown <= 64, "{who}: grown by {grown} MiB over {link}");
}

/// One rank calls hundreds of operations before the other calls the first.
#[test]
fn a_rank_that_is_hundreds_of_operations_ahead_waits() {
    const OPERATIONS: usize = 700;
    let length = |i: usize| if i.is_multiple_of(10) { 40_000 } else { 1 + i };
    for link in common::links() {
        on_processes("a_rank_that_is_hundreds_of_operations_ahead_waits", 2, link, |comm| {
            let start = |i: usize| comm.all_reduce(vec![i as u32; length(i)], ReduceOp::Sum);
            let check = |i: usize, sum: Vec<u32>| assert_eq!(sum, vec![2 * i as u32; length(i)]);
            if comm.rank() == 0 {
                let pending: Vec<_> = (0..OPERATIONS).map(start).collect();
                comm.send(vec![1u8], 1, 0).wait().unwrap(); // all are under way, or wait
                pending.into_iter().enumerate().for_each(|(i, sum)| check(i, sum.wait().unwrap()));
            } else {
                comm.recv::<u8>(1, 0, 0).wait().unwrap();
                (0..OPERATIONS).for_each(|i| check(i, start(i).wait().unwrap()));
            }
            comm.shutdown().unwrap();
        });
    }
}

/// A thousand messages begun at once and received in the order they were sent, or the last tag
/// first.
#[test]
fn a_thousand_sends_at_once_are_received_one_by_one() {
    for link in common::links() {
        on_processes("a_thousand_sends_at_once_are_received_one_by_one", 2, link, |comm| {
            if comm.rank() == 0 {
                let sends: Vec<_> =
                    (0..1000u32).map(|i| comm.send(vec![i; 300], 1, i / 250)).collect();
                sends.into_iter().for_each(|send| send.wait().unwrap());
            } else {
                for tag in [3, 1, 2, 0] {
                    for i in 0..250 {
                        let i = 250 * tag + i;
                        assert_eq!(comm.recv::<u32>(300, 0, tag).wait().unwrap(), vec![i; 300]);
                    }
                }
            }
            comm.shutdown().unwrap();
        });
    }
}
