//! Top-k: the largest elements by magnitude, and error feedback for the rest.
//!
//! Steps at a worker, over a vector of n elements of which k are kept:
//! 1. From a sample, guess a magnitude that slightly more than k elements reach (the *floor*).
//! 2. In one pass over memory, write a = gradient + residual, check that it is finite, and collect
//!    the elements that reach the floor (the *candidates*).
//! 3. Select exactly k among the candidates; of equal magnitudes the lowest index wins. If the
//!    guess was too high, take a floor from a histogram of all exponents and collect again. So the
//!    result never depends on the guess.
//! 4. Code each shard; the residual of a kept element is what rounding dropped.
//!
//! An owner does the same with its sum. In mode *global* it keeps its share of k, ⌈k·len/n⌉, and
//! owes the rest; in mode *union* it sends everything that is not zero.
//!
//! Per chunk, `64/4096` keeps 64 of every 4,096 elements, and ⌈64·len/4096⌉ of a shorter chunk.
//!
//! Bytes of a message: u32 count, then for every 256 kept elements their indices (`index.rs`) and
//! values (`kept.rs`). At 1 % and bf16 values about 24.2 bits per kept element.

use std::fmt;
use std::sync::Arc;

use crate::codec::{Codec, CodecFamily, MessageCodec, Travel};
use crate::error::{DecodeError, EncodeError};
use crate::index::{self, BLOCK};
use crate::job::{CodedPlace, Encoded, Job, Role, Sparse};
use crate::kept::ValueCoding;
use crate::simd::{self, Level};
use crate::spec::{CodecSpec, Params, positive};

mod select;
use select::{select, select_per_chunk};

/// Keeps the largest elements.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TopK {
    /// How many, and of what.
    pub keep: Keep,
    /// How their values are coded.
    pub values: ValueCoding,
    /// What an owner sends.
    pub mode: OwnerMode,
}

/// How many elements are kept.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Keep {
    /// This many of the whole vector.
    Whole(Share),
    /// This many of each chunk of the vector.
    PerChunk {
        /// Elements kept, 1 to `chunk`.
        keep: usize,
        /// Elements of a chunk.
        chunk: usize,
    },
}

/// A number of elements, as a fraction or a count.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Share {
    /// A fraction in (0, 1] of the elements, rounded, but at least one.
    Fraction(f64),
    /// This many, or all if there are fewer.
    Count(usize),
}

impl Share {
    /// How many of `elements` this is.
    pub fn of(self, elements: usize) -> usize {
        match self {
            Self::Fraction(fraction) => {
                ((fraction * elements as f64).round() as usize).max(1).min(elements)
            }
            Self::Count(count) => count.min(elements),
        }
    }

    /// Parses what [`Display`](fmt::Display) prints.
    pub(super) fn parse(text: &str) -> Result<Self, String> {
        if let Some(count) = text.strip_prefix("count=") {
            return Ok(Self::Count(positive("count", count)?));
        }
        match text.parse() {
            Ok(fraction) if fraction > 0.0 && fraction <= 1.0 => Ok(Self::Fraction(fraction)),
            _ => Err(format!("`{text}` is not a fraction above 0 and at most 1")),
        }
    }

    /// A fraction, brought into (0, 1].
    pub(super) fn fraction(fraction: f64) -> Self {
        Self::Fraction(fraction.clamp(f64::MIN_POSITIVE, 1.0))
    }
}

impl fmt::Display for Share {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Fraction(fraction) => write!(f, "{fraction}"),
            Self::Count(count) => write!(f, "count={count}"),
        }
    }
}

/// What the owner of a shard sends of its sum.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum OwnerMode {
    /// The largest elements again, so that the volume does not grow with the number of ranks.
    #[default]
    Global,
    /// Everything that any rank sent.
    Union,
}

pub(super) const FAMILY: CodecFamily = CodecFamily {
    names: &["topk"],
    forms: "topk:0.01 | topk:count=1000 | topk:64/4096 [,values=f32|bf16|int8] [,mode=global|union]",
    help: "the largest elements and where they are; the rest is sent later",
    typical: &["topk:0.01", "topk:0.01,values=int8", "topk:64/4096,values=int8"],
    corners: &[
        "topk:0.001",
        "topk:0.05,values=f32",
        "topk:0.4,values=int8",
        "topk:0.02,mode=union",
        "topk:0.02,values=int8,mode=union",
        "topk:count=3",
        "topk:1",
        "topk:1,values=f32",
        "topk:2/64",
        "topk:5/100,values=int8",
        "topk:300/10000,values=int8",
    ],
    parse,
};

