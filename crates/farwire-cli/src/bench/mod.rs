//! `farwire bench`: how fast an operation is, here and now.

#[cfg(feature = "cuda")]
mod all_reduce_cuda;
mod bare;
mod codec;
#[cfg(feature = "cuda")]
mod codec_cuda;
mod pattern;

use std::fmt;
use std::io::Write;
use std::num::NonZeroUsize;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use farwire::{
    CodecChoice, CodecPolicy, CodecSpec, Communicator, Compressor, Config, Element, Error,
    ErrorFeedback, Float, LinkChoice, Options, Placement, cpu_time,
};
use farwire_codec::Context;
use farwire_codec::collective::{CodedCollective, Collective, Floats, Order};
use farwire_proto::{
    Algorithm, Call, CallError, Counts, DType, Kind, Rank, ReduceOp, UnknownName, WorldSize,
    with_type,
};
use farwire_sim::kinds::Shape;
use half::{bf16, f16};
use serde::Serialize;

use crate::device::Device;
use crate::hosts::{HostsArg, WrongHosts};
use crate::launch::{GRACE, Job, JobOutput, LaunchError, RankHost, hold_port, random_name};
use crate::links::{LinkArg, Links};
use crate::named::{codec_help, named};
use crate::units::{self, show_bytes};
use bare::Bare;
use pattern::Stretch;

/// Measure an operation between real processes or threads.
///
/// With --ranks it starts the ranks here. Without, it is one rank of a job that a launcher has
/// started (`farwire launch`, torchrun, mpirun, srun), and rank 0 prints.
///
/// Times are those of the slowest rank in each iteration. `algbw` is size over time, in GB/s.
/// `busbw`, in GB/s too, is the rate at each rank's link if the algorithm sends the least possible
/// volume; it can be compared between operations and numbers of ranks. `cpu s/GB` is the CPU time
/// of all ranks together, over size. `bare` is the CPU time that only moving the sent bytes would
/// take: copying them into memory that is in no cache and out of it, or sending them through a TCP
/// connection on loopback, without encryption. (Bytes that stay in a cache may cost less.)
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  farwire bench all_reduce --ranks 2
  farwire bench all_reduce --ranks 4 --size 4KiB,1MiB,64MiB --link quic --check
  farwire bench all_reduce --ranks 2 --link quic --codec topk:0.01
  farwire bench all_reduce --ranks 4 --hosts 2       (host by host)
  farwire bench all_reduce --ranks 2 --codec auto    (compressed where that is faster)
  farwire bench codec --codec int8 --size 64MiB      (a codec by itself)
  farwire bench codec --device cuda --size 256MiB    (on a GPU; with the cargo feature `cuda`)
  farwire bench all_reduce --device cuda --ranks 2 --size 256MiB --codec topk:64/4096
  farwire launch -n 4 -- farwire bench broadcast --size 16MiB --json")]
