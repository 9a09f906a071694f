//! Decoding the gaps between kept elements; `index.rs` has the format.

use super::{Level, Set, kernel};
use crate::error::DecodeError;
use crate::index::BLOCK;

/// Decodes `count` gaps of `low` low bits each (at most 23) into indices, the first of which is at
/// least `next`.
///
/// Returns how many bytes that took, and the last index. Indices ascend, so if the last is below
/// `range`, they all are. Sound for any bytes, and quick to give up on a unary part that runs past
/// `range`.
///
/// # Panics
///
/// If `low` is larger, or `count` is zero or larger than a block: the caller must check what the
/// message says.
///
/// Decoding keeps a core busy and leaves its memory idle. To make use of that, `meanwhile` is
/// called once for every sixteen gaps, or not at all.
#[allow(clippy::too_many_arguments, reason = "a kernel takes its state apart")]
pub(crate) fn decode_gaps(
    level: Level,
    bytes: &[u8],
    low: u32,
    count: usize,
    next: u32,
    range: u32,
    out: &mut [u32; BLOCK],
    meanwhile: impl FnMut(),
) -> Result<(usize, u64), DecodeError> {
    assert!(low <= 23 && (1..=BLOCK).contains(&count));
    let low_len = (count * low as usize).div_ceil(8);
    if bytes.len() <= low_len {
        return Err(DecodeError::Length { need: low_len + 1, given: bytes.len() });
    }
    #[cfg(target_arch = "x86_64")]
    if level.0 == Set::Avx512 && low <= 17 {
        // SAFETY: the level is proof that the instructions are there.
        return unsafe { avx512(bytes, low, count, next, range, out, meanwhile) };
    }
    portable(level, bytes, low_len, low, count, next, range, out)
}

/// Eight bytes from `at`, with zeros for what lies past the end.
#[inline(always)]
fn word(bytes: &[u8], at: usize) -> u64 {
    match bytes.get(at..at + 8) {
        Some(word) => u64::from_le_bytes(word.try_into().expect("eight bytes")),
        None => {
            bytes.iter().skip(at).take(8).rev().fold(0, |word, byte| word << 8 | u64::from(*byte))
        }
    }
}

/// The last index, and the bytes up to the last bit of the unary part.
#[inline(always)]
fn ends(low_len: usize, low: u32, count: usize, next: u32, lows: u32, last: u32) -> (usize, u64) {
    let high = u64::from(last) + 1 - count as u64;
    let last_index = u64::from(next) + u64::from(lows) + (high << low) + count as u64 - 1;
    (low_len + last as usize / 8 + 1, last_index)
}

/// The error for a unary part that ends too early or runs too far.
#[inline(always)]
fn runaway(at: usize, bytes: &[u8], range: u32) -> DecodeError {
    if at >= bytes.len() {
        DecodeError::Length { need: bytes.len() + 1, given: bytes.len() }
    } else {
        DecodeError::Index { range: range as usize }
    }
}

kernel! {
    #[allow(clippy::too_many_arguments, reason = "a kernel takes its state apart")]
    fn portable(
        bytes: &[u8],
        low_len: usize,
        low: u32,
        count: usize,
        next: u32,
        range: u32,
        out: &mut [u32; BLOCK],
    ) -> Result<(usize, u64), DecodeError> {
        let unary = &bytes[low_len..];
        let (mut found, mut at) = (0, 0);
        while found < count {
            if at >= unary.len() || at as u64 * 8 > u64::from(range) {
                return Err(runaway(at, unary, range));
            }
            let mut word = word(unary, at);
            let ones = (word.count_ones() as usize).min(count - found);
            for position in &mut out[found..found + ones] {
                *position = (at * 8) as u32 + word.trailing_zeros();
                word &= word.wrapping_sub(1);
            }
            found += ones;
            at += 8;
        }
        let last = out[count - 1];
        let (mask, mut sum) = ((1u64 << low) - 1, 0u32);
        for (j, out) in out[..count].iter_mut().enumerate() {
            let bit = j * low as usize;
            sum += (word(bytes, bit / 8) >> (bit % 8) & mask) as u32;
            *out = next.wrapping_add(sum).wrapping_add((*out - j as u32) << low).wrapping_add(j as u32);
        }
        Ok(ends(low_len, low, count, next, sum, last))
    }
}

