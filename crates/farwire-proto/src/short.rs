//! 16-bit floats as f32 and back, without a branch, so that compilers vectorise loops over them.
//! (The conversions of `half` check at each call what the processor can do.)

use half::{bf16, f16};

/// A 16-bit float. Both conversions are exact or round to the nearest, ties to even; a NaN stays a
/// NaN.
pub(crate) trait Short: Copy {
    fn widen(self) -> f32;
    fn narrow(value: f32) -> Self;
}

/// All bits but the sign.
const MAGNITUDE: u32 = 0x7fff_ffff;
const INFINITY: u32 = 0x7f80_0000;

/// `a` or `b`, as a mask rather than a branch.
fn either(condition: bool, a: u32, b: u32) -> u32 {
    let mask = u32::from(condition).wrapping_neg();
    (a & mask) | (b & !mask)
}

impl Short for f16 {
    fn widen(self) -> f32 {
        let bits = u32::from(self.to_bits());
        let (sign, magnitude) = ((bits & 0x8000) << 16, (bits & 0x7fff) << 13);
        // An f32's exponent is biased by 112 more. Multiplying corrects that, for denormals, too.
        let scaled = f32::from_bits(magnitude) * f32::from_bits((127 + 112) << 23);
        let special = magnitude >= 0x7c00 << 13; // an infinity or a NaN
        let scaled = scaled.to_bits();
        f32::from_bits(sign | either(special, magnitude | INFINITY, scaled))
    }

    fn narrow(value: f32) -> Self {
        let bits = value.to_bits();
        let (sign, magnitude) = ((bits >> 16) & 0x8000, bits & MAGNITUDE);
        // A denormal has steps of 2⁻²⁴, as f32s from 0.5 up to 1, so adding 0.5 rounds to those.
        let denormal = (f32::from_bits(magnitude) + 0.5).to_bits().wrapping_sub(0.5f32.to_bits());
        // Otherwise the 13 dropped bits round the rest, which may carry into the exponent.
        let odd = (magnitude >> 13) & 1;
        let normal = magnitude.wrapping_add(0xfff + odd).wrapping_sub(112 << 23) >> 13;
        let nan = 0x7e00 | ((magnitude >> 13) & 0x1ff);
        let large = either(magnitude > INFINITY, nan, 0x7c00);
        let finite = either(magnitude < (127 - 14) << 23, denormal, normal);
        Self::from_bits((sign | either(magnitude >= (127 + 16) << 23, large, finite)) as u16)
    }
}

impl Short for bf16 {
    fn widen(self) -> f32 {
        f32::from_bits(u32::from(self.to_bits()) << 16)
    }

    fn narrow(value: f32) -> Self {
        let bits = value.to_bits();
        let odd = (bits >> 16) & 1;
        let nan = bits | 0x0040_0000;
        let rounded = bits.wrapping_add(0x7fff + odd);
        Self::from_bits((either(bits & MAGNITUDE > INFINITY, nan, rounded) >> 16) as u16)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every 16-bit float there and back; every f32 next to one of them, or next to the middle
    /// between two; and a sample of all f32s.
    macro_rules! agrees_with_half {
        ($name:ident, $type:ident) => {
            #[test]
            fn $name() {
                let narrows_alike = |value: f32| {
                    let (ours, theirs) = (<$type as Short>::narrow(value), $type::from_f32(value));
                    let same = ours.to_bits() == theirs.to_bits();
                    assert!(same || (ours.is_nan() && theirs.is_nan()), "{value:e}: {ours:?}");
                };
                for short in (0..=u16::MAX).map($type::from_bits) {
                    let (ours, theirs) = (short.widen(), short.to_f32());
                    let same = ours.to_bits() == theirs.to_bits();
                    assert!(same || (ours.is_nan() && theirs.is_nan()), "{short:?}: {ours}");
                    let next = $type::from_bits(short.to_bits().wrapping_add(1)).to_f32();
                    let middle = (theirs + next) / 2.0;
                    for near in [theirs, middle] {
                        let bits = near.to_bits();
                        for bits in [bits.wrapping_sub(1), bits, bits.wrapping_add(1)] {
                            narrows_alike(f32::from_bits(bits));
                        }
                    }
                }
                (0..=u32::MAX).step_by(9973).map(f32::from_bits).for_each(narrows_alike);
            }
        };
    }
    agrees_with_half!(f16_is_converted_as_half_does, f16);
    agrees_with_half!(bf16_is_converted_as_half_does, bf16);
}
