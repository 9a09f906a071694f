//! Sizes, rates and times as people write them.

use std::time::Duration;

/// A text that is not in any accepted form.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum UnitError {
    /// Not a size.
    #[error(
        "`{0}` is not a size; write 64MiB, 4KiB, 1GiB (powers of 1024), 100MB, 5KB, 2GB (powers of 1000), or 512 or 512B (bytes)"
    )]
    Size(String),
    /// A size too large for memory.
    #[error("`{0}` is too large a size")]
    LargeSize(String),
    /// Not a rate.
    #[error(
        "`{0}` is not a rate; write 1gbit, 100mbit, 56kbit (bits per second, at least 1bit), or 125MB/s (bytes per second)"
    )]
    Rate(String),
    /// Not a time.
    #[error("`{0}` is not a time; write 20ms, 50us, 100ns, 2s, or 0, up to 1000000000s")]
    Time(String),
    /// Not a share.
    #[error("`{0}` is not a share; write 0.1% or 0.001, from 0 to 90%")]
    Share(String),
}

/// Bytes: `64MiB`, `100MB`, `512`.
pub fn size(text: &str) -> Result<usize, UnitError> {
    let bytes = || {
        let (number, unit) = split(text)?;
        let scale: u128 = match unit {
            "" | "B" => 1,
            "kB" | "KB" => 1_000,
            "MB" => 1_000_000,
            "GB" => 1_000_000_000,
            "TB" => 1_000_000_000_000,
            "KiB" => 1 << 10,
            "MiB" => 1 << 20,
            "GiB" => 1 << 30,
            "TiB" => 1 << 40,
            _ => return None,
        };
        // In whole numbers, so that 16.1KB is 16100 bytes and 1.5 bytes is refused.
        let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
        let ten = 10u128.checked_pow(fraction.len().try_into().ok()?)?;
        let digits: u128 = format!("{whole}{fraction}").parse().ok()?;
        let scaled = digits.checked_mul(scale)?;
        scaled.is_multiple_of(ten).then_some(scaled / ten)
    };
    let bytes = bytes().ok_or_else(|| UnitError::Size(text.to_owned()))?;
    let addressable = isize::try_from(bytes).map_err(|_| UnitError::LargeSize(text.to_owned()))?;
    Ok(addressable.unsigned_abs())
}

/// Bytes per second: `1gbit`, `125MB/s`.
pub fn rate(text: &str) -> Result<f64, UnitError> {
    let scale = |unit: &str| {
        Some(match unit.to_ascii_lowercase().as_str() {
            "bit" => 1.0 / 8.0,
            "kbit" => 1e3 / 8.0,
            "mbit" => 1e6 / 8.0,
            "gbit" => 1e9 / 8.0,
            "tbit" => 1e12 / 8.0,
            "b/s" => 1.0,
            "kb/s" => 1e3,
            "mb/s" => 1e6,
            "gb/s" => 1e9,
            _ => return None,
        })
    };
    number_with_unit(text, scale)
        .filter(|rate| *rate >= 0.125)
        .ok_or_else(|| UnitError::Rate(text.to_owned()))
}

/// A span of time: `20ms`.
pub fn time(text: &str) -> Result<Duration, UnitError> {
    let scale = |unit: &str| {
        Some(match unit {
            "ns" => 1e-9,
            "us" | "µs" => 1e-6,
            "ms" => 1e-3,
            "s" => 1.0,
            _ => return None,
        })
    };
    if text == "0" {
        return Ok(Duration::ZERO);
    }
    number_with_unit(text, scale)
        .filter(|seconds| *seconds <= 1e9)
        .and_then(|seconds| Duration::try_from_secs_f64(seconds).ok())
        .ok_or_else(|| UnitError::Time(text.to_owned()))
}

/// A share of a whole: `0.1%`.
pub fn share(text: &str) -> Result<f64, UnitError> {
    let scale = |unit: &str| match unit {
        "" => Some(1.0),
        "%" => Some(0.01),
        _ => None,
    };
    number_with_unit(text, scale)
        .filter(|share| *share <= 0.9)
        .ok_or_else(|| UnitError::Share(text.to_owned()))
}

/// A plain decimal number, not negative, times the scale of the unit after it.
fn number_with_unit(text: &str, scale: impl Fn(&str) -> Option<f64>) -> Option<f64> {
    let (number, unit) = split(text)?;
    let value = number.parse::<f64>().ok()? * scale(unit)?;
    value.is_finite().then_some(value)
}

