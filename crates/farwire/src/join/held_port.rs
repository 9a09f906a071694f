//! A port that a launcher keeps free for a rank: for rank 0, and in an elastic job for each.
//!
//! A launcher has to name rank 0's port before rank 0 runs, and to those that join later the port
//! of a rank that lives. If it only looked for a free port, another process (a sibling rank that
//! asks for any port, say) could take that in between. So it holds the port: it binds a socket with
//! `SO_REUSEADDR`, which keeps the port from everyone who binds without it. Rank 0 is told in
//! [`VARIABLE`], binds with `SO_REUSEADDR`, and switches that off again at once, so that from then
//! on nobody can bind the port at all. The launcher's own socket is connected to itself, so packets
//! from others never go there.
//!
//! The TCP port of the same number is held in the same way. With TCP, the process that listens has
//! the port to itself.

use std::io;
use std::net::{Ipv4Addr, SocketAddr, UdpSocket};
use std::os::fd::OwnedFd;

use rustix::net::{AddressFamily, SocketFlags, SocketType, sockopt};

/// Set by a launcher that holds a port, to that port.
pub(crate) const VARIABLE: &str = "FARWIRE_HELD_PORT";

/// A port of loopback that is kept free for one rank until this is dropped.
#[derive(Debug)]
pub struct HeldPort {
    port: u16,
    _socket: UdpSocket,
    /// `None` if another process has it: rank 0 can then only connect to others.
    _tcp: Option<OwnedFd>,
}

impl HeldPort {
    /// Holds any free port.
    pub fn any() -> io::Result<Self> {
        const TRIES: usize = 16;
        let mut tries = 0;
        loop {
            let any = (Ipv4Addr::LOCALHOST, 0).into();
            let socket = UdpSocket::from(bind_reusable(any, SocketType::DGRAM)?);
            let address = socket.local_addr()?;
            let tcp = bind_reusable(address, SocketType::STREAM).ok();
            tries += 1;
            if tcp.is_some() || tries == TRIES {
                socket.connect(address)?;
                return Ok(Self { port: address.port(), _socket: socket, _tcp: tcp });
            }
        }
    }

    /// Its number, for MASTER_PORT or FARWIRE_PORT.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// The variable that tells the rank of the port, and its value.
    pub fn variable(&self) -> (&'static str, String) {
        (VARIABLE, self.port.to_string())
    }
}

/// A socket for this process alone, at a port that a launcher may hold for it.
pub(super) fn bind(address: SocketAddr, is_held: bool) -> io::Result<UdpSocket> {
    if !is_held {
        return UdpSocket::bind(address);
    }
    let socket = UdpSocket::from(bind_reusable(address, SocketType::DGRAM)?);
    sockopt::set_socket_reuseaddr(&socket, false)?;
    Ok(socket)
}

fn bind_reusable(address: SocketAddr, kind: SocketType) -> io::Result<OwnedFd> {
    let family = if address.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let socket = rustix::net::socket_with(family, kind, SocketFlags::CLOEXEC, None)?;
    sockopt::set_socket_reuseaddr(&socket, true)?;
    rustix::net::bind(&socket, &address)?;
    Ok(socket)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_held_port_is_for_rank_0_alone() {
        let held = HeldPort::any().unwrap();
        let address = SocketAddr::from((Ipv4Addr::LOCALHOST, held.port()));
        assert_eq!(UdpSocket::bind(address).unwrap_err().kind(), io::ErrorKind::AddrInUse);
        let rank_0 = bind(address, true).unwrap();
        // Nobody else, whatever they ask for, and packets go to rank 0.
        for is_held in [true, false] {
            assert_eq!(bind(address, is_held).unwrap_err().kind(), io::ErrorKind::AddrInUse);
        }
        rank_0.set_read_timeout(Some(std::time::Duration::from_secs(60))).unwrap();
        let peer = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        for word in ["one", "two", "three"] {
            peer.send_to(word.as_bytes(), address).unwrap();
            let mut bytes = [0; 16];
            let length = rank_0.recv(&mut bytes).unwrap();
            assert_eq!(&bytes[..length], word.as_bytes());
        }
    }
}
