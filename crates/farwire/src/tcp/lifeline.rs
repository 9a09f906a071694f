//! An idle TCP connection between two processes whose data goes over UDP.
//!
//! When a process ends, whatever the reason, its system closes its connections, and the other ends
//! hear of it at once. UDP has nothing of the kind: there, a process that was killed is silent, and
//! silence takes time to tell from a bad line. A connection that ends proves nothing, though:
//! firewalls end idle ones. So this side then only [asks](Health::suspect) the peer for a sign of
//! life, and gives it little time.

use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tokio::time::timeout;

use super::port::Expecting;
use super::tls::Secured;
use crate::join::again::Met;
use crate::quic::control::Health;

/// What one side tells the other so that one of them can connect.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Offer {
    /// For whoever connects to this side.
    ticket: u64,
    /// Whether it listens.
    listens: bool,
}

/// A lifeline that this side has offered.
#[derive(Debug)]
pub(crate) struct Lifeline {
    expecting: Expecting,
    listens: bool,
}

/// How long connecting may take, and round trips beyond that: joining waits for it.
const PATIENCE: Duration = Duration::from_secs(1);
const ROUND_TRIPS: u32 = 4;
/// How often to look whether the peer is lost anyway.
const LOOK: Duration = Duration::from_secs(1);

impl Lifeline {
    pub(crate) fn offer(met: &Met) -> Result<(Self, Offer), String> {
        let port = met.again.tcp();
        let (expecting, listens) = (port.expect(met.peer)?, port.listens().is_ok());
        let offer = Offer { ticket: expecting.ticket, listens };
        Ok((Self { expecting, listens }, offer))
    }

    /// Connects. Where TCP does not get through there is none.
    pub(crate) async fn tie(self, met: Met, theirs: Offer) -> Option<Tied> {
        let patience = PATIENCE + ROUND_TRIPS * met.connection.rtt();
        let connect = async {
            match met.called {
                // It listens at the same number as for UDP, which this side has called.
                true if theirs.listens => {
                    let (address, me) = (met.connection.remote_address(), met.again.me());
                    met.again.tcp().dial(address, me, met.peer, theirs.ticket, 0).await
                }
                false if self.listens => {
                    let connections = self.expecting.connections(1).await;
                    connections.and_then(|mut all| all.pop().ok_or_else(|| "none came".to_owned()))
                }
                _ => Err("the process that was called does not listen on TCP".to_owned()),
            }
        };
        let tied = timeout(patience, connect).await.unwrap_or_else(|_| Err("no answer".to_owned()));
        tied.map(Tied)
            .inspect_err(
                |why| tracing::debug!(peer = %met.peer, why, "no TCP connection beside QUIC"),
            )
            .ok()
    }
}

/// This side's end of a lifeline. The other side may have given up before it had its own, so nothing
/// follows from its end before the two have told each other.
#[derive(Debug)]
pub(crate) struct Tied(Secured);

impl Tied {
    /// The other side has its end, too: from now on, this one is watched.
    pub(crate) fn watch(self, health: Arc<Health>) {
        tokio::spawn(async move { watch(&self.0, &health).await });
    }
}

/// Until the connection ends, or the peer is lost.
async fn watch(Secured { socket, .. }: &Secured, health: &Health) {
    let mut nothing = [0; 64];
    while health.loss().is_none() {
        if timeout(LOOK, socket.readable()).await.is_err() {
            continue;
        }
        match socket.try_read(&mut nothing) {
            Ok(1..) => {} // whatever it says, it lives
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {}
            Ok(0) | Err(_) => return health.suspect(),
        }
    }
}