/// Splits digits, perhaps with a decimal point, from what follows.
fn split(text: &str) -> Option<(&str, &str)> {
    let digits = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    number.starts_with(|c: char| c.is_ascii_digit()).then_some((number, unit.trim_start()))
}

/// Bytes for people: `175.3 MB`.
pub fn show_bytes(bytes: f64) -> String {
    show(bytes, 1000.0, &[(1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "B")])
}

/// A rate for people, in bits per second: `1 Gbit/s`.
pub fn show_rate(bytes_per_second: f64) -> String {
    let scales = [(1e9, "Gbit/s"), (1e6, "Mbit/s"), (1e3, "kbit/s"), (1.0, "bit/s")];
    show(bytes_per_second * 8.0, 1.0, &scales)
}

/// A span of time for people: `20 ms`.
pub fn show_time(time: Duration) -> String {
    show(time.as_secs_f64(), 1.0, &[(1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns")])
}

/// A number in the largest of `scales` that it reaches, with up to four significant digits.
fn show(value: f64, zero_below: f64, scales: &[(f64, &str)]) -> String {
    let (scale, unit) = scales
        .iter()
        .find(|(scale, _)| value >= *scale)
        .or(scales.last())
        .copied()
        .unwrap_or((zero_below, ""));
    let scaled = value / scale;
    let decimals = if scaled >= 1000.0 || scaled.fract() == 0.0 {
        0
    } else {
        3 - scaled.max(1.0).log10() as usize
    };
    let text = format!("{scaled:.decimals$}");
    let text =
        if text.contains('.') { text.trim_end_matches('0').trim_end_matches('.') } else { &text };
    format!("{text} {unit}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_parse_with_units() {
        assert_eq!(size("64MiB"), Ok(64 << 20));
        assert_eq!(size("100MB"), Ok(100_000_000));
        assert_eq!(size("1.5KiB"), Ok(1536));
        assert_eq!(size("4 KiB"), Ok(4096));
        assert_eq!(size("0"), Ok(0));
        assert_eq!(size("512B"), Ok(512));
        assert_eq!(size("2TiB"), Ok(2 << 40));
        assert_eq!(size("16.1KB"), Ok(16_100));
        assert_eq!(size("1.005MB"), Ok(1_005_000));
    }

    #[test]
    fn anything_else_shows_the_accepted_forms() {
        for text in [
            "", "MB", "-1MB", "+1MB", "1Mb", "1.5", "1e9", "nan", "inf", "1..2MB", "0x10", "９MB",
            "1MB2", ".5KB",
        ] {
            let error = size(text).unwrap_err().to_string();
            assert!(error.contains("64MiB") && error.contains(&format!("`{text}`")), "{error}");
        }
        assert!(size(&"9".repeat(400)).is_err());
        for text in ["", "1", "0gbit", "0.5bit", "-1gbit", "fast", "1gb"] {
            assert!(rate(text).unwrap_err().to_string().contains("1gbit"), "{text}");
        }
        for text in ["", "20", "20m", "-1s", "1h", "1000000001s", "99999999999999999999999s"] {
            assert!(time(text).unwrap_err().to_string().contains("20ms"), "{text}");
        }
        for text in ["", "1", "100%", "-0.1", "50 percent"] {
            assert!(share(text).unwrap_err().to_string().contains("0.1%"), "{text}");
        }
    }

    #[test]
    fn rates_times_and_shares_parse() {
        assert_eq!(rate("1gbit"), Ok(125e6));
        assert_eq!(rate("2.5Gbit"), Ok(312.5e6));
        assert_eq!(rate("125MB/s"), Ok(125e6));
        assert_eq!(time("20ms"), Ok(Duration::from_millis(20)));
        assert_eq!(time("0"), Ok(Duration::ZERO));
        assert_eq!(time("50us"), Ok(Duration::from_micros(50)));
        assert_eq!(share("0.5%"), Ok(0.005));
        assert_eq!(share("0"), Ok(0.0));
    }

    #[test]
    fn numbers_are_shown_short() {
        assert_eq!(show_bytes(175_013_440.0), "175 MB");
        assert_eq!(show_bytes(1234.0), "1.234 kB");
        assert_eq!(show_bytes(0.0), "0 B");
        assert_eq!(show_rate(125e6), "1 Gbit/s");
        assert_eq!(show_time(Duration::from_millis(1447)), "1.447 s");
        assert_eq!(show_time(Duration::from_micros(20_500)), "20.5 ms");
        assert_eq!(show_time(Duration::ZERO), "0 ns");
        assert_eq!(show_bytes(1_500_000_000_000.0), "1500 GB");
    }
}
