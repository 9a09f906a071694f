//! How much may be under way: congestion control by a model of the path.
//!
//! CUBIC takes every lost packet for congestion. At 100 ms and one packet in a thousand lost, that
//! is 4 Mbit/s, whatever the line could carry. This controller, in the manner of BBRv3, measures
//! the path instead:
//!
//! - **bandwidth**: the highest rate at which data was delivered lately. What was delivered in a
//!   round trip, over the time that took (or the time it took to send it, if that was longer), is a
//!   sample. Samples from times in which this side had nothing to send say little: they count only
//!   if they are higher.
//! - **least round trip**: the shortest round trip of the last ten seconds. If none came near it
//!   for that long, *ProbeRtt* sends little for a moment and measures anew.
//!
//! Their product is what the path holds without a queue. Data is handed to QUIC at the pace of the
//! bandwidth, so that it fills the path and no more. The window, twice what the path holds, only
//! bounds what is under way should the pace be too high: a queue then holds one round trip at most.
//!
//! ```text
//!         Startup ──▶ Down ──▶ Cruise ──▶ Up ──▶ Down ──▶ Cruise …
//! pace    window      ×0.75    ×1         ×1.25  ×0.75           (ProbeRtt: ×0.5)
//! rounds  as needed   1 to 3   6 to 11    2 + n
//! ```
//!
//! - **Startup** doubles the window each round, up to twice what the path is known to hold, until
//!   the queue begins to fill: the rate stops growing, and even the fastest packet of a round had
//!   to wait. (Or the rate has not grown for three rounds, or a tenth is lost.)
//! - **Up** asks once in a while whether there is more: one round with a quarter more, and one that
//!   shows what came of it. It goes on for as long as the rate grows, so a doubled rate is found
//!   within a second. **Down** drains what Up left in the queue, which also shows the least round
//!   trip again.
//! - **Cruise** sends the less, the longer the queue. Flows that share a line find more in Up
//!   than they can all have, and would else fill the queue together. If the round trip then stays
//!   the same, it was no queue: the path has become longer.
//! - **Loss** counts only if it is more than the path loses anyway, which is learnt from rounds
//!   that met no queue: no queue can have dropped those. If 2 % more than twice that is lost, and
//!   there is a queue, what may be under way falls to what did get through, and the pace falls by a
//!   fifth, until the next Up.
//! - **A fallen rate** shows as a long queue and a rate below the known one. *Check* then sends
//!   more slowly for two rounds. If just as much arrives as before, the queue is this side's own, and
//!   the rate is what arrives; if not, the line is shared. In any case the highest rate is
//!   forgotten after two cycles.
//!
//! **Pacing.** quinn has one number for both window and pace: it sends at 1.25 × window / round
//! trip. With a window of twice what the path holds that is far above the line's rate. So the pace
//! is kept before quinn, by whoever writes to a stream: see [`Pacer`].

mod by_distance;
mod pace;

use std::any::Any;
use std::collections::VecDeque;
use std::fmt;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use quinn::Connection;
use quinn::congestion::{Controller, ControllerFactory};
use quinn_proto::RttEstimator;

use self::pace::Pace;
pub(crate) use self::pace::{Pacer, Turn};

/// Which controller a connection has: `FARWIRE_CONGESTION`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Congestion {
    /// CUBIC for peers nearby, this file's for those farther away.
    #[default]
    ByDistance,
    /// This file's.
    Model,
    /// quinn's CUBIC.
    Cubic,
}

impl Congestion {
    /// What the variable's value means.
    pub(crate) fn parse(text: &str) -> Option<Self> {
        match text {
            "auto" => Some(Self::ByDistance),
            "model" => Some(Self::Model),
            "cubic" => Some(Self::Cubic),
            _ => None,
        }
    }

    pub(crate) fn factory(self) -> Arc<dyn ControllerFactory + Send + Sync> {
        match self {
            Self::ByDistance => Arc::new(by_distance::ByDistanceConfig::default()),
            Self::Model => Arc::new(ModelConfig::random()),
            Self::Cubic => Arc::new(quinn::congestion::CubicConfig::default()),
        }
    }
}

