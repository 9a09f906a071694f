//! The values of kept elements on the wire, in blocks of the same 256 as their indices.
//!
//! | values | bytes of a block |
//! |---|---|
//! | f32 | 4 each |
//! | bf16 | 2 each |
//! | int8 | f32 scale, then 1 each: largest magnitude / 127 times −127..=127 |

use crate::codecs::block;
use crate::error::DecodeError;
use crate::index::BLOCK;
use crate::simd::{self, Level};

/// How kept values are coded.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum ValueCoding {
    /// As they are.
    F32,
    /// Rounded to bfloat16.
    #[default]
    Bf16,
    /// Rounded to 8 bits, with one scale for every 256.
    Int8,
}

impl ValueCoding {
    /// The name people type.
    pub fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::Bf16 => "bf16",
            Self::Int8 => "int8",
        }
    }

    /// Bytes of a block of `count` values.
    pub(crate) fn len(self, count: usize) -> usize {
        match self {
            Self::F32 => 4 * count,
            Self::Bf16 => 2 * count,
            Self::Int8 => count + 4 * count.div_ceil(BLOCK),
        }
    }

    /// Appends a block of values. Leaves in `values` what coding dropped.
    pub(crate) fn encode(self, level: Level, values: &mut [f32], out: &mut Vec<u8>) {
        let start = out.len();
        out.resize(start + self.len(values.len()), 0);
        let out = &mut out[start..];
        match self {
            Self::F32 => {
                for (out, value) in out.as_chunks_mut::<4>().0.iter_mut().zip(values) {
                    *out = value.to_le_bytes();
                    // The sign of a zero is dropped with it.
                    *value = 0.0;
                }
            }
            Self::Bf16 => simd::to_bf16(level, values, out),
            Self::Int8 => {
                let Some((scale_bytes, codes)) = out.split_first_chunk_mut::<4>() else { return };
                let (scale, inverse) = block::scale_for(simd::largest(level, values), 127.0);
                *scale_bytes = scale.to_le_bytes();
                simd::take_int8(level, values, inverse, scale, codes);
            }
        }
    }

    /// Decodes a block whose length has been checked.
    pub(crate) fn decode(
        self,
        level: Level,
        bytes: &[u8],
        out: &mut [f32],
    ) -> Result<(), DecodeError> {
        let finite = match self {
            Self::F32 => simd::from_f32(level, bytes, out),
            Self::Bf16 => simd::from_bf16(level, bytes, out),
            Self::Int8 => {
                let Some((scale, codes)) = bytes.split_first_chunk::<4>() else { return Ok(()) };
                let scale = block::checked_scale(*scale)?;
                simd::from_int8(level, codes, out);
                simd::scale(level, out, scale);
                true
            }
        };
        if finite { Ok(()) } else { Err(DecodeError::Field("value")) }
    }
}
