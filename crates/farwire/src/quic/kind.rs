//! QUIC as a kind of link.

use std::net::UdpSocket;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use tokio::runtime::Handle;

use super::control::Health;
use super::link::{Connections, NAME, QuicLink};
use super::transport::{BUFFER, widen};
use crate::doctor::Finding;
use crate::join::again::Met;
use crate::link::negotiation::Negotiation;
use crate::link::{Boxed, Link, LinkKind, Pair};
use crate::tcp::lifeline::{Lifeline, Offer};

/// Links over QUIC, with one connection for each direction, or several. The one that two processes
/// met by carries data of the process that called.
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

    /// For a [`Lifeline`].
    fn uses_tcp(&self) -> bool {
        true
    }

    fn connect<'a>(
        &'a self,
        pair: &'a Pair,
        health: Arc<Health>,
        talk: &'a mut Negotiation<'_>,
    ) -> Boxed<'a, Result<Box<dyn Link>, String>> {
        Box::pin(async move {
            let met = pair.met.clone().ok_or(NOT_MET)?;
            let Met { connection: first, called, peer, again } = met.clone();
            // It takes a fast line to keep more than one busy; the farther the peer, the slower.
            let mine =
                if pair.is_near() || pair.connections.all { pair.connections.most } else { 1 };
            let (lifeline, offer) = Lifeline::offer(&met)?;
            talk.say(&Wishes { connections: mine, lifeline: offer }).await?;
            let theirs: Wishes = talk.hear().await?;
            let tying = tokio::spawn(lifeline.tie(met, theirs.lifeline));
            let each_way = theirs.connections.min(mine).clamp(1, MOST);
            let more = 2 * each_way - 1;
            let mut others = if called {
                let tickets: Vec<u64> = talk.hear().await?;
                let calls = tickets.into_iter().take(more).map(|ticket| {
                    let (again, first) = (again.clone(), first.clone());
                    async move { again.call(&first, peer, ticket).await }
                });
                all(calls).await?
            } else {
                let expected: Result<Vec<_>, _> = (0..more).map(|_| again.expect(peer)).collect();
                let (tickets, shown): (Vec<u64>, Vec<_>) = expected?.into_iter().unzip();
                talk.say(&tickets).await?;
                all(shown).await?
            };
            if others.len() < more {
                return Err("it handed out too few tickets".to_owned());
            }
            // Half of them for each direction, the first for the process that called.
            let other = others.split_off(others.len() - each_way);
            let caller = std::iter::once(first).chain(others).collect();
            // Before this ends, since the port may be closed once all have joined.
            let tied = tying.await.ok().flatten();
            talk.say(&tied.is_some()).await?;
            let both: bool = talk.hear().await?;
            if let Some(tied) = tied.filter(|_| both) {
                tied.watch(health.clone());
            }
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

/// What each side tells the other first.
#[derive(Debug, Serialize, Deserialize)]
struct Wishes {
    /// Connections for each direction, at most.
    connections: usize,
    lifeline: Offer,
}

/// What all of these result in, side by side and in order, unless one fails.
async fn all<T: Send + 'static>(
    tasks: impl IntoIterator<Item = impl Future<Output = Result<T, String>> + Send + 'static>,
) -> Result<Vec<T>, String> {
    let tasks: Vec<_> = tasks.into_iter().map(tokio::spawn).collect();
    let mut results = Vec::new();
    for task in tasks {
        results.push(task.await.map_err(|panicked| panicked.to_string())??);
    }
    Ok(results)
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
