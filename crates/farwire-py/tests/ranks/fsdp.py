"""FSDP2 inside two sites of two ranks, farwire between them.

The arguments are codecs. With `none`, the model must end as with FSDP2 over all four ranks.
"""

import json
import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import farwire
import farwire.torch

dist.init_process_group("gloo")
world = farwire.init()
rank, size = dist.get_rank(), dist.get_world_size()
mesh = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("sites", "shards"))


def model(**options):
    torch.manual_seed(3)
    layers = [torch.nn.Linear(32, 96), torch.nn.ReLU(), torch.nn.Linear(96, 96), torch.nn.ReLU()]
    made = torch.nn.Sequential(*layers, torch.nn.Linear(96, 4))
    fully_shard(made[0], **options)
    fully_shard(made[2], **options)
    fully_shard(made, **options)
    return made


def train(model, steps):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in steps:
        torch.manual_seed(100 * step + rank)
        x = torch.randn(8, 32)
        loss = (model(x) - x[:, :4]).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return torch.cat([p.full_tensor().detach().flatten() for p in model.parameters()]), loss.item()


whole, _ = train(model(), range(20))
sites = world.split(color=rank % 2)  # the ranks that hold the same shard
for codec in sys.argv[1:]:
    split = model(mesh=mesh["shards"])
    state = farwire.torch.fsdp_hook(split, sites, codec, phase_in=(0, 0))
    before = world.bytes_sent
    weights, loss = train(split, range(20))
    sent = world.bytes_sent - before
    assert world.is_in_sync(weights), "sites have different weights"
    saved = state.state_dict()
    assert saved["step"] == 20
    state.load_state_dict(saved)
    apart = (whole - weights).abs().max().item()
    print(json.dumps([apart, loss, sent, saved["residuals"].numel()]))
world.shutdown()
dist.destroy_process_group()
