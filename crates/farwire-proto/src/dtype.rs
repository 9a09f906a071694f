//! Element types and reduction operators.

use std::fmt;
use std::str::FromStr;

use bytemuck::Pod;
use half::{bf16, f16};

/// The type of a vector's elements.
///
/// On the wire and in memory elements are little-endian.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum DType {
    /// 32-bit float.
    F32 = 1,
    /// 64-bit float.
    F64 = 2,
    /// 16-bit float, IEEE binary16. Accumulates in f32.
    F16 = 3,
    /// 16-bit float, bfloat16. Accumulates in f32.
    Bf16 = 4,
    /// Signed byte.
    I8 = 5,
    /// 32-bit signed integer.
    I32 = 6,
    /// 64-bit signed integer.
    I64 = 7,
    /// Unsigned byte.
    U8 = 8,
    /// 32-bit unsigned integer.
    U32 = 9,
    /// 64-bit unsigned integer.
    U64 = 10,
}

impl DType {
    /// Every element type.
    pub const ALL: [Self; 10] = [
        Self::F32,
        Self::F64,
        Self::F16,
        Self::Bf16,
        Self::I8,
        Self::I32,
        Self::I64,
        Self::U8,
        Self::U32,
        Self::U64,
    ];

    /// Bytes per element.
    pub fn size(self) -> usize {
        match self {
            Self::I8 | Self::U8 => 1,
            Self::F16 | Self::Bf16 => 2,
            Self::F32 | Self::I32 | Self::U32 => 4,
            Self::F64 | Self::I64 | Self::U64 => 8,
        }
    }

    /// The type that sums of this type are held in until they are complete: f32 for the 16-bit
    /// floats, itself for the rest. Partial results cross the wire in this type, so a 16-bit result
    /// is rounded exactly once.
    pub fn accumulator(self) -> Self {
        match self {
            Self::F16 | Self::Bf16 => Self::F32,
            other => other,
        }
    }

    /// Whether the type is a float.
    pub fn is_float(self) -> bool {
        matches!(self, Self::F32 | Self::F64 | Self::F16 | Self::Bf16)
    }

    /// The name people type: `f32`, `bf16`, `i64`, …
    pub fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::F64 => "f64",
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
            Self::I8 => "i8",
            Self::I32 => "i32",
            Self::I64 => "i64",
            Self::U8 => "u8",
            Self::U32 => "u32",
            Self::U64 => "u64",
        }
    }

    /// The type with this wire code.
    pub fn from_code(code: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|dtype| *dtype as u8 == code)
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// How elements are combined.
///
/// Floats are folded left to right: `((x0 ∘ x1) ∘ x2) ∘ …`. Integer sums and products wrap on
/// overflow. `Min` and `Max` return NaN if any element is NaN and order −0 below +0, so they give
/// the same result in any order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum ReduceOp {
    /// Sum; integers wrap.
    Sum = 1,
    /// Sum divided by the number of ranks, in the accumulator's type. Floats only: an integer mean
    /// would drop the remainder unsaid.
    Mean = 2,
    /// Product; integers wrap.
    Prod = 3,
    /// Smallest element.
    Min = 4,
    /// Largest element.
    Max = 5,
}

impl ReduceOp {
    /// Every operator.
    pub const ALL: [Self; 5] = [Self::Sum, Self::Mean, Self::Prod, Self::Min, Self::Max];

    /// The name people type: `sum`, `mean`, `prod`, `min`, `max`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Sum => "sum",
            Self::Mean => "mean",
            Self::Prod => "prod",
            Self::Min => "min",
            Self::Max => "max",
        }
    }

    /// The operator with this wire code.
    pub fn from_code(code: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|op| *op as u8 == code)
    }

    /// Whether regrouping or reordering the operands can change the bits of the result.
    pub fn depends_on_order(self, dtype: DType) -> bool {
        dtype.is_float() && !matches!(self, Self::Min | Self::Max)
    }
}

impl fmt::Display for ReduceOp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A name that is none of the accepted ones.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{given}` is not a known {what}; use one of: {accepted}")]
pub struct UnknownName {
    what: &'static str,
    given: String,
    accepted: String,
}

impl UnknownName {
    pub(crate) fn new(what: &'static str, given: &str, names: &[&str]) -> Self {
        Self { what, given: given.to_owned(), accepted: names.join(", ") }
    }
}

impl FromStr for DType {
    type Err = UnknownName;

    fn from_str(name: &str) -> Result<Self, UnknownName> {
        Self::ALL
            .into_iter()
            .find(|dtype| dtype.name() == name)
            .ok_or_else(|| UnknownName::new("element type", name, &Self::ALL.map(Self::name)))
    }
}

impl FromStr for ReduceOp {
    type Err = UnknownName;

    fn from_str(name: &str) -> Result<Self, UnknownName> {
        Self::ALL
            .into_iter()
            .find(|op| op.name() == name)
            .ok_or_else(|| UnknownName::new("reduction", name, &Self::ALL.map(Self::name)))
    }
}

/// A Rust type that vectors can be made of.
pub trait Element: Pod + PartialEq + fmt::Debug + private::Sealed {
    /// Its run-time name.
    const DTYPE: DType;
}

mod private {
    pub trait Sealed {}
}

macro_rules! elements {
    ($($type:ty => $dtype:ident),* $(,)?) => {$(
        impl private::Sealed for $type {}
        impl Element for $type {
            const DTYPE: DType = DType::$dtype;
        }
    )*};
}

elements! {
    f32 => F32, f64 => F64, f16 => F16, bf16 => Bf16,
    i8 => I8, i32 => I32, i64 => I64, u8 => U8, u32 => U32, u64 => U64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_and_names_round_trip() {
        for dtype in DType::ALL {
            assert_eq!(DType::from_code(dtype as u8), Some(dtype));
            assert_eq!(dtype.name().parse(), Ok(dtype));
        }
        for op in ReduceOp::ALL {
            assert_eq!(ReduceOp::from_code(op as u8), Some(op));
            assert_eq!(op.name().parse(), Ok(op));
        }
        let error = "float".parse::<DType>().unwrap_err().to_string();
        assert!(error.contains("`float`") && error.contains("bf16"), "{error}");
    }

    #[test]
    fn sizes_match_the_types() {
        fn check<T: Element>() {
            assert_eq!(size_of::<T>(), T::DTYPE.size());
        }
        check::<f32>();
        check::<f64>();
        check::<f16>();
        check::<bf16>();
        check::<i8>();
        check::<i32>();
        check::<i64>();
        check::<u8>();
        check::<u32>();
        check::<u64>();
    }
}
