//! `stage-lab compare`: stage beside the tools that it replaces, in the same lab, in the same call, in turns.
//!
//! A setting is a fabric; each round of it lets every contestant bring one file to all targets. Seconds are counted to the
//! last copy, "as it is" and "verified": a tool that does not check gets `openssl dgst -sha256` on every node behind it. The
//! processor time is that of a control group in which all of a contestant's programs run.

mod field;
mod peers;
mod stage;
mod table;

use std::io::{self, Write as _};
use std::path::PathBuf;

use serde::Serialize;
use serde_json::Value;
use stage_core::topology::Topology;
use stage_core::units::ByteCount;
use stage_lab::cluster::Security;
use stage_lab::{Group, Lab, LabError, Options};

use self::field::Field;
use crate::bench::{Facts, binary, one_switch, random_file, rounded, save};

/// What can be asked for.
#[derive(Debug, clap::Args)]
pub(crate) struct Compare {
    /// The binary that is measured.
    #[arg(long, default_value = "target/release/stage")]
    stage: PathBuf,
    /// Only these contestants: stage, stage-insecure, or a peer's name (see --list).
    #[arg(long, value_name = "NAME", num_args = 1..)]
    only: Vec<String>,
    /// Only these settings (see --list).
    #[arg(long, value_name = "NAME", num_args = 1..)]
    setting: Vec<String>,
    /// How often each contestant has its turn.
    #[arg(long, default_value_t = 5)]
    rounds: u32,
    /// How often tools have their turn over shaped links that send a copy for each target: they take long, and always as long.
    #[arg(long, value_name = "N", default_value_t = 1)]
    star_rounds: u32,
    /// The file's size.
    #[arg(long, default_value = "1 GiB")]
    size: ByteCount,
    /// Where the figures go; the table beside them with the suffix md [default: lab/results/DATE-compare.json].
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// What all nodes' connections go by, iperf3's and the peers' too [default: the kernel's].
    #[arg(long, value_name = "NAME")]
    congestion_control: Option<String>,
    /// A word more for stage's push, as `--word=--streams --word=2`.
    #[arg(long = "word", value_name = "WORD")]
    words: Vec<String>,
    /// Say what can be asked for, and measure nothing.
    #[arg(long)]
    list: bool,
}

/// A fabric.
#[derive(Debug, Clone, Serialize)]
struct Setting {
    name: &'static str,
    about: &'static str,
    targets: u32,
    /// Of each node's interface; where nothing is shaped, what the planner is told.
    rate: &'static str,
    shaped: bool,
}

const SETTINGS: [Setting; 5] = [
    Setting {
        name: "four",
        about: "4 targets, 1 Gbit/s each",
        targets: 4,
        rate: "1 Gbit/s",
        shaped: true,
    },
    Setting {
        name: "eight",
        about: "8 targets, 500 Mbit/s each",
        targets: 8,
        rate: "500 Mbit/s",
        shaped: true,
    },
    Setting {
        name: "one",
        about: "1 target, 500 Mbit/s: what the others of eight cost",
        targets: 1,
        rate: "500 Mbit/s",
        shaped: true,
    },
    Setting {
        name: "four-unshaped",
        about: "4 targets, unshaped: the processors limit",
        targets: 4,
        rate: "40 Gbit/s",
        shaped: false,
    },
    Setting {
        name: "one-unshaped",
        about: "1 target, unshaped: the processors limit",
        targets: 1,
        rate: "40 Gbit/s",
        shaped: false,
    },
];

/// Who brings the file.
#[derive(Debug, Clone, Copy)]
enum Contestant {
    Stage(Security),
    Peer(&'static peers::Peer),
}

impl Contestant {
    fn all() -> Vec<Self> {
        let stage = [Security::Tls, Security::Insecure].map(Self::Stage);
        stage
            .into_iter()
            .chain(peers::ALL.iter().map(Self::Peer))
            .collect()
    }

    fn name(self) -> &'static str {
        match self {
            Self::Stage(Security::Tls) => "stage",
            Self::Stage(Security::Insecure) => "stage-insecure",
            Self::Peer(peer) => peer.name,
        }
    }

