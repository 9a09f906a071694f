//! Every layout trains the same model: processes are compared with one process on the same batch.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on should say where")]

mod common;

use common::{job_succeeds, text};
use farwire::Communicator;
use farwire_candle::Candle;
use farwire_train::{Arrays, Settings, Trainer, gpt};

const STEPS: usize = 20;

/// 8 layers, so that 4 stages with 2 chunks have one per chunk; 4 heads for 4 ranks.
fn settings() -> Settings {
    Settings {
        model: gpt::Config { layers: 8, heads: 4, width: 16, context: 8 },
        batch: 8,
        steps: STEPS,
        warm_up: 2,
        bucket_bytes: 4 << 10,
        ..Settings::default()
    }
}

struct Run {
    gradients: Option<Arrays>,
    losses: Vec<f64>,
    /// The gradient's norm in each step, over the whole mesh.
    norms: Vec<f64>,
}

fn train(comm: &Communicator, settings: Settings) -> Run {
    let mut trainer = Trainer::new(&Candle, comm, settings, &text()).unwrap();
    assert!(trainer.replicas_agree().unwrap(), "before the first step");
    trainer.compute_gradients().unwrap();
    let gradients = trainer.gathered_gradients().unwrap();
    let mut run = Run { gradients, losses: Vec::new(), norms: Vec::new() };
    for step in 0..STEPS {
        let report = trainer.step(false).unwrap();
        assert!(trainer.replicas_agree().unwrap(), "after step {step}");
        run.losses.push(report.loss);
        run.norms.push(report.norm);
    }
    run
}

/// Trains in a layout; rank 0 compares that with a run on one rank.
fn same_as_alone(test: &str, layout: Settings) {
    let ranks = layout.ranks();
    let Settings { dp, tp, pp, schedule, micro_batches, .. } = layout;
    let case = format!("dp={dp},tp={tp},pp={pp},{schedule},m={micro_batches}");
    job_succeeds(test, &case, ranks, |comm| {
        let run = train(&comm, layout);
        let Some(gradients) = run.gradients else { return };
        let alone = train(&farwire::local(1).unwrap()[0], settings());
        let expected = alone.gradients.unwrap();
        assert_eq!(gradients.keys().collect::<Vec<_>>(), expected.keys().collect::<Vec<_>>());
        for (name, gradient) in &gradients {
            let expected = &expected[name];
            assert_eq!(gradient.shape, expected.shape, "{name}");
            assert!(expected.data.iter().any(|x| *x != 0.0), "{name} takes part");
            for (got, expected) in gradient.data.iter().zip(&expected.data) {
                assert!(
                    (got - expected).abs() <= 1e-5 + 1e-4 * expected.abs(),
                    "{name}: {got}, not {expected}"
                );
            }
        }
        let (got, expected) = (run.norms[0], alone.norms[0]);
        assert!((got - expected).abs() <= 1e-4 * expected, "norm {got}, not {expected}");
        assert!(alone.norms[0] > settings().clip, "so that the norm matters");
        let (got, expected) = (run.losses[STEPS - 1], alone.losses[STEPS - 1]);
        assert!((got - expected).abs() <= 1e-3 * expected, "step {STEPS}: {got}, not {expected}");
        assert!(expected < alone.losses[0] - 0.5, "it learns: {:?}", alone.losses);
    });
}

#[test]
fn data_parallel_trains_the_same_model() {
    same_as_alone(
        "data_parallel_trains_the_same_model",
        Settings { dp: 4, micro_batches: 2, ..settings() },
    );
}

#[test]
fn tensor_parallel_trains_the_same_model() {
    for tp in [2, 4] {
        same_as_alone("tensor_parallel_trains_the_same_model", Settings { tp, ..settings() });
    }
}

#[test]
fn pipeline_parallel_trains_the_same_model() {
    for schedule in ["gpipe", "1f1b", "interleaved:2"] {
        for pp in [2, 4] {
            let schedule = schedule.parse().unwrap();
            let layout = Settings { pp, schedule, micro_batches: 8, ..settings() };
            same_as_alone("pipeline_parallel_trains_the_same_model", layout);
        }
    }
}

#[test]
fn mixed_layouts_train_the_same_model() {
    for (pp, micro_batches) in [(1, 1), (2, 2)] {
        let layout = Settings { dp: 2, tp: 2, pp, micro_batches, ..settings() };
        same_as_alone("mixed_layouts_train_the_same_model", layout);
    }
}
