//! The card: its context, its stream and memory on both sides of the bus. One of the three files
//! with `unsafe`.
//!
//! Rules:
//! 1. No driver function is called before [`is_present`] has found the driver: cudarc would panic.
//! 2. All work on a device is put on its one stream, and so are allocation and release of its
//!    memory: whatever was put there before a buffer is dropped is done before the memory is used
//!    again. That is why cudarc need not track who reads and writes what. Memory that belongs to
//!    others comes with the stream they use it on: this stream waits for theirs before the first
//!    access, and theirs waits for this one after the last.
//! 3. The host looks at pinned memory only after it has waited for the stream: the bytes are
//!    visible only within this crate, and code that starts a copy waits before it reads, writes or
//!    returns the memory.
//! 4. Lengths are checked here, in release builds too, before a copy is started.

#![allow(unsafe_code)]

use std::collections::HashMap;
use std::fmt;
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut, Range};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bytemuck::Pod;
use cudarc::driver::sys::{self, CUdeviceptr, CUevent_flags};
use cudarc::driver::{
    CudaContext, CudaEvent, CudaFunction, CudaModule, CudaSlice, CudaStream, DevicePtr, DeviceRepr,
    DriverError, LaunchArgs, LaunchConfig, PushKernelArg, result,
};
use cudarc::nvrtc::Ptx;
use half::{bf16, f16};

use crate::cache::{Cache, Key};
use crate::error::DeviceError;
use crate::nvrtc;
use crate::source::{Source, options};

/// Whether the driver is present. Looked up once; a program that is linked to it always has it.
fn is_present() -> bool {
    #[cfg(feature = "linked")]
    return true;
    #[cfg(not(feature = "linked"))]
    {
        static PRESENT: std::sync::OnceLock<bool> = std::sync::OnceLock::new();
        // SAFETY: loads a library, as the first use would; the driver does nothing until it is
        // initialised.
        *PRESENT.get_or_init(|| unsafe { sys::is_culib_present() })
    }
}

fn failed(what: &'static str) -> impl Fn(DriverError) -> DeviceError {
    move |error| DeviceError::Driver { what, why: describe(error) }
}

fn describe(error: DriverError) -> String {
    let text = error.error_string().map(|text| text.to_string_lossy().into_owned());
    text.unwrap_or_else(|_| format!("{error:?}"))
}

/// What is known about a card.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Card {
    /// Its number.
    pub ordinal: usize,
    /// Its name.
    pub name: String,
    /// Its architecture.
    pub compute_capability: (i32, i32),
    /// Bytes of memory.
    pub memory: usize,
    /// The newest CUDA version the driver supports.
    pub driver: (i32, i32),
}

/// The cards of this machine.
pub fn cards() -> Result<Vec<Card>, DeviceError> {
    if !is_present() {
        return Err(DeviceError::NoDriver);
    }
    let no_card = |why| DeviceError::NoCard { ordinal: 0, why: describe(why) };
    result::init().map_err(no_card)?;
    let mut version = 0;
    // SAFETY: rule 1; the pointer is to an integer.
    unsafe { sys::cuDriverGetVersion(&mut version) };
    let count = result::device::get_count().map_err(no_card)?;
    let card = |ordinal: i32| {
        use sys::CUdevice_attribute as Attribute;
        let device = result::device::get(ordinal)?;
        // SAFETY: the driver has just named this device.
        let attribute = |a| unsafe { result::device::get_attribute(device, a) };
        Ok(Card {
            ordinal: ordinal as usize,
            name: result::device::get_name(device)?,
            compute_capability: (
                attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
                attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
            ),
            // SAFETY: as above.
            memory: unsafe { result::device::total_mem(device)? },
            driver: (version / 1000, version % 1000 / 10),
        })
    };
    (0..count).map(card).collect::<Result<_, _>>().map_err(failed("describe itself"))
}

/// A card, with one stream on which all its work runs in order.
pub struct Device {
    context: Arc<CudaContext>,
    stream: Arc<CudaStream>,
    compute_capability: (i32, i32),
    multiprocessors: u32,
    cache: Cache,
    modules: Mutex<HashMap<Source, Arc<CudaModule>>>,
    spare: Mutex<Spare>,
    bus: Arc<Bus>,
}

/// Bytes that have crossed the bus, on the streams of a device and its siblings.
#[derive(Default)]
struct Bus {
    to_host: AtomicU64,
    to_card: AtomicU64,
}

/// Memory and events kept for reuse.
#[derive(Default)]
struct Spare {
    memory: Vec<DeviceMemory>,
    pinned: Vec<Pinned>,
    events: Vec<CudaEvent>,
}

/// A point in the order of a device's work.
pub(crate) struct Mark(CudaEvent);

impl fmt::Debug for Mark {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Mark").finish_non_exhaustive()
    }
}

/// Bytes that crossed the bus since the device was opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BusTraffic {
    /// From the card to the host.
    pub to_host: u64,
    /// From the host to the card.
    pub to_card: u64,
}

impl std::ops::Sub for BusTraffic {
    type Output = Self;

