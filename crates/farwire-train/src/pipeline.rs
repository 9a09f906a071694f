//! Runs a pipeline schedule: its actions in order, with messages between the ranks of a group.
//!
//! Receives are posted a few actions early, so that data moves while this rank computes; sends are
//! not waited for until the end of the step.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use farwire::Pending;

use crate::corpus::Batch;
use crate::error::TrainError;
use crate::group::Group;
use crate::library::{Input, Sink, Stage};
use crate::param::Param;
use crate::schedule::{Action, Schedule, Unit, Work};

/// How many receives are posted before their turn.
const EARLY: usize = 2;

/// This rank's part of a pipeline: its chunks of the model, and what to do with them.
#[derive(Debug)]
pub struct Pipeline {
    group: Group,
    chunks: Vec<Box<dyn Stage>>,
    actions: Vec<Action>,
    micro_batches: usize,
    /// Elements that pass from stage to stage for each micro-batch.
    elements: usize,
}

/// Losses and times of a step.
#[derive(Clone, Debug, Default)]
pub struct Flow {
    /// By micro-batch, on the rank that has the last stage; empty elsewhere.
    pub losses: Vec<f32>,
    /// Spent in forward.
    pub forward: Duration,
    /// Spent in backward and in `sink`.
    pub backward: Duration,
    /// Spent waiting for messages.
    pub waiting: Duration,
}

impl Pipeline {
    /// A pipeline over a group. `chunks` are this rank's stages; `elements` is how many elements
    /// pass from stage to stage for each micro-batch.
    pub fn new(
        group: &Group,
        schedule: Schedule,
        micro_batches: usize,
        chunks: Vec<Box<dyn Stage>>,
        elements: usize,
    ) -> Result<Self, TrainError> {
        let actions = schedule.actions(group.size(), group.rank(), micro_batches)?;
        if chunks.len() != schedule.chunks() {
            let (has, needs) = (chunks.len(), schedule.chunks());
            return Err(TrainError::Settings(format!(
                "schedule {schedule} needs {needs} chunks per rank, not {has}"
            )));
        }
        Ok(Self { group: group.clone(), chunks, actions, micro_batches, elements })
    }

    /// An empty pipeline, for a rank that has no part of the model.
    pub(crate) fn idle() -> Self {
        let (chunks, actions) = (Vec::new(), Vec::new());
        Self { group: Group::alone(), chunks, actions, micro_batches: 0, elements: 0 }
    }

    /// Links the stages anew, since ranks of an elastic job have come or gone: over this group, in
    /// which this rank has the same place as before, and for batches of another length.
    pub(crate) fn relink(&mut self, group: &Group, elements: usize) {
        (self.group, self.elements) = (group.clone(), elements);
    }

    /// This rank's parameters, in the order in which backward computes their gradients.
    pub fn params(&self) -> Vec<Param> {
        self.chunks.iter().rev().flat_map(|chunk| chunk.params()).collect()
    }

    /// This rank's stages.
    pub fn chunks(&self) -> &[Box<dyn Stage>] {
        &self.chunks
    }

    /// This rank's stages, to change them.
    pub fn chunks_mut(&mut self) -> &mut [Box<dyn Stage>] {
        &mut self.chunks
    }

