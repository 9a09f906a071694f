//! Counters for Prometheus, in its text format, over HTTP.
//!
//! `FARWIRE_METRICS=addr:port` asks for it. Several ranks on one host share the setting: each takes
//! the first free port from there on, among 64 or, in a larger world, as many as there are ranks.
//! Every line carries the rank. `/flight` gives the flight record. Whoever can reach the port can
//! read; bind it to loopback or a private address.

use std::fmt::Write as _;
use std::net::SocketAddr;
use std::sync::{Arc, Weak};
use std::time::Duration;

use farwire_proto::{Kind, Peer, WorldSize};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;

use crate::driver::Driver;
use crate::node::Node;
use crate::observe::tally::BUCKETS;

/// All counters of a driver, as Prometheus reads them.
pub(crate) fn render(driver: &Driver, rank: u32) -> String {
    let mut text = String::new();
    let mut line = |line: std::fmt::Arguments<'_>| {
        writeln!(text, "{line}").expect("writing to a string does not fail");
    };
    line(format_args!("# HELP farwire_operation_seconds How long operations took that succeeded."));
    line(format_args!("# TYPE farwire_operation_seconds histogram"));
    let kinds = || Kind::ALL.iter().zip(&driver.observer().tally.kinds);
    for (kind, tally) in kinds().filter(|(_, tally)| tally.done > 0) {
        let labels = format!("rank=\"{rank}\",kind=\"{kind}\"");
        let mut below = 0;
        for (bound, within) in BUCKETS.iter().zip(tally.within) {
            below += within;
            line(format_args!(
                "farwire_operation_seconds_bucket{{{labels},le=\"{bound}\"}} {below}"
            ));
        }
        line(format_args!(
            "farwire_operation_seconds_bucket{{{labels},le=\"+Inf\"}} {}",
            tally.done
        ));
        line(format_args!("farwire_operation_seconds_sum{{{labels}}} {}", tally.seconds));
        line(format_args!("farwire_operation_seconds_count{{{labels}}} {}", tally.done));
    }
    line(format_args!("# HELP farwire_operations_failed_total Operations that failed."));
    line(format_args!("# TYPE farwire_operations_failed_total counter"));
    for (kind, tally) in kinds().filter(|(_, tally)| tally.failed > 0) {
        let failed = tally.failed;
        line(format_args!(
            "farwire_operations_failed_total{{rank=\"{rank}\",kind=\"{kind}\"}} {failed}"
        ));
    }
    line(format_args!(
        "# HELP farwire_operations_in_flight Operations that have begun and not ended."
    ));
    line(format_args!("# TYPE farwire_operations_in_flight gauge"));
    line(format_args!("farwire_operations_in_flight{{rank=\"{rank}\"}} {}", driver.in_flight()));

    let peers = || driver.traffic_by_peer().enumerate().filter(|(peer, _)| *peer != rank as usize);
    let mut counter = |name: &str, help: &str, value: &dyn Fn(usize) -> u64| {
        line(format_args!("# HELP {name} {help}"));
        line(format_args!("# TYPE {name} counter"));
        for (peer, (.., link)) in peers() {
            let link = link.unwrap_or("lost");
            let value = value(peer);
            line(format_args!("{name}{{rank=\"{rank}\",peer=\"{peer}\",link=\"{link}\"}} {value}"));
        }
    };
    let traffic: Vec<_> = driver.traffic_by_peer().collect();
    counter("farwire_sent_bytes_total", "Bytes handed to links, headers included.", &|peer| {
        traffic[peer].0.bytes
    });
    counter("farwire_sent_frames_total", "Frames handed to links.", &|peer| traffic[peer].0.frames);
    counter("farwire_received_bytes_total", "Bytes taken from links, headers included.", &|peer| {
        traffic[peer].1.bytes
    });
    counter("farwire_received_frames_total", "Frames taken from links.", &|peer| {
        traffic[peer].1.frames
    });
    let path = |peer: usize| driver.path(Peer(peer as u32));
    counter("farwire_sent_packets_total", "Packets sent over a network.", &|peer| {
        path(peer).map_or(0, |path| path.sent)
    });
    counter("farwire_lost_packets_total", "Packets that the network lost.", &|peer| {
        path(peer).map_or(0, |path| path.lost)
    });
    let paths = || (0..traffic.len()).filter_map(|peer| Some((peer, path(peer)?)));
    line(format_args!("# HELP farwire_round_trip_seconds How long an answer takes, lately."));
    line(format_args!("# TYPE farwire_round_trip_seconds gauge"));
    for (peer, path) in paths() {
        let seconds = path.round_trip.as_secs_f64();
        line(format_args!(
            "farwire_round_trip_seconds{{rank=\"{rank}\",peer=\"{peer}\"}} {seconds}"
        ));
    }
    line(format_args!("# HELP farwire_window_bytes How much may be under way."));
    line(format_args!("# TYPE farwire_window_bytes gauge"));
    for (peer, path) in paths() {
        line(format_args!(
            "farwire_window_bytes{{rank=\"{rank}\",peer=\"{peer}\"}} {}",
            path.window
        ));
    }
    text
}

