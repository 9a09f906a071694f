//! What an engine and its driver say to each other: frames out, verdicts on frames in, events.

use crate::dtype::DType;
use crate::fault::{Fault, OpError};
use crate::fingerprint::Fingerprint;
use crate::header::{FAULT_LEN, FrameKind, Header};
use crate::ids::{CommId, OpId, OpSeq, Peer};
use crate::parcels::ParcelPart;
use crate::schedule::{Action, Gate, Source};

/// One direction of an operation between two peers: the stream that its frames arrive on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Lane {
    /// The sender.
    pub from: Peer,
    /// The communicator.
    pub comm: CommId,
    /// The operation on that communicator.
    pub seq: OpSeq,
}

impl Lane {
    /// The lane that a frame from `from` belongs to.
    pub fn of(from: Peer, header: &Header) -> Self {
        Self { from, comm: header.comm, seq: header.seq }
    }
}

/// A frame to send.
#[derive(Clone, Debug)]
pub struct Transmit {
    /// The receiver.
    pub to: Peer,
    /// Its header.
    pub header: Header,
    /// What follows the header.
    pub payload: Payload,
    /// Whether it is the last of its lane.
    pub last: bool,
    pub(super) lane: usize,
}

impl Transmit {
    /// If this tells a peer that a communicator has failed, or that a message was given up: the
    /// communicator, and the message. No more frames of it go to that peer.
    pub fn gives_up(&self) -> Option<(CommId, Option<OpSeq>)> {
        match self.header.frame {
            FrameKind::Abort => Some((self.header.comm, None)),
            FrameKind::Void => Some((self.header.comm, Some(self.header.seq))),
            FrameKind::Data | FrameKind::Ask | FrameKind::Called | FrameKind::Members => None,
        }
    }
}

/// What follows a header.
#[derive(Clone, Debug)]
pub enum Payload {
    /// Bytes of an operation's buffers: ask its workspace for them. Report them with
    /// [`Engine::handle_sent`](crate::Engine::handle_sent) once they may change.
    Operation {
        /// Which operation.
        op: OpId,
        /// Which of its bytes.
        source: Source,
        /// What this frame had to wait for.
        after: Gate,
    },
    /// Bytes of an operation's parcel, to be reported likewise.
    Parcel {
        /// Which operation.
        op: OpId,
        /// Which of its bytes.
        part: ParcelPart,
    },
    /// An encoded [`Fault`].
    Fault([u8; FAULT_LEN]),
    /// Nothing: the header says it all.
    Nothing,
}

impl Payload {
    /// The bytes of a notice; `None` if the bytes are an operation's.
    pub fn notice(&self) -> Option<&[u8]> {
        match self {
            Self::Operation { .. } | Self::Parcel { .. } => None,
            Self::Fault(fault) => Some(fault),
            Self::Nothing => Some(&[]),
        }
    }
}

/// What to do with an arrived frame.
#[derive(Clone, Debug)]
#[must_use]
pub enum Verdict {
    /// Read it and do this.
    Take(Take),
    /// Leave it in its stream, unread, until [`Engine::poll_resume`](crate::Engine::poll_resume)
    /// names the lane.
    Later,
    /// The same, and perhaps for long: this rank has not called its operation.
    Early,
    /// It belongs to nothing any more; throw it away.
    Drop,
}

/// A frame whose turn it is: apply the action, then report it with
/// [`Engine::handle_taken`](crate::Engine::handle_taken).
#[derive(Clone, Debug)]
#[must_use]
pub struct Take {
    /// The operation.
    pub op: OpId,
    /// What becomes of the payload.
    pub effect: Effect,
    pub(super) lane: usize,
}

/// What becomes of an arrived payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effect {
    /// A [`Workspace`](crate::Workspace) applies it to the operation's buffers.
    Apply(Action),
    /// It is added to its parcel.
    Collect(ParcelPart),
}

impl Effect {
    /// Bytes of the payload.
    pub fn wire_bytes(&self, dtype: DType) -> usize {
        match self {
            Self::Apply(action) => action.wire_bytes(dtype),
            Self::Collect(part) => part.len,
        }
    }
}

/// What became of an operation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// It is complete, and its result is where [`Plan::outcome`](crate::Plan::outcome) said.
    Done(OpId),
    /// A round of its parcels has come whole, from every rank.
    Round(OpId, u32),
    /// It failed; its input is untouched, unless it worked in place.
    Failed {
        /// Which.
        op: OpId,
        /// Why.
        error: Box<OpError>,
        /// The peers that it waited for just then.
        waited_for: Vec<Peer>,
    },
    /// A communicator is of no more use: every further call on it fails at once.
    CommFailed {
        /// Which.
        comm: CommId,
        /// Why.
        fault: Fault,
        /// The peer that found out.
        reporter: Peer,
    },
}

/// Whom an operation waits for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Wait {
    /// The operation.
    pub op: OpId,
    /// Its communicator.
    pub comm: CommId,
    /// Its place in the communicator's order.
    pub seq: OpSeq,
    /// What was called.
    pub fingerprint: Fingerprint,
    /// The peers that must move next: those not heard from at all if there are any, else those
    /// whose next frame has not come, else those that do not take what is sent.
    pub on: Vec<Peer>,
}

/// Why a communicator cannot be opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum OpenError {
    /// This process is not a member.
    #[error(
        "this process is not among the members of the new communicator; open it on its members only"
    )]
    NotAMember,
    /// A member is listed twice.
    #[error("{0} is listed twice among the members of the new communicator; list each member once")]
    Twice(Peer),
    /// The id is taken.
    #[error("communicator {0:?} is open already; use a new id for each communicator")]
    Taken(CommId),
}
