//! A world of machines in which a string of bytes decides what happens next.
//!
//! Where [`Sim`](crate::Sim) has a network with times, this has none at all: any frame that was
//! sent may be next to arrive, coding may take for ever, any lane may be full. Tests and the fuzzer
//! use it to look for orders of events that nobody thought of.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::num::{NonZeroU32, NonZeroUsize};

use bytes::Bytes;
use farwire_codec::Context;
use farwire_codec::collective::{CodedCollective, Collective, Floats, Order};
use farwire_proto::{
    Call, Coding, CommId, Config, DType, Engine, FAULT_LEN, HEADER_LEN, Header, Input, Lane,
    Machine, MachineEvent, Nonsense, OpId, Options, Peer, Rank, ReduceOp, Tag, Time, Transmit,
    Verdict, WorldSize,
};

use crate::node::Vectors;

const RANKS: u32 = 3;
const COUNT: usize = 20;
const CODECS: [&str; 4] = ["none", "int8", "topk:0.2", "powersgd:1"];

/// How each operation ended on each rank: with these bytes, or with a failure. `None` if it did not
/// end.
pub type Ends = Vec<[Option<Result<Vec<u8>, ()>>; RANKS as usize]>;

/// What a run led to.
#[derive(Debug)]
pub struct Outcome {
    /// By operation and rank.
    pub ends: Ends,
    /// Whether something went wrong: a peer was lost or sent nonsense, or time was up.
    pub trouble: bool,
}

/// Runs operations of all kinds on three ranks, with what happens next taken from `script`; once
/// that is used up, everything that can still happen does.
pub fn run(script: &[u8]) -> Outcome {
    let mut script = script.iter().copied();
    let mut world = World::new(usize::from(script.next().unwrap_or(0)));
    while let Some(step) = script.next() {
        world.step(step, &mut script);
    }
    world.drain();
    if world.trouble {
        for rank in 0..RANKS {
            world.machines[rank as usize].handle_timeout(Time::MAX);
            world.settle(rank);
        }
        world.drain();
    }
    Outcome { ends: world.ends, trouble: world.trouble }
}

/// A rank that is coding.
struct Coder {
    rank: u32,
    op: OpId,
    made: VecDeque<(u32, Vec<Bytes>)>,
    exchange: Box<CodedCollective>,
    nonsense: Option<Nonsense>,
}

/// Frames of one lane that have not been taken.
type Stream = VecDeque<(Header, Vec<u8>)>;

/// A call and its input.
type Operation = (Option<Call>, Input<Vec<u8>, CodedCollective>);

struct World {
    machines: Vec<Machine<Vectors, CodedCollective, usize>>,
    /// Frames on their way, by receiver and lane.
    streams: BTreeMap<(Peer, Lane), Stream>,
    /// Notices on their way: receiver, sender, header and payload.
    notices: VecDeque<(Peer, Peer, Header, Vec<u8>)>,
    /// Lanes without room.
    full: BTreeSet<(Peer, Lane)>,
    wants: Vec<(u32, OpId)>,
    coders: Vec<Coder>,
    ends: Ends,
    trouble: bool,
}

impl World {
    fn new(codec: usize) -> Self {
        let world = WorldSize::new(RANKS).expect("three is not zero");
        // Several frames of a lane may wait for room; and two of the three pairs are kept abreast.
        let (credit, lead) = (NonZeroU32::MIN.saturating_add(2), Some(NonZeroU32::MIN));
        let config = Config { credit, lead, ..Config::default() };
        let engine = |rank: u32| {
            let mut engine = Engine::new(Peer(rank), world, config);
            let near = (0..RANKS).filter(|peer| peer.abs_diff(rank) == 1);
            near.for_each(|peer| engine.set_neighbour(Peer(peer)));
            engine
        };
        let mut this = Self {
            machines: (0..RANKS).map(|rank| Machine::new(engine(rank), Vectors)).collect(),
            streams: BTreeMap::new(),
            notices: VecDeque::new(),
            full: BTreeSet::new(),
            wants: Vec::new(),
            coders: Vec::new(),
            ends: Vec::new(),
            trouble: false,
        };
        for rank in 0..RANKS {
            for (index, (call, input)) in operations(rank, codec).into_iter().enumerate() {
                if this.ends.len() <= index {
                    this.ends.push([const { None }; RANKS as usize]);
                }
                // Rank 0 sends a parcel to rank 1; rank 2 has no part in it.
                let Some(call) = call else {
                    this.ends[index][rank as usize] = Some(Ok(Vec::new()));
                    continue;
                };
                let options = Options { segment: NonZeroUsize::new(7), ..Options::default() };
                let machine = &mut this.machines[rank as usize];
                let plan =
                    machine.plan(CommId::WORLD, &call, &options).expect("these calls are right");
                let started = machine.submit(Time::ZERO, plan, input, |_, _| index);
                started.expect("nothing has failed yet");
            }
            this.settle(rank);
        }
        this
    }

