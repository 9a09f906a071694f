//! At what pace bytes are handed to QUIC.
//!
//! quinn's own pacer follows the window: 1.25 × window / round trip. So a flow with a window just
//! large enough for the path slows down whenever its round trip grows, also when it is its
//! *acknowledgements* that wait, behind what the peer sends. In an all-reduce the peer sends as
//! much as this side, and the one whose window is a little larger would slow the other.
//!
//! Here the model of the path sets a pace in bytes per second, and leaves the window twice as large
//! as the path needs. Whoever writes to a stream first waits here for its turn. While the window is
//! full nobody gets one, so next to nothing waits in quinn's buffers, where it could not be paced
//! any more.

use std::net::SocketAddr;
use std::pin::pin;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use bytes::Bytes;
use quinn::{Connection, SendStream, WriteError};
use tokio::sync::Notify;

use super::Model;
use super::by_distance::ByDistance;

/// How long a piece may take at the pace. Timers have a resolution of 1 ms.
const PIECE: Duration = Duration::from_millis(2);
const LEAST_PIECE: usize = 4096;
/// A sender that is woken late may make good for this much time.
const CATCH_UP: Duration = Duration::from_millis(8);
/// After this time without a turn, a sender asks whether the connection has another path.
const PATIENCE: Duration = Duration::from_millis(100);

/// What the controller of a path tells those who send over it.
#[derive(Debug)]
pub(super) struct Pace {
    began: Instant,
    /// Bytes per second, as the bits of an `f64`.
    rate: AtomicU64,
    /// When the next bytes may go, and when the last went, in nanoseconds after `began`.
    next: AtomicU64,
    last: AtomicU64,
    /// Those who wait for their turn.
    waiting: AtomicUsize,
    /// Whether as much is under way as may be.
    full: AtomicBool,
    room: Notify,
}

impl Pace {
    /// No limit, until one is set.
    pub(super) fn new(now: Instant) -> Self {
        Self {
            began: now,
            rate: AtomicU64::new(f64::INFINITY.to_bits()),
            next: AtomicU64::new(0),
            last: AtomicU64::new(0),
            waiting: AtomicUsize::new(0),
            full: AtomicBool::new(false),
            room: Notify::new(),
        }
    }

    pub(super) fn set_rate(&self, rate: f64) {
        self.rate.store(rate.to_bits(), Ordering::Relaxed);
    }

    /// There is no limit any more.
    pub(super) fn lift(&self) {
        self.set_rate(f64::INFINITY);
        self.set_full(false);
    }

    pub(super) fn set_full(&self, full: bool) {
        if self.full.swap(full, Ordering::SeqCst) && !full {
            self.room.notify_waiters();
        }
    }

    /// Whether nobody has had anything to send for a while.
    pub(super) fn is_idle(&self, now: Instant) -> bool {
        let last = self.began + Duration::from_nanos(self.last.load(Ordering::Relaxed));
        self.waiting.load(Ordering::SeqCst) == 0 && now > last + CATCH_UP
    }

    fn rate(&self) -> f64 {
        f64::from_bits(self.rate.load(Ordering::Relaxed))
    }

    fn next(&self) -> Instant {
        self.began + Duration::from_nanos(self.next.load(Ordering::Relaxed))
    }

    /// Takes note that so many bytes go now.
    fn charge(&self, bytes: usize, now: Instant) {
        let took = Duration::from_secs_f64(bytes as f64 / self.rate());
        let behind = now.checked_sub(CATCH_UP).unwrap_or(now);
        let after = |time: Instant| time.saturating_duration_since(self.began).as_nanos() as u64;
        self.next.store(after(self.next().max(behind) + took), Ordering::Relaxed);
        self.last.store(after(now), Ordering::Relaxed);
    }
}

/// Writes to the streams of one connection, at the pace of its path.
#[derive(Debug)]
pub(crate) struct Pacer {
    connection: Connection,
    /// The pace of the path to this address. A peer that moves has a new path.
    path: Mutex<(SocketAddr, Option<Arc<Pace>>)>,
    turn: tokio::sync::Mutex<()>,
}

impl Pacer {
    pub(crate) fn new(connection: Connection) -> Self {
        let path = Mutex::new((connection.remote_address(), pace_of(&connection)));
        Self { connection, path, turn: tokio::sync::Mutex::default() }
    }

    /// The pace, if there is a limit.
    fn pace(&self) -> Option<Arc<Pace>> {
        let address = self.connection.remote_address();
        let mut path = self.path.lock().unwrap_or_else(PoisonError::into_inner);
        if path.0 != address {
            *path = (address, pace_of(&self.connection));
        }
        path.1.clone().filter(|pace| pace.rate().is_finite())
    }

    /// Writes when it is `whose` turn.
    pub(crate) async fn write(
        &self,
        stream: &mut SendStream,
        mut bytes: Bytes,
        whose: Turn,
    ) -> Result<(), WriteError> {
        while !bytes.is_empty() {
            let piece = match whose {
                Turn::Now => self.take(bytes.len()),
                Turn::Next => self.wait(bytes.len()).await,
                Turn::InOrder => self.wait_in_order(bytes.len()).await,
            };
            stream.write_chunk(bytes.split_to(piece)).await?;
        }
        Ok(())
    }

    /// Takes all that is wanted, whether there is room or not.
    fn take(&self, wanted: usize) -> usize {
        if let Some(pace) = self.pace() {
            pace.charge(wanted, now());
        }
        wanted
    }

    async fn wait_in_order(&self, wanted: usize) -> usize {
        let Some(pace) = self.pace() else {
            return wanted;
        };
        let _waiting = Waiting::new(pace);
        let _turn = self.turn.lock().await;
        self.wait(wanted).await
    }

    /// Waits for room: how many of the wanted bytes may go.
    async fn wait(&self, wanted: usize) -> usize {
        loop {
            let Some(pace) = self.pace() else {
                return wanted;
            };
            let _waiting = Waiting::new(pace.clone());
            tokio::time::sleep_until(pace.next().into()).await;
            let mut room = pin!(pace.room.notified());
            room.as_mut().enable(); // before it is found full, so that no news is missed
            if !pace.full.load(Ordering::SeqCst) {
                let piece = (pace.rate() * PIECE.as_secs_f64()) as usize;
                let piece = wanted.min(piece.max(LEAST_PIECE));
                pace.charge(piece, now());
                return piece;
            }
            let waited = tokio::time::timeout(PATIENCE, room).await;
            if waited.is_err() && self.connection.close_reason().is_some() {
                return wanted; // for the stream to refuse
            }
        }
    }
}

/// When a piece may go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Turn {
    /// Whatever else waits, and even if as much is under way as may be.
    Now,
    /// As soon as there is room, before those who wait in order.
    Next,
    InOrder,
}

/// One who waits for a turn.
struct Waiting(Arc<Pace>);

impl Waiting {
    fn new(pace: Arc<Pace>) -> Self {
        pace.waiting.fetch_add(1, Ordering::SeqCst);
        Self(pace)
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        self.0.waiting.fetch_sub(1, Ordering::SeqCst);
    }
}

fn now() -> Instant {
    tokio::time::Instant::now().into_std()
}

fn pace_of(connection: &Connection) -> Option<Arc<Pace>> {
    let controller = connection.congestion_state().into_any();
    match controller.downcast::<Model>() {
        Ok(model) => Some(model.pace.clone()),
        Err(other) => other.downcast::<ByDistance>().ok().map(|controller| controller.pace()),
    }
}
