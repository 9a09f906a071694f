//! Runs a [`Machine`] over links: carries its frames, and notifies waiting callers.

pub(crate) mod members;

use std::any::Any;
use std::collections::VecDeque;
use std::num::NonZeroUsize;
use std::ops::{Deref, DerefMut};
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::Waker;
use std::time::{Duration, Instant};

use bytes::Bytes;
use farwire_codec::collective::{Abandoned, CodedCollective};
use farwire_proto::team::Teamed;
use farwire_proto::{
    Buffers, Call, Coding, CommId, DType, Engine, Fault, FrameKind, HEADER_LEN, Header, Input,
    Lane, Machine, MachineEvent, Nonsense, OpId, OpenError, Options, Peer, Placement, Plan, Rank,
    Refusal, Refused, Team, Time, Transmit, Verdict, WorldSize,
};
use rustc_hash::FxHashSet as HashSet;

use crate::buffer::Pool;
use crate::completion::Completion;
use crate::error::Error;
use crate::link::{Arrival, Link, Loss, NetworkPath};
use crate::memory::Buffer;
use crate::observe::Observer;
use crate::observe::flight::{Flight, Ticket};
use members::Members;

/// Bytes of the widest element.
const WIDEST: usize = 8;

/// A machine, the links that it uses, and everything else that serves its operations.
#[derive(Debug)]
pub(crate) struct Driver {
    machine: Machine<Pool, CodedCollective, Job>,
    /// By peer; `None` for this process and for lost peers.
    links: Vec<Option<Box<dyn Link>>>,
    /// Whether any of the links crosses a network.
    has_network: bool,
    /// Peers that have said goodbye. What they sent is still being read.
    closed: HashSet<Peer>,
    /// The most bytes that a frame's payload may have.
    longest: usize,
    /// By peer.
    sent: Vec<Traffic>,
    received: Vec<Traffic>,
    observer: Observer,
    afterwards: Afterwards,
    /// Takes jobs to the coding thread; `None` until that runs.
    coder: Option<Sender<OpId>>,
    /// Jobs queued for the coding thread.
    queued: usize,
    /// Operations that want coding, but are too short to be worth waking that thread.
    short: VecDeque<OpId>,
    /// Who is in the group, unless it is too large to change.
    members: Option<Members>,
    /// The time that the machine counts from.
    origin: Instant,
    /// The threads that help to move bytes.
    team: Teamed,
    /// Whether links may have something for their peers that the peers have not been told of yet.
    unrung: bool,
}

/// The driver, behind its lock.
#[derive(Debug)]
pub(crate) struct SharedDriver(Mutex<Driver>);

impl SharedDriver {
    pub(crate) fn new(driver: Driver) -> Self {
        Self(Mutex::new(driver))
    }

    pub(crate) fn lock(&self) -> DriverGuard<'_> {
        DriverGuard { driver: Some(self.0.lock().unwrap_or_else(PoisonError::into_inner)) }
    }
}

/// The driver, locked. Dropping this frees the lock, and then does what the driver wants done
/// without it.
pub(crate) struct DriverGuard<'a> {
    /// `Some` until this is dropped.
    driver: Option<MutexGuard<'a, Driver>>,
}

impl Deref for DriverGuard<'_> {
    type Target = Driver;

    fn deref(&self) -> &Driver {
        self.driver.as_ref().expect("it has not been dropped")
    }
}

impl DerefMut for DriverGuard<'_> {
    fn deref_mut(&mut self) -> &mut Driver {
        self.driver.as_mut().expect("it has not been dropped")
    }
}

impl Drop for DriverGuard<'_> {
    fn drop(&mut self) {
        let afterwards = self.driver.take().and_then(|mut driver| {
            driver.ring();
            driver.take_afterwards()
        });
        if let Some(Afterwards { wake, foreign, owners, failure }) = afterwards {
            wake.into_iter().for_each(Waker::wake);
            drop((foreign, owners));
            if let Some(flight) = failure {
                flight.save();
            }
        }
    }
}

