//! A run that was killed and resumed is the same as one that was not.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on should say where")]

mod common;

use std::path::{Path, PathBuf};

use common::{is_rank, job, job_succeeds, text};
use farwire::Communicator;
use farwire_candle::Candle;
use farwire_train::{Settings, Trainer, gpt};

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
    Trainer::new(
        &Candle,
        comm,
        Settings { model, codec, dense_steps: 1, falling_steps: 4, ..settings() },
        &text(),
    )
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

/// Updates the hash of a file that was changed on purpose.
fn hash_again(folder: &Path, name: &str) {
    let bytes = std::fs::read(folder.join(name)).unwrap();
    let hash = aws_lc_rs::digest::digest(&aws_lc_rs::digest::SHA256, &bytes);
    let hex: String = hash.as_ref().iter().map(|byte| format!("{byte:02x}")).collect();
    let sums = std::fs::read_to_string(folder.join("SHA256SUMS")).unwrap();
    let line = |line: &str| {
        if line.ends_with(name) { format!("{hex}  {name}\n") } else { format!("{line}\n") }
    };
    std::fs::write(folder.join("SHA256SUMS"), sums.lines().map(line).collect::<String>()).unwrap();
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
            let losses: Vec<f64> =
                (about.step..STEPS).map(|_| trainer.step(false).unwrap().loss).collect();
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

/// The codec that was measured at the start is kept: a resumed run does not depend on how fast the
/// network is by then, and sends what it owes.
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
                let given =
                    losses(&mut Trainer::new(&Candle, &comm, settings("int8"), &text).unwrap(), 6);
                // Whatever was chosen here, make the checkpoint say that it was int8.
                let mut start = Trainer::new(&Candle, &comm, settings("auto"), &text).unwrap();
                start.save(dir, serde_json::Value::Null).unwrap();
                if comm.rank() == 0 {
                    let path = dir.join("step-00000000").join("job.json");
                    let file = std::fs::read(&path).unwrap();
                    let mut about: serde_json::Value = serde_json::from_slice(&file).unwrap();
                    assert_eq!(about["codec"], start.codec().to_string());
                    about["codec"] = "int8 from 4 KiB (2.5×)".into();
                    std::fs::write(&path, about.to_string()).unwrap();
                    hash_again(&dir.join("step-00000000"), "job.json");
                }
                comm.barrier().wait().unwrap();
                let mut trainer = Trainer::new(&Candle, &comm, settings("auto"), &text).unwrap();
                trainer.resume(dir).unwrap();
                assert_eq!(trainer.codec().to_string(), "int8 from 4 KiB (2.5×)");
                assert_eq!(losses(&mut trainer, 3), given[..3]);
                trainer.save(dir, serde_json::Value::Null).unwrap();
                let mut trainer = Trainer::new(&Candle, &comm, settings("auto"), &text).unwrap();
                trainer.resume(dir).unwrap();
                assert_eq!(losses(&mut trainer, 3), given[3..]);
                // A run with another codec setting is another run.
                let mut other = Trainer::new(&Candle, &comm, settings("auto:int8"), &text).unwrap();
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
    let mut trainer = Trainer::new(&Candle, &comm, alone.clone(), &text).unwrap();
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
                    let mut trainer = Trainer::new(&Candle, &comm, layout, text).unwrap();
                    assert_eq!(trainer.resume(dir).unwrap().step, 3);
                    assert!(trainer.replicas_agree().unwrap());
                    for expected in expected {
                        let loss = trainer.step(false).unwrap().loss;
                        assert!(
                            (loss - expected).abs() <= 1e-4 * expected,
                            "{loss}, not {expected}"
                        );
                    }
                });
            }
        });
    }
    std::fs::remove_dir_all(dir).unwrap();
}

