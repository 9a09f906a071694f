//! Runs the engine over links: the one place where decisions meet bytes.

mod coded;

use std::collections::VecDeque;
use std::num::NonZeroUsize;
use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::task::Waker;
use std::time::{Duration, Instant};

use farwire_proto::{
    Action, Call, CommId, Engine, Event, FrameKind, HEADER_LEN, Header, Lane, OpId, OpenError, Options,
    Outcome, Parcels, Payload, Peer, Plan, Rank, Source, Time, Transmit, Verdict, Workspace, WorldSize,
};
use rustc_hash::{FxHashMap as HashMap, FxHashSet as HashSet};

use crate::buffer::Pool;
use crate::error::Error;
use crate::link::{Arrival, Link};
use crate::memory::Buffer;
use crate::observe::Observer;
use crate::observe::flight::{Flight, Ticket};
use crate::pending::Completion;
use coded::CodedJob;
pub(crate) use coded::Coding;

/// Bytes of the widest element.
const WIDEST: usize = 8;

/// Everything that moves, behind one lock.
#[derive(Debug)]
pub(crate) struct Driver {
    engine: Engine,
    /// By peer; none to oneself.
    links: Vec<Option<Box<dyn Link>>>,
    jobs: HashMap<OpId, Job>,
    /// Peers that have said goodbye. What they sent is still being read.
    closed: HashSet<Peer>,
    /// Frames whose lane is full, by receiver and lane.
    held: HashMap<(Peer, Lane), VecDeque<Transmit>>,
    /// Notices that found no room.
    held_notices: VecDeque<Transmit>,
    /// Bytes that a frame's payload may have.
    longest: usize,
    pool: Pool,
    /// By peer.
    sent: Vec<Traffic>,
    received: Vec<Traffic>,
    observer: Observer,
    afterwards: Afterwards,
    /// Told of operations that want coding; absent until there is one.
    coder: Option<Sender<OpId>>,
    /// How often it was told and has not yet done what it was told to.
    told: usize,
    /// Operations that want coding, and are too short for that thread.
    short: VecDeque<OpId>,
    /// When time zero was.
    origin: Instant,
}

/// What is to be done once the driver's lock is free: wakers run foreign code, and files are slow.
#[derive(Debug, Default)]
pub(crate) struct Afterwards {
    pub(crate) wake: Vec<Waker>,
    /// Results in memory that others own, whose code runs when nobody wants the result.
    pub(crate) foreign: Vec<Arc<Completion>>,
    /// A communicator has failed, for this reason.
    pub(crate) failure: Option<Box<Flight>>,
}

impl Afterwards {
    pub(crate) fn is_nothing(&self) -> bool {
        self.wake.is_empty() && self.foreign.is_empty() && self.failure.is_none()
    }
}

/// What went one way, counted where it is handed to the links.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    /// Frames.
    pub frames: u64,
    /// Bytes, headers included.
    pub bytes: u64,
}

impl Traffic {
    fn count(&mut self, payload: usize) {
        self.frames += 1;
        self.bytes += (HEADER_LEN + payload) as u64;
    }
}

/// An operation's memory, and who waits for it.
#[derive(Debug)]
struct Job {
    work: Work,
    completion: Arc<Completion>,
    ticket: Ticket,
    span: tracing::Span,
}

#[derive(Debug)]
enum Work {
    /// Frames were laid out beforehand.
    Laid { work: Workspace, input: Buffer, output: Buffer, outcome: Outcome },
    /// The same, with input and output in one memory.
    InPlace { work: Workspace, memory: Buffer },
    /// A message in one parcel. It comes from this rank if there is one.
    Parcel { parcels: Parcels, from: Option<Rank> },
    /// Rounds of parcels that a codec makes.
    Coded(CodedJob),
}

impl Work {
    /// What a frame carries.
    fn payload(&mut self, source: &Source) -> &[u8] {
        match (self, source) {
            (Self::Laid { work, input, output, .. }, source) => {
                work.payload(source, input.bytes(), output.bytes())
            }
            (Self::InPlace { work, memory }, source) => work.payload_in_place(source, memory.bytes()),
            (Self::Parcel { parcels, .. } | Self::Coded(CodedJob { parcels, .. }), Source::Parcel(part)) => {
                parcels.payload(part)
            }
            (Self::Parcel { .. } | Self::Coded(_), _) => unreachable!("parcels come in parts"),
        }
    }

