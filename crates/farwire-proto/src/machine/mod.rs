//! The machine: everything that happens between a call and its result, except the network.
//!
//! An [`Engine`] decides which frames move. A [`Machine`] adds what they carry: the memory of each
//! operation, where a payload goes, the rounds of parcels that a codec makes, frames that wait for
//! room, and what is left when an operation ends. It does no IO, reads no clock and starts no
//! thread, so the runtime and the simulator drive the same one.

mod parceled;
#[cfg(test)]
mod tests;

use std::collections::VecDeque;
use std::fmt;

use bytes::Bytes;
use rustc_hash::FxHashMap as HashMap;

use crate::call::{CallError, Options};
use crate::collective::Call;
use crate::dtype::DType;
use crate::engine::{Effect, Engine, Event, Lane, OpenError, Payload, Take, Transmit, Verdict};
use crate::fault::{Fault, OpError};
use crate::header::{Header, HeaderError};
use crate::ids::{CommId, OpId, OpSeq, Peer, Time, WorldSize};
use crate::plan::{Plan, Way};
use crate::schedule::{Action, Outcome, Source};
use crate::spare::Spare;
use crate::team::{Team, Teamed};
use crate::workspace::{Scratch, Workspace};
use parceled::Parceled;
pub use parceled::{Coding, CodingWork, Nonsense, Rounds};

/// Where buffers for results come from, and where those no longer needed go.
pub trait Buffers: fmt::Debug {
    /// The memory of one vector. A parcel becomes one, too.
    type Buffer: AsRef<[u8]> + AsMut<[u8]> + From<Vec<u8>> + fmt::Debug;
    /// A buffer of `len` elements, with any contents.
    fn take(&mut self, dtype: DType, len: usize) -> Self::Buffer;
    /// Takes back a buffer that is no longer needed.
    fn give(&mut self, buffer: Self::Buffer);
}

/// All operations of one process.
///
/// `M` provides the memory they work in, `R` makes parcels, and a `T` is what the driver attaches
/// to each operation: who waits for it, for example.
///
/// Its methods follow the [`Engine`]'s:
///
/// - **Calls**: [`plan`](Self::plan), [`submit`](Self::submit), and
///   [`take_coding`](Self::take_coding), [`supply`](Self::supply) and
///   [`give_back`](Self::give_back) around the work of a codec, which takes time and is done
///   elsewhere.
/// - **What happened**: [`handle_frame`](Self::handle_frame) and
///   [`handle_taken`](Self::handle_taken), [`handle_notice`](Self::handle_notice),
///   [`handle_peer_lost`](Self::handle_peer_lost), [`handle_timeout`](Self::handle_timeout).
/// - **What to do**: after any of the above, call these until each returns `None`:
///   [`poll_resume`](Self::poll_resume), [`poll_transmit`](Self::poll_transmit),
///   [`poll_event`](Self::poll_event).
///
/// A frame to send either goes ([`send`](Self::send)) or waits for room ([`hold`](Self::hold)).
/// When there is room, [`poll_held`](Self::poll_held) returns the frames of that lane, in order.
#[derive(Debug)]
pub struct Machine<M: Buffers, R, T> {
    engine: Engine,
    buffers: M,
    laid: HashMap<OpId, Laid<M::Buffer, T>>,
    parceled: HashMap<OpId, Parceled<R, T>>,
    /// Frames whose lane is full, by receiver and lane.
    held: HashMap<(Peer, Lane), VecDeque<Transmit>>,
    spare_held: Spare<VecDeque<Transmit>>,
    spare_scratch: Spare<Scratch>,
    /// Notices that found no room.
    held_notices: VecDeque<Transmit>,
    events: VecDeque<MachineEvent<M::Buffer, R, T>>,
    /// The threads that move and combine bytes.
    team: Teamed,
}

