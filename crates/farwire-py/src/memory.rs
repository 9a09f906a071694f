//! Memory that a Python object owns, as memory that farwire can work in.
//!
//! # Rules of access
//!
//! 1. Only `farwire._views` makes views. It takes the address and the length from the object
//!    itself: a buffer that stays exported, or a tensor, whose storage stays where it is for as
//!    long as anybody holds it. Both are writable and contiguous.
//! 2. The object is held until the operation has ended, even if nobody waits for it.
//! 3. Until then nobody else should write to the memory, or read it and expect sense. Python cannot
//!    be kept from doing so. As with any operation that works in place, the values are then
//!    arbitrary, but nothing else goes wrong: elements are plain numbers.
//! 4. Memory that is [`Divided`] is accessed only through its parts, which share no element, until
//!    the last of them has ended.
//! 5. Only `farwire.torch` makes a [`CardView`], from a contiguous CUDA tensor and the stream that
//!    it is used on now. Work put on that stream later waits for the operation's end.

#![allow(unsafe_code, reason = "memory that Python objects own; see the rules above")]

use std::ops::Range;
use std::sync::Arc;

use farwire::{DType, Element, Memory};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

/// Address, number of bytes, element type, and the owner of the memory.
#[derive(FromPyObject)]
pub(crate) struct View(usize, usize, String, Py<PyAny>);

/// An object that is held until its memory is no longer needed.
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

    /// The number of elements, by the view's element type.
    pub(crate) fn count(&self) -> PyResult<usize> {
        Ok(self.1 / self.dtype()?.size())
    }

    /// The memory, as elements of the type that [`dtype`](Self::dtype) returned.
    pub(crate) fn memory<T: Element>(self) -> PyResult<Memory<T>> {
        let Self(address, bytes, _, owner) = self;
        let len = bytes / size_of::<T>();
        // SAFETY: rules 1 to 3.
        let memory = unsafe { Memory::from_raw(address as *mut T, len, Held(owner)) };
        memory.map_err(|error| PyValueError::new_err(error.to_string()))
    }
}

/// Memory that several operations work on, each in a part of its own.
#[derive(Debug)]
pub(crate) struct Divided {
    whole: Arc<Memory<f32>>,
    start: *mut f32,
    /// The elements from here on have not been given out.
    left: usize,
}

// SAFETY: the pointer is to memory owned by the `Memory` beside it, which can be sent.
unsafe impl Send for Divided {}
// SAFETY: a shared reference gives no access to the elements.
unsafe impl Sync for Divided {}

impl Divided {
    pub(crate) fn new(mut whole: Memory<f32>) -> Self {
        let start = whole.as_mut_ptr();
        Self { whole: Arc::new(whole), start, left: 0 }
    }

    /// Some of the elements, as memory of their own. Parts are given out in ascending order.
    ///
    /// # Panics
    ///
    /// If the elements overlap or precede an earlier part, or are not all in the memory.
    pub(crate) fn part(&mut self, range: Range<usize>) -> Memory<f32> {
        assert!(self.left <= range.start && range.start <= range.end, "parts ascend");
        assert!(range.end <= self.whole.len(), "parts are inside");
        self.left = range.end;
        let start = self.start.wrapping_add(range.start);
        // SAFETY: rule 4. The elements are the whole's, which each part keeps; no other part has
        // them, and the whole gives no access before it is joined.
        let part = unsafe { Memory::from_raw(start, range.len(), self.whole.clone()) };
        part.expect("a part of memory is where memory can be")
    }

    /// The whole, if no part is left.
    pub(crate) fn join(self) -> Option<Memory<f32>> {
        Arc::try_unwrap(self.whole).ok()
    }
}

/// A tensor on a card: address, number of elements, element type, which card, the stream that it is
/// used on, and the owner of the memory.
#[cfg(feature = "cuda")]
#[derive(FromPyObject)]
pub(crate) struct CardView(u64, usize, String, usize, u64, Py<PyAny>);

#[cfg(feature = "cuda")]
impl CardView {
    pub(crate) fn dtype(&self) -> PyResult<DType> {
        dtype(&self.2)
    }

    pub(crate) fn count(&self) -> usize {
        self.1
    }

    pub(crate) fn ordinal(&self) -> usize {
        self.3
    }

    /// A tensor for each of these ranges of elements.
    ///
    /// # Panics
    ///
    /// If the view does not have these elements, or the ranges overlap or do not ascend.
    pub(crate) fn parts(
        self,
        type_: farwire_cuda::ValueType,
        ranges: impl Iterator<Item = Range<usize>>,
    ) -> Vec<farwire_cuda::DeviceTensor> {
        let Self(pointer, count, _, _, stream, owner) = self;
        let (owner, mut left) = (Arc::new(Held(owner)), 0);
        let part = |range: Range<usize>| {
            assert!(left <= range.start && range.start <= range.end, "parts ascend");
            assert!(range.end <= count, "parts are inside");
            left = range.end;
            let start = pointer + (range.start * type_.size()) as u64;
            // SAFETY: rules 2, 4 and 5.
            unsafe {
                farwire_cuda::DeviceTensor::from_raw(
                    start,
                    range.len(),
                    type_,
                    stream,
                    owner.clone(),
                )
            }
        };
        ranges.map(part).collect()
    }
}

/// The element type with this name.
pub(crate) fn dtype(name: &str) -> PyResult<DType> {
    DType::ALL.into_iter().find(|dtype| dtype.name() == name).ok_or_else(|| {
        let names: Vec<_> = DType::ALL.iter().map(|dtype| dtype.name()).collect();
        PyValueError::new_err(format!("no element type {name:?}; use one of {}", names.join(", ")))
    })
}
