//! What carries frames between two processes.

use farwire_proto::{CommId, Header, Lane, OpSeq};

/// A connection to one peer. Frames of one lane stay in order; lanes do not hold each other up.
pub(crate) trait Link: Send + std::fmt::Debug {
    /// Takes a frame; `false` if its lane has to wait until [`poll_writable`](Self::poll_writable)
    /// names it. A notice belongs to no lane; it is tried again on the next turn. `last` says that
    /// nothing more comes on the lane.
    fn send(&mut self, lane: Option<Lane>, header: &Header, payload: &[u8], last: bool) -> bool;
    /// A lane that had to wait and may try again.
    fn poll_writable(&mut self) -> Result<Option<Lane>, Broken>;
    /// What has arrived next.
    fn poll_arrived(&mut self) -> Result<Option<Arrival>, Broken>;
    /// The next frame of a lane.
    fn head(&self, lane: &Lane) -> Option<(Header, &[u8])>;
    /// Done with the next frame of a lane.
    fn pop(&mut self, lane: &Lane);
    /// The frames of a lane may wait for long: if they take room that others need, they are moved.
    /// `true` if so.
    fn set_aside(&mut self, _lane: &Lane) -> bool {
        false
    }
    /// Nothing more comes on the lanes of an operation, or of a whole communicator: it has failed.
    fn abandon(&mut self, _comm: CommId, _seq: Option<OpSeq>) {}
    /// Tells the peer that there is something to see.
    fn ring(&self);
    /// What it is, in a word.
    fn kind(&self) -> &'static str;
    /// Says goodbye: what was sent will still be read.
    fn close(&mut self);
}

/// Whether a peer that is another process is alive, which nothing in shared memory shows.
pub(crate) trait Liveness: Send + Sync + std::fmt::Debug {
    /// Why the peer is lost, if it is.
    fn loss(&self) -> Option<String>;
    /// Says goodbye.
    fn leave(&self);
}

/// Something that arrived.
#[derive(Debug)]
pub(crate) enum Arrival {
    /// A frame, now last in its lane.
    Frame(Lane),
    /// A frame of any kind but data, which belongs to no lane.
    Notice(Header, Vec<u8>),
    /// The peer has gone, and everything it sent has arrived.
    Closed,
}

/// The other side does not keep to the protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the link is broken: {0}")]
pub(crate) struct Broken(pub(crate) &'static str);
