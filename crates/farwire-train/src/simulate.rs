//! Runs action lists in virtual time: proves that they end, and measures their bubble.

use std::collections::HashMap;

use crate::schedule::{Action, Unit, Work};

/// How long things take, in any unit of time.
#[derive(Clone, Copy, Debug)]
pub struct Costs {
    /// One forward unit.
    pub forward: f64,
    /// One backward unit.
    pub backward: f64,
    /// From a send to its arrival.
    pub message: f64,
}

/// A run in virtual time.
#[derive(Clone, Debug)]
pub struct Timeline {
    /// By rank: what ran, with its start and end.
    pub runs: Vec<Vec<(Work, Unit, f64, f64)>>,
    /// When the last rank was done.
    pub end: f64,
}

impl Timeline {
    /// The share of all ranks' time in which nothing ran.
    pub fn bubble(&self) -> f64 {
        let busy: f64 = self.runs.iter().flatten().map(|(_, _, start, end)| end - start).sum();
        1.0 - busy / (self.end * self.runs.len() as f64)
    }
}

/// Every rank that is not done waits for a message that nobody will send.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the schedule stops: rank {rank} waits in {waiting:?}, which nobody sends")]
pub struct Deadlock {
    /// The first such rank.
    pub rank: usize,
    /// The action in which it waits.
    pub waiting: Action,
}

/// Runs one list per rank.
pub fn simulate(lists: &[Vec<Action>], costs: Costs) -> Result<Timeline, Deadlock> {
    let stages = lists.len();
    let stage = |rank: usize, unit: Unit| unit.chunk * stages + rank;
    let mut arrivals: HashMap<(Work, usize, usize), f64> = HashMap::new();
    let mut next = vec![0; stages];
    let mut clock = vec![0.0f64; stages];
    let mut runs = vec![Vec::new(); stages];
    loop {
        let mut moved = false;
        for rank in 0..stages {
            while let Some(action) = lists[rank].get(next[rank]) {
                match *action {
                    Action::Recv(work, unit) => {
                        match arrivals.remove(&(work, unit.micro, stage(rank, unit))) {
                            Some(arrival) => clock[rank] = clock[rank].max(arrival),
                            None => break,
                        }
                    }
                    Action::Run(work, unit) => {
                        let start = clock[rank];
                        clock[rank] += match work {
                            Work::Forward => costs.forward,
                            Work::Backward => costs.backward,
                        };
                        runs[rank].push((work, unit, start, clock[rank]));
                    }
                    Action::Send(work, unit) => {
                        let to = match work {
                            Work::Forward => stage(rank, unit) + 1,
                            Work::Backward => stage(rank, unit) - 1,
                        };
                        arrivals.insert((work, unit.micro, to), clock[rank] + costs.message);
                    }
                }
                next[rank] += 1;
                moved = true;
            }
        }
        if !moved {
            break;
        }
    }
    let stuck = (0..stages).find_map(|rank| {
        lists[rank].get(next[rank]).map(|action| Deadlock { rank, waiting: *action })
    });
    match stuck {
        Some(deadlock) => Err(deadlock),
        None => Ok(Timeline { runs, end: clock.into_iter().fold(0.0, f64::max) }),
    }
}
