//! Tier 3: collectives through codecs between threads and processes, compared with the same calls
//! on the simulated network.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on should say where")]

mod common;

use std::num::NonZeroUsize;
use std::sync::mpsc::{Sender, channel};

use common::{assert_succeeds, on_processes, on_threads, start_processes};
use farwire::{
    CodecSpec, CodingError, Communicator, Compressor, Error, Fault, Memory, Peer, ReduceOp,
};
use farwire_codec::collective::{CodedCollective, Collective, Floats, Order};
use farwire_codec::{Context, ErrorFeedback, Residual};
use farwire_proto::{Rank, WorldSize};
use farwire_sim::{Network, Sim, Submission};
use half::bf16;
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use rustix::process::{Signal, getpid, kill_process};

/// The codecs that people use, and two that travel between the ranks in other ways.
fn codecs() -> impl Iterator<Item = &'static str> {
    farwire_codec::typical()
        .chain(["topk:0.02,mode=union", "powersgd:2"])
        .filter(|name| *name != "none")
}

fn gradient(rank: usize, step: u64, len: usize) -> Vec<f32> {
    let mut rng = ChaCha8Rng::seed_from_u64(rank as u64 * 1000 + step);
    (0..len).map(|_| rng.random_range(-1.0f32..1.0).powi(3)).collect()
}

/// What the simulator makes of the same calls: the results of all steps, and the residuals of all
/// ranks.
fn simulated(codec: &str, ranks: usize, len: usize, steps: u64) -> (Vec<Vec<f32>>, Vec<Vec<u8>>) {
    let feedback: Vec<_> = (0..ranks).map(|_| ErrorFeedback::new()).collect();
    let results = (0..steps).map(|step| {
        let mut sim = Sim::new(Network { seed: step, ..Network::lan(ranks as u32) });
        for (rank, feedback) in feedback.iter().enumerate() {
            let order = Order {
                collective: Collective::AllReduce(ReduceOp::Mean),
                codec: codec.parse().unwrap(),
                rank: Rank(rank as u32),
                world: WorldSize::new(ranks as u32).unwrap(),
                placement: None,
                input: Floats::F32(gradient(rank, step, len)),
                dimensions: None,
                tensor: "w".into(),
                feedback: Some(feedback.begin("w").unwrap()),
                context: Context { seed: 7, step, tensor: Context::tensor_id("w") },
                threads: NonZeroUsize::MIN,
                output: Vec::new(),
            };
            sim.submit(Peer(rank as u32), Submission::coded(CodedCollective::new(order).unwrap()));
        }
        let report = sim.run().unwrap();
        bytemuck::pod_collect_to_vec(report.jobs()[0].result().unwrap())
    });
    let results = results.collect();
    (results, feedback.iter().map(ErrorFeedback::to_bytes).collect())
}

/// Memory that goes back to its owner when it is dropped.
struct Lent(Vec<f32>, Sender<Vec<f32>>);

impl AsMut<[f32]> for Lent {
    fn as_mut(&mut self) -> &mut [f32] {
        &mut self.0
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        let _ = self.1.send(std::mem::take(&mut self.0));
    }
}

/// The mean, in the gradient's own place.
fn in_place(
    comm: &Communicator,
    codec: &str,
    gradient: Vec<f32>,
    owed: &Compressor,
) -> Result<Vec<f32>, Error> {
    let codec = codec.parse().unwrap();
    let (sender, returned) = channel();
    let address = gradient.as_ptr();
    let memory = Memory::from_owner(Lent(gradient, sender));
    let pending = comm.in_place().all_reduce_coded("w", memory, ReduceOp::Mean, codec, owed);
    pending.wait()?;
    let mean = returned.try_recv().expect("it comes back before the operation is done");
    assert_eq!(mean.as_ptr(), address);
    Ok(mean)
}

fn equals_the_simulation(comm: &Communicator, len: usize) {
    for codec in codecs() {
        let steps = 3;
        let (expected, owed) = simulated(codec, comm.size(), len, steps);
        let compressor = Compressor::new(codec.parse().unwrap()).seed(7);
        for step in 0..steps {
            let mine = gradient(comm.rank(), step, len);
            let at_step = compressor.at_step(step);
            // Ranks may work in place or not.
            let mean = match (comm.rank() + step as usize) % 2 {
                1 => in_place(comm, codec, mine, &at_step).unwrap(),
                _ => {
                    comm.all_reduce_compressed("w", mine, ReduceOp::Mean, &at_step).wait().unwrap()
                }
            };
            let same =
                mean.iter().zip(&expected[step as usize]).all(|(a, b)| a.to_bits() == b.to_bits());
            assert!(
                same && mean.len() == len,
                "{codec}, step {step}, rank {} of {}",
                comm.rank(),
                comm.size()
            );
        }
        assert_eq!(
            compressor.feedback().unwrap().to_bytes(),
            owed[comm.rank()],
            "{codec}: residuals"
        );
    }
}

