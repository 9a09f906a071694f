//! How a launcher learns how far its ranks are with finding each other.
//!
//! Until rank 0 has told all ranks where the others are, one that dies can simply be replaced: the
//! others wait for it, and there is nothing to join yet. Once all are part of the group, another
//! process can join in its place. In between they *meet*: each waits for all others, and no rank
//! has done anything yet. If one dies then, it is best that all begin once more. So a launcher
//! shares a byte of memory with each of its ranks, and the rank notes there how far it is.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::PathBuf;

use rustix::fs::{MemfdFlags, OFlags, memfd_create};

/// Set by a launcher: where a rank notes how far it is.
pub(crate) const VARIABLE: &str = "FARWIRE_BEGINNING";

/// How far a rank is. The note of a rank that has made none is 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Note {
    /// It knows where all others are, and is meeting them.
    Meets = 1,
    /// It is part of the group.
    IsIn = 2,
}

/// How far a launcher's ranks are.
#[derive(Debug)]
pub struct Beginning {
    notes: File,
}

impl Beginning {
    /// The notes of a job that has not begun.
    pub fn new() -> io::Result<Self> {
        Ok(Self { notes: memfd_create("farwire-beginning", MemfdFlags::CLOEXEC)?.into() })
    }

    /// Forgets all notes: all ranks begin once more.
    pub fn forget(&self) -> io::Result<()> {
        self.notes.set_len(0)
    }

    /// The variable that tells a rank where its note is, and the variable's value. It is valid as
    /// long as this process lives.
    pub fn variable(&self, rank: u32) -> (&'static str, String) {
        let (process, file) = (std::process::id(), self.notes.as_fd().as_raw_fd());
        (VARIABLE, format!("{rank}:/proc/{process}/fd/{file}"))
    }

    /// Whether ranks have begun to meet.
    pub fn has_met(&self) -> bool {
        self.notes.metadata().is_ok_and(|about| about.len() > 0)
    }

    /// Whether all ranks have come, which is so if any of this launcher's has been part of the
    /// group.
    pub fn has_come(&self) -> bool {
        any_is_in(&self.notes)
    }

    /// Whether this rank has been part of the group.
    pub fn has_seen(&self, rank: u32) -> bool {
        let mut note = [0];
        let read = self.notes.read_at(&mut note, rank.into());
        read.is_ok_and(|read| read == 1) && note == [Note::IsIn as u8]
    }
}

/// The most notes that are read: more than there can be ranks, and an end to files that have none.
const NOTES: u64 = 1 << 20;

fn any_is_in(notes: &File) -> bool {
    let (mut some, mut at) = ([0; 1024], 0);
    while at < NOTES
        && let Ok(read @ 1..) = notes.read_at(&mut some, at)
    {
        if some[..read].contains(&(Note::IsIn as u8)) {
            return true;
        }
        at += read as u64;
    }
    false
}

/// Where a rank notes how far it is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    path: PathBuf,
    rank: u32,
}

impl Place {
    /// Parses what a launcher has written.
    pub(crate) fn parse(text: &str) -> Option<Self> {
        let (rank, path) = text.split_once(':')?;
        Some(Self { path: path.into(), rank: rank.parse().ok()? })
    }

    /// Notes how far this rank is, unless it was further before: a program may join more than once.
    pub(crate) fn note(&self, note: Note) {
        let noted = self.open(OpenOptions::new().read(true).write(true)).and_then(|file| {
            let (mut before, at) = ([0], self.rank.into());
            if file.read_at(&mut before, at)? == 1 && before[0] >= note as u8 {
                return Ok(());
            }
            file.write_all_at(&[note as u8], at)
        });
        if let Err(error) = noted {
            let path = self.path.display();
            tracing::warn!(%path, %error, "could not tell the launcher how far this rank is");
        }
    }

    /// Whether no rank of that launcher is part of the group yet.
    pub(crate) fn is_blank(&self) -> bool {
        let file = self.open(OpenOptions::new().read(true));
        file.is_ok_and(|file| !any_is_in(&file))
    }

    /// Opens what is there, whatever it is, without blocking.
    fn open(&self, how: &mut OpenOptions) -> io::Result<File> {
        how.custom_flags(OFlags::NONBLOCK.bits().cast_signed()).open(&self.path)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_launcher_reads_what_a_rank_has_noted() {
        let beginning = Beginning::new().unwrap();
        let place = |rank| Place::parse(&beginning.variable(rank).1).unwrap();
        assert!(!beginning.has_met() && !beginning.has_come() && place(2).is_blank());
        place(1).note(Note::Meets);
        assert!(beginning.has_met() && !beginning.has_come() && place(2).is_blank());
        place(2).note(Note::IsIn);
        place(2).note(Note::Meets);
        assert!(beginning.has_come() && !place(0).is_blank());
        assert_eq!([0, 1, 2, 3].map(|rank| beginning.has_seen(rank)), [false, false, true, false]);
        beginning.forget().unwrap();
        assert!(!beginning.has_met() && !beginning.has_seen(2) && place(0).is_blank());
        place(65_535).note(Note::IsIn);
        assert!(beginning.has_come() && beginning.has_seen(65_535));
    }

    #[test]
    fn a_place_that_is_none_is_only_a_warning() {
        assert_eq!(Place::parse("/dev/null"), None);
        assert_eq!(Place::parse("-1:/dev/null"), None);
        let nowhere = Place::parse("4294967295:/nowhere/at/all").unwrap();
        nowhere.note(Note::IsIn);
        assert!(!nowhere.is_blank());
        assert!(Place::parse("0:/dev/zero").unwrap().is_blank());
    }
}
