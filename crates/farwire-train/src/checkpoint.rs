//! Saving a run, and resuming it.
//!
//! A checkpoint is a folder:
//!
//! ```text
//!  step-00000100/
//!    model.safetensors             the whole model
//!    optimizer.safetensors         the optimizer's moments
//!    residuals.rank0.safetensors   what error feedback owes on each rank
//!    job.json                      settings, codecs that were chosen by measuring, notes
//!    SHA256SUMS                    a hash of each of these; `sha256sum -c` reads it
//! ```
//!
//! It holds whole tensors, so a run can be resumed in another layout; in the same layout it
//! continues bit for bit. Only rank 0 writes and reads, so no file system has to be shared.
//!
//! A checkpoint appears under its name only once all of it is on disk: files are written to a
//! hidden folder beside it and synced, then the folder is renamed, and the name synced. Later
//! damage shows in the hashes, and a run resumes from the newest checkpoint that is whole.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};

use aws_lc_rs::digest::{self, SHA256};
use farwire::{CodecChoice, CodecPolicy};
use serde::{Deserialize, Serialize};

use crate::carry::{self, Shapes};
use crate::error::TrainError;
use crate::param::{Array, Arrays, read_safetensors, write_safetensors};
use crate::settings::Settings;
use crate::text;
use crate::trainer::Trainer;

/// What a checkpoint says besides its tensors.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Checkpoint {
    /// Steps done.
    pub step: usize,
    /// How many of these were skipped because something was not finite.
    pub skipped: usize,
    /// The job's settings.
    pub settings: Settings,
    /// The SHA-256 of the training text.
    pub data: String,
    /// How many sequences were learned from. If absent, those of all steps, which is right unless
    /// ranks came and went.
    #[serde(default)]
    pub seen: Option<u64>,
    /// The codecs that were chosen, where the settings leave the choice to measuring.
    #[serde(with = "text")]
    pub codec: CodecPolicy,
    /// Whatever else the job wants to keep.
    pub notes: serde_json::Value,
    /// Newer checkpoints beside this one that were passed over, and what is wrong with each, such
    /// as `step-00000020 is damaged: job.json is empty`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub damaged: Vec<String>,
}

impl Checkpoint {
    /// Its folder's name.
    pub fn name(&self) -> String {
        folder_name(self.step)
    }
}

/// How many checkpoints are kept; older ones are removed.
const KEPT: usize = 2;

const MODEL: &str = "model.safetensors";
const OPTIMIZER: &str = "optimizer.safetensors";
const JOB: &str = "job.json";
const SUMS: &str = "SHA256SUMS";

/// Prefixes of a parameter's name, in the names of its moments.
pub(crate) const FIRST: &str = "first";
pub(crate) const SECOND: &str = "second";

impl Trainer {
    /// Finds out before a run, rather than hours into it, whether checkpoints can be kept in `dir`:
    /// it must be possible to write there, and there must be no checkpoints yet. (Those of another
    /// run would be taken for newer ones, and this run's own removed as old.) All ranks must call
    /// this; rank 0 of the world looks.
    pub fn prepare_checkpoints(&self, dir: &Path) -> Result<(), TrainError> {
        let prepare = || {
            match steps_in(dir)?.pop() {
            Some((_, folder)) => Err(bad(
                &folder,
                "is a checkpoint of an earlier run; resume it, or keep checkpoints in another folder"
                    .to_owned(),
            )),
            None => {
                create_folder(dir).map_err(io(dir))?;
                let probe = dir.join(".step-probe.tmp");
                let _ = remove(&probe); // left by a run that was killed
                fs::create_dir(&probe).and_then(|()| fs::remove_dir(&probe)).map_err(io(dir))
            }
        }
        };
        let result = if self.mesh().world().rank() == 0 { prepare() } else { Ok(()) };
        carry::tell(self.mesh().world(), result)
    }

