//! Vectors that travel uncompressed: through pinned memory, in pieces, so that copies and network
//! overlap.
//!
//! ```text
//!  stream out     D0 D1 D2 D3          D4          D5            to the host
//!  network           [  0  ] [  1  ] [  2  ] [  3  ]  …          all-reduce in place
//!  stream back               U0       U1      U2                 to the card
//! ```
//!
//! A thread waits for copies and starts the collectives. These run on a group of their own, so that
//! they need no place in the order of the caller's.

use std::collections::VecDeque;
use std::marker::PhantomData;
use std::ops::Range;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;

use farwire::{Communicator, Element, Error, Memory, Pending, Promise, ReduceOp};
use half::{bf16, f16};

use crate::comm::card_error;
use crate::driver::{Device, DeviceTensor, Mark, PooledPinned, ValueType};
use crate::error::DeviceError;

/// Bytes in a piece: long enough for full speed, short enough that three overlap.
const PIECE: usize = 16 << 20;
/// Pieces in pinned memory at a time.
const STAGED: usize = 5;
/// Pieces on the network at a time.
const TRAVELLING: usize = 2;

/// The staging thread. Dropping this waits for its last job and ends it.
#[derive(Debug)]
pub(crate) struct Staging {
    /// `None` only while being dropped.
    jobs: Option<Sender<Job>>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug)]
enum Job {
    /// A tensor to be reduced in pieces.
    Move { tensor: DeviceTensor, op: ReduceOp, promise: Promise<()> },
    /// A vector whose operation is already running; its result is to be put on the card.
    Put { result: Travelling, tensor: DeviceTensor, promise: Promise<()> },
}

/// A running operation on a vector in host memory, by its type.
#[derive(Debug)]
pub(crate) enum Travelling {
    F32(Pending<Vec<f32>>),
    F16(Pending<Vec<f16>>),
    Bf16(Pending<Vec<bf16>>),
}

impl Travelling {
    fn wait(self) -> Result<Vec<u8>, Error> {
        fn bytes<T: Element>(pending: Pending<Vec<T>>) -> Result<Vec<u8>, Error> {
            Ok(bytemuck::cast_slice(&pending.wait()?).to_vec())
        }
        match self {
            Self::F32(pending) => bytes(pending),
            Self::F16(pending) => bytes(pending),
            Self::Bf16(pending) => bytes(pending),
        }
    }
}

impl Staging {
    /// Starts the thread. All ranks of the group start theirs; if a group has several, in the same
    /// order.
    pub(crate) fn start(comm: &Communicator, device: &Arc<Device>) -> Result<Self, Error> {
        let everyone: Vec<usize> = (0..comm.size()).collect();
        let group = comm.subgroup(&everyone, "farwire-cuda staging")?;
        let streams = || Ok::<_, DeviceError>((device.sibling()?, device.sibling()?));
        let (out, back) = streams().map_err(card_error)?;
        let (jobs, waiting) = channel();
        let stager = Stager { group, out, back };
        let thread = std::thread::Builder::new()
            .name("farwire-staging".into())
            .spawn(move || stager.work(&waiting))
            .map_err(|error| Error::System { what: "could not start a thread", error })?;
        Ok(Self { jobs: Some(jobs), thread: Some(thread) })
    }

    /// If the thread has ended, the promise is dropped, which tells the caller.
    fn send(&self, job: Job) {
        if let Some(jobs) = &self.jobs {
            let _ = jobs.send(job);
        }
    }

    /// An all-reduce of the tensor in place.
    pub(crate) fn all_reduce(&self, tensor: DeviceTensor, op: ReduceOp) -> Pending<()> {
        let (promise, pending) = Pending::promise();
        self.send(Job::Move { tensor, op, promise });
        pending
    }

    /// Writes the result over the tensor once it has arrived.
    pub(crate) fn put(&self, result: Travelling, tensor: DeviceTensor) -> Pending<()> {
        let (promise, pending) = Pending::promise();
        self.send(Job::Put { result, tensor, promise });
        pending
    }
}

