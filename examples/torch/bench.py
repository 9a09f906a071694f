"""How long a training step takes with different ways of exchanging the gradients.

Between two hosts of a lab on this machine (needs root):

    farwire netlab --hosts 2 --rate 100mbit -- python examples/torch/bench.py

Or between real hosts, with any launcher. It trains a GPT of about 50 million parameters on batches
of 1 x 64 tokens, without a phase-in, and prints the median step for each way of exchanging
gradients; communication is the extra time compared with a step whose hook does nothing. The ways
take turns in --rounds, so that a machine that is busy for a while is not unfair to one of them.
plot.py draws the file that --json writes. To compare losses, use a small model and many steps:

    … bench.py --width 128 --layers 4 --batch 8 --rate 0.1 --momentum 0.9 --steps 200
"""

import argparse
import json
import os
import statistics
import time

import torch
import torch.distributed as dist
from gpt import GPT, batch_of
from gpt import __file__ as gpt_file
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import farwire
import farwire.torch

WAYS = ["nothing", "gloo", "gloo fp16", "gloo powersgd:4"]
WAYS += [f"farwire {codec}" for codec in ("none", "int8", "powersgd:4", "topk:0.01")]


def do_nothing(_, bucket):
    """A hook for measuring a step without communication."""
    future = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def set_hook(model, way, comm):
    """Makes a model exchange its gradients in one of the ways."""
    if way == "nothing":
        model.register_comm_hook(None, do_nothing)
    elif way == "gloo fp16":
        model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    elif way.startswith("gloo powersgd"):
        rank = int(way.rpartition(":")[2])
        state = powerSGD_hook.PowerSGDState(
            process_group=None, matrix_approximation_rank=rank, start_powerSGD_iter=2
        )
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    elif way.startswith("farwire"):
        state = farwire.torch.State(comm, way.split()[1], phase_in=(0, 0))
        model.register_comm_hook(state, farwire.torch.hook)


def sent_by_host():
    """Bytes that this host has sent, on all devices except loopback."""
    with open("/proc/net/dev") as file:
        lines = [line.replace(":", " ").split() for line in file.readlines()[2:]]
    return sum(int(line[9]) for line in lines if line[0] != "lo")


def measure(way, comm, chosen):
    """For each step, the seconds on the slowest rank and the bytes sent; the loss at the end."""
    torch.manual_seed(0)
    # torch's PowerSGD starts its later rounds from callbacks, and Gloo's threads do not keep their
    # order: with more than one bucket, ranks mix the buckets up.
    options = {"bucket_cap_mb": 1 << 12} if way.startswith("gloo powersgd") else {}
    gpt = GPT(chosen.width, chosen.layers, heads=chosen.width // 64)
    # All ranks have the same seed, and so the same weights.
    model = DistributedDataParallel(gpt, init_sync=False, **options)
    set_hook(model, way, comm)
    optimizer = torch.optim.SGD(model.parameters(), lr=chosen.rate, momentum=chosen.momentum)
    generator = torch.Generator().manual_seed(comm.rank)
    with open(gpt_file, "rb") as file:
        text = torch.frombuffer(bytearray(file.read()), dtype=torch.uint8)
    seconds, sent, losses = [], [], []
    for step in range(chosen.warm_up + chosen.steps):
        tokens, targets = batch_of(text, chosen.batch, 64, generator)
        comm.barrier()
        before, began = sent_by_host(), time.perf_counter()
        loss = torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        slowest = torch.tensor([time.perf_counter() - began])
        comm.all_reduce(slowest, op="max")
        comm.all_reduce(mean := loss.detach().reshape(1), op="mean")
        losses.append(mean.item())
        if step >= chosen.warm_up:
            seconds.append(slowest.item())
            sent.append(sent_by_host() - before)
    return seconds, sent, statistics.mean(losses[-max(1, len(losses) // 5) :])


def show(way, figures):
    """Prints a line for a way, compared with the step that exchanges nothing."""
    step, sent, loss = figures[way]
    print(
        f"{way:18} step {step:7.3f} s   communication {step - figures['nothing'][0]:7.3f} s   "
        f"sent {sent / 1e6:7.2f} MB   loss {loss:.3f}",
        flush=True,
    )


def main():
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--width", type=int, default=640)
    arguments.add_argument("--layers", type=int, default=10)
    arguments.add_argument("--batch", type=int, default=1, help="of 64 tokens each")
    arguments.add_argument("--rate", type=float, default=0.01, help="of learning")
    arguments.add_argument("--steps", type=int, default=5)
    arguments.add_argument("--momentum", type=float, default=0.0)
    arguments.add_argument("--warm-up", type=int, default=3)
    arguments.add_argument("--rounds", type=int, default=1, help="in which ways take turns")
    arguments.add_argument("--ways", default=",".join(WAYS))
    arguments.add_argument("--json", help="a file for the figures")
    chosen = arguments.parse_args()

    comm = farwire.init()
    os.environ.update(RANK=str(comm.rank), WORLD_SIZE=str(comm.size))
    dist.init_process_group("gloo")
    ways = ["nothing", *(way for way in chosen.ways.split(",") if way != "nothing")]
    figures, seconds, sent = {}, {way: [] for way in ways}, {way: [] for way in ways}
    for number in range(chosen.rounds):
        if comm.rank == 0 and chosen.rounds > 1:
            print(f"after round {number + 1}:", flush=True)
        for way in ways:
            took, bytes_sent, loss = measure(way, comm, chosen)
            seconds[way] += took
            sent[way] += bytes_sent
            figures[way] = statistics.median(seconds[way]), statistics.median(sent[way]), loss
            if comm.rank == 0:
                show(way, figures)
    if comm.rank == 0 and chosen.json:
        about = {"date": time.strftime("%Y-%m-%d"), "torch": torch.__version__}
        about |= {"cores": os.cpu_count(), "arguments": {**vars(chosen), "json": None}}
        with open(chosen.json, "w") as file:
            json.dump({"about": about, "ways": figures, "seconds": seconds}, file, indent=1)
            file.write("\n")
    comm.shutdown()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
