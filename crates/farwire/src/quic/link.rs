//! A link whose lanes are QUIC streams.

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use bytes::{Bytes, BytesMut};
use farwire_proto::{FAULT_LEN, FrameKind, HEADER_LEN, Header, Lane, Peer};
use quinn::{Connection, RecvStream, SendStream};
use tokio::runtime::Handle;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};

use super::control::Health;
use crate::link::{Arrival, Broken, Link};
use crate::shm::bell::Bell;

/// Frames of one lane that wait here to be sent, and that wait here to be taken.
const WINDOW: usize = 8;

/// The driver's end. The other ends are tasks, one per stream.
#[derive(Debug)]
pub(crate) struct QuicLink {
    connection: Connection,
    runtime: Handle,
    shared: Arc<Shared>,
    health: Arc<Health>,
    outgoing: HashMap<Lane, mpsc::Sender<Bytes>>,
    /// Lanes that were told to wait.
    refused: HashSet<Lane>,
    incoming: HashMap<Lane, VecDeque<Frame>>,
    streams_opened: u64,
    closed: bool,
}

/// What the tasks and the driver share.
#[derive(Debug)]
struct Shared {
    from: Peer,
    longest: usize,
    /// This process's.
    bell: Bell,
    arrived: Mutex<VecDeque<Result<Frame, Broken>>>,
    writable: Mutex<VecDeque<Lane>>,
    /// Streams of the peer that were accepted, and those of them that are not read to their end.
    accepted: AtomicU64,
    reading: AtomicUsize,
    /// Streams of this side that are not finished.
    writing: AtomicUsize,
}

#[derive(Debug)]
struct Frame {
    header: Header,
    body: Vec<u8>,
    /// Room in its lane, given back when it is dropped.
    _room: OwnedSemaphorePermit,
}

impl Shared {
    fn arrive(&self, frame: Result<Frame, Broken>) {
        self.arrived.lock().unwrap_or_else(PoisonError::into_inner).push_back(frame);
        self.bell.ring();
    }
}

impl QuicLink {
    /// A link over a connection to `from`, for payloads of up to `longest` bytes.
    pub(crate) fn new(
        connection: Connection,
        from: Peer,
        longest: usize,
        bell: Bell,
        health: Arc<Health>,
        runtime: Handle,
    ) -> Self {
        let shared = Arc::new(Shared {
            from,
            longest,
            bell,
            arrived: Mutex::default(),
            writable: Mutex::default(),
            accepted: AtomicU64::new(0),
            reading: AtomicUsize::new(0),
            writing: AtomicUsize::new(0),
        });
        runtime.spawn(accept_streams(connection.clone(), shared.clone()));
        Self {
            connection,
            runtime,
            shared,
            health,
            outgoing: HashMap::new(),
            refused: HashSet::new(),
            incoming: HashMap::new(),
            streams_opened: 0,
            closed: false,
        }
    }

    /// A new stream, and the task that writes it.
    fn open_stream(&mut self, lane: Option<Lane>) -> mpsc::Sender<Bytes> {
        let (sender, frames) = mpsc::channel(WINDOW);
        self.streams_opened += 1;
        self.shared.writing.fetch_add(1, Ordering::SeqCst);
        self.runtime.spawn(write_stream(self.connection.clone(), self.shared.clone(), lane, frames));
        sender
    }
}

