//! Shows how a run goes, on the terminal: a line that updates, plain lines, or JSON; and a table at
//! the end.

use std::io::{IsTerminal, Write};
use std::path::Path;
use std::time::{Duration, Instant};

use farwire::{Change, CodecChoice};
use farwire_train::{Settings, Span, StepReport, Trainer};
use indicatif::{ProgressBar, ProgressStyle};
use serde::Serialize;

use crate::units::{show_bytes, show_time};

/// Time between plain lines.
const EVERY: Duration = Duration::from_secs(2);

/// One training run.
#[derive(Debug)]
pub(crate) struct Run {
    pub(crate) settings: Settings,
    pub(crate) layout: String,
    /// The codec that was chosen, if that was left to measuring.
    pub(crate) chosen: Option<String>,
    pub(crate) steps: Vec<StepReport>,
    /// How many of them were skipped because something was not finite.
    pub(crate) skipped: usize,
    /// In this process; steps before the checkpoint that it resumed from are not included.
    pub(crate) seconds: f64,
    /// Steps done, including those that others made before this rank joined.
    pub(crate) done: usize,
    pub(crate) trace: Vec<Span>,
    pub(crate) sample: String,
    pub(crate) stopped: bool,
    /// How the group changed on the way, in words.
    pub(crate) changes: Vec<String>,
}

/// The result of a run.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Outcome {
    pub(crate) codec: String,
    /// What `auto` chose; `None` if the codec was given.
    pub(crate) chosen: Option<String>,
    pub(crate) steps: usize,
    /// How many of these were skipped because something was not finite; and what that was, the last
    /// time.
    pub(crate) skipped: usize,
    pub(crate) last_skipped: Option<String>,
    pub(crate) first_loss: f64,
    /// The mean of the last steps, since single ones are noisy.
    pub(crate) final_loss: f64,
    pub(crate) seconds: f64,
    pub(crate) tokens_per_second: f64,
    /// CPU time of rank 0's process.
    pub(crate) cpu_seconds_per_step: f64,
    pub(crate) wire_bytes: u64,
    pub(crate) wire_bytes_per_step: f64,
    /// Bytes of a dense exchange over bytes sent; `None` if there is no exchange, or if more than
    /// that is sent.
    pub(crate) ratio: Option<f64>,
    /// The same over the last steps, when a codec has been phased in.
    pub(crate) final_ratio: Option<f64>,
    /// The share of the exchange's time that was hidden behind backward; `None` without an
    /// exchange.
    pub(crate) hidden: Option<f64>,
    /// The share of a step that rank 0 waited for other stages; `None` without a pipeline.
    pub(crate) bubble: Option<f64>,
    /// The least bubble that the schedule allows.
    pub(crate) bubble_formula: Option<f64>,
}

impl Run {
    /// A run that is about to start, or to be resumed.
    pub(crate) fn new(trainer: &Trainer) -> Self {
        let is_given = matches!(trainer.settings().codec, CodecChoice::Given(_));
        Self {
            settings: trainer.settings().clone(),
            layout: layout(trainer.settings()),
            chosen: (!is_given).then(|| trainer.codec().to_string()),
            steps: Vec::new(),
            done: trainer.steps_done(),
            skipped: trainer.steps_skipped(),
            seconds: 0.0,
            trace: Vec::new(),
            sample: String::new(),
            stopped: false,
            changes: Vec::new(),
        }
    }

    pub(crate) fn name(&self) -> String {
        self.settings.codec.to_string()
    }

    pub(crate) fn outcome(&self) -> Outcome {
        let Settings { dp, pp, schedule, micro_batches, .. } = self.settings;
        let last = &self.steps[self.steps.len().saturating_sub(10)..];
        // Skipped steps have no loss to speak of.
        let losses = |steps: &[StepReport]| -> Vec<f64> {
            steps.iter().filter(|step| step.skipped.is_none()).map(|step| step.loss).collect()
        };
        let last_losses = losses(last);
        let total = |of: fn(&StepReport) -> f64| self.steps.iter().map(of).sum::<f64>();
        let count = self.steps.len().max(1) as f64;
        let seconds = total(|step| step.times.total).max(1e-9);
        let sent = total(|step| step.wire_bytes as f64);
        let ratio = |steps: &[StepReport]| {
            let total = |of: fn(&StepReport) -> u64| steps.iter().map(of).sum::<u64>() as f64;
            let ratio = total(|step| step.dense_bytes) / total(|step| step.wire_bytes).max(1.0);
            only_exchange(&self.settings).then_some(ratio)
        };
        let busy = total(|step| step.times.exchange_busy);
        Outcome {
            codec: self.name(),
            chosen: self.chosen.clone(),
            steps: self.done,
            skipped: self.skipped,
            last_skipped: self.steps.iter().rev().find_map(|step| step.skipped.clone()),
            first_loss: losses(&self.steps).first().copied().unwrap_or(f64::NAN),
            // A model that is beyond help must not look as it did before.
            final_loss: match self.steps.last() {
                Some(step) if step.skipped.is_some() => step.loss,
                _ => last_losses.iter().sum::<f64>() / last_losses.len() as f64,
            },
            seconds,
            tokens_per_second: total(|step| step.tokens as f64) / seconds,
            cpu_seconds_per_step: total(|step| step.times.cpu) / count,
            wire_bytes: sent as u64,
            wire_bytes_per_step: sent / count,
            ratio: ratio(&self.steps),
            final_ratio: ratio(last),
            hidden: (dp > 1 && busy > 0.0)
                .then(|| (1.0 - total(|step| step.times.exchange) / busy).clamp(0.0, 1.0)),
            bubble: (pp > 1).then(|| total(|step| step.times.pipeline) / seconds),
            bubble_formula: (pp > 1).then(|| schedule.bubble(pp, micro_batches)),
        }
    }
}

