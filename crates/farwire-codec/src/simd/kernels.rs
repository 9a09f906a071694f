//! Loops over floats. Each is one body that the compiler vectorises for each level; all but one
//! conversion is safe code.

use super::kernel;
use crate::rng::{mix32, unit32};

const MAGNITUDE: u32 = 0x7fff_ffff;

/// Adding and then subtracting 1.5·2²³ rounds a float below 2²² to the nearest integer, ties to
/// even, in any instruction set.
const ROUND: f32 = 12_582_912.0;

kernel! {
    /// `out = values`. Returns the bits of the largest magnitude.
    fn copy(values: &[f32], out: &mut [f32]) -> u32 {
        let mut largest = 0;
        for (out, value) in out.iter_mut().zip(values) {
            *out = *value;
            largest = largest.max(value.to_bits() & MAGNITUDE);
        }
        largest
    }
}

kernel! {
    /// `out = values + residual`. Returns the bits of the largest magnitude.
    fn add(values: &[f32], residual: &[f32], out: &mut [f32]) -> u32 {
        let mut largest = 0;
        for ((out, value), owed) in out.iter_mut().zip(values).zip(residual) {
            let sum = value + owed;
            *out = sum;
            largest = largest.max(sum.to_bits() & MAGNITUDE);
        }
        largest
    }
}

kernel! {
    /// The largest magnitude.
    fn largest(values: &[f32]) -> f32 {
        f32::from_bits(values.iter().fold(0, |largest, value| largest.max(value.to_bits() & MAGNITUDE)))
    }
}

/// Adds up 16 lanes, halves first.
#[inline(always)]
fn lanes_sum(mut lanes: [f32; 16]) -> f32 {
    for half in [8, 4, 2, 1] {
        for i in 0..half {
            lanes[i] += lanes[i + half];
        }
    }
    lanes[0]
}

/// Sum of `f(value)`, in 16 lanes.
#[inline(always)]
fn sum_of(values: &[f32], f: impl Fn(f32) -> f32) -> f32 {
    let mut lanes = [0.0; 16];
    let (rows, rest) = values.as_chunks::<16>();
    for row in rows {
        for (lane, value) in lanes.iter_mut().zip(row) {
            *lane += f(*value);
        }
    }
    for (lane, value) in lanes.iter_mut().zip(rest) {
        *lane += f(*value);
    }
    lanes_sum(lanes)
}

kernel! {
    /// Sum of magnitudes.
    fn sum_abs(values: &[f32]) -> f32 {
        sum_of(values, f32::abs)
    }
}

kernel! {
    /// Sum of the squares of `value · factor`.
    fn sum_squares(values: &[f32], factor: f32) -> f32 {
        sum_of(values, |value| (value * factor) * (value * factor))
    }
}

kernel! {
    /// Sum of the products of elements, up to the shorter length.
    fn dot(a: &[f32], b: &[f32]) -> f32 {
        let len = a.len().min(b.len());
        let ((a, a_rest), (b, b_rest)) = (a[..len].as_chunks::<16>(), b[..len].as_chunks::<16>());
        let mut lanes = [0.0; 16];
        for (a, b) in a.iter().zip(b) {
            lanes.iter_mut().zip(a).zip(b).for_each(|((lane, a), b)| *lane += a * b);
        }
        lanes.iter_mut().zip(a_rest).zip(b_rest).for_each(|((lane, a), b)| *lane += a * b);
        lanes_sum(lanes)
    }
}

kernel! {
    /// `values = values · factor`.
    fn scale(values: &mut [f32], factor: f32) {
        for value in values {
            *value *= factor;
        }
    }
}

kernel! {
    /// `acc = acc + units · factor`.
    fn add_scaled(acc: &mut [f32], units: &[f32], factor: f32) {
        for (acc, unit) in acc.iter_mut().zip(units) {
            *acc += unit * factor;
        }
    }
}

kernel! {
    /// `acc = acc − units · factor`.
    fn sub_scaled(acc: &mut [f32], units: &[f32], factor: f32) {
        for (acc, unit) in acc.iter_mut().zip(units) {
            *acc -= unit * factor;
        }
    }
}

