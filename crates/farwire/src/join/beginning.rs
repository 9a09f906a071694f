//! How a launcher learns which of its ranks are part of the group.
//!
//! Until all ranks have come, one that dies can only be replaced by itself: the others wait for it, and
//! there is nothing to join yet. Afterwards another can only join, as long as one is left that is part
//! of the group. So a launcher shares a byte of memory with each of its ranks, and the rank notes there
//! that it is.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::{MemfdFlags, OFlags, memfd_create};

/// Set by a launcher to where a rank notes that it is part of the group.
pub(crate) const VARIABLE: &str = "FARWIRE_BEGINNING";

/// Which of a launcher's ranks have been part of the group.
#[derive(Debug)]
pub struct Beginning {
    notes: File,
}

impl Beginning {
    /// Of a job that has not begun.
    pub fn new() -> io::Result<Self> {
        Ok(Self { notes: memfd_create("farwire-beginning", MemfdFlags::CLOEXEC)?.into() })
    }

    /// The variable by which a rank is told of it, and its value. It serves as long as this process
    /// lives.
    pub fn variable(&self, rank: u32) -> (&'static str, String) {
        let (process, file) = (std::process::id(), self.notes.as_fd().as_raw_fd());
        (VARIABLE, format!("{rank}:/proc/{process}/fd/{file}"))
    }

    /// Whether all ranks have come: any of this launcher's has been part of the group.
    pub fn has_come(&self) -> bool {
        self.notes.metadata().is_ok_and(|about| about.len() > 0)
    }

    /// Whether this rank has been part of the group.
    pub fn has_seen(&self, rank: u32) -> bool {
        let mut note = [0];
        self.notes.read_at(&mut note, rank.into()).is_ok_and(|read| read == 1 && note == NOTE)
    }
}

const NOTE: [u8; 1] = [1];

/// Where a rank notes that it is part of the group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    path: PathBuf,
    rank: u32,
}

impl Place {
    /// As a launcher writes it.
    pub(crate) fn parse(text: &str) -> Option<Self> {
        let (rank, path) = text.split_once(':')?;
        Some(Self { path: path.into(), rank: rank.parse().ok()? })
    }

    /// Notes that this rank is part of the group.
    pub(crate) fn note(&self) {
        // Not to be held up, whatever is there.
        let flags = OFlags::NONBLOCK.bits().cast_signed();
        let open = OpenOptions::new().write(true).custom_flags(flags).open(&self.path);
        if let Err(error) = open.and_then(|file| file.write_all_at(&NOTE, self.rank.into())) {
            let path = self.path.display();
            tracing::warn!(%path, %error, "could not tell the launcher that this rank has joined");
        }
    }

    /// Whether no rank of that launcher has noted anything yet.
    pub(crate) fn is_blank(&self) -> bool {
        Path::metadata(&self.path).is_ok_and(|about| about.len() == 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_launcher_reads_what_a_rank_has_noted() {
        let beginning = Beginning::new().unwrap();
        let place = |rank| Place::parse(&beginning.variable(rank).1).unwrap();
        assert!(!beginning.has_come() && place(2).is_blank());
        place(2).note();
        place(2).note();
        assert!(beginning.has_come() && !place(0).is_blank());
        assert_eq!([0, 1, 2, 3].map(|rank| beginning.has_seen(rank)), [false, false, true, false]);
    }

    #[test]
    fn a_place_that_is_none_is_only_a_warning() {
        assert_eq!(Place::parse("/dev/null"), None);
        assert_eq!(Place::parse("-1:/dev/null"), None);
        let nowhere = Place::parse("4294967295:/nowhere/at/all").unwrap();
        nowhere.note();
        assert!(!nowhere.is_blank());
    }
}
