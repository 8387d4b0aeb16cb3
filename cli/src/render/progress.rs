//! Bars for a terminal: one for the job, one for each node. They live on standard error and are gone at the end,
//! when the table stands on standard output.

use std::io::{self, Write};
use std::time::Duration;

use indicatif::{MultiProgress, ProgressBar, ProgressStyle};
use stage_core::units::{ByteCount, Rate, show_time};

use super::{Render, human};
use crate::event::Event;
use crate::view::{Job, Node, NodeState};

/// So many nodes have a bar of their own; of more, the slowest.
const NODES: usize = 20;

/// Draws events.
pub(crate) struct Bars<W: Write> {
    ends: human::Lines<W>,
    all: MultiProgress,
    job: Option<ProgressBar>,
    nodes: Vec<ProgressBar>,
}

impl<W: Write> Bars<W> {
    /// The end goes to `out`.
    pub(crate) fn new(out: W) -> Self {
        Self {
            ends: human::Lines::ends(out),
            all: MultiProgress::new(),
            job: None,
            nodes: Vec::new(),
        }
    }

    fn draw(&mut self, job: &Job) {
        let bar = self.job.get_or_insert_with(|| {
            let bar = self.all.add(ProgressBar::new(100));
            bar.set_style(style("{elapsed_precise} {bar:24} {percent:>3}% {wide_msg}"));
            // A job that stalls must still be seen to be watched.
            bar.enable_steady_tick(Duration::from_millis(500));
            bar
        });
        let (kept, all) = share(job);
        bar.set_length(all.max(1));
        // Of a stream nobody knows the whole.
        bar.set_position(if all > 0 { kept } else { 0 });
        bar.set_message(job_line(job));
        let chosen = choose(&job.nodes);
        while self.nodes.len() < chosen.len() {
            let bar = self.all.add(ProgressBar::new(100));
            bar.set_style(style("{prefix:>14} {bar:18} {percent:>3}% {wide_msg}"));
            self.nodes.push(bar);
        }
        for bar in self.nodes.drain(chosen.len()..) {
            bar.finish_and_clear();
            self.all.remove(&bar);
        }
        for (bar, node) in self.nodes.iter().zip(chosen) {
            bar.set_prefix(node.name.to_string());
            bar.set_length(job.payload.0.max(1));
            bar.set_position(if node.state.is_done() {
                job.payload.0.max(1)
            } else if job.payload.0 > 0 {
                node.kept.0
            } else {
                0
            });
            bar.set_message(node_line(job, node));
        }
    }

    fn clear(&mut self) {
        for bar in self.nodes.drain(..).chain(self.job.take()) {
            bar.finish_and_clear();
        }
        drop(self.all.clear());
    }
}

impl<W: Write> Drop for Bars<W> {
    /// An error's text must not be drawn over.
    fn drop(&mut self) {
        self.clear();
    }
}

impl<W: Write> Render for Bars<W> {
    fn event(&mut self, event: &Event) -> io::Result<()> {
        match event {
            Event::Progress(job) => self.draw(job),
            Event::Node { node, .. } if node.failure.is_some() => {
                let failure = node.failure.as_ref().map(human::cause).unwrap_or_default();
                self.all
                    .println(format!("{}: {}: {failure}", node.name, node.state))?;
            }
            Event::Remark { text, .. } => self.all.println(text)?,
            Event::Finished { .. } => self.clear(),
            _ => {}
        }
        let Self { ends, all, .. } = self;
        all.suspend(|| ends.event(event))
    }
}

fn style(template: &str) -> ProgressStyle {
    ProgressStyle::with_template(template)
        .expect("the template is constant")
        .progress_chars("=> ")
}

/// How much of all that shall arrive has arrived.
fn share(job: &Job) -> (u64, u64) {
    let size = job.payload.0;
    let counted = job
        .nodes
        .iter()
        .filter(|node| node.state.is_moving() || node.state.is_done());
    counted.fold((0, 0), |(kept, all), node| {
        let has = if node.state.is_done() { size } else { node.kept.0 };
        (kept + has, all + size)
    })
}