/// Peers with a shorter round trip are neighbours.
const NEAR: Duration = Duration::from_millis(5);

/// Whether the peer is a neighbour, by the shortest round trip so far: one alone may have waited for
/// a core.
pub(crate) fn is_near(connection: &Connection) -> bool {
    let controller = connection.congestion_state().into_any().downcast::<by_distance::ByDistance>();
    let least = controller.map_or(Duration::MAX, |controller| controller.least_rtt());
    least.min(connection.rtt()) < NEAR
}

/// Packets that may be under way before anything is known; quinn paces them.
const INITIAL_PACKETS: u64 = 32;
const LEAST_PACKETS: u64 = 4;
/// How long a packet may wait before that counts as a queue: a fifth of the round trip, and at
/// least this.
const LEAST_EXCESS: Duration = Duration::from_millis(8);
/// What the window holds, as a multiple of what the path does.
const WINDOW: f64 = 2.0;
/// If less than this part of what has room is under way, there is little to send.
const LITTLE: u64 = 4;
/// Paces, as shares of the rate.
const CRUISE: f64 = 0.99;
const UP: f64 = 1.25;
const DOWN: f64 = 0.75;
const PROBE: f64 = 0.5;
/// By how much Cruise is slower for each round trip that packets wait; on a short path, for each such
/// time: there, a few packets are a long queue.
const YIELD: f64 = 0.6;
const YIELD_TIME: Duration = Duration::from_millis(50);
/// Packets that may be sent together, and what that takes at least.
const BURST: u64 = 8;
const LEAST_BURST: Duration = Duration::from_millis(2);
/// Bytes of a packet that are not data.
const HEADERS: f64 = 40.0;
/// A round that grew by less than this did not grow.
const STARTUP_GROWTH: f64 = 1.25;
const UP_GROWTH: f64 = 1.05;
/// Rounds without growth after which Startup ends, if no queue shows it earlier.
const PLATEAU: u32 = 3;
/// Loss beyond what the path has anyway.
const EXCESS_LOSS: f64 = 0.02;
const STARTUP_LOSS: f64 = 0.1;
/// Fewer packets say nothing of what the path loses; and how much they say.
const LEARN_PACKETS: u64 = 64;
const LEARN: f64 = 0.1;
/// How far a ceiling and the pace of Cruise fall at most in one round, and the latter in all.
const FALL: f64 = 0.7;
const LOWER: f64 = 0.6;
const LOWEST: f64 = 0.5;
/// How far below a known ceiling the window stays, and how far above it Up tries first.
const HEADROOM: f64 = 0.9;
const ABOVE: f64 = 1.1;
/// Startup's window, as a multiple of what the path is known to hold.
const STARTUP: f64 = 2.0;
/// Rounds of growth in Up after which the rate was far too low, and Startup begins again.
const FAR_TOO_LOW: u32 = 6;
const CRUISE_ROUNDS: u32 = 6;
/// Rounds of the same round trip, in spite of a lower pace, that show a longer path.
const STILL: u32 = 4;
const MOST_DOWN_ROUNDS: u32 = 3;
/// A line that delivers less than this share of the rate, and has a queue, may have slowed.
const SLOWED: f64 = 0.7;
/// What arrives as fast as before, although it was sent more slowly, is within this share of that;
/// in the round before, too, but acknowledgements come in bunches.
const STEADY: f64 = 0.06;
const ALMOST_STEADY: f64 = 0.15;
/// A cycle lasts at least this long: where round trips are short, one says little.
const SHORTEST_CYCLE: Duration = Duration::from_millis(100);
/// A round lasts at least this long, but in Startup: acknowledgements come in bunches, behind data
/// that goes the other way, and what one bunch says is not the line's rate.
const LEAST_ROUND: Duration = Duration::from_millis(40);
const RTT_LASTS: Duration = Duration::from_secs(10);
/// Sent when nothing else is under way, something shorter is an acknowledgement.
const SHORT: u64 = 600;
/// Records of sent batches; more than a window of any path has.
const MOST_RECORDS: usize = 1 << 16;

