//! Operations in flight.
//!
//! ```text
//!  submit ─▶ Running ── whoever waits moves the data, 50 ms at a time ──▶ Ended
//!               └────── nobody waits: a waker tells the finisher ──────▶ Ended ─▶ callbacks
//! ```
//!
//! The *finisher* is a thread of this crate: it copies results to where they belong, and then
//! attaches to the interpreter to call back. farwire's own threads never attach, so a busy
//! interpreter holds up no data.

use std::fmt;
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::task::{Context, Poll, Wake, Waker};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use farwire::{Element, Error, Memory, Pending};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::failure::Failure;
use crate::process::Mine;

/// A farwire operation, or several that end as one.
pub(crate) trait Work: Send + Sync {
    /// Moves data until all of it has arrived, or for about this long. Returns whether it has.
    fn wait_for(&self, time: Duration) -> bool;

    /// Puts the results that have arrived where they belong. Not polled again after it is ready.
    fn poll(&mut self, context: &mut Context<'_>) -> Poll<Result<(), Failure>>;
}

/// Polls a farwire operation.
pub(crate) fn poll<T: Unpin>(
    pending: &mut Pending<T>,
    context: &mut Context<'_>,
) -> Poll<Result<T, Error>> {
    std::pin::Pin::new(pending).poll(context)
}

/// An operation that works in place, or has no result.
pub(crate) struct Plain<T>(pub(crate) Pending<T>);

impl<T: Send + Sync + Unpin> Work for Plain<T> {
    fn wait_for(&self, time: Duration) -> bool {
        self.0.wait_for(time)
    }

    fn poll(&mut self, context: &mut Context<'_>) -> Poll<Result<(), Failure>> {
        poll(&mut self.0, context).map(|result| result.map(drop).map_err(Failure::from))
    }
}

/// An operation whose result is copied to where it is wanted; without a place, it is dropped.
pub(crate) struct Copied<T: Element> {
    pub(crate) pending: Pending<Vec<T>>,
    pub(crate) to: Option<Memory<T>>,
}

impl<T: Element + Unpin> Work for Copied<T> {
    fn wait_for(&self, time: Duration) -> bool {
        self.pending.wait_for(time)
    }

    fn poll(&mut self, context: &mut Context<'_>) -> Poll<Result<(), Failure>> {
        poll(&mut self.pending, context).map(|result| {
            let (result, to) = (result?, self.to.take());
            match to {
                Some(mut to) if to.len() == result.len() => to.copy_from_slice(&result),
                Some(to) => {
                    let (need, given) = (result.len(), to.len());
                    return Err(Failure::call(format!(
                        "the output has room for {given} elements, but the result has {need}; \
                         give an array of {need}"
                    )));
                }
                None => {}
            }
            Ok(())
        })
    }
}

/// How long a wait goes on before it checks for signals.
const LOOK: Duration = Duration::from_millis(50);

/// An operation in flight: `wait()` for it, `await` it, or have it call back.
#[pyclass(frozen, module = "farwire")]
pub(crate) struct Operation {
    shared: Mine<Arc<Shared>>,
    /// What `wait` returns.
    result: Py<PyAny>,
}

pub(crate) struct Shared {
    state: RwLock<State>,
    callbacks: Mutex<Vec<Py<PyAny>>>,
}

enum State {
    Running(Box<dyn Work>),
    Ended(Result<(), Failure>),
}

impl fmt::Debug for Shared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Shared").finish_non_exhaustive()
    }
}

impl Operation {
    pub(crate) fn new(work: Box<dyn Work>, result: Py<PyAny>) -> Self {
        let state = RwLock::new(State::Running(work));
        let shared = Arc::new(Shared { state, callbacks: Mutex::default() });
        Self { shared: Mine::new(shared), result }
    }

    /// Has results put in place as soon as they arrive, even while nobody waits.
    pub(crate) fn in_background(self) -> std::io::Result<Self> {
        if let Ok(shared) = self.shared.get() {
            shared.arm()?;
        }
        Ok(self)
    }

    fn shared(&self, py: Python<'_>) -> PyResult<&Arc<Shared>> {
        self.shared.get().map_err(|failure| failure.raise(py))
    }
}

