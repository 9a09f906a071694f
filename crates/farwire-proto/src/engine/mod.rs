//! The engine: many operations in flight, on several communicators, without blocking each other.

mod op;

use std::collections::{BTreeSet, HashMap, HashSet, VecDeque};
use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use crate::call::{Call, CallError, Options};
use crate::collective::message::End;
use crate::fault::{Called, FAULT_LEN, Fault, OpError};
use crate::fingerprint::Fingerprint;
use crate::header::{FrameKind, Header, HeaderError};
use crate::ids::{CommId, Epoch, OpId, OpSeq, Peer, Rank, Tag, Time, WorldSize};
use crate::partition::digest;
use crate::plan::{Plan, Tuning};
use crate::schedule::{Action, Gate, Source};
use op::{Breach, Moving, Op};

/// Communicators whose failure is remembered before they are opened here, per peer that tells. Far more than a job opens; a bound all the same.
const MAX_STILLBORN: usize = 256;

/// Operations that peers have begun and this rank has not, whose lanes are remembered. A driver's limit on streams is far below; a bound all the same.
const MAX_EARLY: usize = 1 << 16;

/// What an engine is told at the start.
#[derive(Clone, Copy, Debug)]
pub struct Config {
    /// What plans depend on; the same on all ranks.
    pub tuning: Tuning,
    /// How long an operation may take, unless [`Options::deadline`] says otherwise.
    pub deadline: Duration,
    /// Frames of one lane that may be handed out before the driver reports the first of them sent.
    pub credit: NonZeroU32,
    /// The generation of the group.
    pub epoch: Epoch,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            tuning: Tuning::default(),
            deadline: Duration::from_secs(600),
            credit: NonZeroU32::MIN,
            epoch: Epoch(0),
        }
    }
}

/// Decides what this process sends and what becomes of what it receives.
///
/// The engine does no IO and holds no payload. Its methods fall into three groups:
///
/// - **Calls**: [`open`](Self::open), [`plan`](Self::plan), [`submit`](Self::submit), [`supply`](Self::supply),
///   [`close`](Self::close).
/// - **What happened**: [`handle_frame`](Self::handle_frame) and [`handle_taken`](Self::handle_taken) for arriving frames,
///   [`handle_sent`](Self::handle_sent) for departed ones, [`handle_abort`](Self::handle_abort),
///   [`handle_nonsense`](Self::handle_nonsense), [`handle_peer_lost`](Self::handle_peer_lost), [`handle_timeout`](Self::handle_timeout).
/// - **What to do**: after any of the above, call these until each returns `None`:
///   [`poll_transmit`](Self::poll_transmit), [`poll_resume`](Self::poll_resume), [`poll_event`](Self::poll_event);
///   then wait no longer than [`poll_timeout`](Self::poll_timeout) says.
///
/// Frames move in two steps, so that bytes can be handed on in place: the engine says what a frame is for
/// ([`Transmit`], [`Take`]), the driver moves the bytes with a [`Workspace`](crate::Workspace), and reports it done.
///
/// A frame that the engine does not want yet stays in its stream, unread: flow control is the back-pressure. The engine remembers which lanes
/// wait for calls that this rank has not made, up to a fixed number; payloads it never holds.
///
/// When an operation or a communicator fails, its lanes that wait are resumed, so that what is in them is offered once more, and dropped.
#[derive(Debug)]
pub struct Engine {
    me: Peer,
    world: WorldSize,
    config: Config,
    comms: HashMap<CommId, Comm>,
    /// Communicators that were open once.
    closed: HashSet<CommId>,
    /// Communicators that failed before they were opened here, by who said so.
    stillborn: HashMap<Peer, Vec<(CommId, Fault)>>,
    lost: HashSet<Peer>,
    ops: HashMap<OpId, Op>,
    next_op: u64,
    /// Which operation takes frames with this address.
    inbound: HashMap<Address, OpId>,
    /// Lanes with frames for operations not submitted yet.
    early: HashMap<Address, Vec<Peer>>,
    deadlines: BTreeSet<(Time, OpId)>,
    queues: Queues,
    /// Cleared parts of finished operations, so that the next ones allocate nothing.
    spare: Vec<Moving>,
}

