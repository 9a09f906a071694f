//! Ranks as processes: joining a job, and leaving it.

mod waiting;

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use farwire_proto::membership::MAX_MESSAGE;
use farwire_proto::{Config, Engine, Options, Peer, Tuning, WorldSize};
use tokio::runtime::Runtime;
use tokio::sync::mpsc;

use crate::comm::Communicator;
use crate::driver::Driver;
use crate::driver::members::{Members, host_number};
use crate::error::Error;
use crate::join::again::{Again, Met};
use crate::join::beginning::Note;
use crate::join::env::Place;
use crate::join::gathering::Newcomer;
use crate::join::identity::Identity;
use crate::join::rendezvous::{self, Acquaintance, Group, JoinError, Member, Terms};
use crate::link::negotiation::{self, Linked};
use crate::link::{Link, LinkChoice, LinkKind, Pair, Wanted};
use crate::lobby::{Addresses, Lobby, MAX_NEWCOMERS};
use crate::metrics;
use crate::node::{self, Node};
use crate::observe::Observer;
use crate::quic::control::{self, Beats, Health};
use crate::quic::transport::Transport;
use crate::settings::{Builder, Settings};
use crate::shm::bell::Bell;
use crate::token::Token;
use waiting::Admitted;

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

    /// Joins a job with your own settings; what is not set comes from the environment.
    pub fn builder() -> Builder {
        Builder::default()
    }
}

impl Builder {
    /// Joins, and blocks until all ranks have come.
    pub fn join(self) -> Result<Communicator, Error> {
        let system = |what| move |error| Error::System { what, error };
        let settings = self.settings(&|name| std::env::var_os(name))?;
        // Whatever is not available is found out before anyone waits for this rank.
        let (rank, world) = (settings.place.rank, settings.place.world);
        let (trace, records) = (settings.trace.as_deref(), settings.records.clone());
        let observer = Observer::new(rank, world, settings.config.epoch, trace, records)?;
        let metrics = settings.metrics.map(|address| metrics::listen(address, world));
        let metrics = metrics.transpose().map_err(system(NO_METRICS))?;
        let bell = Bell::new().map_err(system("could not get shared memory"))?;
        let runtime = network_threads(settings.connections)?;
        let (lobby, newcomers) = mpsc::channel(MAX_NEWCOMERS);
        let lobby = settings.elastic.then_some(lobby);
        let joined = match apart(&runtime, settings.join(&bell, lobby)) {
            Ok(joined) => joined,
            Err(error) => {
                end(runtime);
                return Err(error.into());
            }
        };
        let Joined { links, hosts, threads, endpoint, healths, addresses, again } = joined;
        let engine = Engine::on_hosts(rank, &hosts, settings.config);
        let handle = runtime.handle().clone();
        let network = Network { runtime: Some(runtime), endpoint, healths };
        let healths = network.healths.clone();
        let members = Members::founding(rank, world, settings.membership(&links));
        let members = members.map(|members| members.limited_to(settings.max_ranks));
        let payload = longest_payload(&settings.config, false);
        let driver = Driver::new(engine, links, payload, observer, members);
        let node =
            Node::start(driver, bell.clone(), threads, settings.threads, Some(Box::new(network)));
        let node = node.map_err(system("could not start a thread"))?;
        if let Some(listener) = metrics {
            handle.spawn(metrics::serve(listener, rank.0, node.downgrade()));
        }
        if let Some(again) = again.filter(|_| settings.elastic) {
            let lobby = settings.lobby(node.downgrade(), addresses, again, healths, bell);
            handle.spawn(lobby.keep(newcomers));
        }
        if let Some(beginning) = &settings.beginning {
            beginning.note(Note::IsIn);
        }
        Communicator::of_world(node)
    }

