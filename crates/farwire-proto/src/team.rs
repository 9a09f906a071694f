//! Threads that work on one frame together.
//!
//! A frame is tens of kilobytes, which takes one core some microseconds to move or to add up. Where
//! cores are idle, several do that in less time. The result is the same to the bit, because every
//! element is computed as by one thread.

use std::fmt;

/// Threads that share work with whoever calls them.
///
/// This crate has no threads. A driver that has some gives them to a
/// [`Machine`](crate::Machine::set_team).
pub trait Team: fmt::Debug + Send + Sync {
    /// How many threads can work at once, the caller's included.
    fn size(&self) -> usize;

    /// Runs both, side by side if a thread is free for that, and returns when both have ended.
    fn join(&self, one: &mut (dyn FnMut() + Send), other: &mut (dyn FnMut() + Send));

    /// Copies a slice into another of the same length. The copy would leave the caches before
    /// anybody reads it, so it need not enter them.
    fn copy_past_caches(&self, target: &mut [u8], source: &[u8]) {
        target.copy_from_slice(source);
    }
}

/// A team, if there is one; it lasts as long as the process.
pub type Teamed = Option<&'static dyn Team>;

/// The fewest bytes worth handing to another thread, which takes a few hundred nanoseconds.
const LEAST_PART: usize = 16 << 10;
/// Parts begin at multiples of this many elements, so that they seldom share a cache line.
const GRAIN: usize = 64;

/// Copies a slice into another of the same length.
///
/// # Panics
///
/// If their lengths differ.
pub fn copy(team: Teamed, target: &mut [u8], source: &[u8]) {
    assert_eq!(target.len(), source.len(), "a copy is as long as what is copied");
    each_part(team, target.len(), target, [source, &[]], &|target, [source, _]| {
        target.copy_from_slice(source);
    });
}

/// [`Team::copy_past_caches`], by several threads.
///
/// # Panics
///
/// If their lengths differ.
pub(crate) fn copy_past_caches(team: Teamed, target: &mut [u8], source: &[u8]) {
    assert_eq!(target.len(), source.len(), "a copy is as long as what is copied");
    let Some(each) = team else { return target.copy_from_slice(source) };
    each_part(team, target.len(), target, [source, &[]], &|target, [source, _]| {
        each.copy_past_caches(target, source);
    });
}

/// What is done to a part of a result and of up to two operands.
pub(crate) type Work<'a> = &'a (dyn Fn(&mut [u8], [&[u8]; 2]) + Sync);

/// Runs `work` side by side on parts of `out` and the matching parts of `inputs`. Each slice has
/// `count` elements, of whatever size, or is empty.
pub(crate) fn each_part(
    team: Teamed,
    count: usize,
    out: &mut [u8],
    inputs: [&[u8]; 2],
    work: Work<'_>,
) {
    match team {
        Some(team) if out.len() >= 2 * LEAST_PART => {
            let parts = team.size().min(out.len() / LEAST_PART);
            spread(team, parts, count, out, inputs, work);
        }
        _ => work(out, inputs),
    }
}

fn spread(
    team: &dyn Team,
    parts: usize,
    count: usize,
    out: &mut [u8],
    inputs: [&[u8]; 2],
    work: Work<'_>,
) {
    let parts_here = parts / 2;
    if parts_here == 0 {
        return work(out, inputs);
    }
    let here = count * parts_here / parts / GRAIN * GRAIN;
    let (out_here, out_there) = out.split_at_mut(out.len() / count * here);
    let halves = inputs.map(|input| input.split_at(input.len() / count * here));
    team.join(
        &mut || spread(team, parts_here, here, out_here, halves.map(|(half, _)| half), work),
        &mut || {
            let (parts, count) = (parts - parts_here, count - here);
            spread(team, parts, count, out_there, halves.map(|(_, half)| half), work);
        },
    );
}

#[cfg(test)]
pub(crate) mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    /// A team that starts a thread for each join.
    #[derive(Debug)]
    pub(crate) struct Threads(pub(crate) usize, pub(crate) AtomicUsize);

    impl Team for Threads {
        fn size(&self) -> usize {
            self.0
        }

        fn join(&self, one: &mut (dyn FnMut() + Send), other: &mut (dyn FnMut() + Send)) {
            self.1.fetch_add(1, Ordering::Relaxed);
            std::thread::scope(|scope| {
                scope.spawn(other);
                one();
            });
        }
    }

    pub(crate) fn threads(size: usize) -> &'static Threads {
        Box::leak(Box::new(Threads(size, AtomicUsize::new(0))))
    }

    #[test]
    fn parts_are_all_of_it_and_do_not_overlap() {
        for size in 1..6 {
            for count in [0, 1, 8_191, 8_192, 8_193, 20_000, 32_767, 65_536] {
                let team = threads(size);
                let wide: Vec<u8> = (0..4 * count).map(|k| (k / 4 % 251) as u8).collect();
                let narrow: Vec<u8> = (0..2 * count).map(|k| (k / 2 % 251) as u8).collect();
                let mut out = vec![0; 4 * count];
                each_part(Some(team), count, &mut out, [&wide, &narrow], &|out, [wide, narrow]| {
                    assert_eq!((out.len(), wide.len()), (2 * narrow.len(), 2 * narrow.len()));
                    for (k, byte) in out.iter_mut().enumerate() {
                        assert_eq!(wide[k], narrow[k / 2], "the same elements of both");
                        *byte += wide[k] + 1;
                    }
                });
                assert!(out.iter().zip(&wide).all(|(out, wide)| *out == wide + 1), "each once");
                let joins = team.1.load(Ordering::Relaxed);
                assert_eq!(joins, (4 * count / LEAST_PART).clamp(1, size) - 1);
            }
        }
    }
}
