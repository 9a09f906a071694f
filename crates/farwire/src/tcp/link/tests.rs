use std::net::{Ipv4Addr, SocketAddr, TcpListener};

use farwire_proto::{Call, Config, Engine, Epoch, Options, Time, WorldSize};
use tokio::runtime::Runtime;

use super::*;
use crate::join::identity::Identity;
use crate::link::Wanted;
use crate::tcp::port::{TcpPort, TcpSettings};
use crate::token::Token;

const LONGEST: usize = 1000;

/// Two processes with a connection each way: rank 1 has connected to rank 0.
struct Network {
    runtime: Runtime,
    ends: [Vec<Secured>; 2],
    workers: Arc<Workers>,
}

fn network() -> Network {
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let token = Token::generate();
    let inside = runtime.enter();
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let address = listener.local_addr().unwrap();
    let port = |rank, listener| {
        let identity = Identity::new(&token, Peer(rank), Epoch(0), &Default::default()).unwrap();
        let (local, settings) = (Ipv4Addr::LOCALHOST.into(), TcpSettings::default());
        TcpPort::open(listener, local, Arc::new(identity), settings, Arc::default()).unwrap()
    };
    let (zero, one) = (port(0, Ok(listener)), port(1, Err("it only connects".to_owned())));
    let ends = runtime.block_on(async {
        let expecting = zero.expect(Peer(1)).unwrap();
        let mut dialled = Vec::new();
        for index in 0..2 {
            let dial = one.dial(address, Peer(1), Peer(0), expecting.ticket, index);
            dialled.push(dial.await.unwrap());
        }
        [expecting.connections(2).await.unwrap(), dialled]
    });
    drop(inside);
    Network { runtime, ends, workers: Workers::new().unwrap() }
}

impl Network {
    /// Rank 0's link, and what rank 1 could say on the connections of one.
    fn with_raw_peer(self) -> (Side, Raw) {
        let [zero, one] = self.ends;
        let here = Side::new(zero, false, Peer(1), self.workers);
        (here, Raw { runtime: self.runtime, connections: one })
    }

    fn links(self) -> (Side, Side, Runtime) {
        let [zero, one] = self.ends;
        let zero = Side::new(zero, false, Peer(1), self.workers.clone());
        (zero, Side::new(one, true, Peer(0), self.workers), self.runtime)
    }
}

struct Side {
    link: TcpLink,
    bell: Bell,
    health: Arc<Health>,
}

impl Side {
    fn new(connections: Vec<Secured>, dialled: bool, peer: Peer, workers: Arc<Workers>) -> Self {
        let bell = Bell::new().unwrap();
        let health = Health::new(bell.clone());
        let ends = Ends::new(connections, dialled);
        let pair = Pair {
            me: Peer(1 - peer.0),
            peer,
            same_host: true,
            payload: LONGEST,
            bell: bell.clone(),
            connections: Wanted::ONE,
            met: None,
        };
        let link = TcpLink::new(ends, &pair, health.clone(), workers);
        Self { link: link.unwrap(), bell, health }
    }

    /// Waits until something is so, and reads meanwhile. Nothing that ends a lane's wait may come.
    fn wait_for<T>(&mut self, mut found: impl FnMut(&mut TcpLink) -> Option<T>) -> T {
        loop {
            let listening = self.bell.listen();
            if let Some(found) = found(&mut self.link) {
                return found;
            }
            listening.sleep(Duration::from_millis(100));
        }
    }

    fn next(&mut self) -> Result<Arrival, Broken> {
        self.wait_for(|link| link.poll_arrived().transpose())
    }

    fn next_lane(&mut self) -> Lane {
        match self.next() {
            Ok(Arrival::Frame(lane)) => lane,
            other => panic!("{other:?}"),
        }
    }
}

/// A peer that says what it likes.
struct Raw {
    runtime: Runtime,
    /// The first carries its data.
    connections: Vec<Secured>,
}

