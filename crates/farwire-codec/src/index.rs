//! Ascending indices on the wire: Golomb–Rice coded gaps, in blocks of 256.
//!
//! The gap of an index is how many elements lie between it and the one before. A block is
//!
//! ```text
//!  u8 low │ low bits of each gap, `low` bits each │ gap >> low of each, in unary: that many zeros and a one
//! ```
//!
//! both parts padded to a byte with zeros. Bits go from the least significant up. `low` is what
//! makes this block shortest; kept apart, the parts decode a word at a time. Two special cases come
//! for free: `low` = 0 is a bitmap, and [`RUN`] in its place, with nothing after it, a block
//! without gaps. So the cost never exceeds one bit per element passed, and all elements cost
//! nothing.
//!
//! At 1 % kept: 8.15 bits per index; entropy 8.08.

use crate::error::DecodeError;
use crate::simd::{self, Level};

/// Indices per block.
pub(crate) const BLOCK: usize = 256;

/// In place of `low`: the block is `next..next + count`.
const RUN: u8 = 0xff;

/// More low bits than this are never, or hardly ever, worth it within 2³² elements and 256 to a
/// block.
const MAX_LOW: u32 = 23;

/// The most bytes the blocks of any ascending indices below `elements` take.
pub(crate) fn max_len(elements: usize) -> usize {
    elements / 8 + 2 * elements.div_ceil(BLOCK)
}

/// Bytes that the blocks of this many random indices below `elements` take.
pub(crate) fn expected_len(indices: usize, elements: usize) -> usize {
    let density = indices as f64 / elements.max(1) as f64;
    let entropy = |p: f64| if p > 0.0 { -p * p.log2() } else { 0.0 };
    let bits = elements as f64 * (entropy(density) + entropy(1.0 - density));
    // What this coding costs above the entropy, and a byte for each block.
    (1.01 * bits / 8.0) as usize + indices.div_ceil(BLOCK)
}

/// Appends a block of at most [`BLOCK`] ascending indices, the first at least `next`.
pub(crate) fn encode(indices: &[u32], next: u32, out: &mut Vec<u8>) {
    let (count, Some(last)) = (indices.len(), indices.last()) else { return };
    let passed = u64::from(last - next) + 1 - count as u64;
    if passed == 0 {
        return out.push(RUN);
    }
    let mut gaps = [0; BLOCK];
    let mut due = next;
    for (gap, index) in gaps.iter_mut().zip(indices) {
        *gap = index - due;
        due = index + 1;
    }
    let gaps = &gaps[..count];
    let low = best_low(gaps, passed);

    out.push(low as u8);
    let (mut word, mut filled) = (0u64, 0);
    for gap in gaps {
        word |= (u64::from(*gap) & ((1 << low) - 1)) << filled;
        filled += low;
        if filled >= 32 {
            out.extend_from_slice(&(word as u32).to_le_bytes());
            (word, filled) = (word >> 32, filled - 32);
        }
    }
    out.extend_from_slice(&word.to_le_bytes()[..filled.div_ceil(8) as usize]);

    let unary = out.len();
    let mut bit = 0;
    for gap in gaps {
        bit += (gap >> low) as usize;
        let byte = unary + bit / 8;
        if byte >= out.len() {
            out.resize(byte + 1, 0);
        }
        out[byte] |= 1 << (bit % 8);
        bit += 1;
    }
}

/// The number of low bits that makes the block shortest, among zero and those the mean gap
/// suggests.
fn best_low(gaps: &[u32], passed: u64) -> u32 {
    // The high parts add up to less than the elements passed, so to less than 2³².
    let bits = |low: u32| {
        u64::from(gaps.iter().map(|gap| gap >> low).sum::<u32>())
            + u64::from(low + 1) * gaps.len() as u64
    };
    // The best for a geometric distribution is near log₂ of ln 2 times its mean.
    let guess = (passed * 45_426 / 65_536 / gaps.len() as u64).max(1).ilog2().min(MAX_LOW);
    [0, guess.saturating_sub(1), guess, (guess + 1).min(MAX_LOW)]
        .into_iter()
        .min_by_key(|low| bits(*low))
        .expect("there are four")
}

