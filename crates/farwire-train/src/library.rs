//! What training asks of a tensor library: two traits, which a crate per library implements.
//!
//! ```text
//!  Library   makes the stages of a model
//!  Stage     forward, backward, and its weights by name, as plain vectors
//! ```
//!
//! Everything else is in this crate: data, schedules, the exchange, AdamW, checkpoints. What
//! crosses this line is f32 and u32 in row-major order; where a library keeps its tensors is its
//! own affair.

use std::fmt;
use std::time::Instant;

use crate::corpus::Batch;
use crate::gpt::Config;
use crate::group::Group;
use crate::param::{Param, Start};

/// Whatever a library has to say when it fails.
pub type LibraryError = Box<dyn std::error::Error + Send + Sync>;

/// Takes a parameter's gradient, by name, as soon as it is there.
pub type Sink<'a> = dyn FnMut(&str, &[f32]) -> Result<(), LibraryError> + 'a;

/// A tensor library.
pub trait Library {
    /// Number `stage` of `stages` equal parts of a GPT, whose layers the ranks of `group` share.
    /// Its parameters are what `start` gives for their names.
    fn stage(
        &self,
        model: Config,
        stage: usize,
        stages: usize,
        start: Start,
        group: &Group,
    ) -> Result<Box<dyn Stage>, LibraryError>;
}

/// Consecutive layers of a model, and what backward still needs of each micro-batch.
pub trait Stage: fmt::Debug + Send {
    /// Its parameters, in the order in which backward brings their gradients.
    fn params(&self) -> Vec<Param>;

    /// This rank's share of a parameter.
    fn weights(&self, name: &str) -> Result<Vec<f32>, LibraryError>;

    /// Sets this rank's share of a parameter, which has as many elements as before.
    fn set_weights(&mut self, name: &str, weights: &[f32]) -> Result<(), LibraryError>;

    /// Runs a micro-batch through, and remembers what its backward needs. Gives the output; with
    /// `targets`, which only a model's last stage gets, the mean loss, as one element.
    fn forward(
        &mut self,
        micro: usize,
        input: Input<'_>,
        targets: Option<&[u32]>,
    ) -> Result<Vec<f32>, LibraryError>;

    /// Runs a micro-batch back, from the gradient of what forward gave to that of its input; none
    /// for tokens. Gives every parameter's gradient to `sink`, best while it still computes the
    /// next.
    fn backward(
        &mut self,
        micro: usize,
        gradient: Vec<f32>,
        sink: &mut Sink<'_>,
    ) -> Result<Option<Vec<f32>>, LibraryError>;

    /// Which part's backward ran from when to when, since this was last called: for a report.
    fn take_trace(&mut self) -> Vec<(String, Instant, Instant)> {
        Vec::new()
    }
}

/// What a stage works on.
#[derive(Debug)]
pub enum Input<'a> {
    /// The inputs of this batch, `[sequences, tokens]`: for the first stage.
    Tokens(&'a Batch),
    /// What the stage before gave, `[sequences, context, width]`.
    Hidden(Vec<f32>),
}
