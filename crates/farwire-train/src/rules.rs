//! Settings by parameter name.
//!
//! A rule is a pattern and a value; the first pattern that matches decides. In a pattern `*` stands
//! for any text, dots included, and `?` for one character.

/// Values by parameter name.
///
/// ```
/// let decay = farwire_train::Rules::new(0.1).on("*.bias", 0.0).on("*norm*", 0.0);
/// assert_eq!(*decay.of("blocks.0.mlp.up.bias"), 0.0);
/// assert_eq!(*decay.of("blocks.0.mlp.up.weight"), 0.1);
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rules<T> {
    rules: Vec<(String, T)>,
    otherwise: T,
}

impl<T> Rules<T> {
    /// No rules: the same value for every parameter.
    pub fn new(otherwise: T) -> Self {
        Self { rules: Vec::new(), otherwise }
    }

    /// Adds a rule, which is tried after those before it.
    pub fn on(mut self, pattern: impl Into<String>, value: T) -> Self {
        self.rules.push((pattern.into(), value));
        self
    }

    /// The value for a parameter.
    pub fn of(&self, name: &str) -> &T {
        let rule = self.rules.iter().find(|(pattern, _)| matches(pattern, name));
        rule.map_or(&self.otherwise, |(_, value)| value)
    }
}

/// Whether a pattern matches a name.
pub fn matches(pattern: &str, name: &str) -> bool {
    let (pattern, name): (Vec<char>, Vec<char>) =
        (pattern.chars().collect(), name.chars().collect());
    let (mut p, mut n) = (0, 0);
    // Where the last star is, and how far into the name it reaches so far.
    let mut star = None;
    while n < name.len() {
        match pattern.get(p) {
            Some('*') => {
                star = Some((p, n));
                p += 1;
            }
            Some(c) if *c == '?' || *c == name[n] => {
                p += 1;
                n += 1;
            }
            _ => match star {
                Some((at, reached)) => {
                    star = Some((at, reached + 1));
                    p = at + 1;
                    n = reached + 1;
                }
                None => return false,
            },
        }
    }
    pattern[p..].iter().all(|c| *c == '*')
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// The same, by trying everything.
    fn matches_slowly(pattern: &[char], name: &[char]) -> bool {
        match (pattern.split_first(), name.split_first()) {
            (None, None) => true,
            (Some(('*', rest)), _) => (0..=name.len()).any(|n| matches_slowly(rest, &name[n..])),
            (Some((c, pattern)), Some((d, name))) if *c == '?' || c == d => {
                matches_slowly(pattern, name)
            }
            _ => false,
        }
    }

    proptest! {
        #[test]
        fn matching_is_what_trying_everything_finds(pattern in "[ab*?.]{0,7}", name in "[ab.]{0,8}") {
            let (p, n): (Vec<char>, Vec<char>) = (pattern.chars().collect(), name.chars().collect());
            prop_assert_eq!(matches(&pattern, &name), matches_slowly(&p, &n));
        }
    }

    #[test]
    fn the_first_rule_that_matches_decides() {
        let rules = Rules::new("rest").on("*.bias", "bias").on("blocks.0.*", "first");
        assert_eq!(*rules.of("blocks.0.up.bias"), "bias");
        assert_eq!(*rules.of("blocks.0.up.weight"), "first");
        assert_eq!(*rules.of("head.weight"), "rest");
        assert_eq!(*rules.of("biases"), "rest");
    }
}
