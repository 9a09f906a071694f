#!/usr/bin/env python3
"""Kills, stops, slows and cuts off the ranks of a training job at random, and checks that it goes on. Linux.

    python3 scripts/chaos.py [--minutes 2] [--seed 1] [--ranks 5] [--links shm,quic,net] [--layout "--tp 2"]
                             [--faults stop,kill] [--json FILE] [--log FILE]

With shm and quic the job is `farwire launch --elastic -- farwire train --elastic`: the launcher starts a new rank for every
rank that is lost. With net, which needs root, it runs in `farwire netlab`: one host per rank, 2 ms apart, on a network that
loses 0.5 % of all packets in bursts; on each host a shell starts the program again when it ends. Faults come one after
another, each as soon as all ranks are back; the links take turns. The faults are:

    kill       a rank is killed with SIGKILL
    speaker    the oldest process is killed: usually rank 0, which reports progress
    two        two ranks are killed at once
    newcomer   a rank that has just been started is killed, before or while it joins
    stop       a rank is stopped for 6 s, longer than it may be silent, and then goes on
    pause      a rank is stopped for 0.3 s, which should change nothing
    slow       a rank runs only half of the time for 2 s, which should change nothing either
    leave      a rank is told to leave (SIGUSR1), and another process joins
    join       one process more than the job had joins, and is then told to leave
    full       the disk with the job's checkpoints is full for a while (needs root, to mount a small disk)
    cut        with net: some hosts, fewer than half, are cut off from the others for 5 s, in both directions
    mute       with net: everything that one host sends is lost for 5 s, while it still hears the others
    burst      with net: all packets are lost for 0.5 s, which should change nothing

The checks: after every step, all replicas have the same bits, and no gradient was lost or made up (`train --audit`). After
each fault that takes a rank, the group changes, and grows to its size again, within a minute; after others, except join, it
does not change. A rank that leaves hands over everything it owed. Open files and memory of each rank stay flat. At the end all
replicas have the same bits, and no process and no file is left behind. The first violation ends the script. The seed decides
the order of the faults; their exact times depend on the machine.
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

TRAIN = "train --layers 2 --heads 2 --width 16 --context 16 --batch 60 --codec int8 --steps 100000000 --json --audit --elastic"
PATIENCE = 60  # seconds, for anything
LAST_LINES = 60  # of the output, shown after a violation
CHECKPOINT_EVERY = 10
TAKES_A_RANK = {
    "kill": 1, "speaker": 1, "two": 2, "newcomer": 1, "stop": 1, "pause": 0, "slow": 0, "leave": 1, "join": 0, "full": 0,
    "cut": 1, "mute": 1, "burst": 0,
}
# How often a fault comes in one round of all of a link's faults.
WEIGHTS = {"speaker": 3, "kill": 3, "stop": 1}
ONLY = {"newcomer": "shm quic", "join": "shm quic", "cut": "net", "mute": "net", "burst": "net"}
# What no rank should ever say.
WRONG = ("audit after step", "panicked at")
# What a host of the laboratory does: takes part, and joins again whenever that ends without being told to stop.
HOST = """
export FARWIRE_PORT=29500 FARWIRE_FLIGHT_DIR= FARWIRE_JOIN_TIMEOUT=10s
"$@" --elastic --report $RANK.html; code=$?
while [ $code != 0 ] && [ $code != 143 ] && [ -e running ]; do
  env -u RANK -u WORLD_SIZE -u MASTER_ADDR -u MASTER_PORT "$@" --join $ADDRESSES --report $RANK.html; code=$?
