//! From an address to a connection with every peer.
//!
//! 1. Rank 0 listens; every other rank connects to it and says hello.
//! 2. When all have come, rank 0 sends everyone the table of addresses.
//! 3. Of every other pair, the higher rank connects to the lower.
//!
//! Every connection is QUIC with certificates on both sides ([`Identity`]), and each has a *control stream*, on which the hello was said and heartbeats will be. After that a
//! newcomer is told that the group is complete.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};
use std::sync::Arc;
use std::time::Duration;

use farwire_proto::{Epoch, Peer, VERSION, WorldSize};
use quinn::{Connection, Endpoint, RecvStream, SendStream};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use tokio::sync::mpsc;
use tokio::time::{Instant, timeout, timeout_at};

use super::door;
use super::env::Place;
use super::identity::{Identity, IdentityError};
use crate::quic::congestion::Congestion;
use crate::quic::link;

/// How long one hello may take.
const PATIENCE: Duration = Duration::from_secs(10);
/// How long to wait for a peer to answer before asking again; each time twice as long, up to a limit. A peer that is not there yet should be found soon, a slow one needs time.
const RETRY: Duration = Duration::from_secs(3);
const LONGEST_RETRY: Duration = Duration::from_secs(12);
/// The longest message of the rendezvous.
const LONGEST: usize = 1 << 20;

/// A connection to a peer that has proven who it is.
#[derive(Debug)]
pub(crate) struct Acquaintance {
    pub(crate) connection: Connection,
    pub(crate) to: SendStream,
    pub(crate) from: RecvStream,
    pub(crate) hello: Hello,
}

/// What a process says of itself.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Hello {
    version: u8,
    rank: u32,
    world: u32,
    epoch: u32,
    /// The UDP port it listens on.
    port: u16,
    /// Differs between hosts. (Equal ones are only a reason to try shared memory.)
    pub(crate) host: String,
    /// Processors of that host that it may use.
    pub(crate) cores: u32,
}

#[derive(Debug, Serialize, Deserialize)]
enum Answer {
    /// Everyone's hello and address, by rank; rank 0's address is where the connection already is.
    Welcome(Vec<(Hello, Option<SocketAddr>)>),
    /// Your hello has been heard; wait.
    Heard,
    /// Hello yourself.
    Hello(Hello),
    /// And why.
    Refused(String),
}

/// Why a process could not join.
#[derive(Debug, thiserror::Error)]
pub enum JoinError {
    /// The address of rank 0 is not one.
    #[error("could not resolve {host}: {source}; set MASTER_ADDR to rank 0's address")]
    Resolve {
        /// What was given.
        host: String,
        /// What the system said.
        source: std::io::Error,
    },
    /// No socket.
    #[error(
        "could not listen on UDP {address}: {source}; free the port, or set MASTER_PORT (rank 0) or FARWIRE_PORT (others) to another"
    )]
    Listen {
        /// The address.
        address: SocketAddr,
        /// What the system said.
        source: std::io::Error,
    },
    /// Rank 0, or a peer that it named, was not reached.
    #[error(
        "{here} could not reach {peer} at {address} within {waited:?}: {last}; check MASTER_ADDR, MASTER_PORT, that UDP is let through, and that all ranks have the same token"
    )]
    Unreachable {
        /// This rank.
        here: Peer,
        /// The other.
        peer: Peer,
        /// Where it should be.
        address: SocketAddr,
        /// For how long it was tried.
        waited: Duration,
        /// What happened last.
        last: String,
    },
    /// Some rank did not come.
    #[error(
        "{missing} did not come within {waited:?}; look at what they say, and check that they have the same MASTER_ADDR, MASTER_PORT and token"
    )]
    Missing {
        /// Who.
        missing: String,
        /// For how long they were waited for.
        waited: Duration,
    },
    /// Rank 0, or the one that was asked, said no.
    #[error("{by} refused {here}: {reason}")]
    Refused {
        /// Who said no.
        by: Peer,
        /// To whom.
        here: Peer,
        /// Why.
        reason: String,
    },
    /// A connection failed in the middle.
    #[error("lost {peer} while joining: {reason}")]
    Lost {
        /// Who.
        peer: Peer,
        /// How.
        reason: String,
    },
    /// No certificate.
    #[error("{0}")]
    Identity(String),
}

