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
//! A complete driver, for two ranks whose network is a queue:
//!
//! ```
//! use std::collections::VecDeque;
//!
//! use farwire_proto::*;
//!
//! let world = WorldSize::new(2).unwrap();
//! let call = Call::AllReduce { count: 3, dtype: DType::F32, op: ReduceOp::Sum };
//! let mut network = VecDeque::new();
//! let (mut engines, mut works, mut outputs) = (Vec::new(), Vec::new(), Vec::new());
//! let inputs = [[1.0f32, 2.0, 3.0], [10.0, 20.0, 30.0]].map(|x| bytemuck::cast_slice::<_, u8>(&x).to_vec());
//!
//! for rank in 0..2 {
//!     let mut engine = Engine::new(Peer(rank), world, Config::default());
//!     let plan = engine.plan(CommId::WORLD, &call, &Options::default()).unwrap();
//!     let mut work = Workspace::new(&plan);
//!     let mut output = vec![0; plan.output_bytes()];
//!     work.begin(&inputs[rank as usize], &mut output);
//!     engine.submit(Time::ZERO, plan).unwrap();
//!     (engines.push(engine), works.push(work), outputs.push(output));
//! }
//! loop {
//!     for rank in 0..2 {
//!         while let Some(frame) = engines[rank].poll_transmit() {
//!             if let Payload::Operation { source, .. } = &frame.payload {
//!                 let bytes = works[rank].payload(source, &inputs[rank], &outputs[rank]).to_vec();
//!                 network.push_back((Peer(rank as u32), frame.to, frame.header, bytes));
//!             }
//!             engines[rank].handle_sent(frame);
//!         }
//!     }
//!     let Some((from, to, header, bytes)) = network.pop_front() else { break };
//!     match engines[to.index()].handle_frame(from, &header) {
//!         Verdict::Take(take) => {
//!             works[to.index()].apply(&take.action, &bytes, &inputs[to.index()], &mut outputs[to.index()]);
//!             engines[to.index()].handle_taken(take);
//!         }
//!         Verdict::Later => network.push_back((from, to, header, bytes)),
//!         Verdict::Drop => {}
//!     }
//! }
//! for (engine, output) in engines.iter_mut().zip(&outputs) {
//!     assert!(matches!(engine.poll_event(), Some(Event::Done(_))));
//!     assert_eq!(output, bytemuck::cast_slice::<f32, u8>(&[11.0, 22.0, 33.0]));
//! }
//! ```
//!
//! Words used throughout: a *block* or *shard* is what a rank owns of a vector, a *segment* is what one frame carries, a *lane* is the
//! ordered frames of one operation between two ranks, a *slot* is where a partial result waits to be sent on.

#![forbid(unsafe_code)]

/// The code in the README compiles and runs.
#[cfg(doctest)]
#[doc = include_str!("../../../README.md")]
struct Readme;

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
mod partition;
mod plan;
mod schedule;
pub mod tune;
mod workspace;

pub use call::{Algorithm, Call, CallError, Kind, Options};
pub use dtype::{DType, Element, ReduceOp, UnknownName};
pub use engine::{Config, Engine, Event, Lane, OpenError, Payload, Take, Transmit, Verdict, Wait};
pub use fault::{Called, FAULT_LEN, Fault, OpError};
pub use fingerprint::Fingerprint;
pub use header::{FrameKind, HEADER_LEN, Header, HeaderError, VERSION};
pub use ids::{CommId, Epoch, OpId, Peer, Rank, Slot, Tag, Time, WorldSize};
pub use partition::{Counts, Partition, Span};
pub use plan::{Plan, Tuning};
pub use schedule::{
    Action, Emit, Fold, Gate, Incoming, Local, Outcome, Outgoing, Own, Running, Slots, Source,
};
pub use workspace::Workspace;