    fn sub(self, before: Self) -> Self {
        let to_host = self.to_host - before.to_host;
        Self { to_host, to_card: self.to_card - before.to_card }
    }
}

/// Somebody else's stream on the same card: what the driver calls a `CUstream`, as a number. Zero
/// is the default stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CallerStream(u64);

impl CallerStream {
    fn raw(self) -> sys::CUstream {
        self.0 as sys::CUstream
    }
}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Device").field("ordinal", &self.context.ordinal()).finish_non_exhaustive()
    }
}

impl Device {
    /// Opens card `ordinal`, with compiled kernels kept in the folder named by the environment.
    pub fn new(ordinal: usize) -> Result<Arc<Self>, DeviceError> {
        Self::with_cache(ordinal, Cache::from_env())
    }

    /// The same, with compiled kernels kept in `cache`.
    pub fn with_cache(ordinal: usize, cache: Cache) -> Result<Arc<Self>, DeviceError> {
        if !is_present() {
            return Err(DeviceError::NoDriver);
        }
        let no_card = |error| DeviceError::NoCard { ordinal, why: describe(error) };
        let context = CudaContext::new(ordinal).map_err(no_card)?;
        // SAFETY: rule 2.
        unsafe { context.disable_event_tracking() };
        let stream = context.new_stream().map_err(no_card)?;
        let compute_capability = context.compute_capability().map_err(no_card)?;
        let multiprocessors = context
            .attribute(sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)
            .map_err(no_card)? as u32;
        Ok(Arc::new(Self {
            context,
            stream,
            compute_capability,
            multiprocessors,
            cache,
            modules: Mutex::default(),
            spare: Mutex::default(),
            bus: Arc::default(),
        }))
    }

    /// The same card, with a stream of its own.
    pub(crate) fn sibling(&self) -> Result<Arc<Self>, DeviceError> {
        self.bind()?;
        let stream = self.context.new_stream().map_err(failed("make a stream"))?;
        Ok(Arc::new(Self {
            context: self.context.clone(),
            stream,
            compute_capability: self.compute_capability,
            multiprocessors: self.multiprocessors,
            cache: self.cache.clone(),
            modules: Mutex::default(),
            spare: Mutex::default(),
            bus: self.bus.clone(),
        }))
    }

    /// Work put on the stream from now on waits for the work that is on the sibling's stream now.
    pub(crate) fn follow_sibling(&self, sibling: &Self) -> Result<(), DeviceError> {
        self.order(sibling.stream.cu_stream(), self.stream.cu_stream())
    }

    /// Which card it is.
    pub fn ordinal(&self) -> usize {
        self.context.ordinal()
    }

    /// The stream that all work runs on: a `CUstream` as a number.
    pub fn stream(&self) -> u64 {
        self.stream.cu_stream() as u64
    }

    /// Work put on `stream`, a stream of the same card, from now on waits for the work that is on
    /// the device's stream now. Memory which that work reads can then be used again on `stream`.
    ///
    /// # Safety
    ///
    /// `stream` is a stream of this card that still exists, as a number; zero is the default
    /// stream.
    pub unsafe fn let_stream_wait(&self, stream: u64) -> Result<(), DeviceError> {
        self.lead(CallerStream(stream))
    }

    /// Bytes that have crossed the bus.
    pub fn bus(&self) -> BusTraffic {
        BusTraffic {
            to_host: self.bus.to_host.load(Ordering::Relaxed),
            to_card: self.bus.to_card.load(Ordering::Relaxed),
        }
    }

    /// Releases the memory that is kept for reuse.
    pub fn trim(&self) {
        let spare = std::mem::take(&mut *self.spare());
        drop(spare);
    }

    fn spare(&self) -> MutexGuard<'_, Spare> {
        self.spare.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until all work put on the stream so far is done. The thread sleeps meanwhile.
    pub(crate) fn wait(&self) -> Result<(), DeviceError> {
        self.wait_for(self.mark()?)
    }

    /// Marks the current end of the stream's work.
    pub(crate) fn mark(&self) -> Result<Mark, DeviceError> {
        self.bind()?;
        let spare = self.spare().events.pop();
        let event = match spare {
            Some(event) => event,
            None => self
                .context
                .new_event(Some(CUevent_flags::CU_EVENT_BLOCKING_SYNC))
                .map_err(failed("make an event"))?,
        };
        event.record(&self.stream).map_err(failed("record an event"))?;
        Ok(Mark(event))
    }

    /// Waits until all work put on the stream before the mark is done. The thread sleeps meanwhile.
    pub(crate) fn wait_for(&self, mark: Mark) -> Result<(), DeviceError> {
        mark.0.synchronize().map_err(failed("finish its work"))?;
        self.spare().events.push(mark.0);
        Ok(())
    }

    /// Work put on the device's stream from now on waits for the work that is on `other` now.
    pub(crate) fn follow(&self, other: CallerStream) -> Result<(), DeviceError> {
        self.order(other.raw(), self.stream.cu_stream())
    }

