//! What to train, and how.

use std::fmt;
use std::str::FromStr;

use farwire::CodecChoice;
use serde::{Deserialize, Serialize};

use crate::error::TrainError;
use crate::gpt::{Config, VOCABULARY};
use crate::schedule::Schedule;
use crate::text;

/// What to train, and how.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Settings {
    /// Sizes of the model.
    pub model: Config,
    /// Replicas of the model.
    pub dp: usize,
    /// Ranks that share each layer.
    pub tp: usize,
    /// Ranks that each have some of the layers.
    pub pp: usize,
    /// How micro-batches pass through the pipeline.
    #[serde(with = "text")]
    pub schedule: Schedule,
    /// Parts of a replica's batch that pass through one after the other.
    pub micro_batches: usize,
    /// Sequences per step, over all replicas.
    pub batch: usize,
    /// Steps of the whole run; the learning rate falls towards its end.
    pub steps: usize,
    /// The highest learning rate.
    pub learning_rate: f64,
    /// Steps at the start in which the learning rate rises.
    pub warm_up: usize,
    /// Weight decay, of matrices only.
    pub decay: f64,
    /// The gradient's norm is clipped to this.
    pub clip: f64,
    /// Decides the first weights and the order of the data.
    pub seed: u64,
    /// Bytes of a bucket of gradients.
    pub bucket_bytes: usize,
    /// Whether each replica keeps optimizer state for its share of the parameters only (ZeRO-1).
    /// This takes less memory, but updated parameters have to be sent.
    #[serde(default)]
    pub shard_optimizer: bool,
    /// How gradients are compressed.
    #[serde(with = "text")]
    pub codec: CodecChoice,
    /// Steps at the start in which gradients are not compressed.
    #[serde(default)]
    pub dense_steps: usize,
    /// Steps after those, in which a sparse codec's density falls from a quarter to its own.
    #[serde(default)]
    pub falling_steps: usize,
    /// What to do about a loss or a gradient that is not finite.
    #[serde(default, with = "text")]
    pub on_nan: OnNan,
}

/// What to do about a loss or a gradient that is a NaN or an infinity. Either way it is found
/// before any weight moves, on all ranks at the same step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OnNan {
    /// Stop with an error that says where it came from.
    #[default]
    Stop,
    /// Skip the step: no weight, moment or residual changes on any rank. Too many in a row are an
    /// error.
    Skip,
}

impl fmt::Display for OnNan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Stop => "stop",
            Self::Skip => "skip",
        })
    }
}

impl FromStr for OnNan {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "stop" => Ok(Self::Stop),
            "skip" => Ok(Self::Skip),
            _ => Err(format!("`{text}` is neither stop nor skip")),
        }
    }
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            model: Config::default(),
            dp: 1,
            tp: 1,
            pp: 1,
            schedule: Schedule::default(),
            micro_batches: 1,
            batch: 16,
            steps: 300,
            learning_rate: 2e-3,
            warm_up: 20,
            decay: 0.1,
            clip: 1.0,
            seed: 1,
            bucket_bytes: 1 << 20,
            shard_optimizer: false,
            codec: CodecChoice::default(),
            dense_steps: 0,
            falling_steps: 0,
            on_nan: OnNan::default(),
        }
    }
}

impl Settings {
    /// All settings, one per line, for ranks to [agree on](farwire::Builder::agree_on).
    pub fn lines(&self) -> String {
        fn add(lines: &mut String, name: &str, value: &serde_json::Value) {
            match value {
                serde_json::Value::Object(fields) => {
                    fields.iter().for_each(|(name, value)| add(lines, name, value));
                }
                serde_json::Value::String(text) => *lines += &format!("{name} {text}\n"),
                value => *lines += &format!("{name} {value}\n"),
            }
        }
        let mut lines = String::new();
        add(&mut lines, "settings", &serde_json::json!(self));
        lines
    }

    /// Fails if the settings contradict each other.
    pub fn check(&self) -> Result<(), TrainError> {
        let wrong = |text: String| Err(TrainError::Settings(text));
        for (name, size) in [
            ("dp", self.dp),
            ("tp", self.tp),
            ("pp", self.pp),
            ("micro-batches", self.micro_batches),
            ("batch", self.batch),
        ] {
            if size == 0 || size > 1 << 20 {
                return wrong(format!("{name} is {size}; use at least 1 and at most {}", 1 << 20));
            }
        }
        let parts = self.dp * self.micro_batches;
        if !self.batch.is_multiple_of(parts) {
            return wrong(format!(
                "a batch of {} sequences cannot be shared evenly by {} replicas × {} micro-batches; use a \
                 multiple of {parts}",
                self.batch, self.dp, self.micro_batches
            ));
        }
        for (name, value) in [("learning rate", self.learning_rate), ("clip", self.clip)] {
            if !(value.is_finite() && value > 0.0) {
                return wrong(format!("the {name} is {value}; use a number above 0"));
            }
        }
        if !(self.decay.is_finite() && self.decay >= 0.0) {
            return wrong(format!("the weight decay is {}; use 0 or more", self.decay));
        }
        self.schedule.actions(self.pp, 0, self.micro_batches)?;
        self.model.check(self.tp, self.pp * self.schedule.chunks())?;
        let needed = self.bytes_per_rank();
        if needed > isize::MAX as f64 {
            return wrong(format!(
                "a rank would need at least {needed:.1e} bytes of memory, more than a process can have; \
                 use a smaller width, context or batch, or fewer layers"
            ));
        }
        Ok(())
    }

