//! Joining a job, and the collectives.

use std::net::UdpSocket;
use std::num::NonZeroUsize;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use farwire::{
    Call, Communicator, Counts, Element, Memory, Options, Peer, Pending, Place, Preset, Rank,
    ReduceOp, WorldSize,
};
use farwire_proto::with_type;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::compressor::Compressor;
use crate::failure::Failure;
use crate::memory::View;
use crate::operation::{Copied, Operation, Plain, Work};
use crate::process::{self, Mine, Slot};

/// Runs something that waits for other ranks on a thread of its own, and checks for signals
/// meanwhile. If a signal ends the wait, the result is dropped when it comes.
pub(crate) fn interruptible<T: Send + 'static>(
    py: Python<'_>,
    work: impl FnOnce() -> T + Send + 'static,
) -> PyResult<T> {
    let (sender, mut result) = channel();
    std::thread::Builder::new().name("farwire-wait".into()).spawn(move || sender.send(work()))?;
    loop {
        let result = &mut result;
        let waited = py.detach(move || result.recv_timeout(Duration::from_millis(50)));
        match waited {
            Ok(result) => return Ok(result),
            Err(RecvTimeoutError::Timeout) => py.check_signals()?,
            Err(RecvTimeoutError::Disconnected) => {
                return Err(Failure::new("Error", "a thread of farwire's has panicked").raise(py));
            }
        }
    }
}

/// Joins a job: by the arguments, and otherwise by the environment, as `farwire::Builder` says.
#[pyfunction]
#[pyo3(signature = (*, rank=None, size=None, address=None, job=None, token=None, link=None,
                    preset=None, port=None, join_timeout=None, deadline=None))]
#[allow(clippy::too_many_arguments, reason = "they are keywords")]
pub(crate) fn join(
    py: Python<'_>,
    rank: Option<u32>,
    size: Option<u32>,
    address: Option<(String, u16)>,
    job: Option<String>,
    token: Option<String>,
    link: Option<String>,
    preset: Option<String>,
    port: Option<u16>,
    join_timeout: Option<f64>,
    deadline: Option<f64>,
) -> PyResult<Comm> {
    let wrong = |error: &dyn std::fmt::Display| PyValueError::new_err(error.to_string());
    let mut builder = Communicator::builder();
    match (rank, size, address) {
        (None, None, None) => {}
        (Some(rank), Some(size), Some((master_host, master_port))) => {
            let world = WorldSize::new(size).filter(|world| rank < world.get());
            let world = world.ok_or_else(|| {
                wrong(&format_args!(
                    "rank {rank} is not below the size, {size}; ranks count from 0"
                ))
            })?;
            let source = "farwire.init";
            builder = builder.place(Place {
                rank: Peer(rank),
                world,
                master_host,
                master_port,
                job: None,
                source,
            });
        }
        _ => {
            let text = "give rank, size and address together, or none of them: \
                        then the launcher's environment says";
            return Err(PyValueError::new_err(text));
        }
    }
    if let Some(job) = job {
        builder = builder.job(job);
    }
    if let Some(token) = token {
        builder = builder.token(token.parse().map_err(|error| wrong(&error))?);
    }
    if let Some(link) = link {
        builder = builder.link(link.parse().map_err(|error| wrong(&error))?);
    }
    match preset.as_deref() {
        None => {}
        Some("lan") => builder = builder.preset(Preset::Lan),
        Some("wan") => builder = builder.preset(Preset::Wan),
        Some(other) => {
            return Err(wrong(&format_args!("preset {other:?} is not \"lan\" or \"wan\"")));
        }
    }
    if let Some(port) = port {
        builder = builder.port(port);
    }
    if let Some(timeout) = join_timeout {
        builder = builder.join_timeout(seconds("join_timeout", timeout)?);
    }
    if let Some(deadline) = deadline {
        builder = builder.deadline(seconds("deadline", deadline)?);
    }
    let had_joined = process::has_joined().map_err(|failure| failure.raise(py))?;
    let joined = interruptible(py, move || builder.join())?;
    joined.map(Comm::new).map_err(|error| match (had_joined, Failure::from(error)) {
        (true, failure) => {
            failure.after("this process has joined already, and cannot again").raise(py)
        }
        (false, failure) => failure.raise(py),
    })
}

fn seconds(what: &str, seconds: f64) -> PyResult<Duration> {
    Duration::try_from_secs_f64(seconds)
        .ok()
        .filter(|time| !time.is_zero())
        .ok_or_else(|| PyValueError::new_err(format!("{what} is {seconds}; give seconds above 0")))
}

/// A UDP port that is currently free on this host, for rank 0 to listen on.
#[pyfunction]
pub(crate) fn free_port(host: &str) -> PyResult<u16> {
    Ok(UdpSocket::bind((host, 0))?.local_addr()?.port())
}

