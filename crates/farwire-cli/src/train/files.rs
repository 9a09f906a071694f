//! What a run reads and writes besides its checkpoints: the data, the report, and a lock on the
//! folder of checkpoints. Each is checked before training starts, on rank 0.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, Read};
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicI32, Ordering};

use super::TrainCommandError;

/// The longest text to learn from: every rank has all of it in memory.
pub(crate) const LONGEST_DATA: u64 = 4 << 30;
/// Bytes read at once. In between, this process checks whether it was asked to end.
const PIECE: usize = 1 << 20;

/// Opens the text to learn from, if it is a file of a length that can be read.
pub(crate) fn open_data(path: &Path) -> Result<File, TrainCommandError> {
    let failed = |source| TrainCommandError::Data { path: path.to_owned(), source };
    // Without waiting for a writer: anything but a file is refused, rather than read for ever.
    let flags = rustix::fs::OFlags::NONBLOCK.bits();
    let file =
        OpenOptions::new().read(true).custom_flags(flags as i32).open(path).map_err(failed)?;
    let about = file.metadata().map_err(failed)?;
    let kind = about.file_type();
    let what = if kind.is_dir() {
        "a folder"
    } else if kind.is_fifo() {
        "a pipe"
    } else if kind.is_file() {
        return if about.len() > LONGEST_DATA { Err(too_long(path)) } else { Ok(file) };
    } else {
        "a device"
    };
    Err(TrainCommandError::NoFile { path: path.to_owned(), what })
}

/// The text to learn from; `None` if this process is asked to end before it is read.
pub(crate) fn read_data(
    path: &Path,
    stop: &AtomicI32,
) -> Result<Option<Vec<u8>>, TrainCommandError> {
    let failed = |source| TrainCommandError::Data { path: path.to_owned(), source };
    let mut file = open_data(path)?;
    let mut text = Vec::new();
    while stop.load(Ordering::Relaxed) == 0 {
        match file.by_ref().take(PIECE as u64).read_to_end(&mut text).map_err(failed)? {
            0 => return Ok(Some(text)),
            // The file grows while it is read.
            _ if text.len() as u64 > LONGEST_DATA => return Err(too_long(path)),
            _ => {}
        }
    }
    Ok(None)
}

fn too_long(path: &Path) -> TrainCommandError {
    TrainCommandError::DataTooLong { path: path.to_owned(), limit: LONGEST_DATA >> 30 }
}

/// Checks whether a report can be written here. An existing one is not touched. Several ranks may
/// check at once: a file that another has made or removed meanwhile shows that it can be.
pub(crate) fn check_report(path: &Path) -> Result<(), TrainCommandError> {
    let unless = |kind, done: io::Result<()>| match done {
        Err(error) if error.kind() == kind => Ok(()),
        done => done,
    };
    let check = || match fs::metadata(path) {
        // Opening anything but a file may wait for a reader, or do something.
        Ok(about) if !about.is_file() && !about.is_dir() => Ok(()),
        Ok(_) => {
            let opened = OpenOptions::new().append(true).open(path).map(drop);
            unless(io::ErrorKind::NotFound, opened)
        }
        // A link to a file that is not there yet.
        Err(_) if fs::symlink_metadata(path).is_ok() => Ok(()),
        Err(_) => {
            let made = File::create_new(path).and_then(|_| fs::remove_file(path));
            unless(io::ErrorKind::AlreadyExists, made)
        }
    };
    check().map_err(|source| TrainCommandError::ReportPlace { path: path.to_owned(), source })
}

/// A folder of checkpoints that no other job uses while this lives.
#[derive(Debug)]
pub(crate) struct Held {
    path: PathBuf,
    /// Locked; the system unlocks it when this process ends, however that happens.
    _file: File,
}

impl Drop for Held {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.path); // without the lock it blocks nobody
    }
}

/// Takes the folder for this job. `None` if there is no such folder, if nothing can be written to
/// it, which writing the first checkpoint will say better, or if its file system has no locks.
pub(crate) fn hold(dir: &Path) -> Result<Option<Held>, TrainCommandError> {
    let path = dir.join(".lock");
    loop {
        let Ok(file) = OpenOptions::new().write(true).create(true).truncate(false).open(&path)
        else {
            return Ok(None);
        };
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => return Err(TrainCommandError::Held(dir.to_owned())),
            Err(TryLockError::Error(_)) => return Ok(None),
        }
        // A job that ends removes the file; this may be the one it has removed.
        let inode =
            |about: io::Result<fs::Metadata>| about.map(|about| (about.dev(), about.ino())).ok();
        if inode(fs::metadata(&path)) == inode(file.metadata()) {
            return Ok(Some(Held { path, _file: file }));
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test that cannot go on should say where")]

    use super::*;

    #[test]
    fn ranks_that_look_for_the_same_report_at_once_do_not_fail_each_other() {
        let name = format!("farwire-report-{}.html", std::process::id());
        let path = std::env::temp_dir().join(name);
        std::thread::scope(|scope| {
            let look = || (0..2000).for_each(|_| check_report(&path).unwrap());
            for _ in 0..4 {
                scope.spawn(look);
            }
        });
        assert!(!path.exists(), "nothing is left behind");
    }
}
