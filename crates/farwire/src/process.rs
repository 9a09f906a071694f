//! Ranks as processes: joining a job, and leaving it.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use farwire_proto::membership::{MAX_MESSAGE, Message, View};
use farwire_proto::{Config, Engine, FrameKind, Options, Peer, WorldSize};
use tokio::runtime::Runtime;
use tokio::sync::mpsc;
use tokio::task::JoinSet;

use crate::comm::Communicator;
use crate::driver::Driver;
use crate::driver::members::Members;
use crate::error::Error;
use crate::join::again::{Again, Met};
use crate::join::env::Place;
use crate::join::gathering::Newcomer;
use crate::join::identity::Identity;
use crate::join::rendezvous::{
    self, Acquaintance, Book, Entry, Group, JOINER, JoinError, Member, Purpose, Terms,
};
use crate::join::running::Joiner;
use crate::link::negotiation::{self, Linked};
use crate::link::{Arrival, Link, LinkChoice, Pair};
use crate::lobby::{Addresses, Lobby, MAX_NEWCOMERS};
use crate::metrics;
use crate::node::{self, Node};
use crate::observe::Observer;
use crate::quic::control::{self, Beats, Health};
use crate::quic::transport::Transport;
use crate::settings::{Builder, Settings};
use crate::shm::bell::Bell;
use crate::token::Token;

impl Communicator {
    /// Joins the job that this process was started in, by the environment that its launcher set:
    /// `farwire launch`, torchrun, mpirun, srun, a Kubernetes indexed job, or `RANK`, `WORLD_SIZE`,
    /// `MASTER_ADDR` and `MASTER_PORT` set by hand.
    ///
    /// Blocks until all ranks have come. [`Builder`] lists the other variables.
    ///
    /// To see what happens: `FARWIRE_METRICS=127.0.0.1:9464` serves counters to Prometheus,
    /// `FARWIRE_TRACE=trace.json` writes a trace that Perfetto opens, and `FARWIRE_FLIGHT_DIR` is
    /// where a failing rank leaves its flight record ([`flight`](crate::flight)).
    pub fn from_env() -> Result<Self, Error> {
        Self::builder().join()
    }

    /// Joins a job with settings of one's own; what is not set comes from the environment.
    pub fn builder() -> Builder {
        Builder::default()
    }
}

impl Builder {
    /// Joins, and blocks until all ranks have come.
    pub fn join(self) -> Result<Communicator, Error> {
        let system = |what| move |error| Error::System { what, error };
        let settings = self.settings(&|name| std::env::var_os(name))?;
        // What cannot be had is found out before anyone waits for this rank.
        let (rank, world) = (settings.place.rank, settings.place.world);
        let (trace, records) = (settings.trace.as_deref(), settings.records.clone());
        let observer = Observer::new(rank, world, settings.config.epoch, trace, records)?;
        let metrics = settings.metrics.map(|address| metrics::listen(address, world));
        let metrics = metrics.transpose().map_err(system(NO_METRICS))?;
        let bell = Bell::new().map_err(system("could not get shared memory"))?;
        let runtime = network_thread()?;
        let (lobby, newcomers) = mpsc::channel(MAX_NEWCOMERS);
        let lobby = settings.elastic.then_some(lobby);
        let joined = match apart(&runtime, settings.join(&bell, lobby)) {
            Ok(joined) => joined,
            Err(error) => {
                runtime.shutdown_background();
                return Err(error.into());
            }
        };
        let Joined { links, threads, endpoint, healths, addresses, again } = joined;
        let engine = Engine::new(rank, world, settings.config);
        let handle = runtime.handle().clone();
        let network = Network { runtime: Some(runtime), endpoint, healths };
        let healths = network.healths.clone();
        let members = Members::founding(rank, world, settings.membership());
        let payload = longest_payload(&settings.config);
        let driver = Driver::new(engine, links, payload, observer, members);
        let node = Node::start(driver, bell.clone(), threads, Some(Box::new(network)));
        let node = node.map_err(system("could not start a thread"))?;
        if let Some(listener) = metrics {
            handle.spawn(metrics::serve(listener, rank.0, node.downgrade()));
        }
        if let Some(again) = again.filter(|_| settings.elastic) {
            let lobby = settings.lobby(node.downgrade(), addresses, again, healths, bell);
            handle.spawn(lobby.keep(newcomers));
        }
        Communicator::of_world(node)
    }

