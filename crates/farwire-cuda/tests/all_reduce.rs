//! All-reduces of vectors on a card, between ranks with and without a card, compared with the same
//! calls in host memory.
//!
//! Without a card these tests are skipped and print why; with `FARWIRE_REQUIRE_GPU=1` they fail.
//! Two ranks share card 0, each with a stream of its own.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use farwire::{
    CodingError, Communicator, Compressor, Error, ErrorFeedback, Fault, Peer, ReduceOp, Token,
};
use farwire_codec::{samples, typical};
use farwire_cuda::*;
use half::{bf16, f16};

mod common;

/// The device of a rank of this process.
fn device(rank: usize) -> Option<Arc<Device>> {
    static DEVICES: [OnceLock<Option<Arc<Device>>>; 2] = [const { OnceLock::new() }; 2];
    let open = || match Device::new(0) {
        Ok(device) => Some(device),
        Err(error) => {
            let required = std::env::var("FARWIRE_REQUIRE_GPU").is_ok_and(|value| value == "1");
            assert!(!required, "a GPU is required: {error}");
            eprintln!("skipped: {error}");
            None
        }
    };
    DEVICES[rank].get_or_init(open).clone()
}

/// If there is a card, reserves it for this test: some tests measure its memory, and one uses all
/// of it.
fn card() -> Option<MutexGuard<'static, ()>> {
    static ALONE: Mutex<()> = Mutex::new(());
    device(0).map(|_| ALONE.lock().unwrap_or_else(PoisonError::into_inner))
}

/// Where a rank's vectors are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Side {
    Card,
    Host,
}
use Side::{Card, Host};

/// Which of the two ranks have a card.
const MIXED: [[Side; 2]; 3] = [[Card, Host], [Host, Card], [Card, Card]];

fn gradient(rank: usize, step: u64, len: usize) -> Vec<f32> {
    let mut state = (rank as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ ((step + 1) << 32);
    let one = |_| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        ((state >> 40) as f32 / (1 << 23) as f32 - 1.0).powi(3)
    };
    (0..len).map(one).collect()
}

fn codecs() -> impl Iterator<Item = &'static str> {
    samples().filter(|name| common::is_asked_for(name))
}

fn usual() -> impl Iterator<Item = &'static str> {
    typical().filter(|name| *name != "none" && common::is_asked_for(name))
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

/// One rank, with its vectors on the card or on the host.
struct RankOn {
    comm: Communicator,
    device: Option<DeviceCommunicator>,
}

impl RankOn {
    fn new(comm: &Communicator, side: Side, device: Option<Arc<Device>>) -> Self {
        let device = device.filter(|_| side == Card);
        let device = device.map(|device| DeviceCommunicator::new(comm, &device));
        Self { comm: comm.clone(), device }
    }

    /// The result; after a failure, the error and the content of the vector.
    fn try_all_reduce(
        &self,
        mine: Vec<f32>,
        op: ReduceOp,
        compressor: &Compressor,
    ) -> Result<Vec<f32>, (Error, Vec<f32>)> {
        match &self.device {
            None => {
                let result = self.comm.all_reduce_compressed("w", mine, op, compressor).wait();
                result.map_err(|mut error| {
                    let input = error.take_input().unwrap_or_default();
                    (error, input)
                })
            }
            Some(comm) => {
                let tensor = Arc::new(comm.device().upload(&mine).unwrap());
                let done = comm.all_reduce_compressed("w", &tensor, op, compressor).wait();
                let values = tensor.download().unwrap();
                match done {
                    Ok(()) => Ok(values),
                    Err(error) => Err((error, values)),
                }
            }
        }
    }

    fn all_reduce(&self, mine: Vec<f32>, op: ReduceOp, compressor: &Compressor) -> Vec<f32> {
        self.try_all_reduce(mine, op, compressor).map_err(|(error, _)| error).unwrap()
    }
}

