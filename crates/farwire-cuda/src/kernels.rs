//! The kernels, one function for each step of a codec. One of the three files with `unsafe`.
//!
//! Rules:
//! 1. A `#[repr(C)]` struct here has the fields of its namesake in `kernels/*.cu`, in the same
//!    order and of the same sizes.
//! 2. Before a launch, the function that makes it checks that every buffer is as long as the kernel
//!    assumes, in release builds too. It holds `&mut` to all memory that the kernel writes.
//! 3. The content of a message is never trusted: the walk on the host has checked where its parts
//!    are, and kernels check every index before they use it.

#![allow(unsafe_code)]

use std::sync::Arc;

use cudarc::driver::DeviceRepr;
use farwire_codec::device::{Draws, KEPT_BLOCK, Keys, POWER_BAND, POWER_SEGMENT};
use farwire_codec::{BlockQuantiser, Cast, Format, Rounding, ValueCoding};

use crate::driver::{Buffer, Device, DevicePart, DeviceTensor, DeviceValues, Kernel, ValueType};
use crate::error::DeviceError;
use crate::source::{File, Source};

/// The most shards that one launch takes: they are passed in its arguments.
const MAX_SHARDS: usize = 64;

/// Elements in a tile of top-k, and how many of them fit in its list of candidates.
const TILE: usize = 4096;
const LISTED: usize = 512;

/// The most bytes that the indices of a block of 256 take, including the byte before them.
const INDEX_BYTES: usize = 868;

/// Bytes of top-k's `State`, and where its `total` is.
const STATE_BYTES: usize = 48 + 3 * 2048 * 4;
const STATE_TOTAL: usize = 24;

/// The elements that become one message.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub(crate) struct Shard {
    /// First element, counted from the first of the job.
    pub(crate) start: u64,
    /// Number of elements; for random-k, of drawn elements.
    pub(crate) len: u64,
    /// Where its message starts: a multiple of 16.
    pub(crate) out: u64,
    /// For random-k, its first stratum.
    pub(crate) drawn: u64,
}

#[derive(Clone, Copy)]
#[repr(C)]
struct Encode {
    values: u64,
    owed: u64,
    left: u64,
    out: u64,
    bad: u64,
    origin: u64,
    rounding_key: u32,
    rotation_key: u32,
    scratch: u64,
    shards: [Shard; MAX_SHARDS],
}

#[derive(Clone, Copy)]
#[repr(C)]
struct Decode {
    bytes: u64,
    acc: u64,
    bad: u64,
    len: u64,
    origin: u64,
    rotation_key: u32,
    fresh: u32,
    scratch: u64,
}

#[derive(Clone, Copy)]
#[repr(C)]
struct Strata {
    elements: u64,
    count: u64,
    key: u64,
}

#[derive(Clone, Copy)]
#[repr(C)]
struct Select {
    values: u64,
    owed: u64,
    left: u64,
    bad: u64,
    len: u64,
    indices: u64,
    picked: u64,
    state: u64,
    counts: u64,
    places: u64,
    listed: u64,
    tallies: u64,
    keep: u64,
    all: u32,
    rank: u32,
}

#[derive(Clone, Copy)]
#[repr(C)]
struct Chunks {
    origin: u64,
    first_piece: u64,
    chunk: u64,
    keep: u64,
    keep_first: u64,
    at: u64,
    to: u64,
}

#[derive(Clone, Copy)]
#[repr(C)]
struct Coding {
    indices: u64,
    picked: u64,
    left: u64,
    out: u64,
    ends: u64,
    first: u64,
    first_block: u64,
    block_at: u64,
    blocks: u64,
    messages: u64,
    total: u64,
    shards: u32,
}

#[derive(Clone, Copy)]
#[repr(C)]
struct Added {
    bytes: u64,
    acc: u64,
    bad: u64,
    blocks: u64,
    reach: u64,
    range: u64,
    count: u32,
}

#[derive(Clone, Copy)]
#[repr(C)]
struct Power {
    values: u64,
    owed: u64,
    matrix: u64,
    bad: u64,
    p: u64,
    q: u64,
    bands: u64,
    own: u64,
    out: u64,
    len: u64,
    rows: u64,
    columns: u64,
}

#[derive(Clone, Copy)]
#[repr(C)]
struct Add {
    sum: u64,
    gradient: u64,
    bad: u64,
    len: u64,
    fresh: u64,
}

#[derive(Clone, Copy)]
#[repr(C)]
struct AdamW {
    weights: u64,
    first: u64,
    second: u64,
    gradient: u64,
    len: u64,
    scale: f32,
    beta1: f32,
    beta2: f32,
    step: f32,
    root: f32,
    decay: f32,
    epsilon: f32,
    unused: u32,
}

macro_rules! device_repr {
    ($($name:ident),*) => {$(
        // SAFETY: rule 1: plain numbers and addresses, laid out as in C.
        unsafe impl DeviceRepr for $name {}
    )*};
}
device_repr!(Encode, Decode, Strata, Select, Chunks, Coding, Added, Power, Add, AdamW);

/// What every encoder reads and writes.
#[derive(Debug)]
pub(crate) struct Encoding<'a> {
    pub(crate) values: DeviceValues<'a>,
    /// The old residual, one for each value.
    pub(crate) owed: Option<&'a Buffer<f32>>,
    /// Where to write the new residual, one for each value.
    pub(crate) left: Option<&'a mut Buffer<f32>>,
    pub(crate) out: &'a mut Buffer<u8>,
    /// Its first word is the lowest index of an element that is not finite.
    pub(crate) header: &'a mut Buffer<u64>,
    pub(crate) origin: usize,
    pub(crate) keys: Keys,
    pub(crate) scratch: &'a mut Buffer<f32>,
}

