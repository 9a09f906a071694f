//! A report as one HTML file: nothing to load, plots as SVG.

use std::fmt::Write as _;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use farwire_train::{Span, StepReport, Times};

use super::view::Run;
use crate::units::{show_bytes, show_time};

/// Colours that differ for most eyes, and in grey.
const COLOURS: [&str; 8] =
    ["#1f6feb", "#d1571b", "#2f8f4e", "#8a4fbf", "#b0872a", "#c03a6b", "#2a8c99", "#5b6470"];
/// The size of a plot, in its own units.
const SIZE: (f64, f64) = (640.0, 300.0);
/// Left, right, top, bottom of the area with data.
const MARGIN: (f64, f64, f64, f64) = (64.0, 16.0, 30.0, 44.0);
/// The most points of a line, and bars of a split: more cannot be seen.
const POINTS: usize = 400;
const BARS: usize = 60;

/// Where time goes, in the order in which it is stacked.
const PARTS: [Part; 6] = [
    ("forward", |times| times.forward),
    ("backward", |times| times.backward),
    ("sums over tp", |times| times.tensor),
    ("waiting for stages", |times| times.pipeline),
    ("waiting for gradients", |times| times.exchange),
    ("update", |times| times.update),
];

/// A name, and how much of a step it took.
type Part = (&'static str, fn(&Times) -> f64);

/// The whole page.
pub(crate) fn html(runs: &[Run]) -> String {
    let mut page = String::from(HEAD);
    let _ = writeln!(page, "<h1>farwire train</h1>\n<p class=\"sub\">{}</p>", escape(&about(runs)));
    let _ = writeln!(page, "<p class=\"sub\">{}</p>", escape(&origin()));
    page += &table(runs);
    let losses: Vec<Line> =
        runs.iter().map(|run| Line::of(run, |step, _| step.step as f64 + 1.0)).collect();
    page += &figure(
        "Loss by step",
        "The mean over the batch; the pale line is each step, the strong one the mean of those around it.",
        &plot(&losses, "step", "loss", &plain),
    );
    let sent: Vec<Line> = runs.iter().map(|run| Line::of(run, |_, sent| sent)).collect();
    page += &figure(
        "Loss by bytes sent",
        "Bytes that all ranks sent, as their links counted them.",
        &plot(&sent, "sent by all ranks", "loss", &bytes),
    );
    for run in runs {
        let title = format!(
            "Time of a step on rank 0{}",
            if runs.len() > 1 { format!(": {}", run.name()) } else { String::new() }
        );
        page += &figure(
            &title,
            "Each bar is the mean of some steps. Bars that are too high are cut off; their true height is in the tooltip.",
            &split(&run.steps),
        );
    }
    page += &figure(
        "Bytes per step",
        "What all ranks sent in a step, on average; the outline is a dense exchange of the gradients.",
        &volumes(runs),
    );
    for run in runs.iter().filter(|run| !run.changes.is_empty()) {
        let lines: Vec<_> = run.changes.iter().map(|change| escape(change)).collect();
        let _ = writeln!(
            page,
            "<section><h2>Changes of the group</h2><pre>{}</pre></section>",
            lines.join("\n")
        );
    }
    if let Some(run) = runs.iter().find(|run| !run.trace.is_empty()) {
        page += &figure(
            "The last step on rank 0",
            "Backward of each part of the model, and each bucket of gradients from its start to the arrival of its mean.",
            &trace(&run.trace),
        );
    }
    for run in runs.iter().filter(|run| !run.sample.is_empty()) {
        let _ = writeln!(
            page,
            "<section><h2>What it writes ({})</h2><pre>{}</pre></section>",
            escape(&run.name()),
            escape(&run.sample)
        );
    }
    if let Some(run) = runs.first() {
        let settings = serde_json::to_string_pretty(&run.settings).unwrap_or_default();
        let _ = writeln!(
            page,
            "<details><summary>Settings</summary><pre>{}</pre></details>",
            escape(&settings)
        );
    }
    page + "</main></body></html>\n"
}

fn about(runs: &[Run]) -> String {
    let Some(run) = runs.first() else { return "no run".to_owned() };
    let model = run.settings.model;
    format!(
        "A GPT of {} layers, width {}, context {}, on {} ranks ({}); batches of {} sequences.",
        model.layers,
        model.width,
        model.context,
        run.settings.ranks(),
        run.layout,
        run.settings.batch
    )
}

/// The command that made this page, when, and on what machine.
fn origin() -> String {
    let words = std::env::args().skip(1).collect::<Vec<_>>().join(" ");
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let version = env!("CARGO_PKG_VERSION");
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let date = date(now.as_secs() / 86_400);
    format!("farwire {version}, `farwire {words}`, {date}, a machine with {cores} cores")
}

/// The date of a day, counted from 1970-01-01.
fn date(day: u64) -> String {
    // Eras of 400 years, counted from a first of March, so that the leap day is the last of a year.
    let (era, day) = ((day + 719_468) / 146_097, (day + 719_468) % 146_097);
    let year = (day - day / 1460 + day / 36_524 - day / 146_096) / 365;
    let day = day - (365 * year + year / 4 - year / 100);
    let month = (5 * day + 2) / 153;
    let (day, month) = (day - (153 * month + 2) / 5 + 1, (month + 2) % 12 + 1);
    format!("{}-{month:02}-{day:02}", 400 * era + year + u64::from(month <= 2))
}

fn table(runs: &[Run]) -> String {
    let mut rows = String::new();
    for (run, colour) in runs.iter().zip(COLOURS.iter().cycle()) {
        let outcome = run.outcome();
        let percent = |share: Option<f64>| {
            share.map_or("–".to_owned(), |share| format!("{:.0} %", 100.0 * share))
        };
        let times =
            |ratio: Option<f64>| ratio.map_or("–".to_owned(), |ratio| format!("{ratio:.1}×"));
        let _ = writeln!(
            rows,
            "<tr><td><i style=\"background:{colour}\"></i>{}</td><td>{}</td><td>{:.3}</td><td>{:.3}</td><td>{:.1} s</td><td>{:.0}</td><td>{}</td><td>{}</td><td>{}</td><td>{}</td><td>{}</td></tr>",
            escape(&outcome.codec),
            outcome.steps,
            outcome.first_loss,
            outcome.final_loss,
            outcome.seconds,
            outcome.tokens_per_second,
            show_time(Duration::from_secs_f64(outcome.cpu_seconds_per_step)),
            show_bytes(outcome.wire_bytes_per_step.round()),
            times(outcome.ratio),
            times(outcome.final_ratio),
            percent(outcome.hidden),
        );
        let chosen = outcome.chosen.iter().map(|chosen| format!("{} is {chosen}", outcome.codec));
        let skipped = outcome.last_skipped.iter().map(|why| {
            format!("{} of these steps were skipped; the last one, since {why}", outcome.skipped)
        });
        for note in chosen.chain(skipped) {
            let _ =
                writeln!(rows, "<tr><td colspan=\"11\" class=\"note\">{}</td></tr>", escape(&note));
        }
        if let (Some(_), Some(_)) = (outcome.bubble, outcome.bubble_formula) {
            let _ = writeln!(
                rows,
                "<tr><td colspan=\"11\" class=\"note\">rank 0 waited for other stages {} of the time; the schedule's bubble is {}</td></tr>",
                percent(outcome.bubble),
                percent(outcome.bubble_formula)
            );
        }
    }
    format!(
        "<div class=\"wide\"><table><thead><tr><th>codec</th><th>steps</th><th>first loss</th><th>final loss</th><th>time</th><th>tokens/s</th><th>CPU/step</th><th>bytes/step</th><th>ratio</th><th>ratio at the end</th><th>hidden</th></tr></thead>\n<tbody>\n{rows}</tbody></table></div>\n<p class=\"sub\">final loss: the mean of the last 10 steps. ratio: dense bytes over bytes sent; at the end: in the last 10 steps. CPU: that of rank 0. hidden: the share of the exchange's time in which it computed.</p>\n"
    )
}

fn figure(title: &str, caption: &str, svg: &str) -> String {
    format!(
        "<figure><h2>{}</h2>{svg}<figcaption>{}</figcaption></figure>\n",
        escape(title),
        escape(caption)
    )
}

/// A run's loss over something that grows.
struct Line {
    name: String,
    points: Vec<(f64, f64)>,
}

impl Line {
    /// `x` is made from a step and the bytes sent by its end.
    fn of(run: &Run, x: impl Fn(&StepReport, f64) -> f64) -> Self {
        let mut sent = 0.0;
        let points = run.steps.iter().filter_map(|step| {
            sent += step.wire_bytes as f64;
            // The loss of a step that was skipped may be anything, or nothing.
            step.skipped.is_none().then(|| (x(step, sent), step.loss))
        });
        Self { name: run.name(), points: points.collect() }
    }

    /// The same, smoothed: each point is the mean of those around it.
    fn smooth(&self) -> Vec<(f64, f64)> {
        let reach = self.points.len() / 40;
        let mean = |(index, (x, _)): (usize, &(f64, f64))| {
            // As many ahead as behind, or the steep beginning would bend. There are fewer at the
            // end.
            let behind = reach.min(index);
            let ahead = behind.min(self.points.len() - 1 - index);
            let around = &self.points[index - behind..=index + ahead];
            (*x, around.iter().map(|(_, y)| y).sum::<f64>() / around.len() as f64)
        };
        self.points.iter().enumerate().map(mean).collect()
    }
}

/// Maps data to places in the plot.
struct Axes {
    x: (f64, f64),
    y: (f64, f64),
}

impl Axes {
    fn place(&self, (x, y): (f64, f64)) -> (f64, f64) {
        let (left, right, top, bottom) = MARGIN;
        let share = |value: f64, (from, to): (f64, f64)| (value - from) / (to - from);
        let x = left + share(x, self.x) * (SIZE.0 - left - right);
        let y = SIZE.1 - bottom - share(y, self.y) * (SIZE.1 - top - bottom);
        (x, y)
    }

    /// Lines and numbers at round values, and labels.
    fn draw(
        &self,
        labels: (&str, &str),
        x_text: &dyn Fn(f64) -> String,
        y_text: &dyn Fn(f64) -> String,
    ) -> String {
        let mut svg = String::new();
        for value in ticks(self.y) {
            let (left, y) = self.place((self.x.0, value));
            let right = self.place((self.x.1, value)).0;
            let _ = write!(
                svg,
                "<line class=\"grid\" x1=\"{left:.1}\" x2=\"{right:.1}\" y1=\"{y:.1}\" y2=\"{y:.1}\" /><text class=\"tick\" x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">{}</text>",
                left - 6.0,
                y + 4.0,
                escape(&y_text(value))
            );
        }
        for value in ticks(self.x) {
            let (x, bottom) = self.place((value, self.y.0));
            let _ = write!(
                svg,
                "<text class=\"tick\" x=\"{x:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{}</text>",
                bottom + 16.0,
                escape(&x_text(value))
            );
        }
        let (left, bottom) = self.place((self.x.0, self.y.0));
        let (right, top) = self.place((self.x.1, self.y.1));
        let (middle_x, middle_y) = ((left + right) / 2.0, (top + bottom) / 2.0);
        let _ = write!(
            svg,
            "<line class=\"axis\" x1=\"{left:.1}\" x2=\"{right:.1}\" y1=\"{bottom:.1}\" y2=\"{bottom:.1}\" />\
             <text class=\"label\" x=\"{middle_x:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{}</text>\
             <text class=\"label\" transform=\"translate(14 {middle_y:.1}) rotate(-90)\" text-anchor=\"middle\">{}</text>",
            SIZE.1 - 6.0,
            escape(labels.0),
            escape(labels.1)
        );
        svg
    }
}

/// Round values within a range, about five.
fn ticks((from, to): (f64, f64)) -> Vec<f64> {
    let rough = (to - from) / 5.0;
    if !(rough.is_finite() && rough > 0.0) {
        return Vec::new();
    }
    let power = 10f64.powf(rough.log10().floor());
    let step =
        [1.0, 2.0, 5.0, 10.0].map(|times| times * power).into_iter().find(|step| *step >= rough);
    let step = step.unwrap_or(power * 10.0);
    let first = (from / step).ceil() as i64;
    (first..first + 20)
        .map(|index| index as f64 * step)
        .take_while(|value| *value <= to * (1.0 + 1e-9))
        .collect()
}

fn range(values: impl Iterator<Item = f64>) -> (f64, f64) {
    let (low, high) = values
        .filter(|value| value.is_finite())
        .fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), value| {
            (low.min(value), high.max(value))
        });
    match (low.is_finite(), high > low) {
        (false, _) => (0.0, 1.0),
        (true, false) => (low - 0.5, low + 0.5),
        (true, true) => (low, high),
    }
}

