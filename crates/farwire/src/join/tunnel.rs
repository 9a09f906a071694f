//! Joining where UDP does not get through: QUIC's packets as messages on a TCP connection.
//!
//! Packets to a peer go through its *tunnel*, if it has one, and otherwise over UDP. QUIC does not
//! notice. It proves who the two are and encrypts, as ever, so a tunnel has nothing to prove: it is
//! only another way for packets that anybody may send. It carries the meeting, the negotiation and
//! heartbeats. Data does not go this way: such pairs use the TCP link.
//!
//! ```text
//! caller:      PREFACE │ u16: the port at which it listens itself
//! callee:      WELCOME
//! then, both:  u16: length │ packet       as often as they like
//! ```
//!
//! QUIC knows the caller by an address that nobody has over UDP: a stranger that connects must not
//! get packets that are for another process.

use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::io::{self, IoSliceMut};
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use quinn::udp::{RecvMeta, Transmit};
use quinn::{AsyncUdpSocket, UdpPoller};
use tokio::io::{AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::{TcpSocket, TcpStream};
use tokio::sync::{Notify, mpsc};
use tokio::time::timeout;

pub(crate) const PREFACE: &[u8; 16] = b"farwire-tunnel/1";
const WELCOME: u8 = 1;
/// Packets that may wait to be written to a tunnel, or to be read by QUIC. Those that find no room
/// are lost, as over UDP.
const QUEUE: usize = 256;
/// A tunnel without a packet for this long carries no connection, since QUIC keeps its own alive.
const SILENCE: Duration = Duration::from_secs(30);

/// An IPv6 network that is nobody's. Its addresses stand for those that come through tunnels.
const NOWHERE: u128 = 0xfd66_6172_7769_7265 << 64;

/// The tunnels of this process.
#[derive(Debug, Default)]
pub(crate) struct Tunnels {
    open: Mutex<HashMap<SocketAddr, Tunnel>>,
    /// Whether there ever was one.
    any: AtomicBool,
    next: AtomicU64,
    arrived: Mutex<Arrived>,
    said: AtomicBool,
}

#[derive(Debug)]
struct Tunnel {
    id: u64,
    /// Where the peer listens.
    address: SocketAddr,
    packets: mpsc::Sender<Vec<u8>>,
    /// Notified when a process of the cluster uses it.
    proven: Arc<Notify>,
}

/// Packets that came through tunnels, and the reader that waits for them.
#[derive(Debug, Default)]
struct Arrived {
    packets: VecDeque<(SocketAddr, Vec<u8>)>,
    reader: Option<Waker>,
}

/// A connection that can become a tunnel.
#[derive(Debug)]
pub(crate) struct Passage {
    socket: TcpStream,
    /// The address by which QUIC knows the peer.
    peer: SocketAddr,
    /// Where the peer listens.
    address: SocketAddr,
}

impl Tunnels {
    /// Connects to a process that listens at `address`, from this one, which listens at `port`.
    pub(super) async fn connect(
        local: IpAddr,
        address: SocketAddr,
        port: u16,
    ) -> io::Result<Passage> {
        let socket = if address.is_ipv4() { TcpSocket::new_v4()? } else { TcpSocket::new_v6()? };
        if !local.is_unspecified() {
            socket.bind((local, 0).into())?;
        }
        let mut socket = socket.connect(address).await?;
        socket.set_nodelay(true)?;
        let mut hello = [0; PREFACE.len() + 2];
        hello[..PREFACE.len()].copy_from_slice(PREFACE);
        hello[PREFACE.len()..].copy_from_slice(&port.to_le_bytes());
        socket.write_all(&hello).await?;
        match socket.read_u8().await? {
            WELCOME => Ok(Passage { socket, peer: address, address }),
            _ => Err(io::Error::other("what listens there is not farwire")),
        }
    }

    /// Answers a process that has connected.
    pub(crate) async fn answer(&self, mut socket: TcpStream, from: IpAddr) -> io::Result<Passage> {
        let mut preface = [0; PREFACE.len()];
        socket.read_exact(&mut preface).await?;
        if preface != *PREFACE {
            return Err(io::Error::other("it speaks another protocol"));
        }
        let address = SocketAddr::new(from, socket.read_u16_le().await?);
        socket.set_nodelay(true)?;
        socket.write_all(&[WELCOME]).await?;
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        let peer = SocketAddr::new(Ipv6Addr::from_bits(NOWHERE | u128::from(number)).into(), 1);
        Ok(Passage { socket, peer, address })
    }

    /// From now on, sends packets to this peer through this passage. That ends with the connection,
    /// or when the connection is silent for long. Until somebody has [proven](Self::prove) who the
    /// peer is, it also ends with this future.
    pub(crate) fn carry(
        self: Arc<Self>,
        passage: Passage,
    ) -> impl Future<Output = ()> + Send + 'static {
        let id = self.next.fetch_add(1, Ordering::Relaxed);
        let (packets, queue) = mpsc::channel(QUEUE);
        let proven = Arc::new(Notify::new());
        let (peer, address) = (passage.peer, passage.address);
        let tunnel = Tunnel { id, address, packets, proven: proven.clone() };
        self.open().insert(peer, tunnel);
        self.any.store(true, Ordering::Release);
        let closing = Closing { tunnels: self.clone(), peer, id };
        async move {
            let mut carrying = Box::pin(async move {
                let _closing = closing;
                let _ = move_packets(&self, passage, queue).await; // QUIC will notice
            });
            tokio::select! {
                () = &mut carrying => {}
                () = proven.notified() => drop(tokio::spawn(carrying)),
            }
        }
    }

    /// Opens a tunnel that this process has connected.
    pub(super) fn open_to(self: Arc<Self>, passage: Passage) {
        self.say_once(passage.peer);
        let (tunnels, peer) = (self.clone(), passage.peer);
        tokio::spawn(self.carry(passage));
        tunnels.prove(peer);
    }

    /// Notes that a process of the cluster has this address.
    pub(super) fn prove(&self, peer: SocketAddr) {
        if let Some(tunnel) = self.open().get(&peer) {
            tunnel.proven.notify_one();
        }
    }

    /// Whether packets to this peer go through a tunnel.
    pub(crate) fn lead_to(&self, peer: SocketAddr) -> bool {
        self.any.load(Ordering::Acquire) && self.open().contains_key(&peer)
    }

    /// Where the peer listens that QUIC knows by this address.
    pub(super) fn real(&self, peer: SocketAddr) -> SocketAddr {
        self.open().get(&peer).map_or(peer, |tunnel| tunnel.address)
    }

    /// Warns, once, that UDP does not get through.
    fn say_once(&self, address: SocketAddr) {
        if !self.said.swap(true, Ordering::Relaxed) {
            tracing::warn!(
                "UDP does not get through to {address}, but TCP does; joining over TCP (let UDP \
                 through to that port for the QUIC link)"
            );
        }
    }

    fn open(&self) -> MutexGuard<'_, HashMap<SocketAddr, Tunnel>> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn arrived(&self) -> MutexGuard<'_, Arrived> {
        self.arrived.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Hands a packet to QUIC.
    fn deliver(&self, from: SocketAddr, packet: Vec<u8>) {
        let mut arrived = self.arrived();
        if arrived.packets.len() < QUEUE {
            arrived.packets.push_back((from, packet));
        }
        let reader = arrived.reader.take();
        drop(arrived);
        reader.into_iter().for_each(Waker::wake);
    }
}

/// Forgets a tunnel when it ends, unless there is a newer one.
struct Closing {
    tunnels: Arc<Tunnels>,
    peer: SocketAddr,
    id: u64,
}

impl Drop for Closing {
    fn drop(&mut self) {
        let mut open = self.tunnels.open();
        if open.get(&self.peer).is_some_and(|tunnel| tunnel.id == self.id) {
            open.remove(&self.peer);
        }
    }
}

async fn move_packets(
    tunnels: &Tunnels,
    Passage { socket, peer, .. }: Passage,
    mut queue: mpsc::Receiver<Vec<u8>>,
) -> io::Result<()> {
    let (from, mut to) = socket.into_split();
    let mut from = BufReader::new(from);
    let reads = async {
        loop {
            let length = timeout(SILENCE, from.read_u16_le()).await??;
            let mut packet = vec![0; length.into()];
            from.read_exact(&mut packet).await?;
            tunnels.deliver(peer, packet);
        }
    };
    let writes = async {
        while let Some(packet) = queue.recv().await {
            let length = u16::try_from(packet.len()).map_err(io::Error::other)?;
            to.write_all(&[&length.to_le_bytes()[..], &packet].concat()).await?;
        }
        Ok(())
    };
    tokio::select! {
        end = reads => end,
        end = writes => end,
    }
}

/// A UDP socket, and tunnels.
pub(super) struct Socket {
    pub(super) udp: Arc<dyn AsyncUdpSocket>,
    pub(super) tunnels: Arc<Tunnels>,
}

impl fmt::Debug for Socket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Socket").field("udp", &self.udp).finish_non_exhaustive()
    }
}

