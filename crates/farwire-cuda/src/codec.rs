//! A codec on the card: does what the CPU's `MessageCodec` does, with vectors that stay on the
//! card.
//!
//! ```text
//!  card   gradient ─┬─ kernels ─ messages ─┐       ┌─ message ─ kernels ─ accumulator
//!         residual ─┘     └ new residual   │       │
//!  ─────────────────────────────────────── │ ───── │ ── bus: compressed bytes only ──
//!  host                                 pinned   pinned
//! ```
//!
//! Each direction is two steps, so that a caller can put other work between them: `start_…` puts
//! work on the stream and returns, `finish_…` waits for it.

use std::any::Any;
use std::ops::Range;
use std::sync::{Arc, OnceLock};

use bytes::Bytes;
use farwire_codec::device::{Draws, KeptBlock, Keys, check_shards, drawn_within, kept_blocks};
use farwire_codec::{
    BlockQuantiser, Cast, CodecSpec, CodedPlace, DecodeError, EncodeError, Identity, Keep,
    MessageCodec, OwnerMode, RandomK, Role, Sign, TopK,
};

use crate::driver::{Buffer, Device, DevicePart, DeviceValues, Pinned, ValueType};
use crate::error::DeviceError;
use crate::kernels::{
    Decoding, Dense, DenseKernels, Encoding, KeptKernels, RandomKernels, Selection, Shard,
    SparseScratch, TopKernels,
};

/// A codec whose vectors are on a card.
#[derive(Debug)]
pub struct DeviceCodec {
    device: Arc<Device>,
    spec: CodecSpec,
    /// The same codec on the CPU: it knows how long messages are, and says what is wrong with one.
    cpu: Arc<dyn MessageCodec>,
    kind: Kind,
    /// By type of value.
    kernels: [OnceLock<Kernels>; 3],
    kept: OnceLock<KeptKernels>,
}

#[derive(Clone, Copy, Debug)]
enum Kind {
    Dense(Dense),
    Random(RandomK),
    TopK(TopK),
}

#[derive(Debug)]
enum Kernels {
    Dense(DenseKernels),
    Random(RandomKernels),
    TopK(TopKernels),
}

/// One vector on the card to encode. The counterpart of [`farwire_codec::Job`].
#[derive(Clone, Debug)]
pub struct DeviceJob<'a> {
    /// The gradient, or at an owner the sum of the messages it received.
    pub values: DeviceValues<'a>,
    /// What error feedback still owes.
    pub residual: DeviceResidual<'a>,
    /// Which part of which tensor the values are.
    pub place: CodedPlace,
    /// Which of the two rounds this is.
    pub role: Role,
    /// This rank's number, for stochastic rounding.
    pub rank: u32,
    /// The ranges to encode: in order, without gaps, and covering all of `place.range`.
    pub shards: &'a [Range<usize>],
}

/// Whether there is error feedback, and what it owes.
#[derive(Clone, Copy, Debug)]
pub enum DeviceResidual<'a> {
    /// No error feedback.
    Off,
    /// Error feedback that owes nothing yet.
    Zero,
    /// Error feedback that owes this: at least as many elements as there are values.
    Owed(&'a Buffer<f32>),
}

/// Messages in pinned memory and the new residual on the card, with scratch space for the encoder.
/// Pass the same one again and nothing is allocated.
#[derive(Debug)]
pub struct DeviceEncoded {
    device: Arc<Device>,
    residual: Buffer<f32>,
    out: Buffer<u8>,
    pinned: Pinned,
    /// On the card: the lowest index of a value that is not finite, and for sparse codecs where the
    /// messages start.
    header: Buffer<u64>,
    pinned_header: Pinned,
    scratch: Buffer<f32>,
    sparse: Option<SparseScratch>,
    /// Where the messages are in `out`, and so in `pinned`. Sparse codecs know it only at the end.
    /// The byte after each message has no meaning.
    messages: Vec<Range<usize>>,
    /// Which of the blocks belong to each message; for sparse codecs only.
    blocks: Vec<Range<usize>>,
    sizes_on_card: bool,
}

