//! Tier 2: an all-reduce between hosts with several ranks each, on two speeds of link.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on should say where")]

mod common;

use std::num::NonZeroU32;
use std::time::Duration;

use common::Case;
use farwire_proto::{
    Algorithm, Call, CommId, Config, DType, Fault, Kind, Peer, ReduceOp, SumOrder, Time, Tuning,
};
use farwire_sim::{Link, Network, Report, Sim, Submission};

/// 1 Gbit/s and 1 ms between hosts; as fast as memory on each.
fn between(hosts: &[u64]) -> Network {
    let link = Link { latency: Duration::from_millis(1), ..Link::IDEAL };
    Network {
        bandwidth: 125e6,
        link,
        hosts: Some(hosts.to_vec()),
        ..Network::lan(hosts.len() as u32)
    }
}

/// A two-level all-reduce of `count` elements between these hosts.
fn case(hosts: &[u64], count: usize, dtype: DType, op: ReduceOp) -> Case {
    let n = hosts.len() as u32;
    // Frames of the usual size, or an eighth of a short vector.
    let segment = (count / 8).clamp(1, 16 << 10);
    let which = (Kind::AllReduce, Algorithm::TwoLevel);
    let mut case = Case::new(which, n, count, segment, dtype, op, count as u64);
    case.shape.hosts = hosts.to_vec();
    case
}

const PLACEMENTS: [&[u64]; 10] = [
    &[0, 0],
    &[0, 1],
    &[0, 0, 1],
    &[0, 1, 1],
    &[0, 1, 0, 1, 1],
    &[0, 0, 0, 0, 1],
    &[0, 1, 2, 2, 2],
    &[3, 3, 1, 1, 0, 0, 0],
    &[0, 1, 2, 0, 1, 2, 0],
    &[0, 1, 1, 1, 1, 1, 1],
];

#[test]
fn awkward_lengths_on_even_and_uneven_hosts_have_the_bits_of_the_placement() {
    for hosts in PLACEMENTS {
        for count in [0, 1, 2, 3, 1009, 32_769] {
            for (dtype, op) in [
                (DType::F32, ReduceOp::Sum),
                (DType::Bf16, ReduceOp::Mean),
                (DType::F64, ReduceOp::Prod),
            ] {
                let mut case = case(hosts, count, dtype, op);
                let expected = case.expected();
                // The bits are the same if no algorithm is asked for, even for a short vector.
                case.options.algorithm = None;
                for lead in [0, 1] {
                    let lead = NonZeroU32::new(lead);
                    let config = Config { lead, ..Config::default() };
                    let mut sim = Sim::with_config(between(hosts), config);
                    let jobs = case.submit(&mut sim);
                    let report = sim.run().unwrap_or_else(|hang| panic!("{hang}"));
                    for (rank, job) in jobs.into_iter().enumerate() {
                        let result = report.job(job).result();
                        let expected = Some(&expected[rank][..]);
                        assert_eq!(result, expected, "{hosts:?}, {count}, rank {rank}, {lead:?}");
                    }
                }
            }
        }
    }
}

#[test]
fn a_long_vector_on_uneven_hosts_has_the_bits_of_the_placement() {
    let hosts = [0, 0, 0, 1, 2];
    let case = case(&hosts, 2_097_153, DType::F32, ReduceOp::Mean);
    let mut sim = Sim::new(between(&hosts));
    let jobs = case.submit(&mut sim);
    let report = sim.run().unwrap_or_else(|hang| panic!("{hang}"));
    let expected = case.expected();
    for (rank, job) in jobs.into_iter().enumerate() {
        assert!(report.job(job).result() == Some(&expected[rank][..]), "rank {rank} differs");
    }
}

#[test]
fn rank_order_is_kept_if_asked_for() {
    let hosts = [0, 1, 1, 0];
    let by_host = case(&hosts, 1009, DType::F32, ReduceOp::Sum);
    let mut by_rank = by_host.clone();
    by_rank.options.algorithm = Some(Algorithm::TwoPhase);
    assert_ne!(by_host.expected(), by_rank.expected(), "the order must matter to this test");
    let expected = by_rank.expected();
    by_rank.options.algorithm = None;
    let tuning = Tuning { order: SumOrder::Rank, ..Tuning::default() };
    let mut sim = Sim::with_config(between(&hosts), Config { tuning, ..Config::default() });
    let jobs = by_rank.submit(&mut sim);
    let report = sim.run().unwrap();
    for (rank, job) in jobs.into_iter().enumerate() {
        assert_eq!(report.job(job).result(), Some(&expected[rank][..]), "rank {rank}");
    }
}

/// An all-reduce of lengths only.
fn run(hosts: &[u64], bytes: usize, algorithm: Option<Algorithm>) -> Report {
    let mut sim = Sim::new(between(hosts));
    sim.carry_lengths();
    for peer in (0..hosts.len() as u32).map(Peer) {
        let call = Call::AllReduce { count: bytes / 4, dtype: DType::F32, op: ReduceOp::Sum };
        let mut submission = Submission::new(call, Vec::new());
        submission.options.algorithm = algorithm;
        sim.submit(peer, submission);
    }
    sim.run().unwrap_or_else(|hang| panic!("{hang}"))
}

#[test]
fn what_leaves_a_host_does_not_grow_with_its_ranks() {
    let bytes = 100_000_000;
    for (hosts, each) in [(4, 2), (2, 4), (3, 3)] {
        let placed: Vec<_> = (0..hosts * each).map(|rank| rank / each).collect();
        let report = run(&placed, bytes, None);
        let least = 2.0 * (hosts - 1) as f64 / hosts as f64 * bytes as f64;
        for host in 0..hosts {
            let of_host = (host * each) as usize..((host + 1) * each) as usize;
            let left: u64 = report.ranks[of_host].iter().map(|rank| rank.bytes_off_host).sum();
            let ratio = left as f64 / least;
            assert!((1.0..=1.05).contains(&ratio), "{hosts} × {each}: {ratio} of the least");
        }
        let least = Duration::from_secs_f64(least / 125e6);
        let ratio = report.ended.0.as_secs_f64() / least.as_secs_f64();
        assert!(ratio <= 1.1, "{hosts} × {each} takes {ratio} of the least time");
        let flat = run(&placed, bytes, Some(Algorithm::TwoPhase));
        let ratio = report.ended.0.as_secs_f64() / flat.ended.0.as_secs_f64();
        assert!(ratio <= 0.6, "{hosts} × {each} takes {ratio} of flat");
    }
}

/// This could be a rank whose launcher told it something else.
#[test]
fn ranks_that_see_different_hosts_get_an_error_on_all_sides() {
    let case = case(&[0, 0, 1, 1], 1009, DType::F32, ReduceOp::Sum);
    let mut sim = Sim::with_hosts(between(&[0, 0, 1, 1]), Config::default(), &|peer| {
        if peer == Peer(3) { vec![0, 1, 0, 1] } else { vec![0, 0, 1, 1] }
    });
    sim.limit(Time(Duration::from_secs(60)));
    let jobs = case.submit_on(&mut sim, CommId::WORLD, &[0, 1, 2, 3].map(Peer), &|_| {
        farwire_sim::Start::At(Time::ZERO)
    });
    let report = sim.run().unwrap_or_else(|hang| panic!("{hang}"));
    for job in jobs {
        let error = report.job(job).error().expect("nobody may end well");
        assert!(matches!(error.fault, Fault::Desync(..)), "{error}");
        assert!(error.to_string().contains("hosts"), "{error}");
    }
}
