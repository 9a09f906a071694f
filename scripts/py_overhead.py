#!/usr/bin/env python3
"""What the Python layer adds to an all-reduce: the package compared with `farwire bench`.

    python scripts/py_overhead.py [--farwire PATH] [--rounds 10] [--json FILE]

Two ranks on this machine all-reduce vectors of 4 KiB and 64 MiB of f32 through shared memory: from
Rust, from NumPy and from PyTorch (if it is installed), each in processes of its own, one after the
other, in rounds. A figure is the median time of an iteration on its slower rank. Other programs on
the machine can only make figures larger, so the least figure of all rounds is compared; it is shown
next to the median of all rounds.
"""

import argparse
import importlib.util
import json
import os
import shutil
import statistics
import subprocess
import sys
import time

#: Bytes, and iterations in a round.
SIZES = [(4 << 10, 2000), (64 << 20, 16)]
LINK = "shm"
WARM_UP = 5
#: No round takes longer, even on a busy machine.
LIMIT = 120


def be_a_rank(kind, size, iterations):
    """One rank: prints the median time of an iteration on the slower rank, in microseconds."""
    import numpy

    import farwire

    comm = farwire.init()
    array = numpy.zeros(size // 4, numpy.float32)
    if kind == "torch":
        import torch

        torch.set_num_threads(1)
        array = torch.from_numpy(array)
    times = numpy.empty(iterations)
    for number in range(-WARM_UP, iterations):
        if number == 0:
            comm.barrier()
        began = time.perf_counter()
        comm.all_reduce(array)
        if number >= 0:
            times[number] = time.perf_counter() - began
    comm.all_reduce(times, op="max")
    if comm.rank == 0:
        print(json.dumps({"p50_us": float(numpy.median(times)) * 1e6}))
    comm.shutdown()


def measure(kind, program, size, iterations):
    """One round of one kind."""
    if kind == "rust":
        command = [program, "bench", "all_reduce", "--ranks", "2", "--size", str(size), "--json"]
        command += ["--link", LINK, "--iters", str(iterations), "--warmup", str(WARM_UP)]
    else:
        command = [program, "launch", "-n", "2", "--", sys.executable, os.path.abspath(__file__)]
        command += ["--rank", kind, str(size), str(iterations)]
    # One BLAS thread: the threads of an idle pool spin on the cores that ranks need.
    env = {**os.environ, "FARWIRE_LINK": LINK, "OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, env=env, text=True, capture_output=True, timeout=LIMIT)
    lines = [line[line.index("{") :] for line in run.stdout.splitlines() if "{" in line]
    if run.returncode != 0 or not lines:
        sys.exit(f"{' '.join(command)} ended with {run.returncode}:\n{run.stdout}{run.stderr}")
    return json.loads(lines[-1])["p50_us"]


def main():
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--farwire", default=shutil.which("farwire"), help="the program")
    arguments.add_argument("--rounds", type=int, default=10)
    arguments.add_argument("--json", help="a file for the figures")
    arguments.add_argument("--rank", nargs=3, help=argparse.SUPPRESS)
    chosen = arguments.parse_args()
    if chosen.rank:
        kind, size, iterations = chosen.rank
        return be_a_rank(kind, int(size), int(iterations))
    if not chosen.farwire:
        sys.exit("the program `farwire` is not on the path; give --farwire")
    kinds = ["rust", "numpy"] + ["torch"] * (importlib.util.find_spec("torch") is not None)
    figures = {}
    for size, iterations in SIZES:
        rounds = {kind: [] for kind in kinds}
        for _ in range(chosen.rounds):
            for kind in kinds:
                rounds[kind].append(measure(kind, chosen.farwire, size, iterations))
        figures[size] = rounds
        base = min(rounds["rust"])
        for kind in kinds:
            least, middle = min(rounds[kind]), statistics.median(rounds[kind])
            print(
                f"{size:>9} bytes  {kind:6} least {least:9.1f} us  median {middle:9.1f} us"
                f"   over rust's least {least - base:+8.1f} us, {least / base - 1:+7.1%}",
                flush=True,
            )
    if chosen.json:
        with open(chosen.json, "w") as file:
            json.dump(figures, file, indent=1)


if __name__ == "__main__":
    main()
