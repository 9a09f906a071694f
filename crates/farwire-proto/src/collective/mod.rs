//! The calls that can be made, and the [`Schedule`]s that serve them: pure functions, one file
//! each.
//!
//! A new kind of collective needs, in this file, a variant of [`Call`], a row of `kinds!`, and an
//! arm each in [`Call::kind`], [`Call::terms`] and [`Call::lay_out`]. If no schedule serves it yet,
//! it also needs a file beside this one, named in `schedules!`. Its result is defined by the
//! oracle, in `farwire-sim/src/kinds.rs`.

mod all_gather;
mod all_to_all;
mod barrier;
mod broadcast;
mod gather;
mod gather_reduce;
pub(crate) mod message;
mod rank_order;
mod ring;
mod scan;
mod scatter;
mod tree;
mod tree_reduce;
mod two_level;
mod two_phase;

use std::fmt;
use std::num::{NonZeroU32, NonZeroUsize};
use std::str::FromStr;

use crate::call::{Algorithm, CallError};
use crate::dtype::{DType, ReduceOp, UnknownName};
use crate::ids::{Rank, Tag, WorldSize};
use crate::parcels::Limits;
use crate::partition::{Counts, Partition};
use crate::placement::Placement;
use crate::plan::{Frames, Way};
use crate::schedule::Schedule;

use all_gather::AllGather;
use all_to_all::AllToAll;
use barrier::Barrier;
use broadcast::Broadcast;
use gather::Gather;
use gather_reduce::GatherReduce;
use message::{End, Message};
use ring::Ring;
use scan::Scan;
use scatter::Scatter;
use tree::{Shape, Tree};
use tree_reduce::TreeReduce;
use two_level::TwoLevel;
use two_phase::TwoPhase;

