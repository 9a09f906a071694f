//! The engine on its own: hostile input, communicators, reuse.

use proptest::prelude::*;

use super::*;
use crate::call::Algorithm;
use crate::dtype::{DType, ReduceOp};
use crate::fingerprint::Fingerprint;
use crate::header::tests::any_header;
use crate::ids::Tag;

fn busy_engine() -> Engine {
    let config = Config { credit: NonZeroU32::new(2).unwrap(), ..Config::default() };
    let mut engine = Engine::new(Peer(1), WorldSize::new(4).unwrap(), config);
    engine.open(CommId(7), &[Peer(2), Peer(1)]).unwrap();
    let (dtype, op, count) = (DType::F32, ReduceOp::Sum, 10);
    let segment = std::num::NonZeroUsize::new(2);
    let options = Options { segment, ..Options::default() };
    for (comm, call) in [
        (CommId::WORLD, Call::AllReduce { count, dtype, op }),
        (CommId::WORLD, Call::Barrier),
        (CommId(7), Call::Scan { count, dtype, op }),
        (CommId(7), Call::Recv { from: Rank(0), tag: Tag(3), count, dtype }),
    ] {
        let plan = engine.plan(comm, &call, &options).unwrap();
        engine.submit(Time::ZERO, plan).unwrap();
    }
    engine
}

/// A frame that some operation of [`busy_engine`] waits for, before it is mangled.
fn awaited_header() -> impl Strategy<Value = Header> {
    let engine = busy_engine();
    let mut ids: Vec<_> = engine.ops.keys().copied().collect();
    ids.sort();
    let headers: Vec<_> = ids
        .iter()
        .map(|id| &engine.ops[id])
        .flat_map(|op| {
            op.plan.others().map(|rank| Header {
                frame: FrameKind::Data,
                payload: 8,
                comm: op.plan.comm(),
                epoch: Epoch(0),
                seq: op.seq,
                index: 0,
                fingerprint: op.plan.fingerprint_from(rank),
            })
        })
        .collect();
    prop::sample::select(headers)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2048))]

    /// Whatever headers peers, members or not, send: no panic, no frame taken twice, and nothing
    /// taken after a fault.
    #[test]
    fn hostile_headers_are_harmless(
        frames in prop::collection::vec(
            (0u32..6, prop_oneof![awaited_header(), any_header()], any::<[u32; 2]>(), any::<u8>()), 1..60),
    ) {
        let mut engine = busy_engine();
        for (from, mut header, [index, payload], change) in frames {
            let frame = header.frame;
            header.frame = FrameKind::Data;
            // Mostly the right generation and a communicator that is open.
            if change & 0x30 != 0 {
                header.epoch = Epoch(0);
            }
            if change & 0xc0 != 0 && header.comm != CommId(7) {
                header.comm = CommId::WORLD;
            }
            if change & 1 != 0 {
                header.index = index % 4;
            }
            if change & 2 != 0 {
                header.payload = payload;
            }
            if change & 4 != 0 {
                header.fingerprint.count ^= u64::from(payload);
            }
            if frame.is_notice() && frame != FrameKind::Abort {
                engine.handle_notice(Peer(from), &Header { frame, ..header }, &[]).unwrap();
            }
            let failed = engine.comms.get(&header.comm).is_some_and(|comm| comm.failed.is_some());
            let verdict = engine.handle_frame(Peer(from), &header);
            prop_assert!(!failed || matches!(verdict, Verdict::Drop), "nothing more after a fault");
            if let Verdict::Take(take) = verdict {
                prop_assert!(matches!(engine.handle_frame(Peer(from), &header), Verdict::Later | Verdict::Drop));
                engine.handle_taken(take);
            }
            while engine.poll_resume().is_some() {}
            while let Some(transmit) = engine.poll_transmit() {
                engine.handle_sent(transmit);
            }
        }
        engine.handle_timeout(Time::MAX);
        prop_assert!(engine.ops.is_empty() && engine.inbound.is_empty() && engine.deadlines.is_empty());
        let mut ended: Vec<_> = std::iter::from_fn(|| engine.poll_event())
            .filter_map(|event| match event {
                Event::Done(op) | Event::Failed { op, .. } => Some(op),
                Event::CommFailed { .. } | Event::Round(..) => None,
            })
            .collect();
        ended.sort();
        prop_assert_eq!(ended, [0, 1, 2, 3].map(OpId).to_vec(), "every operation ends exactly once");
    }

    #[test]
    fn hostile_aborts_are_harmless(
        from in 0u32..6,
        header in any_header(),
        known_comm in any::<bool>(),
        payload in prop::collection::vec(any::<u8>(), 0..100),
    ) {
        let mut engine = busy_engine();
        let comm = if known_comm { CommId(7) } else { header.comm };
        let header = Header { comm, epoch: Epoch(0), frame: FrameKind::Abort, ..header };
        prop_assert!(engine.handle_notice(Peer(from), &header, &payload).is_err() || payload.len() == FAULT_LEN);
        let fault = Fault::PeerLost(Peer(3)).encode();
        engine.handle_notice(Peer(from), &header, &fault).unwrap();
        let member = [1, 2].contains(&from);
        prop_assert_eq!(engine.comms[&CommId(7)].failed.is_some(), known_comm && member);
    }
}

