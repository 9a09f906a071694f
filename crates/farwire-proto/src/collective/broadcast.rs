//! Broadcast along a tree, segment by segment: a rank passes a segment on as soon as it has it.
//!
//! Bytes sent per rank, for S bytes: children × S (chain: S; binomial root: ⌈log₂ N⌉·S). Rounds:
//! the depth of the tree. Ranks that are not neighbours in the tree exchange an empty frame, so
//! that all of them learn of a rank that called something else.

use crate::collective::tree::Tree;
use crate::ids::Rank;
use crate::partition::{Partition, Span};
use crate::schedule::{Gate, InPlace, Incoming, Outcome, Outgoing, Schedule, Source};

#[derive(Clone, Debug)]
pub(crate) struct Broadcast {
    pub(crate) tree: Tree,
    /// The whole vector as one block.
    pub(crate) vector: Partition,
}

impl Broadcast {
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

impl Schedule for Broadcast {
    fn input_len(&self) -> usize {
        if self.is_root() { self.vector.len() } else { 0 }
    }

    fn output_len(&self) -> usize {
        if self.is_root() { 0 } else { self.vector.len() }
    }

    fn outcome(&self) -> Outcome {
        if self.is_root() { Outcome::Input } else { Outcome::Output }
    }

    fn sends(&self, to: Rank) -> usize {
        if self.tree.child_index(to).is_some() { self.segments() } else { 1 }
    }

    fn send(&self, to: Rank, i: usize) -> Outgoing {
        if self.tree.child_index(to).is_none() {
            Outgoing::HELLO
        } else if self.is_root() {
            Outgoing::now(Source::Input(self.segment(i)))
        } else {
            Outgoing::after(Gate::after_receipts(i + 1), Source::Output(self.segment(i)))
        }
    }

    fn recvs(&self, from: Rank) -> usize {
        if self.tree.parent() == Some(from) { self.segments() } else { 1 }
    }

    fn recv(&self, from: Rank, i: usize) -> Incoming {
        if self.tree.parent() == Some(from) {
            Incoming::store(self.segment(i))
        } else {
            Incoming::HELLO
        }
    }

    fn is_upstream(&self, from: Rank) -> bool {
        self.tree.parent() == Some(from)
    }

    /// A rank has either an input or an output.
    fn in_place(&self) -> Option<InPlace> {
        Some(InPlace::default())
    }
}
