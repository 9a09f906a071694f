//! Half the bytes: each element rounded to a 16-bit float, to the nearest, ties to even.
//!
//! Bytes: 2 per element. A value too large for the type becomes its largest finite number; with
//! error feedback the rest is sent later.

use std::sync::Arc;

use half::f16;
use half::slice::HalfFloatSliceExt;

use crate::codec::{Codec, CodecFamily, Travel};
use crate::dense::{Noise, Tiles};
use crate::error::DecodeError;
use crate::simd::{self, Level};
use crate::spec::CodecSpec;

/// A 16-bit float type to round to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Cast {
    /// bfloat16: f32's range, 8 bits of precision.
    Bf16,
    /// IEEE binary16: 11 bits of precision, up to 65,504.
    F16,
}

pub(super) const FAMILY: CodecFamily = CodecFamily {
    names: &["bf16", "f16"],
    forms: "bf16, f16",
    help: "each element rounded to a 16-bit float",
    typical: &["bf16", "f16"],
    corners: &[],
    parse: |params| Ok(CodecSpec::new(if params.name == "bf16" { Cast::Bf16 } else { Cast::F16 })),
};

impl Codec for Cast {
    fn name(&self) -> String {
        match self {
            Self::Bf16 => "bf16".into(),
            Self::F16 => "f16".into(),
        }
    }

    fn travels(self: Arc<Self>) -> Travel {
        Travel::Shards(self)
    }

    fn trains_like_dense(&self) -> bool {
        true
    }
}

const TILE: usize = 2048;

impl Tiles for Cast {
    fn tile(&self) -> usize {
        TILE
    }

    fn coded_len(&self, elements: usize) -> usize {
        2 * elements
    }

    fn encode_tile(&self, level: Level, _: &Noise, values: &mut [f32], out: &mut [u8]) {
        match self {
            Self::Bf16 => simd::to_bf16(level, values, out),
            Self::F16 => {
                let (mut clamped, mut halves) = ([0.0; TILE], [f16::ZERO; TILE]);
                let (clamped, halves) = (&mut clamped[..values.len()], &mut halves[..values.len()]);
                for (clamped, value) in clamped.iter_mut().zip(&*values) {
                    *clamped = value.clamp(f16::MIN.to_f32_const(), f16::MAX.to_f32_const());
                }
                halves.convert_from_f32_slice(clamped);
                halves.convert_to_f32_slice(clamped);
                out.copy_from_slice(bytemuck::cast_slice(halves));
                simd::sub_scaled(level, values, clamped, 1.0);
            }
        }
    }

    fn add_tile(
        &self,
        level: Level,
        _: &Noise,
        bytes: &[u8],
        acc: &mut [f32],
    ) -> Result<(), DecodeError> {
        let finite = match self {
            Self::Bf16 => simd::add_bf16(level, bytes, acc),
            Self::F16 => {
                let (mut floats, mut halves) = ([0.0; TILE], [f16::ZERO; TILE]);
                let (floats, halves) = (&mut floats[..acc.len()], &mut halves[..acc.len()]);
                bytemuck::cast_slice_mut(halves).copy_from_slice(bytes);
                halves.convert_to_f32_slice(floats);
                simd::add_scaled(level, acc, floats, 1.0);
                // A maximum rather than a search, which the compiler would not vectorise.
                let magnitude = |half: &f16| (half.to_bits() & 0x7fff) as i16;
                halves.iter().map(magnitude).fold(0, i16::max) < magnitude(&f16::INFINITY)
            }
        };
        if finite { Ok(()) } else { Err(DecodeError::Field("value")) }
    }
}