    /// Puts a payload where it belongs.
    fn apply(&mut self, action: &Action, payload: &[u8]) {
        match (self, action) {
            (Self::Laid { work, input, output, .. }, action) => {
                work.apply(action, payload, input.bytes(), output.bytes_mut());
            }
            (Self::InPlace { work, memory }, action) => {
                work.apply_in_place(action, payload, memory.bytes_mut());
            }
            (Self::Parcel { parcels, .. } | Self::Coded(CodedJob { parcels, .. }), Action::Collect(part)) => {
                parcels.collect(part, payload)
            }
            (Self::Parcel { .. } | Self::Coded(_), _) => unreachable!("parcels come in parts"),
        }
    }

    /// What the caller gave, if that is a vector.
    fn into_input(self) -> Option<Buffer> {
        match self {
            Self::Laid { input, .. } | Self::InPlace { memory: input, .. } => Some(input),
            Self::Parcel { .. } => None,
            Self::Coded(job) => job.exchange.map(|exchange| exchange.abandon().into()),
        }
    }

    /// The parcels, of those who have them.
    fn parcels(&mut self) -> Option<&mut Parcels> {
        match self {
            Self::Laid { .. } | Self::InPlace { .. } => None,
            Self::Parcel { parcels, .. } | Self::Coded(CodedJob { parcels, .. }) => Some(parcels),
        }
    }
}

impl Driver {
    /// A driver for links whose frames carry up to `longest` bytes.
    pub(crate) fn new(
        engine: Engine,
        links: Vec<Option<Box<dyn Link>>>,
        longest: usize,
        observer: Observer,
    ) -> Self {
        Self {
            engine,
            longest,
            sent: vec![Traffic::default(); links.len()],
            received: vec![Traffic::default(); links.len()],
            observer,
            afterwards: Afterwards::default(),
            coder: None,
            told: 0,
            short: VecDeque::new(),
            links,
            jobs: HashMap::default(),
            closed: HashSet::default(),
            held: HashMap::default(),
            held_notices: VecDeque::new(),
            pool: Pool::default(),
            origin: Instant::now(),
        }
    }

    pub(crate) fn open(&mut self, comm: CommId, members: &[Peer]) -> Result<(), OpenError> {
        self.engine.open(comm, members)
    }

    pub(crate) fn place(&self, comm: CommId) -> Result<(Rank, WorldSize), Error> {
        Ok(self.engine.place(comm)?)
    }

    pub(crate) fn close_comm(&mut self, comm: CommId) {
        self.engine.close(comm);
        self.settle();
    }

    /// The number of the next collective on a communicator.
    pub(crate) fn next_collective(&self, comm: CommId) -> u64 {
        self.engine.next_collective(comm).unwrap_or(0)
    }

    /// What was sent, to all peers.
    pub(crate) fn traffic(&self) -> Traffic {
        self.sent.iter().fold(Traffic::default(), |sum, peer| Traffic {
            frames: sum.frames + peer.frames,
            bytes: sum.bytes + peer.bytes,
        })
    }

    /// What was sent and received, by peer, and what carries it: nothing to oneself and to those that are lost.
    pub(crate) fn traffic_by_peer(&self) -> impl Iterator<Item = (Traffic, Traffic, Option<&'static str>)> {
        let links = self.links.iter().map(|link| link.as_ref().map(|link| link.kind()));
        self.sent
            .iter()
            .zip(&self.received)
            .zip(links)
            .map(|((sent, received), link)| (*sent, *received, link))
    }

    pub(crate) fn observer(&self) -> &Observer {
        &self.observer
    }

    /// The last operations, and who those in flight wait for.
    pub(crate) fn flight(&self, reason: &str) -> Flight {
        let links = self.traffic_by_peer().map(|(.., link)| link);
        self.observer.recorder.flight(reason, links, &self.engine.waits())
    }

    /// What is to be done now that the lock is free; once.
    pub(crate) fn take_afterwards(&mut self) -> Option<Afterwards> {
        (!self.afterwards.is_nothing()).then(|| std::mem::take(&mut self.afterwards))
    }

