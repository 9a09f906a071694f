//! One rank's vectors on a card: the steps of an all-reduce, with nothing but messages on the bus.
//!
//! ```text
//!  card   gradient ┬─ encode ─┬ messages to others ─┐   ┌ theirs ─┬─ sum ─ encode ─┬ message ─┐
//!         residual ┘          └ to itself ──────────┼───┼─────────┘                └ decode   │
//!  ─────────────────────────────────────────────────┼───┼─────────────────────────────────────┼──
//!  host                                             ▼   │                                     ▼
//! ```
//!
//! All work runs in order on the device's stream. The coding thread sleeps until the bytes to send
//! are in pinned memory, and until the card has checked the messages from others. The result is
//! decoded into separate memory and written over the gradient at the very end, so a failed call
//! leaves the gradient unchanged; this takes 4 bytes per element. New residuals are written
//! separately, too.

use std::any::Any;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bytes::Bytes;
use farwire::{DType, Rank, Transaction, Vectors};
use farwire_codec::collective::{ChunkPlace, FactorVectors, MatrixPlace, StepError};
use farwire_codec::device::{power_basis, power_check, power_start};
use farwire_codec::{CodedPlace, DecodeError, EncodeError, Piece, ResidualElsewhere, Role, Shape};

use crate::codec::{DeviceCodec, DeviceEncoded, DeviceJob, DeviceResidual, Inbox};
use crate::driver::{Buffer, Device, DeviceTensor, Pooled, ValueType};
use crate::error::DeviceError;
use crate::kernels::{FinishKernel, Matrix, PowerKernels};

/// Memory that the steps of all operations on a device use in turn.
#[derive(Debug)]
pub(crate) struct Workspace {
    device: Arc<Device>,
    steps: Mutex<Steps>,
}

#[derive(Debug, Default)]
struct Steps {
    out: Option<DeviceEncoded>,
    /// By rank.
    inboxes: Vec<Inbox>,
    /// For messages that a rank sends to itself.
    spare: Vec<Inbox>,
}

impl Workspace {
    pub(crate) fn new(device: &Arc<Device>) -> Self {
        Self { device: device.clone(), steps: Mutex::default() }
    }

    fn lock(&self) -> MutexGuard<'_, Steps> {
        self.steps.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Steps {
    /// Where to encode to.
    fn out(&mut self, device: &Arc<Device>) -> Result<&mut DeviceEncoded, DeviceError> {
        if self.out.is_none() {
            self.out = Some(DeviceEncoded::new(device)?);
        }
        Ok(self.out.as_mut().expect("made just now"))
    }

    /// The inbox for messages from this rank.
    fn inbox(&mut self, device: &Arc<Device>, from: Rank) -> Result<&mut Inbox, DeviceError> {
        while self.inboxes.len() <= from.index() {
            self.inboxes.push(Inbox::new(device)?);
        }
        Ok(&mut self.inboxes[from.index()])
    }
}

/// One rank's part in an all-reduce of a tensor on a card.
#[derive(Debug)]
pub(crate) struct DeviceVectors {
    device: Arc<Device>,
    workspace: Arc<Workspace>,
    coder: Coder,
    finish: Arc<FinishKernel>,
    tensor: DeviceTensor,
    feedback: Option<Transaction>,
    /// By chunk.
    kept: Vec<Kept>,
    power: Option<PowerStep>,
    output: Option<Pooled<f32>>,
    divisor: f32,
}

/// What makes the bytes.
#[derive(Clone, Debug)]
pub(crate) enum Coder {
    Messages(Arc<DeviceCodec>),
    /// PowerSGD.
    Factors,
}

/// A PowerSGD operation in progress.
#[derive(Debug)]
struct PowerStep {
    kernels: PowerKernels,
    matrix: Pooled<f32>,
    p: Pooled<f32>,
    /// This rank's own.
    q: Pooled<f32>,
}

/// What a rank keeps of a chunk from one step to the next.
#[derive(Debug, Default)]
struct Kept {
    /// Its message to itself.
    own: Option<Inbox>,
    /// The sum of its shard.
    sum: Option<Pooled<f32>>,
}

impl DeviceVectors {
    /// From now on, the device's stream waits for the tensor's.
    pub(crate) fn new(
        workspace: &Arc<Workspace>,
        coder: Coder,
        finish: Arc<FinishKernel>,
        tensor: DeviceTensor,
    ) -> Result<Self, DeviceError> {
        workspace.device.follow(tensor.stream())?;
        Ok(Self {
            device: workspace.device.clone(),
            workspace: workspace.clone(),
            coder,
            finish,
            tensor,
            feedback: None,
            kept: Vec::new(),
            power: None,
            output: None,
            divisor: 1.0,
        })
    }