#[pymethods]
impl Operation {
    /// Waits for the end, and returns the result. Raises the operation's error, or TimeoutError
    /// after `timeout` seconds: the operation then goes on.
    #[pyo3(signature = (timeout=None))]
    fn wait(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<Py<PyAny>> {
        let shared = self.shared(py)?;
        let until = match timeout.map(Duration::try_from_secs_f64).transpose() {
            Ok(timeout) => timeout.and_then(|timeout| Instant::now().checked_add(timeout)),
            Err(error) => return Err(PyValueError::new_err(format!("timeout: {error}"))),
        };
        loop {
            let now = Instant::now();
            if until.is_some_and(|until| now >= until) && !shared.has_ended() {
                let text = "the operation has not ended yet; it goes on, and can be waited for";
                return Err(pyo3::exceptions::PyTimeoutError::new_err(text));
            }
            let look = until.map_or(LOOK, |until| (until - now).min(LOOK));
            if let Some(result) = py.detach(|| shared.advance(look)) {
                result.map_err(|failure| failure.raise(py))?;
                return Ok(self.result.clone_ref(py));
            }
            py.check_signals()?;
        }
    }

    /// Whether it has ended, with a result or an error.
    fn done(&self, py: Python<'_>) -> PyResult<bool> {
        let shared = self.shared(py)?;
        Ok(py.detach(|| shared.advance(Duration::ZERO)).is_some())
    }

    /// Calls `callback(operation)` when it has ended: on a farwire thread, or on one that calls
    /// `wait` or `done`; or at once if it already has.
    fn add_done_callback(slf: &Bound<'_, Self>, callback: Bound<'_, PyAny>) -> PyResult<()> {
        let (py, this) = (slf.py(), slf.get());
        let shared = this.shared(py)?;
        // The callback gets this object as its argument, and so keeps it alive.
        let bound = py.import("functools")?.call_method1("partial", (callback, slf))?.unbind();
        py.detach(|| {
            lock(&shared.callbacks).push(bound);
            shared.arm()
        })?;
        Ok(())
    }

    fn __await__<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyAny>> {
        slf.py().import("farwire._awaiting")?.call_method1("wait_in_loop", (slf,))
    }

    fn __repr__(&self) -> &'static str {
        match self.shared.get().map(|shared| shared.has_ended()) {
            Ok(true) => "<farwire.Operation, ended>",
            Ok(false) => "<farwire.Operation, in flight>",
            Err(_) => "<farwire.Operation of the parent process>",
        }
    }
}

impl Shared {
    fn has_ended(&self) -> bool {
        matches!(*self.state.read().unwrap_or_else(PoisonError::into_inner), State::Ended(_))
    }

    /// Moves data for up to `time`. Returns the outcome if it has ended.
    fn advance(&self, time: Duration) -> Option<Result<(), Failure>> {
        {
            let state = self.state.read().unwrap_or_else(PoisonError::into_inner);
            match &*state {
                State::Ended(result) => return Some(result.clone()),
                State::Running(work) if !work.wait_for(time) => return None,
                State::Running(_) => {}
            }
        }
        // Everything has arrived, so nobody needs to be woken.
        self.finish(&mut Context::from_waker(Waker::noop()))
    }

    /// Ends it if everything has arrived; otherwise the context's waker is woken when more has.
    fn finish(&self, context: &mut Context<'_>) -> Option<Result<(), Failure>> {
        let mut state = self.state.write().unwrap_or_else(PoisonError::into_inner);
        let result = match &mut *state {
            State::Ended(result) => return Some(result.clone()),
            State::Running(work) => match work.poll(context) {
                Poll::Pending => return None,
                Poll::Ready(result) => result,
            },
        };
        let ended = std::mem::replace(&mut *state, State::Ended(result.clone()));
        drop(state);
        drop(ended);
        self.call_back();
        Some(result)
    }

    /// Ends it if everything has arrived; otherwise hands it to the finisher.
    fn arm(self: &Arc<Self>) -> std::io::Result<()> {
        start()?;
        let waker = Waker::from(Arc::new(Finish(self.clone())));
        if self.finish(&mut Context::from_waker(&waker)).is_some() {
            self.call_back(); // for a callback that came after the end
        }
        Ok(())
    }

    fn call_back(&self) {
        let callbacks = std::mem::take(&mut *lock(&self.callbacks));
        if callbacks.is_empty() {
            return;
        }
        let called = Python::try_attach(|py| {
            for callback in &callbacks {
                if let Err(error) = callback.call0(py) {
                    error.write_unraisable(py, Some(callback.bind(py)));
                }
            }
        });
        if called.is_none() {
            std::mem::forget(callbacks); // the interpreter is gone, and they with it
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Wakes the finisher for an operation.
struct Finish(Arc<Shared>);

impl Wake for Finish {
    fn wake(self: Arc<Self>) {
        if let Some(Ok(finisher)) = lock(&FINISHER).as_ref().map(|finisher| finisher.get()) {
            // Once the finisher has stopped, the thread that waits finishes the operation.
            let _ = finisher.jobs.send(Some(self));
        }
    }
}

struct Finisher {
    jobs: Sender<Option<Arc<Finish>>>,
    thread: JoinHandle<()>,
}

static FINISHER: Mutex<Option<Mine<Finisher>>> = Mutex::new(None);

/// Starts the finisher if it does not run in this process.
fn start() -> std::io::Result<()> {
    let mut finisher = lock(&FINISHER);
    if finisher.as_ref().is_some_and(|finisher| finisher.get().is_ok()) {
        return Ok(());
    }
    let (jobs, queue) = channel::<Option<Arc<Finish>>>();
    let work = move || {
        for job in queue.into_iter().map_while(|job| job) {
            let waker = Waker::from(job.clone());
            let _ended = job.0.finish(&mut Context::from_waker(&waker));
        }
    };
    let thread = std::thread::Builder::new().name("farwire-finish".into()).spawn(work)?;
    *finisher = Some(Mine::new(Finisher { jobs, thread }));
    Ok(())
}

/// Ends the finisher: there are no callbacks from now on. Must not be called by a thread that is
/// attached to the interpreter.
pub(crate) fn stop() {
    // A child that was forked while the lock was held would wait forever.
    let Some(finisher) = FINISHER.try_lock().ok().and_then(|mut finisher| finisher.take()) else {
        return;
    };
    if let Ok(Finisher { jobs, .. }) = finisher.get() {
        let _ = jobs.send(None);
    }
    if let Some(Finisher { thread, .. }) = finisher.into_mine() {
        let _ = thread.join();
    }
}