/// One direction of an operation between two peers: the stream that its frames arrive on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Lane {
    /// Who sends.
    pub from: Peer,
    /// On which communicator.
    pub comm: CommId,
    /// For which operation.
    pub seq: OpSeq,
}

impl Lane {
    /// The lane that a frame from `from` belongs to.
    pub fn of(from: Peer, header: &Header) -> Self {
        Self { from, comm: header.comm, seq: header.seq }
    }
}

/// A frame to send.
#[derive(Clone, Debug)]
pub struct Transmit {
    /// To whom.
    pub to: Peer,
    /// Its header.
    pub header: Header,
    /// What follows the header.
    pub payload: Payload,
    /// Whether it is the last of its lane.
    pub last: bool,
    lane: usize,
}

/// What follows a header.
#[derive(Clone, Debug)]
pub enum Payload {
    /// Bytes of an operation: ask its workspace for them. Report them with [`Engine::handle_sent`] once they may change.
    Operation {
        /// Which operation.
        op: OpId,
        /// Which of its bytes.
        source: Source,
        /// What this frame had to wait for.
        after: Gate,
    },
    /// An encoded [`Fault`].
    Fault([u8; FAULT_LEN]),
}

/// What to do with an arrived frame.
#[derive(Clone, Debug)]
#[must_use]
pub enum Verdict {
    /// Read it and do this.
    Take(Take),
    /// Leave it in its stream, unread, until [`Engine::poll_resume`] names the lane.
    Later,
    /// It belongs to nothing any more; throw it away.
    Drop,
}

/// A frame whose turn it is: apply the action, then report it with [`Engine::handle_taken`].
#[derive(Clone, Debug)]
#[must_use]
pub struct Take {
    /// For which operation.
    pub op: OpId,
    /// What becomes of the payload.
    pub action: Action,
    lane: usize,
}

/// What became of an operation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// It is complete, and its result is where [`Plan::outcome`] said.
    Done(OpId),
    /// A round of its parcels has come whole, from every rank.
    Round(OpId, u32),
    /// It failed; its input is untouched.
    Failed {
        /// Which.
        op: OpId,
        /// Why.
        error: Box<OpError>,
        /// Who it waited for just then.
        waited_for: Vec<Peer>,
    },
    /// A communicator is of no more use: every further call on it fails at once.
    CommFailed {
        /// Which.
        comm: CommId,
        /// Why.
        fault: Fault,
        /// Who found out.
        reporter: Peer,
    },
}

/// Who an operation waits for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Wait {
    /// The operation.
    pub op: OpId,
    /// Its communicator.
    pub comm: CommId,
    /// Its place in the communicator's order.
    pub seq: OpSeq,
    /// What was called.
    pub fingerprint: Fingerprint,
    /// The peers that must move next: those not heard from at all if there are any, else those whose next frame has not come, else those
    /// that do not take what is sent.
    pub on: Vec<Peer>,
}

/// Why a communicator cannot be opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum OpenError {
    /// This process is not a member.
    #[error("this process is not among the members of the new communicator; open it on its members only")]
    NotAMember,
    /// A member is listed twice.
    #[error("{0} is listed twice among the members of the new communicator; list each member once")]
    Twice(Peer),
    /// The id is taken.
    #[error("communicator {0:?} is open already; use a new id for each communicator")]
    Taken(CommId),
}

#[derive(Debug)]
struct Comm {
    me: Rank,
    world: WorldSize,
    members: Arc<[Peer]>,
    /// By which members find out that their lists differ; zero for the world.
    members_digest: u32,
    ranks: HashMap<Peer, Rank>,
    next_collective: u64,
    next_sent: HashMap<(Peer, Tag), u64>,
    next_received: HashMap<(Peer, Tag), u64>,
    failed: Option<(Fault, Peer)>,
    /// Nobody here will call on it again.
    closed: bool,
}

/// How arriving frames find their operation. Collectives take frames from anyone, messages from one sender.
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
    aborts: VecDeque<(Peer, Header, [u8; FAULT_LEN])>,
    /// Lanes whose next frame may go, in the order they became ready: round-robin over peers and operations.
    ready: VecDeque<(OpId, usize)>,
    resumed: VecDeque<Lane>,
    events: VecDeque<Event>,
}

