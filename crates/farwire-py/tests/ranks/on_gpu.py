"""The hook with a model on a GPU, and the same on the CPU. Ranks may share a card.

`mixed` has rank 0 on the card and the others on the CPU. A card that cannot be used is an error
here; outside of this test, gradients would be staged.
"""

import json
import sys
import warnings

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

import farwire
import farwire.torch

warnings.filterwarnings("error", message="gradients on the GPU")
dist.init_process_group("gloo")
comm = farwire.init()
torch.backends.cuda.matmul.allow_tf32 = False
STEPS = 30


def train(device, codec):
    torch.manual_seed(1)
    layers = [torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 256), torch.nn.ReLU()]
    inner = torch.nn.Sequential(*layers, torch.nn.Linear(256, 4)).to(device)
    model = DDP(inner, bucket_cap_mb=0.05)
    state = farwire.torch.State(comm, codec, phase_in=(0, 0))
    model.register_comm_hook(state, farwire.torch.hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    generator, losses = torch.Generator().manual_seed(comm.rank), []
    for step in range(STEPS):
        if step == STEPS - 1:
            before = state.bus_bytes
        x = torch.randn(32, 64, generator=generator).to(device)
        loss = (model(x) - x[:, :4]).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    weights = torch.cat([p.detach().flatten().cpu() for p in model.parameters()])
    crossed = [after - before for before, after in zip(before, state.bus_bytes)]
    owed = len(state.state_dict()["residuals"])
    model_bytes = sum(p.nbytes for p in model.parameters())
    return losses, comm.is_in_sync(weights), crossed, model_bytes, owed


def spoil(device):
    """One rank's gradient has a NaN in one step: what all ranks then have and owe."""
    torch.manual_seed(1)
    inner = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)).to(device)
    model = DDP(inner, find_unused_parameters=True)
    state = farwire.torch.State(comm, "topk:0.05", phase_in=(0, 0))
    model.register_comm_hook(state, farwire.torch.hook)
    found, before = [], None
    for step in range(3):
        x = torch.randn(8, 64, device=device)
        if step == 1 and comm.rank == 0:
            x[0, 0] = float("nan")
        model(x).pow(2).mean().backward()
        finite = [p.grad.isfinite().all().item() for p in model.parameters()]
        found.append([all(finite), any(finite)])
        owed = bytes(state.state_dict()["residuals"].numpy())
        found[-1].append(owed == before if step == 1 else None)
        before = owed
        model.zero_grad()
    return found


for where in sys.argv[1].split(","):
    device = "cpu" if where == "cpu" or (where == "mixed" and comm.rank > 0) else "cuda"
    for codec in ("none", "topk:0.05"):
        print(json.dumps([where, codec, *train(device, codec)]))
    print(json.dumps([where, "nan", spoil(device)]))
comm.shutdown()
dist.destroy_process_group()
