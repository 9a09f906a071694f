//! What goes with a [`Call`](crate::Call): its options, the algorithms that serve it, and the ways
//! it can be wrong.

use std::fmt;
use std::num::NonZeroUsize;
use std::str::FromStr;
use std::time::Duration;

use crate::collective::Kind;
use crate::dtype::{DType, UnknownName};
use crate::ids::{CommId, Rank, WorldSize};

/// What a caller may set besides the call itself. All ranks must set the same.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Options {
    /// Use this algorithm rather than the one [`tune`](crate::tune) picks.
    pub algorithm: Option<Algorithm>,
    /// Elements per frame, rather than the engine's setting in bytes.
    pub segment: Option<NonZeroUsize>,
    /// Fail if the operation has not ended after this long, rather than after the engine's setting.
    /// May differ between ranks.
    pub deadline: Option<Duration>,
}

/// How an operation moves its data. `TwoPhase`, `GatherReduce`, `Direct` and scans combine in rank
/// order, `TwoLevel` host by host ([`SumOrder::Host`](crate::SumOrder::Host)); reductions by `Ring`,
/// `Tree` and `Chain` in an order of their own, which does not depend on the run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Algorithm {
    /// Scatter blocks to their owners, which combine them and send the result on: two rounds, least
    /// volume.
    TwoPhase = 1,
    /// Send everything to each rank that needs the result, which combines it: one round, for small
    /// vectors.
    GatherReduce = 2,
    /// Around the ring, twice: least volume over two flows per rank.
    Ring = 3,
    /// Along a binomial tree: few rounds.
    Tree = 4,
    /// From rank to rank, segment by segment: each rank passes the vector on once.
    Chain = 5,
    /// Straight from source to destination: one round.
    Direct = 6,
    /// In parcels, whose length only their sender knows. Callers do not choose it: some calls imply
    /// it.
    Parcels = 7,
    /// Combine on each host first, then between hosts: each host's sum crosses the network once.
    /// Where all ranks are on one host, or each is on a host of its own, this is two-phase.
    TwoLevel = 8,
}

impl Algorithm {
    /// Every algorithm.
    pub const ALL: [Self; 8] = [
        Self::TwoPhase,
        Self::GatherReduce,
        Self::Ring,
        Self::Tree,
        Self::Chain,
        Self::Direct,
        Self::Parcels,
        Self::TwoLevel,
    ];

    /// The name people type: `two-phase`, `ring`, …
    pub const fn name(self) -> &'static str {
        match self {
            Self::TwoPhase => "two-phase",
            Self::GatherReduce => "gather-reduce",
            Self::Ring => "ring",
            Self::Tree => "tree",
            Self::Chain => "chain",
            Self::Direct => "direct",
            Self::Parcels => "parcels",
            Self::TwoLevel => "two-level",
        }
    }

    /// The algorithm with this wire code.
    pub fn from_code(code: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|algorithm| *algorithm as u8 == code)
    }
}

impl fmt::Display for Algorithm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Algorithm {
    type Err = UnknownName;

    fn from_str(name: &str) -> Result<Self, UnknownName> {
        Self::ALL
            .into_iter()
            .find(|algorithm| algorithm.name() == name)
            .ok_or_else(|| UnknownName::new("algorithm", name, &Self::ALL.map(Self::name)))
    }
}

/// Why a call was refused before anything was sent. The operation does not count as called.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CallError {
    /// The communicator is not known here.
    #[error("communicator {0:?} is not open on this rank; open it before calling on it")]
    UnknownComm(CommId),
    /// A rank outside the communicator.
    #[error("{what} {rank} is outside this communicator of {world} ranks; use 0 to {}", world.get() - 1)]
    NoSuchRank {
        /// The part it was to play.
        what: &'static str,
        /// The rank.
        rank: Rank,
        /// The communicator's size.
        world: WorldSize,
    },
    /// A list of counts whose length is not the world size.
    #[error("{what} lists {given} counts for {world} ranks; give one per rank")]
    CountsPerRank {
        /// Which list.
        what: &'static str,
        /// Its length.
        given: usize,
        /// The communicator's size.
        world: WorldSize,
    },
    /// An all-to-all in which a rank would send itself a different number of elements than it
    /// expects from itself.
    #[error(
        "all_to_all sends {send} elements from this rank to itself but expects {recv}; make them equal"
    )]
    SelfBlock {
        /// Elements it would send.
        send: usize,
        /// Elements it would receive.
        recv: usize,
    },
    /// The mean of integers.
    #[error(
        "mean of {0} would drop the remainder; use sum and divide, or convert to a float type first"
    )]
    IntegerMean(DType),
    /// The mean in a scan.
    #[error(
        "{0} does not take mean, whose divisor would differ from rank to rank; use sum and divide"
    )]
    ScanMean(Kind),
    /// A call that no codec can serve.
    #[error(
        "a codec that drops or rounds elements cannot serve {what}; use all_reduce, reduce_scatter \
         or all_gather of floats, with sum or mean, or call it without a codec"
    )]
    NotCodable {
        /// The call, in words.
        what: String,
    },
    /// A vector of another type than the call's, or a call that takes no vector.
    #[error("{kind} takes no vector of {given} as it was called; give it what the call names")]
    Elements {
        /// The operation.
        kind: Kind,
        /// The vector's type.
        given: DType,
    },
    /// An algorithm that cannot serve this operation.
    #[error("{algorithm} cannot run {kind}; use one of: {}", names(kind.algorithms()))]
    Algorithm {
        /// The operation.
        kind: Kind,
        /// The algorithm asked for.
        algorithm: Algorithm,
    },
    /// A call that needs its input while it writes its output.
    #[error("{kind} cannot work in place; make the call that leaves its input as it is")]
    NotInPlace {
        /// The operation.
        kind: Kind,
    },
    /// A vector whose size in bytes does not fit the address space, or that would take more than
    /// 2³² − 1 frames.
    #[error(
        "{kind} of this size needs too many bytes or frames; use fewer elements or larger segments"
    )]
    TooLarge {
        /// The operation.
        kind: Kind,
    },
    /// A message to or from oneself.
    #[error("rank {} cannot exchange a message with itself; keep the data where it is", .0.0)]
    ToSelf(Rank),
    /// A buffer of the wrong length.
    #[error("{kind} needs an {which} of {need} bytes on this rank, not {given}")]
    BufferLength {
        /// The operation.
        kind: Kind,
        /// `input`, `output` or `in-place vector`.
        which: &'static str,
        /// Bytes it must have.
        need: usize,
        /// Bytes it has.
        given: usize,
    },
}

fn names(algorithms: &[Algorithm]) -> String {
    algorithms.iter().map(|a| a.name()).collect::<Vec<_>>().join(", ")
}
