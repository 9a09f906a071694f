//! A collective through a codec, as rounds of parcels.
//!
//! In each round, every rank makes one parcel for every other rank and gets one from each. A
//! [`CodedCollective`] is one rank's part, without a network: its driver (the runtime or the
//! simulator) carries the parcels.
//!
//! | codec | all-reduce | rounds |
//! |---|---|---|
//! | in shards | shards to their owners; the owners' sums to everybody (`two_phase.rs`) | 2 per chunk |
//! | the same, on several hosts with several ranks | dense on each host, in shards between hosts (`two_level.rs`) | 4 per chunk |
//! | as factors | P summed, then Q, each as above (`low_rank.rs`) | 4 |
//! | whole | everybody's message to everybody (`all_to_all.rs`) | 1 |
//!
//! Each sum is made at one place, in rank order (between hosts, in host order), and every rank, the
//! owner included, decodes the same bytes. So every rank ends with the same bits, whatever arrives
//! first. Except with factors, a reduce-scatter is the first round of `two_phase.rs`; an all-gather
//! is the one round of `all_to_all.rs`.
//!
//! A parcel ends with a byte that says whether its sender could make it. A rank whose input holds a
//! NaN says so instead of sending a message, and still takes part in the rounds. So all ranks end
//! with the same error, and none has changed its residuals.

mod all_to_all;
mod floats;
mod low_rank;
mod order;
mod rounds;
mod two_level;
mod two_phase;
mod vectors;

use std::any::Any;
use std::num::{NonZeroU32, NonZeroUsize};
use std::ops::Range;

use bytes::Bytes;
use farwire_proto::{Call, Counts, DType, Partition, Placement, Rank, ReduceOp, WorldSize};

use crate::codec::Travel;
use crate::codecs::powersgd::Shape;
use crate::error::{DecodeError, EncodeError};
use crate::feedback::Owed;
use crate::job::{Context, Residual};
use crate::spec::CodecSpec;
use vectors::{HostCoding, HostVectors};

pub use floats::Floats;
pub use order::{CodingError, Collective, Nonsense, Order, OrderError, Task};
pub use vectors::{ChunkPlace, FactorVectors, LentVectors, MatrixPlace, StepError, Vectors};

/// One rank's part in a collective through a codec.
///
/// Call [`next_parcels`](Self::next_parcels) until it returns `None`, pass each complete round of
/// arrived parcels to [`came`](Self::came), in order, and ask again. After the last round, call
/// [`finish`](Self::finish).
#[derive(Debug)]
pub struct CodedCollective {
    call: Call,
    route: Route,
    common: Common,
    /// Rounds whose parcels were made, and rounds that have arrived.
    made: u32,
    came: u32,
}

/// The state that all routes share.
#[derive(Debug)]
struct Common {
    rank: Rank,
    world: WorldSize,
    vectors: Home,
    tensor: String,
    context: Context,
    /// Why this rank's device failed, if it did.
    device: Option<String>,
    /// The first thing that went wrong, in an order that all ranks agree on.
    trouble: Option<Trouble>,
}

/// Where the vectors are.
#[derive(Debug)]
enum Home {
    Host(Box<HostVectors>),
    Elsewhere(Box<dyn Vectors>),
}

impl Home {
    fn get(&mut self) -> &mut dyn Vectors {
        match self {
            Self::Host(vectors) => &mut **vectors,
            Self::Elsewhere(vectors) => &mut **vectors,
        }
    }

    /// The vectors, on a route that only vectors in host memory take.
    fn host(&mut self) -> &mut HostVectors {
        match self {
            Self::Host(vectors) => vectors,
            Self::Elsewhere(_) => unreachable!("other routes are refused before the first round"),
        }
    }

    fn abandon(self) -> Abandoned {
        match self {
            Self::Host(vectors) => Abandoned { input: vectors.input, owner: None },
            Self::Elsewhere(vectors) => {
                Abandoned { input: Floats::F32(Vec::new()), owner: Some(vectors.abandon()) }
            }
        }
    }
}

/// The closed set of ways to move coded data.
#[derive(Debug)]
enum Route {
    TwoPhase(two_phase::TwoPhase),
    TwoLevel(two_level::TwoLevel),
    AllToAll(all_to_all::AllToAll),
    LowRank(low_rank::LowRank),
}

/// The sealed messages that a rank sends in a round.
#[derive(Debug)]
enum Made {
    /// One per rank.
    Each(Vec<Bytes>),
    /// The same to everyone.
    Same(Bytes),
}

/// Makes a message a parcel: adds a final byte that says that all is well.
fn seal(mut message: Vec<u8>) -> Bytes {
    message.push(FINE);
    message.into()
}