/// Slots of a pipeline that passes partial results on: one is being sent while the next is filled,
/// and two more to ride out jitter.
pub(crate) const PIPELINE_SLOTS: usize = 4;

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
    /// Each rank gets its block of the combination of everyone's vector, by an even [`Partition`].
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
        /// The rank that has it.
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
        /// The rank that gets the result.
        root: Rank,
    },
    /// The root gets everyone's block, in rank order.
    Gather {
        /// Elements that each rank contributes.
        counts: Counts,
        /// Their type.
        dtype: DType,
        /// The rank that gets them.
        root: Rank,
    },
    /// Each rank gets its block of the root's vector.
    Scatter {
        /// Elements that each rank receives.
        counts: Counts,
        /// Their type.
        dtype: DType,
        /// The rank that has the vector.
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
    /// No rank leaves before every rank has come.
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
    /// A message from one rank. A receive that misses its deadline before anything has come does
    /// not count: the message goes to the next receive.
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
        /// The most bytes that it may have.
        max: usize,
    },
    /// An all-reduce, reduce-scatter or all-gather of floats that travel through a codec, in rounds
    /// of parcels: each round, one to and one from each other rank, with whatever the codec makes
    /// of them.
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
    /// A call whose input and output are one memory: the result overwrites the input, without a
    /// second copy unless an all-reduce runs by gather-reduce. A call that fails half-way leaves
    /// the contents unspecified.
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
            Self::Send { .. }
            | Self::Recv { .. }
            | Self::SendParcel { .. }
            | Self::RecvParcel { .. } => Kind::Message,
        }
    }

    /// Whether it travels as parcels, whose length only their sender knows.
    pub(crate) fn is_parcels(&self) -> bool {
        matches!(self, Self::SendParcel { .. } | Self::RecvParcel { .. } | Self::Coded { .. })
    }

    /// What the fingerprint says of this call, or why the call makes no sense.
    pub(crate) fn terms(&self, me: Rank, world: WorldSize) -> Result<Terms, CallError> {
        let kind = self.kind();
        // No buffer may exceed what memory can address, in the widest type.
        let fits = |count: Option<usize>| {
            count
                .filter(|count| *count <= isize::MAX as usize / 8)
                .ok_or(CallError::TooLarge { kind })
        };
        let member = |what, rank| {
            if world.contains(rank) {
                Ok(Some(rank))
            } else {
                Err(CallError::NoSuchRank { what, rank, world })
            }
        };
        let total = |what, counts: &Counts| match counts {
            Counts::Listed(list) if list.len() != world.len() => {
                Err(CallError::CountsPerRank { what, given: list.len(), world })
            }
            counts => fits(counts.total(world)),
        };
        let vector = |count, dtype| -> Result<_, CallError> {
            Ok(Terms { count: fits(Some(count))?, dtype: Some(dtype), ..Terms::default() })
        };
        let blocks = |counts: &Counts, dtype| -> Result<_, CallError> {
            let count = total(kind.name(), counts)?;
            Ok(Terms { count, dtype: Some(dtype), layout: counts.digest(), ..Terms::default() })
        };
        let partner = |other| match member("message partner", other) {
            Ok(_) if other == me => Err(CallError::ToSelf(me)),
            checked => checked,
        };
        let terms = match *self {
            Self::AllReduce { count, dtype, op } | Self::ReduceScatter { count, dtype, op } => {
                Terms { op: Some(op), ..vector(count, dtype)? }
            }
            Self::Scan { op: ReduceOp::Mean, .. }
            | Self::ExclusiveScan { op: ReduceOp::Mean, .. } => {
                return Err(CallError::ScanMean(kind));
            }
            Self::Scan { count, dtype, op } | Self::ExclusiveScan { count, dtype, op } => {
                Terms { op: Some(op), ..vector(count, dtype)? }
            }
            Self::Reduce { count, dtype, op, root } => {
                Terms { op: Some(op), root: member("root", root)?, ..vector(count, dtype)? }
            }
            Self::Broadcast { count, dtype, root } => {
                Terms { root: member("root", root)?, ..vector(count, dtype)? }
            }
            Self::AllGather { ref counts, dtype } => blocks(counts, dtype)?,
            Self::Gather { ref counts, dtype, root }
            | Self::Scatter { ref counts, dtype, root } => {
                Terms { root: member("root", root)?, ..blocks(counts, dtype)? }
            }
            Self::AllToAll { ref send, ref recv, dtype } => {
                total("the received side of all_to_all", recv)?;
                let count = total("the sent side of all_to_all", send)?;
                if send.of(me) != recv.of(me) {
                    return Err(CallError::SelfBlock { send: send.of(me), recv: recv.of(me) });
                }
                vector(count, dtype)?
            }
            Self::Barrier => Terms::default(),
            Self::Send { to: other, count, dtype, .. }
            | Self::Recv { from: other, count, dtype, .. } => {
                partner(other)?;
                vector(count, dtype)?
            }
            Self::InPlace(ref call) => return call.terms(me, world),
            Self::Coded { ref call, codec, max, .. } => {
                let terms = call.terms(me, world)?;
                let codable = kind.takes_codec()
                    && !call.is_parcels()
                    && terms.dtype.is_some_and(DType::is_float)
                    && matches!(terms.op, None | Some(ReduceOp::Sum | ReduceOp::Mean));
                if !codable {
                    let op = terms.op.map_or(String::new(), |op| format!(" with {op}"));
                    let dtype = terms.dtype.map_or(String::new(), |dtype| format!(" of {dtype}"));
                    return Err(CallError::NotCodable { what: format!("{kind}{dtype}{op}") });
                }
                fits(Some(max))?;
                Terms { codec: codec.get(), ..terms }
            }
            Self::SendParcel { to: other, len: bytes, .. }
            | Self::RecvParcel { from: other, max: bytes, .. } => {
                partner(other)?;
                Terms { count: 0, ..vector(bytes, DType::U8)? }
            }
        };
        match (terms.dtype, terms.op) {
            (Some(dtype), Some(ReduceOp::Mean)) if !dtype.is_float() => {
                Err(CallError::IntegerMean(dtype))
            }
            _ => Ok(terms),
        }
    }

    /// Lays out a call that has [terms](Self::terms), by an algorithm that can run it.
    pub(crate) fn lay_out(
        &self,
        me: Rank,
        placement: &Placement,
        algorithm: Algorithm,
        segment: usize,
    ) -> Way {
        let world = placement.world();
        let segment =
            NonZeroUsize::new(segment).expect("segments are clamped to at least one element");
        let shards = |count| Partition::even(count, world, segment);
        let whole = |count| Partition::whole(count, segment);
        let blocks = |counts: &Counts| Partition::of_counts(counts, world, segment);
        let shape = if algorithm == Algorithm::Chain { Shape::Chain } else { Shape::Binomial };
        let tree = |root| Tree { shape, world, root, me };
        let two_phase =
            |count, gather| TwoPhase { me, world, shards: shards(count), gather }.into();
        let gather_reduce =
            |count, root| GatherReduce { me, world, vector: whole(count), root }.into();
        let scan = |count, exclusive| Scan { me, world, vector: whole(count), exclusive }.into();
        let parcels = |sends, recvs, max| Way::Parcels(Limits { sends, recvs, max, segment });

        let schedule: AnySchedule = match *self {
            Self::AllReduce { count, .. } => match algorithm {
                Algorithm::Ring => Ring { me, world, shards: shards(count) }.into(),
                Algorithm::GatherReduce => gather_reduce(count, None),
                Algorithm::TwoLevel if placement.is_split() => {
                    TwoLevel::new(me, placement, count, segment).into()
                }
                _ => two_phase(count, two_phase::Gather::All),
            },
            Self::Reduce { count, root, .. } => match algorithm {
                Algorithm::Tree | Algorithm::Chain => {
                    TreeReduce { tree: tree(root), vector: whole(count) }.into()
                }
                Algorithm::GatherReduce => gather_reduce(count, Some(root)),
                _ => two_phase(count, two_phase::Gather::Root(root)),
            },
            Self::ReduceScatter { count, .. } => two_phase(count, two_phase::Gather::Nobody),
            Self::Broadcast { count, root, .. } => {
                Broadcast { tree: tree(root), vector: whole(count) }.into()
            }
            Self::AllGather { ref counts, .. } => AllGather { me, blocks: blocks(counts) }.into(),
            Self::Gather { ref counts, root, .. } => {
                Gather { me, root, blocks: blocks(counts) }.into()
            }
            Self::Scatter { ref counts, root, .. } => {
                Scatter { me, root, blocks: blocks(counts) }.into()
            }
            Self::AllToAll { ref send, ref recv, .. } => {
                AllToAll { me, to: blocks(send), from: blocks(recv) }.into()
            }
            Self::Scan { count, .. } => scan(count, false),
            Self::ExclusiveScan { count, .. } => scan(count, true),
            Self::Barrier => Barrier.into(),
            Self::Send { count, .. } => Message { end: End::Sender, body: whole(count) }.into(),
            Self::Recv { count, .. } => Message { end: End::Receiver, body: whole(count) }.into(),
            Self::SendParcel { len, .. } => return parcels(1, 0, len),
            Self::RecvParcel { max, .. } => return parcels(0, 1, max),
            Self::Coded { rounds, max, .. } => return parcels(rounds, rounds, max),
            Self::InPlace(ref call) => {
                return call.lay_out(me, placement, algorithm, segment.get());
            }
        };
        Way::Frames(Frames(schedule))
    }
}

