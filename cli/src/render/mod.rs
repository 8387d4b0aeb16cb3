//! What is shown, and nothing but that: the only writers to standard output. One stream of events goes in, one of
//! three siblings shows it: lines for people, bars for a terminal, JSON for scripts.

pub(crate) mod bench;
pub(crate) mod doctor;
mod drawing;
mod heat;
mod human;
pub(crate) mod inventory;
mod json;
mod lists;
mod place;
mod progress;
mod table;

use std::io::{self, IsTerminal as _, Write};

use stage_core::failure::Failure;

use crate::error::Error;
use crate::event::Event;

pub(crate) use drawing::drawing;
pub(crate) use human::cause;
pub(crate) use lists::{job, jobs, nodes, topology};
pub(crate) use place::{Place, place};

/// One who shows events.
pub(crate) trait Render {
    /// Shows one.
    ///
    /// # Errors
    /// The output is gone.
    fn event(&mut self, event: &Event) -> io::Result<()>;
}

/// Which of the siblings.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Form {
    /// Lines, or bars where there is a terminal.
    Human,
    /// JSON.
    Json,
    /// Nothing.
    Quiet,
}

impl Form {
    /// From `--json`.
    pub(crate) fn of(json: bool) -> Self {
        if json { Self::Json } else { Self::Human }
    }

    /// The renderer for standard output.
    pub(crate) fn renderer(self) -> Box<dyn Render> {
        let out = io::stdout();
        match self {
            Self::Json => Box::new(json::Json::new(out)),
            Self::Quiet => Box::new(Quiet),
            Self::Human if out.is_terminal() && io::stderr().is_terminal() => {
                Box::new(progress::Bars::new(out))
            }
            Self::Human => Box::new(human::Lines::new(out)),
        }
    }
}

struct Quiet;

impl Render for Quiet {
    fn event(&mut self, _: &Event) -> io::Result<()> {
        Ok(())
    }
}

/// Shows the end of a command that is not its proper one: for people on standard error, for scripts on standard
/// output as well.
pub(crate) fn error(form: Form, error: &Error) {
    if error.is_closed_pipe() {
        // Nobody is there to be told.
        return;
    }
    let failure = error.failure();
    let nodes = match error {
        Error::Job(job) => job.nodes.clone(),
        _ => Vec::new(),
    };
    if form == Form::Json {
        let event = Event::Error {
            job: error.job(),
            failure: failure.clone(),
            nodes: nodes.clone(),
            exit: error.exit(),
        };
        // When the output is gone, standard error still says why.
        drop(json::Json::new(io::stdout()).event(&event));
    }
    let mut out = io::stderr().lock();
    // Where standard error is gone too, the exit code is all that is left to say.
    drop(match error {
        // In the form that editors can jump to.
        Error::Topology { lines, .. } => lines.iter().try_for_each(|line| writeln!(out, "{line}")),
        _ => complain(&mut out, &failure, &nodes),
    });
}

/// What is missing at the proper end of a job that is no success: on standard error, in every form.
pub(crate) fn shortfall(job: &crate::view::Job) {
    let mut out = io::stderr().lock();
    let told = writeln!(
        out,
        "stage: job {} is {}: {} of {} targets have {}",
        job.id, job.state, job.published, job.targets, job.name
    );
    // Where standard error is gone too, the exit code is all that is left to say.
    drop(told.and_then(|()| human::shortfall(&mut out, job)));
}

/// A usage error that the parser found, for scripts.
pub(crate) fn usage(error: &Error) {
    let event = Event::Error {
        job: None,
        failure: error.failure(),
        nodes: Vec::new(),
        exit: error.exit(),
    };
    drop(json::Json::new(io::stdout()).event(&event));
}

/// What, where, why, and what to do next.
fn complain(out: &mut impl Write, failure: &Failure, nodes: &[crate::view::Node]) -> io::Result<()> {
    writeln!(out, "stage: {}", cause(failure))?;
    human::reasons(out, nodes)?;
    // Where the nodes' reasons end with the same advice, once is enough.
    let said = nodes
        .iter()
        .filter(|node| !node.state.is_done())
        .filter_map(|node| node.failure.as_ref())
        .any(|other| other.hint == failure.hint);
    if !failure.hint.is_empty() && !said {
        writeln!(out, "  next: {}", failure.hint)?;
    }
    Ok(())
}

/// A line for people on standard error, where standard output is for results.
pub(crate) fn note(text: &str) {
    drop(writeln!(io::stderr().lock(), "{text}"));
}

/// A line of plain result on standard output.
///
/// # Errors
/// The output is gone.
pub(crate) fn line(text: &str) -> io::Result<()> {
    writeln!(io::stdout().lock(), "{text}")
}

/// A file of ours, such as a completion script, on standard output.
///
/// # Errors
/// The output is gone.
pub(crate) fn raw(bytes: &[u8]) -> io::Result<()> {
    io::stdout().lock().write_all(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::view::samples;

    #[test]
    fn an_error_says_what_where_why_and_what_next() {
        let node = samples::unfit("n2");
        let mut out = Vec::new();
        complain(&mut out, node.failure.as_ref().unwrap(), &[]).unwrap();
        insta::assert_snapshot!(String::from_utf8(out).unwrap(), @"
        stage: n2: /scratch/stage/genome.db: too little space: short by 3.00 GiB
          next: free space under /scratch/stage, the push then goes on by itself
        ");
        let mut out = Vec::new();
        let failure = node.failure.clone().unwrap();
        complain(&mut out, &failure, &[node]).unwrap();
        let said = String::from_utf8(out).unwrap();
        assert_eq!(said.matches("next:").count(), 1, "{said}");
    }
}