impl Engine {
    /// An engine for process `me` of a job of `world` processes, with the communicator [`CommId::WORLD`] open.
    ///
    /// # Panics
    ///
    /// If `me` is not in `world`.
    pub fn new(me: Peer, world: WorldSize, config: Config) -> Self {
        let mut engine = Self {
            me,
            world,
            config,
            comms: HashMap::new(),
            closed: HashSet::new(),
            stillborn: HashMap::new(),
            lost: HashSet::new(),
            ops: HashMap::new(),
            next_op: 0,
            inbound: HashMap::new(),
            early: HashMap::new(),
            deadlines: BTreeSet::new(),
            queues: Queues::default(),
            spare: Vec::new(),
        };
        let members: Vec<_> = (0..world.get()).map(Peer).collect();
        engine.open(CommId::WORLD, &members).expect("a process is a member of its world");
        engine
    }

    /// This process.
    pub fn me(&self) -> Peer {
        self.me
    }

    /// Opens a communicator of some of the processes. Their ranks in it are their places in `members`, which every member must give in
    /// the same order.
    pub fn open(&mut self, id: CommId, members: &[Peer]) -> Result<(), OpenError> {
        if self.comms.contains_key(&id) || self.closed.contains(&id) {
            return Err(OpenError::Taken(id));
        }
        let mut ranks = HashMap::with_capacity(members.len());
        for (peer, rank) in members.iter().zip((0..).map(Rank)) {
            if ranks.insert(*peer, rank).is_some() {
                return Err(OpenError::Twice(*peer));
            }
        }
        let me = *ranks.get(&self.me).ok_or(OpenError::NotAMember)?;
        let world = WorldSize::new(members.len() as u32).ok_or(OpenError::NotAMember)?;
        let comm = Comm {
            me,
            world,
            members: members.into(),
            members_digest: if id == CommId::WORLD {
                0
            } else {
                digest(members.iter().map(|peer| peer.0.into()))
            },
            ranks,
            next_collective: 0,
            next_sent: HashMap::new(),
            next_received: HashMap::new(),
            failed: None,
            closed: false,
        };
        self.comms.insert(id, comm);
        let lost = members.iter().find(|peer| self.lost.contains(peer));
        let news = members.iter().find_map(|reporter| {
            let (_, fault) = self.stillborn.get(reporter)?.iter().find(|(comm, _)| *comm == id)?;
            Some((*fault, *reporter))
        });
        if let Some((fault, reporter)) = news {
            self.fail_comm(id, fault, reporter);
        } else if let Some(peer) = lost {
            self.fail_comm(id, Fault::PeerLost(*peer), self.me);
        }
        Ok(())
    }

    /// Lets go of a communicator on which no more calls will be made; operations in flight go on. What peers still send on it is dropped.
    pub fn close(&mut self, id: CommId) {
        if let Some(comm) = self.comms.get_mut(&id) {
            comm.closed = true;
            // Nobody waits for receives that may take for ever.
            let endless = |op: &&Op| op.plan.comm() == id && op.due == Time::MAX;
            let endless: Vec<_> = self.ops.values().filter(endless).map(|op| op.id).collect();
            for op in endless {
                self.fail_op(op, Fault::PeerLost(self.me), self.me);
            }
            self.forget_if_closed(id);
        }
    }

    fn forget_if_closed(&mut self, id: CommId) {
        let closed = self.comms.get(&id).is_some_and(|comm| comm.closed);
        if closed && !self.ops.values().any(|op| op.plan.comm() == id) {
            self.comms.remove(&id);
            self.closed.insert(id);
            self.resume_early(id);
        }
    }

    /// This process's rank in a communicator, and the communicator's size.
    pub fn place(&self, comm: CommId) -> Result<(Rank, WorldSize), CallError> {
        let comm = self.comms.get(&comm).ok_or(CallError::UnknownComm(comm))?;
        Ok((comm.me, comm.world))
    }

    /// The rank of a process in a communicator, if the communicator is open and the process a member.
    pub fn rank_of(&self, comm: CommId, peer: Peer) -> Option<Rank> {
        self.comms.get(&comm)?.ranks.get(&peer).copied()
    }

