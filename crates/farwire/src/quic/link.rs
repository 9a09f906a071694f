//! A link whose lanes are QUIC streams, on one connection for each direction, or on several.
//!
//! A lane is spread over several streams, frame by frame in turn, and put together again by the
//! index in each frame's header. So one operation can fill a long link, although a stream holds
//! little, and a lost packet holds up the frames of one stream only. A stream is a sequence of
//! frames:
//!
//! ```text
//! one byte: 1 if this is its lane's last frame, else 0 │ header │ payload
//! ```
//!
//! Frames of one stream have rising indices. Notices, which belong to no lane, have a stream of
//! their own. A sender that gives a lane up resets its streams and says so on another, with a 2 and
//! one of the lane's headers, and the receiver drops what came of it. (It may be reading none of the
//! lane's streams. To wait for a reset and then not to is something that quinn does not forget.)

use std::collections::VecDeque;
use std::io;
use std::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use bytes::{BufMut, Bytes, BytesMut};
use farwire_proto::{CommId, HEADER_LEN, Header, Lane, OpSeq, Peer};
use quinn::{Connection, ConnectionError, RecvStream, SendStream, VarInt};
use rustc_hash::{FxHashMap as HashMap, FxHashSet as HashSet};
use tokio::io::AsyncReadExt;
use tokio::runtime::Handle;
use tokio::sync::mpsc::error::TrySendError;
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore, mpsc};
use tokio::task::AbortHandle;

use super::congestion::{self, Pacer, Turn};
use super::control::Health;
use crate::link::in_order::InOrder;
use crate::link::{Arrival, Broken, Link, Liveness, Loss, NetworkPath};
use crate::shm::bell::Bell;

// What a peer can make this process hold, whether by mistake or by malice. With the default
// segments, whose frames have up to 128 KiB:
//
//   CONNECTION_WINDOW            256 MiB  in streams, unread
//   lanes × one frame                     the heads of lanes
//   SPARE_FRAMES × one frame      64 MiB  what is read beyond the head
//
// What is sent for operations that are wanted must not have to wait behind what is not wanted yet:
//
// - The next frame of a lane may always be read, whatever else is held. It is at the front of its
//   stream, since indices rise, so it can be reached. Only frames beyond it count against
//   SPARE_FRAMES, and a lane may read as many of those ahead as `Reach` says.
// - What is not read holds its stream's window, so a lane holds at most as many windows as its
//   sender gives it streams: those that the path needs, and FAR_STREAMS at most.
//
// How much of it is for operations that this rank has not called is for the engine's allowance.
// Beyond these numbers, operations that both sides have called, on several communicators and in
// different orders, can wait for each other until their deadline.

/// Streams of a peer that may be open. quinn keeps some 400 bytes for each, used or not.
const STREAMS: VarInt = VarInt::from_u32(4096);
/// Bytes of one stream that are unread. quinn ends a connection one of whose streams has more than
/// 1,024 gaps. Packets carry 1,150 bytes or more, so this many have 228 gaps if every other one is
/// lost.
pub(crate) const STREAM_WINDOW: VarInt = VarInt::from_u32(512 << 10);
/// Bytes of all streams of a connection that are unread.
pub(crate) const CONNECTION_WINDOW: VarInt = VarInt::from_u32(256 << 20);
/// A lane's streams hold this many windows of the path, so that the line stays busy while a
/// packet is found to be lost, sent again, and lost again.
const WINDOWS_PER_PATH: u64 = 2;
/// Frames of one stream that wait here to be sent.
const QUEUE: usize = 2;
/// Frames of all lanes that were read and wait here, but for the next of each.
const SPARE_FRAMES: usize = 512;
/// Streams of one lane on each connection, at least: while one waits for room, another sends.
const STREAMS_PER_WAY: u64 = 2;
/// Streams of one lane, at most: with these, 8 MiB of one operation can be under way to a peer
/// nearby, and 64 MiB to one that is not.
const NEAR_STREAMS: u64 = 16;
const FAR_STREAMS: u64 = 128;
/// Frames of one lane that are read ahead, at least and at most. See [`Reach`].
const FEW_FRAMES: u32 = 8;
const MANY_FRAMES: u32 = 128;
/// What a link carries in this time is read ahead.
const AHEAD: Duration = Duration::from_millis(40);
/// How long after the end of its connection a peer's last frames may be on their way through this
/// process.
const LAST_WORDS: Duration = Duration::from_secs(1);

