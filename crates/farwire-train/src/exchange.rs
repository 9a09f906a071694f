//! From gradients to their mean over all replicas, while backward still runs.
//!
//! Small messages waste a network, so gradients travel in *buckets*. Buckets are laid out in the
//! order in which backward computes gradients: the first bucket is full, and on its way, while
//! backward works on earlier layers.
//!
//! ```text
//!  backward  ██ head ██ block 3 ██ block 2 ██ block 1 ██ block 0 ██ embedding
//!  bucket 0               ░░░░░░░░░░
//!  bucket 1                                  ░░░░░░░░░░
//!  bucket 2                                                            ░░░░░░░░░░   only this one is waited for
//! ```
//!
//! Buckets start in the same order on every rank, whatever order gradients come in.
//!
//! A step counts as a whole or not at all: if one bucket fails, or holds a NaN, the residuals of
//! all others are restored to what they were before the step, and the next step can begin.

use std::collections::HashMap;
use std::future::Future;
use std::ops::Range;
use std::pin::Pin;
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll, Wake, Waker};
use std::time::{Duration, Instant};

use farwire::{CodingError, Communicator, Error, ErrorFeedback, Pending, ReduceOp, Savepoint};

use crate::finite::{BadElement, Cause, NotFinite};
use crate::library::{LibraryError, LibraryResult};
use crate::memory::{BucketData, Mean, Memory, Values};
use crate::parameter_list::ParameterList;
use crate::rules::Rules;

/// How a bucket becomes its mean over all replicas: the one place where compression comes in.
pub trait Reducer {
    /// The ranks between which buckets are reduced.
    fn group(&self) -> &Communicator;

    /// Starts the reduction of a bucket. All ranks start the same buckets in the same order.
    fn start(&mut self, bucket: &Bucket, data: Vec<f32>) -> Pending<Vec<f32>>;

    /// Starts the reduction of a bucket on a card, in place.
    #[cfg(feature = "cuda")]
    fn start_on_card(
        &mut self,
        _bucket: &Bucket,
        _data: farwire_cuda::DeviceTensor,
    ) -> Pending<()> {
        let error = std::io::Error::other("this reducer works in host memory");
        Pending::failed(Error::System { what: "could not reduce a bucket on a card", error })
    }

    /// Announces that the next buckets are those of this step. All ranks give the same step.
    fn at_step(&mut self, _step: u64) {}

    /// The share of a bucket's elements that this step sends; the others are zero in its result.
    fn density(&self, _bucket: &Bucket) -> f64 {
        1.0
    }

    /// The residuals that are still owed to later steps, to be saved with the model.
    fn feedback(&self) -> Option<&ErrorFeedback> {
        None
    }

    /// Continues with residuals that were saved.
    fn restore(&mut self, _feedback: ErrorFeedback) {}
}

impl<R: Reducer + ?Sized> Reducer for Box<R> {
    fn group(&self) -> &Communicator {
        (**self).group()
    }

    fn start(&mut self, bucket: &Bucket, data: Vec<f32>) -> Pending<Vec<f32>> {
        (**self).start(bucket, data)
    }

    #[cfg(feature = "cuda")]
    fn start_on_card(&mut self, bucket: &Bucket, data: farwire_cuda::DeviceTensor) -> Pending<()> {
        (**self).start_on_card(bucket, data)
    }

    fn at_step(&mut self, step: u64) {
        (**self).at_step(step);
    }

    fn density(&self, bucket: &Bucket) -> f64 {
        (**self).density(bucket)
    }

    fn feedback(&self) -> Option<&ErrorFeedback> {
        (**self).feedback()
    }

    fn restore(&mut self, feedback: ErrorFeedback) {
        (**self).restore(feedback);
    }
}

/// The group of parameters that are sent uncompressed, many to a bucket. In any other group each
/// parameter has a bucket of its own, and so a residual of its own, however buckets are cut.
pub const DENSE: &str = "none";

/// Exchanges every element uncompressed.
#[derive(Clone, Debug)]
pub struct Dense(pub Communicator);

impl Reducer for Dense {
    fn group(&self) -> &Communicator {
        &self.0
    }

    fn start(&mut self, _: &Bucket, data: Vec<f32>) -> Pending<Vec<f32>> {
        self.0.all_reduce(data, ReduceOp::Mean)
    }
}

/// Gradients that travel together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Bucket {
    /// Its name: that of its last parameter, which completes it.
    pub name: String,
    /// The group of its parameters, by the rules; parameters of different groups do not share a
    /// bucket.
    pub group: String,
    /// The parameters in it, and where each lies.
    pub parts: Vec<Part>,
}

/// A parameter's place in a bucket.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Part {
    /// The parameter.
    pub name: String,
    /// Its elements.
    pub range: Range<usize>,
    /// Its dimensions.
    pub shape: Vec<usize>,
}

