//! Training goes on when ranks leave: all that are left have the same state, and nothing is lost
//! but what lost ranks owed.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on should say where")]

mod common;

use common::TOY;
use farwire::{Communicator, Elastic, ElasticState, GroupFault};
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

/// What a rank ends with: its losses, and its share of the state; none if it had no place.
type End = (Vec<f64>, Option<Vec<(String, Vec<u8>)>>);

/// The error that ends a rank which is to be lost.
const GONE: &str = "gone";

/// How ranks go.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Going {
    /// Without a word.
    Lost,
    /// In good order.
    Leaving,
}

/// Trains on `ranks` ranks, of which some go after a step: (rank, step). Returns what the remaining
/// ranks end with, by the rank that they had at first.
fn train(
    ranks: usize,
    settings: &Settings,
    leaving: &[(usize, usize)],
    going: Going,
) -> Result<Vec<(usize, End)>, TrainError> {
    let shares = settings.tp * settings.pp;
    let codec = settings.codec.to_string();
    let rank = |comm: Communicator| -> Result<Option<End>, TrainError> {
        let me = comm.rank();
        let mut trainer = Trainer::elastic(&TOY, settings.clone(), &text())?;
        trainer.set_audited(true);
        let mut elastic = Elastic::new(comm);
        let mut losses = Vec::new();
        let mut lost = 0.0;
        while trainer.steps_done() < STEPS {
            let goes = |trainer: &Trainer| {
                leaving.iter().any(|(rank, step)| *rank == me && trainer.steps_done() >= *step)
            };
            let leaves = goes(&trainer) && going == Going::Leaving;
            trainer.set_leaving(leaves);
            let report: Result<StepReport, _> = elastic.step(&mut trainer, |_, trainer| {
                // Here, so that a rank that missed the end of a step does not make the next one.
                match goes(trainer) && going == Going::Lost {
                    true => Err(TrainError::Settings(GONE.to_owned())),
                    false => trainer.step(false),
                }
            });
            let report = match report {
                Err(TrainError::Settings(text)) if text == GONE => return Ok(None),
                report => report?,
            };
            losses.push(report.loss);
            if trainer.has_place() {
                // A rank lost meanwhile is missed in the next step.
                trainer
                    .audit()
                    .or_else(|error| error.is_group_fault().then_some(()).ok_or(error))?;
            }
            if report.leaving > 0 && elastic.part(&mut trainer, leaves)? {
                return Ok(None);
            }
            if !elastic.take_changes().is_empty() {
                lost += trainer.lost_residual();
            }
        }
        let loses = codec != "none" && !leaving.is_empty() && going == Going::Lost;
        assert_eq!(lost > 0.0, loses, "{codec} lost {lost}");
        assert!(going == Going::Lost || losses.len() == STEPS, "no step was made twice");
        let left = ranks - leaving.len();
        assert_eq!((elastic.comm().size(), trainer.waiting()), (left, left % shares));
        if trainer.has_place() {
            assert_eq!(trainer.mesh().size("dp"), left / shares);
            assert!(trainer.replicas_agree()?);
        }
        let saved = trainer.has_place().then(|| ElasticState::save(&trainer));
        // No rank goes before all are done.
        elastic.comm().barrier().wait()?;
        Ok(Some((losses, saved)))
    };
    std::thread::scope(|scope| {
        let comms = farwire::local(ranks).unwrap();
        // Printed at once, because the others, who miss this rank, may fail in turn and be shown
        // first.
        let rank = |comm| rank(comm).inspect_err(|error| eprintln!("a rank ends: {error}"));
        let threads: Vec<_> =
            comms.into_iter().map(|comm| scope.spawn(move || rank(comm))).collect();
        let ends = threads.into_iter().enumerate().map(|(rank, it)| (rank, it.join().unwrap()));
        ends.filter_map(|(rank, end)| Some(end.transpose()?.map(|end| (rank, end)))).collect()
    })
}

/// The mean of the last losses.
fn last(run: &[(usize, End)]) -> f64 {
    run[0].1.0.iter().rev().take(5).sum::<f64>() / 5.0
}

#[test]
fn a_run_that_loses_ranks_ends_alike_on_all_that_are_left() {
    for codec in ["none", "int8", "topk:0.1"] {
        let settings = settings(codec);
        let whole = train(4, &settings, &[], Going::Lost).unwrap();
        for going in [Going::Lost, Going::Leaving] {
            let left = train(4, &settings, &[(0, 5), (2, 12)], going).unwrap();
            assert_eq!((whole.len(), left.len()), (4, 2));
            for run in [&whole, &left] {
                let state = &run[0].1.1;
                assert!(run.iter().all(|(_, (_, it))| it == state), "{codec}: the same bits");
                // A rank that missed the end of a step has no report of it.
                assert!(run.iter().all(|(_, (losses, _))| losses.len() + 2 >= STEPS), "{codec}");
            }
            let (whole, left) = (last(&whole), last(&left));
            println!("{codec}, {going:?}: loss {whole:.4} with all, {left:.4} with fewer");
            assert!((left / whole - 1.0).abs() < 0.05, "{codec}: {left} and {whole}");
        }
    }
}

