"""FSDP2 inside each site, compressed farwire between sites.

Every site shards the model over its own ranks, with NCCL or Gloo; each rank then exchanges its
shard of the gradients with the ranks that hold the same shard at the other sites.

    torchrun --nnodes 2 --nproc-per-node 2 --node-rank 0 --master-addr HOST0 --master-port 29500 \\
        examples/torch/fsdp_sites.py --per-site 2

and the same with `--node-rank 1` at the other site; or, to try it on one machine:

    torchrun --nproc-per-node 4 examples/torch/fsdp_sites.py --per-site 2
"""

import argparse

import torch
import torch.distributed as dist
from gpt import GPT, batch_of
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import farwire
import farwire.torch


def main():
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--per-site", type=int, required=True, help="ranks at each site")
    arguments.add_argument("--codec", default="topk:0.01")
    arguments.add_argument("--steps", type=int, default=100)
    chosen = arguments.parse_args()

    world = farwire.init()
    dist.init_process_group("gloo")
    sites = (world.size // chosen.per_site, chosen.per_site)
    mesh = init_device_mesh("cpu", sites, mesh_dim_names=("sites", "shards"))

    torch.manual_seed(0)
    model = GPT()
    for block in model.blocks:
        fully_shard(block, mesh=mesh["shards"])
    fully_shard(model, mesh=mesh["shards"])
    same_shard = world.split(color=world.rank % chosen.per_site)
    farwire.torch.fsdp_hook(model, same_shard, chosen.codec, steps=chosen.steps)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    with open(__file__, "rb") as file:
        text = torch.frombuffer(bytearray(file.read()), dtype=torch.uint8)
    generator = torch.Generator().manual_seed(world.rank)
    for step in range(chosen.steps):
        tokens, targets = batch_of(text, 8, 64, generator)
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if world.rank == 0 and (step + 1) % 20 == 0:
            sent = world.bytes_sent / 1e6
            print(f"step {step + 1:4}  loss {loss.item():.3f}  {sent:.1f} MB sent")
    world.shutdown()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
