//! Element types and reduction operators.

use std::fmt;
use std::str::FromStr;

use bytemuck::Pod;

/// The table of element types, handed to a macro: `dtypes!([numbers] more)` is
/// `numbers! { [more] the table }`.
///
/// A row is what all crates know of a type: its [`DType`], its code on the wire, its class, and its
/// Rust type, which is also its name. The class says how it is added up: an `integer` or a `float`
/// as it is, a `short` float in f32. A new type is a new row, a re-export in [`types`] if it is not
/// Rust's own, and an `impl Short` if it is a short float. Codes are never reused.
#[doc(hidden)]
#[macro_export]
macro_rules! dtypes {
    ([$($then:tt)*] $($given:tt)*) => {
        $($then)*! {
            [$($given)*]
            /// 32-bit float.
            F32 = 1: float f32;
            /// 64-bit float.
            F64 = 2: float f64;
            /// 16-bit float, IEEE binary16. Accumulates in f32.
            F16 = 3: short f16;
            /// 16-bit float, bfloat16. Accumulates in f32.
            Bf16 = 4: short bf16;
            /// Signed byte.
            I8 = 5: integer i8;
            /// 32-bit signed integer.
            I32 = 6: integer i32;
            /// 64-bit signed integer.
            I64 = 7: integer i64;
            /// Unsigned byte.
            U8 = 8: integer u8;
            /// 32-bit unsigned integer.
            U32 = 9: integer u32;
            /// 64-bit unsigned integer.
            U64 = 10: integer u64;
        }
    };
}
/// The Rust types that vectors can be made of, by the names people type.
pub mod types {
    pub use std::primitive::*;

    pub use half::{bf16, f16};
}

macro_rules! define {
    ([] $($(#[$doc:meta])* $variant:ident = $code:literal: $class:ident $type:ident;)*) => {
        /// The type of a vector's elements.
        ///
        /// On the wire and in memory elements are little-endian.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[repr(u8)]
        pub enum DType {
            $($(#[$doc])* $variant = $code,)*
        }

        impl DType {
            /// Every element type.
            pub const ALL: [Self; [$(Self::$variant),*].len()] = [$(Self::$variant),*];

            /// Bytes per element.
            pub const fn size(self) -> usize {
                match self {
                    $(Self::$variant => size_of::<types::$type>(),)*
                }
            }

            /// The type that sums of this type are held in until they are complete: f32 for the
            /// 16-bit floats, itself for the rest. Partial results cross the wire in this type, so
            /// a 16-bit result is rounded exactly once.
            pub const fn accumulator(self) -> Self {
                match self {
                    $(Self::$variant => class!($class Self::$variant, Self::$variant, Self::F32),)*
                }
            }

            /// Whether the type is a float.
            pub const fn is_float(self) -> bool {
                match self {
                    $(Self::$variant => class!($class false, true, true),)*
                }
            }

            /// The name people type: `f32`, `bf16`, `i64`, …
            pub const fn name(self) -> &'static str {
                match self {
                    $(Self::$variant => stringify!($type),)*
                }
            }

            /// The type with this wire code.
            pub fn from_code(code: u8) -> Option<Self> {
                Self::ALL.into_iter().find(|dtype| *dtype as u8 == code)
            }
        }

        $(
            impl private::Sealed for types::$type {}
            impl Element for types::$type {
                const DTYPE: DType = DType::$variant;

                fn cast(value: f64) -> Self {
                    class!($class value as Self, value as Self, Self::from_f32(value as f32))
                }

                fn as_f64(self) -> f64 {
                    class!($class self as f64, self as f64, self.to_f32() as f64)
                }

                fn is_finite(self) -> bool {
                    class!($class true, Self::is_finite(self), Self::is_finite(self))
                }
            }
        )*
    };
}

/// The first expression for an integer, the second for a float, the third for a short one.
macro_rules! class {
    (integer $integer:expr, $float:expr, $short:expr) => {
        $integer
    };
    (float $integer:expr, $float:expr, $short:expr) => {
        $float
    };
    (short $integer:expr, $float:expr, $short:expr) => {
        $short
    };
}

dtypes!([define]);

/// Evaluates an expression in which a name stands for the Rust type of a run-time [`DType`]. It is
/// compiled for each type, and one `match` chooses.
///
/// ```
/// use farwire_proto::{DType, Element, with_type};
///
/// fn bits<T: Element>() -> usize {
///     8 * size_of::<T>()
/// }
///
/// assert_eq!(with_type!(DType::Bf16, T => bits::<T>()), 16);
/// ```
#[macro_export]
macro_rules! with_type {
    ($dtype:expr, $name:ident => $body:expr) => {
        $crate::dtypes!([$crate::match_type] ($dtype) $name ($body))
    };
}

/// [`with_type!`], given the table.
#[doc(hidden)]
#[macro_export]
macro_rules! match_type {
    (
        [($dtype:expr) $name:ident ($body:expr)]
        $($(#[$doc:meta])* $variant:ident = $code:literal: $class:ident $type:ident;)*
    ) => {
        match $dtype {
            $($crate::DType::$variant => {
                type $name = $crate::types::$type;
                $body
            })*
        }
    };
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
    /// would silently drop the remainder.
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

/// A name that is not one of those accepted.
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

/// A type that vectors can be made of: one of [`types`] with a [`DType`] of its own.
pub trait Element: Pod + Default + PartialEq + fmt::Debug + Send + Sync + private::Sealed {
    /// The [`DType`] that stands for it at run time.
    const DTYPE: DType;

    /// The number in this type, as `as` converts it: integers drop the fraction and stop at their
    /// limits. Short floats are rounded to f32 first.
    fn cast(value: f64) -> Self;

    /// The number as a double, as `as` converts it.
    fn as_f64(self) -> f64;

    /// Whether it is neither infinite nor NaN.
    fn is_finite(self) -> bool;
}

mod private {
    pub trait Sealed {}
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
    fn sizes_and_small_numbers_match_the_types() {
        fn check<T: Element>() {
            assert_eq!(size_of::<T>(), T::DTYPE.size());
            assert_eq!(T::cast(3.0).as_f64(), 3.0);
        }
        for dtype in DType::ALL {
            with_type!(dtype, T => check::<T>());
        }
    }
}
