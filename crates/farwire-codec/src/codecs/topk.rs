//! Top-k: the largest elements by magnitude, and error feedback for the rest.
//!
//! Steps at a worker, over a vector of n elements of which k are kept:
//! 1. Guess from a sample a magnitude that a little more than k elements reach (the *floor*).
//! 2. In one pass over memory: a = gradient + residual, write it, check that it is finite, and collect the elements that reach the
//!    floor (the *candidates*).
//! 3. Select exactly k among the candidates; of equal magnitudes the lowest index wins. If the guess was too high, take
//!    a floor from a histogram of all exponents and collect again. So the result never depends on the guess.
//! 4. Code each shard; the kept elements' residual is what rounding dropped.
//!
//! An owner does the same with its sum. In mode *global* it keeps its share of k, ⌈k·len/n⌉, and owes the rest; in mode *union* it
//! sends everything that is not zero.
//!
//! Per chunk, `64/4096` keeps 64 of every 4,096 elements, and ⌈64·len/4096⌉ of a shorter chunk.
//!
//! Bytes of a message: u32 count, then for every 256 kept elements their indices (`index.rs`) and values (`kept.rs`). At 1 % and
//! bf16 values about 24.2 bits per kept element.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use crate::codec::{Codec, CodecFamily, MessageCodec, Travel};
use crate::dense::sections;
use crate::error::{DecodeError, EncodeError};
use crate::index::{self, BLOCK};
use crate::job::{CodedPlace, Encoded, Fused, Job, Role, Sparse};
use crate::kept::ValueCoding;
use crate::rng::mix32;
use crate::simd::{self, Found, Level, Stream, TILE};
use crate::spec::{CodecSpec, Params, positive};
use crate::threads;

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
    /// So many of the whole vector.
    Whole(Share),
    /// So many of each chunk of the vector.
    PerChunk {
        /// Elements kept, 1 to `chunk`.
        keep: usize,
        /// Elements of a chunk.
        chunk: usize,
    },
}

/// A part of a vector.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Share {
    /// A fraction in (0, 1] of the elements, rounded, but at least one.
    Fraction(f64),
    /// This many, or all if there are fewer.
    Count(usize),
}

impl Share {
    /// How many of `elements` that is.
    pub fn of(self, elements: usize) -> usize {
        match self {
            Self::Fraction(fraction) => ((fraction * elements as f64).round() as usize).max(1).min(elements),
            Self::Count(count) => count.min(elements),
        }
    }

    /// What [`Display`](fmt::Display) prints.
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
    let mode = params.one_of("mode", &[("global", OwnerMode::Global), ("union", OwnerMode::Union)])?;
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
            _ if job.role == Role::Owner && self.mode == OwnerMode::Union => select(level, job, None, out)?,
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

    fn add_decoded_into(&self, bytes: &[u8], place: &CodedPlace, acc: &mut [f32]) -> Result<(), DecodeError> {
        assert_eq!(acc.len(), place.range.len(), "one element for each of the range");
        decode(Level::detect(), self.values, bytes, acc, false)
    }

