//! The flight recorder: the last operations of each rank, for when things have gone wrong.
//!
//! It is always on. When a communicator fails, each rank writes what it knows to a file of its own;
//! `farwire doctor FILE…` reads those of all ranks and says who was missing.
//! [`Communicator::flight`](crate::Communicator::flight) gives the same at any time.
//!
//! Files go to the folder that [`Builder::flight_dir`](crate::Builder::flight_dir) or
//! `FARWIRE_FLIGHT_DIR` names (`farwire launch` sets it for its ranks); if that is empty, none are
//! written. By default they go to [a folder of this user's](user_folder), where the 64 newest are
//! kept for a week.

use std::collections::VecDeque;
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use farwire_proto::{CommId, Epoch, Failure, Fingerprint, OpId, OpSeq, Peer, Wait, WorldSize};
use serde::{Deserialize, Serialize};

use super::folder::Folder;

/// Operations that are remembered.
const CAPACITY: usize = 1024;

/// What one rank was doing: the content of a flight record.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Flight {
    /// The rank.
    pub rank: u32,
    /// How many ranks there were.
    pub world: u32,
    /// The group's generation.
    pub epoch: u32,
    /// The process.
    pub pid: u32,
    /// When it was written, in microseconds since 1970.
    pub written_us: u64,
    /// Why it was written.
    pub reason: String,
    /// The link that carried data to each rank, by [name](crate::link_names); `None` for the rank
    /// itself and for ranks it had lost.
    pub links: Vec<Option<String>>,
    /// The last operations, oldest first.
    pub operations: Vec<Operation>,
    /// Where it is to be written.
    #[serde(skip)]
    records: Records,
}

/// One operation in a [`Flight`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Operation {
    /// The communicator, in hexadecimal; zeros for the world.
    pub comm: String,
    /// Which of the communicator's collectives, from zero; `None` for a message.
    pub collective: Option<u64>,
    /// The same in words, for messages too.
    pub number: String,
    /// What was called.
    pub call: String,
    /// What became of it.
    pub state: State,
    /// The ranks (of the world) that it waits for, or waited for when it failed.
    pub waiting_for: Vec<u32>,
    /// When it was submitted, in microseconds since 1970.
    pub began_us: u64,
    /// How long it took, or has taken so far.
    pub took_us: u64,
    /// Payload sent.
    pub sent_bytes: u64,
    /// Payload received.
    pub received_bytes: u64,
    /// Why it failed.
    pub error: Option<String>,
}

/// What became of an [`Operation`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum State {
    /// In flight.
    Waiting,
    /// Complete.
    Done,
    /// Failed.
    Failed,
}

impl Flight {
    /// As JSON.
    pub fn to_json(&self) -> String {
        serde_json::to_string(self).expect("a record has no maps and no foreign types")
    }

    /// Reads what [`to_json`](Self::to_json) or a failing rank wrote.
    pub fn read(path: &Path) -> io::Result<Self> {
        let text = std::fs::read_to_string(path)?;
        serde_json::from_str(&text)
            .map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))
    }

    /// Writes it where records go. If that fails, only the log says so.
    pub(crate) fn save(&self) {
        let folder = match &self.records {
            Records::Nowhere => return,
            Records::UserFolder => Folder::of_user(),
            Records::Folder(path) => Folder::named(path),
        };
        let name = format!("rank{}-{}.json", self.rank, self.pid);
        let written = folder.and_then(|folder| {
            folder.write(&name, self.to_json().as_bytes())?;
            Ok(folder.path().join(&name))
        });
        match written {
            Ok(path) => {
                tracing::warn!(path = %path.display(), "wrote a flight record; `farwire doctor` reads it")
            }
            Err(error) => {
                tracing::warn!(%error, records = ?self.records, "could not write a flight record")
            }
        }
    }
}

/// Where flight records go.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) enum Records {
    #[default]
    Nowhere,
    /// To [`user_folder`].
    UserFolder,
    /// Where the user says.
    Folder(PathBuf),
}

