//! Training over a mesh, one step at a time.
//!
//! ```text
//!  batch ─▶ pipeline (forward, backward) ─▶ exchange over dp ─▶ norm ─▶ all agree ─▶ AdamW
//!                │ sums over tp inside         │ during backward      └▶ or nothing moves
//! ```
//!
//! The mesh is `pp` × `dp` × `tp`, of which `tp` runs fastest: ranks that talk most are neighbours.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use farwire::{CodecPolicy, Communicator, ErrorFeedback, ReduceOp};

use crate::adamw::{AdamW, Gradient, Moments};
use crate::carry;
use crate::checkpoint::{FIRST, SECOND};
use crate::compressed::{Compressed, groups};
use crate::corpus::Batches;
use crate::elastic::Seating;
use crate::error::TrainError;
use crate::exchange::{Bucket, Exchange, Ledger, Reducer, Span, Summary};
use crate::finite::{Cause, NotFinite};
use crate::group::Group;
use crate::library::{Library, StageSpec};
use crate::memory::{Mean, Memory};
use crate::mesh::Mesh;
use crate::norm::{Squares, global_norm};
use crate::param::{Array, Arrays, Param, Start};
use crate::parameter_list::{Entry, ParameterList};
use crate::phase_in::PhaseIn;
use crate::pipeline::{Flow, Pipeline};
use crate::report::{StepReport, Times};
use crate::rules::Rules;
use crate::settings::{OnNan, Settings};

/// A run that skips this many steps in a row will not recover.
const MAX_SKIPPED_IN_A_ROW: usize = 100;

/// How much rounding may add up to, as a share of the magnitudes in a step. Sums of f32 in another
/// order differ by less than 1e-6 of them.
const AUDIT_TOLERANCE: f64 = 1e-5;

/// A parameter, and which of this rank's stages has it.
#[derive(Clone, Debug)]
pub(crate) struct Place {
    pub(crate) param: Param,
    pub(crate) chunk: usize,
}

/// A rank's share of a model, and the ranks it shares layers with.
pub(crate) struct Share {
    pub(crate) tensor: Group,
    pub(crate) pipeline: Pipeline,
    pub(crate) plan: ParameterList,
    pub(crate) params: BTreeMap<String, Place>,
}

impl Share {
    /// The share for this rank's place in the mesh, from the seed.
    pub(crate) fn new(
        library: &dyn Library,
        settings: &Settings,
        mesh: &Mesh,
    ) -> Result<Self, TrainError> {
        let (tensor, stages) = (Group::of(mesh.of("tp")), Group::of(mesh.of("pp")));
        let all = settings.pp * settings.schedule.chunks();
        let stage = |chunk: usize| {
            library.stage(StageSpec {
                model: settings.model,
                stage: chunk * settings.pp + stages.rank(),
                stages: all,
                start: Start::Seed(settings.seed),
                group: &tensor,
            })
        };
        let chunks = (0..settings.schedule.chunks()).map(stage).collect::<Result<Vec<_>, _>>()?;
        let Settings { schedule, micro_batches, .. } = *settings;
        let pipeline = Pipeline::new(&stages, schedule, micro_batches, chunks, settings.passed())?;
        let plan = ParameterList::new(pipeline.params().into_iter().map(|param| Entry {
            name: param.name,
            shape: param.shape,
            dtype: "f32".to_owned(),
        }))?;
        let mut params = BTreeMap::new();
        for (chunk, stage) in pipeline.chunks().iter().enumerate() {
            let named = |param: Param| (param.name.clone(), Place { param, chunk });
            params.extend(stage.params().into_iter().map(named));
        }
        Ok(Self { tensor, pipeline, plan, params })
    }

    /// No share, for a rank that waits for one.
    pub(crate) fn nothing() -> Result<Self, TrainError> {
        let (tensor, pipeline, plan) = (Group::alone(), Pipeline::idle(), ParameterList::new([])?);
        Ok(Self { tensor, pipeline, plan, params: BTreeMap::new() })
    }
}

