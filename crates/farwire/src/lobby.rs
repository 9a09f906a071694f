//! Where processes wait to join a running job: each member's side of
//! [`join::running`](crate::join::running).

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

use farwire_proto::{Config, Peer};
use tokio::sync::mpsc::Receiver;
use tokio::time::timeout;

use crate::join::again::{Again, Met};
use crate::join::gathering::Newcomer;
use crate::join::rendezvous::{Book, Entry, JOINER, Member, Purpose};
use crate::join::running::show_book;
use crate::link::{LinkChoice, Pair, Wanted};
use crate::node::Node;
use crate::process::{Healths, acquaint, longest_payload};
use crate::quic::control::Beats;
use crate::shm::bell::Bell;

/// Processes that may wait to be received in the lobby.
pub(crate) const MAX_NEWCOMERS: usize = 64;
/// How long setting up a link with a newcomer may take.
const PATIENCE: Duration = Duration::from_secs(10);

/// Where processes are, by their numbers for themselves; `None` for this process.
pub(crate) type Addresses = Arc<Mutex<HashMap<u64, (Member, Option<SocketAddr>)>>>;

/// What a member needs to receive processes that want to join.
#[derive(Clone, Debug)]
pub(crate) struct Lobby {
    pub(crate) node: Weak<Node>,
    pub(crate) addresses: Addresses,
    pub(crate) again: Arc<Again>,
    pub(crate) healths: Healths,
    /// This process's name for its host.
    pub(crate) host: String,
    pub(crate) link: LinkChoice,
    pub(crate) config: Config,
    pub(crate) bell: Bell,
    pub(crate) connections: Wanted,
    pub(crate) beats: Beats,
}

impl Lobby {
    /// Receives all processes that come, until the node is gone.
    pub(crate) async fn keep(self, mut newcomers: Receiver<Newcomer>) {
        while let Some(newcomer) = newcomers.recv().await {
            let lobby = self.clone();
            tokio::spawn(async move {
                let from = newcomer.known.connection.remote_address();
                let received = timeout(PATIENCE, lobby.receive(newcomer)).await;
                if let Err(reason) = received.unwrap_or_else(|_| Err("it took too long".into())) {
                    tracing::info!(%from, reason, "a process did not come to wait for joining");
                }
            });
        }
    }

    async fn receive(self, mut newcomer: Newcomer) -> Result<(), String> {
        let Some((book, me)) = self.book() else { return Ok(()) };
        show_book(&mut newcomer, book).await?;
        let Newcomer { process: Some(process), purpose: Purpose::Join, known, .. } = newcomer
        else {
            newcomer.known.part().await;
            return Ok(());
        };
        let address = self.again.address_of(&known.connection);
        let member = known.member.clone();
        let same_host = member.is_on(&self.host);
        let pair = Pair {
            me,
            peer: JOINER,
            same_host,
            payload: longest_payload(&self.config, same_host),
            bell: self.bell.clone(),
            connections: self.connections,
            met: Some(Met {
                connection: known.connection.clone(),
                called: known.called,
                peer: JOINER,
                again: Arc::new(self.again.within(PATIENCE)),
            }),
        };
        let linked = acquaint(pair, *known, self.link, self.beats).await;
        let linked = linked.map_err(|error| error.to_string())?;
        let Some(node) = self.node.upgrade() else { return Ok(()) };
        let mut healths = self.healths.lock().unwrap_or_else(PoisonError::into_inner);
        healths.retain(|health| health.loss().is_none());
        healths.push(linked.health.clone());
        drop(healths);
        let mut addresses = self.addresses.lock().unwrap_or_else(PoisonError::into_inner);
        let host = member.host.clone();
        addresses.insert(process, (member, Some(address)));
        drop(addresses);
        node.driver().add_waiting(process, host, linked.link);
        Ok(())
    }

    /// Who is in the job, and the number of this process, which says so.
    fn book(&self) -> Option<(Book, Peer)> {
        let node = self.node.upgrade()?;
        let (view, me) = {
            let driver = node.driver();
            (driver.view()?.clone(), driver.me())
        };
        let addresses = self.addresses.lock().unwrap_or_else(PoisonError::into_inner);
        let entry = |member: &farwire_proto::membership::Member| {
            let (known, address) = addresses.get(&member.process)?.clone();
            let (number, process) = (member.peer.0, member.process);
            Some(Entry { number, process, member: known, address })
        };
        let entries = view.members().iter().filter_map(entry).collect();
        Some((Book { epoch: view.epoch().0, here: me.0, entries }, me))
    }
}
