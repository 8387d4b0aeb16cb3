//! Questions beside orders, and their answers.

use stage_core::ask::{Copy, Progress, Question, Removal, Removed, Said, Wanted};
use stage_core::digest::RootDigest;
use stage_core::id::AskId;
use stage_core::units::ByteCount;

use super::{WireError, array, file_digest, parse, place, place_out, required};
use crate::v1;

impl v1::Ask {
    /// The wire form of a question.
    pub fn of(id: AskId, question: &Question) -> Self {
        use v1::ask::Question as Wire;
        Self {
            id: id.0,
            question: Some(match question {
                Question::List(wanted) => Wire::List(v1::ListCopies {
                    path: wanted.path.clone().unwrap_or_default(),
                    digest: wanted
                        .digest
                        .as_ref()
                        .map(ToString::to_string)
                        .unwrap_or_default(),
                    verify: wanted.verify,
                }),
                Question::Remove(removal) => {
                    let (root, dir, absolute) = place_out(&removal.place);
                    Wire::Remove(v1::RemoveCopy {
                        root,
                        dir,
                        absolute,
                        name: removal.name.clone(),
                        force: removal.force,
                    })
                }
                Question::Host => Wire::Host(v1::DescribeHost {}),
                Question::ProbeNode(depth) => Wire::ProbeNode(v1::ProbeNode {
                    depth: depth.to_string(),
                }),
                Question::ProbeLink(probe) => Wire::ProbeLink(probe.into()),
            }),
        }
    }
}

impl TryFrom<&v1::Ask> for Question {
    type Error = WireError;
    fn try_from(wire: &v1::Ask) -> Result<Self, WireError> {
        use v1::ask::Question as Wire;
        Ok(match required("ask.question", wire.question.as_ref())? {
            Wire::List(list) => Self::List(wanted(&list.path, &list.digest, list.verify)?),
            Wire::Remove(remove) => Self::Remove(Removal {
                place: place("remove.root", &remove.root, &remove.dir, remove.absolute)?,
                name: remove.name.clone(),
                force: remove.force,
            }),
            Wire::Host(v1::DescribeHost {}) => Self::Host,
            Wire::ProbeNode(probe) => Self::ProbeNode(parse("probe_node.depth", &probe.depth)?),
            Wire::ProbeLink(probe) => Self::ProbeLink(probe.try_into()?),
        })
    }
}

/// Which copies are listed, from the fields that both a person's request and a question have.
///
/// # Errors
/// The digest is none.
pub fn wanted(path: &[u8], digest: &str, verify: bool) -> Result<Wanted, WireError> {
    Ok(Wanted {
        path: (!path.is_empty()).then(|| path.to_vec()),
        digest: if digest.is_empty() {
            None
        } else {
            Some(parse("digest", digest)?)
        },
        verify,
    })
}

impl v1::Said {
    /// The wire form of a part of an answer.
    pub fn of(said: &Said, last: bool) -> Self {
        use v1::said::Said as Wire;
        Self {
            last,
            said: Some(match said {
                Said::Copies(copies) => Wire::Copies(v1::Copies {
                    copies: copies.iter().map(Into::into).collect(),
                }),
                Said::Removed(removed) => Wire::Removed(v1::Removed {
                    path: removed.path.clone(),
                    was_there: removed.was_there,
                    bytes: removed.bytes.0,
                }),
                Said::Host(host) => Wire::Host((&**host).into()),
                Said::Node(reading) => Wire::Node((&**reading).into()),
                Said::Link(reading) => Wire::Link((&**reading).into()),
                Said::Progress(progress) => Wire::Progress(v1::WorkProgress {
                    done: progress.done,
                    total: progress.total,
                }),
                Said::Failed(failure) => Wire::Failed(failure.into()),
            }),
        }
    }
}

impl TryFrom<&v1::Said> for Said {
    type Error = WireError;
    fn try_from(wire: &v1::Said) -> Result<Self, WireError> {
        use v1::said::Said as Wire;
        Ok(match required("said.said", wire.said.as_ref())? {
            Wire::Copies(copies) => Self::Copies(
                copies
                    .copies
                    .iter()
                    .map(TryInto::try_into)
                    .collect::<Result<_, _>>()?,
            ),
            Wire::Removed(removed) => Self::Removed(Removed {
                path: removed.path.clone(),
                was_there: removed.was_there,
                bytes: ByteCount(removed.bytes),
            }),
            Wire::Host(host) => Self::Host(Box::new(host.try_into()?)),
            Wire::Node(reading) => Self::Node(Box::new(reading.try_into()?)),
            Wire::Link(reading) => Self::Link(Box::new(reading.try_into()?)),
            Wire::Progress(progress) => Self::Progress(Progress {
                done: progress.done,
                total: progress.total,
            }),
            Wire::Failed(failure) => Self::Failed(failure.into()),
        })
    }
}

impl From<&Copy> for v1::StagedCopy {
    fn from(copy: &Copy) -> Self {
        Self {
            path: copy.path.clone(),
            kind: copy.kind.to_string(),
            sha256: copy.sha256.map(|digest| digest.0.to_vec()).unwrap_or_default(),
            root: copy.root.0.to_vec(),
            bytes: copy.bytes.0,
            published_unix_seconds: copy.published,
            job: copy.job.to_string(),
            found: copy.found,
            state: copy.state.to_string(),
            detail: copy.detail.clone(),
            place: copy.place.clone(),
            unpacked: copy.unpacked,
            content: copy.content.0.to_vec(),
        }
    }
}

impl TryFrom<&v1::StagedCopy> for Copy {
    type Error = WireError;
    fn try_from(wire: &v1::StagedCopy) -> Result<Self, WireError> {
        let content = if wire.content.is_empty() {
            &wire.root
        } else {
            &wire.content
        };
        Ok(Self {
            content: RootDigest(array("copy.content", content)?),
            path: wire.path.clone(),
            kind: parse("copy.kind", &wire.kind)?,
            sha256: file_digest("copy.sha256", &wire.sha256)?,
            root: RootDigest(array("copy.root", &wire.root)?),
            bytes: ByteCount(wire.bytes),
            published: wire.published_unix_seconds,
            job: parse("copy.job", &wire.job)?,
            found: wire.found,
            state: parse("copy.state", &wire.state)?,
            detail: wire.detail.clone(),
            place: wire.place.clone(),
            unpacked: wire.unpacked,
        })
    }
}
