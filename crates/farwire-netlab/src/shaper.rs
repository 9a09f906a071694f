//! What leaves a bad link, and when.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::time::Duration;

use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

use crate::impair::{Impairments, Loss, Outage, Queue};

/// One direction of a link. It does no IO: packets go in with the current time, and come out with
/// the time they are due.
///
/// ```text
/// push ─▶ outage, MTU, loss ─▶ queue ─▶ rate ─▶ delay, jitter, reordering, duplicates ─▶ pop
/// ```
///
/// Times count from the start of the network. The same description, seed and packets give the same
/// outcome.
#[derive(Debug)]
pub struct Shaper<T> {
    rate: Option<f64>,
    delay: Duration,
    jitter: Duration,
    queue: Queue,
    loss: Loss,
    reorder: f64,
    duplicate: f64,
    mtu: usize,
    outages: Vec<Outage>,
    chance: ChaCha8Rng,
    /// Whether a burst of loss is under way.
    bursting: bool,
    /// When the last bit of the packets let in so far has left at the rate.
    line_free: Duration,
    last_due: Duration,
    underway: BinaryHeap<Reverse<Underway<T>>>,
    tally: Tally,
}

/// What became of the packets.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tally {
    /// Packets that were let in, duplicates included.
    pub passed: u64,
    /// Bytes of the packets that were let in, without duplicates.
    pub bytes: u64,
    /// Packets that were lost by chance.
    pub lost: u64,
    /// Packets that found the queue full.
    pub overflowed: u64,
    /// Packets that met an outage or were too long.
    pub vanished: u64,
    /// Packets that were sent twice.
    pub duplicated: u64,
}

#[derive(Debug)]
struct Underway<T> {
    due: Duration,
    order: u64,
    packet: T,
}

impl<T> PartialEq for Underway<T> {
    fn eq(&self, other: &Self) -> bool {
        (self.due, self.order) == (other.due, other.order)
    }
}

impl<T> Eq for Underway<T> {}

impl<T> PartialOrd for Underway<T> {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl<T> Ord for Underway<T> {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        (self.due, self.order).cmp(&(other.due, other.order))
    }
}

/// How much longer than the others an overtaken packet travels, at least.
const OVERTAKEN_BY: Duration = Duration::from_millis(2);

impl<T: Clone> Shaper<T> {
    /// The way out of a host: every impairment except the rate that reaches it.
    pub fn up(what: &Impairments, seed: u64) -> Self {
        Self {
            rate: what.rate,
            delay: what.delay,
            jitter: what.jitter,
            queue: what.queue,
            loss: what.loss,
            reorder: what.reorder,
            duplicate: what.duplicate,
            mtu: what.mtu.unwrap_or(usize::MAX),
            outages: what.outages.clone(),
            chance: ChaCha8Rng::seed_from_u64(seed),
            bursting: false,
            line_free: Duration::ZERO,
            last_due: Duration::ZERO,
            underway: BinaryHeap::new(),
            tally: Tally::default(),
        }
    }

    /// The way into a host: its rate and its queue. The other impairments apply on the way up.
    pub fn down(what: &Impairments, seed: u64) -> Self {
        let (rate, queue) = (what.down_rate.or(what.rate), what.queue);
        Self::up(&Impairments { rate, queue, ..Impairments::default() }, seed)
    }

    /// A packet of `len` bytes arrives at `now`, which never goes back.
    pub fn push(&mut self, now: Duration, len: usize, packet: T) {
        if len > self.mtu || self.outages.iter().any(|outage| outage.covers(now)) {
            self.tally.vanished += 1;
            return;
        }
        if self.is_lost() {
            self.tally.lost += 1;
            return;
        }
        if let Some(rate) = self.rate {
            let begins = self.line_free.max(now);
            let waiting = begins - now;
            let full = match self.queue {
                Queue::Time(most) => waiting > most,
                Queue::Bytes(most) => waiting.as_secs_f64() * rate + len as f64 > most as f64,
            };
            // A packet that finds the line free is not queued at all.
            if full && waiting > Duration::ZERO {
                self.tally.overflowed += 1;
                return;
            }
            self.line_free = begins + Duration::from_secs_f64(len as f64 / rate);
        } else {
            self.line_free = now;
        }
        self.tally.bytes += len as u64;
        let jitter = self.jitter.mul_f64(self.chance.random());
        let mut due = (self.line_free + self.delay + jitter).max(self.last_due);
        if self.chance.random_bool(self.reorder) {
            due += self.jitter.max(OVERTAKEN_BY);
        } else {
            self.last_due = due;
        }
        if self.chance.random_bool(self.duplicate) {
            self.tally.duplicated += 1;
            self.enqueue(due, packet.clone());
        }
        self.enqueue(due, packet);
    }

    fn enqueue(&mut self, due: Duration, packet: T) {
        self.tally.passed += 1;
        self.underway.push(Reverse(Underway { due, order: self.tally.passed, packet }));
    }

    fn is_lost(&mut self) -> bool {
        match self.loss {
            Loss::None => false,
            Loss::Random(share) => self.chance.random_bool(share),
            Loss::Bursty { share, length } => {
                // A burst ends with probability 1 / length, and begins just often enough to keep
                // the share.
                let ends = 1.0 / length.max(1.0);
                let begins = (ends * share / (1.0 - share)).clamp(0.0, 1.0);
                self.bursting =
                    self.chance.random_bool(if self.bursting { 1.0 - ends } else { begins });
                self.bursting
            }
        }
    }

    /// The next packet that is due by `now`, and when it was due.
    pub fn pop(&mut self, now: Duration) -> Option<(Duration, T)> {
        self.next_due().filter(|due| *due <= now)?;
        self.underway.pop().map(|Reverse(packet)| (packet.due, packet.packet))
    }