/// A communicator. Programs use `farwire.Communicator` instead.
#[pyclass(frozen, module = "farwire._native")]
pub(crate) struct Comm {
    slot: Mine<Arc<Slot>>,
    #[pyo3(get)]
    rank: usize,
    #[pyo3(get)]
    size: usize,
}

impl Comm {
    fn new(comm: Communicator) -> Self {
        let (rank, size) = (comm.rank(), comm.size());
        Self { slot: Mine::new(process::opened(comm)), rank, size }
    }

    /// The communicator, unless it was closed, or this is a forked child.
    pub(crate) fn open(&self, py: Python<'_>) -> PyResult<Communicator> {
        let slot = self.slot.get().map_err(|failure| failure.raise(py))?;
        let open = slot.read().unwrap_or_else(PoisonError::into_inner).clone();
        open.ok_or_else(|| Failure::call("this communicator was closed; join again").raise(py))
    }

    /// Starts an operation in the memory of a view.
    fn in_place(
        &self,
        py: Python<'_>,
        view: View,
        result: Py<PyAny>,
        start: impl InPlaceCall,
    ) -> PyResult<Operation> {
        let comm = self.open(py)?;
        let work = with_type!(view.dtype()?, T => {
            let memory = view.memory::<T>()?;
            py.detach(|| Box::new(Plain(start.start(&comm, memory))) as Box<dyn Work>)
        });
        Ok(Operation::new(work, result))
    }
}

/// A rank, or a number of elements.
struct Index(usize);

impl<'py> FromPyObject<'_, 'py> for Index {
    type Error = PyErr;

    fn extract(object: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        let number: i64 = object.extract()?;
        usize::try_from(number).map(Self).map_err(|_| {
            let text = format!("{number} is neither a rank nor a length; these count from 0");
            Failure::call(text).raise(object.py())
        })
    }
}

/// A tag, a color or a key.
struct Label(u32);

impl<'py> FromPyObject<'_, 'py> for Label {
    type Error = PyErr;

    fn extract(object: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        let number: i64 = object.extract()?;
        u32::try_from(number).map(Self).map_err(|_| {
            let text = format!("{number} is no tag, color or key; these are 0 to {}", u32::MAX);
            Failure::call(text).raise(object.py())
        })
    }
}

/// A call that works in place on elements of any type: a closure cannot be generic.
trait InPlaceCall: Send {
    fn start<T: Element>(self, comm: &Communicator, memory: Memory<T>) -> Pending<Memory<T>>;
}

macro_rules! in_place_calls {
    ($($name:ident { $($field:ident: $type:ty),* } => $method:ident;)*) => {
        $(
            struct $name { $($field: $type),* }
            impl InPlaceCall for $name {
                fn start<T: Element>(
                    self,
                    comm: &Communicator,
                    memory: Memory<T>,
                ) -> Pending<Memory<T>> {
                    comm.in_place().$method(memory, $(self.$field),*)
                }
            }
        )*
    };
}

in_place_calls! {
    AllReduce { op: ReduceOp } => all_reduce;
    Reduce { op: ReduceOp, root: usize } => reduce;
    ReduceScatter { op: ReduceOp } => reduce_scatter;
    AllGather {} => all_gather;
    Broadcast { root: usize } => broadcast;
    Send_ { to: usize, tag: u32 } => send;
    Recv { from: usize, tag: u32 } => recv;
}

/// A copy of a view's elements.
fn read<T: Element>(py: Python<'_>, view: Option<View>) -> PyResult<Vec<T>> {
    let Some(view) = view else { return Ok(Vec::new()) };
    let memory = view.memory::<T>()?;
    Ok(py.detach(|| memory.to_vec()))
}

/// The operator with this name.
pub(crate) fn operator(name: &str) -> PyResult<ReduceOp> {
    let name = match name {
        "avg" => "mean",
        "product" => "prod",
        name => name,
    };
    name.parse().map_err(|error: farwire::UnknownName| PyValueError::new_err(error.to_string()))
}

#[pymethods]
impl Comm {
    fn all_reduce(
        &self,
        py: Python<'_>,
        view: View,
        op: &str,
        result: Py<PyAny>,
    ) -> PyResult<Operation> {
        self.in_place(py, view, result, AllReduce { op: operator(op)? })
    }

    /// An all-reduce through a codec. The result replaces the input.
    fn all_reduce_compressed(
        &self,
        py: Python<'_>,
        view: View,
        op: &str,
        compressor: &Compressor,
        name: &str,
        result: Py<PyAny>,
    ) -> PyResult<Operation> {
        let (comm, op) = (self.open(py)?, operator(op)?);
        let compressor = compressor.handle(py)?;
        let work = with_float!(view.dtype()?, T => {
            let memory = view.memory::<T>()?;
            py.detach(|| {
                let pending = comm.all_reduce_compressed(name, memory.to_vec(), op, &compressor);
                Box::new(Copied { pending, to: Some(memory) }) as Box<dyn Work>
            })
        });
        Ok(Operation::new(work, result))
    }

