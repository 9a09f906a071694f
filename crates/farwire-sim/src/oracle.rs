//! What every rank must end with, computed the slow and obvious way.
//!
//! One element at a time, on enums, with its own idea of who owns what: nothing here is shared with
//! the code it checks.

use farwire_proto::{Algorithm, Call, DType, Rank, ReduceOp};
use half::{bf16, f16};

/// The results of all ranks: `calls[r]` and `inputs[r]` are rank r's. Where a rank gets no result,
/// it is empty.
///
/// # Panics
///
/// If the ranks' calls are not one operation, or the inputs are not of the lengths that they need;
/// and for messages, whose result is plain.
pub fn results(calls: &[Call], algorithm: Algorithm, inputs: &[Vec<u8>]) -> Vec<Vec<u8>> {
    let world = calls.len();
    if let Call::InPlace(_) = &calls[0] {
        let bare = |call: &Call| match call {
            Call::InPlace(call) => (**call).clone(),
            call => call.clone(),
        };
        return results(&calls.iter().map(bare).collect::<Vec<_>>(), algorithm, inputs);
    }
    let everyone = |result: Vec<u8>| vec![result; world];
    let only = |root: Rank, result: Vec<u8>| {
        (0..world).map(|rank| if rank == root.index() { result.clone() } else { Vec::new() }).collect()
    };
    match &calls[0] {
        Call::AllReduce { dtype, op, .. } => everyone(reduced(*dtype, *op, algorithm, 0, inputs)),
        Call::Reduce { dtype, op, root, .. } => {
            only(*root, reduced(*dtype, *op, algorithm, root.index(), inputs))
        }
        Call::ReduceScatter { count, dtype, op } => {
            let sum = reduced(*dtype, *op, algorithm, 0, inputs);
            let lengths: Vec<_> =
                (0..world).map(|rank| shard_len(*count, world, rank) * dtype.size()).collect();
            cut(&sum, &lengths)
        }
        Call::Scan { dtype, op, .. } => {
            (0..world).map(|rank| reduced(*dtype, *op, Algorithm::Direct, 0, &inputs[..=rank])).collect()
        }
        Call::ExclusiveScan { count, dtype, op } => (0..world)
            .map(|rank| match rank {
                0 => identity(*dtype, *op).repeat(*count),
                _ => reduced(*dtype, *op, Algorithm::Direct, 0, &inputs[..rank]),
            })
            .collect(),
        Call::Broadcast { root, .. } => everyone(inputs[root.index()].clone()),
        Call::AllGather { .. } => everyone(inputs.concat()),
        Call::Gather { root, .. } => only(*root, inputs.concat()),
        Call::Scatter { counts, dtype, root } => {
            let lengths: Vec<_> =
                (0..world).map(|rank| counts.of(Rank(rank as u32)) * dtype.size()).collect();
            cut(&inputs[root.index()], &lengths)
        }
        Call::AllToAll { .. } => {
            let blocks: Vec<Vec<Vec<u8>>> = calls
                .iter()
                .zip(inputs)
                .map(|(call, input)| {
                    let Call::AllToAll { send, dtype, .. } = call else { panic!("ranks call one operation") };
                    let lengths: Vec<_> =
                        (0..world).map(|rank| send.of(Rank(rank as u32)) * dtype.size()).collect();
                    cut(input, &lengths)
                })
                .collect();
            (0..world).map(|to| blocks.iter().flat_map(|from| from[to].clone()).collect()).collect()
        }
        Call::Barrier => everyone(Vec::new()),
        Call::Send { .. } | Call::Recv { .. } | Call::SendParcel { .. } | Call::RecvParcel { .. } => {
            panic!("a message's result is what was sent")
        }
        Call::InPlace(_) => unreachable!("it was taken off above"),
        Call::Coded { .. } => panic!("what a codec makes of its input is the codec's matter"),
    }
}

/// Bytes cut into pieces of the given lengths.
fn cut(bytes: &[u8], lengths: &[usize]) -> Vec<Vec<u8>> {
    let mut rest = bytes;
    lengths
        .iter()
        .map(|len| {
            let (piece, after) = rest.split_at(*len);
            rest = after;
            piece.to_vec()
        })
        .collect()
}

/// How many of `count` elements `rank` owns: the first ranks get one more where it does not divide.
fn shard_len(count: usize, world: usize, rank: usize) -> usize {
    // Deal the elements out in turn, and count.
    (count + world - 1 - rank) / world
}

/// The element-wise combination of the ranks' vectors, in the algorithm's order.
fn reduced(dtype: DType, op: ReduceOp, algorithm: Algorithm, root: usize, inputs: &[Vec<u8>]) -> Vec<u8> {
    let world = inputs.len();
    let size = dtype.size();
    let count = inputs[0].len() / size;
    let mut owners = (0..world).flat_map(|rank| std::iter::repeat_n(rank, shard_len(count, world, rank)));
    let mut result = Vec::with_capacity(inputs[0].len());
    for element in 0..count {
        let owner = owners.next().expect("every element has an owner");
        let value = |rank: usize| Scalar::read(dtype, &inputs[rank][element * size..][..size]);
        let fold = |ranks: &mut dyn Iterator<Item = usize>| {
            ranks.map(&value).reduce(|a, b| a.combine(dtype, op, b)).expect("a world has a rank")
        };
        let total = match algorithm {
            Algorithm::Ring => fold(&mut (0..world).map(|step| (owner + step) % world)),
            Algorithm::Tree | Algorithm::Chain => {
                let from_root = |number: usize| value((root + number) % world);
                subtree(dtype, op, algorithm, world, 0, &from_root)
            }
            Algorithm::TwoPhase | Algorithm::GatherReduce | Algorithm::Direct | Algorithm::Parcels => {
                fold(&mut (0..world))
            }
        };
        result.extend(total.write(dtype, if op == ReduceOp::Mean { world } else { 1 }));
    }
    result
}