fn parse(params: &mut Params<'_>) -> Result<CodecSpec, String> {
    let argument = params.argument("0.01")?;
    let keep = match argument.split_once('/') {
        Some((keep, chunk)) => {
            let (keep, chunk) = (positive("count", keep)?, positive("chunk", chunk)?);
            if keep > chunk {
                return Err(format!("{keep} of {chunk} are too many"));
            }
            Keep::PerChunk { keep, chunk }
        }
        None => Keep::Whole(Share::parse(argument)?),
    };
    let codings = [ValueCoding::F32, ValueCoding::Bf16, ValueCoding::Int8];
    let values = params.one_of("values", &codings.map(|coding| (coding.name(), coding)))?;
    let mode =
        params.one_of("mode", &[("global", OwnerMode::Global), ("union", OwnerMode::Union)])?;
    let (values, mode) = (values.unwrap_or_default(), mode.unwrap_or_default());
    Ok(CodecSpec::new(TopK { keep, values, mode }))
}

impl Codec for TopK {
    fn name(&self) -> String {
        let mut name = match self.keep {
            Keep::Whole(share) => format!("topk:{share}"),
            Keep::PerChunk { keep, chunk } => format!("topk:{keep}/{chunk}"),
        };
        if self.values != ValueCoding::default() {
            name += &format!(",values={}", self.values.name());
        }
        if self.mode == OwnerMode::Union {
            name += ",mode=union";
        }
        name
    }

    fn travels(self: Arc<Self>) -> Travel {
        Travel::Shards(self)
    }

    fn density(&self, elements: usize) -> f64 {
        match self.keep {
            Keep::Whole(share) => share.of(elements) as f64 / elements.max(1) as f64,
            Keep::PerChunk { keep, chunk } => keep as f64 / chunk as f64,
        }
    }

    fn with_density(&self, density: f64) -> Option<CodecSpec> {
        let share = Share::fraction(density);
        let keep = match self.keep {
            Keep::Whole(_) => Keep::Whole(share),
            Keep::PerChunk { chunk, .. } => Keep::PerChunk { keep: share.of(chunk), chunk },
        };
        Some(CodecSpec::new(Self { keep, ..*self }))
    }
}

impl MessageCodec for TopK {
    fn encode(&self, job: &Job<'_>, out: &mut Encoded) -> Result<(), EncodeError> {
        job.check();
        let len = job.place.range.len();
        if len > u32::MAX as usize {
            return Err(EncodeError::TooLong { elements: len, limit: u32::MAX as usize });
        }
        out.resize(job.shards.len(), len);
        let level = Level::detect();
        out.scratch.selected.clear();
        match self.keep {
            _ if job.role == Role::Owner && self.mode == OwnerMode::Union => {
                select(level, job, None, out)?
            }
            Keep::Whole(share) => {
                let keep = proportion(share.of(job.place.whole), len, job.place.whole);
                select(level, job, Some(keep), out)?;
            }
            Keep::PerChunk { keep, chunk } => select_per_chunk(level, job, keep, chunk, out)?,
        }
        let Encoded { messages, residual, scratch } = &mut *out;
        let Sparse { indices, values } = &mut scratch.selected;
        let (mut indices, mut values) = (&indices[..], &mut values[..]);
        for (shard, message) in job.shards.iter().zip(messages) {
            let start = shard.start - job.place.range.start;
            let count = indices.partition_point(|index| (*index as usize) < start + shard.len());
            let (own, rest) = indices.split_at(count);
            let (own_values, rest_values) = values.split_at_mut(count);
            (indices, values) = (rest, rest_values);
            self.encode_shard(level, own, own_values, start, residual, message);
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
        decode(Level::detect(), self.values, bytes, acc, Onto::Sum)
    }

    fn decode_into(
        &self,
        bytes: &[u8],
        place: &CodedPlace,
        acc: &mut [f32],
    ) -> Result<(), DecodeError> {
        assert_eq!(acc.len(), place.range.len(), "one element for each of the range");
        decode(Level::detect(), self.values, bytes, acc, Onto::Zeros { divisor: 1.0 })
    }

    fn decode_divided_into(
        &self,
        bytes: &[u8],
        place: &CodedPlace,
        acc: &mut [f32],
        by: f32,
    ) -> Result<(), DecodeError> {
        assert_eq!(acc.len(), place.range.len(), "one element for each of the range");
        decode(Level::detect(), self.values, bytes, acc, Onto::Zeros { divisor: by })
    }

    fn max_message_len(&self, elements: usize) -> usize {
        4 + index::max_len(elements) + self.values.len(elements)
    }

    fn expected_len(&self, elements: usize) -> usize {
        let kept = self.kept(elements);
        4 + index::expected_len(kept, elements) + self.values.len(kept)
    }
}

impl TopK {
    /// How many of a vector's elements are kept.
    fn kept(&self, elements: usize) -> usize {
        match self.keep {
            Keep::Whole(share) => share.of(elements),
            Keep::PerChunk { keep, chunk } => proportion(keep, elements, chunk),
        }
    }

