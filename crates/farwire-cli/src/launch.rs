//! `farwire launch`: one process per rank on this machine.

mod errors;

use std::collections::{BTreeSet, VecDeque};
use std::ffi::OsString;
use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, UdpSocket};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{ExitCode, ExitStatus, Stdio};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use farwire::{Beginning, HeldPort, Token};
use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, WaitIdStatus};
use tokio::io::{AsyncBufReadExt, AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, BufReader};
use tokio::process::{Child, Command};
use tokio::signal::unix::{SignalKind, signal};
use tokio::task::JoinSet;
use tokio::time::Instant;

pub(crate) use errors::say_error;
use errors::{Errors, TELL_PARENT, lost_rank};

/// How long the other ranks have to notice by themselves that one has failed, and to say what they
/// were doing: as long as heartbeats take.
const FIND_OUT: Duration = Duration::from_millis(2500);
/// Exit codes of a rank that has stopped as it was told.
const TOLD_BY_INT: i32 = 128 + 2;
const TOLD_BY_TERM: i32 = 128 + 15;
/// Exit code of a rank that has left as it was told, while the others go on.
pub(crate) const LEFT: u8 = 128 + 10;
/// Exit code of a rank that found no job to join, or was not let in.
pub(crate) const NOT_LET_IN: u8 = 69;
/// Exit code of a rank whose job cannot go on, whichever ranks join: too much of it is lost.
pub(crate) const GIVEN_UP: u8 = 75;
/// Exit code of a rank whose flags or files are wrong: no other is started in its place.
pub(crate) const MISTAKE: u8 = 2;
/// Exit codes that shells give a program that cannot be run, or is not there.
const NO_PROGRAM: [u8; 2] = [126, 127];
/// How long ranks have to end once they are asked to.
pub(crate) const GRACE: Duration = Duration::from_secs(5);
/// How long a rank's output is read after its end.
const LAST_WORDS: Duration = Duration::from_secs(1);
/// Lines of a failed rank that are shown again at the end.
const LAST_LINES: usize = 10;
/// Longer lines are cut into pieces of this many bytes.
const LONGEST_LINE: u64 = 64 << 10;

/// Start a command once per rank, and end all when one fails.
///
/// Sets what torchrun sets: RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR and
/// MASTER_PORT. Unless they are set already, it also sets RAYON_NUM_THREADS, to this machine's
/// cores divided by its ranks, and, for jobs on one machine, a fresh FARWIRE_TOKEN and FARWIRE_JOB.
///
/// It puts the rank before each line of output, passes signals on, and exits with the code of the
/// first rank that failed. Ranks that were asked to end and have not done so within 5 s are killed.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  Four ranks on this machine:
    farwire launch -n 4 -- ./my-training-program --epochs 3
  Two machines with eight ranks each. Both need the same FARWIRE_TOKEN, which
  `farwire token` makes, and the same --job if more than one job runs on them:
    on host 0: farwire launch -n 8 --nnodes 2 --node-rank 0 \\
                 --master 10.0.0.1:29500 -- ./my-training-program
    on host 1: the same, with --node-rank 1
  A job that goes on when ranks die:
    farwire launch --elastic -n 4 -- farwire train --elastic")]
pub(crate) struct Args {
    /// Ranks to start on this machine.
    #[arg(short = 'n', long = "ranks", default_value = "4")]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=1024))]
    ranks: u32,
    /// Number of machines. Each of them runs this command.
    #[arg(long, default_value = "1", value_parser = clap::value_parser!(u32).range(1..))]
    nnodes: u32,
    /// Which of the machines this is, from 0.
    #[arg(long, default_value = "0")]
    node_rank: u32,
    /// Where rank 0 listens, as HOST:PORT. Needed for more than one machine.
    #[arg(long, value_name = "HOST:PORT", value_parser = master)]
    master: Option<(String, u16)>,
    /// The job's name, up to 255 bytes, the same on all machines. Ranks of another job that come to
    /// the same address are refused. Default: FARWIRE_JOB; without that, a random name on one
    /// machine, and none on several, where jobs are then told apart only by address and number of
    /// ranks.
    #[arg(long, value_name = "NAME", value_parser = job_name)]
    job: Option<String>,
    /// Go on when ranks die, and start others in their place (--restarts). These get FARWIRE_JOIN,
    /// the addresses of the ranks that live, and must join there: `farwire train --elastic` does
    /// that, and programs that use `farwire::Elastic` can. A rank that dies before all ranks have
    /// come is started again as itself, since there is nothing to join yet. When this launcher
    /// dies, only its own ranks end.
    #[arg(long)]
    elastic: bool,
    /// End the job when fewer ranks than this are left on this machine and no other is started.
    #[arg(long, default_value = "1", requires = "elastic")]
    min: u32,
    /// Let no other rank join while there are this many on all machines (FARWIRE_MAX_RANKS).
    /// Default: no limit.
    #[arg(long, value_name = "RANKS", requires = "elastic")]
    max: Option<u32>,
    /// How many ranks to start in place of others on this machine, in total.
    #[arg(long, default_value = "16", requires = "elastic")]
    restarts: u32,
    /// The command and its arguments.
    #[arg(last = true, required = true, value_name = "COMMAND")]
    command: Vec<OsString>,
}

