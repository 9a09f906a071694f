//! Who reaches whom: hosts that can call but not be called, as behind NAT or a firewall, and
//! networks that are cut in two.

use std::collections::HashSet;
use std::time::Duration;

use crate::impair::{Cut, Impairments, Outage, Partition};

/// Lets a packet through to a hidden host only if that host has sent one the other way before.
#[derive(Debug)]
pub(crate) struct Firewall {
    partitions: Vec<Partition>,
    hidden: Vec<usize>,
    open: HashSet<Flow>,
}

/// Protocol, source and destination, both with their ports.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Flow {
    protocol: u8,
    from: ([u8; 4], [u8; 2]),
    to: ([u8; 4], [u8; 2]),
}

impl Flow {
    /// The flow of an IPv4 packet with ports.
    fn of(packet: &[u8]) -> Option<Self> {
        let header = 4 * usize::from(packet.first()? & 15);
        let address = |at| packet.get(at..).and_then(|rest| rest.first_chunk().copied());
        let port = |at: usize| packet.get(at..).and_then(|rest| rest.first_chunk().copied());
        Some(Self {
            protocol: *packet.get(9)?,
            from: (address(12)?, port(header)?),
            to: (address(16)?, port(header + 2)?),
        })
    }

    fn back(self) -> Self {
        Self { from: self.to, to: self.from, ..self }
    }
}

impl Firewall {
    pub(crate) fn new(what: &Impairments) -> Self {
        let (partitions, hidden) = (what.partitions.clone(), what.hidden.clone());
        Self { partitions, hidden, open: HashSet::new() }
    }

    /// Cuts the network from now on.
    pub(crate) fn cut(&mut self, now: Duration, cut: Cut) {
        let Cut { side, one_way, lasts } = cut;
        self.partitions.retain(|old| old.time.to.is_none_or(|to| to > now));
        let time = Outage { from: now, to: Some(now + lasts) };
        self.partitions.push(Partition { side, time, one_way });
    }

    /// Whether a packet between two hosts gets through.
    pub(crate) fn passes(&mut self, now: Duration, from: usize, to: usize, packet: &[u8]) -> bool {
        if self.partitions.iter().any(|partition| partition.separates(from, to, now)) {
            return false;
        }
        if self.hidden.is_empty() {
            return true;
        }
        let Some(flow) = Flow::of(packet) else { return true };
        if self.hidden.contains(&from) {
            self.open.insert(flow);
        }
        !self.hidden.contains(&to) || self.open.contains(&flow.back())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A UDP packet between two ports of two hosts.
    fn packet(from: (u8, u8), to: (u8, u8)) -> Vec<u8> {
        let mut packet = vec![0; 28];
        (packet[0], packet[9]) = (0x45, 17);
        packet[12..16].copy_from_slice(&[10, 77, 0, from.0]);
        packet[16..20].copy_from_slice(&[10, 77, 0, to.0]);
        (packet[21], packet[23]) = (from.1, to.1);
        packet
    }

    #[test]
    fn a_hidden_host_is_answered_but_not_called() {
        let what = Impairments { hidden: vec![1], ..Impairments::default() };
        let mut firewall = Firewall::new(&what);
        let mut passes =
            |from, to, packet: &[u8]| firewall.passes(Duration::ZERO, from, to, packet);
        assert!(!passes(0, 1, &packet((1, 7), (2, 8))), "nobody has called");
        assert!(passes(1, 0, &packet((2, 8), (1, 7))));
        assert!(passes(0, 1, &packet((1, 7), (2, 8))), "an answer");
        assert!(!passes(0, 1, &packet((1, 9), (2, 8))), "from another port");
        assert!(!passes(2, 1, &packet((3, 7), (2, 8))), "from another host");
        assert!(passes(0, 2, &packet((1, 7), (3, 8))), "to one that is not hidden");
        assert!(passes(0, 1, &[0x45]), "whatever it is, it has no ports");
    }
    #[test]
    fn a_network_is_cut_in_two_for_a_while() {
        let second = Duration::from_secs(1);
        let time = Outage { from: second, to: Some(3 * second) };
        let firewall = |one_way| {
            let partitions = vec![Partition { side: vec![0, 1], time, one_way }];
            Firewall::new(&Impairments { partitions, ..Impairments::default() })
        };
        let mut mute = firewall(true);
        assert!(!mute.passes(second, 0, 2, &[]) && mute.passes(second, 2, 0, &[]), "it hears");
        let mut firewall = firewall(false);
        let mut passes = |now, from, to| firewall.passes(now, from, to, &[]);
        assert!(passes(second / 2, 0, 2), "not yet");
        assert!(!passes(second, 0, 2) && !passes(2 * second, 3, 1), "from one side to the other");
        assert!(passes(second, 0, 1) && passes(second, 2, 3), "within a side");
        assert!(passes(3 * second, 0, 2), "no longer");
        firewall.cut(4 * second, Cut { side: vec![2], one_way: false, lasts: second });
        let mut passes = |now, from, to| firewall.passes(now, from, to, &[]);
        assert!(!passes(4 * second, 0, 2) && passes(4 * second, 0, 3), "by hand");
        assert!(passes(5 * second, 0, 2), "and for so long");
    }
}
