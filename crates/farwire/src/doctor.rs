//! What this machine has to offer, and what limits it.

use std::fmt;
use std::net::UdpSocket;

use crate::join::rendezvous::{BUFFER, widen};
use crate::shm::region::Region;

/// One thing that was looked at.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// What was looked at.
    pub what: String,
    /// How it is.
    pub state: State,
    /// What was found.
    pub found: String,
    /// What to do about it, where something can be done.
    pub advice: Option<String>,
}

/// How a thing is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// As it should be, or plain information.
    Good,
    /// It works, and could be faster.
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
    findings.extend(udp());
    findings.push(shared_memory());
    findings
}

fn good(what: impl Into<String>, found: impl Into<String>) -> Finding {
    Finding { what: what.into(), state: State::Good, found: found.into(), advice: None }
}

fn broken(what: &str, error: &std::io::Error, advice: &str) -> Finding {
    Finding { state: State::Broken, advice: Some(advice.to_owned()), ..good(what, error.to_string()) }
}

fn cores() -> Finding {
    match std::thread::available_parallelism() {
        Ok(cores) => good("cores", format!("{cores}; more ranks than that on this host share them")),
        Err(error) => broken("cores", &error, "nothing; one is assumed"),
    }
}

/// Each network interface with its addresses, its MTU and its speed where the system knows it.
fn interfaces() -> Vec<Finding> {
    let list = match if_addrs::get_if_addrs() {
        Ok(list) => list,
        Err(error) => return vec![broken("interfaces", &error, "look at `ip address`")],
    };
    let mut names: Vec<_> = list.iter().map(|interface| interface.name.clone()).collect();
    names.sort();
    names.dedup();
    let about = |name: &str, file: &str| {
        let text = std::fs::read_to_string(format!("/sys/class/net/{name}/{file}")).ok()?;
        text.trim().parse::<u64>().ok()
    };
    let finding = |name: String| {
        let addresses: Vec<_> =
            list.iter().filter(|other| other.name == name).map(|other| other.ip().to_string()).collect();
        let mtu = about(&name, "mtu").map_or(String::new(), |mtu| format!(", MTU {mtu}"));
        let speed = about(&name, "speed").map_or(String::new(), |speed| format!(", {speed} Mbit/s"));
        good(format!("interface {name}"), format!("{}{mtu}{speed}", addresses.join(" ")))
    };
    names.into_iter().map(finding).collect()
}

/// What a socket gets of what farwire asks for, and whether the system sends and receives packets in batches.
fn udp() -> Vec<Finding> {
    const BUFFERS: &str = "UDP receive buffer";
    let socket = match UdpSocket::bind("127.0.0.1:0") {
        Ok(socket) => socket,
        Err(error) => return vec![broken(BUFFERS, &error, "let this process open UDP sockets")],
    };
    let got = widen(&socket);
    let buffer = if got >= BUFFER {
        good(BUFFERS, format!("{} KiB", got >> 10))
    } else {
        Finding {
            state: State::Slow,
            advice: Some(format!(
                "raise the system's limit: sysctl -w net.core.rmem_max={BUFFER} net.core.wmem_max={BUFFER}"
            )),
            ..good(
                BUFFERS,
                format!(
                    "{} KiB of the {} KiB asked for; packets that find it full are sent again",
                    got >> 10,
                    BUFFER >> 10
                ),
            )
        }
    };
    let batches = match quinn::udp::UdpSocketState::new((&socket).into()) {
        Err(error) => vec![broken("UDP batches", &error, "let this process set socket options")],
        Ok(state) => [("sent", "GSO", state.max_gso_segments()), ("received", "GRO", state.gro_segments())]
            .into_iter()
            .map(|(way, name, segments)| {
                let what = format!("UDP packets {way} at once ({name})");
                if segments > 1 {
                    good(what, format!("up to {segments}"))
                } else {
                    let advice = "a Linux kernel from 5.0 on, and an interface that takes it, would send many with one call";
                    Finding { state: State::Slow, advice: Some(advice.to_owned()), ..good(what, "one") }
                }
            })
            .collect(),
    };
    std::iter::once(buffer).chain(batches).collect()
}

fn shared_memory() -> Finding {
    match Region::new(1, 1 << 20) {
        Ok(_) => good("shared memory", "sealed memory files work; ranks on this host will use them"),
        Err(error) => {
            broken("shared memory", &error, "allow memfd_create; until then ranks on one host use QUIC")
        }
    }
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
