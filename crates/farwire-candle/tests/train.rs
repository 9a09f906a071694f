//! The trainer and its parts in one process: it learns, gradients travel during backward, and a
//! parameter that gets no gradient is named.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on should say where")]

mod common;

use candle_core::{DType, Device, Tensor, Var};
use common::text;
use farwire::CodecChoice;
use farwire::Communicator;
use farwire_candle::{Candle, DataParallel, Params, Segment, Stage};
use farwire_train::{
    Batch, Group, Init, Input, OnNan, ParameterListError, Pipeline, Schedule, Settings, StepReport,
    TrainError, Trainer, Values, gpt,
};

fn settings() -> Settings {
    Settings {
        model: gpt::Config { layers: 4, heads: 4, width: 32, context: 16 },
        batch: 8,
        steps: 60,
        warm_up: 2,
        learning_rate: 5e-3,
        bucket_bytes: 16 << 10,
        ..Settings::default()
    }
}

fn on_threads(ranks: usize, rank: impl Fn(Communicator) + Sync) {
    let rank = &rank;
    std::thread::scope(|scope| {
        for comm in farwire::local(ranks).unwrap() {
            scope.spawn(move || rank(comm));
        }
    });
}

#[test]
fn the_loss_falls_and_the_exchange_overlaps_backward() {
    let text = text();
    on_threads(2, |comm| {
        let mut trainer =
            Trainer::new(&Candle, &comm, Settings { dp: 2, ..settings() }, &text).unwrap();
        let reports: Vec<_> = (0..60).map(|_| trainer.step(false).unwrap()).collect();
        let mean = |range: std::ops::Range<usize>| {
            reports[range].iter().map(|report| report.loss).sum::<f64>() / 10.0
        };
        assert!((reports[0].loss - 256f64.ln()).abs() < 0.2, "knows nothing: {}", reports[0].loss);
        assert!(mean(50..60) < 3.6 && mean(50..60) < mean(0..10) - 1.0, "{}", mean(50..60));
        // Counted bytes: a dense exchange, its headers, and a few small sums.
        let (sent, dense) = (reports[7].wire_bytes, reports[7].dense_bytes);
        assert!(sent >= dense && sent < dense + dense / 10, "{sent} and {dense}");
        // All but the last bucket leave before backward ends.
        let end = trainer
            .trace()
            .iter()
            .filter(|span| span.name.starts_with("backward"))
            .map(|span| span.end)
            .max();
        let buckets: Vec<_> =
            trainer.trace().iter().filter(|span| span.name.starts_with("bucket")).collect();
        assert!(buckets.len() > 5);
        let early = buckets.iter().filter(|span| span.start < end.unwrap()).count();
        assert!(early >= buckets.len() - 1, "{early} of {}", buckets.len());
    });
}

/// ZeRO-1: the state is shared out, and nothing else changes.
#[test]
fn a_sharded_optimizer_takes_the_same_steps() {
    let text = text();
    on_threads(3, |comm| {
        let plain = Settings { dp: 3, batch: 6, ..settings() };
        let sharded = Settings { shard_optimizer: true, ..plain.clone() };
        let run = |settings: Settings| {
            let mut trainer = Trainer::new(&Candle, &comm, settings, &text).unwrap();
            let reports: Vec<_> = (0..6).map(|_| trainer.step(false).unwrap()).collect();
            assert!(trainer.replicas_agree().unwrap());
            // Updates count with the next step.
            assert!(reports[1..].iter().all(|report| report.wire_bytes >= report.dense_bytes));
            let losses: Vec<u64> = reports.iter().map(|report| report.loss.to_bits()).collect();
            (losses, trainer.optimizer_elements())
        };
        let ((expected, all), (losses, mine)) = (run(plain), run(sharded));
        assert_eq!(losses, expected);
        assert!(mine * 5 < all * 2, "{mine} of {all}");
    });
}

#[test]
fn one_ranks_wish_to_stop_reaches_all() {
    let text = text();
    on_threads(3, |comm| {
        let mut trainer =
            Trainer::new(&Candle, &comm, Settings { dp: 3, batch: 3, ..settings() }, &text)
                .unwrap();
        assert!(!trainer.step(false).unwrap().stop);
        assert!(trainer.step(comm.rank() == 1).unwrap().stop);
    });
}

