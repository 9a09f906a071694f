//! What the tests of the card share.

/// Whether a codec is to be tested: all are, unless `FARWIRE_CUDA_CODECS` has how the names of some
/// begin, with commas between. Under a sanitizer, that lets one process test each.
pub(crate) fn is_asked_for(codec: &str) -> bool {
    std::env::var("FARWIRE_CUDA_CODECS")
        .map_or(true, |names| names.split(',').any(|name| codec.starts_with(name)))
}
