//! Giving newcomers what the others have: named buffers, in pieces, from several ranks at once.
//!
//! 1. Every rank tells all others its revision, and digests of its buffers' names and lengths and
//!    of their content.
//! 2. The newest revision counts. Of the ranks that have it, the largest group with equal digests
//!    are the *sources* (of several such groups, the one with the lowest rank). All other ranks
//!    with the same names and lengths receive; so does a replica that has the revision with other
//!    bits, and everyone learns of it.
//! 3. The buffers, one after the other, are cut into pieces. Piece i comes from source i modulo the
//!    number of sources. The first source also sends the digest of every piece.
//!
//! A rank that neither gives nor gets anything goes on after step 1, which is one small collective.

use std::collections::VecDeque;

use crate::comm::{Communicator, digest};
use crate::error::Error;
use crate::pending::Pending;

/// Bytes of a piece.
const PIECE: usize = 1 << 20;
/// Pieces that are under way to or from each rank.
const WINDOW: usize = 8;
/// Tags of the messages: the digests of all pieces, and the pieces.
const DIGESTS: u32 = 0;
const PIECES: u32 = 1;

/// The outcome of [`Communicator::sync_state`], the same on all ranks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StateSync {
    /// The revision that all ranks have now.
    pub revision: u64,
    /// The ranks that had it already.
    pub sources: Vec<usize>,
    /// The ranks that got it.
    pub receivers: Vec<usize>,
    /// Of these, the ranks that had the same revision with other bits.
    pub differed: Vec<usize>,
    /// Ranks whose buffers have other names or lengths. They get an error, and nothing else.
    pub misfits: Vec<usize>,
}

/// Why a rank has not got what the others have.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum StateError {
    /// Its buffers have other names or lengths.
    #[error(
        "this rank's state has other buffers than that of rank {source_rank}, in names or lengths; \
         give all ranks the same model, data and settings"
    )]
    Layout {
        /// A rank that has the state that counts.
        source_rank: usize,
    },
    /// What arrived is not what was announced.
    #[error(
        "a piece of the state from rank {source_rank} is not what rank {announced_by} announced; \
         one of them has changed its buffers meanwhile"
    )]
    Damaged {
        /// The rank that sent it.
        source_rank: usize,
        /// The rank that sent its digest.
        announced_by: usize,
    },
}

impl Communicator {
    /// Gives all ranks the same buffers: those of the ranks whose `revision`, say the number of
    /// steps they have done, is newest. All ranks must call it.
    ///
    /// Newcomers, and ranks that missed a step, get what they lack from several ranks at once, and
    /// check it against digests. A replica that has drifted, with the same revision and other bits,
    /// is found and put right, and all ranks learn of it.
    ///
    /// ```
    /// # std::thread::scope(|scope| for comm in farwire::local(3).unwrap() { scope.spawn(move || {
    /// let newcomer = comm.rank() == 2;
    /// let mut weights = if newcomer { [0; 4] } else { [1, 2, 3, 4] };
    /// let revision = if newcomer { 0 } else { 100 };
    /// let sync = comm.sync_state(revision, &mut [("weights", &mut weights)]).unwrap();
    /// assert_eq!((weights, sync.revision), ([1, 2, 3, 4], 100));
    /// assert_eq!((&sync.sources[..], &sync.receivers[..]), (&[0, 1][..], &[2][..]));
    /// # }); });
    /// ```
    pub fn sync_state(
        &self,
        revision: u64,
        buffers: &mut [(&str, &mut [u8])],
    ) -> Result<StateSync, Error> {
        let mine = vec![revision, layout(buffers), content(buffers)];
        let all = self.all_gather(mine).wait()?;
        let said: Vec<[u64; 3]> = all.as_chunks().0.to_vec();
        let (sync, expected) = decide(&said);
        // On every rank, so that all count alike how often this group was made.
        let all_ranks: Vec<_> = (0..self.size()).collect();
        let group = self.subgroup(&all_ranks, "farwire sync_state")?;
        let me = self.rank();
        if sync.misfits.contains(&me) {
            return Err(StateError::Layout { source_rank: sync.sources[0] }.into());
        }
        if sync.sources.contains(&me) {
            give(&group, &sync, buffers)?;
        } else {
            get(&group, &sync, buffers)?;
            if content(buffers) != expected {
                let source_rank = sync.sources[0];
                return Err(StateError::Damaged { source_rank, announced_by: source_rank }.into());
            }
        }
        Ok(sync)
    }
}