#[test]
fn gradients_are_cut_to_the_length_allowed() {
    let text = text();
    let comm = farwire::local(1).unwrap().remove(0);
    let after = |clip: f64| {
        let mut trainer =
            Trainer::new(&Candle, &comm, Settings { clip, decay: 0.0, ..settings() }, &text)
                .unwrap();
        let report = trainer.step(false).unwrap();
        let first = trainer.weights(&trainer.params().next().unwrap().name).unwrap();
        (report.norm, first)
    };
    let (norm, plain) = after(1e9);
    assert!(norm > 0.1);
    // AdamW's first step does not depend on the gradient's length, until ε matters.
    let (same_norm, cut) = after(norm * 1e-7);
    assert!((norm - same_norm).abs() < 1e-9 && plain != cut);
}

#[test]
fn settings_that_contradict_each_other_are_refused_with_what_to_use() {
    let settings = settings();
    for (wrong, says) in [
        (Settings { batch: 9, dp: 2, ..settings.clone() }, "use a multiple of 2"),
        (Settings { tp: 3, ..settings.clone() }, "use a multiple of 3 heads"),
        (Settings { pp: 3, ..settings.clone() }, "use a multiple of 3 layers"),
        (
            Settings { model: gpt::Config { heads: 5, ..settings.model }, ..settings.clone() },
            "change one",
        ),
        (
            Settings { model: gpt::Config { layers: 0, ..settings.model }, ..settings.clone() },
            "at least 1",
        ),
        (Settings { learning_rate: f64::NAN, ..settings.clone() }, "above 0"),
        (Settings { micro_batches: 0, ..settings.clone() }, "at least 1"),
        (
            Settings { pp: 2, schedule: Schedule::Interleaved { chunks: 2 }, ..settings.clone() },
            "use 2",
        ),
    ] {
        let error = wrong.check().unwrap_err().to_string();
        assert!(error.contains(says), "{error}");
    }
    let comm = farwire::local(1).unwrap().remove(0);
    let error = Trainer::new(&Candle, &comm, Settings { dp: 2, ..settings }, &text())
        .unwrap_err()
        .to_string();
    assert!(error.contains("is 2 ranks, but there are 1"), "{error}");
}

/// A parameter that the loss does not depend on would silently never learn.
#[test]
fn a_parameter_without_a_gradient_is_named() {
    let mut params = Params::from_seed(1, &Group::alone());
    let used = params.get("used", &[3], Init::Ones, None).unwrap();
    let lost = params.get("lost", &[3], Init::Ones, None).unwrap();
    let segment = Segment::new("one", params.take(), move |x| x * &used + lost.detach());
    let mut stage = Stage::new(vec![segment], &[], |y, _| y.sum_all());
    let stage: &mut dyn farwire_train::Stage = &mut stage;
    let x = Input::Hidden(vec![1.0, 2.0, 3.0]);
    stage.forward(0, x, Some(&[0])).unwrap();
    let error = TrainError::from(stage.backward(0, vec![1.0], &mut |_, _| Ok(())).unwrap_err());
    assert!(matches!(&error, TrainError::NoGradient(name) if name == "lost"), "{error}");
}

/// Under every schedule the loss gets the targets of its own micro-batch, and gradients add up to
/// those of the mean.
#[test]
fn the_loss_gets_the_index_of_its_micro_batch() {
    for schedule in ["gpipe", "1f1b", "interleaved:2"] {
        let schedule: Schedule = schedule.parse().unwrap();
        on_threads(2, |comm| {
            let group = Group::of(&comm);
            let mut params = Params::from_seed(1, &Group::alone());
            // Micro-batch i has input 1 + i and weight 10^i: any mix-up shows in a digit.
            let loss = |y: &Tensor, targets: &Tensor| {
                let micro = targets.to_vec1::<u32>()?[0];
                (y * 10f64.powi(micro as i32))?.sum_all()
            };
            let mut chunk = |index: usize| -> Box<dyn farwire_train::Stage> {
                let name = format!("w{}", index * 2 + comm.rank());
                let weight = params.get(&name, &[1], Init::Ones, None).unwrap();
                let forward = move |x: &Tensor| x.to_dtype(DType::F32)?.flatten_all()? * &weight;
                Box::new(Stage::new(vec![Segment::new(name, params.take(), forward)], &[], loss))
            };
            let chunks = (0..schedule.chunks()).map(&mut chunk).collect();
            let mut pipeline = Pipeline::new(&group, schedule, 4, chunks, 1).unwrap();
            let batch =
                |micro| Batch { sequences: 1, inputs: vec![1 + micro], targets: vec![micro] };
            let batches: Vec<Batch> = (0..4).map(batch).collect();
            let mut sum = 0.0;
            let flow = pipeline
                .run(&batches, &mut |_, gradient| {
                    let Values::Host(gradient) = gradient else { unreachable!("on the CPU") };
                    sum += gradient[0];
                    Ok(())
                })
                .unwrap();
            assert_eq!(sum, 4321.0 / 4.0 * schedule.chunks() as f32, "{schedule}");
            let mut losses = flow.losses;
            losses.sort_by(f32::total_cmp);
            let expected =
                if comm.rank() == 1 { vec![1.0, 20.0, 300.0, 4000.0] } else { Vec::new() };
            assert_eq!(losses, expected, "{schedule}");
        });
    }
}

