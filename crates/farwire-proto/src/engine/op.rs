//! One operation in flight: how far each lane has come, and which frames may move.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::sync::Arc;

use super::{Address, Config, Effect, Event, Lane, Payload, Queues, Take, Transmit, Verdict, Wait};
use crate::collective::message::End;
use crate::fingerprint::Fingerprint;
use crate::header::{FrameKind, Header};
use crate::ids::{Epoch, OpId, OpSeq, Peer, Rank, Time};
use crate::parcels;
use crate::plan::{Frames, Plan, Way};
use crate::schedule::{Action, Gate, Level};

/// One operation in flight.
#[derive(Debug)]
pub(super) struct Op {
    pub(super) id: OpId,
    /// For a receive that is not matched yet: the number of the message it gets if all receives
    /// before it get theirs.
    pub(super) seq: OpSeq,
    /// Whether it is known which message a receive gets. Always true for other operations.
    pub(super) matched: bool,
    pub(super) plan: Plan,
    pub(super) members: Arc<[Peer]>,
    pub(super) due: Time,
    pub(super) moving: Moving,
}

/// The parts of an operation that change.
#[derive(Debug, Default)]
pub(super) struct Moving {
    progress: Gate,
    /// Indexed as [`Op::lane_of`] says.
    lanes: Vec<LaneState>,
    /// The same, for an operation that travels in parcels; else empty.
    parcels: Vec<parcels::Progress>,
    /// Rounds of parcels that have come from everyone.
    rounds: u32,
    /// Lanes on which the next round has not come.
    behind: usize,
    /// Lanes with frames still to move.
    pub(super) unfinished: usize,
    /// Frames that wait for one of the counters of [`Gate::counters`].
    waiting: [BinaryHeap<Reverse<(usize, Frame)>>; 4],
    /// Lanes that are too far ahead of others.
    leading: Vec<usize>,
}

/// The next frame of a lane.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Frame {
    Out(usize),
    In(usize),
}

/// Where a lane's next frame is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Next {
    /// Nowhere: it is not there yet, or the lane has no credit left, or there is none.
    #[default]
    Unknown,
    /// In the ready queue, or waiting for the allowance.
    Ready,
    /// Behind its gate.
    Gated,
    /// Among those that are too far ahead.
    Leading,
}

#[derive(Clone, Copy, Debug, Default)]
struct LaneState {
    /// Frames in all, once that is known.
    sends: usize,
    /// Frames that are there to be handed out: all but those of parcels not yet supplied.
    supplied: usize,
    /// Handed to the driver.
    polled: usize,
    /// Reported sent.
    sent: usize,
    next: Next,
    /// It is kept abreast of others.
    abreast: bool,
    recvs: usize,
    taken: usize,
    /// A frame is being taken.
    taking: bool,
    /// A frame was offered that could not be taken yet.
    held: bool,
    /// A frame has come.
    heard: bool,
    /// The engine has been told so.
    told: bool,
}

impl LaneState {
    fn is_done(&self) -> bool {
        self.sent == self.sends && self.taken == self.recvs
    }

    /// Whether others are kept abreast of this lane: it has frames that its link could take now, or
    /// soon.
    fn sets_the_pace(&self) -> bool {
        self.abreast && (self.sent < self.polled || self.next == Next::Ready)
    }

    /// Whether the next frame is due and has not come.
    fn is_behind(&self) -> bool {
        self.taken < self.recvs && !self.held && !self.taking
    }
}

/// Why an arrived frame cannot be right.
pub(super) enum Breach {
    /// Its sender called something other than this.
    Fingerprint(Fingerprint),
    /// It is not the next frame, or not of its length.
    Frame,
}

impl Op {
    fn lane_of(&self, rank: Rank) -> usize {
        if self.plan.partner().is_some() { 0 } else { rank.index() }
    }

    fn rank_of(&self, lane: usize) -> Rank {
        self.plan.partner().map_or(Rank(lane as u32), |partner| partner.rank)
    }

    pub(super) fn peer_of(&self, lane: usize) -> Peer {
        self.members[self.rank_of(lane).index()]
    }

    /// Everyone it has a lane to.
    pub(super) fn peers(&self) -> impl Iterator<Item = Peer> {
        self.plan.others().map(|rank| self.members[rank.index()])
    }

    /// Whether the peer at the other end of a lane is known to have called this.
    pub(super) fn has_heard(&self, lane: usize) -> bool {
        self.moving.lanes[lane].heard
    }

