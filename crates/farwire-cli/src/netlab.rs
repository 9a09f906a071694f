//! `farwire netlab`: a command on several hosts of a network that is as bad as asked for.

use std::ffi::OsString;
use std::fs::File;
use std::io::{self, BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::mpsc::Sender;
use std::time::Duration;

use farwire::Token;
use farwire_netlab::{
    Cut, DEVICE, Impairments, Lab, LabError, Loss, Outage, Partition, Queue, Relayed, Tally,
};
use serde::Serialize;

use crate::launch::{GRACE, Job, JobOutput, LaunchError, Master, RankHost};
use crate::units::{rate, share, size, time};

/// Run a command on several hosts joined by a slow, long or lossy network, all on this machine.
///
/// Each host is a network namespace with one device (far0, with addresses 10.77.0.1, 10.77.0.2, …).
/// A relay in this process carries packets between them, and makes the network as bad as asked for.
/// Needs root on Linux. Nothing stays behind, however it ends.
///
/// The command runs once on each host, or as often as --ranks-per-host says. It gets the variables
/// that `farwire launch` sets: RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT and FARWIRE_TOKEN, so
/// farwire programs just work. It also gets FARWIRE_HOST, so that ranks share memory only within
/// their host, and GLOO_SOCKET_IFNAME, for torch.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  Two clouds, 100 ms round trip, one packet in a thousand lost:
    farwire netlab --hosts 2 --rate 200mbit --delay 50ms --loss 0.1% \\
      -- farwire bench all_reduce --size 64MiB
  Two homes, fast down and slow up:
    farwire netlab --rate 40mbit --down-rate 250mbit --delay 10ms --jitter 5ms \\
      -- farwire bench all_reduce --size 8MiB --codec topk:0.01
  Four hosts with two ranks each:
    farwire netlab --hosts 4 --ranks-per-host 2 --rate 1gbit \\
      -- farwire bench all_reduce --size 100MB
  A mobile link that loses packets in bursts of ten:
    farwire netlab --rate 50mbit --delay 30ms --loss 1% --burst 10 -- COMMAND
  What happens when the network goes away for three seconds, or for good:
    farwire netlab --delay 20ms --outage 5s..8s -- COMMAND
    farwire netlab --delay 20ms --outage 5s.. -- COMMAND
  A path that silently drops packets above 1300 bytes:
    farwire netlab --mtu 1300 -- COMMAND
  A laptop behind a router that lets nobody in:
    farwire netlab --hosts 3 --hidden 1 -- COMMAND
  Hosts 3 and 4 of five cut off from the others, from 10 to 20 s after the start:
    farwire netlab --hosts 5 --partition 3,4@10s..20s -- COMMAND
  A shell on the first host: farwire netlab --hosts 1 -- sh -c 'ip address; ping -c 1 10.77.0.1'

--delay is one way: a round trip takes twice as long.")]
pub(crate) struct Args {
    /// Number of hosts.
    #[arg(long, default_value = "2", value_parser = clap::value_parser!(u32).range(1..=254))]
    hosts: u32,
    /// Ranks on each host. They share its network and memory.
    #[arg(long, default_value = "1", value_parser = clap::value_parser!(u32).range(1..=64))]
    ranks_per_host: u32,
    /// Rate at which a host can send, such as 200mbit or 25MB/s. Default: no limit.
    #[arg(long, value_parser = rate)]
    rate: Option<f64>,
    /// Rate at which a host can receive. Default: the same as --rate.
    #[arg(long, value_parser = rate)]
    down_rate: Option<f64>,
    /// How long a packet travels, one way, such as 50ms.
    #[arg(long, default_value = "0", value_parser = time)]
    delay: Duration,
    /// Random extra delay of each packet, up to this much. The order does not change.
    #[arg(long, default_value = "0", value_parser = time)]
    jitter: Duration,
    /// Size of the queue in front of the bottleneck, as a time (100ms) or in bytes (256KiB).
    #[arg(long, default_value = "100ms", value_parser = queue)]
    queue: Queue,
    /// Share of packets lost, such as 0.1%. Each is lost independently, unless --burst is given.
    #[arg(long, default_value = "0", value_parser = share)]
    loss: f64,
    /// How many packets --loss drops in a row, on average.
    #[arg(long, default_value = "1", value_parser = clap::value_parser!(u32).range(1..))]
    burst: u32,
    /// Share of packets that arrive out of order, such as 1%.
    #[arg(long, default_value = "0", value_parser = share)]
    reorder: f64,
    /// Share of packets that arrive twice, such as 1%.
    #[arg(long, default_value = "0", value_parser = share)]
    duplicate: f64,
    /// Packets with more bytes than this vanish, without the ICMP message that would say so.
    #[arg(long, value_parser = clap::value_parser!(u32).range(68..=1500))]
    mtu: Option<u32>,
    /// A time, counted from the start, in which nothing arrives: 5s..8s, or 5s.. without end. May
    /// be repeated.
    #[arg(long, value_parser = outage)]
    outage: Vec<Outage>,
    /// A time in which some hosts are cut off from the others: 0,1@5s..20s. May be repeated.
    #[arg(long, value_parser = partition)]
    partition: Vec<Partition>,
    /// A time in which nothing that some hosts send arrives, while they still hear the others:
    /// 2@5s..20s. May be repeated.
    #[arg(long, value_name = "HOSTS@TIME", value_parser = partition)]
    mute: Vec<Partition>,
    /// A FIFO or file with commands, one per line, that take effect at once: `cut 3,4 5s` cuts
    /// hosts 3 and 4 off for 5 s, `mute 2 5s` drops what host 2 sends for 5 s.
    #[arg(long, value_name = "FILE")]
    control: Option<PathBuf>,
    /// Number of a host that can call others but not be called, as behind NAT or a firewall. May be
    /// repeated.
    #[arg(long, value_name = "HOST")]
    hidden: Vec<usize>,
    /// Random seed for loss, jitter and the rest.
    #[arg(long, default_value = "1")]
    seed: u64,
    /// Write one JSON object to this file: what became of the packets, and the CPU time of the
    /// relay.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// The command and its arguments.
    #[arg(last = true, required = true, value_name = "COMMAND")]
    command: Vec<OsString>,
}

/// Why it did not run.
#[derive(Debug, thiserror::Error)]
pub(crate) enum NetlabError {
    #[error("there is no host {host}; they are counted from 0, so the last is {last}")]
    NoSuchHost { host: usize, last: u32 },
    #[error("{0}")]
    Lab(#[from] LabError),
    #[error("{0}")]
    Launch(#[from] LaunchError),
    #[error("could not write {}: {source}", path.display())]
    Output { path: PathBuf, source: std::io::Error },
}

/// What `--json` writes.
#[derive(Debug, Serialize)]
struct Json {
    relay_cpu_s: f64,
    relay_bytes: u64,
    relay_packets: u64,
    lost: u64,
    overflowed: u64,
}

impl Json {
    fn new(done: &Relayed) -> Self {
        let sum = |what: fn(&Tally) -> u64| done.hosts.iter().map(what).sum();
        Self {
            relay_cpu_s: done.cpu.as_secs_f64(),
            relay_bytes: sum(|host| host.bytes),
            relay_packets: sum(|host| host.passed),
            lost: sum(|host| host.lost),
            overflowed: sum(|host| host.overflowed),
        }
    }
}

/// How many hosts with one rank each may share a core before their ranks are told that they do.
const CROWD: usize = 4;
/// In a namespace of its own, any port is free.
const PORT: u16 = 29500;

fn queue(text: &str) -> Result<Queue, String> {
    let parsed = time(text).map(Queue::Time).or_else(|_| size(text).map(Queue::Bytes));
    parsed.map_err(|_| format!("`{text}` is not a queue; write a time (100ms) or a size (256KiB)"))
}

fn outage(text: &str) -> Result<Outage, String> {
    let wrong = || format!("`{text}` is not an outage; write 5s..8s, or 5s.. for one without end");
    let (from, to) = text.split_once("..").ok_or_else(wrong)?;
    let from = time(from).map_err(|_| wrong())?;
    let to = if to.is_empty() { None } else { Some(time(to).map_err(|_| wrong())?) };
    if to.is_some_and(|to| to <= from) {
        return Err(wrong());
    }
    Ok(Outage { from, to })
}

fn partition(text: &str) -> Result<Partition, String> {
    let wrong = || format!("`{text}` is not a partition; write hosts and a time: 0,1@5s..20s");
    let (hosts, time) = text.split_once('@').ok_or_else(wrong)?;
    let side: Result<_, _> = hosts.split(',').map(|host| host.trim().parse()).collect();
    let time = outage(time).map_err(|_| wrong())?;
    Ok(Partition { side: side.map_err(|_| wrong())?, time, one_way: false })
}

/// Cuts the network as the lines of a file say, when they come.
fn follow(path: &Path, hosts: usize, cuts: &Sender<Cut>) -> io::Result<()> {
    for line in BufReader::new(File::open(path)?).lines() {
        match cut(&line?).filter(|cut| cut.side.iter().all(|host| *host < hosts)) {
            Some(cut) => drop(cuts.send(cut)), // the network may have ended
            None => eprintln!("farwire: --control: write `cut 3,4 5s` or `mute 2 5s`"),
        }
    }
    Ok(())
}

/// A line of the control file.
fn cut(line: &str) -> Option<Cut> {
    let mut words = line.split_whitespace();
    let one_way = match words.next()? {
        "cut" => false,
        "mute" => true,
        _ => return None,
    };
    let side = words.next()?.split(',').map(|host| host.parse().ok()).collect::<Option<_>>()?;
    let lasts = time(words.next()?).ok()?;
    words.next().is_none().then_some(Cut { side, one_way, lasts })
}

impl Args {
    fn partitions(&self) -> impl Iterator<Item = Partition> {
        let mute = self.mute.iter().map(|mute| Partition { one_way: true, ..mute.clone() });
        self.partition.iter().cloned().chain(mute)
    }

    fn impairments(&self) -> Impairments {
        Impairments {
            rate: self.rate,
            down_rate: self.down_rate,
            delay: self.delay,
            jitter: self.jitter,
            queue: self.queue,
            loss: match (self.loss, self.burst) {
                (0.0, _) => Loss::None,
                (share, 1) => Loss::Random(share),
                (share, length) => Loss::Bursty { share, length: length.into() },
            },
            reorder: self.reorder,
            duplicate: self.duplicate,
            mtu: self.mtu.map(|mtu| mtu as usize),
            outages: self.outage.clone(),
            partitions: self.partitions().collect(),
            hidden: self.hidden.clone(),
        }
    }
}

/// Runs the command.
pub(crate) fn run(args: &Args) -> Result<ExitCode, NetlabError> {
    let named = args.partitions().flat_map(|partition| partition.side);
    let named = named.chain(args.hidden.iter().copied());
    if let Some(host) = named.max().filter(|host| *host >= args.hosts as usize) {
        return Err(NetlabError::NoSuchHost { host, last: args.hosts - 1 });
    }
    let lab = Lab::new(args.hosts as usize, &args.impairments(), args.seed)?;
    if let Some(path) = args.control.clone() {
        let (cuts, hosts) = (lab.cuts(), args.hosts as usize);
        // It may wait for a writer as long as this process lives.
        std::thread::spawn(move || {
            if let Err(error) = follow(&path, hosts, &cuts) {
                eprintln!("farwire: --control {}: {error}", path.display());
            }
        });
    }
    let unset = |name: &str| std::env::var_os(name).is_none();
    let has_token = !unset("FARWIRE_TOKEN") || !unset("FARWIRE_TOKEN_FILE");
    let mut variables = vec![("GLOO_SOCKET_IFNAME", DEVICE.to_owned())];
    if unset("FARWIRE_LINK") && args.ranks_per_host == 1 {
        // The hosts share a machine, but are not meant to notice.
        variables.push(("FARWIRE_LINK", "quic".to_owned()));
    }
    let ranks = args.hosts * args.ranks_per_host;
    // Hosts have names of their own, as on a real network. But if there are many with one rank
    // each, all have the machine's name: then ranks know that they share its cores, and have more
    // patience with each other.
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let is_crowded = args.hosts as usize > CROWD * cores;
    let is_named = args.ranks_per_host > 1 || !is_crowded;
    let host = |host: u32| RankHost {
        number: host.into(),
        name: is_named.then(|| format!("host-{host}")),
        namespace: Some(lab.namespace_path(host as usize)),
    };
    let code = Job {
        command: args.command.clone(),
        ranks,
        first_rank: 0,
        world: ranks,
        master: Master::Given(Lab::address(0).to_string(), PORT),
        name: None,
        token: (!has_token).then(Token::generate),
        variables,
        output: JobOutput::Marked,
        grace: GRACE,
        hosts: (0..ranks).map(|rank| rank / args.ranks_per_host).map(host).collect(),
        elastic: None,
    }
    .run()?;
    let done = lab.close();
    for (host, tally) in done.hosts.iter().enumerate() {
        tracing::info!(host, ?tally, "what became of the packets that left it");
    }
    if let Some(path) = args.json.clone() {
        let text = serde_json::to_string(&Json::new(&done)).expect("plain numbers serialise");
        let written = std::fs::write(&path, text + "\n");
        written.map_err(|source| NetlabError::Output { path, source })?;
    }
    Ok(code)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn queues_are_times_or_sizes() {
        assert_eq!(queue("20ms"), Ok(Queue::Time(Duration::from_millis(20))));
        assert_eq!(queue("256KiB"), Ok(Queue::Bytes(256 << 10)));
        assert!(queue("long").unwrap_err().contains("100ms"));
    }

    #[test]
    fn partitions_are_hosts_and_a_time() {
        let time = outage("5s..8s").unwrap();
        let parsed = Partition { side: vec![0, 2], time, one_way: false };
        assert_eq!(partition("0,2@5s..8s"), Ok(parsed));
        for wrong in ["", "0", "@5s..", "0,@5s..", "a@5s..", "0@8s..5s", "0@"] {
            assert!(partition(wrong).unwrap_err().contains("0,1@5s..20s"), "{wrong}");
        }
    }

    #[test]
    fn cuts_have_hosts_and_a_time() {
        let lasts = Duration::from_secs(5);
        assert_eq!(cut("cut 3,4 5s"), Some(Cut { side: vec![3, 4], one_way: false, lasts }));
        assert_eq!(cut("mute 2 5s"), Some(Cut { side: vec![2], one_way: true, lasts }));
        for wrong in ["", "cut", "cut 1", "cut 1 long", "cut a 5s", "cut 1 5s 6s", "heal 1 5s"] {
            assert_eq!(cut(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn outages_have_a_start_and_perhaps_an_end() {
        let second = Duration::from_secs(1);
        assert_eq!(outage("5s..8s"), Ok(Outage { from: 5 * second, to: Some(8 * second) }));
        assert_eq!(outage("5s.."), Ok(Outage { from: 5 * second, to: None }));
        for wrong in ["5s", "..5s", "8s..5s", "5s..5s", "", ".."] {
            assert!(outage(wrong).unwrap_err().contains("5s..8s"), "{wrong}");
        }
    }
}
