//! Shards to their owners, sums to everybody: the all-reduce of codecs that encode each shard by
//! itself.
//!
//! 1. *Scatter.* Every rank encodes its gradient plus residual, and sends each shard's message to
//!    the shard's owner.
//! 2. *Reduce.* The owner decodes these messages and adds them in rank order, its own among them.
//! 3. *Gather.* It encodes the sum plus its owner residual and sends the message to everyone.
//!    Everyone decodes it.
//!
//! A codec that treats elements one by one, or in small blocks, works through a long vector in
//! chunks, so that one is encoded while another travels and a third is added up:
//!
//! ```text
//! round      0    1    2    3    4    5
//! chunk 0    scat      gath
//! chunk 1         scat      gath
//! chunk 2                   ···
//! ```
//!
//! Bytes per rank: 2·(N−1)/N times the coded vector. Without step 3 this is a reduce-scatter.

use std::ops::Range;
use std::sync::Arc;

use farwire_proto::{Rank, WorldSize};

use super::vectors::ChunkPlace;
use super::{Common, Kind, Made, Nonsense, Trouble, even};
use crate::codec::MessageCodec;

/// Elements of a chunk: long enough that its parcels fill frames, short enough that three of them
/// overlap.
pub(super) const CHUNK: usize = 1 << 22;

#[derive(Debug)]
pub(super) struct TwoPhase {
    codec: Arc<dyn MessageCodec>,
    chunks: Vec<Chunk>,
    /// Whether the sums are gathered.
    gather: bool,
    mean: bool,
    longest: usize,
}

#[derive(Debug)]
struct Chunk {
    range: Range<usize>,
    /// By rank.
    shards: Vec<Range<usize>>,
    /// Whether this rank's shard has been added up.
    summed: bool,
}

/// What a round is for: the scatter or the gather of a chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Scatter(usize),
    Gather(usize),
}

impl TwoPhase {
    pub(super) fn new(
        codec: Arc<dyn MessageCodec>,
        count: usize,
        world: WorldSize,
        gather: bool,
        mean: bool,
    ) -> Self {
        // A reduce-scatter's shards are of the whole vector.
        let chunks = if codec.is_local() && gather { count.div_ceil(CHUNK).max(1) } else { 1 };
        let cut = |start: usize, len: usize| Chunk {
            range: start..start + len,
            shards: even(len, world)
                .into_iter()
                .map(|shard| start + shard.start..start + shard.end)
                .collect(),
            summed: false,
        };
        let chunks: Vec<_> = (0..chunks)
            .map(|chunk| {
                let start = if chunks == 1 { 0 } else { chunk * CHUNK };
                let end = if chunk + 1 == chunks { count } else { start + CHUNK };
                cut(start, end - start)
            })
            .collect();
        let longest_shard =
            chunks.iter().flat_map(|chunk| &chunk.shards).map(ExactSizeIterator::len).max();
        let longest = codec.max_message_len(longest_shard.unwrap_or(0));
        Self { codec, chunks, gather, mean, longest }
    }

    pub(super) fn rounds(&self) -> u32 {
        self.chunks.len() as u32 * if self.gather { 2 } else { 1 }
    }

    pub(super) fn longest(&self) -> usize {
        self.longest
    }

    /// The elements whose sum a rank encodes, in ascending ranges.
    pub(super) fn owned(&self, rank: Rank) -> Vec<Range<usize>> {
        let chunks = self.chunks.iter().filter(|_| self.gather);
        chunks.map(|chunk| chunk.shards[rank.index()].clone()).collect()
    }

    /// s₀ s₁ g₀ s₂ g₁ … g₋₂ g₋₁: a chunk's sums are asked for one round after the next chunk was
    /// sent.
    fn phase(&self, round: u32) -> Phase {
        let (round, chunks) = (round as usize, self.chunks.len());
        match round {
            _ if !self.gather => Phase::Scatter(round),
            0 => Phase::Scatter(0),
            _ if round == 2 * chunks - 1 => Phase::Gather(chunks - 1),
            _ if round % 2 == 1 => Phase::Scatter(round / 2 + 1),
            _ => Phase::Gather(round / 2 - 1),
        }
    }

    pub(super) fn next(
        &mut self,
        round: u32,
        common: &mut Common,
    ) -> Option<Result<Made, Trouble>> {
        match self.phase(round) {
            Phase::Scatter(chunk) => Some(self.encode_shards(round, chunk, common)),
            Phase::Gather(chunk) if common.trouble.is_some() || self.chunks[chunk].summed => {
                Some(self.encode_sum(round, chunk, common))
            }
            Phase::Gather(_) => None,
        }
    }

    fn encode_shards(
        &self,
        round: u32,
        chunk: usize,
        common: &mut Common,
    ) -> Result<Made, Trouble> {
        if let Some(said) = common.trouble_in(round) {
            return said;
        }
        let place = self.place(chunk, common);
        let encoded = common.vectors.get().encode(&place);
        let first = place.range.start;
        encoded.map(Made::Each).map_err(|error| common.fail_step(round, error, Kind::Input, first))
    }

    fn encode_sum(&self, round: u32, chunk: usize, common: &mut Common) -> Result<Made, Trouble> {
        if let Some(said) = common.trouble_in(round) {
            return said;
        }
        let place = self.place(chunk, common);
        let encoded = common.vectors.get().encode_sum(&place);
        let first = place.shards[common.rank.index()].start;
        encoded.map(Made::Same).map_err(|error| common.fail_step(round, error, Kind::Sum, first))
    }

    pub(super) fn came(
        &mut self,
        round: u32,
        messages: &[&[u8]],
        common: &mut Common,
    ) -> Result<(), Nonsense> {
        let phase = self.phase(round);
        let (Phase::Scatter(chunk) | Phase::Gather(chunk)) = phase;
        let place = self.place(chunk, common);
        let vectors = common.vectors.get();
        let done = match phase {
            Phase::Scatter(_) => vectors.sum(&place, messages),
            Phase::Gather(_) => vectors.decode(&place, messages),
        };
        common.understood(round, done)?;
        self.chunks[chunk].summed = true;
        Ok(())
    }

    fn place(&self, index: usize, common: &Common) -> ChunkPlace<'_> {
        let Chunk { range, shards, .. } = &self.chunks[index];
        let context = match self.chunks.len() {
            1 => common.context,
            _ => common.context.chunk(index as u64),
        };
        ChunkPlace {
            index,
            range: range.clone(),
            shards,
            context,
            rank: common.rank,
            world: common.world,
            mean: self.mean,
            gather: self.gather,
            codec: &*self.codec,
        }
    }
}
