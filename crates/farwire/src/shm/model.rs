//! The protocols of `slots.rs` and `bell.rs` under a model checker, which runs every interleaving
//! of a few threads (up to a number of preemptions) and every value that each load may see.
//!
//! The code is the same as in production; words and bytes are the checker's. To show that the
//! checks see what they are there for, each is also made with the ordering taken away, and must
//! fail.

use std::ops::Range;
use std::sync::atomic::Ordering;
use std::time::Duration;

use farwire_proto::team::Teamed;
use loom::cell::UnsafeCell;
use loom::sync::{Arc, Condvar, Mutex, atomic};
use loom::thread;

use super::bell::{Alarm, Words};
use super::slots::{self, Memory, Receiving, Slot, Word};

/// Explores `f`. Three preemptions find everything that is known to be found here; each further one
/// takes several times as long.
fn check(f: impl Fn() + Sync + Send + 'static) {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(3);
    model.check(f);
}

/// A word of the checker's; a weak one ignores the ordering that a store asks for.
struct ModelWord {
    value: atomic::AtomicU32,
    weak: bool,
}

impl Word for ModelWord {
    fn load(&self, order: Ordering) -> u32 {
        self.value.load(order)
    }

    fn store(&self, value: u32, order: Ordering) {
        self.value.store(value, if self.weak { Ordering::Relaxed } else { order });
    }
}

const SLOTS: usize = 2;

/// A region with slots of one byte each.
struct ModelMemory {
    words: Vec<ModelWord>,
    bytes: Vec<UnsafeCell<[u8; 1]>>,
}

/// The words whose stores order others before them, as [`ModelMemory`] counts them: the goodbye,
/// and the two rings.
const CLOSED: Range<usize> = 0..1;
const PUBLISHED: Range<usize> = 1..1 + SLOTS;
const RETURNED: Range<usize> = 1 + SLOTS..1 + 2 * SLOTS;

impl ModelMemory {
    /// With these words weak.
    fn new(weak: &Range<usize>) -> Self {
        let word =
            |index| ModelWord { value: atomic::AtomicU32::new(0), weak: weak.contains(&index) };
        Self {
            words: (0..RETURNED.end).map(word).collect(),
            bytes: (0..SLOTS).map(|_| UnsafeCell::new([0])).collect(),
        }
    }
}

#[allow(unsafe_code, reason = "the checker's cells note every access, and panic at a race")]
impl Memory for ModelMemory {
    type Word = ModelWord;

    fn word(&self, index: usize) -> &ModelWord {
        // Separate cache lines are of no use here, and each word is work for the checker.
        &self.words[index.saturating_sub(15)]
    }

    unsafe fn write(&self, at: usize, source: &[u8], _team: Teamed) {
        // SAFETY: the checker would have panicked.
        self.bytes[at].with_mut(|cell| unsafe { (*cell).copy_from_slice(source) });
    }

    unsafe fn read(&self, at: usize, len: usize) -> &[u8] {
        assert_eq!(len, 1);
        // SAFETY: the checker would have panicked.
        self.bytes[at].with(|cell| unsafe { &*cell })
    }

    fn copy_out(&self, at: usize, target: &mut [u8]) {
        // SAFETY: the checker would have panicked.
        self.bytes[at].with(|cell| target.copy_from_slice(unsafe { &*cell }));
    }
}

/// Twice as many frames as slots, so that every place in both rings is used again. The receiver
/// gives slots back in another order than they came in. At the end it hears the goodbye, and not
/// before all that was sent.
fn frames_and_a_goodbye(weak: Range<usize>) {
    const FRAMES: u8 = 2 * SLOTS as u8;
    let ((mut sender, mut free), mut receiver) =
        slots::pair::<_, SLOTS>(ModelMemory::new(&weak), 1);
    let sending = thread::spawn(move || {
        for frame in 1..=FRAMES {
            let mut slot = loop {
                while let Some((slot, _)) = sender.take().unwrap() {
                    free.push(slot);
                }
                match free.pop() {
                    Some(slot) => break slot,
                    None => thread::yield_now(),
                }
            };
            sender.write(&mut slot, 0, &[frame], None);
            sender.pass(slot, 0);
        }
        sender.close();
    });
    let mut held: Vec<Slot<Receiving>> = Vec::new();
    let mut expected = 1..=FRAMES;
    loop {
        let closed = receiver.is_closed();
        match receiver.take().unwrap() {
            Some((slot, _)) => {
                let mut header = [0];
                receiver.copy_out(&slot, 0, &mut header);
                assert_eq!(Some(header[0]), expected.next());
                held.push(slot);
            }
            None if closed => break,
            None => thread::yield_now(),
        }
        if held.len() == SLOTS {
            while let Some(slot) = held.pop() {
                assert!(receiver.read(&slot, 0, 1)[0] > 0);
                receiver.pass(slot, 0);
            }
        }
    }
    assert_eq!(expected.next(), None, "the goodbye overtook a frame");
    sending.join().unwrap();
}

