//! Hosts as network namespaces, joined by a relay in user space.
//!
//! Namespaces and devices have no names outside this process: they are handles, and vanish with
//! their last handle. So nothing stays behind, however the process ends.

use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::net::Ipv4Addr;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver, Sender};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
use rustix::time::ClockId;

use crate::firewall::Firewall;
use crate::impair::{Cut, Impairments};
use crate::shaper::{Shaper, Tally};
use crate::tun;

/// The network device of each host.
pub const DEVICE: &str = "far0";
const MTU: u32 = 1500;
/// Packets that the system queues while the relay does not run: more than the shaper would let
/// through in that time.
const DEVICE_QUEUE: u32 = 10_000;
/// Packets that are taken from one host before it is another's turn.
const TURN: usize = 64;
/// The longest that the relay sleeps before it checks whether it should end.
const LONGEST_SLEEP: Duration = Duration::from_millis(50);
/// Addresses end in 1 to 254.
const MOST_HOSTS: usize = 254;

/// Several hosts and the network between them, until it is dropped.
///
/// ```no_run
/// use farwire_netlab::{Impairments, Lab};
///
/// let far = Impairments { delay: std::time::Duration::from_millis(50), ..Impairments::default() };
/// let lab = Lab::new(2, &far, 1)?;
/// lab.enter(0)?; // this thread, and all processes it starts, are now on the first host
/// # Ok::<(), farwire_netlab::LabError>(())
/// ```
#[derive(Debug)]
pub struct Lab {
    namespaces: Vec<File>,
    stop: Arc<AtomicBool>,
    cuts: Sender<Cut>,
    relay: Option<JoinHandle<Relayed>>,
}

/// What a laboratory's relay did.
#[derive(Clone, Debug, Default)]
pub struct Relayed {
    /// What became of each host's packets on their way out.
    pub hosts: Vec<Tally>,
    /// The CPU time that the relay used. If it is close to the time that has passed, the relay was
    /// the limit, not the network it stands for.
    pub cpu: Duration,
}

/// Why a laboratory cannot be made or entered.
#[derive(Debug, thiserror::Error)]
pub enum LabError {
    /// The system refused: a permission is missing, or this is not an ordinary Linux.
    #[error(
        "could not {what}: {source}; hosts are network namespaces, which need root (or CAP_NET_ADMIN and CAP_SYS_ADMIN) and /dev/net/tun"
    )]
    System {
        /// What was tried.
        what: &'static str,
        /// The system's error.
        source: io::Error,
    },
    /// Too many hosts, or none.
    #[error("a laboratory has 1 to {MOST_HOSTS} hosts, not {0}")]
    Hosts(usize),
}

fn failed(what: &'static str) -> impl FnOnce(io::Error) -> LabError {
    move |source| LabError::System { what, source }
}

impl Lab {
    /// Makes hosts and starts the relay between them. Each host's packets are subject to `what` on
    /// their way out, and to its `down_rate` on their way into the other host.
    pub fn new(hosts: usize, what: &Impairments, seed: u64) -> Result<Self, LabError> {
        if !(1..=MOST_HOSTS).contains(&hosts) {
            return Err(LabError::Hosts(hosts));
        }
        let (mut namespaces, mut ports) = (Vec::new(), Vec::new());
        for host in 0..hosts {
            let address = Self::address(host);
            // On a thread of its own, since the thread stays in the namespace.
            let made = std::thread::spawn(move || {
                let namespace = tun::new_namespace().map_err(failed("make a network namespace"))?;
                let device = tun::new_device(DEVICE, address, MTU, DEVICE_QUEUE);
                Ok((namespace, device.map_err(failed("make a TUN device"))?))
            });
            let (namespace, device) = made.join().expect("making a host does not panic")?;
            namespaces.push(namespace);
            let seed = seed.wrapping_mul(MOST_HOSTS as u64).wrapping_add(host as u64);
            ports.push(Port { device, up: Shaper::up(what, seed), down: Shaper::down(what, seed) });
        }
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = stop.clone();
        let relay = std::thread::Builder::new().name("netlab".to_owned());
        let firewall = Firewall::new(what);
        let (cuts, cut) = mpsc::channel();
        let relay = relay
            .spawn(move || run(ports, firewall, &cut, &stopped))
            .map_err(failed("start the relay"))?;
        Ok(Self { namespaces, stop, cuts, relay: Some(relay) })
    }

