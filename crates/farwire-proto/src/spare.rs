//! Collections that are kept for the next use, so that a loop of operations allocates nothing.

/// A few unused collections, which keep their capacity.
#[derive(Debug)]
pub struct Spare<C> {
    kept: Vec<C>,
}

/// How many are kept at most.
const KEPT: usize = 16;

impl<C: Default> Spare<C> {
    /// A kept collection, or else a new one.
    pub fn take(&mut self) -> C {
        self.kept.pop().unwrap_or_default()
    }

    /// Keeps a collection, unless there are enough.
    pub fn give(&mut self, unused: C) {
        if self.kept.len() < KEPT {
            self.kept.push(unused);
        }
    }
}

impl<C> Default for Spare<C> {
    fn default() -> Self {
        Self { kept: Vec::new() }
    }
}
