//! What every rank must end with, computed the slow and obvious way.
//!
//! One element at a time, on enums, with its own idea of who owns what: nothing here is shared with
//! the code it checks.

use farwire_proto::{Algorithm, DType, Element, Kind, ReduceOp, with_type};

use crate::kinds::{Part, Shape};

/// The results of all ranks: `inputs[r]` is rank r's. Where a rank gets no result, it is empty.
///
/// # Panics
///
/// If the inputs do not have the lengths that the operation needs.
pub fn results(
    kind: Kind,
    shape: &Shape,
    algorithm: Algorithm,
    inputs: &[Vec<u8>],
) -> Vec<Vec<u8>> {
    // Many ranks may get the same part.
    let mut last: Option<(Part, Vec<u8>)> = None;
    let mut combine = |part: Part| match &last {
        Some((same, bytes)) if *same == part => bytes.clone(),
        _ => {
            let bytes = combined(&part, shape, algorithm, inputs);
            last = Some((part, bytes.clone()));
            bytes
        }
    };
    let rows = shape.world.ranks().map(|rank| shape.row(kind, rank));
    rows.map(|row| row.parts.into_iter().flat_map(&mut combine).collect()).collect()
}

/// One part of a result, from the ranks' inputs.
///
/// # Panics
///
/// If an input is shorter than the part.
pub fn combined(part: &Part, shape: &Shape, algorithm: Algorithm, inputs: &[Vec<u8>]) -> Vec<u8> {
    let Part { from, span, any_order } = part;
    let &Shape { dtype, op, count, .. } = shape;
    let size = dtype.size();
    match from[..] {
        [] => return identity(dtype, op).repeat(span.len()),
        [only] => return inputs[only][span.start * size..span.end * size].to_vec(),
        _ => {}
    }
    let world = from.len();
    let algorithm = if *any_order { algorithm } else { Algorithm::Direct };
    let owners =
        (0..world).flat_map(|rank| std::iter::repeat_n(rank, shard_len(count, world, rank)));
    let owners: Vec<_> = owners.collect();
    let hosts = by_host(&shape.hosts);
    let has_two_levels = hosts.len() > 1 && hosts.len() < shape.hosts.len();
    let mut result = Vec::with_capacity(span.len() * size);
    for element in span.clone() {
        let value = |i: usize| Scalar::read(dtype, &inputs[from[i]][element * size..][..size]);
        let fold = |ranks: &mut dyn Iterator<Item = usize>| {
            ranks.map(&value).reduce(|a, b| a.combine(dtype, op, b)).expect("a part has ranks")
        };
        let total = match algorithm {
            Algorithm::TwoLevel if has_two_levels => {
                // What crosses hosts is rounded: written, and read back.
                let rounded = |sum: Scalar| Scalar::read(dtype, &sum.write(dtype, 1));
                let on_host = |ranks: &Vec<usize>| rounded(fold(&mut ranks.iter().copied()));
                let sums = hosts.iter().map(on_host);
                sums.reduce(|a, b| a.combine(dtype, op, b)).expect("there are hosts")
            }
            Algorithm::Ring => fold(&mut (0..world).map(|step| (owners[element] + step) % world)),
            Algorithm::Tree | Algorithm::Chain => {
                let from_root = |number: usize| value((shape.root.index() + number) % world);
                subtree(dtype, op, algorithm, world, 0, &from_root)
            }
            Algorithm::TwoPhase
            | Algorithm::GatherReduce
            | Algorithm::Direct
            | Algorithm::Parcels
            | Algorithm::TwoLevel => fold(&mut (0..world)),
        };
        result.extend(total.write(dtype, if op == ReduceOp::Mean { world } else { 1 }));
    }
    result
}

/// How many of `count` elements `rank` owns: the first ranks get one more if the count does not
/// divide.
fn shard_len(count: usize, world: usize, rank: usize) -> usize {
    // Deal the elements out in turn, and count.
    (count + world - 1 - rank) / world
}

/// The ranks of each host, hosts by their lowest rank.
fn by_host(hosts: &[u64]) -> Vec<Vec<usize>> {
    let is_lowest = |rank: &usize| !hosts[..*rank].contains(&hosts[*rank]);
    let on = |host: u64| (0..hosts.len()).filter(|rank| hosts[*rank] == host).collect();
    (0..hosts.len()).filter(is_lowest).map(|lowest| on(hosts[lowest])).collect()
}

/// What node `v` of a reduction tree passes up: its own value combined with each child's, nearest
/// first.
fn subtree(
    dtype: DType,
    op: ReduceOp,
    algorithm: Algorithm,
    world: usize,
    v: usize,
    value: &dyn Fn(usize) -> Scalar,
) -> Scalar {
    let children: Vec<usize> = match algorithm {
        Algorithm::Chain => vec![v + 1],
        _ => (0..usize::BITS)
            .take_while(|bit| v >> bit & 1 == 0)
            .filter_map(|bit| v.checked_add(1 << bit))
            .collect(),
    };
    let mut total = value(v);
    for child in children.into_iter().filter(|child| *child < world) {
        total = total.combine(dtype, op, subtree(dtype, op, algorithm, world, child, value));
    }
    total
}

