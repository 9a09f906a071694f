//! Calling a rank that listens.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use farwire_proto::Peer;
use quinn::{ClientConfig, Connection, Endpoint};
use tokio::time::{Instant, timeout, timeout_at};

use super::door;
use super::identity::Identity;
use super::rendezvous::{
    Acquaintance, Answer, Hello, JoinError, NONSENSE, OTHER_TOKEN, read, read_up_to, write,
};
use super::tunnel::Tunnels;
use crate::quic::transport::Transport;
use crate::tcp::port::TcpPort;

/// How long to wait for a peer to answer before asking again; twice as long each time, up to a
/// limit. A peer that is not there yet should be found soon; a slow one needs time.
const FIRST_RETRY: Duration = Duration::from_secs(3);
const MAX_RETRY: Duration = Duration::from_secs(12);
/// How long connecting a tunnel may take. UDP is not tried meanwhile.
const TUNNEL: Duration = Duration::from_millis(1500);
/// How long a process with another token may answer at a peer's address before that is an error.
const OTHER_JOB: Duration = Duration::from_secs(5);

/// A process that calls others.
#[derive(Debug)]
pub(super) struct Caller {
    pub(super) endpoint: Endpoint,
    pub(super) client: ClientConfig,
    pub(super) transport: Transport,
    pub(super) tcp: Arc<TcpPort>,
    pub(super) identity: Arc<Identity>,
    pub(super) hello: Hello,
    /// When to give up, and how long that is from the beginning.
    pub(super) deadline: Instant,
    pub(super) patience: Duration,
}

impl Caller {
    /// This process.
    pub(super) fn rank(&self) -> Peer {
        Peer(self.hello.member.rank)
    }

    /// Connects to a process whose certificate has this name. It may not let this process in yet.
    pub(super) async fn dial(&self, name: &str, address: SocketAddr) -> Result<Connection, String> {
        let mut client = self.client.clone();
        client.transport_config(self.transport.to(address));
        let connecting = self.endpoint.connect_with(client, address, name);
        let connecting = connecting.map_err(|error| error.to_string())?;
        connecting.await.map_err(|error| {
            if door::is_about_certificates(&error) {
                OTHER_TOKEN.to_owned()
            } else {
                error.to_string()
            }
        })
    }

    /// Connects to a peer and says hello, again and again until it is heard.
    pub(super) async fn connect(
        &self,
        peer: Peer,
        address: SocketAddr,
    ) -> Result<Acquaintance, JoinError> {
        let here = self.rank();
        let mut last = "no answer".to_owned();
        let mut patience = FIRST_RETRY;
        let begun = Instant::now();
        while Instant::now() < self.deadline {
            let name = self.identity.name_of(peer);
            let hello = self.say_hello(&self.hello, &name, address, patience);
            match timeout_at(self.deadline, hello).await {
                Ok(Ok((there, Answer::Heard))) => {
                    if self.identity.is_of_this_job(&there.connection, peer) {
                        return Ok(there);
                    }
                    let reason = "its certificate is of another job".to_owned();
                    return Err(JoinError::Lost { peer, reason });
                }
                Ok(Ok((_, Answer::Refused(reason)))) => {
                    return Err(JoinError::Refused { by: peer, here, reason });
                }
                Ok(Ok(_)) => return Err(JoinError::Lost { peer, reason: NONSENSE.to_owned() }),
                // An earlier job that is about to end may still be there.
                Ok(Err(reason)) if reason == OTHER_TOKEN && begun.elapsed() > OTHER_JOB => {
                    return Err(JoinError::Refused { by: peer, here, reason });
                }
                Ok(Err(reason)) => {
                    last = reason;
                    tokio::time::sleep(Duration::from_millis(100)).await;
                }
                Err(_) => {}
            }
            patience = (2 * patience).min(MAX_RETRY);
        }
        Err(JoinError::Unreachable { here, peer, address, waited: self.patience, last })
    }

    /// Connects, says hello, and waits for the answer.
    pub(super) async fn say_hello(
        &self,
        hello: &Hello,
        name: &str,
        address: SocketAddr,
        patience: Duration,
    ) -> Result<(Acquaintance, Answer), String> {
        let connection = self.reach(name, address, patience).await?;
        let (mut to, mut from) = connection.open_bi().await.map_err(|error| error.to_string())?;
        write(&mut to, hello).await?;
        // Only now is it known that the peer has let this process in: it may have had no place for
        // it, or found its certificate wrong.
        let answer = read(&mut from).await?;
        let member = self.hello.member.clone(); // until it says who it is
        Ok((Acquaintance { connection, to, from, member, called: true }, answer))
    }

    /// Connects over UDP; or through a [tunnel](super::tunnel), if nothing answers over UDP in
    /// time, but something does over TCP.
    async fn reach(
        &self,
        name: &str,
        address: SocketAddr,
        patience: Duration,
    ) -> Result<Connection, String> {
        let no_answer = |_| "no answer".to_owned();
        let first = timeout(patience, self.dial(name, address)).await.map_err(no_answer);
        let (Err(_), Ok(port)) = (&first, self.tcp.listens()) else { return first? };
        let tunnels = self.tcp.tunnels();
        if tunnels.lead_to(address) {
            return first?;
        }
        let passage = Tunnels::connect(self.tcp.local(), address, port);
        let Ok(Ok(passage)) = timeout(TUNNEL, passage).await else { return first? };
        // The peer is there. But it may not have been a moment ago, so UDP gets another chance.
        if let Ok(Ok(connection)) = timeout(patience / 2, self.dial(name, address)).await {
            return Ok(connection);
        }
        tunnels.clone().open_to(passage);
        timeout(patience, self.dial(name, address)).await.map_err(no_answer)?
    }

    /// Waits for what a peer that has heard the hello says when its turn comes, in up to `limit`
    /// bytes.
    pub(super) async fn answer(
        &self,
        peer: Peer,
        there: &mut Acquaintance,
        limit: usize,
    ) -> Result<Answer, JoinError> {
        let here = self.rank();
        loop {
            return match timeout_at(self.deadline, read_up_to(&mut there.from, limit)).await {
                // The peer wanted to know whether this process is still there.
                Ok(Ok(Answer::Heard)) => continue,
                Ok(Ok(Answer::Refused(reason))) => {
                    Err(JoinError::Refused { by: peer, here, reason })
                }
                Ok(Ok(answer)) => Ok(answer),
                Ok(Err(reason)) => Err(JoinError::Lost { peer, reason }),
                Err(_) => {
                    let reason =
                        format!("no answer within {:?}; other ranks may be missing", self.patience);
                    Err(JoinError::Lost { peer, reason })
                }
            };
        }
    }
}
