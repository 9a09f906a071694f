//! Sockets for quinn that lead into a shaped network inside this process.
//!
//! They need no privilege and no port. All time is tokio's, so on a runtime with a paused clock the
//! network runs in virtual time.

use std::collections::{BTreeMap, VecDeque};
use std::io::{self, IoSliceMut};
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use quinn::udp::{RecvMeta, Transmit};
use quinn::{AsyncUdpSocket, UdpPoller};
use tokio::sync::Notify;
use tokio::time::Instant;

use crate::impair::Impairments;
use crate::shaper::{Shaper, Tally};

/// What IPv4 and UDP add to each datagram.
const HEADERS: usize = 28;
/// The most datagrams in one transmit, as with the kernel's segmentation offload.
const SEGMENTS: usize = 10;
/// Datagrams that wait for their reader; more are lost, as in a system with short buffers.
const INBOX: usize = 8192;

const IDLE: Duration = Duration::from_millis(100);

/// A network in memory. Clones are the same network.
///
/// Each socket is a host. The way from one to another is shaped as in [`Lab`](crate::Lab): out of
/// the sender, then into the receiver.
#[derive(Clone, Debug)]
pub struct MemoryNetwork {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    start: Instant,
    hosts: Mutex<BTreeMap<SocketAddr, Host>>,
    pushed: Notify,
}

#[derive(Debug)]
struct Host {
    up: Shaper<Datagram>,
    down: Shaper<Datagram>,
    inbox: VecDeque<Datagram>,
    reader: Option<Waker>,
}

#[derive(Clone, Debug)]
struct Datagram {
    from: SocketAddr,
    to: SocketAddr,
    contents: Arc<[u8]>,
}

impl MemoryNetwork {
    /// An empty network. Must be called inside a tokio runtime, which then carries the packets.
    pub fn new() -> Self {
        let shared = Arc::new(Shared {
            start: Instant::now(),
            hosts: Mutex::default(),
            pushed: Notify::new(),
        });
        tokio::spawn(carry(Arc::downgrade(&shared)));
        Self { shared }
    }

    /// A new host at `address`, whose packets are subject to `what`.
    pub fn host(&self, address: SocketAddr, what: &Impairments, seed: u64) -> Arc<MemorySocket> {
        let host = Host {
            up: Shaper::up(what, seed),
            down: Shaper::down(what, seed),
            inbox: VecDeque::new(),
            reader: None,
        };
        self.shared.lock().insert(address, host);
        Arc::new(MemorySocket { address, shared: self.shared.clone() })
    }

    /// From now on, packets leave this host at this rate and with this delay, and reach it at this
    /// rate.
    pub fn change(&self, address: SocketAddr, rate: Option<f64>, delay: Duration) {
        if let Some(host) = self.shared.lock().get_mut(&address) {
            host.up.change(rate, delay);
            host.down.change(rate, Duration::ZERO);
        }
    }

    /// What became of a host's packets on their way out.
    pub fn tally(&self, address: SocketAddr) -> Tally {
        self.shared.lock().get(&address).map(|host| host.up.tally()).unwrap_or_default()
    }
}

impl Default for MemoryNetwork {
    fn default() -> Self {
        Self::new()
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<SocketAddr, Host>> {
        self.hosts.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Moves what is due, and says when to look again.
    fn step(&self) -> Option<Duration> {
        let now = self.start.elapsed();
        let mut hosts = self.lock();
        let mut crossing = Vec::new();
        for host in hosts.values_mut() {
            while let Some(datagram) = host.up.pop(now) {
                crossing.push(datagram);
            }
        }
        // In order of time, whatever order the hosts were visited in.
        crossing.sort_by_key(|(due, _)| *due);
        for (due, datagram) in crossing {
            if let Some(host) = hosts.get_mut(&datagram.to) {
                host.down.push(due, datagram.contents.len() + HEADERS, datagram);
            }
        }
        let mut next: Option<Duration> = None;
        for host in hosts.values_mut() {
            while let Some((_, datagram)) = host.down.pop(now) {
                if host.inbox.len() < INBOX {
                    host.inbox.push_back(datagram);
                }
                if let Some(reader) = host.reader.take() {
                    reader.wake();
                }
            }
            for due in [host.up.next_due(), host.down.next_due()].into_iter().flatten() {
                next = Some(next.map_or(due, |next| next.min(due)));
            }
        }
        next
    }
}

/// Carries packets for as long as the network has an owner.
async fn carry(network: Weak<Shared>) {
    loop {
        let Some(shared) = network.upgrade() else { return };
        let next = shared.step();
        // Wakes now and then in any case, to see whether the network still has an owner.
        let due = next.map_or_else(|| Instant::now() + IDLE, |next| shared.start + next);
        tokio::select! {
            () = tokio::time::sleep_until(due) => {}
            () = shared.pushed.notified() => {}
        }
    }
}

/// A socket of a [`MemoryNetwork`], for [`quinn::Endpoint::new_with_abstract_socket`].
#[derive(Debug)]
pub struct MemorySocket {
    address: SocketAddr,
    shared: Arc<Shared>,
}

impl AsyncUdpSocket for MemorySocket {
    fn create_io_poller(self: Arc<Self>) -> Pin<Box<dyn UdpPoller>> {
        Box::pin(AlwaysWritable)
    }

    fn try_send(&self, transmit: &Transmit<'_>) -> io::Result<()> {
        let now = self.shared.start.elapsed();
        let mut hosts = self.shared.lock();
        let Some(host) = hosts.get_mut(&self.address) else { return Ok(()) };
        let longest = transmit.segment_size.unwrap_or(transmit.contents.len()).max(1);
        let soonest = host.up.next_due();
        for contents in transmit.contents.chunks(longest) {
            let (from, to) = (self.address, transmit.destination);
            let datagram = Datagram { from, to, contents: contents.into() };
            host.up.push(now, contents.len() + HEADERS, datagram);
        }
        if host.up.next_due() != soonest {
            self.shared.pushed.notify_one();
        }
        Ok(())
    }

    fn poll_recv(
        &self,
        cx: &mut Context<'_>,
        bufs: &mut [IoSliceMut<'_>],
        meta: &mut [RecvMeta],
    ) -> Poll<io::Result<usize>> {
        let mut hosts = self.shared.lock();
        let Some(host) = hosts.get_mut(&self.address) else { return Poll::Pending };
        let mut received = 0;
        for (buf, meta) in bufs.iter_mut().zip(meta) {
            let Some(datagram) = host.inbox.pop_front() else { break };
            let len = datagram.contents.len().min(buf.len());
            buf[..len].copy_from_slice(&datagram.contents[..len]);
            *meta = RecvMeta { addr: datagram.from, len, stride: len, ecn: None, dst_ip: None };
            received += 1;
        }
        if received == 0 {
            host.reader = Some(cx.waker().clone());
            return Poll::Pending;
        }
        Poll::Ready(Ok(received))
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        Ok(self.address)
    }

    fn max_transmit_segments(&self) -> usize {
        SEGMENTS
    }

    fn may_fragment(&self) -> bool {
        false
    }
}

/// The first queue on the way never refuses: it drops.
#[derive(Debug)]
struct AlwaysWritable;

impl UdpPoller for AlwaysWritable {
    fn poll_writable(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }
}
