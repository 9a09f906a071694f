//! Collectives on vectors that are on a card.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use farwire::{
    CodecSpec, Communicator, Compressor, Error, ErrorFeedback, Float, Pending, ReduceOp,
};
use farwire_codec::Travel;

use crate::codec::DeviceCodec;
use crate::driver::{Device, DeviceTensor, ValueType};
use crate::error::DeviceError;
use crate::kernels::FinishKernel;
use crate::staging::{Staging, Travelling};
use crate::vectors::{Coder, DeviceVectors, Workspace, dtype};

/// A communicator whose vectors are on a card.
///
/// Gradients are compressed where they are: only messages cross the bus. Other ranks may have a
/// card or not; the messages are the same, and so are the bits of the result.
///
/// An operation waits, on the card, for the work put on the tensor's stream before the call. When
/// its [`Pending`] is done, the card has been given the work that writes the result over the
/// tensor, and the tensor's stream waits for that work. Work put on the tensor's stream afterwards
/// sees the result, so the host need not wait for the card. If the call fails, the tensor and all
/// residuals are as they were.
///
/// ```no_run
/// use std::sync::Arc;
///
/// use farwire::{Compressor, ReduceOp};
/// use farwire_cuda::{Device, DeviceCommunicator};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let comm = farwire::local(1)?.remove(0);
/// let device = Device::new(0)?;
/// let gradient = Arc::new(device.upload(&[4.0f32, 1.0, 0.0, 0.0])?);
/// let comm = DeviceCommunicator::new(&comm, &device);
/// let top = Compressor::new("topk:0.25,values=f32".parse()?);
/// comm.all_reduce_compressed("w", &gradient, ReduceOp::Mean, &top).wait()?;
/// assert_eq!(gradient.download()?, [4.0, 0.0, 0.0, 0.0]);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct DeviceCommunicator {
    comm: Communicator,
    tools: DeviceTools,
    /// Started by the first vector that travels uncompressed.
    staging: Arc<Mutex<Option<Arc<Staging>>>>,
}

/// What operations on a card use, with any communicator: the kernels, and memory to work in. For
/// callers who want to keep these longer than the communicator.
#[derive(Clone, Debug)]
pub struct DeviceTools(Arc<Shared>);

/// Shared by the calls of all clones.
#[derive(Debug)]
struct Shared {
    device: Arc<Device>,
    workspace: Arc<Workspace>,
    /// By name.
    codecs: Mutex<HashMap<String, Arc<DeviceCodec>>>,
    /// By type of value.
    finish: [OnceLock<Arc<FinishKernel>>; 3],
}

impl DeviceTools {
    /// Compiles nothing yet.
    pub fn new(device: &Arc<Device>) -> Self {
        Self(Arc::new(Shared {
            device: device.clone(),
            workspace: Arc::new(Workspace::new(device)),
            codecs: Mutex::default(),
            finish: Default::default(),
        }))
    }

    /// Gets the kernels of a codec ready for gradients of a type, or says what is missing. Without
    /// this call, an operation that finds something missing fails while the other ranks wait for
    /// it.
    pub fn prepare(&self, codec: &CodecSpec, type_: ValueType) -> Result<(), DeviceError> {
        self.0.finish(type_)?;
        self.0.coder(codec).map(drop)
    }

    /// The card.
    pub fn device(&self) -> &Arc<Device> {
        &self.0.device
    }
}

impl DeviceCommunicator {
    /// Runs the operations of `comm` on vectors that are on `device`.
    pub fn new(comm: &Communicator, device: &Arc<Device>) -> Self {
        Self::with_tools(comm, &DeviceTools::new(device))
    }

    /// The same, with tools that may be shared with others.
    pub fn with_tools(comm: &Communicator, tools: &DeviceTools) -> Self {
        Self { comm: comm.clone(), tools: tools.clone(), staging: Arc::default() }
    }

    /// The communicator, for vectors in host memory.
    pub fn host(&self) -> &Communicator {
        &self.comm
    }

    /// The card.
    pub fn device(&self) -> &Arc<Device> {
        self.tools.device()
    }

    /// [`Communicator::all_reduce_compressed`] of a gradient on the card. The result replaces the
    /// gradient.
    ///
    /// The residual is kept on the card, in `compressor`, and is copied to the host only when it is
    /// asked for there: to save a checkpoint, say. A vector that `compressor` does not compress (a
    /// short one) travels as in [`Communicator::all_reduce_compressed`], through host memory: then
    /// this call waits for the tensor's stream.
    pub fn all_reduce_compressed(
        &self,
        tensor: &str,
        data: impl Into<DeviceTensor>,
        op: ReduceOp,
        compressor: &Compressor,
    ) -> Pending<()> {
        let data = data.into();
        let Some(codec) = compressor.codec_for(data.len(), dtype(data.value_type())) else {
            return self
                .through_the_host(tensor, data, op, compressor)
                .unwrap_or_else(Pending::failed);
        };
        match self.vectors(&codec, data) {
            Err(error) => Pending::failed(card_error(error)),
            Ok(vectors) => {
                let owing = |feedback| vectors.owing(feedback);
                self.comm.all_reduce_elsewhere(tensor, op, codec, compressor, owing)
            }
        }
    }

