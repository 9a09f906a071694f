//! All-reduces between ranks that take themselves for ranks on several hosts: as threads, and as
//! processes that share memory only with those of their own host.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on should say where")]

mod common;

use std::process::{Command, Stdio};

use common::{assert_succeeds, start_each, start_processes_on};
use farwire::{
    Algorithm, Communicator, Compressor, Config, Element, Error, Fault, Kind, Peer, Placement,
    ReduceOp, SumOrder, Token, Tuning, WorldSize,
};
use farwire_sim::kinds::Shape;
use farwire_sim::oracle;
use half::bf16;
use rustix::process::{Signal, getpid, kill_process};

/// Runs `rank` on a thread for each rank on these hosts.
fn on_hosts(hosts: &[u64], config: Config, rank: impl Fn(Communicator) + Sync) {
    let rank = &rank;
    std::thread::scope(|scope| {
        for comm in farwire::local_on_hosts(hosts, config).unwrap() {
            scope.spawn(move || rank(comm));
        }
    });
}

/// The host of each rank, by number.
fn hosts_of(comm: &Communicator) -> Vec<u64> {
    let placement = comm.placement().unwrap();
    (0..comm.size() as u32).map(|rank| placement.seat(farwire::Rank(rank)).host as u64).collect()
}

/// Checks one all-reduce against the oracle, with a separate result and in place.
fn check<T: Element>(comm: &Communicator, len: usize, op: ReduceOp, algorithm: Algorithm) {
    let world = WorldSize::new(comm.size() as u32).unwrap();
    let shape = Shape { hosts: hosts_of(comm), ..Shape::even(world, len, T::DTYPE, op) };
    let inputs: Vec<Vec<T>> =
        (0..comm.size()).map(|rank| common::samples(len as u64, rank, len)).collect();
    let bytes: Vec<Vec<u8>> =
        inputs.iter().map(|input| bytemuck::cast_slice(input).to_vec()).collect();
    let expected = oracle::results(Kind::AllReduce, &shape, algorithm, &bytes).swap_remove(0);
    let mine = inputs[comm.rank()].clone();
    let result = comm.all_reduce(mine.clone(), op).wait().unwrap();
    let in_place = comm.in_place().all_reduce(mine, op).wait().unwrap();
    for result in [result, in_place.to_vec()] {
        let what = format!("{op} of {len} {} on {:?}", T::DTYPE, shape.hosts);
        assert!(bytemuck::cast_slice::<T, u8>(&result) == expected, "{what} is wrong");
    }
}

#[test]
fn awkward_lengths_have_the_bits_of_the_placement() {
    for hosts in [
        &[0, 0][..],
        &[0, 1],
        &[0, 0, 1],
        &[1, 0, 1],
        &[0, 0, 1, 1, 2],
        &[0, 0, 0, 0, 1],
        &[0, 1, 2, 0, 1, 2, 0],
        &[0, 1, 1, 1, 1, 1, 1],
    ] {
        on_hosts(hosts, Config::default(), |comm| {
            for len in [0, 1, 2, 3, 1009, 32_769] {
                check::<f32>(&comm, len, ReduceOp::Sum, Algorithm::TwoLevel);
                check::<bf16>(&comm, len, ReduceOp::Mean, Algorithm::TwoLevel);
                check::<i64>(&comm, len, ReduceOp::Sum, Algorithm::TwoLevel);
            }
        });
    }
    on_hosts(&[0, 0, 0, 1], Config::default(), |comm| {
        check::<f32>(&comm, 2_097_153, ReduceOp::Sum, Algorithm::TwoLevel);
    });
}

#[test]
fn rank_order_is_kept_if_asked_for() {
    let tuning = Tuning { order: SumOrder::Rank, ..Tuning::default() };
    on_hosts(&[0, 1, 1, 0], Config { tuning, ..Config::default() }, |comm| {
        assert_eq!(comm.split_placement(), None);
        [1, 1009, 32_769].iter().for_each(|len| {
            check::<f32>(&comm, *len, ReduceOp::Sum, Algorithm::TwoPhase);
        });
    });
}

