//! The least time that any algorithm could take.

use std::time::Duration;

use farwire_proto::{DType, Kind, Placement, Rank, ReduceOp, WorldSize};

use crate::kinds::Shape;
use crate::network::{Network, transfer_time};

/// A lower bound on the time of an operation on a vector of `bytes`: the least that the busiest
/// rank must send or receive, at full rate, and one latency, because the last rank's contribution
/// has to reach another rank.
///
/// For gather, scatter, all-gather and all-to-all, `bytes` is the long vector, made of one block
/// per rank. Ranks on one host count as one rank: only what leaves the host counts.
pub fn lower_bound(kind: Kind, bytes: usize, network: &Network) -> Duration {
    let hosts = network.hosts.as_deref().and_then(Placement::new);
    let hosts = hosts.and_then(|placement| WorldSize::new(placement.hosts() as u32));
    let world = hosts.unwrap_or(network.world);
    if world.get() == 1 {
        return Duration::ZERO;
    }
    let shape = Shape::even(world, bytes, DType::U8, ReduceOp::Sum);
    let share = shape.row(kind, Rank(0)).share;
    let transfer = transfer_time((share * bytes as f64).ceil() as usize, network.bandwidth);
    transfer.saturating_add(network.link.latency)
}