/// Why nothing was started, or nothing more could be done.
#[derive(Debug, thiserror::Error)]
pub(crate) enum LaunchError {
    #[error("--node-rank {node_rank} is not below --nnodes {nnodes}; machines count from 0")]
    NodeRank { node_rank: u32, nnodes: u32 },
    #[error("--nnodes {0} needs --master HOST:PORT, the address of the machine with --node-rank 0")]
    NoMaster(u32),
    #[error(
        "--nnodes {0} needs a token that all machines share; \
         run `export FARWIRE_TOKEN=$(farwire token)` on one and copy the value to the others"
    )]
    NoToken(u32),
    #[error("--max {max} is less than the {world} ranks to start with; start fewer, or allow more")]
    Max { max: u32, world: u32 },
    #[error(
        "--min {min} is more than the {ranks} ranks of this machine; the job would end at once"
    )]
    Min { min: u32, ranks: u32 },
    #[error("could not start {command:?}: {source}")]
    Start { command: OsString, source: io::Error },
    #[error("{what}: {source}")]
    System { what: &'static str, source: io::Error },
}

fn master(text: &str) -> Result<(String, u16), String> {
    let parsed = text.rsplit_once(':').and_then(|(host, port)| {
        let bare = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
        Some((bare.to_owned(), port.parse().ok()?))
    });
    parsed.filter(|(host, port)| !host.is_empty() && *port > 0).ok_or_else(|| {
        format!("`{text}` is not an address; write HOST:PORT, for example 10.0.0.1:29500")
    })
}

fn job_name(text: &str) -> Result<String, String> {
    match text.len() {
        1..=255 => Ok(text.to_owned()),
        length => Err(format!("a name of {length} bytes is not possible; write 1 to 255")),
    }
}

/// Where rank 0 listens.
#[derive(Debug)]
pub(crate) enum Master {
    Given(String, u16),
    /// On loopback, at a port that is kept free for it.
    Held(HeldPort),
}

/// A job's command, and what its processes are told.
#[derive(Debug)]
pub(crate) struct Job {
    pub(crate) command: Vec<OsString>,
    pub(crate) ranks: u32,
    pub(crate) first_rank: u32,
    pub(crate) world: u32,
    pub(crate) master: Master,
    /// For FARWIRE_JOB; without it, the environment decides.
    pub(crate) name: Option<String>,
    pub(crate) token: Option<Token>,
    pub(crate) variables: Vec<(&'static str, String)>,
    /// Where the output of ranks goes.
    pub(crate) output: JobOutput,
    /// How long ranks have to end by themselves.
    pub(crate) grace: Duration,
    /// The host of each rank, if ranks are to act as if on several hosts.
    pub(crate) hosts: Vec<RankHost>,
    /// Whether the job goes on when ranks die.
    pub(crate) elastic: Option<ElasticJob>,
}

/// How a job goes on when ranks die.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ElasticJob {
    /// With fewer ranks than this on this machine, the job ends.
    pub(crate) min: u32,
    /// Ranks that are started in place of others, in total.
    pub(crate) restarts: u32,
}

/// The host that a rank is on, or acts as if on.
#[derive(Debug)]
pub(crate) struct RankHost {
    pub(crate) number: u64,
    /// The host's name, if not the machine's.
    pub(crate) name: Option<String>,
    /// The network namespace, if the host has one of its own.
    pub(crate) namespace: Option<PathBuf>,
}

/// Where the output of ranks goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum JobOutput {
    /// Line by line, with the rank before each.
    Marked,
    /// Line by line.
    Plain,
    /// Straight to this process's output: a rank may draw on the terminal.
    Theirs,
}

/// Runs the command.
pub(crate) fn run(args: &Args) -> Result<ExitCode, LaunchError> {
    let &Args { ranks, nnodes, node_rank, .. } = args;
    if node_rank >= nnodes {
        return Err(LaunchError::NodeRank { node_rank, nnodes });
    }
    let world = ranks.saturating_mul(nnodes);
    if let Some(max) = args.max.filter(|max| *max < world) {
        return Err(LaunchError::Max { max, world });
    }
    if args.min > ranks {
        return Err(LaunchError::Min { min: args.min, ranks });
    }
    let has_token = std::env::var_os("FARWIRE_TOKEN").is_some()
        || std::env::var_os("FARWIRE_TOKEN_FILE").is_some();
    if nnodes > 1 && !has_token {
        return Err(LaunchError::NoToken(nnodes));
    }
    let master = match &args.master {
        Some((host, port)) => Master::Given(host.clone(), *port),
        None if nnodes == 1 => hold_port()?,
        None => return Err(LaunchError::NoMaster(nnodes)),
    };
    let is_named = std::env::var_os("FARWIRE_JOB").is_some();
    let name = args.job.clone().or_else(|| (nnodes == 1 && !is_named).then(random_name));
    Job {
        command: args.command.clone(),
        ranks,
        first_rank: node_rank.saturating_mul(ranks),
        world,
        master,
        name,
        token: (!has_token).then(Token::generate),
        variables: args.max.map(|max| ("FARWIRE_MAX_RANKS", max.to_string())).into_iter().collect(),
        output: JobOutput::Marked,
        grace: GRACE,
        hosts: Vec::new(),
        elastic: args.elastic.then_some(ElasticJob { min: args.min, restarts: args.restarts }),
    }
    .run()
}