/// Makes [`Model`]s. Each has a seed of its own: flows that ask for more at the same times would
/// not learn that they share a line unequally.
#[derive(Debug)]
pub(crate) struct ModelConfig {
    next_seed: AtomicU64,
}

impl ModelConfig {
    fn new(seed: u64) -> Self {
        Self { next_seed: seed.into() }
    }

    fn random() -> Self {
        Self::new(RandomState::new().build_hasher().finish())
    }

    fn model(&self, now: Instant, mtu: u16) -> Model {
        Model::new(now, mtu, self.next_seed.fetch_add(1, Ordering::Relaxed))
    }
}

impl ControllerFactory for ModelConfig {
    fn build(self: Arc<Self>, now: Instant, mtu: u16) -> Box<dyn Controller> {
        Box::new(self.model(now, mtu))
    }
}

/// What the controller does now, and for how many rounds it has.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Phase {
    Startup {
        best: f64,
        plateau: u32,
    },
    Cruise {
        rounds: u32,
    },
    Up {
        best: f64,
    },
    Down,
    /// The line delivers less than it did: because it has slowed, or because it is shared?
    Check {
        rate: f64,
    },
    ProbeRtt {
        least: Duration,
    },
}

/// A batch of packets, as it was sent.
#[derive(Clone, Copy, Debug)]
struct Sent {
    at: Instant,
    /// Delivered by then, and when that was.
    delivered: u64,
    delivered_at: Instant,
    /// When the packet was sent that was acknowledged last by then.
    first_sent: Instant,
    app_limited: bool,
}

/// What happened since the last round began. A round lasts until something is acknowledged that was
/// sent in it.
#[derive(Clone, Copy, Debug)]
struct Round {
    /// It ends when something is acknowledged that was sent when this much had been delivered.
    ends_at: u64,
    began_with: u64,
    began_at: Instant,
    /// When the packet was sent that was acknowledged last by then.
    sent_at: Instant,
    lost: u64,
    marked: bool,
    rate: f64,
    /// How fast it arrived, however fast it was sent.
    arrived: f64,
    app_limited: bool,
    /// The most that was under way.
    peak: u64,
    least_rtt: Duration,
    rtt_sum: Duration,
    rtts: u32,
}

impl Round {
    fn new(delivered: u64, now: Instant, sent_at: Instant) -> Self {
        Self {
            ends_at: delivered,
            began_with: delivered,
            began_at: now,
            sent_at,
            lost: 0,
            marked: false,
            rate: 0.0,
            arrived: 0.0,
            app_limited: false,
            peak: 0,
            least_rtt: Duration::MAX,
            rtt_sum: Duration::ZERO,
            rtts: 0,
        }
    }

    fn mean_rtt(&self) -> Duration {
        self.rtt_sum.checked_div(self.rtts).unwrap_or_default()
    }
}

/// The controller of one path.
#[derive(Clone)]
pub(crate) struct Model {
    mtu: u64,
    window: u64,
    pace: Arc<Pace>,
    phase: Phase,
    phase_rounds: u32,
    cycle_began: Instant,

    // What is measured.
    delivered: u64,
    delivered_at: Instant,
    first_sent: Instant,
    in_flight: u64,
    idle: bool,
    /// Until this much is delivered, what is sent is limited by the application.
    app_limited_until: u64,
    sent: VecDeque<Sent>,
    /// The newest batch that the acknowledgements now being read are for.
    newest: Option<Sent>,
    round: Round,

    // What is believed.
    /// The highest rate, in bytes per second, of this cycle and of the one before.
    rates: [f64; 2],
    /// The two highest rates of this cycle's rounds.
    best_rounds: [f64; 2],
    least_rtt: Duration,
    least_rtt_at: Instant,
    /// Whether Startup has just ended, perhaps too early: what the peer sends makes a queue, too.
    started: bool,
    /// How long packets waited in the last round of Cruise, if that was a queue.
    queue: Duration,
    /// The round trip of the last round, and for how many it has been the same.
    last_rtt: Duration,
    still: u32,
    /// By how much the pace is lower until the next Up, since too much was lost.
    lowered: f64,
    /// Whether this cycle has had its Check.
    checked: bool,
    /// Whether the window was filled in some round of this cycle.
    learnt: bool,
    /// Whether more than tolerated was lost since the last Down.
    overfull: bool,
    /// The share of packets that the path loses without any queue.
    loss: f64,
    /// Bytes lost, and bytes in all, of rounds that met no queue and are not in `loss` yet.
    unqueued: (u64, u64),
    /// The same, of all rounds that are not judged yet.
    tally: (u64, u64),
    /// What may be under way without losing more than that.
    ceiling: u64,
    random: u64,
}

