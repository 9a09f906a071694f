//! Operations in parcels: messages, and rounds that a codec makes.
//!
//! Coding takes time, so it is done outside the machine. The machine keeps an operation's
//! [`Rounds`] while there is nothing to code. When there is, it says so
//! ([`MachineEvent::WantsCoding`]); somebody then takes the rounds, does the work, supplies what
//! was made and gives the rounds back. Frames arrive meanwhile, and the operation may fail.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::error::Error;
use std::fmt;
use std::sync::Arc;

use bytes::Bytes;

use super::{Buffers, Failure, Input, Machine, MachineEvent, Refusal, Refused};
use crate::collective::message::End;
use crate::fault::{Fault, OpError};
use crate::fingerprint::Fingerprint;
use crate::ids::{CommId, OpId, OpSeq, Peer, Rank, Time, WorldSize};
use crate::parcels::{ParcelPart, Parcels};
use crate::plan::Plan;

/// One rank's part in a collective that travels in rounds of parcels: each round, every rank makes
/// one for every other and gets one from each.
pub trait Rounds: fmt::Debug {
    /// The parcels of the next round, one for each rank in order (this rank's own is ignored), if
    /// they can be made with what has come.
    fn next_parcels(&mut self) -> Option<Vec<Bytes>>;
    /// How many rounds parcels were made for.
    fn made(&self) -> u32;
    /// A round of parcels has come, one from each rank in order; this rank's own is empty. This
    /// rank's parcels of that round were made before.
    fn came(&mut self, round: u32, parcels: &[Vec<u8>]) -> Result<(), Nonsense>;
    /// Whether all rounds were made, and have come.
    fn is_finished(&self) -> bool;
}

/// For a machine without codecs.
impl Rounds for Infallible {
    fn next_parcels(&mut self) -> Option<Vec<Bytes>> {
        match *self {}
    }

    fn made(&self) -> u32 {
        match *self {}
    }

    fn came(&mut self, _: u32, _: &[Vec<u8>]) -> Result<(), Nonsense> {
        match *self {}
    }

    fn is_finished(&self) -> bool {
        match *self {}
    }
}

/// A peer's parcel is not what any encoder makes: a bug there, or a hostile peer.
#[derive(Debug, thiserror::Error)]
#[error("rank {from}'s parcel in round {round} makes no sense: {why}")]
pub struct Nonsense {
    /// The rank that sent it.
    pub from: Rank,
    /// The round it belongs to.
    pub round: u32,
    /// Why it makes no sense.
    pub why: Box<dyn Error + Send + Sync>,
}

/// What a codec is to do for an operation.
#[derive(Debug)]
pub enum Coding<R, T> {
    /// Make parcels and look at those that came, with [`run`](CodingWork::run); then
    /// [give it back](Machine::give_back).
    Work(CodingWork<R>),
    /// All has come, and the operation is over: finish it.
    Finish {
        /// The rounds, finished.
        rounds: Box<R>,
        /// What it was submitted with.
        tag: T,
    },
}

/// Coding to be done.
#[derive(Debug)]
pub struct CodingWork<R> {
    /// What does it.
    pub rounds: Box<R>,
    /// Rounds of parcels that have come, in order.
    came: Vec<(u32, Vec<Vec<u8>>)>,
    /// In a world of one rank no parcels come, so each round has come as soon as it is made.
    alone: bool,
}

impl<R: Rounds> CodingWork<R> {
    /// Makes all parcels that can be made, and looks at all that have come. Each round that was
    /// made is to be [supplied](Machine::supply) at once.
    pub fn run(&mut self, mut supply: impl FnMut(u32, Vec<Bytes>)) -> Result<(), Nonsense> {
        // What others sent may be here before this rank has made its own part, which comes first.
        self.make(&mut supply)?;
        for (round, parcels) in std::mem::take(&mut self.came) {
            self.rounds.came(round, &parcels)?;
            self.make(&mut supply)?;
        }
        Ok(())
    }

    fn make(&mut self, supply: &mut impl FnMut(u32, Vec<Bytes>)) -> Result<(), Nonsense> {
        while let Some(made) = self.rounds.next_parcels() {
            let round = self.rounds.made() - 1;
            if self.alone {
                self.rounds.came(round, &[Vec::new()])?;
            } else {
                supply(round, made);
            }
        }
        Ok(())
    }
}

/// An operation in parcels.
#[derive(Debug)]
pub(super) struct Parceled<R, T> {
    parcels: Parcels,
    role: Role<R>,
    me: Rank,
    world: WorldSize,
    pub(super) tag: T,
}

