//! Where the instruction set matters. This module and its files are the only ones with `unsafe`.
//!
//! Rules:
//! 1. A [`Level`] above portable exists only where [`Level::detect`] found the instructions: nobody
//!    outside this module can make one. Calling a function compiled for a level is `unsafe` for no
//!    other reason, so holding the level is what makes the call sound.
//! 2. All levels give the same bits. Most kernels are one safe body compiled once per level, which
//!    settles it: Rust never contracts or reorders float arithmetic. Those with a hand-written body
//!    have a portable twin and a test against it.
//! 3. Sums have a fixed order: lane `i % 16`, then the lanes pairwise.
//! 4. A function that loads or stores by pointer checks that this stays inside its slice or array,
//!    in release builds too: by the type (`as_chunks`), or by an assertion once per tile or block,
//!    whose cost is nothing beside the work on it.

#![allow(unsafe_code)]

mod kernels;
mod rice;
mod select;
mod stream;

pub(crate) use kernels::*;
pub(crate) use rice::{decode_gaps, nth_one};
pub(crate) use select::{Found, TILE, compress};
pub(crate) use stream::Stream;

/// The instructions to use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Level(Set);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Set {
    /// What every machine of this architecture has.
    Portable,
    /// AVX2 and the bit instructions that came with it.
    #[cfg(target_arch = "x86_64")]
    Avx2,
    /// AVX-512 F, BW, DQ and VL.
    #[cfg(target_arch = "x86_64")]
    Avx512,
}

impl Level {
    /// What every machine of this architecture has.
    #[cfg(test)]
    pub(crate) const PORTABLE: Self = Self(Set::Portable);

    /// The best this machine has.
    pub(crate) fn detect() -> Self {
        #[cfg(target_arch = "x86_64")]
        {
            let avx2 = std::is_x86_feature_detected!("avx2")
                && std::is_x86_feature_detected!("bmi1")
                && std::is_x86_feature_detected!("bmi2")
                && std::is_x86_feature_detected!("popcnt")
                && std::is_x86_feature_detected!("lzcnt");
            let avx512 = avx2
                && std::is_x86_feature_detected!("avx512f")
                && std::is_x86_feature_detected!("avx512bw")
                && std::is_x86_feature_detected!("avx512dq")
                && std::is_x86_feature_detected!("avx512vl");
            if avx512 {
                return Self(Set::Avx512);
            }
            if avx2 {
                return Self(Set::Avx2);
            }
        }
        Self(Set::Portable)
    }

    /// Every level this machine has.
    #[cfg(test)]
    pub(crate) fn all() -> Vec<Self> {
        let sets = match Self::detect().0 {
            Set::Portable => vec![Set::Portable],
            #[cfg(target_arch = "x86_64")]
            Set::Avx2 => vec![Set::Portable, Set::Avx2],
            #[cfg(target_arch = "x86_64")]
            Set::Avx512 => vec![Set::Portable, Set::Avx2, Set::Avx512],
        };
        sets.into_iter().map(Self).collect()
    }
}

/// Fetches the cache line of an element that will be used soon into the second-level cache.
#[inline(always)]
pub(crate) fn prefetch<T>(elements: &[T], index: usize) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};
        let line = elements.as_ptr().wrapping_add(index);
        // SAFETY: a prefetch may be given any address; it never faults.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(line.cast()) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (elements, index);
}

/// Defines a function whose safe body is compiled once for each [`Level`].
macro_rules! kernel {
    ($(#[$meta:meta])* fn $name:ident($($arg:ident: $type:ty),* $(,)?) $(-> $result:ty)? $body:block) => {
        $(#[$meta])*
        pub(crate) fn $name(level: $crate::simd::Level, $($arg: $type),*) $(-> $result)? {
            #[inline(always)]
            fn body($($arg: $type),*) $(-> $result)? $body
            #[cfg(target_arch = "x86_64")]
            {
                #[target_feature(enable = "avx2,bmi1,bmi2,popcnt,lzcnt")]
                fn avx2($($arg: $type),*) $(-> $result)? {
                    body($($arg),*)
                }
                #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,bmi1,bmi2,popcnt,lzcnt")]
                fn avx512($($arg: $type),*) $(-> $result)? {
                    body($($arg),*)
                }
                match level.0 {
                    // SAFETY: rule 1, the level is proof that the instructions are there.
                    $crate::simd::Set::Avx512 => return unsafe { avx512($($arg),*) },
                    // SAFETY: as above.
                    $crate::simd::Set::Avx2 => return unsafe { avx2($($arg),*) },
                    $crate::simd::Set::Portable => {}
                }
            }
            let _ = level;
            body($($arg),*)
        }
    };
}
pub(crate) use kernel;
