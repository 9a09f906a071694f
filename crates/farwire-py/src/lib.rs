//! farwire for Python: the extension module `farwire._native`.
//!
//! The public interface is in `python/farwire`, which finds out where an array's memory is and
//! passes the address to this module. Read the modules in this order:
//!
//! - `memory`: memory that a Python object owns, as farwire's. The `unsafe` code is there.
//! - `operation`: an operation in flight. Waiting checks for signals; its end runs callbacks.
//! - `comm`: joining a job, and the collectives.
//! - `compressor`: a codec and what it owes.
//! - `gradients`: the gradients of a training step, bucket by bucket.
//! - `card`: the cards that gradients may be on.
//! - `failure`: errors as Python exceptions.
//! - `process`: what a forked child must not do, and how a process ends.
//!
//! No thread attaches to the interpreter while it holds a lock of this module, and none waits for
//! other ranks while it is attached.

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
