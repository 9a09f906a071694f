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
/// [listens](Self::listen), looks around once more, and sleeps until it rings, so that no ring is
/// missed. While nobody listens, ringing writes nothing that others read.
#[derive(Clone, Debug)]
pub(crate) struct Bell {
    region: Arc<Region>,
}

impl Bell {
    const RINGS: usize = 0;
    /// On a cache line of its own, away from the count that ringers write.
    const LISTENERS: usize = 16;

    pub(crate) fn new() -> io::Result<Self> {
        Ok(Self { region: Arc::new(Region::new(Self::LISTENERS + 1, 0)?) })
    }

    /// The bell of another process.
    pub(crate) fn from_file(file: OwnedFd) -> io::Result<Self> {
        Ok(Self { region: Arc::new(Region::from_file(file, Self::LISTENERS + 1, 0)?) })
    }

    /// The file behind it, to pass to another process.
    pub(crate) fn file(&self) -> BorrowedFd<'_> {
        self.region.file()
    }

    fn words(&self) -> Words<'_, AtomicU32> {
        Words { rings: self.region.word(Self::RINGS), listeners: self.region.word(Self::LISTENERS) }
    }

    /// Tells listeners that there is something to see.
    pub(crate) fn ring(&self) {
        self.words().ring();
    }

    /// From here on, rings are heard. Whatever was done before an earlier, unheard ring can now be
    /// seen.
    pub(crate) fn listen(&self) -> Listening<'_, AtomicU32> {
        self.words().listen()
    }
}

/// A word that a thread can sleep on.
pub(crate) trait Alarm: Word {
    /// Adds, with release ordering.
    fn add(&self, value: u32);
    /// `std::sync::atomic::fence` with sequential consistency.
    fn fence();
    /// If the word is still `value`, sleeps until [`wake`](Self::wake) or the timeout. It may also
    /// end early, for no reason.
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

/// What a bell does with its two words. It is separate, so that a model checker can do the same
/// with words of its own.
#[derive(Debug)]
pub(super) struct Words<'a, A> {
    pub(super) rings: &'a A,
    pub(super) listeners: &'a A,
}

impl<'a, A: Alarm> Words<'a, A> {
    pub(super) fn ring(&self) {
        // A listener announces itself before it looks around. Between the two fences, either it
        // sees what this ring is about, or it is found here.
        A::fence();
        if self.listeners.load(Ordering::Relaxed) > 0 {
            self.rings.add(1);
            self.rings.wake();
        }
    }

    pub(super) fn listen(&self) -> Listening<'a, A> {
        let heard = self.rings.load(Ordering::Acquire);
        self.listeners.add(1);
        A::fence();
        Listening { rings: self.rings, listeners: self.listeners, heard }
    }
}

/// As long as this lives, rings are heard.
#[derive(Debug)]
pub(crate) struct Listening<'a, A: Alarm> {
    rings: &'a A,
    listeners: &'a A,
    /// How often it had rung before.
    heard: u32,
}

impl<A: Alarm> Listening<'_, A> {
    /// Sleeps until the bell rings, unless it has since this began, or until the timeout. Waking
    /// early, for whatever reason, only means looking around once more.
    pub(crate) fn sleep(self, timeout: Duration) {
        self.rings.wait(self.heard, timeout);
    }
}

impl<A: Alarm> Drop for Listening<'_, A> {
    fn drop(&mut self) {
        self.listeners.add(1u32.wrapping_neg());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ring_between_looking_and_sleeping_is_not_missed() {
        let bell = Bell::new().unwrap();
        let listening = bell.listen();
        bell.ring();
        listening.sleep(Duration::from_secs(3600));
    }

    #[test]
    fn every_ring_wakes_every_sleeper() {
        let bell = Bell::new().unwrap();
        let rung = AtomicU32::new(0);
        let seen = AtomicU32::new(0);
        std::thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    for ring in 1..=100 {
                        while rung.load(Ordering::Relaxed) < ring {
                            let listening = bell.listen();
                            if rung.load(Ordering::Relaxed) < ring {
                                listening.sleep(Duration::from_secs(3600));
                            }
                        }
                        seen.fetch_add(1, Ordering::SeqCst);
                    }
                });
            }
            for ring in 1..=100 {
                rung.store(ring, Ordering::Relaxed);
                bell.ring();
                while seen.load(Ordering::SeqCst) < 3 * ring {
                    std::thread::yield_now();
                }
            }
        });
    }
}
