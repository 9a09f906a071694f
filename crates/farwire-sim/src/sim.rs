//! The event loop: virtual time, and what happens in it.

use std::cmp::Ordering;
use std::collections::{BinaryHeap, HashMap, HashSet};
use std::time::Duration;

use farwire_codec::collective::CodedCollective;
use farwire_proto::{
    Call, CommId, Config, Event, HEADER_LEN, Header, Lane, OpId, OpenError, Options, Outcome, Parcels,
    Payload, Peer, Rank, Time, Transmit, Verdict, Workspace,
};
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;

use crate::network::{Network, Trouble, transfer_time};
use crate::node::{Job, Memory, Node};
use crate::report::{Hang, JobEnd, JobReport, RankStats, Report};

/// Names a job: one call on one process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct JobId(pub(crate) usize);

/// A call for a process to make.
#[derive(Debug)]
pub struct Submission {
    /// On which communicator.
    pub comm: CommId,
    /// The call.
    pub call: Call,
    /// What is set beside it.
    pub options: Options,
    /// The input's bytes; ignored where only lengths are carried.
    pub input: Vec<u8>,
    /// What makes its parcels, if it travels through a codec.
    pub coded: Option<Coded>,
    /// When.
    pub start: Start,
}

/// The parcels of a coded call.
#[derive(Debug)]
pub enum Coded {
    /// Real ones.
    Collective(Box<CodedCollective>),
    /// Only their lengths, by round and by the rank they go to: for vectors that would not fit in memory.
    Lengths(Vec<Vec<usize>>),
}

impl Submission {
    /// A coded call on the world communicator, at the beginning. Its result is in f32.
    pub fn coded(exchange: CodedCollective) -> Self {
        let call = exchange.call().clone();
        Self { coded: Some(Coded::Collective(Box::new(exchange))), ..Self::new(call, Vec::new()) }
    }

    /// A call on the world communicator, at the beginning.
    pub fn new(call: Call, input: Vec<u8>) -> Self {
        let (comm, options) = (CommId::WORLD, Options::default());
        Self { comm, call, options, input, coded: None, start: Start::At(Time::ZERO) }
    }
}

/// How far a run has come.
#[derive(Clone, Copy, Debug)]
pub struct Progress {
    /// The virtual time.
    pub now: Time,
    /// Frames sent by all ranks together.
    pub frames: u64,
}

/// Happenings between two reports of progress.
const PROGRESS_EVERY: u64 = 1 << 16;

/// When a call is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Start {
    /// At a moment.
    At(Time),
    /// As soon as an earlier job of the same process has ended, well or badly.
    After(JobId),
}

/// A simulation: set it up, then [`run`](Self::run) it.
#[derive(Debug)]
pub struct Sim {
    network: Network,
    rng: ChaCha8Rng,
    carry_bytes: bool,
    limit: Time,
    now: Time,
    queue: BinaryHeap<Scheduled>,
    happenings: u64,
    nodes: Vec<Node>,
    submissions: Vec<Option<Submission>>,
    followers: HashMap<JobId, Vec<JobId>>,
    pending: usize,
    flights: Vec<Flight>,
    free_flights: Vec<FlightId>,
    /// Per process: when its interface has sent, and received, all it was given.
    sender_free: Vec<Time>,
    receiver_free: Vec<Time>,
    link_free: HashMap<(Peer, Peer), Time>,
    /// The latest arrival on each lane, so that none overtakes another of its lane.
    last_arrival: HashMap<(Peer, Lane), Time>,
    /// Pairs that have given each other up.
    severed: HashSet<(Peer, Peer)>,
    report: Report,
}

/// A frame on its way.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct FlightId(usize);

#[derive(Debug)]
struct Flight {
    from: Peer,
    to: Peer,
    header: Header,
    /// Until it has departed.
    transmit: Option<Transmit>,
    departed: bool,
    /// When its last byte leaves, packets sent again included.
    leaves: Time,
    /// Once it has departed, unless only lengths are carried.
    body: Option<Vec<u8>>,
    depth: u32,
}

impl Flight {
    fn wire_bytes(&self) -> usize {
        HEADER_LEN + self.header.payload as usize
    }