impl Link for QuicLink {
    fn kind(&self) -> &'static str {
        "quic"
    }

    fn send(&mut self, lane: Option<Lane>, header: &Header, payload: &[u8], last: bool) -> bool {
        let stream = match lane.and_then(|lane| self.outgoing.get(&lane)) {
            Some(stream) => stream.clone(),
            None => {
                let stream = self.open_stream(lane);
                if let Some(lane) = lane {
                    self.outgoing.insert(lane, stream.clone());
                }
                stream
            }
        };
        let Ok(room) = stream.try_reserve() else {
            self.refused.extend(lane);
            return false;
        };
        let mut frame = BytesMut::with_capacity(HEADER_LEN + payload.len());
        frame.extend_from_slice(&header.encode());
        frame.extend_from_slice(payload);
        room.send(frame.freeze());
        if last && let Some(lane) = lane {
            self.outgoing.remove(&lane);
        }
        true
    }

    fn poll_writable(&mut self) -> Result<Option<Lane>, Broken> {
        let mut writable = self.shared.writable.lock().unwrap_or_else(PoisonError::into_inner);
        while let Some(lane) = writable.pop_front() {
            if self.refused.remove(&lane) {
                return Ok(Some(lane));
            }
        }
        Ok(None)
    }

    fn poll_arrived(&mut self) -> Result<Option<Arrival>, Broken> {
        if let Some(reason) = self.health.loss() {
            tracing::warn!(peer = %self.shared.from, reason, "lost a peer");
            return Err(Broken("the peer is lost"));
        }
        // Read before the queue is found empty: what is counted as being read now may be in the queue a moment later.
        let all_here = self.health.goodbye().is_some_and(|streams| {
            self.shared.accepted.load(Ordering::SeqCst) >= streams
                && self.shared.reading.load(Ordering::SeqCst) == 0
        });
        let frame = self.shared.arrived.lock().unwrap_or_else(PoisonError::into_inner).pop_front();
        let Some(frame) = frame else {
            let news = all_here && !std::mem::replace(&mut self.closed, all_here);
            return Ok(news.then_some(Arrival::Closed));
        };
        let frame = frame?;
        if frame.header.frame == FrameKind::Abort {
            let fault =
                frame.body[..].try_into().map_err(|_| Broken("news of a failure has the wrong length"))?;
            return Ok(Some(Arrival::Abort(frame.header, fault)));
        }
        let lane = Lane::of(self.shared.from, &frame.header);
        self.incoming.entry(lane).or_default().push_back(frame);
        Ok(Some(Arrival::Frame(lane)))
    }

    fn head(&self, lane: &Lane) -> Option<(Header, &[u8])> {
        let frame = self.incoming.get(lane)?.front()?;
        Some((frame.header, &frame.body))
    }

    fn pop(&mut self, lane: &Lane) {
        let frames = self.incoming.get_mut(lane).expect("a frame is popped after it was looked at");
        frames.pop_front();
        if frames.is_empty() {
            self.incoming.remove(lane);
        }
    }

    fn ring(&self) {}

    fn close(&mut self) {
        self.outgoing.clear();
        let (shared, health, streams) = (self.shared.clone(), self.health.clone(), self.streams_opened);
        self.runtime.spawn(async move {
            // Until all that was sent has arrived, or the peer is lost.
            while shared.writing.load(Ordering::SeqCst) > 0 && health.loss().is_none() {
                tokio::time::sleep(std::time::Duration::from_millis(1)).await;
            }
            health.leave(streams);
        });
    }
}

/// Sends the frames of one lane, in order.
async fn write_stream(
    connection: Connection,
    shared: Arc<Shared>,
    lane: Option<Lane>,
    mut frames: mpsc::Receiver<Bytes>,
) {
    let written = async {
        let mut stream: SendStream = connection.open_uni().await.ok()?;
        while let Some(frame) = frames.recv().await {
            stream.write_chunk(frame).await.ok()?;
            if let Some(lane) = lane {
                shared.writable.lock().unwrap_or_else(PoisonError::into_inner).push_back(lane);
                shared.bell.ring();
            }
        }
        stream.finish().ok()?;
        // Until the peer has it all. (An error here is a lost peer, which the heartbeats will tell.)
        stream.stopped().await.ok()
    };
    written.await;
    shared.writing.fetch_sub(1, Ordering::SeqCst);
}

/// Reads every stream that the peer opens, each in a task of its own.
async fn accept_streams(connection: Connection, shared: Arc<Shared>) {
    while let Ok(stream) = connection.accept_uni().await {
        shared.reading.fetch_add(1, Ordering::SeqCst);
        shared.accepted.fetch_add(1, Ordering::SeqCst);
        let shared = shared.clone();
        tokio::spawn(async move {
            if let Err(broken) = read_stream(stream, &shared).await {
                shared.arrive(Err(broken));
            }
            shared.reading.fetch_sub(1, Ordering::SeqCst);
            shared.bell.ring();
        });
    }
}

/// Reads frames for as long as there is room for them; what there is no room for stays with the peer.
async fn read_stream(mut stream: RecvStream, shared: &Shared) -> Result<(), Broken> {
    let window = Arc::new(Semaphore::new(WINDOW));
    loop {
        let room = window.clone().acquire_owned().await.map_err(|_| Broken("the window is closed"))?;
        let mut header = [0; HEADER_LEN];
        match stream.read_exact(&mut header).await {
            Ok(()) => {}
            // The end; a connection that ends in the middle is told by the heartbeats.
            Err(_) => return Ok(()),
        }
        let header = Header::decode(&header).map_err(|_| Broken("a frame has no header"))?;
        let length = header.payload as usize;
        if length > shared.longest.max(FAULT_LEN) {
            return Err(Broken("a frame is longer than agreed"));
        }
        let mut body = vec![0; length];
        if stream.read_exact(&mut body).await.is_err() {
            return Ok(());
        }
        shared.arrive(Ok(Frame { header, body, _room: room }));
    }
}