    /// The same, with error feedback.
    pub(crate) fn owing(mut self, feedback: Option<Transaction>) -> Self {
        self.feedback = feedback;
        self
    }

    fn codec(&self) -> Result<Arc<DeviceCodec>, DeviceError> {
        match &self.coder {
            Coder::Messages(codec) => Ok(codec.clone()),
            Coder::Factors => Err(DeviceError::Unsupported {
                codec: "powersgd".into(),
                why: "it has no messages",
            }),
        }
    }

    fn kept(&mut self, chunk: usize) -> &mut Kept {
        if self.kept.len() <= chunk {
            self.kept.resize_with(chunk + 1, Kept::default);
        }
        &mut self.kept[chunk]
    }

    fn try_encode(&mut self, chunk: &ChunkPlace<'_>) -> Result<Vec<Bytes>, DeviceError> {
        if self.output.is_none() {
            self.output = Some(self.device.pooled(self.tensor.len())?);
        }
        let (range, me) = (chunk.range.clone(), chunk.rank.index());
        let piece = self.feedback.as_ref().and_then(|owed| owed.worker_piece(range.clone()));
        let owed = piece.map(|piece| OwedOnCard::new(&self.device, &piece)).transpose()?;
        let workspace = self.workspace.clone();
        let mut steps = workspace.lock();
        let mut own = steps.spare.pop().map_or_else(|| Inbox::new(&self.device), Ok)?;
        let out = steps.out(&self.device)?;
        let job = DeviceJob {
            values: self.tensor.values(range.clone()),
            residual: residual(self.feedback.is_some(), owed.as_ref()),
            place: chunk.whole(),
            role: Role::Worker,
            rank: chunk.rank.0,
            shards: &chunk.local_shards(),
        };
        let (parcels, left) = self.encode_job(&job, out, Some(me))?;
        own.copy_on_card(out, me)?;
        self.kept(chunk.index).own = Some(own);
        if let (Some(feedback), Some(left)) = (&mut self.feedback, left) {
            feedback.set_worker(range.start, left);
        }
        Ok(parcels)
    }

    /// Parcels, and the new residual if there is error feedback.
    fn encode_job(
        &self,
        job: &DeviceJob<'_>,
        out: &mut DeviceEncoded,
        own: Option<usize>,
    ) -> Result<(Vec<Bytes>, Option<Piece>), DeviceError> {
        let len = job.values.len();
        let mut left = match job.residual {
            DeviceResidual::Off => None,
            DeviceResidual::Zero | DeviceResidual::Owed(_) => Some(self.device.pooled(len)?),
        };
        let codec = self.codec()?;
        // The encoder writes to the new residual, and gets its own buffer back in any case.
        left.iter_mut().for_each(|left| out.swap_residual(left));
        let started = codec.start_encode(job, out);
        let parcels = started.and_then(|()| codec.finish_parcels(out, own));
        left.iter_mut().for_each(|left| out.swap_residual(left));
        let piece = |left| Piece::Elsewhere(Arc::new(DevicePiece { left, len, warm: None }));
        parcels.map(|parcels| (parcels, left.map(piece)))
    }

    fn try_sum(&mut self, chunk: &ChunkPlace<'_>, messages: &[&[u8]]) -> Result<(), StepError> {
        let place = chunk.shard(chunk.rank);
        let mut acc = self.device.pooled::<f32>(place.range.len()).map_err(failed)?;
        let mut own = self.kept(chunk.index).own.take().ok_or_else(out_of_order)?;
        let codec = self.codec().map_err(failed)?;
        let workspace = self.workspace.clone();
        let mut steps = workspace.lock();
        for from in chunk.world.ranks() {
            let (part, fresh) = ((&mut *acc).into(), from.index() == 0);
            if from == chunk.rank {
                codec.start_decode_uploaded(&mut own, &place, part, fresh).map_err(failed)?;
                continue;
            }
            let inbox = steps.inbox(&self.device, from).map_err(failed)?;
            let started = inbox
                .copy_from(messages[from.index()])
                .and_then(|()| codec.start_decode(inbox, &place, part, fresh))
                .and_then(|()| codec.start_check(inbox));
            started.map_err(|error| refused(from, error))?;
        }
        steps.spare.push(own);
        self.check(chunk, &mut steps, |_| place.clone())?;
        self.kept(chunk.index).sum = Some(acc);
        Ok(())
    }