done
"""


# Makes ranks log when they have a new group.
SAY = {"FARWIRE_LOG": "warn,farwire::elastic=info", "NO_COLOR": "1"}


class Violation(Exception):
    pass


class Job:
    """A launcher and its ranks, and the progress that they report."""

    def __init__(self, options, link, folder, train):
        self.size, self.options, self.folder, self.train = options.ranks, options, folder, train
        environment = {**os.environ, **SAY, "FARWIRE_LINK": link, "FARWIRE_FLIGHT_DIR": ""}
        command = [options.farwire, "launch", "--elastic", f"-n{self.size}", "--restarts=1000000", "--", options.farwire]
        self.launcher = subprocess.Popen(
            command + train.split(), cwd=folder, env=environment,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        self.watch()

    def watch(self):
        self.guests = []  # processes that joined and that the launcher did not start
        self.changed = threading.Condition()
        self.epoch, self.now, self.steps, self.changes, self.verdict = 0, self.size, 0, [], None
        self.noticed = []  # when ranks noticed that another is lost
        self.groups = []  # when ranks had a new group, its epoch, and its number of ranks
        self.wrong = None  # a line that no rank should print
        self.ears = []
        self.hear(self.launcher)

    def hear(self, process):
        """Reads a process's output, to its end."""
        for target, output in ((self.listen, process.stdout), (self.overhear, process.stderr)):
            self.ears.append(threading.Thread(target=target, args=[output], daemon=True))
            self.ears[-1].start()

    def overhear(self, output):
        """Reads the ranks' log lines, and copies them to the log."""
        for line in output:
            now = time.monotonic()
            if "a rank is lost" in line:
                self.noticed.append(now)
            elif group := re.search(r"a new group epoch=(\d+) rank=\d+ ranks=(\d+)", line):
                self.groups.append((now, int(group[1]), int(group[2])))
            elif any(text in line for text in WRONG):
                with self.changed:
                    self.wrong = line.strip()
                    self.changed.notify_all()
            self.options.log.write(line)
            self.options.log.flush()

    def listen(self, output):
        for line in output:
            start = line.find("{")
            if verdict := re.search(r'"at the end, ([^"]*)"', line):  # a summary may be very long
                with self.changed:
                    self.verdict = verdict[1]
                    self.changed.notify_all()
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
                self.changed.notify_all()

    def wait(self, condition, what):
        """Waits until a condition holds, which must not take long."""
        with self.changed:
            ended = lambda: self.wrong or self.launcher.poll() is not None
            if not self.changed.wait_for(lambda: condition() or ended(), PATIENCE):
                raise Violation(f"{what}: not within {PATIENCE} s")
        if self.launcher.poll() is not None:
            for ear in self.ears:  # the last output may not have been read yet
                ear.join(5)
        with self.changed:
            if self.wrong:
                raise Violation(self.wrong)
            if not condition():
                raise Violation(f"{what}: the launcher has ended with {self.launcher.returncode}")

    def is_whole(self):
        self.is_there(self.size)

    def is_there(self, size):
        """Waits until a group of this size makes steps."""
        steps, until = self.steps, time.monotonic() + PATIENCE
        while not (self.now == size and self.steps > steps + 1):
            self.replace_guests()
            if self.wrong:
                raise Violation(self.wrong)
            if time.monotonic() > until or self.launcher.poll() is not None:
                raise Violation(f"a group of {size}: not within {PATIENCE} s, or the launcher has ended")
            time.sleep(0.02)

    def has_ended(self, pid):
        """Waits until a process has ended."""
        until = time.monotonic() + PATIENCE
        while pid in self.ranks():
            if time.monotonic() > until:
                raise Violation(f"process {pid} has not ended within {PATIENCE} s")
            time.sleep(0.01)

    def replace_guests(self):
        """Starts a new guest for each one that has ended."""
        for guest in [guest for guest in self.guests if guest.poll() is not None]:
            self.guests.remove(guest)
            self.invite()

    def ranks(self):
        """The ranks' processes, the oldest first."""
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
        """Called when a rank has left: the launcher does not replace it, so this does."""
        if pid not in [guest.pid for guest in self.guests]:
            self.invite()

    def invite(self):
        """Starts a process that joins, by the addresses of all present ranks."""
        ports, environment = [], {}
        for pid in self.ranks():
            try:
                with open(f"/proc/{pid}/environ") as file:
                    found = dict(line.split("=", 1) for line in file.read().split("\0") if "=" in line)
            except OSError:
                continue  # it has just ended
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
        pipe = subprocess.PIPE
        guest = subprocess.Popen(command, cwd=self.folder, env=environment, stdout=pipe, stderr=pipe, text=True)
        self.hear(guest)
        self.guests.append(guest)
        return guest

    def end(self):
        self.launcher.send_signal(signal.SIGTERM)


