//! Tier 2: what each algorithm sends, in how many rounds, and how near the time comes to the least
//! possible.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on should say where")]

mod common;

use std::time::Duration;

use farwire_proto::{
    Algorithm, Config, DType, Kind, Options, Peer, Placement, ReduceOp, Tuning, WorldSize, tune,
};
use farwire_sim::kinds::Shape;
use farwire_sim::{Link, Network, Report, Sim, Submission, lower_bound};

/// A vector of `bytes` over `n` ranks, lengths only, at 1 Gbit/s and 20 ms.
fn run(kind: Kind, algorithm: Option<Algorithm>, n: u32, bytes: usize) -> (Report, Network) {
    run_typed(kind, (DType::F32, ReduceOp::Sum), algorithm, n, bytes)
}

fn run_typed(
    kind: Kind,
    (dtype, op): (DType, ReduceOp),
    algorithm: Option<Algorithm>,
    n: u32,
    bytes: usize,
) -> (Report, Network) {
    let link = Link { latency: Duration::from_millis(20), ..Link::IDEAL };
    let network = Network { bandwidth: 125e6, link, ..Network::lan(n) };
    let mut sim = Sim::with_config(network.clone(), Config::default());
    sim.carry_lengths();
    let shape = Shape::even(network.world, bytes / dtype.size(), dtype, op);
    for rank in shape.world.ranks() {
        let call = shape.row(kind, rank).calls.swap_remove(0);
        let options = Options { algorithm, ..Options::default() };
        sim.submit(Peer(rank.0), Submission { options, ..Submission::new(call, Vec::new()) });
    }
    (sim.run().unwrap_or_else(|hang| panic!("{hang}")), network)
}

/// The volume of all-reduce does not grow with the number of ranks, headers included.
#[test]
fn all_reduce_sends_the_least_volume() {
    let bytes = 100_000_000;
    for n in [2, 3, 8, 64] {
        for algorithm in [Algorithm::TwoPhase, Algorithm::Ring] {
            let (report, _) = run(Kind::AllReduce, Some(algorithm), n, bytes);
            let least = 2.0 * f64::from(n - 1) / f64::from(n) * bytes as f64;
            let ratio = report.wire_bytes_max() as f64 / least;
            assert!(
                (1.0..=1.02).contains(&ratio),
                "{algorithm} over {n} ranks sends {ratio} of the least"
            );
        }
    }
}

#[test]
fn all_reduce_takes_the_least_time_far_apart() {
    let (report, network) = run(Kind::AllReduce, None, 8, 100_000_000);
    let bound = lower_bound(Kind::AllReduce, 100_000_000, &network);
    let ratio = report.ended.0.as_secs_f64() / bound.as_secs_f64();
    assert!((1.0..=1.05).contains(&ratio), "{ratio} of the bound");
}

/// No run beats the bound, and one round at full rate meets it.
#[test]
fn direct_collectives_meet_their_bound() {
    for kind in Kind::ALL.into_iter().filter(|kind| *kind != Kind::Message) {
        for algorithm in kind.algorithms() {
            let (report, network) = run(kind, Some(*algorithm), 8, 10_000_000);
            let bound = lower_bound(kind, 10_000_000, &network).as_secs_f64();
            let ratio = report.ended.0.as_secs_f64() / bound;
            assert!(ratio >= 1.0, "{kind} by {algorithm} beats its bound: {ratio}");
            assert!(
                *algorithm != Algorithm::Direct || kind == Kind::Barrier || ratio <= 1.05,
                "{kind}: {ratio}"
            );
        }
    }
}

#[test]
fn rounds_are_what_each_algorithm_says() {
    let n = 11;
    for (kind, algorithm, rounds) in [
        (Kind::AllReduce, Algorithm::TwoPhase, 2),
        (Kind::AllReduce, Algorithm::GatherReduce, 1),
        (Kind::AllReduce, Algorithm::Ring, 2 * (n - 1)),
        (Kind::Reduce, Algorithm::TwoPhase, 2),
        (Kind::Reduce, Algorithm::GatherReduce, 1),
        (Kind::Reduce, Algorithm::Tree, 3), // node 7 hangs from 6, 6 from 4, and 4 from 0
        (Kind::Reduce, Algorithm::Chain, n - 1),
        (Kind::Broadcast, Algorithm::Tree, 3),
        (Kind::Broadcast, Algorithm::Chain, n - 1),
        (Kind::Scan, Algorithm::Chain, n - 1),
        (Kind::AllGather, Algorithm::Direct, 1),
        (Kind::ReduceScatter, Algorithm::Direct, 1),
        (Kind::AllToAll, Algorithm::Direct, 1),
        (Kind::Barrier, Algorithm::Direct, 1),
    ] {
        let (report, _) = run(kind, Some(algorithm), n, 1_000_000);
        assert_eq!(report.rounds, rounds, "{kind} by {algorithm}");
    }
}

/// The modelled costs that `tune` compares must rank algorithms as the simulator does, among those
/// that keep the order where it matters.
#[test]
fn the_chosen_algorithm_is_never_much_slower_than_the_best() {
    let links = tune::Links {
        latency: Duration::from_millis(20),
        bandwidth: 125e6,
        ..tune::Links::default()
    };
    let tuning = Tuning { links, ..Tuning::default() };
    let float = (DType::F32, ReduceOp::Sum);
    for (kind, (dtype, op)) in [
        (Kind::AllReduce, float),
        (Kind::AllReduce, (DType::I32, ReduceOp::Sum)),
        (Kind::Broadcast, float),
        (Kind::Reduce, float),
        (Kind::Reduce, (DType::I32, ReduceOp::Sum)),
        (Kind::Reduce, (DType::F16, ReduceOp::Max)),
    ] {
        for n in [2, 3, 8, 16] {
            for bytes in [8, 4096, 1 << 20, 32 << 20] {
                let seconds = |algorithm| {
                    run_typed(kind, (dtype, op), Some(algorithm), n, bytes).0.ended.0.as_secs_f64()
                };
                let reduction = kind.reduces().then_some((dtype, op));
                let placement = Placement::one_host(WorldSize::new(n).unwrap());
                let chosen = tune::choose(kind, reduction, bytes, 64 << 10, &placement, &tuning);
                let keeps_order = |algorithm: &&Algorithm| {
                    let free = !kind.reduces() || !op.depends_on_order(dtype);
                    free || matches!(algorithm, Algorithm::TwoPhase | Algorithm::GatherReduce)
                };
                let candidates = kind.algorithms().iter().filter(keeps_order);
                let best =
                    candidates.map(|algorithm| seconds(*algorithm)).fold(f64::INFINITY, f64::min);
                let ratio = seconds(chosen) / best;
                let what = format!("{kind} ({op}, {dtype}) of {bytes} bytes over {n} ranks");
                assert!(ratio <= 1.15, "{what}: {chosen} takes {ratio} of the best");
            }
        }
    }
}
