//! What members tell each other, and how it is encoded.
//!
//! A message is a kind and its fields, little-endian, lists with their length before them. Decoding
//! accepts exactly what encoding writes.

use super::view::{MAX_MEMBERS, Member, View};
use super::{Ballot, MAX_READY};
use crate::ids::{Epoch, Peer};

/// Bytes of the shortest message, a [`Nudge`](Message::Nudge).
pub(crate) const MIN_MESSAGE: usize = 6;
/// Bytes of the longest message.
pub const MAX_MESSAGE: usize = 8 << 10;

/// What one member tells another. `epoch` is the number of the view that is being agreed on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Message {
    /// Please lead: I want the group to change.
    Nudge {
        /// The next epoch.
        epoch: Epoch,
        /// I am at a step boundary, to let somebody in.
        admitting: bool,
    },
    /// I lead. Promise to accept nothing older, and say what you know.
    Prepare {
        /// Mine.
        ballot: Ballot,
        /// This is for members at a step boundary: wait until you are at one.
        admitting: bool,
        /// The view before the next, for members that have not heard of it.
        base: View,
    },
    /// The answer to [`Prepare`](Self::Prepare).
    Promise {
        /// The next epoch.
        epoch: Epoch,
        /// The ballot of the question.
        ballot: Ballot,
        /// The newest proposal that is known to have been accepted by somebody.
        accepted: Option<(Ballot, View)>,
        /// Who has died, and whether all they sent has been read.
        dead: Vec<(Peer, bool)>,
        /// Whom this member cannot reach.
        suspects: Vec<Peer>,
        /// Processes that wait to join and have a link to this member.
        ready: Vec<u64>,
    },
    /// I have promised something newer.
    Refuse {
        /// The next epoch.
        epoch: Epoch,
        /// What is refused.
        ballot: Ballot,
        /// What was promised.
        promised: Ballot,
    },
    /// Accept this as the next view.
    Accept {
        /// Mine.
        ballot: Ballot,
        /// The proposal.
        view: View,
    },
    /// I have accepted it. Told to all members, to the leader last.
    Accepted {
        /// The leader's.
        ballot: Ballot,
        /// The proposal.
        view: View,
    },
    /// This is the view.
    Decided {
        /// It is final.
        view: View,
    },
}

