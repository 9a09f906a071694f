//! A block whose layers are shared by all ranks, trained with the same calls as on a single rank.
//!
//! `farwire launch -n 4 -- cargo run -p farwire-candle --example tensor_parallel`

use candle_core::{DType, Device, Result, Tensor};
use candle_nn::{Optimizer, SGD};
use farwire::Communicator;
use farwire_candle::{ColumnParallelLinear, Params, RowParallelLinear};
use farwire_train::Group;

/// x + down(relu(up(x))): each rank has a share of the columns between `up` and `down`.
struct Block {
    up: ColumnParallelLinear,
    down: RowParallelLinear,
}

impl Block {
    fn new(params: &mut Params, width: usize) -> Result<Self> {
        let up = ColumnParallelLinear::new(params, "up", width, 4 * width)?;
        let down = RowParallelLinear::new(params, "down", 4 * width, width)?;
        Ok(Self { up, down })
    }

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        x + self.down.forward(&self.up.forward(x)?.relu()?)?
    }
}

fn main() -> std::result::Result<(), Box<dyn std::error::Error>> {
    let comm = Communicator::from_env()?;
    let mut params = Params::from_seed(1, &Group::of(&comm));
    let block = Block::new(&mut params, 16)?;
    let params = params.take();
    for param in &params {
        let shape = param.var.dims();
        println!(
            "rank {}: {} {shape:?}{}",
            comm.rank(),
            param.name,
            if param.cut.is_some() { ", a share" } else { "" }
        );
    }
    let mut optimizer = SGD::new(params.into_iter().map(|param| param.var).collect(), 0.3)?;

    // The same input on every rank. The block learns to reverse its columns.
    let x: Vec<f32> = (0..32 * 16).map(|i| (i as f32 * 0.37).sin()).collect();
    let x = Tensor::from_vec(x, (32, 16), &Device::Cpu)?;
    let order = Tensor::from_vec((0..16u32).rev().collect(), 16, &Device::Cpu)?;
    let y = x.index_select(&order, 1)?;
    for step in 0..=400 {
        let loss = (block.forward(&x)? - &y)?.sqr()?.mean_all()?.to_dtype(DType::F32)?;
        optimizer.backward_step(&loss)?;
        if comm.rank() == 0 && step % 200 == 0 {
            println!("step {step}: loss {:.4}", loss.to_scalar::<f32>()?);
        }
    }
    Ok(())
}
