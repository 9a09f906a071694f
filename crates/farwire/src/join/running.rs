//! Joining a running job.
//!
//! 1. A process calls any member, by an address that it was given, and is told who is in the job.
//! 2. It calls all of them, and sets up a link to each. From then on each of them knows that it
//!    waits. It looks again now and then, since others may have joined or left.
//! 3. At a step boundary the members [agree](farwire_proto::membership) to let it in, and one of
//!    them tells it.
//!
//! Until then it costs the job nothing. If it stalls or dies, the members drop a link.

use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use farwire_proto::Peer;
use farwire_proto::membership::MAX_MEMBERS;
use quinn::Endpoint;
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::{Instant, timeout};

use super::again::{Again, Expected};
use super::calling::Caller;
use super::gathering::Newcomer;
use super::identity::Identity;
use super::refusals::Refusals;
use super::rendezvous::{
    Acquaintance, Answer, Book, Ears, Hello, JoinError, Listener, Member, NONSENSE, OTHER_TOKEN,
    Purpose, Terms, listen, read_up_to, write,
};
use crate::quic::transport::Transport;

/// How long one call may take.
const CALL_TIMEOUT: Duration = Duration::from_secs(5);
/// How much of that an answer may take before another way is tried.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(2);
/// Bytes of the longest book.
const MAX_BOOK: usize = 512 * MAX_MEMBERS + (16 << 10);

/// How long to wait for one member's answer before another is called, too.
const NEXT_CALL: Duration = Duration::from_millis(300);

/// A process that wants to join.
#[derive(Clone, Debug)]
pub(crate) struct Joiner {
    caller: Arc<Caller>,
    pub(crate) again: Arc<Again>,
}

/// A member that was called, and what it said.
pub(crate) struct Called {
    pub(crate) known: Acquaintance,
    pub(crate) book: Book,
}

/// Why a call came to nothing.
#[derive(Debug)]
pub(crate) enum CallError {
    /// A process of the job refused, and would again.
    Refused(SocketAddr, String),
    /// Anything else: another call may go better.
    Failed(String),
}

impl From<String> for CallError {
    fn from(reason: String) -> Self {
        Self::Failed(reason)
    }
}

impl fmt::Display for CallError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Refused(address, reason) => write!(f, "{address} refused: {reason}"),
            Self::Failed(reason) => f.write_str(reason),
        }
    }
}

impl Joiner {
    /// Listens, so that processes that join later can call this one, too.
    pub(crate) async fn new(
        terms: &Terms<'_>,
        identity: Arc<Identity>,
        transport: Transport,
    ) -> Result<Self, JoinError> {
        let deadline = Instant::now() + terms.timeout;
        let Ears { endpoint, server, tcp, .. } = listen(terms, &identity).await?;
        let hello = Hello::new(terms, Purpose::Join)?;
        // Nobody comes by the doors of a process that was not there at the start.
        let ((door, _), (side_door, _)) = (mpsc::channel(1), mpsc::channel(1));
        let expected = Arc::new(Expected::default());
        let listener = Listener {
            identity: identity.clone(),
            hello: hello.clone(),
            refusals: Arc::new(Refusals::default()),
            expected: expected.clone(),
            door,
            side_door,
            lobby: terms.lobby.clone(),
            agree_later: terms.agree_later.clone(),
        };
        listener.keep(endpoint.clone(), server, transport, tcp.tunnels().clone());
        let client = identity.client_config()?;
        let patience = terms.timeout;
        let caller =
            Caller { endpoint, client, transport, tcp, identity, hello, deadline, patience };
        let caller = Arc::new(caller);
        Ok(Self { again: Arc::new(Again::new(caller.clone(), expected)), caller })
    }

    /// Where this process listens, and calls from.
    pub(crate) fn endpoint(&self) -> &Endpoint {
        &self.caller.endpoint
    }

    /// This process's number for itself.
    pub(crate) fn process(&self) -> u64 {
        self.caller.hello.process
    }

    /// What others are told about this process.
    pub(crate) fn member(&self) -> &Member {
        &self.caller.hello.member
    }

    /// Who is in the job, as told by the first member that answers at one of these addresses.
    pub(crate) async fn look(
        &self,
        addresses: impl Iterator<Item = SocketAddr>,
    ) -> Result<Book, CallError> {
        let mut last = CallError::Failed("there is nobody to call".to_owned());
        let mut calls = JoinSet::new();
        let mut addresses = addresses.fuse();
        loop {
            let next = addresses.next();
            if let Some(address) = next {
                let joiner = self.clone();
                calls.spawn(async move { joiner.call(address, Purpose::Look).await });
            }
            let patience = if next.is_some() { NEXT_CALL } else { CALL_TIMEOUT };
            match timeout(patience, calls.join_next()).await {
                Ok(Some(Ok(Ok(Called { book, known })))) => {
                    known.connection.close(0u32.into(), b"seen");
                    return Ok(book);
                }
                Ok(Some(Ok(Err(error)))) if !matches!(last, CallError::Refused(..)) => last = error,
                Ok(Some(Ok(Err(_)))) => {}
                Ok(Some(Err(bug))) => last = CallError::Failed(bug.to_string()),
                Ok(None) => return Err(last),
                Err(_) => {} // it may still answer
            }
        }
    }

    /// Calls a member, to set up a link with it or only to look.
    pub(crate) async fn call(
        &self,
        address: SocketAddr,
        purpose: Purpose,
    ) -> Result<Called, CallError> {
        timeout(CALL_TIMEOUT, self.try_call(address, purpose))
            .await
            .unwrap_or_else(|_| Err(CallError::Failed(format!("{address} did not answer"))))
    }

    async fn try_call(&self, address: SocketAddr, purpose: Purpose) -> Result<Called, CallError> {
        let Caller { identity, hello, .. } = &*self.caller;
        let (name, mut hello) = (identity.name_of_any(), hello.clone());
        hello.purpose = purpose;
        let said = self.caller.say_hello(&hello, &name, address, ANSWER_TIMEOUT).await;
        let said = said.map_err(|error| match error {
            error if error == OTHER_TOKEN => CallError::Refused(address, error),
            error => CallError::Failed(format!("{address}: {error}")),
        });
        let mut known = match said? {
            (known, Answer::Heard) => known,
            (_, Answer::Refused(reason)) => return Err(CallError::Refused(address, reason)),
            _ => return Err(NONSENSE.to_owned().into()),
        };
        let mut book: Book = match read_up_to(&mut known.from, MAX_BOOK).await? {
            Answer::Book(book) => book,
            // It has no place for this process, or is about to leave.
            Answer::Refused(reason) => return Err(format!("{address} refused: {reason}").into()),
            _ => return Err(NONSENSE.to_owned().into()),
        };
        let here = book.entries.iter_mut().find(|entry| entry.number == book.here);
        let here = here.ok_or_else(|| NONSENSE.to_owned())?;
        here.address = Some(address);
        if !identity.is_of_this_job(&known.connection, Peer(here.member.rank)) {
            return Err(format!("{address}: its certificate is of another job").into());
        }
        known.member = here.member.clone();
        Ok(Called { known, book })
    }
}

/// Tells a process that has come who is in the job.
pub(crate) async fn show_book(newcomer: &mut Newcomer, book: Book) -> Result<(), String> {
    write(&mut newcomer.known.to, &Answer::Book(book)).await
}
