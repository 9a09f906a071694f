//! A collective through a codec, as rounds of parcels.
//!
//! Each round, every rank makes one parcel for every other and gets one from each. An [`CodedCollective`] is one rank's part in it, without a network: whoever drives it (the runtime,
//! the simulator) carries the parcels.
//!
//! | codec | all-reduce | rounds |
//! |---|---|---|
//! | partitioned | shards to their owners; the owners' sums to everybody (`two_phase.rs`) | 2 per chunk |
//! | low rank | P summed, then Q, each as above (`low_rank.rs`) | 4 |
//! | a user's own | everybody's message to everybody (`all_to_all.rs`) | 1 |
//!
//! Sums are made in rank order at one place, and everyone, the owner included, decodes the same bytes: so every rank ends with the same bits, whatever arrives first. A reduce-scatter
//! is the first round of an all-reduce, an all-gather its second.
//!
//! A parcel ends with a byte that says whether its sender could make it. A rank whose input holds a NaN says so instead of sending a message, and still takes part in the rounds: so all
//! ranks end with the same error, and none has changed its residuals.

mod all_to_all;
mod low_rank;
mod two_phase;

use std::num::{NonZeroU32, NonZeroUsize};
use std::ops::Range;

use bytes::Bytes;
use farwire_proto::{Call, Counts, DType, Partition, Rank, ReduceOp, WorldSize};
use half::{bf16, f16};

use crate::codec::Travel;
use crate::codecs::powersgd::Shape;
use crate::error::{DecodeError, EncodeError};
use crate::feedback::{Owed, Transaction};
use crate::job::{Context, Residual, Values};
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

/// A vector of any float type.
#[derive(Clone, Debug, PartialEq)]
pub enum Floats {
    /// 32-bit floats.
    F32(Vec<f32>),
    /// 64-bit floats.
    F64(Vec<f64>),
    /// IEEE binary16.
    F16(Vec<f16>),
    /// bfloat16.
    Bf16(Vec<bf16>),
}

impl Floats {
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

    /// The element type.
    pub fn dtype(&self) -> DType {
        match self {
            Self::F32(_) => DType::F32,
            Self::F64(_) => DType::F64,
            Self::F16(_) => DType::F16,
            Self::Bf16(_) => DType::Bf16,
        }
    }

    /// Their bytes.
    pub fn into_bytes(self) -> Vec<u8> {
        match self {
            Self::F32(values) => bytemuck::cast_slice(&values).to_vec(),
            Self::F64(values) => bytemuck::cast_slice(&values).to_vec(),
            Self::F16(values) => bytemuck::cast_slice(&values).to_vec(),
            Self::Bf16(values) => bytemuck::cast_slice(&values).to_vec(),
        }
    }

    /// Adds to each element, and returns what rounding to 16 bits dropped: nothing from f32 and f64, where only the addition itself rounds, as it does in
    /// every codec. None, and nothing is changed, if a sum is not finite.
    pub(crate) fn add(&mut self, owed: &[f32]) -> Option<Vec<f32>> {
        macro_rules! add_16_bits {
            ($values:ident, $type:ty) => {{
                let sums = $values.iter().zip(owed).map(|(value, owed)| value.to_f32() + owed);
                let sums: Vec<f32> = sums.collect();
                let largest = <$type>::MAX.to_f32();
                let round = |(value, sum): (&mut $type, &f32)| {
                    *value = <$type>::from_f32(sum.clamp(-largest, largest));
                    sum - value.to_f32()
                };
                let finite = sums.iter().all(|sum| sum.is_finite());
                finite.then(|| $values.iter_mut().zip(&sums).map(round).collect())
            }};
        }
        macro_rules! add_whole {
            ($values:ident, $type:ty) => {{
                let finite =
                    $values.iter().zip(owed).all(|(value, o)| (value + <$type>::from(*o)).is_finite());
                finite.then(|| {
                    $values.iter_mut().zip(owed).for_each(|(value, owed)| *value += <$type>::from(*owed));
                    Vec::new()
                })
            }};
        }
        match self {
            Self::F32(values) => add_whole!(values, f32),
            Self::F64(values) => add_whole!(values, f64),
            Self::F16(values) => add_16_bits!(values, f16),
            Self::Bf16(values) => add_16_bits!(values, bf16),
        }
    }

