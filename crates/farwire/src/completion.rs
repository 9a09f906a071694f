//! Where an operation's result is left, and the debt that it pays for earlier operations.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::task::Waker;

use farwire_codec::Transaction;
use farwire_proto::{Element, with_type};

use crate::error::Error;
use crate::memory::Buffer;

/// Where a driver leaves the result for whichever thread waits.
#[derive(Debug, Default)]
pub(crate) struct Completion {
    done: AtomicBool,
    shared: Mutex<Shared>,
}

#[derive(Debug, Default)]
struct Shared {
    result: Option<Result<Buffer, Error>>,
    waker: Option<Waker>,
    /// The debt that the operation pays for earlier ones, until it has ended.
    debt: Option<Debt>,
}

impl Completion {
    /// The completion of an operation that pays a debt, if it does.
    pub(crate) fn paying(debt: Option<Debt>) -> Self {
        Self { shared: Mutex::new(Shared { debt, ..Shared::default() }), ..Self::default() }
    }

    pub(crate) fn is_done(&self) -> bool {
        self.done.load(Ordering::Acquire)
    }

    /// Leaves the result. The waker that this returns must be woken while no lock is held: it may do
    /// anything.
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

    /// Has `waker` woken once the result is there; at once if it already is.
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

    /// The result, if it is there; else has `waker` woken once it is.
    pub(crate) fn take_or_wake(&self, waker: &Waker) -> Option<Result<Buffer, Error>> {
        let mut shared = self.shared.lock().unwrap_or_else(PoisonError::into_inner);
        let result = shared.result.take();
        if result.is_none() {
            shared.waker = Some(waker.clone());
        }
        result
    }
}

/// What calls through a codec have left out so far, and a call without one takes along.
#[derive(Debug)]
pub(crate) struct Debt {
    /// Once this is committed, nothing is owed any more.
    pub(crate) paid: Transaction,
    /// What the caller gave, without the debt.
    pub(crate) input: Buffer,
}

impl Debt {
    /// Ends the call. A result that is not finite will not be used, so the debt then stays. All
    /// ranks have the same result and decide alike; but after a reduce-scatter each rank knows only
    /// its own block, and a rank that sees nothing wrong there has paid.
    pub(crate) fn settle(self, result: Result<Buffer, Error>) -> Result<Buffer, Error> {
        match result {
            Ok(result) => {
                if is_finite(&result) {
                    self.paid.commit();
                }
                Ok(result)
            }
            Err(mut error) => {
                error.put_input(self.input);
                Err(error)
            }
        }
    }
}

fn is_finite(buffer: &Buffer) -> bool {
    fn all<T: Element>(buffer: &Buffer) -> bool {
        bytemuck::cast_slice::<u8, T>(buffer.bytes()).iter().all(|x| T::is_finite(*x))
    }
    !buffer.dtype().is_float() || with_type!(buffer.dtype(), T => all::<T>(buffer))
}
