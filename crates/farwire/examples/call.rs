//! Rank 0 hands out work by name: any rank calls it and gets an answer.
//!
//! Run it as four processes: `farwire launch -n 4 -- cargo run -p farwire --example call`

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use farwire::Communicator;

fn main() -> Result<(), farwire::Error> {
    let comm = Communicator::from_env()?;
    if comm.rank() == 0 {
        let next = AtomicU64::new(0);
        comm.register("next batch", move |caller, _request| {
            let batch = next.fetch_add(1, Ordering::Relaxed);
            println!("batch {batch} goes to rank {caller}");
            Ok(batch.to_le_bytes().to_vec())
        })?;
    }
    for _ in 0..2 {
        let answer = comm.call(0, "next batch", Vec::new(), Duration::from_secs(10)).wait()?;
        let batch = u64::from_le_bytes(answer.try_into().expect("rank 0 answers with 8 bytes"));
        println!("rank {} works on batch {batch}", comm.rank());
    }
    comm.shutdown()
}
