//! Gradient compressors, error feedback, and the wire coding of sparse and quantised vectors.
//!
//! This crate turns vectors into bytes and adds bytes to vectors. Its only IO is saving and loading
//! error feedback. It reads no clock, and uses only the threads that a call asks for. The
//! collectives that move the bytes are built on top of it.
//!
//! The path of a gradient through the crate:
//!
//! 1. A [`CodecSpec`] names a codec, such as `topk:0.01`; [`CODECS`] lists all named codecs.
//!    [`Codec`] says what a codec must answer.
//! 2. [`ErrorFeedback::begin`] opens a [`Transaction`] on what is owed for the tensor.
//! 3. [`MessageCodec::encode`] adds what is owed to the gradient, and makes one message per shard
//!    and the new residual.
//! 4. [`MessageCodec::add_decoded_into`] adds a message to an accumulator. A shard's owner adds one
//!    from each rank, in rank order, then encodes the sum as an owner; every rank decodes that
//!    message.
//! 5. [`Transaction::commit`] replaces the old residual with the new one.
//!
//! To write a codec of your own, see [`custom`]. Top-k, sign and PowerSGD need error feedback to
//! train at all; the others do better with it.
//!
//! Small, one-dimensional and normalisation parameters are better left dense. An optimiser that
//! keeps second moments (Adam) sees sparse updates through a sparse codec; some dense steps at the
//! start help it.
//!
//! An allreduce of three ranks, in memory:
//!
//! ```
//! use farwire_codec::*;
//!
//! let codec = "topk:count=2,values=f32".parse::<CodecSpec>().unwrap().messages().unwrap();
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
//! Words used throughout: a *shard* is the part of a vector that a rank owns; a *message* is one
//! encoded shard; the *residual* is what error feedback still owes; to *keep* an element is to send
//! it.

#![deny(unsafe_code)]

#[cfg(target_endian = "big")]
compile_error!("farwire sends memory as it is, and its wire format is little-endian");

mod codec;
mod codecs;
pub mod collective;
pub mod custom;
mod dense;
#[doc(hidden)]
pub mod device;
mod error;
mod feedback;
mod index;
mod job;
mod kept;
mod rng;
mod simd;
mod spec;
mod threads;

pub use codec::{Codec, CodecFamily, MessageCodec, Travel};
pub use codecs::block::{BlockQuantiser, Format, Rounding};
pub use codecs::cast::Cast;
pub use codecs::identity::Identity;
pub use codecs::powersgd::{PowerP, PowerQ, PowerSgd, PowerState, Shape};
pub use codecs::randk::RandomK;
pub use codecs::sign::Sign;
#[doc(hidden)]
pub use codecs::topk::add_at;
pub use codecs::topk::{Keep, OwnerMode, Share, TopK};
pub use codecs::{CODECS, samples, typical};
pub use custom::VectorCodec;
pub use error::{DecodeError, EncodeError};
pub use feedback::{
    ErrorFeedback, FeedbackError, Norms, Owed, Piece, ResidualElsewhere, Savepoint, Transaction,
};
pub use job::{CodedPlace, Context, Encoded, Job, Residual, Role, Values};
pub use kept::ValueCoding;
pub use spec::{CodecSpec, SpecError};
