#!/usr/bin/env python3
"""Top-k selection beside its peers, in one run on one core: farwire (with error feedback, down to bytes), and torch.topk where PyTorch is installed.

    python3 scripts/topk_peers.py [--farwire PATH] [--elements N]

Prints the best of several tries of each, and the ratio. Another peer can be put beside them with --peer NAME=SECONDS, measured elsewhere on the same machine.
"""

import argparse
import json
import subprocess
import time


def farwire(path: str, elements: int) -> float:
    command = [path, "bench", "codec", "--codec", "topk:0.01", "--size", str(4 * elements), "--json"]
    row = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return row["bytes"] / row["encode_gbs"] / 1e9


def torch_topk(elements: int) -> float:
    import torch

    torch.set_num_threads(1)
    values = torch.randn(elements)
    best = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        torch.topk(values.abs(), elements // 100)
        best = min(best, time.perf_counter() - start)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--farwire", default="target/release/farwire", help="the program")
    parser.add_argument("--elements", type=int, default=1 << 24)
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=SECONDS")
    arguments = parser.parse_args()

    ours = farwire(arguments.farwire, arguments.elements)
    print(f"{arguments.elements} elements, 1 %")
    print(f"{'farwire topk:0.01':<28} {ours * 1e3:9.1f} ms")
    peers = [(name, float(seconds)) for name, seconds in (peer.split("=") for peer in arguments.peer)]
    try:
        peers.append(("torch.topk, one thread", torch_topk(arguments.elements)))
    except ImportError:
        print("torch.topk: skipped, PyTorch is not installed")
    for name, seconds in peers:
        print(f"{name:<28} {seconds * 1e3:9.1f} ms   {seconds / ours:6.1f} × farwire's")


if __name__ == "__main__":
    main()
