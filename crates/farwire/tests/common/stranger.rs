//! Strangers: they do not have the token, and try anyway.

use std::collections::HashSet;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream, UdpSocket};
use std::sync::Arc;
use std::sync::mpsc;
use std::time::Duration;

use quinn::crypto::rustls::QuicClientConfig;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{CryptoProvider, aws_lc_rs, verify_tls13_signature};
use rustls::pki_types::{CertificateDer, PrivatePkcs8KeyDer, ServerName, UnixTime};
use rustls::{DigitallySignedStruct, SignatureScheme};

use super::relay::{Relay, Way};

/// Believes any certificate.
#[derive(Debug)]
struct Credulous(Arc<CryptoProvider>);

impl ServerCertVerifier for Credulous {
    fn verify_server_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        unreachable!("QUIC speaks TLS 1.3")
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        verify_tls13_signature(
            message,
            certificate,
            signed,
            &self.0.signature_verification_algorithms,
        )
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.signature_verification_algorithms.supported_schemes()
    }
}

/// Speaks as ranks do, with a certificate of its own making or with none.
fn tls(own_certificate: bool, speaks: &[u8]) -> rustls::ClientConfig {
    let provider = Arc::new(aws_lc_rs::default_provider());
    let tls = rustls::ClientConfig::builder_with_provider(provider.clone())
        .with_protocol_versions(&[&rustls::version::TLS13])
        .unwrap()
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(Credulous(provider)));
    let mut tls = if own_certificate {
        let made =
            rcgen::generate_simple_self_signed(vec!["r1.e0.0123456789abcdef.farwire".to_owned()])
                .unwrap();
        let key = PrivatePkcs8KeyDer::from(made.signing_key.serialize_der());
        tls.with_client_auth_cert(vec![made.cert.der().clone()], key.into()).unwrap()
    } else {
        tls.with_no_client_auth()
    };
    tls.alpn_protocols = vec![speaks.to_vec()];
    tls
}

/// A QUIC client.
fn client(own_certificate: bool) -> quinn::Endpoint {
    let tls = tls(own_certificate, b"farwire/1");
    let config = quinn::ClientConfig::new(Arc::new(QuicClientConfig::try_from(tls).unwrap()));
    let mut endpoint = quinn::Endpoint::client("127.0.0.1:0".parse().unwrap()).unwrap();
    endpoint.set_default_client_config(config);
    endpoint
}

/// Connects without the token, and returns what it is told.
pub(crate) async fn knock(server: SocketAddr, own_certificate: bool) -> String {
    let endpoint = client(own_certificate);
    match endpoint.connect(server, "r0.e0.0123456789abcdef.farwire").unwrap().await {
        Err(error) => error.to_string(),
        // A client is done with the handshake before the server has looked at its certificate.
        Ok(connection) => connection.closed().await.to_string(),
    }
}

/// Connects over TCP without the token, and returns what it is told.
pub(crate) fn knock_tcp(server: SocketAddr, own_certificate: bool) -> String {
    let name = ServerName::try_from("r0.e0.0123456789abcdef.farwire").unwrap();
    let tls = Arc::new(tls(own_certificate, b"farwire-tcp/1"));
    let mut tls = rustls::ClientConnection::new(tls, name).unwrap();
    let mut socket = TcpStream::connect(server).unwrap();
    socket.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    // A client is done with the handshake before the server has looked at its certificate.
    let told = rustls::Stream::new(&mut tls, &mut socket).read(&mut [0; 100]);
    told.map_or_else(|error| error.to_string(), |length| format!("{length} bytes"))
}

/// Connections over TCP, until they are dropped: every other one says nothing, and the others say
/// what could be the beginning of a handshake.
pub(crate) fn half_open_tcp(server: SocketAddr, count: usize) -> Vec<TcpStream> {
    let connect = |index: usize| {
        let mut socket = TcpStream::connect(server).unwrap();
        if index.is_multiple_of(2) {
            socket.write_all(&[0x16, 3, 1, 1, 0, 1, 0, 0, 0xfc, 3, 3]).unwrap();
        }
        socket
    };
    (0..count).map(connect).collect()
}

/// Sends noise over TCP, on this many connections.
pub(crate) fn garbage_tcp(server: SocketAddr, count: usize) {
    let mut noise = 1u64;
    for _ in 0..count {
        let bytes: Vec<u8> = (0..3000)
            .map(|_| {
                noise = noise.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                (noise >> 56) as u8
            })
            .collect();
        let mut socket = TcpStream::connect(server).unwrap();
        let _ = socket.write_all(&bytes); // it may be turned away in the middle
    }
}

/// Handshakes that strangers have begun and do not go on with, until this is dropped.
#[derive(Debug)]
pub(crate) struct HalfOpen {
    _connecting: tokio::task::JoinSet<()>,
    _relay: Relay,
}

/// Opens this many handshakes, each as far as the server's certificate, and returns when the server
/// has answered all of them.
pub(crate) async fn half_open(server: SocketAddr, count: usize) -> HalfOpen {
    let (answered, all_answered) = mpsc::channel();
    let mut connections = HashSet::new();
    // Only first packets reach the server, and only its request to prove the address comes back:
    // the strangers do not learn that they were answered, and wait.
    let relay = Relay::start(server, move |way, datagram| {
        let Some(Packet { kind, to }) = Packet::parse(datagram) else { return false };
        if way == Way::ToClient && kind == INITIAL && connections.insert(to.to_vec()) {
            let _ = answered.send(());
        }
        kind == if way == Way::ToServer { INITIAL } else { RETRY }
    });
    let (endpoint, address) = (client(false), relay.address);
    let mut connecting = tokio::task::JoinSet::new();
    for _ in 0..count {
        let endpoint = endpoint.clone();
        connecting.spawn(async move {
            loop {
                let _ = endpoint.connect(address, "r0.farwire").unwrap().await; // it gave up; again
            }
        });
    }
    let waited =
        tokio::task::spawn_blocking(move || (0..count).all(|_| all_answered.recv().is_ok()));
    assert!(waited.await.unwrap());
    HalfOpen { _connecting: connecting, _relay: relay }
}

const INITIAL: u8 = 0;
const RETRY: u8 = 3;

/// What can be read of a packet without keys.
struct Packet<'a> {
    kind: u8,
    /// The connection, as its receiver calls it.
    to: &'a [u8],
}

impl<'a> Packet<'a> {
    fn parse(datagram: &'a [u8]) -> Option<Self> {
        let first = *datagram.first().filter(|first| **first & 0x80 != 0)?;
        let length = usize::from(*datagram.get(5)?);
        Some(Self { kind: first >> 4 & 3, to: datagram.get(6..6 + length)? })
    }
}

/// Sends datagrams of noise, every other one made to look like a connection's first packet.
pub(crate) fn garbage(server: SocketAddr, count: usize) {
    let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
    let mut noise = 1u64;
    for i in 0..count {
        let mut datagram: Vec<u8> = (0..i % 1400)
            .map(|_| {
                noise = noise.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                (noise >> 56) as u8
            })
            .collect();
        if i % 2 == 0 {
            datagram.resize(1200, 0x5a);
            datagram[0] = 0xc0 | datagram[0] & 0x0f;
            datagram[1..6].copy_from_slice(&[0, 0, 0, 1, 8]);
        }
        let _ = socket.send_to(&datagram, server);
    }
}
