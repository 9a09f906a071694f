//! Backward, piece by piece.
//!
//! Candle runs backward in one go and hands out all gradients at the end: too late to send any
//! while others are still being computed. So a model is a list of *segments*. Forward gives each
//! segment its input as a fresh variable, which cuts the graph there; backward goes from the last
//! segment to the first, and passes on the gradient that each segment's input got. After each
//! segment its parameters' gradients are ready to travel.

use std::collections::HashMap;
use std::fmt;
use std::time::Instant;

use candle_core::{Device, Result, Tensor, Var};
use farwire_train::{Input, LibraryResult, Sink, TrainError};

#[cfg(feature = "cuda")]
use crate::cuda::Card;
use crate::params::{Param, set, values};

/// Computes the loss, a scalar, from a model's output and the targets, one per token.
pub type Loss = fn(&Tensor, &Tensor) -> Result<Tensor>;

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

    /// Its output for `x`.
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        (self.forward)(x)
    }
}

impl fmt::Debug for Segment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Segment").field("name", &self.name).finish_non_exhaustive()
    }
}

/// Consecutive segments, and what their backward still needs of each micro-batch.
#[derive(Debug)]
pub struct Stage {
    segments: Vec<Segment>,
    /// The shape of what passes between stages, without the first dimension, that of sequences.
    hidden: Vec<usize>,
    loss: Loss,
    held: HashMap<usize, Vec<Held>>,
    trace: Vec<(String, Instant, Instant)>,
    /// The card on which gradients are handed over, if not in host memory.
    #[cfg(feature = "cuda")]
    card: Option<Card>,
}

#[derive(Debug)]
struct Held {
    /// `None` for indices, which have no gradient.
    input: Option<Var>,
    output: Tensor,
}

impl Stage {
    /// A stage. Its input from the stage before is `[sequences, hidden…]`; the last stage of a
    /// model ends with the loss.
    pub fn new(segments: Vec<Segment>, hidden: &[usize], loss: Loss) -> Self {
        Self {
            segments,
            hidden: hidden.to_vec(),
            loss,
            held: HashMap::new(),
            trace: Vec::new(),
            #[cfg(feature = "cuda")]
            card: None,
        }
    }

    /// The same, for parameters on `card`, where their gradients stay.
    #[cfg(feature = "cuda")]
    pub(crate) fn on(self, card: Card) -> Self {
        Self { card: Some(card), ..self }
    }

    /// Where its parameters are.
    fn device(&self) -> Device {
        self.vars().next().map_or(Device::Cpu, |param| param.var.device().clone())
    }

    /// Its parameters, in the order in which backward computes their gradients.
    pub fn vars(&self) -> impl Iterator<Item = &Param> {
        self.segments.iter().rev().flat_map(|segment| segment.params.iter().rev())
    }

    fn var(&self, name: &str) -> LibraryResult<&Var> {
        let param = self.vars().find(|param| param.name == name);
        Ok(&param.ok_or_else(|| format!("there is no parameter `{name}`"))?.var)
    }
}

impl farwire_train::Stage for Stage {
    fn params(&self) -> Vec<farwire_train::Param> {
        self.vars()
            .map(|Param { name, var, cut }| farwire_train::Param {
                name: name.clone(),
                shape: var.dims().to_vec(),
                cut: *cut,
            })
            .collect()
    }

    fn weights(&self, name: &str) -> LibraryResult<Vec<f32>> {
        Ok(values(self.var(name)?)?)
    }

    fn set_weights(&mut self, name: &str, weights: &[f32]) -> LibraryResult<()> {
        Ok(set(self.var(name)?, weights)?)
    }

    #[cfg(feature = "cuda")]
    fn weights_on_card(&mut self, name: &str) -> LibraryResult<farwire_cuda::DeviceTensor> {
        let card = self.card.as_ref().ok_or_else(|| format!("`{name}` is not on a card"))?;
        Ok(card.weights(self.var(name)?)?)
    }

    fn forward(
        &mut self,
        micro: usize,
        input: Input<'_>,
        targets: Option<&[u32]>,
    ) -> LibraryResult<Vec<f32>> {
        let device = self.device();
        let mut x = match input {
            Input::Tokens(batch) => {
                let shape = (batch.sequences, batch.inputs.len() / batch.sequences.max(1));
                Tensor::from_slice(&batch.inputs, shape, &device)?
            }
            Input::Hidden(data) => {
                let sequences = data.len() / self.hidden.iter().product::<usize>().max(1);
                Tensor::from_vec(data, [&[sequences], &self.hidden[..]].concat(), &device)?
            }
        };
        let mut held = Vec::with_capacity(self.segments.len());
        for (index, segment) in self.segments.iter().enumerate() {
            let input = if x.dtype().is_float() { Some(Var::from_tensor(&x)?) } else { None };
            let mut output = segment.forward(input.as_ref().map_or(&x, Var::as_tensor))?;
            if let (Some(targets), true) = (targets, index + 1 == self.segments.len()) {
                let targets = Tensor::from_slice(targets, targets.len(), &device)?;
                output = (self.loss)(&output, &targets)?;
            }
            x = output.detach();
            held.push(Held { input, output });
        }
        self.held.insert(micro, held);
        Ok(values(&x)?)
    }

    fn backward(
        &mut self,
        micro: usize,
        gradient: Vec<f32>,
        sink: &mut Sink<'_>,
    ) -> LibraryResult<Option<Vec<f32>>> {
        let held = self.held.remove(&micro).filter(|held| !held.is_empty());
        let held = held.ok_or_else(|| {
            format!("micro-batch {micro} cannot go back before it has gone forward")
        })?;
        let shape = held.last().map_or(&[][..], |last| last.output.dims());
        let mut gradient = Some(Tensor::from_vec(gradient, shape, &self.device())?);
        #[cfg(feature = "cuda")]
        let mut launched = None;
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
            let params = segment.params.iter().rev();
            let mut found = params.map(|Param { name, var, .. }| {
                let found = gradients.remove(var);
                Ok((&name[..], found.ok_or_else(|| TrainError::NoGradient(name.clone()))?))
            });
            #[cfg(feature = "cuda")]
            if let Some(card) = &self.card {
                let next = card.launched(found.collect::<LibraryResult<_>>()?)?;
                if let Some(before) = launched.replace(next) {
                    before.hand_over(sink)?;
                }
                continue;
            }
            found.try_for_each(|found: LibraryResult<(&str, Tensor)>| {
                let (name, found) = found?;
                sink(name, (&values(&found)?).into())
            })?;
        }
        #[cfg(feature = "cuda")]
        if let Some(last) = launched {
            last.hand_over(sink)?;
        }
        Ok(gradient.as_ref().map(values).transpose()?)
    }

    fn take_trace(&mut self) -> Vec<(String, Instant, Instant)> {
        std::mem::take(&mut self.trace)
    }
}

fn no_gradient(segment: &Segment, what: &str) -> TrainError {
    TrainError::NoGradient(format!("{} of {}", what, segment.name))
}