#[derive(Debug)]
enum Role<R> {
    /// Sends one parcel.
    Sender,
    /// Receives one, from the rank named here.
    Receiver(Rank),
    /// Rounds that a codec makes.
    Coded(Coded<R>),
    /// The same, but only the lengths of the rounds still to be supplied.
    Lengths(VecDeque<Vec<usize>>),
}

#[derive(Debug)]
struct Coded<R> {
    /// Absent while somebody codes.
    rounds: Option<Box<R>>,
    /// Rounds that have come and not been looked at.
    came: VecDeque<u32>,
    /// How its frames ended, once they have.
    ended: Option<Result<(), Failure>>,
    /// What an error would say of it.
    comm: CommId,
    seq: OpSeq,
    call: Fingerprint,
    members: Arc<[Peer]>,
}

impl<R, T> Parceled<R, T> {
    /// Hands what a frame carries to `carry`, which says whether it went.
    pub(super) fn send(
        &mut self,
        part: &ParcelPart,
        carry: impl FnOnce(&[u8], &mut T) -> bool,
    ) -> bool {
        if let Role::Lengths(_) = self.role {
            return carry(&[], &mut self.tag);
        }
        let went = carry(self.parcels.payload(part), &mut self.tag);
        if went {
            self.parcels.sent(part);
        }
        went
    }

    /// Appends what has come to its parcel.
    pub(super) fn collect(&mut self, part: &ParcelPart, payload: &[u8]) {
        if !matches!(self.role, Role::Lengths(_)) {
            self.parcels.collect(part, payload);
        }
    }

    fn coded(&mut self) -> Option<&mut Coded<R>> {
        match &mut self.role {
            Role::Coded(coded) => Some(coded),
            _ => None,
        }
    }
}

impl<M: Buffers, R: Rounds, T> Machine<M, R, T> {
    pub(super) fn submit_parcels(
        &mut self,
        now: Time,
        plan: Plan,
        input: Input<M::Buffer, R>,
        tag: impl FnOnce(OpId, OpSeq) -> T,
    ) -> Result<OpId, Refused<M::Buffer, R>> {
        let (me, world, partner) = (plan.me(), plan.world(), plan.partner());
        let (comm, call) = (plan.comm(), plan.fingerprint());
        let members = self.engine.members(comm).expect("a plan is made on an open communicator");
        let seq = self.next_seq(&plan);
        let op = match self.engine.submit(now, plan) {
            Ok(op) => op,
            Err(error) => {
                return Err(Refused { why: Refusal::Failed(error), input: given_back(input) });
            }
        };
        let mut parcels = Parcels::default();
        let role = match (input, partner) {
            (Input::Parcel(parcel), Some(partner)) if partner.end == End::Sender => {
                assert!(
                    self.engine.supply(op, partner.rank, parcel.len()),
                    "a parcel is as long as its call says"
                );
                parcels.put(partner.rank, 0, parcel);
                Role::Sender
            }
            (Input::Nothing, Some(partner)) if partner.end == End::Receiver => {
                Role::Receiver(partner.rank)
            }
            (Input::Rounds(rounds), None) => {
                let (rounds, came, ended) = (Some(rounds), VecDeque::new(), None);
                Role::Coded(Coded { rounds, came, ended, comm, seq, call, members })
            }
            (Input::Lengths(rounds), None) => Role::Lengths(rounds),
            _ => panic!(
                "a sender of a parcel has it, a receiver has nothing, a coded call has rounds"
            ),
        };
        if let Role::Coded(_) | Role::Lengths(_) = role {
            self.events.push_back(MachineEvent::WantsCoding(op));
        }
        self.parceled.insert(op, Parceled { parcels, role, me, world, tag: tag(op, seq) });
        Ok(op)
    }

    /// A round of parcels has come.
    pub(super) fn round_came(&mut self, op: OpId, round: u32) {
        match self.parceled.get_mut(&op).map(|job| &mut job.role) {
            Some(Role::Coded(coded)) => coded.came.push_back(round),
            Some(Role::Lengths(_)) => {}
            Some(Role::Sender | Role::Receiver(_)) | None => return,
        }
        self.events.push_back(MachineEvent::WantsCoding(op));
    }

