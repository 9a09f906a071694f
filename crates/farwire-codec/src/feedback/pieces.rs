//! The residuals of some elements of a tensor.

use std::any::Any;
use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;

/// What is owed for a run of elements, in host memory or elsewhere.
#[derive(Clone, Debug)]
pub enum Piece {
    /// In host memory.
    Host(Arc<Vec<f32>>),
    /// Outside host memory, such as on a GPU.
    Elsewhere(Arc<dyn ResidualElsewhere>),
}

/// What is owed for a run of elements, kept outside host memory.
///
/// The code that put it there recognises it by its type, with [`Any`]. Everything else (saving,
/// another codec, a change of ranks) fetches it.
pub trait ResidualElsewhere: Any + fmt::Debug + Send + Sync {
    /// Number of elements.
    fn len(&self) -> usize;

    /// Whether there are none.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// A copy in host memory. If it cannot be fetched, because the GPU is lost, the copy is all
    /// NaN: neither an encoder nor a checkpoint takes that for a residual.
    fn fetch(&self) -> Vec<f32>;
}

impl Piece {
    /// Number of elements.
    pub fn len(&self) -> usize {
        match self {
            Self::Host(values) => values.len(),
            Self::Elsewhere(values) => values.len(),
        }
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The values, in host memory.
    pub fn values(&self) -> Arc<Vec<f32>> {
        match self {
            Self::Host(values) => values.clone(),
            Self::Elsewhere(values) => Arc::new(values.fetch()),
        }
    }

    /// The buffer, if it is in host memory and nobody else holds it.
    pub(super) fn into_buffer(self) -> Option<Vec<f32>> {
        match self {
            Self::Host(values) => Arc::try_unwrap(values).ok(),
            Self::Elsewhere(_) => None,
        }
    }
}

impl From<Vec<f32>> for Piece {
    fn from(values: Vec<f32>) -> Self {
        Self::Host(Arc::new(values))
    }
}

/// Residuals of some elements of a tensor: disjoint runs, keyed by their first element. Elements
/// not covered are zero.
#[derive(Clone, Debug, Default)]
pub(super) struct Pieces(pub(super) BTreeMap<usize, Piece>);

impl Pieces {
    pub(super) fn overlaps(&self, range: &Range<usize>) -> bool {
        self.overlapping(range).next().is_some()
    }

    /// The pieces that share an element with `range`.
    fn overlapping(&self, range: &Range<usize>) -> impl Iterator<Item = (usize, &Piece)> {
        let end = if range.is_empty() { 0 } else { range.end };
        let from = range.start;
        self.0
            .range(..end)
            .rev()
            .map(|(start, values)| (*start, values))
            .take_while(move |(start, values)| start + values.len() > from)
    }

    /// The residual of `range`, or `None` if no piece overlaps it. If one piece has exactly these
    /// elements, this is that piece, wherever it is.
    pub(super) fn get(&self, range: Range<usize>) -> Option<Piece> {
        if let Some(piece) = self.0.get(&range.start)
            && piece.len() == range.len()
        {
            return Some(piece.clone());
        }
        if !self.overlaps(&range) {
            return None;
        }
        let mut whole = vec![0.0; range.len()];
        for (start, piece) in self.overlapping(&range) {
            let values = piece.values();
            let shared = start.max(range.start)..(start + values.len()).min(range.end);
            let from = shared.start - start..shared.end - start;
            whole[shared.start - range.start..shared.end - range.start]
                .copy_from_slice(&values[from]);
        }
        Some(whole.into())
    }

    /// Replaces the residual of `start..start + piece.len()` and of nothing else.
    pub(super) fn set(&mut self, start: usize, piece: Piece) {
        self.cut(&(start..start + piece.len()));
        if !piece.is_empty() {
            self.0.insert(start, piece);
        }
    }

    /// Forgets the residual of `range`.
    pub(super) fn cut(&mut self, range: &Range<usize>) {
        let overlapping: Vec<_> =
            self.overlapping(range).map(|(start, piece)| (start, piece.clone())).collect();
        for (at, old) in overlapping {
            self.0.remove(&at);
            let end = at + old.len();
            if range.start <= at && end <= range.end {
                continue;
            }
            let old = old.values();
            if at < range.start {
                self.0.insert(at, old[..range.start - at].to_vec().into());
            }
            if end > range.end {
                self.0.insert(range.end, old[range.end - at..].to_vec().into());
            }
        }
    }

    /// One past the last element that has a residual.
    pub(super) fn end(&self) -> usize {
        self.0.last_key_value().map_or(0, |(start, piece)| start + piece.len())
    }

    /// Whether any element is not zero.
    pub(super) fn owes(&self) -> bool {
        self.0.values().any(|piece| piece.values().iter().any(|value| *value != 0.0))
    }

    pub(super) fn norm(&self) -> f64 {
        let squares = |piece: &Piece| {
            let values = piece.values();
            dot(&values, &values)
        };
        self.0.values().map(squares).sum::<f64>().sqrt()
    }
}

/// The sum of products of two runs of the same length.
pub(super) fn dot(a: &[f32], b: &[f32]) -> f64 {
    // Several sums in parallel; a single one would wait for each addition before the next.
    const LANES: usize = 8;
    let mut sums = [0.0; LANES];
    let mut add = |a: &[f32], b: &[f32]| {
        let products = a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b));
        sums.iter_mut().zip(products).for_each(|(sum, product)| *sum += product);
    };
    let ((a, a_rest), (b, b_rest)) = (a.as_chunks::<LANES>(), b.as_chunks::<LANES>());
    a.iter().zip(b).for_each(|(a, b)| add(a, b));
    add(a_rest, b_rest);
    sums.iter().sum()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn every_product_counts_once() {
        for len in [0, 1, 7, 8, 9, 100] {
            let a: Vec<f32> = (0..len).map(|i| i as f32).collect();
            let b: Vec<f32> = a.iter().map(|a| a + 1.0).collect();
            let want: usize = (0..len).map(|i| i * (i + 1)).sum();
            assert_eq!(dot(&a, &b), want as f64, "{len} of them");
        }
    }

    proptest! {
        /// Pieces set in any order and layout read like a plain vector written the same way.
        #[test]
        fn pieces_are_a_vector(
            writes in prop::collection::vec((0usize..50, 0usize..50), 0..20),
            reads in prop::collection::vec((0usize..80, 0usize..80), 1..20),
        ) {
            let (mut pieces, mut plain) = (Pieces::default(), vec![0.0f32; 200]);
            for (k, (start, len)) in writes.into_iter().enumerate() {
                pieces.set(start, vec![k as f32 + 1.0; len].into());
                plain[start..start + len].fill(k as f32 + 1.0);
            }
            for (start, len) in reads {
                let want = &plain[start..start + len];
                match pieces.get(start..start + len) {
                    Some(piece) => prop_assert_eq!(&piece.values()[..], want),
                    None => prop_assert!(want.iter().all(|value| *value == 0.0)),
                }
            }
        }
    }
}
