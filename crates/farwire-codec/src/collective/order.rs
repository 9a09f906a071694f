//! What one rank asks of a collective, and what can go wrong.

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
    /// The codec to use.
    pub codec: CodecSpec,
    /// This rank.
    pub rank: Rank,
    /// How many ranks there are.
    pub world: WorldSize,
    /// Where the ranks are, if an all-reduce is to add up on each host first.
    pub placement: Option<Placement>,
    /// This rank's vector.
    pub input: Floats,
    /// The dimensions of the tensor, if they are known: PowerSGD wants a matrix.
    pub dimensions: Option<Vec<usize>>,
    /// The tensor's name, for errors.
    pub tensor: String,
    /// The residuals; `None` without error feedback.
    pub feedback: Option<Transaction>,
    /// The key to random numbers: the same on all ranks.
    pub context: Context,
    /// Threads that may work on it.
    pub threads: NonZeroUsize,
    /// A buffer for the result, with arbitrary contents.
    pub output: Vec<f32>,
}

/// An operation without its vectors, which may be anywhere.
#[derive(Clone, Debug)]
pub struct Task {
    /// What to do.
    pub collective: Collective,
    /// The codec to use.
    pub codec: CodecSpec,
    /// This rank.
    pub rank: Rank,
    /// How many ranks there are.
    pub world: WorldSize,
    /// Where the ranks are, if an all-reduce of vectors in host memory is to add up on each host
    /// first.
    pub placement: Option<Placement>,
    /// The dimensions of the tensor, if they are known.
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
    /// A NaN or an infinity in a rank's input.
    #[error(
        "rank {rank}'s input of tensor `{tensor}` holds a NaN or an infinity (gradient plus residual, element {element}); \
         skip this step on all ranks or clip the gradient: residuals are unchanged"
    )]
    NotFinite {
        /// The rank.
        rank: usize,
        /// The tensor.
        tensor: String,
        /// The first such element.
        element: u64,
    },
    /// A sum that is not finite.
    #[error(
        "the sum of tensor `{tensor}` at rank {rank} is not finite (element {element}); use the mean of smaller values, or skip this step on all ranks: \
         residuals are unchanged"
    )]
    Overflow {
        /// The rank that added.
        rank: usize,
        /// The tensor.
        tensor: String,
        /// The first such element.
        element: u64,
    },
    /// A user's own codec that cannot decode what it encoded.
    #[error(
        "the codec cannot decode, on rank {rank}, what it encoded of tensor `{tensor}`; see that `add_decoded_into` takes what `encode` makes: \
         residuals are unchanged"
    )]
    Codec {
        /// The rank that found it.
        rank: usize,
        /// The tensor.
        tensor: String,
    },
    /// Vectors outside host memory that could not be worked on where they are.
    #[error(
        "rank {rank} could not work on tensor `{tensor}` on its device: {}; residuals are unchanged",
        why.as_deref().unwrap_or("that rank's own error says why")
    )]
    Device {
        /// The rank.
        rank: usize,
        /// The tensor.
        tensor: String,
        /// The cause, known on that rank alone.
        why: Option<String>,
    },
}

/// Why an operation cannot be started.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum OrderError {
    /// A vector whose length is not the one in the list of counts.
    #[error("this rank's vector has {given} elements where the list of counts says {need}")]
    Length {
        /// The length in the list.
        need: usize,
        /// The vector's length.
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
    /// Vectors outside host memory, in an operation that needs them in it.
    #[error(
        "{codec} does not work on vectors outside of host memory; use another codec, or copy the \
         vector to the host"
    )]
    Elsewhere {
        /// The codec.
        codec: String,
    },
    /// A codec that can only sum.
    #[error("{codec} sums matrices and cannot gather; use another codec for all_gather")]
    CannotGather {
        /// The codec.
        codec: String,
    },
}

/// A peer's parcel that no encoder could have made: a bug there, or a hostile peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("rank {from}'s parcel in round {round} makes no sense: {why}")]
pub struct Nonsense {
    /// Who sent it.
    pub from: Rank,
    /// In which round.
    pub round: u32,
    /// What is wrong with it.
    pub why: DecodeError,
}
