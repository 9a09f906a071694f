//! The engine: many operations in flight, on several communicators, without blocking each other.

mod ahead;
mod comm;
mod frames;
mod inbox;
mod notices;
mod op;

use std::collections::{BTreeSet, VecDeque};
use std::num::NonZeroU32;
use std::time::Duration;

use rustc_hash::{FxHashMap as HashMap, FxHashSet as HashSet};

use crate::call::{CallError, Options};
use crate::collective::message::End;
use crate::collective::{Call, Kind};
use crate::fault::{Called, Fault, OpError};
use crate::header::{FAULT_LEN, FrameKind, Header};
use crate::ids::{CommId, Epoch, OpId, OpSeq, Peer, Rank, Time, WorldSize};
use crate::placement::{Placement, SumOrder};
use crate::plan::{Plan, Tuning};
use crate::spare::Spare;
pub use ahead::Allowance;
use ahead::{Ahead, Channel, Leave};
use comm::Comm;
pub use frames::{Effect, Event, Lane, OpenError, Payload, Take, Transmit, Verdict, Wait};
use inbox::Inbox;
use notices::notice;
pub(crate) use notices::notice_fingerprint;
use op::{Breach, Moving, Op};

/// How many failures of communicators not yet opened here are remembered, per peer that reports
/// them. Far more than a job opens.
const MAX_EARLY_FAULTS: usize = 256;

/// The most lanes of one peer for operations that this rank has not called, and the most messages
/// on one channel that it gave up before this rank asked for them. An [`Allowance`] keeps peers far
/// below this; a peer above it is broken.
const MAX_EARLY: usize = 1 << 17;

/// What an engine is told at the start.
#[derive(Clone, Copy, Debug)]
pub struct Config {
    /// What plans depend on; the same on all ranks.
    pub tuning: Tuning,
    /// How long an operation may take, unless [`Options::deadline`] says otherwise.
    pub deadline: Duration,
    /// Frames of one lane that may be handed out before the driver reports the first of them sent.
    pub credit: NonZeroU32,
    /// How far the frames handed out on a lane to a [neighbour](Engine::set_neighbour) may be ahead
    /// of what the slowest such lane has sent, in an operation that advances at the pace of the
    /// slowest anyway; `None` for no limit.
    pub lead: Option<NonZeroU32>,
    /// The generation of the group.
    pub epoch: Epoch,
    /// What may lie unread at a peer; the same on all ranks.
    pub allowance: Allowance,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            tuning: Tuning::default(),
            deadline: Duration::from_secs(600),
            credit: NonZeroU32::MIN,
            lead: None,
            epoch: Epoch(0),
            allowance: Allowance::default(),
        }
    }
}