kernel! {
    /// The nearest integer to `value · inverse`, as bytes; ties to even.
    fn to_int8(values: &[f32], inverse: f32, out: &mut [u8]) {
        for (out, value) in out.iter_mut().zip(values) {
            *out = (value * inverse + ROUND).to_bits() as u8;
        }
    }
}

kernel! {
    /// [`to_int8`], and subtracts the value of the codes, `code · scale`, from `values`.
    fn take_int8(values: &mut [f32], inverse: f32, scale: f32, out: &mut [u8]) {
        for (out, value) in out.iter_mut().zip(values) {
            let rounded = *value * inverse + ROUND;
            *out = rounded.to_bits() as u8;
            *value -= (rounded - ROUND) * scale;
        }
    }
}

kernel! {
    /// `value · inverse`, rounded up or down at random so that the mean is right, as bytes.
    fn to_int8_stochastic(values: &[f32], inverse: f32, key: u32, start: u32, out: &mut [u8]) {
        for (i, (out, value)) in (0u32..).zip(out.iter_mut().zip(values)) {
            // Rounding x + u − ½ to the nearest is rounding x + u down. The clamp is for products a
            // hair past the range.
            let noise = unit32(key, start.wrapping_add(i)) - 0.5;
            *out = ((value * inverse + noise).clamp(-127.0, 127.0) + ROUND).to_bits() as u8;
        }
    }
}

kernel! {
    /// Signed bytes as floats.
    fn from_int8(bytes: &[u8], out: &mut [f32]) {
        for (out, byte) in out.iter_mut().zip(bytes) {
            *out = f32::from(*byte as i8);
        }
    }
}

kernel! {
    /// Packs four-bit codes into half as many bytes: byte `i` takes codes `2i` (low) and `2i + 1`
    /// (high, or zero if there is none).
    fn pack_nibbles(codes: &[u8], out: &mut [u8]) {
        let (pairs, rest) = codes.as_chunks::<2>();
        for (out, [low, high]) in out.iter_mut().zip(pairs) {
            *out = (low & 15) | (high << 4);
        }
        if let ([code], Some(out)) = (rest, out.last_mut()) {
            *out = code & 15;
        }
    }
}

kernel! {
    /// The reverse of [`pack_nibbles`].
    fn unpack_nibbles(bytes: &[u8], codes: &mut [u8]) {
        let (pairs, rest) = codes.as_chunks_mut::<2>();
        for (pair, byte) in pairs.iter_mut().zip(bytes) {
            *pair = [byte & 15, byte >> 4];
        }
        if let ([code], Some(byte)) = (rest, bytes.last()) {
            *code = byte & 15;
        }
    }
}

kernel! {
    /// Four-bit integers −7..=7, stored as 1..=15, as floats. (0 would be −8; encoders do not write
    /// it.)
    fn from_int4(codes: &[u8], out: &mut [f32]) {
        for (out, code) in out.iter_mut().zip(codes) {
            *out = f32::from(*code as i8 - 8);
        }
    }
}

/// The best 16 levels for a Gaussian of variance one (Max, 1960): the eight positive ones.
const LEVELS: [f32; 8] = [0.1284, 0.3881, 0.6568, 0.9424, 1.256, 1.618, 2.069, 2.733];
/// The boundaries between levels.
const BETWEEN: [f32; 7] = [0.2582, 0.5224, 0.7996, 1.099, 1.437, 1.844, 2.401];

kernel! {
    /// The nearest Lloyd–Max level of `value · inverse`: sign in bit 3, level in bits 0 to 2.
    fn to_levels(values: &[f32], inverse: f32, out: &mut [u8]) {
        for (out, value) in out.iter_mut().zip(values) {
            let x = (value * inverse).abs();
            let level: u32 = BETWEEN.iter().map(|edge| u32::from(x > *edge)).sum();
            *out = (level | value.to_bits() >> 31 << 3) as u8;
        }
    }
}

