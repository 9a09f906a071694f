//! The door: from a stranger's first packet to a connection with a process of the cluster.
//!
//! 1. A stranger must first show that packets reach the address it claims
//!    ([`Incoming::retry`](quinn::Incoming::retry)). Asking costs one packet and no memory, so a
//!    forged address gets no further.
//! 2. It then gets one of a fixed number of places for the length of its handshake, which ends with
//!    a certificate or a timeout.
//! 3. When all places are taken, the oldest handshake of the most crowded address is dropped. A
//!    rank needs its place for a few round trips, and asks again when it has lost it. A stranger
//!    that only holds places loses them to those that use theirs, and a crowd at one address loses
//!    its own first.

use std::collections::{HashMap, VecDeque};
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use quinn::{Connection, ConnectionError, Endpoint, ServerConfig};
use tokio::task::AbortHandle;
use tokio::time::timeout;

use crate::quic::transport::Transport;

/// How long one handshake may take.
pub(crate) const HANDSHAKE: Duration = Duration::from_secs(10);
/// Handshakes that may be under way at once.
const PLACES: usize = 256;
/// At most one line about strangers goes to the log in this time.
const QUIET: Duration = Duration::from_secs(1);

/// Bounds how much may wait for [`keep`], which looks at everything at once.
pub(crate) fn limit_incoming(server: &mut quinn::ServerConfig) {
    server.max_incoming(1024).incoming_buffer_size(64 << 10).incoming_buffer_size_total(4 << 20);
}

/// Answers everyone who connects, for as long as the endpoint lives. Passes on connections that
/// have proven to come from the cluster, and reports the addresses of those that have another
/// token.
pub(crate) async fn keep(
    endpoint: Endpoint,
    server: ServerConfig,
    transport: Transport,
    pass: impl Fn(Connection) + Send + Sync + 'static,
    tell: impl Fn(SocketAddr) + Send + Sync + 'static,
) {
    let (pass, tell, porch) = (Arc::new(pass), Arc::new(tell), Arc::new(Porch::default()));
    while let Some(incoming) = endpoint.accept().await {
        if !incoming.remote_address_validated() {
            let _ = incoming.retry(); // cannot fail for an address that is not validated
            continue;
        }
        let from = incoming.remote_address();
        let mut server = server.clone();
        server.transport_config(transport.to(from));
        let connecting = match incoming.accept_with(Arc::new(server)) {
            Ok(connecting) => connecting,
            Err(error) => {
                porch.say(&format!("refused a stranger from {from}: {error}"));
                continue;
            }
        };
        let (pass, tell, door) = (pass.clone(), tell.clone(), porch.clone());
        porch.admit(from.ip(), async move {
            match timeout(HANDSHAKE, connecting).await {
                Ok(Ok(connection)) => pass(connection),
                Ok(Err(error)) if is_about_certificates(&error) => tell(from),
                Ok(Err(error)) => door.say(&format!("refused a stranger from {from}: {error}")),
                Err(_) => door.say(&format!("refused a stranger from {from} that did not go on")),
            }
        });
    }
}

/// Whether one of the two sides did not accept the other's certificate: they have different tokens.
pub(super) fn is_about_certificates(error: &ConnectionError) -> bool {
    /// TLS's bad_certificate, certificate_unknown, unknown_ca and decrypt_error.
    const ALERTS: [u64; 4] = [42, 46, 48, 51];
    /// Where QUIC's codes for TLS's alerts begin.
    const FIRST_ALERT: u64 = 0x100;
    let code = match error {
        ConnectionError::TransportError(error) => error.code,
        ConnectionError::ConnectionClosed(close) => close.error_code,
        _ => return false,
    };
    ALERTS.iter().any(|alert| u64::from(code) == FIRST_ALERT + alert)
}

/// What counts as one address: whoever has one IPv6 address has at least 2⁶⁴ of them.
fn neighbourhood(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(address) => {
            IpAddr::V6(Ipv6Addr::from_bits(address.to_bits() & !u128::from(u64::MAX)))
        }
        v4 => v4,
    }
}

/// Where handshakes take place.
#[derive(Debug, Default)]
pub(crate) struct Porch {
    places: Mutex<Places<AbortHandle>>,
    log: Log,
}