    /// Writes a checkpoint into `dir`, and removes all but the two newest. All ranks must call
    /// this; rank 0 of the world writes. If that fails, all ranks get an error, and the checkpoints
    /// that were there are still there.
    pub fn save(&mut self, dir: &Path, notes: serde_json::Value) -> Result<(), TrainError> {
        let (weights, moments) = (self.gathered_weights()?, self.gathered_moments()?);
        let residuals = self.gathered_residuals()?;
        let mut result = Ok(());
        if let (Some(weights), Some(moments), Some(residuals)) = (weights, moments, residuals) {
            let about = Checkpoint {
                step: self.steps_done(),
                skipped: self.steps_skipped(),
                settings: self.asked_settings(),
                data: self.batches().sha256().to_owned(),
                seen: Some(self.sequences_seen()),
                codec: self.codec().clone(),
                notes,
                damaged: Vec::new(),
            };
            result = write(dir, &about, &weights, &moments, &residuals, self.damaged_mut());
        }
        if result.is_ok() {
            self.damaged_mut().clear();
        }
        // No rank goes on before the checkpoint is there, or is known to have failed.
        carry::tell(self.mesh().world(), result)
    }

    /// Resumes from the newest checkpoint in `dir` that is whole; rank 0 of the world chooses and
    /// reads it. All ranks must call this. All get what was saved besides the tensors, and [why
    /// newer checkpoints were passed over](Checkpoint::damaged).
    ///
    /// A checkpoint of another model, seed or text, or with other settings that change the result,
    /// is an error on all ranks and changes nothing.
    pub fn resume(&mut self, dir: &Path) -> Result<Checkpoint, TrainError> {
        let found = match self.gathered_shapes()? {
            Some(model) => self.read_newest(dir, &model).map(Some),
            None => Ok(None),
        };
        let world = self.mesh().world();
        let found = carry::tell(world, found)?;
        let json = |error: serde_json::Error| bad(dir, error.to_string());
        let about =
            found.as_ref().map(|(about, _)| serde_json::to_vec(about)).transpose().map_err(json)?;
        let about = carry::broadcast_bytes(world, about)?;
        let about: Checkpoint = serde_json::from_slice(&about).map_err(json)?;
        let (tensors, residuals) = found.map(|(_, saved)| (saved.tensors, saved.residuals)).unzip();
        self.restore(about.step, about.skipped, tensors)?;
        if let Some(seen) = about.seen {
            self.set_sequences_seen(seen);
        }
        // Residuals belong to the codecs that left them, and a resumed run must not depend on
        // today's network.
        let is_known = self.settings().layout() == about.settings.layout()
            && !matches!(about.settings.codec, CodecChoice::Given(_));
        self.restore_codec(&about.settings, is_known.then(|| about.codec.clone()))?;
        self.restore_residuals(residuals)?;
        Ok(about)
    }

    /// Reads the newest checkpoint that is whole, if it belongs to this run.
    fn read_newest(
        &mut self,
        dir: &Path,
        model: &Shapes,
    ) -> Result<(Checkpoint, Saved), TrainError> {
        let mut damaged = Vec::new();
        for (_, folder) in steps_in(dir)?.into_iter().rev() {
            let name = folder.file_name().unwrap_or_default().to_string_lossy().into_owned();
            match read(&folder) {
                Err(why) => damaged.push((folder, format!("{name} is damaged: {why}"))),
                Ok((mut about, mut saved)) => {
                    let continues = self.asked_settings().continues(&about.settings);
                    continues
                        .and_then(|()| same_data(self.batches().sha256(), &about.data))
                        .and_then(|()| same_model(&saved.tensors, model))
                        .map_err(|what| bad(&folder, what))?;
                    // Residuals belong to ranks: in another layout they are left behind.
                    if self.settings().layout() != about.settings.layout() {
                        saved.residuals = vec![Vec::new(); self.settings().ranks()];
                    }
                    (*self.damaged_mut(), about.damaged) = damaged.into_iter().unzip();
                    return Ok((about, saved));
                }
            }
        }
        let whys: Vec<String> = damaged.into_iter().map(|(_, why)| why).collect();
        let what = match &whys[..] {
            [] => "there is no checkpoint here; start without resuming".to_owned(),
            whys => format!(
                "no checkpoint here is whole: {}; start anew in another folder",
                whys.join("; ")
            ),
        };
        Err(bad(dir, what))
    }

    /// Starts from a safetensors file of whole weights, which rank 0 of the world reads. All ranks
    /// must call this.
    pub fn load_weights(&mut self, path: &Path) -> Result<(), TrainError> {
        let mut weights = Ok(None);
        if let Some(model) = self.gathered_shapes()? {
            let read = || {
                // Anything that is not a file, such as a pipe, might never end.
                let is_file = fs::metadata(path).map_err(|error| error.to_string())?.is_file();
                is_file.then_some(()).ok_or("it is not a file")?;
                let bytes = fs::read(path).map_err(|error| error.to_string())?;
                let weights = read_safetensors(&bytes)?;
                let fits = has_all(&weights, &model);
                fits.map(|()| weights).map_err(|what| format!("{what}; give weights of this model"))
            };
            weights = read().map(Some).map_err(|error| bad(path, error));
        }
        let weights = carry::tell(self.mesh().world(), weights)?;
        self.restore(0, 0, weights)
    }
}

