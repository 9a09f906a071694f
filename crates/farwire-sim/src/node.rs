//! One simulated process: an engine, its jobs, and the frames that wait for it.

use std::collections::{HashMap, VecDeque};
use std::ops::Range;

use farwire_codec::collective::CodedCollective;
use farwire_proto::{
    Action, Config, Engine, Gate, Lane, OpId, Outcome, Parcels, Peer, Plan, Rank, Source, Workspace,
    WorldSize,
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
    /// This process's rank in the operation's communicator, and the communicator's size.
    pub(crate) me: Rank,
    pub(crate) world: WorldSize,
    pub(crate) memory: Memory,
    upstream: Option<Rank>,
    /// The longest chain of frames behind the first n folds, and behind the first n frames from upstream.
    folded: Vec<u32>,
    received: Vec<u32>,
}

/// The bytes of an operation.
#[derive(Debug)]
pub(crate) enum Memory {
    /// Only lengths are carried.
    None,
    /// Frames were laid out beforehand.
    Laid { work: Workspace, input: Vec<u8>, output: Vec<u8> },
    /// The same in one memory, of which the output is this part.
    InPlace { work: Workspace, memory: Vec<u8>, output: Range<usize> },
    /// A message in one parcel, from this rank if there is one.
    Message { parcels: Parcels, from: Option<Rank>, input: Vec<u8> },
    /// Rounds of parcels that a codec makes.
    Coded { parcels: Parcels, exchange: Box<CodedCollective> },
    /// Rounds of parcels of which only the lengths are known: by round, and by rank.
    Lengths(Vec<Vec<usize>>),
}

impl Memory {
    /// One memory for an operation that works in place, with its input at its place in it.
    pub(crate) fn in_place(plan: &Plan, input: &[u8]) -> Self {
        let at = plan.in_place().expect("a call that cannot work in place was refused");
        let range = |start: usize, bytes: usize| {
            let start = start * plan.dtype().size();
            start..start + bytes
        };
        let output = range(at.output, plan.output_bytes());
        let given = range(at.input, input.len());
        // What is not input may hold anything.
        let mut memory = vec![0xa5; output.end.max(given.end)];
        memory[given].copy_from_slice(input);
        Self::InPlace { work: Workspace::new(plan), memory, output }
    }

    /// What a frame carries, unless only lengths are.
    pub(crate) fn payload(&mut self, source: &Source) -> Option<&[u8]> {
        match (self, source) {
            (Self::None | Self::Lengths(_), _) => None,
            (Self::Laid { work, input, output }, source) => Some(work.payload(source, input, output)),
            (Self::InPlace { work, memory, .. }, source) => Some(work.payload_in_place(source, memory)),
            (Self::Message { parcels, .. } | Self::Coded { parcels, .. }, Source::Parcel(part)) => {
                Some(parcels.payload(part))
            }
            _ => unreachable!("parcels come in parts"),
        }
    }

    fn apply(&mut self, action: &Action, body: &[u8]) {
        match (self, action) {
            (Self::None | Self::Lengths(_), _) => {}
            (Self::Laid { work, input, output }, action) => work.apply(action, body, input, output),
            (Self::InPlace { work, memory, .. }, action) => work.apply_in_place(action, body, memory),
            (Self::Message { parcels, .. } | Self::Coded { parcels, .. }, Action::Collect(part)) => {
                parcels.collect(part, body);
            }
            _ => unreachable!("parcels come in parts"),
        }
    }

    /// What went in, as it was; what is left of it, if that was in place.
    pub(crate) fn into_input(self) -> Vec<u8> {
        match self {
            Self::None | Self::Lengths(_) => Vec::new(),
            Self::Laid { input, .. } | Self::Message { input, .. } | Self::InPlace { memory: input, .. } => {
                input
            }
            Self::Coded { exchange, .. } => exchange.abandon().into_bytes(),
        }
    }
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
    pub(crate) fn new(id: JobId, plan: &Plan, memory: Memory) -> Self {
        Self {
            id,
            outcome: plan.outcome(),
            me: plan.me(),
            world: plan.world(),
            memory,
            upstream: plan.upstream(),
            folded: Vec::new(),
            received: Vec::new(),
        }
    }

    /// Puts a frame's payload where it belongs, and remembers how long a chain of frames led to it.
    pub(crate) fn take(&mut self, from: Option<Rank>, action: &Action, body: Option<&[u8]>, depth: u32) {
        if let Some(body) = body {
            self.memory.apply(action, body);
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
