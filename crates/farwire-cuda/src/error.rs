//! What can go wrong on a card, and what to do about it.

use farwire_codec::{DecodeError, EncodeError};

/// Why something was not done on the card.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DeviceError {
    /// There is no driver.
    #[error(
        "no NVIDIA driver on this machine (libcuda.so is not in the library path); \
         install one, or use the CPU"
    )]
    NoDriver,
    /// There is a driver, but no such card.
    #[error(
        "card {ordinal} cannot be used: {why}; \
         `nvidia-smi` lists the cards, CUDA_VISIBLE_DEVICES may hide some"
    )]
    NoCard {
        /// The card that was asked for.
        ordinal: usize,
        /// What the driver says.
        why: String,
    },
    /// There is no run-time compiler.
    #[error(
        "NVRTC is not on this machine (libnvrtc.so is not in the library path), so no kernels can \
         be compiled; install the CUDA toolkit, or `pip install nvidia-cuda-nvrtc`, and put the \
         folder that holds the library into LD_LIBRARY_PATH"
    )]
    NoNvrtc,
    /// The kernels of this crate do not compile for this card.
    #[error("NVRTC cannot compile {kernel} for this card: {log}")]
    Compile {
        /// The source file.
        kernel: String,
        /// What the compiler says.
        log: String,
    },
    /// There are no kernels for this codec, or for one of its options.
    #[error("{codec} does not run on the card: {why}")]
    Unsupported {
        /// The codec.
        codec: String,
        /// What is missing.
        why: &'static str,
    },
    /// Not enough memory on the card, or not enough pinned memory on the host.
    #[error(
        "out of {which} memory: {bytes} bytes are not free; nothing was changed. \
         Use smaller buckets, or free memory first"
    )]
    OutOfMemory {
        /// Device or pinned.
        which: &'static str,
        /// The number of bytes asked for.
        bytes: usize,
    },
    /// Anything else the driver says.
    #[error("the card failed to {what}: {why}")]
    Driver {
        /// What was being done.
        what: &'static str,
        /// What the driver says.
        why: String,
    },
    /// The values cannot be encoded: the error the CPU codec gives.
    #[error(transparent)]
    Encode(#[from] EncodeError),
    /// The message cannot be decoded: the error the CPU codec gives.
    #[error(transparent)]
    Decode(#[from] DecodeError),
    /// The card refuses a message that the CPU accepts: a bug.
    #[error("the card refuses a message of {codec} that the CPU decodes; please report this")]
    Disagreement {
        /// The codec.
        codec: String,
    },
}
