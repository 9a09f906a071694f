//! What the simulated network is like, and what goes wrong with it.

use std::collections::HashMap;
use std::time::Duration;

use farwire_proto::{Peer, Time, WorldSize};
use rand::RngExt;
use rand_chacha::ChaCha8Rng;

/// Bytes of a packet, for counting losses.
const PACKET: usize = 1400;

/// A network of processes, each behind a full-duplex interface, with a link between every pair.
/// Processes that share a host share its interface, and reach each other by a local link.
#[derive(Clone, Debug)]
pub struct Network {
    /// How many processes there are.
    pub world: WorldSize,
    /// Bytes per second that each process can send, and receive; with hosts, each host.
    pub bandwidth: f64,
    /// The links between processes.
    pub link: Link,
    /// The number of each process's host, if some share one.
    pub hosts: Option<Vec<u64>>,
    /// The links between processes that share a host: as fast as memory for each process.
    pub local: Link,
    /// Links that differ from the rest, by direction.
    pub special_links: HashMap<(Peer, Peer), Link>,
    /// Bytes of one lane that may be on their way or unread before its sender must wait; one frame
    /// always may.
    pub window: usize,
    /// How long after a process falls silent the others take it for lost.
    pub detection: Duration,
    /// Coding a round of parcels takes up to this long, at random.
    pub coding: Duration,
    /// What it costs the processes to move frames.
    pub costs: Costs,
    /// The cores for that work, and for coding.
    pub cores: Cores,
    /// What goes wrong.
    pub troubles: Vec<Trouble>,
    /// The seed of all randomness.
    pub seed: u64,
}

impl Network {
    /// `ranks` processes in one room: 10 Gbit/s, 50 µs.
    ///
    /// # Panics
    ///
    /// If `ranks` is zero.
    pub fn lan(ranks: u32) -> Self {
        Self {
            world: WorldSize::new(ranks).expect("a network has at least one process"),
            bandwidth: 1.25e9,
            link: Link { latency: Duration::from_micros(50), ..Link::IDEAL },
            hosts: None,
            local: Link { latency: Duration::from_micros(2), bandwidth: 10e9, ..Link::IDEAL },
            special_links: HashMap::new(),
            window: 8 << 20,
            detection: Duration::from_secs(2),
            coding: Duration::ZERO,
            costs: Costs::default(),
            cores: Cores::Unlimited,
            troubles: Vec::new(),
            seed: 0,
        }
    }

    pub(crate) fn link(&self, from: Peer, to: Peer) -> &Link {
        let usual = if self.share_a_host(from, to) { &self.local } else { &self.link };
        self.special_links.get(&(from, to)).unwrap_or(usual)
    }

    /// The number of a process's host. Without hosts, the processes take the network for one host,
    /// but their links are still those of a network.
    pub(crate) fn host_of(&self, peer: Peer) -> u64 {
        self.hosts.as_ref().and_then(|hosts| hosts.get(peer.index())).copied().unwrap_or(0)
    }

    fn share_a_host(&self, a: Peer, b: Peer) -> bool {
        self.hosts.is_some() && self.host_of(a) == self.host_of(b)
    }

    /// The interface through which `peer` sends to, or receives from, another, and its bytes per
    /// second.
    pub(crate) fn interface(&self, peer: Peer, other: Peer) -> (Interface, f64) {
        if self.share_a_host(peer, other) {
            (Interface::Memory(peer), self.local.bandwidth)
        } else if self.hosts.is_some() {
            (Interface::Host(self.host_of(peer)), self.bandwidth)
        } else {
            (Interface::Process(peer), self.bandwidth)
        }
    }

    /// How long a core works on a frame of this many bytes, at the sender and at the receiver.
    pub(crate) fn work(&self, from: Peer, to: Peer, bytes: usize) -> (Duration, Duration) {
        let Costs { frame, send, receive, local, .. } = self.costs;
        let time = |frame, per_byte: f64| Duration::from_secs_f64(frame + per_byte * bytes as f64);
        if self.share_a_host(from, to) {
            return (time(0.0, local), time(0.0, local));
        }
        (time(frame, send), time(frame, receive))
    }

