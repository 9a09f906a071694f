//! QUIC as a kind of link.

use std::net::UdpSocket;
use std::sync::Arc;

use tokio::runtime::Handle;

use super::control::Health;
use super::link::{NAME, QuicLink};
use super::transport::{BUFFER, widen};
use crate::doctor::Finding;
use crate::join::again::Met;
use crate::link::negotiation::Negotiation;
use crate::link::{Boxed, Link, LinkKind, Pair};

/// Links over QUIC, with one connection for each direction. The one that two processes met by
/// carries the data of the process that called.
///
/// One connection for both would do if quinn sent acknowledgements while it may not send data. It
/// does not: if both sides have their windows full, each waits for the other to say what arrived.
#[derive(Debug)]
pub(crate) struct Quic;

impl LinkKind for Quic {
    fn name(&self) -> &'static str {
        NAME
    }

    fn about(&self) -> &'static str {
        "QUIC (encrypted, over UDP), also between processes of one host"
    }

    fn serves(&self, pair: &Pair) -> Result<(), String> {
        let met = pair.met.as_ref().ok_or(NOT_MET)?;
        let over_udp = met.again.is_over_udp(&met.connection);
        if over_udp { Ok(()) } else { Err("UDP does not get through".to_owned()) }
    }

    fn connect<'a>(
        &'a self,
        pair: &'a Pair,
        health: Arc<Health>,
        talk: &'a mut Negotiation<'_>,
    ) -> Boxed<'a, Result<Box<dyn Link>, String>> {
        Box::pin(async move {
            let Met { connection: first, called, peer, again } = pair.met.clone().ok_or(NOT_MET)?;
            let (to, from) = if called {
                let second = again.call(&first, peer, talk.hear().await?).await?;
                (first, second)
            } else {
                let (ticket, second) = again.expect(peer)?;
                talk.say(&ticket).await?;
                (second.await?, first)
            };
            let (bell, runtime) = (pair.bell.clone(), Handle::current());
            let link = QuicLink::new(to, from, pair.peer, pair.payload, bell, health, runtime);
            Ok(Box::new(link) as Box<dyn Link>)
        })
    }

    fn examine(&self) -> Vec<Finding> {
        const BUFFERS: &str = "UDP receive buffer";
        let socket = match UdpSocket::bind("127.0.0.1:0") {
            Ok(socket) => socket,
            Err(error) => {
                return vec![Finding::broken(BUFFERS, &error, "let this process open UDP sockets")];
            }
        };
        let mut findings = vec![buffer(BUFFERS, widen(&socket))];
        match quinn::udp::UdpSocketState::new((&socket).into()) {
            Err(error) => {
                findings.push(Finding::broken(
                    "UDP batches",
                    &error,
                    "let this process set socket options",
                ));
            }
            Ok(state) => {
                findings.push(batch("sent at once (GSO)", state.max_gso_segments()));
                findings.push(batch("received at once (GRO)", state.gro_segments()));
            }
        }
        findings
    }
}

const NOT_MET: &str = "the two did not meet over QUIC";

/// What a socket gets of the buffer that farwire asks for.
fn buffer(what: &str, got: usize) -> Finding {
    let (got_kib, wanted_kib) = (got >> 10, BUFFER >> 10);
    if got >= BUFFER {
        return Finding::good(what, format!("{got_kib} KiB"));
    }
    let found = format!(
        "{got_kib} KiB of the {wanted_kib} KiB asked for; packets that find it full are sent again"
    );
    let limits = format!("net.core.rmem_max={BUFFER} net.core.wmem_max={BUFFER}");
    Finding::slow(what, found, format!("raise the system's limit: sysctl -w {limits}"))
}

/// Whether the system sends or receives packets in batches.
fn batch(what: &str, segments: usize) -> Finding {
    let what = format!("UDP packets {what}");
    if segments > 1 {
        return Finding::good(what, format!("up to {segments}"));
    }
    let advice =
        "a Linux kernel from 5.0 on, and an interface that takes it, would send many with one call";
    Finding::slow(what, "one", advice.to_owned())
}
