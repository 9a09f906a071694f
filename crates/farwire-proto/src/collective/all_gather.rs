//! All-gather: every rank sends its block straight to every other.
//!
//! Bytes sent per rank, for a block of B bytes: (N−1)·B. Rounds: 1.

use crate::ids::Rank;
use crate::partition::Partition;
use crate::schedule::{InPlace, Incoming, Local, Outgoing, Schedule, Source};

#[derive(Clone, Debug)]
pub(crate) struct AllGather {
    pub(crate) me: Rank,
    /// The result: one block per rank.
    pub(crate) blocks: Partition,
}

impl Schedule for AllGather {
    fn input_len(&self) -> usize {
        self.blocks.block(self.me).len
    }

    fn output_len(&self) -> usize {
        self.blocks.len()
    }

    fn sends(&self, _to: Rank) -> usize {
        self.blocks.segments(self.me)
    }

    fn send(&self, _to: Rank, i: usize) -> Outgoing {
        let span = self.blocks.segment(self.me, i).within(self.blocks.block(self.me));
        Outgoing::now(Source::Input(span))
    }

    fn recvs(&self, from: Rank) -> usize {
        self.blocks.segments(from)
    }

    fn recv(&self, from: Rank, i: usize) -> Incoming {
        Incoming::store(self.blocks.segment(from, i))
    }

    fn local(&self) -> Local {
        let to = self.blocks.block(self.me);
        Local::Copy { from: to.within(to), to }
    }

    /// Each rank's block is at its place from the start, and nobody else's is stored there.
    fn in_place(&self) -> Option<InPlace> {
        Some(InPlace { input: self.blocks.block(self.me).start, output: 0 })
    }
}