    /// Makes one thing happen, if it can.
    fn step(&mut self, step: u8, script: &mut impl Iterator<Item = u8>) {
        let which = usize::from(step >> 4);
        let rank = u32::from(step >> 4) % RANKS;
        match step % 16 {
            0..=3 => drop(self.deliver(which)),
            4 => drop(self.deliver_notice()),
            5..=6 => drop(self.begin_coding(which)),
            7..=8 => drop(self.go_on_coding(which)),
            9 => {
                let lanes = self.streams.keys().copied();
                self.full.extend(lanes.skip(which).take(1));
            }
            10 => drop(self.make_room(which % 2 == 0)),
            // Changes what a peer sent, so that it is not what its codec made.
            11 => {
                let streams = self.streams.len().max(1);
                let Some(stream) = self.streams.values_mut().nth(which % streams) else { return };
                if let Some(byte) = stream.front_mut().and_then(|(_, payload)| payload.last_mut()) {
                    *byte ^= script.next().unwrap_or(0xff);
                    self.trouble = true;
                }
            }
            12 => {
                let bytes: Vec<u8> = script.take(1 + HEADER_LEN + FAULT_LEN).collect();
                self.forge(rank, &bytes);
            }
            13 => {
                self.trouble = true;
                let lost = Peer((rank + 1 + u32::from(script.next().unwrap_or(0)) % 2) % RANKS);
                self.machines[rank as usize].handle_peer_lost(lost);
                self.settle(rank);
            }
            14 => {
                self.trouble = true;
                self.machines[rank as usize].handle_timeout(Time::MAX);
                self.settle(rank);
            }
            _ => {
                self.machines[rank as usize].close(CommId::WORLD);
                self.settle(rank);
            }
        }
    }

    /// Lets everything happen that can, until nothing is left.
    fn drain(&mut self) {
        loop {
            let mut moved = self.make_room(true) | self.deliver_notice();
            moved |= (0..self.streams.len()).any(|which| self.deliver(which));
            moved |= self.go_on_coding(0) | self.begin_coding(0);
            if !moved {
                return;
            }
        }
    }

    /// Offers what is at the head of a lane; `true` if it was taken.
    fn deliver(&mut self, which: usize) -> bool {
        let lanes = self.streams.len().max(1);
        let Some(&(to, lane)) = self.streams.keys().nth(which % lanes) else { return false };
        let moved = self.offer(to, lane);
        self.settle(to.0);
        moved
    }

    fn offer(&mut self, to: Peer, lane: Lane) -> bool {
        let machine = &mut self.machines[to.index()];
        let Some(stream) = self.streams.get_mut(&(to, lane)) else { return false };
        let Some((header, payload)) = stream.front() else { return false };
        match machine.handle_frame(lane.from, header) {
            Verdict::Later | Verdict::Early => return false,
            Verdict::Drop => {}
            Verdict::Take(take) => drop(machine.handle_taken(take, payload)),
        }
        stream.pop_front();
        true
    }

    fn deliver_notice(&mut self) -> bool {
        let Some((to, from, header, payload)) = self.notices.pop_front() else { return false };
        let read = self.machines[to.index()].handle_notice(from, &header, &payload);
        read.expect("machines send notices that decode");
        self.settle(to.0);
        true
    }

    /// Delivers a frame that no machine sent.
    fn forge(&mut self, to: u32, bytes: &[u8]) {
        let Some((from, rest)) = bytes.split_first() else { return };
        let from = Peer(u32::from(from % 4));
        let Ok(header) = Header::decode(rest) else { return };
        self.trouble = true;
        let machine = &mut self.machines[to as usize];
        if header.frame.is_notice() {
            let _ = machine.handle_notice(from, &header, &rest[HEADER_LEN..]);
        } else if let Verdict::Take(take) = machine.handle_frame(from, &header) {
            machine.handle_taken(take, &vec![0; header.payload as usize]);
        }
        self.settle(to);
    }

    fn begin_coding(&mut self, which: usize) -> bool {
        if self.wants.is_empty() {
            return false;
        }
        let (rank, op) = self.wants.remove(which % self.wants.len());
        match self.machines[rank as usize].take_coding(op) {
            None => {}
            Some(Coding::Finish { rounds, tag }) => {
                let bytes = |done: &[f32]| bytemuck::cast_slice(done).to_vec();
                let end = rounds.finish().map(|done| bytes(&done.output)).map_err(|_| ());
                self.end(rank, tag, end);
            }
            Some(Coding::Work(mut work)) => {
                let mut made = VecDeque::new();
                let nonsense = work.run(|round, parcels| made.push_back((round, parcels))).err();
                self.coders.push(Coder { rank, op, made, exchange: work.rounds, nonsense });
            }
        }
        true
    }