    /// Checks a call and lays it out. Nothing happens before [`submit`](Self::submit).
    pub fn plan(&self, comm: CommId, call: &Call, options: &Options) -> Result<Plan, CallError> {
        let group = self.comms.get(&comm).ok_or(CallError::UnknownComm(comm))?;
        let plan = Plan::new(comm, group.me, group.world, call, options, &self.config.tuning)?;
        Ok(plan.in_group(group.members_digest))
    }

    /// The number of the next collective on a communicator.
    pub fn next_collective(&self, comm: CommId) -> Option<u64> {
        self.comms.get(&comm).map(|comm| comm.next_collective)
    }

    /// The number that a plan will get if it is submitted next.
    pub fn next_seq(&self, plan: &Plan) -> Option<OpSeq> {
        self.comms.get(&plan.comm()).map(|comm| comm.next_seq(plan))
    }

    /// Starts an operation; its event will name the id. Fails if the communicator has failed.
    ///
    /// # Panics
    ///
    /// If the plan is not for this rank of an open communicator: plans come from [`plan`](Self::plan).
    pub fn submit(&mut self, now: Time, plan: Plan) -> Result<OpId, Box<OpError>> {
        let comm = self.comms.get_mut(&plan.comm()).expect("a plan is made on an open communicator");
        assert_eq!((plan.me(), plan.world()), (comm.me, comm.world), "a plan is made for this rank");
        let failed = comm.failed;
        let seq = comm.next_seq(&plan);
        if let Some((fault, reporter)) = failed {
            let here = self.me;
            let operation = plan.fingerprint();
            return Err(Box::new(OpError { operation, comm: plan.comm(), seq, fault, reporter, here }));
        }
        comm.count(&plan);

        let id = OpId(self.next_op);
        self.next_op += 1;
        let due = Time(now.0.saturating_add(plan.deadline().unwrap_or(self.config.deadline)));
        let members = comm.members.clone();
        let moving = self.spare.pop().unwrap_or_default();
        let mut op = Op { id, seq, plan, members, due, moving };
        op.start(&mut self.queues, self.config.credit);
        if op.moving.unfinished == 0 {
            self.queues.events.push_back(Event::Done(id));
            self.spare.extend(op.moving.recycle());
            return Ok(id);
        }
        if let Some(address) = op.inbound_address() {
            self.inbound.insert(address, id);
            for from in self.early.remove(&address).unwrap_or_default() {
                let Address { comm, seq, .. } = address;
                self.queues.resumed.push_back(Lane { from, comm, seq });
            }
        }
        self.deadlines.insert((due, id));
        self.ops.insert(id, op);
        Ok(id)
    }

    /// The next parcel of an operation to a rank is there, with so many bytes; `false` if the operation is over, has no more of them to send, or they may not be so long.
    pub fn supply(&mut self, op: OpId, to: Rank, len: usize) -> bool {
        let op = self.ops.get_mut(&op);
        op.is_some_and(|op| op.supply(to, len, &mut self.queues, self.config.credit))
    }

