//! Waking a process that sleeps for lack of frames.

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering, fence};
use std::time::Duration;

use rustix::thread::futex;

use super::region::Region;
use super::slots::{Memory, Word};

/// One per process. Whoever has something for the process rings it; whoever waits for something
/// notes the count, looks around, and sleeps until the count changes, so that no ring is missed.
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

    fn words(&self) -> Words<'_, AtomicU32> {
        Words { rings: self.region.word(Self::RINGS), sleepers: self.region.word(Self::SLEEPERS) }
    }

    /// How often it has rung. What was done before those rings is there to be seen.
    pub(crate) fn count(&self) -> u32 {
        self.words().count()
    }

    pub(crate) fn ring(&self) {
        self.words().ring();
    }

    /// Sleeps until it rings, if it has not since `count` was read, or until the timeout.
    pub(crate) fn sleep(&self, count: u32, timeout: Duration) {
        self.words().sleep(count, timeout);
    }
}

/// A word that a thread can sleep on.
pub(super) trait Alarm: Word {
    /// Adds, with release ordering.
    fn add(&self, value: u32);
    /// `std::sync::atomic::fence` with sequential consistency.
    fn fence();
    /// Sleeps until [`wake`](Self::wake), if the word is still `value`, or until the timeout, or
    /// for no reason less.
    fn wait(&self, value: u32, timeout: Duration);
    /// Wakes all who sleep.
    fn wake(&self);
}

impl Alarm for AtomicU32 {
    fn add(&self, value: u32) {
        self.fetch_add(value, Ordering::Release);
    }

    fn fence() {
        fence(Ordering::SeqCst);
    }

    fn wait(&self, value: u32, timeout: Duration) {
        let timeout = rustix::time::Timespec {
            tv_sec: timeout.as_secs().try_into().unwrap_or(i64::MAX),
            tv_nsec: timeout.subsec_nanos().into(),
        };
        let _ = futex::wait(self, futex::Flags::empty(), value, Some(&timeout));
    }

    fn wake(&self) {
        let _ = futex::wake(self, futex::Flags::empty(), u32::MAX >> 1);
    }
}

/// What a bell does with its two words. Apart, so that a model checker can do the same with its
/// own.
#[derive(Debug)]
pub(super) struct Words<'a, A> {
    pub(super) rings: &'a A,
    pub(super) sleepers: &'a A,
}

impl<A: Alarm> Words<'_, A> {
    pub(super) fn count(&self) -> u32 {
        self.rings.load(Ordering::Acquire)
    }

    pub(super) fn ring(&self) {
        self.rings.add(1);
        // A sleeper announces itself before the count is compared. Between the two fences, either
        // it finds the new count, or it is found here.
        A::fence();
        if self.sleepers.load(Ordering::Relaxed) > 0 {
            self.rings.wake();
        }
    }

    pub(super) fn sleep(&self, count: u32, timeout: Duration) {
        self.sleepers.add(1);
        A::fence();
        // Waking early, for whatever reason, only means looking around once more.
        self.rings.wait(count, timeout);
        self.sleepers.add(1u32.wrapping_neg());
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
