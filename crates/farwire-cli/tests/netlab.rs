//! `farwire netlab` as its users meet it. Hosts need root; without it the tests say so and pass.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on should say where")]

use std::process::{Command, Output, Stdio};

const FARWIRE: &str = env!("CARGO_BIN_EXE_farwire");

/// The command's output; `None` if the machine does not allow hosts.
fn netlab(arguments: &[&str]) -> Option<Output> {
    let output =
        Command::new("timeout").arg("120").arg(FARWIRE).arg("netlab").args(arguments).output();
    let output = output.unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    if said.contains("network namespaces, which need root") {
        eprintln!("skipped: {said}");
        return None;
    }
    Some(output)
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[test]
fn every_host_is_told_where_it_stands() {
    let script = "echo $RANK of $WORLD_SIZE, local $LOCAL_RANK of $LOCAL_WORLD_SIZE at $MASTER_ADDR; \
                  cat /proc/net/dev | tail -n +3 | cut -d: -f1 | tr -d ' ' | sort | tr '\\n' ' '";
    let Some(output) = netlab(&["--hosts", "2", "--", "sh", "-c", script]) else { return };
    let said = text(&output.stdout);
    let mut lines: Vec<_> = said.lines().map(str::trim_end).collect();
    lines.sort_unstable();
    let mut expected: Vec<_> = (0..2)
        .flat_map(|rank| {
            let place = format!("[{rank}] {rank} of 2, local 0 of 1 at 10.77.0.1");
            [place, format!("[{rank}] far0 lo")]
        })
        .collect();
    expected.sort_unstable();
    assert_eq!(lines, expected, "{}", text(&output.stderr));
}

#[test]
fn ranks_of_a_host_share_its_memory_and_its_network() {
    let arguments = ["--hosts", "2", "--ranks-per-host", "2", "--rate", "100mbit", "--"];
    let script = "echo $RANK: $LOCAL_RANK of $LOCAL_WORLD_SIZE on $FARWIRE_HOST";
    let Some(output) = netlab(&[&arguments[..], &["sh", "-c", script]].concat()) else { return };
    let said = text(&output.stdout);
    let mut lines: Vec<_> = said.lines().collect();
    lines.sort_unstable();
    let place = |rank| format!("[{rank}] {rank}: {} of 2 on host-{}", rank % 2, rank / 2);
    assert_eq!(lines, (0..4).map(place).collect::<Vec<_>>(), "{}", text(&output.stderr));
    let bench = [FARWIRE, "bench", "all_reduce", "--size", "1MB", "--iters", "2", "--check"];
    let Some(output) = netlab(&[&arguments[..], &bench].concat()) else { return };
    assert!(output.status.success(), "{}{}", text(&output.stdout), text(&output.stderr));
    let said = text(&output.stdout);
    // Neighbours have TCP, unless the machine is so busy that they seem far apart.
    let is_linked_by = |link: &str| {
        said.contains(&format!("over 4 ranks on 2 hosts, link shm (2 pairs), {link} (4 pairs)"))
    };
    assert!(is_linked_by("tcp") || is_linked_by("quic"), "{said}");
}

#[test]
fn ranks_reduce_over_a_long_and_lossy_link() {
    let arguments =
        ["--rate", "100mbit", "--delay", "10ms", "--loss", "0.5%", "--burst", "3", "--"];
    let bench = [FARWIRE, "bench", "all_reduce", "--size", "1MiB", "--iters", "2", "--warmup", "1"];
    let Some(output) = netlab(&[&arguments[..], &bench].concat()) else { return };
    assert!(output.status.success(), "{}{}", text(&output.stdout), text(&output.stderr));
    assert!(text(&output.stdout).contains("all_reduce"), "{}", text(&output.stdout));
}

/// Rank 1 has to call rank 2, which cannot call it; and of two that nobody can call, each opens the
/// way for the other.
#[test]
fn ranks_that_cannot_be_called_take_part() {
    let bench = ["--", FARWIRE, "bench", "all_reduce", "--size", "1KiB", "--iters", "2", "--check"];
    for hidden in [&["--hidden", "1"][..], &["--hidden", "1", "--hidden", "2"]] {
        let arguments = [&["--hosts", "3", "--delay", "5ms"], hidden, &bench].concat();
        let Some(output) = netlab(&arguments) else { return };
        assert!(output.status.success(), "{}{}", text(&output.stdout), text(&output.stderr));
    }
}

/// The highest rank calls all others. If it moves, its connections move with it.
#[test]
fn a_rank_whose_address_changes_goes_on() {
    if Command::new("ip").arg("-V").output().is_err() {
        return eprintln!("skipped: there is no `ip` to change an address with");
    }
    let script = "
        if [ $RANK = 1 ]; then
            (sleep 2; ip address del 10.77.0.2/24 dev far0; ip address add 10.77.0.99/24 dev far0
             echo moved) &
        fi
        exec \"$@\"";
    let bench = ["bench", "all_reduce", "--size", "16KiB", "--iters", "600", "--check"];
    let arguments = ["--delay", "5ms", "--", "sh", "-c", script, "sh", FARWIRE];
    let Some(output) = netlab(&[&arguments[..], &bench].concat()) else { return };
    let said = text(&output.stdout);
    assert!(output.status.success(), "{said}{}", text(&output.stderr));
    let moved = said.find("moved").unwrap();
    assert!(said[moved..].contains(" 600 "), "it ended before: {said}");
}

/// No rank reaches rank 0: the error says which rank did not reach which, and what to open.
#[test]
fn a_rank_0_that_cannot_be_called_is_named() {
    let bench = [FARWIRE, "bench", "all_reduce", "--size", "1KiB"];
    let join = ["sh", "-c", "FARWIRE_JOIN_TIMEOUT=2s exec \"$@\"", "sh"];
    let arguments = [&["--hosts", "2", "--hidden", "0", "--"][..], &join, &bench].concat();
    let Some(output) = netlab(&arguments) else { return };
    let said = text(&output.stderr);
    assert!(!output.status.success() && said.contains("rank 1 could not reach rank 0"), "{said}");
    assert!(said.contains("let UDP through"), "{said}");
}

/// Nothing stays behind, even if the laboratory cannot clean up: its ranks end, and with them their
/// hosts.
#[test]
fn a_killed_laboratory_leaves_no_process() {
    use std::io::{BufRead, BufReader};
    if netlab(&["--hosts", "1", "--", "true"]).is_none() {
        return;
    }
    let mut lab = Command::new(FARWIRE)
        .args(["netlab", "--hosts", "2", "--", "sh", "-c", "echo $$; exec sleep 600"])
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(lab.stdout.take().unwrap()).lines();
    let mut pid = || lines.next().unwrap().unwrap()[4..].parse::<u32>().unwrap();
    let ranks = [pid(), pid()];
    lab.kill().unwrap();
    lab.wait().unwrap();
    // Both hold the other end of this pipe, so it ends when they do.
    assert!(lines.next().is_none());
    for rank in ranks {
        let state = std::fs::read_to_string(format!("/proc/{rank}/stat")).unwrap_or_default();
        assert!(!state.contains("(sleep) S"), "{state}");
    }
}

#[test]
fn what_cannot_be_parsed_shows_what_can() {
    for (flag, value, hint) in [
        ("--rate", "fast", "200mbit"),
        ("--queue", "long", "256KiB"),
        ("--outage", "8s..5s", "5s..8s"),
        ("--loss", "200%", "0.1%"),
        ("--partition", "3@5s..8s", "counted from 0, so the last is 1"),
        ("--mute", "2@5s..8s", "counted from 0, so the last is 1"),
        ("--hidden", "2", "counted from 0, so the last is 1"),
    ] {
        let output =
            Command::new(FARWIRE).args(["netlab", flag, value, "--", "true"]).output().unwrap();
        assert!(!output.status.success());
        let said = text(&output.stderr);
        assert!(said.contains(hint) || said.contains("1gbit"), "{flag}: {said}");
    }
}
