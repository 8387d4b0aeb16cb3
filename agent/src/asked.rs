//! Questions of the coordinator: each is answered in a task of its own, which may take its time, and ends when nobody
//! waits for the answer any more or the session is over.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use stage_core::ask::{Copy, Progress, Question, Removal, Said, State, Wanted};
use stage_core::failure::{Code, Failure};
use stage_core::id::{AskId, JobId};
use stage_proto::v1;
use stage_transfer::index::Entry;
use tokio::sync::mpsc;
use tokio::task::{Id, JoinSet};
use tokio::time::interval;
use tokio_util::sync::CancellationToken;

use crate::runner::Context;
use crate::{blocking, probe};

/// Questions under way at once.
const QUESTIONS: usize = 16;
/// Copies in one message, and bytes of their paths, each of which may be shown as four.
const PAGE: (usize, usize) = (256, 64 << 10);
/// Who works on an answer says so this often.
pub(crate) const PROGRESS: Duration = Duration::from_secs(1);

/// The questions of one session. Dropped, all work on them ends.
pub(crate) struct Asked {
    context: Arc<Context>,
    messages: mpsc::Sender<v1::AgentMessage>,
    tasks: JoinSet<()>,
    open: BTreeMap<AskId, Open>,
}

struct Open {
    stop: CancellationToken,
    task: Id,
}

impl Drop for Asked {
    fn drop(&mut self) {
        // The tasks end with their set; what they had begun on threads ends by this.
        self.open.values().for_each(|open| open.stop.cancel());
    }
}

impl Asked {
    pub(crate) fn new(context: Arc<Context>, messages: mpsc::Sender<v1::AgentMessage>) -> Self {
        Self {
            context,
            messages,
            tasks: JoinSet::new(),
            open: BTreeMap::new(),
        }
    }

    /// Begins to answer. `jobs` are those at work now.
    pub(crate) fn ask(&mut self, ask: &v1::Ask, jobs: BTreeSet<JobId>) {
        let id = AskId(ask.id);
        let stop = CancellationToken::new();
        let voice = Voice {
            id,
            messages: self.messages.clone(),
            stop: stop.clone(),
        };
        let question = if self.open.len() < QUESTIONS {
            Question::try_from(ask).map_err(|error| {
                Failure::new(
                    Code::ProtocolVersion,
                    format!("the agent does not understand the question: {error}"),
                    "install the same release of stage on all hosts",
                )
            })
        } else {
            Err(Failure::new(
                Code::Unreachable,
                "the agent has too many questions to answer",
                "try again in a moment",
            ))
        };
        let context = self.context.clone();
        let handle = self.tasks.spawn(async move {
            match question {
                Ok(question) => answer(&context, question, jobs, &voice).await,
                Err(failure) => voice.last(Said::Failed(failure.on(&context.node))).await,
            }
        });
        let task = handle.id();
        self.open.insert(id, Open { stop, task });
    }

    /// Nobody waits for the answer any more.
    pub(crate) fn withdraw(&mut self, id: AskId) {
        if let Some(open) = self.open.get(&id) {
            open.stop.cancel();
        }
    }

    /// Returns when a question has been answered; never if there is none.
    pub(crate) async fn answered(&mut self) {
        let task = match self.tasks.join_next_with_id().await {
            Some(Ok((task, ()))) => task,
            Some(Err(error)) => {
                tracing::error!(%error, "the work on a question did not end well");
                error.id()
            }
            None => return std::future::pending().await,
        };
        self.open.retain(|_, open| open.task != task);
    }
}

/// The way back to who asked.
pub(crate) struct Voice {
    id: AskId,
    messages: mpsc::Sender<v1::AgentMessage>,
    pub(crate) stop: CancellationToken,
}

impl Voice {
    pub(crate) async fn say(&self, said: &Said, last: bool) {
        let answer = v1::Answer {
            id: self.id.0,
            said: Some(v1::Said::of(said, last)),
        };
        let body = Some(v1::agent_message::Body::Answer(answer));
        // A session that has ended takes all its questions with it.
        let _ = self.messages.send(v1::AgentMessage { body }).await;
    }