/// What an operation works on.
#[derive(Debug)]
pub enum Input<B, R> {
    /// A vector. For a call that works in place, this memory will also hold the result.
    Buffer(B),
    /// The parcel to send.
    Parcel(Bytes),
    /// What makes the parcels of a coded call, and reads those that come.
    Rounds(Box<R>),
    /// Nothing: a parcel is to be received.
    Nothing,
    /// Only lengths, for a simulation of vectors that would not fit in memory: for each round,
    /// those of the parcels to each rank. No rounds if the call travels in frames.
    Lengths(VecDeque<Vec<usize>>),
}

/// Why a call was not started, and its input back.
#[derive(Debug)]
pub struct Refused<B, R> {
    /// Why.
    pub why: Refusal,
    /// As it was given, if that was a buffer or rounds; else [`Input::Nothing`].
    pub input: Input<B, R>,
}

/// Why a call was not started.
#[derive(Debug)]
pub enum Refusal {
    /// The call is wrong.
    Call(CallError),
    /// Its communicator has failed.
    Failed(Box<OpError>),
}

/// What happened to an operation, or to a communicator.
#[derive(Debug)]
pub enum MachineEvent<B, R, T> {
    /// An operation has ended.
    Ended {
        /// What the operation was submitted with.
        tag: T,
        /// Its result (empty if this rank gets none), or why there is none, and its input back.
        end: Result<B, (Failure, Input<B, R>)>,
    },
    /// There is work for a codec: see [`Machine::take_coding`].
    WantsCoding(OpId),
    /// As [`Event::CommFailed`].
    CommFailed {
        /// Which.
        comm: CommId,
        /// Why.
        fault: Fault,
        /// The peer that found out.
        reporter: Peer,
    },
}

/// How an operation failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// Why.
    pub error: Box<OpError>,
    /// The peers that it waited for just then.
    pub waited_for: Vec<Peer>,
}

/// A frame on its way to a link.
#[derive(Debug)]
pub struct Outbound<'a, T> {
    /// Its lane; `None` for a notice, which belongs to no lane.
    pub lane: Option<Lane>,
    /// Its header.
    pub header: &'a Header,
    /// What follows the header; empty if only lengths are carried.
    pub payload: &'a [u8],
    /// Whether it is the last of its lane.
    pub last: bool,
    /// What its operation was submitted with; `None` for a notice.
    pub tag: Option<&'a mut T>,
}

/// An operation whose frames were laid out beforehand.
#[derive(Debug)]
struct Laid<B, T> {
    memory: Memory<B>,
    tag: T,
}

#[derive(Debug)]
enum Memory<B> {
    /// The input is read, the output is written, and perhaps copied over the input at the end.
    Apart { work: Workspace, input: B, output: B, outcome: Outcome, copies_back: bool },
    /// Input and output in one memory.
    Shared { work: Workspace, memory: B },
    /// Only lengths are carried.
    None,
}

impl<B: AsRef<[u8]> + AsMut<[u8]>> Memory<B> {
    /// What a frame carries.
    fn payload(&mut self, source: &Source) -> &[u8] {
        match self {
            Self::Apart { work, input, output, .. } => {
                work.payload(source, (*input).as_ref(), (*output).as_ref())
            }
            Self::Shared { work, memory } => work.payload_in_place(source, (*memory).as_ref()),
            Self::None => &[],
        }
    }

    /// Puts a payload where it belongs.
    fn apply(&mut self, action: &Action, payload: &[u8]) {
        match self {
            Self::Apart { work, input, output, .. } => {
                work.apply(action, payload, input.as_ref(), output.as_mut());
            }
            Self::Shared { work, memory } => work.apply_in_place(action, payload, memory.as_mut()),
            Self::None => {}
        }
    }
}

impl<M: Buffers, R: Rounds, T> Machine<M, R, T> {
    /// A machine around an engine that has nothing in flight.
    pub fn new(engine: Engine, buffers: M) -> Self {
        Self {
            engine,
            buffers,
            laid: HashMap::default(),
            parceled: HashMap::default(),
            held: HashMap::default(),
            spare_held: Spare::default(),
            spare_scratch: Spare::default(),
            held_notices: VecDeque::new(),
            events: VecDeque::new(),
            team: None,
        }
    }

