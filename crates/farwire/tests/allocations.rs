//! How often an all-reduce asks for memory once a loop of them is under way. A binary of its own,
//! since it counts every allocation of its process.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on should say where")]
#![allow(unsafe_code, reason = "an allocator that counts")]

mod common;
#[path = "common/counting.rs"]
mod counting;

use std::sync::atomic::Ordering;
use std::time::Instant;

use counting::ALLOCATIONS;
use farwire::{Communicator, ReduceOp};

/// Operations before counting begins, and operations that are counted.
const WARM: usize = 200;
const COUNTED: usize = 400;
/// What other threads may ask for in a second, for heartbeats and the like: on a busy machine, a
/// few operations take many seconds.
const MEANWHILE: f64 = 200.0;
/// Elements of a message in one frame, and of one in many.
const LENGTHS: [usize; 2] = [256, 1 << 18];

/// How an all-reduce is called.
#[derive(Clone, Copy, Debug)]
enum Way {
    /// It takes a vector, and gives another back.
    Apart,
    /// In the vector that it takes.
    InPlace,
    /// In a slice that it borrows.
    Slice,
}

/// How often this rank asks for memory in one all-reduce, on average, less [`MEANWHILE`].
fn allocations(comm: &Communicator, len: usize, way: Way) -> f64 {
    let mut data = vec![0.0f32; len];
    let (mut before, mut start) = (0, Instant::now());
    for count in 0..WARM + COUNTED {
        if count == WARM {
            comm.barrier().wait().unwrap();
            (before, start) = (ALLOCATIONS.load(Ordering::Relaxed), Instant::now());
        }
        match way {
            Way::Apart => data = comm.all_reduce(data, ReduceOp::Sum).wait().unwrap(),
            Way::InPlace => {
                data = comm.in_place().all_reduce(data, ReduceOp::Sum).wait().unwrap().into_vec();
            }
            Way::Slice => comm.all_reduce_in_place(&mut data, ReduceOp::Sum).unwrap(),
        }
    }
    let allocations = (ALLOCATIONS.load(Ordering::Relaxed) - before) as f64;
    (allocations - MEANWHILE * start.elapsed().as_secs_f64()).max(0.0) / COUNTED as f64
}

/// What an all-reduce over a link may ask for, on average, with a short vector and a long one.
fn bound(link: &str, way: Way) -> [f64; 2] {
    match (link, way) {
        // Nothing.
        ("shm", Way::Apart) => [0.05, 0.05],
        // The boxed call.
        ("shm", Way::InPlace) => [1.05, 1.05],
        // That, and what tells the lender of the slice that it is free again.
        ("shm", Way::Slice) => [4.05, 4.05],
        // Frames, packets and tasks of the network's threads, heartbeats among them: some for each
        // frame and, with QUIC, for every few packets.
        _ => [200.0, 1500.0],
    }
}

#[test]
fn an_all_reduce_allocates_nothing_in_shared_memory_and_little_on_the_network() {
    const TEST: &str = "an_all_reduce_allocates_nothing_in_shared_memory_and_little_on_the_network";
    for link in common::links() {
        let children = common::start_processes(TEST, 3, link, |comm| {
            for way in [Way::Apart, Way::InPlace, Way::Slice] {
                for (len, bound) in LENGTHS.into_iter().zip(bound(link, way)) {
                    let each = allocations(&comm, len, way);
                    println!("{link}, {len} elements, {way:?}: {each:.2} allocations");
                    assert!(each < bound, "{link}, {len} elements, {way:?}: {each:.2}");
                }
            }
        });
        for child in children {
            let said = common::assert_succeeds(child, link);
            said.lines()
                .filter(|line| line.ends_with("allocations"))
                .for_each(|line| println!("{line}"));
        }
    }
}
