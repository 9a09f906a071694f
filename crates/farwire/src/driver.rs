//! Runs the engine over links: the one place where decisions meet bytes.

use std::collections::{HashMap, HashSet, VecDeque};
use std::num::NonZeroUsize;
use std::sync::Arc;
use std::time::{Duration, Instant};

use farwire_proto::{
    Call, CommId, Engine, Event, HEADER_LEN, Header, Lane, OpId, OpenError, Options, Outcome, Payload, Peer,
    Plan, Rank, Time, Transmit, Verdict, Workspace, WorldSize,
};

use crate::buffer::{Buffer, Pool};
use crate::error::Error;
use crate::link::{Arrival, Link};
use crate::pending::Completion;

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
    /// News of failures that found no room.
    held_aborts: VecDeque<Transmit>,
    /// Bytes that a frame's payload may have.
    longest: usize,
    pool: Pool,
    traffic: Traffic,
    /// When time zero was.
    origin: Instant,
}

/// What went out, counted where it is handed to the links.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    /// Frames sent.
    pub frames: u64,
    /// Bytes sent, headers included.
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
    work: Workspace,
    input: Buffer,
    output: Buffer,
    outcome: Outcome,
    completion: Arc<Completion>,
}

impl Driver {
    /// A driver for links whose frames carry up to `longest` bytes.
    pub(crate) fn new(engine: Engine, links: Vec<Option<Box<dyn Link>>>, longest: usize) -> Self {
        Self {
            engine,
            longest,
            links,
            jobs: HashMap::new(),
            closed: HashSet::new(),
            held: HashMap::new(),
            held_aborts: VecDeque::new(),
            pool: Pool::default(),
            traffic: Traffic::default(),
            origin: Instant::now(),
        }
    }

    pub(crate) fn open(&mut self, comm: CommId, members: &[Peer]) -> Result<(), OpenError> {
        self.engine.open(comm, members)
    }

    pub(crate) fn place(&self, comm: CommId) -> Result<(Rank, WorldSize), Error> {
        Ok(self.engine.place(comm)?)
    }

    pub(crate) fn traffic(&self) -> Traffic {
        self.traffic
    }

    /// Whether there is anything to wait for.
    pub(crate) fn is_idle(&self) -> bool {
        self.jobs.is_empty() && self.held_aborts.is_empty()
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
        let plan: Plan = self.engine.plan(comm, call, &options)?;
        plan.check_buffers(input.bytes().len(), plan.output_bytes())?;
        let mut work = Workspace::new(&plan);
        let mut output = self.pool.take(plan.dtype(), plan.output_bytes() / plan.dtype().size());
        work.begin(input.bytes(), output.bytes_mut());
        let outcome = plan.outcome();
        match self.engine.submit(self.now(), plan) {
            Ok(op) => {
                self.jobs.insert(op, Job { work, input, output, outcome, completion });
            }
            Err(source) => return Err(Error::Failed { source, input: Some(input) }),
        }
        self.settle();
        Ok(())
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
        if moved || !self.held_aborts.is_empty() {
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
                Ok(Some(Arrival::Abort(header, fault))) => self.abort(peer, &header, &fault),
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
        self.held_aborts.retain(|abort| abort.to != peer);
        self.engine.handle_peer_lost(peer);
    }

    fn abort(&mut self, from: Peer, header: &Header, fault: &[u8]) {
        if let Err(error) = self.engine.handle_abort(from, header, fault) {
            tracing::warn!(%from, %error, "ignoring news of a failure that makes no sense");
        }
    }

    /// Offers the engine what is at the head of a lane, for as long as it takes it.
    fn offer(&mut self, lane: Lane) {
        let Some(link) = &mut self.links[lane.from.index()] else { return };
        let mut read = false;
        while let Some((header, payload)) = link.head(&lane) {
            match self.engine.handle_frame(lane.from, &header) {
                Verdict::Later => break,
                Verdict::Drop => {}
                Verdict::Take(take) => {
                    if let Some(job) = self.jobs.get_mut(&take.op) {
                        job.work.apply(&take.action, payload, job.input.bytes(), job.output.bytes_mut());
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
        for _ in 0..self.held_aborts.len() {
            if let Some(abort) = self.held_aborts.pop_front() {
                self.send(abort);
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
                return;
            }
        }
    }

    fn send(&mut self, transmit: Transmit) {
        let (to, header) = (transmit.to, transmit.header);
        let Some(link) = &mut self.links[to.index()] else { return };
        match &transmit.payload {
            Payload::Fault(fault) => {
                if link.send(None, &header, fault, true) {
                    link.ring();
                } else {
                    self.held_aborts.push_back(transmit);
                }
            }
            Payload::Operation { op, source, .. } => {
                let lane = Lane::of(self.engine.me(), &header);
                // A lane keeps its order: behind a frame that waits, all wait.
                if let Some(held) = self.held.get_mut(&(to, lane)) {
                    return held.push_back(transmit);
                }
                let Some(job) = self.jobs.get_mut(op) else { return };
                let payload = job.work.payload(source, job.input.bytes(), job.output.bytes());
                if link.send(Some(lane), &header, payload, transmit.last) {
                    self.traffic.count(payload.len());
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
        let (op, result) = match event {
            Event::CommFailed { comm, fault, reporter } => {
                return tracing::warn!(?comm, %fault, %reporter, "a communicator has failed");
            }
            Event::Done(op) => (op, Ok(())),
            Event::Failed(op, error) => (op, Err(error)),
        };
        let Some(Job { input, output, outcome, completion, .. }) = self.jobs.remove(&op) else { return };
        completion.complete(match result {
            Err(source) => {
                self.pool.give(output);
                Err(Error::Failed { source, input: Some(input) })
            }
            Ok(()) => {
                let (result, spare) = match outcome {
                    Outcome::Output => (output, input),
                    Outcome::Input => (input, output),
                    Outcome::Nothing => {
                        self.pool.give(output);
                        (Buffer::U8(Vec::new()), input)
                    }
                };
                self.pool.give(spare);
                Ok(result)
            }
        });
    }
}
