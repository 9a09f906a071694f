//! What can go wrong with an operation once it has started, and how the news travels.
//!
//! Every fault but a message's missed deadline ends its communicator: each operation pending on it
//! fails with an [`OpError`], later calls on it fail at once with the same error, and each rank
//! that learns of it tells all members (so the news arrives even if its first bearer dies
//! half-way).

use std::fmt;

use crate::fingerprint::Fingerprint;
use crate::header::{
    FAULT_LEN, FINGERPRINT_LEN, HeaderError, decode_fingerprint, encode_fingerprint,
};
use crate::ids::{CommId, OpSeq, Peer};

/// What went wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Fault {
    /// A peer died, stopped answering or cannot be reached.
    PeerLost(Peer),
    /// Two ranks called different things as the same operation of a communicator.
    Desync(Called, Called),
    /// A rank waited longer than its deadline.
    TimedOut {
        /// The rank that waited.
        by: Peer,
        /// One that it waited for.
        waiting_for: Peer,
        /// How many more it waited for.
        others: u32,
    },
    /// The group has changed, and another communicator takes the place of this one.
    Replaced {
        /// The rank that still had the communicator.
        by: Peer,
    },
    /// A peer sent a frame that does not fit the operation, or a parcel that makes no sense: a bug
    /// or a hostile peer.
    BadFrame(Peer),
}

/// What a rank called.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Called {
    /// The rank.
    pub peer: Peer,
    /// The call.
    pub fingerprint: Fingerprint,
}

impl Fault {
    /// Who is at fault, as far as can be told: the lost, missing or misbehaving peer, or the one
    /// that called something else.
    pub fn peer(&self) -> Peer {
        match *self {
            Self::PeerLost(peer) | Self::BadFrame(peer) => peer,
            Self::Desync(_, theirs) => theirs.peer,
            Self::TimedOut { waiting_for, .. } => waiting_for,
            Self::Replaced { by } => by,
        }
    }

    /// The fault as the payload of an abort frame.
    pub fn encode(&self) -> [u8; FAULT_LEN] {
        let mut bytes = [0; FAULT_LEN];
        let mut put =
            |at: usize, value: u32| bytes[at..at + 4].copy_from_slice(&value.to_le_bytes());
        match self {
            Self::PeerLost(peer) => {
                put(0, 1);
                put(4, peer.0);
            }
            Self::Desync(one, other) => {
                put(0, 2);
                put(4, one.peer.0);
                put(8, other.peer.0);
                let prints = [one, other].map(|called| encode_fingerprint(&called.fingerprint, 0));
                bytes[12..].copy_from_slice(prints.as_flattened());
            }
            Self::TimedOut { by, waiting_for, others } => {
                put(0, 3);
                put(4, by.0);
                put(8, waiting_for.0);
                put(12, *others);
            }
            Self::Replaced { by } => {
                put(0, 5);
                put(4, by.0);
            }
            Self::BadFrame(peer) => {
                put(0, 4);
                put(4, peer.0);
            }
        }
        bytes
    }

    /// Reads what [`encode`](Self::encode) wrote.
    pub fn decode(bytes: &[u8]) -> Result<Self, HeaderError> {
        let bytes: &[u8; FAULT_LEN] = bytes.try_into().map_err(|_| HeaderError::Field("fault"))?;
        let word = |at: usize| {
            let word = bytes[at..]
                .first_chunk()
                .expect("offsets in this file lie inside the fixed layout");
            u32::from_le_bytes(*word)
        };
        let called = |peer_at: usize, print_at: usize| {
            let print =
                bytes[print_at..].first_chunk().expect("two fingerprints fit behind the ranks");
            let (fingerprint, _) = decode_fingerprint(print)?;
            Ok(Called { peer: Peer(word(peer_at)), fingerprint })
        };
        let fault = match word(0) {
            1 => Self::PeerLost(Peer(word(4))),
            2 => Self::Desync(called(4, 12)?, called(8, 12 + FINGERPRINT_LEN)?),
            3 => Self::TimedOut { by: Peer(word(4)), waiting_for: Peer(word(8)), others: word(12) },
            4 => Self::BadFrame(Peer(word(4))),
            5 => Self::Replaced { by: Peer(word(4)) },
            _ => return Err(HeaderError::Field("fault")),
        };
        // Bytes that do not apply must be zero, so that a fault has one encoding.
        if fault.encode() == *bytes { Ok(fault) } else { Err(HeaderError::Field("fault")) }
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.describe(f, &Peer::to_string)
    }
}