kernel! {
    /// The reverse of [`to_levels`].
    fn from_levels(codes: &[u8], out: &mut [f32]) {
        for (out, code) in out.iter_mut().zip(codes) {
            let level = LEVELS[usize::from(code & 7)];
            *out = f32::from_bits(level.to_bits() | u32::from(code & 8) << 28);
        }
    }
}

/// The e4m3 code of the magnitude of `x`, at most that of 448. `dither` (20 bits) is added before
/// the bits below the mantissa are cut.
#[inline(always)]
fn e4m3(x: f32, dither: u32) -> u32 {
    let x = x.abs();
    let bits = x.to_bits();
    let normal = (bits.wrapping_add(dither) >> 20).wrapping_sub(120 << 3);
    // Below 2⁻⁶ the steps are 2⁻⁹, all equal. Scaled by 2⁹ and by 2²⁰, the same dither serves.
    // SAFETY: the minimum of anything, NaN included, and 2⁻⁶ is at most 2⁻⁶, and a magnitude is not
    // negative, so the product fits.
    let fixed = unsafe { (x.min(0.015625) * 536_870_912.0).to_int_unchecked::<i32>() } as u32;
    let small = fixed.wrapping_add(dither) >> 20;
    (if x < 0.015625 { small } else { normal }).min(0x7e)
}

kernel! {
    /// `value · inverse` as e4m3 bytes, to the nearest (ties to even for normal numbers, away from
    /// zero below 2⁻⁶).
    fn to_e4m3(values: &[f32], inverse: f32, out: &mut [u8]) {
        for (out, value) in out.iter_mut().zip(values) {
            let x = (value * inverse).abs();
            let even = 0x7_ffff + u32::from(x < 0.015625 || x.to_bits() >> 20 & 1 == 1);
            *out = (e4m3(x, even) | value.to_bits() >> 31 << 7) as u8;
        }
    }
}

kernel! {
    /// `value · inverse` as e4m3 bytes, up or down at random so that the mean is right.
    fn to_e4m3_stochastic(values: &[f32], inverse: f32, key: u32, start: u32, out: &mut [u8]) {
        for (i, (out, value)) in (0u32..).zip(out.iter_mut().zip(values)) {
            let dither = mix32(key, start.wrapping_add(i)) >> 12;
            *out = (e4m3((value * inverse).abs(), dither) | value.to_bits() >> 31 << 7) as u8;
        }
    }
}

kernel! {
    /// e4m3 bytes as floats. Returns whether none of them was a NaN.
    fn from_e4m3(bytes: &[u8], out: &mut [f32]) -> bool {
        let mut worst = 0;
        for (out, byte) in out.iter_mut().zip(bytes) {
            let magnitude = u32::from(byte & 0x7f);
            worst = worst.max(magnitude);
            let normal = f32::from_bits((magnitude << 20) + (120 << 23));
            let small = magnitude as i32 as f32 * (1.0 / 512.0);
            let value = if magnitude < 8 { small } else { normal };
            *out = f32::from_bits(value.to_bits() | u32::from(byte & 0x80) << 24);
        }
        worst < 0x7f
    }
}

kernel! {
    /// One bit per value, set where it is negative (−0 included). The last byte is padded with
    /// zeros.
    fn to_signs(values: &[f32], out: &mut [u8]) {
        let (rows, rest) = values.as_chunks::<8>();
        for (out, row) in out.iter_mut().zip(rows) {
            *out = (0..8).fold(0, |byte, i| byte | ((row[i].to_bits() >> 31) as u8) << i);
        }
        if let ([_, ..], Some(out)) = (rest, out.last_mut()) {
            *out = rest.iter().rev().fold(0, |byte, value| byte << 1 | (value.to_bits() >> 31) as u8);
        }
    }
}

