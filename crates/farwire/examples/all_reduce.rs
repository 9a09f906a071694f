//! Every rank contributes a vector, every rank gets the sum.
//!
//! Run it as four processes: `farwire launch -n 4 -- cargo run -p farwire --example all_reduce`

use farwire::{Communicator, ReduceOp};

fn main() -> Result<(), farwire::Error> {
    let comm = Communicator::from_env()?;
    let mine = vec![comm.rank() as f32; 1_000_000];

    // In flight while this rank does something else.
    let pending = comm.all_reduce(mine, ReduceOp::Sum);
    let other_work: u64 = (0..1000).sum();

    let sum = pending.wait()?;
    println!("rank {} of {}: sum {}, other work {other_work}", comm.rank(), comm.size(), sum[0]);
    comm.shutdown()
}