/// Where this job's ranks leave their flight records, unless the user has chosen a folder; empty
/// for nowhere.
fn flight_folder() -> Option<PathBuf> {
    if std::env::var_os("FARWIRE_FLIGHT_DIR").is_some() {
        return None;
    }
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
    match farwire::flight::user_folder() {
        Ok(folder) => Some(folder.join(format!("job-{now}-{}", std::process::id()))),
        Err(error) => {
            eprintln!("farwire: ranks that fail will leave no flight records: {error}");
            Some(PathBuf::new())
        }
    }
}

/// A port of loopback for rank 0, which no other process gets while the job runs.
pub(crate) fn hold_port() -> Result<Master, LaunchError> {
    let held = HeldPort::any();
    held.map(Master::Held)
        .map_err(|source| LaunchError::System { what: "could not find a free port", source })
}

/// A name that no other job has.
pub(crate) fn random_name() -> String {
    Token::generate().reveal()[3..19].to_owned()
}

/// Signals that ask this process to end.
pub(crate) struct Wishes {
    interrupted: tokio::signal::unix::Signal,
    terminated: tokio::signal::unix::Signal,
    quit: tokio::signal::unix::Signal,
    hung_up: Option<tokio::signal::unix::Signal>,
}

impl Wishes {
    pub(crate) fn new() -> io::Result<Self> {
        Ok(Self {
            interrupted: signal(SignalKind::interrupt())?,
            terminated: signal(SignalKind::terminate())?,
            quit: signal(SignalKind::quit())?,
            // Under nohup this signal stays ignored.
            hung_up: if is_hangup_ignored() { None } else { Some(signal(SignalKind::hangup())?) },
        })
    }

    pub(crate) async fn next(&mut self) -> Signal {
        let hung_up = async {
            match &mut self.hung_up {
                Some(hung_up) => hung_up.recv().await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            _ = self.interrupted.recv() => Signal::INT,
            _ = self.terminated.recv() => Signal::TERM,
            // Ctrl-\, which would leave behind what ranks have started.
            _ = self.quit.recv() => Signal::TERM,
            _ = hung_up => Signal::HUP,
        }
    }
}

/// Whether this process was started to outlive its terminal, as by nohup.
fn is_hangup_ignored() -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let ignored = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let ignored = ignored.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
    ignored.is_some_and(|mask| mask >> (Signal::HUP.as_raw() - 1) & 1 == 1)
}

/// What a launcher has started.
struct Crew<'a> {
    job: &'a Job,
    /// How far the ranks are with finding each other.
    beginning: Beginning,
    /// In the order in which ranks were started; a rank that is started again keeps its place. A
    /// rank that has ended is reaped when all have, or when the job goes on without it. Until then
    /// its process id is not used again, so signals reach the right processes.
    pids: Vec<Option<Pid>>,
    children: Vec<Child>,
    ports: Vec<OwnPort>,
    /// The numbers of ranks that have not ended.
    alive: BTreeSet<u32>,
    /// The ends of ranks.
    running: JoinSet<(u32, io::Result<WaitIdStatus>, LastLines)>,
    said: Errors,
    /// Where ranks leave their flight records.
    records: Option<PathBuf>,
    output: Arc<tokio::sync::Mutex<tokio::io::Stdout>>,
    errors: Arc<tokio::sync::Mutex<tokio::io::Stderr>>,
}

impl<'a> Crew<'a> {
    fn new(job: &'a Job) -> io::Result<Self> {
        Ok(Self {
            job,
            beginning: Beginning::new()?,
            pids: Vec::new(),
            children: Vec::new(),
            ports: Vec::new(),
            alive: BTreeSet::new(),
            running: JoinSet::new(),
            said: Errors::default(),
            records: flight_folder(),
            output: Arc::new(tokio::sync::Mutex::new(tokio::io::stdout())),
            errors: Arc::new(tokio::sync::Mutex::new(tokio::io::stderr())),
        })
    }

    /// Starts the ranks that a job has on this machine at first.
    fn start_all(&mut self) -> Result<(), LaunchError> {
        for rank in self.job.first_rank..self.job.first_rank + self.job.ranks {
            let started = self.job.port_of(rank).and_then(|port| self.start(rank, port, None));
            started.inspect_err(|_| self.tell(Signal::TERM))?;
        }
        Ok(())
    }

