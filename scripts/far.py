#!/usr/bin/env python3
"""All-reduce over long and lossy links: farwire beside Gloo, in `farwire netlab`. Needs root on Linux.

    python3 scripts/far.py [--farwire PATH] [--jobs N] [--rounds N] [--only WORD] [--size MB]
                           [--no-gloo] [--json FILE]

Each line of the table is one network and one size. Gloo runs on the same network, over BBR if the
kernel has it; without torch its column stays empty. The fraction is that of the line's capacity:
(8·size/rate + one round trip) / time; packet headers limit it to about 0.95. `lost` counts runs
that ended with an error.

`--jobs` runs several networks at once; give each three cores.
"""

import argparse
import concurrent.futures
import json
import os
import statistics
import subprocess
import sys
import time

LIMIT = 240  # seconds for one run


class Network:
    """A network between two hosts, as flags for `farwire netlab`."""

    def __init__(self, rate, round_trip, loss="0", burst=1, queue=100):
        self.rate, self.round_trip, self.loss, self.burst, self.queue = rate, round_trip, loss, burst, queue

    def flags(self):
        return [
            f"--rate={self.rate}mbit",
            f"--delay={self.round_trip / 2}ms",
            f"--loss={self.loss}",
            f"--burst={self.burst}",
            f"--queue={self.queue}ms",
        ]

    def name(self):
        loss = "no loss" if self.loss == "0" else f"{self.loss} lost"
        bursts = f" in bursts of {self.burst}" if self.burst > 1 else ""
        return f"{self.rate} Mbit/s, {self.round_trip} ms, queue {self.queue} ms, {loss}{bursts}"

    def bound(self, megabytes):
        """Seconds that no all-reduce between two hosts can beat."""
        return 8 * megabytes / self.rate + self.round_trip / 1000


CLOUDS = [
    Network(200, 100),
    Network(200, 100, "0.1%"),
    Network(200, 100, "1%"),
    Network(200, 100, "3%"),
    Network(200, 100, "1%", burst=8),
]
OTHERS = [Network(400, 30), Network(50, 250), Network(10, 20, "2%")]
QUEUES = [Network(200, 100, queue=10), Network(200, 100, queue=500)]

CASES = [(network, megabytes) for megabytes in (8, 64) for network in CLOUDS]
CASES += [(network, 8) for network in OTHERS] + [(network, 64) for network in OTHERS[:2]]
CASES += [(network, 64) for network in QUEUES]


def gloo_rank(megabytes, iterations):
    """One rank of the peer. Prints the median time of an iteration, on the slower rank."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    vector = torch.rand(megabytes * 250_000)
    times = []
    for iteration in range(iterations + 1):
        dist.barrier()
        start = time.perf_counter()
        dist.all_reduce(vector)
        if iteration > 0:
            times.append(time.perf_counter() - start)
    slowest = torch.tensor(times)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    if dist.get_rank() == 0:
        print(json.dumps({"seconds": statistics.median(slowest.tolist())}), flush=True)


def lines(output):
    """The JSON objects that the ranks printed; netlab puts `[rank] ` in front."""
    for line in output.splitlines():
        start = line.find("{")
        if start >= 0:
            try:
                yield json.loads(line[start:])
            except ValueError:
                pass


def on(network, seed, command, options):
    """Runs a command on both hosts. Returns the JSON it printed, or why there is none."""
    lab = [options.farwire, "netlab", f"--seed={seed}", *network.flags(), "--", *command]
    try:
        done = subprocess.run(lab, capture_output=True, text=True, timeout=LIMIT)
    except subprocess.TimeoutExpired:
        return None, f"did not end in {LIMIT} s"
    for result in lines(done.stdout):
        return result, None
    return None, (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]


def farwire(network, megabytes, codec, seed, iterations, options):
    command = [options.farwire, "bench", "all_reduce", f"--size={megabytes}MB", f"--codec={codec}"]
    command += [f"--iters={iterations}", "--warmup=1", "--json"]
    result, why = on(network, seed, command, options)
    return (result["p50_us"] / 1e6, None) if result else (None, why)


def gloo(network, megabytes, seed, iterations, options):
    inner = [sys.executable, os.path.abspath(__file__), "--gloo-rank", str(megabytes), str(iterations)]
    shell = "sysctl -qw net.ipv4.tcp_congestion_control=bbr 2>/dev/null; exec \"$@\""
    result, why = on(network, seed, ["sh", "-c", shell, "sh", *inner], options)
    return (result["seconds"], None) if result else (None, why)


def measure(case, options):
    """One line of the table: all measurements on this network, interleaved, `rounds` times."""
    network, megabytes = case
    iterations = 5 if megabytes <= 8 else 3
    times = {"none": [], "topk:0.01": [], "gloo": []}
    errors = []
    for seed in range(1, options.rounds + 1):
        for codec in ("none", "topk:0.01"):
            if codec != "none" and network not in OTHERS:
                continue
            seconds, why = farwire(network, megabytes, codec, seed, iterations, options)
            if seconds is not None:
                times[codec].append(seconds)
            else:
                errors.append(f"{codec}, seed {seed}: {why}")
        if options.torch:
            seconds, why = gloo(network, megabytes, seed, iterations, options)
            if seconds is not None:
                times["gloo"].append(seconds)
            else:
                print(f"gloo: {why}", file=sys.stderr)
    return case, times, errors


def cell(times):
    return f"{statistics.median(times):.2f}" if times else "–"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--farwire", default="target/release/farwire", help="the program")
    parser.add_argument("--jobs", type=int, default=1, help="networks at once")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each, each with its own random seed")
    parser.add_argument("--only", default="", help="lines whose name holds this")
    parser.add_argument("--size", type=int, help="megabytes; only these")
    parser.add_argument("--no-gloo", action="store_true", help="farwire alone")
    parser.add_argument("--json", help="write all times here")
    parser.add_argument("--gloo-rank", nargs=2, type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.gloo_rank:
        return gloo_rank(*options.gloo_rank)
    options.farwire = os.path.abspath(options.farwire)
    has_torch = subprocess.run([sys.executable, "-c", "import torch"], capture_output=True).returncode == 0
    options.torch = has_torch and not options.no_gloo
    if not has_torch:
        print("torch is not installed: Gloo's column stays empty", file=sys.stderr)

    cases = [case for case in CASES if options.only in case[0].name() and options.size in (None, case[1])]
    print("| network | MB | bound | farwire | fraction | worst to best | Gloo | fraction | topk:0.01 | lost |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    records = []
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        for (network, megabytes), times, errors in pool.map(lambda case: measure(case, options), cases):
            bound = network.bound(megabytes)
            fraction = lambda t: f"{bound / statistics.median(t):.2f}" if t else "–"
            ours = times["none"]
            spread = f"{bound / max(ours):.2f}–{bound / min(ours):.2f}" if ours else "–"
            row = [network.name(), megabytes, f"{bound:.2f} s", cell(ours), fraction(ours), spread]
            row += [cell(times["gloo"]), fraction(times["gloo"]), cell(times["topk:0.01"]), len(errors)]
            print("| " + " | ".join(map(str, row)) + " |", flush=True)
            for error in errors:
                print(f"  lost: {error}", flush=True)
            records.append({"network": network.name(), "megabytes": megabytes, "bound": bound, "seconds": times})
    if options.json:
        with open(options.json, "w") as file:
            json.dump(records, file, indent=1)


if __name__ == "__main__":
    main()
