//! Sizes, rates and times, and their text forms. A number without a unit is refused: "10" could be anything.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use serde::{Deserialize, Deserializer, Serialize};

/// Why a text is not a size, a rate or a time.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum UnitError {
    /// A number without a unit.
    #[error("{0:?} has no unit: write for example {1:?}")]
    NoUnit(String, &'static str),
    /// No number, or one out of range.
    #[error("{0:?} is not a number with a unit: write for example {1:?}")]
    NoNumber(String, &'static str),
    /// A unit that is not one of this kind.
    #[error("{0:?} is not a unit here: write for example {1:?}")]
    Unknown(String, &'static str),
}

/// Splits "1.5 GiB" into 1.5 and "GiB".
fn split<'a>(text: &'a str, example: &'static str) -> Result<(f64, &'a str), UnitError> {
    let text = text.trim();
    let at = text
        .find(|c: char| !(c.is_ascii_digit() || c == '.'))
        .unwrap_or(text.len());
    let number: f64 = text[..at]
        .parse()
        .map_err(|_| UnitError::NoNumber(text.to_owned(), example))?;
    let unit = text[at..].trim_start();
    if unit.is_empty() {
        return Err(UnitError::NoUnit(text.to_owned(), example));
    }
    Ok((number, unit))
}

/// `number * factor` as a whole number.
fn scale(text: &str, number: f64, factor: f64, example: &'static str) -> Result<u64, UnitError> {
    let value = number * factor;
    // 2^63 keeps sums of two from wrapping, and is more than any disk holds.
    if value.is_finite() && value < 9.2e18 {
        Ok(value.round() as u64)
    } else {
        Err(UnitError::NoNumber(text.to_owned(), example))
    }
}

/// A number of bytes.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
#[serde(transparent)]
pub struct ByteCount(pub u64);

impl ByteCount {
    const EXAMPLE: &'static str = "64 MiB";

    /// What is left after `other`, zero at least.
    #[must_use]
    pub fn saturating_sub(self, other: Self) -> Self {
        Self(self.0.saturating_sub(other.0))
    }

    /// How long these bytes take at `rate`.
    pub fn time_at(self, rate: Rate) -> Duration {
        let seconds = self.0 as f64 / rate.bytes_per_second();
        Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX)
    }
}

impl std::ops::Add for ByteCount {
    type Output = Self;
    fn add(self, other: Self) -> Self {
        Self(self.0.saturating_add(other.0))
    }
}

impl FromStr for ByteCount {
    type Err = UnitError;
    fn from_str(text: &str) -> Result<Self, UnitError> {
        let (number, unit) = split(text, Self::EXAMPLE)?;
        let factor = match unit {
            "B" => 1.0,
            "kB" | "KB" => 1e3,
            "MB" => 1e6,
            "GB" => 1e9,
            "TB" => 1e12,
            "PB" => 1e15,
            "KiB" | "K" | "k" => 1024.0,
            "MiB" | "M" => 1024f64.powi(2),
            "GiB" | "G" => 1024f64.powi(3),
            "TiB" | "T" => 1024f64.powi(4),
            "PiB" => 1024f64.powi(5),
            other => return Err(UnitError::Unknown(other.to_owned(), Self::EXAMPLE)),
        };
        scale(text, number, factor, Self::EXAMPLE).map(Self)
    }
}

/// A whole number of bytes, or the largest binary unit with two digits behind the point.
impl fmt::Display for ByteCount {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut value = self.0 as f64;
        let mut unit = "B";
        for larger in ["KiB", "MiB", "GiB", "TiB", "PiB"] {
            if value < 1024.0 {
                break;
            }
            value /= 1024.0;
            unit = larger;
        }
        f.pad(&if unit == "B" {
            format!("{} B", self.0)
        } else {
            format!("{value:.2} {unit}")
        })
    }
}

/// A rate of data. Links are written in bits ("10 Gbit/s"), disks in bytes ("1.2 GB/s"): one quantity.
#[derive(Debug, Default, Clone, Copy, PartialEq, PartialOrd, Serialize)]
#[serde(transparent)]
pub struct Rate {
    bytes_per_second: f64,
}

impl Rate {
    const EXAMPLE: &'static str = "10 Gbit/s";

    /// No data at all.
    pub const ZERO: Self = Self {
        bytes_per_second: 0.0,
    };
    /// No limit: what is not known to be limited.
    pub const UNLIMITED: Self = Self {
        bytes_per_second: f64::INFINITY,
    };

