//! The ranks that share a layer or a pipeline.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use farwire::{Communicator, Error, Pending, ReduceOp};

/// The ranks that share a layer, or this one alone.
#[derive(Clone, Debug)]
pub struct Group(Option<Shared>);

#[derive(Clone, Debug)]
struct Shared {
    comm: Communicator,
    /// Nanoseconds that this rank has spent in the group's collectives.
    spent: Arc<AtomicU64>,
}

impl Group {
    /// This rank alone: layers are whole, and nothing is sent.
    pub fn alone() -> Self {
        Self(None)
    }

    /// The ranks of a communicator.
    pub fn of(comm: &Communicator) -> Self {
        Self((comm.size() > 1).then(|| Shared { comm: comm.clone(), spent: Arc::default() }))
    }

    /// This rank's place in the group.
    pub fn rank(&self) -> usize {
        self.communicator().map_or(0, Communicator::rank)
    }

    /// How many ranks share the layer.
    pub fn size(&self) -> usize {
        self.communicator().map_or(1, Communicator::size)
    }

    /// The communicator, unless this rank is alone.
    pub fn communicator(&self) -> Option<&Communicator> {
        self.0.as_ref().map(|shared| &shared.comm)
    }

    /// The sum of everyone's `data`, in rank order.
    pub fn sum(&self, data: Vec<f32>) -> Result<Vec<f32>, Error> {
        self.timed(data, |comm, data| comm.all_reduce(data, ReduceOp::Sum))
    }

    /// Everyone's `data`, one after the other.
    pub fn gather(&self, data: Vec<f32>) -> Result<Vec<f32>, Error> {
        self.timed(data, |comm, data| comm.all_gather(data))
    }

    /// How long this rank has spent in those two, all in all.
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
        let Some(Shared { comm, spent }) = &self.0 else { return Ok(data) };
        let begun = Instant::now();
        let result = start(comm, data).wait();
        spent.fetch_add(begun.elapsed().as_nanos() as u64, Ordering::Relaxed);
        result
    }
}