    /// Work put on `other` from now on waits for the work that is on the device's stream now.
    pub(crate) fn lead(&self, other: CallerStream) -> Result<(), DeviceError> {
        self.order(self.stream.cu_stream(), other.raw())
    }

    fn order(&self, first: sys::CUstream, then: sys::CUstream) -> Result<(), DeviceError> {
        if first == then {
            return Ok(());
        }
        self.bind()?;
        let event = self.context.new_event(None).map_err(failed("make an event"))?;
        // SAFETY: one is the device's stream; whoever made the other a `CallerStream` promised that
        // it is a stream of this card that still exists. An event may be destroyed before it
        // happens.
        unsafe {
            result::event::record(event.cu_event(), first).map_err(failed("record an event"))?;
            let flags = sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT;
            result::stream::wait_event(then, event.cu_event(), flags)
                .map_err(failed("wait for an event"))
        }
    }

    /// Room for `len` elements, with unspecified content. It returns to the device when dropped.
    pub(crate) fn pooled<T: Pod>(self: &Arc<Self>, len: usize) -> Result<Pooled<T>, DeviceError> {
        let need = len.saturating_mul(size_of::<T>());
        let mut spare = self.spare();
        let fits = |(_, memory): &(usize, &DeviceMemory)| {
            memory.len() >= need && memory.len() <= need.saturating_mul(2).max(POOLED)
        };
        let best = spare.memory.iter().enumerate().filter(fits).min_by_key(|(_, m)| m.len());
        let found = best.map(|(at, _)| at).map(|at| spare.memory.swap_remove(at));
        drop(spare);
        let buffer = match found {
            Some(bytes) => Buffer { device: self.clone(), bytes, len, type_: PhantomData },
            None => {
                let units = len.next_multiple_of((POOLED / size_of::<T>()).max(1));
                Buffer { len, ..self.buffer(units)? }
            }
        };
        Ok(Pooled(Some(buffer)))
    }

    /// Pinned memory of at least `len` bytes, with unspecified content. It returns to the device
    /// when dropped.
    pub(crate) fn pooled_pinned(self: &Arc<Self>, len: usize) -> Result<PooledPinned, DeviceError> {
        let mut spare = self.spare();
        let fits = |(_, pinned): &(usize, &Pinned)| {
            pinned.len >= len && pinned.len <= len.saturating_mul(2).max(POOLED)
        };
        let best = spare.pinned.iter().enumerate().filter(fits).min_by_key(|(_, p)| p.len);
        let found = best.map(|(at, _)| at).map(|at| spare.pinned.swap_remove(at));
        drop(spare);
        let pinned = match found {
            Some(pinned) => pinned,
            // Messages of sparse codecs differ in length from step to step.
            None => Pinned::new(self, (len + len / 8).next_multiple_of(POOLED))?,
        };
        Ok(PooledPinned { device: self.clone(), pinned: Some(pinned) })
    }

    /// How many multiprocessors the card has.
    pub(crate) fn multiprocessors(&self) -> u32 {
        self.multiprocessors
    }

    /// Waits until all work put on the stream is done.
    pub fn synchronize(&self) -> Result<(), DeviceError> {
        self.stream.synchronize().map_err(failed("finish its work"))
    }

    /// The card's free memory and its total memory, in bytes.
    pub fn memory(&self) -> Result<(usize, usize), DeviceError> {
        self.context.mem_get_info().map_err(failed("say how much memory is free"))
    }

    /// Room for `len` elements, with unspecified content.
    pub fn buffer<T: Pod>(self: &Arc<Self>, len: usize) -> Result<Buffer<T>, DeviceError> {
        let out_of_memory = |bytes| DeviceError::OutOfMemory { which: "device", bytes };
        let bytes = len.checked_mul(size_of::<T>()).ok_or(out_of_memory(usize::MAX))?;
        // SAFETY: the content means nothing until something is written; every `Pod` type may have
        // any bits. The driver does not give out zero bytes.
        let allocate = || unsafe { self.stream.alloc::<u8>(bytes.max(16)) };
        let bytes = allocate().or_else(|_| {
            // The memory kept for reuse may be enough.
            self.trim();
            allocate()
        });
        let bytes = bytes.map_err(|error| match error.0 {
            sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY => out_of_memory(len * size_of::<T>()),
            _ => failed("allocate memory")(error),
        })?;
        let bytes = DeviceMemory(Some(bytes));
        Ok(Buffer { device: self.clone(), bytes, len, type_: PhantomData })
    }

    /// `len` zeros.
    pub fn zeros<T: Pod>(self: &Arc<Self>, len: usize) -> Result<Buffer<T>, DeviceError> {
        let mut buffer = self.buffer(len)?;
        buffer.fill_bytes(0..len, 0)?;
        Ok(buffer)
    }

    /// A copy of these elements on the card. Waits until it is complete.
    pub fn upload<T: Pod>(self: &Arc<Self>, values: &[T]) -> Result<Buffer<T>, DeviceError> {
        let mut buffer = self.buffer(values.len())?;
        buffer.upload(values)?;
        Ok(buffer)
    }