    /// A rate of so many bytes a second.
    pub fn from_bytes_per_second(bytes_per_second: f64) -> Self {
        Self {
            bytes_per_second: bytes_per_second.max(0.0),
        }
    }

    /// A rate of so many bits a second.
    pub fn from_bits_per_second(bits_per_second: f64) -> Self {
        Self::from_bytes_per_second(bits_per_second / 8.0)
    }

    /// The mean rate of `bytes` in `time`; [`Rate::ZERO`] for no time.
    pub fn of(bytes: ByteCount, time: Duration) -> Self {
        if time.is_zero() {
            Self::ZERO
        } else {
            Self::from_bytes_per_second(bytes.0 as f64 / time.as_secs_f64())
        }
    }

    /// Bytes a second.
    pub fn bytes_per_second(self) -> f64 {
        self.bytes_per_second
    }

    /// Bits a second.
    pub fn bits_per_second(self) -> f64 {
        self.bytes_per_second * 8.0
    }

    /// The smaller of both.
    #[must_use]
    pub fn min(self, other: Self) -> Self {
        Self {
            bytes_per_second: self.bytes_per_second.min(other.bytes_per_second),
        }
    }

    /// This rate times a factor.
    #[must_use]
    pub fn times(self, factor: f64) -> Self {
        Self::from_bytes_per_second(self.bytes_per_second * factor)
    }

    /// The rate in bytes, as disks are rated: "117.19 MB/s".
    pub fn in_bytes(self) -> impl fmt::Display {
        Decimal {
            value: self.bytes_per_second,
            units: ["B/s", "kB/s", "MB/s", "GB/s", "TB/s"],
        }
    }

    /// The rate in bits, as links are rated: "10 Gbit/s".
    pub fn in_bits(self) -> impl fmt::Display {
        Decimal {
            value: self.bits_per_second(),
            units: ["bit/s", "kbit/s", "Mbit/s", "Gbit/s", "Tbit/s"],
        }
    }
}

struct Decimal {
    value: f64,
    units: [&'static str; 5],
}

impl fmt::Display for Decimal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut value = self.value;
        if value.is_infinite() {
            return f.pad("unlimited");
        }
        let mut unit = self.units[0];
        for larger in &self.units[1..] {
            if value < 999.5 {
                break;
            }
            value /= 1000.0;
            unit = larger;
        }
        // Three significant digits: what a measured rate is worth.
        let digits = if value >= 100.0 || unit == self.units[0] {
            0
        } else if value >= 10.0 {
            1
        } else {
            2
        };
        f.pad(&format!("{value:.digits$} {unit}"))
    }
}

impl FromStr for Rate {
    type Err = UnitError;
    fn from_str(text: &str) -> Result<Self, UnitError> {
        let (number, unit) = split(text, Self::EXAMPLE)?;
        let unknown = || UnitError::Unknown(unit.to_owned(), Self::EXAMPLE);
        let base = unit.strip_suffix("/s").ok_or_else(unknown)?;
        let per_second = match base {
            "bit" => 0.125,
            "kbit" | "Kbit" => 1e3 / 8.0,
            "Mbit" => 1e6 / 8.0,
            "Gbit" => 1e9 / 8.0,
            "Tbit" => 1e12 / 8.0,
            size => {
                let one: ByteCount = format!("1 {size}").parse().map_err(|_| unknown())?;
                one.0 as f64
            }
        };
        scale(text, number, per_second, Self::EXAMPLE)?;
        Ok(Self::from_bytes_per_second(number * per_second))
    }
}

/// Reads a time such as "0.2 ms", "60 s" or "24h".
///
/// # Errors
/// [`UnitError`] says what is wrong with the text.
pub fn parse_time(text: &str) -> Result<Duration, UnitError> {
    const EXAMPLE: &str = "0.2 ms";
    let (number, unit) = split(text, EXAMPLE)?;
    let seconds = match unit {
        "ns" => 1e-9,
        "us" | "µs" => 1e-6,
        "ms" => 1e-3,
        "s" => 1.0,
        "min" | "m" => 60.0,
        "h" => 3600.0,
        "d" => 86400.0,
        other => return Err(UnitError::Unknown(other.to_owned(), EXAMPLE)),
    };
    scale(text, number, seconds, EXAMPLE)?;
    Duration::try_from_secs_f64(number * seconds).map_err(|_| UnitError::NoNumber(text.to_owned(), EXAMPLE))
}

