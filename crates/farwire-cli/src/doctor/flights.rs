//! Reading what the ranks of a failed job left behind.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use farwire::flight::{Flight, Operation, State};

use super::DoctorError;

/// The records of one job, by rank.
type Flights = BTreeMap<u32, Flight>;

/// Says which rank was missing.
pub(super) fn diagnose(paths: &[PathBuf]) -> Result<String, DoctorError> {
    let (flights, left_out) = read_all(paths)?;
    let left_out: String = left_out.iter().map(|error| format!("Left out: {error}.\n")).collect();
    Ok(left_out + &report(&flights))
}

/// The records that can be read, and why the others cannot: a failed job may have left anything.
fn read_all(paths: &[PathBuf]) -> Result<(Flights, Vec<DoctorError>), DoctorError> {
    let mut flights: BTreeMap<u32, (&PathBuf, Flight)> = BTreeMap::new();
    let mut left_out = Vec::new();
    for path in paths {
        let flight = match read(path) {
            Ok(flight) => flight,
            Err(error) => {
                left_out.push(error);
                continue;
            }
        };
        if let Some((first, other)) = flights.values().next()
            && other.world != flight.world
        {
            let (one, other, ours) = ((*first).clone(), path.clone(), other.world);
            return Err(DoctorError::Worlds { one, ours, other, theirs: flight.world });
        }
        let rank = flight.rank;
        if let Some((one, _)) = flights.insert(rank, (path, flight)) {
            return Err(DoctorError::Twice { one: one.clone(), other: path.clone(), rank });
        }
    }
    if flights.is_empty() && !left_out.is_empty() {
        return Err(left_out.remove(0));
    }
    Ok((flights.into_iter().map(|(rank, (_, flight))| (rank, flight)).collect(), left_out))
}

fn read(path: &Path) -> Result<Flight, DoctorError> {
    let what = "a flight record";
    serde_json::from_slice(&bytes(path)?).map_err(|source| DoctorError::NotWhat {
        path: path.to_owned(),
        what,
        source,
    })
}

fn bytes(path: &Path) -> Result<Vec<u8>, DoctorError> {
    std::fs::read(path).map_err(|source| DoctorError::Read { path: path.to_owned(), source })
}

fn report(flights: &Flights) -> String {
    let mut text = String::new();
    let world = flights.values().next().map_or(0, |flight| flight.world);
    let absent: BTreeSet<u32> = (0..world).filter(|rank| !flights.contains_key(rank)).collect();
    let _ = writeln!(text, "{} of {world} ranks left a record.", flights.len());
    if !absent.is_empty() {
        let _ = writeln!(
            text,
            "Without one: {}. They were killed, stopped or cut off, or ended well.",
            ranks(&absent)
        );
    }
    for (rank, flight) in flights {
        let _ = writeln!(text, "\nrank {rank} says: {}", flight.reason);
        let unfinished: Vec<_> =
            flight.operations.iter().filter(|operation| operation.state != State::Done).collect();
        for operation in unfinished.iter().take(5) {
            let _ = writeln!(text, "  {}", one_line(operation));
        }
        if unfinished.len() > 5 {
            let _ = writeln!(text, "  and {} more", unfinished.len() - 5);
        }
    }
    text.push('\n');
    let blamed = blame(flights, &absent);
    for line in out_of_step(flights).into_iter().chain(behind(flights)).chain(blamed) {
        let _ = writeln!(text, "→ {line}");
    }
    text
}

fn one_line(operation: &Operation) -> String {
    let state = match operation.state {
        State::Waiting => "waits",
        State::Done => "is done",
        State::Failed => "failed",
    };
    let on = if operation.comm.bytes().all(|byte| byte == b'0') {
        String::new()
    } else {
        format!(" on communicator {}", operation.comm)
    };
    let whom = match &operation.waiting_for[..] {
        [] => String::new(),
        list => format!(", waiting for {}", ranks(list)),
    };
    let seconds = operation.took_us as f64 / 1e6;
    let Operation { call, number, sent_bytes, received_bytes, .. } = operation;
    format!(
        "{call} {number}{on} {state} after {seconds:.3} s{whom} \
         ({sent_bytes} bytes sent, {received_bytes} received)"
    )
}