/// The bytes of the operator's identity element.
fn identity(dtype: DType, op: ReduceOp) -> Vec<u8> {
    let float = match op {
        ReduceOp::Sum | ReduceOp::Mean => 0.0,
        ReduceOp::Prod => 1.0,
        ReduceOp::Min => f64::INFINITY,
        ReduceOp::Max => f64::NEG_INFINITY,
    };
    if dtype.is_float() {
        return Scalar::float(dtype, float).write(dtype, 1);
    }
    let (lowest, highest): (i128, i128) = match (is_signed(dtype), 8 * dtype.size()) {
        (true, bits) => (-(1 << (bits - 1)), (1 << (bits - 1)) - 1),
        (false, bits) => (0, (1 << bits) - 1),
    };
    let integer = match op {
        ReduceOp::Sum | ReduceOp::Mean => 0,
        ReduceOp::Prod => 1,
        ReduceOp::Min => highest,
        ReduceOp::Max => lowest,
    };
    Scalar::Integer(integer).write(dtype, 1)
}

/// Whether an integer type has negative numbers: one without them turns −1 into 0.
fn is_signed(dtype: DType) -> bool {
    with_type!(dtype, T => T::cast(-1.0).as_f64() < 0.0)
}

/// One running value. 16-bit floats are held in 32 bits.
#[derive(Clone, Copy, Debug)]
enum Scalar {
    F32(f32),
    F64(f64),
    Integer(i128),
}

impl Scalar {
    fn float(dtype: DType, value: f64) -> Self {
        if dtype == DType::F64 { Self::F64(value) } else { Self::F32(value as f32) }
    }

    fn read(dtype: DType, bytes: &[u8]) -> Self {
        if dtype.is_float() {
            let value = with_type!(dtype, T => bytemuck::pod_read_unaligned::<T>(bytes).as_f64());
            return Self::float(dtype, value);
        }
        // Two's complement: a negative number has ones before its bytes.
        let negative = is_signed(dtype) && bytes.last().is_some_and(|highest| highest >> 7 == 1);
        let mut wide = [if negative { 0xff } else { 0 }; 16];
        wide[..bytes.len()].copy_from_slice(bytes);
        Self::Integer(i128::from_le_bytes(wide))
    }

    fn write(self, dtype: DType, divisor: usize) -> Vec<u8> {
        let float = match self {
            Self::F32(x) => f64::from(x / divisor as f32),
            Self::F64(x) => x / divisor as f64,
            // Two's complement: the low bytes are the value in any integer type.
            Self::Integer(x) => return x.to_le_bytes()[..dtype.size()].to_vec(),
        };
        with_type!(dtype, T => bytemuck::bytes_of(&T::cast(float)).to_vec())
    }

    fn combine(self, dtype: DType, op: ReduceOp, other: Self) -> Self {
        match (self, other) {
            (Self::F32(a), Self::F32(b)) => Self::F32(match op {
                ReduceOp::Sum | ReduceOp::Mean => a + b,
                ReduceOp::Prod => a * b,
                // The comparison of sign, exponent and mantissa bits orders −0 below +0.
                ReduceOp::Min if a.is_nan() || b.is_nan() => f32::NAN,
                ReduceOp::Max if a.is_nan() || b.is_nan() => f32::NAN,
                ReduceOp::Min => {
                    if a.total_cmp(&b).is_le() {
                        a
                    } else {
                        b
                    }
                }
                ReduceOp::Max => {
                    if a.total_cmp(&b).is_ge() {
                        a
                    } else {
                        b
                    }
                }
            }),
            (Self::F64(a), Self::F64(b)) => Self::F64(match op {
                ReduceOp::Sum | ReduceOp::Mean => a + b,
                ReduceOp::Prod => a * b,
                ReduceOp::Min if a.is_nan() || b.is_nan() => f64::NAN,
                ReduceOp::Max if a.is_nan() || b.is_nan() => f64::NAN,
                ReduceOp::Min => {
                    if a.total_cmp(&b).is_le() {
                        a
                    } else {
                        b
                    }
                }
                ReduceOp::Max => {
                    if a.total_cmp(&b).is_ge() {
                        a
                    } else {
                        b
                    }
                }
            }),
            (Self::Integer(a), Self::Integer(b)) => {
                let exact = match op {
                    ReduceOp::Sum | ReduceOp::Mean => a + b,
                    ReduceOp::Prod => a.wrapping_mul(b),
                    ReduceOp::Min => a.min(b),
                    ReduceOp::Max => a.max(b),
                };
                // Wrap by writing and reading back.
                Self::read(dtype, &Self::Integer(exact).write(dtype, 1))
            }
            _ => unreachable!("one dtype, one kind of scalar"),
        }
    }
}

