//! Is the peer alive? Answered heartbeats, and the goodbye.
//!
//! Each side sends a ping now and then and answers the other's. Only an *answer* counts as life:
//! what leaves this process may go nowhere. A peer that does not answer for long enough, stopped,
//! dead or cut off, is lost. How long is enough grows with the round trip, so that a link that is
//! merely long, or has a long queue, is not declared dead. Some networks lose many packets in a row.
//! So a peer that has not answered for a while is asked much more often before it is given up.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use quinn::{Connection, RecvStream, SendStream};
use tokio::sync::{Notify, mpsc};
use tokio::time::{Instant, MissedTickBehavior, interval};

use crate::link::Liveness;
use crate::shm::bell::Bell;

/// How often to look at the clock, and how long to wait for an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Beats {
    /// Every other time, the peer is asked: with many ranks on one host, questions and answers are
    /// what keeps it busy.
    pub(crate) every: Duration,
    pub(crate) lost_after: Duration,
}

/// What is known of a peer, for the driver to look at.
#[derive(Debug)]
pub(crate) struct Health {
    lost: AtomicBool,
    /// The peer's process is known to have ended.
    ended: AtomicBool,
    reason: Mutex<String>,
    /// How many data streams the peer has opened in all, plus one, once it has said goodbye; zero
    /// before.
    goodbye: AtomicU64,
    /// Something says that the peer's process may have ended.
    suspected: Notify,
    /// When the peer's connection ended, after it had said goodbye.
    hung_up: OnceLock<Instant>,
    /// Set by this side when it leaves, with the number of streams that it has opened.
    leaving: Notify,
    streams: AtomicU64,
    left: Notify,
    /// This process's.
    bell: Bell,
}

impl Health {
    pub(crate) fn new(bell: Bell) -> Arc<Self> {
        Arc::new(Self {
            lost: AtomicBool::new(false),
            ended: AtomicBool::new(false),
            reason: Mutex::default(),
            goodbye: AtomicU64::new(0),
            suspected: Notify::new(),
            hung_up: OnceLock::new(),
            leaving: Notify::new(),
            streams: AtomicU64::new(0),
            left: Notify::new(),
            bell,
        })
    }

    /// Why the peer is lost, if it is.
    pub(crate) fn loss(&self) -> Option<String> {
        let lost = self.lost.load(Ordering::Acquire);
        lost.then(|| self.reason.lock().unwrap_or_else(PoisonError::into_inner).clone())
    }

    pub(crate) fn lose(&self, reason: String) {
        *self.reason.lock().unwrap_or_else(PoisonError::into_inner) = reason;
        self.lost.store(true, Ordering::Release);
        self.bell.ring();
    }

    /// The peer's process has ended, for certain.
    pub(crate) fn end(&self, reason: String) {
        self.ended.store(true, Ordering::Release);
        self.lose(reason);
    }

    /// The peer's process may have ended: it is asked, and lost unless it answers soon.
    pub(crate) fn suspect(&self) {
        self.suspected.notify_one();
    }

    /// How many data streams the peer has opened in all, once it has said goodbye.
    pub(crate) fn goodbye(&self) -> Option<u64> {
        self.goodbye.load(Ordering::Acquire).checked_sub(1)
    }

    fn hang_up(&self) {
        let _ = self.hung_up.set(Instant::now());
        self.bell.ring();
    }

    /// How long ago a peer that had said goodbye ended its connection: no more will come.
    pub(crate) fn hung_up(&self) -> Option<Duration> {
        self.hung_up.get().map(Instant::elapsed)
    }

    /// Says goodbye, once all streams this side has opened are known to have arrived.
    pub(crate) fn leave(&self, streams: u64) {
        self.streams.store(streams, Ordering::Release);
        self.leaving.notify_one();
    }

    /// Until the goodbye has been said.
    pub(crate) async fn left(&self) {
        self.left.notified().await;
    }
}

#[cfg(test)]
impl Health {
    /// Until this side has been told to say goodbye.
    pub(crate) async fn told_to_leave(&self) {
        self.leaving.notified().await;
    }
}

/// Of a peer whose data goes through shared memory: no streams are opened for it.
impl Liveness for Health {
    fn loss(&self) -> Option<String> {
        self.loss()
    }

    fn ended(&self) -> bool {
        self.ended.load(Ordering::Acquire)
    }

    fn leave(&self) {
        self.leave(0);
    }

    fn give_up(&self) {
        if !self.lost.load(Ordering::Acquire) {
            self.lose("it was given up".to_owned());
        }
        // Without a goodbye, since the peer is lost.
        self.leave(0);
    }
}

/// How long a peer has to answer that is suspected to have ended: this share of the time that others
/// have, and round trips beyond that.
const SUSPECT: u32 = 12;
const SUSPECT_ROUND_TRIPS: u32 = 4;

