//! Tier 1: properties of schedules as pure data, with no engine and no network.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on should say where")]

mod common;

use common::{Case, every_collective, every_in_place, world};
use farwire_proto::{
    Action, Algorithm, DType, Frames, Gate, InPlace, Kind, Plan, Rank, ReduceOp, Running, Source,
};
use proptest::prelude::*;

fn frames(plan: &Plan) -> &Frames {
    plan.frames().expect("these calls do not travel in parcels")
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1024))]

    #[test]
    fn every_send_meets_exactly_one_receive_of_equal_length(
        which in prop::sample::select(every_collective()),
        n in 1u32..=17,
        len in 0usize..=5000,
        segment in 1usize..=5000,
        dtype in prop::sample::select(DType::ALL.to_vec()),
        seed in any::<u64>(),
    ) {
        let plans = Case::new(which, n, len, segment, dtype, ReduceOp::Sum, seed).plans();
        for (from, to) in pairs(n) {
            let (sender, receiver) = (&plans[from.index()], &plans[to.index()]);
            prop_assert_eq!(frames(sender).sends(to), frames(receiver).recvs(from));
            prop_assert!(frames(sender).sends(to) >= 1, "every lane carries at least one frame");
            for i in 0..frames(sender).sends(to) {
                let (sent, received) = (frames(sender).send(to, i).source, frames(receiver).recv(from, i).action);
                prop_assert_eq!(sent.wire_bytes(dtype), received.wire_bytes(dtype));
                prop_assert!(stays_inside(sender, &sent));
            }
        }
    }

    /// Each rank's input reaches the result exactly once. A walk over the frames tracks which
    /// ranks' inputs each element holds, and refuses to add one twice, to lose one, or to read what
    /// is not there yet.
    #[test]
    fn every_element_is_reduced_exactly_once_per_rank(
        which in prop::sample::select(every_collective()),
        n in 1u32..=17,
        len in 0usize..=200,
        segment in 1usize..=100,
        lottery in any::<u64>(),
    ) {
        prop_assume!(which.0.reduces());
        let case = Case::new(which, n, len, segment, DType::U64, ReduceOp::Sum, lottery);
        let results = symbolic::run(&case, lottery);
        for (rank, result) in results.into_iter().enumerate() {
            let Some(result) = result else { continue };
            prop_assert_eq!(result, case.contributors(rank), "rank {}", rank);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1024))]

    /// The same walk with input and output in one memory. It refuses to read an input that was
    /// overwritten.
    #[test]
    fn no_input_is_overwritten_before_it_was_read(
        which in prop::sample::select(every_in_place()),
        n in 1u32..=17,
        len in 0usize..=200,
        segment in 1usize..=100,
        lottery in any::<u64>(),
    ) {
        let case = Case::new(which, n, len, segment, DType::U64, ReduceOp::Sum, lottery).in_place();
        let results = symbolic::run(&case, lottery);
        if which.0.reduces() {
            for (rank, result) in results.into_iter().enumerate() {
                let Some(result) = result else { continue };
                prop_assert_eq!(result, case.contributors(rank), "rank {}", rank);
            }
        }
    }
}

/// The walk does find such a read: in an all-reduce by gather-reduce, if it were made in place.
#[test]
#[should_panic(expected = "read after it was overwritten")]
fn gather_reduce_in_place_would_read_what_it_has_overwritten() {
    let which = (Kind::AllReduce, Algorithm::GatherReduce);
    for lottery in 0..100 {
        let case = Case::new(which, 4, 20, 2, DType::U64, ReduceOp::Sum, lottery);
        symbolic::run_in(&case, lottery, Some(InPlace::default()));
    }
}

fn pairs(n: u32) -> impl Iterator<Item = (Rank, Rank)> {
    world(n).ranks().flat_map(move |from| world(n).others(from).map(move |to| (from, to)))
}

fn stays_inside(plan: &Plan, source: &Source) -> bool {
    let size = plan.dtype().size();
    match source {
        Source::Nothing | Source::Partial { .. } => true,
        Source::Input(span) | Source::InputAsPartial(span) => {
            span.end() * size <= plan.input_bytes()
        }
        Source::Output(span) => span.end() * size <= plan.output_bytes(),
    }
}

