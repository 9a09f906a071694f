//! Collectives through a codec: rounds of parcels, made and understood on the node's coding thread.
//!
//! Coding takes time, so it is done without the driver's lock. The driver keeps an operation's [`CodedCollective`] between rounds; when parcels have come, it tells the coding thread, which takes the
//! exchange, works, supplies what it made, and gives it back. For a short vector the telling would take longer than the work: whoever turned the driver does that itself, with the lock free.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::mpsc::Sender;

use bytes::Bytes;
use farwire_codec::collective::{CodedCollective, Nonsense};
use farwire_proto::{
    CommId, DType, Fingerprint, OpError, OpId, OpSeq, Options, Parcels, Peer, Rank, WorldSize,
};

use super::{Driver, Job, Work};
use crate::error::Error;
use crate::memory::Buffer;
use crate::pending::Completion;

/// A collective through a codec.
#[derive(Debug)]
pub(super) struct CodedJob {
    pub(super) parcels: Parcels,
    comm: CommId,
    seq: OpSeq,
    call: Fingerprint,
    me: Rank,
    world: WorldSize,
    /// Whether a thread of its own is worth the way there.
    long: bool,
    /// Absent while it is being worked on.
    pub(super) exchange: Option<Box<CodedCollective>>,
    /// Rounds that have come and not been looked at.
    pub(super) came: VecDeque<u32>,
    /// How its frames fared, once they have.
    pub(super) ended: Option<Ended>,
}

/// What became of an operation, and who it waited for if that was bad.
pub(super) type Ended = Result<(), (Box<OpError>, Vec<Peer>)>;

/// What is to be done for an operation.
#[derive(Debug)]
pub(crate) enum Coding {
    /// Look at these rounds of parcels, make what can be made, and give it back. Who is alone in the world hears of no rounds, and has them as soon as they are made.
    Go { exchange: Box<CodedCollective>, came: Vec<(u32, Vec<Vec<u8>>)>, alone: bool },
    /// All has come: finish it.
    Finish { exchange: Box<CodedCollective>, completion: Arc<Completion> },
}

impl Driver {
    /// Starts a collective through a codec. The coding thread does the rest, or who calls and waits if it is not `long`.
    pub(crate) fn submit_coded(
        &mut self,
        comm: CommId,
        exchange: CodedCollective,
        long: bool,
        options: &Options,
        completion: Arc<Completion>,
    ) -> Result<(), Error> {
        // A segment in elements says nothing of parcels.
        let options = Options { segment: None, algorithm: None, ..*options };
        let plan = match self.engine.plan(comm, exchange.call(), &options) {
            Ok(plan) => plan,
            Err(error) => return Err(Error::from(error).with_input(exchange.abandon())),
        };
        let job = CodedJob {
            parcels: Parcels::default(),
            comm,
            seq: self.engine.next_seq(&plan).expect("it was planned on an open communicator"),
            call: plan.fingerprint(),
            me: plan.me(),
            world: plan.world(),
            long,
            exchange: Some(Box::new(exchange)),
            came: VecDeque::new(),
            ended: None,
        };
        let op = self.start(plan, Work::Coded(job), completion)?;
        self.wants_coding(op);
        self.settle();
        Ok(())
    }

    pub(crate) fn has_coder(&self) -> bool {
        self.coder.is_some()
    }

    /// From now on, this thread is told of operations that want coding.
    pub(crate) fn set_coder(&mut self, coder: Sender<OpId>) {
        self.coder = Some(coder);
    }

    pub(super) fn wants_coding(&mut self, op: OpId) {
        match (self.jobs.get(&op), &self.coder) {
            (Some(Job { work: Work::Coded(CodedJob { long: false, .. }), .. }), _) => {
                self.short.push_back(op);
            }
            (_, Some(coder)) => {
                // It lives as long as the node.
                self.told += usize::from(coder.send(op).is_ok());
            }
            (_, None) => {}
        }
    }

    /// The coding thread has done what it was told once.
    pub(crate) fn coded(&mut self) {
        self.told -= 1;
    }

