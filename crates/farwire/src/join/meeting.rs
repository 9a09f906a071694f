//! How two ranks meet, once rank 0 has told both where the other is.
//!
//! The higher rank calls the lower. If it does not get through for a while, because the lower one
//! is behind NAT or a firewall, the lower one calls the higher, too. That is enough if one of them
//! can be reached.
//!
//! If neither can, they often meet all the same. The lower one *knocks* at once: it sends a byte
//! that means nothing, so that its NAT takes packets from the higher one for an answer, as the
//! other NAT does with packets from the lower one. (A call would do, too, but must not be late:
//! many NATs no longer allow this once a packet has come from outside before one has gone out.)
//!
//! Both calls may get through. Then the lower one decides: it keeps one of the connections, and
//! says who it is on that one only.

use std::collections::BTreeMap;
use std::net::{SocketAddr, UdpSocket};
use std::sync::Arc;
use std::time::Duration;

use farwire_proto::Peer;
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep_until};

use super::calling::Caller;
use super::gathering::Newcomer;
use super::rendezvous::{Acquaintance, Answer, JoinError, MAX_MESSAGE, Member, NONSENSE, Purpose};

/// How long a lower rank waits for a higher one before it calls.
const PATIENCE: Duration = Duration::from_secs(2);

/// What rank 0 knows of all ranks.
type Table = [(Member, Option<SocketAddr>)];

/// Lets the NAT of this process, if there is one, know that higher ranks may call.
pub(super) fn knock(socket: &UdpSocket, me: Peer, table: &Table) {
    for (_, address) in table.iter().skip(me.index() + 1) {
        let _ = address.map(|address| socket.send_to(&[0], address)); // or else there is the call
    }
}

/// Meets all lower ranks but 0. Those that have called this one come through `from_below`.
pub(super) async fn lower(
    caller: Arc<Caller>,
    table: &Table,
    mut from_below: mpsc::Receiver<Newcomer>,
) -> Result<Vec<(Peer, Acquaintance)>, JoinError> {
    let mut ways = JoinSet::new();
    // How many ways may still lead to each rank that has not been met.
    let mut missing = BTreeMap::new();
    // All at once: a call takes several round trips, and there may be many far ranks.
    for (rank, (_, address)) in table.iter().enumerate().take(caller.rank().index()).skip(1) {
        let (peer, caller) = (Peer(rank as u32), caller.clone());
        let reason = "rank 0 does not know its address".to_owned();
        let address = address.ok_or(JoinError::Lost { peer, reason })?;
        missing.insert(peer, 1);
        ways.spawn(async move {
            let met = match caller.connect(peer, address).await {
                Ok(there) => introduced(&caller, peer, there).await,
                Err(error) => Err(error),
            };
            (peer, met)
        });
    }
    let mut met = Vec::new();
    while !missing.is_empty() {
        tokio::select! {
            Some(way) = ways.join_next() => {
                let (peer, there) = way.map_err(|bug| JoinError::Identity(bug.to_string()))?;
                let Some(left) = missing.get_mut(&peer) else { continue };
                match there {
                    Ok(there) => {
                        met.push((peer, there));
                        missing.remove(&peer);
                    }
                    Err(error) if *left == 1 => return Err(error),
                    Err(_) => *left -= 1,
                }
            }
            Some(Newcomer { known, .. }) = from_below.recv() => {
                let peer = Peer(known.member.rank);
                let Some(left) = missing.get_mut(&peer) else { continue };
                *left += 1;
                let caller = caller.clone();
                ways.spawn(async move { (peer, introduced(&caller, peer, *known).await) });
            }
        }
    }
    Ok(met)
}

/// Waits until a lower rank says who it is.
async fn introduced(
    caller: &Caller,
    peer: Peer,
    mut there: Acquaintance,
) -> Result<Acquaintance, JoinError> {
    match caller.answer(peer, &mut there, MAX_MESSAGE).await? {
        Answer::Member(member) => there.member = member,
        _ => return Err(JoinError::Lost { peer, reason: NONSENSE.to_owned() }),
    }
    Ok(there)
}

/// Calls to higher ranks that have not come after a while. Those that answer come in by the door,
/// as if they had called.
pub(super) struct Calls<'a> {
    caller: &'a Arc<Caller>,
    table: &'a Table,
    door: &'a mpsc::Sender<Newcomer>,
    /// When to make them; `None` if they were made, or will not be.
    due: Option<Instant>,
    /// The calls under way, which end when this is dropped.
    made: JoinSet<()>,
}

impl<'a> Calls<'a> {
    /// Rank 0 makes none: its table is empty, and all have to reach it anyway.
    pub(super) fn new(
        caller: &'a Arc<Caller>,
        table: &'a Table,
        door: &'a mpsc::Sender<Newcomer>,
    ) -> Self {
        let due = (!table.is_empty()).then(|| Instant::now() + PATIENCE);
        Self { caller, table, door, due, made: JoinSet::new() }
    }

    /// Waits until it is time for the calls; forever if they were made, or will not be.
    pub(super) async fn are_due(&self) {
        match self.due {
            Some(due) => sleep_until(due).await,
            None => std::future::pending().await,
        }
    }

    /// Calls these ranks.
    pub(super) fn make(&mut self, ranks: &[u32]) {
        self.due = None;
        for rank in ranks {
            let (member, Some(address)) = self.table[*rank as usize].clone() else { continue };
            let (caller, door) = (self.caller.clone(), self.door.clone());
            self.made.spawn(async move {
                let Ok(mut there) = caller.connect(Peer(member.rank), address).await else {
                    return; // it may still come
                };
                there.member = member;
                let (purpose, known) = (Purpose::Start, Box::new(there));
                let called = Newcomer { process: None, purpose, known, heard_before: None };
                let _ = door.send(called).await; // unless all are there
            });
        }
    }
}