kernel! {
    /// `acc = acc + unit`, or `− unit` where the bit is set.
    fn add_signs(bytes: &[u8], unit: f32, acc: &mut [f32]) {
        let (rows, rest) = acc.as_chunks_mut::<16>();
        let (pairs, bytes_rest) = bytes[..].as_chunks::<2>();
        for (row, pair) in rows.iter_mut().zip(pairs) {
            let bits = u32::from(u16::from_le_bytes(*pair));
            *row = std::array::from_fn(|i| row[i] + signed(unit, bits & 1 << i != 0));
        }
        let tail = pairs.get(rows.len()).map_or(bytes_rest, |pair| pair);
        for (i, acc) in rest.iter_mut().enumerate() {
            *acc += signed(unit, tail[i / 8] & 1 << (i % 8) != 0);
        }
    }
}

/// `unit`, or `−unit`.
#[inline(always)]
fn signed(unit: f32, negative: bool) -> f32 {
    f32::from_bits(unit.to_bits() ^ if negative { 0x8000_0000 } else { 0 })
}

/// The nearest bfloat16, ties to even; the largest finite one for larger values.
#[inline(always)]
pub(crate) fn to_bf16_bits(value: f32) -> u16 {
    let magnitude = value.to_bits() & MAGNITUDE;
    let rounded = (magnitude + 0x7fff + (magnitude >> 16 & 1)) >> 16;
    (rounded.min(0x7f7f) | value.to_bits() >> 31 << 15) as u16
}

/// A bfloat16 as f32.
#[inline(always)]
pub(crate) fn from_bf16_bits(bits: u16) -> f32 {
    f32::from_bits(u32::from(bits) << 16)
}

kernel! {
    /// Values as bfloat16. Leaves in `values` what rounding dropped.
    fn to_bf16(values: &mut [f32], out: &mut [u8]) {
        let (out, _) = out.as_chunks_mut::<2>();
        for (out, value) in out.iter_mut().zip(values) {
            let bits = to_bf16_bits(*value);
            *out = bits.to_le_bytes();
            *value -= from_bf16_bits(bits);
        }
    }
}

kernel! {
    /// bfloat16 values as floats. Returns whether all of them were finite.
    fn from_bf16(bytes: &[u8], out: &mut [f32]) -> bool {
        let mut worst = 0;
        for (out, bits) in out.iter_mut().zip(bytes.as_chunks::<2>().0) {
            let bits = u16::from_le_bytes(*bits);
            worst = worst.max(bits & 0x7fff);
            *out = from_bf16_bits(bits);
        }
        worst < 0x7f80
    }
}

kernel! {
    /// `acc = acc + bfloat16 values`. Returns whether all of them were finite.
    fn add_bf16(bytes: &[u8], acc: &mut [f32]) -> bool {
        let mut worst = 0;
        for (acc, bits) in acc.iter_mut().zip(bytes.as_chunks::<2>().0) {
            let bits = u16::from_le_bytes(*bits);
            worst = worst.max(bits & 0x7fff);
            *acc += from_bf16_bits(bits);
        }
        worst < 0x7f80
    }
}

kernel! {
    /// Bytes of floats as floats. Returns whether all of them were finite.
    fn from_f32(bytes: &[u8], out: &mut [f32]) -> bool {
        let mut worst = 0;
        for (out, value) in out.iter_mut().zip(bytes.as_chunks::<4>().0) {
            *out = f32::from_le_bytes(*value);
            worst = worst.max(out.to_bits() & MAGNITUDE);
        }
        worst < f32::INFINITY.to_bits()
    }
}

kernel! {
    /// `acc = acc + f32 values`. Returns whether all of them were finite.
    fn add_f32(bytes: &[u8], acc: &mut [f32]) -> bool {
        let mut worst = 0;
        for (acc, value) in acc.iter_mut().zip(bytes.as_chunks::<4>().0) {
            let value = f32::from_le_bytes(*value);
            worst = worst.max(value.to_bits() & MAGNITUDE);
            *acc += value;
        }
        worst < f32::INFINITY.to_bits()
    }
}

kernel! {
    /// Flips signs at random: element `i` by number `start + i` of the stream `key`.
    fn flip(values: &mut [f32], key: u32, start: u32) {
        for (i, value) in (0u32..).zip(values) {
            *value = f32::from_bits(value.to_bits() ^ mix32(key, start.wrapping_add(i)) & !MAGNITUDE);
        }
    }
}

