//! The only home of offset arithmetic: which elements a rank owns, and which of them one frame
//! carries.
//!
//! A vector is cut into one *block* per rank, and each block into *segments*, the unit of one
//! frame:
//!
//! ```text
//!  vector  ├──────────── len ────────────┤
//!  blocks  ├── 0 ───┼── 1 ───┼── 2 ──┤        one per rank; even: lengths differ by at most one
//!  segments├─┼─┼─┼┤                           of `segment` elements, the last one shorter
//! ```
//!
//! Everything is in elements; bytes appear only in [`Span::bytes`]. Every block has **at least one
//! segment**, empty if need be: that is what makes every pair of ranks exchange at least one frame
//! per operation, whatever the length.

use std::num::NonZeroUsize;
use std::ops::Range;
use std::sync::Arc;

use crate::dtype::DType;
use crate::ids::{Rank, WorldSize};

/// A run of elements.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Span {
    /// Index of the first element.
    pub start: usize,
    /// Number of elements.
    pub len: usize,
}

impl Span {
    /// The elements `start..start + len`.
    pub fn new(start: usize, len: usize) -> Self {
        Self { start, len }
    }

    /// Index one past the last element.
    pub fn end(self) -> usize {
        self.start + self.len
    }

    /// The same elements, counted from the start of `base`, which contains them.
    pub fn within(self, base: Span) -> Self {
        debug_assert!(self.start >= base.start && self.end() <= base.end());
        Self { start: self.start - base.start, len: self.len }
    }

    /// The span as a range of bytes in a buffer of `dtype`.
    pub fn bytes(self, dtype: DType) -> Range<usize> {
        self.start * dtype.size()..self.end() * dtype.size()
    }
}

/// How long each rank's block is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Counts {
    /// The same number of elements for each rank.
    Each(usize),
    /// As listed, one length per rank.
    Listed(Arc<[usize]>),
}

impl Counts {
    /// One length per rank. Equal lengths become [`Each`](Self::Each), however they were given.
    pub fn listed(counts: impl Into<Arc<[usize]>>, world: WorldSize) -> Self {
        let counts = counts.into();
        match counts.first() {
            Some(first)
                if counts.len() == world.len() && counts.iter().all(|count| count == first) =>
            {
                Self::Each(*first)
            }
            _ => Self::Listed(counts),
        }
    }

    /// A vector of `len` elements cut as evenly as possible.
    pub fn even(len: usize, world: WorldSize) -> Self {
        let partition = Partition::even(len, world, NonZeroUsize::MAX);
        Self::listed(world.ranks().map(|rank| partition.block(rank).len).collect::<Vec<_>>(), world)
    }

    /// Elements of `rank`'s block.
    pub fn of(&self, rank: Rank) -> usize {
        match self {
            Self::Each(count) => *count,
            Self::Listed(counts) => counts[rank.index()],
        }
    }

    /// Elements of all blocks together, or `None` if that overflows.
    pub fn total(&self, world: WorldSize) -> Option<usize> {
        world.ranks().try_fold(0usize, |sum, rank| sum.checked_add(self.of(rank)))
    }

    /// A 32-bit digest by which ranks compare their lists in a frame header: zero for
    /// [`Each`](Self::Each), a hash otherwise.
    pub fn digest(&self) -> u32 {
        match self {
            Self::Each(_) => 0,
            Self::Listed(counts) => digest(counts.iter().map(|count| *count as u64)),
        }
    }
}

/// A 32-bit hash (FNV-1a), never zero; different lists have different ones, barring bad luck.
pub(crate) fn digest(list: impl Iterator<Item = u64>) -> u32 {
    let step = |hash: u32, byte: u8| (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193);
    list.flat_map(u64::to_le_bytes).fold(0x811c_9dc5, step).max(1)
}

/// A vector cut into blocks and segments.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Partition {
    blocks: Blocks,
    segment: NonZeroUsize,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Blocks {
    /// `parts` blocks of `base` elements, the first `extra` of them one longer.
    Even { base: usize, extra: usize, parts: usize },
    /// Block `j` is `starts[j]..starts[j + 1]`.
    Listed { starts: Arc<[usize]> },
}

impl Partition {
    /// `len` elements in one block per rank, as even as possible: the first `len % world` blocks
    /// are one longer.
    ///
    /// All blocks have the same number of segments, so schedules can count frames without asking
    /// which block they are in.
    pub fn even(len: usize, world: WorldSize, segment: NonZeroUsize) -> Self {
        let parts = world.len();
        let blocks = Blocks::Even { base: len / parts, extra: len % parts, parts };
        Self { blocks, segment }
    }

    /// `len` elements as a single block.
    pub fn whole(len: usize, segment: NonZeroUsize) -> Self {
        Self { blocks: Blocks::Even { base: len, extra: 0, parts: 1 }, segment }
    }

    /// One block per rank with the given lengths, whose sum must not overflow (see
    /// [`Counts::total`]).
    pub fn of_counts(counts: &Counts, world: WorldSize, segment: NonZeroUsize) -> Self {
        let blocks = match counts {
            Counts::Each(count) => Blocks::Even { base: *count, extra: 0, parts: world.len() },
            Counts::Listed(counts) => {
                let ends = counts.iter().scan(0, |end, count| {
                    *end += count;
                    Some(*end)
                });
                Blocks::Listed { starts: std::iter::once(0).chain(ends).collect() }
            }
        };
        Self { blocks, segment }
    }

