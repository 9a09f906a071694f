//! Collectives through a codec.

use std::num::NonZeroUsize;
use std::sync::Arc;

use farwire_codec::collective::{
    CodedCollective, Collective, Floats, LentVectors, Order, Task, Vectors,
};
use farwire_codec::{CodecSpec, Context, ErrorFeedback, Transaction, Travel};
use farwire_proto::{Call, Counts, DType, Element, Rank, ReduceOp, WorldSize};
use half::{bf16, f16};

use crate::coder;
use crate::comm::{Communicator, OVERLAP_FROM, unwrap};
use crate::completion::{Completion, Debt};
use crate::error::Error;
use crate::memory::Memory;
use crate::pending::Pending;
use crate::policy::{CodecChoice, CodecPolicy};

/// A float type, whose vectors a codec takes: f32, f64, f16 or bf16.
pub trait Float: Element {}

impl Float for f32 {}
impl Float for f64 {}
impl Float for f16 {}
impl Float for bf16 {}

fn floats<T: Float>(elements: Vec<T>) -> Floats {
    use bytemuck::cast_vec as same;
    match T::DTYPE {
        DType::F32 => Floats::F32(same(elements)),
        DType::F64 => Floats::F64(same(elements)),
        DType::F16 => Floats::F16(same(elements)),
        DType::Bf16 => Floats::Bf16(same(elements)),
        other => unreachable!("{other} is no float"),
    }
}

/// A codec, and what it owes: the state of compression on one rank.
///
/// Every rank makes its own, with the same settings, and keeps it for the whole run. What the codec
/// leaves out of a step is remembered under the tensor's name and sent with the next step (error
/// feedback). Cloning gives another handle to the same state.
///
/// ```
/// use farwire::{Compressor, ReduceOp};
///
/// std::thread::scope(|scope| {
///     for comm in farwire::local(2).unwrap() {
///         scope.spawn(move || {
///             let top = Compressor::new("topk:0.25,values=f32".parse().unwrap());
///             let gradient = vec![4.0f32, 1.0, 0.0, 0.0];
///             let first = comm.all_reduce_compressed("w", gradient.clone(), ReduceOp::Mean, &top);
///             assert_eq!(first.wait().unwrap(), [4.0, 0.0, 0.0, 0.0]);
///             // What was left out has not been forgotten.
///             assert!(top.feedback().unwrap().norms("w").unwrap().worker > 0.0);
///         });
///     }
/// });
/// ```
#[derive(Clone, Debug)]
pub struct Compressor {
    policy: CodecPolicy,
    /// Below this many elements, the codec would cost more time than it saves.
    dense_below: usize,
    feedback: Option<Arc<ErrorFeedback>>,
    seed: u64,
    step: Option<u64>,
    dimensions: Option<Vec<usize>>,
}

impl Compressor {
    /// A codec with error feedback: by name, or [your own](CodecSpec::custom).
    pub fn new(codec: CodecSpec) -> Self {
        Self::by_size(codec.into())
    }

    /// A codec for each length of vectors, with error feedback. Must be the same on all ranks.
    pub fn by_size(policy: CodecPolicy) -> Self {
        Self {
            policy,
            dense_below: 0,
            feedback: Some(Arc::default()),
            seed: 0,
            step: None,
            dimensions: None,
        }
    }

    /// Uses bf16 or int8 where that is faster than dense between these ranks, and dense elsewhere,
    /// with error feedback. Measures that here and now, for about a second. All ranks must call it,
    /// and all choose the same.
    ///
    /// ```
    /// use farwire::{Compressor, ReduceOp};
    ///
    /// std::thread::scope(|scope| {
    ///     for comm in farwire::local(2).unwrap() {
    ///         scope.spawn(move || {
    ///             let fastest = Compressor::auto(&comm).unwrap();
    ///             println!("rank {}: {}", comm.rank(), fastest.name()); // as in `int8 from 256 KiB (2.5×)`
    ///             let mean = comm.all_reduce_compressed("w", vec![1.0f32; 1000], ReduceOp::Mean, &fastest);
    ///             assert_eq!(mean.wait().unwrap(), [1.0; 1000]); // short vectors stay dense
    ///         });
    ///     }
    /// });
    /// ```
    pub fn auto(group: &Communicator) -> Result<Self, Error> {
        CodecChoice::Auto.settle(group, group).map(Self::by_size)
    }

    /// The same without error feedback: what the codec leaves out is lost. Training with top-k or
    /// sign suffers badly; random-k makes up for it by scaling what it sends.
    pub fn without_feedback(self) -> Self {
        Self { feedback: None, ..self }
    }

