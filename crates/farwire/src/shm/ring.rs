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
//! Slots come back in any order, so a frame that has to wait blocks no other lane. Frames that may wait for long,
//! since the receiver has not called their operation, are few: the engine sees to that. The sender gives the most
//! recently freed slot out first: the one that is still in the cache. Indices and lengths that the other side wrote are checked before they are used.

use std::collections::{HashMap, HashSet, VecDeque};
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use farwire_proto::{HEADER_LEN, Header, Lane, Peer};

use super::region::Region;
use crate::link::{Arrival, Broken};

/// Frames that can be on their way.
const SLOTS: usize = 256;
/// Slots that only lanes without a frame on its way may take, so that one operation cannot keep the others out.
const RESERVE: usize = SLOTS / 2;
/// Slots that only notices may take. These are read as soon as they arrive, so they always get through.
const NOTICES: usize = 8;
/// Frames for operations that the receiver has not called: they leave room beyond the reserve.
pub(crate) const AHEAD: usize = SLOTS / 4;
/// Frames of one lane that can be on their way.
const WINDOW: usize = 8;

// Control words, each on a cache line of its own, then the two rings of slot numbers.
const LINE: usize = 16;
const PUBLISHED: usize = 0;
const RETURNED: usize = LINE;
const CLOSED: usize = 2 * LINE;
const PUBLISHED_RING: usize = 3 * LINE;
const RETURNED_RING: usize = PUBLISHED_RING + SLOTS;
const WORDS: usize = RETURNED_RING + SLOTS;

/// Memory for a ring whose frames carry up to `payload` bytes.
pub(crate) fn region(payload: usize) -> io::Result<Region> {
    Region::new(WORDS, SLOTS * slot_stride(payload))
}

/// The same memory, from the process that made it.
pub(crate) fn region_from(file: OwnedFd, payload: usize) -> io::Result<Region> {
    Region::from_file(file, WORDS, SLOTS * slot_stride(payload))
}

/// Slots start on a cache line.
fn slot_stride(payload: usize) -> usize {
    HEADER_LEN + payload.next_multiple_of(64)
}

/// The sending end.
#[derive(Debug)]
pub(crate) struct Sender {
    region: Arc<Region>,
    payload: usize,
    free: Vec<u32>,
    published: u32,
    returned: u32,
    /// Whose frame is in each slot; `None` for news of a failure, which belongs to no lane.
    lane_of: Vec<Option<Lane>>,
    on_its_way: HashMap<Lane, usize>,
    /// Lanes that were told to wait.
    refused: HashSet<Lane>,
    writable: VecDeque<Lane>,
}

impl Sender {
    pub(crate) fn new(region: Arc<Region>, payload: usize) -> Self {
        Self {
            region,
            payload,
            free: (0..SLOTS as u32).rev().collect(),
            published: 0,
            returned: 0,
            lane_of: vec![None; SLOTS],
            on_its_way: HashMap::new(),
            refused: HashSet::new(),
            writable: VecDeque::new(),
        }
    }

    /// Publishes a frame; `false` if its lane has to wait until [`poll_writable`](Self::poll_writable) names it.
    ///
    /// # Panics
    ///
    /// If the payload is longer than the ring was made for.
    pub(crate) fn send(&mut self, lane: Option<Lane>, header: &Header, payload: &[u8]) -> bool {
        assert!(payload.len() <= self.payload, "a segment fits a slot");
        let first = lane.is_none_or(|lane| !self.on_its_way.contains_key(&lane));
        let full =
            lane.is_some_and(|lane| self.on_its_way.get(&lane).is_some_and(|frames| *frames >= WINDOW));
        let reserve = match lane {
            None => 0,
            Some(_) if first => NOTICES,
            Some(_) => RESERVE,
        };
        if full || self.free.len() <= reserve {
            self.refused.extend(lane);
            return false;
        }
        let slot = self.free.pop().expect("at least one is free");
        let at = slot as usize * slot_stride(self.payload);
        self.region.write(at, &header.encode());
        self.region.write(at + HEADER_LEN, payload);
        self.lane_of[slot as usize] = lane;
        if let Some(lane) = lane {
            *self.on_its_way.entry(lane).or_insert(0) += 1;
        }
        let place = PUBLISHED_RING + self.published as usize % SLOTS;
        self.region.word(place).store(slot, Ordering::Relaxed);
        self.published = self.published.wrapping_add(1);
        self.region.word(PUBLISHED).store(self.published, Ordering::Release);
        true
    }

