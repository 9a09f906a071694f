//! How to join a job: what a program sets, what the environment says, and the defaults.

use std::ffi::{OsStr, OsString};
use std::net::SocketAddr;
use std::num::{NonZeroU32, NonZeroUsize};
use std::path::PathBuf;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use farwire_proto::membership::{self, TieRule};
use farwire_proto::tune::Links;
use farwire_proto::{Config, Peer, SumOrder, Tuning};

use crate::error::Error;
use crate::join::env::{self, EnvError, Place};
use crate::join::job::{self, JobName};
use crate::join::rendezvous::{MAX_HOST, host_id};
use crate::join::{beginning, held_port};
use crate::link::{Link, LinkChoice, Wanted};
use crate::observe::flight::Records;
use crate::quic::congestion::Congestion;
use crate::quic::control::Beats;
use crate::tcp::port::TcpSettings;
use crate::token::Token;

/// Settings that fit a situation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Preset {
    /// A silent peer is lost after 1.8 s and eight of the measured round trips. (Where ranks
    /// outnumber a host's cores by more than four, those on it get more time in proportion.)
    #[default]
    Lan,
    /// For networks that fall silent for seconds: 9 s and eight round trips.
    Wan,
}

impl Preset {
    fn parse(name: &str) -> Option<Self> {
        match name {
            "lan" => Some(Self::Lan),
            "wan" => Some(Self::Wan),
            _ => None,
        }
    }

    /// How often peers are asked whether they are alive, and when they are given up.
    pub(crate) fn beats(self) -> Beats {
        match self {
            Self::Lan => Beats { every: MILLISECOND * 200, lost_after: MILLISECOND * 1800 },
            Self::Wan => Beats { every: MILLISECOND * 1000, lost_after: MILLISECOND * 9000 },
        }
    }
}

const MILLISECOND: Duration = Duration::from_millis(1);
/// Bytes of what processes agree on: with all else a hello says, it fits into one message.
const MAX_AGREED: usize = 2048;
/// How long to wait for the other ranks, unless somebody says.
const JOIN_TIMEOUT: Duration = Duration::from_secs(60);
/// Frames that a lane may have under way, as [`Config::credit`] counts them.
const CREDIT: NonZeroU32 = NonZeroU32::new(4).expect("it is not zero");
/// How far a lane to a neighbour may be ahead of others, as [`Config::lead`] counts it: enough to
/// keep a line busy while the others catch up.
const LEAD: NonZeroU32 = NonZeroU32::new(8).expect("it is not zero");

/// Bytes that frames of long vectors may have between ranks of one host: about a core's cache.
const HOST_SEGMENT_BYTES: NonZeroUsize = NonZeroUsize::new(256 << 10).expect("it is not zero");

/// The configuration of a job, unless somebody says otherwise.
pub(crate) fn default_config() -> Config {
    let tuning = Tuning {
        host_segment_bytes: HOST_SEGMENT_BYTES,
        host_links: Some(Links::SHARED_MEMORY),
        ..Tuning::default()
    };
    Config { tuning, ..Config::default() }
}

