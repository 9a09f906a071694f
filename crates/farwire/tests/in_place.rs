//! Collectives in place, in vectors and in memory that others own.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on should say where")]

mod common;

use std::num::NonZeroUsize;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Barrier};

use common::{on_processes, on_threads, samples};
use farwire::{Algorithm, Communicator, Element, Error, Fault, Memory, Options, Peer, ReduceOp};
use half::{bf16, f16};

fn bytes<T: Element>(elements: &[T]) -> &[u8] {
    bytemuck::cast_slice(elements)
}

/// Compares everything that works in place with the call that keeps its input, bit for bit.
fn compare<T: Element>(comm: &Communicator, len: usize, op: ReduceOp) {
    let (me, n) = (comm.rank(), comm.size());
    let what = format!("{len} {} on rank {me} of {n}", T::DTYPE);
    let mine = || samples::<T>(7, me, len);
    let in_place = comm.in_place();

    let kept = comm.all_reduce(mine(), op).wait().unwrap();
    let done = in_place.all_reduce(mine(), op).wait().unwrap();
    assert_eq!(bytes(&kept), bytes(&done), "all_reduce of {what}");
    let mut borrowed = mine();
    comm.all_reduce_in_place(&mut borrowed, op).unwrap();
    assert_eq!(bytes(&kept), bytes(&borrowed), "all_reduce_in_place of {what}");

    let root = len % n;
    let done = in_place.reduce(mine(), op, root).wait().unwrap();
    assert!(me != root || bytes(&kept) == bytes(&done), "reduce of {what}");

    let shard = comm.reduce_scatter(mine(), op).wait().unwrap();
    let done = in_place.reduce_scatter(mine(), op).wait().unwrap();
    let start: usize = (0..me).map(|rank| (len + n - 1 - rank) / n).sum();
    assert_eq!(bytes(&shard), bytes(&done[start..start + shard.len()]), "reduce_scatter of {what}");

    let kept = comm.all_gather(mine()).wait().unwrap();
    let mut whole = vec![T::default(); len * n];
    whole[me * len..(me + 1) * len].copy_from_slice(&mine());
    let done = in_place.all_gather(whole).wait().unwrap();
    assert_eq!(bytes(&kept), bytes(&done), "all_gather of {what}");

    let done = in_place.broadcast(mine(), root).wait().unwrap();
    assert_eq!(bytes(&done), bytes(&samples::<T>(7, root, len)), "broadcast of {what}");
    let mut borrowed = mine();
    comm.broadcast_in_place(&mut borrowed, root).unwrap();
    assert_eq!(bytes(&done), bytes(&borrowed), "broadcast_in_place of {what}");

    if n > 1 {
        let (right, left) = ((me + 1) % n, (me + n - 1) % n);
        let sent = in_place.send(mine(), right, 3);
        let received = in_place.recv(vec![T::default(); len], left, 3).wait().unwrap();
        assert_eq!(bytes(&sent.wait().unwrap()), bytes(&mine()), "send of {what}");
        assert_eq!(bytes(&received), bytes(&samples::<T>(7, left, len)), "recv of {what}");
    }
}

fn compare_all(comm: &Communicator, len: usize) {
    compare::<f32>(comm, len, ReduceOp::Sum);
    compare::<f64>(comm, len, ReduceOp::Mean);
    compare::<f16>(comm, len, ReduceOp::Mean);
    compare::<bf16>(comm, len, ReduceOp::Sum);
    compare::<i8>(comm, len, ReduceOp::Min);
    compare::<i32>(comm, len, ReduceOp::Sum);
    compare::<i64>(comm, len, ReduceOp::Prod);
    compare::<u8>(comm, len, ReduceOp::Sum);
    compare::<u32>(comm, len, ReduceOp::Max);
    compare::<u64>(comm, len, ReduceOp::Prod);
}