impl Encoding<'_> {
    /// Panics unless all vectors are at least as long as the values.
    fn check(&self) {
        let len = self.values.len();
        assert!(self.owed.is_none_or(|owed| owed.len() >= len), "a residual for each value");
        assert!(self.left.as_ref().is_none_or(|left| left.len() >= len), "room for the residual");
        assert!(!self.header.is_empty(), "room for an index");
    }

    fn arguments(&self, shards: &[Shard]) -> Encode {
        let mut all = [Shard::default(); MAX_SHARDS];
        all[..shards.len()].copy_from_slice(shards);
        Encode {
            values: self.values.pointer,
            owed: self.owed.map_or(0, Buffer::pointer),
            left: self.left.as_ref().map_or(0, |left| left.pointer()),
            out: self.out.pointer(),
            bad: self.header.pointer(),
            origin: self.origin as u64,
            rounding_key: self.keys.rounding,
            rotation_key: self.keys.rotation,
            scratch: 0,
            shards: all,
        }
    }
}

/// What every decoder reads and writes.
#[derive(Debug)]
pub(crate) struct Decoding<'a> {
    /// The message, which has `len` bytes; sixteen more can be read.
    pub(crate) bytes: &'a Buffer<u8>,
    pub(crate) len: usize,
    pub(crate) acc: DevicePart<'a>,
    /// Its first word says whether anything was wrong.
    pub(crate) bad: &'a mut Buffer<u32>,
    pub(crate) origin: usize,
    pub(crate) keys: Keys,
    pub(crate) fresh: bool,
    pub(crate) scratch: &'a mut Buffer<f32>,
}

impl Decoding<'_> {
    fn arguments(&self, need: usize) -> Decode {
        assert!(self.len == need && self.bytes.len() >= need + 16, "the whole message");
        assert!(!self.bad.is_empty(), "room for a flag");
        Decode {
            bytes: self.bytes.pointer(),
            acc: self.acc.pointer,
            bad: self.bad.pointer(),
            len: self.acc.len as u64,
            origin: self.origin as u64,
            rotation_key: self.keys.rotation,
            fresh: u32::from(self.fresh),
            scratch: 0,
        }
    }
}

fn value_define(type_: ValueType) -> (&'static str, usize) {
    ("VALUE", type_ as usize)
}

/// The number of thread blocks. More than fit a grid would mean more elements than fit a card.
fn grid(work: usize, per_block: usize) -> u32 {
    u32::try_from(work.div_ceil(per_block)).expect("fewer thread blocks than a grid can have")
}

/// Codecs that send something for each element.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Dense {
    Block(BlockQuantiser),
    Sign,
    /// `None`: as f32.
    Cast(Option<Cast>),
}

/// Elements that a thread block handles in `sign.cu`, `cast.cu` and other elementwise kernels.
const ELEMENTWISE: usize = 4096;
/// Blocks that a thread block of `block_encode` handles.
const WARPS: usize = 8;
/// The most elements of a block that fit in shared memory.
const SHARED: usize = 8192;

/// The kernels of a dense codec for one type of value.
#[derive(Debug)]
pub(crate) struct DenseKernels {
    codec: Dense,
    type_: ValueType,
    /// For blocks that a warp holds in registers; without blocks, for all elements.
    encode: Option<Kernel>,
    add: Option<Kernel>,
    encode_any: Option<Kernel>,
    add_any: Option<Kernel>,
}

impl DenseKernels {
    pub(crate) fn new(
        device: &Arc<Device>,
        codec: Dense,
        type_: ValueType,
    ) -> Result<Self, DeviceError> {
        let value = value_define(type_);
        let (source, names) = match codec {
            Dense::Block(block) => {
                let defines = [
                    value,
                    ("FORMAT", block.format as usize),
                    ("STOCHASTIC", usize::from(block.rounding == Rounding::Stochastic)),
                    ("ROTATE", usize::from(block.rotate)),
                    ("BLOCK", block.block),
                ];
                (Source::new(File::Block, &defines), ["block_encode", "block_add"])
            }
            Dense::Sign => (Source::new(File::Sign, &[value]), ["sign_encode", "sign_add"]),
            Dense::Cast(cast) => {
                let format = match cast {
                    None => 0,
                    Some(Cast::F16) => 1,
                    Some(Cast::Bf16) => 2,
                };
                let source = Source::new(File::Cast, &[value, ("FORMAT", format)]);
                (source, ["cast_encode", "cast_add"])
            }
        };
        let module = device.module(&source)?;
        let find = |wanted: bool, name| wanted.then(|| module.kernel(name)).transpose();
        let warps = !matches!(codec, Dense::Block(block) if !fits_warp(block.block));
        let any = matches!(codec, Dense::Block(_));
        Ok(Self {
            codec,
            type_,
            encode: find(warps, names[0])?,
            add: find(warps, names[1])?,
            encode_any: find(any, "block_encode_any")?,
            add_any: find(any, "block_add_any")?,
        })
    }

    /// Bytes in a message, as the CPU codec computes them.
    fn coded_len(&self, elements: usize) -> usize {
        use farwire_codec::MessageCodec;
        match self.codec {
            Dense::Block(block) => block.max_message_len(elements),
            Dense::Sign => farwire_codec::Sign.max_message_len(elements),
            Dense::Cast(Some(cast)) => cast.max_message_len(elements),
            Dense::Cast(None) => farwire_codec::Identity.max_message_len(elements),
        }
    }

    /// Encodes each shard.
    pub(crate) fn encode(
        &self,
        encoding: &mut Encoding<'_>,
        shards: &[Shard],
    ) -> Result<(), DeviceError> {
        encoding.check();
        assert_eq!(encoding.values.type_, self.type_, "kernels for this type");
        for shard in shards {
            let fits = shard.start + shard.len <= encoding.values.len() as u64;
            let end = shard.out as usize + self.coded_len(shard.len as usize);
            assert!(fits && end <= encoding.out.len(), "values to read and room to write");
            assert!(shard.out.is_multiple_of(16), "messages start at a multiple of 16");
        }
        let shards: Vec<_> = shards.iter().copied().filter(|shard| shard.len > 0).collect();
        for shards in shards.chunks(MAX_SHARDS) {
            let longest = shards.iter().map(|shard| shard.len).max().unwrap_or(0) as usize;
            let y = shards.len() as u32;
            let mut arguments = encoding.arguments(shards);
            let Dense::Block(block) = self.codec else {
                let kernel = self.encode.as_ref().expect("made for this codec");
                // SAFETY: every buffer's length has been checked above.
                unsafe { kernel.launch((grid(longest, ELEMENTWISE), y), 256, 0, &(arguments,))? };
                continue;
            };
            let mut only_tails = false;
            if let Some(kernel) = &self.encode {
                let x = grid(longest, block.block * WARPS);
                // SAFETY: as above.
                unsafe { kernel.launch((x, y), 256, 0, &(arguments,))? };
                let full = |shard: &Shard| shard.len.is_multiple_of(block.block as u64);
                if !block.rotate || shards.iter().all(full) {
                    continue;
                }
                only_tails = true;
            }
            let kernel = self.encode_any.as_ref().expect("made for this codec");
            let x = if only_tails { 1 } else { grid(longest, block.block) };
            let (threads, shared) = any_config(&block);
            if block.rotate && shared == 0 {
                encoding.scratch.reserve(x as usize * shards.len() * block.block)?;
                arguments.scratch = encoding.scratch.pointer();
            }
            // SAFETY: as above; the block is in shared memory, or has its part of `scratch`.
            unsafe { kernel.launch((x, y), threads, shared, &(arguments, u32::from(only_tails)))? };
        }
        Ok(())
    }