/// The message in a [`seal`]ed parcel.
fn unseal(parcel: &Bytes) -> &[u8] {
    parcel.split_last().map_or(&[], |(_, message)| message)
}

/// Something that cannot be encoded. Of several, the smallest counts: all ranks hear of the same
/// ones, though not at the same time.
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
    /// Anything at all: the codec is at fault.
    Codec = 3,
    /// Anything at all: something failed where the vectors are.
    Device = 4,
}

const FINE: u8 = 0;

/// Stands in for a round while the other ranks do not know of the trouble.
const UNTOLD: u32 = u32::MAX;

impl Route {
    /// The call to plan for `task`, and its route.
    fn of(task: &Task, count: usize, dtype: DType) -> Result<(Call, Self), OrderError> {
        let Task { collective, codec, dimensions, rank, world, placement, .. } = task;
        let split = placement.as_ref().filter(|placement| placement.is_split());
        let (rank, world) = (*rank, *world);
        let (plain, ranges, op) = match *collective {
            Collective::AllReduce(op) => {
                (Call::AllReduce { count, dtype, op }, even(count, world), Some(op))
            }
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
        let route = match (codec.travels(), collective, split) {
            (Travel::Factors(_), Collective::AllGather(_), _) => {
                return Err(OrderError::CannotGather { codec: codec.name() });
            }
            (Travel::Factors(codec), ..) => {
                let fits = |d: &&[usize]| d.iter().product::<usize>() == count;
                let shape = Shape::of(dimensions.as_deref().filter(fits).unwrap_or(&[count]));
                let only = matches!(collective, Collective::ReduceScatter(_));
                let only = only.then(|| ranges[rank.index()].clone());
                let context = task.context;
                let matrix = MatrixPlace { codec, shape, context, world, mean, only };
                Self::LowRank(low_rank::LowRank::new(matrix))
            }
            (Travel::Shards(codec) | Travel::Whole(codec), Collective::AllGather(_), _) => {
                Self::AllToAll(all_to_all::AllToAll::gather(codec, ranges))
            }
            (Travel::Whole(codec), Collective::AllReduce(_), _) => {
                Self::AllToAll(all_to_all::AllToAll::sum(codec, count, mean))
            }
            (Travel::Shards(codec), Collective::AllReduce(_), Some(placement)) => {
                Self::TwoLevel(two_level::TwoLevel::new(codec, count, placement, mean))
            }
            (Travel::Shards(codec) | Travel::Whole(codec), ..) => {
                let gather = matches!(collective, Collective::AllReduce(_));
                Self::TwoPhase(two_phase::TwoPhase::new(codec, count, world, gather, mean))
            }
        };
        // One byte of status, or nine to report trouble.
        let max = 9 + route.longest();
        let hosts = matches!(route, Self::TwoLevel(_)).then_some(split).flatten();
        let codec = agreement(codec, task.context, hosts);
        let call = Call::Coded { call: Box::new(plain), codec, rounds: route.rounds(), max };
        Ok((call, route))
    }
}

impl CodedCollective {
    /// This rank's part in `order`; or why it cannot start, and its input back.
    pub fn new(order: Order) -> Result<Self, (OrderError, Floats)> {
        let Order {
            collective,
            codec,
            rank,
            world,
            placement,
            input,
            dimensions,
            tensor,
            feedback,
            context,
            threads,
            output,
        } = order;
        let task = Task { collective, codec, rank, world, placement, dimensions, tensor, context };
        let coding = HostCoding::new(feedback, threads);
        let host = Box::new(HostVectors { input, output, coding });
        match Route::of(&task, host.input.len(), host.input.dtype()) {
            Ok((call, route)) => Ok(Self::start(task, call, route, Home::Host(host))),
            Err(error) => Err((error, host.input)),
        }
    }

    /// This rank's part in an all-reduce of a vector that is not in host memory. Other ranks'
    /// vectors may be.
    pub fn elsewhere(task: Task, mut vectors: Box<dyn Vectors>) -> Result<Self, OrderError> {
        // Not every `Vectors` can add up on a host, so all of them take the flat route.
        let task = Task { placement: None, ..task };
        let (call, route) = Route::of(&task, vectors.len(), vectors.dtype())?;
        let knows_how = match &route {
            Route::TwoPhase(_) => true,
            Route::LowRank(_) => vectors.factors().is_some(),
            Route::AllToAll(_) | Route::TwoLevel(_) => false,
        };
        if knows_how && matches!(task.collective, Collective::AllReduce(_)) {
            Ok(Self::start(task, call, route, Home::Elsewhere(vectors)))
        } else {
            Err(OrderError::Elsewhere { codec: task.codec.name() })
        }
    }