#[test]
fn in_place_gives_the_bits_of_the_call_that_keeps_its_input() {
    for n in 1..=7 {
        on_threads(n, |comm| {
            for segment in [None, NonZeroUsize::new(1), NonZeroUsize::new(3)] {
                let comm = comm.with_options(Options { segment, ..Options::default() });
                for len in [0, 1, n - 1, n, n + 1, 97] {
                    compare_all(&comm, len);
                }
            }
            compare::<f32>(&comm, 100_003, ReduceOp::Sum);
            compare::<bf16>(&comm, 100_003, ReduceOp::Sum);
        });
    }
}

#[test]
fn in_place_works_between_processes_over_every_link() {
    for link in common::links() {
        on_processes("in_place_works_between_processes_over_every_link", 3, link, |comm| {
            for len in [0, 1, 4, 1009] {
                compare_all(&comm, len);
            }
            compare::<f32>(&comm, 1_000_003, ReduceOp::Sum);
            compare::<f16>(&comm, 1_000_003, ReduceOp::Mean);
            comm.shutdown().unwrap();
        });
    }
}

#[test]
fn every_algorithm_of_an_all_reduce_works_in_place() {
    on_threads(3, |comm| {
        let by = |algorithm| {
            comm.with_options(Options { algorithm: Some(algorithm), ..Options::default() })
        };
        let mine = || samples::<bf16>(1, comm.rank(), 1000);
        for algorithm in [Algorithm::Ring, Algorithm::GatherReduce, Algorithm::TwoPhase] {
            let kept = by(algorithm).all_reduce(mine(), ReduceOp::Sum).wait().unwrap();
            let done = by(algorithm).in_place().all_reduce(mine(), ReduceOp::Sum).wait().unwrap();
            assert_eq!(bytes(&kept), bytes(&done));
        }
    });
}

#[test]
fn a_refused_call_leaves_the_memory_as_it_was() {
    on_threads(2, |comm| {
        let mut data = [1i32, 2, 3];
        assert!(comm.all_reduce_in_place(&mut data, ReduceOp::Mean).is_err());
        assert!(comm.broadcast_in_place(&mut data, 2).is_err());
        assert_eq!(data, [1, 2, 3]);
        // Three elements are not two equal blocks.
        let mut error = comm.in_place().all_gather(vec![1i32, 2, 3]).wait().unwrap_err();
        assert!(error.to_string().contains("in-place vector of 8 bytes"), "{error}");
        assert_eq!(error.take_memory::<f32>().map(|memory| memory.len()), None);
        assert_eq!(error.take_memory::<i32>().unwrap()[..], [1, 2, 3]);
        assert!(error.take_memory::<i32>().is_none());
    });
}

/// Memory that tells when it is dropped.
struct Lender {
    elements: Box<[f32]>,
    dropped: Sender<usize>,
}

impl AsMut<[f32]> for Lender {
    fn as_mut(&mut self) -> &mut [f32] {
        &mut self.elements
    }
}

impl Drop for Lender {
    fn drop(&mut self) {
        let _nobody_cares = self.dropped.send(self.elements.len());
    }
}

#[test]
fn memory_of_others_comes_back_with_its_owner() {
    let (dropped, drops) = channel();
    on_threads(3, |comm| {
        let elements = vec![comm.rank() as f32; 100_000].into_boxed_slice();
        let address = elements.as_ptr();
        let memory = Memory::from_owner(Lender { elements, dropped: dropped.clone() });
        let memory = comm.in_place().all_reduce(memory, ReduceOp::Sum).wait().unwrap();
        assert_eq!(memory.as_ptr(), address);
        let lender: Lender = memory.into_owner().unwrap();
        assert!(lender.elements.iter().all(|x| *x == 3.0));
    });
    assert_eq!(drops.try_iter().collect::<Vec<_>>(), [100_000; 3]);
}

