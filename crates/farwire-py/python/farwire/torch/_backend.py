"""The backend for torch.distributed: `init_process_group("farwire")`, on torch 2.14 or later.

Ranks find each other through the store that torch has already opened: rank 0 publishes there where
it listens. Groups are farwire communicators, made by their members alone.
"""

import math
import threading
import uuid
import weakref

import torch
import torch.distributed as dist

from .. import _native
from .._comm import init
from .._errors import CallError

NAME = "farwire"

try:
    from torch._C._distributed_c10d import Backend as _Base

    _Base(0, 1)  # before 2.14, it cannot be derived from
except (ImportError, TypeError):
    _Base = None

#: Whether this torch has backends in Python.
CAN_DERIVE = _Base is not None


def register():
    """Makes the backend known to torch.distributed, which calls this by itself from 2.14 on. With
    older versions, importing farwire.torch calls it, so that the error for using the backend can
    point to the hook."""
    if NAME.upper() in dist.Backend._plugins:
        return
    dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu"])


def _create(options, _):
    if not CAN_DERIVE:
        raise RuntimeError(
            f"the backend {NAME!r} needs torch 2.14 or later, and this is {torch.__version__}; "
            "use another backend with farwire.torch.hook, which any torch from 2.4 on takes"
        )
    dist.Work.is_completed = _is_completed
    return _make_backend(options)


#: The backend of all ranks; groups are made from it.
_world = None


def _make_backend(options):
    global _world
    rank, size, ranks = options.group_rank, options.group_size, options.global_ranks_in_group
    world = _world and _world()
    deadline = _seconds(options.timeout)
    if ranks and world is not None and world.is_open() and max(ranks) < world.comm.size:
        return FarwireBackend(world.comm.subgroup(ranks, options.group_id), deadline)
    backend = FarwireBackend(_join(options.store, rank, size, deadline), deadline)
    if not ranks or len(ranks) == dist.get_world_size():
        _world = weakref.ref(backend)
    return backend


def _join(store, rank, size, deadline):
    """Joins through a store: rank 0 publishes there where it listens."""
    if size == 1:
        return init(rank=0, size=1, address=("127.0.0.1", 1))
    # A store can outlive its groups, as torchrun's does: it still has the entries of earlier ones.
    key = f"farwire/{store.add(f'farwire/joins/{rank}', 1)}"
    if rank == 0:
        host = _host(store)
        port = _native.free_port("::" if ":" in host else "0.0.0.0")
        store.set(key, f"{host} {port} torch-{uuid.uuid4().hex}")
    host, port, job = store.get(key).decode().split()
    return init(rank=rank, size=size, address=(host, int(port)), job=job, join_timeout=deadline)


def _host(store):
    """The host of rank 0: the one that torch's own store uses."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    host = getattr(store, "host", None) or "127.0.0.1"
    return "127.0.0.1" if host == "localhost" else host


def _seconds(timeout):
    """A timeout from torch in seconds, or None if it is not positive."""
    seconds = timeout.total_seconds() if timeout is not None else -1
    return seconds if seconds > 0 else None


_OPERATORS = {
    dist.ReduceOp.SUM: "sum",
    dist.ReduceOp.AVG: "mean",
    dist.ReduceOp.PRODUCT: "prod",
    dist.ReduceOp.MIN: "min",
    dist.ReduceOp.MAX: "max",
}
_BITWISE = {
    dist.ReduceOp.BAND: torch.bitwise_and,
    dist.ReduceOp.BOR: torch.bitwise_or,
    dist.ReduceOp.BXOR: torch.bitwise_xor,
}


def _operator(op):
    """farwire's name for an operator, and the factor to multiply by first."""
    if op == dist.ReduceOp.PREMUL_SUM:
        return "sum", op.__getstate__()[1]
    for known, name in _OPERATORS.items():
        if op == known:
            return name, None
    raise CallError(f"farwire has no {op}; use SUM, AVG, PRODUCT, MIN or MAX")


