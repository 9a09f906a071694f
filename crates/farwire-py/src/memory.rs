//! Memory that a Python object owns, as memory that farwire can work in.
//!
//! # Rules of access
//!
//! 1. A view is made by `farwire._views` alone. It takes the address and the length from the object
//!    itself: a buffer that stays exported, or a tensor, whose storage stays where it is for as
//!    long as anybody holds it. Both are writable and contiguous.
//! 2. The object is held until the operation has ended, also if nobody waits for it.
//! 3. Until then nobody else should write to the memory, or read it and expect sense. Python cannot
//!    be kept from doing so; as with any operation that works in place, the values are then
//!    anything, and nothing else goes wrong: elements are plain numbers.

#![allow(unsafe_code, reason = "memory that Python objects own; see the rules above")]

use farwire::{DType, Element, Memory};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

/// Address, bytes, element type, and who owns the memory.
#[derive(FromPyObject)]
pub(crate) struct View(usize, usize, String, Py<PyAny>);

/// An object that is held until memory of its own is not needed any more.
struct Held(#[allow(dead_code, reason = "it is held")] Py<PyAny>);

impl View {
    pub(crate) fn dtype(&self) -> PyResult<DType> {
        dtype(&self.2)
    }

    pub(crate) fn address(&self) -> usize {
        self.0
    }

    pub(crate) fn bytes(&self) -> usize {
        self.1
    }

    /// Elements of the type that it says.
    pub(crate) fn count(&self) -> PyResult<usize> {
        Ok(self.1 / self.dtype()?.size())
    }

    /// The memory, as elements of a type that [`dtype`](Self::dtype) has named.
    pub(crate) fn memory<T: Element>(self) -> PyResult<Memory<T>> {
        let Self(address, bytes, _, owner) = self;
        let len = bytes / size_of::<T>();
        // SAFETY: rules 1 to 3.
        let memory = unsafe { Memory::from_raw(address as *mut T, len, Held(owner)) };
        memory.map_err(|error| PyValueError::new_err(error.to_string()))
    }
}

/// The element type of a name.
pub(crate) fn dtype(name: &str) -> PyResult<DType> {
    DType::ALL.into_iter().find(|dtype| dtype.name() == name).ok_or_else(|| {
        let names: Vec<_> = DType::ALL.iter().map(|dtype| dtype.name()).collect();
        PyValueError::new_err(format!("no element type {name:?}; use one of {}", names.join(", ")))
    })
}
