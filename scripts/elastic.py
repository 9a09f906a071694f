#!/usr/bin/env python3
"""What elastic training costs, and what it does to the result. Linux.

    python3 scripts/elastic.py cost [--rounds 10]      steps per second of an elastic run and of a plain one, in turns
    python3 scripts/elastic.py loss [--codecs int8]    the final loss of a run with three kills and three joins
    python3 scripts/elastic.py join [--rate 200mbit]   how long joining takes, on hosts with lines of that speed (root)
    python3 scripts/elastic.py cut                     five hosts cut in 3 | 2 for ten seconds, which join again (root)

All take `--farwire PATH`, and work in a folder of their own. `loss` runs `farwire train` with its defaults, unless
`--train` says otherwise.
"""

import argparse
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time

SMALL = "--layers 2 --heads 2 --width 64 --context 32 --batch 8"
PATIENCE = 900  # seconds for anything
# What a host of `join` does: the last one waits, and joins.
JOINER = """
export FARWIRE_PORT=29500 FARWIRE_FLIGHT_DIR=
if [ $RANK = $LAST ]; then
  until [ -e join ]; do sleep 0.1; done
  exec env -u RANK -u WORLD_SIZE -u MASTER_ADDR -u MASTER_PORT "$@" --join 10.77.0.1:29500,10.77.0.2:29500 --report joiner.html
fi
WORLD_SIZE=$LAST exec "$@" --elastic --report $RANK.html
"""
# What a host of `cut` does: takes part, and joins again when that fails.
AGAIN = """
export FARWIRE_PORT=29500 FARWIRE_FLIGHT_DIR= FARWIRE_JOIN_TIMEOUT=30s
"$@" --elastic --report $RANK.html; code=$?
until [ $code = 0 ] || [ $code = 143 ] || [ -e stop ]; do
  echo "host $RANK ended with $code"
  env -u RANK -u WORLD_SIZE -u MASTER_ADDR -u MASTER_PORT "$@" --join $ADDRESSES --report $RANK.html; code=$?
done
"""


class Run:
    """A job, and its events with the time of each."""

    def __init__(self, command, folder, **environment):
        environment = {**os.environ, "FARWIRE_FLIGHT_DIR": "", **environment}
        self.process = subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.until = time.monotonic() + PATIENCE

    def events(self):
        for line in self.process.stdout:
            if time.monotonic() > self.until:
                self.process.kill()
                sys.exit(f"not within {PATIENCE} s")
            start = line.find("{")
            try:
                yield time.monotonic(), json.loads(line[start:]) if start >= 0 else {"event": "text", "text": line.strip()}
            except ValueError:
                pass

    def ranks(self):
        """The launcher's processes, the oldest first."""
        return [int(pid) for pid in subprocess.run(["pgrep", "-P", str(self.process.pid)], capture_output=True, text=True).stdout.split()]

    def end(self):
        said = self.process.stderr.read()
        if self.process.wait() != 0:
            sys.exit(f"the job ended with {self.process.returncode}:\n{said[-2000:]}")


def launch(options, elastic, train, restarts=0):
    flags = ["--elastic", f"--restarts={restarts}"] if elastic else []
    command = [options.farwire, "launch", f"-n{options.ranks}", *flags, "--", options.farwire, "train", "--json"]
    return command + (["--elastic"] if elastic else []) + train.split()


