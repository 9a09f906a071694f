//! A run that was killed and goes on is the run that was not.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on should say where")]

mod common;

use std::path::{Path, PathBuf};

use common::{is_rank, job, job_succeeds, text};
use farwire::Communicator;
use farwire_candle::{Settings, Trainer, gpt};

const STEPS: usize = 8;

fn settings() -> Settings {
    Settings {
        model: gpt::Config { layers: 2, heads: 2, width: 16, context: 8 },
        dp: 2,
        tp: 2,
        shard_optimizer: true,
        batch: 8,
        steps: STEPS,
        warm_up: 2,
        bucket_bytes: 4 << 10,
        ..Settings::default()
    }
}

fn trainer(comm: &Communicator, codec: &str) -> Trainer {
    // Wide enough that its matrices are worth a codec.
    let model = gpt::Config { width: 32, ..settings().model };
    let codec = codec.parse().unwrap();
    Trainer::new(comm, Settings { model, codec, dense_steps: 1, falling_steps: 4, ..settings() }, &text())
        .unwrap()
}

/// A directory that the processes of a test share.
fn directory(name: &str) -> PathBuf {
    let parent = if is_rank() { std::os::unix::process::parent_id() } else { std::process::id() };
    std::env::temp_dir().join(format!("farwire-{name}-{parent}"))
}

fn write_losses(comm: &Communicator, path: &Path, losses: &[f64]) {
    if comm.rank() == 0 {
        let bits: Vec<String> = losses.iter().map(|loss| loss.to_bits().to_string()).collect();
        std::fs::write(path, bits.join(" ")).unwrap();
    }
}

#[test]
fn a_killed_run_goes_on_bit_for_bit() {
    const TEST: &str = "a_killed_run_goes_on_bit_for_bit";
    for codec in ["none", "topk:0.1", "randk:0.2"] {
        let dir = directory(&format!("resume-{}", codec.replace(':', "-")));
        std::fs::create_dir_all(&dir).unwrap();
        let case = |what: &str| format!("{what} {codec}");
        job_succeeds(TEST, &case("whole"), 4, |comm| {
            let mut trainer = trainer(&comm, codec);
            let losses = (0..STEPS).map(|_| {
                let loss = trainer.step(false).unwrap().loss;
                assert!(trainer.replicas_agree().unwrap(), "{codec}");
                loss
            });
            write_losses(&comm, &dir.join("whole"), &losses.collect::<Vec<_>>());
        });
        let killed = job(TEST, &case("killed"), 4, |comm| {
            let mut trainer = trainer(&comm, codec);
            for step in 0..STEPS {
                if step % 3 == 0 {
                    trainer.save(&dir, serde_json::json!({ "step": step })).unwrap();
                }
                if step == 5 && comm.rank() == 2 {
                    std::process::abort();
                }
                trainer.step(false).unwrap();
            }
        });
        assert!(is_rank() || killed.iter().all(|output| !output.status.success()));
        job_succeeds(TEST, &case("resumed"), 4, |comm| {
            let mut trainer = trainer(&comm, codec);
            let about = trainer.resume(&dir).unwrap();
            assert_eq!((about.step, &about.notes["step"]), (3, &3.into()));
            let losses: Vec<f64> = (about.step..STEPS).map(|_| trainer.step(false).unwrap().loss).collect();
            write_losses(&comm, &dir.join("resumed"), &losses);
        });
        if !is_rank() {
            let read = |name: &str| std::fs::read_to_string(dir.join(name)).unwrap();
            let (whole, resumed) = (read("whole"), read("resumed"));
            let whole: Vec<&str> = whole.split(' ').collect();
            assert_eq!(whole[3..].join(" "), resumed, "{codec}");
            std::fs::remove_dir_all(dir).unwrap();
        }
    }
}

