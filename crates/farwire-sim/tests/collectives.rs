//! Tier 2: every collective over a simulated network, against the scalar oracle, bit for bit.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on should say where")]

mod common;

use std::num::NonZeroU32;
use std::time::Duration;

use common::{Case, every_collective, every_in_place, random_elements};
use farwire_proto::{
    Algorithm, Allowance, Call, Config, Counts, DType, Kind, Options, Peer, Rank, ReduceOp, Tag,
    Time,
};
use farwire_sim::{Link, Network, Sim, Start, Submission};
use proptest::prelude::*;
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;

/// A network that reorders lanes wildly, with as little as one frame of flow-control window.
fn jittery(n: u32, window: usize, seed: u64) -> Network {
    let link = Link {
        latency: Duration::from_micros(20),
        jitter: Duration::from_millis(5),
        loss: 0.01,
        ..Link::IDEAL
    };
    Network { link, window, seed, ..Network::lan(n) }
}

/// How far ranks may run ahead of each other: hardly at all, a little, or as far as the tests go.
const ALLOWANCES: [Allowance; 4] =
    [Allowance(1), Allowance(12_000), Allowance(100_000), Allowance(48 << 20)];

/// How far lanes may be ahead of each other: as far as they like, hardly at all, or a little.
const LEADS: [u32; 3] = [0, 1, 3];

fn check(case: &Case, network: Network, credit: u32) -> Result<(), TestCaseError> {
    let allowance = ALLOWANCES[network.seed as usize % ALLOWANCES.len()];
    let lead = NonZeroU32::new(LEADS[network.seed as usize / 7 % LEADS.len()]);
    let credit = NonZeroU32::new(credit).unwrap();
    let config = Config { credit, lead, allowance, ..Config::default() };
    let mut sim = Sim::with_config(case.on(network), config);
    sim.limit(Time(Duration::from_secs(300)));
    let jobs = case.submit(&mut sim);
    let report = sim.run().map_err(|hang| TestCaseError::fail(hang.to_string()))?;
    for ((job, expected), rank) in jobs.iter().zip(case.expected()).zip(0..) {
        let result = report.job(*job).result();
        prop_assert_eq!(result, Some(&expected[..]), "{} differs", Rank(rank));
    }
    Ok(())
}