    /// Operations that have begun and not ended.
    pub(crate) fn in_flight(&self) -> usize {
        self.jobs.len()
    }

    /// Whether there is anything to wait for.
    pub(crate) fn is_idle(&self) -> bool {
        self.jobs.is_empty() && self.held_notices.is_empty()
    }

    /// Starts an operation and sends what can be sent.
    pub(crate) fn submit(
        &mut self,
        comm: CommId,
        call: &Call,
        options: &Options,
        input: Buffer,
        completion: Arc<Completion>,
    ) -> Result<(), Error> {
        // Frames must fit the links, which are the same on all ranks; a longer segment than that is cut down on all of them alike.
        let fits = NonZeroUsize::new(self.longest / WIDEST).unwrap_or(NonZeroUsize::MIN);
        let options = Options { segment: options.segment.map(|segment| segment.min(fits)), ..*options };
        let given = input.bytes().len();
        let checked = self.engine.plan(comm, call, &options).and_then(|plan| {
            match plan.in_place() {
                Some(_) => plan.check_memory(given)?,
                None => plan.check_buffers(given, plan.output_bytes())?,
            }
            Ok(plan)
        });
        let plan = match checked {
            Ok(plan) => plan,
            Err(error) => return Err(Error::Call { error, input: Some(Box::new(input)) }),
        };
        let mut work = Workspace::new(&plan);
        let work = if plan.in_place().is_some() {
            Work::InPlace { work, memory: input }
        } else {
            let mut output = self.pool.take(plan.dtype(), plan.output_bytes() / plan.dtype().size());
            work.begin(input.bytes(), output.bytes_mut());
            Work::Laid { work, input, output, outcome: plan.outcome() }
        };
        self.start(plan, work, completion)?;
        self.settle();
        Ok(())
    }

    /// Starts to send a parcel.
    pub(crate) fn send_parcel(
        &mut self,
        comm: CommId,
        to: Rank,
        call: &Call,
        parcel: Vec<u8>,
        completion: Arc<Completion>,
    ) -> Result<(), Error> {
        let plan = self.engine.plan(comm, call, &Options::default())?;
        let len = parcel.len();
        let mut parcels = Parcels::default();
        parcels.put(to, 0, parcel.into());
        let op = self.start(plan, Work::Parcel { parcels, from: None }, completion)?;
        self.engine.supply(op, to, len);
        self.settle();
        Ok(())
    }

    /// Starts to wait for a parcel.
    pub(crate) fn recv_parcel(
        &mut self,
        comm: CommId,
        from: Rank,
        call: &Call,
        options: &Options,
        completion: Arc<Completion>,
    ) -> Result<(), Error> {
        let plan = self.engine.plan(comm, call, options)?;
        self.start(plan, Work::Parcel { parcels: Parcels::default(), from: Some(from) }, completion)?;
        self.settle();
        Ok(())
    }

    fn start(&mut self, plan: Plan, work: Work, completion: Arc<Completion>) -> Result<OpId, Error> {
        let (comm, call) = (plan.comm(), plan.fingerprint());
        let seq = self.engine.next_seq(&plan);
        let endless = plan.is_endless();
        match self.engine.submit(self.now(), plan) {
            Ok(op) => {
                let seq = seq.expect("it was submitted on an open communicator");
                // A receive that may wait for ever is not something that happens.
                let ticket = if endless { Ticket::NONE } else { self.observer.began(op, comm, seq, call) };
                let span = self.observer.span(comm, seq, call);
                self.jobs.insert(op, Job { work, completion, ticket, span });
                Ok(op)
            }
            Err(error) => Err(Error::Failed { error, members: None, input: work.into_input().map(Box::new) }),
        }
    }

    /// Moves everything that can move; `true` if anything did.
    pub(crate) fn turn(&mut self) -> bool {
        let mut moved = false;
        for index in 0..self.links.len() {
            moved |= self.turn_link(Peer(index as u32));
        }
        let now = self.now();
        if self.engine.poll_timeout().is_some_and(|due| due <= now) {
            self.engine.handle_timeout(now);
            moved = true;
        }
        if moved || !self.held_notices.is_empty() {
            self.settle();
        }
        moved | self.lose_closed_peers()
    }

