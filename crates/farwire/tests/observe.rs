//! What can be seen of a job: flight records, traces, metrics.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on should say where")]

mod common;

use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::Command;

use common::{assert_succeeds, on_threads, start_processes_with};
use farwire::flight::{Flight, State};
use farwire::{Communicator, Options, ReduceOp, Token};
use rustix::process::{Signal, getpid, kill_process};

fn scratch(name: &str) -> PathBuf {
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    let _ = std::fs::remove_dir_all(&path);
    std::fs::create_dir_all(&path).unwrap();
    path
}

#[test]
fn a_flight_record_shows_the_last_operations_and_who_is_waited_for() {
    on_threads(3, |comm| {
        comm.all_reduce(vec![1.0f32; 1000], ReduceOp::Sum).wait().unwrap();
        let deadline = Some(std::time::Duration::from_secs(20));
        let handle = comm.with_options(Options { deadline, ..Options::default() });
        if comm.rank() == 0 {
            let late = handle.recv::<u8>(1, 2, 9);
            let flight = comm.flight();
            assert_eq!((flight.rank, flight.world), (0, 3));
            assert_eq!(flight.links, [None, Some("inproc".into()), Some("inproc".into())]);
            let [sum, receive] = &flight.operations[..] else { panic!("{flight:?}") };
            assert_eq!((sum.state, sum.collective), (State::Done, Some(0)));
            assert!(sum.call.contains("all_reduce(sum, f32 × 1000"), "{}", sum.call);
            assert!(sum.sent_bytes > 0 && sum.received_bytes > 0);
            assert_eq!((receive.state, &receive.waiting_for[..]), (State::Waiting, &[2][..]));
            comm.barrier().wait().unwrap();
            late.wait().unwrap();
        } else {
            comm.barrier().wait().unwrap();
            if comm.rank() == 2 {
                comm.send(vec![1u8], 0, 9).wait().unwrap();
            }
        }
    });
}

#[test]
fn a_failed_job_leaves_a_flight_record_per_survivor() {
    const TEST: &str = "a_failed_job_leaves_a_flight_record_per_survivor";
    let directory = scratch(TEST);
    let settings = [("FARWIRE_FLIGHT_DIR", directory.to_str().unwrap())];
    let children = start_processes_with(TEST, 3, "shm", &settings, |comm| {
        // Rank 1 dies when the others are surely done with what came before.
        comm.barrier().wait().unwrap();
        if comm.rank() == 1 {
            for other in [0, 2] {
                comm.recv::<u8>(1, other, 0).wait().unwrap();
            }
            kill_process(getpid(), Signal::KILL).unwrap();
        }
        comm.send(vec![0u8], 1, 0).wait().unwrap();
        assert!(comm.all_reduce(vec![1.0f32; 10], ReduceOp::Sum).wait().is_err());
    });
    if children.is_empty() {
        return;
    }
    for (rank, mut child) in children.into_iter().enumerate() {
        if rank == 1 {
            child.wait().unwrap();
        } else {
            assert_succeeds(child, "a survivor");
        }
    }
    let mut flights: Vec<_> = directory
        .read_dir()
        .unwrap()
        .map(|file| Flight::read(&file.unwrap().path()).unwrap())
        .collect();
    flights.sort_by_key(|flight| flight.rank);
    assert_eq!(flights.iter().map(|flight| flight.rank).collect::<Vec<_>>(), [0, 2]);
    for flight in &flights {
        assert!(
            flight.reason.contains("rank 1") || flight.reason.contains("process 1"),
            "{}",
            flight.reason
        );
        let last = flight.operations.last().unwrap();
        assert_eq!(last.state, State::Failed);
        assert!(last.waiting_for.contains(&1), "{last:?}");
        assert!(last.error.is_some());
    }
}

#[test]
fn a_trace_has_every_operation() {
    const TEST: &str = "a_trace_has_every_operation";
    let directory = scratch(TEST);
    let path = directory.join("trace.json");
    let children = start_processes_with(
        TEST,
        2,
        "quic",
        &[("FARWIRE_TRACE", path.to_str().unwrap())],
        |comm| {
            for _ in 0..100 {
                comm.all_reduce(vec![1.0f32; 10], ReduceOp::Sum).wait().unwrap();
            }
            comm.shutdown().unwrap();
        },
    );
    if children.is_empty() {
        return;
    }
    for child in children {
        assert_succeeds(child, "a rank");
    }
    for rank in 0..2 {
        let text =
            std::fs::read_to_string(directory.join(format!("trace.rank{rank}.json"))).unwrap();
        let events: Vec<serde_json::Value> = serde_json::from_str(&format!("{text}]")).unwrap();
        let count = |phase: &str, name: &str| {
            events.iter().filter(|event| event["ph"] == phase && event["name"] == name).count()
        };
        assert_eq!((count("b", "all_reduce"), count("e", "all_reduce")), (100, 100));
        assert_eq!((count("b", "barrier"), count("M", "process_name")), (1, 1));
        assert!(events.iter().all(|event| event["pid"] == rank));
    }
}