/// The fewest ports that are tried; in a larger world, one for each rank.
const MIN_PORTS: u32 = 64;

/// Listens at the first free port from `address` on.
pub(crate) fn listen(
    address: SocketAddr,
    world: WorldSize,
) -> std::io::Result<std::net::TcpListener> {
    let last = u32::from(address.port()) + world.get().max(MIN_PORTS) - 1;
    let last = u16::try_from(last).unwrap_or(u16::MAX);
    for port in address.port()..=last {
        match std::net::TcpListener::bind((address.ip(), port)) {
            Ok(listener) => {
                listener.set_nonblocking(true)?;
                return Ok(listener);
            }
            Err(error) if error.kind() == std::io::ErrorKind::AddrInUse => {}
            Err(error) => {
                let text = format!("{address}: {error}; name an address of this host, and a port");
                return Err(std::io::Error::new(error.kind(), text));
            }
        }
    }
    let text = format!("all ports from {} to {last} are in use; begin at another", address.port());
    Err(std::io::Error::new(std::io::ErrorKind::AddrInUse, text))
}

/// Connections at once, and how long each may take.
const CONNECTIONS: usize = 8;
const PATIENCE: Duration = Duration::from_secs(5);

/// Answers requests, for as long as the node is there.
pub(crate) async fn serve(listener: std::net::TcpListener, rank: u32, node: Weak<Node>) {
    let Ok(listener) = TcpListener::from_std(listener) else { return };
    let free = Arc::new(Semaphore::new(CONNECTIONS));
    while let Ok(place) = free.clone().acquire_owned().await {
        let stream = match listener.accept().await {
            Ok((stream, _)) => stream,
            Err(_) => {
                tokio::time::sleep(Duration::from_millis(100)).await; // out of files, perhaps
                continue;
            }
        };
        let node = node.clone();
        tokio::spawn(async move {
            let _ = tokio::time::timeout(PATIENCE, answer(stream, rank, &node)).await;
            drop(place);
        });
    }
}

async fn answer(mut stream: TcpStream, rank: u32, node: &Weak<Node>) -> std::io::Result<()> {
    let mut request = [0; 1024];
    let mut len = 0;
    // Only the first line counts.
    while len < request.len() && !request[..len].contains(&b'\n') {
        match stream.read(&mut request[len..]).await? {
            0 => break,
            more => len += more,
        }
    }
    let Some(node) = node.upgrade() else { return Ok(()) };
    let request = String::from_utf8_lossy(&request[..len]).into_owned();
    let (status, kind, body) = match request.split(' ').nth(1) {
        Some("/metrics" | "/") => {
            ("200 OK", "text/plain; version=0.0.4", render(&node.driver(), rank))
        }
        Some("/flight") => {
            let flight = node.driver().flight("asked over HTTP"); // the lock is free again
            ("200 OK", "application/json", flight.to_json())
        }
        _ => ("404 Not Found", "text/plain", "there is /metrics, and /flight\n".to_owned()),
    };
    drop(node);
    let head = format!(
        "HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {}\r\nConnection: close\r\n\r\n",
        body.len()
    );
    stream.write_all(head.as_bytes()).await?;
    stream.write_all(body.as_bytes()).await?;
    stream.shutdown().await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ports_that_are_all_in_use_are_named() {
        let last = SocketAddr::from(([127, 0, 0, 1], u16::MAX));
        let _taken = std::net::TcpListener::bind(last); // or somebody else has it
        let error = listen(last, WorldSize::new(2).unwrap()).unwrap_err().to_string();
        assert!(error.contains("from 65535 to 65535"), "{error}");
    }
}
