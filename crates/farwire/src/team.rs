//! Threads that help the thread that moves data, on cores that would be idle.
//!
//! The thread that moves data offers a *mate* half of the work on a frame, does the other half, and
//! takes the first half back if no mate has begun it. So it never waits for a thread that sleeps or
//! has no core. Mates look for work for a while after the last they had, then sleep.
//!
//! # Rules of access
//!
//! Each mate has a [`Post`], one word that says what it does:
//!
//! ```text
//!            offer             begin
//!   FREE ───────────▶ a job ──────────▶ BUSY ──▶ FREE
//!    │  ◀───────────    │
//!    ▼     take back
//!  ASLEEP ──▶ FREE, by a thread that has work and finds it so
//! ```
//!
//! 1. A job is on the stack of the thread that offers it, and stays there until it was taken back
//!    or says that it is done. So it is valid for as long as a post holds its address, and while it
//!    runs.
//! 2. To offer, to begin and to take back are one exchange of the post's word each, so just one
//!    thread runs a job: the mate that begins it, or the thread that takes it back.
//! 3. Saying that a job is done is the last that its mate does with it. After that, only the thread
//!    that offered it touches it.

#![allow(unsafe_code, reason = "jobs are on the stack of another thread; see the rules above")]

use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::ptr;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError};
use std::thread::Thread;
use std::time::{Duration, Instant};

use farwire_proto::Team;

use crate::past_caches;

/// The most threads that work on a frame; with more, each would have too little to do.
const MOST: usize = 4;
/// How long a mate looks for more work. While a long vector is moved, there is some every few
/// microseconds, and waking a thread takes tens of them.
const LOOK: Duration = Duration::from_micros(150);
/// How often it looks for work before it looks at the clock.
const LOOKS: u32 = 128;
/// Offers in a row that nobody took up although a mate looked for work: then it has no core.
const MISSES: u32 = 16;
/// Jobs that are then done alone, before mates are offered some again: about as many as one long
/// vector makes, since a core that was taken for a moment should not be missed for longer.
const ALONE: u32 = 1 << 10;

/// The mates of this process, however many communicators it has.
static MATES: [Mate; MOST - 1] = [const { Mate::new() }; MOST - 1];
static CREWS: [Crew; MOST] = [Crew::new(0), Crew::new(1), Crew::new(2), Crew::new(3)];

/// The thread that moves data, and some mates.
#[derive(Debug)]
pub(crate) struct Crew {
    mates: usize,
    /// Offers in a row that nobody took up.
    missed: AtomicU32,
    /// Jobs that are still to be done alone.
    alone: AtomicU32,
}

/// A crew of as many threads as are wanted, or as make sense.
pub(crate) fn crew(threads: usize) -> io::Result<&'static dyn Team> {
    static STARTED: Mutex<usize> = Mutex::new(0);
    let mates = threads.min(MOST).saturating_sub(1);
    let mut started = STARTED.lock().unwrap_or_else(PoisonError::into_inner);
    while *started < mates {
        MATES[*started].start()?;
        *started += 1;
    }
    Ok(&CREWS[mates])
}

impl Crew {
    const fn new(mates: usize) -> Self {
        Self { mates, missed: AtomicU32::new(0), alone: AtomicU32::new(0) }
    }

    /// A mate that is free. If none is, one that sleeps is woken for the next time: waiting for it
    /// would take longer than doing its part.
    fn free_mate(&self) -> Option<&'static Mate> {
        let alone = self.alone.load(Ordering::Relaxed);
        if alone > 0 {
            self.alone.store(alone - 1, Ordering::Relaxed);
            return None;
        }
        let mates = &MATES[..self.mates];
        let free = mates.iter().find(|mate| mate.post.is_free());
        if free.is_none() {
            mates.iter().find(|mate| mate.wake());
        }
        free
    }

    /// Notes whether a mate that looked for work has taken up what it was offered.
    fn note(&self, taken_up: bool) {
        let missed = if taken_up { 0 } else { self.missed.load(Ordering::Relaxed) + 1 };
        if missed >= MISSES {
            self.alone.store(ALONE, Ordering::Relaxed);
        }
        self.missed.store(missed % MISSES, Ordering::Relaxed);
    }
}

impl Team for Crew {
    fn size(&self) -> usize {
        1 + self.mates
    }

    fn join(&self, one: &mut (dyn FnMut() + Send), other: &mut (dyn FnMut() + Send)) {
        let mut job = Job { work: other, progress: Progress(AtomicUsize::new(UNDER_WAY)) };
        let job = &raw mut job;
        let address = job.expose_provenance();
        let Some(mate) = self.free_mate().filter(|mate| mate.post.offer(address)) else {
            one();
            // SAFETY: nobody was offered the job.
            return unsafe { (*job).run() };
        };
        // If this half panics, the other may still be running, and using what is on this stack.
        let here = catch_unwind(AssertUnwindSafe(one));
        let there = if mate.post.take_back(address) {
            self.note(false);
            // SAFETY: rule 2. It was taken back, so no mate runs it.
            catch_unwind(AssertUnwindSafe(|| unsafe { (*job).run() })).is_ok()
        } else {
            self.note(true);
            // SAFETY: rule 1, and `progress` is all that a mate ever shares.
            unsafe { &(*job).progress }.wait()
        };
        if let Err(panic) = here {
            resume_unwind(panic);
        }
        assert!(there, "a part of the work panicked");
    }