    fn decode_into(&self, bytes: &[u8], place: &CodedPlace, acc: &mut [f32]) -> Result<(), DecodeError> {
        assert_eq!(acc.len(), place.range.len(), "one element for each of the range");
        decode(Level::detect(), self.values, bytes, acc, true)
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

    /// Codes kept elements of one shard. `start` is where the shard starts within the job.
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
            // What rounding leaves is written when the block is coded: by then its lines should be here.
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

/// An accumulator of this many elements stays in a cache near enough that asking for lines ahead costs more than it gains.
const CACHED: usize = 1 << 21;

/// Adds a message of kept elements; with `fresh`, to zeros in place of what `acc` holds.
pub(crate) fn decode(
    level: Level,
    coding: ValueCoding,
    bytes: &[u8],
    acc: &mut [f32],
    fresh: bool,
) -> Result<(), DecodeError> {
    let Some((count, mut bytes)) = bytes.split_first_chunk::<4>() else {
        return Err(DecodeError::Length { need: 4, given: bytes.len() });
    };
    let count = u32::from_le_bytes(*count) as usize;
    let range = acc.len().min(u32::MAX as usize) as u32;
    if count > range as usize {
        return Err(DecodeError::Count { given: count, range: acc.len() });
    }
    // Indices are decoded one block ahead of the additions, which fill the gaps that decoding leaves in the use of memory.
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
            let add_some = || due.by_ref().take(16).for_each(|(index, value)| acc[*index as usize] += value);
            let used = index::decode(level, bytes, taken, next, range, indices, add_some)?;
            let end = indices[taken - 1] + 1;
            if fresh {
                // Just before they are added to, so that they are in a cache then.
                acc[next as usize..end as usize].fill(0.0);
            } else if acc.len() > CACHED {
                indices[..taken].iter().for_each(|index| simd::prefetch(acc, *index as usize));
            }
            bytes = &bytes[used..];
            let (coded, rest) = bytes
                .split_at_checked(coding.len(taken))
                .ok_or(DecodeError::Length { need: coding.len(taken), given: bytes.len() })?;
            coding.decode(level, coded, &mut values[..taken])?;
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

/// `acc[index] += value` for ascending indices: what decoding comes down to once they are known, and so what it is measured against.
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

/// `keep` of `whole`, scaled to `len` of them: rounded up, so that something is kept of everything.
fn proportion(keep: usize, len: usize, whole: usize) -> usize {
    if whole == 0 { 0 } else { (keep as u128 * len as u128).div_ceil(whole as u128) as usize }
}

/// Selects the `keep` largest elements of the job, or with `None` all that are not zero. Writes the fused values to the residual.
fn select(level: Level, job: &Job<'_>, keep: Option<usize>, out: &mut Encoded) -> Result<(), EncodeError> {
    let Encoded { residual, scratch, .. } = out;
    let floor = keep.map_or(1, |keep| guess_floor(level, job, keep));
    let ranges: Vec<_> = sections(0..residual.len(), TILE, job.threads.get()).collect();
    scratch.candidates.resize_with(ranges.len(), Sparse::default);

    let mut rest = &mut residual[..];
    let tasks = ranges.iter().zip(&mut scratch.candidates).map(|(range, candidates)| {
        let own;
        (own, rest) = std::mem::take(&mut rest).split_at_mut(range.len());
        (range.clone(), own, candidates)
    });
    let results = threads::in_order(job.threads, tasks.collect(), |(range, own, candidates)| {
        candidates.clear();
        let (mut fused, mut found) = (Fused::new(level, job), Found::new());
        let mut stream = Stream::new(level, job.values.len(), TILE);
        for (k, own) in own.chunks_mut(TILE).enumerate() {
            let start = range.start + k * TILE;
            stream.write(own, |tile| {
                fused.read(start, tile)?;
                simd::compress(level, tile, start as u32, floor, fused.soon(start + tile.len()), &mut found);
                Ok(())
            })?;
            let (indices, values) = found.get();
            candidates.extend(indices, values);
        }
        Ok(())
    });
    results.into_iter().collect::<Result<(), _>>()?;

    let total = |candidates: &[Sparse]| candidates.iter().map(Sparse::len).sum::<usize>();
    let Some(keep) = keep else {
        for candidates in &scratch.candidates {
            scratch.selected.extend(&candidates.indices, &candidates.values);
        }
        return Ok(());
    };
    if floor > 1 && total(&scratch.candidates) < keep {
        let floor = histogram_floor(residual, keep);
        for (range, candidates) in ranges.iter().zip(&mut scratch.candidates) {
            collect(level, residual, range.clone(), floor, &mut Found::new(), candidates);
        }
    }
    take_largest(&scratch.candidates, keep, &mut scratch.selected);
    if scratch.selected.len() < keep {
        fill_with_zeros(residual, keep, &mut scratch.selected);
    }
    Ok(())
}

/// Collects what reaches the floor within a range of values that are already fused.
fn collect(
    level: Level,
    values: &[f32],
    range: Range<usize>,
    floor: u32,
    found: &mut Found,
    candidates: &mut Sparse,
) {
    candidates.clear();
    for (k, tile) in values[range.clone()].chunks(TILE).enumerate() {
        simd::compress(level, tile, (range.start + k * TILE) as u32, floor, [&[]; 2], found);
        let (indices, values) = found.get();
        candidates.extend(indices, values);
    }
}

fn magnitude(value: f32) -> u32 {
    value.to_bits() & 0x7fff_ffff
}

/// Bits of a magnitude that probably a few more than `keep` elements reach. At least 1: zeros are never candidates.
fn guess_floor(level: Level, job: &Job<'_>, keep: usize) -> u32 {
    const LINE: usize = 16;
    let len = job.values.len();
    let lines = (len / 256).min(1024);
    let expected = (lines * LINE) as f64 * keep as f64 / len.max(1) as f64;
    let rank = (expected + 4.0 * expected.sqrt() + 8.0) as usize;
    if rank >= lines * LINE {
        return 1;
    }
    let mut fused = Fused::new(level, job);
    let mut sample = Vec::with_capacity(lines * LINE);
    for line in 0..lines {
        // Not at equal distances, which might be the period of something in the data.
        let stride = len / lines;
        let start = line * stride + mix32(0, line as u32) as usize % (stride - LINE + 1);
        let mut values = [0.0; LINE];
        // What is not finite is found, and named, by the pass over everything.
        let _ = fused.read(start, &mut values);
        sample.extend(values.map(magnitude));
    }
    let (_, floor, _) = sample.select_nth_unstable_by(rank, |a, b| b.cmp(a));
    (*floor).max(1)
}

/// Bits of a magnitude that at least `keep` elements reach, or 1 if fewer than that are not zero.
fn histogram_floor(values: &[f32], keep: usize) -> u32 {
    let mut bins = [0usize; 2048];
    for value in values {
        bins[(magnitude(*value) >> 20) as usize] += 1;
    }
    let mut above = 0;
    let bin = (0..2048).rev().find(|bin| {
        above += bins[*bin];
        above >= keep
    });
    (bin.unwrap_or(0) as u32) << 20 | 1
}

/// The magnitude of the `keep`-th largest candidate (1 is the largest), and how many of exactly that magnitude are kept.
///
/// Eleven, ten and ten bits of the magnitude are settled in turn, each by a count of how many candidates have which.
fn threshold(candidates: &[Sparse], keep: usize) -> (u32, usize) {
    let (mut prefix, mut left) = (0u32, keep);
    for (shift, bits) in [(20, 11), (10, 10), (0, 10)] {
        let mut bins = [0usize; 2048];
        let settled = shift + bits;
        for value in candidates.iter().flat_map(|list| &list.values) {
            let m = magnitude(*value);
            // The sign is gone, so the first round, with nothing settled, compares zeros.
            if u64::from(m) >> settled == u64::from(prefix) >> settled {
                bins[(m >> shift & ((1 << bits) - 1)) as usize] += 1;
            }
        }
        let bin = (0..1usize << bits).rev().find(|bin| {
            let enough = bins[*bin] >= left;
            left -= if enough { 0 } else { bins[*bin] };
            enough
        });
        prefix |= (bin.expect("there are at least `keep` candidates") as u32) << shift;
    }
    (prefix, left)
}

/// Appends the `keep` largest candidates to `selected`, or all if there are fewer.
fn take_largest(candidates: &[Sparse], keep: usize, selected: &mut Sparse) {
    if keep == 0 {
        return;
    }
    if candidates.iter().map(Sparse::len).sum::<usize>() <= keep {
        candidates.iter().for_each(|list| selected.extend(&list.indices, &list.values));
        return;
    }
    if let [few] = candidates
        && few.len() <= FEW
    {
        return take_largest_of_few(few, keep, selected);
    }
    let (threshold, ties) = threshold(candidates, keep);
    candidates.iter().fold(ties, |ties, list| take_above(list, threshold, ties, selected));
}

/// Appends the candidates above the threshold, and the first `ties` of those at it. Returns how many more of them may come.
fn take_above(candidates: &Sparse, threshold: u32, mut ties: usize, selected: &mut Sparse) -> usize {
    let start = selected.len();
    selected.indices.resize(start + candidates.len(), 0);
    selected.values.resize(start + candidates.len(), 0.0);
    // Whether one is taken cannot be predicted, so each is written and the next may replace it.
    let mut end = start;
    for (index, value) in candidates.iter() {
        let m = magnitude(value);
        let tie = m == threshold && ties > 0;
        ties -= usize::from(tie);
        selected.indices[end] = index;
        selected.values[end] = value;
        end += usize::from(m > threshold || tie);
    }
    selected.indices.truncate(end);
    selected.values.truncate(end);
    ties
}

/// Adds the first zeros of `values` to `selected`, which holds everything else, until there are `keep`.
fn fill_with_zeros(values: &[f32], keep: usize, selected: &mut Sparse) {
    let mut missing = keep - selected.len();
    let mut filled = Sparse::default();
    for (index, value) in (0u32..).zip(values) {
        let zero = magnitude(*value) == 0;
        if zero && missing == 0 {
            continue;
        }
        missing -= usize::from(zero);
        filled.push(index, *value);
    }
    *selected = filled;
}

/// Selects `keep` of every `chunk` elements of the whole vector, and in proportion of what the job has of a chunk.
fn select_per_chunk(
    level: Level,
    job: &Job<'_>,
    keep: usize,
    chunk: usize,
    out: &mut Encoded,
) -> Result<(), EncodeError> {
    let Encoded { residual, scratch, .. } = out;
    let first = job.place.range.start;
    // Sections end where chunks of the whole vector do.
    let grid = first / chunk * chunk..job.place.range.end;
    let ranges: Vec<_> = sections(grid, chunk, job.threads.get())
        .map(|range| range.start.max(first)..range.end)
        .filter(|range| !range.is_empty())
        .collect();
    scratch.candidates.resize_with(ranges.len(), Sparse::default);
    let mut rest = &mut residual[..];
    let tasks = ranges.iter().zip(&mut scratch.candidates).map(|(range, kept)| {
        let own;
        (own, rest) = std::mem::take(&mut rest).split_at_mut(range.len());
        (range.clone(), own, kept)
    });
    let results = threads::in_order(job.threads, tasks.collect(), |(range, own, kept)| {
        kept.clear();
        let mut selector = ChunkSelector::new(level, job);
        let (mut start, mut rest) = (range.start, own);
        while !rest.is_empty() {
            let end = (start / chunk + 1).saturating_mul(chunk).min(range.end);
            let (values, later) = std::mem::take(&mut rest).split_at_mut(end - start);
            selector.select(start - first, proportion(keep, values.len(), chunk), values, kept)?;
            (start, rest) = (end, later);
        }
        Ok(())
    });
    results.into_iter().collect::<Result<(), _>>()?;
    for kept in &scratch.candidates {
        scratch.selected.extend(&kept.indices, &kept.values);
    }
    Ok(())
}

/// Selects from one chunk after the other.
struct ChunkSelector<'a> {
    level: Level,
    fused: Fused<'a>,
    found: Found,
    candidates: Sparse,
    /// What probably enough elements of the next chunk reach.
    floor: u32,
}

impl<'a> ChunkSelector<'a> {
    fn new(level: Level, job: &Job<'a>) -> Self {
        let (fused, candidates) = (Fused::new(level, job), Sparse::default());
        Self { level, fused, found: Found::new(), candidates, floor: 1 }
    }

    /// Fuses the chunk that starts at `start` of the job into `values`, and appends the `keep` largest to `kept`.
    fn select(
        &mut self,
        start: usize,
        keep: usize,
        values: &mut [f32],
        kept: &mut Sparse,
    ) -> Result<(), EncodeError> {
        for (k, tile) in values.chunks_mut(TILE).enumerate() {
            self.fused.read(start + k * TILE, tile)?;
        }
        self.collect(values, self.floor);
        if self.candidates.len() < keep && self.floor > 1 {
            self.collect(values, histogram_floor(values, keep));
        }
        if self.candidates.len() < keep {
            fill_with_zeros(values, keep, &mut self.candidates);
        }
        let before = kept.len();
        take_largest_of_few(&self.candidates, keep, kept);
        kept.indices[before..].iter_mut().for_each(|index| *index += start as u32);
        let least = kept.values[before..].iter().map(|value| magnitude(*value)).min().unwrap_or(1);
        // An eighth of an octave lower: chunks of one tensor differ by less than that, mostly.
        self.floor = least.saturating_sub(1 << 20).max(1);
        Ok(())
    }

    fn collect(&mut self, values: &[f32], floor: u32) {
        collect(self.level, values, 0..values.len(), floor, &mut self.found, &mut self.candidates);
    }
}

/// Candidates up to this many are rather sorted than counted.
const FEW: usize = 1024;

/// [`take_largest`] for a few candidates.
fn take_largest_of_few(candidates: &Sparse, keep: usize, selected: &mut Sparse) {
    if keep == 0 {
        return;
    }
    let mut magnitudes: Vec<u32> = candidates.values.iter().map(|value| magnitude(*value)).collect();
    let (above, threshold, _) = magnitudes.select_nth_unstable_by(keep - 1, |a, b| b.cmp(a));
    let threshold = *threshold;
    let ties = keep - above.iter().filter(|m| **m > threshold).count();
    take_above(candidates, threshold, ties, selected);
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::job::{Context, Residual};

    proptest! {
        /// Additions happen while later indices are decoded: each still happens once, whatever the level and however many blocks there are.
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
                    decode(level, values, &out.messages[0], &mut acc, false).unwrap();
                    // What was not sent is in the residual, so where that is the gradient nothing may have been added.
                    let want = gradient.iter().zip(&out.residual).map(|(gradient, left)| 1.0 + (gradient - left));
                    let close = acc.iter().zip(want).all(|(acc, want)| (acc - want).abs() <= want.abs() * 1e-6);
                    prop_assert!(close, "{level:?} {values:?}");
                    let mut portable = vec![1.0; len];
                    decode(Level::PORTABLE, values, &out.messages[0], &mut portable, false).unwrap();
                    prop_assert!(acc.iter().zip(&portable).all(|(a, b)| a.to_bits() == b.to_bits()));
                    let (mut zeros, mut dirty) = (vec![0.0; len], vec![f32::NAN; len]);
                    decode(level, values, &out.messages[0], &mut zeros, false).unwrap();
                    decode(level, values, &out.messages[0], &mut dirty, true).unwrap();
                    prop_assert!(zeros.iter().zip(&dirty).all(|(a, b)| a.to_bits() == b.to_bits()));
                }
            }
        }
    }
}
