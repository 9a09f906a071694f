//! Tier 2: collectives through codecs, on the simulated network, against plainly written
//! references.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on should say where")]

use std::num::{NonZeroU32, NonZeroUsize};
use std::ops::Range;
use std::time::Duration;

use farwire_codec::collective::{CodedCollective, CodingError, Collective, Floats, Order};
use farwire_codec::{
    Codec, CodecSpec, CodedPlace, Context, Encoded, ErrorFeedback, Job, MessageCodec, PowerP,
    PowerQ, Residual, Shape, Transaction, Travel, VectorCodec, samples, typical,
};
use farwire_proto::{Call, Config, Counts, Fault, Options, Peer, Rank, ReduceOp, Time, WorldSize};
use farwire_sim::{Coded, JobEnd, Link, Network, Report, Sim, Submission, Trouble};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

fn world(n: usize) -> WorldSize {
    WorldSize::new(n as u32).unwrap()
}

fn gradients(seed: u64, ranks: usize, len: usize) -> Vec<Vec<f32>> {
    (0..ranks)
        .map(|rank| {
            let mut rng = ChaCha8Rng::seed_from_u64(seed * 1000 + rank as u64);
            (0..len).map(|_| rng.random_range(-1.0f32..1.0).powi(3)).collect()
        })
        .collect()
}

/// One rank's order for the tensor `w`, without error feedback.
fn order(
    collective: Collective,
    codec: CodecSpec,
    rank: usize,
    ranks: usize,
    input: Vec<f32>,
    step: u64,
) -> Order {
    Order {
        collective,
        codec,
        rank: Rank(rank as u32),
        world: world(ranks),
        placement: None,
        input: Floats::F32(input),
        dimensions: None,
        tensor: "w".into(),
        feedback: None,
        context: Context { seed: 5, step, tensor: Context::tensor_id("w") },
        threads: NonZeroUsize::MIN,
        output: vec![f32::NAN; 3],
    }
}

fn spec(name: &str) -> CodecSpec {
    name.parse().unwrap()
}

/// A network whose frames arrive in another order with every seed, and where coding takes more or
/// less time.
fn network(ranks: usize, seed: u64) -> Network {
    let lan = Network::lan(ranks as u32);
    let link = Link { jitter: Duration::from_millis(seed % 7), ..lan.link };
    Network { link, seed, coding: Duration::from_millis(seed % 5), ..lan }
}

/// Runs one exchange on all ranks, with frames of `segment` bytes.
fn simulate(orders: Vec<Order>, segment: usize, network: Network) -> Report {
    // Lanes keep in step, or go as far ahead as they like.
    let lead = NonZeroU32::new(network.seed as u32 % 3);
    let mut sim = Sim::with_config(network, Config { lead, ..Config::default() });
    for order in orders {
        let peer = Peer(order.rank.0);
        let options = Options { segment: NonZeroUsize::new(segment), ..Options::default() };
        let submission = Submission::coded(CodedCollective::new(order).unwrap());
        sim.submit(peer, Submission { options, ..submission });
    }
    sim.run().unwrap()
}

