//! A run whose ranks come and go: `--elastic`, and `--join` for those that come later.
//!
//! Every rank makes the model on its own, from the same seed, and [`Elastic`] lays it out over
//! whoever is there. Rank 0 shows how it goes and writes the report; when it is lost, the next one
//! does.

use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use farwire::{Change, Communicator, Elastic, GroupFault, ReduceOp};
use farwire_train::gpt::Writer;
use farwire_train::{TrainError, Trainer, embedded};
use tokio::signal::unix::{SignalKind, signal};

use super::files::Held;
use super::view::{Run, View};
use super::{
    Args, SAMPLE, TrainCommandError, files, keep_checkpoints, library, report, save, tell, text,
    watch_for_signals,
};
use crate::launch::{LEFT, LaunchError};

/// Trains as one rank of many, from the start or as one that has joined.
pub(super) fn run(
    args: &Args,
    comm: Communicator,
    joined: bool,
) -> Result<ExitCode, TrainCommandError> {
    let (stop, leave) = (watch_for_signals()?, watch_for_leave()?);
    files::check_report(&args.report)?;
    let text = match (&args.data, joined) {
        // One that joins has to have the data; whether they are the same is found out.
        (Some(path), true) => files::read_data(path, &stop)?,
        (None, true) => Some(embedded()),
        (_, false) => text(args, &comm, &stop)?,
    };
    let Some(text) = text else {
        return Ok(ExitCode::from(128 + stop.load(Ordering::Relaxed) as u8));
    };
    let alone = farwire::local(1)?.remove(0);
    let library = library(args, &comm)?;
    let mut trainer =
        Trainer::new(&*library, &alone, args.settings(1, args.codec.clone())?, &text)?;
    trainer.set_elastic()?;
    let steps = trainer.settings().steps;
    let mut elastic = Elastic::new(comm);
    // Lays the model out over all ranks. (One that joins meets the others in the middle of a step.)
    let (mut held, mut before) = (None, Vec::new());
    if !joined {
        elastic.step(&mut trainer, |_, _| Ok::<_, TrainError>(()))?;
        if let Some(dir) = &args.checkpoint {
            (held, before) = keep_checkpoints(&mut trainer, elastic.comm(), dir, args.resume)?;
        }
    }
    let mut keeper = args.checkpoint.as_deref().map(|dir| {
        let every = args.checkpoint_every as usize;
        Keeper { dir, every, held, moved: None }
    });
    let mut run = Run { steps: before, ..Run::new(&trainer) };
    let mut view = View::new(elastic.comm().rank() == 0, args.json);
    view.begin(&run, &trainer)?;
    while trainer.steps_done() < steps && !run.stopped {
        let wish = stop.load(Ordering::Relaxed) != 0;
        trainer.set_leaving(leave.load(Ordering::Relaxed));
        let report = elastic.step(&mut trainer, |_, trainer| trainer.step(wish))?;
        if elastic.comm().rank() == 0 && !view.is_shown() {
            view = View::new(true, args.json);
            view.begin(&run, &trainer)?;
        }
        for change in elastic.take_changes() {
            let what = describe(&change, trainer.lost_residual());
            view.change(&change, &what)?;
            run.changes.push(what);
        }
        let (ranks, leaving) = (elastic.comm().size(), report.leaving);
        run.stopped = report.stop || leaving == ranks;
        run.seconds += report.times.total;
        run.skipped = trainer.steps_skipped();
        view.step(&run, &report)?;
        run.steps.push(report);
        let last = run.stopped || trainer.steps_done() == steps;
        if let Some(why) =
            keeper.as_mut().and_then(|keeper| keeper.keep(&mut trainer, elastic.comm(), &run, last))
        {
            eprintln!("{why}");
            run.changes.push(why);
        }
        // Not the flag as it is by now: all have to part after the same step.
        let leaves = trainer.is_leaving();
        if leaving > 0 && !run.stopped && elastic.part(&mut trainer, leaves)? {
            view.end();
            eprintln!(
                "left after step {} of {steps}, and handed over what was owed; {} ranks go on",
                trainer.steps_done(),
                ranks - leaving
            );
            return Ok(ExitCode::from(LEFT));
        }
    }
    run.settings = trainer.settings().clone();
    run.trace = trainer.trace().to_vec();
    view.end();
    // Nobody is let in any more. A rank that is lost now takes nothing with it but the sample.
    let gathered =
        trainer.replicas_agree().and_then(|agree| Ok((trainer.gathered_weights()?, agree)));
    let (weights, agree) = match gathered {
        Err(error) if error.is_group_fault() => (None, None),
        gathered => gathered.map(|(weights, agree)| (weights, Some(agree)))?,
    };
    if let (Some(weights), false) = (weights, run.stopped) {
        let mut writer = Writer::new(&*library, weights, run.settings.model)?;
        let sample = writer.write("The ", SAMPLE, 0.7, run.settings.seed)?;
        run.sample = sample.chars().filter(|c| !c.is_control() || *c == '\n').collect();
    }
    let (mut written, mut shown) = (Ok(()), Ok(()));
    if elastic.comm().rank() == 0 {
        let line = match agree {
            Some(true) => "all replicas have the same bits",
            Some(false) => "replicas differ",
            None => "a rank was lost before replicas could be compared",
        };
        run.changes.push(format!("at the end, {line}"));
        let runs = [run];
        written = std::fs::write(&args.report, report::html(&runs));
        let report = written.is_ok().then_some(args.report.as_path());
        shown = view.summary(&runs, report, args.checkpoint.as_deref());
        run = runs.into_iter().next().expect("it was just put there");
    }
    // The signal, which not all need to have got. It also keeps all here while rank 0 still writes,
    // so that nobody is taken for lost.
    let mine = stop.load(Ordering::Relaxed);
    let signals = elastic.comm().all_reduce(vec![mine], ReduceOp::Max).wait();
    let signal = signals.map_or(mine, |signals| signals[0]);
    shown?;
    written.map_err(|source| TrainCommandError::Report { path: args.report.clone(), source })?;
    Ok(match (run.stopped, signal) {
        (false, _) => ExitCode::SUCCESS,
        (true, 0) => ExitCode::from(LEFT), // all have been told to leave
        (true, signal) => ExitCode::from(128 + signal as u8),
    })
}

