//! `farwire sim`: one operation on a simulated network.

mod chaos;
mod speeds;

use std::fmt::{self, Write as _};
use std::io::{IsTerminal, Write as _};
use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use farwire_codec::{CodecSpec, MessageCodec, Travel};
use farwire_proto::{
    Algorithm, Call, CallError, CommId, Config, DType, Element, Kind, Options, Peer, Placement,
    Plan, Rank, ReduceOp, Time, Tuning, WorldSize, tune::Links, with_type,
};
use farwire_sim::kinds::Shape;
use farwire_sim::{
    CodedModel, CodingSpeeds, Cores, Costs, Hang, JobEnd, JobId, Link, Network, Report, Sim,
    Submission, Trouble, lower_bound, oracle,
};
use indicatif::{ProgressBar, ProgressStyle};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use serde::Serialize;

use crate::hosts::{HostsArg, WrongHosts};
use crate::named::named;
use crate::units::{self, show_bytes, show_rate, show_time};
use speeds::{Speeds, SpeedsError};

/// Runs of more than this many bytes, all ranks together, carry lengths only, and the result is
/// checked on a short vector.
const CARRY_AT_MOST: usize = 256 << 20;
/// Elements of that short vector: for each rank, and in addition.
const SHORT_VECTOR: (usize, usize) = (3, 1007);
/// Elements per frame of that run, so that it takes several frames per lane, like the long run.
const SHORT_SEGMENT: NonZeroUsize = NonZeroUsize::new(5).expect("five is not zero");
/// Ranks whose activity is drawn, and how wide.
const DRAWN_RANKS: usize = 16;
const DRAWN_WIDTH: u32 = 60;

/// Run one operation on a simulated network, in virtual time.
///
/// Shows how long the operation would take, how near that is to the least possible time, and what
/// each rank sends. The protocol is the real one. The network is a model in which every rank, or
/// with --hosts every host, has one full-duplex interface. The same flags and seed give the same
/// run on any machine.
#[derive(Debug, clap::Args)]
#[command(args_conflicts_with_subcommands = true, subcommand_negates_reqs = true)]
#[command(after_help = "\
Examples:
  farwire sim all_reduce --ranks 8
  farwire sim all_reduce --ranks 256 --bandwidth 10gbit --latency 1ms
  farwire sim all_reduce --algorithm ring       not two-phase, the default
  farwire sim all_reduce --ranks 8 --hosts 4    two ranks on each host
  farwire sim broadcast --size 1GB --loss 0.1%  where packets get lost
  farwire sim all_reduce --crash 2@40           kill rank 2 at its step 40
  farwire sim all_reduce --ranks 64 --json      one object, for scripts
  farwire sim all_reduce --codec topk:0.01 --speeds speeds.json --cores 2
                                                on machines like this one
  farwire sim chaos --schedules 100000          group membership under faults")]