impl DeviceEncoded {
    /// Nothing yet.
    pub fn new(device: &Arc<Device>) -> Result<Self, DeviceError> {
        let mut header = device.buffer(1)?;
        header.fill_bytes(0..1, 0xff)?;
        Ok(Self {
            device: device.clone(),
            residual: device.buffer(0)?,
            out: device.buffer(0)?,
            pinned: Pinned::new(device, 0)?,
            header,
            pinned_header: Pinned::new(device, 8)?,
            scratch: device.buffer(0)?,
            sparse: None,
            messages: Vec::new(),
            blocks: Vec::new(),
            sizes_on_card: false,
        })
    }

    /// How many messages there are: one for each shard.
    pub fn len(&self) -> usize {
        self.messages.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.messages.is_empty()
    }

    /// The message of a shard, in pinned memory.
    ///
    /// # Panics
    ///
    /// If there is no such shard.
    pub fn message(&self, shard: usize) -> &[u8] {
        &self.pinned.bytes()[self.messages[shard].clone()]
    }

    /// What was not sent; meaningless with [`DeviceResidual::Off`]. It may be longer than the
    /// vector: the elements past its length have no meaning.
    pub fn residual(&self) -> &Buffer<f32> {
        &self.residual
    }

    /// Puts the new residual into `owed` and keeps the old one, to be overwritten. Call it only
    /// once the step has succeeded. Because of this, residuals take twice their size on the card.
    pub fn swap_residual(&mut self, owed: &mut Buffer<f32>) {
        std::mem::swap(&mut self.residual, owed);
    }
}

/// Bytes after a message that kernels may read, as they read whole words, but ignore.
const SLACK: usize = 16;

/// A received message in pinned memory, with scratch space for the decoder.
#[derive(Debug)]
pub struct Inbox {
    device: Arc<Device>,
    pinned: Pinned,
    /// Whether a copy from `pinned` may still be running.
    in_flight: bool,
    len: usize,
    bytes: Buffer<u8>,
    bad: Buffer<u32>,
    pinned_bad: Pinned,
    scratch: Buffer<f32>,
    blocks: Vec<KeptBlock>,
    pinned_blocks: Pinned,
    /// The blocks, on the card.
    card_blocks: Buffer<u8>,
    block_count: usize,
    reach: Buffer<u64>,
}

impl Inbox {
    /// An empty one.
    pub fn new(device: &Arc<Device>) -> Result<Self, DeviceError> {
        Ok(Self {
            device: device.clone(),
            pinned: Pinned::new(device, 0)?,
            in_flight: false,
            len: 0,
            bytes: device.buffer(0)?,
            bad: device.buffer(1)?,
            pinned_bad: Pinned::new(device, 4)?,
            scratch: device.buffer(0)?,
            blocks: Vec::new(),
            pinned_blocks: Pinned::new(device, 0)?,
            card_blocks: device.buffer(0)?,
            block_count: 0,
            reach: device.buffer(0)?,
        })
    }

    /// Room for a message of `len` bytes, for the network to write to. Waits if the previous
    /// message is still being copied to the card: the card must get the bytes that the host has
    /// checked.
    pub fn room(&mut self, len: usize) -> Result<&mut [u8], DeviceError> {
        if std::mem::take(&mut self.in_flight) {
            self.device.wait()?;
        }
        self.pinned.reserve(len + SLACK)?;
        self.len = len;
        Ok(&mut self.pinned.bytes_mut()[..len])
    }

    /// Copies this message into the inbox.
    pub fn copy_from(&mut self, message: &[u8]) -> Result<(), DeviceError> {
        self.room(message.len())?.copy_from_slice(message);
        Ok(())
    }

