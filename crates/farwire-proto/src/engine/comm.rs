//! Communicators: who is in them, how their operations are numbered, opening and closing.

use std::sync::Arc;

use rustc_hash::FxHashMap as HashMap;

use super::ahead::Channel;
use super::inbox::Inbox;
use super::op::Op;
use super::{Engine, OpenError};
use crate::collective::message::End;
use crate::fault::Fault;
use crate::header::FrameKind;
use crate::ids::{CommId, OpSeq, Peer, Rank, Tag, Time, WorldSize};
use crate::partition::digest;
use crate::placement::Placement;
use crate::plan::Plan;

#[derive(Debug)]
pub(super) struct Comm {
    pub(super) me: Rank,
    pub(super) world: WorldSize,
    pub(super) members: Arc<[Peer]>,
    /// A digest by which members find out that their lists differ; zero for the world.
    pub(super) members_digest: u32,
    /// Which host each is on.
    pub(super) placement: Placement,
    pub(super) ranks: HashMap<Peer, Rank>,
    pub(super) next_collective: u64,
    pub(super) next_sent: HashMap<(Peer, Tag), u64>,
    pub(super) failed: Option<(Fault, Peer)>,
    /// No more calls will be made on it here.
    pub(super) closed: bool,
}

impl Comm {
    /// The number that a plan gets when it is submitted.
    pub(super) fn next_seq(&self, plan: &Plan, inboxes: &HashMap<(Peer, Channel), Inbox>) -> OpSeq {
        match plan.partner() {
            None => OpSeq::Collective(self.next_collective),
            Some(partner) => {
                let (peer, tag) = (self.members[partner.rank.index()], partner.tag);
                let number = match partner.end {
                    End::Sender => self.next_sent.get(&(peer, tag)).copied().unwrap_or(0),
                    // If the receives before it get theirs.
                    End::Receiver => {
                        let channel = Channel { comm: plan.comm(), tag: Some(tag) };
                        inboxes.get(&(peer, channel)).map_or(0, Inbox::called)
                    }
                };
                OpSeq::Message(partner.tag, number)
            }
        }
    }

    /// A plan has got its number.
    pub(super) fn count(&mut self, plan: &Plan) {
        match plan.partner() {
            None => self.next_collective += 1,
            Some(partner) if partner.end == End::Sender => {
                *self
                    .next_sent
                    .entry((self.members[partner.rank.index()], partner.tag))
                    .or_insert(0) += 1;
            }
            Some(_) => {} // counted when a message is matched with it
        }
    }
}

impl Engine {
    /// The members of an open communicator, by rank.
    pub(crate) fn members(&self, comm: CommId) -> Option<Arc<[Peer]>> {
        self.comms.get(&comm).map(|comm| comm.members.clone())
    }

    /// Opens a communicator of some of the processes. Their ranks in it are their places in
    /// `members`, which every member must give in the same order.
    pub fn open(&mut self, id: CommId, members: &[Peer]) -> Result<(), OpenError> {
        if self.comms.contains_key(&id) || self.closed.contains(&id) {
            return Err(OpenError::Taken(id));
        }
        let mut ranks = HashMap::with_capacity_and_hasher(members.len(), Default::default());
        for (peer, rank) in members.iter().zip((0..).map(Rank)) {
            if ranks.insert(*peer, rank).is_some() {
                return Err(OpenError::Twice(*peer));
            }
        }
        let me = *ranks.get(&self.me).ok_or(OpenError::NotAMember)?;
        let world = WorldSize::new(members.len() as u32).ok_or(OpenError::NotAMember)?;
        let hosts: Vec<_> = members.iter().map(|peer| self.hosts.get(peer.index())).collect();
        let comm = Comm {
            me,
            world,
            members: members.into(),
            members_digest: if id == CommId::WORLD {
                0
            } else {
                digest(members.iter().map(|peer| peer.0.into()))
            },
            placement: Placement::new(&hosts).ok_or(OpenError::NotAMember)?,
            ranks,
            next_collective: 0,
            next_sent: HashMap::default(),
            failed: None,
            closed: false,
        };
        self.comms.insert(id, comm);
        let lost = members.iter().find(|peer| self.lost.contains(peer));
        let news = members.iter().find_map(|reporter| {
            let (_, fault) =
                self.early_faults.get(reporter)?.iter().find(|(comm, _)| *comm == id)?;
            Some((*fault, *reporter))
        });
        if let Some((fault, reporter)) = news {
            self.fail_comm(id, fault, reporter);
        } else if let Some(peer) = lost {
            self.fail_comm(id, Fault::PeerLost(*peer), self.me);
        }
        Ok(())
    }

    /// Lets go of a communicator on which no more calls will be made; operations in flight go on,
    /// except those that may take for ever. What peers still send on it is dropped.
    pub fn close(&mut self, id: CommId) {
        if let Some(comm) = self.comms.get_mut(&id) {
            comm.closed = true;
            // Nobody waits for operations that may take for ever.
            let endless = |op: &&Op| op.plan.comm() == id && op.due == Time::MAX;
            let endless: Vec<_> = self.ops.values().filter(endless).map(|op| op.id).collect();
            for op in endless {
                self.fail_op(op, Fault::PeerLost(self.me), self.me);
            }
            self.forget_if_closed(id);
        }
    }

    pub(super) fn forget_if_closed(&mut self, id: CommId) {
        let closed = self.comms.get(&id).is_some_and(|comm| comm.closed);
        if closed && !self.ops.values().any(|op| op.plan.comm() == id) {
            let comm = self.comms.remove(&id);
            self.closed.insert(id);
            self.inboxes.retain(|(_, channel), _| channel.comm != id);
            self.resume_early(id);
            // Peers that still send on it must not wait for calls that nobody will make.
            for peer in comm.into_iter().flat_map(|comm| comm.members.to_vec()) {
                for (channel, number) in self.ahead[peer.index()].take_asks(id) {
                    self.notify(peer, FrameKind::Called, channel, number);
                }
            }
        }
    }
}
