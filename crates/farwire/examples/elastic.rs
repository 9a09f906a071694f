//! Steps on a group whose ranks come and go.
//!
//! ```sh
//! farwire launch --elastic -n 4 -- cargo run -p farwire --example elastic
//! kill -9 one of the processes; another is started, and joins
//! ```

use farwire::{Communicator, Elastic, ElasticState, Error, ReduceOp};

struct Model {
    weights: Vec<f32>,
    steps: u64,
}

impl ElasticState for Model {
    type Error = Error;

    fn revision(&self) -> u64 {
        self.steps
    }

    fn save(&self) -> Vec<(String, Vec<u8>)> {
        let bytes = self.weights.iter().flat_map(|weight| weight.to_le_bytes()).collect();
        vec![("weights".to_owned(), bytes)]
    }

    fn load(&mut self, revision: u64, buffers: Vec<(String, Vec<u8>)>) -> Result<(), Error> {
        let weights = buffers[0].1.as_chunks().0.iter();
        self.weights = weights.map(|bytes| f32::from_le_bytes(*bytes)).collect();
        self.steps = revision;
        Ok(())
    }
}

fn main() -> Result<(), Error> {
    let comm = match std::env::var("FARWIRE_JOIN") {
        Ok(address) => Communicator::builder().join_running(&address)?,
        Err(_) => Communicator::builder().elastic(true).join()?,
    };
    let mut model = Model { weights: vec![1.0; 1 << 20], steps: 0 };
    let mut elastic = Elastic::new(comm);
    while model.steps < 1000 {
        elastic.step(&mut model, |comm, model| {
            // In real life, the gradient of this rank's share of a batch.
            let gradient = model.weights.iter().map(|weight| 0.01 * weight).collect();
            let mean = comm.all_reduce(gradient, ReduceOp::Mean).wait()?;
            // Nothing changes before the last call: see `Elastic`.
            model.weights.iter_mut().zip(mean).for_each(|(weight, mean)| *weight -= mean);
            model.steps += 1;
            Ok(())
        })?;
        for change in elastic.take_changes() {
            let (before, now) = change.ranks;
            println!("after step {}: {before} → {now} ranks", change.revision);
        }
    }
    println!("rank {} ends with {}", elastic.comm().rank(), model.weights[0]);
    elastic.comm().barrier().wait()
}