#[test]
fn threads_equal_the_simulation() {
    for ranks in [1, 2, 3, 4, 7] {
        for len in [0, 1, ranks, 5000] {
            on_threads(ranks, |comm| equals_the_simulation(&comm, len));
        }
    }
}

#[test]
fn processes_equal_the_simulation() {
    for link in common::links() {
        for ranks in [2, 3, 4, 7] {
            on_processes("processes_equal_the_simulation", ranks, link, |comm| {
                equals_the_simulation(&comm, 100_000);
                comm.shutdown().unwrap();
            });
        }
    }
}

/// The codec changes on the way, and at last there is none: what was left out is sent, and nothing
/// is lost.
#[test]
fn what_is_owed_is_sent_whatever_codec_comes_next() {
    let len = 500;
    let total =
        |comm: &Communicator, mine: Vec<f64>| comm.all_reduce(mine, ReduceOp::Sum).wait().unwrap();
    for ranks in [1, 2, 3, 5] {
        on_threads(ranks, |comm| {
            let first = Compressor::new("topk:0.05".parse().unwrap()).seed(7);
            let (mut balance, mut scale, mut step) = (vec![0f64; len], 0f64, 0);
            for codec in ["topk:0.05", "none", "int8", "powersgd:2", "randk:0.1", "none"] {
                for _ in 0..3 {
                    step += 1;
                    let mine = gradient(comm.rank(), step, len);
                    let through = first.with_codec(codec.parse().unwrap()).at_step(step);
                    let input = total(&comm, mine.iter().map(|x| f64::from(*x)).collect());
                    let sum = comm
                        .all_reduce_compressed("w", mine, ReduceOp::Sum, &through)
                        .wait()
                        .unwrap();
                    for ((balance, input), sum) in balance.iter_mut().zip(&input).zip(&sum) {
                        scale = scale.max(input.abs());
                        *balance += input - f64::from(*sum);
                    }
                }
                let mut owed = vec![0f64; len];
                let transaction = first.feedback().unwrap().begin("w").unwrap();
                for part in [transaction.worker(0..len), transaction.owner(0..len)] {
                    if let Residual::Owed(part) = part.residual() {
                        owed.iter_mut()
                            .zip(part)
                            .for_each(|(owed, part)| *owed += f64::from(*part));
                    }
                }
                drop(transaction);
                let owed = total(&comm, owed);
                let worst =
                    balance.iter().zip(&owed).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
                let relative = worst / (scale * step as f64);
                assert!(relative < 2f64.powi(-20), "{ranks} ranks, after {codec}: {relative:e}");
                assert_eq!(
                    owed.iter().any(|x| *x != 0.0),
                    codec != "none",
                    "{ranks} ranks, after {codec}"
                );
            }
        });
    }
}

/// A dense call that fails, or whose result is of no use, pays nothing, on any rank.
#[test]
fn what_is_owed_stays_owed_if_a_dense_call_does_not_succeed() {
    let together = std::sync::Barrier::new(3);
    on_threads(3, |comm| {
        let top = Compressor::new("topk:0.05".parse().unwrap());
        let none = top.with_codec("none".parse().unwrap());
        comm.all_reduce_compressed("w", gradient(comm.rank(), 0, 100), ReduceOp::Mean, &top)
            .wait()
            .unwrap();
        let before = top.feedback().unwrap().to_bytes();
        let mut mine = vec![1.0f32; 100];
        if comm.rank() == 1 {
            mine[7] = f32::NAN;
        }
        let mean = comm.all_reduce_compressed("w", mine, ReduceOp::Mean, &none).wait().unwrap();
        assert!(mean[7].is_nan());
        assert_eq!(top.feedback().unwrap().to_bytes(), before, "rank {}: a NaN", comm.rank());

        // Ranks that are out of step, once all are done with the previous call.
        together.wait();
        let mine = gradient(comm.rank(), 1, if comm.rank() == 2 { 101 } else { 100 });
        let failed = comm.all_reduce_compressed("w", mine.clone(), ReduceOp::Mean, &none).wait();
        assert_eq!(failed.unwrap_err().take_input::<f32>(), Some(mine), "the input is as it was");
        assert_eq!(top.feedback().unwrap().to_bytes(), before, "rank {}: a failure", comm.rank());

        // The communicator has failed, so the next call is refused at once.
        let mine = gradient(comm.rank(), 2, 100);
        let refused = comm.all_reduce_compressed("w", mine.clone(), ReduceOp::Mean, &none).wait();
        assert!(refused.unwrap_err().take_input::<f32>().is_none_or(|input| input == mine));
        assert_eq!(top.feedback().unwrap().to_bytes(), before, "rank {}: a refusal", comm.rank());
    });
}

