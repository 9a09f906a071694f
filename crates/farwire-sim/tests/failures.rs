//! Tier 2: crashes, stalls, partitions, deadlines and ranks that call different things. Nothing
//! hangs, every rank learns of the trouble, and inputs come back as they were.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on should say where")]

mod common;

use std::num::NonZeroUsize;
use std::time::Duration;

use common::{Case, every_collective, world};
use farwire_proto::{
    Algorithm, Allowance, Call, CommId, Config, Counts, DType, Fault, Kind, OpError, Options, Peer,
    Plan, Rank, ReduceOp, Tag, Time, Tuning,
};
use farwire_sim::{JobEnd, JobId, Link, Network, Report, Sim, Start, Submission, Trouble};

const LIMIT: Time = Time(Duration::from_secs(60));

fn network(n: u32) -> Network {
    let link = Link {
        latency: Duration::from_micros(50),
        jitter: Duration::from_micros(200),
        ..Link::IDEAL
    };
    Network { link, window: 300, ..Network::lan(n) }
}

/// The same collective twice, the second as soon as the first has ended, on every rank.
fn twice(case: &Case, network: Network) -> (Report, Vec<JobId>, Vec<JobId>) {
    let members: Vec<_> = network.peers().collect();
    let mut sim = Sim::new(case.on(network));
    sim.limit(LIMIT);
    let first = case.submit(&mut sim);
    let second =
        case.submit_on(&mut sim, CommId::WORLD, &members, &|rank| Start::After(first[rank]));
    (sim.run().unwrap_or_else(|hang| panic!("{hang}")), first, second)
}

/// Each operation that `rank` started ended with the right result, or with an error about `fault`
/// and its input back; the last one ended with an error.
fn assert_learns(report: &Report, case: &Case, rank: usize, jobs: [JobId; 2], fault: Fault) {
    let [first, second] = jobs.map(|job| report.job(job));
    assert!(
        report.job(jobs[1]).ended.unwrap() <= Time(Duration::from_secs(3)),
        "found out in bounded time"
    );
    for job in [first, second] {
        match &job.end {
            JobEnd::Done(result) => {
                assert_eq!(*result, case.expected()[rank], "a result is right or not there")
            }
            JobEnd::Failed { error, input } => {
                assert_eq!(error.fault, fault);
                assert_eq!(*input, case.inputs[rank], "the input comes back as it was");
            }
            other => panic!("rank {rank}: {other:?}"),
        }
    }
    assert!(second.error().is_some(), "the communicator cannot be used without the lost rank");
}

/// A crash of any rank at every step of every collective, in worlds of 2 to 5. Some survivors may
/// complete the collective, if the victim had done its part for them; the next one fails on all.
#[test]
fn survivors_of_any_crash_get_the_error_and_their_input() {
    let (mut crashes, mut failed, mut completed) = (0, 0, 0);
    for which in every_collective() {
        for (n, seed) in (2..=5).flat_map(|n| [(n, 1), (n, 2), (n, 3)]) {
            let case = Case::new(which, n, 23, 3, DType::F32, ReduceOp::Sum, seed);
            let mut sim = Sim::new(case.on(Network { seed, ..network(n) }));
            case.submit(&mut sim);
            let clean = sim.run().unwrap_or_else(|hang| panic!("{hang}"));
            for victim in (0..n).map(Peer) {
                for step in 0..clean.ranks[victim.index()].steps {
                    let crash = Trouble::Crash { peer: victim, step };
                    let (report, first, second) =
                        twice(&case, Network { troubles: vec![crash], seed, ..network(n) });
                    crashes += 1;
                    for rank in (0..n as usize).filter(|rank| *rank != victim.index()) {
                        assert_learns(
                            &report,
                            &case,
                            rank,
                            [first[rank], second[rank]],
                            Fault::PeerLost(victim),
                        );
                        match report.job(first[rank]).error() {
                            Some(_) => failed += 1,
                            None => completed += 1,
                        }
                        assert!(
                            step > 0 || report.job(first[rank]).error().is_some(),
                            "the victim never called"
                        );
                    }
                }
            }
        }
    }
    println!(
        "{crashes} crashes: {failed} survivors failed in the collective, {completed} only in the next"
    );
    assert!(crashes > 10_000 && failed > completed && completed > 0);
}

