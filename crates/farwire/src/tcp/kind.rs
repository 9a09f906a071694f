//! TCP as a kind of link.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use farwire_proto::Peer;
use serde::{Deserialize, Serialize};
use tokio::task::JoinSet;
use tokio::time::timeout;

use super::link::{Ends, NAME, TcpLink};
use super::port::{MAX_CONNECTIONS, TcpPort};
use super::tls::Secured;
use crate::doctor::Finding;
use crate::join::again::Met;
use crate::link::negotiation::Negotiation;
use crate::link::{Boxed, Link, LinkKind, Pair};
use crate::quic::control::Health;

/// Links over TCP. The process that called the other, and so knows a way there, connects; if it
/// does not get through, the other does.
#[derive(Debug)]
pub(crate) struct Tcp;

/// How long connecting may take before the other side tries, or another kind of link.
const PATIENCE: Duration = Duration::from_secs(4);

impl LinkKind for Tcp {
    fn name(&self) -> &'static str {
        NAME
    }

    fn about(&self) -> &'static str {
        "TCP (encrypted, with TLS 1.3), also between processes of one host"
    }

    fn serves(&self, pair: &Pair) -> Result<(), String> {
        pair.met.as_ref().map(|_| ()).ok_or_else(|| NOT_MET.to_owned())
    }

    /// Between neighbours, the kernel's TCP moves as much with half of the CPU. Over a distance every
    /// lost packet holds up all that comes after it.
    fn suits(&self, pair: &Pair) -> bool {
        pair.is_near()
    }

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
            let met = pair.met.as_ref().ok_or(NOT_MET)?;
            let port = met.again.tcp().clone();
            let workers = port.workers()?;
            let each_way = (workers.count() as u8).clamp(1, MAX_CONNECTIONS / 2).min(EACH_WAY);
            let (connections, dialled) = connect(met, &port, each_way, talk).await?;
            let ends = Ends::new(connections, dialled);
            let link = TcpLink::new(ends, pair, health, workers);
            Ok(Box::new(link.map_err(|error| error.to_string())?) as Box<dyn Link>)
        })
    }

    fn examine(&self) -> Vec<Finding> {
        const WHAT: &str = "TCP";
        let read = |name: &str| {
            let text = std::fs::read_to_string(format!("/proc/sys/net/ipv4/{name}"));
            text.map_or_else(|_| "unknown".to_owned(), |text| text.trim().to_owned())
        };
        vec![match std::net::TcpListener::bind("127.0.0.1:0") {
            Err(error) => Finding::broken(WHAT, &error, "let this process open TCP sockets"),
            Ok(_) => Finding::good(
                WHAT,
                format!(
                    "congestion control {} (FARWIRE_TCP_CONGESTION can choose: {})",
                    read("tcp_congestion_control"),
                    read("tcp_available_congestion_control")
                ),
            ),
        }]
    }
}

const NOT_MET: &str = "the two did not meet over a network";
/// Connections for each direction, at most: one fills a core at each end.
const EACH_WAY: u8 = 2;

/// What each side tells the other first.
#[derive(Debug, Serialize, Deserialize)]
struct Offer {
    /// For whoever connects to this side.
    ticket: u64,
    /// The port that it listens on, or why it does not.
    port: Result<u16, String>,
    /// Connections for each direction.
    each_way: u8,
}

/// How connecting went.
#[derive(Debug, Serialize, Deserialize)]
struct Dialled(Result<(), String>);

/// The connections with a peer, and whether this side made them.
async fn connect(
    met: &Met,
    port: &Arc<TcpPort>,
    each_way: u8,
    talk: &mut Negotiation<'_>,
) -> Result<(Vec<Secured>, bool), String> {
    let expecting = port.expect(met.peer)?;
    talk.say(&Offer { ticket: expecting.ticket, port: port.listens(), each_way }).await?;
    let theirs: Offer = talk.hear().await?;
    let count = 2 * each_way.min(theirs.each_way).max(1);
    let mut address = met.again.address_of(&met.connection);
    if !met.called {
        // It may call from another port than it can be called at.
        theirs.port.iter().for_each(|port| address.set_port(*port));
    }
    let dial = dial_all(port, met, &theirs, address, count);
    if met.called {
        let dialled = dial.await;
        talk.say(&Dialled(dialled.as_ref().map(|_| ()).map_err(Clone::clone))).await?;
        let why = match dialled {
            Ok(connections) => return Ok((connections, true)),
            Err(why) => why,
        };
        let Dialled(theirs) = talk.hear().await?;
        theirs.map_err(|other| format!("{why}; and the other way: {other}"))?;
    } else {
        let Dialled(theirs) = talk.hear().await?;
        if let Err(why) = theirs {
            let dialled = dial.await;
            talk.say(&Dialled(dialled.as_ref().map(|_| ()).map_err(Clone::clone))).await?;
            let connections = dialled.map_err(|mine| format!("{why}; and the other way: {mine}"));
            return Ok((connections?, true));
        }
    }
    Ok((expecting.connections(count).await?, false))
}

/// Connects to a peer, so many times.
async fn dial_all(
    port: &Arc<TcpPort>,
    met: &Met,
    theirs: &Offer,
    address: SocketAddr,
    count: u8,
) -> Result<Vec<Secured>, String> {
    theirs.port.as_ref().map_err(Clone::clone)?;
    let (me, peer, ticket): (Peer, Peer, u64) = (met.again.me(), met.peer, theirs.ticket);
    let mut calls = JoinSet::new();
    for index in 0..count {
        let port = port.clone();
        calls.spawn(async move { (index, port.dial(address, me, peer, ticket, index).await) });
    }
    let all = async {
        let mut made = Vec::new();
        while let Some(call) = calls.join_next().await {
            let (index, dialled) = call.map_err(|bug| bug.to_string())?;
            made.push((index, dialled?));
        }
        made.sort_by_key(|(index, _)| *index);
        Ok(made.into_iter().map(|(_, secured)| secured).collect())
    };
    let late = || format!("{address} did not answer within {PATIENCE:?}");
    timeout(PATIENCE, all).await.unwrap_or_else(|_| Err(late()))
}