impl Bucket {
    /// Elements of all parameters.
    pub fn len(&self) -> usize {
        self.parts.last().map_or(0, |part| part.range.end)
    }

    /// Whether it has no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// Collects gradients and exchanges them.
///
/// One step: [`begin`](Self::begin), [`add`](Self::add) every gradient, [`finish`](Self::finish),
/// read [`gradients`](Self::gradients).
///
/// If more ranks than the replicas have to agree whether a step counts, call [`wait`](Self::wait)
/// instead of `finish`, then [`commit`](Self::commit) or [`roll_back`](Self::roll_back).
#[derive(Debug)]
pub struct Exchange<R> {
    reducer: R,
    buckets: Vec<Bucket>,
    places: HashMap<String, Slot>,
    data: BucketData,
    /// Gradients that each bucket still waits for.
    missing: Vec<usize>,
    /// How many gradients each parameter gets in this step.
    rounds: usize,
    running: Vec<Running>,
    /// The residuals before the step, kept until the step counts.
    before: Option<Savepoint>,
    /// Whether every mean of this step is finite.
    is_finite: bool,
    /// The first thing that this rank has found to be not finite.
    cause: Option<Cause>,
    /// Time spent starting reductions in this step.
    handing_over: Duration,
    begun: Instant,
    /// What went into this step, if a ledger was asked for.
    ledger: Option<Ledger>,
}

/// Shows whether a step has lost or made up anything: over all replicas, inputs and outputs are the
/// same but for rounding.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Ledger {
    /// The sum of this rank's gradients and of what it owed before.
    pub inputs: f64,
    /// The sum of the means, and of what this rank owes now.
    pub outputs: f64,
    /// The sum of the magnitudes that went in, against which rounding is judged.
    pub magnitude: f64,
}

#[derive(Debug)]
struct Slot {
    bucket: usize,
    part: usize,
    come: usize,
}

/// Why gradients were not exchanged.
#[derive(Debug, thiserror::Error)]
pub enum ExchangeError {
    /// A parameter that is not in the plan.
    #[error(
        "parameter `{0}` is not in the plan; the plan has to name every parameter that is trained"
    )]
    Unknown(String),
    /// A gradient of the wrong size.
    #[error("the gradient of `{name}` has {len} elements, but the plan says {expected}")]
    Length {
        /// The parameter.
        name: String,
        /// Elements of the gradient.
        len: usize,
        /// Elements in the plan.
        expected: usize,
    },
    /// A gradient too many.
    #[error(
        "parameter `{name}` had {rounds} gradients in this step already; begin the next step, or announce more"
    )]
    TooMany {
        /// The parameter.
        name: String,
        /// Gradients announced.
        rounds: usize,
    },
    /// A gradient too few.
    #[error(
        "parameter `{0}` got no gradient in this step; check that the loss depends on it and that every operation between has a backward"
    )]
    Missing(String),
    /// A NaN or an infinity. All replicas get the same error, and can go on with the next step.
    #[error("{0}; nothing has changed: skip this step on all ranks, or stop")]
    NotFinite(NotFinite),
    /// A NaN or an infinity, but the ranks could not find out whose.
    #[error("a gradient is not finite, and ranks could not find out whose: {error}")]
    NotFound {
        /// Why not.
        error: Error,
    },
    /// A gradient could not be added up on a card.
    #[error("could not add up the gradients of `{name}`: {error}")]
    Card {
        /// The parameter.
        name: String,
        /// Why.
        error: LibraryError,
    },
    /// A card failed while the means were checked.
    #[error("could not look at the gradients of this step: {0}")]
    Look(LibraryError),
    /// The reduction failed.
    #[error("bucket `{bucket}`: {error}")]
    Reduce {
        /// Which bucket.
        bucket: String,
        /// Why.
        error: Error,
    },
}

/// When something was under way, in time since the step began.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Span {
    /// What was under way.
    pub name: String,
    /// Its beginning.
    pub start: Duration,
    /// Its end.
    pub end: Duration,
}

/// When the buckets of a step were under way.
#[derive(Clone, Debug, Default)]
pub struct Summary {
    /// Each bucket, from its start to the arrival of its mean, waits for slower ranks included.
    pub buckets: Vec<Span>,
    /// How long the caller was held up while it handed buckets over.
    pub handing_over: Duration,
    /// How long the caller waited at the end, until the last mean had arrived.
    pub waiting: Duration,
}

impl Summary {
    /// How long at least one bucket was under way.
    pub fn busy(&self) -> Duration {
        let mut spans: Vec<(Duration, Duration)> =
            self.buckets.iter().map(|span| (span.start, span.end)).collect();
        spans.sort_unstable();
        let mut reached = Duration::ZERO;
        spans.into_iter().fold(Duration::ZERO, |total, (start, end)| {
            let new = end.saturating_sub(start.max(reached));
            reached = reached.max(end);
            total + new
        })
    }

