"""Trains a small model with DistributedDataParallel.

Each argument is a scenario, as JSON: its name, its codec, and options of the hook. Starting PyTorch
takes longer than any scenario, so one process runs many, and prints a line for each.
"""

import hashlib
import io
import json
import os
import signal
import struct
import sys
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

import farwire
import farwire.torch

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
comm = farwire.init()


class Model(torch.nn.Module):
    """Layers large enough for a codec, biases and norms that are not, and a branch."""

    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Sequential(
            torch.nn.Linear(24, 96), torch.nn.ReLU(), torch.nn.LayerNorm(96),
            torch.nn.Linear(96, 96), torch.nn.ReLU(),
        )  # fmt: skip
        self.branch = torch.nn.Linear(96, 96)
        self.head = torch.nn.Linear(96, 4)

    def forward(self, x, branch=True):
        x = self.inner(x)
        return self.head(self.branch(x) if branch else x)


def make(codec, *, unused=False, **options):
    """A model with the hook, from the same seed on all ranks, with many small buckets."""
    torch.manual_seed(1)
    model = DDP(Model(), bucket_cap_mb=0.03, find_unused_parameters=unused)
    options = {"steps": 0, **options}
    state = None
    if codec != "gloo":
        state = farwire.torch.State(comm, codec, **options)
        model.register_comm_hook(state, farwire.torch.hook)
    return model, state, torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)


def batch(step):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(16, 24, generator=generator)
    return x, x[:, :4].sin() * 3


def loss_of(model, step, **options):
    x, y = batch(step)
    return (model(x, **options) - y).pow(2).mean()


def digest(model):
    data = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
    return hashlib.sha256(data).hexdigest()


def train(model, optimizer, steps, **options):
    for step in steps:
        loss = loss_of(model, step, **options)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


def owed(state):
    """What this rank owes, by parameter: worker and owner residuals added up."""
    data = bytes(state.state_dict()["residuals"].numpy())
    (length,) = struct.unpack("<Q", data[:8])
    header, body = json.loads(data[8 : 8 + length]), data[8 + length :]
    found = {}
    for key, entry in header.items():
        kind, start, name = key.split(":", 2)
        if kind == "warm":
            continue
        values = torch.frombuffer(bytearray(body), dtype=torch.uint8)
        start, (first, last) = int(start), entry["data_offsets"]
        values = values[first:last].view(torch.float32).double()
        whole = found.setdefault(name, torch.zeros(2_000_000, dtype=torch.float64))
        whole[start : start + len(values)] += values
    return found


class Ledger:
    """The gradients of all ranks, what was delivered, and what is owed: the books must balance."""

    def __init__(self):
        self.had, self.delivered = {}, {}

    def local(self, model, step, **options):
        """This rank's own gradient, computed beside DDP."""
        loss = loss_of(model.module, step, **options)
        names, parameters = zip(*model.module.named_parameters())
        for name, gradient in zip(names, torch.autograd.grad(loss, parameters, allow_unused=True)):
            if gradient is not None:
                add(self.had, name, gradient)

    def came(self, model):
        for name, parameter in model.module.named_parameters():
            if parameter.grad is not None:
                add(self.delivered, name, parameter.grad)

    def check(self, state):
        debts = owed(state)
        anything = 0.0
        for name, had in sorted(self.had.items()):
            debt = debts.get(name, torch.zeros(1))[: had.numel()].expand(had.numel()).clone()
            both = torch.stack([had.flatten(), debt])
            dist.all_reduce(both)
            had, debt = both
            delivered = self.delivered.get(name, torch.zeros_like(had)).flatten() * size
            error = (had - delivered - debt).abs().max() / had.abs().max()
            assert error < 2**-20, f"{name}: {error}"
            anything += debt.abs().sum().item()
        return anything


def add(books, name, gradient):
    books[name] = books.get(name, 0) + gradient.double()


def trained(codec, **options):
    """Twenty steps: a hash of all weights, the loss, the bytes sent, and some of the weights."""
    model, _, optimizer = make(codec, **options)
    before = comm.bytes_sent
    loss = train(model, optimizer, range(20))
    weights = [p.detach().flatten() for p in model.parameters()]
    return digest(model), loss, comm.bytes_sent - before, torch.cat(weights)[::997].tolist()


def books(codec):
    """Buckets are rebuilt after the first step; some steps accumulate; one restarts the run."""
    model, state, optimizer = make(codec)
    ledger, step = Ledger(), 0
    for round in range(12):
        if round % 3 == 1:
            with model.no_sync():
                ledger.local(model, step)
                loss_of(model, step).backward()
                step += 1
        ledger.local(model, step)
        loss_of(model, step).backward()
        step += 1
        ledger.came(model)
        optimizer.step()
        optimizer.zero_grad()
        if round == 6:
            file = io.BytesIO()
            torch.save([model.module.state_dict(), state.state_dict()], file)
            file.seek(0)
            weights, saved = torch.load(file, weights_only=True)
            model, state, optimizer = make(codec)
            model.module.load_state_dict(weights)
            state.load_state_dict(saved)
            assert state.step == 7
    return ledger.check(state)


def resume(codec):
    """A run, and the same with a restart in the middle."""
    model, state, optimizer = make(codec, phase_in=(2, 6))
    train(model, optimizer, range(10))
    whole = digest(model)
    model, state, optimizer = make(codec, phase_in=(2, 6))
    train(model, optimizer, range(5))
    saved = [x.state_dict() for x in (model.module, optimizer, state)]
    again, new_state, new_optimizer = make(codec, phase_in=(2, 6))
    for part, content in zip((again.module, new_optimizer, new_state), saved):
        part.load_state_dict(content)
    train(again, new_optimizer, range(5, 10))
    return whole, digest(again)