#[test]
fn a_stopped_rank_is_lost_to_the_others_and_learns_so_when_it_wakes() {
    for which in every_collective() {
        let case = Case::new(which, 4, 50, 3, DType::Bf16, ReduceOp::Sum, 1);
        let stall = Trouble::Stall {
            peer: Peer(2),
            from: Time(Duration::from_micros(60)),
            until: Time(Duration::from_secs(20)),
        };
        let (report, first, second) = twice(&case, Network { troubles: vec![stall], ..network(4) });
        for rank in [0, 1, 3] {
            assert_learns(
                &report,
                &case,
                rank,
                [first[rank], second[rank]],
                Fault::PeerLost(Peer(2)),
            );
        }
        assert!(report.job(second[2]).error().is_some(), "the stopped rank is told too");
    }
}

#[test]
fn a_short_stall_only_delays() {
    let case =
        Case::new((Kind::AllReduce, Algorithm::TwoPhase), 4, 50, 3, DType::F32, ReduceOp::Sum, 1);
    let from = Time(Duration::from_micros(60));
    let stall = Trouble::Stall { peer: Peer(2), from, until: from + Duration::from_secs(1) };
    let (report, first, second) = twice(&case, Network { troubles: vec![stall], ..network(4) });
    for rank in 0..4 {
        assert_eq!(report.job(first[rank]).result(), Some(&case.expected()[rank][..]));
        assert_eq!(report.job(second[rank]).result(), Some(&case.expected()[rank][..]));
    }
    assert!(report.ended >= from + Duration::from_secs(1));
}

#[test]
fn a_lasting_partition_is_an_error_on_both_sides_and_a_short_one_is_not() {
    for which in every_collective() {
        let case = Case::new(which, 5, 50, 3, DType::F32, ReduceOp::Sum, 1);
        let partition = |until| Trouble::Partition {
            side: vec![Peer(1), Peer(4)],
            from: Time(Duration::from_micros(60)),
            until: Time(until),
        };
        let troubled = |until| Network { troubles: vec![partition(until)], ..network(5) };
        let (report, _, second) = twice(&case, troubled(Duration::from_secs(30)));
        for (rank, job) in second.iter().enumerate() {
            let error = report.job(*job).error().unwrap_or_else(|| panic!("rank {rank} must fail"));
            assert!(matches!(error.fault, Fault::PeerLost(_)), "{error}");
        }
        let (report, _, second) = twice(&case, troubled(Duration::from_secs(1)));
        for (rank, job) in second.iter().enumerate() {
            assert_eq!(report.job(*job).result(), Some(&case.expected()[rank][..]));
        }
    }
}

/// Has each rank make its own calls, one after the other, and returns each rank's first error and
/// when it came.
fn first_errors(calls: &[Vec<Call>], deadline: Duration) -> Vec<Option<(OpError, Time)>> {
    let n = calls.len();
    let mut sim = Sim::new(network(n as u32));
    sim.limit(LIMIT);
    let options =
        Options { segment: NonZeroUsize::new(4), deadline: Some(deadline), ..Options::default() };
    let mut jobs: Vec<Vec<JobId>> = vec![Vec::new(); n];
    for (rank, calls) in calls.iter().enumerate() {
        for call in calls {
            let start = jobs[rank].last().map_or(Start::At(Time::ZERO), |job| Start::After(*job));
            let me = Rank(rank as u32);
            let plan =
                Plan::new(CommId::WORLD, me, world(n as u32), call, &options, &Tuning::default())
                    .unwrap();
            let input = vec![1; plan.input_bytes()];
            let submission = Submission { options, start, ..Submission::new(call.clone(), input) };
            jobs[rank].push(sim.submit(Peer(rank as u32), submission));
        }
    }
    let report = sim.run().unwrap_or_else(|hang| panic!("{hang}"));
    let first_error = |jobs: &Vec<JobId>| {
        jobs.iter().find_map(|job| {
            let job = report.job(*job);
            assert!(!matches!(job.end, JobEnd::Refused(_)), "{:?}", job.end);
            job.error().map(|error| (*error, job.ended.unwrap()))
        })
    };
    jobs.iter().map(first_error).collect()
}

