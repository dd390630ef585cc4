//! Quantities as people write them: `10Gbps`, `1.25GB/s`, `16GiB`, `50us`.
//!
//! A bare number is refused: whether `10` means gigabits or gigabytes is exactly what nobody should have to guess.

/// Why a text is no quantity.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum UnitError {
    /// The number has no unit.
    #[error("`{text}` has no unit: write for example {examples}")]
    Bare {
        /// What was given.
        text: String,
        /// How it could be written.
        examples: &'static str,
    },
    /// The unit is none of those known.
    #[error("`{unit}` in `{text}` is no unit of {quantity}: write for example {examples}")]
    Unknown {
        /// What was given.
        text: String,
        /// Its unit.
        unit: String,
        /// `bandwidth`, `memory` or `time`.
        quantity: &'static str,
        /// How it could be written.
        examples: &'static str,
    },
    /// There is no number before the unit, or none that makes sense.
    #[error(
        "`{text}` is no {quantity}: write a positive number and a unit, for example {examples}"
    )]
    Number {
        /// What was given.
        text: String,
        /// `bandwidth`, `memory` or `time`.
        quantity: &'static str,
        /// How it could be written.
        examples: &'static str,
    },
}

struct Quantity {
    name: &'static str,
    examples: &'static str,
    units: &'static [(&'static str, f64)],
    zero_allowed: bool,
}

const BANDWIDTH: Quantity = Quantity {
    name: "bandwidth",
    examples: "10Gbps, 10Gbit/s or 1.25GB/s",
    units: &[
        ("kbps", 1e3 / 8.0),
        ("Mbps", 1e6 / 8.0),
        ("Gbps", 1e9 / 8.0),
        ("Tbps", 1e12 / 8.0),
        ("kbit/s", 1e3 / 8.0),
        ("Mbit/s", 1e6 / 8.0),
        ("Gbit/s", 1e9 / 8.0),
        ("Tbit/s", 1e12 / 8.0),
        ("B/s", 1.0),
        ("kB/s", 1e3),
        ("MB/s", 1e6),
        ("GB/s", 1e9),
        ("TB/s", 1e12),
        ("KiB/s", 1024.0),
        ("MiB/s", 1_048_576.0),
        ("GiB/s", 1_073_741_824.0),
    ],
    zero_allowed: false,
};

const MEMORY: Quantity = Quantity {
    name: "memory",
    examples: "16GiB, 16GB or 512MiB",
    units: &[
        ("B", 1.0),
        ("kB", 1e3),
        ("MB", 1e6),
        ("GB", 1e9),
        ("TB", 1e12),
        ("KiB", 1024.0),
        ("MiB", 1_048_576.0),
        ("GiB", 1_073_741_824.0),
        ("TiB", 1_099_511_627_776.0),
    ],
    zero_allowed: false,
};

const TIME: Quantity = Quantity {
    name: "time",
    examples: "50us, 2ms or 60s",
    units: &[
        ("ns", 1e-9),
        ("us", 1e-6),
        ("\u{b5}s", 1e-6),
        ("\u{3bc}s", 1e-6),
        ("ms", 1e-3),
        ("s", 1.0),
        ("min", 60.0),
        ("h", 3600.0),
    ],
    zero_allowed: true,
};

/// Bytes per second. Decimal and binary prefixes, bits (`Gbps`, `Gbit/s`) and bytes (`GB/s`).
///
/// # Errors
/// If there is no unit, an unknown one, or no positive number.
pub fn parse_bandwidth(text: &str) -> Result<f64, UnitError> {
    parse(text, &BANDWIDTH)
}

/// Bytes.
///
/// # Errors
/// If there is no unit, an unknown one, or no positive number.
pub fn parse_memory(text: &str) -> Result<u64, UnitError> {
    // Saturates at both ends, which no real size reaches.
    parse(text, &MEMORY).map(|bytes| bytes as u64)
}

/// Seconds.
///
/// # Errors
/// If there is no unit, an unknown one, or a negative number.
pub fn parse_time(text: &str) -> Result<f64, UnitError> {
    parse(text, &TIME)
}

fn parse(text: &str, quantity: &Quantity) -> Result<f64, UnitError> {
    let trimmed = text.trim();
    let end = trimmed
        .char_indices()
        .position(|(i, c)| !is_numeric(trimmed, i, c))
        .unwrap_or(trimmed.len());
    let (number, unit) = trimmed.split_at(end);
    let unit = unit.trim();
    let no_number = || UnitError::Number {
        text: text.to_owned(),
        quantity: quantity.name,
        examples: quantity.examples,
    };
    let value: f64 = number.parse().map_err(|_| no_number())?;
    if unit.is_empty() {
        return Err(UnitError::Bare {
            text: text.to_owned(),
            examples: quantity.examples,
        });
    }
    // Exact spelling first: `MB` and `Mb` differ; after that only a differing prefix (`gbps`, `KB`) is forgiven.
    let factor = quantity
        .units
        .iter()
        .find(|(name, _)| *name == unit)
        .or_else(|| {
            quantity
                .units
                .iter()
                .find(|(name, _)| same_but_prefix(name, unit))
        })
        .map(|(_, factor)| factor)
        .ok_or_else(|| UnitError::Unknown {
            text: text.to_owned(),
            unit: unit.to_owned(),
            quantity: quantity.name,
            examples: quantity.examples,
        })?;
    let result = value * factor;
    if !result.is_finite() || result < 0.0 || (result == 0.0 && !quantity.zero_allowed) {
        return Err(no_number());
    }
    Ok(result)
}

