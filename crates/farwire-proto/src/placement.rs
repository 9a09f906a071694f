//! Which host each member of a communicator is on.
//!
//! Hosts are numbered by their lowest rank, and the ranks of a host by their order:
//!
//! ```text
//! rank      0  1  2  3  4          hosts  0: ranks 0, 2, 3
//! on host   a  b  a  a  b                 1: ranks 1, 4
//! ```
//!
//! For a vector to cross the network once per host, rather than once per rank, it is cut into
//! *columns*, as many as the largest host has ranks. On every host, one rank serves each column:
//! the ranks take them in turn. A column is cut into *cells*, one for each host. A cell's result is
//! made on its host, by the rank that serves the column there.

use std::hash::Hash;
use std::sync::Arc;

use rustc_hash::FxHashMap as HashMap;

use crate::ids::{Rank, WorldSize};
use crate::partition::digest;

/// Which host each rank is on. Cloning is cheap.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Placement(Arc<Table>);

#[derive(Debug, PartialEq, Eq)]
struct Table {
    /// The ranks of each host.
    hosts: Vec<Vec<Rank>>,
    /// For each rank, its host and its number there.
    seats: Vec<Seat>,
    /// Ranks of the largest host.
    columns: usize,
}

/// A rank's place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Seat {
    /// The number of its host.
    pub host: usize,
    /// Its number among the ranks of that host.
    pub number: usize,
}

/// The order in which the floats of an all-reduce are added up. The same on all ranks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SumOrder {
    /// The ranks of each host first, in rank order, and then those sums, in the order of the hosts'
    /// lowest ranks: so that each host's sum can cross the network once.
    #[default]
    Host,
    /// From rank 0 to the last, wherever they are.
    Rank,
}

impl Placement {
    /// The placement of ranks by the names of their hosts, one for each rank. Only whether two
    /// names are equal counts. `None` if there are no ranks.
    pub fn new<N: Eq + Hash>(names: &[N]) -> Option<Self> {
        WorldSize::new(u32::try_from(names.len()).ok()?)?;
        let mut known: HashMap<&N, usize> = HashMap::default();
        let mut hosts: Vec<Vec<Rank>> = Vec::new();
        let mut seats: Vec<Seat> = Vec::with_capacity(names.len());
        for (rank, name) in (0..).map(Rank).zip(names) {
            let host = *known.entry(name).or_insert(hosts.len());
            if host == hosts.len() {
                hosts.push(Vec::new());
            }
            seats.push(Seat { host, number: hosts[host].len() });
            hosts[host].push(rank);
        }
        let columns = hosts.iter().map(Vec::len).max()?;
        Some(Self(Arc::new(Table { hosts, seats, columns })))
    }

    /// All on one host.
    pub fn one_host(world: WorldSize) -> Self {
        Self::new(&vec![(); world.len()]).expect("a world has ranks")
    }

    /// How many ranks there are.
    pub fn world(&self) -> WorldSize {
        WorldSize::new(self.0.seats.len() as u32).expect("a placement has ranks")
    }

    /// How many hosts there are.
    pub fn hosts(&self) -> usize {
        self.0.hosts.len()
    }

    /// The ranks of a host.
    pub fn ranks(&self, host: usize) -> &[Rank] {
        &self.0.hosts[host]
    }

    /// Where a rank is.
    pub fn seat(&self, rank: Rank) -> Seat {
        self.0.seats[rank.index()]
    }

    /// How many ranks are on the same host as this one, itself included.
    pub fn mates(&self, rank: Rank) -> usize {
        self.ranks(self.seat(rank).host).len()
    }

    /// Whether there are several hosts, and some have several ranks: whether there are two levels
    /// at all.
    pub fn is_split(&self) -> bool {
        self.hosts() > 1 && self.0.columns > 1
    }

    /// Whether adding up hosts first is the same as adding up in rank order: only the first host
    /// has several ranks, and they are the first.
    pub fn keeps_rank_order(&self) -> bool {
        self.0.hosts[1..].iter().all(|ranks| ranks.len() == 1)
            && self.ranks(0).last().is_some_and(|last| last.index() + 1 == self.ranks(0).len())
    }

    /// How many columns a vector is cut into: the ranks of the largest host.
    pub fn columns(&self) -> usize {
        self.0.columns
    }

    /// The rank that serves a column on a host.
    pub fn owner(&self, column: usize, host: usize) -> Rank {
        let ranks = self.ranks(host);
        ranks[column % ranks.len()]
    }

    /// The columns that a rank serves, in order.
    pub fn columns_of(&self, rank: Rank) -> impl Iterator<Item = usize> + use<> {
        (self.seat(rank).number..self.columns()).step_by(self.mates(rank))
    }

    /// The columns that two ranks of different hosts both serve, in order.
    pub fn shared_columns(&self, a: Rank, b: Rank) -> impl Iterator<Item = usize> + use<> {
        let (number, mates) = (self.seat(b).number, self.mates(b));
        self.columns_of(a).filter(move |column| column % mates == number)
    }

    /// A 32-bit digest by which ranks find out that they know different placements.
    pub fn digest(&self) -> u32 {
        digest(self.0.seats.iter().map(|seat| seat.host as u64))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn hosts_are_numbered_by_their_lowest_rank() {
        let placement = Placement::new(&["b", "a", "b", "b", "a"]).unwrap();
        assert_eq!(placement.ranks(0), [0, 2, 3].map(Rank));
        assert_eq!(placement.ranks(1), [1, 4].map(Rank));
        assert_eq!(placement.seat(Rank(3)), Seat { host: 0, number: 2 });
        assert_eq!(placement, Placement::new(&[7, 0, 7, 7, 0]).unwrap(), "names mean nothing");
        assert_ne!(placement.digest(), Placement::new(&[0, 1, 0, 1, 0]).unwrap().digest());
        assert!(Placement::new::<u8>(&[]).is_none());
    }

    #[test]
    fn one_host_or_one_rank_on_each_is_not_split() {
        let split = |hosts: &[u8]| Placement::new(hosts).unwrap().is_split();
        assert!(!split(&[0, 0, 0]) && !split(&[0, 1, 2]) && !split(&[0]));
        assert!(split(&[0, 0, 1]) && split(&[0, 1, 1]));
    }

    #[test]
    fn rank_order_is_kept_where_only_the_first_host_has_several() {
        let keeps = |hosts: &[u8]| Placement::new(hosts).unwrap().keeps_rank_order();
        assert!(keeps(&[0, 0, 0, 1]) && keeps(&[0, 0]) && keeps(&[0, 1, 2]));
        assert!(!keeps(&[0, 1, 1]) && !keeps(&[0, 1, 0]) && !keeps(&[0, 0, 1, 1]));
    }

    proptest! {
        #[test]
        fn on_every_host_one_rank_serves_each_column(
            hosts in prop::collection::vec(0u8..6, 1..20),
        ) {
            let placement = Placement::new(&hosts).unwrap();
            for host in 0..placement.hosts() {
                let mut served: Vec<_> = placement
                    .ranks(host)
                    .iter()
                    .flat_map(|rank| placement.columns_of(*rank).map(move |column| (column, *rank)))
                    .collect();
                served.sort();
                let owned = (0..placement.columns()).map(|c| (c, placement.owner(c, host)));
                prop_assert!(served.into_iter().eq(owned));
            }
        }
    }
}
