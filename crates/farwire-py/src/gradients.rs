//! The gradients of a training step, bucket by bucket, from frameworks that cut buckets themselves.
//!
//! What is owed is kept by parameter name, so a framework may cut its buckets anew in every step.
//! Parameters of a bucket that travel uncompressed travel together: in place if they are the whole
//! bucket. Each of the others goes through its codec alone.
//!
//! ```text
//!  begin_step ─ bucket ─ bucket ─ … ─ all have ended ─ end_step ─┬─ all is finite: it counts
//!                                                                └─ a NaN: nothing is paid
//! ```
//!
//! Optimizers skip a step with a NaN or an infinity in it. So its result is not finite on any rank,
//! and what is owed for all its buckets is as it was before the step.

use std::any::Any;
use std::collections::VecDeque;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use farwire::codec::collective::Floats;
use farwire::{
    CodecChoice, CodecPolicy, CodecSpec, Communicator, Compressor, DType, ErrorFeedback, Float,
    Memory, Pending, ReduceOp, Savepoint, Transaction,
};
use farwire_train::{DENSE_BELOW, PhaseIn, Rules};
#[cfg(feature = "cuda")]
use pyo3::IntoPyObjectExt;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::comm::{Comm, interruptible, with_float};
use crate::compressor::{self, choice};
use crate::failure::Failure;
#[cfg(feature = "cuda")]
use crate::memory::CardView;
use crate::memory::{Divided, View};
use crate::operation::{Operation, Work, poll};
use crate::process::Mine;

/// How a parameter is exchanged.
#[derive(Clone)]
struct Way {
    policy: CodecPolicy,
    phase_in: PhaseIn,
    /// Whether a rule asked for it by parameter name, rather than for all parameters.
    named: bool,
}

/// Gradients by parameter name, and what is owed for them.
#[pyclass(frozen, module = "farwire._native")]
pub(crate) struct Gradients {
    inner: Mine<Arc<Inner>>,
}

struct Inner {
    ways: Rules<Way>,
    /// Whether any parameter can go through a codec, so that something can be owed.
    compresses: bool,
    raise_on_nan: bool,
    step: Mutex<Step>,
    #[cfg(feature = "cuda")]
    cards: crate::card::Cards,
}

struct Step {
    compressor: Compressor,
    number: u64,
    /// What was owed before the step; kept until the step has ended.
    before: Option<Savepoint>,
    /// Whether a result is not finite, or a bucket has failed.
    spoilt: bool,
}

/// A parameter's place in a bucket.
#[derive(Clone, Debug, FromPyObject)]
pub(crate) struct Part(String, usize, usize, Vec<usize>);

impl Part {
    fn name(&self) -> &str {
        &self.0
    }

    fn range(&self) -> Range<usize> {
        self.1..self.1 + self.2
    }
}

impl Inner {
    fn step(&self) -> MutexGuard<'_, Step> {
        self.step.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The codec for a parameter in this step: the same on all ranks.
    fn codec(&self, part: &Part, step: u64, dtype: DType) -> CodecSpec {
        let Part(name, _, elements, shape) = part;
        let way = self.ways.of(name);
        // Biases and norms are small and matter a lot.
        if *elements < DENSE_BELOW || (shape.len() < 2 && !way.named) {
            return CodecSpec::none();
        }
        way.phase_in.codec_at(step, way.policy.codec_for(*elements, dtype), *elements)
    }

    /// Adds what is owed for parameters that travel uncompressed in this step.
    fn pay<T: Float>(
        &self,
        step: &Step,
        dense: &[Part],
        memory: &mut Memory<T>,
    ) -> Vec<Transaction> {
        let feedback = step.compressor.feedback().filter(|_| self.compresses);
        let owing = |feedback: &ErrorFeedback| {
            let dense = dense.iter().filter(|part| feedback.owes(part.name()));
            dense.filter_map(|part| pay(feedback, part, memory)).collect()
        };
        feedback.map(owing).unwrap_or_default()
    }

