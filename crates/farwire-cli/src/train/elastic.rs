//! A run whose ranks come and go: `--elastic`, and `--join` for ranks that come later.
//!
//! [`Elastic`] lays the model out over the ranks that are there, and all begin from the same seed.
//! The first rank shows progress and writes the report; when it is lost, the next one does. With
//! tensor or pipeline parallelism a rank that is left over has no part of the model: it waits for
//! enough others to make a whole replica, and leaves if that takes too long.

use std::path::Path;
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use farwire::{Change, Communicator, Elastic, ElasticState, GroupFault, ReduceOp};
use farwire_train::gpt::Writer;
use farwire_train::{Settings, TrainError, Trainer, embedded, sha256};
use tokio::signal::unix::{SignalKind, signal};

use super::files::Held;
use super::view::{Run, View};
use super::{
    Args, CPU, SAMPLE, TrainCommandError, files, keep_checkpoints, report, save, tell, text,
    watch_for_signals,
};
use crate::launch::{GIVEN_UP, LEFT, LaunchError, NOT_LET_IN, say_error};
use crate::units;

/// Trains as one of the ranks that a job starts with.
pub(super) fn start(args: &Args, lines: String) -> Result<ExitCode, TrainCommandError> {
    let data = Arc::new(OnceLock::new());
    let builder = Communicator::builder().agree_on(lines).agree_later(data.clone());
    let comm = builder.elastic(true).join()?;
    let stop = watch_for_signals()?;
    files::check_report(&args.report)?;
    let text = text(args, &comm, &stop)?;
    end(args, train(args, comm, text, &data, stop, false))
}

/// Trains as a rank that joins. It needs the data beforehand: the others check that they have the
/// same, before letting it in costs them anything.
pub(super) fn join(
    args: &Args,
    address: &str,
    lines: String,
) -> Result<ExitCode, TrainCommandError> {
    files::check_report(&args.report)?;
    let text = match &args.data {
        // Until it has joined, a signal ends it at once.
        Some(path) => files::read_data(path, &AtomicI32::new(0))?,
        None => Some(embedded()),
    };
    let data = Arc::new(OnceLock::new());
    if let Some(text) = &text {
        data.get_or_init(|| data_line(text));
    }
    // A rank that a launcher has started says nothing: the launcher does.
    let by_hand = args.join.is_some();
    if by_hand {
        eprintln!("calling {address}; the ranks there let others in between two steps");
    }
    let builder = Communicator::builder().agree_on(lines).agree_later(data.clone());
    let comm = match builder.join_running(address) {
        Ok(comm) => {
            if by_hand {
                eprintln!(
                    "joined as rank {} of {}; the first rank shows progress, and `kill -USR1 {}` \
                     makes this one leave in good order",
                    comm.rank(),
                    comm.size(),
                    std::process::id()
                );
            }
            comm
        }
        Err(error) => {
            say_error(&error);
            return Ok(ExitCode::from(NOT_LET_IN));
        }
    };
    let stop = watch_for_signals()?;
    end(args, train(args, comm, text, &data, stop, true))
}

/// The line that says which data all ranks must have.
fn data_line(text: &[u8]) -> String {
    format!("data of {} bytes, SHA-256 {}", text.len(), sha256(text))
}

/// How a rank ends after training.
fn end(
    args: &Args,
    ended: Result<ExitCode, TrainCommandError>,
) -> Result<ExitCode, TrainCommandError> {
    match ended {
        Err(TrainCommandError::Train(source @ TrainError::NoReplica { .. })) => {
            let checkpoint = match &args.checkpoint {
                Some(dir) => format!("--checkpoint {} --resume", dir.display()),
                None => "but there is none, since --checkpoint was not given".to_owned(),
            };
            // No rank needs to be started in its place: there is nothing to join.
            say_error(&TrainCommandError::NoReplica { source: Box::new(source), checkpoint });
            Ok(ExitCode::from(GIVEN_UP))
        }
        Err(TrainCommandError::Train(error @ TrainError::Audit { .. })) => {
            say_error(&error);
            Ok(ExitCode::from(GIVEN_UP))
        }
        ended => ended,
    }
}

