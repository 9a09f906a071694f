//! QUIC as a kind of link.

use std::net::UdpSocket;
use std::sync::Arc;

use tokio::runtime::Handle;

use super::control::Health;
use super::link::{Connections, NAME, QuicLink};
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
        pair.met.as_ref().map(|_| ()).ok_or_else(|| NOT_MET.to_owned())
    }

    fn connect<'a>(
        &'a self,
        pair: &'a Pair,
        health: Arc<Health>,
        talk: &'a mut Negotiation<'_>,
    ) -> Boxed<'a, Result<Box<dyn Link>, String>> {
        Box::pin(async move {
            let Met { connection: first, called, peer, again } = pair.met.clone().ok_or(NOT_MET)?;
            talk.say(&pair.connections.most).await?;
            let theirs: usize = talk.hear().await?;
            // One for each direction, of which the first is there.
            let more = 2 * pair.connections.most.min(theirs).clamp(1, MOST) - 1;
            let mut all = vec![first.clone()];
            if called {
                let tickets: Vec<u64> = talk.hear().await?;
                for ticket in tickets.into_iter().take(more) {
                    all.push(again.call(&first, peer, ticket).await?);
                }
            } else {
                let expected: Result<Vec<_>, _> = (0..more).map(|_| again.expect(peer)).collect();
                let (tickets, shown): (Vec<u64>, Vec<_>) = expected?.into_iter().unzip();
                talk.say(&tickets).await?;
                for connection in shown {
                    all.push(connection.await?);
                }
            }
            let (caller, other): (Vec<_>, Vec<_>) =
                all.into_iter().enumerate().partition(|(index, _)| index % 2 == 0);
            let [caller, other] = [caller, other].map(|connections| {
                connections.into_iter().map(|(_, connection)| connection).collect()
            });
            let (to, from) = if called { (caller, other) } else { (other, caller) };
            let connections = Connections { to, from, all: pair.connections.all };
            let (bell, runtime) = (pair.bell.clone(), Handle::current());
            let link = QuicLink::new(connections, pair.peer, pair.payload, bell, health, runtime);
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

/// Connections for each direction, at most.
pub(crate) const MOST: usize = 8;

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
