//! A step over many tensors, which counts as a whole or not at all.
//!
//! Each operation commits the residuals of its own tensor. A training step is many operations. If
//! one of them fails, the results of the others are thrown away with it, and their residuals must
//! go back to what they were.
//!
//! ```text
//!  savepoint() ─ begin("a") … commit() ─ begin("b") … commit() ─┬─ release(): they stay
//!                                                               └─ drop: as at the savepoint
//! ```

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use super::{Entry, ErrorFeedback, Piece, SPARE, State, lock};

/// The residuals of all tensors as they were at one time. Dropping it restores them.
///
/// Before dropping it, wait for every operation begun since: one that is still running would commit
/// afterwards.
#[derive(Debug)]
pub struct Savepoint {
    tensors: Arc<Mutex<BTreeMap<String, Entry>>>,
    /// Shared with the tensors, not copied; `None` once released.
    states: Option<BTreeMap<String, State>>,
}

impl ErrorFeedback {
    /// Remembers what is owed for all tensors, so that several operations can be undone as one.
    ///
    /// ```
    /// use farwire_codec::ErrorFeedback;
    ///
    /// let feedback = ErrorFeedback::new();
    /// let owe = |amount: f32| {
    ///     let mut transaction = feedback.begin("w").unwrap();
    ///     transaction.set_worker(0, vec![amount]);
    ///     transaction.commit();
    /// };
    /// owe(1.0);
    /// let savepoint = feedback.savepoint();
    /// owe(2.0);
    /// drop(savepoint);
    /// assert_eq!(feedback.norms("w").unwrap().worker, 1.0);
    /// let savepoint = feedback.savepoint();
    /// owe(3.0);
    /// savepoint.release();
    /// assert_eq!(feedback.norms("w").unwrap().worker, 3.0);
    /// ```
    pub fn savepoint(&self) -> Savepoint {
        let states = lock(&self.tensors)
            .iter()
            .map(|(name, entry)| (name.clone(), entry.state.clone()))
            .collect();
        Savepoint { tensors: self.tensors.clone(), states: Some(states) }
    }
}

impl Savepoint {
    /// Restores one tensor and leaves the others: for when its result of this step will not be
    /// used. No operation on it may be in flight.
    pub fn restore(&self, tensor: &str) {
        let Some(states) = &self.states else { return };
        if let Some(entry) = lock(&self.tensors).get_mut(tensor) {
            entry.state = states.get(tensor).cloned().unwrap_or_default();
        }
    }

    /// Keeps what was committed since.
    pub fn release(mut self) {
        let states = self.states.take().unwrap_or_default();
        let mut tensors = lock(&self.tensors);
        for (name, State { worker, owner, .. }) in states {
            let Some(entry) = tensors.get_mut(&name) else { continue };
            // Buffers that were replaced since can be reused. (While the savepoint held them, a
            // commit could not give them back.)
            let before = worker.0.into_values().chain(owner.0.into_values());
            let replaced = before.filter_map(Piece::into_buffer);
            let pieces = entry.state.worker.0.len() + entry.state.owner.0.len();
            let room = (SPARE + pieces).saturating_sub(entry.spare.len());
            entry.spare.extend(replaced.take(room));
        }
    }
}

impl Drop for Savepoint {
    fn drop(&mut self) {
        let Some(mut states) = self.states.take() else { return };
        let mut tensors = lock(&self.tensors);
        // A tensor first used since then owed nothing.
        tensors.retain(|name, entry| {
            let known = states.remove(name);
            let keep = known.is_some() || entry.open;
            entry.state = known.unwrap_or_default();
            keep
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn commit(feedback: &ErrorFeedback, tensor: &str, worker: Vec<f32>) {
        let mut transaction = feedback.begin(tensor).unwrap();
        transaction.set_worker(0, worker);
        transaction.commit();
    }

    #[test]
    fn a_dropped_savepoint_restores_every_tensor_to_the_bit() {
        let feedback = ErrorFeedback::new();
        commit(&feedback, "a", vec![1.0, -0.0, 1e-40]);
        let before = feedback.to_bytes();
        let savepoint = feedback.savepoint();
        commit(&feedback, "a", vec![2.0; 3]);
        commit(&feedback, "a", vec![3.0; 3]);
        commit(&feedback, "new", vec![4.0]);
        drop(savepoint);
        assert_eq!(feedback.to_bytes(), before);
        assert_eq!(feedback.names(), ["a"]);
    }

    #[test]
    fn one_tensor_is_taken_back_and_the_others_stay() {
        let feedback = ErrorFeedback::new();
        commit(&feedback, "a", vec![1.0; 3]);
        let savepoint = feedback.savepoint();
        commit(&feedback, "a", vec![2.0; 3]);
        commit(&feedback, "b", vec![3.0; 3]);
        commit(&feedback, "new", vec![4.0; 3]);
        savepoint.restore("a");
        savepoint.restore("new");
        savepoint.restore("never heard of");
        savepoint.release();
        let worker = |name: &str| feedback.norms(name).map(|norms| norms.worker.powi(2).round());
        assert_eq!((worker("a"), worker("b"), worker("new")), (Some(3.0), Some(27.0), Some(0.0)));
    }

    #[test]
    fn a_released_savepoint_keeps_what_was_committed_and_gives_buffers_back() {
        let feedback = ErrorFeedback::new();
        commit(&feedback, "a", vec![1.0; 100]);
        let savepoint = feedback.savepoint();
        commit(&feedback, "a", vec![2.0; 100]);
        let after = feedback.to_bytes();
        savepoint.release();
        assert_eq!(feedback.to_bytes(), after);
        assert!(feedback.begin("a").unwrap().buffer(100).capacity() >= 100);
    }

    #[test]
    fn buffers_do_not_pile_up_over_many_steps() {
        let feedback = ErrorFeedback::new();
        for step in 0..50 {
            let savepoint = feedback.savepoint();
            commit(&feedback, "a", vec![step as f32; 10]);
            savepoint.release();
        }
        assert!(lock(&feedback.tensors)["a"].spare.len() <= SPARE + 1);
    }
}
