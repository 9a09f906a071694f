//! The links between all pairs of ranks, one pair at a time, and what they mean for an all-reduce.

use std::fmt::Write as _;
use std::time::{Duration, Instant};

use farwire::{Communicator, Error, JoinError, LinkChoice, NetworkPath, ReduceOp, link_names};
use farwire_codec::{CodecSpec, Travel, typical};

use crate::units::{show_bytes, show_rate, show_time};

/// All pairs together should take no longer than `ALL`. Each gets a share of it, but between
/// `LEAST` and `MOST`.
const ALL: Duration = Duration::from_secs(60);
const LEAST: Duration = Duration::from_millis(300);
const MOST: Duration = Duration::from_secs(4);
/// Round trips of a short message, at most and at least.
const ROUND_TRIPS: usize = 200;
const FEW_ROUND_TRIPS: usize = 5;
/// Bytes of long messages: they grow until one takes `LONG_ENOUGH`, and then `LONGS` more follow.
const SHORTEST: u64 = 256 << 10;
const LONGEST: u64 = 32 << 20;
const LONG_ENOUGH: Duration = Duration::from_millis(500);
const LONGS: usize = 3;
/// If a message is this much faster than the best before it, those before it do not count.
const BETTER: f64 = 1.1;
/// The links that cross a network. Two hosts take one of them.
const NETWORK: [&str; 2] = ["quic", "tcp"];
/// How long to try to join once more, and the pause between tries.
const AGAIN: Duration = Duration::from_secs(10);
const RETRY: Duration = Duration::from_millis(100);
/// Bytes of the all-reduce whose time is estimated.
const VECTOR: usize = 100_000_000;

/// What a sender asks the other rank to do next. Any other number says how many bytes follow.
const STOP: u64 = 0;
const ANSWER: u64 = 1;

/// What is known about one direction of a pair; all zero if it was not measured.
#[derive(Clone, Copy, Debug, Default)]
struct Direction {
    /// Seconds from one rank to the other and back.
    round_trip: f64,
    /// Bytes per second.
    bandwidth: f64,
    /// The number of the link's kind, from 1; 0 if unknown.
    link: f64,
    /// The share of packets that were lost, plus one; 0 if there are no packets.
    loss: f64,
    /// Bytes that may be under way.
    window: f64,
}

const NUMBERS: usize = 5;

impl Direction {
    fn numbers(self) -> [f64; NUMBERS] {
        [self.round_trip, self.bandwidth, self.link, self.loss, self.window]
    }

    fn from_numbers(numbers: &[f64; NUMBERS]) -> Self {
        let [round_trip, bandwidth, link, loss, window] = *numbers;
        Self { round_trip, bandwidth, link, loss, window }
    }

    fn is_network(&self) -> bool {
        self.window > 0.0
    }

    /// The name of its link.
    fn name(&self) -> Option<&'static str> {
        link_names().nth((self.link as usize).checked_sub(1)?)
    }
}

/// What was measured between all pairs, the same on all ranks.
#[derive(Debug)]
pub(super) struct Survey {
    ranks: usize,
    directions: Vec<Direction>,
}

impl Survey {
    /// Measures all pairs, or only those that `before` has found to cross a network.
    pub(super) fn of(comm: &Communicator, before: Option<&Self>) -> Result<Self, Error> {
        let (me, ranks) = (comm.rank(), comm.size());
        let links = comm.flight().links;
        let wanted = |a, b| a != b && before.is_none_or(|before| before.between(a, b).is_network());
        let all = (0..ranks).flat_map(|a| (0..ranks).map(move |b| (a, b)));
        let pairs: Vec<_> = all.filter(|(a, b)| wanted(*a, *b)).collect();
        let patience = (ALL / pairs.len().max(1) as u32).clamp(LEAST, MOST);
        if me == 0 && !pairs.is_empty() {
            let over = if before.is_some() { "over the other link, " } else { "" };
            eprintln!(
                "measuring {} directions, {over}for up to {} each",
                pairs.len(),
                show_time(patience)
            );
        }
        let mut cells = vec![0f64; ranks * ranks * NUMBERS];
        for (a, b) in pairs {
            comm.barrier().wait()?;
            if me == a {
                let mut found = send_to(comm, b, patience)?;
                let name = links[b].as_deref();
                let number = name.and_then(|name| link_names().position(|link| link == name));
                found.link = number.map_or(0, |link| link + 1) as f64;
                cells[(a * ranks + b) * NUMBERS..][..NUMBERS].copy_from_slice(&found.numbers());
            } else if me == b {
                receive_from(comm, a)?;
            }
        }
        // Every direction is measured by one rank and zero on the others.
        let cells = comm.all_reduce(cells, ReduceOp::Sum).wait()?;
        let directions = cells.as_chunks().0.iter().map(Direction::from_numbers).collect();
        Ok(Self { ranks, directions })
    }

