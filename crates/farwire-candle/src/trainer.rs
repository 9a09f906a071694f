//! Training over a mesh, one step at a time.
//!
//! ```text
//!  batch ─▶ pipeline (forward, backward) ─▶ exchange over dp ─▶ norm ─▶ all agree ─▶ AdamW
//!                │ sums over tp inside         │ during backward      └▶ or nothing moves
//! ```
//!
//! The mesh is `pp` × `dp` × `tp`, of which `tp` runs fastest: ranks that talk most are neighbours.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::{Duration, Instant};

use candle_core::{Device, Tensor};
use farwire::{CodecChoice, CodecPolicy, Communicator, ErrorFeedback, ReduceOp};
use farwire_train::{
    Cause, Compressed, Entry, Exchange, Mesh, NotFinite, ParameterList, PhaseIn, Reducer, Rules, Schedule,
    Span, Squares, Summary, global_norm,
};
use serde::{Deserialize, Serialize};

use crate::adamw::{AdamW, Gradient, Moments};
use crate::collective::Group;
use crate::corpus::Batches;
use crate::data_parallel::{broadcast, groups, plan, set, values};
use crate::error::TrainError;
use crate::gpt::{self, Config};
use crate::params::{Param, Params, join_shares};
use crate::pipeline::{Flow, Pipeline};
use crate::stage::Stage;
use crate::text;

/// What to train, and how.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Settings {
    /// Sizes of the model.
    pub model: Config,
    /// Replicas of the model.
    pub dp: usize,
    /// Ranks that share each layer.
    pub tp: usize,
    /// Ranks that each have some of the layers.
    pub pp: usize,
    /// How micro-batches pass through the pipeline.
    #[serde(with = "text")]
    pub schedule: Schedule,
    /// Parts of a replica's batch that pass through one after the other.
    pub micro_batches: usize,
    /// Sequences per step, over all replicas.
    pub batch: usize,
    /// Steps of the whole run; the learning rate falls towards its end.
    pub steps: usize,
    /// The highest learning rate.
    pub learning_rate: f64,
    /// Steps in which it rises.
    pub warm_up: usize,
    /// Weight decay, of matrices only.
    pub decay: f64,
    /// The gradient is made no longer than this.
    pub clip: f64,
    /// Decides the start and the order of the data.
    pub seed: u64,
    /// Bytes of a bucket of gradients.
    pub bucket_bytes: usize,
    /// Whether each replica keeps the optimizer's state of its share of the parameters only (ZeRO-1): less memory, and updated parameters travel.
    #[serde(default)]
    pub shard_optimizer: bool,
    /// How gradients are compressed.
    #[serde(with = "text")]
    pub codec: CodecChoice,
    /// Steps at the start in which gradients are not compressed.
    #[serde(default)]
    pub dense_steps: usize,
    /// Steps after those in which a sparse codec's density falls from a quarter to its own.
    #[serde(default)]
    pub falling_steps: usize,
    /// What to do about a loss or a gradient that is not finite.
    #[serde(default, with = "text")]
    pub on_nan: OnNan,
}

/// What to do about a loss or a gradient that is a NaN or an infinity. Either way it is found before
/// any weight moves, on all ranks at the same step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OnNan {
    /// Stop with an error that says where it came from.
    #[default]
    Stop,
    /// Leave the step out: no weight, moment or residual moves on any rank. Too many in a row are an
    /// error.
    Skip,
}

impl fmt::Display for OnNan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Stop => "stop",
            Self::Skip => "skip",
        })
    }
}

impl FromStr for OnNan {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "stop" => Ok(Self::Stop),
            "skip" => Ok(Self::Skip),
            _ => Err(format!("`{text}` is neither stop nor skip")),
        }
    }
}

/// A run that leaves out so many steps in a row will not recover.
const MAX_SKIPPED_IN_A_ROW: usize = 100;

impl Default for Settings {
    fn default() -> Self {
        Self {
            model: Config::default(),
            dp: 1,
            tp: 1,
            pp: 1,
            schedule: Schedule::default(),
            micro_batches: 1,
            batch: 16,
            steps: 300,
            learning_rate: 2e-3,
            warm_up: 20,
            decay: 0.1,
            clip: 1.0,
            seed: 1,
            bucket_bytes: 1 << 20,
            shard_optimizer: false,
            codec: CodecChoice::default(),
            dense_steps: 0,
            falling_steps: 0,
            on_nan: OnNan::default(),
        }
    }
}