/// Segment sizes from one element up, but no more frames than a test has time for.
fn sizes() -> impl Strategy<Value = (usize, usize)> {
    (0usize..=5000, 0u32..=13).prop_flat_map(|(len, power)| {
        let least = (len / 300).max(1).max(1 << power >> 1);
        (Just(len), least..=least * 2)
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1024, max_shrink_iters: 200, ..ProptestConfig::default() })]

    #[test]
    fn every_collective_equals_the_oracle_on_every_rank(
        which in prop::sample::select(every_collective()),
        n in 1u32..=17,
        (len, segment) in sizes(),
        dtype in prop::sample::select(DType::ALL.to_vec()),
        op in prop::sample::select(ReduceOp::ALL.to_vec()),
        window in prop::sample::select(vec![1usize, 1000, 1 << 20]),
        credit in 1u32..4,
        seed in any::<u64>(),
    ) {
        check(&Case::new(which, n, len, segment, dtype, op, seed), jittery(n, window, seed), credit)?;
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1024, max_shrink_iters: 200, ..ProptestConfig::default() })]

    /// Over networks where a frame leaves late and its answer comes early.
    #[test]
    fn in_place_gives_the_bits_of_the_call_that_keeps_its_input(
        which in prop::sample::select(every_in_place()),
        n in 1u32..=9,
        (len, segment) in sizes(),
        dtype in prop::sample::select(DType::ALL.to_vec()),
        op in prop::sample::select(ReduceOp::ALL.to_vec()),
        window in prop::sample::select(vec![1usize, 1000, 1 << 20]),
        credit in 1u32..4,
        seed in any::<u64>(),
    ) {
        let case = Case::new(which, n, len, segment, dtype, op, seed).in_place();
        check(&case, jittery(n, window, seed), credit)?;
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 256, max_shrink_iters: 200, ..ProptestConfig::default() })]

    /// The contract that makes runs comparable: two-phase and gather-reduce give the same bits,
    /// those of the rank-order sum, for every segment size and under any reordering.
    #[test]
    fn float_sums_are_the_rank_order_sum_bit_for_bit(
        n in 1u32..=17,
        (len, segment) in sizes(),
        dtype in prop::sample::select(vec![DType::F32, DType::F64, DType::F16, DType::Bf16]),
        op in prop::sample::select(vec![ReduceOp::Sum, ReduceOp::Mean, ReduceOp::Prod]),
        seed in any::<u64>(),
    ) {
        let two_phase = (Kind::AllReduce, Algorithm::TwoPhase);
        let case = Case::new(two_phase, n, len, segment, dtype, op, seed);
        check(&case, jittery(n, 1000, seed), 1)?;
        let options = Options { algorithm: Some(Algorithm::GatherReduce), ..case.options };
        let other = Case { options, ..case.clone() };
        prop_assert_eq!(case.expected(), other.expected());
        check(&other, jittery(n, 1000, !seed), 1)?;
    }

    /// A digit of four per rank: a contribution lost or counted twice shows in its digit.
    #[test]
    fn every_rank_is_counted_exactly_once(
        algorithm in prop::sample::select(Kind::AllReduce.algorithms().to_vec()),
        n in 1u32..=17,
        (len, segment) in sizes(),
        seed in any::<u64>(),
    ) {
        let mut case =
            Case::new((Kind::AllReduce, algorithm), n, len, segment, DType::U64, ReduceOp::Sum, seed);
        for (rank, input) in case.inputs.iter_mut().enumerate() {
            *input = 4u64.pow(rank as u32).to_le_bytes().repeat(len);
        }
        let all = (0..n).map(|rank| 4u64.pow(rank)).sum::<u64>().to_le_bytes().repeat(len);
        prop_assert_eq!(&case.expected()[0], &all);
        check(&case, jittery(n, 1000, seed), 2)?;
    }

    #[test]
    fn messages_arrive_in_order_and_keep_to_their_tag(
        n in 2u32..=6,
        messages in prop::collection::vec((0u32..6, 0u32..6, 0u32..3, 0usize..300), 1..40),
        segment in 1usize..200,
        seed in any::<u64>(),
    ) {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let allowance = ALLOWANCES[seed as usize % ALLOWANCES.len()];
        let mut sim = Sim::with_config(jittery(n, 500, seed), Config { allowance, ..Config::default() });
        sim.limit(Time(Duration::from_secs(300)));
        let options = Options { segment: std::num::NonZeroUsize::new(segment), ..Options::default() };
        let mut receives = Vec::new();
        for (from, to, tag, len) in messages {
            let (from, to, tag) = (Rank(from % n), Rank(to % n), Tag(tag));
            if from == to {
                continue;
            }
            let body = random_elements(DType::F32, len * 4, &mut rng);
            let submission = |call, input| Submission { options, ..Submission::new(call, input) };
            let send = Call::Send { to, tag, count: len, dtype: DType::F32 };
            let recv = Call::Recv { from, tag, count: len, dtype: DType::F32 };
            sim.submit(Peer(from.0), submission(send, body.clone()));
            receives.push((tag, Peer(to.0), submission(recv, Vec::new()), body));
        }
        // Each tag's messages are received in order, but one tag after the other.
        receives.sort_by_key(|(tag, ..)| std::cmp::Reverse(*tag));
        let receives: Vec<_> = receives
            .into_iter()
            .map(|(_, to, submission, body)| (sim.submit(to, submission), body))
            .collect();
        let report = sim.run().map_err(|hang| TestCaseError::fail(hang.to_string()))?;
        for (job, body) in receives {
            prop_assert_eq!(report.job(job).result(), Some(&body[..]));
        }
    }
}

#[test]
fn in_place_is_refused_where_input_would_be_lost_before_it_is_read() {
    for which in every_collective() {
        let case = Case::new(which, 3, 10, 2, DType::F32, ReduceOp::Sum, 0).in_place();
        let mut sim = Sim::new(Network::lan(3));
        let job = case.submit(&mut sim)[0];
        let report = sim.run().unwrap();
        match &report.job(job).end {
            farwire_sim::JobEnd::Refused(error) => {
                assert!(!every_in_place().contains(&which), "{which:?}: {error}");
                assert!(error.to_string().contains("cannot work in place"), "{error}");
                assert_eq!(report.ranks[0].frames, 0);
            }
            end => assert!(every_in_place().contains(&which), "{which:?}: {end:?}"),
        }
    }
}