/// What node `v` of a reduction tree passes up: its own, then each child's, nearest first.
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

/// The bytes of the element that changes nothing.
fn identity(dtype: DType, op: ReduceOp) -> Vec<u8> {
    let float = match op {
        ReduceOp::Sum | ReduceOp::Mean => 0.0,
        ReduceOp::Prod => 1.0,
        ReduceOp::Min => f64::INFINITY,
        ReduceOp::Max => f64::NEG_INFINITY,
    };
    let (lowest, highest): (i128, i128) = match dtype {
        DType::I8 => (i8::MIN.into(), i8::MAX.into()),
        DType::I32 => (i32::MIN.into(), i32::MAX.into()),
        DType::I64 => (i64::MIN.into(), i64::MAX.into()),
        DType::U8 => (0, u8::MAX.into()),
        DType::U32 => (0, u32::MAX.into()),
        DType::U64 => (0, u64::MAX.into()),
        DType::F64 => return Scalar::F64(float).write(dtype, 1),
        DType::F32 | DType::F16 | DType::Bf16 => return Scalar::F32(float as f32).write(dtype, 1),
    };
    let integer = match op {
        ReduceOp::Sum | ReduceOp::Mean => 0,
        ReduceOp::Prod => 1,
        ReduceOp::Min => highest,
        ReduceOp::Max => lowest,
    };
    Scalar::Integer(integer).write(dtype, 1)
}

/// One running value. 16-bit floats are held in 32 bits.
#[derive(Clone, Copy, Debug)]
enum Scalar {
    F32(f32),
    F64(f64),
    Integer(i128),
}

impl Scalar {
    fn read(dtype: DType, bytes: &[u8]) -> Self {
        fn array<const N: usize>(bytes: &[u8]) -> [u8; N] {
            bytes.try_into().expect("an element has its type's size")
        }
        match dtype {
            DType::F32 => Self::F32(f32::from_le_bytes(array(bytes))),
            DType::F64 => Self::F64(f64::from_le_bytes(array(bytes))),
            DType::F16 => Self::F32(f16::from_le_bytes(array(bytes)).to_f32()),
            DType::Bf16 => Self::F32(bf16::from_le_bytes(array(bytes)).to_f32()),
            DType::I8 => Self::Integer(i8::from_le_bytes(array(bytes)).into()),
            DType::I32 => Self::Integer(i32::from_le_bytes(array(bytes)).into()),
            DType::I64 => Self::Integer(i64::from_le_bytes(array(bytes)).into()),
            DType::U8 => Self::Integer(u8::from_le_bytes(array(bytes)).into()),
            DType::U32 => Self::Integer(u32::from_le_bytes(array(bytes)).into()),
            DType::U64 => Self::Integer(u64::from_le_bytes(array(bytes)).into()),
        }
    }

    fn write(self, dtype: DType, divisor: usize) -> Vec<u8> {
        match (self, dtype) {
            (Self::F32(x), DType::F16) => f16::from_f32(x / divisor as f32).to_le_bytes().to_vec(),
            (Self::F32(x), DType::Bf16) => bf16::from_f32(x / divisor as f32).to_le_bytes().to_vec(),
            (Self::F32(x), _) => (x / divisor as f32).to_le_bytes().to_vec(),
            (Self::F64(x), _) => (x / divisor as f64).to_le_bytes().to_vec(),
            // Two's complement: the low bytes are the value in any integer type.
            (Self::Integer(x), _) => x.to_le_bytes()[..dtype.size()].to_vec(),
        }
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
    use farwire_proto::{Counts, WorldSize};

    use super::*;

    fn bytes(values: &[f32]) -> Vec<u8> {
        values.iter().flat_map(|value| value.to_le_bytes()).collect()
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
        let (dtype, root) = (DType::F32, Rank(1));
        let inputs = [bytes(&[1.0, 2.0]), bytes(&[10.0, 20.0])];
        let all = |call: Call| results(&[call.clone(), call], Algorithm::Direct, &inputs);
        let none = Vec::new();
        let (count, op) = (2, ReduceOp::Sum);
        assert_eq!(all(Call::ReduceScatter { count, dtype, op }), [bytes(&[11.0]), bytes(&[22.0])]);
        assert_eq!(all(Call::Reduce { count, dtype, op, root }), [none.clone(), bytes(&[11.0, 22.0])]);
        assert_eq!(all(Call::Scan { count, dtype, op }), [bytes(&[1.0, 2.0]), bytes(&[11.0, 22.0])]);
        assert_eq!(all(Call::ExclusiveScan { count, dtype, op }), [bytes(&[0.0, 0.0]), bytes(&[1.0, 2.0])]);
        assert_eq!(all(Call::Broadcast { count, dtype, root }), [bytes(&[10.0, 20.0]), bytes(&[10.0, 20.0])]);
        let counts = Counts::Each(2);
        assert_eq!(all(Call::Gather { counts, dtype, root }), [none, bytes(&[1.0, 2.0, 10.0, 20.0])]);
        let counts = Counts::listed([0, 2], world);
        assert_eq!(all(Call::Scatter { counts, dtype, root }), [bytes(&[]), bytes(&[10.0, 20.0])]);
        let each = Counts::Each(1);
        let swapped = all(Call::AllToAll { send: each.clone(), recv: each, dtype });
        assert_eq!(swapped, [bytes(&[1.0, 10.0]), bytes(&[2.0, 20.0])]);
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
        assert_eq!(reduced(DType::F32, ReduceOp::Mean, Algorithm::TwoPhase, 0, &inputs), bytes(&[1.5]));
    }
}