#[test]
fn a_communicator_that_failed_before_it_was_opened_is_failed_when_opened() {
    let mut engine = busy_engine();
    let header = Header { comm: CommId(9), epoch: Epoch(0), ..blank_header() };
    engine.handle_notice(Peer(2), &header, &Fault::PeerLost(Peer(3)).encode()).unwrap();
    engine.open(CommId(9), &[Peer(1), Peer(2), Peer(3)]).unwrap();
    let plan = engine.plan(CommId(9), &Call::Barrier, &Options::default()).unwrap();
    assert_eq!(engine.submit(Time::ZERO, plan).unwrap_err().fault, Fault::PeerLost(Peer(3)));
}

#[test]
fn news_from_a_stranger_does_not_count_when_a_communicator_is_opened() {
    let mut engine = busy_engine();
    let lost = Fault::PeerLost(Peer(2)).encode();
    for comm in (9..).take(2 * MAX_EARLY_FAULTS) {
        let header = Header { comm: CommId(comm), ..blank_header() };
        engine.handle_notice(Peer(3), &header, &lost).unwrap();
    }
    assert_eq!(engine.early_faults[&Peer(3)].len(), MAX_EARLY_FAULTS);
    engine.open(CommId(9), &[Peer(1), Peer(2)]).unwrap();
    assert!(engine.comms[&CommId(9)].failed.is_none(), "peer 3 is not a member");
    let last = CommId(9 + 2 * MAX_EARLY_FAULTS as u64);
    engine.handle_notice(Peer(2), &Header { comm: last, ..blank_header() }, &lost).unwrap();
    engine.open(last, &[Peer(1), Peer(2)]).unwrap();
    assert!(engine.comms[&last].failed.is_some(), "a member's news is not crowded out");
}

#[test]
fn communicators_are_checked_when_opened() {
    let mut engine = busy_engine();
    assert_eq!(engine.open(CommId(7), &[Peer(1)]), Err(OpenError::Taken(CommId(7))));
    assert_eq!(engine.open(CommId(8), &[Peer(0)]), Err(OpenError::NotAMember));
    assert_eq!(engine.open(CommId(8), &[]), Err(OpenError::NotAMember));
    assert_eq!(
        engine.open(CommId(8), &[Peer(1), Peer(2), Peer(1)]),
        Err(OpenError::Twice(Peer(1)))
    );
    engine.handle_peer_lost(Peer(3));
    engine.open(CommId(8), &[Peer(1), Peer(3)]).unwrap();
    let plan = engine.plan(CommId(8), &Call::Barrier, &Options::default()).unwrap();
    assert!(engine.submit(Time::ZERO, plan).is_err());
}

#[test]
fn frames_of_another_epoch_are_dropped() {
    let mut engine = busy_engine();
    let data = Header { frame: FrameKind::Data, seq: OpSeq::Collective(9), ..blank_header() };
    assert!(matches!(engine.handle_frame(Peer(0), &data), Verdict::Early));
    let old = Header { epoch: Epoch(1), ..data };
    assert!(matches!(engine.handle_frame(Peer(2), &old), Verdict::Drop));
    let old = Header { epoch: Epoch(1), ..blank_header() };
    engine.handle_notice(Peer(2), &old, &Fault::PeerLost(Peer(3)).encode()).unwrap();
    assert!(engine.poll_event().is_none());
}

