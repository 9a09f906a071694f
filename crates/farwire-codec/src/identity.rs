//! No compression: every element as it is.
//!
//! Bytes: 4 per element. The residual is zero.

use crate::dense::{self, Noise, Tiles};
use crate::error::{DecodeError, EncodeError};
use crate::job::{CodedPlace, Encoded, Job, MessageCodec};
use crate::simd::{self, Level};

/// Sends f32 values as they are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Identity;

impl Tiles for Identity {
    fn tile(&self) -> usize {
        2048
    }

    fn coded_len(&self, elements: usize) -> usize {
        4 * elements
    }

    fn encode(&self, _: Level, _: &Noise, values: &mut [f32], out: &mut [u8]) {
        out.copy_from_slice(bytemuck::cast_slice(values));
        values.fill(0.0);
    }

    fn add_decoded(&self, level: Level, _: &Noise, bytes: &[u8], acc: &mut [f32]) -> Result<(), DecodeError> {
        if simd::add_f32(level, bytes, acc) { Ok(()) } else { Err(DecodeError::Field("value")) }
    }
}

impl MessageCodec for Identity {
    fn encode(&self, job: &Job<'_>, out: &mut Encoded) -> Result<(), EncodeError> {
        dense::encode(self, job, out)
    }

    fn add_decoded_into(&self, bytes: &[u8], place: &CodedPlace, acc: &mut [f32]) -> Result<(), DecodeError> {
        dense::add_decoded(self, bytes, place, acc)
    }

    fn decode_into(&self, bytes: &[u8], place: &CodedPlace, acc: &mut [f32]) -> Result<(), DecodeError> {
        dense::decode(self, bytes, place, acc)
    }

    fn max_message_len(&self, elements: usize) -> usize {
        self.coded_len(elements)
    }
}