impl From<IdentityError> for JoinError {
    fn from(error: IdentityError) -> Self {
        Self::Identity(error.to_string())
    }
}

/// The address of rank 0.
pub(crate) async fn resolve(place: &Place) -> Result<SocketAddr, JoinError> {
    let host = place.master_host.clone();
    let failed = |source| JoinError::Resolve { host: host.clone(), source };
    let found = tokio::net::lookup_host((&host[..], place.master_port)).await.map_err(failed)?;
    let mut found: Vec<_> = found.collect();
    found.sort_by_key(SocketAddr::is_ipv6);
    found.into_iter().next().ok_or_else(|| failed(std::io::Error::other("it has no address")))
}

/// Joins the group: a connection to every other rank, by rank.
pub(crate) async fn join(
    place: &Place,
    master: SocketAddr,
    port: u16,
    epoch: Epoch,
    identity: Arc<Identity>,
    transport: quinn::TransportConfig,
    waits: Duration,
) -> Result<(Endpoint, Vec<Option<Acquaintance>>), JoinError> {
    let deadline = Instant::now() + waits;
    let (me, world) = (place.rank, place.world);
    let any = match (master.ip().is_loopback(), master.is_ipv6()) {
        (true, _) => master.ip(),
        (false, true) => IpAddr::V6(Ipv6Addr::UNSPECIFIED),
        (false, false) => IpAddr::V4(Ipv4Addr::UNSPECIFIED),
    };
    let address = SocketAddr::new(any, if me == Peer(0) { master.port() } else { port });
    let mut server = identity.server_config()?;
    let transport = Arc::new(transport);
    server.transport_config(transport.clone());
    door::limit_incoming(&mut server);
    let listen = || {
        let socket = UdpSocket::bind(address)?;
        widen(&socket);
        let config = quinn::EndpointConfig::default();
        Endpoint::new(config, Some(server), socket, Arc::new(quinn::TokioRuntime))
    };
    let mut endpoint = listen().map_err(|source| JoinError::Listen { address, source })?;
    let mut client = identity.client_config()?;
    client.transport_config(transport);
    endpoint.set_default_client_config(client);
    let port = endpoint.local_addr().map_err(|source| JoinError::Listen { address, source })?.port();
    let cores = std::thread::available_parallelism().map_or(1, |cores| cores.get() as u32);
    let (version, host) = (VERSION, host_id());
    let hello = Hello { version, rank: me.0, world: world.get(), epoch: epoch.0, port, host, cores };

    let (door, mut newcomers) = mpsc::channel(world.len());
    let (certified, mine) = (identity.clone(), hello.clone());
    tokio::spawn(door::keep(endpoint.clone(), move |connection| {
        tokio::spawn(hear(connection, certified.clone(), mine.clone(), door.clone()));
    }));
    let mut peers: Vec<Option<Acquaintance>> = (0..world.get()).map(|_| None).collect();

    // Ranks that will come to this one; of the others' table, rank 0 knows more.
    let mut expected: Vec<u32> = (me.0 + 1..world.get()).collect();
    let mut table = Vec::new();
    if me != Peer(0) {
        let mut first = connect(&endpoint, &identity, Peer(0), master, &hello, me, deadline, waits).await?;
        let answer = timeout_at(deadline, read(&mut first.from)).await;
        table = match answer {
            Ok(Ok(Answer::Welcome(table))) if table.len() == world.len() => table,
            Ok(Ok(Answer::Refused(reason))) => {
                return Err(JoinError::Refused { by: Peer(0), here: me, reason });
            }
            Ok(Ok(_)) => {
                return Err(JoinError::Lost { peer: Peer(0), reason: NONSENSE.to_owned() });
            }
            Ok(Err(reason)) => return Err(JoinError::Lost { peer: Peer(0), reason }),
            Err(_) => {
                return Err(JoinError::Lost {
                    peer: Peer(0),
                    reason: format!("no table of ranks within {waits:?}"),
                });
            }
        };
        first.hello = table[0].0.clone();
        peers[0] = Some(first);
    }
    for (lower, (_, address)) in table.iter().enumerate().take(me.index()).skip(1) {
        let peer = Peer(lower as u32);
        let Some(address) = address else {
            return Err(JoinError::Lost { peer, reason: "rank 0 does not know its address".to_owned() });
        };
        let mut there = connect(&endpoint, &identity, peer, *address, &hello, me, deadline, waits).await?;
        match timeout_at(deadline, read(&mut there.from)).await {
            Ok(Ok(Answer::Hello(hello))) => there.hello = hello,
            Ok(Ok(Answer::Refused(reason))) => return Err(JoinError::Refused { by: peer, here: me, reason }),
            other => return Err(JoinError::Lost { peer, reason: format!("{other:?}") }),
        }
        peers[lower] = Some(there);
    }
    while !expected.is_empty() {
        let newcomer = timeout_at(deadline, newcomers.recv()).await.ok().flatten();
        let Some(newcomer) = newcomer else {
            let missing: Vec<_> = expected.iter().map(|rank| Peer(*rank).to_string()).collect();
            let error = JoinError::Missing { missing: missing.join(", "), waited: waits };
            refuse_all(&mut peers, &error.to_string()).await;
            return Err(error);
        };
        match newcomer {
            Newcomer::Fine(newcomer) => {
                let rank = newcomer.hello.rank;
                let place = &mut peers[rank as usize];
                // It may have lost its connection, and come again.
                let gone = rank > me.0
                    && place.as_ref().is_some_and(|first| first.connection.close_reason().is_some());
                let at = expected.iter().position(|expected| *expected == rank);
                if at.is_some() || gone {
                    at.map(|at| expected.swap_remove(at));
                    *place = Some(*newcomer);
                } else {
                    let reason =
                        format!("{} has come twice; give every process a rank of its own", Peer(rank));
                    refuse(*newcomer, &reason).await;
                    refuse_all(&mut peers, &reason).await;
                    return Err(JoinError::Refused { by: me, here: Peer(rank), reason });
                }
            }
            Newcomer::Misfit(rank, reason) => {
                refuse_all(&mut peers, &reason).await;
                return Err(JoinError::Refused { by: me, here: Peer(rank), reason });
            }
        }
    }
    if let Err(error) = welcome(&mut peers, me, &hello).await {
        refuse_all(&mut peers, &error.to_string()).await;
        return Err(error);
    }
    Ok((endpoint, peers))
}

