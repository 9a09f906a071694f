//! From an address to a connection with every peer.
//!
//! 1. Rank 0 listens; every other rank connects to it and says hello.
//! 2. When all have come, rank 0 sends everyone the table of addresses.
//! 3. Of every other pair, the higher rank connects to the lower, or else the lower to the higher
//!    ([`meeting`]).
//!
//! Every connection is QUIC with certificates on both sides ([`Identity`]), and has a *control
//! stream*, which carries the hello and, later, heartbeats. A pair that needs more connections
//! makes them later ([`Again`]).
//!
//! A process that does not belong (of another job, for another number of ranks, with a rank that is
//! taken, of another version) is told so and forgotten; the group goes on waiting for its own
//! ranks. The same happens to any process that comes when the group is complete.

use std::io::ErrorKind;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, UdpSocket};
use std::sync::Arc;
use std::time::Duration;

use farwire_proto::{Epoch, Peer, VERSION};
use quinn::{Connection, Endpoint, RecvStream, Runtime, SendStream, ServerConfig};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout, timeout_at};

use super::again::{Again, Expected, Ticket};
use super::beginning::Note;
use super::calling::Caller;
use super::env::{self, Place};
use super::gathering::{Gathering, Newcomer};
use super::identity::{Identity, IdentityError};
use super::job::JobName;
use super::refusals::Refusals;
use super::tunnel::{self, Tunnels};
use super::{beginning, door, held_port, meeting};
use crate::link::Boxed;
use crate::link::negotiation::Control;
use crate::quic::batches::Batches;
use crate::quic::transport::{Transport, widen};
use crate::settings::Later;
use crate::tcp::port::{TcpPort, TcpSettings};

/// How long to wait before calling rank 0 again, if it was lost or has no place yet.
const RETRY: Duration = Duration::from_millis(100);
/// How long one hello may take.
const HELLO_TIMEOUT: Duration = Duration::from_secs(10);
/// The longest message, apart from the table of ranks.
pub(super) const MAX_MESSAGE: usize = 16 << 10;
/// The longest entry of the table of ranks, which has one for each rank.
const MAX_ENTRY: usize = 512;
/// The longest name of a host, in bytes.
pub(crate) const MAX_HOST: usize = 48;

/// A connection to a peer that has proven who it is.
#[derive(Debug)]
pub(crate) struct Acquaintance {
    pub(crate) connection: Connection,
    pub(crate) to: SendStream,
    pub(crate) from: RecvStream,
    pub(crate) member: Member,
    /// Whether this process has called the other, and so knows a way there.
    pub(crate) called: bool,
}

impl Acquaintance {
    /// Leaves a peer that has been told why: waits until it has read that, but only for a moment.
    pub(crate) async fn part(mut self) {
        let _ = self.to.finish();
        let _ = timeout(Duration::from_secs(1), self.to.stopped()).await;
    }
}

impl Control for Acquaintance {
    fn send<'a>(&'a mut self, message: &'a [u8]) -> Boxed<'a, Result<(), String>> {
        Box::pin(write_bytes(&mut self.to, message))
    }

    fn recv(&mut self) -> Boxed<'_, Result<Vec<u8>, String>> {
        Box::pin(read_bytes(&mut self.from, MAX_MESSAGE))
    }
}

/// What a process says first.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Hello {
    /// Read before the rest, which another version may lay out differently.
    version: u8,
    job: JobName,
    /// What all processes of a job must agree on, in lines.
    agree_on: String,
    /// What a process that joins must agree on, too.
    #[serde(default)]
    agree_later: Option<String>,
    world: u32,
    epoch: u32,
    /// Random: tells a process that comes again from another that claims the same rank.
    pub(super) process: u64,
    pub(super) purpose: Purpose,
    pub(super) member: Member,
}

/// Why a process says hello.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Purpose {
    /// It is one of those that the job starts with.
    #[default]
    Start,
    /// It wants to join a running job.
    Join,
    /// It wants to know who is in that job.
    Look,
}

/// The rank of a process that joins a running job: in its certificate, and until it gets a number.
pub(crate) const JOINER: Peer = Peer(u32::MAX);

/// Who is in a running job, and where, as one of its members knows it.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Book {
    pub(crate) epoch: u32,
    /// The number of the process that says so.
    pub(crate) here: u32,
    pub(crate) entries: Vec<Entry>,
}

