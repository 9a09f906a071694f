//! Every codec against plain references, in memory. `FARWIRE_LONG=1` runs the long forms, `FARWIRE_MUTATIONS=n`
//! decodes so many mutated messages.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod budgets;
mod conservation;
mod convergence;
mod golden;
mod hostile;
mod noise;
mod oracle;
mod world;

use farwire_codec::*;

/// One of each kind, and of each option that changes the code that runs.
pub(crate) const ALL: [&str; 24] = [
    "none",
    "bf16",
    "f16",
    "topk:0.01",
    "topk:0.05,values=f32",
    "topk:0.01,values=int8",
    "topk:0.02,mode=union",
    "topk:0.02,values=int8,mode=union",
    "topk:count=3",
    "topk:1",
    "topk:2/64",
    "topk:5/100,values=int8",
    "randk:0.01",
    "randk:0.1,values=f32,seed=9",
    "int8",
    "int8,block=16,rounding=stochastic",
    "int8,rotate=on",
    "int4",
    "int4,rotate=on,block=64",
    "int4,rotate=on,rounding=stochastic",
    "fp8",
    "fp8,rounding=stochastic,rotate=on",
    "sign",
    "powersgd:2",
];

pub(crate) fn partitioned(text: &str) -> Option<Box<dyn MessageCodec>> {
    match text.parse::<CodecSpec>().unwrap().plan() {
        Plan::Partitioned(codec) => Some(codec),
        Plan::LowRank(_) => None,
    }
}

pub(crate) fn all_partitioned() -> impl Iterator<Item = (&'static str, Box<dyn MessageCodec>)> {
    ALL.into_iter().filter_map(|text| Some((text, partitioned(text)?)))
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