pub(crate) struct Args {
    /// The operation to run.
    #[arg(value_name = "OP", required = true, value_parser = named::<Kind, _>(Kind::ALL.map(Kind::name)))]
    op: Option<Kind>,
    #[command(subcommand)]
    other: Option<Other>,
    /// Number of ranks.
    #[arg(short = 'n', long, default_value = "8", value_parser = clap::value_parser!(u32).range(1..=1024))]
    ranks: u32,
    /// Bytes of the vector, such as 64MiB, 100MB or 512. For reductions, scans, broadcast and
    /// messages: of each rank's own vector. For gathers, scatters and all_to_all: of all blocks
    /// together.
    #[arg(short, long, default_value = "100MB", value_parser = units::size)]
    size: usize,
    /// Hosts of the ranks: 4 for four hosts, or 3+1 for three ranks on one host and one on another.
    /// Ranks of a host share its interface, and have fast links to each other.
    #[arg(long)]
    hosts: Option<HostsArg>,
    /// What each rank (with --hosts, each host) can send, and also receive, such as 1gbit, 100mbit
    /// or 125MB/s.
    #[arg(short, long, default_value = "1gbit", value_parser = units::rate)]
    bandwidth: f64,
    /// Time from one rank to another, one way, such as 20ms or 50us.
    #[arg(short, long, default_value = "20ms", value_parser = units::time)]
    latency: Duration,
    /// Random extra latency of each frame, up to this much.
    #[arg(long, default_value = "0", value_parser = units::time)]
    jitter: Duration,
    /// Share of packets that are lost and sent again, such as 0.1% or 0.001; up to 90%.
    #[arg(long, default_value = "0", value_parser = units::share)]
    loss: f64,
    /// How to move the data; chosen from size, ranks and network if not given.
    #[arg(short, long, value_parser = named::<Algorithm, _>(Algorithm::ALL.map(Algorithm::name)))]
    algorithm: Option<Algorithm>,
    /// How gradients are compressed on the wire, for all_reduce of f32. Only the lengths of
    /// messages are simulated. Takes codecs that send shards, such as int8, topk:0.01 or
    /// randk:0.01.
    #[arg(long, default_value = "none")]
    codec: CodecSpec,
    /// A file that says what work costs on real machines: lines that `farwire bench codec --json`,
    /// `bench all_reduce --json` over a network and `bench barrier --json` have printed, and that
    /// `netlab --json` has written. Without it, work takes no time.
    #[arg(long, value_name = "FILE")]
    speeds: Option<PathBuf>,
    /// Cores that all ranks share, as the hosts of `farwire netlab` do. Default: always enough.
    #[arg(long, requires = "speeds", conflicts_with = "host_cores")]
    cores: Option<NonZeroUsize>,
    /// Cores of each host, for its ranks; without --hosts, of each rank.
    #[arg(long, requires = "speeds")]
    host_cores: Option<NonZeroUsize>,
    /// Element type.
    #[arg(long, default_value = "f32", value_parser = named::<DType, _>(DType::ALL.map(DType::name)))]
    dtype: DType,
    /// How elements are combined.
    #[arg(long, alias = "op", default_value = "sum", value_parser = named::<ReduceOp, _>(ReduceOp::ALL.map(ReduceOp::name)))]
    reduce: ReduceOp,
    /// The root, for operations that have one.
    #[arg(long, default_value = "0")]
    root: u32,
    /// Bytes per frame.
    #[arg(long, default_value = "64KiB", value_parser = units::size)]
    segment: usize,
    /// Bytes of one stream that may be under way or unread.
    #[arg(long, default_value = "8MiB", value_parser = units::size)]
    window: usize,
    /// Kill a rank just before one of its steps (submit, send a frame, take a frame), counted from
    /// 0. May be repeated.
    /// 0. May be repeated.
    #[arg(long, value_name = "RANK@STEP", value_parser = crash)]
    crash: Vec<(u32, u64)>,
    /// How long a rank must be silent before it is taken for lost.
    #[arg(long, default_value = "2s", value_parser = units::time)]
    detection: Duration,
    /// Random seed.
    #[arg(long, default_value = "0")]
    seed: u64,
    /// Skip the second run, which checks the result on a short vector when the full one is too long
    /// to carry. With many ranks it takes as long as the first.
    #[arg(long)]
    unchecked: bool,
    /// Print one JSON object instead of text.
    #[arg(long)]
    json: bool,
}

/// What else can be simulated.
#[derive(Debug, clap::Subcommand)]
enum Other {
    Chaos(chaos::ChaosArgs),
}

impl Args {
    fn op(&self) -> Kind {
        self.op.expect("it is required where there is no subcommand")
    }

    /// What the codec does, and how fast; `None` if vectors are not compressed.
    fn coding(
        &self,
        speeds: Option<&Speeds>,
        algorithm: Algorithm,
    ) -> Result<Option<Coding>, SimError> {
        let Self { codec, dtype, size, .. } = self;
        if codec.is_none() {
            return Ok(None);
        }
        let (Travel::Shards(messages), Kind::AllReduce, DType::F32) =
            (codec.travels(), self.op(), dtype)
        else {
            return Err(SimError::NotCodable { codec: codec.clone() });
        };
        let sparse = codec.density(size / dtype.size()) < 1.0;
        let speeds = speeds.map(|speeds| speeds.coding(&codec.to_string(), sparse)).transpose()?;
        Ok(Some(Coding {
            codec: messages,
            speeds: speeds.unwrap_or_default(),
            two_level: algorithm == Algorithm::TwoLevel,
        }))
    }
}

