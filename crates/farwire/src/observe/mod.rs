//! What happens, for people to see: a flight recorder that is always on, a trace, metrics, spans.

pub mod flight;
mod folder;
pub(crate) mod tally;
mod trace;

use std::path::Path;

use farwire_proto::{CommId, Epoch, Failure, Fault, Fingerprint, OpId, OpSeq, Peer, WorldSize};

use crate::error::Error;
use flight::{Recorder, Records, Ticket};
use tally::Tally;
use trace::Trace;

/// Everything that watches one driver.
#[derive(Debug)]
pub(crate) struct Observer {
    me: Peer,
    epoch: Epoch,
    pub(crate) recorder: Recorder,
    pub(crate) tally: Tally,
    trace: Option<Trace>,
    /// Why a communicator has failed, if nobody has been told yet.
    failure: Option<Fault>,
}

impl Observer {
    /// A recorder and no more, which writes no files.
    pub(crate) fn quiet(me: Peer, world: WorldSize, epoch: Epoch) -> Self {
        let recorder = Recorder::new(me, world, epoch, Records::Nowhere);
        Self { me, epoch, recorder, tally: Tally::default(), trace: None, failure: None }
    }

    /// A recorder that leaves its records where `records` says, and a trace if one is asked for.
    pub(crate) fn new(
        me: Peer,
        world: WorldSize,
        epoch: Epoch,
        trace: Option<&Path>,
        records: Records,
    ) -> Result<Self, Error> {
        let trace = trace.map(|path| Trace::create(path, me)).transpose();
        let trace = trace.map_err(|error| Error::System {
            what: "could not write the trace (FARWIRE_TRACE or Builder::trace)",
            error,
        })?;
        records.check();
        let recorder = Recorder::new(me, world, epoch, records);
        Ok(Self { recorder, trace, ..Self::quiet(me, world, epoch) })
    }

    pub(crate) fn began(
        &mut self,
        op: OpId,
        comm: CommId,
        seq: OpSeq,
        call: Fingerprint,
    ) -> Ticket {
        self.recorder.began(op, comm, seq, call)
    }

    /// The span that an operation's events belong to.
    pub(crate) fn span(&self, comm: CommId, seq: OpSeq, call: Fingerprint) -> tracing::Span {
        let (rank, epoch) = (self.me.0, self.epoch.0);
        let span = tracing::debug_span!("operation", rank, epoch, comm = comm.0, %seq, %call);
        tracing::debug!(parent: &span, "submitted");
        span
    }

    pub(crate) fn ended(
        &mut self,
        ticket: Ticket,
        span: &tracing::Span,
        failure: Option<&Failure>,
    ) {
        match failure {
            None => tracing::debug!(parent: span, "done"),
            Some(Failure { error, .. }) => tracing::debug!(parent: span, %error, "failed"),
        }
        let Some(record) = self.recorder.ended(ticket, failure) else { return };
        self.tally.ended(record);
        if let Some(trace) = &mut self.trace {
            trace.operation(record);
        }
    }

    pub(crate) fn failed(&mut self, fault: Fault) {
        self.failure.get_or_insert(fault);
    }

    /// Why a communicator has failed since this was last called.
    pub(crate) fn take_failure(&mut self) -> Option<String> {
        self.failure.take().map(|fault| fault.to_string())
    }

    pub(crate) fn flush(&mut self) {
        if let Some(trace) = &mut self.trace {
            trace.flush();
        }
    }
}
