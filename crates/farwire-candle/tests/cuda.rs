//! Training on a card against training on the CPU. Without a card the tests say that they are
//! skipped; `FARWIRE_REQUIRE_GPU=1` makes that a failure.

#![cfg(feature = "cuda")]
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod common;

use std::sync::Mutex;

use common::text;
use farwire::Communicator;
use farwire_candle::{Candle, CandleCuda};
use farwire_train::{Library, OnNan, Settings, TrainError, Trainer, gpt};

fn settings() -> Settings {
    Settings {
        model: gpt::Config { layers: 2, heads: 4, width: 64, context: 16 },
        batch: 8,
        steps: 30,
        warm_up: 2,
        bucket_bytes: 16 << 10,
        ..Settings::default()
    }
}

/// A card, if there is one.
fn card() -> Option<CandleCuda> {
    match CandleCuda::new(0) {
        Ok(card) => Some(card),
        Err(error) if std::env::var_os("FARWIRE_REQUIRE_GPU").is_some() => panic!("{error}"),
        Err(error) => {
            eprintln!("skipped: {error}");
            None
        }
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

/// The losses of `steps` steps. Each rank makes its own library.
fn losses(make: fn() -> Box<dyn Library>, settings: &Settings, steps: usize) -> Vec<f64> {
    let (text, first) = (text(), Mutex::new(Vec::new()));
    on_threads(settings.ranks(), |comm| {
        let mut trainer = Trainer::new(&*make(), &comm, settings.clone(), &text).unwrap();
        let losses = (0..steps).map(|_| trainer.step(false).unwrap().loss).collect();
        assert!(trainer.replicas_agree().unwrap(), "{settings:?}");
        if comm.rank() == 0 {
            *first.lock().unwrap() = losses;
        }
    });
    first.into_inner().unwrap()
}

fn on_cpu() -> Box<dyn Library> {
    Box::new(Candle)
}

fn on_card() -> Box<dyn Library> {
    Box::new(CandleCuda::new(0).unwrap())
}

fn layouts() -> Vec<Settings> {
    let with = |codec: &str| Settings { codec: codec.parse().unwrap(), ..settings() };
    vec![
        Settings { dp: 1, ..settings() },
        Settings { dp: 2, ..settings() },
        Settings { dp: 2, ..with("int8") },
        Settings { dp: 2, micro_batches: 2, ..with("int8") },
        Settings { dp: 2, ..with("powersgd:4") },
        Settings { dp: 2, shard_optimizer: true, ..with("bf16") },
        Settings { tp: 2, ..settings() },
        Settings { pp: 2, micro_batches: 4, ..settings() },
        Settings { dp: 2, tp: 2, pp: 2, micro_batches: 2, ..with("int8") },
    ]
}

#[test]
fn the_loss_on_a_card_is_that_on_the_cpu() {
    if card().is_none() {
        return;
    }
    for settings in layouts() {
        let (cpu, card) = (losses(on_cpu, &settings, 20), losses(on_card, &settings, 20));
        let off = cpu.iter().zip(&card).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
        let Settings { dp, tp, pp, codec, .. } = &settings;
        eprintln!("dp {dp} tp {tp} pp {pp} {codec}: {off:.1e} off, {:.4} at the end", cpu[19]);
        assert!(cpu[19] < cpu[0] && off < 1e-3, "{settings:?}:\n{cpu:?}\n{card:?}");
    }
}

#[test]
fn a_checkpoint_of_a_card_goes_on_there_and_on_the_cpu() {
    let Some(_) = card() else { return };
    let text = text();
    let codec = "topk:0.1".parse().unwrap();
    let settings = Settings { dp: 2, codec, dense_steps: 0, falling_steps: 0, ..settings() };
    let dir = std::env::temp_dir().join(format!("farwire-cuda-{}", std::process::id()));
    on_threads(2, |comm| {
        let mut trainer = Trainer::new(&*on_card(), &comm, settings.clone(), &text).unwrap();
        (0..6).for_each(|_| drop(trainer.step(false).unwrap()));
        trainer.save(&dir, serde_json::Value::Null).unwrap();
        let expected = trainer.step(false).unwrap();
        for library in [on_card(), on_cpu()] {
            let mut trainer = Trainer::new(&*library, &comm, settings.clone(), &text).unwrap();
            trainer.resume(&dir).unwrap();
            let report = trainer.step(false).unwrap();
            let (loss, norm) = (report.loss - expected.loss, report.norm / expected.norm - 1.0);
            assert!(loss.abs() < 1e-5 && norm.abs() < 1e-3, "{report:?}\n{expected:?}");
        }
    });
    std::fs::remove_dir_all(&dir).unwrap();
}

#[test]
fn a_nan_on_one_card_is_named_and_moves_no_weight() {
    let Some(_) = card() else { return };
    let text = text();
    for settings in layouts() {
        if settings.ranks() == 1 {
            continue;
        }
        on_threads(settings.ranks(), |comm| {
            let settings = Settings { on_nan: OnNan::Stop, ..settings.clone() };
            let mut trainer = Trainer::new(&*on_card(), &comm, settings.clone(), &text).unwrap();
            trainer.step(false).unwrap();
            let names: Vec<String> = trainer.params().map(|param| param.name.clone()).collect();
            let name = names.iter().find(|name| name.ends_with("weight")).unwrap();
            let good = trainer.weights(name).unwrap();
            if comm.rank() + 1 == comm.size() {
                trainer.set_weights(name, &vec![f32::NAN; good.len()]).unwrap();
            }
            let bits = |trainer: &Trainer| {
                let bits = |name: &String| {
                    let weights = trainer.weights(name).unwrap();
                    weights.into_iter().map(f32::to_bits).collect::<Vec<u32>>()
                };
                names.iter().map(bits).collect::<Vec<_>>()
            };
            let before = bits(&trainer);
            let error = trainer.step(false).unwrap_err();
            assert!(matches!(error, TrainError::NotFinite { step: 1, .. }), "{error}");
            let error = error.to_string();
            assert!(error.contains("the gradient of `") && error.contains("is NaN"), "{error}");
            let said: Vec<u64> = error.bytes().map(u64::from).collect();
            assert!(comm.is_in_sync(&said).unwrap(), "ranks say different things: {error}");
            assert!(before == bits(&trainer), "{settings:?}");
        });
    }
}

#[test]
fn memory_on_the_card_is_flat_and_only_messages_cross_the_bus() {
    let Some(_) = card() else { return };
    let text = text();
    let model = gpt::Config { layers: 2, heads: 4, width: 256, context: 32 };
    let codec = "topk:64/4096".parse().unwrap();
    let settings = Settings { model, dp: 2, codec, dense_steps: 0, falling_steps: 0, ..settings() };
    on_threads(2, |comm| {
        let library = CandleCuda::new(0).unwrap();
        let mut trainer = Trainer::new(&library, &comm, settings.clone(), &text).unwrap();
        let mut step = || trainer.step(false).unwrap();
        (0..10).for_each(|_| drop(step()));
        let (bus, free) = (library.device().bus(), library.device().memory().unwrap().0);
        let mut wire = 0;
        for _ in 0..100 {
            wire += step().wire_bytes;
        }
        comm.barrier().wait().unwrap();
        let (crossed, left) = (library.device().bus() - bus, library.device().memory().unwrap().0);
        let dense = 100 * step().dense_bytes / 2;
        eprintln!(
            "{crossed:?}, {wire} on the wire by both, {dense} dense; {free}, then {left} free"
        );
        assert!(free.saturating_sub(left) <= 32 << 20, "{free} bytes free, then {left}");
        // Two ranks each send half of `wire`. Norms and flags are little beside it.
        for bytes in [crossed.to_host, crossed.to_card] {
            assert!(bytes < wire / 2 + wire / 5, "{crossed:?}, {wire} on the wire by both");
        }
    });
}