impl Drop for Staging {
    /// Waits for the thread: it holds a communicator, whose last holder says goodbye to the others.
    fn drop(&mut self) {
        drop(self.jobs.take());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// The staging thread's state, with a stream for each direction.
struct Stager {
    group: Communicator,
    out: Arc<Device>,
    back: Arc<Device>,
}

impl Stager {
    fn work(&self, jobs: &Receiver<Job>) {
        while let Ok(job) = jobs.recv() {
            match job {
                Job::Move { mut tensor, op, promise } => {
                    let moved = match tensor.value_type() {
                        ValueType::F32 => self.pieces::<f32>(&mut tensor, op),
                        ValueType::F16 => self.pieces::<f16>(&mut tensor, op),
                        ValueType::Bf16 => self.pieces::<bf16>(&mut tensor, op),
                    };
                    self.end(tensor, promise, moved);
                }
                Job::Put { result, mut tensor, promise } => {
                    let put = result.wait().and_then(|bytes| self.put(&bytes, &mut tensor));
                    self.end(tensor, promise, put);
                }
            }
        }
    }

    /// Ends an operation; copies may still be running.
    fn end(&self, tensor: DeviceTensor, promise: Promise<()>, result: Result<Held, Error>) {
        let ordered = self
            .out
            .lead(tensor.stream())
            .and_then(|()| self.back.lead(tensor.stream()))
            .map_err(card_error);
        drop(tensor);
        let (held, result) = match result {
            Ok(held) => (held, ordered),
            Err(error) => (Held::default(), Err(error)),
        };
        promise.keep(result);
        // Pinned memory can be written again once it has been read.
        let _ = self.back.wait();
        drop(held);
    }

    fn put(&self, bytes: &[u8], tensor: &mut DeviceTensor) -> Result<Held, Error> {
        let mut put = || {
            let mut pinned = self.back.pooled_pinned(bytes.len())?;
            pinned.bytes_mut()[..bytes.len()].copy_from_slice(bytes);
            self.back.follow(tensor.stream())?;
            let all = 0..tensor.len();
            self.back.copy_to_tensor(&pinned, tensor, all)?;
            Ok(Held(vec![pinned]))
        };
        put().map_err(card_error)
    }

    fn pieces<T: Element>(&self, tensor: &mut DeviceTensor, op: ReduceOp) -> Result<Held, Error> {
        let each = PIECE / size_of::<T>();
        let len = tensor.len();
        let mut ranges = (0..len.div_ceil(each)).map(|i| i * each..len.min((i + 1) * each));
        self.out.follow(tensor.stream()).map_err(card_error)?;
        self.back.follow(tensor.stream()).map_err(card_error)?;
        let (mut copying, mut travelling) = (VecDeque::new(), VecDeque::new());
        for range in ranges.by_ref().take(STAGED) {
            let pinned = self.out.pooled_pinned(range.len() * size_of::<T>());
            let copied = pinned.and_then(|pinned| self.copy_out::<T>(tensor, range, pinned));
            copying.push_back(copied.map_err(card_error)?);
        }
        let mut held = Held::default();
        loop {
            while travelling.len() < TRAVELLING
                && let Some((mark, staged)) = copying.pop_front()
            {
                self.out.wait_for(mark).map_err(card_error)?;
                let memory = Memory::from_owner(staged);
                travelling.push_back(self.group.in_place().all_reduce::<T>(memory, op));
            }
            let Some(pending) = travelling.pop_front() else { return Ok(held) };
            let Ok(Staged { pinned, range, .. }) = pending.wait()?.into_owner::<Staged<T>>() else {
                unreachable!("the owner that was given")
            };
            self.back.copy_to_tensor(&pinned, tensor, range).map_err(card_error)?;
            match ranges.next() {
                None => held.0.push(pinned),
                Some(range) => {
                    // The copy starts once the pinned memory has been read.
                    self.out.follow_sibling(&self.back).map_err(card_error)?;
                    let copied = self.copy_out::<T>(tensor, range, pinned);
                    copying.push_back(copied.map_err(card_error)?);
                }
            }
        }
    }

    fn copy_out<T: Element>(
        &self,
        tensor: &DeviceTensor,
        range: Range<usize>,
        mut pinned: PooledPinned,
    ) -> Result<(Mark, Staged<T>), DeviceError> {
        self.out.copy_from_tensor(tensor, range.clone(), &mut pinned)?;
        Ok((self.out.mark()?, Staged { pinned, range, type_: PhantomData }))
    }
}

/// Pinned memory that copies to the card may still read.
#[derive(Debug, Default)]
struct Held(Vec<PooledPinned>);

/// A piece in pinned memory.
struct Staged<T> {
    pinned: PooledPinned,
    range: Range<usize>,
    type_: PhantomData<T>,
}

impl<T: Element> AsMut<[T]> for Staged<T> {
    fn as_mut(&mut self) -> &mut [T] {
        let bytes = self.range.len() * size_of::<T>();
        bytemuck::cast_slice_mut(&mut self.pinned.bytes_mut()[..bytes])
    }
}
