//! Waiting to be let into a running job: links to all members, until one of them says that this
//! process is a member.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::net::SocketAddr;
use std::pin::pin;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use farwire_proto::membership::{Message, View};
use farwire_proto::{Config, FrameKind, Peer};
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::timeout_at;

use super::{Healths, acquaint, crowd, longest_payload};
use crate::driver::members::host_number;
use crate::join::again::{Again, Met};
use crate::join::env::Place;
use crate::join::gathering::Newcomer;
use crate::join::identity::Identity;
use crate::join::rendezvous::{self, Book, Entry, JOINER, JoinError, Member, Purpose};
use crate::join::running::{CallError, Joiner};
use crate::link::negotiation::Linked;
use crate::link::{Arrival, Link, LinkChoice, Pair, Wanted};
use crate::lobby::Addresses;
use crate::quic::control::Beats;
use crate::quic::transport::Transport;
use crate::settings::Settings;
use crate::shm::bell::Bell;

/// What a process has once it was let into a running job.
#[derive(Debug)]
pub(super) struct Admitted {
    pub(super) me: Peer,
    pub(super) view: View,
    pub(super) links: Vec<Option<Box<dyn Link>>>,
    /// By peer: the number of its host.
    pub(super) hosts: Vec<u64>,
    /// What has arrived on the links.
    pub(super) early: Vec<(Peer, Arrival)>,
    pub(super) endpoint: quinn::Endpoint,
    pub(super) healths: Healths,
    pub(super) addresses: Addresses,
    pub(super) again: Arc<Again>,
}

/// A link of a process that waits to be let in.
#[derive(Debug)]
struct Waiting {
    linked: Linked,
    /// The other end's number for itself.
    process: u64,
    member: Member,
    address: SocketAddr,
}

/// How long setting up a link with a member may take.
const LINK_TIMEOUT: Duration = Duration::from_secs(10);
/// How long to listen before asking again who is in the job.
const LISTEN: Duration = Duration::from_millis(300);

impl Settings {
    /// Calls all members of a running job, and waits until they let this process in.
    pub(super) async fn wait_to_join(
        &self,
        places: &[Place],
        bell: &Bell,
        lobby: mpsc::Sender<Newcomer>,
    ) -> Result<Admitted, JoinError> {
        let contact = rendezvous::resolve(&places[0]).await?;
        let mut contacts = vec![contact];
        for place in &places[1..] {
            contacts.extend(rendezvous::resolve(place).await);
        }
        let (token, epoch) = (self.token_for(contact)?, self.config.epoch);
        let identity = Arc::new(Identity::new(&token, JOINER, epoch, &self.job)?);
        let terms = self.terms(contact, Some(lobby));
        let started = tokio::time::Instant::now();
        let deadline = started + self.join_timeout;
        let transport = Transport { congestion: self.congestion };
        let joiner = Joiner::new(&terms, identity, transport).await?;
        let mut waiting: BTreeMap<Peer, Waiting> = BTreeMap::new();
        let (mut early, mut last) = (Vec::new(), "nobody has answered".to_owned());
        let mut met_somebody = false;
        let mut calls = Calls::new(Suitor {
            joiner: joiner.clone(),
            link: self.link,
            config: self.config,
            bell: bell.clone(),
            connections: self.connections,
            beats: self.preset.beats(),
        });
        loop {
            // The first to answer counts: the member that this process was told of may be gone.
            let known: Vec<_> = waiting.values().map(|peer| peer.address).collect();
            let look = joiner.look(known.into_iter().chain(contacts.iter().copied()));
            let mut look = pin!(timeout_at(deadline, look));
            let (mut looked, mut listened) = (false, tokio::time::Instant::now() + LISTEN);
            // This process may be let in while it looks, and then the others wait for it.
            while !looked || tokio::time::Instant::now() < listened {
                while let Some((peer, call)) = calls.next_made() {
                    match call {
                        Ok(made) => {
                            waiting.insert(peer, made);
                            met_somebody = true;
                        }
                        Err(reason) => last = reason,
                    }
                }
                if let Some(view) = listen(&mut waiting, joiner.process(), &mut early) {
                    // A member may already have a link to this process whose other end is not ready
                    // here.
                    waiting.extend(calls.finish(&view).await);
                    return Ok(admitted(view, &joiner, waiting, early));
                }
                let pause = tokio::time::sleep(Duration::from_millis(1));
                let answer = tokio::select! {
                    answer = &mut look, if !looked => answer,
                    () = pause => continue,
                };
                let answered = matches!(answer, Ok(Ok(_)));
                match answer {
                    Ok(Ok(book)) => calls.make(&book, |peer| waiting.contains_key(&peer)),
                    Ok(Err(CallError::Refused(address, reason))) if waiting.is_empty() => {
                        return Err(JoinError::TurnedAway { address, reason });
                    }
                    Ok(Err(error)) => last = error.to_string(),
                    Err(_) => {} // time is up
                }
                if met_somebody && waiting.is_empty() && !answered {
                    let last = "all its ranks have left or are lost".to_owned();
                    let waited = started.elapsed();
                    return Err(JoinError::NotAdmitted { address: contact, waited, last });
                }
                (looked, listened) = (true, tokio::time::Instant::now() + LISTEN);
            }
            if tokio::time::Instant::now() > deadline {
                if !waiting.is_empty() {
                    last = "all members know that it waits, and none has said more; the job may \
                            have as many ranks as it is allowed to"
                        .to_owned();
                }
                let waited = self.join_timeout;
                return Err(JoinError::NotAdmitted { address: contact, waited, last });
            }
        }
    }
}