/// Checkpoints of a run whose rank 0 may change: whoever is rank 0 writes them.
struct Keeper<'a> {
    dir: &'a Path,
    every: usize,
    /// On rank 0, from its first checkpoint on.
    held: Option<Held>,
    /// How many steps had moved weights at the last one.
    moved: Option<usize>,
}

impl Keeper<'_> {
    /// Writes one if it is time. If that fails, the run goes on, with older checkpoints as they
    /// were, and this says why: what fills a disk should not end a run that other ranks could save.
    fn keep(
        &mut self,
        trainer: &mut Trainer,
        comm: &Communicator,
        run: &Run,
        last: bool,
    ) -> Option<String> {
        let done = trainer.steps_done();
        let moved = done - trainer.steps_skipped();
        if !last && (!done.is_multiple_of(self.every) || self.moved == Some(moved)) {
            return None;
        }
        match self.save(trainer, comm, run) {
            Ok(()) => {
                self.moved = Some(moved);
                None
            }
            // The next step finds out who is left.
            Err(TrainCommandError::Train(error)) if error.is_group_fault() => None,
            Err(TrainCommandError::Farwire(error)) if error.is_group_fault() => None,
            Err(error) => Some(format!("no checkpoint after step {done}: {error}")),
        }
    }

    fn save(
        &mut self,
        trainer: &mut Trainer,
        comm: &Communicator,
        run: &Run,
    ) -> Result<(), TrainCommandError> {
        let is_new = comm.rank() == 0 && self.held.is_none();
        let held = tell(comm, if is_new { files::hold(self.dir) } else { Ok(None) })?;
        self.held = held.or(self.held.take());
        save(trainer, self.dir, run)
    }
}

/// Whether SIGUSR1 has come: this rank is to leave, and the others to go on.
fn watch_for_leave() -> Result<Arc<AtomicBool>, TrainCommandError> {
    let leave = Arc::new(AtomicBool::new(false));
    let asked = leave.clone();
    let system = |source| LaunchError::System { what: "could not watch for signals", source };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.map_err(system)?;
    let guard = runtime.enter();
    let mut signal = signal(SignalKind::user_defined1()).map_err(system)?;
    drop(guard);
    let watch = move || {
        runtime.block_on(signal.recv());
        asked.store(true, Ordering::Relaxed);
    };
    std::thread::Builder::new().name("farwire-leave".into()).spawn(watch).map_err(system)?;
    Ok(leave)
}

/// A change of the group in a sentence.
fn describe(change: &Change, lost: f64) -> String {
    let Change { revision, epoch, ranks: (before, now), received, differed } = change;
    let mut text = format!("after step {revision}: {before} → {now} ranks (epoch {epoch})");
    if !received.is_empty() {
        let ranks: Vec<_> = received.iter().map(usize::to_string).collect();
        text += &format!("; rank {} got the state", ranks.join(", "));
    }
    if !differed.is_empty() {
        text += &format!("; {} of these had drifted", differed.len());
    }
    if now < before && lost > 0.0 {
        text += &format!("; residuals of norm {lost:.3e} are lost");
    }
    text
}