impl AsyncUdpSocket for Socket {
    fn create_io_poller(self: Arc<Self>) -> Pin<Box<dyn UdpPoller>> {
        self.udp.clone().create_io_poller()
    }

    fn try_send(&self, transmit: &Transmit<'_>) -> io::Result<()> {
        if self.tunnels.any.load(Ordering::Acquire)
            && let Some(tunnel) = self.tunnels.open().get(&transmit.destination)
        {
            let length = transmit.segment_size.unwrap_or(transmit.contents.len()).max(1);
            for packet in transmit.contents.chunks(length) {
                let _ = tunnel.packets.try_send(packet.to_vec()); // or it is lost, as over UDP
            }
            return Ok(());
        }
        self.udp.try_send(transmit)
    }

    fn poll_recv(
        &self,
        cx: &mut Context<'_>,
        bufs: &mut [IoSliceMut<'_>],
        meta: &mut [RecvMeta],
    ) -> Poll<io::Result<usize>> {
        let mut arrived = self.tunnels.arrived();
        let mut count = 0;
        for (buffer, meta) in bufs.iter_mut().zip(meta.iter_mut()) {
            let Some((addr, packet)) = arrived.packets.pop_front() else { break };
            // A packet that is too long for QUIC is cut off, and so refused.
            let len = packet.len().min(buffer.len());
            buffer[..len].copy_from_slice(&packet[..len]);
            *meta = RecvMeta { addr, len, stride: len.max(1), ecn: None, dst_ip: None };
            count += 1;
        }
        if count > 0 {
            return Poll::Ready(Ok(count));
        }
        if arrived.reader.as_ref().is_none_or(|reader| !reader.will_wake(cx.waker())) {
            arrived.reader = Some(cx.waker().clone());
        }
        drop(arrived);
        self.udp.poll_recv(cx, bufs, meta)
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        self.udp.local_addr()
    }

    fn max_transmit_segments(&self) -> usize {
        self.udp.max_transmit_segments()
    }

    fn max_receive_segments(&self) -> usize {
        self.udp.max_receive_segments()
    }

    fn may_fragment(&self) -> bool {
        self.udp.may_fragment()
    }
}

#[cfg(test)]
mod tests {
    use tokio::net::TcpListener;

