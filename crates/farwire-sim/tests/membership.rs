//! Membership under chaos: many schedules of faults, and flaws that they must find.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on should say where")]

use std::time::Duration;

use farwire_proto::membership::{Flaw, TieRule};
use farwire_sim::chaos::{Fault, Promise, Schedule, Seen, Violation};

/// Runs the schedules of some seeds. Returns the first violation (with a flaw, the first one of its
/// promises) with its schedule made small.
fn run(
    seeds: impl Iterator<Item = u64>,
    flaw: Option<(Flaw, &[Promise])>,
) -> Result<Seen, (Schedule, Violation)> {
    let try_one = |schedule: &Schedule| {
        let result = schedule.run(&|part| {
            if let Some((flaw, _)) = flaw {
                part.set_flaw(flaw);
            }
        });
        let other = |violation: &Violation| {
            flaw.is_some_and(|(_, promises)| !promises.contains(&violation.promise))
        };
        result.or_else(|error| if other(&error) { Ok(Seen::default()) } else { Err(error) })
    };
    let mut seen = Seen::default();
    for seed in seeds {
        let schedule = Schedule::random(seed);
        match try_one(&schedule) {
            Ok(more) => seen += more,
            Err(_) => {
                let small = schedule.shrink(&|schedule| try_one(schedule).is_err());
                let violation = try_one(&small).unwrap_err();
                return Err((small, violation));
            }
        }
    }
    Ok(seen)
}

#[test]
fn members_agree_under_chaos() {
    match run(0..3000, None) {
        Ok(seen) => {
            println!("{seen:?}");
            // The schedules do what they are for.
            assert!(seen.views > 3000 && seen.joined > 200, "{seen:?}");
            assert!(seen.evicted > 100 && seen.no_quorum > 100, "{seen:?}");
        }
        Err((schedule, violation)) => panic!("{violation}\n{schedule:?}"),
    }
}

#[test]
#[ignore = "takes minutes; FARWIRE_CHAOS_SCHEDULES and FARWIRE_CHAOS_SEED say how many, and from where"]
fn members_agree_under_much_chaos() {
    let number = |name| std::env::var(name).ok().and_then(|number| number.parse::<u64>().ok());
    let count = number("FARWIRE_CHAOS_SCHEDULES").unwrap_or(100_000);
    let first = number("FARWIRE_CHAOS_SEED").unwrap_or(0);
    match run(first..first + count, None) {
        Ok(seen) => println!("{count} schedules from seed {first}: {seen:?}"),
        Err((schedule, violation)) => panic!("{violation}\n{schedule:?}"),
    }
}

/// Every way to break the protocol is found.
#[test]
fn each_flaw_is_found() {
    use Promise::{End, OneView, Progress, WholeJoin};
    // Each with a seed to start from, before the first that shows it.
    let flaws: [(Flaw, &[Promise], u64); 7] = [
        // What was agreed on once is agreed on again, and no process gets anywhere.
        (Flaw::SkipFence, &[OneView, Progress, End], 0),
        (Flaw::ForgetTieRule, &[OneView], 0),
        (Flaw::AdmitOnSubset, &[WholeJoin], 0),
        (Flaw::ReuseEpoch, &[OneView], 4600),
        (Flaw::DropSecondRound, &[OneView], 0),
        (Flaw::TrustAnyProof, &[OneView], 0),
        (Flaw::TellLeaderFirst, &[OneView], 26_000),
    ];
    for (flaw, promises, from) in flaws {
        match run(from..from + 20_000, Some((flaw, promises))) {
            Ok(seen) => panic!("{flaw:?} was not found: {seen:?}"),
            Err((schedule, violation)) => {
                println!("{flaw:?}: {violation}\n  {schedule:?}");
            }
        }
    }
}

#[test]
fn a_run_is_the_same_every_time() {
    for seed in 0..50 {
        let schedule = Schedule::random(seed);
        assert_eq!(schedule.run(&|_| ()), schedule.run(&|_| ()));
    }
}

fn calm(ranks: u32, faults: Vec<Fault>) -> Seen {
    let faults = faults.into_iter().zip(0..);
    let faults = faults.map(|(fault, at)| (Duration::from_secs(20 * at), fault)).collect();
    let schedule = Schedule { seed: 1, ranks, hosts: 1, ties: TieRule::Lowest, loss: 0, faults };
    schedule.run(&|_| ()).unwrap()
}

/// A world of four on one host, killed one after the other, goes on as a world of one.
#[test]
fn the_last_one_goes_on() {
    let seen = calm(4, vec![Fault::Kill(0), Fault::Kill(0), Fault::Kill(0)]);
    assert_eq!((seen.views, seen.no_quorum), (3, 0), "{seen:?}");
}

/// More than half die at once, so no majority survives. But the proofs are complete, so the rest
/// goes on.
#[test]
fn more_than_half_may_die_at_once_on_one_host() {
    let at = Duration::from_secs(1);
    let faults = vec![(at, Fault::Kill(0)), (at, Fault::Kill(0)), (at, Fault::Kill(0))];
    let schedule = Schedule { seed: 1, ranks: 5, hosts: 1, ties: TieRule::Lowest, loss: 0, faults };
    let seen = schedule.run(&|_| ()).unwrap();
    assert!(seen.views >= 1 && seen.no_quorum == 0, "{seen:?}");
}

#[test]
fn who_waits_is_let_in_at_a_boundary_and_half_a_joiner_is_not() {
    let seen = calm(3, vec![Fault::Join, Fault::Boundary, Fault::JoinHalf, Fault::Boundary]);
    assert_eq!((seen.views, seen.joined), (2, 1), "{seen:?}");
    let seen = calm(1, vec![Fault::Join, Fault::Boundary, Fault::Kill(0), Fault::Boundary]);
    assert_eq!((seen.joined, seen.no_quorum), (1, 0), "a world of one grows: {seen:?}");
}
