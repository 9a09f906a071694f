//! The memory that operations work on: vectors, and memory that somebody else owns.
//!
//! # Rules of access
//!
//! 1. A [`Buffer`]'s bytes are the `bytes` bytes from `start`: initialised, aligned for its element
//!    type, and valid to read and write for as long as the buffer lives. A vector promises that for
//!    its own bytes, an owner's `AsMut` for the slice it lends, and the caller of
//!    [`Memory::from_raw`] for anything else.
//! 2. While a buffer lives, its bytes are accessed through it alone, and so by Rust's usual rules:
//!    a shared slice borrows it, a mutable one borrows it mutably.
//! 3. Its owner is not touched until the buffer ends. Then it is dropped or handed back. It is held
//!    by a raw pointer, because a `Box` that moves claims sole access to its contents, and the
//!    bytes may be among them.
//! 4. Elements are plain data: any bytes are a value, and nothing has to be dropped. Nobody can add
//!    to the types that implement [`Element`]. Each has a [`DType`] of its own, which therefore
//!    tells a buffer's element type.

#![allow(unsafe_code, reason = "memory that others own; see the rules above")]

use std::any::TypeId;
use std::fmt;
use std::marker::PhantomData;
use std::mem::ManuallyDrop;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use farwire_proto::{DType, Element};

/// Elements in memory that an operation can work on in place: a vector, or memory that somebody
/// else owns, with its owner.
///
/// The owner is kept alive for as long as an operation may touch the memory, and comes back with
/// it.
///
/// ```
/// use farwire::{Memory, ReduceOp};
///
/// struct Page([f32; 4]); // a tensor, pinned memory, a mapped file
///
/// impl AsMut<[f32]> for Page {
///     fn as_mut(&mut self) -> &mut [f32] {
///         &mut self.0
///     }
/// }
///
/// for comm in farwire::local(1)? {
///     let memory = Memory::from_owner(Page([1.0, 2.0, 3.0, 4.0]));
///     let memory = comm.in_place().all_reduce(memory, ReduceOp::Sum).wait()?;
///     assert_eq!(memory[..2], [1.0, 2.0]);
///     let page: Page = memory.into_owner().expect("the page that went in");
///     assert_eq!(page.0[2..], [3.0, 4.0]);
/// }
/// # Ok::<(), farwire::Error>(())
/// ```
pub struct Memory<T: Element> {
    buffer: Buffer,
    elements: PhantomData<T>,
}

/// [`Memory`] whose element type is known at run time: what a failed operation was given. See
/// [`Error::take_input`](crate::Error::take_input).
pub struct Buffer {
    start: NonNull<u8>,
    bytes: usize,
    dtype: DType,
    owner: Owner,
}

/// What becomes of the bytes in the end.
enum Owner {
    /// A vector's, with this capacity. `free` is the one for its element type.
    Vec { capacity: usize, free: unsafe fn(NonNull<u8>, usize) },
    /// Somebody else's, boxed.
    Other { owner: NonNull<dyn Send>, type_id: TypeId },
}

impl Owner {
    /// Puts an owner where it stays until the buffer ends, and returns where that is.
    fn other<O: Send + 'static>(owner: O) -> (NonNull<O>, Self) {
        let owner = NonNull::from(Box::leak(Box::new(owner)));
        (owner, Self::Other { owner, type_id: TypeId::of::<O>() })
    }
}

// SAFETY: elements are plain data and the owner is `Send`; by rule 2 there is one way to the bytes.
unsafe impl Send for Buffer {}
// SAFETY: a shared reference gives shared slices of plain data and, by rule 3, no way to the owner.
unsafe impl Sync for Buffer {}

/// Memory that cannot be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum MemoryError {
    /// A null pointer to one or more elements.
    #[error("a null pointer to {len} elements; only an empty vector may be at null")]
    Null {
        /// How many there should be.
        len: usize,
    },
    /// The address is not aligned for the element type.
    #[error("memory at {address:#x} is not aligned for {dtype}, which needs a multiple of {align}")]
    Misaligned {
        /// The address.
        address: usize,
        /// The element type.
        dtype: DType,
        /// What the address must be a multiple of.
        align: usize,
    },
    /// More elements than can be in memory.
    #[error("{len} elements of {dtype} do not fit in memory")]
    TooLong {
        /// How many.
        len: usize,
        /// Of which type.
        dtype: DType,
    },
}