    /// Joins a job that runs, and that others may join ([`elastic`](Self::elastic)): calls one of
    /// its members, and blocks until the members [admit](Communicator::admit) this process. Its rank
    /// is then the last.
    ///
    /// `addresses` are a host and a port, or several, separated by commas: the first that answers
    /// counts. Every member can be called, not only rank 0, and none is needed by the others.
    pub fn join_running(mut self, addresses: &str) -> Result<Communicator, Error> {
        let system = |what| move |error| Error::System { what, error };
        let places: Result<Vec<_>, _> =
            addresses.split(',').map(|address| Place::to_join(address.trim())).collect();
        let places = places?;
        self = self.place(places[0].clone()).elastic(true);
        let settings = self.settings(&|name| std::env::var_os(name))?;
        let bell = Bell::new().map_err(system("could not get shared memory"))?;
        let runtime = network_thread()?;
        let (lobby, newcomers) = mpsc::channel(MAX_NEWCOMERS);
        let admitted = match apart(&runtime, settings.wait_to_join(&places, &bell, lobby)) {
            Ok(admitted) => admitted,
            Err(error) => {
                runtime.shutdown_background();
                return Err(error.into());
            }
        };
        let Admitted { me, view, links, early, endpoint, healths, addresses, again } = admitted;
        let world = WorldSize::new(view.next_peer()).expect("this process is in it");
        let (trace, records) = (settings.trace.as_deref(), settings.records.clone());
        let observer = Observer::new(me, world, settings.config.epoch, trace, records)?;
        let metrics = settings.metrics.map(|address| metrics::listen(address, world));
        let metrics = metrics.transpose().map_err(system(NO_METRICS))?;
        let threads = 2 * links.iter().flatten().count();
        let engine = Engine::new(me, world, settings.config);
        let handle = runtime.handle().clone();
        let network = Network { runtime: Some(runtime), endpoint: Some(endpoint), healths };
        let healths = network.healths.clone();
        let members = Members::new(me, view, settings.membership());
        let payload = longest_payload(&settings.config);
        let mut driver = Driver::new(engine, links, payload, observer, Some(members));
        driver.enter(early);
        let node = Node::start(driver, bell.clone(), threads, Some(Box::new(network)));
        let node = node.map_err(system("could not start a thread"))?;
        if let Some(listener) = metrics {
            handle.spawn(metrics::serve(listener, me.0, node.downgrade()));
        }
        let lobby = settings.lobby(node.downgrade(), addresses, again, healths, bell);
        handle.spawn(lobby.keep(newcomers));
        Communicator::of_newest(node, Options::default())
    }
}

const NO_METRICS: &str = "could not serve metrics (FARWIRE_METRICS or Builder::metrics)";

fn network_thread() -> Result<Runtime, Error> {
    tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .thread_name("farwire-net")
        .enable_all()
        .build()
        .map_err(|error| Error::System { what: "could not start the network thread", error })
}

/// Runs on a thread of its own, because the caller may be inside a runtime of its own.
fn apart<T: Send>(runtime: &Runtime, task: impl Future<Output = T> + Send) -> T {
    std::thread::scope(|scope| {
        let join = scope.spawn(|| runtime.block_on(task));
        join.join().expect("joining does not panic")
    })
}

/// What is known of all peers, to say goodbye to them.
pub(crate) type Healths = Arc<Mutex<Vec<Arc<Health>>>>;

/// What a process has once it is part of a job.
#[derive(Debug)]
struct Joined {
    /// By peer; none to itself.
    links: Vec<Option<Box<dyn Link>>>,
    /// Threads of all ranks on this host that want a core while they wait.
    threads: usize,
    endpoint: Option<quinn::Endpoint>,
    healths: Healths,
    addresses: Addresses,
    /// Nothing for a process that nobody can call.
    again: Option<Arc<Again>>,
}

/// What a process has once it was let into a job that runs.
#[derive(Debug)]
struct Admitted {
    me: Peer,
    view: View,
    links: Vec<Option<Box<dyn Link>>>,
    /// What has come on them.
    early: Vec<(Peer, Arrival)>,
    endpoint: quinn::Endpoint,
    healths: Healths,
    addresses: Addresses,
    again: Arc<Again>,
}

