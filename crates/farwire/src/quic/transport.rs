//! What QUIC is told about a connection before it begins.

use std::net::{SocketAddr, UdpSocket};
use std::sync::Arc;
use std::time::Duration;

use quinn::{AckFrequencyConfig, EndpointConfig, MtuDiscoveryConfig, TransportConfig, VarInt};
use rustix::net::sockopt;

use super::batches::fitting::{FITTING, Watching};
use super::congestion::Congestion;
use super::link;

/// Bytes of the smallest payload that every path of QUIC carries.
const LEAST_PAYLOAD: u16 = 1200;
/// Bytes of the longest payload that is tried. quinn hands the kernel ten packets at once, which
/// together must stay below 64 KiB.
const LONGEST_PAYLOAD: u16 = 6500;
/// Bytes of the headers of IPv6 and UDP.
const HEADERS: u32 = 48;

/// Packets that the peer need not acknowledge at once, and for how long. Acknowledgements take some of
/// the line on which data goes the other way, and some of both sides' cores. With more packets, a
/// window that holds few would wait for the time to pass.
const UNACKNOWLEDGED: VarInt = VarInt::from_u32(4);
const ACKNOWLEDGED_WITHIN: Duration = Duration::from_millis(5);

/// After this time without a packet, one is sent. A peer that waits for others to join may have
/// nothing to say for longer than the idle timeout.
pub(crate) const KEEP_ALIVE: Duration = Duration::from_secs(3);

/// Settings for the connections of one endpoint.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Transport {
    pub(crate) congestion: Congestion,
}

impl Transport {
    /// Settings for the endpoint itself.
    pub(crate) fn endpoint() -> EndpointConfig {
        let mut config = EndpointConfig::default();
        config
            .max_udp_payload_size(LONGEST_PAYLOAD)
            .expect("it is above the least that QUIC allows");
        config
    }

    /// Settings for a connection to `peer`. They allow little: a link that carries data asks for
    /// more later, and strangers never get there.
    pub(crate) fn to(self, peer: SocketAddr) -> Arc<TransportConfig> {
        let mut packets = MtuDiscoveryConfig::default();
        packets.upper_bound(longest_payload(peer));
        let mut transport = TransportConfig::default();
        let controllers = self.congestion.factory();
        transport
            .congestion_controller_factory(Arc::new(Watching { controllers, fitting: &FITTING }))
            .ack_frequency_config(Some(acknowledgements()))
            .mtu_discovery_config(Some(packets))
            .max_concurrent_uni_streams(0u32.into())
            .max_concurrent_bidi_streams(4u32.into())
            .stream_receive_window(link::STREAM_WINDOW)
            .receive_window(link::STREAM_WINDOW)
            .send_window(link::CONNECTION_WINDOW.into_inner())
            .datagram_receive_buffer_size(None)
            .keep_alive_interval(Some(KEEP_ALIVE))
            // A first packet that finds nobody listening yet is soon sent again.
            .initial_rtt(Duration::from_millis(50))
            .max_idle_timeout(Some(VarInt::from_u32(10_000).into()));
        Arc::new(transport)
    }
}

/// How often the peer is to acknowledge.
pub(crate) fn acknowledgements() -> AckFrequencyConfig {
    let mut config = AckFrequencyConfig::default();
    config.ack_eliciting_threshold(UNACKNOWLEDGED).max_ack_delay(Some(ACKNOWLEDGED_WITHIN));
    config
}

/// The longest payload that the first link of the route to `peer` carries. Whether the rest of the
/// path does is for quinn to find out, which begins with the least and tries longer ones.
fn longest_payload(peer: SocketAddr) -> u16 {
    let route = || -> std::io::Result<u32> {
        // Connecting a UDP socket sends nothing.
        let any: SocketAddr =
            if peer.is_ipv4() { ([0; 4], 0).into() } else { ([0u16; 8], 0).into() };
        let socket = UdpSocket::bind(any)?;
        socket.connect(peer)?;
        Ok(if peer.is_ipv4() { sockopt::ip_mtu(&socket)? } else { sockopt::ipv6_mtu(&socket)? })
    };
    let payload = route().map_or(0, |mtu| mtu.saturating_sub(HEADERS));
    u16::try_from(payload).unwrap_or(u16::MAX).clamp(LEAST_PAYLOAD, LONGEST_PAYLOAD)
}

/// Makes the system keep more packets for a socket while this process is busy, as far as it allows;
/// those it cannot keep have to be sent again. Returns the bytes it keeps for the receiver.
pub(crate) fn widen(socket: &UdpSocket) -> usize {
    // Beyond the system's limit for a privileged process, up to it for any other.
    if sockopt::set_socket_recv_buffer_size_force(socket, BUFFER).is_err() {
        let _ = sockopt::set_socket_recv_buffer_size(socket, BUFFER);
    }
    let _ = sockopt::set_socket_send_buffer_size(socket, BUFFER);
    let got = sockopt::socket_recv_buffer_size(socket).unwrap_or(0);
    if got < BUFFER {
        tracing::debug!(
            got,
            wanted = BUFFER,
            "the system limits UDP buffers; raise net.core.rmem_max for speed"
        );
    }
    got
}

/// Bytes that are asked for.
pub(crate) const BUFFER: usize = 8 << 20;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packets_to_this_host_may_be_longer_than_those_of_an_ethernet() {
        for loopback in ["127.0.0.1:9", "[::1]:9"] {
            let peer = loopback.parse().unwrap();
            if UdpSocket::bind(SocketAddr::new(SocketAddr::ip(&peer), 0)).is_ok() {
                assert_eq!(longest_payload(peer), LONGEST_PAYLOAD, "{loopback}");
            }
        }
    }

    #[test]
    fn without_a_route_packets_stay_short() {
        assert_eq!(longest_payload("255.255.255.255:9".parse().unwrap()), LEAST_PAYLOAD);
    }
}