fn plot(lines: &[Line], x_label: &str, y_label: &str, x_text: &dyn Fn(f64) -> String) -> String {
    let all = || lines.iter().flat_map(|line| &line.points);
    let (low, high) = range(all().map(|(_, y)| *y));
    let room = 0.05 * (high - low);
    let x = range(all().map(|(x, _)| *x));
    let axes = Axes { x: (0.0f64.min(x.0), x.1), y: ((low - room).max(0.0).min(low), high + room) };
    let mut svg = axes.draw((x_label, y_label), x_text, &plain);
    for (line, colour) in lines.iter().zip(COLOURS.iter().cycle()) {
        for (points, class) in [(&line.points, "raw"), (&line.smooth(), "line")] {
            let every = points.len().div_ceil(POINTS).max(1);
            let places: Vec<String> = points
                .iter()
                .enumerate()
                .filter(|(index, _)| index % every == 0 || index + 1 == points.len())
                .map(|(_, point)| axes.place(*point))
                .map(|(x, y)| format!("{x:.1},{y:.1}"))
                .collect();
            let _ = write!(
                svg,
                "<polyline class=\"{class}\" stroke=\"{colour}\" points=\"{}\" />",
                places.join(" ")
            );
        }
    }
    svg += &legend(lines.iter().map(|line| &line.name[..]));
    wrap(&svg, SIZE.1)
}

