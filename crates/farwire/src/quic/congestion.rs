//! How much may be under way: congestion control by a model of the path.
//!
//! CUBIC takes every lost packet for congestion. At 100 ms and one packet in a thousand lost, that
//! is 4 Mbit/s, whatever the line could carry. This controller, in the manner of BBRv3, measures
//! the path instead:
//!
//! - **bandwidth**: the highest rate at which data was delivered lately. Each packet remembers what
//!   had been delivered when it was sent; when it is acknowledged, what was delivered since, over
//!   the time that took (or the time it took to send it, if that was longer), is a sample. Samples
//!   from times in which this side had nothing to send, or did not fill the window, say little:
//!   they count only if they are higher.
//! - **least round trip**: the shortest round trip of the last ten seconds. If none came near it
//!   for that long, or the path seems to have become longer, *ProbeRtt* lowers the window for a
//!   moment and measures anew.
//!
//! Their product is what the path holds without a queue. The window is that, plus a fifth (at least
//! 8 ms) so that a late acknowledgement or a busy core leaves no gap, plus what is usually lost. If
//! a queue stays although this side has drained its own, others fill it (CUBIC does), and the
//! window covers the wait behind them too, up to twice the least round trip: else they would push
//! this side out.
//!
//! ```text
//!         Startup ──▶ Down ──▶ Cruise ──▶ Up ──▶ Down ──▶ Cruise …
//! window  ×2          ×0.875   ×1         ×1.25  ×0.875          (ProbeRtt: ×0.75 of what the path holds)
//! rounds  as needed   2        6 to 11    2 + n  2
//! ```
//!
//! - **Startup** doubles the window each round, up to twice what the path is known to hold, until
//!   the queue begins to fill: the rate stops growing, and even the fastest packet of a round had
//!   to wait. (Or the rate has not grown for three rounds, or a tenth is lost.)
//! - **Up** asks once in a while whether there is more: one round with a quarter more. It goes on
//!   for as long as the rate grows, so a doubled rate is found within a few round trips. **Down**
//!   drains what Up left in the queue, which also shows the least round trip again.
//! - **Loss** lowers the window's ceiling only if it is more than the path loses anyway. What it
//!   loses anyway is learnt from rounds whose packets met no queue: no queue can have dropped
//!   those. A round that loses 1 % more than twice that, and met a queue, sets the ceiling to what
//!   did get through. Up raises it again.
//! - **A fallen rate** shows as a round trip longer than the window explains. ProbeRtt then tells
//!   whether this side's own queue is to blame: if so, the rate is what was delivered lately; if
//!   not, the path has become longer, or is shared. In any case the highest rate is forgotten after
//!   two cycles.
//!
//! **Pacing.** quinn has one number for both window and pace: it sends at 1.25 × window / round
//! trip. So there is no pace to set here, and no gain on it; all gains act on the window. That is
//! enough: with a window of 1.2 times what the path holds, quinn's pace is above the line's rate,
//! acknowledgements set the pace, and the queue cannot exceed the window's excess. quinn's pace
//! also falls by itself as the round trip rises. What is lost against BBR is that Up fills its
//! quarter in a burst at 1.25 times the rate over one round, not more slowly; with a queue shorter
//! than that, the ceiling takes over.

mod by_distance;

use std::any::Any;
use std::collections::VecDeque;
use std::fmt;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use quinn::congestion::{Controller, ControllerFactory};
use quinn_proto::RttEstimator;

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
            Self::Model => Arc::new(ModelConfig::new(RandomState::new().build_hasher().finish())),
            Self::Cubic => Arc::new(quinn::congestion::CubicConfig::default()),
        }
    }
}