/// In one process, which is enough for this.
#[test]
fn checkpoints_are_refused_where_they_do_not_fit_and_old_ones_removed() {
    // As a 64-bit float it equals the next number.
    const SEED: u64 = 1 << 53;
    let dir = directory("refused");
    let comm = farwire::local(1).unwrap().remove(0);
    let alone = Settings { dp: 1, tp: 1, shard_optimizer: false, seed: SEED, ..settings() };
    let text = text();
    let mut trainer = Trainer::new(&Candle, &comm, alone.clone(), &text).unwrap();
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
        (Settings { seed: SEED + 1, ..alone.clone() }, "seed"),
        (Settings { learning_rate: 1.0, ..alone.clone() }, "learning rate"),
        (Settings { model: gpt::Config { width: 32, ..alone.model }, ..alone.clone() }, "model"),
    ] {
        let mut other = Trainer::new(&Candle, &comm, other, &text).unwrap();
        let error = other.resume(&dir).unwrap_err().to_string();
        assert!(error.contains(says) && error.contains("give the same"), "{error}");
    }
    // Another text, of the same length.
    let mut altered = text.clone();
    altered[500] ^= 1;
    let mut other = Trainer::new(&Candle, &comm, alone.clone(), &altered).unwrap();
    let error = other.resume(&dir).unwrap_err().to_string();
    assert!(error.contains("another text") && error.contains("--data"), "{error}");
    // A whole model's file is a start for any layout.
    let file = dir.join("step-00000004").join("model.safetensors");
    let mut other = Trainer::new(&Candle, &comm, Settings { seed: 7, ..alone }, &text).unwrap();
    other.load_weights(&file).unwrap();
    let values = |trainer: &Trainer| -> Vec<Vec<f32>> {
        trainer.params().map(|param| trainer.weights(&param.name).unwrap()).collect()
    };
    assert_eq!(values(&trainer), values(&other));
    assert!(other.load_weights(Path::new("/no/such/file")).is_err());
    std::fs::remove_dir_all(dir).unwrap();
}

/// The files of a checkpoint of two ranks.
const FILES: [&str; 6] = [
    "job.json",
    "model.safetensors",
    "optimizer.safetensors",
    "residuals.rank0.safetensors",
    "residuals.rank1.safetensors",
    "SHA256SUMS",
];

type Harm = fn(&Path);

/// What time, cables and full disks do to files.
const HARMS: [(&str, Harm); 5] = [
    ("removed", |path| std::fs::remove_file(path).unwrap()),
    ("emptied", |path| std::fs::write(path, "").unwrap()),
    ("truncated", |path| {
        let bytes = std::fs::read(path).unwrap();
        std::fs::write(path, &bytes[..bytes.len() / 2]).unwrap();
    }),
    ("flipped", |path| {
        let mut bytes = std::fs::read(path).unwrap();
        let at = bytes.len() / 2;
        bytes[at] ^= 1;
        std::fs::write(path, bytes).unwrap();
    }),
    ("a folder", |path| {
        std::fs::remove_file(path).unwrap();
        std::fs::create_dir(path).unwrap();
    }),
];

/// Every kind of damage to every file, on two ranks of which only rank 0 sees the checkpoints.
#[test]
fn a_damaged_checkpoint_is_passed_over_for_the_one_before() {
    let dir = directory("damaged");
    let text = text();
    let settings = Settings { tp: 1, shard_optimizer: false, ..settings() };
    std::thread::scope(|scope| {
        for comm in farwire::local(2).unwrap() {
            let (dir, text, settings) = (&dir, &text, &settings);
            scope.spawn(move || {
                let rank = comm.rank();
                let seen = if rank == 0 { dir.clone() } else { PathBuf::from("/no/such/folder") };
                let whole = |trainer: &mut Trainer| {
                    trainer.step(false).unwrap();
                    trainer.save(dir, serde_json::Value::Null).unwrap();
                };
                let mut trainer = Trainer::new(&Candle, &comm, settings.clone(), text).unwrap();
                whole(&mut trainer);
                whole(&mut trainer);
                let newest = dir.join("step-00000002");
                for name in FILES {
                    for (harm, act) in HARMS {
                        let path = newest.join(name);
                        let good = std::fs::read(&path).unwrap();
                        comm.barrier().wait().unwrap();
                        if rank == 0 {
                            act(&path);
                        }
                        let mut resumed =
                            Trainer::new(&Candle, &comm, settings.clone(), text).unwrap();
                        let about = resumed.resume(&seen).unwrap();
                        assert_eq!(about.step, 1, "{name} {harm}");
                        assert_eq!(resumed.steps_done(), 1);
                        let [why] = &about.damaged[..] else { panic!("{name} {harm}: {about:?}") };
                        assert!(why.starts_with("step-00000002 is damaged: "), "{why}");
                        assert!(
                            why.contains(name) || why.contains("SHA256SUMS"),
                            "{name} {harm}: {why}"
                        );
                        if (name, harm) == ("job.json", "emptied") {
                            assert_eq!(why, "step-00000002 is damaged: job.json is empty");
                        }
                        comm.barrier().wait().unwrap();
                        if rank == 0 {
                            if path.is_dir() {
                                std::fs::remove_dir(&path).unwrap();
                            }
                            std::fs::write(&path, good).unwrap();
                        }
                        comm.barrier().wait().unwrap();
                    }
                }
                let mut resumed = Trainer::new(&Candle, &comm, settings.clone(), text).unwrap();
                assert_eq!(resumed.resume(&seen).unwrap().damaged, [""; 0], "all is well again");
                // A run that went back writes the step again, and the damaged checkpoint is not
                // kept for good.
                comm.barrier().wait().unwrap();
                if rank == 0 {
                    std::fs::write(newest.join("job.json"), "").unwrap();
                }
                resumed.resume(&seen).unwrap();
                whole(&mut resumed);
                let mut again = Trainer::new(&Candle, &comm, settings.clone(), text).unwrap();
                let about = again.resume(&seen).unwrap();
                assert_eq!((about.step, about.damaged.len()), (2, 0));
                // None is whole.
                comm.barrier().wait().unwrap();
                if rank == 0 {
                    for step in ["step-00000001", "step-00000002"] {
                        std::fs::remove_file(dir.join(step).join("SHA256SUMS")).unwrap();
                    }
                }
                let error = again.resume(&seen).unwrap_err().to_string();
                for says in
                    ["step-00000001 is damaged", "step-00000002 is damaged", "no SHA256SUMS"]
                {
                    assert!(error.contains(says), "{error}");
                }
            });
        }
    });
    std::fs::remove_dir_all(dir).unwrap();
}

