//! A frame's journey: from a machine through its window, its interface and a link, to another
//! machine.

use std::time::Duration;

use farwire_proto::{HEADER_LEN, Header, Lane, Payload, Peer, Time, Transmit};

use super::{Happening, Sim};
use crate::network::{Interface, transfer_time};
use crate::node::FlightId;

/// How long before the interface is free a process starts to work on a frame.
const AHEAD: Duration = Duration::from_millis(1);

/// A frame on its way.
#[derive(Debug)]
pub(super) struct Flight {
    from: Peer,
    to: Peer,
    pub(super) header: Header,
    /// Set until it has departed.
    transmit: Option<Transmit>,
    departed: bool,
    /// When its last byte leaves, resent packets included.
    leaves: Time,
    /// Set once it has departed, unless only lengths are carried.
    pub(super) body: Option<Vec<u8>>,
    pub(super) depth: u32,
}

impl Flight {
    pub(super) fn wire_bytes(&self) -> usize {
        HEADER_LEN + self.header.payload as usize
    }

    fn lane(&self) -> Lane {
        Lane::of(self.from, &self.header)
    }
}

impl Sim {
    /// Hands a frame to the network, or holds it until its lane's window has room; `true` if held.
    pub(super) fn send(&mut self, from: Peer, transmit: Transmit) -> bool {
        let node = &mut self.nodes[from.index()];
        let depth = match &transmit.payload {
            Payload::Fault(_) | Payload::Nothing => 0,
            Payload::Parcel { .. } => 1,
            Payload::Operation { op, after, .. } => {
                node.machine.tag(*op).map_or(0, |job| job.depth_after(after))
            }
        };
        let (to, header) = (transmit.to, transmit.header);
        if !header.frame.is_notice() {
            let outstanding = node.outstanding.entry((to, Lane::of(from, &header))).or_default();
            let bytes = HEADER_LEN + header.payload as usize;
            if *outstanding > 0 && *outstanding + bytes > self.network.window {
                node.machine.hold(transmit);
                return true;
            }
            *outstanding += bytes;
        }
        let flight = Flight {
            from,
            to,
            header,
            transmit: Some(transmit),
            departed: false,
            leaves: Time::ZERO,
            body: None,
            depth,
        };
        let id = self.take_off(flight);
        self.queue_up(id);
        false
    }

    /// A frame waits until its process works on it: shortly before the interface is free for it.
    fn queue_up(&mut self, id: FlightId) {
        let flight = &self.flights[id.0];
        let (from, to, bytes) = (flight.from, flight.to, flight.wire_bytes());
        let (work, _) = self.network.work(from, to, bytes);
        if work.is_zero() || flight.header.frame.is_notice() {
            return self.depart(id, self.now);
        }
        let (interface, rate) = self.network.interface(from, to);
        let free = self.sender_free.get(&interface).copied().unwrap_or_default();
        let planned = self.planned.entry(interface).or_default();
        let start = self.now.max(*planned).max(free);
        *planned = start + transfer_time(bytes, rate);
        let due = Time(start.0.saturating_sub(AHEAD)).max(self.now);
        self.push(due, Happening::Prepare(from, id));
    }

    pub(super) fn prepare(&mut self, peer: Peer, id: FlightId) {
        let flight = &self.flights[id.0];
        let (work, _) = self.network.work(flight.from, flight.to, flight.wire_bytes());
        let ready = self.occupy(peer, work);
        self.depart(id, ready);
    }

    /// A sender learns that bytes of a lane were read.
    pub(super) fn window(&mut self, from: Peer, to: Peer, lane: Lane, bytes: usize) {
        let key = (to, lane);
        if let Some(outstanding) = self.nodes[from.index()].outstanding.get_mut(&key) {
            *outstanding -= bytes;
        }
        while let Some(transmit) = self.nodes[from.index()].machine.poll_held(to, lane) {
            if self.send(from, transmit) {
                return;
            }
        }
        if self.nodes[from.index()].outstanding.get(&key) == Some(&0) {
            self.nodes[from.index()].outstanding.remove(&key);
        }
    }

    /// A frame that is ready takes its turn on the sender's interface and on the link.
    fn depart(&mut self, id: FlightId, ready: Time) {
        let flight = &self.flights[id.0];
        let (from, to, bytes, lane) = (flight.from, flight.to, flight.wire_bytes(), flight.lane());
        let control = flight.header.frame.is_notice();
        let link = *self.network.link(from, to);
        let (delay, resent) = link.delay(bytes, &mut self.rng);

        let (interface, rate) = self.network.interface(from, to);
        let free = self.sender_free.entry(interface).or_default();
        let start = ready.max(*free);
        let end = start + transfer_time(bytes + resent, rate);
        *free = end;
        self.flights[id.0].leaves = end;
        let stats = &mut self.report.ranks[from.index()];
        stats.frames += 1;
        stats.wire_bytes += (bytes + resent) as u64;

        if !matches!(interface, Interface::Memory(_)) {
            stats.bytes_off_host += (bytes + resent) as u64;
            stats.sends(start, end);
        }
        self.push(end, Happening::Departed(from, id));

        let mut enters = start;
        if link.bandwidth.is_finite() {
            let free = self.link_free.entry((from, to)).or_default();
            enters = enters.max(*free);
            *free = enters + transfer_time(bytes, link.bandwidth);
        }
        let mut arrival = self.after_partitions(from, to, enters + delay);
        if !control {
            let last = self.last_arrival.entry((to, lane)).or_default();
            arrival = arrival.max(*last);
            *last = arrival;
        }
        self.push(arrival, Happening::Arriving(id));
    }