impl Settings {
    /// Fails if they contradict each other.
    pub fn check(&self) -> Result<(), TrainError> {
        let wrong = |text: String| Err(TrainError::Settings(text));
        for (name, size) in [
            ("dp", self.dp),
            ("tp", self.tp),
            ("pp", self.pp),
            ("micro-batches", self.micro_batches),
            ("batch", self.batch),
        ] {
            if size == 0 || size > 1 << 20 {
                return wrong(format!("{name} is {size}; use at least 1 and at most {}", 1 << 20));
            }
        }
        let parts = self.dp * self.micro_batches;
        if !self.batch.is_multiple_of(parts) {
            return wrong(format!(
                "a batch of {} sequences cannot be shared evenly by {} replicas × {} micro-batches; use a multiple of {parts}",
                self.batch, self.dp, self.micro_batches
            ));
        }
        for (name, value) in [("learning rate", self.learning_rate), ("clip", self.clip)] {
            if !(value.is_finite() && value > 0.0) {
                return wrong(format!("the {name} is {value}; use a number above 0"));
            }
        }
        if !(self.decay.is_finite() && self.decay >= 0.0) {
            return wrong(format!("the weight decay is {}; use 0 or more", self.decay));
        }
        self.schedule.actions(self.pp, 0, self.micro_batches)?;
        self.model.check(self.tp, self.pp * self.schedule.chunks())
    }

    /// Ranks that these settings need.
    pub fn ranks(&self) -> usize {
        self.dp * self.tp * self.pp
    }

    /// Who has what: what is owed in one layout cannot be paid in another.
    pub(crate) fn layout(&self) -> [usize; 4] {
        [self.dp, self.tp, self.pp, self.schedule.chunks()]
    }

    /// The learning rate of a step: up in a line, down in half a cosine to a tenth.
    pub fn rate(&self, step: usize) -> f64 {
        if step < self.warm_up {
            return self.learning_rate * (step + 1) as f64 / self.warm_up as f64;
        }
        let left = self.steps.saturating_sub(self.warm_up).max(1) as f64;
        let done = ((step - self.warm_up) as f64 / left).min(1.0);
        self.learning_rate * (0.1 + 0.9 * 0.5 * (1.0 + (std::f64::consts::PI * done).cos()))
    }

    /// Whether a run with these settings can go on from a checkpoint of one with `other`: all but layout and length must be the same.
    pub(crate) fn continues(&self, other: &Self) -> Result<(), String> {
        let differs = |name: &str, mine: &dyn std::fmt::Debug, theirs: &dyn std::fmt::Debug| {
            Err(format!(
                "it was made with {name} {theirs:?}, not {mine:?}; give the same, or start without resuming"
            ))
        };
        if self.model != other.model {
            return differs("a model of", &self.model, &other.model);
        }
        // As a float, a seed would lose its last bits.
        if self.seed != other.seed {
            return differs("seed", &self.seed, &other.seed);
        }
        for (name, mine, theirs) in [
            ("batch", self.batch as f64, other.batch as f64),
            ("learning rate", self.learning_rate, other.learning_rate),
            ("weight decay", self.decay, other.decay),
            ("clip", self.clip, other.clip),
            ("warm-up", self.warm_up as f64, other.warm_up as f64),
        ] {
            // Text does not always keep the last bit.
            if (mine - theirs).abs() > 1e-12 * mine.abs() {
                return differs(name, &mine, &theirs);
            }
        }
        if self.codec != other.codec {
            return differs("codec", &self.codec.to_string(), &other.codec.to_string());
        }
        Ok(())
    }
}