    fn start<T: Float + Unpin>(
        self: &Arc<Self>,
        comm: &Communicator,
        parts: Vec<Part>,
        mut memory: Memory<T>,
        unused: bool,
    ) -> Bucket<T> {
        let step = self.step();
        let flags = unused.then(|| {
            let used = |part: &Part| memory[part.range()].iter().any(|x| x.as_f64() != 0.0);
            let used = parts.iter().map(|part| u8::from(used(part))).collect();
            comm.all_reduce(used, ReduceOp::Max)
        });
        let codec = |part: &Part| self.codec(part, step.number, T::DTYPE);
        let (dense, coded): (Vec<Part>, Vec<Part>) =
            parts.iter().cloned().partition(|part| codec(part).is_none());
        let debts = self.pay(&step, &dense, &mut memory);
        let mut bucket = Bucket::new(self, parts, debts, flags);
        if coded.is_empty() {
            bucket.whole = Some(comm.in_place().all_reduce(memory, ReduceOp::Mean));
            return bucket;
        }
        if !dense.is_empty() {
            let together = dense.iter().flat_map(|part| memory[part.range()].iter().copied());
            let together = together.collect();
            bucket.dense = Some((comm.all_reduce(together, ReduceOp::Mean), dense));
        }
        // In f32, the mean replaces the gradient in the bucket. But where hosts have several ranks,
        // only separate vectors can be added up on each host first.
        let mut place = match comm.split_placement() {
            None => same(memory).map(Divided::new),
            Some(_) => Err(memory),
        };
        for part in coded {
            let (name, compressor) = (part.name(), step.compressor_for(&part));
            let (codec, op) = (codec(&part), ReduceOp::Mean);
            let pending = match &mut place {
                Ok(divided) => {
                    let gradient = divided.part(part.range());
                    let in_place = comm.in_place();
                    let mean = in_place.all_reduce_coded(name, gradient, op, codec, &compressor);
                    Coded::There(mean)
                }
                Err(memory) => {
                    let (data, compressor) =
                        (memory[part.range()].to_vec(), compressor.with_codec(codec));
                    Coded::Apart(comm.all_reduce_compressed(name, data, op, &compressor))
                }
            };
            bucket.coded.push_back((pending, part));
        }
        match place {
            Ok(divided) => bucket.divided = Some(divided),
            Err(memory) => bucket.memory = Some(memory),
        }
        bucket
    }
}

impl Step {
    /// The compressor for a parameter in this step, with what is owed for it.
    fn compressor_for(&self, part: &Part) -> Compressor {
        self.compressor.at_step(self.number).shaped(&part.3)
    }
}

/// A value of type `A` as a `B`, if the two are the same type.
fn same<A: 'static, B: 'static>(value: A) -> Result<B, A> {
    let value: Box<dyn Any> = Box::new(value);
    value.downcast().map(|same| *same).map_err(|other| *other.downcast().expect("its own type"))
}

/// Gradients on a card.
#[cfg(feature = "cuda")]
impl Inner {
    /// Starts a bucket on a card. `memory` has the gradients that travel uncompressed, one after
    /// the other. `used` says for each part whether this rank has a gradient; it is given if
    /// possibly no rank has one. An error says why the card cannot be used; nothing has happened
    /// then.
    fn start_on_card<T: Float + Unpin>(
        self: &Arc<Self>,
        comm: &Communicator,
        parts: Vec<Part>,
        card: CardView,
        memory: Option<Memory<T>>,
        used: Option<Vec<u8>>,
    ) -> Result<(Bucket<T>, Arc<Mutex<Outcome>>), String> {
        use farwire_cuda::{DeviceCommunicator, ValueType};
        let type_ = match T::DTYPE {
            DType::F32 => ValueType::F32,
            DType::F16 => ValueType::F16,
            DType::Bf16 => ValueType::Bf16,
            other => return Err(format!("no codec takes {other} there")),
        };
        let step = self.step();
        let codec = |part: &Part| self.codec(part, step.number, T::DTYPE);
        let (mut dense, coded): (Vec<Part>, Vec<Part>) =
            parts.iter().cloned().partition(|part| codec(part).is_none());
        let tools = self.cards.tools(card.ordinal()).map_err(|error| error.to_string())?;
        for part in &coded {
            tools.prepare(&codec(part), type_).map_err(|error| error.to_string())?;
        }
        let comm = DeviceCommunicator::with_tools(comm, &tools);
        let mut end = 0;
        for part in &mut dense {
            (part.1, end) = (end, end + part.2);
        }
        let mut memory = memory.filter(|_| end > 0);
        if memory.as_ref().map_or(0, |memory| memory.len()) != end {
            return Err(format!("{end} elements travel as they are, and others were staged"));
        }
        // From here on all ranks make the same calls, in the order of `start`.
        let flags = used.map(|used| comm.host().all_reduce(used, ReduceOp::Max));
        let debts =
            memory.as_mut().map(|memory| self.pay(&step, &dense, memory)).unwrap_or_default();
        let mut bucket = Bucket::new(self, parts, debts, flags);
        if let Some(memory) = &memory {
            let together = comm.host().all_reduce(memory.to_vec(), ReduceOp::Mean);
            bucket.dense = Some((together, dense.clone()));
        }
        let gradients = card.parts(type_, coded.iter().map(Part::range));
        for (part, gradient) in coded.into_iter().zip(gradients) {
            let compressor = step.compressor_for(&part).with_codec(codec(&part));
            let (name, op) = (part.name(), ReduceOp::Mean);
            let pending = comm.all_reduce_compressed(name, gradient, op, &compressor);
            bucket.coded.push_back((Coded::There(pending), part));
        }
        let outcome = Arc::<Mutex<Outcome>>::default();
        bucket.memory = memory;
        bucket.on_card = Some(OnCard { dense, outcome: outcome.clone() });
        Ok((bucket, outcome))
    }
}