    /// Joins a running job that lets others join ([`elastic`](Self::elastic)): calls one of its
    /// members, and blocks until the members [admit](Communicator::admit) this process. Its rank is
    /// then the last.
    ///
    /// `addresses` are a host and a port, or several, separated by commas: the first that answers
    /// counts. Any member can be called, not only rank 0, and the others can do without it.
    pub fn join_running(mut self, addresses: &str) -> Result<Communicator, Error> {
        let system = |what| move |error| Error::System { what, error };
        let listed = addresses.split(',').map(str::trim).filter(|address| !address.is_empty());
        let places: Result<Vec<_>, _> = listed.map(Place::to_join).collect();
        let places = places?;
        let first = places.first().cloned().map_or_else(|| Place::to_join(addresses), Ok)?;
        self = self.place(first).elastic(true);
        let settings = self.settings(&|name| std::env::var_os(name))?;
        let bell = Bell::new().map_err(system("could not get shared memory"))?;
        let runtime = network_threads(settings.connections)?;
        let (lobby, newcomers) = mpsc::channel(MAX_NEWCOMERS);
        let admitted = match apart(&runtime, settings.wait_to_join(&places, &bell, lobby)) {
            Ok(admitted) => admitted,
            Err(error) => {
                end(runtime);
                return Err(error.into());
            }
        };
        let Admitted { me, view, links, hosts, early, endpoint, healths, addresses, again } =
            admitted;
        let world = WorldSize::new(view.next_peer()).expect("this process is in it");
        let (trace, records) = (settings.trace.as_deref(), settings.records.clone());
        let observer = Observer::new(me, world, settings.config.epoch, trace, records)?;
        let metrics = settings.metrics.map(|address| metrics::listen(address, world));
        let metrics = metrics.transpose().map_err(system(NO_METRICS))?;
        let threads = 2 * links.iter().flatten().count();
        let engine = Engine::on_hosts(me, &hosts, settings.config);
        let handle = runtime.handle().clone();
        let network = Network { runtime: Some(runtime), endpoint: Some(endpoint), healths };
        let healths = network.healths.clone();
        let members = Members::new(me, view, settings.membership(&links));
        let members = members.limited_to(settings.max_ranks);
        let payload = longest_payload(&settings.config, false);
        let mut driver = Driver::new(engine, links, payload, observer, Some(members));
        driver.enter(early);
        let node =
            Node::start(driver, bell.clone(), threads, settings.threads, Some(Box::new(network)));
        let node = node.map_err(system("could not start a thread"))?;
        if let Some(listener) = metrics {
            handle.spawn(metrics::serve(listener, me.0, node.downgrade()));
        }
        let lobby = settings.lobby(node.downgrade(), addresses, again, healths, bell);
        handle.spawn(lobby.keep(newcomers));
        if let Some(beginning) = &settings.beginning {
            beginning.note(Note::IsIn);
        }
        Communicator::of_newest(node, Options::default())
    }
}

const NO_METRICS: &str = "could not serve metrics (FARWIRE_METRICS or Builder::metrics)";

/// One thread for each connection that a link may have in each direction.
fn network_threads(connections: Wanted) -> Result<Runtime, Error> {
    tokio::runtime::Builder::new_multi_thread()
        .worker_threads(connections.most)
        .thread_name("farwire-net")
        .enable_all()
        .build()
        .map_err(|error| Error::System { what: "could not start the network thread", error })
}

/// How long network threads may take to close what they have open.
const LETTING_GO: Duration = Duration::from_secs(1);

/// Ends the network threads, so that their port can be used again.
fn end(runtime: Runtime) {
    std::thread::scope(|scope| {
        let end = scope.spawn(|| runtime.shutdown_timeout(LETTING_GO));
        end.join().expect("what ends a runtime does not panic");
    });
}

/// Runs a task on a separate thread, because the caller may be inside a runtime of its own.
fn apart<T: Send>(runtime: &Runtime, task: impl Future<Output = T> + Send) -> T {
    std::thread::scope(|scope| {
        let join = scope.spawn(|| runtime.block_on(task));
        join.join().expect("joining does not panic")
    })
}

/// The health of all peers, to say goodbye to them.
pub(crate) type Healths = Arc<Mutex<Vec<Arc<Health>>>>;

/// What a process has once it is part of a job.
#[derive(Debug)]
struct Joined {
    /// By peer; `None` for this process.
    links: Vec<Option<Box<dyn Link>>>,
    /// By peer: the number of its host.
    hosts: Vec<u64>,
    /// Threads of all ranks on this host that want a core while they wait.
    threads: usize,
    endpoint: Option<quinn::Endpoint>,
    healths: Healths,
    addresses: Addresses,
    /// `None` for a process that nobody can call.
    again: Option<Arc<Again>>,
}

