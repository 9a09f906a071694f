//! A trace that Perfetto (ui.perfetto.dev) and `chrome://tracing` open: each operation as a slice,
//! in the JSON event format.
//!
//! Each rank writes its own file: `trace.json` becomes `trace.rank0.json`, and so on. Times are
//! those of the wall clock, so that the files of several ranks fit together; `farwire doctor
//! --merge trace.json trace.rank*.json` puts them into one.

use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

use farwire_proto::Peer;

use super::flight::{Record, micros};

#[derive(Debug)]
pub(super) struct Trace {
    me: Peer,
    file: BufWriter<File>,
    /// Events since the last flush.
    unflushed: u32,
}

/// Events that may be lost when a process dies.
const FLUSH_EVERY: u32 = 64;

impl Trace {
    pub(super) fn create(path: &Path, me: Peer) -> io::Result<Self> {
        let path = path_of_rank(path, me);
        let file = File::create(&path).map_err(|error| {
            let advice = "name a file in a folder that exists and that you may write to";
            io::Error::new(error.kind(), format!("{}: {error}; {advice}", path.display()))
        })?;
        let mut file = BufWriter::new(file);
        let name = serde_json::json!({ "name": format!("rank {}", me.0) });
        let event =
            serde_json::json!({ "name": "process_name", "ph": "M", "pid": me.0, "args": name });
        // The closing bracket is optional in this format, so that a process may end at any time.
        write!(file, "[\n{event}")?;
        Ok(Self { me, file, unflushed: 0 })
    }

    /// Writes an operation that has ended.
    pub(super) fn operation(&mut self, record: &Record) {
        let (name, id) = (record.call.kind.name(), format!("{}.{}", self.me.0, record.op.0));
        let began = micros(record.began_at());
        let ended = began + record.took().map_or(0, micros);
        let begin = serde_json::json!({
            "name": name, "cat": "farwire", "ph": "b", "id": id, "pid": self.me.0, "tid": 0, "ts": began,
            "args": {
                "call": record.call.to_string(),
                "number": record.seq.to_string(),
                "communicator": format!("{:016x}", record.comm.0),
                "sent": record.sent,
                "received": record.received,
                "error": record.failure.as_ref().map(|failure| failure.error.to_string()),
            },
        });
        let end = serde_json::json!({
            "name": name, "cat": "farwire", "ph": "e", "id": id, "pid": self.me.0, "tid": 0, "ts": ended,
        });
        if let Err(error) = write!(self.file, ",\n{begin},\n{end}") {
            tracing::warn!(%error, "could not write the trace");
        }
        self.unflushed += 2;
        if self.unflushed >= FLUSH_EVERY {
            self.flush();
        }
    }

    pub(super) fn flush(&mut self) {
        self.unflushed = 0;
        if let Err(error) = self.file.flush() {
            tracing::warn!(%error, "could not write the trace");
        }
    }
}

/// For rank 3, `trace.json` becomes `trace.rank3.json`; in a folder, the file has that name, too.
fn path_of_rank(path: &Path, me: Peer) -> PathBuf {
    let path = if path.is_dir() { &path.join("trace.json") } else { path };
    let extension = path.extension().map(|extension| extension.to_string_lossy().into_owned());
    path.with_extension(format!("rank{}.{}", me.0, extension.as_deref().unwrap_or("json")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_rank_has_a_file_of_its_own() {
        let of = |path: &str| path_of_rank(Path::new(path), Peer(3)).display().to_string();
        assert_eq!(of("a/trace.json"), "a/trace.rank3.json");
        assert_eq!(of("trace"), "trace.rank3.json");
        assert_eq!(of("/"), "/trace.rank3.json");
    }
}