class Laboratory(Job):
    """Hosts and the network between them."""

    def __init__(self, options, folder, train):
        self.size, self.options, self.folder, self.train = options.ranks, options, folder, train
        self.name = f"chaos-{os.getpid()}"
        addresses = ",".join(f"10.77.0.{host + 1}:29500" for host in range(self.size))
        environment = {**os.environ, **SAY, "FARWIRE_LINK": "quic", "FARWIRE_JOB": self.name, "ADDRESSES": addresses}
        open(os.path.join(folder, "running"), "w").close()
        fifo = os.path.join(folder, "control")
        os.mkfifo(fifo)
        self.control = os.fdopen(os.open(fifo, os.O_RDWR), "w")
        command = [options.farwire, "netlab", f"--hosts={self.size}", "--delay=2ms", "--loss=0.5%", "--burst=4", "--control", fifo]
        command += ["--", "sh", "-c", HOST, "sh", options.farwire, *train.replace(" --elastic", "").split()]
        self.launcher = subprocess.Popen(
            command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        self.watch()

    def cut(self, kind, chance):
        """Cuts the network."""
        count = {"cut": chance.randint(1, (self.size - 1) // 2), "mute": 1, "burst": self.size}[kind]
        hosts = chance.sample(range(self.size), count)
        lines = [f"cut {host} 0.5s" for host in hosts]  # each from all others
        if kind != "burst":
            lines = [f"{kind} {','.join(map(str, hosts))} 5s"]
        self.control.write("".join(line + "\n" for line in lines))
        self.control.flush()
        return hosts

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
        os.remove(os.path.join(self.folder, "control"))
        send(self.ranks()[0], signal.SIGTERM)  # it tells the others


def is_there(pid):
    return os.path.exists(f"/proc/{pid}")


def send(pid, what):
    try:
        os.kill(pid, what)
    except ProcessLookupError:
        pass


def fill_up(path):
    """Appends to a file until the disk is full. Returns how many bytes that took."""
    before = os.path.getsize(path) if os.path.exists(path) else 0
    try:
        with open(path, "ab", buffering=0) as file:
            while True:
                file.write(bytes(4096))
    except OSError:
        return os.path.getsize(path) - before


def load(pid):
    """The number of open files of a process, and its resident memory in kilobytes."""
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
        self.disk = self.disk_now = None  # a small disk for checkpoints, if it can be mounted, and this job's folder on it

    def train(self, link):
        """The arguments that a rank is started with."""
        train = f"{TRAIN} {self.options.layout}"
        if not self.disk:
            return train
        folder = os.path.join(self.disk, link)
        os.makedirs(folder, exist_ok=True)
        self.disk_now = folder
        return f"{train} --checkpoint {folder} --checkpoint-every {CHECKPOINT_EVERY}"

    def strike(self, job, kind, link):
        epoch, ranks = job.epoch, job.ranks()
        victims = self.random.sample(ranks, min(len(ranks), max(1, TAKES_A_RANK[kind])))
        if kind == "speaker":
            victims = ranks[:1]  # ranks are numbered in the order in which they joined
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
            # A guest leaves if there is one: the launcher would end without ranks of its own.
            victims = [guest.pid for guest in job.guests][:1] or victims
            send(victims[0], signal.SIGUSR1)
        elif kind == "full":
            self.fill(job)
        elif kind == "join":
            self.one_more(job, link, began)
            return
        elif kind in ("cut", "mute", "burst"):
            victims = job.cut(kind, self.random)
            if kind == "burst":
                time.sleep(0.5)
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
        # A rank that was stopped and goes on ends only when it finds out that it was given up.
        job.is_whole()
        if kind == "leave":
            job.has_ended(victims[0])  # otherwise the next fault might kill it before it has left
        fault = {"kind": kind, "link": link, "change": at - began, "whole": time.monotonic() - began}
        noticed = [when for when in job.noticed if when >= began]
        if noticed and kind not in ("leave", "pause", "slow", "full", "burst"):
            fault["detect"] = noticed[0] - began
        self.see_groups(job, kind, len(victims), began, at, fault)
        self.take_changes(job, kind, fault)

    def one_more(self, job, link, began):
        """An additional process joins, and leaves again."""
        size, guest = job.size, job.invite()
        print(f"chaos: {guest.pid} joins", file=self.options.log, flush=True)
        job.wait(lambda: job.now == size + 1, "one more")
        with job.changed:
            at = next(at for at, change in job.changes if change["ranks"] == size + 1)
        fault = {"kind": "join", "link": link, "change": at - began}
        job.is_there(size + 1)
        send(guest.pid, signal.SIGUSR1)
        job.wait(lambda: job.now == size, "one less")
        job.guests.remove(guest)
        if guest.wait(PATIENCE) != 128 + signal.SIGUSR1:
            raise Violation(f"one that was told to leave has ended with {guest.returncode}")
        job.is_whole()
        fault["whole"] = time.monotonic() - began
        self.take_changes(job, "leave", fault)

    def see_groups(self, job, kind, taken, began, at, fault):
        """When all surviving ranks had the group without the lost ones, and how long the lost step then took."""
        left = job.size - taken
        if kind not in ("kill", "speaker", "two", "stop", "cut", "mute"):
            return
        those = [(when, epoch) for when, epoch, ranks in job.groups if when >= began and ranks == left]
        first = [when for when, epoch in those if epoch == those[0][1]]
        if len(first) == left:
            fault["group"] = max(first) - began
            if at >= max(first):
                fault["again"] = at - max(first)

    def take_changes(self, job, kind, fault):
        with job.changed:
            joins = [change["synchronizing"] for _, change in job.changes if change["ranks"] > change["before"]]
            if joins:
                fault["join"] = max(joins)
            for _, change in job.changes:
                if "drifted" in change["text"]:
                    raise Violation(f"replicas have drifted: {change}")
                if kind == "leave" and "are lost" in change["text"]:
                    raise Violation(f"one that left has not handed over what it owed: {change}")
            del job.changes[:]
        del job.noticed[:], job.groups[:]
        self.faults.append(fault)

    def fill(self, job):
        """Fills the disk. Steps must go on, no checkpoint may be written, and one must be when there is room again."""
        filler = os.path.join(self.disk_now, "filler")
        # A checkpoint that already has its space is still completed, and frees space: an older one is then removed.
        for _ in range(20):
            before, steps, was_full = self.newest(), job.steps, fill_up(filler) == 0
            job.wait(lambda: job.steps > steps + CHECKPOINT_EVERY, "steps while the disk fills")
            if was_full and self.newest() == before:
                break
        steps = job.steps
        job.wait(lambda: job.steps > steps + 3 * CHECKPOINT_EVERY, "steps while the disk is full")
        if self.newest() != before:
            raise Violation("a checkpoint was written to a full disk")
        os.remove(filler)
        job.wait(lambda: self.newest() > before, "a checkpoint after the disk was full")

    def newest(self):
        """The step of the newest checkpoint. A checkpoint gets its final name when it is complete."""
        return max((int(name[5:]) for name in os.listdir(self.disk_now) if name.startswith("step-")), default=0)

    def look(self, job):
        """Checks open files and memory of ranks that have been there for a while."""
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
            job = Laboratory(self.options, folder, self.train(link))
        else:
            job = Job(self.options, link, folder, self.train(link))
        try:
            job.wait(lambda: job.steps > 2, "the first steps")
            kinds = [kind for kind in self.options.faults if link in ONLY.get(kind, link) and (self.disk or kind != "full")]
            if not kinds:
                raise Violation("none of these faults can be had here")
            deck = []
            while time.monotonic() < until:
                if not deck:
                    deck = [kind for kind in kinds for _ in range(WEIGHTS.get(kind, 2))]
                    self.random.shuffle(deck)
                self.strike(job, deck.pop(), link)
                self.look(job)
                print(f"\r{len(self.faults)} faults; {link}, epoch {job.epoch}, {job.steps} steps ", end="", file=sys.stderr, flush=True)
            ranks, steps = job.ranks(), job.steps
            job.end()
            job.wait(lambda: job.verdict is not None, "a summary")
            if job.verdict != "all replicas have the same bits":
                raise Violation(job.verdict)
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
        strange = [name for name in os.listdir(folder) if not name.endswith(".html") and name != "disk"]
        if self.disk_now:
            names = os.listdir(self.disk_now)
            strange += [name for name in names if not name.startswith("step-") and not name.endswith("lock")]
        if left or files or strange:
            raise Violation(f"left behind: processes {left}, files in /dev/shm {files}, and {strange}")
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
    parser.add_argument("--links", default="shm,quic", help="which links take turns; net:2 for twice as long")
    parser.add_argument("--faults", help="only these, with commas between")
    parser.add_argument("--layout", default="", help="more flags for `farwire train`, say --tp 2")
    parser.add_argument("--json", help="write all faults here")
    parser.add_argument("--log", help="write what all say here; without it, that is kept only after a violation")
    options = parser.parse_args()
    options.farwire = os.path.abspath(options.farwire)
    options.faults = options.faults.split(",") if options.faults else list(TAKES_A_RANK)
    if unknown := set(options.faults) - set(TAKES_A_RANK):
        parser.error(f"there is no fault {', '.join(unknown)}; there are {', '.join(TAKES_A_RANK)}")
    wanted, log = options.log, options.log or os.path.join(tempfile.gettempdir(), f"chaos-{os.getpid()}.log")
    options.log = open(log, "w")
    chaos, links = Chaos(options), {}
    for link in options.links.split(","):
        name, _, share = link.partition(":")
        links[name] = float(share or 1)
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
        until = begun
        for link, share in links.items():
            try:
                until += 60 * options.minutes * share / sum(links.values())
                steps = chaos.run(link, until, folder)
                print(f"\n{link}: {steps} steps", file=sys.stderr)
            except Violation as violation:
                verdict = f"seed {options.seed}, {link}, after {len(chaos.faults)} faults: {violation}"
                break
    print(f"{len(chaos.faults)} faults in {(time.monotonic() - begun) / 60:.1f} minutes, seed {options.seed}")
    counts = {kind: sum(fault["kind"] == kind for fault in chaos.faults) for kind in TAKES_A_RANK}
    print(", ".join(f"{kind} {count}" for kind, count in counts.items()))
    print("p50, p99, max in seconds, from the fault, of:")
    print("| link | fault | count | a rank notices | all that are left have the new group | after that: state and a step | a step of the changed group | all are there again | of that, giving one that joined the state |")
    print("|---|---|---|---|---|---|---|---|---|")
    for link in links:
        for kind in TAKES_A_RANK:
            those = [fault for fault in chaos.faults if (fault["link"], fault["kind"]) == (link, kind)]
            if those:
                columns = []
                for name in ("detect", "group", "again", "change", "whole", "join"):
                    times = [fault[name] for fault in those if name in fault and (name != "change" or fault[name])]
                    shown = (statistics.median(times), quantile(times, 0.99), max(times)) if times else ()
                    columns.append(", ".join(f"{x:.3f}" for x in shown) or "-")
                print(f"| {link} | {kind} | {len(those)} | {' | '.join(columns)} |")
    if options.json:
        with open(options.json, "w") as file:
            about = {"seed": options.seed, "minutes": (time.monotonic() - begun) / 60, "ranks": options.ranks, "layout": options.layout}
            json.dump({**about, "faults": chaos.faults, "violation": verdict}, file, indent=1)
    options.log.flush()
    if verdict:
        with open(log) as file:
            print("what was said last:", *file.read().splitlines()[-LAST_LINES:], sep="\n", file=sys.stderr)
        sys.exit(f"violation: {verdict}; all that was said is in {log}")
    if not wanted:
        os.remove(log)
    print("no violation")


if __name__ == "__main__":
    main()
