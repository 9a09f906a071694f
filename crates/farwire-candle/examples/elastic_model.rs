//! A plain candle model on ranks that come and go: a killed rank costs at most one step, and
//! another joins while the rest go on.
//!
//! ```sh
//! cargo build -p farwire-candle --example elastic_model
//! farwire launch --elastic -n 4 -- target/debug/examples/elastic_model
//! kill -9 one of the processes
//! ```

use candle_core::{DType, Device, Tensor};
use candle_nn::{Linear, Module, Optimizer, SGD, VarBuilder, VarMap, linear};
use farwire::{Communicator, Elastic, ElasticState};
use farwire_candle::DataParallel;
use farwire_train::TrainError;

/// Two layers, to learn sin(x), and everything that a joining rank must get.
struct Learner {
    up: Linear,
    down: Linear,
    vars: VarMap,
    replicas: Option<DataParallel>,
    steps: u64,
}

impl Learner {
    fn new() -> candle_core::Result<Self> {
        let vars = VarMap::new();
        let builder = VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu);
        let up = linear(1, 64, builder.pp("up"))?;
        let down = linear(64, 1, builder.pp("down"))?;
        Ok(Self { up, down, vars, replicas: None, steps: 0 })
    }

    /// The variables, in the same order everywhere.
    fn named(&self) -> Vec<(String, candle_core::Var)> {
        let vars = self.vars.data().lock().expect("nobody panics while it is locked");
        let mut named: Vec<_> =
            vars.iter().map(|(name, var)| (name.clone(), var.clone())).collect();
        named.sort_by(|(one, _), (other, _)| one.cmp(other));
        named
    }

    fn step(&mut self, comm: &Communicator) -> Result<f32, TrainError> {
        // This rank's share of the points: every size-th, from its rank on.
        let points = (comm.rank()..256).step_by(comm.size()).map(|i| i as f32 / 128.0 * 3.0 - 3.0);
        let loss = || -> candle_core::Result<Tensor> {
            let points: Vec<f32> = points.collect();
            let x = Tensor::from_slice(&points, (points.len(), 1), &Device::Cpu)?;
            let y = self.down.forward(&self.up.forward(&x)?.tanh()?)?;
            (y - x.sin()?)?.sqr()?.mean_all()
        };
        let loss = loss().map_err(library)?;
        let mut gradients = loss.backward().map_err(library)?;
        self.replicas.as_mut().expect("regroup comes first").average(&mut gradients)?;
        // Nothing changes before the last call on the communicator.
        let vars = self.named().into_iter().map(|(_, var)| var).collect();
        SGD::new(vars, 0.05).and_then(|mut sgd| sgd.step(&gradients)).map_err(library)?;
        self.steps += 1;
        loss.to_scalar().map_err(library)
    }
}

fn library(error: candle_core::Error) -> TrainError {
    TrainError::Library(error.into())
}

impl ElasticState for Learner {
    type Error = TrainError;

    fn revision(&self) -> u64 {
        self.steps
    }

    fn save(&self) -> Vec<(String, Vec<u8>)> {
        let bytes = |var: candle_core::Var| -> candle_core::Result<Vec<u8>> {
            let values = var.flatten_all()?.to_vec1::<f32>()?;
            Ok(values.iter().flat_map(|value| value.to_le_bytes()).collect())
        };
        let named = self.named().into_iter();
        named.map(|(name, var)| (name, bytes(var).expect("all are f32, on the CPU"))).collect()
    }

    fn load(&mut self, revision: u64, saved: Vec<(String, Vec<u8>)>) -> Result<(), TrainError> {
        for ((_, var), (_, bytes)) in self.named().into_iter().zip(saved) {
            let values = bytes.as_chunks().0.iter().map(|chunk| f32::from_le_bytes(*chunk));
            let values = Tensor::from_iter(values, &Device::Cpu);
            let values = values.and_then(|values| values.reshape(var.shape()));
            values.and_then(|values| var.set(&values)).map_err(library)?;
        }
        self.steps = revision;
        Ok(())
    }

    /// From now on, averages gradients over the ranks that are there.
    fn regroup(&mut self, comm: &Communicator) -> Result<(), TrainError> {
        let codec = "none".parse().expect("it is a codec");
        self.replicas = Some(DataParallel::new(comm, self.named(), codec)?);
        Ok(())
    }
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let comm = match std::env::var("FARWIRE_JOIN") {
        Ok(address) => Communicator::builder().join_running(&address)?,
        Err(_) => Communicator::builder().elastic(true).join()?,
    };
    let mut learner = Learner::new()?;
    let mut elastic = Elastic::new(comm);
    let steps = std::env::args().nth(1).map_or(Ok(600), |steps| steps.parse())?;
    while learner.steps < steps {
        let loss = elastic.step(&mut learner, |comm, learner| learner.step(comm))?;
        for change in elastic.take_changes() {
            let (before, now) = change.ranks;
            println!("after step {}: {before} → {now} ranks", change.revision);
        }
        if elastic.comm().rank() == 0 && learner.steps.is_multiple_of(200) {
            println!("step {}: loss {loss:.4}", learner.steps);
        }
    }
    let weights: Vec<u8> = learner.save().into_iter().flat_map(|(_, bytes)| bytes).collect();
    let same = elastic.comm().is_in_sync(&weights)?;
    println!("rank {}: replicas are the same: {same}", elastic.comm().rank());
    Ok(())
}