impl Raw {
    fn say(&mut self, bytes: &[u8]) {
        let Secured { socket, session } = &mut self.connections[0];
        session.seal(bytes).unwrap();
        let _ = self.runtime.block_on(session.flush(socket)); // unless the other side has gone
    }
}

fn header(seq: u64, index: u32, payload: usize) -> Header {
    let mut engine = Engine::new(Peer(1), WorldSize::new(2).unwrap(), Config::default());
    let plan = engine.plan(CommId::WORLD, &Call::Barrier, &Options::default()).unwrap();
    engine.submit(Time::ZERO, plan).unwrap();
    let header = engine.poll_transmit().unwrap().header;
    Header { seq: OpSeq::Collective(seq), index, payload: payload as u32, ..header }
}

/// A frame as it goes on the wire; its payload is its index.
fn frame(seq: u64, index: u32, last: bool) -> Vec<u8> {
    let header = header(seq, index, LONGEST);
    [&[if last { LAST } else { FRAME }][..], &header.encode(), &[index as u8; LONGEST]].concat()
}

/// What there is of a lane that rank 0 has.
fn held(link: &TcpLink) -> usize {
    link.incoming.values().map(|lane| lane.frames.len()).sum()
}

#[test]
fn messages_are_the_same_however_the_bytes_are_cut() {
    let messages = [
        frame(5, 0, false),
        [&[FRAME][..], &header(6, 0, 0).encode()].concat(),
        [&[GIVEN_UP][..], &header(7, 0, 0).encode()].concat(),
        [&[TAKEN][..], &header(5, 0, 0).encode(), &77u64.to_le_bytes()].concat(),
        [&[TAKEN_ALL][..], &99u64.to_le_bytes()].concat(),
        frame(5, 1, true),
        vec![END],
        vec![HEARD],
    ];
    let bytes = messages.concat();
    let read = |cut: usize| {
        let (side, _raw) = network().with_raw_peer();
        let mut reader = Reader::new(&side.link.shared, 0);
        for piece in bytes.chunks(cut) {
            reader.feed(piece).unwrap();
        }
        assert_eq!((reader.ended, reader.heard, reader.frames), (true, true, 3));
        assert_eq!(side.link.shared.taken_all.load(Ordering::SeqCst), 99);
        format!("{:?}", reader.news)
    };
    let whole = read(bytes.len());
    for cut in [1, 7, 64, 65, 66, 1000] {
        assert_eq!(read(cut), whole, "pieces of {cut}");
    }
}

#[test]
fn bytes_that_are_no_message_break_the_link() {
    let longer = [&[FRAME][..], &header(5, 0, LONGEST + 1).encode()].concat();
    let longest = [&[FRAME][..], &header(5, 0, u32::MAX as usize).encode()].concat();
    let no_header = vec![FRAME; 1 + HEADER_LEN];
    let cases = [
        (longer, "a frame is longer than agreed"),
        (longest, "a frame is longer than agreed"),
        (no_header, "a frame has no header"),
        (vec![HEARD + 1], "a message of a kind that does not exist"),
        ([frame(5, 1, false), frame(5, 1, false)].concat(), "a frame came twice"),
    ];
    for (bytes, expected) in cases {
        let (mut here, mut peer) = network().with_raw_peer();
        peer.say(&bytes);
        assert_eq!(here.next().unwrap_err(), Broken(expected));
    }
}

#[test]
fn a_lane_that_sends_more_than_its_window_breaks_the_link() {
    let (mut here, mut peer) = network().with_raw_peer();
    let frames = LONGEST_LANE_WINDOW / cost(LONGEST) + 3;
    for index in 0..frames as u32 {
        peer.say(&frame(5, index, false));
    }
    let broken = loop {
        match here.next() {
            Ok(Arrival::Frame(_)) => {}
            Ok(other) => panic!("{other:?}"),
            Err(broken) => break broken,
        }
    };
    assert_eq!(broken, Broken("a lane has more under way than its window"));
}