/// A member, in a [`Book`].
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Entry {
    pub(crate) number: u32,
    pub(crate) process: u64,
    pub(crate) member: Member,
    /// `None` for the member that says so: it is where the connection leads.
    pub(crate) address: Option<SocketAddr>,
}

/// What the others need to know of a process.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Member {
    pub(crate) rank: u32,
    /// Differs between hosts. (Equal ones are only a reason to try shared memory.)
    pub(crate) host: String,
    /// Processors of that host that it may use.
    pub(crate) cores: u32,
}

impl Member {
    /// Whether it says that it is on the host of this name. A process whose host has no name is on
    /// its own.
    pub(crate) fn is_on(&self, host: &str) -> bool {
        !self.host.is_empty() && self.host == host
    }
}

#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Answer {
    /// All members and their addresses, by rank; rank 0's address is where the connection already
    /// is.
    Welcome(Vec<(Member, Option<SocketAddr>)>),
    /// Your hello has been heard; wait.
    Heard,
    /// Who I am.
    Member(Member),
    /// You are refused, for this reason.
    Refused(String),
    /// Who is in the job, for one that wants to join.
    Book(Book),
}

/// Where and how a process joins.
#[derive(Debug)]
pub(crate) struct Terms<'a> {
    pub(crate) place: &'a Place,
    pub(crate) job: &'a JobName,
    pub(crate) agree_on: &'a str,
    pub(crate) agree_later: &'a Later,
    /// This process's name for its host.
    pub(crate) host: &'a str,
    pub(crate) epoch: Epoch,
    /// Where rank 0 listens.
    pub(crate) master: SocketAddr,
    /// Where any other rank listens; 0 for any port.
    pub(crate) port: u16,
    /// The network interface to use; `None` for whichever leads to a peer.
    pub(crate) interface: Option<&'a str>,
    /// Whether a launcher keeps this process's port free for it.
    pub(crate) port_is_held: bool,
    /// Where this process notes how far it is, if a launcher replaces ranks.
    pub(crate) beginning: Option<&'a beginning::Place>,
    /// Whether it also listens on TCP, and how.
    pub(crate) tcp: Option<&'a TcpSettings>,
    /// How long joining may take.
    pub(crate) timeout: Duration,
    /// Where processes go that want to join later, if they may.
    pub(crate) lobby: Option<mpsc::Sender<Newcomer>>,
}

/// Why a process could not join.
#[derive(Debug, thiserror::Error)]
pub enum JoinError {
    /// The address of rank 0 could not be resolved.
    #[error(
        "could not resolve {host}: {error}; give an address that this machine can find (MASTER_ADDR, or \
         the address to join)"
    )]
    Resolve {
        /// What was given.
        host: String,
        /// What the system said.
        error: std::io::Error,
    },
    /// This process could not listen.
    #[error(
        "could not listen on UDP {address}: {error}; end what uses the port, perhaps another job, or set \
         MASTER_PORT (rank 0) or FARWIRE_PORT (others) to another"
    )]
    Listen {
        /// The address.
        address: SocketAddr,
        /// What the system said.
        error: std::io::Error,
    },
    /// No such network interface.
    #[error(
        "there is no interface {name:?} with an {family} address, as rank 0 has; set \
         FARWIRE_INTERFACE to one of these: {there}"
    )]
    Interface {
        /// What was given.
        name: String,
        /// Which kind of address it should have.
        family: &'static str,
        /// All interfaces, with their addresses.
        there: String,
    },
    /// The interface leads to no other machine.
    #[error(
        "interface {name:?} does not leave this machine, and rank 0 is on another, at {master}; set \
         FARWIRE_INTERFACE to one that leads there, or leave it unset"
    )]
    Loopback {
        /// What was given.
        name: String,
        /// Where rank 0 is.
        master: IpAddr,
    },
    /// Rank 0, or a peer that it named, was not reached.
    #[error(
        "{here} could not reach {peer} at {address} within {waited:?}: {last}; check MASTER_ADDR and \
         MASTER_PORT, that all ranks have the same token, and that one of the two can reach the other: \
         let UDP through to that port, or set FARWIRE_PORT of {here} and let it through there"
    )]
    Unreachable {
        /// This rank.
        here: Peer,
        /// The other.
        peer: Peer,
        /// Where it should be.
        address: SocketAddr,
        /// How long it was tried.
        waited: Duration,
        /// What happened last.
        last: String,
    },
    /// Some ranks did not come.
    #[error(
        "{missing} did not come within {waited:?}{refused}; look at their output, and check that they \
         have the same MASTER_ADDR, MASTER_PORT, token and job"
    )]
    Missing {
        /// Their names.
        missing: String,
        /// How long they were waited for.
        waited: Duration,
        /// A clause about processes that came and were refused; empty if there were none.
        refused: String,
    },
    /// Rank 0, or another rank that was called, refused this one.
    #[error("{by} refused {here}: {reason}")]
    Refused {
        /// The rank that refused.
        by: Peer,
        /// The rank that it refused.
        here: Peer,
        /// Why.
        reason: String,
    },
    /// A running job refused this process.
    #[error("was refused at {address}: {reason}")]
    TurnedAway {
        /// Where it asked.
        address: SocketAddr,
        /// Why.
        reason: String,
    },
    /// A running job did not let this process in.
    #[error(
        "was not let in at {address} within {waited:?}: {last}; check that the job runs, lets others \
         join (FARWIRE_ELASTIC or `--elastic`), and has the same token and job name"
    )]
    NotAdmitted {
        /// Where it asked.
        address: SocketAddr,
        /// How long it waited.
        waited: Duration,
        /// What happened last.
        last: String,
    },
    /// A connection failed in the middle.
    #[error("lost {peer} while joining: {reason}")]
    Lost {
        /// The peer.
        peer: Peer,
        /// How it was lost.
        reason: String,
    },
    /// The certificate could not be made.
    #[error("{0}")]
    Identity(String),
    /// Two processes have no link in common, or this one cannot get what a link needs.
    #[error("{0}")]
    Link(String),
}