/// Runs both ranks on threads of this process, and returns their results.
fn on_threads<R: Send>(sides: [Side; 2], rank: impl Fn(usize, RankOn) -> R + Sync) -> [R; 2] {
    let rank = &rank;
    std::thread::scope(|scope| {
        let threads: Vec<_> = farwire::local(2)
            .unwrap()
            .into_iter()
            .enumerate()
            .map(|(index, comm)| {
                scope.spawn(move || {
                    let on = RankOn::new(&comm, sides[index], device(index));
                    rank(index, on)
                })
            })
            .collect();
        let results: Vec<R> = threads.into_iter().map(|thread| thread.join().unwrap()).collect();
        results.try_into().unwrap_or_else(|_| unreachable!("two ranks"))
    })
}

/// Some steps through a codec: the results, and the residuals at the end.
fn steps(
    on: &RankOn,
    rank: usize,
    codec: &str,
    len: usize,
    op: ReduceOp,
) -> (Vec<Vec<f32>>, Vec<u8>) {
    let compressor = Compressor::new(codec.parse().unwrap()).seed(7);
    let one = |step| on.all_reduce(gradient(rank, step, len), op, &compressor.at_step(step));
    ((0..3).map(one).collect(), compressor.feedback().unwrap().to_bytes())
}

fn compare(codecs: impl Iterator<Item = &'static str>, lens: &[usize], ops: &[ReduceOp]) {
    for codec in codecs {
        for (len, op) in lens.iter().flat_map(|len| ops.iter().map(|op| (*len, *op))) {
            let want = on_threads([Host, Host], |rank, on| steps(&on, rank, codec, len, op));
            for sides in MIXED {
                let got = on_threads(sides, |rank, on| steps(&on, rank, codec, len, op));
                for (rank, ((got, owed), (want, want_owed))) in got.iter().zip(&want).enumerate() {
                    let what = format!("{codec}, {len} elements, {op:?}, {sides:?}, rank {rank}");
                    for (step, (got, want)) in got.iter().zip(want).enumerate() {
                        assert!(bits(got) == bits(want), "{what}, step {step}");
                    }
                    assert!(owed == want_owed, "{what}: residuals");
                }
            }
        }
    }
}

const BOTH: [ReduceOp; 2] = [ReduceOp::Sum, ReduceOp::Mean];

#[test]
fn cards_and_hosts_have_the_same_bits_with_every_codec() {
    let Some(_alone) = card() else { return };
    if common::is_sanitized() {
        return compare(codecs(), &[4097], &[ReduceOp::Mean]);
    }
    compare(codecs(), &[0, 1, 2, 3, 1009, 4097], &BOTH);
    compare(codecs(), &[32_769], &[ReduceOp::Mean]);
}

#[test]
fn cards_and_hosts_have_the_same_bits_with_long_vectors() {
    let Some(_alone) = card() else { return };
    if common::is_sanitized() {
        // Both roles of top-k guess; a matrix has more than one segment of columns.
        return compare(usual(), &[300_007], &[ReduceOp::Mean]);
    }
    compare(usual(), &[300_007, 2_097_153], &[ReduceOp::Mean]);
    // In three chunks; the last one is short.
    compare(usual(), &[(1 << 23) + 5], &[ReduceOp::Sum]);
}

#[test]
fn short_floats_have_the_same_bits() {
    fn of<T: farwire::Float + TensorElement>(narrow: fn(f32) -> T) {
        let len = 4097;
        for codec in usual() {
            let run = |rank: usize, on: RankOn| {
                let compressor = Compressor::new(codec.parse().unwrap()).seed(7);
                let one = |step| {
                    let mine = gradient(rank, step, len).into_iter().map(narrow).collect();
                    let (op, compressor) = (ReduceOp::Mean, compressor.at_step(step));
                    let Some(comm) = &on.device else {
                        let mean = on.comm.all_reduce_compressed::<T>("w", mine, op, &compressor);
                        return bytemuck::cast_vec::<T, u16>(mean.wait().unwrap());
                    };
                    let tensor = Arc::new(comm.device().upload(&mine).unwrap());
                    comm.all_reduce_compressed("w", &tensor, op, &compressor).wait().unwrap();
                    bytemuck::cast_vec(tensor.download().unwrap())
                };
                ((0..3).map(one).collect::<Vec<_>>(), compressor.feedback().unwrap().to_bytes())
            };
            let want = on_threads([Host, Host], run);
            for sides in MIXED {
                assert!(on_threads(sides, run) == want, "{codec}, {sides:?}");
            }
        }
    }
    let Some(_alone) = card() else { return };
    of::<f16>(f16::from_f32);
    of::<bf16>(bf16::from_f32);
}