    /// The pool of cores that a process works on, and its size; `None` if there are always enough.
    pub(crate) fn cores_of(&self, peer: Peer) -> Option<(u64, usize)> {
        match self.cores {
            Cores::Unlimited => None,
            Cores::Shared(cores) => Some((0, cores)),
            Cores::PerHost(cores) if self.hosts.is_some() => Some((self.host_of(peer), cores)),
            Cores::PerHost(cores) => Some((peer.0.into(), cores)),
        }
    }

    /// Every process.
    pub fn peers(&self) -> impl Iterator<Item = Peer> + use<> {
        (0..self.world.get()).map(Peer)
    }
}

/// Seconds of one core that it takes to move frames. By default, zero.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Costs {
    /// For each frame to another host, at each end.
    pub frame: f64,
    /// For each byte that is sent to another host.
    pub send: f64,
    /// For each byte that came from another host, adding it up included.
    pub receive: f64,
    /// For each byte between processes of one host, at each end.
    pub local: f64,
    /// For each byte that a relay carries from host to host, on one thread, as in a laboratory.
    pub relay: f64,
}

/// Who shares cores with whom.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Cores {
    /// There are always enough.
    #[default]
    Unlimited,
    /// All processes and the relay share these, like the hosts of a laboratory.
    Shared(usize),
    /// Each host has this many.
    PerHost(usize),
}

/// What frames leave and arrive through, one at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Interface {
    /// A process's own, to the network.
    Process(Peer),
    /// A host's, to the network, for all of its processes.
    Host(u64),
    /// A process's own, to the others on its host.
    Memory(Peer),
}

/// One direction between two processes. It loses nothing for good and keeps each lane in order, as
/// a stream does.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Link {
    /// From departure to arrival.
    pub latency: Duration,
    /// Bytes per second, if the link is slower than the interfaces at its ends.
    pub bandwidth: f64,
    /// Up to this much is added to the latency of each frame, at random, which reorders frames of
    /// different lanes.
    pub jitter: Duration,
    /// The share of packets that are lost and sent again, a round trip later; anything above 0.9
    /// counts as 0.9.
    pub loss: f64,
}

impl Link {
    /// No latency, no limit, no jitter, no loss.
    pub const IDEAL: Self = Self {
        latency: Duration::ZERO,
        bandwidth: f64::INFINITY,
        jitter: Duration::ZERO,
        loss: 0.0,
    };

    /// How long a frame takes from departure to arrival, and how many of its bytes had to be sent
    /// again.
    pub(crate) fn delay(&self, bytes: usize, rng: &mut ChaCha8Rng) -> (Duration, usize) {
        let mut delay = self.latency;
        if !self.jitter.is_zero() {
            delay = delay.saturating_add(self.jitter.mul_f64(rng.random::<f64>()));
        }
        let mut resent = 0;
        let loss = self.loss.min(0.9);
        if loss > 0.0 {
            let mut packets = bytes.div_ceil(PACKET);
            loop {
                packets = (0..packets).filter(|_| rng.random::<f64>() < loss).count();
                if packets == 0 {
                    break;
                }
                resent += packets * PACKET.min(bytes);
                delay = delay.saturating_add(self.latency.saturating_mul(2));
            }
        }
        (delay, resent)
    }
}

/// Something that goes wrong.
#[derive(Clone, Debug, PartialEq)]
pub enum Trouble {
    /// A process dies as it is about to take its `step`-th step, counted from zero. A step is
    /// submitting a call, finishing to send a frame, or taking a frame.
    Crash {
        /// The process.
        peer: Peer,
        /// The step.
        step: u64,
    },
    /// A process does nothing for a while, as under SIGSTOP.
    Stall {
        /// The process.
        peer: Peer,
        /// When it begins.
        from: Time,
        /// When it ends.
        until: Time,
    },
    /// Frames between two groups of processes are held up for a while.
    Partition {
        /// One group; the other is all other processes.
        side: Vec<Peer>,
        /// When it begins.
        from: Time,
        /// When it ends.
        until: Time,
    },
    /// In one round of coded calls, a process makes parcels that no codec makes.
    Nonsense {
        /// The process.
        peer: Peer,
        /// In which round, from zero.
        round: u32,
    },
}

/// How long `bytes` occupy something that moves `rate` bytes per second.
pub(crate) fn transfer_time(bytes: usize, rate: f64) -> Duration {
    Duration::try_from_secs_f64(bytes as f64 / rate).unwrap_or(Duration::MAX)
}
