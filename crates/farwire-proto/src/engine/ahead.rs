//! How far a rank may run ahead of a peer.
//!
//! A rank can call an operation long before a peer does. What it sends lies at the peer until then,
//! and must fill neither the peer's memory nor the link that other operations need. So:
//!
//! 1. Frames of an operation that the peer is known to have *called* go freely: the peer reads
//!    them.
//! 2. All others count against an [`Allowance`]. Any one [`Channel`] may use a third of it.
//! 3. A frame that the allowance does not cover waits here, and the peer is asked to say when it
//!    has called the first operation that waits ([`FrameKind::Ask`](crate::FrameKind::Ask)). So
//!    every operation comes through in the end, whatever else lies unread.
//! 4. An operation is known to be called once a frame of it has come from the peer, or a notice
//!    ([`FrameKind::Called`](crate::FrameKind::Called)) covers it. In collectives each rank sends
//!    every other at least one frame, so those need no notice. For messages, the receiver gives
//!    notice each time it has taken a quarter of what a channel may hold, and when it calls for a
//!    message longer than a channel may hold.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use rustc_hash::FxHashMap as HashMap;

use crate::ids::{CommId, OpId, OpSeq, Tag};

/// Bytes that may lie unread at a peer, for operations that it has not called.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Allowance(pub usize);

impl Default for Allowance {
    fn default() -> Self {
        Self(48 << 20)
    }
}

impl Allowance {
    /// What a frame costs besides its payload: its header, and entries in tables.
    const FRAME: usize = 1 << 10;
    /// What a lane costs on which more frames will follow: a stream may stay open for it.
    const LANE: usize = 64 << 10;

    /// What one channel may use, so that one on which nobody receives does not slow the others
    /// down.
    pub(super) fn channel(self) -> usize {
        self.0.div_ceil(3)
    }

    pub(super) fn cost(payload: usize, opens_lane: bool) -> usize {
        payload + Self::FRAME + if opens_lane { Self::LANE } else { 0 }
    }
}

/// Operations with one peer that are called in one order: the collectives of a communicator, or the
/// messages of one tag in one direction.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct Channel {
    pub(super) comm: CommId,
    /// None for collectives.
    pub(super) tag: Option<Tag>,
}

impl Channel {
    /// The channel of an operation, and its number there.
    pub(super) fn of(comm: CommId, seq: OpSeq) -> (Self, u64) {
        match seq {
            OpSeq::Collective(number) => (Self { comm, tag: None }, number),
            OpSeq::Message(tag, number) => (Self { comm, tag: Some(tag) }, number),
        }
    }

    pub(super) fn seq(self, number: u64) -> OpSeq {
        self.tag.map_or(OpSeq::Collective(number), |tag| OpSeq::Message(tag, number))
    }
}

/// Channels that a peer's notices may open here, before this rank has used them. Far more than a
/// job has.
const MAX_CHANNELS: usize = 1 << 16;

/// What lies unread at one peer, and which lanes wait to send it more.
#[derive(Debug, Default)]
pub(super) struct Ahead {
    pub(super) allowance: Allowance,
    spent: usize,
    channels: HashMap<Channel, Outgoing>,
    /// Channels with lanes that wait.
    short: BTreeSet<Channel>,
    /// Operations to ask the peer about.
    to_ask: Vec<(Channel, u64)>,
    /// What the peer has asked about and this rank has not called: the last number, by channel.
    asks: HashMap<Channel, u64>,
}

/// The sending side of a channel.
#[derive(Debug, Default)]
struct Outgoing {
    /// The peer has called all operations before this number.
    called: u64,
    spent: usize,
    /// What was spent on each operation.
    sent: VecDeque<(u64, usize)>,
    /// Lanes that wait, by operation.
    waiting: BTreeMap<u64, (OpId, usize)>,
    /// All operations before this number have been asked about.
    asked: u64,
}

/// Whether a frame may go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Leave {
    /// Its operation is called.
    Free,
    /// It is covered by the allowance, to which it must be [charged](Ahead::charge).
    Counted,
    /// It has to wait.
    No,
}

impl Ahead {
    pub(super) fn new(allowance: Allowance) -> Self {
        Self { allowance, ..Self::default() }
    }

    /// Whether a frame of an operation may go now. If not, its lane waits until it is released.
    pub(super) fn leave(&mut self, channel: Channel, number: u64, lane: (OpId, usize)) -> Leave {
        let (limit, whole) = (self.allowance.channel(), self.allowance.0);
        let state = self.channels.entry(channel).or_default();
        if number < state.called {
            Leave::Free
        } else if state.spent < limit && self.spent < whole {
            Leave::Counted
        } else {
            state.waiting.insert(number, lane);
            self.short.insert(channel);
            self.release(channel, &mut Ready::new());
            Leave::No
        }
    }

