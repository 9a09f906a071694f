//! What an encoder is given, and what it gives back.

use std::num::NonZeroUsize;
use std::ops::Range;

use half::{bf16, f16};

use crate::error::EncodeError;
use crate::simd::Level;

/// One vector to encode.
#[derive(Clone, Debug)]
pub struct Job<'a> {
    /// The gradient, or at an owner the sum of what was received.
    pub values: Values<'a>,
    /// What error feedback still owes, to be sent along.
    pub residual: Residual<'a>,
    /// Where the values are in the vector.
    pub place: CodedPlace,
    /// Which of the two rounds this is.
    pub role: Role,
    /// This rank's number. Stochastic rounding draws different numbers on each rank, so that errors
    /// average out.
    pub rank: u32,
    /// The ranges to encode, in order; they cover `place.range` without gaps.
    pub shards: &'a [Range<usize>],
    /// How many threads may work on it. The bits do not depend on it.
    pub threads: NonZeroUsize,
}

impl<'a> Job<'a> {
    /// A worker's job on one thread, as rank 0.
    pub fn worker<T>(
        values: &'a [T],
        residual: Residual<'a>,
        place: &CodedPlace,
        shards: &'a [Range<usize>],
    ) -> Self
    where
        Values<'a>: From<&'a [T]>,
    {
        let (values, place) = (values.into(), place.clone());
        Self {
            values,
            residual,
            place,
            role: Role::Worker,
            rank: 0,
            shards,
            threads: NonZeroUsize::MIN,
        }
    }

    /// An owner's job on one thread, as rank 0: its sum is encoded to a single message.
    pub fn owner(sum: &'a [f32], residual: Residual<'a>, place: &'a CodedPlace) -> Self {
        let (values, shards) = (sum.into(), std::slice::from_ref(&place.range));
        Self {
            values,
            residual,
            place: place.clone(),
            role: Role::Owner,
            rank: 0,
            shards,
            threads: NonZeroUsize::MIN,
        }
    }

    /// Panics if the parts do not fit together: a bug in the caller, not in a peer.
    pub(crate) fn check(&self) {
        let len = self.place.range.len();
        assert_eq!(self.values.len(), len, "one value for each element of place.range");
        if let Residual::Owed(residual) = self.residual {
            assert_eq!(residual.len(), len, "one residual for each element of place.range");
        }
        self.place.check(self.shards);
    }
}

/// The bytes and the residual of one encoded vector.
#[derive(Debug, Default)]
pub struct Encoded {
    /// One message per shard.
    pub messages: Vec<Vec<u8>>,
    /// What was not transmitted, for the next step; empty with [`Residual::Off`].
    pub residual: Vec<f32>,
    pub(crate) scratch: Scratch,
}

/// Space that encoders reuse.
#[derive(Debug, Default)]
pub(crate) struct Scratch {
    /// Top-k: what was selected.
    pub(crate) selected: Sparse,
    /// Top-k: what may be selected, one list per section.
    pub(crate) candidates: Vec<Sparse>,
}

/// Some elements of a vector, in ascending order.
#[derive(Debug, Default)]
pub(crate) struct Sparse {
    pub(crate) indices: Vec<u32>,
    pub(crate) values: Vec<f32>,
}

impl Sparse {
    pub(crate) fn len(&self) -> usize {
        self.indices.len()
    }

    pub(crate) fn clear(&mut self) {
        self.indices.clear();
        self.values.clear();
    }

    pub(crate) fn extend(&mut self, indices: &[u32], values: &[f32]) {
        self.indices.extend_from_slice(indices);
        self.values.extend_from_slice(values);
    }

    pub(crate) fn push(&mut self, index: u32, value: f32) {
        self.indices.push(index);
        self.values.push(value);
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (u32, f32)> {
        self.indices.iter().copied().zip(self.values.iter().copied())
    }
}

impl Encoded {
    /// Makes room for `shards` messages and `elements` of residual. Old contents may remain.
    pub(crate) fn resize(&mut self, shards: usize, elements: usize) {
        self.messages.resize_with(shards, Vec::new);
        self.residual.resize(elements, 0.0);
    }

    /// Leaves no residual behind where the caller wants none.
    pub(crate) fn finish(&mut self, residual: Residual<'_>) {
        if matches!(residual, Residual::Off) {
            self.residual.clear();
        }
    }
}

/// Whether there is error feedback, and what it owes.
#[derive(Clone, Copy, Debug)]
pub enum Residual<'a> {
    /// No error feedback: what is not transmitted is lost, and random-k scales what it sends to
    /// make up for it.
    Off,
    /// Error feedback that owes nothing yet.
    Zero,
    /// Error feedback that owes this.
    Owed(&'a [f32]),
}

/// Which round a vector is encoded for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// A rank's own gradient, to the shards' owners.
    Worker,
    /// An owner's sum, to every rank.
    Owner,
}

/// Where some elements are in a vector. Sender and receiver both know this without sending it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CodedPlace {
    /// The seed, the step and the tensor.
    pub context: Context,
    /// Elements of the whole vector, the one that is cut into shards.
    pub whole: usize,
    /// The elements in question.
    pub range: Range<usize>,
}

