//! Longer batches of packets than quinn makes.
//!
//! quinn hands the kernel at most ten packets at once. Each such batch costs the kernel a buffer, a
//! route and a way through the queues of an interface, at both ends. With forty packets of an
//! Ethernet at once, an all-reduce of four hosts on two cores takes a tenth less time over 1 Gbit/s
//! (docs/performance.md). So a full batch, which is probably not its connection's last, is held back
//! until the next one is put behind it:
//!
//! ```text
//! quinn      10 packets  10  10  10     10  10  4      10
//!                 ▼      ▼   ▼   ▼      ▼   ▼   ▼      ▼
//! kernel             40 packets             24         10, sent by the task `send_soon`
//! ```
//!
//! A held batch leaves when there is no room for another one like it, when its connection sends
//! something that is not a full batch, or when every task that was ready to run has had some turns.
//! Packets of one connection keep their order, because what is overtaken is taken for lost.

pub(crate) mod fitting;

use std::future::poll_fn;
use std::io::{self, IoSliceMut};
use std::net::{IpAddr, SocketAddr};
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::task::{Context, Poll};

use quinn::udp::{EcnCodepoint, RecvMeta, Transmit};
use quinn::{AsyncUdpSocket, UdpPoller};
use rustc_hash::FxHashMap as HashMap;
use tokio::sync::Notify;

use fitting::{FITTING, Fitting};

/// Packets of a full batch of quinn's.
const FULL: usize = 10;
/// Bytes of a batch, at most: an IP packet's length has 16 bits, until the interface cuts it up.
const LONGEST: usize = 65_000;
/// How often all tasks that are ready have had a turn before what is held is sent. In one turn
/// quinn makes two full batches.
const TURNS: usize = 3;

/// A socket that holds full batches back for a moment.
#[derive(Debug)]
pub(crate) struct Batches {
    socket: Arc<dyn AsyncUdpSocket>,
    fitting: &'static Fitting,
    held: Mutex<HashMap<Flow, Arc<Mutex<Batch>>>>,
    /// Notified when a batch is held, and when there are no more.
    news: Arc<Notify>,
}

/// A connection, as its packets show it: where they go, and the connection id that short headers
/// begin with. The peer chose the id; farwire's have eight bytes, like all of quinn's. With shorter
/// ones, hardly any packets would seem to be of one flow, and nothing would be held.
type Flow = (SocketAddr, [u8; 8]);

fn flow_of(transmit: &Transmit<'_>) -> Option<Flow> {
    let (&first, rest) = transmit.contents.split_first()?;
    let is_short = first & 0x80 == 0;
    Some((transmit.destination, *rest.first_chunk()?)).filter(|_| is_short)
}

/// Packets of one connection, of one length but for the last.
#[derive(Debug, Default)]
struct Batch {
    bytes: Vec<u8>,
    packet: usize,
    to: Option<SocketAddr>,
    from: Option<IpAddr>,
    ecn: Option<EcnCodepoint>,
}

impl Batch {
    /// Whether packets may be put behind these, to be so many at most.
    fn takes(&self, transmit: &Transmit<'_>, most: usize) -> bool {
        let length = self.bytes.len() + transmit.contents.len();
        let fits = match transmit.segment_size {
            Some(packet) => packet == self.packet,
            None => transmit.contents.len() <= self.packet,
        };
        let alike = (self.to, self.from, self.ecn)
            == (Some(transmit.destination), transmit.src_ip, transmit.ecn);
        let is_whole = self.bytes.len().is_multiple_of(self.packet);
        fits && alike && is_whole && length <= most * self.packet
    }

    /// Puts packets behind these, which [take](Self::takes) them or are none.
    fn put(&mut self, transmit: &Transmit<'_>) {
        if self.bytes.is_empty() {
            self.packet = transmit.segment_size.unwrap_or(transmit.contents.len());
            self.to = Some(transmit.destination);
            (self.from, self.ecn) = (transmit.src_ip, transmit.ecn);
            self.bytes.reserve(LONGEST);
        }
        self.bytes.extend_from_slice(transmit.contents);
    }

    /// Sends what there is, which stays if the socket has no room for it.
    fn send(&mut self, socket: &dyn AsyncUdpSocket) -> io::Result<()> {
        let Some(destination) = self.to.filter(|_| !self.bytes.is_empty()) else { return Ok(()) };
        let sent = socket.try_send(&Transmit {
            destination,
            ecn: self.ecn,
            contents: &self.bytes,
            segment_size: (self.bytes.len() > self.packet).then_some(self.packet),
            src_ip: self.from,
        });
        if !would_block(&sent) {
            self.bytes.clear();
        }
        sent
    }
}

fn would_block(sent: &io::Result<()>) -> bool {
    sent.as_ref().is_err_and(|error| error.kind() == io::ErrorKind::WouldBlock)
}