/// What a frame begins with that says that its lane was given up.
const GIVEN_UP: u8 = 2;
/// Lanes that were given up and are remembered, in case that more of them comes late.
const REMEMBERED: usize = 1024;

/// The name of this kind of link.
pub(super) const NAME: &str = "quic";

/// The driver's end. The other ends are tasks, one per stream.
#[derive(Debug)]
pub(crate) struct QuicLink {
    /// What carries this side's streams, and writes to them; the first of these also notices.
    ways: Vec<(Connection, Arc<Pacer>)>,
    /// How many of them are in use, and whose turn it is.
    demand: Demand,
    way: usize,
    /// What carries the peer's.
    from: Vec<Connection>,
    runtime: Handle,
    shared: Arc<Shared>,
    health: Arc<Health>,
    /// The peer's number. Inside, lanes carry the one that it had when the link was made.
    peer: Peer,
    outgoing: HashMap<Lane, Outgoing>,
    /// The stream of notices; until this side has said goodbye.
    notices: Option<mpsc::Sender<Bytes>>,
    /// Lanes that were told to wait.
    refused: HashSet<Lane>,
    incoming: HashMap<Lane, InOrder<Frame>>,
    streams_opened: u64,
    closed: bool,
    reach: Reach,
}

/// The connections of a link.
#[derive(Debug)]
pub(crate) struct Connections {
    /// For what this side sends.
    pub(crate) to: Vec<Connection>,
    /// For what the peer sends.
    pub(crate) from: Vec<Connection>,
    /// Whether all are to be used, however little there is to send.
    pub(crate) all: bool,
}

/// How far a lane from this peer may get ahead of those from others.
///
/// Frames are added in rank order, so all who send to one rank advance together, at the pace of the
/// slowest. What one of them may send beyond that fills the queues of a network in the room without
/// need: where three send to each of four hosts, some lines are then busy and others idle. So
/// between neighbours it is what the link carries in some milliseconds. Over a distance it is all
/// that there is room for, which keeps the line busy while lost packets are sent again.
#[derive(Debug)]
struct Reach {
    near: bool,
    least_round_trip: Duration,
    carried: Meter,
    frames: Arc<AtomicU32>,
}

impl Reach {
    /// By what was measured when the peers met, when there was nothing to wait for.
    fn new(near: bool) -> Self {
        let frames = AtomicU32::new(if near { FEW_FRAMES } else { MANY_FRAMES });
        let (least_round_trip, carried) = (Duration::MAX, Meter::new());
        Self { near, least_round_trip, carried, frames: Arc::new(frames) }
    }

    fn most_streams(&self) -> u64 {
        if self.near { NEAR_STREAMS } else { FAR_STREAMS }
    }

    /// Bytes that should be under way on a path. Its window is that, and between neighbours also all
    /// that its queues hold, since CUBIC fills them. A lane that did so would hold up others, and the
    /// acknowledgements of what comes back.
    fn window(&mut self, window: u64, round_trip: Duration) -> u64 {
        if !self.near {
            return window;
        }
        self.least_round_trip = self.least_round_trip.min(round_trip);
        let without_queue = self.least_round_trip.as_secs_f64() / round_trip.as_secs_f64();
        (window as f64 * without_queue) as u64
    }

