//! One bit per element: its sign, times the mean magnitude of its block of 4,096.
//!
//! Steps: per block, scale = ‖x‖₁ / len; each element becomes ± scale. Needs error feedback, at
//! worker and owner. On Gaussian values, 1 − 2/π = 0.363 of the energy is left over.
//!
//! Bytes of a block: f32 scale, then one bit per element (set: negative), padded to a byte.

use std::sync::Arc;

use super::block::{checked_scale, is_sendable};
use crate::codec::{Codec, CodecFamily, Travel};
use crate::dense::{Noise, Tiles};
use crate::error::DecodeError;
use crate::simd::{self, Level};
use crate::spec::CodecSpec;

/// Sends signs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sign;

pub(super) const FAMILY: CodecFamily = CodecFamily {
    names: &["sign"],
    forms: "sign",
    help: "one bit an element, and a scale for every 4,096",
    typical: &["sign"],
    corners: &[],
    parse: |_| Ok(CodecSpec::new(Sign)),
};

impl Codec for Sign {
    fn name(&self) -> String {
        "sign".into()
    }

    fn travels(self: Arc<Self>) -> Travel {
        Travel::Shards(self)
    }
}

const BLOCK: usize = 4096;

impl Tiles for Sign {
    fn tile(&self) -> usize {
        BLOCK
    }

    fn coded_len(&self, elements: usize) -> usize {
        4 * elements.div_ceil(BLOCK) + elements.div_ceil(8)
    }

    fn encode_tile(&self, level: Level, _: &Noise, values: &mut [f32], out: &mut [u8]) {
        let Some((scale_bytes, signs)) = out.split_first_chunk_mut::<4>() else { return };
        let sendable = is_sendable(simd::largest(level, values));
        let scale = if sendable { simd::sum_abs(level, values) / values.len() as f32 } else { 0.0 };
        *scale_bytes = scale.to_le_bytes();
        simd::to_signs(level, values, signs);
        simd::add_signs(level, signs, -scale, values);
    }

    fn add_tile(
        &self,
        level: Level,
        _: &Noise,
        bytes: &[u8],
        acc: &mut [f32],
    ) -> Result<(), DecodeError> {
        let Some((scale, signs)) = bytes.split_first_chunk::<4>() else { return Ok(()) };
        simd::add_signs(level, signs, checked_scale(*scale)?, acc);
        Ok(())
    }
}