impl Fault {
    fn describe(&self, f: &mut fmt::Formatter<'_>, name: &dyn Fn(&Peer) -> String) -> fmt::Result {
        match self {
            Self::PeerLost(peer) => write!(
                f,
                "{} is lost (it died, stopped answering or cannot be reached); \
                 restart it, or form a new group without it",
                name(peer)
            ),
            Self::Desync(one, other) => write!(
                f,
                "ranks are out of step: {} called {} but {} called {} (they differ in {}); \
                 make all ranks call the same operations in the same order",
                name(&one.peer),
                one.fingerprint,
                name(&other.peer),
                other.fingerprint,
                one.fingerprint.differences(&other.fingerprint).join(", ")
            ),
            Self::TimedOut { by, waiting_for, others } => {
                write!(f, "{} waited past its deadline for {}", name(by), name(waiting_for))?;
                if *others > 0 {
                    write!(f, " and {others} more")?;
                }
                write!(
                    f,
                    "; look there for a rank that skipped this call or is slow, or set a longer deadline"
                )
            }
            Self::Replaced { by } => write!(
                f,
                "the group has changed since {} got this communicator; use the one that `shrink` or \
                 `admit` returned",
                name(by)
            ),
            Self::BadFrame(peer) => write!(
                f,
                "{} sent a frame that does not fit the operation; \
                 check that it runs the same version of farwire, and what its log says",
                name(peer)
            ),
        }
    }
}

/// Why an operation failed. Its input is untouched, unless it worked in place.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{operation} {seq}{} failed: {fault}{}", on(*comm), reported(*reporter, *here))]
pub struct OpError {
    /// What this rank had called.
    pub operation: Fingerprint,
    /// The communicator it was called on.
    pub comm: CommId,
    /// Its number on that communicator.
    pub seq: OpSeq,
    /// What went wrong.
    pub fault: Fault,
    /// The rank that found out.
    pub reporter: Peer,
    /// The rank that returns the error.
    pub here: Peer,
}

impl OpError {
    /// The same text, for a communicator of these members: it names ranks by their numbers in the
    /// group and in the world.
    pub fn in_group<'a>(&'a self, members: &'a [Peer]) -> impl fmt::Display + 'a {
        InGroup { error: self, members }
    }
}

struct InGroup<'a> {
    error: &'a OpError,
    members: &'a [Peer],
}

impl fmt::Display for InGroup<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let OpError { operation, comm, seq, fault, reporter, here } = self.error;
        let name = |peer: &Peer| match self.members.iter().position(|member| member == peer) {
            Some(rank) => format!("rank {rank} of the group ({peer} of the world)"),
            None => format!("{peer} of the world"),
        };
        write!(f, "{operation} {seq} on communicator {:016x} failed: ", comm.0)?;
        fault.describe(f, &name)?;
        if reporter != here {
            write!(f, " (reported by {})", name(reporter))?;
        }
        Ok(())
    }
}

/// Names the communicator, unless it is the world: the ranks that a fault names are the world's.
fn on(comm: CommId) -> String {
    if comm == CommId::WORLD {
        String::new()
    } else {
        format!(" on communicator {:016x} (ranks named are the world's)", comm.0)
    }
}

fn reported(reporter: Peer, here: Peer) -> String {
    if reporter == here { String::new() } else { format!(" (reported by {reporter})") }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::header::tests::any_fingerprint;

    fn any_fault() -> impl Strategy<Value = Fault> {
        let called = || {
            (any::<u32>(), any_fingerprint())
                .prop_map(|(peer, fingerprint)| Called { peer: Peer(peer), fingerprint })
        };
        prop_oneof![
            any::<u32>().prop_map(|peer| Fault::PeerLost(Peer(peer))),
            (called(), called()).prop_map(|(one, other)| Fault::Desync(one, other)),
            any::<[u32; 3]>().prop_map(|[by, peer, others]| Fault::TimedOut {
                by: Peer(by),
                waiting_for: Peer(peer),
                others
            }),
            any::<u32>().prop_map(|peer| Fault::BadFrame(Peer(peer))),
            any::<u32>().prop_map(|by| Fault::Replaced { by: Peer(by) }),
        ]
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(4096))]

        #[test]
        fn faults_round_trip(fault in any_fault()) {
            prop_assert_eq!(Fault::decode(&fault.encode()), Ok(fault));
        }

        #[test]
        fn mutated_faults_never_panic(
            fault in any_fault(),
            changes in prop::collection::vec((0..FAULT_LEN, any::<u8>()), 0..4),
        ) {
            let mut bytes = fault.encode();
            for (at, value) in changes {
                bytes[at] = value;
            }
            if let Ok(decoded) = Fault::decode(&bytes) {
                prop_assert_eq!(decoded.encode(), bytes);
            }
        }
    }
}
