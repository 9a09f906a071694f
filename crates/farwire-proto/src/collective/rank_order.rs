//! Folding in rank order, whatever order frames arrive in.
//!
//! The owner of a block folds it one segment at a time, and each segment from rank 0, 1, … N−1, its
//! own elements at its own place:
//!
//! ```text
//! segment 0: x0 ∘ x1 ∘ … ∘ x(N−1) ─▶ result, segment 1: x0 ∘ x1 ∘ …
//! ```
//!
//! A frame whose turn has not come stays in its stream, so early arrivals cost no memory. Every
//! float is added in the same order at one place, so results are bit-identical on all ranks, from
//! run to run, for any segment size.

use crate::ids::{Rank, WorldSize};
use crate::partition::Span;
use crate::schedule::{Action, Emit, Fold, Gate, Incoming, Level, Mine, Own, Running};

/// The order of one owner's folds.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RankOrder {
    pub(crate) owner: Rank,
    pub(crate) world: WorldSize,
}

impl RankOrder {
    /// Frames folded per segment: one from each other rank.
    fn per_segment(self) -> usize {
        self.world.len() - 1
    }

    /// The frame from `from` with the owner's `k`-th segment: `own` in the owner's input, `result`
    /// in its output.
    pub(crate) fn fold(self, from: Rank, k: usize, own: Span, result: Span) -> Incoming {
        let turn = if from < self.owner { from.index() } else { from.index() - 1 };
        let own_turn = if from.0 + 1 == self.owner.0 {
            Own::After(Mine::Input(own))
        } else if self.owner == Rank(0) && turn == 0 {
            Own::Before(Mine::Input(own))
        } else {
            Own::No
        };
        let last = turn + 1 == self.per_segment();
        Incoming {
            action: Action::Fold(Fold {
                len: own.len,
                partial: false,
                first: turn == 0,
                own: own_turn,
                level: Level::All,
                running: Running::Output(result),
                emit: if last { Emit::Last(result) } else { Emit::No },
            }),
            gate: Gate::after_folds(k * self.per_segment() + turn),
        }
    }

    /// Open once the `k`-th segment is complete.
    pub(crate) fn complete(self, k: usize) -> Gate {
        Gate::after_folds((k + 1) * self.per_segment())
    }
}