impl OnCard {
    fn outcome(&self) -> MutexGuard<'_, Outcome> {
        self.outcome.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Adds what is owed for a parameter to its gradient, which will travel uncompressed.
fn pay<T: Float>(
    feedback: &ErrorFeedback,
    part: &Part,
    memory: &mut Memory<T>,
) -> Option<Transaction> {
    let mut transaction = feedback.begin(part.name()).ok()?;
    let gradient = &mut memory[part.range()];
    let mut sums = floats(gradient);
    if !transaction.pay(&mut sums, true) {
        return None; // the gradient is not finite, and what is owed stays owed
    }
    match &sums {
        Floats::F32(sums) => gradient.copy_from_slice(bytemuck::cast_slice(sums)),
        Floats::F64(sums) => gradient.copy_from_slice(bytemuck::cast_slice(sums)),
        Floats::F16(sums) => gradient.copy_from_slice(bytemuck::cast_slice(sums)),
        Floats::Bf16(sums) => gradient.copy_from_slice(bytemuck::cast_slice(sums)),
    }
    Some(transaction)
}

fn floats<T: Float>(values: &[T]) -> Floats {
    match T::DTYPE {
        DType::F32 => Floats::F32(bytemuck::cast_slice(values).to_vec()),
        DType::F64 => Floats::F64(bytemuck::cast_slice(values).to_vec()),
        DType::F16 => Floats::F16(bytemuck::cast_slice(values).to_vec()),
        DType::Bf16 => Floats::Bf16(bytemuck::cast_slice(values).to_vec()),
        other => unreachable!("{other} is no float"),
    }
}

/// A bucket in flight.
struct Bucket<T: Float> {
    inner: Arc<Inner>,
    parts: Vec<Part>,
    /// Set if its gradients are on a card.
    on_card: Option<OnCard>,
    /// What this bucket pays, once it has succeeded.
    debts: Vec<Transaction>,
    /// For each part, whether any rank has a gradient; used if possibly no rank has one.
    flags: Option<Pending<Vec<u8>>>,
    /// Where results go; absent while all of it is travelling, or divided.
    memory: Option<Memory<T>>,
    /// The same memory while operations work on their parts of it.
    divided: Option<Divided>,
    /// The whole bucket, travelling uncompressed and in place.
    whole: Option<Pending<Memory<T>>>,
    /// The parts that travel uncompressed, joined to one vector.
    dense: Option<(Pending<Vec<T>>, Vec<Part>)>,
    coded: VecDeque<(Coded<T>, Part)>,
    /// Parameters that have no gradient, because of a NaN.
    missing: Vec<Part>,
    /// The first result that is not finite.
    spoilt: Option<Failure>,
    failed: Option<Failure>,
    used: Vec<u8>,
}

/// A bucket whose gradients are on a card. Those that travel uncompressed are in host memory.
struct OnCard {
    /// The parts that travel uncompressed, with their places in host memory.
    dense: Vec<Part>,
    outcome: Arc<Mutex<Outcome>>,
}

/// What remains to be done on the card when a bucket has ended: places of parameters, as first
/// element and number of elements.
#[derive(Clone, Debug, Default)]
struct Outcome {
    /// To be filled with NaN.
    missing: Vec<(usize, usize)>,
    /// To be filled with zeros.
    unused: Vec<(usize, usize)>,
}

/// A parameter that is travelling through a codec.
enum Coded<T> {
    /// The mean replaces the gradient.
    There(Pending<()>),
    /// The mean is a vector of its own.
    Apart(Pending<Vec<T>>),
}

impl<T: Unpin> Coded<T> {
    fn wait_for(&self, time: Duration) -> bool {
        match self {
            Self::There(pending) => pending.wait_for(time),
            Self::Apart(pending) => pending.wait_for(time),
        }
    }

