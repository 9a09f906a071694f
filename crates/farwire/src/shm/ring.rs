//! A one-way ring of frames in shared memory.
//!
//! ```text
//!  sender                                         receiver
//!  takes a free slot, copies header and payload
//!  publishes its number ──── published ring ────▶ sorts it to its lane
//!                                                 reads the payload in place, whenever the engine wants it
//!  frees it             ◀─── returned ring ────── returns its number
//! ```
//!
//! Slots come back in any order, so a frame that has to wait blocks no other lane. Frames that may
//! wait for long, since the receiver has not called their operation, are copied out when they take
//! too many slots; the engine makes sure that they do not fill the memory instead. The sender takes
//! the most recently freed slot first, which is still in the cache. `slots.rs` decides who may
//! access a slot, and refuses numbers that make no sense. Headers are copied out before they are
//! looked at, and checked before they are used.

use std::collections::VecDeque;
use std::io;
use std::os::fd::OwnedFd;

use farwire_proto::team::Teamed;
use farwire_proto::{HEADER_LEN, Header, Lane, Peer, Spare, Team};
use rustc_hash::{FxHashMap as HashMap, FxHashSet as HashSet};

use super::region::Region;
use super::slots::{self, End, Receiving, Sending, Slot};
use crate::link::{Arrival, Broken};

/// Frames that can be on their way.
const SLOTS: usize = 256;
/// Slots that only lanes without a frame on its way may take, so that one operation cannot keep the
/// others out.
const RESERVE: usize = SLOTS / 2;
/// Slots that only notices may take. These are read as soon as they arrive, so they always get
/// through.
const NOTICES: usize = 8;
/// Slots that may hold frames for operations which the receiver has not called; more are copied
/// out.
const EARLY: usize = SLOTS / 4;
/// Frames of one lane that can be on their way.
const WINDOW: usize = 8;

/// Memory for a ring whose frames carry up to `payload` bytes.
pub(crate) fn region(payload: usize) -> io::Result<Region> {
    Region::new(slots::words(SLOTS), SLOTS * slot_stride(payload))
}

/// The same memory, from the process that made it.
pub(crate) fn region_from(file: OwnedFd, payload: usize) -> io::Result<Region> {
    Region::from_file(file, slots::words(SLOTS), SLOTS * slot_stride(payload))
}

/// Bytes of a cache line.
const LINE: usize = 64;

/// Slots start on a cache line.
fn slot_stride(payload: usize) -> usize {
    HEADER_LEN + LINE + payload.next_multiple_of(LINE)
}

/// How far behind the header a payload begins: less than a [`LINE`], and such that the slot lies
/// whole cache lines from the sender's memory and, as memory for large vectors is laid out, from
/// the receiver's too. Processors copy faster then, some by half.
fn behind_header(payload: &[u8]) -> u8 {
    (payload.as_ptr().addr() % LINE) as u8
}

/// Both ends of a ring, for two threads of this process.
pub(crate) fn pair(region: Region, payload: usize, from: Peer) -> (Sender, Receiver) {
    let ((end, free), other) = slots::pair(region, slot_stride(payload));
    (Sender::over(end, free, payload), Receiver::over(other, payload, from))
}

/// The sending end.
#[derive(Debug)]
pub(crate) struct Sender {
    end: End<Region, Sending, SLOTS>,
    payload: usize,
    free: Vec<Slot<Sending>>,
    /// Whose frame is in each slot; `None` for news of a failure, which belongs to no lane.
    lane_of: Vec<Option<Lane>>,
    on_its_way: HashMap<Lane, usize>,
    /// Lanes that were told to wait.
    refused: HashSet<Lane>,
    writable: VecDeque<Lane>,
    /// What the receiver has done that makes no sense, if anything.
    broken: Option<Broken>,
    team: Teamed,
}

impl Sender {
    /// The end towards another process.
    pub(crate) fn new(region: Region, payload: usize) -> Self {
        let (end, free) = slots::sending(region, slot_stride(payload));
        Self::over(end, free, payload)
    }