/// Calls that differ from `right` in one field each.
fn mismatches() -> Vec<(&'static str, Call, Call)> {
    let (count, dtype, op, root) = (20, DType::F32, ReduceOp::Sum, Rank(1));
    let counts = Counts::Each(5);
    let all_reduce = Call::AllReduce { count, dtype, op };
    let reduce = Call::Reduce { count, dtype, op, root };
    let broadcast = Call::Broadcast { count, dtype, root };
    let gather = Call::Gather { counts: counts.clone(), dtype, root };
    let scatter = Call::Scatter { counts: counts.clone(), dtype, root };
    let all_gather = Call::AllGather { counts: counts.clone(), dtype };
    let all_to_all = Call::AllToAll { send: counts.clone(), recv: counts.clone(), dtype };
    let scan = Call::Scan { count, dtype, op };
    let mut cases = vec![
        ("kind", Call::Barrier, all_reduce.clone()),
        ("kind", all_reduce.clone(), Call::ReduceScatter { count, dtype, op }),
        ("kind", broadcast.clone(), reduce.clone()),
        ("kind", gather.clone(), scatter.clone()),
        ("kind", scan.clone(), Call::ExclusiveScan { count, dtype, op }),
        (
            "members or lengths per rank",
            all_gather.clone(),
            Call::AllGather { counts: Counts::listed([4, 6, 5, 5], world(4)), dtype },
        ),
    ];
    for right in [all_reduce, reduce, broadcast, gather, scatter, all_gather, all_to_all, scan] {
        let with = |change: &dyn Fn(&mut Call)| {
            let mut wrong = right.clone();
            change(&mut wrong);
            wrong
        };
        let count = with(&|call| match call {
            Call::AllReduce { count, .. }
            | Call::Reduce { count, .. }
            | Call::Broadcast { count, .. }
            | Call::Scan { count, .. } => *count = 21,
            Call::AllGather { counts, .. }
            | Call::Gather { counts, .. }
            | Call::Scatter { counts, .. } => {
                *counts = Counts::Each(6);
            }
            Call::AllToAll { send, recv, .. } => {
                (*send, *recv) = (Counts::Each(6), Counts::Each(6))
            }
            other => panic!("{other:?}"),
        });
        let dtype = with(&|call| match call {
            Call::AllReduce { dtype, .. }
            | Call::Reduce { dtype, .. }
            | Call::Broadcast { dtype, .. }
            | Call::Scan { dtype, .. }
            | Call::AllGather { dtype, .. }
            | Call::Gather { dtype, .. }
            | Call::Scatter { dtype, .. }
            | Call::AllToAll { dtype, .. } => *dtype = DType::I32,
            other => panic!("{other:?}"),
        });
        let op = with(&|call| match call {
            Call::AllReduce { op, .. } | Call::Reduce { op, .. } | Call::Scan { op, .. } => {
                *op = ReduceOp::Max
            }
            _ => {}
        });
        let root = with(&|call| match call {
            Call::Reduce { root, .. }
            | Call::Broadcast { root, .. }
            | Call::Gather { root, .. }
            | Call::Scatter { root, .. } => *root = Rank(2),
            _ => {}
        });
        for (what, wrong) in [("count", count), ("dtype", dtype), ("op", op), ("root", root)] {
            if wrong != right {
                cases.push((what, right.clone(), wrong));
            }
        }
    }
    cases
}

