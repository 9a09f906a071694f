//! Who is in the group, as the driver sees it: it carries messages between members, says who is
//! lost, and opens the communicator of each new view.
//!
//! This file keeps three rules of [`farwire_proto::membership`]. Messages leave in the order in
//! which they were made: one that finds no room holds up all that come after it, whoever they are
//! for. A process that gives a peer up says so in memory that they share, or closes their
//! connection, so the peer never takes this process's death as completely proven. And a process
//! that has said goodbye says nothing more: it drops its [`Members`] then.

use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::sync::Arc;

use farwire_proto::membership::{Agreement, Event, Member, Message, Proof, Settings, View};
use farwire_proto::{CommId, Epoch, Header, Peer, Time, WorldSize};

use super::{Driver, Traffic};
use crate::link::{Arrival, Link, Liveness, Loss};

/// Why the group does not change.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum MembershipError {
    /// Too few members can be reached.
    #[error(
        "only {} of the group can be reached, and {} may have gone on without them; the side \
         with the majority goes on. End this process, or join that side",
        names(reached),
        names(missing)
    )]
    NoQuorum {
        /// The numbers of those that have answered, this process included.
        reached: Vec<Peer>,
        /// The numbers of those that have not, and are not known to be dead.
        missing: Vec<Peer>,
    },
    /// The group went on without this process.
    #[error(
        "the group went on without this process, which did not answer in time; it is now in epoch \
         {} with {members} members. End this process, or join again",
        epoch.0
    )]
    Evicted {
        /// The group's newest epoch.
        epoch: Epoch,
        /// How many members it has.
        members: usize,
    },
    /// A member did not answer, and is not lost either.
    #[error(
        "the group did not agree on its members within {after:?}; see what the other ranks wait \
         for, or set a longer deadline"
    )]
    TimedOut {
        /// The time allowed.
        after: std::time::Duration,
    },
    /// The group is only a part of the world.
    #[error("only the communicator of all ranks can shrink or admit; do that, and split it again")]
    Part,
    /// The group is too large to change.
    #[error("a group of more than 256 ranks cannot change; use fewer ranks, or restart the job")]
    TooLarge,
}

fn names(peers: &[Peer]) -> String {
    if peers.is_empty() {
        return "others".to_owned(); // members that are dead by now may have gone on with them
    }
    peers.iter().map(Peer::to_string).collect::<Vec<_>>().join(", ")
}

/// A process that waits to join.
struct Waiting {
    link: Box<dyn Link>,
    /// What it calls its host.
    host: String,
}

/// A number for a process's host, made from the host's name. A process whose host has no name
/// counts as alone on its host.
pub(crate) fn host_number(name: &str, peer: Peer) -> u64 {
    if name.is_empty() {
        return u64::from(peer.0);
    }
    // Above any peer's number; FNV-1a, since only equality counts.
    let step = |hash: u64, byte: u8| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
    name.bytes().fold(0xcbf2_9ce4_8422_2325, step) | 1 << 63
}

/// What a driver knows of the group.
pub(crate) struct Members {
    agreement: Agreement,
    /// Messages to hand to links, in this order.
    outbox: VecDeque<(Member, Vec<u8>)>,
    /// Links to processes that wait to join. They say nothing until they are members.
    lobby: BTreeMap<u64, Waiting>,
    /// Lost peers whose process may yet be seen to end.
    fading: Vec<(Peer, Arc<dyn Liveness>)>,
    trouble: Option<MembershipError>,
    /// With this many members, nobody more is let in.
    limit: usize,
}

impl fmt::Debug for Members {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Members").field("view", self.agreement.view()).finish_non_exhaustive()
    }
}

impl Members {
    /// The part of process `me` in the group.
    pub(crate) fn new(me: Peer, view: View, settings: Settings) -> Self {
        Self {
            agreement: Agreement::new(me, view, settings),
            outbox: VecDeque::new(),
            lobby: BTreeMap::new(),
            fading: Vec::new(),
            trouble: None,
            limit: usize::MAX,
        }
    }

    /// Lets nobody in while there are this many members.
    pub(crate) fn limited_to(self, limit: usize) -> Self {
        Self { limit, ..self }
    }

    /// The part of process `me` among those that a job starts with; `None` if they are too many to
    /// change.
    pub(crate) fn founding(me: Peer, world: WorldSize, settings: Settings) -> Option<Self> {
        View::founding(Epoch(0), world.get()).map(|view| Self::new(me, view, settings))
    }

    pub(super) fn is_idle(&self) -> bool {
        self.outbox.is_empty() && self.agreement.poll_timeout().is_none()
    }

    /// Whether a message to a peer waits for room.
    pub(super) fn owes(&self, peer: Peer) -> bool {
        self.outbox.iter().any(|(to, _)| to.peer == peer)
    }

    pub(super) fn poll_timeout(&self) -> Option<Time> {
        self.agreement.poll_timeout()
    }