/// Decides what this process sends and what becomes of what it receives.
///
/// The engine does no IO and holds no payload. Its methods fall into three groups:
///
/// - **Calls**: [`open`](Self::open), [`plan`](Self::plan), [`submit`](Self::submit),
///   [`supply`](Self::supply), [`close`](Self::close).
/// - **What happened**: [`handle_frame`](Self::handle_frame) and
///   [`handle_taken`](Self::handle_taken) for arriving frames, [`handle_sent`](Self::handle_sent)
///   for departed ones, [`handle_notice`](Self::handle_notice),
///   [`handle_nonsense`](Self::handle_nonsense), [`handle_peer_lost`](Self::handle_peer_lost),
///   [`handle_timeout`](Self::handle_timeout).
/// - **What to do**: after any of the above, call these until each returns `None`:
///   [`poll_transmit`](Self::poll_transmit), [`poll_resume`](Self::poll_resume),
///   [`poll_event`](Self::poll_event); then wait no longer than
///   [`poll_timeout`](Self::poll_timeout) says.
///
/// Frames move in two steps, so that bytes can be handed on in place: the engine says what a frame
/// is for ([`Transmit`], [`Take`]), the driver moves the bytes with a
/// [`Workspace`](crate::Workspace), and reports it done.
///
/// A frame that the engine does not want yet stays in its stream, unread. How much a peer may send
/// for calls that this rank has not made is limited by an [`Allowance`]; the engine remembers which
/// lanes wait for those calls, but never holds a payload.
///
/// When an operation or a communicator fails, its waiting lanes are resumed, so that their frames
/// are offered once more, and dropped.
#[derive(Debug)]
pub struct Engine {
    me: Peer,
    world: WorldSize,
    /// The number of each process's host, by peer. Only whether two are equal counts.
    hosts: Vec<u64>,
    /// Whose lanes are kept abreast of each other, by peer.
    neighbours: Vec<bool>,
    config: Config,
    comms: HashMap<CommId, Comm>,
    /// Communicators that were open once.
    closed: HashSet<CommId>,
    /// Communicators that failed before they were opened here, by the peer that said so.
    early_faults: HashMap<Peer, Vec<(CommId, Fault)>>,
    lost: HashSet<Peer>,
    ops: HashMap<OpId, Op>,
    next_op: u64,
    /// Which operation takes frames with this address.
    inbound: HashMap<Address, OpId>,
    /// Lanes with frames for operations not submitted yet.
    early: HashMap<Address, Vec<Peer>>,
    /// How many of them, by peer.
    early_lanes: Vec<usize>,
    spare_early: Spare<Vec<Peer>>,
    /// How far this rank is ahead of each peer, and each peer of it.
    ahead: Vec<Ahead>,
    inboxes: HashMap<(Peer, Channel), Inbox>,
    deadlines: BTreeSet<(Time, OpId)>,
    queues: Queues,
    /// Cleared parts of finished operations, so that the next ones allocate nothing.
    spare: Vec<Moving>,
}

/// How arriving frames find their operation. Collectives take frames from anyone, messages from one
/// sender.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Address {
    comm: CommId,
    seq: OpSeq,
    sender: Option<Peer>,
}

impl From<Lane> for Address {
    fn from(lane: Lane) -> Self {
        let sender = matches!(lane.seq, OpSeq::Message(..)).then_some(lane.from);
        Self { comm: lane.comm, seq: lane.seq, sender }
    }
}

#[derive(Debug, Default)]
struct Queues {
    notices: VecDeque<(Peer, Header, Payload)>,
    /// Lanes whose next frame may go, in the order they became ready: round-robin over peers and
    /// operations.
    ready: VecDeque<(OpId, usize)>,
    resumed: VecDeque<Lane>,
    events: VecDeque<Event>,
}

impl Engine {
    /// An engine for process `me` of a job of `world` processes on one host, with the communicator
    /// [`CommId::WORLD`] open.
    ///
    /// # Panics
    ///
    /// If `me` is not in `world`.
    pub fn new(me: Peer, world: WorldSize, config: Config) -> Self {
        Self::on_hosts(me, &vec![0; world.len()], config)
    }

    /// The same for processes on several hosts. `hosts` has a number for each process, equal for
    /// those that share a host. All processes must be told the same hosts, by whatever numbers.
    ///
    /// # Panics
    ///
    /// If `me` is not among them.
    pub fn on_hosts(me: Peer, hosts: &[u64], config: Config) -> Self {
        let world = WorldSize::new(hosts.len() as u32).expect("a job has processes");
        let mut engine = Self {
            me,
            world,
            hosts: hosts.to_vec(),
            neighbours: vec![false; world.len()],
            config,
            comms: HashMap::default(),
            closed: HashSet::default(),
            early_faults: HashMap::default(),
            lost: HashSet::default(),
            ops: HashMap::default(),
            next_op: 0,
            inbound: HashMap::default(),
            early: HashMap::default(),
            early_lanes: vec![0; world.len()],
            spare_early: Spare::default(),
            ahead: (0..world.get()).map(|_| Ahead::new(config.allowance)).collect(),
            inboxes: HashMap::default(),
            deadlines: BTreeSet::new(),
            queues: Queues::default(),
            spare: Vec::new(),
        };
        let members: Vec<_> = (0..world.get()).map(Peer).collect();
        engine.open(CommId::WORLD, &members).expect("a process is a member of its world");
        engine
    }

