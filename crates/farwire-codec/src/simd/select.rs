//! Which elements are large: the compress-store at the heart of top-k.

use super::{Level, Set, prefetch};

/// The most elements that one call looks at.
pub(crate) const TILE: usize = 2048;

/// Room for the results of a tile; the vector forms store whole registers and need some slack.
pub(crate) struct Found {
    indices: [u32; TILE + 16],
    values: [f32; TILE + 16],
    count: usize,
}

impl Found {
    pub(crate) fn new() -> Self {
        Self { indices: [0; TILE + 16], values: [0.0; TILE + 16], count: 0 }
    }

    /// Indices and values of what was found last, in order.
    pub(crate) fn get(&self) -> (&[u32], &[f32]) {
        (&self.indices[..self.count], &self.values[..self.count])
    }
}

/// Finds the elements of `values` (at most [`TILE`]) whose magnitude has bits of at least `floor`.
/// Their indices count from `base`.
///
/// Meanwhile it prefetches as many elements of `soon`, which will be read next: the search works in
/// the first-level cache and leaves the memory idle.
pub(crate) fn compress(
    level: Level,
    values: &[f32],
    base: u32,
    floor: u32,
    soon: [&[f32]; 2],
    found: &mut Found,
) {
    match level.0 {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: the level is proof that the instructions are there.
        Set::Avx512 => unsafe { avx512(values, base, floor, soon, found) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: as above.
        Set::Avx2 => unsafe { avx2(values, base, floor, soon, found) },
        Set::Portable => {
            found.count = 0;
            portable(values, base, floor, found);
        }
    }
}

/// Appends what it finds.
fn portable(values: &[f32], base: u32, floor: u32, found: &mut Found) {
    for (i, value) in (0u32..).zip(values) {
        found.indices[found.count] = base.wrapping_add(i);
        found.values[found.count] = *value;
        found.count += usize::from(value.to_bits() & 0x7fff_ffff >= floor);
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,popcnt")]
fn avx512(values: &[f32], base: u32, floor: u32, soon: [&[f32]; 2], found: &mut Found) {
    use std::arch::x86_64::*;

    assert!(values.len() <= TILE, "a tile at most");
    found.count = 0;
    let (rows, rest) = values.as_chunks::<16>();
    let magnitude = _mm512_set1_epi32(0x7fff_ffff);
    let floor_lanes = _mm512_set1_epi32(floor as i32);
    let step = _mm512_set1_epi32(16);
    let iota = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    let mut index = _mm512_add_epi32(_mm512_set1_epi32(base as i32), iota);
    let mut count = 0;
    for (k, row) in rows.iter().enumerate() {
        soon.iter().for_each(|soon| prefetch(soon, 16 * k));
        // SAFETY: `row` is 16 floats long.
        let lanes = unsafe { _mm512_loadu_si512(row.as_ptr().cast()) };
        let mask = _mm512_cmpge_epu32_mask(_mm512_and_si512(lanes, magnitude), floor_lanes);
        if mask != 0 {
            // SAFETY: `count` grows by at most 16 with each row, and all rows together have at most
            // TILE elements (checked above). Both arrays hold more.
            unsafe {
                let indices = found.indices.as_mut_ptr().add(count);
                _mm512_storeu_si512(indices.cast(), _mm512_maskz_compress_epi32(mask, index));
                let values = found.values.as_mut_ptr().add(count);
                _mm512_storeu_si512(values.cast(), _mm512_maskz_compress_epi32(mask, lanes));
            }
            count += mask.count_ones() as usize;
        }
        index = _mm512_add_epi32(index, step);
    }
    found.count = count;
    portable(rest, base.wrapping_add(16 * rows.len() as u32), floor, found);
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,bmi1,bmi2,popcnt,lzcnt")]
fn avx2(values: &[f32], base: u32, floor: u32, soon: [&[f32]; 2], found: &mut Found) {
    use std::arch::x86_64::*;

    assert!(values.len() <= TILE, "a tile at most");
    found.count = 0;
    let (rows, rest) = values.as_chunks::<8>();
    let magnitude = _mm256_set1_epi32(0x7fff_ffff);
    // Magnitudes and the floor have no sign bit, so a signed comparison works; at least `floor` is
    // more than one below it.
    let below = _mm256_set1_epi32(floor as i32 - 1);
    let step = _mm256_set1_epi32(8);
    let mut index =
        _mm256_add_epi32(_mm256_set1_epi32(base as i32), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
    let mut count = 0;
    for (k, row) in rows.iter().enumerate() {
        if k % 2 == 0 {
            soon.iter().for_each(|soon| prefetch(soon, 8 * k));
        }
        // SAFETY: `row` is 8 floats long.
        let lanes = unsafe { _mm256_loadu_si256(row.as_ptr().cast()) };
        let above = _mm256_cmpgt_epi32(_mm256_and_si256(lanes, magnitude), below);
        let mask = _mm256_movemask_ps(_mm256_castsi256_ps(above)) as u32;
        if mask != 0 {
            // The numbers of the lanes to keep, a byte each, packed to the front; then widened to
            // 32 bits each.
            let nibbles = _pdep_u64(u64::from(mask), 0x0101_0101_0101_0101) * 0xff;
            let order = _pext_u64(0x0706_0504_0302_0100, nibbles);
            let order = _mm256_cvtepu8_epi32(_mm_cvtsi64_si128(order as i64));
            // SAFETY: `count` grows by at most 8 with each row, and all rows together have at most
            // TILE elements (checked above). Both arrays hold more.
            unsafe {
                let indices = found.indices.as_mut_ptr().add(count);
                _mm256_storeu_si256(indices.cast(), _mm256_permutevar8x32_epi32(index, order));
                let values = found.values.as_mut_ptr().add(count);
                _mm256_storeu_si256(values.cast(), _mm256_permutevar8x32_epi32(lanes, order));
            }
            count += mask.count_ones() as usize;
        }
        index = _mm256_add_epi32(index, step);
    }
    found.count = count;
    portable(rest, base.wrapping_add(8 * rows.len() as u32), floor, found);
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn levels_find_the_same(
            values in prop::collection::vec(prop_oneof![Just(0.0f32), Just(-0.0), any::<f32>(), -1.0f32..1.0], 0..300),
            base: u32,
            floor in prop_oneof![0u32..4, 0u32..0x7fff_ffff, 0x3f00_0000u32..0x3f80_0000],
        ) {
            let want: Vec<_> = (0u32..).zip(&values).filter(|(_, x)| x.abs().to_bits() >= floor).collect();
            for level in Level::all() {
                let mut found = Found::new();
                compress(level, &values, base, floor, [&values; 2], &mut found);
                let (indices, floats) = found.get();
                prop_assert_eq!(indices.len(), want.len());
                for ((index, value), (i, x)) in indices.iter().zip(floats).zip(&want) {
                    prop_assert_eq!((*index, value.to_bits()), (base.wrapping_add(*i), x.to_bits()));
                }
            }
        }
    }
}