impl fmt::Debug for Model {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Model")
            .field("phase", &self.phase)
            .field("window", &self.window)
            .field("in_flight", &self.in_flight)
            .field("mbit", &(self.rate() * 8e-6))
            .field("least_rtt", &self.least_rtt)
            .field("loss", &self.loss)
            .field("ceiling", &self.ceiling)
            .finish_non_exhaustive()
    }
}

impl Model {
    fn new(now: Instant, mtu: u16, seed: u64) -> Self {
        let mtu = u64::from(mtu);
        Self {
            mtu,
            window: INITIAL_PACKETS * mtu,
            pace: Arc::new(Pace::new(now)),
            phase: Phase::Startup { best: 0.0, plateau: 0 },
            phase_rounds: 0,
            cycle_began: now,
            delivered: 0,
            delivered_at: now,
            first_sent: now,
            in_flight: 0,
            idle: true,
            app_limited_until: 0,
            sent: VecDeque::new(),
            newest: None,
            round: Round::new(0, now, now),
            rates: [0.0; 2],
            best_rounds: [0.0; 2],
            least_rtt: Duration::MAX,
            least_rtt_at: now,
            started: false,
            queue: Duration::ZERO,
            last_rtt: Duration::ZERO,
            still: 0,
            lowered: 1.0,
            checked: false,
            learnt: false,
            overfull: false,
            loss: 0.0,
            unqueued: (0, 0),
            tally: (0, 0),
            ceiling: u64::MAX,
            random: seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1,
        }
    }

    fn rate(&self) -> f64 {
        self.rates[0].max(self.rates[1])
    }

    /// Takes in a round's rate. The highest of a cycle may be chance: acknowledgements that were
    /// held up and then came together. So the second highest counts; but what was sent in Up, which
    /// is there to find more, does so at once.
    fn learn(&mut self, rate: f64) {
        let [highest, second] = self.best_rounds;
        let up = match self.phase {
            Phase::Up { .. } => true,
            Phase::Down => self.phase_rounds == 1,
            _ => false,
        };
        self.best_rounds = if up {
            [highest.max(rate), second.max(rate)]
        } else {
            [highest.max(rate), second.max(rate.min(highest))]
        };
        self.rates[0] = self.best_rounds[1];
    }

    /// How long packets may wait before that counts as a queue.
    fn excess(&self) -> Duration {
        LEAST_EXCESS.max(self.least_rtt / 5)
    }

    /// How long packets that are sent together wait for each other, which makes no queue.
    fn burst(&self) -> Duration {
        let seconds = (BURST * self.mtu) as f64 / self.rate().max(self.mtu as f64);
        LEAST_BURST.max(Duration::from_secs_f64(seconds))
    }

    /// What the path holds without any queue.
    fn content(&self) -> f64 {
        self.rate() * self.least_rtt.as_secs_f64() / (1.0 - self.loss.min(0.2))
    }

    fn least_window(&self) -> u64 {
        LEAST_PACKETS * self.mtu
    }

    fn enter(&mut self, phase: Phase) {
        self.phase = phase;
        self.phase_rounds = 0;
    }