#[test]
fn ranks_that_call_different_things_all_get_an_error_that_shows_both() {
    for (what, right, wrong) in mismatches() {
        for odd in 0..4 {
            let calls: Vec<_> = (0..4)
                .map(|rank| vec![if rank == odd { wrong.clone() } else { right.clone() }])
                .collect();
            for (rank, error) in
                first_errors(&calls, Duration::from_secs(30)).into_iter().enumerate()
            {
                let what_happened =
                    format!("rank {rank}, when rank {odd} called {wrong:?} rather than {right:?}");
                let (error, at) = error.unwrap_or_else(|| panic!("no error on {what_happened}"));
                assert!(at < Time(Duration::from_secs(1)), "late on {what_happened}");
                let Fault::Desync(one, other) = error.fault else {
                    panic!("{error} on {what_happened}")
                };
                assert_ne!(one.fingerprint, other.fingerprint);
                assert!(
                    one.peer == Peer(odd) || other.peer == Peer(odd),
                    "{error} on {what_happened}"
                );
                let words = error.to_string();
                assert!(
                    words.contains(right.kind().name()) && words.contains(wrong.kind().name()),
                    "{words}"
                );
                assert!(words.contains(what), "{words} should name {what}");
            }
        }
    }
}

#[test]
fn a_rank_that_skipped_a_call_is_an_error_on_all() {
    let a = Call::AllReduce { count: 20, dtype: DType::F32, op: ReduceOp::Sum };
    let b = Call::Broadcast { count: 20, dtype: DType::F32, root: Rank(0) };
    // The skipped call differs from the next one, which shows as soon as frames meet.
    let calls: Vec<_> = (0..4)
        .map(|rank| {
            if rank == 2 {
                vec![b.clone(), a.clone()]
            } else {
                vec![a.clone(), b.clone(), a.clone()]
            }
        })
        .collect();
    for error in first_errors(&calls, Duration::from_secs(30)) {
        let (error, at) = error.expect("every rank gets an error");
        assert!(matches!(error.fault, Fault::Desync(..)), "{error}");
        assert!(at < Time(Duration::from_secs(1)));
    }
    // All calls are alike, so nothing shows before the others wait for a call that does not come.
    let calls: Vec<_> = (0..4).map(|rank| vec![a.clone(); if rank == 2 { 4 } else { 5 }]).collect();
    let errors = first_errors(&calls, Duration::from_secs(5));
    for rank in [0, 1, 3] {
        let (error, at) = errors[rank].expect("every rank that waits gets an error");
        assert!(
            matches!(error.fault, Fault::TimedOut { waiting_for: Peer(2), others: 0, .. }),
            "{error}"
        );
        assert!(at < Time(Duration::from_secs(6)));
    }
    // The rank itself has nothing pending; its next call, whenever it comes, fails at once.
    let mut late = calls;
    late[2].push(Call::Recv { from: Rank(0), tag: Tag(0), count: 1, dtype: DType::U8 });
    let errors = first_errors(&late, Duration::from_secs(5));
    assert!(errors.iter().all(|error| error.is_some()), "{errors:?}");
}

#[test]
fn messages_of_different_lengths_are_an_error_at_both_ends() {
    let dtype = DType::F32;
    let send = Call::Send { to: Rank(1), tag: Tag(7), count: 50, dtype };
    let recv = Call::Recv { from: Rank(0), tag: Tag(7), count: 60, dtype };
    let errors = first_errors(
        &[vec![send, Call::Barrier], vec![recv, Call::Barrier]],
        Duration::from_secs(30),
    );
    for error in errors {
        let (error, at) = error.expect("both ends get an error");
        assert!(matches!(error.fault, Fault::Desync(..)), "{error}");
        assert!(at < Time(Duration::from_secs(1)));
    }
}