    /// Says goodbye to those that wait to join: they cannot, by way of this process.
    pub(super) fn close_lobby(self) {
        for mut waiting in self.lobby.into_values() {
            waiting.link.close();
        }
    }
}

/// What is asked of the group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Change {
    Shrink,
    Admit,
}

impl Driver {
    /// The group as this process knows it.
    pub(crate) fn view(&self) -> Option<&View> {
        self.members.as_ref().map(|members| members.agreement.view())
    }

    /// Processes that wait to join and have a link to this one.
    pub(crate) fn waiting(&mut self) -> usize {
        self.look_into_the_lobby();
        self.members.as_ref().map_or(0, |members| members.lobby.len())
    }

    /// Whether the group has as many members as it may have.
    pub(crate) fn is_full(&self) -> bool {
        let is_full = |members: &Members| members.agreement.view().members().len() >= members.limit;
        self.members.as_ref().is_some_and(is_full)
    }

    /// A process that wants to join has a link to this one.
    pub(crate) fn add_waiting(&mut self, process: u64, host: String, link: Box<dyn Link>) {
        if let Some(members) = &mut self.members
            && members.agreement.view().find(process).is_none()
        {
            members.lobby.insert(process, Waiting { link, host });
            members.agreement.handle_ready(process);
        }
    }

    /// Begins as a member that has just been let in: opens the communicator of its first view, and
    /// handles what has already arrived.
    pub(crate) fn enter(&mut self, early: Vec<(Peer, Arrival)>) {
        let Some(view) = self.view().cloned() else { return };
        self.machine.close(CommId::WORLD);
        self.change(&view);
        for (peer, arrival) in early {
            self.arrived(peer, arrival);
        }
        self.settle();
    }

    /// Asks for the view after `epoch`, if there is none yet.
    pub(crate) fn ask_for(&mut self, change: Change, epoch: Epoch) -> Result<(), MembershipError> {
        self.look_into_the_lobby();
        let now = self.now();
        let members = self.members.as_mut().ok_or(MembershipError::TooLarge)?;
        if members.agreement.view().epoch() <= epoch && !members.agreement.is_evicted() {
            members.trouble = None;
            match change {
                Change::Shrink => members.agreement.shrink(now),
                Change::Admit => members.agreement.admit(now),
            }
        }
        self.settle_members();
        self.settle();
        Ok(())
    }

    /// The view after `epoch`, or why there is none; `None` as long as that is not settled.
    pub(crate) fn answer(&self, epoch: Epoch) -> Option<Result<View, MembershipError>> {
        let members = self.members.as_ref()?;
        let view = members.agreement.view();
        if view.epoch() > epoch && self.machine.engine().place(view.comm()).is_ok() {
            return Some(Ok(view.clone()));
        }
        members.trouble.clone().map(Err)
    }

    /// A message about members has come.
    pub(super) fn member_says(&mut self, from: Peer, payload: &[u8]) {
        let now = self.now();
        let Some(members) = &mut self.members else { return };
        match Message::decode(payload) {
            Ok(message) => members.agreement.handle_message(now, from, message),
            Err(error) => tracing::warn!(%from, %error, "ignoring a message about members"),
        }
        self.settle_members();
    }

    /// A peer is lost, or has said goodbye.
    pub(super) fn member_lost(
        &mut self,
        peer: Peer,
        loss: Loss,
        liveness: Option<Arc<dyn Liveness>>,
    ) {
        let now = self.now();
        let Some(members) = &mut self.members else { return };
        match loss {
            Loss::Complete => members.agreement.handle_dead(now, peer, Proof::Complete),
            Loss::Ended => members.agreement.handle_dead(now, peer, Proof::Ended),
            Loss::Unreachable => {
                members.agreement.handle_lost(now, peer);
                members.fading.extend(liveness.map(|liveness| (peer, liveness)));
            }
        }
        self.settle_members();
    }

    /// Notices lost peers that have ended, does what is due, and tries again to send what found no
    /// room.
    pub(super) fn turn_members(&mut self, now: Time) -> bool {
        let Some(members) = &mut self.members else { return false };
        if members.is_idle() && members.fading.is_empty() {
            return false;
        }
        let ended = members.fading.extract_if(.., |(_, liveness)| liveness.ended());
        let ended: Vec<_> = ended.map(|(peer, _)| peer).collect();
        for peer in &ended {
            members.agreement.handle_dead(now, *peer, Proof::Ended);
        }
        let due = members.agreement.poll_timeout().is_some_and(|due| due <= now);
        if due {
            members.agreement.handle_timeout(now);
        }
        let blocked = !members.outbox.is_empty();
        if due || blocked || !ended.is_empty() {
            return self.settle_members() || due;
        }
        false
    }