fn get(port: u16, path: &str) -> String {
    let mut stream = TcpStream::connect(("127.0.0.1", port)).unwrap();
    write!(stream, "GET {path} HTTP/1.1\r\nHost: here\r\n\r\n").unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    answer
}

#[test]
fn metrics_are_served_to_prometheus() {
    const TEST: &str = "metrics_are_served_to_prometheus";
    let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let address = free.to_string();
    let children = start_processes_with(TEST, 2, "shm", &[("FARWIRE_METRICS", &address)], |comm| {
        let port: u16 =
            std::env::var("FARWIRE_METRICS").unwrap().rsplit(':').next().unwrap().parse().unwrap();
        for _ in 0..10 {
            comm.all_reduce(vec![1.0f32; 100], ReduceOp::Sum).wait().unwrap();
        }
        comm.barrier().wait().unwrap();
        if comm.rank() == 0 {
            // One rank has the port, and the other the next.
            let ranks: Vec<_> = [port, port + 1]
                .into_iter()
                .map(|port| {
                    let answer = get(port, "/metrics");
                    assert!(answer.starts_with("HTTP/1.1 200 OK"), "{answer}");
                    assert!(answer.contains("kind=\"all_reduce\",le=\"+Inf\"} 10"), "{answer}");
                    assert!(answer.contains("farwire_sent_bytes_total{rank="), "{answer}");
                    (0..2)
                        .find(|rank| answer.contains(&format!("in_flight{{rank=\"{rank}\"}}")))
                        .unwrap()
                })
                .collect();
            assert_eq!(ranks.iter().sum::<i32>(), 1);
            let flight = get(port, "/flight");
            let (_, body) = flight.split_once("\r\n\r\n").unwrap();
            assert!(serde_json::from_str::<Flight>(body).unwrap().operations.len() >= 11);
            assert!(get(port, "/else").starts_with("HTTP/1.1 404"));
        }
        comm.shutdown().unwrap();
    });
    for child in children {
        assert_succeeds(child, "a rank");
    }
}

/// The error names the variable, its value, and what to do.
#[test]
fn settings_that_cannot_be_used_are_named_with_their_value() {
    let folder = std::env::temp_dir().join(format!("farwire-settings-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let path = |name: &str| folder.join(name).into_os_string().into_string().unwrap();
    std::fs::write(path("others.token"), Token::generate().reveal()).unwrap();
    std::fs::write(path("bad.token"), "fw-0").unwrap();
    let mode = |mode| std::os::unix::fs::PermissionsExt::from_mode(mode);
    std::fs::set_permissions(path("others.token"), mode(0o644)).unwrap();
    std::fs::set_permissions(path("bad.token"), mode(0o600)).unwrap();
    for (variable, value, advice) in [
        ("FARWIRE_TRACE", path("no/trace.json"), "a folder that exists"),
        ("FARWIRE_METRICS", "192.0.2.1:9464".to_owned(), "an address of this host"),
        ("FARWIRE_TOKEN_FILE", path("no.token"), "farwire token"),
        ("FARWIRE_TOKEN_FILE", path("bad.token"), "farwire token"),
        ("FARWIRE_TOKEN_FILE", path("others.token"), "chmod 600"),
        ("FARWIRE_TOKEN_FILE", path(""), "farwire token"),
    ] {
        let error = join_alone(&[(variable, &value)]);
        // A trace of rank 0 goes to a file with its rank in the name.
        let shown = value.trim_end_matches(".json");
        assert!(error.contains(variable) && error.contains(shown), "{variable}={value}: {error}");
        assert!(error.contains(advice), "{variable}={value}: {error}");
    }
    let error = join_alone(&[("FARWIRE_TOKEN", "fw-0")]);
    assert!(error.contains("FARWIRE_TOKEN is not a cluster token"), "{error}");
    std::fs::remove_dir_all(folder).unwrap();
}

/// Why a job of one rank cannot be joined in this environment, in a process of its own.
fn join_alone(variables: &[(&str, &str)]) -> String {
    const TEST: &str = "settings_that_cannot_be_used_are_named_with_their_value";
    const MARK: &str = "FARWIRE_TEST_ALONE";
    if std::env::var_os(MARK).is_some() {
        println!("{}", Communicator::from_env().map(|_| "it has joined").unwrap_err());
        std::process::exit(0);
    }
    let output = Command::new(std::env::current_exe().unwrap())
        .args([TEST, "--exact", "--nocapture"])
        .env(MARK, "1")
        .envs([
            ("RANK", "0"),
            ("WORLD_SIZE", "1"),
            ("MASTER_ADDR", "127.0.0.1"),
            ("MASTER_PORT", "9"),
        ])
        .envs(variables.iter().copied())
        .output();
    String::from_utf8(output.unwrap().stdout).unwrap()
}
