//! Nothing is lost: results and residuals add up to the inputs.

use farwire_codec::*;

use crate::world::{End, World};
use crate::{Random, all_messages};

/// How far results plus residuals are from the inputs, relative to the inputs, after `steps` steps
/// with every `drop_every`-th dropped.
fn imbalance(spec: &str, ranks: usize, steps: usize, drop_every: usize) -> f64 {
    let n = 1000;
    let mut world = World::new(spec, ranks, n);
    let mut random = Random(7);
    let (mut inputs, mut results) = (vec![0.0f64; n], vec![0.0f64; n]);
    for step in 1..=steps {
        // A mean, as gradients have, plus noise.
        let gradients: Vec<Vec<f32>> = (0..ranks)
            .map(|_| (0..n).map(|i| random.normal() + (i % 7) as f32 / 3.0).collect())
            .collect();
        let end = if step % drop_every == 0 { End::Drop } else { End::Commit };
        let result = world.all_reduce(&gradients, end);
        if end == End::Commit {
            results.iter_mut().zip(&result).for_each(|(sum, x)| *sum += f64::from(*x));
            for gradient in &gradients {
                inputs.iter_mut().zip(gradient).for_each(|(sum, x)| *sum += f64::from(*x));
            }
        }
    }
    let norm = |values: &[f64]| values.iter().map(|x| x * x).sum::<f64>().sqrt();
    let owed = world.owed(n);
    let difference: Vec<_> = (0..n).map(|i| results[i] + owed[i] - inputs[i]).collect();
    norm(&difference) / norm(&inputs)
}

#[test]
fn results_and_residuals_add_up_to_the_inputs() {
    for spec in samples() {
        for ranks in [1, 2, 3, 4, 7] {
            let imbalance = imbalance(spec, ranks, 100, usize::MAX);
            assert!(imbalance < 2f64.powi(-20), "{spec}, {ranks} ranks: {imbalance:e}");
        }
    }
}

#[test]
fn also_when_every_tenth_step_is_dropped() {
    for spec in samples() {
        for ranks in [1, 3, 4] {
            let imbalance = imbalance(spec, ranks, 100, 10);
            assert!(imbalance < 2f64.powi(-20), "{spec}, {ranks} ranks: {imbalance:e}");
        }
    }
}

#[test]
fn resharding_loses_nothing() {
    let n = 500;
    for (spec, _) in all_messages() {
        let mut world = World::new(spec, 3, n);
        let mut random = Random(3);
        for _ in 0..10 {
            let gradients: Vec<_> = (0..3).map(|_| random.normals(n)).collect();
            world.all_reduce(&gradients, End::Commit);
        }
        let before = world.owed(n);
        world.feedback.iter().for_each(|feedback| feedback.reshard().unwrap());
        assert!(world.feedback.iter().all(|feedback| feedback.norms("w").unwrap().owner == 0.0));
        for (before, after) in before.iter().zip(world.owed(n)) {
            assert!((before - after).abs() <= 1e-6 * before.abs().max(1.0));
        }
    }
}

#[test]
fn fewer_elements_than_ranks() {
    for spec in samples() {
        for n in [0, 1, 2, 5] {
            let mut world = World::new(spec, 7, n);
            let gradients: Vec<_> = (0..7).map(|rank| vec![rank as f32; n]).collect();
            world.all_reduce(&gradients, End::Commit);
        }
    }
}

#[test]
fn a_gradient_with_a_nan_leaves_the_residual_as_it_was() {
    let n = 3000;
    for (name, codec) in all_messages() {
        let mut world = World::new(name, 1, n);
        world.all_reduce(&[Random(4).normals(n)], End::Commit);
        let before = world.feedback[0].to_bytes();
        let mut transaction = world.feedback[0].begin("w").unwrap();
        let mut gradient = vec![1.0; n];
        gradient[n - 1] = f32::NAN;
        let (owed, place) = (transaction.worker(0..n), CodedPlace::whole(Context::default(), n));
        let mut out = Encoded::default();
        out.residual = transaction.buffer(0);
        let job =
            Job::worker(&gradient, owed.residual(), &place, std::slice::from_ref(&place.range));
        assert_eq!(
            codec.encode(&job, &mut out),
            Err(EncodeError::NotFinite { index: n - 1 }),
            "{name}"
        );
        drop(transaction);
        assert_eq!(world.feedback[0].to_bytes(), before, "{name}");
    }
}
