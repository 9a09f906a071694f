//! Collectives of vectors that are on a card.

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
/// An operation waits, on the card, for what the tensor's stream has been given before the call.
/// When its [`Pending`] is done, the result has been put on the card's queue in the tensor's place,
/// and the tensor's stream waits for it: work that is put there afterwards sees the result, and the
/// host need not wait for the card. If the call fails, the tensor and all residuals are as they
/// were.
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
    /// Started by the first vector that travels as it is.
    staging: Arc<Mutex<Option<Arc<Staging>>>>,
}

/// What operations on a card use, whoever they are with: its kernels, and room to work in. It is
/// for callers who want to keep these and not the communicator.
#[derive(Clone, Debug)]
pub struct DeviceTools(Arc<Shared>);

/// What calls of all clones use.
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
    /// Nothing is compiled yet.
    pub fn new(device: &Arc<Device>) -> Self {
        Self(Arc::new(Shared {
            device: device.clone(),
            workspace: Arc::new(Workspace::new(device)),
            codecs: Mutex::default(),
            finish: Default::default(),
        }))
    }

    /// Has the kernels of a codec ready for gradients of a type; or says what is missing. An
    /// operation that finds that out by itself fails, and the other ranks wait for it.
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
    /// Operations of `comm` on vectors that are on `device`.
    pub fn new(comm: &Communicator, device: &Arc<Device>) -> Self {
        Self::with_tools(comm, &DeviceTools::new(device))
    }

    /// The same, with tools that others use, too.
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

    /// [`Communicator::all_reduce_compressed`] of a gradient on the card, whose place the result
    /// takes.
    ///
    /// What is owed is kept on the card, in `compressor`, and comes to the host with whoever asks
    /// for it there: to save a checkpoint, say. A vector that `compressor` leaves as it is (a short
    /// one) travels as in [`Communicator::all_reduce_compressed`], through host memory: then this
    /// call waits for the tensor's stream.
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

    /// All-reduce of a vector on the card, in its place and without a codec: through pinned memory,
    /// in pieces, so that copies and network overlap. All ranks of the group have theirs on cards.
    /// As it works in place, a call that fails half-way leaves anything in the tensor.
    ///
    /// Its result has the bits of [`Communicator::all_reduce`]. These calls are made in the same
    /// order on all ranks, but have no place among the others.
    pub fn all_reduce(&self, data: impl Into<DeviceTensor>, op: ReduceOp) -> Pending<()> {
        match self.staging() {
            Ok(staging) => staging.all_reduce(data.into(), op),
            Err(error) => Pending::failed(error),
        }
    }

    /// A vector that has to travel as the vectors of ranks without a card do.
    fn through_the_host(
        &self,
        tensor: &str,
        data: DeviceTensor,
        op: ReduceOp,
        compressor: &Compressor,
    ) -> Result<Pending<()>, Error> {
        let owes = |feedback: &ErrorFeedback| feedback.norms(tensor).is_some();
        if self.comm.size() == 1 && !compressor.feedback().is_some_and(owes) {
            // It is its own sum and mean, and need not cross the bus to find out.
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
