//! One process (or, in-process, one rank): its driver, and the threads that turn it.
//!
//! Data moves when a thread calls [`Driver::turn`]. A thread that waits for a result does so
//! itself, so no hand-over to another thread lies between a frame's arrival and its effect. One
//! thread at a time has this role; others sleep until their result is there or the role is free.
//! When nobody waits but something is pending (async callers, work that overlaps, dropped results),
//! the node's own *keeper* thread takes the role.

use std::fmt;
use std::num::NonZeroUsize;
use std::ops::Deref;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use farwire_proto::{OpId, Spare};

use crate::coder;
use crate::completion::Completion;
use crate::driver::{Driver, DriverGuard, SharedDriver};
use crate::shm::bell::Bell;
use crate::team;

#[derive(Debug)]
pub(crate) struct Node {
    driver: SharedDriver,
    bell: Bell,
    /// Whether some thread has the role.
    role: Mutex<bool>,
    /// Signalled when the role becomes free or a result is there.
    role_changed: Condvar,
    /// Threads that wait for a result: while there are any, the keeper steps aside.
    waiting: AtomicU32,
    keeper: Arc<Keeper>,
    /// Whether threads that wait would take cores from others: in general, and while the coding
    /// thread wants a core, too.
    crowded: [bool; 2],
    /// How long waits have taken lately, in microseconds.
    typical: AtomicU32,
    /// Threads that work for this rank.
    share: usize,
    /// Places for results, emptied, for operations to come.
    spare: Mutex<Spare<Arc<Completion>>>,
}

/// What callers hold. When the last of these is dropped, on the caller's thread, the node says
/// goodbye and leaves the job. The keeper, which holds the node itself now and then, can neither
/// delay that nor be the one to do it.
#[derive(Debug)]
pub(crate) struct Membership {
    node: Arc<Node>,
    /// The network, if there is one. Dropping it leaves the job, after the driver has said goodbye.
    _network: Option<Box<dyn Network>>,
}

/// What a node keeps while it is part of a job, and drops when it leaves.
pub(crate) trait Network: fmt::Debug + Send + Sync {}

impl Membership {
    /// A reference to the node that does not keep it alive.
    pub(crate) fn downgrade(&self) -> Weak<Node> {
        Arc::downgrade(&self.node)
    }

    /// Starts the coding thread, if it does not run yet.
    pub(crate) fn ensure_coder(&self) -> std::io::Result<()> {
        let mut driver = self.driver();
        if !driver.has_coder() {
            let (sender, jobs) = mpsc::channel();
            let node = self.downgrade();
            std::thread::Builder::new()
                .name("farwire-codec".into())
                .spawn(move || code(&jobs, &node))?;
            driver.set_coder(sender);
        }
        Ok(())
    }
}

/// How often the coding thread checks whether its node is still there.
const LOOK: Duration = Duration::from_millis(500);

/// The coding thread.
fn code(jobs: &Receiver<OpId>, node: &Weak<Node>) {
    loop {
        match jobs.recv_timeout(LOOK) {
            Err(RecvTimeoutError::Timeout) if node.strong_count() > 0 => {}
            Err(_) => return,
            Ok(op) => {
                let Some(node) = node.upgrade() else { return };
                coder::work(&node.driver, op);
                node.driver().coded();
                node.nudge(); // an operation may have ended, well or badly, while its caller sleeps
            }
        }
    }
}

impl Deref for Membership {
    type Target = Node;

    fn deref(&self) -> &Node {
        &self.node
    }
}

impl Drop for Membership {
    fn drop(&mut self) {
        self.node.driver().close();
        self.node.keeper.call();
    }
}

/// What the keeper thread sleeps on.
#[derive(Debug, Default)]
struct Keeper {
    wanted: Mutex<bool>,
    called: Condvar,
}

/// How long a waiting thread spins if waits usually end sooner. Waking a thread that sleeps takes
/// some tens of microseconds.
const LONG_SPIN: Duration = Duration::from_micros(200);
/// How long it spins if waits usually take longer.
const SHORT_SPIN: Duration = Duration::from_micros(10);
/// How long it spins if all peers are on this host: as long as it takes 16 ranks that were asleep
/// to wake each other.
const HOST_SPIN: Duration = Duration::from_micros(500);
/// Turns that it makes in any case; in the later ones it lets others have the core.
const LEAST_TURNS: u32 = 20;
/// The same, if it waits for a network and waits usually take long.
const FEW_TURNS: u32 = 2;
/// The longest that a thread sleeps without looking around.
const NAP: Duration = Duration::from_millis(100);