#[test]
fn replicas_of_a_plain_model_start_and_stay_the_same() {
    on_threads(3, |comm| {
        let var = |name: &str, value: f32| {
            (
                name.to_owned(),
                Var::from_tensor(&Tensor::new(&[value, 2.0], &Device::Cpu).unwrap()).unwrap(),
            )
        };
        let vars = vec![var("b", comm.rank() as f32), var("a", 5.0)];
        let mut replicas = DataParallel::new(&comm, vars.clone(), CodecChoice::default()).unwrap();
        assert_eq!(vars[0].1.to_vec1::<f32>().unwrap(), [0.0, 2.0]);
        let loss = ((vars[0].1.as_tensor() * (comm.rank() + 1) as f64).unwrap()
            + vars[1].1.as_tensor())
        .unwrap();
        let mut gradients = loss.sum_all().unwrap().backward().unwrap();
        replicas.average(&mut gradients).unwrap();
        assert_eq!(gradients.get(&vars[0].1).unwrap().to_vec1::<f32>().unwrap(), [2.0, 2.0]);
        // A loss that leaves one variable out.
        let mut gradients = vars[1].1.sum_all().unwrap().backward().unwrap();
        let error = replicas.average(&mut gradients).unwrap_err();
        assert!(matches!(&error, TrainError::NoGradient(name) if name == "b"), "{error}");
        // Ranks with different models.
        let odd = if comm.rank() == 1 { "c" } else { "b" };
        let error =
            DataParallel::new(&comm, vec![var(odd, 1.0)], CodecChoice::default()).unwrap_err();
        assert!(
            matches!(error, TrainError::ParameterList(ParameterListError::Differ { .. })),
            "{error}"
        );
    });
}

#[test]
fn a_sparse_codec_is_phased_in() {
    let text = text();
    on_threads(2, |comm| {
        let codec = "topk:0.01".parse().unwrap();
        let settings = Settings { dp: 2, codec, dense_steps: 2, falling_steps: 4, ..settings() };
        let mut trainer = Trainer::new(&Candle, &comm, settings, &text).unwrap();
        let sent: Vec<_> = (0..9).map(|_| trainer.step(false).unwrap().wire_bytes).collect();
        let falls = |pair: &[u64]| (pair[1] as f64) < 0.99 * pair[0] as f64;
        assert!(!falls(&sent[0..2]), "dense: {sent:?}");
        assert!(sent[1..7].windows(2).all(falls), "less and less: {sent:?}");
        assert!(!falls(&sent[6..8]) && !falls(&sent[7..9]), "then the codec's own: {sent:?}");
        assert!(trainer.replicas_agree().unwrap());
    });
}

/// Small, and with matrices that are worth a codec.
fn small() -> Settings {
    let model = gpt::Config { layers: 2, heads: 2, width: 32, context: 8 };
    Settings { model, bucket_bytes: 4 << 10, warm_up: 0, ..settings() }
}

