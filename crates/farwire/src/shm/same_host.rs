//! Shared memory with a peer on the same host.
//!
//! Two processes that name the same host try this: one listens on a socket that only this host has,
//! the other connects to it with a word that it was told over the authenticated connection, and
//! they pass each other the files behind the memory. Success proves what the name only suggests. If
//! it fails (containers with separate networks, a limit on files) the two use QUIC, and say so in
//! the log.
//!
//! The name of such a socket can be seen by every user of the host. Connections of other users are
//! dropped at once, and those of this user are served side by side, so none can delay the peer.

use std::io::{self, IoSlice, IoSliceMut, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::time::Duration;

use farwire_proto::Peer;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags,
};
use tokio::io::AsyncReadExt;
use tokio::task::JoinSet;

use super::bell::Bell;
use super::ring::{self, Receiver, Sender};

/// How long the exchange may take. This is long, because ranks may outnumber cores by far. That a
/// peer is lost or cannot share memory is found out by other means.
const PATIENCE: Duration = Duration::from_secs(60);
/// Connections that are waited on at once. The peer makes one.
const MAX_CONNECTIONS: usize = 64;

/// What the two ends of an exchange give each other.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) sender: Sender,
    pub(crate) receiver: Receiver,
    /// The peer's bell.
    pub(crate) bell: Bell,
    /// Open for as long as the peer lives.
    pub(crate) lifeline: UnixStream,
}

/// Where to meet.
#[derive(Debug)]
pub(crate) struct Offer {
    listener: UnixListener,
    /// The peer is told both, and nobody else is told the word.
    pub(crate) name: String,
    pub(crate) word: String,
}

impl Offer {
    pub(crate) fn new() -> io::Result<Self> {
        let random = || {
            let mut bytes = [0; 16];
            aws_lc_rs::rand::fill(&mut bytes).map_err(|_| io::Error::other("no randomness"))?;
            Ok::<_, io::Error>(bytes.iter().map(|byte| format!("{byte:02x}")).collect::<String>())
        };
        let name = format!("farwire-{}", random()?);
        let listener = UnixListener::bind_addr(&SocketAddr::from_abstract_name(&name)?)?;
        listener.set_nonblocking(true)?;
        Ok(Self { listener, name, word: random()? })
    }

    /// Waits for the peer, gives it two rings and this process's bell, and takes its bell.
    pub(crate) async fn meet(self, peer: Peer, payload: usize, bell: Bell) -> io::Result<Shared> {
        let listener = tokio::net::UnixListener::from_std(self.listener)?;
        let deadline = tokio::time::Instant::now() + PATIENCE;
        let user = rustix::process::geteuid();
        let mut listening = JoinSet::new();
        let stream = loop {
            let spoken = tokio::select! {
                accepted = listener.accept(), if listening.len() < MAX_CONNECTIONS => {
                    let (stream, _) = accepted?;
                    // A process that does not know the word is not the peer.
                    if rustix::net::sockopt::socket_peercred(&stream)?.uid == user {
                        listening.spawn(knows(stream, self.word.clone()));
                    }
                    continue;
                }
                Some(spoken) = listening.join_next() => spoken,
                () = tokio::time::sleep_until(deadline) => return Err(io::ErrorKind::TimedOut.into()),
            };
            if let Ok(Some(stream)) = spoken {
                break stream.into_std()?;
            }
        };
        tokio::task::spawn_blocking(move || exchange(stream, peer, payload, &bell)).await?
    }
}

/// The stream, if the word is the first thing that comes from it.
async fn knows(mut stream: tokio::net::UnixStream, word: String) -> Option<tokio::net::UnixStream> {
    let mut said = vec![0; word.len()];
    let read = tokio::time::timeout(PATIENCE, stream.read_exact(&mut said)).await;
    (matches!(read, Ok(Ok(_))) && said == word.as_bytes()).then_some(stream)
}

/// The exchange, on the side that made the offer.
fn exchange(mut stream: UnixStream, peer: Peer, payload: usize, bell: &Bell) -> io::Result<Shared> {
    stream.set_nonblocking(false)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    let there = ring::region(payload)?;
    let back = ring::region(payload)?;
    send_files(&mut stream, &[there.file(), back.file(), bell.file()])?;
    let [theirs] = receive_files(&mut stream)?;
    stream.set_nonblocking(true)?;
    Ok(Shared {
        sender: Sender::new(there, payload),
        receiver: Receiver::new(back, payload, peer),
        bell: Bell::from_file(theirs)?,
        lifeline: stream,
    })
}

