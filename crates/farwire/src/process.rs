//! Ranks as processes: joining a job, and leaving it.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use farwire_proto::membership::MAX_MESSAGE;
use farwire_proto::{Config, Engine, Peer};
use tokio::runtime::Runtime;

use crate::comm::Communicator;
use crate::driver::Driver;
use crate::driver::members::Members;
use crate::error::Error;
use crate::join::identity::Identity;
use crate::join::rendezvous::{self, Acquaintance, JoinError, Member, Terms};
use crate::link::negotiation::{self, Linked};
use crate::link::{Link, LinkChoice, Pair};
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
        let what = "could not serve metrics (FARWIRE_METRICS or Builder::metrics)";
        let metrics = metrics.transpose().map_err(system(what))?;
        let bell = Bell::new().map_err(system("could not get shared memory"))?;
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .thread_name("farwire-net")
            .enable_all()
            .build()
            .map_err(system("could not start the network thread"))?;
        // On a thread of its own, because the caller may be inside a runtime of its own.
        let joined = std::thread::scope(|scope| {
            let join = scope.spawn(|| runtime.block_on(settings.join(&bell)));
            join.join().expect("joining does not panic")
        });
        let Joined { links, threads, endpoint, healths } = match joined {
            Ok(joined) => joined,
            Err(error) => {
                runtime.shutdown_background();
                return Err(error.into());
            }
        };
        let engine = Engine::new(rank, world, settings.config);
        let handle = runtime.handle().clone();
        let network = Box::new(Network { runtime: Some(runtime), endpoint, healths });
        let members = Members::founding(rank, world, settings.membership());
        let payload = longest_payload(&settings.config);
        let driver = Driver::new(engine, links, payload, observer, members);
        let node = Node::start(driver, bell, threads, Some(network));
        let node = node.map_err(system("could not start a thread"))?;
        if let Some(listener) = metrics {
            handle.spawn(metrics::serve(listener, rank.0, node.downgrade()));
        }
        Communicator::of_world(node)
    }
}

/// What a process has once it is part of a job.
#[derive(Debug)]
struct Joined {
    /// By peer; none to itself.
    links: Vec<Option<Box<dyn Link>>>,
    /// Threads of all ranks on this host that want a core while they wait.
    threads: usize,
    endpoint: Option<quinn::Endpoint>,
    healths: Vec<Arc<Health>>,
}

impl Settings {
    async fn join(&self, bell: &Bell) -> Result<Joined, JoinError> {
        if self.place.world.get() == 1 {
            return Ok(Joined {
                links: vec![None],
                threads: 1,
                endpoint: None,
                healths: Vec::new(),
            });
        }
        let (me, epoch) = (self.place.rank, self.config.epoch);
        let master = rendezvous::resolve(&self.place).await?;
        let identity = Arc::new(Identity::new(&self.token_for(master)?, me, epoch, &self.job)?);
        let terms = Terms {
            place: &self.place,
            job: &self.job,
            epoch,
            master,
            port_is_held: self.port_is_held,
            port: self.port,
            timeout: self.join_timeout,
        };
        let transport = Transport { congestion: self.congestion };
        let (endpoint, peers) = rendezvous::join(&terms, identity, transport).await?;

        let members: Vec<_> = peers.iter().flatten().map(|peer| peer.member.clone()).collect();
        let payload = longest_payload(&self.config);
        let pair = |(known, index): (Option<Acquaintance>, u32)| {
            let known = known?;
            let pair = Pair {
                me,
                peer: Peer(index),
                same_host: rendezvous::is_this_host(&known.member),
                payload,
                bell: bell.clone(),
                connection: Some(known.connection.clone()),
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
        Ok(Joined { links, threads: ranks_here * threads_each, endpoint: Some(endpoint), healths })
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
async fn acquaint(
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