    /// Whether the peer has just been heard for the first time, in an operation with frames both
    /// ways.
    pub(super) fn is_first_word(&mut self, from: Rank) -> bool {
        let lane = self.lane_of(from);
        let state = &mut self.moving.lanes[lane];
        state.heard && !std::mem::replace(&mut state.told, true) && self.plan.partner().is_none()
    }

    /// Where frames for this operation arrive; nowhere for a message on its way out.
    pub(super) fn inbound_address(&self) -> Option<Address> {
        let comm = self.plan.comm();
        match self.plan.partner() {
            None => Some(Address { comm, seq: self.seq, sender: None }),
            Some(partner) => (partner.end == End::Receiver).then(|| Address {
                comm,
                seq: self.seq,
                sender: Some(self.members[partner.rank.index()]),
            }),
        }
    }

    /// Sets up all lanes. Those to `neighbours` are kept abreast, if the operation allows it.
    pub(super) fn start(&mut self, neighbours: &[bool], queues: &mut Queues, config: &Config) {
        let keeps_step = self.plan.keeps_step();
        let lanes = if self.plan.partner().is_some() { 1 } else { self.plan.world().len() };
        self.moving.lanes.resize(lanes, LaneState::default());
        if matches!(self.plan.way(), Way::Parcels(_)) {
            self.moving.parcels.resize(lanes, parcels::Progress::default());
        }
        for rank in self.plan.others() {
            let lane = self.lane_of(rank);
            let abreast = keeps_step && neighbours[self.peer_of(lane).index()];
            let state = &mut self.moving.lanes[lane];
            state.abreast = abreast;
            match self.plan.way() {
                Way::Frames(frames) => {
                    state.sends = frames.sends(rank);
                    state.supplied = state.sends;
                    state.recvs = frames.recvs(rank);
                }
                Way::Parcels(limits) => {
                    state.sends = if limits.sends == 0 { 0 } else { usize::MAX };
                    state.recvs = if limits.recvs == 0 { 0 } else { usize::MAX };
                }
            }
            self.moving.unfinished += 1;
            self.line_up(lane, queues, config);
        }
        self.moving.behind = self.moving.unfinished;
    }

    /// Puts a lane's next frame where it belongs: among the ready ones, behind its gate, or among
    /// those that are too far ahead.
    fn line_up(&mut self, lane: usize, queues: &mut Queues, config: &Config) {
        let rank = self.rank_of(lane);
        let LaneState { next, abreast, supplied, polled, sent, .. } = self.moving.lanes[lane];
        if next != Next::Unknown
            || polled == supplied
            || polled - sent >= config.credit.get() as usize
        {
            return;
        }
        let gate = match self.plan.way() {
            Way::Frames(frames) => frames.send(rank, polled).gate,
            Way::Parcels(_) => Gate::OPEN,
        };
        self.moving.lanes[lane].next = if abreast && polled >= self.moving.limit(config) {
            self.moving.leading.push(lane);
            Next::Leading
        } else if self.moving.wait_for(&gate, Frame::Out(lane)).is_err() {
            Next::Gated
        } else {
            queues.ready.push_back((self.id, lane));
            Next::Ready
        };
    }

    /// Lines up the lanes that were too far ahead and no longer are.
    fn catch_up(&mut self, queues: &mut Queues, config: &Config) {
        let limit = self.moving.limit(config);
        let mut leading = std::mem::take(&mut self.moving.leading);
        leading.retain(|lane| {
            let state = &mut self.moving.lanes[*lane];
            if state.polled >= limit {
                return true;
            }
            state.next = Next::Unknown;
            self.line_up(*lane, queues, config);
            false
        });
        leading.append(&mut self.moving.leading);
        self.moving.leading = leading;
    }

    /// The next parcel to `to` is ready; `false` if no more are to come, or it is too long.
    pub(super) fn supply(
        &mut self,
        to: Rank,
        len: usize,
        queues: &mut Queues,
        config: &Config,
    ) -> bool {
        let lane = self.lane_of(to);
        let Way::Parcels(limits) = self.plan.way() else { return false };
        let Some(progress) = self.moving.parcels.get_mut(lane) else { return false };
        if to == self.plan.me() || !progress.supply(len, limits) {
            return false;
        }
        let state = &mut self.moving.lanes[lane];
        state.supplied += limits.frames(len);
        if progress.is_supplied(limits) {
            state.sends = state.supplied;
        }
        self.line_up(lane, queues, config);
        true
    }