    /// What may be under way, and how fast it goes out, follow from the phase.
    fn set_window(&mut self) {
        let rate = self.rate();
        let ceiling = self.ceiling as f64;
        // Some room for what is acknowledged late, where the path holds little.
        let content = self.content();
        let full = WINDOW * content + rate * LEAST_EXCESS.as_secs_f64();
        let (window, pace) = match self.phase {
            Phase::Startup { .. } => {
                // The window grows as acknowledgements come, and the pace follows it.
                if self.least_rtt < Duration::MAX {
                    let pace = UP * self.window as f64 / self.least_rtt.as_secs_f64();
                    self.pace.set_rate(pace);
                }
                return;
            }
            Phase::Cruise { .. } => {
                let wait = self.queue.as_secs_f64() / self.least_rtt.as_secs_f64();
                let waits = self.queue.as_secs_f64() / self.least_rtt.max(YIELD_TIME).as_secs_f64();
                let pace = (CRUISE - YIELD * waits).clamp(DOWN, CRUISE);
                // What waits in others' queue does not count against the ceiling.
                let room = content * (1.0 + wait);
                (full.min((HEADROOM * ceiling).max(room)), self.lowered * pace)
            }
            Phase::Up { .. } if self.phase_rounds.is_multiple_of(2) => {
                let above = if self.phase_rounds == 0 { ABOVE } else { UP };
                (full.min(above * ceiling), UP)
            }
            // This round shows what came of the one before.
            Phase::Up { .. } => (full.min((HEADROOM * ceiling).max(content)), CRUISE),
            Phase::Down => {
                let drained = self.in_flight as f64 <= content;
                (full.min(ceiling), if drained { CRUISE } else { DOWN })
            }
            Phase::Check { rate: now } => (full.min(ceiling), DOWN * now / rate),
            Phase::ProbeRtt { .. } => (PROBE * content, PROBE),
        };
        self.window = (window as u64).max(self.least_window());
        let payload = (1.0 - HEADERS / self.mtu as f64).max(0.5);
        // However little was delivered lately, the least window may go out in one round.
        let least = self.least_window() as f64 / self.least_rtt.as_secs_f64();
        self.pace.set_rate((pace * rate * payload).max(least));
    }

    fn is_full(&self) -> bool {
        self.in_flight + self.mtu > self.window
    }

    /// The acknowledgements of one packet have been read: a sample of rate and round trip.
    fn sample(&mut self, now: Instant, newest: &Sent) {
        let rtt = now.saturating_duration_since(newest.at);
        self.round.least_rtt = self.round.least_rtt.min(rtt);
        self.round.rtt_sum += rtt;
        self.round.rtts += 1;
        if rtt <= self.least_rtt {
            self.least_rtt = rtt.max(Duration::from_micros(1));
        }
        // Close enough to show that the path is still as short.
        if rtt <= self.least_rtt + self.least_rtt / 32 {
            self.least_rtt_at = now;
        }
        let sending = newest.at.saturating_duration_since(newest.first_sent);
        let time = now.saturating_duration_since(newest.delivered_at).max(sending);
        self.first_sent = newest.at;
        // Acknowledgements that come in a bunch would make it any rate.
        if time < self.least_rtt {
            return;
        }
        let rate = (self.delivered - newest.delivered) as f64 / time.as_secs_f64();
        self.round.app_limited |= newest.app_limited;
        if matches!(self.phase, Phase::Startup { .. })
            && (!newest.app_limited || rate > self.rate())
        {
            self.round.rate = self.round.rate.max(rate);
            self.rates[0] = self.rates[0].max(rate);
        }
    }

    /// All that was under way when the round began has been acknowledged or lost.
    fn end_round(&mut self, now: Instant) {
        let next = Round::new(self.delivered, now, self.first_sent);
        let mut round = std::mem::replace(&mut self.round, next);
        self.phase_rounds += 1;
        // A round that was held back does not say what the line carries; nor does the one after it.
        round.app_limited |= match self.phase {
            Phase::Cruise { .. } => self.phase_rounds == 1,
            Phase::Down | Phase::Check { .. } | Phase::ProbeRtt { .. } => true,
            Phase::Startup { .. } | Phase::Up { .. } => false,
        };
        let delivered = self.delivered - round.began_with;
        // Where a message is sent as soon as another has come, the pace is never found idle, however
        // short the messages are.
        let room = match self.phase {
            Phase::Startup { .. } => self.window,
            _ => self.content() as u64,
        };
        round.app_limited |= LITTLE * round.peak.max(delivered) < room;
        self.learnt |= !round.app_limited;
        if !matches!(self.phase, Phase::Startup { .. }) {
            let took = now.saturating_duration_since(round.began_at).max(self.least_rtt);
            // Acknowledgements that were held up come faster than what they are for was sent.
            let sending = self.first_sent.saturating_duration_since(round.sent_at);
            round.rate = delivered as f64 / took.max(sending).as_secs_f64();
            round.arrived = delivered as f64 / took.as_secs_f64();
            if !round.app_limited || round.rate > self.rate() {
                self.learn(round.rate);
            }
        }
        let too_much = self.judge_loss(&round, delivered);
        tracing::trace!(
            model = ?self,
            mbit = round.rate * 8e-6,
            rtt = ?round.mean_rtt(),
            round.lost,
            too_much,
            round.app_limited,
            "round"
        );
        self.next_phase(now, &round, too_much);
    }

