//! Which algorithm serves a call.
//!
//! A pure function of what all ranks share, so that they all make the same choice. (The choice is
//! part of the [`Fingerprint`](crate::Fingerprint) nevertheless: ranks that were given different
//! inputs get an error, not garbage.)
//!
//! Results must not change with the size of the message: where the order of operands matters to the
//! bits, only the algorithms that keep one order are candidates, even where links are few. That
//! order is rank order, or host by host ([`SumOrder::Host`]) where some ranks share a host and the
//! call has a two-level algorithm. Trees, chains and rings serve reductions of integers, minima and
//! maxima, and callers who ask for them.

use std::time::Duration;

use crate::call::Algorithm;
use crate::collective::Kind;
use crate::dtype::{DType, ReduceOp};
use crate::ids::WorldSize;
use crate::placement::{Placement, SumOrder};
use crate::plan::Tuning;

/// What the links between ranks are like, as far as it matters to the choice of an algorithm. All
/// ranks must be given the same.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Links {
    /// How long an empty frame takes one way, from call to arrival.
    pub latency: Duration,
    /// How much time each message costs its sender, and its receiver, whatever its length.
    pub overhead: Duration,
    /// Bytes per second that a rank can send, and receive; where some ranks share a host, that a
    /// host can.
    pub bandwidth: f64,
    /// Bytes per second that a rank can combine.
    pub reduce_rate: f64,
    /// How many links a rank can use at once without each becoming slow: a ring needs two, the
    /// direct algorithms one per rank.
    pub flows: u32,
}

impl Links {
    /// Shared memory, between cores that have no cache in common.
    pub const SHARED_MEMORY: Self = Self {
        latency: Duration::from_micros(2),
        overhead: Duration::from_micros(1),
        bandwidth: 4e9,
        reduce_rate: 10e9,
        flows: u32::MAX,
    };
}

impl Default for Links {
    /// Ethernet in one room: 10 Gbit/s, 50 µs.
    fn default() -> Self {
        Self {
            latency: Duration::from_micros(50),
            overhead: Duration::ZERO,
            bandwidth: 1.25e9,
            reduce_rate: 10e9,
            flows: u32::MAX,
        }
    }
}

/// The algorithm for `bytes` of `dtype` between ranks on these hosts: the cheapest by the model in
/// this file.
///
/// `reduction` is given for calls that have one; `segment` is the number of bytes in a frame.
pub fn choose(
    kind: Kind,
    reduction: Option<(DType, ReduceOp)>,
    bytes: usize,
    segment: usize,
    placement: &Placement,
    tuning: &Tuning,
) -> Algorithm {
    let (world, links) = (placement.world(), tuning.links_between(placement));
    let free = reduction.is_none_or(|(dtype, op)| !op.depends_on_order(dtype));
    let split = placement.is_split() && tuning.order == SumOrder::Host;
    if split && kind.algorithms().contains(&Algorithm::TwoLevel) {
        // A host's sum of 16-bit floats is rounded, so no flat algorithm gives the same bits.
        let exact = reduction.is_some_and(|(dtype, _)| dtype.accumulator() == dtype);
        let flat_is_the_same = free || (placement.keeps_rank_order() && exact);
        return if flat_is_the_same {
            cheapest_between_hosts(bytes, placement, links)
        } else {
            Algorithm::TwoLevel
        };
    }
    let keeps_order = |algorithm: &&Algorithm| {
        free || matches!(algorithm, Algorithm::TwoPhase | Algorithm::GatherReduce)
    };
    let few_flows = u64::from(links.flows) + 1 < u64::from(world.get());
    // Partial results travel in the accumulator's type.
    let widening =
        reduction.map_or(1.0, |(dtype, _)| (dtype.accumulator().size() / dtype.size()) as f64);
    match kind.algorithms() {
        [only] => *only,
        several if several.contains(&Algorithm::Ring) && few_flows && free => Algorithm::Ring,
        several => *several
            .iter()
            .filter(keeps_order)
            // A ring moves as much as two-phase, in more rounds: it is for few flows, above. And
            // here there is only one level.
            .filter(|algorithm| !matches!(algorithm, Algorithm::Ring | Algorithm::TwoLevel))
            .min_by(|a, b| {
                let cost =
                    |algorithm| seconds(kind, algorithm, bytes, segment, widening, world, links);
                cost(**a).total_cmp(&cost(**b))
            })
            .expect("two-phase keeps rank order, and a broadcast has no order to keep"),
    }
}