    pub(crate) async fn last(&self, said: Said) {
        self.say(&said, true).await;
    }
}

/// One arm for each kind of question.
async fn answer(context: &Arc<Context>, question: Question, jobs: BTreeSet<JobId>, voice: &Voice) {
    tokio::select! {
        () = voice.stop.cancelled() => {}
        () = async {
            match question {
                Question::List(wanted) => list(context, wanted, voice).await,
                Question::Remove(removal) => remove(context, removal, jobs, voice).await,
                Question::Host => {
                    let host = Box::new(probe::describe(context).await);
                    voice.last(Said::Host(host)).await;
                }
                Question::ProbeNode(depth) => probe::node(context, depth, voice).await,
                Question::ProbeLink(link) => probe::link(context, link, voice).await,
            }
        } => {}
    }
}

async fn list(context: &Arc<Context>, wanted: Wanted, voice: &Voice) {
    let verify = wanted.verify;
    let index = context.index.clone();
    let entries = blocking(move || {
        let mut entries = index.entries();
        entries.retain(|entry| wanted.is_at(entry.path()) && wanted.may_be(entry.sha256(), entry.root()));
        entries
    })
    .await;
    let mut done = Progress {
        done: 0,
        total: entries.iter().map(|entry| entry.size().0).sum(),
    };
    let mut rest = entries.into_iter().peekable();
    let most = if verify { 1 } else { PAGE.0 };
    loop {
        let mut page: Vec<Entry> = Vec::new();
        let mut bytes = 0;
        while page.len() < most
            && bytes < PAGE.1
            && let Some(entry) = rest.next()
        {
            bytes += entry.path().len();
            page.push(entry);
        }
        let copies = if verify {
            let mut copies = Vec::new();
            for entry in page {
                let size = entry.size().0;
                copies.push(verified(context, entry, done, voice).await);
                done.done += size;
            }
            copies
        } else {
            let context = context.clone();
            blocking(move || {
                page.into_iter()
                    .map(|entry| {
                        let (state, detail) = context.index.look(&context.roots, &entry);
                        entry.show(state, detail)
                    })
                    .collect()
            })
            .await
        };
        let last = rest.peek().is_none();
        voice.say(&Said::Copies(copies), last).await;
        if last {
            return;
        }
    }
}

/// Hashes a copy again, and says every second how far it is.
async fn verified(context: &Arc<Context>, entry: Entry, before: Progress, voice: &Voice) -> Copy {
    let hashed = Arc::new(AtomicU64::new(0));
    let mut hashing = Box::pin({
        let (context, hashed, stop) = (context.clone(), hashed.clone(), voice.stop.clone());
        blocking(move || {
            let verified = context.index.verify(&context.roots, &entry, &mut |bytes| {
                hashed.fetch_add(bytes, Ordering::Relaxed);
                !stop.is_cancelled()
            });
            let (state, detail) =
                verified.unwrap_or_else(|| (State::Unreadable, "nobody waited for the end".to_owned()));
            entry.show(state, detail)
        })
    });
    let mut beat = interval(PROGRESS);
    loop {
        tokio::select! {
            copy = &mut hashing => return copy,
            _ = beat.tick() => {
                let done = before.done + hashed.load(Ordering::Relaxed);
                voice.say(&Said::Progress(Progress { done, ..before }), false).await;
            }
        }
    }
}

async fn remove(context: &Arc<Context>, removal: Removal, jobs: BTreeSet<JobId>, voice: &Voice) {
    let removed = {
        let context = context.clone();
        blocking(move || {
            context
                .index
                .remove(&context.roots, &context.state, &removal, |job| {
                    jobs.contains(&job)
                })
        })
        .await
    };
    let said = match removed {
        Ok(removed) => {
            if removed.was_there {
                tracing::info!(path = removed.path, "removed a copy");
                // Of a tree something may be left until nobody reads it.
                context.replaced.notify_one();
            }
            Said::Removed(removed)
        }
        Err(failure) => Said::Failed(failure.on(&context.node)),
    };
    voice.last(said).await;
}