/// What is to be done once the driver's lock is free: wakers run foreign code, and files are slow.
#[derive(Debug, Default)]
pub(crate) struct Afterwards {
    pub(crate) wake: Vec<Waker>,
    /// Results in memory that others own. Where nobody wants the result, dropping it runs their
    /// code.
    pub(crate) foreign: Vec<Arc<Completion>>,
    /// Owners of memory elsewhere, whose operations have failed.
    pub(crate) owners: Vec<Box<dyn Any + Send>>,
    /// The record to save because a communicator has failed.
    pub(crate) failure: Option<Box<Flight>>,
}

impl Afterwards {
    pub(crate) fn is_nothing(&self) -> bool {
        self.wake.is_empty()
            && self.foreign.is_empty()
            && self.owners.is_empty()
            && self.failure.is_none()
    }
}

/// What went one way, counted between the machine and the links.
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

/// Who waits for an operation, and what is recorded about it.
#[derive(Debug)]
pub(crate) struct Job {
    pub(crate) completion: Arc<Completion>,
    ticket: Ticket,
    span: tracing::Span,
    /// Whether the coding thread codes for it, rather than a thread that waits.
    long: bool,
}

impl Driver {
    /// A driver for links whose frames carry up to `longest` bytes.
    pub(crate) fn new(
        engine: Engine,
        links: Vec<Option<Box<dyn Link>>>,
        longest: usize,
        observer: Observer,
        members: Option<Members>,
    ) -> Self {
        let mut machine = Machine::new(engine, Pool::default());
        for (peer, link) in (0..).map(Peer).zip(&links) {
            if link.as_ref().is_some_and(|link| link.is_near()) {
                machine.set_neighbour(peer);
            }
        }
        Self {
            members,
            machine,
            longest,
            sent: vec![Traffic::default(); links.len()],
            received: vec![Traffic::default(); links.len()],
            observer,
            afterwards: Afterwards::default(),
            coder: None,
            queued: 0,
            short: VecDeque::new(),
            has_network: links.iter().flatten().any(|link| link.crosses_network()),
            links,
            closed: HashSet::default(),
            origin: Instant::now(),
            team: None,
            unrung: false,
        }
    }

    /// Lets these threads help to move and to combine bytes.
    pub(crate) fn set_team(&mut self, team: &'static dyn Team) {
        self.team = Some(team);
        self.machine.set_team(team);
        self.links.iter_mut().flatten().for_each(|link| link.set_team(team));
    }

    pub(crate) fn open(&mut self, comm: CommId, members: &[Peer]) -> Result<(), OpenError> {
        self.machine.open(comm, members)
    }

    pub(crate) fn place(&self, comm: CommId) -> Result<(Rank, WorldSize), Error> {
        Ok(self.machine.engine().place(comm)?)
    }

    pub(crate) fn close_comm(&mut self, comm: CommId) {
        self.machine.close(comm);
        self.settle();
    }

    /// This process.
    pub(crate) fn me(&self) -> Peer {
        self.machine.engine().me()
    }

    /// How long an operation may take, unless its options say otherwise.
    pub(crate) fn deadline(&self) -> Duration {
        self.machine.engine().deadline()
    }

    /// The number of the next collective on a communicator.
    pub(crate) fn next_collective(&self, comm: CommId) -> u64 {
        self.machine.engine().next_collective(comm).unwrap_or(0)
    }

    /// What was sent, to all peers.
    pub(crate) fn traffic(&self) -> Traffic {
        self.sent.iter().fold(Traffic::default(), |sum, peer| Traffic {
            frames: sum.frames + peer.frames,
            bytes: sum.bytes + peer.bytes,
        })
    }

    /// What was sent to a peer.
    pub(crate) fn traffic_to(&self, peer: Peer) -> Option<Traffic> {
        self.sent.get(peer.index()).copied()
    }

    /// Where the ranks of a communicator are.
    pub(crate) fn placement(&self, comm: CommId) -> Result<Placement, Error> {
        Ok(self.machine.engine().placement(comm)?.clone())
    }

