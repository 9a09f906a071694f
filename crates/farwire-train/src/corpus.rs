//! The text to learn from, and the order in which it is read.
//!
//! Step s of a run sees the same windows of text whatever the layout and whether or not the run was
//! interrupted: they depend on the seed and s only.

use std::ops::Range;
use std::sync::{Arc, OnceLock};

use crate::checkpoint::sha256;
use crate::error::TrainError;

/// Text to learn from that is always at hand: most of this crate's own sources.
pub fn embedded() -> Vec<u8> {
    const TEXTS: [&str; 26] = [
        include_str!("../README.md"),
        include_str!("adamw.rs"),
        include_str!("carry.rs"),
        include_str!("checkpoint.rs"),
        include_str!("compressed.rs"),
        include_str!("error.rs"),
        include_str!("exchange.rs"),
        include_str!("finite.rs"),
        include_str!("gpt.rs"),
        include_str!("group.rs"),
        include_str!("lib.rs"),
        include_str!("library.rs"),
        include_str!("mesh.rs"),
        include_str!("norm.rs"),
        include_str!("param.rs"),
        include_str!("phase_in.rs"),
        include_str!("pipeline.rs"),
        include_str!("parameter_list.rs"),
        include_str!("replicas.rs"),
        include_str!("report.rs"),
        include_str!("rules.rs"),
        include_str!("schedule.rs"),
        include_str!("settings.rs"),
        include_str!("simulate.rs"),
        include_str!("text.rs"),
        include_str!("trainer.rs"),
    ];
    TEXTS.concat().into_bytes()
}

/// Windows of a text, in an order determined by a seed.
#[derive(Clone, Debug)]
pub struct Batches {
    text: Arc<[u8]>,
    seed: u64,
    context: usize,
    batch: usize,
    sha256: OnceLock<String>,
}

/// Sequences of tokens, one after the other: the inputs, and the token that follows each of them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Batch {
    /// How many sequences.
    pub sequences: usize,
    /// `sequences × context` tokens.
    pub inputs: Vec<u32>,
    /// As many tokens: each input's successor.
    pub targets: Vec<u32>,
}

impl Batches {
    /// Batches of `batch` windows of `context` bytes.
    pub fn new(
        text: impl Into<Arc<[u8]>>,
        seed: u64,
        context: usize,
        batch: usize,
    ) -> Result<Self, TrainError> {
        let text = text.into();
        if text.len() <= context {
            return Err(TrainError::Settings(format!(
                "the text has {} bytes, but a context of {context} needs at least {}; use a longer text or \
                 a shorter context",
                text.len(),
                context + 1
            )));
        }
        Ok(Self { text, seed, context, batch, sha256: OnceLock::new() })
    }

    /// The SHA-256 of the whole text, in hexadecimal digits, by which a run recognises its data.
    pub fn sha256(&self) -> &str {
        self.sha256.get_or_init(|| sha256(&self.text))
    }

    /// Some sequences of a step's batch, if the batches of all steps have the same length.
    pub fn at(&self, step: usize, sequences: Range<usize>) -> Batch {
        self.after((step * self.batch) as u64, sequences)
    }

    /// Some of the sequences that follow the first `seen` ones.
    pub fn after(&self, seen: u64, sequences: Range<usize>) -> Batch {
        let places = (self.text.len() - self.context) as u64;
        let start = |sequence: usize| {
            let turn = seen + sequence as u64;
            (mix(mix(self.seed).wrapping_add(turn)) % places) as usize
        };
        let tokens = |shift: usize| {
            let window = |start: usize| &self.text[start + shift..start + shift + self.context];
            sequences.clone().map(start).flat_map(window).map(|byte| u32::from(*byte)).collect()
        };
        Batch { sequences: sequences.len(), inputs: tokens(0), targets: tokens(1) }
    }
}

/// The output function of SplitMix64: a few lines in any language, for anyone who wants to train on
/// the same batches.
fn mix(state: u64) -> u64 {
    let z = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn batches_depend_on_seed_and_step_only_and_targets_follow_inputs() {
        let batches = |seed| Batches::new(embedded(), seed, 8, 6).unwrap();
        let all = batches(1).at(3, 0..6);
        assert_eq!(all, batches(1).at(3, 0..6));
        assert_ne!(all, batches(1).at(4, 0..6));
        assert_ne!(all, batches(2).at(3, 0..6));
        let parts = [batches(1).at(3, 0..2), batches(1).at(3, 2..6)];
        assert_eq!(all.inputs, [&parts[0].inputs[..], &parts[1].inputs[..]].concat());
        for sequence in 0..6 {
            let range = sequence * 8..sequence * 8 + 8;
            assert_eq!(all.inputs[range.clone()][1..], all.targets[range][..7]);
        }
        assert!(
            Batches::new(vec![0; 8], 1, 8, 6).is_err() && Batches::new(vec![0; 9], 1, 8, 6).is_ok()
        );
    }
}
