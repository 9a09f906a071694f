//! A piece of shared memory.
//!
//! # Rules of access
//!
//! 1. A region is mapped when it is made and unmapped when its last handle is dropped. It never
//!    moves and never changes its length: the file behind it is sealed against both. So no access
//!    inside it can fault, whatever the other process does.
//! 2. Control words (at the start of the region) are accessed as atomics only. Any value may be
//!    found there; `slots.rs` checks each before it is used.
//! 3. The bytes behind them have one owner at a time. [`Memory::write`] and [`Memory::read`] are
//!    `unsafe`, and it is the owner's handle, `slots::Slot`, that entitles to them. Nothing else
//!    calls them.
//! 4. Within one process this is sound. A *process* at the other end could still write to a slot
//!    that it does not own, and no check here can see that. It is an authenticated member of the
//!    job and runs this code, so that would be a bug, not an attack. What such a bug can do is
//!    bounded:
//!    - Whatever is decoded or used as a length or an index (headers, news of failures) is first
//!      copied out by [`Memory::copy_out`], which reads each byte once and is sound while others
//!      write.
//!    - Only payloads are read in place, as `&[u8]`. They go to arithmetic, for which all bytes are
//!      numbers, and to plain copies; nothing branches on them. By the letter, such a slice must
//!      not change while it lives, and a peer that changes it has left what the language defines;
//!      in machine code it garbles sums and copies, and the ranks' results. Reading payloads as
//!      atomics would settle the letter at the price of every vector instruction of the reduction.

#![allow(unsafe_code, reason = "shared memory; see the rules above")]

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering};

use rustix::fs::{MemfdFlags, SealFlags};
use rustix::mm::{MapFlags, ProtFlags};

use super::slots::Memory;
use farwire_proto::team::{self, Teamed};

/// Shared memory: control words, then bytes.
#[derive(Debug)]
pub(crate) struct Region {
    start: NonNull<u8>,
    len: usize,
    words: usize,
    /// `None` once it is no longer needed.
    file: Option<OwnedFd>,
}

// SAFETY: by rule 2 control words are atomics, and by rule 3 bytes have one owner at a time, on
// whatever thread.
unsafe impl Send for Region {}
// SAFETY: as above.
unsafe impl Sync for Region {}

impl Region {
    const BLOCK: usize = 4096;

