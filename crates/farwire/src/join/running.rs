//! Joining a job that runs.
//!
//! 1. A process calls any member, by an address that it was given, and is told who is in the job.
//! 2. It calls all of them, and sets up a link to each. From then on each of them knows that it
//!    waits. It looks again now and then: others may have joined, or have left.
//! 3. At a step boundary the members [agree](farwire_proto::membership) to let it in, and one of them
//!    tells it.
//!
//! Until then it costs the job nothing. If it stalls or dies, the members drop a link.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use farwire_proto::Peer;
use farwire_proto::membership::MAX_MEMBERS;
use quinn::{ClientConfig, Endpoint};
use tokio::sync::mpsc;
use tokio::time::timeout;

use super::gathering::Newcomer;
use super::identity::Identity;
use super::refusals::Refusals;
use super::rendezvous::{
    Acquaintance, Answer, Book, Entrance, Hello, JoinError, NONSENSE, Purpose, Terms, listen, read,
    read_up_to, write,
};
use crate::quic::transport::Transport;

/// How long one call may take.
const CALL_TIMEOUT: Duration = Duration::from_secs(5);
/// Bytes of the longest book.
const MAX_BOOK: usize = 512 * MAX_MEMBERS + (16 << 10);

/// A process that wants to join.
pub(crate) struct Joiner {
    pub(crate) endpoint: Endpoint,
    client: ClientConfig,
    transport: Transport,
    identity: Arc<Identity>,
    hello: Hello,
}

/// A member that was called, and what it said.
pub(crate) struct Called {
    pub(crate) known: Acquaintance,
    pub(crate) book: Book,
}

impl Joiner {
    /// Listens, so that those who join later can call this process, too.
    pub(crate) fn new(
        terms: &Terms<'_>,
        identity: Arc<Identity>,
        transport: Transport,
    ) -> Result<Self, JoinError> {
        let (endpoint, server) = listen(terms, &identity)?;
        let address = terms.master;
        let port =
            endpoint.local_addr().map_err(|error| JoinError::Listen { address, error })?.port();
        let hello = Hello::new(terms, port, Purpose::Join)?;
        // Nobody comes by the door of a process that was not there at the start.
        let (door, _) = mpsc::channel(1);
        let entrance = Entrance {
            identity: identity.clone(),
            mine: hello.clone(),
            refusals: Arc::new(Refusals::default()),
            door,
            lobby: terms.lobby.clone(),
        };
        entrance.keep(endpoint.clone(), server, transport);
        let client = identity.client_config()?;
        Ok(Self { endpoint, client, transport, identity, hello })
    }

    /// What it calls itself.
    pub(crate) fn process(&self) -> u64 {
        self.hello.process
    }

    /// What others are told about it.
    pub(crate) fn member(&self) -> &super::rendezvous::Member {
        &self.hello.member
    }

    /// Calls a member, to set up a link with it or only to look.
    pub(crate) async fn call(
        &self,
        address: SocketAddr,
        purpose: Purpose,
    ) -> Result<Called, String> {
        timeout(CALL_TIMEOUT, self.try_call(address, purpose))
            .await
            .unwrap_or_else(|_| Err(format!("{address} did not answer")))
    }

    async fn try_call(&self, address: SocketAddr, purpose: Purpose) -> Result<Called, String> {
        let mut client = self.client.clone();
        client.transport_config(self.transport.to(address));
        let connecting = self.endpoint.connect_with(client, address, &self.identity.name_of_any());
        let connection = connecting
            .map_err(|error| error.to_string())?
            .await
            .map_err(|error| format!("{address}: {error}"))?;
        let (mut to, mut from) = connection.open_bi().await.map_err(|error| error.to_string())?;
        let mut hello = self.hello.clone();
        hello.purpose = purpose;
        write(&mut to, &hello).await?;
        match read(&mut from).await? {
            Answer::Heard => {}
            Answer::Refused(reason) => return Err(format!("{address} refused: {reason}")),
            _ => return Err(NONSENSE.to_owned()),
        }
        let mut book: Book = match read_up_to(&mut from, MAX_BOOK).await? {
            Answer::Book(book) => book,
            Answer::Refused(reason) => return Err(format!("{address} refused: {reason}")),
            _ => return Err(NONSENSE.to_owned()),
        };
        let here = book.entries.iter_mut().find(|entry| entry.number == book.here);
        let here = here.ok_or_else(|| NONSENSE.to_owned())?;
        here.address = Some(address);
        if !self.identity.is_of_this_job(&connection, Peer(here.member.rank)) {
            return Err(format!("{address}: its certificate is of another job"));
        }
        let member = here.member.clone();
        Ok(Called { known: Acquaintance { connection, to, from, member }, book })
    }
}

/// Tells one that has come who is in the job.
pub(crate) async fn show_book(newcomer: &mut Newcomer, book: Book) -> Result<(), String> {
    write(&mut newcomer.known.to, &Answer::Book(book)).await
}
