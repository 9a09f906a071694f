//! Certificates from the token.
//!
//! From the token every process derives the same certificate authority. It then makes a key pair
//! and a certificate of its own, in memory, for the names
//! `r<rank>.e<epoch>.<cluster>.farwire` and `r<rank>.e<epoch>.<job>.<cluster>.farwire`. Both ends
//! of every connection check that the other's certificate is from this authority, for the rank it
//! claims, and of the same job. A process that does not know the token cannot make one.
//!
//! A connection is made to the first name, so that a process of another job gets far enough to be
//! told what is wrong. The second name is checked before anything that a process says is acted on.
//! A process that joins a running job does not know which rank's address it was given, so every
//! certificate has a third name, `member.<cluster>.farwire`.

use std::sync::Arc;

use farwire_proto::{Epoch, Peer};
use quinn::crypto::rustls::{QuicClientConfig, QuicServerConfig};
use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose, PKCS_ED25519,
};
use rustls::crypto::{CryptoProvider, aws_lc_rs};
use rustls::pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer, ServerName};
use rustls::server::WebPkiClientVerifier;
use rustls::{CipherSuite, RootCertStore, SupportedCipherSuite};
use time::{Duration, OffsetDateTime};

use super::job::JobName;
use crate::token::Token;

/// What the two sides agree to speak: over QUIC, and over TCP.
const ALPN: &[u8] = b"farwire/1";
const ALPN_TCP: &[u8] = b"farwire-tcp/1";
/// How long a certificate is valid. It is checked when a connection is made, and a process may be
/// called as long as it runs: perhaps weeks later, by one that joins. The key never leaves the
/// process.
const VALID: Duration = Duration::days(10 * 365);
/// How far clocks may differ.
const SKEW: Duration = Duration::days(1);

/// This process's certificate, and the authority that issues all of the cluster's.
#[derive(Debug)]
pub(crate) struct Identity {
    cluster: String,
    /// Derived from the token and the job's name.
    job: String,
    epoch: Epoch,
    authority: CertificateDer<'static>,
    certificate: CertificateDer<'static>,
    key: PrivatePkcs8KeyDer<'static>,
}

/// A key or a certificate could not be made.
#[derive(Debug, thiserror::Error)]
#[error("could not make this process's certificate: {0}")]
pub(crate) struct IdentityError(Box<dyn std::error::Error + Send + Sync>);

impl IdentityError {
    fn new(error: impl std::error::Error + Send + Sync + 'static) -> Self {
        Self(Box::new(error))
    }
}

impl Identity {
    pub(crate) fn new(
        token: &Token,
        peer: Peer,
        epoch: Epoch,
        job: &JobName,
    ) -> Result<Self, IdentityError> {
        let hex = |bytes: &[u8]| bytes.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
        let cluster = hex(&token.derive::<8>("cluster id"));
        let job = hex(&token.derive::<16>(&format!("job {}", job.key())));
        let now = OffsetDateTime::now_utc();

        // An Ed25519 private key is any 32 bytes; this is what precedes them in PKCS #8.
        let mut pkcs8 = vec![
            0x30, 0x2e, 0x02, 0x01, 0x00, 0x30, 0x05, 0x06, 0x03, 0x2b, 0x65, 0x70, 0x04, 0x22,
            0x04, 0x20,
        ];
        pkcs8.extend(token.derive::<32>("certificate authority"));
        let pkcs8 = PrivatePkcs8KeyDer::from(pkcs8);
        let authority_key = KeyPair::from_pkcs8_der_and_sign_algo(&pkcs8, &PKCS_ED25519)
            .map_err(IdentityError::new)?;
        let mut params = CertificateParams::default();
        params.distinguished_name.push(DnType::CommonName, format!("farwire cluster {cluster}"));
        params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign];
        let authority =
            params.self_signed(&authority_key).map_err(IdentityError::new)?.der().clone();
        let issuer = Issuer::new(params, authority_key);