/// Why there is nothing to show.
#[derive(Debug, thiserror::Error)]
pub(crate) enum SimError {
    #[error("--size {size} is not a whole number of {dtype} elements, which have {} bytes each", dtype.size())]
    Fraction { size: usize, dtype: DType },
    #[error("--crash {rank}@… names a rank that is not there; use 0 to {}", ranks - 1)]
    NoSuchRank { rank: u32, ranks: u32 },
    #[error("--segment 0 would carry nothing; give at least one byte")]
    EmptySegment,
    #[error("--ranks {0} is too few for {1}, which needs at least 2")]
    TooFew(u32, Kind),
    #[error(
        "--codec {codec} can be simulated for all_reduce of f32 alone, and only if it sends shards: int8, topk:0.01 or randk:0.01, say"
    )]
    NotCodable { codec: CodecSpec },
    #[error(transparent)]
    Hosts(#[from] WrongHosts),
    #[error(transparent)]
    Speeds(#[from] SpeedsError),
    #[error(transparent)]
    Call(#[from] CallError),
    #[error(
        "the run did not end; unless the network is slower than time can be counted, please report it: {0}"
    )]
    Hang(#[from] Hang),
    #[error(
        "this is a bug, please report it with the command line: {op} gave a wrong result on {rank} (seed {seed})"
    )]
    Wrong { op: Kind, rank: Rank, seed: u64 },
    #[error("this is a bug, please report it with the command line: {rank}: {error} (seed {seed})")]
    Failed { rank: Rank, error: String, seed: u64 },
    #[error("this is a bug, please report it: the schedule of seed {seed} breaks a promise {what}")]
    Chaos { seed: u64, what: String },
    #[error("could not write the result: {0}")]
    Output(#[from] std::io::Error),
}

/// What `--json` prints.
#[derive(Debug, Serialize)]
struct Json {
    op: &'static str,
    codec: String,
    ranks: u32,
    bytes: usize,
    algorithm: &'static str,
    segment: usize,
    virtual_ms: f64,
    wire_bytes_max: u64,
    wire_bytes_mean: f64,
    rounds: u32,
    bound_ms: f64,
    failed_ranks: Vec<u32>,
    seed: u64,
}

/// Runs the command.
pub(crate) fn run(args: &Args) -> Result<(), SimError> {
    if let Some(Other::Chaos(chaos)) = &args.other {
        return chaos::run(chaos);
    }
    let started = Instant::now();
    let task = Task::new(args)?;
    let count = args.size / args.dtype.size();
    let carry =
        task.coding.is_none() && args.size.saturating_mul(task.world.len()) <= CARRY_AT_MOST;
    let mut meter = Meter::new(task.frames(count)?);
    let run = task.simulate(count, carry, |frames| meter.show(frames))?;
    meter.finish();
    let checked = if carry {
        run.check(&task)?;
        Some(count)
    } else if args.crash.is_empty() && task.coding.is_none() && !args.unchecked {
        let (per_rank, besides) = SHORT_VECTOR;
        let short = task.world.len() * per_rank + besides;
        let task = Task {
            options: Options { segment: Some(SHORT_SEGMENT), ..task.options },
            ..task.clone()
        };
        task.simulate(short, true, |_| ())?.check(&task)?;
        Some(short)
    } else {
        None
    };
    if let (true, Some((rank, error))) = (args.crash.is_empty(), run.failures().next()) {
        return Err(SimError::Failed { rank, error, seed: args.seed });
    }
    let text = if args.json {
        serde_json::to_string(&task.json(&run)).expect("plain numbers and names serialise") + "\n"
    } else {
        task.describe(&run, checked, started.elapsed()).expect("strings take any text")
    };
    match std::io::stdout().write_all(text.as_bytes()) {
        // The reader has seen enough.
        Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => Ok(()),
        result => Ok(result?),
    }
}

