//! Two levels: an all-reduce in which each host's sum crosses the network once, however many ranks
//! the host has.
//!
//! The vector is cut into columns, and each column into cells, one for each host, as
//! [`Placement`] says. With H hosts of R ranks each, a column is 1/R of the vector and a cell 1/H
//! of that. On each host, one rank serves a column.
//!
//! 1. *Scatter on the host.* Every rank sends each column to the rank that serves it there, which
//!    folds what it gets in rank order: the host's sum.
//! 2. *Scatter.* It sends each cell of that sum to the rank that serves the column on the cell's
//!    host, which folds what it gets in the order of hosts: the result.
//! 3. *Gather.* It sends the result of its cell to the ranks that serve the column on other hosts.
//! 4. *Gather on the host.* Each rank passes the results of its columns on to the others on its
//!    host.
//!
//! ```text
//!   host 0                     host 1
//!  rank 0 ◀─2, 3─▶ rank 2      column 0: cell 0 is rank 0's, cell 1 is rank 2's
//!    ▲ 1               ▲ 1
//!    ▼ 4               ▼ 4
//!  rank 1 ◀─2, 3─▶ rank 3      column 1: cell 0 is rank 1's, cell 1 is rank 3's
//! ```
//!
//! Segments go through all of this one by one, so the network is busy while a host adds up the
//! next. Bytes that leave a host, for S bytes: 2(H−1)/H·S. Rounds: two between hosts, and two on
//! each.
//!
//! The order of addition is that of the placement, for any length: it does not depend on which rank
//! makes the result. A host's sum is rounded to the element type (which matters to 16-bit floats,
//! whose running value is f32) and lies in the output until the result takes its place. So 16-bit
//! sums are rounded once on each level, and cross the network in 16 bits.

use crate::collective::rank_order::RankOrder;
use crate::ids::{Rank, WorldSize};
use crate::partition::{Partition, Span};
use crate::placement::Placement;
use crate::schedule::{
    Action, Fold, Gate, InPlace, Incoming, Level, Mine, Outgoing, Own, Running, Schedule, Slots,
    Source,
};

/// Where the running value of a cell is kept, beside the host's own sum in the output.
const RUNNING: usize = 0;

#[derive(Clone, Debug)]
pub(crate) struct TwoLevel {
    pub(crate) me: Rank,
    pub(crate) placement: Placement,
    /// A block for each cell, column by column; all have the same number of segments.
    cells: Partition,
}

/// A segment of a cell.
#[derive(Clone, Copy, Debug)]
struct Part {
    /// Which of its owner's columns this is.
    nth: usize,
    column: usize,
    host: usize,
    segment: usize,
}

impl TwoLevel {
    /// An all-reduce of `count` elements in a [split](Placement::is_split) placement.
    pub(crate) fn new(
        me: Rank,
        placement: &Placement,
        count: usize,
        segment: std::num::NonZeroUsize,
    ) -> Self {
        let cells = WorldSize::new((placement.columns() * placement.hosts()) as u32)
            .expect("a placement has hosts and columns");
        let cells = Partition::even(count, cells, segment);
        Self { me, placement: placement.clone(), cells }
    }

    fn host(&self) -> usize {
        self.placement.seat(self.me).host
    }

    fn is_mate(&self, rank: Rank) -> bool {
        self.placement.seat(rank).host == self.host()
    }

    /// Segments of every cell.
    fn segments(&self) -> usize {
        self.cells.segments(Rank(0))
    }

    fn columns_of(&self, rank: Rank) -> usize {
        self.placement.columns_of(rank).count()
    }

    fn span(&self, part: Part) -> Span {
        let cell = part.column * self.placement.hosts() + part.host;
        self.cells.segment(Rank(cell as u32), part.segment)
    }

    // What travels on a host: all parts of the columns of a rank, segment by segment.

    fn parts_of(&self, rank: Rank) -> usize {
        self.segments() * self.columns_of(rank) * self.placement.hosts()
    }

