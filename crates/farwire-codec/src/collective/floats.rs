//! Vectors that go into a collective.

use std::ops::Range;

use farwire_proto::DType;
use half::{bf16, f16};

use crate::job::Values;

/// A vector of any float type.
#[derive(Clone, Debug, PartialEq)]
pub enum Floats {
    /// 32-bit floats.
    F32(Vec<f32>),
    /// 64-bit floats.
    F64(Vec<f64>),
    /// IEEE binary16.
    F16(Vec<f16>),
    /// bfloat16.
    Bf16(Vec<bf16>),
}

/// The same expression for every type.
macro_rules! each {
    ($floats:expr, $values:ident => $result:expr) => {
        match $floats {
            Floats::F32($values) => $result,
            Floats::F64($values) => $result,
            Floats::F16($values) => $result,
            Floats::Bf16($values) => $result,
        }
    };
}

impl Floats {
    /// Number of elements.
    pub fn len(&self) -> usize {
        each!(self, values => values.len())
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The element type.
    pub fn dtype(&self) -> DType {
        match self {
            Self::F32(_) => DType::F32,
            Self::F64(_) => DType::F64,
            Self::F16(_) => DType::F16,
            Self::Bf16(_) => DType::Bf16,
        }
    }

    /// Their bytes.
    pub fn into_bytes(self) -> Vec<u8> {
        each!(self, values => bytemuck::cast_slice(&values).to_vec())
    }

    /// Adds `owed` to the elements, and returns what rounding to 16 bits dropped: nothing for f32
    /// and f64, where only the addition itself rounds, as it does in every codec. `None`, with
    /// nothing changed, if a sum is not finite.
    pub(crate) fn add(&mut self, owed: &[f32]) -> Option<Vec<f32>> {
        macro_rules! add_16_bits {
            ($values:ident, $type:ty) => {{
                let sums = $values.iter().zip(owed).map(|(value, owed)| value.to_f32() + owed);
                let sums: Vec<f32> = sums.collect();
                let largest = <$type>::MAX.to_f32();
                let round = |(value, sum): (&mut $type, &f32)| {
                    *value = <$type>::from_f32(sum.clamp(-largest, largest));
                    sum - value.to_f32()
                };
                let finite = sums.iter().all(|sum| sum.is_finite());
                finite.then(|| $values.iter_mut().zip(&sums).map(round).collect())
            }};
        }
        macro_rules! add_whole {
            ($values:ident, $type:ty) => {{
                let finite = $values
                    .iter()
                    .zip(owed)
                    .all(|(value, o)| (value + <$type>::from(*o)).is_finite());
                finite.then(|| {
                    $values
                        .iter_mut()
                        .zip(owed)
                        .for_each(|(value, owed)| *value += <$type>::from(*owed));
                    Vec::new()
                })
            }};
        }
        match self {
            Self::F32(values) => add_whole!(values, f32),
            Self::F64(values) => add_whole!(values, f64),
            Self::F16(values) => add_16_bits!(values, f16),
            Self::Bf16(values) => add_16_bits!(values, bf16),
        }
    }

    /// Some of the elements.
    pub(super) fn values(&self, range: Range<usize>) -> Values<'_> {
        each!(self, values => (&values[range]).into())
    }
}
