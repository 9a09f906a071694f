"""farwire: training models across the networks people actually have.

    import farwire

    comm = farwire.init()                    # torchrun, farwire launch, mpirun, srun, or explicit
    comm.all_reduce(array, op="mean")        # in place; async_=True gives an Operation
    top = farwire.Compressor("topk:0.01")    # sends 1 % of the elements; the rest is owed
    comm.all_reduce(gradient, op="mean", codec=top, name="layer1")

`farwire.torch` has a hook for DistributedDataParallel, a backend for torch.distributed, and a hook
between sites for FSDP2.
"""

import atexit as _atexit

from . import _native
from ._comm import Communicator, Compressor, init
from ._errors import (
    CallError,
    Desync,
    Error,
    Forked,
    JoinError,
    LostRank,
    NotFinite,
    Timeout,
)
from ._native import Operation, codec_help

__all__ = [
    "CallError",
    "Communicator",
    "Compressor",
    "Desync",
    "Error",
    "Forked",
    "JoinError",
    "LostRank",
    "NotFinite",
    "Operation",
    "Timeout",
    "codec_help",
    "init",
]

# Before the interpreter ends: stop all callbacks into it, and tell the other ranks.
_atexit.register(_native.exit)