    /// So many bytes were taken: whether more frames of `longest` bytes may be read ahead now.
    fn took(&mut self, bytes: usize, longest: usize, now: Instant) -> bool {
        if self.near
            && let Some(rate) = self.carried.add(bytes, now)
        {
            let frames = (rate * AHEAD.as_secs_f64() / longest.max(1) as f64) as u32;
            let frames = frames.clamp(FEW_FRAMES, MANY_FRAMES);
            return self.frames.swap(frames, Ordering::Relaxed) < frames;
        }
        false
    }
}

/// Measures how much is carried while there is something to carry.
#[derive(Debug)]
struct Meter {
    /// Bytes since a time, without a pause until the last of them.
    bytes: usize,
    since: Instant,
    last: Instant,
}

impl Meter {
    fn new() -> Self {
        let now = Instant::now();
        Self { bytes: 0, since: now, last: now }
    }

    /// Bytes per second, once that was measured for a while.
    fn add(&mut self, bytes: usize, now: Instant) -> Option<f64> {
        if now.saturating_duration_since(self.last) > PAUSE {
            (self.since, self.bytes) = (now, 0);
        }
        self.last = now;
        self.bytes += bytes;
        let took = now.saturating_duration_since(self.since);
        if took < MEASURE {
            return None;
        }
        let rate = self.bytes as f64 / took.as_secs_f64();
        (self.since, self.bytes) = (now, 0);
        Some(rate)
    }
}

/// How many connections there is work for. Each keeps a thread busy at either end, so more of them
/// are faster as long as it is the cores that limit them, and not the line; and on a line that is
/// shared, several would take the shares of several.
#[derive(Debug)]
struct Demand {
    /// Connections in use, of so many.
    ways: usize,
    most: usize,
    sent: Meter,
}

impl Demand {
    fn new(most: usize, all: bool) -> Self {
        let most = most.max(1);
        Self { ways: if all { most } else { 1 }, most, sent: Meter::new() }
    }

    fn sent(&mut self, bytes: usize, now: Instant) {
        if self.ways < self.most
            && let Some(rate) = self.sent.add(bytes, now)
        {
            self.ways += usize::from(rate > BUSY * self.ways as f64);
        }
    }
}

/// Bytes per second of a connection that is as busy as its core; no line of 1 Gbit/s carries them.
const BUSY: f64 = 150e6;
/// For how long that is measured, and what counts as having nothing to send.
const MEASURE: Duration = Duration::from_millis(20);
const PAUSE: Duration = Duration::from_millis(2);

/// A lane to the peer.
#[derive(Debug, Default)]
struct Outgoing {
    /// One of its headers, once something was sent.
    header: Option<Header>,
    streams: Vec<OutStream>,
    /// Whose turn it is; beyond the last, a new one's if the path needs it.
    turn: usize,
}

/// The driver's end of a stream to the peer.
#[derive(Debug)]
struct OutStream {
    frames: mpsc::Sender<Bytes>,
    /// Which resets the stream.
    task: AbortHandle,
}

/// What the tasks and the driver share.
#[derive(Debug)]
struct Shared {
    from: Peer,
    longest: usize,
    /// This process's.
    bell: Bell,
    arrived: Mutex<VecDeque<Result<News, Broken>>>,
    writable: Mutex<VecDeque<Lane>>,
    lanes: Mutex<HashMap<Lane, Progress>>,
    /// Lanes that the peer gave up lately.
    given_up: Mutex<VecDeque<Lane>>,
    /// Streams of the peer that were accepted, and those of them that are not read to their end.
    accepted: AtomicU64,
    reading: AtomicUsize,
    /// Streams of this side that are not finished.
    writing: AtomicUsize,
    spare: Arc<Semaphore>,
    /// Frames of one lane that are read ahead.
    ahead: Arc<AtomicU32>,
}

