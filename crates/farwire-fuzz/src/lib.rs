//! Everything that reads bytes from outside, as functions that take any bytes and must not panic.
//!
//! `tests/corpus.rs` runs them on what is kept in `corpus/`, and on random changes of it, with every
//! `cargo test`. `scripts/fuzz.py` has libFuzzer look for more, and keeps what reaches new code.

mod codecs;
mod process;
mod proto;

/// Something that reads bytes.
#[derive(Clone, Copy, Debug)]
pub struct Target {
    /// The name of its file in `corpus/`, and of its program in `fuzz/`.
    pub name: &'static str,
    /// Reads the bytes. Panics if it breaks a promise.
    pub run: fn(&[u8]),
}

/// All targets.
pub const TARGETS: &[Target] = &[
    Target { name: "header", run: proto::header },
    Target { name: "fault", run: proto::fault },
    Target { name: "engine", run: proto::engine },
    Target { name: "machine", run: proto::machine },
    Target { name: "membership", run: proto::membership },
    Target { name: "codec", run: codecs::codec },
    Target { name: "codec_spec", run: codecs::spec },
    Target { name: "sparse", run: codecs::sparse },
    Target { name: "feedback", run: codecs::feedback },
    Target { name: "joining", run: process::joining },
    Target { name: "flight", run: process::flight },
    Target { name: "checkpoint", run: process::checkpoint },
    Target { name: "training", run: process::training },
    Target { name: "units", run: process::units },
];

/// Runs a target.
///
/// # Panics
///
/// If there is no target of that name, or if it breaks a promise.
pub fn run(name: &str, bytes: &[u8]) {
    let target = TARGETS.iter().find(|target| target.name == name);
    (target.expect("it is in the list").run)(bytes);
}