/// How far a long run has come: a bar on a terminal, a line now and then elsewhere.
#[derive(Debug)]
struct Meter {
    frames: u64,
    bar: Option<ProgressBar>,
    next_line: Instant,
}

impl Meter {
    const LINE_EVERY: Duration = Duration::from_secs(10);

    fn new(frames: u64) -> Self {
        let bar = std::io::stderr().is_terminal().then(|| {
            let style = ProgressStyle::with_template(
                "{bar:40} {human_pos} of {human_len} frames, {eta} left",
            )
            .expect("the template is well-formed");
            ProgressBar::new(frames).with_style(style)
        });
        Self { frames, bar, next_line: Instant::now() + Self::LINE_EVERY }
    }

    fn show(&mut self, done: u64) {
        match &self.bar {
            Some(bar) => bar.set_position(done),
            None if Instant::now() >= self.next_line => {
                eprintln!("farwire: {done} of {} frames simulated", self.frames);
                self.next_line = Instant::now() + Self::LINE_EVERY;
            }
            None => {}
        }
    }

    fn finish(&self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}

/// The flags, checked against each other.
#[derive(Clone, Debug)]
struct Task<'a> {
    args: &'a Args,
    world: WorldSize,
    network: Network,
    config: Config,
    options: Options,
    /// The algorithm that was asked for, or chosen.
    algorithm: Algorithm,
    /// The codec, if one is given.
    coding: Option<Coding>,
}

/// A codec that is simulated.
#[derive(Clone, Debug)]
struct Coding {
    codec: Arc<dyn MessageCodec>,
    speeds: CodingSpeeds,
    /// Whether sums are made on each host first.
    two_level: bool,
}

/// A finished run.
#[derive(Debug)]
struct Run {
    report: Report,
    shape: Shape,
    /// What became of each rank's calls.
    jobs: Vec<Vec<JobId>>,
    /// Each rank's input; empty where only lengths were carried.
    inputs: Vec<Vec<u8>>,
}

impl<'a> Task<'a> {
    fn new(args: &'a Args) -> Result<Self, SimError> {
        let &Args { ranks, size, dtype, bandwidth, latency, .. } = args;
        if !size.is_multiple_of(dtype.size()) {
            return Err(SimError::Fraction { size, dtype });
        }
        if args.op() == Kind::Message && ranks < 2 {
            return Err(SimError::TooFew(ranks, args.op()));
        }
        if let Some((rank, _)) = args.crash.iter().find(|(rank, _)| *rank >= ranks) {
            return Err(SimError::NoSuchRank { rank: *rank, ranks });
        }
        let segment_bytes = NonZeroUsize::new(args.segment).ok_or(SimError::EmptySegment)?;
        let crashes =
            args.crash.iter().map(|(rank, step)| Trouble::Crash { peer: Peer(*rank), step: *step });
        let speeds = args.speeds.as_deref().map(Speeds::read).transpose()?;
        let network = Network {
            bandwidth: bandwidth
                * speeds.as_ref().map_or(1.0, |speeds| speeds.line_share(bandwidth)),
            costs: match &speeds {
                Some(speeds) => speeds.costs(args.cores.is_some())?,
                None => Costs::default(),
            },
            cores: match (args.cores, args.host_cores) {
                (Some(cores), _) => Cores::Shared(cores.get()),
                (None, Some(cores)) => Cores::PerHost(cores.get()),
                (None, None) => Cores::Unlimited,
            },
            link: Link { latency, jitter: args.jitter, loss: args.loss, ..Link::IDEAL },
            window: args.window,
            detection: args.detection,
            hosts: args.hosts.as_ref().map(|hosts| hosts.deal(ranks)).transpose()?,
            troubles: crashes.collect(),
            seed: args.seed,
            ..Network::lan(ranks)
        };
        let links = Links { latency, bandwidth, ..Links::default() };
        let tuning = Tuning { segment_bytes, links, ..Tuning::default() };
        // Slow networks are slow, not stuck. A hang is found by the simulator, which sees that
        // nothing more will happen.
        let config = Config { tuning, deadline: Duration::MAX, ..Config::default() };
        let mut task = Self {
            args,
            world: network.world,
            network,
            config,
            options: Options { algorithm: args.algorithm, ..Options::default() },
            algorithm: Algorithm::Direct,
            coding: None,
        };
        // The short run that checks the result must use the algorithm that was chosen for the long
        // one.
        task.algorithm = task
            .plan(Rank(0), &task.calls(Rank(0), size / dtype.size())[0])?
            .fingerprint()
            .algorithm;
        task.options.algorithm = Some(task.algorithm);
        task.coding = args.coding(speeds.as_ref(), task.algorithm)?;
        Ok(task)
    }