/// Bytes that are no message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("not a message about members: {0}")]
pub struct MessageError(&'static str);

impl Message {
    /// A view that is final, if the message names one. A process that waits learns from it that it
    /// has been let in. Whoever was telling it may have died half-way, so any such message will do.
    pub fn decided(&self) -> Option<&View> {
        match self {
            Self::Decided { view } | Self::Prepare { base: view, .. } => Some(view),
            _ => None,
        }
    }

    /// The message as bytes.
    pub fn encode(&self) -> Vec<u8> {
        let mut out = Writer(Vec::with_capacity(64));
        match self {
            Self::Nudge { epoch, admitting } => {
                out.byte(1);
                out.word(epoch.0);
                out.byte(u8::from(*admitting));
            }
            Self::Prepare { ballot, admitting, base } => {
                out.byte(2);
                out.ballot(*ballot);
                out.byte(u8::from(*admitting));
                out.view(base);
            }
            Self::Promise { epoch, ballot, accepted, dead, suspects, ready } => {
                out.byte(3);
                out.word(epoch.0);
                out.ballot(*ballot);
                out.byte(u8::from(accepted.is_some()));
                if let Some((ballot, view)) = accepted {
                    out.ballot(*ballot);
                    out.view(view);
                }
                out.word(dead.len() as u32);
                for (peer, complete) in dead {
                    out.word(peer.0);
                    out.byte(u8::from(*complete));
                }
                out.word(suspects.len() as u32);
                suspects.iter().for_each(|peer| out.word(peer.0));
                out.word(ready.len() as u32);
                ready.iter().for_each(|process| out.long(*process));
            }
            Self::Refuse { epoch, ballot, promised } => {
                out.byte(4);
                out.word(epoch.0);
                out.ballot(*ballot);
                out.ballot(*promised);
            }
            Self::Accept { ballot, view } => {
                out.byte(5);
                out.ballot(*ballot);
                out.view(view);
            }
            Self::Accepted { ballot, view } => {
                out.byte(6);
                out.ballot(*ballot);
                out.view(view);
            }
            Self::Decided { view } => {
                out.byte(7);
                out.view(view);
            }
        }
        out.0
    }

    /// Reads what [`encode`](Self::encode) wrote.
    pub fn decode(bytes: &[u8]) -> Result<Self, MessageError> {
        if bytes.len() > MAX_MESSAGE {
            return Err(MessageError("it is too long"));
        }
        let mut from = Reader(bytes);
        let message = match from.byte()? {
            1 => Self::Nudge { epoch: Epoch(from.word()?), admitting: from.flag()? },
            2 => Self::Prepare {
                ballot: from.ballot()?,
                admitting: from.flag()?,
                base: from.view()?,
            },
            3 => Self::Promise {
                epoch: Epoch(from.word()?),
                ballot: from.ballot()?,
                accepted: if from.flag()? { Some((from.ballot()?, from.view()?)) } else { None },
                dead: from.list(MAX_MEMBERS, |from| Ok((Peer(from.word()?), from.flag()?)))?,
                suspects: from.list(MAX_MEMBERS, |from| Ok(Peer(from.word()?)))?,
                ready: from.list(MAX_READY, Reader::long)?,
            },
            4 => Self::Refuse {
                epoch: Epoch(from.word()?),
                ballot: from.ballot()?,
                promised: from.ballot()?,
            },
            5 => Self::Accept { ballot: from.ballot()?, view: from.view()? },
            6 => Self::Accepted { ballot: from.ballot()?, view: from.view()? },
            7 => Self::Decided { view: from.view()? },
            _ => return Err(MessageError("its kind is unknown")),
        };
        if from.0.is_empty() { Ok(message) } else { Err(MessageError("bytes follow it")) }
    }
}

struct Writer(Vec<u8>);

impl Writer {
    fn byte(&mut self, value: u8) {
        self.0.push(value);
    }

    fn word(&mut self, value: u32) {
        self.0.extend(value.to_le_bytes());
    }

    fn long(&mut self, value: u64) {
        self.0.extend(value.to_le_bytes());
    }

    fn ballot(&mut self, ballot: Ballot) {
        self.word(ballot.round);
        self.word(ballot.leader.0);
    }

    fn view(&mut self, view: &View) {
        self.word(view.epoch().0);
        self.word(view.next_peer());
        self.word(view.members().len() as u32);
        for member in view.members() {
            self.word(member.peer.0);
            self.long(member.process);
        }
    }
}

struct Reader<'a>(&'a [u8]);