    /// A host's address.
    pub fn address(host: usize) -> Ipv4Addr {
        Ipv4Addr::new(10, 77, 0, host as u8 + 1)
    }

    /// Moves the calling thread to a host, for good: sockets that it makes and processes that it
    /// starts belong there.
    pub fn enter(&self, host: usize) -> Result<(), LabError> {
        let namespace = rustix::fd::AsFd::as_fd(&self.namespaces[host]);
        move_into_link_name_space(namespace, Some(LinkNameSpaceType::Network))
            .map_err(|error| failed("enter a network namespace")(error.into()))
    }

    /// A path by which another process of this user can open the host's namespace, while this one
    /// lives.
    pub fn namespace_path(&self, host: usize) -> PathBuf {
        format!("/proc/{}/fd/{}", std::process::id(), self.namespaces[host].as_raw_fd()).into()
    }

    /// A channel that cuts the network while it runs.
    pub fn cuts(&self) -> Sender<Cut> {
        self.cuts.clone()
    }

    /// Ends the network, and returns what its relay did.
    pub fn close(mut self) -> Relayed {
        self.end()
    }

    fn end(&mut self) -> Relayed {
        self.stop.store(true, Ordering::Relaxed);
        self.relay.take().and_then(|relay| relay.join().ok()).unwrap_or_default()
    }
}

impl Drop for Lab {
    fn drop(&mut self) {
        self.end();
    }
}

/// Where a host meets the network.
struct Port {
    device: OwnedFd,
    up: Shaper<(usize, Vec<u8>)>,
    down: Shaper<Vec<u8>>,
}

fn run(
    mut ports: Vec<Port>,
    mut firewall: Firewall,
    cuts: &Receiver<Cut>,
    stop: &AtomicBool,
) -> Relayed {
    let start = Instant::now();
    let mut buffer = vec![0; MTU as usize];
    // An address belongs to the host that last sent from it, so a host may change its address.
    let mut homes: HashMap<[u8; 4], usize> =
        (0..ports.len()).map(|host| (Lab::address(host).octets(), host)).collect();
    while !stop.load(Ordering::Relaxed) {
        let now = start.elapsed();
        cuts.try_iter().for_each(|cut| firewall.cut(now, cut));
        let mut more = false;
        for from in 0..ports.len() {
            let mut taken = 0;
            while taken < TURN
                && let Ok(len @ 1..) = rustix::io::read(&ports[from].device, &mut buffer[..])
            {
                taken += 1;
                let packet = &buffer[..len];
                let Some((source, destination)) = addresses(packet) else { continue };
                homes.insert(source, from);
                if let Some(&to) = homes.get(&destination)
                    && firewall.passes(now, from, to, packet)
                {
                    ports[from].up.push(now, len, (to, packet.to_vec()));
                }
            }
            more |= taken == TURN;
            while let Some((due, (to, packet))) = ports[from].up.pop(now) {
                ports[to].down.push(due, packet.len(), packet);
            }
        }
        let mut next = now + LONGEST_SLEEP;
        for port in &mut ports {
            while let Some((_, packet)) = port.down.pop(now) {
                // A host that cannot take a packet now loses it, as real ones do.
                let _ = rustix::io::write(&port.device, &packet);
            }
            let due = [port.up.next_due(), port.down.next_due()].into_iter().flatten();
            next = due.fold(next, Duration::min);
        }
        if more {
            continue;
        }
        let mut waiting: Vec<_> =
            ports.iter().map(|port| PollFd::new(&port.device, PollFlags::IN)).collect();
        let sleep = next.saturating_sub(start.elapsed());
        let sleep =
            Timespec { tv_sec: sleep.as_secs() as i64, tv_nsec: sleep.subsec_nanos().into() };
        // If the wait is cut short, so much the better.
        let _ = poll(&mut waiting, Some(&sleep));
    }
    let cpu = rustix::time::clock_gettime(ClockId::ThreadCPUTime);
    let cpu = Duration::new(cpu.tv_sec.unsigned_abs(), cpu.tv_nsec.unsigned_abs() as u32);
    Relayed { hosts: ports.iter().map(|port| port.up.tally()).collect(), cpu }
}

/// Where an IPv4 packet comes from, and where it goes.
fn addresses(packet: &[u8]) -> Option<([u8; 4], [u8; 4])> {
    let is_v4 = packet.first()? >> 4 == 4;
    let (from, to) = packet.get(12..20).filter(|_| is_v4)?.split_first_chunk()?;
    Some((*from, *to.first_chunk()?))
}
