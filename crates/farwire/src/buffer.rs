//! Vectors whose element type is known at run time, and a pool of them.

use farwire_codec::collective::Floats;
use farwire_proto::{Buffers, DType, with_type};

use crate::memory::Buffer;

impl Buffer {
    /// A vector of `len` zeros.
    pub(crate) fn zeros(dtype: DType, len: usize) -> Self {
        with_type!(dtype, T => vec![T::default(); len].into())
    }
}

impl From<Floats> for Buffer {
    fn from(floats: Floats) -> Self {
        match floats {
            Floats::F32(elements) => elements.into(),
            Floats::F64(elements) => elements.into(),
            Floats::F16(elements) => elements.into(),
            Floats::Bf16(elements) => elements.into(),
        }
    }
}

/// Buffers of finished operations, for the next ones: a loop of collectives touches no fresh memory
/// after its second round.
#[derive(Debug, Default)]
pub(crate) struct Pool {
    buffers: Vec<Buffer>,
}

impl Pool {
    /// Enough for many operations in flight; the oldest buffers are dropped first.
    const BUFFERS: usize = 16;
}

impl Buffers for Pool {
    type Buffer = Buffer;

    fn take(&mut self, dtype: DType, len: usize) -> Buffer {
        let fits = |buffer: &Buffer| buffer.dtype() == dtype && buffer.len() == len;
        match self.buffers.iter().rposition(fits) {
            Some(index) => self.buffers.remove(index),
            None => Buffer::zeros(dtype, len),
        }
    }

    /// Keeps a vector that this crate made, or that its caller does not want back.
    fn give(&mut self, buffer: Buffer) {
        debug_assert!(!buffer.is_foreign(), "what others own goes back to them");
        if buffer.is_empty() {
            return;
        }
        if self.buffers.len() == Self::BUFFERS {
            self.buffers.remove(0);
        }
        self.buffers.push(buffer);
    }
}