    pub(super) fn transmit(
        &mut self,
        lane: usize,
        epoch: Epoch,
        queues: &mut Queues,
        config: &Config,
    ) -> Transmit {
        let rank = self.rank_of(lane);
        let state = &mut self.moving.lanes[lane];
        let index = state.polled;
        let (payload, bytes) = match self.plan.way() {
            Way::Frames(frames) => {
                let frame = frames.send(rank, index);
                let bytes = frame.source.wire_bytes(self.plan.dtype());
                (Payload::Operation { op: self.id, source: frame.source, after: frame.gate }, bytes)
            }
            Way::Parcels(limits) => {
                let part = self.moving.parcels[lane].next_part(rank, limits);
                (Payload::Parcel { op: self.id, part }, part.len)
            }
        };
        state.polled += 1;
        state.next = Next::Unknown;
        let last = state.polled == state.sends;
        let header = Header {
            frame: FrameKind::Data,
            payload: bytes as u32,
            comm: self.plan.comm(),
            epoch,
            seq: self.seq,
            index: index as u32,
            fingerprint: self.plan.fingerprint_for(rank),
        };
        self.line_up(lane, queues, config);
        Transmit { to: self.peer_of(lane), header, payload, last, lane }
    }

    pub(super) fn sent(&mut self, lane: usize, queues: &mut Queues, config: &Config) {
        let downstream =
            self.plan.frames().and_then(Frames::downstream) == Some(self.rank_of(lane));
        let state = &mut self.moving.lanes[lane];
        state.sent += 1;
        self.moving.unfinished -= usize::from(state.is_done());
        if downstream {
            self.moving.progress.sent += 1;
            self.wake(queues, config);
        }
        self.line_up(lane, queues, config);
        if !self.moving.leading.is_empty() {
            self.catch_up(queues, config);
        }
    }

    /// Judges the next frame of a lane.
    pub(super) fn offer(&mut self, from: Rank, header: &Header) -> Result<Verdict, Breach> {
        let lane = self.lane_of(from);
        let expected = self.plan.fingerprint_from(from);
        if header.fingerprint != expected {
            return Err(Breach::Fingerprint(expected));
        }
        let state = &mut self.moving.lanes[lane];
        state.heard = true;
        if state.taking {
            state.held = true;
            return Ok(Verdict::Later);
        }
        if header.index as usize != state.taken || state.taken == state.recvs {
            return Err(Breach::Frame);
        }
        let payload = header.payload as usize;
        let frame = match self.plan.way() {
            Way::Frames(frames) => frames.recv(from, state.taken),
            Way::Parcels(limits) => {
                let part =
                    self.moving.parcels[lane].expect(from, payload, limits).ok_or(Breach::Frame)?;
                state.taking = true;
                return Ok(Verdict::Take(Take {
                    op: self.id,
                    effect: Effect::Collect(part),
                    lane,
                }));
            }
        };
        if payload != frame.action.wire_bytes(self.plan.dtype()) {
            return Err(Breach::Frame);
        }
        if state.held {
            return Ok(Verdict::Later); // it already waits
        }
        if self.moving.wait_for(&frame.gate, Frame::In(lane)).is_err() {
            self.moving.lanes[lane].held = true;
            return Ok(Verdict::Later);
        }
        self.moving.lanes[lane].taking = true;
        Ok(Verdict::Take(Take { op: self.id, effect: Effect::Apply(frame.action), lane }))
    }

    /// A parcel of this round has come whole. Returns the round if it has now come from everyone:
    /// each round once, in order. Lanes are counted because, with many ranks, looking at all of
    /// them for each parcel would take long.
    fn complete_round(&mut self, round: u32) -> Option<u32> {
        if round != self.moving.rounds {
            return None; // this lane is further than others
        }
        self.moving.behind -= 1;
        if self.moving.behind > 0 {
            return None;
        }
        self.moving.rounds += 1;
        let next = self.moving.rounds;
        let lanes = self.plan.others().map(|rank| self.lane_of(rank));
        self.moving.behind = lanes.filter(|lane| self.moving.parcels[*lane].into.0 <= next).count();
        Some(round)
    }

    pub(super) fn taken(
        &mut self,
        lane: usize,
        effect: &Effect,
        queues: &mut Queues,
        config: &Config,
    ) {
        let from = self.rank_of(lane);
        let upstream = self.plan.frames().is_some_and(|frames| frames.is_upstream(from));
        let state = &mut self.moving.lanes[lane];
        state.taking = false;
        state.taken += 1;
        if let (Effect::Collect(part), Way::Parcels(limits)) = (effect, self.plan.way())
            && self.moving.parcels[lane].collected(part)
        {
            if part.round + 1 == limits.recvs {
                state.recvs = state.taken;
            }
            if let Some(round) = self.complete_round(part.round) {
                queues.events.push_back(Event::Round(self.id, round));
            }
        }
        let state = &mut self.moving.lanes[lane];
        self.moving.unfinished -= usize::from(state.is_done());
        if std::mem::take(&mut state.held) {
            queues.resumed.push_back(self.incoming_lane(lane));
        }
        self.moving.progress.received += usize::from(upstream);
        if let Effect::Apply(Action::Fold(fold)) = effect {
            match fold.level {
                Level::Host => self.moving.progress.host_folded += 1,
                Level::All => self.moving.progress.folded += 1,
            }
        }
        self.wake(queues, config);
    }

