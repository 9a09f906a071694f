//! The trainer and its parts in one process: it learns, gradients travel during backward, and what gets no gradient is named.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on should say where")]

mod common;

use candle_core::{Device, Tensor, Var};
use common::text;
use farwire::CodecChoice;
use farwire::Communicator;
use farwire_candle::{
    DataParallel, Group, Init, Params, Pipeline, Segment, Settings, Stage, TrainError, Trainer, gpt,
};
use farwire_train::{PlanError, Schedule};

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
        let mut trainer = Trainer::new(&comm, Settings { dp: 2, ..settings() }, &text).unwrap();
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
        let buckets: Vec<_> = trainer.trace().iter().filter(|span| span.name.starts_with("bucket")).collect();
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
            let mut trainer = Trainer::new(&comm, settings, &text).unwrap();
            let losses: Vec<u64> = (0..6).map(|_| trainer.step(false).unwrap().loss.to_bits()).collect();
            assert!(trainer.replicas_agree().unwrap());
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
        let mut trainer = Trainer::new(&comm, Settings { dp: 3, batch: 3, ..settings() }, &text).unwrap();
        assert!(!trainer.step(false).unwrap().stop);
        assert!(trainer.step(comm.rank() == 1).unwrap().stop);
    });
}

#[test]
fn gradients_are_cut_to_the_length_allowed() {
    let text = text();
    let comm = farwire::local(1).unwrap().remove(0);
    let after = |clip: f64| {
        let mut trainer = Trainer::new(&comm, Settings { clip, decay: 0.0, ..settings() }, &text).unwrap();
        let report = trainer.step(false).unwrap();
        let first = trainer.params().next().unwrap().var.flatten_all().unwrap().to_vec1::<f32>().unwrap();
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
        (Settings { model: gpt::Config { heads: 5, ..settings.model }, ..settings.clone() }, "change one"),
        (Settings { model: gpt::Config { layers: 0, ..settings.model }, ..settings.clone() }, "at least 1"),
        (Settings { learning_rate: f64::NAN, ..settings.clone() }, "above 0"),
        (Settings { micro_batches: 0, ..settings.clone() }, "at least 1"),
        (Settings { pp: 2, schedule: Schedule::Interleaved { chunks: 2 }, ..settings.clone() }, "use 2"),
    ] {
        let error = wrong.check().unwrap_err().to_string();
        assert!(error.contains(says), "{error}");
    }
    let comm = farwire::local(1).unwrap().remove(0);
    let error = Trainer::new(&comm, Settings { dp: 2, ..settings }, &text()).unwrap_err().to_string();
    assert!(error.contains("is 2 ranks, but there are 1"), "{error}");
}

/// A parameter that the loss does not depend on would silently never learn.
#[test]
fn a_parameter_without_a_gradient_is_named() {
    let mut params = Params::from_seed(1, &Group::alone());
    let used = params.get("used", &[3], Init::Ones, None).unwrap();
    let lost = params.get("lost", &[3], Init::Ones, None).unwrap();
    let segment = Segment::new("one", params.take(), move |x| x * &used + lost.detach());
    let mut stage = Stage::new(vec![segment]);
    let x = Tensor::new(&[1f32, 2.0, 3.0], &Device::Cpu).unwrap();
    let loss = stage.forward(0, &x, Some(&|_, y: &Tensor| y.sum_all())).unwrap();
    let error = stage.backward(0, &loss.ones_like().unwrap(), &mut |_, _| Ok(())).unwrap_err();
    assert!(matches!(&error, TrainError::NoGradient(name) if name == "lost"), "{error}");
}

