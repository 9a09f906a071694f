//! Threads for the connections of this process.

use std::io;
use std::num::NonZeroUsize;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use tokio::runtime::Handle;
use tokio::sync::oneshot;

/// Threads that encrypt, write, read and decrypt. A connection stays on its thread, so that none
/// wakes another. They end when this is dropped.
#[derive(Debug)]
pub(super) struct Workers {
    threads: Vec<(Handle, oneshot::Sender<()>)>,
    next: AtomicUsize,
}

impl Workers {
    /// As many as pay: a connection keeps one thread busy at each end, and ranks need cores, too.
    pub(super) fn new() -> io::Result<Arc<Self>> {
        let cores = std::thread::available_parallelism().map_or(1, NonZeroUsize::get);
        let threads = (0..(cores / 4).clamp(1, MOST)).map(|_| start()).collect::<Result<_, _>>()?;
        Ok(Arc::new(Self { threads, next: AtomicUsize::new(0) }))
    }

    pub(super) fn count(&self) -> usize {
        self.threads.len()
    }

    /// The thread for the next connection.
    pub(super) fn next(&self) -> &Handle {
        let next = self.next.fetch_add(1, Ordering::Relaxed);
        &self.threads[next % self.threads.len()].0
    }
}

/// Threads of one process, at most.
const MOST: usize = 4;

fn start() -> io::Result<(Handle, oneshot::Sender<()>)> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let (handle, (keep, end)) = (runtime.handle().clone(), oneshot::channel());
    let name = std::thread::Builder::new().name("farwire-tcp".to_owned());
    name.spawn(move || {
        let _ = runtime.block_on(end);
        runtime.shutdown_background();
    })?;
    Ok((handle, keep))
}