    /// Whether more was lost than the path loses anyway. If so, lowers what may be under way.
    fn judge_loss(&mut self, round: &Round, delivered: u64) -> bool {
        let wait = round.mean_rtt().saturating_sub(self.least_rtt);
        let queued = wait > self.burst().max(self.least_rtt / 32);
        // What Down and the first round after it hear of may have been lost before.
        let before = match self.phase {
            Phase::Down => self.overfull,
            Phase::Cruise { .. } => self.phase_rounds == 1,
            _ => false,
        };
        // What was lost without a queue was lost by the path.
        if !queued && !before {
            self.unqueued.0 += round.lost;
            self.unqueued.1 += round.lost + delivered;
            if self.unqueued.1 > LEARN_PACKETS * self.mtu {
                let (lost, all) = std::mem::take(&mut self.unqueued);
                self.loss += LEARN * (lost as f64 / all as f64 - self.loss);
            }
        }
        let starting = matches!(self.phase, Phase::Startup { .. });
        self.tally.0 += round.lost;
        self.tally.1 += round.lost + delivered;
        if self.tally.1 < LEARN_PACKETS * self.mtu && !round.marked {
            return false;
        }
        let (lost, all) = std::mem::take(&mut self.tally);
        let [lost, all] = [lost, all].map(|bytes| bytes as f64 / self.mtu as f64);
        // By chance, some rounds lose more than the others; the fewer packets, the more so.
        let usual = if starting { STARTUP_LOSS } else { EXCESS_LOSS + 2.0 * self.loss };
        let chance = 2.5 * (all * (EXCESS_LOSS + self.loss)).sqrt();
        let too_much = queued && lost > all * usual + chance || round.marked;
        if !too_much || before {
            self.overfull |= starting;
            return false;
        }
        let fallen = (FALL * self.window.min(self.ceiling) as f64) as u64;
        self.ceiling = delivered.max(fallen).max(self.content() as u64).max(self.least_window());
        if matches!(self.phase, Phase::Cruise { .. }) {
            self.lowered = (LOWER * self.lowered).max(LOWEST);
        }
        self.overfull |= self.phase != Phase::Down;
        true
    }

