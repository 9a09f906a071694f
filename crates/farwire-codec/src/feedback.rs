//! Error feedback: what was not transmitted is owed, and sent with the next step.
//!
//! For each tensor, by name, a rank keeps
//! - the *worker* residual: what its own messages left out of its gradient;
//! - the *owner* residual: what it left out when it sent the sums of the shards it owns;
//! - for PowerSGD, the Q that the next step starts with.
//!
//! ```text
//!             begin("w")                        commit()
//!  state ────────────────▶ Transaction ─ set_* ───────────▶ new state
//!                                │ drop
//!                                └────────▶ the state as it was, to the bit
//! ```
//!
//! A residual stays owed whatever codec comes next, even none: see [`Transaction::own`] and
//! [`Transaction::pay`].
//!
//! Residuals need not be in host memory: a [`Piece`] may be on the GPU that made it.
//!
//! Each operation holds a [`Transaction`]. Only [`commit`](Transaction::commit) changes anything,
//! so an operation that fails, or a step that is skipped, loses no gradient. Residuals are f32:
//! smaller types would lose the smallest values.
//!
//! ```
//! use farwire_codec::*;
//!
//! let feedback = ErrorFeedback::new();
//! let codec = "topk:count=1".parse::<CodecSpec>().unwrap().messages().unwrap();
//! let place = CodedPlace::whole(Context::default(), 3);
//! let mut out = Encoded::default();
//! for step in 0..2 {
//!     let mut transaction = feedback.begin("w").unwrap();
//!     let owed = transaction.worker(0..3);
//!     out.residual = transaction.buffer(3);
//!     codec.encode(&Job::worker(&[1.0f32, 0.75, 0.25], owed.residual(), &place, &[0..3]), &mut out).unwrap();
//!     // … send out.messages, and when everything has come back:
//!     transaction.set_worker(0, std::mem::take(&mut out.residual));
//!     transaction.commit();
//! }
//! // Step 0 sent 1.0, step 1 sent 0.75 + 0.75.
//! assert_eq!(feedback.norms("w").unwrap().worker, (1.0f64 + 0.0 + 0.25).sqrt());
//! ```

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::collective::Floats;
use crate::job::Residual;

mod file;
mod pieces;
mod savepoint;

pub use pieces::{Piece, ResidualElsewhere};
use pieces::{Pieces, dot};
pub use savepoint::Savepoint;

/// The residuals of all tensors of one rank.
#[derive(Debug, Default)]
pub struct ErrorFeedback {
    tensors: Arc<Mutex<BTreeMap<String, Entry>>>,
}

#[derive(Debug, Default)]
struct Entry {
    state: State,
    /// Elements of the tensor, if known.
    len: Option<usize>,
    /// Whether a transaction is open.
    open: bool,
    /// Buffers of earlier residuals, to be reused.
    spare: Vec<Vec<f32>>,
}

#[derive(Clone, Debug, Default)]
struct State {
    worker: Pieces,
    owner: Pieces,
    warm: Option<Arc<Vec<f32>>>,
}

impl State {
    /// Moves the owner residual of all elements outside `ranges`, which ascend, into the worker
    /// residual.
    fn own(&mut self, ranges: &[Range<usize>]) {
        let keeps = |start: usize, end: usize| {
            ranges.iter().any(|kept| kept.start <= start && end <= kept.end)
        };
        for (start, owed) in self.owner.clone().0 {
            let end = start + owed.len();
            if keeps(start, end) {
                continue;
            }
            let owed = owed.values();
            let mut next = start;
            for kept in ranges.iter().cloned().chain(std::iter::once(end..end)) {
                let part = next..kept.start.clamp(next, end);
                next = kept.end.clamp(next, end);
                if part.is_empty() {
                    continue;
                }
                self.add(part.start, &owed[part.start - start..part.end - start]);
                self.owner.cut(&part);
            }
        }
    }