impl From<IdentityError> for JoinError {
    fn from(error: IdentityError) -> Self {
        Self::Identity(error.to_string())
    }
}

/// The address of rank 0.
pub(crate) async fn resolve(place: &Place) -> Result<SocketAddr, JoinError> {
    let host = place.master_host.clone();
    let failed = |error| JoinError::Resolve { host: host.clone(), error };
    let found = tokio::net::lookup_host((&host[..], place.master_port)).await.map_err(failed)?;
    let mut found: Vec<_> = found.collect();
    found.sort_by_key(SocketAddr::is_ipv6);
    found.into_iter().next().ok_or_else(|| failed(std::io::Error::other("it has no address")))
}

/// A group that is complete, as one of its processes sees it.
#[derive(Debug)]
pub(crate) struct Group {
    pub(crate) endpoint: Endpoint,
    /// A connection to every other rank, by rank.
    pub(crate) peers: Vec<Option<Acquaintance>>,
    pub(crate) again: Arc<Again>,
    /// What the others know of this process.
    pub(crate) member: Member,
}

/// Joins the group.
pub(crate) async fn join(
    terms: &Terms<'_>,
    identity: Arc<Identity>,
    transport: Transport,
) -> Result<Group, JoinError> {
    let &Terms { place, master, timeout, .. } = terms;
    let deadline = Instant::now() + timeout;
    let (me, world) = (place.rank, place.world);
    let Ears { endpoint, server, socket, tcp } = listen(terms, &identity).await?;
    let hello = Hello::new(terms, Purpose::Start)?;
    let (door, mut newcomers) = mpsc::channel(world.len());
    let (side_door, from_below) = mpsc::channel(world.len());
    let refusals = Arc::new(Refusals::default());
    let expected = Arc::new(Expected::default());
    let listener = Listener {
        identity: identity.clone(),
        hello: hello.clone(),
        refusals: refusals.clone(),
        expected: expected.clone(),
        door: door.clone(),
        side_door,
        lobby: terms.lobby.clone(),
        agree_later: terms.agree_later.clone(),
    };
    listener.keep(endpoint.clone(), server, transport, tcp.tunnels().clone());

    let caller = Arc::new(Caller {
        endpoint: endpoint.clone(),
        client: identity.client_config()?,
        transport,
        tcp,
        identity,
        hello: hello.clone(),
        deadline,
        patience: timeout,
    });
    let meets = || {
        if let Some(beginning) = terms.beginning {
            beginning.note(Note::Meets);
        }
    };
    let (mut first, mut table) = (None, Vec::new());
    if me != Peer(0) {
        let limit = MAX_MESSAGE + MAX_ENTRY * world.len();
        // A launcher that restarts lost ranks may restart rank 0, and even a group that was
        // complete, until all ranks of a group have found each other.
        let may_come_again = |error: &JoinError| {
            let again = match error {
                JoinError::Lost { .. } => true,
                JoinError::Refused { reason, .. } => reason == COMPLETE,
                _ => false,
            };
            again
                && Instant::now() < deadline
                && terms.beginning.is_some_and(beginning::Place::is_blank)
        };
        let (mut there, answer) = loop {
            let called = async {
                let mut there = caller.connect(Peer(0), master).await?;
                let answer = caller.answer(Peer(0), &mut there, limit).await?;
                Ok((there, answer))
            };
            match called.await {
                Err(error) if may_come_again(&error) => sleep(RETRY).await,
                called => break called?,
            }
        };
        table = match answer {
            Answer::Welcome(table) if table.len() == world.len() => table,
            _ => return Err(JoinError::Lost { peer: Peer(0), reason: NONSENSE.to_owned() }),
        };
        meets();
        there.member = table[0].0.clone();
        first = Some(there);
    }
    meeting::knock(&socket, me, &table);
    let tunnels = caller.tcp.tunnels();
    let below = meeting::lower(caller.clone(), &table, from_below);
    let above = async {
        let mut gathering = Gathering::new(me, world, door.clone(), refusals.clone());
        let mut calls = meeting::Calls::new(&caller, &table, &door);
        let complete = gathering.complete(&mut newcomers, &mut calls, deadline).await;
        if let Err(missing) = complete {
            let error = JoinError::Missing { missing, waited: timeout, refused: refusals.clause() };
            refuse_all(&mut gathering.peers, &error.to_string()).await;
            return Err(error);
        }
        newcomers.close();
        while let Ok(Newcomer { known, .. }) = newcomers.try_recv() {
            turn_away(known, COMPLETE.to_owned(), &refusals);
        }
        let mut peers = gathering.peers;
        if me == Peer(0) {
            meets();
        }
        if let Err(error) = welcome(&mut peers, me, &hello.member, tunnels, deadline).await {
            refuse_all(&mut peers, &error.to_string()).await;
            return Err(error);
        }
        Ok(peers)
    };
    // At the same time: otherwise each rank would wait for the one before it.
    let (below, mut peers) = tokio::try_join!(below, above)?;
    for (peer, there) in below.into_iter().chain(first.map(|first| (Peer(0), first))) {
        peers[peer.index()] = Some(there);
    }
    let (again, member) = (Arc::new(Again::new(caller, expected)), hello.member);
    Ok(Group { endpoint, peers, again, member })
}