    /// Has these threads move and combine bytes, for operations that are submitted from now on.
    pub fn set_team(&mut self, team: &'static dyn Team) {
        self.team = Some(team);
    }

    /// The engine that makes its decisions.
    pub fn engine(&self) -> &Engine {
        &self.engine
    }

    /// Where its buffers come from.
    pub fn buffers_mut(&mut self) -> &mut M {
        &mut self.buffers
    }

    /// What an operation in flight was submitted with.
    pub fn tag(&self, op: OpId) -> Option<&T> {
        self.laid
            .get(&op)
            .map(|job| &job.tag)
            .or_else(|| self.parceled.get(&op).map(|job| &job.tag))
    }

    /// Operations that have begun and not ended.
    pub fn in_flight(&self) -> usize {
        self.laid.len() + self.parceled.len()
    }

    /// Whether nothing is in flight, and no notice waits for room.
    pub fn is_idle(&self) -> bool {
        self.in_flight() == 0 && self.held_notices.is_empty()
    }

    /// As [`Engine::open`].
    pub fn open(&mut self, comm: CommId, members: &[Peer]) -> Result<(), OpenError> {
        self.engine.open(comm, members)
    }

    /// As [`Engine::close`].
    pub fn close(&mut self, comm: CommId) {
        self.engine.close(comm);
    }

    /// As [`Engine::plan`].
    pub fn plan(&self, comm: CommId, call: &Call, options: &Options) -> Result<Plan, CallError> {
        self.engine.plan(comm, call, options)
    }

    /// Starts an operation. `tag` is called if it has begun, with its id and its place in the order
    /// of its communicator.
    ///
    /// # Panics
    ///
    /// If the input is not of the kind that the plan needs: a buffer, parcels, or rounds of them.
    pub fn submit(
        &mut self,
        now: Time,
        plan: Plan,
        input: Input<M::Buffer, R>,
        tag: impl FnOnce(OpId, OpSeq) -> T,
    ) -> Result<OpId, Refused<M::Buffer, R>> {
        let memory = match (plan.way(), input) {
            (Way::Parcels(_), input) => return self.submit_parcels(now, plan, input, tag),
            (Way::Frames(_), Input::Buffer(input)) => self.memory(&plan, input)?,
            (Way::Frames(_), Input::Lengths(_)) => Memory::None,
            (Way::Frames(_), _) => panic!("a call that travels in frames works on a buffer"),
        };
        let seq = self.next_seq(&plan);
        match self.engine.submit(now, plan) {
            Ok(op) => {
                self.laid.insert(op, Laid { memory, tag: tag(op, seq) });
                Ok(op)
            }
            Err(error) => Err(Refused { why: Refusal::Failed(error), input: self.give_up(memory) }),
        }
    }

    fn next_seq(&self, plan: &Plan) -> OpSeq {
        self.engine.next_seq(plan).expect("a plan is made on an open communicator")
    }

    /// The memory for a plan to work in, if the input is as long as it needs.
    fn memory(
        &mut self,
        plan: &Plan,
        input: M::Buffer,
    ) -> Result<Memory<M::Buffer>, Refused<M::Buffer, R>> {
        let given = input.as_ref().len();
        let checked = match plan.in_place() {
            Some(_) => plan.check_memory(given),
            None => plan.check_buffers(given, plan.output_bytes()),
        };
        if let Err(error) = checked {
            return Err(Refused { why: Refusal::Call(error), input: Input::Buffer(input) });
        }
        let mut work = Workspace::with_scratch(plan, self.spare_scratch.take(), self.team);
        if plan.in_place().is_some() {
            return Ok(Memory::Shared { work, memory: input });
        }
        let mut output = self.buffers.take(plan.dtype(), plan.output_bytes() / plan.dtype().size());
        work.begin(input.as_ref(), output.as_mut());
        let (outcome, copies_back) = (plan.outcome(), plan.copies_back());
        Ok(Memory::Apart { work, input, output, outcome, copies_back })
    }