    /// Gives up peers that have said goodbye and are still needed.
    fn lose_closed_peers(&mut self) -> bool {
        let needed = |peer: &&Peer| self.engine.awaits(**peer) || self.held.keys().any(|(to, _)| to == *peer);
        let Some(peer) = self.closed.iter().find(needed).copied() else { return false };
        self.closed.remove(&peer);
        self.lose(peer);
        self.settle();
        true
    }

    /// How long nothing needs to be done unless a frame arrives.
    pub(crate) fn patience(&self) -> Duration {
        let due = self.engine.poll_timeout().unwrap_or(Time::MAX);
        due.0.saturating_sub(self.now().0)
    }

    /// Says goodbye to all peers.
    pub(crate) fn close(&mut self) {
        self.observer.flush();
        for link in self.links.iter_mut().flatten() {
            link.close();
            link.ring();
        }
    }

    fn now(&self) -> Time {
        Time(self.origin.elapsed())
    }

    fn turn_link(&mut self, peer: Peer) -> bool {
        let mut moved = false;
        loop {
            let Some(link) = &mut self.links[peer.index()] else { return moved };
            match link.poll_arrived() {
                Ok(None) => break,
                Ok(Some(Arrival::Frame(lane))) => self.offer(lane),
                Ok(Some(Arrival::Notice(header, payload))) => self.notice(peer, &header, &payload),
                Ok(Some(Arrival::Closed)) => {
                    self.closed.insert(peer);
                }
                Err(broken) => {
                    tracing::error!(%peer, %broken, "dropping a link");
                    self.lose(peer);
                }
            }
            moved = true;
        }
        loop {
            let Some(link) = &mut self.links[peer.index()] else { return moved };
            match link.poll_writable() {
                Ok(None) => return moved,
                Ok(Some(lane)) => self.send_held(peer, lane),
                Err(broken) => {
                    tracing::error!(%peer, %broken, "dropping a link");
                    self.lose(peer);
                }
            }
            moved = true;
        }
    }

    fn lose(&mut self, peer: Peer) {
        if let Some(mut link) = self.links[peer.index()].take() {
            link.close();
        }
        self.held.retain(|(to, _), _| *to != peer);
        self.held_notices.retain(|notice| notice.to != peer);
        self.engine.handle_peer_lost(peer);
    }

    fn notice(&mut self, from: Peer, header: &Header, payload: &[u8]) {
        if let Err(error) = self.engine.handle_notice(from, header, payload) {
            tracing::warn!(%from, %error, "ignoring a notice that makes no sense");
        }
    }

    /// Offers the engine what is at the head of a lane, for as long as it takes it.
    fn offer(&mut self, lane: Lane) {
        let Some(link) = &mut self.links[lane.from.index()] else { return };
        let mut read = false;
        while let Some((header, payload)) = link.head(&lane) {
            match self.engine.handle_frame(lane.from, &header) {
                Verdict::Later => break,
                Verdict::Early => {
                    read |= link.set_aside(&lane);
                    break;
                }
                Verdict::Drop => {}
                Verdict::Take(take) => {
                    if let Some(job) = self.jobs.get_mut(&take.op) {
                        job.work.apply(&take.action, payload);
                        self.received[lane.from.index()].count(payload.len());
                        self.observer.recorder.received(job.ticket, payload.len());
                    }
                    self.engine.handle_taken(take);
                }
            }
            link.pop(&lane);
            read = true;
        }
        if read {
            link.ring(); // its sender may wait for room
        }
    }

    /// Does all that the engine asks for.
    fn settle(&mut self) {
        for _ in 0..self.held_notices.len() {
            if let Some(notice) = self.held_notices.pop_front() {
                self.send(notice);
            }
        }
        loop {
            if let Some(lane) = self.engine.poll_resume() {
                self.offer(lane);
            } else if let Some(transmit) = self.engine.poll_transmit() {
                self.send(transmit);
            } else if let Some(event) = self.engine.poll_event() {
                self.finish(event);
            } else {
                break;
            }
        }
        if let Some(reason) = self.observer.take_failure() {
            self.afterwards.failure = Some(Box::new(self.flight(&reason)));
        }
    }