/// Layouts and codecs in which a NaN may turn up on one rank.
fn places() -> Vec<Settings> {
    let codec = |text: &str| text.parse::<CodecChoice>().unwrap();
    let small = small();
    vec![
        Settings { dp: 2, ..small.clone() },
        Settings { dp: 2, codec: codec("int8"), ..small.clone() },
        Settings { dp: 2, codec: codec("topk:0.1"), shard_optimizer: true, ..small.clone() },
        Settings { dp: 2, codec: codec("powersgd:2"), micro_batches: 2, ..small.clone() },
        Settings { tp: 2, ..small.clone() },
        Settings { pp: 2, micro_batches: 2, ..small.clone() },
        Settings { dp: 2, tp: 2, codec: codec("topk:0.1"), shard_optimizer: true, ..small.clone() },
        Settings { dp: 2, pp: 2, codec: codec("randk:0.1"), ..small },
    ]
}

fn weights(trainer: &Trainer) -> Vec<Vec<u32>> {
    let bits = |weights: Vec<f32>| weights.into_iter().map(f32::to_bits).collect();
    trainer.params().map(|param| bits(trainer.weights(&param.name).unwrap())).collect()
}

/// Fills some parameter of this rank with a value. Returns its name, and what it held before.
fn spoil(trainer: &mut Trainer, value: f32) -> (String, Vec<f32>) {
    let name = trainer.params().find(|param| param.name.ends_with("weight")).unwrap().name.clone();
    let before = trainer.weights(&name).unwrap();
    trainer.set_weights(&name, &vec![value; before.len()]).unwrap();
    (name, before)
}

#[test]
fn a_nan_on_one_rank_stops_all_ranks_before_any_weight_moves() {
    let text = text();
    for settings in places() {
        for value in [f32::NAN, f32::INFINITY] {
            on_threads(settings.ranks(), |comm| {
                let mut trainer = Trainer::new(&Candle, &comm, settings.clone(), &text).unwrap();
                trainer.step(false).unwrap();
                if comm.rank() + 1 == comm.size() {
                    spoil(&mut trainer, value);
                }
                let before = weights(&trainer);
                let error = trainer.step(false).unwrap_err();
                assert!(matches!(error, TrainError::NotFinite { step: 1, .. }), "{error}");
                let error = error.to_string();
                assert!(
                    error.contains("step 2: the gradient of `") && error.contains("on rank "),
                    "{error}"
                );
                let said: Vec<u64> = error.bytes().map(u64::from).collect();
                assert!(comm.is_in_sync(&said).unwrap(), "ranks say different things: {error}");
                assert!(before == weights(&trainer), "{settings:?}");
            });
        }
    }
}

#[test]
fn a_skipped_step_moves_nothing_on_any_rank() {
    let text = text();
    for (index, settings) in places().into_iter().enumerate() {
        let settings = Settings { on_nan: OnNan::Skip, ..settings };
        let dir = |when: &str| {
            std::env::temp_dir().join(format!("farwire-skip-{index}-{when}-{}", std::process::id()))
        };
        on_threads(settings.ranks(), |comm| {
            let mut trainer = Trainer::new(&Candle, &comm, settings.clone(), &text).unwrap();
            for _ in 0..2 {
                assert_eq!(trainer.step(false).unwrap().skipped, None);
            }
            trainer.save(&dir("before"), serde_json::Value::Null).unwrap();
            let spoiled = (comm.rank() + 1 == comm.size()).then(|| spoil(&mut trainer, f32::NAN));
            let report = trainer.step(false).unwrap();
            assert!(report.skipped.unwrap().contains("the gradient of `"), "{settings:?}");
            if let Some((name, before)) = spoiled {
                trainer.set_weights(&name, &before).unwrap();
            }
            assert_eq!((trainer.steps_done(), trainer.steps_skipped()), (3, 1));
            trainer.save(&dir("after"), serde_json::Value::Null).unwrap();
            assert!(trainer.replicas_agree().unwrap());
            let report = trainer.step(false).unwrap();
            assert!(report.skipped.is_none() && report.loss.is_finite());
            assert!(trainer.replicas_agree().unwrap());
        });
        let names = (0..settings.ranks()).map(|rank| format!("residuals.rank{rank}.safetensors"));
        for name in
            names.chain(["model.safetensors".to_owned(), "optimizer.safetensors".to_owned()])
        {
            let read =
                |when: &str, step: &str| std::fs::read(dir(when).join(step).join(&name)).unwrap();
            assert!(
                read("before", "step-00000002") == read("after", "step-00000003"),
                "{name} {settings:?}"
            );
        }
        ["before", "after"].iter().for_each(|when| std::fs::remove_dir_all(dir(when)).unwrap());
    }
}

