//! Saving a run, and going on from it.
//!
//! A checkpoint is a directory `step-00000100` with the whole model (`model.safetensors`), the optimizer's moments (`optimizer.safetensors`) and the job's settings
//! (`job.json`), the codecs that were chosen by measuring, and what error feedback owes on each rank (`residuals.rank0.safetensors`, …). It holds whole tensors, so a run can go on in another layout; in the same layout it goes on bit for bit. It appears under its name
//! only when it is complete. Only rank 0 writes and reads: no file system has to be shared.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::path::{Path, PathBuf};

use candle_core::{Device, Tensor};
use farwire::{CodecChoice, CodecPolicy, Communicator};
use serde::{Deserialize, Serialize};

use crate::error::TrainError;
use crate::trainer::{Settings, Trainer, text};

/// What is known of a checkpoint beside its tensors.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Checkpoint {
    /// Steps done.
    pub step: usize,
    /// The job's settings.
    pub settings: Settings,
    /// Which codecs were chosen, where the settings leave that to measuring.
    #[serde(default, with = "text")]
    pub codec: CodecPolicy,
    /// Whatever else the job wants to keep.
    pub notes: serde_json::Value,
}

/// Checkpoints that are kept; older ones are removed.
const KEPT: usize = 2;

impl Trainer {
    /// Writes a checkpoint into `dir`, and removes all but the newest. All ranks must call it; rank 0 of the world writes.
    pub fn save(&self, dir: &Path, notes: serde_json::Value) -> Result<(), TrainError> {
        let (weights, moments) = (self.gathered_weights()?, self.gathered_moments()?);
        let residuals = self.gathered_residuals()?;
        let mut result = Ok(());
        if let (Some(weights), Some(moments), Some(residuals)) = (weights, moments, residuals) {
            let (settings, codec) = (self.settings().clone(), self.codec().clone());
            let about = Checkpoint { step: self.steps_done(), settings, codec, notes };
            result = write(dir, &about, &weights, &moments, &residuals);
        }
        // Nobody goes on before it is there; and if it could not be written, rank 0 says why.
        self.mesh().world().barrier().wait()?;
        result
    }

    /// Goes on from the newest checkpoint in `dir`, on which rank 0 of the world looks. All ranks must call it, and all get what was saved beside the tensors.
    pub fn resume(&mut self, dir: &Path) -> Result<Checkpoint, TrainError> {
        let found = if self.mesh().world().rank() == 0 { Some(read(dir, self.settings())) } else { None };
        // Everyone learns what it is, or that there is none.
        let text = match &found {
            Some(Ok((about, _))) => {
                Some(serde_json::to_vec(about).map_err(|error| bad(dir, error.to_string()))?)
            }
            Some(Err(_)) => Some(Vec::new()),
            None => None,
        };
        let text = broadcast_bytes(self.mesh().world(), text)?;
        let (tensors, residuals) = match found {
            Some(result) => {
                let (_, Saved { tensors, residuals }) = result?;
                (Some(tensors), Some(residuals))
            }
            None if text.is_empty() => return Err(bad(dir, "rank 0 could not read it".to_owned())),
            None => (None, None),
        };
        let about: Checkpoint = serde_json::from_slice(&text).map_err(|error| bad(dir, error.to_string()))?;
        self.restore(about.step, tensors)?;
        // What is owed is owed through the same codecs, and a run that goes on must not depend on today's network.
        let is_known = self.settings().layout() == about.settings.layout()
            && !matches!(about.settings.codec, CodecChoice::Given(_));
        self.restore_codec(&about.settings, is_known.then(|| about.codec.clone()));
        self.restore_residuals(residuals)?;
        Ok(about)
    }

    /// Starts from a safetensors file of whole weights, which rank 0 of the world reads. All ranks must call it.
    pub fn load_weights(&mut self, path: &Path) -> Result<(), TrainError> {
        let found = if self.mesh().world().rank() == 0 {
            Some(
                candle_core::safetensors::load(path, &Device::Cpu)
                    .map(|tensors| tensors.into_iter().collect()),
            )
        } else {
            None
        };
        let good = found.as_ref().map(|found| vec![u8::from(found.is_ok())]);
        let good = self.mesh().world().broadcast(good, 1, 0).wait()?;
        match found {
            Some(result) => {
                let tensors = result.map_err(|error| bad(path, error.to_string()))?;
                self.restore(0, Some(tensors))
            }
            None if good == [1] => self.restore(0, None),
            None => Err(bad(path, "rank 0 could not read it".to_owned())),
        }
    }
}

