//! One simulated process: an engine, its jobs, and the frames that wait for it.

use std::collections::{HashMap, VecDeque};

use farwire_proto::{
    Action, Config, Engine, Gate, Lane, OpId, Outcome, Peer, Plan, Rank, Workspace, WorldSize,
};

use crate::sim::{FlightId, JobId};

#[derive(Debug)]
pub(crate) struct Node {
    pub(crate) engine: Engine,
    pub(crate) alive: bool,
    /// Steps taken, for [`Trouble::Crash`](crate::Trouble::Crash).
    pub(crate) steps: u64,
    pub(crate) jobs: HashMap<OpId, Job>,
    /// Frames that have arrived and not been taken, by lane.
    pub(crate) inbox: HashMap<Lane, VecDeque<FlightId>>,
    /// Frames that wait for room in the window of their lane.
    pub(crate) outbox: HashMap<(Peer, Lane), Outbox>,
    /// When the timer event that is in the queue fires.
    pub(crate) timer: Option<farwire_proto::Time>,
}

/// The sending side of a lane.
#[derive(Debug, Default)]
pub(crate) struct Outbox {
    /// Bytes on their way or unread.
    pub(crate) outstanding: usize,
    pub(crate) held: VecDeque<FlightId>,
}

/// An operation on one process.
#[derive(Debug)]
pub(crate) struct Job {
    pub(crate) id: JobId,
    pub(crate) outcome: Outcome,
    /// Absent when the simulation carries lengths only.
    pub(crate) memory: Option<Memory>,
    upstream: Option<Rank>,
    /// The longest chain of frames behind the first n folds, and behind the first n frames from upstream.
    folded: Vec<u32>,
    received: Vec<u32>,
}

#[derive(Debug)]
pub(crate) struct Memory {
    pub(crate) work: Workspace,
    pub(crate) input: Vec<u8>,
    pub(crate) output: Vec<u8>,
}

impl Node {
    pub(crate) fn new(me: Peer, world: WorldSize, config: Config) -> Self {
        Self {
            engine: Engine::new(me, world, config),
            alive: true,
            steps: 0,
            jobs: HashMap::new(),
            inbox: HashMap::new(),
            outbox: HashMap::new(),
            timer: None,
        }
    }
}

impl Job {
    pub(crate) fn new(id: JobId, plan: &Plan, memory: Option<Memory>) -> Self {
        Self {
            id,
            outcome: plan.outcome(),
            memory,
            upstream: plan.upstream(),
            folded: Vec::new(),
            received: Vec::new(),
        }
    }

    /// Puts a frame's payload where it belongs, and remembers how long a chain of frames led to it.
    pub(crate) fn take(&mut self, from: Option<Rank>, action: &Action, body: Option<&[u8]>, depth: u32) {
        if let (Some(memory), Some(body)) = (&mut self.memory, body) {
            memory.work.apply(action, body, &memory.input, &mut memory.output);
        }
        let longest = |chain: &Vec<u32>| chain.last().copied().unwrap_or(0).max(depth);
        if matches!(action, Action::Fold(_)) {
            self.folded.push(longest(&self.folded));
        }
        if from.is_some() && from == self.upstream {
            self.received.push(longest(&self.received));
        }
    }

    /// How long a chain of frames ends in one that had to wait for `gate`.
    pub(crate) fn depth_after(&self, gate: &Gate) -> u32 {
        let behind = |chain: &Vec<u32>, n: usize| n.checked_sub(1).map_or(0, |last| chain[last]);
        1 + behind(&self.folded, gate.folded).max(behind(&self.received, gate.received))
    }
}
