//! Room for open files.
//!
//! Memory shared with a peer takes a few open files on each side, and many systems let a process
//! have 1024 unless it asks for more: enough for some 190 ranks on a host.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Files that each peer on this host takes while memory is shared with it, and while that is set
/// up.
const PER_PEER: u64 = 5;
/// Files for everything else that a program may want to open meanwhile.
const SPARE: u64 = 32;

/// Makes sure that memory can be shared with this many peers, if need be by raising this process's
/// limit, where that is allowed; otherwise says what to do.
pub(crate) fn make_room(peers: usize) -> Result<(), String> {
    let open = std::fs::read_dir("/proc/self/fd").map_or(0, |files| files.count() as u64);
    let needed = open + PER_PEER * peers as u64 + SPARE;
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    let enough = |limit: Option<u64>| limit.is_none_or(|limit| limit >= needed);
    if enough(current) {
        return Ok(());
    }
    if !enough(maximum) {
        return Err(format!(
            "sharing memory with {peers} ranks on this host takes {needed} open files, and the limit is {}; \
             raise it (`ulimit -n {needed}` as root, LimitNOFILE= in systemd, --ulimit nofile= in Docker), \
             or set FARWIRE_LINK=quic",
            maximum.unwrap_or(u64::MAX)
        ));
    }
    setrlimit(Resource::Nofile, Rlimit { current: Some(needed), maximum }).map_err(|error| {
        format!(
            "could not raise the limit on open files to {needed}: {error}; run `ulimit -n {needed}` first"
        )
    })?;
    tracing::info!(needed, "raised this process's limit on open files");
    Ok(())
}