/// A frame of the next operation that this rank has not submitted.
fn early_header(engine: &Engine) -> Header {
    let seq = OpSeq::Collective(engine.comms[&CommId::WORLD].next_collective);
    Header { frame: FrameKind::Data, seq, ..blank_header() }
}

#[test]
fn early_frames_wait_for_their_call_and_go_with_their_communicator() {
    let mut engine = busy_engine();
    let header = early_header(&engine);
    assert!(matches!(engine.handle_frame(Peer(2), &header), Verdict::Early));
    let plan = engine.plan(CommId::WORLD, &Call::Barrier, &Options::default()).unwrap();
    engine.submit(Time::ZERO, plan).unwrap();
    assert_eq!(engine.poll_resume(), Some(Lane::of(Peer(2), &header)));

    let header = early_header(&engine);
    assert!(matches!(engine.handle_frame(Peer(2), &header), Verdict::Early));
    engine.handle_peer_lost(Peer(3));
    assert_eq!(
        engine.poll_resume(),
        Some(Lane::of(Peer(2), &header)),
        "so that its stream can be emptied"
    );
    assert!(matches!(engine.handle_frame(Peer(2), &header), Verdict::Drop));
    assert!(engine.early.is_empty());
}

#[test]
fn early_frames_from_strangers_are_dropped_and_a_peer_beyond_the_limit_is_lost() {
    let mut engine = busy_engine();
    let header = |seq| Header {
        frame: FrameKind::Data,
        comm: CommId(77),
        seq: OpSeq::Collective(seq),
        ..blank_header()
    };
    assert!(
        matches!(engine.handle_frame(Peer(4), &header(0)), Verdict::Drop),
        "the world has four"
    );
    for seq in 0..MAX_EARLY as u64 {
        assert!(matches!(engine.handle_frame(Peer(3), &header(seq)), Verdict::Early));
    }
    assert!(matches!(engine.handle_frame(Peer(3), &header(MAX_EARLY as u64)), Verdict::Drop));
    assert!(engine.lost.contains(&Peer(3)) && engine.early.is_empty());
}

/// A driver may apply a payload on another thread, and be offered the next frame of the lane
/// meanwhile.
#[test]
fn a_frame_offered_while_another_is_being_taken_is_resumed() {
    let mut engine = Engine::new(Peer(1), WorldSize::new(2).unwrap(), Config::default());
    let segment = std::num::NonZeroUsize::new(2);
    let call = Call::Broadcast { count: 10, dtype: DType::F32, root: Rank(0) };
    let plan =
        engine.plan(CommId::WORLD, &call, &Options { segment, ..Options::default() }).unwrap();
    let fingerprint = plan.fingerprint();
    engine.submit(Time::ZERO, plan).unwrap();
    let header =
        |index| Header { frame: FrameKind::Data, payload: 8, index, fingerprint, ..blank_header() };
    let Verdict::Take(first) = engine.handle_frame(Peer(0), &header(0)) else { panic!("its turn") };
    assert!(matches!(engine.handle_frame(Peer(0), &header(1)), Verdict::Later));
    assert_eq!(engine.poll_resume(), None);
    engine.handle_taken(first);
    assert_eq!(engine.poll_resume(), Some(Lane::of(Peer(0), &header(1))));
    assert!(matches!(engine.handle_frame(Peer(0), &header(1)), Verdict::Take(_)));
}

/// A caller that retries a receive that came to nothing gets the message that was meant for it.
#[test]
fn a_receive_that_timed_out_unheard_does_not_count() {
    for (heard, counted) in [(false, 0), (true, 1)] {
        let mut engine = busy_engine();
        let (seq, fingerprint) = receive(&mut engine, Some(Duration::from_secs(1)));
        if heard {
            let message =
                Header { frame: FrameKind::Data, payload: 1, seq, fingerprint, ..blank_header() };
            assert!(matches!(engine.handle_frame(Peer(0), &message), Verdict::Take(_)));
        }
        engine.handle_timeout(Time(Duration::from_secs(2)));
        assert!(matches!(engine.poll_event(), Some(Event::Failed { .. })));
        assert_eq!(receive(&mut engine, None).0, OpSeq::Message(Tag(5), counted));
    }
}

