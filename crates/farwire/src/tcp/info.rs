//! What the system knows of a TCP connection (`TCP_INFO`), which no crate here wraps: so this file
//! has `unsafe` code. Its rule: the system writes at most as many bytes as it is told to, and says
//! how many those were; the rest stay zero.

#![allow(unsafe_code, reason = "a system call; see the rule above")]

use std::os::fd::{AsFd, AsRawFd};
use std::time::Duration;

use crate::link::NetworkPath;

/// Bytes of the kernel's `struct tcp_info` that are asked for.
const LENGTH: usize = 144;

/// The path of a connection, as its sender sees it.
pub(super) fn path(socket: impl AsFd) -> Option<NetworkPath> {
    let mut info = [0u8; LENGTH];
    let mut length = LENGTH as libc::socklen_t;
    // SAFETY: `info` is `length` bytes long, and both are this function's own.
    let failed = unsafe {
        libc::getsockopt(
            socket.as_fd().as_raw_fd(),
            libc::IPPROTO_TCP,
            libc::TCP_INFO,
            info.as_mut_ptr().cast(),
            &raw mut length,
        )
    };
    // By their places in the kernel's `struct tcp_info`, which only ever grows.
    let number = |at: usize| info[at..].first_chunk().map_or(0, |bytes| u32::from_ne_bytes(*bytes));
    let [mss, pmtu, rtt, cwnd, retransmitted, sent] = [16, 60, 68, 80, 100, 136].map(number);
    (failed == 0).then(|| NetworkPath {
        round_trip: Duration::from_micros(rtt.into()),
        window: u64::from(cwnd) * u64::from(mss),
        mtu: u16::try_from(pmtu).unwrap_or(u16::MAX),
        sent: sent.into(),
        lost: retransmitted.into(),
    })
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::{TcpListener, TcpStream};

    use super::*;

    #[test]
    fn a_connection_on_loopback_has_a_path() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut one = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let mut other = listener.accept().unwrap().0;
        one.write_all(&[1; 1000]).unwrap();
        other.read_exact(&mut [0; 1000]).unwrap();
        let path = path(&one).unwrap();
        assert!(path.sent > 0 && path.window > 1000 && path.mtu > 1000, "{path:?}");
        assert!(path.round_trip < Duration::from_secs(10), "{path:?}");
        assert!(path.lost <= path.sent);
    }
}