/// Ranks that called something else than the others, as the same operation of a communicator.
fn out_of_step(flights: &Flights) -> Vec<String> {
    let mut calls: BTreeMap<(&str, u64), BTreeMap<&str, Vec<u32>>> = BTreeMap::new();
    for (rank, flight) in flights {
        for operation in &flight.operations {
            if let Some(number) = operation.collective {
                let same = calls.entry((&operation.comm, number)).or_default();
                same.entry(&operation.call).or_default().push(*rank);
            }
        }
    }
    let differing = calls.iter().find(|(_, calls)| calls.len() > 1);
    let line = differing.map(|((_, number), calls)| {
        let each: Vec<_> =
            calls.iter().map(|(call, who)| format!("{} called {call}", ranks(who))).collect();
        format!("Out of step at operation #{number}: {}.", each.join("; "))
    });
    line.into_iter().collect()
}

/// Ranks that had not yet reached the operation that others were in.
fn behind(flights: &Flights) -> Vec<String> {
    let mut furthest: BTreeMap<&str, BTreeMap<u32, (u64, &str)>> = BTreeMap::new();
    for (rank, flight) in flights {
        for operation in &flight.operations {
            if let Some(number) = operation.collective {
                let reached = furthest.entry(&operation.comm).or_default();
                let last = reached.entry(*rank).or_insert((number, &operation.call));
                *last = (*last).max((number, &operation.call));
            }
        }
    }
    let mut lines = Vec::new();
    for reached in furthest.values() {
        let Some(most) = reached.values().map(|(number, _)| *number).max() else { continue };
        let late: BTreeMap<u64, Vec<u32>> = reached
            .iter()
            .filter(|(_, (number, _))| *number < most)
            .fold(BTreeMap::new(), |mut late, (rank, (number, _))| {
                late.entry(*number).or_default().push(*rank);
                late
            });
        for (number, who) in late {
            let verb = if who.len() == 1 { "was" } else { "were" };
            lines.push(format!(
                "{} {verb} only at operation #{number} when others were at #{most}.",
                ranks(&who)
            ));
        }
    }
    lines
}

/// Ranks that others waited for and that left no record.
fn blame(flights: &Flights, absent: &BTreeSet<u32>) -> Vec<String> {
    let mut by: BTreeMap<u32, Vec<u32>> = BTreeMap::new();
    for (rank, flight) in flights {
        let awaited: BTreeSet<u32> = flight
            .operations
            .iter()
            .filter(|operation| operation.state != State::Done)
            .flat_map(|operation| operation.waiting_for.iter().copied())
            .collect();
        for whom in awaited.intersection(absent) {
            by.entry(*whom).or_default().push(*rank);
        }
    }
    // An operation may have ended, with an error, before anybody waited for long.
    let lost = absent.iter().filter_map(|whom| {
        let says = |(rank, flight): (&u32, &Flight)| {
            flight.reason.contains(&format!("rank {whom} is lost")).then_some(*rank)
        };
        let who: Vec<_> = flights.iter().filter_map(says).collect();
        let look = "Look at its output, its machine, and the system's log (out of memory?).";
        (!who.is_empty()).then(|| {
            let verb = if who.len() == 1 { "says" } else { "say" };
            format!(
                "rank {whom} was lost: {} {verb} so, and it left no record. {look}",
                ranks(&who)
            )
        })
    });
    let lost: Vec<_> = lost.collect();
    if by.is_empty() && !lost.is_empty() {
        return lost;
    }
    if by.is_empty() {
        return vec![
            "No missing rank was waited for; see each rank's own reason above.".to_owned(),
        ];
    }
    by.iter()
        .map(|(whom, who)| {
            format!(
                "rank {whom} was missing: {} waited for it. Look at its output and its machine.",
                ranks(who)
            )
        })
        .collect()
}

fn ranks<'a>(list: impl IntoIterator<Item = &'a u32>) -> String {
    let list: Vec<_> = list.into_iter().map(u32::to_string).collect();
    if list.len() == 1 { format!("rank {}", list[0]) } else { format!("ranks {}", list.join(", ")) }
}

/// Writes the events of several traces into one file. Returns how many there are.
pub(super) fn merge(paths: &[PathBuf], merged: &Path) -> Result<usize, DoctorError> {
    let mut events = Vec::new();
    for path in paths {
        let list = trace_events(&String::from_utf8_lossy(&bytes(path)?));
        let list = list.map_err(|source| DoctorError::NotWhat {
            path: path.clone(),
            what: "a trace",
            source,
        })?;
        events.extend(list);
    }
    let text = serde_json::Value::from(events.clone()).to_string();
    std::fs::write(merged, text)
        .map_err(|source| DoctorError::Write { path: merged.to_owned(), source })?;
    Ok(events.len())
}