    /// Adds a message.
    pub(crate) fn add(&self, decoding: &mut Decoding<'_>) -> Result<(), DeviceError> {
        let len = decoding.acc.len;
        let mut arguments = decoding.arguments(self.coded_len(len));
        if len == 0 {
            return Ok(());
        }
        let Dense::Block(block) = self.codec else {
            let kernel = self.add.as_ref().expect("made for this codec");
            // SAFETY: the message is as long as `len` elements take, and `acc` has them.
            return unsafe { kernel.launch((grid(len, ELEMENTWISE), 1), 256, 0, &(arguments,)) };
        };
        let mut only_tails = false;
        if let Some(kernel) = &self.add {
            // SAFETY: as above.
            unsafe { kernel.launch((grid(len, block.block * WARPS), 1), 256, 0, &(arguments,))? };
            if !block.rotate || len.is_multiple_of(block.block) {
                return Ok(());
            }
            only_tails = true;
        }
        let kernel = self.add_any.as_ref().expect("made for this codec");
        let x = if only_tails { 1 } else { grid(len, block.block) };
        let (threads, shared) = any_config(&block);
        if block.rotate && shared == 0 {
            decoding.scratch.reserve(x as usize * block.block)?;
            arguments.scratch = decoding.scratch.pointer();
        }
        // SAFETY: as above; the block is in shared memory, or has its part of `scratch`.
        unsafe { kernel.launch((x, 1), threads, shared, &(arguments, u32::from(only_tails))) }
    }
}

/// Whether a warp holds a block of this size in its registers.
fn fits_warp(block: usize) -> bool {
    (128..=1024).contains(&block)
}

/// Threads and shared memory for a block of any size.
fn any_config(block: &BlockQuantiser) -> (u32, u32) {
    let shared = if block.rotate && block.block <= SHARED { 4 * block.block } else { 0 };
    (block.block.clamp(32, 256) as u32, shared as u32)
}

/// The kernels of random-k.
#[derive(Debug)]
pub(crate) struct RandomKernels {
    type_: ValueType,
    width: usize,
    fuse: Kernel,
    encode: Kernel,
    add: Kernel,
}

impl RandomKernels {
    pub(crate) fn new(
        device: &Arc<Device>,
        bf16: bool,
        type_: ValueType,
    ) -> Result<Self, DeviceError> {
        let defines = [value_define(type_), ("BF16", usize::from(bf16))];
        let module = device.module(&Source::new(File::RandK, &defines))?;
        let kernel = |name| module.kernel(name);
        let (fuse, encode, add) = (kernel("fuse")?, kernel("randk_encode")?, kernel("randk_add")?);
        Ok(Self { type_, width: if bf16 { 2 } else { 4 }, fuse, encode, add })
    }

    /// Encodes each shard. Its `len` and `drawn` say which strata have their elements in it. With
    /// `boost`, values are multiplied by the lengths of their strata.
    pub(crate) fn encode(
        &self,
        encoding: &mut Encoding<'_>,
        shards: &[Shard],
        draws: Draws,
        boost: bool,
    ) -> Result<(), DeviceError> {
        encoding.check();
        assert_eq!(encoding.values.type_, self.type_, "kernels for this type");
        assert!(encoding.left.is_some(), "drawn elements are taken from the residual");
        let (len, strata) = (encoding.values.len(), strata(draws));
        let within = encoding.origin + len <= draws.elements as usize;
        assert!(within, "the values are some of the vector's");
        for shard in shards {
            let end = shard.out as usize + self.width * shard.len as usize;
            assert!(end <= encoding.out.len(), "room to write");
        }
        if len == 0 {
            return Ok(());
        }
        let fused = (encoding.arguments(&[]), len as u64);
        // SAFETY: all three vectors have `len` elements.
        unsafe { self.fuse.launch((grid(len, ELEMENTWISE), 1), 256, 0, &fused)? };
        let shards: Vec<_> = shards.iter().copied().filter(|shard| shard.len > 0).collect();
        for shards in shards.chunks(MAX_SHARDS) {
            let longest = shards.iter().map(|shard| shard.len).max().unwrap_or(0) as usize;
            let arguments = (encoding.arguments(shards), strata, u32::from(boost));
            // SAFETY: messages have room; drawn elements lie within the shard, because the strata
            // were counted on the host by the same formula, and so within `left`.
            unsafe {
                self.encode.launch((grid(longest, 256), shards.len() as u32), 256, 0, &arguments)?
            };
        }
        Ok(())
    }

    /// Adds a message of `count` elements, drawn from `count` strata starting at `first`.
    pub(crate) fn add(
        &self,
        decoding: &mut Decoding<'_>,
        draws: Draws,
        first: u64,
        count: usize,
    ) -> Result<(), DeviceError> {
        let mut arguments = decoding.arguments(self.width * count);
        if count == 0 {
            return Ok(());
        }
        arguments.len = count as u64;
        let arguments = (arguments, strata(draws), first);
        // SAFETY: the message has `count` values; the elements drawn from these strata lie within
        // the range that `acc` is for, as counted on the host by the same formula.
        unsafe { self.add.launch((grid(count, 256), 1), 256, 0, &arguments) }
    }
}

