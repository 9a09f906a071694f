//! Latency and bandwidth between all pairs of ranks, one pair at a time.

use std::fmt::Write as _;
use std::time::{Duration, Instant};

use farwire::{Communicator, Error, ReduceOp, link_names};

use crate::units::{show_rate, show_time};

/// Round trips of a short message.
const ROUND_TRIPS: usize = 200;
/// Bytes of a long message, and how many there are.
const LONG: usize = 8 << 20;
const LONGS: usize = 3;

/// What was measured, as a table on rank 0; the others get none.
pub(super) fn measure(comm: &Communicator) -> Result<Option<String>, Error> {
    let (me, ranks) = (comm.rank(), comm.size());
    if ranks == 1 {
        return Ok(Some("One rank: there are no pairs to measure.\n".to_owned()));
    }
    let links = comm.flight().links;
    // By sender and receiver: seconds one way, bytes per second, and which link (1 is the first).
    let mut cells = vec![0f64; ranks * ranks * 3];
    for (a, b) in (0..ranks).flat_map(|a| (0..ranks).map(move |b| (a, b))).filter(|(a, b)| a != b) {
        comm.barrier().wait()?;
        if me == a {
            let (latency, bandwidth) = send_to(comm, b)?;
            let link =
                links[b].as_deref().and_then(|name| link_names().position(|link| link == name));
            let cell = (a * ranks + b) * 3;
            cells[cell..cell + 3].copy_from_slice(&[
                latency.as_secs_f64(),
                bandwidth,
                link.map_or(0, |link| link + 1) as f64,
            ]);
        } else if me == b {
            receive_from(comm, a)?;
        }
    }
    // Every cell is measured by one rank and zero on the others.
    let all = comm.reduce(cells, ReduceOp::Sum, 0).wait()?;
    Ok(all.map(|cells| table(&cells, ranks)))
}

fn send_to(comm: &Communicator, to: usize) -> Result<(Duration, f64), Error> {
    let mut times = Vec::with_capacity(ROUND_TRIPS);
    for _ in 0..ROUND_TRIPS {
        let start = Instant::now();
        comm.send(vec![0u64], to, 0).wait()?;
        comm.recv::<u64>(1, to, 0).wait()?;
        times.push(start.elapsed() / 2);
    }
    times.sort_unstable();
    let mut fastest = Duration::MAX;
    for _ in 0..LONGS {
        let data = vec![1u8; LONG];
        let start = Instant::now();
        comm.send(data, to, 1).wait()?;
        comm.recv::<u64>(1, to, 0).wait()?;
        fastest = fastest.min(start.elapsed());
    }
    Ok((times[times.len() / 2], LONG as f64 / fastest.as_secs_f64()))
}

fn receive_from(comm: &Communicator, from: usize) -> Result<(), Error> {
    for _ in 0..ROUND_TRIPS {
        let message = comm.recv::<u64>(1, from, 0).wait()?;
        comm.send(message, from, 0).wait()?;
    }
    for _ in 0..LONGS {
        comm.recv::<u8>(LONG, from, 1).wait()?;
        comm.send(vec![0u64], from, 0).wait()?;
    }
    Ok(())
}

fn table(cells: &[f64], ranks: usize) -> String {
    let cell = |a: usize, b: usize| &cells[(a * ranks + b) * 3..][..3];
    type Show = fn(&[f64]) -> String;
    let shows: [(&str, Show); 3] = [
        ("Link", |cell| {
            let link = (cell[2] as usize).checked_sub(1).and_then(|link| link_names().nth(link));
            link.unwrap_or_default().to_owned()
        }),
        ("Latency, one way, of 8 bytes (median)", |cell| {
            show_time(Duration::from_secs_f64(cell[0]))
        }),
        ("Bandwidth of 8 MiB (best)", |cell| show_rate(cell[1])),
    ];
    let mut text = String::new();
    for (title, show) in shows {
        let _ = writeln!(text, "{title}, from the rank on the left to the one above:");
        let heads: String = (0..ranks).map(|rank| format!("{rank:>14}")).collect();
        let _ = writeln!(text, "      {heads}");
        for a in 0..ranks {
            let row: String = (0..ranks)
                .map(|b| {
                    if a == b {
                        format!("{:>14}", "-")
                    } else {
                        format!("{:>14}", show(cell(a, b)))
                    }
                })
                .collect();
            let _ = writeln!(text, "{a:>6}{row}");
        }
        text.push('\n');
    }
    text
}
