//! The least time that any algorithm could take.

use std::time::Duration;

use farwire_proto::Kind;

use crate::network::{Network, transfer_time};

/// A lower bound on the time of an operation on a vector of `bytes`: what the busiest rank must
/// send or receive at the least, at full rate, and one latency, because the last rank's
/// contribution has to reach somebody.
///
/// For gather, scatter, all-gather and all-to-all, `bytes` is the long vector, made of one block
/// per rank.
pub fn lower_bound(kind: Kind, bytes: usize, network: &Network) -> Duration {
    let n = network.world.get();
    if n == 1 {
        return Duration::ZERO;
    }
    let without_own = f64::from(n - 1) / f64::from(n);
    let share = match kind {
        Kind::AllReduce => 2.0 * without_own,
        Kind::ReduceScatter | Kind::AllGather | Kind::Gather | Kind::Scatter | Kind::AllToAll => without_own,
        Kind::Broadcast | Kind::Reduce | Kind::Scan | Kind::ExclusiveScan | Kind::Message => 1.0,
        Kind::Barrier => 0.0,
    };
    let transfer = transfer_time((share * bytes as f64).ceil() as usize, network.bandwidth);
    transfer.saturating_add(network.link.latency)
}