/// What a step brought.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct StepReport {
    /// Which step, from 0.
    pub step: usize,
    /// The mean loss over the batch, before the update.
    #[serde(with = "text::number")]
    pub loss: f64,
    /// The gradient's length, before it was cut.
    #[serde(with = "text::number")]
    pub norm: f64,
    /// Why this step was left out, if it was: see [`OnNan::Skip`].
    #[serde(default)]
    pub skipped: Option<String>,
    /// Tokens learned from, over all ranks.
    pub tokens: usize,
    /// Bytes that all ranks sent in this step, as their links counted them. Updates of a sharded
    /// optimizer count with the next step: they are sent when this is counted already.
    pub wire_bytes: u64,
    /// Bytes that a dense exchange of the gradients sends: what a ratio is taken against.
    pub dense_bytes: u64,
    /// The share of the exchange's time in which this rank computed; 1 where there is no exchange.
    pub hidden: f64,
    /// Where this rank's time went.
    pub times: Times,
    /// Whether some rank wants to stop.
    pub stop: bool,
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
    /// All in all.
    pub total: f64,
}

/// A model in training: this rank's share of it.
pub struct Trainer {
    settings: Settings,
    mesh: Mesh,
    tensor: Group,
    pipeline: Pipeline,
    plan: ParameterList,
    codec: CodecPolicy,
    exchange: Exchange<Compressed>,
    params: BTreeMap<String, Param>,
    /// Which replica updates a parameter, where the optimizer is sharded.
    owners: BTreeMap<String, usize>,
    adam: AdamW,
    batches: Batches,
    step: usize,
    /// Steps left out so far, and without one in between that counted.
    skipped: usize,
    skipped_in_a_row: usize,
    /// Bytes of the last step that were sent after they had been counted.
    uncounted: u64,
    trace: Vec<Span>,
    /// Checkpoints that were passed over when this run went on: a new one replaces them.
    damaged: Vec<PathBuf>,
}

impl Trainer {
    /// A model at its start. All ranks of `world` must call this with the same settings and text.
    pub fn new(world: &Communicator, settings: Settings, text: &[u8]) -> Result<Self, TrainError> {
        settings.check()?;
        let mesh = Mesh::new(world, [("pp", settings.pp), ("dp", settings.dp), ("tp", settings.tp)])?;
        let axis = |name| mesh.axis(name).expect("the mesh was made with these axes");
        let (tensor, stages) = (Group::of(axis("tp")), Group::of(axis("pp")));
        let chunks = settings.schedule.chunks();
        let mut made = Params::from_seed(settings.seed, &tensor);
        let chunks = (0..chunks)
            .map(|chunk| {
                let stage = chunk * settings.pp + stages.rank();
                Ok(Stage::new(gpt::stage(&mut made, settings.model, stage, settings.pp * chunks)?))
            })
            .collect::<Result<Vec<_>, TrainError>>()?;
        let sequences = settings.batch / settings.dp / settings.micro_batches;
        let shape = [sequences, settings.model.context, settings.model.width];
        let pipeline = Pipeline::new(&stages, settings.schedule, settings.micro_batches, chunks, &shape)?;

        let order: Vec<&Param> = pipeline.backward_order().collect();
        let plan = plan(order.iter().map(|param| (&param.name[..], &param.var)))?;
        plan.agree(axis("dp"))?;
        // Replicas start from the same bits: shares over dp, what is not cut over tp, too.
        broadcast(axis("tp"), order.iter().filter(|param| param.cut.is_none()).map(|param| &param.var))?;
        broadcast(axis("dp"), order.iter().map(|param| &param.var))?;
        let params = order.into_iter().map(|param| (param.name.clone(), param.clone())).collect();
        let owners = if settings.shard_optimizer { owners(&plan, settings.dp) } else { BTreeMap::new() };
        let codec = settings.codec.settle(axis("dp"), world)?;
        let exchange = exchange(&settings, &mesh, &plan, &codec);
        let decay = Rules::new(settings.decay).on("*.bias", 0.0).on("*norm*", 0.0).on("embedding.*", 0.0);
        let batches = Batches::new(text, settings.seed, settings.model.context, settings.batch)?;
        let adam = AdamW::new(decay);
        let (step, skipped, skipped_in_a_row, uncounted, trace) = (0, 0, 0, 0, Vec::new());
        Ok(Self {
            settings,
            mesh,
            tensor,
            pipeline,
            plan,
            codec,
            exchange,
            params,
            owners,
            adam,
            batches,
            step,
            skipped,
            skipped_in_a_row,
            uncounted,
            trace,
            damaged: Vec::new(),
        })
    }

    /// The settings.
    pub fn settings(&self) -> &Settings {
        &self.settings
    }