    /// The input of an operation that has failed. Its output is of no use, and is given back.
    fn give_up(&mut self, memory: Memory<M::Buffer>) -> Input<M::Buffer, R> {
        match memory {
            Memory::Apart { input, output, .. } => {
                self.buffers.give(output);
                Input::Buffer(input)
            }
            Memory::Shared { memory, .. } => Input::Buffer(memory),
            Memory::None => Input::Nothing,
        }
    }

    /// The result of an operation. A buffer that does not hold the result is given back, to serve
    /// another operation.
    fn finish(&mut self, memory: Memory<M::Buffer>) -> M::Buffer {
        match memory {
            Memory::Apart { work, mut input, output, outcome, copies_back } => {
                self.spare_scratch.give(work.into_scratch());
                let (result, spare) = match outcome {
                    Outcome::Output if copies_back => {
                        input.as_mut().copy_from_slice(output.as_ref());
                        (input, output)
                    }
                    Outcome::Output => (output, input),
                    Outcome::Input => (input, output),
                    Outcome::Nothing => {
                        self.buffers.give(output);
                        (Vec::new().into(), input)
                    }
                };
                self.buffers.give(spare);
                result
            }
            Memory::Shared { work, memory } => {
                self.spare_scratch.give(work.into_scratch());
                memory
            }
            Memory::None => Vec::new().into(),
        }
    }

    /// As [`Engine::handle_frame`].
    pub fn handle_frame(&mut self, from: Peer, header: &Header) -> Verdict {
        self.engine.handle_frame(from, header)
    }

    /// Puts the payload of a frame where it belongs. Returns what its operation was submitted with.
    pub fn handle_taken(&mut self, take: Take, payload: &[u8]) -> Option<&mut T> {
        let tag = match &take.effect {
            Effect::Apply(action) => self.laid.get_mut(&take.op).map(|job| {
                job.memory.apply(action, payload);
                &mut job.tag
            }),
            Effect::Collect(part) => self.parceled.get_mut(&take.op).map(|job| {
                job.collect(part, payload);
                &mut job.tag
            }),
        };
        self.engine.handle_taken(take);
        tag
    }

    /// As [`Engine::handle_notice`].
    pub fn handle_notice(
        &mut self,
        from: Peer,
        header: &Header,
        payload: &[u8],
    ) -> Result<(), HeaderError> {
        self.engine.handle_notice(from, header, payload)
    }

    /// The link to a peer is dead. Frames that wait for room on it are dropped.
    pub fn handle_peer_lost(&mut self, peer: Peer) {
        self.held.retain(|(to, _), _| *to != peer);
        self.held_notices.retain(|notice| notice.to != peer);
        self.engine.handle_peer_lost(peer);
    }

    /// As [`Engine::grow`].
    pub fn grow(&mut self, world: WorldSize) {
        self.engine.grow(world);
    }

    /// As [`Engine::set_host`].
    pub fn set_host(&mut self, peer: Peer, host: u64) {
        self.engine.set_host(peer, host);
    }

    /// As [`Engine::set_neighbour`].
    pub fn set_neighbour(&mut self, peer: Peer) {
        self.engine.set_neighbour(peer);
    }

    /// As [`Engine::retire_all`].
    pub fn retire_all(&mut self) {
        self.engine.retire_all();
    }

    /// As [`Engine::handle_timeout`].
    pub fn handle_timeout(&mut self, now: Time) {
        self.engine.handle_timeout(now);
    }

    /// Whether a frame is still needed from a peer, or one to it waits for room. If the peer has
    /// said goodbye, neither will move.
    pub fn needs(&self, peer: Peer) -> bool {
        self.engine.awaits(peer) || self.held.keys().any(|(to, _)| *to == peer)
    }

    /// As [`Engine::poll_resume`].
    pub fn poll_resume(&mut self) -> Option<Lane> {
        self.engine.poll_resume()
    }

