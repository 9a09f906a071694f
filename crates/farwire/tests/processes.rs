//! Tier 3: ranks as processes of one machine, through shared memory, and over QUIC and TCP on
//! loopback.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on should say where")]

mod common;

use common::{
    assert_succeeds, every_collective, long_collectives, on_processes, start_processes,
    start_processes_with, subgroups,
};
use farwire::{Communicator, ReduceOp};
use half::bf16;
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

#[test]
fn every_collective_equals_the_oracle_over_every_link() {
    for link in common::links() {
        for n in [1, 2, 3, 5, 7, 8] {
            on_processes("every_collective_equals_the_oracle_over_every_link", n, link, |comm| {
                for len in [0, 1, n - 1, n, n + 1, 1009] {
                    every_collective::<f32>(&comm, len, ReduceOp::Sum);
                    every_collective::<bf16>(&comm, len, ReduceOp::Sum);
                }
                every_collective::<f32>(&comm, 65_537, ReduceOp::Sum);
                if [2, 3].contains(&n) {
                    [2_097_153, 3_145_729].iter().for_each(|len| long_collectives(&comm, *len));
                }
                comm.shutdown().unwrap();
            });
        }
    }
}

/// Frames of one operation go over all connections, and are put together again.
#[test]
fn several_connections_to_a_peer_carry_one_link() {
    const TEST: &str = "several_connections_to_a_peer_carry_one_link";
    for connections in ["2", "8"] {
        if common::is_another_case("FARWIRE_CONNECTIONS", connections) {
            continue;
        }
        let settings = [("FARWIRE_CONNECTIONS", connections)];
        let ranks = start_processes_with(TEST, 2, "quic", &settings, |comm| {
            long_collectives(&comm, 2_097_153);
            comm.shutdown().unwrap();
        });
        for (rank, child) in ranks.into_iter().enumerate() {
            assert_succeeds(child, &format!("rank {rank} with {connections} connections"));
        }
    }
}

/// Even if there are more threads than cores, so that mates come late or not at all.
#[test]
fn threads_that_help_change_no_bit() {
    const TEST: &str = "threads_that_help_change_no_bit";
    for threads in ["2", "4"] {
        if common::is_another_case("FARWIRE_THREADS", threads) {
            continue;
        }
        let settings = [("FARWIRE_THREADS", threads)];
        let ranks = start_processes_with(TEST, 3, "shm", &settings, |comm| {
            long_collectives(&comm, 3_145_729);
            for op in [ReduceOp::Sum, ReduceOp::Max] {
                every_collective::<f32>(&comm, 200_003, op);
                every_collective::<bf16>(&comm, 200_003, op);
            }
            comm.shutdown().unwrap();
        });
        for (rank, child) in ranks.into_iter().enumerate() {
            assert_succeeds(child, &format!("rank {rank} with {threads} threads"));
        }
    }
}

/// As a notebook does, or a program that trains twice.
#[test]
fn a_process_leaves_and_joins_again_at_the_same_port_at_once() {
    const TEST: &str = "a_process_leaves_and_joins_again_at_the_same_port_at_once";
    for link in common::links() {
        on_processes(TEST, 2, link, |comm| {
            comm.shutdown().unwrap();
            for round in 0..10 {
                let comm = Communicator::from_env().unwrap();
                assert_eq!(
                    comm.all_reduce(vec![round], ReduceOp::Sum).wait().unwrap(),
                    [2 * round]
                );
                comm.shutdown().unwrap();
            }
        });
    }
}

#[test]
fn some_processes_form_a_group_while_the_others_do_something_else() {
    for link in common::links() {
        on_processes(
            "some_processes_form_a_group_while_the_others_do_something_else",
            5,
            link,
            |comm| {
                subgroups(&comm);
                comm.shutdown().unwrap();
            },
        );
    }
}