/// Decides who gives and who gets, from what all ranks have said; also the digest of the state that
/// counts.
fn decide(said: &[[u64; 3]]) -> (StateSync, u64) {
    let revision = said.iter().map(|[revision, ..]| *revision).max().unwrap_or(0);
    let newest = || said.iter().enumerate().filter(|(_, [theirs, ..])| *theirs == revision);
    let sharing = |one: &[u64; 3]| newest().filter(|(_, other)| *other == one).count();
    let best = newest().max_by_key(|(rank, one)| (sharing(one), std::cmp::Reverse(*rank)));
    let best = best.map_or([revision, 0, 0], |(_, one)| *one);
    let ranks = |is: &dyn Fn(&[u64; 3]) -> bool| -> Vec<usize> {
        said.iter().enumerate().filter(|(_, one)| is(one)).map(|(rank, _)| rank).collect()
    };
    let fits = |one: &[u64; 3]| one[1] == best[1];
    let sync = StateSync {
        revision,
        sources: ranks(&|one| *one == best),
        receivers: ranks(&|one| *one != best && fits(one)),
        differed: ranks(&|one| *one != best && fits(one) && one[0] == revision),
        misfits: ranks(&|one| !fits(one)),
    };
    (sync, best[2])
}

fn layout(buffers: &[(&str, &mut [u8])]) -> u64 {
    let mut text = Vec::new();
    for (name, buffer) in buffers {
        text.extend((name.len() as u64).to_le_bytes());
        text.extend(name.as_bytes());
        text.extend((buffer.len() as u64).to_le_bytes());
    }
    digest(&text)
}

fn content(buffers: &[(&str, &mut [u8])]) -> u64 {
    let digests: Vec<u8> =
        buffers.iter().flat_map(|(_, buffer)| digest(buffer).to_le_bytes()).collect();
    digest(&digests)
}

/// Bytes of all buffers, one after the other.
fn total(buffers: &[(&str, &mut [u8])]) -> usize {
    buffers.iter().map(|(_, buffer)| buffer.len()).sum()
}

/// Calls `visit` for every stretch of a buffer that belongs to the piece, with its place in the
/// piece.
fn visit_piece(
    buffers: &mut [(&str, &mut [u8])],
    piece: usize,
    mut visit: impl FnMut(usize, &mut [u8]),
) {
    let (begin, mut at) = (piece * PIECE, 0);
    for (_, buffer) in buffers {
        let (from, to) = (begin.max(at), (begin + PIECE).min(at + buffer.len()));
        if from < to {
            visit(from - begin, &mut buffer[from - at..to - at]);
        }
        at += buffer.len();
    }
}

fn piece(buffers: &mut [(&str, &mut [u8])], index: usize) -> Vec<u8> {
    let len = (total(buffers) - index * PIECE).min(PIECE);
    let mut bytes = Vec::with_capacity(len);
    visit_piece(buffers, index, |_, stretch| bytes.extend_from_slice(stretch));
    bytes
}

fn give(
    group: &Communicator,
    sync: &StateSync,
    buffers: &mut [(&str, &mut [u8])],
) -> Result<(), Error> {
    if sync.receivers.is_empty() {
        return Ok(());
    }
    let pieces = total(buffers).div_ceil(PIECE);
    let mut under_way: VecDeque<Pending<()>> = VecDeque::new();
    let mut send = |sent: Pending<()>| {
        under_way.push_back(sent);
        if under_way.len() > WINDOW * sync.receivers.len() {
            under_way.pop_front().expect("one was just added").wait()?;
        }
        Ok::<_, Error>(())
    };
    if sync.sources[0] == group.rank() {
        let digests: Vec<u64> = (0..pieces).map(|index| digest(&piece(buffers, index))).collect();
        for to in &sync.receivers {
            send(group.send(digests.clone(), *to, DIGESTS))?;
        }
    }
    for index in (0..pieces).filter(|index| source(sync, *index) == group.rank()) {
        let bytes = piece(buffers, index);
        for to in &sync.receivers {
            send(group.send(bytes.clone(), *to, PIECES))?;
        }
    }
    under_way.into_iter().try_for_each(Pending::wait)
}

