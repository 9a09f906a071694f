//! Which way a bucket travels, by name.

use std::fmt;
use std::str::FromStr;

use farwire::Communicator;

use crate::exchange::{Dense, Reducer};

/// How gradients are compressed on the wire.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Codec {
    /// Not at all.
    #[default]
    None,
}

/// A name that is no codec's.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is no codec; use {accepted}", accepted = Codec::NAMES.join(" or "))]
pub struct CodecError(String);

impl Codec {
    /// What can be written for a codec.
    pub const NAMES: [&str; 1] = ["none"];

    /// Exchanges buckets between the ranks of a group in this way.
    pub fn reducer(self, group: &Communicator) -> Box<dyn Reducer + Send> {
        match self {
            Self::None => Box::new(Dense(group.clone())),
        }
    }
}

impl fmt::Display for Codec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::None => f.write_str("none"),
        }
    }
}

impl FromStr for Codec {
    type Err = CodecError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "none" => Ok(Self::None),
            _ => Err(CodecError(text.to_owned())),
        }
    }
}
