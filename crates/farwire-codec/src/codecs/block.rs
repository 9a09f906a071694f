//! A few bits per element: each block has a scale, and its elements are rounded to 8 or 4 bits.
//!
//! Steps, per block:
//! 1. With `rotate=on`: flip signs at random and apply a Hadamard transform, which spreads outliers
//!    and makes any block look Gaussian.
//! 2. scale = largest magnitude / largest code, and each element becomes code = round(x / scale),
//!    to the nearest, or at random so that the mean is right. Rotated int4 uses the sixteen
//!    Lloyd–Max levels for a Gaussian instead, with scale = root mean square: distortion is 0.0095,
//!    where equal steps up to the largest magnitude leave 0.018. These levels are biased, so
//!    `rounding=stochastic` uses the equal steps.
//!
//! | format | codes | bytes of a block |
//! |---|---|---|
//! | int8 | −127..=127 | f32 scale, 1 per element |
//! | int4 | −7..=7, plus 8; or sign and level | f32 scale, ½ per element |
//! | fp8 | e4m3, up to 448 | f32 scale, 1 per element |
//!
//! Used exactly twice per allreduce, by worker and owner, each with error feedback. A block whose
//! largest magnitude is not between 2⁻¹⁰⁰ and 2¹⁰⁰ is sent as zeros and stays in the residual.

use std::sync::Arc;

use crate::codec::{Codec, CodecFamily, Travel};
use crate::dense::{Noise, Tiles};
use crate::error::DecodeError;
use crate::simd::{self, Level};
use crate::spec::{CodecSpec, Params, positive};

/// Quantises by blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BlockQuantiser {
    /// What an element becomes.
    pub format: Format,
    /// Elements that share a scale: a power of two from 16 to 65,536.
    pub block: usize,
    /// How to round.
    pub rounding: Rounding,
    /// Whether to rotate each block at random first.
    pub rotate: bool,
}

/// The codes of a quantiser.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Format {
    /// 8-bit integers.
    Int8,
    /// 4-bit integers, or the Lloyd–Max levels after rotation.
    Int4,
    /// 8-bit floats, e4m3.
    Fp8,
}

/// How a quantiser rounds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Rounding {
    /// To the nearest code.
    #[default]
    Nearest,
    /// To one of the two nearest codes, at random so that the mean is right.
    Stochastic,
}

pub(super) const FAMILY: CodecFamily = CodecFamily {
    names: &["int8", "int4", "fp8"],
    forms: "int8 | int4 | fp8 [,block=256] [,rounding=nearest|stochastic] [,rotate=on|off]",
    help: "8 or 4 bits an element, in blocks with a scale each",
    typical: &["int8", "int4", "int4,rotate=on", "fp8"],
    corners: &[
        "int8,block=16,rounding=stochastic",
        "int8,rotate=on",
        "int4,block=64,rotate=on",
        "int4,block=8192,rotate=on",
        "int4,rounding=stochastic,rotate=on",
        "fp8,block=65536,rounding=stochastic",
        "fp8,rounding=stochastic,rotate=on",
    ],
    parse,
};

fn parse(params: &mut Params<'_>) -> Result<CodecSpec, String> {
    let mut block = BlockQuantiser::new(match params.name {
        "int8" => Format::Int8,
        "int4" => Format::Int4,
        _ => Format::Fp8,
    });
    if let Some(given) = params.take("block") {
        block.block = positive("block", given)?;
        if !block.block.is_power_of_two() || !BlockQuantiser::BLOCKS.contains(&block.block) {
            return Err(format!("block={given} is not a power of two from 16 to 65536"));
        }
    }
    let roundings = [("nearest", Rounding::Nearest), ("stochastic", Rounding::Stochastic)];
    block.rounding = params.one_of("rounding", &roundings)?.unwrap_or_default();
    block.rotate = params.one_of("rotate", &[("on", true), ("off", false)])?.unwrap_or_default();
    Ok(CodecSpec::new(block))
}

impl Codec for BlockQuantiser {
    fn name(&self) -> String {
        let mut name = match self.format {
            Format::Int8 => "int8",
            Format::Int4 => "int4",
            Format::Fp8 => "fp8",
        }
        .to_owned();
        if self.block != Self::new(self.format).block {
            name += &format!(",block={}", self.block);
        }
        if self.rounding == Rounding::Stochastic {
            name += ",rounding=stochastic";
        }
        if self.rotate {
            name += ",rotate=on";
        }
        name
    }

    fn travels(self: Arc<Self>) -> Travel {
        Travel::Shards(self)
    }

    fn trains_like_dense(&self) -> bool {
        true
    }
}

impl BlockQuantiser {
    /// The smallest and largest block.
    pub const BLOCKS: std::ops::RangeInclusive<usize> = 16..=65_536;

