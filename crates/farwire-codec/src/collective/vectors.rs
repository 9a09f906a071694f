//! One rank's vectors in a collective, wherever they are: what `two_phase.rs` does with them.

use std::any::Any;
use std::fmt;
use std::ops::Range;

use bytes::Bytes;
use farwire_proto::{DType, Rank, WorldSize};

use super::{Floats, residual, scale, seal, unseal};
use crate::codec::MessageCodec;
use crate::codecs::powersgd::{PowerP, PowerQ, PowerSgd, Shape};
use crate::error::{DecodeError, EncodeError};
use crate::feedback::{Owed, Transaction};
use crate::job::{CodedPlace, Context, Encoded, Job, Residual, Role, Values};

/// One rank's vectors in an all-reduce: its input, the sums it makes, its result, and what it owes.
/// In host memory, or where somebody else keeps them, such as on a card.
///
/// Calls come by chunk: `encode`, then `sum`, `encode_sum`, `decode`; those of other chunks come in
/// between. Nothing the caller can see changes before [`finish`](Self::finish): given up instead,
/// input and residuals are as they were.
pub trait Vectors: fmt::Debug + Send {
    /// Elements of the input.
    fn len(&self) -> usize;

    /// Whether there are none.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The element type of the input.
    fn dtype(&self) -> DType;

    /// What is owed, unless there is no error feedback.
    fn feedback_mut(&mut self) -> Option<&mut Transaction>;