#[cfg(test)]
mod tests {
    use farwire_proto::{Counts, Rank, WorldSize};

    use super::*;

    fn bytes(values: &[f32]) -> Vec<u8> {
        values.iter().flat_map(|value| value.to_le_bytes()).collect()
    }

    fn reduced(
        dtype: DType,
        op: ReduceOp,
        algorithm: Algorithm,
        root: u32,
        inputs: &[Vec<u8>],
    ) -> Vec<u8> {
        let world = WorldSize::new(inputs.len() as u32).expect("there are inputs");
        let count = inputs[0].len() / dtype.size();
        let shape = Shape { root: Rank(root), ..Shape::even(world, count, dtype, op) };
        results(Kind::AllReduce, &shape, algorithm, inputs).swap_remove(0)
    }

    /// Numbers whose sum depends on the order: 1e8 swallows a lone 1, but not a pair that came
    /// together first.
    #[test]
    fn orders_are_told_apart() {
        let inputs = [1e8f32, 1.0, 7.0, -1e8].map(|value| bytes(&[value]));
        let sum = |algorithm, root| reduced(DType::F32, ReduceOp::Sum, algorithm, root, &inputs);
        // ((1e8 + 1) + 7) − 1e8, where 1e8 + 1 rounds down and 1e8 + 7 rounds up to the next
        // multiple of 8.
        assert_eq!(sum(Algorithm::TwoPhase, 0), bytes(&[8.0]));
        // 1e8 + (1 + (7 − 1e8)): 7 − 1e8 rounds to −99999992, + 1 to the same.
        assert_eq!(sum(Algorithm::Chain, 0), bytes(&[8.0]));
        // (1e8 + 1) + (7 − 1e8)
        assert_eq!(sum(Algorithm::Tree, 0), bytes(&[8.0]));
        // From rank 1: (1 + 7) + (−1e8 + 1e8)
        assert_eq!(sum(Algorithm::Tree, 1), bytes(&[8.0]));
        // From rank 2: 7 + (−1e8 + (1e8 + 1))
        assert_eq!(sum(Algorithm::Chain, 2), bytes(&[7.0]));
    }

    #[test]
    fn results_go_where_they_belong() {
        let world = WorldSize::new(2).expect("two is not zero");
        let even = Shape { root: Rank(1), ..Shape::even(world, 2, DType::F32, ReduceOp::Sum) };
        let inputs = [bytes(&[1.0, 2.0]), bytes(&[10.0, 20.0])];
        let all = |kind, shape: &Shape| results(kind, shape, Algorithm::Direct, &inputs);
        let none = Vec::new();
        assert_eq!(all(Kind::ReduceScatter, &even), [bytes(&[11.0]), bytes(&[22.0])]);
        assert_eq!(all(Kind::Reduce, &even), [none.clone(), bytes(&[11.0, 22.0])]);
        assert_eq!(all(Kind::Scan, &even), [bytes(&[1.0, 2.0]), bytes(&[11.0, 22.0])]);
        assert_eq!(all(Kind::ExclusiveScan, &even), [bytes(&[0.0, 0.0]), bytes(&[1.0, 2.0])]);
        assert_eq!(all(Kind::Broadcast, &even), [bytes(&[10.0, 20.0]), bytes(&[10.0, 20.0])]);
        let two = Shape { blocks: Counts::Each(2), ..even.clone() };
        assert_eq!(all(Kind::Gather, &two), [none, bytes(&[1.0, 2.0, 10.0, 20.0])]);
        assert_eq!(all(Kind::AllGather, &two), vec![bytes(&[1.0, 2.0, 10.0, 20.0]); 2]);
        let last = Shape { blocks: Counts::listed([0, 2], world), ..even.clone() };
        assert_eq!(all(Kind::Scatter, &last), [bytes(&[]), bytes(&[10.0, 20.0])]);
        assert_eq!(all(Kind::AllToAll, &even), [bytes(&[1.0, 10.0]), bytes(&[2.0, 20.0])]);
        let matrix = vec![Counts::listed([2, 0], world), Counts::listed([0, 2], world)];
        assert_eq!(all(Kind::AllToAll, &Shape { matrix, ..even }), inputs);
    }

    #[test]
    fn integers_wrap_and_means_divide() {
        let inputs = [vec![200u8], vec![100]];
        assert_eq!(reduced(DType::U8, ReduceOp::Sum, Algorithm::Ring, 0, &inputs), [44]);
        assert_eq!(
            reduced(DType::I8, ReduceOp::Min, Algorithm::Ring, 0, &inputs),
            [200],
            "−56 is less than 100"
        );
        let inputs = [bytes(&[1.0]), bytes(&[2.0])];
        assert_eq!(
            reduced(DType::F32, ReduceOp::Mean, Algorithm::TwoPhase, 0, &inputs),
            bytes(&[1.5])
        );
    }
}
