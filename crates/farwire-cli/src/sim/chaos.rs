//! `farwire sim chaos`: membership under many schedules of faults.

use std::io::Write as _;

use farwire_sim::chaos::{Schedule, Seen};

use super::SimError;

/// Check that groups of simulated ranks agree on their members while ranks are killed, stopped, cut
/// off, leave and join.
///
/// The seed of a schedule decides its world of up to 64 ranks and its faults. The first schedule
/// that breaks a promise is made small and shown. Its seed gives it again.
#[derive(Debug, clap::Args)]
pub(crate) struct ChaosArgs {
    /// Number of schedules.
    #[arg(long, default_value = "10000")]
    schedules: u64,
    /// Seed of the first schedule. Each of the others has the next number.
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
