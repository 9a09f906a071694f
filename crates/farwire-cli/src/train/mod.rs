//! `farwire train`: trains a GPT on this machine or as one rank of a job.
//!
//! Without a launcher it starts its own ranks, as processes of this same command. Rank 0 shows
//! progress ([`view`]) and writes the report ([`report`]).

mod elastic;
mod files;
mod report;
mod view;

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicI32, Ordering};
use std::time::{Duration, Instant};

use farwire::{CodecChoice, Communicator, EnvError, Place, ReduceOp};
use farwire_train::gpt::{Config, Writer};
use farwire_train::{
    Library, OnNan, PhaseIn, Schedule, Settings, StepReport, TrainError, Trainer, embedded, tell,
};

use crate::device::Device;
use crate::launch::{
    ElasticJob, Job, JobOutput, LaunchError, MISTAKE, Wishes, hold_port, random_name, say_error,
};
use crate::named::{codec_help, named};
use crate::units;
use files::Held;
use view::{Run, View};

/// What the model is computed with, on the CPU. Only this and the next function name a tensor
/// library.
const CPU: &dyn Library = &farwire_candle::Candle;

/// The same, on the device that was asked for.
fn library(args: &Args, comm: &Communicator) -> Result<Box<dyn Library>, TrainCommandError> {
    match args.device {
        Device::Cpu => Ok(Box::new(farwire_candle::Candle)),
        #[cfg(feature = "train-cuda")]
        Device::Cuda => {
            let open = || farwire_candle::CandleCuda::new(crate::device::card_of(comm)?);
            Ok(Box::new(open().map_err(TrainError::from)?))
        }
        #[cfg(not(feature = "train-cuda"))]
        Device::Cuda => {
            let _ = comm;
            Err(TrainCommandError::NoCuda)
        }
    }
}

/// How long ranks have to write a checkpoint once they are asked to end.
const GRACE: Duration = Duration::from_secs(60);
/// Bytes of text that the model writes at the end.
const SAMPLE: usize = 240;

/// Train a GPT over several ranks.
///
/// Without a launcher it starts its ranks here. Under a launcher (`farwire launch`, torchrun,
/// mpirun, srun) it is one rank of the job. The model learns to predict bytes: those of a file, or
/// of farwire's own source. At the end the command shows a summary and a sample of what the model
/// writes, and leaves a report with plots.
///
/// A signal (Ctrl-C, SIGTERM, SIGHUP) ends the run after the step at hand, with a checkpoint if
/// --checkpoint is given. The exit code is then 128 plus the signal's number, as in shells: 130
/// after Ctrl-C. A second signal ends the run at once.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  farwire train                                 4 ranks here, data parallel
  farwire train --compare none,int8,topk:0.01   what compression costs and saves
  farwire train --codec auto                    compressed where that is faster
  farwire train --ranks 8 --dp 2 --tp 2 --pp 2 --micro-batches 4
  farwire train --ranks 2 --device cuda --width 1024 --heads 16 --codec topk:64/4096
  farwire train --data book.txt --steps 2000 --checkpoint runs/book
  farwire train --data book.txt --steps 2000 --checkpoint runs/book --resume
  farwire launch -n 4 -- farwire train --json   as ranks of a launcher's job
  farwire launch --elastic -n 4 -- farwire train --elastic
                                        others replace ranks that die
  farwire launch --elastic -n 4 -- farwire train --elastic --tp 2
                                        the same, by whole replicas of 2 ranks")]