    /// Makes room for more processes: from now on there are `world` of them, or as many as before
    /// if those were more.
    pub fn grow(&mut self, world: WorldSize) {
        self.world = self.world.max(world);
        let all = self.world.len();
        self.hosts.resize(all, 0);
        self.neighbours.resize(all, false);
        self.early_lanes.resize(all, 0);
        while self.ahead.len() < all {
            self.ahead.push(Ahead::new(self.config.allowance));
        }
    }

    /// Says which host a process is on, for communicators that are opened from now on.
    pub fn set_host(&mut self, peer: Peer, host: u64) {
        if let Some(known) = self.hosts.get_mut(peer.index()) {
            *known = host;
        }
    }

    /// Says that a process is near, and reached through a network. Lanes to all such processes
    /// share that network, and are kept abreast as [`Config::lead`] says, from the next operation
    /// on.
    pub fn set_neighbour(&mut self, peer: Peer) {
        if let Some(known) = self.neighbours.get_mut(peer.index()) {
            *known = true;
        }
    }

    /// Which ranks of a communicator share a host.
    pub fn placement(&self, comm: CommId) -> Result<&Placement, CallError> {
        let comm = self.comms.get(&comm).ok_or(CallError::UnknownComm(comm))?;
        Ok(&comm.placement)
    }

    /// The hosts of a communicator's ranks, if they matter to an all-reduce: there are several
    /// hosts, some with several ranks, and floats are not added up in rank order.
    pub fn split_placement(&self, comm: CommId) -> Option<&Placement> {
        let placement = &self.comms.get(&comm)?.placement;
        let by_host = self.config.tuning.order == SumOrder::Host;
        (by_host && placement.is_split()).then_some(placement)
    }

    /// The group has changed, and all communicators are replaced by others: what is pending on them
    /// fails here, and so do later calls. Other members replace them themselves.
    ///
    /// All are replaced, not only the group's own: on one that was split off, a call between two
    /// ranks that live would wait for ever once one of them has gone on to the new group.
    pub fn retire_all(&mut self) {
        let before = self.queues.notices.len();
        let mut ids: Vec<_> = self.comms.keys().copied().collect();
        ids.sort(); // the same order in every run
        for id in ids {
            // A closed communicator is forgotten when its last operation fails.
            if self.comms.contains_key(&id) {
                self.fail_comm(id, Fault::Replaced { by: self.me }, self.me);
            }
        }
        let mut fresh = self.queues.notices.split_off(before);
        fresh.retain(|(_, header, _)| header.frame != FrameKind::Abort);
        self.queues.notices.append(&mut fresh);
    }

    /// This process.
    pub fn me(&self) -> Peer {
        self.me
    }

    /// How long an operation may take, unless its options say otherwise.
    pub fn deadline(&self) -> Duration {
        self.config.deadline
    }

    /// This process's rank in a communicator, and the communicator's size.
    pub fn place(&self, comm: CommId) -> Result<(Rank, WorldSize), CallError> {
        let comm = self.comms.get(&comm).ok_or(CallError::UnknownComm(comm))?;
        Ok((comm.me, comm.world))
    }

    /// The rank of a process in a communicator, if the communicator is open and the process a
    /// member.
    pub fn rank_of(&self, comm: CommId, peer: Peer) -> Option<Rank> {
        self.comms.get(&comm)?.ranks.get(&peer).copied()
    }

    /// Checks a call and lays it out. Nothing happens before [`submit`](Self::submit).
    pub fn plan(&self, comm: CommId, call: &Call, options: &Options) -> Result<Plan, CallError> {
        let group = self.comms.get(&comm).ok_or(CallError::UnknownComm(comm))?;
        let tuning = &self.config.tuning;
        let plan = Plan::placed(comm, group.me, &group.placement, call, options, tuning)?;
        Ok(plan.in_group(group.members_digest))
    }

    /// The number of the next collective on a communicator.
    pub fn next_collective(&self, comm: CommId) -> Option<u64> {
        self.comms.get(&comm).map(|comm| comm.next_collective)
    }

