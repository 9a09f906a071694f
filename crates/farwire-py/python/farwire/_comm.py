"""The communicator."""

from __future__ import annotations

import math
from typing import Any, Sequence

from . import _native
from ._errors import CallError
from ._views import view


def init(
    *,
    rank: int | None = None,
    size: int | None = None,
    address: str | tuple[str, int] | None = None,
    job: str | None = None,
    token: str | None = None,
    link: str | None = None,
    preset: str | None = None,
    port: int | None = None,
    join_timeout: float | None = None,
    deadline: float | None = None,
) -> Communicator:
    """Joins the job that this process was started in, and waits until all ranks have joined.

    Without arguments, the rank and the rest come from the launcher's environment: torchrun,
    `farwire launch`, mpirun, srun, a Kubernetes indexed job, or RANK, WORLD_SIZE, MASTER_ADDR and
    MASTER_PORT set by hand. Or give `rank`, `size`, and the `address` at which rank 0 listens
    ("10.0.0.1:29500"). Arguments that are not given come from the environment (FARWIRE_TOKEN,
    FARWIRE_LINK, …). Times are in seconds.

    >>> comm = farwire.init()
    >>> comm.all_reduce(array, op="mean")
    """
    if isinstance(address, str):
        host, colon, number = address.rpartition(":")
        if not colon or not number.isdigit():
            raise ValueError(f"address {address!r} is not HOST:PORT, like 10.0.0.1:29500")
        address = (host.strip("[]"), int(number))
    return Communicator(
        _native.join(
            rank=rank, size=size, address=address, job=job, token=token, link=link, preset=preset,
            port=port, join_timeout=join_timeout, deadline=deadline,
        )
    )  # fmt: skip


