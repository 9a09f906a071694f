//! Slots of shared memory that change hands between two ends: who may access which bytes, and when.
//!
//! ```text
//!  sending end                                    receiving end
//!  Slot<Sending>: may be written                  Slot<Receiving>: may be read
//!     pass ──────────── published ring ──────────▶ take
//!     take ◀─────────── returned ring ──────────── pass
//! ```
//!
//! A [`Slot`] is the only way to the bytes of a slot. It cannot be copied, only its own end takes
//! it, and passing it on gives it up. So an end cannot touch a slot that it has passed on, nor pass
//! one on twice. It trusts the other end to do the same no more than it has to: a number that is
//! out of range, or of a slot that the other end does not have, is refused.
//!
//! # Rules
//!
//! 1. In one process, a region has one sending and one receiving end: [`pair`], [`sending`] and
//!    [`receiving`] take the region, and hand out no second one.
//! 2. For each slot number, one end holds the [`Slot`], or it is on its way; at first the sending
//!    end holds all. An end makes a `Slot` only for a number that it has passed on (or, if it
//!    receives, has not had yet) and that has come back through a ring. Each end notes which
//!    numbers are away.
//! 3. A number is stored in its ring with release ordering, and loaded with acquire ordering. So
//!    all that one end did to a slot happens before all that the other does. `model.rs` has a model
//!    checker look for an exception.
//!
//! # Rings
//!
//! Between cores, what costs time is each cache line that changes hands. So a ring has no count
//! besides its numbers. Each number comes with its lap, that is, how often the ring has been gone
//! around, which tells the other end that the number is new. It also comes with a note of one byte.

#![allow(unsafe_code, reason = "access to shared memory; see the rules above")]

use std::marker::PhantomData;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use farwire_proto::team::Teamed;

use crate::link::Broken;

/// A word in shared memory. A trait, so that a model checker's words will do as well.
pub(crate) trait Word {
    fn load(&self, order: Ordering) -> u32;
    fn store(&self, value: u32, order: Ordering);
}

impl Word for AtomicU32 {
    fn load(&self, order: Ordering) -> u32 {
        self.load(order)
    }

    fn store(&self, value: u32, order: Ordering) {
        self.store(value, order);
    }
}

/// Shared memory: control words, then bytes. Any access outside of it panics.
pub(crate) trait Memory {
    type Word: Word;

    /// A control word.
    fn word(&self, index: usize) -> &Self::Word;

    /// Copies into bytes, with the help of a team.
    ///
    /// # Safety
    ///
    /// Nobody else accesses them meanwhile, and `source` is not among them.
    unsafe fn write(&self, at: usize, source: &[u8], team: Teamed);

    /// Bytes, in place.
    ///
    /// # Safety
    ///
    /// Nobody writes to them as long as the slice lives.
    unsafe fn read(&self, at: usize, len: usize) -> &[u8];

    /// Copies bytes out, each read once. Sound even if somebody writes to them meanwhile.
    fn copy_out(&self, at: usize, target: &mut [u8]);
}

// Control words: one on a cache line of its own, then the two rings.
const LINE: usize = 16;
const CLOSED: usize = 0;
const RINGS: usize = LINE;
/// Values of the word [`CLOSED`], once it has one.
const GOODBYE: u32 = 1;
const GIVEN_UP: u32 = 2;

/// Control words that this many slots need.
pub(crate) const fn words(slots: usize) -> usize {
    RINGS + 2 * slots
}

/// What is in a place of a ring: a slot's number, a note, and the lap of the ring that they are
/// from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Entry {
    number: u8,
    note: u8,
    lap: u16,
}

impl Entry {
    fn of_word(word: u32) -> Self {
        let [number, note, low, high] = word.to_le_bytes();
        Self { number, note, lap: u16::from_le_bytes([low, high]) }
    }

    fn word(self) -> u32 {
        let [low, high] = self.lap.to_le_bytes();
        u32::from_le_bytes([self.number, self.note, low, high])
    }
}

/// The place in a ring, and the lap, of the slot that is passed on after `count` others. What the
/// lap before has left there has another lap number; a new ring is all zeros, so its first lap is
/// number one.
const fn place(count: u32, slots: usize) -> (usize, u16) {
    (count as usize % slots, (count / slots as u32 + 1) as u16)
}

