//! What engines tell each other besides data: what they have called, given up, or found broken.

use super::ahead::Channel;
use super::inbox::Inbox;
use super::{Engine, MAX_EARLY_FAULTS, Payload};
use crate::call::Algorithm;
use crate::collective::Kind;
use crate::dtype::DType;
use crate::fault::Fault;
use crate::fingerprint::Fingerprint;
use crate::header::{FrameKind, Header, HeaderError};
use crate::ids::{CommId, Epoch, Peer};

impl Engine {
    pub(super) fn notify(&mut self, to: Peer, frame: FrameKind, channel: Channel, number: u64) {
        self.queues.notices.push_back(notice(to, frame, self.config.epoch, channel, number));
    }

    /// Asks a peer about operations that wait for its call.
    pub(super) fn ask(&mut self, peer: Peer) {
        while let Some((channel, number)) = self.ahead[peer.index()].next_ask() {
            self.notify(peer, FrameKind::Ask, channel, number);
        }
    }

    /// A peer has called all operations of a channel before `number`.
    pub(super) fn peer_called(&mut self, peer: Peer, channel: Channel, number: u64) {
        self.ahead[peer.index()].called(channel, number, &mut self.queues.ready);
        self.ask(peer);
    }

    /// A notice has arrived: a frame of any kind but [`FrameKind::Data`].
    pub fn handle_notice(
        &mut self,
        from: Peer,
        header: &Header,
        payload: &[u8],
    ) -> Result<(), HeaderError> {
        let fault = match header.frame {
            FrameKind::Abort => Some(Fault::decode(payload)?),
            _ => None,
        };
        if header.epoch != self.config.epoch || from.0 >= self.world.get() {
            return Ok(());
        }
        let (channel, number) = Channel::of(header.comm, header.seq);
        match (header.frame, fault) {
            (FrameKind::Abort, Some(fault)) => self.handle_abort(from, header.comm, fault),
            (FrameKind::Ask, _) => self.handle_ask(from, channel, number),
            (FrameKind::Called, _) => self.peer_called(from, channel, number.saturating_add(1)),
            (FrameKind::Void, _) => self.handle_void(from, channel, number),
            (FrameKind::Abort | FrameKind::Data | FrameKind::Members, _) => {}
        }
        Ok(())
    }

    /// A communicator has failed on another rank.
    fn handle_abort(&mut self, from: Peer, id: CommId, fault: Fault) {
        match self.comms.get(&id) {
            Some(comm) if comm.ranks.contains_key(&from) => self.fail_comm(id, fault, from),
            Some(_) => {}
            None if !self.closed.contains(&id) => {
                let told = self.early_faults.entry(from).or_default();
                if told.len() < MAX_EARLY_FAULTS {
                    told.push((id, fault));
                }
            }
            None => {}
        }
    }

    /// A peer waits for this rank to call an operation.
    fn handle_ask(&mut self, from: Peer, channel: Channel, number: u64) {
        let called = match (self.comms.get(&channel.comm), channel.tag) {
            (Some(comm), _) if !comm.ranks.contains_key(&from) => return,
            // Whatever is sent is dropped, so it may come.
            (Some(comm), _) if comm.closed || comm.failed.is_some() => u64::MAX,
            (Some(comm), None) => comm.next_collective,
            (Some(_), Some(_)) => self.inboxes.get(&(from, channel)).map_or(0, Inbox::called),
            (None, _) if self.closed.contains(&channel.comm) => u64::MAX,
            (None, _) => 0,
        };
        if number < called {
            self.notify(from, FrameKind::Called, channel, number);
        } else {
            self.ahead[from.index()].asked(channel, number);
        }
    }
}

/// A notice about one operation.
pub(super) fn notice(
    to: Peer,
    frame: FrameKind,
    epoch: Epoch,
    channel: Channel,
    number: u64,
) -> (Peer, Header, Payload) {
    let fingerprint =
        notice_fingerprint(if channel.tag.is_some() { Kind::Message } else { Kind::Barrier });
    let (comm, seq) = (channel.comm, channel.seq(number));
    (to, Header { frame, payload: 0, comm, epoch, seq, index: 0, fingerprint }, Payload::Nothing)
}

/// The fingerprint in a notice's header: it names no call in particular.
pub(crate) fn notice_fingerprint(kind: Kind) -> Fingerprint {
    Fingerprint {
        kind,
        algorithm: Algorithm::Direct,
        dtype: (kind == Kind::Message).then_some(DType::U8),
        op: None,
        count: 0,
        root: None,
        codec: 0,
        segment: 0,
        layout: 0,
    }
}
