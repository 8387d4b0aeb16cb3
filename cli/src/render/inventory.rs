//! What is staged where, and what became of a removal: lines for scripts as they come, for people equal ones folded.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{self, Write};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use indicatif::{ProgressBar, ProgressStyle};
use serde::Serialize;
use stage_core::ask::{Copy, Progress, Said, State};
use stage_core::digest::{FileDigest, RootDigest};
use stage_core::failure::{Code, Failure};
use stage_core::id::NodeName;
use stage_core::topology::hostlist;
use stage_core::units::{ByteCount, show_time};

use super::{Form, human, json, table};

/// The copies as they are heard of.
pub(crate) struct Listing {
    form: Form,
    copies: Vec<(NodeName, Copy)>,
    contents: Contents,
    bytes: u64,
    count: u64,
    nodes: u64,
    silent: Vec<(NodeName, Failure)>,
    progress: BTreeMap<NodeName, Progress>,
    bar: Option<ProgressBar>,
}

impl Listing {
    /// With a bar on the terminal where it may take long.
    pub(crate) fn new(form: Form, long: bool) -> Self {
        let bar = (long && form == Form::Human).then(|| {
            let style = ProgressStyle::with_template("{elapsed_precise} {bar:24} {percent:>3}% {msg}");
            let bar = ProgressBar::new(1);
            bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
            bar.enable_steady_tick(Duration::from_millis(500));
            bar
        });
        Self {
            form,
            copies: Vec::new(),
            contents: Contents::default(),
            bytes: 0,
            count: 0,
            nodes: 0,
            silent: Vec::new(),
            progress: BTreeMap::new(),
            bar,
        }
    }

    /// Takes a part of a node's answer.
    ///
    /// # Errors
    /// The output is gone.
    pub(crate) fn heard(&mut self, node: NodeName, said: Said, last: bool) -> io::Result<()> {
        self.nodes += u64::from(last);
        match said {
            Said::Copies(copies) => {
                for copy in copies {
                    self.count += 1;
                    self.bytes = self.bytes.saturating_add(copy.bytes.0);
                    self.contents.add(&node, &copy);
                    if self.form == Form::Json {
                        json::write(&mut io::stdout().lock(), &CopyLine::of(&node, &copy))?;
                    } else {
                        self.copies.push((node.clone(), copy));
                    }
                }
            }
            Said::Progress(progress) => {
                self.progress.insert(node, progress);
                if let Some(bar) = &self.bar {
                    let sum = |of: fn(&Progress) -> u64| self.progress.values().map(of).sum::<u64>();
                    let (done, total) = (sum(|p| p.done), sum(|p| p.total));
                    bar.set_length(total.max(1));
                    bar.set_position(done);
                    bar.set_message(format!(
                        "{} of {} hashed on {}",
                        ByteCount(done),
                        ByteCount(total),
                        human::count(self.progress.len(), "node")
                    ));
                }
            }
            Said::Failed(failure) => self.silent.push((node, failure)),
            // No answer to this question.
            Said::Removed(_) | Said::Host(_) | Said::Node(_) | Said::Link(_) => {}
        }
        Ok(())
    }

    /// Nobody has any of it.
    pub(crate) fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// Whether every node that was asked has answered, the drained ones too.
    pub(crate) fn has_heard_all(&self) -> bool {
        self.silent.is_empty()
    }

    /// Whether all answered that should: one that is drained need not.
    pub(crate) fn is_whole(&self) -> bool {
        self.silent
            .iter()
            .all(|(_, failure)| failure.code == Code::Drained)
    }

    /// Shows what is left to show.
    ///
    /// # Errors
    /// The output is gone.
    pub(crate) fn finish(self, exit: u8) -> io::Result<()> {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
        let mut out = io::stdout().lock();
        match self.form {
            Form::Quiet => {}
            Form::Human if self.copies.is_empty() => writeln!(out, "no copies")?,
            Form::Human => {
                copies(&mut out, &self.copies, SystemTime::now())?;
                self.contents.show_mixed(&mut out)?;
            }
            Form::Json => json::write(
                &mut out,
                &ListedLine {
                    event: "finished",
                    exit,
                    copies: self.count,
                    bytes: self.bytes,
                    nodes: self.nodes,
                    mixed: self
                        .contents
                        .mixed()
                        .map(|(place, of)| Mixed::of(place, of))
                        .collect(),
                    unanswered: self.silent.iter().map(Silent::of).collect(),
                },
            )?,
        }
        complain(&self.silent, "did not answer");
        Ok(())
    }
}

#[derive(Serialize)]
struct CopyLine<'a> {
    event: &'static str,
    node: &'a NodeName,
    path: &'a str,
    place: &'a str,
    kind: &'static str,
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    unpacked: bool,
    sha256: Option<String>,
    root: String,
    bytes: u64,
    published: u64,
    state: &'static str,
    #[serde(skip_serializing_if = "str::is_empty")]
    detail: &'a str,
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    found: bool,
    job: String,
}

