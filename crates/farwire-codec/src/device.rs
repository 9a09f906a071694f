//! What codecs on a GPU need from those on the CPU, so that both make the same bytes.
//!
//! Not part of the public interface: `farwire-cuda` is the only caller.

use std::ops::Range;

use crate::codecs::powersgd::{self, PowerSgd, Shape};
use crate::codecs::randk::RandomK;
use crate::dense::Noise;
use crate::error::EncodeError;
use crate::index;
use crate::job::{CodedPlace, Context, Role};
use crate::kept::ValueCoding;
use crate::simd::{self, Level};

pub use crate::codecs::topk::proportion;

/// Rows and columns per partial sum of PowerSGD.
pub use crate::codecs::powersgd::{BAND as POWER_BAND, SEGMENT as POWER_SEGMENT};

/// The Q that a step of PowerSGD starts with, column by column.
pub fn power_start(
    codec: PowerSgd,
    warm: Option<&[f32]>,
    shape: Shape,
    context: Context,
) -> Vec<f32> {
    codec.start(warm, shape, context)
}

/// The sum of P with its columns made orthonormal; an error if it is not finite.
pub fn power_basis(mut sum: Vec<f32>, rank: usize) -> Result<Vec<f32>, EncodeError> {
    powersgd::check_finite(&sum)?;
    powersgd::orthonormalise(&mut sum, rank);
    Ok(sum)
}

/// Whether all of a factor is finite.
pub fn power_check(factor: &[f32]) -> Result<(), EncodeError> {
    powersgd::check_finite(factor)
}

/// Elements per block of kept elements.
pub const KEPT_BLOCK: usize = index::BLOCK;

/// The keys of the two streams of 32-bit numbers that a block quantiser draws from.
#[derive(Clone, Copy, Debug)]
pub struct Keys {
    /// For stochastic rounding.
    pub rounding: u32,
    /// For the signs of a rotation.
    pub rotation: u32,
}

impl Keys {
    /// The keys for this place.
    pub fn new(place: &CodedPlace, role: Role, rank: u32) -> Self {
        let noise = Noise::new(place, role, rank, 0);
        Self { rounding: noise.rounding.key32(), rotation: noise.rotation.key32() }
    }
}

/// Panics unless the shards follow one another over all of the place.
pub fn check_shards(place: &CodedPlace, shards: &[Range<usize>]) {
    place.check(shards);
}

/// The strata that random-k draws from: stratum `j` of `count` starts at `j · elements / count`, and
/// number `j` of the SplitMix64 stream `key` says which of its elements is drawn.
#[derive(Clone, Copy, Debug)]
pub struct Draws {
    /// Elements of the whole vector.
    pub elements: u64,
    /// Strata of the whole vector.
    pub count: u64,
    /// The key of the stream.
    pub key: u64,
}

impl Draws {
    /// The strata of the vector that `place` is in.
    pub fn new(codec: &RandomK, place: &CodedPlace) -> Self {
        let strata = codec.strata(place);
        Self { elements: strata.elements, count: strata.count, key: strata.counter.key() }
    }
}

/// The first stratum whose drawn element is in `place`, if there is one, and how many there are.
pub fn drawn_within(codec: &RandomK, place: &CodedPlace) -> (u64, usize) {
    codec.strata(place).run_within(place.range.clone())
}

/// Where a block of kept elements is in a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct KeptBlock {
    /// Its first byte.
    pub at: u64,
    /// At which bit of its unary part the last one is.
    pub last: u32,
    /// How many elements it has.
    pub count: u32,
}

/// Walks over the blocks of a top-k message for `elements` elements, and appends them to `blocks`.
/// Returns false if no encoder writes such a message. Whether indices and values are in range is
/// left to the decoder to check.
pub fn kept_blocks(
    values: ValueCoding,
    bytes: &[u8],
    elements: usize,
    blocks: &mut Vec<KeptBlock>,
) -> bool {
    walk(values, bytes, elements, blocks).is_some()
}

fn walk(
    values: ValueCoding,
    bytes: &[u8],
    elements: usize,
    blocks: &mut Vec<KeptBlock>,
) -> Option<()> {
    let (count, mut rest) = bytes.split_first_chunk::<4>()?;
    let level = Level::detect();
    let mut left = u32::from_le_bytes(*count) as usize;
    if left > elements {
        return None;
    }
    while left > 0 {
        let count = left.min(KEPT_BLOCK);
        let (used, last) = index::skip(level, rest, count)?;
        let at = (bytes.len() - rest.len()) as u64;
        // Each block says where the next one starts, so reading would wait for memory again and
        // again. But blocks are about equally long, so the place of a later one can be guessed and
        // fetched early.
        let len = used + values.len(count);
        (0..used + 64).step_by(64).for_each(|line| simd::prefetch(rest, 6 * len + line));
        rest = rest.get(len..)?;
        blocks.push(KeptBlock { at, last, count: count as u32 });
        left -= count;
    }
    rest.is_empty().then_some(())
}