pub(crate) struct Args {
    /// The operation to measure, or `codec` for a codec by itself.
    #[arg(value_name = "OP", value_parser = named::<Op, _>(Op::NAMES))]
    op: Op,
    /// Start this many ranks here; without it, be one rank of a job.
    #[arg(short = 'n', long, value_parser = clap::value_parser!(u32).range(1..=256))]
    ranks: Option<u32>,
    /// Let the ranks that are started here act as if on several hosts: 2 for two hosts, or 3+1 for
    /// three ranks on one host and one on another. Only ranks of the same host share memory, and an
    /// all-reduce goes host by host.
    #[arg(long, requires = "ranks")]
    hosts: Option<HostsArg>,
    /// Bytes of the vector, such as 64MiB or 100MB. Separate several sizes with commas.
    #[arg(short, long, default_value = "4KiB,1MiB,64MiB", value_delimiter = ',', value_parser = units::size)]
    size: Vec<usize>,
    /// Element type.
    #[arg(long, default_value = "f32", value_parser = named::<DType, _>(DType::ALL.map(DType::name)))]
    dtype: DType,
    /// How elements are combined.
    #[arg(long, alias = "op", default_value = "sum", value_parser = named::<ReduceOp, _>(ReduceOp::ALL.map(ReduceOp::name)))]
    reduce: ReduceOp,
    /// How gradients are compressed on the wire, with error feedback; --help lists the codecs.
    #[arg(long, long_help = codec_help("For all_reduce, reduce_scatter and all_gather. `codec` measures codecs by themselves, and takes several."))]
    codec: Vec<CodecChoice>,
    /// Number of threads for `codec`.
    #[arg(long, default_value = "1", value_parser = clap::value_parser!(u32).range(1..=256))]
    threads: u32,
    /// Where vectors are: in host memory, or on a GPU (for `codec` and all_reduce). The ranks of a
    /// host take its GPUs in turn, by LOCAL_RANK.
    #[arg(long, default_value = "cpu", value_parser = named::<Device, _>(Device::NAMES))]
    device: Device,
    /// What carries the data.
    #[arg(long, default_value_t, value_parser = LinkArg::parser())]
    link: LinkArg,
    /// How to move the data. Chosen automatically if not given.
    #[arg(short, long, value_parser = named::<Algorithm, _>(Algorithm::ALL.map(Algorithm::name)))]
    algorithm: Option<Algorithm>,
    /// Bytes per frame; a long vector is sent in many frames. At least one element. Chosen
    /// automatically if not given.
    #[arg(long, value_parser = units::size)]
    segment: Option<usize>,
    /// Measured iterations. Default: depends on the size, and no more than fit into about 5 s.
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..))]
    iters: Option<u32>,
    /// Iterations before the measured ones.
    #[arg(long, default_value = "5")]
    warmup: u32,
    /// Compare every element of every rank's result with the right one.
    #[arg(long)]
    check: bool,
    /// Print one JSON object per size instead of a table.
    #[arg(long)]
    json: bool,
}

/// What can be measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Op {
    /// An operation between ranks.
    Between(Kind),
    /// A codec by itself.
    Codec,
}

impl Op {
    const NAMES: [&'static str; Kind::ALL.len() + 1] = {
        let mut names = ["codec"; Kind::ALL.len() + 1];
        let mut i = 0;
        while i < Kind::ALL.len() {
            names[i] = Kind::ALL[i].name();
            i += 1;
        }
        names
    };
}

impl std::str::FromStr for Op {
    type Err = UnknownName;

    fn from_str(name: &str) -> Result<Self, UnknownName> {
        if name == "codec" { Ok(Self::Codec) } else { name.parse().map(Self::Between) }
    }
}