    /// The kernels of a source. They are compiled if neither this program nor the cache has them.
    pub(crate) fn module(self: &Arc<Self>, source: &Source) -> Result<Module, DeviceError> {
        let mut modules = self.modules.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(module) = modules.get(source) {
            return Ok(Module { device: self.clone(), module: module.clone() });
        }
        let (text, options) = (source.text(), options(self.compute_capability));
        let version = format!("{:?}", nvrtc::nvrtc_version());
        let key = Key::new(&[&text, &options.join(" "), &version]);
        let load = |code: Vec<u8>| self.context.load_module(Ptx::from_binary(code));
        let module = match self.cache.load(&key).map(load) {
            Some(Ok(module)) => module,
            // Not in the cache, or the driver refuses it.
            _ => {
                let code = nvrtc::compile(source.name(), &text, &options)?;
                self.cache.store(&key, &code);
                load(code).map_err(failed("load its kernels"))?
            }
        };
        modules.insert(source.clone(), module.clone());
        Ok(Module { device: self.clone(), module })
    }

    /// Puts a copy of the first `len` bytes of pinned memory on the stream. The memory is busy
    /// until the next [`wait`](Self::wait).
    pub(crate) fn copy_to_card(
        &self,
        from: &Pinned,
        len: usize,
        to: &mut Buffer<u8>,
    ) -> Result<(), DeviceError> {
        self.bus.to_card.fetch_add(len as u64, Ordering::Relaxed);
        assert!(len <= from.len && len <= to.len(), "a copy within both");
        if len == 0 {
            return Ok(());
        }
        self.bind()?;
        // SAFETY: `from` has this many bytes, all initialised.
        let source = unsafe { std::slice::from_raw_parts(from.pointer, len) };
        // SAFETY: both are at least that long, and neither is released before this is done: rule 2,
        // and `Pinned` waits for the stream.
        unsafe { result::memcpy_htod_async(to.pointer(), source, self.stream.cu_stream()) }
            .map_err(failed("copy from the host"))
    }

    /// Puts on the stream a copy of the first `len` elements of a buffer to the front of pinned
    /// memory.
    pub(crate) fn copy_to_host<T: Pod>(
        &self,
        from: &Buffer<T>,
        len: usize,
        to: &mut Pinned,
    ) -> Result<(), DeviceError> {
        self.copy_part_to_host(from, 0..len, to)
    }

    /// The same for some elements, to the same place in pinned memory.
    pub(crate) fn copy_part_to_host<T: Pod>(
        &self,
        from: &Buffer<T>,
        elements: Range<usize>,
        to: &mut Pinned,
    ) -> Result<(), DeviceError> {
        let bytes = elements.start * size_of::<T>()..elements.end * size_of::<T>();
        assert!(elements.start <= elements.end && elements.end <= from.len(), "elements of it");
        assert!(bytes.end <= to.len, "room for them");
        if elements.is_empty() {
            return Ok(());
        }
        self.bus.to_host.fetch_add(bytes.len() as u64, Ordering::Relaxed);
        self.bind()?;
        // SAFETY: `to` has these bytes.
        let target =
            unsafe { std::slice::from_raw_parts_mut(to.pointer.add(bytes.start), bytes.len()) };
        let source = from.pointer() + bytes.start as u64;
        // SAFETY: as in `copy_to_card`; the host does not look before it has waited, rule 3.
        unsafe { result::memcpy_dtoh_async(target, source, self.stream.cu_stream()) }
            .map_err(failed("copy to the host"))
    }

    /// Puts on the stream a copy of some elements of a tensor to the front of pinned memory.
    pub(crate) fn copy_from_tensor(
        &self,
        from: &DeviceTensor,
        elements: Range<usize>,
        to: &mut Pinned,
    ) -> Result<(), DeviceError> {
        let (bytes, source) = (elements.len() * from.type_.size(), from.values(elements).pointer);
        assert!(bytes <= to.len, "room for them");
        if bytes == 0 {
            return Ok(());
        }
        self.bus.to_host.fetch_add(bytes as u64, Ordering::Relaxed);
        self.bind()?;
        // SAFETY: `to` has this many bytes.
        let target = unsafe { std::slice::from_raw_parts_mut(to.pointer, bytes) };
        // SAFETY: whoever made the tensor promised that the elements are there; as above.
        unsafe { result::memcpy_dtoh_async(target, source, self.stream.cu_stream()) }
            .map_err(failed("copy to the host"))
    }

    /// Puts on the stream a copy from the front of pinned memory to some elements of a tensor.
    pub(crate) fn copy_to_tensor(
        &self,
        from: &Pinned,
        to: &mut DeviceTensor,
        elements: Range<usize>,
    ) -> Result<(), DeviceError> {
        let (bytes, target) = (elements.len() * to.type_.size(), to.values(elements).pointer);
        assert!(bytes <= from.len, "so many bytes");
        if bytes == 0 {
            return Ok(());
        }
        self.bus.to_card.fetch_add(bytes as u64, Ordering::Relaxed);
        self.bind()?;
        // SAFETY: `from` has this many bytes, all initialised.
        let source = unsafe { std::slice::from_raw_parts(from.pointer, bytes) };
        // SAFETY: whoever made the tensor promised that the elements are there, and that nobody
        // else accesses them now; pinned memory is not released before this is done.
        unsafe { result::memcpy_htod_async(target, source, self.stream.cu_stream()) }
            .map_err(failed("copy from the host"))
    }

