//! Pipeline schedules: what each stage does, in order.
//!
//! A model is cut into *stages*, one per rank of the pipeline, and a batch into *micro-batches*. A
//! schedule is a pure function from (stages, rank, micro-batches) to a list of actions, which then
//! only has to be carried out. Sends do not wait for their receiver; receives wait for their
//! sender.
//!
//! With p stages that take equally long and m micro-batches, the share of time in which a rank has
//! nothing to do (the *bubble*) is at best:
//!
//! | schedule | bubble | micro-batches in flight on rank r |
//! |---|---|---|
//! | GPipe: all forward, then all backward | (p − 1) / (m + p − 1) | m |
//! | 1F1B: backward as soon as possible | (p − 1) / (m + p − 1) | p − r |
//! | interleaved 1F1B: v chunks of the model per rank | (p − 1) / (v·m + p − 1) | more than 1F1B |
//!
//! ```text
//!  1F1B, p = 3, m = 4                       F: forward, B: backward of a micro-batch
//!  rank 0  F0 F1 F2          B0 F3 B1    B2    B3
//!  rank 1     F0 F1       B0 F2 B1 F3 B2    B3
//!  rank 2        F0    B0 F1 B1 F2 B2 F3 B3
//! ```

use std::fmt;
use std::str::FromStr;

/// How micro-batches pass through a pipeline.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Schedule {
    /// All forward, then all backward.
    GPipe,
    /// One forward, one backward: a stage has at most as many micro-batches in flight as there are
    /// stages from it to the last.
    #[default]
    OneForwardOneBackward,
    /// The same with several chunks of the model on each rank: chunk c of rank r is stage c·p + r
    /// of the model. A shorter bubble, but more messages.
    Interleaved {
        /// Chunks per rank.
        chunks: usize,
    },
}

/// A direction through the model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Work {
    /// From input to output.
    Forward,
    /// And back.
    Backward,
}

/// A micro-batch in a chunk of the model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Unit {
    /// Which micro-batch.
    pub micro: usize,
    /// Which chunk of this rank; always 0 unless interleaved.
    pub chunk: usize,
}

/// What a rank does next.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Action {
    /// Wait for the unit's data: its input (forward), or the gradient of its output (backward).
    Recv(Work, Unit),
    /// Run the unit.
    Run(Work, Unit),
    /// Send the unit's result: its output (forward), or the gradient of its input (backward).
    Send(Work, Unit),
}

/// Why there can be no such schedule.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ScheduleError {
    /// Nothing to do.
    #[error("a pipeline needs at least one stage and one micro-batch")]
    Nothing,
    /// A rank outside the pipeline.
    #[error("rank {rank} is not in a pipeline of {stages} stages; ranks count from 0")]
    Rank {
        /// The rank.
        rank: usize,
        /// How many there are.
        stages: usize,
    },
    /// Too few stages or chunks to interleave.
    #[error("an interleaved schedule needs at least 2 stages and 1 chunk; use 1f1b")]
    TooSmall,
    /// Interleaving goes through the micro-batches in groups.
    #[error(
        "an interleaved schedule needs a multiple of {stages} micro-batches (one per stage), not {micro_batches}; use {}, or 1f1b",
        micro_batches.next_multiple_of(*stages)
    )]
    Groups {
        /// How many stages there are.
        stages: usize,
        /// How many micro-batches were asked for.
        micro_batches: usize,
    },
    /// Not the name of a schedule.
    #[error(
        "`{0}` is no schedule; use gpipe, 1f1b, or interleaved:2 (with the number of chunks per rank)"
    )]
    Name(String),
}

impl Schedule {
    /// Chunks of the model on each rank.
    pub fn chunks(self) -> usize {
        match self {
            Self::GPipe | Self::OneForwardOneBackward => 1,
            Self::Interleaved { chunks } => chunks,
        }
    }

    /// What a rank of the pipeline does, in order.
    pub fn actions(
        self,
        stages: usize,
        rank: usize,
        micro_batches: usize,
    ) -> Result<Vec<Action>, ScheduleError> {
        if stages == 0 || micro_batches == 0 {
            return Err(ScheduleError::Nothing);
        }
        if rank >= stages {
            return Err(ScheduleError::Rank { rank, stages });
        }
        let chunks = self.chunks();
        let total = micro_batches * chunks;
        // Forward units before forward and backward units alternate.
        let warm_up = match self {
            Self::GPipe => total,
            Self::OneForwardOneBackward => stages - rank - 1,
            Self::Interleaved { .. } if stages < 2 || chunks == 0 => {
                return Err(ScheduleError::TooSmall);
            }
            Self::Interleaved { .. } if !micro_batches.is_multiple_of(stages) => {
                return Err(ScheduleError::Groups { stages, micro_batches });
            }
            Self::Interleaved { .. } => (stages - rank - 1) * 2 + (chunks - 1) * stages,
        }
        .min(total);
        // Micro-batches go in groups of as many as there are stages; each group goes chunk by
        // chunk.
        let unit = |index: usize, work| {
            let group = index / (stages * chunks);
            let within = index % (stages * chunks);
            let chunk = within / stages;
            let chunk = if work == Work::Forward { chunk } else { chunks - 1 - chunk };
            Unit { micro: group * stages + within % stages, chunk }
        };
        let unit = |index, work| match self {
            Self::Interleaved { .. } => unit(index, work),
            _ => Unit { micro: index, chunk: 0 },
        };
        let order = (0..warm_up)
            .map(|index| (Work::Forward, index))
            .chain(
                (0..total - warm_up)
                    .flat_map(|index| [(Work::Forward, warm_up + index), (Work::Backward, index)]),
            )
            .chain((total - warm_up..total).map(|index| (Work::Backward, index)));
        let last = stages * chunks - 1;
        let actions = order.flat_map(|(work, index)| {
            let unit = unit(index, work);
            let stage = unit.chunk * stages + rank;
            let (starts, ends) = match work {
                Work::Forward => (stage == 0, stage == last),
                Work::Backward => (stage == last, stage == 0),
            };
            let receive = (!starts).then_some(Action::Recv(work, unit));
            let send = (!ends).then_some(Action::Send(work, unit));
            [receive, Some(Action::Run(work, unit)), send].into_iter().flatten()
        });
        Ok(actions.collect())
    }

    /// The share of time that a rank is idle if all stages take equally long and messages take no
    /// time.
    pub fn bubble(self, stages: usize, micro_batches: usize) -> f64 {
        let idle = stages.saturating_sub(1) as f64;
        idle / ((self.chunks() * micro_batches) as f64 + idle)
    }
}

impl fmt::Display for Schedule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::GPipe => f.write_str("gpipe"),
            Self::OneForwardOneBackward => f.write_str("1f1b"),
            Self::Interleaved { chunks } => write!(f, "interleaved:{chunks}"),
        }
    }
}

impl FromStr for Schedule {
    type Err = ScheduleError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "gpipe" => Ok(Self::GPipe),
            "1f1b" => Ok(Self::OneForwardOneBackward),
            "interleaved" => Ok(Self::Interleaved { chunks: 2 }),
            _ => {
                let chunks =
                    text.strip_prefix("interleaved:").and_then(|chunks| chunks.parse().ok());
                let chunks = chunks.filter(|chunks| (1..=1024).contains(chunks));
                chunks
                    .map(|chunks| Self::Interleaved { chunks })
                    .ok_or_else(|| ScheduleError::Name(text.to_owned()))
            }
        }
    }
}
