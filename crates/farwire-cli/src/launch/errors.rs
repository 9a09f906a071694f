//! What ranks say as they fail, and whom they blame.

use std::collections::{BTreeMap, HashSet};
use std::io::{self, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;

use farwire_train::SAID;

/// The longest error of a rank, in bytes.
const LONGEST_ERROR: usize = 16 << 10;
/// Tells a rank to say its error on standard input, which is a socket, rather than on standard
/// error.
pub(super) const TELL_PARENT: &str = "FARWIRE_TELL_PARENT";

/// Says why this program ends. If a parent has started it as one of its ranks, the parent is told,
/// and says it once for all of them; otherwise it goes to standard error.
pub(crate) fn say_error(error: &dyn std::error::Error) {
    let text = error.to_string();
    let told = std::env::var_os(TELL_PARENT).is_some_and(|how| how == "stdin")
        && io::stdin().as_fd().try_clone_to_owned().is_ok_and(|socket| {
            let mut end = text.len().min(LONGEST_ERROR);
            while !text.is_char_boundary(end) {
                end -= 1;
            }
            UnixStream::from(socket).write_all(&text.as_bytes()[..end]).is_ok()
        });
    if !told {
        eprintln!("farwire: {text}");
    }
}

/// What ranks say as they end.
#[derive(Debug, Default)]
pub(super) struct Errors {
    pub(super) sockets: Vec<(u32, UnixStream)>,
    pub(super) said: Vec<(u32, String)>,
    /// Errors that were shown, each once.
    pub(super) shown: HashSet<String>,
}

impl Errors {
    /// Shows what ranks have said since the last call, unless it was shown before.
    pub(super) fn show(&mut self, ranks: u32) {
        let mut text = vec![0; LONGEST_ERROR];
        for (rank, socket) in &mut self.sockets {
            if let Ok(length @ 1..) = socket.read(&mut text) {
                self.said.push((*rank, String::from_utf8_lossy(&text[..length]).into_owned()));
            }
        }
        self.said.sort();
        for (error, who) in by_error(&self.said) {
            if self.shown.insert(error.strip_prefix(SAID).unwrap_or(error).to_owned()) {
                eprintln!("farwire: {}{error}", named(&who, ranks));
            }
        }
    }
}

/// Each error once, and which ranks have said it. A rank that repeats what rank 0 has said is not
/// named.
fn by_error(said: &[(u32, String)]) -> Vec<(&str, Vec<u32>)> {
    let mut errors: Vec<(&str, Vec<u32>)> = Vec::new();
    for (rank, text) in said {
        let repeated = text.strip_prefix(SAID);
        let bare = repeated.unwrap_or(text);
        let same = |error: &str| error.strip_prefix(SAID).unwrap_or(error) == bare;
        match errors.iter_mut().find(|(error, _)| same(error)) {
            Some((error, ranks)) if error.starts_with(SAID) || repeated.is_none() => {
                ranks.push(*rank)
            }
            Some(_) => {}
            None => errors.push((text, vec![*rank])),
        }
    }
    errors
}

/// The rank that most of these lines call lost, if any do.
pub(super) fn lost_rank<'a>(lines: impl Iterator<Item = &'a str>) -> Option<u32> {
    let mut votes = BTreeMap::<u32, usize>::new();
    for line in lines {
        let Some((before, _)) = line.split_once(" is lost (") else { continue };
        // In a group: `rank 1 of the group (rank 5 of the world)`.
        let before = before.trim_end_matches(')').trim_end_matches(" of the world");
        let rank = before.rsplit_once("rank ").and_then(|(_, rank)| rank.parse().ok());
        if let Some(rank) = rank {
            *votes.entry(rank).or_default() += 1;
        }
    }
    let (rank, _) = votes.into_iter().rev().max_by_key(|(_, votes)| *votes)?;
    Some(rank)
}

/// Such as `ranks 0 and 2: `; empty if there is only one rank.
fn named(ranks: &[u32], all: u32) -> String {
    match ranks {
        _ if all == 1 => String::new(),
        [rank] => format!("rank {rank}: "),
        ranks if ranks.len() == all as usize => format!("all {all} ranks: "),
        [first @ .., last] => {
            let first: Vec<String> = first.iter().map(u32::to_string).collect();
            format!("ranks {} and {last}: ", first.join(", "))
        }
        [] => String::new(),
    }
}

#[cfg(test)]
mod tests {
    use farwire::{Fault, Peer};

    use super::*;

    /// The words are the library's, which may change them.
    #[test]
    fn a_rank_that_errors_call_lost_is_found() {
        let lost = |rank| format!("all_reduce(…) #7 failed: {}", Fault::PeerLost(Peer(rank)));
        let lines = [lost(3), lost(12), "rank 4 is lost in thought".to_owned(), lost(12)];
        assert_eq!(lost_rank(lines.iter().map(String::as_str)), Some(12));
        assert_eq!(lost_rank(["all is well", "is lost (", "rank x is lost ("].into_iter()), None);
        let grouped = "failed: rank 1 of the group (rank 5 of the world) is lost (it died, …)";
        assert_eq!(lost_rank([grouped].into_iter()), Some(5));
    }

    #[test]
    fn an_error_is_said_once_and_names_who_said_it() {
        let errors = |said: &[(u32, &str)]| -> Vec<String> {
            let said: Vec<_> =
                said.iter().map(|(rank, text)| (*rank, (*text).to_owned())).collect();
            by_error(&said).iter().map(|(error, ranks)| named(ranks, 4) + error).collect()
        };
        assert_eq!(errors(&[(0, "a"), (1, "a"), (2, "a"), (3, "a")]), ["all 4 ranks: a"]);
        assert_eq!(
            errors(&[(0, "a"), (1, "b"), (2, "a"), (3, "a")]),
            ["ranks 0, 2 and 3: a", "rank 1: b"]
        );
        let repeated = format!("{SAID}a");
        assert_eq!(errors(&[(0, "a"), (1, &repeated), (3, &repeated)]), ["rank 0: a"]);
        // On a machine without rank 0.
        assert_eq!(errors(&[(2, &repeated), (3, &repeated)]), ["ranks 2 and 3: rank 0 says: a"]);
        assert_eq!(named(&[0], 1), "");
    }
}
