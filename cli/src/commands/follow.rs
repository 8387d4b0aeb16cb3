//! Watching a job to the end that the command waits for.

use std::future::Future;
use tokio::signal::unix::{SignalKind, signal};

use stage_core::id::JobId;

use crate::client::Watch;
use crate::error::Error;
use crate::event::{Differ, Event};
use crate::exit;
use crate::render::{self, Render};
use crate::view::Job;

/// What a watching command waits for.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Until {
    /// Every target that could take it has ended, and the digest is known.
    Settled,
    /// This share of the targets has it.
    Enough(f64),
    /// The job has ended: unfit targets are no longer awaited.
    Ended,
}

impl Until {
    fn is_met(self, job: &Job) -> bool {
        match self {
            Self::Settled => job.settled,
            Self::Enough(share) => job.settled || job.has(share),
            Self::Ended => false,
        }
    }

    /// The command's exit code when it returns with this job.
    pub(crate) fn exit(self, job: &Job) -> u8 {
        match self {
            Self::Enough(share) if job.has(share) => exit::DONE,
            _ => job.exit,
        }
    }
}

/// Shows the job until what is waited for; gives its last view.
///
/// # Errors
/// The coordinator was lost, or does not know the job.
pub(crate) async fn follow(watch: &mut Watch, until: Until, render: &mut dyn Render) -> Result<Job, Error> {
    let mut differ = Differ::default();
    let mut last: Option<Job> = None;
    while let Some(job) = watch.next().await? {
        for event in differ.feed(job.clone()) {
            render.event(&event)?;
        }
        let met = until.is_met(&job);
        last = Some(job);
        if met {
            break;
        }
    }
    last.ok_or_else(|| {
        Error::other(
            "the coordinator ended the watch without showing the job",
            "look into the coordinator's log",
        )
    })
}

/// Shows the end of a job; gives the exit code.
///
/// # Errors
/// The job's end is one that is told as an error.
pub(crate) fn conclude(job: Job, until: Until, render: &mut dyn Render) -> Result<u8, Error> {
    let exit = until.exit(&job);
    if !exit::is_finished(exit) {
        return Err(Error::Job(Box::new(job)));
    }
    let job = Box::new(job);
    render.event(&Event::Finished {
        job: job.clone(),
        exit,
    })?;
    if exit != exit::DONE {
        render::shortfall(&job);
    }
    Ok(exit)
}

/// Runs `work` unless Ctrl-C or SIGTERM ends it; `job` is what goes on then.
///
/// # Errors
/// Those of `work`, or [`Error::Interrupted`].
pub(crate) async fn interruptible<T>(
    job: impl Fn() -> Option<JobId>,
    work: impl Future<Output = Result<T, Error>>,
) -> Result<T, Error> {
    let mut terminate = signal(SignalKind::terminate())?;
    tokio::select! {
        done = work => done,
        pressed = tokio::signal::ctrl_c() => {
            pressed?;
            Err(Error::Interrupted(job()))
        }
        _ = terminate.recv() => Err(Error::Interrupted(job())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::view::samples::{finished, published, unfit};

    #[derive(Default)]
    struct Seen(Vec<Event>);

    impl Render for Seen {
        fn event(&mut self, event: &Event) -> std::io::Result<()> {
            self.0.push(event.clone());
            Ok(())
        }
    }

    #[test]
    fn enough_is_enough() {
        let job = finished(vec![published("n1", "n0"), unfit("n2")]);
        assert_eq!(job.exit, 5);
        assert_eq!(Until::Settled.exit(&job), 5);
        assert_eq!(Until::Enough(0.5).exit(&job), 0);
        assert_eq!(Until::Enough(0.9).exit(&job), 5);
        assert!(!Until::Ended.is_met(&job));
    }

    #[test]
    fn an_end_is_told_once_as_what_it_is() {
        let mut job = finished(vec![published("n1", "n0"), unfit("n2")]);
        let mut seen = Seen::default();
        assert_eq!(conclude(job.clone(), Until::Settled, &mut seen).unwrap(), 5);
        assert_eq!(seen.0.len(), 1);
        job.exit = 4;
        let mut seen = Seen::default();
        let error = conclude(job, Until::Settled, &mut seen).unwrap_err();
        assert_eq!(error.exit(), 4);
        assert!(seen.0.is_empty(), "the error is told where all errors are");
    }
}
