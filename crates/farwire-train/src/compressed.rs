//! Buckets through a codec.

use farwire::{CodecPolicy, Communicator, Compressor, ErrorFeedback, Pending, ReduceOp};

use crate::exchange::{Bucket, DENSE, Reducer};

/// Tensors of fewer elements travel as they are: a codec would cost them more time than it saves.
pub const DENSE_BELOW: usize = 1024;

/// Exchanges buckets through a codec with error feedback, except those of the group [`DENSE`], and all of them in the first steps.
///
/// What a codec leaves out is remembered by parameter name. Under Adam the first steps decide the scale of the second moment; a few dense ones keep sparse updates from
/// spoiling it.
#[derive(Debug)]
pub struct Compressed {
    group: Communicator,
    compressor: Compressor,
    dense_steps: u64,
    step: u64,
}

impl Compressed {
    /// Exchanges between the ranks of `group`, dense in the first `dense_steps` steps.
    pub fn new(group: &Communicator, codec: CodecPolicy, dense_steps: u64) -> Self {
        let compressor = Compressor::by_size(codec).dense_below(DENSE_BELOW);
        Self { group: group.clone(), compressor, dense_steps, step: 0 }
    }
}

impl Reducer for Compressed {
    fn at_step(&mut self, step: u64) {
        self.step = step;
    }

    fn start(&mut self, bucket: &Bucket, data: Vec<f32>) -> Pending<Vec<f32>> {
        if bucket.group == DENSE || self.step < self.dense_steps {
            return self.group.all_reduce(data, ReduceOp::Mean);
        }
        // A random choice must not depend on how many calls came before, or a resumed run would choose differently.
        let compressor = self.compressor.at_step(self.step);
        let compressor = match &bucket.parts[..] {
            [part] => compressor.shaped(&part.shape),
            _ => compressor,
        };
        self.group.all_reduce_compressed(&bucket.name, data, ReduceOp::Mean, &compressor)
    }

    fn feedback(&self) -> Option<&ErrorFeedback> {
        self.compressor.feedback()
    }

    fn restore(&mut self, feedback: ErrorFeedback) {
        self.compressor = self.compressor.clone().with_feedback(feedback);
    }
}