/// Takes up a peer's offer.
pub(crate) fn accept(
    name: &str,
    word: &str,
    peer: Peer,
    payload: usize,
    bell: &Bell,
) -> io::Result<Shared> {
    let mut stream = UnixStream::connect_addr(&SocketAddr::from_abstract_name(name)?)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    stream.write_all(word.as_bytes())?;
    let [back, there, theirs] = receive_files(&mut stream)?;
    send_files(&mut stream, &[bell.file()])?;
    stream.set_nonblocking(true)?;
    Ok(Shared {
        sender: Sender::new(ring::region_from(there, payload)?, payload),
        receiver: Receiver::new(ring::region_from(back, payload)?, payload, peer),
        bell: Bell::from_file(theirs)?,
        lifeline: stream,
    })
}

fn send_files(stream: &mut UnixStream, files: &[BorrowedFd<'_>]) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(3))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !control.push(SendAncillaryMessage::ScmRights(files)) {
        return Err(io::Error::other("too many files for one message"));
    }
    rustix::net::sendmsg(
        stream.as_fd(),
        &[IoSlice::new(&[files.len() as u8])],
        &mut control,
        SendFlags::NOSIGNAL,
    )?;
    Ok(())
}

fn receive_files<const N: usize>(stream: &mut UnixStream) -> io::Result<[OwnedFd; N]> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(3))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut count = [0];
    rustix::net::recvmsg(
        stream.as_fd(),
        &mut [IoSliceMut::new(&mut count)],
        &mut control,
        RecvFlags::CMSG_CLOEXEC,
    )?;
    let mut files = Vec::new();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(received) = message {
            files.extend(received);
        }
    }
    files.try_into().map_err(|_| io::Error::other("the peer passed other files than it should"))
}

#[cfg(test)]
mod tests {
    use std::io::Read;

    use super::*;
    use crate::shm::region::Region;

    fn runtime() -> tokio::runtime::Runtime {
        tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap()
    }

    #[test]
    fn silent_strangers_do_not_keep_the_peer_waiting() {
        let (mine, theirs) = (Bell::new().unwrap(), Bell::new().unwrap());
        let offer = Offer::new().unwrap();
        let (name, word) = (offer.name.clone(), offer.word.clone());
        let address = SocketAddr::from_abstract_name(&name).unwrap();
        // Waiting for one after the other would take longer than the meeting may.
        let strangers = [(); 3].map(|()| UnixStream::connect_addr(&address).unwrap());
        let met = std::thread::scope(|scope| {
            let meet = scope.spawn(|| runtime().block_on(offer.meet(Peer(1), 1000, mine)));
            accept(&name, &word, Peer(0), 1000, &theirs).unwrap();
            meet.join().unwrap()
        });
        assert!(met.is_ok());
        drop(strangers);
    }

    #[test]
    fn two_ends_meet_and_pass_a_frame() {
        use farwire_proto::{Call, CommId, Config, Engine, Options, Time, WorldSize};

        let (mine, theirs) = (Bell::new().unwrap(), Bell::new().unwrap());
        let offer = Offer::new().unwrap();
        let (name, word) = (offer.name.clone(), offer.word.clone());
        let payload = 1000;
        let (mut here, mut there) = std::thread::scope(|scope| {
            let meet = scope.spawn(|| runtime().block_on(offer.meet(Peer(1), payload, mine)));
            // A stranger on the same host who does not know the word is passed over.
            let stranger = accept(&name, &"0".repeat(word.len()), Peer(0), payload, &theirs);
            assert!(stranger.is_err());
            let there = accept(&name, &word, Peer(0), payload, &theirs).unwrap();
            (meet.join().unwrap().unwrap(), there)
        });
        let mut engine = Engine::new(Peer(0), WorldSize::new(2).unwrap(), Config::default());
        let plan = engine.plan(CommId::WORLD, &Call::Barrier, &Options::default()).unwrap();
        engine.submit(Time::ZERO, plan).unwrap();
        let frame = engine.poll_transmit().unwrap();
        assert!(here.sender.send(None, &frame.header, &[]));
        let listening = theirs.listen();
        here.bell.ring();
        listening.sleep(Duration::from_secs(3600));
        assert!(there.receiver.poll_arrived().unwrap().is_some());
        drop(here.lifeline);
        let mut byte = [0];
        assert_eq!(there.lifeline.read(&mut byte).unwrap(), 0, "the end of the peer is seen");
    }

    #[test]
    fn files_that_could_shrink_or_are_too_short_are_refused() {
        use rustix::fs::{MemfdFlags, memfd_create};
        let unsealed =
            memfd_create("test", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
        rustix::fs::ftruncate(&unsealed, 1 << 30).unwrap();
        assert!(Region::from_file(unsealed, 1, 1).is_err());
        let short = Region::new(1, 1).unwrap();
        let file = short.file().try_clone_to_owned().unwrap();
        assert!(Region::from_file(file, 1, 1 << 20).is_err());
    }
}
