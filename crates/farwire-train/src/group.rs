//! The ranks that share a layer or a pipeline.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use farwire::{Communicator, Error, Pending, ReduceOp};

/// The ranks that share a layer, or this one alone. Clones are one group: layers that hold one
/// notice when its communicator is [replaced](Self::replace).
#[derive(Clone, Debug)]
pub struct Group(Option<Arc<Shared>>);

#[derive(Debug)]
struct Shared {
    comm: Mutex<Communicator>,
    /// Nanoseconds that this rank has spent in the group's collectives.
    spent: AtomicU64,
    /// The last collective that failed. A tensor library passes errors on in its own words, which
    /// do not say whether a rank was lost.
    failed: Mutex<Option<Error>>,
}

impl Group {
    /// This rank alone: layers are whole, and nothing is sent.
    pub fn alone() -> Self {
        Self(None)
    }

    /// The ranks of a communicator.
    pub fn of(comm: &Communicator) -> Self {
        let shared = || Shared {
            comm: Mutex::new(comm.clone()),
            spent: AtomicU64::new(0),
            failed: Mutex::new(None),
        };
        Self((comm.size() > 1).then(|| Arc::new(shared())))
    }

    /// This rank's place in the group.
    pub fn rank(&self) -> usize {
        self.communicator().map_or(0, |comm| comm.rank())
    }

    /// How many ranks share the layer.
    pub fn size(&self) -> usize {
        self.communicator().map_or(1, |comm| comm.size())
    }

    /// The communicator, unless this rank is alone.
    pub fn communicator(&self) -> Option<Communicator> {
        self.0.as_ref().map(|shared| lock(&shared.comm).clone())
    }

    /// Uses another communicator from now on, since ranks of an elastic job have come or gone. It
    /// must have as many ranks, and this rank in the same place. Does nothing if this rank is
    /// alone.
    pub fn replace(&self, comm: &Communicator) {
        if let Some(shared) = &self.0 {
            debug_assert_eq!((comm.rank(), comm.size()), (self.rank(), self.size()));
            *lock(&shared.comm) = comm.clone();
            *lock(&shared.failed) = None;
        }
    }

    /// Why a collective of this group has failed, if one has since the last call, through a fault
    /// of the group.
    pub(crate) fn take_failure(&self) -> Option<Error> {
        lock(&self.0.as_ref()?.failed).take()
    }

    /// The sum of all ranks' `data`, in rank order.
    pub fn sum(&self, data: Vec<f32>) -> Result<Vec<f32>, Error> {
        self.timed(data, |comm, data| comm.all_reduce(data, ReduceOp::Sum))
    }

    /// All ranks' `data`, one after the other.
    pub fn gather(&self, data: Vec<f32>) -> Result<Vec<f32>, Error> {
        self.timed(data, |comm, data| comm.all_gather(data))
    }

    /// Total time that this rank has spent in [`sum`](Self::sum) and [`gather`](Self::gather).
    pub fn spent(&self) -> Duration {
        Duration::from_nanos(
            self.0.as_ref().map_or(0, |shared| shared.spent.load(Ordering::Relaxed)),
        )
    }

    fn timed(
        &self,
        data: Vec<f32>,
        start: impl FnOnce(&Communicator, Vec<f32>) -> Pending<Vec<f32>>,
    ) -> Result<Vec<f32>, Error> {
        let Some(shared) = &self.0 else { return Ok(data) };
        let comm = lock(&shared.comm).clone();
        let begun = Instant::now();
        let result = start(&comm, data).wait();
        shared.spent.fetch_add(begun.elapsed().as_nanos() as u64, Ordering::Relaxed);
        if let Err(Error::Failed { error, members, .. }) = &result {
            let (error, members) = (error.clone(), members.clone());
            *lock(&shared.failed) = Some(Error::Failed { error, members, input: None });
        }
        result
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