    /// How long the caller was held up in total.
    pub fn exposed(&self) -> Duration {
        self.handing_over + self.waiting
    }

    /// The share of the [`busy`](Self::busy) time that the caller spent on something else; 1 if
    /// nothing was under way.
    pub fn hidden(&self) -> f64 {
        let busy = self.busy().as_secs_f64();
        if busy > 0.0 { (1.0 - self.exposed().as_secs_f64() / busy).clamp(0.0, 1.0) } else { 1.0 }
    }
}

impl<R: Reducer> Exchange<R> {
    /// An exchange of the plan's parameters, which must be in backward order, in buckets of about
    /// `bucket_bytes`. Parameters of different `groups` do not share a bucket, and only those of
    /// the group [`DENSE`] share one at all.
    pub fn new(
        reducer: R,
        plan: &ParameterList,
        bucket_bytes: usize,
        groups: &Rules<String>,
    ) -> Self {
        let buckets = lay_out(plan, bucket_bytes / size_of::<f32>(), groups);
        let mut places = HashMap::new();
        for (bucket, Bucket { parts, .. }) in buckets.iter().enumerate() {
            for (part, Part { name, .. }) in parts.iter().enumerate() {
                places.insert(name.clone(), Slot { bucket, part, come: 0 });
            }
        }
        let data = BucketData::new(&buckets);
        let missing = vec![0; buckets.len()];
        let begun = Instant::now();
        Self {
            reducer,
            buckets,
            places,
            data,
            missing,
            rounds: 0,
            running: Vec::new(),
            before: None,
            is_finite: true,
            cause: None,
            handing_over: Duration::ZERO,
            begun,
            ledger: None,
        }
    }

    /// The same, with its buckets in `memory`.
    pub fn on(self, memory: &Memory) -> LibraryResult<Self> {
        Ok(Self { data: BucketData::on(memory, &self.buckets)?, ..self })
    }

    /// The reducer, which exchanges buckets.
    pub fn reducer(&self) -> &R {
        &self.reducer
    }

    /// The reducer, to change it.
    pub fn reducer_mut(&mut self) -> &mut R {
        &mut self.reducer
    }

    /// The buckets, in the order in which they start.
    pub fn buckets(&self) -> &[Bucket] {
        &self.buckets
    }

    /// Begins a step in which each parameter gets `rounds` gradients, one per micro-batch, which
    /// are added up. An earlier step that was not finished is rolled back.
    pub fn begin(&mut self, rounds: usize) {
        self.roll_back();
        self.before = self.reducer.feedback().map(ErrorFeedback::savepoint);
        (self.is_finite, self.cause) = (true, None);
        self.ledger = None;
        self.rounds = rounds;
        self.handing_over = Duration::ZERO;
        self.places.values_mut().for_each(|place| place.come = 0);
        self.data.begin(&self.buckets);
        for (bucket, missing) in self.buckets.iter().zip(&mut self.missing) {
            *missing = rounds * bucket.parts.len();
        }
        self.begun = Instant::now();
    }

    /// Keeps a [`Ledger`] of the step that has just begun. (In host memory only.)
    pub fn keep_ledger(&mut self) {
        let owed = |value: fn(f64) -> f64| {
            self.reducer.feedback().map_or(0.0, |feedback| feedback.sum_of(value))
        };
        let (inputs, magnitude) = (owed(|owed| owed), owed(f64::abs));
        self.ledger = Some(Ledger { inputs, outputs: 0.0, magnitude });
    }

    /// The ledger of the last step, if it kept one and counts.
    pub fn ledger(&self) -> Option<Ledger> {
        let ledger = self.ledger?;
        let owed = self.reducer.feedback().map_or(0.0, |feedback| feedback.sum_of(|owed| owed));
        let means = self.gradients().filter_map(|(_, mean)| mean.host());
        let means: f64 = means.flatten().map(|mean| f64::from(*mean)).sum();
        Some(Ledger { outputs: owed + means, ..ledger })
    }

