//! Random numbers as a function of where they are used, so that every rank can draw the same ones.
//!
//! There is no state to keep in step: the number at `index` depends on the [`Context`], the purpose
//! and the index alone (SplitMix64 with the key as its start; a 32-bit mixer where eight or sixteen
//! lanes draw at once).

use crate::job::Context;

/// What a stream of numbers is for: streams of different purposes are independent.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Purpose {
    /// Which elements random-k keeps.
    Sample = 1,
    /// The signs of a random rotation.
    Rotation = 2,
    /// Stochastic rounding.
    Rounding = 3,
    /// The first guess of PowerSGD.
    WarmStart = 4,
}

/// A stream of random numbers with random access.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Counter {
    key: u64,
}

impl Counter {
    /// The stream for one purpose in one context.
    pub(crate) fn new(context: Context, purpose: Purpose) -> Self {
        let fields = [context.step, context.tensor, purpose as u64];
        Self {
            key: fields
                .into_iter()
                .fold(mix(context.seed ^ GOLDEN), |key, field| mix(key ^ mix(field))),
        }
    }

    /// A stream of its own for each `n`.
    pub(crate) fn split(self, n: u64) -> Self {
        Self { key: mix(self.key ^ mix(!n)) }
    }

    /// 64 random bits.
    pub(crate) fn at(self, index: u64) -> u64 {
        mix(self.key.wrapping_add(index.wrapping_add(1).wrapping_mul(GOLDEN)))
    }

    /// A number below `bound`, uniform to within `bound` / 2⁶⁴.
    pub(crate) fn below(self, index: u64, bound: u64) -> u64 {
        ((u128::from(self.at(index)) * u128::from(bound)) >> 64) as u64
    }

    /// A sample of the standard normal distribution, as approximated by a sum of twelve uniform
    /// ones.
    pub(crate) fn normal(self, index: u64) -> f32 {
        let uniform =
            |k: u64| (self.at(index * 3 + k / 4) >> (16 * (k % 4)) & 0xffff) as f32 / 65536.0;
        (0..12).map(uniform).sum::<f32>() - 6.0
    }

    /// The key itself, for kernels that draw numbers themselves.
    pub(crate) fn key(self) -> u64 {
        self.key
    }

    /// The key of the 32-bit mixer that kernels use.
    pub(crate) fn key32(self) -> u32 {
        (self.key >> 32) as u32
    }
}

const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;

fn mix(mut x: u64) -> u64 {
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// 32 random bits for element `index` of the stream `key`.
#[inline(always)]
pub(crate) fn mix32(key: u32, index: u32) -> u32 {
    let mut x = index.wrapping_mul(0x9e37_79b9) ^ key;
    x = (x ^ (x >> 16)).wrapping_mul(0x7feb_352d);
    x = (x ^ (x >> 15)).wrapping_mul(0x846c_a68b);
    x ^ (x >> 16)
}

/// A number in [0, 1) for element `index` of the stream `key`.
#[inline(always)]
pub(crate) fn unit32(key: u32, index: u32) -> f32 {
    // 23 bits: exact in f32, and below one after any addition to a small integer.
    (mix32(key, index) >> 9) as i32 as f32 * (1.0 / 8_388_608.0)
}