#[test]
fn without_error_feedback_the_bits_are_the_same() {
    let Some(_alone) = card() else { return };
    for codec in usual() {
        let run = |rank: usize, on: RankOn| {
            let compressor = Compressor::new(codec.parse().unwrap()).without_feedback();
            let mine = gradient(rank, 3, 10_007);
            bits(&on.all_reduce(mine, ReduceOp::Mean, &compressor.at_step(3)))
        };
        let want = on_threads([Host, Host], run);
        for sides in MIXED {
            assert!(on_threads(sides, run) == want, "{codec}, {sides:?}");
        }
    }
}

/// Residuals move between card and host, and between codecs that cut vectors in other ways.
#[test]
fn what_is_owed_moves_between_card_and_host_and_codecs() {
    let Some(_alone) = card() else { return };
    let len = (1 << 22) + 77;
    let order = ["topk:0.01", "int8", "topk:64/4096", "sign", "none", "topk:0.01"];
    let run = |moves: bool| {
        move |rank: usize, on: RankOn| {
            let host = RankOn { comm: on.comm.clone(), device: None };
            let mut compressor = Compressor::new("topk:0.01".parse().unwrap()).seed(3);
            let mut results = Vec::new();
            for (step, codec) in order.iter().enumerate() {
                let through = compressor.with_codec(codec.parse().unwrap()).at_step(step as u64);
                let mine = gradient(rank, step as u64, len);
                let here = if moves && step % 2 == 1 { &host } else { &on };
                results.push(bits(&here.all_reduce(mine, ReduceOp::Mean, &through)));
                if moves {
                    let saved = compressor.feedback().unwrap().to_bytes();
                    let loaded = ErrorFeedback::from_bytes(&saved).unwrap();
                    compressor = compressor.with_feedback(loaded);
                }
            }
            (results, compressor.feedback().unwrap().to_bytes())
        }
    };
    let want = on_threads([Host, Host], run(false));
    let all = [([Card, Card], true), ([Card, Card], false), ([Card, Host], true)];
    for (sides, moves) in all.into_iter().take(common::sized(1, 3)) {
        let got = on_threads(sides, run(moves));
        for (got, want) in got.iter().zip(&want) {
            for (step, (got, want)) in got.0.iter().zip(&want.0).enumerate() {
                assert!(got == want, "{sides:?}, {moves}, step {step}: {}", order[step]);
            }
            assert!(got.1 == want.1, "{sides:?}, {moves}: residuals");
        }
    }
}

#[test]
fn what_is_not_finite_is_the_same_error_and_changes_nothing() {
    let Some(_alone) = card() else { return };
    let len = 5003;
    for codec in usual() {
        let run = |rank: usize, on: RankOn| {
            let compressor = Compressor::new(codec.parse().unwrap()).seed(7);
            let mine = gradient(rank, 0, len);
            on.all_reduce(mine.clone(), ReduceOp::Sum, &compressor.at_step(0));
            let before = compressor.feedback().unwrap().to_bytes();
            // In one rank's input, in the other's, and in both.
            let bad = [(0, f32::NAN), (1, f32::NEG_INFINITY)];
            let mut texts = Vec::new();
            for case in 0..3 {
                let mut mine = mine.clone();
                for (whose, value) in bad {
                    if whose == rank && (case == 2 || case == whose) {
                        mine[4321 - whose] = value;
                    }
                }
                let compressor = compressor.at_step(1);
                let (error, after) =
                    on.try_all_reduce(mine.clone(), ReduceOp::Sum, &compressor).unwrap_err();
                assert!(matches!(error, Error::NotEncodable { .. }), "{codec}: {error}");
                assert!(bits(&after) == bits(&mine), "{codec}: the tensor is as it was");
                assert!(compressor.feedback().unwrap().to_bytes() == before, "{codec}: residuals");
                texts.push(error.to_string());
            }
            texts
        };
        let want = on_threads([Host, Host], run);
        for sides in MIXED {
            assert_eq!(on_threads(sides, run), want, "{codec}, {sides:?}");
        }
    }
    let run = |_: usize, on: RankOn| {
        let compressor = Compressor::new("bf16".parse().unwrap());
        let (error, after) =
            on.try_all_reduce(vec![3e38; 100], ReduceOp::Sum, &compressor).unwrap_err();
        assert_eq!(after, [3e38; 100]);
        error.to_string()
    };
    assert_eq!(on_threads([Card, Host], run), on_threads([Host, Host], run));
}