/// All, or else those that will be last; in target order.
fn choose(nodes: &[Node]) -> Vec<&Node> {
    if nodes.len() <= NODES {
        return nodes.iter().collect();
    }
    let mut order: Vec<usize> = (0..nodes.len()).collect();
    order.sort_by_key(|at| {
        let node = &nodes[*at];
        (!node.state.is_moving(), node.kept, *at)
    });
    order.truncate(NODES);
    order.sort_unstable();
    order.into_iter().map(|at| &nodes[at]).collect()
}

/// The job beside its bar.
fn job_line(job: &Job) -> String {
    let sum = |of: fn(&Node) -> Rate| {
        Rate::from_bytes_per_second(job.nodes.iter().map(|node| of(node).bytes_per_second()).sum())
    };
    let mut line = format!("{} {} {} of {}", job.name, job.state, job.published, job.targets);
    if job.state.is_before_bytes() {
        return line;
    }
    let arrived: u64 = job.nodes.iter().map(|node| node.received.0).sum();
    line += &format!(
        ", now {}, mean {}",
        sum(|node| node.rate_now).in_bytes(),
        Rate::of(ByteCount(arrived), job.elapsed).in_bytes()
    );
    if let Some(left) = job.remaining() {
        line += &format!(", {} left", show_time(left));
    } else if job.sha256.is_none() && job.published > 0 && job.size.0 > 0 {
        line += &format!(
            ", digest {} %",
            job.sha256_bytes.0.saturating_mul(100) / job.size.0
        );
    }
    line
}

/// A node beside its bar.
fn node_line(job: &Job, node: &Node) -> String {
    match node.state {
        NodeState::Receiving => {
            let mut line = format!(
                "now {}, mean {}, disk {}",
                node.rate_now.in_bytes(),
                node.rate.in_bytes(),
                node.disk_rate.in_bytes()
            );
            if let Some(left) = node.remaining(job.payload) {
                line += &format!(", {} left", show_time(left));
            }
            if job.payload.0 == 0 {
                line += &format!(", {} so far", node.kept);
            }
            if let Some(parent) = &node.parent {
                line += &format!(", from {parent} x{}", node.streams);
            }
            line
        }
        NodeState::Published if node.already => "already there".to_owned(),
        NodeState::Published => format!(
            "published, {} at {}",
            show_time(node.elapsed),
            node.rate.in_bytes()
        ),
        state => state.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::view::samples::{job, published, receiving, unfit};

    #[test]
    fn lines_say_rates_and_what_is_left() {
        let view = job(vec![
            receiving("n1", "n0", 1 << 29),
            receiving("n2", "n1", 1 << 28),
            published("n3", "n2"),
            unfit("n4"),
        ]);
        insta::assert_snapshot!(job_line(&view), @"genome.db running 1 of 4, now 234 MB/s, mean 470 MB/s, 6.88 s left");
        insta::assert_snapshot!(node_line(&view, &view.nodes[0]), @"now 117 MB/s, mean 120 MB/s, disk 900 MB/s, 4.59 s left, from n0 x1");
        insta::assert_snapshot!(node_line(&view, &view.nodes[2]), @"published, 8.80 s at 122 MB/s");
        assert_eq!(node_line(&view, &view.nodes[3]), "unfit");
        assert_eq!(share(&view), ((1 << 29) + (1 << 28) + (1 << 30), 3 << 30));
    }

    #[test]
    fn of_many_nodes_the_last_are_shown() {
        let mut nodes: Vec<Node> = (0..50)
            .map(|i| receiving(&format!("n{i}"), "n0", 1000 - i))
            .collect();
        nodes[49] = published("n49", "n0");
        let chosen: Vec<&str> = choose(&nodes).iter().map(|node| node.name.as_str()).collect();
        assert_eq!(chosen.len(), NODES);
        assert_eq!((chosen[0], chosen[19]), ("n29", "n48"));
    }
}