fn strata(draws: Draws) -> Strata {
    assert!(draws.elements <= u64::from(u32::MAX), "products of two numbers fit 64 bits");
    Strata { elements: draws.elements, count: draws.count, key: draws.key }
}

/// Memory for top-k's kernels, kept from one step to the next.
#[derive(Debug)]
pub(crate) struct SparseScratch {
    indices: Buffer<u32>,
    picked: Buffer<f32>,
    state: Buffer<u8>,
    counts: Buffer<u32>,
    places: Buffer<u16>,
    listed: Buffer<f32>,
    tallies: Buffer<u64>,
    /// Where shards end, on the host and on the card.
    ends: (Vec<u64>, Buffer<u64>),
    first: Buffer<u32>,
    first_block: Buffer<u32>,
    block_at: Buffer<u64>,
    /// Sixteen bytes for each block of the messages, as `add` takes them.
    pub(crate) blocks: Buffer<u8>,
}

impl SparseScratch {
    pub(crate) fn new(device: &Arc<Device>) -> Result<Self, DeviceError> {
        Ok(Self {
            indices: device.buffer(0)?,
            picked: device.buffer(0)?,
            state: device.buffer(STATE_BYTES)?,
            counts: device.buffer(0)?,
            places: device.buffer(0)?,
            listed: device.buffer(0)?,
            tallies: device.buffer(0)?,
            ends: (Vec::new(), device.buffer(0)?),
            first: device.buffer(0)?,
            first_block: device.buffer(0)?,
            block_at: device.buffer(0)?,
            blocks: device.buffer(0)?,
        })
    }
}

/// Which elements top-k selects.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Selection {
    /// All that are not zero.
    All,
    /// This many of the whole job.
    Whole(usize),
    /// `keep` of each chunk of the whole vector, or in proportion where the job has only a part.
    PerChunk { keep: usize, chunk: usize },
}

impl Selection {
    /// How many of a job's elements are selected, at most.
    pub(crate) fn limit(self, origin: usize, len: usize) -> usize {
        match self {
            Self::All => len,
            Self::Whole(keep) => keep.min(len),
            Self::PerChunk { keep, chunk } => Pieces::new(origin, len, keep, chunk).total(),
        }
    }
}

/// A job cut into pieces where chunks of the whole vector end.
#[derive(Clone, Copy, Debug)]
struct Pieces {
    /// Number of pieces.
    count: usize,
    /// Elements in the first and in the last piece.
    first: usize,
    last: usize,
    keep: usize,
    chunk: usize,
}

impl Pieces {
    fn new(origin: usize, len: usize, keep: usize, chunk: usize) -> Self {
        if len == 0 {
            return Self { count: 0, first: 0, last: 0, keep, chunk };
        }
        let first = len.min(chunk - origin % chunk);
        let rest = len - first;
        let count = 1 + rest.div_ceil(chunk);
        let last = if rest == 0 { first } else { rest - (count - 2) * chunk };
        Self { count, first, last, keep, chunk }
    }

    /// Elements kept from a piece of this length.
    fn kept(&self, len: usize) -> usize {
        farwire_codec::device::proportion(self.keep, len, self.chunk)
    }

    /// Elements kept from all pieces.
    fn total(&self) -> usize {
        match self.count {
            0 => 0,
            1 => self.kept(self.first),
            count => self.kept(self.first) + (count - 2) * self.keep + self.kept(self.last),
        }
    }
}

/// The kernels of top-k.
#[derive(Debug)]
pub(crate) struct TopKernels {
    type_: ValueType,
    multiprocessors: u32,
    /// Elements in the chunks that `select_chunks` was compiled for, or zero.
    chunk: usize,
    select_any: Kernel,
    select_chunks: Option<Kernel>,
    guess: Kernel,
    collect: Kernel,
    histogram: Kernel,
    tile_count: Kernel,
    tile_scan: Kernel,
    emit: Kernel,
}

impl TopKernels {
    /// `chunk` is the number of elements in a chunk.
    pub(crate) fn new(
        device: &Arc<Device>,
        chunk: Option<usize>,
        values: ValueCoding,
        type_: ValueType,
    ) -> Result<Self, DeviceError> {
        let registers = |chunk: &usize| chunk.is_power_of_two() && (1024..=8192).contains(chunk);
        let chunk = chunk.filter(registers).unwrap_or(0);
        let defines = [value_define(type_), ("CHUNK", chunk), ("VALUES", values as usize)];
        let module = device.module(&Source::new(File::TopK, &defines))?;
        let kernel = |name| module.kernel(name);
        Ok(Self {
            type_,
            multiprocessors: device.multiprocessors(),
            chunk,
            select_any: kernel("select_any")?,
            select_chunks: (chunk > 0).then(|| kernel("select_chunks")).transpose()?,
            guess: kernel("guess")?,
            collect: kernel("collect")?,
            histogram: kernel("histogram")?,
            tile_count: kernel("tile_count")?,
            tile_scan: kernel("tile_scan")?,
            emit: kernel("emit")?,
        })
    }

