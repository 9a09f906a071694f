//! One rank's vectors in a collective, wherever they are, and what `two_phase.rs` does with them.

use std::any::Any;
use std::fmt;
use std::num::NonZeroUsize;
use std::ops::Range;

use bytes::Bytes;
use farwire_proto::{DType, Rank, WorldSize};

use super::{Floats, divisor, residual, scale, seal, unseal};
use crate::codec::MessageCodec;
use crate::codecs::powersgd::{PowerP, PowerQ, PowerSgd, Shape};
use crate::error::{DecodeError, EncodeError};
use crate::feedback::{Owed, Transaction};
use crate::job::{CodedPlace, Context, Encoded, Job, Residual, Role, Values};

/// One rank's vectors in an all-reduce: its input, the sums it makes, its result, and what it owes.
/// They are in host memory, or elsewhere, such as on a GPU.
///
/// Each chunk gets the calls `encode`, `sum`, `encode_sum` and `decode`, in this order; calls for
/// other chunks come in between. Nothing the caller can see changes before [`finish`](Self::finish)
/// (except with [`LentVectors`]): if the operation is given up instead, input and residuals are as
/// they were.
pub trait Vectors: fmt::Debug + Send {
    /// Elements of the input.
    fn len(&self) -> usize;

    /// Whether there are none.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The element type of the input.
    fn dtype(&self) -> DType;

    /// The residuals; `None` without error feedback.
    fn feedback_mut(&mut self) -> Option<&mut Transaction>;

