//! A place on the wire: a relay of UDP datagrams that sees them all.

use std::net::{SocketAddr, UdpSocket};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

/// Which way a datagram goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Way {
    ToServer,
    ToClient,
}

/// Passes datagrams between one client and one server until it is dropped.
#[derive(Debug)]
pub(crate) struct Relay {
    /// Where the client finds the server.
    pub(crate) address: SocketAddr,
    ended: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
}

impl Relay {
    /// Shows every datagram to `passes`, and passes on those that it wants.
    pub(crate) fn start(
        server: SocketAddr,
        passes: impl FnMut(Way, &[u8]) -> bool + Send + 'static,
    ) -> Relay {
        let [outer, inner] = [(); 2].map(|()| {
            let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
            socket.set_read_timeout(Some(Duration::from_millis(50))).unwrap();
            Arc::new(socket)
        });
        let address = outer.local_addr().unwrap();
        inner.connect(server).unwrap();
        let passes = Arc::new(Mutex::new(passes));
        let client = Arc::new(Mutex::new(None));
        let ended = Arc::new(AtomicBool::new(false));
        let threads = [Way::ToServer, Way::ToClient].map(|way| {
            let (outer, inner, client) = (outer.clone(), inner.clone(), client.clone());
            let (passes, ended) = (passes.clone(), ended.clone());
            std::thread::spawn(move || {
                let from = if way == Way::ToServer { &outer } else { &inner };
                let mut datagram = vec![0; 1 << 16];
                while !ended.load(Ordering::Relaxed) {
                    // An error is a timeout, or a server that is not there yet.
                    let Ok((length, sender)) = from.recv_from(&mut datagram) else { continue };
                    if way == Way::ToServer {
                        *client.lock().unwrap() = Some(sender);
                    }
                    if !passes.lock().unwrap()(way, &datagram[..length]) {
                        continue;
                    }
                    let _ = match (way, *client.lock().unwrap()) {
                        (Way::ToServer, _) => inner.send(&datagram[..length]),
                        (Way::ToClient, Some(client)) => outer.send_to(&datagram[..length], client),
                        (Way::ToClient, None) => continue,
                    };
                }
            })
        });
        Relay { address, ended, threads: threads.into() }
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        self.ended.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}
