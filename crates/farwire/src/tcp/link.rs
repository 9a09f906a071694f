//! A link whose lanes share TCP connections.
//!
//! A connection carries messages, one after the other. Those that carry data:
//!
//! ```text
//! FRAME or LAST │ header │ payload     a frame of a lane, or a notice; LAST: its lane's last
//! GIVEN_UP      │ header               nothing more comes on this header's lane: drop what came
//! ```
//!
//! And against their direction:
//!
//! ```text
//! TAKEN         │ header │ u64         so much of this header's lane has been taken, in all
//! TAKEN_ALL     │ u64                  and of all lanes
//! ```
//!
//! Frames of a lane may take different connections, and are put in order by the index in their
//! headers.
//!
//! # Windows
//!
//! Whoever reads a connection never waits, since what it reads is bounded by windows: a sender has
//! at most a window of a lane under way that was not taken, and [`ALL_WINDOW`] of all lanes.
//! So a lane that nobody takes anything from holds up no other. As over QUIC, beyond these numbers
//! operations that both sides have called, on several communicators and in different orders, can
//! wait for each other until their deadline.
//!
//! # The end
//!
//! A side that leaves says END on every connection, behind all that it sent, and goes when it was
//! HEARD. A connection that ends without that tells of a lost peer.

use std::collections::VecDeque;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use farwire_proto::{CommId, HEADER_LEN, Header, Lane, OpSeq, Peer};
use rustc_hash::{FxHashMap as HashMap, FxHashSet as HashSet};
use tokio::net::TcpStream;
use tokio::sync::Notify;
use tokio::task::AbortHandle;

use super::info;
use super::tls::Secured;
use super::workers::Workers;
use crate::link::in_order::InOrder;
use crate::link::{Arrival, Broken, Link, Liveness, Loss, NetworkPath, Pair};
use crate::quic::control::Health;
use crate::shm::bell::Bell;

/// The name of this kind of link.
pub(super) const NAME: &str = "tcp";

/// What one lane may have under way, as [`cost`] counts: twice what the path holds, between these.
const LANE_WINDOW: u64 = 8 << 20;
const LONGEST_LANE_WINDOW: u64 = 64 << 20;
/// What all lanes may have under way. A peer can make this process hold as much.
const ALL_WINDOW: u64 = 256 << 20;
/// Bytes that wait here for a connection. When there are as many, lanes wait.
const OUTBOX: usize = 256 << 10;
/// The same for notices, which are short and go before.
const OUTBOX_FOR_NOTICES: usize = 2 * OUTBOX;
/// Bytes that are encrypted and written at once: whole records, which stay in the cache.
const SEAL: usize = 64 << 10;
/// Payloads whose memory is kept for others to come, and the shortest of them.
const POOL: usize = 256;
const SHORTEST_IN_POOL: usize = 8 << 10;

/// What a frame counts in windows: its payload, and what it takes to keep it.
fn cost(payload: usize) -> u64 {
    payload as u64 + 256
}

const FRAME: u8 = 0;
const LAST: u8 = 1;
const GIVEN_UP: u8 = 2;
const TAKEN: u8 = 3;
const TAKEN_ALL: u8 = 4;
const END: u8 = 5;
const HEARD: u8 = 6;

/// The connections of a link.
#[derive(Debug)]
pub(super) struct Ends {
    /// Those that carry this side's data.
    out: Vec<Secured>,
    /// Those that carry the peer's.
    back: Vec<Secured>,
}

impl Ends {
    /// Of connections that both sides have in the same order. Whoever dialled sends on the first.
    pub(super) fn new(connections: Vec<Secured>, dialled: bool) -> Self {
        let (mut out, mut back) = (Vec::new(), Vec::new());
        for (index, secured) in connections.into_iter().enumerate() {
            if (index % 2 == 0) == dialled { out.push(secured) } else { back.push(secured) }
        }
        Self { out, back }
    }
}