    /// Some of the elements.
    fn values(&self, range: Range<usize>) -> Values<'_> {
        match self {
            Self::F32(values) => Values::F32(&values[range]),
            Self::F64(values) => Values::F64(&values[range]),
            Self::F16(values) => Values::F16(&values[range]),
            Self::Bf16(values) => Values::Bf16(&values[range]),
        }
    }
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
    #[error("{codec} counts elements in 32 bits; {given} are too many for one vector: cut it in two")]
    TooLong {
        /// The codec.
        codec: String,
        /// How many were given.
        given: usize,
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

/// One rank's part in a collective through a codec.
///
/// Call [`next_parcels`](Self::next_parcels) until it has nothing more to say, hand each round of parcels that has come whole to [`came`](Self::came), in order, and ask again; after the last,
/// [`finish`](Self::finish).
#[derive(Debug)]
pub struct CodedCollective {
    call: Call,
    route: Route,
    common: Common,
    /// Rounds that parcels were made for, and that have come.
    made: u32,
    came: u32,
}

/// What all routes work on.
#[derive(Debug)]
struct Common {
    rank: Rank,
    world: WorldSize,
    input: Floats,
    tensor: String,
    feedback: Option<Transaction>,
    context: Context,
    threads: NonZeroUsize,
    output: Vec<f32>,
    /// The first thing that went wrong, in an order that all ranks agree on.
    trouble: Option<Trouble>,
}

/// The closed set of ways to move coded data.
#[derive(Debug)]
enum Route {
    TwoPhase(two_phase::TwoPhase),
    AllToAll(all_to_all::AllToAll),
    LowRank(low_rank::LowRank),
}

/// What a rank gives the others in a round: sealed messages.
#[derive(Debug)]
enum Made {
    /// One per rank.
    Each(Vec<Bytes>),
    /// The same to everyone.
    Same(Bytes),
}

/// A message as a parcel, with a byte at its end that says that all is well.
fn seal(mut message: Vec<u8>) -> Bytes {
    message.push(FINE);
    message.into()
}

/// The message in a [`seal`]ed parcel.
fn unseal(parcel: &Bytes) -> &[u8] {
    parcel.split_last().map_or(&[], |(_, message)| message)
}

/// Something that cannot be encoded. Of several, the least counts: all ranks hear of the same ones, if not at the same time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Trouble {
    round: u32,
    rank: Rank,
    kind: Kind,
    element: u64,
}

/// What cannot be encoded. Its number is the last byte of a parcel; zero says that all is well.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u8)]
enum Kind {
    /// This rank's input.
    Input = 1,
    /// The sum of its shard.
    Sum = 2,
    /// Anything at all: the codec is wrong.
    Codec = 3,
}

const FINE: u8 = 0;

impl Route {
    /// The call to plan for `order`, and its rounds.
    fn of(order: &Order) -> Result<(Call, Self), OrderError> {
        let Order { collective, codec, input, dimensions, rank, world, .. } = order;
        let (rank, world) = (*rank, *world);
        let (count, dtype) = (input.len(), input.dtype());
        let (plain, ranges, op) = match *collective {
            Collective::AllReduce(op) => (Call::AllReduce { count, dtype, op }, even(count, world), Some(op)),
            Collective::ReduceScatter(op) => {
                (Call::ReduceScatter { count, dtype, op }, even(count, world), Some(op))
            }
            Collective::AllGather(ref counts) => {
                let need = counts.of(rank);
                if need != count {
                    return Err(OrderError::Length { need, given: count });
                }
                (Call::AllGather { counts: counts.clone(), dtype }, blocks(counts, world), None)
            }
        };
        let mean = op == Some(ReduceOp::Mean);
        let is_local = codec.messages().is_some_and(|codec| codec.is_local());
        if !is_local && u32::try_from(count).is_err() {
            return Err(OrderError::TooLong { codec: codec.name(), given: count });
        }
        let route = match (codec.travels(), collective) {
            (Travel::Factors(_), Collective::AllGather(_)) => {
                return Err(OrderError::CannotGather { codec: codec.name() });
            }
            (Travel::Factors(codec), _) => {
                let fits = |d: &&[usize]| d.iter().product::<usize>() == count;
                let shape = Shape::of(dimensions.as_deref().filter(fits).unwrap_or(&[count]));
                let only = matches!(collective, Collective::ReduceScatter(_));
                let only = only.then(|| ranges[rank.index()].clone());
                Self::LowRank(low_rank::LowRank::new(codec, shape, world, mean, only))
            }
            (Travel::Shards(codec) | Travel::Whole(codec), Collective::AllGather(_)) => {
                Self::AllToAll(all_to_all::AllToAll::gather(codec, ranges))
            }
            (Travel::Whole(codec), Collective::AllReduce(_)) => {
                Self::AllToAll(all_to_all::AllToAll::sum(codec, count, mean))
            }
            (Travel::Shards(codec) | Travel::Whole(codec), _) => {
                let gather = matches!(collective, Collective::AllReduce(_));
                Self::TwoPhase(two_phase::TwoPhase::new(codec, count, world, gather, mean))
            }
        };
        // A byte for how it went, or nine if it went badly.
        let max = 9 + route.longest();
        let codec = agreement(codec, order.context);
        let call = Call::Coded { call: Box::new(plain), codec, rounds: route.rounds(), max };
        Ok((call, route))
    }
}