#[test]
fn a_codec_without_kernels_is_refused_with_a_reason() {
    let (Some(_alone), Some(device)) = (card(), device(0)) else { return };
    let comm = farwire::local(1).unwrap().remove(0);
    let comm = DeviceCommunicator::new(&comm, &device);
    let compressor = Compressor::new("powersgd:33".parse().unwrap());
    let tensor = Arc::new(device.upload(&[1.0f32; 10_000]).unwrap());
    let error = comm.all_reduce_compressed("w", &tensor, ReduceOp::Sum, &compressor).wait();
    let text = error.unwrap_err().to_string();
    assert!(text.contains("powersgd:33 does not run on the card"), "{text}");
    assert!(compressor.feedback().unwrap().begin("w").is_ok(), "nothing is held");
}

/// The operation sees work that the caller's stream was given before the call, and work given to it
/// afterwards sees the result. The host does not wait for the card.
#[test]
fn an_operation_comes_after_its_callers_work_and_before_what_follows() {
    let Some(_alone) = card() else { return };
    let (Some(device), Some(caller)) = (device(0), device(1)) else { return };
    let comm = farwire::local(1).unwrap().remove(0);
    let comm = DeviceCommunicator::new(&comm, &device);
    let compressor = Compressor::new("bf16".parse().unwrap());
    let len = 1 << 20;
    let bytes = common::sized(1 << 26, 1 << 30);
    let mut busy = caller.zeros::<u8>(bytes).unwrap();
    for round in 0..common::sized(3, 20u8) {
        let mut mine = caller.zeros::<f32>(len).unwrap();
        for _ in 0..10 {
            busy.fill_bytes(0..bytes, round).unwrap();
        }
        mine.fill_bytes(0..len, 0x3f).unwrap();
        let mine = Arc::new(mine);
        comm.all_reduce_compressed("w", &mine, ReduceOp::Sum, &compressor).wait().unwrap();
        let want = f32::from_bits(0x3f3f_3f3f);
        let want = bf16::from_f32(want).to_f32();
        let got = mine.download().unwrap();
        // The residual of the step before is added: at most half a bit of bf16.
        assert!(got.iter().all(|x| (x - want).abs() <= want / 128.0), "{round}: {}", got[0]);
    }
}

#[test]
fn out_of_memory_on_the_card_is_an_error_on_both_ranks_and_changes_nothing() {
    let Some(_alone) = card() else { return };
    let len = common::sized(4 << 20, 24 << 20);
    for sides in [[Card, Host], [Card, Card]] {
        on_threads(sides, |rank, on| {
            let compressor = Compressor::new("int8".parse().unwrap()).seed(7);
            let mine = gradient(rank, 0, len);
            let mut hogs = Vec::new();
            // Loading the kernels takes memory, so do it first. Uses a compressor of its own,
            // because a tensor's residual has one length.
            let other = Compressor::new("int8".parse().unwrap());
            on.all_reduce(vec![0.0; 1000], ReduceOp::Mean, &other);
            let barrier = || on.comm.barrier().wait().unwrap();
            let tensor =
                on.device.as_ref().map(|comm| Arc::new(comm.device().upload(&mine).unwrap()));
            barrier();
            if rank == 0 {
                let device = on.device.as_ref().unwrap().device();
                device.trim();
                let mut size = 64usize << 30;
                while size >= 8 << 20 {
                    match device.buffer::<u8>(size) {
                        Ok(hog) => hogs.push(hog),
                        Err(DeviceError::OutOfMemory { .. }) => size /= 2,
                        Err(other) => panic!("{other}"),
                    }
                }
            }
            barrier();
            let reduce = || match (&on.device, &tensor) {
                (Some(comm), Some(tensor)) => {
                    comm.all_reduce_compressed("w", tensor, ReduceOp::Mean, &compressor).wait()
                }
                _ => {
                    let mine = mine.clone();
                    let done =
                        on.comm.all_reduce_compressed("w", mine, ReduceOp::Mean, &compressor);
                    done.wait().map(|_| ())
                }
            };
            let error = reduce().unwrap_err();
            let text = error.to_string();
            let Error::NotEncodable { error: CodingError::Device { .. }, .. } = error else {
                panic!("{text}");
            };
            assert!(rank == 1 || text.contains("out of device memory"), "{text}");
            assert!(!compressor.feedback().unwrap().owes("w"), "residuals");
            barrier();
            hogs.clear();
            if let Some(tensor) = &tensor {
                assert!(bits(&tensor.download().unwrap()) == bits(&mine), "the tensor");
            }
            barrier();
            reduce().unwrap();
        });
    }
}