    pub(super) fn departed(&mut self, peer: Peer, id: FlightId) {
        let flight = &mut self.flights[id.0];
        let Some(transmit) = flight.transmit.take() else { return };
        // The bytes are read at the last moment that the engine's contract allows.
        self.nodes[peer.index()].machine.send(transmit, |frame| {
            let told = flight.header.payload as usize;
            let lengths = frame.tag.is_some_and(|job| job.lengths);
            assert!(lengths || frame.payload.len() == told, "the header tells the length");
            flight.body = Some(frame.payload.to_vec());
            true
        });
        if flight.body.is_none() {
            return; // failed meanwhile: the frame is never finished
        }
        if !flight.header.frame.is_notice() && !self.takes_step(peer) {
            return;
        }
        self.flights[id.0].departed = true;
        self.settle(peer);
    }

    pub(super) fn arriving(&mut self, id: FlightId) {
        let flight = &self.flights[id.0];
        let (from, to, bytes, leaves) =
            (flight.from, flight.to, flight.wire_bytes(), flight.leaves);
        let link = self.network.link(from, to);
        let (interface, rate) = self.network.interface(to, from);
        let free = self.receiver_free.entry(interface).or_default();
        *free = self.now.max(*free) + transfer_time(bytes, rate);
        // The last byte cannot arrive before it has come through the link, nor before it has left
        // and travelled.
        let through = self.now + transfer_time(bytes, link.bandwidth);
        let delivered = (*free).max(through).max(leaves + link.latency);
        let delivered = delivered.max(self.relayed(to, interface, bytes));
        self.push(delivered, Happening::Delivered(to, id));
    }

    /// When a frame that arrives now has passed the relay, if there is one.
    fn relayed(&mut self, to: Peer, interface: Interface, bytes: usize) -> Time {
        let work = Duration::from_secs_f64(self.network.costs.relay * bytes as f64);
        if work.is_zero() || matches!(interface, Interface::Memory(_)) {
            return self.now;
        }
        self.relay_free = self.occupy(to, work).max(self.relay_free + work);
        self.relay_free
    }

    /// A frame has arrived; its process works on it.
    pub(super) fn delivered(&mut self, peer: Peer, id: FlightId) {
        let flight = &self.flights[id.0];
        let (_, work) = self.network.work(flight.from, flight.to, flight.wire_bytes());
        if work.is_zero() || flight.header.frame.is_notice() {
            return self.read(peer, id);
        }
        let lane = flight.lane();
        let done = self.occupy(peer, work);
        let last = self.last_read.entry((peer, lane)).or_default();
        *last = done.max(*last);
        let done = *last;
        self.push(done, Happening::Read(peer, id));
    }

    pub(super) fn read(&mut self, peer: Peer, id: FlightId) {
        let flight = &mut self.flights[id.0];
        let from = flight.from;
        if !flight.departed || self.severed.contains(&(from, peer)) {
            return;
        }
        self.report.rounds = self.report.rounds.max(flight.depth);
        if flight.header.frame.is_notice() {
            let (header, body) = (flight.header, flight.body.take().unwrap_or_default());
            self.land(id);
            let machine = &mut self.nodes[peer.index()].machine;
            machine.handle_notice(from, &header, &body).expect("engines send notices that decode");
            return self.settle(peer);
        }
        let lane = flight.lane();
        let waiting = self.nodes[peer.index()].inbox.entry(lane).or_default();
        waiting.push_back(id);
        if waiting.len() == 1 {
            self.offer(peer, lane);
            if self.nodes[peer.index()].alive {
                self.settle(peer);
            }
        }
    }

    fn take_off(&mut self, flight: Flight) -> FlightId {
        match self.free_flights.pop() {
            Some(id) => {
                self.flights[id.0] = flight;
                id
            }
            None => {
                self.flights.push(flight);
                FlightId(self.flights.len() - 1)
            }
        }
    }

    /// A frame's journey is over, and its place can be used again.
    pub(super) fn land(&mut self, id: FlightId) {
        self.flights[id.0].body = None;
        self.free_flights.push(id);
    }
}
