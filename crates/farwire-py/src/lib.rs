//! farwire for Python: the extension module `farwire._native`.
//!
//! What people call is in `python/farwire`, which finds out where an array's memory is and hands
//! over the address. Read this in the order:
//!
//! - `memory`: memory that a Python object owns, as farwire's. The `unsafe` code is there.
//! - `operation`: something in flight. Its wait looks at signals, its end calls back.
//! - `comm`: joining a job, and the collectives.
//! - `compressor`: a codec with what it owes.
//! - `gradients`: the gradients of a training step, bucket by bucket.
//! - `card`: the cards that these may be on.
//! - `failure`: errors as Python's.
//! - `process`: what a forked child must not do, and how a process ends.
//!
//! Nothing here holds a lock of its own while it attaches to the interpreter, and nothing waits
//! for other ranks while it is attached.

#![deny(unsafe_code)]

#[cfg(feature = "cuda")]
mod card;
mod comm;
mod compressor;
mod failure;
mod gradients;
mod memory;
mod operation;
mod process;

/// The extension module.
#[pyo3::pymodule]
mod _native {
    #[pymodule_export]
    use crate::comm::{Comm, free_port, join};
    #[pymodule_export]
    use crate::compressor::{Compressor, codec_help};
    #[pymodule_export]
    use crate::gradients::{CardOutcome, Gradients, Parts};
    #[pymodule_export]
    use crate::operation::Operation;
    #[pymodule_export]
    use crate::process::exit;
}