/// A skipped step does not count for the optimizer, and a resumed run knows that.
#[test]
fn a_run_with_a_skipped_step_goes_on_bit_for_bit() {
    let text = text();
    let settings = Settings { on_nan: OnNan::Skip, ..small() };
    let dir = std::env::temp_dir().join(format!("farwire-skipped-{}", std::process::id()));
    let comm = farwire::local(1).unwrap().remove(0);
    let mut trainer = Trainer::new(&Candle, &comm, settings.clone(), &text).unwrap();
    trainer.step(false).unwrap();
    let (name, before) = spoil(&mut trainer, f32::NAN);
    let report = trainer.step(false).unwrap();
    trainer.set_weights(&name, &before).unwrap();
    trainer.step(false).unwrap();
    // NaNs in the notes come back as such.
    assert!(report.norm.is_nan());
    trainer.save(&dir, serde_json::to_value(vec![report]).unwrap()).unwrap();
    let mut resumed = Trainer::new(&Candle, &comm, settings, &text).unwrap();
    let about = resumed.resume(&dir).unwrap();
    assert_eq!((about.step, about.skipped, resumed.steps_skipped()), (3, 1, 1));
    let reports: Vec<StepReport> = serde_json::from_value(about.notes).unwrap();
    assert!(reports[0].norm.is_nan() && reports[0].skipped.is_some());
    for _ in 0..3 {
        let (one, other) = (trainer.step(false).unwrap(), resumed.step(false).unwrap());
        assert_eq!(one.loss.to_bits(), other.loss.to_bits());
    }
    assert!(weights(&trainer) == weights(&resumed));
    std::fs::remove_dir_all(dir).unwrap();
}

#[test]
fn a_run_that_only_skips_ends_with_an_error() {
    let text = text();
    let model = gpt::Config { layers: 1, heads: 1, width: 8, context: 4 };
    let settings = Settings { model, dp: 2, on_nan: OnNan::Skip, ..settings() };
    on_threads(2, |comm| {
        let mut trainer = Trainer::new(&Candle, &comm, settings.clone(), &text).unwrap();
        if comm.rank() == 1 {
            spoil(&mut trainer, f32::NAN);
        }
        for _ in 0..99 {
            assert!(trainer.step(false).unwrap().skipped.is_some());
        }
        let error = trainer.step(false).unwrap_err().to_string();
        assert!(error.contains("100 steps in a row") && error.contains("on rank 1"), "{error}");
    });
}

/// For your own models: all replicas get the error, nothing has changed, and the next step works.
#[test]
fn replicas_of_a_plain_model_are_told_of_a_nan_and_go_on() {
    for codec in ["none", "topk:0.1"] {
        on_threads(2, |comm| {
            let var = |name: &str| {
                let ones = Tensor::ones(2048, DType::F32, &Device::Cpu).unwrap();
                (name.to_owned(), Var::from_tensor(&ones).unwrap())
            };
            let vars = [var("a"), var("b")];
            let mut replicas =
                DataParallel::new(&comm, vars.clone(), codec.parse().unwrap()).unwrap();
            let mut average = |factor: f32| {
                let factor = Tensor::full(factor, 2048, &Device::Cpu).unwrap();
                let loss =
                    (vars[0].1.as_tensor() + (vars[1].1.as_tensor() * factor).unwrap()).unwrap();
                let mut gradients = loss.sum_all().unwrap().backward().unwrap();
                let result = replicas.average(&mut gradients).map(|_| ());
                (result, gradients.get(&vars[0].1).unwrap().to_vec1::<f32>().unwrap())
            };
            average(1.0).0.unwrap();
            let (result, gradient) = average(if comm.rank() == 0 { f32::NAN } else { 1.0 });
            let error = result.unwrap_err().to_string();
            assert!(error.contains("step 2: the gradient of `b` on rank 0 is NaN"), "{error}");
            assert_eq!(gradient, [1.0; 2048], "as it was");
            average(1.0).0.unwrap();
            // All are finite, but their sum is not.
            let error = average(f32::MAX).0.unwrap_err().to_string();
            assert!(error.contains("`b`"), "{error}");
            average(1.0).0.unwrap();
        });
    }
}