    /// Puts on the stream a copy of some elements to the front of another buffer.
    pub(crate) fn copy_on_card<T: Pod>(
        &self,
        from: &Buffer<T>,
        elements: Range<usize>,
        to: &mut Buffer<T>,
    ) -> Result<(), DeviceError> {
        assert!(elements.start <= elements.end && elements.end <= from.len(), "elements of it");
        assert!(elements.len() <= to.len(), "room for them");
        if elements.is_empty() {
            return Ok(());
        }
        self.bind()?;
        let source = from.pointer() + (elements.start * size_of::<T>()) as u64;
        let (bytes, stream) = (elements.len() * size_of::<T>(), self.stream.cu_stream());
        // SAFETY: both have these elements, and neither is released before this is done: rule 2.
        unsafe { result::memcpy_dtod_async(to.pointer(), source, bytes, stream) }
            .map_err(failed("copy its memory"))
    }

    fn bind(&self) -> Result<(), DeviceError> {
        self.context.bind_to_thread().map_err(failed("be used by this thread"))
    }
}

/// Compiled kernels.
#[derive(Clone)]
pub(crate) struct Module {
    device: Arc<Device>,
    module: Arc<CudaModule>,
}

impl Module {
    pub(crate) fn kernel(&self, name: &'static str) -> Result<Kernel, DeviceError> {
        let function = self.module.load_function(name).map_err(failed("find a kernel"))?;
        Ok(Kernel { device: self.device.clone(), function })
    }
}

/// One kernel.
#[derive(Clone)]
pub(crate) struct Kernel {
    device: Arc<Device>,
    function: CudaFunction,
}

impl fmt::Debug for Kernel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Kernel").finish_non_exhaustive()
    }
}

impl Kernel {
    /// Puts a launch on the stream: `grid` in x and y, `threads` to a block, `shared` bytes of
    /// dynamic shared memory.
    ///
    /// # Safety
    ///
    /// The arguments are those the kernel takes. Every address in them is of memory on this card
    /// that is as long as the kernel assumes, and that is not released before this call returns
    /// (rule 2 of this file).
    pub(crate) unsafe fn launch(
        &self,
        grid: (u32, u32),
        threads: u32,
        shared: u32,
        arguments: &impl Arguments,
    ) -> Result<(), DeviceError> {
        let mut launch = self.device.stream.launch_builder(&self.function);
        arguments.push(&mut launch);
        let config = LaunchConfig {
            grid_dim: (grid.0, grid.1, 1),
            block_dim: (threads, 1, 1),
            shared_mem_bytes: shared,
        };
        // SAFETY: promised by the caller.
        unsafe { launch.launch(config) }.map_err(failed("start a kernel"))?;
        Ok(())
    }
}

/// The arguments of a kernel.
pub(crate) trait Arguments {
    fn push<'a>(&'a self, launch: &mut LaunchArgs<'a>);
}

macro_rules! arguments {
    ($($name:ident $at:tt),*) => {
        impl<$($name: DeviceRepr),*> Arguments for ($($name,)*) {
            fn push<'a>(&'a self, launch: &mut LaunchArgs<'a>) {
                $(launch.arg(&self.$at);)*
            }
        }
    };
}
arguments!(A 0);
arguments!(A 0, B 1);
arguments!(A 0, B 1, C 2);
arguments!(A 0, B 1, C 2, D 3);

/// Bytes on a card. Any thread may release them.
struct DeviceMemory(Option<CudaSlice<u8>>);

impl DeviceMemory {
    fn slice(&self) -> &CudaSlice<u8> {
        self.0.as_ref().expect("taken when dropped")
    }

    fn len(&self) -> usize {
        self.slice().len()
    }
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        if let Some(slice) = self.0.take() {
            // The driver releases memory only for threads that use the card. If the card is lost,
            // so is the memory.
            let _ = slice.context().bind_to_thread();
        }
    }
}

/// Elements on a card.
pub struct Buffer<T> {
    device: Arc<Device>,
    bytes: DeviceMemory,
    len: usize,
    type_: PhantomData<T>,
}

impl<T> fmt::Debug for Buffer<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Buffer").field("len", &self.len).finish_non_exhaustive()
    }
}

impl<T: Pod> Buffer<T> {
    /// Number of elements.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Whether it belongs to this device.
    pub(crate) fn is_of(&self, device: &Arc<Device>) -> bool {
        Arc::ptr_eq(&self.device, device)
    }

    /// The address on the card, for callers that launch their own kernels.
    pub fn pointer(&self) -> u64 {
        // Nothing is tracked (rule 2), so dropping the guard does nothing.
        self.bytes.slice().device_ptr(&self.device.stream).0
    }

