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
/// says that it is about to [rest](Self::rest), looks around once more, and sleeps until it rings.
///
/// As long as nobody rests, to ring is to look, and writes nothing: many may have something for a
/// process at once, and would wait for each other to write the same word.
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

    pub(crate) fn ring(&self) {
        self.words().ring();
    }

    /// From now on it rings for this thread. What was done before somebody rang in vain is there to
    /// be seen: look for it, then [sleep](Resting::sleep).
    pub(crate) fn rest(&self) -> Resting<'_, AtomicU32> {
        self.words().rest()
    }
}

/// A word that a thread can sleep on.
pub(crate) trait Alarm: Word {
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
pub(crate) struct Words<'a, A> {
    pub(super) rings: &'a A,
    pub(super) sleepers: &'a A,
}

impl<'a, A: Alarm> Words<'a, A> {
    pub(super) fn ring(&self) {
        // Who rests says so before it looks around. Between the two fences, either it finds what
        // it is rung for, or it is found here.
        A::fence();
        if self.sleepers.load(Ordering::Relaxed) > 0 {
            self.rings.add(1);
            self.rings.wake();
        }
    }

    pub(super) fn rest(self) -> Resting<'a, A> {
        self.sleepers.add(1);
        A::fence();
        // What was done before a ring that is counted here is seen by who looks around.
        let count = self.rings.load(Ordering::Acquire);
        Resting { words: self, count }
    }
}

/// A thread for which a bell rings, until this is dropped.
#[derive(Debug)]
#[must_use = "look around, then sleep"]
pub(crate) struct Resting<'a, A: Alarm> {
    words: Words<'a, A>,
    /// How often it had rung.
    count: u32,
}

impl<A: Alarm> Resting<'_, A> {
    /// Sleeps until it rings, if it has not since this began, or until the timeout; or for no reason
    /// less, which only means to look around once more.
    pub(crate) fn sleep(self, timeout: Duration) {
        self.words.rings.wait(self.count, timeout);
    }
}

impl<A: Alarm> Drop for Resting<'_, A> {
    fn drop(&mut self) {
        self.words.sleepers.add(1u32.wrapping_neg());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ring_between_looking_and_sleeping_is_not_missed() {
        let bell = Bell::new().unwrap();
        let resting = bell.rest();
        bell.ring();
        resting.sleep(Duration::from_secs(3600));
    }

    #[test]
    fn every_ring_wakes_every_sleeper() {
        let bell = Bell::new().unwrap();
        let (said, seen) = (AtomicU32::new(0), AtomicU32::new(0));
        let (bell, said, seen) = (&bell, &said, &seen);
        std::thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(move || {
                    for ring in 1..=100 {
                        loop {
                            let resting = bell.rest();
                            if said.load(Ordering::Relaxed) >= ring {
                                break;
                            }
                            resting.sleep(Duration::from_secs(3600));
                        }
                        seen.fetch_add(1, Ordering::SeqCst);
                    }
                });
            }
            for ring in 1..=100 {
                said.store(ring, Ordering::Relaxed);
                bell.ring();
                while seen.load(Ordering::SeqCst) < 3 * ring {
                    std::thread::yield_now();
                }
            }
        });
    }
}