class FarwireWork(dist._Work):
    """A call in flight, made of one or more operations; `finish` puts results in place, once."""

    def __init__(self, operations, result, finish=None):
        super().__init__()
        self._operations = operations
        self._result = result
        self._finish = finish
        self._once = threading.Lock()
        self._future = None

    def wait(self, timeout=None):
        limit = _seconds(timeout)
        for operation in self._operations:
            operation.wait(limit)
        self._end()
        return True

    def is_completed(self):
        # Callers that have torch's wrapper get `_is_completed` below instead.
        return all(operation.done() for operation in self._operations)

    def result(self):
        self.wait()
        return self._result

    def get_future(self):
        """DDP waits for this future alone. An error has to be raised in a callback: as a value of
        the future it would be taken for a tensor."""
        if self._future is None:
            ended = torch.futures.Future()
            left = [len(self._operations)]

            def one_ended(_):
                left[0] -= 1
                if left[0] == 0:
                    ended.set_result(None)

            def outcome(_):
                self.wait()
                return self._result

            self._future = ended.then(outcome)
            for operation in self._operations:
                operation.add_done_callback(one_ended)
        return self._future

    def _end(self):
        with self._once:
            if self._finish is not None:
                self._finish()
                self._finish = None


_torchs_is_completed = dist.Work.is_completed


def _is_completed(work):
    """Whether a call has ended.

    torch wraps what a backend in Python returns, and the wrapper forwards only `wait` and
    `get_future`: to everything else it answers as for a call that has just begun. A loop that polls
    until a call has ended would never end. Whether the future is done gives the same answer.
    """
    if _torchs_is_completed(work):
        return True
    try:
        return work.get_future().done()
    except RuntimeError:
        return False  # there is no future