/// Two ranks: gather-reduce is the cheapest, and cannot work in place. A short result is copied.
#[test]
fn an_algorithm_that_cannot_work_in_place_is_chosen_only_for_short_vectors() {
    let which = (Kind::AllReduce, Algorithm::TwoPhase);
    for (len, in_place) in [(10, Algorithm::GatherReduce), (100_000, Algorithm::TwoPhase)] {
        let mut case = Case::new(which, 2, len, len, DType::U8, ReduceOp::Sum, 0);
        case.options.algorithm = None;
        assert_eq!(case.plans()[0].fingerprint().algorithm, Algorithm::GatherReduce);
        let mut case = case.in_place();
        assert_eq!(case.plans()[0].fingerprint().algorithm, in_place);
        case.options.algorithm = Some(in_place); // the oracle needs to know
        check(&case, jittery(2, 1, 1), 1).unwrap();
    }
}

/// The corner of the property's space with the most frames, once.
#[test]
fn one_element_per_frame_works_for_the_longest_vector() {
    let which = (Kind::AllReduce, Algorithm::TwoPhase);
    let case = Case::new(which, 17, 5000, 1, DType::F32, ReduceOp::Sum, 1);
    check(&case, jittery(17, 1, 1), 1).unwrap();
    let case =
        Case::new((Kind::AllReduce, Algorithm::Ring), 17, 5000, 1, DType::Bf16, ReduceOp::Sum, 1);
    check(&case, jittery(17, 1, 1), 1).unwrap();
}

#[test]
fn nobody_leaves_a_barrier_before_everybody_has_come() {
    let mut sim = Sim::new(jittery(5, 1000, 7));
    let jobs: Vec<_> = (0..5)
        .map(|rank| {
            let start = Start::At(Time(Duration::from_millis(u64::from(rank) * 10)));
            sim.submit(
                Peer(rank),
                Submission { start, ..Submission::new(Call::Barrier, Vec::new()) },
            )
        })
        .collect();
    let report = sim.run().unwrap();
    for job in jobs {
        assert!(report.job(job).ended.unwrap() >= Time(Duration::from_millis(40)));
    }
}

#[test]
fn the_same_seed_replays_the_same_run() {
    let run = |seed| {
        let which = (Kind::AllReduce, Algorithm::TwoPhase);
        let case = Case::new(which, 7, 1000, 10, DType::F32, ReduceOp::Sum, 3);
        let mut sim = Sim::new(jittery(7, 1000, seed));
        case.submit(&mut sim);
        let report = sim.run().unwrap();
        (report.ended, report.ranks.into_iter().map(|rank| rank.sending).collect::<Vec<_>>())
    };
    assert_eq!(run(1), run(1));
    assert_ne!(run(1).0, run(2).0);
}

#[test]
fn wrong_calls_are_refused_with_advice_and_send_nothing() {
    let refused = |call: Call, options: Options| {
        let mut sim = Sim::new(Network::lan(3));
        let job = sim.submit(Peer(0), Submission { options, ..Submission::new(call, vec![0; 8]) });
        let report = sim.run().unwrap();
        assert_eq!(report.ranks[0].frames, 0);
        match &report.job(job).end {
            farwire_sim::JobEnd::Refused(error) => error.to_string(),
            other => panic!("expected a refusal, got {other:?}"),
        }
    };
    let plain = Options::default();
    let sum = ReduceOp::Sum;
    let f32 = DType::F32;
    for (call, options, says) in [
        (Call::Broadcast { count: 2, dtype: f32, root: Rank(3) }, plain, "use 0 to 2"),
        (
            Call::AllReduce { count: 2, dtype: DType::I32, op: ReduceOp::Mean },
            plain,
            "use sum and divide",
        ),
        (Call::Scan { count: 2, dtype: f32, op: ReduceOp::Mean }, plain, "use sum and divide"),
        (
            Call::AllGather { counts: Counts::listed([1, 2], common::world(3)), dtype: f32 },
            plain,
            "give one per rank",
        ),
        (
            Call::AllReduce { count: 3, dtype: f32, op: sum },
            plain,
            "needs an input of 12 bytes on this rank, not 8",
        ),
        (Call::AllReduce { count: usize::MAX, dtype: f32, op: sum }, plain, "use fewer elements"),
        (Call::Send { to: Rank(0), tag: Tag(0), count: 2, dtype: f32 }, plain, "with itself"),
        (
            Call::AllReduce { count: 2, dtype: f32, op: sum },
            Options { algorithm: Some(Algorithm::Chain), ..plain },
            "use one of: two-phase, gather-reduce, ring",
        ),
        (
            Call::AllReduce { count: 1 << 40, dtype: DType::U8, op: sum },
            Options { segment: std::num::NonZeroUsize::new(1), ..plain },
            "larger segments",
        ),
    ] {
        let message = refused(call, options);
        assert!(message.contains(says), "{message:?} should say {says:?}");
    }
}
