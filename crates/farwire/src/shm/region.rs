//! A piece of shared memory.
//!
//! # Rules of access
//!
//! 1. A region is mapped when it is made and unmapped when its last handle is dropped. It never moves and never changes its length: the file behind it
//!    is sealed against both.
//! 2. Control words (at the start of the region) are accessed as atomics only.
//! 3. The bytes behind them are accessed by [`Region::write`] and [`Region::read`] only. Whoever calls these must own the bytes by the ring's protocol: a slot
//!    belongs to the sender until its number is published with release ordering, and to the receiver, who acquired that, until it is returned the same way.
//! 4. A process at the other end could break rule 3. It is an authenticated member of the job, so that is a bug, not an attack; still, nothing read from a
//!    region is used as a length or an index before it is checked, so such a bug can garble a payload and nothing else.

#![allow(unsafe_code, reason = "shared memory; see the rules above")]

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::AtomicU32;

use rustix::fs::{MemfdFlags, SealFlags};
use rustix::mm::{MapFlags, ProtFlags};

/// Shared memory: control words, then bytes.
#[derive(Debug)]
pub(crate) struct Region {
    start: NonNull<u8>,
    len: usize,
    words: usize,
    /// Until it is not needed any more.
    file: Option<OwnedFd>,
}

// SAFETY: by rule 2 control words are atomics, and by rule 3 bytes have one owner at a time, on whatever thread.
unsafe impl Send for Region {}
// SAFETY: as above.
unsafe impl Sync for Region {}

impl Region {
    /// What keeps the file as long as it is, so that no access inside a mapping of it can fault.
    const SEALS: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW).union(SealFlags::SEAL);

    /// New memory, all zero, with at least `words` control words and `bytes` bytes behind them.
    pub(crate) fn new(words: usize, bytes: usize) -> io::Result<Self> {
        let (words, len) = Self::layout(words, bytes);
        let file = rustix::fs::memfd_create("farwire", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        rustix::fs::ftruncate(&file, len as u64)?;
        rustix::fs::fcntl_add_seals(&file, Self::SEALS)?;
        Self::map(file, words, len)
    }

    /// Memory that another process made with the same sizes.
    pub(crate) fn from_file(file: OwnedFd, words: usize, bytes: usize) -> io::Result<Self> {
        let (words, len) = Self::layout(words, bytes);
        let sealed = rustix::fs::fcntl_get_seals(&file)?.contains(Self::SEALS);
        if !sealed || rustix::fs::fstat(&file)?.st_size as u64 != len as u64 {
            return Err(io::Error::other("the peer's shared memory is not as agreed"));
        }
        Self::map(file, words, len)
    }

    /// Words in whole pages, so that what is behind them can be aligned, and bytes of all.
    fn layout(words: usize, bytes: usize) -> (usize, usize) {
        let page = rustix::param::page_size();
        let words = (words * 4).next_multiple_of(page) / 4;
        (words, words * 4 + bytes.next_multiple_of(page))
    }

    fn map(file: OwnedFd, words: usize, len: usize) -> io::Result<Self> {
        // SAFETY: a new mapping at an address of the kernel's choice aliases nothing. The file has `len` bytes and keeps them (sealed), so no access inside
        // the mapping can fault.
        let start = unsafe {
            rustix::mm::mmap(
                std::ptr::null_mut(),
                len,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED,
                &file,
                0,
            )?
        };
        let start = NonNull::new(start.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Self { start, len, words, file: Some(file) })
    }

    /// The file behind it, to pass to another process.
    ///
    /// # Panics
    ///
    /// If it was closed.
    pub(crate) fn file(&self) -> BorrowedFd<'_> {
        self.file.as_ref().expect("the file is closed only where nobody else maps it").as_fd()
    }

    /// Closes the file: the memory stays, and nobody else can map it.
    pub(crate) fn close_file(mut self) -> Self {
        self.file = None;
        self
    }

    /// How many bytes are behind the control words.
    pub(crate) fn bytes(&self) -> usize {
        self.len - self.words * 4
    }

    /// A control word.
    ///
    /// # Panics
    ///
    /// If there is no such word.
    pub(crate) fn word(&self, index: usize) -> &AtomicU32 {
        assert!(index < self.words);
        // SAFETY: inside the mapping, aligned (the mapping starts on a page), and by rule 2 only ever accessed atomically.
        unsafe { AtomicU32::from_ptr(self.start.as_ptr().cast::<u32>().add(index)) }
    }

    /// Copies into bytes that the caller owns by rule 3.
    ///
    /// # Panics
    ///
    /// If they do not lie in the region.
    pub(crate) fn write(&self, at: usize, source: &[u8]) {
        assert!(at <= self.bytes() && source.len() <= self.bytes() - at);
        // SAFETY: inside the mapping, checked above; `source` is private memory, so they do not overlap; nobody else accesses the bytes meanwhile (rule 3).
        unsafe {
            let target = self.start.as_ptr().add(self.words * 4 + at);
            std::ptr::copy_nonoverlapping(source.as_ptr(), target, source.len());
        }
    }

    /// Bytes that the caller owns by rule 3, for as long as the slice lives.
    ///
    /// # Panics
    ///
    /// If they do not lie in the region.
    pub(crate) fn read(&self, at: usize, len: usize) -> &[u8] {
        assert!(at <= self.bytes() && len <= self.bytes() - at);
        // SAFETY: inside the mapping, checked above, and initialised (the file is zero-filled); nobody writes to the bytes meanwhile (rule 3).
        unsafe { std::slice::from_raw_parts(self.start.as_ptr().add(self.words * 4 + at), len) }
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        // SAFETY: mapped in `new` with this length, and no borrow of it outlives `self`.
        let unmapped = unsafe { rustix::mm::munmap(self.start.as_ptr().cast(), self.len) };
        debug_assert!(unmapped.is_ok());
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::Ordering;

    use super::*;

    #[test]
    fn words_and_bytes_do_not_overlap() {
        let region = Region::new(3, 10).unwrap();
        for index in 0..region.words {
            region.word(index).store(u32::MAX, Ordering::Relaxed);
        }
        assert!(region.read(0, region.bytes()).iter().all(|byte| *byte == 0));
        region.write(0, &vec![7; region.bytes()]);
        assert!((0..region.words).all(|index| region.word(index).load(Ordering::Relaxed) == u32::MAX));
        assert!(region.read(0, region.bytes()).iter().all(|byte| *byte == 7));
    }

    #[test]
    #[should_panic(expected = "assertion failed")]
    fn writing_past_the_end_is_caught() {
        let region = Region::new(1, 10).unwrap();
        region.write(region.bytes() - 1, &[1, 2]);
    }

    #[test]
    #[should_panic(expected = "assertion failed")]
    fn reading_past_the_end_is_caught() {
        let region = Region::new(1, 10).unwrap();
        region.read(usize::MAX, 2);
    }
}