    /// The number that a plan gets if it is submitted next.
    pub fn next_seq(&self, plan: &Plan) -> Option<OpSeq> {
        self.comms.get(&plan.comm()).map(|comm| comm.next_seq(plan, &self.inboxes))
    }

    /// Starts an operation; its event will name the id. Fails if the communicator has failed.
    ///
    /// # Panics
    ///
    /// If the plan is not for this rank of an open communicator: plans come from
    /// [`plan`](Self::plan).
    pub fn submit(&mut self, now: Time, plan: Plan) -> Result<OpId, Box<OpError>> {
        let comm =
            self.comms.get_mut(&plan.comm()).expect("a plan is made on an open communicator");
        assert_eq!(
            (plan.me(), plan.world()),
            (comm.me, comm.world),
            "a plan is made for this rank"
        );
        let failed = comm.failed;
        let seq = comm.next_seq(&plan, &self.inboxes);
        if let Some((fault, reporter)) = failed {
            let here = self.me;
            let operation = plan.fingerprint();
            return Err(Box::new(OpError {
                operation,
                comm: plan.comm(),
                seq,
                fault,
                reporter,
                here,
            }));
        }
        comm.count(&plan);

        let id = OpId(self.next_op);
        self.next_op += 1;
        let due = Time(now.0.saturating_add(plan.deadline().unwrap_or(self.config.deadline)));
        let members = comm.members.clone();
        let moving = self.spare.pop().unwrap_or_default();
        let mut op = Op { id, seq, matched: true, plan, members, due, moving };
        op.start(&self.neighbours, &mut self.queues, &self.config);
        if op.moving.unfinished == 0 {
            self.queues.events.push_back(Event::Done(id));
            self.spare.extend(op.moving.recycle());
            return Ok(id);
        }
        if let Some(address) = op.inbound_address() {
            if let Some(from) = address.sender {
                op.matched = false;
                let (channel, _) = Channel::of(address.comm, address.seq);
                let inbox = self.inboxes.entry((from, channel)).or_default();
                inbox.waiting.push_back(id);
                let (called, next) =
                    (inbox.called(), Address { seq: channel.seq(inbox.next), ..address });
                let ahead = &mut self.ahead[from.index()];
                let long = op.plan.output_bytes() > ahead.allowance.channel();
                if ahead.owes_answer(channel, called) || long {
                    self.notify(from, FrameKind::Called, channel, called - 1);
                }
                self.resume(next);
            } else {
                self.inbound.insert(address, id);
                let (channel, number) = Channel::of(address.comm, address.seq);
                for peer in op.members.iter() {
                    if self.ahead[peer.index()].owes_answer(channel, number + 1) {
                        self.queues.notices.push_back(notice(
                            *peer,
                            FrameKind::Called,
                            self.config.epoch,
                            channel,
                            number,
                        ));
                    }
                }
                self.resume(address);
            }
        }
        self.deadlines.insert((due, id));
        self.ops.insert(id, op);
        Ok(id)
    }

    /// Resumes the lanes that wait for an operation, so that their frames are offered again.
    fn resume(&mut self, address: Address) {
        let Some(mut lanes) = self.early.remove(&address) else { return };
        for from in lanes.drain(..) {
            let Address { comm, seq, .. } = address;
            self.early_lanes[from.index()] -= 1;
            self.queues.resumed.push_back(Lane { from, comm, seq });
        }
        self.spare_early.give(lanes);
    }

    /// The next parcel of an operation to a rank is ready, with `len` bytes. `false` if the
    /// operation is over, has no more parcels to send, or may not send one this long.
    pub fn supply(&mut self, op: OpId, to: Rank, len: usize) -> bool {
        let op = self.ops.get_mut(&op);
        op.is_some_and(|op| op.supply(to, len, &mut self.queues, &self.config))
    }