fn lock(batch: &Mutex<Batch>) -> MutexGuard<'_, Batch> {
    batch.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Batches {
    /// Must be called inside a runtime, whose tasks then send what is held.
    pub(crate) fn new(socket: Arc<dyn AsyncUdpSocket>) -> Arc<Self> {
        Self::that_fit(socket, &FITTING)
    }

    fn that_fit(socket: Arc<dyn AsyncUdpSocket>, fitting: &'static Fitting) -> Arc<Self> {
        let (held, news) = (Mutex::default(), Arc::<Notify>::default());
        let batches = Arc::new(Self { socket, fitting, held, news: news.clone() });
        tokio::spawn(send_soon(Arc::downgrade(&batches), news));
        batches
    }

    fn held(&self) -> MutexGuard<'_, HashMap<Flow, Arc<Mutex<Batch>>>> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Where a transmit has to go through: what is held of its connection, or will be.
    fn batch(&self, transmit: &Transmit<'_>) -> Option<Arc<Mutex<Batch>>> {
        let flow = flow_of(transmit)?;
        let mut held = self.held();
        match held.get(&flow) {
            None if self.is_full(transmit) => Some(held.entry(flow).or_default().clone()),
            batch => batch.cloned(),
        }
    }

    /// Whether more packets will probably follow, and there is room for as many again.
    fn is_full(&self, transmit: &Transmit<'_>) -> bool {
        let Some(packet) = transmit.segment_size else { return false };
        let packets = transmit.contents.len() / packet.max(1);
        let is_whole = transmit.contents.len() == packets * packet;
        is_whole && packets >= FULL && 2 * packets <= self.most(packet)
    }

    /// How many packets of a length may be sent at once.
    fn most(&self, packet: usize) -> usize {
        let kernel = self.socket.max_transmit_segments();
        kernel.min(LONGEST / packet.max(1)).min(self.fitting.packets())
    }
}

impl AsyncUdpSocket for Batches {
    fn try_send(&self, transmit: &Transmit<'_>) -> io::Result<()> {
        if transmit.segment_size.is_some_and(|packet| transmit.contents.len() >= FULL * packet) {
            self.fitting.goes();
        }
        let Some(batch) = self.batch(transmit) else { return self.socket.try_send(transmit) };
        let mut batch = lock(&batch);
        if batch.bytes.is_empty() || !batch.takes(transmit, self.most(batch.packet)) {
            batch.send(&*self.socket)?;
            if !self.is_full(transmit) {
                return self.socket.try_send(transmit);
            }
        }
        batch.put(transmit);
        // What the socket has no room for now is sent by the task, too.
        let goes_on = self.is_full(transmit) && batch.takes(transmit, self.most(batch.packet));
        if goes_on || would_block(&batch.send(&*self.socket)) {
            self.news.notify_one();
        }
        Ok(())
    }

    fn create_io_poller(self: Arc<Self>) -> Pin<Box<dyn UdpPoller>> {
        self.socket.clone().create_io_poller()
    }

    fn poll_recv(
        &self,
        cx: &mut Context<'_>,
        bufs: &mut [IoSliceMut<'_>],
        meta: &mut [RecvMeta],
    ) -> Poll<io::Result<usize>> {
        self.socket.poll_recv(cx, bufs, meta)
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        self.socket.local_addr()
    }

    fn max_transmit_segments(&self) -> usize {
        self.socket.max_transmit_segments()
    }

    fn max_receive_segments(&self) -> usize {
        self.socket.max_receive_segments()
    }

    fn may_fragment(&self) -> bool {
        self.socket.may_fragment()
    }
}

impl Drop for Batches {
    fn drop(&mut self) {
        self.news.notify_one();
    }
}

/// Sends what was held and nothing was put behind, until the socket is gone.
async fn send_soon(batches: Weak<Batches>, news: Arc<Notify>) {
    loop {
        news.notified().await;
        for _ in 0..TURNS {
            after_all_that_are_ready().await;
        }
        let Some(batches) = batches.upgrade() else { return };
        let mut writable = batches.socket.clone().create_io_poller();
        let held: Vec<_> = batches.held().values().cloned().collect();
        for batch in held {
            while would_block(&lock(&batch).send(&*batches.socket)) {
                let _ = poll_fn(|cx| writable.as_mut().poll_writable(cx)).await;
            }
        }
        // A connection that is about to send something has its batch in hand.
        batches
            .held()
            .retain(|_, batch| Arc::strong_count(batch) > 1 || !lock(batch).bytes.is_empty());
    }
}

/// Goes to the end of the queue of tasks. (tokio's `yield_now` may wait for sixty turns.)
async fn after_all_that_are_ready() {
    let mut has_waited = false;
    poll_fn(|cx| {
        if std::mem::replace(&mut has_waited, true) {
            return Poll::Ready(());
        }
        cx.waker().wake_by_ref();
        Poll::Pending
    })
    .await;
}

#[cfg(test)]
mod tests;