/// The driver's end. The other ends are tasks, one per connection.
#[derive(Debug)]
pub(crate) struct TcpLink {
    shared: Arc<Shared>,
    tasks: Arc<Tasks>,
    health: Arc<Health>,
    /// The peer's number. Inside, lanes carry the one that it had when the link was made.
    peer: Peer,
    /// How many connections carry data of this side; they come first.
    out: usize,
    /// Their sockets, to ask the system about.
    sockets: Vec<std::net::TcpStream>,
    near: bool,
    /// What one lane may have under way.
    lane_window: u64,
    /// By communicator and operation.
    outgoing: HashMap<(CommId, OpSeq), Outgoing>,
    /// Lanes that wait for room of any kind but their own window, in turn.
    refused: VecDeque<Lane>,
    is_refused: HashSet<Lane>,
    /// What all lanes have sent.
    sent_all: u64,
    frames_sent: u64,
    incoming: HashMap<Lane, Incoming>,
    /// What has come and was not looked at.
    news: VecDeque<Result<News, Broken>>,
    /// What was taken of all lanes, and how much of that the peer was told.
    taken_all: u64,
    told_all: u64,
    /// This side has said goodbye; and the peer has.
    leaving: bool,
    closed: bool,
}

/// A lane to the peer.
#[derive(Debug)]
struct Outgoing {
    lane: Lane,
    /// One of its headers, which names it.
    header: Header,
    sent: u64,
    taken: u64,
    /// It waits for its window.
    waits: bool,
}

/// A lane from the peer.
#[derive(Debug, Default)]
struct Incoming {
    frames: InOrder<Frame>,
    /// What came and was not taken.
    held: u64,
    taken: u64,
    told: u64,
}

#[derive(Debug)]
struct Frame {
    header: Header,
    body: Vec<u8>,
    /// Whether it is the last of its lane.
    last: bool,
}

/// What those who read have to tell the driver.
#[derive(Debug)]
enum News {
    Frame(Frame),
    /// The peer has given this lane up.
    GivenUp(Lane),
    /// So much of this side's lane has been taken.
    Taken(Header, u64),
}

/// What the tasks and the driver share.
#[derive(Debug)]
struct Shared {
    from: Peer,
    longest: usize,
    /// This process's.
    bell: Bell,
    health: Arc<Health>,
    outboxes: Vec<Outbox>,
    arrived: Mutex<VecDeque<Result<News, Broken>>>,
    /// Frames that have arrived, ever.
    received: AtomicU64,
    /// What has arrived and was not taken.
    held: AtomicU64,
    /// What the peer has taken of all lanes.
    taken_all: AtomicU64,
    pool: Mutex<Vec<Vec<u8>>>,
    /// Connections on which the peer has not heard the end, and news of that.
    unheard: AtomicUsize,
    heard: Notify,
}

/// What waits to be written to one connection.
#[derive(Debug, Default)]
struct Outbox {
    bytes: Mutex<Vec<u8>>,
    /// How many these are, for those that do not have the lock.
    length: AtomicUsize,
    /// Whoever writes has found nothing and waits.
    sleeps: AtomicBool,
    filled: Notify,
}

impl Outbox {
    /// Adds a message.
    fn put(&self, parts: &[&[u8]]) {
        let mut bytes = self.bytes.lock().unwrap_or_else(PoisonError::into_inner);
        for part in parts {
            bytes.extend_from_slice(part);
        }
        self.length.store(bytes.len(), Ordering::Relaxed);
        drop(bytes);
        // Under the same lock, whoever writes has either seen this or said that it sleeps.
        if self.sleeps.swap(false, Ordering::AcqRel) {
            self.filled.notify_one();
        }
    }

    /// Takes all there is in exchange for memory that is empty. If there is nothing, the next to
    /// put something in will tell.
    fn take(&self, empty: &mut Vec<u8>) {
        let mut bytes = self.bytes.lock().unwrap_or_else(PoisonError::into_inner);
        self.sleeps.store(bytes.is_empty(), Ordering::Release);
        self.length.store(0, Ordering::Relaxed);
        std::mem::swap(&mut *bytes, empty);
    }

    fn length(&self) -> usize {
        self.length.load(Ordering::Relaxed)
    }
}

impl Shared {
    fn new(
        from: Peer,
        longest: usize,
        bell: Bell,
        health: Arc<Health>,
        connections: usize,
    ) -> Self {
        Self {
            from,
            longest,
            bell,
            health,
            outboxes: (0..connections).map(|_| Outbox::default()).collect(),
            arrived: Mutex::default(),
            received: AtomicU64::new(0),
            held: AtomicU64::new(0),
            taken_all: AtomicU64::new(0),
            pool: Mutex::default(),
            unheard: AtomicUsize::new(connections),
            heard: Notify::new(),
        }
    }