    fn about(self) -> &'static str {
        match self {
            Self::Stage(Security::Tls) => "stage push, encrypted (the default)",
            Self::Stage(Security::Insecure) => "stage push, insecure",
            Self::Peer(peer) => peer.about,
        }
    }

    fn is_star(self) -> bool {
        matches!(self, Self::Peer(peer) if peer.is_star)
    }

    /// The first of its programs that is not there.
    fn missing(self) -> Option<String> {
        let Self::Peer(peer) = self else { return None };
        let program = peer
            .programs
            .iter()
            .find(|program| !stage_lab::is_installed(program))?;
        Some(format!("{program} is not installed (package {})", peer.package))
    }
}

/// How one turn went.
#[derive(Debug, Clone, Default, Serialize)]
struct Turn {
    round: u32,
    /// Seconds to the last copy.
    as_it_is: f64,
    /// Seconds to the last copy that is known to be right.
    verified: f64,
    /// stage only: to the command's end, with the payload's SHA-256.
    #[serde(skip_serializing_if = "Option::is_none")]
    done: Option<f64>,
    cpu_as_it_is: f64,
    cpu_verified: f64,
    /// The most resident memory of one of its processes, bytes.
    peak_rss: u64,
    /// stage only: the most anonymous memory that one agent had, bytes, since its start.
    #[serde(skip_serializing_if = "Option::is_none")]
    agent_rss_anon: Option<u64>,
    /// Bytes that left the source's interface.
    source_sent: u64,
    /// What stage forecast, seconds.
    #[serde(skip_serializing_if = "Option::is_none")]
    forecast: Option<f64>,
    /// What stage's last line said.
    #[serde(skip_serializing_if = "Value::is_null")]
    finished: Value,
}

/// All turns of a contestant in a setting.
#[derive(Debug, Serialize)]
struct Row {
    name: &'static str,
    about: &'static str,
    turns: Vec<Turn>,
    /// Why it has none, or fewer.
    #[serde(skip_serializing_if = "Option::is_none")]
    trouble: Option<String>,
}

/// A setting's rows.
#[derive(Debug, Serialize)]
struct Sheet {
    setting: Setting,
    /// What iperf3 showed between two nodes before each round, bits per second.
    goodput: Vec<f64>,
    rows: Vec<Row>,
}

/// All that is kept.
#[derive(Debug, Serialize)]
struct Results {
    #[serde(flatten)]
    facts: Facts,
    size: ByteCount,
    rounds: u32,
    sheets: Vec<Sheet>,
}

/// Measures, prints the table, keeps the figures.
///
/// # Errors
/// For people: what was asked for cannot be done at all.
pub(crate) fn run(compare: &Compare) -> Result<(), String> {
    if compare.list {
        return list().map_err(|why| why.to_string());
    }
    let contestants: Vec<Contestant> = chosen(&compare.only, Contestant::all(), |one| one.name())?;
    let settings = chosen(&compare.setting, SETTINGS.to_vec(), |one| one.name)?;
    let stage = binary(&compare.stage)?;
    let mut results = Results {
        facts: Facts::now().of(&stage),
        size: compare.size,
        rounds: compare.rounds,
        sheets: Vec::new(),
    };
    for setting in settings {
        let sheet = sheet(compare, &stage, &setting, &contestants).map_err(|why| why.to_string())?;
        results.sheets.push(sheet);
    }
    let text = table::show(&results);
    let path = save(
        &results.facts,
        "compare",
        compare.json.as_deref(),
        &results,
        Some(&text),
    )?;
    let mut out = io::stdout();
    writeln!(out, "{text}\nkept in {}", path.display()).map_err(|why| why.to_string())
}

fn list() -> io::Result<()> {
    let mut out = io::stdout();
    writeln!(out, "settings:")?;
    for setting in SETTINGS {
        writeln!(out, "  {:16}{}", setting.name, setting.about)?;
    }
    writeln!(out, "contestants:")?;
    for contestant in Contestant::all() {
        let missing = contestant
            .missing()
            .map_or_else(String::new, |why| format!(": {why}"));
        writeln!(out, "  {:16}{}{missing}", contestant.name(), contestant.about())?;
    }
    Ok(())
}

/// Those of `all` that were named; all, if none was.
fn chosen<T>(names: &[String], all: Vec<T>, name: impl Fn(&T) -> &'static str) -> Result<Vec<T>, String> {
    if let Some(unknown) = names
        .iter()
        .find(|wanted| all.iter().all(|one| name(one) != *wanted))
    {
        let known: Vec<&str> = all.iter().map(name).collect();
        return Err(format!("there is no {unknown:?}: {}", known.join(", ")));
    }
    let mut all = all;
    all.retain(|one| names.is_empty() || names.iter().any(|wanted| wanted == name(one)));
    Ok(all)
}