/// Two receives wait, the first one times out: the first message is for the second.
#[test]
fn a_message_is_for_the_oldest_receive_that_still_waits() {
    let mut engine = busy_engine();
    let (seq, fingerprint) = receive(&mut engine, Some(Duration::from_secs(1)));
    receive(&mut engine, None);
    engine.handle_timeout(Time(Duration::from_secs(2)));
    assert!(matches!(engine.poll_event(), Some(Event::Failed { op: OpId(4), .. })));
    let message = Header { frame: FrameKind::Data, payload: 1, seq, fingerprint, ..blank_header() };
    let Verdict::Take(take) = engine.handle_frame(Peer(0), &message) else {
        panic!("it is awaited")
    };
    assert_eq!(take.op, OpId(5));
}

/// Messages arrive in any order; receives get them in the order they were sent.
#[test]
fn a_message_that_overtook_another_waits_for_it() {
    let mut engine = busy_engine();
    let (_, fingerprint) = receive(&mut engine, None);
    receive(&mut engine, None);
    let message = |number| Header {
        frame: FrameKind::Data,
        payload: 1,
        seq: OpSeq::Message(Tag(5), number),
        fingerprint,
        ..blank_header()
    };
    assert!(matches!(engine.handle_frame(Peer(0), &message(1)), Verdict::Early));
    let Verdict::Take(take) = engine.handle_frame(Peer(0), &message(0)) else {
        panic!("it is awaited")
    };
    assert_eq!(take.op, OpId(4));
    assert_eq!(engine.poll_resume(), Some(Lane::of(Peer(0), &message(1))));
    let Verdict::Take(take) = engine.handle_frame(Peer(0), &message(1)) else {
        panic!("it is awaited")
    };
    assert_eq!(take.op, OpId(5));
}

/// Messages that their sender gave up, before and after a frame of them was seen, leave no gap.
#[test]
fn messages_that_were_given_up_are_skipped() {
    let mut engine = busy_engine();
    let fingerprint = receive(&mut engine, None).1;
    let frame = |frame, number| Header {
        frame,
        payload: u32::from(frame == FrameKind::Data),
        seq: OpSeq::Message(Tag(5), number),
        fingerprint,
        ..blank_header()
    };
    assert!(matches!(engine.handle_frame(Peer(0), &frame(FrameKind::Data, 1)), Verdict::Early));
    for number in [1, 2, 0] {
        engine.handle_notice(Peer(0), &frame(FrameKind::Void, number), &[]).unwrap();
    }
    while let Some(lane) = engine.poll_resume() {
        let OpSeq::Message(_, number) = lane.seq else { panic!("only messages wait") };
        assert!(matches!(
            engine.handle_frame(Peer(0), &frame(FrameKind::Data, number)),
            Verdict::Drop
        ));
    }
    let next = frame(FrameKind::Data, 3);
    assert!(matches!(engine.handle_frame(Peer(0), &next), Verdict::Take(_)));
    engine.handle_notice(Peer(0), &frame(FrameKind::Void, 3), &[]).unwrap();
    assert!(
        matches!(engine.poll_event(), Some(Event::Failed { op: OpId(4), .. })),
        "it was half here"
    );
    receive(&mut engine, None);
    assert!(matches!(engine.handle_frame(Peer(0), &frame(FrameKind::Data, 4)), Verdict::Take(_)));
}