/// Shows runs, on rank 0; nothing elsewhere.
#[derive(Debug)]
pub(crate) struct View {
    shown: bool,
    json: bool,
    bar: Option<ProgressBar>,
    last_line: Option<Instant>,
}

impl View {
    pub(crate) fn new(shown: bool, json: bool) -> Self {
        Self { shown, json, bar: None, last_line: None }
    }

    pub(crate) fn is_shown(&self) -> bool {
        self.shown
    }

    /// Shows a change of the group.
    pub(crate) fn change(
        &mut self,
        change: &Change,
        what: &str,
        trainer: &Trainer,
    ) -> std::io::Result<()> {
        if !self.shown {
            return Ok(());
        }
        if self.json {
            let line = serde_json::json!({
                "event": "change",
                "step": change.revision,
                "epoch": change.epoch,
                "before": change.ranks.0,
                "ranks": change.ranks.1,
                "replicas": trainer.settings().dp,
                "waiting": trainer.waiting(),
                "synchronizing": change.synchronizing.as_secs_f64(),
                "text": what,
            });
            return writeln!(std::io::stdout(), "{line}");
        }
        match &self.bar {
            Some(bar) => bar.println(what),
            None => writeln!(std::io::stdout(), "{what}")?,
        }
        Ok(())
    }

    pub(crate) fn begin(&mut self, run: &Run, trainer: &Trainer) -> std::io::Result<()> {
        if !self.shown || self.json {
            return Ok(());
        }
        let Settings { model, batch, steps, micro_batches, pp, schedule, .. } = &run.settings;
        let pipeline = if *pp > 1 {
            format!(", {micro_batches} micro-batches, {schedule}")
        } else {
            String::new()
        };
        let mut out = std::io::stdout();
        writeln!(
            out,
            "a GPT of {} layers, width {}, context {}; {} ranks ({}{pipeline}), codec {}{}",
            model.layers,
            model.width,
            model.context,
            run.settings.ranks(),
            run.layout,
            run.name(),
            run.chosen.as_ref().map(|chosen| format!(": {chosen}")).unwrap_or_default()
        )?;
        let done = trainer.steps_done();
        let from = if done > 0 { format!(", going on from step {done}") } else { String::new() };
        writeln!(out, "{steps} steps of {batch} × {} bytes{from}", model.context)?;
        out.flush()?;
        if std::io::stderr().is_terminal() {
            let bar = ProgressBar::new(*steps as u64).with_position(done as u64);
            let style = ProgressStyle::with_template("{bar:8} {pos}/{len} {wide_msg}");
            if let Ok(style) = style {
                bar.set_style(style);
            }
            self.bar = Some(bar);
        }
        Ok(())
    }

    pub(crate) fn step(&mut self, run: &Run, report: &StepReport) -> std::io::Result<()> {
        if !self.shown {
            return Ok(());
        }
        if self.json {
            let mut line = serde_json::to_value(report).unwrap_or_default();
            line["event"] = "step".into();
            line["codec"] = run.name().into();
            line["tokens_per_second"] = (report.tokens as f64 / report.times.total).into();
            return writeln!(std::io::stdout(), "{line}");
        }
        let line = line(&run.settings, report, run.skipped);
        if let Some(bar) = &self.bar {
            bar.set_message(line);
            bar.set_position(report.step as u64 + 1);
            return Ok(());
        }
        let is_last = report.step + 1 == run.settings.steps || report.stop;
        if is_last || self.last_line.is_none_or(|at| at.elapsed() >= EVERY) {
            self.last_line = Some(Instant::now());
            writeln!(std::io::stdout(), "step {}/{} {line}", report.step + 1, run.settings.steps)?;
        }
        Ok(())
    }

    pub(crate) fn end(&mut self) {
        if let Some(bar) = self.bar.take() {
            bar.finish_and_clear();
        }
        self.last_line = None;
    }