    fn lane(&self) -> Lane {
        Lane::of(self.from, &self.header)
    }
}

/// Something that will happen. The greatest, for the heap, is the earliest, and of those the first to be scheduled.
#[derive(Debug)]
struct Scheduled {
    at: Time,
    order: u64,
    happening: Happening,
}

impl Ord for Scheduled {
    fn cmp(&self, other: &Self) -> Ordering {
        (other.at, other.order).cmp(&(self.at, self.order))
    }
}

impl PartialOrd for Scheduled {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Scheduled {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other).is_eq()
    }
}

impl Eq for Scheduled {}

#[derive(Clone, Copy, Debug)]
enum Happening {
    /// A process makes a call.
    Submit(Peer, JobId),
    /// The last byte of a frame has left.
    Departed(Peer, FlightId),
    /// The first byte of a frame is at its destination's interface.
    Arriving(FlightId),
    /// The last byte of a frame is there.
    Delivered(Peer, FlightId),
    /// A sender learns that `bytes` of a lane were read.
    Window(Peer, Peer, Lane, usize),
    /// A process takes another for lost.
    Lost(Peer, Peer),
    /// An engine's deadline.
    Timer(Peer),
}

impl Happening {
    /// The process that does something, if it is not just the network.
    fn actor(&self) -> Option<Peer> {
        match *self {
            Self::Submit(peer, _)
            | Self::Departed(peer, _)
            | Self::Delivered(peer, _)
            | Self::Window(peer, ..)
            | Self::Lost(peer, _)
            | Self::Timer(peer) => Some(peer),
            Self::Arriving(_) => None,
        }
    }
}

impl Sim {
    /// A simulation of `network` with the default engine settings.
    pub fn new(network: Network) -> Self {
        Self::with_config(network, Config::default())
    }

    /// A simulation of `network` in which every engine has these settings.
    pub fn with_config(network: Network, config: Config) -> Self {
        let nodes = network.peers().map(|peer| Node::new(peer, network.world, config)).collect();
        let ranks = network.world.len();
        let report = Report {
            ended: Time::ZERO,
            rounds: 0,
            ranks: vec![RankStats::default(); ranks],
            jobs: Vec::new(),
        };
        Self {
            rng: ChaCha8Rng::seed_from_u64(network.seed),
            network,
            carry_bytes: true,
            limit: Time(Duration::from_secs(24 * 3600)),
            now: Time::ZERO,
            queue: BinaryHeap::new(),
            happenings: 0,
            nodes,
            submissions: Vec::new(),
            followers: HashMap::new(),
            pending: 0,
            flights: Vec::new(),
            free_flights: Vec::new(),
            sender_free: vec![Time::ZERO; ranks],
            receiver_free: vec![Time::ZERO; ranks],
            link_free: HashMap::new(),
            last_arrival: HashMap::new(),
            severed: HashSet::new(),
            report,
        }
    }

    /// Carries only the lengths of payloads: for runs whose vectors would not fit in memory. Results are empty.
    pub fn carry_lengths(&mut self) {
        self.carry_bytes = false;
    }

    /// Gives the run up as a [`Hang`] when this moment comes; after a day of virtual time if never called.
    pub fn limit(&mut self, limit: Time) {
        self.limit = limit;
    }

    /// Opens a communicator on all of its members.
    pub fn open(&mut self, comm: CommId, members: &[Peer]) -> Result<(), OpenError> {
        members.iter().try_for_each(|peer| self.open_on(*peer, comm, members))
    }

    /// Opens a communicator on one process, which may be mistaken about its members.
    pub fn open_on(&mut self, peer: Peer, comm: CommId, members: &[Peer]) -> Result<(), OpenError> {
        self.nodes[peer.index()].engine.open(comm, members)
    }

    /// Has a process make a call.
    pub fn submit(&mut self, peer: Peer, submission: Submission) -> JobId {
        let id = JobId(self.submissions.len());
        match submission.start {
            Start::At(at) => self.push(at, Happening::Submit(peer, id)),
            Start::After(job) => self.followers.entry(job).or_default().push(id),
        }
        self.submissions.push(Some(submission));
        self.report.jobs.push(JobReport { peer, submitted: None, ended: None, end: JobEnd::Pending });
        self.pending += 1;
        id
    }

