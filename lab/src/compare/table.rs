//! What was measured, for people: a Markdown table for each setting.

use std::fmt::Write as _;

use stage_core::units::{ByteCount, Rate};

use super::{Results, Row, Setting, Sheet, Turn};
use crate::bench::{Spread, spread};

const MIB: f64 = (1 << 20) as f64;

/// One turn, while the others are still to come.
pub(super) fn line(setting: &Setting, round: u32, name: &str, turn: &Turn) -> String {
    format!(
        "{}, round {round}: {name} {:.2} s verified ({:.2} as it is), {:.2} s of CPU ({:.2}), {} MiB, source sent {}",
        setting.name,
        turn.verified,
        turn.as_it_is,
        turn.cpu_verified,
        turn.cpu_as_it_is,
        turn.peak_rss >> 20,
        ByteCount(turn.source_sent)
    )
}

pub(super) fn show(results: &Results) -> String {
    let mut text = String::new();
    let mut put = |line: String| writeln!(text, "{line}").expect("a string takes all");
    put(results.facts.line());
    put(format!(
        "\n`{}`; {} from one node to all targets, {} rounds, median (min–max).",
        results.facts.command.join(" "),
        results.size,
        results.rounds
    ));
    for sheet in &results.sheets {
        put(format!("\n## {}\n", sheet.setting.about));
        if let Some(goodput) = Spread::of(sheet.goodput.iter().copied()) {
            let rate = Rate::from_bits_per_second(goodput.median);
            put(format!(
                "One TCP connection carries {:.0} Mbit/s (iperf3): {:.2} s for the file.\n",
                goodput.median / 1e6,
                results.size.time_at(rate).as_secs_f64()
            ));
        }
        put("| tool | s, verified | s, as it is | of the goodput, verified | CPU s per GB delivered, verified | as it is | peak RSS of a process, MiB | source sent, of the size |".to_owned());
        put("|---|---|---|---|---|---|---|---|".to_owned());
        for row in &sheet.rows {
            put(cells(sheet, row, results.size, results.rounds));
        }
        let done = sheet
            .rows
            .iter()
            .filter(|row| row.turns.iter().any(|turn| turn.done.is_some()));
        for row in done {
            put(format!(
                "\n{}: to the command's end, with the SHA-256 of the whole, {} s; forecast {} s; anonymous memory of an agent \
                 at most {} MiB.",
                row.name,
                spread(row.turns.iter().filter_map(|turn| turn.done), 2),
                spread(row.turns.iter().filter_map(|turn| turn.forecast), 2),
                spread(
                    row.turns
                        .iter()
                        .filter_map(|turn| Some(turn.agent_rss_anon? as f64 / MIB)),
                    1
                )
            ));
        }
    }
    text
}

fn cells(sheet: &Sheet, row: &Row, size: ByteCount, rounds: u32) -> String {
    if row.turns.is_empty() {
        let why = row.trouble.as_deref().unwrap_or("no turn");
        let why = why.replace('|', "\\|").replace('\n', " ");
        return format!("| {} | – | – | – | – | – | – | {why} |", row.about);
    }
    let figure = |of: &dyn Fn(&Turn) -> f64, digits| spread(row.turns.iter().map(of), digits);
    let gigabytes = size.0 as f64 / 1e9 * f64::from(sheet.setting.targets);
    let of_the_goodput = || {
        let goodput = Spread::of(sheet.goodput.iter().copied())?;
        let ideal = size
            .time_at(Rate::from_bits_per_second(goodput.median))
            .as_secs_f64();
        let seconds = Spread::of(row.turns.iter().map(|turn| turn.verified))?;
        Some(format!("{:.3}", ideal / seconds.median))
    };
    let short = match (row.turns.len(), &row.trouble) {
        (_, Some(_)) => " (then it failed)".to_owned(),
        (turns, None) if turns < rounds as usize => format!(" (turns: {turns})"),
        _ => String::new(),
    };
    format!(
        "| {}{short} | {} | {} | {} | {} | {} | {} | {} |",
        row.about,
        figure(&|turn| turn.verified, 2),
        figure(&|turn| turn.as_it_is, 2),
        of_the_goodput().unwrap_or_else(|| "–".to_owned()),
        figure(&|turn| turn.cpu_verified / gigabytes, 2),
        figure(&|turn| turn.cpu_as_it_is / gigabytes, 2),
        figure(&|turn| (turn.peak_rss >> 20) as f64, 0),
        figure(&|turn| turn.source_sent as f64 / size.0 as f64, 2),
    )
}

#[cfg(test)]
mod tests {
    use super::super::SETTINGS;
    use super::*;
    use crate::bench::Facts;

    #[test]
    fn a_sheet_becomes_a_table() {
        let turn = |seconds: f64| Turn {
            as_it_is: seconds,
            verified: seconds * 2.0,
            cpu_as_it_is: 4.0,
            cpu_verified: 8.0,
            peak_rss: 3 << 20,
            source_sent: 2_000_000_000,
            ..Turn::default()
        };
        let row = |name, turns, trouble| Row {
            name,
            about: name,
            turns,
            trouble,
        };
        let results = Results {
            facts: Facts::now(),
            size: ByteCount(1_000_000_000),
            rounds: 3,
            sheets: vec![Sheet {
                setting: SETTINGS[0].clone(),
                goodput: vec![950e6],
                rows: vec![
                    row("fast", vec![turn(4.0), turn(5.0), turn(6.0)], None),
                    row(
                        "gone",
                        vec![],
                        Some("x is not installed (package y|z)".to_owned()),
                    ),
                ],
            }],
        };
        let text = show(&results);
        let wanted = "| fast | 10.00 (8.00–12.00) | 5.00 (4.00–6.00) | 0.842 | 2.00 (2.00–2.00) | 1.00 (1.00–1.00) | 3 (3–3) | 2.00 (2.00–2.00) |\n\
                      | gone | – | – | – | – | – | – | x is not installed (package y\\|z) |\n";
        assert!(text.ends_with(wanted), "{text}");
        assert!(text.contains("950 Mbit/s (iperf3): 8.42 s"), "{text}");
    }
}