    /// Makes room for at least `len` elements. If the buffer has to grow, its content is lost.
    pub fn reserve(&mut self, len: usize) -> Result<(), DeviceError> {
        if len > self.len {
            *self = self.device.buffer(len)?;
        }
        Ok(())
    }

    /// Overwrites the front with these elements. Waits until the copy is complete.
    pub fn upload(&mut self, values: &[T]) -> Result<(), DeviceError> {
        assert!(values.len() <= self.len, "room for them");
        if values.is_empty() {
            return Ok(());
        }
        self.device.bind()?;
        self.device.bus.to_card.fetch_add(size_of_val(values) as u64, Ordering::Relaxed);
        let stream = self.device.stream.cu_stream();
        // SAFETY: the buffer is long enough, and the values stay until the copy is done, because
        // this waits for it below.
        unsafe { result::memcpy_htod_async(self.pointer(), values, stream) }
            .map_err(failed("copy from the host"))?;
        self.device.wait()
    }

    /// A copy on the host. Waits until it is complete.
    pub fn download(&self) -> Result<Vec<T>, DeviceError> {
        self.download_front(self.len)
    }

    /// The same for the first `len` elements.
    pub fn download_front(&self, len: usize) -> Result<Vec<T>, DeviceError> {
        assert!(len <= self.len, "elements of it");
        let mut values = vec![T::zeroed(); len];
        if values.is_empty() {
            return Ok(values);
        }
        self.device.bind()?;
        self.device.bus.to_host.fetch_add(size_of_val(&values[..]) as u64, Ordering::Relaxed);
        let stream = self.device.stream.cu_stream();
        // SAFETY: both have this many elements, and the copy is waited for below.
        let copied = unsafe { result::memcpy_dtoh_async(&mut values, self.pointer(), stream) };
        self.device.wait()?;
        copied.map_err(failed("copy to the host"))?;
        Ok(values)
    }

    /// Puts on the stream a fill of all bytes of some elements with `byte`.
    pub fn fill_bytes(&mut self, elements: Range<usize>, byte: u8) -> Result<(), DeviceError> {
        assert!(elements.start <= elements.end && elements.end <= self.len, "elements of it");
        let size = size_of::<T>();
        if elements.is_empty() {
            return Ok(());
        }
        self.device.bind()?;
        let at = self.pointer() + (elements.start * size) as CUdeviceptr;
        let stream = self.device.stream.cu_stream();
        // SAFETY: within the buffer, as just checked.
        unsafe { result::memset_d8_async(at, byte, elements.len() * size, stream) }
            .map_err(failed("fill memory"))
    }
}

/// The type of a gradient's elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ValueType {
    /// 32-bit floats.
    F32,
    /// IEEE binary16.
    F16,
    /// bfloat16.
    Bf16,
}

impl ValueType {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::F32, Self::F16, Self::Bf16];

    /// Bytes of an element.
    pub fn size(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::Bf16 => 2,
        }
    }
}

/// A gradient on the card, borrowed.
#[derive(Clone, Copy, Debug)]
pub struct DeviceValues<'a> {
    pub(crate) pointer: u64,
    pub(crate) len: usize,
    pub(crate) type_: ValueType,
    owner: PhantomData<&'a ()>,
}

impl DeviceValues<'_> {
    /// Number of elements.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Memory owned by other code: candle, say, or torch.
    ///
    /// # Safety
    ///
    /// `pointer` is the address, on the card the values are used on, of `len` elements of that
    /// type, and a multiple of its size. The elements are neither written nor released from the
    /// time that work with them is put on the device's stream until it is done. The work that wrote
    /// them is done before.
    pub unsafe fn from_raw(pointer: u64, len: usize, type_: ValueType) -> Self {
        Self { pointer, len, type_, owner: PhantomData }
    }
}

macro_rules! values_of {
    ($($type:ty => $variant:ident),*) => {$(
        impl Buffer<$type> {
            /// These elements, as a gradient.
            pub fn values(&self) -> DeviceValues<'_> {
                let (pointer, len) = (self.pointer(), self.len);
                DeviceValues { pointer, len, type_: ValueType::$variant, owner: PhantomData }
            }
        }
    )*};
}
values_of!(f32 => F32, f16 => F16, bf16 => Bf16);

impl Buffer<f32> {
    /// Some elements, as a gradient.
    ///
    /// # Panics
    ///
    /// If the buffer does not have them.
    pub fn part(&self, elements: Range<usize>) -> DeviceValues<'_> {
        assert!(elements.start <= elements.end && elements.end <= self.len, "elements of it");
        let pointer = self.pointer() + (elements.start * size_of::<f32>()) as u64;
        DeviceValues { pointer, len: elements.len(), ..self.values() }
    }

    /// The first `len` elements, as a gradient.
    pub(crate) fn front(&self, len: usize) -> DeviceValues<'_> {
        assert!(len <= self.len, "elements of it");
        DeviceValues { len, ..self.values() }
    }
}