    fn part_of(&self, rank: Rank, i: usize) -> Part {
        let (columns, hosts) = (self.columns_of(rank), self.placement.hosts());
        let (nth, host) = (i / hosts % columns, i % hosts);
        let seat = self.placement.seat(rank);
        let column = seat.number + nth * self.placement.mates(rank);
        Part { nth, column, host, segment: i / (hosts * columns) }
    }

    /// The place of a part among those of this rank's columns.
    fn index_of(&self, part: Part) -> usize {
        self.cell_index(part) * self.placement.hosts() + part.host
    }

    /// The same, among the parts in one host's cells only.
    fn cell_index(&self, part: Part) -> usize {
        part.segment * self.columns_of(self.me) + part.nth
    }

    // What travels between hosts: one host's cells of the columns that two ranks share.

    fn shared(&self, other: Rank) -> usize {
        self.placement.shared_columns(self.me, other).count()
    }

    fn shared_part(&self, other: Rank, host: usize, i: usize) -> Part {
        let shared = self.shared(other);
        let column = self.placement.shared_columns(self.me, other).nth(i % shared);
        let column = column.expect("the remainder is less than the count");
        let nth = column / self.placement.mates(self.me);
        Part { nth, column, host, segment: i / shared }
    }

    /// The order in which this host's ranks are added up.
    fn on_host(&self) -> RankOrder {
        let seat = self.placement.seat(self.me);
        RankOrder { owner: Rank(seat.number as u32), world: size(self.placement.mates(self.me)) }
    }

    /// The order in which hosts are added up.
    fn of_hosts(&self) -> RankOrder {
        RankOrder { owner: Rank(self.host() as u32), world: size(self.placement.hosts()) }
    }

    /// Open once the host's sum of a part is complete.
    fn summed_on_host(&self, part: Part) -> Gate {
        let host_folded = self.on_host().complete(self.index_of(part)).folded;
        Gate { host_folded, ..Gate::OPEN }
    }

    /// Where the host's sum of a part is: on a host with one rank, in that rank's input.
    fn held(&self, part: Part) -> Mine {
        let span = self.span(part);
        if self.placement.mates(self.me) == 1 { Mine::Input(span) } else { Mine::Output(span) }
    }

    /// How many frames from other hosts this rank folds. The frames that it stores come after all
    /// of these.
    fn folds(&self) -> usize {
        self.segments() * self.columns_of(self.me) * (self.placement.hosts() - 1)
    }

    /// How many frames from other hosts this rank takes before the one with the result of a part.
    /// They are taken in a fixed order, so one counter says which have come.
    fn turn_of_result(&self, part: Part) -> usize {
        let others = self.placement.hosts() - 1;
        let turn = part.host - usize::from(part.host > self.host());
        self.folds() + self.cell_index(part) * others + turn
    }

    /// Open once this rank has the result of a part.
    fn has_result(&self, part: Part) -> Gate {
        if part.host == self.host() {
            self.of_hosts().complete(self.cell_index(part))
        } else {
            Gate::after_receipts(self.turn_of_result(part) + 1)
        }
    }

    /// A frame with the elements of a rank on this host.
    fn fold_on_host(&self, from: Rank, i: usize) -> Incoming {
        let span = self.span(self.part_of(self.me, i));
        let from = Rank(self.placement.seat(from).number as u32);
        let (fold, turn) = fold(self.on_host().fold(from, i, span, span));
        Incoming {
            action: Action::Fold(Fold { level: Level::Host, ..fold }),
            gate: Gate { host_folded: turn, ..Gate::OPEN },
        }
    }

    /// A frame with the sum of another host.
    fn fold_host(&self, from: Rank, part: Part) -> Incoming {
        let span = self.span(part);
        let from = Rank(self.placement.seat(from).host as u32);
        let (fold, folded) = fold(self.of_hosts().fold(from, self.cell_index(part), span, span));
        let own = match fold.own {
            Own::No => Own::No,
            Own::Before(_) => Own::Before(self.held(part)),
            Own::After(_) => Own::After(self.held(part)),
        };
        let own_part = if own == Own::No { Gate::OPEN } else { self.summed_on_host(part) };
        Incoming {
            action: Action::Fold(Fold { own, running: Running::Slot(RUNNING), ..fold }),
            gate: Gate { folded, ..own_part },
        }
    }
}

