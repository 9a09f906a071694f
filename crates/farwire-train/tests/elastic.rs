//! Training goes on when ranks leave: the same state on all that are left, and nothing lost but what
//! the others owed.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on should say where")]

mod common;

use common::TOY;
use farwire::{Communicator, Elastic, ElasticState};
use farwire_train::gpt::Config;
use farwire_train::{Settings, StepReport, TrainError, Trainer};

const STEPS: usize = 30;

fn settings(codec: &str) -> Settings {
    Settings {
        model: Config { layers: 4, heads: 2, width: 32, context: 8 },
        dp: 4,
        batch: 12,
        steps: STEPS,
        warm_up: 2,
        learning_rate: 1e-2,
        bucket_bytes: 4 << 10,
        codec: codec.parse().unwrap(),
        ..Settings::default()
    }
}

fn text() -> Vec<u8> {
    (0..999)
        .flat_map(|i| format!("{} and {} make {}; ", i % 7, i % 5, i % 7 + i % 5).into_bytes())
        .collect()
}

/// What a rank ends with: its losses, and all its state.
type End = (Vec<f64>, Vec<(String, Vec<u8>)>);

/// How ranks go.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Going {
    /// Without a word.
    Lost,
    /// In good order.
    Leaving,
}

/// Trains on four ranks, of which some go after a step: (rank, step). Those that are left.
fn train(codec: &str, leaving: &[(usize, usize)], going: Going) -> Vec<End> {
    let rank = |comm: Communicator| -> Result<Option<End>, TrainError> {
        let me = comm.rank();
        let mut trainer = Trainer::new(&TOY, &comm, settings(codec), &text())?;
        trainer.set_elastic()?;
        let mut elastic = Elastic::new(comm);
        let mut losses = Vec::new();
        let mut lost = 0.0;
        while trainer.steps_done() < STEPS {
            let goes = leaving.contains(&(me, trainer.steps_done()));
            if goes && going == Going::Lost {
                return Ok(None);
            }
            trainer.set_leaving(goes);
            let report: StepReport =
                elastic.step(&mut trainer, |_, trainer| trainer.step(false))?;
            losses.push(report.loss);
            if report.leaving > 0 && elastic.part(&mut trainer, goes)? {
                return Ok(None);
            }
            if !elastic.take_changes().is_empty() {
                lost += trainer.lost_residual();
            }
        }
        let loses = codec != "none" && !leaving.is_empty() && going == Going::Lost;
        assert_eq!(lost > 0.0, loses, "{codec} lost {lost}");
        assert!(going == Going::Lost || losses.len() == STEPS, "no step was made twice");
        assert_eq!(elastic.comm().size(), 4 - leaving.len());
        assert!(trainer.replicas_agree()?);
        let saved = trainer.save();
        // Nobody goes before all are done.
        elastic.comm().barrier().wait()?;
        Ok(Some((losses, saved)))
    };
    std::thread::scope(|scope| {
        let ranks = farwire::local(4).unwrap();
        let ranks: Vec<_> =
            ranks.into_iter().map(|comm| scope.spawn(move || rank(comm).unwrap())).collect();
        ranks.into_iter().filter_map(|rank| rank.join().unwrap()).collect()
    })
}

#[test]
fn a_run_that_loses_ranks_ends_alike_on_all_that_are_left() {
    for codec in ["none", "int8", "topk:0.1"] {
        let whole = train(codec, &[], Going::Lost);
        let last = |run: &[End]| run[0].0.iter().rev().take(5).sum::<f64>() / 5.0;
        for going in [Going::Lost, Going::Leaving] {
            let left = train(codec, &[(0, 5), (2, 12)], going);
            assert_eq!((whole.len(), left.len()), (4, 2));
            for run in [&whole, &left] {
                assert!(run.iter().all(|(_, state)| *state == run[0].1), "{codec}: the same bits");
                // A rank that missed the end of a step has no report of it.
                assert!(run.iter().all(|(losses, _)| losses.len() + 2 >= STEPS), "{codec}");
            }
            let (whole, left) = (last(&whole), last(&left));
            println!("{codec}, {going:?}: loss {whole:.4} with all, {left:.4} with fewer");
            assert!((left / whole - 1.0).abs() < 0.05, "{codec}: {left} and {whole}");
        }
    }
}

/// A rank that joins with other settings must not take part; ranks compare the names of buffers.
#[test]
fn other_settings_show_in_the_state() {
    let about = |settings: Settings| {
        let comm = farwire::local(1).unwrap().remove(0);
        let trainer = Trainer::new(&TOY, &comm, settings, &text()).unwrap();
        trainer.save()[0].0.clone()
    };
    let mine = || Settings { dp: 1, ..settings("int8") };
    assert_eq!(about(mine()), about(mine()));
    for other in [
        Settings { steps: STEPS + 1, ..mine() },
        Settings { codec: "none".parse().unwrap(), ..mine() },
        Settings { learning_rate: 2e-2, ..mine() },
        Settings { batch: 24, ..mine() },
        Settings { seed: 7, ..mine() },
    ] {
        assert_ne!(about(mine()), about(other));
    }
}

#[test]
fn what_cannot_be_elastic_is_refused() {
    let comm = farwire::local(1).unwrap().remove(0);
    let alone = Settings { dp: 1, shard_optimizer: true, ..settings("none") };
    let mut trainer = Trainer::new(&TOY, &comm, alone, &text()).unwrap();
    let error = trainer.set_elastic().unwrap_err().to_string();
    assert!(error.contains("--shard-optimizer"), "{error}");
}
