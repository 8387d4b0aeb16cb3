//! A throw-away certificate authority: `stage demo` and the tests make one, and its key never touches a disk.

use std::fs;
use std::io::{self, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

use rcgen::{
    BasicConstraints, CertificateParams, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair, KeyUsagePurpose,
};

use crate::identity::{Identity, Role};

/// A CA for one cluster, in memory.
pub struct Authority {
    cluster: String,
    cert_pem: String,
    issuer: Issuer<'static, KeyPair>,
}

/// The three files that [`crate::Net::tls`] wants.
#[derive(Debug, Clone)]
pub struct Files {
    /// The CA's certificate.
    pub ca: PathBuf,
    /// The bearer's certificate.
    pub cert: PathBuf,
    /// The bearer's private key, readable by its owner only.
    pub key: PathBuf,
}

impl Authority {
    /// A new CA for a cluster of this name (one DNS label).
    ///
    /// # Errors
    /// The cryptographic library refuses.
    pub fn new(cluster: &str) -> Result<Self, rcgen::Error> {
        let key = KeyPair::generate()?;
        let mut params = CertificateParams::new(Vec::<String>::new())?;
        params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign];
        params
            .distinguished_name
            .push(rcgen::DnType::CommonName, format!("stage cluster {cluster}"));
        let cert_pem = params.self_signed(&key)?.pem();
        Ok(Self {
            cluster: cluster.to_owned(),
            cert_pem,
            issuer: Issuer::new(params, key),
        })
    }

    /// Certificate and key, both PEM, for a role.
    ///
    /// # Errors
    /// The cryptographic library refuses.
    pub fn issue(&self, role: Role) -> Result<(String, String), rcgen::Error> {
        let name = Identity {
            role,
            cluster: self.cluster.clone(),
        }
        .to_string();
        let key = KeyPair::generate()?;
        let mut params = CertificateParams::new(vec![name])?;
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages = vec![
            ExtendedKeyUsagePurpose::ClientAuth,
            ExtendedKeyUsagePurpose::ServerAuth,
        ];
        Ok((params.signed_by(&key, &self.issuer)?.pem(), key.serialize_pem()))
    }

    /// Issues for a role and writes `ca.pem`, `NAME.pem` and `NAME.key` into `dir`.
    ///
    /// # Errors
    /// Writing a file failed.
    pub fn write(&self, dir: &Path, role: Role) -> io::Result<Files> {
        let name = match &role {
            Role::Coordinator => "coordinator".to_owned(),
            Role::Node(name) => format!("node-{name}"),
            Role::Operator(name) => format!("operator-{name}"),
        };
        let (cert, key) = self.issue(role).map_err(io::Error::other)?;
        let files = Files {
            ca: dir.join("ca.pem"),
            cert: dir.join(format!("{name}.pem")),
            key: dir.join(format!("{name}.key")),
        };
        if fs::read(&files.ca).ok().as_deref() != Some(self.cert_pem.as_bytes()) {
            // Others may be reading it already: it must never be seen half written.
            let fresh = dir.join(format!("{name}.ca.new"));
            fs::write(&fresh, &self.cert_pem)?;
            fs::rename(&fresh, &files.ca)?;
        }
        fs::write(&files.cert, cert)?;
        let mut file = fs::OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(true)
            .mode(0o600)
            .open(&files.key)?;
        file.write_all(key.as_bytes())?;
        Ok(files)
    }
}