/// A vector on a card for an operation to work on. Its memory belongs to other code, such as candle
/// or torch, or to a [`Buffer`].
///
/// The owner is kept until the operation has put its last access on the card. Work that the owner
/// puts on its own stream after that runs after that access.
pub struct DeviceTensor {
    pointer: u64,
    len: usize,
    type_: ValueType,
    stream: CallerStream,
    _owner: Box<dyn Send>,
}

impl fmt::Debug for DeviceTensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { len, type_, .. } = self;
        f.debug_struct("DeviceTensor").field("len", len).field("type", type_).finish()
    }
}

impl DeviceTensor {
    /// Memory owned by other code, used on `stream`: a `CUstream` as a number, where zero is the
    /// default stream.
    ///
    /// # Safety
    ///
    /// `pointer` is the address, a multiple of the type's size, of `len` elements on the card that
    /// the operation's device is on, and `stream` is a stream of that card. Both exist until
    /// `owner` is dropped. From the time of the call until the operation has ended, nothing else
    /// accesses the elements except work that was put on `stream` before.
    pub unsafe fn from_raw(
        pointer: u64,
        len: usize,
        type_: ValueType,
        stream: u64,
        owner: impl Send + 'static,
    ) -> Self {
        Self { pointer, len, type_, stream: CallerStream(stream), _owner: Box::new(owner) }
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The type of its elements.
    pub fn value_type(&self) -> ValueType {
        self.type_
    }

    pub(crate) fn stream(&self) -> CallerStream {
        self.stream
    }

    /// Some of its elements, as a gradient.
    pub(crate) fn values(&self, elements: Range<usize>) -> DeviceValues<'_> {
        assert!(elements.start <= elements.end && elements.end <= self.len, "elements of it");
        let pointer = self.pointer + (elements.start * self.type_.size()) as u64;
        DeviceValues { pointer, len: elements.len(), type_: self.type_, owner: PhantomData }
    }

    /// The address of its elements, for a kernel that writes them.
    pub(crate) fn pointer_mut(&mut self) -> u64 {
        self.pointer
    }
}

/// A buffer that its owner still holds. All work on it is put on its device's stream, and so runs
/// either before or after the operation.
impl<T: TensorElement> From<&Arc<Buffer<T>>> for DeviceTensor {
    fn from(buffer: &Arc<Buffer<T>>) -> Self {
        Self {
            pointer: buffer.pointer(),
            len: buffer.len,
            type_: T::TYPE,
            stream: CallerStream(buffer.device.stream.cu_stream() as u64),
            _owner: Box::new(buffer.clone()),
        }
    }
}

/// A Rust type of gradients.
pub trait TensorElement: Pod + Send + Sync {
    /// The same type as a value.
    const TYPE: ValueType;
}

impl TensorElement for f32 {
    const TYPE: ValueType = ValueType::F32;
}
impl TensorElement for f16 {
    const TYPE: ValueType = ValueType::F16;
}
impl TensorElement for bf16 {
    const TYPE: ValueType = ValueType::Bf16;
}

/// Some elements of an accumulator on the card, borrowed to be added to.
#[derive(Debug)]
pub struct DevicePart<'a> {
    pub(crate) pointer: u64,
    pub(crate) len: usize,
    owner: PhantomData<&'a mut ()>,
}

impl Buffer<f32> {
    /// These elements, to be added to.
    ///
    /// # Panics
    ///
    /// If the buffer does not have them.
    pub fn part_mut(&mut self, elements: Range<usize>) -> DevicePart<'_> {
        assert!(elements.start <= elements.end && elements.end <= self.len, "elements of it");
        let pointer = self.pointer() + (elements.start * size_of::<f32>()) as u64;
        DevicePart { pointer, len: elements.len(), owner: PhantomData }
    }
}

impl DevicePart<'_> {
    /// Puts on the stream a fill of all of it with zeros.
    pub(crate) fn clear(&mut self, device: &Device) -> Result<(), DeviceError> {
        if self.len == 0 {
            return Ok(());
        }
        device.bind()?;
        let (bytes, stream) = (self.len * size_of::<f32>(), device.stream.cu_stream());
        // SAFETY: these elements are of a buffer that is borrowed for as long as this lives.
        unsafe { result::memset_d8_async(self.pointer, 0, bytes, stream) }
            .map_err(failed("fill memory"))
    }
}

impl<'a> From<&'a mut Buffer<f32>> for DevicePart<'a> {
    fn from(buffer: &'a mut Buffer<f32>) -> Self {
        let all = 0..buffer.len;
        buffer.part_mut(all)
    }
}

/// Host memory that the card can copy from and to by itself.
pub struct Pinned {
    stream: Arc<CudaStream>,
    pointer: *mut u8,
    len: usize,
}

// SAFETY: the memory belongs to this alone, and is written through `&mut` only; the driver's calls
// may come from any thread.
unsafe impl Send for Pinned {}
// SAFETY: as above; through `&` it is only read.
unsafe impl Sync for Pinned {}