/// A time for people: "350 µs", "12.3 ms", "4.21 s", "3 min 20 s", "2 h 5 min".
pub fn show_time(time: Duration) -> impl fmt::Display {
    struct Shown(Duration);
    impl fmt::Display for Shown {
        fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            let seconds = self.0.as_secs_f64();
            let whole = self.0.as_secs();
            f.pad(&if seconds < 1e-3 {
                format!("{:.0} µs", seconds * 1e6)
            } else if seconds < 0.1 {
                format!("{:.1} ms", seconds * 1e3)
            } else if seconds < 60.0 {
                format!("{seconds:.2} s")
            } else if whole < 3600 {
                format!("{} min {} s", whole / 60, whole % 60)
            } else {
                format!("{} h {} min", whole / 3600, whole % 3600 / 60)
            })
        }
    }
    Shown(time)
}

macro_rules! deserialize_from_text {
    ($type:ty, $expecting:literal) => {
        /// From a text with a unit, and nothing else.
        impl<'de> Deserialize<'de> for $type {
            fn deserialize<D: Deserializer<'de>>(input: D) -> Result<Self, D::Error> {
                struct Text;
                impl serde::de::Visitor<'_> for Text {
                    type Value = $type;
                    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                        f.write_str($expecting)
                    }
                    fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<$type, E> {
                        text.parse().map_err(E::custom)
                    }
                }
                input.deserialize_str(Text)
            }
        }
    };
}
deserialize_from_text!(Rate, "a rate in a string, such as \"10 Gbit/s\"");

/// From a text with a unit where the form is for people (TOML), from a number where it is ours.
impl<'de> Deserialize<'de> for ByteCount {
    fn deserialize<D: Deserializer<'de>>(input: D) -> Result<Self, D::Error> {
        struct Either;
        impl serde::de::Visitor<'_> for Either {
            type Value = ByteCount;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a size in a string, such as \"64 MiB\"")
            }
            fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<ByteCount, E> {
                text.parse().map_err(E::custom)
            }
            fn visit_u64<E: serde::de::Error>(self, bytes: u64) -> Result<ByteCount, E> {
                Ok(ByteCount(bytes))
            }
        }
        if input.is_human_readable() {
            input.deserialize_str(Either)
        } else {
            input.deserialize_u64(Either)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_read_and_show() {
        for (text, bytes) in [
            ("64 MiB", 64 << 20),
            ("1.5GiB", 3 << 29),
            ("0 B", 0),
            ("5G", 5 << 30),
            ("1 kB", 1000),
        ] {
            assert_eq!(text.parse::<ByteCount>().unwrap(), ByteCount(bytes), "{text}");
        }
        for bad in [
            "",
            "64",
            "MiB",
            "-1 MiB",
            "1 MiBs",
            "1e99 GB",
            "99999999 PB",
            "NaN GB",
        ] {
            assert!(bad.parse::<ByteCount>().is_err(), "{bad:?}");
        }
        assert_eq!(ByteCount(0).to_string(), "0 B");
        assert_eq!(ByteCount(1023).to_string(), "1023 B");
        assert_eq!(ByteCount(3 << 29).to_string(), "1.50 GiB");
    }

    #[test]
    fn rates_read_and_show() {
        let ten: Rate = "10 Gbit/s".parse().unwrap();
        assert_eq!(ten.bytes_per_second(), 1.25e9);
        assert_eq!("1.25 GB/s".parse::<Rate>().unwrap(), ten);
        assert_eq!(ten.in_bits().to_string(), "10.0 Gbit/s");
        assert_eq!(ten.in_bytes().to_string(), "1.25 GB/s");
        assert_eq!(
            "100 MiB/s".parse::<Rate>().unwrap().bytes_per_second(),
            104857600.0
        );
        for bad in ["10", "10 Gbit", "10 parsec/s", "Gbit/s"] {
            assert!(bad.parse::<Rate>().is_err(), "{bad:?}");
        }
    }

    #[test]
    fn times_read_and_show() {
        assert_eq!(parse_time("0.2 ms").unwrap(), Duration::from_micros(200));
        assert_eq!(parse_time("24h").unwrap(), Duration::from_secs(86400));
        assert!(parse_time("3").is_err());
        assert_eq!(show_time(Duration::from_millis(12)).to_string(), "12.0 ms");
        assert_eq!(show_time(Duration::from_secs(200)).to_string(), "3 min 20 s");
    }
}
