//! PowerSGD: sends a matrix of low rank in place of the gradient, from one step of power iteration
//! that starts where the last one ended.
//!
//! The gradient plus residual of rank i is treated as an m × n matrix Mᵢ. All ranks hold the same
//! Q, n × r:
//!
//! 1. Pᵢ = Mᵢ·Q. The ranks sum P (m × r) and make its columns orthonormal: this is P̂, the same on
//!    every rank.
//! 2. Qᵢ = Mᵢᵀ·P̂. The ranks sum Q (n × r).
//! 3. The result is P̂·Qᵀ. What rank i has not sent is Mᵢ − P̂·Qᵢᵀ: that is its residual, and the
//!    results and residuals add up to the inputs. Q is kept for the next step.
//!
//! A tensor of two or more dimensions becomes a matrix of its first by the rest, if both are above
//! 1; any other is cut into rows of ⌈√len⌉ elements, the last one padded with zeros. Small tensors
//! are better left dense.
//!
//! Bytes: P and Q travel as f32, by any allreduce: 4·r·(m + n) each way.
//!
//! Long sums are made in pieces, of [`SEGMENT`] columns for P and [`BAND`] rows for Q, which are
//! then added from first to last. So a GPU can compute the pieces in parallel and get the same
//! bits.

use std::sync::Arc;

use crate::codec::{Codec, CodecFamily, Travel};
use crate::error::EncodeError;
use crate::job::{CodedPlace, Context, Fused, Job, Residual, Role, Values};
use crate::rng::{Counter, Purpose};
use crate::simd::{self, Level};
use crate::spec::{CodecSpec, positive};

/// Columns per partial sum in an element of P.
pub const SEGMENT: usize = 512;
/// Rows per partial sum in an element of Q.
pub const BAND: usize = 128;

/// Sends matrices of a given rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PowerSgd {
    /// Columns of P and Q, at least 1. A matrix with fewer rows or columns uses only that many.
    pub rank: usize,
}

pub(super) const FAMILY: CodecFamily = CodecFamily {
    names: &["powersgd"],
    forms: "powersgd:4",
    help: "the tensor as a matrix of this rank, in two factors; the rest is sent later",
    typical: &["powersgd:4"],
    corners: &["powersgd:1", "powersgd:2"],
    parse: |params| Ok(CodecSpec::new(PowerSgd { rank: positive("rank", params.argument("4")?)? })),
};

impl Codec for PowerSgd {
    fn name(&self) -> String {
        format!("powersgd:{}", self.rank)
    }

    fn travels(self: Arc<Self>) -> Travel {
        Travel::Factors(*self)
    }
}

/// A tensor seen as a matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Rows; elements missing from the last row are zero.
    pub rows: usize,
    /// Columns.
    pub columns: usize,
}

impl Shape {
    /// The matrix of a tensor with these dimensions.
    pub fn of(dimensions: &[usize]) -> Self {
        let elements: usize = dimensions.iter().product();
        match dimensions {
            [rows, _, ..] if *rows > 1 && elements / rows > 1 => {
                Self { rows: *rows, columns: elements / rows }
            }
            _ => {
                let columns = elements.isqrt() + usize::from(elements.isqrt().pow(2) < elements);
                Self { rows: elements.div_ceil(columns.max(1)), columns }
            }
        }
    }
}

impl PowerSgd {
    /// Starts a step: computes this rank's P. `warm` is [`PowerState::warm`] of the last step, if
    /// there was one.
    pub fn begin(
        &self,
        values: Values<'_>,
        residual: Residual<'_>,
        warm: Option<&[f32]>,
        shape: Shape,
        context: Context,
    ) -> Result<PowerP, EncodeError> {
        let len = values.len();
        assert!(
            len <= shape.rows * shape.columns && len + shape.columns >= shape.rows * shape.columns,
            "the shape is of these values"
        );
        let rank = self.rank.min(shape.rows).min(shape.columns);
        let mut matrix = vec![0.0; len];
        let job = Job {
            values,
            residual,
            place: CodedPlace::whole(context, len),
            role: Role::Worker,
            rank: 0,
            shards: &[],
            threads: std::num::NonZeroUsize::MIN,
        };
        let level = Level::detect();
        Fused::new(level, &job).read(0, &mut matrix)?;

        let q = self.start(warm, shape, context);
        let mut p = vec![0.0; shape.rows * rank];
        for (row, p) in matrix.chunks(shape.columns.max(1)).zip(p.chunks_mut(rank.max(1))) {
            for (p, column) in p.iter_mut().zip(q.chunks(shape.columns)) {
                let segments = row.chunks(SEGMENT).zip(column.chunks(SEGMENT));
                *p = segments.fold(0.0, |sum, (row, column)| sum + simd::dot(level, row, column));
            }
        }
        check_finite(&p)?;
        Ok(PowerP { matrix, shape, rank, p, keep: !matches!(residual, Residual::Off) })
    }