impl Hello {
    /// This process's hello.
    pub(super) fn new(terms: &Terms<'_>, purpose: Purpose) -> Result<Self, JoinError> {
        let mut random = [0; 8];
        aws_lc_rs::rand::fill(&mut random)
            .map_err(|_| JoinError::Identity("no randomness".to_owned()))?;
        let cores = std::thread::available_parallelism().map_or(1, |cores| cores.get() as u32);
        Ok(Self {
            version: VERSION,
            job: terms.job.clone(),
            agree_on: terms.agree_on.to_owned(),
            agree_later: terms.agree_later.get().cloned(),
            world: terms.place.world.get(),
            epoch: terms.epoch.0,
            // Processes that a job starts with are later named by their ranks, so this is never a
            // rank.
            process: u64::from_le_bytes(random) | 1 << 63,
            purpose,
            member: Member { rank: terms.place.rank.0, host: terms.host.to_owned(), cores },
        })
    }
}

/// Where a process listens.
pub(super) struct Ears {
    pub(super) endpoint: Endpoint,
    /// How it answers those that connect.
    pub(super) server: ServerConfig,
    /// The endpoint's socket once more, for what is not QUIC.
    pub(super) socket: UdpSocket,
    pub(super) tcp: Arc<TcpPort>,
}

/// Listens; rank 0 does so where all others look for it.
pub(super) async fn listen(terms: &Terms<'_>, identity: &Arc<Identity>) -> Result<Ears, JoinError> {
    let master = terms.master;
    let any = match (master.ip().is_loopback(), terms.interface, master.is_ipv6()) {
        (true, ..) => master.ip(),
        (false, Some(name), _) => match address_of(name, master.is_ipv6())? {
            address if address.is_loopback() => {
                return Err(JoinError::Loopback { name: name.to_owned(), master: master.ip() });
            }
            address => address,
        },
        (false, None, true) => IpAddr::V6(Ipv6Addr::UNSPECIFIED),
        (false, None, false) => IpAddr::V4(Ipv4Addr::UNSPECIFIED),
    };
    let first = terms.place.rank == Peer(0);
    let address = SocketAddr::new(any, if first { master.port() } else { terms.port });
    let mut server = identity.server_config()?;
    door::limit_incoming(&mut server);
    let tunnels = Arc::<Tunnels>::default();
    let listen = |(socket, listener): Bound| {
        widen(&socket);
        let (runtime, same) = (Arc::new(quinn::TokioRuntime), socket.try_clone()?);
        let udp = Batches::new(runtime.wrap_udp_socket(socket)?);
        let socket = Arc::new(tunnel::Socket { udp, tunnels: tunnels.clone() });
        let (config, server) = (Transport::endpoint(), Some(server.clone()));
        let endpoint = Endpoint::new_with_abstract_socket(config, server, socket, runtime)?;
        Ok((endpoint, same, listener))
    };
    let (endpoint, socket, listener) = bind_soon(address, terms)
        .await
        .and_then(listen)
        .map_err(|error| JoinError::Listen { address, error })?;
    let settings = terms.tcp.cloned().unwrap_or_default();
    let tcp = TcpPort::open(listener, any, identity.clone(), settings, tunnels.clone())?;
    Ok(Ears { endpoint, server, socket, tcp })
}

