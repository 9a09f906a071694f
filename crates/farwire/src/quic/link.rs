//! A link whose lanes are QUIC streams.

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use bytes::{Bytes, BytesMut};
use farwire_proto::{CommId, FAULT_LEN, HEADER_LEN, Header, Lane, OpSeq, Peer};
use quinn::{Connection, RecvStream, SendStream, VarInt};
use tokio::runtime::Handle;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};

use super::control::Health;
use crate::link::{Arrival, Broken, Link};
use crate::shm::bell::Bell;

/// Frames of one lane that wait here to be sent, and that wait here to be taken.
const WINDOW: usize = 8;

// What a peer can make this process hold, whether by mistake or by malice. With the default segments, whose frames have up to 128 KiB:
//
//   CONNECTION_WINDOW            256 MiB  in streams, unread
//   STREAMS × one frame          128 MiB  the heads of lanes
//   SPARE_FRAMES × one frame      64 MiB  what is read beyond the head
//
// Frames for an operation that this rank has not submitted stay where they are, so what a peer sends for operations that are wanted must not have to wait behind them:
//
// - Each lane may always read one frame, whatever the others hold: only further ones are counted against SPARE_FRAMES.
// - A stream holds STREAM_WINDOW at most, so it takes CONNECTION_WINDOW / STREAM_WINDOW = 256 operations in flight, each with more than that for this rank and none of
//   them submitted here, to fill the connection; and STREAMS operations of any size to use up the streams.
//
// Beyond these numbers, ranks that submit operations in different orders can wait for each other until the operations' deadline. Ranks that submit in the same order,
// as collectives must be, can only if one is so many operations ahead of the other.

/// Streams of a peer that may be open: operations in flight from it to this rank.
const STREAMS: VarInt = VarInt::from_u32(1024);
/// Bytes of one stream that are unread. More than about a thousand gaps on one stream would end the connection, so this stays small, and there are many streams.
pub(crate) const STREAM_WINDOW: VarInt = VarInt::from_u32(1 << 20);
/// Bytes of all streams of a connection that are unread.
pub(crate) const CONNECTION_WINDOW: VarInt = VarInt::from_u32(256 << 20);
/// Frames of all lanes that were read and wait here, but for the first of each.
const SPARE_FRAMES: usize = 512;

/// The driver's end. The other ends are tasks, one per stream.
#[derive(Debug)]
pub(crate) struct QuicLink {
    connection: Connection,
    runtime: Handle,
    shared: Arc<Shared>,
    health: Arc<Health>,
    outgoing: HashMap<Lane, mpsc::Sender<Bytes>>,
    /// The stream of notices; until this side has said goodbye.
    notices: Option<mpsc::Sender<Bytes>>,
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
    spare: Arc<Semaphore>,
}