    /// Runs until every job has ended on every process that is alive.
    pub fn run(self) -> Result<Report, Hang> {
        self.run_observed(|_| ())
    }

    /// [`run`](Self::run), saying now and then how far it has come.
    pub fn run_observed(mut self, mut observe: impl FnMut(Progress)) -> Result<Report, Hang> {
        self.foresee_troubles();
        for round in 0u64.. {
            if self.pending == 0 {
                break;
            }
            if round.is_multiple_of(PROGRESS_EVERY) {
                let frames = self.report.ranks.iter().map(|rank| rank.frames).sum();
                observe(Progress { now: self.now, frames });
            }
            match self.queue.pop() {
                Some(Scheduled { at, happening, .. }) if at <= self.limit => self.step(at, happening),
                _ => return Err(self.hang()),
            }
        }
        for (stats, node) in self.report.ranks.iter_mut().zip(&self.nodes) {
            stats.steps = node.steps;
        }
        Ok(self.report)
    }

    fn hang(&self) -> Hang {
        let alive = self.network.peers().filter(|peer| self.nodes[peer.index()].alive);
        Hang {
            at: self.now,
            seed: self.network.seed,
            waits: alive
                .flat_map(|peer| {
                    self.nodes[peer.index()].engine.waits().into_iter().map(move |wait| (peer, wait))
                })
                .collect(),
            unsubmitted: self.submissions.iter().flatten().count(),
        }
    }

    fn push(&mut self, at: Time, happening: Happening) {
        self.queue.push(Scheduled { at, order: self.happenings, happening });
        self.happenings += 1;
    }

    fn step(&mut self, at: Time, happening: Happening) {
        debug_assert!(at >= self.now, "time runs forwards");
        self.now = at;
        if let Some(actor) = happening.actor() {
            if !self.nodes[actor.index()].alive {
                return;
            }
            if let Some(until) = self.stalled_until(actor) {
                return self.push(until, happening);
            }
        }
        match happening {
            Happening::Submit(peer, job) => self.submit_now(peer, job),
            Happening::Departed(peer, flight) => self.departed(peer, flight),
            Happening::Arriving(flight) => self.arriving(flight),
            Happening::Delivered(peer, flight) => self.delivered(peer, flight),
            Happening::Window(peer, to, lane, bytes) => {
                if let Some(outbox) = self.nodes[peer.index()].outbox.get_mut(&(to, lane)) {
                    outbox.outstanding -= bytes;
                    self.send_held(peer, to, lane);
                }
            }
            Happening::Lost(peer, lost) => {
                self.severed.insert((peer, lost));
                self.severed.insert((lost, peer));
                self.nodes[peer.index()].engine.handle_peer_lost(lost);
                self.settle(peer);
            }
            Happening::Timer(peer) => {
                let node = &mut self.nodes[peer.index()];
                node.timer = None;
                node.engine.handle_timeout(self.now);
                self.settle(peer);
            }
        }
    }

    // --- a process acts ---

    /// Counts a step of a process; `false` if it dies instead.
    fn takes_step(&mut self, peer: Peer) -> bool {
        let step = self.nodes[peer.index()].steps;
        if self.network.troubles.contains(&Trouble::Crash { peer, step }) {
            self.crash(peer);
            return false;
        }
        self.nodes[peer.index()].steps += 1;
        true
    }

    fn crash(&mut self, peer: Peer) {
        self.nodes[peer.index()].alive = false;
        for id in (0..self.report.jobs.len()).map(JobId) {
            let job = &self.report.jobs[id.0];
            if job.peer == peer && matches!(job.end, JobEnd::Pending) {
                self.end(id, JobEnd::Crashed);
            }
        }
        let found_out = self.now + self.network.detection;
        for other in self.network.peers().filter(|other| *other != peer) {
            self.push(found_out, Happening::Lost(other, peer));
        }
    }

