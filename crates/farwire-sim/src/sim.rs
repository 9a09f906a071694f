//! The event loop: virtual time, and what happens in it.

mod queue;
mod transit;

use std::collections::VecDeque;
use std::num::NonZeroU32;
use std::time::Duration;

use bytes::Bytes;
use farwire_codec::collective::CodedCollective;
use farwire_proto::{
    Call, Coding, CommId, Config, DType, Input, Lane, MachineEvent, Nonsense, OpId, OpenError,
    Options, Peer, ReduceOp, Refusal, Refused, Time, Verdict,
};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use rustc_hash::{FxHashMap as HashMap, FxHashSet as HashSet};

use crate::model::{CodedModel, Coder, Task};
use crate::network::{Interface, Network, Trouble};
use crate::node::{FlightId, Job, Node, memory};
use crate::report::{Hang, JobEnd, JobId, JobReport, RankStats, Report};
use queue::Queue;
use transit::Flight;

/// A call for a process to make.
#[derive(Debug)]
pub struct Submission {
    /// The communicator.
    pub comm: CommId,
    /// The call.
    pub call: Call,
    /// The options of the call.
    pub options: Options,
    /// The input's bytes; ignored where only lengths are carried.
    pub input: Vec<u8>,
    /// What makes its parcels, if it goes through a codec.
    pub coded: Option<Coded>,
    /// When to make the call.
    pub start: Start,
}

/// The parcels of a coded call.
#[derive(Debug)]
pub enum Coded {
    /// Real parcels.
    Collective(Box<CodedCollective>),
    /// Only their lengths, by round and by the rank they go to: for vectors that would not fit in
    /// memory.
    Lengths(Vec<Vec<usize>>),
    /// Their lengths, and the work they take.
    Model(CodedModel),
}

impl Submission {
    /// A coded call on the world communicator, at the beginning. Its result is in f32.
    pub fn coded(exchange: CodedCollective) -> Self {
        let call = exchange.call().clone();
        Self { coded: Some(Coded::Collective(Box::new(exchange))), ..Self::new(call, Vec::new()) }
    }

