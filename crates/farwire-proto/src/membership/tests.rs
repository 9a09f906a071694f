use super::*;

const NOW: Time = Time::ZERO;

fn part(me: u32, members: u32) -> Agreement {
    let view = View::founding(Epoch(0), members).unwrap();
    Agreement::new(Peer(me), view, Settings::default())
}

fn sent(part: &mut Agreement) -> Vec<(u32, Message)> {
    std::iter::from_fn(|| part.poll_transmit())
        .map(|Outgoing { to, message }| (to.peer.0, message))
        .collect()
}

fn peers(view: &View) -> Vec<u32> {
    view.peers().map(|peer| peer.0).collect()
}

/// Carries messages between the parts until there are none.
fn carry(parts: &mut [Agreement], alive: &[usize]) {
    while let Some(from) = alive.iter().copied().find(|who| !parts[*who].transmits.is_empty()) {
        for (to, message) in sent(&mut parts[from]) {
            if alive.contains(&(to as usize)) {
                parts[to as usize].handle_message(NOW, Peer(from as u32), message);
            }
        }
    }
}

#[test]
fn three_go_on_without_the_first() {
    let mut parts: Vec<_> = (0..4).map(|me| part(me, 4)).collect();
    for part in &mut parts[1..] {
        part.handle_lost(NOW, Peer(0));
        part.shrink(NOW);
    }
    carry(&mut parts, &[1, 2, 3]);
    for part in &mut parts[1..] {
        let Some(Event::Changed(view)) = part.poll_event() else { panic!("it goes on") };
        assert_eq!((view.epoch(), peers(&view)), (Epoch(1), vec![1, 2, 3]));
        assert_eq!((view.rank_of(Peer(1)), view.next_peer()), (Some(crate::Rank(0)), 4));
    }
    // The lost member's request is answered with what came of it.
    parts[1].handle_message(NOW, Peer(0), Message::Nudge { epoch: Epoch(1), admitting: false });
    let view = parts[1].view().clone();
    assert_eq!(sent(&mut parts[1]), [(0, Message::Decided { view: view.clone() })]);
    parts[0].handle_message(NOW, Peer(1), Message::Decided { view: view.clone() });
    assert_eq!(parts[0].poll_event(), Some(Event::Evicted(view)));
    parts[0].shrink(NOW);
    assert_eq!(sent(&mut parts[0]), [], "it has no more say");
}

/// The newest leader may be one that the others went on without, and that cannot know what they
/// decided.
#[test]
fn a_member_that_missed_a_decision_asks_others_than_the_newest_leader() {
    let mut parts: Vec<_> = (0..4).map(|me| part(me, 4)).collect();
    for part in &mut parts[..2] {
        part.handle_lost(NOW, Peer(2));
        part.shrink(NOW);
    }
    // Ranks 0, 1 and 3 decide on a view without rank 2, and rank 3 does not hear the decision.
    while let Some(from) = [0, 1, 3].into_iter().find(|who| !parts[*who].transmits.is_empty()) {
        for (to, message) in sent(&mut parts[from]) {
            if to != 2 && (to != 3 || !matches!(message, Message::Decided { .. })) {
                parts[to as usize].handle_message(NOW, Peer(from as u32), message);
            }
        }
    }
    assert_eq!((parts[0].view().epoch(), parts[3].view().epoch()), (Epoch(1), Epoch(0)));
    // Then rank 2, which reaches only rank 3, leads in vain.
    parts[2].handle_lost(NOW, Peer(0));
    parts[2].handle_lost(NOW, Peer(1));
    for round in 0..3 {
        parts[2].shrink(NOW);
        carry(&mut parts, &[2, 3]);
        assert!(matches!(parts[2].poll_event(), Some(Event::NoQuorum { .. })), "round {round}");
    }
    let mut now = NOW;
    while let Some(due) = parts[3].poll_timeout() {
        now = now.max(due);
        parts[3].handle_timeout(now);
        carry(&mut parts, &[0, 1, 2, 3]);
    }
    assert_eq!(peers(parts[3].view()), [0, 1, 3]);
}