    fn send(&mut self, transmit: Transmit) {
        let (to, header) = (transmit.to, transmit.header);
        let Some(link) = &mut self.links[to.index()] else { return };
        match &transmit.payload {
            payload @ (Payload::Fault(_) | Payload::Nothing) => {
                let given_up = match header.frame {
                    FrameKind::Abort => Some(None),
                    FrameKind::Void => Some(Some(header.seq)),
                    _ => None,
                };
                if let Some(seq) = given_up {
                    link.abandon(header.comm, seq);
                    self.held.retain(|(peer, lane), _| {
                        *peer != to || lane.comm != header.comm || seq.is_some_and(|seq| seq != lane.seq)
                    });
                }
                if link.send(None, &header, payload.notice().unwrap_or_default(), true) {
                    link.ring();
                } else {
                    self.held_notices.push_back(transmit);
                }
            }
            Payload::Operation { op, source, .. } => {
                let lane = Lane::of(self.engine.me(), &header);
                // A lane keeps its order: behind a frame that waits, all wait.
                if let Some(held) = self.held.get_mut(&(to, lane)) {
                    return held.push_back(transmit);
                }
                let Some(job) = self.jobs.get_mut(op) else { return };
                let payload = job.work.payload(source);
                if link.send(Some(lane), &header, payload, transmit.last) {
                    self.sent[to.index()].count(payload.len());
                    self.observer.recorder.sent(job.ticket, payload.len());
                    if let (Some(parcels), Source::Parcel(part)) = (job.work.parcels(), source) {
                        parcels.sent(part);
                    }
                    link.ring();
                    self.engine.handle_sent(transmit);
                } else {
                    self.held.entry((to, lane)).or_default().push_back(transmit);
                }
            }
        }
    }

    /// Tries the frames of a lane that was full.
    fn send_held(&mut self, to: Peer, lane: Lane) {
        for transmit in self.held.remove(&(to, lane)).unwrap_or_default() {
            self.send(transmit);
        }
    }

    fn finish(&mut self, event: Event) {
        let (op, ended) = match event {
            Event::CommFailed { comm, fault, reporter } => {
                tracing::warn!(?comm, %fault, %reporter, "a communicator has failed");
                self.observer.failed(fault);
                return;
            }
            Event::Round(op, round) => {
                if let Some(Job { work: Work::Coded(job), .. }) = self.jobs.get_mut(&op) {
                    job.came.push_back(round);
                    self.wants_coding(op);
                }
                return;
            }
            Event::Done(op) => (op, Ok(())),
            Event::Failed { op, error, waited_for } => (op, Err((error, waited_for))),
        };
        if let Some(Job { work: Work::Coded(job), .. }) = self.jobs.get_mut(&op) {
            let failed = ended.is_err();
            job.ended = Some(ended);
            return if failed { self.fail_coded(op) } else { self.wants_coding(op) };
        }
        let Some(Job { work, completion, ticket, span }) = self.jobs.remove(&op) else { return };
        self.observer.ended(ticket, &span, &ended);
        let foreign = matches!(&work, Work::InPlace { memory, .. } if memory.is_foreign());
        let result = match (ended, work) {
            (_, Work::Coded(_)) => unreachable!("those end on the coding thread"),
            (Err((error, _)), Work::Laid { input, output, .. }) => {
                self.pool.give(output);
                Err(Error::Failed { error, members: None, input: Some(Box::new(input)) })
            }
            (Err((error, _)), work) => {
                Err(Error::Failed { error, members: None, input: work.into_input().map(Box::new) })
            }
            (Ok(()), Work::Laid { input, output, outcome, .. }) => {
                let (result, spare) = match outcome {
                    Outcome::Output => (output, input),
                    Outcome::Input => (input, output),
                    Outcome::Nothing => {
                        self.pool.give(output);
                        (Vec::<u8>::new().into(), input)
                    }
                };
                self.pool.give(spare);
                Ok(result)
            }
            (Ok(()), Work::InPlace { memory, .. }) => Ok(memory),
            (Ok(()), Work::Parcel { mut parcels, from }) => {
                Ok(from.map_or_else(Vec::new, |from| parcels.take(from, 0)).into())
            }
        };
        self.afterwards.wake.extend(completion.complete(result));
        if foreign {
            self.afterwards.foreign.push(completion);
        }
    }
}