impl<T: Element> Memory<T> {
    /// The elements that `owner` gives access to. It is asked for them once, and they are used
    /// until the owner is dropped or taken back.
    pub fn from_owner<O: AsMut<[T]> + Send + 'static>(owner: O) -> Self {
        // This borrow ends with the buffer, before anything else is done with the owner (rule 3).
        // So whatever its `as_mut` returns is valid until then, and nobody else's meanwhile.
        let (mut whole, owner) = Owner::other(owner);
        // SAFETY: nobody else has a reference to the owner, which was just put there.
        let elements = unsafe { whole.as_mut() }.as_mut();
        let (start, len) = (NonNull::from(&mut *elements).cast::<T>(), elements.len());
        // SAFETY: these are a slice's elements, and the slice is borrowed until the buffer ends.
        unsafe { Self::new(start, len, owner) }
    }

    /// `len` elements from `start`, in memory that stays valid until `owner` is dropped. `start`
    /// may be null only if `len` is 0.
    ///
    /// # Safety
    ///
    /// From this call until `owner` is dropped, or comes back by [`into_owner`](Self::into_owner):
    ///
    /// - the elements are initialised, and can be read and written, on any thread;
    /// - nobody accesses them except through this `Memory`, whoever holds that: not through the
    ///   owner, either.
    ///
    /// If this call fails, the owner is dropped at once.
    pub unsafe fn from_raw<O: Send + 'static>(
        start: *mut T,
        len: usize,
        owner: O,
    ) -> Result<Self, MemoryError> {
        let start = match NonNull::new(start) {
            Some(start) => start,
            None if len == 0 => NonNull::dangling(),
            None => return Err(MemoryError::Null { len }),
        };
        if !start.is_aligned() {
            let (address, align) = (start.addr().get(), align_of::<T>());
            return Err(MemoryError::Misaligned { address, dtype: T::DTYPE, align });
        }
        if len.checked_mul(size_of::<T>()).is_none_or(|bytes| bytes > isize::MAX as usize) {
            return Err(MemoryError::TooLong { len, dtype: T::DTYPE });
        }
        let (_, owner) = Owner::other(owner);
        // SAFETY: the caller promises what has not just been checked.
        Ok(unsafe { Self::new(start, len, owner) })
    }

    /// The owner that this memory was made with, if it was made with one of this type. A vector has
    /// none.
    pub fn into_owner<O: 'static>(self) -> Result<O, Self> {
        match self.buffer.owner {
            Owner::Other { owner, type_id } if type_id == TypeId::of::<O>() => {
                let _ended = ManuallyDrop::new(self);
                // SAFETY: the box was leaked when this memory was made, with an owner of this type,
                // and nobody else will free it.
                Ok(*unsafe { Box::from_raw(owner.cast::<O>().as_ptr()) })
            }
            _ => Err(self),
        }
    }

    /// The elements as a vector: the one that this memory was made of, or else a copy.
    pub fn into_vec(self) -> Vec<T> {
        self.buffer.into_vec().unwrap_or_else(|buffer| Self::from_buffer(buffer).to_vec())
    }

    /// # Safety
    ///
    /// `len` elements from `start` are as rule 1 says, until the owner ends.
    unsafe fn new(start: NonNull<T>, len: usize, owner: Owner) -> Self {
        let bytes = len * size_of::<T>();
        Self::from_buffer(Buffer { start: start.cast(), bytes, dtype: T::DTYPE, owner })
    }

    /// # Panics
    ///
    /// If the buffer is of another type.
    pub(crate) fn from_buffer(buffer: Buffer) -> Self {
        assert_eq!(buffer.dtype, T::DTYPE, "a result has the type of its call");
        Self { buffer, elements: PhantomData }
    }

    pub(crate) fn into_buffer(self) -> Buffer {
        self.buffer
    }
}

impl<T: Element> From<Vec<T>> for Memory<T> {
    fn from(elements: Vec<T>) -> Self {
        Self::from_buffer(elements.into())
    }
}

impl<T: Element> From<Box<[T]>> for Memory<T> {
    fn from(elements: Box<[T]>) -> Self {
        elements.into_vec().into()
    }
}

impl<T: Element> Deref for Memory<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        // SAFETY: rules 1 and 2; the buffer is of this type.
        unsafe { std::slice::from_raw_parts(self.buffer.start.cast().as_ptr(), self.buffer.len()) }
    }
}

impl<T: Element> DerefMut for Memory<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: as above.
        unsafe {
            std::slice::from_raw_parts_mut(self.buffer.start.cast().as_ptr(), self.buffer.len())
        }
    }
}