/// Stacked bars: where the time of some steps went, on average.
fn split(steps: &[StepReport]) -> String {
    let each = steps.len().div_ceil(BARS).max(1);
    let bars: Vec<(f64, [f64; PARTS.len()])> = steps
        .chunks(each)
        .map(|steps| {
            let mean = |of: fn(&Times) -> f64| {
                1e3 * steps.iter().map(|step| of(&step.times)).sum::<f64>() / steps.len() as f64
            };
            (steps[0].step as f64, PARTS.map(|(_, of)| mean(of)))
        })
        .collect();
    // One slow step must not flatten all others.
    let mut heights: Vec<f64> = bars.iter().map(|(_, parts)| parts.iter().sum()).collect();
    heights.sort_by(f64::total_cmp);
    let highest =
        heights.get(heights.len().saturating_sub(1) * 95 / 100).copied().unwrap_or(1.0).max(1e-9);
    let first = bars.first().map_or(0.0, |(step, _)| *step);
    let axes =
        Axes { x: (first, first + (bars.len().max(1) * each) as f64), y: (0.0, highest * 1.15) };
    let mut svg = axes.draw(("step", "ms"), &plain, &plain);
    for (step, parts) in &bars {
        let mut below = 0.0;
        for ((height, (name, _)), colour) in parts.iter().zip(PARTS).zip(COLOURS) {
            let top = (below + height).min(axes.y.1);
            let ((x, y), (right, bottom)) =
                (axes.place((*step, top)), axes.place((step + each as f64, below.min(axes.y.1))));
            let _ = write!(
                svg,
                "<rect x=\"{x:.1}\" y=\"{y:.1}\" width=\"{:.1}\" height=\"{:.1}\" fill=\"{colour}\"><title>step {}: {name} {height:.1} ms</title></rect>",
                (right - x - 0.6).max(0.3),
                (bottom - y).max(0.0),
                step + 1.0
            );
            below += height;
        }
    }
    // What cannot be seen needs no name.
    let sum = |of: fn(&Times) -> f64| steps.iter().map(|step| of(&step.times)).sum::<f64>();
    let used = PARTS.iter().map(|(name, of)| (*name, sum(*of) > 1e-3 * sum(|times| times.total)));
    svg += &legend_of(
        used.zip(COLOURS).filter(|((_, used), _)| *used).map(|((name, _), colour)| (name, colour)),
    );
    wrap(&svg, SIZE.1)
}