/// After this share of the time that a peer has, it is asked again at once, and then at intervals of
/// the other.
const URGENT: u32 = 3;
const NUDGE: u32 = 64;

/// An answer may have to be sent again several times on its way, and each time takes round trips.
const ROUND_TRIPS: u32 = 8;

const PING: u8 = 1;
const PONG: u8 = 2;
const BYE: u8 = 3;

const NONSENSE: &str = "it said something on the control stream that means nothing";

/// Asks and answers until either side leaves.
pub(crate) async fn watch(
    connection: Connection,
    mut to: SendStream,
    from: RecvStream,
    health: Arc<Health>,
    beats: Beats,
) {
    // Before all data: a busy link must not look like a dead one.
    let _ = to.set_priority(i32::MAX);
    let (heard, mut messages) = mpsc::channel(16);
    tokio::spawn(listen(from, heard));
    let mut tick = interval(beats.every);
    tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let (mut looked, mut silence) = (Instant::now(), Duration::ZERO);
    let mut ticks = 0u64;
    // The question that a peer under suspicion has to answer, and until when.
    let mut suspicion: Option<(u64, Instant)> = None;
    let reason = loop {
        let message = tokio::select! {
            () = health.suspected.notified(), if suspicion.is_none() => {
                ticks += 1;
                let patience = beats.lost_after / SUSPECT + SUSPECT_ROUND_TRIPS * connection.rtt();
                suspicion = Some((ticks, Instant::now() + patience));
                Some((PING, ticks))
            }
            () = until(suspicion), if health.goodbye().is_none() => {
                break Some("its connections were closed, and it does not answer".to_owned());
            }
            _ = tick.tick() => {
                // Time in which this process itself did not run is not the peer's silence: its
                // answer may be here, unread.
                silence += looked.elapsed().min(2 * beats.every);
                looked = Instant::now();
                // Who has said goodbye answers no more.
                let lost_after = beats.lost_after + ROUND_TRIPS * connection.rtt();
                if health.goodbye().is_none() && silence > lost_after {
                    break Some(format!("no answer to heartbeats for {silence:?}"));
                }
                ticks += 1;
                (ticks % 2 == 1).then_some((PING, ticks))
            }
            () = tokio::time::sleep(beats.lost_after / NUDGE),
                if silence > beats.lost_after / URGENT =>
            {
                Some((PING, ticks))
            }
            () = health.leaving.notified() => {
                if health.loss().is_none() {
                    let _ = say(&mut to, BYE, health.streams.load(Ordering::Acquire)).await;
                    let _ = to.finish();
                    let _ = tokio::time::timeout(beats.lost_after, to.stopped()).await;
                }
                health.left.notify_one();
                break None;
            }
            message = messages.recv() => match message {
                Some((PING, number)) => Some((PONG, number)),
                Some((PONG, number)) => {
                    suspicion = suspicion.filter(|(asked, _)| number < *asked);
                    silence = Duration::ZERO;
                    looked = Instant::now();
                    None
                }
                Some((BYE, streams)) => {
                    health.goodbye.store(streams.saturating_add(1), Ordering::Release);
                    health.bell.ring();
                    None
                }
                Some(_) => break Some(NONSENSE.to_owned()),
                None if health.goodbye().is_some() => {
                    // It has left; this side will, too.
                    tokio::select! {
                        () = health.leaving.notified() => {}
                        _ = connection.closed() => {
                            health.hang_up();
                            health.leaving.notified().await;
                        }
                    }
                    health.left.notify_one();
                    break None;
                }
                None => break Some(gone(&connection)),
            },
        };
        if let Some((kind, number)) = message
            && say(&mut to, kind, number).await.is_err()
            && health.goodbye().is_none()
        {
            break Some(gone(&connection));
        }
    };
    if let Some(reason) = reason {
        health.lose(reason);
        health.left.notify_one();
    }
}

/// Until the end of a suspicion, if there is one.
async fn until(suspicion: Option<(u64, Instant)>) {
    match suspicion {
        Some((_, end)) => tokio::time::sleep_until(end).await,
        None => std::future::pending().await,
    }
}

fn gone(connection: &Connection) -> String {
    connection
        .close_reason()
        .map_or("it closed the control stream".to_owned(), |reason| reason.to_string())
}

async fn say(to: &mut SendStream, kind: u8, number: u64) -> Result<(), quinn::WriteError> {
    let mut message = [kind; 9];
    message[1..].copy_from_slice(&number.to_le_bytes());
    to.write_all(&message).await
}

