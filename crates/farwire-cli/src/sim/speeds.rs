//! What work costs on a machine, as `farwire bench` and `farwire netlab` have measured it there.

use std::path::{Path, PathBuf};

use farwire_sim::{CodingSpeeds, Costs};
use serde::Deserialize;

/// The share of a line that is left for payload when packets have 1,500 bytes, unless it was
/// measured. The rest is headers, and acknowledgements the other way.
const PAYLOAD: f64 = 0.95;
/// Bytes of a frame, in the operations that were measured.
const SEGMENT: f64 = 65_536.0;
/// The time of a pass that only writes, as a share of one that reads two vectors and writes one,
/// unless it was measured.
const FILL: f64 = 0.5;

/// Why speeds cannot be used.
#[derive(Debug, thiserror::Error)]
pub(crate) enum SpeedsError {
    #[error("could not read {}: {source}", path.display())]
    Read { path: PathBuf, source: std::io::Error },
    #[error(
        "{}, line {line}: {source}; each line must be one that `farwire bench … --json` or `farwire netlab --json` prints",
        path.display()
    )]
    Parse { path: PathBuf, line: usize, source: serde_json::Error },
    #[error(
        "{} has no speed for {what}; add the output of `farwire bench {command} --json`",
        path.display()
    )]
    Missing { path: PathBuf, what: String, command: String },
}

/// A line of `--speeds`.
#[derive(Clone, Debug, Deserialize)]
#[serde(untagged)]
enum Row {
    /// Of `farwire bench codec`.
    Codec {
        codec: String,
        encode_gbs: f64,
        decode_gbs: f64,
        add_gbs: f64,
        fill_gbs: Option<f64>,
        fresh_gbs: Option<f64>,
    },
    /// Of `farwire bench` between ranks.
    Operation { op: String, link: String, ranks: f64, wire_bytes: f64, cpu_s: f64, iters: f64 },
    /// Of `farwire netlab --json`.
    Relay { relay_cpu_s: f64, relay_bytes: f64 },
    /// The share of their lines that flows between hosts fill, where the lines are the only limit:
    /// the bound of an all-reduce over its time. It counts at `bandwidth` bytes per second, or at
    /// any.
    Line { line_share: f64, bandwidth: Option<f64> },
}

/// All that was measured.
#[derive(Clone, Debug)]
pub(crate) struct Speeds {
    path: PathBuf,
    rows: Vec<Row>,
}

impl Speeds {
    pub(crate) fn read(path: &Path) -> Result<Self, SpeedsError> {
        let path = path.to_owned();
        let text = std::fs::read_to_string(&path);
        let text = text.map_err(|source| SpeedsError::Read { path: path.clone(), source })?;
        let lines = text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty());
        let rows: Result<Vec<_>, _> = lines
            .map(|(line, text)| {
                serde_json::from_str(text).map_err(|source| SpeedsError::Parse {
                    path: path.clone(),
                    line: line + 1,
                    source,
                })
            })
            .collect();
        Ok(Self { rows: rows?, path })
    }

    /// The share of a line of `rate` bytes per second that payload fills. It depends on how many
    /// packets a queue has room for, so a measurement at one rate says nothing about others.
    pub(crate) fn line_share(&self, rate: f64) -> f64 {
        let share = self.rows.iter().find_map(|row| match row {
            Row::Line { line_share, bandwidth }
                if bandwidth.is_none_or(|measured| (measured / rate - 1.0).abs() < 0.01) =>
            {
                Some(*line_share)
            }
            _ => None,
        });
        share.unwrap_or(PAYLOAD)
    }

    /// What a codec costs; `sparse` if it leaves elements out.
    pub(crate) fn coding(&self, name: &str, sparse: bool) -> Result<CodingSpeeds, SpeedsError> {
        let speeds = self.rows.iter().find_map(|row| match row {
            Row::Codec { codec, encode_gbs, decode_gbs, add_gbs, fill_gbs, fresh_gbs }
                if codec == name =>
            {
                let per_byte = |gbs: f64| 1e-9 / gbs;
                let add = per_byte(*add_gbs);
                let (encode, decode) = (per_byte(*encode_gbs), per_byte(*decode_gbs));
                let filled = |gbs: &Option<f64>| match gbs {
                    _ if !sparse => 0.0,
                    Some(gbs) => per_byte(*gbs),
                    None => FILL * add,
                };
                let (fill, fresh) = (filled(fill_gbs), filled(fresh_gbs));
                Some(CodingSpeeds { encode, decode, fill, fresh, add })
            }
            _ => None,
        });
        let command = || format!("codec --codec {name}");
        speeds.ok_or_else(|| self.missing(name, command()))
    }

    /// What frames cost; in a laboratory, a relay carries them.
    pub(crate) fn costs(&self, laboratory: bool) -> Result<Costs, SpeedsError> {
        let add = self.rows.iter().find_map(|row| match row {
            Row::Codec { add_gbs, .. } => Some(1e-9 / add_gbs),
            _ => None,
        });
        let add = add.ok_or_else(|| self.missing("additions", "codec --codec int8".to_owned()))?;
        // Links differ in cost, so frames and bytes must be those of the same link.
        let operation = |name: &str, over: Option<&str>| {
            self.rows.iter().find_map(|row| match row {
                Row::Operation { op, link, ranks, wire_bytes, cpu_s, iters }
                    if op == name && link != "shm" && over.is_none_or(|over| over == link) =>
                {
                    Some((&**link, *ranks, *wire_bytes, cpu_s / iters))
                }
                _ => None,
            })
        };
        let command = "all_reduce --ranks 2 --link tcp --size 64MiB";
        let (link, ranks, bytes, cpu) = operation("all_reduce", None)
            .ok_or_else(|| self.missing("a link", command.to_owned()))?;
        let frame = match operation("barrier", Some(link)) {
            Some((_, ranks, _, cpu)) => cpu / (2.0 * ranks * (ranks - 1.0)),
            None if operation("barrier", None).is_none() => 0.0,
            None => {
                let command = format!("barrier --ranks 8 --link {link} --size 4");
                return Err(self.missing(&format!("frames over {link}"), command));
            }
        };
        // What is left for each byte, at both ends. A rank adds up half of what it receives.
        let per_byte = cpu / (ranks * bytes) - 2.0 * frame / SEGMENT - 0.5 * add;
        let carry = per_byte.max(0.0) / 2.0;
        let relay = self.rows.iter().find_map(|row| match row {
            Row::Relay { relay_cpu_s, relay_bytes } if laboratory => {
                Some(relay_cpu_s / relay_bytes / PAYLOAD)
            }
            _ => None,
        });
        Ok(Costs {
            frame,
            send: carry,
            receive: carry + 0.5 * add,
            local: add,
            relay: relay.unwrap_or(0.0),
        })
    }

    fn missing(&self, what: &str, command: String) -> SpeedsError {
        SpeedsError::Missing { path: self.path.clone(), what: what.to_owned(), command }
    }
}
