#!/usr/bin/env python3
"""One rank of three is killed, and another started at once: how long farwire and others stand still. Linux.

    python3 scripts/survive_peers.py [--rounds 5] [--farwire PATH]

Needs `pip install torch torchft` and a built `farwire`; PCCL takes part if `import pccl` works. All train a model of about
0.8 million parameters in three processes on this host. torchft also runs a lighthouse, and each of its processes is a
replica group of its own over Gloo; PCCL also runs its master.
Prints medians and maxima over rounds: seconds from the kill to the next step of the others, and to the first step of all
three. All are started with their defaults, except for torchft's timeout of operations (5 s instead of 60) and the time that
its lighthouse waits for joining processes (1 s instead of 60): those alone would decide the result.
"""

import argparse
import functools
import importlib.util
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time

RANKS = 3
TRAIN = "train --layers 4 --heads 4 --width 128 --context 32 --batch 12 --codec none --steps 1000000 --json --elastic"


def replica():
    """A process of torchft's job: reports when each step has ended, and how many took part."""
    from datetime import timedelta

    import torch
    from torch.distributed import TCPStore
    from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

    torch.set_num_threads(1)
    torch.manual_seed(0)
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    model = torch.nn.Sequential(torch.nn.Linear(256, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 512))
    adam = torch.optim.AdamW(model.parameters())

    def load(state):
        model.load_state_dict(state["model"])
        adam.load_state_dict(state["adam"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=5)),
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "adam": adam.state_dict()},
        min_replica_size=1,
        timeout=timedelta(seconds=5),
        rank=0,
        world_size=1,
        store_addr="localhost",
        store_port=store.port,
    )
    wrapped, optimizer = DistributedDataParallel(manager, model), Optimizer(manager, adam)
    while True:
        optimizer.zero_grad()
        inputs = torch.randn(384, 256)
        wrapped(inputs).square().mean().backward()
        optimizer.step()
        print(json.dumps({"event": "step", "ranks": manager.num_participants()}), flush=True)


def pccl_peer():
    """A process of PCCL's job, as in PCCL's own example of data parallelism."""
    import pccl
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(256, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 512))
    adam = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    adam.step()
    tensors = {}
    for name, parameter in model.named_parameters():
        moments = adam.state[parameter]
        tensors |= {name: parameter.data, f"{name}.first": moments["exp_avg"], f"{name}.second": moments["exp_avg_sq"]}
    state = pccl.SharedState([pccl.TensorInfo.from_torch(tensor, name) for name, tensor in tensors.items()])
    group = pccl.Communicator(os.environ["PCCL_MASTER"], 0)
    group.connect(n_attempts=15)
    first = True
    while True:
        try:
            if not first:
                group.update_topology()
            first = False
            if (ranks := group.get_attribute(pccl.Attribute.GLOBAL_WORLD_SIZE)) < 2:
                time.sleep(0.01)
                continue
            group.sync_shared_state(state)
        except pccl.PCCLError:
            continue
        adam.zero_grad()
        model(torch.randn(384, 256)).square().mean().backward()
        gradient = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
        mean = torch.empty_like(gradient)
        while ranks > 1 and not group.all_reduce_async(gradient, mean, op=pccl.ReduceOp.AVG, tag=0).wait()[0]:
            ranks = group.get_attribute(pccl.Attribute.GLOBAL_WORLD_SIZE)
        at = 0
        for parameter in model.parameters():
            parameter.grad.copy_(mean[at : at + parameter.numel()].view_as(parameter))
            at += parameter.numel()
        adam.step()
        state.revision += 1
        print(json.dumps({"event": "step", "ranks": group.get_attribute(pccl.Attribute.GLOBAL_WORLD_SIZE)}), flush=True)


class Steps:
    """Waits for steps of a number of ranks, as reported by any process."""

    def __init__(self):
        self.changed, self.ranks, self.count, self.told = threading.Condition(), 0, 0, set()

    def listen(self, output):
        for line in output:
            start = line.find("{")
            try:
                said = json.loads(line[start:]) if start >= 0 else {}
            except ValueError:
                continue
            with self.changed:
                if said.get("event") == "change":
                    self.ranks = said["ranks"]
                    self.told.add(self.ranks)  # two changes may both be reported before the step
                elif said.get("event") == "step":
                    self.ranks, self.count = said.get("ranks", self.ranks), self.count + 1
                self.changed.notify_all()

    def wait(self, ranks, steps=1):
        """Waits until a group of exactly this many ranks has made `steps` steps from now on."""
        with self.changed:
            done, until = 0, time.monotonic() + 120
            while done < steps:
                before = self.count
                if not self.changed.wait_for(lambda: self.count > before, until - time.monotonic()):
                    raise TimeoutError(f"no step of {ranks} ranks within two minutes")
                done += self.ranks == ranks or ranks in self.told