    /// A frame that counts against the allowance has gone.
    pub(super) fn charge(&mut self, channel: Channel, number: u64, cost: usize, ready: &mut Ready) {
        let state = self.channels.entry(channel).or_default();
        state.spent += cost;
        self.spent += cost;
        match state.sent.back_mut() {
            Some((last, spent)) if *last == number => *spent += cost,
            _ => state.sent.push_back((number, cost)),
        }
        if !self.short.is_empty() {
            self.release(channel, ready);
        }
    }

    /// The peer has called all operations of a channel before `number`. Lanes that waited for it
    /// are ready.
    pub(super) fn called(&mut self, channel: Channel, number: u64, ready: &mut Ready) {
        let full = self.channels.len() >= MAX_CHANNELS;
        let state = match self.channels.get_mut(&channel) {
            Some(state) => state,
            None if full => return,
            None => self.channels.entry(channel).or_default(),
        };
        if number <= state.called {
            return;
        }
        state.called = number;
        let before = state.spent;
        while let Some((_, spent)) = state.sent.front().filter(|(sent, _)| *sent < number) {
            state.spent -= spent;
            state.sent.pop_front();
        }
        self.spent -= before - state.spent;
        if self.short.is_empty() {
            return;
        }
        while let Some(first) = state.waiting.first_entry().filter(|first| *first.key() < number) {
            ready.push_back(first.remove());
        }
        let short: Vec<_> = self.short.iter().copied().collect();
        for channel in short {
            self.release(channel, ready);
        }
    }

    /// Lets the first waiting lane go, if there is room for its frame; once that has been counted,
    /// the next lane follows. Otherwise the peer is to be asked about the operation, once.
    fn release(&mut self, channel: Channel, ready: &mut Ready) {
        let room = self.spent < self.allowance.0;
        let limit = self.allowance.channel();
        let Some(state) = self.channels.get_mut(&channel) else { return };
        match state.waiting.first_entry() {
            Some(first) if room && state.spent < limit => ready.push_back(first.remove()),
            Some(first) if *first.key() >= state.asked => {
                state.asked = first.key() + 1;
                self.to_ask.push((channel, *first.key()));
            }
            _ => {}
        }
        if state.waiting.is_empty() {
            self.short.remove(&channel);
        }
    }

    /// A lane no longer waits, because its operation has failed. The next one takes its turn.
    pub(super) fn stop_waiting(&mut self, channel: Channel, number: u64, ready: &mut Ready) {
        if self.short.contains(&channel) {
            let state =
                self.channels.get_mut(&channel).expect("a channel that is short has a state");
            state.waiting.remove(&number);
            self.release(channel, ready);
        }
    }

    /// An operation to ask the peer about.
    pub(super) fn next_ask(&mut self) -> Option<(Channel, u64)> {
        self.to_ask.pop()
    }

    /// A communicator is of no more use to either side: nothing of it lies unread or waits.
    pub(super) fn forget_comm(&mut self, comm: CommId, ready: &mut Ready) {
        let mut spent = 0;
        self.channels.retain(|channel, state| {
            spent += if channel.comm == comm { state.spent } else { 0 };
            channel.comm != comm
        });
        self.spent -= spent;
        self.short.retain(|channel| channel.comm != comm);
        self.asks.retain(|channel, _| channel.comm != comm);
        let short: Vec<_> = self.short.iter().copied().collect();
        for channel in short {
            self.release(channel, ready);
        }
    }

    /// The peer asks to be told when this rank has called an operation.
    pub(super) fn asked(&mut self, channel: Channel, number: u64) {
        if self.asks.len() < MAX_CHANNELS || self.asks.contains_key(&channel) {
            let ask = self.asks.entry(channel).or_insert(number);
            *ask = number.max(*ask);
        }
    }

    /// Takes what the peer has asked about on a communicator: nothing else will answer it.
    pub(super) fn take_asks(&mut self, comm: CommId) -> Vec<(Channel, u64)> {
        self.asks.extract_if(|channel, _| channel.comm == comm).collect()
    }

    /// Whether the peer waits to hear that this rank has called the operations before `number`.
    pub(super) fn owes_answer(&mut self, channel: Channel, number: u64) -> bool {
        if self.asks.is_empty() || self.asks.get(&channel).is_none_or(|ask| *ask >= number) {
            return false;
        }
        self.asks.remove(&channel);
        true
    }

    #[cfg(test)]
    pub(super) fn spent(&self) -> usize {
        self.spent
    }
}

/// Lanes whose next frame may go.
pub(super) type Ready = VecDeque<(OpId, usize)>;
