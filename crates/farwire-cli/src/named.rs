//! Flags whose values have names, which `--help` then lists.

use clap::builder::{PossibleValuesParser, TypedValueParser};

/// A parser for one of a closed set of names, which `--help` then lists.
pub(crate) fn named<T, const N: usize>(names: [&'static str; N]) -> impl TypedValueParser<Value = T>
where
    T: std::str::FromStr<Err: std::error::Error + Send + Sync + 'static>
        + Clone
        + Send
        + Sync
        + 'static,
{
    PossibleValuesParser::new(names).try_map(|name| name.parse())
}

/// The long help of `--codec`. The codecs are those of the registry.
pub(crate) fn codec_help(more: &str) -> String {
    format!(
        "How gradients are compressed on the wire, with error feedback. {more}\n\n\
         `auto` first measures, for about a second, and then takes bf16 or int8 for those vectors for \
         which that is faster than none. `auto:topk:0.01` does so with that codec.\n\n{}",
        farwire::CodecSpec::help()
    )
}