    /// The mean, or `None` if it is in its place already.
    fn poll(&mut self, context: &mut Context<'_>) -> Poll<Result<Option<Vec<T>>, farwire::Error>> {
        match self {
            Self::There(pending) => poll(pending, context).map(|done| done.map(|()| None)),
            Self::Apart(pending) => poll(pending, context).map(|mean| mean.map(Some)),
        }
    }
}

impl<T: Float + Unpin> Bucket<T> {
    fn new(
        inner: &Arc<Inner>,
        parts: Vec<Part>,
        debts: Vec<Transaction>,
        flags: Option<Pending<Vec<u8>>>,
    ) -> Self {
        Self {
            inner: inner.clone(),
            parts,
            on_card: None,
            debts,
            flags,
            memory: None,
            divided: None,
            whole: None,
            dense: None,
            coded: VecDeque::new(),
            missing: Vec::new(),
            spoilt: None,
            failed: None,
            used: Vec::new(),
        }
    }

    /// Takes the results that have arrived.
    fn collect(&mut self, context: &mut Context<'_>) -> Poll<()> {
        if let Some(whole) = &mut self.whole {
            let result = std::task::ready!(poll(whole, context));
            self.whole = None;
            match result {
                Ok(memory) => self.memory = Some(memory),
                Err(error) => self.fail(error.into()),
            }
        }
        while let Some((coded, _)) = self.coded.front_mut() {
            let result = std::task::ready!(coded.poll(context));
            let (_, part) = self.coded.pop_front().expect("it was just there");
            match result.map_err(Failure::from) {
                Ok(None) => {}
                Ok(Some(mean)) => {
                    let memory = self.memory.as_mut();
                    memory.into_iter().for_each(|m| m[part.range()].copy_from_slice(&mean));
                }
                Err(failure) if failure.is_not_finite() => {
                    self.missing.push(part);
                    self.spoilt.get_or_insert(failure);
                }
                Err(failure) => self.fail(failure),
            }
        }
        if let Some(divided) = self.divided.take() {
            // After a failure, something may still hold a part; the results are not needed then.
            self.memory = divided.join().and_then(|memory| same(memory).ok());
        }
        if let Some((pending, _)) = &mut self.dense {
            let result = std::task::ready!(poll(pending, context));
            let (_, parts) = self.dense.take().expect("it was just there");
            match (result, &mut self.memory) {
                (Ok(means), Some(memory)) => {
                    let mut means = &means[..];
                    for part in &parts {
                        let (mine, rest) = means.split_at(part.2);
                        memory[part.range()].copy_from_slice(mine);
                        means = rest;
                    }
                }
                (Ok(_), None) => {}
                (Err(error), _) => self.fail(error.into()),
            }
        }
        for part in self.missing.drain(..) {
            match (&self.on_card, &mut self.memory) {
                (Some(card), _) => card.outcome().missing.push((part.1, part.2)),
                (None, Some(memory)) => memory[part.range()].fill(T::cast(f64::NAN)),
                (None, None) => {}
            }
        }
        if let Some(flags) = &mut self.flags {
            let result = std::task::ready!(poll(flags, context));
            self.flags = None;
            match result {
                Ok(used) => self.used = used,
                Err(error) => self.fail(error.into()),
            }
        }
        Poll::Ready(())
    }

    fn fail(&mut self, failure: Failure) {
        self.failed.get_or_insert(failure);
    }