pub(crate) struct Args {
    /// Ranks to start here. Default: 4, if there is no launcher.
    #[arg(short = 'n', long, value_parser = clap::value_parser!(u32).range(1..=256))]
    ranks: Option<u32>,
    /// Replicas of the model, which share the batch (data parallel). Default: as many as the ranks
    /// make.
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..))]
    dp: Option<u32>,
    /// Ranks that share each layer (tensor parallel).
    #[arg(long, default_value = "1", value_parser = clap::value_parser!(u32).range(1..))]
    tp: u32,
    /// Stages of the pipeline, each with some of the layers (pipeline parallel).
    #[arg(long, default_value = "1", value_parser = clap::value_parser!(u32).range(1..))]
    pp: u32,
    /// Parts of each replica's batch, which pass through the pipeline one after the other. Their
    /// gradients add up.
    #[arg(long, default_value = "1", value_parser = clap::value_parser!(u32).range(1..))]
    micro_batches: u32,
    /// Pipeline schedule: gpipe, 1f1b, or interleaved:2 (with the number of chunks per rank).
    #[arg(long, default_value_t)]
    schedule: Schedule,
    /// How gradients are compressed on the wire, with error feedback; --help lists the codecs.
    #[arg(long, default_value = "int8", long_help = codec_help("Biases and norms are not compressed."))]
    codec: CodecChoice,
    /// Steps at the start without compression. Default: 0 for codecs that lose little, such as
    /// int8; an eighth of the run for others, such as topk:0.01 or sign. A resumed run keeps what
    /// it began with.
    #[arg(long, value_name = "STEPS", allow_negative_numbers = true)]
    dense_steps: Option<u32>,
    /// Steps, after --dense-steps, in which a sparse codec goes from keeping a quarter of the
    /// elements to keeping its own share. Default: three quarters of the run.
    #[arg(long, value_name = "STEPS", allow_negative_numbers = true)]
    falling_steps: Option<u32>,
    /// Train once with each of these codecs, from the same start, and put all runs into one report.
    #[arg(long, value_name = "CODEC,CODEC", value_parser = codecs, conflicts_with_all = ["codec", "checkpoint"])]
    compare: Option<Codecs>,
    /// Number of steps of the run.
    #[arg(long, default_value = "300", value_parser = clap::value_parser!(u32).range(1..))]
    steps: u32,
    /// Sequences per step, over all replicas.
    #[arg(long, default_value = "16", value_parser = clap::value_parser!(u32).range(1..))]
    batch: u32,
    /// Peak learning rate.
    #[arg(long, default_value = "0.003")]
    lr: f64,
    /// Random seed for the first weights and the order of the data.
    #[arg(long, default_value = "1")]
    seed: u64,
    /// File to learn from, up to 4 GiB, on rank 0's machine. Default: some of farwire's own source.
    #[arg(long, value_name = "FILE")]
    data: Option<PathBuf>,
    /// Layers of the model (transformer blocks).
    #[arg(long, default_value = "4", value_parser = clap::value_parser!(u32).range(1..))]
    layers: u32,
    /// Attention heads per layer.
    #[arg(long, default_value = "4", value_parser = clap::value_parser!(u32).range(1..))]
    heads: u32,
    /// Hidden size.
    #[arg(long, default_value = "128", value_parser = clap::value_parser!(u32).range(1..))]
    width: u32,
    /// Context length, in bytes.
    #[arg(long, default_value = "64", value_parser = clap::value_parser!(u32).range(1..))]
    context: u32,
    /// Where the model is computed: on the CPU, or on NVIDIA cards, which the ranks of a host take
    /// in turn. On cards, gradients are compressed there. `cuda` needs a farwire that was built
    /// with the feature train-cuda; see docs/gpu.md.
    #[arg(long, default_value = "cpu", value_parser = named::<Device, _>(Device::NAMES))]
    device: Device,
    /// Size of a bucket of gradients that are sent together, such as 1MiB.
    #[arg(long, default_value = "1MiB", value_parser = units::size)]
    bucket: usize,
    /// Keep the optimizer's state of each parameter on one replica only (ZeRO-1).
    #[arg(long)]
    shard_optimizer: bool,
    /// What to do about a loss or gradient that is NaN or infinite: stop, or skip the step on all
    /// ranks (100 skips in a row are an error). Weights are never updated with such a value.
    #[arg(long, value_name = "stop|skip", default_value_t)]
    on_nan: OnNan,
    /// Start from these weights: a safetensors file of the whole model, on rank 0's machine.
    #[arg(long, value_name = "FILE", conflicts_with = "resume")]
    init: Option<PathBuf>,
    /// Folder for checkpoints, on rank 0's machine; the newest two are kept. With --elastic rank 0
    /// may move, so use a folder that all machines share. A new run needs a folder without
    /// checkpoints, and no other job can use the folder while this one runs.
    #[arg(long, value_name = "DIR")]
    checkpoint: Option<PathBuf>,
    /// Steps between checkpoints; there is always one at the end.
    #[arg(long, default_value = "100", value_parser = clap::value_parser!(u32).range(1..), requires = "checkpoint")]
    checkpoint_every: u32,
    /// Continue from the newest undamaged checkpoint in --checkpoint, with the same data, seed and
    /// settings.
    #[arg(long, requires = "checkpoint")]
    resume: bool,
    /// Go on when ranks are lost, and let others join (--join). The learning rate stays as it is,
    /// and so does the batch, or as near as the ranks can share it evenly. With --tp or --pp there
    /// are as many whole replicas as the ranks make, and ranks left over wait (--wait). A rank that
    /// gets SIGUSR1 leaves in good order, and the others go on.
    #[arg(long, conflicts_with_all = ["compare", "init"])]
    elastic: bool,
    /// How long a rank that is left over in an elastic run waits for others to make a whole
    /// replica, before it leaves.
    #[arg(long, value_name = "TIME", default_value = "60s", value_parser = units::time)]
    wait: Duration,
    /// Join a run that was started with --elastic, at the address of any of its ranks, or of
    /// several, separated by commas. Give the same model, data and steps. FARWIRE_JOIN, which
    /// `farwire launch --elastic` sets, does the same.
    #[arg(long, value_name = "HOST:PORT", conflicts_with_all = ["compare", "init", "ranks", "resume"])]
    join: Option<String>,
    /// End the job if, after any step, replicas differ in a bit, or a gradient was lost or made up.
    /// For tests: the check takes as long as a small step.
    #[arg(long)]
    audit: bool,
    /// Where to write the report.
    #[arg(long, value_name = "FILE", default_value = "report.html")]
    report: PathBuf,
    /// Print one JSON object per step, and one at the end, instead of progress.
    #[arg(long)]
    json: bool,
}