    /// Waits for the card, and returns an error if a message from another rank was bad.
    fn check(
        &self,
        chunk: &ChunkPlace<'_>,
        steps: &mut Steps,
        place: impl Fn(Rank) -> CodedPlace,
    ) -> Result<(), StepError> {
        self.device.wait().map_err(failed)?;
        for from in chunk.world.others(chunk.rank) {
            let inbox = steps.inbox(&self.device, from).map_err(failed)?;
            let checked = self.codec().and_then(|codec| codec.finish_check(inbox, &place(from)));
            checked.map_err(|error| refused(from, error))?;
        }
        Ok(())
    }

    fn try_encode_sum(&mut self, chunk: &ChunkPlace<'_>) -> Result<Bytes, StepError> {
        let shard = chunk.shards[chunk.rank.index()].clone();
        let place = chunk.shard(chunk.rank);
        let sum = self.kept(chunk.index).sum.take().ok_or_else(out_of_order)?;
        let piece = self.feedback.as_ref().and_then(|owed| owed.owner_piece(shard.clone()));
        let owed = piece.map(|piece| OwedOnCard::new(&self.device, &piece)).transpose();
        let owed = owed.map_err(failed)?;
        let workspace = self.workspace.clone();
        let mut steps = workspace.lock();
        let own = steps.spare.pop().map_or_else(|| Inbox::new(&self.device), Ok);
        let mut own = own.map_err(failed)?;
        let out = steps.out(&self.device).map_err(failed)?;
        let job = DeviceJob {
            values: sum.front(shard.len()),
            residual: residual(self.feedback.is_some(), owed.as_ref()),
            place: place.clone(),
            role: Role::Owner,
            rank: chunk.rank.0,
            shards: std::slice::from_ref(&place.range),
        };
        let (mut parcels, left) = self.encode_job(&job, out, None).map_err(failed)?;
        let codec = self.codec().map_err(failed)?;
        // Everybody decodes this message; this rank does it right away.
        own.copy_on_card(out, 0).map_err(failed)?;
        let output = self.output.as_mut().ok_or_else(out_of_order)?.part_mut(shard.clone());
        codec.start_decode_uploaded(&mut own, &place, output, true).map_err(failed)?;
        steps.spare.push(own);
        if let (Some(feedback), Some(left)) = (&mut self.feedback, left) {
            feedback.set_owner(shard.start, left);
        }
        Ok(parcels.swap_remove(0))
    }

    fn try_decode(&mut self, chunk: &ChunkPlace<'_>, messages: &[&[u8]]) -> Result<(), StepError> {
        if chunk.mean && chunk.world.get() > 1 {
            self.divisor = chunk.world.get() as f32;
        }
        let codec = self.codec().map_err(failed)?;
        let workspace = self.workspace.clone();
        let mut steps = workspace.lock();
        for from in chunk.world.others(chunk.rank) {
            let output = self.output.as_mut().ok_or_else(out_of_order)?;
            let part = output.part_mut(chunk.shards[from.index()].clone());
            let inbox = steps.inbox(&self.device, from).map_err(failed)?;
            let started = inbox
                .copy_from(messages[from.index()])
                .and_then(|()| codec.start_decode(inbox, &chunk.shard(from), part, true))
                .and_then(|()| codec.start_check(inbox));
            started.map_err(|error| refused(from, error))?;
        }
        self.check(chunk, &mut steps, |from| chunk.shard(from))
    }
}

impl Vectors for DeviceVectors {
    fn len(&self) -> usize {
        self.tensor.len()
    }

    fn dtype(&self) -> DType {
        dtype(self.tensor.value_type())
    }

    fn feedback_mut(&mut self) -> Option<&mut Transaction> {
        self.feedback.as_mut()
    }

    fn encode(&mut self, chunk: &ChunkPlace<'_>) -> Result<Vec<Bytes>, StepError> {
        self.try_encode(chunk).map_err(failed)
    }

    fn sum(&mut self, chunk: &ChunkPlace<'_>, messages: &[&[u8]]) -> Result<(), StepError> {
        self.try_sum(chunk, messages)
    }