    /// Adds a gradient. The last one of a bucket sends it off.
    pub fn add<'a>(
        &mut self,
        name: &str,
        gradient: impl Into<Values<'a>>,
    ) -> Result<(), ExchangeError> {
        let gradient = gradient.into();
        let place =
            self.places.get_mut(name).ok_or_else(|| ExchangeError::Unknown(name.to_owned()))?;
        let part = &self.buckets[place.bucket].parts[place.part];
        if gradient.len() != part.range.len() {
            let (len, expected) = (gradient.len(), part.range.len());
            return Err(ExchangeError::Length { name: name.to_owned(), len, expected });
        }
        if place.come == self.rounds {
            return Err(ExchangeError::TooMany { name: name.to_owned(), rounds: self.rounds });
        }
        let fresh = place.come == 0;
        place.come += 1;
        let bad = self.data.add(place.bucket, (place.part, part), fresh, gradient)?;
        self.cause = self.cause.take().or(bad);
        self.missing[place.bucket] -= 1;
        self.send_full_ones();
        Ok(())
    }

    /// Waits until every bucket is the mean over all replicas.
    ///
    /// The step counts only if this succeeds. If it fails, the residuals of every bucket are as
    /// they were before the step. A NaN or an infinity is an error, the same one on all replicas,
    /// and the next step can begin.
    pub fn finish(&mut self) -> Result<Summary, ExchangeError> {
        let summary = self.wait()?;
        if self.is_finite {
            self.commit();
            return Ok(summary);
        }
        self.roll_back();
        match NotFinite::find(self.reducer.group(), self.cause.as_ref()) {
            Ok(found) => Err(ExchangeError::NotFinite(found)),
            Err(error) => Err(ExchangeError::NotFound { error }),
        }
    }

    /// Waits for every bucket, without deciding whether the step counts: that is for
    /// [`commit`](Self::commit) and [`roll_back`](Self::roll_back). The gradients need not be
    /// finite; see [`is_finite`](Self::is_finite).
    pub fn wait(&mut self) -> Result<Summary, ExchangeError> {
        if let Some(late) = self.missing.iter().position(|missing| *missing > 0) {
            let parts = self.buckets[late].parts.iter();
            let name =
                parts.map(|part| &part.name).find(|name| self.places[*name].come < self.rounds);
            let error = ExchangeError::Missing(name.cloned().unwrap_or_default());
            self.roll_back();
            return Err(error);
        }
        let waited = Instant::now();
        let mut summary = Summary::default();
        let (mut failed, mut refused) = (None, None);
        // Wait for every bucket, even after an error: all must have ended before the next step
        // begins.
        for (index, running) in std::mem::take(&mut self.running).into_iter().enumerate() {
            let bucket = &self.buckets[index];
            let (started, result, ended) = running.wait();
            match result {
                Ok(mean) => self.data.put(index, mean),
                Err(error) => {
                    match self.not_finite(&error) {
                        Some(cause) => refused = refused.or(Some(cause)),
                        None => failed = failed.or(Some((index, error))),
                    }
                    self.data.refuse(index, bucket);
                }
            }
            let (start, end) = (started - self.begun, ended.saturating_duration_since(self.begun));
            summary.buckets.push(Span { name: bucket.name.clone(), start, end });
        }
        if let Some((index, error)) = failed {
            self.roll_back();
            return Err(ExchangeError::Reduce { bucket: self.buckets[index].name.clone(), error });
        }
        let looked = self.data.look(&self.buckets);
        let (is_finite, found) = looked.map_err(|error| {
            self.roll_back();
            ExchangeError::Look(error)
        })?;
        self.is_finite = is_finite;
        // What this rank has found in its own gradients comes first.
        let own = self.cause.take();
        self.cause = match (own, found) {
            (None, Some(Cause::Mean(mean))) => refused.or(Some(Cause::Mean(mean))),
            (own, found) => own.or(found).or(refused),
        };
        (summary.handing_over, summary.waiting) = (self.handing_over, waited.elapsed());
        Ok(summary)
    }

    /// Whether all gradients of the step that was waited for are finite: the same on all replicas.
    pub fn is_finite(&self) -> bool {
        self.is_finite
    }

    /// What this rank knows to be not finite in this step: see [`NotFinite::find`].
    pub fn cause(&self) -> Option<&Cause> {
        self.cause.as_ref()
    }

    /// The step counts: what codecs left out of it is owed from now on.
    pub fn commit(&mut self) {
        self.before.take().into_iter().for_each(Savepoint::release);
    }

    /// The step does not count: what was owed before it is owed again. Waits for reductions under
    /// way.
    pub fn roll_back(&mut self) {
        // A reduction that ended later would still change what is owed.
        std::mem::take(&mut self.running).into_iter().for_each(|running| drop(running.wait()));
        drop(self.before.take());
        self.ledger = None;
    }

    /// The element that a codec refused because it is not finite; `None` if the codec failed for
    /// another reason.
    fn not_finite(&self, error: &Error) -> Option<Cause> {
        let Error::NotEncodable { error: source, .. } = error else { return None };
        let element = |parameter: &str, index: u64| BadElement {
            parameter: parameter.to_owned(),
            index,
            value: f32::INFINITY,
        };
        match source {
            // This rank's gradient was found to be finite, but with its residual it is not.
            CodingError::NotFinite { rank, tensor, element: index }
                if *rank == self.reducer.group().rank() =>
            {
                Some(Cause::Gradient(element(tensor, *index)))
            }
            CodingError::NotFinite { tensor, element: index, .. }
            | CodingError::Overflow { tensor, element: index, .. } => {
                Some(Cause::Mean(element(tensor, *index)))
            }
            _ => None,
        }
    }

    /// The mean gradients of the step that has finished.
    pub fn gradients(&self) -> impl Iterator<Item = (&str, Mean<'_>)> {
        self.data.means(&self.buckets)
    }

    /// The share of a parameter's elements that this step sent; 1 for a parameter that is not in
    /// the plan.
    pub fn density(&self, name: &str) -> f64 {
        self.places.get(name).map_or(1.0, |place| self.reducer.density(&self.buckets[place.bucket]))
    }

    /// When the step began.
    pub fn begun(&self) -> Instant {
        self.begun
    }

    fn send_full_ones(&mut self) {
        while let Some(0) = self.missing.get(self.running.len()) {
            let next = self.running.len();
            let started = Instant::now();
            if let Some(ledger) = &mut self.ledger {
                for gradient in self.data.sums(next) {
                    ledger.inputs += f64::from(*gradient);
                    ledger.magnitude += f64::from(*gradient).abs();
                }
            }
            let pending = self.data.start(&mut self.reducer, &self.buckets, next);
            self.running.push(Running::new(started, pending));
            self.handing_over += started.elapsed();
        }
    }
}