class Communicator:
    """A group of ranks, and this process's place in it.

    All ranks must make the same calls in the same order. If they do not, they get a `Desync` error
    that shows what each side called. An array is anything with the buffer protocol, a PyTorch
    tensor on the CPU, or anything with DLPack; it must be writable and contiguous. Calls work in
    place, without a copy, where they say so.

    Every call blocks, and returns the array with the result. With `async_=True` it returns an
    `Operation` at once: call `wait()` on it or `await` it, and leave the array alone until then.
    Ctrl-C ends a wait, but the operation goes on.
    """

    __slots__ = ("_comm", "__weakref__")

    def __init__(self, comm: _native.Comm):
        self._comm = comm

    @property
    def rank(self) -> int:
        """This process's rank in the group."""
        return self._comm.rank

    @property
    def size(self) -> int:
        """The number of ranks in the group."""
        return self._comm.size

    def all_reduce(
        self, array: Any, op: str = "sum", *, codec: Any = None, name: str | None = None,
        async_: bool = False,
    ) -> Any:  # fmt: skip
        """Combines the arrays of all ranks, in place: every rank gets the result.

        `op` is sum, mean, prod, min or max. Floats are combined in a fixed order: by rank, or host
        by host if several hosts have several ranks. So the result has the same bits on every rank.
        With a `codec`, a `Compressor`, `op` is sum or mean, and `name` is the tensor's name, under
        which the compressor remembers what the codec left out.

        >>> comm.all_reduce(gradient, op="mean")
        >>> comm.all_reduce(gradient, op="mean", codec=compressor, name="layer1")
        """
        if codec is None:
            return _end(self._comm.all_reduce(view(array, adds=op), op, array), async_)
        if name is None:
            raise CallError("a codec remembers by name what it omits; give name=, the tensor's")
        if not isinstance(codec, _native.Compressor):
            raise CallError(
                f"codec is {codec!r}; give a farwire.Compressor, made once for the whole run"
            )
        place = view(array, adds=op)
        return _end(self._comm.all_reduce_compressed(place, op, codec, name, array), async_)

    def reduce(self, array: Any, op: str = "sum", root: int = 0, *, async_: bool = False) -> Any:
        """Combines the arrays of all ranks: the root gets the result, in place. The content of the
        other ranks' arrays is unspecified afterwards."""
        return _end(self._comm.reduce(view(array, adds=op), op, root, array), async_)

    def broadcast(self, array: Any, root: int = 0, *, async_: bool = False) -> Any:
        """Copies the root's array to all ranks, in place."""
        return _end(self._comm.broadcast(view(array), root, array), async_)

    def all_gather(self, array: Any, output: Any = None, *, async_: bool = False) -> Any:
        """Every rank gets the blocks of all ranks, in rank order.

        With `output`, which has room for all blocks, `array` is this rank's block. Without it,
        `array` is the whole, cut into equal blocks, with this rank's block in its place.

        >>> everyone = numpy.empty((comm.size, 3))
        >>> comm.all_gather(numpy.full(3, comm.rank, float), everyone)
        """
        if output is None:
            return _end(self._comm.all_gather(view(array), array), async_)
        block, whole = _alike(view(array), view(output))
        return _end(self._comm.all_gather_into(block, whole, output), async_)

    def reduce_scatter(
        self, array: Any, output: Any = None, op: str = "sum", *, async_: bool = False
    ) -> Any:
        """Combines the arrays of all ranks, and gives each rank its block of the result. Blocks are
        as even as possible; the first ones are longer.

        With `output`, the block goes there. Without it, the block takes its place in `array`, and
        the rest of `array` is unchanged.
        """
        place = view(array, adds=op)
        if output is None:
            return _end(self._comm.reduce_scatter(place, op, array), async_)
        _, block = _alike(place, view(output, adds=op))
        operation = self._comm.apart("reduce_scatter", place[2], place, block, output, op=op)
        return _end(operation, async_)

    def gather(
        self, array: Any, output: Any = None, root: int = 0, *, async_: bool = False
    ) -> Any:
        """The root gets the arrays of all ranks in its `output`, in rank order; the other ranks
        pass no `output`."""
        place, whole = view(array), None
        if root == self.rank:
            if output is None:
                raise CallError("the root gathers everyone's array; give output=, with room for all")
            _, whole = _alike(place, view(output))
        operation = self._comm.apart("gather", place[2], place, whole, output, root=root)
        return _end(operation, async_)

    def scatter(
        self, output: Any, array: Any = None, root: int = 0, *, async_: bool = False
    ) -> Any:
        """Each rank gets its block of the root's `array` in its `output`; the other ranks pass no
        `array`."""
        block, whole = view(output), None
        if root == self.rank:
            if array is None:
                raise CallError("the root scatters its array; give array=, with a block for each")
            whole, _ = _alike(view(array), block)
        operation = self._comm.apart("scatter", block[2], whole, block, output, root=root)
        return _end(operation, async_)

    def all_to_all(
        self, array: Any, output: Any, *, send: Sequence[int] | None = None,
        recv: Sequence[int] | None = None, async_: bool = False,
    ) -> Any:  # fmt: skip
        """Rank i's block j becomes rank j's block i, in `output`. Blocks have equal lengths, or
        `send[r]` elements to rank r and `recv[r]` elements from it."""
        given, wanted = _alike(view(array), view(output))
        wide = _bytes_per_element(array, given)
        operation = self._comm.apart(
            "all_to_all", given[2], given, wanted, output,
            send=_scaled(send, wide), recv=_scaled(recv, wide),
        )  # fmt: skip
        return _end(operation, async_)

    def scan(
        self, array: Any, op: str = "sum", *, exclusive: bool = False, async_: bool = False
    ) -> Any:
        """Rank r gets the combination of the arrays of ranks 0 to r, in place; if `exclusive`, of
        the ranks before r."""
        place = view(array, adds=op)
        kind = "exclusive_scan" if exclusive else "scan"
        return _end(self._comm.apart(kind, place[2], place, place, array, op=op), async_)

    def send(self, array: Any, to: int, tag: int = 0, *, async_: bool = False) -> Any:
        """Sends a message. Messages to one rank with one tag arrive in the order they were sent.
        The call ends when the data has left the array, not when it has arrived."""
        return _end(self._comm.send(view(array), to, tag, array), async_)

    def recv(self, array: Any, source: int, tag: int = 0, *, async_: bool = False) -> Any:
        """Receives the next message from one rank with one tag into the array, which must have the
        message's length."""
        return _end(self._comm.recv(view(array), source, tag, array), async_)

    def barrier(self, *, async_: bool = False) -> Any:
        """Waits until all ranks have called it."""
        return _end(self._comm.barrier(), async_)

    def split(self, color: int, key: int = 0) -> Communicator:
        """Splits the group: ranks that give the same color form a new group, ordered by key and
        then by rank. All ranks must call it."""
        return Communicator(self._comm.split(color, key))

    def subgroup(self, ranks: Sequence[int], name: str = "") -> Communicator:
        """A group of some of this group's ranks. Only these ranks call it, with the same ranks in
        the same order and the same name."""
        return Communicator(self._comm.subgroup(list(ranks), name))

    def with_options(
        self, *, deadline: float | None = None, algorithm: str | None = None,
        segment: int | None = None,
    ) -> Communicator:  # fmt: skip
        """The same group, with other settings for calls through it: the seconds that an operation
        may take, its algorithm, and the elements per frame. The last two must be the same on all
        ranks."""
        return Communicator(
            self._comm.with_options(deadline=deadline, algorithm=algorithm, segment=segment)
        )

    def is_in_sync(self, array: Any) -> bool:
        """Whether all ranks hold the same bits."""
        return self._comm.is_in_sync(view(array))

    @property
    def bytes_sent(self) -> int:
        """Bytes that this process has sent since it joined, on all its communicators."""
        return self._comm.traffic()[1]

    def shutdown(self) -> None:
        """Leaves in good order: waits until every rank has called it, then closes."""
        self.barrier()
        self.close()

    def close(self) -> None:
        """Leaves at once. To ranks that still need this one, it is lost."""
        self._comm.close()

    def __enter__(self) -> Communicator:
        return self

    def __exit__(self, kind, value, traceback) -> None:
        if kind is None:
            self.shutdown()
        else:
            self.close()

    def __reduce__(self):
        raise TypeError("a communicator belongs to its process; join in the other one, too")

    def __repr__(self) -> str:
        return f"<farwire.Communicator, rank {self.rank} of {self.size}>"


