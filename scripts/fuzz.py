#!/usr/bin/env python3
"""Runs libFuzzer to find bytes that break the decoders, and can keep inputs that reach new code.

    python3 scripts/fuzz.py [--runs 100000] [--targets header,codec] [--keep]

Builds fuzz/ with the installed toolchain (stable is enough; a C++ compiler is needed), starts from the inputs kept in
crates/farwire-fuzz/corpus, and runs each target that many times, on all cores. `--keep` replaces the kept corpus by
inputs that together reach all the code that was reached, or by 300 of them, short and long. An input that breaks a
promise ends its target's run, and is left in fuzz/artifacts.
"""

import argparse
import concurrent.futures
import os
import pathlib
import re
import shutil
import struct
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
KEPT = ROOT / "crates/farwire-fuzz/corpus"
WORK = ROOT / "fuzz/corpus"
TARGET = pathlib.Path(os.environ.get("CARGO_TARGET_DIR") or ROOT / "fuzz/target").absolute()
PROGRAMS = TARGET / "x86_64-unknown-linux-gnu/release"
MOST_KEPT = 300
COVERAGE = [
    "-Cpasses=sancov-module",
    "-Cllvm-args=-sanitizer-coverage-level=4",
    "-Cllvm-args=-sanitizer-coverage-inline-8bit-counters",
    "-Cllvm-args=-sanitizer-coverage-pc-table",
    "-Cllvm-args=-sanitizer-coverage-trace-compares",
    "-Cdebug-assertions",
    "-Coverflow-checks",
    "-Ccodegen-units=1",
]


def build():
    environment = {**os.environ, "RUSTFLAGS": " ".join(COVERAGE)}
    command = ["cargo", "build", "--release", "--target", "x86_64-unknown-linux-gnu", "--manifest-path", ROOT / "fuzz/Cargo.toml"]
    command += ["--target-dir", TARGET]
    subprocess.run(command, env=environment, check=True)


def unpack(name):
    """The kept inputs as files, each named by its offset in the corpus."""
    folder = WORK / name
    folder.mkdir(parents=True, exist_ok=True)
    packed, at = (KEPT / name).read_bytes() if (KEPT / name).exists() else b"", 0
    while at < len(packed):
        (length,) = struct.unpack_from("<I", packed, at)
        (folder / f"kept-{at}").write_bytes(packed[at + 4 : at + 4 + length])
        at += 4 + length
    return folder


def pack(name, folder):
    """Keeps inputs that together reach all the code that was reached."""
    least = folder.with_name(f"{name}-least")
    shutil.rmtree(least, ignore_errors=True)
    least.mkdir()
    subprocess.run([PROGRAMS / name, "-merge=1", "-max_len=512", least, folder], check=True, capture_output=True)
    inputs = sorted((path.read_bytes() for path in least.iterdir()), key=lambda input: (len(input), input))
    count = min(len(inputs), MOST_KEPT)
    inputs = [inputs[index * len(inputs) // count] for index in range(count)]
    (KEPT / name).write_bytes(b"".join(struct.pack("<I", len(input)) + input for input in inputs))
    return len(inputs)


def fuzz(name, runs, keep):
    folder, artifacts = unpack(name), ROOT / "fuzz/artifacts" / name
    artifacts.mkdir(parents=True, exist_ok=True)
    command = [PROGRAMS / name, f"-runs={runs}", "-max_len=512", "-timeout=20", f"-artifact_prefix={artifacts}/", folder]
    done = subprocess.run(command, capture_output=True, text=True)
    count = re.search(r"Done (\d+) runs in (\d+) second", done.stderr)
    if done.returncode or not count:
        return name, 0, f"FAILED, see {artifacts}:\n{done.stderr[-3000:]}"
    covered = re.findall(r"cov: (\d+) ft: (\d+)", done.stderr)[-1]
    kept = f", {pack(name, folder)} kept" if keep else ""
    return name, int(count[1]), f"{count[1]} inputs in {count[2]} s, {covered[0]} edges{kept}"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=100_000, help="inputs for each target")
    parser.add_argument("--targets", help="only these, separated by commas")
    parser.add_argument("--keep", action="store_true", help="make the kept corpus anew")
    options = parser.parse_args()
    build()
    names = sorted(path.stem for path in (ROOT / "fuzz/fuzz_targets").iterdir())
    if options.targets:
        names = [name for name in names if name in options.targets.split(",")]
    total, failed = 0, False
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        for name, count, line in pool.map(lambda name: fuzz(name, options.runs, options.keep), names):
            print(f"{name}: {line}", flush=True)
            total, failed = total + count, failed or not count
    print(f"{total} inputs in all")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