impl<'a> CopyLine<'a> {
    fn of(node: &'a NodeName, copy: &'a Copy) -> Self {
        Self {
            event: "copy",
            node,
            path: &copy.path,
            place: &copy.place,
            kind: copy.kind.as_str(),
            unpacked: copy.unpacked,
            sha256: copy.sha256.map(|digest| digest.to_string()),
            root: copy.root.to_string(),
            bytes: copy.bytes.0,
            published: copy.published,
            state: copy.state.as_str(),
            detail: &copy.detail,
            found: copy.found,
            job: copy.job.to_string(),
        }
    }
}

#[derive(Serialize)]
struct ListedLine<'a> {
    event: &'static str,
    exit: u8,
    copies: u64,
    bytes: u64,
    nodes: u64,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    mixed: Vec<Mixed<'a>>,
    unanswered: Vec<Silent<'a>>,
}

/// A name that has not the same content on all nodes.
#[derive(Serialize)]
struct Mixed<'a> {
    place: &'a str,
    contents: Vec<Content<'a>>,
}

#[derive(Serialize)]
struct Content<'a> {
    sha256: Option<String>,
    root: String,
    nodes: &'a BTreeSet<NodeName>,
}

impl<'a> Mixed<'a> {
    fn of(place: &'a str, of: &'a BTreeMap<RootDigest, Holders>) -> Self {
        let content = |(root, holders): (&RootDigest, &'a Holders)| Content {
            sha256: holders.sha256.map(|digest| digest.to_string()),
            root: root.to_string(),
            nodes: &holders.nodes,
        };
        Self {
            place,
            contents: of.iter().map(content).collect(),
        }
    }
}

/// What was published under each name, and where; what is missing counts no more.
#[derive(Default)]
struct Contents(BTreeMap<String, BTreeMap<RootDigest, Holders>>);

#[derive(Default)]
struct Holders {
    sha256: Option<FileDigest>,
    nodes: BTreeSet<NodeName>,
}

impl Contents {
    fn add(&mut self, node: &NodeName, copy: &Copy) {
        if copy.state == State::Missing {
            return;
        }
        let place = if copy.place.is_empty() {
            &copy.path
        } else {
            &copy.place
        };
        let contents = self.0.entry(place.clone()).or_default();
        let holders = contents.entry(copy.content).or_default();
        // Of a tar that holds the tree the digest says nothing of another way in which the same came.
        let sha256 = copy.sha256.filter(|_| !copy.unpacked);
        holders.sha256 = holders.sha256.or(sha256);
        holders.nodes.insert(node.clone());
    }

    /// The names that have more than one content.
    fn mixed(&self) -> impl Iterator<Item = (&str, &BTreeMap<RootDigest, Holders>)> {
        let all = self.0.iter().filter(|(_, contents)| contents.len() > 1);
        all.map(|(place, contents)| (place.as_str(), contents))
    }

    fn show_mixed(&self, out: &mut impl Write) -> io::Result<()> {
        for (place, contents) in self.mixed() {
            let each: Vec<_> = contents
                .iter()
                .map(|(root, holders)| {
                    let nodes = hostlist::fold(holders.nodes.iter().map(NodeName::as_str));
                    format!("{} on {nodes}", digest(holders.sha256, *root))
                })
                .collect();
            writeln!(
                out,
                "mixed: {place} is not the same everywhere: {}",
                each.join(", ")
            )?;
        }
        Ok(())
    }
}

/// What a copy is known by, in short.
fn digest(sha256: Option<FileDigest>, root: RootDigest) -> String {
    match sha256 {
        Some(digest) => table::short(&digest.to_string()).to_owned(),
        None => format!("root {}", table::short(&root.to_string())),
    }
}

#[derive(Serialize)]
struct Silent<'a> {
    node: &'a NodeName,
    error: json::Cause<'a>,
}

impl<'a> Silent<'a> {
    fn of((node, failure): &'a (NodeName, Failure)) -> Self {
        Self {
            node,
            error: failure.into(),
        }
    }
}

