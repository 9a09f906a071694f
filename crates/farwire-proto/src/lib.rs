//! Every collective as a sans-IO state machine.
//!
//! This crate decides; it never does IO, reads a clock, spawns a task or touches memory unsafely. A
//! driver (the runtime, or `farwire-sim`) feeds it calls, frame headers and the time, and does what
//! it says.
//!
//! The path of an operation through the crate:
//!
//! 1. A [`Call`] says what the user wants. [`Plan::new`] checks it, lets [`tune`] pick an
//!    [`Algorithm`], and lays out a schedule: for each *lane* to another rank, the frames in and
//!    out; for each frame, the [`Gate`] it waits for. There is one file per collective in
//!    `collective/`. Where lengths depend on the data, there are rounds of *parcels* instead.
//! 2. The [`Engine`] says which frame goes next and what to do with one that arrives, compares
//!    [`Fingerprint`]s, and spreads the news of any [`Fault`]. It never sees a payload.
//! 3. A [`Machine`] joins the engine to the memory of its operations, with a [`Workspace`] for the
//!    arithmetic of each. This is what a driver drives.
//!
//! A driver for ranks whose network is a queue per lane and never fails:
//!
//! ```
//! use std::collections::{BTreeMap, VecDeque};
//! use std::convert::Infallible;
//!
//! use farwire_proto::*;
//!
//! #[derive(Debug)]
//! struct Vectors;
//!
//! impl Buffers for Vectors {
//!     type Buffer = Vec<u8>;
//!     fn take(&mut self, dtype: DType, len: usize) -> Vec<u8> {
//!         vec![0; len * dtype.size()]
//!     }
//!     fn give(&mut self, _: Vec<u8>) {}
//! }
//!
//! let ranks = 3;
//! let world = WorldSize::new(ranks).unwrap();
//! let call = Call::AllReduce { count: 1000, dtype: DType::U32, op: ReduceOp::Sum };
//! let options = Options { segment: std::num::NonZeroUsize::new(10), ..Options::default() };
//! let mut streams: BTreeMap<(Peer, Lane), VecDeque<(Header, Vec<u8>)>> = BTreeMap::new();
//! let mut machines: Vec<Machine<Vectors, Infallible, ()>> = Vec::new();
//! for rank in 0..ranks {
//!     let engine = Engine::new(Peer(rank), world, Config::default());
//!     let mut machine = Machine::new(engine, Vectors);
//!     let plan = machine.plan(CommId::WORLD, &call, &options).unwrap();
//!     let input = Input::Buffer(10u32.pow(rank).to_le_bytes().repeat(1000));
//!     machine.submit(Time::ZERO, plan, input, |_, _| ()).unwrap();
//!     machines.push(machine);
//! }
//! let mut moved = true;
//! while std::mem::take(&mut moved) {
//!     for machine in &mut machines {
//!         while let Some(transmit) = machine.poll_transmit() {
//!             let to = transmit.to;
//!             machine.send(transmit, |frame| {
//!                 let stream = streams.entry((to, frame.lane.expect("no notices"))).or_default();
//!                 stream.push_back((*frame.header, frame.payload.to_vec()));
//!                 true
//!             });
//!         }
//!     }
//!     // A frame that has to wait stays at the head of its stream; the other streams go on.
//!     for ((to, lane), stream) in &mut streams {
//!         let machine = &mut machines[to.index()];
//!         while let Some((header, payload)) = stream.front() {
//!             match machine.handle_frame(lane.from, header) {
//!                 Verdict::Later | Verdict::Early => break,
//!                 Verdict::Drop => {}
//!                 Verdict::Take(take) => drop(machine.handle_taken(take, payload)),
//!             }
//!             stream.pop_front();
//!             moved = true;
//!         }
//!     }
//! }
//! for machine in &mut machines {
//!     let Some(MachineEvent::Ended { end: Ok(sum), .. }) = machine.poll_event() else { panic!() };
//!     assert_eq!(sum, 111u32.to_le_bytes().repeat(1000));
//! }
//! ```
//!
//! A driver for a network that can fail also feeds the machine notices, lost peers and the time;
//! the shortest one is `farwire-sim`.
//!
//! Words used throughout: a *block* or *shard* is what a rank owns of a vector, a *segment* is what
//! one frame carries, a *lane* is the ordered frames of one operation between two ranks, a *slot*
//! is where a partial result waits to be sent on.

#![forbid(unsafe_code)]

#[cfg(target_endian = "big")]
compile_error!("farwire sends memory as it is, and its wire format is little-endian");

mod arith;
mod call;
mod collective;
mod dtype;
mod engine;
mod fault;
mod fingerprint;
mod header;
mod ids;
mod machine;
pub mod membership;
mod parcels;
mod partition;
mod placement;
mod plan;
mod schedule;
mod short;
mod spare;
pub mod team;
pub mod tune;
mod workspace;

pub use call::{Algorithm, CallError, Options};
pub use collective::{Call, Kind};
pub use dtype::{DType, Element, ReduceOp, UnknownName, types};
pub use engine::{
    Allowance, Config, Effect, Engine, Event, Lane, OpenError, Payload, Take, Transmit, Verdict,
    Wait,
};
pub use fault::{Called, Fault, OpError};
pub use fingerprint::Fingerprint;
pub use header::{FAULT_LEN, FrameKind, HEADER_LEN, Header, HeaderError, VERSION};
pub use ids::{CommId, Epoch, OpId, OpSeq, Peer, Rank, Tag, Time, WorldSize};
pub use machine::{
    Buffers, Coding, CodingWork, Failure, Input, Machine, MachineEvent, Nonsense, Outbound,
    Refusal, Refused, Rounds,
};
pub use parcels::ParcelPart;
pub use partition::{Counts, Partition, Span};
pub use placement::{Placement, Seat, SumOrder};
pub use plan::{Frames, Plan, Tuning};
pub use schedule::{
    Action, Emit, Fold, Gate, InPlace, Incoming, Level, Mine, Outcome, Outgoing, Own, Running,
    Source,
};
pub use spare::Spare;
pub use team::Team;
pub use workspace::Workspace;