fn write(
    dir: &Path,
    about: &Checkpoint,
    weights: &BTreeMap<String, Tensor>,
    moments: &BTreeMap<String, Tensor>,
    residuals: &[Vec<u8>],
) -> Result<(), TrainError> {
    let io = |path: &Path| {
        let path = path.display().to_string();
        move |error| TrainError::Checkpoint { path, error }
    };
    fs::create_dir_all(dir).map_err(io(dir))?;
    let name = format!("step-{:08}", about.step);
    let (draft, place) = (dir.join(format!(".{name}.tmp")), dir.join(&name));
    let _ = fs::remove_dir_all(&draft); // of a run that was killed
    fs::create_dir(&draft).map_err(io(&draft))?;
    for (file, tensors) in [("model.safetensors", weights), ("optimizer.safetensors", moments)] {
        let tensors = tensors.iter().map(|(name, tensor)| (name.clone(), tensor.clone())).collect();
        let path = draft.join(file);
        candle_core::safetensors::save(&tensors, &path)?;
        File::open(&path).and_then(|file| file.sync_all()).map_err(io(&path))?;
    }
    for (rank, bytes) in residuals.iter().enumerate() {
        let path = draft.join(residuals_of(rank));
        fs::write(&path, bytes).map_err(io(&path))?;
    }
    let path = draft.join("job.json");
    let text = serde_json::to_vec_pretty(about).map_err(|error| bad(&path, error.to_string()))?;
    fs::write(&path, text).map_err(io(&path))?;
    if place.exists() {
        fs::remove_dir_all(&place).map_err(io(&place))?;
    }
    fs::rename(&draft, &place).map_err(io(&place))?;
    let steps = steps_in(dir);
    for old in &steps[..steps.len().saturating_sub(KEPT)] {
        fs::remove_dir_all(old).map_err(io(old))?;
    }
    Ok(())
}

/// What error feedback owes on a rank.
fn residuals_of(rank: usize) -> String {
    format!("residuals.rank{rank}.safetensors")
}

/// What a checkpoint holds.
struct Saved {
    tensors: BTreeMap<String, Tensor>,
    /// By rank; empty if the run goes on in another layout.
    residuals: Vec<Vec<u8>>,
}

fn read(dir: &Path, settings: &Settings) -> Result<(Checkpoint, Saved), TrainError> {
    let newest = steps_in(dir).pop();
    let newest =
        newest.ok_or_else(|| bad(dir, "there is no checkpoint here; start without resuming".to_owned()))?;
    let path = newest.join("job.json");
    let text = fs::read(&path)
        .map_err(|error| TrainError::Checkpoint { path: path.display().to_string(), error })?;
    let about: Checkpoint = serde_json::from_slice(&text).map_err(|error| bad(&path, error.to_string()))?;
    settings.continues(&about.settings).map_err(|what| bad(&newest, what))?;
    let mut tensors = BTreeMap::new();
    for file in ["model.safetensors", "optimizer.safetensors"] {
        let path = newest.join(file);
        let found = candle_core::safetensors::load(&path, &Device::Cpu);
        tensors.extend(found.map_err(|error| bad(&path, error.to_string()))?);
    }
    let mut residuals = vec![Vec::new(); settings.ranks()];
    // What was owed belongs to ranks: in another layout it is left behind.
    if settings.layout() == about.settings.layout() {
        for (rank, residuals) in residuals.iter_mut().enumerate() {
            let path = newest.join(residuals_of(rank));
            *residuals = fs::read(&path)
                .map_err(|error| TrainError::Checkpoint { path: path.display().to_string(), error })?;
        }
    }
    Ok((about, Saved { tensors, residuals }))
}

/// The complete checkpoints, oldest first.
fn steps_in(dir: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(dir).into_iter().flatten().flatten();
    let named = |path: &PathBuf| {
        let name = path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
        name.strip_prefix("step-").is_some_and(|digits| digits.parse::<u64>().is_ok())
    };
    let mut steps: Vec<PathBuf> = entries.map(|entry| entry.path()).filter(named).collect();
    steps.sort_unstable();
    steps
}

fn bad(path: &Path, what: String) -> TrainError {
    TrainError::BadCheckpoint { path: path.display().to_string(), what }
}

/// Names and shapes of tensors, which travel before them.
type Header = Vec<(String, Vec<usize>)>;

