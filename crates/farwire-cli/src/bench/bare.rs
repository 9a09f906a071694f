//! The cost of only moving bytes, with which the CPU time of an operation is compared.

use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::time::Duration;

use farwire::{Communicator, Error, thread_cpu_time};

/// How many bytes are moved to measure that, and in what pieces.
const BYTES: usize = 64 << 20;
const PIECE: usize = 256 << 10;

/// CPU seconds per byte, at both ends together.
#[derive(Clone, Copy, Debug)]
pub(super) struct Bare {
    /// Copied into memory that both share, and out of it.
    copied: f64,
    /// Through a TCP connection on loopback, without encryption; NaN if that is impossible.
    over_tcp: f64,
}

impl Bare {
    /// Measures on rank 0, for all ranks.
    pub(super) fn measure(comm: &Communicator) -> Result<Self, Error> {
        let costs = (comm.rank() == 0).then(|| vec![copy(), pump().unwrap_or(f64::NAN)]);
        let costs = comm.broadcast(costs, 2, 0).wait()?;
        Ok(Self { copied: costs[0], over_tcp: costs[1] })
    }

    /// CPU seconds, at both ends, of only moving what this rank has sent so far.
    pub(super) fn cost(&self, comm: &Communicator) -> f64 {
        let cost = |rank| {
            let each = if comm.path(rank).is_some() { self.over_tcp } else { self.copied };
            comm.traffic_to(rank).map(|sent| each * sent.bytes as f64)
        };
        (0..comm.size()).filter(|rank| *rank != comm.rank()).filter_map(cost).sum()
    }
}

fn each(used: Duration) -> f64 {
    used.as_secs_f64() / BYTES as f64
}

/// One copy into memory that is in no cache, as most of a ring is not, and one copy out of it.
fn copy() -> f64 {
    let (from, mut to) = (vec![1u8; PIECE], vec![1u8; PIECE]);
    let mut between = vec![1u8; BYTES];
    let before = thread_cpu_time();
    between.chunks_exact_mut(PIECE).for_each(|piece| piece.copy_from_slice(&from));
    for piece in std::hint::black_box(&between).chunks_exact(PIECE) {
        to.copy_from_slice(piece);
        std::hint::black_box(&to);
    }
    each(thread_cpu_time() - before)
}

fn pump() -> io::Result<f64> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
    let mut sender = TcpStream::connect(listener.local_addr()?)?;
    let mut receiver = listener.accept()?.0;
    std::thread::scope(|scope| {
        let receiver = scope.spawn(move || -> io::Result<Duration> {
            let (mut piece, mut received) = (vec![0u8; PIECE], 0);
            let before = thread_cpu_time();
            while received < BYTES {
                match receiver.read(&mut piece)? {
                    0 => return Err(io::ErrorKind::UnexpectedEof.into()),
                    read => received += read,
                }
            }
            Ok(thread_cpu_time() - before)
        });
        let piece = vec![1u8; PIECE];
        let before = thread_cpu_time();
        let sent = (0..BYTES / PIECE).try_for_each(|_| sender.write_all(&piece));
        let used = thread_cpu_time() - before;
        drop(sender); // the reader must not wait for what could not be sent
        let received = receiver.join().expect("who reads does not panic");
        Ok(each(sent.and(received)? + used))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn to_move_bytes_costs_something_and_not_the_world() {
        for cost in [copy(), pump().unwrap()] {
            assert!((1e-13..1e-5).contains(&cost), "{cost} s for a byte");
        }
    }
}
