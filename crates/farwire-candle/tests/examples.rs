//! The examples that newcomers copy, as jobs of processes.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on should say where")]

use std::path::PathBuf;
use std::process::{Command, Stdio};

/// Runs an example on `ranks` ranks, and returns what each printed.
fn run(name: &str, ranks: usize) -> Vec<String> {
    let tests = std::env::current_exe().unwrap();
    let program: PathBuf = tests.parent().unwrap().parent().unwrap().join("examples").join(name);
    if !program.exists() {
        // A test run on its own comes without the examples.
        let arguments = ["build", "-p", "farwire-candle", "--example", name];
        assert!(Command::new(env!("CARGO")).args(arguments).status().unwrap().success());
    }
    let port = farwire::HeldPort::any().unwrap();
    let token = farwire::Token::generate().reveal();
    let children: Vec<_> = (0..ranks)
        .map(|rank| {
            Command::new(&program)
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
                .unwrap_or_else(|error| panic!("{}: {error}", program.display()))
        })
        .collect();
    let outputs = children.into_iter().map(|child| {
        let output = child.wait_with_output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    });
    outputs.collect()
}

/// The losses that rank 0 printed.
fn losses(text: &str) -> Vec<f64> {
    text.lines().filter_map(|line| line.split_once("loss ")?.1.parse().ok()).collect()
}

#[test]
fn a_plain_model_becomes_data_parallel() {
    let said = run("data_parallel", 3);
    let losses = losses(&said[0]);
    assert!(losses.len() == 4 && losses[3] < 0.2 * losses[0], "{losses:?}");
    assert!(said.iter().all(|text| text.contains("replicas are the same: true")), "{said:?}");
}

#[test]
fn a_block_is_shared_by_ranks_and_learns_as_on_one() {
    let (shared, alone) = (run("tensor_parallel", 4), run("tensor_parallel", 1));
    assert!(
        shared[3].contains("up.weight [16, 16], a share")
            && alone[0].contains("up.weight [64, 16]\n")
    );
    let (shared, alone) = (losses(&shared[0]), losses(&alone[0]));
    assert!(alone.len() == 3 && alone[2] < 0.5 * alone[0], "{alone:?}");
    for (shared, alone) in shared.iter().zip(&alone) {
        assert!((shared - alone).abs() <= 1e-3 * alone + 1e-4, "{shared} and {alone}");
    }
}

/// The loop that the guide shows is the one that the test above has run.
#[test]
fn the_guide_quotes_the_example() {
    let (guide, example) =
        (include_str!("../../../docs/guide.md"), include_str!("../examples/data_parallel.rs"));
    let (_, quoted) = guide.split_once("```rust\n").unwrap();
    let (quoted, _) = quoted.split_once("```").unwrap();
    assert!(quoted.starts_with("fn main()") && example.ends_with(quoted), "{quoted}");
    assert!((28..=34).contains(&quoted.lines().count()), "about thirty lines");
}