fn header(tensors: &BTreeMap<String, Tensor>) -> Result<Vec<u8>, TrainError> {
    let header: Header =
        tensors.iter().map(|(name, tensor)| (name.clone(), tensor.dims().to_vec())).collect();
    serde_json::to_vec(&header).map_err(|error| TrainError::Settings(error.to_string()))
}

fn parse(header: &[u8]) -> Result<Header, TrainError> {
    serde_json::from_slice(header).map_err(|error| TrainError::Settings(error.to_string()))
}

/// Sends named tensors to a rank that [`receive_tensors`].
pub(crate) fn send_tensors(
    comm: &Communicator,
    to: usize,
    tensors: &BTreeMap<String, Tensor>,
) -> Result<(), TrainError> {
    let header = header(tensors)?;
    comm.send(vec![header.len() as u64], to, TAG).wait()?;
    comm.send(header, to, TAG).wait()?;
    for tensor in tensors.values() {
        comm.send(tensor.flatten_all()?.to_vec1::<f32>()?, to, TAG).wait()?;
    }
    Ok(())
}

/// Apart from the tags of a pipeline's micro-batches.
const TAG: u32 = u32::MAX;

pub(crate) fn receive_tensors(
    comm: &Communicator,
    from: usize,
) -> Result<BTreeMap<String, Tensor>, TrainError> {
    let length = comm.recv::<u64>(1, from, TAG).wait()?[0];
    let header = parse(&comm.recv::<u8>(length as usize, from, TAG).wait()?)?;
    let tensors = header.into_iter().map(|(name, shape)| {
        let data = comm.recv::<f32>(shape.iter().product(), from, TAG).wait()?;
        Ok((name, Tensor::from_vec(data, shape, &Device::Cpu)?))
    });
    tensors.collect()
}

/// Gives each of rank 0's tensors to every rank, one at a time.
pub(crate) fn broadcast_tensors(
    comm: &Communicator,
    tensors: Option<BTreeMap<String, Tensor>>,
    take: &mut dyn FnMut(&str, &Tensor) -> Result<(), TrainError>,
) -> Result<(), TrainError> {
    let tensors = tensors.unwrap_or_default();
    let header = broadcast_bytes(comm, if comm.rank() == 0 { Some(header(&tensors)?) } else { None })?;
    for (name, shape) in parse(&header)? {
        let mine = match tensors.get(&name) {
            Some(tensor) => Some(tensor.flatten_all()?.to_vec1::<f32>()?),
            None => None,
        };
        let data = comm.broadcast(mine, shape.iter().product(), 0).wait()?;
        take(&name, &Tensor::from_vec(data, shape, &Device::Cpu)?)?;
    }
    Ok(())
}

/// Every rank's bytes: on rank 0, by rank; none elsewhere.
pub(crate) fn gather_bytes(comm: &Communicator, mine: Vec<u8>) -> Result<Option<Vec<Vec<u8>>>, TrainError> {
    if comm.rank() > 0 {
        comm.send(vec![mine.len() as u64], 0, TAG).wait()?;
        comm.send(mine, 0, TAG).wait()?;
        return Ok(None);
    }
    let mut all = vec![mine];
    for from in 1..comm.size() {
        let length = comm.recv::<u64>(1, from, TAG).wait()?[0];
        all.push(comm.recv::<u8>(length as usize, from, TAG).wait()?);
    }
    Ok(Some(all))
}

/// Gives each rank its own of the bytes that rank 0 has, by rank.
pub(crate) fn scatter_bytes(comm: &Communicator, all: Option<Vec<Vec<u8>>>) -> Result<Vec<u8>, TrainError> {
    if comm.rank() > 0 {
        let length = comm.recv::<u64>(1, 0, TAG).wait()?[0];
        return Ok(comm.recv::<u8>(length as usize, 0, TAG).wait()?);
    }
    let mut all = all.unwrap_or_else(|| vec![Vec::new(); comm.size()]).into_iter();
    let mine = all.next().unwrap_or_default();
    for (to, bytes) in (1..).zip(all) {
        comm.send(vec![bytes.len() as u64], to, TAG).wait()?;
        comm.send(bytes, to, TAG).wait()?;
    }
    Ok(mine)
}

fn broadcast_bytes(comm: &Communicator, bytes: Option<Vec<u8>>) -> Result<Vec<u8>, TrainError> {
    let length = bytes.as_ref().map(|bytes| vec![bytes.len() as u64]);
    let length = comm.broadcast(length, 1, 0).wait()?[0] as usize;
    Ok(comm.broadcast(bytes, length, 0).wait()?)
}