    /// A frame of an operation has arrived from `from`, or is offered again after [`poll_resume`](Self::poll_resume).
    pub fn handle_frame(&mut self, from: Peer, header: &Header) -> Verdict {
        if header.frame != FrameKind::Data || header.epoch != self.config.epoch {
            return Verdict::Drop;
        }
        let lane = Lane::of(from, header);
        let Some(id) = self.inbound.get(&lane.into()) else {
            return self.handle_unexpected(lane);
        };
        let op = self.ops.get_mut(id).expect("addresses are removed with their operation");
        let Some(rank) = self.comms[&lane.comm].ranks.get(&from) else {
            return Verdict::Drop; // not a member: its communicator of the same id is another
        };
        match op.offer(*rank, header) {
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
        if let Some(comm) = self.comms.get(&lane.comm) {
            let next = match lane.seq {
                OpSeq::Collective(_) => comm.next_collective,
                OpSeq::Message(tag, _) => comm.next_received.get(&(lane.from, tag)).copied().unwrap_or(0),
            };
            let (OpSeq::Collective(seq) | OpSeq::Message(_, seq)) = lane.seq;
            if comm.failed.is_some() || comm.closed || !comm.ranks.contains_key(&lane.from) || seq < next {
                return Verdict::Drop;
            }
        }
        let known = self.early.contains_key(&lane.into());
        if self.closed.contains(&lane.comm)
            || lane.from.0 >= self.world.get()
            || (!known && self.early.len() >= MAX_EARLY)
        {
            return Verdict::Drop;
        }
        let lanes = self.early.entry(lane.into()).or_default();
        if !lanes.contains(&lane.from) {
            lanes.push(lane.from);
        }
        Verdict::Later
    }

    /// The payload of a taken frame has been applied.
    pub fn handle_taken(&mut self, take: Take) {
        if let Some(op) = self.ops.get_mut(&take.op) {
            op.taken(take.lane, &take.action, &mut self.queues, self.config.credit);
            self.complete_if_done(take.op);
        }
    }

    /// The bytes of a frame have left the operation's buffers, which may change from now on.
    pub fn handle_sent(&mut self, transmit: Transmit) {
        if let Payload::Operation { op: id, .. } = transmit.payload
            && let Some(op) = self.ops.get_mut(&id)
        {
            op.sent(transmit.lane, &mut self.queues, self.config.credit);
            self.complete_if_done(id);
        }
    }

    /// An abort frame has arrived: the communicator it names has failed on another rank.
    pub fn handle_abort(&mut self, from: Peer, header: &Header, payload: &[u8]) -> Result<(), HeaderError> {
        let fault = Fault::decode(payload)?;
        if header.epoch != self.config.epoch {
            return Ok(());
        }
        match self.comms.get(&header.comm) {
            Some(comm) if comm.ranks.contains_key(&from) => self.fail_comm(header.comm, fault, from),
            Some(_) => {}
            None if from.0 < self.world.get() && !self.closed.contains(&header.comm) => {
                let told = self.stillborn.entry(from).or_default();
                if told.len() < MAX_STILLBORN {
                    told.push((header.comm, fault));
                }
            }
            None => {}
        }
        Ok(())
    }

    /// A peer has sent something that its frames' headers do not show to be wrong, but that nobody can make sense of. The communicator fails; this is why.
    pub fn handle_nonsense(&mut self, comm: CommId, from: Rank) -> Option<Fault> {
        let fault = Fault::BadFrame(*self.comms.get(&comm)?.members.get(from.index())?);
        self.fail_comm(comm, fault, self.me);
        Some(fault)
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
        let mut hit: Vec<_> =
            self.comms.iter().filter(|(_, comm)| comm.ranks.contains_key(&peer)).map(|(id, _)| *id).collect();
        hit.sort();
        for comm in hit {
            self.fail_comm(comm, Fault::PeerLost(peer), self.me);
        }
    }

    /// Time has passed. Operations past their deadline fail: a collective with its communicator, a message alone.
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
            if op.plan.partner().is_some() {
                self.forget_unheard_receive(id);
                self.fail_op(id, fault, self.me);
            } else {
                self.fail_comm(op.plan.comm(), fault, self.me);
            }
        }
    }

    /// The next frame to send.
    pub fn poll_transmit(&mut self) -> Option<Transmit> {
        if let Some((to, header, fault)) = self.queues.aborts.pop_front() {
            return Some(Transmit { to, header, payload: Payload::Fault(fault), last: true, lane: 0 });
        }
        while let Some((id, lane)) = self.queues.ready.pop_front() {
            // A failed operation's lanes may still be queued.
            if let Some(op) = self.ops.get_mut(&id) {
                let epoch = self.config.epoch;
                return Some(op.transmit(lane, epoch, &mut self.queues, self.config.credit));
            }
        }
        None
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

    /// Whether some operation needs a frame from `peer` that has not been offered yet. If the peer has said goodbye, that frame will never come. Operations that may take for ever
    /// need nothing.
    pub fn awaits(&self, peer: Peer) -> bool {
        self.ops.values().any(|op| op.due < Time::MAX && op.awaits(peer))
    }

    /// The operations in flight and who each waits for, oldest first.
    pub fn waits(&self) -> Vec<Wait> {
        let mut waits: Vec<_> = self.ops.values().map(Op::wait).collect();
        waits.sort_by_key(|wait| wait.op);
        waits
    }

    /// A receive that times out before anything has come does not count, if it is the last of its kind: the message, when it comes, is for the next one.
    fn forget_unheard_receive(&mut self, id: OpId) {
        let op = &self.ops[&id];
        if let (Some(Address { sender: Some(from), .. }), OpSeq::Message(tag, seq)) =
            (op.inbound_address(), op.seq)
            && op.is_unheard()
            && let Some(comm) = self.comms.get_mut(&op.plan.comm())
            && let Some(next) = comm.next_received.get_mut(&(from, tag))
            && *next == seq + 1
        {
            *next = seq;
        }
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
            self.inbound.remove(&address);
        }
        self.spare.extend(std::mem::take(&mut op.moving).recycle());
        self.forget_if_closed(op.plan.comm());
        Some(op)
    }

    fn fail_op(&mut self, id: OpId, fault: Fault, reporter: Peer) {
        let Some(op) = self.ops.get(&id) else { return };
        self.queues.resumed.extend(op.held_lanes());
        let waited_for = op.waits_on();
        if let Some(op) = self.remove(id) {
            let error = OpError {
                operation: op.plan.fingerprint(),
                comm: op.plan.comm(),
                seq: op.seq,
                fault,
                reporter,
                here: self.me,
            };
            self.queues.events.push_back(Event::Failed { op: id, error: Box::new(error), waited_for });
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
        // What the header says of an operation is not used; the fault says it all.
        let header = Header {
            frame: FrameKind::Abort,
            payload: FAULT_LEN as u32,
            comm: id,
            epoch: self.config.epoch,
            seq: OpSeq::Collective(comm.next_collective),
            index: 0,
            fingerprint: abort_fingerprint(),
        };
        for to in comm.members.iter().filter(|to| **to != self.me && !self.lost.contains(to)) {
            self.queues.aborts.push_back((*to, header, fault.encode()));
        }
        let mut hit: Vec<_> = self.ops.values().filter(|op| op.plan.comm() == id).map(|op| op.id).collect();
        hit.sort();
        for op in hit {
            self.fail_op(op, fault, reporter);
        }
        self.resume_early(id);
    }

    /// Has what waits for calls that will never be made on a communicator offered once more, and dropped.
    fn resume_early(&mut self, id: CommId) {
        let mut waiting: Vec<_> = self
            .early
            .extract_if(|address, _| address.comm == id)
            .flat_map(|(Address { comm, seq, .. }, peers)| {
                peers.into_iter().map(move |from| Lane { from, comm, seq })
            })
            .collect();
        waiting.sort(); // the same order in every run
        self.queues.resumed.extend(waiting);
    }
}

