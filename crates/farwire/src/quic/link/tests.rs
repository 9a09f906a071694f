use std::net::SocketAddr;
use std::time::Duration;

use farwire_proto::{Call, CommId, Config, Engine, Epoch, OpSeq, Options, Time, WorldSize};
use quinn::Endpoint;
use tokio::runtime::Runtime;

use super::*;
use crate::join::identity::Identity;
use crate::quic::transport::Transport;
use crate::token::Token;

const LONGEST: usize = 1000;

/// A link, and the other end of its connection.
struct Ends {
    runtime: Runtime,
    link: QuicLink,
    bell: Bell,
    peer: Connection,
    _endpoints: [Endpoint; 2],
}

fn ends() -> Ends {
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let token = Token::generate();
    let endpoint = |rank| {
        let identity = Identity::new(&token, Peer(rank), Epoch(0), &Default::default()).unwrap();
        let (mut server, mut client) =
            (identity.server_config().unwrap(), identity.client_config().unwrap());
        let address = SocketAddr::from(([127, 0, 0, 1], 0));
        let transport = Transport::default().to(address);
        server.transport_config(transport.clone());
        client.transport_config(transport);
        let mut endpoint = Endpoint::server(server, address).unwrap();
        endpoint.set_default_client_config(client);
        (endpoint, identity)
    };
    let (connection, peer, endpoints) = runtime.block_on(async {
        let ((here, identity), (there, _)) = (endpoint(0), endpoint(1));
        let connecting =
            there.connect(here.local_addr().unwrap(), &identity.name_of(Peer(0))).unwrap();
        let accepting = async { here.accept().await.unwrap().await.unwrap() };
        let (connection, peer) = tokio::join!(accepting, connecting);
        (connection, peer.unwrap(), [here, there])
    });
    let bell = Bell::new().unwrap();
    let health = Health::new(bell.clone());
    let handle = runtime.handle().clone();
    let (to, from) = (vec![connection.clone()], vec![connection]);
    let connections = Connections { to, from, all: true };
    let mut link = QuicLink::new(connections, Peer(1), LONGEST, bell.clone(), health, handle);
    // As far as any, so that what bounds them shows.
    link.reach.near = false;
    link.shared.ahead.store(MANY_FRAMES, Ordering::Relaxed);
    Ends { runtime, link, bell, peer, _endpoints: endpoints }
}

/// Sends for a second at this rate, in frames of 100 kB: how many connections are in use then.
fn ways_after_a_second(mut demand: Demand, rate: f64) -> usize {
    let (began, frame) = (Instant::now(), 100_000);
    for sent in 0..(rate / frame as f64) as u32 {
        demand.sent(frame, began + Duration::from_secs_f64(f64::from(sent) * frame as f64 / rate));
    }
    demand.ways
}

#[test]
fn only_a_fast_line_takes_more_than_one_connection() {
    for (rate, ways) in [(12e6, 1), (120e6, 1), (200e6, 2), (500e6, 4), (5e9, 4)] {
        assert_eq!(ways_after_a_second(Demand::new(4, false), rate), ways, "{rate} bytes a second");
    }
    assert_eq!(ways_after_a_second(Demand::new(4, true), 12e6), 4, "as was asked for");
    assert_eq!(ways_after_a_second(Demand::new(1, false), 5e9), 1, "there is no other");
}

#[test]
fn how_far_is_read_ahead_follows_from_distance_and_speed() {
    const LONGEST: usize = 128 << 10;
    let frames_after_a_second = |near: bool, rate: f64| {
        let mut reach = Reach::new(near);
        let every = Duration::from_secs_f64(LONGEST as f64 / rate);
        let (start, mut took) = (Instant::now(), Duration::ZERO);
        while took < Duration::from_secs(1) {
            reach.took(LONGEST, LONGEST, start + took);
            took += every;
        }
        reach.frames.load(Ordering::Relaxed)
    };
    let [near, far] = [true, false];
    assert_eq!(frames_after_a_second(near, 8e6), FEW_FRAMES, "a third of 200 Mbit/s");
    assert_eq!(frames_after_a_second(near, 2e9), MANY_FRAMES, "within one host");
    assert!((30..50).contains(&frames_after_a_second(near, 125e6)), "1 Gbit/s");
    assert_eq!(frames_after_a_second(far, 8e6), MANY_FRAMES);
}

