//! Tier 2: compressed all-reduces between hosts with several ranks each, against a reference that
//! knows neither rounds nor parcels.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on should say where")]

use std::num::{NonZeroU32, NonZeroUsize};
use std::ops::Range;
use std::time::Duration;

use farwire_codec::collective::{CodedCollective, Collective, Floats, Order};
use farwire_codec::{
    CodecSpec, CodedPlace, Context, Encoded, ErrorFeedback, Job, MessageCodec, Transaction,
};
use farwire_proto::{Config, Fault, Options, Peer, Placement, Rank, ReduceOp, WorldSize};
use farwire_sim::{JobEnd, Link, Network, Report, Sim, Submission, Trouble};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

const CODECS: [&str; 6] = ["bf16", "int8", "topk:0.05", "randk:0.1", "sign", "int4"];

const PLACEMENTS: [&[u64]; 7] = [
    &[0, 0, 1],
    &[0, 1, 1],
    &[0, 0, 1, 1],
    &[0, 1, 0, 1, 1],
    &[0, 0, 0, 1],
    &[2, 2, 1, 0, 1, 2, 2],
    &[0, 0, 1, 1, 2, 2, 3, 3],
];

fn gradients(seed: u64, ranks: usize, len: usize) -> Vec<Vec<f32>> {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let mut one = || (0..len).map(|_| rng.random_range(-1.0..1.0f32)).collect();
    (0..ranks).map(|_| one()).collect()
}

fn context(step: u64) -> Context {
    Context { seed: 5, step, tensor: Context::tensor_id("w") }
}

fn order(codec: &str, hosts: &[u64], rank: usize, input: Vec<f32>, step: u64) -> Order {
    Order {
        collective: Collective::AllReduce(ReduceOp::Mean),
        codec: codec.parse().unwrap(),
        rank: Rank(rank as u32),
        world: WorldSize::new(hosts.len() as u32).unwrap(),
        placement: Placement::new(hosts),
        input: Floats::F32(input),
        dimensions: None,
        tensor: "w".into(),
        feedback: None,
        context: context(step),
        threads: NonZeroUsize::MIN,
        output: vec![f32::NAN; 3],
    }
}

fn network(hosts: &[u64], seed: u64) -> Network {
    let link = Link {
        latency: Duration::from_micros(50),
        jitter: Duration::from_millis(seed % 7),
        ..Link::IDEAL
    };
    let coding = Duration::from_millis(seed % 5);
    let hosts_of = Some(hosts.to_vec());
    Network { link, hosts: hosts_of, seed, coding, ..Network::lan(hosts.len() as u32) }
}

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
    sim.run().unwrap_or_else(|hang| panic!("{hang}"))
}

/// An all-reduce of all ranks, whose error feedback holds the tensor `w`.
fn all_reduce(
    codec: &str,
    hosts: &[u64],
    gradients: &[Vec<f32>],
    feedback: &[ErrorFeedback],
    step: u64,
) -> Vec<Vec<f32>> {
    let orders = gradients.iter().zip(feedback).enumerate().map(|(rank, (gradient, feedback))| {
        let feedback = Some(feedback.begin("w").unwrap());
        Order { feedback, ..order(codec, hosts, rank, gradient.clone(), step) }
    });
    let segment = [1 << 16, 7, 64][step as usize % 3];
    let report = simulate(orders.collect(), segment, network(hosts, step + 3));
    let result = |job: &farwire_sim::JobReport| {
        bytemuck::pod_collect_to_vec(job.result().unwrap_or_else(|| panic!("{:?}", job.end)))
    };
    report.jobs().iter().map(result).collect()
}

/// Blocks of a vector, the first ones longer.
fn cut(len: usize, parts: usize) -> Vec<Range<usize>> {
    let mut start = 0;
    let block = |part| {
        let end = start + len / parts + usize::from(part < len % parts);
        std::mem::replace(&mut start, end)..end
    };
    (0..parts).map(block).collect()
}