/// Packets that may be under way before anything is known; quinn paces them.
const INITIAL_PACKETS: u64 = 32;
const LEAST_PACKETS: u64 = 4;
/// What the window holds beyond the path's own content: a fifth of it, and at least this much time.
const LEAST_EXCESS: Duration = Duration::from_millis(8);
const UP: f64 = 1.2;
const DOWN: f64 = 0.875;
/// A round that grew by less than this did not grow.
const STARTUP_GROWTH: f64 = 1.25;
const UP_GROWTH: f64 = 1.05;
/// Rounds without growth after which Startup ends, if no queue shows it earlier.
const PLATEAU: u32 = 3;
/// Loss beyond what the path has anyway.
const EXCESS_LOSS: f64 = 0.01;
const STARTUP_LOSS: f64 = 0.1;
/// A round with fewer says nothing of what the path loses.
const LEARN_PACKETS: u64 = 64;
/// How far a ceiling falls at most in one round.
const FALL: f64 = 0.7;
/// How far below a known ceiling the window stays, and how far above it Up tries first.
const HEADROOM: f64 = 0.9;
const ABOVE: f64 = 1.1;
/// A round that had less of the window under way was limited by the application.
const FILLED: f64 = 0.75;
/// ProbeRtt's window, as a share of what the path holds: enough to leave no queue, and most of the
/// rate.
const PROBE: f64 = 0.75;
/// Startup's window, as a multiple of what the path is known to hold.
const STARTUP: f64 = 2.0;
const CRUISE_ROUNDS: u32 = 6;
/// A full window that delivers less than this share of the rate is too small for the round trip.
const FALLEN: f64 = 0.96;
/// A line that delivers less than this share of the rate for a full window may have slowed.
const SLOWED: f64 = 0.7;
/// A cycle lasts at least this long: where round trips are short, one says little.
const SHORTEST_CYCLE: Duration = Duration::from_millis(100);
/// A round lasts at least this long, but in Startup: acknowledgements come in bunches, behind data
/// that goes the other way, and what one bunch says is not the line's rate.
const LEAST_ROUND: Duration = Duration::from_millis(40);
const RTT_LASTS: Duration = Duration::from_secs(10);
const BETWEEN_PROBES: Duration = Duration::from_secs(1);
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
}

impl ControllerFactory for ModelConfig {
    fn build(self: Arc<Self>, now: Instant, mtu: u16) -> Box<dyn Controller> {
        Box::new(Model::new(now, mtu, self.next_seed.fetch_add(1, Ordering::Relaxed)))
    }
}

/// What the controller does now, and for how many rounds it has.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Phase {
    Startup { best: f64, plateau: u32 },
    Cruise { rounds: u32 },
    Up { best: f64 },
    Down,
    ProbeRtt { why: Probe, least: Duration, rate: f64 },
}

/// Why the round trip is measured anew.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Probe {
    /// The least one is old.
    Stale,
    /// It is longer than this window explains: the path, or the bandwidth, has changed.
    Longer,
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
    lost: u64,
    marked: bool,
    rate: f64,
    app_limited: bool,
    /// The most that was under way.
    peak: u64,
    least_rtt: Duration,
    rtt_sum: Duration,
    rtts: u32,
}

impl Round {
    fn new(delivered: u64, now: Instant) -> Self {
        Self {
            ends_at: delivered,
            began_with: delivered,
            began_at: now,
            lost: 0,
            marked: false,
            rate: 0.0,
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
    probed_at: Instant,
    /// Whether the window was filled in some round of this cycle.
    learnt: bool,
    /// Waiting behind packets of others.
    others: Duration,
    /// Whether more than tolerated was lost since the last Down.
    overfull: bool,
    /// The share of packets that the path loses without any queue.
    loss: f64,
    /// Bytes lost, and bytes in all, of rounds that met no queue and are not in `loss` yet.
    emptied: (u64, u64),
    /// Whether the line may have slowed.
    suspect: bool,
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
            round: Round::new(0, now),
            rates: [0.0; 2],
            best_rounds: [0.0; 2],
            least_rtt: Duration::MAX,
            least_rtt_at: now,
            probed_at: now,
            learnt: false,
            others: Duration::ZERO,
            overfull: false,
            loss: 0.0,
            emptied: (0, 0),
            suspect: false,
            ceiling: u64::MAX,
            random: seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1,
        }
    }

