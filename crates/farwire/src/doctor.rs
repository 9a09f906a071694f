//! What this machine has to offer, and what limits it.

use std::fmt;

use crate::link;

/// One thing that was examined.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// What was examined.
    pub what: String,
    /// What state it is in.
    pub state: State,
    /// What was found.
    pub found: String,
    /// What to do about it, where something can be done.
    pub advice: Option<String>,
}

impl Finding {
    pub(crate) fn good(what: impl Into<String>, found: impl Into<String>) -> Self {
        Self { what: what.into(), state: State::Good, found: found.into(), advice: None }
    }

    pub(crate) fn slow(what: impl Into<String>, found: impl Into<String>, advice: String) -> Self {
        Self { state: State::Slow, advice: Some(advice), ..Self::good(what, found) }
    }

    pub(crate) fn broken(what: &str, error: &std::io::Error, advice: &str) -> Self {
        let advice = Some(advice.to_owned());
        Self { state: State::Broken, advice, ..Self::good(what, error.to_string()) }
    }
}

/// The state of a thing that was examined.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// As it should be, or plain information.
    Good,
    /// It works, but could be faster.
    Slow,
    /// It does not work.
    Broken,
}

impl fmt::Display for State {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Good => "ok",
            Self::Slow => "slow",
            Self::Broken => "broken",
        })
    }
}

/// Looks at everything.
pub fn examine() -> Vec<Finding> {
    let mut findings = vec![cores()];
    findings.extend(interfaces());
    findings.extend(link::examine());
    findings
}

fn cores() -> Finding {
    match std::thread::available_parallelism() {
        Ok(cores) => {
            Finding::good("cores", format!("{cores}; more ranks than that on this host share them"))
        }
        Err(error) => Finding::broken("cores", &error, "nothing; one is assumed"),
    }
}

/// Each network interface with its addresses, its MTU and its speed where the system knows it.
fn interfaces() -> Vec<Finding> {
    let list = match if_addrs::get_if_addrs() {
        Ok(list) => list,
        Err(error) => return vec![Finding::broken("interfaces", &error, "look at `ip address`")],
    };
    let mut names: Vec<_> = list.iter().map(|interface| interface.name.clone()).collect();
    names.sort();
    names.dedup();
    let about = |name: &str, file: &str| {
        let text = std::fs::read_to_string(format!("/sys/class/net/{name}/{file}")).ok()?;
        text.trim().parse::<u64>().ok()
    };
    let finding = |name: String| {
        let addresses: Vec<_> = list
            .iter()
            .filter(|other| other.name == name)
            .map(|other| other.ip().to_string())
            .collect();
        let mtu = about(&name, "mtu").map_or(String::new(), |mtu| format!(", MTU {mtu}"));
        let speed =
            about(&name, "speed").map_or(String::new(), |speed| format!(", {speed} Mbit/s"));
        Finding::good(format!("interface {name}"), format!("{}{mtu}{speed}", addresses.join(" ")))
    };
    names.into_iter().map(finding).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loopback_and_shared_memory_are_found() {
        let findings = examine();
        let found = |what: &str| findings.iter().find(|finding| finding.what.starts_with(what));
        assert!(found("interface lo").unwrap().found.contains("127.0.0.1"), "{findings:?}");
        assert_eq!(found("shared memory").unwrap().state, State::Good);
        assert!(found("UDP receive buffer").is_some() && found("UDP packets sent").is_some());
    }
}