/// Sockets for UDP and TCP, with the same port. TCP may be missing: others can still be connected
/// to.
type Bound = (UdpSocket, Result<TcpListener, String>);

/// How long to wait for a port that is in use. Its last user may be about to let go of it: this
/// process, which has just left another job, or one that was killed.
const PATIENCE: Duration = Duration::from_secs(1);

async fn bind_soon(address: SocketAddr, terms: &Terms<'_>) -> std::io::Result<Bound> {
    let started = Instant::now();
    loop {
        match bind(address, terms) {
            Err(error) if error.kind() == ErrorKind::AddrInUse && started.elapsed() < PATIENCE => {
                sleep(Duration::from_millis(20)).await;
            }
            bound => return bound,
        }
    }
}

fn bind(address: SocketAddr, terms: &Terms<'_>) -> std::io::Result<Bound> {
    const TRIES: usize = 16;
    let mut tries = 0;
    loop {
        let socket = held_port::bind(address, terms.port_is_held)?;
        if terms.tcp.is_none() {
            return Ok((socket, Err("TCP is not among its links".to_owned())));
        }
        let bound = socket.local_addr()?;
        let listener = TcpListener::bind(bound);
        tries += 1;
        // Another process may have the TCP port of this number. If any port will do, take another.
        if listener.is_ok() || address.port() != 0 || tries == TRIES {
            let why = |error| format!("could not listen on TCP {bound}: {error}");
            return Ok((socket, listener.map_err(why)));
        }
    }
}

/// The address of a network interface, of the family that rank 0's address has.
fn address_of(interface: &str, ipv6: bool) -> Result<IpAddr, JoinError> {
    let list = if_addrs::get_if_addrs().unwrap_or_default();
    let fits = |other: &&if_addrs::Interface| {
        other.name == interface && other.ip().is_ipv6() == ipv6 && !other.is_link_local()
    };
    if let Some(found) = list.iter().find(fits) {
        return Ok(found.ip());
    }
    let there: Vec<_> =
        list.iter().map(|other| format!("{} ({})", other.name, other.ip())).collect();
    Err(JoinError::Interface {
        name: interface.to_owned(),
        family: if ipv6 { "IPv6" } else { "IPv4" },
        there: there.join(", "),
    })
}

