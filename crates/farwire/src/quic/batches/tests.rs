use std::collections::VecDeque;
use std::time::Duration;

use farwire_netlab::{Impairments, MemoryNetwork};
use farwire_proto::{Epoch, Peer};
use proptest::prelude::*;
use quinn::{Endpoint, EndpointConfig, TokioRuntime, TransportConfig, VarInt};
use tokio::time::Instant;

use super::fitting::Watching;
use super::*;
use crate::join::identity::Identity;
use crate::quic::congestion::Congestion;
use crate::token::Token;

const PACKET: usize = 1452;
const KERNEL: usize = 64;

/// A socket that remembers what it was given, and refuses when it is told to.
#[derive(Debug, Default)]
struct Recorder {
    sent: Mutex<Vec<Vec<Vec<u8>>>>,
    refusals: Mutex<VecDeque<bool>>,
}

impl Recorder {
    /// How many packets each call had, so far.
    fn calls(&self) -> Vec<usize> {
        self.sent.lock().unwrap().iter().map(Vec::len).collect()
    }

    /// What was sent for a connection, as the numbers of its packets.
    fn numbers(&self, connection: u8) -> Vec<u32> {
        let sent = self.sent.lock().unwrap();
        let packets = sent.iter().flatten().filter(|packet| packet[1] == connection);
        packets.map(|packet| u32::from_le_bytes(*packet[9..].first_chunk().unwrap())).collect()
    }
}