    /// Which codec gradients take, by their length: what is in the settings, or what was measured.
    pub fn codec(&self) -> &CodecPolicy {
        &self.codec
    }

    /// The mesh.
    pub fn mesh(&self) -> &Mesh {
        &self.mesh
    }

    /// Steps done.
    pub fn steps_done(&self) -> usize {
        self.step
    }

    /// Steps of these that were left out, since something was not finite.
    pub fn steps_skipped(&self) -> usize {
        self.skipped
    }

    pub(crate) fn damaged_mut(&mut self) -> &mut Vec<PathBuf> {
        &mut self.damaged
    }

    /// What is learned from.
    pub(crate) fn batches(&self) -> &Batches {
        &self.batches
    }

    /// Elements that this rank keeps optimizer state for.
    pub fn optimizer_elements(&self) -> usize {
        let mine = self.params.iter().filter(|(name, _)| owns(&self.owners, &self.mesh, name));
        mine.map(|(_, param)| param.var.elem_count()).sum()
    }

    /// This rank's share of the parameters, by name.
    pub fn params(&self) -> impl Iterator<Item = &Param> {
        self.params.values()
    }

    /// What ran when in the last step on this rank: backward of each segment, and each bucket's way.
    pub fn trace(&self) -> &[Span] {
        &self.trace
    }

    /// One step. If any rank has a `wish` to stop, every rank's report says so.
    ///
    /// A loss or a gradient that is not finite is found before any weight moves. All ranks then stop
    /// with the same error, or leave the step out: see [`OnNan`].
    pub fn step(&mut self, wish: bool) -> Result<StepReport, TrainError> {
        let begun = Instant::now();
        let tensor_before = self.tensor.spent();
        let sent_before = self.mesh.world().traffic().bytes;
        let (flow, summary) = self.gradients()?;
        let in_layers = (self.tensor.spent() - tensor_before).as_secs_f64();

        let update = Instant::now();
        let norm = self.norm()?;
        let agreed = self.agree(&flow, norm, wish, sent_before)?;
        let skipped = if agreed.is_finite {
            self.exchange.commit();
            self.update(norm)?;
            self.skipped_in_a_row = 0;
            None
        } else {
            self.exchange.roll_back();
            Some(self.skip(&flow)?)
        };
        self.uncounted = self.mesh.world().traffic().bytes - agreed.counted;

        let seconds = |time: Duration| time.as_secs_f64();
        // Sums over tp happen inside forward and backward; they are taken off both alike.
        let compute = (seconds(flow.forward) + seconds(flow.backward)).max(1e-12);
        let without = |time: Duration| seconds(time) * (1.0 - (in_layers / compute).min(1.0));
        let times = Times {
            forward: without(flow.forward),
            // Buckets are handed over within backward.
            backward: without(flow.backward.saturating_sub(summary.handing_over)),
            tensor: in_layers,
            pipeline: seconds(flow.waiting),
            exchange: seconds(summary.exposed()),
            exchange_busy: if self.settings.dp > 1 { seconds(summary.busy()) } else { 0.0 },
            update: seconds(update.elapsed()),
            total: seconds(begun.elapsed()),
        };
        let report = StepReport {
            step: self.step,
            loss: agreed.loss,
            norm,
            skipped: skipped.map(|found| found.to_string()),
            tokens: self.settings.batch * self.settings.model.context,
            wire_bytes: agreed.bytes,
            dense_bytes: self.dense_bytes(),
            hidden: if self.settings.dp > 1 { summary.hidden() } else { 1.0 },
            times,
            stop: agreed.stop,
        };
        self.step += 1;
        Ok(report)
    }

    /// Everyone learns the loss, the bytes, whether to go on, and whether all is finite: in one
    /// collective, before any weight moves.
    fn agree(&mut self, flow: &Flow, norm: f64, wish: bool, sent_before: u64) -> Result<Agreed, TrainError> {
        let world = self.mesh.world();
        let sent = world.traffic().bytes;
        let bytes = sent - sent_before + self.uncounted;
        let shares = self.settings.dp * self.settings.tp * self.settings.micro_batches;
        let loss = flow.losses.iter().map(|loss| f64::from(*loss)).sum::<f64>() / shares as f64;
        let is_bad = !(norm.is_finite() && self.exchange.is_finite());
        let flag = |is: bool| f64::from(u8::from(is));
        let mine = vec![loss, bytes as f64, flag(wish), flag(is_bad)];
        let all = world.all_reduce(mine, ReduceOp::Sum).wait()?;
        let is_finite = all[0].is_finite() && all[3] == 0.0;
        Ok(Agreed { loss: all[0], bytes: all[1] as u64, counted: sent, stop: all[2] > 0.0, is_finite })
    }