    /// What keeps the file as long as it is, so that no access inside a mapping of it can fault.
    const SEALS: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW).union(SealFlags::SEAL);

    /// New memory, all zero, with at least `words` control words and `bytes` bytes behind them.
    pub(crate) fn new(words: usize, bytes: usize) -> io::Result<Self> {
        let (words, len) = Self::layout(words, bytes);
        let file =
            rustix::fs::memfd_create("farwire", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
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

    /// The number of words, in whole blocks of 4 KiB so that what is behind them can be aligned,
    /// and the length of everything. It does not go by the machine's page size: the mapping starts
    /// on a page, whatever its size, and may end within one.
    fn layout(words: usize, bytes: usize) -> (usize, usize) {
        let words = (words * 4).next_multiple_of(Self::BLOCK) / 4;
        (words, words * 4 + bytes.next_multiple_of(Self::BLOCK))
    }

    fn map(file: OwnedFd, words: usize, len: usize) -> io::Result<Self> {
        // SAFETY: a new mapping at an address of the kernel's choice aliases nothing. The file has
        // `len` bytes and keeps them (sealed), so no access inside the mapping can fault.
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

    /// Where in the file the bytes start.
    #[cfg(test)]
    pub(crate) fn offset(&self) -> u64 {
        self.words as u64 * 4
    }

    /// The address of `len` bytes that lie `at` bytes behind the control words.
    ///
    /// # Panics
    ///
    /// If they do not all lie in the region.
    fn place(&self, at: usize, len: usize) -> *mut u8 {
        assert!(at <= self.bytes() && len <= self.bytes() - at);
        self.start.as_ptr().wrapping_add(self.words * 4 + at)
    }
}

impl Memory for Region {
    type Word = AtomicU32;

    fn word(&self, index: usize) -> &AtomicU32 {
        assert!(index < self.words);
        // SAFETY: inside the mapping, aligned (the mapping starts on a page), and by rule 2 only
        // ever accessed atomically.
        unsafe { AtomicU32::from_ptr(self.start.as_ptr().cast::<u32>().add(index)) }
    }

    unsafe fn write(&self, at: usize, source: &[u8], team: Teamed) {
        let target = self.place(at, source.len());
        // SAFETY: inside the mapping, checked by `place`, and initialised (the file is
        // zero-filled). The caller owns these bytes alone, and `source` is not among them.
        let target = unsafe { std::slice::from_raw_parts_mut(target, source.len()) };
        team::copy(team, target, source);
    }

    unsafe fn read(&self, at: usize, len: usize) -> &[u8] {
        let start = self.place(at, len);
        // SAFETY: inside the mapping, checked by `place`, and initialised (the file is
        // zero-filled). That nobody writes to the bytes meanwhile is the caller's promise.
        unsafe { std::slice::from_raw_parts(start, len) }
    }

    fn copy_out(&self, at: usize, target: &mut [u8]) {
        let start = self.place(at, target.len());
        let (head, tail) =
            target.split_at_mut(if at.is_multiple_of(8) { target.len() / 8 * 8 } else { 0 });
        for (k, word) in head.as_chunks_mut::<8>().0.iter_mut().enumerate() {
            // SAFETY: inside the mapping. Aligned: the bytes start on a page, and `at` is a
            // multiple of eight wherever `head` has any. Atomic, so sound whatever others do.
            let atomic = unsafe { AtomicU64::from_ptr(start.add(8 * k).cast()) };
            *word = atomic.load(Ordering::Relaxed).to_ne_bytes();
        }
        for (k, byte) in tail.iter_mut().enumerate() {
            // SAFETY: as above; a byte is always aligned.
            *byte =
                unsafe { AtomicU8::from_ptr(start.add(head.len() + k)) }.load(Ordering::Relaxed);
        }
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
    use super::*;

    fn all(region: &Region) -> Vec<u8> {
        let mut bytes = vec![1; region.bytes()];
        region.copy_out(0, &mut bytes);
        // SAFETY: nobody else has this region.
        assert_eq!(unsafe { region.read(0, region.bytes()) }, bytes);
        bytes
    }

    #[test]
    fn words_and_bytes_do_not_overlap() {
        let region = Region::new(3, 10).unwrap();
        for index in 0..region.words {
            region.word(index).store(u32::MAX, Ordering::Relaxed);
        }
        assert!(all(&region).iter().all(|byte| *byte == 0));
        // SAFETY: nobody else has this region.
        unsafe { region.write(0, &vec![7; region.bytes()], None) };
        assert!(
            (0..region.words).all(|index| region.word(index).load(Ordering::Relaxed) == u32::MAX)
        );
        assert!(all(&region).iter().all(|byte| *byte == 7));
    }

    #[test]
    fn bytes_are_copied_out_from_and_to_any_place() {
        let region = Region::new(1, 100).unwrap();
        let bytes: Vec<u8> = (0..100).collect();
        // SAFETY: nobody else has this region.
        unsafe { region.write(0, &bytes, None) };
        for (at, len) in (0..20).flat_map(|at| (0..40).map(move |len| (at, len))) {
            let mut copy = vec![0; len];
            region.copy_out(at, &mut copy);
            assert_eq!(copy, bytes[at..at + len]);
        }
    }

    #[test]
    #[should_panic(expected = "assertion failed")]
    fn writing_past_the_end_is_caught() {
        let region = Region::new(1, 10).unwrap();
        // SAFETY: nobody else has this region.
        unsafe { region.write(region.bytes() - 1, &[1, 2], None) };
    }

    #[test]
    #[should_panic(expected = "assertion failed")]
    fn reading_past_the_end_is_caught() {
        let region = Region::new(1, 10).unwrap();
        // SAFETY: nobody else has this region.
        unsafe { region.read(usize::MAX, 2) };
    }

    #[test]
    #[should_panic(expected = "assertion failed")]
    fn copying_from_past_the_end_is_caught() {
        let region = Region::new(1, 10).unwrap();
        region.copy_out(region.bytes() - 8, &mut [0; 9]);
    }
}