/// How to join a job. Made by [`Communicator::builder`](crate::Communicator::builder).
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
/// | [`agree_on`](Self::agree_on) | | nothing |
/// | [`token`](Self::token) | `FARWIRE_TOKEN`, else `FARWIRE_TOKEN_FILE` | on loopback, the user's key file |
/// | [`link`](Self::link) | `FARWIRE_LINK` | `auto`: shared memory on one host, TCP within 5 ms, else QUIC |
/// | | `FARWIRE_CONNECTIONS` | `auto`: one QUIC connection each way to a peer; on one host, as many as there are cores for |
/// | | `FARWIRE_THREADS` | `auto`: the threads of a rank that move, add up and code long vectors, as many as there are cores for |
/// | | `FARWIRE_CONGESTION` | for QUIC, `auto`: CUBIC within 5 ms, else a model of the path |
/// | | `FARWIRE_TCP_CONGESTION` | for TCP, the system's default (`bbr` or `cubic`, say) |
/// | [`preset`](Self::preset) | `FARWIRE_PRESET` | `lan` |
/// | [`order`](Self::order) | `FARWIRE_ORDER` | `host`: floats are added up host by host |
/// | [`host`](Self::host) | `FARWIRE_HOST` | the machine, since it was started |
/// | [`port`](Self::port) | `FARWIRE_PORT` | any free port |
/// | [`interface`](Self::interface) | `FARWIRE_INTERFACE` | whichever leads to the peer |
/// | [`join_timeout`](Self::join_timeout) | `FARWIRE_JOIN_TIMEOUT` | 60 s |
/// | [`deadline`](Self::deadline), else [`config`](Self::config) | `FARWIRE_DEADLINE` | 600 s |
/// | [`metrics`](Self::metrics) | `FARWIRE_METRICS` | none are served |
/// | [`trace`](Self::trace) | `FARWIRE_TRACE` | none is written |
/// | [`elastic`](Self::elastic) | `FARWIRE_ELASTIC` | 0: nobody joins later |
/// | [`max_ranks`](Self::max_ranks) | `FARWIRE_MAX_RANKS` | as many as want to |
/// | [`flight_dir`](Self::flight_dir) | `FARWIRE_FLIGHT_DIR` | a folder of the user's ([`flight`](crate::flight)) |
///
/// Times in variables are written `90s`, `500ms`, `10m` or `2h`; a bare number counts seconds.
#[derive(Clone, Debug, Default)]
pub struct Builder {
    place: Option<Place>,
    job: Option<String>,
    agree_on: String,
    agree_later: Later,
    token: Option<Token>,
    preset: Option<Preset>,
    link: Option<LinkChoice>,
    order: Option<SumOrder>,
    host: Option<String>,
    port: Option<u16>,
    interface: Option<String>,
    join_timeout: Option<Duration>,
    deadline: Option<Duration>,
    config: Option<Config>,
    metrics: Option<SocketAddr>,
    trace: Option<PathBuf>,
    flight_dir: Option<PathBuf>,
    ties: TieRule,
    elastic: Option<bool>,
    max_ranks: Option<u32>,
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

    /// What all processes of the job must have in common, as lines of text: say, the settings of a
    /// run. A process that has other lines is told which, and refused, when it comes and not when
    /// results begin to differ. Up to 2 KiB.
    pub fn agree_on(self, lines: impl Into<String>) -> Self {
        Self { agree_on: lines.into(), ..self }
    }

    /// A line that processes which join later must have, too, and that those of the start may not know
    /// yet when they start: say, a digest of data that rank 0 reads. It counts from when it is set. A
    /// process that joins sets it before.
    pub fn agree_later(self, line: Arc<OnceLock<String>>) -> Self {
        Self { agree_later: line, ..self }
    }

    /// The cluster token.
    pub fn token(self, token: Token) -> Self {
        Self { token: Some(token), ..self }
    }

    /// Settings that fit the situation.
    pub fn preset(self, preset: Preset) -> Self {
        Self { preset: Some(preset), ..self }
    }

    /// What carries data: [`LinkChoice::AUTO`], or one kind of link (`"quic".parse()?`).
    pub fn link(self, link: LinkChoice) -> Self {
        Self { link: Some(link), ..self }
    }

    /// In which order the floats of an all-reduce are added up where some ranks share a host
    /// (`host` or `rank`). The same on all ranks, which refuse each other otherwise.
    ///
    /// [`SumOrder::Host`] lets each host's sum cross the network once; with [`SumOrder::Rank`], each
    /// rank's vector does, and where ranks are does not change the bits.
    pub fn order(self, order: SumOrder) -> Self {
        Self { order: Some(order), ..self }
    }

    /// What this process calls its host: up to 48 bytes. Processes whose hosts have the same name
    /// try to share memory, and count as one host in an all-reduce. For containers that should count
    /// as hosts of their own, say.
    pub fn host(self, name: impl Into<String>) -> Self {
        Self { host: Some(name.into()), ..self }
    }