    fn start(task: Task, call: Call, route: Route, mut vectors: Home) -> Self {
        let Task { collective, rank, world, tensor, context, .. } = task;
        let adds = !matches!(collective, Collective::AllGather(_));
        if let Some(feedback) = vectors.get().feedback_mut().filter(|_| adds) {
            feedback.own(&route.owned(rank));
        }
        let common = Common { rank, world, vectors, tensor, context, device: None, trouble: None };
        Self { call, route, common, made: 0, came: 0 }
    }

    /// The call to plan: it says how many rounds there are and how long a parcel can be.
    pub fn call(&self) -> &Call {
        &self.call
    }

    /// This rank.
    pub fn rank(&self) -> Rank {
        self.common.rank
    }

    /// Rounds that this rank has made parcels for.
    pub fn made(&self) -> u32 {
        self.made
    }

    /// Whether all rounds have arrived, so that it can be finished.
    pub fn is_finished(&self) -> bool {
        self.came == self.rounds() && self.made == self.rounds()
    }

    /// How many rounds there are.
    pub fn rounds(&self) -> u32 {
        self.route.rounds()
    }

    /// The parcels of the next round, one for each rank in order (this rank's own is empty), if
    /// they can be made from what has arrived.
    pub fn next_parcels(&mut self) -> Option<Vec<Bytes>> {
        let Self { route, common, made, .. } = self;
        if *made == route.rounds() {
            return None;
        }
        let world = common.world.len();
        let message = match route {
            Route::TwoPhase(route) => route.next(*made, common),
            Route::TwoLevel(route) => route.next(*made, common),
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

    /// Takes in a round of parcels, one from each rank in order; this rank's own is ignored.
    ///
    /// # Panics
    ///
    /// If this rank has not made its own parcels of that round.
    pub fn came(&mut self, round: u32, parcels: &[Vec<u8>]) -> Result<(), Nonsense> {
        assert!(
            round < self.made,
            "a rank makes its own part of a round before it hears the others'"
        );
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
                4 => Kind::Device,
                _ => return Err(nonsense(DecodeError::Field("status"))),
            };
            let element = <[u8; 8]>::try_from(message).map(u64::from_le_bytes);
            let element = element
                .map_err(|_| nonsense(DecodeError::Length { need: 9, given: parcel.len() }))?;
            let theirs = Trouble { round, rank: from, kind, element };
            common.trouble = Some(common.trouble.map_or(theirs, |known| known.min(theirs)));
        }
        if common.trouble.is_some() {
            return Ok(());
        }
        match route {
            Route::TwoPhase(route) => route.came(round, &messages, common),
            Route::TwoLevel(route) => route.came(round, &messages, common),
            Route::AllToAll(route) => route.came(round, &messages, common),
            Route::LowRank(route) => route.came(round, &messages, common),
        }
    }

    /// Commits the residuals and returns the result, in f32. Call it after the last round has
    /// arrived. The result of vectors elsewhere stays where they are, and what this returns is
    /// empty.
    pub fn finish(self) -> Result<Finished, (CodingError, Floats)> {
        let Common { rank: me, tensor, vectors, device, trouble, .. } = self.common;
        if let Some(Trouble { rank, kind, element, .. }) = trouble {
            let why = device.filter(|_| rank == me);
            let rank = rank.index();
            let error = match kind {
                Kind::Input => CodingError::NotFinite { rank, tensor, element },
                Kind::Sum => CodingError::Overflow { rank, tensor, element },
                Kind::Codec => CodingError::Codec { rank, tensor },
                Kind::Device => CodingError::Device { rank, tensor, why },
            };
            return Err((error, vectors.abandon().input));
        }
        match vectors {
            Home::Host(vectors) => {
                let HostVectors { input, output, coding } = *vectors;
                coding.finish();
                Ok(Finished { output, input })
            }
            Home::Elsewhere(vectors) => match vectors.finish() {
                Ok(()) => Ok(Finished { output: Vec::new(), input: Floats::F32(Vec::new()) }),
                Err(why) => {
                    let (rank, why) = (me.index(), Some(why));
                    let error = CodingError::Device { rank, tensor, why };
                    Err((error, Floats::F32(Vec::new())))
                }
            },
        }
    }

    /// Gives the operation up; residuals stay as they were.
    pub fn abandon(self) -> Abandoned {
        self.common.vectors.abandon()
    }
}

/// What is left of a [`CodedCollective`] that was given up.
#[derive(Debug)]
pub struct Abandoned {
    /// The input; empty if it is not in host memory.
    pub input: Floats,
    /// The owner of memory elsewhere, to be dropped where arbitrary code may run.
    pub owner: Option<Box<dyn Any + Send>>,
}

/// What a finished [`CodedCollective`] returns.
#[derive(Debug)]
pub struct Finished {
    /// The result.
    pub output: Vec<f32>,
    /// The input.
    pub input: Floats,
}

impl Route {
    fn rounds(&self) -> u32 {
        match self {
            Self::TwoPhase(route) => route.rounds(),
            Self::TwoLevel(route) => route.rounds(),
            Self::AllToAll(_) => 1,
            Self::LowRank(_) => low_rank::ROUNDS,
        }
    }

