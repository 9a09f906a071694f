//! What is owed for some elements of a tensor.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

/// Residuals of some elements of a tensor: disjoint runs by their first element. What is not
/// covered is zero.
#[derive(Clone, Debug, Default)]
pub(super) struct Pieces(pub(super) BTreeMap<usize, Arc<Vec<f32>>>);

impl Pieces {
    pub(super) fn overlaps(&self, range: &Range<usize>) -> bool {
        self.overlapping(range).next().is_some()
    }

    /// The pieces that share an element with `range`.
    fn overlapping(&self, range: &Range<usize>) -> impl Iterator<Item = (usize, &Arc<Vec<f32>>)> {
        let end = if range.is_empty() { 0 } else { range.end };
        let from = range.start;
        self.0
            .range(..end)
            .rev()
            .map(|(start, values)| (*start, values))
            .take_while(move |(start, values)| start + values.len() > from)
    }

    /// The residual of `range`, or nothing if all of it is zero.
    pub(super) fn get(&self, range: Range<usize>) -> Option<Arc<Vec<f32>>> {
        if let Some(values) = self.0.get(&range.start)
            && values.len() == range.len()
        {
            return Some(values.clone());
        }
        if !self.overlaps(&range) {
            return None;
        }
        let mut whole = vec![0.0; range.len()];
        for (start, values) in self.overlapping(&range) {
            let shared = start.max(range.start)..(start + values.len()).min(range.end);
            let from = shared.start - start..shared.end - start;
            whole[shared.start - range.start..shared.end - range.start]
                .copy_from_slice(&values[from]);
        }
        Some(Arc::new(whole))
    }

    /// Replaces the residual of `start..start + values.len()` and of nothing else.
    pub(super) fn set(&mut self, start: usize, values: Vec<f32>) {
        self.cut(&(start..start + values.len()));
        if !values.is_empty() {
            self.0.insert(start, Arc::new(values));
        }
    }

    /// Forgets the residual of `range`.
    pub(super) fn cut(&mut self, range: &Range<usize>) {
        let overlapping: Vec<_> =
            self.overlapping(range).map(|(start, values)| (start, values.clone())).collect();
        for (at, old) in overlapping {
            self.0.remove(&at);
            let end = at + old.len();
            if at < range.start {
                self.0.insert(at, Arc::new(old[..range.start - at].to_vec()));
            }
            if end > range.end {
                self.0.insert(range.end, Arc::new(old[range.end - at..].to_vec()));
            }
        }
    }

    pub(super) fn norm(&self) -> f64 {
        let squares =
            self.0.values().flat_map(|values| values.iter()).map(|value| f64::from(*value).powi(2));
        squares.sum::<f64>().sqrt()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// Pieces set in any order and layout read as a plain vector written the same way.
        #[test]
        fn pieces_are_a_vector(
            writes in prop::collection::vec((0usize..50, 0usize..50), 0..20),
            reads in prop::collection::vec((0usize..80, 0usize..80), 1..20),
        ) {
            let (mut pieces, mut plain) = (Pieces::default(), vec![0.0f32; 200]);
            for (k, (start, len)) in writes.into_iter().enumerate() {
                pieces.set(start, vec![k as f32 + 1.0; len]);
                plain[start..start + len].fill(k as f32 + 1.0);
            }
            for (start, len) in reads {
                let want = &plain[start..start + len];
                match pieces.get(start..start + len) {
                    Some(values) => prop_assert_eq!(&values[..], want),
                    None => prop_assert!(want.iter().all(|value| *value == 0.0)),
                }
            }
        }
    }
}
