//! Spreads work over threads without changing its result.

use std::num::NonZeroUsize;

/// Runs `work` on all `items`, a contiguous group on each thread. The results are in the order of
/// the items.
pub(crate) fn in_order<T: Send, R: Send>(
    threads: NonZeroUsize,
    items: Vec<T>,
    work: impl Fn(T) -> R + Sync,
) -> Vec<R> {
    let group = items.len().div_ceil(threads.get()).max(1);
    if items.len() <= group {
        return items.into_iter().map(work).collect();
    }
    let mut items = items.into_iter();
    let groups = std::iter::from_fn(|| {
        Some(items.by_ref().take(group).collect::<Vec<_>>()).filter(|g| !g.is_empty())
    });
    let groups: Vec<_> = groups.collect();
    std::thread::scope(|scope| {
        let work = &work;
        let running: Vec<_> = groups
            .into_iter()
            .map(|group| scope.spawn(move || group.into_iter().map(work).collect::<Vec<_>>()))
            .collect();
        running
            .into_iter()
            .flat_map(|thread| thread.join().expect("a codec's thread does not panic"))
            .collect()
    })
}
