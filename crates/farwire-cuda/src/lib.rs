//! farwire's gradient compressors as CUDA kernels: gradients are compressed where they are, and
//! only compressed bytes leave the card.
//!
//! Messages and residuals match those of the CPU codec to the bit: ranks with a GPU and ranks
//! without one train together, and the tests compare against the CPU codec.
//!
//! 1. [`Device::new`] opens a card. CUDA is not needed to build this crate or to run a program that
//!    contains it: the driver and NVRTC are loaded at run time, and an error says what is missing.
//! 2. [`DeviceCodec::new`] takes a [`CodecSpec`]. Its kernels are compiled at first use, for this
//!    card, and kept on disk ([`cache`]).
//! 3. [`DeviceCodec::encode`] adds the residual to the gradient and makes one message per shard, in
//!    pinned memory. The new residual is kept separately: [`DeviceEncoded::swap_residual`] puts it
//!    in place once the step has succeeded.
//! 4. [`DeviceCodec::add_decoded`] adds a message to an accumulator on the card. Call it in rank
//!    order.
//!
//! ```no_run
//! use farwire_codec::{CodecSpec, CodedPlace, Context, Role};
//! use farwire_cuda::{Device, DeviceCodec, DeviceEncoded, DeviceJob, DeviceResidual, Inbox};
//!
//! # fn main() -> Result<(), farwire_cuda::DeviceError> {
//! let device = Device::new(0)?;
//! let codec = DeviceCodec::new(&device, &"int8".parse::<CodecSpec>().expect("a codec"))?;
//! let gradient = device.upload(&[0.5f32, -1.0, 2.0])?;
//! let context = Context { seed: 1, step: 0, tensor: Context::tensor_id("w") };
//! let place = CodedPlace::whole(context, 3);
//! let mut out = DeviceEncoded::new(&device)?;
//! let job = DeviceJob {
//!     values: gradient.values(),
//!     residual: DeviceResidual::Zero,
//!     place: place.clone(),
//!     role: Role::Worker,
//!     rank: 0,
//!     shards: &[0..3],
//! };
//! codec.encode(&job, &mut out)?;
//!
//! let mut acc = device.zeros::<f32>(3)?;
//! let mut inbox = Inbox::new(&device)?;
//! inbox.copy_from(out.message(0))?;
//! codec.add_decoded(&mut inbox, &place, (&mut acc).into())?;
//! # Ok(())
//! # }
//! ```
//!
//! A [`DeviceCommunicator`] does all of this in an all-reduce and keeps the residuals on the card.
//! [`Training`] has the other operations on gradients and weights, so that they can stay there.
//!
//! All work on a [`Device`] runs in order on one stream.
//!
//! [`CodecSpec`]: farwire_codec::CodecSpec

#![deny(unsafe_code)]

pub mod bench;
pub mod cache;
mod codec;
mod comm;
mod driver;
mod error;
mod kernels;
mod nvrtc;
mod source;
mod staging;
mod training;
mod vectors;

pub use codec::{DeviceCodec, DeviceEncoded, DeviceJob, DeviceResidual, Inbox};
pub use comm::{DeviceCommunicator, DeviceTools};
pub use driver::{
    Buffer, BusTraffic, Card, Device, DevicePart, DeviceTensor, DeviceValues, Pinned,
    TensorElement, Timer, ValueType, cards,
};
pub use error::DeviceError;
pub use kernels::AdamWStep;
pub use nvrtc::nvrtc_version;
pub use training::{NotFiniteElements, Training};