#[test]
fn between_neighbours_a_queue_is_not_filled() {
    let [short, long] = [1, 20].map(Duration::from_millis);
    let mut near = Reach::new(true);
    assert_eq!(near.window(4_000_000, short), 4_000_000);
    assert_eq!(near.window(4_000_000, long), 200_000, "most of it waits in a queue");
    let mut far = Reach::new(false);
    assert_eq!(far.window(4_000_000, short), 4_000_000);
    assert_eq!(far.window(4_000_000, long), 4_000_000, "a model of the path made this window");
}

/// What arrives next.
fn next(link: &mut QuicLink, bell: &Bell) -> Result<Arrival, Broken> {
    loop {
        let listening = bell.listen();
        if let Some(arrival) = link.poll_arrived()? {
            return Ok(arrival);
        }
        listening.sleep(Duration::from_millis(100));
    }
}

fn header(payload: usize) -> Header {
    let mut engine = Engine::new(Peer(1), WorldSize::new(2).unwrap(), Config::default());
    let plan = engine.plan(CommId::WORLD, &Call::Barrier, &Options::default()).unwrap();
    engine.submit(Time::ZERO, plan).unwrap();
    Header { payload: payload as u32, ..engine.poll_transmit().unwrap().header }
}

/// A frame as it goes on the wire; its payload is its index.
fn frame(seq: u64, index: u32, last: bool) -> Vec<u8> {
    let header = Header { seq: OpSeq::Collective(seq), index, ..header(LONGEST) };
    [&[last.into()][..], &header.encode(), &[index as u8; LONGEST]].concat()
}

/// Writes frames of one operation for as long as there is room for them.
async fn write_frames(peer: Connection, seq: u64, indices: impl Iterator<Item = u32>, last: u32) {
    let mut stream = peer.open_uni().await.unwrap();
    for index in indices {
        stream.write_all(&frame(seq, index, index == last)).await.unwrap();
    }
    stream.finish().unwrap();
    stream.stopped().await.unwrap();
}

#[test]
fn a_frame_with_a_huge_length_breaks_the_link_and_allocates_nothing() {
    for payload in [LONGEST + 1, u32::MAX as usize] {
        let Ends { runtime, mut link, bell, peer, _endpoints } = ends();
        runtime.block_on(async {
            let mut stream = peer.open_uni().await.unwrap();
            stream.write_all(&[0]).await.unwrap();
            stream.write_all(&header(payload).encode()).await.unwrap();
        });
        assert_eq!(next(&mut link, &bell).unwrap_err(), Broken("a frame is longer than agreed"));
    }
}

#[test]
fn what_nobody_wants_yet_is_bounded_and_holds_up_nothing_that_is_wanted() {
    const EARLY: usize = 200;
    const WANTED: u64 = 9999;
    let Ends { runtime, mut link, bell, peer, _endpoints } = ends();
    let held = |link: &QuicLink| link.incoming.values().map(|lane| lane.len()).sum::<usize>();
    for seq in 0..EARLY {
        runtime.spawn(write_frames(peer.clone(), seq as u64, 0..16, 15));
    }
    while held(&link) < EARLY + SPARE_FRAMES {
        let listening = bell.listen();
        if link.poll_arrived().unwrap().is_none() {
            listening.sleep(Duration::from_millis(100));
        }
    }
    let frames = 100;
    runtime.spawn(write_frames(peer.clone(), WANTED, (0..frames).step_by(2), frames - 1));
    runtime.spawn(write_frames(peer, WANTED, (1..frames).step_by(2), frames - 1));
    for _ in 0..frames {
        let Ok(Arrival::Frame(lane)) = next(&mut link, &bell) else {
            panic!("only frames are sent")
        };
        assert_eq!(lane.seq, OpSeq::Collective(WANTED), "there is no room for others");
        link.pop(&lane);
    }
    assert_eq!(held(&link), EARLY + SPARE_FRAMES);
    assert_eq!(link.incoming.len(), EARLY, "a lane is forgotten with its last frame");
    assert_eq!(link.shared.lanes().len(), EARLY);
}

