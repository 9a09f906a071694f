//! A coded all-reduce without its bytes: how long its parcels are, what they wait for, and how long
//! a core works on them.
//!
//! The rounds are those of `farwire_codec::collective`, flat or in two levels, on ranks that are
//! spread evenly over hosts. There, shards differ by one element at most; here they are all equal.

use std::collections::VecDeque;
use std::time::Duration;

use farwire_codec::MessageCodec;
use farwire_proto::{Placement, Rank};

use crate::report::{JobEnd, JobId};

/// Elements of a chunk, and the bytes before each message in a parcel of several.
const CHUNK: usize = 1 << 22;
const LENGTH: usize = 8;
const F32: usize = 4;

/// How long one core needs for a byte of f32 gradient, in seconds.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct CodingSpeeds {
    /// To encode it, with error feedback.
    pub encode: f64,
    /// To decode it, and add it to a sum.
    pub decode: f64,
    /// To set it to zero before that, where a codec leaves elements out.
    pub fill: f64,
    /// The same in memory fresh from the system, such as that for the sum of a shard.
    pub fresh: f64,
    /// To add it as it is.
    pub add: f64,
}

/// One rank's part in a coded all-reduce.
#[derive(Clone, Debug)]
pub struct CodedModel {
    rounds: Vec<Round>,
}

#[derive(Clone, Debug)]
struct Round {
    /// Bytes of the parcel to each rank; zero to itself.
    lengths: Vec<usize>,
    /// The round whose parcels must have been taken in before; `None` if the input is enough.
    after: Option<usize>,
    /// Work to make its parcels, and to take in those of the others.
    make: Duration,
    take: Duration,
}

impl CodedModel {
    /// `rank`'s part in an all-reduce of `count` elements: in two levels if the placement has them
    /// and `two_level` asks for them.
    pub fn all_reduce(
        codec: &dyn MessageCodec,
        speeds: &CodingSpeeds,
        count: usize,
        rank: Rank,
        placement: &Placement,
        two_level: bool,
    ) -> Self {
        let chunks = if codec.is_local() { count.div_ceil(CHUNK).max(1) } else { 1 };
        let parts = Parts { codec, speeds, elements: count / chunks, rank, placement };
        let mut phases = if two_level && placement.is_split() {
            parts.two_level().to_vec()
        } else {
            parts.two_phase().to_vec()
        };
        phases.iter_mut().for_each(|phase| phase.lengths[rank.index()] = 0);
        let mut rounds: Vec<Round> = Vec::new();
        let mut made = vec![None; chunks];
        // At each step every chunk is one phase ahead of the next chunk.
        for step in 0..chunks + phases.len() - 1 {
            for (behind, phase) in phases.iter().enumerate() {
                let Some(chunk) = step.checked_sub(behind).filter(|chunk| *chunk < chunks) else {
                    continue;
                };
                let after = made[chunk].replace(rounds.len());
                rounds.push(Round { after, ..phase.clone() });
            }
        }
        Self { rounds }
    }

    /// The lengths of all parcels, by round and by rank.
    pub(crate) fn lengths(&self) -> VecDeque<Vec<usize>> {
        self.rounds.iter().map(|round| round.lengths.clone()).collect()
    }

    /// How many rounds there are.
    pub fn rounds(&self) -> u32 {
        self.rounds.len() as u32
    }

    /// Frames of at most `segment` bytes that this rank sends.
    pub fn frames(&self, segment: usize) -> u64 {
        let parcels = self.rounds.iter().flat_map(|round| &round.lengths);
        parcels.map(|bytes| bytes.div_ceil(segment) as u64).sum()
    }

    /// Bytes of the longest parcel.
    pub fn longest(&self) -> usize {
        self.rounds.iter().flat_map(|round| &round.lengths).copied().max().unwrap_or(0)
    }
}

/// A chunk of the vector, and what is needed to work out its rounds.
struct Parts<'a> {
    codec: &'a dyn MessageCodec,
    speeds: &'a CodingSpeeds,
    elements: usize,
    rank: Rank,
    placement: &'a Placement,
}

impl Parts<'_> {
    /// Shards to their owners, sums to every rank.
    fn two_phase(&self) -> [Round; 2] {
        let ranks = self.placement.world().len();
        let shard = self.elements / ranks;
        let lengths = vec![self.codec.expected_len(shard) + 1; ranks];
        let CodingSpeeds { encode, decode, fill, fresh, .. } = *self.speeds;
        let (whole, shard) = (self.elements as f64, shard as f64);
        let scatter = round(lengths.clone(), encode * whole, decode * whole + fresh * shard);
        [scatter, round(lengths, encode * shard, (decode + fill) * whole)]
    }

    /// Dense to the ranks that serve a column on each host, coded between hosts, and passed on
    /// within each.
    fn two_level(&self) -> [Round; 4] {
        let Self { placement, rank, .. } = *self;
        let (hosts, columns) = (placement.hosts(), placement.columns());
        let (column, cell) = (self.elements / columns, self.elements / columns / hosts);
        let message = self.codec.expected_len(cell) + LENGTH;
        let (here, served) = (placement.seat(rank).host, placement.columns_of(rank).count());
        let by_rank = |bytes: &dyn Fn(Rank) -> usize| -> Vec<usize> {
            placement.world().ranks().map(|to| bytes(to) + 1).collect()
        };
        let is_mate = |to: Rank| placement.seat(to).host == here && to != rank;
        let columns_of = |to| placement.columns_of(to).count();
        let to_mates = |to| if is_mate(to) { F32 * column * columns_of(to) } else { 0 };
        let to_others = |to| match placement.seat(to).host == here {
            true => 0,
            false => message * placement.shared_columns(rank, to).count(),
        };
        let passed_on = |to| if is_mate(to) { message * hosts * served } else { 0 };

        let CodingSpeeds { encode, decode, fill, fresh, add } = *self.speeds;
        let (whole, own) = (self.elements as f64, (column * served) as f64);
        let cells = (cell * served) as f64;
        let between = by_rank(&to_others);
        [
            round(by_rank(&to_mates), add * whole, add * own * placement.mates(rank) as f64),
            round(between.clone(), encode * own, decode * own + fresh * cells),
            round(between, encode * cells, (decode + fill) * own),
            round(by_rank(&passed_on), 0.0, (decode + fill) * (whole - own)),
        ]
    }
}