/// Two ranks that disagree on what passes between them both find out, whichever way it goes; the
/// third finds out at its next call.
#[test]
fn a_pair_that_disagrees_in_all_to_all_finds_out_at_both_ends() {
    let dtype = DType::U8;
    let each = |n| Counts::Each(n);
    let listed = |counts: [usize; 3]| Counts::listed(counts, world(3));
    let calls = [
        Call::AllToAll { send: listed([5, 6, 5]), recv: each(5), dtype },
        Call::AllToAll { send: each(5), recv: each(5), dtype },
        Call::AllToAll { send: each(5), recv: each(5), dtype },
    ];
    let errors =
        first_errors(&calls.map(|call| vec![call, Call::Barrier]), Duration::from_secs(30));
    for (rank, error) in errors.into_iter().enumerate() {
        let (error, at) = error.unwrap_or_else(|| panic!("no error on rank {rank}"));
        assert!(matches!(error.fault, Fault::Desync(..)), "{error}");
        assert!(at < Time(Duration::from_secs(1)));
        assert!(rank == 2 || error.operation.kind == Kind::AllToAll, "rank {rank}: {error}");
    }
}

/// Members that list a communicator's members differently would mix up each other's shards.
#[test]
fn members_that_open_a_communicator_differently_get_an_error() {
    for algorithm in Kind::AllReduce.algorithms() {
        for lists in [[[0, 1, 2], [1, 0, 2], [0, 1, 2]], [[0, 1, 2], [0, 1, 2], [2, 1, 0]]] {
            let mut sim = Sim::new(network(3));
            sim.limit(LIMIT);
            let comm = CommId(9);
            let jobs = [0, 1, 2].map(|peer| {
                sim.open_on(Peer(peer), comm, &lists[peer as usize].map(Peer)).unwrap();
                let call = Call::AllReduce { count: 6, dtype: DType::U8, op: ReduceOp::Sum };
                let options = Options { algorithm: Some(*algorithm), ..Options::default() };
                sim.submit(
                    Peer(peer),
                    Submission { comm, options, ..Submission::new(call, vec![peer as u8; 6]) },
                )
            });
            let report = sim.run().unwrap_or_else(|hang| panic!("{hang}"));
            for job in jobs {
                let error = report.job(job).error().expect("an error on all");
                assert!(matches!(error.fault, Fault::Desync(..)), "{error}");
                assert!(error.to_string().contains("members"), "{error}");
            }
        }
    }
}

#[test]
fn a_message_that_never_comes_fails_alone() {
    let dtype = DType::F32;
    let recv = Call::Recv { from: Rank(0), tag: Tag(7), count: 60, dtype };
    let mut sim = Sim::new(network(2));
    let options = Options { deadline: Some(Duration::from_secs(1)), ..Options::default() };
    let missing = sim.submit(Peer(1), Submission { options, ..Submission::new(recv, Vec::new()) });
    let start = Start::At(Time(Duration::from_secs(2)));
    let barriers = [0, 1].map(|rank| {
        sim.submit(Peer(rank), Submission { start, ..Submission::new(Call::Barrier, Vec::new()) })
    });
    let report = sim.run().unwrap();
    let error = report.job(missing).error().expect("the receive fails");
    assert_eq!(error.fault, Fault::TimedOut { by: Peer(1), waiting_for: Peer(0), others: 0 });
    assert!(
        barriers.iter().all(|job| report.job(*job).result().is_some()),
        "the communicator lives on"
    );
}