/// What a call that makes sense contributes to its fingerprint.
#[derive(Debug, Default)]
pub(crate) struct Terms {
    /// As in [`Fingerprint::count`](crate::Fingerprint::count).
    pub(crate) count: usize,
    pub(crate) dtype: Option<DType>,
    pub(crate) op: Option<ReduceOp>,
    pub(crate) root: Option<Rank>,
    pub(crate) codec: u32,
    pub(crate) layout: u32,
}

macro_rules! schedules {
    ($($schedule:ident),* $(,)?) => {
        /// The closed set of schedules.
        #[derive(Clone, Debug)]
        pub(crate) enum AnySchedule {
            $($schedule($schedule),)*
        }

        impl AnySchedule {
            pub(crate) fn get(&self) -> &dyn Schedule {
                match self {
                    $(Self::$schedule(schedule) => schedule,)*
                }
            }
        }

        $(impl From<$schedule> for AnySchedule {
            fn from(schedule: $schedule) -> Self {
                Self::$schedule(schedule)
            }
        })*
    };
}

schedules! {
    TwoPhase, TwoLevel, GatherReduce, Ring, Broadcast, TreeReduce, Scan, AllGather, Gather, Scatter, AllToAll,
    Barrier, Message,
}

/// What sets kinds apart. Most flags are `false`.
#[derive(Debug)]
struct Row {
    name: &'static str,
    algorithms: &'static [Algorithm],
    /// It combines elements.
    reduces: bool,
    /// One rank plays a special part.
    root: bool,
    /// Floats may go through a codec.
    codec: bool,
    /// Lengths are known only to the two ranks that exchange them.
    pairwise: bool,
    /// It moves no elements.
    empty: bool,
}

