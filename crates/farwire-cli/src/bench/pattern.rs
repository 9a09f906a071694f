//! What `farwire bench` sends, and what must come back.
//!
//! Inputs repeat: element *i* of a rank depends on *i* modulo [`PERIOD`] and on the rank. So an input
//! is filled by copying, and a result, which repeats as well, is checked by comparing stretches of
//! memory with a few kilobytes of right values. Both run as fast as memory does. The right values of one
//! period are the oracle's.
//!
//! Segments are powers of two, which the period does not divide: what arrives a segment too early, or
//! too late, is seen.

use farwire::{Element, ReduceOp};
use farwire_proto::{Call, Counts, DType, Kind, Rank, WorldSize};
use farwire_sim::oracle;
use half::{bf16, f16};

/// Elements after which inputs repeat.
pub(super) const PERIOD: usize = 97 * 11;

/// The first period of a rank's input: small whole numbers, which every type holds exactly, different
/// from rank to rank and from element to element. For products ones and twos. Whatever the order in
/// which such numbers are combined, the result is the same to the bit.
pub(super) fn period<T: Element>(rank: usize, op: ReduceOp) -> Vec<T> {
    let number = |i: usize| {
        let number = ((i * 7 + rank * 13 + i / 97) % 11) as u8;
        if op == ReduceOp::Prod { 1 + number % 2 } else { number }
    };
    let bytes = (0..PERIOD).flat_map(|i| {
        let number = number(i);
        let wide = f32::from(number);
        let mut bytes = match T::DTYPE {
            DType::F32 => wide.to_le_bytes().to_vec(),
            DType::F64 => f64::from(wide).to_le_bytes().to_vec(),
            DType::F16 => f16::from_f32(wide).to_le_bytes().to_vec(),
            DType::Bf16 => bf16::from_f32(wide).to_le_bytes().to_vec(),
            _ => vec![number],
        };
        bytes.resize(T::DTYPE.size(), 0);
        bytes
    });
    bytemuck::pod_collect_to_vec(&bytes.collect::<Vec<u8>>())
}

/// So many elements that repeat.
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
    /// Repeats.
    period: Vec<T>,
    /// Where in it the part begins.
    start: usize,
    length: usize,
}

impl<T> Stretch<T> {
    /// One that does not repeat.
    pub(super) fn whole(elements: Vec<T>) -> Self {
        Self { start: 0, length: elements.len(), period: elements }
    }
}

/// What a rank must get. An all-gather may gather an even share of all, or what `counts` say.
pub(super) fn expected<T: Element>(
    kind: Kind,
    op: ReduceOp,
    count: usize,
    counts: Option<&[usize]>,
    rank: usize,
    ranks: usize,
) -> Vec<Stretch<T>> {
    let world = WorldSize::new(ranks as u32).expect("a communicator has a rank");
    let (dtype, root, each) = (T::DTYPE, Rank(0), count / ranks);
    let of = |from: usize, start: usize, length: usize| Stretch { period: period(from, op), start, length };
    // One period, by the oracle; from there on it repeats.
    let reduced = |call: Call, start: usize, length: usize| {
        let inputs: Vec<Vec<u8>> =
            (0..ranks).map(|rank| bytemuck::cast_slice(&period::<T>(rank, op)).to_vec()).collect();
        let results = oracle::results(&vec![call; ranks], kind.algorithms()[0], &inputs);
        Stretch { period: bytemuck::pod_collect_to_vec(&results[rank]), start, length }
    };
    let one = PERIOD;
    match kind {
        Kind::AllReduce => vec![reduced(Call::AllReduce { count: one, dtype, op }, 0, count)],
        Kind::ReduceScatter => {
            let shares = Counts::even(count, world);
            let before: usize = (0..rank as u32).map(|rank| shares.of(Rank(rank))).sum();
            vec![reduced(Call::AllReduce { count: one, dtype, op }, before, shares.of(Rank(rank as u32)))]
        }
        Kind::Reduce if rank != 0 => Vec::new(),
        Kind::Reduce => vec![reduced(Call::Reduce { count: one, dtype, op, root }, 0, count)],
        Kind::Scan => vec![reduced(Call::Scan { count: one, dtype, op }, 0, count)],
        Kind::ExclusiveScan => vec![reduced(Call::ExclusiveScan { count: one, dtype, op }, 0, count)],
        Kind::Broadcast => vec![of(0, 0, count)],
        Kind::AllGather => {
            (0..ranks).map(|from| of(from, 0, counts.map_or(each, |counts| counts[from]))).collect()
        }
        Kind::Gather if rank != 0 => Vec::new(),
        Kind::Gather => (0..ranks).map(|from| of(from, 0, each)).collect(),
        Kind::Scatter => vec![of(0, rank * each, each)],
        Kind::AllToAll => (0..ranks).map(|from| of(from, rank * each, each)).collect(),
        Kind::Message => vec![of((rank + ranks - 1) % ranks, 0, count)],
        Kind::Barrier => Vec::new(),
    }
}