    /// Puts on the stream a copy of a message that was encoded on this card: it does not cross the
    /// bus.
    pub(crate) fn copy_on_card(
        &mut self,
        out: &DeviceEncoded,
        shard: usize,
    ) -> Result<(), DeviceError> {
        let Range { start, end } = out.messages[shard].clone();
        self.len = end - start;
        self.bytes.reserve(self.len + SLACK)?;
        self.bad.fill_bytes(0..1, 0)?;
        self.device.copy_on_card(&out.out, start..end + SLACK, &mut self.bytes)?;
        self.block_count = 0;
        if let (Some(blocks), Some(sparse)) = (out.blocks.get(shard), &out.sparse) {
            let bytes = 16 * blocks.start..16 * blocks.end;
            self.block_count = blocks.len();
            self.card_blocks.reserve(bytes.len())?;
            self.device.copy_on_card(&sparse.blocks, bytes, &mut self.card_blocks)?;
        }
        Ok(())
    }

    /// The message.
    pub fn message(&self) -> &[u8] {
        &self.pinned.bytes()[..self.len]
    }
}

impl DeviceCodec {
    /// The codec on that card, or an error that says why the card cannot run it. Kernels are
    /// compiled when they are first used.
    pub fn new(device: &Arc<Device>, spec: &CodecSpec) -> Result<Self, DeviceError> {
        let (kind, cpu) = Kind::of(spec)?;
        let (kernels, kept) = Default::default();
        Ok(Self { device: device.clone(), spec: spec.clone(), cpu, kind, kernels, kept })
    }

    /// Whether a codec has kernels; the error says what is missing. Needs no card.
    pub fn supports(spec: &CodecSpec) -> Result<(), DeviceError> {
        Kind::of(spec).map(|_| ())
    }

    /// The codec.
    pub fn spec(&self) -> &CodecSpec {
        &self.spec
    }

    /// Encodes each shard of `job` into a message of its own, in pinned memory, and leaves the new
    /// residual in `out`. Waits until they are complete. After an error the content of `out` has no
    /// meaning; the job's residual is unchanged.
    pub fn encode(&self, job: &DeviceJob<'_>, out: &mut DeviceEncoded) -> Result<(), DeviceError> {
        self.start_encode(job, out)?;
        self.finish_encode(out)
    }

    /// Puts the encoding on the stream: all of it except the copy of the messages to the host.
    ///
    /// # Panics
    ///
    /// If the parts of the job do not match.
    pub fn start_encode(
        &self,
        job: &DeviceJob<'_>,
        out: &mut DeviceEncoded,
    ) -> Result<(), DeviceError> {
        let len = job.place.range.len();
        assert_eq!(job.values.len(), len, "one value for each element of place.range");
        check_shards(&job.place, job.shards);
        self.check_len(&job.place)?;
        let owed = match job.residual {
            DeviceResidual::Owed(owed) => {
                assert!(owed.len() >= len, "one residual for each element of place.range");
                Some(owed)
            }
            DeviceResidual::Off | DeviceResidual::Zero => None,
        };
        let keeps = !matches!(job.residual, DeviceResidual::Off);
        // Sparse codecs work on the fused values, whether or not the residual is wanted.
        if keeps || !matches!(self.kind, Kind::Dense(_)) {
            out.residual.reserve(len)?;
        }
        out.header.reserve(2 * job.shards.len() + 3)?;
        let header = out.header.len();
        out.header.fill_bytes(0..header, 0xff)?;
        out.sizes_on_card = false;
        out.messages.clear();
        out.blocks.clear();

        let kernels = self.kernels(job.values.type_)?;
        let origin = job.place.range.start;
        let keys = Keys::new(&job.place, job.role, job.rank);
        let mut shards = Vec::with_capacity(job.shards.len());
        let mut selected = None;
        let mut end = 0;
        for shard in job.shards {
            let mut new = Shard {
                start: (shard.start - origin) as u64,
                len: shard.len() as u64,
                out: end as u64,
                drawn: 0,
            };
            let bytes = match self.kind {
                Kind::Dense(_) => self.cpu.max_message_len(shard.len()),
                Kind::Random(codec) => {
                    let (first, count) = drawn_within(&codec, &job.place.part(shard.clone()));
                    (new.drawn, new.len) = (first, count as u64);
                    if codec.bf16 { 2 * count } else { 4 * count }
                }
                Kind::TopK(_) => 0,
            };
            out.messages.push(end..end + bytes);
            shards.push(new);
            end = (end + bytes + 1).next_multiple_of(16);
        }
        if let Kind::TopK(codec) = self.kind {
            let selection = selection(&codec, job);
            let limit = selection.limit(origin, len);
            end = self.kept(&codec)?.room(limit, job.shards.len());
            selected = Some((selection, limit));
        }
        if out.out.len() < end + SLACK {
            // The gaps between messages are copied along with them.
            out.out = self.device.zeros(end + SLACK)?;
        }
        if out.sparse.is_none() && selected.is_some() {
            out.sparse = Some(SparseScratch::new(&self.device)?);
        }
        let mut encoding = Encoding {
            values: job.values,
            owed,
            left: Some(&mut out.residual).filter(|left| left.len() >= len),
            out: &mut out.out,
            header: &mut out.header,
            origin,
            keys,
            scratch: &mut out.scratch,
        };
        match kernels {
            Kernels::Dense(kernels) => {
                encoding.left = encoding.left.filter(|_| keeps);
                kernels.encode(&mut encoding, &shards)
            }
            Kernels::Random(kernels) => {
                let Kind::Random(codec) = self.kind else { unreachable!("made for this kind") };
                let boost = !keeps && job.role == Role::Worker;
                kernels.encode(&mut encoding, &shards, Draws::new(&codec, &job.place), boost)
            }
            Kernels::TopK(kernels) => {
                let (Kind::TopK(codec), Some((selection, limit)), Some(sparse)) =
                    (self.kind, selected, &mut out.sparse)
                else {
                    unreachable!("made for this kind")
                };
                let ends: Vec<u64> =
                    job.shards.iter().map(|shard| (shard.end - origin) as u64).collect();
                kernels.select(&mut encoding, sparse, selection)?;
                self.kept(&codec)?.encode(&mut encoding, sparse, limit, &ends)?;
                out.sizes_on_card = true;
                Ok(())
            }
        }
    }