    fn over(
        end: End<Region, Sending, SLOTS>,
        mut free: Vec<Slot<Sending>>,
        payload: usize,
    ) -> Self {
        free.reverse();
        Self {
            end,
            payload,
            free,
            lane_of: vec![None; SLOTS],
            on_its_way: HashMap::default(),
            refused: HashSet::default(),
            writable: VecDeque::new(),
            broken: None,
            team: None,
        }
    }

    /// Lets these threads help with long copies.
    pub(crate) fn set_team(&mut self, team: &'static dyn Team) {
        self.team = Some(team);
    }

    /// Publishes a frame; `false` if its lane has to wait until
    /// [`poll_writable`](Self::poll_writable) names it.
    ///
    /// # Panics
    ///
    /// If the payload is longer than the ring was made for.
    pub(crate) fn send(&mut self, lane: Option<Lane>, header: &Header, payload: &[u8]) -> bool {
        assert!(payload.len() <= self.payload, "a segment fits a slot");
        self.reclaim();
        let first = lane.is_none_or(|lane| !self.on_its_way.contains_key(&lane));
        let full = lane
            .is_some_and(|lane| self.on_its_way.get(&lane).is_some_and(|frames| *frames >= WINDOW));
        let reserve = match lane {
            None => 0,
            Some(_) if first => NOTICES,
            Some(_) => RESERVE,
        };
        if full || self.free.len() <= reserve {
            self.refused.extend(lane);
            return false;
        }
        let mut slot = self.free.pop().expect("at least one is free");
        let behind = behind_header(payload);
        self.end.write(&mut slot, 0, &header.encode(), None);
        self.end.write(&mut slot, HEADER_LEN + usize::from(behind), payload, self.team);
        self.lane_of[slot.number()] = lane;
        if let Some(lane) = lane {
            *self.on_its_way.entry(lane).or_insert(0) += 1;
        }
        self.end.pass(slot, behind);
        true
    }

    /// A lane that had to wait and may try again.
    pub(crate) fn poll_writable(&mut self) -> Result<Option<Lane>, Broken> {
        if !self.refused.is_empty() {
            self.reclaim();
        }
        if let Some(broken) = self.broken {
            return Err(broken);
        }
        Ok(self.writable.pop_front())
    }

    /// Takes slots that have come back. This is done when one is wanted, and not in every turn:
    /// looking means fetching a cache line, and the slot that came back last is the one still in
    /// the cache.
    fn reclaim(&mut self) {
        loop {
            let slot = match self.end.take() {
                Ok(Some((slot, _))) => slot,
                Ok(None) => return,
                Err(broken) => return self.broken = Some(broken),
            };
            if let Some(lane) = self.lane_of[slot.number()].take() {
                let frames = self
                    .on_its_way
                    .get_mut(&lane)
                    .expect("lanes are counted while they have a slot");
                *frames -= 1;
                if *frames == 0 {
                    self.on_its_way.remove(&lane);
                }
            }
            self.free.push(slot);
            self.writable.extend(self.refused.drain());
        }
    }

    /// Says that nothing more will be sent.
    pub(crate) fn close(&self) {
        self.end.close();
    }

    /// Says that the receiver was given up.
    pub(crate) fn give_up(&self) {
        self.end.give_up();
    }
}

/// The receiving end.
#[derive(Debug)]
pub(crate) struct Receiver {
    end: End<Region, Receiving, SLOTS>,
    payload: usize,
    from: Peer,
    /// Whether the sender's goodbye has been passed on.
    closed: bool,
    /// Frames not taken yet, by lane: header, and where the payload is.
    lanes: HashMap<Lane, VecDeque<(Header, Kept)>>,
    /// How many of them are in slots.
    in_slots: usize,
    spare: Spare<VecDeque<(Header, Kept)>>,
}

/// Where the payload is of a frame that has not been taken yet.
#[derive(Debug)]
enum Kept {
    /// In a slot, from this byte on.
    Slot(Slot<Receiving>, usize),
    Aside(Vec<u8>),
}

impl Receiver {
    /// The end towards another process.
    pub(crate) fn new(region: Region, payload: usize, from: Peer) -> Self {
        Self::over(slots::receiving(region, slot_stride(payload)), payload, from)
    }

