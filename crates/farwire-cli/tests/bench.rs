//! `farwire bench` as people type it.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on should say where")]

use std::process::Command;

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