    /// The same, continuing with residuals that were saved ([`ErrorFeedback::save`]).
    pub fn with_feedback(self, feedback: ErrorFeedback) -> Self {
        Self { feedback: Some(Arc::new(feedback)), ..self }
    }

    /// Vectors with fewer elements than this are sent uncompressed. Must be the same on all ranks.
    pub fn dense_below(self, elements: usize) -> Self {
        Self { dense_below: elements, ..self }
    }

    /// Another stream of random numbers, for codecs that use them. Must be the same on all ranks.
    pub fn seed(self, seed: u64) -> Self {
        Self { seed, ..self }
    }

    /// The same state, for a step with this number. Random choices then depend on the number, and
    /// not on how many calls were made before, so a run can be resumed bit for bit. Must be the
    /// same on all ranks.
    pub fn at_step(&self, step: u64) -> Self {
        Self { step: Some(step), ..self.clone() }
    }

    /// The same state, for calls through another codec, or none: each makes up for what the other
    /// left out. Must be the same on all ranks.
    pub fn with_codec(&self, codec: CodecSpec) -> Self {
        Self { policy: codec.into(), ..self.clone() }
    }

    /// The same state, for a tensor of these dimensions. PowerSGD treats it as a matrix: the first
    /// dimension by all others.
    pub fn shaped(&self, dimensions: &[usize]) -> Self {
        Self { dimensions: Some(dimensions.to_vec()), ..self.clone() }
    }

    /// What is owed; `None` without error feedback.
    pub fn feedback(&self) -> Option<&ErrorFeedback> {
        self.feedback.as_deref()
    }

    /// The codec's name; a list of names where the codec depends on the length.
    pub fn name(&self) -> String {
        self.policy.to_string()
    }

    /// The codec that a vector goes through in an all-reduce; `None` if it stays dense.
    pub fn codec_for(&self, elements: usize, dtype: DType) -> Option<CodecSpec> {
        self.codec(elements, elements, dtype)
    }

    /// The codec that a rank's vector goes through; `None` if it stays dense. The whole is longer
    /// than the vector only in an all-gather.
    fn codec(&self, elements: usize, whole: usize, dtype: DType) -> Option<CodecSpec> {
        let codec = (elements >= self.dense_below).then(|| self.policy.codec_for(whole, dtype));
        codec.filter(|codec| !codec.is_none())
    }
}

impl Communicator {
    /// [`all_reduce`](Self::all_reduce) of a gradient through a codec: sum or mean only.
    ///
    /// `tensor` names the vector, and what is owed for it. Only one call at a time may use a name.
    /// The result has the same bits on every rank. If the call fails, everything owed is as it was
    /// before. If any rank's input holds a NaN or an infinity, all ranks get the same error.
    pub fn all_reduce_compressed<T: Float>(
        &self,
        tensor: &str,
        data: Vec<T>,
        op: ReduceOp,
        compressor: &Compressor,
    ) -> Pending<Vec<T>> {
        let Some(codec) = compressor.codec_for(data.len(), T::DTYPE) else {
            let call = Call::AllReduce { count: data.len(), dtype: T::DTYPE, op };
            return self.start_dense(tensor, data, call, compressor);
        };
        self.start_coded(tensor, floats(data), Collective::AllReduce(op), codec, compressor)
    }

    /// [`reduce_scatter`](Self::reduce_scatter) of a gradient through a codec: sum or mean only.
    /// See [`all_reduce_compressed`](Self::all_reduce_compressed).
    pub fn reduce_scatter_compressed<T: Float>(
        &self,
        tensor: &str,
        data: Vec<T>,
        op: ReduceOp,
        compressor: &Compressor,
    ) -> Pending<Vec<T>> {
        let Some(codec) = compressor.codec_for(data.len(), T::DTYPE) else {
            let call = Call::ReduceScatter { count: data.len(), dtype: T::DTYPE, op };
            return self.start_dense(tensor, data, call, compressor);
        };
        self.start_coded(tensor, floats(data), Collective::ReduceScatter(op), codec, compressor)
    }

    /// [`all_gather`](Self::all_gather) through a codec: every rank, the sender included, gets what
    /// the codec makes of each vector. All vectors must have the same length.
    pub fn all_gather_compressed<T: Float>(
        &self,
        tensor: &str,
        data: Vec<T>,
        compressor: &Compressor,
    ) -> Pending<Vec<T>> {
        let Some(codec) = compressor.codec(data.len(), data.len() * self.size(), T::DTYPE) else {
            let call = Call::AllGather { counts: Counts::Each(data.len()), dtype: T::DTYPE };
            return self.start_dense(tensor, data, call, compressor);
        };
        let counts = Counts::Each(data.len());
        self.start_coded(tensor, floats(data), Collective::AllGather(counts), codec, compressor)
    }

