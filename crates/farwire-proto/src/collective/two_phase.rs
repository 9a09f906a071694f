//! Two-phase direct: the default all-reduce, and with one phase left out, reduce-scatter and
//! reduce.
//!
//! The vector is cut into N shards, shard j owned by rank j.
//!
//! 1. *Scatter.* Every rank sends each shard to its owner.
//! 2. *Reduce.* The owner folds what it gets in rank order ([`RankOrder`]).
//! 3. *Gather.* The owner sends the result, segment by segment as it completes, to whoever needs
//!    it: everyone (all-reduce), the root (reduce), nobody (reduce-scatter).
//!
//! ```text
//!            to owner 0   to owner 1   to owner 2            from 0  from 1  from 2
//! rank 0         ·          x01 ─▶       x02 ─▶     then       ·      s1      s2
//! rank 1       x10 ─▶        ·           x12 ─▶               s0       ·      s2
//! rank 2       x20 ─▶      x21 ─▶         ·                   s0      s1       ·
//! ```
//!
//! Bytes sent per rank, for S bytes: (N−1)/N·S in each phase. Rounds: one per phase.

use crate::collective::rank_order::RankOrder;
use crate::ids::{Rank, WorldSize};
use crate::partition::{Partition, Span};
use crate::schedule::{InPlace, Incoming, Local, Outcome, Outgoing, Schedule, Source};

/// Who gets the shards once they are reduced.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Gather {
    /// Everyone: all-reduce.
    All,
    /// One rank: reduce.
    Root(Rank),
    /// Nobody but the owner: reduce-scatter.
    Nobody,
}

#[derive(Clone, Debug)]
pub(crate) struct TwoPhase {
    pub(crate) me: Rank,
    pub(crate) world: WorldSize,
    /// Even: all shards have the same number of segments.
    pub(crate) shards: Partition,
    pub(crate) gather: Gather,
}

impl TwoPhase {
    /// Whether `rank` ends with the whole vector.
    fn gets_all(&self, rank: Rank) -> bool {
        match self.gather {
            Gather::All => true,
            Gather::Root(root) => rank == root,
            Gather::Nobody => false,
        }
    }

    fn segments(&self) -> usize {
        self.shards.segments(self.me)
    }

    /// Where the result of this rank's `k`-th segment goes in its output.
    fn result(&self, k: usize) -> Span {
        let span = self.shards.segment(self.me, k);
        if self.gets_all(self.me) { span } else { span.within(self.shards.block(self.me)) }
    }

    fn order(&self) -> RankOrder {
        RankOrder { owner: self.me, world: self.world }
    }

    fn phases(&self, receiver: Rank) -> usize {
        1 + usize::from(self.gets_all(receiver))
    }
}

impl Schedule for TwoPhase {
    fn input_len(&self) -> usize {
        self.shards.len()
    }

    fn output_len(&self) -> usize {
        if self.gets_all(self.me) { self.shards.len() } else { self.shards.block(self.me).len }
    }

    fn outcome(&self) -> Outcome {
        match self.gather {
            Gather::Root(root) if root != self.me => Outcome::Nothing,
            _ => Outcome::Output,
        }
    }

    fn sends(&self, to: Rank) -> usize {
        self.segments() * self.phases(to)
    }

    fn send(&self, to: Rank, i: usize) -> Outgoing {
        match i.checked_sub(self.segments()) {
            None => Outgoing::now(Source::Input(self.shards.segment(to, i))),
            Some(k) => Outgoing::after(self.order().complete(k), Source::Output(self.result(k))),
        }
    }

    fn recvs(&self, _from: Rank) -> usize {
        self.segments() * self.phases(self.me)
    }

    fn recv(&self, from: Rank, i: usize) -> Incoming {
        match i.checked_sub(self.segments()) {
            None => self.order().fold(from, i, self.shards.segment(self.me, i), self.result(i)),
            Some(k) => Incoming::store(self.shards.segment(from, k)),
        }
    }

    fn local(&self) -> Local {
        if self.world.get() == 1 { Local::InputIsResult } else { Local::Nothing }
    }

    /// A result waits for frames that have its segment's index, which is lower than its own.
    fn keeps_step(&self) -> bool {
        true
    }

    /// A segment's result comes back only from an owner that has folded this rank's frame with it.
    fn in_place(&self) -> Option<InPlace> {
        let output = if self.gets_all(self.me) { 0 } else { self.shards.block(self.me).start };
        Some(InPlace { input: 0, output })
    }
}