/// Everyone has come: rank 0 sends the table, the others say hello back.
async fn welcome(peers: &mut [Option<Acquaintance>], me: Peer, hello: &Hello) -> Result<(), JoinError> {
    let entry = |peer: &Option<Acquaintance>| match peer {
        None => (hello.clone(), None),
        Some(peer) => {
            let address = SocketAddr::new(peer.connection.remote_address().ip(), peer.hello.port);
            (peer.hello.clone(), Some(address))
        }
    };
    let table: Vec<_> = if me == Peer(0) { peers.iter().map(entry).collect() } else { Vec::new() };
    for (rank, peer) in peers.iter_mut().enumerate().skip(me.index() + 1) {
        let Some(peer) = peer else { continue };
        let answer =
            if me == Peer(0) { Answer::Welcome(table.clone()) } else { Answer::Hello(hello.clone()) };
        let sent = write(&mut peer.to, &answer).await;
        sent.map_err(|reason| JoinError::Lost { peer: Peer(rank as u32), reason })?;
    }
    Ok(())
}

async fn refuse(mut peer: Acquaintance, reason: &str) {
    let _ = write(&mut peer.to, &Answer::Refused(reason.to_owned())).await;
    let _ = peer.to.finish();
    // Until it has read that, or for a moment.
    let _ = timeout(Duration::from_secs(1), peer.to.stopped()).await;
}

