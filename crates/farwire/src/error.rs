//! What can go wrong, as callers see it.

use std::fmt;
use std::time::Duration;

use farwire_codec::FeedbackError;
use farwire_codec::exchange::{ExchangeError, OrderError};
use farwire_proto::{CallError, Fault, OpError, OpenError};

use crate::buffer::{Buffer, Element};
use crate::join::env::EnvError;
use crate::join::rendezvous::JoinError;
use crate::token::TokenError;

/// Why an operation has no result.
///
/// Its `Debug` form is the same text, for that is what a `main` that returns it prints.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The call was wrong; nothing was sent.
    #[error(transparent)]
    Call {
        /// How.
        #[from]
        source: CallError,
    },
    /// The operation failed on its way. All ranks get an error.
    #[error("{source}")]
    Failed {
        /// Why.
        source: Box<OpError>,
        /// The input, as it was.
        input: Option<Buffer>,
    },
    /// A collective through a codec moved all its data, and somebody's could not be encoded. All ranks get the same error, and nobody's residuals have changed.
    #[error("{source}")]
    NotEncodable {
        /// Whose, and what.
        source: ExchangeError,
        /// The input, as it was.
        input: Option<Buffer>,
    },
    /// A collective through a codec was asked for in a way that cannot be; nothing was sent.
    #[error(transparent)]
    Order {
        /// How so.
        #[from]
        source: OrderError,
    },
    /// The residuals that a codec needs cannot be had.
    #[error(transparent)]
    Feedback {
        /// Why not.
        #[from]
        source: FeedbackError,
    },
    /// A communicator could not be made.
    #[error(transparent)]
    Open {
        /// Why.
        #[from]
        source: OpenError,
    },
    /// The environment does not say where this process stands.
    #[error(transparent)]
    Env {
        /// What is wrong with it.
        #[from]
        source: EnvError,
    },
    /// The token is none.
    #[error(transparent)]
    Token {
        /// Why.
        source: TokenError,
    },
    /// The group could not be joined.
    #[error(transparent)]
    Join {
        /// Why.
        #[from]
        source: JoinError,
    },
    /// The handler of a call, on the other rank, could not do it.
    #[error("rank {rank} could not answer the call `{name}`: {message}")]
    Remote {
        /// Who was called.
        rank: usize,
        /// What was called.
        name: String,
        /// What it said.
        message: String,
    },
    /// A call was not answered in time.
    #[error(
        "rank {rank} has not answered the call `{name}` within {after:?}; see whether it has registered a handler, or allow more time"
    )]
    Unanswered {
        /// Who was called.
        rank: usize,
        /// What was called.
        name: String,
        /// The time it had.
        after: Duration,
    },
    /// A request that is too long.
    #[error("a {what} of {len} bytes is longer than {limit}; send it in pieces, or as a message")]
    TooLong {
        /// What it is.
        what: &'static str,
        /// Its length in bytes.
        len: usize,
        /// What is allowed.
        limit: usize,
    },
    /// The operating system refused something.
    #[error("{what}: {source}")]
    System {
        /// What was attempted.
        what: &'static str,
        /// What it said.
        source: std::io::Error,
    },
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl Error {
    /// What went wrong on the way, if that is what happened.
    pub fn fault(&self) -> Option<&Fault> {
        match self {
            Self::Failed { source, .. } => Some(&source.fault),
            _ => None,
        }
    }

    /// Says what the input was, where the operation worked on another.
    pub(crate) fn put_input(&mut self, was: crate::buffer::Buffer) {
        if let Self::Failed { input, .. } = self {
            *input = Some(was);
        }
    }

    /// The input of the failed operation, as it was; once.
    pub fn take_input<T: Element>(&mut self) -> Option<Vec<T>> {
        match self {
            Self::Failed { input, .. } | Self::NotEncodable { input, .. } => input.take().and_then(T::unwrap),
            _ => None,
        }
    }
}
