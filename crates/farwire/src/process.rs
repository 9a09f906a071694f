//! Ranks as processes: joining a job, and leaving it.

use std::net::SocketAddr;
use std::num::NonZeroU32;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use farwire_proto::{Config, Engine, FAULT_LEN, Peer};
use serde::{Deserialize, Serialize};
use tokio::runtime::Runtime;

use crate::comm::Communicator;
use crate::driver::Driver;
use crate::error::Error;
use crate::join::env::{EnvError, Place};
use crate::join::identity::Identity;
use crate::join::rendezvous::{self, Acquaintance, Hello, JoinError};
use crate::join::same_host::{self, Offer};
use crate::link::Link;
use crate::node::Node;
use crate::observe::{Observer, metrics};
use crate::quic::congestion::Congestion;
use crate::quic::control::{self, Beats, Health};
use crate::quic::link::QuicLink;
use crate::shm::bell::Bell;
use crate::shm::link::SharedLink;
use crate::token::Token;

/// Settings that fit a situation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Preset {
    /// One room or one data centre: a silent peer is lost after 2 s. (Where ranks outnumber a host's cores by more than four, those on it get more time in proportion.)
    #[default]
    Lan,
    /// Far apart: a silent peer is lost after 10 s.
    Wan,
}

impl Preset {
    fn beats(self) -> Beats {
        match self {
            Self::Lan => Beats { every: Duration::from_millis(200), lost_after: Duration::from_millis(1800) },
            Self::Wan => Beats { every: Duration::from_secs(1), lost_after: Duration::from_secs(9) },
        }
    }
}

/// What carries data between processes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LinkChoice {
    /// Shared memory where two processes can share it, QUIC elsewhere.
    #[default]
    Auto,
    /// Shared memory, or an error.
    Shm,
    /// QUIC, even on one host.
    Quic,
}

/// How to join a job. Made by [`Communicator::builder`].
#[derive(Clone, Debug, Default)]
pub struct Builder {
    place: Option<Place>,
    token: Option<Token>,
    preset: Preset,
    link: Option<LinkChoice>,
    port: Option<u16>,
    patience: Option<Duration>,
    config: Config,
}

impl Communicator {
    /// Joins the job that this process was started in, by the environment that its launcher set: `farwire launch`, torchrun, mpirun, srun, a Kubernetes indexed job, or
    /// `RANK`, `WORLD_SIZE`, `MASTER_ADDR` and `MASTER_PORT` set by hand.
    ///
    /// Blocks until all ranks have come. `FARWIRE_TOKEN` or `FARWIRE_TOKEN_FILE` has the cluster token; on loopback none is needed. `FARWIRE_LINK` is `auto`, `shm` or
    /// `quic`; `FARWIRE_PRESET` is `lan` or `wan`; `FARWIRE_PORT` fixes this rank's UDP port;
    /// `FARWIRE_CONGESTION` is `model` (the default: random loss is not taken for congestion) or `cubic`.
    ///
    /// To see what happens: `FARWIRE_METRICS=127.0.0.1:9464` serves counters to Prometheus, `FARWIRE_TRACE=trace.json` writes a trace that Perfetto opens, and
    /// `FARWIRE_FLIGHT_DIR` is where a failing rank leaves its flight record ([`flight`](crate::flight)).
    pub fn from_env() -> Result<Self, Error> {
        Self::builder().join()
    }

    /// Joins a job with settings of one's own; what is not set comes from the environment.
    pub fn builder() -> Builder {
        Builder::default()
    }
}

impl Builder {
    /// Where this process stands, rather than what the environment says.
    pub fn place(self, place: Place) -> Self {
        Self { place: Some(place), ..self }
    }

    /// The cluster token, rather than the environment's.
    pub fn token(self, token: Token) -> Self {
        Self { token: Some(token), ..self }
    }

    /// Settings that fit the situation.
    pub fn preset(self, preset: Preset) -> Self {
        Self { preset, ..self }
    }