    /// Writes the fused values to `left`, and lists the selected ones in `scratch`.
    pub(crate) fn select(
        &self,
        encoding: &mut Encoding<'_>,
        scratch: &mut SparseScratch,
        selection: Selection,
    ) -> Result<(), DeviceError> {
        encoding.check();
        assert_eq!(encoding.values.type_, self.type_, "kernels for this type");
        assert!(encoding.left.is_some(), "the fused values are kept");
        let len = encoding.values.len();
        assert!(len <= u32::MAX as usize, "an index fits 32 bits");
        let limit = selection.limit(encoding.origin, len);
        scratch.indices.reserve(limit)?;
        scratch.picked.reserve(limit)?;
        scratch.state.fill_bytes(0..STATE_BYTES, 0)?;
        if len == 0 {
            return Ok(());
        }
        let mut select = Select {
            values: encoding.values.pointer,
            owed: encoding.owed.map_or(0, Buffer::pointer),
            left: encoding.left.as_ref().map_or(0, |left| left.pointer()),
            bad: encoding.header.pointer(),
            len: len as u64,
            indices: scratch.indices.pointer(),
            picked: scratch.picked.pointer(),
            state: scratch.state.pointer(),
            counts: 0,
            places: 0,
            listed: 0,
            tallies: 0,
            keep: limit as u64,
            all: 0,
            rank: 0,
        };
        let keep = match selection {
            Selection::PerChunk { keep, chunk } => {
                let pieces = Pieces::new(encoding.origin, len, keep, chunk);
                return self.select_pieces(&select, encoding.origin, pieces);
            }
            Selection::Whole(keep) => Some(keep.min(len)),
            Selection::All => None,
        };
        let tiles = len.div_ceil(TILE);
        scratch.tallies.reserve(tiles)?;
        select.tallies = scratch.tallies.pointer();
        match keep {
            None => (select.all, select.keep) = (1, 0),
            // Lists of candidates pay off where they are short.
            Some(keep) if len >= 1 << 16 && keep > 0 && keep <= len / 16 => {
                let expected = 16_384.0 * keep as f64 / len as f64;
                select.rank = (expected + 4.0 * expected.sqrt() + 8.0) as u32;
                scratch.counts.reserve(tiles)?;
                scratch.places.reserve(tiles * LISTED)?;
                scratch.listed.reserve(tiles * LISTED)?;
                select.counts = scratch.counts.pointer();
                select.places = scratch.places.pointer();
                select.listed = scratch.listed.pointer();
            }
            Some(_) => {}
        }
        let tiles_grid = (grid(len, TILE), 1);
        let warps_grid = (grid(tiles, 8), 1);
        // SAFETY: vectors have `len` elements; the lists and counts have room for every tile, or
        // their rank is zero and they are not used; indices and values have room for all that can
        // be selected; the state is zeroed. `guess` needs at least 64 elements for each of its
        // threads, and has them.
        unsafe {
            if select.rank > 0 {
                self.guess.launch((1, 1), 1024, 0, &(select,))?;
            }
            self.collect.launch(tiles_grid, 256, 0, &(select,))?;
            if keep.is_some_and(|keep| keep > 0) {
                let blocks = (grid(tiles, 32).min(2 * self.multiprocessors), 1);
                for round in 0..3u32 {
                    self.histogram.launch(blocks, 1024, 0, &(select, round))?;
                }
            }
            if keep != Some(0) {
                self.tile_count.launch(warps_grid, 256, 0, &(select,))?;
                self.tile_scan.launch((1, 1), 1024, 0, &(select,))?;
                self.emit.launch(warps_grid, 256, 0, &(select,))?;
            }
        }
        Ok(())
    }

    fn select_pieces(
        &self,
        select: &Select,
        origin: usize,
        pieces: Pieces,
    ) -> Result<(), DeviceError> {
        let keep_first = pieces.kept(pieces.first) as u64;
        let launch = |range: std::ops::Range<usize>, full: bool| {
            if range.is_empty() {
                return Ok(());
            }
            let chunks = Chunks {
                origin: origin as u64,
                first_piece: range.start as u64,
                chunk: pieces.chunk as u64,
                keep: pieces.keep as u64,
                keep_first,
                // For a grid of full pieces: at most one short piece comes before it.
                at: if range.start == 0 { 0 } else { pieces.first as u64 },
                to: if range.start == 0 { 0 } else { keep_first },
            };
            let arguments = (*select, chunks);
            let blocks = (grid(range.len(), 1), 1);
            match &self.select_chunks {
                // SAFETY: vectors have `len` elements, indices and values room for the limit, which
                // is the sum over the pieces; full pieces are of the size it was compiled for.
                Some(kernel) if full => unsafe {
                    kernel.launch(blocks, (self.chunk / 16) as u32, 0, &arguments)
                },
                // SAFETY: as above, for pieces of any size.
                _ => unsafe { self.select_any.launch(blocks, 256, 0, &arguments) },
            }
        };
        if self.chunk == 0 {
            return launch(0..pieces.count, false);
        }
        assert_eq!(self.chunk, pieces.chunk, "compiled for these chunks");
        let from = usize::from(pieces.first < pieces.chunk);
        let to = (pieces.count - usize::from(pieces.last < pieces.chunk)).max(from);
        launch(0..from, false)?;
        launch(from..to, true)?;
        launch(to..pieces.count, false)
    }
}

/// The kernels that encode and decode kept elements.
#[derive(Debug)]
pub(crate) struct KeptKernels {
    values: ValueCoding,
    bounds: Kernel,
    measure: Kernel,
    offsets: Kernel,
    write: Kernel,
    gap_sums: Kernel,
    gap_scan: Kernel,
    add: Kernel,
}

impl KeptKernels {
    pub(crate) fn new(device: &Arc<Device>, values: ValueCoding) -> Result<Self, DeviceError> {
        let module = device.module(&Source::new(File::Kept, &[("VALUES", values as usize)]))?;
        let kernel = |name| module.kernel(name);
        Ok(Self {
            values,
            bounds: kernel("bounds")?,
            measure: kernel("measure")?,
            offsets: kernel("offsets")?,
            write: kernel("write_blocks")?,
            gap_sums: kernel("gap_sums")?,
            gap_scan: kernel("gap_scan")?,
            add: kernel("add_blocks")?,
        })
    }

    fn value_bytes(&self, count: usize) -> usize {
        match self.values {
            ValueCoding::F32 => 4 * count,
            ValueCoding::Bf16 => 2 * count,
            ValueCoding::Int8 => count + 4,
        }
    }

    /// The most blocks that `limit` elements in this many shards make.
    fn blocks(limit: usize, shards: usize) -> usize {
        limit / KEPT_BLOCK + shards
    }

    /// The most bytes that messages with `limit` elements in total take, each with a byte after it.
    pub(crate) fn room(&self, limit: usize, shards: usize) -> usize {
        let block = INDEX_BYTES + self.value_bytes(KEPT_BLOCK);
        5 * shards + Self::blocks(limit, shards) * block
    }