/// Many tensors in flight at once, dense calls between them, in f32, f64 and bf16, and waited for
/// in another order.
#[test]
fn coded_and_dense_calls_overlap() {
    on_threads(3, |comm| {
        let int8 = Compressor::new("int8".parse().unwrap());
        let half = Compressor::new("bf16".parse().unwrap()).dense_below(100);
        let mut coded = Vec::new();
        let mut dense = Vec::new();
        for i in 0..20usize {
            let name = format!("t{i}");
            coded.push(comm.all_reduce_compressed(
                &name,
                vec![i as f32; 1000 + i],
                ReduceOp::Sum,
                &int8,
            ));
            dense.push(comm.all_reduce(vec![i as u32; 50], ReduceOp::Sum));
        }
        let small = comm.all_reduce_compressed("small", vec![bf16::ONE; 99], ReduceOp::Sum, &half);
        let large = comm.all_reduce_compressed("large", vec![bf16::ONE; 100], ReduceOp::Sum, &half);
        let wide = comm.all_reduce_compressed("wide", vec![0.5f64; 1000], ReduceOp::Sum, &int8);
        for (i, pending) in coded.into_iter().enumerate().rev() {
            let sum = pending.wait().unwrap();
            let close = |x: &f32| (x - 3.0 * i as f32).abs() <= 0.05 * i as f32;
            assert!(sum.len() == 1000 + i && sum.iter().all(close), "{i}");
        }
        for (i, pending) in dense.into_iter().enumerate() {
            assert_eq!(pending.wait().unwrap(), vec![3 * i as u32; 50]);
        }
        assert_eq!(small.wait().unwrap(), vec![bf16::from_f32(3.0); 99]);
        assert_eq!(large.wait().unwrap(), vec![bf16::from_f32(3.0); 100]);
        assert!(wide.wait().unwrap().iter().all(|x| (x - 1.5).abs() < 0.02));
        let shard = comm
            .reduce_scatter_compressed("rs", vec![1.0f32; 10], ReduceOp::Sum, &int8)
            .wait()
            .unwrap();
        assert_eq!(shard.len(), if comm.rank() == 0 { 4 } else { 3 });
        let all =
            comm.all_gather_compressed("ag", vec![comm.rank() as f32; 5], &int8).wait().unwrap();
        assert!(all.iter().enumerate().all(|(i, x)| (x - (i / 5) as f32).abs() < 0.01), "{all:?}");
    });
}

/// Short vectors are coded by a thread that waits, long ones on a thread of their own. Any thread
/// may find another's result, and has to tell it.
#[test]
fn every_thread_gets_its_own_result_however_long() {
    on_threads(2, |comm| {
        let int8 = Compressor::new("int8".parse().unwrap());
        for round in 0..50 {
            let start = |i: usize| {
                let len = if i % 4 == round % 4 { 40_000 } else { 10 + i };
                (
                    i,
                    len,
                    comm.all_reduce_compressed(
                        &format!("{i} of {len}"),
                        vec![i as f32; len],
                        ReduceOp::Sum,
                        &int8,
                    ),
                )
            };
            let started: Vec<_> = (0..8).map(start).collect();
            std::thread::scope(|scope| {
                for (i, len, pending) in started {
                    scope.spawn(move || {
                        let sum = pending.wait().unwrap();
                        assert!(
                            sum.len() == len
                                && sum.iter().all(|x| (x - 2.0 * i as f32).abs() < 0.1),
                            "{i}"
                        );
                    });
                }
            });
        }
    });
}