    /// Starts a rank that joins those that live. Some of these may be dead as well, which is not
    /// known yet.
    fn start_another(&mut self) -> Result<(), LaunchError> {
        let new = self.job.number_at(self.pids.len());
        let there = self.alive.iter().filter_map(|rank| self.job.index_of(*rank));
        let there = there.filter_map(|index| self.job.number_of(&self.ports[index])).collect();
        self.start(new, OwnPort::held()?, Some(there))
    }

    /// Starts a rank, which joins those at these ports, if there are any.
    fn start(
        &mut self,
        rank: u32,
        port: OwnPort,
        join: Option<Vec<u16>>,
    ) -> Result<(), LaunchError> {
        let job = self.job;
        let index = job.index_of(rank).expect("it is of this machine");
        let local_rank = index as u32;
        let place = RankPlace { rank, local_rank, port: &port, join, beginning: &self.beginning };
        let (mut child, socket) = job
            .start(&place, self.records.as_deref())
            .map_err(|source| LaunchError::Start { command: job.command[0].clone(), source })?;
        let pid = child.id().and_then(|id| Pid::from_raw(id as i32));
        let pid = pid.expect("it has not been waited for");
        let last = LastLines::default();
        let prefix =
            if job.output == JobOutput::Marked { format!("[{rank}] ") } else { String::new() };
        let (output, errors) = (self.output.clone(), self.errors.clone());
        let (stdout, stderr) = (child.stdout.take(), child.stderr.take());
        let printed = tokio::spawn(pass_on(stdout, output, prefix.clone(), last.clone()));
        let complained = tokio::spawn(pass_on(stderr, errors, prefix, last.clone()));
        self.running.spawn(async move {
            let status = ended(pid).await;
            // Its output is read to the end, but a process that it started may hold it open for
            // ever.
            let all = async { (printed.await, complained.await) };
            let _ = tokio::time::timeout(LAST_WORDS, all).await;
            (rank, status, last)
        });
        if index < self.pids.len() {
            (self.pids[index], self.children[index], self.ports[index]) = (Some(pid), child, port);
        } else {
            self.pids.push(Some(pid));
            self.children.push(child);
            self.ports.push(port);
        }
        self.said.sockets.extend(socket.map(|socket| (rank, socket)));
        self.alive.insert(rank);
        Ok(())
    }

    /// Reaps a rank that has ended: a job may lose many over time, and should keep nothing of them.
    async fn part_with(&mut self, rank: u32) {
        self.said.show(self.job.ranks);
        self.said.sockets.retain(|(other, _)| *other != rank);
        if let Some(index) = self.job.index_of(rank) {
            tell(&self.pids[index..=index], Signal::KILL); // what it started and left behind
            (self.pids[index], self.ports[index]) = (None, OwnPort::Any);
            let _ = self.children[index].wait().await; // its status is known
        }
    }

    fn tell(&self, signal: Signal) {
        tell(&self.pids, signal);
    }
}

impl Job {
    /// Starts all ranks and waits for them.
    pub(crate) fn run(&self) -> Result<ExitCode, LaunchError> {
        let system = |what| move |source| LaunchError::System { what, source };
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        runtime.map_err(system("could not start"))?.block_on(self.supervise())
    }