fn same_data(mine: &str, theirs: &str) -> Result<(), String> {
    if mine == theirs {
        return Ok(());
    }
    Err(format!(
        "it has learned from another text, of SHA-256 {theirs}, not {mine}; give the same (--data), or \
         start without resuming"
    ))
}

/// Checks that these are this model's tensors and no others, shapes included: a model of other
/// sizes has the same names.
fn same_model(tensors: &Arrays, model: &Shapes) -> Result<(), String> {
    let is_known = |key: &String| match key.split_once('.') {
        Some((FIRST | SECOND, name)) => model.contains_key(name),
        _ => model.contains_key(key),
    };
    let too_many = tensors.keys().find(|key| !is_known(key));
    let too_many = too_many.map(|key| format!("it has `{key}`, which the model does not have"));
    has_all(tensors, model)
        .and_then(|()| too_many.map_or(Ok(()), Err))
        .map_err(|what| format!("{what}; give the same model, or start without resuming"))
}

/// Checks that each of the model's parameters is there in its shape, and that any moments have that
/// shape too.
fn has_all(tensors: &Arrays, model: &Shapes) -> Result<(), String> {
    for (name, needed) in model {
        if !tensors.contains_key(name) {
            return Err(format!("it has no `{name}`, which the model has"));
        }
        for key in [name.clone(), format!("{FIRST}.{name}"), format!("{SECOND}.{name}")] {
            if let Some(Array { shape, .. }) = tensors.get(&key).filter(|it| it.shape != *needed) {
                return Err(format!("`{key}` is {shape:?}, but the model needs {needed:?}"));
            }
        }
    }
    Ok(())
}

fn write(
    dir: &Path,
    about: &Checkpoint,
    weights: &Arrays,
    moments: &Arrays,
    residuals: &[Vec<u8>],
    damaged: &[PathBuf],
) -> Result<(), TrainError> {
    // A good checkpoint must not give way to one that cannot be trained further.
    for (name, array) in weights.iter().chain(moments) {
        if array.data.iter().any(|x| !x.is_finite()) {
            let what = format!("`{name}` holds a NaN or an infinity after step {}", about.step);
            return Err(bad(dir, format!("{what}; no checkpoint is written, older ones are kept")));
        }
    }
    create_folder(dir).map_err(io(dir))?;
    // A file system without locks goes without.
    let turn = File::open(dir).map_err(io(dir))?;
    if let Err(fs::TryLockError::WouldBlock) = turn.try_lock() {
        let what = "another job is writing a checkpoint here; give each job a folder of its own";
        return Err(bad(dir, what.to_owned()));
    }
    for stale in drafts_in(dir)? {
        remove(&stale).map_err(io(&stale))?; // left by a run that was killed
    }
    let mut draft = Draft::new(dir, &about.name())?;
    for (file, arrays) in [(MODEL, weights), (OPTIMIZER, moments)] {
        draft
            .add(file, |path| write_safetensors(arrays, path).map_err(|error| bad(path, error)))?;
    }
    for (rank, bytes) in residuals.iter().enumerate() {
        draft.add(&residuals_of(rank), |path| fs::write(path, bytes).map_err(io(path)))?;
    }
    let text = serde_json::to_vec_pretty(about).map_err(|error| bad(dir, error.to_string()))?;
    draft.add(JOB, |path| fs::write(path, text).map_err(io(path)))?;
    let place = draft.finish()?;

    let steps = steps_in(dir)?.into_iter().map(|(_, folder)| folder);
    // Checkpoints of later steps belong to another run, unless they were found damaged.
    let (useless, mut kept): (Vec<_>, Vec<_>) =
        steps.partition(|folder| damaged.contains(folder) && *folder != place);
    kept.truncate(kept.iter().position(|folder| *folder == place).map_or(0, |at| at + 1));
    kept.truncate(kept.len().saturating_sub(KEPT));
    for old in useless.iter().chain(&kept) {
        remove(old).map_err(io(old))?;
    }
    Ok(())
}

