//! Flags whose values are a closed set of names.

use clap::builder::{PossibleValuesParser, TypedValueParser};

/// A parser for one of a closed set of names, which `--help` then lists.
pub(crate) fn named<T, const N: usize>(names: [&'static str; N]) -> impl TypedValueParser<Value = T>
where
    T: std::str::FromStr<Err: std::error::Error + Send + Sync + 'static> + Clone + Send + Sync + 'static,
{
    PossibleValuesParser::new(names).try_map(|name| name.parse())
}
