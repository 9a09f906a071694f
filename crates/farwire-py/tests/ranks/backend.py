"""The backend: collectives of torch.distributed, compared with Gloo's results for the same calls.

The arguments are a folder and the backends, one after the other; the farwire backend needs no
import. The result of every call is hashed.
"""

import hashlib
import json
import os
import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel as DDP

rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
results = {}


def note(name, *tensors):
    """Records the result of a call: the bits and the shape."""
    flat = [tensor.detach().contiguous().view(-1).view(torch.uint8) for tensor in tensors]
    data = b"".join(tensor.numpy().tobytes() for tensor in flat)
    shapes = str([tuple(t.shape) for t in tensors])
    results[name] = hashlib.sha256(data + shapes.encode()).hexdigest()[:16]


def of(rank, *shape, dtype=torch.float32):
    return (torch.arange(torch.Size(shape).numel()) % 5 + rank).reshape(shape).to(dtype)


ALL = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.uint8,
    torch.int32, torch.int64, torch.bool, torch.complex64,
]  # fmt: skip


def model():
    torch.manual_seed(3)
    layers = [torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 4)]
    return torch.nn.Sequential(*layers)


def train(model, steps=20):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in range(steps):
        torch.manual_seed(100 * step + rank)
        x = torch.randn(8, 16)
        (model(x) - x[:, :4]).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def every_call(backend, folder):
    """Makes every call, and records its result."""
    dist.init_process_group(backend, f"file://{folder}/store-{backend}", rank=rank, world_size=size)
    for dtype in ALL:
        tensor = of(rank, 3, 4, dtype=dtype)
        dist.broadcast(tensor, size - 1)
        note(f"broadcast {dtype}", tensor)
        everyone = [torch.empty(3, 4, dtype=dtype) for _ in range(size)]
        dist.all_gather(everyone, of(rank, 3, 4, dtype=dtype))
        note(f"all_gather {dtype}", *everyone)
    for dtype in (torch.float32, torch.float64, torch.int32, torch.int64, torch.uint8):
        for op in ("SUM", "PRODUCT", "MIN", "MAX"):
            tensor = of(rank, 5, dtype=dtype)
            dist.all_reduce(tensor, getattr(dist.ReduceOp, op))
            note(f"all_reduce {op} {dtype}", tensor)
    for op in ("BAND", "BOR", "BXOR"):
        tensor = of(3 * rank, 5, dtype=torch.int64)
        dist.all_reduce(tensor, getattr(dist.ReduceOp, op))
        note(f"all_reduce {op}", tensor)

    if backend == "farwire":  # Gloo adds the elements in between instead of the tensor's own
        strided = of(rank, 6, 4)[::2].t()
        dist.all_reduce(strided)
        assert torch.equal(strided, sum(of(k, 6, 4)[::2].t() for k in range(size)))
    tensor = of(rank, 5)
    dist.reduce(tensor, 0)
    if rank == 0:
        note("reduce", tensor)
    whole = torch.empty(size * 3, 2)
    dist.all_gather_into_tensor(whole, of(rank, 3, 2))
    note("all_gather_into_tensor", whole)
    block = torch.empty(3, 2)
    dist.reduce_scatter_tensor(block, of(rank, 3 * size, 2))
    note("reduce_scatter_tensor", block)
    dist.reduce_scatter(block, [of(rank + k, 3, 2) for k in range(size)])
    note("reduce_scatter", block)
    outputs = [torch.empty(2) for _ in range(size)] if rank == 1 else None
    dist.gather(of(rank, 2), outputs, dst=1)
    note("gather", *(outputs or []))
    output = torch.empty(2)
    dist.scatter(output, [of(k, 2) for k in range(size)] if rank == 0 else None, src=0)
    note("scatter", output)
    output = torch.empty(2 * size)
    dist.all_to_all_single(output, of(10 * rank, 2 * size))
    note("all_to_all_single", output)
    output = torch.empty(size * (rank + 1), 2)
    given = of(10 * rank, sum(range(1, size + 1)), 2)
    dist.all_to_all_single(output, given, [rank + 1] * size, [k + 1 for k in range(size)])
    note("all_to_all_single, varied", output)
    objects = [None] * size
    dist.all_gather_object(objects, {"rank": rank})
    assert [one["rank"] for one in objects] == list(range(size))

    to, source = (rank + 1) % size, (rank - 1) % size
    got = torch.empty(4)
    exchange = [dist.P2POp(dist.isend, of(rank, 4), to), dist.P2POp(dist.irecv, got, source)]
    for work in dist.batch_isend_irecv(exchange):
        work.wait()
    note("batch_isend_irecv", got)
    dist.barrier()
    work = dist.all_reduce(tensor := of(rank, 3), async_op=True)
    work.wait()
    note("async all_reduce", tensor)
    future = dist.all_reduce(tensor := of(rank, 3), async_op=True).get_future()
    note("the value of a future", *future.wait())

    group = dist.new_group([0, 1])
    if rank < 2:
        tensor = of(rank, 3)
        dist.all_reduce(tensor, group=group)
        note("new_group", tensor)
    groups, _ = dist.new_subgroups(1)  # groups of one
    dist.all_reduce(tensor := of(rank, 3), group=groups)
    note("a group of one", tensor)

    mesh = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("sites", "shards"))
    dist.all_reduce(tensor := of(rank, 3), group=mesh.get_group("shards"))
    note("a mesh", tensor)
    sharded = distribute_tensor(of(0, 8, 4), mesh["shards"], [Shard(0)])
    note("a DTensor", (sharded @ sharded.t()).full_tensor())

    trained = DDP(model(), bucket_cap_mb=0.001)
    train(trained)
    results["ddp"] = torch.cat([p.detach().flatten() for p in trained.parameters()])[::7].tolist()
    sharded = model()
    fully_shard(sharded[0])
    fully_shard(sharded)
    train(sharded)
    full = [p.full_tensor().detach().flatten() for p in sharded.parameters()]
    results["fsdp2"] = torch.cat(full)[::7].tolist()

    dcp.save({"model": sharded.state_dict()}, checkpoint_id=f"{folder}/{backend}")
    again = model()
    fully_shard(again[0])
    fully_shard(again)
    state = {"model": again.state_dict()}
    dcp.load(state, checkpoint_id=f"{folder}/{backend}")
    again.load_state_dict(state["model"])
    for name, parameter in again.named_parameters():
        before = dict(sharded.named_parameters())[name]
        assert torch.equal(parameter.full_tensor(), before.full_tensor()), name

    if backend == "farwire":
        for dtype in (torch.int16, torch.bool, torch.float8_e4m3fn):
            moved = of(rank, 3, dtype=dtype)
            dist.broadcast(moved, 1)
            same = moved.view(torch.uint8) == of(1, 3, dtype=dtype).view(torch.uint8)
            assert same.all(), dtype
            try:
                dist.all_reduce(torch.ones(4).to(dtype))
                raise SystemExit(f"{dtype} was added")
            except TypeError as error:
                assert "cannot add" in str(error) and "move" in str(error), error
        work = dist.all_reduce(torch.ones(1), async_op=True)
        while not work.is_completed():
            pass
        for wrong in (
            lambda: dist.all_gather([torch.ones(k + 3) for k in range(size)], torch.ones(3)),
            lambda: dist.reduce_scatter_tensor(torch.ones(2), torch.ones(size + 1)),
            lambda: dist.reduce_scatter(torch.ones(2), [torch.ones(2 * k) for k in range(size)]),
            lambda: dist.all_reduce(torch.eye(3).to_sparse()),
        ):
            try:
                wrong()
                raise SystemExit("a call that makes no sense was made")
            except sys.modules["farwire"].CallError as error:
                assert "; " in str(error), error
        try:
            dist.recv(torch.empty(1))
            raise SystemExit("a message from nobody came")
        except sys.modules["farwire"].CallError as error:
            assert "src=" in str(error)
    dist.destroy_process_group()


def again_and_again(folder):
    """Groups that are made and destroyed through one store, as with torchrun's agent."""
    store = dist.FileStore(f"{folder}/store", size)
    for turn in range(3):
        # Rank 0 comes last, so that the others find what it published the time before.
        if rank == 0:
            store.get(f"turn {turn}")
        else:
            store.set(f"turn {turn}", "")
        dist.init_process_group("farwire", store=store, rank=rank, world_size=size)
        dist.all_reduce(tensor := torch.ones(1))
        assert tensor.item() == size
        dist.destroy_process_group()


assert "farwire" not in sys.modules
for backend in sys.argv[2:]:
    results.clear()
    every_call(backend, sys.argv[1])
    print(json.dumps(results))
again_and_again(sys.argv[1])