    fn copy_past_caches(&self, target: &mut [u8], source: &[u8]) {
        past_caches::copy(target, source);
    }
}

/// What another thread is to do.
struct Job<'a> {
    work: &'a mut (dyn FnMut() + Send + 'a),
    progress: Progress<AtomicUsize>,
}

impl Job<'_> {
    fn run(&mut self) {
        (self.work)();
    }
}

/// A thread that helps.
#[derive(Debug)]
struct Mate {
    post: Post<AtomicUsize>,
    /// Set once it has started.
    thread: OnceLock<Thread>,
}

impl Mate {
    const fn new() -> Self {
        Self { post: Post(AtomicUsize::new(BUSY)), thread: OnceLock::new() }
    }

    fn start(&'static self) -> io::Result<()> {
        let thread = std::thread::Builder::new().name("farwire-mate".into());
        let handle = thread.spawn(|| self.keep_helping())?;
        self.thread.get_or_init(|| handle.thread().clone());
        Ok(())
    }

    /// The thread, which runs for as long as the process lasts.
    fn keep_helping(&self) {
        self.post.free();
        loop {
            self.help_until_idle();
            if self.post.fall_asleep() {
                while self.post.is_asleep() {
                    std::thread::park();
                }
            }
        }
    }

    /// Does what it is offered, until there has been nothing for a while.
    fn help_until_idle(&self) {
        let mut since = Instant::now();
        loop {
            for _ in 0..LOOKS {
                if let Some(job) = self.post.begin() {
                    let job: *mut Job<'static> = ptr::with_exposed_provenance_mut(job);
                    // SAFETY: rules 1 and 2: the job is there until it says that it is done, and
                    // until then its work is this thread's alone. Its lifetime is not 'static, but
                    // longer than that of this borrow.
                    let work = unsafe { &mut *(*job).work };
                    let went_well = catch_unwind(AssertUnwindSafe(work)).is_ok();
                    // SAFETY: rule 1.
                    unsafe { &(*job).progress }.end(went_well);
                    self.post.free();
                    since = Instant::now();
                }
                std::hint::spin_loop();
            }
            if since.elapsed() > LOOK {
                return;
            }
        }
    }

    /// Wakes it, if it sleeps.
    fn wake(&self) -> bool {
        let woken = self.post.wake();
        if woken && let Some(thread) = self.thread.get() {
            thread.unpark();
        }
        woken
    }
}

/// What a post says when it does not hold the address of a job, which is never as low as these.
const FREE: usize = 0;
const BUSY: usize = 1;
const ASLEEP: usize = 2;

/// What a mate does.
#[derive(Debug)]
struct Post<W>(W);

impl<W: Word> Post<W> {
    fn is_free(&self) -> bool {
        self.0.load() == FREE
    }

    fn is_asleep(&self) -> bool {
        self.0.load() == ASLEEP
    }

    fn offer(&self, job: usize) -> bool {
        self.0.exchange(FREE, job)
    }

    fn take_back(&self, job: usize) -> bool {
        self.0.exchange(job, FREE)
    }

    fn begin(&self) -> Option<usize> {
        let job = self.0.load();
        (job > ASLEEP && self.0.exchange(job, BUSY)).then_some(job)
    }

    fn free(&self) {
        self.0.store(FREE);
    }

    fn fall_asleep(&self) -> bool {
        self.0.exchange(FREE, ASLEEP)
    }

    fn wake(&self) -> bool {
        self.0.exchange(ASLEEP, FREE)
    }
}

const UNDER_WAY: usize = 0;
const ENDED: usize = 1;
const PANICKED: usize = 2;

/// Whether a job has ended.
#[derive(Debug)]
struct Progress<W>(W);

impl<W: Word> Progress<W> {
    fn end(&self, well: bool) {
        self.0.store(if well { ENDED } else { PANICKED });
    }

    /// Waits for the end of a job that has begun; `false` if it panicked.
    fn wait(&self) -> bool {
        for look in 0u32.. {
            match self.0.load() {
                UNDER_WAY if look < LOOKS => W::pause(),
                UNDER_WAY => W::give_way(),
                state => return state == ENDED,
            }
        }
        unreachable!("it ends long before it was looked at so often")
    }
}

/// A word that threads share. Whatever a thread has done before it stores or exchanges a value, a
/// thread that finds that value can rely on.
trait Word {
    fn load(&self) -> usize;
    fn store(&self, value: usize);
    fn exchange(&self, from: usize, to: usize) -> bool;
    fn pause();
    fn give_way();
}