/// A model in training: this rank's share of it.
pub struct Trainer {
    pub(crate) settings: Settings,
    /// All ranks: those of the mesh, and in an elastic run those that wait for a place in it.
    pub(crate) everyone: Communicator,
    pub(crate) mesh: Mesh,
    pub(crate) tensor: Group,
    pub(crate) pipeline: Pipeline,
    pub(crate) plan: ParameterList,
    pub(crate) codec: CodecPolicy,
    pub(crate) memory: Memory,
    pub(crate) exchange: Exchange<Compressed>,
    pub(crate) params: BTreeMap<String, Place>,
    /// Which replica updates a parameter, if the optimizer is sharded.
    owners: BTreeMap<String, usize>,
    pub(crate) adam: AdamW,
    pub(crate) batches: Batches,
    pub(crate) step: usize,
    /// Sequences learned from so far, including those of skipped steps.
    pub(crate) seen: u64,
    /// Sequences per step that were asked for. Steps may have another number, so that it can be
    /// shared evenly.
    pub(crate) asked_batch: usize,
    /// Every rank's place, if ranks come and go.
    pub(crate) seating: Option<Seating>,
    /// Whether this rank wants to leave.
    leaving: bool,
    /// Whether this rank asks for what the others have seen.
    asking: bool,
    /// Whether steps are to be [audited](Self::audit).
    audited: bool,
    /// The norm of the gradients, once they are exchanged, until it is known whether the step
    /// counts.
    pub(crate) open: Option<f64>,
    /// What error feedback owed on all ranks after the last step that counted: the sum of squares.
    pub(crate) owed: f64,
    /// After how many steps ranks were lost, and the norm of what they owed.
    pub(crate) lost: (u64, f64),
    /// Steps skipped so far, and those since the last step that counted.
    pub(crate) skipped: usize,
    pub(crate) skipped_in_a_row: usize,
    /// Bytes of the last step that were sent after its bytes had been counted.
    uncounted: u64,
    trace: Vec<Span>,
    /// Checkpoints that were passed over when this run was resumed: a new one replaces them.
    damaged: Vec<PathBuf>,
}

impl Trainer {
    /// A model at the start of its training. All ranks of `world` must call this with the same
    /// settings and text.
    pub fn new(
        library: &dyn Library,
        world: &Communicator,
        settings: Settings,
        text: &[u8],
    ) -> Result<Self, TrainError> {
        settings.check()?;
        let mesh =
            Mesh::new(world, [("pp", settings.pp), ("dp", settings.dp), ("tp", settings.tp)])?;
        let share = Share::new(library, &settings, &mesh)?;
        let codec = settings.codec.settle(mesh.of("dp"), world)?;
        let batches = Batches::new(text, settings.seed, settings.model.context, settings.batch)?;
        let memory = library.memory();
        let mut trainer = Self::with_share(settings, mesh, share, codec, batches, memory)?;
        trainer.even_out()?;
        Ok(trainer)
    }

    /// A trainer at its start, with this share of the model.
    pub(crate) fn with_share(
        settings: Settings,
        mesh: Mesh,
        share: Share,
        codec: CodecPolicy,
        batches: Batches,
        memory: Memory,
    ) -> Result<Self, TrainError> {
        let Share { tensor, pipeline, plan, params } = share;
        let owners =
            if settings.shard_optimizer { owners(&plan, settings.dp) } else { BTreeMap::new() };
        let exchange = exchange(&settings, &mesh, &plan, &codec, &memory)?;
        let decay =
            Rules::new(settings.decay).on("*.bias", 0.0).on("*norm*", 0.0).on("embedding.*", 0.0);
        let (everyone, asked_batch) = (mesh.world().clone(), settings.batch);
        Ok(Self {
            settings,
            everyone,
            mesh,
            tensor,
            pipeline,
            plan,
            codec,
            memory,
            exchange,
            params,
            owners,
            adam: AdamW::new(decay),
            batches,
            step: 0,
            seen: 0,
            asked_batch,
            seating: None,
            leaving: false,
            asking: false,
            audited: false,
            open: None,
            owed: 0.0,
            lost: (0, 0.0),
            skipped: 0,
            skipped_in_a_row: 0,
            uncounted: 0,
            trace: Vec::new(),
            damaged: Vec::new(),
        })
    }