#[test]
fn fold_turns_follow_rank_order() {
    for n in 2..=17 {
        for which in [
            (Kind::AllReduce, Algorithm::TwoPhase),
            (Kind::AllReduce, Algorithm::GatherReduce),
            (Kind::Reduce, Algorithm::TwoPhase),
            (Kind::Reduce, Algorithm::GatherReduce),
            (Kind::ReduceScatter, Algorithm::Direct),
        ] {
            for plan in Case::new(which, n, 100, 3, DType::F32, ReduceOp::Sum, 0).plans() {
                let frames = frames(&plan);
                let mut turns: Vec<_> = plan
                    .others()
                    .flat_map(|from| (0..frames.recvs(from)).map(move |i| (from, i)))
                    .filter(|(from, i)| matches!(frames.recv(*from, *i).action, Action::Fold(_)))
                    .map(|(from, i)| (frames.recv(from, i).gate.folded, i, from))
                    .collect();
                turns.sort();
                // One fold at a time, segment by segment, each from the lowest rank to the highest.
                assert!(turns.iter().map(|(turn, ..)| *turn).eq(0..turns.len()));
                assert!(turns.is_sorted_by_key(|(_, i, from)| (*i, *from)), "{turns:?}");
            }
        }
    }
}

/// Runs schedules on sets of contributors rather than numbers.
mod symbolic {
    use std::collections::{HashMap, VecDeque};

    use farwire_proto::{Emit, Level, Mine, Outcome, Own, Span};
    use rand::SeedableRng;
    use rand::seq::IndexedRandom;
    use rand_chacha::ChaCha8Rng;

    use super::*;

    /// Which ranks' inputs an element holds, as a bit set.
    type Held = u32;