#[test]
fn a_group_has_the_hosts_of_its_members() {
    on_hosts(&[0, 0, 1, 1, 2], Config::default(), |comm| {
        let hosts = |group: &Communicator| hosts_of(group);
        let group = comm.split((comm.rank() % 2) as u32, 0).unwrap();
        match comm.rank() % 2 {
            0 => assert_eq!(hosts(&group), [0, 1, 2], "ranks 0, 2 and 4"),
            _ => assert_eq!(hosts(&group), [0, 1]),
        }
        assert_eq!(group.split_placement(), None, "one on each host");
        check::<f32>(&group, 1009, ReduceOp::Sum, Algorithm::TwoPhase);
        let most = comm.split(u32::from(comm.rank() == 0), 0).unwrap();
        if comm.rank() > 0 {
            assert_eq!(hosts(&most), [0, 1, 1, 2]);
            assert_eq!(most.split_placement(), Placement::new(&[0, 1, 1, 2]));
            check::<f32>(&most, 1009, ReduceOp::Sum, Algorithm::TwoLevel);
        }
    });
}

#[test]
fn compressed_sums_are_the_same_everywhere_and_what_is_left_out_is_owed() {
    on_hosts(&[0, 0, 1, 1, 1], Config::default(), |comm| {
        for codec in ["int8", "topk:0.01", "powersgd:2"] {
            let compressor = Compressor::new(codec.parse().unwrap());
            for len in [1, 3, 1009, 300_000] {
                let mine: Vec<f32> = common::samples(len as u64, comm.rank(), len);
                let name = len.to_string();
                let sum = comm.all_reduce_compressed(&name, mine, ReduceOp::Mean, &compressor);
                let sum = sum.wait().unwrap();
                let bits: Vec<u32> = sum.iter().map(|value| value.to_bits()).collect();
                let all = comm.all_gather(bits.clone()).wait().unwrap();
                assert!(
                    all.chunks(len).all(|theirs| theirs == bits),
                    "{codec}, {len}: they differ"
                );
            }
        }
    });
}

#[test]
fn processes_of_a_host_share_memory_and_others_do_not() {
    const TEST: &str = "processes_of_a_host_share_memory_and_others_do_not";
    let ranks = start_processes_on(TEST, &["a", "b", "a", "a"], "auto", |comm| {
        assert_eq!(hosts_of(&comm), [0, 1, 0, 0]);
        let links = comm.flight().links;
        let me = comm.rank();
        for (other, link) in links.iter().enumerate().filter(|(other, _)| *other != me) {
            let shared = (other == 1) == (me == 1);
            assert_eq!(link.as_deref() == Some("shm"), shared, "rank {me} to {other}: {link:?}");
        }
        for len in [1, 1009, 500_000] {
            check::<f32>(&comm, len, ReduceOp::Sum, Algorithm::TwoLevel);
        }
        comm.shutdown().unwrap();
    });
    for (rank, child) in ranks.into_iter().enumerate() {
        assert_succeeds(child, &format!("rank {rank}"));
    }
}

#[test]
fn a_killed_rank_is_named_on_all_hosts() {
    const TEST: &str = "a_killed_rank_is_named_on_all_hosts";
    const VICTIM: usize = 2;
    let mut ranks = start_processes_on(TEST, &["a", "a", "b", "b"], "auto", |comm| {
        for round in 0.. {
            if round == 20 && comm.rank() == VICTIM {
                kill_process(getpid(), Signal::KILL).unwrap();
            }
            let mine = vec![round as f32; 100_000];
            match comm.all_reduce(mine.clone(), ReduceOp::Sum).wait() {
                Ok(sum) => assert_eq!(sum[7], 4.0 * round as f32),
                Err(mut error) => {
                    assert_eq!(
                        error.fault(),
                        Some(&Fault::PeerLost(Peer(VICTIM as u32))),
                        "{error}"
                    );
                    assert_eq!(error.take_input::<f32>(), Some(mine), "the input comes back");
                    return;
                }
            }
        }
    });
    if ranks.is_empty() {
        return; // this is one of them
    }
    ranks.remove(VICTIM).wait().unwrap();
    for child in ranks {
        assert_succeeds(child, "a survivor");
    }
}

