//! Waking a process that sleeps for lack of frames.

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use rustix::thread::futex;

use super::region::Region;

/// One per process. Whoever has something for the process rings it; whoever waits for something notes the count, looks around, and sleeps until
/// the count changes, so that no ring is missed.
#[derive(Clone, Debug)]
pub(crate) struct Bell {
    region: Arc<Region>,
}

impl Bell {
    const RINGS: usize = 0;
    /// On a cache line of its own, away from the count that ringers write.
    const SLEEPERS: usize = 16;

    pub(crate) fn new() -> io::Result<Self> {
        Ok(Self { region: Arc::new(Region::new(Self::SLEEPERS + 1, 0)?) })
    }

    /// Another process's.
    pub(crate) fn from_file(file: OwnedFd) -> io::Result<Self> {
        Ok(Self { region: Arc::new(Region::from_file(file, Self::SLEEPERS + 1, 0)?) })
    }

    /// The file behind it, to pass to another process.
    pub(crate) fn file(&self) -> BorrowedFd<'_> {
        self.region.file()
    }

    fn rings(&self) -> &AtomicU32 {
        self.region.word(Self::RINGS)
    }

    fn sleepers(&self) -> &AtomicU32 {
        self.region.word(Self::SLEEPERS)
    }

    /// How often it has rung.
    pub(crate) fn count(&self) -> u32 {
        self.rings().load(Ordering::SeqCst)
    }

    pub(crate) fn ring(&self) {
        self.rings().fetch_add(1, Ordering::SeqCst);
        // A sleeper announces itself before it compares the count, so one that misses the new count is seen here.
        if self.sleepers().load(Ordering::SeqCst) > 0 {
            let _ = futex::wake(self.rings(), futex::Flags::empty(), u32::MAX >> 1);
        }
    }

    /// Sleeps until it rings, if it has not since `count` was read, or until the timeout.
    pub(crate) fn sleep(&self, count: u32, timeout: Duration) {
        self.sleepers().fetch_add(1, Ordering::SeqCst);
        let timeout = rustix::time::Timespec {
            tv_sec: timeout.as_secs().try_into().unwrap_or(i64::MAX),
            tv_nsec: timeout.subsec_nanos().into(),
        };
        // Waking early, for whatever reason, only means looking around once more.
        let _ = futex::wait(self.rings(), futex::Flags::empty(), count, Some(&timeout));
        self.sleepers().fetch_sub(1, Ordering::SeqCst);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ring_between_looking_and_sleeping_is_not_missed() {
        let bell = Bell::new().unwrap();
        let count = bell.count();
        bell.ring();
        bell.sleep(count, Duration::from_secs(3600));
    }

    #[test]
    fn every_ring_wakes_every_sleeper() {
        let bell = Bell::new().unwrap();
        std::thread::scope(|scope| {
            let seen = Arc::new(AtomicU32::new(0));
            for _ in 0..3 {
                let (bell, seen) = (bell.clone(), seen.clone());
                scope.spawn(move || {
                    for ring in 1..=100 {
                        while bell.count() < ring {
                            let count = bell.count();
                            if count < ring {
                                bell.sleep(count, Duration::from_secs(3600));
                            }
                        }
                        seen.fetch_add(1, Ordering::SeqCst);
                    }
                });
            }
            for ring in 1..=100 {
                bell.ring();
                while seen.load(Ordering::SeqCst) < 3 * ring {
                    std::thread::yield_now();
                }
            }
        });
    }
}