    /// Forgets processes that waited to join and are gone.
    fn look_into_the_lobby(&mut self) {
        let Some(members) = &mut self.members else { return };
        let lost = |link: &dyn Link| link.liveness().is_some_and(|it| it.loss().is_some());
        let is_gone = |_: &u64, waiting: &mut Waiting| lost(&*waiting.link);
        let gone = members.lobby.extract_if(.., is_gone).collect::<Vec<_>>();
        for (process, mut waiting) in gone {
            members.agreement.handle_gone(process);
            waiting.link.give_up();
        }
    }

    /// Hands messages to links, in order, and then does what was agreed on. `true` if anything
    /// happened.
    pub(super) fn settle_members(&mut self) -> bool {
        let mut moved = false;
        loop {
            let Some(members) = &mut self.members else { return moved };
            while let Some(outgoing) = members.agreement.poll_transmit() {
                members.outbox.push_back((outgoing.to, outgoing.message.encode()));
            }
            while let Some((to, message)) = members.outbox.front() {
                // A peer that has said goodbye reads no more, so its link may never have room
                // again.
                let listens = !self.closed.contains(&to.peer);
                let link = self.links.get_mut(to.peer.index()).and_then(Option::as_mut);
                let link = link.filter(|_| listens);
                let waiting = members.lobby.get_mut(&to.process).map(|there| &mut there.link);
                let link = link.or(waiting);
                if let Some(link) = link {
                    let header = Header::of_members(message.len());
                    if !link.send(None, &header, message, false) {
                        return moved; // tried again on the next turn
                    }
                    link.ring();
                }
                members.outbox.pop_front();
                moved = true;
            }
            match members.agreement.poll_event() {
                None => return moved,
                Some(Event::Changed(view)) => self.change(&view),
                Some(Event::Evicted(view)) => {
                    let (epoch, members) = (view.epoch(), view.members().len());
                    self.trouble(MembershipError::Evicted { epoch, members });
                }
                Some(Event::NoQuorum { reached, missing }) => {
                    self.trouble(MembershipError::NoQuorum { reached, missing });
                }
            }
            moved = true;
        }
    }

    fn trouble(&mut self, trouble: MembershipError) {
        tracing::warn!(%trouble, "the group cannot go on here");
        if let Some(members) = &mut self.members {
            members.trouble = Some(trouble);
        }
    }

    /// Goes on to a new view: new members get their links, and the previous communicator is
    /// replaced.
    fn change(&mut self, view: &View) {
        let now = self.now();
        let Some(members) = &mut self.members else { return };
        members.trouble = None;
        let world = view.next_peer();
        self.links.resize_with(world as usize, || None);
        self.sent.resize(world as usize, Traffic::default());
        self.received.resize(world as usize, Traffic::default());
        if let Some(world) = WorldSize::new(world) {
            self.machine.grow(world);
        }
        let me = self.machine.engine().me();
        for Member { peer, process } in view.members() {
            if *peer == me || self.links[peer.index()].is_some() {
                continue;
            }
            match members.lobby.remove(process) {
                Some(Waiting { mut link, host }) => {
                    link.set_peer(*peer);
                    if let Some(team) = self.team {
                        link.set_team(team);
                    }
                    self.machine.set_host(*peer, host_number(&host, *peer));
                    if link.is_near() {
                        self.machine.set_neighbour(*peer);
                    }
                    self.has_network |= link.crosses_network();
                    self.links[peer.index()] = Some(link);
                }
                None => {
                    members.agreement.handle_lost(now, *peer);
                    self.machine.handle_peer_lost(*peer);
                }
            }
        }
        let epoch = view.epoch().0;
        tracing::info!(epoch, members = view.members().len(), "the group has changed");
        self.machine.retire_all();
        if let Some(older) = epoch.checked_sub(2) {
            self.machine.close(CommId::of_epoch(Epoch(older)));
        }
        let peers: Vec<_> = view.peers().collect();
        if let Err(error) = self.machine.open(view.comm(), &peers) {
            tracing::error!(%error, "could not open the communicator of a new epoch");
        }
        self.settle();
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use farwire_proto::Config;

    use super::*;

    /// Rank 2 says goodbye, but its process goes on for a while. Rank 1, which needed it, answers
    /// with a goodbye. Rank 0 asks who is left before it has heard of any of it.
    #[test]
    fn an_answer_to_a_goodbye_does_not_pass_for_a_death() {
        let mut ranks: Vec<_> = crate::local::drivers(&[0; 3], Config::default())
            .expect("memory to share")
            .into_iter()
            .map(|(driver, _bell)| driver)
            .collect();
        ranks[2].close();
        ranks[1].turn(Instant::now());
        ranks[1].lose(Peer(2), true);
        ranks[2].turn(Instant::now());
        ranks[0].ask_for(Change::Shrink, Epoch(0)).expect("a group that can change");
        // Rank 1 comes last: the others could do without it.
        for _ in 0..10 {
            for rank in [2, 0, 1] {
                ranks[rank].turn(Instant::now());
            }
        }
        for rank in &ranks[..2] {
            let view = rank.view().expect("it has not left");
            assert_eq!((view.epoch(), view.members().len()), (Epoch(1), 2));
        }
    }
}