    /// What carries data, rather than what the environment says.
    pub fn link(self, link: LinkChoice) -> Self {
        Self { link: Some(link), ..self }
    }

    /// How long to wait for the other ranks; a minute if not set.
    pub fn patience(self, patience: Duration) -> Self {
        Self { patience: Some(patience), ..self }
    }

    /// Deadlines, segment sizes and what links are like. The same on all ranks.
    pub fn config(self, config: Config) -> Self {
        Self { config, ..self }
    }

    /// Joins, and blocks until all ranks have come.
    pub fn join(self) -> Result<Communicator, Error> {
        let settings = self.settings()?;
        // What cannot be had is found out before anyone waits for this rank.
        let observer = Observer::from_env(settings.place.rank, settings.place.world, settings.config.epoch)?;
        let metrics = match metrics::address()? {
            None => None,
            Some(address) => Some(metrics::listen(address).map_err(|source| Error::System {
                what: "could not listen on the address in FARWIRE_METRICS",
                source,
            })?),
        };
        let bell =
            Bell::new().map_err(|source| Error::System { what: "could not get shared memory", source })?;
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .thread_name("farwire-net")
            .enable_all()
            .build()
            .map_err(|source| Error::System { what: "could not start the network thread", source })?;
        // On a thread of its own, because the caller may be inside a runtime of its own.
        let joined = std::thread::scope(|scope| {
            let join = scope.spawn(|| runtime.block_on(settings.join(&bell, &runtime)));
            join.join().expect("joining does not panic")
        });
        let (links, threads, network) = match joined {
            Ok(joined) => joined,
            Err(error) => {
                runtime.shutdown_background();
                return Err(error.into());
            }
        };
        let engine = Engine::new(settings.place.rank, settings.place.world, settings.config);
        let mut network = network;
        let handle = runtime.handle().clone();
        network.runtime = Some(runtime);
        let driver = Driver::new(engine, links, longest_payload(&settings.config), observer);
        let node = Node::start(driver, bell, threads, Some(network))
            .map_err(|source| Error::System { what: "could not start a thread", source })?;
        if let Some(listener) = metrics {
            handle.spawn(metrics::serve(listener, settings.place.rank.0, node.downgrade()));
        }
        Communicator::of_world(node)
    }

    fn settings(self) -> Result<Settings, Error> {
        let place = match self.place {
            Some(place) => place,
            None => Place::from_env()?,
        };
        let variable = |name| std::env::var_os(name).map(|value| value.to_string_lossy().into_owned());
        let wrong = |name, value: &str, what| EnvError::Value { name, value: value.to_owned(), what };
        let link = match (self.link, variable("FARWIRE_LINK").as_deref()) {
            (Some(link), _) => link,
            (None, None | Some("auto")) => LinkChoice::Auto,
            (None, Some("shm")) => LinkChoice::Shm,
            (None, Some("quic")) => LinkChoice::Quic,
            (None, Some(other)) => {
                return Err(wrong(
                    "FARWIRE_LINK",
                    other,
                    "auto, shm or quic (ranks in one process are made with farwire::local)",
                )
                .into());
            }
        };
        let preset = match variable("FARWIRE_PRESET").as_deref() {
            None => self.preset,
            Some("lan") => Preset::Lan,
            Some("wan") => Preset::Wan,
            Some(other) => return Err(wrong("FARWIRE_PRESET", other, "lan or wan").into()),
        };
        let congestion = Congestion::parse(variable("FARWIRE_CONGESTION").as_deref())
            .map_err(|other| wrong("FARWIRE_CONGESTION", &other, "model or cubic"))?;
        let port = match (self.port, variable("FARWIRE_PORT")) {
            (Some(port), _) => port,
            (None, None) => 0,
            (None, Some(text)) => text
                .parse()
                .map_err(|_| wrong("FARWIRE_PORT", &text, "a port from 1 to 65535, or 0 for any"))?,
        };
        let token =
            match (self.token, variable("FARWIRE_TOKEN"), variable("FARWIRE_TOKEN_FILE")) {
                (Some(token), ..) => Some(token),
                (None, Some(text), _) => Some(text.parse().map_err(|source| Error::Token { source })?),
                (None, None, Some(path)) => {
                    let token = Token::read(&PathBuf::from(path));
                    Some(token.map_err(|source| Error::System {
                        what: "could not read FARWIRE_TOKEN_FILE",
                        source,
                    })?)
                }
                (None, None, None) => None,
            };
        let patience = self.patience.unwrap_or(Duration::from_secs(60));
        let config = Config { credit: NonZeroU32::new(4).unwrap_or(NonZeroU32::MIN), ..self.config };
        Ok(Settings { place, token, preset, link, congestion, port, patience, config })
    }
}