    async fn supervise(&self) -> Result<ExitCode, LaunchError> {
        let system = |what| move |source| LaunchError::System { what, source };
        let mut wishes = Wishes::new().map_err(system("could not watch for signals"))?;
        let mut crew = Crew::new(self).map_err(system("could not get memory"))?;
        crew.start_all()?;
        let mut restarts = self.restarts();
        // In the order in which they failed, with their last lines.
        let mut failed: Vec<(u32, LastLines)> = Vec::new();
        let mut stopped = BTreeSet::new();
        let (mut have_left, mut is_done) = (false, false);
        let (mut asked_to_end, mut is_ending, mut is_beginning_again) = (false, false, false);
        let mut next: Option<(Instant, Signal)> = None;
        loop {
            let due = next.map_or_else(Instant::now, |(due, _)| due);
            let ended = tokio::select! {
                ended = crew.running.join_next() => ended,
                wish = wishes.next() => {
                    crew.tell(wish);
                    asked_to_end = true;
                    // A second signal does not postpone what follows from the first.
                    let kill = Instant::now() + self.grace;
                    let planned = next.filter(|(_, signal)| *signal == Signal::KILL);
                    next = Some((planned.map_or(kill, |(due, _)| due.min(kill)), Signal::KILL));
                    continue;
                }
                () = tokio::time::sleep_until(due), if next.is_some() => {
                    stopped.extend(self.stopped(&crew.pids));
                    crew.said.show(self.ranks); // the others may take long
                    let signal = next.map_or(Signal::KILL, |(_, signal)| signal);
                    if signal == Signal::KILL {
                        let grace = self.grace.as_secs_f64();
                        let who: Vec<_> = crew.alive.iter().map(|rank| format!("rank {rank}")).collect();
                        eprintln!("farwire: killing what did not end within {grace} s: {}", who.join(", "));
                    }
                    crew.tell(signal);
                    next = Some((Instant::now() + self.grace, Signal::KILL));
                    continue;
                }
            };
            let Some(ended) = ended else { break };
            let Ok((rank, status, last)) = ended else { continue };
            let status = status.map_err(system("could not wait for a rank"))?;
            crew.alive.remove(&rank);
            if is_beginning_again && !asked_to_end {
                crew.part_with(rank).await;
                if crew.alive.is_empty() {
                    is_beginning_again = false;
                    crew.beginning
                        .forget()
                        .map_err(system("could not forget how far ranks were"))?;
                    crew.start_all()?;
                }
                continue;
            }
            let is_first = |rank: &u32| self.index_of(*rank) < Some(self.ranks as usize);
            // The ranks are meeting: each waits for all, and none has done anything yet. (With
            // several hosts, others may be further than is known here.)
            let is_meeting = !self.is_on_several()
                && crew.beginning.has_met()
                && crew.alive.iter().any(|rank| is_first(rank) && !crew.beginning.has_seen(*rank));
            let has_begun = crew.beginning.has_come() && !is_meeting;
            // With no rank left that is part of the group, or about to be, none can be let in any
            // more.
            let is_in = |rank: &u32| is_first(rank) || crew.beginning.has_seen(*rank);
            let is_job = !has_begun || self.is_on_several() || crew.alive.iter().any(is_in);
            if !is_job && !crew.alive.is_empty() {
                is_ending = true;
                crew.tell(Signal::TERM);
            }
            if status.exit_status() == Some(LEFT.into()) {
                eprintln!("farwire: rank {rank} has left; {} on", go(crew.alive.len()));
                crew.part_with(rank).await;
                have_left = true;
                continue;
            }
            let died = status.exit_status() != Some(0);
            is_done |= !died;
            // A rank that was told to stop tells the others.
            let told = matches!(status.exit_status(), Some(TOLD_BY_INT | TOLD_BY_TERM));
            let is_lost = status.exit_status() == Some(GIVEN_UP.into());
            if !died || told || is_lost {
                restarts = 0; // the job is ending, and lets no more ranks in
                is_ending = true;
            }
            let goes_on = died && !told && !is_lost && !asked_to_end && failed.is_empty();
            // If no rank of this machine is alive, those of others may be, and rank 0 knows them.
            if let Some(ElasticJob { min, .. }) = self.elastic.filter(|_| goes_on)
                && (!has_begun || !crew.alive.is_empty() || self.is_on_several())
            {
                let how = status.terminating_signal().map_or_else(
                    || format!("exit status {}", status.exit_status().unwrap_or(-1)),
                    |signal| format!("signal {signal}"),
                );
                // A mistake in how it was started would be one for any other, too.
                let is_mistake = status.exit_status().is_some_and(|status| {
                    [MISTAKE].iter().chain(&NO_PROGRAM).any(|mistake| status == i32::from(*mistake))
                });
                let is_replaced = restarts > 0 && !is_mistake && is_job;
                is_beginning_again = is_meeting && is_replaced;
                let when = match has_begun {
                    true => format!("; {} on", go(crew.alive.len())),
                    false => " before all ranks had come".to_owned(),
                };
                let what = match () {
                    () if is_beginning_again => "; all begin again",
                    () if is_replaced && has_begun => ", and another is started",
                    () if is_replaced => "; the others wait until it has been started again",
                    () if is_job && !is_mistake => "; no restart is left (--restarts)",
                    () => "",
                };
                eprintln!("farwire: rank {rank} has ended ({how}){when}{what}");
                crew.part_with(rank).await;
                if is_beginning_again {
                    restarts -= 1;
                    crew.tell(Signal::KILL);
                    continue;
                }
                if is_replaced {
                    restarts -= 1;
                    let started = if has_begun {
                        crew.start_another()
                    } else {
                        // The others wait for this very rank.
                        self.port_of(rank).and_then(|port| crew.start(rank, port, None))
                    };
                    match started {
                        Ok(()) => continue,
                        Err(error) => eprintln!("farwire: could not start another: {error}"),
                    }
                }
                if has_begun && is_job && crew.alive.len() >= min as usize {
                    continue;
                }
            }
            // A rank that was to take the place of another may come too late, and say so, or be
            // told.
            let came_late = is_ending
                && (!told || !crew.beginning.has_seen(rank))
                && self.index_of(rank) >= Some(self.ranks as usize);
            if died && !came_late {
                failed.push((rank, last));
                next = next.or(Some((Instant::now() + FIND_OUT, Signal::TERM)));
            }
        }
        let Crew { children, records, mut said, .. } = crew;
        let mut statuses = Vec::new();
        for mut child in children {
            statuses.push(child.wait().await.map_err(system("could not wait for a rank"))?);
        }
        let Some((rank, last)) = failed.first() else {
            if have_left && !is_done && !self.is_on_several() {
                eprintln!("farwire: all ranks have left, and the run is not done");
                return Ok(ExitCode::from(LEFT));
            }
            return Ok(ExitCode::SUCCESS);
        };
        let status_of = |rank: &u32| statuses.get(self.index_of(*rank)?);
        let status = *status_of(rank).expect("it is one of those that were started");
        said.show(self.ranks);
        let was_told = |rank: &u32| {
            let code = status_of(rank).and_then(ExitStatus::code);
            matches!(code, Some(TOLD_BY_INT | TOLD_BY_TERM))
        };
        if !asked_to_end && self.elastic.is_some() && failed.iter().all(|(rank, _)| was_told(rank))
        {
            eprintln!("farwire: a rank was told to stop, and told the others; all have ended");
            return Ok(ExitCode::from(code(status)));
        }
        // If all that failed say the same, it does not matter which was first.
        let is_explained =
            said.shown.len() == 1 && said.said.iter().any(|(other, _)| other == rank);
        // Its peers may have failed because of a rank that has not failed itself.
        let last_lines = failed.iter().flat_map(|(_, last)| lines(last).clone());
        let texts: Vec<String> =
            last_lines.chain(said.said.iter().map(|(_, text)| text.clone())).collect();
        let lost = lost_rank(texts.iter().map(String::as_str)).filter(|lost| lost != rank);
        if !asked_to_end && !is_explained {
            let last = lines(last);
            let and = if last.is_empty() { "" } else { "; its last lines were:" };
            let what = match lost {
                Some(_) => "was the first to notice",
                None if self.elastic.is_some() => "failed", // others may have ended before
                None => "failed first",
            };
            eprintln!("farwire: rank {rank} {what} ({status}){and}");
            for line in last.iter() {
                eprintln!("  {line}");
            }
            if let Some(folder) = records.filter(|folder| folder.exists()) {
                eprintln!("farwire: who was missing? farwire doctor {}/*.json", folder.display());
            }
        }
        if let Some(lost) = lost.filter(|_| !asked_to_end) {
            let what = match status_of(&lost) {
                None => "it does not run on this machine; see its launcher's output".to_owned(),
                Some(status) if stopped.contains(&lost) => {
                    format!("it was stopped, by SIGSTOP or a debugger, and then ended ({status})")
                }
                Some(status) => format!("it ended ({status})"),
            };
            eprintln!("farwire: rank {lost} was lost: {what}");
        }
        Ok(ExitCode::from(code(status)))
    }

