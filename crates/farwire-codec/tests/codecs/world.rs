//! Ranks in memory: the two-phase allreduce that the codecs are made for, as plainly as it can be
//! written.

use std::ops::Range;

use farwire_codec::*;

pub(crate) struct World {
    spec: CodecSpec,
    shards: Vec<Range<usize>>,
    pub(crate) feedback: Vec<ErrorFeedback>,
    with_feedback: bool,
    step: u64,
}

/// What happens to the residuals after a step.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum End {
    Commit,
    Drop,
}

impl World {
    pub(crate) fn new(spec: &str, ranks: usize, elements: usize) -> Self {
        let cut = |rank| elements * rank / ranks;
        Self {
            spec: spec.parse().unwrap(),
            shards: (0..ranks).map(|rank| cut(rank)..cut(rank + 1)).collect(),
            feedback: (0..ranks).map(|_| ErrorFeedback::new()).collect(),
            with_feedback: true,
            step: 0,
        }
    }

    pub(crate) fn without_feedback(mut self) -> Self {
        self.with_feedback = false;
        self
    }

    /// The sum of the gradients, as every rank gets it.
    pub(crate) fn all_reduce(&mut self, gradients: &[Vec<f32>], end: End) -> Vec<f32> {
        self.step += 1;
        let mut transactions: Vec<_> =
            self.feedback.iter().map(|feedback| feedback.begin("w").unwrap()).collect();
        let context = Context { seed: 5, step: self.step, tensor: Context::tensor_id("w") };
        let sum = match self.spec.travels() {
            Travel::Factors(codec) => low_rank(codec, gradients, context, &mut transactions),
            Travel::Shards(codec) | Travel::Whole(codec) => {
                self.two_phase(&*codec, gradients, context, &mut transactions)
            }
        };
        if end == End::Commit {
            transactions.into_iter().for_each(Transaction::commit);
        }
        sum
    }

    fn two_phase(
        &self,
        codec: &dyn MessageCodec,
        gradients: &[Vec<f32>],
        context: Context,
        transactions: &mut [Transaction],
    ) -> Vec<f32> {
        let n = gradients[0].len();
        let place = CodedPlace::whole(context, n);
        let mut scattered = Vec::new();
        for (rank, (gradient, transaction)) in gradients.iter().zip(&mut *transactions).enumerate()
        {
            let owed = transaction.worker(0..n);
            let residual = if self.with_feedback { owed.residual() } else { Residual::Off };
            let mut out = Encoded::default();
            out.residual = transaction.buffer(n);
            let job =
                Job { rank: rank as u32, ..Job::worker(gradient, residual, &place, &self.shards) };
            codec.encode(&job, &mut out).unwrap();
            for (message, shard) in out.messages.iter().zip(&self.shards) {
                assert!(message.len() <= codec.max_message_len(shard.len()));
            }
            transaction.set_worker(0, out.residual);
            scattered.push(out.messages);
        }
        let mut result = vec![0.0; n];
        for (owner, (shard, transaction)) in self.shards.iter().zip(&mut *transactions).enumerate()
        {
            let place = place.part(shard.clone());
            let mut sum = vec![0.0; shard.len()];
            for messages in &scattered {
                codec.add_decoded_into(&messages[owner], &place, &mut sum).unwrap();
            }
            let owed = transaction.owner(shard.clone());
            let residual = if self.with_feedback { owed.residual() } else { Residual::Off };
            let mut out = Encoded::default();
            codec
                .encode(&Job { rank: owner as u32, ..Job::owner(&sum, residual, &place) }, &mut out)
                .unwrap();
            assert!(out.messages[0].len() <= codec.max_message_len(shard.len()));
            transaction.set_owner(shard.start, out.residual);
            codec.add_decoded_into(&out.messages[0], &place, &mut result[shard.clone()]).unwrap();
        }
        result
    }

    /// What all ranks together still owe, per element.
    pub(crate) fn owed(&self, elements: usize) -> Vec<f64> {
        let mut total = vec![0.0; elements];
        for feedback in &self.feedback {
            let transaction = feedback.begin("w").unwrap();
            for owed in [transaction.worker(0..elements), transaction.owner(0..elements)] {
                if let Residual::Owed(owed) = owed.residual() {
                    total.iter_mut().zip(owed).for_each(|(total, owed)| *total += f64::from(*owed));
                }
            }
        }
        total
    }
}

fn low_rank(
    codec: PowerSgd,
    gradients: &[Vec<f32>],
    context: Context,
    transactions: &mut [Transaction],
) -> Vec<f32> {
    let n = gradients[0].len();
    let sum = |parts: Vec<&[f32]>| {
        let mut sum = vec![0.0; parts[0].len()];
        parts.iter().for_each(|part| sum.iter_mut().zip(*part).for_each(|(sum, x)| *sum += x));
        sum
    };
    let waiting: Vec<_> = gradients
        .iter()
        .zip(&*transactions)
        .map(|(gradient, transaction)| {
            let owed = transaction.worker(0..n);
            codec
                .begin(
                    gradient.as_slice().into(),
                    owed.residual(),
                    transaction.warm(),
                    Shape::of(&[n]),
                    context,
                )
                .unwrap()
        })
        .collect();
    let p = sum(waiting.iter().map(PowerP::p).collect());
    let waiting: Vec<_> =
        waiting.into_iter().map(|rank| rank.with_sum(p.clone()).unwrap()).collect();
    let q = sum(waiting.iter().map(PowerQ::q).collect());
    let mut results = Vec::new();
    for (rank, transaction) in waiting.into_iter().zip(transactions) {
        let mut result = vec![0.0; n];
        let state = rank.with_sum(q.clone(), &mut result).unwrap();
        transaction.set_worker(0, state.residual);
        transaction.set_warm(state.warm);
        results.push(result);
    }
    assert!(results.windows(2).all(|pair| pair[0] == pair[1]), "ranks differ");
    results.remove(0)
}