    /// Encodes the selected elements, at most `limit`. `ends` says where shards end, counted from
    /// the first element of the job. After its first word, the header then says where each message
    /// starts and the last one ends, counting a byte after each message; then the number of each
    /// message's first block, and the number of blocks.
    pub(crate) fn encode(
        &self,
        encoding: &mut Encoding<'_>,
        scratch: &mut SparseScratch,
        limit: usize,
        ends: &[u64],
    ) -> Result<(), DeviceError> {
        encoding.check();
        let (shards, blocks) = (ends.len(), Self::blocks(limit, ends.len()));
        assert!(encoding.out.len() >= self.room(limit, shards), "room for the messages");
        assert!(encoding.header.len() > 2 * (shards + 1), "room for where they start");
        assert!(scratch.indices.len() >= limit && scratch.picked.len() >= limit, "a list");
        scratch.first.reserve(shards + 1)?;
        scratch.first_block.reserve(shards + 1)?;
        scratch.block_at.reserve(blocks)?;
        scratch.blocks.reserve(16 * blocks)?;
        if scratch.ends.0 != ends {
            scratch.ends.0.clear();
            scratch.ends.1.reserve(shards)?;
            scratch.ends.1.upload(ends)?;
            scratch.ends.0.extend_from_slice(ends);
        }
        let coding = (Coding {
            indices: scratch.indices.pointer(),
            picked: scratch.picked.pointer(),
            left: encoding.left.as_ref().map_or(0, |left| left.pointer()),
            out: encoding.out.pointer(),
            ends: scratch.ends.1.pointer(),
            first: scratch.first.pointer(),
            first_block: scratch.first_block.pointer(),
            block_at: scratch.block_at.pointer(),
            blocks: scratch.blocks.pointer(),
            messages: encoding.header.pointer() + 8,
            total: scratch.state.pointer() + STATE_TOTAL as u64,
            shards: u32::try_from(shards).expect("fewer shards than 2³²"),
        },);
        let warps = (grid(blocks, 4), 1);
        // SAFETY: the list has as many elements as the state says, at most `limit`; blocks, shards
        // and messages have room for that many, as checked above.
        unsafe {
            self.bounds.launch((1, 1), 1024, 0, &coding)?;
            if blocks > 0 {
                self.measure.launch(warps, 128, 0, &coding)?;
            }
            self.offsets.launch((1, 1), 1024, 0, &coding)?;
            if blocks > 0 {
                self.write.launch(warps, 128, 0, &coding)?;
            }
        }
        Ok(())
    }

    /// Adds a message. `blocks` describes its `count` blocks, with 16 bytes for each.
    pub(crate) fn add(
        &self,
        decoding: &mut Decoding<'_>,
        blocks: &Buffer<u8>,
        count: usize,
        reach: &mut Buffer<u64>,
    ) -> Result<(), DeviceError> {
        assert!(blocks.len() >= 16 * count, "all blocks");
        assert!(decoding.bytes.len() >= decoding.len + 16, "the whole message");
        if count == 0 {
            return Ok(());
        }
        reach.reserve(count)?;
        let added = (Added {
            bytes: decoding.bytes.pointer(),
            acc: decoding.acc.pointer,
            bad: decoding.bad.pointer(),
            blocks: blocks.pointer(),
            reach: reach.pointer(),
            range: decoding.acc.len as u64,
            count: u32::try_from(count).expect("fewer blocks than elements"),
        },);
        let warps = (grid(count, 4), 1);
        // SAFETY: the host's walk found every block whole within the message; each index is
        // compared with the range before it is used.
        unsafe {
            self.gap_sums.launch(warps, 128, 0, &added)?;
            self.gap_scan.launch((1, 1), 1024, 0, &added)?;
            self.add.launch(warps, 128, 0, &added)
        }
    }
}

/// The most columns that PowerSGD's kernels keep in registers.
const MAX_RANK: usize = 32;

/// The kernels of PowerSGD, for factors with `rank` columns.
#[derive(Debug)]
pub(crate) struct PowerKernels {
    type_: ValueType,
    rank: usize,
    p: Kernel,
    bands: Kernel,
    q: Kernel,
    end: Kernel,
    /// For a multiple of four columns, if four columns fit in registers.
    end_wide: Option<Kernel>,
}

/// A vector as a matrix, and its factors: P row by row, Q column by column.
#[derive(Debug)]
pub(crate) struct Matrix<'a> {
    pub(crate) rows: usize,
    pub(crate) columns: usize,
    pub(crate) elements: &'a mut Buffer<f32>,
    pub(crate) p: &'a mut Buffer<f32>,
    pub(crate) q: &'a mut Buffer<f32>,
}

impl PowerKernels {
    pub(crate) fn new(
        device: &Arc<Device>,
        rank: usize,
        type_: ValueType,
    ) -> Result<Self, DeviceError> {
        if rank > MAX_RANK {
            return Err(DeviceError::Unsupported {
                codec: format!("powersgd:{rank}"),
                why: "its kernels take ranks up to 32; use a smaller one, or the CPU",
            });
        }
        let defines = [
            value_define(type_),
            ("RANK", rank),
            ("SEGMENT", POWER_SEGMENT),
            ("BAND", POWER_BAND),
            ("TOGETHER", Self::together(rank)),
        ];
        let module = device.module(&Source::new(File::Power, &defines))?;
        let kernel = |name| module.kernel(name);
        Ok(Self {
            type_,
            rank,
            p: kernel("power_p")?,
            bands: kernel("power_bands")?,
            q: kernel("power_q")?,
            end: kernel("power_end")?,
            end_wide: (rank <= 8).then(|| kernel("power_end_wide")).transpose()?,
        })
    }

    /// Rows of P that one thread block computes: they share the elements of Q it has in registers.
    const fn together(rank: usize) -> usize {
        match rank {
            ..=4 => 4,
            5..=8 => 2,
            _ => 1,
        }
    }

    /// Number of elements in the sums over bands of rows, for a matrix of this shape.
    pub(crate) fn bands_len(&self, rows: usize, columns: usize) -> usize {
        rows.div_ceil(POWER_BAND) * self.rank * columns
    }

    fn arguments(&self, matrix: &Matrix<'_>, len: usize) -> Power {
        let Matrix { rows, columns, elements, p, q } = matrix;
        assert!(elements.len() >= len && len <= rows * columns, "a matrix of the vector");
        assert!(p.len() >= rows * self.rank && q.len() >= columns * self.rank, "its factors");
        Power {
            values: 0,
            owed: 0,
            matrix: elements.pointer(),
            bad: 0,
            p: p.pointer(),
            q: q.pointer(),
            bands: 0,
            own: 0,
            out: 0,
            len: len as u64,
            rows: *rows as u64,
            columns: *columns as u64,
        }
    }