/// Which end of a ring: writes to slots, or reads from them.
pub(crate) trait Side {
    /// The ring through which it passes slots on. It takes them from the other one.
    const RING: usize;
}

/// Writes to slots.
#[derive(Debug)]
pub(crate) struct Sending;

/// Reads from slots.
#[derive(Debug)]
pub(crate) struct Receiving;

impl Side for Sending {
    const RING: usize = 0;
}

impl Side for Receiving {
    const RING: usize = 1;
}

/// The right to access the bytes of one slot, at the end that holds it.
#[derive(Debug)]
pub(crate) struct Slot<S> {
    number: u32,
    /// The end that it belongs to.
    end: u64,
    side: PhantomData<S>,
}

impl<S> Slot<S> {
    /// Its number, which is less than the number of slots.
    pub(crate) fn number(&self) -> usize {
        self.number as usize
    }
}

/// One end of a ring of `SLOTS` slots, a power of two.
#[derive(Debug)]
pub(crate) struct End<M, S, const SLOTS: usize> {
    memory: Arc<M>,
    /// Bytes of a slot.
    stride: usize,
    id: u64,
    /// How many slots were passed on, and taken, modulo 2³².
    passed: u32,
    taken: u32,
    /// Which slots are not here.
    away: [bool; SLOTS],
    side: PhantomData<S>,
}

/// The sending end of memory whose other end is another process, and all slots.
pub(crate) fn sending<M: Memory, const SLOTS: usize>(
    memory: M,
    stride: usize,
) -> (End<M, Sending, SLOTS>, Vec<Slot<Sending>>) {
    send_over(Arc::new(memory), stride)
}

/// The receiving end of memory whose other end is another process.
pub(crate) fn receiving<M: Memory, const SLOTS: usize>(
    memory: M,
    stride: usize,
) -> End<M, Receiving, SLOTS> {
    End::new(Arc::new(memory), stride, true)
}

/// Both ends.
#[expect(clippy::type_complexity, reason = "what `sending` returns, and what `receiving` returns")]
pub(crate) fn pair<M: Memory, const SLOTS: usize>(
    memory: M,
    stride: usize,
) -> ((End<M, Sending, SLOTS>, Vec<Slot<Sending>>), End<M, Receiving, SLOTS>) {
    let memory = Arc::new(memory);
    (send_over(memory.clone(), stride), End::new(memory, stride, true))
}

fn send_over<M: Memory, const SLOTS: usize>(
    memory: Arc<M>,
    stride: usize,
) -> (End<M, Sending, SLOTS>, Vec<Slot<Sending>>) {
    let end = End::new(memory, stride, false);
    let slots = (0..SLOTS as u32).map(|number| end.slot(number)).collect();
    (end, slots)
}

impl<M: Memory, S: Side, const SLOTS: usize> End<M, S, SLOTS> {
    fn new(memory: Arc<M>, stride: usize, away: bool) -> Self {
        // Counts run on past 2³², so their places in the ring must too.
        const { assert!(SLOTS.is_power_of_two() && SLOTS <= 1 << 8) };
        static ENDS: AtomicU64 = AtomicU64::new(0);
        let id = ENDS.fetch_add(1, Ordering::Relaxed);
        Self { memory, stride, id, passed: 0, taken: 0, away: [away; SLOTS], side: PhantomData }
    }

    fn slot(&self, number: u32) -> Slot<S> {
        Slot { number, end: self.id, side: PhantomData }
    }

    fn ring(&self, ring: usize, place: usize) -> &M::Word {
        self.memory.word(RINGS + ring * SLOTS + place)
    }

    /// Where some bytes of a slot lie.
    ///
    /// # Panics
    ///
    /// If the slot is another end's, or the bytes do not all lie in it.
    fn place(&self, slot: &Slot<S>, from: usize, len: usize) -> usize {
        assert_eq!(slot.end, self.id, "a slot stays with its end");
        assert!(from <= self.stride && len <= self.stride - from, "bytes of a slot lie in it");
        slot.number as usize * self.stride + from
    }

    /// Gives a slot to the other end, with a note.
    ///
    /// # Panics
    ///
    /// If the slot is another end's.
    pub(crate) fn pass(&mut self, slot: Slot<S>, note: u8) {
        assert_eq!(slot.end, self.id, "a slot stays with its end");
        self.away[slot.number as usize] = true;
        let (place, lap) = place(self.passed, SLOTS);
        self.passed = self.passed.wrapping_add(1);
        let entry = Entry { number: slot.number as u8, note, lap };
        // The other end, which acquires this, may access the slot.
        self.ring(S::RING, place).store(entry.word(), Ordering::Release);
    }