    /// Moves the weights.
    fn update(&mut self, norm: f64) -> Result<(), TrainError> {
        let scale = (self.settings.clip / (norm + 1e-6)).min(1.0);
        let rate = self.settings.rate(self.step);
        self.adam.begin();
        for (name, data) in self.exchange.gradients() {
            if owns(&self.owners, &self.mesh, name) {
                let param = &self.params[name];
                let mut weights = values(&param.var)?;
                let gradient = Gradient { data, scale, rate, density: self.exchange.density(name) };
                self.adam.update(name, &mut weights, gradient);
                set(&param.var, &weights)?;
            }
        }
        self.share_updates()
    }

    /// Finds out, with all ranks, why this step is left out; an error if the run is to stop.
    fn skip(&mut self, flow: &Flow) -> Result<NotFinite, TrainError> {
        let loss = flow.losses.iter().find(|loss| !loss.is_finite()).map(|loss| Cause::Loss(*loss));
        let found = NotFinite::find(self.mesh.world(), self.exchange.cause().or(loss.as_ref()))?;
        let step = self.step;
        if self.settings.on_nan == OnNan::Stop {
            return Err(TrainError::NotFinite { step, found });
        }
        self.skipped += 1;
        self.skipped_in_a_row += 1;
        if self.skipped_in_a_row >= MAX_SKIPPED_IN_A_ROW {
            return Err(TrainError::TooManySkipped { steps: self.skipped_in_a_row, step, found });
        }
        Ok(found)
    }

    /// Computes and exchanges the gradients of the next step, without the update. They are then in [`gathered_gradients`](Self::gathered_gradients), finite or not.
    pub fn compute_gradients(&mut self) -> Result<(), TrainError> {
        self.gradients()?;
        if self.exchange.is_finite() {
            self.exchange.commit();
        } else {
            self.exchange.roll_back();
        }
        Ok(())
    }

    /// Gradients of the next step, which does not count yet.
    fn gradients(&mut self) -> Result<(Flow, Summary), TrainError> {
        let Settings { micro_batches, batch, dp, model, .. } = self.settings;
        let sequences = batch / dp / micro_batches;
        let first = self.mesh.coordinate("dp") * micro_batches * sequences;
        let part = |micro: usize| -> Range<usize> {
            let start = first + micro * sequences;
            start..start + sequences
        };
        let tensor = |tokens| Tensor::from_vec(tokens, (sequences, model.context), &Device::Cpu);
        let (mut inputs, mut targets) = (Vec::new(), Vec::new());
        for micro in 0..micro_batches {
            let batch = self.batches.at(self.step, part(micro));
            inputs.push(tensor(batch.inputs)?);
            targets.push(tensor(batch.targets)?);
        }
        let loss = |micro: usize, logits: &Tensor| gpt::cross_entropy(logits, &targets[micro]);
        let exchange = &mut self.exchange;
        exchange.reducer_mut().at_step(self.step as u64);
        exchange.begin(micro_batches);
        let flow = self.pipeline.run(&inputs, &loss, &mut |param, gradient| {
            Ok(exchange.add(&param.name, &gradient.flatten_all()?.to_vec1::<f32>()?)?)
        })?;
        let summary = exchange.wait()?;
        let since = |at: Instant| at.saturating_duration_since(exchange.begun());
        self.trace = self
            .pipeline
            .take_trace()
            .into_iter()
            .map(|(name, start, end)| Span {
                name: format!("backward {name}"),
                start: since(start),
                end: since(end),
            })
            .collect();
        self.trace.extend(
            summary.buckets.iter().map(|span| Span { name: format!("bucket {}", span.name), ..*span }),
        );
        Ok((flow, summary))
    }

