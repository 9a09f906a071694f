//! The 64 bytes in front of every frame.
//!
//! ```text
//!  0 magic "fw"   2 version   3 frame     4 payload bytes
//!  8 communicator                        16 epoch      20 tag (messages)
//! 24 sequence number                     32 count
//! 40 frame index  44 layout              48 root       52 codec
//! 56 segment      60 kind   61 dtype     62 op         63 algorithm
//! ```
//!
//! All integers are little-endian. [`Header::decode`] accepts exactly what [`Header::encode`]
//! writes: a tag, dtype, op or root that does not apply must be zero (the root: all ones), so that
//! every accepted header has one meaning and one encoding.

use crate::call::Algorithm;
use crate::collective::Kind;
use crate::dtype::{DType, ReduceOp};
use crate::engine::notice_fingerprint;
use crate::fingerprint::Fingerprint;
use crate::ids::{CommId, Epoch, OpSeq, Rank, Tag};
use crate::membership::{MAX_MESSAGE, MIN_MESSAGE};

/// Bytes of an encoded [`Header`]: one cache line.
pub const HEADER_LEN: usize = 64;
/// The wire version this build speaks. Peers of another version are refused.
pub const VERSION: u8 = 4;

pub(crate) const FINGERPRINT_LEN: usize = 32;

/// Bytes of an encoded [`Fault`](crate::Fault), the payload of a [`FrameKind::Abort`].
pub const FAULT_LEN: usize = 12 + 2 * FINGERPRINT_LEN;
const MAGIC: [u8; 2] = *b"fw";
const NO_ROOT: u32 = u32::MAX;

/// What follows the header.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum FrameKind {
    /// One segment of an operation.
    Data = 1,
    /// The news that the communicator has failed: an encoded [`Fault`](crate::Fault).
    Abort = 2,
    /// The sender has frames for this operation and waits to hear that it has been called. No
    /// payload.
    Ask = 3,
    /// The sender has called this operation, and all before it in its order. No payload.
    Called = 4,
    /// The sender has given this message up; what has come of it is to be thrown away. No payload.
    Void = 5,
    /// News about who is in the group: a [`Message`](crate::membership::Message). It belongs to no
    /// communicator.
    Members = 6,
}

impl FrameKind {
    /// Every kind.
    pub const ALL: [Self; 6] =
        [Self::Data, Self::Abort, Self::Ask, Self::Called, Self::Void, Self::Members];

    /// Whether it belongs to no lane and is read as soon as it arrives: everything but data.
    pub fn is_notice(self) -> bool {
        self != Self::Data
    }

    /// Bytes of the payload, for kinds that always have the same number.
    fn payload(self) -> Option<usize> {
        match self {
            Self::Data | Self::Members => None,
            Self::Abort => Some(FAULT_LEN),
            Self::Ask | Self::Called | Self::Void => Some(0),
        }
    }
}

/// Everything a receiver needs to know about a frame before it reads the payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Header {
    /// What follows.
    pub frame: FrameKind,
    /// Bytes that follow.
    pub payload: u32,
    /// The communicator.
    pub comm: CommId,
    /// The group's generation.
    pub epoch: Epoch,
    /// Which operation of the communicator.
    pub seq: OpSeq,
    /// Which frame of the lane from this sender to this receiver, from zero.
    pub index: u32,
    /// What the sender called.
    pub fingerprint: Fingerprint,
}

/// Why 64 bytes are not a header.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HeaderError {
    /// Fewer bytes than a header has.
    #[error("a frame header has {HEADER_LEN} bytes, only {0} are here")]
    Short(usize),
    /// Not a farwire frame at all.
    #[error("not a farwire frame: it starts with bytes {0:02x?}")]
    Magic([u8; 2]),
    /// Another version of the protocol.
    #[error(
        "the peer speaks wire version {0}, this build speaks {VERSION}; run the same farwire version on all ranks"
    )]
    Version(u8),
    /// A field with a value that it cannot have.
    #[error("frame header field `{0}` has an impossible value")]
    Field(&'static str),
}