#[test]
fn ranks_that_would_add_up_in_different_orders_refuse_each_other() {
    const TEST: &str = "ranks_that_would_add_up_in_different_orders_refuse_each_other";
    const MARK: &str = "FARWIRE_TEST_ORDER";
    if std::env::var(MARK).is_ok() {
        common::end_after(common::CHILD_LIMIT);
        let error = Communicator::from_env().unwrap_err().to_string();
        println!("refused: {error}");
        return;
    }
    let (port, token) = (common::free_port(), Token::generate());
    let start = |(rank, order): (usize, &str)| {
        Command::new(std::env::current_exe().unwrap())
            .args([TEST, "--exact", "--nocapture"])
            .env(MARK, "1")
            .envs([("WORLD_SIZE", "2"), ("MASTER_ADDR", "127.0.0.1"), ("FARWIRE_ORDER", order)])
            .envs([("RANK", rank.to_string()), ("MASTER_PORT", port.to_string())])
            .envs([("FARWIRE_JOIN_TIMEOUT", "5s"), ("FARWIRE_FLIGHT_DIR", "")])
            .env("FARWIRE_TOKEN", token.reveal())
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap()
    };
    let ranks: Vec<_> = ["host", "rank"].into_iter().enumerate().map(start).collect();
    for (rank, child) in ranks.into_iter().enumerate() {
        let said = assert_succeeds(child, &format!("rank {rank}"));
        assert!(said.contains("FARWIRE_ORDER=rank"), "rank {rank}: {said}");
        assert!(said.contains("FARWIRE_ORDER=host"), "rank {rank}: {said}");
    }
}

/// Two ranks on one host and one on another. One of the two is lost: then there is one on each
/// host. One more joins: again there are two levels, and all agree on who is where.
#[test]
fn members_that_join_and_leave_change_the_placement_on_all() {
    const TEST: &str = "members_that_join_and_leave_change_the_placement_on_all";
    const JOIN: &str = "FARWIRE_TEST_JOIN";
    let until_joined = |mut comm: Communicator| {
        while comm.size() < 3 {
            comm = comm.admit().unwrap();
        }
        assert_eq!(hosts_of(&comm), [0, 1, 1]);
        assert!(comm.split_placement().is_some());
        check::<f32>(&comm, 1009, ReduceOp::Sum, Algorithm::TwoLevel);
        comm.shutdown().unwrap();
    };
    if let Ok(address) = std::env::var(JOIN) {
        common::end_after(common::CHILD_LIMIT);
        return until_joined(Communicator::builder().join_running(&address).unwrap());
    }
    let (port, token) = (common::free_port(), Token::generate());
    let settings =
        |rank: usize| vec![("FARWIRE_ELASTIC", "1"), ("FARWIRE_HOST", ["a", "a", "b"][rank])];
    let mut ranks = start_each(TEST, &[port; 3], &token, "auto", &settings, |comm| {
        assert_eq!(hosts_of(&comm), [0, 0, 1]);
        check::<f32>(&comm, 1009, ReduceOp::Sum, Algorithm::TwoLevel);
        // Rank 1 dies once the others have their results.
        if comm.rank() == 1 {
            for other in [0, 2] {
                comm.recv::<u8>(0, other, 0).wait().unwrap();
            }
            kill_process(getpid(), Signal::KILL).unwrap();
        }
        comm.send(Vec::<u8>::new(), 1, 0).wait().unwrap();
        let lost = loop {
            match comm.all_reduce(vec![1.0f32], ReduceOp::Sum).wait() {
                Ok(_) => {}
                Err(error) => break error,
            }
        };
        assert!(matches!(lost, Error::Failed { .. }), "{lost}");
        let two = comm.shrink().unwrap();
        assert_eq!(hosts_of(&two), [0, 1]);
        check::<f32>(&two, 1009, ReduceOp::Sum, Algorithm::TwoPhase);
        until_joined(two);
    });
    if ranks.is_empty() {
        return;
    }
    let joiner = Command::new(std::env::current_exe().unwrap())
        .args([TEST, "--exact", "--nocapture"])
        .env(JOIN, format!("127.0.0.1:{port}"))
        .env("FARWIRE_TOKEN", token.reveal())
        .env("FARWIRE_HOST", "b")
        .env("FARWIRE_FLIGHT_DIR", "")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    ranks.remove(1).wait().unwrap();
    for child in ranks.into_iter().chain([joiner]) {
        assert_succeeds(child, "one that is left");
    }
}