async fn refuse_all(peers: &mut [Option<Acquaintance>], reason: &str) {
    for peer in peers.iter_mut().filter_map(Option::take) {
        refuse(peer, reason).await;
    }
}

/// Connects to a peer and says hello, again and again until it is heard.
#[allow(clippy::too_many_arguments, reason = "each is one fact, and it is called twice")]
async fn connect(
    endpoint: &Endpoint,
    identity: &Identity,
    peer: Peer,
    address: SocketAddr,
    hello: &Hello,
    here: Peer,
    deadline: Instant,
    waited: Duration,
) -> Result<Acquaintance, JoinError> {
    let mut last = "no answer".to_owned();
    let mut patience = RETRY;
    while Instant::now() < deadline {
        let attempt = async {
            let connecting =
                endpoint.connect(address, &identity.name_of(peer)).map_err(|error| error.to_string())?;
            let connection = timeout(patience, connecting).await.map_err(|_| "no answer".to_owned())?;
            let connection = connection.map_err(|error| error.to_string())?;
            let (mut to, mut from) = connection.open_bi().await.map_err(|error| error.to_string())?;
            write(&mut to, hello).await?;
            // Only now is it known that the peer has let this process in: it may have had no place for it, or found its certificate wrong.
            let answer = read(&mut from).await?;
            Ok::<_, String>((Acquaintance { connection, to, from, hello: hello.clone() }, answer))
        };
        match timeout_at(deadline, attempt).await {
            Ok(Ok((there, Answer::Heard))) => return Ok(there),
            Ok(Ok((_, Answer::Refused(reason)))) => {
                return Err(JoinError::Refused { by: peer, here, reason });
            }
            Ok(Ok(_)) => return Err(JoinError::Lost { peer, reason: NONSENSE.to_owned() }),
            Ok(Err(reason)) => {
                last = reason;
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
            Err(_) => {}
        }
        patience = (2 * patience).min(LONGEST_RETRY);
    }
    Err(JoinError::Unreachable { here, peer, address, waited, last })
}

const NONSENSE: &str = "it answered nonsense";

/// Somebody who showed a certificate of this cluster.
enum Newcomer {
    Fine(Box<Acquaintance>),
    /// It cannot take part, for this reason.
    Misfit(u32, String),
}

/// Hears what somebody of the cluster has to say. Once nobody listens at the other end of `door`, the group is complete.
async fn hear(connection: Connection, identity: Arc<Identity>, mine: Hello, door: mpsc::Sender<Newcomer>) {
    let from = connection.remote_address();
    match timeout(PATIENCE, receive(connection, &identity, &mine)).await {
        Ok(Ok(newcomer)) => {
            if let Err(mpsc::error::SendError(Newcomer::Fine(late))) = door.send(newcomer).await {
                tracing::warn!(%from, rank = late.hello.rank, "refused a process: the group is complete");
                refuse(*late, "the group is complete and running").await;
            }
        }
        Ok(Err(reason)) => tracing::warn!(%from, reason, "refused a process"),
        Err(_) => tracing::warn!(%from, "refused a process that said nothing"),
    }
}

/// One newcomer's hello.
async fn receive(connection: Connection, identity: &Identity, mine: &Hello) -> Result<Newcomer, String> {
    let (to, mut from) = connection.accept_bi().await.map_err(|error| error.to_string())?;
    let hello: Hello = read(&mut from).await?;
    let rank = hello.rank;
    let mut known = Acquaintance { connection, to, from, hello };
    if !identity.is_certified(&known.connection, Peer(rank)) {
        refuse(known, "the certificate is not for this rank").await;
        return Err(format!("its certificate is not for rank {rank}"));
    }
    let theirs = &known.hello;
    let misfit = if theirs.version != mine.version {
        Some(format!(
            "{} speaks wire version {}, {} speaks {}; run the same farwire on all",
            Peer(rank),
            theirs.version,
            Peer(mine.rank),
            mine.version
        ))
    } else if theirs.world != mine.world {
        Some(format!(
            "{} was started for {} ranks, {} for {}; give all the same world size",
            Peer(rank),
            theirs.world,
            Peer(mine.rank),
            mine.world
        ))
    } else if WorldSize::new(mine.world).is_none_or(|world| rank >= world.get()) {
        Some(format!("rank {rank} is not below the world size {}", mine.world))
    } else {
        None
    };
    match misfit {
        None => {
            write(&mut known.to, &Answer::Heard).await?;
            Ok(Newcomer::Fine(Box::new(known)))
        }
        Some(reason) => {
            refuse(known, &reason).await;
            Ok(Newcomer::Misfit(rank, reason))
        }
    }
}

/// Writes a message: its length, then JSON.
pub(crate) async fn write(to: &mut SendStream, message: &impl Serialize) -> Result<(), String> {
    let text = serde_json::to_vec(message).map_err(|error| error.to_string())?;
    let length = u32::try_from(text.len()).map_err(|error| error.to_string())?;
    to.write_all(&length.to_le_bytes()).await.map_err(|error| error.to_string())?;
    to.write_all(&text).await.map_err(|error| error.to_string())
}

/// Reads what [`write()`] wrote, if it is not too long.
pub(crate) async fn read<T: DeserializeOwned>(from: &mut RecvStream) -> Result<T, String> {
    let mut length = [0; 4];
    from.read_exact(&mut length).await.map_err(|error| error.to_string())?;
    let length = u32::from_le_bytes(length) as usize;
    if length > LONGEST {
        return Err(format!("a message of {length} bytes is too long"));
    }
    let mut text = vec![0; length];
    from.read_exact(&mut text).await.map_err(|error| error.to_string())?;
    serde_json::from_slice(&text).map_err(|error| error.to_string())
}

/// Makes the system keep more packets for a socket while this process is busy, as far as it allows; those it cannot keep have to be sent again.
/// Returns the bytes it keeps for the receiver.
pub(crate) fn widen(socket: &UdpSocket) -> usize {
    use rustix::net::sockopt;
    // Beyond the system's limit for a privileged process, up to it for any other.
    if sockopt::set_socket_recv_buffer_size_force(socket, BUFFER).is_err() {
        let _ = sockopt::set_socket_recv_buffer_size(socket, BUFFER);
    }
    let _ = sockopt::set_socket_send_buffer_size(socket, BUFFER);
    let got = sockopt::socket_recv_buffer_size(socket).unwrap_or(0);
    if got < BUFFER {
        tracing::debug!(
            got,
            wanted = BUFFER,
            "the system limits UDP buffers; raise net.core.rmem_max for speed"
        );
    }
    got
}

/// Bytes that are asked for.
pub(crate) const BUFFER: usize = 8 << 20;

/// Limits for connections of all kinds. A link that carries data asks for more; strangers never get there, and a handshake costs little memory.
pub(crate) fn transport(congestion: Congestion) -> quinn::TransportConfig {
    let mut transport = quinn::TransportConfig::default();
    transport
        .congestion_controller_factory(congestion.factory())
        .max_concurrent_uni_streams(0u32.into())
        .max_concurrent_bidi_streams(4u32.into())
        .stream_receive_window(link::STREAM_WINDOW)
        .receive_window(link::STREAM_WINDOW)
        .send_window(link::CONNECTION_WINDOW.into_inner())
        .datagram_receive_buffer_size(None)
        // Who waits for others to join, for longer than that, is still there.
        .keep_alive_interval(Some(Duration::from_secs(3)))
        // A first packet that finds nobody listening yet is soon sent again.
        .initial_rtt(Duration::from_millis(50))
        .max_idle_timeout(Some(quinn::VarInt::from_u32(10_000).into()));
    transport
}

/// Whether a peer says it is on this host.
pub(crate) fn is_this_host(hello: &Hello) -> bool {
    !hello.host.is_empty() && hello.host == host_id()
}

/// The same for all processes between two boots of one machine.
fn host_id() -> String {
    std::fs::read_to_string("/proc/sys/kernel/random/boot_id")
        .map(|id| id.trim().to_owned())
        .unwrap_or_default()
}
