//! Writing a long result once, without reading what it replaces.
//!
//! A plain store to a line that is not in a cache first reads the line, so a pass that reads two
//! vectors and writes a third moves a third more than it must. Streaming stores avoid this. They
//! only pay off for vectors so long that no part of them would still be in a cache at the next
//! read.

use std::marker::PhantomData;

use super::{Level, Set};

/// Vectors of more elements than this are streamed.
const LONG: usize = 1 << 21;

/// Writes the tiles of a vector. The tiles stay borrowed until this is dropped; by then every
/// thread can see all of them.
#[derive(Debug)]
pub(crate) struct Stream<'a> {
    /// Where a tile is made before it is streamed; `None` if it is made in place.
    tile: Option<Vec<f32>>,
    written: PhantomData<&'a mut [f32]>,
}

impl<'a> Stream<'a> {
    /// For a vector of `len` elements in tiles of at most `tile`.
    pub(crate) fn new(level: Level, len: usize, tile: usize) -> Self {
        let streams = len > LONG && level.0 != Set::Portable;
        Self { tile: streams.then(|| vec![0.0; tile]), written: PhantomData }
    }

    /// Lets `make` write all of `out`, whose old contents mean nothing.
    pub(crate) fn write<R>(&mut self, out: &'a mut [f32], make: impl FnOnce(&mut [f32]) -> R) -> R {
        let Some(tile) = &mut self.tile else { return make(out) };
        let tile = &mut tile[..out.len()];
        let result = make(tile);
        #[cfg(target_arch = "x86_64")]
        // SAFETY: there is a tile only at a level that has AVX2.
        unsafe {
            copy(tile, out);
        }
        result
    }
}

impl Drop for Stream<'_> {
    fn drop(&mut self) {
        #[cfg(target_arch = "x86_64")]
        if self.tile.is_some() {
            // SAFETY: every x86-64 processor has this instruction.
            unsafe { std::arch::x86_64::_mm_sfence() };
        }
    }
}

/// `out = values` by streaming stores. The caller must fence before `out` is used: [`Stream`] does.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn copy(values: &[f32], out: &mut [f32]) {
    use std::arch::x86_64::{_mm256_loadu_ps, _mm256_stream_ps};

    assert_eq!(values.len(), out.len());
    // Streaming stores need whole lines.
    let head = out.as_ptr().align_offset(64).min(out.len());
    let (start, out) = out.split_at_mut(head);
    let (values_start, values) = values.split_at(head);
    start.copy_from_slice(values_start);
    let (lines, rest) = out.as_chunks_mut::<16>();
    let (values, values_rest) = values.as_chunks::<16>();
    for (line, values) in lines.iter_mut().zip(values) {
        // SAFETY: both are 16 floats long, and `head` elements were left out so that each line
        // starts at a multiple of 64 bytes.
        unsafe {
            _mm256_stream_ps(line.as_mut_ptr(), _mm256_loadu_ps(values.as_ptr()));
            _mm256_stream_ps(line.as_mut_ptr().add(8), _mm256_loadu_ps(values.as_ptr().add(8)));
        }
    }
    rest.copy_from_slice(values_rest);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn streamed_and_plain_tiles_are_the_same() {
        for level in Level::all() {
            for (skip, len) in [(0, 1000), (1, 1000), (3, 5), (15, 64), (16, 0), (7, 17)] {
                let values: Vec<f32> = (0..len).map(|i| i as f32).collect();
                for total in [len, LONG + 1] {
                    let mut out = vec![-1.0; skip + len + 20];
                    Stream::new(level, total, 1000)
                        .write(&mut out[skip..skip + len], |tile| tile.copy_from_slice(&values));
                    assert_eq!(out[skip..skip + len], values);
                    assert!(out[..skip].iter().chain(&out[skip + len..]).all(|x| *x == -1.0));
                }
            }
        }
    }
}