/// Digits, a point, a sign in front or in an exponent, the exponent's `e` between digits.
fn is_numeric(text: &str, at: usize, c: char) -> bool {
    let before = text[..at].chars().next_back();
    let after = text[at + c.len_utf8()..].chars().next();
    match c {
        '0'..='9' | '.' => true,
        '+' | '-' => matches!(before, None | Some('e' | 'E')),
        'e' | 'E' => {
            before.is_some_and(|b| b.is_ascii_digit() || b == '.')
                && after.is_some_and(|a| a.is_ascii_digit() || a == '+' || a == '-')
        }
        _ => false,
    }
}

/// Whether two units differ at most in the case of their first letter and that letter is a prefix (k, M, G, T).
fn same_but_prefix(name: &str, given: &str) -> bool {
    let (mut a, mut b) = (name.chars(), given.chars());
    let (Some(first), Some(other)) = (a.next(), b.next()) else {
        return false;
    };
    name.len() > 1
        && matches!(first, 'k' | 'K' | 'M' | 'G' | 'T')
        && first.eq_ignore_ascii_case(&other)
        && !a.as_str().is_empty()
        && a.as_str() == b.as_str()
        && name != "min"
}

/// Bytes in the unit that keeps one to three digits before the point, for people.
#[must_use]
pub fn show_bytes(bytes: f64) -> String {
    scaled(bytes, 1024.0, &["B", "KiB", "MiB", "GiB", "TiB", "PiB"])
}

/// Seconds in the unit that keeps one to three digits before the point, for people.
#[must_use]
pub fn show_time(seconds: f64) -> String {
    // Less than a clock tells: what a reference handed over between threads costs.
    if seconds < 1e-9 {
        return "0".to_owned();
    }
    if seconds >= 1.0 {
        return format!("{} s", three_digits(seconds));
    }
    scaled(seconds * 1e9, 1000.0, &["ns", "us", "ms", "s"])
}

/// Bytes per second as link speeds are quoted, in bits.
#[must_use]
pub fn show_bandwidth(bytes_per_s: f64) -> String {
    scaled(
        bytes_per_s * 8.0,
        1000.0,
        &["bps", "kbps", "Mbps", "Gbps", "Tbps"],
    )
}

fn scaled(value: f64, base: f64, units: &[&str]) -> String {
    let mut value = value;
    let mut unit = 0;
    while value >= base * 0.9995 && unit + 1 < units.len() {
        value /= base;
        unit += 1;
    }
    if unit == 0 && value.fract() == 0.0 {
        return format!("{value} {}", units[0]);
    }
    format!("{} {}", three_digits(value), units[unit])
}

fn three_digits(value: f64) -> String {
    let decimals = if value >= 99.95 {
        0
    } else if value >= 9.995 {
        1
    } else {
        2
    };
    format!("{value:.decimals$}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantities_as_people_write_them() {
        assert_eq!(parse_bandwidth("10Gbps"), Ok(1.25e9));
        assert_eq!(parse_bandwidth("10Gbit/s"), Ok(1.25e9));
        assert_eq!(parse_bandwidth(" 1.25 GB/s "), Ok(1.25e9));
        assert_eq!(parse_bandwidth("10gbps"), Ok(1.25e9));
        assert_eq!(parse_bandwidth("1e9B/s"), Ok(1e9));
        assert_eq!(parse_memory("16GiB"), Ok(16 << 30));
        assert_eq!(parse_memory("64KB"), Ok(64_000));
        assert_eq!(parse_time("50us"), Ok(50.0 * 1e-6));
        assert_eq!(parse_time("2e-3s"), Ok(2e-3));
        assert_eq!(parse_time("0s"), Ok(0.0));
    }

    #[test]
    fn a_bare_number_is_refused_with_a_hint() {
        let error = parse_bandwidth("10").unwrap_err().to_string();
        assert_eq!(
            error,
            "`10` has no unit: write for example 10Gbps, 10Gbit/s or 1.25GB/s"
        );
        assert!(matches!(parse_memory("16"), Err(UnitError::Bare { .. })));
        assert!(matches!(parse_time("0.5"), Err(UnitError::Bare { .. })));
    }

    #[test]
    fn bits_are_not_taken_for_bytes_nor_minutes_for_millis() {
        assert!(matches!(
            parse_memory("16Gb"),
            Err(UnitError::Unknown { .. })
        ));
        assert!(matches!(
            parse_bandwidth("10Gb"),
            Err(UnitError::Unknown { .. })
        ));
        assert!(matches!(parse_time("5Ms"), Err(UnitError::Unknown { .. })));
        assert!(matches!(parse_time("5Min"), Err(UnitError::Unknown { .. })));
    }

    #[test]
    fn nonsense_is_refused() {
        for text in [
            "",
            "Gbps",
            "-1Gbps",
            "0Gbps",
            "1e400Gbps",
            "nanGbps",
            "1.2.3Gbps",
            "\u{b5}",
        ] {
            assert!(
                matches!(parse_bandwidth(text), Err(UnitError::Number { .. })),
                "{text}"
            );
        }
    }

    #[test]
    fn shown_with_three_digits() {
        assert_eq!(show_bytes(1536.0), "1.50 KiB");
        assert_eq!(show_bytes(512.0), "512 B");
        assert_eq!(show_time(0.0123), "12.3 ms");
        assert_eq!(show_time(2.5), "2.50 s");
        assert_eq!(show_time(0.9999), "1.00 s");
        assert_eq!(show_bandwidth(1.25e9), "10.0 Gbps");
    }
}
