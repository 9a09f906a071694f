//! What training asks of a tensor library: two traits, implemented in a crate per library.
//!
//! ```text
//!  Library   makes the stages of a model
//!  Stage     forward, backward, and its weights by name, as plain vectors
//! ```
//!
//! Everything else is in this crate: data, schedules, the exchange, AdamW, checkpoints. Data cross
//! this boundary as f32 and u32 in row-major order; where a library keeps its tensors is its own
//! affair. A library that keeps them on a card says so ([`Library::memory`]). Gradients and weights
//! then stay there, and only messages and the data that pass between stages come to the host.

use std::fmt;
use std::time::Instant;

use crate::corpus::Batch;
use crate::gpt::Config;
use crate::group::Group;
use crate::memory::{Memory, Values};
use crate::param::{Param, Start};

/// An error of a library.
pub type LibraryError = Box<dyn std::error::Error + Send + Sync>;

/// The result of a call into a library.
pub type LibraryResult<T> = Result<T, LibraryError>;

/// Takes a parameter's gradient, by name, as soon as it is computed.
pub type Sink<'a> = dyn FnMut(&str, Values<'_>) -> LibraryResult<()> + 'a;

/// A tensor library.
pub trait Library {
    /// Makes a stage of a GPT.
    fn stage(&self, spec: StageSpec<'_>) -> LibraryResult<Box<dyn Stage>>;

    /// Where its stages keep their gradients and weights.
    fn memory(&self) -> Memory {
        Memory::Host
    }
}

/// Which stage of which model to make.
#[derive(Debug)]
pub struct StageSpec<'a> {
    /// The model's sizes.
    pub model: Config,
    /// Which of the `stages` equal parts of it, from 0.
    pub stage: usize,
    /// How many parts there are.
    pub stages: usize,
    /// Where each parameter's first value comes from.
    pub start: Start,
    /// The ranks that share each layer.
    pub group: &'a Group,
}

/// Consecutive layers of a model, and what their backward still needs of each micro-batch.
pub trait Stage: fmt::Debug + Send {
    /// Its parameters, in the order in which backward computes their gradients.
    fn params(&self) -> Vec<Param>;

    /// This rank's share of a parameter.
    fn weights(&self, name: &str) -> LibraryResult<Vec<f32>>;

    /// Sets this rank's share of a parameter, which has as many elements as before.
    fn set_weights(&mut self, name: &str, weights: &[f32]) -> LibraryResult<()>;

    /// This rank's share of a parameter where it is, on the card of [`Library::memory`], to be
    /// updated in place.
    #[cfg(feature = "cuda")]
    fn weights_on_card(&mut self, name: &str) -> LibraryResult<farwire_cuda::DeviceTensor> {
        Err(format!("`{name}` is not on a card").into())
    }

    /// Runs a micro-batch forward, and remembers what its backward needs. Returns the output, or,
    /// with `targets`, which only a model's last stage gets, the mean loss as one element.
    fn forward(
        &mut self,
        micro: usize,
        input: Input<'_>,
        targets: Option<&[u32]>,
    ) -> LibraryResult<Vec<f32>>;

    /// Runs a micro-batch backward: takes the gradient of what forward returned, and returns that
    /// of its input, or `None` for tokens. Gives every parameter's gradient to `sink`, best while
    /// it still computes the next.
    fn backward(
        &mut self,
        micro: usize,
        gradient: Vec<f32>,
        sink: &mut Sink<'_>,
    ) -> LibraryResult<Option<Vec<f32>>>;

    /// When the backward of each part began and ended, since the last call: for a report.
    fn take_trace(&mut self) -> Vec<(String, Instant, Instant)> {
        Vec::new()
    }
}

/// What a stage works on.
#[derive(Debug)]
pub enum Input<'a> {
    /// The inputs of this batch, `[sequences, tokens]`: for the first stage.
    Tokens(&'a Batch),
    /// The output of the stage before, `[sequences, context, width]`.
    Hidden(Vec<f32>),
}
