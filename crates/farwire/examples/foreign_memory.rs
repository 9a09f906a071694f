//! Reduces memory that is not a `Vec`: a mapped file, on every rank, without copying it.
//!
//! `farwire launch -n 4 -- target/release/examples/foreign_memory`

use std::fs::File;

use farwire::{Communicator, Memory, ReduceOp};
use rustix::mm::{MapFlags, ProtFlags};

/// A mapped file. Whoever owns this owns the mapping.
struct Mapping {
    start: *mut std::ffi::c_void,
    bytes: usize,
}

// SAFETY: a mapping belongs to the whole process.
unsafe impl Send for Mapping {}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: it was mapped with this length, and no memory made of it is left.
        unsafe { rustix::mm::munmap(self.start, self.bytes) }.expect("it was mapped");
    }
}

fn map(file: &File, elements: usize) -> Result<Memory<f32>, Box<dyn std::error::Error>> {
    let bytes = elements * size_of::<f32>();
    file.set_len(bytes as u64)?;
    let access = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: a new mapping at an address of the system's choice replaces nothing.
    let start = unsafe {
        rustix::mm::mmap(std::ptr::null_mut(), bytes, access, MapFlags::SHARED, file, 0)?
    };
    let owner = Mapping { start, bytes };
    // SAFETY: the mapping has these elements, all zero, until its owner is dropped; and nobody else
    // writes to the file, which has no name.
    Ok(unsafe { Memory::from_raw(start.cast(), elements, owner)? })
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let comm = Communicator::from_env()?;
    let file = File::from(rustix::fs::memfd_create("gradient", rustix::fs::MemfdFlags::CLOEXEC)?);
    let mut gradient = map(&file, 1_000_000)?;
    gradient.fill(comm.rank() as f32);

    // The memory, and with it the mapping, goes along with the operation and comes back with the
    // result.
    let mean = comm.in_place().all_reduce(gradient, ReduceOp::Mean).wait()?;
    println!("rank {} of {}: {}", comm.rank(), comm.size(), mean[0]);

    // Or it is borrowed, if there is nothing to do but wait.
    let mut counts = [1u32; 3];
    comm.all_reduce_in_place(&mut counts, ReduceOp::Sum)?;
    assert_eq!(counts, [comm.size() as u32; 3]);
    Ok(comm.shutdown()?)
}
