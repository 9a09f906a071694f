//! The sums that PowerSGD makes: P, then Q, each scattered to owners who add and gathered again, as
//! plain f32.
//!
//! Bytes per rank: 2·(N−1)/N · 4·r·(m + n) for an m × n matrix and rank r.

use std::ops::Range;

use farwire_proto::WorldSize;

use super::{Common, Kind, Made, Nonsense, Trouble, even, residual, scale, seal};
use crate::codecs::powersgd::{PowerP, PowerQ, PowerSgd, Shape};
use crate::error::{DecodeError, EncodeError};

pub(super) const ROUNDS: u32 = 4;

#[derive(Debug)]
pub(super) struct LowRank {
    codec: PowerSgd,
    shape: Shape,
    /// Of P and of Q, by rank.
    shards: [Vec<Range<usize>>; 2],
    mean: bool,
    /// The elements of the result that this rank wants, if not all.
    only: Option<Range<usize>>,
    step: Step,
}

#[derive(Debug)]
enum Step {
    Begin,
    /// Waits for the shards of P, or for their sums.
    P(PowerP, Summing),
    Q(PowerQ, Summing),
    /// P could not be made use of, which the others have to be told.
    Failed(EncodeError),
    End,
}

/// How far the sum of a factor is.
#[derive(Debug, Default)]
struct Summing {
    /// This rank's shard, once it is added up.
    shard: Option<Vec<f32>>,
}

impl LowRank {
    pub(super) fn new(
        codec: PowerSgd,
        shape: Shape,
        world: WorldSize,
        mean: bool,
        only: Option<Range<usize>>,
    ) -> Self {
        let (p, q) = codec.factor_lens(shape);
        Self {
            codec,
            shape,
            shards: [even(p, world), even(q, world)],
            mean,
            only,
            step: Step::Begin,
        }
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
            let (context, host) = (common.context, common.vectors.host());
            let owed = host.owed(0..host.input.len());
            let warm = host.feedback.as_ref().and_then(|feedback| feedback.warm());
            let values = host.input.values(0..host.input.len());
            let begun =
                self.codec.begin(values, residual(owed.as_ref()), warm, self.shape, context);
            match begun {
                Err(error) => return Some(Err(common.fail_encode(round, error, Kind::Input, 0))),
                Ok(p) => self.step = Step::P(p, Summing::default()),
            }
        }
        let (factor, summing, first) = match &self.step {
            Step::P(p, summing) => (p.p(), summing, 0),
            Step::Q(q, summing) => (q.q(), summing, 2),
            Step::Failed(error) => {
                return Some(Err(common.fail_encode(round, *error, Kind::Sum, 0)));
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
            Step::P(p, summing) => (p.p(), summing),
            Step::Q(q, summing) => (q.q(), summing),
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
            Step::P(p, _) => match p.with_sum(whole) {
                Ok(q) => self.step = Step::Q(q, Summing::default()),
                Err(error) => self.step = Step::Failed(error),
            },
            Step::Q(q, _) => {
                let host = common.vectors.host();
                host.clear_output(host.input.len());
                match q.with_sum(whole, &mut host.output) {
                    Ok(state) => {
                        if let Some(feedback) = &mut host.feedback {
                            feedback.set_worker(0, state.residual);
                            feedback.set_warm(state.warm);
                        }
                        if let Some(only) = &self.only {
                            host.output.copy_within(only.clone(), 0);
                            host.output.truncate(only.len());
                        }
                        scale(&mut host.output, self.mean, world);
                    }
                    Err(error) => {
                        // Everyone has the same sum, and finds the same.
                        let trouble = common.fail_encode(ROUNDS, error, Kind::Sum, 0);
                        common.trouble = Some(Trouble { rank: farwire_proto::Rank(0), ..trouble });
                    }
                }
            }
            Step::Begin | Step::Failed(_) | Step::End => {}
        }
        Ok(())
    }
}

/// `sum += values`, which are f32 of the same number.
fn add(sum: &mut [f32], values: &[u8]) {
    let (words, _) = values.as_chunks::<4>();
    sum.iter_mut().zip(words).for_each(|(sum, word)| *sum += f32::from_le_bytes(*word));
}