    /// A frame of an operation has arrived from `from`, or is offered again after
    /// [`poll_resume`](Self::poll_resume).
    pub fn handle_frame(&mut self, from: Peer, header: &Header) -> Verdict {
        if header.frame != FrameKind::Data || header.epoch != self.config.epoch {
            return Verdict::Drop;
        }
        let lane = Lane::of(from, header);
        let Some(id) = self.inbound.get(&lane.into()).copied().or_else(|| self.match_message(lane))
        else {
            return self.handle_unexpected(lane);
        };
        let op = self.ops.get_mut(&id).expect("addresses are removed with their operation");
        let Some(rank) = self.comms[&lane.comm].ranks.get(&from) else {
            return Verdict::Drop; // not a member: its communicator with this id is another
        };
        let offered = op.offer(*rank, header);
        if op.is_first_word(*rank) {
            let (channel, number) = Channel::of(lane.comm, lane.seq);
            self.peer_called(from, channel, number + 1);
        }
        match offered {
            Ok(verdict) => verdict,
            Err(Breach::Fingerprint(mine)) => {
                let mine = Called { peer: self.me, fingerprint: mine };
                let theirs = Called { peer: from, fingerprint: header.fingerprint };
                self.fail_comm(lane.comm, Fault::Desync(mine, theirs), self.me);
                Verdict::Drop
            }
            Err(Breach::Frame) => {
                self.fail_comm(lane.comm, Fault::BadFrame(from), self.me);
                Verdict::Drop
            }
        }
    }

    /// A frame for no operation in flight: early, if its operation may still be submitted, or late.
    fn handle_unexpected(&mut self, lane: Lane) -> Verdict {
        let (channel, number) = Channel::of(lane.comm, lane.seq);
        if let Some(comm) = self.comms.get(&lane.comm) {
            let late = match channel.tag {
                None => number < comm.next_collective,
                Some(_) => self
                    .inboxes
                    .get(&(lane.from, channel))
                    .is_some_and(|inbox| number < inbox.next || inbox.void.contains(&number)),
            };
            if late || comm.failed.is_some() || comm.closed || !comm.ranks.contains_key(&lane.from)
            {
                return Verdict::Drop;
            }
        }
        let stranger = lane.from.0 >= self.world.get() || self.lost.contains(&lane.from);
        if stranger || self.closed.contains(&lane.comm) {
            return Verdict::Drop;
        }
        let lanes = self.early.entry(lane.into()).or_insert_with(|| self.spare_early.take());
        if !lanes.contains(&lane.from) {
            lanes.push(lane.from);
            self.early_lanes[lane.from.index()] += 1;
        }
        if self.early_lanes[lane.from.index()] > MAX_EARLY {
            self.handle_peer_lost(lane.from);
            return Verdict::Drop;
        }
        Verdict::Early
    }

    /// The payload of a taken frame has been applied.
    pub fn handle_taken(&mut self, take: Take) {
        if let Some(op) = self.ops.get_mut(&take.op) {
            op.taken(take.lane, &take.effect, &mut self.queues, &self.config);
            if op.plan.partner().is_some() {
                let (channel, _) = Channel::of(op.plan.comm(), op.seq);
                let payload = take.effect.wire_bytes(op.plan.dtype());
                let from = op.peer_of(take.lane);
                self.count_taken(from, channel, payload);
            }
            self.complete_if_done(take.op);
        }
    }

    /// The bytes of a frame have left the operation's buffers, which may change from now on.
    pub fn handle_sent(&mut self, transmit: Transmit) {
        if let Payload::Operation { op: id, .. } | Payload::Parcel { op: id, .. } = transmit.payload
            && let Some(op) = self.ops.get_mut(&id)
        {
            op.sent(transmit.lane, &mut self.queues, &self.config);
            self.complete_if_done(id);
        }
    }

    /// A member has sent something that makes no sense, although its frames' headers were right.
    /// The communicator fails, if it is still open.
    pub fn handle_nonsense(&mut self, comm: CommId, from: Peer) {
        if self.comms.contains_key(&comm) {
            self.fail_comm(comm, Fault::BadFrame(from), self.me);
        }
    }

