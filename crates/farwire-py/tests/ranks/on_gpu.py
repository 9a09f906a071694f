"""The hook with a model on a GPU, and the same on the CPU. Ranks may share a card.

`mixed` has rank 0 on the card and the others on the CPU.
"""

import json
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

import farwire
import farwire.torch

dist.init_process_group("gloo")
comm = farwire.init()
torch.backends.cuda.matmul.allow_tf32 = False


def train(device, codec):
    torch.manual_seed(1)
    layers = [torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 256), torch.nn.ReLU()]
    inner = torch.nn.Sequential(*layers, torch.nn.Linear(256, 4)).to(device)
    model = DDP(inner, bucket_cap_mb=0.05)
    state = farwire.torch.State(comm, codec, phase_in=(0, 0))
    model.register_comm_hook(state, farwire.torch.hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    generator, losses = torch.Generator().manual_seed(comm.rank), []
    for _ in range(30):
        x = torch.randn(32, 64, generator=generator).to(device)
        loss = (model(x) - x[:, :4]).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    weights = torch.cat([p.detach().flatten().cpu() for p in model.parameters()])
    staged = sum(host.nbytes for host in state._staging.values())
    return losses, comm.is_in_sync(weights), staged, sum(p.nbytes for p in model.parameters())


for where in sys.argv[1].split(","):
    device = "cpu" if where == "cpu" or (where == "mixed" and comm.rank > 0) else "cuda"
    for codec in ("none", "topk:0.05"):
        print(json.dumps([where, codec, *train(device, codec)]))
comm.shutdown()
dist.destroy_process_group()