    fn placement(&self) -> Placement {
        let hosts = self.network.hosts.as_deref().unwrap_or_default();
        Placement::new(hosts).unwrap_or_else(|| Placement::one_host(self.world))
    }

    /// What is called, for vectors of `count` elements.
    fn shape(&self, count: usize) -> Shape {
        let &Args { dtype, reduce, root, .. } = self.args;
        let hosts = self.network.hosts.clone().unwrap_or_default();
        Shape { root: Rank(root), hosts, ..Shape::even(self.world, count, dtype, reduce) }
    }

    fn calls(&self, rank: Rank, count: usize) -> Vec<Call> {
        self.shape(count).row(self.args.op(), rank).calls
    }

    fn plan(&self, rank: Rank, call: &Call) -> Result<Plan, CallError> {
        let tuning = &self.config.tuning;
        Plan::placed(CommId::WORLD, rank, &self.placement(), call, &self.options, tuning)
    }

    /// Frames of the whole run, all ranks together.
    fn frames(&self, count: usize) -> Result<u64, SimError> {
        let mut frames = 0;
        if let Some(coding) = &self.coding {
            let segment = self.config.tuning.segment_bytes.get();
            let models = self.world.ranks().map(|rank| self.model(coding, rank, count));
            return Ok(models.map(|model| model.frames(segment)).sum());
        }
        for rank in self.world.ranks() {
            for call in self.calls(rank, count) {
                let plan = self.plan(rank, &call)?;
                frames += plan
                    .others()
                    .map(|peer| plan.frames().map_or(0, |frames| frames.sends(peer) as u64))
                    .sum::<u64>();
            }
        }
        Ok(frames)
    }

    fn simulate(
        &self,
        count: usize,
        carry: bool,
        mut observe: impl FnMut(u64),
    ) -> Result<Run, SimError> {
        let mut rng = ChaCha8Rng::seed_from_u64(self.args.seed);
        let mut sim = Sim::with_config(self.network.clone(), self.config);
        sim.limit(Time(Duration::MAX / 2));
        if !carry {
            sim.carry_lengths();
        }
        let (mut jobs, mut inputs) = (Vec::new(), Vec::new());
        for rank in self.world.ranks() {
            if let Some(coding) = &self.coding {
                let submission = Submission::model(count, self.model(coding, rank, count));
                jobs.push(vec![sim.submit(Peer(rank.0), submission)]);
                inputs.push(Vec::new());
                continue;
            }
            let mine = self.calls(rank, count);
            let input_bytes = if carry { self.plan(rank, &mine[0])?.input_bytes() } else { 0 };
            let input = random_elements(self.args.dtype, input_bytes, &mut rng);
            let submit = |call: &Call| {
                let input =
                    if matches!(call, Call::Recv { .. }) { Vec::new() } else { input.clone() };
                let submission =
                    Submission { options: self.options, ..Submission::new(call.clone(), input) };
                sim.submit(Peer(rank.0), submission)
            };
            jobs.push(mine.iter().map(submit).collect());
            inputs.push(input);
        }
        let report = sim.run_observed(|progress| observe(progress.frames))?;
        Ok(Run { report, shape: self.shape(count), jobs, inputs })
    }

