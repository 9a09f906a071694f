//! Linear layers and embeddings that several ranks share.
//!
//! The pair of [`ColumnParallelLinear`] and [`RowParallelLinear`] needs one sum forward and one
//! backward, however many operations lie between:
//!
//! ```text
//!   x ──▶ column parallel ──▶ any function of single columns ──▶ row parallel ──▶ y
//!         Y_r = x·W_rᵀ + b_r                                     y = Σ_r X_r·W_rᵀ + b
//!         forward:  nothing                                      forward:  sum over ranks
//!         backward: sum of ∂x over ranks                         backward: nothing
//! ```
//!
//! W is `[out, in]` and W_r this rank's rows of it (column parallel) or columns (row parallel).
//! Every rank has all of x, y and the row-parallel bias.

use candle_core::{DType, Result, Tensor};

use farwire_train::{Cut, Group, Init};

use crate::collective::{gather_forward, sum_backward, sum_forward};
use crate::params::Params;

/// `y = x·Wᵀ + b` with the outputs cut: each rank computes its columns of y.
///
/// x is `[…, in]` and the same on all ranks, y is `[…, out / ranks]`, or `[…, out]` after
/// [`gathered`](Self::gathered).
///
/// ```
/// use candle_core::{Device, Tensor};
/// use farwire_candle::{ColumnParallelLinear, Params, RowParallelLinear};
/// use farwire_train::Group;
///
/// std::thread::scope(|scope| {
///     for comm in farwire::local(2).expect("shared memory") {
///         scope.spawn(move || -> candle_core::Result<()> {
///             let mut params = Params::from_seed(1, &Group::of(&comm));
///             let up = ColumnParallelLinear::new(&mut params, "up", 8, 32)?;
///             let down = RowParallelLinear::new(&mut params, "down", 32, 8)?;
///             let x = Tensor::ones((3, 8), candle_core::DType::F32, &Device::Cpu)?;
///             let y = down.forward(&up.forward(&x)?.relu()?)?;
///             assert_eq!(y.dims(), [3, 8]);
///             Ok(())
///         });
///     }
/// });
/// ```
#[derive(Clone, Debug)]
pub struct ColumnParallelLinear {
    weight: Tensor,
    bias: Tensor,
    group: Group,
    gather: bool,
}

impl ColumnParallelLinear {
    /// A layer with parameters `name.weight` `[output, input]` and `name.bias` `[output]`.
    pub fn new(params: &mut Params, name: &str, input: usize, output: usize) -> Result<Self> {
        Self::with_blocks(params, name, input, output, 1)
    }

    /// The same, with outputs that are several fused blocks: each rank gets its share of each
    /// block.
    pub fn with_blocks(
        params: &mut Params,
        name: &str,
        input: usize,
        output: usize,
        blocks: usize,
    ) -> Result<Self> {
        let cut = Some(Cut { dim: 0, blocks });
        let weight =
            params.get(&format!("{name}.weight"), &[output, input], Init::Normal(0.02), cut)?;
        let bias = params.get(&format!("{name}.bias"), &[output], Init::Zeros, cut)?;
        Ok(Self { weight, bias, group: params.group().clone(), gather: false })
    }

    /// The same, but every rank gets all columns of y.
    pub fn gathered(self) -> Self {
        Self { gather: true, ..self }
    }

    /// Computes y.
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let x = sum_backward(x, &self.group)?;
        let y = times(&x, &self.weight)?.broadcast_add(&self.bias)?;
        if self.gather { gather_forward(&y, &self.group) } else { Ok(y) }
    }
}

/// `y = x·Wᵀ + b` with the inputs cut: each rank has its columns of x, and all get all of y.
///
/// x is `[…, in / ranks]`, as a [`ColumnParallelLinear`] returns it; y is `[…, out]`.
#[derive(Clone, Debug)]
pub struct RowParallelLinear {
    weight: Tensor,
    bias: Tensor,
    group: Group,
}

impl RowParallelLinear {
    /// A layer with parameters `name.weight` `[output, input]` and `name.bias` `[output]`.
    pub fn new(params: &mut Params, name: &str, input: usize, output: usize) -> Result<Self> {
        Self::with_deviation(params, name, input, output, 0.02)
    }

    /// The same, with weights that start with another standard deviation.
    pub fn with_deviation(
        params: &mut Params,
        name: &str,
        input: usize,
        output: usize,
        deviation: f64,
    ) -> Result<Self> {
        let cut = Some(Cut { dim: 1, blocks: 1 });
        let weight = params.get(
            &format!("{name}.weight"),
            &[output, input],
            Init::Normal(deviation),
            cut,
        )?;
        // Every rank adds it after the sum, so all need the whole bias, and get the same gradient.
        let bias = params.get(&format!("{name}.bias"), &[output], Init::Zeros, None)?;
        Ok(Self { weight, bias, group: params.group().clone() })
    }

    /// Computes y.
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        sum_forward(&times(x, &self.weight)?, &self.group)?.broadcast_add(&self.bias)
    }
}

/// Rows of a table by index, with the table's rows cut: each rank looks up the indices it has, and
/// the sum over ranks has all.
#[derive(Clone, Debug)]
pub struct ParallelEmbedding {
    weight: Tensor,
    group: Group,
}

impl ParallelEmbedding {
    /// A layer with the parameter `name.weight` `[rows, width]`.
    pub fn new(params: &mut Params, name: &str, rows: usize, width: usize) -> Result<Self> {
        let cut = Some(Cut { dim: 0, blocks: 1 });
        let weight =
            params.get(&format!("{name}.weight"), &[rows, width], Init::Normal(0.02), cut)?;
        Ok(Self { weight, group: params.group().clone() })
    }

    /// The rows for `ids` (u32, of any shape), with one more dimension: the width.
    pub fn forward(&self, ids: &Tensor) -> Result<Tensor> {
        let mut dims = ids.dims().to_vec();
        let (rows, width) = self.weight.dims2()?;
        dims.push(width);
        let ids = ids.flatten_all()?;
        let rows = if self.group.size() == 1 {
            self.weight.index_select(&ids, 0)?
        } else {
            // Indices of other ranks look up row 0 here, multiplied by 0.
            let first = (self.group.rank() * rows) as u32;
            let local: Vec<Option<u32>> = ids
                .to_vec1::<u32>()?
                .into_iter()
                .map(|id| id.checked_sub(first).filter(|id| (*id as usize) < rows))
                .collect();
            let mine: Vec<f32> =
                local.iter().map(|id| if id.is_some() { 1.0 } else { 0.0 }).collect();
            let local: Vec<u32> = local.into_iter().map(|id| id.unwrap_or(0)).collect();
            let count = local.len();
            let device = self.weight.device();
            let found = self.weight.index_select(&Tensor::from_vec(local, count, device)?, 0)?;
            let mine = Tensor::from_vec(mine, (count, 1), device)?.to_dtype(DType::F32)?;
            sum_forward(&found.broadcast_mul(&mine)?, &self.group)?
        };
        rows.reshape(dims)
    }
}

/// `x·Wᵀ` for x of any number of dimensions, as one product of matrices.
fn times(x: &Tensor, weight: &Tensor) -> Result<Tensor> {
    let mut dims = x.dims().to_vec();
    let (output, input) = weight.dims2()?;
    let y = x.contiguous()?.reshape(((), input))?.matmul(&weight.t()?)?;
    if let Some(last) = dims.last_mut() {
        *last = output;
    }
    y.reshape(dims)
}