#[test]
fn frames_that_overtake_others_wait_for_them() {
    let Ends { runtime, mut link, bell, peer, _endpoints } = ends();
    let write = |indices: &'static [u32]| {
        runtime.block_on(write_frames(peer.clone(), 5, indices.iter().copied(), 4));
    };
    write(&[2, 3]);
    write(&[1, 4]);
    while link.incoming.values().next().is_none_or(|lane| lane.len() < 4) {
        let listening = bell.listen();
        assert!(link.poll_arrived().unwrap().is_none(), "the first is not here");
        listening.sleep(Duration::from_millis(100));
    }
    write(&[0]);
    let Ok(Arrival::Frame(lane)) = next(&mut link, &bell) else { panic!("only frames are sent") };
    for index in 0..5 {
        let (header, body) = link.head(&lane).unwrap();
        assert_eq!((header.index, body[0]), (index, index as u8));
        link.pop(&lane);
    }
    assert!(link.head(&lane).is_none());
    assert!(link.incoming.is_empty());
}

#[test]
fn a_frame_that_comes_twice_breaks_the_link() {
    for indices in [[1, 1], [0, 0]] {
        let Ends { runtime, mut link, bell, peer, _endpoints } = ends();
        runtime.block_on(async {
            for index in indices {
                let mut stream = peer.open_uni().await.unwrap();
                stream.write_all(&frame(5, index, false)).await.unwrap();
                stream.finish().unwrap();
            }
        });
        let broken = loop {
            match next(&mut link, &bell) {
                Ok(Arrival::Frame(lane)) => link.pop(&lane),
                Ok(other) => panic!("{other:?}"),
                Err(broken) => break broken,
            }
        };
        assert_eq!(broken, Broken("a frame came twice"));
    }
}

/// One stream's window must not limit what one operation has under way.
#[test]
fn a_lane_is_spread_over_streams() {
    let Ends { runtime, mut link, peer, _endpoints, .. } = ends();
    peer.set_max_concurrent_uni_streams(STREAMS);
    let header = Header { seq: OpSeq::Collective(1), ..header(LONGEST) };
    let lane = Lane::of(Peer(0), &header);
    for index in 0..4 {
        assert!(link.send(Some(lane), &Header { index, ..header }, &[0; LONGEST], index == 3));
    }
    link.close(); // which ends the stream of notices
    let indices = runtime.block_on(async {
        let mut indices = Vec::new();
        for _ in 0..3 {
            let mut stream = peer.accept_uni().await.unwrap();
            let bytes = stream.read_to_end(usize::MAX).await.unwrap();
            let frames = bytes.chunks(1 + HEADER_LEN + LONGEST);
            indices.push(frames.map(|frame| Header::decode(&frame[1..]).unwrap().index).collect());
        }
        indices
    });
    let mut indices: Vec<Vec<u32>> = indices;
    indices.sort();
    assert_eq!(indices, [vec![], vec![0, 2], vec![1, 3]]);
}

/// What came of a lane that the peer has given up is dropped, and others have its room.
#[test]
fn a_lane_that_its_sender_gives_up_holds_nothing() {
    let Ends { runtime, mut link, bell, peer, _endpoints } = ends();
    // No frame is the first of its lane, so all of them need room to spare, and some find none.
    let mut streams: Vec<_> = runtime.block_on(async {
        let mut streams = Vec::new();
        for seq in 0..8 {
            let mut stream = peer.open_uni().await.unwrap();
            for index in 1..=100 {
                stream.write_all(&frame(seq, index, false)).await.unwrap();
            }
            streams.push(stream);
        }
        streams
    });
    let wait_for = |link: &mut QuicLink, holds: &dyn Fn(&QuicLink) -> bool| {
        while !holds(link) {
            let listening = bell.listen();
            assert!(link.poll_arrived().unwrap().is_none(), "none is the next of its lane");
            listening.sleep(Duration::from_millis(100));
        }
    };
    wait_for(&mut link, &|link| link.shared.spare.available_permits() == 0);
    streams.iter_mut().for_each(|stream| stream.reset(VarInt::from_u32(0)).unwrap());
    runtime.block_on(async {
        for seq in 0..8 {
            let mut stream = peer.open_uni().await.unwrap();
            let frame = frame(seq, 1, false);
            stream.write_all(&[&[GIVEN_UP], &frame[1..=HEADER_LEN]].concat()).await.unwrap();
            stream.finish().unwrap();
        }
    });
    // What was being read meanwhile is dropped a little later.
    wait_for(&mut link, &|link| {
        link.incoming.is_empty()
            && link.shared.lanes().is_empty()
            && link.shared.spare.available_permits() == SPARE_FRAMES
    });
}

