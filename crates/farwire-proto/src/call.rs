//! What a rank can ask for: the calls, the algorithms that serve them, and the ways a call can be
//! wrong.

use std::fmt;
use std::num::{NonZeroU32, NonZeroUsize};
use std::str::FromStr;
use std::time::Duration;

use crate::dtype::{DType, ReduceOp, UnknownName};
use crate::ids::{CommId, Rank, Tag, WorldSize};
use crate::partition::Counts;

/// One operation as the caller states it. Counts are in elements.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Call {
    /// Everyone gets the combination of everyone's vector of `count` elements.
    AllReduce {
        /// Elements of each rank's vector.
        count: usize,
        /// Their type.
        dtype: DType,
        /// How they are combined.
        op: ReduceOp,
    },
    /// The combination of everyone's vector, of which each rank gets its block: an even
    /// [`Partition`](crate::Partition).
    ReduceScatter {
        /// Elements of each rank's input.
        count: usize,
        /// Their type.
        dtype: DType,
        /// How they are combined.
        op: ReduceOp,
    },
    /// Everyone gets everyone's block, in rank order.
    AllGather {
        /// Elements that each rank contributes.
        counts: Counts,
        /// Their type.
        dtype: DType,
    },
    /// Everyone gets the root's vector.
    Broadcast {
        /// Elements of the vector.
        count: usize,
        /// Their type.
        dtype: DType,
        /// Who has it.
        root: Rank,
    },
    /// The root gets the combination of everyone's vector.
    Reduce {
        /// Elements of each rank's vector.
        count: usize,
        /// Their type.
        dtype: DType,
        /// How they are combined.
        op: ReduceOp,
        /// Who gets the result.
        root: Rank,
    },
    /// The root gets everyone's block, in rank order.
    Gather {
        /// Elements that each rank contributes.
        counts: Counts,
        /// Their type.
        dtype: DType,
        /// Who gets them.
        root: Rank,
    },
    /// Each rank gets its block of the root's vector.
    Scatter {
        /// Elements that each rank receives.
        counts: Counts,
        /// Their type.
        dtype: DType,
        /// Who has the vector.
        root: Rank,
    },
    /// Rank i's block j becomes rank j's block i.
    AllToAll {
        /// Elements this rank sends to each rank.
        send: Counts,
        /// Elements this rank receives from each rank.
        recv: Counts,
        /// Their type.
        dtype: DType,
    },
    /// Rank r gets the combination of the vectors of ranks 0..=r.
    Scan {
        /// Elements of each rank's vector.
        count: usize,
        /// Their type.
        dtype: DType,
        /// How they are combined (not mean).
        op: ReduceOp,
    },
    /// Rank r gets the combination of the vectors of ranks 0..r; rank 0 gets the operator's
    /// identity.
    ExclusiveScan {
        /// Elements of each rank's vector.
        count: usize,
        /// Their type.
        dtype: DType,
        /// How they are combined (not mean).
        op: ReduceOp,
    },
    /// Nobody leaves before everybody has come.
    Barrier,
    /// A message to one rank. Messages between two ranks with the same tag arrive in the order they
    /// were sent.
    Send {
        /// The receiver.
        to: Rank,
        /// Which stream of messages this belongs to.
        tag: Tag,
        /// Elements of the message.
        count: usize,
        /// Their type.
        dtype: DType,
    },
    /// A message from one rank. If it misses its deadline before anything has come, and no later
    /// one was posted, it does not count: the message goes to the next receive.
    Recv {
        /// The sender.
        from: Rank,
        /// Which stream of messages to take from.
        tag: Tag,
        /// Elements of the message: must be what the sender sends.
        count: usize,
        /// Their type.
        dtype: DType,
    },
    /// A message of bytes whose length the receiver does not know beforehand.
    SendParcel {
        /// The receiver.
        to: Rank,
        /// Which stream of messages this belongs to.
        tag: Tag,
        /// Bytes of the message.
        len: usize,
    },
    /// A message of bytes from one rank, of whatever length the sender chose.
    RecvParcel {
        /// The sender.
        from: Rank,
        /// Which stream of messages to take from.
        tag: Tag,
        /// Bytes that it may have at most.
        max: usize,
    },
    /// An all-reduce, reduce-scatter or all-gather of floats that travel through a codec: in rounds
    /// of parcels, one to and one from each other rank, with whatever the codec makes of them.
    Coded {
        /// The call as it would be without the codec. Its operator, if it has one, is sum or mean.
        call: Box<Call>,
        /// Names the codec; ranks that name different ones are out of step.
        codec: NonZeroU32,
        /// Parcels to each other rank, and from it.
        rounds: u32,
        /// Bytes of the longest parcel.
        max: usize,
    },
    /// A call whose input and output are one memory: the result overwrites the input, and there is
    /// no second copy. A call that fails half-way leaves the memory unspecified.
    ///
    /// A rank's block of a reduce-scatter's result, or of an all-gather's input, is at its place in
    /// the whole. See [`Plan::in_place`](crate::Plan::in_place).
    InPlace(Box<Call>),
}

