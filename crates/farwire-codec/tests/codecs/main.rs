//! Every codec against plain references, in memory. `FARWIRE_LONG=1` runs the long forms;
//! `FARWIRE_MUTATIONS=n` decodes `n` mutated messages per codec.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod budgets;
mod conservation;
mod convergence;
mod golden;
mod hostile;
mod noise;
mod oracle;
mod world;

use std::sync::Arc;

use farwire_codec::*;

/// What makes a codec's messages; `None` if it has no messages.
pub(crate) fn messages(text: &str) -> Option<Arc<dyn MessageCodec>> {
    text.parse::<CodecSpec>().unwrap().messages()
}

pub(crate) fn all_messages() -> impl Iterator<Item = (&'static str, Arc<dyn MessageCodec>)> {
    samples().filter_map(|text| Some((text, messages(text)?)))
}

pub(crate) fn long() -> bool {
    std::env::var("FARWIRE_LONG").is_ok_and(|value| value == "1")
}

/// A plain generator, not the crate's own.
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn bits(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    pub(crate) fn below(&mut self, bound: usize) -> usize {
        (self.bits() >> 32) as usize % bound
    }

    pub(crate) fn uniform(&mut self) -> f64 {
        (self.bits() >> 11) as f64 / (1u64 << 53) as f64
    }

    /// A sample of the standard normal distribution (Box and Muller).
    pub(crate) fn normal(&mut self) -> f32 {
        let (u, v) = (1.0 - self.uniform(), self.uniform());
        ((-2.0 * u.ln()).sqrt() * (std::f64::consts::TAU * v).cos()) as f32
    }

    pub(crate) fn normals(&mut self, len: usize) -> Vec<f32> {
        (0..len).map(|_| self.normal()).collect()
    }
}