/// One round of the Hadamard transform within a row.
#[inline(always)]
fn butterfly<const HALF: usize>(row: [f32; 16]) -> [f32; 16] {
    std::array::from_fn(
        |i| if i & HALF == 0 { row[i] + row[i ^ HALF] } else { row[i ^ HALF] - row[i] },
    )
}

kernel! {
    /// The Walsh–Hadamard transform without its factor 1/√len; len is a power of two. Applied twice
    /// it gives `values · len`.
    fn hadamard(values: &mut [f32]) {
        // The first four rounds stay within sixteen neighbours. Written as permutations of a row,
        // they are vectorised too.
        let mut half = 1;
        if values.len() >= 16 {
            for row in values.as_chunks_mut::<16>().0 {
                *row = butterfly::<8>(butterfly::<4>(butterfly::<2>(butterfly::<1>(*row))));
            }
            half = 16;
        }
        while half < values.len() {
            for pair in values.chunks_exact_mut(2 * half) {
                let (low, high) = pair.split_at_mut(half);
                for (low, high) in low.iter_mut().zip(high) {
                    (*low, *high) = (*low + *high, *low - *high);
                }
            }
            half *= 2;
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::Level;
    use super::*;

    fn floats() -> impl Strategy<Value = Vec<f32>> {
        let any = prop_oneof![
            Just(0.0),
            Just(-0.0),
            -2.0f32..2.0,
            any::<f32>().prop_filter("finite", |x| x.is_finite())
        ];
        prop::collection::vec(any, 0..100)
    }

    /// The result of `f` at each level, which must be the same bits.
    fn same<R: PartialEq + std::fmt::Debug>(f: impl Fn(Level) -> R) -> R {
        let results: Vec<_> = Level::all().into_iter().map(&f).collect();
        assert!(results.windows(2).all(|pair| pair[0] == pair[1]), "levels differ: {results:?}");
        f(Level::PORTABLE)
    }

    fn bits(values: &[f32]) -> Vec<u32> {
        values.iter().map(|value| value.to_bits()).collect()
    }

    /// The value of each e4m3 code, from the format's definition.
    fn e4m3_value(code: u8) -> f64 {
        let (exponent, mantissa) = (i32::from(code >> 3 & 15), f64::from(code & 7));
        let magnitude = if exponent == 0 {
            mantissa / 512.0
        } else {
            (1.0 + mantissa / 8.0) * 2f64.powi(exponent - 7)
        };
        if code & 0x80 == 0 { magnitude } else { -magnitude }
    }

    proptest! {
        #[test]
        fn levels_agree(values in floats(), inverse in 0.0f32..100.0, key: u32, start: u32) {
            let n = values.len();
            same(|level| { let mut out = vec![0.0; n]; let m = add(level, &values, &values, &mut out); (m, bits(&out)) });
            same(|level| { let mut out = vec![0.0; n]; let m = copy(level, &values, &mut out); (m, bits(&out)) });
            same(|level| largest(level, &values).to_bits());
            same(|level| sum_abs(level, &values).to_bits());
            same(|level| sum_squares(level, &values, inverse).to_bits());
            same(|level| dot(level, &values, &values[n / 3..]).to_bits());
            same(|level| { let mut v = values.clone(); flip(level, &mut v, key, start); bits(&v) });
            same(|level| { let mut v = values.clone(); sub_scaled(level, &mut v, &values, inverse); bits(&v) });
            same(|level| { let mut v = values.clone(); add_scaled(level, &mut v, &values, inverse); bits(&v) });
            let codes = |f: &dyn Fn(Level, &mut [u8])| same(|level| { let mut out = vec![0; n]; f(level, &mut out); out });
            let int8 = codes(&|level, out| to_int8(level, &values, inverse, out));
            same(|level| {
                // Within the range of codes, which encoders keep to, the result is that of the two
                // separate steps.
                let mut left: Vec<f32> = values.iter().map(|value| value.clamp(-1.0, 1.0)).collect();
                let (mut want, mut codes, mut units) = (left.clone(), vec![0; n], vec![0.0; n]);
                to_int8(level, &want, 127.0, &mut codes);
                from_int8(level, &codes, &mut units);
                sub_scaled(level, &mut want, &units, 1.0 / 127.0);
                let mut out = vec![0; n];
                take_int8(level, &mut left, 127.0, 1.0 / 127.0, &mut out);
                assert_eq!((bits(&left), out), (bits(&want), codes));
                bits(&left)
            });
            codes(&|level, out| to_int8_stochastic(level, &values, inverse, key, start, out));
            let levels = codes(&|level, out| to_levels(level, &values, inverse, out));
            let e4m3 = codes(&|level, out| to_e4m3(level, &values, inverse, out));
            codes(&|level, out| to_e4m3_stochastic(level, &values, inverse, key, start, out));
            let floats = |f: &dyn Fn(Level, &mut [f32])| same(|level| { let mut out = vec![0.5; n]; f(level, &mut out); bits(&out) });
            floats(&|level, out| from_int8(level, &int8, out));
            floats(&|level, out| from_levels(level, &levels, out));
            floats(&|level, out| from_int4(level, &levels, out));
            floats(&|level, out| { from_e4m3(level, &e4m3, out); });
            let signs = same(|level| { let mut out = vec![0; n.div_ceil(8)]; to_signs(level, &values, &mut out); out });
            floats(&|level, out| add_signs(level, &signs, inverse, out));
            let halves = same(|level| { let mut out = vec![0; 2 * n]; to_bf16(level, &mut values.clone(), &mut out); out });
            floats(&|level, out| { add_bf16(level, &halves, out); });
            floats(&|level, out| { from_bf16(level, &halves, out); });
            let wholes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
            floats(&|level, out| { add_f32(level, &wholes, out); });
            floats(&|level, out| { from_f32(level, &wholes, out); });
            let nibbles = same(|level| { let mut out = vec![0; n.div_ceil(2)]; pack_nibbles(level, &levels, &mut out); out });
            let back = same(|level| { let mut out = vec![0; n]; unpack_nibbles(level, &nibbles, &mut out); out });
            prop_assert_eq!(back, levels);
        }

        #[test]
        fn hadamard_is_its_own_inverse(log in 0u32..8, seed: u32) {
            let values: Vec<f32> = (0..1 << log).map(|i| (mix32(seed, i) & 0xff) as f32).collect();
            let twice = same(|level| {
                let mut v = values.clone();
                hadamard(level, &mut v);
                hadamard(level, &mut v);
                bits(&v)
            });
            let want: Vec<f32> = values.iter().map(|value| value * (1 << log) as f32).collect();
            prop_assert_eq!(twice, bits(&want));
        }

        #[test]
        fn e4m3_is_the_nearest(x in -460.0f32..460.0, small in -0.02f32..0.02) {
            for x in [x, small] {
                let mut code = [0];
                to_e4m3(Level::PORTABLE, &[x], 1.0, &mut code);
                let best = (0..=255u8).filter(|c| c & 0x7f != 0x7f).map(|c| (e4m3_value(c) - f64::from(x)).abs()).fold(f64::MAX, f64::min);
                prop_assert_eq!((e4m3_value(code[0]) - f64::from(x)).abs(), best);
            }
        }

        #[test]
        fn bf16_is_what_half_says(x in any::<f32>().prop_filter("finite", |x| x.is_finite())) {
            let half = half::bf16::from_f32(x);
            if half.is_finite() {
                prop_assert_eq!(to_bf16_bits(x), half.to_bits());
            }
        }
    }

    #[test]
    fn every_e4m3_code_means_what_the_format_says() {
        for code in (0..=255u8).filter(|code| code & 0x7f != 0x7f) {
            let mut value = [0.0];
            assert!(from_e4m3(Level::PORTABLE, &[code], &mut value));
            assert_eq!(f64::from(value[0]), e4m3_value(code));
            let mut back = [0];
            to_e4m3(Level::PORTABLE, &value, 1.0, &mut back);
            assert_eq!(back[0], code);
        }
        assert!(!from_e4m3(Level::PORTABLE, &[0xff], &mut [0.0]));
    }
}