/// The bytes on the bus are those on the wire, and a few more.
#[test]
fn only_what_is_sent_crosses_the_bus() {
    let Some(_alone) = card() else { return };
    let len = common::sized(1 << 20, 1 << 22) + 100_003;
    for codec in usual() {
        on_threads([Card, Card], |rank, on| {
            let (comm, device) = (&on.comm, on.device.as_ref().unwrap());
            let compressor = Compressor::new(codec.parse().unwrap());
            let mine = device.device().upload(&gradient(rank, 0, len)).unwrap();
            let mine = Arc::new(mine);
            for step in 0..3 {
                comm.barrier().wait().unwrap();
                let (sent, bus) = (comm.traffic().bytes, device.device().bus());
                let compressor = compressor.at_step(step);
                device
                    .all_reduce_compressed("w", &mine, ReduceOp::Mean, &compressor)
                    .wait()
                    .unwrap();
                let (sent, bus) = (comm.traffic().bytes - sent, device.device().bus() - bus);
                let received = comm.all_gather(vec![sent]).wait().unwrap()[1 - rank];
                let to_host = bus.to_host as f64 / sent as f64;
                let to_card = bus.to_card as f64 / received as f64;
                if rank == 0 && step == 2 {
                    eprintln!(
                        "{codec}: sent {sent}, to the host {to_host:.4} of that; \
                         received {received}, to the card {to_card:.4} of that"
                    );
                }
                if step == 0 && codec.starts_with("powersgd") {
                    continue; // what it starts with has to get there
                }
                assert!(to_host <= 1.05, "{codec}: {to_host} of what was sent, step {step}");
                assert!(to_card <= 1.05, "{codec}: {to_card} of what was received, step {step}");
            }
        });
    }
}

#[test]
fn device_memory_is_flat_over_a_thousand_steps() {
    let Some(_alone) = card() else { return };
    for (codec, len) in [("topk:64/4096", 1 << 20), ("int8", 300_007), ("topk:0.01", 300_007)] {
        let free = on_threads([Card, Card], |rank, on| {
            let (comm, device) = (&on.comm, on.device.as_ref().unwrap());
            let compressor = Compressor::new(codec.parse().unwrap());
            let mine = Arc::new(device.device().upload(&gradient(rank, 0, len)).unwrap());
            let mut free = Vec::new();
            for step in 1..=1000 {
                let compressor = compressor.at_step(step);
                device
                    .all_reduce_compressed("w", &mine, ReduceOp::Mean, &compressor)
                    .wait()
                    .unwrap();
                if [10, 100, 1000].contains(&step) {
                    comm.barrier().wait().unwrap();
                    device.device().synchronize().unwrap();
                    free.push(device.device().memory().unwrap().0);
                    comm.barrier().wait().unwrap();
                }
            }
            free
        });
        eprintln!("{codec}: bytes free after 10, 100, 1,000 steps: {:?}", free[0]);
        let lost = free[0][0].saturating_sub(free[0][2]);
        assert!(lost <= 8 << 20, "{codec}: {lost} bytes in 990 steps: {free:?}");
    }
}

