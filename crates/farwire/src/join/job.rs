//! Which job a process belongs to.
//!
//! A token names a cluster, and several jobs of a cluster may run at once, or one after the other
//! at one address. A job's name keeps them apart: it is part of every certificate, and both ends of
//! a connection compare it before anything else.
//!
//! A job without a name is told from others by its number of ranks and by its address alone. The
//! address is not made part of a name, because ranks may spell it differently or reach it through a
//! relay.

use std::fmt;

use serde::{Deserialize, Serialize};

/// The longest name, in bytes.
const MAX_LEN: usize = 255;

/// What a text must be to name a job.
pub(crate) const WHAT: &str = "the name of a job: UTF-8 text of 1 to 255 bytes";

/// The name of a job, if it has one.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct JobName(Option<String>);

impl JobName {
    /// A name, unless the text is empty or too long for one.
    pub(crate) fn new(text: &str) -> Option<Self> {
        (1..=MAX_LEN).contains(&text.len()).then(|| Self(Some(text.to_owned())))
    }

    /// Text that differs for any two names, and for a job without one.
    pub(crate) fn key(&self) -> String {
        self.0.as_ref().map_or_else(|| "unnamed".to_owned(), |name| format!("named {name}"))
    }
}

impl fmt::Display for JobName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            // Escaped: a peer's name must not move the cursor of whoever reads the log.
            Some(name) => write!(f, "job {name:?}"),
            None => f.write_str("a job without a name"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn odd_names_are_told_apart_and_shown_escaped() {
        let names = ["a", "a ", "a\n", "A", "ä", "\u{1b}[2J", "unnamed", "named a", "🦀", "r0.e0"];
        let mut keys: Vec<_> = names.iter().map(|name| JobName::new(name).unwrap().key()).collect();
        keys.push(JobName::default().key());
        keys.sort();
        keys.dedup();
        assert_eq!(keys.len(), names.len() + 1);
        for name in names {
            assert!(!JobName::new(name).unwrap().to_string().contains(char::is_control));
        }
    }

    #[test]
    fn empty_and_long_names_are_refused() {
        assert_eq!(JobName::new(""), None);
        assert!(JobName::new(&"x".repeat(255)).is_some());
        assert_eq!(JobName::new(&"x".repeat(256)), None);
        assert_eq!(JobName::new(&"x".repeat(10 << 10)), None);
    }
}