impl Settings {
    /// What receives processes that want to join later.
    fn lobby(
        &self,
        node: std::sync::Weak<Node>,
        addresses: Addresses,
        again: Arc<Again>,
        healths: Healths,
        bell: Bell,
    ) -> Lobby {
        let (link, config, beats) = (self.link, self.config, self.preset.beats());
        let (connections, host) = (self.connections, self.host.clone());
        Lobby { host, node, addresses, again, healths, link, config, bell, connections, beats }
    }

    fn terms(&self, master: SocketAddr, lobby: Option<mpsc::Sender<Newcomer>>) -> Terms<'_> {
        Terms {
            place: &self.place,
            job: &self.job,
            agree_on: &self.agree_on,
            agree_later: &self.agree_later,
            host: &self.host,
            epoch: self.config.epoch,
            master,
            port_is_held: self.port_is_held,
            beginning: self.beginning.as_ref(),
            tcp: self.link.kinds().any(LinkKind::uses_tcp).then_some(&self.tcp),
            port: self.port,
            interface: self.interface.as_deref(),
            timeout: self.join_timeout,
            lobby,
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
                hosts: vec![0],
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
        let host = |(known, peer): (&Option<Acquaintance>, u32)| {
            let name = known.as_ref().map_or(&self.host, |known| &known.member.host);
            host_number(name, Peer(peer))
        };
        let hosts: Vec<_> = peers.iter().zip(0..).map(host).collect();
        let mut addresses = HashMap::from([(u64::from(me.0), (member, None))]);
        for known in peers.iter().flatten() {
            let address = again.address_of(&known.connection);
            let process = u64::from(known.member.rank);
            addresses.insert(process, (known.member.clone(), Some(address)));
        }
        let addresses = Arc::new(Mutex::new(addresses));

        let members: Vec<_> = peers.iter().flatten().map(|peer| peer.member.clone()).collect();
        let pair = |(known, index): (Option<Acquaintance>, u32)| {
            let (known, peer) = (known?, Peer(index));
            let (connection, again) = (known.connection.clone(), again.clone());
            let met = Met { connection, called: known.called, peer, again };
            let same_host = known.member.is_on(&self.host);
            let pair = Pair {
                me,
                peer,
                same_host,
                payload: longest_payload(&self.config, same_host),
                bell: bell.clone(),
                connections: self.connections,
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
        if !self.elastic {
            again.tcp().close().await;
        }
        let (threads, endpoint) = (ranks_here * threads_each, Some(endpoint));
        let healths = Arc::new(Mutex::new(healths));
        Ok(Joined { links, hosts, threads, endpoint, healths, addresses, again: Some(again) })
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

/// How many times as long a peer may take to answer on a crowded host: a thread that waits while
/// eight others have their turn is not lost. `members` are all but this process.
fn crowd(member: &Member, same_host: bool, members: &[Member]) -> u32 {
    let there = members.iter().filter(|other| other.host == member.host).count();
    // Each process has a thread that computes and one for the network.
    let threads = 2 * (there + usize::from(same_host));
    (threads as u32).div_ceil(8 * member.cores.max(1)).max(1)
}

/// The longest payload of a frame: partial results of 16-bit types travel in 32 bits, and messages
/// about members must fit, too.
pub(crate) fn longest_payload(config: &Config, same_host: bool) -> usize {
    let Tuning { segment_bytes, host_segment_bytes, .. } = config.tuning;
    let on_host = if same_host { host_segment_bytes.get() } else { 0 };
    (2 * segment_bytes.get().max(on_host)).max(MAX_MESSAGE)
}

/// Agrees with a peer on how data will travel, and begins to exchange heartbeats with it: at once,
/// because the peer does the same.
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

/// What a node needs besides its driver while it is part of a job.
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
            runtime.shutdown_timeout(LETTING_GO);
        });
        let _ = farewell.join();
    }
}

impl Drop for Network {
    fn drop(&mut self) {
        self.leave();
    }
}
