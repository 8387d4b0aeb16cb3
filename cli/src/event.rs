//! What happens to a job, as events: made here from one view after another, shown by the renderers beside each other.

use std::time::Duration;

use stage_core::failure::Failure;
use stage_core::id::JobId;
use stage_core::plan::{Plan, Tried};
use stage_core::simulate;
use stage_core::units::ByteCount;

use crate::view::{Job, Node};

/// One thing that a renderer shows.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Event {
    /// The job exists.
    Submitted(JobId),
    /// There is a plan, or a new one.
    Planned {
        /// Whose; none when nothing but a plan was asked for.
        job: Option<JobId>,
        /// The plan.
        plan: Plan,
    },
    /// What the planner tried, the plan's layout first.
    Explained(Vec<Tried>),
    /// The plan, tried in a simulation.
    Simulated(Box<Simulated>),
    /// A target's state changed.
    Node {
        /// Of which job.
        job: JobId,
        /// The target as it is now.
        node: Node,
    },
    /// Something that people should know.
    Remark {
        /// About which job.
        job: JobId,
        /// One line.
        text: String,
    },
    /// The job as it is now.
    Progress(Box<Job>),
    /// Copies were compared with the original, apart from stage's own checks.
    Compared(Compared),
    /// The proper end.
    Finished {
        /// The job at its end.
        job: Box<Job>,
        /// The command's exit code.
        exit: u8,
    },
    /// Any other end.
    Error {
        /// The job, if there was one.
        job: Option<JobId>,
        /// The cause.
        failure: Failure,
        /// The targets, when each has a reason of its own.
        nodes: Vec<Node>,
        /// The command's exit code.
        exit: u8,
    },
}

/// The outcome of a simulation.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Simulated {
    /// The plan's forecast.
    pub forecast: Duration,
    /// What became of each target, and who moved.
    pub outcome: simulate::Outcome,
    /// What each interface and link carried.
    pub edges: Vec<Carried>,
}

/// What an edge carried in its direction.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Carried {
    /// "link rack1-core", "interface of n1".
    pub name: String,
    /// The node or switch it starts from.
    pub from: String,
    /// The node or switch it leads to.
    pub to: String,
    /// An interface, not a link between switches.
    pub is_interface: bool,
    /// How much.
    pub bytes: ByteCount,
}

/// The outcome of comparing copies.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Compared {
    /// What computed the digests.
    pub by: &'static str,
    /// The original's SHA-256.
    pub sha256: String,
    /// How many copies were equal to it; one that is not is an error.
    pub copies: usize,
}

/// Finds out what changed from one view to the next.
#[derive(Debug, Default)]
pub(crate) struct Differ {
    last: Option<Job>,
}

impl Differ {
    /// The events that lead from the view before to this one, ending with its [`Event::Progress`].
    pub(crate) fn feed(&mut self, job: Job) -> Vec<Event> {
        let mut events = Vec::new();
        let before = self.last.as_ref();
        if let Some(plan) = &job.plan
            && before.and_then(|before| before.plan.as_ref()) != Some(plan)
        {
            events.push(Event::Planned {
                job: Some(job.id),
                plan: plan.clone(),
            });
        }
        // Why the job failed comes before what that made of its targets.
        if let Some(failure) = &job.failure
            && before.is_none_or(|before| before.failure.as_ref() != Some(failure))
        {
            events.push(Event::Remark {
                job: job.id,
                text: format!("{}: {}", job.state, crate::render::cause(failure)),
            });
        }
        // Both lists are in target order, and targets never change in number or place.
        for (at, node) in job.nodes.iter().enumerate() {
            let known = before.and_then(|before| before.nodes.get(at));
            let news = known.is_none_or(|known| {
                (known.state, &known.parent, known.already, &known.failure)
                    != (node.state, &node.parent, node.already, &node.failure)
            });
            if news {
                events.push(Event::Node {
                    job: job.id,
                    node: node.clone(),
                });
            }
        }
        let known = before.map_or(&[][..], |before| &before.remarks);
        events.extend(fresh(known, &job.remarks).iter().map(|text| Event::Remark {
            job: job.id,
            text: text.clone(),
        }));
        self.last = Some(job.clone());
        events.push(Event::Progress(Box::new(job)));
        events
    }
}

/// What was added at the end of a list that forgets from its front.
fn fresh<'a>(before: &[String], now: &'a [String]) -> &'a [String] {
    let kept = (0..=before.len())
        .map(|gone| &before[gone..])
        .find(|rest| now.starts_with(rest))
        .map_or(0, <[String]>::len);
    &now[kept..]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::view::samples::{job, published, receiving};
    use crate::view::{JobState, NodeState};
    use stage_core::failure::Code;

    fn kinds(events: &[Event]) -> Vec<String> {
        events
            .iter()
            .map(|event| match event {
                Event::Planned { .. } => "planned".to_owned(),
                Event::Node { node, .. } => format!("{} {}", node.name, node.state),
                Event::Remark { text, .. } => text.clone(),
                Event::Progress(_) => "progress".to_owned(),
                other => format!("{other:?}"),
            })
            .collect()
    }

    #[test]
    fn only_what_changed_is_told() {
        let mut differ = Differ::default();
        let mut view = job(vec![receiving("n1", "n0", 5), receiving("n2", "n1", 3)]);
        assert_eq!(
            kinds(&differ.feed(view.clone())),
            ["planned", "n1 receiving", "n2 receiving", "progress"]
        );
        view.nodes[0].kept.0 += 1;
        assert_eq!(kinds(&differ.feed(view.clone())), ["progress"]);
        view.nodes[0] = published("n1", "n0");
        view.remarks.push("n2 moved to n0".to_owned());
        view.nodes[1].parent = Some("n0".parse().unwrap());
        assert_eq!(
            kinds(&differ.feed(view)),
            ["n1 published", "n2 receiving", "n2 moved to n0", "progress"]
        );
    }

    #[test]
    fn why_a_job_failed_is_told_before_its_targets_are_cancelled() {
        let mut view = job(vec![published("n1", "n0")]);
        view.nodes[0].state = NodeState::Cancelled;
        view.state = JobState::Failed;
        view.failure = Some(Failure::new(Code::SourceMissing, "no such file", "look there"));
        view.plan = None;
        let mut differ = Differ::default();
        let told = kinds(&differ.feed(view.clone()));
        assert_eq!(told, ["failed: no such file", "n1 cancelled", "progress"]);
        assert_eq!(kinds(&differ.feed(view)), ["progress"]);
    }

    #[test]
    fn remarks_that_were_forgotten_are_not_told_twice() {
        let list = |text: &str| text.split(' ').map(str::to_owned).collect::<Vec<_>>();
        assert_eq!(fresh(&list("a b c"), &list("b c d e")), &list("d e")[..]);
        assert_eq!(fresh(&list("a a"), &list("a a a")), &list("a")[..]);
        assert_eq!(fresh(&list("a"), &list("x y")), &list("x y")[..]);
        assert_eq!(fresh(&[], &list("x")), &list("x")[..]);
    }
}