/// Fills one open bucket per group, and closes it when it is full.
fn lay_out(plan: &ParameterList, limit: usize, groups: &Rules<String>) -> Vec<Bucket> {
    let mut open: Vec<Bucket> = Vec::new();
    let mut closed = Vec::new();
    for entry in plan.entries() {
        let group = groups.of(&entry.name);
        let at = open.iter().position(|bucket| bucket.group == *group).unwrap_or_else(|| {
            open.push(Bucket { name: String::new(), group: group.clone(), parts: Vec::new() });
            open.len() - 1
        });
        let bucket = &mut open[at];
        let (start, elements) = (bucket.len(), entry.shape.iter().product::<usize>());
        bucket.name.clone_from(&entry.name);
        let range = start..start + elements;
        bucket.parts.push(Part { name: entry.name.clone(), range, shape: entry.shape.clone() });
        if bucket.len() >= limit || bucket.group != DENSE {
            closed.push(open.swap_remove(at));
        }
    }
    // The rest in the order in which they become full, which is that of their last parameters.
    let position =
        |bucket: &Bucket| plan.entries().iter().position(|entry| entry.name == bucket.name);
    open.sort_by_key(position);
    closed.extend(open);
    closed.sort_by_key(position);
    closed
}

/// A reduction under way, which notes when it ends.
#[derive(Debug)]
struct Running {
    started: Instant,
    pending: Reducing,
    ready: Option<Result<Option<Vec<f32>>, Error>>,
    stamp: Arc<Stamp>,
}

/// The coming mean of a bucket. On a card it replaces the bucket's data by itself.
#[derive(Debug)]
pub(crate) enum Reducing {
    Host(Pending<Vec<f32>>),
    #[cfg(feature = "cuda")]
    Card(Pending<()>),
}

impl Reducing {
    fn poll(&mut self, context: &mut Context<'_>) -> Poll<Result<Option<Vec<f32>>, Error>> {
        match self {
            Self::Host(pending) => Pin::new(pending).poll(context).map(|result| result.map(Some)),
            #[cfg(feature = "cuda")]
            Self::Card(pending) => {
                Pin::new(pending).poll(context).map(|result| result.map(|()| None))
            }
        }
    }

    fn wait(self) -> Result<Option<Vec<f32>>, Error> {
        match self {
            Self::Host(pending) => pending.wait().map(Some),
            #[cfg(feature = "cuda")]
            Self::Card(pending) => pending.wait().map(|()| None),
        }
    }
}

#[derive(Debug, Default)]
struct Stamp(OnceLock<Instant>);

impl Wake for Stamp {
    fn wake(self: Arc<Self>) {
        let _ = self.0.set(Instant::now()); // only the first call counts
    }
}

impl Running {
    fn new(started: Instant, mut pending: Reducing) -> Self {
        let stamp = Arc::new(Stamp::default());
        let waker = Waker::from(stamp.clone());
        let ready = match pending.poll(&mut Context::from_waker(&waker)) {
            Poll::Ready(result) => {
                waker.wake();
                Some(result)
            }
            Poll::Pending => None,
        };
        Self { started, pending, ready, stamp }
    }