    fn rate(&self) -> f64 {
        self.rates[0].max(self.rates[1])
    }

    /// Takes in a round's rate. The highest of a cycle may be chance: acknowledgements that were
    /// held up and then came together. So the second highest counts, but while Up looks for more.
    fn learn(&mut self, rate: f64) {
        if rate > self.best_rounds[0] {
            self.best_rounds = [rate, self.best_rounds[0]];
        } else if rate > self.best_rounds[1] {
            self.best_rounds[1] = rate;
        }
        let up = matches!(self.phase, Phase::Up { .. });
        self.rates[0] = self.best_rounds[usize::from(!up)];
    }

    /// What the window holds beyond the path's content, as a time.
    fn excess(&self) -> Duration {
        LEAST_EXCESS.max(self.least_rtt / 5)
    }

    /// How long packets should travel with this window.
    fn expected_rtt(&self) -> Duration {
        self.least_rtt + self.excess() + self.others
    }

    /// Keeps the window as small as fills the line, whatever packets wait for.
    fn follow_rtt(&mut self, round: &Round) {
        let rate = self.rate();
        if round.rate < FALLEN * rate {
            // Packets, or their acknowledgements, wait behind others'.
            let covered = Duration::from_secs_f64(self.window as f64 / rate);
            let most = self.least_rtt.max(LEAST_EXCESS / 2);
            self.others = (self.others + round.mean_rtt().saturating_sub(covered) / 2).min(most);
        } else {
            // The line is busy; as busy with a little less, perhaps.
            self.others = self.others.saturating_sub(self.excess() / 3);
        }
    }

    /// Packets took `rtt` although this side left no queue: others did, or the acknowledgements'
    /// way is busy. The window then covers that, and a quarter of the usual excess; more would have
    /// flows like this one lengthen each other's queues without end.
    fn set_others(&mut self, rtt: Duration) {
        let most = self.least_rtt.max(LEAST_EXCESS / 2);
        self.others = rtt.saturating_sub(self.least_rtt + 3 * self.excess() / 4).min(most);
    }

    /// What the path holds without any queue of this side's.
    fn content(&self) -> f64 {
        let time = (self.least_rtt + self.others).as_secs_f64();
        self.rate() * time / (1.0 - self.loss.min(0.2))
    }

    /// The window that keeps the line busy.
    fn target(&self, rate: f64) -> f64 {
        rate * self.expected_rtt().as_secs_f64() / (1.0 - self.loss.min(0.2))
    }

    fn least_window(&self) -> u64 {
        LEAST_PACKETS * self.mtu
    }

    fn enter(&mut self, phase: Phase) {
        self.phase = phase;
        self.phase_rounds = 0;
    }

