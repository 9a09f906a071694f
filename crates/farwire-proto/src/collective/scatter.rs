//! Scatter: the root sends each rank its block.
//!
//! Bytes sent by the root: its vector less its own block. Rounds: 1. Other pairs exchange an empty
//! frame.

use crate::ids::Rank;
use crate::partition::Partition;
use crate::schedule::{Incoming, Local, Outgoing, Schedule, Source};

#[derive(Clone, Debug)]
pub(crate) struct Scatter {
    pub(crate) me: Rank,
    pub(crate) root: Rank,
    /// The root's vector: one block per rank.
    pub(crate) blocks: Partition,
}

impl Schedule for Scatter {
    fn input_len(&self) -> usize {
        if self.me == self.root { self.blocks.len() } else { 0 }
    }

    fn output_len(&self) -> usize {
        self.blocks.block(self.me).len
    }

    fn sends(&self, to: Rank) -> usize {
        if self.me == self.root { self.blocks.segments(to) } else { 1 }
    }

    fn send(&self, to: Rank, i: usize) -> Outgoing {
        if self.me == self.root {
            Outgoing::now(Source::Input(self.blocks.segment(to, i)))
        } else {
            Outgoing::HELLO
        }
    }

    fn recvs(&self, from: Rank) -> usize {
        if from == self.root { self.blocks.segments(self.me) } else { 1 }
    }

    fn recv(&self, from: Rank, i: usize) -> Incoming {
        if from != self.root {
            return Incoming::HELLO;
        }
        Incoming::store(self.blocks.segment(self.me, i).within(self.blocks.block(self.me)))
    }

    fn local(&self) -> Local {
        if self.me != self.root {
            return Local::Nothing;
        }
        let from = self.blocks.block(self.me);
        Local::Copy { from, to: from.within(from) }
    }
}
