//! `farwire bench` as people type it.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on should say where")]

use std::process::Command;

/// One run's result.
fn json(args: &[&str]) -> serde_json::Value {
    let output = Command::new("timeout")
        .args(["120", env!("CARGO_BIN_EXE_farwire"), "bench"])
        .args(args)
        .args(["--iters", "2", "--warmup", "1", "--check", "--json"])
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

/// Through a codec, too, and with threads as with processes.
#[test]
fn what_leaves_a_host_is_once_what_it_must_be_however_many_ranks_it_has() {
    let bytes = 1_000_000;
    let all_reduce = ["all_reduce", "--size", "1MB", "-n", "4", "--hosts"];
    for (hosts, link) in [("2", "inproc"), ("3+1", "inproc"), ("2", "auto")] {
        let run = json(&[&all_reduce[..], &[hosts, "--link", link]].concat());
        assert_eq!((&run["hosts"], &run["wrong"]), (&2.into(), &0.into()), "{run}");
        let ratio = run["host_bytes"].as_f64().unwrap() / f64::from(bytes);
        assert!((1.0..=1.05).contains(&ratio), "{hosts}, {link}: {ratio} of 2(H−1)/H");
        let coded = [&all_reduce[..], &[hosts, "--link", link, "--codec", "topk:0.01"]].concat();
        let run = json(&coded);
        assert_eq!(run["wrong"], 0, "{run}");
        assert!(run["host_bytes"].as_u64().unwrap() < 20_000, "{run}");
    }
    let flat = [&all_reduce[..], &["2", "--link", "inproc", "--algorithm", "two-phase"]].concat();
    assert!(json(&flat)["host_bytes"].as_f64().unwrap() > 1.9 * f64::from(bytes));
}

#[test]
fn hosts_that_do_not_fit_the_ranks_are_refused() {
    let said = refusal(&["all_reduce", "--ranks", "4", "--hosts", "3+2"]);
    assert!(said.contains("--hosts 3+2 does not fit 4 ranks"), "{said}");
}

/// What the program says on its error output when it refuses.
fn refusal(args: &[&str]) -> String {
    let output =
        Command::new(env!("CARGO_BIN_EXE_farwire")).arg("bench").args(args).output().unwrap();
    assert!(!output.status.success());
    String::from_utf8(output.stderr).unwrap()
}

#[test]
fn a_vector_larger_than_memory_is_refused_rather_than_killed() {
    for size in ["100TiB", "9223372036854775804"] {
        let said = refusal(&["all_reduce", "--ranks", "2", "--size", size]);
        assert!(said.contains("needs about") && said.contains("give a smaller one"), "{said}");
    }
}

#[test]
fn a_size_beyond_any_memory_is_not_a_size() {
    let said = refusal(&["all_reduce", "--ranks", "2", "--size", "18446744073709551615"]);
    assert!(said.contains("is too large"), "{said}");
}

#[test]
fn a_gpu_that_cannot_be_used_is_an_error_that_says_what_is_missing() {
    if cfg!(feature = "cuda") {
        let text = refusal(&["broadcast", "--ranks", "2", "--device", "cuda"]);
        assert!(text.contains("--device cuda serves `codec` and all_reduce of f32"), "{text}");
        let text = refusal(&["all_reduce", "--ranks", "2", "--device", "cuda", "--dtype", "f64"]);
        assert!(text.contains("--device cuda serves `codec` and all_reduce of f32"), "{text}");
    } else {
        for op in ["codec", "all_reduce"] {
            let text = refusal(&[op, "--device", "cuda"]);
            assert!(
                text.contains("built without CUDA; build it with `cargo build --features cuda`")
            );
        }
    }
}