/// The driver is the last to hold the memory, and drops it without holding its own lock: the owner
/// may do anything.
#[test]
fn memory_that_nobody_waits_for_lives_until_its_operation_has_ended() {
    struct Nosy(Lender, Communicator);
    impl AsMut<[f32]> for Nosy {
        fn as_mut(&mut self) -> &mut [f32] {
            self.0.as_mut()
        }
    }
    impl Drop for Nosy {
        fn drop(&mut self) {
            self.1.traffic(); // takes the driver's lock
        }
    }
    let (dropped, drops) = channel();
    let late = Barrier::new(2);
    on_threads(2, |comm| {
        let lender = Lender { elements: vec![1.0; 1_000_000].into(), dropped: dropped.clone() };
        let memory = Memory::from_owner(Nosy(lender, comm.clone()));
        if comm.rank() == 0 {
            drop(comm.in_place().all_reduce(memory, ReduceOp::Sum));
            late.wait();
        } else {
            late.wait();
            let sum = comm.in_place().all_reduce(memory, ReduceOp::Sum).wait().unwrap();
            assert!(sum.iter().all(|x| *x == 2.0));
        }
        comm.barrier().wait().unwrap();
    });
    assert_eq!(drops.iter().take(2).count(), 2);
}

#[test]
fn a_lost_rank_gives_the_memory_back_with_the_error() {
    on_threads(3, |comm| {
        if comm.rank() == 1 {
            return;
        }
        let (dropped, drops) = channel();
        let lender = Lender { elements: vec![1.0; 100_000].into(), dropped };
        let mut error = comm
            .in_place()
            .all_reduce(Memory::from_owner(lender), ReduceOp::Sum)
            .wait()
            .unwrap_err();
        assert_eq!(error.fault(), Some(&Fault::PeerLost(Peer(1))));
        assert_eq!(error.take_input::<f32>(), None, "it is not a vector");
        let memory = error.take_memory::<f32>().unwrap();
        assert_eq!(memory.len(), 100_000);
        assert!(drops.try_recv().is_err());
        drop(memory);
        assert_eq!(drops.recv(), Ok(100_000));

        // The group has failed: this does not even start.
        let mut data = vec![5.0f32; 10];
        assert!(matches!(
            comm.all_reduce_in_place(&mut data, ReduceOp::Sum),
            Err(Error::Failed { .. })
        ));
        assert_eq!(data, [5.0; 10]);
    });
}

/// Another task's waker panics on the thread that waits for borrowed memory. The memory is let go
/// before the panic goes on, and the group still works.
#[test]
fn a_panic_while_waiting_lets_go_of_borrowed_memory_first() {
    use std::future::Future;
    use std::panic::{AssertUnwindSafe, catch_unwind};
    use std::pin::pin;
    use std::task::{Context, Poll, Wake};

    struct Bomb(AtomicUsize);
    impl Wake for Bomb {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::SeqCst);
            panic!("a waker that panics");
        }
    }
    // Which thread meets the bomb is luck: the one that waits, or the keeper. Both must survive it.
    let polled = Barrier::new(2);
    on_threads(2, |comm| {
        let other = comm.split(0, comm.rank() as u32).unwrap();
        for _ in 0..10 {
            let mut data = vec![1.0f32; 300_000];
            if comm.rank() == 0 {
                let mut message = pin!(other.recv::<u8>(1, 1, 0));
                let bomb = Arc::new(Bomb(AtomicUsize::new(0)));
                let waker = bomb.clone().into();
                assert!(matches!(
                    message.as_mut().poll(&mut Context::from_waker(&waker)),
                    Poll::Pending
                ));
                polled.wait();
                let waited = catch_unwind(AssertUnwindSafe(|| {
                    comm.all_reduce_in_place(&mut data, ReduceOp::Sum).unwrap();
                }));
                assert!(
                    data.iter().all(|x| *x == 2.0),
                    "the operation is over, and went well: {waited:?}"
                );
                comm.barrier().wait().unwrap();
                assert_eq!(bomb.0.load(Ordering::SeqCst), 1);
            } else {
                polled.wait();
                other.send(vec![1u8], 0, 0).wait().unwrap();
                comm.all_reduce_in_place(&mut data, ReduceOp::Sum).unwrap();
                comm.barrier().wait().unwrap();
            }
        }
    });
}
