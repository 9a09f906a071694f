//! The model that is trained: its sizes, and writing text with it. Neither depends on a particular
//! tensor library.

use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use serde::{Deserialize, Serialize};

use crate::corpus::Batch;
use crate::error::TrainError;
use crate::group::Group;
use crate::library::{Input, Library, Stage, StageSpec};
use crate::param::{Arrays, Start};

/// Tokens are bytes.
pub const VOCABULARY: usize = 256;

/// Sizes of the model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Config {
    /// Blocks.
    pub layers: usize,
    /// Heads of each attention.
    pub heads: usize,
    /// Width of what passes between blocks.
    pub width: usize,
    /// Bytes that a prediction can see.
    pub context: usize,
}

impl Default for Config {
    fn default() -> Self {
        Self { layers: 4, heads: 4, width: 128, context: 64 }
    }
}

impl Config {
    /// Fails if the sizes contradict each other or cannot be cut into `tp` × `stages`.
    pub fn check(&self, tp: usize, stages: usize) -> Result<(), TrainError> {
        let Self { layers, heads, width, context } = *self;
        let wrong = |text: String| Err(TrainError::Settings(text));
        if layers == 0 || heads == 0 || width == 0 || context == 0 {
            return wrong("layers, heads, width and context must be at least 1".to_owned());
        }
        if !width.is_multiple_of(heads) {
            return wrong(format!(
                "width {width} is not a multiple of {heads} heads; change one of them"
            ));
        }
        if !heads.is_multiple_of(tp) {
            return wrong(format!(
                "{heads} heads cannot be shared evenly by tp={tp} ranks; use a multiple of {tp} heads"
            ));
        }
        if !VOCABULARY.is_multiple_of(tp) {
            return wrong(format!(
                "{VOCABULARY} tokens cannot be shared evenly by tp={tp} ranks; use a power of two"
            ));
        }
        if !layers.is_multiple_of(stages) {
            return wrong(format!(
                "{layers} layers cannot be cut into {stages} equal stages; use a multiple of {stages} layers"
            ));
        }
        Ok(())
    }
}

/// A whole model on one rank, to write text with.
#[derive(Debug)]
pub struct Writer {
    stage: Box<dyn Stage>,
    config: Config,
}

impl Writer {
    /// A writer with these whole weights.
    pub fn new(library: &dyn Library, weights: Arrays, config: Config) -> Result<Self, TrainError> {
        let (group, start) = (Group::alone(), Start::Given(weights));
        let spec = StageSpec { model: config, stage: 0, stages: 1, start, group: &group };
        Ok(Self { stage: library.stage(spec)?, config })
    }

    /// The prompt, followed by `count` bytes that may come next. A temperature near 0 takes the
    /// likeliest.
    pub fn write(
        &mut self,
        prompt: &str,
        count: usize,
        temperature: f64,
        seed: u64,
    ) -> Result<String, TrainError> {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let mut text: Vec<u8> = prompt.bytes().collect();
        if text.is_empty() {
            text.push(b'\n');
        }
        for _ in 0..count {
            let seen = &text[text.len().saturating_sub(self.config.context)..];
            let inputs = seen.iter().map(|byte| u32::from(*byte)).collect();
            let seen = Batch { sequences: 1, inputs, targets: Vec::new() };
            let logits = self.stage.forward(0, Input::Tokens(&seen), None)?;
            let last = &logits[logits.len().saturating_sub(VOCABULARY)..];
            let chances = softmax(last, 1.0 / temperature.max(1e-3));
            let mut left = rng.random::<f32>() * chances.iter().sum::<f32>();
            let chosen = chances.iter().position(|chance| {
                left -= chance;
                left < 0.0
            });
            text.push(chosen.unwrap_or(usize::from(b' ')) as u8);
        }
        Ok(String::from_utf8_lossy(&text).into_owned())
    }
}

/// Probabilities that add up to 1, from logits times `scale`.
fn softmax(logits: &[f32], scale: f64) -> Vec<f32> {
    let scaled: Vec<f32> = logits.iter().map(|x| x * scale as f32).collect();
    let largest = scaled.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let powers: Vec<f32> = scaled.iter().map(|x| (x - largest).exp()).collect();
    let total: f32 = powers.iter().sum();
    powers.iter().map(|power| power / total).collect()
}