    /// The elements whose sum a rank encodes again, as their owner, in ascending ranges.
    fn owned(&self, rank: Rank) -> Vec<Range<usize>> {
        match self {
            Self::TwoPhase(route) => route.owned(rank),
            Self::TwoLevel(route) => route.owned(rank),
            Self::AllToAll(_) | Self::LowRank(_) => Vec::new(),
        }
    }

    /// Bytes of the longest message.
    fn longest(&self) -> usize {
        match self {
            Self::TwoPhase(route) => route.longest(),
            Self::TwoLevel(route) => route.longest(),
            Self::AllToAll(route) => route.longest(),
            Self::LowRank(route) => route.longest(),
        }
    }
}

impl Common {
    /// Records that this rank could not encode its part of a round. The error counts elements from
    /// `first`.
    fn fail_encode(&mut self, round: u32, error: EncodeError, kind: Kind, first: usize) -> Trouble {
        match error {
            EncodeError::NotFinite { index } => self.fail(round, kind, (first + index) as u64),
            EncodeError::TooLong { .. } | EncodeError::OwnMessage(_) => {
                self.fail(round, Kind::Codec, 0)
            }
        }
    }

    /// The same for vectors anywhere.
    fn fail_step(&mut self, round: u32, error: StepError, kind: Kind, first: usize) -> Trouble {
        match error {
            StepError::Encode(error) => self.fail_encode(round, error, kind, first),
            StepError::Decode { .. } => self.fail(round, Kind::Codec, 0),
            StepError::Device(why) => {
                self.device.get_or_insert(why);
                self.fail(round, Kind::Device, 0)
            }
        }
    }

    /// Handles the outcome of a round that arrived. If this rank's device failed, the others are
    /// not to blame: they are told in the next round, if there is one.
    fn understood(&mut self, round: u32, done: Result<(), StepError>) -> Result<(), Nonsense> {
        match done {
            Ok(()) => Ok(()),
            Err(StepError::Decode { from, why }) => Err(Nonsense { from, round, why }),
            Err(error) => {
                self.fail_step(UNTOLD, error, Kind::Sum, 0);
                Ok(())
            }
        }
    }

    /// What this rank sends in a round if there is trouble: its own report if the others do not
    /// know yet, or else an empty message.
    fn trouble_in(&mut self, round: u32) -> Option<Result<Made, Trouble>> {
        let Trouble { round: known, kind, element, .. } = self.trouble?;
        Some(match known {
            UNTOLD => Err(self.fail(round, kind, element)),
            _ => Ok(Made::Same(seal(Vec::new()))),
        })
    }

    fn fail(&mut self, round: u32, kind: Kind, element: u64) -> Trouble {
        let mine = Trouble { round, rank: self.rank, kind, element };
        self.trouble = Some(self.trouble.map_or(mine, |known| known.min(mine)));
        mine
    }
}

/// The residual for an encoder: owing nothing is not the same as having no error feedback.
fn residual(owed: Option<&Owed>) -> Residual<'_> {
    owed.map_or(Residual::Off, Owed::residual)
}

/// A 32-bit digest. By comparing it, ranks notice that they mean different codecs, tensors or
/// steps, or see different hosts.
fn agreement(
    codec: &CodecSpec,
    Context { seed, step, tensor }: Context,
    hosts: Option<&Placement>,
) -> NonZeroU32 {
    let mix =
        |hash: u64, word: u64| (hash ^ word).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(31);
    let known = hosts.map(|hosts| u64::from(hosts.digest()));
    let words = [seed, step, tensor].into_iter().chain(known);
    let mixed = words.fold(u64::from(codec.id().get()), mix);
    NonZeroU32::new((mixed ^ mixed >> 32) as u32).unwrap_or(NonZeroU32::MIN)
}

/// The shards of a vector, cut as evenly as possible.
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

/// Divides by the number of ranks, if a mean was asked for.
fn scale(values: &mut [f32], mean: bool, world: WorldSize) {
    if let Some(ranks) = divisor(mean, world) {
        values.iter_mut().for_each(|value| *value /= ranks);
    }
}

/// The number to divide a sum by, if it is to become a mean and there is more than one rank.
fn divisor(mean: bool, world: WorldSize) -> Option<f32> {
    (mean && world.get() > 1).then_some(world.get() as f32)
}
