//! Steps that outlive the ranks that make them.

use std::time::{Duration, Instant};

use crate::comm::Communicator;
use crate::error::Error;
use crate::pending::Pending;
use crate::sync::StateSync;

/// The state that all ranks of an elastic job share, and that newcomers must get: weights, the
/// optimizer's state, how far the run is in the data.
pub trait ElasticState {
    /// The error of this state's own work.
    type Error: From<Error> + GroupFault;
    /// How far the state is: grows by one with every step that counts, and never otherwise.
    fn revision(&self) -> u64;
    /// All of it, as named buffers; the same names and lengths on all ranks.
    fn save(&self) -> Vec<(String, Vec<u8>)>;
    /// Goes on from what another rank saved, as of that revision.
    fn load(&mut self, revision: u64, buffers: Vec<(String, Vec<u8>)>) -> Result<(), Self::Error>;
    /// The group has changed: gives all ranks the newest state. All ranks call it at the same
    /// point.
    ///
    /// The provided method assumes that every rank has the whole state. A state of which ranks have
    /// shares does this its own way, and says in what it returns which ranks have received
    /// something.
    fn synchronize(&mut self, comm: &Communicator) -> Result<StateSync, Self::Error> {
        let mut saved = self.save();
        let sync = {
            let mut buffers: Vec<(&str, &mut [u8])> =
                saved.iter_mut().map(|(name, buffer)| (&name[..], &mut buffer[..])).collect();
            comm.sync_state(self.revision(), &mut buffers)?
        };
        if sync.receivers.contains(&comm.rank()) {
            self.load(sync.revision, saved)?;
        }
        Ok(sync)
    }
    /// The group has changed, and all ranks have the same state: makes anew whatever depends on who
    /// is in the group, such as communicators that were split off. All ranks call it at the same
    /// point.
    fn regroup(&mut self, _comm: &Communicator) -> Result<(), Self::Error> {
        Ok(())
    }
    /// Which of the ranks in `asking` can [leave](Elastic::part) without the loss of any state.
    /// Must be the same on all ranks. By default, all of them can.
    fn dispensable(&self, asking: &[usize]) -> Vec<usize> {
        asking.to_vec()
    }
    /// The ranks in `leaving` are about to [leave](Elastic::part): hands what only they have, such
    /// as the residuals of error feedback, over to another rank. All ranks call it at the same
    /// point.
    fn hand_over(&mut self, _comm: &Communicator, _leaving: &[usize]) -> Result<(), Self::Error> {
        Ok(())
    }
}

/// Makes steps on a group whose ranks come and go.
///
/// A lost rank costs at most the step at hand: the others agree on who is left, make sure that all
/// have the same state, and make the step again. Processes that wait to join are let in between two
/// steps, one at a time, and get the state.
///
/// **A step counts on all ranks or on none.** A step must change the state, and its revision, only
/// after its last call on the communicator. When a rank is lost, some ranks may have come that far
/// and others not. The newest revision among the survivors counts: those that lack it get it, and
/// if none has it, the step is made again. As long as nobody is lost or waits, all of this costs
/// one all-reduce of one number per step.
///
/// ```no_run
/// use farwire::{Communicator, Elastic, ElasticState, Error, ReduceOp};
///
/// struct Model { weights: Vec<f32>, steps: u64 }
///
/// impl ElasticState for Model {
///     type Error = Error;
///     fn revision(&self) -> u64 { self.steps }
///     fn save(&self) -> Vec<(String, Vec<u8>)> {
///         vec![("weights".into(), self.weights.iter().flat_map(|w| w.to_le_bytes()).collect())]
///     }
///     fn load(&mut self, revision: u64, buffers: Vec<(String, Vec<u8>)>) -> Result<(), Error> {
///         let floats = buffers[0].1.as_chunks().0.iter();
///         self.weights = floats.map(|bytes| f32::from_le_bytes(*bytes)).collect();
///         self.steps = revision;
///         Ok(())
///     }
/// }
///
/// let comm = match std::env::var("JOIN") {
///     Ok(address) => Communicator::builder().join_running(&address)?,
///     Err(_) => Communicator::builder().elastic(true).join()?,
/// };
/// let mut model = Model { weights: vec![0.0; 1000], steps: 0 };
/// let mut elastic = Elastic::new(comm);
/// while model.steps < 100 {
///     elastic.step(&mut model, |comm, model| {
///         let gradient = vec![1.0; model.weights.len()]; // of this rank's share of the batch
///         let mean = comm.all_reduce(gradient, ReduceOp::Mean).wait()?;
///         model.weights.iter_mut().zip(mean).for_each(|(w, g)| *w -= 0.1 * g);
///         model.steps += 1;
///         Ok(())
///     })?;
/// }
/// # Ok::<(), Error>(())
/// ```
#[derive(Debug)]
pub struct Elastic {
    comm: Communicator,
    /// Whether all ranks are known to have the same state.
    in_sync: bool,
    /// Whether a process waits to join. All ranks began to find that out before the last step, so
    /// the answer has come by the time it is needed, and costs a step next to nothing.
    wanted: Option<Pending<bool>>,
    changes: Vec<Change>,
}

/// A change of the group, as one of its members saw it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Change {
    /// The revision of the state that all had afterwards.
    pub revision: u64,
    /// The epoch that began with it.
    pub epoch: u32,
    /// How many ranks there were before, and afterwards.
    pub ranks: (usize, usize),
    /// The ranks, in the new group, that got the state because they had missed a step or are new.
    pub received: Vec<usize>,
    /// The ranks that had drifted: the same revision with other bits.
    pub differed: Vec<usize>,
    /// How long it took to give all ranks the same state, once the group had changed.
    pub synchronizing: Duration,
}