impl Header {
    /// The header of a message about members.
    pub fn of_members(payload: usize) -> Self {
        Self {
            frame: FrameKind::Members,
            payload: payload as u32,
            comm: CommId::WORLD,
            epoch: Epoch::default(),
            seq: OpSeq::Collective(0),
            index: 0,
            fingerprint: notice_fingerprint(Kind::Barrier),
        }
    }

    /// The header as it goes on the wire.
    pub fn encode(&self) -> [u8; HEADER_LEN] {
        let mut bytes = [0; HEADER_LEN];
        let (tag, seq) = match self.seq {
            OpSeq::Collective(seq) => (Tag(0), seq),
            OpSeq::Message(tag, seq) => (tag, seq),
        };
        bytes[0..2].copy_from_slice(&MAGIC);
        bytes[2] = VERSION;
        bytes[3] = self.frame as u8;
        bytes[4..8].copy_from_slice(&self.payload.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.comm.0.to_le_bytes());
        bytes[16..20].copy_from_slice(&self.epoch.0.to_le_bytes());
        bytes[20..24].copy_from_slice(&tag.0.to_le_bytes());
        bytes[24..32].copy_from_slice(&seq.to_le_bytes());
        bytes[32..64].copy_from_slice(&encode_fingerprint(&self.fingerprint, self.index));
        bytes
    }

    /// Reads a header from the front of `bytes`.
    pub fn decode(bytes: &[u8]) -> Result<Self, HeaderError> {
        let bytes: &[u8; HEADER_LEN] =
            bytes.first_chunk().ok_or(HeaderError::Short(bytes.len()))?;
        if bytes[0..2] != MAGIC {
            return Err(HeaderError::Magic([bytes[0], bytes[1]]));
        }
        if bytes[2] != VERSION {
            return Err(HeaderError::Version(bytes[2]));
        }
        let frame = FrameKind::ALL.into_iter().find(|frame| *frame as u8 == bytes[3]);
        let frame = frame.ok_or(HeaderError::Field("frame"))?;
        let payload = u32_at(bytes, 4);
        if frame.payload().is_some_and(|fixed| fixed != payload as usize) {
            return Err(HeaderError::Field("payload"));
        }
        let fits = (MIN_MESSAGE..=MAX_MESSAGE).contains(&(payload as usize));
        if frame == FrameKind::Members && !fits {
            return Err(HeaderError::Field("payload"));
        }
        let (fingerprint, index) = decode_fingerprint(array(bytes, 32))?;
        let tag = Tag(u32_at(bytes, 20));
        let seq = u64_at(bytes, 24);
        let seq = match fingerprint.kind {
            Kind::Message => OpSeq::Message(tag, seq),
            _ if tag != Tag(0) => return Err(HeaderError::Field("tag")),
            _ => OpSeq::Collective(seq),
        };
        Ok(Self {
            frame,
            payload,
            comm: CommId(u64_at(bytes, 8)),
            epoch: Epoch(u32_at(bytes, 16)),
            seq,
            index,
            fingerprint,
        })
    }
}

/// The second half of a header: a fingerprint, with room for a frame index.
pub(crate) fn encode_fingerprint(print: &Fingerprint, index: u32) -> [u8; FINGERPRINT_LEN] {
    let mut bytes = [0; FINGERPRINT_LEN];
    bytes[0..8].copy_from_slice(&print.count.to_le_bytes());
    bytes[8..12].copy_from_slice(&index.to_le_bytes());
    bytes[12..16].copy_from_slice(&print.layout.to_le_bytes());
    bytes[16..20].copy_from_slice(&print.root.map_or(NO_ROOT, |root| root.0).to_le_bytes());
    bytes[20..24].copy_from_slice(&print.codec.to_le_bytes());
    bytes[24..28].copy_from_slice(&print.segment.to_le_bytes());
    bytes[28] = print.kind as u8;
    bytes[29] = print.dtype.map_or(0, |dtype| dtype as u8);
    bytes[30] = print.op.map_or(0, |op| op as u8);
    bytes[31] = print.algorithm as u8;
    bytes
}