/// Equal copies in one line.
fn copies(out: &mut impl Write, copies: &[(NodeName, Copy)], now: SystemTime) -> io::Result<()> {
    let mut folds: BTreeMap<_, (Vec<&str>, &Copy)> = BTreeMap::new();
    for (node, copy) in copies {
        let key = (
            &copy.path,
            copy.root,
            copy.sha256,
            copy.state,
            &copy.detail,
            copy.found,
            copy.unpacked,
        );
        let (nodes, oldest) = folds.entry(key).or_insert_with(|| (Vec::new(), copy));
        nodes.push(node.as_str());
        if copy.published < oldest.published {
            *oldest = copy;
        }
    }
    let mut table = table::plain(&["nodes", "path", "digest", "size", "age", "state"], &[3, 4]);
    for (nodes, copy) in folds.values() {
        let published = UNIX_EPOCH + Duration::from_secs(copy.published);
        let mut state = copy.state.to_string();
        if !copy.detail.is_empty() {
            state = format!("{state}: {}", copy.detail);
        }
        if copy.found {
            state += " (stood there before)";
        }
        if copy.unpacked {
            state += " (from a tar of this digest)";
        }
        table.add_row([
            hostlist::fold(nodes.iter().copied()),
            copy.path.clone(),
            digest(copy.sha256, copy.root),
            copy.bytes.to_string(),
            show_time(now.duration_since(published).unwrap_or_default()).to_string(),
            state,
        ]);
    }
    table::write(out, &table)
}

/// What became of removals as they are heard of.
pub(crate) struct Removals {
    form: Form,
    /// By what happened, in words.
    done: BTreeMap<String, Vec<NodeName>>,
    removed: u64,
    absent: u64,
    failed: Vec<(NodeName, Failure)>,
}

impl Removals {
    pub(crate) fn new(form: Form) -> Self {
        Self {
            form,
            done: BTreeMap::new(),
            removed: 0,
            absent: 0,
            failed: Vec::new(),
        }
    }

    /// Takes a node's answer.
    ///
    /// # Errors
    /// The output is gone.
    pub(crate) fn heard(&mut self, node: &NodeName, said: &Said) -> io::Result<()> {
        let line = match said {
            Said::Removed(removed) => {
                let (state, words) = if removed.was_there {
                    self.removed += 1;
                    ("removed", format!("removed {} ({})", removed.path, removed.bytes))
                } else {
                    self.absent += 1;
                    ("absent", format!("{} was not there", removed.path))
                };
                self.done.entry(words).or_default().push(node.clone());
                RemovedLine {
                    event: "removed",
                    node,
                    path: Some(&removed.path),
                    state,
                    bytes: removed.bytes.0,
                    error: None,
                }
            }
            Said::Failed(failure) => {
                self.failed.push((node.clone(), failure.clone()));
                RemovedLine {
                    event: "removed",
                    node,
                    path: failure.path.as_deref(),
                    state: "failed",
                    bytes: 0,
                    error: Some(failure.into()),
                }
            }
            // No end of an answer, or none to this question.
            Said::Progress(_) | Said::Copies(_) | Said::Host(_) | Said::Node(_) | Said::Link(_) => {
                return Ok(());
            }
        };
        if self.form == Form::Json {
            json::write(&mut io::stdout().lock(), &line)?;
        }
        Ok(())
    }

    /// Whether it is gone everywhere. A node that is drained does not count.
    pub(crate) fn is_whole(&self) -> bool {
        self.failed
            .iter()
            .all(|(_, failure)| failure.code == Code::Drained)
    }

    /// Shows what is left to show.
    ///
    /// # Errors
    /// The output is gone.
    pub(crate) fn finish(self, exit: u8) -> io::Result<()> {
        let mut out = io::stdout().lock();
        match self.form {
            Form::Quiet => {}
            Form::Human => {
                for (words, nodes) in &self.done {
                    let nodes = hostlist::fold(nodes.iter().map(NodeName::as_str));
                    writeln!(out, "{nodes}: {words}")?;
                }
            }
            Form::Json => json::write(
                &mut out,
                &serde_json::json!({
                    "event": "finished",
                    "exit": exit,
                    "removed": self.removed,
                    "absent": self.absent,
                    "failed": self.failed.len(),
                }),
            )?,
        }
        complain(&self.failed, "still has it, as far as is known");
        Ok(())
    }
}

#[derive(Serialize)]
struct RemovedLine<'a> {
    event: &'static str,
    node: &'a NodeName,
    path: Option<&'a str>,
    state: &'static str,
    bytes: u64,
    error: Option<json::Cause<'a>>,
}

/// Who did not do as asked, on standard error in every form: nodes with the same reason together.
fn complain(failed: &[(NodeName, Failure)], what: &str) {
    // Where standard error is gone, the exit code is all that is left to say.
    drop(reasons(&mut io::stderr().lock(), failed, what));
}

fn reasons(out: &mut impl Write, failed: &[(NodeName, Failure)], what: &str) -> io::Result<()> {
    let mut groups: BTreeMap<(&str, &str), Vec<&str>> = BTreeMap::new();
    for (node, failure) in failed {
        groups
            .entry((&failure.message, &failure.hint))
            .or_default()
            .push(node.as_str());
    }
    for ((message, hint), nodes) in groups {
        writeln!(out, "stage: {} {what}: {message}", hostlist::fold(nodes))?;
        if !hint.is_empty() {
            writeln!(out, "  next: {hint}")?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests;
