//! Gradient compressors, error feedback, and the wire coding of sparse and quantised vectors.
//!
//! This crate turns vectors into bytes and adds bytes to vectors. It does no IO but to save error feedback, reads no clock, and uses no
//! threads but those a call asks for. The collectives that move the bytes are built on top of it.
//!
//! The path of a gradient through the crate:
//!
//! 1. A [`CodecSpec`] names a codec, `topk:0.01`, and [`plan`](CodecSpec::plan) makes it.
//! 2. [`ErrorFeedback::begin`] takes what is owed for the tensor into a [`Transaction`].
//! 3. [`MessageCodec::encode`] adds that to the gradient, and makes one message per shard and the new residual.
//! 4. [`MessageCodec::add_decoded_into`] adds a message to an accumulator. A shard's owner adds one from each rank, in rank order, then
//!    encodes the sum as an owner; everybody decodes that.
//! 5. [`Transaction::commit`] makes the new residual the one that is owed.
//!
//! | codec | file | bits per element of the vector | error feedback |
//! |---|---|---|---|
//! | `none` | `identity.rs` | 32 | nothing to feed back |
//! | `bf16`, `f16` | `cast.rs` | 16 | optional |
//! | `topk:0.01` | `topk.rs` | 0.24, of which 0.08 for indices | required |
//! | `randk:0.01` | `randk.rs` | 0.16 | recommended |
//! | `int8`, `fp8`, `int4` | `block.rs` | 8.13, 8.13, 4.06 | recommended |
//! | `sign` | `sign.rs` | 1.01 | required |
//! | `powersgd:4` | `powersgd.rs` | 32·r·(m + n)/(m·n) | required |
//! | your own | [`custom`] | | yes |
//!
//! Small, one-dimensional and normalisation parameters are better left dense. An optimiser that keeps second moments (Adam) sees sparse
//! updates through a sparse codec; some dense steps at the start help it.
//!
//! An allreduce of three ranks, in memory:
//!
//! ```
//! use farwire_codec::*;
//!
//! let Plan::Partitioned(codec) = "topk:count=2,values=f32".parse::<CodecSpec>().unwrap().plan() else { unreachable!() };
//! let gradients = [[1.0f32, 0.0, 5.0, 0.5], [2.0, 0.25, -4.0, 0.0], [3.0, 0.0, 0.0, 8.0]];
//! let place = CodedPlace::whole(Context { seed: 1, step: 0, tensor: Context::tensor_id("w") }, 4);
//! let shards = [0..2, 2..3, 3..4];
//!
//! // Every rank encodes its gradient. (The first step owes nothing.)
//! let sent = gradients.map(|gradient| {
//!     let mut out = Encoded::default();
//!     codec.encode(&Job::worker(&gradient, Residual::Zero, &place, &shards), &mut out).unwrap();
//!     out
//! });
//! assert_eq!(sent[0].residual, [0.0, 0.0, 0.0, 0.5]);
//!
//! // Each owner adds up its shard in rank order and encodes the sum; everybody decodes it.
//! let mut result = [0.0f32; 4];
//! for (owner, shard) in shards.iter().enumerate() {
//!     let part = place.part(shard.clone());
//!     let mut sum = vec![0.0; shard.len()];
//!     for rank in &sent {
//!         codec.add_decoded_into(&rank.messages[owner], &part, &mut sum).unwrap();
//!     }
//!     let mut out = Encoded::default();
//!     codec.encode(&Job::owner(&sum, Residual::Zero, &part), &mut out).unwrap();
//!     codec.add_decoded_into(&out.messages[0], &part, &mut result[shard.clone()]).unwrap();
//! }
//! assert_eq!(result, [6.0, 0.0, 1.0, 8.0]);
//! ```
//!
//! Words used throughout: a *shard* is what a rank owns of a vector; a *message* is one shard, coded; the *residual* is what error feedback still
//! owes; to *keep* an element is to send it.

#![deny(unsafe_code)]

#[cfg(target_endian = "big")]
compile_error!("farwire sends memory as it is, and its wire format is little-endian");

mod block;
mod cast;
pub mod collective;
pub mod custom;
mod dense;
mod error;
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
pub use feedback::{ErrorFeedback, FeedbackError, Norms, Owed, Savepoint, Transaction};
pub use identity::Identity;
pub use job::{CodedPlace, Context, Encoded, Job, MessageCodec, Residual, Role, Values};
pub use kept::ValueCoding;
pub use powersgd::{PowerP, PowerQ, PowerSgd, PowerState, Shape};
pub use randk::RandomK;
pub use sign::Sign;
pub use spec::{CodecSpec, Plan, SpecError};
#[doc(hidden)]
pub use topk::add_at;
pub use topk::{Keep, OwnerMode, Share, TopK};
