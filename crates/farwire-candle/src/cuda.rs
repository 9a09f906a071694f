//! Candle's tensors on a card, where farwire works on them. The one file with `unsafe`.
//!
//! ```text
//!  candle's stream    ██ backward of block 3 ██ of block 2 ██ of block 1 ██ …      ┌▶ forward
//!  this thread                                 └─ waits ─▶ hands block 3 over      │
//!  farwire's stream                                          ▒ add ▒ encode ▒ …  AdamW
//! ```
//!
//! Rules:
//! 1. Candle puts all its work with a card on one stream, and farwire all of its own on another.
//!    Candle's tracking of who uses its slices is therefore turned off.
//! 2. Gradients are handed over when candle is done with them, while the next segment runs, so that
//!    farwire's stream never waits for candle's. If it did, the work on buckets under way would
//!    wait for a backward that has nothing to do with them.
//! 3. Their memory goes back to candle's stream only after that stream has been told to wait for
//!    what farwire's stream was given.
//! 4. Weights are changed in place by work that comes after what candle's stream has been given so
//!    far, and before what it is given next.

#![allow(unsafe_code)]

use std::sync::Arc;

use candle_core::cuda_backend::cudarc::driver::sys::CUevent_flags;
use candle_core::cuda_backend::cudarc::driver::{CudaEvent, CudaStream, DevicePtr};
use candle_core::{Device, Error, Result, Storage, Tensor, Var};
use farwire_cuda::{DeviceTensor, Training, ValueType};
use farwire_train::{Library, LibraryResult, Memory, Sink, StageSpec, Values};

use crate::gpt;
use crate::params::Params;

/// Candle, on a card.
///
/// Gradients, residuals, moments and weights stay there. Sums within layers that ranks share, and
/// data that pass between stages, go through host memory.
#[derive(Clone, Debug)]
pub struct CandleCuda(Card);

impl CandleCuda {
    /// Candle on the card of this number. Ranks may share a card.
    pub fn new(ordinal: usize) -> LibraryResult<Self> {
        // First, since its error says what is missing, where candle's would be a number.
        let training = Training::new(&farwire_cuda::Device::new(ordinal)?)?;
        let device = Device::new_cuda_with_stream(ordinal)?;
        // SAFETY: rule 1.
        unsafe { device.as_cuda_device()?.disable_event_tracking() };
        Ok(Self(Card { training: Arc::new(training), device }))
    }

    /// The card as farwire knows it: how much of its memory is free, and what has crossed its bus,
    /// except for candle's own copies.
    pub fn device(&self) -> &Arc<farwire_cuda::Device> {
        self.0.training.device()
    }
}

impl Library for CandleCuda {
    fn stage(&self, spec: StageSpec<'_>) -> LibraryResult<Box<dyn farwire_train::Stage>> {
        let mut params = Params::new(spec.start, spec.group).on(&self.0.device);
        let stage = gpt::stage(&mut params, spec.model, spec.stage, spec.stages)?;
        Ok(Box::new(stage.on(self.0.clone())))
    }

    fn memory(&self) -> Memory {
        Memory::Card(self.0.training.clone())
    }
}

/// A card, as farwire and candle know it.
#[derive(Clone, Debug)]
pub(crate) struct Card {
    training: Arc<Training>,
    device: Device,
}

impl Card {
    fn stream(&self) -> Result<Arc<CudaStream>> {
        Ok(self.device.as_cuda_device()?.cuda_stream())
    }

    /// A variable's memory, to be changed in place.
    pub(crate) fn weights(&self, var: &Var) -> Result<DeviceTensor> {
        let stream = self.stream()?;
        // SAFETY: rule 4: the tensor comes with candle's stream, which keeps the order.
        unsafe { device_tensor(var.as_tensor(), &stream, stream.cu_stream() as u64) }
    }

    /// Gradients that candle's stream has been told to compute.
    pub(crate) fn launched<'a>(
        &'a self,
        gradients: Vec<(&'a str, Tensor)>,
    ) -> Result<Launched<'a>> {
        let contiguous = |(name, gradient): (_, Tensor)| Ok((name, gradient.contiguous()?));
        let gradients = gradients.into_iter().map(contiguous).collect::<Result<_>>()?;
        let stream = self.stream()?;
        let done = stream.record_event(Some(CUevent_flags::CU_EVENT_BLOCKING_SYNC));
        Ok(Launched { card: self, done: done.map_err(Error::wrap)?, stream, gradients })
    }
}

/// Gradients that candle's stream has been told to compute, by name.
pub(crate) struct Launched<'a> {
    card: &'a Card,
    done: CudaEvent,
    stream: Arc<CudaStream>,
    gradients: Vec<(&'a str, Tensor)>,
}

impl Launched<'_> {
    /// Waits until they are computed, and hands them to `sink`.
    pub(crate) fn hand_over(self, sink: &mut Sink<'_>) -> LibraryResult<()> {
        self.done.synchronize().map_err(Error::wrap)?;
        for (name, gradient) in &self.gradients {
            let stream = self.card.training.device().stream();
            // SAFETY: rule 2: nothing writes to it any more, and what reads it is put on farwire's
            // stream; rule 3, in `drop`.
            let tensor = unsafe { device_tensor(gradient, &self.stream, stream)? };
            sink(name, Values::Card(tensor))?;
        }
        Ok(())
    }
}

impl Drop for Launched<'_> {
    fn drop(&mut self) {
        let device = self.card.training.device();
        // SAFETY: rule 3; the stream is candle's, which is held here.
        let ordered = unsafe { device.let_stream_wait(self.stream.cu_stream() as u64) };
        if ordered.is_err() {
            // Without that order the memory must not be used again: the card is lost, or nearly.
            std::mem::forget(std::mem::take(&mut self.gradients));
        }
    }
}

/// A tensor's memory as it is, to be used on `stream`.
///
/// # Safety
///
/// As for [`DeviceTensor::from_raw`], except that the memory is there: the tensor owns it.
unsafe fn device_tensor(tensor: &Tensor, own: &CudaStream, stream: u64) -> Result<DeviceTensor> {
    let (storage, layout) = tensor.storage_and_layout();
    let (Storage::Cuda(storage), Some((start, end))) = (&*storage, layout.contiguous_offsets())
    else {
        return Err(Error::msg("a contiguous tensor on a card is needed here"));
    };
    let slice = storage.as_cuda_slice::<f32>()?.slice(start..end);
    // Dropping the guard records nothing: rule 1.
    let pointer = slice.device_ptr(own).0;
    // SAFETY: promised by the caller; the tensor owns the memory.
    Ok(unsafe {
        DeviceTensor::from_raw(pointer, end - start, ValueType::F32, stream, tensor.clone())
    })
}