    fn encode_sum(&mut self, chunk: &ChunkPlace<'_>) -> Result<Bytes, StepError> {
        self.try_encode_sum(chunk)
    }

    fn decode(&mut self, chunk: &ChunkPlace<'_>, messages: &[&[u8]]) -> Result<(), StepError> {
        self.try_decode(chunk, messages)
    }

    fn factors(&mut self) -> Option<&mut dyn FactorVectors> {
        matches!(self.coder, Coder::Factors).then_some(self as &mut dyn FactorVectors)
    }

    fn finish(mut self: Box<Self>) -> Result<(), String> {
        let text = |error: DeviceError| error.to_string();
        if let Some(output) = self.output.take() {
            self.finish.write(&output, self.divisor, &mut self.tensor).map_err(text)?;
        }
        if let Some(feedback) = self.feedback.take() {
            feedback.commit();
        }
        self.device.lead(self.tensor.stream()).map_err(text)
    }

    fn abandon(self: Box<Self>) -> Box<dyn Any + Send> {
        // Work that the tensor's owner does next must run after the work put on the card here. If
        // this fails, the card is lost.
        let _ = self.device.lead(self.tensor.stream());
        Box::new(self.tensor)
    }
}

impl DeviceVectors {
    fn try_begin(&mut self, place: &MatrixPlace) -> Result<Vec<f32>, DeviceError> {
        let (device, rank, len) = (&self.device, place.rank(), self.tensor.len());
        let Shape { rows, columns } = place.shape;
        let owed = self.feedback.as_ref().and_then(|owed| owed.worker_piece(0..len));
        let owed = owed.map(|piece| OwedOnCard::new(device, &piece)).transpose()?;
        let warm = self.feedback.as_ref().and_then(|owed| owed.warm());
        let start = power_start(place.codec, warm, place.shape, place.context);
        if rank == 0 {
            return Ok(Vec::new());
        }
        let kernels = PowerKernels::new(device, rank, self.tensor.value_type())?;
        let mut step = PowerStep {
            kernels,
            matrix: device.pooled(len)?,
            p: device.pooled(rows * rank)?,
            q: device.pooled(columns * rank)?,
        };
        self.output = Some(device.pooled(len)?);
        let mut header = device.pooled::<u64>(1)?;
        header.fill_bytes(0..1, 0xff)?;
        match owed.as_ref().and_then(OwedOnCard::warm) {
            Some(there) if warm == Some(&start) => {
                device.copy_on_card(there, 0..start.len(), &mut step.q)?;
            }
            _ => step.q.upload(&start)?,
        }
        let (kernels, mut matrix) = step.parts(place.shape);
        let owed = owed.as_ref().map(OwedOnCard::buffer);
        kernels.begin(self.tensor.values(0..len), owed, &mut matrix, &mut header)?;
        let bad = header.download_front(1)?[0];
        if bad != u64::MAX {
            return Err(EncodeError::NotFinite { index: bad as usize }.into());
        }
        let p = step.p.download_front(rows * rank)?;
        power_check(&p)?;
        self.power = Some(step);
        Ok(p)
    }

    fn try_with_p(&mut self, place: &MatrixPlace, sum: Vec<f32>) -> Result<Vec<f32>, DeviceError> {
        let basis = power_basis(sum, place.rank())?;
        let Some(step) = &mut self.power else { return Ok(Vec::new()) };
        step.p.upload(&basis)?;
        let Shape { rows, columns } = place.shape;
        let (kernels, mut matrix) = step.parts(place.shape);
        let mut bands = self.device.pooled(kernels.bands_len(rows, columns))?;
        kernels.go_on(&mut matrix, &mut bands, self.tensor.len())?;
        let q = step.q.download_front(columns * place.rank())?;
        power_check(&q)?;
        Ok(q)
    }

