//! Shared memory as a kind of link.

use std::io::ErrorKind;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use tokio::net::UnixStream;

use super::files;
use super::link::{NAME, SharedLink};
use super::region::Region;
use super::same_host::{self, Offer, Shared};
use crate::doctor::Finding;
use crate::link::negotiation::Negotiation;
use crate::link::{Boxed, Link, LinkKind, Pair};
use crate::quic::control::Health;

/// Links through shared memory, between processes of one host.
#[derive(Debug)]
pub(crate) struct SharedMemory;

impl LinkKind for SharedMemory {
    fn name(&self) -> &'static str {
        NAME
    }

    fn about(&self) -> &'static str {
        "Shared memory between processes of one host"
    }

    fn serves(&self, pair: &Pair) -> Result<(), String> {
        if pair.same_host { Ok(()) } else { Err("the two are on different hosts".to_owned()) }
    }

    fn prepare(&self, peers: usize) -> Result<(), String> {
        files::make_room(peers)
    }

    fn connect<'a>(
        &'a self,
        pair: &'a Pair,
        health: Arc<Health>,
        talk: &'a mut Negotiation<'_>,
    ) -> Boxed<'a, Result<Box<dyn Link>, String>> {
        Box::pin(async move {
            let Shared { sender, receiver, bell, lifeline } = share(pair, talk).await?;
            let lifeline = UnixStream::from_std(lifeline).map_err(|error| error.to_string())?;
            tokio::spawn(watch(lifeline, health.clone()));
            Ok(Box::new(SharedLink::new(sender, receiver, bell, Some(health))) as Box<dyn Link>)
        })
    }

    fn uses_network_thread(&self) -> bool {
        false
    }

    fn examine(&self) -> Vec<Finding> {
        const WHAT: &str = "shared memory";
        vec![match Region::new(1, 1 << 20) {
            Ok(_) => {
                Finding::good(WHAT, "sealed memory files work; ranks on this host will use them")
            }
            Err(error) => {
                let advice = "allow memfd_create; until then ranks on one host use another link";
                Finding::broken(WHAT, &error, advice)
            }
        }]
    }
}

/// Where the lower rank can be met, and what to say there.
#[derive(Debug, Serialize, Deserialize)]
struct Invitation {
    name: String,
    word: String,
}

/// The higher rank has come to the meeting.
#[derive(Debug, Serialize, Deserialize)]
struct Came;

/// Shares memory with the peer. The lower rank says where to meet.
async fn share(pair: &Pair, talk: &mut Negotiation<'_>) -> Result<Shared, String> {
    let (peer, payload, bell) = (pair.peer, pair.payload, pair.bell.clone());
    if pair.me < pair.peer {
        let offer = Offer::new().map_err(|error| error.to_string())?;
        talk.say(&Invitation { name: offer.name.clone(), word: offer.word.clone() }).await?;
        let meeting = tokio::spawn(offer.meet(peer, payload, bell));
        // If the peer could not come, there is nobody to wait for.
        if let Err(why) = talk.hear::<Came>().await {
            meeting.abort();
            return Err(why);
        }
        meeting.await.map_err(|error| error.to_string())?.map_err(|error| error.to_string())
    } else {
        let Invitation { name, word } = talk.hear().await?;
        let accept = move || same_host::accept(&name, &word, peer, payload, &bell);
        let shared =
            tokio::task::spawn_blocking(accept).await.map_err(|error| error.to_string())?;
        let shared = shared.map_err(|error| error.to_string())?;
        talk.say(&Came).await?;
        Ok(shared)
    }
}

/// Waits for the end of the peer's process, which closes its end.
async fn watch(lifeline: UnixStream, health: Arc<Health>) {
    let mut byte = [0];
    loop {
        let readable = lifeline.readable().await.is_ok();
        match lifeline.try_read(&mut byte) {
            Err(error) if readable && error.kind() == ErrorKind::WouldBlock => {}
            _ => return health.end("its process has ended".to_owned()),
        }
    }
}