    /// A modelled all-reduce of `count` elements of f32, on the world communicator, at the beginning.
    pub fn model(count: usize, model: CodedModel) -> Self {
        let call = Call::AllReduce { count, dtype: DType::F32, op: ReduceOp::Sum };
        let (rounds, max) = (model.rounds(), model.longest());
        let call = Call::Coded { call: Box::new(call), codec: NonZeroU32::MIN, rounds, max };
        Self { coded: Some(Coded::Model(model)), ..Self::new(call, Vec::new()) }
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

/// How long a process works before others that share its cores get their turn.
const SLICE: Duration = Duration::from_millis(1);

/// When a call is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Start {
    /// At this time.
    At(Time),
    /// As soon as an earlier job of the same process has ended, whether it succeeded or failed.
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
    queue: Queue<Happening>,
    nodes: Vec<Node>,
    submissions: Vec<Option<Submission>>,
    followers: HashMap<JobId, Vec<JobId>>,
    pending: usize,
    flights: Vec<Flight>,
    free_flights: Vec<FlightId>,
    /// When an interface has sent, and received, all it was given.
    sender_free: HashMap<Interface, Time>,
    receiver_free: HashMap<Interface, Time>,
    link_free: HashMap<(Peer, Peer), Time>,
    /// When an interface would have sent all it was given, if cores had no work to do on it.
    planned: HashMap<Interface, Time>,
    relay_free: Time,
    /// When each core of a pool has done what it was given.
    cores: HashMap<u64, Vec<Time>>,
    /// Processes at work on modelled calls.
    coders: HashMap<(Peer, OpId), Coder>,
    /// The latest arrival on each lane, so that none overtakes another of its lane.
    last_arrival: HashMap<(Peer, Lane), Time>,
    /// The same for when the work on a frame is done.
    last_read: HashMap<(Peer, Lane), Time>,
    /// Pairs that have given each other up.
    severed: HashSet<(Peer, Peer)>,
    report: Report,
}

/// Something that will happen.
#[derive(Debug)]
enum Happening {
    /// A process makes a call.
    Submit(Peer, JobId),
    /// A process begins to work on a frame that is to leave.
    Prepare(Peer, FlightId),
    /// The last byte of a frame has left.
    Departed(Peer, FlightId),
    /// The first byte of a frame is at its destination's interface.
    Arriving(FlightId),
    /// The last byte of a frame has arrived.
    Delivered(Peer, FlightId),
    /// The work on a frame that arrived is done.
    Read(Peer, FlightId),
    /// A process has more work to do before something happens.
    Work(Peer, Duration, Box<Happening>),
    /// A process has done some work on a modelled call.
    Worked(Peer, OpId),
    /// A sender learns that `bytes` of a lane were read.
    Window(Peer, Peer, Lane, usize),
    /// A process takes another for lost.
    Lost(Peer, Peer),
    /// An engine's deadline.
    Timer(Peer),
    /// A process begins to code for an operation.
    Code(Peer, OpId),
    /// A process has made a round of parcels.
    Made(Peer, OpId, u32, Vec<Bytes>),
    /// It has done its coding for now.
    Coded(Peer, OpId, Box<CodedCollective>, Option<Nonsense>),
}

impl Happening {
    /// The process that acts, unless it is just the network.
    fn actor(&self) -> Option<Peer> {
        match *self {
            Self::Submit(peer, _)
            | Self::Prepare(peer, _)
            | Self::Departed(peer, _)
            | Self::Delivered(peer, _)
            | Self::Read(peer, _)
            | Self::Work(peer, ..)
            | Self::Worked(peer, _)
            | Self::Window(peer, ..)
            | Self::Lost(peer, _)
            | Self::Timer(peer)
            | Self::Code(peer, _)
            | Self::Made(peer, ..)
            | Self::Coded(peer, ..) => Some(peer),
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
        let hosts: Vec<_> = network.peers().map(|peer| network.host_of(peer)).collect();
        Self::with_hosts(network, config, &|_| hosts.clone())
    }

    /// The same, but each process believes that the processes are on the hosts that `believed`
    /// gives, by number. It may be mistaken.
    pub fn with_hosts(
        network: Network,
        config: Config,
        believed: &dyn Fn(Peer) -> Vec<u64>,
    ) -> Self {
        let node = |peer| Node::new(peer, &believed(peer), config);
        let nodes = network.peers().map(node).collect();
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
            queue: Queue::default(),
            nodes,
            submissions: Vec::new(),
            followers: HashMap::default(),
            pending: 0,
            flights: Vec::new(),
            free_flights: Vec::new(),
            sender_free: HashMap::default(),
            receiver_free: HashMap::default(),
            link_free: HashMap::default(),
            planned: HashMap::default(),
            relay_free: Time::ZERO,
            cores: HashMap::default(),
            coders: HashMap::default(),
            last_arrival: HashMap::default(),
            last_read: HashMap::default(),
            severed: HashSet::default(),
            report,
        }
    }

    /// Carries only the lengths of payloads: for runs whose vectors would not fit in memory.
    /// Results are empty.
    pub fn carry_lengths(&mut self) {
        self.carry_bytes = false;
    }

    /// Gives the run up as a [`Hang`] at this time; by default, after a day of virtual time.
    pub fn limit(&mut self, limit: Time) {
        self.limit = limit;
    }

    /// Opens a communicator on all of its members.
    pub fn open(&mut self, comm: CommId, members: &[Peer]) -> Result<(), OpenError> {
        members.iter().try_for_each(|peer| self.open_on(*peer, comm, members))
    }

    /// Opens a communicator on one process, which may be mistaken about its members.
    pub fn open_on(&mut self, peer: Peer, comm: CommId, members: &[Peer]) -> Result<(), OpenError> {
        self.nodes[peer.index()].machine.open(comm, members)
    }

