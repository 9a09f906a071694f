//! Vectors whose element type is known at run time, and a pool of them.

use std::fmt;

use farwire_codec::exchange::Floats;
use farwire_proto::DType;
use half::{bf16, f16};

/// A vector of any element type. What collectives own from submit to completion.
#[derive(Clone, PartialEq)]
#[non_exhaustive]
pub enum Buffer {
    /// 32-bit floats.
    F32(Vec<f32>),
    /// 64-bit floats.
    F64(Vec<f64>),
    /// 16-bit floats, IEEE binary16.
    F16(Vec<f16>),
    /// 16-bit floats, bfloat16.
    Bf16(Vec<bf16>),
    /// Signed bytes.
    I8(Vec<i8>),
    /// 32-bit signed integers.
    I32(Vec<i32>),
    /// 64-bit signed integers.
    I64(Vec<i64>),
    /// Bytes.
    U8(Vec<u8>),
    /// 32-bit unsigned integers.
    U32(Vec<u32>),
    /// 64-bit unsigned integers.
    U64(Vec<u64>),
}

/// Type and length: an error that holds a long input, shown by a `main` that returns it, has to fit a screen.
impl fmt::Debug for Buffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Buffer({:?}; {})", self.dtype(), self.bytes().len() / self.dtype().size())
    }
}

/// A type that vectors can be made of.
pub trait Element: farwire_proto::Element + Default + Send + Sync {
    /// A vector of this type as a [`Buffer`].
    fn wrap(elements: Vec<Self>) -> Buffer;
    /// The vector in a [`Buffer`], if it is of this type.
    fn unwrap(buffer: Buffer) -> Option<Vec<Self>>;
}

macro_rules! elements {
    ($($type:ty => $variant:ident),* $(,)?) => {
        $(impl Element for $type {
            fn wrap(elements: Vec<Self>) -> Buffer {
                Buffer::$variant(elements)
            }
            fn unwrap(buffer: Buffer) -> Option<Vec<Self>> {
                match buffer {
                    Buffer::$variant(elements) => Some(elements),
                    _ => None,
                }
            }
        })*

        impl Buffer {
            /// A vector of `len` zeros.
            pub fn zeros(dtype: DType, len: usize) -> Self {
                match dtype {
                    $(DType::$variant => Self::$variant(vec![Default::default(); len]),)*
                }
            }

            /// Its element type.
            pub fn dtype(&self) -> DType {
                match self {
                    $(Self::$variant(_) => DType::$variant,)*
                }
            }

            /// Its bytes.
            pub fn bytes(&self) -> &[u8] {
                match self {
                    $(Self::$variant(elements) => bytemuck::cast_slice(elements),)*
                }
            }

            /// Its bytes, to write to.
            pub fn bytes_mut(&mut self) -> &mut [u8] {
                match self {
                    $(Self::$variant(elements) => bytemuck::cast_slice_mut(elements),)*
                }
            }
        }
    };
}

elements! {
    f32 => F32, f64 => F64, f16 => F16, bf16 => Bf16,
    i8 => I8, i32 => I32, i64 => I64, u8 => U8, u32 => U32, u64 => U64,
}

impl Buffer {
    /// How many elements it has.
    pub fn len(&self) -> usize {
        self.bytes().len() / self.dtype().size()
    }

    /// Whether it has none.
    pub fn is_empty(&self) -> bool {
        self.bytes().is_empty()
    }
}

impl From<Floats> for Buffer {
    fn from(floats: Floats) -> Self {
        match floats {
            Floats::F32(elements) => Self::F32(elements),
            Floats::F64(elements) => Self::F64(elements),
            Floats::F16(elements) => Self::F16(elements),
            Floats::Bf16(elements) => Self::Bf16(elements),
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

    /// A buffer with anything in it.
    pub(crate) fn take(&mut self, dtype: DType, len: usize) -> Buffer {
        let fits = |buffer: &Buffer| buffer.dtype() == dtype && buffer.len() == len;
        match self.buffers.iter().rposition(fits) {
            Some(index) => self.buffers.remove(index),
            None => Buffer::zeros(dtype, len),
        }
    }

    pub(crate) fn give(&mut self, buffer: Buffer) {
        if buffer.is_empty() {
            return;
        }
        if self.buffers.len() == Self::BUFFERS {
            self.buffers.remove(0);
        }
        self.buffers.push(buffer);
    }
}