impl Records {
    /// What a setting means, if there is one.
    pub(crate) fn from_setting(setting: Option<PathBuf>) -> Self {
        match setting {
            None => Self::UserFolder,
            Some(path) if path.as_os_str().is_empty() => Self::Nowhere,
            Some(path) => Self::Folder(path),
        }
    }

    /// Warns if records cannot be written there. Better now than when there is something to write.
    pub(super) fn check(&self) {
        if let Self::Folder(path) = self
            && let Err(error) = Folder::check_named(path)
        {
            tracing::warn!(
                "this rank will leave no flight record if it fails: FARWIRE_FLIGHT_DIR (or \
                 Builder::flight_dir) is {}: {error}; name a folder that you may write to",
                path.display()
            );
        }
    }
}

/// This user's folder for flight records: `farwire` in `XDG_RUNTIME_DIR`, if that is this user's,
/// else `farwire-` and the user's number among the system's temporary files.
///
/// Makes it if need be, removes old records, and fails if the folder is a link, another user's, or
/// open to others.
pub fn user_folder() -> io::Result<PathBuf> {
    Folder::of_user().map(|folder| folder.path().to_owned())
}

/// Names an operation's record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Ticket(u64);

impl Ticket {
    /// For an operation that is not worth a record.
    pub(crate) const NONE: Self = Self(u64::MAX);
}

/// One operation, as it is kept.
#[derive(Clone, Debug)]
pub(super) struct Record {
    pub(super) op: OpId,
    pub(super) comm: CommId,
    pub(super) seq: OpSeq,
    pub(super) call: Fingerprint,
    /// When it began, since the recorder was started.
    began: Duration,
    ended: Option<Duration>,
    pub(super) sent: u64,
    pub(super) received: u64,
    pub(super) failure: Option<Failure>,
    /// When the recorder was started, since 1970.
    origin: Duration,
}

impl Record {
    /// When it began, since 1970.
    pub(super) fn began_at(&self) -> Duration {
        self.origin + self.began
    }

    /// How long it took; `None` while it is in flight.
    pub(super) fn took(&self) -> Option<Duration> {
        self.ended.map(|ended| ended.saturating_sub(self.began))
    }
}

/// The last operations of one process.
#[derive(Debug)]
pub(crate) struct Recorder {
    me: Peer,
    world: WorldSize,
    epoch: Epoch,
    destination: Records,
    started: Instant,
    origin: Duration,
    records: VecDeque<Record>,
    /// The ticket of the first record.
    first: u64,
}

impl Recorder {
    pub(super) fn new(me: Peer, world: WorldSize, epoch: Epoch, destination: Records) -> Self {
        Self {
            me,
            world,
            epoch,
            destination,
            started: Instant::now(),
            origin: since_1970(),
            records: VecDeque::with_capacity(CAPACITY),
            first: 0,
        }
    }

    pub(super) fn began(
        &mut self,
        op: OpId,
        comm: CommId,
        seq: OpSeq,
        call: Fingerprint,
    ) -> Ticket {
        if self.records.len() == CAPACITY {
            self.records.pop_front();
            self.first += 1;
        }
        let (began, origin) = (self.started.elapsed(), self.origin);
        let (ended, failure) = (None, None);
        self.records.push_back(Record {
            op,
            comm,
            seq,
            call,
            began,
            ended,
            sent: 0,
            received: 0,
            failure,
            origin,
        });
        Ticket(self.first + self.records.len() as u64 - 1)
    }

    /// A record, unless it is so old that it was forgotten.
    fn record(&mut self, ticket: Ticket) -> Option<&mut Record> {
        let index = ticket.0.checked_sub(self.first)?;
        self.records.get_mut(usize::try_from(index).ok()?)
    }

    pub(crate) fn sent(&mut self, ticket: Ticket, bytes: usize) {
        if let Some(record) = self.record(ticket) {
            record.sent += bytes as u64;
        }
    }