/// All ranks in one loop. `served[h]` are the ranks of host h.
fn reference(
    codec: &dyn MessageCodec,
    served: &[Vec<usize>],
    gradients: &[Vec<f32>],
    transactions: &mut [Transaction],
    step: u64,
) -> Vec<f32> {
    let (len, hosts) = (gradients[0].len(), served.len());
    let columns = served.iter().map(Vec::len).max().unwrap();
    let cells = cut(len, columns * hosts);
    let mut result = vec![0.0; len];
    for (c, cells) in cells.chunks(hosts).enumerate() {
        let column = cells[0].start..cells[hosts - 1].end;
        let shards: Vec<_> =
            cells.iter().map(|cell| cell.start - column.start..cell.end - column.start).collect();
        let place = CodedPlace::whole(context(step).chunk(c as u64), column.len());
        let owner = |host: usize| served[host][c % served[host].len()];
        let mut scattered = Vec::new();
        for (host, ranks) in served.iter().enumerate() {
            let mut sum = gradients[ranks[0]][column.clone()].to_vec();
            for rank in &ranks[1..] {
                let more = &gradients[*rank][column.clone()];
                sum.iter_mut().zip(more).for_each(|(sum, more)| *sum += more);
            }
            let transaction = &mut transactions[owner(host)];
            let (owed, mut out) = (transaction.worker(column.clone()), Encoded::default());
            let job =
                Job { rank: host as u32, ..Job::worker(&sum, owed.residual(), &place, &shards) };
            codec.encode(&job, &mut out).unwrap();
            transaction.set_worker(column.start, out.residual);
            scattered.push(out.messages);
        }
        for (host, cell) in cells.iter().enumerate() {
            let (place, mut sum) = (place.part(shards[host].clone()), vec![0.0; cell.len()]);
            for messages in &scattered {
                codec.add_decoded_into(&messages[host], &place, &mut sum).unwrap();
            }
            let transaction = &mut transactions[owner(host)];
            let (owed, mut out) = (transaction.owner(cell.clone()), Encoded::default());
            let job = Job { rank: host as u32, ..Job::owner(&sum, owed.residual(), &place) };
            codec.encode(&job, &mut out).unwrap();
            transaction.set_owner(cell.start, out.residual);
            codec.add_decoded_into(&out.messages[0], &place, &mut result[cell.clone()]).unwrap();
        }
    }
    result.iter().map(|sum| sum / gradients.len() as f32).collect()
}

fn by_host(hosts: &[u64]) -> Vec<Vec<usize>> {
    let placement = Placement::new(hosts).unwrap();
    let ranks = |host| placement.ranks(host).iter().map(|rank| rank.index()).collect();
    (0..placement.hosts()).map(ranks).collect()
}

fn none_owed(ranks: usize) -> Vec<ErrorFeedback> {
    (0..ranks).map(|_| ErrorFeedback::new()).collect()
}

#[test]
fn every_placement_equals_the_reference_with_all_that_is_owed() {
    for codec in CODECS {
        let messages = codec.parse::<CodecSpec>().unwrap().messages().unwrap();
        for hosts in PLACEMENTS {
            for len in [0, 1, 2, 3, 700, 1009] {
                let (ours, theirs) = (none_owed(hosts.len()), none_owed(hosts.len()));
                for step in 0..3 {
                    let gradients = gradients(step + 9, hosts.len(), len);
                    let mut transactions: Vec<_> =
                        theirs.iter().map(|rank| rank.begin("w").unwrap()).collect();
                    let served = by_host(hosts);
                    let expected =
                        reference(&*messages, &served, &gradients, &mut transactions, step);
                    transactions.into_iter().for_each(Transaction::commit);
                    for result in all_reduce(codec, hosts, &gradients, &ours, step) {
                        let same = result
                            .iter()
                            .map(|x| x.to_bits())
                            .eq(expected.iter().map(|x| x.to_bits()));
                        assert!(same, "{codec}, {hosts:?}, {len} elements, step {step}");
                    }
                }
                for (ours, theirs) in ours.iter().zip(&theirs) {
                    assert_eq!(ours.to_bytes(), theirs.to_bytes(), "{codec}, {hosts:?}: residuals");
                }
            }
        }
    }
}

/// A codec that works in chunks goes through all of them.
#[test]
fn long_vectors_travel_in_chunks() {
    let (hosts, len) = ([0, 0, 1], (9 << 20) + 5);
    let gradients = gradients(3, hosts.len(), len);
    let order = |rank: usize| order("int8", &hosts, rank, gradients[rank].clone(), 0);
    let rounds = CodedCollective::new(order(0)).unwrap().rounds();
    assert_eq!(rounds, 12);
    let report = simulate((0..3).map(order).collect(), 1 << 16, network(&hosts, 1));
    let results: Vec<Vec<f32>> = report
        .jobs()
        .iter()
        .map(|job| bytemuck::pod_collect_to_vec(job.result().unwrap()))
        .collect();
    assert!(results.windows(2).all(|pair| pair[0] == pair[1]), "ranks differ");
    for (i, result) in results[0].iter().enumerate() {
        let mean = gradients.iter().map(|gradient| gradient[i]).sum::<f32>() / 3.0;
        assert!((result - mean).abs() <= 0.02, "element {i}: {result} for {mean}");
    }
}