    /// Encodes the input plus what the worker owes. Returns a message with a zero byte after it for
    /// each shard of the chunk. This rank's own message is kept for `sum`; its entry in the list is
    /// ignored.
    fn encode(&mut self, chunk: &ChunkPlace<'_>) -> Result<Vec<Bytes>, StepError>;

    /// Adds up this rank's shard of the chunk: one message from each rank, in rank order. The kept
    /// message is used for this rank's own.
    fn sum(&mut self, chunk: &ChunkPlace<'_>, messages: &[&[u8]]) -> Result<(), StepError>;

    /// Encodes that sum plus what the owner owes. Returns a message with a zero byte after it, and
    /// keeps it for `decode`.
    fn encode_sum(&mut self, chunk: &ChunkPlace<'_>) -> Result<Bytes, StepError>;

    /// Decodes the sums of all shards of the chunk into the result. The kept message is used for
    /// this rank's own.
    fn decode(&mut self, chunk: &ChunkPlace<'_>, messages: &[&[u8]]) -> Result<(), StepError>;

    /// The same vectors for sums of factors, if they support them.
    fn factors(&mut self) -> Option<&mut dyn FactorVectors> {
        None
    }

    /// Called when everything has arrived: puts the result in its place and replaces the old
    /// residuals with the new ones. On an error, says why it cannot, and nothing has changed.
    fn finish(self: Box<Self>) -> Result<(), String>;

    /// Gives the operation up. Returns the memory's owner, to be dropped where arbitrary code may
    /// run.
    fn abandon(self: Box<Self>) -> Box<dyn Any + Send>;
}

/// What `low_rank.rs` does with a rank's vectors. The input plus what the worker owes is a matrix
/// M. Factors are small and in host memory.
pub trait FactorVectors {
    /// P = M·Q, row by row.
    fn begin(&mut self, matrix: &MatrixPlace) -> Result<Vec<f32>, StepError>;

    /// Continues with the sum of all ranks' P: Q = Mᵀ·P̂, column by column.
    fn with_p(&mut self, matrix: &MatrixPlace, sum: Vec<f32>) -> Result<Vec<f32>, StepError>;

    /// Finishes with the sum of all ranks' Q: sets the result and the new residual.
    fn with_q(&mut self, matrix: &MatrixPlace, sum: Vec<f32>) -> Result<(), StepError>;
}

/// A vector that is treated as a matrix.
#[derive(Clone, Debug)]
pub struct MatrixPlace {
    /// The codec.
    pub codec: PowerSgd,
    /// Its rows and columns.
    pub shape: Shape,
    /// The key to random numbers.
    pub context: Context,
    /// How many ranks there are.
    pub world: WorldSize,
    /// Whether the result is a mean.
    pub mean: bool,
    /// The elements of the result that this rank wants, if not all.
    pub only: Option<Range<usize>>,
}

impl MatrixPlace {
    /// Columns of P and Q.
    pub fn rank(&self) -> usize {
        self.codec.rank.min(self.shape.rows).min(self.shape.columns)
    }
}

/// A part of a vector that is encoded as a vector of its own.
#[derive(Clone, Debug)]
pub struct ChunkPlace<'a> {
    /// Its number, from zero.
    pub index: usize,
    /// Its elements.
    pub range: Range<usize>,
    /// The part of them that each rank owns.
    pub shards: &'a [Range<usize>],
    /// The key to random numbers.
    pub context: Context,
    /// This rank.
    pub rank: Rank,
    /// How many ranks there are.
    pub world: WorldSize,
    /// Whether the result is a mean.
    pub mean: bool,
    /// Whether sums go to everybody; if not, this rank's sum is its result.
    pub gather: bool,
    /// The codec, for vectors in host memory.
    pub codec: &'a dyn MessageCodec,
}

impl ChunkPlace<'_> {
    /// The chunk as encoders see it: a vector of its own, counted from its first element.
    pub fn whole(&self) -> CodedPlace {
        CodedPlace::whole(self.context, self.range.len())
    }

    /// The shards, counted from the chunk's first element.
    pub fn local_shards(&self) -> Vec<Range<usize>> {
        self.shards.iter().map(|shard| self.local(shard)).collect()
    }

    /// A rank's shard as encoders see it.
    pub fn shard(&self, of: Rank) -> CodedPlace {
        self.whole().part(self.local(&self.shards[of.index()]))
    }

    fn local(&self, shard: &Range<usize>) -> Range<usize> {
        shard.start - self.range.start..shard.end - self.range.start
    }
}

/// Why a step could not be done.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StepError {
    /// The values cannot be encoded. The index counts from the first value that was to be encoded.
    #[error(transparent)]
    Encode(#[from] EncodeError),
    /// A rank's message is one that no encoder writes.
    #[error("rank {from}'s message: {why}")]
    Decode {
        /// The rank that sent it.
        from: Rank,
        /// What is wrong with it.
        why: DecodeError,
    },
    /// Something failed where the vectors are, for example for lack of memory.
    #[error("{0}")]
    Device(String),
}

/// Vectors in host memory.
#[derive(Debug)]
pub(super) struct HostVectors {
    pub(super) input: Floats,
    pub(super) output: Vec<f32>,
    pub(super) coding: HostCoding,
}

/// A vector in host memory that the result overwrites: nothing is copied in or out, and there is no
/// second copy. The price: a collective that fails halfway leaves arbitrary values in it.
///
/// The memory is dropped when the collective has ended, whether it succeeded or failed.
#[derive(Debug)]
pub struct LentVectors<M> {
    memory: M,
    coding: HostCoding,
}

/// The coding of any vectors in host memory.
#[derive(Debug)]
pub(super) struct HostCoding {
    pub(super) feedback: Option<Transaction>,
    pub(super) threads: NonZeroUsize,
    /// By chunk.
    kept: Vec<Kept>,
    power: Power,
}

/// Progress of the sums of factors.
#[derive(Debug, Default)]
enum Power {
    #[default]
    Begin,
    P(PowerP),
    Q(PowerQ),
}

/// What a rank keeps of a chunk from one step to the next.
#[derive(Debug, Default)]
struct Kept {
    /// This rank's parcel to itself, until it is decoded.
    own: Bytes,
    /// The sum of this rank's shard, until it is encoded.
    sum: Vec<f32>,
}

impl HostCoding {
    pub(super) fn new(feedback: Option<Transaction>, threads: NonZeroUsize) -> Self {
        Self { feedback, threads, kept: Vec::new(), power: Power::default() }
    }

    /// What this rank owes for these elements, as a worker.
    pub(super) fn owed(&self, range: Range<usize>) -> Option<Owed> {
        self.feedback.as_ref().map(|feedback| feedback.worker(range))
    }

    /// A buffer for `len` elements, with arbitrary contents.
    pub(super) fn buffer(&mut self, len: usize) -> Vec<f32> {
        self.feedback.as_mut().map(|feedback| feedback.buffer(len)).unwrap_or_default()
    }

    fn kept(&mut self, chunk: usize) -> &mut Kept {
        if self.kept.len() <= chunk {
            self.kept.resize_with(chunk + 1, Kept::default);
        }
        &mut self.kept[chunk]
    }

    /// [`Vectors::encode`] of these values.
    fn encode(
        &mut self,
        values: Values<'_>,
        chunk: &ChunkPlace<'_>,
    ) -> Result<Vec<Bytes>, StepError> {
        let range = &chunk.range;
        let owed = self.owed(range.clone());
        let mut encoded = Encoded { residual: self.buffer(range.len()), ..Encoded::default() };
        let job = Job {
            values,
            residual: residual(owed.as_ref()),
            place: chunk.whole(),
            role: Role::Worker,
            rank: chunk.rank.0,
            shards: &chunk.local_shards(),
            threads: self.threads,
        };
        chunk.codec.encode(&job, &mut encoded)?;
        if let Some(feedback) = &mut self.feedback {
            feedback.set_worker(range.start, encoded.residual);
        }
        let parcels: Vec<_> = encoded.messages.into_iter().map(seal).collect();
        self.kept(chunk.index).own = parcels[chunk.rank.index()].clone();
        Ok(parcels)
    }

    /// Sums this rank's shard into `acc`, whose contents are ignored.
    fn sum(
        &mut self,
        chunk: &ChunkPlace<'_>,
        messages: &[&[u8]],
        mut acc: Vec<f32>,
    ) -> Result<Vec<f32>, StepError> {
        let own = std::mem::take(&mut self.kept(chunk.index).own);
        let place = chunk.shard(chunk.rank);
        acc.resize(place.range.len(), 0.0);
        for from in chunk.world.ranks() {
            let message = if from == chunk.rank { unseal(&own) } else { messages[from.index()] };
            let added = match from.index() {
                0 => chunk.codec.decode_into(message, &place, &mut acc),
                _ => chunk.codec.add_decoded_into(message, &place, &mut acc),
            };
            added.map_err(|why| StepError::Decode { from, why })?;
        }
        Ok(acc)
    }

    /// The same, kept for [`encode_sum`](Self::encode_sum).
    fn keep_sum(&mut self, chunk: &ChunkPlace<'_>, messages: &[&[u8]]) -> Result<(), StepError> {
        let acc = self.buffer(chunk.shards[chunk.rank.index()].len());
        self.kept(chunk.index).sum = self.sum(chunk, messages, acc)?;
        Ok(())
    }

    fn encode_sum(&mut self, chunk: &ChunkPlace<'_>) -> Result<Bytes, StepError> {
        let sum = std::mem::take(&mut self.kept(chunk.index).sum);
        let shard = chunk.shards[chunk.rank.index()].clone();
        let owed = self.feedback.as_ref().map(|feedback| feedback.owner(shard.clone()));
        let mut encoded = Encoded { residual: self.buffer(shard.len()), ..Encoded::default() };
        let place = chunk.shard(chunk.rank);
        let job = Job {
            rank: chunk.rank.0,
            threads: self.threads,
            ..Job::owner(&sum, residual(owed.as_ref()), &place)
        };
        chunk.codec.encode(&job, &mut encoded)?;
        if let Some(feedback) = &mut self.feedback {
            feedback.set_owner(shard.start, encoded.residual);
            feedback.give_back(sum);
        }
        let parcel = seal(encoded.messages.swap_remove(0));
        self.kept(chunk.index).own = parcel.clone();
        Ok(parcel)
    }

    /// [`Vectors::decode`] into `output`.
    fn decode(
        &mut self,
        chunk: &ChunkPlace<'_>,
        messages: &[&[u8]],
        output: &mut [f32],
    ) -> Result<(), StepError> {
        let own = std::mem::take(&mut self.kept(chunk.index).own);
        for from in chunk.world.ranks() {
            let message = if from == chunk.rank { unseal(&own) } else { messages[from.index()] };
            let out = &mut output[chunk.shards[from.index()].clone()];
            let place = chunk.shard(from);
            let decoded = match divisor(chunk.mean, chunk.world) {
                None => chunk.codec.decode_into(message, &place, out),
                Some(ranks) => chunk.codec.decode_divided_into(message, &place, out, ranks),
            };
            decoded.map_err(|why| StepError::Decode { from, why })?;
        }
        Ok(())
    }

    /// [`FactorVectors::begin`] with these values.
    fn begin(&mut self, values: Values<'_>, matrix: &MatrixPlace) -> Result<Vec<f32>, StepError> {
        let owed = self.owed(0..values.len());
        let warm = self.feedback.as_ref().and_then(|feedback| feedback.warm());
        let owed = residual(owed.as_ref());
        let p = matrix.codec.begin(values, owed, warm, matrix.shape, matrix.context)?;
        let factor = p.p().to_vec();
        self.power = Power::P(p);
        Ok(factor)
    }

    fn with_p(&mut self, sum: Vec<f32>) -> Result<Vec<f32>, StepError> {
        let Power::P(p) = std::mem::take(&mut self.power) else { unreachable!("it has begun") };
        let q = p.with_sum(sum)?;
        let factor = q.q().to_vec();
        self.power = Power::Q(q);
        Ok(factor)
    }

    /// [`FactorVectors::with_q`] into `output`, which is all zeros.
    fn with_q(&mut self, sum: Vec<f32>, output: &mut [f32]) -> Result<(), StepError> {
        let Power::Q(q) = std::mem::take(&mut self.power) else { unreachable!("it has P") };
        let state = q.with_sum(sum, output)?;
        if let Some(feedback) = &mut self.feedback {
            feedback.set_worker(0, state.residual);
            feedback.set_warm(state.warm);
        }
        Ok(())
    }

    pub(super) fn finish(self) {
        if let Some(feedback) = self.feedback {
            feedback.commit();
        }
    }
}

impl HostVectors {
    /// What this rank owes for these elements, as a worker.
    fn owed(&self, range: Range<usize>) -> Option<Owed> {
        self.coding.owed(range)
    }

    /// A buffer for `len` elements, with arbitrary contents.
    pub(super) fn buffer(&mut self, len: usize) -> Vec<f32> {
        self.coding.buffer(len)
    }

    /// [`encode`](Vectors::encode) of these values, from a vector of `len` elements.
    pub(super) fn encode_values(
        &mut self,
        chunk: &ChunkPlace<'_>,
        values: Values<'_>,
        len: usize,
    ) -> Result<Vec<Bytes>, StepError> {
        if chunk.gather {
            // Its contents are overwritten, shard by shard.
            self.output.resize(len, 0.0);
        }
        self.coding.encode(values, chunk)
    }

    /// Passes some elements of the input to `read`, in f32, with what the worker owes for them
    /// added if asked.
    pub(super) fn read<T>(
        &self,
        range: Range<usize>,
        with_owed: bool,
        read: impl FnOnce(&[f32]) -> T,
    ) -> T {
        let (input, mut scratch) = (self.input.values(range.clone()), Vec::new());
        let values = input.read(0..range.len(), &mut scratch);
        let owed = with_owed.then(|| self.owed(range)).flatten();
        match owed.as_ref().map(Owed::residual) {
            Some(Residual::Owed(owed)) => {
                let sums: Vec<_> = values.iter().zip(owed).map(|(x, owed)| x + owed).collect();
                read(&sums)
            }
            _ => read(values),
        }
    }

    /// Clears what the worker owed for these elements: it has been sent as it is.
    pub(super) fn clear_owed(&mut self, range: Range<usize>) {
        if let Some(feedback) = &mut self.coding.feedback {
            feedback.clear_worker(range);
        }
    }

    /// Gives back a buffer that is no longer needed.
    pub(super) fn give_back(&mut self, buffer: Vec<f32>) {
        if let Some(feedback) = &mut self.coding.feedback {
            feedback.give_back(buffer);
        }
    }
}

impl Vectors for HostVectors {
    fn len(&self) -> usize {
        self.input.len()
    }

    fn dtype(&self) -> DType {
        self.input.dtype()
    }

    fn feedback_mut(&mut self) -> Option<&mut Transaction> {
        self.coding.feedback.as_mut()
    }

    fn encode(&mut self, chunk: &ChunkPlace<'_>) -> Result<Vec<Bytes>, StepError> {
        if chunk.gather {
            // Its contents are overwritten, shard by shard.
            self.output.resize(self.input.len(), 0.0);
        }
        self.coding.encode(self.input.values(chunk.range.clone()), chunk)
    }

    fn sum(&mut self, chunk: &ChunkPlace<'_>, messages: &[&[u8]]) -> Result<(), StepError> {
        if chunk.gather {
            return self.coding.keep_sum(chunk, messages);
        }
        let output = std::mem::take(&mut self.output);
        self.output = self.coding.sum(chunk, messages, output)?;
        scale(&mut self.output, chunk.mean, chunk.world);
        Ok(())
    }

    fn encode_sum(&mut self, chunk: &ChunkPlace<'_>) -> Result<Bytes, StepError> {
        self.coding.encode_sum(chunk)
    }

    fn decode(&mut self, chunk: &ChunkPlace<'_>, messages: &[&[u8]]) -> Result<(), StepError> {
        self.coding.decode(chunk, messages, &mut self.output)
    }

    fn factors(&mut self) -> Option<&mut dyn FactorVectors> {
        Some(self)
    }

    fn finish(self: Box<Self>) -> Result<(), String> {
        self.coding.finish();
        Ok(())
    }

    fn abandon(self: Box<Self>) -> Box<dyn Any + Send> {
        Box::new(self.input)
    }
}

impl FactorVectors for HostVectors {
    fn begin(&mut self, matrix: &MatrixPlace) -> Result<Vec<f32>, StepError> {
        self.coding.begin(self.input.values(0..self.input.len()), matrix)
    }

    fn with_p(&mut self, _: &MatrixPlace, sum: Vec<f32>) -> Result<Vec<f32>, StepError> {
        self.coding.with_p(sum)
    }

    fn with_q(&mut self, matrix: &MatrixPlace, sum: Vec<f32>) -> Result<(), StepError> {
        self.output.clear();
        self.output.resize(self.input.len(), 0.0);
        self.coding.with_q(sum, &mut self.output)?;
        if let Some(only) = &matrix.only {
            self.output.copy_within(only.clone(), 0);
            self.output.truncate(only.len());
        }
        scale(&mut self.output, matrix.mean, matrix.world);
        Ok(())
    }
}

impl<M: AsMut<[f32]> + AsRef<[f32]>> LentVectors<M> {
    /// A vector in the caller's memory, with what is owed for it if there is error feedback, to be
    /// coded by this many threads.
    pub fn new(memory: M, feedback: Option<Transaction>, threads: NonZeroUsize) -> Self {
        Self { memory, coding: HostCoding::new(feedback, threads) }
    }
}

impl<M> Vectors for LentVectors<M>
where
    M: AsMut<[f32]> + AsRef<[f32]> + fmt::Debug + Send + 'static,
{
    fn len(&self) -> usize {
        self.memory.as_ref().len()
    }

    fn dtype(&self) -> DType {
        DType::F32
    }

    fn feedback_mut(&mut self) -> Option<&mut Transaction> {
        self.coding.feedback.as_mut()
    }

    fn encode(&mut self, chunk: &ChunkPlace<'_>) -> Result<Vec<Bytes>, StepError> {
        self.coding.encode(self.memory.as_ref()[chunk.range.clone()].into(), chunk)
    }

    fn sum(&mut self, chunk: &ChunkPlace<'_>, messages: &[&[u8]]) -> Result<(), StepError> {
        self.coding.keep_sum(chunk, messages)
    }

    fn encode_sum(&mut self, chunk: &ChunkPlace<'_>) -> Result<Bytes, StepError> {
        self.coding.encode_sum(chunk)
    }

    fn decode(&mut self, chunk: &ChunkPlace<'_>, messages: &[&[u8]]) -> Result<(), StepError> {
        // The chunk was encoded before any of its sums was made, and its values are not needed
        // again.
        self.coding.decode(chunk, messages, self.memory.as_mut())
    }

    fn factors(&mut self) -> Option<&mut dyn FactorVectors> {
        Some(self)
    }

    fn finish(self: Box<Self>) -> Result<(), String> {
        self.coding.finish();
        Ok(())
    }

    fn abandon(self: Box<Self>) -> Box<dyn Any + Send> {
        Box::new(self.memory)
    }
}

impl<M: AsMut<[f32]> + AsRef<[f32]>> FactorVectors for LentVectors<M> {
    fn begin(&mut self, matrix: &MatrixPlace) -> Result<Vec<f32>, StepError> {
        self.coding.begin(self.memory.as_ref().into(), matrix)
    }

    fn with_p(&mut self, _: &MatrixPlace, sum: Vec<f32>) -> Result<Vec<f32>, StepError> {
        self.coding.with_p(sum)
    }

    fn with_q(&mut self, matrix: &MatrixPlace, sum: Vec<f32>) -> Result<(), StepError> {
        let output = self.memory.as_mut();
        output.fill(0.0);
        self.coding.with_q(sum, output)?;
        scale(output, matrix.mean, matrix.world);
        Ok(())
    }
}
