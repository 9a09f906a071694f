//! Collectives of vectors that are on a card.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use farwire::{CodecSpec, Communicator, Compressor, Error, Pending, ReduceOp};

use crate::codec::DeviceCodec;
use crate::driver::{Device, DeviceTensor, ValueType};
use crate::error::DeviceError;
use crate::kernels::FinishKernel;
use crate::vectors::{DeviceVectors, Workspace, dtype};

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
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    device: Arc<Device>,
    workspace: Arc<Workspace>,
    /// By name.
    codecs: Mutex<HashMap<String, Arc<DeviceCodec>>>,
    /// By type of value.
    finish: [OnceLock<Arc<FinishKernel>>; 3],
}

impl DeviceCommunicator {
    /// Operations of `comm` on vectors that are on `device`.
    pub fn new(comm: &Communicator, device: &Arc<Device>) -> Self {
        let shared = Shared {
            device: device.clone(),
            workspace: Arc::new(Workspace::new(device)),
            codecs: Mutex::default(),
            finish: Default::default(),
        };
        Self { comm: comm.clone(), shared: Arc::new(shared) }
    }

    /// The communicator, for vectors in host memory.
    pub fn host(&self) -> &Communicator {
        &self.comm
    }

    /// The card.
    pub fn device(&self) -> &Arc<Device> {
        &self.shared.device
    }

    /// [`Communicator::all_reduce_compressed`] of a gradient on the card, whose place the result
    /// takes.
    ///
    /// What is owed is kept on the card, in `compressor`, and comes to the host with whoever asks
    /// for it there: to save a checkpoint, say.
    pub fn all_reduce_compressed(
        &self,
        tensor: &str,
        data: impl Into<DeviceTensor>,
        op: ReduceOp,
        compressor: &Compressor,
    ) -> Pending<()> {
        let data = data.into();
        let codec = compressor.codec_for(data.len(), dtype(data.value_type()));
        let codec = codec.unwrap_or_else(dense);
        match self.vectors(&codec, data) {
            Err(error) => Pending::failed(card_error(error)),
            Ok(vectors) => {
                let owing = |feedback| vectors.owing(feedback);
                self.comm.all_reduce_elsewhere(tensor, op, codec, compressor, owing)
            }
        }
    }

    fn vectors(
        &self,
        codec: &CodecSpec,
        tensor: DeviceTensor,
    ) -> Result<DeviceVectors, DeviceError> {
        let shared = &self.shared;
        let finish = shared.finish(tensor.value_type())?;
        DeviceVectors::new(&shared.workspace, shared.codec(codec)?, finish, tensor)
    }
}

impl Shared {
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

/// The codec that leaves nothing out.
fn dense() -> CodecSpec {
    "none".parse().expect("the name of a codec")
}

fn card_error(error: DeviceError) -> Error {
    Error::System { what: "could not use the card", error: std::io::Error::other(error) }
}
