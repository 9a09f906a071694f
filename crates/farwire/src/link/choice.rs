//! Which kinds of link a user allows, and their names.

use std::fmt;
use std::str::FromStr;
use std::sync::LazyLock;

use super::{KINDS, LinkKind};
use crate::local::INPROC;

/// What carries data between processes: [`AUTO`](Self::AUTO), or one kind of link by its name.
///
/// ```
/// use farwire::{Communicator, LinkChoice};
///
/// let builder = Communicator::builder().link("quic".parse()?);
/// let names: Vec<_> = LinkChoice::all().map(LinkChoice::name).collect();
/// assert!(["auto", "shm", "quic"].iter().all(|name| names.contains(name)));
/// # Ok::<(), farwire::UnknownLink>(())
/// ```
#[derive(Clone, Copy, Default)]
pub struct LinkChoice(Option<&'static dyn LinkKind>);

impl LinkChoice {
    /// For each pair of processes, the fastest link that serves it.
    pub const AUTO: Self = Self(None);

    /// All choices, beginning with [`AUTO`](Self::AUTO).
    pub fn all() -> impl Iterator<Item = Self> {
        std::iter::once(Self::AUTO).chain(KINDS.iter().map(|kind| Self(Some(*kind))))
    }

    /// Its name, as in `FARWIRE_LINK`.
    pub fn name(self) -> &'static str {
        self.0.map_or("auto", LinkKind::name)
    }

    /// A sentence about it.
    pub fn about(self) -> &'static str {
        self.0.map_or(
            "For each pair of processes: shared memory on one host, TCP within 5 ms, else QUIC; or \
             whichever gets through",
            LinkKind::about,
        )
    }

    /// The kinds that may be used.
    pub(crate) fn kinds(self) -> impl Iterator<Item = &'static dyn LinkKind> {
        KINDS
            .iter()
            .copied()
            .filter(move |kind| self.0.is_none_or(|chosen| chosen.name() == kind.name()))
    }

    /// What a text must be to name a choice, for errors.
    pub(crate) fn expected() -> &'static str {
        static EXPECTED: LazyLock<String> = LazyLock::new(|| {
            let names: Vec<_> = LinkChoice::all().map(LinkChoice::name).collect();
            let (last, first) = names.split_last().expect("one can always choose `auto`");
            format!("{} or {last} (for ranks in one process, use farwire::local)", first.join(", "))
        });
        &EXPECTED
    }
}

/// The names of links, as in [`Flight::links`](crate::flight::Flight::links) and in the `link` of
/// metrics: those of [`LinkChoice`] without `auto`, and `inproc` between threads.
pub fn link_names() -> impl Iterator<Item = &'static str> {
    KINDS.iter().map(|kind| kind.name()).chain([INPROC])
}

/// A text that names no [`LinkChoice`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not a link; use {expected}", expected = LinkChoice::expected())]
pub struct UnknownLink(String);

impl FromStr for LinkChoice {
    type Err = UnknownLink;

    fn from_str(name: &str) -> Result<Self, UnknownLink> {
        Self::all().find(|choice| choice.name() == name).ok_or_else(|| UnknownLink(name.to_owned()))
    }
}

impl fmt::Display for LinkChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl fmt::Debug for LinkChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "LinkChoice({self})")
    }
}

impl PartialEq for LinkChoice {
    fn eq(&self, other: &Self) -> bool {
        self.name() == other.name()
    }
}

impl Eq for LinkChoice {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_words_that_differ_and_lead_back() {
        let mut names: Vec<_> = LinkChoice::all().map(LinkChoice::name).chain([INPROC]).collect();
        for choice in LinkChoice::all() {
            assert_eq!(choice.name().parse(), Ok(choice));
            assert!(choice.name().bytes().all(|byte| byte.is_ascii_lowercase()), "{choice}");
        }
        names.sort_unstable();
        let all = names.len();
        names.dedup();
        assert_eq!(names.len(), all);
        let error = "pigeon".parse::<LinkChoice>().unwrap_err().to_string();
        assert!(LinkChoice::all().all(|choice| error.contains(choice.name())), "{error}");
    }
}
