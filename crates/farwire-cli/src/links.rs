//! Links, as flags name them and as results count them.

use std::fmt;

use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use farwire::{Communicator, Error, LinkChoice, ReduceOp, UnknownLink, link_names};
use serde::ser::{Serialize, Serializer};

/// What is to carry the data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LinkArg {
    /// Ranks are threads of one process.
    Inproc,
    /// Ranks are processes.
    Between(LinkChoice),
}

impl LinkArg {
    const INPROC: &'static str = "inproc";

    /// Reads a flag's value; `--help` lists all of them.
    pub(crate) fn parser() -> impl TypedValueParser<Value = Self> {
        let between =
            LinkChoice::all().map(|link| PossibleValue::new(link.name()).help(link.about()));
        let inproc = PossibleValue::new(Self::INPROC).help("Threads of one process");
        PossibleValuesParser::new(between.chain([inproc])).try_map(|name| match &name[..] {
            Self::INPROC => Ok::<_, UnknownLink>(Self::Inproc),
            name => name.parse().map(Self::Between),
        })
    }
}

impl Default for LinkArg {
    fn default() -> Self {
        Self::Between(LinkChoice::AUTO)
    }
}

impl fmt::Display for LinkArg {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Inproc => f.write_str(Self::INPROC),
            Self::Between(link) => fmt::Display::fmt(link, f),
        }
    }
}

/// Pairs of ranks by the link between them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Links(Vec<(&'static str, u64)>);

impl Links {
    /// The pairs of all ranks. All ranks must call this.
    pub(crate) fn of(comm: &Communicator) -> Result<Self, Error> {
        let mine = comm.flight().links;
        let count = |name| mine.iter().flatten().filter(|link| *link == name).count() as u64;
        let ends = comm.all_reduce(link_names().map(count).collect(), ReduceOp::Sum).wait()?;
        // Both ends of a pair have counted it.
        Ok(Self(link_names().zip(ends.iter().map(|ends| ends / 2)).collect()))
    }

    fn used(&self) -> impl Iterator<Item = &(&'static str, u64)> {
        self.0.iter().filter(|(_, pairs)| *pairs > 0)
    }

    /// The links that are used, with `+` between; `none` for one rank.
    pub(crate) fn name(&self) -> String {
        let names: Vec<_> = self.used().map(|(name, _)| *name).collect();
        if names.is_empty() { "none".to_owned() } else { names.join("+") }
    }
}

impl fmt::Display for Links {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.used().count() < 2 {
            return f.write_str(&self.name());
        }
        let several: Vec<_> =
            self.used().map(|(name, pairs)| format!("{name} ({pairs} pairs)")).collect();
        f.write_str(&several.join(", "))
    }
}

impl Serialize for Links {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.0.iter().copied())
    }
}