#[test]
fn slots_are_written_and_read_by_one_end_at_a_time() {
    check(|| frames_and_a_goodbye(0..0));
}

#[test]
#[should_panic = "Causality violation"]
fn without_release_the_receiver_reads_what_is_being_written() {
    check(|| frames_and_a_goodbye(PUBLISHED));
}

#[test]
#[should_panic = "Causality violation"]
fn without_release_the_sender_writes_what_is_being_read() {
    check(|| frames_and_a_goodbye(RETURNED));
}

#[test]
#[should_panic = "the goodbye overtook a frame"]
fn without_release_the_goodbye_overtakes_a_frame() {
    check(|| frames_and_a_goodbye(CLOSED));
}

/// A word of the checker's to sleep on: a futex is a lock under which the word is compared, and a
/// queue.
struct ModelAlarm<const FENCED: bool> {
    word: atomic::AtomicU32,
    queue: (Mutex<()>, Condvar),
}

impl<const FENCED: bool> ModelAlarm<FENCED> {
    fn new() -> Self {
        Self { word: atomic::AtomicU32::new(0), queue: (Mutex::new(()), Condvar::new()) }
    }
}

impl<const FENCED: bool> Word for ModelAlarm<FENCED> {
    fn load(&self, order: Ordering) -> u32 {
        self.word.load(order)
    }

    fn store(&self, value: u32, order: Ordering) {
        self.word.store(value, order);
    }
}

impl<const FENCED: bool> Alarm for ModelAlarm<FENCED> {
    fn add(&self, value: u32) {
        self.word.fetch_add(value, Ordering::Release);
    }

    fn fence() {
        if FENCED {
            atomic::fence(Ordering::SeqCst);
        }
    }

    /// Without a timeout: a thread that misses a ring sleeps for ever, which the checker sees.
    fn wait(&self, value: u32, _: Duration) {
        let queue = self.queue.0.lock().unwrap();
        if self.word.load(Ordering::Relaxed) == value {
            drop(self.queue.1.wait(queue).unwrap());
        }
    }

    fn wake(&self) {
        drop(self.queue.0.lock().unwrap());
        self.queue.1.notify_all();
    }
}

/// Two ringers with something to tell, and a sleeper that ends when it has heard both.
fn two_rings<const FENCED: bool>() {
    let bell = Arc::new([ModelAlarm::<FENCED>::new(), ModelAlarm::new()]);
    let said = Arc::new([atomic::AtomicU32::new(0), atomic::AtomicU32::new(0)]);
    let ringers = [0, 1].map(|ringer| {
        let (bell, said) = (bell.clone(), said.clone());
        thread::spawn(move || {
            said[ringer].store(1, Ordering::Relaxed);
            Words { rings: &bell[0], listeners: &bell[1] }.ring();
        })
    });
    let words = Words { rings: &bell[0], listeners: &bell[1] };
    loop {
        let listening = words.listen();
        if said.iter().all(|said| said.load(Ordering::Relaxed) == 1) {
            break;
        }
        listening.sleep(Duration::MAX);
    }
    ringers.into_iter().for_each(|ringer| ringer.join().unwrap());
}

#[test]
fn no_ring_is_missed() {
    check(two_rings::<true>);
}

#[test]
#[should_panic = "deadlock"]
fn without_fences_the_model_finds_a_sleeper_that_nobody_wakes() {
    check(two_rings::<false>);
}