    fn set_window(&mut self) {
        if self.rate() == 0.0 || matches!(self.phase, Phase::Startup { .. }) {
            return; // it grows as acknowledgements come
        }
        let target = self.target(self.rate());
        let (ceiling, content) = (self.ceiling as f64, self.content());
        let window = match self.phase {
            Phase::Startup { .. } => return,
            Phase::Cruise { .. } => target.min((HEADROOM * ceiling).max(content)),
            Phase::Up { .. } if self.phase_rounds < 2 => (UP * target).min(ABOVE * ceiling),
            Phase::Up { .. } => UP * target.min(ceiling),
            Phase::Down => DOWN * target.min(ceiling),
            Phase::ProbeRtt { rate, .. } => PROBE * rate * self.least_rtt.as_secs_f64(),
        };
        self.window = (window as u64).max(self.least_window());
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
        let mut round = std::mem::replace(&mut self.round, Round::new(self.delivered, now));
        self.phase_rounds += 1;
        round.app_limited |= (round.peak as f64) < FILLED * self.window as f64;
        self.learnt |= !round.app_limited;
        let delivered = self.delivered - round.began_with;
        if !matches!(self.phase, Phase::Startup { .. }) {
            let took = now.saturating_duration_since(round.began_at).max(self.least_rtt);
            round.rate = delivered as f64 / took.as_secs_f64();
            if !round.app_limited || round.rate > self.rate() {
                self.learn(round.rate);
            }
        }
        // Even the fastest packet had to wait: a late one alone may have met a busy host.
        let queued = round.mean_rtt()
            > self.least_rtt + Duration::from_millis(2).max(self.least_rtt / 20)
            && round.least_rtt > self.least_rtt + Duration::from_millis(1).max(self.least_rtt / 50);
        let starting = matches!(self.phase, Phase::Startup { .. });
        // By chance, some rounds lose more than the others; the fewer packets, the more so.
        let packets = (round.lost + delivered) as f64 / self.mtu as f64;
        let usual = if starting { STARTUP_LOSS } else { EXCESS_LOSS + 2.0 * self.loss };
        let chance = 2.0 * (packets * (0.01 + self.loss)).sqrt();
        let lost = round.lost as f64 / self.mtu as f64;
        let too_much = queued && lost > packets * usual + chance || round.marked;
        // What Down hears of was lost before it.
        let too_much = too_much && !(self.phase == Phase::Down && self.overfull);
        if too_much {
            let fallen = (FALL * self.window.min(self.ceiling) as f64) as u64;
            self.ceiling =
                delivered.max(fallen).max(self.content() as u64).max(self.least_window());
        }
        // In the last round of Down, this side leaves no queue. Others' may lose some packets, too.
        let down = self.phase == Phase::Down && self.phase_rounds == self.down_rounds();
        let empty = round.mean_rtt() < self.expected_rtt();
        if down && empty {
            self.emptied.0 += round.lost;
            self.emptied.1 += delivered + round.lost;
            if self.emptied.1 > LEARN_PACKETS * self.mtu {
                let (lost, of) = std::mem::take(&mut self.emptied);
                self.loss += 0.3 * (lost as f64 / of as f64 - self.loss);
            }
        } else if delivered > LEARN_PACKETS * self.mtu {
            let loss = round.lost as f64 / (round.lost + delivered) as f64;
            if loss < self.loss {
                self.loss += 0.02 * (loss - self.loss);
            }
        }
        self.overfull |= too_much && self.phase != Phase::Down || starting;
        tracing::trace!(
            model = ?self,
            mbit = round.rate * 8e-6,
            rtt = ?round.mean_rtt(),
            lost,
            packets,
            too_much,
            round.app_limited,
            "round"
        );
        self.next_phase(now, &round, too_much);
    }

