//! Reduce along a tree, segment by segment: a rank combines its own elements with its children's
//! and passes the partial result up.
//!
//! Bytes sent per rank, for S bytes: S; received: children × S. Rounds: the depth of the tree. The
//! order of combination follows the tree: own, then the children, nearest first; it depends on the
//! world and the root, never on the size or on arrival. Partial results travel in the accumulator's
//! type.

use crate::collective::PIPELINE_SLOTS;
use crate::collective::tree::Tree;
use crate::ids::Rank;
use crate::partition::{Partition, Span};
use crate::schedule::{
    Action, Emit, Fold, Gate, InPlace, Incoming, Level, Local, Mine, Outcome, Outgoing, Own,
    Running, Schedule, Slots, Source,
};

#[derive(Clone, Debug)]
pub(crate) struct TreeReduce {
    pub(crate) tree: Tree,
    /// The whole vector as one block.
    pub(crate) vector: Partition,
}

impl TreeReduce {
    fn is_root(&self) -> bool {
        self.tree.parent().is_none()
    }

    fn segments(&self) -> usize {
        self.vector.segments(Rank(0))
    }

    fn segment(&self, k: usize) -> Span {
        self.vector.segment(Rank(0), k)
    }
}

impl Schedule for TreeReduce {
    fn input_len(&self) -> usize {
        self.vector.len()
    }

    fn output_len(&self) -> usize {
        if self.is_root() { self.vector.len() } else { 0 }
    }

    fn outcome(&self) -> Outcome {
        if self.is_root() { Outcome::Output } else { Outcome::Nothing }
    }

    fn sends(&self, to: Rank) -> usize {
        if self.tree.parent() == Some(to) { self.segments() } else { 1 }
    }

    fn send(&self, to: Rank, i: usize) -> Outgoing {
        if self.tree.parent() != Some(to) {
            return Outgoing::HELLO;
        }
        let span = self.segment(i);
        if self.tree.children() == 0 {
            return Outgoing::now(Source::InputAsPartial(span));
        }
        let source = Source::Partial { slot: i % PIPELINE_SLOTS, len: span.len };
        Outgoing::after(Gate::after_folds((i + 1) * self.tree.children()), source)
    }

    fn recvs(&self, from: Rank) -> usize {
        if self.tree.child_index(from).is_some() { self.segments() } else { 1 }
    }

    fn recv(&self, from: Rank, i: usize) -> Incoming {
        let Some(child) = self.tree.child_index(from) else {
            return Incoming::HELLO;
        };
        let span = self.segment(i);
        let last = child + 1 == self.tree.children();
        let fold = Fold {
            len: span.len,
            partial: true,
            first: child == 0,
            own: if child == 0 { Own::Before(Mine::Input(span)) } else { Own::No },
            level: Level::All,
            running: if self.is_root() {
                Running::Output(span)
            } else {
                Running::Slot(i % PIPELINE_SLOTS)
            },
            emit: if self.is_root() && last { Emit::Last(span) } else { Emit::No },
        };
        let slot_free = if self.is_root() { 0 } else { (i + 1).saturating_sub(PIPELINE_SLOTS) };
        let turn = i * self.tree.children() + child;
        Incoming {
            action: Action::Fold(fold),
            gate: Gate { folded: turn, sent: slot_free, ..Gate::OPEN },
        }
    }

    fn downstream(&self) -> Option<Rank> {
        self.tree.parent()
    }

    fn local(&self) -> Local {
        if self.tree.world.get() == 1 { Local::InputIsResult } else { Local::Nothing }
    }

    fn slots(&self) -> Slots {
        if self.is_root() || self.tree.children() == 0 {
            Slots::default()
        } else {
            Slots { count: PIPELINE_SLOTS, len: self.vector.longest_segment() }
        }
    }

    /// Only the root writes, where it has folded its own elements first, and it sends nothing.
    fn in_place(&self) -> Option<InPlace> {
        Some(InPlace::default())
    }
}