/// A sender that nobody listens to stops at its allowance and asks, and other channels go on.
#[test]
fn a_channel_that_nobody_reads_stops_at_its_allowance() {
    let config =
        Config { allowance: Allowance(6 * Allowance::cost(1, false)), ..Config::default() };
    let mut engine = Engine::new(Peer(1), WorldSize::new(2).unwrap(), config);
    let send = |engine: &mut Engine, tag| {
        let call = Call::Send { to: Rank(0), tag: Tag(tag), count: 1, dtype: DType::U8 };
        let plan = engine.plan(CommId::WORLD, &call, &Options::default()).unwrap();
        engine.submit(Time::ZERO, plan).unwrap();
    };
    let sent = |engine: &mut Engine| -> Vec<_> {
        std::iter::from_fn(|| {
            let transmit = engine.poll_transmit()?;
            let seen = (transmit.header.frame, transmit.header.seq);
            engine.handle_sent(transmit);
            Some(seen)
        })
        .collect()
    };
    use FrameKind::{Ask, Called, Data};
    let message = |tag, number| OpSeq::Message(Tag(tag), number);
    (0..5).for_each(|_| send(&mut engine, 1));
    assert_eq!(
        sent(&mut engine),
        [(Data, message(1, 0)), (Data, message(1, 1)), (Ask, message(1, 2))]
    );
    send(&mut engine, 2);
    assert_eq!(sent(&mut engine), [(Data, message(2, 0))], "other tags are not held up");
    let barrier = engine.plan(CommId::WORLD, &Call::Barrier, &Options::default()).unwrap();
    engine.submit(Time::ZERO, barrier).unwrap();
    assert_eq!(sent(&mut engine), [(Data, OpSeq::Collective(0))], "nor are collectives");

    let called = |number| Header {
        frame: Called,
        payload: 0,
        seq: message(1, number),
        fingerprint: notice_fingerprint(Kind::Message),
        ..blank_header()
    };
    engine.handle_notice(Peer(0), &called(0), &[]).unwrap();
    assert_eq!(sent(&mut engine), [(Data, message(1, 2)), (Ask, message(1, 3))]);
    engine.handle_notice(Peer(0), &called(4), &[]).unwrap();
    assert_eq!(sent(&mut engine), [(Data, message(1, 3)), (Data, message(1, 4))]);
    let two = Allowance::cost(1, false) + Allowance::cost(0, false);
    assert_eq!(engine.ahead[0].spent(), two, "the message with tag 2 and the barrier");
}

/// A rank that is asked answers once it has called what it was asked about.
#[test]
fn an_ask_is_answered_when_the_call_is_made() {
    let mut engine = busy_engine(); // two collectives on the world
    let ask = |number| Header {
        frame: FrameKind::Ask,
        payload: 0,
        seq: OpSeq::Collective(number),
        ..blank_header()
    };
    let answers = |engine: &mut Engine| -> Vec<_> {
        std::iter::from_fn(|| engine.poll_transmit())
            .filter(|transmit| transmit.header.frame == FrameKind::Called)
            .map(|transmit| (transmit.to, transmit.header.seq))
            .collect()
    };
    engine.handle_notice(Peer(3), &ask(1), &[]).unwrap();
    assert_eq!(answers(&mut engine), [(Peer(3), OpSeq::Collective(1))]);
    engine.handle_notice(Peer(3), &ask(2), &[]).unwrap();
    assert_eq!(answers(&mut engine), []);
    let barrier = engine.plan(CommId::WORLD, &Call::Barrier, &Options::default()).unwrap();
    engine.submit(Time::ZERO, barrier).unwrap();
    assert_eq!(answers(&mut engine), [(Peer(3), OpSeq::Collective(2))]);
}

/// Receives a message of one byte from rank 0 with tag 5: its number and fingerprint.
fn receive(engine: &mut Engine, deadline: Option<Duration>) -> (OpSeq, Fingerprint) {
    let call = Call::Recv { from: Rank(0), tag: Tag(5), count: 1, dtype: DType::U8 };
    let plan =
        engine.plan(CommId::WORLD, &call, &Options { deadline, ..Options::default() }).unwrap();
    let numbered = (engine.next_seq(&plan).unwrap(), plan.fingerprint());
    engine.submit(Time::ZERO, plan).unwrap();
    numbered
}