    /// Has a process make a call.
    pub fn submit(&mut self, peer: Peer, submission: Submission) -> JobId {
        let id = JobId(self.submissions.len());
        match submission.start {
            Start::At(at) => self.push(at, Happening::Submit(peer, id)),
            Start::After(job) => self.followers.entry(job).or_default().push(id),
        }
        self.submissions.push(Some(submission));
        self.report.jobs.push(JobReport {
            peer,
            submitted: None,
            ended: None,
            end: JobEnd::Pending,
        });
        self.pending += 1;
        id
    }

    /// Runs until every job has ended on every process that is alive.
    pub fn run(self) -> Result<Report, Hang> {
        self.run_observed(|_| ())
    }

    /// [`run`](Self::run), which tells `observe` now and then how far it has come.
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
                Some((at, happening)) if at <= self.limit => self.step(at, happening),
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
                    let waits = self.nodes[peer.index()].machine.engine().waits();
                    waits.into_iter().map(move |wait| (peer, wait))
                })
                .collect(),
            unsubmitted: self.submissions.iter().flatten().count(),
        }
    }

    fn push(&mut self, at: Time, happening: Happening) {
        self.queue.push(at, happening);
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
            Happening::Prepare(peer, flight) => self.prepare(peer, flight),
            Happening::Departed(peer, flight) => self.departed(peer, flight),
            Happening::Arriving(flight) => self.arriving(flight),
            Happening::Delivered(peer, flight) => self.delivered(peer, flight),
            Happening::Read(peer, flight) => self.read(peer, flight),
            Happening::Work(peer, rest, then) => self.work(peer, rest, *then),
            Happening::Worked(peer, op) => self.worked(peer, op),
            Happening::Window(peer, to, lane, bytes) => self.window(peer, to, lane, bytes),
            Happening::Lost(peer, lost) => {
                self.severed.insert((peer, lost));
                self.severed.insert((lost, peer));
                self.nodes[peer.index()].machine.handle_peer_lost(lost);
                self.settle(peer);
            }
            Happening::Timer(peer) => {
                let node = &mut self.nodes[peer.index()];
                node.timer = None;
                node.machine.handle_timeout(self.now);
                self.settle(peer);
            }
            Happening::Code(peer, op) => self.code(peer, op),
            Happening::Made(peer, op, round, parcels) => {
                self.nodes[peer.index()].machine.supply(op, round, parcels);
                self.settle(peer);
            }
            Happening::Coded(peer, op, exchange, nonsense) => {
                self.nodes[peer.index()].machine.give_back(op, exchange, nonsense);
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
        let Some(Submission { comm, call, options, input, coded, .. }) =
            self.submissions[id.0].take()
        else {
            return;
        };
        self.report.jobs[id.0].submitted = Some(self.now);
        let node = &mut self.nodes[peer.index()];
        let plan = match node.machine.plan(comm, &call, &options) {
            Ok(plan) => plan,
            Err(error) => return self.end(id, JobEnd::Refused(error)),
        };
        let mut coder = None;
        let input = match (coded, &call) {
            (Some(Coded::Model(model)), _) => {
                let lengths = model.lengths();
                coder = Some(Coder::new(model));
                Input::Lengths(lengths)
            }
            (Some(Coded::Collective(exchange)), _) => Input::Rounds(exchange),
            (Some(Coded::Lengths(lengths)), _) => Input::Lengths(lengths.into()),
            (None, Call::Coded { .. }) => panic!("a coded call comes with what makes its parcels"),
            (None, Call::SendParcel { .. }) => Input::Parcel(input.into()),
            (None, Call::RecvParcel { .. }) => Input::Nothing,
            (None, _) if !self.carry_bytes => Input::Lengths(VecDeque::new()),
            (None, _) => match memory(&plan, input) {
                Ok(memory) => Input::Buffer(memory),
                Err(error) => return self.end(id, JobEnd::Refused(error)),
            },
        };
        let mut job = Job::new(id, &plan, matches!(input, Input::Lengths(_)));
        let tag = |op, _| {
            job.op = Some(op);
            job
        };
        match node.machine.submit(self.now, plan, input, tag) {
            Ok(op) => {
                self.coders.extend(coder.map(|coder| ((peer, op), coder)));
                self.settle(peer);
            }
            Err(Refused { why: Refusal::Call(error), .. }) => self.end(id, JobEnd::Refused(error)),
            Err(Refused { why: Refusal::Failed(error), input }) => {
                self.end(id, JobEnd::Failed { error, input: given_back(input) });
            }
        }
    }

    /// When work that a process begins now is done: processes that share cores take turns.
    fn occupy(&mut self, peer: Peer, work: Duration) -> Time {
        let Some((pool, cores)) = self.network.cores_of(peer) else { return self.now + work };
        let cores = self.cores.entry(pool).or_insert_with(|| vec![Time::ZERO; cores]);
        let core = cores.iter_mut().min().expect("a pool has cores");
        *core = self.now.max(*core) + work;
        *core
    }

    /// A process works for a while, and then something happens. During long work, others get the
    /// core now and then.
    fn work(&mut self, peer: Peer, work: Duration, then: Happening) {
        let now = work.min(SLICE);
        let end = self.occupy(peer, now);
        match work.saturating_sub(now) {
            Duration::ZERO => self.push(end, then),
            rest => self.push(end, Happening::Work(peer, rest, Box::new(then))),
        }
    }

    /// A process goes on with a modelled call, if there is something to do.
    fn model(&mut self, peer: Peer, op: OpId) {
        let Some(coder) = self.coders.get_mut(&(peer, op)) else { return };
        if let Some(work) = coder.begin() {
            return self.work(peer, work, Happening::Worked(peer, op));
        }
        if coder.is_done()
            && let Some((id, end)) = coder.ended.take()
        {
            self.coders.remove(&(peer, op));
            self.end(id, end);
        }
    }

    fn worked(&mut self, peer: Peer, op: OpId) {
        let done = self.coders.get_mut(&(peer, op)).and_then(Coder::finish);
        if done == Some(Task::Make) {
            // It has lengths only, so this supplies the next round.
            let nothing = self.nodes[peer.index()].machine.take_coding(op);
            debug_assert!(nothing.is_none(), "a modelled call has nothing to code");
        }
        self.model(peer, op);
        self.settle(peer);
    }

    /// How long some coding takes.
    fn coding_time(&mut self) -> Duration {
        if self.network.coding.is_zero() {
            return Duration::ZERO;
        }
        self.network.coding.mul_f64(self.rng.random::<f64>())
    }

    /// A process codes for an operation. What it makes is ready after a while, round by round.
    fn code(&mut self, peer: Peer, op: OpId) {
        match self.nodes[peer.index()].machine.take_coding(op) {
            None => self.settle(peer),
            Some(Coding::Finish { rounds, tag }) => match rounds.finish() {
                Ok(done) => {
                    self.end(tag.id, JobEnd::Done(bytemuck::cast_slice(&done.output).to_vec()))
                }
                Err((error, input)) => {
                    self.end(tag.id, JobEnd::NotEncodable { error, input: input.into_bytes() });
                }
            },
            Some(Coding::Work(mut work)) => {
                let mut made = Vec::new();
                let nonsense = work.run(|round, parcels| made.push((round, parcels))).err();
                let mut at = self.now;
                for (round, mut parcels) in made {
                    if self.network.troubles.contains(&Trouble::Nonsense { peer, round }) {
                        parcels.fill(Bytes::from_static(&[0xff]));
                    }
                    at = at + self.coding_time();
                    self.push(at, Happening::Made(peer, op, round, parcels));
                }
                at = at + self.coding_time();
                self.push(at, Happening::Coded(peer, op, work.rounds, nonsense));
            }
        }
    }

    /// Does all that a machine asks for.
    fn settle(&mut self, peer: Peer) {
        loop {
            let machine = &mut self.nodes[peer.index()].machine;
            if let Some(lane) = machine.poll_resume() {
                self.offer(peer, lane);
            } else if let Some(transmit) = machine.poll_transmit() {
                self.send(peer, transmit);
            } else if let Some(event) = machine.poll_event() {
                self.happened(peer, event);
            } else {
                break;
            }
            if !self.nodes[peer.index()].alive {
                return;
            }
        }
        let node = &mut self.nodes[peer.index()];
        if let Some(due) = node.machine.engine().poll_timeout()
            && node.timer.is_none_or(|timer| due < timer)
        {
            node.timer = Some(due);
            self.push(due, Happening::Timer(peer));
        }
    }

    /// Offers the machine what waits at the head of a lane, for as long as the machine takes it.
    fn offer(&mut self, peer: Peer, lane: Lane) {
        loop {
            let node = &mut self.nodes[peer.index()];
            let Some(&id) = node.inbox.get(&lane).and_then(|waiting| waiting.front()) else {
                node.inbox.remove(&lane);
                return;
            };
            let flight = &self.flights[id.0];
            match node.machine.handle_frame(lane.from, &flight.header) {
                Verdict::Later | Verdict::Early => return,
                Verdict::Drop => {}
                Verdict::Take(take) => {
                    if !self.takes_step(peer) {
                        return;
                    }
                    let node = &mut self.nodes[peer.index()];
                    let flight = &self.flights[id.0];
                    let from = node.machine.engine().rank_of(lane.comm, lane.from);
                    let effect = take.effect;
                    let body = flight.body.as_deref().unwrap_or_default();
                    if let Some(job) = node.machine.handle_taken(take, body) {
                        job.took(from, &effect, flight.depth);
                    }
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

    fn happened(&mut self, peer: Peer, event: MachineEvent<Vec<u8>, CodedCollective, Job>) {
        match event {
            MachineEvent::CommFailed { .. } => {}
            MachineEvent::WantsCoding(op) if self.coders.contains_key(&(peer, op)) => {
                self.coders.entry((peer, op)).and_modify(Coder::wanted);
                self.model(peer, op);
            }
            MachineEvent::WantsCoding(op) => {
                let at = self.now + self.coding_time();
                self.push(at, Happening::Code(peer, op));
            }
            MachineEvent::Ended { tag: job, end } => {
                let (id, op) = (job.id, job.op);
                let end = match end {
                    Ok(memory) => JobEnd::Done(job.result(memory)),
                    Err((failure, input)) => {
                        JobEnd::Failed { error: failure.error, input: given_back(input) }
                    }
                };
                let done = matches!(end, JobEnd::Done(_));
                match op.filter(|op| done && self.coders.contains_key(&(peer, *op))) {
                    // Its frames have arrived, but the last of them are still to be decoded.
                    Some(op) => {
                        self.coders
                            .entry((peer, op))
                            .and_modify(|coder| coder.ended = Some((id, end)));
                        self.model(peer, op);
                    }
                    None => self.end(id, end),
                }
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

    // --- trouble ---

    /// Schedules what processes will notice of the troubles whose time is known.
    fn foresee_troubles(&mut self) {
        let detection = self.network.detection;
        for trouble in self.network.troubles.clone() {
            match trouble {
                Trouble::Crash { .. } | Trouble::Nonsense { .. } => {}
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

    /// When a frame due at `arrival` really arrives, given the partitions in its way.
    fn after_partitions(&self, from: Peer, to: Peer, arrival: Time) -> Time {
        let latency = self.network.link(from, to).latency;
        self.network.troubles.iter().fold(arrival, |arrival, trouble| match trouble {
            Trouble::Partition { side, from: begin, until }
                if side.contains(&from) != side.contains(&to)
                    && (*begin..*until).contains(&arrival) =>
            {
                *until + latency
            }
            _ => arrival,
        })
    }
}

/// The input of an operation that has failed; what is left of it, if the operation worked in place.
fn given_back(input: Input<Vec<u8>, CodedCollective>) -> Vec<u8> {
    match input {
        Input::Buffer(memory) => memory,
        Input::Rounds(exchange) => exchange.abandon().input.into_bytes(),
        Input::Parcel(_) | Input::Nothing | Input::Lengths(_) => Vec::new(),
    }
}