/// A round whose work is given as elements times seconds per byte.
fn round(lengths: Vec<usize>, make: f64, take: f64) -> Round {
    let time = |elements: f64| Duration::from_secs_f64(F32 as f64 * elements);
    Round { lengths, after: None, make: time(make), take: time(take) }
}

/// A process at work on a modelled call, one task at a time.
#[derive(Debug)]
pub(crate) struct Coder {
    model: CodedModel,
    /// Rounds made, arrived, and taken in.
    made: usize,
    came: usize,
    taken: usize,
    doing: Option<Task>,
    /// How its frames ended, once they have.
    pub(crate) ended: Option<(JobId, JobEnd)>,
    begun: bool,
}

/// What a coder does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Task {
    /// Makes the next round.
    Make,
    /// Takes in the next round that arrived.
    Take,
}

impl Coder {
    pub(crate) fn new(model: CodedModel) -> Self {
        Self { model, made: 0, came: 0, taken: 0, doing: None, ended: None, begun: false }
    }

    /// The machine wants coding: at first because the call was made, then because a round has
    /// arrived.
    pub(crate) fn wanted(&mut self) {
        self.came += usize::from(self.begun);
        self.begun = true;
    }

    /// Begins the next task, if there is one, and returns how long it takes.
    pub(crate) fn begin(&mut self) -> Option<Duration> {
        let rounds = &self.model.rounds;
        if self.doing.is_some() {
            return None;
        }
        let ready = |round: &Round| round.after.is_none_or(|after| after < self.taken);
        if let Some(round) = rounds.get(self.made).filter(|round| ready(round)) {
            self.doing = Some(Task::Make);
            return Some(round.make);
        }
        if self.taken < self.came.min(self.made) {
            self.doing = Some(Task::Take);
            return Some(rounds[self.taken].take);
        }
        None
    }

    /// Ends the task that it began.
    pub(crate) fn finish(&mut self) -> Option<Task> {
        let done = self.doing.take()?;
        match done {
            Task::Make => self.made += 1,
            Task::Take => self.taken += 1,
        }
        Some(done)
    }

    /// Whether nothing is left to do.
    pub(crate) fn is_done(&self) -> bool {
        self.taken == self.model.rounds.len()
    }
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroUsize;

    use farwire_codec::CodecSpec;
    use farwire_codec::collective::{CodedCollective, Collective, Floats, Order};
    use farwire_codec::{Context, ErrorFeedback};
    use farwire_proto::ReduceOp;

    use super::*;

    /// The parcels of a real collective are as long as the model says.
    #[test]
    fn the_model_has_the_rounds_and_lengths_of_the_collective() {
        let count = 3 << 20;
        for hosts in [[0, 1, 2, 3], [0, 0, 1, 1]] {
            let placement = Placement::new(&hosts).expect("four ranks");
            for name in ["int8", "topk:0.01", "randk:0.01"] {
                let codec: CodecSpec = name.parse().expect("a codec");
                let feedback = ErrorFeedback::new();
                let order = Order {
                    collective: Collective::AllReduce(ReduceOp::Sum),
                    codec: codec.clone(),
                    rank: Rank(1),
                    world: placement.world(),
                    placement: Some(placement.clone()),
                    input: Floats::F32((0..count).map(|i| (i as f32).sin()).collect()),
                    dimensions: None,
                    tensor: "w".to_owned(),
                    feedback: feedback.begin("w").ok(),
                    context: Context::default(),
                    threads: NonZeroUsize::MIN,
                    output: Vec::new(),
                };
                let mut real = CodedCollective::new(order).expect("a collective");
                let messages = codec.messages().expect("a codec of messages");
                let (rank, speeds) = (Rank(1), CodingSpeeds::default());
                let model =
                    CodedModel::all_reduce(&*messages, &speeds, count, rank, &placement, true);
                assert_eq!(model.rounds(), real.rounds(), "{name} on {hosts:?}");
                let parcels = real.next_parcels().expect("the first round");
                for to in placement.world().others(rank) {
                    let (is, said) =
                        (parcels[to.index()].len(), model.rounds[0].lengths[to.index()]);
                    let ratio = is as f64 / said as f64;
                    assert!(
                        (0.95..=1.05).contains(&ratio),
                        "{name} on {hosts:?}: {is}, not {said}"
                    );
                }
            }
        }
    }
}
