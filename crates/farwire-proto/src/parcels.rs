//! Parcels: bytes whose length only their sender knows.
//!
//! Where the length of what is sent depends on the data (a coded gradient, a request), frames
//! cannot be laid out beforehand. A lane then carries a fixed number of *parcels* instead, one
//! after the other. A parcel travels as frames of one segment each and ends with the first frame
//! that is shorter, which is empty if nothing is left:
//!
//! ```text
//! segment = 4      parcel of 9 bytes: ████ ████ █      of 8: ████ ████ ·      of none: ·
//! ```
//!
//! The sender supplies a parcel when it has it ([`Engine::supply`](crate::Engine::supply)). The
//! receiver knows how long a parcel may be, and a longer one is a breach.

use std::collections::VecDeque;
use std::num::NonZeroUsize;

use bytes::Bytes;
use rustc_hash::FxHashMap as HashMap;

use crate::ids::Rank;

/// What is known of a lane's parcels before they exist.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    /// Parcels out, on each lane.
    pub(crate) sends: u32,
    /// Parcels in, on each lane.
    pub(crate) recvs: u32,
    /// Bytes of the longest parcel.
    pub(crate) max: usize,
    /// Bytes of a frame that is not the last of its parcel.
    pub(crate) segment: NonZeroUsize,
}

impl Limits {
    /// How many frames a parcel of `len` bytes takes.
    pub(crate) fn frames(&self, len: usize) -> usize {
        len / self.segment + 1
    }

    /// Whether the frames of a lane can be counted in the 32 bits of a header.
    pub(crate) fn is_countable(&self) -> bool {
        let most = self.sends.max(self.recvs) as usize;
        u32::try_from(most.saturating_mul(self.frames(self.max))).is_ok()
    }
}

/// The part of a parcel that one frame carries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ParcelPart {
    /// The rank at the other end.
    pub with: Rank,
    /// Which of the parcels between the two, from zero.
    pub round: u32,
    /// How many bytes of the parcel come before these.
    pub at: usize,
    /// How many bytes.
    pub len: usize,
    /// Whether they are the parcel's last.
    pub last: bool,
}

/// How far the parcels of one lane have come.
#[derive(Clone, Debug, Default)]
pub(crate) struct Progress {
    /// Lengths of the parcels that were supplied and are not yet handed out whole.
    waiting: VecDeque<usize>,
    supplied: u32,
    /// The parcel on its way out, and how much of it is gone.
    out: (u32, usize),
    /// The parcel on its way in, and how much of it is here.
    pub(crate) into: (u32, usize),
}

impl Progress {
    /// A parcel is ready; `false` if all had been supplied already, or if it is too long.
    pub(crate) fn supply(&mut self, len: usize, limits: &Limits) -> bool {
        if self.supplied == limits.sends || len > limits.max {
            return false;
        }
        self.supplied += 1;
        self.waiting.push_back(len);
        true
    }

    /// Whether all parcels have been supplied.
    pub(crate) fn is_supplied(&self, limits: &Limits) -> bool {
        self.supplied == limits.sends
    }

    /// The next frame out.
    pub(crate) fn next_part(&mut self, with: Rank, limits: &Limits) -> ParcelPart {
        let len = *self.waiting.front().expect("a frame is lined up once its parcel is there");
        let (round, at) = self.out;
        let part = part(with, self.out, len - at, limits);
        if part.last {
            self.waiting.pop_front();
            self.out = (round + 1, 0);
        } else {
            self.out = (round, at + part.len);
        }
        part
    }

    /// The part of the incoming parcel that a frame of `len` bytes is; `None` if it cannot be one.
    pub(crate) fn expect(&self, with: Rank, len: usize, limits: &Limits) -> Option<ParcelPart> {
        let (_, at) = self.into;
        (len <= limits.segment.get() && at + len <= limits.max)
            .then(|| part(with, self.into, len, limits))
    }

    /// A frame has been taken; `true` if it was its parcel's last.
    pub(crate) fn collected(&mut self, part: &ParcelPart) -> bool {
        self.into = if part.last { (part.round + 1, 0) } else { (part.round, part.at + part.len) };
        part.last
    }
}

fn part(with: Rank, (round, at): (u32, usize), left: usize, limits: &Limits) -> ParcelPart {
    let len = left.min(limits.segment.get());
    ParcelPart { with, round, at, len, last: len < limits.segment.get() }
}

/// The parcels of one operation on one rank: those on their way out, and those that have come.
#[derive(Debug, Default)]
pub(crate) struct Parcels {
    out: HashMap<(Rank, u32), Bytes>,
    into: HashMap<(Rank, u32), Vec<u8>>,
}

impl Parcels {
    /// Keeps a parcel to send. One that goes to several ranks is shared between them.
    pub(crate) fn put(&mut self, to: Rank, round: u32, parcel: Bytes) {
        self.out.insert((to, round), parcel);
    }

    /// What a frame carries.
    ///
    /// # Panics
    ///
    /// If the parcel was not [`put`](Self::put) before it was supplied to the engine, or is
    /// shorter.
    pub(crate) fn payload(&self, part: &ParcelPart) -> &[u8] {
        &self.out[&(part.with, part.round)][part.at..part.at + part.len]
    }

    /// A frame was sent: nobody asks for its bytes again.
    pub(crate) fn sent(&mut self, part: &ParcelPart) {
        if part.last {
            self.out.remove(&(part.with, part.round));
        }
    }

    /// Appends what has come to its parcel.
    pub(crate) fn collect(&mut self, part: &ParcelPart, payload: &[u8]) {
        self.into.entry((part.with, part.round)).or_default().extend_from_slice(payload);
    }

    /// Takes a parcel that has come whole. Empty if it was taken before.
    pub(crate) fn take(&mut self, from: Rank, round: u32) -> Vec<u8> {
        self.into.remove(&(from, round)).unwrap_or_default()
    }
}