/// A link of a process that waits to be let in.
#[derive(Debug)]
struct Waiting {
    linked: Linked,
    /// What calls itself so, at the other end.
    process: u64,
    member: Member,
    address: SocketAddr,
}

/// How long it may take to set up a link with a member.
const LINK_TIMEOUT: Duration = Duration::from_secs(10);
/// How long to listen before looking again who is in the job.
const LISTEN: Duration = Duration::from_millis(300);

impl Settings {
    /// What receives those that want to join later.
    fn lobby(
        &self,
        node: std::sync::Weak<Node>,
        addresses: Addresses,
        again: Arc<Again>,
        healths: Healths,
        bell: Bell,
    ) -> Lobby {
        let (link, payload) = (self.link, longest_payload(&self.config));
        let beats = self.preset.beats();
        Lobby { node, addresses, again, healths, link, payload, bell, beats }
    }

    fn terms(&self, master: SocketAddr, lobby: Option<mpsc::Sender<Newcomer>>) -> Terms<'_> {
        Terms {
            place: &self.place,
            job: &self.job,
            epoch: self.config.epoch,
            master,
            port_is_held: self.port_is_held,
            port: self.port,
            interface: self.interface.as_deref(),
            timeout: self.join_timeout,
            lobby,
        }
    }

    /// Calls all members of a job that runs, and waits until they let this process in.
    async fn wait_to_join(
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
        let joiner = Joiner::new(&terms, identity, Transport { congestion: self.congestion })?;
        let mut waiting: BTreeMap<Peer, Waiting> = BTreeMap::new();
        let (mut early, mut last) = (Vec::new(), "nobody has answered".to_owned());
        let mut met_somebody = false;
        let mut calls = Calls::new(Suitor {
            joiner: joiner.clone(),
            link: self.link,
            payload: longest_payload(&self.config),
            bell: bell.clone(),
            beats: self.preset.beats(),
        });
        loop {
            // Whoever answers first: the one that this process was told of may be gone.
            let known: Vec<_> = waiting.values().map(|peer| peer.address).collect();
            let answer = joiner.look(known.into_iter().chain(contacts.iter().copied())).await;
            let answered = answer.is_ok();
            match answer {
                Ok(book) => calls.make(&book, |peer| waiting.contains_key(&peer)),
                Err(reason) => last = reason,
            }
            if met_somebody && waiting.is_empty() && !answered {
                let last = "all its ranks have left or are lost".to_owned();
                let waited = started.elapsed();
                return Err(JoinError::NotAdmitted { address: contact, waited, last });
            }
            let listened = tokio::time::Instant::now() + LISTEN;
            while tokio::time::Instant::now() < listened {
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
                    return Ok(admitted(view, &joiner, waiting, early));
                }
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
            if tokio::time::Instant::now() > deadline {
                if !waiting.is_empty() {
                    last = "all members know that it waits, and none has said more".to_owned();
                }
                let waited = self.join_timeout;
                return Err(JoinError::NotAdmitted { address: contact, waited, last });
            }
        }
    }

    async fn join(
        &self,
        bell: &Bell,
        lobby: Option<mpsc::Sender<Newcomer>>,
    ) -> Result<Joined, JoinError> {
        if self.place.world.get() == 1 && !self.elastic {
            return Ok(Joined {
                links: vec![None],
                threads: 1,
                endpoint: None,
                healths: Healths::default(),
                addresses: Addresses::default(),
                again: None,
            });
        }
        let (me, epoch) = (self.place.rank, self.config.epoch);
        let master = rendezvous::resolve(&self.place).await?;
        let identity = Arc::new(Identity::new(&self.token_for(master)?, me, epoch, &self.job)?);
        let terms = self.terms(master, lobby);
        let transport = Transport { congestion: self.congestion };
        let Group { endpoint, peers, again, member } =
            rendezvous::join(&terms, identity, transport).await?;
        let mut addresses = HashMap::from([(u64::from(me.0), (member, None))]);
        for known in peers.iter().flatten() {
            let address = known.connection.remote_address();
            let process = u64::from(known.member.rank);
            addresses.insert(process, (known.member.clone(), Some(address)));
        }
        let addresses = Arc::new(Mutex::new(addresses));

        let members: Vec<_> = peers.iter().flatten().map(|peer| peer.member.clone()).collect();
        let payload = longest_payload(&self.config);
        let pair = |(known, index): (Option<Acquaintance>, u32)| {
            let (known, peer) = (known?, Peer(index));
            let (connection, again) = (known.connection.clone(), again.clone());
            let met = Met { connection, called: known.called, peer, again };
            let pair = Pair {
                me,
                peer,
                same_host: rendezvous::is_this_host(&known.member),
                payload,
                bell: bell.clone(),
                met: Some(met),
            };
            Some((pair, known))
        };
        let pairs: Vec<_> = peers.into_iter().zip(0..).map(pair).collect();
        negotiation::prepare(self.link.kinds(), pairs.iter().flatten().map(|(pair, _)| pair))?;
        let crowd =
            |(pair, known): &(Pair, Acquaintance)| crowd(&known.member, pair.same_host, &members);
        let here = pairs.iter().flatten().filter(|(pair, _)| pair.same_host);
        let (ranks_here, crowd_here) =
            (1 + here.clone().count(), here.map(crowd).max().unwrap_or(1));

        // Pairs negotiate side by side, so a slow peer does not hold up the others.
        let negotiate = |pair: Option<(Pair, Acquaintance)>| {
            let mut beats = self.preset.beats();
            beats.lost_after *= pair.as_ref().map_or(1, crowd).max(crowd_here);
            pair.map(|(pair, known)| {
                (pair.peer, tokio::spawn(acquaint(pair, known, self.link, beats)))
            })
        };
        let negotiations: Vec<_> = pairs.into_iter().map(negotiate).collect();
        let (mut links, mut healths, mut threads_each) = (Vec::new(), Vec::new(), 1);
        for negotiation in negotiations {
            let Some((peer, negotiation)) = negotiation else {
                links.push(None);
                continue;
            };
            let panicked =
                |error: tokio::task::JoinError| JoinError::Lost { peer, reason: error.to_string() };
            let Linked { kind, link, health } = negotiation.await.map_err(panicked)??;
            threads_each = threads_each.max(1 + usize::from(kind.uses_network_thread()));
            links.push(Some(link));
            healths.push(health);
        }
        let (threads, endpoint) = (ranks_here * threads_each, Some(endpoint));
        let healths = Arc::new(Mutex::new(healths));
        Ok(Joined { links, threads, endpoint, healths, addresses, again: Some(again) })
    }

    /// The token that was given, or on loopback this user's.
    fn token_for(&self, master: SocketAddr) -> Result<Token, JoinError> {
        match &self.token {
            Some(token) => Ok(token.clone()),
            None if master.ip().is_loopback() => Token::of_user().map_err(|error| {
                JoinError::Identity(format!(
                    "could not use this user's key file: {error}; \
                     or set FARWIRE_TOKEN to what `farwire token` prints"
                ))
            }),
            None => Err(JoinError::Identity(format!(
                "{master} is not loopback, and there is no token; \
                 run `export FARWIRE_TOKEN=$(farwire token)` and give all ranks the same"
            ))),
        }
    }
}

