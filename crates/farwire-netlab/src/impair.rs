//! What is wrong with a network.

use std::time::Duration;

/// One host's way to the others. The default is a perfect network.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Impairments {
    /// Bytes per second that leave a host; `None` is no limit.
    pub rate: Option<f64>,
    /// Bytes per second that reach a host; `None` is the same as `rate`.
    pub down_rate: Option<f64>,
    /// How long a packet travels once it has left the queue, one way.
    pub delay: Duration,
    /// Up to this much is added to each packet's delay. Packets stay in order.
    pub jitter: Duration,
    /// How much may wait for its turn at the rate. More is dropped.
    pub queue: Queue,
    /// Packets that are lost for no reason the sender could know.
    pub loss: Loss,
    /// The share of packets that are overtaken by those behind them.
    pub reorder: f64,
    /// The share of packets that arrive twice.
    pub duplicate: f64,
    /// Longer packets, IP header included, vanish without a word, as behind a firewall that drops
    /// ICMP.
    pub mtu: Option<usize>,
    /// Times in which nothing arrives.
    pub outages: Vec<Outage>,
    /// Times in which some hosts are cut off from the others. (In a [`Lab`](crate::Lab) only.)
    pub partitions: Vec<Partition>,
    /// Hosts that can call others but not be called, as behind NAT or a firewall: packets from an
    /// address get through only after the host has sent something there. (In a [`Lab`](crate::Lab)
    /// only.)
    pub hidden: Vec<usize>,
}

/// How long the queue in front of the bottleneck is.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Queue {
    /// As much as leaves in this time.
    Time(Duration),
    /// This many bytes.
    Bytes(usize),
}

impl Default for Queue {
    fn default() -> Self {
        Self::Time(Duration::from_millis(100))
    }
}

/// How packets are lost.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum Loss {
    /// No packet is lost.
    #[default]
    None,
    /// Each packet with this probability, whatever happened to the others.
    Random(f64),
    /// In bursts (Gilbert's model: a good state that loses nothing, a bad one that loses all).
    Bursty {
        /// The share of all packets that are lost.
        share: f64,
        /// Packets that are lost in a row, on average; at least 1.
        length: f64,
    },
}

/// A time in which nothing arrives, counted from the start of the network.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Outage {
    /// When it begins.
    pub from: Duration,
    /// When it ends; `None` is a black hole.
    pub to: Option<Duration>,
}

/// A time in which some hosts reach only each other, and the others only each other.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Partition {
    /// One of the sides.
    pub side: Vec<usize>,
    /// When the partition holds.
    pub time: Outage,
    /// Whether that side still hears the others: only what it sends them vanishes.
    pub one_way: bool,
}

/// A partition that begins now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cut {
    /// One of the sides.
    pub side: Vec<usize>,
    /// Whether that side still hears the others: only what it sends them vanishes.
    pub one_way: bool,
    /// How long it lasts.
    pub lasts: Duration,
}

impl Partition {
    /// Whether what one host sends another is lost.
    pub(crate) fn separates(&self, from: usize, to: usize, now: Duration) -> bool {
        let [is_from, is_to] = [from, to].map(|host| self.side.contains(&host));
        self.time.covers(now) && is_from != is_to && (is_from || !self.one_way)
    }
}

impl Outage {
    pub(crate) fn covers(&self, now: Duration) -> bool {
        now >= self.from && self.to.is_none_or(|to| now < to)
    }
}
