//! Ranks as processes: joining a job, and leaving it.

use std::ffi::OsString;
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
use crate::join::env::{self, EnvError, Place};
use crate::join::held_port;
use crate::join::identity::Identity;
use crate::join::job::{self, JobName};
use crate::join::rendezvous::{self, Acquaintance, JoinError, Member, Terms};
use crate::link::Link;
use crate::metrics;
use crate::node::{self, Node};
use crate::observe::Observer;
use crate::observe::flight::Records;
use crate::quic::congestion::Congestion;
use crate::quic::control::{self, Beats, Health};
use crate::quic::link::QuicLink;
use crate::quic::transport::Transport;
use crate::shm::bell::Bell;
use crate::shm::files;
use crate::shm::link::SharedLink;
use crate::shm::same_host::{self, Offer};
use crate::token::Token;

/// Settings that fit a situation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Preset {
    /// One room or one data centre: a silent peer is lost after 2 s. (Where ranks outnumber a
    /// host's cores by more than four, those on it get more time in proportion.)
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
///
/// # What counts
///
/// For every setting, a call of the builder wins over the environment, and the environment wins
/// over the default. A variable that is set to something that does not parse is an error, unless a
/// call of the builder has made it irrelevant.
///
/// | method | variable | default |
/// |---|---|---|
/// | [`place`](Self::place) | `RANK` and so on, as the launcher sets them | an error |
/// | [`job`](Self::job) | `FARWIRE_JOB` | the launcher's name for the job, else none |
/// | [`token`](Self::token) | `FARWIRE_TOKEN`, else `FARWIRE_TOKEN_FILE` | on loopback, the user's key file |
/// | [`link`](Self::link) | `FARWIRE_LINK` | `auto` |
/// | | `FARWIRE_CONGESTION`: `auto`, `model` or `cubic` | `auto`: CUBIC within 5 ms, else a model of the path |
/// | [`preset`](Self::preset) | `FARWIRE_PRESET` | `lan` |
/// | [`port`](Self::port) | `FARWIRE_PORT` | any free port |
/// | [`join_timeout`](Self::join_timeout) | `FARWIRE_JOIN_TIMEOUT` | 60 s |
/// | [`deadline`](Self::deadline), else [`config`](Self::config) | `FARWIRE_DEADLINE` | 600 s |
/// | [`metrics`](Self::metrics) | `FARWIRE_METRICS` | none are served |
/// | [`trace`](Self::trace) | `FARWIRE_TRACE` | none is written |
/// | [`flight_dir`](Self::flight_dir) | `FARWIRE_FLIGHT_DIR` | a folder of the user's ([`flight`](crate::flight)) |
///
/// Times in variables are written `90s`, `500ms`, `10m` or `2h`; a bare number counts seconds.
#[derive(Clone, Debug, Default)]
pub struct Builder {
    place: Option<Place>,
    job: Option<String>,
    token: Option<Token>,
    preset: Option<Preset>,
    link: Option<LinkChoice>,
    port: Option<u16>,
    join_timeout: Option<Duration>,
    deadline: Option<Duration>,
    config: Option<Config>,
    metrics: Option<SocketAddr>,
    trace: Option<PathBuf>,
    flight_dir: Option<PathBuf>,
}

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
    /// Where this process stands: its rank, the number of ranks, and where rank 0 listens.
    pub fn place(self, place: Place) -> Self {
        Self { place: Some(place), ..self }
    }

    /// The job's name, the same on all ranks: up to 255 bytes. A process of another job that comes
    /// to the same address, with the same token, is told so and refused.
    pub fn job(self, job: impl Into<String>) -> Self {
        Self { job: Some(job.into()), ..self }
    }

    /// The cluster token.
    pub fn token(self, token: Token) -> Self {
        Self { token: Some(token), ..self }
    }

    /// Settings that fit the situation.
    pub fn preset(self, preset: Preset) -> Self {
        Self { preset: Some(preset), ..self }
    }

    /// What carries data.
    pub fn link(self, link: LinkChoice) -> Self {
        Self { link: Some(link), ..self }
    }

    /// This rank's UDP port; 0 for any free one. Rank 0 listens where its [`Place`] says.
    pub fn port(self, port: u16) -> Self {
        Self { port: Some(port), ..self }
    }

    /// How long to wait for the other ranks, at most a year.
    pub fn join_timeout(self, timeout: Duration) -> Self {
        Self { join_timeout: Some(timeout), ..self }
    }

    /// How long an operation may take, unless [`Options`](crate::Options) say otherwise for it.
    pub fn deadline(self, deadline: Duration) -> Self {
        Self { deadline: Some(deadline), ..self }
    }

    /// Segment sizes, what links are like, and the deadline of operations. The same on all ranks.
    ///
    /// All of it counts as set, so the environment's deadline does not apply;
    /// [`deadline`](Self::deadline) wins over the one in here.
    pub fn config(self, config: Config) -> Self {
        Self { config: Some(config), ..self }
    }

    /// Where to serve counters to Prometheus: the first free port from there on.
    pub fn metrics(self, address: SocketAddr) -> Self {
        Self { metrics: Some(address), ..self }
    }

    /// The file, or the folder, for a trace.
    pub fn trace(self, path: impl Into<PathBuf>) -> Self {
        Self { trace: Some(path.into()), ..self }
    }

    /// The folder for this rank's flight record, should it fail; if empty, there is none.
    pub fn flight_dir(self, path: impl Into<PathBuf>) -> Self {
        Self { flight_dir: Some(path.into()), ..self }
    }

    /// Joins, and blocks until all ranks have come.
    pub fn join(self) -> Result<Communicator, Error> {
        let settings = self.settings(&|name| std::env::var_os(name))?;
        // What cannot be had is found out before anyone waits for this rank.
        let (rank, world) = (settings.place.rank, settings.place.world);
        let (trace, records) = (settings.trace.as_deref(), settings.records.clone());
        let observer = Observer::new(rank, world, settings.config.epoch, trace, records)?;
        let metrics = match settings.metrics {
            None => None,
            Some(address) => Some(metrics::listen(address, world).map_err(|error| Error::System {
                what: "could not listen on the address for metrics (FARWIRE_METRICS)",
                error,
            })?),
        };
        let bell =
            Bell::new().map_err(|error| Error::System { what: "could not get shared memory", error })?;
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .thread_name("farwire-net")
            .enable_all()
            .build()
            .map_err(|error| Error::System { what: "could not start the network thread", error })?;
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
        let node = Node::start(driver, bell, threads, Some(Box::new(network)))
            .map_err(|error| Error::System { what: "could not start a thread", error })?;
        if let Some(listener) = metrics {
            handle.spawn(metrics::serve(listener, settings.place.rank.0, node.downgrade()));
        }
        Communicator::of_world(node)
    }

    /// What is not set by the builder comes from an environment.
    fn settings(self, lookup: &dyn Fn(&str) -> Option<OsString>) -> Result<Settings, Error> {
        let variable = |name: &str| lookup(name).map(|value| value.to_string_lossy().into_owned());
        let wrong = |name, value: &str, what| EnvError::Value { name, value: value.to_owned(), what };
        let place = match self.place {
            Some(place) => place,
            None => Place::from_lookup(&variable)?,
        };
        let job = match (self.job, lookup(JOB), &place.job) {
            (Some(job), ..) => JobName::new(&job).ok_or_else(|| wrong("Builder::job", &job, job::WHAT))?,
            (None, Some(job), _) => {
                // Two names that are not text must not become one.
                let name = job.to_str().and_then(JobName::new);
                name.ok_or_else(|| wrong(JOB, &job.to_string_lossy(), job::WHAT))?
            }
            (None, None, Some(job)) => {
                JobName::new(job).ok_or_else(|| wrong("the launcher's job", job, job::WHAT))?
            }
            (None, None, None) => JobName::default(),
        };
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
        let preset = match (self.preset, variable("FARWIRE_PRESET").as_deref()) {
            (Some(preset), _) => preset,
            (None, None | Some("lan")) => Preset::Lan,
            (None, Some("wan")) => Preset::Wan,
            (None, Some(other)) => return Err(wrong("FARWIRE_PRESET", other, "lan or wan").into()),
        };
        let congestion = Congestion::parse(variable("FARWIRE_CONGESTION").as_deref())
            .map_err(|other| wrong("FARWIRE_CONGESTION", &other, "auto, model or cubic"))?;
        let port = match (self.port, variable("FARWIRE_PORT")) {
            (Some(port), _) => port,
            (None, None) => 0,
            (None, Some(text)) => text
                .parse()
                .map_err(|_| wrong("FARWIRE_PORT", &text, "a port from 1 to 65535, or 0 for any"))?,
        };
        let token =
            match (self.token, variable("FARWIRE_TOKEN"), lookup("FARWIRE_TOKEN_FILE")) {
                (Some(token), ..) => Some(token),
                (None, Some(text), _) => Some(text.parse().map_err(|source| Error::Token { source })?),
                (None, None, Some(path)) => {
                    let token = Token::read(&PathBuf::from(path));
                    Some(token.map_err(|error| Error::System {
                        what: "could not read FARWIRE_TOKEN_FILE",
                        error,
                    })?)
                }
                (None, None, None) => None,
            };
        let time = |set: Option<Duration>, name| match (set, variable(name)) {
            (Some(time), _) => Ok(Some(time.min(env::MAX_TIME))),
            (None, None) => Ok(None),
            (None, Some(text)) => env::time(name, &text).map(Some),
        };
        let join_timeout = time(self.join_timeout, "FARWIRE_JOIN_TIMEOUT")?.unwrap_or(JOIN_TIMEOUT);
        let deadline = self.deadline.or(self.config.map(|config| config.deadline));
        let config = self.config.unwrap_or_default();
        let deadline = time(deadline, "FARWIRE_DEADLINE")?.unwrap_or(config.deadline);
        let credit = NonZeroU32::new(4).unwrap_or(NonZeroU32::MIN);
        let config = Config { credit, deadline, ..config };
        let metrics = match (self.metrics, variable("FARWIRE_METRICS").filter(|text| !text.is_empty())) {
            (Some(address), _) => Some(address),
            (None, None) => None,
            (None, Some(text)) => Some(text.parse().map_err(|_| {
                wrong("FARWIRE_METRICS", &text, "an address and a port, like 127.0.0.1:9464")
            })?),
        };
        let path = |set: Option<PathBuf>, name| set.or_else(|| lookup(name).map(PathBuf::from));
        let trace = path(self.trace, "FARWIRE_TRACE").filter(|path| !path.as_os_str().is_empty());
        let records = Records::from_setting(path(self.flight_dir, "FARWIRE_FLIGHT_DIR"));
        let port_is_held = match variable(held_port::VARIABLE) {
            None => false,
            Some(text) => match text.parse::<u16>() {
                Ok(port) => port == place.master_port,
                Err(_) => return Err(wrong(held_port::VARIABLE, &text, "a port, which launchers set").into()),
            },
        };
        Ok(Settings {
            place,
            job,
            token,
            preset,
            link,
            congestion,
            port,
            port_is_held,
            join_timeout,
            config,
            metrics,
            trace,
            records,
        })
    }
}

