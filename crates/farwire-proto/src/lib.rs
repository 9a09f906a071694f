//! Every collective as a sans-IO state machine.
//!
//! This crate decides; it never does IO, reads a clock, spawns a task or touches memory unsafely. A driver (the runtime, or
//! `farwire-sim`) feeds it calls, frame headers and the time, and does what it says.
//!
//! The path of an operation through the crate:
//!
//! 1. A [`Call`] says what the user wants. [`Plan::new`] checks it, lets [`tune`] pick an [`Algorithm`], and lays out a schedule:
//!    for each *lane* to another rank the frames in and out, and for each frame the [`Gate`] it waits for. There is one file per
//!    collective in `collective/`.
//! 2. [`Engine::submit`] starts it. From then on the engine hands out frames to send, says what to do with those that arrive,
//!    compares [`Fingerprint`]s, and spreads the news of any [`Fault`].
//! 3. A [`Workspace`] does the arithmetic on the driver's buffers.
//!
//! A driver for ranks whose network is a queue per lane, and where nothing goes wrong:
//!
//! ```
//! use std::collections::{BTreeMap, VecDeque};
//!
//! use farwire_proto::*;
//!
//! let ranks = 3;
//! let world = WorldSize::new(ranks).unwrap();
//! let call = Call::AllReduce { count: 1000, dtype: DType::U32, op: ReduceOp::Sum };
//! let options = Options { segment: std::num::NonZeroUsize::new(10), ..Options::default() };
//! let mut streams: BTreeMap<(Peer, Lane), VecDeque<(Header, Vec<u8>)>> = BTreeMap::new();
//! let (mut engines, mut works, mut inputs, mut outputs) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
//!
//! for rank in 0..ranks {
//!     let mut engine = Engine::new(Peer(rank), world, Config::default());
//!     let plan = engine.plan(CommId::WORLD, &call, &options).unwrap();
//!     let input = 10u32.pow(rank).to_le_bytes().repeat(1000);
//!     let (mut work, mut output) = (Workspace::new(&plan), vec![0; plan.output_bytes()]);
//!     work.begin(&input, &mut output);
//!     engine.submit(Time::ZERO, plan).unwrap();
//!     (engines.push(engine), works.push(work), inputs.push(input), outputs.push(output));
//! }
//! let mut moved = true;
//! while std::mem::take(&mut moved) {
//!     for me in 0..ranks as usize {
//!         while let Some(frame) = engines[me].poll_transmit() {
//!             let Payload::Operation { source, .. } = &frame.payload else { panic!("something went wrong") };
//!             let bytes = works[me].payload(source, &inputs[me], &outputs[me]).to_vec();
//!             let lane = Lane::of(Peer(me as u32), &frame.header);
//!             streams.entry((frame.to, lane)).or_default().push_back((frame.header, bytes));
//!             engines[me].handle_sent(frame);
//!         }
//!     }
//!     // A frame that has to wait stays at the head of its stream; the other streams go on.
//!     for ((to, lane), stream) in &mut streams {
//!         let to = to.index();
//!         while let Some((header, bytes)) = stream.front() {
//!             match engines[to].handle_frame(lane.from, header) {
//!                 Verdict::Later | Verdict::Early => break,
//!                 Verdict::Drop => {}
//!                 Verdict::Take(take) => {
//!                     let Effect::Apply(action) = &take.effect else { panic!("there are no parcels") };
//!                     works[to].apply(action, bytes, &inputs[to], &mut outputs[to]);
//!                     engines[to].handle_taken(take);
//!                 }
//!             }
//!             stream.pop_front();
//!             moved = true;
//!         }
//!     }
//! }
//! for (engine, output) in engines.iter_mut().zip(&outputs) {
//!     assert!(matches!(engine.poll_event(), Some(Event::Done(_))));
//!     assert_eq!(*output, 111u32.to_le_bytes().repeat(1000));
//! }
//! ```
//!
//! One for a network where things do go wrong also feeds the engine notices, lost peers and the time; `farwire-sim` is the shortest.
//!
//! Words used throughout: a *block* or *shard* is what a rank owns of a vector, a *segment* is what one frame carries, a *lane* is the
//! ordered frames of one operation between two ranks, a *slot* is where a partial result waits to be sent on.

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
mod parcels;
mod partition;
mod plan;
mod schedule;
pub mod tune;
mod workspace;

pub use call::{Algorithm, Call, CallError, Kind, Options};
pub use dtype::{DType, Element, ReduceOp, UnknownName};
pub use engine::{
    Allowance, Config, Effect, Engine, Event, Lane, OpenError, Payload, Take, Transmit, Verdict, Wait,
};
pub use fault::{Called, FAULT_LEN, Fault, OpError};
pub use fingerprint::Fingerprint;
pub use header::{FrameKind, HEADER_LEN, Header, HeaderError, VERSION};
pub use ids::{CommId, Epoch, OpId, OpSeq, Peer, Rank, Tag, Time, WorldSize};
pub use machine::{
    Buffers, Coding, CodingWork, Failure, Input, Machine, MachineEvent, Nonsense, Outbound, Refusal, Refused,
    Rounds,
};
pub use parcels::{ParcelPart, Parcels};
pub use partition::{Counts, Partition, Span};
pub use plan::{Frames, Plan, Tuning};
pub use schedule::{Action, Emit, Fold, Gate, InPlace, Incoming, Outcome, Outgoing, Own, Running, Source};
pub use workspace::Workspace;