    /// Gives every replica the parameters that others have updated.
    fn share_updates(&self) -> Result<(), TrainError> {
        if self.owners.is_empty() {
            return Ok(());
        }
        let replicas = self.mesh.axis("dp").expect("the mesh was made with these axes");
        let mut counts = vec![0; replicas.size()];
        let mut mine = Vec::new();
        for (name, owner) in &self.owners {
            let var = &self.params[name].var;
            counts[*owner] += var.elem_count();
            if *owner == replicas.rank() {
                mine.extend(values(var)?);
            }
        }
        let all = replicas.all_gather_varied(mine, &counts).wait()?;
        let mut rest = &all[..];
        for replica in 0..replicas.size() {
            for (name, _) in self.owners.iter().filter(|(_, owner)| **owner == replica) {
                let var = &self.params[name].var;
                let (data, after) = rest.split_at(var.elem_count());
                rest = after;
                if replica != replicas.rank() {
                    set(var, data)?;
                }
            }
        }
        Ok(())
    }

    /// This rank's share of a moment of every parameter; on the first replica all of them, wherever they are kept.
    fn moment(&self, pick: fn(&Moments) -> &Vec<f32>) -> Result<BTreeMap<String, Vec<f32>>, TrainError> {
        let replicas = self.mesh.axis("dp").expect("the mesh was made with these axes");
        let mut found = BTreeMap::new();
        for (name, param) in &self.params {
            let mine = || {
                let zeros = || vec![0.0; param.var.elem_count()];
                self.adam.moments(name).map_or_else(zeros, |moments| pick(moments).clone())
            };
            let data = match (self.owners.get(name), replicas.rank()) {
                (None | Some(0), _) => mine(),
                (Some(owner), 0) => replicas.recv(param.var.elem_count(), *owner, 0).wait()?,
                (Some(owner), rank) if *owner == rank => {
                    replicas.send(mine(), 0, 0).wait()?;
                    continue;
                }
                _ => continue,
            };
            found.insert(name.clone(), data);
        }
        Ok(found)
    }

    fn norm(&self) -> Result<f64, TrainError> {
        let (whole, cut): (&[&str], &[&str]) = (&["pp"], &["pp", "tp"]);
        let mut squares = Squares::new(&[whole, cut]);
        for (name, gradient) in self.exchange.gradients() {
            squares.add(if self.params[name].cut.is_some() { cut } else { whole }, gradient);
        }
        Ok(global_norm(&self.mesh, squares)?)
    }

    /// What all ranks together send in a dense exchange: 2·(dp − 1) times the gradients of a replica, and half of that again for updates of a sharded optimizer.
    fn dense_bytes(&self) -> u64 {
        let elements: usize = self.exchange.buckets().iter().map(farwire_train::Bucket::len).sum();
        let copies = 2 * (self.settings.dp - 1) * self.settings.tp * self.settings.pp;
        let updates = if self.owners.is_empty() { 0 } else { copies / 2 };
        (elements * size_of::<f32>() * (copies + updates)) as u64
    }

    /// Whether all replicas of this rank's parameters have the same bits: shares over dp, what is not cut over tp, too.
    pub fn replicas_agree(&self) -> Result<bool, TrainError> {
        let gather = |whole_only: bool| -> Result<Vec<f32>, TrainError> {
            let params = self.params.values().filter(|param| !whole_only || param.cut.is_none());
            Ok(params.map(|param| values(&param.var)).collect::<candle_core::Result<Vec<_>>>()?.concat())
        };
        let axis = |name| self.mesh.axis(name).expect("the mesh was made with these axes");
        let over_dp = axis("dp").is_in_sync(&gather(false)?)?;
        let over_tp = axis("tp").is_in_sync(&gather(true)?)?;
        Ok(over_dp && over_tp)
    }

    /// The whole model's weights by name: on rank 0 of the world, none elsewhere. All ranks must call it.
    pub fn gathered_weights(&self) -> Result<Option<BTreeMap<String, Tensor>>, TrainError> {
        self.gather(|param| Ok(values(&param.var)?))
    }

    /// The whole model's gradients of the last step by name, as [`gathered_weights`](Self::gathered_weights) gives weights.
    pub fn gathered_gradients(&self) -> Result<Option<BTreeMap<String, Tensor>>, TrainError> {
        let gradients: BTreeMap<&str, &[f32]> = self.exchange.gradients().collect();
        self.gather(|param| Ok(gradients[&param.name[..]].to_vec()))
    }