    fn between(&self, from: usize, to: usize) -> &Direction {
        &self.directions[from * self.ranks + to]
    }

    /// Whether any ranks have a network between them.
    pub(super) fn has_network(&self) -> bool {
        self.directions.iter().any(Direction::is_network)
    }

    /// A network link that was not taken between any hosts.
    pub(super) fn other_link(&self) -> Option<LinkChoice> {
        let network = self.directions.iter().filter(|it| it.is_network());
        let taken: Vec<_> = network.filter_map(Direction::name).collect();
        let other = NETWORK.into_iter().find(|name| !taken.contains(name))?;
        Some(other.parse().expect("it is a link's name"))
    }

    /// All that was measured, as text.
    pub(super) fn show(&self) -> String {
        if self.ranks == 1 {
            return "One rank: there are no pairs to measure.\n".to_owned();
        }
        let numbers = if self.has_network() { 5 } else { 3 };
        self.tables(&SHOWS[..numbers]) + &estimate(&self.directions, self.ranks)
    }

    /// What was measured over a link that would not be taken, compared with what was `taken`.
    pub(super) fn show_beside(&self, other: LinkChoice, taken: &Self) -> String {
        let mut text = format!(
            "The same over {other}, which is not taken here (FARWIRE_LINK={other} takes it):\n"
        );
        text += &self.tables(&SHOWS[1..]);
        let slowest = |of: &Self| {
            let network = of.directions.iter().filter(|it| it.is_network());
            show_rate(network.map(|it| it.bandwidth).fold(f64::INFINITY, f64::min))
        };
        let _ = writeln!(
            text,
            "The slowest direction has {} over {other}, and {} over what is taken.",
            slowest(self),
            slowest(taken)
        );
        text
    }

    fn tables(&self, shows: &[Show]) -> String {
        let mut text = String::new();
        for (title, show) in shows {
            let _ = writeln!(text, "{title}, from the rank on the left to the one above:");
            let heads: String = (0..self.ranks).map(|rank| format!("{rank:>14}")).collect();
            let _ = writeln!(text, "      {heads}");
            for a in 0..self.ranks {
                let cell = |b| match self.between(a, b) {
                    it if it.bandwidth > 0.0 => show(it),
                    _ => "-".to_owned(),
                };
                let row: String = (0..self.ranks).map(|b| format!("{:>14}", cell(b))).collect();
                let _ = writeln!(text, "{a:>6}{row}");
            }
            text.push('\n');
        }
        text
    }
}

/// Joins the same ranks once more, over another link, if there is one.
pub(super) fn join_again(link: LinkChoice) -> Result<Communicator, Error> {
    let until = Instant::now() + AGAIN;
    loop {
        match Communicator::builder().link(link).join_timeout(AGAIN).join() {
            Err(error @ Error::Join { source: JoinError::Link(_), .. }) => return Err(error),
            // Rank 0, and its port, may still belong to the group that has just ended.
            Err(_) if Instant::now() < until => std::thread::sleep(RETRY),
            joined => return joined,
        }
    }
}

fn send_to(comm: &Communicator, to: usize, patience: Duration) -> Result<Direction, Error> {
    let begun = Instant::now();
    let time = |message: u64, data: Vec<u8>| {
        let start = Instant::now();
        comm.send(vec![message], to, 0).wait()?;
        if !data.is_empty() {
            comm.send(data, to, 1).wait()?;
        }
        comm.recv::<u64>(1, to, 0).wait()?;
        Ok::<_, Error>(start.elapsed())
    };
    let mut times = Vec::with_capacity(ROUND_TRIPS);
    while times.len() < ROUND_TRIPS
        && (times.len() < FEW_ROUND_TRIPS || begun.elapsed() < patience / 4)
    {
        times.push(time(ANSWER, Vec::new())?);
    }
    times.sort_unstable();
    let round_trip = times[times.len() / 2];

    let before = comm.path(to);
    let (mut bytes, mut longs, mut bandwidth) = (SHORTEST, 0, 0.0f64);
    while longs < LONGS && (longs == 0 || begun.elapsed() < patience) {
        let took = time(bytes, vec![1; bytes as usize])?;
        // The way there and the way back of the answer do not depend on the line's bandwidth.
        let travelled = took.saturating_sub(round_trip).max(took / 10);
        let speed = bytes as f64 / travelled.as_secs_f64();
        if speed > BETTER * bandwidth {
            longs = 0; // a link that begins slowly, or has just lost a packet, says little
        }
        bandwidth = bandwidth.max(speed);
        let is_long = bytes as f64 / bandwidth > LONG_ENOUGH.as_secs_f64() || bytes == LONGEST;
        if is_long || begun.elapsed() > patience {
            longs += 1;
        } else {
            bytes *= 2;
        }
    }
    comm.send(vec![STOP], to, 0).wait()?;
    let after = comm.path(to);
    let loss = before.zip(after).map_or(0.0, |(before, after)| 1.0 + lost(before, after));
    let window = after.map_or(0, |path| path.window) as f64;
    let round_trip = round_trip.as_secs_f64();
    Ok(Direction { round_trip, bandwidth, link: 0.0, loss, window })
}