fn train(
    args: &Args,
    comm: Communicator,
    text: Option<Vec<u8>>,
    data: &OnceLock<String>,
    stop: Arc<AtomicI32>,
    joined: bool,
) -> Result<ExitCode, TrainCommandError> {
    let leave = watch_for_leave()?;
    let Some(text) = text else {
        return Ok(ExitCode::from(128 + stop.load(Ordering::Relaxed) as u8));
    };
    data.get_or_init(|| data_line(&text));
    let mut trainer = Trainer::elastic(CPU, args.elastic_settings()?, &text)?;
    trainer.set_audited(args.audit);
    trainer.set_asking(joined);
    let steps = trainer.settings().steps;
    let mut elastic = Elastic::new(comm);
    // Lays the model out over all ranks. (One that joins meets the others in the middle of a step.)
    let (mut held, mut before) = (None, Vec::new());
    if !joined {
        elastic.step(&mut trainer, |_, _| Ok::<_, TrainError>(()))?;
        if let Some(dir) = &args.checkpoint {
            let team = trainer.mesh().world().clone();
            (held, before) = keep_checkpoints(&mut trainer, &team, dir, args.resume)?;
        }
    }
    let mut keeper = args.checkpoint.as_deref().map(|dir| {
        let every = args.checkpoint_every as usize;
        Keeper { dir, every, held, moved: None }
    });
    let mut run = Run { steps: before, ..Run::new(&trainer) };
    let mut view = View::new(trainer.is_first(), args.json);
    view.begin(&run, &trainer)?;
    let mut waits: Option<Waits> = None;
    let mut was_kept = false;
    while trainer.steps_done() < steps && !run.stopped {
        let wish = stop.load(Ordering::Relaxed) != 0;
        let is_told = leave.load(Ordering::Relaxed);
        let is_over = waits.as_ref().is_some_and(|waits| waits.since.elapsed() >= args.wait);
        let report = elastic.step(&mut trainer, |_, trainer| {
            // Another rank may write checkpoints from now on. It does not begin before all are
            // here.
            if let Some(keeper) = keeper.as_mut().filter(|_| !trainer.is_first()) {
                keeper.held = None;
            }
            // It may just have got a place.
            trainer.set_leaving(is_told || (is_over && !trainer.has_place()));
            trainer.step(wish)
        })?;
        if trainer.is_first() != view.is_shown() {
            view.end();
            view = View::new(trainer.is_first(), args.json);
            view.begin(&run, &trainer)?;
        }
        for change in elastic.take_changes() {
            let what = describe(&change, &trainer);
            view.change(&change, &what, &trainer)?;
            remember(&mut run.changes, what);
        }
        match (trainer.has_place(), &waits) {
            (true, _) => waits = None,
            (false, None) => {
                let began = Waits { since: Instant::now(), step: report.step };
                eprintln!("{}", began.describe(args, &trainer));
                waits = Some(began);
            }
            (false, Some(_)) => {}
        }
        let (ranks, leaving, asking) = (elastic.comm().size(), report.leaving, report.asking);
        run.stopped = report.stop || leaving == ranks;
        run.seconds += report.times.total;
        run.skipped = trainer.steps_skipped();
        run.done = trainer.steps_done();
        view.step(&run, &report)?;
        run.steps.push(report);
        if args.audit && trainer.has_place() {
            // The next step finds out who is left.
            trainer
                .audit()
                .or_else(|error| if error.is_group_fault() { Ok(()) } else { Err(error) })?;
        }
        let last = run.stopped || trainer.steps_done() == steps;
        let keeper = keeper.as_mut().filter(|_| trainer.has_place());
        if let Some(why) = keeper.and_then(|keeper| keeper.keep(&mut trainer, &run, last)) {
            eprintln!("{why}");
            remember(&mut run.changes, why);
        }
        if asking > 0 {
            match changes_of_rank_0(elastic.comm(), &run.changes) {
                Ok(changes) => {
                    run.changes = changes;
                    trainer.set_asking(false);
                }
                // It asks again in the next step.
                Err(error) if error.is_group_fault() => {}
                Err(error) => return Err(error.into()),
            }
        }
        // Not the flag as it is by now: all ranks have to part after the same step.
        let leaves = trainer.is_leaving();
        if leaving > 0 && !run.stopped {
            let done = trainer.steps_done();
            let is_needed = leaves && trainer.dispensable(&[elastic.comm().rank()]).is_empty();
            if elastic.part(&mut trainer, leaves)? {
                view.end();
                match &waits {
                    Some(waits) if !is_told => {
                        eprintln!("{}", waits.gave_up(args, done, ranks - leaving));
                    }
                    _ => eprintln!(
                        "left after step {done} of {steps}, and handed over its residuals; the others go on"
                    ),
                }
                return Ok(ExitCode::from(LEFT));
            }
            if is_needed && !std::mem::replace(&mut was_kept, true) {
                eprintln!(
                    "told to leave, but after step {done} no other rank had this one's share of the \
                     model; it goes on, and leaves as soon as another has it, or when all are told to"
                );
            }
        }
    }
    run.settings = trainer.settings().clone();
    run.trace = trainer.trace().to_vec();
    view.end();
    // No rank is let in any more. A rank that is lost now takes nothing with it but the sample.
    let gather = || Ok::<_, TrainError>((trainer.replicas_agree()?, trainer.gathered_weights()?));
    let (agree, weights) = match trainer.has_place().then(gather).transpose() {
        Err(error) if error.is_group_fault() => (None, None),
        gathered => gathered?.map_or((None, None), |(agree, weights)| (Some(agree), weights)),
    };
    if let (Some(weights), false) = (weights, run.stopped) {
        let mut writer = Writer::new(CPU, weights, run.settings.model)?;
        let sample = writer.write("The ", SAMPLE, 0.7, run.settings.seed)?;
        run.sample = sample.chars().filter(|c| !c.is_control() || *c == '\n').collect();
    }
    let (mut written, mut shown) = (Ok(()), Ok(()));
    if joined && args.join.is_some() && !trainer.is_first() {
        let what = if run.stopped { "was stopped" } else { "is complete" };
        eprintln!("the run {what} after step {} of {steps}", trainer.steps_done());
    }
    if trainer.is_first() {
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
    // Shares the signal, which not all need to have got. It also keeps all here while rank 0 still
    // writes, so that none is taken for lost.
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

/// How many changes a report shows one by one: the newest ones.
const MAX_CHANGES: usize = 300;
/// Follows the number of changes that it does not show.
const EARLIER: &str = " earlier changes are not shown";

/// Adds a change. A run of weeks may have very many: then the first line counts the oldest.
fn remember(changes: &mut Vec<String>, what: String) {
    changes.push(what);
    if changes.len() > MAX_CHANGES {
        let counted = changes[0].strip_suffix(EARLIER).and_then(|count| count.parse::<u64>().ok());
        if counted.is_some() {
            changes.remove(1);
        }
        changes[0] = format!("{}{EARLIER}", counted.unwrap_or(0) + 1);
    }
}

/// The changes that rank 0 knows of, since it has been there longest. A rank that has joined may
/// have to write the report.
fn changes_of_rank_0(
    comm: &Communicator,
    changes: &[String],
) -> Result<Vec<String>, farwire::Error> {
    const BETWEEN: &str = "\n";
    let mine = (comm.rank() == 0).then(|| changes.join(BETWEEN).into_bytes());
    let length = mine.as_ref().map(|bytes| vec![bytes.len() as u64]);
    let length = comm.broadcast(length, 1, 0).wait()?[0] as usize;
    let bytes = comm.broadcast(mine, length, 0).wait()?;
    Ok(String::from_utf8_lossy(&bytes).split_terminator(BETWEEN).map(str::to_owned).collect())
}

/// Checkpoints of a run whose rank 0 may change: whichever rank is rank 0 writes them.
struct Keeper<'a> {
    dir: &'a Path,
    every: usize,
    /// On rank 0, from its first checkpoint on.
    held: Option<Held>,
    /// How many steps had moved weights at the last one.
    moved: Option<usize>,
}

impl Keeper<'_> {
    /// Writes a checkpoint if it is time. If that fails, the run goes on, older checkpoints stay as
    /// they were, and this returns why: a full disk should not end a run that other ranks could
    /// save.
    fn keep(&mut self, trainer: &mut Trainer, run: &Run, last: bool) -> Option<String> {
        let done = trainer.steps_done();
        let moved = done - trainer.steps_skipped();
        if !last && (!done.is_multiple_of(self.every) || self.moved == Some(moved)) {
            return None;
        }
        match self.save(trainer, run) {
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

    fn save(&mut self, trainer: &mut Trainer, run: &Run) -> Result<(), TrainCommandError> {
        let team = trainer.mesh().world();
        let is_new = team.rank() == 0 && self.held.is_none();
        let held = tell(team, if is_new { files::hold(self.dir) } else { Ok(None) })?;
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

/// A rank that has no part of the model.
struct Waits {
    since: Instant,
    /// The first step that the others made without it.
    step: usize,
}

impl Waits {
    fn describe(&self, args: &Args, trainer: &Trainer) -> String {
        let (needed, waiting) = (args.tp * args.pp, trainer.waiting());
        let (limit, step) = (units::show_time(args.wait), self.step + 1);
        format!(
            "this rank has no part in step {step}: a replica needs {needed} ranks (tp × pp), and the \
             number of ranks left over is {waiting}; it waits up to {limit} for others to join"
        )
    }

    fn gave_up(&self, args: &Args, done: usize, left: usize) -> String {
        let (needed, step) = (args.tp * args.pp, self.step);
        let limit = units::show_time(args.wait);
        format!(
            "left after step {done}: from step {step} on there were too few ranks for its replica of \
             {needed} (tp × pp), and none joined within {limit}; {left} ranks go on. To take part \
             again, start {needed} with --join"
        )
    }
}

/// A change of the group in a sentence.
fn describe(change: &Change, trainer: &Trainer) -> String {
    let lost = trainer.lost_residual();
    let Change { revision, epoch, ranks: (before, now), received, differed, .. } = change;
    let mut text = format!("after step {revision}: {before} → {now} ranks (epoch {epoch})");
    let Settings { dp, tp, pp, .. } = trainer.settings();
    if tp * pp > 1 {
        text +=
            &format!("; replicas of {} ranks: {dp}, waiting ranks: {}", tp * pp, trainer.waiting());
    }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_very_many_changes_the_newest_are_kept_and_the_others_counted() {
        let mut changes = Vec::new();
        (0..1000).for_each(|number| remember(&mut changes, format!("change {number}")));
        assert_eq!(changes.len(), 1 + MAX_CHANGES);
        assert_eq!(changes[0], "700 earlier changes are not shown");
        assert_eq!((&changes[1][..], &changes[MAX_CHANGES][..]), ("change 700", "change 999"));
    }
}
