//! `farwire sim chaos`: membership under many schedules of faults.

use std::io::Write as _;

use farwire_sim::chaos::{Schedule, Seen};

use super::SimError;

/// Let groups of simulated ranks agree on their members while they are killed, stopped, cut off,
/// leave and join.
///
/// Each schedule has a world of up to 64 ranks and its faults, by its seed. The first that breaks a
/// promise is made small and shown; its seed gives it again.
#[derive(Debug, clap::Args)]
pub(crate) struct ChaosArgs {
    /// How many schedules.
    #[arg(long, default_value = "10000")]
    schedules: u64,
    /// The seed of the first; each of the others has the next.
    #[arg(long, default_value = "0")]
    seed: u64,
}

pub(crate) fn run(args: &ChaosArgs) -> Result<(), SimError> {
    let mut seen = Seen::default();
    for seed in (0..args.schedules).map(|nth| args.seed.wrapping_add(nth)) {
        let schedule = Schedule::random(seed);
        let fails = |schedule: &Schedule| schedule.run(&|_| ()).err();
        match schedule.run(&|_| ()) {
            Ok(more) => seen += more,
            Err(violation) => {
                let small = schedule.shrink(&|schedule| fails(schedule).is_some());
                let violation = fails(&small).unwrap_or(violation);
                return Err(SimError::Chaos { seed, what: format!("{violation}\n{small:#?}") });
            }
        }
    }
    let Seen { views, joined, evicted, no_quorum, messages, deaths } = seen;
    writeln!(
        std::io::stdout(),
        "{} schedules from seed {}: no promise broken\n\
         {deaths} deaths, {views} views, {joined} joined, {evicted} left behind, \
         {no_quorum} times too few to go on, {messages} messages",
        args.schedules,
        args.seed
    )?;
    Ok(())
}
