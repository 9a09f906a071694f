//! Errors as Python exceptions: a class of `farwire._errors`, a text that says what to do, and the
//! rank at fault.

use farwire::{CodingError, Error, Fault};
use pyo3::prelude::*;

/// Why an operation has no result. It can be raised more than once.
#[derive(Clone, Debug)]
pub(crate) struct Failure {
    class: &'static str,
    message: String,
    /// The rank at fault, numbered in the communicator of the call.
    rank: Option<usize>,
    /// Its number among all processes.
    world_rank: Option<usize>,
}

impl Failure {
    /// A call that makes no sense.
    pub(crate) fn call(message: impl Into<String>) -> Self {
        Self::new("CallError", message)
    }

    pub(crate) fn new(class: &'static str, message: impl Into<String>) -> Self {
        Self { class, message: message.into(), rank: None, world_rank: None }
    }

    /// The same, with a possible cause in front.
    pub(crate) fn after(mut self, cause: &str) -> Self {
        self.message = format!("{cause}: {}", self.message);
        self
    }

    /// A NaN or an infinity, found in a result.
    pub(crate) fn not_finite(message: String) -> Self {
        Self::new("NotFinite", message)
    }

    /// Whether the cause is a NaN or an infinity, which all ranks see alike.
    pub(crate) fn is_not_finite(&self) -> bool {
        self.class == "NotFinite"
    }

    /// The exception.
    pub(crate) fn raise(&self, py: Python<'_>) -> PyErr {
        let made = || {
            let class = py.import("farwire._errors")?.getattr(self.class)?;
            class.call1((&self.message, self.rank, self.world_rank))
        };
        made().map_or_else(|error: PyErr| error, PyErr::from_value)
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        let class = match &error {
            Error::Call { .. }
            | Error::Order { .. }
            | Error::Subgroup { .. }
            | Error::Feedback { .. } => "CallError",
            Error::Env { .. } | Error::Token { .. } | Error::Join { .. } => "JoinError",
            Error::NotEncodable {
                error: CodingError::Codec { .. } | CodingError::Device { .. },
                ..
            } => "Error",
            Error::NotEncodable { .. } => "NotFinite",
            _ => match error.fault() {
                Some(Fault::PeerLost(_)) => "LostRank",
                Some(Fault::Desync(..)) => "Desync",
                Some(Fault::TimedOut { .. }) => "Timeout",
                _ => "Error",
            },
        };
        let (rank, world_rank) = match &error {
            Error::Failed { error, members: Some(members), .. } => {
                let peer = error.fault.peer();
                (members.iter().position(|member| *member == peer), Some(peer.0 as usize))
            }
            Error::Failed { error, members: None, .. } => {
                let rank = Some(error.fault.peer().0 as usize);
                (rank, rank)
            }
            Error::NotEncodable {
                error:
                    CodingError::NotFinite { rank, .. }
                    | CodingError::Overflow { rank, .. }
                    | CodingError::Codec { rank, .. }
                    | CodingError::Device { rank, .. },
                ..
            } => (Some(*rank), None),
            Error::Remote { rank, .. } | Error::Unanswered { rank, .. } => (Some(*rank), None),
            _ => (None, None),
        };
        Self { class, message: error.to_string(), rank, world_rank }
    }
}