/// How far a lane from the peer has come, for those who read its streams.
#[derive(Debug, Default)]
struct Progress {
    /// As in [`InOrder`].
    next: u32,
    /// Those who have read a header and wait for room, by its index.
    waiting: HashMap<u32, Arc<Notify>>,
}

/// What those who read streams have to tell the driver.
#[derive(Debug)]
enum News {
    Frame(Frame),
    /// The peer has given this lane up.
    GivenUp(Lane),
}

#[derive(Debug)]
struct Frame {
    header: Header,
    body: Vec<u8>,
    /// Whether it is the last of its lane.
    last: bool,
    /// Among the spare frames, unless it was the next of its lane; given back when it is dropped.
    _room: Option<OwnedSemaphorePermit>,
}

/// Whether a frame may be read.
#[derive(Debug)]
enum Room {
    /// It is the next of its lane.
    Next,
    Spare(OwnedSemaphorePermit),
    /// Its sender has given it up.
    NotWanted,
}

impl Shared {
    fn tell(&self, news: Result<News, Broken>) {
        self.arrived.lock().unwrap_or_else(PoisonError::into_inner).push_back(news);
        self.bell.ring();
    }

    fn lanes(&self) -> MutexGuard<'_, HashMap<Lane, Progress>> {
        self.lanes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The peer has given a lane up: nobody waits any more to read it.
    fn give_up(&self, lane: Lane) {
        let mut given_up = self.given_up.lock().unwrap_or_else(PoisonError::into_inner);
        given_up.push_back(lane);
        if given_up.len() > REMEMBERED {
            given_up.pop_front();
        }
        drop(given_up);
        self.forget(lane);
        self.tell(Ok(News::GivenUp(lane)));
    }

    /// Forgets how far a lane has come. Those who wait to read it look again.
    fn forget(&self, lane: Lane) {
        if let Some(progress) = self.lanes().remove(&lane) {
            progress.waiting.values().for_each(|turn| turn.notify_one());
        }
    }

    fn is_given_up(&self, lane: Lane) -> bool {
        self.given_up.lock().unwrap_or_else(PoisonError::into_inner).contains(&lane)
    }

    /// Waits until a frame may be read: it is the next of its lane, or there is room to spare.
    async fn room(&self, lane: Lane, index: u32) -> Result<Room, Broken> {
        loop {
            let (turn, near) = {
                let mut lanes = self.lanes();
                // Under this lock, whoever gives it up has either done so or will find this.
                if self.is_given_up(lane) {
                    return Ok(Room::NotWanted);
                }
                let progress = lanes.entry(lane).or_default();
                if index < progress.next {
                    return Err(Broken("a frame came twice"));
                }
                if index == progress.next {
                    progress.waiting.remove(&index);
                    return Ok(Room::Next);
                }
                let near = index - progress.next < self.ahead.load(Ordering::Relaxed);
                if near && let Ok(room) = self.spare.clone().try_acquire_owned() {
                    progress.waiting.remove(&index);
                    return Ok(Room::Spare(room));
                }
                (progress.waiting.entry(index).or_default().clone(), near)
            };
            tokio::select! {
                () = turn.notified() => {}
                // Taken by the next turn of the loop, unless another is quicker.
                room = self.spare.clone().acquire_owned(), if near => drop(room),
            }
        }
    }
}

