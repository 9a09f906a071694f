//! Collectives inside autograd.
//!
//! Each is a function of a tensor with its own backward, so a layer that uses one has the right
//! gradients without a further call:
//!
//! | function | forward | backward |
//! |---|---|---|
//! | [`sum_backward`] | identity | sum over the group |
//! | [`sum_forward`] | sum over the group | identity |
//! | [`gather_forward`] | all ranks' columns, side by side | this rank's columns |
//!
//! Sums are taken in rank order, so all ranks get the same bits. Tensors on a card go through host
//! memory.

#[cfg(feature = "cuda")]
use candle_core::CudaStorage;
#[cfg(feature = "cuda")]
use candle_core::backend::BackendDevice;
use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, CustomOp1, DType, Error, Layout, Result, Shape, Tensor};
use farwire_train::Group;

/// Passes `x` on; the gradient that comes back is summed over the group.
pub(crate) fn sum_backward(x: &Tensor, group: &Group) -> Result<Tensor> {
    apply(x, group, SumBackward)
}

/// The sum of all ranks' `x`; the gradient, which is the same on all ranks, passes unchanged.
pub(crate) fn sum_forward(x: &Tensor, group: &Group) -> Result<Tensor> {
    apply(x, group, SumForward)
}

/// All ranks' `x`, side by side along the last dimension; each rank takes its own columns of the
/// gradient, which is the same on all ranks.
pub(crate) fn gather_forward(x: &Tensor, group: &Group) -> Result<Tensor> {
    apply(x, group, GatherForward)
}

fn apply<Op>(x: &Tensor, group: &Group, op: fn(Group) -> Op) -> Result<Tensor>
where
    Op: CustomOp1 + Send + Sync + 'static,
{
    if group.size() == 1 { Ok(x.clone()) } else { x.contiguous()?.apply_op1(op(group.clone())) }
}

struct SumBackward(Group);
struct SumForward(Group);
struct GatherForward(Group);

impl CustomOp1 for SumBackward {
    fn name(&self) -> &'static str {
        "sum-backward"
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let data = elements(self.name(), storage, layout)?.to_vec();
        Ok((CpuStorage::F32(data), layout.shape().clone()))
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(&self, storage: &CudaStorage, layout: &Layout) -> Result<(CudaStorage, Shape)> {
        Ok((storage.try_clone(layout)?, layout.shape().clone()))
    }

    fn bwd(&self, _: &Tensor, _: &Tensor, gradient: &Tensor) -> Result<Option<Tensor>> {
        let data = gradient.flatten_all()?.to_vec1()?;
        let sum = self.0.sum(data).map_err(Error::wrap)?;
        Tensor::from_vec(sum, gradient.shape(), gradient.device()).map(Some)
    }
}

impl CustomOp1 for SumForward {
    fn name(&self) -> &'static str {
        "sum-forward"
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let data = elements(self.name(), storage, layout)?.to_vec();
        let sum = self.0.sum(data).map_err(Error::wrap)?;
        Ok((CpuStorage::F32(sum), layout.shape().clone()))
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(&self, storage: &CudaStorage, layout: &Layout) -> Result<(CudaStorage, Shape)> {
        through_the_host(self, storage, layout)
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
        let ranks = self.0.size();
        let mut dims = layout.dims().to_vec();
        let Some(width) = dims.last_mut() else {
            return Err(Error::msg("a scalar has no columns to gather"));
        };
        let (mine, rows) = (*width, data.len().checked_div(*width).unwrap_or(0));
        *width *= ranks;
        let all = self.0.gather(data).map_err(Error::wrap)?;
        let place = |row: usize, rank: usize| (rank * rows + row) * mine;
        let columns = (0..rows)
            .flat_map(|row| (0..ranks).map(move |rank| place(row, rank)))
            .flat_map(|start| &all[start..start + mine]);
        Ok((CpuStorage::F32(columns.copied().collect()), Shape::from(dims)))
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(&self, storage: &CudaStorage, layout: &Layout) -> Result<(CudaStorage, Shape)> {
        through_the_host(self, storage, layout)
    }

    fn bwd(&self, x: &Tensor, _: &Tensor, gradient: &Tensor) -> Result<Option<Tensor>> {
        let last = x.rank() - 1;
        let width = x.dim(last)?;
        gradient.narrow(last, self.0.rank() * width, width)?.contiguous().map(Some)
    }
}

/// Applies an operation to a tensor on a card, in host memory.
#[cfg(feature = "cuda")]
fn through_the_host(
    op: &impl CustomOp1,
    storage: &CudaStorage,
    layout: &Layout,
) -> Result<(CudaStorage, Shape)> {
    let (data, shape) = op.cpu_fwd(&storage.to_cpu_storage()?, layout)?;
    Ok((storage.device().storage_from_cpu_storage(&data)?, shape))
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