    /// This rank's UDP port; 0 for any free one. Rank 0 listens where its [`Place`] says.
    pub fn port(self, port: u16) -> Self {
        Self { port: Some(port), ..self }
    }

    /// The network interface that this rank uses, by its name (`eth1`). Without, the system's routes
    /// decide, for each peer. Has no effect where rank 0 is at a loopback address.
    pub fn interface(self, name: impl Into<String>) -> Self {
        Self { interface: Some(name.into()), ..self }
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

    /// Whether other processes may join while the job runs ([`Communicator::admit`], and
    /// [`join_running`](Self::join_running) there). The same on all ranks.
    ///
    /// [`Communicator::admit`]: crate::Communicator::admit
    pub fn elastic(self, elastic: bool) -> Self {
        Self { elastic: Some(elastic), ..self }
    }

    /// With so many ranks, nobody else is let in: who wants to join waits until one has gone. The
    /// lowest number that any rank gives counts.
    pub fn max_ranks(self, max_ranks: u32) -> Self {
        Self { max_ranks: Some(max_ranks), ..self }
    }

    /// Which side goes on when the group is cut into halves. The same on all ranks.
    pub fn ties(self, ties: TieRule) -> Self {
        Self { ties, ..self }
    }

    /// What is not set by the builder comes from an environment.
    pub(crate) fn settings(
        self,
        lookup: &dyn Fn(&str) -> Option<OsString>,
    ) -> Result<Settings, Error> {
        let variables = Variables(lookup);
        let place = match self.place {
            Some(place) => place,
            None => Place::from_lookup(&|name| variables.text(name))?,
        };
        let job = match (self.job, lookup("FARWIRE_JOB"), &place.job) {
            (Some(job), ..) => named("Builder::job", job.as_ref())?,
            (None, Some(job), _) => named("FARWIRE_JOB", &job)?,
            (None, None, Some(job)) => named("the launcher's job", job.as_ref())?,
            (None, None, None) => JobName::default(),
        };
        if self.agree_on.len() > MAX_AGREED {
            let (name, what) = ("Builder::agree_on", "text of at most 2048 bytes");
            return Err(wrong(name, &self.agree_on, what).into());
        }
        let token = match (
            self.token,
            variables.text("FARWIRE_TOKEN"),
            lookup("FARWIRE_TOKEN_FILE"),
        ) {
            (Some(token), ..) => Some(token),
            (None, Some(text), _) => Some(text.parse().map_err(|error| Error::Token { error })?),
            (None, None, Some(path)) => {
                let what =
                    "could not read FARWIRE_TOKEN_FILE (`farwire token` makes what it should hold)";
                let token = Token::read(&PathBuf::from(path));
                Some(token.map_err(|error| Error::System { what, error })?)
            }
            (None, None, None) => None,
        };
        let link = variables
            .or(self.link, "FARWIRE_LINK", LinkChoice::expected(), |text| text.parse().ok())?;
        let preset = variables.or(self.preset, "FARWIRE_PRESET", "lan or wan", Preset::parse)?;
        let order = self.order.or(self.config.map(|config| config.tuning.order));
        let order = variables.or(order, "FARWIRE_ORDER", "host or rank", |text| match text {
            "host" => Some(SumOrder::Host),
            "rank" => Some(SumOrder::Rank),
            _ => None,
        })?;
        let order = order.unwrap_or_default();
        let host = match self.host.or_else(|| variables.text("FARWIRE_HOST")) {
            Some(name) if !(1..=MAX_HOST).contains(&name.len()) => {
                return Err(wrong("FARWIRE_HOST", &name, "a name of 1 to 48 bytes").into());
            }
            name => name.unwrap_or_else(host_id),
        };
        let congestion =
            variables.or(None, "FARWIRE_CONGESTION", "auto, model or cubic", Congestion::parse)?;
        let what = "auto, or a number from 1 to 8";
        let connections = variables.or(None, "FARWIRE_CONNECTIONS", what, Wanted::parse)?;
        let connections = connections.flatten().unwrap_or_else(|| {
            let world = place.world.get() as usize;
            let told = variables.text("LOCAL_WORLD_SIZE").and_then(|ranks| ranks.parse().ok());
            Wanted::auto(told.unwrap_or(if place.is_local() { world } else { 1 }), world)
        });
        let what = "auto, or a number of threads from 1 to 256";
        let threads = variables.or(None, THREADS, what, parse_threads)?.flatten();
        let congestion_of_tcp = variables.text("FARWIRE_TCP_CONGESTION");
        let tcp = TcpSettings { congestion: congestion_of_tcp.filter(|name| !name.is_empty()) };
        let what = "a port from 1 to 65535, or 0 for any";
        let port = variables.or(self.port, "FARWIRE_PORT", what, |text| text.parse().ok())?;
        let interface = self.interface.or_else(|| variables.text("FARWIRE_INTERFACE"));
        let join_timeout = variables.time(self.join_timeout, "FARWIRE_JOIN_TIMEOUT")?;
        let deadline = self.deadline.or(self.config.map(|config| config.deadline));
        let deadline = variables.time(deadline, "FARWIRE_DEADLINE")?;
        let config = self.config.unwrap_or_else(default_config);
        let tuning = Tuning { order, ..config.tuning };
        let deadline = deadline.unwrap_or(config.deadline);
        let config = Config { credit: CREDIT, lead: Some(LEAD), deadline, tuning, ..config };
        // Ranks that differ in it find out now, and not at the first all-reduce.
        let order = match order {
            SumOrder::Host => "host",
            SumOrder::Rank => "rank",
        };
        let agree_on = format!("FARWIRE_ORDER={order}\n{}", self.agree_on);
        let what = "an address and a port, like 127.0.0.1:9464";
        let metrics = variables.or(self.metrics.map(Some), "FARWIRE_METRICS", what, |text| {
            if text.is_empty() { Some(None) } else { text.parse().ok().map(Some) }
        })?;
        let elastic =
            variables.or(self.elastic, "FARWIRE_ELASTIC", "0 or 1", |text| match text {
                "0" => Some(false),
                "1" => Some(true),
                _ => None,
            })?;
        let what = "a number of ranks";
        let max_ranks =
            variables.or(self.max_ranks, "FARWIRE_MAX_RANKS", what, |text| text.parse().ok())?;
        let what = "a port, which launchers set";
        let held_port: Option<u16> =
            variables.or(None, held_port::VARIABLE, what, |text| text.parse().ok())?;
        let what = "what launchers set";
        let beginning = variables.or(None, beginning::VARIABLE, what, beginning::Place::parse)?;
        let path = |set: Option<PathBuf>, name| set.or_else(|| lookup(name).map(PathBuf::from));
        let own_port = if place.rank == Peer(0) { Some(place.master_port) } else { port };
        Ok(Settings {
            port_is_held: held_port.is_some() && held_port == own_port,
            beginning,
            place,
            job,
            agree_on,
            agree_later: self.agree_later,
            host,
            token,
            preset: preset.unwrap_or_default(),
            link: link.unwrap_or_default(),
            congestion: congestion.unwrap_or_default(),
            connections,
            threads,
            tcp,
            port: port.unwrap_or(0),
            interface: interface.filter(|name| !name.is_empty()),
            join_timeout: join_timeout.unwrap_or(JOIN_TIMEOUT),
            config,
            metrics: metrics.flatten(),
            trace: path(self.trace, "FARWIRE_TRACE").filter(|path| !path.as_os_str().is_empty()),
            ties: self.ties,
            elastic: elastic.unwrap_or(false),
            max_ranks: max_ranks.map_or(usize::MAX, |ranks| ranks as usize),
            records: Records::from_setting(path(self.flight_dir, "FARWIRE_FLIGHT_DIR")),
        })
    }
}

/// The name of a job; two names that are not text must not become one.
fn named(from: &'static str, name: &OsStr) -> Result<JobName, EnvError> {
    name.to_str()
        .and_then(JobName::new)
        .ok_or_else(|| wrong(from, &name.to_string_lossy(), job::WHAT))
}

fn wrong(name: &'static str, value: &str, what: &'static str) -> EnvError {
    EnvError::Value { name, value: value.to_owned(), what }
}

/// An environment.
struct Variables<'a>(&'a dyn Fn(&str) -> Option<OsString>);