    fn next_phase(&mut self, now: Instant, round: &Round, too_much: bool) {
        match self.phase {
            Phase::Startup { best, plateau } => {
                if round.app_limited && !too_much {
                    return;
                }
                let grown = round.rate >= STARTUP_GROWTH * best;
                let plateau = if grown { 0 } else { plateau + 1 };
                let queue = round.least_rtt > self.least_rtt + self.excess() / 2;
                if too_much || plateau >= PLATEAU || plateau > 0 && queue {
                    self.begin_cycle(now);
                    return self.enter(Phase::Down);
                }
                self.phase = Phase::Startup { best: best.max(round.rate), plateau };
            }
            Phase::Up { best } => {
                // The first round shows what was sent before it.
                if too_much {
                    return self.enter(Phase::Down);
                }
                if self.phase_rounds < 2 {
                    return;
                }
                self.ceiling = self.ceiling.max(self.window);
                if round.rate >= UP_GROWTH * best && !round.app_limited {
                    self.phase = Phase::Up { best: round.rate };
                } else if round.rate < SLOWED * best && !round.app_limited && self.may_probe(now) {
                    self.probe(Probe::Longer, round.rate);
                } else {
                    self.enter(Phase::Down);
                }
            }
            Phase::Down => {
                if self.phase_rounds >= self.down_rounds() {
                    self.overfull = false;
                    let longer = round.mean_rtt() > self.expected_rtt() + self.excess();
                    let slowed = round.rate < SLOWED * self.rate();
                    let suspect = std::mem::take(&mut self.suspect);
                    if longer && slowed && !round.app_limited {
                        if suspect {
                            let rate = round.rate;
                            (self.rates, self.best_rounds) = ([rate; 2], [rate; 2]);
                        } else if self.may_probe(now) {
                            // Others' queue, or this side's own, since the line has slowed?
                            return self.probe(Probe::Longer, round.rate);
                        }
                    }
                    self.set_others(round.mean_rtt());
                    self.begin_cycle(now);
                    self.random = self.random.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
                    let rounds = CRUISE_ROUNDS + (self.random >> 60) as u32 / 3;
                    // Others, who ask for more by filling the queue, need time to do so.
                    let rounds = if self.others > self.excess() / 2 { 2 * rounds } else { rounds };
                    self.enter(Phase::Cruise { rounds });
                }
            }
            Phase::Cruise { rounds } => {
                if !round.app_limited {
                    self.follow_rtt(round);
                }
                if now.saturating_duration_since(self.least_rtt_at) > RTT_LASTS {
                    return self.probe(Probe::Stale, self.rate());
                }
                let lasted = now.saturating_duration_since(self.cycle_began);
                // A full window that leaves no queue shows that there is room for more.
                let room =
                    !round.app_limited && round.mean_rtt() < self.least_rtt + self.excess() / 4;
                let due = self.phase_rounds >= rounds || room && self.phase_rounds >= 2;
                if due && lasted >= SHORTEST_CYCLE {
                    self.enter(Phase::Up { best: self.rate() });
                }
            }
            Phase::ProbeRtt { why, least, rate } => {
                // The first round drains; what it shows is the queue.
                let least = if self.phase_rounds > 1 { least.min(round.least_rtt) } else { least };
                self.phase = Phase::ProbeRtt { why, least, rate };
                if self.phase_rounds < 3 {
                    return;
                }
                (self.least_rtt_at, self.probed_at) = (now, now);
                if least == Duration::MAX {
                    // Nothing was sent, so nothing is known.
                } else if why == Probe::Stale {
                    self.least_rtt = least;
                    self.others = Duration::ZERO;
                } else if least > self.least_rtt + self.least_rtt / 4 {
                    self.set_others(least);
                } else {
                    // The queue was this side's own, since the line has slowed; or it was in the
                    // way of the acknowledgements, and is gone. Down will show it.
                    self.others = Duration::ZERO;
                    self.suspect = true;
                }
                self.enter(Phase::Down);
            }
        }
    }

    /// One to drain the queue, one more if losses of an overfull queue are still to be reported,
    /// and one that shows the path as it is.
    fn down_rounds(&self) -> u32 {
        2 + u32::from(self.overfull)
    }

    fn may_probe(&self, now: Instant) -> bool {
        now.saturating_duration_since(self.probed_at) >= BETWEEN_PROBES
    }

    fn probe(&mut self, why: Probe, rate: f64) {
        self.enter(Phase::ProbeRtt { why, least: Duration::MAX, rate });
    }

    /// Forgets the highest rate of the cycle before the last, unless the window was never filled
    /// since.
    fn begin_cycle(&mut self, now: Instant) {
        self.cycle_began = now;
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

    fn on_ack(
        &mut self,
        _: Instant,
        sent: Instant,
        bytes: u64,
        app_limited: bool,
        _: &RttEstimator,
    ) {
        self.delivered += bytes;
        if matches!(self.phase, Phase::Startup { .. }) && !app_limited {
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

    fn on_end_acks(&mut self, now: Instant, in_flight: u64, app_limited: bool, _: Option<u64>) {
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
        if app_limited {
            self.app_limited_until = self.delivered + in_flight.max(1);
        }
        self.set_window();
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
            *self = Self { delivered, sent, round: Round::new(delivered, now), ..fresh };
        }
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