/// The kinds: code on the wire, name, the algorithms that can run it, and the flags of [`Row`] that
/// are set. Codes are never reused.
macro_rules! kinds {
    ($(
        $(#[$doc:meta])*
        $kind:ident = $code:literal $name:literal by [$($algorithm:ident),*] $($flag:ident)*;
    )*) => {
        /// The kinds of operation, as they appear in frame headers.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[repr(u8)]
        pub enum Kind {
            $($(#[$doc])* $kind = $code,)*
        }

        impl Kind {
            /// Every kind.
            pub const ALL: [Self; [$(Self::$kind),*].len()] = [$(Self::$kind),*];

            const fn row(self) -> &'static Row {
                const PLAIN: Row = Row {
                    name: "",
                    algorithms: &[],
                    reduces: false,
                    root: false,
                    codec: false,
                    pairwise: false,
                    empty: false,
                };
                match self {
                    $(Self::$kind => const {
                        &Row {
                            name: $name,
                            algorithms: &[$(Algorithm::$algorithm),*],
                            $($flag: true,)*
                            ..PLAIN
                        }
                    },)*
                }
            }
        }
    };
}

kinds! {
    /// [`Call::AllReduce`].
    AllReduce = 1 "all_reduce" by [TwoPhase, GatherReduce, Ring, TwoLevel] reduces codec;
    /// [`Call::ReduceScatter`].
    ReduceScatter = 2 "reduce_scatter" by [Direct] reduces codec;
    /// [`Call::AllGather`].
    AllGather = 3 "all_gather" by [Direct] codec;
    /// [`Call::Broadcast`].
    Broadcast = 4 "broadcast" by [Tree, Chain] root;
    /// [`Call::Reduce`].
    Reduce = 5 "reduce" by [TwoPhase, GatherReduce, Tree, Chain] reduces root;
    /// [`Call::Gather`].
    Gather = 6 "gather" by [Direct] root;
    /// [`Call::Scatter`].
    Scatter = 7 "scatter" by [Direct] root;
    /// [`Call::AllToAll`].
    AllToAll = 8 "all_to_all" by [Direct] pairwise;
    /// [`Call::Scan`].
    Scan = 9 "scan" by [Chain] reduces;
    /// [`Call::ExclusiveScan`].
    ExclusiveScan = 10 "exclusive_scan" by [Chain] reduces;
    /// [`Call::Barrier`].
    Barrier = 11 "barrier" by [Direct] empty;
    /// [`Call::Send`] and [`Call::Recv`], and the same with parcels.
    Message = 12 "send_recv" by [Direct];
}

impl Kind {
    /// The name people type: `all_reduce`, `broadcast`, …
    pub const fn name(self) -> &'static str {
        self.row().name
    }

    /// The algorithms that a caller can ask for; the first is the plain one.
    pub const fn algorithms(self) -> &'static [Algorithm] {
        self.row().algorithms
    }

    /// Whether an operation of this kind may travel this way: by an algorithm that a caller can ask
    /// for, or as parcels.
    pub fn travels_by(self, algorithm: Algorithm) -> bool {
        let parcels = self.takes_codec() || self == Self::Message;
        self.algorithms().contains(&algorithm) || (algorithm == Algorithm::Parcels && parcels)
    }

    /// Whether its elements, if they are floats, may travel through a codec.
    pub const fn takes_codec(self) -> bool {
        self.row().codec
    }

    /// Whether the operation combines elements.
    pub const fn reduces(self) -> bool {
        self.row().reduces
    }

    /// Whether one rank plays a special part.
    pub const fn has_root(self) -> bool {
        self.row().root
    }

    /// Whether it moves elements at all.
    pub const fn has_elements(self) -> bool {
        !self.row().empty
    }

    /// Whether lengths are known only to the two ranks that exchange them, and compared by them.
    pub(crate) const fn is_pairwise(self) -> bool {
        self.row().pairwise
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
