//! Element-wise arithmetic on byte slices of any alignment.
//!
//! Operands come straight from user memory and from the network, so nothing here assumes alignment.
//! The loops are plain enough for the compiler to vectorise.
//!
//! A running value is in the accumulator's type `A`; a contribution is in the element type `T`, or
//! already in `A` if it is itself a partial result. For most types the two are the same.

use crate::dtype::{DType, Element, ReduceOp, types};
use crate::short::Short;
use crate::team::{Teamed, Work, each_part};
use crate::{dtypes, with_type};

/// `running = a`, `running ∘= x`, `running = a ∘ b`, `out = finish(running)`: what a reduction is
/// made of, for one type and operator.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Arithmetic {
    pub(crate) dtype: DType,
    pub(crate) op: ReduceOp,
    /// What a mean divides by.
    pub(crate) ranks: u32,
    /// The threads that work on long vectors.
    pub(crate) team: Teamed,
}

/// An operand: elements, or partial results in the accumulator's type.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Operand<'a> {
    Elements(&'a [u8]),
    Partial(&'a [u8]),
}

impl<'a> Operand<'a> {
    fn bytes(self) -> &'a [u8] {
        let (Self::Elements(bytes) | Self::Partial(bytes)) = self;
        bytes
    }

    /// Other bytes, as an operand of the same type.
    fn of(self, bytes: &[u8]) -> Operand<'_> {
        match self {
            Self::Elements(_) => Operand::Elements(bytes),
            Self::Partial(_) => Operand::Partial(bytes),
        }
    }
}

impl Arithmetic {
    /// `running = x`.
    pub(crate) fn set(&self, running: &mut [u8], x: Operand<'_>) {
        self.each_part(running, [x.bytes(), &[]], &|running, [bytes, _]| {
            with_type!(self.dtype, T => set::<T>(running, x.of(bytes)));
        });
    }

    /// `running = running ∘ x`.
    pub(crate) fn fold(&self, running: &mut [u8], x: Operand<'_>) {
        self.each_part(running, [x.bytes(), &[]], &|running, [bytes, _]| {
            with_type!(self.dtype, T => fold::<T, false>(self.op, running, x.of(bytes)));
        });
    }

    /// `running = x ∘ running`.
    pub(crate) fn fold_in_front(&self, running: &mut [u8], x: Operand<'_>) {
        self.each_part(running, [x.bytes(), &[]], &|running, [bytes, _]| {
            with_type!(self.dtype, T => fold::<T, true>(self.op, running, x.of(bytes)));
        });
    }

    /// `running = a ∘ b`, in one pass.
    pub(crate) fn combine(&self, running: &mut [u8], a: Operand<'_>, b: Operand<'_>) {
        self.each_part(running, [a.bytes(), b.bytes()], &|running, [x, y]| {
            with_type!(self.dtype, T => combine::<T>(self.op, running, a.of(x), b.of(y)));
        });
    }

    /// Has the team work on parts of a running value, each with its part of the operands.
    fn each_part(&self, running: &mut [u8], operands: [&[u8]; 2], work: Work<'_>) {
        let count = running.len() / self.dtype.accumulator().size();
        each_part(self.team, count, running, operands, work);
    }

    /// `out = running`, divided by the number of ranks for a mean, in the element type.
    pub(crate) fn finish(&self, out: &mut [u8], running: &[u8]) {
        let count = out.len() / self.dtype.size();
        each_part(self.team, count, out, [running, &[]], &|out, [running, _]| {
            with_type!(self.dtype, T => finish::<T>(self.divisor(), out, running));
        });
    }

    /// [`finish`](Self::finish) where the running value is already in the output; only for types
    /// that are their own accumulator.
    pub(crate) fn finish_in_place(&self, out: &mut [u8]) {
        if let Some(divisor) = self.divisor() {
            let count = out.len() / self.dtype.size();
            each_part(self.team, count, out, [&[], &[]], &|out, _| {
                with_type!(self.dtype, T => divide::<T>(divisor, out));
            });
        }
    }

    /// The same for part of a mean, which is divided only once it is whole.
    pub(crate) fn undivided(self) -> Self {
        let op = if self.op == ReduceOp::Mean { ReduceOp::Sum } else { self.op };
        Self { op, ..self }
    }

    /// Fills the output with the operator's identity.
    pub(crate) fn identity(&self, out: &mut [u8]) {
        with_type!(self.dtype, T => identity::<T>(self.op, out));
    }

    fn divisor(&self) -> Option<u32> {
        (self.op == ReduceOp::Mean).then_some(self.ranks)
    }
}

