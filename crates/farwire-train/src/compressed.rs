//! Buckets through a codec.

#[cfg(feature = "cuda")]
use farwire::Error;
use farwire::{
    CodecPolicy, CodecSpec, Communicator, Compressor, DType, ErrorFeedback, Pending, ReduceOp,
};

use crate::exchange::{Bucket, DENSE, Reducer};
use crate::memory::Memory;
use crate::parameter_list::{Entry, ParameterList};
use crate::phase_in::PhaseIn;
use crate::rules::Rules;

/// Tensors of fewer elements are sent uncompressed: a codec would cost more time than it saves.
pub const DENSE_BELOW: usize = 1024;

/// Exchanges buckets through a codec with error feedback, except those of the group [`DENSE`].
///
/// What a codec leaves out is kept as a residual, by parameter name.
#[derive(Debug)]
pub struct Compressed {
    group: Communicator,
    policy: CodecPolicy,
    compressor: Compressor,
    phase_in: PhaseIn,
    step: u64,
    #[cfg(feature = "cuda")]
    card: Option<farwire_cuda::DeviceCommunicator>,
}

impl Compressed {
    /// Exchanges between the ranks of `group`.
    pub fn new(group: &Communicator, policy: CodecPolicy) -> Self {
        let compressor = Compressor::by_size(policy.clone()).dense_below(DENSE_BELOW);
        Self {
            group: group.clone(),
            policy,
            compressor,
            phase_in: PhaseIn::default(),
            step: 0,
            #[cfg(feature = "cuda")]
            card: None,
        }
    }

    /// The same, for buckets in `memory`. Residuals of buckets on a card stay on the card.
    #[must_use]
    pub fn on(self, memory: &Memory) -> Self {
        match memory {
            Memory::Host => self,
            #[cfg(feature = "cuda")]
            Memory::Card(training) => {
                let card = farwire_cuda::DeviceCommunicator::new(&self.group, training.device());
                Self { card: Some(card), ..self }
            }
        }
    }

    /// Phases the codec in from now on. All ranks must set the same.
    pub fn set_phase_in(&mut self, phase_in: PhaseIn) {
        self.phase_in = phase_in;
    }

    /// The codec for a bucket in this step.
    fn codec(&self, bucket: &Bucket) -> CodecSpec {
        if bucket.group == DENSE || bucket.len() < DENSE_BELOW {
            return CodecSpec::none();
        }
        let codec = self.policy.codec_for(bucket.len(), DType::F32);
        self.phase_in.codec_at(self.step, codec, bucket.len())
    }
}

impl Reducer for Compressed {
    fn group(&self) -> &Communicator {
        &self.group
    }

    fn at_step(&mut self, step: u64) {
        self.step = step;
    }

    fn start(&mut self, bucket: &Bucket, data: Vec<f32>) -> Pending<Vec<f32>> {
        let compressor = self.compressor(bucket);
        self.group.all_reduce_compressed(&bucket.name, data, ReduceOp::Mean, &compressor)
    }

    #[cfg(feature = "cuda")]
    fn start_on_card(&mut self, bucket: &Bucket, data: farwire_cuda::DeviceTensor) -> Pending<()> {
        let compressor = self.compressor(bucket);
        match &self.card {
            Some(card) => {
                card.all_reduce_compressed(&bucket.name, data, ReduceOp::Mean, &compressor)
            }
            None => {
                let error = std::io::Error::other("the reducer was made for host memory");
                Pending::failed(Error::System { what: "could not use the card", error })
            }
        }
    }

    fn density(&self, bucket: &Bucket) -> f64 {
        self.codec(bucket).density(bucket.len())
    }

    fn feedback(&self) -> Option<&ErrorFeedback> {
        self.compressor.feedback()
    }

    fn restore(&mut self, feedback: ErrorFeedback) {
        self.compressor = self.compressor.clone().with_feedback(feedback);
    }
}

impl Compressed {
    /// The compressor for a bucket in this step.
    fn compressor(&self, bucket: &Bucket) -> Compressor {
        // A random choice must not depend on how many calls came before, or a resumed run would
        // choose differently.
        let compressor = self.compressor.at_step(self.step).with_codec(self.codec(bucket));
        match &bucket.parts[..] {
            [part] => compressor.shaped(&part.shape),
            _ => compressor,
        }
    }
}

/// Biases and norms have few elements and matter much, so they are sent uncompressed. So are
/// parameters too small for a codec, which can then share buckets.
pub(crate) fn groups(plan: &ParameterList, codec: &CodecPolicy) -> Rules<String> {
    let dense = || DENSE.to_owned();
    let is_small = |entry: &&Entry| {
        let elements = entry.shape.iter().product();
        elements < DENSE_BELOW || codec.codec_for(elements, DType::F32).is_none()
    };
    let rules = Rules::new(codec.to_string()).on("*.bias", dense()).on("*norm*", dense());
    plan.entries()
        .iter()
        .filter(is_small)
        .fold(rules, |rules, entry| rules.on(&entry.name[..], dense()))
}