impl Word for AtomicUsize {
    fn load(&self) -> usize {
        self.load(Ordering::Acquire)
    }

    fn store(&self, value: usize) {
        self.store(value, Ordering::Release);
    }

    fn exchange(&self, from: usize, to: usize) -> bool {
        self.compare_exchange(from, to, Ordering::AcqRel, Ordering::Relaxed).is_ok()
    }

    fn pause() {
        std::hint::spin_loop();
    }

    fn give_way() {
        std::thread::yield_now(); // the mate may have lost its core
    }
}

#[cfg(test)]
mod tests {
    use farwire_proto::team::copy;

    use super::*;

    #[test]
    fn what_is_done_together_is_done_once_and_whole() {
        let crew = Some(crew(MOST).unwrap());
        std::thread::scope(|scope| {
            for thread in 0..3usize {
                scope.spawn(move || {
                    let source: Vec<u8> = (0..200_003).map(|k| (k * 7 + thread) as u8).collect();
                    for round in 0..300 {
                        let len = 1 + (round * 7919) % source.len();
                        let mut target = vec![0; len];
                        copy(crew, &mut target, &source[..len]);
                        assert_eq!(target, source[..len]);
                    }
                });
            }
        });
    }

    #[test]
    fn a_panic_in_either_half_reaches_the_caller_when_both_have_ended() {
        let crew = crew(2).unwrap();
        for round in 0..200 {
            let (mut ended, mut panics) = (false, round % 2 == 0);
            let joined = catch_unwind(AssertUnwindSafe(|| {
                let mut fails = || assert!(!std::mem::take(&mut panics), "on purpose");
                let mut works = || ended = true;
                if round % 4 < 2 {
                    crew.join(&mut works, &mut fails);
                } else {
                    crew.join(&mut fails, &mut works);
                }
            }));
            assert_eq!(joined.is_err(), round % 2 == 0);
            assert!(ended || round % 4 == 2, "a half that nobody has begun may stay undone");
        }
    }

    /// The protocol of posts and jobs under a model checker, as in `shm/model.rs`. One check is
    /// made with the ordering taken away, and must fail.
    mod model {
        use loom::cell::UnsafeCell;
        use loom::sync::Arc;
        use loom::sync::atomic::AtomicUsize;
        use loom::thread;

        use super::super::{Ordering, Post, Progress, UNDER_WAY, Word};

        struct ModelWord<const WEAK: bool>(AtomicUsize);

        impl<const WEAK: bool> Word for ModelWord<WEAK> {
            fn load(&self) -> usize {
                self.0.load(Ordering::Acquire)
            }

            fn store(&self, value: usize) {
                self.0.store(value, if WEAK { Ordering::Relaxed } else { Ordering::Release });
            }

            fn exchange(&self, from: usize, to: usize) -> bool {
                let order = if WEAK { Ordering::Relaxed } else { Ordering::AcqRel };
                self.0.compare_exchange(from, to, order, Ordering::Relaxed).is_ok()
            }

            fn pause() {
                thread::yield_now();
            }

            fn give_way() {
                thread::yield_now();
            }
        }

        const JOB: usize = 100;

        /// A thread offers a job and takes it back, or waits for it; a mate looks for work twice.
        fn offer_once<const WEAK: bool>() {
            let mut model = loom::model::Builder::new();
            model.preemption_bound = Some(3);
            model.check(|| {
                let word = |value| ModelWord::<WEAK>(AtomicUsize::new(value));
                let (post, progress) = (Post(word(super::super::FREE)), Progress(word(UNDER_WAY)));
                let shared = Arc::new((post, progress, UnsafeCell::new(0)));
                let mate = shared.clone();
                let mate = thread::spawn(move || {
                    let (post, progress, work) = &*mate;
                    for _ in 0..2 {
                        if post.begin().is_some() {
                            // SAFETY: rule 2; the checker sees if that does not hold.
                            work.with_mut(|work| unsafe { *work += 1 });
                            progress.end(true);
                            post.free();
                        }
                        thread::yield_now();
                    }
                });
                let (post, progress, work) = &*shared;
                // SAFETY: it has not been offered yet.
                work.with_mut(|work| unsafe { *work += 1 });
                assert!(post.offer(JOB));
                if post.take_back(JOB) {
                    // SAFETY: as above.
                    work.with_mut(|work| unsafe { *work += 1 });
                } else {
                    assert!(progress.wait());
                }
                // SAFETY: as above.
                assert_eq!(work.with(|work| unsafe { *work }), 2, "run just once");
                mate.join().unwrap();
            });
        }

        #[test]
        fn a_job_is_run_by_one_thread_and_seen_by_who_offered_it() {
            offer_once::<false>();
        }

        #[test]
        #[should_panic(expected = "Causality violation")]
        fn without_order_the_checker_would_see_it() {
            offer_once::<true>();
        }
    }
}