    fn reduce(
        &self,
        py: Python<'_>,
        view: View,
        op: &str,
        root: Index,
        result: Py<PyAny>,
    ) -> PyResult<Operation> {
        self.in_place(py, view, result, Reduce { op: operator(op)?, root: root.0 })
    }

    fn reduce_scatter(
        &self,
        py: Python<'_>,
        view: View,
        op: &str,
        result: Py<PyAny>,
    ) -> PyResult<Operation> {
        self.in_place(py, view, result, ReduceScatter { op: operator(op)? })
    }

    fn all_gather(&self, py: Python<'_>, view: View, result: Py<PyAny>) -> PyResult<Operation> {
        if !view.count()?.is_multiple_of(self.size) {
            let (count, size) = (view.count()?, self.size);
            let text = format!("{count} elements are not {size} equal blocks; give one per rank");
            return Err(Failure::call(text).raise(py));
        }
        self.in_place(py, view, result, AllGather {})
    }

    /// An all-gather in `whole`. This rank's block is copied there first, unless it is there
    /// already.
    fn all_gather_into(
        &self,
        py: Python<'_>,
        block: View,
        whole: View,
        result: Py<PyAny>,
    ) -> PyResult<Operation> {
        let (comm, dtype) = (self.open(py)?, whole.dtype()?);
        if block.bytes().checked_mul(self.size) != Some(whole.bytes()) {
            let (given, room) = (block.bytes(), whole.bytes());
            let text = format!(
                "the output has {room} bytes, which is not {} times the {given} that each rank \
                 gives; make it as long as all blocks together",
                self.size
            );
            return Err(Failure::call(text).raise(py));
        }
        let start = block.bytes() * self.rank;
        let is_there = block.address() == whole.address() + start;
        let work = with_type!(dtype, T => {
            let data = read::<T>(py, Some(block).filter(|_| !is_there))?;
            let mut memory = whole.memory::<T>()?;
            py.detach(|| {
                let start = start / size_of::<T>();
                memory[start..start + data.len()].copy_from_slice(&data);
                Box::new(Plain(comm.in_place().all_gather(memory))) as Box<dyn Work>
            })
        });
        Ok(Operation::new(work, result))
    }

    fn broadcast(
        &self,
        py: Python<'_>,
        view: View,
        root: Index,
        result: Py<PyAny>,
    ) -> PyResult<Operation> {
        self.in_place(py, view, result, Broadcast { root: root.0 })
    }

    fn send(
        &self,
        py: Python<'_>,
        view: View,
        to: Index,
        tag: Label,
        result: Py<PyAny>,
    ) -> PyResult<Operation> {
        self.in_place(py, view, result, Send_ { to: to.0, tag: tag.0 })
    }

    fn recv(
        &self,
        py: Python<'_>,
        view: View,
        source: Index,
        tag: Label,
        result: Py<PyAny>,
    ) -> PyResult<Operation> {
        self.in_place(py, view, result, Recv { from: source.0, tag: tag.0 })
    }

