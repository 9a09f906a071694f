//! Gather: every rank sends its block straight to the root.
//!
//! Bytes sent per rank: its block; received by the root: the result less its own. Rounds: 1. Other
//! pairs exchange an empty frame.

use crate::ids::Rank;
use crate::partition::Partition;
use crate::schedule::{Incoming, Local, Outcome, Outgoing, Schedule, Source};

#[derive(Clone, Debug)]
pub(crate) struct Gather {
    pub(crate) me: Rank,
    pub(crate) root: Rank,
    /// The result: one block per rank.
    pub(crate) blocks: Partition,
}

impl Schedule for Gather {
    fn input_len(&self) -> usize {
        self.blocks.block(self.me).len
    }

    fn output_len(&self) -> usize {
        if self.me == self.root { self.blocks.len() } else { 0 }
    }

    fn outcome(&self) -> Outcome {
        if self.me == self.root { Outcome::Output } else { Outcome::Nothing }
    }

    fn sends(&self, to: Rank) -> usize {
        if to == self.root { self.blocks.segments(self.me) } else { 1 }
    }

    fn send(&self, to: Rank, i: usize) -> Outgoing {
        if to != self.root {
            return Outgoing::HELLO;
        }
        let span = self.blocks.segment(self.me, i).within(self.blocks.block(self.me));
        Outgoing::now(Source::Input(span))
    }

    fn recvs(&self, from: Rank) -> usize {
        if self.me == self.root { self.blocks.segments(from) } else { 1 }
    }

    fn recv(&self, from: Rank, i: usize) -> Incoming {
        if self.me == self.root {
            Incoming::store(self.blocks.segment(from, i))
        } else {
            Incoming::HELLO
        }
    }

    fn local(&self) -> Local {
        if self.me != self.root {
            return Local::Nothing;
        }
        let to = self.blocks.block(self.me);
        Local::Copy { from: to.within(to), to }
    }
}
