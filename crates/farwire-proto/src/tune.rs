//! Which algorithm serves a call.
//!
//! A pure function of what all ranks share, so that all of them choose the same. (The choice is
//! part of the [`Fingerprint`](crate::Fingerprint) all the same: ranks that were given different
//! inputs get an error, not garbage.)
//!
//! Results must not change with the size of the message: where the order of operands matters to the
//! bits, only the algorithms that keep rank order are candidates, even where links are few. Trees,
//! chains and rings serve reductions of integers, minima and maxima, and anyone who asks.

use std::time::Duration;

use crate::call::Algorithm;
use crate::collective::Kind;
use crate::dtype::{DType, ReduceOp};
use crate::ids::WorldSize;

/// What the links between ranks are like, as far as it decides an algorithm. All ranks must be
/// given the same.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Links {
    /// One way, from call to arrival, for an empty frame.
    pub latency: Duration,
    /// Bytes per second that a rank can send, and receive.
    pub bandwidth: f64,
    /// Bytes per second that a rank can combine.
    pub reduce_rate: f64,
    /// How many links a rank can use at once without each becoming slow: a ring needs two, the
    /// direct algorithms one per rank.
    pub flows: u32,
}

impl Default for Links {
    /// Ethernet in one room: 10 Gbit/s, 50 µs.
    fn default() -> Self {
        Self {
            latency: Duration::from_micros(50),
            bandwidth: 1.25e9,
            reduce_rate: 10e9,
            flows: u32::MAX,
        }
    }
}

/// The algorithm for `bytes` of `dtype` in a world of this size: the cheapest by the model in this
/// file.
///
/// `reduction` is there for the calls that have one; `segment` is the number of bytes in a frame.
pub fn choose(
    kind: Kind,
    reduction: Option<(DType, ReduceOp)>,
    bytes: usize,
    segment: usize,
    world: WorldSize,
    links: &Links,
) -> Algorithm {
    let free = reduction.is_none_or(|(dtype, op)| !op.depends_on_order(dtype));
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
            // A ring moves what two-phase moves, in more rounds: it is for few flows, above.
            .filter(|algorithm| **algorithm != Algorithm::Ring)
            .min_by(|a, b| {
                let cost =
                    |algorithm| seconds(kind, algorithm, bytes, segment, widening, world, links);
                cost(**a).total_cmp(&cost(**b))
            })
            .expect("two-phase keeps rank order, and a broadcast has no order to keep"),
    }
}

/// A model of the time an algorithm takes: rounds × latency + the busiest rank's bytes / bandwidth
/// + bytes combined / rate.
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
    let (rounds, moved, combined) = match algorithm {
        // The busiest rank of a reduce is the root, which receives what others send.
        Algorithm::TwoPhase => (2.0, 2.0 * (n - 1.0) / n * size, (n - 1.0) / n * size),
        Algorithm::GatherReduce => (1.0, (n - 1.0) * size, (n - 1.0) * size),
        Algorithm::Tree => {
            let size = size * widening;
            let combined = if kind.reduces() { children * size } else { 0.0 };
            (depth, children * size, combined)
        }
        Algorithm::Chain => {
            let size = size * widening;
            // The last rank's first segment has crossed every link before.
            let fill = (n - 2.0).max(0.0) * size.min(segment as f64);
            (n - 1.0, size + fill, if kind.reduces() { size } else { 0.0 })
        }
        Algorithm::Direct => (1.0, (n - 1.0) / n * size, 0.0),
        Algorithm::Ring | Algorithm::Parcels => unreachable!("not chosen by cost"),
    };
    rounds * links.latency.as_secs_f64() + moved / links.bandwidth + combined / links.reduce_rate
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const SEGMENT: usize = 64 << 10;

    fn all_reduce(bytes: usize, n: u32) -> Algorithm {
        let sum = Some((DType::F32, ReduceOp::Sum));
        choose(Kind::AllReduce, sum, bytes, SEGMENT, WorldSize::new(n).unwrap(), &Links::default())
    }

    #[test]
    fn small_vectors_take_one_round_and_large_ones_the_least_volume() {
        for n in [3, 8, 64] {
            assert_eq!(all_reduce(64, n), Algorithm::GatherReduce);
            assert_eq!(all_reduce(64 << 20, n), Algorithm::TwoPhase);
        }
    }

    #[test]
    fn few_flows_take_the_ring() {
        let links = Links { flows: 4, ..Links::default() };
        let at = |n, dtype| {
            let sum = Some((dtype, ReduceOp::Sum));
            choose(Kind::AllReduce, sum, 1 << 20, SEGMENT, WorldSize::new(n).unwrap(), &links)
        };
        assert_eq!(at(5, DType::I32), Algorithm::TwoPhase);
        assert_eq!(at(6, DType::I32), Algorithm::Ring);
        assert_eq!(at(6, DType::F32), Algorithm::TwoPhase, "a float sum keeps its order");
    }

    #[test]
    fn broadcast_takes_the_tree_for_latency_and_the_chain_for_volume() {
        let at = |bytes| {
            let world = WorldSize::new(16).unwrap();
            choose(Kind::Broadcast, None, bytes, SEGMENT, world, &Links::default())
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
            n in 1u32..2000,
            latency_us in 0u64..1_000_000,
            bandwidth in 1e3f64..1e12,
            flows in 1u32..2000,
        ) {
            let links = Links { latency: Duration::from_micros(latency_us), bandwidth, flows, ..Links::default() };
            let reduction = kind.reduces().then_some((dtype, op));
            let choice = choose(kind, reduction, bytes, SEGMENT, WorldSize::new(n).unwrap(), &links);
            prop_assert!(kind.algorithms().contains(&choice));
            if matches!(kind, Kind::AllReduce | Kind::Reduce) && op.depends_on_order(dtype) {
                prop_assert!(matches!(choice, Algorithm::TwoPhase | Algorithm::GatherReduce));
            }
        }
    }
}