    fn next_phase(&mut self, now: Instant, round: &Round, too_much: bool) {
        match self.phase {
            Phase::Startup { best, plateau } => {
                let queue = round.least_rtt > self.least_rtt + self.excess() / 2;
                let filled = 2 * round.peak > self.window;
                if round.app_limited && !too_much && !(queue && filled) {
                    return;
                }
                let grown = round.rate >= STARTUP_GROWTH * best;
                let plateau = if grown { 0 } else { plateau + 1 };
                if too_much || plateau >= PLATEAU || plateau > 0 && queue {
                    self.best_rounds = [self.rate(); 2];
                    self.started = true;
                    return self.enter(Phase::Down);
                }
                self.phase = Phase::Startup { best: best.max(round.rate), plateau };
            }
            Phase::Up { best } => {
                if too_much {
                    return self.enter(Phase::Down);
                }
                // What was sent faster in one round shows in the next.
                if !self.phase_rounds.is_multiple_of(2) {
                    self.round.peak = round.peak; // which the next one is to judge
                    return;
                }
                self.ceiling = self.ceiling.max(round.peak);
                if round.rate < UP_GROWTH * best || round.app_limited {
                    self.enter(Phase::Down);
                } else if self.phase_rounds >= FAR_TOO_LOW {
                    self.enter(Phase::Startup { best: round.rate, plateau: 0 });
                } else {
                    self.phase = Phase::Up { best: round.rate };
                }
            }
            Phase::Down => {
                if !self.is_drained() && self.phase_rounds < MOST_DOWN_ROUNDS {
                    return;
                }
                self.overfull = false;
                self.begin_cycle(now);
                self.random = self.random.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
                let some = CRUISE_ROUNDS + (self.random >> 60) as u32 / 3;
                let rounds = if std::mem::take(&mut self.started) { 2 } else { some };
                self.enter(Phase::Cruise { rounds });
            }
            Phase::Cruise { rounds } => {
                if now.saturating_duration_since(self.least_rtt_at) > RTT_LASTS {
                    return self.enter(Phase::ProbeRtt { least: Duration::MAX });
                }
                let slowed = round.rate < SLOWED * self.rate() && !round.app_limited;
                let queue = round.mean_rtt() > self.least_rtt + 2 * self.excess();
                // What was lost does not arrive, which says nothing about the line's rate.
                if slowed && queue && !self.overfull && !self.checked {
                    self.checked = true;
                    return self.enter(Phase::Check { rate: round.rate });
                }
                self.notice_a_longer_path(now, round);
                let queue = round.mean_rtt().saturating_sub(self.least_rtt);
                let short = self.burst().max(self.excess() / 2);
                self.queue = if queue > short { queue } else { Duration::ZERO };
                let lasted = now.saturating_duration_since(self.cycle_began);
                if self.phase_rounds >= rounds && lasted >= SHORTEST_CYCLE {
                    self.lowered = 1.0;
                    self.enter(Phase::Up { best: self.rate() });
                }
            }
            Phase::Check { rate } => {
                let off = (round.arrived / rate - 1.0).abs();
                // A line that stood still for a moment, or a process that did, is not slower.
                if self.phase_rounds == 1 && off < ALMOST_STEADY {
                    return;
                }
                // What was sent more slowly arrives as fast: this side alone has filled the queue.
                if self.phase_rounds == 2 && off < STEADY {
                    (self.rates, self.best_rounds) = ([rate; 2], [rate; 2]);
                    return self.enter(Phase::ProbeRtt { least: Duration::MAX });
                }
                self.enter(Phase::Cruise { rounds: CRUISE_ROUNDS });
            }
            Phase::ProbeRtt { least } => {
                // The first round drains; what it shows is the queue.
                let least = if self.phase_rounds > 1 { least.min(round.least_rtt) } else { least };
                self.phase = Phase::ProbeRtt { least };
                if self.phase_rounds < 3 {
                    return;
                }
                // If nothing was sent, nothing is known.
                if least < Duration::MAX {
                    self.least_rtt = least;
                }
                self.least_rtt_at = now;
                self.begin_cycle(now);
                self.enter(Phase::Cruise { rounds: CRUISE_ROUNDS });
            }
        }
    }

    /// A round trip that stays the same although this side sends less has no queue in it.
    fn notice_a_longer_path(&mut self, now: Instant, round: &Round) {
        let rtt = round.mean_rtt();
        let same = rtt.abs_diff(self.last_rtt) <= rtt / 100;
        self.still = if !self.queue.is_zero() && same { self.still + 1 } else { 0 };
        self.last_rtt = rtt;
        if self.still == STILL {
            (self.least_rtt, self.least_rtt_at) = (round.least_rtt, now);
        }
    }

    /// Whether Down has drained this side's queue, and the losses of an overfull one are known.
    fn is_drained(&self) -> bool {
        self.in_flight as f64 <= self.content() && self.phase_rounds > u32::from(self.overfull)
    }

    /// Forgets the highest rate of the cycle before the last, unless the window was never filled
    /// since.
    fn begin_cycle(&mut self, now: Instant) {
        self.cycle_began = now;
        (self.queue, self.checked) = (Duration::ZERO, false);
        if std::mem::take(&mut self.learnt) && self.rates[0] > 0.0 {
            self.rates = [0.0, self.rates[0]];
            self.best_rounds = [0.0; 2];
        }
    }
}

