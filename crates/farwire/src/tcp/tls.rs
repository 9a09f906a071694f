//! TLS records over a socket, without a copy that can be avoided: rustls works in buffers of ours,
//! which are read into and written from with few system calls.

use std::fmt;
use std::io;
use std::ops::Range;

use rustls::client::UnbufferedClientConnection;
use rustls::pki_types::CertificateDer;
use rustls::server::UnbufferedServerConnection;
use rustls::unbuffered::{
    ConnectionState, EncodeError, EncryptError, InsufficientSizeError, UnbufferedStatus,
};
use tokio::net::TcpStream;

/// Bytes that are read from a socket at once, at most: what stays in the cache until it is
/// decrypted.
const READ: usize = 64 << 10;

/// Bytes on their way, in memory that is kept.
#[derive(Debug, Default)]
pub(super) struct Buffer {
    bytes: Vec<u8>,
    filled: Range<usize>,
}

impl Buffer {
    pub(super) fn filled(&self) -> &[u8] {
        &self.bytes[self.filled.clone()]
    }

    pub(super) fn is_empty(&self) -> bool {
        self.filled.is_empty()
    }

    /// Room for `least` bytes or more, behind what there is.
    fn room(&mut self, least: usize) -> &mut [u8] {
        if self.bytes.len() - self.filled.end < least {
            self.bytes.copy_within(self.filled.clone(), 0);
            self.filled = 0..self.filled.len();
            if self.bytes.len() < self.filled.end + least {
                self.bytes.resize(self.filled.end + least, 0);
            }
        }
        &mut self.bytes[self.filled.end..]
    }

    fn add(&mut self, bytes: usize) {
        self.filled.end += bytes;
    }

    /// The first bytes are done with.
    pub(super) fn consume(&mut self, bytes: usize) {
        self.filled.start += bytes;
        if self.filled.is_empty() {
            self.filled = 0..0;
        }
    }
}

/// One end of a connection.
pub(super) enum Tls {
    Client(Box<UnbufferedClientConnection>),
    Server(Box<UnbufferedServerConnection>),
}

impl fmt::Debug for Tls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Client(_) => "Client",
            Self::Server(_) => "Server",
        })
    }
}

/// What is to be done next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Next {
    /// The same again.
    More,
    /// More has to come from the other side.
    Read,
    /// Data can be sent; what has come was read.
    Ready,
    /// The other side has ended.
    Closed,
}

/// A connection whose two ends have proven who they are.
#[derive(Debug)]
pub(super) struct Secured {
    pub(super) socket: TcpStream,
    pub(super) session: Session,
}

/// What becomes plaintext and ciphertext of one connection.
///
/// rustls keeps places in what has come, so it is always given all of that, also to write.
#[derive(Debug)]
pub(super) struct Session {
    tls: Tls,
    /// Ciphertext that has come.
    incoming: Buffer,
    /// Ciphertext to be written.
    pub(super) outgoing: Buffer,
    /// Plaintext that came with the end of the handshake.
    early: Vec<u8>,
}

impl Session {
    /// Shakes hands.
    pub(super) async fn begin(socket: TcpStream, tls: Tls) -> io::Result<Secured> {
        let (incoming, outgoing) = (Buffer::default(), Buffer::default());
        let mut session = Self { tls, incoming, outgoing, early: Vec::new() };
        loop {
            let mut early = std::mem::take(&mut session.early);
            let next = session.advance(&mut |data| early.extend_from_slice(data));
            session.early = early;
            if next.is_err() {
                let _ = session.advance_once(&mut |_| {}); // an alert says what is wrong
            }
            session.flush(&socket).await?;
            match next? {
                Next::Ready => return Ok(Secured { socket, session }),
                Next::Closed => return Err(io::ErrorKind::ConnectionAborted.into()),
                Next::Read | Next::More => {}
            }
            socket.readable().await?;
            match session.fill(&socket) {
                Err(error) if error.kind() != io::ErrorKind::WouldBlock => return Err(error),
                _ => {}
            }
        }
    }

    /// The certificates that the other side has shown.
    pub(super) fn peer_certificates(&self) -> &[CertificateDer<'static>] {
        match &self.tls {
            Tls::Client(tls) => tls.peer_certificates(),
            Tls::Server(tls) => tls.peer_certificates(),
        }
        .unwrap_or_default()
    }

    /// Reads from the socket what there is, up to a limit.
    pub(super) fn fill(&mut self, socket: &TcpStream) -> io::Result<()> {
        match socket.try_read(self.incoming.room(READ))? {
            0 => Err(io::ErrorKind::UnexpectedEof.into()),
            bytes => {
                self.incoming.add(bytes);
                Ok(())
            }
        }
    }

    /// The next bytes that the other side says; more may follow.
    pub(super) async fn read_exact<const N: usize>(
        &mut self,
        socket: &TcpStream,
    ) -> io::Result<[u8; N]> {
        loop {
            let mut early = std::mem::take(&mut self.early);
            let opened = self.open(&mut |data| early.extend_from_slice(data));
            self.early = early;
            opened?;
            if let Some(bytes) = self.early.first_chunk().copied() {
                self.early.drain(..N);
                return Ok(bytes);
            }
            socket.readable().await?;
            match self.fill(socket) {
                Err(error) if error.kind() != io::ErrorKind::WouldBlock => return Err(error),
                _ => {}
            }
        }
    }

    /// Hands over all plaintext that has come, in order.
    pub(super) fn open(&mut self, sink: &mut dyn FnMut(&[u8])) -> io::Result<()> {
        if !self.early.is_empty() {
            sink(&std::mem::take(&mut self.early));
        }
        match self.advance(sink)? {
            Next::Closed => Err(io::ErrorKind::ConnectionAborted.into()),
            _ => Ok(()),
        }
    }