    pub(crate) fn received(&mut self, ticket: Ticket, bytes: usize) {
        if let Some(record) = self.record(ticket) {
            record.received += bytes as u64;
        }
    }

    pub(super) fn ended(&mut self, ticket: Ticket, failure: Option<&Failure>) -> Option<&Record> {
        let now = self.started.elapsed();
        let record = self.record(ticket)?;
        record.ended = Some(now);
        record.failure = failure.cloned();
        Some(record)
    }

    /// Everything that is known, for people to read.
    pub(crate) fn flight(
        &self,
        reason: &str,
        links: impl Iterator<Item = Option<&'static str>>,
        waits: &[Wait],
    ) -> Flight {
        Flight {
            rank: self.me.0,
            world: self.world.get(),
            epoch: self.epoch.0,
            pid: std::process::id(),
            written_us: micros(since_1970()),
            reason: reason.to_owned(),
            links: links.map(|link| link.map(str::to_owned)).collect(),
            operations: self.records.iter().map(|record| self.operation(record, waits)).collect(),
            records: self.destination.clone(),
        }
    }

    fn operation(&self, record: &Record, waits: &[Wait]) -> Operation {
        let waits_on =
            || waits.iter().find(|wait| wait.op == record.op).map(|wait| wait.on.as_slice());
        let (state, waiting_for) = match (&record.failure, record.ended) {
            (Some(failure), _) => (State::Failed, failure.waited_for.as_slice()),
            (None, Some(_)) => (State::Done, [].as_slice()),
            (None, None) => (State::Waiting, waits_on().unwrap_or_default()),
        };
        let so_far = || self.started.elapsed().saturating_sub(record.began);
        Operation {
            comm: format!("{:016x}", record.comm.0),
            collective: match record.seq {
                OpSeq::Collective(number) => Some(number),
                OpSeq::Message(..) => None,
            },
            number: record.seq.to_string(),
            call: record.call.to_string(),
            state,
            waiting_for: waiting_for.iter().map(|peer| peer.0).collect(),
            began_us: micros(record.began_at()),
            took_us: micros(record.took().unwrap_or_else(so_far)),
            sent_bytes: record.sent,
            received_bytes: record.received,
            error: record.failure.as_ref().map(|failure| failure.error.to_string()),
        }
    }
}

fn since_1970() -> Duration {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()
}

pub(super) fn micros(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use farwire_proto::{Call, Config, Engine, Options, Time};

    use super::*;

    /// The oldest are forgotten first, and late news of them is ignored.
    #[test]
    fn the_last_operations_are_kept() {
        let world = WorldSize::new(2).unwrap();
        let mut engine = Engine::new(Peer(0), world, Config::default());
        let mut recorder = Recorder::new(Peer(0), world, Epoch(0), Records::Nowhere);
        let tickets: Vec<_> = (0..CAPACITY + 3)
            .map(|_| {
                let plan = engine.plan(CommId::WORLD, &Call::Barrier, &Options::default()).unwrap();
                let (seq, call) = (engine.next_seq(&plan).unwrap(), plan.fingerprint());
                let op = engine.submit(Time::ZERO, plan).unwrap();
                recorder.began(op, CommId::WORLD, seq, call)
            })
            .collect();
        assert!(recorder.ended(tickets[2], None).is_none());
        recorder.sent(tickets[1], 10);
        recorder.sent(tickets[3], 10);
        assert!(recorder.ended(tickets[3], None).is_some());
        let flight = recorder.flight("asked", [None, Some("shm")].into_iter(), &engine.waits());
        assert_eq!(flight.operations.len(), CAPACITY);
        assert_eq!(
            (flight.operations[0].collective, flight.operations[0].state),
            (Some(3), State::Done)
        );
        assert_eq!(flight.operations[0].sent_bytes, 10);
        assert_eq!(
            (flight.operations[1].state, &flight.operations[1].waiting_for[..]),
            (State::Waiting, &[1][..])
        );
        assert_eq!(serde_json::from_str::<Flight>(&flight.to_json()).unwrap(), flight);
    }
}
