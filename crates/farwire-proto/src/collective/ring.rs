//! Ring all-reduce: the least volume over the fewest flows.
//!
//! Each rank sends only to its right neighbour and receives only from its left. The partial sum of
//! shard j starts at rank j and walks right, each rank adding its own elements; after N−1 steps it
//! is complete at rank j−1. Then the complete shards walk right for N−1 more steps.
//!
//! ```text
//! step      rank 0 sends   rank 1 sends   rank 2 sends
//! 0         x0 of shard 0  x1 of shard 1  x2 of shard 2
//! 1         2's + x0       0's + x1       1's + x2          ─▶ complete at the receiver
//! 2         shard 1        shard 2        shard 0
//! 3         shard 0        shard 1        shard 2
//! ```
//!
//! Bytes sent per rank, for S bytes: 2(N−1)/N·S. Rounds: 2(N−1). The order of addition depends on
//! the shard (cyclic from j), so the bits differ from the rank-order algorithms'; they are the same
//! on all ranks and in every run. Partial sums travel in the accumulator's type, which makes the
//! first half of a 16-bit all-reduce twice as long.

use crate::ids::{Rank, WorldSize};
use crate::partition::Partition;
use crate::schedule::{
    Action, Emit, Fold, Gate, InPlace, Incoming, Level, Local, Mine, Outgoing, Own, Running,
    Schedule, Slots, Source,
};

#[derive(Clone, Debug)]
pub(crate) struct Ring {
    pub(crate) me: Rank,
    pub(crate) world: WorldSize,
    /// Even: all shards have the same number of segments.
    pub(crate) shards: Partition,
}

impl Ring {
    fn segments(&self) -> usize {
        self.shards.segments(self.me)
    }

    /// Frames each way on the lanes that carry data: every step passes one shard.
    fn frames(&self) -> usize {
        2 * (self.world.len() - 1) * self.segments()
    }

    /// The shard that is sent in `step`; the one received is its left neighbour.
    fn sent_shard(&self, step: usize) -> Rank {
        self.world.left_of(self.me, (step % self.world.len()) as u32)
    }

    fn right(&self) -> Rank {
        self.world.right_of(self.me, 1)
    }

    fn left(&self) -> Rank {
        self.world.left_of(self.me, 1)
    }

    /// A partial result waits in its slot while the rest of a shard goes out before it, so there
    /// are as many slots as segments in a shard, and one more so that receiving can run ahead of
    /// sending. With fewer, all ranks could wait for each other in a circle.
    fn slot_count(&self) -> usize {
        self.segments() + 1
    }
}

impl Schedule for Ring {
    fn input_len(&self) -> usize {
        self.shards.len()
    }

    fn output_len(&self) -> usize {
        self.shards.len()
    }

    fn sends(&self, to: Rank) -> usize {
        if to == self.right() { self.frames() } else { 1 }
    }

    fn send(&self, to: Rank, i: usize) -> Outgoing {
        if to != self.right() {
            return Outgoing::HELLO;
        }
        let (step, k) = (i / self.segments(), i % self.segments());
        let span = self.shards.segment(self.sent_shard(step), k);
        let Some(received) = i.checked_sub(self.segments()) else {
            return Outgoing::now(Source::InputAsPartial(span));
        };
        let source = if step < self.world.len() - 1 {
            Source::Partial { slot: received % self.slot_count(), len: span.len }
        } else {
            Source::Output(span)
        };
        Outgoing::after(Gate::after_receipts(received + 1), source)
    }

    fn recvs(&self, from: Rank) -> usize {
        if from == self.left() { self.frames() } else { 1 }
    }

    fn recv(&self, from: Rank, i: usize) -> Incoming {
        if from != self.left() {
            return Incoming::HELLO;
        }
        let (step, k) = (i / self.segments(), i % self.segments());
        let span = self.shards.segment(self.world.left_of(self.sent_shard(step), 1), k);
        if step >= self.world.len() - 1 {
            return Incoming::store(span);
        }
        let complete = step == self.world.len() - 2;
        let fold = Fold {
            len: span.len,
            partial: true,
            first: true,
            own: Own::After(Mine::Input(span)),
            level: Level::All,
            running: if complete {
                Running::Output(span)
            } else {
                Running::Slot(i % self.slot_count())
            },
            emit: if complete { Emit::Last(span) } else { Emit::No },
        };
        // The slot last held the partial result that came `slot_count` frames ago. That one goes
        // out a shard later than it came, as frame `i - 1`; then the slot is free.
        Incoming { action: Action::Fold(fold), gate: Gate { sent: i, ..Gate::OPEN } }
    }

    fn is_upstream(&self, from: Rank) -> bool {
        from == self.left()
    }

    fn downstream(&self) -> Option<Rank> {
        Some(self.right())
    }

    fn local(&self) -> Local {
        if self.world.get() == 1 { Local::InputIsResult } else { Local::Nothing }
    }

    fn slots(&self) -> Slots {
        Slots { count: self.slot_count(), len: self.shards.longest_segment() }
    }

    /// A complete shard has passed through the right neighbour, which had this rank's part by then.
    fn in_place(&self) -> Option<InPlace> {
        Some(InPlace::default())
    }
}