impl QuicLink {
    /// A link to `peer`, for payloads of up to `longest` bytes. The connections `to` carry this
    /// side's streams, and `from` the peer's.
    pub(crate) fn new(
        Connections { to, from, all }: Connections,
        peer: Peer,
        longest: usize,
        bell: Bell,
        health: Arc<Health>,
        runtime: Handle,
    ) -> Self {
        let reach = Reach::new(to.first().is_some_and(congestion::is_near));
        let shared = Arc::new(Shared {
            from: peer,
            longest,
            bell,
            arrived: Mutex::default(),
            writable: Mutex::default(),
            lanes: Mutex::default(),
            given_up: Mutex::default(),
            accepted: AtomicU64::new(0),
            reading: AtomicUsize::new(0),
            writing: AtomicUsize::new(0),
            spare: Arc::new(Semaphore::new(SPARE_FRAMES)),
            ahead: reach.frames.clone(),
        });
        let each = CONNECTION_WINDOW.into_inner() / from.len().max(1) as u64;
        let each = each.max(STREAM_WINDOW.into_inner());
        for connection in &from {
            connection.set_receive_window(VarInt::from_u64(each).unwrap_or(CONNECTION_WINDOW));
            connection.set_max_concurrent_uni_streams(STREAMS);
            runtime.spawn(accept_streams(connection.clone(), shared.clone()));
        }
        for connection in to.iter().chain(&from) {
            runtime.spawn(watch(connection.clone(), health.clone()));
        }
        let pacer = |to: Connection| (to.clone(), Arc::new(Pacer::new(to)));
        let mut link = Self {
            demand: Demand::new(to.len(), all),
            ways: to.into_iter().map(pacer).collect(),
            way: 0,
            from,
            runtime,
            shared,
            health,
            peer,
            outgoing: HashMap::default(),
            notices: None,
            refused: HashSet::default(),
            incoming: HashMap::default(),
            streams_opened: 0,
            closed: false,
            reach,
        };
        // Opened first, so that it never has to wait for one of the peer's streams.
        link.notices = Some(link.open_stream(None, 2).frames);
        link
    }

    /// A new stream, and the task that writes it. Its first frame goes before others' later ones.
    fn open_stream(&mut self, lane: Option<Lane>, ahead: i32) -> OutStream {
        let (sender, frames) = mpsc::channel(QUEUE);
        self.streams_opened += 1;
        self.shared.writing.fetch_add(1, Ordering::SeqCst);
        let writing = Writing { shared: self.shared.clone(), stream: None };
        let (to, pacer) = self.ways[self.way % self.demand.ways].clone();
        self.way += 1;
        let task = write_stream(to, pacer, writing, lane, ahead, frames);
        OutStream { frames: sender, task: self.runtime.spawn(task).abort_handle() }
    }

    /// A lane from the peer, as it is named inside.
    fn inside(&self, lane: &Lane) -> Lane {
        Lane { from: self.shared.from, ..*lane }
    }

    /// How many streams a lane should have, as far as is known of the path. All lanes together leave
    /// half of those that may be open to lanes that are yet to come.
    fn lane_streams(&mut self) -> usize {
        let ways = &self.ways[..self.demand.ways];
        let paths = ways.iter().map(|(to, _)| to.stats().path);
        let windows: u64 = paths.map(|path| self.reach.window(path.cwnd, path.rtt)).sum();
        let streams = WINDOWS_PER_PATH * windows / STREAM_WINDOW.into_inner();
        let least = STREAMS_PER_WAY * ways.len() as u64;
        let fair = STREAMS.into_inner() / 2 / (1 + self.outgoing.len() as u64);
        streams.clamp(least, self.reach.most_streams().min(fair).max(least)) as usize
    }

    /// Room for a lane's next frame, if one of its streams has any.
    fn reserve(&mut self, lane: Lane) -> Option<mpsc::OwnedPermit<Bytes>> {
        let Outgoing { header, mut streams, mut turn } =
            self.outgoing.remove(&lane).unwrap_or_default();
        if turn >= streams.len() {
            if streams.len() < self.lane_streams() {
                // A short operation does not wait behind a long one.
                let ahead = i32::from(streams.is_empty());
                turn = streams.len();
                streams.push(self.open_stream(Some(lane), ahead));
            } else {
                turn = 0;
            }
        }
        let in_turn = (turn..streams.len()).chain(0..turn);
        let found = in_turn.into_iter().find_map(|at| {
            let room = streams[at].frames.clone().try_reserve_owned().ok()?;
            Some((at, room))
        });
        if let Some((at, _)) = &found {
            turn = at + 1;
        }
        self.outgoing.insert(lane, Outgoing { header, streams, turn });
        found.map(|(_, room)| room)
    }
}

