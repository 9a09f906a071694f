//! Names for ranks, peers, communicators and operations, and the time that a driver gives them.

use std::fmt;
use std::num::NonZeroU32;
use std::ops::Add;
use std::time::Duration;

/// A position inside one communicator, `0..world`.
///
/// Schedules, roots and partitions speak of ranks. Links speak of [`Peer`]s: the two differ as soon
/// as a communicator holds only some of the processes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Rank(pub u32);

impl Rank {
    /// The rank as an index into a per-rank table.
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

impl fmt::Display for Rank {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rank {}", self.0)
    }
}

/// One process of the job, numbered by its rank in the world communicator. Links connect peers, and
/// errors name them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Peer(pub u32);

impl Peer {
    /// The peer as an index into a per-process table.
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

impl fmt::Display for Peer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rank {}", self.0)
    }
}

/// How many ranks a communicator has: at least one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct WorldSize(NonZeroU32);

impl WorldSize {
    /// A world of `n` ranks; `None` for zero.
    pub fn new(n: u32) -> Option<Self> {
        NonZeroU32::new(n).map(Self)
    }

    /// The number of ranks.
    pub fn get(self) -> u32 {
        self.0.get()
    }

    /// The number of ranks, as the length of a table.
    pub fn len(self) -> usize {
        self.get() as usize
    }

    /// Always `false`: a world has at least one rank. (It goes with `len`.)
    pub fn is_empty(self) -> bool {
        false
    }

    /// Whether `rank` lies in this world.
    pub fn contains(self, rank: Rank) -> bool {
        rank.0 < self.get()
    }

    /// All ranks, in order.
    pub fn ranks(self) -> impl Iterator<Item = Rank> {
        (0..self.get()).map(Rank)
    }

    /// All ranks but `me`, starting at its right neighbour: ranks that send in this order do not
    /// all flood the same one.
    pub fn others(self, me: Rank) -> impl Iterator<Item = Rank> {
        (1..self.get()).map(move |distance| self.right_of(me, distance))
    }

    /// The rank `distance` steps to the right of `rank`, around the ring.
    pub fn right_of(self, rank: Rank, distance: u32) -> Rank {
        let n = u64::from(self.get());
        Rank(((u64::from(rank.0) + u64::from(distance)) % n) as u32)
    }

    /// The rank `distance` steps to the left of `rank`, around the ring.
    pub fn left_of(self, rank: Rank, distance: u32) -> Rank {
        self.right_of(rank, self.get() - distance % self.get())
    }
}

impl fmt::Display for WorldSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// The generation of the group: it grows each time the job re-forms, and frames of another
/// generation are dropped.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Epoch(pub u32);

/// Names a communicator. All of its members derive the same value; see [`CommId::child`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct CommId(pub u64);

impl CommId {
    /// The communicator of all processes.
    pub const WORLD: Self = Self(0);

    /// The communicator of all members of an epoch; for the first epoch, the world.
    pub fn of_epoch(epoch: Epoch) -> Self {
        // No communicator is split `u32::MAX` times.
        if epoch.0 == 0 { Self::WORLD } else { Self::WORLD.child(u32::MAX, epoch.0) }
    }

    /// The id of the `split`-th communicator split off this one with `color`. It is the same on
    /// every member, and 64 bits of mixing make it different from every other.
    pub fn child(self, split: u32, color: u32) -> Self {
        let mixed = mix(self.0 ^ mix((u64::from(split) << 32) | u64::from(color)));
        Self((mixed & !1).max(2)) // zero is the world, odd ones are subgroups
    }

    /// The id of the `nth` communicator of this name that these members of this one form. It is the
    /// same on every member, and odd, so it is never that of a [`child`](Self::child).
    pub fn subgroup(self, name: &str, members: &[Peer], nth: u32) -> Self {
        let words = name.bytes().map(u64::from);
        let words = words.chain([u64::MAX]).chain(members.iter().map(|peer| u64::from(peer.0)));
        let hash =
            words.chain([u64::MAX, nth.into()]).fold(mix(self.0), |hash, word| mix(hash ^ word));
        Self(hash | 1)
    }
}

/// A 64-bit finaliser (a bijection with good avalanche), so that ids built from small numbers
/// spread out.
fn mix(x: u64) -> u64 {
    let x = x.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// Separates streams of point-to-point messages: a receive never takes a message with another tag.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Tag(pub u32);

/// Which operation of a communicator a frame belongs to. Every rank counts its calls, so equal
/// numbers mean the same operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum OpSeq {
    /// The n-th collective submitted on the communicator.
    Collective(u64),
    /// The n-th message with this tag from one rank to another.
    Message(Tag, u64),
}

impl fmt::Display for OpSeq {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Collective(seq) => write!(f, "#{seq}"),
            Self::Message(tag, seq) => write!(f, "tag {} #{seq}", tag.0),
        }
    }
}

/// One operation of this process, from submit to its event. Never reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct OpId(pub u64);

/// A moment, as the time since an origin that the driver chose. Nothing in this crate reads a
/// clock.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Time(pub Duration);

impl Time {
    /// The origin.
    pub const ZERO: Self = Self(Duration::ZERO);
    /// Later than everything.
    pub const MAX: Self = Self(Duration::MAX);
}

impl Add<Duration> for Time {
    type Output = Self;

    fn add(self, later: Duration) -> Self {
        Self(self.0.saturating_add(later))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neighbours_wrap_around() {
        let world = WorldSize::new(5).unwrap();
        assert_eq!(world.right_of(Rank(4), 1), Rank(0));
        assert_eq!(world.left_of(Rank(0), 1), Rank(4));
        assert_eq!(world.left_of(Rank(2), 5), Rank(2));
        assert_eq!(world.others(Rank(3)).collect::<Vec<_>>(), [4, 0, 1, 2].map(Rank));
    }

    #[test]
    fn child_ids_do_not_collide_in_practice() {
        let mut ids: Vec<_> = (0..100)
            .flat_map(|split| (0..100).map(move |color| CommId::WORLD.child(split, color)))
            .collect();
        let nested: Vec<_> = ids.iter().take(1000).map(|id| id.child(0, 0)).collect();
        ids.extend(nested);
        ids.push(CommId::WORLD);
        let [one, other] = [[Peer(1), Peer(2)], [Peer(1), Peer(12)]];
        for name in ["", "a", "b", "ab", "a\u{1}"] {
            for nth in 0..100 {
                ids.push(CommId::WORLD.subgroup(name, &one, nth));
                ids.push(CommId::WORLD.subgroup(name, &other, nth));
                ids.push(CommId::WORLD.subgroup(name, &one[..1], nth));
                ids.push(CommId(3).subgroup(name, &one, nth));
            }
        }
        let count = ids.len();
        ids.sort();
        ids.dedup();
        assert_eq!(ids.len(), count);
    }
}