/// Vectors that travel uncompressed, in pieces through pinned memory.
#[test]
fn dense_vectors_on_cards_have_the_bits_of_the_host() {
    fn of<T: farwire::Element + TensorElement>(lens: &[usize], narrow: fn(f32) -> T) {
        for len in lens {
            for op in [ReduceOp::Sum, ReduceOp::Mean, ReduceOp::Max] {
                let mine = |rank| -> Vec<T> {
                    gradient(rank, *len as u64, *len).into_iter().map(narrow).collect()
                };
                let want = on_threads([Host, Host], |rank, on| {
                    on.comm.all_reduce(mine(rank), op).wait().unwrap()
                });
                let got = on_threads([Card, Card], |rank, on| {
                    let comm = on.device.as_ref().unwrap();
                    let tensors: Vec<_> = (0..3)
                        .map(|_| Arc::new(comm.device().upload(&mine(rank)).unwrap()))
                        .collect();
                    let pending: Vec<_> =
                        tensors.iter().map(|tensor| comm.all_reduce(tensor, op)).collect();
                    // Other operations may come in between.
                    on.comm.barrier().wait().unwrap();
                    pending.into_iter().for_each(|pending| pending.wait().unwrap());
                    tensors.iter().map(|tensor| tensor.download().unwrap()).collect::<Vec<_>>()
                });
                let bytes = |values: &[T]| bytemuck::cast_slice::<T, u8>(values).to_vec();
                for (got, want) in got.iter().zip(&want) {
                    let same = got.iter().all(|got| bytes(got) == bytes(want));
                    assert!(same, "{len} elements, {op:?}");
                }
            }
        }
    }
    let Some(_alone) = card() else { return };
    // This runs no kernels: under a sanitizer, two pieces are enough.
    let lens = [0, 1, 3, 1009, 32_769, (4 << 20) + 5, (40 << 20) + 1];
    of::<f32>(&lens[..common::sized(6, 7)], |x| x);
    let lens = &[3, 4097, (20 << 20) + 7][..common::sized(2, 3)];
    of::<f16>(lens, f16::from_f32);
    of::<bf16>(lens, bf16::from_f32);
}

/// Runs `rank` in a process for each of two ranks: the test starts itself again.
fn start_processes(test: &str, case: &str, link: &str, rank: impl Fn(Communicator)) -> Vec<Child> {
    const MARK: &str = "FARWIRE_TEST_CASE";
    let case = format!("{test} {case} {link}");
    if let Ok(mark) = std::env::var(MARK) {
        if mark == case {
            std::thread::spawn(|| {
                std::thread::sleep(Duration::from_secs(240));
                eprintln!("this process of a test has not ended in time");
                std::process::abort();
            });
            rank(Communicator::from_env().unwrap());
        } // else it is another case of the same test
        return Vec::new();
    }
    // Held until this process ends.
    let port = Box::leak(Box::new(farwire::HeldPort::any().unwrap()));
    let held = |rank| (rank == 0).then(|| port.variable());
    let token = Token::generate();
    let start = |rank: usize| {
        Command::new(std::env::current_exe().unwrap())
            .args([test, "--exact", "--nocapture"])
            .env(MARK, &case)
            .env("RANK", rank.to_string())
            .env("WORLD_SIZE", "2")
            .env("MASTER_ADDR", "127.0.0.1")
            .env("MASTER_PORT", port.port().to_string())
            .env("FARWIRE_TOKEN", token.reveal())
            .env("FARWIRE_LINK", link)
            .env("FARWIRE_FLIGHT_DIR", "")
            .envs(held(rank))
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap()
    };
    (0..2).map(start).collect()
}

fn assert_succeeds(child: Child, who: &str) {
    let output = child.wait_with_output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{who}:\n{text}");
}