impl fmt::Debug for Pinned {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pinned").field("len", &self.len).finish_non_exhaustive()
    }
}

impl Pinned {
    /// `len` zeros.
    pub fn new(device: &Arc<Device>, len: usize) -> Result<Self, DeviceError> {
        Self::on(&device.stream, len)
    }

    fn on(stream: &Arc<CudaStream>, len: usize) -> Result<Self, DeviceError> {
        stream.context().bind_to_thread().map_err(failed("be used by this thread"))?;
        // SAFETY: the driver does not give out zero bytes, hence at least one.
        let pointer = unsafe { result::malloc_host(len.max(1), 0) };
        let pointer = pointer.map_err(|error| match error.0 {
            sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY => {
                DeviceError::OutOfMemory { which: "pinned host", bytes: len }
            }
            _ => failed("allocate pinned memory")(error),
        })?;
        let pointer: *mut u8 = pointer.cast();
        // SAFETY: these bytes are ours; this initialises them before anybody reads them.
        unsafe { pointer.write_bytes(0, len) };
        Ok(Self { stream: stream.clone(), pointer, len })
    }

    /// Number of bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Makes room for at least `len` bytes. If it has to grow, all bytes become zero.
    pub(crate) fn reserve(&mut self, len: usize) -> Result<(), DeviceError> {
        if len > self.len {
            *self = Self::on(&self.stream, len)?;
        }
        Ok(())
    }

    /// The bytes. The caller has waited for every copy to and from them (rule 3): encoders and
    /// decoders do, before they return.
    pub(crate) fn bytes(&self) -> &[u8] {
        // SAFETY: allocated with this length, and initialised.
        unsafe { std::slice::from_raw_parts(self.pointer, self.len) }
    }

    /// The same, for writing.
    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and borrowed once.
        unsafe { std::slice::from_raw_parts_mut(self.pointer, self.len) }
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        // A copy may still be running. If the card is lost there is nothing to wait for.
        let _ = self.stream.synchronize();
        // SAFETY: allocated by `malloc_host`, released once.
        let _ = unsafe { result::free_host(self.pointer.cast()) };
    }
}

/// Sizes in the device's pool are multiples of this.
const POOLED: usize = 1 << 16;

/// Elements on a card. Their memory returns to the device's pool when dropped.
#[derive(Debug)]
pub(crate) struct Pooled<T>(Option<Buffer<T>>);

impl<T> Deref for Pooled<T> {
    type Target = Buffer<T>;

    fn deref(&self) -> &Buffer<T> {
        self.0.as_ref().expect("taken when dropped")
    }
}

impl<T> DerefMut for Pooled<T> {
    fn deref_mut(&mut self) -> &mut Buffer<T> {
        self.0.as_mut().expect("taken when dropped")
    }
}

impl<T> Drop for Pooled<T> {
    fn drop(&mut self) {
        if let Some(Buffer { device, bytes, .. }) = self.0.take() {
            device.spare().memory.push(bytes);
        }
    }
}

/// Pinned memory that returns to the device's pool when dropped.
#[derive(Debug)]
pub(crate) struct PooledPinned {
    device: Arc<Device>,
    pinned: Option<Pinned>,
}

impl Deref for PooledPinned {
    type Target = Pinned;

    fn deref(&self) -> &Pinned {
        self.pinned.as_ref().expect("taken when dropped")
    }
}

impl DerefMut for PooledPinned {
    fn deref_mut(&mut self) -> &mut Pinned {
        self.pinned.as_mut().expect("taken when dropped")
    }
}

impl Drop for PooledPinned {
    fn drop(&mut self) {
        if let Some(pinned) = self.pinned.take() {
            self.device.spare().pinned.push(pinned);
        }
    }
}

/// Lets it become a parcel. By rule 3, the copies to it are complete.
impl AsRef<[u8]> for PooledPinned {
    fn as_ref(&self) -> &[u8] {
        self.bytes()
    }
}

/// Measures time on the card's own clock.
pub struct Timer {
    device: Arc<Device>,
    start: CudaEvent,
    end: CudaEvent,
}

impl fmt::Debug for Timer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Timer").finish_non_exhaustive()
    }
}

impl Timer {
    /// A timer for the device's stream.
    pub fn new(device: &Arc<Device>) -> Result<Self, DeviceError> {
        let event = || device.context.new_event(Some(CUevent_flags::CU_EVENT_DEFAULT));
        let event = || event().map_err(failed("make an event"));
        Ok(Self { device: device.clone(), start: event()?, end: event()? })
    }

    /// Milliseconds that the card takes for the work that `work` puts on the stream. Waits for it.
    pub fn time(&self, work: impl FnOnce() -> Result<(), DeviceError>) -> Result<f64, DeviceError> {
        self.start.record(&self.device.stream).map_err(failed("record an event"))?;
        work()?;
        self.end.record(&self.device.stream).map_err(failed("record an event"))?;
        let time = self.start.elapsed_ms(&self.end).map_err(failed("measure time"))?;
        Ok(f64::from(time))
    }
}
