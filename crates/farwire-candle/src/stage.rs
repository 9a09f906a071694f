//! Backward, piece by piece.
//!
//! Candle runs backward in one go and hands out all gradients at the end: too late to send any while others are still being computed. So a model is a list of
//! *segments*. Forward gives each segment its input as a fresh variable, which cuts the graph there; backward goes from the last segment to the first, and passes on
//! the gradient that each segment's input got. After each segment its parameters' gradients are ready to travel.

use std::collections::HashMap;
use std::fmt;
use std::time::Instant;

use candle_core::{Result, Tensor, Var};

use crate::error::TrainError;
use crate::params::Param;

/// From a micro-batch's index and the model's output to the loss, a scalar.
pub type Loss<'a> = dyn Fn(usize, &Tensor) -> Result<Tensor> + 'a;

/// A piece of a model: a function of one tensor, and its parameters.
pub struct Segment {
    name: String,
    params: Vec<Param>,
    forward: Box<Forward>,
}

type Forward = dyn Fn(&Tensor) -> Result<Tensor> + Send;

impl Segment {
    /// A segment. Every one of `params` must take part in `forward`.
    pub fn new(
        name: impl Into<String>,
        params: Vec<Param>,
        forward: impl Fn(&Tensor) -> Result<Tensor> + Send + 'static,
    ) -> Self {
        Self { name: name.into(), params, forward: Box::new(forward) }
    }

    /// Its parameters.
    pub fn params(&self) -> &[Param] {
        &self.params
    }

    /// Its output.
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        (self.forward)(x)
    }
}

impl fmt::Debug for Segment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Segment").field("name", &self.name).finish_non_exhaustive()
    }
}

/// Consecutive segments, and what backward still needs of each micro-batch.
#[derive(Debug)]
pub struct Stage {
    segments: Vec<Segment>,
    held: HashMap<usize, Vec<Held>>,
    trace: Vec<(String, Instant, Instant)>,
}

#[derive(Debug)]
struct Held {
    /// None for indices, which have no gradient.
    input: Option<Var>,
    output: Tensor,
}

impl Stage {
    /// A stage.
    pub fn new(segments: Vec<Segment>) -> Self {
        Self { segments, held: HashMap::new(), trace: Vec::new() }
    }

    /// Its segments, from input to output.
    pub fn segments(&self) -> &[Segment] {
        &self.segments
    }

    /// Its parameters in the order in which backward brings their gradients.
    pub fn backward_order(&self) -> impl Iterator<Item = &Param> {
        self.segments.iter().rev().flat_map(|segment| segment.params.iter().rev())
    }

    /// Runs a micro-batch through; the last stage of a model ends with the loss.
    pub fn forward(&mut self, micro: usize, x: &Tensor, loss: Option<&Loss<'_>>) -> Result<Tensor> {
        let mut held = Vec::with_capacity(self.segments.len());
        let mut x = x.detach();
        for (index, segment) in self.segments.iter().enumerate() {
            let input = if x.dtype().is_float() { Some(Var::from_tensor(&x)?) } else { None };
            let mut output = segment.forward(input.as_ref().map_or(&x, Var::as_tensor))?;
            if let (Some(loss), true) = (loss, index + 1 == self.segments.len()) {
                output = loss(micro, &output)?;
            }
            x = output.detach();
            held.push(Held { input, output });
        }
        self.held.insert(micro, held);
        Ok(x)
    }

    /// Runs a micro-batch back, from the gradient of the output to that of the input, if it has one. Gives each parameter's gradient to `sink` as soon as it is there.
    pub fn backward(
        &mut self,
        micro: usize,
        gradient: &Tensor,
        sink: &mut dyn FnMut(&Param, &Tensor) -> std::result::Result<(), TrainError>,
    ) -> std::result::Result<Option<Tensor>, TrainError> {
        let held = self.held.remove(&micro);
        let held = held.ok_or_else(|| {
            TrainError::Settings(format!("micro-batch {micro} cannot go back before it has gone forward"))
        })?;
        let mut gradient = Some(gradient.clone());
        for (segment, Held { input, output }) in self.segments.iter().zip(held).rev() {
            let begun = Instant::now();
            let from = gradient.take().ok_or_else(|| no_gradient(segment, "output"))?;
            let mut gradients = (&output * &from)?.sum_all()?.backward()?;
            gradient = match &input {
                Some(input) => {
                    let found = gradients.remove(input);
                    Some(found.ok_or_else(|| no_gradient(segment, "input"))?)
                }
                None => None,
            };
            self.trace.push((segment.name.clone(), begun, Instant::now()));
            for param in segment.params.iter().rev() {
                let found = gradients.remove(&param.var);
                sink(param, &found.ok_or_else(|| TrainError::NoGradient(param.name.clone()))?)?;
            }
        }
        Ok(gradient)
    }

    /// Which segment's backward ran from when to when, since this was last called.
    pub fn take_trace(&mut self) -> Vec<(String, Instant, Instant)> {
        std::mem::take(&mut self.trace)
    }
}

fn no_gradient(segment: &Segment, what: &str) -> TrainError {
    TrainError::NoGradient(format!("{} of {}", what, segment.name))
}