#[test]
fn a_rank_owes_only_for_the_columns_it_serves() {
    let (hosts, len) = ([0, 0, 0, 0, 1, 1, 1, 1], 10_000);
    let gradients = gradients(1, hosts.len(), len);
    let owed = |hosts: &[u64]| {
        let feedback = none_owed(8);
        all_reduce("topk:0.05", hosts, &gradients, &feedback, 0);
        feedback.iter().map(|rank| rank.to_bytes().len()).max().unwrap() as f64
    };
    let (two_level, flat) = (owed(&hosts), owed(&[0; 8]));
    // Worker plus owner: 1/4 + 1/8 of the vector in two levels, 1 + 1/8 flat.
    let ratio = two_level / flat;
    assert!((0.32..=0.35).contains(&ratio), "{two_level} bytes for {flat}");
}

/// Ranks owe for all elements after a flat call; what they owe for others' columns is sent later.
#[test]
fn what_was_owed_from_a_flat_call_is_paid() {
    let (hosts, len) = ([0, 0, 1, 1], 1000);
    let feedback = none_owed(4);
    let inputs = gradients(7, 4, len);
    let zeros = vec![vec![0.0; len]; 4];
    let mut sums = vec![0.0f64; len];
    let mut add = |results: Vec<Vec<f32>>| {
        sums.iter_mut().zip(&results[0]).for_each(|(sum, x)| *sum += 4.0 * f64::from(*x));
    };
    add(all_reduce("topk:0.05", &[0; 4], &inputs, &feedback, 0));
    for step in 1..=120 {
        add(all_reduce("topk:0.05,values=f32", &hosts, &zeros, &feedback, step));
    }
    for (i, sum) in sums.iter().enumerate() {
        let all: f64 = inputs.iter().map(|input| f64::from(input[i])).sum();
        assert!((sum - all).abs() < 1e-4, "element {i}: {sum} of {all} was sent");
    }
}

#[test]
fn a_nan_is_named_by_the_rank_that_has_it_and_changes_no_residuals() {
    let hosts = [0, 1, 1, 0, 2];
    for culprit in 0..5 {
        let mut gradients = gradients(1, 5, 300);
        gradients[culprit][217] = f32::NAN;
        let feedback = none_owed(5);
        let orders = (0..5).map(|rank| Order {
            feedback: Some(feedback[rank].begin("w").unwrap()),
            ..order("topk:0.1", &hosts, rank, gradients[rank].clone(), 0)
        });
        let report = simulate(orders.collect(), 64, network(&hosts, culprit as u64));
        for job in report.jobs() {
            let JobEnd::NotEncodable { error, .. } = &job.end else { panic!("{:?}", job.end) };
            let said = error.to_string();
            assert!(said.contains(&format!("rank {culprit}'s input")), "{said}");
            assert!(said.contains("element 217"), "{said}");
        }
        assert!(feedback.iter().all(|rank| !rank.owes("w")));
    }
}

#[test]
fn nonsense_in_any_round_fails_all_others_and_names_its_sender() {
    for (hosts, villain) in [(&[0, 0, 1, 1][..], 1), (&[0, 0, 1], 2), (&[0, 1, 1, 1], 0)] {
        for (round, seed) in (0..4).flat_map(|round| (0..5).map(move |seed| (round, seed))) {
            let gradients = gradients(seed, hosts.len(), 100);
            let feedback = none_owed(hosts.len());
            let orders = (0..hosts.len()).map(|rank| Order {
                feedback: Some(feedback[rank].begin("w").unwrap()),
                ..order("int8", hosts, rank, gradients[rank].clone(), 0)
            });
            let troubles = vec![Trouble::Nonsense { peer: Peer(villain), round }];
            let network = Network { troubles, ..network(hosts, seed) };
            let report = simulate(orders.collect(), 64, network);
            for rank in (0..hosts.len()).filter(|rank| *rank != villain as usize) {
                let JobEnd::Failed { error, input } = &report.jobs()[rank].end else {
                    panic!("{hosts:?}, round {round}, rank {rank}: {:?}", report.jobs()[rank].end)
                };
                assert_eq!(error.fault, Fault::BadFrame(Peer(villain)), "{hosts:?}, {round}");
                assert_eq!(input, bytemuck::cast_slice::<f32, u8>(&gradients[rank]));
                assert!(!feedback[rank].owes("w"), "a failed call changed residuals");
            }
        }
    }
}
