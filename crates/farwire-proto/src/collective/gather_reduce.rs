//! Gather-reduce: all-reduce and reduce for small vectors.
//!
//! Whoever needs the result gets everyone's whole vector and folds in rank order, so the bits are
//! those of [two-phase](super::two_phase), in one round rather than two.
//!
//! Bytes sent per rank, for S bytes: (N−1)·S for all-reduce; S for reduce, of which the root
//! receives (N−1)·S. Rounds: 1.

use crate::collective::rank_order::RankOrder;
use crate::ids::{Rank, WorldSize};
use crate::partition::Partition;
use crate::schedule::{InPlace, Incoming, Local, Outcome, Outgoing, Schedule, Source};

#[derive(Clone, Debug)]
pub(crate) struct GatherReduce {
    pub(crate) me: Rank,
    pub(crate) world: WorldSize,
    /// The whole vector as one block.
    pub(crate) vector: Partition,
    /// Who gets the result; everyone if absent.
    pub(crate) root: Option<Rank>,
}

impl GatherReduce {
    /// The only block of [`Self::vector`].
    const WHOLE: Rank = Rank(0);

    fn needs_result(&self, rank: Rank) -> bool {
        self.root.is_none_or(|root| rank == root)
    }
}

impl Schedule for GatherReduce {
    fn input_len(&self) -> usize {
        self.vector.len()
    }

    fn output_len(&self) -> usize {
        if self.needs_result(self.me) { self.vector.len() } else { 0 }
    }

    fn outcome(&self) -> Outcome {
        if self.needs_result(self.me) { Outcome::Output } else { Outcome::Nothing }
    }

    fn sends(&self, to: Rank) -> usize {
        if self.needs_result(to) { self.vector.segments(Self::WHOLE) } else { 1 }
    }

    fn send(&self, to: Rank, i: usize) -> Outgoing {
        if self.needs_result(to) {
            Outgoing::now(Source::Input(self.vector.segment(Self::WHOLE, i)))
        } else {
            Outgoing::HELLO
        }
    }

    fn recvs(&self, _from: Rank) -> usize {
        if self.needs_result(self.me) { self.vector.segments(Self::WHOLE) } else { 1 }
    }

    fn recv(&self, from: Rank, i: usize) -> Incoming {
        if !self.needs_result(self.me) {
            return Incoming::HELLO;
        }
        let span = self.vector.segment(Self::WHOLE, i);
        RankOrder { owner: self.me, world: self.world }.fold(from, i, span, span)
    }

    fn local(&self) -> Local {
        if self.world.get() == 1 { Local::InputIsResult } else { Local::Nothing }
    }

    /// All-reduce cannot: a segment may be complete here while this rank's frame with it still
    /// waits for room on the way to a slow peer. (So its result is copied back.) The root of a reduce
    /// sends its input to nobody.
    fn in_place(&self) -> Option<InPlace> {
        self.root.map(|_| InPlace::default())
    }
}