    fn submit_now(&mut self, peer: Peer, id: JobId) {
        if !self.takes_step(peer) {
            return;
        }
        let Some(Submission { comm, call, options, input, coded, .. }) = self.submissions[id.0].take() else {
            return;
        };
        self.report.jobs[id.0].submitted = Some(self.now);
        let node = &mut self.nodes[peer.index()];
        let checked = node.engine.plan(comm, &call, &options).and_then(|plan| {
            let is_laid =
                !matches!(call, Call::SendParcel { .. } | Call::RecvParcel { .. } | Call::Coded { .. });
            if self.carry_bytes && is_laid {
                plan.check_buffers(input.len(), plan.output_bytes())?;
            }
            Ok(plan)
        });
        let plan = match checked {
            Ok(plan) => plan,
            Err(error) => return self.end(id, JobEnd::Refused(error)),
        };
        let memory = match (coded, &call) {
            (Some(Coded::Collective(exchange)), _) => Memory::Coded { parcels: Parcels::default(), exchange },
            (Some(Coded::Lengths(lengths)), _) => Memory::Lengths(lengths),
            (None, Call::SendParcel { to, .. }) => {
                let mut parcels = Parcels::default();
                parcels.put(*to, 0, input.clone().into());
                Memory::Message { parcels, from: None, input }
            }
            (None, Call::RecvParcel { from, .. }) => {
                Memory::Message { parcels: Parcels::default(), from: Some(*from), input }
            }
            (None, Call::Coded { .. }) => panic!("a coded call comes with what makes its parcels"),
            (None, _) if !self.carry_bytes => Memory::None,
            (None, Call::InPlace(_)) => Memory::in_place(&plan, &input),
            (None, _) => {
                let (mut work, mut output) = (Workspace::new(&plan), vec![0; plan.output_bytes()]);
                work.begin(&input, &mut output);
                Memory::Laid { work, input, output }
            }
        };
        let job = Job::new(id, &plan, memory);
        match node.engine.submit(self.now, plan) {
            Ok(op) => {
                node.jobs.insert(op, job);
                if let Call::SendParcel { to, len, .. } = call {
                    node.engine.supply(op, to, len);
                }
                self.make_parcels(peer, op);
            }
            Err(error) => {
                return self.end(id, JobEnd::Failed { error, input: job.memory.into_input() });
            }
        }
        self.settle(peer);
    }

    /// Supplies the parcels that a codec can make now.
    fn make_parcels(&mut self, peer: Peer, op: OpId) {
        let Node { engine, jobs, .. } = &mut self.nodes[peer.index()];
        let Some(job) = jobs.get_mut(&op) else { return };
        match &mut job.memory {
            Memory::Lengths(lengths) => {
                let round = if lengths.is_empty() { return } else { lengths.remove(0) };
                for to in job.world.others(job.me) {
                    assert!(engine.supply(op, to, round[to.index()]), "lengths keep to the call's limits");
                }
            }
            Memory::Coded { parcels, exchange } => {
                while let Some(made) = exchange.next_parcels() {
                    let round = exchange.made() - 1;
                    for (to, parcel) in made.into_iter().enumerate().filter(|(to, _)| *to != job.me.index()) {
                        let (to, len) = (Rank(to as u32), parcel.len());
                        parcels.put(to, round, parcel);
                        assert!(engine.supply(op, to, len), "a codec keeps to its limits");
                    }
                    if job.world.get() == 1 {
                        exchange.came(round, &[Vec::new()]).expect("a codec understands itself");
                    }
                }
            }
            Memory::None | Memory::Laid { .. } | Memory::InPlace { .. } | Memory::Message { .. } => {}
        }
    }

    /// A round of parcels has come.
    fn round_came(&mut self, peer: Peer, op: OpId, round: u32) {
        let Some(job) = self.nodes[peer.index()].jobs.get_mut(&op) else { return };
        if let Memory::Coded { parcels, exchange } = &mut job.memory {
            let came: Vec<_> = job.world.ranks().map(|from| parcels.take(from, round)).collect();
            exchange.came(round, &came).expect("codecs understand each other");
        }
        self.make_parcels(peer, op);
    }

