//! Incoming messages: which receive gets which.

use std::collections::{BTreeSet, VecDeque};

use super::ahead::{Allowance, Channel};
use super::{Address, Engine, Lane, MAX_EARLY};
use crate::fault::Fault;
use crate::header::FrameKind;
use crate::ids::{OpId, Peer};

/// The receiving side of the messages with one tag from one peer. The first message to come is for
/// the oldest receive that still waits, so a receive that has timed out, or a message that was
/// given up, is no loss to the others.
#[derive(Debug, Default)]
pub(super) struct Inbox {
    /// The number of the next message to be matched with a receive.
    pub(super) next: u64,
    /// Receives that wait for a message, oldest first.
    pub(super) waiting: VecDeque<OpId>,
    /// Messages, from `next` on, that were given up.
    pub(super) void: BTreeSet<u64>,
    /// How much of the sender's allowance was taken since the sender was last told.
    pub(super) untold: usize,
}

impl Inbox {
    /// How many messages have been called for.
    pub(super) fn called(&self) -> u64 {
        self.next + self.waiting.len() as u64
    }
}

impl Engine {
    /// Matches a message whose first frame has come with the oldest receive that waits, if it is
    /// the next one.
    pub(super) fn match_message(&mut self, lane: Lane) -> Option<OpId> {
        let (channel, number) = Channel::of(lane.comm, lane.seq);
        let inbox = self.inboxes.get_mut(&(lane.from, channel))?;
        if number != inbox.next {
            return None;
        }
        let id = inbox.waiting.pop_front()?;
        let op = self.ops.get_mut(&id).expect("receives that wait are in flight");
        (op.seq, op.matched) = (lane.seq, true);
        self.inbound.insert(lane.into(), id);
        self.advance_inbox(lane.from, channel);
        Some(id)
    }

    /// Goes on to the next message that was not given up. If it has come, it is offered again.
    pub(super) fn advance_inbox(&mut self, from: Peer, channel: Channel) {
        loop {
            let inbox = self.inboxes.entry((from, channel)).or_default();
            inbox.next += 1;
            let (next, void) = (inbox.next, inbox.void.remove(&inbox.next));
            self.resume(Address { comm: channel.comm, seq: channel.seq(next), sender: Some(from) });
            if !void {
                return;
            }
        }
    }

    /// Tells the sender of messages how many have been called for, now and then: it may have run
    /// out of allowance.
    pub(super) fn count_taken(&mut self, from: Peer, channel: Channel, payload: usize) {
        let allowance = self.ahead[from.index()].allowance;
        let Some(inbox) = self.inboxes.get_mut(&(from, channel)) else { return };
        inbox.untold += Allowance::cost(payload, false);
        if inbox.untold >= allowance.channel().div_ceil(4) {
            inbox.untold = 0;
            let called = inbox.called();
            self.notify(from, FrameKind::Called, channel, called - 1);
        }
    }

    /// A peer has given a message up. If this rank is receiving it, that receive fails; otherwise
    /// the next message takes its place.
    pub(super) fn handle_void(&mut self, from: Peer, channel: Channel, number: u64) {
        if channel.tag.is_none() || self.closed.contains(&channel.comm) {
            return;
        }
        let address = Address { comm: channel.comm, seq: channel.seq(number), sender: Some(from) };
        if let Some(op) = self.inbound.get(&address) {
            let fault = Fault::TimedOut { by: from, waiting_for: self.me, others: 0 };
            return self.fail_op(*op, fault, from);
        }
        if self.comms.get(&channel.comm).is_some_and(|comm| !comm.ranks.contains_key(&from)) {
            return;
        }
        let inbox = self.inboxes.entry((from, channel)).or_default();
        if number == inbox.next {
            self.resume(address);
            self.advance_inbox(from, channel);
        } else if number > inbox.next {
            inbox.void.insert(number);
            if inbox.void.len() > MAX_EARLY {
                return self.handle_peer_lost(from);
            }
            self.resume(address);
        }
    }
}