async fn listen(mut from: RecvStream, heard: mpsc::Sender<(u8, u64)>) {
    let mut message = [0; 9];
    while from.read_exact(&mut message).await.is_ok() {
        let [kind, number @ ..] = message;
        if heard.send((kind, u64::from_le_bytes(number))).await.is_err() {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;

    use farwire_netlab::{Impairments, Loss, MemoryNetwork};
    use farwire_proto::{Epoch, Peer};
    use quinn::{Endpoint, EndpointConfig, TokioRuntime};

    use super::*;
    use crate::join::identity::Identity;
    use crate::quic::transport::Transport;
    use crate::token::Token;

    /// One end of a connection, with its control stream.
    type End = (Connection, SendStream, RecvStream);

    /// Two ends, 20 ms apart, and what has to live as long.
    async fn ends() -> (End, End, [Endpoint; 2]) {
        ends_of_a_path(Loss::None).await
    }

    async fn ends_of_a_path(loss: Loss) -> (End, End, [Endpoint; 2]) {
        let (network, token) = (MemoryNetwork::new(), Token::generate());
        let delay = Duration::from_millis(10);
        let endpoint = |host: u32| {
            let address = SocketAddr::from(([10, 77, 0, host as u8], 4000));
            let identity =
                Identity::new(&token, Peer(host), Epoch(0), &Default::default()).unwrap();
            let transport = Transport::default().to(address);
            let (mut server, mut client) =
                (identity.server_config().unwrap(), identity.client_config().unwrap());
            server.transport_config(transport.clone());
            client.transport_config(transport);
            let what = Impairments { delay, loss, ..Impairments::default() };
            let socket = network.host(address, &what, host.into());
            let (config, runtime) = (EndpointConfig::default(), Arc::new(TokioRuntime));
            let mut endpoint =
                Endpoint::new_with_abstract_socket(config, Some(server), socket, runtime).unwrap();
            endpoint.set_default_client_config(client);
            (endpoint, identity, address)
        };
        let ((here, identity, _), (there, _, address)) = (endpoint(0), endpoint(1));
        let connecting = here.connect(address, &identity.name_of(Peer(1))).unwrap();
        let accepting = async { there.accept().await.unwrap().await.unwrap() };
        let (near, far) = tokio::join!(connecting, accepting);
        let near = near.unwrap();
        let (mut to, from) = near.open_bi().await.unwrap();
        say(&mut to, PING, 0).await.unwrap(); // the other end hears of a stream by what comes
        let (back, heard) = far.accept_bi().await.unwrap();
        ((near, to, from), (far, back, heard), [here, there])
    }

    fn paused(test: impl Future<Output = ()>) {
        let mut runtime = tokio::runtime::Builder::new_current_thread();
        runtime.enable_time().start_paused(true).build().unwrap().block_on(test);
    }

    /// So patient that only suspicion can lose anybody within the test.
    const BEATS: Beats =
        Beats { every: Duration::from_millis(100), lost_after: Duration::from_secs(60) };

    #[test]
    fn who_is_suspected_and_does_not_answer_is_lost_soon() {
        paused(async {
            let ((connection, to, from), _silent, _endpoints) = ends().await;
            let health = Health::new(Bell::new().unwrap());
            let watching = tokio::spawn(watch(connection, to, from, health.clone(), BEATS));
            tokio::time::sleep(Duration::from_secs(2)).await;
            assert_eq!(health.loss(), None);
            health.suspect();
            watching.await.unwrap();
            assert!(health.loss().is_some_and(|why| why.contains("does not answer")));
        });
    }

    /// Where nothing but heartbeats travels, a few lost packets are seconds.
    #[test]
    fn a_quiet_link_that_loses_many_packets_in_a_row_is_not_lost() {
        const LAN: Beats =
            Beats { every: Duration::from_millis(200), lost_after: Duration::from_millis(1800) };
        paused(async {
            let loss = Loss::Bursty { share: 0.05, length: 8.0 };
            let ((connection, to, from), (far, back, heard), _endpoints) =
                ends_of_a_path(loss).await;
            let [here, there] = [(); 2].map(|()| Health::new(Bell::new().unwrap()));
            tokio::spawn(watch(connection, to, from, here.clone(), LAN));
            tokio::spawn(watch(far, back, heard, there.clone(), LAN));
            tokio::time::sleep(Duration::from_secs(1200)).await;
            assert_eq!((here.loss(), there.loss()), (None, None));
        });
    }

    #[test]
    fn who_is_suspected_and_answers_is_not_lost() {
        paused(async {
            let ((connection, to, from), (far, back, heard), _endpoints) = ends().await;
            let [here, there] = [(); 2].map(|()| Health::new(Bell::new().unwrap()));
            tokio::spawn(watch(connection, to, from, here.clone(), BEATS));
            tokio::spawn(watch(far, back, heard, there.clone(), BEATS));
            for _ in 0..3 {
                here.suspect();
                tokio::time::sleep(Duration::from_secs(10)).await;
            }
            assert_eq!((here.loss(), there.loss()), (None, None));
        });
    }
}