    /// Waits for the encoding, and copies the messages to pinned memory.
    pub fn finish_encode(&self, out: &mut DeviceEncoded) -> Result<(), DeviceError> {
        self.start_header(out)?;
        if !out.sizes_on_card {
            copy_messages(out)?;
        }
        out.device.wait()?;
        if self.finish_header(out)? {
            copy_messages(out)?;
            out.device.wait()?;
        }
        Ok(())
    }

    /// Waits for the encoding, and makes parcels of the messages: each with a zero byte after it,
    /// in pinned memory from the device's pool. The message of shard `own`, if given, stays on the
    /// card, and an empty parcel takes its place.
    pub(crate) fn finish_parcels(
        &self,
        out: &mut DeviceEncoded,
        own: Option<usize>,
    ) -> Result<Vec<Bytes>, DeviceError> {
        self.start_header(out)?;
        let copy = |out: &DeviceEncoded| {
            let all = 0..out.messages.last().map_or(0, |message| message.end);
            let skipped = own.map_or(all.end..all.end, |own| out.messages[own].clone());
            // In pinned memory of their own: the network reads it while the next messages are made.
            let mut pinned = out.device.pooled_pinned(all.end + 1)?;
            out.device.copy_part_to_host(&out.out, 0..skipped.start, &mut pinned)?;
            out.device.copy_part_to_host(&out.out, skipped.end..all.end, &mut pinned)?;
            Ok::<_, DeviceError>(pinned)
        };
        let early = if out.sizes_on_card { None } else { Some(copy(out)?) };
        out.device.wait()?;
        self.finish_header(out)?;
        let mut pinned = match early {
            Some(pinned) => pinned,
            None => {
                let pinned = copy(out)?;
                out.device.wait()?;
                pinned
            }
        };
        for message in &out.messages {
            pinned.bytes_mut()[message.end] = 0;
        }
        let all = Bytes::from_owner(pinned);
        let parcel = |(shard, message): (usize, &Range<usize>)| match own {
            Some(own) if own == shard => Bytes::new(),
            _ => all.slice(message.start..message.end + 1),
        };
        Ok(out.messages.iter().enumerate().map(parcel).collect())
    }