/// A [`Builder`] with nothing left open.
#[derive(Debug)]
struct Settings {
    place: Place,
    token: Option<Token>,
    preset: Preset,
    link: LinkChoice,
    congestion: Congestion,
    port: u16,
    patience: Duration,
    config: Config,
}

type Links = Vec<Option<Box<dyn Link>>>;

impl Settings {
    async fn join(&self, bell: &Bell, runtime: &Runtime) -> Result<(Links, usize, Network), JoinError> {
        let world = self.place.world;
        if world.get() == 1 {
            let network = Network { runtime: None, endpoint: None, healths: Vec::new() };
            return Ok((vec![None], 1, network));
        }
        let master = rendezvous::resolve(&self.place).await?;
        let token = self.token_for(master)?;
        let epoch = self.config.epoch;
        let identity = Arc::new(Identity::new(&token, self.place.rank, epoch)?);
        let transport = rendezvous::transport(self.congestion);
        let joined =
            rendezvous::join(&self.place, master, self.port, epoch, identity, transport, self.patience);
        let (endpoint, peers) = joined.await?;

        let crowds: Vec<_> = peers.iter().map(|peer| crowd(peer.as_ref(), &peers)).collect();
        let busiest_here = crowds
            .iter()
            .zip(&peers)
            .filter(|(_, peer)| peer.as_ref().is_some_and(|peer| rendezvous::is_this_host(&peer.hello)));
        let crowd_here = busiest_here.map(|(crowd, _)| *crowd).max().unwrap_or(1);
        // Each pair on its own: who waits for one peer must not keep another waiting.
        let me = self.place.rank;
        let payload = longest_payload(&self.config);
        let choice = self.link;
        let negotiations: Vec<_> = peers
            .into_iter()
            .enumerate()
            .map(|(index, peer)| {
                let (bell, mut beats) = (bell.clone(), self.preset.beats());
                beats.lost_after *= crowds[index].max(crowd_here);
                let peer = peer.map(|peer| (Peer(index as u32), peer));
                peer.map(|(rank, peer)| tokio::spawn(acquaint(me, rank, peer, choice, payload, bell, beats)))
            })
            .collect();
        let (mut links, mut healths): (Links, _) = (Vec::new(), Vec::new());
        // Ranks on this host want a core each, and one more for their network threads if data goes through those.
        let (mut local_ranks, mut threads_each) = (1, 1);
        for (index, negotiation) in negotiations.into_iter().enumerate() {
            let Some(negotiation) = negotiation else {
                links.push(None);
                continue;
            };
            let peer = Peer(index as u32);
            let lost = |reason: String| JoinError::Lost { peer, reason };
            let met = negotiation.await.map_err(|error| lost(error.to_string()))?.map_err(lost)?;
            let Met { connection, hello, health, shared } = met;
            local_ranks += usize::from(rendezvous::is_this_host(&hello));
            healths.push(health.clone());
            links.push(Some(match shared {
                Some(same_host::Shared { sender, receiver, bell, lifeline }) => {
                    let lifeline = tokio::net::UnixStream::from_std(lifeline)
                        .map_err(|error| lost(error.to_string()))?;
                    runtime.spawn(hold(lifeline, health.clone()));
                    Box::new(SharedLink::new(sender, receiver, bell, Some(health))) as Box<dyn Link>
                }
                None => {
                    threads_each = 2;
                    let runtime = runtime.handle().clone();
                    Box::new(QuicLink::new(connection, peer, payload, bell.clone(), health, runtime))
                }
            }));
        }
        Ok((links, local_ranks * threads_each, Network { runtime: None, endpoint: Some(endpoint), healths }))
    }