    /// A coder supplies a round, or gives back what it has.
    fn go_on_coding(&mut self, which: usize) -> bool {
        if self.coders.is_empty() {
            return false;
        }
        let which = which % self.coders.len();
        let Coder { rank, op, ref mut made, .. } = self.coders[which];
        let machine = &mut self.machines[rank as usize];
        if let Some((round, parcels)) = made.pop_front() {
            machine.supply(op, round, parcels);
        } else {
            let Coder { exchange, nonsense, .. } = self.coders.remove(which);
            self.trouble |= nonsense.is_some();
            machine.give_back(op, exchange, nonsense);
        }
        self.settle(rank);
        true
    }

    /// A lane that was full tries again; there may still be no room.
    fn make_room(&mut self, room: bool) -> bool {
        let Some(&(to, lane)) = self.full.first() else { return false };
        if room {
            self.full.remove(&(to, lane));
        }
        while let Some(transmit) = self.machines[lane.from.index()].poll_held(to, lane) {
            if self.send(lane.from, transmit) {
                break;
            }
        }
        self.settle(lane.from.0);
        true
    }

    fn send(&mut self, from: Peer, transmit: Transmit) -> bool {
        let Self { machines, streams, notices, full, .. } = self;
        let to = transmit.to;
        machines[from.index()].send(transmit, |frame| {
            let (header, payload) = (*frame.header, frame.payload.to_vec());
            match frame.lane {
                None => notices.push_back((to, from, header, payload)),
                Some(lane) if full.contains(&(to, lane)) => return false,
                Some(lane) => streams.entry((to, lane)).or_default().push_back((header, payload)),
            }
            true
        })
    }

    fn settle(&mut self, rank: u32) {
        loop {
            let machine = &mut self.machines[rank as usize];
            if let Some(lane) = machine.poll_resume() {
                while self.offer(Peer(rank), lane) {}
            } else if let Some(transmit) = machine.poll_transmit() {
                self.send(Peer(rank), transmit);
            } else if let Some(event) = machine.poll_event() {
                match event {
                    MachineEvent::CommFailed { .. } => {}
                    MachineEvent::WantsCoding(op) => self.wants.push((rank, op)),
                    MachineEvent::Ended { tag, end } => self.end(rank, tag, end.map_err(|_| ())),
                }
            } else {
                return;
            }
        }
    }

    fn end(&mut self, rank: u32, operation: usize, end: Result<Vec<u8>, ()>) {
        let before = self.ends[operation][rank as usize].replace(end);
        assert!(before.is_none(), "an operation ends once");
    }
}

/// The calls that a rank makes. Operations at the same place in each rank's list belong together.
fn operations(rank: u32, codec: usize) -> Vec<Operation> {
    let values: Vec<f32> = (0..COUNT).map(|i| (i as f32 - 3.0) * (rank + 1) as f32).collect();
    let buffer = || Input::Buffer(bytemuck::cast_slice(&values).to_vec());
    let sum = Call::AllReduce { count: COUNT, dtype: DType::F32, op: ReduceOp::Sum };
    let coded = |codec: usize, step| {
        let exchange = CodedCollective::new(Order {
            collective: Collective::AllReduce(ReduceOp::Sum),
            codec: CODECS[codec % CODECS.len()].parse().expect("a codec"),
            rank: Rank(rank),
            world: WorldSize::new(RANKS).expect("three is not zero"),
            placement: None,
            input: Floats::F32(values.clone()),
            dimensions: Some(vec![4, 5]),
            tensor: "w".into(),
            feedback: None,
            context: Context { seed: 5, step, tensor: 0 },
            threads: NonZeroUsize::MIN,
            output: Vec::new(),
        });
        let exchange = exchange.expect("these orders are right");
        (Some(exchange.call().clone()), Input::Rounds(Box::new(exchange)))
    };
    let (tag, parcel) = (Tag(1), vec![7; 30]);
    let message = match rank {
        0 => (Some(Call::SendParcel { to: Rank(1), tag, len: 30 }), Input::Parcel(parcel.into())),
        1 => (Some(Call::RecvParcel { from: Rank(0), tag, max: 100 }), Input::Nothing),
        _ => (None, Input::Nothing),
    };
    vec![
        coded(codec, 0),
        (Some(sum.clone()), buffer()),
        message,
        (Some(Call::InPlace(Box::new(sum))), buffer()),
        coded(codec + 1, 1),
        (Some(Call::Barrier), Input::Buffer(Vec::new())),
    ]
}
