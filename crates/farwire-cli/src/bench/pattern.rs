//! What `farwire bench` sends, and what must come back.
//!
//! Inputs repeat: element *i* of a rank depends on *i* modulo [`PERIOD`] and on the rank. So an
//! input is filled by copying, and a result, which repeats as well, is checked by comparing
//! stretches of memory with a few kilobytes of right values. Both run as fast as memory does. The
//! right values of one period come from the oracle.
//!
//! Segments are powers of two, which the period does not divide: data that arrive a segment too
//! early, or too late, are noticed.

use std::ops::Range;

use farwire::{Element, ReduceOp};
use farwire_proto::{CallError, CommId, Kind, Options, Plan, Rank, Tuning};
use farwire_sim::kinds::{Part, Shape};
use farwire_sim::oracle;

/// Elements after which inputs repeat.
pub(super) const PERIOD: usize = 97 * 11;

/// The first period of a rank's input: small whole numbers, which every type holds exactly,
/// different from rank to rank and from element to element. For products, ones and twos. In
/// whatever order such numbers are combined, the result is the same to the bit.
pub(super) fn period<T: Element>(rank: usize, op: ReduceOp) -> Vec<T> {
    let number = |i: usize| {
        let number = ((i * 7 + rank * 13 + i / 97) % 11) as u8;
        if op == ReduceOp::Prod { 1 + number % 2 } else { number }
    };
    (0..PERIOD).map(|i| T::cast(number(i).into())).collect()
}

/// `length` elements that repeat `period`.
pub(super) fn fill<T: Element>(period: &[T], length: usize) -> Vec<T> {
    let mut elements = Vec::with_capacity(length);
    while elements.len() < length {
        elements.extend_from_slice(&period[..period.len().min(length - elements.len())]);
    }
    elements
}

/// A part of a result.
#[derive(Clone, Debug)]
pub(super) struct Stretch<T> {
    /// The elements that repeat.
    period: Vec<T>,
    /// Where in it the part begins.
    start: usize,
    length: usize,
}

impl<T> Stretch<T> {
    /// A part that does not repeat.
    pub(super) fn whole(elements: Vec<T>) -> Self {
        Self { start: 0, length: elements.len(), period: elements }
    }
}

/// What a rank must get. The oracle gives one period of each part; from there on it repeats.
pub(super) fn expected<T: Element>(kind: Kind, shape: &Shape, rank: Rank) -> Vec<Stretch<T>> {
    let inputs: Vec<Vec<u8>> = (0..shape.world.len())
        .map(|rank| bytemuck::cast_slice(&period::<T>(rank, shape.op)).to_vec())
        .collect();
    let one = Shape { count: PERIOD, ..shape.clone() };
    let stretch = |part: Part| {
        let Range { start, end } = part.span;
        let part = Part { span: 0..PERIOD, ..part };
        let period = oracle::combined(&part, &one, kind.algorithms()[0], &inputs);
        Stretch { period: bytemuck::pod_collect_to_vec(&period), start, length: end - start }
    };
    shape.row(kind, rank).parts.into_iter().map(stretch).collect()
}

/// The number of elements of a rank's input.
pub(super) fn input_len(kind: Kind, shape: &Shape, rank: Rank) -> Result<usize, CallError> {
    let call = &shape.row(kind, rank).calls[0];
    let plan =
        Plan::new(CommId::WORLD, rank, shape.world, call, &Options::default(), &Tuning::default())?;
    Ok(plan.input_bytes() / shape.dtype.size())
}

/// How many elements are wrong, missing or surplus.
pub(super) fn differences<T: Element>(result: &[T], expected: &[Stretch<T>]) -> u64 {
    let mut rest = result;
    let mut differences = 0;
    for Stretch { period, start, length } in expected {
        let (mut at, mut left) = (*start, *length);
        while left > 0 {
            let from = &period[at % period.len()..];
            let from = &from[..from.len().min(left)];
            let (here, after) = rest.split_at(from.len().min(rest.len()));
            if !same(here, from) {
                let wrong = here.iter().zip(from).filter(|(a, b)| !same(&[**a], &[**b])).count();
                differences += wrong + (from.len() - here.len());
            }
            rest = after;
            at += from.len();
            left -= from.len();
        }
    }
    (differences + rest.len()) as u64
}

/// Whether all bits are the same.
fn same<T: Element>(a: &[T], b: &[T]) -> bool {
    bytemuck::cast_slice::<T, u8>(a) == bytemuck::cast_slice::<T, u8>(b)
}

#[cfg(test)]
mod tests {
    use farwire_proto::WorldSize;
    use half::bf16;

    use super::*;

    /// The oracle's result for whole inputs, without any period.
    fn by_the_oracle<T: Element>(kind: Kind, shape: &Shape) -> Result<Vec<Vec<T>>, CallError> {
        let ranks = shape.world.ranks();
        let inputs: Vec<Vec<u8>> = ranks
            .map(|rank| {
                let length = input_len(kind, shape, rank)?;
                Ok(bytemuck::cast_slice(&fill(&period::<T>(rank.index(), shape.op), length))
                    .to_vec())
            })
            .collect::<Result<_, _>>()?;
        // Every algorithm gives the same result, so one stands for all.
        let mut results = kind
            .algorithms()
            .iter()
            .map(|algorithm| oracle::results(kind, shape, *algorithm, &inputs));
        let first = results.next().unwrap();
        assert!(results.all(|other| other == first), "{kind} {}", shape.op);
        Ok(first.iter().map(|result| bytemuck::pod_collect_to_vec(result)).collect())
    }

    fn every_wrong_element_is_found<T: Element>(ops: &[ReduceOp]) {
        for kind in Kind::ALL {
            for (count, ranks) in [(0, 3), (1, 2), (PERIOD, 1), (3 * PERIOD + 5, 3), (10_000, 7)] {
                for op in ops {
                    let world = WorldSize::new(ranks).unwrap();
                    let shape = Shape::even(world, count, T::DTYPE, *op);
                    let results = match by_the_oracle::<T>(kind, &shape) {
                        Err(CallError::ScanMean(_) | CallError::ToSelf(_)) => continue,
                        results => results.unwrap(),
                    };
                    for (rank, right) in results.into_iter().enumerate() {
                        let expected = expected::<T>(kind, &shape, Rank(rank as u32));
                        assert_eq!(differences(&right, &expected), 0, "{kind} {op} {count} {rank}");
                        let missing = right.len().min(3);
                        let short = &right[..right.len() - missing];
                        assert_eq!(differences(short, &expected), missing as u64);
                        let long = [&right[..], &right[..missing]].concat();
                        assert_eq!(differences(&long, &expected), missing as u64);
                        // One bit of one element, wherever it is.
                        for at in (0..right.len()).step_by(right.len() / 50 + 1) {
                            let mut wrong = right.clone();
                            bytemuck::bytes_of_mut(&mut wrong[at])[0] ^= 1;
                            assert_eq!(differences(&wrong, &expected), 1, "{kind} {op} at {at}");
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn every_wrong_element_is_found_in_floats() {
        every_wrong_element_is_found::<f32>(&ReduceOp::ALL);
        every_wrong_element_is_found::<bf16>(&[ReduceOp::Sum, ReduceOp::Mean, ReduceOp::Prod]);
    }

    #[test]
    fn every_wrong_element_is_found_in_whole_numbers() {
        let ops = [ReduceOp::Sum, ReduceOp::Prod, ReduceOp::Min, ReduceOp::Max];
        every_wrong_element_is_found::<i8>(&ops);
        every_wrong_element_is_found::<u64>(&ops);
    }
}