impl Elastic {
    /// Takes the communicator of all ranks, whether this process was there from the start or has
    /// just joined.
    pub fn new(comm: Communicator) -> Self {
        Self { comm, in_sync: false, wanted: None, changes: Vec::new() }
    }

    /// The group as it is now.
    pub fn comm(&self) -> &Communicator {
        &self.comm
    }

    /// How the group has changed since the last time this was called.
    pub fn take_changes(&mut self) -> Vec<Change> {
        std::mem::take(&mut self.changes)
    }

    /// Makes a step that counts. First lets in a process that was waiting when the last step began;
    /// and if ranks are lost on the way, makes the step again. All ranks must call it. Returns what
    /// `step` returned on this rank; if this rank missed the end of a step that counted elsewhere,
    /// that is the next step's.
    ///
    /// Fails if `step` fails for another reason than a fault of the group, or if the group cannot
    /// go on from here.
    pub fn step<S: ElasticState, R>(
        &mut self,
        state: &mut S,
        mut step: impl FnMut(&Communicator, &mut S) -> Result<R, S::Error>,
    ) -> Result<R, S::Error> {
        loop {
            let made = match self.prepare(state) {
                Ok(()) => step(&self.comm, state),
                Err(error) => Err(error),
            };
            match made {
                Ok(made) => return Ok(made),
                Err(error) if error.is_group_fault() => {
                    tracing::warn!(error = %error.describe(), "a rank is lost; going on without it");
                    self.replace(self.comm.shrink()?);
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// Lets ranks leave in good order: they [hand over](ElasticState::hand_over) what only they
    /// have, and the others go on without them and without losing a step. All ranks must call it at
    /// the same point, say when a step has told all of them that one wants to leave.
    ///
    /// Returns whether this rank is out, if it called with `leave`. If it is not, because it is
    /// [not dispensable](ElasticState::dispensable) or because another rank was lost just then, it
    /// can ask again after the next step. At least one rank has to stay.
    pub fn part<S: ElasticState>(&mut self, state: &mut S, leave: bool) -> Result<bool, S::Error> {
        let mut is_out = false;
        match self.try_part(state, leave, &mut is_out) {
            // A rank that is lost now leaves as well, with what it has. The next step mends the
            // group.
            Err(error) if error.is_group_fault() => {
                tracing::warn!(error = %error.describe(), "a rank is lost while others leave");
            }
            parted => parted?,
        }
        Ok(is_out)
    }

    fn try_part<S: ElasticState>(
        &mut self,
        state: &mut S,
        leave: bool,
        is_out: &mut bool,
    ) -> Result<(), S::Error> {
        let all = self.comm.all_gather(vec![u8::from(leave)]).wait()?;
        let asking: Vec<_> = (0..all.len()).filter(|rank| all[*rank] == 1).collect();
        let leaving = state.dispensable(&asking);
        if leaving.is_empty() {
            return Ok(());
        }
        // From here on, others may have taken over what this rank had.
        *is_out = leaving.contains(&self.comm.rank());
        state.hand_over(&self.comm, &leaving)?;
        // All have what they were to get. Now those that leave say goodbye, and the others wait for
        // that. Some may do so, and go on, before all have passed the barrier; those that are still
        // there then go on with them.
        if let Err(error) = self.comm.barrier().wait()
            && !error.is_group_fault()
        {
            return Err(error.into());
        }
        if !*is_out {
            leaving.into_iter().for_each(|rank| self.comm.wait_until_gone(rank));
            self.replace(self.comm.shrink()?);
        }
        Ok(())
    }

    /// Lets in a process that waits, and makes sure that all ranks have the same state.
    fn prepare<S: ElasticState>(&mut self, state: &mut S) -> Result<(), S::Error> {
        if self.in_sync {
            let wanted = self.wanted.take().map_or(Ok(false), Pending::wait)?;
            let next = if wanted { self.comm.admit()? } else { self.comm.clone() };
            if next.epoch() == self.comm.epoch() {
                self.wanted = Some(self.comm.find_waiting());
                return Ok(());
            }
            self.replace(next);
        }
        let ranks = self.comm.size();
        let begun = Instant::now();
        let sync = state.synchronize(&self.comm)?;
        state.regroup(&self.comm)?;
        self.in_sync = true;
        self.wanted = Some(self.comm.find_waiting());
        if let Some(change) = self.changes.last_mut().filter(|change| change.ranks.1 == ranks) {
            change.revision = sync.revision;
            (change.received, change.differed) = (sync.receivers, sync.differed);
            change.synchronizing = begun.elapsed();
        }
        Ok(())
    }

    fn replace(&mut self, next: Communicator) {
        self.changes.push(Change {
            revision: 0,
            epoch: next.epoch().unwrap_or(0),
            ranks: (self.comm.size(), next.size()),
            received: Vec::new(),
            differed: Vec::new(),
            synchronizing: Duration::ZERO,
        });
        self.comm = next;
        self.in_sync = false;
        self.wanted = None;
        let (epoch, rank, ranks) = (self.comm.epoch(), self.comm.rank(), self.comm.size());
        tracing::info!(epoch, rank, ranks, "a new group");
    }
}

/// Tells whether an error of a step means that the group is broken, and can be mended.
pub trait GroupFault {
    /// Whether the error means that.
    fn is_group_fault(&self) -> bool;
    /// What happened, for the log.
    fn describe(&self) -> String;
}

impl GroupFault for Error {
    fn is_group_fault(&self) -> bool {
        self.fault().is_some()
    }

    fn describe(&self) -> String {
        self.to_string()
    }
}