impl Schedule for TwoLevel {
    fn input_len(&self) -> usize {
        self.cells.len()
    }

    fn output_len(&self) -> usize {
        self.cells.len()
    }

    fn sends(&self, to: Rank) -> usize {
        if self.is_mate(to) {
            self.parts_of(to) + self.parts_of(self.me)
        } else {
            (2 * self.shared(to) * self.segments()).max(1)
        }
    }

    fn send(&self, to: Rank, i: usize) -> Outgoing {
        if self.is_mate(to) {
            return match i.checked_sub(self.parts_of(to)) {
                None => Outgoing::now(Source::Input(self.span(self.part_of(to, i)))),
                Some(i) => {
                    let part = self.part_of(self.me, i);
                    Outgoing::after(self.has_result(part), Source::Output(self.span(part)))
                }
            };
        }
        let cells = self.shared(to) * self.segments();
        if cells == 0 {
            return Outgoing::HELLO;
        }
        match i.checked_sub(cells) {
            None => {
                let part = self.shared_part(to, self.placement.seat(to).host, i);
                let source = match self.held(part) {
                    Mine::Input(span) => Source::Input(span),
                    Mine::Output(span) => Source::Output(span),
                };
                Outgoing::after(self.summed_on_host(part), source)
            }
            Some(i) => {
                let part = self.shared_part(to, self.host(), i);
                Outgoing::after(self.has_result(part), Source::Output(self.span(part)))
            }
        }
    }

    fn recvs(&self, from: Rank) -> usize {
        if self.is_mate(from) {
            self.parts_of(self.me) + self.parts_of(from)
        } else {
            (2 * self.shared(from) * self.segments()).max(1)
        }
    }

    fn recv(&self, from: Rank, i: usize) -> Incoming {
        if self.is_mate(from) {
            return match i.checked_sub(self.parts_of(self.me)) {
                None => self.fold_on_host(from, i),
                Some(i) => Incoming::store(self.span(self.part_of(from, i))),
            };
        }
        let cells = self.shared(from) * self.segments();
        if cells == 0 {
            return Incoming::HELLO;
        }
        match i.checked_sub(cells) {
            None => self.fold_host(from, self.shared_part(from, self.host(), i)),
            Some(i) => {
                let part = self.shared_part(from, self.placement.seat(from).host, i);
                let gate = Gate::after_receipts(self.turn_of_result(part));
                Incoming { gate, ..Incoming::store(self.span(part)) }
            }
        }
    }

    fn is_upstream(&self, from: Rank) -> bool {
        !self.is_mate(from) && self.shared(from) > 0
    }

    /// On hosts of equal size, frames with the same index belong to the same segment on all lanes.
    fn keeps_step(&self) -> bool {
        let ranks = |host| self.placement.ranks(host).len();
        (1..self.placement.hosts()).all(|host| ranks(host) == ranks(0))
    }

    /// A segment's result comes only from a rank that has folded what this rank sent of it, or
    /// whose host has; and a host's sum takes the place of elements that only this rank reads.
    fn in_place(&self) -> Option<InPlace> {
        Some(InPlace::default())
    }

    fn slots(&self) -> Slots {
        Slots { count: RUNNING + 1, len: self.cells.longest_segment() }
    }
}

fn size(count: usize) -> WorldSize {
    WorldSize::new(count as u32).expect("neither hosts nor their ranks are none")
}

/// A fold in rank order, and its turn.
fn fold(incoming: Incoming) -> (Fold, usize) {
    match incoming.action {
        Action::Fold(fold) => (fold, incoming.gate.folded),
        _ => unreachable!("rank order gives folds"),
    }
}