/// Which rank a piece comes from.
fn source(sync: &StateSync, piece: usize) -> usize {
    sync.sources[piece % sync.sources.len()]
}

fn get(
    group: &Communicator,
    sync: &StateSync,
    buffers: &mut [(&str, &mut [u8])],
) -> Result<(), Error> {
    let bytes = total(buffers);
    let pieces = bytes.div_ceil(PIECE);
    let first = sync.sources[0];
    let digests = group.recv::<u64>(pieces, first, DIGESTS).wait()?;
    let ask = |index: usize| {
        let len = (bytes - index * PIECE).min(PIECE);
        group.recv::<u8>(len, source(sync, index), PIECES)
    };
    let window = WINDOW * sync.sources.len();
    let mut under_way: VecDeque<_> = (0..pieces.min(window)).map(ask).collect();
    for (index, expected) in digests.into_iter().enumerate() {
        let came = under_way.pop_front().expect("a piece is asked for before it is waited for");
        let came = came.wait()?;
        if index + window < pieces {
            under_way.push_back(ask(index + window));
        }
        if digest(&came) != expected {
            let source_rank = source(sync, index);
            return Err(StateError::Damaged { source_rank, announced_by: first }.into());
        }
        visit_piece(buffers, index, |at, stretch| {
            stretch.copy_from_slice(&came[at..at + stretch.len()]);
        });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newest_revision_counts_and_then_what_most_have() {
        let (sync, digest) = decide(&[[3, 7, 1], [4, 7, 2], [4, 7, 3], [4, 7, 3], [4, 8, 9]]);
        assert_eq!((sync.revision, digest), (4, 3));
        assert_eq!((sync.sources, sync.receivers), (vec![2, 3], vec![0, 1]));
        assert_eq!((sync.differed, sync.misfits), (vec![1], vec![4]));
        // One against one: the lower rank counts.
        let (sync, _) = decide(&[[4, 7, 2], [4, 7, 3]]);
        assert_eq!((sync.sources, sync.differed), (vec![0], vec![1]));
    }

    /// Buffers of lengths that fall on and beside the borders of pieces, from several sources; a
    /// newcomer, one that is behind, one that has drifted, and one with another model.
    #[test]
    fn everyone_ends_up_with_the_same_buffers() {
        std::thread::scope(|scope| {
            for comm in crate::local(6).unwrap() {
                scope.spawn(move || {
                    let lengths = [3, PIECE - 3, 2 * PIECE + 1, 0, 17 * PIECE / 2];
                    let make = |salt: usize| -> Vec<Vec<u8>> {
                        let byte = |at: usize| (at * 31 + salt) as u8;
                        lengths.iter().map(|len| (0..*len).map(byte).collect()).collect()
                    };
                    let right = make(0);
                    let (revision, mut mine) = match comm.rank() {
                        0 => (0, make(1)),
                        2 => (8, make(2)),
                        4 => (9, make(3)),
                        _ => (9, make(0)),
                    };
                    let names = ["a", "b", "c", "d", "e"];
                    let odd = comm.rank() == 5;
                    let mut buffers: Vec<(&str, &mut [u8])> =
                        names.into_iter().zip(mine.iter_mut().map(Vec::as_mut_slice)).collect();
                    buffers[0].0 = if odd { "x" } else { "a" };
                    let sync = comm.sync_state(revision, &mut buffers);
                    if odd {
                        let error = sync.unwrap_err().to_string();
                        return assert!(error.contains("other buffers"), "{error}");
                    }
                    let sync = sync.unwrap();
                    assert_eq!(sync.sources, [1, 3]);
                    assert_eq!((sync.receivers, sync.differed), (vec![0, 2, 4], vec![4]));
                    assert_eq!(sync.misfits, [5]);
                    assert!(mine == right, "rank {}", comm.rank());
                });
            }
        });
    }
}