impl Link for QuicLink {
    fn kind(&self) -> &'static str {
        NAME
    }

    fn is_near(&self) -> bool {
        self.reach.near
    }

    fn path(&self) -> Option<NetworkPath> {
        let mut paths = self.ways.iter().map(|(to, _)| to.stats().path);
        let first = paths.next()?;
        let first = NetworkPath {
            round_trip: first.rtt,
            window: first.cwnd,
            mtu: first.current_mtu,
            sent: first.sent_packets,
            lost: first.lost_packets,
        };
        Some(paths.fold(first, |all, path| NetworkPath {
            window: all.window + path.cwnd,
            sent: all.sent + path.sent_packets,
            lost: all.lost + path.lost_packets,
            ..all
        }))
    }

    fn send(&mut self, lane: Option<Lane>, header: &Header, payload: &[u8], last: bool) -> bool {
        let room = match (lane, &self.notices) {
            (None, None) => return true, // this side has said goodbye
            (None, Some(notices)) => match notices.clone().try_reserve_owned() {
                // The stream has ended, and with it the peer: who waited for room would for ever.
                Err(TrySendError::Closed(_)) => return true,
                room => room.ok(),
            },
            (Some(lane), _) => self.reserve(lane),
        };
        let Some(room) = room else {
            self.refused.extend(lane);
            return false;
        };
        let mut frame = BytesMut::with_capacity(1 + HEADER_LEN + payload.len());
        frame.put_u8(last.into());
        frame.extend_from_slice(&header.encode());
        frame.extend_from_slice(payload);
        self.demand.sent(frame.len(), Instant::now());
        room.send(frame.freeze());
        if let Some(lane) = lane {
            if last {
                self.outgoing.remove(&lane);
            } else if let Some(outgoing) = self.outgoing.get_mut(&lane) {
                outgoing.header = Some(*header);
            }
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
            tracing::warn!(peer = %self.peer, reason, "lost a peer");
            return Err(Broken("the peer is lost"));
        }
        // Read before the queue is found empty: what is counted as being read now may be in the
        // queue a moment later.
        let all_here = self.health.goodbye().is_some_and(|streams| {
            self.shared.accepted.load(Ordering::SeqCst) >= streams
                && self.shared.reading.load(Ordering::SeqCst) == 0
        });
        loop {
            let told =
                self.shared.arrived.lock().unwrap_or_else(PoisonError::into_inner).pop_front();
            let Some(told) = told else {
                if !all_here && self.health.hung_up().is_some_and(|time| time > LAST_WORDS) {
                    return Err(Broken("the peer has left before all that it sent was here"));
                }
                let news = all_here && !std::mem::replace(&mut self.closed, all_here);
                return Ok(news.then_some(Arrival::Closed));
            };
            let frame = match told? {
                News::Frame(frame) => frame,
                News::GivenUp(lane) => {
                    self.incoming.remove(&lane);
                    self.shared.forget(lane);
                    continue;
                }
            };
            if frame.header.frame.is_notice() {
                return Ok(Some(Arrival::Notice(frame.header, frame.body)));
            }
            let (lane, index) = (Lane::of(self.shared.from, &frame.header), frame.header.index);
            if self.incoming.entry(lane).or_default().put(index, frame)? {
                return Ok(Some(Arrival::Frame(Lane { from: self.peer, ..lane })));
            }
        }
    }

    fn head(&self, lane: &Lane) -> Option<(Header, &[u8])> {
        let frame = self.incoming.get(&self.inside(lane))?.head()?;
        Some((frame.header, &frame.body))
    }

    fn pop(&mut self, lane: &Lane) {
        let lane = &self.inside(lane);
        let incoming =
            self.incoming.get_mut(lane).expect("a frame is popped after it was looked at");
        let frame = incoming.pop().expect("a frame is popped after it was looked at");
        let next = incoming.next();
        let farther = self.reach.took(frame.body.len(), self.shared.longest, Instant::now());
        let mut lanes = self.shared.lanes();
        if frame.last {
            self.incoming.remove(lane);
            lanes.remove(lane);
        } else if let Some(progress) = lanes.get_mut(lane) {
            progress.next = next;
            // One is the next now, and one has come near.
            let near = next.saturating_add(self.shared.ahead.load(Ordering::Relaxed) - 1);
            for (&index, turn) in &progress.waiting {
                if farther || index == next || index == near {
                    turn.notify_one();
                }
            }
        }
    }

    fn abandon(&mut self, comm: CommId, seq: Option<OpSeq>) {
        let gone = |lane: &Lane| lane.comm == comm && seq.is_none_or(|seq| lane.seq == seq);
        let lanes: Vec<_> = self.outgoing.extract_if(|lane, _| gone(lane)).collect();
        for (_, lane) in lanes {
            lane.streams.iter().for_each(|stream| stream.task.abort());
            if let Some(header) = lane.header {
                let message = [&[GIVEN_UP][..], &header.encode()].concat();
                // The only one on its stream, so there is room.
                let _ = self.open_stream(None, 2).frames.try_send(message.into());
            }
        }
        self.refused.retain(|lane| !gone(lane));
    }

    fn give_up(&mut self) {
        self.outgoing.clear();
        self.notices = None;
        Liveness::give_up(&*self.health);
        for connection in self.ways.iter().map(|(to, _)| to).chain(&self.from) {
            connection.close(VarInt::from_u32(1), b"given up");
        }
    }

    /// A goodbye shows in [`poll_arrived`](Link::poll_arrived); else nobody says what has become of
    /// the peer.
    fn loss(&self) -> Loss {
        Loss::Unreachable
    }

    fn liveness(&self) -> Option<Arc<dyn Liveness>> {
        Some(self.health.clone())
    }

    fn set_peer(&mut self, from: Peer) {
        self.peer = from;
    }

    fn close(&mut self) {
        self.outgoing.clear();
        self.notices = None;
        let (shared, health, streams) =
            (self.shared.clone(), self.health.clone(), self.streams_opened);
        self.runtime.spawn(async move {
            // Until all that was sent has arrived, or the peer is lost.
            while shared.writing.load(Ordering::SeqCst) > 0 && health.loss().is_none() {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
            health.leave(streams);
        });
    }
}