/// A checkpoint being written, under a hidden name. Dropped unfinished, it is removed.
struct Draft {
    dir: PathBuf,
    path: PathBuf,
    place: PathBuf,
    /// A line per file: its hash and its name.
    sums: String,
    is_finished: bool,
}

impl Draft {
    fn new(dir: &Path, name: &str) -> Result<Self, TrainError> {
        let (path, place) = (dir.join(format!(".{name}.tmp")), dir.join(name));
        fs::create_dir(&path).map_err(io(&path))?;
        Ok(Self { dir: dir.to_owned(), path, place, sums: String::new(), is_finished: false })
    }

    /// Adds a file, written by `write`.
    fn add(
        &mut self,
        name: &str,
        write: impl FnOnce(&Path) -> Result<(), TrainError>,
    ) -> Result<(), TrainError> {
        let path = self.path.join(name);
        write(&path)?;
        let sum = sync_and_hash(&path).map_err(io(&path))?;
        self.sums += &format!("{sum}  {name}\n");
        Ok(())
    }

    /// Gives the checkpoint its name, once all of it is on disk.
    fn finish(mut self) -> Result<PathBuf, TrainError> {
        let path = self.path.join(SUMS);
        let write = || {
            let mut file = File::create(&path)?;
            file.write_all(self.sums.as_bytes())?;
            file.sync_all()
        };
        write().map_err(io(&path))?;
        sync_folder(&self.path).map_err(io(&self.path))?;
        // A checkpoint of this name, from before the run went back to an older one, gives way.
        let aside = self.path.with_extension("old.tmp");
        match fs::rename(&self.place, &aside) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                return Err(io(&self.place)(error));
            }
            _ => {}
        }
        if let Err(error) = fs::rename(&self.path, &self.place) {
            let _ = fs::rename(&aside, &self.place);
            return Err(io(&self.place)(error));
        }
        self.is_finished = true;
        sync_folder(&self.dir).map_err(io(&self.dir))?;
        if fs::symlink_metadata(&aside).is_ok() {
            remove(&aside).map_err(io(&aside))?;
        }
        Ok(self.place.clone())
    }
}

impl Drop for Draft {
    fn drop(&mut self) {
        if !self.is_finished {
            let _ = remove(&self.path); // the first error says more; the next save tries again
        }
    }
}

/// Tensors and residuals of a checkpoint.
struct Saved {
    tensors: Arrays,
    /// By rank.
    residuals: Vec<Vec<u8>>,
}

/// Reads a checkpoint if it is whole, and says what is wrong with it otherwise.
fn read(folder: &Path) -> Result<(Checkpoint, Saved), String> {
    read_files(&|name| fs::read(folder.join(name)))
}

/// The same from any files, for fuzzing: no bytes may make it panic.
#[doc(hidden)]
pub fn checkpoint_of(file: &dyn Fn(&str) -> io::Result<Vec<u8>>) -> Result<Checkpoint, String> {
    read_files(file).map(|(about, _)| about)
}

fn read_files(
    contents: &dyn Fn(&str) -> io::Result<Vec<u8>>,
) -> Result<(Checkpoint, Saved), String> {
    let sums = contents(SUMS).map_err(|error| match error.kind() {
        io::ErrorKind::NotFound => {
            format!("it has no {SUMS}, or was written by a version that made none")
        }
        _ => format!("{SUMS}: {error}"),
    })?;
    let sums = String::from_utf8(sums).map_err(|error| format!("{SUMS}: {error}"))?;
    let sums: BTreeMap<&str, &str> = sums
        .lines()
        .map(|line| line.split_once("  ").map(|(sum, name)| (name, sum)))
        .collect::<Option<_>>()
        .ok_or_else(|| format!("{SUMS} is not a list of hashes"))?;
    let file = |name: &str| -> Result<Vec<u8>, String> {
        let expected = sums.get(name).ok_or_else(|| format!("{SUMS} does not name {name}"))?;
        let bytes = contents(name).map_err(|error| match error.kind() {
            io::ErrorKind::NotFound => format!("{name} is missing"),
            _ => format!("{name}: {error}"),
        })?;
        match sha256(&bytes) == **expected {
            true => Ok(bytes),
            false if bytes.is_empty() => Err(format!("{name} is empty")),
            false => Err(format!("{name} does not match its hash in {SUMS}")),
        }
    };
    let about: Checkpoint =
        serde_json::from_slice(&file(JOB)?).map_err(|error| format!("{JOB}: {error}"))?;
    let mut tensors = Arrays::new();
    for name in [MODEL, OPTIMIZER] {
        tensors.extend(read_safetensors(&file(name)?).map_err(|error| format!("{name}: {error}"))?);
    }
    let owed = sums.keys().filter(|name| name.starts_with(RESIDUALS)).count();
    let [dp, tp, pp, _] = about.settings.layout();
    if [dp, tp, pp].into_iter().try_fold(1usize, usize::checked_mul) != Some(owed) {
        return Err(format!("{SUMS} names residuals of {owed} ranks, not of {dp} × {tp} × {pp}"));
    }
    let residuals = (0..owed).map(|rank| file(&residuals_of(rank))).collect::<Result<_, _>>()?;
    Ok((about, Saved { tensors, residuals }))
}