impl CodedPlace {
    /// All of a vector.
    pub fn whole(context: Context, elements: usize) -> Self {
        Self { context, whole: elements, range: 0..elements }
    }

    /// Panics unless the shards cover the range without gaps, and the range lies in the vector.
    pub(crate) fn check(&self, shards: &[Range<usize>]) {
        assert!(self.range.end <= self.whole, "place.range lies within the whole vector");
        let mut next = self.range.start;
        for shard in shards {
            assert_eq!(shard.start, next, "shards follow one another");
            assert!(shard.start <= shard.end, "shards do not run backwards");
            next = shard.end;
        }
        assert!(
            shards.is_empty() && self.range.is_empty() || next == self.range.end,
            "shards cover place.range"
        );
    }

    /// A range of the same vector.
    pub fn part(&self, range: Range<usize>) -> Self {
        Self { range, ..self.clone() }
    }
}

/// The key to all random numbers of an operation. Must be the same on all ranks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Context {
    /// Chosen once for a run.
    pub seed: u64,
    /// Counts the steps: a number never used with this tensor before.
    pub step: u64,
    /// The tensor; see [`Context::tensor_id`].
    pub tensor: u64,
}

impl Context {
    /// A number for a tensor's name (FNV-1a).
    pub fn tensor_id(name: &str) -> u64 {
        name.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
        })
    }

    /// The context for the `n`-th chunk of a tensor that is handed over in chunks, each a vector of
    /// its own.
    pub fn chunk(self, n: u64) -> Self {
        let tensor = self.tensor ^ n.wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(32);
        Self { tensor, ..self }
    }
}

/// A vector of any float type. Everything is computed in f32.
#[derive(Clone, Copy, Debug)]
pub enum Values<'a> {
    /// 32-bit floats.
    F32(&'a [f32]),
    /// 64-bit floats, rounded to f32 first: what rounding drops is not kept in the residual.
    F64(&'a [f64]),
    /// IEEE binary16.
    F16(&'a [f16]),
    /// bfloat16.
    Bf16(&'a [bf16]),
}

impl Values<'_> {
    /// Number of elements.
    pub fn len(&self) -> usize {
        match self {
            Self::F32(values) => values.len(),
            Self::F64(values) => values.len(),
            Self::F16(values) => values.len(),
            Self::Bf16(values) => values.len(),
        }
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Some of the elements as f32; converted into `scratch` if they are something else.
    pub(crate) fn read<'s>(&'s self, range: Range<usize>, scratch: &'s mut Vec<f32>) -> &'s [f32] {
        match self {
            Self::F32(values) => &values[range],
            Self::F64(values) => {
                scratch.clear();
                scratch.extend(values[range].iter().map(|value| *value as f32));
                scratch
            }
            Self::F16(values) => {
                scratch.clear();
                scratch.extend(values[range].iter().map(|value| value.to_f32()));
                scratch
            }
            Self::Bf16(values) => {
                scratch.clear();
                scratch.extend(values[range].iter().map(|value| value.to_f32()));
                scratch
            }
        }
    }
}

macro_rules! values_from {
    ($($type:ty => $variant:ident),*) => {$(
        impl<'a> From<&'a [$type]> for Values<'a> {
            fn from(values: &'a [$type]) -> Self {
                Self::$variant(values)
            }
        }
    )*};
}
values_from!(f32 => F32, f64 => F64, f16 => F16, bf16 => Bf16);

/// Reads a job's values plus residual, piece by piece.
#[derive(Debug)]
pub(crate) struct Fused<'a> {
    level: Level,
    values: Values<'a>,
    residual: Residual<'a>,
    scratch: Vec<f32>,
}

impl<'a> Fused<'a> {
    pub(crate) fn new(level: Level, job: &Job<'a>) -> Self {
        Self { level, values: job.values, residual: job.residual, scratch: Vec::new() }
    }

    /// Writes elements `start..start + out.len()`, counted from the first of the job, to `out`. An
    /// error names the first element that is not finite.
    pub(crate) fn read(&mut self, start: usize, out: &mut [f32]) -> Result<(), EncodeError> {
        let range = start..start + out.len();
        let values = self.values.read(range.clone(), &mut self.scratch);
        let magnitude = match self.residual {
            Residual::Off | Residual::Zero => crate::simd::copy(self.level, values, out),
            Residual::Owed(residual) => crate::simd::add(self.level, values, &residual[range], out),
        };
        if magnitude < f32::INFINITY.to_bits() {
            return Ok(());
        }
        let index = out
            .iter()
            .position(|value| !value.is_finite())
            .expect("the largest magnitude is not finite");
        Err(EncodeError::NotFinite { index: start + index })
    }

    /// The memory that [`read`](Self::read) will read from element `start` on, as far as it is f32.
    pub(crate) fn soon(&self, start: usize) -> [&'a [f32]; 2] {
        let values = if let Values::F32(values) = self.values { values } else { &[] };
        let owed = if let Residual::Owed(owed) = self.residual { owed } else { &[] };
        [values, owed].map(|elements| elements.get(start..).unwrap_or(&[]))
    }
}