    /// Adds `owed` to the worker residual of the elements from `start` on.
    fn add(&mut self, start: usize, owed: &[f32]) {
        let sum = match self.worker.get(start..start + owed.len()) {
            Some(own) => own.values().iter().zip(owed).map(|(own, owed)| own + owed).collect(),
            None => owed.to_vec(),
        };
        self.worker.set(start, sum.into());
    }
}

/// The Euclidean norms of a tensor's residuals.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Norms {
    /// Of the worker residual.
    pub worker: f64,
    /// Of the owner residual.
    pub owner: f64,
}

impl ErrorFeedback {
    /// Error feedback that owes nothing.
    pub fn new() -> Self {
        Self::default()
    }

    /// [`begin`](Self::begin) for a tensor of `len` elements. An error if something is owed for a
    /// tensor of this name and another length.
    pub fn begin_of(&self, tensor: &str, len: usize) -> Result<Transaction, FeedbackError> {
        if let Some(Entry { state, len: had, .. }) = lock(&self.tensors).get(tensor) {
            let end = state.worker.end().max(state.owner.end());
            let had = had.filter(|had| *had != len).or(Some(end).filter(|end| *end > len));
            if let Some(had) = had.filter(|_| end > 0) {
                return Err(FeedbackError::Length { tensor: tensor.into(), had, len });
            }
        }
        let transaction = self.begin(tensor)?;
        if let Some(entry) = lock(&self.tensors).get_mut(tensor) {
            entry.len = Some(len);
        }
        Ok(transaction)
    }

    /// Opens a transaction on a tensor's residuals. A tensor has one at a time: the next step needs
    /// what this one leaves.
    pub fn begin(&self, tensor: &str) -> Result<Transaction, FeedbackError> {
        let mut tensors = lock(&self.tensors);
        let entry = tensors.entry(tensor.into()).or_default();
        if entry.open {
            return Err(FeedbackError::Open { tensor: tensor.into() });
        }
        entry.open = true;
        let (old, spare) = (entry.state.clone(), std::mem::take(&mut entry.spare));
        Ok(Transaction {
            tensors: self.tensors.clone(),
            name: tensor.into(),
            new: old.clone(),
            old,
            spare,
        })
    }

    /// The names of all known tensors, in order.
    pub fn names(&self) -> Vec<String> {
        lock(&self.tensors).keys().cloned().collect()
    }

    /// Whether anything is owed for a tensor, as last committed: whether any element is not zero.
    pub fn owes(&self, tensor: &str) -> bool {
        let state = |entry: &Entry| entry.state.clone();
        let state = lock(&self.tensors).get(tensor).map(state).unwrap_or_default();
        state.worker.owes() || state.owner.owes()
    }

    /// How much is owed for a tensor, as last committed.
    pub fn norms(&self, tensor: &str) -> Option<Norms> {
        let tensors = lock(&self.tensors);
        let state = &tensors.get(tensor)?.state;
        Some(Norms { worker: state.worker.norm(), owner: state.owner.norm() })
    }

    /// How much is owed for a tensor in all, as last committed: the norm of the sum of worker and
    /// owner residual. A [`reshard`](Self::reshard) does not change it, except by rounding.
    pub fn owed(&self, tensor: &str) -> f64 {
        let tensors = lock(&self.tensors);
        let Some(Entry { state, .. }) = tensors.get(tensor) else { return 0.0 };
        let shared = |(start, owner): (&usize, &Piece)| {
            let worker = state.worker.get(*start..start + owner.len());
            worker.map_or(0.0, |worker| dot(&worker.values(), &owner.values()))
        };
        let shared: f64 = state.owner.0.iter().map(shared).sum();
        (state.worker.norm().powi(2) + state.owner.norm().powi(2) + 2.0 * shared).max(0.0).sqrt()
    }

    /// The sum of `value` over all elements of all residuals, as last committed. Results and the
    /// residuals of all ranks add up to the inputs; this is how to check it.
    pub fn sum_of(&self, value: impl Fn(f64) -> f64) -> f64 {
        let tensors = lock(&self.tensors);
        let states = tensors.values().map(|entry| &entry.state);
        let pieces = states.flat_map(|state| state.worker.0.values().chain(state.owner.0.values()));
        let sum = |piece: &Piece| -> f64 {
            piece.values().iter().map(|owed| value(f64::from(*owed))).sum()
        };
        pieces.map(sum).sum()
    }