impl Controller for Model {
    fn on_sent(&mut self, now: Instant, bytes: u64, _: u64) {
        if self.idle {
            (self.first_sent, self.delivered_at) = (now, now);
            self.idle = bytes < SHORT;
        }
        self.in_flight += bytes;
        self.round.peak = self.round.peak.max(self.in_flight);
        if self.is_full() {
            self.pace.set_full(true);
        }
        if self.sent.back().is_some_and(|last| last.at == now) {
            return;
        }
        if self.sent.len() == MOST_RECORDS {
            self.sent.pop_front();
        }
        self.sent.push_back(Sent {
            at: now,
            delivered: self.delivered,
            delivered_at: self.delivered_at,
            first_sent: self.first_sent,
            app_limited: self.app_limited_until > self.delivered,
        });
    }

    fn on_ack(&mut self, now: Instant, sent: Instant, bytes: u64, _: bool, _: &RttEstimator) {
        self.delivered += bytes;
        if matches!(self.phase, Phase::Startup { .. }) && !self.pace.is_idle(now) {
            let most = match self.rate() {
                0.0 => u64::MAX,
                _ => (STARTUP * self.content()) as u64,
            };
            self.window = (self.window + bytes).min(most.max(self.window));
        }
        if self.newest.is_none_or(|newest| sent > newest.at)
            && let Ok(index) = self.sent.binary_search_by_key(&sent, |record| record.at)
        {
            self.newest = Some(self.sent[index]);
        }
    }

    fn on_end_acks(&mut self, now: Instant, in_flight: u64, unblocked: bool, _: Option<u64>) {
        self.in_flight = in_flight;
        self.idle = in_flight == 0;
        if let Some(newest) = self.newest.take() {
            self.sample(now, &newest);
            let long_enough = now.saturating_duration_since(self.round.began_at) >= LEAST_ROUND
                || matches!(self.phase, Phase::Startup { .. });
            if newest.delivered >= self.round.ends_at && long_enough {
                self.end_round(now);
            }
            // Whatever was sent a good deal earlier is known to have arrived or not.
            let old = newest.at.checked_sub(4 * self.least_rtt.min(RTT_LASTS));
            while self.sent.front().is_some_and(|record| old.is_some_and(|old| record.at < old)) {
                self.sent.pop_front();
            }
        }
        self.delivered_at = now;
        // quinn's word for it would be that next to nothing waits in its buffers, which is so by
        // design.
        if self.pace.is_idle(now) {
            self.round.app_limited = true;
            self.app_limited_until = self.delivered + in_flight.max(1);
        }
        self.set_window();
        self.pace.set_full(self.is_full() || !unblocked);
    }

    fn on_congestion_event(&mut self, now: Instant, _: Instant, persistent: bool, lost: u64) {
        self.in_flight = self.in_flight.saturating_sub(lost);
        self.round.lost += lost;
        self.round.marked |= lost == 0; // the network itself said that a queue is long
        if persistent {
            // Nothing has arrived for several round trips. Whatever comes after is another path.
            let mtu = self.mtu as u16;
            let fresh = Self::new(now, mtu, self.random);
            let (delivered, sent) = (self.delivered, std::mem::take(&mut self.sent));
            let (pace, round) = (self.pace.clone(), Round::new(delivered, now, now));
            pace.set_rate(f64::INFINITY);
            *self = Self { delivered, sent, pace, round, ..fresh };
        }
        self.pace.set_full(self.is_full());
    }

    fn on_mtu_update(&mut self, mtu: u16) {
        self.mtu = u64::from(mtu);
        self.window = self.window.max(self.least_window());
    }

    fn window(&self) -> u64 {
        self.window
    }

    fn clone_box(&self) -> Box<dyn Controller> {
        Box::new(self.clone())
    }

    fn initial_window(&self) -> u64 {
        INITIAL_PACKETS * self.mtu
    }

    fn into_any(self: Box<Self>) -> Box<dyn Any> {
        self
    }
}

#[cfg(test)]
mod tests;
