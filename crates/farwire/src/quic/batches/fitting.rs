//! How many packets go together without being lost together.
//!
//! The queue of this host's own interface takes a batch or drops it as a whole. Where it holds less
//! than a batch, it drops all of them, even when it is empty; and a batch may be all that its
//! connection has under way, so that nothing comes behind it to show the loss. So when a connection
//! loses most of what it had under way, batches are as long as quinn's again. They grow as those get
//! through, four times as slowly each time that it has happened.

use std::any::Any;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use quinn::congestion::{Controller, ControllerFactory};
use quinn_proto::RttEstimator;

use super::FULL;

/// More packets than any kernel takes at once.
const MOST: usize = 64;
/// Full batches of quinn's that must get through before batches may have one packet more: four times
/// as many with each loss, the first included, and at most so many.
const FEW: u32 = 16;
const MANY: u32 = 1 << 20;

/// That of this host's interfaces.
pub(crate) static FITTING: Fitting = Fitting::new();

/// The longest batch that seems to fit.
#[derive(Debug)]
pub(crate) struct Fitting {
    packets: AtomicUsize,
    growth: Mutex<Growth>,
}

#[derive(Debug)]
struct Growth {
    /// Full batches that went since this last changed.
    went: u32,
    needed: u32,
}

impl Fitting {
    pub(super) const fn new() -> Self {
        let growth = Mutex::new(Growth { went: 0, needed: FEW });
        Self { packets: AtomicUsize::new(MOST), growth }
    }

    pub(super) fn packets(&self) -> usize {
        self.packets.load(Ordering::Relaxed)
    }

    /// A full batch of quinn's is sent.
    pub(super) fn goes(&self) {
        if self.packets() < MOST {
            let mut growth = self.growth.lock().unwrap_or_else(PoisonError::into_inner);
            growth.went += 1;
            if growth.went >= growth.needed {
                growth.went = 0;
                self.packets.store((self.packets() + 1).min(MOST), Ordering::Relaxed);
            }
        }
    }

    /// A connection that had up to `window` bytes under way has lost `lost` of them.
    fn lost(&self, lost: u64, window: u64) {
        if 2 * lost < window || self.packets() == FULL {
            return;
        }
        let mut growth = self.growth.lock().unwrap_or_else(PoisonError::into_inner);
        self.packets.store(FULL, Ordering::Relaxed);
        *growth = Growth { went: 0, needed: growth.needed.saturating_mul(4).min(MANY) };
    }
}

/// Makes controllers that tell a [`Fitting`] what they hear of losses.
pub(crate) struct Watching {
    pub(crate) controllers: Arc<dyn ControllerFactory + Send + Sync>,
    pub(crate) fitting: &'static Fitting,
}

impl ControllerFactory for Watching {
    fn build(self: Arc<Self>, now: Instant, mtu: u16) -> Box<dyn Controller> {
        let controller = self.controllers.clone().build(now, mtu);
        Box::new(Watched { controller, fitting: self.fitting })
    }
}

struct Watched {
    controller: Box<dyn Controller>,
    fitting: &'static Fitting,
}

impl Controller for Watched {
    fn on_congestion_event(&mut self, now: Instant, sent: Instant, persistent: bool, lost: u64) {
        self.fitting.lost(lost, self.controller.window());
        self.controller.on_congestion_event(now, sent, persistent, lost);
    }

    fn on_sent(&mut self, now: Instant, bytes: u64, last_packet: u64) {
        self.controller.on_sent(now, bytes, last_packet);
    }

    fn on_ack(
        &mut self,
        now: Instant,
        sent: Instant,
        bytes: u64,
        app_limited: bool,
        rtt: &RttEstimator,
    ) {
        self.controller.on_ack(now, sent, bytes, app_limited, rtt);
    }

    fn on_end_acks(&mut self, now: Instant, flight: u64, app_limited: bool, last: Option<u64>) {
        self.controller.on_end_acks(now, flight, app_limited, last);
    }

    fn on_mtu_update(&mut self, mtu: u16) {
        self.controller.on_mtu_update(mtu);
    }

    fn window(&self) -> u64 {
        self.controller.window()
    }

    fn clone_box(&self) -> Box<dyn Controller> {
        Box::new(Self { controller: self.controller.clone_box(), fitting: self.fitting })
    }

    fn initial_window(&self) -> u64 {
        self.controller.initial_window()
    }

    /// That of the controller itself.
    fn into_any(self: Box<Self>) -> Box<dyn Any> {
        self.controller.into_any()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn batches_get_shorter_when_most_is_lost_and_grow_again() {
        let fitting = Fitting::new();
        fitting.lost(10_000, 100_000);
        assert_eq!(fitting.packets(), MOST, "a few packets were lost");
        for slower in [4, 16, 64] {
            fitting.lost(58_000, 60_000);
            fitting.lost(14_000, 14_000); // no batch was longer
            for packets in FULL..MOST {
                assert_eq!(fitting.packets(), packets);
                (0..slower * FEW).for_each(|_| fitting.goes());
            }
            (0..1000).for_each(|_| fitting.goes());
            assert_eq!(fitting.packets(), MOST);
        }
    }
}
