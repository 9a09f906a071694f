#!/usr/bin/env python3
"""The training tables in docs/gpu.md: losses on the card and on the CPU, and speed.

    scripts/gpu_train.py PROGRAM [losses|speed]

PROGRAM is a farwire built with the feature train-cuda. Two ranks share the cards.
"""

import json
import os
import subprocess
import sys
import tempfile
import time

SMALL = "--layers 4 --heads 8 --width 512 --context 64 --batch 8 --steps 20"
LARGE = "--layers 4 --heads 16 --width 1024 --context 256 --steps 24"


def train(program, arguments):
    """The steps of a run; an empty list if it failed."""
    command = [program, "train", "--json", *arguments.split()]
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, errors="replace")
    if done.returncode != 0:
        print(f"FAILED: {arguments}\n{done.stderr[-2000:]}", flush=True)
        return []
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    print(f"  ({arguments}: {time.monotonic() - start:.0f} s)", flush=True)
    return [line for line in lines if line["event"] == "step"]


def apart(ours, theirs):
    """The largest difference between losses: over all steps, and over the first 13."""
    gaps = [abs(a["loss"] - b["loss"]) for a, b in zip(ours, theirs)]
    return f"{max(gaps):.1e}, {max(gaps[:13]):.1e} in the first 13 steps" if gaps else "no losses"


def losses(program):
    cpu = {}

    def on_cpu(options):
        if options not in cpu:
            cpu[options] = train(program, f"--ranks 2 {SMALL} {options}")
        return cpu[options]

    slow, fast = "--codec none --lr 0.001", "--codec none"
    for options, beside in (
        (slow, slow),
        (f"{slow} --tp 2", slow),
        (fast, fast),
        (f"{fast} --tp 2", fast),
        ("--codec int8", "--codec int8"),
    ):
        card = train(program, f"--ranks 2 {SMALL} {options} --device cuda")
        print(f"{options}: card and CPU {apart(card, on_cpu(beside))}", flush=True)
    both = apart(on_cpu(f"{slow} --tp 2"), on_cpu(slow))
    print(f"{slow}: CPU with --tp 2 and without {both}", flush=True)


def speed(program):
    alone = f"--ranks 1 {LARGE} --batch 16 --codec none"
    two = f"--ranks 2 {LARGE} --batch 32 --codec"
    for arguments in (alone, f"{two} none", f"{two} int8", f"{two} topk:64/4096") * 2:
        steps = train(program, f"{arguments} --device cuda")[12:]
        if steps:
            mean = sum(step["times"]["total"] for step in steps) / len(steps)
            hidden = [step["hidden"] for step in steps if step["hidden"] is not None]
            tokens = steps[0]["tokens"] / mean
            span = f", hidden {min(hidden):.2f} to {max(hidden):.2f}" if hidden else ""
            took = f"{mean * 1e3:.1f} ms a step, {tokens:.0f} tokens/s"
            print(f"{arguments}: {took}{span}", flush=True)


def main():
    program, what = os.path.abspath(sys.argv[1]), sys.argv[2:]
    if what in ([], ["losses"]):
        losses(program)
    if what in ([], ["speed"]):
        speed(program)


if __name__ == "__main__":
    main()