impl Variables<'_> {
    fn text(&self, name: &str) -> Option<String> {
        (self.0)(name).map(|value| value.to_string_lossy().into_owned())
    }

    /// What was set, or else what the variable says, if there is one; `what` it must say.
    fn or<T>(
        &self,
        set: Option<T>,
        name: &'static str,
        what: &'static str,
        parse: impl Fn(&str) -> Option<T>,
    ) -> Result<Option<T>, EnvError> {
        match self.text(name).filter(|_| set.is_none()) {
            None => Ok(set),
            Some(text) => parse(&text).map(Some).ok_or_else(|| wrong(name, &text, what)),
        }
    }

    /// The same for a time.
    fn time(
        &self,
        set: Option<Duration>,
        name: &'static str,
    ) -> Result<Option<Duration>, EnvError> {
        match self.text(name).filter(|_| set.is_none()) {
            None => Ok(set.map(|time| time.min(env::MAX_TIME))),
            Some(text) => env::time(name, &text).map(Some),
        }
    }
}

/// How many threads work for a rank.
const THREADS: &str = "FARWIRE_THREADS";
/// More would only get in each other's way.
const MOST_THREADS: usize = 256;

fn parse_threads(text: &str) -> Option<Option<NonZeroUsize>> {
    if text == "auto" {
        return Some(None);
    }
    text.parse().ok().filter(|threads: &NonZeroUsize| threads.get() <= MOST_THREADS).map(Some)
}