    /// All-reduce of a vector on the card, in place and without a codec. It goes through pinned
    /// memory, in pieces, so that copies and network overlap. All ranks of the group must have
    /// their vectors on cards. As it works in place, a call that fails half-way leaves the tensor's
    /// content undefined.
    ///
    /// The result has the bits of [`Communicator::all_reduce`]. All ranks must make these calls in
    /// the same order, but their order relative to other operations does not matter.
    pub fn all_reduce(&self, data: impl Into<DeviceTensor>, op: ReduceOp) -> Pending<()> {
        match self.staging() {
            Ok(staging) => staging.all_reduce(data.into(), op),
            Err(error) => Pending::failed(error),
        }
    }

    /// All-reduce of a vector that has to travel as the vectors of ranks without a card do.
    fn through_the_host(
        &self,
        tensor: &str,
        data: DeviceTensor,
        op: ReduceOp,
        compressor: &Compressor,
    ) -> Result<Pending<()>, Error> {
        let owes = |feedback: &ErrorFeedback| feedback.norms(tensor).is_some();
        if self.comm.size() == 1 && !compressor.feedback().is_some_and(owes) {
            // The vector is its own sum and mean, so it need not cross the bus.
            let (promise, pending) = Pending::promise();
            promise.keep(Ok(()));
            return Ok(pending);
        }
        let staging = self.staging()?;
        let device = self.device();
        let fetch = || {
            let bytes = data.len() * data.value_type().size();
            let mut pinned = device.pooled_pinned(bytes)?;
            device.follow(data.stream())?;
            device.copy_from_tensor(&data, 0..data.len(), &mut pinned)?;
            device.wait()?;
            Ok((pinned, bytes))
        };
        let (pinned, bytes) = fetch().map_err(card_error)?;
        fn start<T: Float>(
            comm: &Communicator,
            tensor: &str,
            bytes: &[u8],
            op: ReduceOp,
            compressor: &Compressor,
        ) -> Pending<Vec<T>> {
            let values = bytemuck::cast_slice(bytes).to_vec();
            comm.all_reduce_compressed(tensor, values, op, compressor)
        }
        let (comm, bytes) = (&self.comm, &pinned.bytes()[..bytes]);
        let result = match data.value_type() {
            ValueType::F32 => Travelling::F32(start(comm, tensor, bytes, op, compressor)),
            ValueType::F16 => Travelling::F16(start(comm, tensor, bytes, op, compressor)),
            ValueType::Bf16 => Travelling::Bf16(start(comm, tensor, bytes, op, compressor)),
        };
        Ok(staging.put(result, data))
    }

    fn staging(&self) -> Result<Arc<Staging>, Error> {
        let mut staging = self.staging.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(staging) = &*staging {
            return Ok(staging.clone());
        }
        let started = Arc::new(Staging::start(&self.comm, self.device())?);
        *staging = Some(started.clone());
        Ok(started)
    }

    fn vectors(
        &self,
        codec: &CodecSpec,
        tensor: DeviceTensor,
    ) -> Result<DeviceVectors, DeviceError> {
        let shared = &self.tools.0;
        let finish = shared.finish(tensor.value_type())?;
        DeviceVectors::new(&shared.workspace, shared.coder(codec)?, finish, tensor)
    }
}

impl Shared {
    fn coder(&self, codec: &CodecSpec) -> Result<Coder, DeviceError> {
        Ok(match codec.travels() {
            Travel::Factors(_) => Coder::Factors,
            Travel::Shards(_) | Travel::Whole(_) => Coder::Messages(self.codec(codec)?),
        })
    }

    fn codec(&self, spec: &CodecSpec) -> Result<Arc<DeviceCodec>, DeviceError> {
        let mut codecs = self.codecs.lock().unwrap_or_else(PoisonError::into_inner);
        let name = spec.name();
        if let Some(codec) = codecs.get(&name) {
            return Ok(codec.clone());
        }
        let codec = Arc::new(DeviceCodec::new(&self.device, spec)?);
        codecs.insert(name, codec.clone());
        Ok(codec)
    }

    fn finish(&self, type_: ValueType) -> Result<Arc<FinishKernel>, DeviceError> {
        let slot = &self.finish[type_ as usize];
        if let Some(kernel) = slot.get() {
            return Ok(kernel.clone());
        }
        let made = Arc::new(FinishKernel::new(&self.device, type_)?);
        Ok(slot.get_or_init(|| made).clone())
    }
}

pub(crate) fn card_error(error: DeviceError) -> Error {
    Error::System { what: "could not use the card", error: std::io::Error::other(error) }
}
