//! The collectives, one file each: pure functions to [`Schedule`](crate::schedule::Schedule)s.

pub(crate) mod all_gather;
pub(crate) mod all_to_all;
pub(crate) mod barrier;
pub(crate) mod broadcast;
pub(crate) mod gather;
pub(crate) mod gather_reduce;
pub(crate) mod message;
pub(crate) mod rank_order;
pub(crate) mod ring;
pub(crate) mod scan;
pub(crate) mod scatter;
pub(crate) mod tree;
pub(crate) mod tree_reduce;
pub(crate) mod two_phase;

/// Slots of a pipeline that passes partial results on: one is being sent while the next is filled,
/// and two more to ride out jitter.
pub(crate) const PIPELINE_SLOTS: usize = 4;