const JOB: &str = "FARWIRE_JOB";
/// How long to wait for the other ranks, unless somebody says.
const JOIN_TIMEOUT: Duration = Duration::from_secs(60);

/// A [`Builder`] with nothing left open.
#[derive(Debug)]
struct Settings {
    place: Place,
    job: JobName,
    token: Option<Token>,
    preset: Preset,
    link: LinkChoice,
    congestion: Congestion,
    port: u16,
    port_is_held: bool,
    join_timeout: Duration,
    config: Config,
    metrics: Option<SocketAddr>,
    trace: Option<PathBuf>,
    records: Records,
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
        let identity = Arc::new(Identity::new(&token, self.place.rank, epoch, &self.job)?);
        let terms = Terms {
            place: &self.place,
            job: &self.job,
            epoch,
            master,
            port_is_held: self.port_is_held,
            port: self.port,
            timeout: self.join_timeout,
        };
        let (endpoint, peers) =
            rendezvous::join(&terms, identity, Transport { congestion: self.congestion }).await?;
        let here = peers.iter().flatten().filter(|peer| rendezvous::is_this_host(&peer.member)).count();
        if self.link != LinkChoice::Quic {
            files::make_room(here).map_err(JoinError::Files)?;
        }

        let crowds: Vec<_> = peers.iter().map(|peer| crowd(peer.as_ref(), &peers)).collect();
        let busiest_here = crowds
            .iter()
            .zip(&peers)
            .filter(|(_, peer)| peer.as_ref().is_some_and(|peer| rendezvous::is_this_host(&peer.member)));
        let crowd_here = busiest_here.map(|(crowd, _)| *crowd).max().unwrap_or(1);
        // Pairs negotiate side by side, so a slow peer does not hold up the others.
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
        // Each rank on this host keeps a core busy, and another for its network thread if data goes
        // through that.
        let (mut local_ranks, mut threads_each) = (1, 1);
        for (index, negotiation) in negotiations.into_iter().enumerate() {
            let Some(negotiation) = negotiation else {
                links.push(None);
                continue;
            };
            let peer = Peer(index as u32);
            let lost = |reason: String| JoinError::Lost { peer, reason };
            let met = negotiation.await.map_err(|error| lost(error.to_string()))?.map_err(lost)?;
            let Met { connection, member, health, shared } = met;
            local_ranks += usize::from(rendezvous::is_this_host(&member));
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

    /// The token that was given, or on loopback this user's.
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

/// By how much a crowded host stretches the time that a peer has to answer: a thread that has to
/// wait for eight others to have their turn is not lost.
fn crowd(peer: Option<&Acquaintance>, all: &[Option<Acquaintance>]) -> u32 {
    let Some(peer) = peer else { return 1 };
    let there = all.iter().flatten().filter(|other| other.member.host == peer.member.host).count();
    // This process is not among `all`, and each has a thread that computes and one for the network.
    let threads = 2 * (there + usize::from(rendezvous::is_this_host(&peer.member)));
    (threads as u32).div_ceil(8 * peer.member.cores.max(1)).max(1)
}

/// The longest payload of a frame: partial results of 16-bit types travel in 32 bits, and news of a
/// failure must fit, too.
pub(crate) fn longest_payload(config: &Config) -> usize {
    (2 * config.tuning.segment_bytes.get()).max(FAULT_LEN)
}

/// What two peers say to each other about shared memory.
#[derive(Debug, Serialize, Deserialize)]
enum Talk {
    /// Meet me there, and say this.
    Offer { name: String, word: String },
    /// Shared memory is not possible, or not wanted.
    No,
    /// Whether it worked on the side that says so, or why not.
    Result(Result<(), String>),
}

/// A peer, with all that was agreed.
struct Met {
    connection: quinn::Connection,
    member: Member,
    health: Arc<Health>,
    shared: Option<same_host::Shared>,
}

/// Agrees with a peer on how data will travel, and begins to ask whether it lives: at once, because
/// the peer does the same.
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
    let Acquaintance { connection, to, from, member } = known;
    let health = Health::new(bell);
    tokio::spawn(control::watch(connection.clone(), to, from, health.clone(), beats));
    Ok(Met { connection, member, health, shared })
}

type Negotiated = (Acquaintance, Option<same_host::Shared>);

/// Finds out whether the two can share memory. The lower rank offers; they use it if it worked for
/// both.
async fn negotiate(
    me: Peer,
    peer: Peer,
    mut known: Acquaintance,
    choice: LinkChoice,
    payload: usize,
    bell: Bell,
) -> Result<Negotiated, String> {
    if me < peer {
        let try_it = choice != LinkChoice::Quic && rendezvous::is_this_host(&known.member);
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
const NONSENSE: &str = "it answered something unexpected while shared memory was set up";

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

impl node::Network for Network {}

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

#[cfg(test)]
mod tests {
    use super::*;

    const PLACE: [(&str, &str); 4] =
        [("RANK", "1"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "29500")];

    fn settings(builder: Builder, variables: &[(&str, &str)]) -> Result<Settings, Error> {
        builder.settings(&|name| {
            let set = variables.iter().chain(&PLACE).find(|(key, _)| *key == name);
            set.map(|(_, value)| (*value).into())
        })
    }

    /// For every setting: the builder, else the environment, else the default. And what does not
    /// parse is an error, if it counts.
    #[test]
    fn the_builder_wins_over_the_environment_and_that_over_the_default() {
        type Set = fn(Builder) -> Builder;
        type Get = fn(&Settings) -> String;
        const TOKEN: &str = "fw-000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f";
        const OTHER: &str = "fw-1f1e1d1c1b1a191817161514131211100f0e0d0c0b0a09080706050403020100";
        /// A variable, a value, one that does not parse (or is empty), and what is expected: from
        /// the builder, from the environment, by default.
        type Case = (&'static str, &'static str, &'static str, Set, Get, [&'static str; 3]);
        let cases: [Case; 10] = [
            (
                "FARWIRE_JOB",
                "env",
                "",
                |builder| builder.job("built"),
                |settings| settings.job.to_string(),
                ["job \"built\"", "job \"env\"", "a job without a name"],
            ),
            (
                "FARWIRE_TOKEN",
                TOKEN,
                "fw-0",
                |builder| builder.token(OTHER.parse().unwrap()),
                |settings| settings.token.as_ref().map_or_else(String::new, Token::reveal),
                [OTHER, TOKEN, ""],
            ),
            (
                "FARWIRE_LINK",
                "quic",
                "carrier pigeon",
                |builder| builder.link(LinkChoice::Shm),
                |settings| format!("{:?}", settings.link),
                ["Shm", "Quic", "Auto"],
            ),
            (
                "FARWIRE_PRESET",
                "wan",
                "moon",
                |builder| builder.preset(Preset::Lan),
                |settings| format!("{:?}", settings.preset),
                ["Lan", "Wan", "Lan"],
            ),
            (
                "FARWIRE_PORT",
                "7",
                "70000",
                |builder| builder.port(8),
                |settings| settings.port.to_string(),
                ["8", "7", "0"],
            ),
            (
                "FARWIRE_JOIN_TIMEOUT",
                "2m",
                "soon",
                |builder| builder.join_timeout(Duration::from_secs(9)),
                |settings| format!("{:?}", settings.join_timeout),
                ["9s", "120s", "60s"],
            ),
            (
                "FARWIRE_DEADLINE",
                "7s",
                "0",
                |builder| builder.config(Config::default()).deadline(Duration::from_secs(9)),
                |settings| format!("{:?}", settings.config.deadline),
                ["9s", "7s", "600s"],
            ),
            (
                "FARWIRE_METRICS",
                "127.0.0.1:7",
                "9464",
                |builder| builder.metrics(([127, 0, 0, 1], 8).into()),
                |settings| format!("{:?}", settings.metrics),
                ["Some(127.0.0.1:8)", "Some(127.0.0.1:7)", "None"],
            ),
            (
                "FARWIRE_TRACE",
                "env",
                "",
                |builder| builder.trace("built"),
                |settings| format!("{:?}", settings.trace),
                ["Some(\"built\")", "Some(\"env\")", "None"],
            ),
            (
                "FARWIRE_FLIGHT_DIR",
                "env",
                "",
                |builder| builder.flight_dir("built"),
                |settings| format!("{:?}", settings.records),
                ["Folder(\"built\")", "Folder(\"env\")", "UserFolder"],
            ),
        ];
        for (name, value, wrong, set, get, [built, environment, default]) in cases {
            let empty = Builder::default;
            assert_eq!(get(&settings(set(empty()), &[(name, value)]).unwrap()), built, "{name}");
            assert_eq!(get(&settings(set(empty()), &[(name, wrong)]).unwrap()), built, "{name}");
            assert_eq!(get(&settings(empty(), &[(name, value)]).unwrap()), environment, "{name}");
            assert_eq!(get(&settings(empty(), &[]).unwrap()), default, "{name}");
            // For a trace and a folder, empty means none.
            if !["FARWIRE_TRACE", "FARWIRE_FLIGHT_DIR"].contains(&name) {
                let error = settings(empty(), &[(name, wrong)]).unwrap_err().to_string();
                assert!(error.contains(name) || error.contains("token"), "{name}: {error}");
            }
        }
        // The place, which is several variables; and a configuration, which has a deadline, too.
        let place = Place { rank: Peer(0), ..settings(Builder::default(), &[]).unwrap().place };
        assert_eq!(settings(Builder::default().place(place), &[]).unwrap().place.rank, Peer(0));
        let config = Config { deadline: Duration::from_secs(3), ..Config::default() };
        let both = settings(Builder::default().config(config), &[("FARWIRE_DEADLINE", "7s")]).unwrap();
        assert_eq!(both.config.deadline, Duration::from_secs(3));
        let forever = settings(Builder::default().join_timeout(Duration::MAX), &[]).unwrap();
        assert_eq!(forever.join_timeout, env::MAX_TIME, "no clock overflows");
    }

    #[test]
    fn odd_names_of_jobs_are_names_or_errors() {
        let job =
            |text: &str| settings(Builder::default(), &[("FARWIRE_JOB", text)]).map(|settings| settings.job);
        for text in ["a b", "\n", "é", "../../etc", "*", "-n", &"x".repeat(255)] {
            assert_eq!(job(text).unwrap(), JobName::new(text).unwrap());
        }
        for text in ["", &"x".repeat(10 << 10)] {
            let error = job(text).unwrap_err().to_string();
            assert!(error.contains("FARWIRE_JOB") && error.len() < 300, "{error}");
        }
        let bytes = std::os::unix::ffi::OsStringExt::from_vec(vec![0xff]);
        let lookup = |name: &str| match name {
            "FARWIRE_JOB" => Some(OsString::clone(&bytes)),
            _ => PLACE.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).into()),
        };
        assert!(Builder::default().settings(&lookup).is_err(), "not text");
        // A launcher's name counts if nobody says otherwise.
        let run = [("TORCHELASTIC_RUN_ID", "run")];
        assert_eq!(settings(Builder::default(), &run).unwrap().job, JobName::new("run").unwrap());
        let both = [("TORCHELASTIC_RUN_ID", "run"), ("FARWIRE_JOB", "mine")];
        assert_eq!(settings(Builder::default(), &both).unwrap().job, JobName::new("mine").unwrap());
    }
}