/// Reads what [`encode_fingerprint`] wrote, and refuses combinations that no call makes.
pub(crate) fn decode_fingerprint(
    bytes: &[u8; FINGERPRINT_LEN],
) -> Result<(Fingerprint, u32), HeaderError> {
    let kind = Kind::from_code(bytes[28]).ok_or(HeaderError::Field("kind"))?;
    let dtype = match bytes[29] {
        0 => None,
        code => Some(DType::from_code(code).ok_or(HeaderError::Field("dtype"))?),
    };
    if dtype.is_some() != kind.has_elements() {
        return Err(HeaderError::Field("dtype"));
    }
    let op = match bytes[30] {
        0 => None,
        code => Some(ReduceOp::from_code(code).ok_or(HeaderError::Field("op"))?),
    };
    if op.is_some() != kind.reduces() {
        return Err(HeaderError::Field("op"));
    }
    let algorithm = Algorithm::from_code(bytes[31])
        .filter(|algorithm| kind.travels_by(*algorithm))
        .ok_or(HeaderError::Field("algorithm"))?;
    let root = Some(u32_at(bytes, 16)).filter(|root| *root != NO_ROOT).map(Rank);
    if root.is_some() != kind.has_root() {
        return Err(HeaderError::Field("root"));
    }
    let print = Fingerprint {
        kind,
        algorithm,
        dtype,
        op,
        count: u64_at(bytes, 0),
        root,
        codec: u32_at(bytes, 20),
        segment: u32_at(bytes, 24),
        layout: u32_at(bytes, 12),
    };
    Ok((print, u32_at(bytes, 8)))
}

fn array<const N: usize, const M: usize>(bytes: &[u8; M], at: usize) -> &[u8; N] {
    bytes[at..].first_chunk().expect("offsets in this file lie inside the fixed layout")
}

fn u32_at<const M: usize>(bytes: &[u8; M], at: usize) -> u32 {
    u32::from_le_bytes(*array(bytes, at))
}

fn u64_at<const M: usize>(bytes: &[u8; M], at: usize) -> u64 {
    u64::from_le_bytes(*array(bytes, at))
}

#[cfg(test)]
pub(crate) mod tests {
    use proptest::prelude::*;

    use super::*;

    pub(crate) fn any_fingerprint() -> impl Strategy<Value = Fingerprint> {
        let kinds = prop::sample::select(Kind::ALL.to_vec());
        let dtypes = prop::sample::select(DType::ALL.to_vec());
        let ops = prop::sample::select(ReduceOp::ALL.to_vec());
        let numbers = (any::<u64>(), 0..u32::MAX, any::<[u32; 3]>());
        (kinds, dtypes, ops, any::<prop::sample::Index>(), numbers).prop_map(
            |(kind, dtype, op, pick, (count, root, [codec, segment, layout]))| Fingerprint {
                kind,
                algorithm: *pick.get(kind.algorithms()),
                dtype: kind.has_elements().then_some(dtype),
                op: kind.reduces().then_some(op),
                count,
                root: kind.has_root().then_some(Rank(root)),
                codec,
                segment,
                layout,
            },
        )
    }