/// What quinn notes of those who wait must be gone when a stream is read to its end: it asserts so.
#[test]
fn a_stream_that_had_to_wait_is_read_to_its_end() {
    let Ends { runtime, mut link, bell, peer, _endpoints } = ends();
    let far_ahead = MANY_FRAMES + 50;
    runtime.block_on(async {
        let mut stream = peer.open_uni().await.unwrap();
        stream.write_all(&frame(5, far_ahead, true)).await.unwrap();
        stream.finish().unwrap();
    });
    let waits = |progress: &Progress| progress.waiting.contains_key(&far_ahead);
    while !link.shared.lanes().values().any(waits) {
        bell.listen().sleep(Duration::from_millis(1));
    }
    runtime.spawn(write_frames(peer.clone(), 5, 0..far_ahead, far_ahead));
    let mut popped = 0;
    while popped <= far_ahead {
        let Ok(Arrival::Frame(lane)) = next(&mut link, &bell) else { panic!("all is well") };
        while link.head(&lane).is_some() {
            link.pop(&lane);
            popped += 1;
        }
    }
    // A task that panics does not come to count itself out.
    let reading = || link.shared.reading.load(Ordering::SeqCst);
    for _ in 0..1000 {
        let listening = bell.listen();
        if reading() == 0 {
            break;
        }
        listening.sleep(Duration::from_millis(10));
    }
    assert_eq!(reading(), 0, "both streams are read to their ends");
}

#[test]
fn giving_a_lane_up_resets_its_streams_and_says_so() {
    let Ends { runtime, mut link, bell, peer, _endpoints } = ends();
    peer.set_max_concurrent_uni_streams(STREAMS);
    let header = Header { seq: OpSeq::Collective(1), ..header(LONGEST) };
    let lane = Lane::of(Peer(0), &header);
    for index in 0..4 {
        assert!(link.send(Some(lane), &Header { index, ..header }, &[0; LONGEST], false));
    }
    while link.shared.writable.lock().unwrap().len() < 4 {
        bell.listen().sleep(Duration::from_millis(1));
    }
    link.abandon(lane.comm, Some(lane.seq));
    link.close(); // which ends the stream of notices
    let reset = runtime.block_on(async {
        let (mut reset, mut said) = (0, 0);
        for _ in 0..4 {
            let mut stream = peer.accept_uni().await.unwrap();
            match stream.read_to_end(usize::MAX).await {
                Ok(bytes) => said += usize::from(bytes.first() == Some(&GIVEN_UP)),
                Err(quinn::ReadToEndError::Read(quinn::ReadError::Reset(_))) => reset += 1,
                Err(end) => panic!("{end}"),
            }
        }
        (reset, said)
    });
    assert_eq!(reset, (2, 1));
    assert!(link.outgoing.is_empty());
}

#[test]
fn notices_to_a_peer_that_has_left_do_not_wait_for_room() {
    let Ends { runtime: _runtime, mut link, peer, _endpoints, .. } = ends();
    peer.close(VarInt::from_u32(0), b"left");
    let notice = Header::of_members(3);
    // Some fit into the queue; then the stream is found to have ended, and none is held back.
    let all_go = |link: &mut QuicLink| (0..10).all(|_| link.send(None, &notice, b"who", false));
    let end = Instant::now() + Duration::from_secs(20);
    while !all_go(&mut link) {
        assert!(Instant::now() < end, "notices wait for one that will never read them");
        std::thread::sleep(Duration::from_millis(5));
    }
}
