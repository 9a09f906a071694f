//! The TCP port of this process: it has the number of its UDP port, and all peers share it.
//!
//! Two processes that have met agree by a ticket that one of them will connect. Whoever connects
//! proves who it is by its certificate, as over QUIC, and then shows the ticket. Strangers get one
//! of a [fixed number of places](crate::join::door) for the length of a handshake.

use std::collections::HashMap;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use farwire_proto::Peer;
use rustls::client::UnbufferedClientConnection;
use rustls::pki_types::ServerName;
use rustls::server::UnbufferedServerConnection;
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio::time::timeout;

use super::tls::{Secured, Session, Tls};
use super::workers::Workers;
use crate::join::door::{HANDSHAKE, Porch};
use crate::join::identity::Identity;
use crate::join::rendezvous::JoinError;
use crate::join::tunnel::{PREFACE, Tunnels};

/// Connections between two processes, at most.
pub(super) const MAX_CONNECTIONS: u8 = 8;
/// Bytes that the system takes beyond what it can send at once. More would only make what is urgent
/// wait longer.
const NOT_SENT: u32 = 256 << 10;

/// How this process is connected to over TCP, and connects.
#[derive(Debug)]
pub(crate) struct TcpPort {
    identity: Arc<Identity>,
    server: Arc<rustls::ServerConfig>,
    client: Arc<rustls::ClientConfig>,
    settings: TcpSettings,
    /// The port that it listens on; or why there is none.
    listens: Result<u16, String>,
    /// Where it connects from.
    local: IpAddr,
    expected: Mutex<HashMap<u64, Holder>>,
    workers: OnceLock<Arc<Workers>>,
    /// What answers, until it is closed.
    keeper: Mutex<Option<JoinHandle<()>>>,
    tunnels: Arc<Tunnels>,
}

/// What users choose.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct TcpSettings {
    /// The name of the system's congestion control; nothing for its default.
    pub(crate) congestion: Option<String>,
}

impl TcpSettings {
    /// Whether the system has what was chosen.
    fn check(&self) -> Result<(), String> {
        let Some(name) = &self.congestion else { return Ok(()) };
        let set = || {
            let socket = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None)?;
            socket.set_tcp_congestion(name.as_bytes())
        };
        set().map_err(|error: io::Error| {
            let all =
                std::fs::read_to_string("/proc/sys/net/ipv4/tcp_available_congestion_control");
            format!(
                "could not use {name:?} for TCP: {error}; set FARWIRE_TCP_CONGESTION to one of \
                 these: {}",
                all.unwrap_or_default().trim()
            )
        })
    }
}

/// A peer that has a ticket.
#[derive(Debug)]
struct Holder {
    peer: Peer,
    came: mpsc::Sender<(u8, Secured)>,
}

/// What a process that connects says first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Ticket {
    number: u64,
    rank: u32,
    /// Which of their connections this is.
    index: u8,
}

impl Ticket {
    const LEN: usize = 13;

    fn encode(self) -> [u8; Self::LEN] {
        let mut bytes = [0; Self::LEN];
        bytes[..8].copy_from_slice(&self.number.to_le_bytes());
        bytes[8..12].copy_from_slice(&self.rank.to_le_bytes());
        bytes[12] = self.index;
        bytes
    }

    fn decode(bytes: [u8; Self::LEN]) -> Self {
        let [a, b, c, d, e, f, g, h, i, j, k, l, index] = bytes;
        let number = u64::from_le_bytes([a, b, c, d, e, f, g, h]);
        Self { number, rank: u32::from_le_bytes([i, j, k, l]), index }
    }
}

/// The answer to a ticket that is good.
const WELCOME: u8 = 1;

/// Tickets that are good, until this is dropped.
#[derive(Debug)]
pub(super) struct Expecting {
    port: Arc<TcpPort>,
    pub(super) ticket: u64,
    came: mpsc::Receiver<(u8, Secured)>,
}