/// With tensor and pipeline parallelism. Rank 0 goes, or another one; two of different replicas go
/// in the same step, with different shares or with the same one; two go one after the other.
#[test]
fn what_is_left_of_broken_replicas_goes_on_as_whole_ones() {
    for (tp, pp, replicas) in [(2, 1, 2), (1, 2, 2), (2, 2, 2), (2, 1, 3)] {
        for codec in ["none", "int8"] {
            let settings = Settings { tp, pp, micro_batches: pp, ..settings(codec) };
            let shares = tp * pp;
            let ranks = shares * replicas;
            let whole = train(ranks, &settings, &[], Going::Lost).unwrap();
            let mut cases = vec![
                vec![(0, 5)],
                vec![(ranks - 1, 7)],
                // Ranks of a replica follow each other, so these have different shares.
                vec![(0, 9), (shares + 1, 9)],
            ];
            if replicas > 2 {
                cases.push(vec![(0, 6), (shares, 6)]);
                // The other rank of that replica waits, and then gets another share.
                cases.push(vec![(1, 4), (shares + 1, 15)]);
            }
            for (case, going) in
                cases.iter().flat_map(|case| [(case, Going::Lost), (case, Going::Leaving)])
            {
                println!("tp {tp}, pp {pp}, {codec}: {case:?} {going:?}");
                let left = train(ranks, &settings, case, going).unwrap();
                assert_eq!(left.len(), ranks - case.len());
                let states: Vec<_> = left.iter().filter_map(|(_, (_, it))| it.as_ref()).collect();
                assert_eq!(states.len(), left.len() / shares * shares);
                let (whole, left) = (last(&whole), last(&left));
                assert!((left / whole - 1.0).abs() < 0.05, "{case:?}: {left} and {whole}");
            }
        }
    }
}

/// Rank 1 leaves, so rank 0, of the same replica, no longer has a place. Then rank 2 has to stay:
/// no other rank has its share.
#[test]
fn a_rank_that_alone_has_a_share_does_not_leave() {
    let settings = Settings { tp: 2, ..settings("int8") };
    std::thread::scope(|scope| {
        for comm in farwire::local(4).unwrap() {
            let settings = settings.clone();
            scope.spawn(move || {
                let me = comm.rank();
                let mut trainer = Trainer::elastic(&TOY, settings, &text()).unwrap();
                let mut elastic = Elastic::new(comm);
                while trainer.steps_done() < STEPS {
                    let leaves = match me {
                        1 => trainer.steps_done() >= 5,
                        2 => trainer.steps_done() >= 9,
                        _ => false,
                    };
                    trainer.set_leaving(leaves);
                    let report =
                        elastic.step(&mut trainer, |_, trainer| trainer.step(false)).unwrap();
                    if report.leaving > 0 && elastic.part(&mut trainer, leaves).unwrap() {
                        assert_eq!(me, 1);
                        return;
                    }
                }
                assert_eq!((elastic.comm().size(), trainer.waiting()), (3, 1));
                assert_ne!(me, 1);
                elastic.comm().barrier().wait().unwrap();
            });
        }
    });
}

/// Both ranks that had a share are lost: no rank has what it had learned.
#[test]
fn a_share_that_nobody_has_any_more_ends_the_run() {
    let settings = Settings { tp: 2, ..settings("int8") };
    let error = train(4, &settings, &[(0, 5), (2, 5)], Going::Lost).unwrap_err().to_string();
    assert!(error.contains("no replica is whole any more, after step"), "{error}");
    assert!(error.contains("has share 0; go on from the last checkpoint"), "{error}");
    let error = train(1, &settings, &[], Going::Lost).unwrap_err().to_string();
    assert!(error.contains("needs 2 ranks (tp × pp), but there are 1"), "{error}");
}

/// A rank that joins with other settings must not take part; ranks compare the names of buffers.
#[test]
fn other_settings_show_in_the_state() {
    let about = |settings: Settings| {
        let comm = farwire::local(1).unwrap().remove(0);
        let trainer = Trainer::new(&TOY, &comm, settings, &text()).unwrap();
        ElasticState::save(&trainer)[0].0.clone()
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
    let shard = Settings { shard_optimizer: true, ..settings("none") };
    for (settings, says) in [(shard, "--shard-optimizer"), (settings("auto"), "--codec")] {
        let error = Trainer::elastic(&TOY, settings, &text()).unwrap_err().to_string();
        assert!(error.contains(says), "{error}");
    }
}