    /// Does all that an engine asks for.
    fn settle(&mut self, peer: Peer) {
        loop {
            let engine = &mut self.nodes[peer.index()].engine;
            if let Some(lane) = engine.poll_resume() {
                self.offer(peer, lane);
            } else if let Some(transmit) = engine.poll_transmit() {
                self.send(peer, transmit);
            } else if let Some(event) = engine.poll_event() {
                self.ended(peer, event);
            } else {
                break;
            }
            if !self.nodes[peer.index()].alive {
                return;
            }
        }
        let node = &mut self.nodes[peer.index()];
        if let Some(due) = node.engine.poll_timeout()
            && node.timer.is_none_or(|timer| due < timer)
        {
            node.timer = Some(due);
            self.push(due, Happening::Timer(peer));
        }
    }

    /// Offers the engine what waits at the head of a lane, for as long as it takes it.
    fn offer(&mut self, peer: Peer, lane: Lane) {
        loop {
            let node = &mut self.nodes[peer.index()];
            let Some(&id) = node.inbox.get(&lane).and_then(|waiting| waiting.front()) else {
                node.inbox.remove(&lane);
                return;
            };
            let flight = &self.flights[id.0];
            match node.engine.handle_frame(lane.from, &flight.header) {
                Verdict::Later | Verdict::Early => return,
                Verdict::Drop => {}
                Verdict::Take(take) => {
                    if !self.takes_step(peer) {
                        return;
                    }
                    let node = &mut self.nodes[peer.index()];
                    let flight = &self.flights[id.0];
                    if let Some(job) = node.jobs.get_mut(&take.op) {
                        let from = node.engine.rank_of(lane.comm, lane.from);
                        job.take(from, &take.action, flight.body.as_deref(), flight.depth);
                    }
                    node.engine.handle_taken(take);
                }
            }
            let bytes = self.flights[id.0].wire_bytes();
            if let Some(waiting) = self.nodes[peer.index()].inbox.get_mut(&lane) {
                waiting.pop_front();
            }
            self.land(id);
            let back = self.network.link(peer, lane.from).latency;
            self.push(self.now + back, Happening::Window(lane.from, peer, lane, bytes));
        }
    }

    fn ended(&mut self, peer: Peer, event: Event) {
        let node = &mut self.nodes[peer.index()];
        match event {
            Event::CommFailed { .. } => {}
            Event::Round(op, round) => self.round_came(peer, op, round),
            Event::Done(op) => {
                let job = node.jobs.remove(&op).expect("an operation ends once");
                let result = match job.memory {
                    Memory::None | Memory::Lengths(_) => Vec::new(),
                    Memory::Laid { input, output, .. } => match job.outcome {
                        Outcome::Output => output,
                        Outcome::Input => input,
                        Outcome::Nothing => Vec::new(),
                    },
                    Memory::InPlace { memory, output, .. } => match job.outcome {
                        Outcome::Output => memory[output].to_vec(),
                        Outcome::Input => memory,
                        Outcome::Nothing => Vec::new(),
                    },
                    Memory::Message { mut parcels, from, .. } => {
                        from.map_or_else(Vec::new, |from| parcels.take(from, 0))
                    }
                    Memory::Coded { exchange, .. } => match exchange.finish() {
                        Ok(finished) => bytemuck::cast_slice(&finished.output).to_vec(),
                        Err((error, input)) => {
                            return self
                                .end(job.id, JobEnd::NotEncodable { error, input: input.into_bytes() });
                        }
                    },
                };
                self.end(job.id, JobEnd::Done(result));
            }
            Event::Failed { op, error, .. } => {
                let job = node.jobs.remove(&op).expect("an operation ends once");
                self.end(job.id, JobEnd::Failed { error, input: job.memory.into_input() });
            }
        }
    }

    fn end(&mut self, id: JobId, end: JobEnd) {
        let job = &mut self.report.jobs[id.0];
        job.ended = Some(self.now);
        job.end = end;
        let peer = job.peer;
        self.report.ended = self.now;
        self.pending -= 1;
        for follower in self.followers.remove(&id).unwrap_or_default() {
            self.push(self.now, Happening::Submit(peer, follower));
        }
    }

