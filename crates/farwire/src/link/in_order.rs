//! The frames of a lane, which may arrive in any order, but are taken in theirs.

use std::collections::BTreeMap;

use super::Broken;

/// A lane's frames that have come and have not been taken.
#[derive(Debug)]
pub(crate) struct InOrder<F> {
    /// The index of the next frame to take.
    next: u32,
    frames: BTreeMap<u32, F>,
}

impl<F> Default for InOrder<F> {
    fn default() -> Self {
        Self { next: 0, frames: BTreeMap::new() }
    }
}

impl<F> InOrder<F> {
    /// Adds a frame that has come; `true` if it is the next to take.
    pub(crate) fn put(&mut self, index: u32, frame: F) -> Result<bool, Broken> {
        if index < self.next || self.frames.insert(index, frame).is_some() {
            return Err(Broken("a frame came twice"));
        }
        Ok(index == self.next)
    }

    /// The index of the next frame to take.
    pub(crate) fn next(&self) -> u32 {
        self.next
    }

    /// The next frame to take, if it has come.
    pub(crate) fn head(&self) -> Option<&F> {
        self.frames.get(&self.next)
    }

    /// Takes that frame.
    pub(crate) fn pop(&mut self) -> Option<F> {
        let frame = self.frames.remove(&self.next)?;
        self.next = self.next.saturating_add(1);
        Some(frame)
    }

    /// All frames that have come and have not been taken.
    pub(crate) fn into_frames(self) -> impl Iterator<Item = F> {
        self.frames.into_values()
    }

    /// How many frames have come and have not been taken.
    #[cfg(test)]
    pub(crate) fn len(&self) -> usize {
        self.frames.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_are_taken_in_their_order_and_none_twice() {
        let mut lane = InOrder::default();
        assert!(!lane.put(1, 'b').unwrap());
        assert_eq!(lane.head(), None);
        assert_eq!(lane.pop(), None);
        assert!(lane.put(0, 'a').unwrap());
        assert!(lane.put(1, 'x').is_err(), "it is here already");
        assert_eq!(lane.pop(), Some('a'));
        assert!(lane.put(0, 'x').is_err(), "it was taken");
        assert_eq!(lane.next(), 1);
    }
}