fn sheet(
    compare: &Compare,
    stage: &std::path::Path,
    setting: &Setting,
    contestants: &[Contestant],
) -> Result<Sheet, LabError> {
    let text = one_switch(setting.targets, setting.rate);
    let topology = Topology::parse(setting.name, &text).expect("the bench's own topologies are right");
    let options = Options {
        unshaped: !setting.shaped,
        ..Options::default()
    };
    let lab = Lab::with(&topology, &options)?;
    if let Some(control) = &compare.congestion_control {
        for node in topology.nodes() {
            lab.congestion_control(node.name.as_str(), control)?;
        }
    }
    let file = random_file(&lab, "n0", "payload", compare.size)?;
    let digest = stage_lab::sha256sum(std::slice::from_ref(&file))?.remove(0);
    let mut sheet = Sheet {
        setting: setting.clone(),
        goodput: Vec::new(),
        rows: contestants
            .iter()
            .map(|contestant| Row {
                name: contestant.name(),
                about: contestant.about(),
                turns: Vec::new(),
                trouble: contestant.missing(),
            })
            .collect(),
    };
    for round in 1..=compare.rounds {
        if setting.shaped && stage_lab::is_installed("iperf3") {
            sheet
                .goodput
                .push(lab.iperf("n0", "n1")?.bits_per_second().round());
        }
        for (contestant, row) in contestants.iter().zip(&mut sheet.rows) {
            let is_enough = setting.shaped && contestant.is_star() && round > compare.star_rounds;
            if row.trouble.is_some() || is_enough {
                continue;
            }
            match turn(
                &lab,
                *contestant,
                (stage, &compare.words),
                &text,
                setting,
                (&file, compare.size, &digest),
            ) {
                Ok(turn) => {
                    let turn = Turn { round, ..turn };
                    drop(writeln!(
                        io::stderr(),
                        "{}",
                        table::line(setting, round, row.name, &turn)
                    ));
                    row.turns.push(turn);
                }
                // It does not work here: it need not be tried again.
                Err(why) => {
                    drop(writeln!(io::stderr(), "{}, {}: {why}", setting.name, row.name));
                    row.trouble = Some(why.to_string());
                }
            }
        }
    }
    Ok(sheet)
}

fn turn(
    lab: &Lab,
    contestant: Contestant,
    (stage, words): (&std::path::Path, &[String]),
    topology: &str,
    setting: &Setting,
    (file, size, digest): (&std::path::Path, ByteCount, &str),
) -> Result<Turn, LabError> {
    let group = Group::new()?;
    let field = Field::new(lab, &group, setting, file, size, digest)?;
    if !setting.shaped {
        field.warm_up()?;
    }
    match contestant {
        Contestant::Stage(security) => stage::turn(&field, stage, words, topology, security),
        Contestant::Peer(peer) => {
            let seen = (peer.drive)(&field)?;
            let mut turn = Turn {
                as_it_is: rounded(seen.time.as_secs_f64()),
                cpu_as_it_is: rounded(seen.cpu.as_secs_f64()),
                peak_rss: seen.peak_rss.0,
                source_sent: seen.sent.0,
                ..Turn::default()
            };
            group.end_all();
            let check = field.check()?;
            let (time, cpu) = if peer.checks {
                (turn.as_it_is, turn.cpu_as_it_is)
            } else {
                (
                    turn.as_it_is + check.time.as_secs_f64(),
                    turn.cpu_as_it_is + check.cpu.as_secs_f64(),
                )
            };
            (turn.verified, turn.cpu_verified) = (rounded(time), rounded(cpu));
            Ok(turn)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_choose_and_unknown_ones_are_told() {
        let names = |names: &[&str]| {
            let names: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
            chosen(&names, Contestant::all(), |one| one.name())
        };
        assert_eq!(names(&[]).unwrap().len(), 2 + peers::ALL.len());
        let two = names(&["cp", "stage"]).unwrap();
        assert_eq!(
            two.iter().map(|one| one.name()).collect::<Vec<_>>(),
            ["stage", "cp"]
        );
        assert!(names(&["scp", "nobody"]).unwrap_err().contains("\"nobody\""));
        let mut all: Vec<_> = Contestant::all().iter().map(|one| one.name()).collect();
        all.sort_unstable();
        all.dedup();
        assert_eq!(all.len(), 2 + peers::ALL.len(), "names are told apart");
    }
}
