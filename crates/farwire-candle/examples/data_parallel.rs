//! A plain candle model, made data-parallel: each rank learns from its own points, and all have the
//! same model.
//!
//! `farwire launch -n 4 -- cargo run -p farwire-candle --example data_parallel`

use candle_core::{DType, Device, Tensor};
use candle_nn::{AdamW, Linear, Module, Optimizer, VarBuilder, VarMap, linear};
use farwire::Communicator;
use farwire_candle::DataParallel;

/// Two layers, to learn sin(x).
struct Model {
    up: Linear,
    down: Linear,
}

impl Model {
    fn new(vars: VarBuilder<'_>) -> candle_core::Result<Self> {
        Ok(Self { up: linear(1, 64, vars.pp("up"))?, down: linear(64, 1, vars.pp("down"))? })
    }

    fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        self.down.forward(&self.up.forward(x)?.tanh()?)
    }
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let comm = Communicator::from_env()?;
    let varmap = VarMap::new();
    let model = Model::new(VarBuilder::from_varmap(&varmap, DType::F32, &Device::Cpu))?;

    // All ranks start with rank 0's weights.
    let vars = varmap.data().lock().map_err(|error| error.to_string())?.clone();
    let mut replicas = DataParallel::new(&comm, vars, "int8".parse().expect("it is a codec"))?;
    let mut optimizer = AdamW::new_lr(varmap.all_vars(), 0.01)?;

    // This rank's share of the points: every size-th, from its rank on.
    let points = (comm.rank()..256).step_by(comm.size()).map(|i| i as f32 / 128.0 * 3.0 - 3.0);
    let points: Vec<f32> = points.collect();
    let x = Tensor::from_slice(&points, (points.len(), 1), &Device::Cpu)?;
    let y = x.sin()?;

    for step in 0..=600 {
        let loss = (model.forward(&x)? - &y)?.sqr()?.mean_all()?;
        let mut gradients = loss.backward()?;
        replicas.average(&mut gradients)?; // the only line that a model on one rank lacks
        optimizer.step(&gradients)?;
        if comm.rank() == 0 && step % 200 == 0 {
            println!("step {step}: loss {:.4}", loss.to_scalar::<f32>()?);
        }
    }

    let weight = model.up.weight().flatten_all()?.to_vec1::<f32>()?;
    println!("rank {}: replicas are the same: {}", comm.rank(), comm.is_in_sync(&weight)?);
    Ok(())
}
