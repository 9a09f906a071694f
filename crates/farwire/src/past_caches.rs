//! Copies that bypass the caches.
//!
//! An ordinary store brings its cache line in from memory first, and pushes another one out. A
//! streaming store does neither. If what is written is not read again soon, that leaves memory a
//! third less to do; and on a host whose cores are all copying, memory is what they wait for.

#![allow(unsafe_code, reason = "the processor's streaming stores")]

/// Bytes of a cache line.
const LINE: usize = 64;
/// Fewer bytes than these are not worth the fence that follows them.
#[cfg(target_arch = "x86_64")]
const LEAST: usize = 64 * LINE;

/// Copies a slice into another of the same length, past the caches where the processor can.
pub(crate) fn copy(target: &mut [u8], source: &[u8]) {
    #[cfg(target_arch = "x86_64")]
    if target.len() >= LEAST {
        return stream(target, source);
    }
    target.copy_from_slice(source);
}

#[cfg(target_arch = "x86_64")]
fn stream(target: &mut [u8], source: &[u8]) {
    use std::arch::x86_64::{__m128i, _mm_loadu_si128, _mm_sfence, _mm_stream_si128};

    assert_eq!(target.len(), source.len(), "a copy is as long as what is copied");
    let to_line = target.as_ptr().align_offset(LINE).min(target.len());
    let (first, target) = target.split_at_mut(to_line);
    let (from_first, source) = source.split_at(to_line);
    first.copy_from_slice(from_first);
    let (lines, last) = target.as_chunks_mut::<LINE>();
    let (from_lines, from_last) = source.as_chunks::<LINE>();
    last.copy_from_slice(from_last);
    for (line, from) in lines.iter_mut().zip(from_lines) {
        let line: *mut __m128i = line.as_mut_ptr().cast();
        let from: *const __m128i = from.as_ptr().cast();
        for part in 0..LINE / size_of::<__m128i>() {
            // SAFETY: `part` is one of the four parts of each of the two lines. The target's first
            // line is aligned to a line, and so are those behind it; loads need no alignment. Every
            // x86-64 processor has these instructions.
            unsafe { _mm_stream_si128(line.add(part), _mm_loadu_si128(from.add(part))) };
        }
    }
    // SAFETY: every x86-64 processor has it. Nobody touches the lines before this fence, which
    // streaming stores require.
    unsafe { _mm_sfence() };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_copies_what_an_ordinary_copy_does_and_nothing_else() {
        let source: Vec<u8> = (0..20_000u32).map(|k| (k % 251) as u8).collect();
        for len in [0, 1, 63, 64, 4095, 4096, 4097, 4159, 4160, 8192, 9999] {
            for (from, to) in [(0, 0), (1, 0), (0, 1), (63, 64), (17, 33), (64, 7)] {
                let mut ours = vec![255u8; len + 200];
                let mut theirs = ours.clone();
                copy(&mut ours[to..to + len], &source[from..from + len]);
                theirs[to..to + len].copy_from_slice(&source[from..from + len]);
                assert_eq!(ours, theirs, "{len} bytes from {from} to {to}");
            }
        }
    }

    #[test]
    #[should_panic(expected = "a copy is as long")]
    fn slices_of_other_lengths_are_refused() {
        copy(&mut [0; 5000], &[0; 4999]);
    }
}