    /// Puts on the stream the copy that tells the host how the encoding went.
    fn start_header(&self, out: &mut DeviceEncoded) -> Result<(), DeviceError> {
        let words = if out.sizes_on_card { 2 * out.messages.len() + 3 } else { 1 };
        out.pinned_header.reserve(8 * words)?;
        out.device.copy_to_host(&out.header, words, &mut out.pinned_header)
    }

    /// Checks how the encoding went. Returns whether the messages' places have become known only
    /// now.
    fn finish_header(&self, out: &mut DeviceEncoded) -> Result<bool, DeviceError> {
        let shards = out.messages.len();
        let header: Vec<u64> = words_of(out.pinned_header.bytes());
        if header[0] != u64::MAX {
            return Err(EncodeError::NotFinite { index: header[0] as usize }.into());
        }
        if out.sizes_on_card {
            let (starts, blocks) = header[1..].split_at(shards + 1);
            for (message, ends) in out.messages.iter_mut().zip(starts.windows(2)) {
                *message = ends[0] as usize..ends[1] as usize - 1;
            }
            let blocks = blocks[..shards + 1].windows(2);
            out.blocks.extend(blocks.map(|ends| ends[0] as usize..ends[1] as usize));
        }
        Ok(out.sizes_on_card)
    }

    /// Adds the message in `inbox` for `place` to `acc`, which has one element for each of
    /// `place.range`. Waits until it is done.
    ///
    /// The message comes from the network, so it is checked as on the CPU, with the same errors.
    /// After an error `acc` may have been changed in part.
    pub fn add_decoded(
        &self,
        inbox: &mut Inbox,
        place: &CodedPlace,
        acc: DevicePart<'_>,
    ) -> Result<(), DeviceError> {
        self.start_decode(inbox, place, acc, false)?;
        self.finish_decode(inbox, place)
    }

    /// As [`add_decoded`](Self::add_decoded), but takes all of `acc` to be zero, whatever it holds.
    pub fn decode(
        &self,
        inbox: &mut Inbox,
        place: &CodedPlace,
        acc: DevicePart<'_>,
    ) -> Result<(), DeviceError> {
        self.start_decode(inbox, place, acc, true)?;
        self.finish_decode(inbox, place)
    }

    /// Puts the decoding on the stream, including the copy of the message to the card.
    ///
    /// # Panics
    ///
    /// If `acc` does not have one element for each of `place.range`.
    pub fn start_decode(
        &self,
        inbox: &mut Inbox,
        place: &CodedPlace,
        acc: DevicePart<'_>,
        fresh: bool,
    ) -> Result<(), DeviceError> {
        self.upload(inbox, place)?;
        self.start_decode_uploaded(inbox, place, acc, fresh)
    }

    /// Checks the message's length and puts its copy to the card on the stream.
    pub(crate) fn upload(&self, inbox: &mut Inbox, place: &CodedPlace) -> Result<(), DeviceError> {
        self.check_len(place)?;
        if std::mem::replace(&mut inbox.in_flight, true) {
            inbox.device.wait()?;
        }
        let Inbox { device, pinned, len, bytes, bad, .. } = inbox;
        inbox.blocks.clear();
        match self.kind {
            Kind::Dense(_) => check_len(*len, self.cpu.max_message_len(place.range.len()))?,
            Kind::Random(codec) => {
                let (_, count) = drawn_within(&codec, place);
                check_len(*len, if codec.bf16 { 2 * count } else { 4 * count })?;
            }
            Kind::TopK(codec) => {
                let message = &pinned.bytes()[..*len];
                let elements = place.range.len();
                if !kept_blocks(codec.values, message, elements, &mut inbox.blocks) {
                    return Err(self.refusal(message, place));
                }
                inbox.pinned_blocks.reserve(16 * inbox.blocks.len())?;
                inbox.card_blocks.reserve(16 * inbox.blocks.len())?;
                let words = inbox.pinned_blocks.bytes_mut().as_chunks_mut::<16>().0;
                for (words, block) in words.iter_mut().zip(&inbox.blocks) {
                    words[..8].copy_from_slice(&block.at.to_le_bytes());
                    words[8..12].copy_from_slice(&block.last.to_le_bytes());
                    words[12..].copy_from_slice(&block.count.to_le_bytes());
                }
                let all = 16 * inbox.blocks.len();
                inbox.block_count = inbox.blocks.len();
                device.copy_to_card(&inbox.pinned_blocks, all, &mut inbox.card_blocks)?;
            }
        }
        pinned.reserve(*len + SLACK)?;
        bytes.reserve(*len + SLACK)?;
        bad.fill_bytes(0..1, 0)?;
        device.copy_to_card(pinned, *len + SLACK, bytes)
    }