    /// Where these ranks are, if an all-reduce depends on it.
    pub(crate) fn split_placement(&self, comm: CommId) -> Option<Placement> {
        self.machine.engine().split_placement(comm).cloned()
    }

    /// Whether anything arrives over a network, rather than from ranks of this host.
    pub(crate) fn has_network(&self) -> bool {
        self.has_network
    }

    /// What was sent and received, by peer, and the kind of link that carries it: `None` for this
    /// process and for lost peers.
    pub(crate) fn traffic_by_peer(
        &self,
    ) -> impl Iterator<Item = (Traffic, Traffic, Option<&'static str>)> {
        let links = self.links.iter().map(|link| link.as_ref().map(|link| link.kind()));
        self.sent
            .iter()
            .zip(&self.received)
            .zip(links)
            .map(|((sent, received), link)| (*sent, *received, link))
    }

    /// The network to a peer, if a link there crosses one.
    pub(crate) fn path(&self, peer: Peer) -> Option<NetworkPath> {
        self.links.get(peer.index())?.as_ref()?.path()
    }

    pub(crate) fn observer(&self) -> &Observer {
        &self.observer
    }

    /// The last operations, and which ranks those in flight wait for.
    pub(crate) fn flight(&self, reason: &str) -> Flight {
        let links = self.traffic_by_peer().map(|(.., link)| link);
        self.observer.recorder.flight(reason, links, &self.machine.engine().waits())
    }

    /// Takes what is to be done once the lock is free.
    pub(crate) fn take_afterwards(&mut self) -> Option<Afterwards> {
        (!self.afterwards.is_nothing()).then(|| std::mem::take(&mut self.afterwards))
    }

    /// Operations that have begun and not ended.
    pub(crate) fn in_flight(&self) -> usize {
        self.machine.in_flight()
    }

    /// Whether there is anything to wait for.
    pub(crate) fn is_idle(&self) -> bool {
        self.machine.is_idle() && self.members.as_ref().is_none_or(Members::is_idle)
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
        // Frames must fit the links. The limit is the same on all ranks, so all cut a longer
        // segment down alike.
        let fits = NonZeroUsize::new(self.longest / WIDEST).unwrap_or(NonZeroUsize::MIN);
        let options =
            Options { segment: options.segment.map(|segment| segment.min(fits)), ..*options };
        let plan = self.machine.plan(comm, call, &options);
        match plan.and_then(|plan| plan.check_elements(input.dtype()).map(|()| plan)) {
            Ok(plan) => self.start(plan, Input::Buffer(input), completion, false),
            Err(error) => Err(Error::Call { error, input: Some(Box::new(input)) }),
        }
    }

    /// Starts to send a parcel.
    pub(crate) fn send_parcel(
        &mut self,
        comm: CommId,
        call: &Call,
        parcel: Vec<u8>,
        completion: Arc<Completion>,
    ) -> Result<(), Error> {
        let plan = self.machine.plan(comm, call, &Options::default())?;
        self.start(plan, Input::Parcel(parcel.into()), completion, false)
    }

    /// Starts to wait for a parcel.
    pub(crate) fn recv_parcel(
        &mut self,
        comm: CommId,
        call: &Call,
        options: &Options,
        completion: Arc<Completion>,
    ) -> Result<(), Error> {
        let plan = self.machine.plan(comm, call, options)?;
        self.start(plan, Input::Nothing, completion, false)
    }

    /// Starts a collective through a codec. The coding thread does the rest, if it is `long`;
    /// otherwise a thread that waits does.
    pub(crate) fn submit_coded(
        &mut self,
        comm: CommId,
        exchange: CodedCollective,
        long: bool,
        options: &Options,
        completion: Arc<Completion>,
    ) -> Result<(), Error> {
        // A segment, which is in elements, means nothing for parcels.
        let options = Options { segment: None, algorithm: None, ..*options };
        match self.machine.plan(comm, exchange.call(), &options) {
            Ok(plan) => self.start(plan, Input::Rounds(Box::new(exchange)), completion, long),
            Err(error) => {
                let Abandoned { input, owner } = exchange.abandon();
                self.afterwards.owners.extend(owner);
                Err(Error::from(error).with_input(input))
            }
        }
    }

