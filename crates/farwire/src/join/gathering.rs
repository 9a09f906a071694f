//! Waiting for the higher ranks, until all of them are there at once.

use std::sync::Arc;
use std::time::Duration;

use farwire_proto::{Peer, WorldSize};
use quinn::Connection;
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep, sleep_until};

use super::meeting::Calls;
use super::refusals::Refusals;
use super::rendezvous::{Acquaintance, Answer, Purpose, turn_away, write};
use crate::quic::transport::KEEP_ALIVE;

/// A live process is heard from within this time, since its connection is kept alive.
const SIGN_OF_LIFE: Duration = Duration::from_millis(KEEP_ALIVE.as_millis() as u64 + 1500);
/// How often to check which ranks have answered the roll call.
const LOOK: Duration = Duration::from_millis(2);

/// A process of this job.
#[derive(Debug)]
pub(crate) struct Newcomer {
    /// Its number for itself; `None` if it was called, and did not come by itself.
    pub(crate) process: Option<u64>,
    pub(crate) purpose: Purpose,
    pub(crate) known: Box<Acquaintance>,
    /// If another process came as this rank before: how many packets had come from that one when
    /// this one came.
    pub(super) heard_before: Option<u64>,
}

/// Who has come, and who has not.
pub(super) struct Gathering {
    me: Peer,
    /// By rank.
    pub(super) peers: Vec<Option<Acquaintance>>,
    /// By rank: the process that a higher rank has come as.
    processes: Vec<Option<u64>>,
    expected: Vec<u32>,
    door: mpsc::Sender<Newcomer>,
    refusals: Arc<Refusals>,
}

impl Gathering {
    /// A gathering of the processes that come through `door`.
    pub(super) fn new(
        me: Peer,
        world: WorldSize,
        door: mpsc::Sender<Newcomer>,
        refusals: Arc<Refusals>,
    ) -> Self {
        let peers = (0..world.get()).map(|_| None).collect();
        let expected = (me.0 + 1..world.get()).collect();
        Self { me, processes: vec![None; world.len()], peers, expected, door, refusals }
    }

    /// Waits until all ranks are there; at the deadline, the error names those that are not. Ranks
    /// that do not come are called after a while.
    pub(super) async fn complete(
        &mut self,
        newcomers: &mut mpsc::Receiver<Newcomer>,
        calls: &mut Calls<'_>,
        deadline: Instant,
    ) -> Result<(), String> {
        loop {
            while !self.expected.is_empty() {
                tokio::select! {
                    Some(newcomer) = newcomers.recv() => self.take(newcomer),
                    () = calls.are_due() => calls.make(&self.expected),
                    () = sleep_until(deadline) => return Err(names(&self.expected)),
                }
            }
            let mut silent = self.call_roll().await;
            while !silent.is_empty() {
                tokio::select! {
                    Some(newcomer) = newcomers.recv() => {
                        self.take(newcomer);
                        break;
                    }
                    () = sleep(LOOK) => silent.retain(|(rank, before)| self.heard(*rank) == *before),
                }
                if Instant::now() >= deadline {
                    let silent: Vec<_> = silent.into_iter().map(|(rank, _)| rank).collect();
                    return Err(names(&silent));
                }
            }
            if silent.is_empty() && self.expected.is_empty() {
                return Ok(());
            }
        }
    }

    /// Sends something to all higher ranks, which their connections will acknowledge if the
    /// processes are still there. Returns the ranks, each with the number of packets that had come
    /// from it before.
    async fn call_roll(&mut self) -> Vec<(u32, u64)> {
        let mut silent = Vec::new();
        for rank in self.me.0 + 1..self.peers.len() as u32 {
            silent.push((rank, self.heard(rank)));
            if let Some(peer) = &mut self.peers[rank as usize] {
                let _ = write(&mut peer.to, &Answer::Heard).await; // one that is lost stays silent
            }
        }
        silent
    }

    /// Packets that have come from a rank.
    fn heard(&self, rank: u32) -> u64 {
        let peer = self.peers[rank as usize].as_ref();
        peer.map_or(0, |peer| peer.connection.stats().udp_rx.datagrams)
    }

    fn take(&mut self, newcomer: Newcomer) {
        let Newcomer { process, purpose, known, heard_before } = newcomer;
        let rank = known.member.rank;
        // Ranks that are not below the size of the world were refused before.
        if rank == self.me.0 {
            let reason =
                format!("this is {} already; give every process a rank of its own", self.me);
            return turn_away(known, reason, &self.refusals);
        }
        let first = self.peers[rank as usize].as_ref();
        let first = first.filter(|first| is_open(&first.connection));
        if process.is_none() && first.is_some() {
            return; // it has come, after all
        }
        let again = match self.processes[rank as usize] {
            Some(first) => process == Some(first),
            None => true, // it was called, and now comes: it may know the better way
        };
        if let Some(first) = first.filter(|_| !again) {
            let heard = self.heard(rank);
            self.expected.retain(|expected| *expected != rank);
            match heard_before {
                // Which of the two is alive? The first may have been killed and started again.
                None => {
                    self.expected.push(rank);
                    let door = self.door.clone();
                    tokio::spawn(async move {
                        sleep(SIGN_OF_LIFE).await;
                        let heard_before = Some(heard);
                        let contest = Newcomer { process, purpose, known, heard_before };
                        let _ = door.send(contest).await;
                    });
                    return;
                }
                Some(before) if before < heard => {
                    let from = first.connection.remote_address();
                    let reason = format!(
                        "there already is a {}, at {from}; give every process a rank of its own, and \
                         every job a name (FARWIRE_JOB)",
                        Peer(rank)
                    );
                    return turn_away(known, reason, &self.refusals);
                }
                Some(_) => {} // nothing has come from the first since
            }
        }
        self.peers[rank as usize] = Some(*known);
        self.processes[rank as usize] = process;
        self.expected.retain(|expected| *expected != rank);
    }
}

fn is_open(connection: &Connection) -> bool {
    connection.close_reason().is_none()
}

fn names(ranks: &[u32]) -> String {
    let names: Vec<_> = ranks.iter().map(|rank| Peer(*rank).to_string()).collect();
    names.join(", ")
}
