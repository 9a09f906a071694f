//! The rootful carrier: datagrams between hosts that are network namespaces.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on should say where")]

use std::net::{SocketAddr, UdpSocket};
use std::time::Duration;

use farwire_netlab::{Impairments, Lab, LabError, Loss};

/// A laboratory, or the reason why the test is skipped.
fn lab(hosts: usize, what: &Impairments) -> Option<Lab> {
    match Lab::new(hosts, what, 7) {
        Ok(lab) => Some(lab),
        Err(error @ LabError::System { .. }) => {
            eprintln!("skipped: {error}");
            None
        }
        Err(error) => panic!("{error}"),
    }
}

fn address(host: usize) -> SocketAddr {
    (Lab::address(host), 4000).into()
}

/// Runs each host's part on a thread of its own. The second host echoes until it is told to end.
fn ping(lab: &Lab, client: impl FnOnce(&UdpSocket) + Send) {
    std::thread::scope(|scope| {
        let (ready, listening) = std::sync::mpsc::channel();
        scope.spawn(move || {
            lab.enter(1).unwrap();
            let socket = UdpSocket::bind(address(1)).unwrap();
            socket.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
            ready.send(()).unwrap();
            let mut buffer = [0; 2000];
            while let Ok((len, from)) = socket.recv_from(&mut buffer) {
                socket.send_to(&buffer[..len], from).unwrap();
                if &buffer[..len] == b"end" {
                    return;
                }
            }
            panic!("nobody said that it is over");
        });
        scope.spawn(move || {
            lab.enter(0).unwrap();
            listening.recv().unwrap();
            let socket = UdpSocket::bind(address(0)).unwrap();
            client(&socket);
            // Repeats it until it is heard, since packets are lost.
            socket.set_read_timeout(Some(Duration::from_millis(100))).unwrap();
            let mut buffer = [0; 2000];
            for _ in 0..100 {
                socket.send_to(b"end", address(1)).unwrap();
                while let Ok(len) = socket.recv(&mut buffer) {
                    if &buffer[..len] == b"end" {
                        return;
                    }
                }
            }
            panic!("no answer");
        });
    });
}

#[test]
fn packets_cross_and_some_are_lost() {
    let what = Impairments {
        rate: Some(12.5e6),
        delay: Duration::from_millis(5),
        loss: Loss::Random(0.1),
        ..Impairments::default()
    };
    let Some(lab) = lab(2, &what) else { return };
    ping(&lab, |socket| {
        for number in 0u32..200 {
            socket.send_to(&number.to_le_bytes(), address(1)).unwrap();
        }
    });
    let tally = lab.close().hosts;
    assert!((8..40).contains(&tally[0].lost), "a tenth of 200 were to be lost: {tally:?}");
    assert!(tally[1].passed > 100, "echoes came back: {tally:?}");
}

#[test]
fn long_packets_vanish_without_a_word() {
    let what = Impairments { mtu: Some(1300), ..Impairments::default() };
    let Some(lab) = lab(2, &what) else { return };
    ping(&lab, |socket| {
        socket.send_to(&[0; 1400], address(1)).unwrap();
        socket.send_to(&[1; 1200], address(1)).unwrap();
        socket.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        let mut buffer = [0; 2000];
        assert_eq!(
            socket.recv(&mut buffer).unwrap(),
            1200,
            "the shorter one is all that comes back"
        );
    });
    assert_eq!(lab.close().hosts[0].vanished, 1);
}

#[test]
fn a_laboratory_needs_a_host() {
    assert!(matches!(Lab::new(0, &Impairments::default(), 1), Err(LabError::Hosts(0))));
    assert!(matches!(Lab::new(255, &Impairments::default(), 1), Err(LabError::Hosts(255))));
}
