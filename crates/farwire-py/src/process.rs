//! What a forked child must not do, and how a process ends.
//!
//! A fork copies memory but no threads. In the child, locks may be held by threads that are not
//! there, and the connections are the parent's: a goodbye from there would end the parent's. So
//! every call looks whether it is in the process that joined, before it touches anything; and what
//! the child drops is forgotten.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock, Weak};

use farwire::Communicator;
use pyo3::prelude::*;

use crate::failure::Failure;
use crate::operation;

/// A value that belongs to the process that made it. In a forked child it cannot be had, and is not
/// dropped.
#[derive(Debug)]
pub(crate) struct Mine<T> {
    /// Until it is dropped.
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

    /// The value, be this a forked child. What was locked there when it was forked stays locked.
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

/// Why a child of the process that joined cannot go on.
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

/// The process that they belong to; 0 as long as there were none. It is not behind a lock, which a
/// forked child could not wait for.
static JOINED: AtomicU32 = AtomicU32::new(0);

/// Keeps a communicator until it is closed, or dropped, or the process ends.
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

/// Whether this process has a communicator that is open. An error, if it was forked from one that
/// has: it would join in that one's place.
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
    // Whoever held a lock when this process was forked was using a communicator, and is not here to
    // let go of it.
    let is_closed = |slot: Arc<Slot>| slot.try_read().is_ok_and(|comm| comm.is_none());
    let are_closed = OPEN.try_lock().is_ok_and(|open| {
        let slots = open.as_ref().into_iter().flat_map(Mine::peek);
        slots.filter_map(Weak::upgrade).all(is_closed)
    });
    if are_closed { Ok(false) } else { Err(forked(joined)) }
}

/// Closes one.
pub(crate) fn close(slot: &Slot) {
    let comm = slot.write().unwrap_or_else(PoisonError::into_inner).take();
    drop(comm); // after the lock: it may wait for others to leave
}

/// The interpreter is about to end: nothing calls back from now on, and all communicators say
/// goodbye.
#[pyfunction]
pub(crate) fn exit(py: Python<'_>) {
    py.detach(|| {
        operation::stop();
        // A child that was forked while the lock was held would wait for ever.
        let Ok(mut open) = OPEN.try_lock() else { return };
        let open = open.take();
        let slots = open.as_ref().and_then(|open| open.get().ok());
        for slot in slots.into_iter().flatten().filter_map(Weak::upgrade) {
            close(&slot);
        }
    });
}