    /// Computes the matrix, and P from the given Q. Leaves the lowest index of an element that is
    /// not finite in the first word of `header`.
    pub(crate) fn begin(
        &self,
        values: DeviceValues<'_>,
        owed: Option<&Buffer<f32>>,
        matrix: &mut Matrix<'_>,
        header: &mut Buffer<u64>,
    ) -> Result<(), DeviceError> {
        assert_eq!(values.type_, self.type_, "kernels for this type");
        assert!(owed.is_none_or(|owed| owed.len() >= values.len()), "a residual for each value");
        assert!(!header.is_empty(), "room for an index");
        let arguments = (Power {
            values: values.pointer,
            owed: owed.map_or(0, Buffer::pointer),
            bad: header.pointer(),
            ..self.arguments(matrix, values.len())
        },);
        let blocks = grid(matrix.rows, Self::together(self.rank));
        // SAFETY: vectors have the elements of the matrix, and factors their size.
        unsafe { self.p.launch((blocks, 1), 256, 0, &arguments) }
    }

    /// Computes Q from the given P. `bands` is scratch space of [`bands_len`](Self::bands_len)
    /// elements.
    pub(crate) fn go_on(
        &self,
        matrix: &mut Matrix<'_>,
        bands: &mut Buffer<f32>,
        len: usize,
    ) -> Result<(), DeviceError> {
        let (rows, columns) = (matrix.rows, matrix.columns);
        assert!(bands.len() >= self.bands_len(rows, columns), "room for the sum of each band");
        let arguments = (Power { bands: bands.pointer(), ..self.arguments(matrix, len) },);
        let y = grid(rows, POWER_BAND).min(65_535);
        // SAFETY: as above; the grid goes over all bands.
        unsafe {
            self.bands.launch((grid(columns, 256), y), 256, 0, &arguments)?;
            self.q.launch((grid(columns * self.rank, 128), 1), 128, 0, &arguments)
        }
    }

    /// Computes the result from P and the sum of all ranks' Q. Subtracts from the matrix what this
    /// rank has sent; `own` is its Q.
    pub(crate) fn end(
        &self,
        matrix: &mut Matrix<'_>,
        own: &Buffer<f32>,
        out: &mut Buffer<f32>,
        len: usize,
    ) -> Result<(), DeviceError> {
        assert!(out.len() >= len && own.len() >= matrix.columns * self.rank, "room and a factor");
        let all = self.arguments(matrix, len);
        let arguments = (Power { own: own.pointer(), out: out.pointer(), ..all },);
        let (rows, columns) = (matrix.rows, matrix.columns);
        if let Some(kernel) = self.end_wide.as_ref().filter(|_| columns.is_multiple_of(4)) {
            let (x, y) = (grid(columns, 4 * 128), grid(rows, 32).min(65_535));
            // SAFETY: as above; the grid goes over all rows. Buffers start at multiples of 256
            // bytes, so rows of a multiple of four elements, and those of Q, start at multiples of
            // 16.
            return unsafe { kernel.launch((x, y), 128, 0, &arguments) };
        }
        let y = grid(rows, 16).min(65_535);
        // SAFETY: as above; the grid goes over all rows.
        unsafe { self.end.launch((grid(columns, 256), y), 256, 0, &arguments) }
    }
}

/// The last step of an all-reduce.
#[derive(Debug)]
pub(crate) struct FinishKernel {
    type_: ValueType,
    kernel: Kernel,
}

impl FinishKernel {
    pub(crate) fn new(device: &Arc<Device>, type_: ValueType) -> Result<Self, DeviceError> {
        let module = device.module(&Source::new(File::Finish, &[value_define(type_)]))?;
        Ok(Self { type_, kernel: module.kernel("finish")? })
    }

    /// Writes `from`, divided, over `to`.
    pub(crate) fn write(
        &self,
        from: &Buffer<f32>,
        divisor: f32,
        to: &mut DeviceTensor,
    ) -> Result<(), DeviceError> {
        assert_eq!(self.type_, to.value_type(), "a kernel for this type");
        assert!(from.len() >= to.len(), "a value for each");
        if to.is_empty() {
            return Ok(());
        }
        let arguments = (to.pointer_mut(), from.pointer(), to.len() as u64, divisor);
        // SAFETY: both have that many elements, and whoever made the tensor promised that nobody
        // else accesses it now.
        unsafe { self.kernel.launch((grid(to.len(), ELEMENTWISE), 1), 256, 0, &arguments) }
    }
}

/// What training does to vectors, besides exchanging them.
#[derive(Debug)]
pub(crate) struct TrainingKernels {
    add: Kernel,
    squares: Kernel,
    adamw: Kernel,
}

/// The parameters of an AdamW update, the same for all elements.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamWStep {
    /// Gradients are multiplied by this first.
    pub scale: f32,
    /// The share of the first moment that is kept.
    pub beta1: f32,
    /// The share of the second moment that is kept.
    pub beta2: f32,
    /// The learning rate over `1 − beta1ⁿ`.
    pub step: f32,
    /// `√(1 − beta2ⁿ)`.
    pub root: f32,
    /// Weights are multiplied by this.
    pub decay: f32,
    /// Added to the divisor.
    pub epsilon: f32,
}

impl TrainingKernels {
    pub(crate) fn new(device: &Arc<Device>) -> Result<Self, DeviceError> {
        let module = device.module(&Source::new(File::Training, &[]))?;
        Ok(Self {
            add: module.kernel("add_gradient")?,
            squares: module.kernel("sum_squares")?,
            adamw: module.kernel("adamw")?,
        })
    }