def bad_state(codec):
    """States that cannot be loaded: the present one stays."""
    model, state, optimizer = make(codec)
    train(model, optimizer, range(3))
    other = state.state_dict()
    train(model, optimizer, range(3, 5))
    before, said = state.state_dict(), []
    damaged = {"step": 3, "residuals": other["residuals"][:-1]}
    for bad in [*({**other, "step": step} for step in (-1, 2**64, "three", None)), damaged]:
        try:
            state.load_state_dict(bad)
            raise AssertionError(f"a state was loaded with step {bad['step']!r}")
        except (ValueError, TypeError, OverflowError) as error:
            said.append(f"{type(error).__name__}: {error}")
        after = state.state_dict()
        assert after["step"] == before["step"] == 5, "the step has changed"
        assert after["residuals"].equal(before["residuals"]), f"residuals have changed: {said[-1]}"
    return said


def unused(codec):
    """A branch is used by all ranks, by none, or by rank 0 alone."""
    model, state, optimizer = make(codec, unused=True)
    ledger = Ledger()
    for step in range(12):
        branch = (True, False, rank == 0)[step % 3]
        ledger.local(model, step, branch=branch)
        loss_of(model, step, branch=branch).backward()
        ledger.came(model)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return ledger.check(state), digest(model)


def infinity(codec, on_nan):
    """The last rank's loss is infinite in one step."""
    model, state, optimizer = make(codec, on_nan=on_nan)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    train(model, optimizer, range(3))
    before, weights = bytes(state.state_dict()["residuals"].numpy()), digest(model)
    loss = loss_of(model, 3)
    if rank == size - 1:
        loss = loss * float("inf")
    try:
        scaler.scale(loss).backward()
    except farwire.NotFinite as error:
        return f"raised: {error}"
    assert all(not p.grad.isfinite().all() for p in model.module.inner.parameters())
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    assert digest(model) == weights, "a step with an infinity counted"
    assert scaler.get_scale() == 2.0
    assert bytes(state.state_dict()["residuals"].numpy()) == before, "residuals have changed"
    scaler.scale(loss_of(model, 4)).backward()
    scaler.step(optimizer)
    assert digest(model) != weights and all(p.isfinite().all() for p in model.parameters())
    return "skipped, and went on"


def killed(codec):
    """Rank 1 dies in the middle of backward."""
    model, state, optimizer = make(codec)
    train(model, optimizer, range(3))
    if rank == 1:
        parameter = model.module.inner[3].weight
        parameter.register_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))
    began = time.monotonic()
    try:
        loss_of(model, 3).backward()
    except farwire.LostRank as error:
        print(json.dumps([type(error).__name__, error.rank, error.advice, str(error)]))
        print(f"after {time.monotonic() - began:.2f} s", file=sys.stderr)
    os._exit(0)  # Gloo would wait for the rank that died


def loader(codec):
    """Workers are forked while farwire's threads run; forward is in bfloat16."""
    model, state, optimizer = make(codec)
    data = torch.utils.data.TensorDataset(*map(torch.cat, zip(*map(batch, range(8)))))
    for epoch in range(2):
        workers = torch.utils.data.DataLoader(
            data, batch_size=16, num_workers=2, multiprocessing_context="fork"
        )
        for x, y in workers:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = (model(x) - y).pow(2).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return digest(model), loss.item()


def pairs(codec):
    """Complex parameters, which are pairs of numbers in a bucket: the difference to Gloo's
    gradient."""

    def gradient(codec):
        torch.manual_seed(1)
        model = DDP(torch.nn.Linear(40, 40, dtype=torch.complex64))
        if codec != "gloo":
            state = farwire.torch.State(comm, codec, phase_in=(0, 0))
            model.register_comm_hook(state, farwire.torch.hook)
        torch.manual_seed(rank)
        model(torch.randn(4, 40, dtype=torch.complex64)).abs().sum().backward()
        return model.module.weight.grad

    return (gradient("gloo") - gradient(codec)).abs().max().item()


def refused(codec):
    """The hook's errors for sparse gradients and for a second model."""
    said = []
    state = farwire.torch.State(comm, codec, phase_in=(0, 0))
    for inner in (
        torch.nn.Embedding(200, 16),
        torch.nn.Embedding(200, 16),
        torch.nn.Embedding(200, 16, sparse=True),
    ):
        model = DDP(inner)
        model.register_comm_hook(state, farwire.torch.hook)
        try:
            model(torch.tensor([1, 2])).sum().backward()
        except farwire.CallError as error:
            said.append(str(error))
    return said


def memory(codec, hundreds):
    """Resident megabytes after every hundred steps."""
    model, state, optimizer = make(codec)
    seen = []
    for _ in range(hundreds):
        train(model, optimizer, range(100))
        with open("/proc/self/statm") as file:
            pages = int(file.read().split()[1])
        seen.append(round(pages * os.sysconf("SC_PAGE_SIZE") / 2**20, 1))
    return seen


for scenario in sys.argv[1:]:
    name, codec, options = json.loads(scenario)
    print(json.dumps(globals()[name](codec, **options)))
comm.shutdown()
dist.destroy_process_group()