/// Sends to a rank that does not receive time out; later ones arrive, in order and whole. Some of
/// the first were under way, whole or in part, when they were given up.
#[test]
fn messages_after_some_that_were_given_up_arrive() {
    let dtype = DType::U8;
    for (allowance, count) in
        [(Allowance(9_000), 5), (Allowance(9_000), 60), (Allowance(20_000), 900)]
    {
        let mut sim = Sim::with_config(network(2), Config { allowance, ..Config::default() });
        sim.limit(Time(Duration::from_secs(100)));
        let segment = std::num::NonZeroUsize::new(20);
        let message = |sim: &mut Sim, peer, deadline, call, start, body: Vec<u8>| {
            let options = Options { segment, deadline, ..Options::default() };
            sim.submit(peer, Submission { options, start, ..Submission::new(call, body) })
        };
        let send = Call::Send { to: Rank(1), tag: Tag(3), count, dtype };
        let recv = Call::Recv { from: Rank(0), tag: Tag(3), count, dtype };
        let second = |at| Start::At(Time(Duration::from_secs(at)));
        let brief = Some(Duration::from_secs(1));
        let early: Vec<_> = (0..20u8)
            .map(|i| message(&mut sim, Peer(0), brief, send.clone(), second(0), vec![i; count]))
            .collect();
        let late: Vec<_> = (20..30u8)
            .map(|i| message(&mut sim, Peer(0), None, send.clone(), second(5), vec![i; count]))
            .collect();
        let received: Vec<_> = (0..30)
            .map(|_| {
                message(
                    &mut sim,
                    Peer(1),
                    Some(Duration::from_secs(20)),
                    recv.clone(),
                    second(10),
                    Vec::new(),
                )
            })
            .collect();
        let report = sim.run().unwrap_or_else(|hang| panic!("{hang}"));
        let sent: Vec<_> = early.iter().map(|job| report.job(*job).result().is_some()).collect();
        assert!(sent.contains(&false), "{allowance:?}: the sender is stopped");
        assert!(late.iter().all(|job| report.job(*job).result().is_some()));
        let arrived: Vec<_> = received
            .iter()
            .filter_map(|job| report.job(*job).result())
            .map(|body| {
                assert!(
                    body.len() == count && body.iter().all(|byte| *byte == body[0]),
                    "{body:?}"
                );
                body[0]
            })
            .collect();
        let all = (0..20).filter(|i| sent[*i as usize]).chain(20..30).collect::<Vec<_>>();
        assert_eq!(arrived, all, "{allowance:?}, {count}: what was sent arrives, in order");
    }
}

#[test]
fn a_failure_on_one_communicator_leaves_the_others_alone() {
    let mut sim = Sim::new(network(5));
    sim.limit(LIMIT);
    let (left, right) = (CommId::WORLD.child(0, 0), CommId::WORLD.child(0, 1));
    let (left_members, right_members) = ([0, 1].map(Peer), [2, 3, 4].map(Peer));
    sim.open(left, &left_members).unwrap();
    sim.open(right, &right_members).unwrap();
    let count = |rank| if rank == 1 { 3 } else { 4 };
    let wrong: Vec<_> = (0..2)
        .map(|rank| {
            let call = Call::AllReduce { count: count(rank), dtype: DType::U8, op: ReduceOp::Sum };
            let submission =
                Submission { comm: left, ..Submission::new(call, vec![1; count(rank)]) };
            sim.submit(left_members[rank], submission)
        })
        .collect();
    let case =
        Case::new((Kind::AllReduce, Algorithm::TwoPhase), 3, 50, 3, DType::F32, ReduceOp::Sum, 1);
    let later = |_| Start::At(Time(Duration::from_secs(1)));
    let fine = case.submit_on(&mut sim, right, &right_members, &later);
    let report = sim.run().unwrap();
    assert!(wrong.iter().all(|job| report.job(*job).error().is_some()));
    assert!(fine.iter().all(|job| report.job(*job).result().is_some()));
}

#[test]
fn a_hang_names_who_waits_for_whom() {
    let mut sim = Sim::new(network(3));
    sim.limit(Time(Duration::from_secs(1)));
    for rank in [0, 2] {
        sim.submit(Peer(rank), Submission::new(Call::Barrier, Vec::new()));
    }
    let hang = sim.run().expect_err("rank 1 never comes").to_string();
    assert!(hang.contains("rank 0: barrier() #0 waits for rank 1"), "{hang}");
    assert!(hang.contains("rank 2: barrier() #0 waits for rank 1"), "{hang}");
}
