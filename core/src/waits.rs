//! Where the time of a push's threads goes: what each hop says of itself, as sums since the job began on that node. The
//! difference of two samples is what went on between them; `verdict` makes words of it.

use std::time::Duration;

use crate::id::NodeName;
use crate::units::{ByteCount, Rate};

/// Sums without a limit: an agent may say anything.
fn sum<const N: usize>(times: [Duration; N]) -> Duration {
    times.into_iter().fold(Duration::ZERO, Duration::saturating_add)
}

/// Of the threads that receive from the parent, over all streams together.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct Receiving {
    /// For bytes to come.
    pub upstream: Duration,
    /// For the node's own disk to take them.
    pub disk: Duration,
    /// At work (copying, deciphering, checking), or ready to work and without a processor.
    pub cpu: Duration,
}

impl Receiving {
    /// All of it.
    pub fn total(&self) -> Duration {
        sum([self.upstream, self.disk, self.cpu])
    }

    /// The sum over streams.
    pub fn add(&mut self, other: &Self) {
        self.upstream = self.upstream.saturating_add(other.upstream);
        self.disk = self.disk.saturating_add(other.disk);
        self.cpu = self.cpu.saturating_add(other.cpu);
    }

    /// What went on since `before`.
    #[must_use]
    pub fn since(&self, before: &Self) -> Self {
        Self {
            upstream: self.upstream.saturating_sub(before.upstream),
            disk: self.disk.saturating_sub(before.disk),
            cpu: self.cpu.saturating_sub(before.cpu),
        }
    }
}

/// Of the threads that send to one child, over all streams together.
#[derive(Debug, Default, Clone, Copy, PartialEq)]
pub struct Sending {
    /// For a chunk that the child does not have.
    pub idle: Duration,
    /// For room in the socket.
    pub network: Duration,
    /// For the node's own disk, where a chunk is not in memory any more.
    pub disk: Duration,
    /// For the limit that was put on what the node sends.
    pub limit: Duration,
    /// At work (copying, ciphering), or ready to work and without a processor.
    pub cpu: Duration,
    /// What the kernel says of the connections.
    pub tcp: Tcp,
}

/// What the kernel counts of a hop's connections, as their sender sees them.
#[derive(Debug, Default, Clone, Copy, PartialEq)]
pub struct Tcp {
    /// Time with something to send or to be acknowledged.
    pub busy: Duration,
    /// Of it: the receiver's window was full.
    pub receiver: Duration,
    /// Of it: the send buffer was too small for what the path holds. What is left is the congestion window's.
    pub buffer: Duration,
    /// Bytes sent, those that were sent again counted again.
    pub sent: ByteCount,
    /// Bytes sent again.
    pub again: ByteCount,
    /// The longest smoothed round trip at the sample.
    pub rtt: Duration,
    /// What was delivered of late.
    pub delivery: Rate,
}

impl Tcp {
    /// The sum over connections.
    pub fn add(&mut self, other: &Self) {
        self.busy = self.busy.saturating_add(other.busy);
        self.receiver = self.receiver.saturating_add(other.receiver);
        self.buffer = self.buffer.saturating_add(other.buffer);
        self.sent = ByteCount(self.sent.0.saturating_add(other.sent.0));
        self.again = ByteCount(self.again.0.saturating_add(other.again.0));
        self.rtt = self.rtt.max(other.rtt);
        self.delivery =
            Rate::from_bytes_per_second(self.delivery.bytes_per_second() + other.delivery.bytes_per_second());
    }

    /// The share of what was sent that was sent again.
    pub fn loss(&self) -> f64 {
        if self.sent.0 == 0 {
            0.0
        } else {
            self.again.0 as f64 / self.sent.0 as f64
        }
    }
}

impl Sending {
    /// All of it.
    pub fn total(&self) -> Duration {
        sum([self.idle, self.network, self.disk, self.limit, self.cpu])
    }

    /// The sum over streams or hops.
    pub fn add(&mut self, other: &Self) {
        self.idle = self.idle.saturating_add(other.idle);
        self.network = self.network.saturating_add(other.network);
        self.disk = self.disk.saturating_add(other.disk);
        self.limit = self.limit.saturating_add(other.limit);
        self.cpu = self.cpu.saturating_add(other.cpu);
        self.tcp.add(&other.tcp);
    }

