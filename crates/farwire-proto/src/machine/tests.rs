//! The machine on its own: frames that wait for room, and nonsense that is found late. Orders of
//! events are explored by `farwire-sim`.

use super::*;
use crate::dtype::ReduceOp;
use crate::engine::Config;
use crate::header::FrameKind;
use crate::ids::{Rank, WorldSize};

#[derive(Debug)]
struct Vectors;

impl Buffers for Vectors {
    type Buffer = Vec<u8>;

    fn take(&mut self, dtype: DType, len: usize) -> Vec<u8> {
        vec![0; len * dtype.size()]
    }

    fn give(&mut self, _: Vec<u8>) {}
}

/// One round, in which every parcel is the byte 1.
#[derive(Debug, Default)]
struct Ones {
    made: u32,
    came: u32,
}

impl Rounds for Ones {
    fn next_parcels(&mut self) -> Option<Vec<Bytes>> {
        (self.made == 0).then(|| {
            self.made = 1;
            vec![Bytes::from_static(&[1]); 2]
        })
    }

    fn made(&self) -> u32 {
        self.made
    }

    fn came(&mut self, round: u32, parcels: &[Vec<u8>]) -> Result<(), Nonsense> {
        let wrong = |from: &usize| *from != 0 && parcels[*from] != [1];
        match (0..2).find(wrong) {
            Some(from) => {
                Err(Nonsense { from: Rank(from as u32), round, why: "it is not 1".into() })
            }
            None => {
                self.came = 1;
                Ok(())
            }
        }
    }

    fn is_finished(&self) -> bool {
        self.came == 1
    }
}

type Ends = Vec<Result<Vec<u8>, Fault>>;

/// Rank 0 of two, and what it has sent.
struct Place {
    machine: Machine<Vectors, Ones, ()>,
    sent: Vec<(Header, Vec<u8>)>,
    /// Whether links have room.
    room: bool,
    ends: Ends,
    wants: Vec<OpId>,
}

impl Place {
    fn new() -> Self {
        let world = WorldSize::new(2).unwrap();
        let config = Config { credit: std::num::NonZeroU32::new(3).unwrap(), ..Config::default() };
        let machine = Machine::new(Engine::new(Peer(0), world, config), Vectors);
        Self { machine, sent: Vec::new(), room: true, ends: Vec::new(), wants: Vec::new() }
    }

    fn submit(&mut self, call: &Call, input: Input<Vec<u8>, Ones>) -> OpId {
        let options = Options { segment: std::num::NonZeroUsize::new(4), ..Options::default() };
        let plan = self.machine.plan(CommId::WORLD, call, &options).unwrap();
        let op = self.machine.submit(Time::ZERO, plan, input, |_, _| ()).unwrap();
        self.settle();
        op
    }

    fn settle(&mut self) {
        while let Some(transmit) = self.machine.poll_transmit() {
            self.send(transmit);
        }
        while let Some(event) = self.machine.poll_event() {
            match event {
                MachineEvent::Ended { end, .. } => {
                    self.ends.push(end.map_err(|(failure, _)| failure.error.fault));
                }
                MachineEvent::WantsCoding(op) => self.wants.push(op),
                MachineEvent::CommFailed { .. } => {}
            }
        }
    }

    fn send(&mut self, transmit: Transmit) -> bool {
        let (room, sent) = (self.room, &mut self.sent);
        self.machine.send(transmit, |frame| {
            if room {
                sent.push((*frame.header, frame.payload.to_vec()));
            }
            room
        })
    }

    fn retry(&mut self, lane: Lane) {
        while let Some(transmit) = self.machine.poll_held(Peer(1), lane) {
            if self.send(transmit) {
                break;
            }
        }
        self.settle();
    }

    fn coding(&mut self, op: OpId) -> Option<Nonsense> {
        match self.machine.take_coding(op)? {
            Coding::Finish { .. } => panic!("it cannot be finished"),
            Coding::Work(mut work) => {
                let mut made = Vec::new();
                let nonsense = work.run(|round, parcels| made.push((round, parcels))).err();
                made.into_iter()
                    .for_each(|(round, parcels)| self.machine.supply(op, round, parcels));
                let found =
                    nonsense.as_ref().map(|nonsense| Nonsense { why: "".into(), ..*nonsense });
                self.machine.give_back(op, work.rounds, nonsense);
                self.settle();
                found
            }
        }
    }
}

fn message(len: usize) -> (Call, Input<Vec<u8>, Ones>) {
    let (to, tag, dtype) = (Rank(1), crate::ids::Tag(0), DType::U8);
    (Call::Send { to, tag, count: len, dtype }, Input::Buffer((0..len as u8).collect()))
}

fn lane(seq: OpSeq) -> Lane {
    Lane { from: Peer(0), comm: CommId::WORLD, seq }
}

#[test]
fn frames_that_found_no_room_go_in_order() {
    let mut place = Place::new();
    place.room = false;
    let (call, input) = message(30);
    place.submit(&call, input);
    assert!(place.sent.is_empty() && place.machine.needs(Peer(1)));
    let lane = lane(OpSeq::Message(crate::ids::Tag(0), 0));
    place.retry(lane); // still no room
    place.room = true;
    place.retry(lane);
    let sent: Vec<u8> = place.sent.iter().flat_map(|(_, payload)| payload.clone()).collect();
    assert_eq!(sent, (0..30).collect::<Vec<u8>>());
    assert_eq!(place.ends, [Ok(Vec::new())]);
}

#[test]
fn a_message_that_is_given_up_sends_no_frame_after_its_notice() {
    let mut place = Place::new();
    place.room = false;
    let (call, input) = message(30);
    place.submit(&call, input);
    place.room = true;
    place.machine.handle_timeout(Time::MAX);
    place.settle();
    place.retry(lane(OpSeq::Message(crate::ids::Tag(0), 0)));
    let sent: Vec<_> = place.sent.iter().map(|(header, _)| header.frame).collect();
    assert_eq!(sent, [FrameKind::Void]);
    assert!(!place.machine.needs(Peer(1)) && place.machine.is_idle());
}

/// All frames have moved, so the communicator could be forgotten; what came makes no sense.
#[test]
fn nonsense_that_is_found_after_the_communicator_was_closed_ends_the_operation() {
    let mut place = Place::new();
    let call = Box::new(Call::AllReduce { count: 1, dtype: DType::F32, op: ReduceOp::Sum });
    let call = Call::Coded { call, codec: std::num::NonZeroU32::MIN, rounds: 1, max: 10 };
    let op = place.submit(&call, Input::Rounds(Box::default()));
    assert_eq!(std::mem::take(&mut place.wants), [op]);
    assert!(place.coding(op).is_none());
    // The other rank's parcel has the length of this one's, so its frame has the same header.
    let (header, _) = place.sent[0];
    let Verdict::Take(take) = place.machine.handle_frame(Peer(1), &header) else {
        panic!("it is due")
    };
    assert!(place.machine.handle_taken(take, &[9]).is_some());
    place.settle();
    place.machine.close(CommId::WORLD);
    assert_eq!(place.machine.engine().waits(), []);
    assert!(place.coding(op).is_some());
    assert_eq!(place.ends, [Err(Fault::BadFrame(Peer(1)))]);
    assert!(place.machine.is_idle());
}