    fn pool(&self) -> MutexGuard<'_, Vec<Vec<u8>>> {
        self.pool.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Empty memory for a payload.
    fn memory(&self, length: usize) -> Vec<u8> {
        let kept = if length >= SHORTEST_IN_POOL { self.pool().pop() } else { None };
        let mut memory = kept.unwrap_or_default();
        memory.clear();
        memory.reserve_exact(length);
        memory
    }

    fn recycle(&self, memory: Vec<u8>) {
        if memory.capacity() >= SHORTEST_IN_POOL {
            let mut pool = self.pool();
            if pool.len() < POOL {
                pool.push(memory);
            }
        }
    }

    /// A connection has no more to wait for.
    fn count_heard(&self) {
        self.unheard.fetch_sub(1, Ordering::SeqCst);
        self.heard.notify_one();
    }
}

/// What serves the connections. They are closed when this is dropped.
#[derive(Debug)]
struct Tasks {
    tasks: Vec<AbortHandle>,
    workers: Arc<Workers>,
}

impl Tasks {
    fn abort(&self) {
        self.tasks.iter().for_each(AbortHandle::abort);
    }
}

impl Drop for Tasks {
    fn drop(&mut self) {
        self.abort();
    }
}

impl TcpLink {
    /// The link of a pair.
    pub(super) fn new(
        ends: Ends,
        pair: &Pair,
        health: Arc<Health>,
        workers: Arc<Workers>,
    ) -> io::Result<Self> {
        let Pair { peer, payload: longest, ref bell, .. } = *pair;
        let out = ends.out.len();
        let connections: Vec<_> = ends.out.into_iter().chain(ends.back).collect();
        let shared = Shared::new(peer, longest, bell.clone(), health.clone(), connections.len());
        let shared = Arc::new(shared);
        let (mut tasks, mut sockets) = (Vec::new(), Vec::new());
        for (index, Secured { socket, session }) in connections.into_iter().enumerate() {
            let (worker, socket) = (workers.next(), socket.into_std()?);
            if index < out {
                sockets.push(socket.try_clone()?);
            }
            let _inside = worker.enter();
            let secured = Secured { socket: TcpStream::from_std(socket)?, session };
            tasks.push(worker.spawn(serve(secured, shared.clone(), index)).abort_handle());
        }
        Ok(Self {
            shared,
            tasks: Arc::new(Tasks { tasks, workers }),
            health,
            peer,
            near: pair.is_near(),
            out,
            sockets,
            lane_window: LANE_WINDOW,
            outgoing: HashMap::default(),
            refused: VecDeque::new(),
            is_refused: HashSet::default(),
            sent_all: 0,
            frames_sent: 0,
            incoming: HashMap::default(),
            news: VecDeque::new(),
            taken_all: 0,
            told_all: 0,
            leaving: false,
            closed: false,
        })
    }

    /// A lane from the peer, as it is named inside.
    fn inside(&self, lane: &Lane) -> Lane {
        Lane { from: self.shared.from, ..*lane }
    }

    /// Where the next frame goes: the connection that has the least to do, if it has room for more.
    fn outbox(&self) -> Option<&Outbox> {
        let out = &self.shared.outboxes[..self.out];
        out.iter().min_by_key(|outbox| outbox.length()).filter(|outbox| outbox.length() < OUTBOX)
    }

    /// Where notices go, which stay in order.
    fn outbox_for_notices(&self) -> Option<&Outbox> {
        self.shared.outboxes.first().filter(|outbox| outbox.length() < OUTBOX_FOR_NOTICES)
    }

    /// Whether any frame may be sent.
    fn has_room(&self) -> bool {
        // What the peer says may be wrong.
        let under_way = self.sent_all.saturating_sub(self.shared.taken_all.load(Ordering::Acquire));
        under_way < ALL_WINDOW && self.outbox().is_some()
    }

    /// A lane had to wait for its window: the path may hold more than that.
    fn widen(&mut self) {
        let path = self.path().map_or(0, |path| 2 * path.window);
        self.lane_window = path.clamp(self.lane_window, LONGEST_LANE_WINDOW);
    }

