//! Everybody's message to everybody: the all-reduce of codecs known only to decode what they
//! encode, and every all-gather.
//!
//! One round. Every rank adds the messages in rank order, its own among them. Bytes per rank: (N−1)
//! times the coded vector.

use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;

use super::{Common, Kind, Made, Nonsense, Trouble, residual, scale, seal, unseal};
use crate::codec::MessageCodec;
use crate::job::{CodedPlace, Encoded, Job, Role};

#[derive(Debug)]
pub(super) struct AllToAll {
    codec: Arc<dyn MessageCodec>,
    what: What,
    own: Bytes,
}

#[derive(Debug)]
enum What {
    /// All vectors are added up.
    Sum { count: usize, mean: bool },
    /// Each rank's vector has its own place in the result.
    Gather(Vec<Range<usize>>),
}

impl AllToAll {
    pub(super) fn sum(codec: Arc<dyn MessageCodec>, count: usize, mean: bool) -> Self {
        Self { codec, what: What::Sum { count, mean }, own: Bytes::new() }
    }

    pub(super) fn gather(codec: Arc<dyn MessageCodec>, blocks: Vec<Range<usize>>) -> Self {
        Self { codec, what: What::Gather(blocks), own: Bytes::new() }
    }

    pub(super) fn longest(&self) -> usize {
        let longest = match &self.what {
            What::Sum { count, .. } => *count,
            What::Gather(blocks) => blocks.iter().map(ExactSizeIterator::len).max().unwrap_or(0),
        };
        self.codec.max_message_len(longest)
    }

    pub(super) fn next(
        &mut self,
        round: u32,
        common: &mut Common,
    ) -> Option<Result<Made, Trouble>> {
        let (rank, context, host) = (common.rank, common.context, common.vectors.host());
        let len = host.input.len();
        let whole = 0..len;
        let owed = host.coding.owed(whole.clone());
        let mut encoded = Encoded { residual: host.coding.buffer(len), ..Encoded::default() };
        let job = Job {
            values: host.input.values(0..len),
            residual: residual(owed.as_ref()),
            place: CodedPlace::whole(context, len),
            role: Role::Worker,
            rank: rank.0,
            shards: std::slice::from_ref(&whole),
            threads: host.coding.threads,
        };
        Some(match self.codec.encode(&job, &mut encoded) {
            Err(error) => Err(common.fail_encode(round, error, Kind::Input, 0)),
            Ok(()) => {
                if let Some(feedback) = &mut host.coding.feedback {
                    feedback.set_worker(0, encoded.residual);
                }
                self.own = seal(encoded.messages.swap_remove(0));
                Ok(Made::Same(self.own.clone()))
            }
        })
    }

    pub(super) fn came(
        &mut self,
        round: u32,
        messages: &[&[u8]],
        common: &mut Common,
    ) -> Result<(), Nonsense> {
        let (me, world, context) = (common.rank, common.world, common.context);
        let output = &mut common.vectors.host().output;
        let len = match &self.what {
            What::Sum { count, .. } => *count,
            What::Gather(blocks) => blocks.last().map_or(0, |last| last.end),
        };
        output.resize(len, 0.0);
        for from in world.ranks() {
            let message = if from == me { unseal(&self.own) } else { messages[from.index()] };
            // The buffer's contents mean nothing, so the first message for an element is written,
            // not added.
            let (out, first) = match &self.what {
                What::Sum { .. } => (&mut output[..], from.index() == 0),
                What::Gather(blocks) => (&mut output[blocks[from.index()].clone()], true),
            };
            let place = CodedPlace::whole(context, out.len());
            let decoded = match first {
                true => self.codec.decode_into(message, &place, out),
                false => self.codec.add_decoded_into(message, &place, out),
            };
            decoded.map_err(|why| Nonsense { from, round, why })?;
        }
        if let What::Sum { mean, .. } = self.what {
            scale(output, mean, world);
        }
        Ok(())
    }
}
