//! What can go wrong, as callers see it.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use farwire_codec::FeedbackError;
use farwire_codec::collective::{CodingError, OrderError};
use farwire_proto::{CallError, Element, Fault, OpError, OpenError, Peer};

use crate::driver::members::MembershipError;
use crate::join::env::EnvError;
use crate::join::rendezvous::JoinError;
use crate::memory::{Buffer, Memory};
use crate::sync::StateError;
use crate::token::TokenError;

/// Why an operation has no result.
///
/// Its `Debug` form is the same text, for that is what a `main` that returns it prints.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The call was wrong: it was not made, and nothing was sent. Ranks whose call was right wait
    /// for this rank's next.
    #[error("{error}")]
    Call {
        /// What is wrong with it.
        error: CallError,
        /// The input, as it was.
        input: Option<Box<Buffer>>,
    },
    /// The operation failed on its way. All ranks get an error.
    #[error("{}", failed(error, members.as_deref()))]
    Failed {
        /// Why. The ranks in it are ranks of the world.
        error: Box<OpError>,
        /// The ranks of the group, as ranks of the world, if it is not the world.
        members: Option<Arc<[Peer]>>,
        /// The input, as it was; if the operation worked in place, anything may be in it.
        input: Option<Box<Buffer>>,
    },
    /// A collective through a codec moved all its data, but a rank's input could not be encoded.
    /// All ranks get the same error, and no rank's residuals have changed.
    #[error("{error}")]
    NotEncodable {
        /// Whose input, and what is wrong with it.
        error: CodingError,
        /// The input, as it was.
        input: Option<Box<Buffer>>,
    },
    /// A collective through a codec was called in a way that is not possible; nothing was sent.
    #[error("{error}")]
    Order {
        /// What is wrong with the call.
        error: OrderError,
        /// The input, as it was.
        input: Option<Box<Buffer>>,
    },
    /// The residuals that a codec needs are not available.
    #[error("{error}")]
    Feedback {
        /// Why not.
        error: FeedbackError,
        /// The input, as it was.
        input: Option<Box<Buffer>>,
    },
    /// The list of a new group's members is wrong.
    #[error(transparent)]
    Subgroup {
        /// What is wrong with it.
        #[from]
        source: SubgroupError,
    },
    /// A communicator could not be made.
    #[error(transparent)]
    Open {
        /// Why.
        #[from]
        source: OpenError,
    },
    /// The environment does not say which place in the job this process has.
    #[error(transparent)]
    Env {
        /// What is wrong with it.
        #[from]
        source: EnvError,
    },
    /// `FARWIRE_TOKEN` does not hold a cluster token.
    #[error("FARWIRE_TOKEN is {error}")]
    Token {
        /// Why.
        error: TokenError,
    },
    /// The group could not be joined.
    #[error(transparent)]
    Join {
        /// Why.
        #[from]
        source: JoinError,
    },
    /// The group could not change as asked.
    #[error(transparent)]
    Membership {
        /// Why not.
        #[from]
        source: MembershipError,
    },
    /// This rank could not get the state that the others have.
    #[error(transparent)]
    State {
        /// Why not.
        #[from]
        source: StateError,
    },
    /// The rank that was called could not answer the call.
    #[error("rank {rank} could not answer the call `{name}`: {message}")]
    Remote {
        /// The rank that was called.
        rank: usize,
        /// The name that was called.
        name: String,
        /// What that rank said.
        message: String,
    },
    /// A call was not answered in time.
    #[error(
        "rank {rank} has not answered the call `{name}` within {after:?}; see whether it has registered a handler, or allow more time"
    )]
    Unanswered {
        /// The rank that was called.
        rank: usize,
        /// The name that was called.
        name: String,
        /// The time allowed.
        after: Duration,
    },
    /// Something is too long to be sent this way.
    #[error("a {what} of {len} bytes is longer than {limit}; send it in pieces, or as a message")]
    TooLong {
        /// What is too long.
        what: &'static str,
        /// Its length in bytes.
        len: usize,
        /// The most that is allowed.
        limit: usize,
    },
    /// The operating system refused something.
    #[error("{what}: {error}")]
    System {
        /// What was attempted.
        what: &'static str,
        /// What the system said.
        error: std::io::Error,
    },
}

fn failed(error: &OpError, members: Option<&[Peer]>) -> String {
    members.map_or_else(|| error.to_string(), |members| error.in_group(members).to_string())
}

/// Why a group of these ranks cannot be made. Ranks are numbered as in the group that it would be
/// part of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SubgroupError {
    /// A rank is not in that group.
    #[error("rank {rank} is not in this group of {size} ranks; use 0 to {}", size - 1)]
    NoSuchRank {
        /// The rank.
        rank: usize,
        /// How many there are.
        size: usize,
    },
    /// A rank is listed twice.
    #[error("rank {rank} is listed twice among the members of the new group; list each once")]
    Twice {
        /// The rank.
        rank: usize,
    },
    /// The rank that asks is not listed.
    #[error(
        "this is rank {rank}, which is not among the members of the new group; let only them make it"
    )]
    NotAMember {
        /// The rank.
        rank: usize,
    },
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl Error {
    /// What went wrong on the way, if the operation failed on its way.
    pub fn fault(&self) -> Option<&Fault> {
        match self {
            Self::Failed { error, .. } => Some(&error.fault),
            _ => None,
        }
    }

    /// Puts in the caller's input, where the operation worked on another vector.
    pub(crate) fn put_input(&mut self, was: Buffer) {
        if let Some(input) = self.input() {
            *input = Some(Box::new(was));
        }
    }

    /// Takes the vector that the operation was given, as it was; once. If the operation worked [in
    /// place](crate::Communicator::in_place) and had started, anything may be in it.
    pub fn take_input<T: Element>(&mut self) -> Option<Vec<T>> {
        let input = self.input()?;
        match input.take()?.into_vec() {
            Ok(vector) => Some(vector),
            Err(other) => {
                *input = Some(Box::new(other));
                None
            }
        }
    }

    /// Takes the memory that the operation was given, a vector or not, with its owner; once. See
    /// [`take_input`](Self::take_input) for what is in it.
    pub fn take_memory<T: Element>(&mut self) -> Option<Memory<T>> {
        self.input()?
            .take_if(|buffer| buffer.dtype() == T::DTYPE)
            .map(|buffer| Memory::from_buffer(*buffer))
    }

    fn input(&mut self) -> Option<&mut Option<Box<Buffer>>> {
        match self {
            Self::Call { input, .. }
            | Self::Failed { input, .. }
            | Self::NotEncodable { input, .. }
            | Self::Order { input, .. }
            | Self::Feedback { input, .. } => Some(input),
            _ => None,
        }
    }

    /// The same error, of a call on a group of these members.
    pub(crate) fn in_group(mut self, group: &Option<Arc<[Peer]>>) -> Self {
        if let Self::Failed { members, .. } = &mut self {
            members.clone_from(group);
        }
        self
    }

    /// The same error, with the vector that it is to give back.
    pub(crate) fn with_input(mut self, given: impl Into<Buffer>) -> Self {
        if let Some(input) = self.input() {
            *input = Some(Box::new(given.into()));
        }
        self
    }
}

impl From<CallError> for Error {
    fn from(error: CallError) -> Self {
        Self::Call { error, input: None }
    }
}

impl From<OrderError> for Error {
    fn from(error: OrderError) -> Self {
        Self::Order { error, input: None }
    }
}

impl From<FeedbackError> for Error {
    fn from(error: FeedbackError) -> Self {
        Self::Feedback { error, input: None }
    }
}
