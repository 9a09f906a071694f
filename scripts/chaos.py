#!/usr/bin/env python3
"""Kills, stops, slows and cuts off the ranks of a training job at random, and checks that it goes on. Linux.

    python3 scripts/chaos.py [--minutes 2] [--seed 1] [--ranks 5] [--links shm,quic,net] [--farwire PATH] [--json FILE]

With shm and quic the job is `farwire launch --elastic -- farwire train --elastic`: the launcher starts a rank for every one
that is lost. With net, which needs root, it is `farwire netlab`: a host for each rank, 2 ms apart, that loses 0.5 % of all
packets in bursts; on each host a shell starts the program again when it ends. Faults come one after another, as soon as all
ranks are there again, and the links take turns. They are:

    kill       a rank, with SIGKILL
    speaker    the oldest process, which as a rule shows how it goes: rank 0 at first
    two        two ranks at once
    newcomer   a rank that has just been started, before or while it joins
    stop       a rank is stopped for 6 s, longer than it may be silent, and then goes on
    pause      a rank is stopped for 0.3 s, which nobody should mind
    slow       a rank runs half of the time for 2 s, which nobody should mind either
    leave      a rank is told to leave (SIGUSR1), and another process joins
    full       the disk with the job's checkpoints is full for a while (as root, who can make a small disk)
    cut        with net: one host or two hear nothing from the others for 5 s, and nobody hears them

Checked: the group changes after each fault that takes a rank, and grows to its size again, within a minute; nothing
changes after one that does not; no rank that got the state had drifted; files and memory of each rank stay flat; at the
end all replicas have the same bits, and no process, and no file in /dev/shm, stays behind. The first violation ends it.
"""

import argparse
import contextlib
import json
import os
import random
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time

TRAIN = "train --layers 2 --heads 2 --width 16 --context 16 --batch 60 --codec int8 --steps 100000000 --json --elastic"
PATIENCE = 60  # seconds, for anything
CHECKPOINT_EVERY = 10
TAKES_A_RANK = {"kill": 1, "speaker": 1, "two": 2, "newcomer": 1, "stop": 1, "pause": 0, "slow": 0, "leave": 1, "full": 0, "cut": 1}
# With net: seconds from one cut to the next, how long it lasts, and how long before it nothing else is begun.
CUT_EVERY, CUT, CUT_REST = 16, 5, 5
# What a host of the laboratory does: takes part, and joins again whenever that ends and nobody had said to stop.
HOST = """
export FARWIRE_PORT=29500 FARWIRE_FLIGHT_DIR= FARWIRE_JOIN_TIMEOUT=10s
"$@" --elastic --report $RANK.html; code=$?
while [ $code != 0 ] && [ $code != 143 ] && [ -e running ]; do
  env -u RANK -u WORLD_SIZE -u MASTER_ADDR -u MASTER_PORT "$@" --join $ADDRESSES --report $RANK.html; code=$?
done
"""


class Violation(Exception):
    pass


