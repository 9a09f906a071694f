//! The carrier without privileges: quinn over a network in memory, in virtual time.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on should say where")]

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use farwire_netlab::{Impairments, Loss, MemoryNetwork};
use quinn::{ClientConfig, Connection, Endpoint, EndpointConfig, ServerConfig, TokioRuntime};

fn address(host: u8) -> SocketAddr {
    SocketAddr::from(([10, 77, 0, host], 4000))
}

/// Two endpoints, and the connection between them.
async fn connect(
    network: &MemoryNetwork,
    what: &Impairments,
) -> ([Endpoint; 2], Connection, Connection) {
    let made = rcgen::generate_simple_self_signed(vec!["host".to_owned()]).unwrap();
    let key = rustls::pki_types::PrivatePkcs8KeyDer::from(made.signing_key.serialize_der());
    let certificate = made.cert.der().clone();
    let server = ServerConfig::with_single_cert(vec![certificate.clone()], key.into()).unwrap();
    let mut roots = rustls::RootCertStore::empty();
    roots.add(certificate).unwrap();
    let client = ClientConfig::with_root_certificates(Arc::new(roots)).unwrap();
    let endpoint = |host: u8, server| {
        let socket = network.host(address(host), what, host.into());
        let runtime = Arc::new(TokioRuntime);
        Endpoint::new_with_abstract_socket(EndpointConfig::default(), server, socket, runtime)
            .unwrap()
    };
    let (mut here, there) = (endpoint(1, None), endpoint(2, Some(server)));
    here.set_default_client_config(client);
    let connecting = here.connect(address(2), "host").unwrap();
    let accepting = async { there.accept().await.unwrap().await.unwrap() };
    let (near, far) = tokio::join!(connecting, accepting);
    (([here, there]), near.unwrap(), far)
}

#[tokio::test(start_paused = true)]
async fn a_transfer_takes_the_time_of_its_line() {
    let what = Impairments {
        rate: Some(1.25e6),
        delay: Duration::from_millis(20),
        loss: Loss::Random(0.003),
        ..Impairments::default()
    };
    let network = MemoryNetwork::new();
    let (_endpoints, near, far) = connect(&network, &what).await;
    assert!(near.rtt() >= Duration::from_millis(40), "{:?}", near.rtt());
    let start = tokio::time::Instant::now();
    let data = vec![7; 2_500_000];
    let sending = async {
        let mut stream = near.open_uni().await.unwrap();
        stream.write_all(&data).await.unwrap();
        stream.finish().unwrap();
    };
    let receiving =
        async { far.accept_uni().await.unwrap().read_to_end(usize::MAX).await.unwrap() };
    let ((), received) = tokio::join!(sending, receiving);
    assert_eq!(received, data);
    // Virtual time, so this holds on any machine: 2 s at the rate, and no more than three times
    // that.
    let took = start.elapsed();
    assert!((Duration::from_secs(2)..Duration::from_secs(6)).contains(&took), "{took:?}");
    assert!(network.tally(address(1)).lost > 0);
}

#[tokio::test(start_paused = true)]
async fn nothing_gets_through_a_black_hole() {
    let outages = vec![farwire_netlab::Outage { from: Duration::from_secs(1), to: None }];
    let network = MemoryNetwork::new();
    let (_endpoints, near, _far) =
        connect(&network, &Impairments { outages, ..Impairments::default() }).await;
    tokio::time::sleep(Duration::from_secs(2)).await; // virtual
    near.open_uni().await.unwrap().write_all(b"is anybody there").await.unwrap();
    assert!(matches!(near.closed().await, quinn::ConnectionError::TimedOut));
}