/// Everyone has come: rank 0 sends the table, the others say who they are.
async fn welcome(
    peers: &mut [Option<Acquaintance>],
    me: Peer,
    member: &Member,
    tunnels: &Tunnels,
    deadline: Instant,
) -> Result<(), JoinError> {
    let entry = |peer: &Option<Acquaintance>| match peer {
        None => (member.clone(), None),
        Some(peer) => (peer.member.clone(), Some(tunnels.real(peer.connection.remote_address()))),
    };
    let answer = if me == Peer(0) {
        Answer::Welcome(peers.iter().map(entry).collect())
    } else {
        Answer::Member(member.clone())
    };
    let answer = encode(&answer).map_err(JoinError::Identity)?;
    for (rank, peer) in peers.iter_mut().enumerate().skip(me.index() + 1) {
        let Some(peer) = peer else { continue };
        let sent = match timeout_at(deadline, peer.to.write_all(&answer)).await {
            Ok(sent) => sent.map_err(|error| error.to_string()),
            Err(_) => Err("it did not read the table of ranks in time".to_owned()),
        };
        sent.map_err(|reason| JoinError::Lost { peer: Peer(rank as u32), reason })?;
    }
    Ok(())
}

async fn refuse(mut peer: Acquaintance, reason: &str) {
    let _ = write(&mut peer.to, &Answer::Refused(reason.to_owned())).await;
    peer.part().await;
}

async fn refuse_all(peers: &mut [Option<Acquaintance>], reason: &str) {
    let mut told = JoinSet::new();
    for peer in peers.iter_mut().filter_map(Option::take) {
        let reason = reason.to_owned();
        told.spawn(async move { refuse(peer, &reason).await });
    }
    told.join_all().await;
}

/// Refuses a process, without waiting for it.
pub(super) fn turn_away(known: Box<Acquaintance>, reason: String, refusals: &Refusals) {
    refusals.add(known.connection.remote_address(), &reason);
    tokio::spawn(async move { refuse(*known, &reason).await });
}

pub(crate) const NONSENSE: &str = "it answered something unexpected";
pub(super) const OTHER_TOKEN: &str = "it has another token; give all ranks the same FARWIRE_TOKEN";
const COMPLETE: &str = "the group is complete and running";
const CLOSED: &str = "this job does not let others join; start its ranks with FARWIRE_ELASTIC=1, \
                      or with `--elastic`";
const CROWDED: &str = "too many processes are waiting to join; try again later";
const LEAVING: &str = "it is leaving the job; call another member";

/// Hears the processes that connect. Those that the job starts with go through a door, as long as
/// somebody listens there; those that join later go to the lobby, if there is one.
pub(super) struct Listener {
    pub(super) identity: Arc<Identity>,
    /// What this process says of itself.
    pub(super) hello: Hello,
    pub(super) refusals: Arc<Refusals>,
    pub(super) expected: Arc<Expected>,
    /// For higher ranks. Once nobody listens at its other end, the group is complete.
    pub(super) door: mpsc::Sender<Newcomer>,
    /// For lower ranks.
    pub(super) side_door: mpsc::Sender<Newcomer>,
    pub(super) lobby: Option<mpsc::Sender<Newcomer>>,
    /// Known later than `hello`.
    pub(super) agree_later: Later,
}

impl Listener {
    /// Answers everyone who connects, for as long as the endpoint lives.
    pub(super) fn keep(
        self,
        endpoint: Endpoint,
        server: ServerConfig,
        transport: Transport,
        tunnels: Arc<Tunnels>,
    ) {
        let strangers = self.refusals.clone();
        let tell = move |from| strangers.add_stranger(from, OTHER_TOKEN);
        let listener = Arc::new(self);
        let pass = move |connection: Connection| {
            tunnels.prove(connection.remote_address());
            tokio::spawn(listener.clone().hear(connection));
        };
        tokio::spawn(door::keep(endpoint, server, transport, pass, tell));
    }

    /// Hears what a process of the cluster has to say.
    async fn hear(self: Arc<Self>, connection: Connection) {
        let from = connection.remote_address();
        match timeout(HELLO_TIMEOUT, self.receive(connection)).await {
            Ok(Ok(None)) => {}
            Ok(Ok(Some(newcomer))) if newcomer.purpose == Purpose::Start => {
                let is_lower = newcomer.known.member.rank < self.hello.member.rank;
                let door = if is_lower { &self.side_door } else { &self.door };
                let sent = door.send(newcomer).await;
                if let Err(mpsc::error::SendError(Newcomer { known, .. })) = sent {
                    turn_away(known, COMPLETE.to_owned(), &self.refusals);
                }
            }
            Ok(Ok(Some(newcomer))) => {
                use mpsc::error::TrySendError::{Closed, Full};
                let Some(lobby) = &self.lobby else { return };
                let (known, reason) = match lobby.try_send(newcomer) {
                    Ok(()) => return,
                    Err(Full(newcomer)) => (newcomer.known, CROWDED),
                    Err(Closed(newcomer)) => (newcomer.known, LEAVING),
                };
                turn_away(known, reason.to_owned(), &self.refusals);
            }
            Ok(Err(reason)) => self.refusals.add(from, &reason),
            Err(_) => self.refusals.add(from, "it said nothing"),
        }
    }