    /// Adds `plain` to what is to be written. All that has come must have been
    /// [opened](Self::open).
    pub(super) fn seal(&mut self, plain: &[u8]) -> io::Result<()> {
        /// What a record adds to its plaintext, and how much of that it holds.
        const OVERHEAD: usize = 5 + 1 + 16;
        const RECORD: usize = 16 << 10;
        let mut room = plain.len() + (plain.len().div_ceil(RECORD) + 1) * OVERHEAD;
        loop {
            let Self { tls, incoming, outgoing, .. } = self;
            let came = &mut incoming.bytes[incoming.filled.clone()];
            let (discard, sealed) = match tls {
                Tls::Client(tls) => seal(tls.process_tls_records(came), plain, outgoing.room(room)),
                Tls::Server(tls) => seal(tls.process_tls_records(came), plain, outgoing.room(room)),
            };
            incoming.consume(discard);
            match sealed? {
                Sealed::All(bytes) => {
                    self.outgoing.add(bytes);
                    return Ok(());
                }
                Sealed::Other(bytes) => self.outgoing.add(bytes),
                Sealed::NeedsRoom(bytes) => room = bytes,
            }
        }
    }

    /// Writes what can be written; `true` if that was all.
    pub(super) fn write(&mut self, socket: &TcpStream) -> io::Result<bool> {
        while !self.outgoing.is_empty() {
            match socket.try_write(self.outgoing.filled()) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(bytes) => self.outgoing.consume(bytes),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(false),
                Err(error) => return Err(error),
            }
        }
        Ok(true)
    }

    pub(super) async fn flush(&mut self, socket: &TcpStream) -> io::Result<()> {
        while !self.write(socket)? {
            socket.writable().await?;
        }
        Ok(())
    }

    /// Works through what has come. Data goes to `sink`, and answers to what is to be written.
    fn advance(&mut self, sink: &mut dyn FnMut(&[u8])) -> io::Result<Next> {
        loop {
            match self.advance_once(sink)? {
                Next::More => {}
                next => return Ok(next),
            }
        }
    }

    fn advance_once(&mut self, sink: &mut dyn FnMut(&[u8])) -> io::Result<Next> {
        let Self { tls, incoming, outgoing, .. } = self;
        let came = &mut incoming.bytes[incoming.filled.clone()];
        let (discard, next) = match tls {
            Tls::Client(tls) => step(tls.process_tls_records(came), outgoing, sink),
            Tls::Server(tls) => step(tls.process_tls_records(came), outgoing, sink),
        };
        incoming.consume(discard);
        next
    }
}

/// Does what rustls asks for; also says how many bytes of what came are done with.
fn step<Data>(
    status: UnbufferedStatus<'_, '_, Data>,
    outgoing: &mut Buffer,
    sink: &mut dyn FnMut(&[u8]),
) -> (usize, io::Result<Next>) {
    let mut discard = status.discard;
    let state = match status.state {
        Ok(state) => state,
        Err(error) => return (discard, Err(io::Error::new(io::ErrorKind::InvalidData, error))),
    };
    let next = match state {
        ConnectionState::ReadTraffic(mut traffic) => loop {
            match traffic.next_record() {
                None => break Ok(Next::More),
                Some(Ok(record)) => {
                    discard += record.discard;
                    sink(record.payload);
                }
                Some(Err(error)) => break Err(io::Error::new(io::ErrorKind::InvalidData, error)),
            }
        },
        ConnectionState::EncodeTlsData(mut data) => {
            let mut room = 0;
            loop {
                match data.encode(outgoing.room(room)) {
                    Ok(bytes) => {
                        outgoing.add(bytes);
                        break Ok(Next::More);
                    }
                    Err(EncodeError::InsufficientSize(InsufficientSizeError { required_size })) => {
                        room = required_size;
                    }
                    Err(error) => break Err(io::Error::other(error)),
                }
            }
        }
        ConnectionState::TransmitTlsData(data) => {
            data.done(); // it is written before anything that comes later
            Ok(Next::More)
        }
        ConnectionState::BlockedHandshake => Ok(Next::Read),
        ConnectionState::WriteTraffic(_) => Ok(Next::Ready),
        ConnectionState::PeerClosed | ConnectionState::Closed => Ok(Next::Closed),
        _ => Err(io::Error::other("TLS is in a state that was not asked for")),
    };
    (discard, next)
}

enum Sealed {
    All(usize),
    /// Something of TLS's own had to go first, of this length.
    Other(usize),
    NeedsRoom(usize),
}

fn seal<Data>(
    status: UnbufferedStatus<'_, '_, Data>,
    plain: &[u8],
    room: &mut [u8],
) -> (usize, io::Result<Sealed>) {
    let sealed = match status.state {
        Err(error) => Err(io::Error::new(io::ErrorKind::InvalidData, error)),
        Ok(ConnectionState::WriteTraffic(mut traffic)) => match traffic.encrypt(plain, room) {
            Ok(bytes) => Ok(Sealed::All(bytes)),
            Err(EncryptError::InsufficientSize(InsufficientSizeError { required_size })) => {
                Ok(Sealed::NeedsRoom(required_size))
            }
            Err(error) => Err(io::Error::other(error)),
        },
        Ok(ConnectionState::EncodeTlsData(mut data)) => {
            data.encode(room).map(Sealed::Other).map_err(io::Error::other)
        }
        Ok(ConnectionState::TransmitTlsData(data)) => {
            data.done(); // it is written before anything that comes later
            Ok(Sealed::Other(0))
        }
        Ok(_) => Err(io::ErrorKind::NotConnected.into()),
    };
    (status.discard, sealed)
}