/// How much a driver that is slow to send has to keep track of is bounded.
#[test]
fn a_lane_hands_out_no_more_frames_than_its_credit() {
    let mut engine = busy_engine(); // credit 2
    let handed: Vec<_> = std::iter::from_fn(|| engine.poll_transmit()).collect();
    let on_lane = |one: &Transmit| {
        let lane = |frame: &Transmit| (frame.to, frame.header.comm, frame.header.seq);
        handed.iter().filter(|other| lane(other) == lane(one)).count()
    };
    assert_eq!(handed.iter().map(on_lane).max(), Some(2));
    let first = handed[0].clone();
    let to = first.to;
    engine.handle_sent(first);
    assert_eq!(engine.poll_transmit().map(|next| next.to), Some(to), "one sent, one more");
    assert!(engine.poll_transmit().is_none());
}

/// Lanes to neighbours are kept abreast, whichever of them the links take first; the lane to a rank
/// that is no neighbour goes at its own pace.
#[test]
fn a_lane_gets_no_further_ahead_of_others_than_its_lead() {
    let world = WorldSize::new(5).unwrap();
    let [credit, lead] = [2, 3].map(|frames| NonZeroU32::new(frames).unwrap());
    let config = Config { credit, lead: Some(lead), ..Config::default() };
    let mut engine = Engine::new(Peer(0), world, config);
    (1..4).for_each(|peer| engine.set_neighbour(Peer(peer)));
    let call = Call::AllReduce { count: 500, dtype: DType::F32, op: ReduceOp::Sum };
    let options = Options {
        segment: std::num::NonZeroUsize::new(1),
        algorithm: Some(Algorithm::TwoPhase),
        ..Options::default()
    };
    let plan = engine.plan(CommId::WORLD, &call, &options).unwrap();
    engine.submit(Time::ZERO, plan).unwrap();

    // All links take as much as they get, except the one to rank 2, which takes nothing for a
    // while.
    let mut handed = [0; 5];
    let mut waiting = Vec::new();
    let mut take =
        |engine: &mut Engine, handed: &mut [u32; 5], sent: &dyn Fn(&Transmit) -> bool| {
            let mut held = std::mem::take(&mut waiting);
            loop {
                held.extend(std::iter::from_fn(|| engine.poll_transmit()).inspect(|frame| {
                    handed[frame.to.index()] += u32::from(frame.header.frame == FrameKind::Data);
                }));
                let Some(at) = held.iter().position(sent) else { break };
                engine.handle_sent(held.remove(at));
            }
            waiting = held;
        };
    take(&mut engine, &mut handed, &|frame| frame.to != Peer(2));
    assert_eq!(handed, [0, 3, 2, 3, 100], "rank 2 has its credit, its neighbours their lead");
    let next = std::cell::Cell::new(true);
    take(&mut engine, &mut handed, &|frame| frame.to != Peer(2) || next.replace(false));
    assert_eq!(handed, [0, 4, 3, 4, 100], "one more to rank 2, one more to each");
    take(&mut engine, &mut handed, &|_| true);
    assert_eq!(handed, [0, 100, 100, 100, 100], "and all of the first phase");
}

/// Steady state: an operation reuses what the one before it allocated.
#[test]
fn finished_operations_leave_their_allocations_to_the_next() {
    let mut engine = Engine::new(Peer(0), WorldSize::new(2).unwrap(), Config::default());
    for _ in 0..100 {
        let plan = engine.plan(CommId::WORLD, &Call::Barrier, &Options::default()).unwrap();
        let print = plan.fingerprint();
        engine.submit(Time::ZERO, plan).unwrap();
        let transmit = engine.poll_transmit().unwrap();
        let header = Header { seq: transmit.header.seq, fingerprint: print, ..transmit.header };
        engine.handle_sent(transmit);
        let Verdict::Take(take) = engine.handle_frame(Peer(1), &header) else { panic!("its turn") };
        engine.handle_taken(take);
        assert!(matches!(engine.poll_event(), Some(Event::Done(_))));
    }
    assert_eq!(engine.spare.len(), 1);
}