    /// One step: forward and backward of every micro-batch. `sink` gets every parameter's gradient
    /// once per micro-batch; these add up to the gradient of the mean loss over micro-batches.
    pub fn run(&mut self, batches: &[Batch], sink: &mut Sink<'_>) -> Result<Flow, TrainError> {
        if batches.len() != self.micro_batches {
            let (has, needs) = (batches.len(), self.micro_batches);
            return Err(TrainError::Settings(format!(
                "{needs} micro-batches need as many inputs, not {has}"
            )));
        }
        let stages = self.group.size() * self.chunks.len();
        let mut flow = Flow::default();
        let mut mail = Mail {
            group: &self.group,
            early: HashMap::new(),
            sent: Vec::new(),
            micro_batches: self.micro_batches,
        };
        let mut looked = 0;
        // What units work on, and what they have computed.
        let mut incoming: HashMap<(Work, Unit), Vec<f32>> = HashMap::new();
        let mut outgoing: HashMap<(Work, Unit), Vec<f32>> = HashMap::new();
        let share = 1.0 / self.micro_batches as f32;
        let elements = self.elements;
        for action in &self.actions {
            while mail.early.len() < EARLY && looked < self.actions.len() {
                if let Action::Recv(work, unit) = self.actions[looked] {
                    mail.post(work, unit, elements);
                }
                looked += 1;
            }
            match *action {
                Action::Recv(work, unit) => {
                    let begun = Instant::now();
                    let data = mail.take(work, unit, elements)?;
                    flow.waiting += begun.elapsed();
                    incoming.insert((work, unit), data);
                }
                Action::Run(Work::Forward, unit) => {
                    let begun = Instant::now();
                    let is_last = unit.chunk * self.group.size() + self.group.rank() + 1 == stages;
                    let batch = &batches[unit.micro];
                    let x = incoming.remove(&(Work::Forward, unit));
                    let x = x.map_or(Input::Tokens(batch), Input::Hidden);
                    let targets = is_last.then_some(&batch.targets[..]);
                    let y = self.chunks[unit.chunk].forward(unit.micro, x, targets)?;
                    if is_last {
                        flow.losses.extend(y);
                    } else {
                        outgoing.insert((Work::Forward, unit), y);
                    }
                    flow.forward += begun.elapsed();
                }
                Action::Run(Work::Backward, unit) => {
                    let begun = Instant::now();
                    let gradient = incoming.remove(&(Work::Backward, unit));
                    let gradient = gradient.unwrap_or_else(|| vec![share]);
                    let back = self.chunks[unit.chunk].backward(unit.micro, gradient, sink)?;
                    outgoing.extend(back.map(|back| ((Work::Backward, unit), back)));
                    flow.backward += begun.elapsed();
                }
                Action::Send(work, unit) => {
                    let data =
                        outgoing.remove(&(work, unit)).expect("a schedule sends what it ran");
                    mail.send(work, unit, data)?;
                }
            }
        }
        let begun = Instant::now();
        mail.sent.into_iter().try_for_each(Pending::wait)?;
        flow.waiting += begun.elapsed();
        Ok(flow)
    }
}

/// Messages between stages.
struct Mail<'a> {
    group: &'a Group,
    early: HashMap<(Work, Unit), Pending<Vec<f32>>>,
    sent: Vec<Pending<()>>,
    micro_batches: usize,
}

impl Mail<'_> {
    fn post(&mut self, work: Work, unit: Unit, elements: usize) {
        if let Some(comm) = self.group.communicator() {
            let (ranks, rank) = (comm.size(), comm.rank());
            let from = match work {
                Work::Forward => (rank + ranks - 1) % ranks,
                Work::Backward => (rank + 1) % ranks,
            };
            let tag = self.tag(work, unit.micro, unit.chunk * ranks + rank);
            self.early.insert((work, unit), comm.recv(elements, from, tag));
        }
    }

    fn take(&mut self, work: Work, unit: Unit, elements: usize) -> Result<Vec<f32>, TrainError> {
        if !self.early.contains_key(&(work, unit)) {
            self.post(work, unit, elements);
        }
        let pending = self.early.remove(&(work, unit));
        Ok(pending.expect("a schedule of one stage receives nothing").wait()?)
    }

    fn send(&mut self, work: Work, unit: Unit, data: Vec<f32>) -> Result<(), TrainError> {
        let Some(comm) = self.group.communicator() else { return Ok(()) };
        let (ranks, rank) = (comm.size(), comm.rank());
        let stage = unit.chunk * ranks + rank;
        let (to, there) = match work {
            Work::Forward => ((rank + 1) % ranks, stage + 1),
            Work::Backward => ((rank + ranks - 1) % ranks, stage - 1),
        };
        let tag = self.tag(work, unit.micro, there);
        let (done, running) =
            std::mem::take(&mut self.sent).into_iter().partition(Pending::is_done);
        self.sent = running;
        Vec::into_iter(done).try_for_each(Pending::wait)?;
        self.sent.push(comm.send(data, to, tag));
        Ok(())
    }

    /// One tag per micro-batch, receiving stage and direction, so messages need no order.
    fn tag(&self, work: Work, micro: usize, stage: usize) -> u32 {
        ((stage * self.micro_batches + micro) * 2 + usize::from(work == Work::Backward)) as u32
    }
}