    /// Takes a slot that the other end has passed on, and its note, if there is one.
    pub(crate) fn take(&mut self) -> Result<Option<(Slot<S>, u8)>, Broken> {
        let (place, lap) = place(self.taken, SLOTS);
        let entry = Entry::of_word(self.ring(1 - S::RING, place).load(Ordering::Acquire));
        if entry.lap != lap {
            return Ok(None);
        }
        match self.away.get_mut(usize::from(entry.number)) {
            None => Err(Broken("the peer passed on a slot that does not exist")),
            Some(false) => Err(Broken("the peer passed on a slot that it did not have")),
            Some(away) => {
                *away = false;
                self.taken = self.taken.wrapping_add(1);
                Ok(Some((self.slot(u32::from(entry.number)), entry.note)))
            }
        }
    }
}

impl<M: Memory, const SLOTS: usize> End<M, Sending, SLOTS> {
    /// Copies into a slot, with the help of a team.
    ///
    /// # Panics
    ///
    /// If the slot is another end's, or too short.
    pub(crate) fn write(&self, slot: &mut Slot<Sending>, from: usize, source: &[u8], team: Teamed) {
        let at = self.place(slot, from, source.len());
        // SAFETY: by rules 1 and 2 this end owns the slot as long as it holds the handle, and the
        // handle is borrowed mutably. `source` may lie in another slot, which the other end of a
        // pair reads, but not in this one.
        unsafe { self.memory.write(at, source, team) };
    }

    /// Says that nothing more will be passed on.
    pub(crate) fn close(&self) {
        self.memory.word(CLOSED).store(GOODBYE, Ordering::Release);
    }

    /// Says that the receiving end was given up: what was passed on may not be everything.
    pub(crate) fn give_up(&self) {
        self.memory.word(CLOSED).store(GIVEN_UP, Ordering::Release);
    }
}

impl<M: Memory, const SLOTS: usize> End<M, Receiving, SLOTS> {
    /// Bytes of a slot, in place.
    ///
    /// # Panics
    ///
    /// If the slot is another end's, or too short.
    pub(crate) fn read<'a>(
        &'a self,
        slot: &'a Slot<Receiving>,
        from: usize,
        len: usize,
    ) -> &'a [u8] {
        let at = self.place(slot, from, len);
        // SAFETY: by rules 1 and 2 this end owns the slot as long as it holds the handle, which is
        // borrowed as long as the slice is, and it never writes. (For a peer that breaks the rules
        // from another process, see rule 4 of `region.rs`.)
        unsafe { self.memory.read(at, len) }
    }

    /// Copies bytes of a slot out, each read once: for what is decoded or checked before it is
    /// used.
    ///
    /// # Panics
    ///
    /// If the slot is another end's, or too short.
    pub(crate) fn copy_out(&self, slot: &Slot<Receiving>, from: usize, target: &mut [u8]) {
        self.memory.copy_out(self.place(slot, from, target.len()), target);
    }

    /// Whether the sender has said that nothing more will come. Ask before looking for the last
    /// slot.
    pub(crate) fn is_closed(&self) -> bool {
        self.memory.word(CLOSED).load(Ordering::Acquire) == GOODBYE
    }

    /// Whether the sender has given this end up. What it sent may not be all that it had to say.
    pub(crate) fn is_given_up(&self) -> bool {
        self.memory.word(CLOSED).load(Ordering::Acquire) == GIVEN_UP
    }
}

#[cfg(test)]
mod tests {
    use super::super::region::Region;
    use super::*;

    const SLOTS: usize = 4;
    const PUBLISHED: usize = 0;
    const RETURNED: usize = 1;

    type Here<S> = End<Region, S, SLOTS>;

    fn memory() -> Region {
        Region::new(words(SLOTS), SLOTS * 8).unwrap()
    }

    /// The other end, in a process that keeps to no rules: sets what is in the first places of a
    /// ring, as if from this lap.
    fn claim(memory: &Region, ring: usize, lap: u16, numbers: &[u8]) {
        for (place, number) in numbers.iter().enumerate() {
            let entry = Entry { number: *number, note: 0, lap };
            memory.word(RINGS + ring * SLOTS + place).store(entry.word(), Ordering::Release);
        }
    }