/// Several codecs.
#[derive(Clone, Debug)]
struct Codecs(Vec<CodecChoice>);

/// Codecs separated by commas. Some contain commas themselves: an option belongs to the codec
/// before it.
fn codecs(text: &str) -> Result<Codecs, String> {
    let mut names: Vec<String> = Vec::new();
    for part in text.split(',') {
        match names.last_mut() {
            Some(last) if part.contains('=') && !part.contains(':') => {
                last.push(',');
                last.push_str(part);
            }
            _ => names.push(part.to_owned()),
        }
    }
    let parsed: Result<Vec<CodecChoice>, _> = names.iter().map(|name| name.parse()).collect();
    parsed.map(Codecs).map_err(|error| error.to_string())
}

/// Why training stopped, or did not start.
#[derive(Debug, thiserror::Error)]
pub(crate) enum TrainCommandError {
    #[error("a launcher has started {world} ranks, not {ranks}; leave --ranks out")]
    Ranks { world: u32, ranks: u32 },
    #[error("--tp {tp} × --pp {pp} does not divide {ranks} ranks; change one of them")]
    Layout { ranks: u32, tp: u32, pp: u32 },
    #[error(
        "--dp {dp} × --tp {tp} × --pp {pp} is not {ranks} ranks; change one of them, or leave --dp out"
    )]
    Product { ranks: u32, dp: u32, tp: u32, pp: u32 },
    #[error(
        "--dp does not work with --elastic: there are always as many replicas as the ranks make; leave \
         it out"
    )]
    ElasticReplicas,
    #[error(
        "--shard-optimizer does not work with --elastic: a lost rank would take the only copy of its \
         share of the optimizer's state with it; leave one of them out"
    )]
    ElasticShards,
    #[error(
        "--elastic needs a named codec: what `auto` measures depends on which ranks are \
         there; choose one with --codec"
    )]
    ElasticCodec,
    #[error(
        "ranks of this job may come and go (`farwire launch --elastic`), but this run cannot go on \
         without one; add --elastic after `train`, or leave it out of `launch`"
    )]
    ElasticForgotten,
    #[error("{source}: {checkpoint}")]
    NoReplica { source: Box<TrainError>, checkpoint: String },
    #[cfg(not(feature = "train-cuda"))]
    #[error(
        "this farwire cannot train on cards: it was built without the feature train-cuda; build it with \
         `cargo build --release -p farwire-cli --features train-cuda`, which needs nvcc (of the CUDA \
         toolkit, or put together by scripts/cuda_toolkit.sh), or leave --device out"
    )]
    NoCuda,
    #[error("--elastic trains on the CPU so far; leave --device out, or --elastic")]
    ElasticDevice,
    #[error("could not read {path}: {source}")]
    Data { path: PathBuf, source: std::io::Error },
    #[error("{path} is {what}, not a regular file; copy its content to a file first")]
    NoFile { path: PathBuf, what: &'static str },
    #[error("{path} has more than {limit} GiB; give a part of it")]
    DataTooLong { path: PathBuf, limit: u64 },
    #[error("no report could be written to {path}: {source}; choose another place with --report")]
    ReportPlace { path: PathBuf, source: std::io::Error },
    #[error(
        "could not write the report to {path}: {source}; training itself has finished, and its results are printed above"
    )]
    Report { path: PathBuf, source: std::io::Error },
    #[error(
        "{0}: another job is using this checkpoint folder; wait until it ends, or use another folder"
    )]
    Held(PathBuf),
    #[error(
        "these sizes need at least {needed} of memory here, but this machine has {memory}; use a smaller \
         --width, --context or --batch, fewer --layers, or more machines"
    )]
    Memory { needed: String, memory: String },
    #[error("could not read the history of steps in the checkpoint: {0}; start without --resume")]
    Notes(serde_json::Error),
    #[error("could not write the result: {0}")]
    Output(#[from] std::io::Error),
    #[error(transparent)]
    Env(#[from] EnvError),
    #[error(transparent)]
    Launch(#[from] LaunchError),
    #[error(transparent)]
    Train(#[from] TrainError),
    #[error(transparent)]
    Farwire(#[from] farwire::Error),
}

/// Runs the command.
pub(crate) fn run(args: &Args) -> Result<ExitCode, TrainCommandError> {
    try_run(args).or_else(|error| match is_in_elastic_job() && error.is_mistake() {
        true => {
            say_error(&error);
            Ok(ExitCode::from(MISTAKE))
        }
        false => Err(error),
    })
}

/// Whether a launcher replaces ranks that end.
fn is_in_elastic_job() -> bool {
    std::env::var("FARWIRE_ELASTIC").is_ok_and(|elastic| elastic == "1")
}

fn try_run(args: &Args) -> Result<ExitCode, TrainCommandError> {
    #[cfg(not(feature = "train-cuda"))]
    if args.device == Device::Cuda {
        return Err(TrainCommandError::NoCuda);
    }
    let join = args.join.clone().or_else(|| std::env::var("FARWIRE_JOIN").ok());
    if args.elastic || join.is_some() {
        args.check_elastic()?;
    }
    if let Some(address) = join {
        let lines = args.lines(&args.elastic_settings()?);
        return elastic::join(args, &address, lines);
    }
    match Place::from_env() {
        Ok(place) => {
            let world = place.world.get();
            if let Some(ranks) = args.ranks.filter(|ranks| *ranks != world) {
                return Err(TrainCommandError::Ranks { world, ranks });
            }
            let here = std::env::var("LOCAL_WORLD_SIZE").ok().and_then(|ranks| ranks.parse().ok());
            if args.elastic {
                args.settings(world, args.codec.clone())?; // they must make whole replicas
                let lines = args.lines(&args.elastic_settings()?);
                return elastic::start(args, lines);
            }
            if is_in_elastic_job() {
                return Err(TrainCommandError::ElasticForgotten);
            }
            args.check(world, here.unwrap_or(1))?;
            let lines = args.lines(&args.settings(world, args.codec.clone())?);
            be_a_rank(args, &Communicator::builder().agree_on(lines).join()?)
        }
        Err(EnvError::Nothing) => start_ranks(args, args.ranks.unwrap_or(4)),
        Err(error) => Err(error.into()),
    }
}

impl TrainCommandError {
    /// Whether another process, started like this one, would fail like it.
    fn is_mistake(&self) -> bool {
        match self {
            Self::Farwire(_) | Self::Output(_) | Self::Report { .. } | Self::NoReplica { .. } => {
                false
            }
            Self::Train(error) => matches!(
                error,
                TrainError::Settings(_)
                    | TrainError::Told(_)
                    | TrainError::Checkpoint { .. }
                    | TrainError::BadCheckpoint { .. }
                    | TrainError::NotFinite { .. }
                    | TrainError::TooManySkipped { .. }
            ),
            _ => true,
        }
    }
}

impl Args {
    /// Fails if this machine cannot run `here` ranks of the world with these flags.
    fn check(&self, world: u32, here: u32) -> Result<(), TrainCommandError> {
        let settings = self.settings(world, self.codec.clone())?;
        settings.check()?;
        if self.device != Device::Cpu {
            return Ok(()); // most of the memory is the cards'
        }
        let needed = settings.bytes_per_rank() * f64::from(here);
        match memory() {
            Some(memory) if needed > memory => Err(TrainCommandError::Memory {
                needed: units::show_bytes(needed),
                memory: units::show_bytes(memory),
            }),
            _ => Ok(()),
        }
    }

    /// Fails if a run with these flags cannot have ranks that come and go.
    fn check_elastic(&self) -> Result<(), TrainCommandError> {
        if self.dp.is_some() {
            return Err(TrainCommandError::ElasticReplicas);
        }
        if self.shard_optimizer {
            return Err(TrainCommandError::ElasticShards);
        }
        if !matches!(self.codec, CodecChoice::Given(_)) {
            return Err(TrainCommandError::ElasticCodec);
        }
        if self.device != Device::Cpu {
            return Err(TrainCommandError::ElasticDevice);
        }
        Ok(())
    }

    /// The settings of one replica: how many there are depends on the ranks that come and go.
    fn elastic_settings(&self) -> Result<Settings, TrainCommandError> {
        self.settings(self.tp.saturating_mul(self.pp), self.codec.clone())
    }

    /// What must be the same on all ranks. That includes the device, since replicas that compute in
    /// different ways would come to differ.
    fn lines(&self, settings: &Settings) -> String {
        let audit = if self.audit { "audit every step\n" } else { "" };
        format!("{}device {}\n{audit}", settings.lines(), self.device.name())
    }

    fn settings(&self, ranks: u32, codec: CodecChoice) -> Result<Settings, TrainCommandError> {
        let (tp, pp) = (self.tp, self.pp);
        let shared = u64::from(tp) * u64::from(pp);
        let dp = match self.dp {
            Some(dp) if u64::from(dp).saturating_mul(shared) != u64::from(ranks) => {
                return Err(TrainCommandError::Product { ranks, dp, tp, pp });
            }
            Some(dp) => dp,
            None if !u64::from(ranks).is_multiple_of(shared) => {
                return Err(TrainCommandError::Layout { ranks, tp, pp });
            }
            None => (u64::from(ranks) / shared) as u32,
        };
        let PhaseIn { dense, falling } = PhaseIn::over(codec.clone(), u64::from(self.steps));
        Ok(Settings {
            model: Config {
                layers: self.layers as usize,
                heads: self.heads as usize,
                width: self.width as usize,
                context: self.context as usize,
            },
            dp: dp as usize,
            tp: tp as usize,
            pp: pp as usize,
            schedule: self.schedule,
            micro_batches: self.micro_batches as usize,
            batch: self.batch as usize,
            steps: self.steps as usize,
            learning_rate: self.lr,
            seed: self.seed,
            bucket_bytes: self.bucket,
            codec,
            dense_steps: self.dense_steps.map_or(dense as usize, |steps| steps as usize),
            falling_steps: self.falling_steps.map_or(falling as usize, |steps| steps as usize),
            shard_optimizer: self.shard_optimizer,
            on_nan: self.on_nan,
            ..Settings::default()
        })
    }
}

/// Starts this same command again, once per rank.
fn start_ranks(args: &Args, ranks: u32) -> Result<ExitCode, TrainCommandError> {
    // Before any rank is started.
    if !args.elastic {
        args.check(ranks, ranks)?;
    }
    if let Some(path) = &args.data {
        files::open_data(path)?;
    }
    let system = |source| LaunchError::System { what: "could not find this program", source };
    let mut command = vec![std::env::current_exe().map_err(system)?.into_os_string()];
    command.extend(std::env::args_os().skip(1));
    let job = Job {
        command,
        ranks,
        first_rank: 0,
        world: ranks,
        master: hold_port()?,
        name: Some(random_name()),
        token: Some(farwire::Token::generate()),
        variables: Vec::new(),
        output: JobOutput::Theirs,
        grace: GRACE,
        hosts: Vec::new(),
        elastic: args.elastic.then_some(ElasticJob { min: 1, restarts: 0 }),
    };
    Ok(job.run()?)
}

/// The memory of this machine in bytes, with its swap space, or what a container may have of it;
/// `None` if unknown.
fn memory() -> Option<f64> {
    let file = std::fs::read_to_string("/proc/meminfo").ok()?;
    let of = |name: &str| {
        let line = file.lines().find_map(|line| line.strip_prefix(name))?;
        line.trim_end_matches("kB").trim().parse::<f64>().ok().map(|kib| 1024.0 * kib)
    };
    let all = of("MemTotal:")? + of("SwapTotal:").unwrap_or(0.0);
    let limit = std::fs::read_to_string("/sys/fs/cgroup/memory.max").ok();
    let limit = limit.and_then(|limit| limit.trim().parse::<f64>().ok());
    Some(limit.map_or(all, |limit| limit.min(all)))
}

/// Trains with each codec, as one rank of many.
fn be_a_rank(args: &Args, comm: &Communicator) -> Result<ExitCode, TrainCommandError> {
    let stop = watch_for_signals()?;
    let is_first = comm.rank() == 0;
    tell(comm, if is_first { files::check_report(&args.report) } else { Ok(()) })?;
    let Some(text) = text(args, comm, &stop)? else { return stopped(comm, &stop) };
    let Codecs(codecs) = args.compare.clone().unwrap_or_else(|| Codecs(vec![args.codec.clone()]));
    let mut view = View::new(is_first, args.json);
    let mut runs = Vec::new();
    for codec in codecs {
        let settings = args.settings(comm.size() as u32, codec)?;
        let run = train(args, comm, settings, &text, &stop, &mut view)?;
        let stopped = run.stopped;
        runs.push(run);
        if stopped {
            break;
        }
    }
    let (mut written, mut shown) = (Ok(()), Ok(()));
    if is_first {
        written = std::fs::write(&args.report, report::html(&runs));
        let report = written.is_ok().then_some(args.report.as_path());
        shown = view.summary(&runs, report, args.checkpoint.as_deref());
    }
    // Rank 0 is still writing while the others are done; they stay so that none is taken for lost.
    comm.barrier().wait()?;
    let is_stopped = runs.iter().any(|run| run.stopped);
    let code = if is_stopped { stopped(comm, &stop)? } else { ExitCode::SUCCESS };
    shown?;
    written.map_err(|source| TrainCommandError::Report { path: args.report.clone(), source })?;
    Ok(code)
}

/// The code with which all ranks end after a signal, which not all of them need to have got.
fn stopped(comm: &Communicator, stop: &AtomicI32) -> Result<ExitCode, TrainCommandError> {
    let mine = stop.load(Ordering::Relaxed);
    let signal = comm.all_reduce(vec![mine], ReduceOp::Max).wait()?[0];
    Ok(ExitCode::from(128 + signal as u8))
}

fn train(
    args: &Args,
    comm: &Communicator,
    settings: Settings,
    text: &[u8],
    stop: &AtomicI32,
    view: &mut View,
) -> Result<Run, TrainCommandError> {
    let steps = settings.steps;
    let library = library(args, comm)?;
    let mut trainer = Trainer::new(&*library, comm, settings, text)?;
    trainer.set_audited(args.audit);
    if let Some(path) = &args.init {
        trainer.load_weights(path)?;
    }
    let (_held, before) = match &args.checkpoint {
        Some(dir) => keep_checkpoints(&mut trainer, comm, dir, args.resume)?,
        None => (None, Vec::new()),
    };
    let mut run = Run { steps: before, ..Run::new(&trainer) };
    view.begin(&run, &trainer)?;
    let moved = |trainer: &Trainer| trainer.steps_done() - trainer.steps_skipped();
    let mut saved = None;
    while trainer.steps_done() < steps && !run.stopped {
        let report = trainer.step(stop.load(Ordering::Relaxed) != 0)?;
        run.stopped = report.stop;
        run.seconds += report.times.total;
        run.skipped = trainer.steps_skipped();
        run.done = trainer.steps_done();
        view.step(&run, &report)?;
        run.steps.push(report);
        if args.audit {
            trainer.audit()?;
        }
        let done = trainer.steps_done();
        let last = done == steps || run.stopped;
        if let Some(dir) = &args.checkpoint
            // While every step is skipped, new checkpoints would only push out the good ones.
            && (last
                || done.is_multiple_of(args.checkpoint_every as usize) && saved != Some(moved(&trainer)))
        {
            save(&mut trainer, dir, &run)?;
            saved = Some(moved(&trainer));
        }
    }
    run.trace = trainer.trace().to_vec();
    view.end();
    if let (Some(weights), false) = (trainer.gathered_weights()?, run.stopped) {
        let mut writer = Writer::new(&*library, weights, run.settings.model)?;
        let sample = writer.write("The ", SAMPLE, 0.7, run.settings.seed)?;
        // What it writes must not move the cursor.
        run.sample = sample.chars().filter(|c| !c.is_control() || *c == '\n').collect();
    }
    Ok(run)
}

/// Takes the folder for this run, and resumes from a checkpoint in it if asked to. Returns a hold
/// on the folder, which lasts as long as the value lives, and the steps so far.
fn keep_checkpoints(
    trainer: &mut Trainer,
    comm: &Communicator,
    dir: &Path,
    resume: bool,
) -> Result<(Option<Held>, Vec<StepReport>), TrainCommandError> {
    let hold = |held: Option<Held>| {
        let is_missing = comm.rank() == 0 && held.is_none();
        tell(comm, if is_missing { files::hold(dir) } else { Ok(held) })
    };
    let held = hold(None)?;
    let steps = if resume { go_on(trainer, dir)? } else { Vec::new() };
    if !resume {
        trainer.prepare_checkpoints(dir)?;
    }
    // Again, if there was no folder before.
    Ok((hold(held)?, steps))
}

/// Resumes from a checkpoint. Returns its steps so far.
fn go_on(trainer: &mut Trainer, dir: &Path) -> Result<Vec<StepReport>, TrainCommandError> {
    let about = trainer.resume(dir)?;
    if trainer.mesh().world().rank() == 0 {
        let name = about.name();
        for damaged in &about.damaged {
            eprintln!("checkpoint {damaged}; resuming from {name}");
        }
    }
    if about.notes.is_null() {
        return Ok(Vec::new()); // of a program that keeps no notes
    }
    serde_json::from_value(about.notes).map_err(TrainCommandError::Notes)
}

fn save(trainer: &mut Trainer, dir: &Path, run: &Run) -> Result<(), TrainCommandError> {
    let notes = serde_json::to_value(&run.steps).unwrap_or_default();
    Ok(trainer.save(dir, notes)?)
}

/// The text to learn from, which rank 0 reads and gives to the others; `None` if it is asked to end
/// first.
fn text(
    args: &Args,
    comm: &Communicator,
    stop: &AtomicI32,
) -> Result<Option<Vec<u8>>, TrainCommandError> {
    let Some(path) = &args.data else { return Ok(Some(embedded())) };
    let is_first = comm.rank() == 0;
    let mine = tell(comm, if is_first { files::read_data(path, stop) } else { Ok(None) })?;
    // A special length stands for a wish to end, so that all ranks end alike.
    let length = is_first.then(|| vec![mine.as_ref().map_or(u64::MAX, |text| text.len() as u64)]);
    match comm.broadcast(length, 1, 0).wait()?[0] {
        u64::MAX => Ok(None),
        length => Ok(Some(comm.broadcast(mine, length as usize, 0).wait()?)),
    }
}

/// Two signals within this time are one wish: some programs signal a process and then its group.
const ONE_WISH: Duration = Duration::from_secs(1);

/// The signal that has asked this process to end, or 0. A later signal ends it at once.
fn watch_for_signals() -> Result<Arc<AtomicI32>, TrainCommandError> {
    let stop = Arc::new(AtomicI32::new(0));
    let asked = stop.clone();
    let system = |source| LaunchError::System { what: "could not watch for signals", source };
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(system)?;
    let guard = runtime.enter();
    let mut wishes = Wishes::new().map_err(system)?;
    drop(guard);
    let watch = move || {
        runtime.block_on(async {
            let mut first: Option<Instant> = None;
            loop {
                let signal = wishes.next().await.as_raw();
                let _ = asked.compare_exchange(0, signal, Ordering::Relaxed, Ordering::Relaxed);
                if first.get_or_insert_with(Instant::now).elapsed() > ONE_WISH {
                    std::process::exit(128 + signal);
                }
            }
        })
    };
    std::thread::Builder::new().name("farwire-signals".into()).spawn(watch).map_err(system)?;
    Ok(stop)
}