    /// A call with separate input and output. `input` is `None` on a rank that gives no elements,
    /// and `output` on a rank that gets none.
    #[pyo3(signature = (kind, dtype, input, output, result, *, op="sum", root=Index(0), send=None,
                        recv=None))]
    #[allow(clippy::too_many_arguments, reason = "they are keywords")]
    fn apart(
        &self,
        py: Python<'_>,
        kind: &str,
        dtype: &str,
        input: Option<View>,
        output: Option<View>,
        result: Py<PyAny>,
        op: &str,
        root: Index,
        send: Option<Vec<Index>>,
        recv: Option<Vec<Index>>,
    ) -> PyResult<Operation> {
        let comm = self.open(py)?;
        let dtype = crate::memory::dtype(dtype)?;
        let op = operator(op)?;
        let elements = |view: &Option<View>| view.as_ref().map_or(Ok(0), View::count);
        let (given, wanted) = (elements(&input)?, elements(&output)?);
        let world = WorldSize::new(self.size as u32).expect("this process is a member");
        let root = Rank(u32::try_from(root.0).unwrap_or(u32::MAX));
        let blocks = |counts: Option<Vec<Index>>, whole: usize| match counts {
            Some(counts) => {
                Counts::listed(counts.into_iter().map(|n| n.0).collect::<Vec<_>>(), world)
            }
            None => Counts::Each(whole / self.size),
        };
        let call = match kind {
            "all_gather" => Call::AllGather { counts: blocks(recv, wanted), dtype },
            "reduce_scatter" => Call::ReduceScatter { count: given, dtype, op },
            "gather" => Call::Gather { counts: Counts::Each(given), dtype, root },
            "scatter" => Call::Scatter { counts: Counts::Each(wanted), dtype, root },
            "all_to_all" => {
                Call::AllToAll { send: blocks(send, given), recv: blocks(recv, wanted), dtype }
            }
            "scan" => Call::Scan { count: given, dtype, op },
            "exclusive_scan" => Call::ExclusiveScan { count: given, dtype, op },
            other => return Err(PyValueError::new_err(format!("no call {other:?}"))),
        };
        let work = with_type!(dtype, T => {
            // The input is read before the output is claimed: they may be the same memory.
            let data = read::<T>(py, input)?;
            let to = output.map(View::memory::<T>).transpose()?;
            py.detach(|| Box::new(Copied { pending: comm.run(call, data), to }) as Box<dyn Work>)
        });
        Ok(Operation::new(work, result))
    }

    fn barrier(&self, py: Python<'_>) -> PyResult<Operation> {
        let comm = self.open(py)?;
        let work = py.detach(|| Box::new(Plain(comm.barrier())));
        Ok(Operation::new(work, py.None()))
    }

    fn split(&self, py: Python<'_>, color: Label, key: Label) -> PyResult<Self> {
        let comm = self.open(py)?;
        let group = interruptible(py, move || comm.split(color.0, key.0))?;
        group.map(Self::new).map_err(|error| Failure::from(error).raise(py))
    }

    fn subgroup(&self, py: Python<'_>, ranks: Vec<Index>, name: &str) -> PyResult<Self> {
        let (comm, ranks) = (self.open(py)?, ranks.into_iter().map(|rank| rank.0));
        let ranks: Vec<_> = ranks.collect();
        let group = py.detach(|| comm.subgroup(&ranks, name));
        group.map(Self::new).map_err(|error| Failure::from(error).raise(py))
    }

    /// The same group, with other settings for calls through it.
    #[pyo3(signature = (*, deadline=None, algorithm=None, segment=None))]
    fn with_options(
        &self,
        py: Python<'_>,
        deadline: Option<f64>,
        algorithm: Option<&str>,
        segment: Option<usize>,
    ) -> PyResult<Self> {
        let algorithm = algorithm.map(str::parse).transpose();
        let options = Options {
            deadline: deadline.map(|deadline| seconds("deadline", deadline)).transpose()?,
            algorithm: algorithm
                .map_err(|error: farwire::UnknownName| PyValueError::new_err(error.to_string()))?,
            segment: segment.and_then(NonZeroUsize::new),
        };
        Ok(Self::new(self.open(py)?.with_options(options)))
    }

    /// Whether all ranks hold the same bits.
    fn is_in_sync(&self, py: Python<'_>, view: View) -> PyResult<bool> {
        let comm = self.open(py)?;
        let memory = View::memory::<u8>(view)?;
        let same = interruptible(py, move || comm.is_in_sync(&memory))?;
        same.map_err(|error| Failure::from(error).raise(py))
    }

    /// Frames and bytes that this process has sent since it joined.
    fn traffic(&self, py: Python<'_>) -> PyResult<(u64, u64)> {
        let comm = self.open(py)?;
        let traffic = py.detach(|| comm.traffic());
        Ok((traffic.frames, traffic.bytes))
    }

    /// Releases the communicator. The last one of a process says goodbye to the other ranks.
    fn close(&self, py: Python<'_>) {
        if let Ok(slot) = self.slot.get() {
            py.detach(|| process::close(slot));
        }
    }
}

impl Drop for Comm {
    fn drop(&mut self) {
        // Saying goodbye needs other threads or ranks, which may need the interpreter.
        let Ok(slot) = self.slot.get().cloned() else { return };
        if Python::try_attach(|py| py.detach(|| process::close(&slot))).is_none() {
            process::close(&slot);
        }
    }
}

/// Like `with_type!`, for the types that a codec takes.
macro_rules! with_float {
    ($dtype:expr, $name:ident => $body:expr) => {
        match $dtype {
            farwire::DType::F32 => {
                type $name = f32;
                $body
            }
            farwire::DType::F64 => {
                type $name = f64;
                $body
            }
            farwire::DType::F16 => {
                type $name = half::f16;
                $body
            }
            farwire::DType::Bf16 => {
                type $name = half::bf16;
                $body
            }
            other => {
                return Err(pyo3::exceptions::PyTypeError::new_err(format!(
                    "a codec takes floats, not {other}; leave the codec out"
                )))
            }
        }
    };
}
pub(crate) use with_float;
