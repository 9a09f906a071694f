//! One simulated process: its machine, and the frames that wait for it.

use std::collections::VecDeque;
use std::ops::Range;

use farwire_codec::collective::CodedCollective;
use farwire_proto::{
    Action, Buffers, CallError, Config, DType, Effect, Engine, Frames, Gate, Lane, Level, Machine,
    OpId, Outcome, Peer, Plan, Rank, Time,
};
use rustc_hash::FxHashMap as HashMap;

use crate::report::JobId;

#[derive(Debug)]
pub(crate) struct Node {
    pub(crate) machine: Machine<Vectors, CodedCollective, Job>,
    pub(crate) alive: bool,
    /// Steps taken, for [`Trouble::Crash`](crate::Trouble::Crash).
    pub(crate) steps: u64,
    /// Frames that have arrived and not been taken, by lane.
    pub(crate) inbox: HashMap<Lane, VecDeque<FlightId>>,
    /// Bytes of each lane that are on their way or unread.
    pub(crate) outstanding: HashMap<(Peer, Lane), usize>,
    /// When the queued timer event fires.
    pub(crate) timer: Option<Time>,
}

impl Node {
    pub(crate) fn new(me: Peer, hosts: &[u64], config: Config) -> Self {
        let mut engine = Engine::on_hosts(me, hosts, config);
        let on_one_host = hosts.iter().all(|host| *host == hosts[0]);
        for (peer, host) in (0..).map(Peer).zip(hosts) {
            if on_one_host || *host != hosts[me.index()] {
                engine.set_neighbour(peer);
            }
        }
        Self {
            machine: Machine::new(engine, Vectors),
            alive: true,
            steps: 0,
            inbox: HashMap::default(),
            outstanding: HashMap::default(),
            timer: None,
        }
    }
}

/// Identifies a frame on its way.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct FlightId(pub(crate) usize);

/// What memory holds before anything is written to it.
const ANYTHING: u8 = 0xa5;

/// Gives each operation memory of its own.
#[derive(Debug)]
pub(crate) struct Vectors;

impl Buffers for Vectors {
    type Buffer = Vec<u8>;

    fn take(&mut self, dtype: DType, len: usize) -> Vec<u8> {
        vec![ANYTHING; len * dtype.size()]
    }

    fn give(&mut self, _: Vec<u8>) {}
}

/// What the simulation knows of an operation on one process.
#[derive(Debug)]
pub(crate) struct Job {
    pub(crate) id: JobId,
    /// Set once it has begun.
    pub(crate) op: Option<OpId>,
    /// Whether only lengths are carried.
    pub(crate) lengths: bool,
    outcome: Outcome,
    /// Where the output lies in the memory of an operation that works in place.
    shared: Option<Range<usize>>,
    frames: Option<Frames>,
    /// The longest chain of frames behind the first n folds, the first n folds on the host, and the
    /// first n frames from upstream.
    folded: Vec<u32>,
    host_folded: Vec<u32>,
    received: Vec<u32>,
}

impl Job {
    pub(crate) fn new(id: JobId, plan: &Plan, lengths: bool) -> Self {
        Self {
            id,
            op: None,
            lengths,
            outcome: plan.outcome(),
            shared: output_in_place(plan),
            frames: plan.frames().cloned(),
            folded: Vec::new(),
            host_folded: Vec::new(),
            received: Vec::new(),
        }
    }

    /// The result, from the memory that an operation leaves.
    pub(crate) fn result(self, memory: Vec<u8>) -> Vec<u8> {
        match (self.shared.filter(|_| !self.lengths), self.outcome) {
            (Some(output), Outcome::Output) => memory[output].to_vec(),
            (Some(_), Outcome::Nothing) => Vec::new(),
            _ => memory,
        }
    }

    /// Records how long a chain of frames led to one that was taken.
    pub(crate) fn took(&mut self, from: Option<Rank>, effect: &Effect, depth: u32) {
        let add = |chain: &mut Vec<u32>| {
            chain.push(chain.last().copied().unwrap_or(0).max(depth));
        };
        if let Effect::Apply(Action::Fold(fold)) = effect {
            add(match fold.level {
                Level::Host => &mut self.host_folded,
                Level::All => &mut self.folded,
            });
        }
        let frames = self.frames.as_ref().zip(from);
        if frames.is_some_and(|(frames, from)| frames.is_upstream(from)) {
            add(&mut self.received);
        }
    }

    /// The length of the chain of frames that ends in one that had to wait for `gate`.
    pub(crate) fn depth_after(&self, gate: &Gate) -> u32 {
        let behind = |chain: &Vec<u32>, n: usize| n.checked_sub(1).map_or(0, |last| chain[last]);
        let folds =
            behind(&self.folded, gate.folded).max(behind(&self.host_folded, gate.host_folded));
        1 + folds.max(behind(&self.received, gate.received))
    }
}

/// Where a part of an operation's memory lies, in bytes.
fn range(plan: &Plan, start: usize, bytes: usize) -> Range<usize> {
    let start = start * plan.dtype().size();
    start..start + bytes
}

fn output_in_place(plan: &Plan) -> Option<Range<usize>> {
    plan.in_place().map(|at| range(plan, at.output, plan.output_bytes()))
}

/// The memory that an operation begins with: its input, at its place in the memory if the operation
/// works in place.
pub(crate) fn memory(plan: &Plan, input: Vec<u8>) -> Result<Vec<u8>, CallError> {
    let (Some(at), Some(output)) = (plan.in_place(), output_in_place(plan)) else {
        return Ok(input);
    };
    plan.check_buffers(input.len(), plan.output_bytes())?;
    let given = range(plan, at.input, input.len());
    let mut memory = vec![ANYTHING; output.end.max(given.end)];
    memory[given].copy_from_slice(&input);
    Ok(memory)
}