    /// The link to a peer is dead. Every communicator that the peer is a member of fails.
    pub fn handle_peer_lost(&mut self, peer: Peer) {
        if !self.lost.insert(peer) {
            return;
        }
        self.early.retain(|_, waiting| {
            waiting.retain(|from| *from != peer);
            !waiting.is_empty()
        });
        if let Some(lanes) = self.early_lanes.get_mut(peer.index()) {
            *lanes = 0;
        }
        let mut hit: Vec<_> = self
            .comms
            .iter()
            .filter(|(_, comm)| comm.ranks.contains_key(&peer))
            .map(|(id, _)| *id)
            .collect();
        hit.sort();
        for comm in hit {
            self.fail_comm(comm, Fault::PeerLost(peer), self.me);
        }
    }

    /// Time has passed. Operations past their deadline fail: a collective with its communicator, a
    /// message alone.
    pub fn handle_timeout(&mut self, now: Time) {
        while let Some((due, id)) = self.deadlines.first().copied()
            && due <= now
        {
            self.deadlines.pop_first();
            let op = &self.ops[&id];
            let on = op.waits_on();
            let waiting_for = on.first().copied().unwrap_or(self.me);
            let others = on.len().saturating_sub(1) as u32;
            let fault = Fault::TimedOut { by: self.me, waiting_for, others };
            if let Some(partner) = op.plan.partner() {
                let (to, comm, seq) = (op.peer_of(0), op.plan.comm(), op.seq);
                self.fail_op(id, fault, self.me);
                if partner.end == End::Sender {
                    let (channel, number) = Channel::of(comm, seq);
                    self.notify(to, FrameKind::Void, channel, number);
                }
            } else {
                self.fail_comm(op.plan.comm(), fault, self.me);
            }
        }
    }

    /// The next frame to send.
    pub fn poll_transmit(&mut self) -> Option<Transmit> {
        loop {
            if let Some((to, header, payload)) = self.queues.notices.pop_front() {
                return Some(Transmit { to, header, payload, last: true, lane: 0 });
            }
            let (id, lane) = self.queues.ready.pop_front()?;
            // A failed operation's lanes may still be queued.
            let Some(op) = self.ops.get_mut(&id) else { continue };
            let (peer, epoch, config) = (op.peer_of(lane), self.config.epoch, &self.config);
            if op.has_heard(lane) {
                return Some(op.transmit(lane, epoch, &mut self.queues, config));
            }
            let (channel, number) = Channel::of(op.plan.comm(), op.seq);
            let ahead = &mut self.ahead[peer.index()];
            match ahead.leave(channel, number, (id, lane)) {
                Leave::No => self.ask(peer),
                Leave::Free => return Some(op.transmit(lane, epoch, &mut self.queues, config)),
                Leave::Counted => {
                    let transmit = op.transmit(lane, epoch, &mut self.queues, config);
                    let opens_lane = transmit.header.index == 0 && !transmit.last;
                    let cost = Allowance::cost(transmit.header.payload as usize, opens_lane);
                    ahead.charge(channel, number, cost, &mut self.queues.ready);
                    self.ask(peer);
                    return Some(transmit);
                }
            }
        }
    }

    /// A lane whose frame was left in its stream and may be offered again.
    pub fn poll_resume(&mut self) -> Option<Lane> {
        self.queues.resumed.pop_front()
    }

    /// What became of an operation.
    pub fn poll_event(&mut self) -> Option<Event> {
        self.queues.events.pop_front()
    }

    /// When [`handle_timeout`](Self::handle_timeout) must be called next.
    pub fn poll_timeout(&self) -> Option<Time> {
        self.deadlines.first().map(|(due, _)| *due)
    }

    /// Whether some operation needs a frame from `peer` that has not been offered yet. If the peer
    /// has said goodbye, that frame will never come. Operations that may take for ever do not
    /// count.
    pub fn awaits(&self, peer: Peer) -> bool {
        self.ops.values().any(|op| op.due < Time::MAX && op.awaits(peer))
    }

    /// The operations in flight and whom each waits for, oldest first.
    pub fn waits(&self) -> Vec<Wait> {
        let mut waits: Vec<_> = self.ops.values().map(Op::wait).collect();
        waits.sort_by_key(|wait| wait.op);
        waits
    }