        let key = KeyPair::generate().map_err(IdentityError::new)?;
        let names = vec![
            name(&cluster, peer, epoch),
            name_in_job(&cluster, &job, peer, epoch),
            name_of_any(&cluster),
        ];
        let mut params = CertificateParams::new(names).map_err(IdentityError::new)?;
        params.distinguished_name.push(DnType::CommonName, format!("farwire rank {}", peer.0));
        params.not_before = now - SKEW;
        params.not_after = now + VALID;
        params.extended_key_usages =
            vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
        let certificate =
            params.signed_by(&key, &issuer).map_err(IdentityError::new)?.der().clone();
        let key = PrivatePkcs8KeyDer::from(key.serialize_der());
        Ok(Self { cluster, job, epoch, authority, certificate, key })
    }

    /// The name that a peer's certificate must be for.
    pub(crate) fn name_of(&self, peer: Peer) -> String {
        name(&self.cluster, peer, self.epoch)
    }

    /// A name that every certificate of the cluster is for.
    pub(crate) fn name_of_any(&self) -> String {
        name_of_any(&self.cluster)
    }

    /// Whether the certificate that a peer showed, which is from the cluster's authority, is for
    /// the rank it claims.
    pub(crate) fn is_certified(&self, connection: &quinn::Connection, peer: Peer) -> bool {
        is_for(&shown(connection), self.name_of(peer))
    }

    /// Whether it is also for this job.
    pub(crate) fn is_of_this_job(&self, connection: &quinn::Connection, peer: Peer) -> bool {
        self.certifies(&shown(connection), peer)
    }

    /// Whether certificates that were shown, and are from the cluster's authority, are for this
    /// job and this rank.
    pub(crate) fn certifies(&self, chain: &[CertificateDer<'_>], peer: Peer) -> bool {
        is_for(chain, name_in_job(&self.cluster, &self.job, peer, self.epoch))
    }

    fn roots(&self) -> Result<Arc<RootCertStore>, IdentityError> {
        let mut roots = RootCertStore::empty();
        roots.add(self.authority.clone()).map_err(IdentityError::new)?;
        Ok(Arc::new(roots))
    }

    fn key(&self) -> PrivateKeyDer<'static> {
        self.key.clone_key().into()
    }

    pub(crate) fn server_config(&self) -> Result<quinn::ServerConfig, IdentityError> {
        let tls = self.server_tls(aws_lc_rs::default_provider(), ALPN)?;
        let tls = QuicServerConfig::try_from(tls).map_err(IdentityError::new)?;
        Ok(quinn::ServerConfig::with_crypto(Arc::new(tls)))
    }

    pub(crate) fn client_config(&self) -> Result<quinn::ClientConfig, IdentityError> {
        let tls = self.client_tls(aws_lc_rs::default_provider(), ALPN)?;
        let tls = QuicClientConfig::try_from(tls).map_err(IdentityError::new)?;
        Ok(quinn::ClientConfig::new(Arc::new(tls)))
    }

    /// How this process accepts, and makes, connections over TCP.
    pub(crate) fn tcp_configs(
        &self,
    ) -> Result<(Arc<rustls::ServerConfig>, Arc<rustls::ClientConfig>), IdentityError> {
        let mut provider = aws_lc_rs::default_provider();
        // The first suite that both sides have is used. Encryption is the largest cost, and the
        // shorter key, which is long enough, is a quarter cheaper.
        let shorter =
            |suite: &SupportedCipherSuite| suite.suite() != CipherSuite::TLS13_AES_128_GCM_SHA256;
        provider.cipher_suites.sort_by_key(shorter);
        let mut server = self.server_tls(provider.clone(), ALPN_TCP)?;
        let mut client = self.client_tls(provider, ALPN_TCP)?;
        // Each connection is made only once, so nothing is kept to resume it.
        server.send_tls13_tickets = 0;
        client.resumption = rustls::client::Resumption::disabled();
        Ok((Arc::new(server), Arc::new(client)))
    }

    fn server_tls(
        &self,
        provider: CryptoProvider,
        speaks: &[u8],
    ) -> Result<rustls::ServerConfig, IdentityError> {
        let provider = Arc::new(provider);
        let verifier = WebPkiClientVerifier::builder_with_provider(self.roots()?, provider.clone())
            .build()
            .map_err(IdentityError::new)?;
        let mut tls = rustls::ServerConfig::builder_with_provider(provider)
            .with_protocol_versions(&[&rustls::version::TLS13])
            .map_err(IdentityError::new)?
            .with_client_cert_verifier(verifier)
            .with_single_cert(vec![self.certificate.clone()], self.key())
            .map_err(IdentityError::new)?;
        tls.alpn_protocols = vec![speaks.to_vec()];
        Ok(tls)
    }

    fn client_tls(
        &self,
        provider: CryptoProvider,
        speaks: &[u8],
    ) -> Result<rustls::ClientConfig, IdentityError> {
        let mut tls = rustls::ClientConfig::builder_with_provider(Arc::new(provider))
            .with_protocol_versions(&[&rustls::version::TLS13])
            .map_err(IdentityError::new)?
            .with_root_certificates(self.roots()?)
            .with_client_auth_cert(vec![self.certificate.clone()], self.key())
            .map_err(IdentityError::new)?;
        tls.alpn_protocols = vec![speaks.to_vec()];
        Ok(tls)
    }
}

fn name(cluster: &str, peer: Peer, epoch: Epoch) -> String {
    format!("r{}.e{}.{cluster}.farwire", peer.0, epoch.0)
}

fn name_of_any(cluster: &str) -> String {
    format!("member.{cluster}.farwire")
}

fn name_in_job(cluster: &str, job: &str, peer: Peer, epoch: Epoch) -> String {
    format!("r{}.e{}.{job}.{cluster}.farwire", peer.0, epoch.0)
}

/// The certificates that a peer showed.
fn shown(connection: &quinn::Connection) -> Vec<CertificateDer<'static>> {
    let chain = connection.peer_identity().and_then(|chain| chain.downcast().ok());
    chain.map_or_else(Vec::new, |chain| *chain)
}

/// Whether the first of these certificates is for this name.
fn is_for(chain: &[CertificateDer<'_>], name: String) -> bool {
    let Some(certificate) = chain.first() else { return false };
    let Ok(name) = ServerName::try_from(name) else { return false };
    webpki::EndEntityCert::try_from(certificate)
        .is_ok_and(|certificate| certificate.verify_is_valid_for_subject_name(&name).is_ok())
}
