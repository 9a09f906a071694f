//! CUBIC between neighbours, the model over a distance.
//!
//! Where round trips are short, CUBIC fills the line, shares it as everything else there does, and
//! a lost packet costs it little: it grows back within milliseconds. The farther the peer, the
//! longer that takes, and the more a model of the path pays. So the first round trips of a
//! connection decide.

use std::any::Any;
use std::sync::Arc;
use std::time::{Duration, Instant};

use quinn::congestion::{Controller, ControllerFactory};
use quinn_proto::RttEstimator;

use super::pace::Pace;
use super::{Congestion, ModelConfig, NEAR};

/// Acknowledgements until that is decided: the first of them include the time of a handshake.
const ENOUGH: u32 = 12;

/// Makes [`ByDistance`]s.
pub(super) struct ByDistanceConfig {
    near: Arc<dyn ControllerFactory + Send + Sync>,
    far: Arc<ModelConfig>,
}

impl Default for ByDistanceConfig {
    fn default() -> Self {
        Self { near: Congestion::Cubic.factory(), far: Arc::new(ModelConfig::random()) }
    }
}

impl ControllerFactory for ByDistanceConfig {
    fn build(self: Arc<Self>, now: Instant, mtu: u16) -> Box<dyn Controller> {
        let (near, far) = (self.near.clone().build(now, mtu), self.far.model(now, mtu));
        let pace = far.pace.clone();
        let (near, far) = (Some(near), Some(Box::new(far) as Box<dyn Controller>));
        Box::new(ByDistance { near, far, pace, acks: 0, least_rtt: Duration::MAX })
    }
}

/// Two controllers that see the same, until one of them is dropped.
pub(super) struct ByDistance {
    near: Option<Box<dyn Controller>>,
    far: Option<Box<dyn Controller>>,
    /// The model's.
    pace: Arc<Pace>,
    acks: u32,
    least_rtt: Duration,
}

impl ByDistance {
    fn both(&mut self) -> impl Iterator<Item = &mut Box<dyn Controller>> {
        self.near.iter_mut().chain(&mut self.far)
    }

    /// The pace of the path, which has none if the peer is a neighbour.
    pub(super) fn pace(&self) -> Arc<Pace> {
        self.pace.clone()
    }

    /// The shortest round trip so far.
    pub(super) fn least_rtt(&self) -> Duration {
        self.least_rtt
    }

    /// Whether the peer is a neighbour, once that is decided.
    #[cfg(test)]
    pub(super) fn is_near(&self) -> Option<bool> {
        (self.acks >= ENOUGH).then_some(self.near.is_some())
    }
}

impl Controller for ByDistance {
    fn on_sent(&mut self, now: Instant, bytes: u64, last_packet: u64) {
        self.both().for_each(|controller| controller.on_sent(now, bytes, last_packet));
    }

    fn on_ack(
        &mut self,
        now: Instant,
        sent: Instant,
        bytes: u64,
        app_limited: bool,
        rtt: &RttEstimator,
    ) {
        self.both().for_each(|controller| controller.on_ack(now, sent, bytes, app_limited, rtt));
        self.acks = self.acks.saturating_add(1);
        self.least_rtt = rtt.min();
        if self.acks == ENOUGH {
            if rtt.min() < NEAR {
                self.far = None;
                self.pace.lift();
            } else {
                self.near = None;
            }
        }
    }

    fn on_end_acks(
        &mut self,
        now: Instant,
        in_flight: u64,
        app_limited: bool,
        largest: Option<u64>,
    ) {
        self.both()
            .for_each(|controller| controller.on_end_acks(now, in_flight, app_limited, largest));
    }

    fn on_congestion_event(&mut self, now: Instant, sent: Instant, persistent: bool, lost: u64) {
        self.both()
            .for_each(|controller| controller.on_congestion_event(now, sent, persistent, lost));
    }

    fn on_mtu_update(&mut self, mtu: u16) {
        self.both().for_each(|controller| controller.on_mtu_update(mtu));
    }

    fn window(&self) -> u64 {
        let chosen = self.far.as_ref().or(self.near.as_ref());
        chosen.map_or(0, |controller| controller.window())
    }

    fn clone_box(&self) -> Box<dyn Controller> {
        let clone = |controller: &Option<Box<dyn Controller>>| {
            controller.as_ref().map(|controller| controller.clone_box())
        };
        let (near, far) = (clone(&self.near), clone(&self.far));
        Box::new(Self { near, far, pace: self.pace.clone(), ..*self })
    }

    fn initial_window(&self) -> u64 {
        let chosen = self.far.as_ref().or(self.near.as_ref());
        chosen.map_or(0, |controller| controller.initial_window())
    }

    fn into_any(self: Box<Self>) -> Box<dyn Any> {
        self
    }
}
