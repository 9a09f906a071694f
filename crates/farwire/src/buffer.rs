//! Element types, and a pool of buffers.

use farwire_codec::collective::Floats;
use farwire_proto::{Buffers, DType};
use half::{bf16, f16};

use crate::memory::Buffer;

/// A type that vectors can be made of: f32, f64, f16, bf16, i8, i32, i64, u8, u32 or u64.
pub trait Element: farwire_proto::Element + Default + Send + Sync + sealed::Sealed {}

pub(crate) mod sealed {
    /// Types that this crate knows. [`Memory`](crate::Memory) relies on each having a [`DType`](crate::DType) of its own.
    pub trait Sealed {}
}

macro_rules! elements {
    ($($type:ty => $variant:ident),* $(,)?) => {
        $(
            impl Element for $type {}
            impl sealed::Sealed for $type {}
        )*

        impl Buffer {
            /// A vector of `len` zeros.
            pub(crate) fn zeros(dtype: DType, len: usize) -> Self {
                match dtype {
                    $(DType::$variant => vec![<$type>::default(); len].into(),)*
                }
            }
        }
    };
}

elements! {
    f32 => F32, f64 => F64, f16 => F16, bf16 => Bf16,
    i8 => I8, i32 => I32, i64 => I64, u8 => U8, u32 => U32, u64 => U64,
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

/// Buffers of finished operations, for the next ones: a loop of collectives touches no fresh memory after its second round.
#[derive(Debug, Default)]
pub(crate) struct Pool {
    buffers: Vec<Buffer>,
}

impl Pool {
    /// Enough for many operations in flight; the oldest go first.
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

    /// Keeps a vector of this crate's own or of a caller who does not want it back.
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