impl<T: Element> AsRef<[T]> for Memory<T> {
    fn as_ref(&self) -> &[T] {
        self
    }
}

impl<T: Element> AsMut<[T]> for Memory<T> {
    fn as_mut(&mut self) -> &mut [T] {
        self
    }
}

impl<T: Element> fmt::Debug for Memory<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Memory({:?}; {})", T::DTYPE, self.len())
    }
}

impl Buffer {
    /// Its element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// How many elements it has.
    pub fn len(&self) -> usize {
        self.bytes / self.dtype.size()
    }

    /// Whether it has none.
    pub fn is_empty(&self) -> bool {
        self.bytes == 0
    }

    /// Whether somebody else owns it, whose own code runs when it ends.
    pub(crate) fn is_foreign(&self) -> bool {
        matches!(self.owner, Owner::Other { .. })
    }

    /// Its bytes.
    pub(crate) fn bytes(&self) -> &[u8] {
        // SAFETY: rules 1 and 2; plain data is bytes.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.bytes) }
    }

    /// Its bytes, to write to.
    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: rules 1, 2 and 4: any bytes are elements.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.bytes) }
    }

    /// The vector that it was made of, if it is one of this type.
    pub(crate) fn into_vec<T: Element>(self) -> Result<Vec<T>, Self> {
        match self.owner {
            Owner::Vec { capacity, .. } if self.dtype == T::DTYPE => {
                let len = self.len();
                let start = ManuallyDrop::new(self).start.cast().as_ptr();
                // SAFETY: these are the parts that `from` split a vector of this type into, and
                // freeing it was left to this.
                Ok(unsafe { Vec::from_raw_parts(start, len, capacity) })
            }
            _ => Err(self),
        }
    }
}

impl AsRef<[u8]> for Buffer {
    fn as_ref(&self) -> &[u8] {
        self.bytes()
    }
}

impl AsMut<[u8]> for Buffer {
    fn as_mut(&mut self) -> &mut [u8] {
        self.bytes_mut()
    }
}

impl<T: Element> From<Vec<T>> for Buffer {
    fn from(elements: Vec<T>) -> Self {
        /// # Safety
        ///
        /// `start` and `capacity` are those of a vector of `T` that is used no more.
        unsafe fn free<T>(start: NonNull<u8>, capacity: usize) {
            // SAFETY: as the caller says. There is nothing to drop in its elements.
            drop(unsafe { Vec::<T>::from_raw_parts(start.cast().as_ptr(), 0, capacity) });
        }
        let mut elements = ManuallyDrop::new(elements);
        let owner = Owner::Vec { capacity: elements.capacity(), free: free::<T> };
        let bytes = size_of_val(&elements[..]);
        let start = NonNull::new(elements.as_mut_ptr()).expect("a vector's address is never null");
        Self { start: start.cast(), bytes, dtype: T::DTYPE, owner }
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        match self.owner {
            // SAFETY: the vector was left for this to free.
            Owner::Vec { capacity, free } => unsafe { free(self.start, capacity) },
            // SAFETY: the box was leaked for this to free, and no access to the bytes follows.
            Owner::Other { owner, .. } => drop(unsafe { Box::from_raw(owner.as_ptr()) }),
        }
    }
}

/// Type and length: an error that holds a long input, shown by a `main` that returns it, has to fit
/// a screen.
impl fmt::Debug for Buffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Buffer({:?}; {})", self.dtype, self.len())
    }
}

/// Whether anything holds borrowed memory.
#[derive(Debug, Default)]
struct Loan {
    state: Mutex<LoanState>,
    ended: Condvar,
}

#[derive(Debug, Default)]
struct LoanState {
    has_ended: bool,
    is_awaited: bool,
}