/// With things in the way of a checkpoint, some of them left by a run that was killed while it
/// wrote one.
#[test]
fn a_checkpoint_that_cannot_be_written_is_an_error_and_the_older_ones_stay() {
    let dir = directory("obstacles");
    let text = text();
    let settings = Settings { tp: 1, ..settings() };
    std::thread::scope(|scope| {
        for comm in farwire::local(2).unwrap() {
            let (dir, text, settings) = (&dir, &text, &settings);
            scope.spawn(move || {
                let only_first = |act: &dyn Fn()| {
                    comm.barrier().wait().unwrap();
                    if comm.rank() == 0 {
                        act();
                    }
                    comm.barrier().wait().unwrap();
                };
                let mut trainer = Trainer::new(&Candle, &comm, settings.clone(), text).unwrap();
                trainer.save(dir, serde_json::Value::Null).unwrap();
                trainer.step(false).unwrap();
                // Half a checkpoint, links, and a file with a checkpoint's name.
                let half = dir.join(".step-00000001.tmp");
                let elsewhere = dir.join("elsewhere");
                only_first(&|| {
                    std::fs::create_dir(&half).unwrap();
                    std::fs::write(half.join("model.safetensors"), "half").unwrap();
                    std::fs::create_dir(&elsewhere).unwrap();
                    std::fs::write(elsewhere.join("precious"), "kept").unwrap();
                    std::os::unix::fs::symlink(&elsewhere, dir.join(".step-00000007.tmp")).unwrap();
                    std::fs::write(dir.join("step-00000001"), "a file").unwrap();
                });
                let mut fresh = Trainer::new(&Candle, &comm, settings.clone(), text).unwrap();
                let about = fresh.resume(dir).unwrap();
                assert_eq!((about.step, about.damaged.len()), (0, 1), "{about:?}");
                trainer.save(dir, serde_json::Value::Null).unwrap();
                assert_eq!(fresh.resume(dir).unwrap().step, 1);
                let mut left: Vec<String> = std::fs::read_dir(dir)
                    .unwrap()
                    .map(|entry| entry.unwrap().file_name().into_string().unwrap())
                    .collect();
                left.sort();
                assert_eq!(left, ["elsewhere", "step-00000000", "step-00000001"]);
                assert_eq!(std::fs::read(elsewhere.join("precious")).unwrap(), b"kept");
                // A file where the folder should be: an error on all ranks.
                let file = dir.join("elsewhere/precious");
                let error = trainer.save(&file, serde_json::Value::Null).unwrap_err().to_string();
                assert!(error.contains("precious"), "{error}");
                let error = fresh.resume(&file).unwrap_err().to_string();
                assert!(error.contains("precious"), "{error}");
                // Another job is writing here.
                let lock = std::fs::File::open(dir).unwrap();
                only_first(&|| lock.lock().unwrap());
                trainer.step(false).unwrap();
                let error = trainer.save(dir, serde_json::Value::Null).unwrap_err().to_string();
                assert!(error.contains("another job"), "{error}");
                only_first(&|| lock.unlock().unwrap());
                // Weights that cannot be trained further do not replace those that can.
                let name = trainer.params().next().unwrap().name.clone();
                let broken: Vec<f32> =
                    trainer.weights(&name).unwrap().iter().map(|x| x * f32::INFINITY).collect();
                trainer.set_weights(&name, &broken).unwrap();
                let error = trainer.save(dir, serde_json::Value::Null).unwrap_err().to_string();
                assert!(error.contains("NaN or an infinity"), "{error}");
                assert_eq!(fresh.resume(dir).unwrap().step, 1);
            });
        }
    });
    std::fs::remove_dir_all(dir).unwrap();
}
