//! No compression: every element as it is.
//!
//! Bytes: 4 per element. The residual is zero.

use std::sync::Arc;

use crate::codec::{Codec, CodecFamily, Travel};
use crate::dense::{Noise, Tiles};
use crate::error::DecodeError;
use crate::simd::{self, Level};
use crate::spec::CodecSpec;

/// Sends f32 values as they are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Identity;

pub(super) const FAMILY: CodecFamily = CodecFamily {
    names: &["none"],
    forms: "none",
    help: "every element as it is",
    typical: &["none"],
    corners: &[],
    parse: |_| Ok(CodecSpec::none()),
};

impl Codec for Identity {
    fn name(&self) -> String {
        "none".into()
    }

    fn travels(self: Arc<Self>) -> Travel {
        Travel::Shards(self)
    }

    fn trains_like_dense(&self) -> bool {
        true
    }
}

impl Tiles for Identity {
    fn tile(&self) -> usize {
        2048
    }

    fn coded_len(&self, elements: usize) -> usize {
        4 * elements
    }

    fn encode_tile(&self, _: Level, _: &Noise, values: &mut [f32], out: &mut [u8]) {
        out.copy_from_slice(bytemuck::cast_slice(values));
        values.fill(0.0);
    }

    fn add_tile(
        &self,
        level: Level,
        _: &Noise,
        bytes: &[u8],
        acc: &mut [f32],
    ) -> Result<(), DecodeError> {
        if simd::add_f32(level, bytes, acc) { Ok(()) } else { Err(DecodeError::Field("value")) }
    }
}
