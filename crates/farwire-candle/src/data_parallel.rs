//! Data parallelism for your own model.

use candle_core::backprop::GradStore;
use candle_core::{Tensor, Var};
use farwire::{CodecChoice, Communicator};
use farwire_train::{Entry, ParameterList, PhaseIn, Replicas, Summary, TrainError};

use crate::params::{set, values};

/// Replicas of a model, one per rank: the same weights at the start, the same gradients at every
/// step.
///
/// It takes a model's variables by name (for a `VarMap`, those of `varmap.data()`), gives every
/// rank the weights of rank 0, and then, between a model's backward and its optimizer, makes every
/// gradient the mean over all ranks.
pub struct DataParallel {
    vars: Vec<(String, Var)>,
    replicas: Replicas,
}

impl DataParallel {
    /// Checks that all ranks have the same variables, and gives them rank 0's values. Gradients of
    /// biases and norms are sent uncompressed, all others through the codec, with error feedback.
    /// For the codec `auto`, about a second of measuring decides.
    pub fn new(
        comm: &Communicator,
        vars: impl IntoIterator<Item = (String, Var)>,
        codec: CodecChoice,
    ) -> Result<Self, TrainError> {
        let mut vars: Vec<(String, Var)> = vars.into_iter().collect();
        vars.sort_by(|(a, _), (b, _)| a.cmp(b));
        let plan = ParameterList::new(vars.iter().map(|(name, var)| Entry {
            name: name.clone(),
            shape: var.dims().to_vec(),
            dtype: var.dtype().as_str().to_owned(),
        }))?;
        let replicas = Replicas::new(comm, &plan, codec)?;
        for (_, var) in &vars {
            let mine = if comm.rank() == 0 { Some(values(var).map_err(library)?) } else { None };
            let first = comm.broadcast(mine, var.elem_count(), 0).wait()?;
            set(var, &first).map_err(library)?;
        }
        Ok(Self { vars, replicas })
    }

    /// Phases the codec in, which is recommended for sparse codecs ([`PhaseIn::over`]). Their
    /// gradients are sums over many steps already, so choose little momentum for them (for Adam, a
    /// β₁ near 0).
    #[must_use]
    pub fn with_phase_in(mut self, phase_in: PhaseIn) -> Self {
        self.replicas.set_phase_in(phase_in);
        self
    }

    /// Makes every variable's gradient the mean over all ranks. A variable without one is an error.
    ///
    /// If a gradient of any rank holds a NaN or an infinity, or their sum overflows, all ranks get
    /// the same [`TrainError::NotFinite`], which says where it came from. Gradients are then as
    /// they were, and so are the residuals of error feedback: all ranks can skip this step and go
    /// on with the next.
    pub fn average(&mut self, gradients: &mut GradStore) -> Result<Summary, TrainError> {
        // Before anything is sent: a gradient that one rank lacks must not leave a step half done.
        if let Some((name, _)) = self.vars.iter().find(|(_, var)| gradients.get(var).is_none()) {
            return Err(no_gradient(name));
        }
        let (vars, replicas) = (&self.vars, &mut self.replicas);
        let var = |name: &str| {
            let at = vars.binary_search_by(|(other, _)| other[..].cmp(name));
            &vars[at.expect("the replicas were made of these variables")].1
        };
        let summary = replicas.average(|name| {
            let gradient = gradients.get(var(name)).ok_or_else(|| no_gradient(name))?;
            Ok(values(gradient)?)
        })?;
        for (name, mean) in replicas.means() {
            let var = var(name);
            let mean = Tensor::from_slice(mean, var.shape(), var.device()).map_err(library)?;
            gradients.insert(var, mean);
        }
        Ok(summary)
    }
}

fn no_gradient(name: &str) -> TrainError {
    TrainError::NoGradient(name.to_owned())
}

fn library(error: candle_core::Error) -> TrainError {
    TrainError::Library(error.into())
}

impl std::fmt::Debug for DataParallel {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("DataParallel").field("vars", &self.vars.len()).finish_non_exhaustive()
    }
}