/// Sets up links to members, for a process that waits to be let in.
#[derive(Clone, Debug)]
struct Suitor {
    joiner: Joiner,
    link: LinkChoice,
    config: Config,
    bell: Bell,
    connections: Wanted,
    beats: Beats,
}

impl Suitor {
    /// Calls a member and sets up a link. `members` are all of them.
    async fn call(self, entry: Entry, members: Arc<[Member]>) -> Result<Waiting, String> {
        let peer = Peer(entry.number);
        let address = entry.address.ok_or_else(|| format!("nobody knows where {peer} is"))?;
        let called = self.joiner.call(address, Purpose::Join).await;
        let called = called.map_err(|error| error.to_string())?;
        if called.book.here != entry.number {
            return Err(format!("another process has the address of {peer} by now"));
        }
        let known = called.known;
        let same_host = entry.member.is_on(&self.joiner.member().host);
        let mut beats = self.beats;
        beats.lost_after *= crowd(&entry.member, same_host, &members);
        let pair = Pair {
            me: JOINER,
            peer,
            same_host,
            payload: longest_payload(&self.config, same_host),
            bell: self.bell,
            connections: self.connections,
            met: Some(Met {
                connection: known.connection.clone(),
                called: known.called,
                peer: Peer(known.member.rank),
                again: Arc::new(self.joiner.again.within(LINK_TIMEOUT)),
            }),
        };
        let linked = tokio::time::timeout(LINK_TIMEOUT, acquaint(pair, known, self.link, beats));
        let linked = linked.await.unwrap_or_else(|_| Err(took_too_long(peer)));
        let linked = linked.map_err(|error| error.to_string())?;
        Ok(Waiting { linked, process: entry.process, member: entry.member, address })
    }
}

/// Calls to members, side by side: one that is lost holds up none of the others.
#[derive(Debug)]
struct Calls {
    suitor: Suitor,
    pending: BTreeSet<Peer>,
    made: JoinSet<(Peer, Result<Waiting, String>)>,
}

impl Calls {
    fn new(suitor: Suitor) -> Self {
        Self { suitor, pending: BTreeSet::new(), made: JoinSet::new() }
    }

    /// Calls all members in a book that are neither known nor being called.
    fn make(&mut self, book: &Book, is_known: impl Fn(Peer) -> bool) {
        let me = self.suitor.joiner.process();
        let others: Vec<_> = others_than(me, book).collect();
        let members: Arc<[_]> = others.iter().map(|entry| entry.member.clone()).collect();
        for entry in others {
            let peer = Peer(entry.number);
            if !is_known(peer) && self.pending.insert(peer) {
                let call = self.suitor.clone().call(entry.clone(), members.clone());
                self.made.spawn(async move { (peer, call.await) });
            }
        }
    }

