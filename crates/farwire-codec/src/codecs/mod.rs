//! The codecs that have names, one file each.
//!
//! A new codec is a file here, a `mod` and a line in [`CODECS`]. Parsing, `--help`, tests, benches
//! and `farwire bench codec` go through the table.

use crate::codec::CodecFamily;

pub(crate) mod block;
pub(crate) mod cast;
pub(crate) mod identity;
pub(crate) mod powersgd;
pub(crate) mod randk;
pub(crate) mod sign;
pub(crate) mod topk;

/// Every codec that has a name.
pub static CODECS: &[CodecFamily] = &[
    identity::FAMILY,
    cast::FAMILY,
    topk::FAMILY,
    randk::FAMILY,
    block::FAMILY,
    sign::FAMILY,
    powersgd::FAMILY,
];

/// The codec names that people typically use.
pub fn typical() -> impl Iterator<Item = &'static str> {
    CODECS.iter().flat_map(|family| family.typical).copied()
}

/// Codec names that cover every option that changes which code runs.
pub fn samples() -> impl Iterator<Item = &'static str> {
    CODECS.iter().flat_map(|family| family.typical.iter().chain(family.corners)).copied()
}
