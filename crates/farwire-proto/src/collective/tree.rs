//! The trees that broadcast and reduce run along.
//!
//! Ranks are numbered from the root, around the world: `v = (rank − root) mod N`.
//!
//! ```text
//! binomial, N = 8          chain
//!       0                  0 ─ 1 ─ 2 ─ … ─ N−1
//!     ┌─┼───┐
//!     1 2   4              v's parent clears v's lowest set bit;
//!       │  ┌┴┐             its children are v + 1, v + 2, v + 4, … below that bit
//!       3  5 6
//!            │
//!            7
//! ```

use crate::ids::{Rank, WorldSize};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Shape {
    /// ⌊log₂ N⌋ levels below the root, which has ⌈log₂ N⌉ children.
    Binomial,
    /// Every rank but the last has one child.
    Chain,
}

/// One rank's place in the tree.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Tree {
    pub(crate) shape: Shape,
    pub(crate) world: WorldSize,
    pub(crate) root: Rank,
    pub(crate) me: Rank,
}

impl Tree {
    /// Steps from the root, around the world.
    fn number(&self, rank: Rank) -> u32 {
        self.world.right_of(rank, self.world.get() - self.root.0).0
    }

    /// The rank this one hangs from; `None` at the root.
    pub(crate) fn parent(&self) -> Option<Rank> {
        let v = self.number(self.me);
        let parent = match self.shape {
            Shape::Binomial => v & v.wrapping_sub(1),
            Shape::Chain => v.saturating_sub(1),
        };
        (v > 0).then(|| self.world.right_of(self.root, parent))
    }

    /// How many children this rank has.
    pub(crate) fn children(&self) -> usize {
        let v = self.number(self.me);
        let n = self.world.get();
        match self.shape {
            Shape::Chain => usize::from(v + 1 < n),
            Shape::Binomial => {
                let bits = if v == 0 { u32::BITS } else { v.trailing_zeros() };
                (0..bits).take_while(|bit| u64::from(v) + (1u64 << bit) < u64::from(n)).count()
            }
        }
    }

    /// Which child `rank` is, counted from the nearest; `None` if it is none.
    pub(crate) fn child_index(&self, rank: Rank) -> Option<usize> {
        let child = Self { me: rank, ..*self };
        if child.parent() != Some(self.me) {
            return None;
        }
        let distance = self.number(rank) - self.number(self.me);
        Some(distance.trailing_zeros() as usize)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_rank_hangs_from_the_root_within_the_depth() {
        for n in 1..40 {
            let world = WorldSize::new(n).unwrap();
            for shape in [Shape::Binomial, Shape::Chain] {
                for root in world.ranks() {
                    let at = |me| Tree { shape, world, root, me };
                    let mut children = vec![0; world.len()];
                    for me in world.ranks() {
                        let mut depth = 0;
                        let mut here = me;
                        while let Some(parent) = at(here).parent() {
                            assert!(at(parent).child_index(here).is_some());
                            here = parent;
                            depth += 1;
                        }
                        assert_eq!(here, root);
                        let limit = match shape {
                            Shape::Binomial => n.ilog2(),
                            Shape::Chain => n - 1,
                        };
                        assert!(depth <= limit);
                        if let Some(parent) = at(me).parent() {
                            children[parent.index()] += 1;
                        }
                    }
                    for me in world.ranks() {
                        assert_eq!(at(me).children(), children[me.index()]);
                        let mut indices: Vec<_> =
                            world.ranks().filter_map(|rank| at(me).child_index(rank)).collect();
                        indices.sort();
                        assert!(indices.into_iter().eq(0..children[me.index()]));
                    }
                }
            }
        }
    }
}