    /// Encodes the input plus what the worker owes: for each shard of the chunk, a message with a
    /// zero byte after it. This rank's own message is kept for `sum`; what the list has in its place
    /// does not count.
    fn encode(&mut self, chunk: &ChunkPlace<'_>) -> Result<Vec<Bytes>, StepError>;

    /// Adds up this rank's shard of the chunk: one message from each rank, in rank order. The kept
    /// one takes the place of this rank's own.
    fn sum(&mut self, chunk: &ChunkPlace<'_>, messages: &[&[u8]]) -> Result<(), StepError>;

    /// Encodes that sum plus what the owner owes: a message with a zero byte after it. It is kept
    /// for `decode`.
    fn encode_sum(&mut self, chunk: &ChunkPlace<'_>) -> Result<Bytes, StepError>;

    /// Decodes the sums of all shards of the chunk to the result. The kept one takes the place of
    /// this rank's own.
    fn decode(&mut self, chunk: &ChunkPlace<'_>, messages: &[&[u8]]) -> Result<(), StepError>;

    /// The same vectors for sums of factors, if they know how.
    fn factors(&mut self) -> Option<&mut dyn FactorVectors> {
        None
    }

    /// All has come: the result is put in its place, and what is owed from now on replaces what was
    /// owed. Or why it cannot be, and nothing has changed.
    fn finish(self: Box<Self>) -> Result<(), String>;

    /// Gives it up. What comes back is the memory's owner, to be dropped where any code may run.
    fn abandon(self: Box<Self>) -> Box<dyn Any + Send>;
}

/// What `low_rank.rs` does with a rank's vectors: the input plus what the worker owes is a matrix M.
/// Factors are small, and in host memory.
pub trait FactorVectors {
    /// P = M·Q, row by row.
    fn begin(&mut self, matrix: &MatrixPlace) -> Result<Vec<f32>, StepError>;

    /// Goes on with the sum of all ranks' P: Q = Mᵀ·P̂, column by column.
    fn with_p(&mut self, matrix: &MatrixPlace, sum: Vec<f32>) -> Result<Vec<f32>, StepError>;

    /// Ends with the sum of all ranks' Q: the result, and what is owed from now on.
    fn with_q(&mut self, matrix: &MatrixPlace, sum: Vec<f32>) -> Result<(), StepError>;
}

/// A vector that is seen as a matrix.
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
    /// Which it is, from zero.
    pub index: usize,
    /// Its elements.
    pub range: Range<usize>,
    /// What each rank owns of them.
    pub shards: &'a [Range<usize>],
    /// The key to random numbers.
    pub context: Context,
    /// This rank.
    pub rank: Rank,
    /// How many there are.
    pub world: WorldSize,
    /// Whether the result is a mean.
    pub mean: bool,
    /// Whether sums go to everybody; if not, this rank's sum is its result.
    pub gather: bool,
    /// The codec, for vectors in host memory.
    pub codec: &'a dyn MessageCodec,
}

impl ChunkPlace<'_> {
    /// The chunk, as encoders know it: a vector from its own first element on.
    pub fn whole(&self) -> CodedPlace {
        CodedPlace::whole(self.context, self.range.len())
    }

    /// The shards, counted from the chunk's first element.
    pub fn local_shards(&self) -> Vec<Range<usize>> {
        self.shards.iter().map(|shard| self.local(shard)).collect()
    }

    /// A rank's shard, as encoders know it.
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
    /// The values cannot be encoded. Their index counts from the first that was to be encoded.
    #[error(transparent)]
    Encode(#[from] EncodeError),
    /// A rank's message is not one that an encoder writes.
    #[error("rank {from}'s message: {why}")]
    Decode {
        /// Whose.
        from: Rank,
        /// What is wrong with it.
        why: DecodeError,
    },
    /// Where the vectors are, something failed: there was not enough memory, say.
    #[error("{0}")]
    Device(String),
}

/// Vectors in host memory.
#[derive(Debug)]
pub(super) struct HostVectors {
    pub(super) input: Floats,
    pub(super) output: Vec<f32>,
    pub(super) feedback: Option<Transaction>,
    pub(super) threads: std::num::NonZeroUsize,
    /// By chunk.
    pub(super) kept: Vec<Kept>,
    pub(super) power: Power,
}

/// How far the sums of factors are.
#[derive(Debug, Default)]
pub(super) enum Power {
    #[default]
    Begin,
    P(PowerP),
    Q(PowerQ),
}

/// What a rank keeps of a chunk from one step to the next.
#[derive(Debug, Default)]
pub(super) struct Kept {
    /// This rank's parcel to itself, until it is decoded.
    own: Bytes,
    /// The sum of this rank's shard, until it is encoded.
    sum: Vec<f32>,
}

impl HostVectors {
    /// What this rank owes for some elements, as a worker.
    pub(super) fn owed(&self, range: Range<usize>) -> Option<Owed> {
        self.feedback.as_ref().map(|feedback| feedback.worker(range))
    }

    /// A buffer for so many elements, with anything in it.
    pub(super) fn buffer(&mut self, len: usize) -> Vec<f32> {
        self.feedback.as_mut().map(|feedback| feedback.buffer(len)).unwrap_or_default()
    }

    /// Zeros for `len` elements of result.
    pub(super) fn clear_output(&mut self, len: usize) {
        self.output.clear();
        self.output.resize(len, 0.0);
    }

    /// [`encode`](Vectors::encode) of these values, of a vector that has `len` in all.
    pub(super) fn encode_values(
        &mut self,
        chunk: &ChunkPlace<'_>,
        values: Values<'_>,
        len: usize,
    ) -> Result<Vec<Bytes>, StepError> {
        if chunk.gather {
            // What is in it is written over, shard by shard.
            self.output.resize(len, 0.0);
        }
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

    /// Reads some elements of the input, in f32; with what the worker owes for them, if asked.
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

    /// What the worker owed for some elements has been sent as it is.
    pub(super) fn clear_owed(&mut self, range: Range<usize>) {
        if let Some(feedback) = &mut self.feedback {
            feedback.clear_worker(range);
        }
    }

    /// A buffer that is not needed any more.
    pub(super) fn give_back(&mut self, buffer: Vec<f32>) {
        if let Some(feedback) = &mut self.feedback {
            feedback.give_back(buffer);
        }
    }

    fn kept(&mut self, chunk: usize) -> &mut Kept {
        if self.kept.len() <= chunk {
            self.kept.resize_with(chunk + 1, Kept::default);
        }
        &mut self.kept[chunk]
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
        self.feedback.as_mut()
    }

    fn encode(&mut self, chunk: &ChunkPlace<'_>) -> Result<Vec<Bytes>, StepError> {
        let input = std::mem::replace(&mut self.input, Floats::F32(Vec::new()));
        let values = input.values(chunk.range.clone());
        let encoded = self.encode_values(chunk, values, input.len());
        self.input = input;
        encoded
    }

    fn sum(&mut self, chunk: &ChunkPlace<'_>, messages: &[&[u8]]) -> Result<(), StepError> {
        let own = std::mem::take(&mut self.kept(chunk.index).own);
        let place = chunk.shard(chunk.rank);
        let len = place.range.len();
        let mut acc =
            if chunk.gather { self.buffer(len) } else { std::mem::take(&mut self.output) };
        acc.resize(len, 0.0);
        for from in chunk.world.ranks() {
            let message = if from == chunk.rank { unseal(&own) } else { messages[from.index()] };
            let added = match from.index() {
                0 => chunk.codec.decode_into(message, &place, &mut acc),
                _ => chunk.codec.add_decoded_into(message, &place, &mut acc),
            };
            added.map_err(|why| StepError::Decode { from, why })?;
        }
        if chunk.gather {
            self.kept(chunk.index).sum = acc;
        } else {
            scale(&mut acc, chunk.mean, chunk.world);
            self.output = acc;
        }
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

    fn decode(&mut self, chunk: &ChunkPlace<'_>, messages: &[&[u8]]) -> Result<(), StepError> {
        let own = std::mem::take(&mut self.kept(chunk.index).own);
        for from in chunk.world.ranks() {
            let message = if from == chunk.rank { unseal(&own) } else { messages[from.index()] };
            let out = &mut self.output[chunk.shards[from.index()].clone()];
            chunk
                .codec
                .decode_into(message, &chunk.shard(from), out)
                .map_err(|why| StepError::Decode { from, why })?;
            scale(out, chunk.mean, chunk.world);
        }
        Ok(())
    }

    fn factors(&mut self) -> Option<&mut dyn FactorVectors> {
        Some(self)
    }

    fn finish(self: Box<Self>) -> Result<(), String> {
        if let Some(feedback) = self.feedback {
            feedback.commit();
        }
        Ok(())
    }

    fn abandon(self: Box<Self>) -> Box<dyn Any + Send> {
        Box::new(self.input)
    }
}

impl FactorVectors for HostVectors {
    fn begin(&mut self, matrix: &MatrixPlace) -> Result<Vec<f32>, StepError> {
        let all = 0..self.input.len();
        let owed = self.owed(all.clone());
        let warm = self.feedback.as_ref().and_then(|feedback| feedback.warm());
        let (values, owed) = (self.input.values(all), residual(owed.as_ref()));
        let p = matrix.codec.begin(values, owed, warm, matrix.shape, matrix.context)?;
        let factor = p.p().to_vec();
        self.power = Power::P(p);
        Ok(factor)
    }

    fn with_p(&mut self, _: &MatrixPlace, sum: Vec<f32>) -> Result<Vec<f32>, StepError> {
        let Power::P(p) = std::mem::take(&mut self.power) else { unreachable!("it has begun") };
        let q = p.with_sum(sum)?;
        let factor = q.q().to_vec();
        self.power = Power::Q(q);
        Ok(factor)
    }

    fn with_q(&mut self, matrix: &MatrixPlace, sum: Vec<f32>) -> Result<(), StepError> {
        let Power::Q(q) = std::mem::take(&mut self.power) else { unreachable!("it has P") };
        self.clear_output(self.input.len());
        let state = q.with_sum(sum, &mut self.output)?;
        if let Some(feedback) = &mut self.feedback {
            feedback.set_worker(0, state.residual);
            feedback.set_warm(state.warm);
        }
        if let Some(only) = &matrix.only {
            self.output.copy_within(only.clone(), 0);
            self.output.truncate(only.len());
        }
        scale(&mut self.output, matrix.mean, matrix.world);
        Ok(())
    }
}