    /// Puts on the stream the decoding of a message that is already on the card.
    pub(crate) fn start_decode_uploaded(
        &self,
        inbox: &mut Inbox,
        place: &CodedPlace,
        acc: DevicePart<'_>,
        fresh: bool,
    ) -> Result<(), DeviceError> {
        assert_eq!(acc.len, place.range.len(), "one element for each of the range");
        let kernels = self.kernels(ValueType::F32)?;
        let mut decoding = Decoding {
            bytes: &inbox.bytes,
            len: inbox.len,
            acc,
            bad: &mut inbox.bad,
            origin: place.range.start,
            keys: Keys::new(place, Role::Worker, 0),
            fresh,
            scratch: &mut inbox.scratch,
        };
        match (kernels, self.kind) {
            (Kernels::Dense(kernels), _) => kernels.add(&mut decoding),
            (Kernels::Random(kernels), Kind::Random(codec)) => {
                if fresh {
                    decoding.acc.clear(&self.device)?;
                }
                let (first, count) = drawn_within(&codec, place);
                kernels.add(&mut decoding, Draws::new(&codec, place), first, count)
            }
            (Kernels::TopK(_), Kind::TopK(codec)) => {
                if fresh {
                    decoding.acc.clear(&self.device)?;
                }
                let (blocks, count) = (&inbox.card_blocks, inbox.block_count);
                self.kept(&codec)?.add(&mut decoding, blocks, count, &mut inbox.reach)
            }
            _ => unreachable!("kernels are made for the kind"),
        }
    }

    /// Waits for the decoding. Returns an error if anything was wrong with the message.
    pub fn finish_decode(&self, inbox: &mut Inbox, place: &CodedPlace) -> Result<(), DeviceError> {
        self.start_check(inbox)?;
        inbox.device.wait()?;
        self.finish_check(inbox, place)
    }

    /// Puts on the stream the copy that tells the host whether anything was wrong with the message.
    pub(crate) fn start_check(&self, inbox: &mut Inbox) -> Result<(), DeviceError> {
        inbox.device.copy_to_host(&inbox.bad, 1, &mut inbox.pinned_bad)
    }

    /// Returns an error if anything was wrong with the message. The caller has waited since
    /// [`start_check`](Self::start_check).
    pub(crate) fn finish_check(
        &self,
        inbox: &mut Inbox,
        place: &CodedPlace,
    ) -> Result<(), DeviceError> {
        inbox.in_flight = false;
        if inbox.pinned_bad.bytes()[..4] == [0; 4] {
            return Ok(());
        }
        Err(self.refusal(inbox.message(), place))
    }

    /// What the CPU says about a message that the card refuses. Rare, so it may be slow.
    fn refusal(&self, message: &[u8], place: &CodedPlace) -> DeviceError {
        let mut acc = vec![0.0; place.range.len()];
        match self.cpu.add_decoded_into(message, place, &mut acc) {
            Err(error) => error.into(),
            Ok(()) => DeviceError::Disagreement { codec: self.spec.name() },
        }
    }