    /// Waits for calls to members of a view, and returns the links that come of them.
    async fn finish(mut self, view: &View) -> Vec<(Peer, Waiting)> {
        let mut made = Vec::new();
        while self.pending.iter().any(|peer| view.contains(*peer))
            && let Some(call) = self.made.join_next().await
        {
            // A call that panicked does not say whom it called. It is one less to wait for all the
            // same.
            let Ok((peer, result)) = call else { continue };
            self.pending.remove(&peer);
            made.extend(result.ok().map(|waiting| (peer, waiting)));
        }
        made
    }

    /// The result of a call that has ended.
    fn next_made(&mut self) -> Option<(Peer, Result<Waiting, String>)> {
        let (peer, result) = self.made.try_join_next()?.ok()?;
        self.pending.remove(&peer);
        Some((peer, result))
    }
}

/// The entries of a book that a process has to call. A process that looks just when it is let in
/// finds itself among them: it would not answer itself, and would hold up the others for as long as
/// a call may take.
fn others_than(process: u64, book: &Book) -> impl Iterator<Item = &Entry> {
    book.entries.iter().filter(move |entry| entry.process != process)
}

fn took_too_long(peer: Peer) -> JoinError {
    JoinError::Lost { peer, reason: format!("it set up no link within {LINK_TIMEOUT:?}") }
}

/// Takes what has come from members, until one says that this process is a member.
fn listen(
    waiting: &mut BTreeMap<Peer, Waiting>,
    process: u64,
    early: &mut Vec<(Peer, Arrival)>,
) -> Option<View> {
    let mut view = None;
    waiting.retain(|peer, Waiting { linked, .. }| {
        loop {
            match linked.link.poll_arrived() {
                Ok(None) => return true,
                Ok(Some(arrival)) => {
                    if let Arrival::Notice(header, payload) = &arrival
                        && header.frame == FrameKind::Members
                        && let Ok(message) = Message::decode(payload)
                        && let Some(decided) = message.decided()
                        && decided.find(process).is_some()
                    {
                        view = Some(decided.clone());
                    }
                    let gone = matches!(arrival, Arrival::Closed);
                    early.push((*peer, arrival));
                    if gone || view.is_some() {
                        return !gone;
                    }
                }
                Err(_lost) => {
                    linked.link.give_up();
                    return false;
                }
            }
        }
    });
    view
}

/// What a process needs once it was let in. Members that it has no link to are lost to it.
fn admitted(
    view: View,
    joiner: &Joiner,
    waiting: BTreeMap<Peer, Waiting>,
    mut early: Vec<(Peer, Arrival)>,
) -> Admitted {
    let me = view.find(joiner.process()).expect("it is in the view").peer;
    let mut links: Vec<Option<Box<dyn Link>>> = (0..view.next_peer()).map(|_| None).collect();
    let mut hosts: Vec<_> = (0..view.next_peer()).map(|peer| host_number("", Peer(peer))).collect();
    hosts[me.index()] = host_number(&joiner.member().host, me);
    let mut healths = Vec::new();
    let mut addresses = HashMap::from([(joiner.process(), (joiner.member().clone(), None))]);
    for (peer, mut there) in waiting {
        if view.contains(peer) {
            hosts[peer.index()] = host_number(&there.member.host, peer);
            healths.push(there.linked.health);
            addresses.insert(there.process, (there.member, Some(there.address)));
            links[peer.index()] = Some(there.linked.link);
        } else {
            there.linked.link.give_up();
        }
    }
    early.retain(|(peer, _)| links.get(peer.index()).is_some_and(Option::is_some));
    let (healths, addresses) = (Arc::new(Mutex::new(healths)), Arc::new(Mutex::new(addresses)));
    let (endpoint, again) = (joiner.endpoint().clone(), joiner.again.clone());
    Admitted { me, view, links, hosts, early, endpoint, healths, addresses, again }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_was_let_in_while_it_looked_does_not_call_itself() {
        let member = |rank| Member { rank, host: String::new(), cores: 1 };
        let entry = |number: u32| Entry {
            number,
            process: 100 + u64::from(number),
            member: member(number),
            address: None,
        };
        let book = Book { epoch: 3, here: 0, entries: [0, 2, 7].map(entry).into() };
        let called = |process| others_than(process, &book).map(|entry| entry.number).collect();
        let newcomer: Vec<_> = called(107);
        assert_eq!(newcomer, [0, 2]);
        let stranger: Vec<_> = called(108);
        assert_eq!(stranger, [0, 2, 7]);
    }
}
