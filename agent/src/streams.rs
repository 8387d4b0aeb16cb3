//! Streams that users of this host have handed over, until their job takes them.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::SystemTime;

use stage_core::failure::{Code, Failure};
use stage_core::id::JobId;
use stage_core::payload::Payload;
use stage_transfer::pipe::Tie;

/// See the module.
#[derive(Debug, Default)]
pub(crate) struct Streams(Mutex<BTreeMap<JobId, Handed>>);

#[derive(Debug)]
struct Handed {
    /// Taken when the job runs.
    input: Option<OwnedFd>,
    mode: u32,
    since: (i64, u32),
    tie: Arc<Tie>,
}

/// A stream in the hands of the connection that it came with: dropped, the stream is cut, unless its end was seen.
#[derive(Debug)]
pub(crate) struct Held {
    streams: Arc<Streams>,
    job: JobId,
    pub(crate) tie: Arc<Tie>,
}

impl Streams {
    fn map(&self) -> MutexGuard<'_, BTreeMap<JobId, Handed>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes a stream in for this job, to be published with this mode.
    ///
    /// # Errors
    /// There is one for this job.
    pub(crate) fn hand_over(
        self: &Arc<Self>,
        job: JobId,
        input: OwnedFd,
        mode: u32,
    ) -> Result<Held, Failure> {
        let now = SystemTime::now()
            .duration_since(SystemTime::UNIX_EPOCH)
            .unwrap_or_default();
        let tie = Arc::new(Tie::default());
        let handed = Handed {
            input: Some(input),
            mode,
            since: (
                i64::try_from(now.as_secs()).unwrap_or_default(),
                now.subsec_nanos(),
            ),
            tie: tie.clone(),
        };
        let mut map = self.map();
        if map.contains_key(&job) {
            return Err(Failure::new(
                Code::Usage,
                format!("job {job} has its stream already"),
                "push again: every push needs an id of its own",
            ));
        }
        map.insert(job, handed);
        Ok(Held {
            streams: self.clone(),
            job,
            tie,
        })
    }

    /// What the job's stream is, under this name.
    ///
    /// # Errors
    /// It is not, or no more, here; or the name is none.
    pub(crate) fn look(&self, job: JobId, name: &[u8]) -> Result<Payload, Failure> {
        let map = self.map();
        let handed = map.get(&job).ok_or_else(gone)?;
        Payload::stream(name, handed.mode, handed.since).map_err(|error| {
            Failure::new(
                Code::Usage,
                format!("a stream cannot be called that: {error}"),
                "give it another name with --as NAME",
            )
        })
    }

    /// The job's stream, once.
    ///
    /// # Errors
    /// It is not here any more, or was taken before.
    pub(crate) fn take(&self, job: JobId) -> Result<(OwnedFd, Arc<Tie>), Failure> {
        let mut map = self.map();
        let handed = map.get_mut(&job).ok_or_else(gone)?;
        let input = handed.input.take().ok_or_else(gone)?;
        Ok((input, handed.tie.clone()))
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.streams.map().remove(&self.job);
        self.tie.cut();
    }
}

fn gone() -> Failure {
    Failure::new(
        Code::SourceLost,
        "the stream has gone: `stage push` that brought it has ended, or the agent was started again",
        "push again: nothing of it was published",
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stream_is_there_as_long_as_who_brought_it() {
        let streams = Arc::new(Streams::default());
        let job = JobId::from_random([1; 16]);
        let input = || rustix::pipe::pipe().unwrap().0;
        assert_eq!(streams.look(job, b"x").unwrap_err().code, Code::SourceLost);
        let held = streams.hand_over(job, input(), 0o640).unwrap();
        assert_eq!(
            streams.hand_over(job, input(), 0o640).unwrap_err().code,
            Code::Usage
        );
        let payload = streams.look(job, b"x").unwrap();
        assert!(payload.is_stream());
        assert_eq!(payload.inline().unwrap().unwrap().entries[0].mode, 0o640);
        assert_eq!(
            streams.look(job, b"x").unwrap(),
            payload,
            "asked again it is the same"
        );
        assert_eq!(streams.look(job, b"a/b").unwrap_err().code, Code::Usage);
        streams.take(job).unwrap();
        assert_eq!(streams.take(job).unwrap_err().code, Code::SourceLost);
        drop(held);
        assert_eq!(streams.look(job, b"x").unwrap_err().code, Code::SourceLost);
    }
}