fn volumes(runs: &[Run]) -> String {
    let rows: Vec<(String, f64, f64)> = runs
        .iter()
        .map(|run| {
            let dense = run.steps.iter().map(|step| step.dense_bytes as f64).sum::<f64>();
            (run.name(), run.outcome().wire_bytes_per_step, dense / run.steps.len().max(1) as f64)
        })
        .collect();
    let longest = rows.iter().map(|(_, sent, dense)| sent.max(*dense)).fold(1.0, f64::max);
    let (left, width, height) = (110.0, SIZE.0 - 110.0 - 90.0, 30.0);
    let mut svg = String::new();
    for (index, ((name, sent, dense), colour)) in
        rows.iter().zip(COLOURS.iter().cycle()).enumerate()
    {
        let y = 8.0 + index as f64 * height;
        let (long, outline) = (sent / longest * width, dense / longest * width);
        let _ = write!(
            svg,
            "<text class=\"label\" x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">{}</text>\
             <rect x=\"{left}\" y=\"{y:.1}\" width=\"{long:.1}\" height=\"{:.1}\" fill=\"{colour}\" />\
             <rect x=\"{left}\" y=\"{y:.1}\" width=\"{outline:.1}\" height=\"{:.1}\" fill=\"none\" stroke=\"#8b949e\" stroke-dasharray=\"3 2\" />\
             <text class=\"label\" x=\"{:.1}\" y=\"{:.1}\">{}</text>",
            left - 8.0,
            y + 15.0,
            escape(name),
            height - 10.0,
            height - 10.0,
            left + long.max(outline) + 8.0,
            y + 15.0,
            show_bytes(sent.round())
        );
    }
    wrap(&svg, 16.0 + rows.len() as f64 * height)
}