    /// Makes replicas start from the same bits: shares over dp, and parameters that are not cut
    /// also over tp. All ranks of the mesh call this.
    pub(crate) fn even_out(&mut self) -> Result<(), TrainError> {
        self.plan.agree(self.mesh.of("dp"))?;
        for (name, Place { param, chunk }) in &self.params {
            let axes = [("tp", param.cut.is_none()), ("dp", true)];
            for axis in axes.into_iter().filter(|(_, has_copies)| *has_copies) {
                let axis = self.mesh.of(axis.0);
                if axis.size() > 1 {
                    let chunk = &mut self.pipeline.chunks_mut()[*chunk];
                    let mine = if axis.rank() == 0 { Some(chunk.weights(name)?) } else { None };
                    let weights = axis.broadcast(mine, param.elements(), 0).wait()?;
                    chunk.set_weights(name, &weights)?;
                }
            }
        }
        Ok(())
    }

    /// The settings.
    pub fn settings(&self) -> &Settings {
        &self.settings
    }

    /// The codec for gradients, by their length: the one in the settings, or as it was measured.
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

    /// How many of these were skipped because something was not finite.
    pub fn steps_skipped(&self) -> usize {
        self.skipped
    }

    pub(crate) fn damaged_mut(&mut self) -> &mut Vec<PathBuf> {
        &mut self.damaged
    }

    /// The sum of squares of what error feedback owes on this rank.
    pub(crate) fn owed_here(&self) -> f64 {
        let Some(feedback) = self.exchange.reducer().feedback() else { return 0.0 };
        feedback.names().iter().map(|name| feedback.owed(name).powi(2)).sum()
    }

    /// The norm of what error feedback owed on ranks that were lost in the last change of the
    /// group, or in several changes without a step in between. It will never be sent; what the
    /// remaining ranks owe will be.
    pub fn lost_residual(&self) -> f64 {
        self.lost.1
    }

    /// The settings, with the batch that was asked for: it may be another as ranks come and go.
    pub(crate) fn asked_settings(&self) -> Settings {
        Settings { batch: self.asked_batch, ..self.settings.clone() }
    }

    pub(crate) fn sequences_seen(&self) -> u64 {
        self.seen
    }

    pub(crate) fn set_sequences_seen(&mut self, seen: u64) {
        self.seen = seen;
    }

    /// The training data.
    pub(crate) fn batches(&self) -> &Batches {
        &self.batches
    }

    /// Elements that this rank keeps optimizer state for.
    pub fn optimizer_elements(&self) -> usize {
        let mine = self.params().filter(|param| owns(&self.owners, &self.mesh, &param.name));
        mine.map(Param::elements).sum()
    }

    /// This rank's parameters, by name.
    pub fn params(&self) -> impl Iterator<Item = &Param> {
        self.params.values().map(|place| &place.param)
    }

    /// This rank's share of a parameter.
    pub fn weights(&self, name: &str) -> Result<Vec<f32>, TrainError> {
        Ok(self.pipeline.chunks()[self.place(name)?.chunk].weights(name)?)
    }

    /// Sets this rank's share of a parameter.
    pub fn set_weights(&mut self, name: &str, weights: &[f32]) -> Result<(), TrainError> {
        let Place { param, chunk } = self.place(name)?;
        if weights.len() != param.elements() {
            let (len, needed) = (weights.len(), param.elements());
            return Err(TrainError::Settings(format!("`{name}` has {needed} elements, not {len}")));
        }
        let chunk = *chunk;
        Ok(self.pipeline.chunks_mut()[chunk].set_weights(name, weights)?)
    }

    fn place(&self, name: &str) -> Result<&Place, TrainError> {
        let place = self.params.get(name);
        place.ok_or_else(|| TrainError::Settings(format!("this rank has no parameter `{name}`")))
    }

    /// What ran when in the last step on this rank: the backward of each part, and each bucket.
    pub fn trace(&self) -> &[Span] {
        &self.trace
    }

    /// Says whether this rank wants to leave while the others go on. All ranks' reports then count
    /// it, so that all can [part](farwire::Elastic::part) after the same step.
    pub fn set_leaving(&mut self, leaving: bool) {
        self.leaving = leaving;
    }

