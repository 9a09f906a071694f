//! Training candle models in parallel.
//!
//! - Tensor parallel: [`ColumnParallelLinear`], [`RowParallelLinear`], [`ParallelEmbedding`]. Their collectives are part of forward and backward.
//! - Data parallel: [`DataParallel`] for a model of one's own.
//! - All at once, pipelines included: [`Trainer`], which trains the [`gpt`] of this crate.
//!
//! ```text
//!  gpt       layers of the model        ─▶ parallel   linear layers over a group of ranks
//!  stage     backward, piece by piece   ─▶ collective operations inside autograd
//!  pipeline  runs a schedule's actions
//!  trainer   one step: batch, pipeline, exchange, clip, AdamW
//! ```

#![forbid(unsafe_code)]

mod adamw;
mod checkpoint;
mod collective;
mod corpus;
mod data_parallel;
mod error;
pub mod gpt;
mod parallel;
mod params;
mod pipeline;
mod stage;
mod text;
mod trainer;

// What signatures here name.
pub use {candle_core, farwire, farwire_train};

pub use adamw::{AdamW, Gradient, Moments};
pub use checkpoint::Checkpoint;
pub use collective::Group;
pub use corpus::{Batch, Batches, embedded};
pub use data_parallel::DataParallel;
pub use error::TrainError;
pub use parallel::{ColumnParallelLinear, ParallelEmbedding, RowParallelLinear};
pub use params::{Cut, Init, Param, Params};
pub use pipeline::{Flow, Pipeline};
pub use stage::{Loss, Segment, Stage};
pub use trainer::{OnNan, Settings, StepReport, Times, Trainer};