    /// Ranks share the cores: more threads of candle would only wait for each other. A value that
    /// the user has set stays.
    fn threads(&self) -> Option<(&'static str, String)> {
        const THREADS: &str = "RAYON_NUM_THREADS";
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let share = (cores / self.ranks as usize).max(1);
        std::env::var_os(THREADS).is_none().then(|| (THREADS, share.to_string()))
    }

    /// Where a rank listens. In an elastic job this launcher has to know, to tell other ranks.
    fn port_of(&self, rank: u32) -> Result<OwnPort, LaunchError> {
        match self.elastic {
            _ if rank == 0 => Ok(OwnPort::Master),
            None => Ok(OwnPort::Any),
            Some(_) => OwnPort::held(),
        }
    }

    /// The port by which others find a rank.
    fn number_of(&self, port: &OwnPort) -> Option<u16> {
        match (port, &self.master) {
            (OwnPort::Any, _) => None,
            (OwnPort::Held(held), _) | (OwnPort::Master, Master::Held(held)) => Some(held.port()),
            (OwnPort::Master, Master::Given(_, port)) => Some(*port),
        }
    }

    /// How many ranks may be started in place of others.
    fn restarts(&self) -> u32 {
        self.elastic.map_or(0, |elastic| elastic.restarts)
    }

    /// Whether other machines run ranks of this job, too.
    fn is_on_several(&self) -> bool {
        self.world > self.ranks
    }

    /// The number of the rank that was started on this machine as its `index`-th. No other launcher
    /// of the job gives that number to a rank of its own.
    fn number_at(&self, index: usize) -> u32 {
        let (index, nodes) = (index as u32, self.world / self.ranks);
        match index.checked_sub(self.ranks) {
            None => self.first_rank + index,
            Some(later) => self.world + later * nodes + self.first_rank / self.ranks,
        }
    }

    /// Which of all ranks ever started here has a number; `None` if it is another launcher's.
    fn index_of(&self, number: u32) -> Option<usize> {
        let index = match number.checked_sub(self.world) {
            None => number.checked_sub(self.first_rank)?,
            Some(later) => self.ranks + later / (self.world / self.ranks),
        };
        (self.number_at(index as usize) == number).then_some(index as usize)
    }

    /// The addresses by which a rank that is started later finds the job: those of this machine's
    /// ranks, and that of rank 0.
    fn addresses(&self, ports: &[u16]) -> Vec<String> {
        let (host, master) = match &self.master {
            Master::Held(_) => (Ipv4Addr::LOCALHOST.to_string(), None),
            Master::Given(host, port) if self.first_rank == 0 => {
                (host.clone(), Some((host, *port)))
            }
            Master::Given(host, port) => (own_address(host, *port), Some((host, *port))),
        };
        let mut all: Vec<_> = ports.iter().map(|port| address(&host, *port)).collect();
        let master = master.map(|(host, port)| address(host, port));
        all.extend(master.filter(|master| !all.contains(master)));
        all
    }