    /// Whether this rank wants to leave, as the last step's report counts it.
    pub fn is_leaving(&self) -> bool {
        self.leaving
    }

    /// Says whether this rank, which has joined, asks the others for what they have seen of the
    /// run. All ranks' reports then count it, so that all can exchange that after the same step.
    pub fn set_asking(&mut self, asking: bool) {
        self.asking = asking;
    }

    /// Says whether every step keeps what an [`audit`](Self::audit) needs.
    pub fn set_audited(&mut self, audited: bool) {
        self.audited = audited;
    }

    /// Checks that all is well after a step: replicas have the same bits, and the step has neither
    /// lost nor made up any gradient. All ranks that have a place must call this.
    pub fn audit(&self) -> Result<(), TrainError> {
        let step = self.step;
        if !self.replicas_agree()? {
            return Err(TrainError::Audit { step, what: "replicas differ".to_owned() });
        }
        let ledger = self.exchange.ledger();
        let Ledger { inputs, outputs, magnitude } = ledger.unwrap_or_default();
        let kept = f64::from(u8::from(ledger.is_some()));
        let all =
            self.mesh.of("dp").all_reduce(vec![inputs, outputs, magnitude, kept], ReduceOp::Sum);
        let [inputs, outputs, magnitude, kept] = all.wait()?[..] else { return Ok(()) };
        let is_whole = kept as usize == self.mesh.size("dp");
        if is_whole && (inputs - outputs).abs() > AUDIT_TOLERANCE * magnitude {
            let what = format!(
                "gradients and residuals added up to {inputs:e}, results and residuals to {outputs:e} \
                 (magnitudes: {magnitude:e})"
            );
            return Err(TrainError::Audit { step, what });
        }
        Ok(())
    }