    /// If anything can be owed, a step with a result that is not finite does not count.
    fn look_for_nan(&mut self) {
        let wanted = self.inner.compresses || self.inner.raise_on_nan;
        let Some(memory) = self.memory.as_ref().filter(|_| wanted && self.spoilt.is_none()) else {
            return;
        };
        // In blocks, each without an early exit, so that the compiler can vectorise them.
        let is_fine = |block: &[T]| block.iter().fold(true, |fine, x| fine & T::is_finite(*x));
        let is_bad = |part: &&Part| !memory[part.range()].chunks(1024).all(is_fine);
        let parts = self.on_card.as_ref().map_or(&self.parts, |card| &card.dense);
        if let Some(part) = parts.iter().find(is_bad) {
            self.spoilt = Some(Failure::not_finite(format!(
                "the mean gradient of `{}` holds a NaN or an infinity; \
                 skip this step on all ranks, or look at the loss and the learning rate",
                part.name()
            )));
        }
    }

    fn conclude(&mut self) -> Result<(), Failure> {
        let mut step = self.inner.step();
        if let Some(failure) = self.failed.take() {
            step.spoilt = true;
            return Err(failure);
        }
        if let Some(failure) = self.spoilt.take() {
            step.spoilt = true;
            return if self.inner.raise_on_nan { Err(failure) } else { Ok(()) };
        }
        self.debts.drain(..).for_each(Transaction::commit);
        // If no rank has a gradient, the framework may ignore the result: nothing is delivered.
        let unused = self.parts.iter().zip(&self.used).filter(|(_, used)| **used == 0);
        for (part, _) in unused {
            match (&self.on_card, &mut self.memory) {
                (Some(card), _) => card.outcome().unused.push((part.1, part.2)),
                (None, Some(memory)) => memory[part.range()].fill(T::default()),
                (None, None) => {}
            }
            if let Some(before) = &step.before {
                before.restore(part.name());
            }
        }
        Ok(())
    }
}

impl<T: Float + Unpin> Work for Bucket<T> {
    fn wait_for(&self, time: Duration) -> bool {
        let end = Instant::now() + time;
        let left = || end.saturating_duration_since(Instant::now());
        self.whole.iter().all(|pending| pending.wait_for(left()))
            && self.coded.iter().all(|(coded, _)| coded.wait_for(left()))
            && self.dense.iter().all(|(pending, _)| pending.wait_for(left()))
            && self.flags.iter().all(|pending| pending.wait_for(left()))
    }

