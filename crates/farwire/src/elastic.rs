//! Steps that outlive the ranks that make them.

use std::time::{Duration, Instant};

use crate::comm::Communicator;
use crate::error::Error;
use crate::pending::Pending;
use crate::sync::StateSync;

/// What all ranks of an elastic job have in common, and newcomers must get: weights, an optimizer's
/// state, where in the data the run is.
pub trait ElasticState {
    /// What its own work fails with.
    type Error: From<Error> + GroupFault;
    /// How far it is: grows by one with every step that counts, and nowhere else.
    fn revision(&self) -> u64;
    /// All of it, as named buffers; the same names and lengths on all ranks.
    fn save(&self) -> Vec<(String, Vec<u8>)>;
    /// Goes on from what another rank saved, as of that revision.
    fn load(&mut self, revision: u64, buffers: Vec<(String, Vec<u8>)>) -> Result<(), Self::Error>;
    /// The group has changed: gives all ranks the newest state. All ranks call it at the same point.
    ///
    /// As provided, every rank has all of the state. A state of which ranks have shares does this
    /// its own way, and says in what it returns who has received something.
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
    /// The group has changed, and all have the same state: whatever depends on who is in it, say
    /// communicators that were split off, has to be made anew. All ranks call it at the same point.
    fn regroup(&mut self, _comm: &Communicator) -> Result<(), Self::Error> {
        Ok(())
    }
    /// Which of the ranks in `asking` can [leave](Elastic::part): those without whom nothing of the
    /// state is lost. The same on all ranks. As provided, all of them.
    fn dispensable(&self, asking: &[usize]) -> Vec<usize> {
        asking.to_vec()
    }
    /// The ranks in `leaving` are about to [leave](Elastic::part): what only they have, say what
    /// error feedback owes, goes to another. All ranks call it at the same point.
    fn hand_over(&mut self, _comm: &Communicator, _leaving: &[usize]) -> Result<(), Self::Error> {
        Ok(())
    }
}

/// Makes steps on a group whose ranks come and go.
///
/// A lost rank costs at most the step at hand: the others agree on who is left, see to it that all
/// have the same state, and make the step again. Processes that wait to join are let in between two
/// steps, one at a time, and get the state.
///
/// **A step counts on all ranks or on none.** A step must change the state, and its revision, only
/// after its last call on the communicator. When a rank is lost, some may have come that far and
/// others not. The newest revision among those that are left counts, and whoever does not have it
/// gets it; if nobody that is left has it, the step is made again. As long as nobody is lost or
/// waits, all of this costs an all-reduce of one number in a step.
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
    /// Whether all are known to have the same state.
    in_sync: bool,
    /// Whether somebody waits to join, which all ranks began to find out before the last step. The
    /// answer has come by the time that it is needed, so it costs a step next to nothing.
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
    /// How many ranks there were before, and then.
    pub ranks: (usize, usize),
    /// The ranks, of the new group, that had missed a step or are new, and got the state.
    pub received: Vec<usize>,
    /// The ranks that had drifted: the same revision with other bits.
    pub differed: Vec<usize>,
    /// How long it took to give all ranks the same state, once the group had changed.
    pub synchronizing: Duration,
}

impl Elastic {
    /// For the communicator of all ranks, whether this process was there from the start or has just
    /// joined.
    pub fn new(comm: Communicator) -> Self {
        Self { comm, in_sync: false, wanted: None, changes: Vec::new() }
    }

    /// The group as it is.
    pub fn comm(&self) -> &Communicator {
        &self.comm
    }

    /// How the group has changed since this was last asked.
    pub fn take_changes(&mut self) -> Vec<Change> {
        std::mem::take(&mut self.changes)
    }

    /// Makes a step that counts: lets in who was waiting when the last one began, and makes it again
    /// for as long as ranks are lost on the way. All ranks must call it. What `step` returns on this rank comes back; if
    /// this rank missed the end of a step that counted elsewhere, the next step is made instead.
    ///
    /// Fails if `step` does for another reason than a fault of the group, or if the group cannot go
    /// on from here.
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
    /// the same point, say when a step has told all that somebody wants to leave.
    ///
    /// Returns whether this rank, which called it with `leave`, is out. If it is not, because it is
    /// [not dispensable](ElasticState::dispensable) or because another was lost just then, it can ask
    /// again after the next step. At least one has to stay.
    pub fn part<S: ElasticState>(&mut self, state: &mut S, leave: bool) -> Result<bool, S::Error> {
        let mut is_out = false;
        match self.try_part(state, leave, &mut is_out) {
            // Whoever is lost now leaves as well, with what it has. The next step mends the group.
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
        // From here on others may have what it had.
        *is_out = leaving.contains(&self.comm.rank());
        state.hand_over(&self.comm, &leaving)?;
        // All have what they were to get. Then those that leave say goodbye, and the others wait for
        // that. Some may do so, and go on, before all have passed the barrier; whoever is still there
        // then goes on with them.
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

    /// Lets in who waits, and sees to it that all have the same state.
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

/// Whether an error of a step means that the group is broken, and can be mended.
pub trait GroupFault {
    /// Whether it is so.
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