    fn complete_if_done(&mut self, id: OpId) {
        if self.ops.get(&id).is_some_and(|op| op.moving.unfinished == 0) {
            self.remove(id);
            self.queues.events.push_back(Event::Done(id));
        }
    }

    fn remove(&mut self, id: OpId) -> Option<Op> {
        let mut op = self.ops.remove(&id)?;
        self.deadlines.remove(&(op.due, id));
        if let Some(address) = op.inbound_address() {
            match address.sender.filter(|_| !op.matched) {
                None => drop(self.inbound.remove(&address)),
                Some(from) => {
                    let (channel, _) = Channel::of(address.comm, address.seq);
                    if let Some(inbox) = self.inboxes.get_mut(&(from, channel)) {
                        inbox.waiting.retain(|waiting| *waiting != id);
                    }
                }
            }
        }
        self.spare.extend(std::mem::take(&mut op.moving).recycle());
        self.forget_if_closed(op.plan.comm());
        Some(op)
    }

    fn fail_op(&mut self, id: OpId, fault: Fault, reporter: Peer) {
        let Some(op) = self.ops.get(&id) else { return };
        self.queues.resumed.extend(op.held_lanes());
        let waited_for = op.waits_on();
        let (channel, number) = Channel::of(op.plan.comm(), op.seq);
        for peer in op.peers() {
            self.ahead[peer.index()].stop_waiting(channel, number, &mut self.queues.ready);
        }
        if let Some(op) = self.remove(id) {
            op.peers().for_each(|peer| self.ask(peer));
            let error = OpError {
                operation: op.plan.fingerprint(),
                comm: op.plan.comm(),
                seq: op.seq,
                fault,
                reporter,
                here: self.me,
            };
            self.queues.events.push_back(Event::Failed {
                op: id,
                error: Box::new(error),
                waited_for,
            });
        }
    }

    /// Fails everything pending on a communicator and tells all members, once.
    fn fail_comm(&mut self, id: CommId, fault: Fault, reporter: Peer) {
        let comm = self.comms.get_mut(&id).expect("only open communicators fail here");
        if comm.failed.is_some() {
            return;
        }
        comm.failed = Some((fault, reporter));
        self.queues.events.push_back(Event::CommFailed { comm: id, fault, reporter });
        // What the header says of an operation is not used: the fault says it all.
        let header = Header {
            frame: FrameKind::Abort,
            payload: FAULT_LEN as u32,
            comm: id,
            epoch: self.config.epoch,
            seq: OpSeq::Collective(comm.next_collective),
            index: 0,
            fingerprint: notice_fingerprint(Kind::Barrier),
        };
        for to in comm.members.iter().filter(|to| **to != self.me && !self.lost.contains(to)) {
            self.queues.notices.push_back((*to, header, Payload::Fault(fault.encode())));
        }
        let members = comm.members.clone();
        let mut hit: Vec<_> =
            self.ops.values().filter(|op| op.plan.comm() == id).map(|op| op.id).collect();
        hit.sort();
        for op in hit {
            self.fail_op(op, fault, reporter);
        }
        for peer in members.iter() {
            self.ahead[peer.index()].forget_comm(id, &mut self.queues.ready);
            self.ask(*peer);
        }
        self.resume_early(id);
    }

    /// Resumes the lanes that wait for calls that will never be made on a communicator, so that
    /// their frames are offered once more, and dropped.
    fn resume_early(&mut self, id: CommId) {
        let mut waiting: Vec<_> = self
            .early
            .extract_if(|address, _| address.comm == id)
            .flat_map(|(Address { comm, seq, .. }, peers)| {
                peers.into_iter().map(move |from| Lane { from, comm, seq })
            })
            .collect();
        waiting.sort(); // the same order in every run
        for lane in &waiting {
            self.early_lanes[lane.from.index()] -= 1;
        }
        self.queues.resumed.extend(waiting);
    }
}

#[cfg(test)]
mod tests;