#[derive(Debug)]
struct Frame {
    header: Header,
    body: Vec<u8>,
    /// Room in its lane, and among the spare frames unless it was the only one of its lane; given back when it is dropped.
    _room: (OwnedSemaphorePermit, Option<OwnedSemaphorePermit>),
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
            spare: Arc::new(Semaphore::new(SPARE_FRAMES)),
        });
        connection.set_receive_window(CONNECTION_WINDOW);
        connection.set_max_concurrent_uni_streams(STREAMS);
        runtime.spawn(accept_streams(connection.clone(), shared.clone()));
        let mut link = Self {
            connection,
            runtime,
            shared,
            health,
            outgoing: HashMap::new(),
            notices: None,
            refused: HashSet::new(),
            incoming: HashMap::new(),
            streams_opened: 0,
            closed: false,
        };
        // Opened first, so that it never has to wait for one of the peer's streams.
        link.notices = Some(link.open_stream(None));
        link
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
        let stream = match lane {
            None => self.notices.clone(),
            Some(lane) => self.outgoing.get(&lane).cloned(),
        };
        let stream = match (stream, lane) {
            (Some(stream), _) => stream,
            (None, None) => return true, // this side has said goodbye
            (None, Some(lane)) => {
                let stream = self.open_stream(Some(lane));
                self.outgoing.insert(lane, stream.clone());
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
        if frame.header.frame.is_notice() {
            return Ok(Some(Arrival::Notice(frame.header, frame.body)));
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

    fn abandon(&mut self, comm: CommId, seq: Option<OpSeq>) {
        let gone = |lane: &Lane| lane.comm == comm && seq.is_none_or(|seq| lane.seq == seq);
        self.outgoing.retain(|lane, _| !gone(lane));
        self.refused.retain(|lane| !gone(lane));
    }

    fn ring(&self) {}

    fn close(&mut self) {
        self.outgoing.clear();
        self.notices = None;
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
            }
            shared.bell.ring();
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
        let closed = |_| Broken("the window is closed");
        let mut room = window.clone().acquire_owned().await.map_err(closed)?;
        let mut spare = None;
        if window.available_permits() < WINDOW - 1 {
            // Not the only frame of its lane: it is read when there is room to spare, or when it has become the only one.
            tokio::select! {
                taken = shared.spare.clone().acquire_owned() => spare = Some(taken.map_err(closed)?),
                all = window.clone().acquire_many_owned(WINDOW as u32 - 1) => {
                    room.merge(all.map_err(closed)?);
                    drop(room.split(WINDOW - 1));
                }
            }
        }
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
        shared.arrive(Ok(Frame { header, body, _room: (room, spare) }));
    }
}

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;
    use std::time::Duration;

    use farwire_proto::{Call, CommId, Config, Engine, Epoch, OpSeq, Options, Time, WorldSize};
    use quinn::Endpoint;
    use tokio::runtime::Runtime;

    use super::*;
    use crate::join::identity::Identity;
    use crate::join::rendezvous::transport;
    use crate::token::Token;

    const LONGEST: usize = 1000;

    /// A link, and the other end of its connection.
    struct Ends {
        runtime: Runtime,
        link: QuicLink,
        bell: Bell,
        peer: Connection,
        _endpoints: [Endpoint; 2],
    }

    fn ends() -> Ends {
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let token = Token::generate();
        let endpoint = |rank| {
            let identity = Identity::new(&token, Peer(rank), Epoch(0), &Default::default()).unwrap();
            let (mut server, mut client) =
                (identity.server_config().unwrap(), identity.client_config().unwrap());
            server.transport_config(Arc::new(transport()));
            client.transport_config(Arc::new(transport()));
            let mut endpoint = Endpoint::server(server, SocketAddr::from(([127, 0, 0, 1], 0))).unwrap();
            endpoint.set_default_client_config(client);
            (endpoint, identity)
        };
        let (connection, peer, endpoints) = runtime.block_on(async {
            let ((here, identity), (there, _)) = (endpoint(0), endpoint(1));
            let connecting = there.connect(here.local_addr().unwrap(), &identity.name_of(Peer(0))).unwrap();
            let accepting = async { here.accept().await.unwrap().await.unwrap() };
            let (connection, peer) = tokio::join!(accepting, connecting);
            (connection, peer.unwrap(), [here, there])
        });
        let bell = Bell::new().unwrap();
        let health = Health::new(bell.clone());
        let handle = runtime.handle().clone();
        let link = QuicLink::new(connection, Peer(1), LONGEST, bell.clone(), health, handle);
        Ends { runtime, link, bell, peer, _endpoints: endpoints }
    }

    /// What arrives next.
    fn next(link: &mut QuicLink, bell: &Bell) -> Result<Arrival, Broken> {
        loop {
            let count = bell.count();
            if let Some(arrival) = link.poll_arrived()? {
                return Ok(arrival);
            }
            bell.sleep(count, Duration::from_millis(100));
        }
    }

    fn header(payload: usize) -> Header {
        let mut engine = Engine::new(Peer(1), WorldSize::new(2).unwrap(), Config::default());
        let plan = engine.plan(CommId::WORLD, &Call::Barrier, &Options::default()).unwrap();
        engine.submit(Time::ZERO, plan).unwrap();
        Header { payload: payload as u32, ..engine.poll_transmit().unwrap().header }
    }

    /// Writes frames of one operation for as long as there is room for them.
    async fn write_frames(peer: Connection, seq: u64, frames: usize) {
        let header = Header { seq: OpSeq::Collective(seq), ..header(LONGEST) };
        let frame = [&header.encode()[..], &[7; LONGEST]].concat();
        let mut stream = peer.open_uni().await.unwrap();
        for _ in 0..frames {
            stream.write_all(&frame).await.unwrap();
        }
        stream.finish().unwrap();
        stream.stopped().await.unwrap();
    }

    #[test]
    fn a_frame_with_a_huge_length_breaks_the_link_and_allocates_nothing() {
        for payload in [LONGEST + 1, u32::MAX as usize] {
            let Ends { runtime, mut link, bell, peer, _endpoints } = ends();
            runtime.block_on(async {
                let mut stream = peer.open_uni().await.unwrap();
                stream.write_all(&header(payload).encode()).await.unwrap();
            });
            assert_eq!(next(&mut link, &bell).unwrap_err(), Broken("a frame is longer than agreed"));
        }
    }

    #[test]
    fn what_nobody_wants_yet_is_bounded_and_holds_up_nothing_that_is_wanted() {
        const EARLY: usize = 200;
        const WANTED: u64 = 9999;
        let Ends { runtime, mut link, bell, peer, _endpoints } = ends();
        let held = |link: &QuicLink| link.incoming.values().map(VecDeque::len).sum::<usize>();
        for seq in 0..EARLY {
            runtime.spawn(write_frames(peer.clone(), seq as u64, 2 * WINDOW));
        }
        while held(&link) < EARLY + SPARE_FRAMES {
            assert!(matches!(next(&mut link, &bell), Ok(Arrival::Frame(_))));
        }
        let frames = 100;
        runtime.spawn(write_frames(peer, WANTED, frames));
        for _ in 0..frames {
            let Ok(Arrival::Frame(lane)) = next(&mut link, &bell) else { panic!("only frames are sent") };
            assert_eq!(lane.seq, OpSeq::Collective(WANTED), "there is no room for others");
            link.pop(&lane);
        }
        assert_eq!(held(&link), EARLY + SPARE_FRAMES);
    }
}