    use super::*;

    /// Two processes, and a tunnel that the first has connected to the second.
    async fn tunnel(announced: u16) -> ([Arc<Tunnels>; 2], [Passage; 2]) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let ends = [(); 2].map(|()| Arc::<Tunnels>::default());
        let answer = async {
            let (socket, from) = listener.accept().await.unwrap();
            ends[1].answer(socket, from.ip()).await.unwrap()
        };
        let connect = Tunnels::connect(address.ip(), address, announced);
        let (connected, answered) = tokio::join!(connect, answer);
        (ends, [connected.unwrap(), answered])
    }

    /// The next packet, and who sent it.
    async fn next(tunnels: &Tunnels) -> (SocketAddr, Vec<u8>) {
        std::future::poll_fn(|cx| {
            let mut arrived = tunnels.arrived();
            arrived.reader = Some(cx.waker().clone());
            arrived.packets.pop_front().map_or(Poll::Pending, Poll::Ready)
        })
        .await
    }

    fn send(tunnels: &Tunnels, to: SocketAddr, packet: &[u8]) {
        tunnels.open()[&to].packets.try_send(packet.to_vec()).unwrap();
    }

    #[tokio::test]
    async fn packets_go_both_ways_whole_and_in_order() {
        let ([one, other], [connected, answered]) = tunnel(7).await;
        let (there, here) = (connected.peer, answered.peer);
        one.clone().open_to(connected);
        tokio::spawn(other.clone().carry(answered));
        for length in [0, 1, 1200, 65_535] {
            send(&one, there, &vec![3; length]);
            assert_eq!(next(&other).await, (here, vec![3; length]));
            send(&other, here, &vec![4; length]);
            assert_eq!(next(&one).await, (there, vec![4; length]));
        }
        assert_eq!(other.real(here), SocketAddr::from(([127, 0, 0, 1], 7)));
    }

    /// Whatever port a stranger claims, packets for the address that it names still go there.
    #[tokio::test]
    async fn a_stranger_does_not_get_packets_that_are_for_another() {
        let ([_, rank], [_stranger, answered]) = tunnel(29_500).await;
        tokio::spawn(rank.clone().carry(answered));
        assert!(!rank.lead_to(SocketAddr::from(([127, 0, 0, 1], 29_500))));
    }

    #[tokio::test]
    async fn a_tunnel_that_nobody_has_proven_ends_with_its_place() {
        let ([_, rank], [_stranger, answered]) = tunnel(7).await;
        let here = answered.peer;
        let carrying = rank.clone().carry(answered);
        assert!(rank.lead_to(here));
        drop(carrying);
        assert!(!rank.lead_to(here));
        // One that was proven does not end with it.
        let ([_, rank], [_member, answered]) = tunnel(7).await;
        let here = answered.peer;
        let carrying = rank.clone().carry(answered);
        rank.prove(here);
        carrying.await;
        assert!(rank.lead_to(here));
    }

    #[tokio::test]
    async fn what_does_not_speak_farwire_gets_no_tunnel() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let tunnels = Tunnels::default();
        let answer = async {
            let (socket, from) = listener.accept().await.unwrap();
            tunnels.answer(socket, from.ip()).await
        };
        let call = async {
            let mut socket = TcpStream::connect(address).await.unwrap();
            socket.write_all(b"fetch me something, please").await.unwrap();
            socket.read_u8().await
        };
        let (answered, called) = tokio::join!(answer, call);
        assert!(answered.is_err() && called.is_err());
        assert!(tunnels.open().is_empty());
    }
}