    fn poll(&mut self, context: &mut Context<'_>) -> Poll<Result<(), Failure>> {
        self.collect(context).map(|()| {
            self.look_for_nan();
            let result = self.conclude();
            self.memory = None;
            result
        })
    }
}

#[pymethods]
impl Gradients {
    /// `rules` are pairs of a pattern and a codec, tried in order before the codec for all
    /// parameters. All ranks must pass the same arguments at the same time: codecs that measure do
    /// so now.
    #[new]
    #[pyo3(signature = (comm, codec, rules, *, dense_steps=None, falling_steps=None, steps=0,
                        raise_on_nan=false, seed=0))]
    #[allow(clippy::too_many_arguments, reason = "they are keywords")]
    fn new(
        py: Python<'_>,
        comm: &Comm,
        codec: &str,
        rules: Vec<(String, String)>,
        dense_steps: Option<u64>,
        falling_steps: Option<u64>,
        steps: u64,
        raise_on_nan: bool,
        seed: u64,
    ) -> PyResult<Self> {
        let comm = comm.open(py)?;
        let way = |codec: &str, named| -> PyResult<Way> {
            let choice = choice(codec)?;
            let whole_run = PhaseIn::over(choice.clone(), steps);
            let phase_in = PhaseIn {
                dense: dense_steps.unwrap_or(whole_run.dense),
                falling: falling_steps.unwrap_or(whole_run.falling),
            };
            let comm = comm.clone();
            let policy = match choice {
                CodecChoice::Given(codec) => codec.into(),
                choice => interruptible(py, move || choice.settle(&comm, &comm))?
                    .map_err(|error| Failure::from(error).raise(py))?,
            };
            Ok(Way { policy, phase_in, named })
        };
        let dense =
            || Way { policy: CodecPolicy::default(), phase_in: PhaseIn::default(), named: false };
        let otherwise = way(codec, false)?;
        let mut compresses = !otherwise.policy.is_dense();
        let mut ways = Rules::new(otherwise);
        for (pattern, codec) in rules {
            let way = way(&codec, true)?;
            compresses |= !way.policy.is_dense();
            ways = ways.on(pattern, way);
        }
        let ways = ways.on("*.bias", dense()).on("*norm*", dense());
        let compressor = Compressor::new(CodecSpec::none()).seed(seed);
        let step = Mutex::new(Step { compressor, number: 0, before: None, spoilt: false });
        let inner = Inner {
            ways,
            compresses,
            raise_on_nan,
            step,
            #[cfg(feature = "cuda")]
            cards: Default::default(),
        };
        Ok(Self { inner: Mine::new(Arc::new(inner)) })
    }

    /// Begins a step: its buckets count as a whole or not at all. If the step before it did not
    /// end, it is undone.
    fn begin_step(&self, py: Python<'_>) -> PyResult<()> {
        let inner = self.inner(py)?;
        let mut step = inner.step();
        step.before = None; // a step that did not end is taken back
        if inner.compresses {
            step.before = step.compressor.feedback().map(ErrorFeedback::savepoint);
        }
        step.spoilt = false;
        Ok(())
    }

    /// Ends a step once all its buckets have ended. Returns whether it counts.
    fn end_step(&self, py: Python<'_>) -> PyResult<bool> {
        let mut step = self.inner(py)?.step();
        step.number += 1;
        let (before, counts) = (step.before.take(), !step.spoilt);
        drop(step);
        if counts {
            before.into_iter().for_each(Savepoint::release);
        }
        Ok(counts)
    }

    /// Starts replacing a bucket by its mean over all ranks. A part is a name, its first element,
    /// its number of elements, and its dimensions.
    #[pyo3(signature = (comm, view, parts, result, *, unused=false))]
    fn bucket(
        &self,
        py: Python<'_>,
        comm: &Comm,
        view: View,
        parts: &Parts,
        result: Py<PyAny>,
        unused: bool,
    ) -> PyResult<Operation> {
        let (inner, comm, parts) = (self.inner(py)?, comm.open(py)?, parts.0.clone());
        let count = view.count()?;
        check_layout(&parts, count).map_err(|failure| failure.raise(py))?;
        let operation = with_float!(view.dtype()?, T => {
            let memory = view.memory::<T>()?;
            py.detach(|| {
                let work = inner.start(&comm, parts, memory, unused);
                Operation::new(Box::new(work), result).in_background()
            })
        });
        Ok(operation?)
    }

    /// Which parameters of a bucket travel uncompressed in this step.
    fn dense(&self, py: Python<'_>, parts: &Parts, dtype: &str) -> PyResult<Vec<bool>> {
        let (inner, dtype) = (self.inner(py)?, crate::memory::dtype(dtype)?);
        let number = inner.step().number;
        Ok(parts.0.iter().map(|part| inner.codec(part, number, dtype).is_none()).collect())
    }

    /// Starts replacing a bucket on a card by its mean over all ranks. `dense` has the gradients
    /// that travel uncompressed, one after the other, and gets their means. `used` says for each
    /// part whether this rank has a gradient; it is given if possibly no rank has one. If the card
    /// cannot be used, returns a text that says why; nothing has happened then.
    #[cfg(feature = "cuda")]
    #[pyo3(signature = (comm, card, dense, parts, result, *, used=None))]
    #[allow(clippy::too_many_arguments, reason = "they are keywords")]
    fn bucket_on_card<'py>(
        &self,
        py: Python<'py>,
        comm: &Comm,
        card: CardView,
        dense: Option<View>,
        parts: &Parts,
        result: Py<PyAny>,
        used: Option<Vec<bool>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let (inner, comm, parts) = (self.inner(py)?, comm.open(py)?, parts.0.clone());
        check_layout(&parts, card.count()).map_err(|failure| failure.raise(py))?;
        let used: Option<Vec<u8>> = used.map(|used| used.into_iter().map(u8::from).collect());
        if used.as_ref().is_some_and(|used| used.len() != parts.len()) {
            return Err(Failure::call("say of each parameter whether it was used").raise(py));
        }
        let started = with_float!(card.dtype()?, T => {
            let memory = dense.map(View::memory::<T>).transpose()?;
            py.detach(|| {
                let started = inner.start_on_card(&comm, parts, card, memory, used);
                started.map(|(bucket, outcome)| {
                    let operation = Operation::new(Box::new(bucket), result).in_background();
                    (operation, outcome)
                })
            })
        });
        match started {
            Err(why) => why.into_bound_py_any(py),
            Ok((operation, outcome)) => (operation?, CardOutcome(outcome)).into_bound_py_any(py),
        }
    }

    /// Without CUDA there is no card.
    #[cfg(not(feature = "cuda"))]
    #[pyo3(signature = (comm, card, dense, parts, result, *, used=None))]
    #[allow(clippy::too_many_arguments, unused_variables, reason = "they are keywords")]
    fn bucket_on_card(
        &self,
        comm: &Comm,
        card: Py<PyAny>,
        dense: Option<View>,
        parts: &Parts,
        result: Py<PyAny>,
        used: Option<Vec<bool>>,
    ) -> &'static str {
        "farwire was built without the feature `cuda`"
    }

    /// Marks this step as one with a result that is not finite: it does not count.
    fn spoil(&self, py: Python<'_>) -> PyResult<()> {
        self.inner(py)?.step().spoilt = true;
        Ok(())
    }

    /// Bytes that have crossed the bus, to the host and to the card, for gradients that are encoded
    /// on the card.
    fn bus(&self, py: Python<'_>) -> PyResult<(u64, u64)> {
        let _inner = self.inner(py)?;
        #[cfg(feature = "cuda")]
        return Ok(_inner.cards.bus());
        #[cfg(not(feature = "cuda"))]
        Ok((0, 0))
    }

    /// The number of steps that have ended.
    #[getter]
    fn step(&self, py: Python<'_>) -> PyResult<u64> {
        Ok(self.inner(py)?.step().number)
    }

    /// The codec for a parameter in the next step, and the share of its elements that is sent.
    fn codec(
        &self,
        py: Python<'_>,
        name: &str,
        elements: usize,
        shape: Vec<usize>,
    ) -> PyResult<(String, f64)> {
        let inner = self.inner(py)?;
        let part = Part(name.to_owned(), 0, elements, shape);
        let number = inner.step().number;
        let codec = inner.codec(&part, number, DType::F32);
        Ok((codec.to_string(), codec.density(elements)))
    }

    /// Everything that is owed, as the bytes of a safetensors file.
    fn residuals<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
        let compressor = self.inner(py)?.step().compressor.clone();
        let bytes = py.detach(|| compressor.feedback().map(ErrorFeedback::to_bytes));
        Ok(PyBytes::new(py, &bytes.unwrap_or_default()))
    }

    /// Goes on from what `residuals` returned after `number` steps. If it cannot be read, nothing
    /// changes.
    fn load(&self, py: Python<'_>, residuals: &[u8], number: u64) -> PyResult<()> {
        let feedback = compressor::feedback(py, residuals)?;
        let mut step = self.inner(py)?.step();
        step.compressor = step.compressor.clone().with_feedback(feedback);
        step.number = number;
        Ok(())
    }
}

