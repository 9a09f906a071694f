//! Shards to their owners, sums to everybody: the all-reduce of codecs that encode each shard by
//! itself.
//!
//! 1. *Scatter.* Every rank encodes its gradient plus residual, and sends each shard's message to
//!    the shard's owner.
//! 2. *Reduce.* The owner decodes and adds them in rank order, its own among them.
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

use bytes::Bytes;
use farwire_proto::{Rank, WorldSize};

use super::{Common, Kind, Made, Nonsense, Trouble, even, residual, scale, seal, unseal};
use crate::codec::MessageCodec;
use crate::job::{CodedPlace, Encoded, Job, Role};

/// Elements of a chunk: long enough that its parcels fill frames, short enough that three of them
/// overlap.
const CHUNK: usize = 1 << 22;

#[derive(Debug)]
pub(super) struct TwoPhase {
    codec: Arc<dyn MessageCodec>,
    /// Elements of the vector.
    count: usize,
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
    /// This rank's message to itself, until it is added up.
    own: Bytes,
    /// The sum of this rank's shard, until it is encoded.
    sum: Option<Vec<f32>>,
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
            own: Bytes::new(),
            sum: None,
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
        Self { codec, count, chunks, gather, mean, longest }
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
            Phase::Gather(chunk)
                if common.trouble.is_some() || self.chunks[chunk].sum.is_some() =>
            {
                Some(self.encode_sum(round, chunk, common))
            }
            Phase::Gather(_) => None,
        }
    }

    fn encode_shards(
        &mut self,
        round: u32,
        chunk: usize,
        common: &mut Common,
    ) -> Result<Made, Trouble> {
        if common.trouble.is_some() {
            return Ok(Made::Same(seal(Vec::new())));
        }
        if chunk == 0 && self.gather {
            // What is in it is written over, shard by shard.
            common.output.resize(self.count, 0.0);
        }
        let context = self.context(chunk, common);
        let Chunk { range, shards, own, .. } = &mut self.chunks[chunk];
        let owed = common.owed(range.clone());
        let mut encoded = Encoded { residual: common.buffer(range.len()), ..Encoded::default() };
        // A chunk is a vector of its own, from its first element on.
        let local: Vec<_> =
            shards.iter().map(|shard| shard.start - range.start..shard.end - range.start).collect();
        let job = Job {
            values: common.input.values(range.clone()),
            residual: residual(owed.as_ref()),
            place: CodedPlace::whole(context, range.len()),
            role: Role::Worker,
            rank: common.rank.0,
            shards: &local,
            threads: common.threads,
        };
        if let Err(error) = self.codec.encode(&job, &mut encoded) {
            let first = range.start;
            return Err(common.fail_encode(round, error, Kind::Input, first));
        }
        if let Some(feedback) = &mut common.feedback {
            feedback.set_worker(range.start, encoded.residual);
        }
        let parcels: Vec<_> = encoded.messages.into_iter().map(seal).collect();
        *own = parcels[common.rank.index()].clone();
        Ok(Made::Each(parcels))
    }

    fn encode_sum(
        &mut self,
        round: u32,
        chunk: usize,
        common: &mut Common,
    ) -> Result<Made, Trouble> {
        let Some(sum) = self.chunks[chunk].sum.take().filter(|_| common.trouble.is_none()) else {
            return Ok(Made::Same(seal(Vec::new())));
        };
        let context = self.context(chunk, common);
        let Chunk { range, shards, own, .. } = &mut self.chunks[chunk];
        let shard = shards[common.rank.index()].clone();
        let owed = common.feedback.as_ref().map(|feedback| feedback.owner(shard.clone()));
        let mut encoded = Encoded { residual: common.buffer(shard.len()), ..Encoded::default() };
        let place = CodedPlace::whole(context, range.len())
            .part(shard.start - range.start..shard.end - range.start);
        let job = Job {
            rank: common.rank.0,
            threads: common.threads,
            ..Job::owner(&sum, residual(owed.as_ref()), &place)
        };
        if let Err(error) = self.codec.encode(&job, &mut encoded) {
            return Err(common.fail_encode(round, error, Kind::Sum, shard.start));
        }
        if let Some(feedback) = &mut common.feedback {
            feedback.set_owner(shard.start, encoded.residual);
            feedback.give_back(sum);
        }
        *own = seal(encoded.messages.swap_remove(0));
        Ok(Made::Same(own.clone()))
    }

    pub(super) fn came(
        &mut self,
        round: u32,
        messages: &[&[u8]],
        common: &mut Common,
    ) -> Result<(), Nonsense> {
        let (phase, me, world) = (self.phase(round), common.rank, common.world);
        let (Phase::Scatter(chunk) | Phase::Gather(chunk)) = phase;
        let context = self.context(chunk, common);
        let Chunk { range, shards, own, sum, .. } = &mut self.chunks[chunk];
        let whole = CodedPlace::whole(context, range.len());
        let place =
            |shard: &Range<usize>| whole.part(shard.start - range.start..shard.end - range.start);
        let message = |from: farwire_proto::Rank| {
            if from == me { unseal(own) } else { messages[from.index()] }
        };
        match phase {
            Phase::Scatter(_) => {
                let mine = &shards[me.index()];
                let mut acc = if self.gather {
                    common.buffer(mine.len())
                } else {
                    std::mem::take(&mut common.output)
                };
                acc.resize(mine.len(), 0.0);
                for from in world.ranks() {
                    let (message, place) = (message(from), place(mine));
                    let added = match from.index() {
                        0 => self.codec.decode_into(message, &place, &mut acc),
                        _ => self.codec.add_decoded_into(message, &place, &mut acc),
                    };
                    added.map_err(|why| Nonsense { from, round, why })?;
                }
                if self.gather {
                    *sum = Some(acc);
                } else {
                    scale(&mut acc, self.mean, world);
                    common.output = acc;
                }
            }
            Phase::Gather(_) => {
                for from in world.ranks() {
                    let shard = &shards[from.index()];
                    let out = &mut common.output[shard.clone()];
                    self.codec
                        .decode_into(message(from), &place(shard), out)
                        .map_err(|why| Nonsense { from, round, why })?;
                    scale(out, self.mean, world);
                }
            }
        }
        Ok(())
    }

    fn context(&self, chunk: usize, common: &Common) -> crate::job::Context {
        if self.chunks.len() == 1 { common.context } else { common.context.chunk(chunk as u64) }
    }
}
