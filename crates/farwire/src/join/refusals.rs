//! Processes that came and were refused.

use std::net::SocketAddr;
use std::sync::{Mutex, PoisonError};

use super::door;

/// The processes that were refused: for the log, and for an error if a rank turns out to be
/// missing.
#[derive(Debug, Default)]
pub(super) struct Refusals {
    log: door::Log,
    so_far: Mutex<SoFar>,
}

#[derive(Debug, Default)]
struct SoFar {
    count: u64,
    last: String,
    /// Whether the last had the token.
    has_token: bool,
}

impl Refusals {
    /// Notes a process that has the cluster's token.
    pub(super) fn add(&self, from: SocketAddr, reason: &str) {
        self.count(from, reason, true);
    }

    /// Notes any other process.
    pub(super) fn add_stranger(&self, from: SocketAddr, reason: &str) {
        self.count(from, reason, false);
    }

    fn count(&self, from: SocketAddr, reason: &str, has_token: bool) {
        let line = format!("a process at {from}: {reason}");
        self.log.say(&format!("refused {line}"));
        let mut so_far = self.so_far.lock().unwrap_or_else(PoisonError::into_inner);
        so_far.count += 1;
        // Strangers, who may be many, do not hide a process that has the token.
        if has_token || !so_far.has_token {
            (so_far.last, so_far.has_token) = (line, has_token);
        }
    }

    /// A clause about them, for an error; empty if there were none.
    pub(super) fn clause(&self) -> String {
        match &*self.so_far.lock().unwrap_or_else(PoisonError::into_inner) {
            SoFar { count: 0, .. } => String::new(),
            SoFar { count, last, .. } => format!(" (refused meanwhile: {count}, the last {last})"),
        }
    }
}
