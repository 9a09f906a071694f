//! Which elements are the largest: steps 1 to 3 of top-k.

use std::ops::Range;

use super::proportion;
use crate::dense::sections;
use crate::error::EncodeError;
use crate::job::{Encoded, Fused, Job, Sparse};
use crate::rng::mix32;
use crate::simd::{self, Found, Level, Stream, TILE};
use crate::threads;

/// Selects the `keep` largest elements of the job, or with `None` all that are not zero. Writes the
/// fused values to the residual.
pub(super) fn select(
    level: Level,
    job: &Job<'_>,
    keep: Option<usize>,
    out: &mut Encoded,
) -> Result<(), EncodeError> {
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
                simd::compress(
                    level,
                    tile,
                    start as u32,
                    floor,
                    fused.soon(start + tile.len()),
                    &mut found,
                );
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

/// Collects the elements of a range that reach the floor. The values are already fused.
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

/// Bits of a magnitude that slightly more than `keep` elements probably reach. At least 1: zeros
/// are never candidates.
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
        // Not evenly spaced: the data might be periodic with the same spacing.
        let stride = len / lines;
        let start = line * stride + mix32(0, line as u32) as usize % (stride - LINE + 1);
        let mut values = [0.0; LINE];
        // Values that are not finite are reported by the pass over everything.
        let _ = fused.read(start, &mut values);
        sample.extend(values.map(magnitude));
    }
    let (_, floor, _) = sample.select_nth_unstable_by(rank, |a, b| b.cmp(a));
    (*floor).max(1)
}

/// Bits of a magnitude that at least `keep` elements reach, or 1 if fewer elements than that are
/// not zero.
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

/// The magnitude of the `keep`-th largest candidate (1 is the largest), and how many of exactly
/// that magnitude are kept.
///
/// Settles eleven, ten and ten bits of the magnitude in turn, each by counting the candidates for
/// every value of those bits.
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

/// Appends the candidates above the threshold, and the first `ties` of those at it. Returns how
/// many more ties may be taken.
fn take_above(
    candidates: &Sparse,
    threshold: u32,
    mut ties: usize,
    selected: &mut Sparse,
) -> usize {
    let start = selected.len();
    selected.indices.resize(start + candidates.len(), 0);
    selected.values.resize(start + candidates.len(), 0.0);
    // A branch here would be unpredictable, so each candidate is written and the next may overwrite
    // it.
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

/// Adds the first zeros of `values` to `selected`, which holds everything else, until there are
/// `keep`.
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

/// Selects `keep` of every `chunk` elements of the whole vector, and proportionally fewer where the
/// job has only part of a chunk.
pub(super) fn select_per_chunk(
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
    /// A floor that enough elements of the next chunk probably reach.
    floor: u32,
}

impl<'a> ChunkSelector<'a> {
    fn new(level: Level, job: &Job<'a>) -> Self {
        let (fused, candidates) = (Fused::new(level, job), Sparse::default());
        Self { level, fused, found: Found::new(), candidates, floor: 1 }
    }

    /// Fuses the chunk that starts at `start` of the job into `values`, and appends the `keep`
    /// largest to `kept`.
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
        // An eighth of an octave lower: chunks of one tensor mostly differ by less than that.
        self.floor = least.saturating_sub(1 << 20).max(1);
        Ok(())
    }

    fn collect(&mut self, values: &[f32], floor: u32) {
        collect(self.level, values, 0..values.len(), floor, &mut self.found, &mut self.candidates);
    }
}

/// Up to this many candidates are partially sorted rather than counted.
const FEW: usize = 1024;

/// [`take_largest`] for a few candidates.
fn take_largest_of_few(candidates: &Sparse, keep: usize, selected: &mut Sparse) {
    if keep == 0 {
        return;
    }
    let mut magnitudes: Vec<u32> =
        candidates.values.iter().map(|value| magnitude(*value)).collect();
    let (above, threshold, _) = magnitudes.select_nth_unstable_by(keep - 1, |a, b| b.cmp(a));
    let threshold = *threshold;
    let ties = keep - above.iter().filter(|m| **m > threshold).count();
    take_above(candidates, threshold, ties, selected);
}