    /// The elements that `owner` owns.
    pub fn block(&self, owner: Rank) -> Span {
        let j = owner.index();
        match &self.blocks {
            Blocks::Even { base, extra, parts } => {
                debug_assert!(j < *parts);
                Span::new(j * base + j.min(*extra), base + usize::from(j < *extra))
            }
            Blocks::Listed { starts } => Span::new(starts[j], starts[j + 1] - starts[j]),
        }
    }

    /// Elements in all blocks together.
    pub fn len(&self) -> usize {
        match &self.blocks {
            Blocks::Even { base, extra, parts } => base * parts + extra,
            Blocks::Listed { starts } => starts[starts.len() - 1],
        }
    }

    /// Whether there are no elements at all.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// How many frames `owner`'s block takes: at least one.
    pub fn segments(&self, owner: Rank) -> usize {
        let longest = match &self.blocks {
            Blocks::Even { base, extra, .. } => base + usize::from(*extra > 0),
            Blocks::Listed { .. } => self.block(owner).len,
        };
        longest.div_ceil(self.segment.get()).max(1)
    }

    /// The elements of the `k`-th segment of `owner`'s block; the last ones may be short or empty.
    pub fn segment(&self, owner: Rank, k: usize) -> Span {
        let block = self.block(owner);
        let offset = k.saturating_mul(self.segment.get()).min(block.len);
        Span::new(block.start + offset, self.segment.get().min(block.len - offset))
    }

    /// The length of the longest segment of any block: what a scratch buffer must hold.
    pub fn longest_segment(&self) -> usize {
        let longest = match &self.blocks {
            Blocks::Even { base, extra, .. } => base + usize::from(*extra > 0),
            Blocks::Listed { starts } => starts.windows(2).map(|w| w[1] - w[0]).max().unwrap_or(0),
        };
        longest.min(self.segment.get())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn world(n: u32) -> WorldSize {
        WorldSize::new(n).unwrap()
    }

    /// Blocks and their segments must tile the vector: no gap, no overlap, in order.
    fn assert_tiles(partition: &Partition, world: WorldSize, len: usize, segment: usize) {
        let mut next = 0;
        for owner in world.ranks() {
            let block = partition.block(owner);
            assert_eq!(block.start, next);
            assert!(partition.segments(owner) >= 1);
            for k in 0..partition.segments(owner) {
                let span = partition.segment(owner, k);
                assert_eq!(span.start, next);
                assert!(span.len <= segment && span.len <= partition.longest_segment());
                next = span.end();
            }
            assert_eq!(next, block.end());
        }
        assert_eq!(next, len);
        assert_eq!(partition.len(), len);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(1024))]

        #[test]
        fn even_blocks_tile_the_vector(n in 1u32..40, len in 0usize..5000, segment in 1usize..6000) {
            let partition = Partition::even(len, world(n), NonZeroUsize::new(segment).unwrap());
            assert_tiles(&partition, world(n), len, segment);
            let lengths: Vec<_> = world(n).ranks().map(|r| partition.block(r).len).collect();
            prop_assert!(lengths.iter().max().unwrap() - lengths.iter().min().unwrap() <= 1);
            let segments: Vec<_> = world(n).ranks().map(|r| partition.segments(r)).collect();
            prop_assert!(segments.iter().all(|k| *k == segments[0]));
        }

        #[test]
        fn listed_blocks_tile_the_vector(
            counts in prop::collection::vec(0usize..300, 1..20),
            segment in 1usize..400,
        ) {
            let total = counts.iter().sum();
            let n = world(counts.len() as u32);
            let counts = Counts::listed(counts, n);
            prop_assert_eq!(counts.total(n), Some(total));
            let partition = Partition::of_counts(&counts, n, NonZeroUsize::new(segment).unwrap());
            assert_tiles(&partition, n, total, segment);
        }
    }

    #[test]
    fn huge_vectors_do_not_overflow() {
        let segment = NonZeroUsize::new(1 << 14).unwrap();
        let partition = Partition::even(usize::MAX / 8, world(1000), segment);
        let last = Rank(999);
        assert_eq!(partition.block(last).end(), usize::MAX / 8);
        assert_eq!(partition.segment(last, partition.segments(last) - 1).end(), usize::MAX / 8);
        assert_eq!(Counts::Each(usize::MAX).total(world(2)), None);
    }

    #[test]
    fn digests_tell_lists_apart() {
        assert_eq!(Counts::Each(7).digest(), 0);
        let listed = |counts: &[usize]| Counts::listed(counts, world(counts.len() as u32)).digest();
        assert_ne!(listed(&[1, 2]), listed(&[2, 1]));
        assert_ne!(listed(&[0, 1]), listed(&[0, 0, 1]));
        assert_eq!(listed(&[3, 3]), 0, "equal lengths are equal, however they were given");
        assert_eq!(Counts::even(6, world(2)), Counts::Each(3));
    }
}