impl Reader<'_> {
    fn take<const N: usize>(&mut self) -> Result<[u8; N], MessageError> {
        let (taken, rest) = self.0.split_first_chunk().ok_or(MessageError("it is too short"))?;
        self.0 = rest;
        Ok(*taken)
    }

    fn byte(&mut self) -> Result<u8, MessageError> {
        self.take::<1>().map(|[byte]| byte)
    }

    fn flag(&mut self) -> Result<bool, MessageError> {
        match self.byte()? {
            0 => Ok(false),
            1 => Ok(true),
            _ => Err(MessageError("a flag is neither 0 nor 1")),
        }
    }

    fn word(&mut self) -> Result<u32, MessageError> {
        self.take().map(u32::from_le_bytes)
    }

    fn long(&mut self) -> Result<u64, MessageError> {
        self.take().map(u64::from_le_bytes)
    }

    fn ballot(&mut self) -> Result<Ballot, MessageError> {
        Ok(Ballot { round: self.word()?, leader: Peer(self.word()?) })
    }

    fn list<T>(
        &mut self,
        limit: usize,
        item: impl Fn(&mut Self) -> Result<T, MessageError>,
    ) -> Result<Vec<T>, MessageError> {
        let count = self.word()? as usize;
        if count > limit {
            return Err(MessageError("a list is too long"));
        }
        (0..count).map(|_| item(self)).collect()
    }

    fn view(&mut self) -> Result<View, MessageError> {
        let (epoch, next_peer) = (Epoch(self.word()?), self.word()?);
        let member =
            |from: &mut Self| Ok(Member { peer: Peer(from.word()?), process: from.long()? });
        let members = self.list(MAX_MEMBERS, member)?;
        View::new(epoch, members, next_peer).ok_or(MessageError("its list of members is not one"))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn any_view() -> impl Strategy<Value = View> {
        let members = prop::collection::btree_map(0..u32::MAX - 1, any::<u64>(), 1..=MAX_MEMBERS);
        (any::<u32>(), members).prop_map(|(epoch, members)| {
            let members: Vec<_> = members
                .into_iter()
                .map(|(peer, process)| Member { peer: Peer(peer), process })
                .collect();
            let next = members.last().unwrap().peer.0 + 1;
            View::new(Epoch(epoch), members, next).unwrap()
        })
    }

    fn any_ballot() -> impl Strategy<Value = Ballot> {
        any::<[u32; 2]>().prop_map(|[round, leader]| Ballot { round, leader: Peer(leader) })
    }

    fn any_message() -> impl Strategy<Value = Message> {
        let epoch = || any::<u32>().prop_map(Epoch);
        let peers = || prop::collection::vec(any::<u32>().prop_map(Peer), 0..=MAX_MEMBERS);
        let dead = prop::collection::vec((any::<u32>().prop_map(Peer), any::<bool>()), 0..=256);
        let ready = prop::collection::vec(any::<u64>(), 0..=MAX_READY);
        prop_oneof![
            (epoch(), any::<bool>())
                .prop_map(|(epoch, admitting)| Message::Nudge { epoch, admitting }),
            (any_ballot(), any::<bool>(), any_view())
                .prop_map(|(ballot, admitting, base)| Message::Prepare { ballot, admitting, base }),
            (
                epoch(),
                any_ballot(),
                prop::option::of((any_ballot(), any_view())),
                dead,
                peers(),
                ready
            )
                .prop_map(|(epoch, ballot, accepted, dead, suspects, ready)| {
                    Message::Promise { epoch, ballot, accepted, dead, suspects, ready }
                }),
            (epoch(), any_ballot(), any_ballot()).prop_map(|(epoch, ballot, promised)| {
                Message::Refuse { epoch, ballot, promised }
            }),
            (any_ballot(), any_view()).prop_map(|(ballot, view)| Message::Accept { ballot, view }),
            (any_ballot(), any_view())
                .prop_map(|(ballot, view)| Message::Accepted { ballot, view }),
            any_view().prop_map(|view| Message::Decided { view }),
        ]
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(512))]

        #[test]
        fn messages_round_trip_and_fit_a_frame(message in any_message()) {
            let bytes = message.encode();
            prop_assert!(bytes.len() >= MIN_MESSAGE && bytes.len() <= MAX_MESSAGE);
            prop_assert_eq!(Message::decode(&bytes), Ok(message));
        }

        #[test]
        fn mutated_messages_never_panic_and_have_one_encoding(
            message in any_message(),
            changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..4),
            cut in any::<prop::sample::Index>(),
        ) {
            let mut bytes = message.encode();
            for (at, value) in changes {
                let at = at.index(bytes.len());
                bytes[at] = value;
            }
            for bytes in [&bytes[..], &bytes[..cut.index(bytes.len() + 1)]] {
                if let Ok(decoded) = Message::decode(bytes) {
                    prop_assert_eq!(decoded.encode(), bytes);
                }
            }
        }

        #[test]
        fn nonsense_never_panics(bytes in prop::collection::vec(any::<u8>(), 0..600)) {
            let _ = Message::decode(&bytes);
        }
    }
}