/// A stream that is being written. Dropped before its end, it is reset.
struct Writing {
    shared: Arc<Shared>,
    stream: Option<SendStream>,
}

impl Drop for Writing {
    fn drop(&mut self) {
        if let Some(stream) = &mut self.stream {
            let _ = stream.reset(VarInt::from_u32(0)); // fails for one that has ended
        }
        self.shared.writing.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Sends frames of one lane in order, the first of them `ahead` of other streams; or notices, all
/// of them.
async fn write_stream(
    connection: Connection,
    pacer: Arc<Pacer>,
    mut writing: Writing,
    lane: Option<Lane>,
    ahead: i32,
    mut frames: mpsc::Receiver<Bytes>,
) {
    let Writing { shared, stream } = &mut writing;
    let written = async {
        let stream = stream.insert(connection.open_uni().await.ok()?);
        stream.set_priority(ahead).ok()?;
        let mut turn = match (lane, ahead) {
            (None, _) => Turn::Now,
            (Some(_), 0) => Turn::InOrder,
            (Some(_), _) => Turn::Next,
        };
        let mut first = true;
        while let Some(frame) = frames.recv().await {
            if !std::mem::take(&mut first) && turn == Turn::Next {
                turn = Turn::InOrder;
                stream.set_priority(0).ok()?;
            }
            pacer.write(stream, frame, turn).await.ok()?;
            if let Some(lane) = lane {
                shared.writable.lock().unwrap_or_else(PoisonError::into_inner).push_back(lane);
            }
            shared.bell.ring();
        }
        stream.finish().ok()?;
        // Until the peer has it all. (An error here is a lost peer, which the heartbeats will
        // tell.)
        stream.stopped().await.ok()
    };
    written.await;
}

/// Tells of a connection that has failed by itself. One that was closed has been told of, or will
/// be by the heartbeats.
async fn watch(connection: Connection, health: Arc<Health>) {
    let reason = connection.closed().await;
    let closed = matches!(
        reason,
        ConnectionError::ApplicationClosed(_)
            | ConnectionError::ConnectionClosed(_)
            | ConnectionError::LocallyClosed
    );
    if !closed && health.goodbye().is_none() {
        health.lose(reason.to_string());
    }
}

/// Reads every stream that the peer opens, each in a task of its own.
async fn accept_streams(connection: Connection, shared: Arc<Shared>) {
    while let Ok(stream) = connection.accept_uni().await {
        shared.reading.fetch_add(1, Ordering::SeqCst);
        shared.accepted.fetch_add(1, Ordering::SeqCst);
        let shared = shared.clone();
        tokio::spawn(async move {
            if let Err(broken) = read_stream(stream, &shared).await {
                shared.tell(Err(broken));
            }
            shared.reading.fetch_sub(1, Ordering::SeqCst);
            shared.bell.ring();
        });
    }
}

/// Reads frames for as long as there is room for them; what there is no room for stays with the
/// peer.
async fn read_stream(mut stream: RecvStream, shared: &Shared) -> Result<(), Broken> {
    let mut lane = None;
    let given_up = loop {
        let mut start = [0; 1 + HEADER_LEN];
        if let Err(end) = AsyncReadExt::read_exact(&mut stream, &mut start).await {
            break is_reset(&end);
        }
        let last = match start[0] {
            0 => false,
            1 => true,
            GIVEN_UP => false,
            _ => return Err(Broken("a frame is neither the last of its lane nor not")),
        };
        let header = Header::decode(&start[1..]).map_err(|_| Broken("a frame has no header"))?;
        if start[0] == GIVEN_UP {
            shared.give_up(Lane::of(shared.from, &header));
            continue;
        }
        let length = header.payload as usize;
        // Notices are short, or their headers are refused.
        if length > shared.longest && !header.frame.is_notice() {
            return Err(Broken("a frame is longer than agreed"));
        }
        let mut spare = None;
        if !header.frame.is_notice() {
            let of = *lane.insert(Lane::of(shared.from, &header));
            match shared.room(of, header.index).await? {
                Room::Next => {}
                Room::Spare(room) => spare = Some(room),
                Room::NotWanted => break true,
            }
        }
        let body = match read_body(&mut stream, length).await {
            Ok(body) => body,
            Err(end) => break is_reset(&end),
        };
        shared.tell(Ok(News::Frame(Frame { header, body, last, _room: spare })));
    };
    if let Some(lane) = lane.filter(|_| given_up) {
        shared.tell(Ok(News::GivenUp(lane)));
    }
    Ok(())
}

/// The next bytes of a stream, in memory that nobody has to clear first.
async fn read_body(stream: &mut RecvStream, length: usize) -> io::Result<Vec<u8>> {
    let mut body = Vec::with_capacity(length);
    while body.len() < length {
        let room = length - body.len();
        if stream.read_buf(&mut (&mut body).limit(room)).await? == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
    }
    Ok(body)
}

/// Whether a stream was given up by the peer. If it has ended, that is well; a connection that has
/// is told by the heartbeats.
fn is_reset(end: &io::Error) -> bool {
    end.kind() == io::ErrorKind::ConnectionReset
}

#[cfg(test)]
mod tests;