    struct Place<'a> {
        plan: &'a Plan,
        own: Held,
        /// The input, if it is not in one memory with the output.
        input: Vec<Held>,
        /// The output, or both if they share one memory; `in_place` says where each starts in it.
        output: Vec<Held>,
        in_place: Option<InPlace>,
        /// A fold's running value, where the output cannot hold it.
        running: Vec<Held>,
        slots: HashMap<usize, Vec<Held>>,
        progress: Gate,
        sent: Vec<usize>,
        taken: Vec<usize>,
    }

    /// The results of ranks that have one, after moving frames in a random order that the gates
    /// allow.
    pub(super) fn run(case: &Case, lottery: u64) -> Vec<Option<Vec<Held>>> {
        run_in(case, lottery, None)
    }

    /// [`run`], in place as `forced` says, or as the plans say.
    pub(super) fn run_in(
        case: &Case,
        lottery: u64,
        forced: Option<InPlace>,
    ) -> Vec<Option<Vec<Held>>> {
        let plans = &case.plans()[..];
        let n = plans.len() as u32;
        let mut rng = ChaCha8Rng::seed_from_u64(lottery);
        let mut places: Vec<_> = plans
            .iter()
            .map(|plan| Place {
                plan,
                own: 1 << plan.me().0,
                input: vec![1 << plan.me().0; plan.input_bytes() / plan.dtype().size()],
                output: initial_output(case, plan, forced.or(plan.in_place())),
                in_place: forced.or(plan.in_place()),
                running: Vec::new(),
                slots: HashMap::new(),
                progress: Gate::OPEN,
                sent: vec![0; plans.len()],
                taken: vec![0; plans.len()],
            })
            .collect();
        let mut streams: HashMap<(Rank, Rank), VecDeque<Vec<Held>>> = HashMap::new();
        loop {
            let lanes: Vec<_> = pairs(n)
                .flat_map(|pair| [(pair, true), (pair, false)])
                .filter(|((from, to), sending)| {
                    if *sending {
                        places[from.index()].can_send(*to)
                    } else {
                        streams.get(&(*from, *to)).is_some_and(|s| !s.is_empty())
                            && places[to.index()].can_take(*from)
                    }
                })
                .collect();
            let Some(&((from, to), sending)) = lanes.choose(&mut rng) else { break };
            let stream = streams.entry((from, to)).or_default();
            if sending {
                stream.push_back(places[from.index()].send(to));
            } else {
                places[to.index()].take(from, stream.pop_front().unwrap());
            }
        }
        for place in &places {
            for peer in place.plan.others() {
                assert_eq!(place.sent[peer.index()], frames(place.plan).sends(peer), "stuck");
                assert_eq!(place.taken[peer.index()], frames(place.plan).recvs(peer), "stuck");
            }
        }
        let result = |place: Place<'_>| {
            let len = place.plan.output_bytes() / place.plan.dtype().size();
            let start = place.in_place.unwrap_or_default().output;
            (place.plan.outcome() == Outcome::Output)
                .then(|| place.output[start..start + len].to_vec())
        };
        places.into_iter().map(result).collect()
    }

    /// Rank 0 of a scan, and a world of one, have their result without any frame.
    fn initial_output(case: &Case, plan: &Plan, in_place: Option<InPlace>) -> Vec<Held> {
        let len = plan.output_bytes() / plan.dtype().size();
        if let Some(InPlace { input, output }) = in_place {
            let given = plan.input_bytes() / plan.dtype().size();
            let mut memory = vec![Held::MAX; (output + len).max(input + given)];
            memory[input..input + given].fill(1 << plan.me().0);
            return memory;
        }
        let result = case.contributors(plan.me().index());
        if result.len() == len && result.iter().all(|held| held & !(1 << plan.me().0) == 0) {
            return result;
        }
        vec![Held::MAX; len] // nothing may read this before it is written
    }

    impl Place<'_> {
        /// This rank's own elements, if they are still there.
        fn own(&self, span: Span) -> Vec<Held> {
            let own = match self.in_place {
                None => &self.input[span.start..span.end()],
                Some(at) => &self.output[at.input + span.start..at.input + span.end()],
            };
            assert!(
                own.iter().all(|held| *held == self.own),
                "input is read after it was overwritten"
            );
            own.to_vec()
        }

        fn output(&mut self, span: Span) -> &mut [Held] {
            let start = self.in_place.unwrap_or_default().output;
            &mut self.output[start + span.start..start + span.end()]
        }

        fn open(&self, gate: &Gate) -> bool {
            let at = &self.progress;
            gate.folded <= at.folded
                && gate.host_folded <= at.host_folded
                && gate.received <= at.received
                && gate.sent <= at.sent
        }

        fn can_send(&self, to: Rank) -> bool {
            let i = self.sent[to.index()];
            i < frames(self.plan).sends(to) && self.open(&frames(self.plan).send(to, i).gate)
        }

        fn send(&mut self, to: Rank) -> Vec<Held> {
            let source = frames(self.plan).send(to, self.sent[to.index()]).source;
            self.sent[to.index()] += 1;
            // Slots are freed by sending to the rank that partial results go to.
            self.progress.sent += usize::from(frames(self.plan).downstream() == Some(to));
            match source {
                Source::Nothing => Vec::new(),
                Source::Input(span) | Source::InputAsPartial(span) => self.own(span),
                Source::Output(span) => self.output(span).to_vec(),
                Source::Partial { slot, len } => {
                    let partial =
                        self.slots.remove(&slot).expect("a slot is sent once, after it is filled");
                    assert_eq!(partial.len(), len);
                    partial
                }
            }
        }

        fn can_take(&self, from: Rank) -> bool {
            self.open(&frames(self.plan).recv(from, self.taken[from.index()]).gate)
        }

        fn take(&mut self, from: Rank, payload: Vec<Held>) {
            let action = frames(self.plan).recv(from, self.taken[from.index()]).action;
            self.taken[from.index()] += 1;
            self.progress.received += usize::from(frames(self.plan).is_upstream(from));
            match action {
                Action::Nothing => {}
                Action::Store(span) => self.output(span).copy_from_slice(&payload),
                Action::Fold(fold) => {
                    match fold.level {
                        Level::Host => self.progress.host_folded += 1,
                        Level::All => self.progress.folded += 1,
                    }
                    let add = |running: &mut Vec<Held>, more: &[Held]| {
                        for (held, more) in running.iter_mut().zip(more) {
                            assert_eq!(*held & more, 0, "a rank's input is added twice");
                            *held |= more;
                        }
                    };
                    let own = match fold.own {
                        Own::Before(Mine::Input(span)) | Own::After(Mine::Input(span)) => {
                            self.own(span)
                        }
                        Own::Before(Mine::Output(span)) | Own::After(Mine::Output(span)) => {
                            self.output(span).to_vec()
                        }
                        Own::No => Vec::new(),
                    };
                    let mut running = match (fold.first, fold.running) {
                        (true, Running::Slot(slot)) => {
                            assert!(
                                !self.slots.contains_key(&slot),
                                "a slot is refilled before it was sent"
                            );
                            vec![0; fold.len]
                        }
                        (true, Running::Output(_)) => vec![0; fold.len],
                        (false, Running::Output(_)) if self.in_place.is_some() => {
                            std::mem::take(&mut self.running)
                        }
                        (false, Running::Output(span)) => self.output(span).to_vec(),
                        (false, Running::Slot(slot)) => {
                            self.slots.remove(&slot).expect("a fold goes on")
                        }
                    };
                    if matches!(fold.own, Own::Before(_)) {
                        add(&mut running, &own);
                    }
                    add(&mut running, &payload);
                    if let Emit::BeforeOwn(span) = fold.emit {
                        self.output(span).copy_from_slice(&running);
                    }
                    if matches!(fold.own, Own::After(_)) {
                        add(&mut running, &own);
                    }
                    if let Emit::Last(span) = fold.emit {
                        self.output(span).copy_from_slice(&running);
                    }
                    match fold.running {
                        Running::Output(_) if self.in_place.is_some() => self.running = running,
                        Running::Output(span) => self.output(span).copy_from_slice(&running),
                        // A result that is sent to no rank from a slot: at the end of a scan, or of
                        // what comes from other hosts.
                        Running::Slot(_)
                            if frames(self.plan).downstream().is_none()
                                && fold.emit != Emit::No => {}
                        Running::Slot(slot) => {
                            self.slots.insert(slot, running);
                        }
                    }
                }
            }
        }
    }
}