#[test]
fn what_nobody_takes_is_bounded_and_holds_up_nothing_that_is_wanted() {
    const EARLY: u64 = 3;
    const WANTED: u64 = 9;
    let (mut here, mut there, _runtime) = network().links();
    let lane = |seq| Lane::of(Peer(1), &header(seq, 0, LONGEST));
    let send = |there: &mut Side, seq, index, last| {
        let header = header(seq, index, LONGEST);
        there.link.send(Some(lane(seq)), &header, &[index as u8; LONGEST], last)
    };
    // Until its window is full; that it waits for room in between is no matter.
    let in_window = LANE_WINDOW.div_ceil(cost(LONGEST)) as u32;
    for seq in 0..EARLY {
        let mut index = 0;
        loop {
            if send(&mut there, seq, index, false) {
                index += 1;
            } else if there.link.is_refused.contains(&lane(seq)) {
                there.wait_for(|link| link.poll_writable().unwrap());
            } else {
                break;
            }
        }
        assert_eq!(index, in_window);
    }
    // All of it comes, and stays.
    here.wait_for(|link| {
        let _ = link.poll_arrived().unwrap();
        (held(link) as u64 == EARLY * u64::from(in_window)).then_some(())
    });
    // What is wanted gets through, all of it, and is forgotten.
    let frames = 3 * in_window;
    let mut sent = 0;
    for taken in 0..frames {
        let (header, payload) = loop {
            while sent < frames && send(&mut there, WANTED, sent, sent + 1 == frames) {
                sent += 1;
            }
            let _ = there.link.poll_arrived().unwrap(); // how far it was taken
            let _ = there.link.poll_writable().unwrap();
            let _ = here.link.poll_arrived().unwrap();
            if let Some((header, payload)) = here.link.head(&lane(WANTED)) {
                break (header, payload);
            }
        };
        assert_eq!((header.index, payload[0]), (taken, taken as u8));
        here.link.pop(&lane(WANTED));
    }
    assert_eq!(here.link.incoming.len() as u64, EARLY, "a lane is forgotten with its last frame");
    assert_eq!(there.link.outgoing.len() as u64, EARLY);
    // A lane whose frames are taken after all goes on.
    for _ in 0..in_window {
        here.link.pop(&lane(0));
    }
    let writable = there.wait_for(|link| {
        let _ = link.poll_arrived().unwrap();
        link.poll_writable().unwrap()
    });
    assert_eq!(writable, lane(0));
    assert!(send(&mut there, 0, in_window, false));
}

#[test]
fn frames_that_overtake_others_wait_for_them() {
    let (mut here, mut peer) = network().with_raw_peer();
    for index in [2, 3, 1, 4] {
        peer.say(&frame(5, index, index == 4));
    }
    here.wait_for(|link| {
        assert!(link.poll_arrived().unwrap().is_none(), "the first is not here");
        (held(link) == 4).then_some(())
    });
    peer.say(&frame(5, 0, false));
    let lane = here.next_lane();
    for index in 0..5 {
        let (header, body) = here.link.head(&lane).unwrap();
        assert_eq!((header.index, body[0]), (index, index as u8));
        here.link.pop(&lane);
    }
    assert!(here.link.head(&lane).is_none() && here.link.incoming.is_empty());
    assert_eq!(here.link.shared.held.load(Ordering::SeqCst), 0);
}

#[test]
fn a_lane_that_its_sender_gives_up_holds_nothing() {
    let (mut here, mut there, _runtime) = network().links();
    let lane = Lane::of(Peer(1), &header(5, 0, LONGEST));
    for index in 0..4 {
        assert!(there.link.send(Some(lane), &header(5, index, LONGEST), &[0; LONGEST], false));
    }
    here.next_lane();
    there.link.abandon(lane.comm, Some(lane.seq));
    assert!(there.link.outgoing.is_empty());
    here.wait_for(|link| {
        let _ = link.poll_arrived().unwrap();
        link.incoming.is_empty().then_some(())
    });
    assert_eq!(here.link.shared.held.load(Ordering::SeqCst), 0);
}