#[test]
fn processes_have_the_same_bits_over_every_link() {
    const TEST: &str = "processes_have_the_same_bits_over_every_link";
    let Some(_alone) = card() else { return };
    // Kernels do not depend on links: under a sanitizer, one is enough.
    for link in ["shm", "quic"].into_iter().take(common::sized(1, 2)) {
        for sides in MIXED {
            let case = format!("{sides:?}");
            let children = start_processes(TEST, &case, link, |comm| {
                let rank = comm.rank();
                let on = RankOn::new(&comm, sides[rank], device(0));
                for codec in usual() {
                    let long = common::sized(10_007, 2_097_153);
                    for (len, op) in [(1, BOTH[0]), (3, BOTH[1]), (4097, BOTH[1]), (long, BOTH[1])]
                    {
                        let want =
                            on_threads([Host, Host], |rank, on| steps(&on, rank, codec, len, op));
                        let got = steps(&on, rank, codec, len, op);
                        assert!(got == want[rank], "{codec}, {len} elements, rank {rank}");
                    }
                }
                comm.shutdown().unwrap();
            });
            for (rank, child) in children.into_iter().enumerate() {
                assert_succeeds(child, &format!("{case} over {link}, rank {rank}"));
            }
        }
    }
}

#[test]
fn a_killed_rank_is_an_error_that_leaves_tensor_and_residuals_as_they_were() {
    const TEST: &str = "a_killed_rank_is_an_error_that_leaves_tensor_and_residuals_as_they_were";
    let Some(_alone) = card() else { return };
    for link in ["shm", "quic"] {
        let children = start_processes(TEST, "kill", link, |comm| {
            let rank = comm.rank();
            let on = RankOn::new(&comm, Card, device(0));
            let compressor = Compressor::new("topk:64/4096".parse().unwrap());
            let len = common::sized(1 << 20, 1 << 23) + 5;
            for step in 0.. {
                let before = compressor.feedback().unwrap().to_bytes();
                let mine = gradient(rank, step, len);
                let compressor = compressor.at_step(step);
                if rank == 1 && step == 2 {
                    // Dies in the middle of it, or nearly so.
                    let device = on.device.as_ref().unwrap();
                    let tensor = Arc::new(device.device().upload(&mine).unwrap());
                    let pending =
                        device.all_reduce_compressed("w", &tensor, ReduceOp::Mean, &compressor);
                    pending.wait_for(Duration::from_micros(100));
                    std::process::abort();
                }
                match on.try_all_reduce(mine.clone(), ReduceOp::Mean, &compressor) {
                    Ok(_) => assert!(step < 3),
                    Err((error, after)) => {
                        assert_eq!(error.fault(), Some(&Fault::PeerLost(Peer(1))), "{error}");
                        assert!(bits(&after) == bits(&mine), "the tensor");
                        let owed = compressor.feedback().unwrap().to_bytes();
                        assert!(owed == before, "what is owed");
                        return;
                    }
                }
            }
        });
        for (rank, mut child) in children.into_iter().enumerate() {
            if rank == 1 {
                child.wait().unwrap();
            } else {
                assert_succeeds(child, link);
            }
        }
    }
}

#[test]
fn a_killed_rank_is_an_error_of_a_dense_call() {
    const TEST: &str = "a_killed_rank_is_an_error_of_a_dense_call";
    let Some(_alone) = card() else { return };
    let children = start_processes(TEST, "kill", "shm", |comm| {
        let device = device(0).unwrap();
        let len = common::sized(6 << 20, 24 << 20);
        let tensor = Arc::new(device.upload(&gradient(comm.rank(), 0, len)).unwrap());
        let cards = DeviceCommunicator::new(&comm, &device);
        cards.all_reduce(&tensor, ReduceOp::Mean).wait().unwrap();
        let pending = cards.all_reduce(&tensor, ReduceOp::Mean);
        if comm.rank() == 1 {
            std::process::abort();
        }
        let error = pending.wait().unwrap_err();
        assert_eq!(error.fault(), Some(&Fault::PeerLost(Peer(1))), "{error}");
        assert_eq!(tensor.download().unwrap().len(), len, "the card is fine");
    });
    for (rank, mut child) in children.into_iter().enumerate() {
        if rank == 1 {
            child.wait().unwrap();
        } else {
            assert_succeeds(child, "rank 0");
        }
    }
}