    fn start(
        &mut self,
        plan: Plan,
        input: Input<Buffer, CodedCollective>,
        completion: Arc<Completion>,
        long: bool,
    ) -> Result<(), Error> {
        let (now, observer) = (self.now(), &mut self.observer);
        let (comm, call, endless) = (plan.comm(), plan.fingerprint(), plan.is_endless());
        let started = self.machine.submit(now, plan, input, |op, seq| {
            // A receive that may wait for ever is not an event to record.
            let ticket = if endless { Ticket::NONE } else { observer.began(op, comm, seq, call) };
            Job { completion, ticket, span: observer.span(comm, seq, call), long }
        });
        if let Err(Refused { why, input }) = started {
            let input = given_back(input, &mut self.afterwards);
            return Err(match why {
                Refusal::Call(error) => Error::Call { error, input },
                Refusal::Failed(error) => Error::Failed { error, members: None, input },
            });
        }
        self.settle();
        Ok(())
    }

    /// Moves everything that can move at this time; `true` if anything did.
    pub(crate) fn turn(&mut self, now: Instant) -> bool {
        let mut moved = false;
        for index in 0..self.links.len() {
            moved |= self.turn_link(Peer(index as u32));
        }
        let now = Time(now.saturating_duration_since(self.origin));
        if self.machine.engine().poll_timeout().is_some_and(|due| due <= now) {
            self.machine.handle_timeout(now);
            moved = true;
        }
        moved |= self.turn_members(now);
        if moved || self.machine.has_held_notices() {
            self.settle();
        }
        moved | self.lose_closed_peers()
    }

    /// Gives up peers that have said goodbye and are still needed.
    fn lose_closed_peers(&mut self) -> bool {
        let Some(peer) = self.closed.iter().find(|peer| self.machine.needs(**peer)).copied() else {
            return false;
        };
        self.closed.remove(&peer);
        self.lose(peer, true);
        self.settle();
        true
    }

    /// Whether a peer is gone that the others are to go on without. If it has said goodbye, it is
    /// answered, and is no loss.
    pub(crate) fn let_go(&mut self, peer: Peer) -> bool {
        if self.closed.remove(&peer)
            && let Some(mut link) = self.links[peer.index()].take()
        {
            link.close();
        }
        self.links[peer.index()].is_none()
    }

    /// Tells peers, all at once, of everything that was put off since the lock was taken.
    fn ring(&mut self) {
        if std::mem::take(&mut self.unrung) {
            self.links.iter_mut().flatten().for_each(|link| link.ring());
        }
    }

    /// How long nothing needs to be done unless a frame arrives.
    pub(crate) fn patience(&self) -> Duration {
        let due = self.machine.engine().poll_timeout().unwrap_or(Time::MAX);
        let members = self.members.as_ref().and_then(Members::poll_timeout);
        let due = due.min(members.unwrap_or(Time::MAX));
        due.0.saturating_sub(self.now().0)
    }

