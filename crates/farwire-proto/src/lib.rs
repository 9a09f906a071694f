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
