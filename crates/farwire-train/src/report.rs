//! Results of a step, for logs, reports and checkpoints.

use serde::{Deserialize, Serialize};

use crate::text;

/// Results of a step.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct StepReport {
    /// Which step, from 0.
    pub step: usize,
    /// The mean loss over the batch, before the update.
    #[serde(with = "text::number")]
    pub loss: f64,
    /// The gradient's norm, before it was clipped.
    #[serde(with = "text::number")]
    pub norm: f64,
    /// Why this step was skipped, if it was: see [`OnNan::Skip`](crate::OnNan::Skip).
    #[serde(default)]
    pub skipped: Option<String>,
    /// Tokens learned from, over all ranks.
    pub tokens: usize,
    /// Bytes that all ranks sent in this step, as their links counted them. Updates of a sharded
    /// optimizer count with the next step: they are sent after this count.
    pub wire_bytes: u64,
    /// Bytes that a dense exchange of the gradients sends, to compare with.
    pub dense_bytes: u64,
    /// The share of the exchange's time in which this rank computed; 1 if there is no exchange.
    pub hidden: f64,
    /// Where this rank's time went.
    pub times: Times,
    /// Whether some rank wants to stop.
    pub stop: bool,
    /// How many ranks want to leave while the others go on.
    #[serde(default)]
    pub leaving: usize,
    /// How many ranks that have joined [ask](crate::Trainer::set_asking) what the others have seen.
    #[serde(default)]
    pub asking: usize,
}

/// Where a rank's time went in a step, in seconds.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub struct Times {
    /// Forward, without sums over tp.
    pub forward: f64,
    /// Backward, without sums over tp.
    pub backward: f64,
    /// Sums over tp inside forward and backward.
    pub tensor: f64,
    /// Waiting for other stages.
    pub pipeline: f64,
    /// Held up by the exchange of gradients: handing them over, and waiting at the end of backward.
    pub exchange: f64,
    /// The exchange from its start to its end, hidden or not.
    pub exchange_busy: f64,
    /// The norm, the update and the rest.
    pub update: f64,
    /// The whole step.
    pub total: f64,
    /// CPU time of this process, all its threads together.
    #[serde(default)]
    pub cpu: f64,
}