    /// Moves every owner residual into the worker residual of the same elements. Call it on every
    /// rank when the set of ranks changes.
    ///
    /// After a change, other ranks own these elements, and an owner residual is only ever sent by
    /// the owner. As part of the worker residual it goes to the new owner with this rank's next
    /// gradient, and nothing is lost. PowerSGD starts afresh, since a rank that joins does not know
    /// the others' Q.
    pub fn reshard(&self) -> Result<(), FeedbackError> {
        let mut tensors = lock(&self.tensors);
        if let Some((tensor, _)) = tensors.iter().find(|(_, entry)| entry.open) {
            return Err(FeedbackError::Open { tensor: tensor.clone() });
        }
        for Entry { state, .. } in tensors.values_mut() {
            state.own(&[]);
            state.warm = None;
        }
        Ok(())
    }

    /// Takes over the residuals of a rank that is about to leave, after a
    /// [`reshard`](Self::reshard) of both. From now on this rank owes them as a worker.
    pub fn take_over(&self, other: Self) -> Result<(), FeedbackError> {
        self.reshard()?;
        other.reshard()?;
        let theirs = std::mem::take(&mut *lock(&other.tensors));
        let mut tensors = lock(&self.tensors);
        for (name, Entry { state, .. }) in theirs {
            let mine = &mut tensors.entry(name).or_default().state;
            for (start, owed) in state.worker.0 {
                mine.add(start, &owed.values());
            }
        }
        Ok(())
    }

    /// Forgets a tensor and what is owed for it.
    pub fn remove(&self, tensor: &str) -> Result<(), FeedbackError> {
        let mut tensors = lock(&self.tensors);
        if tensors.get(tensor).is_some_and(|entry| entry.open) {
            return Err(FeedbackError::Open { tensor: tensor.into() });
        }
        tensors.remove(tensor);
        Ok(())
    }
}

/// Spare buffers that a tensor keeps besides its residuals.
const SPARE: usize = 8;

/// One operation's hold on a tensor's residuals. Dropping it leaves them as they were.
#[derive(Debug)]
pub struct Transaction {
    tensors: Arc<Mutex<BTreeMap<String, Entry>>>,
    name: String,
    old: State,
    new: State,
    spare: Vec<Vec<f32>>,
}

impl Transaction {
    /// The tensor's name.
    pub fn tensor(&self) -> &str {
        &self.name
    }

    /// What the worker owed for these elements before this transaction.
    ///
    /// This is free if the last operation set a piece with exactly these elements; otherwise it
    /// copies pieces together.
    pub fn worker(&self, range: Range<usize>) -> Owed {
        Owed(self.worker_piece(range).map(|piece| piece.values()))
    }

    /// Like [`worker`](Self::worker), but a piece may be outside host memory. `None` if nothing is
    /// owed.
    pub fn worker_piece(&self, range: Range<usize>) -> Option<Piece> {
        self.old.worker.get(range)
    }

    /// What the owner owed for these elements before this transaction.
    pub fn owner(&self, range: Range<usize>) -> Owed {
        Owed(self.owner_piece(range).map(|piece| piece.values()))
    }

    /// Like [`owner`](Self::owner), but a piece may be outside host memory. `None` if nothing is
    /// owed.
    pub fn owner_piece(&self, range: Range<usize>) -> Option<Piece> {
        self.old.owner.get(range)
    }

    /// The Q that PowerSGD starts with.
    pub fn warm(&self) -> Option<&[f32]> {
        self.old.warm.as_deref().map(Vec::as_slice)
    }

    /// Says which elements the rank owns in this transaction, in ascending ranges. What it owes as
    /// the owner of any others becomes part of what it owes as a worker, and so goes to their
    /// present owners. Call it first.
    ///
    /// Which rank owns what depends on the codec: some cut a long vector into chunks first, some
    /// have no owners at all.
    pub fn own(&mut self, ranges: &[Range<usize>]) {
        self.old.own(ranges);
        self.new = self.old.clone();
    }