    /// The ranks that have been stopped by a signal and not ended.
    fn stopped(&self, pids: &[Option<Pid>]) -> Vec<u32> {
        let is_stopped = |pid: Pid| {
            let about = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
            // The name of the program, in parentheses, may hold anything.
            about.rsplit_once(") ").is_some_and(|(_, state)| state.starts_with(['T', 't']))
        };
        let ranks = pids.iter().enumerate().map(|(index, pid)| (self.number_at(index), pid));
        ranks.filter(|(_, pid)| pid.is_some_and(is_stopped)).map(|(rank, _)| rank).collect()
    }

    /// Starts a rank. If its output is its own, also returns the socket on which its error comes.
    fn start(
        &self,
        place: &RankPlace<'_>,
        records: Option<&Path>,
    ) -> io::Result<(Child, Option<UnixStream>)> {
        let &RankPlace { rank, local_rank, port: own_port, ref join, beginning } = place;
        let own_port = match own_port {
            OwnPort::Held(held) => Some(held),
            OwnPort::Any | OwnPort::Master => None,
        };
        let (host, port, held) = match &self.master {
            Master::Given(host, port) => (&host[..], *port, None),
            Master::Held(held) => ("127.0.0.1", held.port(), Some(held.variable())),
        };
        // Through this program, which ties it to the launcher's life: see `become_rank`.
        let stdio =
            || if self.output == JobOutput::Theirs { Stdio::inherit() } else { Stdio::piped() };
        let mut command = Command::new("/proc/self/exe");
        command.arg0("farwire").arg("become-rank").arg(std::process::id().to_string());
        let (mut local_rank, mut local_world) = (local_rank, self.ranks);
        let placed = self.hosts.get(local_rank as usize);
        if let Some(RankHost { number, namespace, .. }) = placed {
            if let Some(namespace) = namespace {
                command.arg("--namespace").arg(namespace);
            }
            let is_mate = |other: &&RankHost| other.number == *number;
            let before = self.hosts.iter().take(local_rank as usize).filter(is_mate).count();
            local_rank = before as u32;
            local_world = self.hosts.iter().filter(is_mate).count() as u32;
        }
        command
            .arg("--")
            .args(&self.command)
            .envs(records.map(|folder| ("FARWIRE_FLIGHT_DIR", folder)))
            .envs(self.name.as_ref().map(|name| ("FARWIRE_JOB", name)))
            .envs(held)
            .env("RANK", rank.to_string())
            .env("LOCAL_RANK", local_rank.to_string())
            .env("WORLD_SIZE", self.world.to_string())
            .env("LOCAL_WORLD_SIZE", local_world.to_string())
            .env("MASTER_ADDR", host)
            .env("MASTER_PORT", port.to_string())
            .envs(placed.and_then(|host| Some(("FARWIRE_HOST", host.name.as_ref()?))))
            .envs(self.threads())
            .envs(self.variables.iter().map(|(name, value)| (name, value)))
            .envs(self.elastic.map(|_| ("FARWIRE_ELASTIC", "1")))
            .envs(own_port.map(|held| ("FARWIRE_PORT", held.port().to_string())))
            .envs(own_port.map(HeldPort::variable))
            .envs(self.elastic.map(|_| beginning.variable(rank)))
            .envs(join.as_ref().map(|ports| ("FARWIRE_JOIN", self.addresses(ports).join(","))))
            .stdout(stdio())
            .stderr(stdio())
            // A process group of its own, so that signals reach what it starts, too.
            .process_group(0)
            .kill_on_drop(true);
        if let Some(token) = &self.token {
            command.env("FARWIRE_TOKEN", token.reveal());
        }
        let mut error = None;
        if self.output == JobOutput::Theirs {
            let (ours, theirs) = UnixStream::pair()?;
            ours.set_nonblocking(true)?;
            error = Some(ours);
            command.stdin(OwnedFd::from(theirs)).env(TELL_PARENT, "stdin");
        } else {
            command.stdin(Stdio::null()).env_remove(TELL_PARENT);
        }
        Ok((command.spawn()?, error))
    }
}

/// What one process of a job is told, unlike the others.
struct RankPlace<'a> {
    rank: u32,
    local_rank: u32,
    port: &'a OwnPort,
    /// The ports of the ranks that it is to join; `None` if it is there from the start.
    join: Option<Vec<u16>>,
    beginning: &'a Beginning,
}

/// The address by which others reach this machine: the one from which it would reach `host`.
/// Nothing is sent there.
fn own_address(host: &str, port: u16) -> String {
    let way = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0))
        .and_then(|socket| socket.connect((host, port)).map(|()| socket))
        .or_else(|_| {
            let socket = UdpSocket::bind((Ipv6Addr::UNSPECIFIED, 0))?;
            socket.connect((host, port)).map(|()| socket)
        })
        .and_then(|socket| socket.local_addr());
    way.map_or_else(|_| Ipv4Addr::LOCALHOST.to_string(), |way| way.ip().to_string())
}