    /// The Q that a step starts with, column by column.
    pub(crate) fn start(&self, warm: Option<&[f32]>, shape: Shape, context: Context) -> Vec<f32> {
        let rank = self.rank.min(shape.rows).min(shape.columns);
        let mut q = match warm {
            Some(warm) if warm.len() == shape.columns * rank => warm.to_vec(),
            _ => vec![0.0; shape.columns * rank],
        };
        // A column of zeros, at the start or after a gradient of zeros, would stay zero for ever.
        let counter = Counter::new(context, Purpose::WarmStart);
        for (k, column) in q.chunks_mut(shape.columns.max(1)).enumerate() {
            if column.iter().all(|value| *value == 0.0) {
                let start = (k * shape.columns) as u64;
                column.iter_mut().zip(start..).for_each(|(value, i)| *value = counter.normal(i));
            }
        }
        q
    }

    /// Elements of P and of Q for a matrix of this shape, which the two sums move.
    pub fn factor_lens(&self, shape: Shape) -> (usize, usize) {
        let rank = self.rank.min(shape.rows).min(shape.columns);
        (shape.rows * rank, shape.columns * rank)
    }
}

/// A step that waits for the sum of P over the ranks.
#[derive(Debug)]
pub struct PowerP {
    matrix: Vec<f32>,
    shape: Shape,
    rank: usize,
    p: Vec<f32>,
    keep: bool,
}

impl PowerP {
    /// This rank's P, row by row.
    pub fn p(&self) -> &[f32] {
        &self.p
    }

    /// Continues with the sum of all ranks' P: computes this rank's Q.
    pub fn with_sum(self, mut p: Vec<f32>) -> Result<PowerQ, EncodeError> {
        assert_eq!(p.len(), self.p.len(), "the sum of P has the shape of P");
        check_finite(&p)?;
        orthonormalise(&mut p, self.rank);
        let Self { matrix, shape, rank, keep, .. } = self;
        let level = Level::detect();
        let (columns, factors) = (shape.columns.max(1), rank.max(1));
        let mut q = vec![0.0; shape.columns * rank];
        let mut part = vec![0.0; q.len()];
        for (band, p) in matrix.chunks(BAND * columns).zip(p.chunks(BAND * factors)) {
            part.fill(0.0);
            for (row, p) in band.chunks(columns).zip(p.chunks(factors)) {
                for (p, column) in p.iter().zip(part.chunks_mut(columns)) {
                    simd::add_scaled(level, column, row, *p);
                }
            }
            simd::add_scaled(level, &mut q, &part, 1.0);
        }
        check_finite(&q)?;
        Ok(PowerQ { matrix, shape, rank, p, q, keep })
    }
}

/// A step that waits for the sum of Q over the ranks.
#[derive(Debug)]
pub struct PowerQ {
    matrix: Vec<f32>,
    shape: Shape,
    rank: usize,
    p: Vec<f32>,
    q: Vec<f32>,
    keep: bool,
}

impl PowerQ {
    /// This rank's Q, column by column, so that the inner loops run along rows of the matrix.
    pub fn q(&self) -> &[f32] {
        &self.q
    }

