//! A sweep as matrices: streams by windows, as text and as a heat map.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::io::{self, Write};

use stage_core::bench::StreamReading;
use stage_core::units::{ByteCount, Rate};

const CELL: (usize, usize) = (92, 34);
/// Left of the cells: the windows.
const LEFT: usize = 108;
/// Above the cells of a panel: its name and the streams.
const HEAD: usize = 64;
/// The lines above the panels take so much, also in a wide font.
const LINES: usize = 440;

/// The counts and windows that were tried, in order; the kernel's own window last.
fn axes(readings: &[StreamReading]) -> (Vec<u16>, Vec<ByteCount>) {
    let streams: BTreeSet<u16> = readings.iter().map(|reading| reading.streams).collect();
    let windows: BTreeSet<ByteCount> = readings.iter().map(|reading| reading.window).collect();
    let mut windows: Vec<ByteCount> = windows.into_iter().collect();
    windows.sort_by_key(|window| if window.0 == 0 { u64::MAX } else { window.0 });
    (streams.into_iter().collect(), windows)
}

fn at(readings: &[StreamReading], streams: u16, window: ByteCount) -> Option<Rate> {
    readings
        .iter()
        .find(|reading| (reading.streams, reading.window) == (streams, window))
        .map(|reading| reading.rate)
}

fn window_name(window: ByteCount) -> String {
    if window.0 == 0 {
        "auto".to_owned()
    } else {
        window.to_string()
    }
}

/// One direction as a table.
pub(crate) fn matrix(out: &mut impl Write, name: &str, readings: &[StreamReading]) -> io::Result<()> {
    let (streams, windows) = axes(readings);
    let mut header = vec!["window".to_owned()];
    header.extend(
        streams
            .iter()
            .map(|count| super::human::count((*count).into(), "stream")),
    );
    let header: Vec<&str> = header.iter().map(String::as_str).collect();
    let right: Vec<usize> = (1..header.len()).collect();
    let mut table = super::table::plain(&header, &right);
    for window in windows {
        let rates = streams.iter().map(|count| match at(readings, *count, window) {
            Some(rate) => rate.in_bytes().to_string(),
            None => "-".to_owned(),
        });
        table.add_row(std::iter::once(window_name(window)).chain(rates));
    }
    writeln!(out, "{name}")?;
    super::table::write(out, &table)
}

/// All directions as SVG, one panel below the other: the darker, the nearer to the fastest of all.
pub(crate) fn map(ways: &[(String, &[StreamReading])]) -> String {
    let best = ways
        .iter()
        .flat_map(|(_, readings)| readings.iter())
        .map(|reading| reading.rate.bytes_per_second())
        .fold(0.0, f64::max);
    let mut body = String::from(
        "<text x=\"16\" y=\"28\" font-size=\"15\" font-weight=\"bold\">Rate by streams and TCP window</text>\n\
         <text x=\"16\" y=\"46\" fill=\"#555\">the darker, the faster; auto: the kernel's own window</text>\n",
    );
    let (mut top, mut width) = (62, LINES);
    for (name, readings) in ways {
        let (streams, windows) = axes(readings);
        width = width.max(LEFT + streams.len() * CELL.0 + 16);
        // Writing to a string cannot fail.
        let _ = writeln!(
            body,
            "<text x=\"16\" y=\"{}\" font-weight=\"bold\">{name}</text>",
            top + 16
        );
        for (column, count) in streams.iter().enumerate() {
            let x = LEFT + column * CELL.0 + CELL.0 / 2;
            let label = super::human::count((*count).into(), "stream");
            let _ = writeln!(
                body,
                "<text x=\"{x}\" y=\"{}\" text-anchor=\"middle\" fill=\"#555\">{label}</text>",
                top + HEAD - 18
            );
        }
        for (row, window) in windows.iter().enumerate() {
            let y = top + HEAD - 8 + row * CELL.1;
            let middle = y + CELL.1 / 2 + 5;
            let _ = writeln!(
                body,
                "<text x=\"{}\" y=\"{middle}\" text-anchor=\"end\" fill=\"#555\">{}</text>",
                LEFT - 10,
                window_name(*window)
            );
            for (column, count) in streams.iter().enumerate() {
                let Some(rate) = at(readings, *count, *window) else {
                    continue;
                };
                let share = if best > 0.0 {
                    rate.bytes_per_second() / best
                } else {
                    0.0
                };
                let (fill, ink) = color(share);
                let x = LEFT + column * CELL.0;
                let _ = writeln!(
                    body,
                    "<rect x=\"{x}\" y=\"{y}\" width=\"{}\" height=\"{}\" fill=\"{fill}\"/>\
                     <text x=\"{}\" y=\"{middle}\" text-anchor=\"middle\" fill=\"{ink}\">{}</text>",
                    CELL.0 - 2,
                    CELL.1 - 2,
                    x + CELL.0 / 2,
                    rate.in_bytes()
                );
            }
        }
        top += HEAD + windows.len() * CELL.1 + 16;
    }
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width}\" height=\"{top}\" viewBox=\"0 0 {width} {top}\" \
         font-family=\"sans-serif\" font-size=\"13\">\n<rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n{body}</svg>\n"
    )
}

/// From nearly white to dark blue, and an ink that is read on it.
fn color(share: f64) -> (String, &'static str) {
    let share = share.clamp(0.0, 1.0);
    let mix = |light: f64, dark: f64| (light + (dark - light) * share).round() as u8;
    let fill = format!(
        "#{:02x}{:02x}{:02x}",
        mix(239.0, 8.0),
        mix(246.0, 69.0),
        mix(255.0, 148.0)
    );
    (fill, if share > 0.55 { "white" } else { "#222" })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reading(streams: u16, window: u64, mb: f64) -> StreamReading {
        StreamReading {
            streams,
            window: ByteCount(window),
            rate: Rate::from_bytes_per_second(mb * 1e6),
            bytes: ByteCount(1),
            retransmissions: 0,
        }
    }

    fn sweep() -> Vec<StreamReading> {
        vec![
            reading(1, 0, 800.0),
            reading(4, 0, 1100.0),
            reading(1, 4 << 20, 300.0),
            reading(4, 4 << 20, 1000.0),
            reading(1, 256 << 10, 20.0),
        ]
    }

    #[test]
    fn a_sweep_reads_as_a_matrix() {
        let mut out = Vec::new();
        matrix(&mut out, "n0 to n1", &sweep()).unwrap();
        insta::assert_snapshot!(String::from_utf8(out).unwrap(), @"
        n0 to n1
         window       1 stream  4 streams
         256.00 KiB  20.0 MB/s          -
         4.00 MiB     300 MB/s  1.00 GB/s
         auto         800 MB/s  1.10 GB/s
        ");
    }

    #[test]
    fn every_cell_is_drawn_and_the_fastest_is_darkest() {
        let sweep = sweep();
        let svg = map(&[("n0 to n1".to_owned(), &sweep), ("n1 to n0".to_owned(), &sweep)]);
        assert_eq!(svg.matches("<rect x=").count(), 2 * sweep.len());
        assert_eq!(svg.matches("#084594").count(), 2, "{svg}");
        assert!(svg.contains(">n1 to n0</text>") && svg.contains(">256.00 KiB</text>"));
        assert_eq!(color(0.0).0, "#eff6ff");
    }
}