class FarwireBackend(_Base or object):
    """A group of ranks, with the interface that torch.distributed calls."""

    def __init__(self, comm, deadline):
        super().__init__(comm.rank, comm.size)
        self._whole = comm
        self._deadlines = {None: comm}
        self._deadline = deadline
        self._number = 0

    # What torch expects of a backend.

    def getBackendName(self):
        return NAME

    def name(self):
        return NAME

    options = property(lambda self: None)
    supports_splitting = property(lambda self: True)
    supports_coalescing = property(lambda self: False)
    supports_shrinking = property(lambda self: False)
    supports_reconfigure = property(lambda self: False)
    supports_window = property(lambda self: False)
    supports_time_estimate = property(lambda self: False)
    supports_completion_hooks = property(lambda self: False)
    supports_abort_hooks = property(lambda self: False)
    supports_tensor_alloc = property(lambda self: False)

    @property
    def comm(self):
        """The communicator, for calls that torch does not have."""
        return self._whole

    def is_open(self):
        return self._whole is not None

    def _set_sequence_number_for_group(self):
        self._number = 0

    def _get_sequence_number_for_group(self):
        return self._number

    def set_timeout(self, timeout):
        self._deadline = _seconds(timeout)

    def split(self, store, ranks, options):
        name = getattr(options, "group_name", "") or "split"
        return FarwireBackend(self.comm.subgroup(ranks, name), self._deadline)

    def shutdown(self):
        if self._whole is not None:
            self._whole.close()
            for comm in self._deadlines.values():
                comm.close()
            self._whole = None

    abort = shutdown

    # Collectives.

    def allreduce(self, tensors, opts):
        return self._all_reduce(tensors, opts)

    def allreduce_coalesced(self, tensors, opts):
        return self._all_reduce(tensors, opts)

    def _all_reduce(self, tensors, opts):
        if _is_bitwise(opts.reduceOp):
            return self._bitwise(tensors, opts, tensors)
        op, factor = _operator(opts.reduceOp)
        flat = [_flat(tensor) for tensor in tensors]
        if factor is not None:
            flat = [one.mul_(factor) for one in flat]
        comm = self._comm(opts)
        operations = [comm.all_reduce(one, op, async_=True) for one in flat]
        return FarwireWork(operations, tensors, _back(tensors, flat))

    def _bitwise(self, tensors, opts, results):
        """farwire has no bitwise operators. They are rare: every rank gathers all tensors and
        combines them itself."""
        comm, operations, finish = self._comm(opts), [], []
        for tensor, result in zip(tensors, results):
            flat = _flat(tensor)
            everyone = flat.new_empty((comm.size, *flat.shape))
            operations.append(comm.all_gather(flat, everyone, async_=True))

            def fold(everyone=everyone, result=result):
                total = everyone[0]
                for one in everyone[1:]:
                    total = _BITWISE[opts.reduceOp.op](total, one)
                result.copy_(total.view(result.shape))

            finish.append(fold)
        return FarwireWork(operations, results, lambda: [one() for one in finish])

    def reduce(self, tensors, opts):
        if _is_bitwise(opts.reduceOp):
            return self._bitwise(tensors, opts, tensors)
        op, factor = _operator(opts.reduceOp)
        (tensor,) = tensors
        flat = _flat(tensor)
        if factor is not None:
            flat.mul_(factor)
        elif opts.rootRank != self.rank() and flat.data_ptr() == tensor.data_ptr():
            flat = flat.clone()  # other ranks keep what they gave
        operation = self._comm(opts).reduce(flat, op, opts.rootRank, async_=True)
        finish = _back(tensors, [flat]) if opts.rootRank == self.rank() else None
        return FarwireWork([operation], tensors, finish)

    def broadcast(self, tensors, opts):
        (tensor,) = tensors
        flat = _flat(tensor)
        operation = self._comm(opts).broadcast(flat, opts.rootRank, async_=True)
        return FarwireWork([operation], tensors, _back(tensors, [flat]))

    def allgather(self, outputs, inputs, opts):
        works = [self._all_gather(out, given, opts) for out, given in zip(outputs, inputs)]
        return _together(works, outputs)

    def allgather_coalesced(self, outputs, inputs, opts):
        # One list for each rank, with a tensor for each input.
        works = [
            self._all_gather([one[k] for one in outputs], given, opts)
            for k, given in enumerate(inputs)
        ]
        return _together(works, outputs)

    def _all_gather(self, outputs, given, opts):
        flat = _flat(given)
        _check_equal("all_gather", flat, outputs)
        everyone = flat.new_empty((len(outputs), flat.numel()))
        operation = self._comm(opts).all_gather(flat, everyone, async_=True)

        def finish():
            for output, one in zip(outputs, everyone):
                output.copy_(one.view(output.shape))

        return FarwireWork([operation], outputs, finish)

    def all_gather_single(self, output, given, opts):
        flat = _flat(output)
        operation = self._comm(opts).all_gather(_flat(given), flat, async_=True)
        return FarwireWork([operation], [output], _back([output], [flat]))

    def all_gather_single_coalesced(self, outputs, inputs, opts):
        works = [self.all_gather_single(out, given, opts) for out, given in zip(outputs, inputs)]
        return _together(works, outputs)

    _allgather_base = all_gather_single

    def reduce_scatter(self, outputs, inputs, opts):
        for out, given in zip(outputs, inputs):
            _check_equal("reduce_scatter", out, given)
        works = [
            self.reduce_scatter_single(out, torch.cat([one.reshape(-1) for one in given]), opts)
            for out, given in zip(outputs, inputs)
        ]
        return _together(works, outputs)

    def reduce_scatter_single(self, output, given, opts):
        op, factor = _operator(opts.reduceOp)
        flat, whole = _flat(output), _flat(given)
        if whole.numel() != flat.numel() * self.size():
            raise CallError(
                f"reduce_scatter of {whole.numel()} elements to {flat.numel()} on each of "
                f"{self.size()} ranks; give {flat.numel() * self.size()}"
            )
        if factor is not None:
            whole = whole * factor
        operation = self._comm(opts).reduce_scatter(whole, flat, op, async_=True)
        return FarwireWork([operation], [output], _back([output], [flat]))

    def reduce_scatter_single_coalesced(self, outputs, inputs, opts):
        works = [
            self.reduce_scatter_single(out, given, opts) for out, given in zip(outputs, inputs)
        ]
        return _together(works, outputs)

    _reduce_scatter_base = reduce_scatter_single

    def alltoall(self, outputs, inputs, opts):
        given = torch.cat([one.reshape(-1) for one in inputs])
        got = given.new_empty(sum(one.numel() for one in outputs))
        operation = self._comm(opts).all_to_all(
            given, got, send=[one.numel() for one in inputs],
            recv=[one.numel() for one in outputs], async_=True,
        )  # fmt: skip

        def finish():
            parts = got.split([one.numel() for one in outputs])
            for output, part in zip(outputs, parts):
                output.copy_(part.view(output.shape))

        return FarwireWork([operation], outputs, finish)

    def all_to_all_single(self, output, given, output_splits, input_splits, opts):
        flat, whole = _flat(output), _flat(given)
        send, recv = (
            [split * math.prod(tensor.shape[1:]) for split in splits] if splits else None
            for splits, tensor in ((input_splits, given), (output_splits, output))
        )
        if send is None and recv is not None:
            send = [whole.numel() // self.size()] * self.size()
        if recv is None and send is not None:
            recv = [flat.numel() // self.size()] * self.size()
        operation = self._comm(opts).all_to_all(whole, flat, send=send, recv=recv, async_=True)
        return FarwireWork([operation], [output], _back([output], [flat]))

    alltoall_base = all_to_all_single

    def gather(self, outputs, inputs, opts):
        (given,) = inputs
        flat = _flat(given)
        outputs = outputs[0] if outputs and opts.rootRank == self.rank() else []
        _check_equal("gather", flat, outputs)
        everyone = flat.new_empty((len(outputs), flat.numel())) if outputs else None
        operation = self._comm(opts).gather(flat, everyone, opts.rootRank, async_=True)

        def finish():
            for output, one in zip(outputs, everyone if everyone is not None else ()):
                output.copy_(one.view(output.shape))

        return FarwireWork([operation], inputs, finish)

    def scatter(self, outputs, inputs, opts):
        (output,) = outputs
        flat, whole = _flat(output), None
        if opts.rootRank == self.rank():
            _check_equal("scatter", output, inputs[0])
            whole = torch.cat([one.reshape(-1) for one in inputs[0]])
        operation = self._comm(opts).scatter(flat, whole, opts.rootRank, async_=True)
        return FarwireWork([operation], outputs, _back(outputs, [flat]))

    def barrier(self, opts):
        # DDP and FSDP expect a tensor in the future.
        return FarwireWork([self._comm(opts).barrier(async_=True)], [torch.zeros(1)])

    def send(self, tensors, to, tag):
        (tensor,) = tensors
        operation = self._comm().send(_flat(tensor), to, tag, async_=True)
        return FarwireWork([operation], tensors)

    def recv(self, tensors, source, tag):
        (tensor,) = tensors
        flat = _flat(tensor)
        operation = self._comm().recv(flat, source, tag, async_=True)
        return FarwireWork([operation], tensors, _back(tensors, [flat]))

    def recv_anysource(self, tensors, tag):
        raise CallError("farwire receives from a rank that is named; give src=")

    def _comm(self, opts=None):
        """The communicator, with the deadline of a call."""
        if self._whole is None:
            raise CallError("this group was destroyed; make it again")
        self._number += 1
        deadline = (opts and _seconds(opts.timeout)) or self._deadline
        comm = self._deadlines.get(deadline)
        if comm is None:
            comm = self._deadlines[deadline] = self._whole.with_options(deadline=deadline)
        return comm


def _flat(tensor):
    """A tensor's elements as a flat tensor: the same memory if possible, or a copy."""
    if tensor.layout != torch.strided:
        raise CallError(f"farwire moves dense tensors, not {tensor.layout}; use to_dense()")
    tensor = tensor.detach()
    return tensor.resolve_conj().resolve_neg().contiguous().view(-1)


def _check_equal(call, mine, others):
    """Raises an error unless a rank's own tensor and those for others have the same size."""
    for other in others:
        if other.numel() != mine.numel():
            raise CallError(
                f"{call} of tensors with {mine.numel()} and with {other.numel()} elements; "
                "give tensors of one size, on all ranks"
            )


def _back(tensors, flat):
    """A function that copies results to where they belong, or None if they are there already."""
    elsewhere = [
        (tensor.detach(), one) for tensor, one in zip(tensors, flat)
        if one.data_ptr() != tensor.data_ptr()
    ]  # fmt: skip
    if not elsewhere:
        return None
    return lambda: [tensor.copy_(one.view(tensor.shape)) for tensor, one in elsewhere]


def _is_bitwise(op):
    return any(op == known for known in _BITWISE)


def _together(works, result):
    """Several calls as one."""
    if len(works) == 1:
        return works[0]
    operations = [operation for work in works for operation in work._operations]
    return FarwireWork(operations, result, lambda: [work._end() for work in works])