    /// The next frame to [`send`](Self::send). A lane keeps its order: behind a frame that waits
    /// for room, all others of its lane wait.
    pub fn poll_transmit(&mut self) -> Option<Transmit> {
        loop {
            let transmit = self.engine.poll_transmit()?;
            if self.held.is_empty() {
                return Some(transmit);
            }
            if let Some((comm, seq)) = transmit.gives_up() {
                self.held.retain(|(to, lane), _| {
                    *to != transmit.to
                        || lane.comm != comm
                        || seq.is_some_and(|seq| seq != lane.seq)
                });
                return Some(transmit);
            }
            let lane = Lane::of(self.engine.me(), &transmit.header);
            match self.held.get_mut(&(transmit.to, lane)) {
                Some(held) if !transmit.header.frame.is_notice() => held.push_back(transmit),
                _ => return Some(transmit),
            }
        }
    }

    /// Sends a frame: `carry` hands it to its link, and says whether there was room. If there was
    /// none, the frame is [held](Self::hold). A frame whose operation has ended is dropped.
    ///
    /// Returns whether it was held.
    pub fn send(
        &mut self,
        transmit: Transmit,
        carry: impl FnOnce(Outbound<'_, T>) -> bool,
    ) -> bool {
        let lane = Lane::of(self.engine.me(), &transmit.header);
        let (header, last) = (&transmit.header, transmit.last);
        let went = match &transmit.payload {
            Payload::Operation { op, source, .. } => self.laid.get_mut(op).is_none_or(|job| {
                let (payload, tag) = (job.memory.payload(source), Some(&mut job.tag));
                carry(Outbound { lane: Some(lane), header, payload, last, tag })
            }),
            Payload::Parcel { op, part } => self.parceled.get_mut(op).is_none_or(|job| {
                job.send(part, |payload, tag| {
                    carry(Outbound { lane: Some(lane), header, payload, last, tag: Some(tag) })
                })
            }),
            notice @ (Payload::Fault(_) | Payload::Nothing) => {
                let payload = notice.notice().unwrap_or_default();
                carry(Outbound { lane: None, header, payload, last, tag: None })
            }
        };
        if went {
            self.engine.handle_sent(transmit);
        } else {
            self.hold(transmit);
        }
        !went
    }

    /// Keeps a frame for which there is no room, before all others that wait on its lane.
    pub fn hold(&mut self, transmit: Transmit) {
        if transmit.header.frame.is_notice() {
            return self.held_notices.push_back(transmit);
        }
        let lane = Lane::of(self.engine.me(), &transmit.header);
        let held = self.held.entry((transmit.to, lane)).or_insert_with(|| self.spare_held.take());
        held.push_front(transmit);
    }

    /// The next frame of a lane that waited for room.
    pub fn poll_held(&mut self, to: Peer, lane: Lane) -> Option<Transmit> {
        let held = self.held.get_mut(&(to, lane))?;
        let transmit = held.pop_front();
        if held.is_empty()
            && let Some(held) = self.held.remove(&(to, lane))
        {
            self.spare_held.give(held);
        }
        transmit
    }

    /// Whether notices wait for room.
    pub fn has_held_notices(&self) -> bool {
        !self.held_notices.is_empty()
    }

    /// The notices that found no room, to be tried once more.
    pub fn take_held_notices(&mut self) -> VecDeque<Transmit> {
        std::mem::take(&mut self.held_notices)
    }

    /// What happened to an operation.
    pub fn poll_event(&mut self) -> Option<MachineEvent<M::Buffer, R, T>> {
        loop {
            if let Some(event) = self.events.pop_front() {
                return Some(event);
            }
            let (op, failure) = match self.engine.poll_event()? {
                Event::CommFailed { comm, fault, reporter } => {
                    return Some(MachineEvent::CommFailed { comm, fault, reporter });
                }
                Event::Round(op, round) => {
                    self.round_came(op, round);
                    continue;
                }
                Event::Done(op) => (op, None),
                Event::Failed { op, error, waited_for } => {
                    (op, Some(Failure { error, waited_for }))
                }
            };
            let Some(Laid { memory, tag }) = self.laid.remove(&op) else {
                self.ended_parceled(op, failure);
                continue;
            };
            let end = match failure {
                None => Ok(self.finish(memory)),
                Some(failure) => Err((failure, self.give_up(memory))),
            };
            return Some(MachineEvent::Ended { tag, end });
        }
    }
}