    fn over(end: End<Region, Receiving, SLOTS>, payload: usize, from: Peer) -> Self {
        Self {
            end,
            payload,
            from,
            closed: false,
            lanes: HashMap::default(),
            in_slots: 0,
            spare: Spare::default(),
        }
    }

    /// What has arrived next.
    pub(crate) fn poll_arrived(&mut self) -> Result<Option<Arrival>, Broken> {
        let Some((slot, behind)) = self.end.take()? else {
            if self.closed || !self.end.is_closed() {
                return Ok(None);
            }
            // What was passed on before the goodbye is there by now.
            return match self.end.take()? {
                Some((slot, behind)) => self.arrived(slot, behind).map(Some),
                None => {
                    self.closed = true;
                    Ok(Some(Arrival::Closed))
                }
            };
        };
        self.arrived(slot, behind).map(Some)
    }

    /// What is in a slot that the sender has passed on.
    fn arrived(&mut self, slot: Slot<Receiving>, behind: u8) -> Result<Arrival, Broken> {
        let mut bytes = [0; HEADER_LEN];
        self.end.copy_out(&slot, 0, &mut bytes);
        let header = Header::decode(&bytes).map_err(|_| Broken("a frame has no header"))?;
        let start = HEADER_LEN + usize::from(behind);
        if header.payload as usize > self.payload || usize::from(behind) >= LINE {
            return Err(Broken("a frame is longer than its slot"));
        }
        if header.frame.is_notice() {
            // Notices are short: the header of a longer one would have been refused.
            let mut payload = vec![0; header.payload as usize];
            self.end.copy_out(&slot, start, &mut payload);
            self.end.pass(slot, 0);
            return Ok(Arrival::Notice(header, payload));
        }
        let lane = Lane::of(self.from, &header);
        let frames = self.lanes.entry(lane).or_insert_with(|| self.spare.take());
        frames.push_back((header, Kept::Slot(slot, start)));
        self.in_slots += 1;
        Ok(Arrival::Frame(lane))
    }

    /// Whether the sender has given this end up.
    pub(crate) fn is_given_up(&self) -> bool {
        self.end.is_given_up()
    }

    /// Sets the sender's number, which it has only now got.
    pub(crate) fn set_peer(&mut self, from: Peer) {
        self.from = from;
    }

    /// The next frame of a lane, read in place.
    pub(crate) fn head(&self, lane: &Lane) -> Option<(Header, &[u8])> {
        let (header, kept) = self.lanes.get(lane)?.front()?;
        let payload = match kept {
            Kept::Slot(slot, start) => self.end.read(slot, *start, header.payload as usize),
            Kept::Aside(payload) => payload,
        };
        Some((*header, payload))
    }

    /// Drops the next frame of a lane; returns how many bytes its payload has.
    pub(crate) fn pop(&mut self, lane: &Lane) -> usize {
        let frames = self.lanes.get_mut(lane).expect("a frame is popped after it was looked at");
        let (header, kept) = frames.pop_front().expect("a frame is popped after it was looked at");
        if frames.is_empty()
            && let Some(frames) = self.lanes.remove(lane)
        {
            self.spare.give(frames);
        }
        if let Kept::Slot(slot, _) = kept {
            self.in_slots -= 1;
            self.end.pass(slot, 0);
        }
        header.payload as usize
    }

