//! One of four ranks dies, stops or is cut off in the middle of a loop of all-reduces; how long
//! does it take until the others know?
//!
//! Each case runs once, or as often as `FARWIRE_TRIES` says, and prints a row of a table:
//!
//! ```text
//! FARWIRE_TRIES=30 cargo test -p farwire-cli --test lost -- --nocapture --test-threads 1
//! ```

#![allow(clippy::unwrap_used, reason = "a test that cannot go on should say where")]

use std::io::{BufRead, BufReader, Read};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::time::Duration;

use farwire::LinkChoice;
use farwire::{Communicator, Fault, Peer, ReduceOp};
use rustix::process::{Pid, Signal, kill_process};

const RANKS: usize = 4;
const VICTIM: usize = 2;
const MARK: &str = "FARWIRE_TEST_LOST";

/// A clock that is the same for all processes of a machine.
fn now() -> Duration {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    Duration::new(now.tv_sec as u64, now.tv_nsec as u32)
}

/// What a rank does; in other processes, nothing.
#[test]
fn rank() {
    if std::env::var_os(MARK).is_none() {
        return;
    }
    let comm = Communicator::from_env().unwrap();
    for round in 0u32.. {
        if round == 50 {
            println!("\nrank {} ready {}", comm.rank(), std::process::id());
        }
        match comm.all_reduce(vec![round; 50_000], ReduceOp::Sum).wait() {
            Ok(sum) => assert!(sum.iter().all(|sum| *sum == RANKS as u32 * round)),
            Err(error) => {
                let now = now().as_nanos();
                if comm.rank() != VICTIM {
                    assert_eq!(
                        error.fault(),
                        Some(&Fault::PeerLost(Peer(VICTIM as u32))),
                        "{error}"
                    );
                    println!("\nrank {} lost {now}", comm.rank());
                }
                return;
            }
        }
    }
}

/// How to start a rank.
fn rank_command() -> [String; 4] {
    let this = std::env::current_exe().unwrap().into_os_string().into_string().unwrap();
    [this, "rank".into(), "--exact".into(), "--nocapture".into()]
}

/// What ranks have said, as `(rank, what, number)`.
struct Said(mpsc::Receiver<(usize, String, u64)>);

impl Said {
    fn by(outputs: Vec<impl Read + Send + 'static>) -> Said {
        let (sender, receiver) = mpsc::channel();
        for output in outputs {
            let sender = sender.clone();
            std::thread::spawn(move || {
                for line in BufReader::new(output).lines().map_while(Result::ok) {
                    let Some((_, said)) = line.split_once("rank ") else { continue };
                    let mut words = said.split(' ');
                    let rank = words.next().and_then(|rank| rank.parse().ok());
                    let what = words.next().unwrap_or_default().to_owned();
                    let number = words.next().and_then(|number| number.parse().ok());
                    if let (Some(rank), Some(number)) = (rank, number) {
                        let _ = sender.send((rank, what, number));
                    }
                }
            });
        }
        Said(receiver)
    }

    /// Waits until `count` ranks have said `wanted`, and returns their numbers by rank.
    fn wait_for(&self, wanted: &str, mut count: usize) -> [u64; RANKS] {
        let mut numbers = [0; RANKS];
        while count > 0 {
            let (rank, what, number) = self.0.recv().expect("all that is waited for is said");
            if what == wanted {
                numbers[rank] = number;
                count -= 1;
            }
        }
        numbers
    }
}

/// Runs a case as often as asked, and prints how long survivors took.
fn table(case: &str, mut once: impl FnMut() -> Vec<Duration>) {
    let tries = std::env::var("FARWIRE_TRIES").map_or(1, |tries| tries.parse().unwrap());
    let mut times: Vec<_> = (0..tries).flat_map(|_| once()).map(|time| time.as_millis()).collect();
    times.sort_unstable();
    let at = |part: usize| times[(times.len() * part).div_ceil(100).max(1) - 1];
    println!(
        "{case}: {tries} tries, {} survivors; ms to the error: p50 {}, p99 {}, max {}",
        times.len(),
        at(50),
        at(99),
        at(100)
    );
}

/// The time from the blow to what each survivor said.
fn delays(blow: Duration, lost: [u64; RANKS]) -> Vec<Duration> {
    let survivors = lost.iter().enumerate().filter(|(rank, _)| *rank != VICTIM);
    survivors
        .map(|(_, at)| Duration::from_nanos(*at).checked_sub(blow).expect("after the blow"))
        .collect()
}