/// The cheapest all-reduce where some ranks share a host, if any order of operands will do. What
/// counts is what leaves the largest host; on a host, everything is fast.
fn cheapest_between_hosts(bytes: usize, placement: &Placement, links: &Links) -> Algorithm {
    let size = bytes as f64;
    let (n, hosts) = (placement.world().len() as f64, placement.hosts() as f64);
    let most = placement.columns() as f64;
    let seconds = |rounds: f64, leaving: f64| {
        rounds * links.latency.as_secs_f64() + leaving / links.bandwidth
    };
    let costs = [
        (Algorithm::GatherReduce, seconds(1.0, most * (n - most) * size)),
        (Algorithm::TwoPhase, seconds(2.0, 2.0 * most * (n - most) / n * size)),
        (Algorithm::TwoLevel, seconds(2.0, 2.0 * (hosts - 1.0) / hosts * size)),
    ];
    let least = costs.into_iter().min_by(|(_, a), (_, b)| a.total_cmp(b));
    least.map_or(Algorithm::TwoLevel, |(algorithm, _)| algorithm)
}

/// A model of the time an algorithm takes: rounds × latency + the busiest rank's messages ×
/// overhead + its bytes / bandwidth + bytes combined / rate.
fn seconds(
    kind: Kind,
    algorithm: Algorithm,
    bytes: usize,
    segment: usize,
    widening: f64,
    world: WorldSize,
    links: &Links,
) -> f64 {
    let n = f64::from(world.get());
    let size = bytes as f64;
    // A binomial tree: its depth, and the children of its root.
    let depth = f64::from(world.get().ilog2());
    let children = f64::from(world.get().next_power_of_two().ilog2());
    let others = n - 1.0;
    let (rounds, messages, moved, combined) = match algorithm {
        // The busiest rank of a reduce is the root, which receives what others send.
        Algorithm::TwoPhase => (2.0, 2.0 * others, 2.0 * others / n * size, others / n * size),
        Algorithm::GatherReduce => (1.0, others, others * size, others * size),
        Algorithm::Tree => {
            let size = size * widening;
            let combined = if kind.reduces() { children * size } else { 0.0 };
            (depth, children, children * size, combined)
        }
        Algorithm::Chain => {
            let size = size * widening;
            // The first segment crosses every other link before it reaches the last rank.
            let fill = (n - 2.0).max(0.0) * size.min(segment as f64);
            (others, others, size + fill, if kind.reduces() { size } else { 0.0 })
        }
        Algorithm::Direct => (1.0, others, others / n * size, 0.0),
        Algorithm::Ring | Algorithm::Parcels | Algorithm::TwoLevel => {
            unreachable!("not chosen by this cost")
        }
    };
    rounds * links.latency.as_secs_f64()
        + messages * links.overhead.as_secs_f64()
        + moved / links.bandwidth
        + combined / links.reduce_rate
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const SEGMENT: usize = 64 << 10;

    fn one_host(n: u32) -> Placement {
        Placement::one_host(WorldSize::new(n).unwrap())
    }

    fn all_reduce(bytes: usize, n: u32) -> Algorithm {
        let sum = Some((DType::F32, ReduceOp::Sum));
        choose(Kind::AllReduce, sum, bytes, SEGMENT, &one_host(n), &Tuning::default())
    }

    #[test]
    fn small_vectors_take_one_round_and_large_ones_the_least_volume() {
        for n in [3, 8, 64] {
            assert_eq!(all_reduce(64, n), Algorithm::GatherReduce);
            assert_eq!(all_reduce(64 << 20, n), Algorithm::TwoPhase);
        }
    }

    /// As measured: with two ranks, one round beats two up to longer vectors than with more ranks.
    #[test]
    fn through_shared_memory_short_means_shorter_with_more_ranks() {
        let tuning = Tuning { host_links: Some(Links::SHARED_MEMORY), ..Tuning::default() };
        let sum = Some((DType::F32, ReduceOp::Sum));
        let longest = |n| {
            (8..24)
                .map(|power| 1 << power)
                .take_while(|bytes| {
                    choose(Kind::AllReduce, sum, *bytes, SEGMENT, &one_host(n), &tuning)
                        == Algorithm::GatherReduce
                })
                .last()
        };
        assert_eq!([2, 4, 8, 16].map(longest), [32 << 10, 8 << 10, 4 << 10, 2 << 10].map(Some));
        let apart = Placement::new(&[0, 1, 2, 3]).unwrap();
        let between_hosts = choose(Kind::AllReduce, sum, 16 << 10, SEGMENT, &apart, &tuning);
        assert_eq!(between_hosts, Algorithm::GatherReduce, "which Ethernet's latency decides");
    }

    #[test]
    fn few_flows_take_the_ring() {
        let links = Links { flows: 4, ..Links::default() };
        let tuning = Tuning { links, ..Tuning::default() };
        let at = |n, dtype| {
            let sum = Some((dtype, ReduceOp::Sum));
            choose(Kind::AllReduce, sum, 1 << 20, SEGMENT, &one_host(n), &tuning)
        };
        assert_eq!(at(5, DType::I32), Algorithm::TwoPhase);
        assert_eq!(at(6, DType::I32), Algorithm::Ring);
        assert_eq!(at(6, DType::F32), Algorithm::TwoPhase, "a float sum keeps its order");
    }

    #[test]
    fn broadcast_takes_the_tree_for_latency_and_the_chain_for_volume() {
        let at = |bytes| {
            choose(Kind::Broadcast, None, bytes, SEGMENT, &one_host(16), &Tuning::default())
        };
        assert_eq!(at(100), Algorithm::Tree);
        assert_eq!(at(100 << 20), Algorithm::Chain);
    }

    proptest! {
        #[test]
        fn every_choice_can_run_and_keeps_order_where_it_matters(
            kind in prop::sample::select(Kind::ALL.to_vec()),
            dtype in prop::sample::select(DType::ALL.to_vec()),
            op in prop::sample::select(ReduceOp::ALL.to_vec()),
            bytes in 0usize..1 << 40,
            hosts in prop::collection::vec(0u32..20, 1..40),
            order in prop::sample::select(vec![SumOrder::Host, SumOrder::Rank]),
            latency_us in 0u64..1_000_000,
            bandwidth in 1e3f64..1e12,
            flows in 1u32..2000,
        ) {
            let links = Links { latency: Duration::from_micros(latency_us), bandwidth, flows, ..Links::default() };
            let reduction = kind.reduces().then_some((dtype, op));
            let placement = Placement::new(&hosts).unwrap();
            let tuning = Tuning { links, order, ..Tuning::default() };
            let choice = choose(kind, reduction, bytes, SEGMENT, &placement, &tuning);
            prop_assert!(kind.algorithms().contains(&choice));
            if kind == Kind::Reduce && op.depends_on_order(dtype) {
                prop_assert!(matches!(choice, Algorithm::TwoPhase | Algorithm::GatherReduce));
            }
            if kind == Kind::AllReduce && op.depends_on_order(dtype) {
                let by_host = placement.is_split() && order == SumOrder::Host;
                let either = by_host && placement.keeps_rank_order() && dtype.accumulator() == dtype;
                let two_level = choice == Algorithm::TwoLevel;
                prop_assert!(either || two_level == by_host, "{choice}");
                prop_assert!(choice != Algorithm::Ring);
            }
        }
    }
}