impl CodedCollective {
    /// This rank's part in `order`; or why there can be none, and its input back.
    pub fn new(order: Order) -> Result<Self, (OrderError, Floats)> {
        let (call, route) = match Route::of(&order) {
            Ok(laid_out) => laid_out,
            Err(error) => return Err((error, order.input)),
        };
        let Order { collective, rank, world, input, tensor, mut feedback, context, threads, output, .. } =
            order;
        let adds = !matches!(collective, Collective::AllGather(_));
        if let Some(feedback) = feedback.as_mut().filter(|_| adds) {
            feedback.own(&route.owned(rank));
        }
        let common = Common { rank, world, input, tensor, feedback, context, threads, output, trouble: None };
        Ok(Self { call, route, common, made: 0, came: 0 })
    }

    /// The call to plan: its rounds, and how long a parcel can be.
    pub fn call(&self) -> &Call {
        &self.call
    }

    /// This rank.
    pub fn rank(&self) -> Rank {
        self.common.rank
    }

    /// Rounds that parcels were made for.
    pub fn made(&self) -> u32 {
        self.made
    }

    /// Whether all rounds have come, so that it can be finished.
    pub fn is_finished(&self) -> bool {
        self.came == self.rounds() && self.made == self.rounds()
    }

    /// How many rounds there are.
    pub fn rounds(&self) -> u32 {
        self.route.rounds()
    }

    /// The parcels of the next round, one for each rank in order (this rank's own is empty), if they can be made with what has come.
    pub fn next_parcels(&mut self) -> Option<Vec<Bytes>> {
        let Self { route, common, made, .. } = self;
        if *made == route.rounds() {
            return None;
        }
        let world = common.world.len();
        let message = match route {
            Route::TwoPhase(route) => route.next(*made, common),
            Route::AllToAll(route) => route.next(*made, common),
            Route::LowRank(route) => route.next(*made, common),
        }?;
        *made += 1;
        let mut parcels = match (message, common.trouble) {
            (Err(Trouble { kind, element, .. }), _) => {
                vec![Bytes::from([&element.to_le_bytes()[..], &[kind as u8]].concat()); world]
            }
            // Everyone knows; there is nothing more to say.
            (Ok(_), Some(_)) => vec![seal(Vec::new()); world],
            (Ok(Made::Same(parcel)), None) => vec![parcel; world],
            (Ok(Made::Each(parcels)), None) => parcels,
        };
        parcels[common.rank.index()].clear();
        Some(parcels)
    }

    /// A round of parcels has come, one from each rank in order; this rank's own does not count.
    ///
    /// # Panics
    ///
    /// If this rank's own of that round have not been made.
    pub fn came(&mut self, round: u32, parcels: &[Vec<u8>]) -> Result<(), Nonsense> {
        assert!(round < self.made, "a rank makes its own part of a round before it hears the others'");
        self.understand(round, parcels)?;
        self.came = round + 1;
        Ok(())
    }

    fn understand(&mut self, round: u32, parcels: &[Vec<u8>]) -> Result<(), Nonsense> {
        let Self { route, common, .. } = self;
        let mut messages = vec![&[][..]; common.world.len()];
        for from in common.world.others(common.rank) {
            let nonsense = |why| Nonsense { from, round, why };
            let parcel = &parcels[from.index()];
            let Some((kind, message)) = parcel.split_last() else {
                return Err(nonsense(DecodeError::Length { need: 1, given: 0 }));
            };
            let kind = match *kind {
                FINE => {
                    messages[from.index()] = message;
                    continue;
                }
                1 => Kind::Input,
                2 => Kind::Sum,
                3 => Kind::Codec,
                _ => return Err(nonsense(DecodeError::Field("status"))),
            };
            let element = <[u8; 8]>::try_from(message).map(u64::from_le_bytes);
            let element =
                element.map_err(|_| nonsense(DecodeError::Length { need: 9, given: parcel.len() }))?;
            let theirs = Trouble { round, rank: from, kind, element };
            common.trouble = Some(common.trouble.map_or(theirs, |known| known.min(theirs)));
        }
        if common.trouble.is_some() {
            return Ok(());
        }
        match route {
            Route::TwoPhase(route) => route.came(round, &messages, common),
            Route::AllToAll(route) => route.came(round, &messages, common),
            Route::LowRank(route) => route.came(round, &messages, common),
        }
    }

