//! Tier 3: whoever listens on the wire learns neither the token nor what is sent.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on should say where")]

mod common;

use std::sync::{Arc, Mutex};

use common::relay::{Relay, TcpRelay, Way};
use common::{assert_succeeds, free_port, start_processes_at};
use farwire::{Communicator, ReduceOp, Token};

/// So short that every packet of payload has it.
const PATTERN: &[u8] = b"FARWIRE IN CLEAR";
const REPEATS: usize = 1 << 16;

/// What a token could look like.
fn forms(token: &Token) -> Vec<(&'static str, Vec<u8>)> {
    let text = token.reveal();
    let digits = &text["fw-".len()..];
    let raw: Vec<u8> = (0..digits.len())
        .step_by(2)
        .map(|at| u8::from_str_radix(&digits[at..at + 2], 16).unwrap())
        .collect();
    vec![
        ("hexadecimal, in part", digits.as_bytes()[..16].to_vec()),
        ("hexadecimal, its end", digits.as_bytes()[48..].to_vec()),
        ("upper case", digits.to_uppercase().into_bytes()[..16].to_vec()),
        ("bytes", raw[..8].to_vec()),
        ("bytes, their end", raw[24..].to_vec()),
        ("bytes, backwards", raw.iter().rev().take(8).copied().collect()),
        ("base64", base64(&raw, b"+/")[..16].to_vec()),
        ("base64 for addresses", base64(&raw, b"-_")[..16].to_vec()),
        ("base64 of the text", base64(text.as_bytes(), b"+/")[..16].to_vec()),
    ]
}

fn base64(bytes: &[u8], last: &[u8; 2]) -> Vec<u8> {
    let alphabet: Vec<u8> =
        (b'A'..=b'Z').chain(b'a'..=b'z').chain(b'0'..=b'9').chain(last.iter().copied()).collect();
    let digits = |three: &[u8]| {
        let number = three.iter().fold(0, |number, byte| number << 8 | usize::from(*byte));
        [18, 12, 6, 0].map(|shift| alphabet[number >> shift & 63])
    };
    bytes.chunks_exact(3).flat_map(digits).collect()
}

fn holds(datagrams: &[Vec<u8>], wanted: &[u8]) -> bool {
    datagrams.iter().any(|datagram| datagram.windows(wanted.len()).any(|window| window == wanted))
}

/// What both ranks do: everything goes both ways.
fn exchange(comm: &Communicator) {
    let payload = PATTERN.repeat(REPEATS);
    let other = 1 - comm.rank();
    let sent = comm.send(payload.clone(), other, 0);
    assert!(comm.recv::<u8>(payload.len(), other, 0).wait().unwrap() == payload);
    sent.wait().unwrap();
    assert!(comm.all_reduce(payload.clone(), ReduceOp::Max).wait().unwrap() == payload);
}

/// Starts two ranks, the second of which finds the first by way of `relay`. `None` in the ranks
/// themselves.
fn run(test: &str, port: u16, relay: u16, token: &Token, link: &str) -> Option<()> {
    let ranks = start_processes_at(test, &[port, relay], token, link, &[], |comm| {
        exchange(&comm);
        comm.shutdown().unwrap();
    });
    if ranks.is_empty() {
        return None;
    }
    for (index, rank) in ranks.into_iter().enumerate() {
        assert_succeeds(rank, &format!("rank {index}"));
    }
    Some(())
}

/// Checks that nothing that went one way can be understood.
fn assert_secret(texts: &[Vec<u8>], token: &Token) {
    let bytes: usize = texts.iter().map(Vec::len).sum();
    println!("{} datagrams or connections, {bytes} bytes", texts.len());
    assert!(bytes > PATTERN.len() * REPEATS, "everything went this way");
    assert!(!holds(texts, PATTERN), "payload in clear");
    for (form, wanted) in forms(token) {
        assert!(!holds(texts, &wanted), "token in clear: {form}");
    }
}

#[test]
fn neither_token_nor_payload_crosses_the_wire_in_clear() {
    const TEST: &str = "neither_token_nor_payload_crosses_the_wire_in_clear";
    let (token, port) = (Token::generate(), free_port());
    let seen: Arc<Mutex<[Vec<Vec<u8>>; 2]>> = Arc::default();
    let record = seen.clone();
    let relay = Relay::start(([127, 0, 0, 1], port).into(), move |way, datagram| {
        record.lock().unwrap()[usize::from(way == Way::ToClient)].push(datagram.to_vec());
        true
    });
    if run(TEST, port, relay.address.port(), &token, "quic").is_none() {
        return; // this is one of them
    }
    drop(relay);
    let seen = std::mem::take(&mut *seen.lock().unwrap());
    seen.iter().for_each(|datagrams| assert_secret(datagrams, &token));

    // The search finds what there is to find.
    let middle = PATTERN.len() / 2;
    assert!(holds(&[PATTERN.repeat(2)[middle..].to_vec()], PATTERN));
    for (form, wanted) in forms(&token) {
        assert!(holds(&[vec![0; 3], [&[1, 2, 3], &wanted[..], &[4]].concat()], &wanted), "{form}");
    }
    assert!(holds(&[token.reveal().into_bytes()], &forms(&token)[0].1));
    assert_eq!(base64(b"Man", b"+/"), b"TWFu");
}

#[test]
fn neither_token_nor_payload_crosses_tcp_in_clear() {
    const TEST: &str = "neither_token_nor_payload_crosses_tcp_in_clear";
    let (token, port) = (Token::generate(), free_port());
    let server = ([127, 0, 0, 1], port).into();
    // The same port number for both, as ranks have it; another process may have one of the two.
    let (relay, tcp) = std::iter::repeat_with(|| {
        let relay = Relay::start(server, |_, _| true);
        let tcp = TcpRelay::start(relay.address, server);
        (relay, tcp)
    })
    .find_map(|(relay, tcp)| Some((relay, tcp.ok()?)))
    .unwrap();
    if run(TEST, port, relay.address.port(), &token, "tcp").is_none() {
        return; // this is one of them
    }
    for way in [Way::ToServer, Way::ToClient] {
        assert_secret(&tcp.seen(way), &token);
    }
}
