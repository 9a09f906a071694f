//! A place on the wire: a relay of UDP datagrams that sees them all, and one of TCP connections.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream, UdpSocket};
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
    /// Shows every datagram to `passes`, and passes on those for which that returns `true`.
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

type Bytes = Arc<Mutex<Vec<u8>>>;

/// Passes the bytes of TCP connections, from a port to a server, until it is dropped.
#[derive(Debug)]
pub(crate) struct TcpRelay {
    address: SocketAddr,
    ended: Arc<AtomicBool>,
    /// What went over all connections, each way.
    seen: Arc<Mutex<Vec<(Way, Bytes)>>>,
}

impl TcpRelay {
    /// Listens at `address`, and keeps everything that goes by.
    pub(crate) fn start(address: SocketAddr, server: SocketAddr) -> std::io::Result<TcpRelay> {
        let listener = TcpListener::bind(address)?;
        let (ended, seen) = (Arc::new(AtomicBool::new(false)), Arc::<Mutex<Vec<_>>>::default());
        let (is_over, keep) = (ended.clone(), seen.clone());
        std::thread::spawn(move || {
            while let Ok((client, _)) = listener.accept() {
                if is_over.load(Ordering::Relaxed) {
                    return;
                }
                let server = TcpStream::connect(server).unwrap();
                for way in [Way::ToServer, Way::ToClient] {
                    let ends = [client.try_clone().unwrap(), server.try_clone().unwrap()];
                    let [mut from, mut to] = ends;
                    if way == Way::ToClient {
                        std::mem::swap(&mut from, &mut to);
                    }
                    let stream = Bytes::default();
                    keep.lock().unwrap().push((way, stream.clone()));
                    std::thread::spawn(move || {
                        let mut bytes = vec![0; 1 << 16];
                        while let Ok(length @ 1..) = from.read(&mut bytes) {
                            stream.lock().unwrap().extend_from_slice(&bytes[..length]);
                            if to.write_all(&bytes[..length]).is_err() {
                                break;
                            }
                        }
                        let _ = to.shutdown(Shutdown::Write);
                    });
                }
            }
        });
        Ok(TcpRelay { address, ended, seen })
    }

    /// What went one way, for each connection.
    pub(crate) fn seen(&self, way: Way) -> Vec<Vec<u8>> {
        let seen = self.seen.lock().unwrap();
        let this_way = seen.iter().filter(|(other, _)| *other == way);
        this_way.map(|(_, bytes)| bytes.lock().unwrap().clone()).collect()
    }
}

impl Drop for TcpRelay {
    fn drop(&mut self) {
        self.ended.store(true, Ordering::Relaxed);
        let _ = TcpStream::connect(self.address); // so that it looks
    }
}
