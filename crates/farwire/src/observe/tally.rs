//! How many operations ended, how, and how long they took.

use farwire_proto::Kind;

use super::flight::Record;

/// Upper bounds of the histogram's buckets, in seconds.
pub(crate) const BUCKETS: [f64; 8] = [1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0, 10.0, 100.0];

/// Operations that have ended, by kind.
#[derive(Debug, Default)]
pub(crate) struct Tally {
    pub(crate) kinds: [PerKind; Kind::ALL.len()],
}

#[derive(Debug, Default)]
pub(crate) struct PerKind {
    pub(crate) failed: u64,
    pub(crate) done: u64,
    pub(crate) seconds: f64,
    /// How many took no longer than each bound, and longer than the one before.
    pub(crate) within: [u64; BUCKETS.len()],
}

impl Tally {
    pub(super) fn ended(&mut self, record: &Record) {
        let kind =
            Kind::ALL.iter().position(|kind| *kind == record.call.kind).expect("all are there");
        let tally = &mut self.kinds[kind];
        if record.failure.is_some() {
            tally.failed += 1;
            return;
        }
        let seconds = record.took().unwrap_or_default().as_secs_f64();
        tally.done += 1;
        tally.seconds += seconds;
        if let Some(bucket) = BUCKETS.iter().position(|bound| seconds <= *bound) {
            tally.within[bucket] += 1;
        }
    }
}
