//! What a run showed.

use std::fmt;

use farwire_codec::collective::CodingError;
use farwire_proto::{CallError, OpError, Peer, Time, Wait};

/// Identifies a job: one call on one process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct JobId(pub(crate) usize);

/// What a run showed.
#[derive(Clone, Debug)]
pub struct Report {
    /// When the last job ended.
    pub ended: Time,
    /// The longest chain of frames, each of which had to wait for the one before: the number of
    /// rounds.
    pub rounds: u32,
    /// What each rank did.
    pub ranks: Vec<RankStats>,
    pub(crate) jobs: Vec<JobReport>,
}

impl Report {
    /// Every job, in the order of submission.
    pub fn jobs(&self) -> &[JobReport] {
        &self.jobs
    }

    /// The report of one job.
    pub fn job(&self, id: JobId) -> &JobReport {
        &self.jobs[id.0]
    }

    /// The most bytes that any rank sent, headers included.
    pub fn wire_bytes_max(&self) -> u64 {
        self.ranks.iter().map(|rank| rank.wire_bytes).max().unwrap_or(0)
    }

    /// The mean over ranks of the bytes sent, headers included.
    pub fn wire_bytes_mean(&self) -> f64 {
        self.ranks.iter().map(|rank| rank.wire_bytes as f64).sum::<f64>() / self.ranks.len() as f64
    }
}

/// What one rank did.
#[derive(Clone, Debug, Default)]
pub struct RankStats {
    /// Frames sent.
    pub frames: u64,
    /// Bytes sent, headers and repeated packets included.
    pub wire_bytes: u64,
    /// The bytes sent that left this rank's host.
    pub bytes_off_host: u64,
    /// Steps taken, as [`Trouble::Crash`](crate::Trouble::Crash) counts them.
    pub steps: u64,
    /// When the rank was sending to the network, as disjoint spans of time in order.
    pub sending: Vec<(Time, Time)>,
}

impl RankStats {
    pub(crate) fn sends(&mut self, from: Time, until: Time) {
        match self.sending.last_mut() {
            Some((_, end)) if *end == from => *end = until,
            _ => self.sending.push((from, until)),
        }
    }

    /// The share of `from..until` during which the rank was sending.
    pub fn utilisation(&self, from: Time, until: Time) -> f64 {
        let busy: f64 = self
            .sending
            .iter()
            .map(|(start, end)| {
                (*end).min(until).0.saturating_sub((*start).max(from).0).as_secs_f64()
            })
            .sum();
        let span = until.0.saturating_sub(from.0).as_secs_f64();
        if span > 0.0 { busy / span } else { 0.0 }
    }
}

/// One operation on one rank.
#[derive(Clone, Debug)]
pub struct JobReport {
    /// The process.
    pub peer: Peer,
    /// When it was submitted, if it was.
    pub submitted: Option<Time>,
    /// When it ended, if it did.
    pub ended: Option<Time>,
    /// How it ended.
    pub end: JobEnd,
}

impl JobReport {
    /// The result, if the operation succeeded. Empty where the rank gets none, or where only
    /// lengths were carried.
    pub fn result(&self) -> Option<&[u8]> {
        match &self.end {
            JobEnd::Done(result) => Some(result),
            _ => None,
        }
    }

    /// The error, if the operation failed.
    pub fn error(&self) -> Option<&OpError> {
        match &self.end {
            JobEnd::Failed { error, .. } => Some(error),
            _ => None,
        }
    }
}

/// How an operation ended on one rank.
#[derive(Clone, Debug)]
pub enum JobEnd {
    /// It has not ended.
    Pending,
    /// With this result.
    Done(Vec<u8>),
    /// With an error, and the input back.
    Failed {
        /// The error.
        error: Box<OpError>,
        /// The input as it was submitted.
        input: Vec<u8>,
    },
    /// All data moved, but some of it could not be encoded: a rank's input was not finite, say.
    NotEncodable {
        /// The error.
        error: CodingError,
        /// The input as it was submitted.
        input: Vec<u8>,
    },
    /// The call was wrong and nothing was sent.
    Refused(CallError),
    /// Its process died first.
    Crashed,
}

/// A run that did not end.
#[derive(Clone, Debug)]
pub struct Hang {
    /// When the run was given up.
    pub at: Time,
    /// The seed that replays it.
    pub seed: u64,
    /// What is pending on each process that is alive, and whom it waits for.
    pub waits: Vec<(Peer, Wait)>,
    /// Jobs that were never submitted because the job before them did not end.
    pub unsubmitted: usize,
}

impl std::error::Error for Hang {}

impl fmt::Display for Hang {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "nothing ended by {:?} of virtual time (seed {}):", self.at.0, self.seed)?;
        for (peer, wait) in &self.waits {
            let on: Vec<_> = wait.on.iter().map(Peer::to_string).collect();
            write!(f, "\n  {peer}: {} {} waits for {}", wait.fingerprint, wait.seq, on.join(", "))?;
        }
        if self.unsubmitted > 0 {
            write!(f, "\n  {} calls were not reached", self.unsubmitted)?;
        }
        Ok(())
    }
}