#[test]
fn what_cannot_be_is_refused_with_a_reason() {
    on_threads(2, |comm| {
        let top = Compressor::new("topk:0.1".parse().unwrap());
        let refused =
            |error: Error, says: &str| assert!(error.to_string().contains(says), "{error}");
        let call = |op| comm.all_reduce_compressed("w", vec![1.0f32; 100], op, &top);
        refused(call(ReduceOp::Max).wait().unwrap_err(), "with sum or mean");
        let first = call(ReduceOp::Sum);
        refused(call(ReduceOp::Sum).wait().unwrap_err(), "in flight");
        first.wait().unwrap();

        // One rank's NaN: the same error on both, the input back, and what is owed unchanged.
        let before = top.feedback().unwrap().to_bytes();
        let mut spoiled = vec![1.0f32; 100];
        if comm.rank() == 1 {
            spoiled[3] = f32::NAN;
        }
        let mut error =
            comm.all_reduce_compressed("w", spoiled, ReduceOp::Sum, &top).wait().unwrap_err();
        let Error::NotEncodable { error: source, .. } = &error else { panic!("{error}") };
        assert_eq!(*source, CodingError::NotFinite { rank: 1, tensor: "w".into(), element: 3 });
        assert_eq!(error.take_input::<f32>().unwrap().len(), 100);
        assert_eq!(top.feedback().unwrap().to_bytes(), before);
        call(ReduceOp::Sum).wait().unwrap();

        // Different codecs: out of step, on both.
        let other =
            Compressor::new(if comm.rank() == 0 { "int8" } else { "int4" }.parse().unwrap());
        let error = comm
            .all_reduce_compressed("w", vec![1.0f32; 100], ReduceOp::Sum, &other)
            .wait()
            .unwrap_err();
        assert!(matches!(error.fault(), Some(Fault::Desync(..))), "{error}");
    });
}

#[test]
fn a_rank_that_dies_half_way_leaves_the_others_owing_what_they_owed() {
    const TEST: &str = "a_rank_that_dies_half_way_leaves_the_others_owing_what_they_owed";
    for link in common::links() {
        let children = start_processes(TEST, 3, link, |comm| {
            let top = Compressor::new("topk:0.01".parse().unwrap());
            for step in 0.. {
                if comm.rank() == 2 && step == 5 {
                    kill_process(getpid(), Signal::KILL).unwrap();
                }
                let before = top.feedback().unwrap().to_bytes();
                let mine = gradient(comm.rank(), step, 200_000);
                match comm.all_reduce_compressed("w", mine.clone(), ReduceOp::Mean, &top).wait() {
                    Ok(_) => assert!(step < 5),
                    Err(mut error) => {
                        assert_eq!(error.fault(), Some(&Fault::PeerLost(Peer(2))), "{error}");
                        assert_eq!(error.take_input::<f32>(), Some(mine));
                        assert_eq!(top.feedback().unwrap().to_bytes(), before);
                        return;
                    }
                }
            }
        });
        for (rank, mut child) in children.into_iter().enumerate() {
            if rank == 2 {
                child.wait().unwrap();
            } else {
                assert_succeeds(child, link);
            }
        }
    }
}

/// A codec that is wrong in one way or another.
#[derive(Debug)]
enum Wrong {
    Refuses,
    PanicsInEncode,
    PanicsInDecode,
    TooLong,
}

impl farwire::VectorCodec for Wrong {
    fn name(&self) -> String {
        "wrong".into()
    }

    fn encode(&self, values: &[f32], _: &farwire::CodedPlace, out: &mut Vec<u8>) {
        assert!(!matches!(self, Self::PanicsInEncode), "as asked");
        values.iter().for_each(|value| out.extend(value.to_le_bytes()));
        if matches!(self, Self::TooLong) {
            out.extend([0; 100]);
        }
    }

    fn add_decoded_into(
        &self,
        bytes: &[u8],
        _: &farwire::CodedPlace,
        acc: &mut [f32],
    ) -> Result<(), farwire::DecodeError> {
        assert!(!matches!(self, Self::PanicsInDecode), "as asked");
        // Rank 1's vector starts with a two.
        if matches!(self, Self::Refuses) && bytes[..4] == 2f32.to_le_bytes() {
            return Err(farwire::DecodeError::Field("two"));
        }
        for (acc, value) in acc.iter_mut().zip(bytes.as_chunks::<4>().0) {
            *acc += f32::from_le_bytes(*value);
        }
        Ok(())
    }

    fn max_message_len(&self, elements: usize) -> usize {
        4 * elements
    }
}

#[test]
fn a_codec_that_is_wrong_is_an_error_and_never_a_result_or_a_wait() {
    for which in 0..4 {
        on_threads(2, |comm| {
            let on_0 = comm.rank() == 0;
            let codec = match which {
                0 => Wrong::Refuses,
                1 => Wrong::PanicsInEncode,
                2 => Wrong::PanicsInDecode,
                _ => Wrong::TooLong,
            };
            let compressor = Compressor::new(CodecSpec::custom(codec)).without_feedback();
            let mine = vec![if on_0 { 1.0f32 } else { 2.0 }; 4];
            let error =
                comm.all_reduce_compressed("w", mine.clone(), ReduceOp::Sum, &compressor).wait();
            let mut error = error.expect_err("a wrong codec has no result");
            assert_eq!(error.take_input::<f32>(), Some(mine), "{which}: {error}");
        });
    }
}