    /// Says that the frames of a lane may wait for long. If too many frames are in slots, those of
    /// this lane are copied out of theirs, and `true` is returned.
    pub(crate) fn set_aside(&mut self, lane: &Lane) -> bool {
        if self.in_slots <= EARLY {
            return false;
        }
        for (header, kept) in self.lanes.get_mut(lane).into_iter().flatten() {
            if let Kept::Slot(slot, start) = kept {
                let payload = self.end.read(slot, *start, header.payload as usize).to_vec();
                if let Kept::Slot(slot, _) = std::mem::replace(kept, Kept::Aside(payload)) {
                    self.in_slots -= 1;
                    self.end.pass(slot, 0);
                }
            }
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;
    use std::sync::atomic::{AtomicBool, Ordering};

    use farwire_proto::{Call, CommId, Config, Engine, Options, Time, WorldSize};
    use rand::{RngExt, SeedableRng};
    use rand_chacha::ChaCha8Rng;

    use super::*;

    const PAYLOAD: usize = 256;

    /// A frame of some collective.
    fn header() -> Header {
        let mut engine = Engine::new(Peer(0), WorldSize::new(2).unwrap(), Config::default());
        let plan = engine.plan(CommId::WORLD, &Call::Barrier, &Options::default()).unwrap();
        engine.submit(Time::ZERO, plan).unwrap();
        engine.poll_transmit().unwrap().header
    }

    /// A process at the other end that writes anything anywhere: control words, headers, payloads.
    /// The kernel writes for it, as for any other process.
    fn scribble(file: impl AsFd, start: u64, seed: u64, stop: &AtomicBool) {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let words = 4 * slots::words(SLOTS) as u64;
        while !stop.load(Ordering::Relaxed) {
            let at = match rng.random_range(0..4) {
                0 => 0, // the goodbye
                1 => rng.random_range(0..words) / 4 * 4,
                // Some field of a header, or what follows it, in one of the slots that are used
                // first.
                _ => {
                    let slot = rng.random_range(0..SLOTS as u64 / 16) * slot_stride(PAYLOAD) as u64;
                    start + slot + rng.random_range(0..HEADER_LEN as u64 + 8)
                }
            };
            let word = match rng.random_range(0..4) {
                0 => rng.random::<u32>(),
                1 => {
                    let mut word = [0; 4];
                    rustix::io::pread(&file, &mut word, at).unwrap();
                    u32::from_le_bytes(word).wrapping_add(1 << 16) // of the next lap
                }
                2 => rng.random_range(0..2) * u32::MAX,
                _ => 1 << rng.random_range(0..32),
            };
            rustix::io::pwrite(&file, &word.to_le_bytes(), at).unwrap();
        }
    }

    #[test]
    fn a_peer_that_writes_anything_anywhere_breaks_the_link_and_nothing_else() {
        let mut arrived = 0;
        for seed in 0..100 {
            let regions = [region(PAYLOAD).unwrap(), region(PAYLOAD).unwrap()];
            let files =
                regions.each_ref().map(|region| region.file().try_clone_to_owned().unwrap());
            let start = regions[0].offset();
            let [there, back] = regions;
            // One ring goes to a peer that scribbles on what it is sent, and does not read it. The
            // other comes from a sender that keeps the rules, and a third process scribbles on it.
            let mut lonely = Sender::new(there, PAYLOAD);
            let (mut sender, mut receiver) = pair(back, PAYLOAD, Peer(0));
            let stop = AtomicBool::new(false);
            std::thread::scope(|scope| {
                for (file, seed) in files.iter().zip([2 * seed, 2 * seed + 1]) {
                    let stop = &stop;
                    scope.spawn(move || scribble(file, start, seed, stop));
                }
                let header = Header { payload: PAYLOAD as u32, ..header() };
                let lane = Lane::of(Peer(0), &header);
                let mut seen = Vec::new();
                let mut turn = || {
                    for sender in [&mut lonely, &mut sender] {
                        sender.send(Some(lane), &header, &[1; PAYLOAD]);
                        sender.send(None, &header, &[]);
                        sender.poll_writable()?;
                    }
                    for _ in 0..4 {
                        if let Some(Arrival::Frame(lane)) = receiver.poll_arrived()? {
                            let (_, payload) = receiver.head(&lane).expect("it has just arrived");
                            seen.extend_from_slice(payload);
                            receiver.pop(&lane);
                            arrived += 1;
                        }
                    }
                    Ok::<_, Broken>(())
                };
                // Sooner or later a slot comes that does not exist, however the threads are
                // scheduled.
                while turn().is_ok() {
                    std::thread::yield_now();
                }
                // Asking again gets an answer, too.
                let _ = turn();
                stop.store(true, Ordering::Relaxed);
            });
        }
        assert!(arrived > 0);
    }
}