def cost(options, folder):
    """Compares steps per second, by the reported steps; the first tenth does not count."""

    def speed(elastic):
        run, times = Run(launch(options, elastic, f"{options.train or SMALL} --steps {options.steps}"), folder), []
        for at, said in run.events():
            if said["event"] == "step":
                times.append(at)
        run.end()
        times = times[options.steps // 10 :]
        return (len(times) - 1) / (times[-1] - times[0])

    ratios = []
    for turn in range(options.rounds):
        # Being first may be an advantage, or a disadvantage.
        one, other = speed(turn % 2 == 0), speed(turn % 2 == 1)
        elastic, plain = (one, other) if turn % 2 == 0 else (other, one)
        ratios.append(elastic / plain)
        print(f"elastic {elastic:.1f}, plain {plain:.1f} steps/s: {ratios[-1]:.3f}", flush=True)
    print(f"{len(ratios)} rounds: median {statistics.median(ratios):.3f}, from {min(ratios):.3f} to {max(ratios):.3f}")


def loss(options, folder):
    for codec in options.codecs.split(","):
        undisturbed = None
        for kills in (0, 3):
            train = f"{options.train} --codec {codec} --report {codec.replace(':', '-')}-{kills}.html"
            run = Run(launch(options, True, train, restarts=kills), folder)
            left, whole, done, size = kills, True, 0, options.ranks
            for _, said in run.events():
                if said["event"] == "change":
                    whole = said["ranks"] == size
                if said["event"] == "step":
                    done = said["step"] + 1
                    if left and whole and done >= (kills - left + 1) * options.steps // (kills + 2):
                        # First the oldest, which is rank 0; then others.
                        ranks = run.ranks()
                        os.kill(ranks[0] if left == kills else ranks[len(ranks) // 2], signal.SIGKILL)
                        left, whole = left - 1, False
                if said["event"] == "summary":
                    summary = said
            run.end()
            changes = summary.get("changes", [])
            final = summary["final_loss"]
            undisturbed = undisturbed or final
            print(f"{codec}, {kills} kills: {done} steps, loss {final:.4f} ({100 * (final / undisturbed - 1):+.2f} %)", flush=True)
            for change in changes:
                print(f"    {change}", flush=True)


def join(options, folder):
    model = "--layers 4 --heads 4 --width 512 --context 16 --batch 3 --codec randk:0.001 --dense-steps 0 --falling-steps 0"
    train = ["train", "--json", "--steps", "100000", *(options.train or model).split()]
    command = [options.farwire, "netlab", "--hosts=4", f"--rate={options.rate}", f"--delay={options.delay}", "--", "sh", "-c", JOINER, "sh", options.farwire, *train]
    run = Run(command, folder, LAST="3", FARWIRE_LINK=options.link, FARWIRE_JOB="elastic-join")
    began = None
    try:
        for at, said in run.events():
            if said["event"] == "step" and began is None:
                open(os.path.join(folder, "join"), "w").close()
                began = at
            if said["event"] == "change":
                print(said["text"])
                parameters = options.parameters or 12 * 4 * 512 * 512
                state, seconds = 12 * parameters, said["synchronizing"]  # weights, and two moments
                line = float(re.match(r"[\d.]+", options.rate)[0]) * 1e6 / 8
                print(f"joined {at - began:.2f} s after it was started, a step included; of that {seconds:.2f} s for "
                      f"about {state / 1e6:.0f} MB of state: {state / seconds / line:.2f} of the line")
                break
    finally:
        run.process.terminate()
        run.process.communicate()


def cut(options, folder):
    addresses = ",".join(f"10.77.0.{host + 1}:29500" for host in range(5))
    train = f"train --json --audit --steps {options.steps} {options.train or '--layers 2 --heads 2 --width 16 --context 16 --batch 60'}"
    command = [options.farwire, "netlab", "--hosts=5", "--delay=10ms", "--partition=3,4@6s..16s", "--", "sh", "-c", AGAIN, "sh", options.farwire, *train.split()]
    began = time.monotonic()
    run = Run(command, folder, FARWIRE_LINK="quic", FARWIRE_JOB="elastic-cut", ADDRESSES=addresses)
    for at, said in run.events():
        if said["event"] in ("change", "text"):
            print(f"{at - began:6.2f} s: {said['text']}", flush=True)
        if said["event"] == "summary":
            print(f"{at - began:6.2f} s: {said['changes'][-1]}, after {len(said['changes']) - 1} changes", flush=True)
    for line in run.process.stderr:
        if "may have gone on" in line:
            print(line.strip()[:300])
    run.process.wait()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["cost", "loss", "join", "cut"])
    parser.add_argument("--farwire", default="target/release/farwire", help="the program")
    parser.add_argument("--ranks", type=int, help="how many; 2 for cost, 4 for loss")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--codecs", default="int8,topk:0.01")
    parser.add_argument("--train", default="", help="flags for `farwire train` instead of those of this script")
    parser.add_argument("--rate", default="200mbit")
    parser.add_argument("--delay", default="5ms")
    parser.add_argument("--link", default="quic")
    parser.add_argument("--parameters", type=int, default=0, help="of the model that --train says, for `join`")
    options = parser.parse_args()
    options.farwire = os.path.abspath(options.farwire)
    options.ranks = options.ranks or {"cost": 2}.get(options.what, 4)
    with tempfile.TemporaryDirectory() as folder:
        {"cost": cost, "loss": loss, "join": join, "cut": cut}[options.what](options, folder)


if __name__ == "__main__":
    main()
