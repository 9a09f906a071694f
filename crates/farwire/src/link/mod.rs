//! What carries frames between two processes.
//!
//! A [`Link`] moves frames to and from one peer. A [`LinkKind`] sets such links up: it says which
//! pairs of processes it can serve, and talks to the peer until both sides have an end of the link
//! ([`negotiation`]). [`KINDS`] lists every kind; what names links (`FARWIRE_LINK`,
//! [`Builder::link`](crate::Builder::link), `--link`, `farwire doctor`, errors and `--help`) goes
//! through that list.
//!
//! To add a kind, write a module with its `LinkKind` and its `Link`, declare it here, and list it.

mod choice;
pub(crate) mod in_order;
pub(crate) mod negotiation;

use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use farwire_proto::{CommId, Header, Lane, OpSeq, Peer, Team};

use crate::doctor::Finding;
use crate::join::again::Met;
use crate::quic::congestion;
use crate::quic::control::Health;
use crate::quic::kind::{MOST, Quic};
use crate::shm::bell::Bell;
use crate::shm::kind::SharedMemory;
use crate::tcp::kind::Tcp;
pub use choice::{LinkChoice, UnknownLink, link_names};
use negotiation::Negotiation;

/// Every kind of link between processes. Where several can serve a pair, the first that suits it is
/// used: shared memory on one host, TCP between neighbours, QUIC over a distance.
static KINDS: &[&dyn LinkKind] = &[&SharedMemory, &Tcp, &Quic];

/// A way to link two processes.
pub(crate) trait LinkKind: Send + Sync + std::fmt::Debug {
    /// Its name, one word of the letters a to z: what users write, and what its links call themselves.
    fn name(&self) -> &'static str;
    /// What it is, in a sentence for `--help`.
    fn about(&self) -> &'static str;
    /// Whether it can serve this pair, as far as this side can tell without trying; else why not.
    fn serves(&self, pair: &Pair) -> Result<(), String>;
    /// Whether it is good for a pair that it serves, rather than only better than nothing.
    fn suits(&self, _pair: &Pair) -> bool {
        true
    }
    /// Called once, before links to so many peers are set up. An error ends the joining, so it
    /// should say what to do.
    fn prepare(&self, _peers: usize) -> Result<(), String> {
        Ok(())
    }
    /// Sets up a link. Both sides do this at the same time and may tell each other what they need
    /// to. The link is used only if both succeed; otherwise the next kind is tried.
    fn connect<'a>(
        &'a self,
        pair: &'a Pair,
        health: Arc<Health>,
        talk: &'a mut Negotiation<'_>,
    ) -> Boxed<'a, Result<Box<dyn Link>, String>>;
    /// Whether data passes through the network thread, which then wants a core of its own.
    fn uses_network_thread(&self) -> bool {
        true
    }
    /// Whether this process should listen on TCP for it.
    fn uses_tcp(&self) -> bool {
        false
    }
    /// What `farwire doctor` should say of this machine, as far as this kind depends on it.
    fn examine(&self) -> Vec<Finding> {
        Vec::new()
    }
}

/// A future behind a pointer, for traits whose implementation is chosen at run time.
pub(crate) type Boxed<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// Two processes that are to be linked, as one of them sees it.
#[derive(Debug)]
pub(crate) struct Pair {
    pub(crate) me: Peer,
    pub(crate) peer: Peer,
    /// The peer says that it runs on this host. (It may still be in another container.)
    pub(crate) same_host: bool,
    /// Bytes of the longest payload of a frame.
    pub(crate) payload: usize,
    /// To be rung when something has arrived, or there is room to send again.
    pub(crate) bell: Bell,
    /// How many connections the two may have, if their link needs any.
    pub(crate) connections: Wanted,
    /// How the two met, if it was over QUIC.
    pub(crate) met: Option<Met>,
}

impl Pair {
    /// Whether the way between the two is short, and so most likely clean and fast.
    pub(crate) fn is_near(&self) -> bool {
        let near = |met: &Met| congestion::is_near(&met.connection);
        self.same_host || self.met.as_ref().is_some_and(near)
    }
}