impl Call {
    /// Which kind of operation this is.
    pub fn kind(&self) -> Kind {
        match self {
            Self::AllReduce { .. } => Kind::AllReduce,
            Self::ReduceScatter { .. } => Kind::ReduceScatter,
            Self::AllGather { .. } => Kind::AllGather,
            Self::Broadcast { .. } => Kind::Broadcast,
            Self::Reduce { .. } => Kind::Reduce,
            Self::Gather { .. } => Kind::Gather,
            Self::Scatter { .. } => Kind::Scatter,
            Self::AllToAll { .. } => Kind::AllToAll,
            Self::Scan { .. } => Kind::Scan,
            Self::ExclusiveScan { .. } => Kind::ExclusiveScan,
            Self::Barrier => Kind::Barrier,
            Self::Coded { call, .. } | Self::InPlace(call) => call.kind(),
            Self::Send { .. } | Self::Recv { .. } | Self::SendParcel { .. } | Self::RecvParcel { .. } => {
                Kind::Message
            }
        }
    }

    /// Whether it travels as parcels, whose length only their sender knows.
    pub(crate) fn is_parcels(&self) -> bool {
        matches!(self, Self::SendParcel { .. } | Self::RecvParcel { .. } | Self::Coded { .. })
    }
}

/// What a caller may set beside the call itself. All ranks must set the same.
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

/// The kinds of operation, as they appear in frame headers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Kind {
    /// [`Call::AllReduce`].
    AllReduce = 1,
    /// [`Call::ReduceScatter`].
    ReduceScatter = 2,
    /// [`Call::AllGather`].
    AllGather = 3,
    /// [`Call::Broadcast`].
    Broadcast = 4,
    /// [`Call::Reduce`].
    Reduce = 5,
    /// [`Call::Gather`].
    Gather = 6,
    /// [`Call::Scatter`].
    Scatter = 7,
    /// [`Call::AllToAll`].
    AllToAll = 8,
    /// [`Call::Scan`].
    Scan = 9,
    /// [`Call::ExclusiveScan`].
    ExclusiveScan = 10,
    /// [`Call::Barrier`].
    Barrier = 11,
    /// [`Call::Send`] and [`Call::Recv`], and their parcels.
    Message = 12,
}

impl Kind {
    /// Every kind.
    pub const ALL: [Self; 12] = [
        Self::AllReduce,
        Self::ReduceScatter,
        Self::AllGather,
        Self::Broadcast,
        Self::Reduce,
        Self::Gather,
        Self::Scatter,
        Self::AllToAll,
        Self::Scan,
        Self::ExclusiveScan,
        Self::Barrier,
        Self::Message,
    ];

