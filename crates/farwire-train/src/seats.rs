//! Which rank has which share of which replica, as ranks come and go.
//!
//! With tensor or pipeline parallelism a replica needs a rank for each of its tp · pp *shares* of
//! the model. A rank that is lost breaks its replica, but every share is on the other replicas as
//! well, to the bit. So n ranks always make ⌊n ∕ shares⌋ replicas, and fewer than a replica's worth
//! of ranks wait:
//!
//! ```text
//!           share 0  share 1                      share 0  share 1
//!  replica 0   A        B      C is lost            A        B       D waits
//!  replica 1   C        D     ───────────▶
//!                              E joins              A        B
//!                             ───────────▶          E        D
//! ```
//!
//! 1. Replicas that are whole stay as they are.
//! 2. The other ranks make as many replicas as they can. A rank keeps its share, if there is room;
//!    the others get what is left, and take the state from a rank that has it.
//!
//! Every rank works this out by itself, from what all have said.

/// A rank's place in the mesh.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Seat {
    /// Which replica, from 0: the coordinate along dp.
    pub(crate) replica: usize,
    /// Which share of it: `stage · tp + coordinate along tp`.
    pub(crate) share: usize,
}

/// Gives ranks their seats, and `None` to those that wait. `held` is the seat whose state each rank
/// has.
///
/// Fails with the shares that no rank has. Before the first step there is no state to have
/// (`is_start`): then it fails only if there are too few ranks.
pub(crate) fn assign(
    shares: usize,
    held: &[Option<Seat>],
    is_start: bool,
) -> Result<Vec<Option<Seat>>, Vec<usize>> {
    let holds = |share: &usize| held.iter().flatten().any(|seat| seat.share == *share);
    let missing: Vec<usize> = (0..shares).filter(|share| !holds(share)).collect();
    if held.len() < shares || (!missing.is_empty() && !is_start) {
        return Err(missing);
    }
    // Replica numbers may date from before or after a change that was cut short.
    let is_whole = |seat: &Seat| {
        let members = held.iter().flatten().filter(|other| other.replica == seat.replica);
        let mut found: Vec<usize> = members.map(|member| member.share).collect();
        found.sort_unstable();
        found.iter().copied().eq(0..shares)
    };
    let mut whole: Vec<usize> =
        held.iter().flatten().filter(|seat| is_whole(seat)).map(|seat| seat.replica).collect();
    whole.sort_unstable();
    whole.dedup();

    let place = |seat: Seat| whole.iter().position(|replica| *replica == seat.replica);
    let mut seats: Vec<Option<Seat>> = held
        .iter()
        .map(|seat| seat.and_then(|seat| Some(Seat { replica: place(seat)?, ..seat })))
        .collect();
    // The other ranks, those of one replica side by side.
    let mut others: Vec<usize> = (0..held.len()).filter(|rank| seats[*rank].is_none()).collect();
    others.sort_by_key(|rank| (held[*rank].map_or(usize::MAX, |seat| seat.replica), *rank));
    let mut free: Vec<Seat> = (whole.len()..whole.len() + others.len() / shares)
        .flat_map(|replica| (0..shares).map(move |share| Seat { replica, share }))
        .collect();
    let keeps = |rank: usize, free: &[Seat]| {
        free.iter().position(|seat| held[rank].is_some_and(|held| held.share == seat.share))
    };
    for rank in &others {
        seats[*rank] = keeps(*rank, &free).map(|at| free.remove(at));
    }
    for rank in others {
        if seats[rank].is_none() && !free.is_empty() {
            seats[rank] = Some(free.remove(0));
        }
    }
    Ok(seats)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seats(of: &[(usize, usize)]) -> Vec<Option<Seat>> {
        of.iter().map(|(replica, share)| Some(Seat { replica: *replica, share: *share })).collect()
    }

    #[test]
    fn at_the_start_ranks_sit_in_order_and_the_rest_wait() {
        let seated = assign(2, &[None; 5], true).unwrap();
        assert_eq!(seated[..4], seats(&[(0, 0), (0, 1), (1, 0), (1, 1)]));
        assert_eq!(seated[4], None);
        assert_eq!(assign(4, &[None; 3], true), Err(vec![0, 1, 2, 3]), "too few");
    }

    #[test]
    fn a_broken_replica_waits_and_is_whole_again_with_a_newcomer() {
        // Replica 0 has lost its share 0.
        let held = seats(&[(0, 1), (1, 0), (1, 1)]);
        let seated = assign(2, &held, false).unwrap();
        assert_eq!(seated[1..], seats(&[(0, 0), (0, 1)]));
        assert_eq!(seated[0], None);
        // By the time the newcomer is there, the rank that waited no longer has the state.
        let held = [vec![None], seated[1..].to_vec(), vec![None]].concat();
        let seated = assign(2, &held, false).unwrap();
        assert_eq!(seated, seats(&[(1, 0), (0, 0), (0, 1), (1, 1)]));
    }

    #[test]
    fn what_is_left_of_two_replicas_makes_one() {
        let held = seats(&[(0, 1), (1, 0)]);
        assert_eq!(assign(2, &held, false).unwrap(), seats(&[(0, 1), (0, 0)]));
        // The same share is lost twice: one of those that are left takes it over.
        let held = seats(&[(0, 1), (1, 1), (2, 0), (2, 1)]);
        let seated = assign(2, &held, false).unwrap();
        assert_eq!(seated, seats(&[(1, 1), (1, 0), (0, 0), (0, 1)]));
    }

    #[test]
    fn without_a_share_nobody_goes_on() {
        assert_eq!(assign(2, &seats(&[(0, 1), (1, 1)]), false), Err(vec![0]));
        assert_eq!(assign(3, &[None; 3], false), Err(vec![0, 1, 2]));
        assert!(
            assign(2, &seats(&[(0, 1), (1, 1)]), true).is_ok(),
            "all can be made from the seed"
        );
    }

    /// Whichever ranks are lost, each seat is taken once, as many replicas as possible are whole,
    /// and a rank gives up its share only if others that had it fill all its seats.
    #[test]
    fn seats_are_taken_once_whoever_is_lost() {
        for shares in 1..5usize {
            let all: Vec<Seat> = (0..3)
                .flat_map(|replica| (0..shares).map(move |share| Seat { replica, share }))
                .collect();
            for left in 0..1u32 << all.len() {
                for newcomers in 0..3 {
                    let stay = (0..all.len()).filter(|at| left >> at & 1 == 1);
                    let mut held: Vec<_> = stay.map(|at| Some(all[at])).collect();
                    held.extend(vec![None; newcomers]);
                    let Ok(seated) = assign(shares, &held, false) else {
                        let lacks = |share| !held.iter().flatten().any(|seat| seat.share == share);
                        assert!((0..shares).any(lacks), "{held:?}");
                        continue;
                    };
                    let replicas = held.len() / shares;
                    let mut taken: Vec<Seat> = seated.iter().flatten().copied().collect();
                    taken.sort();
                    let wanted: Vec<_> = (0..replicas)
                        .flat_map(|replica| (0..shares).map(move |share| Seat { replica, share }))
                        .collect();
                    assert_eq!(taken, wanted, "{held:?}");
                    for (had, has) in held.iter().zip(&seated) {
                        let Some(had) = had else { continue };
                        let keeps = has.is_some_and(|has| has.share == had.share);
                        let stayed = held.iter().zip(&seated).filter(|(before, now)| {
                            let same = |seat: &Option<Seat>| {
                                seat.is_some_and(|seat| seat.share == had.share)
                            };
                            same(before) && same(now)
                        });
                        assert!(keeps || stayed.count() == replicas, "{held:?} {seated:?}");
                    }
                }
            }
        }
    }
}
