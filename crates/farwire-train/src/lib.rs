//! What training in parallel needs and no tensor library has to know of.
//!
//! Gradients enter here as plain vectors with a parameter's name, in host memory or on a card
//! ([`Memory`]), and leave as the mean over all replicas. Read it in this order:
//!
//! - [`Mesh`]: named axes over a communicator, such as `dp` × `tp` × `pp`.
//! - [`ParameterList`]: which parameters there are, compared between ranks at the start.
//! - [`Exchange`]: gradients become buckets, and buckets are reduced while backward still runs.
//!   [`Reducer`] is the one place that knows how, [`Compressed`] does it through a codec, which
//!   [`PhaseIn`] lets begin gently.
//! - [`NotFinite`]: which rank had a NaN, and in which gradient.
//! - [`global_norm`]: one number for a gradient that lies on many ranks.
//! - [`Schedule`]: which micro-batch a pipeline stage works on when, as a list of actions;
//!   [`simulate()`] runs such lists in virtual time, [`Pipeline`] over messages.
//! - [`Rules`]: settings by parameter name (`*.bias`).
//! - [`Trainer`]: all of it together, with [`Settings`], [`AdamW`], [`Batches`] of text, and
//!   [checkpoints](Checkpoint).
//!
//! A tensor library is a [`Library`]: a crate of its own, which implements two traits. For a model
//! and an optimizer of one's own there are [`Replicas`].

#![forbid(unsafe_code)]

// For the library of one page that unit tests and others share.
#[cfg(test)]
extern crate self as farwire_train;

mod adamw;
mod carry;
mod checkpoint;
mod compressed;
mod corpus;
mod elastic;
mod error;
mod exchange;
mod finite;
pub mod gpt;
mod group;
mod library;
mod memory;
mod mesh;
mod norm;
mod param;
mod parameter_list;
mod phase_in;
mod pipeline;
mod replicas;
mod report;
mod rules;
mod schedule;
mod seats;
mod settings;
mod simulate;
mod text;
mod trainer;

// What signatures here name.
pub use farwire;

/// Reads any bytes as what another rank says in training. For fuzzing.
#[doc(hidden)]
pub fn read_anything(bytes: &[u8]) {
    carry::read_anything(bytes);
    finite::read_anything(bytes);
    elastic::read_anything(bytes);
}

pub use adamw::{AdamW, Gradient, Moments};
pub use carry::tell;
pub use checkpoint::{Checkpoint, checkpoint_of, sha256};
pub use compressed::{Compressed, DENSE_BELOW};
pub use corpus::{Batch, Batches, embedded};
pub use error::{SAID, TrainError};
pub use exchange::{
    Bucket, DENSE, Dense, Exchange, ExchangeError, Ledger, Part, Reducer, Span, Summary,
};
pub use finite::{BadElement, Cause, NotFinite};
pub use group::Group;
pub use library::{Input, Library, LibraryError, LibraryResult, Sink, Stage, StageSpec};
#[cfg(feature = "cuda")]
pub use memory::CardMean;
pub use memory::{Mean, Memory, Values};
pub use mesh::{Mesh, MeshError};
pub use norm::{Squares, global_norm};
pub use param::{Array, Arrays, Cut, Init, Param, Start, read_safetensors, write_safetensors};
pub use parameter_list::{Entry, ParameterList, ParameterListError};
pub use phase_in::PhaseIn;
pub use pipeline::{Flow, Pipeline};
pub use replicas::Replicas;
pub use report::{StepReport, Times};
pub use rules::{Rules, matches};
pub use schedule::{Action, Schedule, ScheduleError, Unit, Work};
pub use settings::{OnNan, Settings};
pub use simulate::{Costs, Deadlock, Timeline, simulate};
pub use trainer::Trainer;
