//! Training with a one-page library: everything that does not depend on a tensor library is tested
//! without a real one.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on should say where")]

mod common;

use common::{TOY, Toy};
use farwire::Communicator;
use farwire_train::gpt::{Config, Writer};
use farwire_train::{
    Group, Input, Library, LibraryResult, OnNan, Settings, Sink, Stage, StageSpec, Start,
    TrainError, Trainer, Values,
};

const STEPS: usize = 6;

fn settings() -> Settings {
    Settings {
        model: Config { layers: 4, heads: 2, width: 8, context: 8 },
        batch: 8,
        steps: STEPS,
        warm_up: 2,
        learning_rate: 1e-2,
        bucket_bytes: 1 << 10,
        ..Settings::default()
    }
}

/// Short sums, such as `1 and 2 make 3; `.
fn text() -> Vec<u8> {
    (0..999)
        .flat_map(|i| format!("{} and {} make {}; ", i % 7, i % 5, i % 7 + i % 5).into_bytes())
        .collect()
}

fn on_threads<T: Send>(ranks: usize, rank: impl Fn(Communicator) -> T + Sync) -> Vec<T> {
    let rank = &rank;
    std::thread::scope(|scope| {
        let ranks: Vec<_> = farwire::local(ranks)
            .unwrap()
            .into_iter()
            .map(|comm| scope.spawn(move || rank(comm)))
            .collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

fn losses(trainer: &mut Trainer, steps: usize) -> Vec<f64> {
    (0..steps).map(|_| trainer.step(false).unwrap().loss).collect()
}

fn layouts() -> Vec<Settings> {
    let settings = settings();
    vec![
        Settings { dp: 2, micro_batches: 2, ..settings.clone() },
        Settings { dp: 2, shard_optimizer: true, ..settings.clone() },
        Settings { tp: 2, ..settings.clone() },
        Settings { pp: 2, micro_batches: 4, ..settings.clone() },
        Settings {
            pp: 2,
            micro_batches: 2,
            schedule: "interleaved:2".parse().unwrap(),
            ..settings.clone()
        },
        Settings { dp: 2, tp: 2, pp: 2, shard_optimizer: true, micro_batches: 2, ..settings },
    ]
}

#[test]
fn every_layout_trains_the_model_that_one_rank_trains() {
    let text = text();
    let alone = |comm: Communicator| {
        losses(&mut Trainer::new(&TOY, &comm, settings(), &text).unwrap(), STEPS)
    };
    let expected = on_threads(1, alone).remove(0);
    assert!(expected[STEPS - 1] < expected[0] - 0.01, "it learns: {expected:?}");
    for layout in layouts() {
        on_threads(layout.ranks(), |comm| {
            let mut trainer = Trainer::new(&TOY, &comm, layout.clone(), &text).unwrap();
            for (got, expected) in losses(&mut trainer, STEPS).iter().zip(&expected) {
                assert!(
                    (got - expected).abs() < 1e-5 * expected,
                    "{layout:?}: {got}, not {expected}"
                );
            }
            assert!(trainer.replicas_agree().unwrap());
        });
    }
}

#[test]
fn a_run_goes_on_bit_for_bit_and_in_another_layout_too() {
    let text = text();
    for (index, layout) in layouts().into_iter().enumerate() {
        let dir = std::env::temp_dir().join(format!("farwire-toy-{index}-{}", std::process::id()));
        let layout = Settings { codec: "topk:0.2".parse().unwrap(), ..layout };
        let expected = on_threads(layout.ranks(), |comm| {
            let mut trainer = Trainer::new(&TOY, &comm, layout.clone(), &text).unwrap();
            losses(&mut trainer, 3);
            trainer.save(&dir, "notes".into()).unwrap();
            let expected = losses(&mut trainer, 3);
            let mut resumed = Trainer::new(&TOY, &comm, layout.clone(), &text).unwrap();
            let about = resumed.resume(&dir).unwrap();
            assert_eq!((about.step, about.notes), (3, "notes".into()));
            assert_eq!(losses(&mut resumed, 3), expected, "{layout:?}");
            expected
        });
        on_threads(1, |comm| {
            let codec = layout.codec.clone();
            let mut alone =
                Trainer::new(&TOY, &comm, Settings { codec, ..settings() }, &text).unwrap();
            alone.resume(&dir).unwrap();
            // Residuals stay behind, and that shows a little.
            let loss = losses(&mut alone, 1)[0];
            assert!((loss - expected[0][0]).abs() < 1e-3 * loss, "{loss} and {}", expected[0][0]);
        });
        std::fs::remove_dir_all(dir).unwrap();
    }
}

/// A loss can overflow where gradients do not: those of a softmax are at most 1.
#[test]
fn a_loss_that_is_not_finite_is_found_on_all_ranks() {
    let text = text();
    for (disturb, value) in [
        (Toy { disturb: |_| f32::NAN }, f32::NAN),
        (Toy { disturb: |_| f32::INFINITY }, f32::INFINITY),
    ] {
        on_threads(2, |comm| {
            let settings = Settings { dp: 2, on_nan: OnNan::Skip, ..settings() };
            let library = if comm.rank() == 1 { &disturb } else { &TOY };
            let mut trainer = Trainer::new(library, &comm, settings, &text).unwrap();
            let before = trainer.weights("head.weight").unwrap();
            let says = format!("the loss on rank 1 is {value}");
            assert!(trainer.step(false).unwrap().skipped.unwrap().contains(&says));
            assert_eq!(before, trainer.weights("head.weight").unwrap(), "nothing moves");
        });
    }
}

/// A library that fails, or that forgets a gradient.
#[derive(Debug)]
struct Broken {
    inner: Box<dyn Stage>,
    how: &'static str,
}

impl Library for Broken {
    fn stage(&self, spec: StageSpec<'_>) -> LibraryResult<Box<dyn Stage>> {
        let inner = TOY.stage(spec)?;
        Ok(Box::new(Self { inner, how: self.how }))
    }
}

impl Stage for Broken {
    fn params(&self) -> Vec<farwire_train::Param> {
        self.inner.params()
    }

    fn weights(&self, name: &str) -> LibraryResult<Vec<f32>> {
        self.inner.weights(name)
    }

    fn set_weights(&mut self, name: &str, weights: &[f32]) -> LibraryResult<()> {
        self.inner.set_weights(name, weights)
    }

    fn forward(
        &mut self,
        micro: usize,
        input: Input<'_>,
        targets: Option<&[u32]>,
    ) -> LibraryResult<Vec<f32>> {
        if self.how == "fails" {
            Err("out of memory".into())
        } else {
            self.inner.forward(micro, input, targets)
        }
    }

    fn backward(
        &mut self,
        micro: usize,
        gradient: Vec<f32>,
        sink: &mut Sink<'_>,
    ) -> LibraryResult<Option<Vec<f32>>> {
        let how = self.how;
        self.inner.backward(micro, gradient, &mut |name, gradient| match how {
            "forgets" if name == "blocks.1.scale" => Ok(()),
            "cuts short" if name == "blocks.1.scale" => {
                let Values::Host(gradient) = gradient else { unreachable!("in host memory") };
                sink(name, gradient[1..].into())
            }
            _ => sink(name, gradient),
        })
    }
}

#[test]
fn what_a_library_does_wrong_is_said() {
    let (text, comm) = (text(), farwire::local(1).unwrap().remove(0));
    for (how, says) in [
        ("fails", "out of memory"),
        ("forgets", "`blocks.1.scale` got no gradient"),
        ("cuts short", "the gradient of `blocks.1.scale` has 7 elements, but the plan says 8"),
    ] {
        let (model, start, group) = (settings().model, Start::Seed(1), &Group::alone());
        let inner = TOY.stage(StageSpec { model, stage: 0, stages: 1, start, group }).unwrap();
        let mut trainer = Trainer::new(&Broken { inner, how }, &comm, settings(), &text).unwrap();
        let error = trainer.step(false).unwrap_err();
        assert!(error.to_string().contains(says), "{how}: {error}");
        assert_eq!(how == "fails", matches!(error, TrainError::Library(_)), "{error:?}");
    }
    let mut trainer = Trainer::new(&TOY, &comm, settings(), &text).unwrap();
    let error = trainer.set_weights("head.weight", &[1.0]).unwrap_err().to_string();
    assert!(error.contains("`head.weight` has 2048 elements, not 1"), "{error}");
    assert!(trainer.weights("tail.weight").is_err());
}

#[test]
fn an_audit_finds_replicas_that_differ_in_one_bit() {
    on_threads(2, |comm| {
        let settings = Settings { dp: 2, ..settings() };
        let mut trainer = Trainer::new(&TOY, &comm, settings, &text()).unwrap();
        trainer.set_audited(true);
        for _ in 0..3 {
            trainer.step(false).unwrap();
            trainer.audit().unwrap();
        }
        if comm.rank() == 1 {
            let mut weights = trainer.weights("head.weight").unwrap();
            weights[7] = f32::from_bits(weights[7].to_bits() ^ 1);
            trainer.set_weights("head.weight", &weights).unwrap();
        }
        let error = trainer.audit().unwrap_err().to_string();
        assert!(error.contains("audit after step 3: replicas differ"), "{error}");
    });
}

#[test]
fn a_trained_model_writes_bytes_it_has_seen() {
    let comm = farwire::local(1).unwrap().remove(0);
    let settings = Settings { learning_rate: 0.1, steps: 60, ..settings() };
    let mut trainer = Trainer::new(&TOY, &comm, settings.clone(), &text()).unwrap();
    losses(&mut trainer, 60);
    let weights = trainer.gathered_weights().unwrap().unwrap();
    let mut writer = Writer::new(&TOY, weights, settings.model).unwrap();
    let written = writer.write("", 60, 0.0, 1).unwrap();
    assert_eq!(written, writer.write("", 60, 0.0, 1).unwrap());
    assert!(written[1..].bytes().all(|byte| text().contains(&byte)), "{written}");
}

/// The library, with a model of another size than the settings say.
struct Resized {
    width: usize,
    layers: usize,
}

impl Library for Resized {
    fn stage(&self, mut spec: StageSpec<'_>) -> LibraryResult<Box<dyn Stage>> {
        (spec.model.width, spec.model.layers) = (self.width, self.layers);
        TOY.stage(spec)
    }
}

/// The settings are the same, so only the tensors themselves tell the two models apart.
#[test]
fn a_checkpoint_of_a_model_with_other_shapes_is_refused_on_all_ranks_and_changes_nothing() {
    let Config { width, layers, .. } = settings().model;
    let narrow = Resized { width: width / 2, layers };
    for (other, says) in [
        (narrow, "`blocks.0.bias` is [4], but the model needs [8]"),
        (Resized { width, layers: layers / 2 }, "it has no `blocks.2.bias`, which the model has"),
        (Resized { width, layers: layers * 2 }, "`blocks.4.bias`, which the model does not have"),
    ] {
        let name = format!("farwire-shapes-{}-{}", std::process::id(), other.width * other.layers);
        let dir = std::env::temp_dir().join(name);
        let comm = farwire::local(1).unwrap().remove(0);
        let mut saved = Trainer::new(&other, &comm, settings(), &text()).unwrap();
        saved.save(&dir, serde_json::Value::Null).unwrap();
        for layout in [settings()].into_iter().chain(layouts()) {
            on_threads(layout.ranks(), |comm| {
                let mut trainer = Trainer::new(&TOY, &comm, layout.clone(), &text()).unwrap();
                let weights = |trainer: &Trainer| -> Vec<Vec<f32>> {
                    trainer.params().map(|param| trainer.weights(&param.name).unwrap()).collect()
                };
                let before = weights(&trainer);
                let error = trainer.resume(&dir).unwrap_err().to_string();
                assert!(error.contains(says) && error.contains("step-00000000"), "{error}");
                assert_eq!(before, weights(&trainer), "nothing moves");
                trainer.step(false).unwrap();
            });
        }
        std::fs::remove_dir_all(dir).unwrap();
    }
}