def start(command, steps, **environment):
    process = subprocess.Popen(command, env={**os.environ, **environment}, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    threading.Thread(target=steps.listen, args=[process.stdout], daemon=True).start()
    return process


def measure(steps, kill):
    steps.wait(RANKS, 5)
    steps.told.clear()
    began = time.monotonic()
    kill()
    steps.wait(RANKS - 1)
    gap = time.monotonic() - began
    steps.told.clear()
    steps.wait(RANKS)
    return gap, time.monotonic() - began


def torchft():
    lighthouse = subprocess.Popen(
        [sys.executable, "-c", "import time\nfrom torchft.coordination import LighthouseServer\n"
         "server = LighthouseServer(bind='[::]:0', min_replicas=1, join_timeout_ms=1000)\n"
         "print(server.address(), flush=True)\ntime.sleep(3600)"],
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    )
    steps, address = Steps(), lighthouse.stdout.readline().strip()
    one = lambda: start([sys.executable, __file__, "--replica"], steps, TORCHFT_LIGHTHOUSE=address)
    processes = [one() for _ in range(RANKS)]

    def kill():
        processes.pop(0).kill()
        processes.append(one())

    try:
        return measure(steps, kill)
    finally:
        for process in [*processes, lighthouse]:
            process.kill()
            process.wait()


def pccl():
    address = f"127.0.0.1:{48000 + os.getpid() % 1000}"
    master = subprocess.Popen(
        [sys.executable, "-c", f"import pccl\npccl.MasterNode(listen_address='{address}').run()"],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )
    time.sleep(2)
    steps = Steps()
    one = lambda: start([sys.executable, __file__, "--pccl-peer"], steps, PCCL_MASTER=address)
    processes = [one() for _ in range(RANKS)]

    def kill():
        processes.pop(0).kill()
        processes.append(one())

    try:
        return measure(steps, kill)
    finally:
        for process in [*processes, master]:
            process.kill()
            process.wait()


def farwire(program, link, folder):
    steps = Steps()
    steps.ranks = RANKS
    command = [program, "launch", "--elastic", f"-n{RANKS}", "--", program, *TRAIN.split(), "--report", f"{folder}/report.html"]
    launcher = start(command, steps, FARWIRE_LINK=link, FARWIRE_FLIGHT_DIR="")

    def kill():
        found = subprocess.run(["pgrep", "-P", str(launcher.pid)], capture_output=True, text=True).stdout.split()
        os.kill(int(found[1]), signal.SIGKILL)

    try:
        return measure(steps, kill)
    finally:
        launcher.kill()  # its ranks end with it
        launcher.wait()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--farwire", default="target/release/farwire", help="the program")
    parser.add_argument("--replica", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--pccl-peer", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.replica:
        return replica()
    if options.pccl_peer:
        return pccl_peer()
    program, found = os.path.abspath(options.farwire), {}
    with tempfile.TemporaryDirectory() as folder:
        jobs = {f"farwire, {link}": functools.partial(farwire, program, link, folder) for link in ("shm", "quic")}
        others = {name: job for name, job in (("torchft", torchft), ("PCCL", pccl)) if importlib.util.find_spec(name.lower())}
        for _, (name, job) in itertools.product(range(options.rounds), (others | jobs).items()):
            try:
                found.setdefault(name, []).append(job())
            except TimeoutError as error:
                print(f"{name}: {error}", file=sys.stderr, flush=True)
    print("| | next step of the others, s: median, most | first step of all three, s: median, most |\n|---|---|---|")
    for name, times in found.items():
        cells = [f"{statistics.median(column):.2f}, {max(column):.2f}" for column in zip(*times)]
        print(f"| {name} | {cells[0]} | {cells[1]} |")


if __name__ == "__main__":
    main()