    /// The name people type: `all_reduce`, `broadcast`, …
    pub const fn name(self) -> &'static str {
        match self {
            Self::AllReduce => "all_reduce",
            Self::ReduceScatter => "reduce_scatter",
            Self::AllGather => "all_gather",
            Self::Broadcast => "broadcast",
            Self::Reduce => "reduce",
            Self::Gather => "gather",
            Self::Scatter => "scatter",
            Self::AllToAll => "all_to_all",
            Self::Scan => "scan",
            Self::ExclusiveScan => "exclusive_scan",
            Self::Barrier => "barrier",
            Self::Message => "send_recv",
        }
    }

    /// The algorithms that a caller can ask for; the first is the plain one.
    pub fn algorithms(self) -> &'static [Algorithm] {
        match self {
            Self::AllReduce => &[Algorithm::TwoPhase, Algorithm::GatherReduce, Algorithm::Ring],
            Self::Reduce => {
                &[Algorithm::TwoPhase, Algorithm::GatherReduce, Algorithm::Tree, Algorithm::Chain]
            }
            Self::Broadcast => &[Algorithm::Tree, Algorithm::Chain],
            Self::Scan | Self::ExclusiveScan => &[Algorithm::Chain],
            Self::ReduceScatter
            | Self::AllGather
            | Self::Gather
            | Self::Scatter
            | Self::AllToAll
            | Self::Barrier
            | Self::Message => &[Algorithm::Direct],
        }
    }

    /// Whether an operation of this kind may travel this way: by what a caller can ask for, or as
    /// parcels.
    pub fn travels_by(self, algorithm: Algorithm) -> bool {
        self.algorithms().contains(&algorithm) || (algorithm == Algorithm::Parcels && self.takes_parcels())
    }

    fn takes_parcels(self) -> bool {
        matches!(self, Self::AllReduce | Self::ReduceScatter | Self::AllGather | Self::Message)
    }

    /// Whether the operation combines elements.
    pub fn reduces(self) -> bool {
        matches!(
            self,
            Self::AllReduce | Self::ReduceScatter | Self::Reduce | Self::Scan | Self::ExclusiveScan
        )
    }

    /// Whether one rank plays a special part.
    pub fn has_root(self) -> bool {
        matches!(self, Self::Broadcast | Self::Reduce | Self::Gather | Self::Scatter)
    }

    /// The kind with this wire code.
    pub fn from_code(code: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| *kind as u8 == code)
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Kind {
    type Err = UnknownName;

    fn from_str(name: &str) -> Result<Self, UnknownName> {
        Self::ALL
            .into_iter()
            .find(|kind| kind.name() == name)
            .ok_or_else(|| UnknownName::new("operation", name, &Self::ALL.map(Self::name)))
    }
}

/// How an operation moves its data. `TwoPhase`, `GatherReduce`, `Direct` and scans combine in rank
/// order; reductions by `Ring`, `Tree` and `Chain` in an order of their own, which does not depend
/// on the run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Algorithm {
    /// Scatter blocks to their owners, who combine them and send the result on: two rounds, least
    /// volume.
    TwoPhase = 1,
    /// Send everything to whoever needs the result, who combines it: one round, for small vectors.
    GatherReduce = 2,
    /// Around the ring, twice: least volume over two flows per rank.
    Ring = 3,
    /// Along a binomial tree: few rounds.
    Tree = 4,
    /// From rank to rank, segment by segment: each rank passes the vector on once.
    Chain = 5,
    /// Straight from source to destination: one round.
    Direct = 6,
    /// In parcels, whose length only their sender knows. No caller asks for it: some calls come
    /// with it.
    Parcels = 7,
}

impl Algorithm {
    /// Every algorithm.
    pub const ALL: [Self; 7] = [
        Self::TwoPhase,
        Self::GatherReduce,
        Self::Ring,
        Self::Tree,
        Self::Chain,
        Self::Direct,
        Self::Parcels,
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
        /// What the rank was given as.
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
    /// All-to-all where a rank would send itself something else than it expects from itself.
    #[error("all_to_all sends {send} elements from this rank to itself but expects {recv}; make them equal")]
    SelfBlock {
        /// Elements it would send.
        send: usize,
        /// Elements it would receive.
        recv: usize,
    },
    /// The mean of integers.
    #[error("mean of {0} would drop the remainder; use sum and divide, or convert to a float type first")]
    IntegerMean(DType),
    /// The mean in a scan.
    #[error("{0} does not take mean, whose divisor would differ from rank to rank; use sum and divide")]
    ScanMean(Kind),
    /// A call that no codec can serve.
    #[error(
        "a codec that drops or rounds elements cannot serve {what}; use all_reduce, reduce_scatter or all_gather of floats, with sum or mean, \
         or call it without a codec"
    )]
    NotCodable {
        /// What it was.
        what: String,
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
    #[error("{kind} by {algorithm} cannot work in place; {}", instead(*kind))]
    NotInPlace {
        /// The operation.
        kind: Kind,
        /// The algorithm asked for.
        algorithm: Algorithm,
    },
    /// A vector whose size in bytes does not fit the address space, or that would take more than
    /// 2³² − 1 frames.
    #[error("{kind} of this size needs too many bytes or frames; use fewer elements or larger segments")]
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

/// What to do where an algorithm cannot work in place.
fn instead(kind: Kind) -> &'static str {
    match kind {
        Kind::AllReduce => "use two-phase or ring",
        _ => "make the call that leaves its input as it is",
    }
}

fn names(algorithms: &[Algorithm]) -> String {
    algorithms.iter().map(|a| a.name()).collect::<Vec<_>>().join(", ")
}