/// One row per thing that ran, from its start to its end.
fn trace(spans: &[Span]) -> String {
    let end = spans.iter().map(|span| span.end.as_secs_f64()).fold(1e-6, f64::max);
    let start = spans.iter().map(|span| span.start.as_secs_f64()).fold(end, f64::min);
    let (left, width, height) = (240.0, SIZE.0 - 240.0 - 60.0, 18.0);
    let mut svg = String::new();
    for (index, span) in spans.iter().enumerate() {
        let share = |at: std::time::Duration| {
            left + (at.as_secs_f64() - start) / (end - start).max(1e-9) * width
        };
        let (from, to, y) = (share(span.start), share(span.end), 4.0 + index as f64 * height);
        let colour = if span.name.starts_with("bucket") { COLOURS[1] } else { COLOURS[0] };
        let _ = write!(
            svg,
            "<text class=\"tick\" x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">{}</text>\
             <rect x=\"{from:.1}\" y=\"{y:.1}\" width=\"{:.1}\" height=\"{:.1}\" fill=\"{colour}\" />\
             <text class=\"tick\" x=\"{:.1}\" y=\"{:.1}\">{:.1} ms</text>",
            left - 6.0,
            y + 11.0,
            escape(&span.name),
            (to - from).max(1.0),
            height - 5.0,
            to + 4.0,
            y + 11.0,
            1e3 * (span.end - span.start).as_secs_f64()
        );
    }
    wrap(&svg, 10.0 + spans.len() as f64 * height)
}