/// A host and a port as text.
fn address(host: &str, port: u16) -> String {
    if host.contains(':') && !host.starts_with('[') {
        format!("[{host}]:{port}")
    } else {
        format!("{host}:{port}")
    }
}

/// Where a rank listens.
#[derive(Debug)]
enum OwnPort {
    /// At any port that it gets.
    Any,
    /// Where all ranks look for rank 0.
    Master,
    /// At a port that is kept free for it.
    Held(HeldPort),
}

impl OwnPort {
    fn held() -> Result<Self, LaunchError> {
        HeldPort::any()
            .map(Self::Held)
            .map_err(|source| LaunchError::System { what: "could not find a free port", source })
    }
}

/// `1 goes`, or `2 go`.
fn go(ranks: usize) -> String {
    if ranks == 1 { "1 goes".to_owned() } else { format!("{ranks} go") }
}

/// The code to exit with: the rank's own, or 128 plus the signal that ended it, as shells do.
fn code(status: ExitStatus) -> u8 {
    use std::os::unix::process::ExitStatusExt;
    let code = status.code().or_else(|| status.signal().map(|signal| 128 + signal));
    code.and_then(|code| u8::try_from(code).ok()).filter(|code| *code != 0).unwrap_or(1)
}

/// The last lines that a rank has printed.
type LastLines = Arc<Mutex<VecDeque<String>>>;

fn lines(last: &LastLines) -> MutexGuard<'_, VecDeque<String>> {
    last.lock().unwrap_or_else(PoisonError::into_inner)
}

fn tell(pids: &[Option<Pid>], signal: Signal) {
    for pid in pids.iter().flatten() {
        let _ = rustix::process::kill_process_group(*pid, signal); // it may have ended
    }
}

/// Waits until a process has ended, without reaping it.
async fn ended(pid: Pid) -> io::Result<WaitIdStatus> {
    let mut some_child_ended = signal(SignalKind::child())?;
    loop {
        let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
        if let Some(status) = rustix::process::waitid(WaitId::Pid(pid), options)? {
            return Ok(status);
        }
        some_child_ended.recv().await;
    }
}

/// Copies lines, each with the prefix, and remembers the last ones.
async fn pass_on(
    from: Option<impl AsyncRead + Unpin>,
    to: Arc<tokio::sync::Mutex<impl AsyncWrite + Unpin>>,
    prefix: String,
    last: LastLines,
) {
    let Some(from) = from else { return };
    let mut from = BufReader::new(from);
    let mut line = Vec::new();
    while matches!((&mut from).take(LONGEST_LINE).read_until(b'\n', &mut line).await, Ok(1..)) {
        if line.last() != Some(&b'\n') {
            line.push(b'\n');
        }
        let text = [prefix.as_bytes(), &line].concat();
        {
            // Written to the end before another may write, so that lines of several ranks do not
            // mix. If nobody reads any more, the rank still runs to its end.
            let mut to = to.lock().await;
            let _ = to.write_all(&text).await;
            let _ = to.flush().await;
        }
        let mut last = lines(&last);
        if last.len() == LAST_LINES {
            last.pop_front();
        }
        last.push_back(String::from_utf8_lossy(&line).trim_end().to_owned());
        line.clear();
    }
}

/// Become a rank's command: what `farwire launch` starts.
#[derive(Debug, clap::Args)]
pub(crate) struct BecomeArgs {
    /// The process id of the launcher that this process belongs to.
    launcher: i32,
    /// The network namespace to move to first.
    #[arg(long)]
    namespace: Option<PathBuf>,
    #[arg(last = true, required = true)]
    command: Vec<OsString>,
}

/// Makes the system kill this process when the launcher dies, however it dies, and becomes the
/// command, to which that still applies. (It does not apply to processes that the command starts.)
pub(crate) fn become_rank(args: &BecomeArgs) -> Result<ExitCode, LaunchError> {
    let system = |source: rustix::io::Errno| LaunchError::System {
        what: "could not tie a rank to its launcher",
        source: source.into(),
    };
    rustix::process::set_parent_process_death_signal(Some(Signal::KILL)).map_err(system)?;
    // The launcher may have died before that.
    if rustix::process::getppid().map(Pid::as_raw_nonzero).map(i32::from) != Some(args.launcher) {
        return Ok(ExitCode::FAILURE);
    }
    if let Some(path) = &args.namespace {
        enter(path).map_err(|source| LaunchError::System {
            what: "could not enter a network namespace",
            source,
        })?;
    }
    let source = std::process::Command::new(&args.command[0]).args(&args.command[1..]).exec();
    let [cannot_run, not_there] = NO_PROGRAM;
    let code = if source.kind() == io::ErrorKind::NotFound { not_there } else { cannot_run };
    say_error(&LaunchError::Start { command: args.command[0].clone(), source });
    Ok(ExitCode::from(code))
}

/// Moves this thread, and so the command it becomes, to another network namespace.
fn enter(namespace: &Path) -> io::Result<()> {
    use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
    let namespace = std::fs::File::open(namespace)?;
    Ok(move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::Network))?)
}
