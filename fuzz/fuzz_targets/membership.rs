//! Any bytes: a message about members that encodes back to them, or an error; and any messages at a
//! member, which must not panic.
#![no_main]

use farwire_proto::membership::{Agreement, Message, Settings, View};
use farwire_proto::{Epoch, Peer, Time};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let view = View::founding(Epoch(0), 3).expect("three are few enough");
    let mut part = Agreement::new(Peer(1), view, Settings::default());
    // Messages follow each other, each with its length and its sender before it.
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
});