impl Expecting {
    /// The connections that come by the ticket, by their index.
    pub(super) async fn connections(mut self, count: u8) -> Result<Vec<Secured>, String> {
        let mut all: Vec<Option<Secured>> = (0..count).map(|_| None).collect();
        while all.iter().any(Option::is_none) {
            let came = timeout(HANDSHAKE, self.came.recv()).await.ok().flatten();
            let (index, secured) = came.ok_or("not all connections came")?;
            *all.get_mut(usize::from(index)).ok_or("more connections came than agreed on")? =
                Some(secured);
        }
        Ok(all.into_iter().flatten().collect())
    }
}

impl Drop for Expecting {
    fn drop(&mut self) {
        self.port.expected().remove(&self.ticket);
    }
}

impl TcpPort {
    /// The port that `listener` has, for as long as the runtime lives. Without one this process can
    /// still connect to others, from `local`.
    pub(crate) fn open(
        listener: Result<std::net::TcpListener, String>,
        local: IpAddr,
        identity: Arc<Identity>,
        settings: TcpSettings,
        tunnels: Arc<Tunnels>,
    ) -> Result<Arc<Self>, JoinError> {
        let (server, client) = identity.tcp_configs()?;
        settings.check().map_err(JoinError::Link)?;
        let listener = listener.and_then(|listener| {
            let listener = listener.set_nonblocking(true).map(|()| listener);
            listener.and_then(TcpListener::from_std).map_err(|error| error.to_string())
        });
        let port =
            |listener: &TcpListener| listener.local_addr().map_err(|error| error.to_string());
        let listens = listener.as_ref().map_err(Clone::clone).and_then(port);
        let listens = listens.map(|address| address.port());
        let port = Arc::new(Self {
            identity,
            server,
            client,
            settings,
            listens,
            local,
            expected: Mutex::default(),
            workers: OnceLock::new(),
            keeper: Mutex::default(),
            tunnels,
        });
        if let Ok(listener) = listener {
            *port.keeper() = Some(tokio::spawn(port.clone().keep(listener)));
        }
        Ok(port)
    }

    /// Listens no more, from the moment that this has ended: nobody else is to come. Others may
    /// want the port, as torch does that of rank 0. Connections stay.
    pub(crate) async fn close(&self) {
        let keeper = self.keeper().take();
        if let Some(keeper) = keeper {
            keeper.abort();
            // The socket is closed by the task's end, not by the wish for it.
            let _cancelled = keeper.await;
        }
    }

    fn keeper(&self) -> MutexGuard<'_, Option<JoinHandle<()>>> {
        self.keeper.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The number of the port that this process can be connected to at, or why there is none.
    pub(crate) fn listens(&self) -> Result<u16, String> {
        self.listens.clone()
    }

    /// Tunnels for packets, where UDP does not get through.
    pub(crate) fn tunnels(&self) -> &Arc<Tunnels> {
        &self.tunnels
    }

    /// Where this process connects from.
    pub(crate) fn local(&self) -> IpAddr {
        self.local
    }

    /// The threads of this process for connections.
    pub(super) fn workers(&self) -> Result<Arc<Workers>, String> {
        if let Some(workers) = self.workers.get() {
            return Ok(workers.clone());
        }
        let workers =
            Workers::new().map_err(|error| format!("could not start threads: {error}"))?;
        Ok(self.workers.get_or_init(|| workers).clone())
    }

    /// A ticket for a peer.
    pub(super) fn expect(self: &Arc<Self>, peer: Peer) -> Result<Expecting, String> {
        let mut random = [0; 8];
        aws_lc_rs::rand::fill(&mut random).map_err(|_| "no randomness")?;
        let ticket = u64::from_le_bytes(random);
        let (sender, came) = mpsc::channel(MAX_CONNECTIONS.into());
        self.expected().insert(ticket, Holder { peer, came: sender });
        Ok(Expecting { port: self.clone(), ticket, came })
    }