/// How many connections a link to one peer may have for each direction: `FARWIRE_CONNECTIONS`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Wanted {
    pub(crate) most: usize,
    /// Whether all are used, however little there is to send.
    pub(crate) all: bool,
}

impl Wanted {
    /// Exactly one.
    #[cfg(test)]
    pub(crate) const ONE: Self = Self { most: 1, all: true };

    /// What the variable's value means, if it is a number.
    pub(crate) fn parse(text: &str) -> Option<Option<Self>> {
        if text == "auto" {
            return Some(None);
        }
        let most = text.parse().ok().filter(|most| (1..=MOST).contains(most))?;
        Some(Some(Self { most, all: true }))
    }

    /// Between processes of one host, as many as it has cores for: each takes a thread that sends
    /// and one that receives, and ranks compute, too. Between hosts one: with more, a line of 1
    /// Gbit/s was a tenth slower, though that may have had another cause.
    pub(crate) fn auto(ranks_here: usize, world: usize) -> Self {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let each = if ranks_here < world { 1 } else { cores / (2 * ranks_here.max(1)) };
        Self { most: each.clamp(1, MOST), all: false }
    }
}

/// What `farwire doctor` should say of this machine, as far as links depend on it.
pub(crate) fn examine() -> impl Iterator<Item = Finding> {
    KINDS.iter().flat_map(|kind| kind.examine())
}

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
    fn set_aside(&mut self, _lane: &Lane) {}
    /// Nothing more comes on the lanes of an operation, or of a whole communicator: it has failed.
    fn abandon(&mut self, _comm: CommId, _seq: Option<OpSeq>) {}
    /// Tells the peer that there is something to see, if it has not been told yet: in time, or it
    /// sleeps on.
    fn ring(&mut self) {}
    /// The name of its kind.
    fn kind(&self) -> &'static str;
    /// Whether it crosses a network.
    fn crosses_network(&self) -> bool {
        true
    }
    /// Whether that network is short, so that a few frames fill it.
    fn is_near(&self) -> bool {
        false
    }
    /// That network, as far as it is known.
    fn path(&self) -> Option<NetworkPath> {
        None
    }
    /// Says goodbye: what was sent will still be read.
    fn close(&mut self);
    /// Gives the peer up, without a goodbye: it must not believe that this process has ended.
    fn give_up(&mut self);
    /// What is known of the peer, once [`poll_arrived`](Self::poll_arrived) has failed.
    fn loss(&self) -> Loss;
    /// Whether the peer's process is alive, as far as that can be watched when the link is gone.
    fn liveness(&self) -> Option<Arc<dyn Liveness>>;
    /// The peer, which had no number when the link was made, has this one. Nothing has arrived yet.
    fn set_peer(&mut self, from: Peer);
    /// These threads help with long copies, for a link that makes any.
    fn set_team(&mut self, _team: &'static dyn Team) {}
}

/// The way through a network to a peer, as this side knows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NetworkPath {
    /// How long an answer takes, lately.
    pub round_trip: Duration,
    /// Bytes that may be under way.
    pub window: u64,
    /// Bytes of the longest packet that gets through.
    pub mtu: u16,
    /// Packets sent so far.
    pub sent: u64,
    /// And how many of these were lost.
    pub lost: u64,
}

/// What is known of a peer that is lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Loss {
    /// It does not answer, or does not keep to the protocol.
    Unreachable,
    /// Its process has ended.
    Ended,
    /// And all that it ever sent has arrived.
    Complete,
}

/// Whether a peer that is another process is alive, which nothing in shared memory shows.
pub(crate) trait Liveness: Send + Sync + std::fmt::Debug {
    /// Why the peer is lost, if it is.
    fn loss(&self) -> Option<String>;
    /// Whether its process is known to have ended.
    fn ended(&self) -> bool;
    /// Says goodbye.
    fn leave(&self);
    /// Says nothing more, and listens no more.
    fn give_up(&self);
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
