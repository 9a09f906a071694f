//! The result of an operation, now or later.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, Waker};

use farwire_proto::Peer;

use crate::coder::Debt;
use crate::error::Error;
use crate::memory::Buffer;
use crate::node::Membership;

/// An operation in flight.
///
/// It is a [`Future`] for async callers and has [`wait`](Self::wait) for all others. Dropping it is safe: the operation goes on for as
/// long as its communicator is held, and its result is thrown away.
#[must_use = "the result, and any error, comes from waiting"]
pub struct Pending<T> {
    state: State<T>,
}

enum State<T> {
    /// Refused, or there was nothing to do.
    Ready(Option<Result<T, Error>>),
    Running {
        node: Arc<Membership>,
        /// The members of the group that was called on, if it is not the world.
        group: Option<Arc<[Peer]>>,
        completion: Arc<Completion>,
        /// From what the operation leaves behind to what its caller gets.
        finish: fn(Buffer) -> T,
    },
}

/// Where a driver leaves the result for whoever waits.
#[derive(Debug, Default)]
pub(crate) struct Completion {
    done: AtomicBool,
    shared: Mutex<Shared>,
}

#[derive(Debug, Default)]
struct Shared {
    result: Option<Result<Buffer, Error>>,
    waker: Option<Waker>,
    /// What the operation pays for earlier ones, until it has ended.
    debt: Option<Debt>,
}

impl Completion {
    /// Of an operation that pays a debt.
    pub(crate) fn paying(debt: Option<Debt>) -> Self {
        Self { shared: Mutex::new(Shared { debt, ..Shared::default() }), ..Self::default() }
    }

    pub(crate) fn is_done(&self) -> bool {
        self.done.load(Ordering::Acquire)
    }

    /// Leaves the result. Whoever is to be woken must be woken without holding a lock: it may do anything.
    #[must_use]
    pub(crate) fn complete(&self, result: Result<Buffer, Error>) -> Option<Waker> {
        let mut shared = self.shared.lock().unwrap_or_else(PoisonError::into_inner);
        shared.result = Some(match shared.debt.take() {
            None => result,
            Some(debt) => debt.settle(result),
        });
        self.done.store(true, Ordering::Release);
        shared.waker.take()
    }

    /// Has `waker` woken once the result is there; at once if it is.
    pub(crate) fn wake(&self, waker: Waker) {
        let mut shared = self.shared.lock().unwrap_or_else(PoisonError::into_inner);
        if shared.result.is_some() {
            drop(shared);
            waker.wake();
        } else {
            shared.waker = Some(waker);
        }
    }

    pub(crate) fn take(&self) -> Option<Result<Buffer, Error>> {
        self.shared.lock().unwrap_or_else(PoisonError::into_inner).result.take()
    }
}

impl<T> Pending<T> {
    pub(crate) fn ready(result: Result<T, Error>) -> Self {
        Self { state: State::Ready(Some(result)) }
    }

    pub(crate) fn running(
        node: Arc<Membership>,
        group: Option<Arc<[Peer]>>,
        completion: Arc<Completion>,
        finish: fn(Buffer) -> T,
    ) -> Self {
        Self { state: State::Running { node, group, completion, finish } }
    }

    /// Blocks until the operation has ended. The calling thread moves data while it waits.
    pub fn wait(mut self) -> Result<T, Error> {
        match &mut self.state {
            State::Ready(result) => result.take().expect("a future is not polled after it was ready"),
            State::Running { node, group, completion, finish } => {
                node.drive_until(completion);
                let result = completion.take().expect("a result is taken once");
                result.map(*finish).map_err(|error| error.in_group(group))
            }
        }
    }

    /// Whether [`wait`](Self::wait) would return at once.
    pub fn is_done(&self) -> bool {
        match &self.state {
            State::Ready(_) => true,
            State::Running { completion, .. } => completion.is_done(),
        }
    }
}

impl<T> Drop for Pending<T> {
    fn drop(&mut self) {
        if let State::Running { node, completion, .. } = &self.state
            && !completion.is_done()
        {
            node.call_keeper();
        }
    }
}

impl<T> Future for Pending<T>
where
    T: Unpin,
{
    type Output = Result<T, Error>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        match &mut self.state {
            State::Ready(result) => {
                Poll::Ready(result.take().expect("a future is not polled after it was ready"))
            }
            State::Running { node, group, completion, finish } => {
                let mut shared = completion.shared.lock().unwrap_or_else(PoisonError::into_inner);
                match shared.result.take() {
                    Some(result) => {
                        drop(shared);
                        Poll::Ready(result.map(*finish).map_err(|error| error.in_group(group)))
                    }
                    None => {
                        shared.waker = Some(context.waker().clone());
                        drop(shared);
                        node.call_keeper();
                        Poll::Pending
                    }
                }
            }
        }
    }
}

impl<T> fmt::Debug for Pending<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pending").field("done", &self.is_done()).finish_non_exhaustive()
    }
}