fn results(report: &Report) -> Vec<Vec<f32>> {
    let floats = |bytes: &[u8]| bytemuck::pod_collect_to_vec(bytes);
    report
        .jobs()
        .iter()
        .map(|job| floats(job.result().unwrap_or_else(|| panic!("{:?}", job.end))))
        .collect()
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

/// The reference: all ranks in one loop, the codec used as a library, sums in rank order, and no
/// chunks, rounds or parcels.
struct Reference {
    codec: CodecSpec,
    feedback: Vec<ErrorFeedback>,
}

impl Reference {
    fn new(codec: &str, ranks: usize) -> Self {
        let feedback = (0..ranks).map(|_| ErrorFeedback::new()).collect();
        Self { codec: codec.parse().unwrap(), feedback }
    }

    fn all_reduce(&self, gradients: &[Vec<f32>], step: u64) -> Vec<f32> {
        let context = Context { seed: 5, step, tensor: Context::tensor_id("w") };
        let mut transactions: Vec<_> =
            self.feedback.iter().map(|rank| rank.begin("w").unwrap()).collect();
        let sum = match self.codec.travels() {
            Travel::Shards(codec) | Travel::Whole(codec) => {
                two_phase(&*codec, gradients, context, &mut transactions)
            }
            Travel::Factors(codec) => {
                let n = gradients[0].len();
                let add = |parts: Vec<&[f32]>| {
                    let mut sum = vec![0.0; parts[0].len()];
                    parts
                        .iter()
                        .for_each(|part| sum.iter_mut().zip(*part).for_each(|(sum, x)| *sum += x));
                    sum
                };
                let begin = |(gradient, transaction): (&Vec<f32>, &Transaction)| {
                    let owed = transaction.worker(0..n);
                    let values = gradient.as_slice().into();
                    codec
                        .begin(
                            values,
                            owed.residual(),
                            transaction.warm(),
                            Shape::of(&[n]),
                            context,
                        )
                        .unwrap()
                };
                let waiting: Vec<_> = gradients.iter().zip(&transactions).map(begin).collect();
                let p = add(waiting.iter().map(PowerP::p).collect());
                let waiting: Vec<_> =
                    waiting.into_iter().map(|rank| rank.with_sum(p.clone()).unwrap()).collect();
                let q = add(waiting.iter().map(PowerQ::q).collect());
                let mut result = Vec::new();
                for (rank, transaction) in waiting.into_iter().zip(&mut transactions) {
                    result = vec![0.0; n];
                    let state = rank.with_sum(q.clone(), &mut result).unwrap();
                    transaction.set_worker(0, state.residual);
                    transaction.set_warm(state.warm);
                }
                result
            }
        };
        transactions.into_iter().for_each(Transaction::commit);
        sum
    }
}

/// Blocks of a vector, the first ones longer.
fn cut(len: usize, ranks: usize) -> Vec<Range<usize>> {
    let mut start = 0;
    (0..ranks)
        .map(|rank| {
            let end = start + len / ranks + usize::from(rank < len % ranks);
            std::mem::replace(&mut start, end)..end
        })
        .collect()
}

fn two_phase(
    codec: &dyn MessageCodec,
    gradients: &[Vec<f32>],
    context: Context,
    transactions: &mut [Transaction],
) -> Vec<f32> {
    let (n, shards) = (gradients[0].len(), cut(gradients[0].len(), gradients.len()));
    let place = CodedPlace::whole(context, n);
    let mut scattered = Vec::new();
    for (rank, (gradient, transaction)) in gradients.iter().zip(&mut *transactions).enumerate() {
        let (owed, mut out) = (transaction.worker(0..n), Encoded::default());
        let job =
            Job { rank: rank as u32, ..Job::worker(gradient, owed.residual(), &place, &shards) };
        codec.encode(&job, &mut out).unwrap();
        transaction.set_worker(0, out.residual);
        scattered.push(out.messages);
    }
    let mut result = vec![0.0; n];
    for (owner, (shard, transaction)) in shards.iter().zip(transactions).enumerate() {
        let (place, mut sum) = (place.part(shard.clone()), vec![0.0; shard.len()]);
        for messages in &scattered {
            codec.add_decoded_into(&messages[owner], &place, &mut sum).unwrap();
        }
        let (owed, mut out) = (transaction.owner(shard.clone()), Encoded::default());
        let job = Job { rank: owner as u32, ..Job::owner(&sum, owed.residual(), &place) };
        codec.encode(&job, &mut out).unwrap();
        transaction.set_owner(shard.start, out.residual);
        codec.add_decoded_into(&out.messages[0], &place, &mut result[shard.clone()]).unwrap();
    }
    result
}

/// Worlds of all sizes, several steps with error feedback, frames of all sizes in any order: all
/// ranks get the same bits, those of the reference.
#[test]
fn every_codec_equals_its_reference_on_every_world() {
    for ranks in [1, 2, 3, 4, 7, 16, 64] {
        // Many ranks find nothing in a codec's corner cases that a few do not.
        for codec in
            samples().filter(|codec| ranks < 16 || typical().any(|typical| typical == *codec))
        {
            let reference = Reference::new(codec, ranks);
            let feedback: Vec<_> = (0..ranks).map(|_| ErrorFeedback::new()).collect();
            for (step, len) in [(0, 700), (1, 700), (2, 700)] {
                let gradients = gradients(step, ranks, len);
                let expected = reference.all_reduce(&gradients, step);
                let orders = gradients.iter().zip(&feedback).enumerate().map(
                    |(rank, (gradient, feedback))| Order {
                        feedback: Some(feedback.begin("w").unwrap()),
                        ..order(
                            Collective::AllReduce(ReduceOp::Sum),
                            spec(codec),
                            rank,
                            ranks,
                            gradient.clone(),
                            step,
                        )
                    },
                );
                let segment = [1 << 16, 7, 64][step as usize];
                let report =
                    simulate(orders.collect(), segment, network(ranks, step + ranks as u64));
                for (rank, result) in results(&report).iter().enumerate() {
                    assert_eq!(
                        bits(result),
                        bits(&expected),
                        "{codec}, rank {rank} of {ranks}, step {step}"
                    );
                }
            }
            for (ours, theirs) in feedback.iter().zip(&reference.feedback) {
                assert_eq!(ours.to_bytes(), theirs.to_bytes(), "{codec}: residuals");
            }
        }
    }
}

#[test]
fn awkward_lengths_work_through_every_codec() {
    for ranks in [1, 2, 3, 5] {
        for len in [0, 1, ranks - 1, ranks, ranks + 1] {
            for codec in samples() {
                let gradients = gradients(1, ranks, len);
                let expected = Reference::new(codec, ranks).all_reduce(&gradients, 0);
                let feedback = ErrorFeedback::new();
                let orders = gradients.iter().enumerate().map(|(rank, gradient)| Order {
                    feedback: Some(feedback.begin(&rank.to_string()).unwrap()),
                    ..order(
                        Collective::AllReduce(ReduceOp::Sum),
                        spec(codec),
                        rank,
                        ranks,
                        gradient.clone(),
                        0,
                    )
                });
                let report = simulate(orders.collect(), 64, network(ranks, 1));
                for result in results(&report) {
                    assert_eq!(
                        bits(&result),
                        bits(&expected),
                        "{codec}, {len} elements on {ranks} ranks"
                    );
                }
            }
        }
    }
}

/// A vector of several chunks: each is a vector of its own, and none is lost.
#[test]
fn long_vectors_travel_in_chunks() {
    let (ranks, len) = (3, (9 << 20) + 5);
    let gradients = gradients(3, ranks, len);
    for codec in ["bf16", "int8", "none", "topk:0.01"] {
        let orders: Vec<_> = gradients
            .iter()
            .enumerate()
            .map(|(rank, gradient)| {
                order(
                    Collective::AllReduce(ReduceOp::Mean),
                    spec(codec),
                    rank,
                    ranks,
                    gradient.clone(),
                    0,
                )
            })
            .collect();
        let rounds = CodedCollective::new(order(
            Collective::AllReduce(ReduceOp::Mean),
            spec(codec),
            0,
            ranks,
            gradients[0].clone(),
            0,
        ))
        .unwrap()
        .rounds();
        assert_eq!(rounds, if codec.starts_with("topk") { 2 } else { 6 });
        let results = results(&simulate(orders, 1 << 16, network(ranks, 4)));
        assert!(results.windows(2).all(|pair| pair[0] == pair[1]), "{codec}: ranks differ");
        if !codec.starts_with("topk") {
            for (i, result) in results[0].iter().enumerate() {
                let mean = gradients.iter().map(|gradient| gradient[i]).sum::<f32>() / 3.0;
                let close = if codec == "none" { 0.0 } else { 0.02 };
                assert!(
                    (result - mean).abs() <= close,
                    "{codec}: element {i}: {result} for {mean}"
                );
            }
        }
    }
}

#[test]
fn reduce_scatter_and_all_gather_go_through_codecs_too() {
    for ranks in [1, 2, 3, 7] {
        let (len, shards) = (500, cut(500, ranks));
        let gradients = gradients(9, ranks, len);
        for codec in samples() {
            let through = || spec(codec);
            let orders = |collective: &dyn Fn(usize) -> Collective,
                          input: &dyn Fn(usize) -> Vec<f32>| {
                (0..ranks)
                    .map(|rank| order(collective(rank), through(), rank, ranks, input(rank), 0))
                    .collect::<Vec<_>>()
            };
            let sum = |i: usize| gradients.iter().map(|gradient| gradient[i]).sum::<f32>();
            let exact = ["none", "topk:1,values=f32"].contains(&codec);

            let scattered = orders(&|_| Collective::ReduceScatter(ReduceOp::Sum), &|rank| {
                gradients[rank].clone()
            });
            let scattered = results(&simulate(scattered, 64, network(ranks, 2)));
            for (result, shard) in scattered.iter().zip(&shards) {
                assert_eq!(result.len(), shard.len(), "{codec}");
                assert!(
                    !exact || result.iter().zip(shard.clone()).all(|(result, i)| *result == sum(i)),
                    "{codec}"
                );
            }

            if through().messages().is_none() {
                let order = order(
                    Collective::AllGather(Counts::Each(3)),
                    through(),
                    0,
                    ranks,
                    vec![0.0; 3],
                    0,
                );
                assert!(
                    CodedCollective::new(order)
                        .unwrap_err()
                        .0
                        .to_string()
                        .contains("cannot gather")
                );
                continue;
            }
            let counts = Counts::listed(
                shards.iter().map(ExactSizeIterator::len).collect::<Vec<_>>(),
                world(ranks),
            );
            let gathered = orders(&|_| Collective::AllGather(counts.clone()), &|rank| {
                gradients[0][shards[rank].clone()].to_vec()
            });
            let gathered = results(&simulate(gathered, 64, network(ranks, 3)));
            assert!(
                gathered.windows(2).all(|pair| bits(&pair[0]) == bits(&pair[1])),
                "{codec}: ranks differ"
            );
            assert!(!exact || gathered[0] == gradients[0], "{codec}");
        }
    }
}

/// Halves a vector's precision in its own way, and knows nothing of shards.
#[derive(Debug)]
struct Halves;

impl VectorCodec for Halves {
    fn name(&self) -> String {
        "halves".into()
    }

    fn encode(&self, values: &[f32], _: &CodedPlace, out: &mut Vec<u8>) {
        values.iter().for_each(|value| out.extend(&value.to_le_bytes()[2..]));
    }

    fn add_decoded_into(
        &self,
        bytes: &[u8],
        _: &CodedPlace,
        acc: &mut [f32],
    ) -> Result<(), farwire_codec::DecodeError> {
        if bytes.len() != 2 * acc.len() {
            return Err(farwire_codec::DecodeError::Length {
                need: 2 * acc.len(),
                given: bytes.len(),
            });
        }
        for (acc, half) in acc.iter_mut().zip(bytes.as_chunks::<2>().0) {
            *acc += f32::from_le_bytes([0, 0, half[0], half[1]]);
        }
        Ok(())
    }

    fn max_message_len(&self, elements: usize) -> usize {
        2 * elements
    }
}

/// A codec from another crate that implements the whole trait. Its name is already taken, which
/// must not matter.
#[derive(Debug)]
struct Relabelled;

impl Codec for Relabelled {
    fn name(&self) -> String {
        "none".into()
    }

    fn travels(self: std::sync::Arc<Self>) -> Travel {
        spec("int8").travels()
    }
}

#[test]
fn a_codec_of_another_crate_travels_like_those_that_have_names() {
    let gradients = gradients(9, 3, 1000);
    let sum = |codec: CodecSpec| {
        let orders = gradients.iter().enumerate().map(|(rank, gradient)| {
            order(Collective::AllReduce(ReduceOp::Sum), codec.clone(), rank, 3, gradient.clone(), 0)
        });
        results(&simulate(orders.collect(), 64, network(3, 1))).swap_remove(0)
    };
    let own = CodecSpec::new(Relabelled);
    assert!(!own.is_none() && own != CodecSpec::none());
    assert_eq!(bits(&sum(own)), bits(&sum(spec("int8"))));
}

#[test]
fn a_codec_of_ones_own_adds_in_rank_order() {
    for ranks in [1, 2, 3, 7] {
        let gradients = gradients(9, ranks, 100);
        let through = || CodecSpec::custom(Halves);
        let orders = (0..ranks).map(|rank| {
            order(
                Collective::AllReduce(ReduceOp::Sum),
                through(),
                rank,
                ranks,
                gradients[rank].clone(),
                0,
            )
        });
        let halved = |value: f32| f32::from_bits(value.to_bits() & 0xffff_0000);
        let expected: Vec<f32> = (0..100)
            .map(|i| gradients.iter().fold(0.0, |sum, gradient| sum + halved(gradient[i])))
            .collect();
        for result in results(&simulate(orders.collect(), 64, network(ranks, 5))) {
            assert_eq!(bits(&result), bits(&expected));
        }
    }
}

/// One rank's NaN, or two ranks': every rank gets the same error, its input back, and its residuals
/// as they were.
#[test]
fn a_nan_anywhere_is_the_same_error_everywhere() {
    for codec in samples() {
        for (ranks, bad) in [(1, vec![0]), (3, vec![1]), (4, vec![3, 2])] {
            let feedback: Vec<_> = (0..ranks).map(|_| ErrorFeedback::new()).collect();
            let mut before = Vec::new();
            for step in 0..3 {
                let mut gradients = gradients(step, ranks, 300);
                let spoiled = step == 1;
                if spoiled {
                    before = feedback.iter().map(ErrorFeedback::to_bytes).collect();
                    bad.iter().for_each(|rank| {
                        gradients[*rank][17] = [f32::NAN, f32::INFINITY][rank % 2]
                    });
                }
                let orders = gradients.iter().zip(&feedback).enumerate().map(
                    |(rank, (gradient, feedback))| Order {
                        feedback: Some(feedback.begin("w").unwrap()),
                        ..order(
                            Collective::AllReduce(ReduceOp::Sum),
                            spec(codec),
                            rank,
                            ranks,
                            gradient.clone(),
                            step,
                        )
                    },
                );
                let report = simulate(orders.collect(), 64, network(ranks, step));
                if !spoiled {
                    results(&report);
                    continue;
                }
                let rank = *bad.iter().min().unwrap();
                let expected = CodingError::NotFinite { rank, tensor: "w".into(), element: 17 };
                for (job, gradient) in report.jobs().iter().zip(&gradients) {
                    let JobEnd::NotEncodable { error, input } = &job.end else {
                        panic!("{codec}: {:?}", job.end)
                    };
                    assert_eq!(error, &expected, "{codec}");
                    assert_eq!(input, bytemuck::cast_slice::<f32, u8>(gradient));
                }
                let after: Vec<_> = feedback.iter().map(ErrorFeedback::to_bytes).collect();
                assert_eq!(before, after, "{codec}: residuals");
            }
        }
    }
}

/// Finite inputs whose sum is not: the owner reports it.
#[test]
fn a_sum_that_does_not_fit_is_the_same_error_everywhere() {
    for codec in ["none", "topk:0.5,values=f32", "powersgd:1"] {
        let orders = (0..3).map(|rank| {
            order(Collective::AllReduce(ReduceOp::Sum), spec(codec), rank, 3, vec![3e38; 9], 0)
        });
        let report = simulate(orders.collect(), 64, network(3, 1));
        let errors: Vec<_> = report
            .jobs()
            .iter()
            .map(|job| match &job.end {
                JobEnd::NotEncodable { error, .. } => error.clone(),
                end => panic!("{codec}: {end:?}"),
            })
            .collect();
        assert!(errors.windows(2).all(|pair| pair[0] == pair[1]), "{codec}: {errors:?}");
    }
}

/// Conservation: what went in equals what came out plus what is owed, over a hundred steps, some of
/// which fail halfway.
#[test]
fn nothing_is_lost_when_ranks_die_half_way() {
    let (ranks, len, steps) = (3, 400, 100);
    for codec in samples().filter(|codec| *codec != "none") {
        let feedback: Vec<_> = (0..ranks).map(|_| ErrorFeedback::new()).collect();
        let mut balance = vec![0f64; len];
        let mut scale = 0f64;
        let (mut failures, mut crashes) = (0, 0u64);
        for step in 0..steps {
            let gradients = gradients(step, ranks, len);
            let mut network = network(ranks, step);
            let fails = step % 10 == 3;
            if fails {
                // A rank dies at a step that changes with each failure.
                crashes += 1;
                network.troubles = vec![Trouble::Crash { peer: Peer(2), step: 1 + crashes % 3 }];
            }
            let orders =
                gradients.iter().zip(&feedback).enumerate().map(|(rank, (gradient, feedback))| {
                    Order {
                        feedback: Some(feedback.begin("w").unwrap()),
                        ..order(
                            Collective::AllReduce(ReduceOp::Sum),
                            spec(codec),
                            rank,
                            ranks,
                            gradient.clone(),
                            step,
                        )
                    }
                });
            let before: Vec<_> = feedback.iter().map(ErrorFeedback::to_bytes).collect();
            let orders: Vec<_> = orders.collect();
            let report = simulate(orders, 64, network);
            let done = report.jobs().iter().filter(|job| job.result().is_some()).count();
            if done == ranks {
                let result = &results(&report)[0];
                for (i, balance) in balance.iter_mut().enumerate() {
                    let input: f64 = gradients.iter().map(|gradient| f64::from(gradient[i])).sum();
                    scale = scale.max(input.abs());
                    *balance += input - f64::from(result[i]);
                }
                continue;
            }
            failures += 1;
            // It had not sent all of its shards, so no rank is done. All owe what they owed before;
            // the dead rank comes back with what it had.
            assert_eq!(done, 0, "{codec}");
            for (feedback, before) in feedback.iter().zip(&before) {
                assert_eq!(
                    feedback.to_bytes(),
                    *before,
                    "{codec}: a failed call changed residuals"
                );
            }
        }
        assert!(failures >= 9, "{codec}: {failures} steps failed");
        let owed = owed(&feedback, len);
        let worst = balance
            .iter()
            .zip(&owed)
            .map(|(balance, owed)| (balance - owed).abs())
            .fold(0.0, f64::max);
        let relative = worst / (scale * steps as f64);
        assert!(relative < 2f64.powi(-20), "{codec}: {relative:e}");
    }
}

/// What all ranks together owe for each element.
fn owed(feedback: &[ErrorFeedback], len: usize) -> Vec<f64> {
    let mut owed = vec![0f64; len];
    for feedback in feedback {
        let transaction = feedback.begin("w").unwrap();
        for part in [transaction.worker(0..len), transaction.owner(0..len)] {
            if let Residual::Owed(values) = part.residual() {
                owed.iter_mut().zip(values).for_each(|(owed, value)| *owed += f64::from(*value));
            }
        }
    }
    owed
}

/// One all-reduce with error feedback, whose result all ranks share.
fn all_reduce(
    codec: &str,
    feedback: &[ErrorFeedback],
    gradients: &[Vec<f32>],
    step: u64,
) -> Vec<f32> {
    let sum = Collective::AllReduce(ReduceOp::Sum);
    let ranks = gradients.len();
    let orders =
        gradients.iter().zip(feedback).enumerate().map(|(rank, (gradient, feedback))| Order {
            feedback: Some(feedback.begin("w").unwrap()),
            ..order(sum.clone(), spec(codec), rank, ranks, gradient.clone(), step)
        });
    let mut results = results(&simulate(orders.collect(), 1 << 16, network(ranks, step)));
    assert!(
        results.windows(2).all(|pair| bits(&pair[0]) == bits(&pair[1])),
        "{codec}: ranks differ"
    );
    results.swap_remove(0)
}

/// What one codec leaves out, the next one sends, whether a worker or an owner owes it, and
/// whichever rank is the owner by then.
#[test]
fn nothing_is_lost_when_the_codec_changes() {
    let len = 500;
    for ranks in [1, 2, 3, 5] {
        let feedback: Vec<_> = (0..ranks).map(|_| ErrorFeedback::new()).collect();
        let (mut balance, mut scale, mut step) = (vec![0f64; len], 0f64, 0);
        for codec in
            ["topk:0.05", "none", "int8", "powersgd:2", "randk:0.1", "topk:0.02,mode=union", "none"]
        {
            for _ in 0..5 {
                step += 1;
                let gradients = gradients(step, ranks, len);
                let result = all_reduce(codec, &feedback, &gradients, step);
                for (i, balance) in balance.iter_mut().enumerate() {
                    let input: f64 = gradients.iter().map(|gradient| f64::from(gradient[i])).sum();
                    scale = scale.max(input.abs());
                    *balance += input - f64::from(result[i]);
                }
                if codec.starts_with("powersgd") {
                    let owner = |feedback: &ErrorFeedback| feedback.norms("w").unwrap().owner;
                    assert!(
                        feedback.iter().all(|rank| owner(rank) == 0.0),
                        "nobody is an owner: nobody would send it"
                    );
                }
            }
            let owed = owed(&feedback, len);
            let worst = balance.iter().zip(&owed).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
            let relative = worst / (scale * step as f64);
            assert!(relative < 2f64.powi(-20), "{ranks} ranks, after {codec}: {relative:e}");
            assert!(
                codec != "none" || owed.iter().all(|owed| *owed == 0.0),
                "{ranks} ranks: still owed"
            );
        }
    }
}

/// Top-k cuts a vector into one shard for each rank; `none` cuts a long vector into chunks first.
/// So most elements change their owner.
#[test]
fn nothing_is_left_behind_when_elements_change_their_owner() {
    let (ranks, len) = (2, (1 << 22) + 1000);
    let feedback: Vec<_> = (0..ranks).map(|_| ErrorFeedback::new()).collect();
    all_reduce("topk:0.01", &feedback, &gradients(1, ranks, len), 1);
    assert!(feedback.iter().all(|feedback| feedback.norms("w").unwrap().owner > 0.0));
    all_reduce("none", &feedback, &gradients(2, ranks, len), 2);
    assert!(!feedback.iter().any(|feedback| feedback.owes("w")));
}

/// What one rank sends through a codec, by the lengths of its real messages, in worlds whose
/// vectors would not all fit in memory.
#[test]
fn volumes_are_those_of_the_formulas() {
    let len = 40_000_000;
    // Bits per element of the vector, as the codecs' descriptions give them: kept elements at 1 %
    // cost 8.11 bits for the index.
    let cases = [
        ("topk:0.01", (8.11 + 16.0) * 0.01),
        ("topk:0.01,values=int8", (8.11 + 8.0 + 0.2) * 0.01),
        ("randk:0.01", 16.0 * 0.01),
        ("int8", 8.0 + 32.0 / 256.0),
        ("sign", 1.0),
        ("bf16", 16.0),
    ];
    let gradient = &gradients(1, 1, len)[0];
    let mut bytes_by_codec = Vec::new();
    for (codec, bits) in cases {
        let encoder = spec(codec).messages().unwrap();
        let mut by_world = Vec::new();
        for ranks in [2, 4, 16, 64, 256] {
            let shards = cut(len, ranks);
            let place = CodedPlace::whole(Context::default(), len);
            let mut out = Encoded::default();
            encoder
                .encode(&Job::worker(gradient, Residual::Off, &place, &shards), &mut out)
                .unwrap();
            let scatter: Vec<usize> =
                out.messages.iter().map(|message| message.len() + 1).collect();
            // An owner's sum is as dense as a gradient.
            let shard = place.part(shards[0].clone());
            encoder
                .encode(&Job::owner(&gradient[shards[0].clone()], Residual::Off, &shard), &mut out)
                .unwrap();
            let gather = vec![out.messages[0].len() + 1; ranks];
            let call =
                Call::AllReduce { count: len, dtype: farwire_proto::DType::F32, op: ReduceOp::Sum };
            let id = std::num::NonZeroU32::MIN;
            let call = Call::Coded { call: Box::new(call), codec: id, rounds: 2, max: 1 << 30 };
            let mut sim = Sim::new(network(ranks, 0));
            for peer in world(ranks).ranks() {
                let coded = Some(Coded::Lengths(vec![scatter.clone(), gather.clone()]));
                sim.submit(
                    Peer(peer.0),
                    Submission { coded, ..Submission::new(call.clone(), Vec::new()) },
                );
            }
            let report = sim.run().unwrap();
            let sent = report.ranks.iter().map(|rank| rank.wire_bytes).max().unwrap();
            let formula = 2.0 * len as f64 * bits / 8.0 * (ranks - 1) as f64 / ranks as f64;
            let ratio = sent as f64 / formula;
            println!(
                "{codec:>24} on {ranks:>3} ranks: {sent:>10} bytes, {ratio:.4} of the formula"
            );
            assert!((0.97..=1.03).contains(&ratio), "{codec} on {ranks} ranks: {ratio:.4}");
            by_world.push(sent as f64);
        }
        let growth = by_world[4] / by_world[1];
        println!("{codec:>24}: bytes(256) / bytes(4) = {growth:.4}");
        assert!(growth <= 1.36, "{codec}: {growth}");
        bytes_by_codec.push(by_world);
    }
}

/// Parcels that no codec makes, in any round: every other rank ends with an error that names their
/// sender, gets its input back and owes what it owed before.
#[test]
fn nonsense_from_one_rank_fails_all_others_and_changes_no_residuals() {
    let ranks = 3;
    for (codec, rounds) in [("int8", 2), ("topk:0.05", 2), ("powersgd:2", 4), ("sign", 2)] {
        for (round, seed) in (0..rounds).flat_map(|round| (0..10).map(move |seed| (round, seed))) {
            let gradients = gradients(seed, ranks, 100);
            let feedback: Vec<_> = (0..ranks).map(|_| ErrorFeedback::new()).collect();
            let before: Vec<_> = feedback.iter().map(ErrorFeedback::to_bytes).collect();
            let orders =
                gradients.iter().zip(&feedback).enumerate().map(|(rank, (gradient, feedback))| {
                    Order {
                        feedback: Some(feedback.begin("w").unwrap()),
                        ..order(
                            Collective::AllReduce(ReduceOp::Sum),
                            spec(codec),
                            rank,
                            ranks,
                            gradient.clone(),
                            0,
                        )
                    }
                });
            let troubles = vec![Trouble::Nonsense { peer: Peer(1), round }];
            let report =
                simulate(orders.collect(), 64, Network { troubles, ..network(ranks, seed) });
            for rank in [0, 2] {
                let JobEnd::Failed { error, input } = &report.jobs()[rank].end else {
                    panic!("{codec}, round {round}, rank {rank}: {:?}", report.jobs()[rank].end)
                };
                assert_eq!(error.fault, Fault::BadFrame(Peer(1)), "{codec}, round {round}");
                assert_eq!(input, bytemuck::cast_slice::<f32, u8>(&gradients[rank]));
                assert_eq!(
                    feedback[rank].to_bytes(),
                    before[rank],
                    "{codec}: a failed call changed residuals"
                );
            }
        }
    }
}

#[test]
fn ranks_with_different_codecs_are_out_of_step() {
    let orders = (0..3).map(|rank| {
        let through = spec(if rank == 1 { "int8" } else { "int4" });
        order(Collective::AllReduce(ReduceOp::Sum), through, rank, 3, vec![1.0; 100], 0)
    });
    let report = simulate(orders.collect(), 64, network(3, 1));
    for job in report.jobs() {
        let error = job.error().unwrap_or_else(|| panic!("{:?}", job.end)).to_string();
        assert!(error.contains("differ in codec"), "{error}");
    }
    assert!(report.ended < Time(Duration::from_secs(3)));
}
