//! How often an all-reduce asks for memory once a loop of them is under way. A binary of its own,
//! since it counts every allocation of its process.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on should say where")]
#![allow(unsafe_code, reason = "an allocator that counts")]

mod common;

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::Barrier;
use std::sync::atomic::{AtomicUsize, Ordering};

use farwire::{Communicator, ReduceOp};

/// How often memory was asked for.
static ALLOCATIONS: AtomicUsize = AtomicUsize::new(0);

struct Counting;

// SAFETY: the system's allocator does it all.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller keeps to the same contract.
        unsafe { System.alloc(layout) }
    }

    unsafe fn realloc(&self, start: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: as above.
        unsafe { System.realloc(start, layout, new_size) }
    }

    unsafe fn dealloc(&self, start: *mut u8, layout: Layout) {
        // SAFETY: as above.
        unsafe { System.dealloc(start, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Operations before those that count, and those.
const WARM: usize = 100;
const COUNTED: usize = 400;
/// Elements: a message in one frame, and one in many.
const LENGTHS: [usize; 2] = [256, 1 << 18];

/// A loop of all-reduces, each with what the one before it gave. `between` is called before those
/// that count, and after.
fn all_reduces(comm: &Communicator, len: usize, mut between: impl FnMut()) {
    let mut data = vec![0.0f32; len];
    for count in 0..WARM + COUNTED {
        if count == WARM {
            between();
        }
        data = comm.all_reduce(data, ReduceOp::Sum).wait().unwrap();
    }
    between();
}

#[test]
fn through_shared_memory_an_all_reduce_allocates_nothing() {
    const RANKS: usize = 3;
    let step = Barrier::new(RANKS);
    for len in LENGTHS {
        let counts = std::sync::Mutex::new(Vec::new());
        common::on_threads(RANKS, |comm| {
            all_reduces(&comm, len, || {
                if step.wait().is_leader() {
                    counts.lock().unwrap().push(ALLOCATIONS.load(Ordering::Relaxed));
                }
                step.wait();
            });
        });
        let counts = counts.into_inner().unwrap();
        let each = (counts[1] - counts[0]) as f64 / (COUNTED * RANKS) as f64;
        println!("{len} elements, {RANKS} ranks: {each:.2} allocations for each rank's all-reduce");
        // Other threads have something to do now and then.
        assert!(each < 0.1, "{each}");
    }
}