/// Why there is nothing to show.
#[derive(Debug, thiserror::Error)]
pub(crate) enum BenchError {
    #[error("--size {size} is not a whole number of {dtype} elements, which have {} bytes each", dtype.size())]
    Fraction { size: usize, dtype: DType },
    #[error(
        "--size {} needs about {} of memory for {ranks} ranks, and this machine has {}; give a smaller one",
        show_bytes(*.size as f64), show_bytes(*.needs as f64), show_bytes(*.has as f64)
    )]
    TooLarge { size: usize, needs: u128, has: u128, ranks: u32 },
    #[error("--link inproc runs ranks as threads; say how many with --ranks")]
    NoRanks,
    #[error("{0} needs at least 2 ranks")]
    TooFew(Kind),
    #[error(
        "--codec {codec} cannot serve {kind} of {dtype} with {op}; use all_reduce, reduce_scatter or all_gather of f32, f64, f16 or bf16, with sum or mean"
    )]
    NotCodable { codec: String, kind: Kind, dtype: DType, op: ReduceOp },
    #[error("give one --codec; only `farwire bench codec` takes several")]
    SeveralCodecs,
    #[error("--codec {0} is chosen between ranks; for a codec by itself, name one")]
    NotByItself(CodecChoice),
    #[error(
        "--device cuda serves `codec` and all_reduce of f32, f16 and bf16; other operations and types take host memory"
    )]
    NotOnCard,
    #[cfg(not(feature = "cuda"))]
    #[error("this farwire was built without CUDA; build it with `cargo build --features cuda`")]
    NoCuda,
    #[cfg(feature = "cuda")]
    #[error(transparent)]
    Cuda(#[from] farwire_cuda::DeviceError),
    #[error(transparent)]
    Hosts(#[from] WrongHosts),
    #[error(transparent)]
    Launch(#[from] LaunchError),
    #[error(transparent)]
    Run(#[from] Error),
    #[error("could not write the result: {0}")]
    Output(#[from] std::io::Error),
}

/// One line of the result.
#[derive(Debug, Serialize)]
struct Row {
    op: &'static str,
    codec: String,
    /// The codec at this size, which `auto` may have chosen.
    chosen: String,
    /// What carried the data: the name of a link, or several with `+` between; `none` for one rank.
    link: String,
    /// Pairs of ranks, by the link between them.
    links: Links,
    ranks: usize,
    bytes: usize,
    p50_us: f64,
    p99_us: f64,
    algbw_gbs: f64,
    busbw_gbs: f64,
    wire_bytes: u64,
    /// Hosts that the ranks are on, and the bytes that left the busiest host for the others.
    hosts: usize,
    host_bytes: u64,
    /// CPU time of all ranks and all iterations.
    cpu_s: f64,
    /// The CPU time that only moving the sent bytes would take: copying them into shared memory and
    /// out of it, or sending them through TCP on loopback. Absent if that could not be measured.
    bare_cpu_s: Option<f64>,
    iters: u32,
    /// Wrong elements; absent unless results were checked.
    wrong: Option<u64>,
}

/// Runs the command.
pub(crate) fn run(args: &Args) -> Result<ExitCode, BenchError> {
    if let Some(size) = args.size.iter().find(|size| !size.is_multiple_of(args.dtype.size())) {
        return Err(BenchError::Fraction { size: *size, dtype: args.dtype });
    }
    check_memory(args)?;
    let kind = match args.op {
        Op::Codec if args.device == Device::Cuda => return on_card(args),
        Op::Codec => return codec::run(args).map(|()| ExitCode::SUCCESS),
        Op::Between(kind) => kind,
    };
    if args.device == Device::Cuda {
        if cfg!(not(feature = "cuda")) {
            return on_card(args);
        }
        let is_there = matches!(args.dtype, DType::F32 | DType::F16 | DType::Bf16);
        if kind != Kind::AllReduce || !is_there {
            return Err(BenchError::NotOnCard);
        }
    }
    if args.codec.len() > 1 {
        return Err(BenchError::SeveralCodecs);
    }
    if let Some(codec) = args.codec.first().filter(|codec| **codec != CodecChoice::default()) {
        let (dtype, op) = (args.dtype, args.reduce);
        if !kind.takes_codec() || !dtype.is_float() || !matches!(op, ReduceOp::Sum | ReduceOp::Mean)
        {
            return Err(BenchError::NotCodable { codec: codec.to_string(), kind, dtype, op });
        }
    }
    match (args.ranks, args.link) {
        (None, LinkArg::Inproc) => Err(BenchError::NoRanks),
        (Some(ranks), LinkArg::Inproc) => on_threads(args, ranks as usize).map(exit_code),
        (Some(ranks), _) => on_processes(args, ranks),
        (None, link) => {
            let builder = Communicator::builder();
            let builder = match link {
                LinkArg::Between(link) if link != LinkChoice::AUTO => builder.link(link),
                _ => builder, // FARWIRE_LINK counts
            };
            measure_all(args, &builder.join()?).map(exit_code)
        }
    }
}

#[cfg(feature = "cuda")]
fn on_card(args: &Args) -> Result<ExitCode, BenchError> {
    codec_cuda::run(args).map(|()| ExitCode::SUCCESS)
}

#[cfg(not(feature = "cuda"))]
fn on_card(_: &Args) -> Result<ExitCode, BenchError> {
    Err(BenchError::NoCuda)
}

/// Refuses sizes that cannot fit into memory, rather than being killed half-way.
fn check_memory(args: &Args) -> Result<(), BenchError> {
    let ranks = args.ranks.unwrap_or(1);
    let size = args.size.iter().copied().max().unwrap_or(0);
    let has = u128::from(rustix::system::sysinfo().totalram);
    let needs = VECTORS * size as u128 * u128::from(ranks);
    if needs > has { Err(BenchError::TooLarge { size, needs, has, ranks }) } else { Ok(()) }
}

/// Vectors that a rank holds: the input and the result.
const VECTORS: u128 = 2;
/// About how long the iterations of one size may take, unless their number is given.
const LONGEST_ROW: Duration = Duration::from_secs(5);

/// A wrong result is a failure.
fn exit_code(wrong: u64) -> ExitCode {
    if wrong == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn on_threads(args: &Args, ranks: usize) -> Result<u64, BenchError> {
    let hosts = match &args.hosts {
        Some(hosts) => hosts.deal(ranks as u32)?,
        None => vec![0; ranks],
    };
    let comms = farwire::local_on_hosts(&hosts, Config::default())?;
    std::thread::scope(|scope| {
        let threads: Vec<_> =
            comms.into_iter().map(|comm| scope.spawn(move || measure_all(args, &comm))).collect();
        threads
            .into_iter()
            .try_fold(0, |wrong, thread| Ok(wrong + thread.join().expect("a rank does not panic")?))
    })
}

/// Starts this same command again, once per rank.
fn on_processes(args: &Args, ranks: u32) -> Result<ExitCode, BenchError> {
    let system = |source| LaunchError::System { what: "could not find this program", source };
    let mut command = vec![std::env::current_exe().map_err(system)?.into_os_string()];
    let mut given = std::env::args_os().skip(1);
    while let Some(argument) = given.next() {
        let text = argument.to_string_lossy();
        if ["--ranks", "-n", "--hosts"].contains(&&*text) {
            given.next();
        } else if !["--ranks=", "-n", "--hosts="].iter().any(|flag| text.starts_with(flag)) {
            command.push(argument);
        }
    }
    let hosts = args.hosts.as_ref().map(|hosts| hosts.deal(ranks)).transpose()?;
    let hosts = hosts.into_iter().flatten();
    let job = Job {
        command,
        ranks,
        first_rank: 0,
        world: ranks,
        master: hold_port()?,
        name: Some(random_name()),
        token: Some(farwire::Token::generate()),
        // Without the flag, the environment decides.
        variables: (args.link != LinkArg::default())
            .then(|| ("FARWIRE_LINK", args.link.to_string()))
            .into_iter()
            .collect(),
        output: JobOutput::Plain,
        grace: GRACE,
        hosts: hosts
            .map(|number| {
                let name = Some(format!("host-{number}"));
                RankHost { number, name, namespace: None }
            })
            .collect(),
        elastic: None,
    };
    Ok(job.run()?)
}

/// Measures every size. Returns how many elements were wrong, if that was checked.
fn measure_all(args: &Args, comm: &Communicator) -> Result<u64, BenchError> {
    let mut out = std::io::stdout();
    let mut wrong = 0;
    if args.op == Op::Between(Kind::Message) && comm.size() < 2 {
        return Err(BenchError::TooFew(Kind::Message));
    }
    let policy = args.choice().settle(&args.tuned(comm), comm)?;
    let links = &Links::of(comm)?;
    let bare = Bare::measure(comm)?;
    if comm.rank() == 0 && !args.json {
        let hosts = comm.placement()?.hosts();
        writeln!(out, "{}", Heading(args, &policy, comm.size(), hosts, links))?;
    }
    for size in &args.size {
        let row =
            with_type!(args.dtype, T => measure::<T>(args, comm, &policy, (links, bare), *size))?;
        wrong += row.wrong.unwrap_or(0);
        if comm.rank() == 0 {
            if args.json {
                writeln!(
                    out,
                    "{}",
                    serde_json::to_string(&row).expect("plain numbers and names serialise")
                )?;
            } else {
                writeln!(out, "{row}")?;
            }
            out.flush()?;
        }
    }
    comm.barrier().wait()?;
    Ok(wrong)
}

/// One operation, run again and again.
struct Trial<'a, T> {
    comm: &'a Communicator,
    kind: Kind,
    shape: Shape,
    /// The first takes the data, the last has the result.
    calls: Vec<Call>,
    /// The input. Where possible it is the result of the iteration before, so that the loop touches
    /// no fresh memory.
    data: Vec<T>,
    compressor: Option<Compressor>,
    /// The codec that the compressor uses at this size.
    codec: CodecSpec,
    /// CPU time between iterations, which does not count.
    apart: Duration,
    /// Where vectors are, if not in host memory.
    #[cfg(feature = "cuda")]
    card: Option<all_reduce_cuda::OnCard>,
}

impl Args {
    fn choice(&self) -> CodecChoice {
        self.codec.first().cloned().unwrap_or_default()
    }

    fn tuned(&self, comm: &Communicator) -> Communicator {
        let elements = |bytes: usize| NonZeroUsize::new((bytes / self.dtype.size()).max(1));
        comm.with_options(Options {
            algorithm: self.algorithm,
            segment: self.segment.and_then(elements),
            ..Options::default()
        })
    }
}

fn measure<T: Element>(
    args: &Args,
    comm: &Communicator,
    policy: &CodecPolicy,
    (links, bare): (&Links, Bare),
    bytes: usize,
) -> Result<Row, BenchError> {
    let tuned = args.tuned(comm);
    let count = bytes / T::DTYPE.size();
    let (rank, ranks) = (comm.rank(), comm.size());
    let world = WorldSize::new(ranks as u32).expect("a communicator has a rank");
    let Op::Between(kind) = args.op else {
        unreachable!("codecs by themselves are measured elsewhere")
    };
    // Through a compressor, all ranks gather the same number of elements.
    let whole = if kind == Kind::AllGather { count / ranks * ranks } else { count };
    let codec = policy.codec_for(whole, T::DTYPE);
    let compressor =
        (args.choice() != CodecChoice::default()).then(|| Compressor::by_size(policy.clone()));
    let mut shape = Shape::even(world, count, T::DTYPE, args.reduce);
    if compressor.is_some() {
        shape.blocks = Counts::Each(count / ranks);
    }
    let mut trial = Trial::<T> {
        comm: &tuned,
        kind,
        calls: shape.row(kind, rank_of(comm)).calls,
        shape,
        data: Vec::new(),
        compressor: compressor.as_ref().map(|compressor| compressor.at_step(0)),
        codec,
        apart: Duration::ZERO,
        #[cfg(feature = "cuda")]
        card: match args.device {
            Device::Cuda => Some(all_reduce_cuda::OnCard::new(&tuned)?),
            Device::Cpu => None,
        },
    };

    let mut wrong = None;
    if args.check {
        trial.data = trial.input(rank).map_err(Error::from)?;
        let (result, _) = trial.call()?;
        let mine = trial.wrong(&result);
        wrong = Some(comm.all_reduce(vec![mine], ReduceOp::Sum).wait()?[0]);
    }
    trial.compressor = compressor;
    trial.data = trial.input(rank).map_err(Error::from)?;
    let iters = (512usize << 20).checked_div(bytes).unwrap_or(1000).clamp(10, 1000) as u32;
    let mut warm = Duration::ZERO;
    for _ in 0..args.warmup {
        warm = trial.turn()?;
    }
    // A slow network must not make a table take hours: run as many as fit, and the same number on
    // all ranks.
    let warm = comm.all_reduce(vec![warm.as_nanos() as u64], ReduceOp::Max).wait()?[0].max(1);
    let fitting = (LONGEST_ROW.as_nanos() as u64 / warm).max(10) as u32;
    let iters = args.iters.unwrap_or(iters.min(fitting));
    comm.barrier().wait()?;
    let placement = comm.placement()?;
    let off_host = || off_host(comm, &placement);
    trial.apart = Duration::ZERO;
    let (traffic, off_host_before, bare_before) = (comm.traffic(), off_host(), bare.cost(comm));
    let cpu = cpu_time();
    let mut times = Vec::with_capacity(iters as usize);
    for _ in 0..iters {
        times.push(trial.turn()?.as_nanos() as u64);
    }
    let cpu = cpu_time().saturating_sub(cpu).saturating_sub(trial.apart);
    let sent = comm.traffic().bytes - traffic.bytes;
    let bare = bare.cost(comm) - bare_before;
    let left = (off_host() - off_host_before) / u64::from(iters);
    let left = comm.all_gather(vec![left]).wait()?;
    let left_host = |host| placement.ranks(host).iter().map(|rank| left[rank.index()]).sum();
    let host_bytes = (0..placement.hosts()).map(left_host).max().unwrap_or(0);
    let mut slowest = comm.all_reduce(times, ReduceOp::Max).wait()?;
    let of_all = comm.all_reduce(vec![cpu.as_secs_f64(), bare], ReduceOp::Sum).wait()?;
    let (cpu_s, bare_cpu_s) = (of_all[0], of_all[1]);
    let sent = comm.all_reduce(vec![sent / u64::from(iters)], ReduceOp::Max).wait()?[0];
    slowest.sort_unstable();
    let at =
        |share: f64| slowest[((slowest.len() - 1) as f64 * share).round() as usize] as f64 / 1e3;
    let (p50_us, p99_us) = (at(0.5), at(0.99));
    let algbw_gbs = bytes as f64 / p50_us / 1e3;
    Ok(Row {
        op: kind.name(),
        codec: args.choice().to_string(),
        chosen: trial.codec.to_string(),
        link: links.name(),
        links: links.clone(),
        ranks,
        bytes,
        p50_us,
        p99_us,
        algbw_gbs,
        busbw_gbs: algbw_gbs * trial.shape.row(kind, Rank(0)).share,
        wire_bytes: sent,
        hosts: placement.hosts(),
        host_bytes,
        cpu_s: if args.link == LinkArg::Inproc { cpu_s / ranks as f64 } else { cpu_s },
        bare_cpu_s: Some(bare_cpu_s).filter(|cost| cost.is_finite()),
        wrong,
        iters,
    })
}

impl<T: Element> Trial<'_, T> {
    /// Runs one iteration, and returns how long it took. The result is the next input, if it has
    /// the same length.
    fn turn(&mut self) -> Result<Duration, Error> {
        let length = self.data.len();
        // A codec's work depends on the data, and sums of sums would overflow: it gets the same
        // gradient each time.
        let same = match self.codec.is_none() {
            true => None,
            false => Some(self.copy()?),
        };
        let (result, took) = self.call()?;
        self.data = match same {
            Some(same) => same,
            None if result.len() == length => result,
            None => vec![T::default(); length],
        };
        Ok(took)
    }

    /// A copy of the data. All ranks wait until all have one, since ranks that share cores and
    /// still copy would slow the others down. Copying does not count as work.
    fn copy(&mut self) -> Result<Vec<T>, Error> {
        let cpu = cpu_time();
        let copy = self.data.clone();
        self.comm.with_options(Options::default()).barrier().wait()?;
        self.apart += cpu_time().saturating_sub(cpu);
        Ok(copy)
    }

    /// [`call`](Self::call) through a codec.
    fn call_compressed(&self, data: Vec<T>, compressor: &Compressor) -> Result<Vec<T>, Error> {
        use bytemuck::cast_vec as same;
        Ok(match T::DTYPE {
            DType::F32 => same(self.through::<f32>(same(data), compressor)?),
            DType::F64 => same(self.through::<f64>(same(data), compressor)?),
            DType::F16 => same(self.through::<f16>(same(data), compressor)?),
            DType::Bf16 => same(self.through::<bf16>(same(data), compressor)?),
            _ => unreachable!("only floats go through codecs"),
        })
    }

    fn through<F: Float>(&self, data: Vec<F>, compressor: &Compressor) -> Result<Vec<F>, Error> {
        match self.kind {
            Kind::ReduceScatter => {
                self.comm.reduce_scatter_compressed("bench", data, self.shape.op, compressor).wait()
            }
            Kind::AllGather => self.comm.all_gather_compressed("bench", data, compressor).wait(),
            _ => self.comm.all_reduce_compressed("bench", data, self.shape.op, compressor).wait(),
        }
    }

    /// Runs the operation. Returns the result, and how long it took.
    fn call(&mut self) -> Result<(Vec<T>, Duration), Error> {
        let data = std::mem::take(&mut self.data);
        #[cfg(feature = "cuda")]
        if let Some(card) = &self.card {
            return card.all_reduce(data, self.shape.op, self.compressor.as_ref());
        }
        let start = Instant::now();
        let result = self.call_on_host(data)?;
        Ok((result, start.elapsed()))
    }

    fn call_on_host(&mut self, data: Vec<T>) -> Result<Vec<T>, Error> {
        if let Some(compressor) = &self.compressor {
            return self.call_compressed(data, compressor);
        }
        if self.kind == Kind::AllReduce {
            let mut data = data;
            self.comm.all_reduce_in_place(&mut data, self.shape.op)?;
            return Ok(data);
        }
        let (first, rest) = self.calls.split_first().expect("every kind calls something");
        let first = self.comm.run(first.clone(), data);
        let mut last = None;
        for call in rest {
            last = Some(self.comm.run(call.clone(), Vec::new()).wait()?);
        }
        let result = first.wait()?;
        Ok(last.unwrap_or(result))
    }

    /// A rank's input: a [`pattern`], or for a codec, a gradient.
    fn input(&self, rank: usize) -> Result<Vec<T>, CallError> {
        let length = pattern::input_len(self.kind, &self.shape, Rank(rank as u32))?;
        if !self.codec.is_none() {
            return Ok(from_floats(codec::gaussian(length, rank as u64 + 1)));
        }
        Ok(pattern::fill(&pattern::period(rank, self.shape.op), length))
    }

    /// How many elements of a result are not what they should be.
    fn wrong(&self, result: &[T]) -> u64 {
        if !self.codec.is_none() {
            let expected = self.expected_coded();
            return pattern::differences(result, &[Stretch::whole(expected)]);
        }
        let expected = pattern::expected(self.kind, &self.shape, rank_of(self.comm));
        pattern::differences(result, &expected)
    }
}

impl<T: Element> Trial<'_, T> {
    /// What this rank must get through a codec: the same rounds, with all ranks in this one process
    /// and no network.
    fn expected_coded(&self) -> Vec<T> {
        let ranks = self.comm.size();
        let world = WorldSize::new(ranks as u32).expect("a communicator has a rank");
        let feedback: Vec<_> = (0..ranks).map(|_| ErrorFeedback::new()).collect();
        let order = |rank: usize| {
            use bytemuck::cast_vec as same;
            let input = self.input(rank).expect("it was measured");
            let input = match T::DTYPE {
                DType::F32 => Floats::F32(same(input)),
                DType::F64 => Floats::F64(same(input)),
                DType::F16 => Floats::F16(same(input)),
                DType::Bf16 => Floats::Bf16(same(input)),
                _ => unreachable!("only floats go through codecs"),
            };
            Order {
                collective: match self.kind {
                    Kind::ReduceScatter => Collective::ReduceScatter(self.shape.op),
                    Kind::AllGather => Collective::AllGather(Counts::Each(input.len())),
                    _ => Collective::AllReduce(self.shape.op),
                },
                codec: self.codec.clone(),
                rank: Rank(rank as u32),
                world,
                placement: self.comm.split_placement(),
                input,
                dimensions: None,
                tensor: "bench".to_owned(),
                feedback: feedback[rank].begin("bench").ok(),
                context: Context { seed: 0, step: 0, tensor: Context::tensor_id("bench") },
                threads: NonZeroUsize::MIN,
                output: Vec::new(),
            }
        };
        let mut all: Vec<_> = (0..ranks)
            .map(|rank| CodedCollective::new(order(rank)).expect("it was measured"))
            .collect();
        for round in 0..all[0].rounds() {
            // A rank may be a round ahead, so rounds are kept by number.
            let made: Vec<_> =
                all.iter_mut().map(|rank| rank.next_parcels().expect("its turn")).collect();
            for (me, exchange) in all.iter_mut().enumerate() {
                let parcels: Vec<_> = made.iter().map(|from| from[me].to_vec()).collect();
                exchange.came(round, &parcels).expect("ranks understand each other");
            }
        }
        let mine = all.swap_remove(self.comm.rank());
        from_floats(mine.finish().expect("the gradient is finite").output)
    }
}

/// Bytes that this rank has sent to ranks on other hosts.
fn off_host(comm: &Communicator, placement: &Placement) -> u64 {
    let here = placement.seat(rank_of(comm)).host;
    let elsewhere = (0..comm.size()).filter(|rank| placement.seat(Rank(*rank as u32)).host != here);
    elsewhere.filter_map(|rank| comm.traffic_to(rank)).map(|sent| sent.bytes).sum()
}

fn rank_of(comm: &Communicator) -> Rank {
    Rank(comm.rank() as u32)
}

/// The same numbers in another type.
fn from_floats<T: Element>(values: Vec<f32>) -> Vec<T> {
    values.into_iter().map(|value| T::cast(value.into())).collect()
}

/// The lines above the table.
struct Heading<'a>(&'a Args, &'a CodecPolicy, usize, usize, &'a Links);

impl fmt::Display for Heading<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self(args, policy, ranks, hosts, links) = self;
        let hosts = if *hosts > 1 { format!(" on {hosts} hosts") } else { String::new() };
        let chosen = match args.choice() {
            CodecChoice::Given(_) => String::new(),
            _ => format!(": {policy}"),
        };
        writeln!(
            f,
            "{} ({}, {}, codec {}{chosen}) over {ranks} ranks{hosts}, link {links}",
            if let Op::Between(kind) = args.op { kind.name() } else { "codec" },
            args.reduce,
            args.dtype,
            args.choice()
        )?;
        write!(
            f,
            "{:>10} {:>6} {:>11} {:>11} {:>8} {:>8} {:>11} {:>9} {:>7} {:>6}  codec",
            "size",
            "iters",
            "p50 µs",
            "p99 µs",
            "algbw",
            "busbw",
            "sent/rank",
            "cpu s/GB",
            "bare",
            "wrong"
        )
    }
}

impl fmt::Display for Row {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let gigabytes = self.bytes as f64 * f64::from(self.iters) / 1e9;
        let per_gigabyte = |cpu| if gigabytes > 0.0 { cpu / gigabytes } else { 0.0 };
        let bare = self.bare_cpu_s.map(|cpu| format!("{:.2}", per_gigabyte(cpu)));
        write!(
            f,
            "{:>10} {:>6} {:>11.1} {:>11.1} {:>8.3} {:>8.3} {:>11} {:>9.2} {:>7} {:>6}  {}",
            show_bytes(self.bytes as f64),
            self.iters,
            self.p50_us,
            self.p99_us,
            self.algbw_gbs,
            self.busbw_gbs,
            show_bytes(self.wire_bytes as f64),
            per_gigabyte(self.cpu_s),
            bare.unwrap_or_else(|| "-".to_owned()),
            self.wrong.map_or("-".to_owned(), |wrong| wrong.to_string()),
            self.chosen
        )
    }
}