    /// Whether the coding thread has anything to do.
    pub(crate) fn is_coding(&self) -> bool {
        self.told > 0
    }

    /// A short operation that wants coding. Whoever turns the driver asks, and does it.
    pub(crate) fn take_short(&mut self) -> Option<OpId> {
        self.short.pop_front()
    }

    /// What is to be done for an operation, if anything is.
    pub(crate) fn take_coding(&mut self, op: OpId) -> Option<Coding> {
        let Job { work: Work::Coded(job), .. } = self.jobs.get_mut(&op)? else { return None };
        if matches!(job.ended, Some(Err(_))) {
            self.fail_coded(op);
            return None;
        }
        let exchange = job.exchange.take()?;
        if job.ended.is_some() && exchange.is_finished() {
            let Job { completion, ticket, span, .. } = self.jobs.remove(&op)?;
            self.observer.ended(ticket, &span, &Ok(()));
            return Some(Coding::Finish { exchange, completion });
        }
        if job.came.is_empty() && exchange.made() > 0 {
            job.exchange = Some(exchange);
            return None;
        }
        let CodedJob { parcels, world, came, .. } = job;
        let mut parcels_of = |round| world.ranks().map(|from| parcels.take(from, round)).collect();
        let came = came.drain(..).map(|round| (round, parcels_of(round))).collect();
        Some(Coding::Go { exchange, came, alone: world.get() == 1 })
    }

    /// An operation failed on its way. If somebody has the exchange, they will ask again.
    pub(super) fn fail_coded(&mut self, op: OpId) {
        let there = |job: &mut Job| matches!(&job.work, Work::Coded(job) if job.exchange.is_some());
        if !self.jobs.get_mut(&op).is_some_and(there) {
            return;
        }
        if let Some(Job { work: Work::Coded(job), completion, ticket, span }) = self.jobs.remove(&op)
            && let Some(Err((error, waited_for))) = job.ended
        {
            let input = job.exchange.map(|exchange| Box::new(exchange.abandon().into()));
            self.observer.ended(ticket, &span, &Err((error.clone(), waited_for)));
            self.afterwards.wake.extend(completion.complete(Err(Error::Failed {
                error,
                members: None,
                input,
            })));
        }
    }

    /// A round of parcels was made.
    pub(crate) fn supply(&mut self, op: OpId, round: u32, made: &[Bytes]) {
        let Some(Job { work: Work::Coded(job), .. }) = self.jobs.get_mut(&op) else { return };
        for to in job.world.others(job.me) {
            let parcel = &made[to.index()];
            job.parcels.put(to, round, parcel.clone());
            self.engine.supply(op, to, parcel.len());
        }
        self.settle();
    }

    /// Whoever coded is done for now.
    pub(crate) fn give_coding_back(
        &mut self,
        op: OpId,
        exchange: Box<CodedCollective>,
        nonsense: Option<Nonsense>,
    ) {
        let Some(Job { work: Work::Coded(job), .. }) = self.jobs.get_mut(&op) else { return };
        job.exchange = Some(exchange);
        let (comm, seq, operation) = (job.comm, job.seq, job.call);
        if let Some(nonsense) = nonsense {
            tracing::error!(%nonsense, "giving a communicator up");
            let fault = self.engine.handle_nonsense(comm, nonsense.from);
            self.settle();
            // Its frames may all have moved; it has failed all the same.
            let here = self.engine.me();
            if let (Some(Job { work: Work::Coded(job), .. }), Some(fault)) = (self.jobs.get_mut(&op), fault) {
                let error = OpError { operation, comm, seq, fault, reporter: here, here };
                job.ended = Some(Err((Box::new(error), vec![fault.peer()])));
            }
        }
        self.wants_coding(op); // something may have come meanwhile
    }

    /// A buffer for results.
    pub(crate) fn take_floats(&mut self, len: usize) -> Vec<f32> {
        self.pool.take(DType::F32, len).into_vec().expect("the pool gives what it is asked for")
    }

    /// Keeps a buffer for the next operation.
    pub(crate) fn recycle(&mut self, buffer: Buffer) {
        self.pool.give(buffer);
    }
}
