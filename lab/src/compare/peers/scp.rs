//! scp: an sshd on each target with throw-away keys, a client for each of them at the source.

use std::fs;

use stage_lab::LabError;

use super::Peer;
use crate::compare::field::{Field, Seen, fault, finish_all, text};

pub(super) const CHACHA: Peer = Peer {
    name: "scp",
    about: "scp star (ChaCha20-Poly1305, the default)",
    package: "openssh-client, openssh-server",
    programs: &["scp", "ssh-keygen", "sshd"],
    checks: false,
    is_star: true,
    drive: |field| drive(field, "chacha20-poly1305@openssh.com"),
};

pub(super) const AES: Peer = Peer {
    name: "scp-aes",
    about: "scp star (AES-128-GCM)",
    drive: |field| drive(field, "aes128-gcm@openssh.com"),
    ..CHACHA
};

const PORT: u16 = 2222;

fn drive(field: &Field<'_>, cipher: &str) -> Result<Seen, LabError> {
    let dir = field.scratch("n0")?;
    let (host, user) = (dir.join("host"), dir.join("user"));
    for key in [&host, &user] {
        let words = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", text(key)];
        field.start("n0", &words)?.finish()?;
    }
    let config = dir.join("sshd_config");
    let lines = format!(
        "Port {PORT}\nHostKey {}\nAuthorizedKeysFile {}.pub\nPidFile none\nStrictModes no\nUsePAM no\n\
         PermitRootLogin prohibit-password\nSubsystem sftp internal-sftp\n",
        text(&host),
        text(&user)
    );
    fs::write(&config, lines).map_err(|why| fault(&config, why))?;
    let mut daemons = Vec::new();
    for target in &field.targets {
        // sshd wants its own path to start and a directory below /run: in this namespace's mounts alone.
        let script =
            r#"mount -t tmpfs stage-lab /run && mkdir /run/sshd && exec "$(command -v sshd)" -D -e -f "$1""#;
        let mut daemon = field.start(target, &["sh", "-c", script, "sh", text(&config)])?;
        daemon.wait_for_port("tcp", PORT)?;
        daemons.push(daemon);
    }
    let (port, cipher) = (PORT.to_string(), format!("Ciphers={cipher}"));
    field.count(|| {
        let mut clients = Vec::new();
        for target in &field.targets {
            let to = format!("root@{}:{}", field.address(target)?, text(&field.copy(target)));
            let mut words = vec!["scp", "-q", "-F", "none", "-P", &port, "-i", text(&user)];
            for option in [
                "StrictHostKeyChecking=no",
                "UserKnownHostsFile=/dev/null",
                "IdentitiesOnly=yes",
            ] {
                words.extend(["-o", option]);
            }
            words.extend(["-o", &cipher, text(field.file), &to]);
            clients.push(field.start("n0", &words)?);
        }
        finish_all(clients)
    })
}