/// Elements that are not what they should be, missing ones and surplus ones included.
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
    use super::*;

    /// The oracle's result for whole inputs, without any period.
    fn by_the_oracle<T: Element>(kind: Kind, op: ReduceOp, count: usize, ranks: usize) -> Vec<Vec<T>> {
        let world = WorldSize::new(ranks as u32).unwrap();
        let (dtype, root, each) = (T::DTYPE, Rank(0), Counts::Each(count / ranks));
        let shares = Counts::even(count, world);
        let lengths: Vec<_> = (0..ranks as u32).map(|rank| shares.of(Rank(rank))).collect();
        let (call, length): (_, &dyn Fn(usize) -> usize) = match kind {
            Kind::AllReduce => (Call::AllReduce { count, dtype, op }, &|_| count),
            Kind::ReduceScatter => (Call::ReduceScatter { count, dtype, op }, &|_| count),
            Kind::AllGather => {
                (Call::AllGather { counts: Counts::listed(lengths.clone(), world), dtype }, &|rank| {
                    lengths[rank]
                })
            }
            Kind::Broadcast => (Call::Broadcast { count, dtype, root }, &|_| count),
            Kind::Reduce => (Call::Reduce { count, dtype, op, root }, &|_| count),
            Kind::Gather => (Call::Gather { counts: each, dtype, root }, &|_| count / ranks),
            Kind::Scatter => (Call::Scatter { counts: each, dtype, root }, &|_| count / ranks * ranks),
            Kind::AllToAll => {
                (Call::AllToAll { send: each.clone(), recv: each, dtype }, &|_| count / ranks * ranks)
            }
            Kind::Scan => (Call::Scan { count, dtype, op }, &|_| count),
            Kind::ExclusiveScan => (Call::ExclusiveScan { count, dtype, op }, &|_| count),
            Kind::Barrier => (Call::Barrier, &|_| 0),
            Kind::Message => {
                let left = |rank| fill(&period((rank + ranks - 1) % ranks, op), count);
                return (0..ranks).map(left).collect();
            }
        };
        let inputs: Vec<Vec<u8>> = (0..ranks)
            .map(|rank| bytemuck::cast_slice(&fill(&period::<T>(rank, op), length(rank))).to_vec())
            .collect();
        // Every algorithm gives the same, so that one stands for all.
        let mut results = kind
            .algorithms()
            .iter()
            .map(|algorithm| oracle::results(&vec![call.clone(); ranks], *algorithm, &inputs));
        let first = results.next().unwrap();
        assert!(results.all(|other| other == first), "{kind} {op}");
        first.iter().map(|result| bytemuck::pod_collect_to_vec(result)).collect()
    }

    fn every_wrong_element_is_found<T: Element>(ops: &[ReduceOp]) {
        for kind in Kind::ALL {
            for (count, ranks) in [(0, 3), (1, 2), (PERIOD, 1), (3 * PERIOD + 5, 3), (10_000, 7)] {
                for op in ops {
                    let counts: Vec<_> = {
                        let world = WorldSize::new(ranks as u32).unwrap();
                        let shares = Counts::even(count, world);
                        (0..ranks as u32).map(|rank| shares.of(Rank(rank))).collect()
                    };
                    for (rank, right) in by_the_oracle::<T>(kind, *op, count, ranks).into_iter().enumerate() {
                        let expected = expected::<T>(kind, *op, count, Some(&counts), rank, ranks);
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
