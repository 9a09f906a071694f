//! A model's parameters, in order: the contract between replicas.
//!
//! Gradients are exchanged by position, so ranks that disagree about the list would add up
//! gradients that do not belong together. They compare it once, at the start.

use std::fmt;

use farwire::{Communicator, Error};

/// The ordered list of a model's parameters.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ParameterList {
    entries: Vec<Entry>,
}

/// One parameter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Its name.
    pub name: String,
    /// Its shape.
    pub shape: Vec<usize>,
    /// Its element type.
    pub dtype: String,
}

/// Why replicas cannot work together.
#[derive(Debug, thiserror::Error)]
pub enum ParameterListError {
    /// Ranks have different parameters.
    #[error(
        "ranks have different models: parameter {position} is {mine} here (rank {rank}), but {theirs} on rank {other}; \
         start all ranks with the same model settings"
    )]
    Differ {
        /// Where the lists first differ.
        position: usize,
        /// What is there on this rank.
        mine: String,
        /// This rank.
        rank: usize,
        /// What is there on the other.
        theirs: String,
        /// The other rank.
        other: usize,
    },
    /// A parameter is listed twice.
    #[error("parameter `{0}` is in the model twice; give each parameter its own name")]
    Twice(String),
    /// The comparison failed.
    #[error(transparent)]
    Compare {
        /// Why.
        #[from]
        source: Error,
    },
}

impl ParameterList {
    /// A plan of these parameters, in this order.
    pub fn new(entries: impl IntoIterator<Item = Entry>) -> Result<Self, ParameterListError> {
        let entries: Vec<Entry> = entries.into_iter().collect();
        let mut names: Vec<&str> = entries.iter().map(|entry| &entry.name[..]).collect();
        names.sort_unstable();
        match names.windows(2).find(|pair| pair[0] == pair[1]) {
            Some(pair) => Err(ParameterListError::Twice(pair[0].to_owned())),
            None => Ok(Self { entries }),
        }
    }

    /// The parameters.
    pub fn entries(&self) -> &[Entry] {
        &self.entries
    }

    /// 64 bits that differ if the plans do, barring bad luck.
    pub fn hash(&self) -> u64 {
        self.to_string().bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
        })
    }

    /// Fails, on all ranks of the group, if they do not all have the same plan.
    pub fn agree(&self, group: &Communicator) -> Result<(), ParameterListError> {
        let text = self.to_string();
        let all = group.all_gather(vec![self.hash(), text.len() as u64]).wait()?;
        if all.chunks_exact(2).all(|theirs| theirs == &all[..2]) {
            return Ok(());
        }
        // Some plan differs. Find the parameter, to name it.
        let lengths: Vec<usize> = all.chunks_exact(2).map(|theirs| theirs[1] as usize).collect();
        let texts = group.all_gather_varied(text.clone().into_bytes(), &lengths).wait()?;
        let mut rest = &texts[..];
        for (other, length) in lengths.iter().enumerate() {
            let (theirs, after) = rest.split_at(*length);
            rest = after;
            let theirs = String::from_utf8_lossy(theirs);
            if let Some((position, mine, theirs)) = first_difference(&text, &theirs) {
                return Err(ParameterListError::Differ {
                    position,
                    mine,
                    rank: group.rank(),
                    theirs,
                    other,
                });
            }
        }
        Ok(()) // the same text cannot have another hash
    }
}

fn first_difference(mine: &str, theirs: &str) -> Option<(usize, String, String)> {
    let shown = |line: Option<&str>| line.map_or("missing".to_owned(), |line| format!("`{line}`"));
    let (mut mine, mut theirs) = (mine.lines(), theirs.lines());
    let mut position = 0;
    loop {
        match (mine.next(), theirs.next()) {
            (None, None) => return None,
            (a, b) if a == b => position += 1,
            (a, b) => return Some((position, shown(a), shown(b))),
        }
    }
}

/// A line per parameter: name, shape, type.
impl fmt::Display for ParameterList {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.entries
            .iter()
            .try_for_each(|Entry { name, shape, dtype }| writeln!(f, "{name} {shape:?} {dtype}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan(entries: &[(&str, &[usize])]) -> ParameterList {
        let entry = |(name, shape): &(&str, &[usize])| Entry {
            name: (*name).to_owned(),
            shape: shape.to_vec(),
            dtype: "f32".to_owned(),
        };
        ParameterList::new(entries.iter().map(entry)).unwrap()
    }

    #[test]
    fn ranks_with_another_model_are_told_what_differs() {
        std::thread::scope(|scope| {
            for comm in farwire::local(3).unwrap() {
                scope.spawn(move || {
                    let same = plan(&[("a", &[2, 3]), ("b", &[4])]);
                    same.agree(&comm).unwrap();
                    for odd in [
                        plan(&[("a", &[2, 3]), ("b", &[5])]),
                        plan(&[("a", &[2, 3])]),
                        plan(&[("b", &[4]), ("a", &[2, 3])]),
                    ] {
                        let mine = if comm.rank() == 2 { &odd } else { &same };
                        let error = mine.agree(&comm).unwrap_err().to_string();
                        let other = if comm.rank() == 2 { "on rank 0" } else { "on rank 2" };
                        assert!(error.contains(other) && error.contains("`b [4] f32`"), "{error}");
                    }
                });
            }
        });
    }

    #[test]
    fn a_name_is_given_once() {
        let entry = Entry { name: "a".to_owned(), shape: vec![1], dtype: "f32".to_owned() };
        assert!(matches!(
            ParameterList::new([entry.clone(), entry]),
            Err(ParameterListError::Twice(_))
        ));
    }
}
