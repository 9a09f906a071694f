//! What one rank wants of a collective, and what can be wrong with it.

use std::num::NonZeroUsize;

use farwire_proto::{Counts, Placement, Rank, ReduceOp, WorldSize};

use super::Floats;
use crate::error::DecodeError;
use crate::feedback::Transaction;
use crate::job::Context;
use crate::spec::CodecSpec;

/// What to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Collective {
    /// Everyone gets the sum or mean of everyone's vector.
    AllReduce(ReduceOp),
    /// Each rank gets its block of the sum or mean.
    ReduceScatter(ReduceOp),
    /// Everyone gets everyone's vector, of these lengths.
    AllGather(Counts),
}

/// Everything about an operation that one rank knows.
#[derive(Debug)]
pub struct Order {
    /// What to do.
    pub collective: Collective,
    /// Through which codec.
    pub codec: CodecSpec,
    /// This rank.
    pub rank: Rank,
    /// How many there are.
    pub world: WorldSize,
    /// Where they are, if an all-reduce is to add up on each host first.
    pub placement: Option<Placement>,
    /// This rank's vector.
    pub input: Floats,
    /// The dimensions of the tensor, where they are known: PowerSGD wants a matrix.
    pub dimensions: Option<Vec<usize>>,
    /// The tensor's name, for errors.
    pub tensor: String,
    /// The residuals, unless there is no error feedback.
    pub feedback: Option<Transaction>,
    /// The key to random numbers: the same on all ranks.
    pub context: Context,
    /// Threads that may work on it.
    pub threads: NonZeroUsize,
    /// A buffer to write the result to, with anything in it.
    pub output: Vec<f32>,
}

/// What an operation is, wherever its vectors are.
#[derive(Clone, Debug)]
pub struct Task {
    /// What to do.
    pub collective: Collective,
    /// Through which codec.
    pub codec: CodecSpec,
    /// This rank.
    pub rank: Rank,
    /// How many there are.
    pub world: WorldSize,
    /// Where they are, if an all-reduce of vectors in host memory is to add up on each host first.
    pub placement: Option<Placement>,
    /// The dimensions of the tensor, where they are known.
    pub dimensions: Option<Vec<usize>>,
    /// The tensor's name, for errors.
    pub tensor: String,
    /// The key to random numbers: the same on all ranks.
    pub context: Context,
}

/// Why a coded operation has no result, the same on all ranks.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CodingError {
    /// A NaN or an infinity in somebody's input.
    #[error(
        "rank {rank}'s input of tensor `{tensor}` holds a NaN or an infinity (gradient plus residual, element {element}); \
         skip this step on all ranks or clip the gradient: residuals are unchanged"
    )]
    NotFinite {
        /// Whose.
        rank: usize,
        /// Of which tensor.
        tensor: String,
        /// The first such element.
        element: u64,
    },
    /// A sum that does not fit.
    #[error(
        "the sum of tensor `{tensor}` at rank {rank} is not finite (element {element}); use the mean of smaller values, or skip this step on all ranks: \
         residuals are unchanged"
    )]
    Overflow {
        /// Which rank added.
        rank: usize,
        /// Of which tensor.
        tensor: String,
        /// The first such element.
        element: u64,
    },
    /// A codec of the user's own that is wrong.
    #[error(
        "the codec cannot decode, on rank {rank}, what it encoded of tensor `{tensor}`; see that `add_decoded_into` takes what `encode` makes: \
         residuals are unchanged"
    )]
    Codec {
        /// Where it was found.
        rank: usize,
        /// With which tensor.
        tensor: String,
    },
    /// Vectors that are not in host memory, and could not be worked on where they are.
    #[error(
        "rank {rank} could not work on tensor `{tensor}` on its device: {}; residuals are unchanged",
        why.as_deref().unwrap_or("that rank's own error says why")
    )]
    Device {
        /// Whose.
        rank: usize,
        /// With which tensor.
        tensor: String,
        /// What was wrong; known on that rank alone.
        why: Option<String>,
    },
}

/// Why an operation cannot be started.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum OrderError {
    /// A vector whose length is not its count.
    #[error("this rank's vector has {given} elements where the list of counts says {need}")]
    Length {
        /// What the list says.
        need: usize,
        /// What it has.
        given: usize,
    },
    /// More elements than a codec can count.
    #[error(
        "{codec} counts elements in 32 bits; {given} are too many for one vector: cut it in two"
    )]
    TooLong {
        /// The codec.
        codec: String,
        /// How many were given.
        given: usize,
    },
    /// Vectors that are not in host memory, in an operation that is for those alone.
    #[error(
        "{codec} does not work on vectors outside of host memory; use another codec, or copy the \
         vector to the host"
    )]
    Elsewhere {
        /// The codec.
        codec: String,
    },
    /// A codec that makes sums only.
    #[error("{codec} sums matrices and cannot gather; use another codec for all_gather")]
    CannotGather {
        /// The codec.
        codec: String,
    },
}

/// A peer's parcel is not what any encoder makes: a bug there, or a hostile peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("rank {from}'s parcel in round {round} makes no sense: {why}")]
pub struct Nonsense {
    /// Who sent it.
    pub from: Rank,
    /// When.
    pub round: u32,
    /// How so.
    pub why: DecodeError,
}
