//! The result of an operation, now or later.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use farwire_proto::Peer;

use crate::completion::Completion;
use crate::error::Error;
use crate::memory::Buffer;
use crate::node::Membership;

/// An operation in flight.
///
/// It is a [`Future`] for async callers and has [`wait`](Self::wait) for all others. Dropping it is
/// safe: the operation goes on for as long as its communicator is held, and its result is thrown
/// away.
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

impl<T> Pending<T> {
    /// An operation that has failed before it could begin.
    pub fn failed(error: Error) -> Self {
        Self::ready(Err(error))
    }

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
            State::Ready(result) => {
                result.take().expect("a future is not polled after it was ready")
            }
            State::Running { node, group, completion, finish } => {
                node.drive_until(completion, None);
                let result = completion.take().expect("a result is taken once");
                result.map(*finish).map_err(|error| error.in_group(group))
            }
        }
    }

    /// Blocks until the operation has ended, or about this long: whether it has ended. The calling
    /// thread moves data meanwhile. It is for callers that have to look at something else now and
    /// then, such as a signal, and may be a tenth of a second late.
    ///
    /// ```
    /// use std::time::Duration;
    ///
    /// for comm in farwire::local(1)? {
    ///     let barrier = comm.barrier();
    ///     while !barrier.wait_for(Duration::from_millis(50)) {
    ///         // … look whether somebody wants this to stop.
    ///     }
    ///     barrier.wait()?;
    /// }
    /// # Ok::<(), farwire::Error>(())
    /// ```
    pub fn wait_for(&self, time: Duration) -> bool {
        if let State::Running { node, completion, .. } = &self.state {
            node.drive_until(completion, Instant::now().checked_add(time));
        }
        self.is_done()
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
                match completion.take_or_wake(context.waker()) {
                    Some(result) => {
                        Poll::Ready(result.map(*finish).map_err(|error| error.in_group(group)))
                    }
                    None => {
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