/// Resident memory of this process, in KiB.
fn resident() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("VmRSS:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}

/// A long job: ranks are ahead and behind by turns, and nothing piles up.
#[test]
fn ten_thousand_operations_keep_memory_flat() {
    const TEST: &str = "ten_thousand_operations_keep_memory_flat";
    for link in common::links() {
        let children = start_processes(TEST, 3, link, |comm| {
            let mut rng = ChaCha8Rng::seed_from_u64(comm.rank() as u64);
            let mut early = 0;
            for round in 1..=10_000u32 {
                let busy =
                    if rng.random_range(0..8) == 0 { rng.random_range(0..20_000) } else { 0 };
                (0..busy).for_each(|_| std::hint::spin_loop());
                let sum = comm
                    .all_reduce(vec![round; 1 + round as usize % 50], ReduceOp::Sum)
                    .wait()
                    .unwrap();
                assert!(sum.iter().all(|x| *x == 3 * round));
                if round == 1_000 {
                    early = resident();
                }
            }
            let late = resident();
            println!(
                "{link}, rank {}: {early} KiB after 1,000, {late} KiB after 10,000",
                comm.rank()
            );
            assert!(late < early + 4096, "{early} KiB, then {late} KiB");
            comm.shutdown().unwrap();
        });
        for child in children {
            let said = assert_succeeds(child, link);
            println!("{}", said.lines().find(|line| line.contains("KiB")).unwrap());
        }
    }
}

#[test]
fn a_process_that_leaves_right_after_sending_loses_nothing() {
    for link in common::links() {
        on_processes("a_process_that_leaves_right_after_sending_loses_nothing", 2, link, |comm| {
            if comm.rank() == 0 {
                comm.send(vec![7u8; 3_000_000], 1, 0).wait().unwrap();
            } else {
                assert_eq!(comm.recv::<u8>(3_000_000, 0, 0).wait().unwrap(), vec![7; 3_000_000]);
            }
        });
    }
}

/// The receiver asks only once the sender's process is gone.
#[test]
fn a_message_outlives_its_sender() {
    for link in common::links() {
        on_processes("a_message_outlives_its_sender", 2, link, |comm| {
            let sizes = [1000, 600_000, 1_000_000];
            if comm.rank() == 0 {
                comm.send(vec![std::process::id()], 1, 0).wait().unwrap();
                let size = sizes[usize::from(link == "quic")];
                comm.send(vec![7u8; size], 1, 1).wait().unwrap();
            } else {
                let sender = comm.recv::<u32>(1, 0, 0).wait().unwrap()[0];
                let process = format!("/proc/{sender}");
                while std::path::Path::new(&process).exists() {
                    std::thread::yield_now();
                }
                let size = sizes[usize::from(link == "quic")];
                assert_eq!(comm.recv::<u8>(size, 0, 1).wait().unwrap(), vec![7; size]);
            }
        });
    }
}

/// Rank 0 has no TCP port, since another process has it; so rank 0 connects.
#[test]
fn a_rank_that_cannot_listen_on_tcp_connects_to_the_others() {
    const TEST: &str = "a_rank_that_cannot_listen_on_tcp_connects_to_the_others";
    let port = common::free_port();
    let taken = std::net::TcpListener::bind(("127.0.0.1", port));
    let token = farwire::Token::generate();
    let ranks = common::start_processes_at(TEST, &[port; 3], &token, "tcp", &[], |comm| {
        assert_eq!(comm.all_reduce(vec![1; 1000], ReduceOp::Sum).wait().unwrap(), [3; 1000]);
    });
    for (index, rank) in ranks.into_iter().enumerate() {
        common::assert_succeeds(rank, &format!("rank {index}"));
    }
    drop(taken);
}

/// Shorter than the number of ranks, a prime, and one more than what fits in whole frames.
#[test]
fn awkward_lengths_over_every_link() {
    for link in common::links() {
        for n in [2, 3, 5] {
            on_processes("awkward_lengths_over_every_link", n, link, |comm| {
                for len in [1, 2, 3, 1009, 32_769, 2_097_153] {
                    common::long_collectives(&comm, len);
                }
            });
        }
    }
}

#[test]
fn sixty_four_operations_in_flight_at_once() {
    for link in common::links() {
        on_processes("sixty_four_operations_in_flight_at_once", 3, link, |comm| {
            let pending: Vec<_> = (0..64u32)
                .map(|i| comm.all_reduce(vec![i; 30_000 + i as usize], ReduceOp::Sum))
                .collect();
            for (i, pending) in pending.into_iter().enumerate().rev() {
                assert_eq!(pending.wait().unwrap(), vec![3 * i as u32; 30_000 + i]);
            }
            comm.shutdown().unwrap();
        });
    }
}