/// A world of engines whose network is a queue per lane, in which rank r's parcel to rank t in
/// round k is `parcel(k, r, t)`, supplied once round k − 1 has come. Returns what each rank
/// collected, by sender and round.
fn exchange(
    ranks: u32,
    rounds: u32,
    segment: usize,
    parcel: impl Fn(u32, u32, u32) -> Vec<u8>,
) -> Vec<HashMap<(u32, u32), Vec<u8>>> {
    let world = WorldSize::new(ranks).unwrap();
    let call = Box::new(Call::AllReduce { count: 1, dtype: DType::F32, op: ReduceOp::Mean });
    let call = Call::Coded { call, codec: NonZeroU32::new(5).unwrap(), rounds, max: 1000 };
    let options = Options { segment: std::num::NonZeroUsize::new(segment), ..Options::default() };
    let mut engines: Vec<_> =
        world.ranks().map(|r| Engine::new(Peer(r.0), world, Config::default())).collect();
    let mut parcels: Vec<_> = world.ranks().map(|_| crate::parcels::Parcels::default()).collect();
    let mut came = vec![HashMap::default(); ranks as usize];
    let mut done = 0;
    let mut streams: HashMap<_, VecDeque<(Header, Vec<u8>)>> = HashMap::default();
    let supply = |engine: &mut Engine, store: &mut crate::parcels::Parcels, op, round| {
        let me = engine.me().0;
        for to in world.others(Rank(me)) {
            let bytes = parcel(round, me, to.0);
            store.put(to, round, bytes.clone().into());
            assert!(engine.supply(op, to, bytes.len()));
        }
    };
    for (engine, store) in engines.iter_mut().zip(&mut parcels) {
        let plan = engine.plan(CommId::WORLD, &call, &options).unwrap();
        let op = engine.submit(Time::ZERO, plan).unwrap();
        supply(engine, store, op, 0);
        assert!(!engine.supply(op, Rank(engine.me().0 ^ 1), 2000), "longer than agreed");
    }
    while done < ranks {
        for (engine, store) in engines.iter_mut().zip(&mut parcels) {
            let me = engine.me();
            while let Some(frame) = engine.poll_transmit() {
                let Payload::Parcel { part, .. } = &frame.payload else { panic!() };
                let bytes = store.payload(part).to_vec();
                assert_eq!(frame.header.payload as usize, bytes.len());
                assert_eq!(frame.last, part.last && part.round + 1 == rounds);
                store.sent(part);
                streams
                    .entry((frame.to, Lane::of(me, &frame.header)))
                    .or_default()
                    .push_back((frame.header, bytes));
                engine.handle_sent(frame);
            }
        }
        for ((to, lane), stream) in &mut streams {
            let (engine, store) = (&mut engines[to.index()], &mut parcels[to.index()]);
            while let Some((header, bytes)) = stream.pop_front() {
                let Verdict::Take(take) = engine.handle_frame(lane.from, &header) else {
                    panic!("nothing waits")
                };
                let Effect::Collect(part) = take.effect else { panic!() };
                store.collect(&part, &bytes);
                engine.handle_taken(take);
            }
        }
        for (me, (engine, store)) in engines.iter_mut().zip(&mut parcels).enumerate() {
            while let Some(event) = engine.poll_event() {
                match event {
                    Event::Round(op, round) => {
                        for from in world.others(Rank(me as u32)) {
                            came[me].insert((from.0, round), store.take(from, round));
                        }
                        if round + 1 < rounds {
                            supply(engine, store, op, round + 1);
                        }
                    }
                    Event::Done(_) => done += 1,
                    other => panic!("{other:?}"),
                }
            }
        }
    }
    came
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    #[test]
    fn parcels_of_any_length_arrive_whole_and_in_their_round(
        ranks in 2u32..6, rounds in 1u32..5, segment in 1usize..40, seed in any::<u32>(),
    ) {
        let parcel = |round: u32, from: u32, to: u32| {
            let mixed = (seed ^ (round << 8) ^ (from << 4) ^ to).wrapping_mul(0x9e37_79b9);
            // Often a whole number of segments, and often nothing.
            let len = if mixed & 3 == 0 { (mixed >> 8) as usize % 4 * segment } else { (mixed >> 8) as usize % 200 };
            (0..len).map(|i| (mixed as usize ^ i) as u8).collect::<Vec<_>>()
        };
        for (me, came) in exchange(ranks, rounds, segment, parcel).iter().enumerate() {
            for from in (0..ranks).filter(|from| *from != me as u32) {
                for round in 0..rounds {
                    prop_assert_eq!(&came[&(from, round)], &parcel(round, from, me as u32));
                }
            }
        }
    }
}

