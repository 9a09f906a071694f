//! Tier 2: any order of events, chosen byte by byte, at machines with operations of all kinds in
//! flight. Each operation ends once on every rank, and with the right result if nothing went wrong.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on should say where")]

use farwire_sim::script;
use proptest::prelude::*;

fn check(bytes: &[u8]) -> Result<bool, TestCaseError> {
    let outcome = script::run(bytes);
    let ranks = [1.0f32, 2.0, 3.0];
    let sum: Vec<f32> =
        (0..20).map(|i| ranks.iter().map(|rank| (i as f32 - 3.0) * rank).sum()).collect();
    let sum: &[u8] = bytemuck::cast_slice(&sum);
    for (operation, ends) in outcome.ends.iter().enumerate() {
        for (rank, end) in ends.iter().enumerate() {
            let Some(end) = end else {
                return Err(TestCaseError::fail(format!(
                    "operation {operation} of rank {rank} did not end"
                )));
            };
            if !outcome.trouble {
                prop_assert!(end.is_ok(), "operation {operation} of rank {rank} failed");
            }
        }
        if !outcome.trouble {
            match operation {
                1 | 3 => prop_assert!(ends.iter().all(|end| *end == Some(Ok(sum.to_vec())))),
                2 => prop_assert_eq!(&ends[1], &Some(Ok(vec![7; 30]))),
                _ => prop_assert!(ends.iter().all(|end| end == &ends[0]), "ranks differ"),
            }
        }
    }
    Ok(outcome.trouble)
}

/// Scripts without troubles.
fn calm() -> impl Strategy<Value = Vec<u8>> {
    let step = (0u8..16, 0u8..11).prop_map(|(which, what)| which << 4 | what);
    prop::collection::vec(step, 0..400)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1000))]

    #[test]
    fn every_order_of_events_ends_in_the_same_results(codec in 0u8..4, steps in calm()) {
        let trouble = check(&[&[codec][..], &steps].concat())?;
        prop_assert!(!trouble);
    }

    #[test]
    fn every_operation_ends_once_whatever_goes_wrong(bytes in prop::collection::vec(any::<u8>(), 0..400)) {
        check(&bytes)?;
    }

    #[test]
    fn nonsense_in_any_parcel_ends_every_operation(
        codec in 0u8..4, before in calm(), garbled in prop::collection::vec((0u8..16, any::<u8>()), 1..4), after in calm(),
    ) {
        let garbled: Vec<u8> = garbled.into_iter().flat_map(|(which, byte)| [which << 4 | 11, byte]).collect();
        check(&[&[codec][..], &before, &garbled, &after].concat())?;
    }
}