    /// A lane tries again when there is room.
    fn refuse(&mut self, lane: Lane) {
        if self.is_refused.insert(lane) {
            self.refused.push_back(lane);
        }
    }

    /// So much was taken out of what is held for the peer.
    fn count_taken(&mut self, cost: u64) {
        self.shared.held.fetch_sub(cost, Ordering::AcqRel);
        self.taken_all += cost;
        if self.taken_all - self.told_all > ALL_WINDOW / 8 {
            self.told_all = self.taken_all;
            self.tell(&[&[TAKEN_ALL], &self.taken_all.to_le_bytes()]);
        }
    }

    /// Says something against the direction of data.
    fn tell(&self, message: &[&[u8]]) {
        if let Some(back) = self.shared.outboxes.get(self.out) {
            back.put(message);
        }
    }

    /// Forgets a lane from the peer, and what came of it.
    fn drop_incoming(&mut self, lane: &Lane) {
        if let Some(incoming) = self.incoming.remove(lane) {
            self.count_taken(incoming.held);
            for frame in incoming.frames.into_frames() {
                self.shared.recycle(frame.body);
            }
        }
    }

    fn next_news(&mut self) -> Option<Result<News, Broken>> {
        if self.news.is_empty() {
            let mut arrived = self.shared.arrived.lock().unwrap_or_else(PoisonError::into_inner);
            std::mem::swap(&mut *arrived, &mut self.news);
        }
        self.news.pop_front()
    }
}