impl AsyncUdpSocket for Recorder {
    fn try_send(&self, transmit: &Transmit<'_>) -> io::Result<()> {
        if self.refusals.lock().unwrap().pop_front() == Some(true) {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        let length = transmit.segment_size.unwrap_or(transmit.contents.len());
        let packets: Vec<_> = transmit.contents.chunks(length).map(<[u8]>::to_vec).collect();
        assert!(packets.len() <= KERNEL && transmit.contents.len() <= LONGEST, "{}", packets.len());
        self.sent.lock().unwrap().push(packets);
        Ok(())
    }

    fn create_io_poller(self: Arc<Self>) -> Pin<Box<dyn UdpPoller>> {
        Box::pin(Writable)
    }

    fn poll_recv(
        &self,
        _: &mut Context<'_>,
        _: &mut [IoSliceMut<'_>],
        _: &mut [RecvMeta],
    ) -> Poll<io::Result<usize>> {
        Poll::Pending
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        Ok(([127, 0, 0, 1], 1).into())
    }

    fn max_transmit_segments(&self) -> usize {
        KERNEL
    }
}

#[derive(Debug)]
struct Writable;

impl UdpPoller for Writable {
    fn poll_writable(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }
}

/// What one connection hands over in one call.
#[derive(Clone, Debug)]
struct Step {
    connection: u8,
    packets: usize,
    /// Bytes of all but the last packet, and of the last.
    length: usize,
    last: usize,
    ecn: Option<EcnCodepoint>,
    /// Whether it has the long header of a handshake.
    long: bool,
    /// Whether other tasks get a turn after it.
    pause: bool,
}

impl Step {
    fn full(connection: u8) -> Self {
        Self {
            connection,
            packets: FULL,
            length: PACKET,
            last: PACKET,
            ecn: None,
            long: false,
            pause: false,
        }
    }

    fn few(connection: u8, packets: usize) -> Self {
        Self { packets, ..Self::full(connection) }
    }

    /// Sends it as quinn does: again, whenever the socket would block.
    fn send(&self, batches: &Batches, number: &mut u32) {
        let mut contents = Vec::new();
        for packet in 1..=self.packets {
            let length = if packet == self.packets { self.last } else { self.length };
            let mut bytes = vec![0; length];
            bytes[0] = if self.long { 0xc0 } else { 0x40 };
            bytes[1] = self.connection;
            bytes[9..13].copy_from_slice(&number.to_le_bytes());
            *number += 1;
            contents.extend(bytes);
        }
        let transmit = Transmit {
            destination: ([127, 0, 0, 1], 2).into(),
            ecn: self.ecn,
            contents: &contents,
            segment_size: (self.packets > 1).then_some(self.length),
            src_ip: None,
        };
        while would_block(&batches.try_send(&transmit)) {}
    }
}

/// Runs steps, and then all that is left to do.
fn run(steps: &[Step], refusals: &[bool]) -> Arc<Recorder> {
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    let recorder = Arc::new(Recorder::default());
    recorder.refusals.lock().unwrap().extend(refusals);
    runtime.block_on(async {
        let batches = Batches::that_fit(recorder.clone(), Box::leak(Box::new(Fitting::new())));
        let mut numbers = [0; 256];
        for step in steps {
            step.send(&batches, &mut numbers[usize::from(step.connection)]);
            if step.pause {
                all_others().await;
            }
        }
        all_others().await;
        assert!(batches.held().is_empty(), "nothing is held for long");
    });
    recorder
}

/// Lets the task that sends what is held do all that it has to do.
async fn all_others() {
    for _ in 0..4 * TURNS {
        tokio::task::yield_now().await;
    }
}

#[test]
fn full_batches_are_sent_together() {
    let steps = [Step::full(1), Step::full(1), Step::full(1), Step::few(1, 4)];
    assert_eq!(run(&steps, &[]).calls(), [34]);
    assert_eq!(run(&[1; 6].map(Step::full), &[]).calls(), [40, 20], "a fifth has no room");
}

#[test]
fn what_nothing_follows_is_sent_by_itself() {
    assert_eq!(run(&[Step::full(1)], &[]).calls(), [10]);
    let paused = Step { pause: true, ..Step::full(1) };
    assert_eq!(run(&[paused.clone(), paused], &[]).calls(), [10, 10]);
}

#[test]
fn what_is_not_full_is_not_held() {
    assert_eq!(run(&[Step::few(1, 9), Step::few(1, 1)], &[]).calls(), [9, 1]);
    let long = Step { long: true, ..Step::full(1) };
    assert_eq!(run(&[long.clone(), long], &[]).calls(), [10, 10], "a handshake");
    let jumbo = Step { length: 6500, last: 6500, ..Step::full(1) };
    assert_eq!(run(&[jumbo.clone(), jumbo], &[]).calls(), [10, 10], "there is no room for more");
}

#[test]
fn connections_have_batches_of_their_own() {
    let steps = [Step::full(1), Step::full(2), Step::few(2, 1), Step::few(1, 2)];
    assert_eq!(run(&steps, &[]).calls(), [11, 12]);
}

#[test]
fn only_packets_that_are_alike_go_together() {
    let marked = Step { ecn: Some(EcnCodepoint::Ce), ..Step::full(1) };
    assert_eq!(run(&[Step::full(1), marked], &[]).calls(), [10, 10]);
    let longer = Step { length: 1500, last: 1500, ..Step::full(1) };
    assert_eq!(run(&[Step::full(1), longer], &[]).calls(), [10, 10]);
    let shorter = Step { last: 40, ..Step::few(1, 3) };
    assert_eq!(run(&[Step::full(1), shorter, Step::few(1, 1)], &[]).calls(), [13, 1]);
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = (0..3u8, 1..=10usize, 13..60usize, 13..60usize, 0..8u8, any::<[bool; 4]>());
    let step =
        step.prop_map(|(connection, packets, length, last, odd, [full, even, ecn, pause])| {
            let length = if even { 40 } else { length };
            Step {
                connection,
                packets: if full { FULL } else { packets },
                length,
                last: if full { length } else { last.min(length) },
                ecn: (ecn && odd == 0).then_some(EcnCodepoint::Ce),
                long: odd == 1,
                pause,
            }
        });
    prop::collection::vec(step, 0..40)
}

proptest! {
    /// Packets of one connection in the order in which quinn made them, each of them once, whatever
    /// the socket refuses.
    #[test]
    fn nothing_is_lost_or_overtaken(
        steps in steps(),
        refusals in prop::collection::vec(any::<bool>(), 0..60),
    ) {
        let recorder = run(&steps, &refusals);
        for connection in 0..3 {
            let of = steps.iter().filter(|step| step.connection == connection);
            let all = of.clone().map(|step| step.packets as u32).sum::<u32>();
            let long = of.filter(|step| step.long).count();
            let mut numbers = recorder.numbers(connection);
            if long > 0 {
                numbers.sort_unstable(); // handshakes come first, and have numbers of their own
            }
            prop_assert_eq!(numbers, (0..all).collect::<Vec<_>>());
        }
    }
}

/// The queue of an interface, which takes what it is handed at once or drops all of it.
#[derive(Debug)]
struct ShortQueue {
    socket: Arc<dyn AsyncUdpSocket>,
    /// Bytes that wait, at a time.
    waiting: Mutex<(usize, Instant)>,
}

impl ShortQueue {
    const LIMIT: usize = 20_000;
    /// Bytes per second.
    const RATE: f64 = 50e6;
}

impl AsyncUdpSocket for ShortQueue {
    fn try_send(&self, transmit: &Transmit<'_>) -> io::Result<()> {
        let (bytes, since) = &mut *self.waiting.lock().unwrap();
        *bytes = bytes.saturating_sub((since.elapsed().as_secs_f64() * Self::RATE) as usize);
        *since = Instant::now();
        if *bytes + transmit.contents.len() > Self::LIMIT {
            return Ok(()); // it is lost
        }
        *bytes += transmit.contents.len();
        self.socket.try_send(transmit)
    }

    fn create_io_poller(self: Arc<Self>) -> Pin<Box<dyn UdpPoller>> {
        Box::pin(Writable)
    }

    fn poll_recv(
        &self,
        cx: &mut Context<'_>,
        bufs: &mut [IoSliceMut<'_>],
        meta: &mut [RecvMeta],
    ) -> Poll<io::Result<usize>> {
        self.socket.poll_recv(cx, bufs, meta)
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        self.socket.local_addr()
    }

    fn max_transmit_segments(&self) -> usize {
        KERNEL
    }
}

const STREAMS: usize = 32;

/// How long 32 MB take over a line behind a [`ShortQueue`], in virtual time, if `told`
/// hears of losses.
fn through_a_short_queue(fitting: &'static Fitting, told: &'static Fitting) -> Duration {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .start_paused(true)
        .build()
        .unwrap();
    runtime.block_on(async {
        let network = MemoryNetwork::new();
        let token = Token::generate();
        let near = Impairments { delay: Duration::from_micros(100), ..Impairments::default() };
        let address = |host: u8| SocketAddr::from(([10, 77, 0, host], 4000));
        let identity = Identity::new(&token, Peer(0), Epoch(0), &Default::default()).unwrap();
        let mut transport = TransportConfig::default();
        let controllers = Congestion::Cubic.factory();
        transport
            .congestion_controller_factory(Arc::new(Watching { controllers, fitting: told }))
            .stream_receive_window(VarInt::from_u32(1 << 20));
        let transport = Arc::new(transport);
        let endpoint = |socket: Arc<dyn AsyncUdpSocket>| {
            let mut server = identity.server_config().unwrap();
            let mut client = identity.client_config().unwrap();
            server.transport_config(transport.clone());
            client.transport_config(transport.clone());
            let (mut config, runtime) = (EndpointConfig::default(), Arc::new(TokioRuntime));
            config.rng_seed(Some([7; 32]));
            let mut endpoint =
                Endpoint::new_with_abstract_socket(config, Some(server), socket, runtime).unwrap();
            endpoint.set_default_client_config(client);
            endpoint
        };
        let there = endpoint(network.host(address(0), &near, 0));
        let (socket, waiting) =
            (network.host(address(1), &near, 1), Mutex::new((0, Instant::now())));
        let here = endpoint(Batches::that_fit(Arc::new(ShortQueue { socket, waiting }), fitting));
        let connecting = here.connect(address(0), &identity.name_of(Peer(0))).unwrap();
        let accepting = async { there.accept().await.unwrap().await.unwrap() };
        let (to, from) = tokio::join!(connecting, accepting);
        let to = to.unwrap();
        let began = Instant::now();
        let sending = async {
            let mut streams = Vec::new();
            for _ in 0..STREAMS {
                let mut stream = to.open_uni().await.unwrap();
                streams.push(tokio::spawn(async move {
                    stream.write_all(&[1; 1_000_000]).await.unwrap();
                    stream.finish().unwrap();
                    stream.stopped().await.unwrap();
                }));
            }
            for stream in streams {
                stream.await.unwrap();
            }
        };
        let receiving = async {
            for _ in 0..STREAMS {
                let mut stream = from.accept_uni().await.unwrap();
                tokio::spawn(async move { stream.read_to_end(1_000_000).await.unwrap() });
            }
        };
        tokio::join!(sending, receiving);
        began.elapsed()
    })
}

#[test]
fn batches_that_a_short_queue_drops_as_a_whole_get_shorter() {
    let [fitting, unheard, unused] = [(); 3].map(|()| &*Box::leak(Box::new(Fitting::new())));
    let long = through_a_short_queue(unheard, unused);
    let fit = through_a_short_queue(fitting, fitting);
    assert!(fitting.packets() < 2 * FULL, "{fitting:?}");
    assert!(2 * fit < long, "{fit:?} with batches that fit, {long:?} with longer ones");
}