    /// Adds the gradient to the elements of `sum` from `at` on, which are taken to be zeros if
    /// `fresh`. `bad[place]` becomes the least of its old value and `4 · index + kind` of the
    /// elements that are not finite afterwards.
    pub(crate) fn add(
        &self,
        sum: &mut DeviceTensor,
        at: usize,
        fresh: bool,
        gradient: &DeviceTensor,
        bad: &mut Buffer<u64>,
        place: usize,
    ) -> Result<(), DeviceError> {
        let len = gradient.len();
        let both = (sum.value_type(), gradient.value_type());
        assert_eq!(both, (ValueType::F32, ValueType::F32), "kernels for f32");
        assert!(at <= sum.len() && len <= sum.len() - at && place < bad.len(), "room for all");
        if len == 0 {
            return Ok(());
        }
        let arguments = (Add {
            sum: sum.pointer_mut() + (at * size_of::<f32>()) as u64,
            gradient: gradient.values(0..len).pointer,
            bad: bad.pointer() + (place * size_of::<u64>()) as u64,
            len: len as u64,
            fresh: u64::from(fresh),
        },);
        // SAFETY: both have that many elements, `bad` has that place, and whoever made the tensors
        // promised that nobody else accesses them now.
        unsafe { self.add.launch((grid(len, ELEMENTWISE), 1), 256, 0, &arguments) }
    }

    /// The number of sums for this many elements.
    pub(crate) fn sums(len: usize) -> usize {
        len.div_ceil(ELEMENTWISE)
    }

    /// Writes sums of squares, one for each 4,096 elements, to `out` from `at` on.
    pub(crate) fn squares(
        &self,
        values: DeviceValues<'_>,
        out: &mut Buffer<f64>,
        at: usize,
    ) -> Result<(), DeviceError> {
        let sums = Self::sums(values.len());
        assert_eq!(values.type_, ValueType::F32, "kernels for f32");
        assert!(at <= out.len() && sums <= out.len() - at, "room for all sums");
        if sums == 0 {
            return Ok(());
        }
        let out = out.pointer() + (at * size_of::<f64>()) as u64;
        let arguments = (out, values.pointer, values.len() as u64);
        // SAFETY: the values are borrowed, and there is room for the sums of all blocks.
        unsafe { self.squares.launch((grid(values.len(), ELEMENTWISE), 1), 256, 0, &arguments) }
    }

    /// Runs one update.
    pub(crate) fn adamw(
        &self,
        weights: &mut DeviceTensor,
        first: &mut Buffer<f32>,
        second: &mut Buffer<f32>,
        gradient: DeviceValues<'_>,
        step: &AdamWStep,
    ) -> Result<(), DeviceError> {
        let len = gradient.len();
        assert_eq!((weights.value_type(), gradient.type_), (ValueType::F32, ValueType::F32));
        assert_eq!((weights.len(), first.len(), second.len()), (len, len, len), "one length");
        if len == 0 {
            return Ok(());
        }
        let arguments = (AdamW {
            weights: weights.pointer_mut(),
            first: first.pointer(),
            second: second.pointer(),
            gradient: gradient.pointer,
            len: len as u64,
            scale: step.scale,
            beta1: step.beta1,
            beta2: step.beta2,
            step: step.step,
            root: step.root,
            decay: step.decay,
            epsilon: step.epsilon,
            unused: 0,
        },);
        // SAFETY: all four have that many elements, and whoever made the tensor promised that
        // nobody else accesses it now.
        unsafe { self.adamw.launch((grid(len, ELEMENTWISE), 1), 256, 0, &arguments) }
    }
}

/// `r += g`, which codecs are compared with.
#[derive(Debug)]
pub(crate) struct AddKernel(Kernel);

impl AddKernel {
    pub(crate) fn new(device: &Arc<Device>) -> Result<Self, DeviceError> {
        Ok(Self(device.module(&Source::new(File::Bench, &[]))?.kernel("add_into")?))
    }

    /// Adds all elements except up to three at the end.
    pub(crate) fn add(&self, r: &mut Buffer<f32>, g: &Buffer<f32>) -> Result<(), DeviceError> {
        assert_eq!(r.len(), g.len(), "vectors of one length");
        if r.is_empty() {
            return Ok(());
        }
        let arguments = (r.pointer(), g.pointer(), r.len() as u64);
        // SAFETY: both have that many elements, and buffers start at multiples of 256 bytes.
        unsafe { self.0.launch((grid(r.len(), ELEMENTWISE), 1), 256, 0, &arguments) }
    }
}

/// Formats, value codings and value types have the numbers that the kernels use.
const _: () = assert!(
    Format::Int8 as usize == 0 && Format::Int4 as usize == 1 && Format::Fp8 as usize == 2,
    "block.cu's FORMAT"
);
const _: () = assert!(
    ValueCoding::F32 as usize == 0
        && ValueCoding::Bf16 as usize == 1
        && ValueCoding::Int8 as usize == 2,
    "kept.cu's VALUES"
);
const _: () = assert!(
    ValueType::F32 as usize == 0 && ValueType::F16 as usize == 1 && ValueType::Bf16 as usize == 2,
    "common.cu's VALUE"
);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_add_up_to_the_job() {
        for chunk in [1, 3, 16, 100] {
            for keep in [1, chunk / 2 + 1, chunk] {
                for origin in 0..2 * chunk + 1 {
                    for len in 0..3 * chunk + 2 {
                        let pieces = Pieces::new(origin, len, keep, chunk);
                        // One by one, as on the CPU.
                        let (mut at, mut lens) = (origin, Vec::new());
                        while at < origin + len {
                            let end = ((at / chunk + 1) * chunk).min(origin + len);
                            lens.push(end - at);
                            at = end;
                        }
                        let total: usize = lens.iter().map(|len| pieces.kept(*len)).sum();
                        assert_eq!((pieces.count, pieces.total()), (lens.len(), total));
                        assert_eq!(pieces.last, lens.last().copied().unwrap_or(0));
                        assert_eq!(pieces.first, lens.first().copied().unwrap_or(0));
                    }
                }
            }
        }
    }

    /// Rule 1, as far as sizes go: these are the values of `sizeof` in CUDA C++.
    #[test]
    fn arguments_have_the_sizes_of_their_namesakes() {
        assert_eq!(size_of::<Shard>(), 32);
        assert_eq!(size_of::<Encode>(), 64 + 64 * 32);
        assert_eq!(size_of::<Decode>(), 56);
        assert_eq!(size_of::<Select>(), 112);
        assert_eq!(size_of::<Chunks>(), 56);
        assert_eq!(size_of::<Coding>(), 96);
        assert_eq!(size_of::<Added>(), 56);
        assert_eq!(size_of::<Power>(), 96);
    }
}