    // --- a frame's way ---

    /// A frame is handed to the network, or held until its lane's window has room.
    fn send(&mut self, from: Peer, transmit: Transmit) {
        let depth = match &transmit.payload {
            Payload::Fault(_) | Payload::Nothing => 0,
            Payload::Operation { op, after, .. } => {
                self.nodes[from.index()].jobs.get(op).map_or(0, |job| job.depth_after(after))
            }
        };
        let (to, header) = (transmit.to, transmit.header);
        let flight = Flight {
            from,
            to,
            header,
            transmit: Some(transmit),
            departed: false,
            leaves: Time::ZERO,
            body: None,
            depth,
        };
        let id = self.take_off(flight);
        if header.frame.is_notice() {
            return self.depart(id);
        }
        let lane = self.flights[id.0].lane();
        self.nodes[from.index()].outbox.entry((to, lane)).or_default().held.push_back(id);
        self.send_held(from, to, lane);
    }

    fn send_held(&mut self, from: Peer, to: Peer, lane: Lane) {
        let key = (to, lane);
        while let Some(outbox) = self.nodes[from.index()].outbox.get_mut(&key) {
            let Some(&id) = outbox.held.front() else {
                if outbox.outstanding == 0 {
                    self.nodes[from.index()].outbox.remove(&key);
                }
                return;
            };
            let bytes = self.flights[id.0].wire_bytes();
            if outbox.outstanding > 0 && outbox.outstanding + bytes > self.network.window {
                return;
            }
            outbox.outstanding += bytes;
            outbox.held.pop_front();
            self.depart(id);
        }
    }

    /// A frame takes its turn on the sender's interface and on the link.
    fn depart(&mut self, id: FlightId) {
        let flight = &self.flights[id.0];
        let (from, to, bytes, lane) = (flight.from, flight.to, flight.wire_bytes(), flight.lane());
        let control = flight.header.frame.is_notice();
        let link = *self.network.link(from, to);
        let (delay, resent) = link.delay(bytes, &mut self.rng);

        let start = self.now.max(self.sender_free[from.index()]);
        let end = start + transfer_time(bytes + resent, self.network.bandwidth);
        self.sender_free[from.index()] = end;
        self.flights[id.0].leaves = end;
        let stats = &mut self.report.ranks[from.index()];
        stats.frames += 1;
        stats.wire_bytes += (bytes + resent) as u64;
        stats.sends(start, end);
        self.push(end, Happening::Departed(from, id));

        let mut enters = start;
        if link.bandwidth.is_finite() {
            let free = self.link_free.entry((from, to)).or_default();
            enters = enters.max(*free);
            *free = enters + transfer_time(bytes, link.bandwidth);
        }
        let mut arrival = self.after_partitions(from, to, enters + delay);
        if !control {
            let last = self.last_arrival.entry((to, lane)).or_default();
            arrival = arrival.max(*last);
            *last = arrival;
        }
        self.push(arrival, Happening::Arriving(id));
    }

    fn departed(&mut self, peer: Peer, id: FlightId) {
        let flight = &mut self.flights[id.0];
        let Some(transmit) = flight.transmit.take() else { return };
        let node = &mut self.nodes[peer.index()];
        match &transmit.payload {
            Payload::Fault(fault) => flight.body = Some(fault.to_vec()),
            Payload::Nothing => {}
            Payload::Operation { op, source, .. } => {
                // The bytes are read at the last moment that the engine's contract allows.
                match node.jobs.get_mut(op) {
                    None => return, // failed meanwhile: the frame is never finished
                    Some(job) => {
                        if let Some(bytes) = job.memory.payload(source) {
                            let told = flight.header.payload as usize;
                            assert_eq!(bytes.len(), told, "the header tells the length");
                            flight.body = Some(bytes.to_vec());
                        }
                    }
                }
                if !self.takes_step(peer) {
                    return;
                }
            }
        }
        self.flights[id.0].departed = true;
        self.nodes[peer.index()].engine.handle_sent(transmit);
        self.settle(peer);
    }