/// One job under `farwire launch`, one of whose ranks gets a signal.
fn signalled(link: &str, signal: Signal) -> Vec<Duration> {
    let mut launcher = Command::new(env!("CARGO_BIN_EXE_farwire"))
        .args(["launch", "-n", &RANKS.to_string(), "--"])
        .args(rank_command())
        .env(MARK, "1")
        .env("FARWIRE_LINK", link)
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let said = Said::by(vec![launcher.stdout.take().unwrap()]);
    let victim = Pid::from_raw(said.wait_for("ready", RANKS)[VICTIM] as i32).unwrap();
    let blow = now();
    kill_process(victim, signal).unwrap();
    let times = delays(blow, said.wait_for("lost", RANKS - 1));
    if signal == Signal::STOP {
        kill_process(victim, Signal::KILL).unwrap(); // it is the launcher's, which waits for it
    }
    assert_eq!(
        launcher.wait().unwrap().code(),
        Some(128 + 9),
        "that is what happened to the victim"
    );
    times
}

#[test]
fn survivors_of_a_killed_rank_know() {
    for link in LinkChoice::all().skip(1).map(LinkChoice::name) {
        table(&format!("SIGKILL, {link}"), || signalled(link, Signal::KILL));
    }
}

#[test]
fn survivors_of_a_stopped_rank_know() {
    for link in LinkChoice::all().skip(1).map(LinkChoice::name) {
        table(&format!("SIGSTOP, {link}"), || signalled(link, Signal::STOP));
    }
}

/// A host for each rank, as network namespaces around a bridge, for as long as it lives.
struct Hosts {
    prefix: String,
}

/// Runs `ip`; the error is what it complained about.
fn ip(arguments: &str) -> Result<(), String> {
    let output = Command::new("ip").args(arguments.split(' ')).output();
    let output = output.map_err(|error| format!("ip: {error}"))?;
    if output.status.success() {
        Ok(())
    } else {
        Err(format!("ip {arguments}: {}", String::from_utf8_lossy(&output.stderr).trim()))
    }
}

impl Hosts {
    fn new() -> Result<Hosts, String> {
        let hosts = Hosts { prefix: format!("fw{}", std::process::id()) };
        let prefix = &hosts.prefix;
        ip(&format!("netns add {prefix}br"))?;
        ip(&format!("-n {prefix}br link add br0 type bridge"))?;
        ip(&format!("-n {prefix}br link set br0 up"))?;
        for rank in 0..RANKS {
            ip(&format!("netns add {prefix}h{rank}"))?;
            ip(&format!(
                "link add eth0 netns {prefix}h{rank} type veth peer name p{rank} netns {prefix}br"
            ))?;
            ip(&format!("-n {prefix}br link set p{rank} master br0 up"))?;
            ip(&format!("-n {prefix}h{rank} addr add 10.78.0.{}/24 dev eth0", rank + 1))?;
            ip(&format!("-n {prefix}h{rank} link set eth0 up"))?;
            ip(&format!("-n {prefix}h{rank} link set lo up"))?;
        }
        Ok(hosts)
    }

    /// Connects the victim's host, or cuts it off.
    fn set_victim(&self, state: &str) {
        ip(&format!("-n {}br link set p{VICTIM} {state}", self.prefix)).unwrap();
    }

    fn start(&self, rank: usize, token: &farwire::Token, link: &str) -> Child {
        Command::new("ip")
            .args(["netns", "exec", &format!("{}h{rank}", self.prefix)])
            .args(rank_command())
            .env(MARK, "1")
            .env("RANK", rank.to_string())
            .env("WORLD_SIZE", RANKS.to_string())
            .env("MASTER_ADDR", "10.78.0.1")
            .env("MASTER_PORT", "29500")
            .env("FARWIRE_TOKEN", token.reveal())
            .env("FARWIRE_LINK", link)
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap()
    }
}

impl Drop for Hosts {
    fn drop(&mut self) {
        for rank in 0..RANKS {
            let _ = ip(&format!("netns del {}h{rank}", self.prefix));
        }
        let _ = ip(&format!("netns del {}br", self.prefix));
    }
}

#[test]
fn survivors_of_a_rank_that_is_cut_off_know() {
    let hosts = match Hosts::new() {
        Ok(hosts) => hosts,
        Err(reason) => {
            return println!("skipped, because there can be no network namespaces here: {reason}");
        }
    };
    let cut_off = |link: &str| {
        let token = farwire::Token::generate();
        let mut ranks: Vec<_> = (0..RANKS).map(|rank| hosts.start(rank, &token, link)).collect();
        let said = Said::by(ranks.iter_mut().map(|rank| rank.stdout.take().unwrap()).collect());
        said.wait_for("ready", RANKS);
        let blow = now();
        hosts.set_victim("down");
        let times = delays(blow, said.wait_for("lost", RANKS - 1));
        for mut rank in ranks {
            assert!(rank.wait().unwrap().success());
        }
        hosts.set_victim("up");
        times
    };
    for link in ["quic", "tcp"] {
        table(&format!("all packets dropped, {link}"), || cut_off(link));
    }
}