    /// Finishes with the sum of all ranks' Q: adds the result to `acc`, and returns what to keep
    /// for the next step.
    pub fn with_sum(self, q: Vec<f32>, acc: &mut [f32]) -> Result<PowerState, EncodeError> {
        assert_eq!(q.len(), self.q.len(), "the sum of Q has the shape of Q");
        assert_eq!(acc.len(), self.matrix.len(), "one element for each of the tensor");
        check_finite(&q)?;
        let Self { mut matrix, shape, rank, p, q: own, keep } = self;
        let (level, columns, rank) = (Level::detect(), shape.columns.max(1), rank.max(1));
        for (row, p) in acc.chunks_mut(columns).zip(p.chunks(rank)) {
            p.iter()
                .zip(q.chunks(columns))
                .for_each(|(p, column)| simd::add_scaled(level, row, column, *p));
        }
        for (row, p) in matrix.chunks_mut(columns).zip(p.chunks(rank)) {
            p.iter()
                .zip(own.chunks(columns))
                .for_each(|(p, column)| simd::sub_scaled(level, row, column, *p));
        }
        Ok(PowerState { residual: if keep { matrix } else { Vec::new() }, warm: q })
    }
}

/// What a step leaves for the next one.
#[derive(Debug)]
pub struct PowerState {
    /// What this rank has not sent; empty with [`Residual::Off`].
    pub residual: Vec<f32>,
    /// The Q that the next step starts with, the same on every rank.
    pub warm: Vec<f32>,
}

pub(crate) fn check_finite(values: &[f32]) -> Result<(), EncodeError> {
    match values.iter().position(|value| !value.is_finite()) {
        Some(index) => Err(EncodeError::NotFinite { index }),
        None => Ok(()),
    }
}

/// Makes the columns of a matrix of `rank` columns orthonormal, left to right (modified
/// Gram–Schmidt, in f64). A column that the ones before it already span becomes zero.
pub(crate) fn orthonormalise(matrix: &mut [f32], rank: usize) {
    if matrix.is_empty() {
        return;
    }
    let mut columns: Vec<Vec<f64>> = (0..rank)
        .map(|c| matrix.iter().skip(c).step_by(rank).map(|x| f64::from(*x)).collect())
        .collect();
    let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
    for c in 0..rank {
        let (done, rest) = columns.split_at_mut(c);
        let column = &mut rest[0];
        let before = dot(column, column);
        // Twice: the second pass removes what rounding left in the first.
        for _ in 0..2 {
            for other in &*done {
                let along = dot(column, other);
                column.iter_mut().zip(other).for_each(|(x, o)| *x -= along * o);
            }
        }
        let norm = dot(column, column);
        let factor = if norm > before * 1e-12 && norm > 0.0 { 1.0 / norm.sqrt() } else { 0.0 };
        column.iter_mut().for_each(|x| *x *= factor);
    }
    for (c, column) in columns.iter().enumerate() {
        matrix
            .iter_mut()
            .skip(c)
            .step_by(rank)
            .zip(column)
            .for_each(|(x, value)| *x = *value as f32);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shapes_are_near_square_unless_the_tensor_says_otherwise() {
        assert_eq!(Shape::of(&[64, 3, 3, 3]), Shape { rows: 64, columns: 27 });
        assert_eq!(Shape::of(&[10]), Shape { rows: 3, columns: 4 });
        assert_eq!(Shape::of(&[16]), Shape { rows: 4, columns: 4 });
        assert_eq!(Shape::of(&[1, 16]), Shape { rows: 4, columns: 4 });
        assert_eq!(Shape::of(&[0]), Shape { rows: 0, columns: 0 });
    }

    #[test]
    fn columns_become_orthonormal_and_dependent_ones_zero() {
        // Third column: the sum of the others. Fourth: zero.
        let mut matrix: Vec<f32> = (0..6)
            .flat_map(|i| [i as f32, (i * i) as f32 - 3.0, (i * i + i) as f32 - 3.0, 0.0])
            .collect();
        orthonormalise(&mut matrix, 4);
        let dot = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f32>();
        let column = |c: usize| matrix.iter().skip(c).step_by(4).copied().collect::<Vec<_>>();
        assert!((dot(&column(0), &column(0)) - 1.0).abs() < 1e-6);
        assert!((dot(&column(1), &column(1)) - 1.0).abs() < 1e-6);
        assert!(dot(&column(0), &column(1)).abs() < 1e-6);
        assert_eq!(column(2), [0.0; 6]);
        assert_eq!(column(3), [0.0; 6]);
    }
}
