//! Targets for what the protocol reads.

use std::num::{NonZeroU32, NonZeroUsize};

use farwire_proto::membership::{Agreement, Message, Settings, View};
use farwire_proto::{
    Call, CommId, Config, DType, Engine, Epoch, Event, FAULT_LEN, Fault, HEADER_LEN, Header,
    Options, Peer, Rank, ReduceOp, Tag, Time, Verdict, WorldSize,
};
use farwire_sim::script;

/// Any bytes: a header that encodes back to them, or an error.
pub(crate) fn header(bytes: &[u8]) {
    if let Ok(header) = Header::decode(bytes) {
        assert_eq!(header.encode(), bytes[..HEADER_LEN]);
        let _ = header.fingerprint.to_string();
    }
}

/// Any bytes: a fault that encodes back to them, or an error.
pub(crate) fn fault(bytes: &[u8]) {
    if let Ok(fault) = Fault::decode(bytes) {
        assert_eq!(fault.encode(), *bytes);
        let _ = fault.to_string();
    }
}

/// Any sequence of frames from any peer, at an engine with operations in flight: every operation
/// ends.
pub(crate) fn engine(bytes: &[u8]) {
    let world = WorldSize::new(3).expect("three is not zero");
    let config = Config { lead: Some(NonZeroU32::MIN), ..Config::default() };
    let mut engine = Engine::new(Peer(1), world, config);
    [Peer(0), Peer(2)].into_iter().for_each(|peer| engine.set_neighbour(peer));
    let (count, dtype, op) = (10, DType::F32, ReduceOp::Sum);
    let options = Options { segment: NonZeroUsize::new(2), ..Options::default() };
    let calls = [
        Call::AllReduce { count, dtype, op },
        Call::Broadcast { count, dtype, root: Rank(0) },
        Call::Barrier,
        Call::Recv { from: Rank(2), tag: Tag(1), count, dtype },
    ];
    for call in &calls {
        let plan = engine.plan(CommId::WORLD, call, &options).expect("these calls are right");
        engine.submit(Time::ZERO, plan).expect("nothing has failed yet");
    }
    for frame in bytes.chunks(1 + HEADER_LEN + FAULT_LEN) {
        let Some((from, rest)) = frame.split_first() else { continue };
        let from = Peer(u32::from(from % 4));
        let Ok(header) = Header::decode(rest) else { continue };
        if header.frame.is_notice() {
            let _ = engine.handle_notice(from, &header, &rest[HEADER_LEN..]);
        } else if let Verdict::Take(take) = engine.handle_frame(from, &header) {
            engine.handle_taken(take);
        }
        while engine.poll_resume().is_some() {}
        while let Some(transmit) = engine.poll_transmit() {
            engine.handle_sent(transmit);
        }
    }
    engine.handle_timeout(Time::MAX);
    let ended = std::iter::from_fn(|| engine.poll_event())
        .filter(|event| !matches!(event, Event::CommFailed { .. }));
    assert_eq!(ended.count(), calls.len());
}

/// Any order of events at machines with operations of all kinds in flight, coded ones and parcels
/// among them: every operation ends once.
pub(crate) fn machine(bytes: &[u8]) {
    let outcome = script::run(bytes);
    for end in outcome.ends.iter().flatten() {
        let end = end.as_ref().expect("every operation ends");
        assert!(outcome.trouble || end.is_ok());
    }
}

/// Any bytes: a message about members that encodes back to them, or an error; and any messages at a
/// member.
pub(crate) fn membership(bytes: &[u8]) {
    let view = View::founding(Epoch(0), 3).expect("three are few enough");
    let mut part = Agreement::new(Peer(1), view, Settings::default());
    // Messages follow each other, each preceded by its sender and its length.
    let mut rest = bytes;
    while let [from, length, after @ ..] = rest {
        let (message, next) = after.split_at(usize::from(*length).min(after.len()));
        rest = next;
        if let Ok(decoded) = Message::decode(message) {
            assert_eq!(decoded.encode(), message);
            part.handle_message(Time::ZERO, Peer(u32::from(*from)), decoded);
        }
        match from % 5 {
            0 => part.shrink(Time::ZERO),
            1 => part.handle_lost(Time::ZERO, Peer(0)),
            2 => part.admit(Time::ZERO),
            _ => {}
        }
        while part.poll_transmit().is_some() {}
        while part.poll_event().is_some() {}
    }
}
