//! A codec of your own.
//!
//! Write how a vector becomes bytes and how bytes are added to a vector. The rest is done for you:
//! error feedback (what was not sent is the input minus what the codec decodes from its own
//! message) and checks for NaN. In an all-reduce every rank sends its message to every other, and
//! all of them add the messages in rank order.
//!
//! That is the short way. A codec that should travel in shards, as the named ones do, or that can
//! compute its residual faster, implements [`Codec`] and [`MessageCodec`] itself. With
//! [`CodecSpec::new`] it can be used wherever they are.
//!
//! ```
//! use farwire_codec::*;
//!
//! /// Sends every third element, another third each step.
//! #[derive(Debug)]
//! struct Thirds;
//!
//! fn third(place: &CodedPlace) -> impl Iterator<Item = usize> {
//!     (place.context.step as usize % 3..place.range.len()).step_by(3)
//! }
//!
//! impl VectorCodec for Thirds {
//!     fn name(&self) -> String {
//!         "thirds".into()
//!     }
//!
//!     fn encode(&self, values: &[f32], place: &CodedPlace, out: &mut Vec<u8>) {
//!         third(place).for_each(|i| out.extend(values[i].to_le_bytes()));
//!     }
//!
//!     fn add_decoded_into(&self, bytes: &[u8], place: &CodedPlace, acc: &mut [f32]) -> Result<(), DecodeError> {
//!         let need = 4 * third(place).count();
//!         if bytes.len() != need {
//!             return Err(DecodeError::Length { need, given: bytes.len() });
//!         }
//!         for (i, value) in third(place).zip(bytes.as_chunks::<4>().0) {
//!             acc[i] += f32::from_le_bytes(*value);
//!         }
//!         Ok(())
//!     }
//!
//!     fn max_message_len(&self, elements: usize) -> usize {
//!         4 * elements.div_ceil(3)
//!     }
//! }
//!
//! let codec = CodecSpec::custom(Thirds).messages().unwrap();
//! let place = CodedPlace::whole(Context::default(), 5);
//! let mut out = Encoded::default();
//! let gradient = [1.0f32, 2.0, 3.0, 4.0, 5.0];
//! codec.encode(&Job::worker(&gradient, Residual::Zero, &place, &[0..5]), &mut out).unwrap();
//! assert_eq!(out.residual, [0.0, 2.0, 3.0, 0.0, 5.0]);
//! let mut acc = [0.0; 5];
//! codec.add_decoded_into(&out.messages[0], &place, &mut acc).unwrap();
//! assert_eq!(acc, [1.0, 0.0, 0.0, 4.0, 0.0]);
//! ```

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use crate::codec::{Codec, MessageCodec, Travel};
use crate::error::{DecodeError, EncodeError};
use crate::job::{CodedPlace, Encoded, Fused, Job};
use crate::simd::{self, Level};
use crate::spec::CodecSpec;

/// What a codec of your own implements; see the [module](self) for an example.
pub trait VectorCodec: std::fmt::Debug + Send + Sync + 'static {
    /// A name that says everything ranks must agree on. They compare it before they exchange
    /// messages.
    fn name(&self) -> String;

    /// Appends the message for these finite values to `out`. It may depend on the values and the
    /// place only.
    fn encode(&self, values: &[f32], place: &CodedPlace, out: &mut Vec<u8>);

    /// Adds a message to `acc`, or refuses it. The bytes come from the network: check before you
    /// index or allocate.
    fn add_decoded_into(
        &self,
        bytes: &[u8],
        place: &CodedPlace,
        acc: &mut [f32],
    ) -> Result<(), DecodeError>;

    /// The most bytes [`encode`](Self::encode) appends for this many elements. Peers refuse longer
    /// messages.
    fn max_message_len(&self, elements: usize) -> usize;
}

impl CodecSpec {
    /// A codec of your own, with error feedback; see [`custom`](crate::custom).
    pub fn custom(codec: impl VectorCodec) -> Self {
        Self::new(Custom(codec))
    }
}

#[derive(Debug)]
struct Custom<C>(C);

impl<C: VectorCodec> Codec for Custom<C> {
    fn name(&self) -> String {
        self.0.name()
    }

    fn travels(self: Arc<Self>) -> Travel {
        Travel::Whole(self)
    }
}

impl<C: VectorCodec> MessageCodec for Custom<C> {
    fn encode(&self, job: &Job<'_>, out: &mut Encoded) -> Result<(), EncodeError> {
        job.check();
        out.resize(job.shards.len(), job.place.range.len());
        let level = Level::detect();
        let first = job.place.range.start;
        Fused::new(level, job).read(0, &mut out.residual)?;
        let mut decoded = Vec::new();
        for (shard, message) in job.shards.iter().zip(&mut out.messages) {
            let values = &mut out.residual[shard.start - first..shard.end - first];
            let place = job.place.part(shard.clone());
            message.clear();
            let encode = || {
                self.0.encode(values, &place, message);
                Ok(())
            };
            guarded(encode).map_err(EncodeError::OwnMessage)?;
            let (need, given) = (self.0.max_message_len(values.len()), message.len());
            if given > need {
                // Peers would refuse it.
                return Err(EncodeError::OwnMessage(DecodeError::Length { need, given }));
            }
            decoded.clear();
            decoded.resize(values.len(), 0.0);
            guarded(|| self.0.add_decoded_into(message, &place, &mut decoded))
                .map_err(EncodeError::OwnMessage)?;
            simd::sub_scaled(level, values, &decoded, 1.0);
        }
        out.finish(job.residual);
        Ok(())
    }

    fn add_decoded_into(
        &self,
        bytes: &[u8],
        place: &CodedPlace,
        acc: &mut [f32],
    ) -> Result<(), DecodeError> {
        guarded(|| self.0.add_decoded_into(bytes, place, acc))
    }

    fn max_message_len(&self, elements: usize) -> usize {
        self.0.max_message_len(elements)
    }
}

/// Runs foreign code. A panic in it becomes an error like any other, since other ranks wait for
/// this one.
fn guarded<T>(work: impl FnOnce() -> Result<T, DecodeError>) -> Result<T, DecodeError> {
    catch_unwind(AssertUnwindSafe(work)).unwrap_or(Err(DecodeError::Field("panic")))
}
