//! Any sequence of frames from any peer, at an engine with operations in flight: no panic, and
//! every operation ends.
#![no_main]

use std::num::NonZeroUsize;

use farwire_proto::{
    Call, CommId, Config, DType, Engine, Event, FAULT_LEN, HEADER_LEN, Header, Options, Peer, Rank, ReduceOp,
    Tag, Time, Verdict, WorldSize,
};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let world = WorldSize::new(3).expect("three is not zero");
    let mut engine = Engine::new(Peer(1), world, Config::default());
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
    let ended = std::iter::from_fn(|| engine.poll_event()).filter(|event| !matches!(event, Event::CommFailed { .. }));
    assert_eq!(ended.count(), calls.len());
});