impl Loan {
    fn lock(&self) -> MutexGuard<'_, LoanState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Lets `run` use borrowed memory, and returns only when nothing holds that memory any more, even
/// if `run` panics. It then waits for an operation that is still in flight, and calls `hurry`,
/// because nobody else may be waiting for that.
pub(crate) fn lend<T: Element, R>(
    data: &mut [T],
    hurry: impl Fn(),
    run: impl FnOnce(Memory<T>) -> R,
) -> R {
    /// Held with the memory.
    struct Hold(Arc<Loan>);
    impl Drop for Hold {
        fn drop(&mut self) {
            let mut loan = self.0.lock();
            loan.has_ended = true;
            if loan.is_awaited {
                self.0.ended.notify_one();
            }
        }
    }
    struct UntilReleased<F: Fn()> {
        hurry: F,
        loan: Arc<Loan>,
    }
    impl<F: Fn()> Drop for UntilReleased<F> {
        fn drop(&mut self) {
            if self.loan.lock().has_ended {
                return;
            }
            (self.hurry)();
            let mut loan = self.loan.lock();
            loan.is_awaited = true;
            let _ended = self.loan.ended.wait_while(loan, |loan| !loan.has_ended);
        }
    }
    let loan = Arc::<Loan>::default();
    let holds = Hold(loan.clone());
    let _until_released = UntilReleased { hurry, loan };
    let start = NonNull::from(&mut *data).cast();
    let (_, owner) = Owner::other(holds);
    // SAFETY: `data` is borrowed until this function ends. However it ends, the guard above lets it
    // end only once whatever got the memory has ended.
    run(unsafe { Memory::new(start, data.len(), owner) })
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Lender(Box<[u32]>, #[allow(dead_code, reason = "it is counted")] Arc<()>);

    impl AsMut<[u32]> for Lender {
        fn as_mut(&mut self) -> &mut [u32] {
            &mut self.0
        }
    }

    #[test]
    fn a_vector_comes_back_as_the_same_vector() {
        for len in [0, 1, 5] {
            let mut vector = Vec::with_capacity(9);
            vector.resize(len, 7u16 as i64);
            let address = vector.as_ptr();
            let mut memory = Memory::from(vector);
            memory.iter_mut().for_each(|element| *element += 1);
            let vector =
                memory.into_owner::<Vec<i64>>().expect_err("a vector is no owner").into_vec();
            assert_eq!((vector.as_ptr(), vector.capacity()), (address, 9));
            assert_eq!(vector, vec![8; len]);
        }
        assert_eq!(Memory::from(vec![1u8, 2].into_boxed_slice()).into_vec(), [1, 2]);
    }

    #[test]
    fn an_owner_is_dropped_once_or_handed_back() {
        let alive = Arc::new(());
        let lender = || Lender([1, 2, 3].into(), alive.clone());
        let mut memory = Memory::from_owner(lender());
        memory[1] = 20;
        let mut memory = memory.into_owner::<String>().expect_err("it is a lender");
        memory[2] = 30;
        let lender_back = memory.into_owner::<Lender>().expect("it is a lender");
        assert_eq!(*lender_back.0, [1, 20, 30]);
        drop(lender_back);
        drop(Memory::from_owner(lender()));
        assert_eq!(Memory::from_owner(lender()).into_vec(), [1, 2, 3]);
        assert_eq!(Arc::strong_count(&alive), 1);
    }

    #[test]
    fn elements_inside_the_owner_itself_stay_where_they_are() {
        struct Page([u8; 3]);
        impl AsMut<[u8]> for Page {
            fn as_mut(&mut self) -> &mut [u8] {
                &mut self.0
            }
        }
        let mut memory = Memory::from_owner(Page([1, 2, 3]));
        let mut moved = std::mem::replace(&mut memory, Memory::from(vec![]));
        moved[0] = 10;
        assert_eq!(moved.into_owner::<Page>().expect("a page").0, [10, 2, 3]);
    }

    #[test]
    fn memory_that_cannot_be_is_refused() {
        let alive = Arc::new(());
        let mut words = [0u32; 4];
        let start = words.as_mut_ptr();
        let within = start.wrapping_byte_add(1);
        // SAFETY: all but the last are refused before anything is accessed, and that has no
        // elements.
        let made = unsafe {
            [
                Memory::from_raw(std::ptr::null_mut(), 4, alive.clone()),
                Memory::from_raw(within, 2, alive.clone()),
                Memory::from_raw(start, usize::MAX / 2, alive.clone()),
                Memory::from_raw(std::ptr::null_mut(), 0, alive.clone()),
            ]
        };
        let [null, misaligned, long, empty] = made.map(|made| made.map(|memory| memory.len()));
        assert_eq!(null, Err(MemoryError::Null { len: 4 }));
        assert!(misaligned.unwrap_err().to_string().contains("a multiple of 4"));
        assert_eq!(long, Err(MemoryError::TooLong { len: usize::MAX / 2, dtype: DType::U32 }));
        assert_eq!(empty, Ok(0));
        assert_eq!(Arc::strong_count(&alive), 1);
    }
}