    /// Makes one step. If any rank has a `wish` to stop, every rank's report says so.
    ///
    /// A loss or a gradient that is not finite is found before any weight moves. All ranks then
    /// stop with the same error, or skip the step: see [`OnNan`].
    pub fn step(&mut self, wish: bool) -> Result<StepReport, TrainError> {
        let (begun, cpu_before) = (Instant::now(), farwire::cpu_time());
        let tensor_before = self.tensor.spent();
        let sent_before = self.everyone.traffic().bytes;
        self.open = None;
        let (flow, summary) = if self.has_place() {
            self.gradients()?
        } else {
            (Flow::default(), Summary::default())
        };
        let in_layers = (self.tensor.spent() - tensor_before).as_secs_f64();

        let update = Instant::now();
        let norm = self.norm()?;
        self.open = Some(norm);
        let agreed = self.agree(&flow, norm, wish, sent_before)?;
        let skipped = if agreed.is_finite {
            self.exchange.commit();
            self.owed = agreed.owed;
            if self.has_place() {
                self.update(norm)?;
            }
            self.skipped_in_a_row = 0;
            None
        } else {
            self.exchange.roll_back();
            Some(self.skip(&flow)?)
        };
        self.uncounted = self.everyone.traffic().bytes - agreed.counted;

        let seconds = |time: Duration| time.as_secs_f64();
        // Sums over tp happen inside forward and backward; their time is taken off both in
        // proportion.
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
            cpu: seconds(farwire::cpu_time().saturating_sub(cpu_before)),
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
            leaving: agreed.leaving,
            asking: agreed.asking,
        };
        self.open = None;
        self.step += 1;
        self.seen += self.settings.batch as u64;
        Ok(report)
    }

    /// A step whose end this rank misses: all agree whether it counts, but this rank does not hear
    /// it.
    #[cfg(test)]
    pub(crate) fn step_without_end(&mut self) -> Result<(), TrainError> {
        let (flow, _) = self.gradients()?;
        let norm = self.norm()?;
        self.open = Some(norm);
        self.agree(&flow, norm, false, 0).map(drop)
    }

    /// All ranks learn the loss, the bytes, whether to go on, and whether all is finite: in one
    /// collective, before any weight moves.
    fn agree(
        &mut self,
        flow: &Flow,
        norm: f64,
        wish: bool,
        sent_before: u64,
    ) -> Result<Agreed, TrainError> {
        let world = &self.everyone;
        let sent = world.traffic().bytes;
        let bytes = sent - sent_before + self.uncounted;
        let shares = self.settings.dp * self.settings.tp * self.settings.micro_batches;
        let loss = flow.losses.iter().map(|loss| f64::from(*loss)).sum::<f64>() / shares as f64;
        let is_bad = !(norm.is_finite() && self.exchange.is_finite());
        let flag = |is: bool| f64::from(u8::from(is));
        let owed = if self.seating.is_some() { self.owed_here() } else { 0.0 };
        let mut mine = vec![loss, bytes as f64, flag(wish), flag(is_bad)];
        mine.extend([owed, flag(self.leaving), flag(self.asking)]);
        let all = world.all_reduce(mine, ReduceOp::Sum).wait()?;
        let is_finite = all[0].is_finite() && all[3] == 0.0;
        Ok(Agreed {
            loss: all[0],
            bytes: all[1] as u64,
            counted: sent,
            stop: all[2] > 0.0,
            is_finite,
            owed: all[4],
            leaving: all[5] as usize,
            asking: all[6] as usize,
        })
    }

    /// Moves the weights.
    pub(crate) fn update(&mut self, norm: f64) -> Result<(), TrainError> {
        let scale = (self.settings.clip / (norm + 1e-6)).min(1.0);
        let rate = self.settings.rate(self.step);
        self.adam.begin();
        for (name, mean) in self.exchange.gradients() {
            if !owns(&self.owners, &self.mesh, name) {
                continue;
            }
            let chunk = &mut self.pipeline.chunks_mut()[self.params[name].chunk];
            let density = self.exchange.density(name);
            match (mean, &self.memory) {
                #[cfg(feature = "cuda")]
                (Mean::Card(data), Memory::Card(training)) => {
                    let weights = chunk.weights_on_card(name)?;
                    let gradient = Gradient { data, scale, rate, density };
                    self.adam.update_on_card(training, name, weights, gradient)?;
                }
                (mean, _) => {
                    let mut weights = chunk.weights(name)?;
                    let gradient = Gradient { data: &mean.to_host()?[..], scale, rate, density };
                    self.adam.update(name, &mut weights, gradient);
                    chunk.set_weights(name, &weights)?;
                }
            }
        }
        self.share_updates()
    }

    /// Finds out, together with all ranks, why this step is skipped; an error if the run is to
    /// stop.
    fn skip(&mut self, flow: &Flow) -> Result<NotFinite, TrainError> {
        let loss = flow.losses.iter().find(|loss| !loss.is_finite()).map(|loss| Cause::Loss(*loss));
        let found = NotFinite::find(&self.everyone, self.exchange.cause().or(loss.as_ref()))?;
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

    /// Computes and exchanges the gradients of the next step, without the update. They are then in
    /// [`gathered_gradients`](Self::gathered_gradients), finite or not.
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
        let Settings { micro_batches, batch, dp, .. } = self.settings;
        let sequences = batch / dp / micro_batches;
        let first = self.mesh.coordinate("dp") * micro_batches * sequences;
        let part = |micro: usize| -> Range<usize> {
            let start = first + micro * sequences;
            start..start + sequences
        };
        let batches: Vec<_> =
            (0..micro_batches).map(|micro| self.batches.after(self.seen, part(micro))).collect();
        let exchange = &mut self.exchange;
        exchange.reducer_mut().at_step(self.step as u64);
        exchange.begin(micro_batches);
        if self.audited {
            exchange.keep_ledger();
        }
        let flow = self.pipeline.run(&batches, &mut |name, gradient| {
            Ok(exchange.add(name, gradient).map_err(TrainError::from)?)
        });
        // If a rank was lost inside a layer, the library's error gives way to that of the group.
        let flow = flow.map_err(|error| match error {
            TrainError::Library(_) => self.tensor.take_failure().map_or(error, Into::into),
            error => error,
        })?;
        let summary = exchange.wait()?;
        let since = |at: Instant| at.saturating_duration_since(exchange.begun());
        let chunks = self.pipeline.chunks_mut().iter_mut();
        self.trace = chunks
            .flat_map(|chunk| chunk.take_trace())
            .map(|(name, start, end)| Span {
                name: format!("backward {name}"),
                start: since(start),
                end: since(end),
            })
            .collect();
        self.trace.extend(
            summary
                .buckets
                .iter()
                .map(|span| Span { name: format!("bucket {}", span.name), ..*span }),
        );
        Ok((flow, summary))
    }

    /// Gives every replica the parameters that others have updated.
    fn share_updates(&mut self) -> Result<(), TrainError> {
        if self.owners.is_empty() {
            return Ok(());
        }
        let replicas = self.mesh.of("dp");
        let mut counts = vec![0; replicas.size()];
        let mut mine = Vec::new();
        for (name, owner) in &self.owners {
            counts[*owner] += self.params[name].param.elements();
            if *owner == replicas.rank() {
                mine.extend(self.weights(name)?);
            }
        }
        let all = replicas.all_gather_varied(mine, &counts).wait()?;
        let mut rest = &all[..];
        for replica in 0..replicas.size() {
            for (name, _) in self.owners.iter().filter(|(_, owner)| **owner == replica) {
                let Place { param, chunk } = &self.params[name];
                let (data, after) = rest.split_at(param.elements());
                rest = after;
                if replica != replicas.rank() {
                    self.pipeline.chunks_mut()[*chunk].set_weights(name, data)?;
                }
            }
        }
        Ok(())
    }

    /// This rank's share of a moment, by parameter. The first replica gets it for all parameters,
    /// wherever it is kept.
    fn moment(
        &self,
        pick: fn(&Moments) -> &Vec<f32>,
    ) -> Result<BTreeMap<String, Vec<f32>>, TrainError> {
        let replicas = self.mesh.of("dp");
        let mut found = BTreeMap::new();
        for (name, Place { param, .. }) in &self.params {
            let mine = || {
                let zeros = || vec![0.0; param.elements()];
                let moments = self.adam.moments(name)?;
                Ok::<_, TrainError>(moments.map_or_else(zeros, |moments| pick(&moments).clone()))
            };
            let data = match (self.owners.get(name), replicas.rank()) {
                (None | Some(0), _) => mine()?,
                (Some(owner), 0) => replicas.recv(param.elements(), *owner, 0).wait()?,
                (Some(owner), rank) if *owner == rank => {
                    replicas.send(mine()?, 0, 0).wait()?;
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
        for (name, mean) in self.exchange.gradients() {
            let axes = if self.params[name].param.cut.is_some() { cut } else { whole };
            squares.add(axes, mean.squares());
        }
        Ok(global_norm(&self.mesh, squares)?)
    }

    /// What all ranks together send in a dense exchange: 2·(dp − 1) times the gradients of a
    /// replica, and half of that again for updates of a sharded optimizer.
    fn dense_bytes(&self) -> u64 {
        let elements: usize = self.exchange.buckets().iter().map(Bucket::len).sum();
        let copies = 2 * (self.settings.dp - 1) * self.settings.tp * self.settings.pp;
        let updates = if self.owners.is_empty() { 0 } else { copies / 2 };
        (elements * size_of::<f32>() * (copies + updates)) as u64
    }

    /// Whether all replicas of this rank's parameters have the same bits: shares over dp, and
    /// parameters that are not cut also over tp.
    pub fn replicas_agree(&self) -> Result<bool, TrainError> {
        let gather = |whole_only: bool| -> Result<Vec<f32>, TrainError> {
            let params = self.params().filter(|param| !whole_only || param.cut.is_none());
            Ok(params
                .map(|param| self.weights(&param.name))
                .collect::<Result<Vec<_>, _>>()?
                .concat())
        };
        let over_dp = self.mesh.of("dp").is_in_sync(&gather(false)?)?;
        let over_tp = self.mesh.of("tp").is_in_sync(&gather(true)?)?;
        Ok(over_dp && over_tp)
    }

    /// The whole model's weights by name, on rank 0 of the world; `None` elsewhere. All ranks must
    /// call this.
    pub fn gathered_weights(&self) -> Result<Option<Arrays>, TrainError> {
        self.gather(|param| self.weights(&param.name))
    }

    /// The shapes of the whole model's parameters, on rank 0 of the world; `None` elsewhere. All
    /// ranks must call this.
    pub(crate) fn gathered_shapes(&self) -> Result<Option<carry::Shapes>, TrainError> {
        let whole = |param: &Param| {
            let mut shape = param.shape.clone();
            if let Some(cut) = param.cut {
                shape[cut.dim] *= self.tensor.size();
            }
            (param.name.clone(), shape)
        };
        carry::gather_shapes(self.mesh.world(), self.params().map(whole).collect())
    }

    /// The whole model's gradients of the last step by name, as
    /// [`gathered_weights`](Self::gathered_weights) gives weights.
    pub fn gathered_gradients(&self) -> Result<Option<Arrays>, TrainError> {
        let gradients: BTreeMap<&str, Mean<'_>> = self.exchange.gradients().collect();
        self.gather(|param| Ok(gradients[&param.name[..]].to_host()?.into_owned()))
    }

    /// The optimizer's moments, as `first.NAME` and `second.NAME`.
    pub(crate) fn gathered_moments(&self) -> Result<Option<Arrays>, TrainError> {
        let of = |pick| {
            let moment = self.moment(pick)?;
            self.gather(|param| Ok(moment[&param.name].clone()))
        };
        let (first, second) = (of(|moments| &moments.first)?, of(|moments| &moments.second)?);
        let (Some(first), Some(second)) = (first, second) else { return Ok(None) };
        let named =
            |prefix: &'static str| move |(name, tensor)| (format!("{prefix}.{name}"), tensor);
        Ok(Some(
            first
                .into_iter()
                .map(named(FIRST))
                .chain(second.into_iter().map(named(SECOND)))
                .collect(),
        ))
    }

    /// What error feedback still owes on every rank, as one file per rank, on rank 0 of the world;
    /// `None` elsewhere. All ranks must call this.
    pub(crate) fn gathered_residuals(&self) -> Result<Option<Vec<Vec<u8>>>, TrainError> {
        let mine =
            self.exchange.reducer().feedback().map(ErrorFeedback::to_bytes).unwrap_or_default();
        carry::gather(self.mesh.world(), mine)
    }

    /// Continues with the codecs of the saved run, if they are for this layout, and phases them in
    /// as that run would have.
    pub(crate) fn restore_codec(
        &mut self,
        saved: &Settings,
        codec: Option<CodecPolicy>,
    ) -> Result<(), TrainError> {
        self.settings.dense_steps = saved.dense_steps;
        self.settings.falling_steps = saved.falling_steps;
        self.codec = codec.unwrap_or_else(|| self.codec.clone());
        self.exchange =
            exchange(&self.settings, &self.mesh, &self.plan, &self.codec, &self.memory)?;
        Ok(())
    }

    /// Continues with saved residuals: each rank gets its own of the files that rank 0 of the world
    /// has.
    pub(crate) fn restore_residuals(
        &mut self,
        files: Option<Vec<Vec<u8>>>,
    ) -> Result<(), TrainError> {
        let mine = carry::scatter(self.mesh.world(), files)?;
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
    ) -> Result<Option<Arrays>, TrainError> {
        if self.mesh.coordinate("dp") > 0 {
            return Ok(None);
        }
        let mut wholes = Arrays::new();
        for param in self.params() {
            wholes.extend(self.join(param, of(param)?)?.map(|whole| (param.name.clone(), whole)));
        }
        if self.mesh.coordinate("tp") > 0 {
            return Ok(None);
        }
        let stages = self.mesh.of("pp");
        if stages.rank() > 0 {
            carry::send(stages, 0, wholes)?;
            return Ok(None);
        }
        for stage in 1..stages.size() {
            wholes.extend(carry::receive(stages, stage)?);
        }
        Ok(Some(wholes))
    }

    /// A whole parameter, joined from the shares of the ranks of tp: on the first of them, `None`
    /// on the others.
    fn join(&self, param: &Param, share: Vec<f32>) -> Result<Option<Array>, TrainError> {
        Ok(match (param.cut, self.tensor.communicator()) {
            (Some(cut), Some(comm)) => comm.gather(share, 0).wait()?.map(|all| {
                let shares: Vec<&[f32]> = all.chunks(param.elements().max(1)).collect();
                cut.join(&param.shape, &shares)
            }),
            _ => {
                (self.tensor.rank() == 0).then(|| Array { shape: param.shape.clone(), data: share })
            }
        })
    }

    /// Sets this rank's shares from whole tensors that rank 0 of the world has: weights by name,
    /// moments as `first.NAME` and `second.NAME`.
    pub(crate) fn restore(
        &mut self,
        step: usize,
        skipped: usize,
        arrays: Option<Arrays>,
    ) -> Result<(), TrainError> {
        let mut moments: BTreeMap<String, Moments> = BTreeMap::new();
        let (rank, ranks) = (self.tensor.rank(), self.tensor.size());
        let mut set_weights = 0;
        carry::broadcast(self.mesh.world(), arrays, |name, whole| {
            let (kind, bare) = match name.split_once('.') {
                Some((kind @ (FIRST | SECOND), bare)) => (Some(kind), bare),
                _ => (None, name),
            };
            let Some(Place { param, chunk }) = self.params.get(bare) else { return Ok(()) };
            let share = match param.cut {
                Some(cut) => cut.share(&whole, rank, ranks).map_err(TrainError::Settings)?,
                None => whole,
            };
            if share.shape != param.shape {
                let (found, needed) = (share.shape, &param.shape);
                return Err(TrainError::Settings(format!(
                    "`{name}` is {found:?}, but the model needs {needed:?}"
                )));
            }
            match kind {
                None => {
                    self.pipeline.chunks_mut()[*chunk].set_weights(name, &share.data)?;
                    set_weights += 1;
                }
                Some(_) if !owns(&self.owners, &self.mesh, bare) => {}
                Some(kind) => {
                    let moments = moments.entry(bare.to_owned()).or_default();
                    let moment =
                        if kind == FIRST { &mut moments.first } else { &mut moments.second };
                    *moment = share.data;
                }
            }
            Ok(())
        })?;
        if set_weights != self.params.len() {
            let missing = self.params.len() - set_weights;
            return Err(TrainError::Settings(format!(
                "the weights lack {missing} of this model's parameters"
            )));
        }
        self.adam.restore(step.saturating_sub(skipped) as u32, moments);
        (self.step, self.skipped, self.skipped_in_a_row) = (step, skipped, 0);
        self.seen = (step * self.asked_batch) as u64;
        Ok(())
    }
}

/// What all ranks know about a step before it counts.
struct Agreed {
    loss: f64,
    /// Bytes that all ranks sent.
    bytes: u64,
    /// All bytes that this rank had sent by the time they were counted.
    counted: u64,
    stop: bool,
    is_finite: bool,
    /// What will be owed on all ranks if the step counts: the sum of squares.
    owed: f64,
    /// How many ranks want to leave.
    leaving: usize,
    /// How many ranks ask for what the others have seen.
    asking: usize,
}

/// An exchange over dp.
pub(crate) fn exchange(
    settings: &Settings,
    mesh: &Mesh,
    plan: &ParameterList,
    codec: &CodecPolicy,
    memory: &Memory,
) -> Result<Exchange<Compressed>, TrainError> {
    let replicas = mesh.of("dp");
    let mut reducer = Compressed::new(replicas, codec.clone()).on(memory);
    reducer.set_phase_in(PhaseIn {
        dense: settings.dense_steps as u64,
        falling: settings.falling_steps as u64,
    });
    let exchange = Exchange::new(reducer, plan, settings.bucket_bytes, &groups(plan, codec));
    Ok(exchange.on(memory)?)
}

/// Whether this replica updates a parameter.
fn owns(owners: &BTreeMap<String, usize>, mesh: &Mesh, name: &str) -> bool {
    owners.get(name).is_none_or(|owner| *owner == mesh.coordinate("dp"))
}

/// Gives each parameter to the replica with the fewest elements so far: about equal shares, the
/// same on all ranks.
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