#[test]
fn a_peer_whose_connection_ends_without_a_word_is_lost() {
    let (mut here, mut peer) = network().with_raw_peer();
    peer.say(&frame(5, 0, false));
    here.next_lane();
    drop(peer);
    here.wait_for(|link| link.poll_arrived().is_err().then_some(()));
    assert!(here.health.loss().unwrap().contains("TCP connection"), "{:?}", here.health.loss());
    assert!(!Liveness::ended(&*here.health), "a connection proves nothing about a process");
}

#[test]
fn a_peer_that_is_given_up_learns_that_its_link_is_gone() {
    let (mut here, mut there, _runtime) = network().links();
    there.link.give_up();
    here.wait_for(|link| link.poll_arrived().is_err().then_some(()));
    assert!(!Liveness::ended(&*here.health));
}

/// All that was sent has arrived when this side says goodbye, and the end of the connections is no
/// loss.
#[test]
fn a_link_that_is_closed_delivers_all_and_is_not_lost() {
    let (mut here, mut there, runtime) = network().links();
    let lane = Lane::of(Peer(1), &header(5, 0, LONGEST));
    for index in 0..100 {
        let header = header(5, index, LONGEST);
        assert!(there.link.send(Some(lane), &header, &[0; LONGEST], index == 99));
    }
    there.link.close();
    let Side { link, health, .. } = there;
    drop(link);
    runtime.block_on(health.told_to_leave());
    assert_eq!(here.link.shared.received.load(Ordering::SeqCst), 100);
    let mut frames = 0;
    while frames < 100 {
        let lane = here.next_lane();
        while here.link.head(&lane).is_some() {
            here.link.pop(&lane);
            frames += 1;
        }
    }
    // Both of its connections end now.
    here.wait_for(|link| {
        assert!(link.poll_arrived().unwrap().is_none());
        (Arc::strong_count(&link.shared) == 1).then_some(())
    });
    assert_eq!(here.health.loss(), None);
}

#[test]
fn only_the_holder_of_a_ticket_with_the_right_certificate_gets_in() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let token = Token::generate();
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let address: SocketAddr = listener.local_addr().unwrap();
        let port = |token: &Token, rank, job: &str, listener| {
            let job = crate::join::job::JobName::new(job).unwrap();
            let identity = Identity::new(token, Peer(rank), Epoch(0), &job).unwrap();
            let (local, settings) = (Ipv4Addr::LOCALHOST.into(), TcpSettings::default());
            TcpPort::open(listener, local, Arc::new(identity), settings, Arc::default()).unwrap()
        };
        let deaf = || Err("it only connects".to_owned());
        let zero = port(&token, 0, "here", Ok(listener));
        let expecting = zero.expect(Peer(1)).unwrap();
        let ticket = expecting.ticket;
        let cases = [
            ("another token", port(&Token::generate(), 1, "here", deaf()), 1, 0, ticket),
            ("another job", port(&token, 1, "there", deaf()), 1, 0, ticket),
            ("another rank", port(&token, 2, "here", deaf()), 2, 0, ticket),
            ("another rank that lies", port(&token, 2, "here", deaf()), 1, 0, ticket),
            ("another ticket", port(&token, 1, "here", deaf()), 1, 0, ticket ^ 1),
            ("it looks for another rank", port(&token, 1, "here", deaf()), 1, 2, ticket),
        ];
        for (case, port, me, peer, ticket) in cases {
            let dialled = port.dial(address, Peer(me), Peer(peer), ticket, 0).await;
            assert!(dialled.is_err(), "{case}");
        }
        let right = port(&token, 1, "here", deaf());
        right.dial(address, Peer(1), Peer(0), ticket, 0).await.unwrap();
        assert_eq!(expecting.connections(1).await.unwrap().len(), 1);
        // Nobody waits for it any more.
        assert!(right.dial(address, Peer(1), Peer(0), ticket, 0).await.is_err());
    });
}