    /// Adds everything owed to a vector that will travel as it is, without a codec; what does not
    /// fit its element type stays owed. Returns `false`, with nothing changed, if that gives a NaN
    /// or an infinity.
    ///
    /// If the vector is to be summed (`sum`), it does not matter which rank owns an element, and
    /// owner residuals are paid too. If each rank keeps its own copy, there are no owners, and only
    /// what the worker owes is paid.
    pub fn pay(&mut self, vector: &mut Floats, sum: bool) -> bool {
        let mut state = self.old.clone();
        if sum {
            state.own(&[]);
        }
        let all = 0..vector.len();
        if let Some(owed) = state.worker.get(all.clone()) {
            let Some(left) = vector.add(&owed.values()) else { return false };
            state.worker.cut(&all);
            if left.iter().any(|value| *value != 0.0) {
                state.worker.set(0, left.into());
            }
        }
        self.new = state;
        true
    }

    /// Sets what the worker owes for the elements from `start` on.
    pub fn set_worker(&mut self, start: usize, residual: impl Into<Piece>) {
        self.new.worker.set(start, residual.into());
    }

    /// The worker now owes nothing for these elements.
    pub fn clear_worker(&mut self, range: Range<usize>) {
        self.new.worker.cut(&range);
    }

    /// Sets what the owner owes for the elements from `start` on.
    pub fn set_owner(&mut self, start: usize, residual: impl Into<Piece>) {
        self.new.owner.set(start, residual.into());
    }

    /// Sets the Q that PowerSGD starts with next time.
    pub fn set_warm(&mut self, warm: Vec<f32>) {
        self.new.warm = Some(Arc::new(warm));
    }

    /// A spare buffer to write `len` elements to, if there is one; its content and length mean
    /// nothing. It is the smallest that fits, so that a loop touches no fresh memory.
    pub fn buffer(&mut self, len: usize) -> Vec<f32> {
        let fits = |(_, spare): &(usize, &Vec<f32>)| spare.capacity() >= len;
        let best =
            self.spare.iter().enumerate().filter(fits).min_by_key(|(_, spare)| spare.capacity());
        best.map(|(at, _)| at).map_or_else(Vec::new, |at| self.spare.swap_remove(at))
    }

    /// Gives back a buffer that is no longer needed.
    pub fn give_back(&mut self, buffer: Vec<f32>) {
        if buffer.capacity() > 0 && self.spare.len() < SPARE {
            self.spare.push(buffer);
        }
    }

    /// Makes all changes visible. Call it when the operation has succeeded.
    pub fn commit(mut self) {
        let old = std::mem::take(&mut self.old);
        let new = std::mem::take(&mut self.new);
        let mut tensors = lock(&self.tensors);
        if let Some(entry) = tensors.get_mut(&self.name) {
            entry.state = new;
        }
        drop(tensors);
        // Buffers that nothing else holds can be reused.
        let pieces = old.worker.0.into_values().chain(old.owner.0.into_values());
        self.spare.extend(pieces.filter_map(Piece::into_buffer));
    }
}

impl Drop for Transaction {
    fn drop(&mut self) {
        if let Some(entry) = lock(&self.tensors).get_mut(&self.name) {
            entry.open = false;
            entry.spare = std::mem::take(&mut self.spare);
        }
    }
}

/// What is owed for some elements.
#[derive(Clone, Debug)]
pub struct Owed(Option<Arc<Vec<f32>>>);

impl Owed {
    /// The form that an encoder takes.
    pub fn residual(&self) -> Residual<'_> {
        match &self.0 {
            Some(values) => Residual::Owed(values),
            None => Residual::Zero,
        }
    }
}