/// Every micro-batch's loss is told which one it is, under every schedule, and gradients add up to those of the mean.
#[test]
fn the_loss_gets_the_index_of_its_micro_batch() {
    for schedule in ["gpipe", "1f1b", "interleaved:2"] {
        let schedule: Schedule = schedule.parse().unwrap();
        on_threads(2, |comm| {
            let group = Group::of(&comm);
            let mut params = Params::from_seed(1, &Group::alone());
            let mut chunk = |index: usize| {
                let name = format!("w{}", index * 2 + comm.rank());
                let weight = params.get(&name, &[1], Init::Ones, None).unwrap();
                Stage::new(vec![Segment::new(name, params.take(), move |x| x * &weight)])
            };
            let chunks = (0..schedule.chunks()).map(&mut chunk).collect();
            let mut pipeline = Pipeline::new(&group, schedule, 4, chunks, &[1]).unwrap();
            let inputs: Vec<Tensor> =
                (0..4).map(|micro| Tensor::new(&[1.0 + micro as f32], &Device::Cpu).unwrap()).collect();
            // Micro-batch i has input 1 + i and weight 10^i: any mix-up shows in a digit.
            let loss = |micro: usize, y: &Tensor| (y * 10f64.powi(micro as i32))?.sum_all();
            let mut sum = 0.0;
            let flow = pipeline
                .run(&inputs, &loss, &mut |_, gradient| {
                    sum += gradient.to_vec1::<f32>()?[0];
                    Ok(())
                })
                .unwrap();
            assert_eq!(sum, 4321.0 / 4.0 * schedule.chunks() as f32, "{schedule}");
            let mut losses = flow.losses;
            losses.sort_by(f32::total_cmp);
            let expected = if comm.rank() == 1 { vec![1.0, 20.0, 300.0, 4000.0] } else { Vec::new() };
            assert_eq!(losses, expected, "{schedule}");
        });
    }
}

#[test]
fn replicas_of_a_plain_model_start_and_stay_the_same() {
    on_threads(3, |comm| {
        let var = |name: &str, value: f32| {
            (name.to_owned(), Var::from_tensor(&Tensor::new(&[value, 2.0], &Device::Cpu).unwrap()).unwrap())
        };
        let vars = vec![var("b", comm.rank() as f32), var("a", 5.0)];
        let mut replicas = DataParallel::new(&comm, vars.clone(), CodecChoice::default()).unwrap();
        assert_eq!(vars[0].1.to_vec1::<f32>().unwrap(), [0.0, 2.0]);
        let loss =
            ((vars[0].1.as_tensor() * (comm.rank() + 1) as f64).unwrap() + vars[1].1.as_tensor()).unwrap();
        let mut gradients = loss.sum_all().unwrap().backward().unwrap();
        replicas.average(&mut gradients).unwrap();
        assert_eq!(gradients.get(&vars[0].1).unwrap().to_vec1::<f32>().unwrap(), [2.0, 2.0]);
        // A loss that leaves one out.
        let mut gradients = vars[1].1.sum_all().unwrap().backward().unwrap();
        let error = replicas.average(&mut gradients).unwrap_err();
        assert!(matches!(&error, TrainError::NoGradient(name) if name == "b"), "{error}");
        // Ranks with different models.
        let odd = if comm.rank() == 1 { "c" } else { "b" };
        let error = DataParallel::new(&comm, vec![var(odd, 1.0)], CodecChoice::default()).unwrap_err();
        assert!(matches!(error, TrainError::Plan(PlanError::Differ { .. })), "{error}");
    });
}

#[test]
fn a_sparse_codec_is_phased_in() {
    let text = text();
    on_threads(2, |comm| {
        let codec = "topk:0.01".parse().unwrap();
        let settings = Settings { dp: 2, codec, dense_steps: 2, falling_steps: 4, ..settings() };
        let mut trainer = Trainer::new(&comm, settings, &text).unwrap();
        let sent: Vec<_> = (0..9).map(|_| trainer.step(false).unwrap().wire_bytes).collect();
        let falls = |pair: &[u64]| (pair[1] as f64) < 0.99 * pair[0] as f64;
        assert!(!falls(&sent[0..2]), "dense: {sent:?}");
        assert!(sent[1..7].windows(2).all(falls), "less and less: {sent:?}");
        assert!(!falls(&sent[6..8]) && !falls(&sent[7..9]), "then the codec's own: {sent:?}");
        assert!(trainer.replicas_agree().unwrap());
    });
}