    /// All frames of an operation have moved, or it has failed.
    pub(super) fn ended_parceled(&mut self, op: OpId, failure: Option<Failure>) {
        let Some(job) = self.parceled.get_mut(&op) else { return };
        if let Role::Coded(coded) = &mut job.role {
            coded.ended = Some(failure.map_or(Ok(()), Err));
            return self.go_on(op);
        }
        let Some(Parceled { mut parcels, role, tag, .. }) = self.parceled.remove(&op) else {
            return;
        };
        let end = match (failure, role) {
            (Some(failure), _) => Err((failure, Input::Nothing)),
            (None, Role::Receiver(from)) => Ok(parcels.take(from, 0).into()),
            (None, _) => Ok(Vec::new().into()),
        };
        self.events.push_back(MachineEvent::Ended { tag, end });
    }

    /// Ends a coded operation that has failed, unless somebody has its rounds and will give them
    /// back. If it has not failed, there may be something to code.
    fn go_on(&mut self, op: OpId) {
        let Some(coded) = self.parceled.get_mut(&op).and_then(Parceled::coded) else { return };
        match (&coded.ended, coded.rounds.take()) {
            (Some(Err(failure)), Some(rounds)) => {
                let end = Err((failure.clone(), Input::Rounds(rounds)));
                if let Some(Parceled { tag, .. }) = self.parceled.remove(&op) {
                    self.events.push_back(MachineEvent::Ended { tag, end });
                }
            }
            (Some(Err(_)), None) => {}
            (_, rounds) => {
                coded.rounds = rounds;
                self.events.push_back(MachineEvent::WantsCoding(op));
            }
        }
    }

    /// What a codec is to do for an operation, if anything. For one with only lengths, the next
    /// round is supplied at once.
    pub fn take_coding(&mut self, op: OpId) -> Option<Coding<R, T>> {
        let job = self.parceled.get_mut(&op)?;
        let coded = match &mut job.role {
            Role::Coded(coded) => coded,
            Role::Lengths(rounds) => {
                let lengths = rounds.pop_front()?;
                for to in job.world.others(job.me) {
                    let supplied = self.engine.supply(op, to, lengths[to.index()]);
                    assert!(supplied, "lengths keep to the call's limits");
                }
                return None;
            }
            Role::Sender | Role::Receiver(_) => return None,
        };
        let rounds = coded.rounds.take()?;
        if coded.ended.is_some() && rounds.is_finished() {
            let Parceled { tag, .. } = self.parceled.remove(&op)?;
            return Some(Coding::Finish { rounds, tag });
        }
        if coded.came.is_empty() && rounds.made() > 0 {
            coded.rounds = Some(rounds);
            return None;
        }
        let (parcels, world) = (&mut job.parcels, job.world);
        let mut parcels_of = |round| world.ranks().map(|from| parcels.take(from, round)).collect();
        let came = coded.came.drain(..).map(|round| (round, parcels_of(round))).collect();
        Some(Coding::Work(CodingWork { rounds, came, alone: world.get() == 1 }))
    }

    /// A round of parcels was made, one for each rank in order.
    pub fn supply(&mut self, op: OpId, round: u32, made: Vec<Bytes>) {
        let Some(job) = self.parceled.get_mut(&op) else { return };
        for (to, parcel) in job.world.ranks().zip(made).filter(|(to, _)| *to != job.me) {
            let len = parcel.len();
            job.parcels.put(to, round, parcel);
            // The engine refuses it if the operation has failed meanwhile.
            self.engine.supply(op, to, len);
        }
    }

    /// Takes rounds back: the coding is done for now, or has found nonsense.
    pub fn give_back(&mut self, op: OpId, rounds: Box<R>, nonsense: Option<Nonsense>) {
        let Some(coded) = self.parceled.get_mut(&op).and_then(Parceled::coded) else { return };
        coded.rounds = Some(rounds);
        if let Some(from) =
            nonsense.and_then(|nonsense| coded.members.get(nonsense.from.index())).copied()
            && !matches!(coded.ended, Some(Err(_)))
        {
            // Its frames may all have moved; even so, it has failed.
            let (fault, here) = (Fault::BadFrame(from), self.engine.me());
            let Coded { comm, seq, call: operation, .. } = *coded;
            let error = OpError { operation, comm, seq, fault, reporter: here, here };
            coded.ended = Some(Err(Failure { error: Box::new(error), waited_for: vec![from] }));
            self.engine.handle_nonsense(comm, from);
        }
        self.go_on(op);
    }
}

/// What a caller gets back of its input.
fn given_back<B, R>(input: Input<B, R>) -> Input<B, R> {
    match input {
        Input::Buffer(_) | Input::Rounds(_) => input,
        Input::Parcel(_) | Input::Nothing | Input::Lengths(_) => Input::Nothing,
    }
}
