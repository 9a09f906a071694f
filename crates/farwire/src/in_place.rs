//! Collectives that leave their result where their input was.

use farwire_codec::CodecSpec;
use farwire_proto::{Call, Counts, Element, ReduceOp, Tag};

use crate::comm::{Communicator, rank};
use crate::compressed::Compressor;
use crate::memory::Memory;
use crate::pending::Pending;

/// The collectives of a [`Communicator`] that can work in place, in a vector or in [`Memory`] that
/// somebody else owns: nothing is copied in or out, and there is no second copy of the vector.
///
/// Each takes the memory, which comes back with the result, or with the error
/// ([`take_memory`](crate::Error::take_memory)). A call that is refused leaves it as it was. The
/// price of working in place: a call that fails half-way may leave anything in it. The result has
/// the same bits as with the call that keeps its input. But the two may move their data in
/// different ways, so all ranks must make the same one.
///
/// ```
/// use farwire::ReduceOp;
///
/// std::thread::scope(|scope| {
///     for comm in farwire::local(3).expect("shared memory") {
///         scope.spawn(move || {
///             let gradient = vec![comm.rank() as f32; 10].into_boxed_slice();
///             let mean = comm.in_place().all_reduce(gradient, ReduceOp::Mean).wait().expect("all are here");
///             assert_eq!(mean[..], [1.0; 10]);
///         });
///     }
/// });
/// ```
#[derive(Clone, Copy, Debug)]
pub struct InPlace<'a> {
    comm: &'a Communicator,
}

impl<'a> InPlace<'a> {
    pub(crate) fn new(comm: &'a Communicator) -> Self {
        Self { comm }
    }

    /// Everyone gets the combination of everyone's vector.
    pub fn all_reduce<T: Element>(
        &self,
        data: impl Into<Memory<T>>,
        op: ReduceOp,
    ) -> Pending<Memory<T>> {
        self.start(data, |count| Call::AllReduce { count, dtype: T::DTYPE, op })
    }

    /// The root gets the combination of everyone's vector. The others' vectors may hold anything
    /// afterwards.
    pub fn reduce<T: Element>(
        &self,
        data: impl Into<Memory<T>>,
        op: ReduceOp,
        root: usize,
    ) -> Pending<Memory<T>> {
        self.start(data, |count| Call::Reduce { count, dtype: T::DTYPE, op, root: rank(root) })
    }

    /// Each rank gets its block of the combination of everyone's vector, at the block's place in
    /// the vector. Blocks are as even as possible; the first ones are longer. The rest is as it
    /// was.
    pub fn reduce_scatter<T: Element>(
        &self,
        data: impl Into<Memory<T>>,
        op: ReduceOp,
    ) -> Pending<Memory<T>> {
        self.start(data, |count| Call::ReduceScatter { count, dtype: T::DTYPE, op })
    }

    /// Everyone gets everyone's block: the memory is cut into equal blocks, one per rank, and each
    /// rank gives what its own block holds.
    pub fn all_gather<T: Element>(&self, data: impl Into<Memory<T>>) -> Pending<Memory<T>> {
        let ranks = self.comm.size();
        self.start(data, |count| Call::AllGather {
            counts: Counts::Each(count / ranks),
            dtype: T::DTYPE,
        })
    }

    /// Everyone gets the root's vector.
    pub fn broadcast<T: Element>(
        &self,
        data: impl Into<Memory<T>>,
        root: usize,
    ) -> Pending<Memory<T>> {
        self.start(data, |count| Call::Broadcast { count, dtype: T::DTYPE, root: rank(root) })
    }

    /// Sends a message out of the memory: see [`Communicator::send`]. The other end may receive it
    /// in place or not.
    pub fn send<T: Element>(
        &self,
        data: impl Into<Memory<T>>,
        to: usize,
        tag: u32,
    ) -> Pending<Memory<T>> {
        self.start(data, |count| Call::Send { to: rank(to), tag: Tag(tag), count, dtype: T::DTYPE })
    }

    /// Receives a message into the memory, which must have the message's length.
    pub fn recv<T: Element>(
        &self,
        data: impl Into<Memory<T>>,
        from: usize,
        tag: u32,
    ) -> Pending<Memory<T>> {
        self.start(data, |count| Call::Recv {
            from: rank(from),
            tag: Tag(tag),
            count,
            dtype: T::DTYPE,
        })
    }

    /// [`Communicator::all_reduce_compressed`] of a gradient through `codec`, which replaces
    /// `compressor`'s own, with what `compressor` owes. The result takes the gradient's place, and
    /// has the same bits: each rank may make either call. (Not where [hosts have several
    /// ranks](Communicator::split_placement): this one goes from rank to rank.) A codec that sends
    /// whole vectors is refused.
    ///
    /// The memory does not come back: its owner is dropped when the operation has ended. If it
    /// ended with the result, or with a NaN in some rank's gradient, that is before the [`Pending`]
    /// is done.
    ///
    /// ```
    /// use farwire::{Compressor, Memory, ReduceOp};
    ///
    /// let (comm, top) = (farwire::local(1)?.remove(0), "topk:0.25,values=f32".parse()?);
    /// let owed = Compressor::new(Default::default());
    /// let gradient = vec![4.0f32, 1.0, 0.0, 0.0];
    /// comm.in_place().all_reduce_coded("w", gradient, ReduceOp::Mean, top, &owed).wait()?;
    /// assert!(owed.feedback().unwrap().owes("w"));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn all_reduce_coded(
        &self,
        tensor: &str,
        data: impl Into<Memory<f32>>,
        op: ReduceOp,
        codec: CodecSpec,
        compressor: &Compressor,
    ) -> Pending<()> {
        self.comm.all_reduce_lent(tensor, data.into(), op, codec, compressor)
    }

    fn start<T: Element>(
        &self,
        data: impl Into<Memory<T>>,
        call: impl FnOnce(usize) -> Call,
    ) -> Pending<Memory<T>> {
        let data = data.into();
        let call = Call::InPlace(Box::new(call(data.len())));
        self.comm.start(call, data.into_buffer(), Memory::from_buffer)
    }
}
