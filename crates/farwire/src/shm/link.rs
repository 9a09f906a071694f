//! A link through shared memory.

use std::sync::Arc;

use farwire_proto::{Header, Lane, Peer, Team};

use super::bell::Bell;
use super::ring::{Receiver, Sender};
use crate::link::{Arrival, Broken, Link, Liveness, Loss};
use crate::local::INPROC;

/// The name of this kind of link between processes.
pub(super) const NAME: &str = "shm";

/// Bytes of a frame that takes longer to copy than it takes to tell the peer.
const LONG: usize = 16 << 10;

/// Two rings, one each way, and the peer's bell.
#[derive(Debug)]
pub(crate) struct SharedLink {
    sender: Sender,
    receiver: Receiver,
    bell: Bell,
    /// Whether the peer has yet to be told of what was done last.
    unrung: bool,
    /// Only for a peer that is another process.
    health: Option<Arc<dyn Liveness>>,
    /// Whether the peer has said goodbye, so that its end is no loss.
    closed: bool,
}

impl SharedLink {
    pub(crate) fn new(
        sender: Sender,
        receiver: Receiver,
        bell: Bell,
        health: Option<Arc<dyn Liveness>>,
    ) -> Self {
        Self { sender, receiver, bell, unrung: false, health, closed: false }
    }

    /// Notes that there is something for the peer to see. If it took long to make, the peer is told
    /// at once, so that it can begin; otherwise together with what follows.
    fn did(&mut self, bytes: usize) {
        self.unrung = true;
        if bytes >= LONG {
            self.ring();
        }
    }
}

impl Link for SharedLink {
    fn kind(&self) -> &'static str {
        if self.health.is_some() { NAME } else { INPROC }
    }

    fn crosses_network(&self) -> bool {
        false
    }

    fn send(&mut self, lane: Option<Lane>, header: &Header, payload: &[u8], _last: bool) -> bool {
        let went = self.sender.send(lane, header, payload);
        if went {
            self.did(payload.len());
        }
        went
    }

    fn poll_writable(&mut self) -> Result<Option<Lane>, Broken> {
        self.sender.poll_writable()
    }

    fn poll_arrived(&mut self) -> Result<Option<Arrival>, Broken> {
        // Asked first: if the peer is lost, everything that it sent before is in the ring by now.
        let loss = self.health.as_ref().and_then(|health| health.loss());
        match self.receiver.poll_arrived()? {
            Some(arrival) => {
                self.closed |= matches!(arrival, Arrival::Closed);
                Ok(Some(arrival))
            }
            None => match loss {
                Some(reason) if !self.closed => {
                    tracing::warn!(reason, "lost a peer");
                    Err(Broken("the peer is lost"))
                }
                _ if self.receiver.is_given_up() => Err(Broken("the peer has given this rank up")),
                _ => Ok(None),
            },
        }
    }

    fn head(&self, lane: &Lane) -> Option<(Header, &[u8])> {
        self.receiver.head(lane)
    }

    fn pop(&mut self, lane: &Lane) {
        let bytes = self.receiver.pop(lane);
        self.did(bytes); // the peer may wait for room
    }

    fn set_aside(&mut self, lane: &Lane) {
        self.unrung |= self.receiver.set_aside(lane);
    }

    fn ring(&mut self) {
        if std::mem::take(&mut self.unrung) {
            self.bell.ring();
        }
    }

    fn close(&mut self) {
        self.sender.close();
        if let Some(health) = &self.health {
            health.leave();
        }
        self.bell.ring();
    }

    fn give_up(&mut self) {
        self.sender.give_up();
        self.bell.ring();
        if let Some(health) = &self.health {
            health.give_up();
        }
    }

    fn loss(&self) -> Loss {
        let ended = self.health.as_ref().is_some_and(|health| health.ended());
        match (ended, self.receiver.is_given_up()) {
            (true, false) => Loss::Complete, // what it sent was in the ring before it ended
            (true, true) => Loss::Ended,
            (false, _) => Loss::Unreachable,
        }
    }

    fn liveness(&self) -> Option<Arc<dyn Liveness>> {
        self.health.clone()
    }

    fn set_peer(&mut self, from: Peer) {
        self.receiver.set_peer(from);
    }

    fn set_team(&mut self, team: &'static dyn Team) {
        self.sender.set_team(team);
    }
}