    /// What went on since `before`; round trip and delivery rate are as of now.
    #[must_use]
    pub fn since(&self, before: &Self) -> Self {
        let (now, then) = (&self.tcp, &before.tcp);
        Self {
            idle: self.idle.saturating_sub(before.idle),
            network: self.network.saturating_sub(before.network),
            disk: self.disk.saturating_sub(before.disk),
            limit: self.limit.saturating_sub(before.limit),
            cpu: self.cpu.saturating_sub(before.cpu),
            tcp: Tcp {
                busy: now.busy.saturating_sub(then.busy),
                receiver: now.receiver.saturating_sub(then.receiver),
                buffer: now.buffer.saturating_sub(then.buffer),
                sent: now.sent.saturating_sub(then.sent),
                again: now.again.saturating_sub(then.again),
                ..*now
            },
        }
    }
}

/// Of the thread that reads the source.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct Reading {
    /// For the source's disk, or for who writes into the pipe.
    pub disk: Duration,
    /// For the limit that was put on reading.
    pub limit: Duration,
    /// For somebody who wants more than is read.
    pub idle: Duration,
    /// At work, or ready to work and without a processor.
    pub cpu: Duration,
}

impl Reading {
    /// All of it.
    pub fn total(&self) -> Duration {
        sum([self.disk, self.limit, self.idle, self.cpu])
    }

    /// What went on since `before`.
    #[must_use]
    pub fn since(&self, before: &Self) -> Self {
        Self {
            disk: self.disk.saturating_sub(before.disk),
            limit: self.limit.saturating_sub(before.limit),
            idle: self.idle.saturating_sub(before.idle),
            cpu: self.cpu.saturating_sub(before.cpu),
        }
    }
}

/// All that one node says.
#[derive(Debug, Default, Clone, PartialEq)]
pub struct Waits {
    /// Of its own hop.
    pub receiving: Receiving,
    /// At the source.
    pub reading: Reading,
    /// Of its children's hops, over though they may be; each child once, [`MAX_CHILDREN`] at most.
    pub sending: Vec<(NodeName, Sending)>,
}

/// Of so many children a node tells at most: more would be longer to tell than it helps to know.
pub const MAX_CHILDREN: usize = 128;

impl Waits {
    /// Of the hop to this child.
    pub fn sending_to(&self, child: &NodeName) -> Option<&Sending> {
        self.sending
            .iter()
            .find(|(to, _)| to == child)
            .map(|(_, sending)| sending)
    }
}

/// What two waits that end by themselves (a read, a write) and the work between them took, of which the processor had
/// `cpu`: gives both waits without the work in them, and the work. Where the kernel does not say what the processor had,
/// `work` is all that is known.
pub fn apart(
    one: Duration,
    other: Duration,
    work: Duration,
    cpu: Option<Duration>,
) -> (Duration, Duration, Duration) {
    let total = one + other + work;
    let cpu = cpu.unwrap_or(work).max(work).min(total);
    let both = (one + other).as_secs_f64();
    if both == 0.0 {
        return (Duration::ZERO, Duration::ZERO, cpu);
    }
    // A copy takes a processor in either call; in proportion, since nobody says in which.
    let waited = total - cpu;
    let first = waited.mul_f64(one.as_secs_f64() / both).min(waited);
    (first, waited - first, cpu)
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    #[test]
    fn work_inside_a_call_is_no_wait() {
        // Nothing waited: all of it was the processor's.
        assert_eq!(
            apart(ms(40), ms(40), ms(20), Some(ms(100))),
            (ms(0), ms(0), ms(100))
        );
        // A disk that takes its time: reads were copies.
        let (read, write, cpu) = apart(ms(5), ms(85), ms(10), Some(ms(20)));
        assert_eq!(cpu, ms(20));
        assert_eq!(read + write, ms(80));
        assert!(write > ms(70), "{write:?}");
        // Nobody says.
        assert_eq!(apart(ms(60), ms(30), ms(10), None), (ms(60), ms(30), ms(10)));
        // A sample in the middle of a call: the processor's count is ahead of ours.
        assert_eq!(apart(ms(1), ms(0), ms(1), Some(ms(9))), (ms(0), ms(0), ms(2)));
        assert_eq!(apart(ms(0), ms(0), ms(0), Some(ms(9))), (ms(0), ms(0), ms(0)));
    }

    #[test]
    fn differences_never_go_below_nothing() {
        let before = Sending {
            idle: ms(5),
            ..Sending::default()
        };
        assert_eq!(Sending::default().since(&before), Sending::default());
        let mut sum = before;
        sum.add(&before);
        assert_eq!(sum.since(&before), before);
        assert_eq!(sum.total(), ms(10));
    }
}
