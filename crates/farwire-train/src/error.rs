//! Why training stopped, or did not start.

use crate::exchange::ExchangeError;
use crate::finite::NotFinite;
use crate::library::LibraryError;
use crate::mesh::MeshError;
use crate::parameter_list::ParameterListError;
use crate::schedule::ScheduleError;

/// Precedes an error that rank 0 has told the others.
pub const SAID: &str = "rank 0 says: ";

/// Why training stopped, or did not start.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TrainError {
    /// Settings that contradict each other.
    #[error("{0}")]
    Settings(String),
    /// The ranks do not form the mesh.
    #[error(transparent)]
    Mesh(#[from] MeshError),
    /// The pipeline cannot be scheduled.
    #[error(transparent)]
    Schedule(#[from] ScheduleError),
    /// Ranks have different models.
    #[error(transparent)]
    ParameterList(#[from] ParameterListError),
    /// Gradients were not exchanged.
    #[error(transparent)]
    Exchange(#[from] ExchangeError),
    /// A loss or a gradient is not finite. All ranks get the same error; no weight has moved.
    #[error(
        "step {}: {found}; no weight has moved: lower the learning rate, or skip such steps \
         (in `farwire train`: --on-nan skip)", step + 1
    )]
    NotFinite {
        /// Which step, from 0.
        step: usize,
        /// What, and where.
        found: NotFinite,
    },
    /// Too many steps in a row were skipped.
    #[error(
        "{steps} steps in a row were left out, up to step {}, since {found}; start again with a \
         lower learning rate, perhaps from the weights of an older checkpoint", step + 1
    )]
    TooManySkipped {
        /// How many steps.
        steps: usize,
        /// The last of them, from 0.
        step: usize,
        /// What was not finite in that step, and where.
        found: NotFinite,
    },
    /// An audit has found something wrong, which is a bug.
    #[error("audit after step {step}: {what}; this is a bug in farwire, or broken memory")]
    Audit {
        /// Steps done.
        step: usize,
        /// What is wrong.
        what: String,
    },
    /// An elastic job has lost every rank that had a certain share of the model.
    #[error(
        "no replica is whole any more, after step {step}: of the {shares} shares of the model \
         (tp × pp), nobody that is left has {}; go on from the last checkpoint",
        named(missing)
    )]
    NoReplica {
        /// The shares that are lost, from 0.
        missing: Vec<usize>,
        /// How many shares there are.
        shares: usize,
        /// Steps done.
        step: usize,
    },
    /// An elastic job has too few ranks to begin with.
    #[error("a replica needs {shares} ranks (tp × pp), but there are {ranks}; start more")]
    TooFewRanks {
        /// How many there are.
        ranks: usize,
        /// How many there must be.
        shares: usize,
    },
    /// An operation between ranks failed.
    #[error(transparent)]
    Farwire(#[from] farwire::Error),
    /// The tensor library failed.
    #[error(transparent)]
    Library(LibraryError),
    /// A parameter without a gradient would never learn.
    #[error(
        "parameter `{0}` got no gradient; some operation between it and the loss has no backward"
    )]
    NoGradient(String),
    /// A checkpoint could not be written or read.
    #[error("{path}: {error}")]
    Checkpoint {
        /// Where.
        path: String,
        /// Why.
        error: std::io::Error,
    },
    /// Rank 0 has failed, and has said why.
    #[error("{SAID}{0}")]
    Told(String),
    /// Weights or a checkpoint that cannot be read, or that belong to another job.
    #[error("{path}: {what}")]
    BadCheckpoint {
        /// Where.
        path: String,
        /// What is wrong with it, and what to do.
        what: String,
    },
}

fn named(shares: &[usize]) -> String {
    let shares: Vec<_> = shares.iter().map(|share| format!("share {share}")).collect();
    shares.join(", ")
}

/// Recovers an error that a library only passed on, such as one from its sink.
impl From<LibraryError> for TrainError {
    fn from(error: LibraryError) -> Self {
        error.downcast().map_or_else(Self::Library, |own| *own)
    }
}

impl TrainError {
    /// The error of a call between ranks, if that is the cause.
    fn of_group(&self) -> Option<&farwire::Error> {
        match self {
            Self::Farwire(error)
            | Self::Mesh(MeshError::Split { source: error })
            | Self::ParameterList(ParameterListError::Compare { source: error })
            | Self::Exchange(ExchangeError::Reduce { error, .. }) => Some(error),
            _ => None,
        }
    }
}

impl farwire::GroupFault for TrainError {
    fn is_group_fault(&self) -> bool {
        self.of_group().is_some_and(farwire::GroupFault::is_group_fault)
    }

    fn describe(&self) -> String {
        self.to_string()
    }
}
