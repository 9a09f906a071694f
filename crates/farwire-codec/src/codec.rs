//! The questions that farwire asks of a codec. Each file in `codecs/` answers them, and so can
//! yours.
//!
//! | question | asked by | answer |
//! |---|---|---|
//! | what is it called? | people, and ranks that compare | [`Codec::name`], [`CodecFamily`] |
//! | which bytes? | the collectives | [`MessageCodec`], by way of [`Codec::travels`] |
//! | who sends what to whom? | the collectives | [`Codec::travels`] |
//! | how many bytes? | buffers, `--help` | [`MessageCodec::max_message_len`], [`expected_len`](MessageCodec::expected_len) |
//! | how does training begin? | the phase-in | [`Codec::trains_like_dense`], [`Codec::with_density`] |

use std::any::Any;
use std::fmt::Debug;
use std::sync::Arc;

use crate::codecs::powersgd::PowerSgd;
use crate::error::{DecodeError, EncodeError};
use crate::job::{CodedPlace, Encoded, Job};
use crate::spec::{CodecSpec, Params};

/// A codec with its parameters.
///
/// It is the same on every rank and has no state: what it owes is in the residual that the caller
/// keeps (see [`ErrorFeedback`](crate::ErrorFeedback)).
pub trait Codec: Any + Debug + Send + Sync {
    /// The text that parses to this codec; options at their default are left out. It contains
    /// everything that ranks must agree on: they compare it before they exchange messages.
    fn name(&self) -> String;

    /// How a vector travels, and what encodes it. Nearly always `Travel::Shards(self)`.
    fn travels(self: Arc<Self>) -> Travel;

    /// The fraction of a vector's elements that one message carries: 1 unless the codec leaves
    /// elements out.
    fn density(&self, elements: usize) -> f64 {
        let _ = elements;
        1.0
    }

    /// The same codec with another density, in (0, 1]; `None` if the codec leaves no elements out.
    ///
    /// With this, a run can start by sending many elements and end by sending few.
    fn with_density(&self, density: f64) -> Option<CodecSpec> {
        let _ = density;
        None
    }

    /// Whether training goes as well as without the codec, so that a run may use it from the first
    /// step.
    fn trains_like_dense(&self) -> bool {
        false
    }
}

/// How a codec's bytes travel in an all-reduce.
#[derive(Clone, Debug)]
pub enum Travel {
    /// Shards go to their owners, and the owners' sums to every rank. Bytes per rank do not grow
    /// with the number of ranks.
    Shards(Arc<dyn MessageCodec>),
    /// Every rank's whole vector goes to every other rank.
    Whole(Arc<dyn MessageCodec>),
    /// As two factors of a matrix, each summed as plain f32.
    Factors(PowerSgd),
}

/// Turns vectors into messages and adds messages to vectors.
pub trait MessageCodec: Debug + Send + Sync {
    /// Encodes each shard of `job` to a message of its own, and leaves in `out` what was not sent:
    /// `residual = values + old residual − decoded`, exactly as f32 arithmetic gives it.
    ///
    /// Pass the same `out` again to reuse its buffers. After an error its contents mean nothing.
    fn encode(&self, job: &Job<'_>, out: &mut Encoded) -> Result<(), EncodeError>;

    /// Adds the message for `place` to `acc`, which has one element for each of `place.range`.
    ///
    /// `bytes` must be exactly one whole message. It comes from the network, so every length, count
    /// and index is checked before it is used.
    fn add_decoded_into(
        &self,
        bytes: &[u8],
        place: &CodedPlace,
        acc: &mut [f32],
    ) -> Result<(), DecodeError>;

    /// Like [`add_decoded_into`](Self::add_decoded_into), but takes all of `acc` for zero, whatever
    /// it holds.
    fn decode_into(
        &self,
        bytes: &[u8],
        place: &CodedPlace,
        acc: &mut [f32],
    ) -> Result<(), DecodeError> {
        acc.fill(0.0);
        self.add_decoded_into(bytes, place, acc)
    }

    /// Like [`decode_into`](Self::decode_into), then divides every element by `by`, as for a mean.
    ///
    /// The result is the same to the bit as dividing after [`decode_into`](Self::decode_into). A
    /// codec that knows which elements are zero need not touch them again.
    fn decode_divided_into(
        &self,
        bytes: &[u8],
        place: &CodedPlace,
        acc: &mut [f32],
        by: f32,
    ) -> Result<(), DecodeError> {
        self.decode_into(bytes, place, acc)?;
        acc.iter_mut().for_each(|value| *value /= by);
        Ok(())
    }

    /// The most bytes a message for a range of this many elements can have. Peers refuse longer
    /// ones.
    fn max_message_len(&self, elements: usize) -> usize;

    /// Bytes that a vector of this many elements usually takes.
    fn expected_len(&self, elements: usize) -> usize {
        self.max_message_len(elements)
    }

    /// Whether elements are coded one by one or in small blocks. If so, a long vector is cut into
    /// chunks, and one is encoded while another travels.
    fn is_local(&self) -> bool {
        false
    }
}

/// A line of the [registry](crate::CODECS): the codecs that share one parser.
#[derive(Debug)]
pub struct CodecFamily {
    /// What people type, up to a colon or a comma.
    pub names: &'static [&'static str],
    /// Every form that parses, for help texts and errors.
    pub forms: &'static str,
    /// What is sent, in a few words.
    pub help: &'static str,
    /// Forms that people use: benchmarks measure these, and tests run them.
    pub typical: &'static [&'static str],
    /// More forms for tests: they cover each option that changes which code runs.
    pub corners: &'static [&'static str],
    pub(crate) parse: fn(&mut Params<'_>) -> Result<CodecSpec, String>,
}
