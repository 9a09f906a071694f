"""The hook between sites, for FSDP2.

Inside a site, `fully_shard` shards the model and reduce-scatters gradients over NCCL or Gloo.
Between sites, each rank then exchanges its shard, through a codec, with the ranks that hold the
same shard at other sites. FSDP2 calls the hook for each sharded module, with its flat shard.
"""

from typing import Any

import torch

from .._comm import Communicator
from ._hook import Gradients, Rules, layout_of


def fsdp_hook(
    model: torch.nn.Module,
    comm: Communicator,
    codec: str = "none",
    *,
    rules: Rules = None,
    steps: int = 1000,
    phase_in: tuple[int, int] | None = None,
    on_nan: str = "skip",
    seed: int = 0,
) -> "Between":
    """Sets up averaging of an FSDP2 model's gradients between sites, and returns the state.

    `comm` has the ranks that hold the same shard, one at each site: if `world` has all ranks, it is
    `world.split(color=rank_in_site)`. Call this after `fully_shard`; the hook is set on every
    module that was sharded. What is owed is kept by module name. Everything else is as for
    `State`.

    >>> world = farwire.init()
    >>> state = farwire.torch.fsdp_hook(model, world.split(color=rank_in_site), "topk:0.01")
    """
    state = Between(comm, codec, rules, steps, phase_in, on_nan, seed)
    sharded = [
        (name, module) for name, module in model.named_modules()
        if hasattr(module, "set_all_reduce_hook")
    ]  # fmt: skip
    if not sharded:
        raise ValueError("no module of this model was sharded; call fully_shard(model) first")
    for name, module in sharded:
        module.set_all_reduce_hook(state.hook_for(name or "root"))
    return state


class Between(Gradients):
    """The state of the hooks of one model."""

    def __init__(self, *args):
        super().__init__(*args)
        self._seen = set()

    def hook_for(self, name):
        """The hook of one module."""

        def exchange(gradient):
            # A module's gradient comes once in a step, in an order of FSDP's own.
            if not self._seen or name in self._seen:
                self.end_step()
                self._begin()
            self._seen.add(name)
            flat = gradient.view(-1)
            layout = self._layouts.get((name, flat.numel()))
            if layout is None:
                # A matrix of one row, so that it is not taken for a bias.
                parts = [(name, 0, flat.numel(), (1, flat.numel()))]
                layout = self._layouts[name, flat.numel()] = layout_of(parts)
            self._start(flat, layout, name)
            self._wait()

        return exchange

    def end_step(self) -> None:
        """Ends a step: what its gradients left out is now owed. The next step's first gradient
        and `state_dict()` do this, too."""
        if self._seen:
            self._seen.clear()
            self._native.end_step()

    def state_dict(self) -> dict[str, Any]:
        self.end_step()
        return super().state_dict()