/// Decodes a block of `count` indices from the front of `bytes`, the first at least `next`, all
/// below `range`.
///
/// Returns the bytes used. For `meanwhile` see [`simd::decode_gaps`].
pub(crate) fn decode(
    level: Level,
    bytes: &[u8],
    count: usize,
    next: u32,
    range: u32,
    out: &mut [u32; BLOCK],
    meanwhile: impl FnMut(),
) -> Result<usize, DecodeError> {
    let outside = DecodeError::Index { range: range as usize };
    let Some((low, rest)) = bytes.split_first() else {
        return Err(DecodeError::Length { need: 1, given: 0 });
    };
    if *low == RUN {
        if u64::from(next) + count as u64 > u64::from(range) {
            return Err(outside);
        }
        for (out, index) in out[..count].iter_mut().zip(next..) {
            *out = index;
        }
        return Ok(1);
    }
    if u32::from(*low) > MAX_LOW {
        return Err(DecodeError::Field("number of low bits"));
    }
    let (used, last) =
        simd::decode_gaps(level, rest, u32::from(*low), count, next, range, out, meanwhile)?;
    if last < u64::from(range) { Ok(1 + used) } else { Err(outside) }
}

/// Measures a block of `count` indices at the front of `bytes`: how many bytes it takes, and at
/// which bit of its unary part the last one is. `None` if no encoder wrote it. Does not check that
/// the indices lie in any range.
pub(crate) fn skip(level: Level, bytes: &[u8], count: usize) -> Option<(usize, u32)> {
    let (low, rest) = bytes.split_first()?;
    if *low == RUN {
        return Some((1, 0));
    }
    if u32::from(*low) > MAX_LOW {
        return None;
    }
    let low_len = (count * usize::from(*low)).div_ceil(8);
    let bit = simd::nth_one(level, rest.get(low_len..)?, count as u32)?;
    Some((1 + low_len + bit as usize / 8 + 1, bit))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Encodes `indices` in blocks, decodes them again and returns the bytes it took.
    fn round_trip(indices: &[u32], range: u32) -> usize {
        let mut bytes = Vec::new();
        let mut next = 0;
        for block in indices.chunks(BLOCK) {
            encode(block, next, &mut bytes);
            next = block[block.len() - 1].wrapping_add(1);
        }
        assert!(
            bytes.len() <= max_len(range as usize),
            "{} bytes for {range} elements",
            bytes.len()
        );
        for level in Level::all() {
            let mut rest = &bytes[..];
            for block in indices.chunks(BLOCK) {
                let (used, _) = skip(level, rest, block.len()).unwrap();
                rest = &rest[used..];
            }
            assert!(rest.is_empty());
            let (mut rest, mut next, mut out) = (&bytes[..], 0, [0; BLOCK]);
            for block in indices.chunks(BLOCK) {
                let used = decode(level, rest, block.len(), next, range, &mut out, || ()).unwrap();
                assert_eq!(out[..block.len()], *block);
                next = block[block.len() - 1].wrapping_add(1);
                rest = &rest[used..];
            }
            assert!(rest.is_empty());
        }
        bytes.len()
    }

    proptest! {
        #[test]
        fn indices_come_back(gaps in prop::collection::vec(prop_oneof![0u32..2, 0u32..300, 0u32..100_000], 0..1000), rest in 0u32..1000) {
            let indices: Vec<u32> = gaps.iter().scan(0, |next, gap| {
                let index = *next + gap;
                *next = index + 1;
                Some(index)
            }).collect();
            let range = indices.last().map_or(0, |last| last + 1) + rest;
            round_trip(&indices, range);
        }
    }

    #[test]
    fn the_far_ends_of_the_range_come_back() {
        round_trip(&[u32::MAX - 1], u32::MAX);
        round_trip(&[0, u32::MAX - 1], u32::MAX);
        round_trip(&(0..10_000).map(|i| i * 400_000).collect::<Vec<_>>(), u32::MAX);
    }

    #[test]
    fn all_elements_cost_nothing_and_most_cost_a_bitmap() {
        let all: Vec<u32> = (0..10_240).collect();
        assert_eq!(round_trip(&all, 10_240), 40);
        let most: Vec<u32> = all.iter().copied().filter(|i| i % 3 != 0).collect();
        assert!(round_trip(&most, 10_240) <= 10_240 / 8 + 2 * 27);
    }
}
