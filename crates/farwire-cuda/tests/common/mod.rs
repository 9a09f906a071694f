//! Code shared by the tests of the card.

#![allow(dead_code, reason = "not every test program uses all of it")]

/// Whether tests run under a sanitizer, which makes every access slow: `FARWIRE_CUDA_CASES=1`.
pub(crate) fn is_sanitized() -> bool {
    std::env::var("FARWIRE_CUDA_CASES").is_ok_and(|cases| cases == "1")
}

/// The size a test uses: under a sanitizer `few`, the least that still takes every kernel through
/// all of its paths (several thread blocks and shards, and tails); otherwise `all`.
pub(crate) fn sized<T>(few: T, all: T) -> T {
    if is_sanitized() { few } else { all }
}

/// Whether to test a codec: all are tested, unless `FARWIRE_CUDA_CODECS` lists prefixes of names,
/// separated by commas. Under a sanitizer, this allows one process per codec.
pub(crate) fn is_asked_for(codec: &str) -> bool {
    std::env::var("FARWIRE_CUDA_CODECS")
        .map_or(true, |names| names.split(',').any(|name| codec.starts_with(name)))
}
