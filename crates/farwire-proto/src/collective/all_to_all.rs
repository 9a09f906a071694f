//! All-to-all: every rank sends each other rank a different block.
//!
//! Bytes sent per rank: its input less the block it keeps. Rounds: 1.

use crate::ids::Rank;
use crate::partition::Partition;
use crate::schedule::{Incoming, Local, Outgoing, Schedule, Source};

#[derive(Clone, Debug)]
pub(crate) struct AllToAll {
    pub(crate) me: Rank,
    /// The input: one block per receiver.
    pub(crate) to: Partition,
    /// The output: one block per sender.
    pub(crate) from: Partition,
}

impl Schedule for AllToAll {
    fn input_len(&self) -> usize {
        self.to.len()
    }

    fn output_len(&self) -> usize {
        self.from.len()
    }

    fn sends(&self, to: Rank) -> usize {
        self.to.segments(to)
    }

    fn send(&self, to: Rank, i: usize) -> Outgoing {
        Outgoing::now(Source::Input(self.to.segment(to, i)))
    }

    fn recvs(&self, from: Rank) -> usize {
        self.from.segments(from)
    }

    fn recv(&self, from: Rank, i: usize) -> Incoming {
        Incoming::store(self.from.segment(from, i))
    }

    fn pair(&self, other: Rank) -> Option<[usize; 2]> {
        Some([self.to.block(other).len, self.from.block(other).len])
    }

    fn local(&self) -> Local {
        Local::Copy { from: self.to.block(self.me), to: self.from.block(self.me) }
    }
}
