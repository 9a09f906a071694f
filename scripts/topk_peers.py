#!/usr/bin/env python3
"""Top-k compared with its peers, in one run on one core: farwire (with error feedback, down to bytes), torch.topk, nexar.

    python3 scripts/topk_peers.py [--nexar] [--farwire PATH] [--elements N] [--tries N]

Prints the best of several tries of each, and the ratio. Peers are optional: torch.topk is measured if PyTorch is
installed, nexar's TopKCompressor with --nexar if cargo can fetch and build it. Add another peer with
--peer NAME=SECONDS: a time measured by other means on the same machine.
"""

import argparse
import json
import os
import pathlib
import subprocess
import time

NEXAR = "0.2.0"

MANIFEST = f"""[package]
name = "nexar-peer"
version = "0.0.0"
edition = "2024"
publish = false

[dependencies]
nexar = "={NEXAR}"

[workspace]
"""

# The same kind of values as in `farwire bench codec`, and a residual that is not zero: a step in the middle of training.
PROGRAM = """use std::time::Instant;

use nexar::DataType;
use nexar::compression::{Compressor, TopKCompressor};

fn bytes(elements: usize, mut state: u64) -> Vec<u8> {
    let mut uniform = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1u64 << 24) as f32
    };
    (0..elements).flat_map(|_| ((0..6).map(|_| uniform()).sum::<f32>() - 3.0).to_le_bytes()).collect()
}

fn main() {
    let [elements, tries] = [1, 2].map(|i| std::env::args().nth(i).expect("an argument").parse().expect("a number"));
    let (gradient, owed) = (bytes(elements, 1), bytes(elements, 2));
    let compressor = TopKCompressor::new(0.01);
    let best = (0..tries).map(|_| {
        let mut residual = owed.clone();
        let start = Instant::now();
        std::hint::black_box(compressor.compress(&gradient, elements, DataType::F32, &mut residual));
        start.elapsed().as_secs_f64()
    });
    println!("{}", best.fold(f64::MAX, f64::min));
}
"""


def farwire(path: str, elements: int, tries: int) -> float:
    command = [path, "bench", "codec", "--codec", "topk:0.01", "--size", str(4 * elements), "--threads", "1"]
    command += ["--iters", str(tries), "--json"]
    row = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return row["bytes"] / row["encode_gbs"] / 1e9


def torch_topk(elements: int, tries: int) -> float:
    import torch

    torch.set_num_threads(1)
    values = torch.randn(elements)
    best = float("inf")
    for _ in range(tries):
        start = time.perf_counter()
        torch.topk(values.abs(), elements // 100)
        best = min(best, time.perf_counter() - start)
    return best


def build_nexar() -> str:
    """Makes a small program around nexar and returns its path."""
    home = pathlib.Path(__file__).resolve().parent.parent / "target" / "peers" / "nexar"
    (home / "src").mkdir(parents=True, exist_ok=True)
    for name, text in [("Cargo.toml", MANIFEST), ("src/main.rs", PROGRAM)]:
        if not (home / name).exists() or (home / name).read_text() != text:
            (home / name).write_text(text)
    command = ["cargo", "build", "--release", "--quiet", "--target-dir", str(home / "target")]
    subprocess.run(command, cwd=home, check=True)
    return str(home / "target" / "release" / "nexar-peer")


def nexar(path: str, elements: int, tries: int) -> float:
    command = [path, str(elements), str(tries)]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--farwire", default="target/release/farwire", help="the program")
    parser.add_argument("--nexar", action="store_true", help=f"build and measure nexar {NEXAR}")
    parser.add_argument("--elements", type=int, default=1 << 24)
    parser.add_argument("--tries", type=int, default=5)
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=SECONDS")
    arguments = parser.parse_args()
    size = arguments.elements, arguments.tries

    program, why = None, "ask for it with --nexar"
    if arguments.nexar:
        try:
            program = build_nexar()
        except (OSError, subprocess.CalledProcessError) as error:
            why = f"cargo could not build it ({error})"
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # one core, for this process and those it starts

    ours = farwire(arguments.farwire, *size)
    print(f"{arguments.elements} elements, 1 %, one core, best of {arguments.tries}")
    print(f"{'farwire topk:0.01':<28} {ours * 1e3:9.1f} ms")
    peers = [(name, float(seconds)) for name, seconds in (peer.split("=") for peer in arguments.peer)]
    try:
        peers.append(("torch.topk", torch_topk(*size)))
    except ImportError:
        print("torch.topk: skipped, PyTorch is not installed")
    if program:
        peers.append((f"nexar {NEXAR} TopKCompressor", nexar(program, *size)))
    else:
        print(f"nexar: skipped, {why}")
    for name, seconds in peers:
        print(f"{name:<28} {seconds * 1e3:9.1f} ms   {seconds / ours:6.1f} × farwire's")


if __name__ == "__main__":
    main()