/// The events of a trace, one per line. Ranks leave the list open, so that they may end at any
/// time, and a rank that was killed may have left half an event.
fn trace_events(text: &str) -> serde_json::Result<Vec<serde_json::Value>> {
    let parse = |text: &str| {
        serde_json::from_str(&format!("{}]", text.trim_end().trim_end_matches([']', ','])))
    };
    match (parse(text), text.rsplit_once(",\n")) {
        (Err(_), Some((whole, _))) => parse(whole),
        (result, _) => result,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn operation(number: u64, call: &str, state: State, waiting_for: &[u32]) -> serde_json::Value {
        serde_json::json!({
            "comm": "0000000000000000", "collective": number, "number": format!("#{number}"), "call": call,
            "state": state, "waiting_for": waiting_for, "began_us": 1, "took_us": 2_000_000,
            "sent_bytes": 3, "received_bytes": 4, "error": null,
        })
    }

    fn flights(ranks: &[(u32, Vec<serde_json::Value>)]) -> Flights {
        let flight = |rank: u32, operations: &Vec<serde_json::Value>| {
            serde_json::from_value(serde_json::json!({
                "rank": rank, "world": 4, "epoch": 0, "pid": 7, "written_us": 9,
                "reason": "process 2 is lost", "links": [], "operations": operations,
            }))
            .unwrap()
        };
        ranks.iter().map(|(rank, operations)| (*rank, flight(*rank, operations))).collect()
    }

    #[test]
    fn a_missing_rank_is_named() {
        let stuck = || {
            vec![
                operation(6, "barrier()", State::Done, &[]),
                operation(7, "all_reduce(…)", State::Failed, &[2]),
            ]
        };
        let text = report(&flights(&[(0, stuck()), (1, stuck()), (3, stuck())]));
        assert!(text.contains("3 of 4 ranks left a record."), "{text}");
        assert!(text.contains("rank 2 was missing: ranks 0, 1, 3 waited for it"), "{text}");
        assert!(
            text.contains("all_reduce(…) #7 failed after 2.000 s, waiting for rank 2"),
            "{text}"
        );
        assert!(!text.contains("Out of step") && !text.contains("only at"), "{text}");
    }

    #[test]
    fn a_trace_may_end_anywhere() {
        let text = "[\n{\"name\":\"a\"},\n{\"name\":\"b\",\"args\":[1]}";
        assert_eq!(trace_events(text).unwrap().len(), 2);
        assert_eq!(trace_events(&format!("{text}\n]\n")).unwrap().len(), 2);
        for end in text.find("},").unwrap() + 1..text.len() {
            assert_eq!(trace_events(&text[..end]).unwrap().len(), 1, "{}", &text[..end]);
        }
        assert!(trace_events("{}").is_err() && trace_events("").is_err());
    }

    #[test]
    fn one_bad_record_does_not_hide_the_others() {
        let dir = std::env::temp_dir().join(format!("farwire-doctor-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        let (good, bad, none) =
            (dir.join("good.json"), dir.join("bad.json"), dir.join("none.json"));
        let flights = flights(&[(1, vec![operation(7, "barrier()", State::Waiting, &[2])])]);
        std::fs::write(&good, serde_json::to_vec(&flights[&1]).unwrap()).unwrap();
        std::fs::write(&bad, [0xff, b'{']).unwrap();
        let text = diagnose(&[bad.clone(), good, none]).unwrap();
        assert!(text.contains("bad.json is not a flight record"), "{text}");
        assert!(
            text.contains("could not read") && text.contains("1 of 4 ranks left a record"),
            "{text}"
        );
        assert!(diagnose(&[bad]).is_err());
        std::fs::remove_dir_all(dir).unwrap();
    }

    #[test]
    fn ranks_out_of_step_and_behind_are_named() {
        let at = |number, call| vec![operation(number, call, State::Waiting, &[])];
        let text = report(&flights(&[
            (0, at(7, "barrier()")),
            (1, at(7, "all_reduce()")),
            (2, at(5, "x")),
            (3, at(7, "barrier()")),
        ]));
        assert!(
            text.contains(
                "Out of step at operation #7: rank 1 called all_reduce(); ranks 0, 3 called barrier()"
            ),
            "{text}"
        );
        assert!(text.contains("rank 2 was only at operation #5 when others were at #7"), "{text}");
    }
}