impl Node {
    /// Starts a node whose peers ring `bell`. While it waits, `threads` threads of this and other
    /// ranks want this host's cores. It works with `wanted` threads, or with as many as there are
    /// cores for.
    pub(crate) fn start(
        mut driver: Driver,
        bell: Bell,
        threads: usize,
        wanted: Option<NonZeroUsize>,
        network: Option<Box<dyn Network>>,
    ) -> std::io::Result<Arc<Membership>> {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let share = wanted.map_or(cores / threads.max(1), NonZeroUsize::get).max(1);
        driver.set_team(team::crew(share)?);
        let keeper = Arc::new(Keeper::default());
        let node = Arc::new(Self {
            driver: SharedDriver::new(driver),
            bell,
            role: Mutex::new(false),
            role_changed: Condvar::new(),
            waiting: AtomicU32::new(0),
            keeper: keeper.clone(),
            crowded: [threads, 2 * threads].map(|threads| threads > cores),
            typical: AtomicU32::new(0),
            share,
            spare: Mutex::default(),
        });
        let weak = Arc::downgrade(&node);
        std::thread::Builder::new()
            .name("farwire-keeper".into())
            .spawn(move || keeper.keep(&weak))?;
        Ok(Arc::new(Membership { node, _network: network }))
    }

    pub(crate) fn driver(&self) -> DriverGuard<'_> {
        self.driver.lock()
    }

    /// A place for the result of an operation.
    pub(crate) fn completion(&self) -> Arc<Completion> {
        self.spare().take()
    }

    /// Takes a place back whose result has been taken.
    pub(crate) fn recycle(&self, mut completion: Arc<Completion>) {
        // Another thread may be just about to let go of it.
        if let Some(only) = Arc::get_mut(&mut completion) {
            *only = Completion::default();
            self.spare().give(completion);
        }
    }

    fn spare(&self) -> MutexGuard<'_, Spare<Arc<Completion>>> {
        self.spare.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Does the coding that short operations want; `true` if there was one.
    pub(crate) fn code_short(&self) -> bool {
        let first = self.driver().take_short();
        coder::work_short(&self.driver, first)
    }

    /// Makes waiting threads look: a result is there that the driver knows nothing of.
    pub(crate) fn nudge(&self) {
        drop(self.role());
        self.role_changed.notify_all();
        self.bell.ring();
    }

    /// Threads that a codec may use.
    pub(crate) fn coding_threads(&self) -> usize {
        self.share
    }

    /// Whether any thread waits for a result.
    pub(crate) fn is_waited_for(&self) -> bool {
        self.waiting.load(Ordering::SeqCst) > 0
    }

    /// Calls the keeper, since something is pending, unless a thread waits and so moves data.
    pub(crate) fn call_keeper(&self) {
        if !self.is_waited_for() {
            self.keeper.call();
        }
    }

    /// Moves data until the result is there, or until `end`, which may pass by up to a [`NAP`].
    pub(crate) fn drive_until(&self, completion: &Completion, end: Option<Instant>) {
        self.drive_until_true(|| {
            completion.is_done() || end.is_some_and(|end| Instant::now() >= end)
        });
    }

    /// Moves data until `done` is true. (If that depends on the time, up to a [`NAP`] longer.)
    pub(crate) fn drive_until_true(&self, done: impl Fn() -> bool) {
        if done() {
            return;
        }
        let _waiting = Waiting::new(self);
        let mut taken = self.role();
        while !done() {
            if *taken {
                self.bell.ring(); // the keeper, if it has the role and sleeps, steps aside
                taken = self
                    .role_changed
                    .wait_timeout(taken, NAP)
                    .unwrap_or_else(PoisonError::into_inner)
                    .0;
                continue;
            }
            let _role = Role::take(self, taken, 1);
            return self.drive(done);
        }
    }

    fn role(&self) -> MutexGuard<'_, bool> {
        self.role.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Turns the driver until `done`. Only for the thread that has the role.
    fn drive(&self, done: impl Fn() -> bool) {
        // Turns without effect, and since when.
        let (mut idle, mut since) = (0, None);
        let mut listening = None;
        loop {
            let now = Instant::now();
            let (moved, short, coding, network) = {
                let mut driver = self.driver();
                let moved = driver.turn(now);
                (moved, driver.take_short(), driver.is_coding(), driver.has_network())
            };
            let moved = coder::work_short(&self.driver, short) | moved;
            if moved && self.waiting.load(Ordering::Relaxed) > 1 {
                drop(self.role()); // nobody is between looking for its result and going to sleep
                self.role_changed.notify_all(); // the result may be another thread's
            }
            if moved && let Some(since) = since.take() {
                self.waited(now.saturating_duration_since(since));
            }
            if done() {
                return;
            }
            if moved {
                (idle, listening) = (0, None);
                continue;
            }
            idle += 1;
            let waited = now.saturating_duration_since(*since.get_or_insert(now));
            let (turns, spin) = self.spin(coding, network);
            if idle > turns && waited >= spin {
                // Between listening and sleeping lies a turn, so that nothing is missed.
                match listening.take() {
                    None => listening = Some(self.bell.listen()),
                    Some(listening) => {
                        let patience = self.driver().patience();
                        listening.sleep(patience.min(NAP));
                        idle = 0;
                    }
                }
            } else if idle > turns / 2 {
                std::thread::yield_now(); // which costs little if nobody wants the core
            } else {
                std::hint::spin_loop();
            }
        }
    }

    /// How many turns to make before sleeping, and for how long at least. On a core that another
    /// thread needs, spinning would only delay what is waited for.
    ///
    /// Ranks of one host do not go by how long waits have taken lately: a rank that sleeps makes
    /// the others wait longer, so that they would sleep, too, and from then on all would wake each
    /// other.
    fn spin(&self, coding: bool, network: bool) -> (u32, Duration) {
        let typical = Duration::from_micros(self.typical.load(Ordering::Relaxed).into());
        let takes_long = network && typical > LONG_SPIN;
        let turns = if takes_long { FEW_TURNS } else { LEAST_TURNS };
        let spin = match self.crowded[usize::from(coding)] {
            true => Duration::ZERO,
            false if !network => HOST_SPIN,
            false if takes_long => SHORT_SPIN,
            false => LONG_SPIN,
        };
        (turns, spin)
    }

    /// Notes how long a wait took.
    fn waited(&self, time: Duration) {
        let time = time.min(10 * LONG_SPIN).as_micros() as u32;
        let typical = self.typical.load(Ordering::Relaxed);
        self.typical.store((7 * typical + time) / 8, Ordering::Relaxed);
    }

    /// Takes the role, if it is free and no thread waits for a result, until nothing is pending or
    /// a thread waits.
    fn keep_going(&self) {
        let taken = self.role();
        if *taken || self.waiting.load(Ordering::SeqCst) > 0 {
            return;
        }
        let _role = Role::take(self, taken, 0);
        self.drive(|| self.waiting.load(Ordering::SeqCst) > 0 || self.driver().is_idle());
    }
}