    /// The token that was given; on loopback, else, this user's.
    fn token_for(&self, master: SocketAddr) -> Result<Token, JoinError> {
        match &self.token {
            Some(token) => Ok(token.clone()),
            None if master.ip().is_loopback() => Token::of_user().map_err(|error| {
                JoinError::Identity(format!("could not use this user's key file: {error}; or set FARWIRE_TOKEN to what `farwire token` prints"))
            }),
            None => Err(JoinError::Identity(format!(
                "{master} is not loopback, and there is no token; run `export FARWIRE_TOKEN=$(farwire token)` and give all ranks the same"
            ))),
        }
    }
}

/// How many times more time than on an idle host a peer should be given to answer: a thread that has its turn after eight others is not lost.
fn crowd(peer: Option<&Acquaintance>, all: &[Option<Acquaintance>]) -> u32 {
    let Some(peer) = peer else { return 1 };
    let there = all.iter().flatten().filter(|other| other.hello.host == peer.hello.host).count();
    // This process is not among `all`, and each has a thread that computes and one for the network.
    let threads = 2 * (there + usize::from(rendezvous::is_this_host(&peer.hello)));
    (threads as u32).div_ceil(8 * peer.hello.cores.max(1)).max(1)
}

/// The longest payload of a frame: partial results of 16-bit types travel in 32 bits, and news of a failure must fit, too.
pub(crate) fn longest_payload(config: &Config) -> usize {
    (2 * config.tuning.segment_bytes.get()).max(FAULT_LEN)
}

/// What two peers say to each other about shared memory.
#[derive(Debug, Serialize, Deserialize)]
enum Talk {
    /// Meet me there, and say this.
    Offer { name: String, word: String },
    /// It is not for us.
    No,
    /// It worked, on the side that says so; or why not.
    Result(Result<(), String>),
}

/// A peer, with all that was agreed.
struct Met {
    connection: quinn::Connection,
    hello: Hello,
    health: Arc<Health>,
    shared: Option<same_host::Shared>,
}

/// Agrees with a peer on how data will travel, and begins to ask whether it lives: at once, because the peer does the same.
async fn acquaint(
    me: Peer,
    peer: Peer,
    known: Acquaintance,
    choice: LinkChoice,
    payload: usize,
    bell: Bell,
    beats: Beats,
) -> Result<Met, String> {
    let (known, shared) = negotiate(me, peer, known, choice, payload, bell.clone()).await?;
    let Acquaintance { connection, to, from, hello } = known;
    let health = Health::new(bell);
    tokio::spawn(control::watch(connection.clone(), to, from, health.clone(), beats));
    Ok(Met { connection, hello, health, shared })
}

type Negotiated = (Acquaintance, Option<same_host::Shared>);