    fn try_with_q(&mut self, place: &MatrixPlace, sum: Vec<f32>) -> Result<(), DeviceError> {
        power_check(&sum)?;
        if place.mean && place.world.get() > 1 {
            self.divisor = place.world.get() as f32;
        }
        let (Some(mut step), Some(output)) = (self.power.take(), &mut self.output) else {
            self.feedback.iter_mut().for_each(|feedback| feedback.set_warm(Vec::new()));
            return Ok(());
        };
        let mut summed = self.device.pooled(sum.len())?;
        summed.upload(&sum)?;
        // From now on the sum takes the place of this rank's own Q.
        std::mem::swap(&mut step.q, &mut summed);
        let (own, len) = (summed, self.tensor.len());
        let (kernels, mut matrix) = step.parts(place.shape);
        kernels.end(&mut matrix, &own, output, len)?;
        if let Some(feedback) = &mut self.feedback {
            let left = DevicePiece { left: step.matrix, len, warm: Some(step.q) };
            feedback.set_worker(0, Piece::Elsewhere(Arc::new(left)));
            feedback.set_warm(sum);
        }
        Ok(())
    }
}

impl PowerStep {
    fn parts(&mut self, Shape { rows, columns }: Shape) -> (&PowerKernels, Matrix<'_>) {
        let Self { kernels, matrix, p, q } = self;
        (kernels, Matrix { rows, columns, elements: matrix, p, q })
    }
}

/// Factors are small, so they are copied to and from the card with blocking copies.
impl FactorVectors for DeviceVectors {
    fn begin(&mut self, matrix: &MatrixPlace) -> Result<Vec<f32>, StepError> {
        self.try_begin(matrix).map_err(failed)
    }

    fn with_p(&mut self, matrix: &MatrixPlace, sum: Vec<f32>) -> Result<Vec<f32>, StepError> {
        self.try_with_p(matrix, sum).map_err(failed)
    }

    fn with_q(&mut self, matrix: &MatrixPlace, sum: Vec<f32>) -> Result<(), StepError> {
        self.try_with_q(matrix, sum).map_err(failed)
    }
}

/// The element type, as the protocol names it.
pub(crate) fn dtype(type_: ValueType) -> DType {
    match type_ {
        ValueType::F32 => DType::F32,
        ValueType::F16 => DType::F16,
        ValueType::Bf16 => DType::Bf16,
    }
}

/// What is owed for a run of elements, on a card.
#[derive(Debug)]
struct DevicePiece {
    left: Pooled<f32>,
    len: usize,
    /// The matrix that PowerSGD starts from next, committed together with the residual.
    warm: Option<Pooled<f32>>,
}

impl ResidualElsewhere for DevicePiece {
    fn len(&self) -> usize {
        self.len
    }

    fn fetch(&self) -> Vec<f32> {
        self.left.download_front(self.len).unwrap_or_else(|_| vec![f32::NAN; self.len])
    }
}

/// A residual that an encoder of this device can read.
enum OwedOnCard {
    Here(Arc<DevicePiece>),
    Brought(Pooled<f32>),
}

impl OwedOnCard {
    fn new(device: &Arc<Device>, piece: &Piece) -> Result<Self, DeviceError> {
        if let Piece::Elsewhere(piece) = piece {
            let piece: Arc<dyn Any + Send + Sync> = piece.clone();
            if let Ok(piece) = piece.downcast::<DevicePiece>()
                && piece.left.is_of(device)
            {
                return Ok(Self::Here(piece));
            }
        }
        // From a checkpoint, from a call in host memory, or cut in another way.
        let values = piece.values();
        let mut brought = device.pooled(values.len())?;
        brought.upload(&values)?;
        Ok(Self::Brought(brought))
    }

    fn warm(&self) -> Option<&Buffer<f32>> {
        match self {
            Self::Here(piece) => piece.warm.as_deref(),
            Self::Brought(_) => None,
        }
    }

    fn buffer(&self) -> &Buffer<f32> {
        match self {
            Self::Here(piece) => &piece.left,
            Self::Brought(owed) => owed,
        }
    }
}

fn residual(keeps: bool, owed: Option<&OwedOnCard>) -> DeviceResidual<'_> {
    match (keeps, owed) {
        (false, _) => DeviceResidual::Off,
        (true, None) => DeviceResidual::Zero,
        (true, Some(owed)) => DeviceResidual::Owed(owed.buffer()),
    }
}

fn failed(error: DeviceError) -> StepError {
    match error {
        DeviceError::Encode(error) => error.into(),
        other => StepError::Device(other.to_string()),
    }
}

fn refused(from: Rank, error: DeviceError) -> StepError {
    match error {
        DeviceError::Decode(why) => StepError::Decode { from, why },
        // No message is that long, so the sender is at fault.
        DeviceError::Encode(_) => StepError::Decode { from, why: DecodeError::Field("length") },
        other => StepError::Device(other.to_string()),
    }
}

/// A step was called without the one before it: a bug.
fn out_of_order() -> StepError {
    StepError::Device("a step was left out".into())
}