    /// Nearest, not rotated, in blocks whose scales cost less than 2 % of the message.
    pub fn new(format: Format) -> Self {
        let block = if format == Format::Int4 { 512 } else { 256 };
        Self { format, block, rounding: Rounding::Nearest, rotate: false }
    }

    /// Whether codes are Lloyd–Max levels.
    fn has_levels(&self) -> bool {
        self.format == Format::Int4 && self.rotate && self.rounding == Rounding::Nearest
    }

    fn codes_len(&self, elements: usize) -> usize {
        match self.format {
            Format::Int8 | Format::Fp8 => elements,
            Format::Int4 => elements.div_ceil(2),
        }
    }

    /// Bytes of one block.
    fn block_len(&self, elements: usize) -> usize {
        4 + self.codes_len(elements)
    }

    /// Scale and its inverse for these (rotated) values.
    fn scale(&self, level: Level, values: &[f32]) -> (f32, f32) {
        let largest = simd::largest(level, values);
        match self.format {
            Format::Int8 => scale_for(largest, 127.0),
            Format::Fp8 => scale_for(largest, 448.0),
            Format::Int4 if !self.has_levels() => scale_for(largest, 7.0),
            Format::Int4 if is_sendable(largest) => {
                // Squares of numbers near 2¹⁰⁰ would overflow, so values are divided by the largest
                // first.
                let sum = simd::sum_squares(level, values, 1.0 / largest);
                let scale = largest * (sum / values.len() as f32).sqrt();
                (scale, 1.0 / scale)
            }
            Format::Int4 => (0.0, 0.0),
        }
    }

    /// `value · inverse` as codes.
    fn quantise(
        &self,
        level: Level,
        values: &[f32],
        inverse: f32,
        noise: &Noise,
        start: u32,
        out: &mut [u8],
    ) {
        let key = noise.rounding.key32();
        match (self.format, self.rounding) {
            (Format::Int8, Rounding::Nearest) => simd::to_int8(level, values, inverse, out),
            (Format::Int8, Rounding::Stochastic) => {
                simd::to_int8_stochastic(level, values, inverse, key, start, out);
            }
            (Format::Fp8, Rounding::Nearest) => simd::to_e4m3(level, values, inverse, out),
            (Format::Fp8, Rounding::Stochastic) => {
                simd::to_e4m3_stochastic(level, values, inverse, key, start, out);
            }
            (Format::Int4, rounding) => {
                let mut codes = [0; PIECE];
                for (k, (values, out)) in
                    values.chunks(PIECE).zip(out.chunks_mut(PIECE / 2)).enumerate()
                {
                    let codes = &mut codes[..values.len()];
                    let start = start.wrapping_add((k * PIECE) as u32);
                    match rounding {
                        Rounding::Nearest if self.rotate => {
                            simd::to_levels(level, values, inverse, codes)
                        }
                        Rounding::Nearest => simd::to_int8(level, values, inverse, codes),
                        Rounding::Stochastic => {
                            simd::to_int8_stochastic(level, values, inverse, key, start, codes);
                        }
                    }
                    if !self.has_levels() {
                        codes.iter_mut().for_each(|code| {
                            *code = (*code as i8).clamp(-7, 7).wrapping_add(8) as u8
                        });
                    }
                    simd::pack_nibbles(level, codes, out);
                }
            }
        }
    }

    /// Codes as multiples of the scale.
    fn units(&self, level: Level, codes: &[u8], out: &mut [f32]) -> Result<(), DecodeError> {
        match self.format {
            Format::Int8 => simd::from_int8(level, codes, out),
            Format::Fp8 if simd::from_e4m3(level, codes, out) => {}
            Format::Fp8 => return Err(DecodeError::Field("NaN")),
            Format::Int4 => {
                let mut nibbles = [0; PIECE];
                for (codes, out) in codes.chunks(PIECE / 2).zip(out.chunks_mut(PIECE)) {
                    let nibbles = &mut nibbles[..out.len()];
                    simd::unpack_nibbles(level, codes, nibbles);
                    if self.has_levels() {
                        simd::from_levels(level, nibbles, out);
                    } else {
                        simd::from_int4(level, nibbles, out);
                    }
                }
            }
        }
        Ok(())
    }

    /// Codes as multiples of the scale, with the rotation undone.
    ///
    /// Encoder and decoder both call this, so that one subtracts what the other adds, to the bit.
    fn decoded_units(
        &self,
        level: Level,
        noise: &Noise,
        start: u32,
        codes: &[u8],
        out: &mut [f32],
    ) -> Result<(), DecodeError> {
        self.units(level, codes, out)?;
        if self.rotate {
            turn(level, out);
            simd::flip(level, out, noise.rotation.key32(), start);
        }
        Ok(())
    }

