//! Random-k: the same random elements on every rank, so that no indices cross the wire.
//!
//! Steps:
//! 1. The n elements are cut into k strata of ⌊n/k⌋ or ⌈n/k⌉ neighbours, and one element of each is
//!    drawn: number j of a counter RNG over (seed, step, tensor). So the count is exact, no element
//!    is drawn twice, they come in order, and those in a shard are found without looking at the
//!    others.
//! 2. In one pass over memory: write a = gradient + residual, then send the drawn elements and take
//!    what was sent out of the residual.
//!
//! With error feedback values are sent as they are. Without it, a worker multiplies each by the
//! length of its stratum, about n/k, so that the result is right in the mean.
//!
//! Bytes of a message: 4 (f32) or 2 (bf16) for each drawn element of the shard. Nothing else.

use std::ops::Range;
use std::sync::Arc;

use super::topk::Share;
use crate::codec::{Codec, CodecFamily, MessageCodec, Travel};
use crate::dense::sections;
use crate::error::{DecodeError, EncodeError};
use crate::job::{CodedPlace, Encoded, Fused, Job, Residual, Role};
use crate::rng::{Counter, Purpose};
use crate::simd::{self, Level, Stream, TILE, from_bf16_bits, to_bf16_bits};
use crate::spec::{CodecSpec, Params};
use crate::threads;

/// Keeps random elements.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RandomK {
    /// How many elements to keep.
    pub keep: Share,
    /// Whether values are rounded to bfloat16.
    pub bf16: bool,
    /// If set, replaces the seed of the operation's context.
    pub seed: Option<u64>,
}

pub(super) const FAMILY: CodecFamily = CodecFamily {
    names: &["randk"],
    forms: "randk:0.01 | randk:count=1000 [,values=f32|bf16] [,seed=7]",
    help: "random elements, the same on all ranks, so no positions; the rest is sent later",
    typical: &["randk:0.01"],
    corners: &[
        "randk:count=5",
        "randk:0.1,values=f32,seed=9",
        "randk:0.5,values=f32",
        "randk:0.001,values=f32,seed=18446744073709551615",
    ],
    parse,
};

fn parse(params: &mut Params<'_>) -> Result<CodecSpec, String> {
    let keep = Share::parse(params.argument("0.01")?)?;
    let bf16 = params.one_of("values", &[("f32", false), ("bf16", true)])?.unwrap_or(true);
    let seed = params.take("seed").map(|seed| {
        seed.parse().map_err(|_| format!("seed={seed} is not a whole number below 2^64"))
    });
    Ok(CodecSpec::new(RandomK { keep, bf16, seed: seed.transpose()? }))
}

impl Codec for RandomK {
    fn name(&self) -> String {
        let values = if self.bf16 { "" } else { ",values=f32" };
        let seed = self.seed.map(|seed| format!(",seed={seed}")).unwrap_or_default();
        format!("randk:{}{values}{seed}", self.keep)
    }

    fn travels(self: Arc<Self>) -> Travel {
        Travel::Shards(self)
    }

    fn density(&self, elements: usize) -> f64 {
        self.keep.of(elements) as f64 / elements.max(1) as f64
    }

    fn with_density(&self, density: f64) -> Option<CodecSpec> {
        Some(CodecSpec::new(Self { keep: Share::fraction(density), ..*self }))
    }
}

impl RandomK {
    pub(crate) fn strata(&self, place: &CodedPlace) -> Strata {
        let mut context = place.context;
        context.seed = self.seed.unwrap_or(context.seed);
        Strata {
            elements: place.whole as u64,
            count: self.keep.of(place.whole) as u64,
            counter: Counter::new(context, Purpose::Sample),
        }
    }

    fn width(&self) -> usize {
        if self.bf16 { 2 } else { 4 }
    }

    /// Appends a value; returns what a decoder makes of it.
    fn put(&self, value: f32, out: &mut Vec<u8>) -> f32 {
        if self.bf16 {
            let bits = to_bf16_bits(value);
            out.extend_from_slice(&bits.to_le_bytes());
            from_bf16_bits(bits)
        } else {
            out.extend_from_slice(&value.to_le_bytes());
            value
        }
    }
}