#[test]
fn a_parcel_longer_than_agreed_is_a_breach() {
    let mut engine = busy_engine();
    let call = Call::RecvParcel { from: Rank(0), tag: Tag(5), max: 10 };
    let segment = std::num::NonZeroUsize::new(4);
    let plan =
        engine.plan(CommId::WORLD, &call, &Options { segment, ..Options::default() }).unwrap();
    let (seq, fingerprint) = (OpSeq::Message(Tag(5), 0), plan.fingerprint());
    engine.submit(Time::ZERO, plan).unwrap();
    let header = |index, payload| Header {
        frame: FrameKind::Data,
        payload,
        index,
        seq,
        fingerprint,
        ..blank_header()
    };
    for index in 0..2 {
        let Verdict::Take(take) = engine.handle_frame(Peer(0), &header(index, 4)) else {
            panic!("its turn")
        };
        engine.handle_taken(take);
    }
    assert!(matches!(engine.handle_frame(Peer(0), &header(2, 3)), Verdict::Drop));
    let failed = std::iter::from_fn(|| engine.poll_event());
    let faults: Vec<_> = failed
        .filter_map(|event| match event {
            Event::CommFailed { fault, .. } => Some(fault),
            _ => None,
        })
        .collect();
    assert_eq!(faults, [Fault::BadFrame(Peer(0))]);
}

#[test]
fn calls_that_no_codec_can_serve_are_refused() {
    let engine = busy_engine();
    let (count, dtype) = (4, DType::F32);
    let coded = |call: Call| Call::Coded {
        call: Box::new(call),
        codec: NonZeroU32::MIN,
        rounds: 2,
        max: 9,
    };
    for (call, served) in [
        (Call::AllReduce { count, dtype, op: ReduceOp::Sum }, true),
        (Call::ReduceScatter { count, dtype: DType::Bf16, op: ReduceOp::Mean }, true),
        (Call::AllGather { counts: crate::Counts::Each(3), dtype }, true),
        (Call::AllReduce { count, dtype, op: ReduceOp::Max }, false),
        (Call::AllReduce { count, dtype: DType::I32, op: ReduceOp::Sum }, false),
        (Call::Broadcast { count, dtype, root: Rank(0) }, false),
        (Call::Send { to: Rank(0), tag: Tag(0), count, dtype }, false),
        (coded(Call::AllReduce { count, dtype, op: ReduceOp::Sum }), false),
        (Call::Barrier, false),
    ] {
        let refused = matches!(
            engine.plan(CommId::WORLD, &coded(call.clone()), &Options::default()),
            Err(CallError::NotCodable { .. })
        );
        assert_eq!(refused, !served, "{call:?}");
    }
}

/// A closed communicator is gone once nothing is in flight on it, and late frames for it clog
/// nothing.
#[test]
fn a_closed_communicator_is_forgotten() {
    let mut engine = busy_engine();
    let early = Header {
        frame: FrameKind::Data,
        comm: CommId(7),
        seq: OpSeq::Collective(4),
        ..blank_header()
    };
    assert!(matches!(engine.handle_frame(Peer(2), &early), Verdict::Early));
    engine.close(CommId(7));
    assert!(engine.comms.contains_key(&CommId(7)), "a scan and a receive are in flight");
    let news = Header { comm: CommId(7), ..blank_header() };
    engine.handle_notice(Peer(2), &news, &Fault::PeerLost(Peer(3)).encode()).unwrap();
    assert!(!engine.comms.contains_key(&CommId(7)));
    assert_eq!(engine.poll_resume(), Some(Lane::of(Peer(2), &early)));
    assert!(matches!(engine.handle_frame(Peer(2), &early), Verdict::Drop));
    assert_eq!(engine.open(CommId(7), &[Peer(1)]), Err(OpenError::Taken(CommId(7))));
}

fn blank_header() -> Header {
    Header {
        frame: FrameKind::Abort,
        payload: FAULT_LEN as u32,
        comm: CommId::WORLD,
        epoch: Epoch(0),
        seq: OpSeq::Collective(0),
        index: 0,
        fingerprint: notice_fingerprint(Kind::Barrier),
    }
}