    fn model(&self, coding: &Coding, rank: Rank, count: usize) -> CodedModel {
        let Coding { codec, speeds, two_level } = coding;
        CodedModel::all_reduce(&**codec, speeds, count, rank, &self.placement(), *two_level)
    }

    fn json(&self, run: &Run) -> Json {
        let &Args { ranks, size, segment, seed, .. } = self.args;
        let op = self.args.op();
        Json {
            op: op.name(),
            codec: self.args.codec.to_string(),
            ranks,
            bytes: if op.has_elements() { size } else { 0 },
            algorithm: self.algorithm.name(),
            segment,
            virtual_ms: run.report.ended.0.as_secs_f64() * 1e3,
            wire_bytes_max: run.report.wire_bytes_max(),
            wire_bytes_mean: run.report.wire_bytes_mean(),
            rounds: run.report.rounds,
            bound_ms: self.bound().as_secs_f64() * 1e3,
            failed_ranks: run.failures().map(|(rank, _)| rank.0).collect(),
            seed,
        }
    }

    /// The run in words and a picture.
    fn describe(
        &self,
        run: &Run,
        checked: Option<usize>,
        took: Duration,
    ) -> Result<String, fmt::Error> {
        let mut out = String::new();
        let op = self.args.op();
        let &Args { ranks, size, bandwidth, latency, dtype, reduce, .. } = self.args;
        let what = match op {
            _ if !op.has_elements() => String::new(),
            _ if op.reduces() => format!(" ({reduce} of {dtype}) of {}", show_bytes(size as f64)),
            _ => format!(" ({dtype}) of {}", show_bytes(size as f64)),
        };
        let chosen = if self.args.algorithm.is_some() { "" } else { ", chosen" };
        let plural = if ranks == 1 { "" } else { "s" };
        let codec = match &self.coding {
            Some(_) => format!(", through {}", self.args.codec),
            None => String::new(),
        };
        writeln!(out, "{op}{what} over {ranks} rank{plural}, {}{chosen}{codec}", self.algorithm)?;
        let each = match &self.network.hosts {
            Some(_) => "each host",
            None => "each",
        };
        writeln!(
            out,
            "{each} sends and receives {}, {} from the others",
            show_rate(bandwidth),
            show_time(latency)
        )?;

        let report = &run.report;
        let (ended, bound) = (report.ended.0, self.bound());
        writeln!(out)?;
        write!(out, "  virtual time   {}", show_time(ended))?;
        if !bound.is_zero() && run.failures().next().is_none() && self.coding.is_none() {
            let ratio = ended.as_secs_f64() / bound.as_secs_f64();
            write!(out, "   ({ratio:.3} × the lower bound of {})", show_time(bound))?;
        }
        writeln!(out)?;
        writeln!(
            out,
            "  sent per rank  {} at most, {} on average, headers included",
            show_bytes(report.wire_bytes_max() as f64),
            show_bytes(report.wire_bytes_mean())
        )?;
        writeln!(out, "  rounds         {}", report.rounds)?;
        self.draw(&mut out, report)?;

        writeln!(out)?;
        for (rank, error) in run.failures() {
            writeln!(out, "  {rank}: {error}")?;
        }
        for (rank, step) in &self.args.crash {
            let steps = report.ranks[*rank as usize].steps;
            if steps < *step {
                writeln!(out, "  rank {rank} did not crash: it took only {steps} steps")?;
            }
        }
        let whose =
            if run.failures().next().is_some() { "returned result" } else { "rank's result" };
        match checked {
            _ if !op.has_elements() => {}
            Some(count) if count == size / dtype.size() => {
                writeln!(
                    out,
                    "  checked: every {whose} is right, bit for bit, on {count} random elements"
                )?;
            }
            Some(count) => {
                writeln!(out, "  checked in a run of its own, on {count} random elements:")?;
                writeln!(out, "           every {whose} is right, bit for bit")?;
            }
            None if self.coding.is_some() => writeln!(out, "  not checked: only lengths travel")?,
            None if self.args.unchecked => writeln!(out, "  not checked, as asked")?,
            None => writeln!(out, "  not checked: too long to carry its elements")?,
        }
        writeln!(out, "  simulated in {} (seed {})", show_time(took), self.args.seed)?;
        Ok(out)
    }

