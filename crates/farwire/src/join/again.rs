//! A further connection between two processes that have met.
//!
//! The process that was called hands out a ticket over the connection they have. The caller, which
//! is known to get through, connects once more and shows it.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use farwire_proto::Peer;
use quinn::Connection;
use serde::{Deserialize, Serialize};
use tokio::sync::oneshot;
use tokio::time::{Instant, sleep, timeout_at};

use super::calling::Caller;
use super::rendezvous::{Answer, read, write};
use crate::tcp::port::TcpPort;

/// How two processes met, and how they meet again.
#[derive(Clone, Debug)]
pub(crate) struct Met {
    pub(crate) connection: Connection,
    /// Whether this process has called the other.
    pub(crate) called: bool,
    /// The other process, by its number in its certificate. The number may have changed since, or
    /// the process may have none yet.
    pub(crate) peer: Peer,
    pub(crate) again: Arc<Again>,
}

/// How this process meets others again.
#[derive(Debug)]
pub(crate) struct Again {
    caller: Arc<Caller>,
    expected: Arc<Expected>,
    /// When to give up.
    deadline: Instant,
}

/// The holders of tickets that this process has given out.
#[derive(Debug, Default)]
pub(super) struct Expected {
    holders: Mutex<HashMap<u64, Holder>>,
}

#[derive(Debug)]
struct Holder {
    peer: Peer,
    waiting: oneshot::Sender<Connection>,
}

/// What a caller says first on a further connection.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Ticket {
    ticket: u64,
    rank: u32,
}

/// How long to wait before a call that has failed is made again.
const RETRY: Duration = Duration::from_millis(100);

impl Again {
    pub(super) fn new(caller: Arc<Caller>, expected: Arc<Expected>) -> Self {
        let deadline = caller.deadline;
        Self { caller, expected, deadline }
    }

    /// The same, for a meeting that may take this long from now.
    pub(crate) fn within(&self, patience: Duration) -> Self {
        let (caller, expected) = (self.caller.clone(), self.expected.clone());
        Self { caller, expected, deadline: Instant::now() + patience }
    }

    /// This process, by its number in its certificate.
    pub(crate) fn me(&self) -> Peer {
        self.caller.rank()
    }

    /// How this process makes and takes connections over TCP.
    pub(crate) fn tcp(&self) -> &Arc<TcpPort> {
        &self.caller.tcp
    }

    /// Where the other side of a connection listens, or is.
    pub(crate) fn address_of(&self, connection: &Connection) -> SocketAddr {
        self.caller.tcp.tunnels().real(connection.remote_address())
    }

    /// Whether packets on a connection go over UDP, and not through a tunnel.
    pub(crate) fn is_over_udp(&self, connection: &Connection) -> bool {
        !self.caller.tcp.tunnels().lead_to(connection.remote_address())
    }

    /// A ticket for a peer, and the connection that it will be shown on.
    pub(crate) fn expect(
        &self,
        peer: Peer,
    ) -> Result<(u64, impl Future<Output = Result<Connection, String>> + use<>), String> {
        let mut random = [0; 8];
        aws_lc_rs::rand::fill(&mut random).map_err(|_| "no randomness")?;
        let ticket = u64::from_le_bytes(random);
        let (waiting, shown) = oneshot::channel();
        self.expected.holders().insert(ticket, Holder { peer, waiting });
        let (expected, deadline) = (self.expected.clone(), self.deadline);
        let connection = async move {
            let shown = timeout_at(deadline, shown).await;
            expected.holders().remove(&ticket);
            shown.ok().and_then(Result::ok).ok_or_else(|| format!("{peer} did not connect again"))
        };
        Ok((ticket, connection))
    }

    /// Connects once more to a peer that this process has called before.
    pub(crate) async fn call(
        &self,
        first: &Connection,
        peer: Peer,
        ticket: u64,
    ) -> Result<Connection, String> {
        let ticket = Ticket { ticket, rank: self.caller.rank().0 };
        let mut last = "no answer".to_owned();
        let calls = async {
            loop {
                match self.call_once(first, peer, &ticket).await {
                    Ok(connection) => return connection,
                    Err(reason) => last = reason,
                }
                sleep(RETRY).await;
            }
        };
        let called = timeout_at(self.deadline, calls).await;
        called.map_err(|_| format!("could not connect to {peer} again: {last}"))
    }

    async fn call_once(
        &self,
        first: &Connection,
        peer: Peer,
        ticket: &Ticket,
    ) -> Result<Connection, String> {
        let connection =
            self.caller.dial(&self.caller.identity.name_of(peer), first.remote_address()).await?;
        let (mut to, mut from) = connection.open_bi().await.map_err(|error| error.to_string())?;
        write(&mut to, ticket).await?;
        match read(&mut from).await? {
            Answer::Heard if self.caller.identity.is_of_this_job(&connection, peer) => {
                Ok(connection)
            }
            Answer::Heard => Err("its certificate is of another job".to_owned()),
            Answer::Refused(reason) => Err(reason),
            _ => Err("it answered something unexpected".to_owned()),
        }
    }
}

impl Expected {
    fn holders(&self) -> MutexGuard<'_, HashMap<u64, Holder>> {
        self.holders.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Who waits for the holder of a ticket, if the ticket was given to the rank that shows it.
    pub(super) fn take(&self, shown: &Ticket) -> Option<(Peer, oneshot::Sender<Connection>)> {
        let mut holders = self.holders();
        holders.get(&shown.ticket).filter(|holder| holder.peer.0 == shown.rank)?;
        holders.remove(&shown.ticket).map(|holder| (holder.peer, holder.waiting))
    }
}