#[test]
fn one_of_two_needs_a_proof_that_tells_all() {
    let alone = |me: u32, other: u32, know: fn(&mut Agreement, Peer)| {
        let mut part = part(me, 2);
        know(&mut part, Peer(other));
        part.shrink(NOW);
        sent(&mut part);
        part.poll_event()
    };
    let goes_on = |event: Option<Event>| matches!(event, Some(Event::Changed(_)));
    assert!(goes_on(alone(0, 1, |part, peer| part.handle_lost(NOW, peer))));
    assert!(!goes_on(alone(1, 0, |part, peer| part.handle_lost(NOW, peer))));
    assert!(!goes_on(alone(1, 0, |part, peer| part.handle_dead(NOW, peer, Proof::Ended))));
    assert!(goes_on(alone(1, 0, |part, peer| part.handle_dead(NOW, peer, Proof::Complete))));
}

/// A leader that dies may have been enough together with another: what was accepted is proposed
/// again.
#[test]
fn what_was_accepted_outlives_its_leader() {
    let mut parts: Vec<_> = (0..3).map(|me| part(me, 3)).collect();
    parts[0].handle_lost(NOW, Peer(2));
    parts[0].shrink(NOW);
    let prepare = sent(&mut parts[0]).remove(0).1;
    parts[1].handle_message(NOW, Peer(0), prepare);
    let promise = sent(&mut parts[1]).remove(0).1;
    parts[0].handle_message(NOW, Peer(1), promise);
    // Rank 1 accepts; rank 0 dies before it can say that it is decided.
    let accept = sent(&mut parts[0]).remove(0).1;
    parts[1].handle_message(NOW, Peer(0), accept);
    let told = sent(&mut parts[1]);
    assert_eq!(told.iter().map(|(to, _)| *to).collect::<Vec<_>>(), [2, 0], "the leader last");
    // Rank 2 was only slow. Together with rank 1 it is enough, and has to go by what was accepted.
    parts[2].handle_message(NOW, Peer(1), told[0].1.clone());
    parts[2].handle_dead(NOW, Peer(0), Proof::Ended);
    parts[2].shrink(NOW);
    parts[1].handle_dead(NOW, Peer(0), Proof::Ended);
    parts[1].shrink(NOW);
    carry(&mut parts, &[1, 2]);
    let Some(Event::Changed(view)) = parts[1].poll_event() else { panic!("it goes on") };
    assert_eq!(peers(&view), [0, 1]);
    assert_eq!(parts[2].poll_event(), Some(Event::Evicted(view)));
}

#[test]
fn nothing_is_announced_before_all_has_been_said() {
    let mut part = part(0, 2);
    part.handle_lost(NOW, Peer(1));
    part.shrink(NOW);
    assert_eq!(part.poll_event(), None);
    assert!(sent(&mut part).len() >= 2, "the other is told, though it may not hear it");
    assert!(matches!(part.poll_event(), Some(Event::Changed(_))));
}

#[test]
fn who_waits_is_let_in_when_all_are_at_a_boundary() {
    let mut parts: Vec<_> = (0..3).map(|me| part(me, 3)).collect();
    parts.iter_mut().for_each(|part| part.handle_ready(77));
    parts[0].admit(NOW);
    carry(&mut parts, &[0, 1, 2]);
    assert!(parts.iter_mut().all(|part| part.poll_event().is_none()), "the others are not there");
    parts[1].admit(NOW);
    parts[2].admit(NOW);
    carry(&mut parts, &[0, 1, 2]);
    for part in &mut parts {
        let Some(Event::Changed(view)) = part.poll_event() else { panic!("it goes on") };
        assert_eq!(view.find(77), Some(Member { peer: Peer(3), process: 77 }));
    }
}
