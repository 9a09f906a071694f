//! Properties of the pipeline schedules.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on should say where")]

use std::collections::{HashMap, HashSet};

use farwire_train::{Action, Costs, Schedule, ScheduleError, Unit, Work, simulate};
use proptest::prelude::*;

const EQUAL: Costs = Costs { forward: 1.0, backward: 2.0, message: 0.0 };

fn lists(schedule: Schedule, stages: usize, micro_batches: usize) -> Vec<Vec<Action>> {
    (0..stages).map(|rank| schedule.actions(stages, rank, micro_batches).unwrap()).collect()
}

/// Any schedule, with numbers it accepts.
fn cases() -> impl Strategy<Value = (Schedule, usize, usize)> {
    let simple = prop_oneof![Just(Schedule::GPipe), Just(Schedule::OneForwardOneBackward)];
    let simple = (simple, 1usize..9, 1usize..20);
    let interleaved = (1usize..5, 2usize..7, 1usize..5).prop_map(|(chunks, stages, groups)| {
        (Schedule::Interleaved { chunks }, stages, stages * groups)
    });
    prop_oneof![simple, interleaved]
}

proptest! {
    #[test]
    fn every_unit_runs_once_each_way_and_forward_comes_first((schedule, stages, micro_batches) in cases()) {
        for list in lists(schedule, stages, micro_batches) {
            let mut forward = HashSet::new();
            let mut backward = HashSet::new();
            for action in list {
                match action {
                    Action::Run(Work::Forward, unit) => prop_assert!(forward.insert(unit)),
                    Action::Run(Work::Backward, unit) => {
                        prop_assert!(forward.contains(&unit) && backward.insert(unit));
                    }
                    _ => {}
                }
            }
            let all: HashSet<Unit> = (0..micro_batches)
                .flat_map(|micro| (0..schedule.chunks()).map(move |chunk| Unit { micro, chunk }))
                .collect();
            prop_assert_eq!(&forward, &all);
            prop_assert_eq!(&backward, &all);
        }
    }

    #[test]
    fn every_send_meets_one_receive((schedule, stages, micro_batches) in cases()) {
        let mut sent = HashMap::new();
        let mut received = HashMap::new();
        for (rank, list) in lists(schedule, stages, micro_batches).into_iter().enumerate() {
            for action in list {
                match action {
                    Action::Send(work, unit) => {
                        let stage = unit.chunk * stages + rank;
                        let to = if work == Work::Forward { stage + 1 } else { stage - 1 };
                        *sent.entry((work, unit.micro, to)).or_insert(0) += 1;
                    }
                    Action::Recv(work, unit) => {
                        *received.entry((work, unit.micro, unit.chunk * stages + rank)).or_insert(0) += 1;
                    }
                    Action::Run(..) => {}
                }
            }
        }
        prop_assert_eq!(&sent, &received);
        prop_assert!(sent.values().all(|count| *count == 1));
        prop_assert_eq!(sent.len(), 2 * micro_batches * (stages * schedule.chunks() - 1));
    }

    #[test]
    fn no_schedule_stops_half_way((schedule, stages, micro_batches) in cases(), message in 0.0f64..3.0) {
        let timeline = simulate(&lists(schedule, stages, micro_batches), Costs { message, ..EQUAL });
        prop_assert!(timeline.is_ok(), "{timeline:?}");
    }

    #[test]
    fn one_forward_one_backward_holds_few_micro_batches(stages in 1usize..9, micro_batches in 1usize..20) {
        let schedule = Schedule::OneForwardOneBackward;
        for (rank, list) in lists(schedule, stages, micro_batches).into_iter().enumerate() {
            let (mut held, mut most) = (0usize, 0);
            for action in list {
                match action {
                    Action::Run(Work::Forward, _) => held += 1,
                    Action::Run(Work::Backward, _) => held -= 1,
                    _ => {}
                }
                most = most.max(held);
            }
            prop_assert!(most <= stages - rank, "rank {rank} holds {most}");
            prop_assert_eq!(most, (stages - rank).min(micro_batches));
        }
    }
}

#[test]
fn the_measured_bubble_is_the_formulas() {
    let schedules =
        [Schedule::GPipe, Schedule::OneForwardOneBackward, Schedule::Interleaved { chunks: 2 }];
    for schedule in schedules {
        for micro_batches in [4, 16] {
            let timeline = simulate(&lists(schedule, 4, micro_batches), EQUAL).unwrap();
            let (measured, formula) = (timeline.bubble(), schedule.bubble(4, micro_batches));
            assert!(
                (measured - formula).abs() <= 0.15 * formula,
                "{schedule}, {micro_batches} micro-batches: measured {measured:.3}, formula {formula:.3}"
            );
        }
    }
}

#[test]
fn interleaving_shortens_the_bubble() {
    let bubble = |schedule| simulate(&lists(schedule, 4, 8), EQUAL).unwrap().bubble();
    let plain = bubble(Schedule::OneForwardOneBackward);
    let interleaved = bubble(Schedule::Interleaved { chunks: 4 });
    assert!(interleaved < 0.5 * plain, "{interleaved} and {plain}");
}

/// A list that cannot end is found, rather than waited for.
#[test]
fn a_missing_send_is_a_deadlock() {
    let mut lists = lists(Schedule::OneForwardOneBackward, 3, 4);
    lists[1].retain(|action| *action != Action::Send(Work::Backward, Unit { micro: 2, chunk: 0 }));
    let deadlock = simulate(&lists, EQUAL).unwrap_err();
    assert_eq!(deadlock.rank, 0);
    assert_eq!(deadlock.waiting, Action::Recv(Work::Backward, Unit { micro: 2, chunk: 0 }));
}

#[test]
fn impossible_schedules_are_refused_with_what_to_use() {
    let refused = |schedule: Schedule, stages, rank, micro_batches| {
        schedule.actions(stages, rank, micro_batches).unwrap_err().to_string()
    };
    let interleaved = Schedule::Interleaved { chunks: 2 };
    assert!(refused(interleaved, 4, 0, 6).contains("use 8"));
    assert!(refused(interleaved, 1, 0, 6).contains("use 1f1b"));
    assert!(refused(Schedule::GPipe, 4, 4, 6).contains("count from 0"));
    assert!(refused(Schedule::GPipe, 0, 0, 6).contains("at least one"));
    for name in ["gpipe", "1f1b", "interleaved:3"] {
        assert_eq!(name.parse::<Schedule>().unwrap().to_string(), name);
    }
    for name in ["", "1F1B", "interleaved:0", "interleaved:-1", "interleaved:99999999999999999999"]
    {
        assert!(matches!(name.parse::<Schedule>(), Err(ScheduleError::Name(_))), "{name}");
    }
}