/// What sets up links to members for a process that waits to be let in.
#[derive(Clone, Debug)]
struct Suitor {
    joiner: Joiner,
    link: LinkChoice,
    payload: usize,
    bell: Bell,
    beats: Beats,
}

impl Suitor {
    /// Calls a member and sets up a link. `members` are all.
    async fn call(self, entry: Entry, members: Arc<[Member]>) -> Result<Waiting, String> {
        let peer = Peer(entry.number);
        let address = entry.address.ok_or_else(|| format!("nobody knows where {peer} is"))?;
        let called = self.joiner.call(address, Purpose::Join).await?;
        if called.book.here != entry.number {
            return Err(format!("another process has the address of {peer} by now"));
        }
        let known = called.known;
        let same_host = rendezvous::is_this_host(&entry.member);
        let mut beats = self.beats;
        beats.lost_after *= crowd(&entry.member, same_host, &members);
        let pair = Pair {
            me: JOINER,
            peer,
            same_host,
            payload: self.payload,
            bell: self.bell,
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

    /// Calls all in a book that are not known and not being called.
    fn make(&mut self, book: &Book, is_known: impl Fn(Peer) -> bool) {
        let members: Arc<[_]> = book.entries.iter().map(|entry| entry.member.clone()).collect();
        for entry in &book.entries {
            let peer = Peer(entry.number);
            if !is_known(peer) && self.pending.insert(peer) {
                let call = self.suitor.clone().call(entry.clone(), members.clone());
                self.made.spawn(async move { (peer, call.await) });
            }
        }
    }

    /// What came of one of them.
    fn next_made(&mut self) -> Option<(Peer, Result<Waiting, String>)> {
        let (peer, result) = self.made.try_join_next()?.ok()?;
        self.pending.remove(&peer);
        Some((peer, result))
    }
}

fn took_too_long(peer: Peer) -> JoinError {
    JoinError::Lost { peer, reason: format!("it set up no link within {LINK_TIMEOUT:?}") }
}

/// What has come from members, until one says that this process is one of them.
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

/// What a process that was let in needs. Members that it has no link to are lost to it.
fn admitted(
    view: View,
    joiner: &Joiner,
    waiting: BTreeMap<Peer, Waiting>,
    mut early: Vec<(Peer, Arrival)>,
) -> Admitted {
    let me = view.find(joiner.process()).expect("it is in the view").peer;
    let mut links: Vec<Option<Box<dyn Link>>> = (0..view.next_peer()).map(|_| None).collect();
    let mut healths = Vec::new();
    let mut addresses = HashMap::from([(joiner.process(), (joiner.member().clone(), None))]);
    for (peer, mut there) in waiting {
        if view.contains(peer) {
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
    Admitted { me, view, links, early, endpoint, healths, addresses, again }
}

/// By how much a crowded host stretches the time that a peer has to answer: a thread that has to
/// wait for eight others to have their turn is not lost. `members` are all but this process.
fn crowd(member: &Member, same_host: bool, members: &[Member]) -> u32 {
    let there = members.iter().filter(|other| other.host == member.host).count();
    // Each has a thread that computes and one for the network.
    let threads = 2 * (there + usize::from(same_host));
    (threads as u32).div_ceil(8 * member.cores.max(1)).max(1)
}

/// The longest payload of a frame: partial results of 16-bit types travel in 32 bits, and what is
/// said about members must fit, too.
pub(crate) fn longest_payload(config: &Config) -> usize {
    (2 * config.tuning.segment_bytes.get()).max(MAX_MESSAGE)
}

/// Agrees with a peer on how data will travel, and begins to ask whether it lives: at once, because
/// the peer does the same.
pub(crate) async fn acquaint(
    pair: Pair,
    mut known: Acquaintance,
    choice: LinkChoice,
    beats: Beats,
) -> Result<Linked, JoinError> {
    let linked = match negotiation::agree(&pair, choice.kinds(), &mut known).await {
        Ok(linked) => linked,
        Err(error) => {
            known.part().await; // so that the peer finds out, too
            return Err(error);
        }
    };
    let Acquaintance { connection, to, from, .. } = known;
    tokio::spawn(control::watch(connection, to, from, linked.health.clone(), beats));
    Ok(linked)
}

/// What a node needs beside its driver while it is part of a job.
#[derive(Debug)]
pub(crate) struct Network {
    runtime: Option<Runtime>,
    endpoint: Option<quinn::Endpoint>,
    healths: Healths,
}

impl node::Network for Network {}

/// How long leaving may take.
const FAREWELL: Duration = Duration::from_secs(3);

impl Network {
    /// Waits until peers have all that was sent, and lets go.
    fn leave(&mut self) {
        let (Some(runtime), endpoint, healths) =
            (self.runtime.take(), self.endpoint.take(), self.healths.clone())
        else {
            return;
        };
        let healths = std::mem::take(&mut *healths.lock().unwrap_or_else(PoisonError::into_inner));
        // On a thread of its own, because the last handle may be dropped inside a runtime.
        let farewell = std::thread::spawn(move || {
            runtime.block_on(async {
                let all_left = async {
                    for health in &healths {
                        health.left().await;
                    }
                };
                let _ = tokio::time::timeout(FAREWELL, all_left).await;
                if let Some(endpoint) = endpoint {
                    endpoint.close(0u32.into(), b"done");
                    let _ = tokio::time::timeout(Duration::from_millis(200), endpoint.wait_idle())
                        .await;
                }
            });
            runtime.shutdown_background();
        });
        let _ = farewell.join();
    }
}

impl Drop for Network {
    fn drop(&mut self) {
        self.leave();
    }
}