impl Link for TcpLink {
    fn kind(&self) -> &'static str {
        NAME
    }

    fn is_near(&self) -> bool {
        self.near
    }

    fn path(&self) -> Option<NetworkPath> {
        let all = self.sockets.iter().filter_map(info::path);
        all.reduce(|one, other| NetworkPath {
            window: one.window + other.window,
            sent: one.sent + other.sent,
            lost: one.lost + other.lost,
            ..one
        })
    }

    fn send(&mut self, lane: Option<Lane>, header: &Header, payload: &[u8], last: bool) -> bool {
        if self.leaving {
            return true; // this side has said goodbye
        }
        let cost = cost(payload.len());
        if let Some(lane) = lane {
            let outgoing = self.outgoing.entry((lane.comm, lane.seq)).or_insert_with(|| Outgoing {
                lane,
                header: Header { payload: 0, ..*header },
                sent: 0,
                taken: 0,
                waits: false,
            });
            if outgoing.sent - outgoing.taken >= self.lane_window {
                outgoing.waits = true;
                return false;
            }
            if !self.has_room() {
                self.refuse(lane);
                return false;
            }
        }
        let outbox = if lane.is_some() { self.outbox() } else { self.outbox_for_notices() };
        let Some(outbox) = outbox else { return false };
        let kind = if last { LAST } else { FRAME };
        outbox.put(&[&[kind], &header.encode(), payload]);
        if let Some(lane) = lane {
            self.sent_all += cost;
            self.frames_sent += 1;
            let key = (lane.comm, lane.seq);
            if last {
                self.outgoing.remove(&key);
            } else if let Some(outgoing) = self.outgoing.get_mut(&key) {
                outgoing.sent += cost;
            }
        }
        true
    }

    fn poll_writable(&mut self) -> Result<Option<Lane>, Broken> {
        if self.refused.is_empty() || !self.has_room() {
            return Ok(None);
        }
        let lane = self.refused.pop_front();
        lane.iter().for_each(|lane| {
            self.is_refused.remove(lane);
        });
        Ok(lane)
    }

    fn poll_arrived(&mut self) -> Result<Option<Arrival>, Broken> {
        if let Some(reason) = self.health.loss() {
            tracing::warn!(peer = %self.peer, reason, "lost a peer");
            return Err(Broken("the peer is lost"));
        }
        // Read before the queue is found empty: what is counted now is in the queue.
        let all_here = self
            .health
            .goodbye()
            .is_some_and(|frames| self.shared.received.load(Ordering::Acquire) >= frames);
        loop {
            let Some(told) = self.next_news() else {
                let news = all_here && !std::mem::replace(&mut self.closed, all_here);
                return Ok(news.then_some(Arrival::Closed));
            };
            let frame = match told? {
                News::Frame(frame) => frame,
                News::GivenUp(lane) => {
                    self.drop_incoming(&lane);
                    continue;
                }
                News::Taken(header, taken) => {
                    if let Some(outgoing) = self.outgoing.get_mut(&(header.comm, header.seq)) {
                        if taken > outgoing.sent {
                            return Err(Broken("it has taken more than was sent"));
                        }
                        outgoing.taken = outgoing.taken.max(taken);
                        if std::mem::take(&mut outgoing.waits) {
                            let lane = outgoing.lane;
                            self.refuse(lane);
                            self.widen();
                        }
                    }
                    continue;
                }
            };
            if frame.header.frame.is_notice() {
                return Ok(Some(Arrival::Notice(frame.header, frame.body)));
            }
            let (lane, index) = (Lane::of(self.shared.from, &frame.header), frame.header.index);
            let incoming = self.incoming.entry(lane).or_default();
            incoming.held += cost(frame.body.len());
            if incoming.held >= LONGEST_LANE_WINDOW + cost(self.shared.longest) {
                return Err(Broken("a lane has more under way than its window"));
            }
            if incoming.frames.put(index, frame)? {
                return Ok(Some(Arrival::Frame(Lane { from: self.peer, ..lane })));
            }
        }
    }

    fn head(&self, lane: &Lane) -> Option<(Header, &[u8])> {
        let frame = self.incoming.get(&self.inside(lane))?.frames.head()?;
        Some((frame.header, &frame.body))
    }

    fn pop(&mut self, lane: &Lane) {
        let lane = &self.inside(lane);
        let incoming =
            self.incoming.get_mut(lane).expect("a frame is popped after it was looked at");
        let frame = incoming.frames.pop().expect("a frame is popped after it was looked at");
        let cost = cost(frame.body.len());
        incoming.held -= cost;
        incoming.taken += cost;
        let taken = incoming.taken;
        if frame.last {
            self.incoming.remove(lane);
        } else if taken - incoming.told > LANE_WINDOW / 4 {
            incoming.told = taken;
            let header = Header { payload: 0, ..frame.header };
            self.tell(&[&[TAKEN], &header.encode(), &taken.to_le_bytes()]);
        }
        self.shared.recycle(frame.body);
        self.count_taken(cost);
    }

    fn abandon(&mut self, comm: CommId, seq: Option<OpSeq>) {
        let gone = |lane: &Lane| lane.comm == comm && seq.is_none_or(|seq| lane.seq == seq);
        let out = &self.shared.outboxes[..self.out];
        for (_, lane) in self.outgoing.extract_if(|_, outgoing| gone(&outgoing.lane)) {
            // Behind the last of its frames, whichever way that took.
            out.iter().for_each(|outbox| outbox.put(&[&[GIVEN_UP], &lane.header.encode()]));
        }
        self.refused.retain(|lane| !gone(lane));
        self.is_refused.retain(|lane| !gone(lane));
    }

    fn close(&mut self) {
        if std::mem::replace(&mut self.leaving, true) {
            return;
        }
        self.outgoing.clear();
        self.sockets.clear(); // which would keep the connections open
        self.shared.outboxes.iter().for_each(|outbox| outbox.put(&[&[END]]));
        let (shared, tasks, frames) = (self.shared.clone(), self.tasks.clone(), self.frames_sent);
        self.tasks.workers.next().spawn(async move {
            // Until all that was sent has arrived, or the peer is lost.
            while shared.unheard.load(Ordering::SeqCst) > 0 && shared.health.loss().is_none() {
                let _ = tokio::time::timeout(LOOK, shared.heard.notified()).await;
            }
            shared.health.leave(frames);
            drop(tasks); // and with them the connections: the other side has heard of that
        });
    }

    fn give_up(&mut self) {
        self.leaving = true;
        self.outgoing.clear();
        self.sockets.clear();
        Liveness::give_up(&*self.health);
        self.tasks.abort();
    }

    /// A goodbye shows in [`poll_arrived`](Link::poll_arrived). A connection that has ended proves
    /// nothing about the peer's process.
    fn loss(&self) -> Loss {
        Loss::Unreachable
    }

    fn liveness(&self) -> Option<Arc<dyn Liveness>> {
        Some(self.health.clone())
    }

    fn set_peer(&mut self, from: Peer) {
        self.peer = from;
    }
}

