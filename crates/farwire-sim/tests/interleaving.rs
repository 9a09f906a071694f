//! Tier 2: many operations in flight at once, on several communicators, in any order of arrival.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on should say where")]

mod common;

use std::num::NonZeroU32;
use std::time::Duration;

use common::{Case, every_collective};
use farwire_proto::{Allowance, CommId, Config, DType, Peer, ReduceOp, Time};
use farwire_sim::{Link, Network, Sim, Start};
use rand::seq::IndexedRandom;
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

/// 1,000 random interleavings of 8 operations in flight on 3 communicators over 5 ranks. Ranks
/// submit at random moments, in an order that they share only within each communicator.
#[test]
fn a_thousand_interleavings_of_eight_operations_are_right_bit_for_bit() {
    let world: Vec<_> = (0..5).map(Peer).collect();
    let groups = [
        (CommId::WORLD, world.clone()),
        (CommId::WORLD.child(0, 0), vec![Peer(3), Peer(0), Peer(2)]),
        (CommId::WORLD.child(1, 0), vec![Peer(4), Peer(2), Peer(1), Peer(0)]),
    ];
    let mut most_in_flight = 0;
    for seed in 0..1000 {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let link = Link {
            latency: Duration::from_micros(50),
            jitter: Duration::from_millis(2),
            loss: 0.002,
            ..Link::IDEAL
        };
        let window = *[1, 200, 1 << 20].choose(&mut rng).unwrap();
        let allowance =
            *[Allowance(1), Allowance(20_000), Allowance::default()].choose(&mut rng).unwrap();
        let hosts: Vec<_> = (0..5).map(|_| rng.random_range(0..3)).collect();
        let on_hosts = Some(hosts.clone());
        let network =
            Network { link, local: link, hosts: on_hosts, window, seed, ..Network::lan(5) };
        let lead = NonZeroU32::new(rng.random_range(0..3));
        let mut sim = Sim::with_config(network, Config { allowance, lead, ..Config::default() });
        sim.limit(Time(Duration::from_secs(60)));
        for (comm, members) in &groups[1..] {
            sim.open(*comm, members).unwrap();
        }
        let mut checks = Vec::new();
        for (comm, members) in &groups {
            let share = if *comm == CommId::WORLD { 4 } else { 2 };
            // On each rank, submissions on a communicator are in order but at random intervals.
            let mut clocks = vec![Duration::ZERO; members.len()];
            for _ in 0..share {
                let mut case = Case::new(
                    *every_collective().choose(&mut rng).unwrap(),
                    members.len() as u32,
                    rng.random_range(0..200),
                    rng.random_range(1..40),
                    *DType::ALL.choose(&mut rng).unwrap(),
                    *ReduceOp::ALL.choose(&mut rng).unwrap(),
                    rng.random(),
                );
                // A group's hosts are those of its members.
                case.shape.hosts = members.iter().map(|peer| hosts[peer.index()]).collect();
                for clock in &mut clocks {
                    *clock += Duration::from_micros(rng.random_range(0..300));
                }
                let jobs =
                    case.submit_on(&mut sim, *comm, members, &|rank| Start::At(Time(clocks[rank])));
                checks.push((case, jobs));
            }
        }
        let report = sim.run().unwrap_or_else(|hang| panic!("{hang}"));
        for (case, jobs) in &checks {
            for (rank, expected) in case.expected().iter().enumerate() {
                let result = report.job(jobs[rank]).result();
                assert_eq!(
                    result,
                    Some(&expected[..]),
                    "seed {seed}, rank {rank}, {:?}",
                    case.calls[rank]
                );
            }
        }
        let spans: Vec<_> = checks
            .iter()
            .map(|(_, jobs)| {
                let jobs = jobs.iter().map(|job| report.job(*job));
                let (starts, ends): (Vec<_>, Vec<_>) =
                    jobs.map(|job| (job.submitted, job.ended)).unzip();
                (starts.into_iter().min().unwrap(), ends.into_iter().max().unwrap())
            })
            .collect();
        let in_flight =
            |at| spans.iter().filter(|(start, end)| (*start..*end).contains(&at)).count();
        most_in_flight =
            most_in_flight.max(spans.iter().map(|(start, _)| in_flight(*start)).max().unwrap());
    }
    assert_eq!(most_in_flight, 8, "all eight must be in flight at once at least in some runs");
}