impl Comm {
    /// The number that a plan gets when it is submitted.
    fn next_seq(&self, plan: &Plan) -> OpSeq {
        match plan.partner() {
            None => OpSeq::Collective(self.next_collective),
            Some(partner) => {
                let counters = match partner.end {
                    End::Sender => &self.next_sent,
                    End::Receiver => &self.next_received,
                };
                let key = (self.members[partner.rank.index()], partner.tag);
                OpSeq::Message(partner.tag, counters.get(&key).copied().unwrap_or(0))
            }
        }
    }

    /// A plan has got its number.
    fn count(&mut self, plan: &Plan) {
        match plan.partner() {
            None => self.next_collective += 1,
            Some(partner) => {
                let counters = match partner.end {
                    End::Sender => &mut self.next_sent,
                    End::Receiver => &mut self.next_received,
                };
                *counters.entry((self.members[partner.rank.index()], partner.tag)).or_insert(0) += 1;
            }
        }
    }
}

/// What an abort frame's header says was called: nothing in particular.
fn abort_fingerprint() -> Fingerprint {
    use crate::call::{Algorithm, Kind};
    Fingerprint {
        kind: Kind::Barrier,
        algorithm: Algorithm::Direct,
        dtype: None,
        op: None,
        count: 0,
        root: None,
        codec: 0,
        segment: 0,
        layout: 0,
    }
}

#[cfg(test)]
mod tests;