    fn encode_block(
        &self,
        level: Level,
        noise: &Noise,
        start: u32,
        values: &mut [f32],
        out: &mut [u8],
        units: &mut [f32],
    ) {
        let Some((scale_bytes, codes)) = out.split_first_chunk_mut::<4>() else { return };
        let (mut scale, mut inverse) = (0.0, 0.0);
        if self.rotate {
            // Sums of numbers near the largest float would overflow.
            if is_sendable(simd::largest(level, values)) {
                units.copy_from_slice(values);
                simd::flip(level, units, noise.rotation.key32(), start);
                turn(level, units);
                (scale, inverse) = self.scale(level, units);
            } else {
                units.fill(0.0);
            }
            self.quantise(level, units, inverse, noise, start, codes);
        } else {
            (scale, inverse) = self.scale(level, values);
            if (self.format, self.rounding) == (Format::Int8, Rounding::Nearest) {
                // The plain case, in one loop.
                *scale_bytes = scale.to_le_bytes();
                return simd::take_int8(level, values, inverse, scale, codes);
            }
            self.quantise(level, values, inverse, noise, start, codes);
        }
        *scale_bytes = scale.to_le_bytes();
        self.decoded_units(level, noise, start, codes, units)
            .expect("these codes were just written");
        simd::sub_scaled(level, values, units, scale);
    }
}

/// Elements whose four-bit codes are packed or unpacked at a time.
const PIECE: usize = 512;

/// Rotates the values. Their number is split into powers of two, largest first, and each run gets a
/// Hadamard transform of norm one. It is its own inverse.
fn turn(level: Level, mut values: &mut [f32]) {
    while !values.is_empty() {
        let len = 1 << values.len().ilog2();
        let (piece, rest) = values.split_at_mut(len);
        simd::hadamard(level, piece);
        simd::scale(level, piece, 1.0 / (len as f32).sqrt());
        values = rest;
    }
}

const TWO_100: f32 = 1_267_650_600_228_229_401_496_703_205_376.0;

/// Whether a block with this largest magnitude can be scaled without over- or underflow.
pub(crate) fn is_sendable(largest: f32) -> bool {
    (1.0 / TWO_100..=TWO_100).contains(&largest)
}

/// The scale at which the code `top` stands for `largest`, and its inverse; zeros if there is none.
pub(crate) fn scale_for(largest: f32, top: f32) -> (f32, f32) {
    if is_sendable(largest) { (largest / top, top / largest) } else { (0.0, 0.0) }
}

/// A scale from the wire.
pub(crate) fn checked_scale(bytes: [u8; 4]) -> Result<f32, DecodeError> {
    let scale = f32::from_le_bytes(bytes);
    if (0.0..=TWO_100).contains(&scale) { Ok(scale) } else { Err(DecodeError::Field("scale")) }
}

impl Tiles for BlockQuantiser {
    fn tile(&self) -> usize {
        self.block.max(2048)
    }

    fn coded_len(&self, elements: usize) -> usize {
        let (blocks, rest) = (elements / self.block, elements % self.block);
        blocks * self.block_len(self.block) + if rest > 0 { self.block_len(rest) } else { 0 }
    }

    fn encode_tile(&self, level: Level, noise: &Noise, values: &mut [f32], out: &mut [u8]) {
        let mut units = [0.0; 512];
        let mut large = Vec::new();
        let units = if self.block <= 512 {
            &mut units[..]
        } else {
            large.resize(self.block, 0.0);
            &mut large
        };
        let blocks = values.chunks_mut(self.block).zip(out.chunks_mut(self.block_len(self.block)));
        for (k, (values, out)) in blocks.enumerate() {
            let start = (noise.start + k * self.block) as u32;
            let units = &mut units[..values.len()];
            self.encode_block(level, noise, start, values, out, units);
        }
    }

    fn add_tile(
        &self,
        level: Level,
        noise: &Noise,
        bytes: &[u8],
        acc: &mut [f32],
    ) -> Result<(), DecodeError> {
        let mut units = [0.0; 512];
        let mut large = Vec::new();
        let units = if self.block <= 512 {
            &mut units[..]
        } else {
            large.resize(self.block, 0.0);
            &mut large
        };
        let blocks = acc.chunks_mut(self.block).zip(bytes.chunks(self.block_len(self.block)));
        for (k, (acc, bytes)) in blocks.enumerate() {
            let Some((scale, codes)) = bytes.split_first_chunk::<4>() else { continue };
            let scale = checked_scale(*scale)?;
            let start = (noise.start + k * self.block) as u32;
            let units = &mut units[..acc.len()];
            self.decoded_units(level, noise, start, codes, units)?;
            simd::add_scaled(level, acc, units, scale);
        }
        Ok(())
    }
}