    /// The least memory that a rank needs, in bytes: its weights with gradients and moments, and
    /// for one micro-batch the data that pass through each layer and the attention matrices. A run
    /// needs more.
    pub fn bytes_per_rank(&self) -> f64 {
        // As floats, so that no size overflows.
        let [layers, heads, width, context] =
            [self.model.layers, self.model.heads, self.model.width, self.model.context]
                .map(|n| n as f64);
        let [dp, tp, pp] = [self.dp, self.tp, self.pp].map(|n| n as f64);
        let vocabulary = VOCABULARY as f64;
        let tables = (2.0 * vocabulary + context) * width;
        let weights = (tables + 12.0 * layers * width * width) / tp / pp;
        let moments = 2.0 * weights / if self.shard_optimizer { dp } else { 1.0 };
        let sequences = self.batch as f64 / dp / self.micro_batches as f64;
        let attention = heads / tp * sequences * context * context + context * context;
        let passing = sequences * context * width;
        let states = layers / pp * (passing + attention);
        (2.0 * weights + moments + states) * size_of::<f32>() as f64
    }

    /// Ranks that these settings need.
    pub fn ranks(&self) -> usize {
        self.dp * self.tp * self.pp
    }

    /// Elements that pass from stage to stage for each micro-batch.
    pub(crate) fn passed(&self) -> usize {
        let sequences = self.batch / self.dp / self.micro_batches;
        sequences * self.model.context * self.model.width
    }

    /// The sizes that decide what each rank has. Residuals of one layout are of no use in another.
    pub(crate) fn layout(&self) -> [usize; 4] {
        [self.dp, self.tp, self.pp, self.schedule.chunks()]
    }

    /// The learning rate of a step: it rises in a line, then falls in half a cosine to a tenth.
    pub fn rate(&self, step: usize) -> f64 {
        if step < self.warm_up {
            return self.learning_rate * (step + 1) as f64 / self.warm_up as f64;
        }
        let left = self.steps.saturating_sub(self.warm_up).max(1) as f64;
        let done = ((step - self.warm_up) as f64 / left).min(1.0);
        self.learning_rate * (0.1 + 0.9 * 0.5 * (1.0 + (std::f64::consts::PI * done).cos()))
    }

    /// Fails if a run with these settings cannot go on from a checkpoint of one with `other`. What
    /// changes the result must be the same, except for layout and length.
    pub(crate) fn continues(&self, other: &Self) -> Result<(), String> {
        let differs = |name: &str, mine: &dyn fmt::Debug, theirs: &dyn fmt::Debug| {
            Err(format!(
                "it was made with {name} {theirs:?}, not {mine:?}; give the same, or start without resuming"
            ))
        };
        if self.model != other.model {
            return differs("a model of", &self.model, &other.model);
        }
        // As a float, a seed would lose its last bits.
        if self.seed != other.seed {
            return differs("seed", &self.seed, &other.seed);
        }
        for (name, mine, theirs) in [
            ("batch", self.batch as f64, other.batch as f64),
            ("learning rate", self.learning_rate, other.learning_rate),
            ("weight decay", self.decay, other.decay),
            ("clip", self.clip, other.clip),
            ("warm-up", self.warm_up as f64, other.warm_up as f64),
        ] {
            // Text does not always keep the last bit.
            if (mine - theirs).abs() > 1e-12 * mine.abs() {
                return differs(name, &mine, &theirs);
            }
        }
        if self.codec != other.codec {
            return differs("codec", &self.codec.to_string(), &other.codec.to_string());
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_beyond_all_memory_are_refused_without_overflow() {
        let most = usize::MAX;
        let model = Config::default();
        for model in [
            Config { layers: most, ..model },
            Config { width: most, heads: 1, ..model },
            Config { context: most, ..model },
            Config { layers: most, heads: most, width: most, context: most },
        ] {
            let error = Settings { model, ..Settings::default() }.check().unwrap_err().to_string();
            assert!(error.contains("bytes of memory, more than a process can have"), "{error}");
        }
    }

    /// Against the sizes of the default model, counted by hand.
    #[test]
    fn the_memory_that_is_stated_is_what_is_needed_at_least() {
        let settings = Settings { batch: 4, ..Settings::default() };
        let weights = (2 * 256 + 64) * 128 + 12 * 4 * 128 * 128;
        let states = 4 * (4 * 64 * 128 + 4 * 4 * 64 * 64 + 64 * 64);
        assert_eq!(settings.bytes_per_rank(), f64::from(4 * (4 * weights + states)));
        let shared = Settings { tp: 2, pp: 2, dp: 2, shard_optimizer: true, ..settings.clone() };
        assert!(shared.bytes_per_rank() < settings.bytes_per_rank() / 3.0);
    }
}