    /// The optimizer's moments, as `first.NAME` and `second.NAME`.
    pub(crate) fn gathered_moments(&self) -> Result<Option<BTreeMap<String, Tensor>>, TrainError> {
        let of = |pick| {
            let moment = self.moment(pick)?;
            self.gather(|param| Ok(moment[&param.name].clone()))
        };
        let (first, second) = (of(|moments| &moments.first)?, of(|moments| &moments.second)?);
        let (Some(first), Some(second)) = (first, second) else { return Ok(None) };
        let named = |prefix: &'static str| move |(name, tensor)| (format!("{prefix}.{name}"), tensor);
        Ok(Some(
            first.into_iter().map(named("first")).chain(second.into_iter().map(named("second"))).collect(),
        ))
    }

    /// What error feedback still owes on every rank, as files by rank: on rank 0 of the world, none elsewhere. All ranks must call it.
    pub(crate) fn gathered_residuals(&self) -> Result<Option<Vec<Vec<u8>>>, TrainError> {
        let mine = self.exchange.reducer().feedback().map(ErrorFeedback::to_bytes).unwrap_or_default();
        crate::checkpoint::gather_bytes(self.mesh.world(), mine)
    }

    /// Goes on as the run did that this one goes on from: with the codecs it chose, if they are for this layout, and phasing them in as it would have.
    pub(crate) fn restore_codec(&mut self, saved: &Settings, codec: Option<CodecPolicy>) {
        self.settings.dense_steps = saved.dense_steps;
        self.settings.falling_steps = saved.falling_steps;
        self.codec = codec.unwrap_or_else(|| self.codec.clone());
        self.exchange = exchange(&self.settings, &self.mesh, &self.plan, &self.codec);
    }

    /// Goes on with what was owed: this rank's of the files that rank 0 of the world has.
    pub(crate) fn restore_residuals(&mut self, files: Option<Vec<Vec<u8>>>) -> Result<(), TrainError> {
        let mine = crate::checkpoint::scatter_bytes(self.mesh.world(), files)?;
        if !mine.is_empty() {
            let feedback = ErrorFeedback::from_bytes(&mine).map_err(farwire::Error::from)?;
            self.exchange.reducer_mut().restore(feedback);
        }
        Ok(())
    }

    /// Joins shares over tp, then stages over pp, of the first replica.
    fn gather(
        &self,
        of: impl Fn(&Param) -> Result<Vec<f32>, TrainError>,
    ) -> Result<Option<BTreeMap<String, Tensor>>, TrainError> {
        if self.mesh.coordinate("dp") > 0 {
            return Ok(None);
        }
        let shares = self.params.values().map(|param| Ok((param, of(param)?)));
        let shares = shares.collect::<Result<Vec<_>, TrainError>>()?;
        let mut wholes = join_shares(&shares, &self.tensor)?;
        if self.mesh.coordinate("tp") > 0 {
            return Ok(None);
        }
        let stages = self.mesh.axis("pp").expect("the mesh was made with these axes");
        if stages.rank() > 0 {
            crate::checkpoint::send_tensors(stages, 0, &wholes)?;
            return Ok(None);
        }
        for stage in 1..stages.size() {
            wholes.extend(crate::checkpoint::receive_tensors(stages, stage)?);
        }
        Ok(Some(wholes))
    }