/// An element type and the type its sums are held in.
trait Number: Element {
    type Acc: Accumulator<Acc = Self::Acc>;
    fn widen(self) -> Self::Acc;
    fn narrow(acc: Self::Acc) -> Self;
}

/// A type that reductions are computed in.
trait Accumulator: Number {
    const ZERO: Self;
    const ONE: Self;
    const LOWEST: Self;
    const HIGHEST: Self;
    fn add(self, x: Self) -> Self;
    fn mul(self, x: Self) -> Self;
    fn min(self, x: Self) -> Self;
    fn max(self, x: Self) -> Self;
    fn divide(self, by: u32) -> Self;
}

macro_rules! numbers {
    ([] $($(#[$doc:meta])* $variant:ident = $code:literal: $class:ident $type:ident;)*) => {
        $(number!($class types::$type);)*
    };
}

/// The arithmetic of a class of types.
macro_rules! number {
    (short $type:ty) => {
        impl Number for $type {
            type Acc = f32;
            fn widen(self) -> f32 { Short::widen(self) }
            fn narrow(acc: f32) -> Self { Short::narrow(acc) }
        }
    };
    (itself $type:ty) => {
        impl Number for $type {
            type Acc = Self;
            fn widen(self) -> Self { self }
            fn narrow(acc: Self) -> Self { acc }
        }
    };
    (integer $type:ty) => {
        number!(itself $type);

        impl Accumulator for $type {
            const ZERO: Self = 0;
            const ONE: Self = 1;
            const LOWEST: Self = Self::MIN;
            const HIGHEST: Self = Self::MAX;
            fn add(self, x: Self) -> Self { self.wrapping_add(x) }
            fn mul(self, x: Self) -> Self { self.wrapping_mul(x) }
            fn min(self, x: Self) -> Self { Ord::min(self, x) }
            fn max(self, x: Self) -> Self { Ord::max(self, x) }
            fn divide(self, _by: u32) -> Self { unreachable!("calls with an integer mean are refused") }
        }
    };
    (float $type:ty) => {
        number!(itself $type);

        impl Accumulator for $type {
            const ZERO: Self = 0.0;
            const ONE: Self = 1.0;
            const LOWEST: Self = Self::NEG_INFINITY;
            const HIGHEST: Self = Self::INFINITY;
            fn add(self, x: Self) -> Self { self + x }
            fn mul(self, x: Self) -> Self { self * x }
            fn min(self, x: Self) -> Self {
                if self < x || (self == x && self.is_sign_negative()) {
                    self
                } else if x <= self {
                    x
                } else {
                    Self::NAN
                }
            }
            fn max(self, x: Self) -> Self {
                if self > x || (self == x && self.is_sign_positive()) {
                    self
                } else if x >= self {
                    x
                } else {
                    Self::NAN
                }
            }
            fn divide(self, by: u32) -> Self { self / by as Self }
        }
    };
}

dtypes!([numbers]);

fn elements<T: Element>(bytes: &[u8]) -> impl Iterator<Item = T> {
    bytes.chunks_exact(size_of::<T>()).map(bytemuck::pod_read_unaligned)
}

fn slots<T: Element>(bytes: &mut [u8]) -> impl Iterator<Item = &mut [u8]> {
    bytes.chunks_exact_mut(size_of::<T>())
}

fn write<T: Element>(slot: &mut [u8], value: T) {
    slot.copy_from_slice(bytemuck::bytes_of(&value));
}

fn set<T: Number>(running: &mut [u8], x: Operand<'_>) {
    match x {
        Operand::Partial(x) => running.copy_from_slice(x),
        Operand::Elements(x) => {
            for (slot, x) in slots::<T::Acc>(running).zip(elements::<T>(x)) {
                write(slot, x.widen());
            }
        }
    }
}

/// `running = running ∘ x`, or the other way around.
fn fold<T: Number, const IN_FRONT: bool>(op: ReduceOp, running: &mut [u8], x: Operand<'_>) {
    fn each<A: Accumulator, X: Number<Acc = A>, const IN_FRONT: bool>(
        running: &mut [u8],
        x: &[u8],
        f: impl Fn(A, A) -> A,
    ) {
        for (slot, x) in slots::<A>(running).zip(elements::<X>(x)) {
            let (held, x) = (bytemuck::pod_read_unaligned(slot), x.widen());
            write(slot, if IN_FRONT { f(x, held) } else { f(held, x) });
        }
    }
    fn by_op<A: Accumulator, X: Number<Acc = A>, const IN_FRONT: bool>(
        op: ReduceOp,
        running: &mut [u8],
        x: &[u8],
    ) {
        match op {
            ReduceOp::Sum | ReduceOp::Mean => each::<A, X, IN_FRONT>(running, x, A::add),
            ReduceOp::Prod => each::<A, X, IN_FRONT>(running, x, A::mul),
            ReduceOp::Min => each::<A, X, IN_FRONT>(running, x, A::min),
            ReduceOp::Max => each::<A, X, IN_FRONT>(running, x, A::max),
        }
    }
    match x {
        Operand::Elements(x) => by_op::<T::Acc, T, IN_FRONT>(op, running, x),
        Operand::Partial(x) => by_op::<T::Acc, T::Acc, IN_FRONT>(op, running, x),
    }
}

fn combine<T: Number>(op: ReduceOp, running: &mut [u8], a: Operand<'_>, b: Operand<'_>) {
    fn each<A: Accumulator, X: Number<Acc = A>, Y: Number<Acc = A>>(
        running: &mut [u8],
        (a, b): (&[u8], &[u8]),
        f: impl Fn(A, A) -> A,
    ) {
        for ((slot, a), b) in slots::<A>(running).zip(elements::<X>(a)).zip(elements::<Y>(b)) {
            write(slot, f(a.widen(), b.widen()));
        }
    }
    fn by_op<A: Accumulator, X: Number<Acc = A>, Y: Number<Acc = A>>(
        op: ReduceOp,
        running: &mut [u8],
        pair: (&[u8], &[u8]),
    ) {
        match op {
            ReduceOp::Sum | ReduceOp::Mean => each::<A, X, Y>(running, pair, A::add),
            ReduceOp::Prod => each::<A, X, Y>(running, pair, A::mul),
            ReduceOp::Min => each::<A, X, Y>(running, pair, A::min),
            ReduceOp::Max => each::<A, X, Y>(running, pair, A::max),
        }
    }
    match (a, b) {
        (Operand::Elements(a), Operand::Elements(b)) => by_op::<T::Acc, T, T>(op, running, (a, b)),
        (Operand::Elements(a), Operand::Partial(b)) => {
            by_op::<T::Acc, T, T::Acc>(op, running, (a, b))
        }
        (Operand::Partial(a), Operand::Elements(b)) => {
            by_op::<T::Acc, T::Acc, T>(op, running, (a, b))
        }
        (Operand::Partial(a), Operand::Partial(b)) => {
            by_op::<T::Acc, T::Acc, T::Acc>(op, running, (a, b));
        }
    }
}

fn finish<T: Number>(divisor: Option<u32>, out: &mut [u8], running: &[u8]) {
    for (slot, acc) in slots::<T>(out).zip(elements::<T::Acc>(running)) {
        write(slot, T::narrow(divisor.map_or(acc, |by| acc.divide(by))));
    }
}

fn divide<T: Number>(by: u32, out: &mut [u8]) {
    for slot in slots::<T>(out) {
        let value: T = bytemuck::pod_read_unaligned(slot);
        write(slot, T::narrow(value.widen().divide(by)));
    }
}

fn identity<T: Number>(op: ReduceOp, out: &mut [u8]) {
    let value = match op {
        ReduceOp::Sum | ReduceOp::Mean => T::Acc::ZERO,
        ReduceOp::Prod => T::Acc::ONE,
        ReduceOp::Min => T::Acc::HIGHEST,
        ReduceOp::Max => T::Acc::LOWEST,
    };
    for slot in slots::<T>(out) {
        write(slot, T::narrow(value));
    }
}

#[cfg(test)]
mod tests {
    use half::{bf16, f16};

    use super::*;
    use crate::team::tests::threads;

    fn apply<T: Element>(op: ReduceOp, a: T, b: T) -> T {
        let arithmetic = Arithmetic { dtype: T::DTYPE, op, ranks: 2, team: None };
        let mut running = vec![0; T::DTYPE.accumulator().size()];
        let mut out = vec![0; T::DTYPE.size()];
        let (a, b) = (bytemuck::bytes_of(&a), bytemuck::bytes_of(&b));
        arithmetic.combine(&mut running, Operand::Elements(a), Operand::Elements(b));
        arithmetic.finish(&mut out, &running);
        bytemuck::pod_read_unaligned(&out)
    }

    #[test]
    fn integers_wrap() {
        assert_eq!(apply(ReduceOp::Sum, i8::MAX, 1), i8::MIN);
        assert_eq!(apply(ReduceOp::Prod, u64::MAX, 2), u64::MAX - 1);
    }

    #[test]
    fn sixteen_bit_floats_round_once() {
        // 256 + 1 + 1 is 258 in f32; in bf16 each step would round back to 256.
        let arithmetic = Arithmetic { dtype: DType::Bf16, op: ReduceOp::Sum, ranks: 3, team: None };
        let one = bytemuck::bytes_of(&bf16::ONE).to_vec();
        let mut running = vec![0; 4];
        let big = bf16::from_f32(256.0);
        arithmetic.set(&mut running, Operand::Elements(bytemuck::bytes_of(&big)));
        arithmetic.fold(&mut running, Operand::Elements(&one));
        arithmetic.fold(&mut running, Operand::Elements(&one));
        let mut out = vec![0; 2];
        arithmetic.finish(&mut out, &running);
        assert_eq!(bytemuck::pod_read_unaligned::<bf16>(&out), bf16::from_f32(258.0));
    }

    #[test]
    fn min_and_max_do_not_depend_on_order() {
        let values = [f32::NAN, -0.0, 0.0, 1.5, f32::NEG_INFINITY, f32::INFINITY];
        for op in [ReduceOp::Min, ReduceOp::Max] {
            for a in values {
                for b in values {
                    let (one_way, other_way) = (apply(op, a, b), apply(op, b, a));
                    assert_eq!(one_way.to_bits(), other_way.to_bits(), "{op}({a}, {b})");
                    assert_eq!(one_way.is_nan(), a.is_nan() || b.is_nan());
                }
            }
        }
        assert!(apply(ReduceOp::Min, 0.0f32, -0.0).is_sign_negative());
        assert!(apply(ReduceOp::Max, -0.0f32, 0.0).is_sign_positive());
    }

    #[test]
    fn mean_divides_by_the_ranks() {
        assert_eq!(apply(ReduceOp::Mean, 1.0f64, 2.0), 1.5);
        assert_eq!(
            apply(ReduceOp::Mean, f16::from_f32(1.0), f16::from_f32(2.0)),
            f16::from_f32(1.5)
        );
    }

    #[test]
    fn unaligned_operands_work() {
        let mut bytes = vec![0u8; 1];
        bytes.extend_from_slice(bytemuck::cast_slice(&[1.0f32, 2.0, 3.0]));
        let mut running = bytes.clone();
        let arithmetic = Arithmetic { dtype: DType::F32, op: ReduceOp::Sum, ranks: 2, team: None };
        arithmetic.fold(&mut running[1..], Operand::Elements(&bytes[1..]));
        let sums: Vec<f32> = running[1..].chunks(4).map(bytemuck::pod_read_unaligned).collect();
        assert_eq!(sums, [2.0, 4.0, 6.0]);
    }

    #[test]
    fn a_team_computes_what_one_thread_does() {
        let count = 20_011;
        let bytes = |seed: u32, size: usize| -> Vec<u8> {
            let next = |state: &mut u32| {
                *state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                Some((*state >> 24) as u8)
            };
            std::iter::repeat(()).scan(seed, |state, ()| next(state)).take(count * size).collect()
        };
        let operators =
            [ReduceOp::Sum, ReduceOp::Mean, ReduceOp::Prod, ReduceOp::Min, ReduceOp::Max];
        for (dtype, op) in DType::ALL.iter().flat_map(|dtype| operators.map(|op| (*dtype, op))) {
            if op == ReduceOp::Mean && !dtype.is_float() {
                continue; // calls refuse it
            }
            let work = |team: Teamed| {
                let arithmetic = Arithmetic { dtype, op, ranks: 3, team };
                let (a, b) = (bytes(1, dtype.size()), bytes(2, dtype.size()));
                let partial = bytes(3, dtype.accumulator().size());
                let mut running = vec![0; count * dtype.accumulator().size()];
                arithmetic.set(&mut running, Operand::Elements(&a));
                arithmetic.fold(&mut running, Operand::Elements(&b));
                arithmetic.fold_in_front(&mut running, Operand::Partial(&partial));
                let mut pair = running.clone();
                arithmetic.combine(&mut pair, Operand::Elements(&b), Operand::Partial(&running));
                let mut out = vec![0; count * dtype.size()];
                arithmetic.finish(&mut out, &pair);
                arithmetic.finish_in_place(&mut out);
                (running, pair, out)
            };
            assert_eq!(work(Some(threads(3))), work(None), "{op} of {dtype}");
        }
    }
}
