//! [Candle](candle_core) as a tensor library to train with, and parallelism for candle models.
//!
//! - Data parallel: [`DataParallel`], for your own model.
//! - Tensor parallel: [`ColumnParallelLinear`], [`RowParallelLinear`], [`ParallelEmbedding`]. Their
//!   collectives are part of forward and backward.
//! - All at once, pipelines included: [`Candle`], with which a [`Trainer`](farwire_train::Trainer)
//!   trains its GPT; on NVIDIA cards `CandleCuda`, with the feature `cuda`.
//!
//! ```text
//!  gpt       layers of the model        ─▶ parallel   linear layers over a group of ranks
//!  stage     backward, piece by piece   ─▶ collective operations inside autograd
//! ```

#![cfg_attr(not(feature = "cuda"), forbid(unsafe_code))]
#![deny(unsafe_code)]

mod collective;
#[cfg(feature = "cuda")]
mod cuda;
mod data_parallel;
mod gpt;
mod parallel;
mod params;
mod stage;

use farwire_train::{Library, LibraryResult, StageSpec};

// Signatures here name their types.
pub use {candle_core, farwire, farwire_train};

#[cfg(feature = "cuda")]
pub use cuda::CandleCuda;
pub use data_parallel::DataParallel;
pub use parallel::{ColumnParallelLinear, ParallelEmbedding, RowParallelLinear};
pub use params::{Param, Params};
pub use stage::{Loss, Segment, Stage};

/// Candle, on the CPU.
#[derive(Clone, Copy, Debug, Default)]
pub struct Candle;

impl Library for Candle {
    fn stage(&self, spec: StageSpec<'_>) -> LibraryResult<Box<dyn farwire_train::Stage>> {
        let mut params = Params::new(spec.start, spec.group);
        Ok(Box::new(gpt::stage(&mut params, spec.model, spec.stage, spec.stages)?))
    }
}
