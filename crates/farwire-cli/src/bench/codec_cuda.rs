//! `farwire bench codec --device cuda`: how long a codec takes on a GPU, compared with an `r += g`
//! pass over the same memory in the same run.

use std::io::Write;

use farwire_cuda::bench::{Bench, Measured, copy_speed};
use farwire_cuda::{Device, DeviceCodec, cards};
use serde::Serialize;

use super::codec::codecs;
use super::{Args, BenchError};
use crate::units::show_bytes;

/// One line of the result. Times are in milliseconds.
#[derive(Debug, Serialize)]
struct Row {
    codec: String,
    device: &'static str,
    bytes: usize,
    message_bytes: usize,
    add_ms: f64,
    encode_ms: f64,
    decode_ms: f64,
    roofline_fraction: f64,
    decode_roofline_fraction: f64,
    /// With the copy between the card and pinned memory, by the host's clock.
    encode_to_host_ms: f64,
    decode_from_host_ms: f64,
}

impl From<Measured> for Row {
    fn from(m: Measured) -> Self {
        Self {
            codec: m.codec,
            device: "cuda",
            bytes: 4 * m.elements,
            message_bytes: m.bytes,
            add_ms: m.add_ms,
            encode_ms: m.encode_ms,
            decode_ms: m.decode_ms,
            roofline_fraction: m.add_ms / m.encode_ms,
            decode_roofline_fraction: m.add_ms / m.decode_ms,
            encode_to_host_ms: m.to_host_ms,
            decode_from_host_ms: m.from_host_ms,
        }
    }
}

/// Measures each codec at each size, on the first card.
pub(super) fn run(args: &Args) -> Result<(), BenchError> {
    let mut codecs = codecs(args)?;
    if args.codec.is_empty() {
        codecs.retain(|codec| DeviceCodec::supports(codec).is_ok());
    }
    let repeats = args.iters.unwrap_or(20);
    let device = Device::new(0)?;
    let mut out = std::io::stdout().lock();
    if !args.json {
        let name = cards()?.into_iter().next().map_or_else(String::new, |card| card.name);
        let (to_host, to_card) = copy_speed(&device)?;
        writeln!(
            out,
            "{name}; pinned copies {to_host:.1} GB/s to the host, {to_card:.1} GB/s to the card"
        )?;
        writeln!(
            out,
            "encode with error feedback, decode and add; ms on the card, medians of {repeats}; \
             `with copy`: by the host's clock"
        )?;
        writeln!(
            out,
            "{:<26} {:>9} {:>10} {:>8} {:>8} {:>8} {:>8} {:>8} {:>9} {:>9}",
            "codec",
            "size",
            "message",
            "r += g",
            "encode",
            "of that",
            "decode",
            "of that",
            "with copy",
            "with copy"
        )?;
    }
    for size in &args.size {
        for measured in Bench::new(&device, size / 4)?.measure(&codecs, repeats as usize)? {
            let row = Row::from(measured);
            if args.json {
                let row = serde_json::to_string(&row).expect("plain numbers and names serialise");
                writeln!(out, "{row}")?;
                continue;
            }
            writeln!(
                out,
                "{:<26} {:>9} {:>10} {:>8.3} {:>8.3} {:>8.2} {:>8.3} {:>8.2} {:>9.3} {:>9.3}",
                row.codec,
                show_bytes(row.bytes as f64),
                show_bytes(row.message_bytes as f64),
                row.add_ms,
                row.encode_ms,
                row.roofline_fraction,
                row.decode_ms,
                row.decode_roofline_fraction,
                row.encode_to_host_ms,
                row.decode_from_host_ms
            )?;
        }
    }
    Ok(())
}