    /// The result, in f32; residuals are committed. Call it after the last round has come.
    pub fn finish(self) -> Result<Finished, (CodingError, Floats)> {
        let Common { tensor, feedback, output, input, trouble, .. } = self.common;
        match trouble {
            Some(Trouble { rank, kind, element, .. }) => {
                let rank = rank.index();
                let error = match kind {
                    Kind::Input => CodingError::NotFinite { rank, tensor, element },
                    Kind::Sum => CodingError::Overflow { rank, tensor, element },
                    Kind::Codec => CodingError::Codec { rank, tensor },
                };
                Err((error, input))
            }
            None => {
                if let Some(feedback) = feedback {
                    feedback.commit();
                }
                Ok(Finished { output, input })
            }
        }
    }

    /// Gives it up: residuals are as they were.
    pub fn abandon(self) -> Floats {
        self.common.input
    }
}

/// What an [`CodedCollective`] leaves.
#[derive(Debug)]
pub struct Finished {
    /// The result.
    pub output: Vec<f32>,
    /// What went in.
    pub input: Floats,
}

impl Route {
    fn rounds(&self) -> u32 {
        match self {
            Self::TwoPhase(route) => route.rounds(),
            Self::AllToAll(_) => 1,
            Self::LowRank(_) => low_rank::ROUNDS,
        }
    }

    /// The elements whose sum a rank encodes once more, in ascending ranges.
    fn owned(&self, rank: Rank) -> Vec<Range<usize>> {
        match self {
            Self::TwoPhase(route) => route.owned(rank),
            Self::AllToAll(_) | Self::LowRank(_) => Vec::new(),
        }
    }

    /// Bytes of the longest message.
    fn longest(&self) -> usize {
        match self {
            Self::TwoPhase(route) => route.longest(),
            Self::AllToAll(route) => route.longest(),
            Self::LowRank(route) => route.longest(),
        }
    }
}

impl Common {
    /// What this rank owes for some elements, as a worker.
    fn owed(&self, range: Range<usize>) -> Option<Owed> {
        self.feedback.as_ref().map(|feedback| feedback.worker(range))
    }

    /// A buffer for so many elements, with anything in it.
    fn buffer(&mut self, len: usize) -> Vec<f32> {
        self.feedback.as_mut().map(|feedback| feedback.buffer(len)).unwrap_or_default()
    }

    /// This rank could not encode what it had to in a round, counted from element `first`.
    fn stumbles(&mut self, round: u32, error: EncodeError, kind: Kind, first: usize) -> Trouble {
        let (kind, element) = match error {
            EncodeError::NotFinite { index } => (kind, (first + index) as u64),
            EncodeError::TooLong { .. } | EncodeError::OwnMessage(_) => (Kind::Codec, 0),
        };
        let mine = Trouble { round, rank: self.rank, kind, element };
        self.trouble = Some(self.trouble.map_or(mine, |known| known.min(mine)));
        mine
    }

    /// Zeros for `len` elements of result.
    fn clear_output(&mut self, len: usize) {
        self.output.clear();
        self.output.resize(len, 0.0);
    }
}

/// What an encoder takes: nothing owed is not the same as no error feedback.
fn residual(owed: Option<&Owed>) -> Residual<'_> {
    owed.map_or(Residual::Off, Owed::residual)
}

/// 32 bits by which ranks find out that they mean different codecs, tensors or steps.
fn agreement(codec: &CodecSpec, Context { seed, step, tensor }: Context) -> NonZeroU32 {
    let mix = |hash: u64, word: u64| (hash ^ word).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(31);
    let mixed = [seed, step, tensor].into_iter().fold(u64::from(codec.id().get()), mix);
    NonZeroU32::new((mixed ^ mixed >> 32) as u32).unwrap_or(NonZeroU32::MIN)
}

/// The shards of a vector, as evenly cut as possible.
fn even(len: usize, world: WorldSize) -> Vec<Range<usize>> {
    ranges(&Partition::even(len, world, NonZeroUsize::MAX), world)
}

fn blocks(counts: &Counts, world: WorldSize) -> Vec<Range<usize>> {
    ranges(&Partition::of_counts(counts, world, NonZeroUsize::MAX), world)
}

fn ranges(partition: &Partition, world: WorldSize) -> Vec<Range<usize>> {
    let block = |rank| partition.block(rank);
    world.ranks().map(|rank| block(rank).start..block(rank).end()).collect()
}

/// Divides by the number of ranks, if that is what was asked.
fn scale(values: &mut [f32], mean: bool, world: WorldSize) {
    if mean && world.get() > 1 {
        let ranks = world.get() as f32;
        values.iter_mut().for_each(|value| *value /= ranks);
    }
}
