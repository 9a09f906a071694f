//! A message goes around the ring of ranks, and each adds its number.
//!
//! Run it as four processes: `farwire launch -n 4 -- cargo run -p farwire --example send_recv`

use farwire::Communicator;

fn main() -> Result<(), farwire::Error> {
    let comm = Communicator::from_env()?;
    let (me, ranks) = (comm.rank(), comm.size());
    let (left, right) = ((me + ranks - 1) % ranks, (me + 1) % ranks);
    let tag = 7;
    if ranks > 1 && me == 0 {
        comm.send(vec![0u64], right, tag).wait()?;
        let message = comm.recv::<u64>(1, left, tag).wait()?;
        println!("rank 0: the others add up to {}", message[0]);
    } else if ranks > 1 {
        let mut message = comm.recv::<u64>(1, left, tag).wait()?;
        message[0] += me as u64;
        comm.send(message, right, tag).wait()?;
    }
    comm.shutdown()
}
