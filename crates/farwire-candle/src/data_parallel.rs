//! Data parallelism for a model of one's own.

use candle_core::backprop::GradStore;
use candle_core::{Device, Result, Tensor, Var};
use farwire::{CodecChoice, CodecPolicy, Communicator, DType};
use farwire_train::{
    Compressed, DENSE, DENSE_BELOW, Entry, Exchange, ExchangeError, ParameterList, PhaseIn, Rules, Summary,
};

use crate::error::TrainError;

/// Replicas of a model, one per rank: the same weights at the start, the same gradients at every step.
///
/// It takes a model's variables by name (for a `VarMap`, those of `varmap.data()`), gives every rank the weights of rank 0, and then, between a model's backward and its
/// optimizer, makes every gradient the mean over all ranks.
pub struct DataParallel {
    vars: Vec<(String, Var)>,
    exchange: Exchange<Compressed>,
    steps: u64,
}

/// Bytes of a bucket: enough to fill a network, and several of them to overlap.
pub(crate) const BUCKET_BYTES: usize = 4 << 20;

impl DataParallel {
    /// Checks that all ranks have the same variables, and gives them rank 0's values. Gradients of biases and norms travel as they are, the others through the codec, with error
    /// feedback. The codec `auto` is chosen by measuring, for about a second.
    pub fn new(
        comm: &Communicator,
        vars: impl IntoIterator<Item = (String, Var)>,
        codec: CodecChoice,
    ) -> std::result::Result<Self, TrainError> {
        let mut vars: Vec<(String, Var)> = vars.into_iter().collect();
        vars.sort_by(|(a, _), (b, _)| a.cmp(b));
        let plan = plan(vars.iter().map(|(name, var)| (&name[..], var)))?;
        plan.agree(comm)?;
        broadcast(comm, vars.iter().map(|(_, var)| var))?;
        let codec = codec.settle(comm, comm)?;
        let groups = groups(&plan, &codec);
        let exchange = Exchange::new(Compressed::new(comm, codec), &plan, BUCKET_BYTES, &groups);
        Ok(Self { vars, exchange, steps: 0 })
    }

    /// Lets the codec begin gently: recommended for sparse ones ([`PhaseIn::over`]). Their gradients are sums over many steps already, so choose little momentum for them (for Adam, a β₁ near 0).
    #[must_use]
    pub fn with_phase_in(mut self, phase_in: PhaseIn) -> Self {
        self.exchange.reducer_mut().set_phase_in(phase_in);
        self
    }

    /// Makes every variable's gradient the mean over all ranks. A variable without one is an error.
    ///
    /// If a gradient of any rank holds a NaN or an infinity, or their sum overflows, all ranks get the
    /// same [`TrainError::NotFinite`], which says where it came from. Gradients are then as they were,
    /// and so is what error feedback owes: all ranks can leave this step out and go on with the next.
    pub fn average(&mut self, gradients: &mut GradStore) -> std::result::Result<Summary, TrainError> {
        // Before anything is sent: what one rank lacks must not leave a step half done.
        if let Some((name, _)) = self.vars.iter().find(|(_, var)| gradients.get(var).is_none()) {
            return Err(TrainError::NoGradient(name.clone()));
        }
        let step = self.steps;
        farwire_train::Reducer::at_step(self.exchange.reducer_mut(), step);
        self.steps += 1;
        self.exchange.begin(1);
        for (name, var) in &self.vars {
            let gradient = gradients.get(var).ok_or_else(|| TrainError::NoGradient(name.clone()))?;
            self.exchange.add(name, &gradient.flatten_all()?.to_vec1::<f32>()?)?;
        }
        let summary = self.exchange.finish().map_err(|error| match error {
            ExchangeError::NotFinite(found) => TrainError::NotFinite { step: step as usize, found },
            error => error.into(),
        })?;
        let means = self.exchange.gradients().map(|(name, mean)| {
            let at = self.vars.binary_search_by(|(other, _)| other[..].cmp(name));
            (at.expect("the exchange was made of these variables"), mean)
        });
        for (at, mean) in means {
            let var = &self.vars[at].1;
            gradients.insert(var, Tensor::from_slice(mean, var.shape(), &Device::Cpu)?);
        }
        Ok(summary)
    }
}

impl std::fmt::Debug for DataParallel {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("DataParallel").field("vars", &self.vars.len()).finish_non_exhaustive()
    }
}

/// Biases and norms are few and matter much: they travel as they are. So do parameters too small for a codec, which can then share buckets.
pub(crate) fn groups(plan: &ParameterList, codec: &CodecPolicy) -> Rules<String> {
    let dense = || DENSE.to_owned();
    let is_small = |entry: &&Entry| {
        let elements = entry.shape.iter().product();
        elements < DENSE_BELOW || codec.codec_for(elements, DType::F32).is_none()
    };
    let rules = Rules::new(codec.to_string()).on("*.bias", dense()).on("*norm*", dense());
    plan.entries().iter().filter(is_small).fold(rules, |rules, entry| rules.on(&entry.name[..], dense()))
}

pub(crate) fn plan<'a>(
    vars: impl IntoIterator<Item = (&'a str, &'a Var)>,
) -> std::result::Result<ParameterList, TrainError> {
    let entries = vars.into_iter().map(|(name, var)| Entry {
        name: name.to_owned(),
        shape: var.dims().to_vec(),
        dtype: var.dtype().as_str().to_owned(),
    });
    Ok(ParameterList::new(entries)?)
}

/// Sets variables to what the group's rank 0 has.
pub(crate) fn broadcast<'a>(
    comm: &Communicator,
    vars: impl IntoIterator<Item = &'a Var>,
) -> std::result::Result<(), TrainError> {
    if comm.size() == 1 {
        return Ok(());
    }
    for var in vars {
        let mine = if comm.rank() == 0 { Some(values(var)?) } else { None };
        let data = comm.broadcast(mine, var.elem_count(), 0).wait()?;
        set(var, &data)?;
    }
    Ok(())
}

pub(crate) fn values(var: &Var) -> Result<Vec<f32>> {
    var.flatten_all()?.to_vec1()
}

pub(crate) fn set(var: &Var, data: &[f32]) -> Result<()> {
    var.set(&Tensor::from_slice(data, var.shape(), &Device::Cpu)?)
}