    /// Connects to a peer, as rank `me`, with the ticket that it has given.
    pub(super) async fn dial(
        &self,
        address: SocketAddr,
        me: Peer,
        peer: Peer,
        number: u64,
        index: u8,
    ) -> Result<Secured, String> {
        let words = |error: io::Error| format!("{address}: {error}");
        let socket = if address.is_ipv4() { TcpSocket::new_v4() } else { TcpSocket::new_v6() };
        let socket = socket.map_err(words)?;
        if !self.local.is_unspecified() {
            socket.bind((self.local, 0).into()).map_err(words)?;
        }
        let socket = socket.connect(address).await.map_err(words)?;
        self.tune(&socket).map_err(words)?;
        let name = ServerName::try_from(self.identity.name_of(peer));
        let name = name.map_err(|error| error.to_string())?;
        let tls = UnbufferedClientConnection::new(self.client.clone(), name);
        let tls = Tls::Client(Box::new(tls.map_err(|error| error.to_string())?));
        let Secured { socket, mut session } = Session::begin(socket, tls).await.map_err(words)?;
        if !self.identity.certifies(session.peer_certificates(), peer) {
            return Err("its certificate is of another job".to_owned());
        }
        session.seal(&Ticket { number, rank: me.0, index }.encode()).map_err(words)?;
        session.flush(&socket).await.map_err(words)?;
        let [answer] = session.read_exact(&socket).await.map_err(words)?;
        if answer != WELCOME {
            return Err(format!("{address} answered something unexpected"));
        }
        Ok(Secured { socket, session })
    }

    fn expected(&self) -> MutexGuard<'_, HashMap<u64, Holder>> {
        self.expected.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn tune(&self, socket: &TcpStream) -> io::Result<()> {
        socket.set_nodelay(true)?;
        let socket = socket2::SockRef::from(socket);
        let _ = socket.set_tcp_notsent_lowat(NOT_SENT); // it is only for speed
        if let Some(congestion) = &self.settings.congestion {
            socket.set_tcp_congestion(congestion.as_bytes())?;
        }
        Ok(())
    }

    /// Answers all that connect.
    async fn keep(self: Arc<Self>, listener: TcpListener) {
        let porch = Arc::new(Porch::default());
        loop {
            let (socket, from) = match listener.accept().await {
                Ok(accepted) => accepted,
                Err(error) => {
                    // Of one connection, or there are too many files.
                    porch.say(&format!("could not accept a TCP connection: {error}"));
                    tokio::time::sleep(Duration::from_millis(20)).await;
                    continue;
                }
            };
            let (port, door) = (self.clone(), porch.clone());
            porch.admit(from.ip(), async move {
                let why = match timeout(HANDSHAKE, port.answer(socket, from.ip())).await {
                    Ok(Ok(())) => return,
                    Ok(Err(error)) => error.to_string(),
                    Err(_) => "it did not go on".to_owned(),
                };
                door.say(&format!("refused a TCP connection from {from}: {why}"));
            });
        }
    }

    /// Lets one in that has a ticket, or wants a tunnel.
    async fn answer(&self, socket: TcpStream, from: IpAddr) -> io::Result<()> {
        let mut first = [0];
        socket.peek(&mut first).await?;
        if first[0] == PREFACE[0] {
            let passage = self.tunnels.answer(socket, from).await?;
            self.tunnels.clone().carry(passage).await;
            return Ok(());
        }
        self.tune(&socket)?;
        let tls = UnbufferedServerConnection::new(self.server.clone()).map_err(io::Error::other)?;
        let tls = Tls::Server(Box::new(tls));
        let Secured { socket, mut session } = Session::begin(socket, tls).await?;
        let ticket = Ticket::decode(session.read_exact(&socket).await?);
        let holder = self.expected().get(&ticket.number).and_then(|holder| {
            let is_holder = holder.peer.0 == ticket.rank
                && self.identity.certifies(session.peer_certificates(), holder.peer);
            is_holder.then(|| holder.came.clone())
        });
        let Some(holder) = holder else {
            return Err(io::Error::other("its ticket is not of this process"));
        };
        session.seal(&[WELCOME])?;
        session.flush(&socket).await?;
        let _ = holder.send((ticket.index, Secured { socket, session })).await; // unless it is late
        Ok(())
    }
}