    fn arriving(&mut self, id: FlightId) {
        let flight = &self.flights[id.0];
        let (from, to, bytes, leaves) = (flight.from, flight.to, flight.wire_bytes(), flight.leaves);
        let link = self.network.link(from, to);
        let free = &mut self.receiver_free[to.index()];
        *free = self.now.max(*free) + transfer_time(bytes, self.network.bandwidth);
        // The last byte cannot arrive before it has come through the link, nor before it has left and travelled.
        let through = self.now + transfer_time(bytes, link.bandwidth);
        let delivered = (*free).max(through).max(leaves + link.latency);
        self.push(delivered, Happening::Delivered(to, id));
    }

    fn delivered(&mut self, peer: Peer, id: FlightId) {
        let flight = &mut self.flights[id.0];
        let from = flight.from;
        if !flight.departed || self.severed.contains(&(from, peer)) {
            return;
        }
        self.report.rounds = self.report.rounds.max(flight.depth);
        if flight.header.frame.is_notice() {
            let (header, body) = (flight.header, flight.body.take().unwrap_or_default());
            self.land(id);
            let engine = &mut self.nodes[peer.index()].engine;
            engine.handle_notice(from, &header, &body).expect("engines send notices that decode");
            return self.settle(peer);
        }
        let lane = flight.lane();
        let waiting = self.nodes[peer.index()].inbox.entry(lane).or_default();
        waiting.push_back(id);
        if waiting.len() == 1 {
            self.offer(peer, lane);
            if self.nodes[peer.index()].alive {
                self.settle(peer);
            }
        }
    }

    fn take_off(&mut self, flight: Flight) -> FlightId {
        match self.free_flights.pop() {
            Some(id) => {
                self.flights[id.0] = flight;
                id
            }
            None => {
                self.flights.push(flight);
                FlightId(self.flights.len() - 1)
            }
        }
    }

    /// A frame's journey is over, and its place can be used again.
    fn land(&mut self, id: FlightId) {
        self.flights[id.0].body = None;
        self.free_flights.push(id);
    }

    // --- trouble ---

    /// Schedules what processes will notice of the troubles whose time is known.
    fn foresee_troubles(&mut self) {
        let detection = self.network.detection;
        for trouble in self.network.troubles.clone() {
            match trouble {
                Trouble::Crash { .. } => {}
                Trouble::Stall { peer, from, until } => {
                    if until > from + detection {
                        for other in self.network.peers().filter(|other| *other != peer) {
                            self.push(from + detection, Happening::Lost(other, peer));
                            self.push(until, Happening::Lost(peer, other));
                        }
                    }
                }
                Trouble::Partition { side, from, until } => {
                    if until > from + detection {
                        for (a, b) in self.pairs_across(&side) {
                            self.push(from + detection, Happening::Lost(a, b));
                        }
                    }
                }
            }
        }
    }

    /// Ordered pairs with one process in `side` and one outside.
    fn pairs_across(&self, side: &[Peer]) -> Vec<(Peer, Peer)> {
        let others: Vec<_> = self.network.peers().filter(|peer| !side.contains(peer)).collect();
        let pairs = side.iter().flat_map(|a| others.iter().map(move |b| (*a, *b)));
        pairs.flat_map(|(a, b)| [(a, b), (b, a)]).collect()
    }

    fn stalled_until(&self, peer: Peer) -> Option<Time> {
        self.network.troubles.iter().find_map(|trouble| match trouble {
            Trouble::Stall { peer: who, from, until }
                if *who == peer && (*from..*until).contains(&self.now) =>
            {
                Some(*until)
            }
            _ => None,
        })
    }

    /// When a frame that would arrive at `arrival` does, with the partitions in its way.
    fn after_partitions(&self, from: Peer, to: Peer, arrival: Time) -> Time {
        let latency = self.network.link(from, to).latency;
        self.network.troubles.iter().fold(arrival, |arrival, trouble| match trouble {
            Trouble::Partition { side, from: begin, until }
                if side.contains(&from) != side.contains(&to) && (*begin..*until).contains(&arrival) =>
            {
                *until + latency
            }
            _ => arrival,
        })
    }
}