    /// Says goodbye to all peers. From then on this process has no part in agreeing on the group's
    /// members: others answer its goodbye with theirs, which does not mean that they end.
    pub(crate) fn close(&mut self) {
        self.observer.flush();
        let members = self.members.take();
        for (index, link) in self.links.iter_mut().enumerate() {
            let Some(link) = link else { continue };
            // A goodbye says that nothing was held back.
            let owes = |members: &Members| members.owes(Peer(index as u32));
            if members.as_ref().is_some_and(owes) { link.give_up() } else { link.close() }
        }
        members.into_iter().for_each(Members::close_lobby);
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
                Ok(Some(arrival)) => self.arrived(peer, arrival),
                Err(broken) => {
                    tracing::error!(%peer, %broken, "dropping a link");
                    self.lose(peer, false);
                }
            }
            moved = true;
        }
        loop {
            let Some(link) = &mut self.links[peer.index()] else { return moved };
            match link.poll_writable() {
                Ok(None) => return moved,
                Ok(Some(lane)) => {
                    while let Some(transmit) = self.machine.poll_held(peer, lane) {
                        if self.send(transmit) {
                            break;
                        }
                    }
                }
                Err(broken) => {
                    tracing::error!(%peer, %broken, "dropping a link");
                    self.lose(peer, false);
                }
            }
            moved = true;
        }
    }

    fn arrived(&mut self, peer: Peer, arrival: Arrival) {
        match arrival {
            Arrival::Frame(lane) => self.offer(lane),
            Arrival::Notice(header, payload) => self.notice(peer, &header, &payload),
            Arrival::Closed => {
                self.closed.insert(peer);
                self.member_lost(peer, Loss::Complete, None);
            }
        }
    }

    /// Loses a peer: answers its goodbye if it said one, and gives it up if not.
    fn lose(&mut self, peer: Peer, said_goodbye: bool) {
        if let Some(mut link) = self.links[peer.index()].take() {
            if said_goodbye {
                link.close();
            } else {
                let (loss, liveness) = (link.loss(), link.liveness());
                // Before anything is done without the peer: it must not believe that this process
                // was with it to the end.
                link.give_up();
                self.member_lost(peer, loss, liveness);
            }
        }
        self.machine.handle_peer_lost(peer);
    }

    fn notice(&mut self, from: Peer, header: &Header, payload: &[u8]) {
        if header.frame == FrameKind::Members {
            return self.member_says(from, payload);
        }
        if let Err(error) = self.machine.handle_notice(from, header, payload) {
            tracing::warn!(%from, %error, "ignoring a notice that makes no sense");
        }
    }

    /// Offers the machine the frames at the head of a lane, for as long as it takes them.
    fn offer(&mut self, lane: Lane) {
        let Some(link) = &mut self.links[lane.from.index()] else { return };
        self.unrung = true;
        while let Some((header, payload)) = link.head(&lane) {
            match self.machine.handle_frame(lane.from, &header) {
                Verdict::Later => break,
                Verdict::Early => {
                    link.set_aside(&lane);
                    break;
                }
                Verdict::Drop => {}
                Verdict::Take(take) => {
                    if let Some(job) = self.machine.handle_taken(take, payload) {
                        self.received[lane.from.index()].count(payload.len());
                        self.observer.recorder.received(job.ticket, payload.len());
                    }
                }
            }
            link.pop(&lane);
        }
    }

    /// Does everything that the machine asks for.
    fn settle(&mut self) {
        for notice in self.machine.take_held_notices() {
            self.send(notice);
        }
        loop {
            if let Some(lane) = self.machine.poll_resume() {
                self.offer(lane);
            } else if let Some(transmit) = self.machine.poll_transmit() {
                self.send(transmit);
            } else if let Some(event) = self.machine.poll_event() {
                self.happened(event);
            } else {
                break;
            }
        }
        if let Some(reason) = self.observer.take_failure() {
            self.afterwards.failure = Some(Box::new(self.flight(&reason)));
        }
    }

    /// Hands a frame to its link; `true` if there is no room for it yet.
    fn send(&mut self, transmit: Transmit) -> bool {
        let to = transmit.to.index();
        let Some(link) = &mut self.links[to] else { return false };
        if let Some((comm, seq)) = transmit.gives_up() {
            link.abandon(comm, seq);
        }
        self.unrung = true;
        let (sent, recorder) = (&mut self.sent[to], &mut self.observer.recorder);
        self.machine.send(transmit, |frame| {
            let went = link.send(frame.lane, frame.header, frame.payload, frame.last);
            if let Some(job) = frame.tag.filter(|_| went) {
                sent.count(frame.payload.len());
                recorder.sent(job.ticket, frame.payload.len());
            }
            went
        })
    }

    fn happened(&mut self, event: MachineEvent<Buffer, CodedCollective, Job>) {
        match event {
            // It was replaced: nothing has failed.
            MachineEvent::CommFailed { fault: Fault::Replaced { .. }, .. } => {}
            MachineEvent::CommFailed { comm, fault, reporter } => {
                tracing::debug!(?comm, %fault, %reporter, "a communicator has failed");
                self.observer.failed(fault);
            }
            MachineEvent::WantsCoding(op) => self.wants_coding(op),
            MachineEvent::Ended { tag: Job { completion, ticket, span, .. }, end } => {
                self.observer.ended(ticket, &span, end.as_ref().err().map(|(failure, _)| failure));
                let foreign = match &end {
                    Ok(buffer) | Err((_, Input::Buffer(buffer))) => buffer.is_foreign(),
                    Err(_) => false,
                };
                let result = end.map_err(|(failure, input)| Error::Failed {
                    error: failure.error,
                    members: None,
                    input: given_back(input, &mut self.afterwards),
                });
                self.afterwards.wake.extend(completion.complete(result));
                if foreign {
                    self.afterwards.foreign.push(completion);
                }
            }
        }
    }

    pub(crate) fn has_coder(&self) -> bool {
        self.coder.is_some()
    }

    /// From now on, the thread behind `coder` does the coding of long operations.
    pub(crate) fn set_coder(&mut self, coder: Sender<OpId>) {
        self.coder = Some(coder);
    }

    fn wants_coding(&mut self, op: OpId) {
        let Some(job) = self.machine.tag(op) else { return };
        match &self.coder {
            Some(coder) if job.long => {
                // The thread lives as long as the node.
                self.queued += usize::from(coder.send(op).is_ok());
            }
            _ => self.short.push_back(op),
        }
    }

    /// The coding thread is done with one of its jobs.
    pub(crate) fn coded(&mut self) {
        self.queued -= 1;
    }

    /// Whether the coding thread has anything to do.
    pub(crate) fn is_coding(&self) -> bool {
        self.queued > 0
    }

    /// A short operation that wants coding, for the thread that turns the driver.
    pub(crate) fn take_short(&mut self) -> Option<OpId> {
        self.short.pop_front()
    }

    /// What is to be coded for an operation, if anything is.
    pub(crate) fn take_coding(&mut self, op: OpId) -> Option<Coding<CodedCollective, Job>> {
        let coding = self.machine.take_coding(op)?;
        if let Coding::Finish { tag, .. } = &coding {
            self.observer.ended(tag.ticket, &tag.span, None);
        }
        Some(coding)
    }

    /// Takes over a round of parcels that was made.
    pub(crate) fn supply(&mut self, op: OpId, round: u32, made: Vec<Bytes>) {
        self.machine.supply(op, round, made);
        self.settle();
    }

    /// Takes an operation back from the thread that coded for it, which is done for now.
    pub(crate) fn give_coding_back(
        &mut self,
        op: OpId,
        exchange: Box<CodedCollective>,
        nonsense: Option<Nonsense>,
    ) {
        if let Some(nonsense) = &nonsense {
            tracing::error!(%nonsense, "giving a communicator up");
        }
        self.machine.give_back(op, exchange, nonsense);
        self.settle();
    }

    /// A buffer for results.
    pub(crate) fn take_floats(&mut self, len: usize) -> Vec<f32> {
        let buffer = self.machine.buffers_mut().take(DType::F32, len);
        buffer.into_vec().expect("the pool gives what it is asked for")
    }

    /// Keeps a buffer for the next operation.
    pub(crate) fn recycle(&mut self, buffer: Buffer) {
        self.machine.buffers_mut().give(buffer);
    }
}

/// What a caller gets back of its input, if that was a vector.
fn given_back(
    input: Input<Buffer, CodedCollective>,
    afterwards: &mut Afterwards,
) -> Option<Box<Buffer>> {
    match input {
        Input::Buffer(buffer) => Some(Box::new(buffer)),
        Input::Rounds(exchange) => {
            let Abandoned { input, owner } = exchange.abandon();
            let is_here = owner.is_none();
            afterwards.owners.extend(owner);
            is_here.then(|| Box::new(input.into()))
        }
        Input::Parcel(_) | Input::Nothing | Input::Lengths(_) => None,
    }
}
