//! Scan and exclusive scan along the chain of ranks.
//!
//! Rank r receives the combination of ranks 0..r from its left, segment by segment, combines its
//! own elements with it, and passes the result to its right. The inclusive result is what it passes
//! on; the exclusive result is what it received (the identity on rank 0).
//!
//! ```text
//! rank 0 ── x0 ──▶ rank 1 ── x0∘x1 ──▶ rank 2 ── x0∘x1∘x2 ──▶ …
//! ```
//!
//! Bytes sent per rank, for S bytes: S. Rounds: N−1, pipelined over segments. The order is rank
//! order. Partial results travel in the accumulator's type.

use crate::collective::PIPELINE_SLOTS;
use crate::ids::{Rank, WorldSize};
use crate::partition::{Partition, Span};
use crate::schedule::{
    Action, Emit, Fold, Gate, Incoming, Level, Local, Mine, Outgoing, Own, Running, Schedule,
    Slots, Source,
};

#[derive(Clone, Debug)]
pub(crate) struct Scan {
    pub(crate) me: Rank,
    pub(crate) world: WorldSize,
    /// The whole vector as one block.
    pub(crate) vector: Partition,
    pub(crate) exclusive: bool,
}

impl Scan {
    fn left(&self) -> Option<Rank> {
        self.me.0.checked_sub(1).map(Rank)
    }

    fn right(&self) -> Option<Rank> {
        Some(Rank(self.me.0 + 1)).filter(|right| self.world.contains(*right))
    }

    fn segments(&self) -> usize {
        self.vector.segments(Rank(0))
    }

    fn segment(&self, k: usize) -> Span {
        self.vector.segment(Rank(0), k)
    }
}

impl Schedule for Scan {
    fn input_len(&self) -> usize {
        self.vector.len()
    }

    fn output_len(&self) -> usize {
        self.vector.len()
    }

    fn sends(&self, to: Rank) -> usize {
        if self.right() == Some(to) { self.segments() } else { 1 }
    }

    fn send(&self, to: Rank, i: usize) -> Outgoing {
        if self.right() != Some(to) {
            return Outgoing::HELLO;
        }
        let span = self.segment(i);
        if self.left().is_none() {
            return Outgoing::now(Source::InputAsPartial(span));
        }
        let source = Source::Partial { slot: i % PIPELINE_SLOTS, len: span.len };
        Outgoing::after(Gate::after_receipts(i + 1), source)
    }

    fn recvs(&self, from: Rank) -> usize {
        if self.left() == Some(from) { self.segments() } else { 1 }
    }

    fn recv(&self, from: Rank, i: usize) -> Incoming {
        if self.left() != Some(from) {
            return Incoming::HELLO;
        }
        let span = self.segment(i);
        let fold = Fold {
            len: span.len,
            partial: true,
            first: true,
            own: Own::After(Mine::Input(span)),
            level: Level::All,
            running: Running::Slot(i % PIPELINE_SLOTS),
            emit: if self.exclusive { Emit::BeforeOwn(span) } else { Emit::Last(span) },
        };
        let slot_free = match self.right() {
            Some(_) => (i + 1).saturating_sub(PIPELINE_SLOTS),
            None => 0,
        };
        Incoming { action: Action::Fold(fold), gate: Gate { sent: slot_free, ..Gate::OPEN } }
    }

    fn is_upstream(&self, from: Rank) -> bool {
        self.left() == Some(from)
    }

    fn downstream(&self) -> Option<Rank> {
        self.right()
    }

    fn local(&self) -> Local {
        match (self.left(), self.exclusive) {
            (Some(_), _) => Local::Nothing,
            (None, true) => Local::Identity,
            (None, false) => Local::InputIsResult,
        }
    }

    fn slots(&self) -> Slots {
        match self.left() {
            Some(_) => Slots { count: PIPELINE_SLOTS, len: self.vector.longest_segment() },
            None => Slots::default(),
        }
    }
}
