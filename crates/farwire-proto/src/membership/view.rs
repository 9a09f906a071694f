//! Who is in the group: the list of members that an epoch stands for.

use crate::ids::{CommId, Epoch, Peer, Rank};

/// The most members of a group that can change: a message must fit in one frame.
pub const MAX_MEMBERS: usize = 256;

/// One process of the group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Member {
    /// Its number, which no other process of the job ever gets. A process that is restarted is a
    /// new one: it has forgotten what it promised.
    pub peer: Peer,
    /// The name it gave itself when it came, before it had a number.
    pub process: u64,
}

/// The members of one epoch. Ranks are places in the list, so they have no gaps.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct View {
    epoch: Epoch,
    members: Vec<Member>,
    /// The number that the next process to join will get.
    next_peer: u32,
}

impl View {
    /// The processes that a job starts with, numbered by their ranks; `None` if there are none of
    /// them or too many.
    pub fn founding(epoch: Epoch, world: u32) -> Option<Self> {
        let member = |rank| Member { peer: Peer(rank), process: rank.into() };
        Self::new(epoch, (0..world.min(MAX_MEMBERS as u32 + 1)).map(member).collect(), world)
    }

    /// A list of members in the order of their numbers; `None` if it cannot be a view.
    pub fn new(epoch: Epoch, members: Vec<Member>, next_peer: u32) -> Option<Self> {
        let ascending = members.windows(2).all(|pair| pair[0].peer < pair[1].peer);
        let last = members.last()?.peer.0;
        let fits = members.len() <= MAX_MEMBERS && last < next_peer;
        (ascending && fits).then_some(Self { epoch, members, next_peer })
    }

    /// Its number: one more than that of the view before it.
    pub fn epoch(&self) -> Epoch {
        self.epoch
    }

    /// The members, by rank.
    pub fn members(&self) -> &[Member] {
        &self.members
    }

    /// The numbers of the members, by rank.
    pub fn peers(&self) -> impl Iterator<Item = Peer> + '_ {
        self.members.iter().map(|member| member.peer)
    }

    /// The number that the next process to join will get.
    pub fn next_peer(&self) -> u32 {
        self.next_peer
    }

    /// Whether a process with this number is a member.
    pub fn contains(&self, peer: Peer) -> bool {
        self.members.binary_search_by_key(&peer, |member| member.peer).is_ok()
    }

    /// The member that gave itself this name.
    pub fn find(&self, process: u64) -> Option<Member> {
        self.members.iter().copied().find(|member| member.process == process)
    }

    /// The rank of a process.
    pub fn rank_of(&self, peer: Peer) -> Option<Rank> {
        let place = self.members.binary_search_by_key(&peer, |member| member.peer).ok()?;
        Some(Rank(place as u32))
    }

    /// The communicator of these members.
    pub fn comm(&self) -> CommId {
        CommId::of_epoch(self.epoch)
    }

    /// The view after this one: some of the members, and perhaps a new one. `None` if nobody is
    /// left, or there is no room or no number for the new one.
    pub(super) fn next(&self, stay: impl Fn(Peer) -> bool, joiner: Option<u64>) -> Option<Self> {
        let mut members: Vec<_> =
            self.members.iter().copied().filter(|member| stay(member.peer)).collect();
        let mut next_peer = self.next_peer;
        if let Some(process) = joiner {
            members.push(Member { peer: Peer(next_peer), process });
            next_peer = next_peer.checked_add(1)?;
        }
        Self::new(Epoch(self.epoch.0.checked_add(1)?), members, next_peer)
    }
}