    /// Reads a newcomer's hello; `None` if it is an acquaintance with a ticket. An error says why
    /// the process was refused, which it has been told.
    async fn receive(&self, connection: Connection) -> Result<Option<Newcomer>, String> {
        let (mut to, mut from) = connection.accept_bi().await.map_err(|error| error.to_string())?;
        let text = read_bytes(&mut from, MAX_MESSAGE).await?;
        let judgement = match serde_json::from_slice::<Ticket>(&text) {
            Ok(ticket) => match self.expected.take(&ticket) {
                Some((peer, waiting)) if self.identity.is_of_this_job(&connection, peer) => {
                    write(&mut to, &Answer::Heard).await?;
                    let _ = waiting.send(connection); // unless it has waited too long
                    return Ok(None);
                }
                _ => Err("its ticket is not of this process".to_owned()),
            },
            Err(_) => {
                let mut mine = self.hello.clone();
                mine.agree_later = self.agree_later.get().cloned();
                judge(&text, &connection, &self.identity, &mine, self.lobby.is_some())
            }
        };
        match judgement {
            Ok(Hello { process, purpose, member, .. }) => {
                write(&mut to, &Answer::Heard).await?;
                let known = Acquaintance { connection, to, from, member, called: false };
                let (process, known) = (Some(process), Box::new(known));
                Ok(Some(Newcomer { process, purpose, known, heard_before: None }))
            }
            Err(reason) => {
                let member = self.hello.member.clone(); // it is not known who it is
                let known = Acquaintance { connection, to, from, member, called: false };
                refuse(known, &reason).await;
                Err(reason)
            }
        }
    }
}

/// Reads any bytes as each of the messages that come before anything is agreed on. Fuzzing checks
/// that no bytes make this panic.
pub(crate) fn read_anything(bytes: &[u8]) {
    let _ = serde_json::from_slice::<Ticket>(bytes);
    if let Ok(answer) = serde_json::from_slice::<Answer>(bytes) {
        encode(&answer).expect("what was read can be written");
    }
    if let Ok(hello) = serde_json::from_slice::<Hello>(bytes) {
        encode(&hello).expect("what was read can be written");
        let (mut mine, who) = (hello.clone(), Peer(hello.member.rank).to_string());
        assert_eq!(disagreement(&hello, &mine, &who), None);
        mine.job = JobName::new("another").expect("it is short");
        mine.agree_on += "\nmore";
        disagreement(&hello, &mine, &who).expect("they differ");
    }
}

/// A hello from a process that may take part, or why it may not.
fn judge(
    text: &[u8],
    connection: &Connection,
    identity: &Identity,
    mine: &Hello,
    may_join: bool,
) -> Result<Hello, String> {
    #[derive(Deserialize)]
    struct Version {
        version: u8,
    }
    let here = Peer(mine.member.rank);
    let Version { version } =
        serde_json::from_slice(text).map_err(|error| format!("its hello is invalid: {error}"))?;
    if version != mine.version {
        return Err(format!(
            "it speaks wire version {version}, {here} speaks {}; run the same farwire on all",
            mine.version
        ));
    }
    let hello: Hello =
        serde_json::from_slice(text).map_err(|error| format!("its hello is invalid: {error}"))?;
    let there = Peer(hello.member.rank);
    let who = match there {
        JOINER => "a process that wants to join".to_owned(),
        there => there.to_string(),
    };
    if hello.purpose != Purpose::Start && !may_join {
        return Err(CLOSED.to_owned());
    }
    if let Some(reason) = disagreement(&hello, mine, &who) {
        return Err(reason);
    }
    if hello.purpose != Purpose::Start && there != JOINER {
        return Err(format!("{there} has a rank; only a process without one can join"));
    }
    let starts = hello.purpose == Purpose::Start;
    if starts && hello.world != mine.world {
        return Err(format!(
            "{there} was started for {} ranks, {here} for {}; give all ranks of a job the same world size, \
             and every job a name (FARWIRE_JOB)",
            hello.world, mine.world
        ));
    }
    if starts && there.0 >= mine.world {
        return Err(format!("{there} is not below the world size, {}", mine.world));
    }
    if hello.epoch != mine.epoch {
        return Err(format!("{who} is of generation {}, {here} of {}", hello.epoch, mine.epoch));
    }
    if !identity.is_certified(connection, there) {
        return Err(format!("its certificate is not for {who}"));
    }
    if !identity.is_of_this_job(connection, there) {
        return Err("its certificate is not for this job".to_owned());
    }
    if hello.member.host.len() > MAX_HOST {
        return Err("the name of its host is too long".to_owned());
    }
    Ok(hello)
}

