"""farwire in PyTorch.

Three levels, each useful alone:

1. A hook for DistributedDataParallel (torch 2.4 or later):

       model.register_comm_hook(farwire.torch.State(comm, "topk:0.01"), farwire.torch.hook)

2. A backend (torch 2.14 or later): `torch.distributed.init_process_group("farwire")`.

3. Between sites, for FSDP2: `farwire.torch.fsdp_hook(model, comm, "topk:0.01")`.

Gradients on a GPU are compressed there; those that travel uncompressed are staged through pinned
host memory.
"""

from ._hook import State, hook
from ._fsdp import fsdp_hook
from ._backend import CAN_DERIVE, register

if not CAN_DERIVE:
    register()

__all__ = ["State", "fsdp_hook", "hook", "register"]