kernel! {
    /// The position of the `n`-th set bit in `bytes`, with `n` counted from one; `None` if there
    /// are fewer.
    fn nth_one(bytes: &[u8], n: u32) -> Option<u32> {
        let mut left = n;
        for at in (0..bytes.len()).step_by(8) {
            let mut word = word(bytes, at);
            let ones = word.count_ones();
            if ones < left {
                left -= ones;
                continue;
            }
            // Halve what is left of the word: skip the lower half if it has too few ones.
            let mut bit = u32::try_from(8 * at).ok()?;
            for half in [32, 16, 8, 4, 2, 1] {
                let lower = (word & ((1 << half) - 1)).count_ones();
                let passed = u32::from(lower < left);
                left -= passed * lower;
                word >>= passed * half;
                bit += passed * half;
            }
            return Some(bit);
        }
        None
    }
}

/// For up to 17 low bits, which always fit in two neighbouring 16-bit words.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,bmi1,bmi2,popcnt,lzcnt")]
#[allow(clippy::too_many_arguments, reason = "a kernel takes its state apart")]
fn avx512(
    bytes: &[u8],
    low: u32,
    count: usize,
    next: u32,
    range: u32,
    out: &mut [u32; BLOCK],
    mut meanwhile: impl FnMut(),
) -> Result<(usize, u64), DecodeError> {
    use std::arch::x86_64::*;

    // All loads and stores by pointer below rely on these bounds.
    assert!(low <= 17 && (1..=BLOCK).contains(&count));
    let low_len = (count * low as usize).div_ceil(8);
    // The positions of the ones in the unary part. Sixteen bits at a time, the lanes whose bit is
    // set are packed together.
    let mut positions = [0u32; BLOCK + 64 + 16];
    let unary = &bytes[low_len..];
    let iota = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    let sixteen = _mm512_set1_epi32(16);
    let mut position = iota;
    let (mut found, mut at) = (0, 0);
    while found < count {
        if at >= unary.len() || at as u64 * 8 > u64::from(range) {
            return Err(runaway(at, unary, range));
        }
        let word = word(unary, at);
        for quarter in 0..4 {
            let mask = (word >> (16 * quarter)) as u16;
            // SAFETY: `found` was below BLOCK before this word, which adds at most 64, so 16 places
            // follow.
            unsafe {
                let to = positions.as_mut_ptr().add(found);
                _mm512_storeu_si512(to.cast(), _mm512_maskz_compress_epi32(mask, position));
            }
            found += mask.count_ones() as usize;
            position = _mm512_add_epi32(position, sixteen);
        }
        at += 8;
    }

    // index = next + sum of low parts so far + (zeros so far << low) + j, where the zeros before
    // the j-th one are position − j. The low parts of sixteen gaps are 2·low bytes, so each row
    // starts at a byte. Lane j takes the two 16-bit words that hold its bits.
    let zero = _mm512_setzero_si512();
    let last_lane = _mm512_set1_epi32(15);
    let low_mask = _mm512_set1_epi32((1 << low) - 1);
    let shift = _mm_cvtsi32_si128(low as i32);
    let next_lanes = _mm512_set1_epi32(next as i32);
    let bit = _mm512_mullo_epi32(iota, _mm512_set1_epi32(low as i32));
    let first = _mm512_srli_epi32::<4>(bit);
    let second = _mm512_slli_epi32::<16>(_mm512_add_epi32(first, _mm512_set1_epi32(1)));
    let words_of_lane = _mm512_or_si512(first, second);
    let bit_of_word = _mm512_and_si512(bit, _mm512_set1_epi32(15));
    let mut j = iota;
    let mut sum = zero;
    for row in 0..count.div_ceil(16) {
        let lows = &bytes[2 * low as usize * row..low_len];
        let there = u64::MAX >> (64 - lows.len().clamp(1, 64));
        // SAFETY: only the bytes of `lows` are loaded; where it is empty `low` is zero, and the
        // byte loaded instead is the first of the unary part, which has one: it was looked through
        // above, for at least one bit.
        let words = unsafe { _mm512_maskz_loadu_epi8(there, lows.as_ptr().cast()) };
        let bits = _mm512_srlv_epi32(_mm512_permutexvar_epi16(words_of_lane, words), bit_of_word);
        // Lanes past the last element count as zero, whatever pads the last byte.
        let live = (u32::MAX >> (32 - (count - 16 * row).min(16))) as u16;
        let mut lows = _mm512_maskz_and_epi32(live, bits, low_mask);
        lows = _mm512_add_epi32(lows, _mm512_alignr_epi32::<15>(lows, zero));
        lows = _mm512_add_epi32(lows, _mm512_alignr_epi32::<14>(lows, zero));
        lows = _mm512_add_epi32(lows, _mm512_alignr_epi32::<12>(lows, zero));
        lows = _mm512_add_epi32(lows, _mm512_alignr_epi32::<8>(lows, zero));
        lows = _mm512_add_epi32(lows, sum);
        sum = _mm512_permutexvar_epi32(last_lane, lows);
        // SAFETY: row < 16, and both arrays hold at least BLOCK = 256 elements.
        unsafe {
            let position = _mm512_loadu_si512(positions.as_ptr().add(16 * row).cast());
            let zeros = _mm512_sll_epi32(_mm512_sub_epi32(position, j), shift);
            let index =
                _mm512_add_epi32(_mm512_add_epi32(zeros, lows), _mm512_add_epi32(next_lanes, j));
            _mm512_storeu_si512(out.as_mut_ptr().add(16 * row).cast(), index);
        }
        j = _mm512_add_epi32(j, sixteen);
        meanwhile();
    }
    let lows = _mm_cvtsi128_si32(_mm512_castsi512_si128(sum)) as u32;
    Ok(ends(low_len, low, count, next, lows, positions[count - 1]))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn levels_find_the_nth_one(bytes in prop::collection::vec(any::<u8>(), 0..99), n in 1u32..300) {
            let set = |bit: &u32| bytes[*bit as usize / 8] >> (bit % 8) & 1 == 1;
            let want = (0..8 * bytes.len() as u32).filter(set).nth(n as usize - 1);
            for level in Level::all() {
                prop_assert_eq!(nth_one(level, &bytes, n), want);
            }
        }

        /// Any bytes at all: the same indices, or an error, at every level.
        #[test]
        fn levels_decode_the_same(
            bytes in prop::collection::vec(any::<u8>(), 1..900),
            low in 0u32..24,
            count in 1usize..=BLOCK,
            next in 0u32..1000,
            range in prop_oneof![1u32..5000, any::<u32>()],
        ) {
            let results: Vec<_> = Level::all().into_iter().map(|level| {
                let mut out = [0; BLOCK];
                let result = decode_gaps(level, &bytes, low, count, next, range, &mut out, || ());
                (result, result.is_ok().then(|| out[..count].to_vec()))
            }).collect();
            prop_assert!(results.windows(2).all(|pair| pair[0] == pair[1]));
            if let (Ok((used, last)), Some(out)) = &results[0] && *last < u64::from(range) {
                prop_assert!(*used <= bytes.len());
                prop_assert_eq!(u64::from(out[count - 1]), *last);
                prop_assert!(out[0] >= next && out.windows(2).all(|pair| pair[0] < pair[1]));
            }
        }
    }
}