    pub(crate) fn any_header() -> impl Strategy<Value = Header> {
        let frames = prop::sample::select(FrameKind::ALL.to_vec());
        (frames, any_fingerprint(), any::<[u32; 4]>(), any::<[u64; 2]>()).prop_map(
            |(frame, fingerprint, [payload, epoch, tag, index], [comm, seq])| Header {
                frame,
                payload: match frame {
                    FrameKind::Members => {
                        (MIN_MESSAGE + payload as usize % (MAX_MESSAGE - MIN_MESSAGE + 1)) as u32
                    }
                    _ => frame.payload().map_or(payload, |fixed| fixed as u32),
                },
                comm: CommId(comm),
                epoch: Epoch(epoch),
                seq: match fingerprint.kind {
                    Kind::Message => OpSeq::Message(Tag(tag), seq),
                    _ => OpSeq::Collective(seq),
                },
                index,
                fingerprint,
            },
        )
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(4096))]

        #[test]
        fn headers_round_trip(header in any_header()) {
            prop_assert_eq!(Header::decode(&header.encode()), Ok(header));
        }

        #[test]
        fn short_input_is_refused(header in any_header(), len in 0..HEADER_LEN) {
            prop_assert_eq!(Header::decode(&header.encode()[..len]), Err(HeaderError::Short(len)));
        }
    }

    /// One million inputs: random bytes, and good headers with a few bytes changed. Whatever is
    /// accepted must encode to the very same bytes, which also shows that no byte of the input is
    /// ignored.
    #[test]
    fn a_million_random_and_mutated_headers_never_panic() {
        use proptest::strategy::ValueTree;
        use proptest::test_runner::TestRunner;

        let mut state = 0x5eed_u64;
        let mut next = move || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            state >> 33
        };
        let mut runner = TestRunner::deterministic();
        let good: Vec<_> = (0..512)
            .map(|_| any_header().new_tree(&mut runner).unwrap().current().encode())
            .collect();
        let (mut accepted, mut refused) = (0u32, 0u32);
        for case in 0..1_000_000 {
            let mut bytes = good[next() as usize % good.len()];
            if case % 4 == 0 {
                bytes = std::array::from_fn(|_| next() as u8);
                bytes[0..3].copy_from_slice(&[MAGIC[0], MAGIC[1], VERSION]);
            } else {
                for _ in 0..=next() % 3 {
                    bytes[next() as usize % HEADER_LEN] = next() as u8;
                }
            }
            match Header::decode(&bytes) {
                Ok(header) => {
                    assert_eq!(header.encode(), bytes, "case {case}");
                    accepted += 1;
                }
                Err(_) => refused += 1,
            }
        }
        assert!(accepted > 100_000 && refused > 100_000, "{accepted} accepted, {refused} refused");
    }

    /// A field is set that the kind of call does not have, or one that it has is missing.
    #[test]
    fn fields_that_do_not_fit_the_call_are_refused() {
        use proptest::strategy::ValueTree;
        use proptest::test_runner::TestRunner;

        let mut runner = TestRunner::deterministic();
        for _ in 0..1000 {
            let header = any_header().new_tree(&mut runner).unwrap().current();
            let kind = header.fingerprint.kind;
            let refused = |field: &str, at: usize, value: &[u8]| {
                let mut bytes = header.encode();
                bytes[at..at + value.len()].copy_from_slice(value);
                let error = Header::decode(&bytes).expect_err(field);
                assert!(error.to_string().contains(&format!("`{field}`")), "{kind}: {error}");
            };
            refused("root", 48, if kind.has_root() { &[0xff; 4] } else { &[1, 0, 0, 0] });
            refused("op", 62, if kind.reduces() { &[0] } else { &[1] });
            refused("dtype", 61, if kind == Kind::Barrier { &[1] } else { &[0] });
            if kind != Kind::Message {
                refused("tag", 20, &[1, 0, 0, 0]);
            }
            refused("kind", 60, &[0]);
            refused("frame", 3, &[7]);
            if header.frame.is_notice() {
                refused("payload", 4, &[1, 0, 0, 0]);
                refused("payload", 4, &(MAX_MESSAGE as u32 + 1).to_le_bytes());
            }
            let stranger =
                Algorithm::ALL.into_iter().find(|other| !kind.algorithms().contains(other));
            refused("algorithm", 63, &[stranger.map_or(0, |other| other as u8)]);
        }
    }

    #[test]
    fn another_version_is_named() {
        let mut bytes = [0; HEADER_LEN];
        bytes[..3].copy_from_slice(&[b'f', b'w', 9]);
        let error = Header::decode(&bytes).unwrap_err();
        assert_eq!(error, HeaderError::Version(9));
        assert!(error.to_string().contains("wire version 9"));
    }
}