/// The share of packets that were lost in between.
fn lost(before: NetworkPath, after: NetworkPath) -> f64 {
    let sent = after.sent.saturating_sub(before.sent).max(1);
    after.lost.saturating_sub(before.lost) as f64 / sent as f64
}

fn receive_from(comm: &Communicator, from: usize) -> Result<(), Error> {
    loop {
        match comm.recv::<u64>(1, from, 0).wait()?[..] {
            [STOP] => return Ok(()),
            [bytes] if bytes != ANSWER => {
                comm.recv::<u8>(bytes.min(LONGEST) as usize, from, 1).wait()?;
            }
            _ => {}
        }
        comm.send(vec![ANSWER], from, 0).wait()?;
    }
}

/// A table: its title, and what stands in a cell.
type Show = (&'static str, fn(&Direction) -> String);

/// All but the first three are for networks only.
const SHOWS: [Show; 5] = [
    ("Link", |it| it.name().unwrap_or_default().to_owned()),
    ("Round trip of 8 bytes (median)", |it| show_time(Duration::from_secs_f64(it.round_trip))),
    ("Bandwidth (best)", |it| show_rate(it.bandwidth)),
    ("Packets lost", |it| {
        if it.loss > 0.0 { format!("{:.2} %", 100.0 * (it.loss - 1.0)) } else { "-".to_owned() }
    }),
    ("Window", |it| if it.is_network() { show_bytes(it.window) } else { "-".to_owned() }),
];

/// What the lowest bandwidth and the longest round trip mean for an all-reduce.
fn estimate(all: &[Direction], ranks: usize) -> String {
    let measured = || all.iter().filter(|it| it.bandwidth > 0.0);
    let slowest = measured().map(|it| it.bandwidth).fold(f64::INFINITY, f64::min);
    let longest = measured().map(|it| it.round_trip).fold(0.0, f64::max);
    let mut text = format!(
        "An all-reduce of {} of f32 over {ranks} ranks, at the lowest bandwidth and with the longest \
         round trip,\nif codecs took no time themselves (`farwire bench all_reduce --codec NAME` \
         measures it all):\n",
        show_bytes(VECTOR as f64)
    );
    let _ = writeln!(text, "{:>26}{:>18}{:>12}", "codec", "sent by each rank", "time");
    for name in typical() {
        let codec: CodecSpec = name.parse().expect("the registry's codecs parse");
        let sent = sent(&codec, VECTOR / size_of::<f32>(), ranks);
        let time = Duration::from_secs_f64(sent / slowest + longest);
        let _ = writeln!(text, "{name:>26}{:>18}{:>12}", show_bytes(sent), show_time(time));
    }
    text
}

/// Bytes that each rank sends in an all-reduce.
fn sent(codec: &CodecSpec, elements: usize, ranks: usize) -> f64 {
    let (vector, others) = (codec.expected_len(elements) as f64, (ranks - 1) as f64);
    match codec.travels() {
        Travel::Whole(_) => others * vector,
        // A share to every other rank, and then the sum of its own share to every other rank.
        Travel::Shards(_) | Travel::Factors(_) => 2.0 * others / ranks as f64 * vector,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_estimate_counts_bytes_and_a_round_trip() {
        let far = Direction { round_trip: 0.1, bandwidth: 25e6, ..Direction::default() };
        let none = Direction::default();
        let text = estimate(&[none, far, far, none], 2);
        let line = |name: &str| {
            let line = text.lines().find(|line| line.trim_start().starts_with(name)).unwrap();
            line.split_whitespace().skip(1).collect::<Vec<_>>().join(" ")
        };
        assert_eq!(line("none"), "100 MB 4.1 s", "{text}");
        assert_eq!(line("bf16"), "50 MB 2.1 s", "{text}");
    }
}
