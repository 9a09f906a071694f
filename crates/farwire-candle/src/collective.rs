//! Collectives inside autograd.
//!
//! Each is a function of a tensor with its own backward, so a layer that uses one has the right gradients without a further call:
//!
//! | function | forward | backward |
//! |---|---|---|
//! | [`sum_backward`] | identity | sum over the group |
//! | [`sum_forward`] | sum over the group | identity |
//! | [`gather_forward`] | everyone's columns, side by side | one's own columns |
//!
//! Sums are taken in rank order, so all ranks get the same bits.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, CustomOp1, DType, Error, Layout, Result, Shape, Tensor};
use farwire::{Communicator, Pending, ReduceOp};

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

    /// How long this rank has spent in the collectives of layers, all in all.
    pub fn spent(&self) -> Duration {
        Duration::from_nanos(self.0.as_ref().map_or(0, |shared| shared.spent.load(Ordering::Relaxed)))
    }
}

impl Shared {
    fn sum(&self, data: Vec<f32>) -> Result<Vec<f32>> {
        self.timed(|comm| comm.all_reduce(data, ReduceOp::Sum))
    }

    fn timed(&self, start: impl FnOnce(&Communicator) -> Pending<Vec<f32>>) -> Result<Vec<f32>> {
        let begun = Instant::now();
        let result = start(&self.comm).wait().map_err(Error::wrap);
        self.spent.fetch_add(begun.elapsed().as_nanos() as u64, Ordering::Relaxed);
        result
    }
}

/// Passes `x` on; the gradient that comes back is summed over the group.
pub(crate) fn sum_backward(x: &Tensor, group: &Group) -> Result<Tensor> {
    apply(x, group, SumBackward)
}

/// The sum of everyone's `x`; the gradient, which is the same on all ranks, passes as it is.
pub(crate) fn sum_forward(x: &Tensor, group: &Group) -> Result<Tensor> {
    apply(x, group, SumForward)
}

/// Everyone's `x`, side by side along the last dimension; each takes its own columns of the gradient, which is the same on all ranks.
pub(crate) fn gather_forward(x: &Tensor, group: &Group) -> Result<Tensor> {
    apply(x, group, GatherForward)
}

fn apply<Op>(x: &Tensor, group: &Group, op: fn(Shared) -> Op) -> Result<Tensor>
where
    Op: CustomOp1 + Send + Sync + 'static,
{
    match &group.0 {
        Some(shared) => x.contiguous()?.apply_op1(op(shared.clone())),
        None => Ok(x.clone()),
    }
}

struct SumBackward(Shared);
struct SumForward(Shared);
struct GatherForward(Shared);

impl CustomOp1 for SumBackward {
    fn name(&self) -> &'static str {
        "sum-backward"
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let data = elements(self.name(), storage, layout)?.to_vec();
        Ok((CpuStorage::F32(data), layout.shape().clone()))
    }

    fn bwd(&self, _: &Tensor, _: &Tensor, gradient: &Tensor) -> Result<Option<Tensor>> {
        let data = gradient.flatten_all()?.to_vec1()?;
        let sum = self.0.sum(data)?;
        Tensor::from_vec(sum, gradient.shape(), gradient.device()).map(Some)
    }
}

impl CustomOp1 for SumForward {
    fn name(&self) -> &'static str {
        "sum-forward"
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let data = elements(self.name(), storage, layout)?.to_vec();
        let sum = self.0.sum(data)?;
        Ok((CpuStorage::F32(sum), layout.shape().clone()))
    }

    fn bwd(&self, _: &Tensor, _: &Tensor, gradient: &Tensor) -> Result<Option<Tensor>> {
        Ok(Some(gradient.clone()))
    }
}

impl CustomOp1 for GatherForward {
    fn name(&self) -> &'static str {
        "gather-forward"
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let data = elements(self.name(), storage, layout)?.to_vec();
        let ranks = self.0.comm.size();
        let mut dims = layout.dims().to_vec();
        let Some(width) = dims.last_mut() else {
            return Err(Error::msg("a scalar has no columns to gather"));
        };
        let (mine, rows) = (*width, data.len().checked_div(*width).unwrap_or(0));
        *width *= ranks;
        let all = self.0.timed(|comm| comm.all_gather(data))?;
        let place = |row: usize, rank: usize| (rank * rows + row) * mine;
        let columns = (0..rows)
            .flat_map(|row| (0..ranks).map(move |rank| place(row, rank)))
            .flat_map(|start| &all[start..start + mine]);
        Ok((CpuStorage::F32(columns.copied().collect()), Shape::from(dims)))
    }

    fn bwd(&self, x: &Tensor, _: &Tensor, gradient: &Tensor) -> Result<Option<Tensor>> {
        let last = x.rank() - 1;
        let width = x.dim(last)?;
        gradient.narrow(last, self.0.comm.rank() * width, width)?.contiguous().map(Some)
    }
}

fn elements<'a>(name: &str, storage: &'a CpuStorage, layout: &Layout) -> Result<&'a [f32]> {
    match (storage, layout.contiguous_offsets()) {
        (CpuStorage::F32(data), Some((start, end))) => Ok(&data[start..end]),
        (CpuStorage::F32(_), None) => Err(Error::msg(format!("{name} needs a contiguous tensor"))),
        _ => {
            let dtype: DType = storage.dtype();
            Err(Error::msg(format!("{name} works on f32, not {dtype:?}; convert with to_dtype")))
        }
    }
}