    /// A lane that had to wait and may try again.
    pub(crate) fn poll_writable(&mut self) -> Result<Option<Lane>, Broken> {
        let returned = self.region.word(RETURNED).load(Ordering::Acquire);
        while self.returned != returned {
            let place = RETURNED_RING + self.returned as usize % SLOTS;
            let slot = self.region.word(place).load(Ordering::Relaxed);
            self.returned = self.returned.wrapping_add(1);
            if slot as usize >= SLOTS || self.free.len() == SLOTS {
                return Err(Broken("a slot came back that was never sent"));
            }
            self.free.push(slot);
            if let Some(lane) = self.lane_of[slot as usize].take() {
                let frames =
                    self.on_its_way.get_mut(&lane).expect("lanes are counted while they have a slot");
                *frames -= 1;
                if *frames == 0 {
                    self.on_its_way.remove(&lane);
                }
            }
            self.writable.extend(self.refused.drain());
        }
        Ok(self.writable.pop_front())
    }

    /// Says that nothing more will be sent.
    pub(crate) fn close(&self) {
        self.region.word(CLOSED).store(1, Ordering::Release);
    }
}

/// The receiving end.
#[derive(Debug)]
pub(crate) struct Receiver {
    region: Arc<Region>,
    payload: usize,
    from: Peer,
    seen: u32,
    returned: u32,
    /// The sender's goodbye has been passed on.
    closed: bool,
    /// Frames not taken yet, by lane: header and slot.
    lanes: HashMap<Lane, VecDeque<(Header, u32)>>,
}

impl Receiver {
    pub(crate) fn new(region: Arc<Region>, payload: usize, from: Peer) -> Self {
        Self { region, payload, from, seen: 0, returned: 0, closed: false, lanes: HashMap::new() }
    }

    /// What has arrived next.
    pub(crate) fn poll_arrived(&mut self) -> Result<Option<Arrival>, Broken> {
        let closed = self.region.word(CLOSED).load(Ordering::Acquire) != 0;
        if self.region.word(PUBLISHED).load(Ordering::Acquire) == self.seen {
            let news = closed && !std::mem::replace(&mut self.closed, closed);
            return Ok(news.then_some(Arrival::Closed));
        }
        if self.seen.wrapping_sub(self.returned) as usize >= SLOTS {
            return Err(Broken("more frames were published than there are slots"));
        }
        let place = PUBLISHED_RING + self.seen as usize % SLOTS;
        let slot = self.region.word(place).load(Ordering::Relaxed);
        self.seen = self.seen.wrapping_add(1);
        if slot as usize >= SLOTS {
            return Err(Broken("a slot was published that does not exist"));
        }
        let at = slot as usize * slot_stride(self.payload);
        let header =
            Header::decode(self.region.read(at, HEADER_LEN)).map_err(|_| Broken("a frame has no header"))?;
        if header.payload as usize > self.payload {
            return Err(Broken("a frame is longer than its slot"));
        }
        if header.frame.is_notice() {
            let payload = self.region.read(at + HEADER_LEN, header.payload as usize).to_vec();
            self.give_back(slot);
            return Ok(Some(Arrival::Notice(header, payload)));
        }
        let lane = Lane::of(self.from, &header);
        self.lanes.entry(lane).or_default().push_back((header, slot));
        Ok(Some(Arrival::Frame(lane)))
    }

    /// The next frame of a lane, read in place.
    pub(crate) fn head(&self, lane: &Lane) -> Option<(Header, &[u8])> {
        let (header, slot) = self.lanes.get(lane)?.front()?;
        let at = *slot as usize * slot_stride(self.payload);
        Some((*header, self.region.read(at + HEADER_LEN, header.payload as usize)))
    }

    /// Done with the next frame of a lane.
    pub(crate) fn pop(&mut self, lane: &Lane) {
        let frames = self.lanes.get_mut(lane).expect("a frame is popped after it was looked at");
        let (_, slot) = frames.pop_front().expect("a frame is popped after it was looked at");
        if frames.is_empty() {
            self.lanes.remove(lane);
        }
        self.give_back(slot);
    }

    fn give_back(&mut self, slot: u32) {
        let place = RETURNED_RING + self.returned as usize % SLOTS;
        self.region.word(place).store(slot, Ordering::Relaxed);
        self.returned = self.returned.wrapping_add(1);
        self.region.word(RETURNED).store(self.returned, Ordering::Release);
    }
}