/// What is to agree with those that join, once it is known.
pub(crate) type Later = Arc<OnceLock<String>>;

/// A [`Builder`] with nothing left open.
#[derive(Debug)]
pub(crate) struct Settings {
    pub(crate) place: Place,
    pub(crate) job: JobName,
    pub(crate) agree_on: String,
    pub(crate) agree_later: Later,
    /// What this process calls its host.
    pub(crate) host: String,
    pub(crate) token: Option<Token>,
    pub(crate) preset: Preset,
    pub(crate) link: LinkChoice,
    pub(crate) congestion: Congestion,
    pub(crate) connections: Wanted,
    /// Threads that work for this rank; nothing for as many as there are cores for.
    pub(crate) threads: Option<NonZeroUsize>,
    pub(crate) tcp: TcpSettings,
    /// This rank's UDP port; 0 for any.
    pub(crate) port: u16,
    /// Whether a launcher keeps this process's port free for it.
    pub(crate) port_is_held: bool,
    /// Where a launcher wants to know how far this process is.
    pub(crate) beginning: Option<beginning::Place>,
    /// Nothing for whichever leads to a peer.
    pub(crate) interface: Option<String>,
    pub(crate) join_timeout: Duration,
    pub(crate) config: Config,
    pub(crate) metrics: Option<SocketAddr>,
    pub(crate) trace: Option<PathBuf>,
    pub(crate) records: Records,
    pub(crate) ties: TieRule,
    pub(crate) elastic: bool,
    pub(crate) max_ranks: usize,
}

impl Settings {
    /// How the group agrees on who is in it. A member that computes answers all the same, so who
    /// does not answer for long is in trouble. Nobody is asked again before an answer can have come.
    pub(crate) fn membership(&self, links: &[Option<Box<dyn Link>>]) -> membership::Settings {
        let paths = links.iter().flatten().filter_map(|link| link.path());
        let longest = paths.map(|path| path.round_trip).max().unwrap_or_default();
        let least = match self.preset {
            Preset::Lan => MILLISECOND * 50,
            Preset::Wan => MILLISECOND * 500,
        };
        let retry = least.max(2 * longest);
        let patience = Duration::from_secs(60);
        membership::Settings { ties: self.ties, retry, patience }
    }
}