    /// Moves on every frame whose gate has opened.
    fn wake(&mut self, queues: &mut Queues, config: &Config) {
        while let Some(frame) = self.moving.next_opened() {
            match frame {
                Frame::Out(lane) => {
                    self.moving.lanes[lane].next = Next::Unknown;
                    self.line_up(lane, queues, config);
                }
                Frame::In(lane) => {
                    self.moving.lanes[lane].held = false;
                    queues.resumed.push_back(self.incoming_lane(lane));
                }
            }
        }
    }

    fn incoming_lane(&self, lane: usize) -> Lane {
        Lane { from: self.peer_of(lane), comm: self.plan.comm(), seq: self.seq }
    }

    /// Lanes with a frame that was offered and not taken.
    pub(super) fn held_lanes(&self) -> impl Iterator<Item = Lane> {
        let lanes = self.plan.others().map(|rank| self.lane_of(rank));
        lanes.filter(|lane| self.moving.lanes[*lane].held).map(|lane| self.incoming_lane(lane))
    }

    /// Whether the next frame from `peer` is due and has not been offered.
    pub(super) fn awaits(&self, peer: Peer) -> bool {
        let lane = self
            .plan
            .others()
            .map(|rank| self.lane_of(rank))
            .find(|lane| self.peer_of(*lane) == peer);
        lane.is_some_and(|lane| self.moving.lanes[lane].is_behind())
    }

    pub(super) fn waits_on(&self) -> Vec<Peer> {
        let awaited = |which: &dyn Fn(&LaneState) -> bool| -> Vec<Peer> {
            let peers = self.plan.others().map(|rank| self.lane_of(rank));
            peers
                .filter(|lane| which(&self.moving.lanes[*lane]))
                .map(|lane| self.peer_of(lane))
                .collect()
        };
        let silent = awaited(&|lane| lane.recvs > 0 && !lane.heard);
        if !silent.is_empty() {
            return silent;
        }
        let behind = awaited(&LaneState::is_behind);
        if !behind.is_empty() {
            return behind;
        }
        awaited(&|lane| !lane.is_done())
    }

    pub(super) fn wait(&self) -> Wait {
        Wait {
            op: self.id,
            comm: self.plan.comm(),
            seq: self.seq,
            fingerprint: self.plan.fingerprint(),
            on: self.waits_on(),
        }
    }
}

impl Moving {
    /// The index of the first frame that is too far ahead of what the slowest lane has sent.
    fn limit(&self, config: &Config) -> usize {
        let Some(lead) = config.lead else { return usize::MAX };
        let slowest = self.lanes.iter().filter(|lane| lane.sets_the_pace()).map(|lane| lane.sent);
        slowest.min().map_or(usize::MAX, |sent| sent + lead.get() as usize)
    }

    /// `Ok` if the gate is open; else the frame waits for the first counter that is short.
    fn wait_for(&mut self, gate: &Gate, frame: Frame) -> Result<(), ()> {
        let counters = gate.counters().into_iter().zip(self.progress.counters());
        let short = counters.zip(&mut self.waiting).find(|((need, have), _)| need > have);
        match short {
            None => Ok(()),
            Some(((need, _), waiting)) => {
                waiting.push(Reverse((need, frame)));
                Err(())
            }
        }
    }

    /// Some frame whose counter has come far enough.
    fn next_opened(&mut self) -> Option<Frame> {
        let counters = self.waiting.iter_mut().zip(self.progress.counters());
        let (waiting, _) = counters.into_iter().find(|(waiting, have)| {
            waiting.peek().is_some_and(|Reverse((need, _))| need <= have)
        })?;
        waiting.pop().map(|Reverse((_, frame))| frame)
    }

    /// The same allocations, with nothing in them; `None` if there are none worth keeping.
    pub(super) fn recycle(mut self) -> Option<Self> {
        self.progress = Gate::OPEN;
        self.unfinished = 0;
        self.rounds = 0;
        self.behind = 0;
        self.lanes.clear();
        self.parcels.clear();
        self.waiting.iter_mut().for_each(BinaryHeap::clear);
        self.leading.clear();
        (self.lanes.capacity() > 0).then_some(self)
    }
}
