//! Jobs of several processes: a test starts itself again, once per rank. Also a text to learn from.

#![allow(dead_code, reason = "each test file uses its own share of this")]

use std::process::{Child, Command, Output, Stdio};
use std::sync::{Mutex, PoisonError};

use farwire::Communicator;

const MARK: &str = "FARWIRE_TEST_CASE";

/// Jobs of one test program run one after the other, so that each has the machine's few cores to
/// itself.
static TURN: Mutex<()> = Mutex::new(());

/// Runs `rank` in each of `ranks` processes. Returns the outputs of the processes in rank order;
/// within such a process, returns nothing.
///
/// `test` is the name of the calling test function, and `case` tells its jobs apart.
pub(crate) fn job(
    test: &str,
    case: &str,
    ranks: usize,
    rank: impl FnOnce(Communicator),
) -> Vec<Output> {
    let case = format!("{test} {case} {ranks}");
    if let Ok(mark) = std::env::var(MARK) {
        if mark == case {
            rank(Communicator::from_env().expect("all ranks come"));
        } // else it is another job of the same test
        return Vec::new();
    }
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let port = farwire::HeldPort::any().expect("a free port");
    let token = farwire::Token::generate().reveal();
    let start = |rank: usize| {
        Command::new(std::env::current_exe().expect("tests know where they are"))
            .args([test, "--exact", "--nocapture"])
            .env(MARK, &case)
            .env("RANK", rank.to_string())
            .env("WORLD_SIZE", ranks.to_string())
            .env("MASTER_ADDR", "127.0.0.1")
            .env("MASTER_PORT", port.port().to_string())
            .envs([port.variable()])
            .env("FARWIRE_TOKEN", &token)
            .env("RAYON_NUM_THREADS", "1")
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("a test can start itself")
    };
    let children: Vec<Child> = (0..ranks).map(start).collect();
    children.into_iter().map(|child| child.wait_with_output().expect("a child ends")).collect()
}

/// A [`job`] whose processes must all succeed.
pub(crate) fn job_succeeds(test: &str, case: &str, ranks: usize, rank: impl FnOnce(Communicator)) {
    for (index, output) in job(test, case, ranks, rank).into_iter().enumerate() {
        let text = String::from_utf8_lossy(&output.stdout).into_owned()
            + &String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{case}, rank {index} of {ranks}:\n{text}");
    }
}

/// A text to learn from that does not change when the project's own text does.
pub(crate) fn text() -> Vec<u8> {
    let line = |i: usize| format!("{} plus {} is {}.\n", i % 7, i % 5, i % 7 + i % 5);
    (0..1000).map(line).collect::<String>().into_bytes()
}

/// Whether this is a process of a job rather than the test that starts it.
pub(crate) fn is_rank() -> bool {
    std::env::var_os(MARK).is_some()
}
