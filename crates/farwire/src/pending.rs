//! The result of an operation, now or later.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};
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

/// The other end of a [`Pending`] whose operation is made up of others, on a thread of the
/// caller's. It says how that operation ended. If it is dropped, the operation has failed.
#[derive(Debug)]
pub struct Promise<T> {
    shared: Arc<Promised<T>>,
}

struct Promised<T> {
    state: Mutex<PromiseState<T>>,
    kept: Condvar,
}

struct PromiseState<T> {
    is_kept: bool,
    result: Option<Result<T, Error>>,
    waker: Option<Waker>,
}

impl<T> fmt::Debug for Promised<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Promised").field("kept", &self.lock().is_kept).finish_non_exhaustive()
    }
}

impl<T> Promised<T> {
    fn lock(&self) -> MutexGuard<'_, PromiseState<T>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn keep(&self, result: Result<T, Error>) {
        let mut state = self.lock();
        if state.is_kept {
            return;
        }
        (state.is_kept, state.result) = (true, Some(result));
        let waker = state.waker.take();
        drop(state);
        self.kept.notify_all();
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    /// Waits until it is kept, or for this long.
    fn wait(&self, time: Option<Duration>) -> MutexGuard<'_, PromiseState<T>> {
        let (state, waits) = (self.lock(), |state: &mut PromiseState<T>| !state.is_kept);
        match time {
            None => self.kept.wait_while(state, waits).unwrap_or_else(PoisonError::into_inner),
            Some(time) => {
                let waited = self.kept.wait_timeout_while(state, time, waits);
                waited.unwrap_or_else(PoisonError::into_inner).0
            }
        }
    }
}

impl<T> Promise<T> {
    /// Says how the operation has ended.
    pub fn keep(self, result: Result<T, Error>) {
        self.shared.keep(result);
    }
}

impl<T> Drop for Promise<T> {
    fn drop(&mut self) {
        let error = std::io::Error::other("its thread has ended");
        self.shared.keep(Err(Error::System { what: "an operation was given up", error }));
    }
}

enum State<T> {
    /// Refused, or there was nothing to do.
    Ready(Option<Result<T, Error>>),
    /// Made up of other operations, elsewhere.
    Promised(Arc<Promised<T>>),
    Running {
        node: Arc<Membership>,
        /// The members of the group that was called on, if it is not the world.
        group: Option<Arc<[Peer]>>,
        completion: Arc<Completion>,
        /// Turns what the operation leaves behind into what its caller gets.
        finish: fn(Buffer) -> T,
    },
}

impl<T> Pending<T> {
    /// An operation that is made up of others, and the promise that is to say how it ended.
    ///
    /// ```
    /// use farwire::{Pending, ReduceOp};
    ///
    /// let comm = farwire::local(1)?.remove(0);
    /// let (promise, pending) = Pending::promise();
    /// std::thread::spawn(move || {
    ///     let twice = comm.all_reduce(vec![1.0f32], ReduceOp::Sum).wait();
    ///     let twice = twice.and_then(|sum| comm.all_reduce(sum, ReduceOp::Sum).wait());
    ///     promise.keep(twice);
    /// });
    /// assert_eq!(pending.wait()?, [1.0]);
    /// # Ok::<(), farwire::Error>(())
    /// ```
    pub fn promise() -> (Promise<T>, Self) {
        let state = PromiseState { is_kept: false, result: None, waker: None };
        let shared = Arc::new(Promised { state: Mutex::new(state), kept: Condvar::new() });
        (Promise { shared: shared.clone() }, Self { state: State::Promised(shared) })
    }

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
            State::Promised(shared) => {
                shared.wait(None).result.take().expect("a result is taken once")
            }
            State::Running { node, group, completion, finish } => {
                node.drive_until(completion, None);
                let result = completion.take().expect("a result is taken once");
                let result = result.map(*finish).map_err(|error| error.in_group(group));
                if let State::Running { node, completion, .. } =
                    std::mem::replace(&mut self.state, State::Ready(None))
                {
                    node.recycle(completion);
                }
                result
            }
        }
    }

    /// Blocks until the operation has ended, or for about this long; returns whether it has ended.
    /// The calling thread moves data meanwhile. This is for callers that have to look at something
    /// else now and then, such as a signal. It may be a tenth of a second late.
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
        match &self.state {
            State::Ready(_) => {}
            State::Promised(shared) => drop(shared.wait(Some(time))),
            State::Running { node, completion, .. } => {
                node.drive_until(completion, Instant::now().checked_add(time));
            }
        }
        self.is_done()
    }

    /// Whether [`wait`](Self::wait) would return at once.
    pub fn is_done(&self) -> bool {
        match &self.state {
            State::Ready(_) => true,
            State::Promised(shared) => shared.lock().is_kept,
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
            State::Promised(shared) => {
                let mut state = shared.lock();
                match state.result.take() {
                    Some(result) => Poll::Ready(result),
                    None => {
                        state.waker = Some(context.waker().clone());
                        Poll::Pending
                    }
                }
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