#[cfg(test)]
mod tests {
    use farwire_proto::Peer;

    use super::*;

    const PLACE: [(&str, &str); 4] = [
        ("RANK", "1"),
        ("WORLD_SIZE", "2"),
        ("MASTER_ADDR", "127.0.0.1"),
        ("MASTER_PORT", "29500"),
    ];

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
        let cases: [Case; 13] = [
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
                |builder| builder.link("shm".parse().unwrap()),
                |settings| settings.link.to_string(),
                ["shm", "quic", "auto"],
            ),
            (
                "FARWIRE_ORDER",
                "rank",
                "sorted",
                |builder| builder.order(SumOrder::Host),
                |settings| format!("{:?}", settings.config.tuning.order),
                ["Host", "Rank", "Host"],
            ),
            (
                "FARWIRE_HOST",
                "env",
                "",
                |builder| builder.host("built"),
                |settings| {
                    if settings.host == host_id() { "boot".into() } else { settings.host.clone() }
                },
                ["built", "env", "boot"],
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
                "FARWIRE_MAX_RANKS",
                "7",
                "-1",
                |builder| builder.max_ranks(8),
                |settings| (settings.max_ranks as u32).to_string(),
                ["8", "7", "4294967295"],
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
                assert!(error.contains(name), "{name}: {error}");
            }
        }
        // The place, which is several variables; and a configuration, which has a deadline, too.
        let place = Place { rank: Peer(0), ..settings(Builder::default(), &[]).unwrap().place };
        assert_eq!(settings(Builder::default().place(place), &[]).unwrap().place.rank, Peer(0));
        let config = Config { deadline: Duration::from_secs(3), ..Config::default() };
        let both =
            settings(Builder::default().config(config), &[("FARWIRE_DEADLINE", "7s")]).unwrap();
        assert_eq!(both.config.deadline, Duration::from_secs(3));
        let forever = settings(Builder::default().join_timeout(Duration::MAX), &[]).unwrap();
        assert_eq!(forever.join_timeout, env::MAX_TIME, "no clock overflows");
    }

    #[test]
    fn connections_are_as_many_as_asked_for_or_as_fit_the_host() {
        let wanted = |text: &str| {
            settings(Builder::default(), &[("FARWIRE_CONNECTIONS", text)])
                .map(|settings| settings.connections)
        };
        assert_eq!(wanted("3").unwrap(), Wanted { most: 3, all: true });
        assert!(!wanted("auto").unwrap().all);
        for text in ["0", "9", "-1", "many", ""] {
            let error = wanted(text).unwrap_err().to_string();
            assert!(error.contains("FARWIRE_CONNECTIONS"), "{error}");
        }
        assert_eq!(Wanted::auto(1000, 1000).most, 1, "ranks need the cores");
        assert_eq!(Wanted::auto(1, 2).most, 1, "the other is on another host");
    }

    #[test]
    fn threads_are_as_many_as_asked_for_or_as_fit_the_host() {
        let threads = |text: &str| {
            settings(Builder::default(), &[(THREADS, text)]).map(|settings| settings.threads)
        };
        assert_eq!(threads("3").unwrap(), NonZeroUsize::new(3));
        assert_eq!(threads("auto").unwrap(), None);
        for text in ["0", "-1", "many", "", "1.5", "257", "99999999999999999999"] {
            let error = threads(text).unwrap_err().to_string();
            assert!(error.contains(THREADS), "{error}");
        }
    }

    #[test]
    fn odd_names_of_jobs_are_names_or_errors() {
        let job = |text: &str| {
            settings(Builder::default(), &[("FARWIRE_JOB", text)]).map(|settings| settings.job)
        };
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