    /// The least time for the dense vector at full bandwidth, headers not counted.
    fn bound(&self) -> Duration {
        let network = Network { bandwidth: self.args.bandwidth, ..self.network.clone() };
        lower_bound(self.args.op(), self.args.size, &network)
    }

    /// When each rank was sending, as a picture.
    fn draw(&self, out: &mut String, report: &Report) -> fmt::Result {
        let end = report.ended.0;
        if end.is_zero() || report.wire_bytes_max() == 0 {
            return Ok(());
        }
        writeln!(out, "\n  who was sending, from start to end")?;
        for (stats, rank) in report.ranks.iter().zip(self.world.ranks()).take(DRAWN_RANKS) {
            let at = |column: u32| Time(end.mul_f64(f64::from(column) / f64::from(DRAWN_WIDTH)));
            let cell = |column| match stats.utilisation(at(column), at(column + 1)) {
                share if share < 0.05 => ' ',
                share if share < 0.35 => '░',
                share if share < 0.65 => '▒',
                share if share < 0.95 => '▓',
                _ => '█',
            };
            let row: String = (0..DRAWN_WIDTH).map(cell).collect();
            let share = 100.0 * stats.utilisation(Time::ZERO, Time(end));
            writeln!(out, "  {:>8} ▕{row}▏ {share:3.0} %", rank.to_string())?;
        }
        if let Some(more) = self.world.len().checked_sub(DRAWN_RANKS + 1) {
            writeln!(out, "  … and {} more", more + 1)?;
        }
        Ok(())
    }
}

impl Run {
    /// Ranks whose call failed, and why. (A rank that crashed has no error of its own.)
    fn failures(&self) -> impl Iterator<Item = (Rank, String)> {
        self.jobs.iter().zip((0..).map(Rank)).filter_map(|(jobs, rank)| {
            jobs.iter().find_map(|job| match &self.report.job(*job).end {
                JobEnd::Failed { error, .. } => Some((rank, error.to_string())),
                JobEnd::Crashed => Some((rank, "crashed, as asked".to_owned())),
                _ => None,
            })
        })
    }

    /// Compares every result that was returned with the oracle's.
    fn check(&self, task: &Task<'_>) -> Result<(), SimError> {
        let (op, seed) = (task.args.op(), task.args.seed);
        let expected = oracle::results(op, &self.shape, task.algorithm, &self.inputs);
        for ((jobs, expected), rank) in self.jobs.iter().zip(expected).zip((0..).map(Rank)) {
            let job = jobs.last().expect("every rank makes a call");
            // With crashes, some ranks have no result; without, all have one.
            let right = match self.report.job(*job).result() {
                Some(result) => result == expected,
                None => !task.args.crash.is_empty(),
            };
            if !right {
                return Err(SimError::Wrong { op, rank, seed });
            }
        }
        Ok(())
    }
}

/// Random elements; floats between −1 and 1.
fn random_elements(dtype: DType, bytes: usize, rng: &mut ChaCha8Rng) -> Vec<u8> {
    if !dtype.is_float() {
        return (0..bytes).map(|_| rng.random()).collect();
    }
    let mut element = || {
        with_type!(dtype, T => {
            bytemuck::bytes_of(&T::cast(rng.random_range(-1.0..1.0f32).into())).to_vec()
        })
    };
    (0..bytes / dtype.size()).flat_map(|_| element()).collect()
}

/// `RANK@STEP`.
fn crash(text: &str) -> Result<(u32, u64), String> {
    let parsed = text
        .split_once('@')
        .and_then(|(rank, step)| Some((rank.parse().ok()?, step.parse().ok()?)));
    parsed.ok_or_else(|| format!("`{text}` is not a crash; write RANK@STEP, for example 2@40"))
}