const RESIDUALS: &str = "residuals.rank";

/// The file with a rank's residuals.
fn residuals_of(rank: usize) -> String {
    format!("{RESIDUALS}{rank}.safetensors")
}

fn folder_name(step: usize) -> String {
    format!("step-{step:08}")
}

/// The checkpoints in a folder by step, oldest first; empty if there is no such folder.
fn steps_in(dir: &Path) -> Result<Vec<(usize, PathBuf)>, TrainError> {
    let step = |name: &str| {
        name.strip_prefix("step-")?.parse().ok().filter(|step| folder_name(*step) == name)
    };
    let mut steps: Vec<(usize, PathBuf)> = names_in(dir)?
        .into_iter()
        .filter_map(|name| Some((step(&name)?, dir.join(name))))
        .collect();
    steps.sort_unstable();
    Ok(steps)
}

/// Drafts left by saves that did not finish.
fn drafts_in(dir: &Path) -> Result<Vec<PathBuf>, TrainError> {
    let is_draft = |name: &String| name.starts_with(".step-") && name.ends_with(".tmp");
    Ok(names_in(dir)?.into_iter().filter(is_draft).map(|name| dir.join(name)).collect())
}

fn names_in(dir: &Path) -> Result<Vec<String>, TrainError> {
    match fs::read_dir(dir) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
        Err(error) => Err(io(dir)(error)),
        Ok(entries) => entries
            .map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned()))
            .collect::<io::Result<_>>()
            .map_err(io(dir)),
    }
}

/// Makes a folder and its missing parents, such that they survive a power cut.
fn create_folder(dir: &Path) -> io::Result<()> {
    let missing: Vec<&Path> =
        dir.ancestors().take_while(|path| !path.as_os_str().is_empty() && !path.exists()).collect();
    fs::create_dir_all(dir)?;
    missing.into_iter().filter_map(Path::parent).try_for_each(sync_folder)
}

fn sync_folder(path: &Path) -> io::Result<()> {
    let here = if path.as_os_str().is_empty() { Path::new(".") } else { path };
    match File::open(here)?.sync_all() {
        // Some network file systems cannot sync a folder, and need not.
        Err(error)
            if matches!(error.kind(), io::ErrorKind::InvalidInput | io::ErrorKind::Unsupported) =>
        {
            Ok(())
        }
        result => result,
    }
}

/// Removes a folder with its contents, a file, or a link (not its target).
fn remove(path: &Path) -> io::Result<()> {
    if fs::symlink_metadata(path)?.is_dir() {
        fs::remove_dir_all(path)
    } else {
        fs::remove_file(path)
    }
}

/// Syncs a file to disk, and returns its hash.
fn sync_and_hash(path: &Path) -> io::Result<String> {
    let mut file = File::open(path)?;
    file.sync_all()?;
    let (mut hash, mut buffer) = (digest::Context::new(&SHA256), vec![0; 1 << 20]);
    loop {
        match file.read(&mut buffer)? {
            0 => return Ok(hex(hash.finish())),
            count => hash.update(&buffer[..count]),
        }
    }
}

/// The SHA-256 of some bytes, in hex.
pub fn sha256(bytes: &[u8]) -> String {
    hex(digest::digest(&SHA256, bytes))
}

fn hex(digest: digest::Digest) -> String {
    digest.as_ref().iter().map(|byte| format!("{byte:02x}")).collect()
}

fn io(path: &Path) -> impl FnOnce(io::Error) -> TrainError {
    let path = path.display().to_string();
    move |error| TrainError::Checkpoint { path, error }
}

fn bad(path: &Path, what: String) -> TrainError {
    TrainError::BadCheckpoint { path: path.display().to_string(), what }
}
