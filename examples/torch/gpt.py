"""A small GPT, trained with DistributedDataParallel through farwire.

On one machine:

    torchrun --nproc-per-node 2 examples/torch/gpt.py --codec topk:0.01

On two hosts, with the same token on both (`export FARWIRE_TOKEN=$(farwire token)` on one of them):

    torchrun --nnodes 2 --node-rank 0 --master-addr HOST0 --master-port 29500 examples/torch/gpt.py
    torchrun --nnodes 2 --node-rank 1 --master-addr HOST0 --master-port 29500 examples/torch/gpt.py

On Slurm, without torchrun:

    srun --ntasks 16 python examples/torch/gpt.py

farwire carries the gradients; torch.distributed's own group (Gloo) only compares the models at the
start. UDP has to pass between the hosts.
"""

import argparse
import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import farwire
import farwire.torch


class Block(nn.Module):
    """Attention, then a feed-forward layer, each added to what came in."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        batch, length, width = x.shape
        split = (batch, length, self.heads, width // self.heads)
        qkv = self.qkv(self.norm_1(x)).chunk(3, -1)
        q, k, v = (part.view(split).transpose(1, 2) for part in qkv)
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(x.shape))
        return x + self.down(nn.functional.gelu(self.up(self.norm_2(x))))


class GPT(nn.Module):
    """Bytes in, the next byte out."""

    def __init__(self, width=128, layers=4, heads=4, length=64, vocabulary=256):
        super().__init__()
        self.token, self.place = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens):
        places = torch.arange(tokens.shape[1], device=tokens.device)
        return self.head(self.norm(self.blocks(self.token(tokens) + self.place(places))))



def batch_of(text, size, length, generator):
    """Pieces of a text, and the same one byte on."""
    starts = torch.randint(len(text) - length - 1, (size,), generator=generator)
    pieces = torch.stack([text[start : start + length + 1] for start in starts]).long()
    return pieces[:, :-1], pieces[:, 1:]


def main():
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--codec", default="topk:0.01", help="see farwire.codec_help()")
    arguments.add_argument("--steps", type=int, default=200)
    arguments.add_argument("--batch", type=int, default=8)
    arguments.add_argument("--text", help="a file to learn; this one, if none is given")
    chosen = arguments.parse_args()

    comm = farwire.init()
    # DDP wants a group of torch's; farwire knows the rank, whichever launcher set it.
    os.environ.update(RANK=str(comm.rank), WORLD_SIZE=str(comm.size))
    dist.init_process_group("gloo")

    torch.manual_seed(0)
    model = DistributedDataParallel(GPT())
    state = farwire.torch.State(comm, chosen.codec, steps=chosen.steps)
    model.register_comm_hook(state, farwire.torch.hook)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    with open(chosen.text or __file__, "rb") as file:
        text = torch.frombuffer(bytearray(file.read()), dtype=torch.uint8)
    generator = torch.Generator().manual_seed(comm.rank)
    started, sent = time.monotonic(), comm.bytes_sent
    for step in range(chosen.steps):
        tokens, targets = batch_of(text, chosen.batch, 64, generator)
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if comm.rank == 0 and (step + 1) % 20 == 0:
            seconds, sent_now = time.monotonic() - started, comm.bytes_sent
            print(
                f"step {step + 1:4}  loss {loss.item():.3f}  "
                f"{1000 * seconds / 20:.0f} ms and {(sent_now - sent) / 20e6:.2f} MB sent a step"
            )
            started, sent = time.monotonic(), sent_now
    weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    same = comm.is_in_sync(weights)
    if comm.rank == 0:
        print("all ranks have the same weights" if same else "ranks have different weights")
    comm.shutdown()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
