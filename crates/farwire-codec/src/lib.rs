//! Gradient compressors, error feedback, and the wire coding of sparse and quantised vectors.
//!
//! No IO, no clocks, no threads but those a call borrows. A collective above this crate moves the bytes.

#![deny(unsafe_code)]

#[cfg(target_endian = "big")]
compile_error!("farwire sends memory as it is, and its wire format is little-endian");

mod block;
mod cast;
pub mod custom;
mod dense;
mod error;
pub mod exchange;
mod feedback;
mod identity;
mod index;
mod job;
mod kept;
mod powersgd;
mod randk;
mod rng;
mod sign;
mod simd;
mod spec;
mod threads;
mod topk;

pub use block::{BlockQuantiser, Format, Rounding};
pub use cast::Cast;
pub use custom::{Codec, Opaque};
pub use error::{DecodeError, EncodeError};
pub use feedback::{ErrorFeedback, FeedbackError, Norms, Owed, Transaction};
pub use identity::Identity;
pub use job::{Context, Encoded, Job, Partitioned, Place, Residual, Role, Values};
pub use kept::ValueCoding;
pub use powersgd::{PowerP, PowerQ, PowerSgd, PowerState, Shape};
pub use randk::RandomK;
pub use sign::Sign;
pub use spec::{CodecSpec, Plan, SpecError};
pub use topk::{Keep, OwnerMode, Share, TopK};
