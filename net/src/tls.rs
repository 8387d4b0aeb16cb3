//! TLS 1.3 from certificate files, for both sides. Session resumption is off: a resumed session would keep a client
//! certificate that has been revoked meanwhile.

use std::path::Path;
use std::sync::Arc;

use rustls::client::Resumption;
use rustls::pki_types::pem::{self, PemObject};
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::server::{NoServerSessionStorage, WebPkiClientVerifier};
use rustls::{ClientConfig, RootCertStore, ServerConfig};
use x509_parser::prelude::{FromDer, GeneralName, X509Certificate};

use crate::NetError;
use crate::identity::{Identity, Role};

pub(crate) struct Tls {
    pub(crate) identity: Identity,
    pub(crate) server: Arc<ServerConfig>,
    pub(crate) client: Arc<ClientConfig>,
}

impl Tls {
    pub(crate) fn load(ca: &Path, cert: &Path, key: &Path) -> Result<Self, NetError> {
        let fault = |path: &Path, why: String| NetError::File {
            path: path.to_owned(),
            why,
        };
        let certs = |path: &Path| -> Result<Vec<CertificateDer<'static>>, NetError> {
            let read: Result<Vec<_>, _> = CertificateDer::pem_file_iter(path)
                .map_err(|error| fault(path, error.to_string()))?
                .collect();
            match read {
                Ok(certs) if !certs.is_empty() => Ok(certs),
                Ok(_) => Err(fault(path, "holds no certificate in PEM".to_owned())),
                Err(error) => Err(fault(path, error.to_string())),
            }
        };
        let chain = certs(cert)?;
        let identity = identity_of(&chain[0])?;
        let private = || {
            PrivateKeyDer::from_pem_file(key).map_err(|error| {
                fault(
                    key,
                    match error {
                        pem::Error::Io(error) => error.to_string(),
                        other => format!("holds no usable private key in PEM: {other}"),
                    },
                )
            })
        };
        let mut roots = RootCertStore::empty();
        for root in certs(ca)? {
            roots.add(root).map_err(|error| fault(ca, error.to_string()))?;
        }
        let roots = Arc::new(roots);
        let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
        let verifier = WebPkiClientVerifier::builder_with_provider(roots.clone(), provider.clone())
            .build()
            .map_err(|error| fault(ca, error.to_string()))?;
        let mut server = ServerConfig::builder_with_provider(provider.clone())
            .with_protocol_versions(&[&rustls::version::TLS13])?
            .with_client_cert_verifier(verifier)
            .with_single_cert(chain.clone(), private()?)?;
        server.session_storage = Arc::new(NoServerSessionStorage {});
        server.send_tls13_tickets = 0;
        let mut client = ClientConfig::builder_with_provider(provider)
            .with_protocol_versions(&[&rustls::version::TLS13])?
            .with_root_certificates(roots)
            .with_client_auth_cert(chain, private()?)?;
        client.resumption = Resumption::disabled();
        Ok(Self {
            identity,
            server: Arc::new(server),
            client: Arc::new(client),
        })
    }

    /// The name that the certificate of `role` in our cluster must bear.
    pub(crate) fn server_name(&self, role: &Role) -> Result<ServerName<'static>, NetError> {
        let name = Identity {
            role: role.clone(),
            cluster: self.identity.cluster.clone(),
        }
        .to_string();
        ServerName::try_from(name.clone()).map_err(|_| NetError::Identity(name))
    }
}

/// The identity that a certificate's one DNS name says.
pub(crate) fn identity_of(cert: &CertificateDer<'_>) -> Result<Identity, NetError> {
    let fault = |why: &str| NetError::Identity(why.to_owned());
    let (_, parsed) =
        X509Certificate::from_der(cert).map_err(|_| fault("a certificate that cannot be parsed"))?;
    let names = parsed.subject_alternative_name().ok().flatten();
    let mut dns = names
        .iter()
        .flat_map(|names| &names.value.general_names)
        .filter_map(|name| match name {
            GeneralName::DNSName(name) => Some(*name),
            _ => None,
        });
    match (dns.next(), dns.next()) {
        (Some(name), None) => Identity::parse(name),
        (None, _) => Err(fault("a certificate without DNS name")),
        (Some(_), Some(_)) => Err(fault("a certificate with several DNS names")),
    }
}