    /// When the next packet is due.
    pub fn next_due(&self) -> Option<Duration> {
        self.underway.peek().map(|Reverse(packet)| packet.due)
    }

    /// What became of the packets so far.
    pub fn tally(&self) -> Tally {
        self.tally
    }

    /// Sets the rate and the delay from now on.
    pub fn change(&mut self, rate: Option<f64>, delay: Duration) {
        (self.rate, self.delay) = (rate, delay);
        self.last_due = Duration::ZERO;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    /// Pushes packets of 1000 bytes, one each `every`, and returns what comes out, and when.
    fn send(
        what: &Impairments,
        seed: u64,
        packets: u32,
        every: Duration,
    ) -> (Vec<(Duration, u32)>, Tally) {
        let mut shaper = Shaper::up(what, seed);
        for number in 0..packets {
            shaper.push(every * number, 1000, number);
        }
        let out = std::iter::from_fn(|| shaper.pop(Duration::MAX)).collect();
        (out, shaper.tally())
    }

    fn numbers(out: &[(Duration, u32)]) -> Vec<u32> {
        out.iter().map(|(_, number)| *number).collect()
    }

    #[test]
    fn a_perfect_network_changes_nothing() {
        let (out, _) = send(&Impairments::default(), 1, 100, MS);
        assert_eq!(out, (0..100).map(|number| (MS * number, number)).collect::<Vec<_>>());
    }

    #[test]
    fn packets_leave_at_the_rate_and_arrive_after_the_delay() {
        let what = Impairments { rate: Some(1e6), delay: 50 * MS, ..Impairments::default() };
        let (out, tally) = send(&what, 1, 50, Duration::ZERO);
        let expected: Vec<_> =
            (0..50).map(|number| (50 * MS + MS * (number + 1), number)).collect();
        assert_eq!(out, expected);
        assert_eq!(tally.overflowed, 0);
    }

    #[test]
    fn what_the_queue_cannot_hold_is_dropped() {
        for queue in [Queue::Time(9 * MS), Queue::Bytes(10_000)] {
            let what = Impairments { rate: Some(1e6), queue, ..Impairments::default() };
            let (out, tally) = send(&what, 1, 50, Duration::ZERO);
            assert_eq!(numbers(&out), (0..10).collect::<Vec<_>>(), "{queue:?}");
            assert_eq!((tally.passed, tally.overflowed), (10, 40));
        }
        let tiny =
            Impairments { rate: Some(1e6), queue: Queue::Bytes(1), ..Impairments::default() };
        assert_eq!(send(&tiny, 1, 5, MS).0.len(), 5, "a packet alone always passes");
    }

    #[test]
    fn a_tenth_is_lost_at_random_or_in_bursts() {
        for (loss, expected_run) in
            [(Loss::Random(0.1), 1.11), (Loss::Bursty { share: 0.1, length: 8.0 }, 8.0)]
        {
            let what = Impairments { loss, ..Impairments::default() };
            let (out, tally) = send(&what, 7, 100_000, MS);
            let share = tally.lost as f64 / 1e5;
            assert!((0.09..0.11).contains(&share), "{loss:?}: {share}");
            let arrived = numbers(&out);
            let bursts = arrived.windows(2).filter(|pair| pair[1] != pair[0] + 1).count();
            let run = tally.lost as f64 / bursts as f64;
            assert!((run / expected_run - 1.0).abs() < 0.1, "{loss:?}: {run} lost in a row");
        }
    }

    #[test]
    fn jitter_keeps_the_order_and_reordering_does_not() {
        let jittery = Impairments { delay: 20 * MS, jitter: 10 * MS, ..Impairments::default() };
        let (out, _) = send(&jittery, 3, 1000, MS);
        assert_eq!(numbers(&out), (0..1000).collect::<Vec<_>>());
        assert!(out.iter().all(|(due, number)| *due >= MS * *number + 20 * MS));
        let reordering = Impairments { reorder: 0.1, ..jittery };
        let (out, tally) = send(&reordering, 3, 1000, MS);
        let overtaken = numbers(&out).windows(2).filter(|pair| pair[0] > pair[1]).count();
        assert!((50..150).contains(&overtaken), "{overtaken}");
        assert_eq!(tally.passed, 1000);
    }

    #[test]
    fn a_tenth_arrives_twice() {
        let what = Impairments { duplicate: 0.1, ..Impairments::default() };
        let (out, tally) = send(&what, 3, 10_000, MS);
        assert!((900..1100).contains(&tally.duplicated), "{tally:?}");
        assert_eq!(out.len() as u64, 10_000 + tally.duplicated);
    }

    #[test]
    fn outages_and_long_packets_swallow_all() {
        let outages =
            vec![Outage { from: 10 * MS, to: Some(20 * MS) }, Outage { from: 50 * MS, to: None }];
        let what = Impairments { outages, ..Impairments::default() };
        let (out, tally) = send(&what, 1, 100, MS);
        assert_eq!(numbers(&out), (0..10).chain(20..50).collect::<Vec<_>>());
        assert_eq!(tally.vanished, 60);
        let narrow = Impairments { mtu: Some(999), ..Impairments::default() };
        assert_eq!(send(&narrow, 1, 10, MS).0, []);
    }

    #[test]
    fn the_same_seed_gives_the_same_network() {
        let what = Impairments {
            rate: Some(1e6),
            jitter: 5 * MS,
            loss: Loss::Bursty { share: 0.05, length: 4.0 },
            reorder: 0.05,
            duplicate: 0.05,
            ..Impairments::default()
        };
        assert_eq!(send(&what, 5, 1000, MS), send(&what, 5, 1000, MS));
        assert_ne!(send(&what, 5, 1000, MS), send(&what, 6, 1000, MS));
    }
}
