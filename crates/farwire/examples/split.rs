//! Even and odd ranks form groups of their own.
//!
//! Run it as four processes: `farwire launch -n 4 -- cargo run -p farwire --example split`

use farwire::{Communicator, ReduceOp};

fn main() -> Result<(), farwire::Error> {
    let world = Communicator::from_env()?;
    let color = world.rank() as u32 % 2;
    let group = world.split(color, world.rank() as u32)?;

    let sum = group.all_reduce(vec![world.rank() as u32], ReduceOp::Sum).wait()?;
    println!(
        "world rank {} is rank {} of {} in its group; sum {}",
        world.rank(),
        group.rank(),
        group.size(),
        sum[0]
    );
    world.shutdown()
}