    /// A sending end that has passed on slots 0 and 1.
    fn sent_two() -> (Here<Sending>, Vec<Slot<Sending>>) {
        let (mut end, mut slots) = sending(memory(), 8);
        slots.drain(..2).for_each(|slot| end.pass(slot, 0));
        (end, slots)
    }

    #[test]
    fn a_slot_that_is_given_back_twice_is_refused() {
        let (mut end, _slots) = sent_two();
        claim(&end.memory, RETURNED, 1, &[1, 1]);
        assert_eq!(end.take().unwrap().unwrap().0.number(), 1);
        end.take().unwrap_err();
        end.take().unwrap_err();
    }

    #[test]
    fn a_slot_that_is_given_back_without_having_been_sent_is_refused() {
        for number in [2, 3, 4, u8::MAX] {
            let (mut end, _slots) = sent_two();
            claim(&end.memory, RETURNED, 1, &[number]);
            end.take().unwrap_err();
        }
        let (mut end, _slots) = sent_two();
        claim(&end.memory, RETURNED, 1, &[0, 1, 2]);
        assert!(end.take().unwrap().is_some() && end.take().unwrap().is_some());
        end.take().unwrap_err();
    }

    #[test]
    fn a_slot_that_is_published_while_it_is_held_is_refused() {
        let mut end: Here<Receiving> = receiving(memory(), 8);
        claim(&end.memory, PUBLISHED, 1, &[3, 3]);
        let (held, _) = end.take().unwrap().unwrap();
        end.take().unwrap_err();
        end.pass(held, 0);
        assert_eq!(end.take().unwrap().unwrap().0.number(), 3, "given back, it may come again");
    }

    #[test]
    fn slots_that_do_not_exist_are_refused() {
        for number in [SLOTS as u8, u8::MAX] {
            let mut end: Here<Receiving> = receiving(memory(), 8);
            claim(&end.memory, PUBLISHED, 1, &[number]);
            end.take().unwrap_err();
        }
    }

    #[test]
    fn what_is_of_another_lap_is_not_there_yet() {
        for lap in [0, 2, u16::MAX] {
            let mut end: Here<Receiving> = receiving(memory(), 8);
            claim(&end.memory, PUBLISHED, lap, &[0; SLOTS]);
            assert!(end.take().unwrap().is_none());
        }
    }

    #[test]
    fn counts_run_on_past_32_bits() {
        let ((mut sender, mut free), mut receiver) = pair::<_, SLOTS>(memory(), 8);
        let start = u32::MAX - 5;
        (sender.passed, sender.taken, receiver.passed, receiver.taken) =
            (start, start, start, start);
        let before = place(start, SLOTS).1 - 1;
        claim(&sender.memory, PUBLISHED, before, &[0; SLOTS]);
        claim(&sender.memory, RETURNED, before, &[0; SLOTS]);
        for round in 0..4u8 {
            for (k, mut slot) in (0..).zip(std::mem::take(&mut free)) {
                sender.write(&mut slot, 3, &[round, k], None);
                sender.pass(slot, k);
            }
            for k in 0..SLOTS as u8 {
                let (slot, note) = receiver.take().unwrap().unwrap();
                assert_eq!((receiver.read(&slot, 3, 2), note), (&[round, k][..], k));
                receiver.pass(slot, 0);
            }
            assert!(receiver.take().unwrap().is_none());
            while let Some((slot, _)) = sender.take().unwrap() {
                free.push(slot);
            }
            assert_eq!(free.len(), SLOTS);
        }
    }

    #[test]
    #[should_panic(expected = "a slot stays with its end")]
    fn a_slot_of_another_end_is_not_passed_on() {
        let (mut one, _) = sending::<_, SLOTS>(memory(), 8);
        let (_, mut slots) = sending::<_, SLOTS>(memory(), 8);
        one.pass(slots.remove(0), 0);
    }

    #[test]
    #[should_panic(expected = "bytes of a slot lie in it")]
    fn a_slot_is_not_written_past_its_end() {
        let (end, mut slots) = sending::<_, SLOTS>(memory(), 8);
        end.write(&mut slots[0], 7, &[1, 2], None);
    }
}
