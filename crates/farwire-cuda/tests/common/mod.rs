//! What the tests of the card share.

#![allow(dead_code, reason = "not every test program uses all of it")]

/// Whether tests run under a sanitizer, for which every access costs much: `FARWIRE_CUDA_CASES=1`.
pub(crate) fn is_sanitized() -> bool {
    std::env::var("FARWIRE_CUDA_CASES").is_ok_and(|cases| cases == "1")
}

/// What tests use: under a sanitizer `few`, the least that still takes every kernel down all of its
/// ways (several thread blocks and shards, and tails); otherwise `all`.
pub(crate) fn sized<T>(few: T, all: T) -> T {
    if is_sanitized() { few } else { all }
}

/// Whether a codec is to be tested: all are, unless `FARWIRE_CUDA_CODECS` has how the names of some
/// begin, with commas between. Under a sanitizer, that lets one process test each.
pub(crate) fn is_asked_for(codec: &str) -> bool {
    std::env::var("FARWIRE_CUDA_CODECS")
        .map_or(true, |names| names.split(',').any(|name| codec.starts_with(name)))
}