/// How often to look whether a peer that should hear the end is lost.
const LOOK: Duration = Duration::from_millis(5);

/// Serves one connection until it ends.
async fn serve(secured: Secured, shared: Arc<Shared>, index: usize) {
    let mut reader = Reader::new(&shared, index);
    let end = move_bytes(secured, &shared.outboxes[index], &mut reader).await;
    let Reader { ended, heard, broken, .. } = reader;
    if !heard {
        shared.count_heard(); // it never will
    }
    // What is broken, the driver is told.
    if !ended && !broken && shared.health.goodbye().is_none() && shared.health.loss().is_none() {
        let reason = match end.kind() {
            io::ErrorKind::UnexpectedEof => "it closed a TCP connection".to_owned(),
            _ => format!("a TCP connection failed: {end}"),
        };
        shared.health.lose(reason);
    }
}

/// Writes what is put into the outbox, and reads all that comes, until that is no more possible.
async fn move_bytes(
    Secured { socket, mut session }: Secured,
    outbox: &Outbox,
    reader: &mut Reader<'_>,
) -> io::Error {
    let (mut plain, mut sealed) = (Vec::with_capacity(2 * OUTBOX), 0);
    let moved = async {
        reader.read(|sink| session.open(sink))?; // what came with the handshake
        loop {
            let mut idle = false;
            if session.outgoing.is_empty() {
                if sealed == plain.len() {
                    plain.clear();
                    sealed = 0;
                    outbox.take(&mut plain);
                    idle = plain.is_empty();
                    if plain.len() >= OUTBOX {
                        reader.shared.bell.ring(); // there is room again
                    }
                }
                let next = &plain[sealed..plain.len().min(sealed + SEAL)];
                if !next.is_empty() {
                    session.seal(next)?;
                    sealed += next.len();
                }
            }
            let wrote_all = session.write(&socket)?;
            tokio::select! {
                readable = socket.readable() => {
                    readable?;
                    match session.fill(&socket) {
                        Ok(()) => reader.read(|sink| session.open(sink))?,
                        Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                        Err(error) => return Err(error),
                    }
                }
                writable = socket.writable(), if !wrote_all => writable?,
                () = outbox.filled.notified(), if idle => {}
                () = std::future::ready(()), if wrote_all && !idle => {}
            }
        }
    };
    let end: io::Result<()> = moved.await;
    end.err().unwrap_or_else(|| io::ErrorKind::UnexpectedEof.into())
}

/// Puts messages together from what comes on one connection.
struct Reader<'a> {
    shared: &'a Shared,
    index: usize,
    /// The beginning of a message: all but a payload.
    start: [u8; LONGEST_START],
    have: usize,
    /// A frame whose payload is coming.
    frame: Option<(Header, bool, Vec<u8>)>,
    news: Vec<Result<News, Broken>>,
    /// Frames among the news.
    frames: u64,
    /// The peer has said that nothing more comes; and has heard the same.
    ended: bool,
    heard: bool,
    /// It does not keep to the protocol.
    broken: bool,
}

const LONGEST_START: usize = 1 + HEADER_LEN + 8;

impl<'a> Reader<'a> {
    fn new(shared: &'a Shared, index: usize) -> Self {
        Self {
            shared,
            index,
            start: [0; LONGEST_START],
            have: 0,
            frame: None,
            news: Vec::new(),
            frames: 0,
            ended: false,
            heard: false,
            broken: false,
        }
    }

    /// Reads all that there is, and tells the driver once.
    fn read(
        &mut self,
        open: impl FnOnce(&mut dyn FnMut(&[u8])) -> io::Result<()>,
    ) -> io::Result<()> {
        let mut broken = None;
        let opened = open(&mut |bytes| {
            if broken.is_none() {
                broken = self.feed(bytes).err();
            }
        });
        self.broken |= broken.is_some();
        self.news.extend(broken.map(Err));
        if !self.news.is_empty() {
            let mut arrived = self.shared.arrived.lock().unwrap_or_else(PoisonError::into_inner);
            arrived.extend(self.news.drain(..));
            drop(arrived);
            self.shared.received.fetch_add(std::mem::take(&mut self.frames), Ordering::AcqRel);
            self.shared.bell.ring();
        }
        match broken {
            Some(broken) => Err(io::Error::other(broken)),
            None => opened,
        }
    }