    /// Sets this rank's shares from whole tensors that rank 0 of the world has: weights by name, moments as `first.NAME` and `second.NAME`.
    pub(crate) fn restore(
        &mut self,
        step: usize,
        skipped: usize,
        tensors: Option<BTreeMap<String, Tensor>>,
    ) -> Result<(), TrainError> {
        let mut moments: BTreeMap<String, Moments> = BTreeMap::new();
        let (rank, ranks) = (self.tensor.rank(), self.tensor.size());
        let mut set_weights = 0;
        let mut take = |name: &str, whole: &Tensor| -> Result<(), TrainError> {
            let (kind, bare) = match name.split_once('.') {
                Some((kind @ ("first" | "second"), bare)) => (Some(kind), bare),
                _ => (None, name),
            };
            let Some(param) = self.params.get(bare) else { return Ok(()) };
            let share = match param.cut {
                Some(cut) => cut.share(whole, rank, ranks)?,
                None => whole.clone(),
            };
            if share.dims() != param.var.dims() {
                let (found, needed) = (share.dims(), param.var.dims());
                return Err(TrainError::Settings(format!(
                    "`{name}` is {found:?}, but the model needs {needed:?}"
                )));
            }
            match kind {
                None => {
                    param.var.set(&share)?;
                    set_weights += 1;
                }
                Some(_) if !owns(&self.owners, &self.mesh, bare) => {}
                Some(kind) => {
                    let moments = moments.entry(bare.to_owned()).or_default();
                    let data = share.flatten_all()?.to_vec1()?;
                    *(if kind == "first" { &mut moments.first } else { &mut moments.second }) = data;
                }
            }
            Ok(())
        };
        crate::checkpoint::broadcast_tensors(self.mesh.world(), tensors, &mut take)?;
        if set_weights != self.params.len() {
            let missing = self.params.len() - set_weights;
            return Err(TrainError::Settings(format!(
                "the weights lack {missing} of this model's parameters"
            )));
        }
        self.adam.restore(step.saturating_sub(skipped) as u32, moments);
        (self.step, self.skipped, self.skipped_in_a_row) = (step, skipped, 0);
        Ok(())
    }
}

/// What all ranks know of a step before it counts.
struct Agreed {
    loss: f64,
    /// Bytes that all ranks sent.
    bytes: u64,
    /// Bytes that this rank had ever sent when they were counted.
    counted: u64,
    stop: bool,
    is_finite: bool,
}

/// An exchange over dp.
fn exchange(
    settings: &Settings,
    mesh: &Mesh,
    plan: &ParameterList,
    codec: &CodecPolicy,
) -> Exchange<Compressed> {
    let replicas = mesh.axis("dp").expect("the mesh was made with these axes");
    let mut reducer = Compressed::new(replicas, codec.clone());
    reducer
        .set_phase_in(PhaseIn { dense: settings.dense_steps as u64, falling: settings.falling_steps as u64 });
    Exchange::new(reducer, plan, settings.bucket_bytes, &groups(plan, codec))
}

/// Whether this replica updates a parameter.
fn owns(owners: &BTreeMap<String, usize>, mesh: &Mesh, name: &str) -> bool {
    owners.get(name).is_none_or(|owner| *owner == mesh.coordinate("dp"))
}

/// Gives each parameter to the replica that has least so far: about equal shares, the same on all ranks.
fn owners(plan: &ParameterList, replicas: usize) -> BTreeMap<String, usize> {
    let mut loads = vec![0; replicas];
    let owner = |entry: &Entry| {
        let lightest = (0..replicas).min_by_key(|replica| loads[*replica]).unwrap_or(0);
        loads[lightest] += entry.shape.iter().product::<usize>();
        (entry.name.clone(), lightest)
    };
    plan.entries().iter().map(owner).collect()
}

impl std::fmt::Debug for Trainer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Trainer")
            .field("settings", &self.settings)
            .field("step", &self.step)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A loss can overflow where gradients do not: those of a softmax are at most 1.
    #[test]
    fn a_loss_that_is_not_finite_is_found_on_all_ranks() {
        let text = b"some text to learn from, again and again".repeat(9);
        let model = Config { layers: 1, heads: 1, width: 8, context: 4 };
        std::thread::scope(|scope| {
            for comm in farwire::local(2).unwrap() {
                let (text, settings) = (&text, Settings { model, dp: 2, ..Settings::default() });
                scope.spawn(move || {
                    let mut trainer = Trainer::new(&comm, settings, text).unwrap();
                    for (value, is_finite) in [(1.0, true), (f32::NAN, false), (f32::INFINITY, false)] {
                        let (mut flow, _) = trainer.gradients().unwrap();
                        if comm.rank() == 1 {
                            flow.losses[0] = value;
                        }
                        let norm = trainer.norm().unwrap();
                        let agreed = trainer.agree(&flow, norm, false, 0).unwrap();
                        assert_eq!(agreed.is_finite, is_finite);
                        if !is_finite {
                            let error = trainer.skip(&flow).unwrap_err().to_string();
                            let says = format!("the loss on rank 1 is {value}");
                            assert!(error.contains(&says), "{error}");
                        }
                    }
                });
            }
        });
    }
}
