//! The sums that PowerSGD makes: P, then Q. Each is scattered to owners that add, and gathered
//! again, as plain f32.
//!
//! Bytes per rank: 2·(N−1)/N · 4·r·(m + n) for an m × n matrix and rank r.

use std::ops::Range;

use super::vectors::{FactorVectors, MatrixPlace};
use super::{Common, Kind, Made, Nonsense, StepError, Trouble, even, seal};
use crate::error::DecodeError;

pub(super) const ROUNDS: u32 = 4;

#[derive(Debug)]
pub(super) struct LowRank {
    matrix: MatrixPlace,
    /// The shards of P and of Q, by rank.
    shards: [Vec<Range<usize>>; 2],
    step: Step,
}

#[derive(Debug)]
enum Step {
    Begin,
    /// This rank's P, while it waits for the other ranks' shards or sums.
    P(Vec<f32>, Summing),
    Q(Vec<f32>, Summing),
    /// The sum of P could not be used, and the others have to be told.
    Failed(StepError),
    End,
}

/// Progress of the sum of a factor.
#[derive(Debug, Default)]
struct Summing {
    /// This rank's shard, once it is added up.
    shard: Option<Vec<f32>>,
}

impl LowRank {
    pub(super) fn new(matrix: MatrixPlace) -> Self {
        let (p, q) = matrix.codec.factor_lens(matrix.shape);
        let shards = |len| even(len, matrix.world);
        Self { shards: [shards(p), shards(q)], matrix, step: Step::Begin }
    }

    pub(super) fn longest(&self) -> usize {
        4 * self.shards.iter().flatten().map(ExactSizeIterator::len).max().unwrap_or(0)
    }

    pub(super) fn next(
        &mut self,
        round: u32,
        common: &mut Common,
    ) -> Option<Result<Made, Trouble>> {
        if common.trouble.is_some() {
            return Some(Ok(Made::Same(seal(Vec::new()))));
        }
        if let Step::Begin = self.step {
            match vectors(common).begin(&self.matrix) {
                Err(error) => return Some(Err(common.fail_step(round, error, Kind::Input, 0))),
                Ok(p) => self.step = Step::P(p, Summing::default()),
            }
        }
        let (factor, summing, first) = match &self.step {
            Step::P(p, summing) => (p, summing, 0),
            Step::Q(q, summing) => (q, summing, 2),
            Step::Failed(error) => {
                return Some(Err(common.fail_step(round, error.clone(), Kind::Sum, 0)));
            }
            Step::Begin | Step::End => return None,
        };
        if round == first {
            let shards = &self.shards[first as usize / 2];
            let each = shards
                .iter()
                .map(|shard| seal(bytemuck::cast_slice(&factor[shard.clone()]).to_vec()));
            return Some(Ok(Made::Each(each.collect())));
        }
        let sum = summing.shard.as_ref().filter(|_| round == first + 1)?;
        Some(Ok(Made::Same(seal(bytemuck::cast_slice(sum).to_vec()))))
    }

    pub(super) fn came(
        &mut self,
        round: u32,
        messages: &[&[u8]],
        common: &mut Common,
    ) -> Result<(), Nonsense> {
        let (me, world) = (common.rank, common.world);
        let shards = &self.shards[round as usize / 2];
        let check = |from: farwire_proto::Rank, len: usize| {
            let nonsense = |why| Nonsense { from, round, why };
            DecodeError::check_len(messages[from.index()], 4 * len).map_err(nonsense)
        };
        let (factor, summing) = match &mut self.step {
            Step::P(p, summing) => (p, summing),
            Step::Q(q, summing) => (q, summing),
            Step::Begin | Step::Failed(_) | Step::End => return Ok(()),
        };
        if round.is_multiple_of(2) {
            let mine = shards[me.index()].clone();
            let mut sum = vec![0.0; mine.len()];
            for from in world.ranks() {
                if from == me {
                    add(&mut sum, bytemuck::cast_slice(&factor[mine.clone()]));
                } else {
                    check(from, mine.len())?;
                    add(&mut sum, messages[from.index()]);
                }
            }
            summing.shard = Some(sum);
            return Ok(());
        }
        let mut whole = Vec::with_capacity(factor.len());
        for from in world.ranks() {
            if from == me {
                whole.extend_from_slice(summing.shard.as_deref().unwrap_or_default());
            } else {
                check(from, shards[from.index()].len())?;
                let (words, _) = messages[from.index()].as_chunks::<4>();
                whole.extend(words.iter().map(|word| f32::from_le_bytes(*word)));
            }
        }
        match std::mem::replace(&mut self.step, Step::End) {
            Step::P(..) => {
                self.step = match vectors(common).with_p(&self.matrix, whole) {
                    Ok(q) => Step::Q(q, Summing::default()),
                    Err(error) => Step::Failed(error),
                };
            }
            Step::Q(..) => {
                if let Err(error) = vectors(common).with_q(&self.matrix, whole) {
                    let same = matches!(error, StepError::Encode(_));
                    let trouble = common.fail_step(ROUNDS, error, Kind::Sum, 0);
                    if same {
                        // Every rank has the same sum and finds the same error.
                        common.trouble = Some(Trouble { rank: farwire_proto::Rank(0), ..trouble });
                    }
                }
            }
            Step::Begin | Step::Failed(_) | Step::End => {}
        }
        Ok(())
    }
}

fn vectors(common: &mut Common) -> &mut dyn FactorVectors {
    common.vectors.get().factors().expect("others are refused before the first round")
}

/// `sum += values`, which are as many f32.
fn add(sum: &mut [f32], values: &[u8]) {
    let (words, _) = values.as_chunks::<4>();
    sum.iter_mut().zip(words).for_each(|(sum, word)| *sum += f32::from_le_bytes(*word));
}