class Job:
    """A launcher and its ranks, and what the one that speaks has said."""

    def __init__(self, options, link, folder, train):
        self.size, self.options, self.folder, self.train = options.ranks, options, folder, train
        environment = {**os.environ, "FARWIRE_LINK": link, "FARWIRE_FLIGHT_DIR": ""}
        command = [options.farwire, "launch", "--elastic", f"-n{self.size}", "--restarts=1000000", "--", options.farwire]
        self.launcher = subprocess.Popen(
            command + train.split(), cwd=folder, env=environment,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        self.watch()

    def watch(self):
        self.guests = []  # processes that join and are not the launcher's
        self.changed = threading.Condition()
        self.epoch, self.now, self.steps, self.changes, self.summary = 0, self.size, 0, [], None
        self.noticed = []  # when ranks found that another is lost
        threading.Thread(target=self.listen, args=[self.launcher.stdout], daemon=True).start()
        threading.Thread(target=self.overhear, args=[self.launcher.stderr], daemon=True).start()

    def overhear(self, output):
        """What ranks say of their trouble, which also goes to the log."""
        for line in output:
            if "a rank is lost" in line:
                self.noticed.append(time.monotonic())
            self.options.log.write(line)
            self.options.log.flush()

    def listen(self, output):
        for line in output:
            start = line.find("{")
            if start < 0:
                continue
            try:
                said = json.loads(line[start:])
            except ValueError:
                continue
            with self.changed:
                if said.get("event") == "step":
                    self.steps += 1
                elif said.get("event") == "change" and said["epoch"] > self.epoch:
                    self.epoch, self.now = said["epoch"], said["ranks"]
                    self.changes.append((time.monotonic(), said))
                elif said.get("event") == "summary":
                    self.summary = said
                self.changed.notify_all()

    def wait(self, condition, what):
        """Until something is so, which must not take long."""
        with self.changed:
            if not self.changed.wait_for(lambda: condition() or self.launcher.poll() is not None, PATIENCE):
                raise Violation(f"{what}: not within {PATIENCE} s")
            if not condition():
                raise Violation(f"{what}: the launcher has ended with {self.launcher.returncode}")

    def is_whole(self):
        steps, until = self.steps, time.monotonic() + PATIENCE
        while not (self.now == self.size and self.steps > steps + 1):
            self.replace_guests()
            if time.monotonic() > until or self.launcher.poll() is not None:
                raise Violation(f"a group of {self.size}: not within {PATIENCE} s, or the launcher has ended")
            time.sleep(0.02)

    def replace_guests(self):
        """Starts another for each that has ended and is not the launcher's."""
        for guest in [guest for guest in self.guests if guest.poll() is not None]:
            self.guests.remove(guest)
            self.invite()

    def ranks(self):
        """The processes, the oldest first."""
        found = []
        for name in os.listdir("/proc"):
            try:
                with open(f"/proc/{name}/stat") as file:
                    fields = file.read().rsplit(") ", 1)[1].split()
                if self.is_rank(int(name), int(fields[1])) and fields[0] != "Z":
                    found.append((int(fields[19]), int(name)))
            except (OSError, IndexError, ValueError):
                pass
        return [pid for _, pid in sorted(found)]

    def is_rank(self, pid, parent):
        return parent == self.launcher.pid or pid in [guest.pid for guest in self.guests]

    def left(self, pid):
        """One has left. The launcher starts nobody in its place."""
        if pid not in [guest.pid for guest in self.guests]:
            self.invite()

    def invite(self):
        """Starts a process that joins, by the addresses of all that are there."""
        ports, environment = [], {}
        for pid in self.ranks():
            with open(f"/proc/{pid}/environ") as file:
                found = dict(line.split("=", 1) for line in file.read().split("\0") if "=" in line)
            if pid not in [guest.pid for guest in self.guests]:
                environment = found
            ports.append(found.get("FARWIRE_PORT"))
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.bind(("127.0.0.1", 0))
            environment["FARWIRE_PORT"] = str(probe.getsockname()[1])
        for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "FARWIRE_JOIN"):
            environment.pop(name, None)
        addresses = ",".join(f"127.0.0.1:{port}" for port in ports if port)
        command = [self.options.farwire, *self.train.replace("--elastic", f"--join {addresses}").split()]
        guest = subprocess.Popen(command, cwd=self.folder, env=environment, stdout=subprocess.PIPE, stderr=self.options.log, text=True)
        threading.Thread(target=self.listen, args=[guest.stdout], daemon=True).start()
        self.guests.append(guest)

    def end(self):
        self.launcher.send_signal(signal.SIGTERM)

    def next_cut(self):
        """When the network is cut next; never, here."""
        return float("inf")


