//! What a forked child must not do, and how a process ends.
//!
//! A fork copies memory but no threads. In the child, locks may be held by threads that do not
//! exist there, and the connections are the parent's: a goodbye from the child would end them for
//! the parent. So every call checks that it is in the process that joined, before it touches
//! anything; and what the child drops is forgotten.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock, Weak};

use farwire::Communicator;
use pyo3::prelude::*;

use crate::failure::Failure;
use crate::operation;

/// A value that belongs to the process that made it. A forked child cannot get it, and does not
/// drop it.
#[derive(Debug)]
pub(crate) struct Mine<T> {
    /// `None` only once it is taken or being dropped.
    value: Option<T>,
    process: u32,
}

impl<T> Mine<T> {
    pub(crate) fn new(value: T) -> Self {
        Self { value: Some(value), process: std::process::id() }
    }

    /// The value, unless this is a forked child.
    pub(crate) fn get(&self) -> Result<&T, Failure> {
        if std::process::id() == self.process { Ok(self.peek()) } else { Err(forked(self.process)) }
    }

    /// The value, even in a forked child, where locks held at the time of the fork stay locked.
    fn peek(&self) -> &T {
        self.value.as_ref().expect("it has not been dropped")
    }

    /// The value itself, unless this is a forked child.
    pub(crate) fn into_mine(mut self) -> Option<T> {
        self.value.take_if(|_| self.process == std::process::id())
    }
}

impl<T> Drop for Mine<T> {
    fn drop(&mut self) {
        if self.process != std::process::id() {
            std::mem::forget(self.value.take());
        }
    }
}

/// The error for a child of the process that joined.
fn forked(joined: u32) -> Failure {
    let here = std::process::id();
    let message = format!(
        "farwire cannot be used in process {here}, which was forked from the one that joined \
         ({joined}); call it there, or in processes that were spawned and joined"
    );
    Failure::new("Forked", message)
}

/// A communicator, until it is closed.
pub(crate) type Slot = RwLock<Option<Communicator>>;

/// Communicators that say goodbye when the process ends.
static OPEN: Mutex<Option<Mine<Vec<Weak<Slot>>>>> = Mutex::new(None);

/// The process that they belong to; 0 before there are any. It is not behind a lock, because a
/// forked child could wait for that forever.
static JOINED: AtomicU32 = AtomicU32::new(0);

/// Keeps a communicator until it is closed or dropped, or the process ends.
pub(crate) fn opened(comm: Communicator) -> Arc<Slot> {
    JOINED.store(std::process::id(), Ordering::Relaxed);
    let slot = Arc::new(RwLock::new(Some(comm)));
    let mut open = OPEN.lock().unwrap_or_else(PoisonError::into_inner);
    let known = open.take().and_then(|open| open.get().ok().cloned()).unwrap_or_default();
    let mut known: Vec<_> = known.into_iter().filter(|slot| slot.strong_count() > 0).collect();
    known.push(Arc::downgrade(&slot));
    *open = Some(Mine::new(known));
    slot
}

/// Whether this process has an open communicator. An error if it was forked from a process that has
/// one: it would join in its parent's place.
pub(crate) fn has_joined() -> Result<bool, Failure> {
    let joined = JOINED.load(Ordering::Relaxed);
    if joined == 0 {
        return Ok(false);
    }
    if joined == std::process::id() {
        let open = OPEN.lock().unwrap_or_else(PoisonError::into_inner);
        let is_open =
            |slot: Arc<Slot>| slot.read().unwrap_or_else(PoisonError::into_inner).is_some();
        let slots = open.as_ref().into_iter().flat_map(Mine::peek);
        return Ok(slots.filter_map(Weak::upgrade).any(is_open));
    }
    // A lock that cannot be taken was held at the time of the fork, by a thread that was using a
    // communicator and does not exist here to release it.
    let is_closed = |slot: Arc<Slot>| slot.try_read().is_ok_and(|comm| comm.is_none());
    let are_closed = OPEN.try_lock().is_ok_and(|open| {
        let slots = open.as_ref().into_iter().flat_map(Mine::peek);
        slots.filter_map(Weak::upgrade).all(is_closed)
    });
    if are_closed { Ok(false) } else { Err(forked(joined)) }
}

/// Closes a communicator.
pub(crate) fn close(slot: &Slot) {
    let comm = slot.write().unwrap_or_else(PoisonError::into_inner).take();
    drop(comm); // after the lock: it may wait for others to leave
}

/// Called when the interpreter is about to end: stops all callbacks, and all communicators say
/// goodbye.
#[pyfunction]
pub(crate) fn exit(py: Python<'_>) {
    py.detach(|| {
        operation::stop();
        // A child that was forked while the lock was held would wait forever.
        let Ok(mut open) = OPEN.try_lock() else { return };
        let open = open.take();
        let slots = open.as_ref().and_then(|open| open.get().ok());
        for slot in slots.into_iter().flatten().filter_map(Weak::upgrade) {
            close(&slot);
        }
    });
}
