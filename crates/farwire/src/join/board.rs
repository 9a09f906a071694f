//! What a launcher and its ranks tell each other about an elastic job: a file in memory, which the
//! launcher has open, and to which either side adds lines.
//!
//! - A rank writes `joined RANK` once it is in the job. So the launcher knows whether the group has
//!   formed when a rank dies, and which of its processes still wait to be let in.
//! - The launcher writes `ended` when none of the job's ranks is left. Those that it has started
//!   since would else call them for as long as they may.
//!
//! It is only ever a hint: a rank that cannot open the file, perhaps because it runs as another user,
//! goes without.

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};

use rustix::fs::MemfdFlags;

/// Tells ranks where the file is.
pub(crate) const VARIABLE: &str = "FARWIRE_BOARD";

const JOINED: &str = "joined";
const ENDED: &str = "ended";
/// Bytes of all lines: more than ranks write in years.
const MOST: u64 = 16 << 20;

/// What a launcher and its ranks tell each other, on the launcher's side.
#[derive(Debug)]
pub struct Board {
    file: File,
}

impl Board {
    /// An empty one.
    pub fn new() -> io::Result<Self> {
        let file = rustix::fs::memfd_create("farwire-board", MemfdFlags::CLOEXEC)?;
        Ok(Self { file: File::from(file) })
    }

    /// The variable that tells ranks of it, and its value.
    pub fn variable(&self) -> (&'static str, String) {
        (VARIABLE, self.path().display().to_string())
    }

    /// The ranks that have ever been in the job, by what the launcher calls them.
    pub fn joined(&self) -> Vec<u32> {
        let number = |line: &str| line.strip_prefix(JOINED)?.trim().parse().ok();
        read(&self.path()).lines().filter_map(number).collect()
    }

    /// None of the job's ranks is left.
    pub fn end(&self) {
        add(&self.path(), ENDED);
    }

    fn path(&self) -> PathBuf {
        format!("/proc/{}/fd/{}", std::process::id(), self.file.as_raw_fd()).into()
    }
}

/// The same on a rank's side.
#[derive(Clone, Debug)]
pub(crate) struct RankBoard {
    pub(crate) path: PathBuf,
    /// What the launcher calls this process.
    pub(crate) rank: String,
}

impl RankBoard {
    /// This process is in the job.
    pub(crate) fn say_joined(&self) {
        add(&self.path, &format!("{JOINED} {}", self.rank));
    }

    /// Whether the launcher says that there is nobody left to join.
    pub(crate) fn is_ended(&self) -> bool {
        read(&self.path).lines().any(|line| line == ENDED)
    }
}

/// The path that the variable's value names, if that is one of the kind a launcher sets: nothing
/// else is to be read, and have lines added to it.
pub(crate) fn parse(text: &str) -> Option<PathBuf> {
    let (process, file) = text.strip_prefix("/proc/")?.split_once("/fd/")?;
    let is_number = |text: &str| text.parse::<u32>().is_ok();
    (is_number(process) && is_number(file)).then(|| text.into())
}

fn read(path: &Path) -> String {
    let mut text = String::new();
    let file = File::open(path).map(|file| file.take(MOST));
    file.and_then(|mut file| file.read_to_string(&mut text))
        .map_or_else(|_| String::new(), |_| text)
}

fn add(path: &Path, line: &str) {
    let file = OpenOptions::new().append(true).open(path);
    // In one piece, so that lines of several ranks do not mix.
    let _ = file.and_then(|mut file| file.write_all(format!("{line}\n").as_bytes()));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_files_that_a_process_has_open_are_boards() {
        assert!(parse("/proc/17/fd/3").is_some());
        for text in ["", "/dev/zero", "/proc/17/fd/", "/proc/self/fd/3", "/proc/1/fd/../../x", "3"]
        {
            assert_eq!(parse(text), None, "{text}");
        }
    }

    #[test]
    fn a_launcher_knows_who_has_joined_and_ranks_that_the_job_has_ended() {
        let board = Board::new().unwrap();
        let rank = |rank: &str| RankBoard { path: board.variable().1.into(), rank: rank.into() };
        assert!(board.joined().is_empty());
        [rank("2"), rank("10")].iter().for_each(RankBoard::say_joined);
        assert_eq!(board.joined(), [2, 10]);
        assert!(!rank("3").is_ended());
        board.end();
        assert!(rank("3").is_ended());
        assert_eq!(board.joined(), [2, 10]);
    }
}