impl MessageCodec for RandomK {
    fn encode(&self, job: &Job<'_>, out: &mut Encoded) -> Result<(), EncodeError> {
        job.check();
        let level = Level::detect();
        let strata = self.strata(&job.place);
        let boost = matches!(job.residual, Residual::Off) && job.role == Role::Worker;
        out.resize(job.shards.len(), job.place.range.len());

        let mut tasks = Vec::new();
        let mut rest = &mut out.residual[..];
        for (shard, message) in job.shards.iter().zip(&mut out.messages) {
            let mut bytes = std::mem::take(message);
            for range in sections(shard.clone(), TILE, job.threads.get()) {
                let (own, later) = rest.split_at_mut(range.len());
                rest = later;
                tasks.push((range, own, std::mem::take(&mut bytes)));
            }
        }
        let results = threads::in_order(job.threads, tasks, |(range, own, mut bytes)| {
            bytes.clear();
            let mut fused = Fused::new(level, job);
            let mut drawn = strata.within(range.clone()).peekable();
            let mut stream = Stream::new(level, job.values.len(), TILE);
            for (k, own) in own.chunks_mut(TILE).enumerate() {
                let start = range.start + k * TILE;
                stream.write(own, |tile| {
                    fused.read(start - job.place.range.start, tile)?;
                    while let Some(one) = drawn.next_if(|one| one.index < start + tile.len()) {
                        let value = &mut tile[one.index - start];
                        let sent = if boost { *value * one.of as f32 } else { *value };
                        *value -= self.put(sent, &mut bytes);
                    }
                    Ok(())
                })?;
            }
            Ok((range.start, bytes))
        });
        let mut shards = job.shards.iter().zip(&mut out.messages).peekable();
        for result in results {
            let (start, bytes) = result?;
            while shards.next_if(|(shard, _)| shard.end <= start).is_some() {}
            let (shard, message) = shards.peek_mut().expect("each section is of a shard");
            if start == shard.start {
                **message = bytes;
            } else {
                message.extend_from_slice(&bytes);
            }
        }
        out.finish(job.residual);
        Ok(())
    }

    fn add_decoded_into(
        &self,
        bytes: &[u8],
        place: &CodedPlace,
        acc: &mut [f32],
    ) -> Result<(), DecodeError> {
        assert_eq!(acc.len(), place.range.len(), "one element for each of the range");
        let strata = self.strata(place);
        let range = place.range.clone();
        DecodeError::check_len(bytes, self.width() * strata.count_within(range.clone()))?;
        let level = Level::detect();
        let (mut values, mut indices) = ([0.0; 512], [0; 512]);
        let mut drawn = strata.within(range.clone());
        for bytes in bytes.chunks(512 * self.width()) {
            let values = &mut values[..bytes.len() / self.width()];
            let indices = &mut indices[..values.len()];
            // Indices come first: zip must not draw one element too many.
            for (index, one) in indices.iter_mut().zip(drawn.by_ref()) {
                *index = one.index - range.start;
            }
            indices.iter().for_each(|index| simd::prefetch(acc, *index));
            values.fill(0.0);
            let add = if self.bf16 { simd::add_bf16 } else { simd::add_f32 };
            if !add(level, bytes, values) {
                return Err(DecodeError::Field("value"));
            }
            for (index, value) in indices.iter().zip(values) {
                acc[*index] += *value;
            }
        }
        Ok(())
    }

    fn max_message_len(&self, elements: usize) -> usize {
        self.width() * elements
    }

    fn expected_len(&self, elements: usize) -> usize {
        self.width() * self.keep.of(elements)
    }
}

/// A vector cut into strata, one element drawn from each.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Strata {
    pub(crate) elements: u64,
    pub(crate) count: u64,
    pub(crate) counter: Counter,
}

/// A drawn element.
#[derive(Clone, Copy, Debug)]
struct Drawn {
    index: usize,
    /// Elements of its stratum.
    of: u64,
}

impl Strata {
    /// Where stratum `j` starts.
    fn start(&self, j: u64) -> u64 {
        (u128::from(j) * u128::from(self.elements) / u128::from(self.count)) as u64
    }

    /// The stratum of element `index`: the last that starts at or before it.
    fn of(&self, index: u64) -> u64 {
        ((u128::from(index) + 1) * u128::from(self.count)).div_ceil(u128::from(self.elements))
            as u64
            - 1
    }

    /// The strata that have an element in `range`.
    fn touching(&self, range: &Range<usize>) -> Range<u64> {
        if range.is_empty() || self.count == 0 {
            return 0..0;
        }
        self.of(range.start as u64)..self.of(range.end as u64 - 1) + 1
    }