    fn wait(self) -> (Instant, Result<Option<Vec<f32>>, Error>, Instant) {
        let result = self.ready.unwrap_or_else(|| self.pending.wait());
        let ended = self.stamp.0.get().copied().unwrap_or_else(Instant::now);
        (self.started, result, ended)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::compressed::Compressed;
    use crate::parameter_list::Entry;
    use farwire::CodecSpec;
    use proptest::prelude::*;

    fn plan(sizes: &[(&str, usize)]) -> ParameterList {
        let entry = |(name, size): &(&str, usize)| Entry {
            name: (*name).to_owned(),
            shape: vec![*size],
            dtype: "f32".to_owned(),
        };
        ParameterList::new(sizes.iter().map(entry)).unwrap()
    }

    fn everywhere() -> Rules<String> {
        Rules::new(DENSE.to_owned())
    }

    #[test]
    fn buckets_are_means_over_ranks_of_sums_over_rounds() {
        std::thread::scope(|scope| {
            for comm in farwire::local(3).unwrap() {
                scope.spawn(move || {
                    let plan = plan(&[("c", 3), ("b", 5), ("a", 2)]);
                    let mut exchange = Exchange::new(Dense(comm.clone()), &plan, 16, &everywhere());
                    assert_eq!(exchange.buckets().len(), 2);
                    for step in 0..3 {
                        exchange.begin(2);
                        for round in 0..2 {
                            // Ranks add gradients in different orders; buckets still start alike.
                            let mut order = vec![("a", 2), ("b", 5), ("c", 3)];
                            order.rotate_left(comm.rank());
                            for (name, size) in order {
                                let value = (comm.rank() * 3 + round + step) as f32;
                                exchange.add(name, &vec![value; size]).unwrap();
                            }
                        }
                        let summary = exchange.finish().unwrap();
                        assert_eq!(summary.buckets.len(), 2);
                        let gradients: Vec<_> = exchange.gradients().collect();
                        // Ranks 0, 1, 2 have 0, 3, 6 per round, of which the mean is 3; rounds add
                        // 0 and 1.
                        let expected = (2 * 3 + 1 + 2 * step) as f32;
                        assert_eq!(gradients.len(), 3);
                        for ((name, gradient), entry) in gradients.into_iter().zip(plan.entries()) {
                            let gradient = gradient.host().unwrap();
                            assert_eq!((name, gradient.len()), (&entry.name[..], entry.shape[0]));
                            assert!(gradient.iter().all(|x| *x == expected), "{gradient:?}");
                        }
                    }
                });
            }
        });
    }

    #[test]
    fn wrong_gradients_are_refused_by_name() {
        let comm = farwire::local(1).unwrap().remove(0);
        let mut exchange =
            Exchange::new(Dense(comm), &plan(&[("b", 2), ("a", 1)]), 0, &everywhere());
        exchange.begin(1);
        assert!(matches!(exchange.add("x", &[1.0]), Err(ExchangeError::Unknown(_))));
        assert!(matches!(
            exchange.add("b", &[1.0]),
            Err(ExchangeError::Length { expected: 2, .. })
        ));
        exchange.add("b", &[1.0, 2.0]).unwrap();
        assert!(matches!(exchange.add("b", &[1.0, 2.0]), Err(ExchangeError::TooMany { .. })));
        match exchange.finish() {
            Err(ExchangeError::Missing(name)) => assert_eq!(name, "a"),
            other => panic!("{other:?}"),
        }
    }

    const LENGTH: usize = 1500;
    const NAMES: [&str; 5] = ["a", "b", "c", "d", "e"];

    /// Five parameters, each in its own bucket, through a codec.
    fn five(comm: &Communicator, codec: &str) -> Exchange<Compressed> {
        let codec: CodecSpec = codec.parse().unwrap();
        let group = Rules::new(codec.to_string());
        let reducer = Compressed::new(comm, codec.into());
        Exchange::new(reducer, &plan(&NAMES.map(|name| (name, LENGTH))), 0, &group)
    }

    fn step(
        exchange: &mut Exchange<Compressed>,
        gradient: impl Fn(&str, usize) -> f32,
    ) -> Result<Vec<Vec<f64>>, ExchangeError> {
        exchange.begin(1);
        for name in NAMES {
            let gradient: Vec<f32> = (0..LENGTH).map(|index| gradient(name, index)).collect();
            exchange.add(name, &gradient)?;
        }
        exchange.finish()?;
        let wide = |mean: &[f32]| mean.iter().map(|x| f64::from(*x)).collect();
        Ok(exchange.gradients().map(|(_, mean)| wide(mean.host().unwrap())).collect())
    }

    fn owed(exchange: &Exchange<Compressed>) -> Vec<u8> {
        exchange.reducer().feedback().unwrap().to_bytes()
    }

    /// And if residuals are lost, the ledger shows that.
    #[test]
    fn what_goes_into_a_step_comes_out_or_is_owed() {
        for codec in ["none", "int8", "topk:0.1", "randk:0.1", "sign", "powersgd:2"] {
            std::thread::scope(|scope| {
                for comm in farwire::local(3).unwrap() {
                    scope.spawn(move || {
                        let mut exchange = five(&comm, codec);
                        let difference = |exchange: &Exchange<Compressed>| {
                            let Ledger { inputs, outputs, magnitude } = exchange.ledger().unwrap();
                            let all = vec![inputs, outputs, magnitude];
                            let all = comm.all_reduce(all, ReduceOp::Sum).wait().unwrap();
                            (all[0] - all[1]).abs() / all[2]
                        };
                        for step in 0..4 {
                            exchange.begin(1);
                            exchange.keep_ledger();
                            for (number, name) in NAMES.into_iter().enumerate() {
                                let seed = 31 * number + 7 * step + comm.rank();
                                let value = |index: usize| ((index * 7919 + seed) % 1000) as f32;
                                let gradient: Vec<_> = (0..LENGTH).map(value).collect();
                                exchange.add(name, &gradient).unwrap();
                            }
                            exchange.finish().unwrap();
                            let difference = difference(&exchange);
                            assert!(difference < 1e-6, "{codec}, step {step}: {difference:e}");
                        }
                        exchange.reducer_mut().restore(ErrorFeedback::new());
                        let difference = difference(&exchange);
                        assert_eq!(difference > 1e-5, codec != "none", "{codec}: {difference:e}");
                    });
                }
            });
        }
    }

    /// The bug: every other bucket had committed what it left out of a mean that no rank got.
    #[test]
    fn one_failed_bucket_loses_no_gradient_of_the_others() {
        const RANKS: usize = 3;
        std::thread::scope(|scope| {
            for comm in farwire::local(RANKS).unwrap() {
                scope.spawn(move || {
                    let mut exchange = five(&comm, "topk:0.1,values=f32");
                    let rank = comm.rank();
                    let good = |turn: usize| {
                        move |name: &str, index: usize| {
                            let seed = name.len() * 31 + name.as_bytes()[0] as usize;
                            ((index * 7919 + seed * 104_729 + turn * 31 + rank * 17) % 1000) as f32
                                / 64.0
                        }
                    };
                    let mut came = vec![vec![0.0; LENGTH]; NAMES.len()];
                    let mut take = |means: Vec<Vec<f64>>| {
                        let all = came.iter_mut().flatten().zip(means.into_iter().flatten());
                        all.for_each(|(sum, mean)| *sum += mean);
                    };
                    take(step(&mut exchange, good(0)).unwrap());
                    let before = owed(&exchange);
                    for value in [f32::NAN, f32::INFINITY] {
                        let spoiled = |name: &str, index: usize| {
                            let spoils = rank == 1 && name == "d" && index == 40;
                            if spoils { value } else { good(9)(name, index) }
                        };
                        let error = step(&mut exchange, spoiled).unwrap_err().to_string();
                        let says =
                            format!("the gradient of `d` on rank 1 is {value} at element 40");
                        assert!(error.contains(&says), "{error}");
                        assert!(owed(&exchange) == before, "rank {rank} owes something else");
                    }
                    take(step(&mut exchange, good(1)).unwrap());
                    // Until nothing is owed any more.
                    let settled = |exchange: &Exchange<Compressed>| {
                        let feedback = exchange.reducer().feedback().unwrap();
                        let owes = |name: &str| {
                            let norms = feedback.norms(name).unwrap();
                            norms.worker + norms.owner
                        };
                        let mine = NAMES.map(owes).iter().sum::<f64>();
                        comm.all_reduce(vec![mine], ReduceOp::Sum).wait().unwrap()[0] == 0.0
                    };
                    for turn in 0.. {
                        if settled(&exchange) {
                            break;
                        }
                        assert!(turn < 100, "what is owed never comes");
                        take(step(&mut exchange, |_, _| 0.0).unwrap());
                    }
                    let mine = NAMES.iter().flat_map(|name| {
                        (0..LENGTH).map(|index| good(0)(name, index) + good(1)(name, index))
                    });
                    let all =
                        comm.all_reduce(mine.collect::<Vec<f32>>(), ReduceOp::Sum).wait().unwrap();
                    for (came, given) in came.iter().flatten().zip(all) {
                        let (came, given) = (came * RANKS as f64, f64::from(given));
                        assert!(
                            (came - given).abs() <= given.abs() / f64::from(1 << 20),
                            "{came} {given}"
                        );
                    }
                });
            }
        });
    }

    /// It is found in the means, which all replicas have, even if only the sum of finite gradients
    /// overflows.
    #[test]
    fn a_mean_that_is_not_finite_is_an_error_that_names_rank_and_parameter() {
        for codec in ["none", "int8", "topk:0.1", "randk:0.1", "sign", "powersgd:2", "bf16"] {
            std::thread::scope(|scope| {
                for comm in farwire::local(2).unwrap() {
                    scope.spawn(move || {
                        let mut exchange = five(&comm, codec);
                        let before = owed(&exchange);
                        let rank = comm.rank();
                        let nan = |name: &str, index: usize| match (rank, name, index) {
                            (1, "b", 7) => f32::NAN,
                            _ => 1.0,
                        };
                        let error = step(&mut exchange, nan).unwrap_err();
                        assert!(matches!(error, ExchangeError::NotFinite(_)), "{codec}: {error}");
                        let says = "the gradient of `b` on rank 1 is NaN at element 7";
                        assert!(error.to_string().contains(says), "{codec}: {error}");
                        assert!(owed(&exchange) == before, "{codec}");
                        let large = |name: &str, _| if name == "c" { f32::MAX } else { 1.0 };
                        match step(&mut exchange, large) {
                            Err(error) => {
                                assert!(
                                    matches!(error, ExchangeError::NotFinite(_)),
                                    "{codec}: {error}"
                                );
                                assert!(error.to_string().contains("of `c`"), "{codec}: {error}");
                                assert!(owed(&exchange) == before, "{codec}");
                            }
                            // A codec may hold back what is too large.
                            Ok(means) => {
                                assert!(
                                    codec != "none"
                                        && means.iter().flatten().all(|x| x.is_finite())
                                );
                                return;
                            }
                        }
                        step(&mut exchange, |_, _| 1.0).unwrap();
                    });
                }
            });
        }
    }

    /// A reduction that was begun and given up holds on to residuals and messages until it has
    /// ended.
    #[test]
    fn a_step_that_was_given_up_half_way_leaves_nothing_behind() {
        std::thread::scope(|scope| {
            for comm in farwire::local(2).unwrap() {
                scope.spawn(move || {
                    let mut exchange = five(&comm, "topk:0.1");
                    step(&mut exchange, |_, index| index as f32).unwrap();
                    let before = owed(&exchange);
                    exchange.begin(1);
                    exchange.add("a", &[1.0; LENGTH]).unwrap();
                    exchange.add("b", &[1.0; LENGTH]).unwrap();
                    assert!(matches!(exchange.finish(), Err(ExchangeError::Missing(name)) if name == "c"));
                    assert!(owed(&exchange) == before);
                    exchange.begin(1);
                    exchange.add("a", &[1.0; LENGTH]).unwrap();
                    exchange.roll_back();
                    assert!(owed(&exchange) == before);
                    step(&mut exchange, |_, _| 1.0).unwrap();
                    assert!(owed(&exchange) != before);
                });
            }
        });
    }

    #[test]
    fn hidden_time_is_what_the_caller_did_not_wait_for() {
        let ms = Duration::from_millis;
        let span = |start, end| Span { name: String::new(), start: ms(start), end: ms(end) };
        let buckets = vec![span(10, 30), span(20, 40), span(60, 80)];
        let summary = Summary { buckets, handing_over: ms(4), waiting: ms(6) };
        assert_eq!(summary.busy(), ms(50));
        assert!((summary.hidden() - 0.8).abs() < 1e-9);
        assert_eq!(Summary::default().hidden(), 1.0);
    }

    proptest! {
        #[test]
        fn every_parameter_lies_in_one_bucket_of_its_group(
            sizes in proptest::collection::vec((0usize..40, 0usize..3), 1..30),
            limit in 0usize..100,
        ) {
            let names: Vec<String> =
                sizes.iter().enumerate().map(|(index, (_, group))| format!("p{index}.g{group}")).collect();
            let entries: Vec<(&str, usize)> =
                names.iter().zip(&sizes).map(|(name, (size, _))| (&name[..], *size)).collect();
            let groups = everywhere().on("*.g1", "one".to_owned());
            let plan = plan(&entries);
            let buckets = lay_out(&plan, limit, &groups);
            let mut seen: Vec<&str> = Vec::new();
            for bucket in &buckets {
                let mut end = 0;
                for Part { name, range, .. } in &bucket.parts {
                    prop_assert_eq!(range.start, end);
                    end = range.end;
                    prop_assert_eq!(groups.of(name), &bucket.group);
                    seen.push(name);
                }
                // Only the last parameter may take it over the limit.
                let before_last = bucket.parts.last().unwrap().range.start;
                prop_assert!(before_last < limit.max(1));
            }
            seen.sort_unstable();
            let mut all: Vec<&str> = names.iter().map(|name| &name[..]).collect();
            all.sort_unstable();
            prop_assert_eq!(seen, all);
            // In backward order, each bucket is full before the next.
            let full: Vec<usize> =
                buckets.iter().map(|bucket| names.iter().position(|name| *name == bucket.name).unwrap()).collect();
            prop_assert!(full.is_sorted());
        }
    }
}
