//! The trainer in one process: it learns, every parameter takes part, and backward overlaps with the exchange.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on should say where")]

use farwire::Communicator;
use farwire_candle::{Settings, Trainer, embedded, gpt};

fn settings() -> Settings {
    Settings {
        model: gpt::Config { layers: 4, heads: 4, width: 32, context: 16 },
        batch: 8,
        steps: 20,
        warm_up: 2,
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
fn speed() {
    let s = Settings { model: gpt::Config::default(), batch: 4, ..Settings::default() };
    let text = embedded();
    on_threads(1, |comm| {
        let mut trainer = Trainer::new(&comm, s.clone(), &text).unwrap();
        for _ in 0..15 {
            let report = trainer.step(false).unwrap();
            eprintln!("{} {:?}", report.loss, report.times);
        }
        for span in trainer.trace() {
            eprintln!("{span:?}");
        }
    });
}

#[test]
fn the_loss_falls() {
    let text = embedded();
    on_threads(2, |comm| {
        let mut trainer =
            Trainer::new(&comm, Settings { dp: 2, steps: 60, learning_rate: 5e-3, ..settings() }, &text)
                .unwrap();
        let losses: Vec<f64> = (0..60).map(|_| trainer.step(false).unwrap().loss).collect();
        let mean = |losses: &[f64]| losses.iter().sum::<f64>() / losses.len() as f64;
        assert!((losses[0] - 256f64.ln()).abs() < 0.2, "a model that knows nothing: {}", losses[0]);
        assert!(mean(&losses[50..]) < 3.6, "{losses:?}");
    });
}
