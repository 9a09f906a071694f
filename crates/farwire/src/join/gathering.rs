//! Waiting for the higher ranks, until all of them are there at once.

use std::sync::Arc;
use std::time::Duration;

use farwire_proto::Peer;
use quinn::Connection;
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep, timeout_at};

use super::refusals::Refusals;
use super::rendezvous::{Acquaintance, Answer, Purpose, turn_away, write};
use crate::quic::transport::KEEP_ALIVE;

/// A process that is alive is heard of in this time, since its connection is kept alive.
const SIGN_OF_LIFE: Duration = Duration::from_millis(KEEP_ALIVE.as_millis() as u64 + 1500);
/// How often to look who has answered the roll call.
const LOOK: Duration = Duration::from_millis(2);

/// A process of this job.
#[derive(Debug)]
pub(crate) struct Newcomer {
    pub(crate) process: u64,
    pub(crate) purpose: Purpose,
    pub(crate) known: Box<Acquaintance>,
    /// If another process has come as this rank before: packets of that one, up to when this one came.
    pub(super) heard_before: Option<u64>,
}

/// Who has come, and who has not.
pub(super) struct Gathering {
    me: Peer,
    /// By rank.
    pub(super) peers: Vec<Option<Acquaintance>>,
    /// The processes that higher ranks have come as.
    processes: Vec<Option<u64>>,
    expected: Vec<u32>,
    door: mpsc::Sender<Newcomer>,
    refusals: Arc<Refusals>,
}

impl Gathering {
    /// Of those that come through `door`, to one that knows the lower ranks.
    pub(super) fn new(
        me: Peer,
        peers: Vec<Option<Acquaintance>>,
        door: mpsc::Sender<Newcomer>,
        refusals: Arc<Refusals>,
    ) -> Self {
        let expected = (me.0 + 1..peers.len() as u32).collect();
        Self { me, processes: vec![None; peers.len()], peers, expected, door, refusals }
    }

    /// Waits until all are there, or until the deadline: then, who is not.
    pub(super) async fn complete(
        &mut self,
        newcomers: &mut mpsc::Receiver<Newcomer>,
        deadline: Instant,
    ) -> Result<(), String> {
        loop {
            while !self.expected.is_empty() {
                match timeout_at(deadline, newcomers.recv()).await {
                    Ok(Some(newcomer)) => self.take(newcomer),
                    _ => return Err(names(&self.expected)),
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

    /// Says something to all higher ranks, which their connections will acknowledge if the processes are
    /// still there: the ranks, and how many packets had come from them before.
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
        let (rank, me) = (known.member.rank, self.me);
        // Ranks that are not below the size of the world were refused before.
        if rank <= me.0 {
            let reason = format!(
                "{} should not connect to {me}: of two ranks, the higher one calls the lower",
                Peer(rank)
            );
            return turn_away(known, reason, &self.refusals);
        }
        let again = self.processes[rank as usize] == Some(process);
        let first = self.peers[rank as usize].as_ref();
        if let Some(first) = first.filter(|first| !again && is_open(&first.connection)) {
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
                Some(_) => {} // nothing was heard of it since
            }
        }
        self.peers[rank as usize] = Some(*known);
        self.processes[rank as usize] = Some(process);
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