/// Why residuals could not be taken, saved or restored.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FeedbackError {
    /// Another operation holds the tensor.
    #[error(
        "an operation on tensor `{tensor}` is in flight and holds its residuals; wait for it before you start another on the same \
         tensor, or give them different names"
    )]
    Open {
        /// The tensor.
        tensor: String,
    },
    /// Something is owed for a tensor of this name and another length.
    #[error(
        "tensor `{tensor}` has {len} elements, but something is owed for one of that name with {had}; \
         give tensors of different lengths different names, and go on from what was saved with the same model"
    )]
    Length {
        /// The tensor.
        tensor: String,
        /// Elements that something is owed for.
        had: usize,
        /// Elements it has now.
        len: usize,
    },
    /// A file that `save` did not write.
    #[error("not a saved error-feedback file ({0}); use one written by `save`, or start without")]
    Format(safetensors::SafeTensorError),
    /// A tensor in the file that `save` would not have written.
    #[error(
        "the saved tensor `{key}` is refused, since {why}; restore the file that `save` wrote, or start without one"
    )]
    Content {
        /// The tensor.
        key: String,
        /// What is wrong with it.
        why: &'static str,
    },
    /// A file that cannot be read or written.
    #[error("error feedback in {}: {error}", path.display())]
    File {
        /// The file.
        path: std::path::PathBuf,
        /// The system's error.
        error: std::io::Error,
    },
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Nothing that can panic runs under the lock halfway through a change.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn state(feedback: &ErrorFeedback) -> Vec<u8> {
        feedback.to_bytes()
    }

    pub(super) fn with(worker: &[f32], owner: &[f32]) -> ErrorFeedback {
        let feedback = ErrorFeedback::new();
        let mut transaction = feedback.begin("w").unwrap();
        transaction.set_worker(0, worker.to_vec());
        transaction.set_owner(2, owner.to_vec());
        transaction.set_warm(vec![7.0]);
        transaction.commit();
        feedback
    }

    #[test]
    fn what_is_owed_for_another_length_is_refused() {
        let feedback = ErrorFeedback::new();
        let owe = |owed: Vec<f32>| {
            let mut transaction = feedback.begin_of("w", owed.len())?;
            transaction.set_worker(0, owed);
            transaction.commit();
            Ok::<_, FeedbackError>(())
        };
        owe(vec![1.0; 4]).unwrap();
        owe(vec![2.0; 4]).unwrap();
        for len in [3, 5] {
            let error = owe(vec![3.0; len]).unwrap_err().to_string();
            let says =
                format!("`w` has {len} elements, but something is owed for one of that name");
            assert!(error.contains(&says), "{error}");
        }
        // Of a saved tensor, only where its residuals end is known.
        let saved = ErrorFeedback::from_bytes(&feedback.to_bytes()).unwrap();
        assert!(matches!(saved.begin_of("w", 3), Err(FeedbackError::Length { had: 4, .. })));
        saved.begin_of("w", 4).unwrap();
    }

    #[test]
    fn a_dropped_transaction_changes_nothing() {
        let feedback = with(&[1.0, -0.0, 3.0, 4.0], &[5.0]);
        let before = state(&feedback);
        let mut transaction = feedback.begin("w").unwrap();
        transaction.set_worker(0, vec![9.0; 4]);
        transaction.set_owner(2, vec![9.0]);
        transaction.set_warm(vec![9.0]);
        assert_eq!(state(&feedback), before, "nothing is visible before the commit");
        drop(transaction);
        assert_eq!(state(&feedback), before);
        assert!(matches!(
            feedback.begin("w").unwrap().worker(0..4).residual(),
            Residual::Owed([1.0, _, 3.0, 4.0])
        ));
    }

    #[test]
    fn a_second_transaction_on_the_same_tensor_is_refused() {
        let feedback = ErrorFeedback::new();
        let first = feedback.begin("w").unwrap();
        assert!(feedback.begin("w").unwrap_err().to_string().contains("`w` is in flight"));
        assert!(feedback.reshard().is_err());
        assert!(feedback.remove("w").is_err());
        feedback.begin("v").unwrap();
        drop(first);
        feedback.begin("w").unwrap();
    }

    #[test]
    fn buffers_are_used_again() {
        let feedback = with(&[1.0; 100], &[]);
        let mut transaction = feedback.begin("w").unwrap();
        transaction.set_worker(0, vec![2.0; 100]);
        transaction.commit();
        assert!(feedback.begin("w").unwrap().buffer(100).capacity() >= 100);
    }

    #[test]
    fn resharding_moves_owner_residuals_to_the_worker() {
        let feedback = with(&[1.0, 2.0, 3.0], &[10.0, 20.0]);
        let norm = (1.0f64 + 4.0 + 13.0 * 13.0 + 400.0).sqrt();
        assert!((feedback.owed("w") - norm).abs() < 1e-12);
        feedback.reshard().unwrap();
        assert!((feedback.owed("w") - norm).abs() < 1e-12);
        let transaction = feedback.begin("w").unwrap();
        assert!(matches!(
            transaction.worker(0..4).residual(),
            Residual::Owed([1.0, 2.0, 13.0, 20.0])
        ));
        assert!(matches!(transaction.owner(0..4).residual(), Residual::Zero));
        assert!(transaction.warm().is_none());
    }

    #[test]
    fn what_a_rank_owes_that_leaves_is_owed_by_another() {
        let heir = with(&[1.0, 2.0, 3.0], &[10.0]);
        let leaver = with(&[0.5; 5], &[100.0, 200.0]);
        let mut other = leaver.begin("v").unwrap();
        other.set_worker(1, vec![7.0]);
        other.commit();
        heir.take_over(leaver).unwrap();
        let worker = |name, range| heir.begin(name).unwrap().worker(range);
        let owed = worker("w", 0..5);
        assert!(matches!(owed.residual(), Residual::Owed([1.5, 2.5, 113.5, 200.5, 0.5])));
        assert!(matches!(worker("v", 0..2).residual(), Residual::Owed([0.0, 7.0])));
        let open = heir.begin("w").unwrap();
        assert!(heir.take_over(with(&[1.0], &[])).is_err(), "an operation holds it");
        drop(open);
    }

    #[test]
    fn what_an_owner_owes_for_elements_of_others_goes_to_the_worker() {
        let feedback = with(&[1.0, 2.0, 3.0], &[10.0, 20.0, 30.0, 40.0]);
        let before = state(&feedback);
        let mut transaction = feedback.begin("w").unwrap();
        transaction.own(&[0..1, 3..4, 9..12]);
        assert!(matches!(
            transaction.worker(0..6).residual(),
            Residual::Owed([1.0, 2.0, 13.0, 0.0, 30.0, 40.0])
        ));
        assert!(matches!(
            transaction.owner(0..6).residual(),
            Residual::Owed([0.0, 0.0, 0.0, 20.0, 0.0, 0.0])
        ));
        drop(transaction);
        assert_eq!(state(&feedback), before, "only a commit moves it");
        let mut transaction = feedback.begin("w").unwrap();
        transaction.own(&[2..4, 4..6]);
        transaction.commit();
        assert_eq!(state(&feedback), before, "what is owned stays");
    }

    #[test]
    fn a_vector_without_a_codec_pays_what_is_owed() {
        let feedback = with(&[1.0, 2.0, 3.0], &[10.0, 20.0]);
        let mut vector = Floats::F32(vec![0.5; 4]);
        let mut transaction = feedback.begin("w").unwrap();
        assert!(transaction.pay(&mut vector, true));
        assert_eq!(vector, Floats::F32(vec![1.5, 2.5, 13.5, 20.5]));
        assert!(feedback.owes("w"), "until the commit");
        transaction.commit();
        assert!(!feedback.owes("w"));

        // Each rank keeps its own copy: there is no sum and no owner.
        let feedback = with(&[1.0], &[10.0]);
        let mut vector = Floats::F64(vec![0.5; 4]);
        let mut transaction = feedback.begin("w").unwrap();
        assert!(transaction.pay(&mut vector, false));
        transaction.commit();
        assert_eq!(vector, Floats::F64(vec![1.5, 0.5, 0.5, 0.5]));
        assert_eq!(feedback.norms("w"), Some(Norms { worker: 0.0, owner: 10.0 }));
    }

    #[test]
    fn what_does_not_fit_a_short_float_stays_owed() {
        let feedback = with(&[1.0 / 4096.0, 1e6], &[]);
        let mut vector = Floats::F16(vec![half::f16::ONE; 2]);
        let mut transaction = feedback.begin("w").unwrap();
        assert!(transaction.pay(&mut vector, true));
        transaction.commit();
        assert_eq!(vector, Floats::F16(vec![half::f16::ONE, half::f16::MAX]));
        let transaction = feedback.begin("w").unwrap();
        assert!(
            matches!(transaction.worker(0..2).residual(), Residual::Owed([a, b]) if (*a, *b) == (1.0 / 4096.0, 1_000_001.0 - 65_504.0))
        );
    }

    /// A stand-in for a GPU, with a count of fetches.
    #[derive(Debug)]
    struct OnCard(Vec<f32>, Arc<std::sync::atomic::AtomicUsize>);

    impl ResidualElsewhere for OnCard {
        fn len(&self) -> usize {
            self.0.len()
        }

        fn fetch(&self) -> Vec<f32> {
            self.1.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
            self.0.clone()
        }
    }

    #[test]
    fn residuals_on_a_card_are_fetched_for_those_who_need_them_here_and_for_no_others() {
        let fetched = Arc::new(std::sync::atomic::AtomicUsize::new(0));
        let on_card =
            |values: &[f32]| Piece::Elsewhere(Arc::new(OnCard(values.to_vec(), fetched.clone())));
        let feedback = ErrorFeedback::new();
        let mut transaction = feedback.begin("w").unwrap();
        transaction.set_worker(0, on_card(&[1.0, 2.0]));
        transaction.set_worker(2, on_card(&[3.0, 4.0]));
        transaction.set_owner(1, on_card(&[10.0]));
        transaction.set_warm(vec![7.0]);
        transaction.commit();

        // A step on the GPU.
        let mut transaction = feedback.begin("w").unwrap();
        transaction.own(&[1..2, 5..6]);
        let piece = transaction.worker_piece(2..4).unwrap();
        assert!(
            matches!(&piece, Piece::Elsewhere(piece) if (&**piece as &dyn std::any::Any).is::<OnCard>())
        );
        assert!(matches!(transaction.owner_piece(1..2), Some(Piece::Elsewhere(_))));
        transaction.set_worker(2, on_card(&[5.0, 6.0]));
        let savepoint = feedback.savepoint();
        transaction.commit();
        savepoint.release();
        assert_eq!(fetched.load(std::sync::atomic::Ordering::Relaxed), 0);

        // A checkpoint is the same wherever the residuals are.
        let saved = ErrorFeedback::from_bytes(&state(&feedback)).unwrap();
        assert_eq!(state(&saved), state(&feedback));
        assert!(fetched.load(std::sync::atomic::Ordering::Relaxed) > 0);
        // Other cuts and other owners.
        let owed = feedback.begin("w").unwrap().worker(1..4);
        assert!(matches!(owed.residual(), Residual::Owed([2.0, 5.0, 6.0])));
        feedback.reshard().unwrap();
        let owed = feedback.begin("w").unwrap().worker(0..4);
        assert!(matches!(owed.residual(), Residual::Owed([1.0, 12.0, 5.0, 6.0])));
    }

    #[test]
    fn nothing_is_paid_with_a_vector_that_is_not_finite() {
        for bad in [f32::NAN, f32::INFINITY, f32::MAX] {
            let feedback = with(&[1.0, f32::MAX], &[]);
            let before = state(&feedback);
            let mut vector = Floats::F32(vec![0.5, bad]);
            let mut transaction = feedback.begin("w").unwrap();
            assert!(!transaction.pay(&mut vector, true));
            transaction.commit();
            assert_eq!(state(&feedback), before);
            assert!(matches!(vector, Floats::F32(values) if values[0] == 0.5));
        }
    }
}