class Laboratory(Job):
    """Hosts and the network between them."""

    def __init__(self, options, folder, train, chance, seconds):
        self.size, self.options, self.folder, self.train = options.ranks, options, folder, train
        self.name = f"chaos-{os.getpid()}"
        addresses = ",".join(f"10.77.0.{host + 1}:29500" for host in range(self.size))
        environment = {**os.environ, "FARWIRE_LINK": "quic", "FARWIRE_JOB": self.name, "ADDRESSES": addresses}
        open(os.path.join(folder, "running"), "w").close()
        cuts = []
        for at in range(CUT_EVERY, int(seconds) + CUT_EVERY, CUT_EVERY):
            hosts = chance.sample(range(self.size), chance.randint(1, (self.size - 1) // 2))
            cuts += ["--partition", f"{','.join(map(str, hosts))}@{at}s..{at + CUT}s"]
        command = [options.farwire, "netlab", f"--hosts={self.size}", "--delay=2ms", "--loss=0.5%", "--burst=4", *cuts]
        command += ["--", "sh", "-c", HOST, "sh", options.farwire, *train.replace(" --elastic", "").split()]
        self.began = time.monotonic()
        self.launcher = subprocess.Popen(
            command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        self.watch()

    def is_rank(self, pid, parent):
        with open(f"/proc/{pid}/cmdline") as file:
            if not file.read().startswith(f"{self.options.farwire}\0train"):
                return False
        with open(f"/proc/{pid}/environ") as file:
            return f"FARWIRE_JOB={self.name}\0" in file.read()

    def left(self, pid):
        pass  # its host starts it again

    def end(self):
        os.remove(os.path.join(self.folder, "running"))
        send(self.ranks()[0], signal.SIGTERM)  # which tells the others

    def next_cut(self):
        since = time.monotonic() - self.began
        return max(1, -(-since // CUT_EVERY)) * CUT_EVERY - since


def is_there(pid):
    return os.path.exists(f"/proc/{pid}")


def send(pid, what):
    try:
        os.kill(pid, what)
    except ProcessLookupError:
        pass


def load(pid):
    """Open files and resident kilobytes of a process."""
    try:
        with open(f"/proc/{pid}/status") as file:
            memory = int(re.search(r"VmRSS:\s*(\d+)", file.read()).group(1))
        return len(os.listdir(f"/proc/{pid}/fd")), memory
    except (OSError, AttributeError):
        return None


class Chaos:
    def __init__(self, options):
        self.options = options
        self.random = random.Random(options.seed)
        self.faults = []
        self.seen, self.loads = {}, {}
        self.disk = self.disk_now = None  # for checkpoints, where one can be made, and those of this job

    def train(self, link):
        """What a rank is started with."""
        if not self.disk:
            return TRAIN
        folder = os.path.join(self.disk, link)
        os.makedirs(folder, exist_ok=True)
        self.disk_now = folder
        return f"{TRAIN} --checkpoint {folder} --checkpoint-every {CHECKPOINT_EVERY}"

    def strike(self, job, kind, link):
        epoch, ranks = job.epoch, job.ranks()
        victims = self.random.sample(ranks, min(len(ranks), max(1, TAKES_A_RANK[kind])))
        if kind == "speaker":
            victims = ranks[:1]  # ranks are numbered in the order in which they came
        began = time.monotonic()
        print(f"chaos: {time.strftime('%T')} {kind} of {victims} of {ranks}", file=self.options.log, flush=True)
        if kind in ("kill", "speaker", "two"):
            for victim in victims:
                send(victim, signal.SIGKILL)
        elif kind == "newcomer":
            send(victims[0], signal.SIGKILL)
            while not (young := [pid for pid in job.ranks() if pid not in ranks]):
                job.replace_guests()
                if time.monotonic() > began + PATIENCE:
                    raise Violation("nobody was started for a rank that was killed")
                time.sleep(0.01)
            time.sleep(self.random.uniform(0, 0.6))
            send(young[0], signal.SIGKILL)
        elif kind == "leave":
            # Of the launcher's own, one leaves: without any it would end.
            victims = [guest.pid for guest in job.guests][:1] or victims
            send(victims[0], signal.SIGUSR1)
        elif kind == "full":
            self.fill(job)
        elif kind == "cut":
            time.sleep(max(0, job.next_cut()))
            began = time.monotonic()
        elif kind in ("stop", "pause"):
            send(victims[0], signal.SIGSTOP)
            time.sleep(6 if kind == "stop" else 0.3)
            send(victims[0], signal.SIGCONT)
        elif kind == "slow":
            for _ in range(20):
                send(victims[0], signal.SIGSTOP)
                time.sleep(0.05)
                send(victims[0], signal.SIGCONT)
                time.sleep(0.05)
        if TAKES_A_RANK[kind]:
            job.wait(lambda: job.epoch > epoch, f"a change after {kind}")
            with job.changed:
                at = next(at for at, change in job.changes if change["epoch"] > epoch)
        else:
            time.sleep(0.2)
            if job.epoch != epoch:
                raise Violation(f"the group has changed after {kind}: {job.changes[-1]}")
            at = began
        if kind == "leave":
            job.left(victims[0])
        # One that was stopped and goes on ends only when it finds out that it was given up.
        job.is_whole()
        fault = {"kind": kind, "link": link, "change": at - began, "whole": time.monotonic() - began}
        detected = [when for when in job.noticed if when >= began]
        if detected and TAKES_A_RANK[kind]:
            fault["detect"] = detected[0] - began
        with job.changed:
            joins = [change["synchronizing"] for _, change in job.changes if change["ranks"] > change["before"]]
            if joins:
                fault["join"] = max(joins)
        self.faults.append(fault)
        del job.noticed[:]
        with job.changed:
            for _, change in job.changes:
                if "drifted" in change["text"]:
                    raise Violation(f"replicas have drifted: {change}")
            del job.changes[:]

    def fill(self, job):
        """Fills the disk, and sees that steps go on, no checkpoint is written, and one is when there is room again."""
        filler = os.path.join(self.disk_now, "filler")
        try:
            with open(filler, "wb", buffering=0) as file:
                while True:
                    file.write(bytes(4096))
        except OSError:
            pass
        before, steps = self.newest(), job.steps
        job.wait(lambda: job.steps > steps + 3 * CHECKPOINT_EVERY, "steps while the disk is full")
        if self.newest() != before:
            raise Violation("a checkpoint was written to a full disk")
        os.remove(filler)
        job.wait(lambda: self.newest() > before, "a checkpoint after the disk was full")

    def newest(self):
        """The step of the newest checkpoint; they are made under other names, and whole once they have theirs."""
        return max((int(name[5:]) for name in os.listdir(self.disk_now) if name.startswith("step-")), default=0)

    def look(self, job):
        """Files and memory of ranks that have been there for a while."""
        for pid in job.ranks():
            now, seen = load(pid), self.seen.setdefault(pid, time.monotonic())
            if now is None or time.monotonic() < seen + 5:  # while it joins, it grows
                continue
            first = self.loads.setdefault(pid, (time.monotonic(), now, job.epoch))
            files, memory = now[0] - first[1][0], now[1] - first[1][1]
            if files > 20 or memory > 100_000:
                raise Violation(f"process {pid} has {files} files and {memory} kB more than {time.monotonic() - first[0]:.0f} s ago")

    def run(self, link, until, folder):
        before = set(os.listdir("/dev/shm"))
        if link == "net":
            job = Laboratory(self.options, folder, self.train(link), self.random, until - time.monotonic())
        else:
            job = Job(self.options, link, folder, self.train(link))
        try:
            job.wait(lambda: job.steps > 2, "the first steps")
            weights = {"speaker": 3, "kill": 3, "stop": 1, "cut": 0}
            kinds = [kind for kind in TAKES_A_RANK for _ in range(weights.get(kind, 2))]
            if not self.disk:
                kinds.remove("full"), kinds.remove("full")
            if link == "net":
                kinds = [kind for kind in kinds if kind not in ("stop", "newcomer")]  # they take too long between two cuts
            while time.monotonic() < until:
                self.strike(job, "cut" if job.next_cut() < CUT_REST else self.random.choice(kinds), link)
                self.look(job)
                print(f"\r{len(self.faults)} faults; {link}, epoch {job.epoch}, {job.steps} steps ", end="", file=sys.stderr, flush=True)
            ranks, steps = job.ranks(), job.steps
            job.end()
            job.wait(lambda: job.summary is not None, "a summary")
            last = job.summary["changes"][-1]
            if last != "at the end, all replicas have the same bits":
                raise Violation(last)
            for process in [job.launcher, *job.guests]:
                process.wait(PATIENCE)
        finally:
            left = job.ranks()
            if job.launcher.poll() is None:
                job.launcher.terminate() if link == "net" else job.launcher.kill()  # the laboratory clears up
            for pid in left:
                send(pid, signal.SIGKILL)
        left = [pid for pid in ranks if is_there(pid)]
        files = {name for name in os.listdir("/dev/shm") if "farwire" in name} - before
        if left or files:
            raise Violation(f"left behind: processes {left}, files in /dev/shm {files}")
        return steps


def quantile(values, share):
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--farwire", default="target/release/farwire", help="the program")
    parser.add_argument("--minutes", type=float, default=2)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--ranks", type=int, default=5)
    parser.add_argument("--links", default="shm,quic", help="which links take turns")
    parser.add_argument("--json", help="write all faults here")
    parser.add_argument("--log", type=argparse.FileType("w"), default=os.devnull, help="write what all say here")
    options = parser.parse_args()
    options.farwire = os.path.abspath(options.farwire)
    chaos, links = Chaos(options), options.links.split(",")
    begun, verdict = time.monotonic(), None
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        if os.geteuid() == 0:
            chaos.disk = os.path.join(folder, "disk")
            os.mkdir(chaos.disk)
            if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "chaos", chaos.disk]).returncode:
                chaos.disk = None
                print("without a full disk: a small one could not be mounted", file=sys.stderr)
            else:
                stack.callback(subprocess.run, ["umount", "--lazy", chaos.disk])
        for turn, link in enumerate(links):
            try:
                until = begun + 60 * options.minutes * (turn + 1) / len(links)
                steps = chaos.run(link, until, folder)
                print(f"\n{link}: {steps} steps", file=sys.stderr)
            except Violation as violation:
                verdict = f"seed {options.seed}, {link}, after {len(chaos.faults)} faults: {violation}"
                break
    print(f"{len(chaos.faults)} faults in {(time.monotonic() - begun) / 60:.1f} minutes, seed {options.seed}")
    print("| link | fault | count | until a rank notices: p50, p99, max | until the group has changed | until it is whole again | of that, giving one that joined the state |")
    print("|---|---|---|---|---|---|---|")
    for link in links:
        for kind in TAKES_A_RANK:
            those = [fault for fault in chaos.faults if (fault["link"], fault["kind"]) == (link, kind)]
            if those:
                columns = []
                for name in ("detect", "change", "whole", "join"):
                    times = [fault[name] for fault in those if name in fault]
                    shown = (statistics.median(times), quantile(times, 0.99), max(times)) if times else ()
                    columns.append(", ".join(f"{x:.3f}" for x in shown) or "-")
                print(f"| {link} | {kind} | {len(those)} | {' | '.join(columns)} |")
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"seed": options.seed, "faults": chaos.faults, "violation": verdict}, file, indent=1)
    if verdict:
        sys.exit(f"violation: {verdict}")
    print("no violation")


if __name__ == "__main__":
    main()