    /// Sparse codecs count elements in 32 bits.
    fn check_len(&self, place: &CodedPlace) -> Result<(), DeviceError> {
        let limit = u32::MAX as usize;
        match self.kind {
            Kind::Dense(_) => Ok(()),
            Kind::TopK(_) if place.range.len() <= limit => Ok(()),
            Kind::TopK(_) => {
                Err(EncodeError::TooLong { elements: place.range.len(), limit }.into())
            }
            Kind::Random(_) if place.whole <= limit => Ok(()),
            Kind::Random(_) => Err(EncodeError::TooLong { elements: place.whole, limit }.into()),
        }
    }

    fn kernels(&self, type_: ValueType) -> Result<&Kernels, DeviceError> {
        let slot = &self.kernels[type_ as usize];
        if let Some(kernels) = slot.get() {
            return Ok(kernels);
        }
        let device = &self.device;
        let made = match self.kind {
            Kind::Dense(codec) => Kernels::Dense(DenseKernels::new(device, codec, type_)?),
            Kind::Random(codec) => Kernels::Random(RandomKernels::new(device, codec.bf16, type_)?),
            Kind::TopK(codec) => {
                let chunk = match codec.keep {
                    Keep::PerChunk { chunk, .. } => Some(chunk),
                    Keep::Whole(_) => None,
                };
                Kernels::TopK(TopKernels::new(device, chunk, codec.values, type_)?)
            }
        };
        Ok(slot.get_or_init(|| made))
    }

    fn kept(&self, codec: &TopK) -> Result<&KeptKernels, DeviceError> {
        if let Some(kernels) = self.kept.get() {
            return Ok(kernels);
        }
        let made = KeptKernels::new(&self.device, codec.values)?;
        Ok(self.kept.get_or_init(|| made))
    }
}

impl Kind {
    fn of(spec: &CodecSpec) -> Result<(Self, Arc<dyn MessageCodec>), DeviceError> {
        let unsupported = |why| DeviceError::Unsupported { codec: spec.name(), why };
        let codec: &dyn Any = &**spec;
        let kind = if let Some(block) = codec.downcast_ref::<BlockQuantiser>() {
            Self::Dense(Dense::Block(*block))
        } else if codec.is::<Sign>() {
            Self::Dense(Dense::Sign)
        } else if let Some(cast) = codec.downcast_ref::<Cast>() {
            Self::Dense(Dense::Cast(Some(*cast)))
        } else if codec.is::<Identity>() {
            Self::Dense(Dense::Cast(None))
        } else if let Some(random) = codec.downcast_ref::<RandomK>() {
            Self::Random(*random)
        } else if let Some(topk) = codec.downcast_ref::<TopK>() {
            Self::TopK(*topk)
        } else if spec.messages().is_none() {
            return Err(unsupported(
                "it has no messages but factors of a matrix, which a DeviceCommunicator sums",
            ));
        } else {
            return Err(unsupported(
                "there are no kernels for codecs of one's own; use another codec, or the CPU",
            ));
        };
        let cpu = spec.messages().ok_or_else(|| unsupported("it has no messages"))?;
        Ok((kind, cpu))
    }
}

/// Which elements a job keeps, by the same rule as on the CPU.
fn selection(codec: &TopK, job: &DeviceJob<'_>) -> Selection {
    let (whole, len) = (job.place.whole, job.place.range.len());
    match codec.keep {
        _ if job.role == Role::Owner && codec.mode == OwnerMode::Union => Selection::All,
        Keep::Whole(share) => {
            Selection::Whole(farwire_codec::device::proportion(share.of(whole), len, whole))
        }
        Keep::PerChunk { keep, chunk } => Selection::PerChunk { keep, chunk },
    }
}

fn check_len(given: usize, need: usize) -> Result<(), DecodeError> {
    if given == need { Ok(()) } else { Err(DecodeError::Length { need, given }) }
}

fn copy_messages(out: &mut DeviceEncoded) -> Result<(), DeviceError> {
    let end = out.messages.last().map_or(0, |message| message.end);
    out.pinned.reserve(end)?;
    out.device.copy_to_host(&out.out, end, &mut out.pinned)
}

fn words_of(bytes: &[u8]) -> Vec<u64> {
    bytes.as_chunks::<8>().0.iter().map(|word| u64::from_le_bytes(*word)).collect()
}
