//! Point-to-point messages: one lane, one way.

use crate::ids::Rank;
use crate::partition::Partition;
use crate::schedule::{InPlace, Incoming, Outcome, Outgoing, Schedule, Source};

/// Which end of the message this rank is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum End {
    Sender,
    Receiver,
}

#[derive(Clone, Debug)]
pub(crate) struct Message {
    pub(crate) end: End,
    /// The message as one block.
    pub(crate) body: Partition,
}

impl Message {
    fn frames(&self, end: End) -> usize {
        if self.end == end { self.body.segments(Rank(0)) } else { 0 }
    }
}

impl Schedule for Message {
    fn input_len(&self) -> usize {
        if self.end == End::Sender { self.body.len() } else { 0 }
    }

    fn output_len(&self) -> usize {
        if self.end == End::Receiver { self.body.len() } else { 0 }
    }

    fn outcome(&self) -> Outcome {
        match self.end {
            End::Sender => Outcome::Nothing,
            End::Receiver => Outcome::Output,
        }
    }

    fn sends(&self, _to: Rank) -> usize {
        self.frames(End::Sender)
    }

    fn send(&self, _to: Rank, i: usize) -> Outgoing {
        Outgoing::now(Source::Input(self.body.segment(Rank(0), i)))
    }

    fn recvs(&self, _from: Rank) -> usize {
        self.frames(End::Receiver)
    }

    fn recv(&self, _from: Rank, i: usize) -> Incoming {
        Incoming::store(self.body.segment(Rank(0), i))
    }

    /// A rank has either an input or an output.
    fn in_place(&self) -> Option<InPlace> {
        Some(InPlace::default())
    }
}
