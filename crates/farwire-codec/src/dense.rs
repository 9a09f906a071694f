//! The common part of all codecs that send something for each element: the vector is cut into
//! *tiles*, each coded on its own, and a message is one coded tile after the other. Lengths follow
//! from the number of elements, so there is no header.
//!
//! ```text
//!  shard    ├──────────────── elements ────────────────┤
//!  tiles    ├──── tile ────┼──── tile ────┼─ the rest ─┤
//!  message  ├─ coded ─┼─ coded ─┼ coded ┤
//! ```
//!
//! A tile fits the first-level cache. Values and residual are read from memory once, added, coded,
//! and the new residual written: one pass.

use std::ops::Range;

use crate::codec::MessageCodec;
use crate::error::{DecodeError, EncodeError};
use crate::job::{CodedPlace, Encoded, Fused, Job, Role};
use crate::rng::{Counter, Purpose};
use crate::simd::{Level, Stream};
use crate::threads;

/// A codec for one tile.
pub(crate) trait Tiles: std::fmt::Debug + Send + Sync {
    /// Elements of a tile.
    fn tile(&self) -> usize;

    /// Bytes of a message of this many elements: the sum over its tiles. The last may be short.
    fn coded_len(&self, elements: usize) -> usize;

    /// Encodes a tile. `values` are finite and include what was owed; `out` holds old bytes, and
    /// all of it is written. Leaves in `values` what [`add_tile`](Self::add_tile) will not add.
    fn encode_tile(&self, level: Level, noise: &Noise, values: &mut [f32], out: &mut [u8]);

    /// Adds a coded tile. Its length has been checked; its contents come from the network and have
    /// not been.
    fn add_tile(
        &self,
        level: Level,
        noise: &Noise,
        bytes: &[u8],
        acc: &mut [f32],
    ) -> Result<(), DecodeError>;
}

/// The random numbers of one tile.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Noise {
    /// For rounding: different on each rank, and in each of its two roles. An owner rounds a sum
    /// that holds its own rounded values; with the same numbers the second error would depend on
    /// the first.
    pub(crate) rounding: Counter,
    /// For rotation: the same on each rank.
    pub(crate) rotation: Counter,
    /// Index of the tile's first element in the whole vector.
    pub(crate) start: usize,
}

impl Noise {
    pub(crate) fn new(place: &CodedPlace, role: Role, rank: u32, start: usize) -> Self {
        let stream = u64::from(rank) << 1 | u64::from(role == Role::Owner);
        Self {
            rounding: Counter::new(place.context, Purpose::Rounding).split(stream),
            rotation: Counter::new(place.context, Purpose::Rotation),
            start,
        }
    }
}

impl<T: Tiles> MessageCodec for T {
    fn encode(&self, job: &Job<'_>, out: &mut Encoded) -> Result<(), EncodeError> {
        encode(self, job, out)
    }

    fn add_decoded_into(
        &self,
        bytes: &[u8],
        place: &CodedPlace,
        acc: &mut [f32],
    ) -> Result<(), DecodeError> {
        add_to(self, bytes, place, acc, |_| (), |_| ())
    }

    fn decode_into(
        &self,
        bytes: &[u8],
        place: &CodedPlace,
        acc: &mut [f32],
    ) -> Result<(), DecodeError> {
        // The zeros never leave the first-level cache.
        add_to(self, bytes, place, acc, |tile| tile.fill(0.0), |_| ())
    }

    fn decode_divided_into(
        &self,
        bytes: &[u8],
        place: &CodedPlace,
        acc: &mut [f32],
        by: f32,
    ) -> Result<(), DecodeError> {
        let divide = |tile: &mut [f32]| tile.iter_mut().for_each(|value| *value /= by);
        add_to(self, bytes, place, acc, |tile| tile.fill(0.0), divide)
    }

    fn max_message_len(&self, elements: usize) -> usize {
        self.coded_len(elements)
    }

    fn is_local(&self) -> bool {
        true
    }
}

/// Encodes a job tile by tile.
fn encode(codec: &impl Tiles, job: &Job<'_>, out: &mut Encoded) -> Result<(), EncodeError> {
    job.check();
    out.resize(job.shards.len(), job.place.range.len());
    let first = job.place.range.start;
    let mut tasks = Vec::new();
    let mut residual = &mut out.residual[..];
    for (shard, message) in job.shards.iter().zip(&mut out.messages) {
        // One byte more than the message needs: a collective adds one.
        message.reserve_exact((codec.coded_len(shard.len()) + 1).saturating_sub(message.len()));
        message.resize(codec.coded_len(shard.len()), 0);
        let mut message = &mut message[..];
        for range in sections(shard.clone(), codec.tile(), job.threads.get()) {
            let (own, rest) = residual.split_at_mut(range.len());
            let (bytes, later) = message.split_at_mut(codec.coded_len(range.len()));
            (residual, message) = (rest, later);
            tasks.push((range, own, bytes));
        }
    }
    let level = Level::detect();
    let results = threads::in_order(job.threads, tasks, |(range, own, mut bytes)| {
        let mut fused = Fused::new(level, job);
        let mut stream = Stream::new(level, job.values.len(), codec.tile());
        for (k, own) in own.chunks_mut(codec.tile()).enumerate() {
            let start = range.start + k * codec.tile();
            let (coded, rest) = bytes.split_at_mut(codec.coded_len(own.len()));
            bytes = rest;
            stream.write(own, |values| {
                fused.read(start - first, values)?;
                codec.encode_tile(
                    level,
                    &Noise::new(&job.place, job.role, job.rank, start),
                    values,
                    coded,
                );
                Ok(())
            })?;
        }
        Ok(())
    });
    results.into_iter().collect::<Result<(), _>>()?;
    out.finish(job.residual);
    Ok(())
}

/// Adds a message tile by tile: `prepare` runs on each tile before, and `finish` after.
fn add_to(
    codec: &impl Tiles,
    mut bytes: &[u8],
    place: &CodedPlace,
    acc: &mut [f32],
    prepare: impl Fn(&mut [f32]),
    finish: impl Fn(&mut [f32]),
) -> Result<(), DecodeError> {
    assert_eq!(acc.len(), place.range.len(), "one element for each of the range");
    DecodeError::check_len(bytes, codec.coded_len(acc.len()))?;
    let level = Level::detect();
    for (k, acc) in acc.chunks_mut(codec.tile()).enumerate() {
        let (coded, rest) = bytes.split_at(codec.coded_len(acc.len()));
        bytes = rest;
        prepare(acc);
        // Decoding rounds nothing, so it does not matter whose message this is.
        let noise = Noise::new(place, Role::Worker, 0, place.range.start + k * codec.tile());
        codec.add_tile(level, &noise, coded, acc)?;
        finish(acc);
    }
    Ok(())
}

/// `range` cut into at most `parts` runs of whole tiles, the last with the rest.
pub(crate) fn sections(
    range: Range<usize>,
    tile: usize,
    parts: usize,
) -> impl Iterator<Item = Range<usize>> {
    let step = range.len().div_ceil(tile).div_ceil(parts).max(1) * tile;
    range.clone().step_by(step).map(move |start| start..range.end.min(start.saturating_add(step)))
}
