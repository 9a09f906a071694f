//! What can go wrong while a vector is encoded or a message decoded.

/// Why a vector was not encoded. Nothing was changed except the output's scratch space.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum EncodeError {
    /// A NaN or an infinity, which would stay in the residual for ever.
    #[error(
        "element {index} (gradient plus residual) is not finite; skip this step or clip the gradient"
    )]
    NotFinite {
        /// The first such element of the vector.
        index: usize,
    },
    /// More elements than an index on the wire can count.
    #[error(
        "{elements} elements are too many for one vector; hand them over in chunks of at most {limit}"
    )]
    TooLong {
        /// How many were given.
        elements: usize,
        /// How many are allowed.
        limit: usize,
    },
    /// A codec that cannot read its own message.
    #[error("the codec cannot decode what it encoded: {0}")]
    OwnMessage(DecodeError),
}

/// Why a message was refused. The accumulator may have been changed in part.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DecodeError {
    /// The length does not fit the number of elements; do all ranks use the same codec and shards?
    #[error(
        "expected {need} bytes in a message, got {given}; check that all ranks use the same codec"
    )]
    Length {
        /// Bytes expected, at least.
        need: usize,
        /// Bytes received.
        given: usize,
    },
    /// More elements than the range has.
    #[error(
        "the message holds {given} elements for a range of {range}; check that all ranks cut the same shards"
    )]
    Count {
        /// Elements in the message.
        given: usize,
        /// Elements in the range.
        range: usize,
    },
    /// An index past the end of the range.
    #[error("the message holds an index outside its range of {range} elements")]
    Index {
        /// Elements in the range.
        range: usize,
    },
    /// A field with a value no encoder writes.
    #[error("the message holds a {0} that no encoder writes")]
    Field(&'static str),
}

impl DecodeError {
    /// Refuses `bytes` unless they are exactly `need` long.
    pub(crate) fn check_len(bytes: &[u8], need: usize) -> Result<(), Self> {
        if bytes.len() == need { Ok(()) } else { Err(Self::Length { need, given: bytes.len() }) }
    }
}