    /// Encodes the kept elements of one shard. `start` is where the shard starts within the job.
    fn encode_shard(
        &self,
        level: Level,
        indices: &[u32],
        values: &mut [f32],
        start: usize,
        residual: &mut [f32],
        out: &mut Vec<u8>,
    ) {
        out.clear();
        out.extend_from_slice(&(indices.len() as u32).to_le_bytes());
        let mut next = 0;
        let mut within = [0; BLOCK];
        for (indices, values) in indices.chunks(BLOCK).zip(values.chunks_mut(BLOCK)) {
            // Rounding errors are written once the block is coded; by then their cache lines should
            // be here.
            indices.iter().for_each(|index| simd::prefetch(residual, *index as usize));
            let within = &mut within[..indices.len()];
            for (within, index) in within.iter_mut().zip(indices) {
                *within = index - start as u32;
            }
            index::encode(within, next, out);
            next = within[within.len() - 1].wrapping_add(1);
            self.values.encode(level, values, out);
            for (index, left) in indices.iter().zip(values) {
                residual[*index as usize] = *left;
            }
        }
    }
}

/// An accumulator of up to this many elements stays in a cache near enough that prefetching costs
/// more than it gains.
const CACHED: usize = 1 << 21;

/// What a message of kept elements is added to.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Onto {
    /// The accumulator as it is.
    Sum,
    /// Zeros, whatever the accumulator holds; the sum is divided.
    Zeros {
        /// The number to divide by.
        divisor: f32,
    },
}

/// Adds a message of kept elements.
pub(crate) fn decode(
    level: Level,
    coding: ValueCoding,
    bytes: &[u8],
    acc: &mut [f32],
    onto: Onto,
) -> Result<(), DecodeError> {
    let fresh = matches!(onto, Onto::Zeros { .. });
    let Some((count, mut bytes)) = bytes.split_first_chunk::<4>() else {
        return Err(DecodeError::Length { need: 4, given: bytes.len() });
    };
    let count = u32::from_le_bytes(*count) as usize;
    let range = acc.len().min(u32::MAX as usize) as u32;
    if count > range as usize {
        return Err(DecodeError::Count { given: count, range: acc.len() });
    }
    // Indices are decoded one block ahead of the additions, which use the memory bandwidth that
    // decoding leaves idle.
    let mut blocks = [([0; BLOCK], [0.0; BLOCK]), ([0; BLOCK], [0.0; BLOCK])];
    let [ahead, behind] = &mut blocks;
    let (mut ahead, mut behind) = (ahead, behind);
    let (mut left, mut next, mut waiting) = (count, 0, 0);
    loop {
        let taken = left.min(BLOCK);
        let (indices, values) = &*behind;
        let mut due = indices.iter().zip(values).take(waiting);
        if taken > 0 {
            let (indices, values) = &mut *ahead;
            let add_some =
                || due.by_ref().take(16).for_each(|(index, value)| acc[*index as usize] += value);
            let used = index::decode(level, bytes, taken, next, range, indices, add_some)?;
            let end = indices[taken - 1] + 1;
            if fresh {
                // Just before the additions, so that the zeros are still in a cache.
                acc[next as usize..end as usize].fill(0.0);
            } else if acc.len() > CACHED {
                indices[..taken].iter().for_each(|index| simd::prefetch(acc, *index as usize));
            }
            bytes = &bytes[used..];
            let (coded, rest) = bytes
                .split_at_checked(coding.len(taken))
                .ok_or(DecodeError::Length { need: coding.len(taken), given: bytes.len() })?;
            coding.decode(level, coded, &mut values[..taken])?;
            if let Onto::Zeros { divisor } = onto
                && divisor != 1.0
            {
                values[..taken].iter_mut().for_each(|value| *value /= divisor);
            }
            bytes = rest;
            next = end;
            left -= taken;
        }
        due.for_each(|(index, value)| acc[*index as usize] += value);
        waiting = taken;
        (ahead, behind) = (behind, ahead);
        if waiting == 0 {
            break;
        }
    }
    if fresh {
        acc[next as usize..].fill(0.0);
    }
    DecodeError::check_len(bytes, 0)
}

