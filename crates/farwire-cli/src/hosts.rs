//! How ranks are dealt out to hosts, as flags say.

use std::str::FromStr;

/// `--hosts`: how many there are, or how many ranks each has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum HostsArg {
    /// As evenly as possible, in blocks.
    Count(u32),
    /// The number of ranks on each.
    Sizes(Vec<u32>),
}

/// Not a value of `--hosts`.
#[derive(Clone, Debug, thiserror::Error)]
#[error(
    "`{0}` does not name hosts; write how many there are (4), or the ranks on each, joined by + (3+1)"
)]
pub(crate) struct NotHosts(String);

/// Ranks and hosts that do not fit.
#[derive(Clone, Debug, thiserror::Error)]
#[error("--hosts {hosts} does not fit {ranks} ranks; each host needs a rank, and each rank a host")]
pub(crate) struct WrongHosts {
    hosts: String,
    ranks: u32,
}

impl FromStr for HostsArg {
    type Err = NotHosts;

    fn from_str(text: &str) -> Result<Self, NotHosts> {
        let numbers: Result<Vec<u32>, _> = text.split('+').map(str::parse).collect();
        match numbers.as_deref() {
            Ok([count]) if *count > 0 => Ok(Self::Count(*count)),
            Ok(sizes @ [_, _, ..]) if !sizes.contains(&0) => Ok(Self::Sizes(sizes.to_vec())),
            _ => Err(NotHosts(text.to_owned())),
        }
    }
}

impl HostsArg {
    /// The number of each rank's host.
    pub(crate) fn deal(&self, ranks: u32) -> Result<Vec<u64>, WrongHosts> {
        let wrong = |hosts| WrongHosts { hosts, ranks };
        match self {
            Self::Count(hosts) if *hosts <= ranks => {
                let host = |rank: u32| u64::from(rank) * u64::from(*hosts) / u64::from(ranks);
                Ok((0..ranks).map(host).collect())
            }
            Self::Count(hosts) => Err(wrong(hosts.to_string())),
            Self::Sizes(sizes) => {
                let all = sizes.iter().map(|size| u64::from(*size)).sum::<u64>();
                if all != u64::from(ranks) {
                    let sizes: Vec<_> = sizes.iter().map(u32::to_string).collect();
                    return Err(wrong(sizes.join("+")));
                }
                let host = |(host, size): (u64, &u32)| std::iter::repeat_n(host, *size as usize);
                Ok((0..).zip(sizes).flat_map(host).collect())
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn deal(text: &str, ranks: u32) -> Option<Vec<u64>> {
        text.parse::<HostsArg>().ok()?.deal(ranks).ok()
    }

    #[test]
    fn ranks_are_dealt_out_in_blocks() {
        assert_eq!(deal("2", 4), Some(vec![0, 0, 1, 1]));
        assert_eq!(deal("3", 4), Some(vec![0, 0, 1, 2]));
        assert_eq!(deal("1", 2), Some(vec![0, 0]));
        assert_eq!(deal("3+1", 4), Some(vec![0, 0, 0, 1]));
        assert_eq!(deal("1+2+1", 4), Some(vec![0, 1, 1, 2]));
    }

    #[test]
    fn what_does_not_fit_is_refused() {
        for (text, ranks) in [("5", 4), ("3+2", 4), ("1+1", 4), ("4294967295+1", 4)] {
            let error = text.parse::<HostsArg>().unwrap().deal(ranks).unwrap_err().to_string();
            assert!(error.contains(text) && error.contains("4 ranks"), "{error}");
        }
        for text in ["", "0", "-1", "2+0", "+", "2+", "a", "4294967296"] {
            assert!(text.parse::<HostsArg>().unwrap_err().to_string().contains("3+1"), "{text}");
        }
    }
}