class Compressor(_native.Compressor):
    """A codec with error feedback: the state of compression on one rank.

    Every rank makes its own, with the same settings, and keeps it for the whole run: what the codec
    leaves out of a step is remembered under the tensor's name and sent with the next step.
    `farwire.codec_help()` lists the codecs. "auto" measures which is fastest; it needs `comm=`, and
    all ranks take part. Arrays of fewer than `dense_below` elements travel uncompressed.

    >>> top = farwire.Compressor("topk:0.01")
    >>> comm.all_reduce(gradient, op="mean", codec=top, name="layer1.weight")
    >>> checkpoint["compressor"] = top.state_dict()   # on every rank: each has its own
    """

    def __new__(
        cls, codec: str, *, comm: Communicator | None = None, feedback: bool = True,
        dense_below: int = 0, seed: int = 0,
    ):  # fmt: skip
        return super().__new__(
            cls, codec, comm=comm and comm._comm, feedback=feedback, dense_below=dense_below,
            seed=seed,
        )  # fmt: skip


def _end(operation: _native.Operation, async_: bool) -> Any:
    return operation if async_ else operation.wait()


def _alike(given: tuple, wanted: tuple) -> tuple:
    """Both views, after a check that their elements have the same type."""
    if given[2] != wanted[2]:
        raise TypeError(
            f"the input has elements of type {given[2]} and the output of type {wanted[2]}; "
            "give both the same type"
        )
    return given, wanted


def _bytes_per_element(array: Any, place: tuple) -> int:
    """The factor by which counts of elements grow if the elements move as bytes."""
    if place[2] != "u8":
        return 1
    count = array.numel() if hasattr(array, "numel") else math.prod(memoryview(array).shape)
    return place[1] // count if count else 1


def _scaled(counts: Sequence[int] | None, by: int) -> list[int] | None:
    return None if counts is None else [int(count) * by for count in counts]