fn legend<'a>(names: impl Iterator<Item = &'a str>) -> String {
    legend_of(names.zip(COLOURS.into_iter().cycle()))
}

fn legend_of<'a>(entries: impl Iterator<Item = (&'a str, &'a str)>) -> String {
    let mut svg = String::new();
    let mut x = MARGIN.0;
    for (name, colour) in entries {
        let _ = write!(
            svg,
            "<rect x=\"{x:.1}\" y=\"6\" width=\"10\" height=\"10\" rx=\"2\" fill=\"{colour}\" />\
             <text class=\"key\" x=\"{:.1}\" y=\"15\">{}</text>",
            x + 14.0,
            escape(name)
        );
        x += 34.0 + 6.2 * name.chars().count() as f64;
    }
    svg
}

fn wrap(svg: &str, height: f64) -> String {
    format!("<svg viewBox=\"0 0 {} {height}\" role=\"img\">{svg}</svg>", SIZE.0)
}

fn plain(value: f64) -> String {
    let text = format!("{value:.2}");
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

fn bytes(value: f64) -> String {
    show_bytes(value.round())
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

const HEAD: &str = r#"<!doctype html>
<html lang=en><head><meta charset=utf-8><meta name=viewport content="width=device-width">
<title>farwire train</title>
<style>
body { margin: 0; background: #fff; color: #1f2328; font: 15px/1.5 system-ui, sans-serif; }
main { max-width: 860px; margin: 0 auto; padding: 24px 20px 60px; }
h1 { font-size: 24px; margin: 0; }
h2 { font-size: 16px; margin: 0 0 8px; }
.sub, figcaption, .note { color: #59636e; }
figure, section { margin: 28px 0 0; padding: 16px; border: 1px solid #d9dee3; border-radius: 8px; }
figcaption { font-size: 13px; margin-top: 6px; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: 6px 8px; border-bottom: 1px solid #d9dee3; white-space: nowrap; }
th { font-weight: 600; color: #59636e; font-size: 13px; }
th:first-child, td:first-child { text-align: left; }
td i { display: inline-block; width: 10px; height: 10px; border-radius: 2px; margin-right: 6px; }
pre { margin: 0; white-space: pre-wrap; overflow-wrap: anywhere; font: 13px/1.45 ui-monospace, monospace; }
details { margin-top: 28px; }
svg { width: 100%; height: auto; display: block; }
svg text { font-family: system-ui, sans-serif; fill: #59636e; }
.tick { font-size: 11px; } .label, .key { font-size: 12px; }
.grid { stroke: #eaeef2; } .axis { stroke: #8b949e; }
polyline { fill: none; } .line { stroke-width: 2; } .raw { stroke-width: 1; opacity: .3; }
</style></head>
<body><main>
"#;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn days_have_the_dates_of_the_calendar() {
        for (day, text) in
            [(0, "1970-01-01"), (59, "1970-03-01"), (11_016, "2000-02-29"), (20_773, "2026-11-16")]
        {
            assert_eq!(date(day), text);
        }
    }

    #[test]
    fn ticks_are_round_and_within() {
        assert_eq!(ticks((0.0, 10.0)), [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]);
        assert_eq!(ticks((2.1, 5.6)), [3.0, 4.0, 5.0]);
        assert!(ticks((1.0, 1.0)).is_empty() && ticks((f64::NAN, 1.0)).is_empty());
    }

    #[test]
    fn a_report_without_steps_is_still_a_page() {
        let page = html(&[]);
        assert!(page.starts_with("<!doctype html>") && page.ends_with("</html>\n"));
    }

    #[test]
    fn text_cannot_break_the_page() {
        assert_eq!(escape("<a & \"b\">"), "&lt;a &amp; &quot;b&quot;&gt;");
    }
}
