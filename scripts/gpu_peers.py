#!/usr/bin/env python3
"""How long Gloo takes for an all-reduce of memory on a card, through pinned memory.

    scripts/gpu_peers.py [--size MIB] [--ranks N] [--repeats N]

Needs torch with CUDA. The ranks share the cards. It measures two ways: the whole vector to pinned
memory, all_reduce, and back; and the same in pieces of 16 MiB, so that copies and network overlap.
Prints the median time of each, from an idle card to an idle card.
"""

import argparse
import os
import statistics
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

PIECE = 4 << 20  # elements


def whole(gradient, pinned, _streams):
    pinned.copy_(gradient, non_blocking=True)
    torch.cuda.current_stream().synchronize()
    dist.all_reduce(pinned)
    gradient.copy_(pinned, non_blocking=True)


def pieces(gradient, pinned, streams):
    here, there = gradient.split(PIECE), pinned.split(PIECE)
    copied = []
    with torch.cuda.stream(streams[0]):
        for mine, staged in zip(here, there):
            staged.copy_(mine, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
            copied.append(event)
    works = []
    for event, staged in zip(copied, there):
        event.synchronize()
        works.append(dist.all_reduce(staged, async_op=True))
    with torch.cuda.stream(streams[1]):
        for work, mine, staged in zip(works, here, there):
            work.wait()
            mine.copy_(staged, non_blocking=True)


def rank_main(rank, args, port):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.cuda.set_device(rank % torch.cuda.device_count())
    dist.init_process_group("gloo", rank=rank, world_size=args.ranks)
    elements = args.size << 18
    gradient = torch.randn(elements, device="cuda") * 1e-3
    pinned = torch.empty(elements, pin_memory=True)
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    for name, way in (("whole", whole), ("pieces of 16 MiB", pieces)):
        times = []
        for repeat in range(args.repeats + 2):
            gradient.normal_(std=1e-3)
            torch.cuda.synchronize()
            dist.barrier()
            start = time.perf_counter()
            way(gradient, pinned, streams)
            torch.cuda.synchronize()
            if repeat >= 2:
                times.append(time.perf_counter() - start)
        if rank == 0:
            median = statistics.median(times) * 1e3
            print(f"gloo, {name}: {median:.2f} ms (least {min(times) * 1e3:.2f})", flush=True)
    dist.destroy_process_group()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", type=int, default=256, help="MiB of f32")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=10)
    args = parser.parse_args()
    from torch.distributed.elastic.utils.distributed import get_free_port

    mp.spawn(rank_main, (args, get_free_port()), nprocs=args.ranks)


if __name__ == "__main__":
    main()