    pub(crate) fn summary(
        &self,
        runs: &[Run],
        report: Option<&Path>,
        checkpoint: Option<&Path>,
    ) -> std::io::Result<()> {
        let mut out = std::io::stdout();
        if self.json {
            for run in runs {
                let mut line = serde_json::to_value(run.outcome()).unwrap_or_default();
                line["event"] = "summary".into();
                line["stopped"] = run.stopped.into();
                line["sample"] = run.sample.clone().into();
                line["changes"] = run.changes.clone().into();
                line["report"] = report.map(|path| path.display().to_string()).into();
                writeln!(out, "{line}")?;
            }
            return out.flush();
        }
        writeln!(
            out,
            "\n{:<12} {:>6} {:>15} {:>9} {:>9} {:>9} {:>11} {:>7} {:>7} {:>7}",
            "codec",
            "steps",
            "loss",
            "time",
            "tokens/s",
            "cpu/step",
            "bytes/step",
            "ratio",
            "at end",
            "hidden"
        )?;
        for outcome in runs.iter().map(Run::outcome) {
            let percent = |share: f64| format!("{:.0} %", 100.0 * share);
            let times =
                |ratio: Option<f64>| ratio.map_or("-".to_owned(), |ratio| format!("{ratio:.1}×"));
            writeln!(
                out,
                "{:<12} {:>6} {:>15} {:>9} {:>9.0} {:>9} {:>11} {:>7} {:>7} {:>7}",
                outcome.codec,
                outcome.steps,
                format!("{:.3} → {:.3}", outcome.first_loss, outcome.final_loss),
                format!("{:.1} s", outcome.seconds),
                outcome.tokens_per_second,
                show_time(Duration::from_secs_f64(outcome.cpu_seconds_per_step)),
                show_bytes(outcome.wire_bytes_per_step.round()),
                times(outcome.ratio),
                times(outcome.final_ratio),
                outcome.hidden.map_or("-".to_owned(), percent),
            )?;
            if let Some(why) = outcome.last_skipped {
                writeln!(
                    out,
                    "  skipped {} of these steps; the last one, since {why}",
                    outcome.skipped
                )?;
            }
            if let Some(chosen) = outcome.chosen {
                writeln!(out, "  {} is {chosen}", outcome.codec)?;
            }
            if let (Some(bubble), Some(formula)) = (outcome.bubble, outcome.bubble_formula) {
                let (bubble, formula) = (percent(bubble), percent(formula));
                writeln!(
                    out,
                    "  rank 0 waited for other stages {bubble} of the time; the schedule's bubble is {formula}"
                )?;
            }
        }
        writeln!(
            out,
            "  the last loss and the ratio at the end are those of the last 10 steps; cpu is that of rank 0; \
             hidden is the share of the exchange's time in which it computed"
        )?;
        for change in runs.iter().flat_map(|run| &run.changes) {
            writeln!(out, "  {change}")?;
        }
        for run in runs.iter().filter(|run| !run.sample.is_empty()) {
            writeln!(out, "\nwhat it writes ({}):", run.name())?;
            run.sample.lines().try_for_each(|line| writeln!(out, "  {line}"))?;
        }
        if let Some(report) = report {
            writeln!(out, "\nreport: {}", report.display())?;
        }
        match (runs.iter().any(|run| run.stopped), checkpoint) {
            (true, Some(dir)) => {
                writeln!(out, "stopped; go on with --checkpoint {} --resume", dir.display())?;
            }
            (true, None) => {
                writeln!(out, "stopped, without a checkpoint: --checkpoint DIR keeps one")?
            }
            (false, Some(dir)) => writeln!(out, "checkpoint: {}", dir.display())?,
            (false, None) => {}
        }
        out.flush()
    }
}

/// The axes that have more than one rank.
fn layout(settings: &Settings) -> String {
    let axes = [("dp", settings.dp), ("tp", settings.tp), ("pp", settings.pp)];
    let named: Vec<String> = axes
        .into_iter()
        .filter(|(_, size)| *size > 1)
        .map(|(name, size)| format!("{name}={size}"))
        .collect();
    if named.is_empty() { "alone".to_owned() } else { named.join(" × ") }
}

/// Whether the exchange of gradients is all that is sent, so that its bytes are known.
fn only_exchange(settings: &Settings) -> bool {
    settings.dp > 1 && settings.tp == 1 && settings.pp == 1
}

/// A step in one line.
fn line(settings: &Settings, report: &StepReport, skipped: usize) -> String {
    let StepReport { loss, tokens, wire_bytes, dense_bytes, hidden, times, .. } = report;
    let speed = *tokens as f64 / times.total.max(1e-9);
    let bytes = show_bytes(*wire_bytes as f64);
    let ratio = *dense_bytes as f64 / (*wire_bytes).max(1) as f64;
    let ratio =
        if only_exchange(settings) { format!("  ratio {ratio:.1}×") } else { String::new() };
    let hidden =
        if settings.dp > 1 { format!("  hidden {:.0} %", 100.0 * hidden) } else { String::new() };
    let skipped = if skipped > 0 { format!("  skipped {skipped}") } else { String::new() };
    format!("loss {loss:.3}  {speed:.0} tok/s  {bytes}/step{ratio}{hidden}{skipped}")
}
