//! The parts of parallel training that do not depend on a tensor library.
//!
//! Gradients enter as plain vectors, named after their parameters, in host memory or on a card
//! ([`Memory`]). They leave as means over all replicas. Read the crate in this order:
//!
//! - [`Mesh`]: named axes over a communicator, such as `dp` × `tp` × `pp`.
//! - [`ParameterList`]: the model's parameters; ranks compare their lists at the start.
//! - [`Exchange`]: collects gradients in buckets, which are reduced while backward still runs. How
//!   is up to a [`Reducer`]; [`Compressed`] uses a codec, which [`PhaseIn`] phases in.
//! - [`NotFinite`]: which rank had a NaN, and in which gradient.
//! - [`global_norm`]: the norm of a gradient that is spread over many ranks.
//! - [`Schedule`]: when a pipeline stage works on which micro-batch, as a list of actions.
//!   [`simulate()`] runs such lists in virtual time, [`Pipeline`] runs them with messages.
//! - [`Rules`]: settings by parameter name (`*.bias`).
//! - [`Trainer`]: all of it together, with [`Settings`], [`AdamW`], [`Batches`] of text, and
//!   [checkpoints](Checkpoint).
//!
//! A tensor library takes part through two traits, [`Library`] and [`Stage`], which a crate of its
//! own implements. To train your own model with your own optimizer, use [`Replicas`].

#![forbid(unsafe_code)]

// For the one-page tensor library in `tests/common`, which unit tests use too.
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

// Signatures here name its types.
pub use farwire;

/// Reads arbitrary bytes as another rank's messages in training. For fuzzing.
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
