//! Data parallelism for your own model and optimizer.

use farwire::{CodecChoice, Communicator};

use crate::compressed::{Compressed, groups};
use crate::error::TrainError;
use crate::exchange::{Exchange, ExchangeError, Reducer, Summary};
use crate::library::LibraryResult;
use crate::parameter_list::ParameterList;
use crate::phase_in::PhaseIn;

/// Bytes of a bucket: enough to keep a network busy, while several buckets overlap.
const BUCKET_BYTES: usize = 4 << 20;

/// Replicas of a model, one per rank: what the data parallelism of a tensor library builds on.
#[derive(Debug)]
pub struct Replicas {
    exchange: Exchange<Compressed>,
    names: Vec<String>,
    steps: u64,
}

impl Replicas {
    /// Checks that all ranks have the same parameters. Gradients of biases and norms are sent
    /// uncompressed, all others through the codec, with error feedback. For the codec `auto`, about
    /// a second of measuring decides.
    pub fn new(
        comm: &Communicator,
        plan: &ParameterList,
        codec: CodecChoice,
    ) -> Result<Self, TrainError> {
        plan.agree(comm)?;
        let codec = codec.settle(comm, comm)?;
        let groups = groups(plan, &codec);
        let exchange = Exchange::new(Compressed::new(comm, codec), plan, BUCKET_BYTES, &groups);
        let names = plan.entries().iter().map(|entry| entry.name.clone()).collect();
        Ok(Self { exchange, names, steps: 0 })
    }

    /// Phases the codec in.
    pub fn set_phase_in(&mut self, phase_in: PhaseIn) {
        self.exchange.reducer_mut().set_phase_in(phase_in);
    }

    /// One step: averages over all ranks what `gradient` gives for each name. The results are then
    /// in [`means`](Self::means).
    ///
    /// If a gradient of any rank holds a NaN or an infinity, or their sum overflows, all ranks get
    /// the same [`TrainError::NotFinite`], which says where it came from. Residuals are then as
    /// they were: all ranks can skip this step and go on with the next.
    pub fn average(
        &mut self,
        mut gradient: impl FnMut(&str) -> LibraryResult<Vec<f32>>,
    ) -> Result<Summary, TrainError> {
        let step = self.steps;
        self.exchange.reducer_mut().at_step(step);
        self.steps += 1;
        self.exchange.begin(1);
        for name in &self.names {
            self.exchange.add(name, &gradient(name)?)?;
        }
        self.exchange.finish().map_err(|error| match error {
            ExchangeError::NotFinite(found) => TrainError::NotFinite { step: step as usize, found },
            error => error.into(),
        })
    }

    /// The means of the last step, by name.
    pub fn means(&self) -> impl Iterator<Item = (&str, &[f32])> {
        let means = self.exchange.gradients();
        means.map(|(name, mean)| (name, mean.host().expect("replicas exchange in host memory")))
    }
}