/// What a process and this one disagree on, if anything.
fn disagreement(hello: &Hello, mine: &Hello, who: &str) -> Option<String> {
    let here = Peer(mine.member.rank);
    if hello.job != mine.job {
        return Some(format!(
            "{who} belongs to {}, {here} to {}; give all ranks of a job the same FARWIRE_JOB, and every \
             job a MASTER_PORT of its own",
            hello.job, mine.job
        ));
    }
    let later = hello.agree_later.as_deref().zip(mine.agree_later.as_deref());
    let (theirs, ours) = difference(&hello.agree_on, &mine.agree_on)
        .or_else(|| later.and_then(|(theirs, ours)| difference(theirs, ours)))?;
    Some(format!(
        "{who} has {theirs}, {here} has {ours}; start all ranks of a job with the same settings"
    ))
}

/// The first line in which two texts differ, as it stands in each.
fn difference(theirs: &str, ours: &str) -> Option<(String, String)> {
    let shown = |line: Option<&str>| line.map_or("nothing".to_owned(), env::shown);
    let (mut theirs, mut ours) = (theirs.lines(), ours.lines());
    loop {
        match (theirs.next(), ours.next()) {
            (None, None) => return None,
            (there, here) if there == here => {}
            (there, here) => return Some((shown(there), shown(here))),
        }
    }
}

/// A message: its length, then JSON.
fn encode(message: &impl Serialize) -> Result<Vec<u8>, String> {
    let text = serde_json::to_vec(message).map_err(|error| error.to_string())?;
    let length = u32::try_from(text.len()).map_err(|error| error.to_string())?;
    Ok([&length.to_le_bytes()[..], &text].concat())
}

/// Writes a message.
pub(super) async fn write(to: &mut SendStream, message: &impl Serialize) -> Result<(), String> {
    to.write_all(&encode(message)?).await.map_err(|error| error.to_string())
}

/// Reads what [`write()`] wrote, if it is not too long.
pub(super) async fn read<T: DeserializeOwned>(from: &mut RecvStream) -> Result<T, String> {
    read_up_to(from, MAX_MESSAGE).await
}

pub(super) async fn read_up_to<T: DeserializeOwned>(
    from: &mut RecvStream,
    limit: usize,
) -> Result<T, String> {
    serde_json::from_slice(&read_bytes(from, limit).await?).map_err(|error| error.to_string())
}

/// Writes the bytes of a message, and their length before them.
async fn write_bytes(to: &mut SendStream, message: &[u8]) -> Result<(), String> {
    let length = u32::try_from(message.len()).map_err(|error| error.to_string())?;
    let message = [&length.to_le_bytes()[..], message].concat();
    to.write_all(&message).await.map_err(|error| error.to_string())
}

async fn read_bytes(from: &mut RecvStream, limit: usize) -> Result<Vec<u8>, String> {
    let mut length = [0; 4];
    from.read_exact(&mut length).await.map_err(|error| error.to_string())?;
    let length = u32::from_le_bytes(length) as usize;
    if length > limit {
        return Err(format!("a message of {length} bytes is longer than {limit}"));
    }
    let mut text = vec![0; length];
    from.read_exact(&mut text).await.map_err(|error| error.to_string())?;
    Ok(text)
}

/// A process's name for its host, unless it is told another: the same for all processes between two
/// boots of one machine.
pub(crate) fn host_id() -> String {
    std::fs::read_to_string("/proc/sys/kernel/random/boot_id")
        .map(|id| id.trim().to_owned())
        .unwrap_or_default()
}

#[cfg(test)]
mod tests;