/// Counts a thread that waits for a result, until this is dropped. A panic in somebody's waker
/// drops it, too, and must not leave the others without a thread that moves their data.
struct Waiting<'a>(&'a Node);

impl<'a> Waiting<'a> {
    fn new(node: &'a Node) -> Self {
        node.waiting.fetch_add(1, Ordering::SeqCst);
        Self(node)
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        if self.0.waiting.fetch_sub(1, Ordering::SeqCst) == 1 && !self.0.driver().is_idle() {
            self.0.keeper.call();
        }
    }
}

/// The role of turning the driver, given back when this is dropped.
struct Role<'a> {
    node: &'a Node,
    /// How many of the waiting threads have it: 1, or 0 if it is the keeper's.
    own: u32,
}

impl<'a> Role<'a> {
    fn take(node: &'a Node, mut taken: MutexGuard<'a, bool>, own: u32) -> Self {
        *taken = true;
        Self { node, own }
    }
}

impl Drop for Role<'_> {
    fn drop(&mut self) {
        *self.node.role() = false;
        // A thread that has seen the role taken was counted as waiting before that.
        if self.node.waiting.load(Ordering::SeqCst) > self.own {
            self.node.role_changed.notify_all(); // a system call, even if nobody waits
        }
    }
}

impl Keeper {
    fn call(&self) {
        *self.wanted.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.called.notify_one();
    }

    /// The keeper thread, which runs until the node is gone.
    fn keep(&self, node: &Weak<Node>) {
        loop {
            {
                let wanted = self.wanted.lock().unwrap_or_else(PoisonError::into_inner);
                let (mut wanted, _) = self
                    .called
                    .wait_timeout_while(wanted, NAP, |wanted| !*wanted)
                    .unwrap_or_else(PoisonError::into_inner);
                *wanted = false;
            }
            match node.upgrade() {
                // A waker that panics is its task's trouble; others need this thread.
                Some(node) => drop(catch_unwind(AssertUnwindSafe(|| node.keep_going()))),
                None => return,
            }
        }
    }
}