impl Porch {
    fn places(&self) -> std::sync::MutexGuard<'_, Places<AbortHandle>> {
        self.places.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn say(&self, what: &str) {
        self.log.say(what);
    }

    /// Gives a handshake a place, perhaps that of another.
    pub(crate) fn admit(
        self: &Arc<Self>,
        from: IpAddr,
        handshake: impl Future<Output = ()> + Send + 'static,
    ) {
        let mut places = self.places();
        let id = places.next_id();
        let porch = self.clone();
        let task = tokio::spawn(async move {
            handshake.await;
            porch.places().leave(id);
        });
        if let Some(oldest) = places.enter(id, neighbourhood(from), task.abort_handle()) {
            drop(places);
            oldest.abort(); // which closes its connection
            self.say(
                "too many handshakes at once; the oldest of the most crowded address were refused",
            );
        }
    }
}

/// A log that strangers cannot fill.
#[derive(Debug, Default)]
pub(crate) struct Log {
    said: Mutex<Said>,
}

impl Log {
    /// Writes a line, unless it wrote one a moment ago.
    pub(crate) fn say(&self, what: &str) {
        let mut said = self.said.lock().unwrap_or_else(PoisonError::into_inner);
        if said.at.is_some_and(|at| at.elapsed() < QUIET) {
            said.not_shown += 1;
            return;
        }
        let not_shown = std::mem::take(&mut said.not_shown);
        said.at = Some(Instant::now());
        tracing::warn!(not_shown, "{what}");
    }
}

#[derive(Debug, Default)]
struct Said {
    at: Option<Instant>,
    not_shown: u64,
}

/// The handshakes under way, oldest first.
#[derive(Debug)]
struct Places<T> {
    next: u64,
    taken: VecDeque<(u64, IpAddr, T)>,
}

impl<T> Default for Places<T> {
    fn default() -> Self {
        Self { next: 0, taken: VecDeque::new() }
    }
}

impl<T> Places<T> {
    fn next_id(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    /// Takes a place. If there was none left, returns the handshake that must go for it.
    fn enter(&mut self, id: u64, address: IpAddr, task: T) -> Option<T> {
        let evicted = if self.taken.len() < PLACES { None } else { self.evict() };
        self.taken.push_back((id, address, task));
        evicted
    }

    fn leave(&mut self, id: u64) {
        self.taken.retain(|(taken, ..)| *taken != id);
    }

    /// Takes the place of the oldest handshake of the most crowded address.
    fn evict(&mut self) -> Option<T> {
        let mut crowds: HashMap<IpAddr, usize> = HashMap::new();
        for (_, address, _) in &self.taken {
            *crowds.entry(*address).or_default() += 1;
        }
        let most = crowds.values().copied().max()?;
        let oldest =
            self.taken.iter().position(|(_, address, _)| crowds.get(address) == Some(&most))?;
        self.taken.remove(oldest).map(|(_, _, task)| task)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_crowd_at_one_address_pushes_out_its_own() {
        let mut places = Places::default();
        let [crowd, rank] = [1, 2].map(|last| IpAddr::from([10, 0, 0, last]));
        assert_eq!(places.enter(0, rank, 0), None);
        for id in 1..PLACES as u64 {
            assert_eq!(places.enter(id, crowd, id), None);
        }
        for id in PLACES as u64..3 * PLACES as u64 {
            assert_eq!(places.enter(id, crowd, id), Some(id + 1 - PLACES as u64));
        }
        assert_eq!(places.taken.len(), PLACES);
        assert_eq!(
            places.taken.front(),
            Some(&(0, rank, 0)),
            "who came from elsewhere keeps its place"
        );
        places.leave(0);
        assert_eq!(places.enter(9999, rank, 9999), None, "a place that was left is free");
    }

    #[test]
    fn one_network_of_ipv6_is_one_address() {
        let [a, b, c] =
            ["2001:db8::1", "2001:db8::ffff:1", "2001:db8:0:1::1"].map(|a| a.parse().unwrap());
        assert_eq!(neighbourhood(a), neighbourhood(b));
        assert_ne!(neighbourhood(a), neighbourhood(c));
        let mapped = neighbourhood("::ffff:10.0.0.1".parse().unwrap());
        assert_eq!(mapped, IpAddr::from([10, 0, 0, 1]));
    }
}