    fn drawn(&self, j: u64, start: u64, end: u64) -> Drawn {
        Drawn { index: (start + self.counter.below(j, end - start)) as usize, of: end - start }
    }

    /// The drawn elements in `range`, in order.
    fn within(self, range: Range<usize>) -> impl Iterator<Item = Drawn> {
        let touching = self.touching(&range);
        let count = self.count.max(1);
        let (step, remainder) = (self.elements / count, self.elements % count);
        let mut start = if touching.is_empty() { 0 } else { self.start(touching.start) };
        // start(j) without a division: the remainders add up, and each time they reach `count` a
        // stratum is one longer.
        let mut owed =
            (u128::from(touching.start) * u128::from(remainder) % u128::from(count)) as u64;
        let all = touching.map(move |j| {
            owed += remainder;
            let end = start + step + u64::from(owed >= count);
            owed -= if owed >= count { count } else { 0 };
            let one = self.drawn(j, start, end);
            start = end;
            one
        });
        all.filter(move |one| range.contains(&one.index))
    }

    /// The first stratum whose drawn element is in `range`, if there is one, and how many there
    /// are.
    pub(crate) fn run_within(&self, range: Range<usize>) -> (u64, usize) {
        let first = self.touching(&range).start;
        let count = self.count_within(range.clone());
        let drawn = |j| self.drawn(j, self.start(j), self.start(j + 1)).index;
        let skipped = count > 0 && drawn(first) < range.start;
        (first + u64::from(skipped), count)
    }

    /// How many drawn elements are in `range`. Only the strata at its ends need checking.
    fn count_within(&self, range: Range<usize>) -> usize {
        let touching = self.touching(&range);
        let ends = [touching.start, touching.end.saturating_sub(1)];
        let ends = if touching.end - touching.start > 1 { &ends[..] } else { &ends[..1] };
        let outside = |j: &&u64| {
            !range.contains(&self.drawn(**j, self.start(**j), self.start(**j + 1)).index)
        };
        if touching.is_empty() {
            return 0;
        }
        (touching.end - touching.start) as usize - ends.iter().filter(outside).count()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::job::Context;

    fn strata(elements: u64, count: u64, step: u64) -> Strata {
        let context = Context { seed: 1, step, tensor: 2 };
        Strata { elements, count, counter: Counter::new(context, Purpose::Sample) }
    }

    proptest! {
        #[test]
        fn draws_exactly_so_many_in_order_and_the_same_from_any_cut(
            elements in 1u64..3000, part in 0.0f64..1.0, step: u64, cut in 0.0f64..1.0
        ) {
            let count = (elements as f64 * part) as u64;
            let strata = strata(elements, count, step);
            let all: Vec<_> = strata.within(0..elements as usize).map(|one| one.index).collect();
            prop_assert_eq!(all.len() as u64, count);
            prop_assert!(all.windows(2).all(|pair| pair[0] < pair[1]));
            prop_assert!(all.last().is_none_or(|last| (*last as u64) < elements));
            let cut = (elements as f64 * cut) as usize;
            let halves = [0..cut, cut..elements as usize];
            for half in &halves {
                prop_assert_eq!(strata.within(half.clone()).count(), strata.count_within(half.clone()));
                let (first, count) = strata.run_within(half.clone());
                let run = (first..first + count as u64).map(|j| strata.drawn(j, strata.start(j), strata.start(j + 1)).index);
                prop_assert!(run.eq(strata.within(half.clone()).map(|one| one.index)));
            }
            let cut: Vec<_> = halves.into_iter().flat_map(|half| strata.within(half)).map(|one| one.index).collect();
            prop_assert_eq!(cut, all);
        }
    }

    #[test]
    fn every_element_has_its_turn() {
        let mut seen = [0; 100];
        for step in 0..2000 {
            strata(100, 7, step).within(0..100).for_each(|one| seen[one.index] += 1);
        }
        // 2000 · 7 / 100 = 140 each, with a standard deviation of 11.
        assert!(seen.iter().all(|count| (80..200).contains(count)), "{seen:?}");
    }

    #[test]
    fn vectors_of_more_than_2_32_elements_do_not_overflow() {
        let strata = strata(1 << 40, 1 << 35, 0);
        let range = (1usize << 39) + 5..(1 << 39) + 1000;
        assert_eq!(strata.within(range.clone()).count(), strata.count_within(range));
    }
}