    /// [`all_reduce_compressed`](Self::all_reduce_compressed) of a vector that is not in host
    /// memory, through `codec`, with what `compressor` owes. Other ranks' vectors may be in host
    /// memory: the messages are the same.
    ///
    /// `farwire-cuda` builds its operations on this; for vectors on a card, call those. `vectors`
    /// is called once the residuals are at hand. What it returns works on the thread that codes,
    /// and determines where the result is.
    pub fn all_reduce_elsewhere<V: Vectors + 'static>(
        &self,
        tensor: &str,
        op: ReduceOp,
        codec: CodecSpec,
        compressor: &Compressor,
        vectors: impl FnOnce(Option<Transaction>) -> V,
    ) -> Pending<()> {
        let completion = Arc::new(Completion::default());
        let on_its_thread = self.has_coder();
        let vectors = |feedback| Box::new(vectors(feedback)) as Box<dyn Vectors>;
        let task = (tensor, None, op, codec, compressor);
        match self.start_elsewhere(task, vectors, on_its_thread, completion.clone()) {
            Err(error) => Pending::ready(Err(error.in_group(&self.members()))),
            Ok(()) => {
                self.node().call_keeper();
                Pending::running(self.node().clone(), self.members(), completion, |_| ())
            }
        }
    }

    /// [`InPlace::all_reduce_coded`](crate::InPlace::all_reduce_coded).
    pub(crate) fn all_reduce_lent(
        &self,
        tensor: &str,
        memory: Memory<f32>,
        op: ReduceOp,
        codec: CodecSpec,
        compressor: &Compressor,
    ) -> Pending<()> {
        let completion = Arc::new(Completion::default());
        let (node, len) = (self.node(), memory.len());
        let threads = NonZeroUsize::new(node.coding_threads()).unwrap_or(NonZeroUsize::MIN);
        let vectors =
            |feedback| Box::new(LentVectors::new(memory, feedback, threads)) as Box<dyn Vectors>;
        let on_its_thread = len > coder::SHORT && self.has_coder();
        let task = (tensor, Some(len), op, codec, compressor);
        match self.start_elsewhere(task, vectors, on_its_thread, completion.clone()) {
            Err(error) => Pending::ready(Err(error.in_group(&self.members()))),
            Ok(()) => {
                self.go_on_with_coded(len * size_of::<f32>());
                Pending::running(node.clone(), self.members(), completion, |_| ())
            }
        }
    }

    /// Submits an all-reduce of vectors that this crate does not hold itself.
    fn start_elsewhere(
        &self,
        (tensor, len, op, codec, compressor): (
            &str,
            Option<usize>,
            ReduceOp,
            CodecSpec,
            &Compressor,
        ),
        vectors: impl FnOnce(Option<Transaction>) -> Box<dyn Vectors>,
        on_its_thread: bool,
        completion: Arc<Completion>,
    ) -> Result<(), Error> {
        let node = self.node();
        let begin = |feedback: &Arc<ErrorFeedback>| match len {
            Some(len) => feedback.begin_of(tensor, len),
            None => feedback.begin(tensor),
        };
        let feedback = compressor.feedback.as_ref().map(begin);
        let vectors = vectors(feedback.transpose()?);
        let step = compressor.step.unwrap_or_else(|| node.driver().next_collective(self.id()));
        let task = Task {
            collective: Collective::AllReduce(op),
            codec,
            rank: Rank(self.rank() as u32),
            world: WorldSize::new(self.size() as u32).expect("this process is a member"),
            placement: None,
            dimensions: compressor.dimensions.clone(),
            tensor: tensor.to_owned(),
            context: Context { seed: compressor.seed, step, tensor: Context::tensor_id(tensor) },
        };
        let exchange = CodedCollective::elsewhere(task, vectors)?;
        node.driver().submit_coded(self.id(), exchange, on_its_thread, self.options(), completion)
    }

    /// Whether the coding thread runs. If it cannot be started, threads that wait do its work.
    fn has_coder(&self) -> bool {
        let started = self.node().ensure_coder();
        let started = started
            .inspect_err(|error| tracing::warn!(%error, "could not start the coding thread"));
        started.is_ok()
    }

    /// Keeps an operation moving that was just submitted, on vectors in host memory.
    fn go_on_with_coded(&self, bytes: usize) {
        let node = self.node();
        if node.code_short() && node.is_waited_for() {
            node.nudge(); // another thread may wait for what has ended
        }
        if bytes > OVERLAP_FROM {
            node.call_keeper();
        }
    }

    /// Starts a call without a codec, and sends along what earlier calls through one have left out.
    ///
    /// Ranks need not owe the same: each adds its debt to its own vector, and the call is the same.
    fn start_dense<T: Float>(
        &self,
        tensor: &str,
        data: Vec<T>,
        call: Call,
        compressor: &Compressor,
    ) -> Pending<Vec<T>> {
        let mut input = floats(data);
        let long = input.len() * input.dtype().size() > OVERLAP_FROM;
        // What is missing in a sum cannot be added to a minimum or a maximum.
        let sum = match call {
            Call::AllReduce { op, .. } | Call::ReduceScatter { op, .. } => match op {
                ReduceOp::Sum | ReduceOp::Mean => Some(true),
                _ => None,
            },
            _ => Some(false),
        };
        let mut debt = None;
        if let Some(feedback) = &compressor.feedback
            && let Some(sum) = sum
            && feedback.owes(tensor)
        {
            let mut paid = match feedback.begin(tensor) {
                Ok(transaction) => transaction,
                Err(error) => {
                    let refused = Error::Feedback { error, input: Some(Box::new(input.into())) };
                    return Pending::ready(Err(refused.in_group(&self.members())));
                }
            };
            let before = input.clone();
            // With a NaN in it, the result is of no use, and the debt stays.
            if paid.pay(&mut input, sum) {
                debt = Some(Debt { paid, input: before.into() });
            }
        }
        let completion = Arc::new(Completion::paying(debt));
        let node = self.node();
        let submitted = node.driver().submit(
            self.id(),
            &call,
            self.options(),
            input.into(),
            completion.clone(),
        );
        if let Err(error) = submitted {
            let _ = completion.complete(Err(error));
        } else if long {
            node.call_keeper();
        }
        Pending::running(node.clone(), self.members(), completion, unwrap)
    }

    fn start_coded<T: Float>(
        &self,
        tensor: &str,
        input: Floats,
        collective: Collective,
        codec: CodecSpec,
        compressor: &Compressor,
    ) -> Pending<Vec<T>> {
        let completion = Arc::new(Completion::default());
        let bytes = input.len() * input.dtype().size();
        match self.try_start_coded(tensor, input, collective, codec, compressor, completion.clone())
        {
            Err(error) => Pending::ready(Err(error.in_group(&self.members()))),
            Ok(()) => {
                self.go_on_with_coded(bytes);
                Pending::running(self.node().clone(), self.members(), completion, unwrap)
            }
        }
    }

    fn try_start_coded(
        &self,
        tensor: &str,
        input: Floats,
        collective: Collective,
        codec: CodecSpec,
        compressor: &Compressor,
        completion: Arc<Completion>,
    ) -> Result<(), Error> {
        let node = self.node();
        // A codec that sends whole vectors is a user's own: it may do anything, and take any time.
        let long = (input.len() > coder::SHORT || matches!(codec.travels(), Travel::Whole(_)))
            && self.has_coder();
        let begin = |feedback: &Arc<ErrorFeedback>| match &collective {
            Collective::AllGather(_) => feedback.begin(tensor), // of a part, of any length
            _ => feedback.begin_of(tensor, input.len()),
        };
        let feedback = match compressor.feedback.as_ref().map(begin) {
            None => None,
            Some(Ok(feedback)) => Some(feedback),
            Some(Err(error)) => return Err(Error::from(error).with_input(input)),
        };
        // Calls are numbered alike on all ranks, so all draw the same random numbers.
        let step = compressor.step.unwrap_or_else(|| node.driver().next_collective(self.id()));
        let output = node.driver().take_floats(match &collective {
            Collective::AllReduce(_) => input.len(),
            Collective::ReduceScatter(_) => input.len() / self.size(),
            Collective::AllGather(_) => input.len() * self.size(),
        });
        let exchange = CodedCollective::new(Order {
            collective,
            codec,
            rank: Rank(self.rank() as u32),
            world: WorldSize::new(self.size() as u32).expect("this process is a member"),
            placement: node.driver().split_placement(self.id()),
            input,
            dimensions: compressor.dimensions.clone(),
            tensor: tensor.to_owned(),
            feedback,
            context: Context { seed: compressor.seed, step, tensor: Context::tensor_id(tensor) },
            threads: NonZeroUsize::new(node.coding_threads()).unwrap_or(NonZeroUsize::MIN),
            output,
        })
        .map_err(|(error, input)| Error::from(error).with_input(input))?;
        node.driver().submit_coded(self.id(), exchange, long, self.options(), completion)
    }
}