/// `acc[index] += value` for ascending indices: what decoding comes down to once the indices are
/// known, and so its baseline in benchmarks.
///
/// # Panics
///
/// If an index lies outside.
#[doc(hidden)]
pub fn add_at(acc: &mut [f32], indices: &[u32], values: &[f32]) {
    for (at, (index, value)) in indices.iter().zip(values).enumerate() {
        if at % BLOCK == 0 && acc.len() > CACHED {
            let soon = &indices[at..indices.len().min(at + 2 * BLOCK)];
            soon.iter().skip(BLOCK).for_each(|index| simd::prefetch(acc, *index as usize));
        }
        acc[*index as usize] += value;
    }
}

/// `keep` of `whole` elements, scaled to `len` of them. Rounded up, so that every part keeps
/// something.
pub fn proportion(keep: usize, len: usize, whole: usize) -> usize {
    if whole == 0 { 0 } else { (keep as u128 * len as u128).div_ceil(whole as u128) as usize }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::job::{Context, Residual};
    use crate::rng::mix32;

    proptest! {
        /// Additions happen while later indices are decoded. Each must still happen once, at any
        /// level and with any number of blocks.
        #[test]
        fn levels_add_the_same(seed: u32, len in 1usize..3000, share in 0.001f64..=1.0) {
            for values in [ValueCoding::F32, ValueCoding::Bf16, ValueCoding::Int8] {
                let codec = TopK { keep: Keep::Whole(Share::Fraction(share)), values, mode: OwnerMode::Global };
                let place = CodedPlace::whole(Context::default(), len);
                let gradient: Vec<f32> = (0..len as u32).map(|i| mix32(seed, i) as i32 as f32).collect();
                let mut out = Encoded::default();
                codec
                    .encode(&Job::worker(&gradient, Residual::Zero, &place, std::slice::from_ref(&place.range)), &mut out)
                    .unwrap();
                for level in Level::all() {
                    let mut acc = vec![1.0; len];
                    decode(level, values, &out.messages[0], &mut acc, Onto::Sum).unwrap();
                    // What was not sent is in the residual, so where the residual is the whole
                    // gradient, nothing may have been added.
                    let want = gradient.iter().zip(&out.residual).map(|(gradient, left)| 1.0 + (gradient - left));
                    let close = acc.iter().zip(want).all(|(acc, want)| (acc - want).abs() <= want.abs() * 1e-6);
                    prop_assert!(close, "{level:?} {values:?}");
                    let mut portable = vec![1.0; len];
                    decode(Level::PORTABLE, values, &out.messages[0], &mut portable, Onto::Sum).unwrap();
                    prop_assert!(acc.iter().zip(&portable).all(|(a, b)| a.to_bits() == b.to_bits()));
                    let (mut zeros, mut dirty) = (vec![0.0; len], vec![f32::NAN; len]);
                    decode(level, values, &out.messages[0], &mut zeros, Onto::Sum).unwrap();
                    decode(level, values, &out.messages[0], &mut dirty, Onto::Zeros { divisor: 1.0 }).unwrap();
                    prop_assert!(zeros.iter().zip(&dirty).all(|(a, b)| a.to_bits() == b.to_bits()));
                }
            }
        }
    }
}