/// Finds out whether the two can share memory. The lower rank offers; they use it if it worked for both.
async fn negotiate(
    me: Peer,
    peer: Peer,
    mut known: Acquaintance,
    choice: LinkChoice,
    payload: usize,
    bell: Bell,
) -> Result<Negotiated, String> {
    if me < peer {
        let try_it = choice != LinkChoice::Quic && rendezvous::is_this_host(&known.hello);
        let Some(offer) = try_it.then(Offer::new).and_then(Result::ok) else {
            rendezvous::write(&mut known.to, &Talk::No).await?;
            return conclude(me, peer, known, choice, Err(ELSEWHERE.to_owned()));
        };
        let talk = Talk::Offer { name: offer.name.clone(), word: offer.word.clone() };
        rendezvous::write(&mut known.to, &talk).await?;
        let meeting = tokio::spawn(offer.meet(peer, payload, bell));
        // If the other side could not, there is nobody to wait for.
        let theirs = read_result(&mut known).await?;
        let attempt = match theirs {
            Err(reason) => {
                meeting.abort();
                Err(reason)
            }
            Ok(()) => meeting.await.map_err(|error| error.to_string())?.map_err(|error| error.to_string()),
        };
        let mine = attempt.as_ref().map(|_| ()).map_err(Clone::clone);
        rendezvous::write(&mut known.to, &Talk::Result(mine)).await?;
        conclude(me, peer, known, choice, attempt)
    } else {
        let attempt = match rendezvous::read(&mut known.from).await? {
            Talk::Offer { name, word } if choice != LinkChoice::Quic => {
                let accept = move || same_host::accept(&name, &word, peer, payload, &bell);
                let accepted =
                    tokio::task::spawn_blocking(accept).await.map_err(|error| error.to_string())?;
                accepted.map_err(|error| error.to_string())
            }
            Talk::Offer { .. } => Err(format!("{me} was told to use QUIC")),
            Talk::No => return conclude(me, peer, known, choice, Err(ELSEWHERE.to_owned())),
            Talk::Result(_) => return Err(NONSENSE.to_owned()),
        };
        let mine = attempt.as_ref().map(|_| ()).map_err(Clone::clone);
        rendezvous::write(&mut known.to, &Talk::Result(mine)).await?;
        let theirs = read_result(&mut known).await?;
        conclude(me, peer, known, choice, theirs.and(attempt))
    }
}

const ELSEWHERE: &str = "they are on different hosts, or one was told to use QUIC";
const NONSENSE: &str = "it talks nonsense about shared memory";

/// How it went on the other side.
async fn read_result(known: &mut Acquaintance) -> Result<Result<(), String>, String> {
    match rendezvous::read(&mut known.from).await? {
        Talk::Result(theirs) => Ok(theirs),
        _ => Err(NONSENSE.to_owned()),
    }
}

/// What follows from how the attempt went, on both sides.
fn conclude(
    me: Peer,
    peer: Peer,
    known: Acquaintance,
    choice: LinkChoice,
    attempt: Result<same_host::Shared, String>,
) -> Result<Negotiated, String> {
    match attempt {
        Ok(shared) => Ok((known, Some(shared))),
        Err(why) if choice == LinkChoice::Shm => {
            Err(format!("{me} and {peer} cannot share memory, and nothing else is allowed: {why}"))
        }
        Err(why) => {
            tracing::info!(%me, %peer, why, "using QUIC rather than shared memory");
            Ok((known, None))
        }
    }
}

/// Waits for the end of a peer on this host, which closes its end.
async fn hold(lifeline: tokio::net::UnixStream, health: Arc<Health>) {
    let mut byte = [0];
    loop {
        if lifeline.readable().await.is_err()
            || !matches!(lifeline.try_read(&mut byte), Err(error) if error.kind() == std::io::ErrorKind::WouldBlock)
        {
            return health.lose("its process has ended".to_owned());
        }
    }
}

/// What a node needs beside its driver while it is part of a job.
#[derive(Debug)]
pub(crate) struct Network {
    runtime: Option<Runtime>,
    endpoint: Option<quinn::Endpoint>,
    healths: Vec<Arc<Health>>,
}

/// How long leaving may take.
const FAREWELL: Duration = Duration::from_secs(3);

impl Network {
    /// Waits until peers have all that was sent, and lets go.
    fn leave(&mut self) {
        let (Some(runtime), endpoint, healths) =
            (self.runtime.take(), self.endpoint.take(), std::mem::take(&mut self.healths))
        else {
            return;
        };
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
                    let _ = tokio::time::timeout(Duration::from_millis(200), endpoint.wait_idle()).await;
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