    fn feed(&mut self, mut bytes: &[u8]) -> Result<(), Broken> {
        while !bytes.is_empty() || self.frame.as_ref().is_some_and(is_whole) {
            if let Some((header, _, body)) = &mut self.frame {
                let missing = header.payload as usize - body.len();
                let (now, later) = bytes.split_at(missing.min(bytes.len()));
                body.extend_from_slice(now);
                bytes = later;
                if let Some((header, last, body)) = self.frame.take_if(|frame| is_whole(frame)) {
                    self.frames += u64::from(!header.frame.is_notice());
                    self.news.push(Ok(News::Frame(Frame { header, body, last })));
                }
                continue;
            }
            let kind = if self.have == 0 { bytes[0] } else { self.start[0] };
            let length = match kind {
                FRAME | LAST | GIVEN_UP => 1 + HEADER_LEN,
                TAKEN => 1 + HEADER_LEN + 8,
                TAKEN_ALL => 1 + 8,
                END | HEARD => 1,
                _ => return Err(Broken("a message of a kind that does not exist")),
            };
            let (now, later) = bytes.split_at((length - self.have).min(bytes.len()));
            self.start[self.have..self.have + now.len()].copy_from_slice(now);
            self.have += now.len();
            bytes = later;
            if self.have == length {
                self.have = 0;
                self.begin(kind)?;
            }
        }
        Ok(())
    }

    /// The start of a message is here.
    fn begin(&mut self, kind: u8) -> Result<(), Broken> {
        let shared = self.shared;
        let number = |at: usize| {
            let bytes = self.start[at..].first_chunk().expect("it is that long");
            u64::from_le_bytes(*bytes)
        };
        let header = || {
            Header::decode(&self.start[1..1 + HEADER_LEN])
                .map_err(|_| Broken("a frame has no header"))
        };
        match kind {
            FRAME | LAST => {
                let header = header()?;
                let length = header.payload as usize;
                // Notices are short, or their headers are refused.
                if !header.frame.is_notice() {
                    if length > shared.longest {
                        return Err(Broken("a frame is longer than agreed"));
                    }
                    let held = shared.held.fetch_add(cost(length), Ordering::AcqRel);
                    if held > ALL_WINDOW + cost(shared.longest) {
                        return Err(Broken("more is under way than the window"));
                    }
                }
                self.frame = Some((header, kind == LAST, shared.memory(length)));
            }
            GIVEN_UP => self.news.push(Ok(News::GivenUp(Lane::of(shared.from, &header()?)))),
            TAKEN => {
                let news = News::Taken(header()?, number(1 + HEADER_LEN));
                self.news.push(Ok(news));
            }
            TAKEN_ALL => {
                shared.taken_all.fetch_max(number(1), Ordering::AcqRel);
                shared.bell.ring();
            }
            END => {
                self.ended = true;
                shared.outboxes[self.index].put(&[&[HEARD]]);
            }
            _ => {
                if !std::mem::replace(&mut self.heard, true) {
                    shared.count_heard();
                }
            }
        }
        Ok(())
    }
}

fn is_whole((header, _, body): &(Header, bool, Vec<u8>)) -> bool {
    body.len() == header.payload as usize
}

/// Reads any bytes as what comes on a connection, whole and in two parts: that none makes it panic,
/// and that it does not matter where they are cut, is what fuzzing wants to know.
pub(crate) fn read_anything(bytes: &[u8]) {
    static BELL: LazyLock<Option<Bell>> = LazyLock::new(|| Bell::new().ok());
    let Some(bell) = &*BELL else { return };
    let read = |parts: &[&[u8]]| {
        let health = Health::new(bell.clone());
        let shared = Shared::new(Peer(1), 1000, bell.clone(), health, 1);
        let mut reader = Reader::new(&shared, 0);
        let end = parts.iter().try_for_each(|part| reader.feed(part));
        format!("{end:?} {:?} {:?}", reader.news, (reader.frames, reader.ended, reader.heard))
    };
    let (first, second) = bytes.split_at(bytes.len() / 2);
    assert_eq!(read(&[bytes]), read(&[first, second]));
}

#[cfg(test)]
mod tests;