impl Gradients {
    fn inner(&self, py: Python<'_>) -> PyResult<&Arc<Inner>> {
        self.inner.get().map_err(|failure| failure.raise(py))
    }
}

/// What remains to be done on the card when a bucket has ended.
#[pyclass(frozen, module = "farwire._native")]
pub(crate) struct CardOutcome(#[cfg(feature = "cuda")] Arc<Mutex<Outcome>>);

#[cfg(feature = "cuda")]
#[pymethods]
impl CardOutcome {
    /// Places of gradients that are missing because of a NaN: first element, number of elements.
    fn missing(&self) -> Vec<(usize, usize)> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).missing.clone()
    }

    /// Places of gradients that no rank has.
    fn unused(&self) -> Vec<(usize, usize)> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).unused.clone()
    }
}

/// Checks that parameters follow one another in their bucket and fill all of it.
fn check_layout(parts: &[Part], count: usize) -> Result<(), Failure> {
    let mut free = 0;
    for part in parts {
        let end = part.1.checked_add(part.2).filter(|end| *end <= count);
        free = end.filter(|_| part.1 == free).ok_or_else(|| {
            let name = part.name();
            Failure::call(format!(
                "the place of `{name}` is outside the bucket of {count} elements, or not next to \
                 the one before; give the places of all parameters, in order"
            ))
        })?;
    }
    if free < count {
        let text = format!("parameters are {free} of the bucket's {count} elements; give all");
        return Err(Failure::call(text));
    }
    Ok(())
}

/// The layout of a bucket. Made once for a bucket that comes again in every step.
#[pyclass(frozen, module = "farwire._native")]
pub(crate) struct Parts(Vec<Part>);

#[pymethods]
impl Parts {
    #[new]
    fn new(parts: Vec<Part>) -> Self {
        Self(parts)
    }
}
