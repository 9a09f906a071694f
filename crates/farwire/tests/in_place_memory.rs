//! What an in-place all-reduce allocates. A binary of its own, since it counts every allocation of
//! its process.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on should say where")]
#![allow(unsafe_code, reason = "an allocator that counts")]

#[path = "common/counting.rs"]
mod counting;

use std::sync::Barrier;
use std::sync::atomic::Ordering;

use counting::ALLOCATED;
use farwire::ReduceOp;

const MIB: usize = 1 << 20;
const LEN: usize = 64 * MIB / 4;
const RANKS: usize = 2;

#[test]
fn an_in_place_all_reduce_holds_no_second_copy() {
    let step = Barrier::new(RANKS);
    // What all ranks together allocate while each does this.
    let count = |run: &dyn Fn()| {
        step.wait();
        let before = ALLOCATED.load(Ordering::Relaxed);
        step.wait();
        run();
        step.wait();
        (ALLOCATED.load(Ordering::Relaxed) - before) / MIB
    };
    let count = &count;
    std::thread::scope(|scope| {
        for comm in farwire::local(RANKS).unwrap() {
            scope.spawn(move || {
                let mut data = vec![comm.rank() as f32 + 1.0; LEN];
                let given = data.clone();
                let kept = count(&|| {
                    let sum = comm.all_reduce(given.clone(), ReduceOp::Sum).wait().unwrap();
                    assert!(sum.iter().all(|x| *x == 3.0));
                });
                assert!(kept >= RANKS * 128, "{kept} MiB: the clone and the result were counted");

                let data = std::cell::RefCell::new(&mut data);
                let in_place = count(&|| {
                    comm.all_reduce_in_place(&mut data.borrow_mut()[..], ReduceOp::Sum).unwrap();
                });
                assert!(data.borrow().iter().all(|x| *x == 3.0));
                println!(
                    "{} MiB of f32, {RANKS} ranks: {kept} MiB, in place {in_place} MiB",
                    LEN * 4 / MIB
                );
                assert!(in_place < RANKS * 8, "{in_place} MiB");
            });
        }
    });
}
