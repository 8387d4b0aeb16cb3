//! Copies against their original, by another program than the one that made them where there is one.

use std::io::{self, Read as _};
use std::path::{Path, PathBuf};
use std::process::Stdio;

use sha2::{Digest as _, Sha256};
use stage_core::failure::{Code, Failure};
use tokio::process::Command;
use tokio::task::JoinSet;

use crate::commands::source::show;
use crate::error::Error;
use crate::event::Compared;

/// Compares all `copies` with `original`, and the original with the digest that was `reported`.
///
/// # Errors
/// A file cannot be read, or differs.
pub(crate) async fn all(
    original: &Path,
    copies: &[PathBuf],
    reported: Option<&str>,
) -> Result<Compared, Error> {
    let (by, sha256) = digest(original).await?;
    let differs = |path: &Path, found: &str| {
        Failure::new(
            Code::Corrupt,
            format!("{by} says {found}, and the original has {sha256}"),
            "a fault of stage: please report it, with the daemons' logs",
        )
        .at(show(path))
    };
    // As many at once as there are processors for them.
    let width = std::thread::available_parallelism().map_or(1, usize::from);
    for part in copies.chunks(width) {
        let mut running: JoinSet<_> = part
            .iter()
            .cloned()
            .map(|copy| async move { digest(&copy).await.map(|(_, found)| (copy, found)) })
            .collect();
        while let Some(done) = running.join_next().await {
            let (copy, found) = done.map_err(io::Error::other)??;
            if found != sha256 {
                return Err(differs(&copy, &found).into());
            }
        }
    }
    if let Some(reported) = reported.filter(|reported| *reported != sha256) {
        return Err(Failure::new(
            Code::Corrupt,
            format!("stage reported {reported}, and {by} says {sha256}"),
            "see that nobody writes to the file meanwhile; else a fault of stage: please report it",
        )
        .at(show(original))
        .into());
    }
    Ok(Compared {
        by,
        sha256,
        copies: copies.len(),
    })
}

/// The SHA-256 of a file, and who computed it.
async fn digest(path: &Path) -> Result<(&'static str, String), Error> {
    let fault = |error: io::Error| {
        Error::from(
            Failure::new(
                Code::Io,
                format!("cannot be compared: {error}"),
                "look into the daemons' logs",
            )
            .at(show(path)),
        )
    };
    match by_program(path).await {
        Ok(Some(digest)) => return Ok(("sha256sum", digest)),
        // No such program here, or one that says something else.
        Ok(None) => {}
        Err(error) => return Err(fault(error)),
    }
    let file = path.to_owned();
    let digest = tokio::task::spawn_blocking(move || by_ourselves(&file))
        .await
        .map_err(io::Error::other)
        .and_then(|digest| digest)
        .map_err(fault)?;
    Ok(("stage itself", digest))
}

async fn by_program(path: &Path) -> io::Result<Option<String>> {
    // By descriptor: whatever the file's name, the answer's form is one.
    let file = std::fs::File::open(path)?;
    let started = Command::new("sha256sum")
        .stdin(file)
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .kill_on_drop(true)
        .spawn();
    let Ok(child) = started else { return Ok(None) };
    let output = child.wait_with_output().await?;
    let digest = String::from_utf8_lossy(&output.stdout);
    let digest = digest.split(' ').next().unwrap_or_default();
    let whole = digest.len() == 64 && digest.bytes().all(|byte| byte.is_ascii_hexdigit());
    Ok((output.status.success() && whole).then(|| digest.to_owned()))
}

fn by_ourselves(path: &Path) -> io::Result<String> {
    let mut file = std::fs::File::open(path)?;
    let mut hasher = Sha256::new();
    let mut block = vec![0; 1 << 20];
    loop {
        match file.read(&mut block)? {
            0 => break,
            count => hasher.update(&block[..count]),
        }
    }
    let digest = stage_core::digest::FileDigest(hasher.finalize().into());
    Ok(digest.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    const ABC: &str = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";

    #[tokio::test]
    async fn equal_copies_pass_and_others_do_not() {
        let dir = tempfile::tempdir().unwrap();
        let file = |name: &str, bytes: &[u8]| {
            let path = dir.path().join(name);
            std::fs::write(&path, bytes).unwrap();
            path
        };
        let original = file("a", b"abc");
        let same = file("b\n\\", b"abc");
        let other = file("c", b"abd");
        assert_eq!(by_ourselves(&original).unwrap(), ABC);
        let compared = all(&original, std::slice::from_ref(&same), Some(ABC))
            .await
            .unwrap();
        assert_eq!((compared.sha256.as_str(), compared.copies), (ABC, 1));
        let error = all(&original, &[same, other.clone()], None).await.unwrap_err();
        assert_eq!(error.failure().path, Some(show(&other)));
        assert!(all(&original, &[], Some("00")).await.is_err());
        assert!(all(&original, &[dir.path().join("none")], None).await.is_err());
    }
}
