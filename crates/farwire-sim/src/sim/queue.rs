//! Future events, by their time.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use farwire_proto::Time;

/// Future events, earliest first; among events at the same time, the first that was put in.
///
/// Large worlds have millions of them waiting. A heap moves its entries around, so it holds only
/// what they are compared by and where each one is; the events themselves stay put.
#[derive(Debug)]
pub(super) struct Queue<T> {
    /// The time, how many were put in before, and the place in `things`.
    order: BinaryHeap<Reverse<(Time, u64, usize)>>,
    things: Vec<Option<T>>,
    free: Vec<usize>,
    pushed: u64,
}

impl<T> Default for Queue<T> {
    fn default() -> Self {
        Self { order: BinaryHeap::new(), things: Vec::new(), free: Vec::new(), pushed: 0 }
    }
}

impl<T> Queue<T> {
    pub(super) fn push(&mut self, at: Time, thing: T) {
        let place = self.free.pop().unwrap_or_else(|| {
            self.things.push(None);
            self.things.len() - 1
        });
        self.things[place] = Some(thing);
        self.order.push(Reverse((at, self.pushed, place)));
        self.pushed += 1;
    }

    pub(super) fn pop(&mut self) -> Option<(Time, T)> {
        let Reverse((at, _, place)) = self.order.pop()?;
        self.free.push(place);
        Some((at, self.things[place].take()?))
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn what_is_earliest_comes_first_and_then_what_was_put_in_first() {
        let at = |seconds| Time(Duration::from_secs(seconds));
        let mut queue = Queue::default();
        queue.push(at(2), "c");
        queue.push(at(1), "a");
        queue.push(at(2), "d");
        assert_eq!(queue.pop(), Some((at(1), "a")));
        queue.push(at(2), "e"); // in the place that was freed
        queue.push(at(1), "b");
        let rest: Vec<_> = std::iter::from_fn(|| queue.pop()).map(|(_, thing)| thing).collect();
        assert_eq!(rest, ["b", "c", "d", "e"]);
    }
}