/// What was measured at the start is kept: a run does not depend on how fast the network is when it goes on, and pays what it owes.
#[test]
fn a_run_with_a_measured_codec_goes_on_with_the_same() {
    let dir = directory("auto");
    let model = gpt::Config { width: 32, ..settings().model };
    let settings = |codec: &str| Settings {
        model,
        tp: 1,
        codec: codec.parse().unwrap(),
        dense_steps: 1,
        shard_optimizer: false,
        ..settings()
    };
    std::thread::scope(|scope| {
        for comm in farwire::local(2).unwrap() {
            let (dir, text, settings) = (&dir, text(), &settings);
            scope.spawn(move || {
                let losses = |trainer: &mut Trainer, steps: usize| -> Vec<f64> {
                    (0..steps).map(|_| trainer.step(false).unwrap().loss).collect()
                };
                let given = losses(&mut Trainer::new(&comm, settings("int8"), &text).unwrap(), 6);
                // Whatever was chosen here, the checkpoint shall say that it was int8.
                let start = Trainer::new(&comm, settings("auto"), &text).unwrap();
                start.save(dir, serde_json::Value::Null).unwrap();
                if comm.rank() == 0 {
                    let path = dir.join("step-00000000").join("job.json");
                    let file = std::fs::read(&path).unwrap();
                    let mut about: serde_json::Value = serde_json::from_slice(&file).unwrap();
                    assert_eq!(about["codec"], start.codec().to_string());
                    about["codec"] = "int8 from 4 KiB (2.5×)".into();
                    std::fs::write(&path, about.to_string()).unwrap();
                }
                comm.barrier().wait().unwrap();
                let mut trainer = Trainer::new(&comm, settings("auto"), &text).unwrap();
                trainer.resume(dir).unwrap();
                assert_eq!(trainer.codec().to_string(), "int8 from 4 KiB (2.5×)");
                assert_eq!(losses(&mut trainer, 3), given[..3]);
                trainer.save(dir, serde_json::Value::Null).unwrap();
                let mut trainer = Trainer::new(&comm, settings("auto"), &text).unwrap();
                trainer.resume(dir).unwrap();
                assert_eq!(losses(&mut trainer, 3), given[3..]);
                // One codec or another is not the same run.
                let mut other = Trainer::new(&comm, settings("auto:int8"), &text).unwrap();
                assert!(other.resume(dir).is_err());
            });
        }
    });
    std::fs::remove_dir_all(dir).unwrap();
}

/// A checkpoint holds whole tensors, so the layout may change.
#[test]
fn a_run_goes_on_in_another_layout() {
    let dir = directory("layout");
    let text = text();
    let alone = Settings { dp: 1, tp: 1, shard_optimizer: false, ..settings() };
    let comm = farwire::local(1).unwrap().remove(0);
    let mut trainer = Trainer::new(&comm, alone.clone(), &text).unwrap();
    for _ in 0..3 {
        trainer.step(false).unwrap();
    }
    trainer.save(&dir, serde_json::Value::Null).unwrap();
    let expected: Vec<f64> = (0..3).map(|_| trainer.step(false).unwrap().loss).collect();
    for layout in [
        Settings { tp: 2, ..alone.clone() },
        Settings { pp: 2, micro_batches: 2, ..alone.clone() },
        Settings { dp: 2, ..alone.clone() },
        Settings { dp: 2, shard_optimizer: true, ..alone.clone() },
    ] {
        std::thread::scope(|scope| {
            for comm in farwire::local(2).unwrap() {
                let (dir, text, expected, layout) = (&dir, &text, &expected, layout.clone());
                scope.spawn(move || {
                    let mut trainer = Trainer::new(&comm, layout, text).unwrap();
                    assert_eq!(trainer.resume(dir).unwrap().step, 3);
                    assert!(trainer.replicas_agree().unwrap());
                    for expected in expected {
                        let loss = trainer.step(false).unwrap().loss;
                        assert!((loss - expected).abs() <= 1e-4 * expected, "{loss}, not {expected}");
                    }
                });
            }
        });
    }
    std::fs::remove_dir_all(dir).unwrap();
}

/// In one process, for what needs no more.
#[test]
fn checkpoints_are_refused_where_they_do_not_fit_and_old_ones_removed() {
    let dir = directory("refused");
    let comm = farwire::local(1).unwrap().remove(0);
    let alone = Settings { dp: 1, tp: 1, shard_optimizer: false, ..settings() };
    let text = text();
    let mut trainer = Trainer::new(&comm, alone.clone(), &text).unwrap();
    let none = trainer.resume(&dir).unwrap_err().to_string();
    assert!(none.contains("start without resuming"), "{none}");
    for _ in 0..4 {
        trainer.step(false).unwrap();
        trainer.save(&dir, serde_json::Value::Null).unwrap();
    }
    let mut kept: Vec<_> = std::fs::read_dir(&dir)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    kept.sort();
    assert_eq!(kept, ["step-00000003", "step-00000004"]);
    for (other, says) in [
        (Settings { seed: 2, ..alone.clone() }, "seed"),
        (Settings { learning_rate: 1.0, ..alone.clone() }, "learning rate"),
        (Settings { model: gpt::Config { width: 32, ..alone.model }, ..alone.clone() }, "model"),
    ] {
        let mut other = Trainer::new(&comm, other, &text).unwrap();
        let error = other.resume(&dir).unwrap_err().to_string();
        assert!(error.contains(says) && error.contains("give the same"), "{error}");
    }
    // A whole model's file is a start for any layout.
    let file = dir.join("step-00000004").join("model.safetensors");
    let mut other = Trainer::new(&comm, Settings { seed: 7, ..alone }, &text).unwrap();
    other.load_weights(&file).unwrap();
    let values = |trainer: &Trainer| -> Vec<Vec<f32>> {
        trainer.params().map(|param| param.var.flatten_all().unwrap().to_vec1().unwrap()).collect()
    };
    assert_eq!(values(&trainer), values(&other));
    assert!(other.load_weights(Path::new("/no/such/file")).is_err());
    std::fs::remove_dir_all(dir).unwrap();
}
