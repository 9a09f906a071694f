"""The hook for DistributedDataParallel.

DDP cuts gradients into buckets, and calls the hook for each as soon as backward has filled it. The
hook starts a bucket and returns; farwire's own threads encode and move the data while backward goes
on, without the interpreter. At the last bucket there is nothing left to compute: only then does the
hook wait, for all buckets. An error of any of them is raised unchanged from `loss.backward()`.
"""

import gc
import math
import warnings
from typing import Any, Iterable, Mapping, Union

import torch
from torch.nn.parallel import DistributedDataParallel

from .. import _native
from .._comm import Communicator
from .._errors import CallError
from .._views import tensor_dtype, view
from ._nvrtc import load_nvrtc

#: Codecs by pattern of parameter names; the first match decides.
Rules = Union[Mapping[str, str], Iterable[tuple[str, str]], None]


class Gradients:
    """Gradients by name, and what is owed for them: the common part of all hooks.

    A step begins with its first bucket. It counts as a whole or not at all.
    """

    def __init__(self, comm, codec, rules, steps, phase_in, on_nan, seed):
        if on_nan not in ("skip", "raise"):
            raise CallError(f"on_nan is {on_nan!r}; use 'skip' or 'raise'")
        if not isinstance(comm, Communicator):
            raise CallError(
                f"comm is {type(comm).__name__}; give a farwire.Communicator: farwire.init()"
            )
        try:
            dense, falling = phase_in if phase_in is not None else (None, None)
        except (TypeError, ValueError):
            raise CallError(
                f"phase_in is {phase_in!r}; give two numbers of steps: (dense, falling)"
            ) from None
        if steps < 0:
            raise CallError(f"steps is {steps}; give how many steps the run has")
        rules = list(rules.items() if hasattr(rules, "items") else rules or ())
        self.comm = comm
        self._native = _native.Gradients(
            comm._comm, codec, rules, dense_steps=dense, falling_steps=falling, steps=steps,
            raise_on_nan=on_nan == "raise", seed=seed,
        )  # fmt: skip
        self._layouts = {}
        self._staging = {}
        self._running = []
        self._staged_bytes = 0
        self._codes_on_card = True

    @property
    def step(self) -> int:
        """The number of steps that have ended."""
        return self._native.step

    def codec(self, name: str, shape: Iterable[int]) -> tuple[str, float]:
        """The codec for a parameter of this name and shape in the next step, and the share of its
        elements that is sent."""
        shape = tuple(shape)
        return self._native.codec(name, torch.Size(shape).numel(), shape)

    def state_dict(self) -> dict[str, Any]:
        """What is owed, and how far the phase-in is. Each rank has its own: save it on every rank,
        and load it on the same rank."""
        residuals = bytearray(self._native.residuals())
        return {"step": self.step, "residuals": torch.frombuffer(residuals, dtype=torch.uint8)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from what `state_dict` returned. If `state` is not valid, nothing changes."""
        residuals = bytes(state["residuals"].cpu().contiguous().numpy())
        try:
            step = int(state["step"])
        except (TypeError, ValueError, OverflowError):
            step = -1
        if not 0 <= step < 2**64:
            raise CallError(f"step is {state['step']!r}; load what state_dict() returned")
        self._native.load(residuals, step)

    def _begin(self):
        """Begins a step. If the step before it was aborted, it is undone."""
        for operation, _ in self._running:
            try:
                operation.wait()
            except RuntimeError:
                pass  # it was reported when it happened, or is of no interest
        self._running.clear()
        self._native.begin_step()

    def _start(self, buffer, layout, key, unused=False):
        """Starts replacing a flat tensor by its mean over all ranks."""
        if buffer.device.type == "cuda" and self._codes_on_card:
            started = self._start_on_card(buffer, layout, key, unused)
            if started is not None:
                self._running.append(started)
                return
        host = buffer
        if buffer.device.type != "cpu":
            host = self._staged(buffer, key)
            torch.cuda.current_stream(buffer.device).synchronize()
        operation = self._native.bucket(
            self.comm._comm, view(host), layout[0], buffer, unused=unused
        )
        finish = None if host is buffer else lambda: buffer.copy_(host, non_blocking=True)
        self._running.append((operation, finish))

    def _start_on_card(self, buffer, layout, key, unused):
        """The same on the tensor's own GPU; returns None if the tensor has to be staged.

        Parameters with a codec are encoded on the card, after the work that its stream has now, and
        only messages leave the card. Parameters that travel uncompressed are staged.
        """
        layout, places = layout
        dtype = tensor_dtype(buffer)
        dense = [
            place for place, is_dense in zip(places, self._native.dense(layout, dtype)) if is_dense
        ]
        if len(dense) == len(places):
            return None
        load_nvrtc()
        used = None
        if unused:
            used = torch.stack([buffer[a : a + n].any() for a, n in places]).tolist()
        host = None
        stream = torch.cuda.current_stream(buffer.device)
        if dense:
            host = self._staged(torch.cat([buffer[a : a + n] for a, n in dense]), key)
            stream.synchronize()
        card = (
            buffer.data_ptr(), buffer.numel(), dtype, buffer.device.index, stream.cuda_stream,
            buffer,
        )  # fmt: skip
        started = self._native.bucket_on_card(
            self.comm._comm, card, None if host is None else view(host), layout, buffer, used=used
        )
        if isinstance(started, str):
            self._codes_on_card = False
            warnings.warn(f"gradients on the GPU are coded on the CPU: {started}", stacklevel=2)
            return None
        operation, outcome = started

        def finish():
            at = 0
            for start, elements in dense:
                mean = host[at : at + elements]
                buffer[start : start + elements].copy_(mean, non_blocking=True)
                at += elements
            for start, elements in outcome.missing():
                buffer[start : start + elements].fill_(float("nan"))
            for start, elements in outcome.unused():
                buffer[start : start + elements].zero_()
            # A sum of residual and gradient may be too large for float16, even if each is not.
            if buffer.dtype == torch.float16 and not buffer.isfinite().all():
                self._native.spoil()

        return operation, finish

    def _staged(self, tensor, key):
        """Starts a copy of a tensor to pinned host memory, which is reused in every step."""
        host = self._staging.get(key)
        if host is None or host.numel() != tensor.numel() or host.dtype != tensor.dtype:
            host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._staging[key] = host
        self._staged_bytes += tensor.nbytes
        return host.copy_(tensor, non_blocking=True)

    def _wait(self):
        """Waits for everything that was started, and raises the first error."""
        failed = None
        for operation, finish in self._running:
            try:
                operation.wait()
            except RuntimeError as error:
                failed = failed or error
            else:
                if finish is not None:
                    finish()
        self._running.clear()
        if failed is not None:
            raise failed

    @property
    def bus_bytes(self) -> tuple[int, int]:
        """Bytes of gradients that have crossed a GPU's bus: to the host, and back."""
        to_host, to_card = self._native.bus()
        return to_host + self._staged_bytes, to_card + self._staged_bytes

    def __getstate__(self):
        raise TypeError("a hook's state belongs to its process; save its state_dict() instead")


class State(Gradients):
    """How to exchange the gradients of DistributedDataParallel, and what is owed for them.

    >>> comm = farwire.init()
    >>> state = farwire.torch.State(comm, "topk:0.01", steps=10_000)
    >>> model.register_comm_hook(state, farwire.torch.hook)

    `codec` compresses the gradients; `farwire.codec_help()` lists the codecs. Biases, norms,
    vectors and small parameters travel uncompressed. `rules` set other codecs by parameter name;
    the first pattern that matches decides: `{"*.embedding.*": "int8", "head.*": "none"}`. `steps`
    is the length of the run: a codec that leaves much out starts dense for an eighth of it, and its
    density falls over the next three quarters; `phase_in=(dense, falling)` sets this in steps. All
    ranks must pass the same arguments.

    If a bucket has a NaN or an infinity, the result is not finite on all ranks, so a GradScaler
    skips the step, and what is owed is unchanged; with `on_nan="raise"`, all ranks get a
    `NotFinite` error. `seed` is for codecs that choose at random. `model`, the DDP module, is found
    automatically, unless `gc.freeze()` hides it.
    """

    def __init__(
        self,
        comm: Communicator,
        codec: str = "none",
        *,
        rules: Rules = None,
        steps: int = 1000,
        phase_in: tuple[int, int] | None = None,
        on_nan: str = "skip",
        seed: int = 0,
        model: DistributedDataParallel | None = None,
    ):
        super().__init__(comm, codec, rules, steps, phase_in, on_nan, seed)
        self._model = model
        self._names = None
        self._unused = False
        self._futures = []

    def reduce(self, bucket):
        """Starts a bucket; the last bucket of a step waits for all."""
        if bucket.index() == 0:
            self._futures.clear()
            self._begin()
        buffer = bucket.buffer()
        if buffer.layout is not torch.strided:
            raise CallError(
                "a gradient is sparse, and the hook takes dense ones; "
                "make the embedding without sparse=True"
            )
        self._start(buffer, self._layout(bucket), bucket.index(), self._unused)
        future = torch.futures.Future(devices=None if buffer.is_cpu else [buffer.device])
        self._futures.append((future, buffer))
        if bucket.is_last():
            try:
                self._wait()
            finally:
                self._native.end_step()
            for started, result in self._futures:
                started.set_result(result)
            self._futures.clear()
        return future

    def _layout(self, bucket):
        """Where each parameter is in a bucket. DDP rebuilds its buckets after the first step."""
        parameters = bucket.parameters()
        key = (bucket.index(), tuple(map(id, parameters)))
        layout = self._layouts.get(key)
        if layout is None:
            if self._names is None:
                self._learn_names(parameters)
            if not all(id(parameter) in self._names for parameter in parameters):
                raise CallError(
                    "these gradients are of another model than those before; "
                    "make a State for each DistributedDataParallel module"
                )
            parts, start = [], 0
            for parameter in parameters:
                name, shape = self._names[id(parameter)], parameter.shape
                if parameter.is_complex():
                    shape = (*shape, 2)  # in a bucket, complex numbers are pairs
                elements = math.prod(shape)
                parts.append((name, start, elements, shape))
                start += elements
            layout = self._layouts[key] = layout_of(parts)
        return layout

    def _learn_names(self, parameters):
        """Finds the parameters' names in the module: DDP does not pass them to its hook."""
        wanted = set(map(id, parameters))
        for module in [self._model] if self._model is not None else gc.get_objects():
            if not issubclass(type(module), DistributedDataParallel):
                continue
            names = {
                id(parameter): name.replace("_orig_mod.", "")
                for name, parameter in module.module.named_parameters()
            }
            if wanted <= names.keys():
                self._names = names
                self._unused = module.find_unused_parameters and not module.static_graph
                return
        raise CallError(
            "the module that these gradients are of was not found; "
            "give it as State(model=…): the DistributedDataParallel module itself"
        )


def layout_of(parts):
    """A bucket's layout, made from (name, first element, elements, shape) for each parameter, and
    the places alone."""
    return _native.Parts(parts), [(start, elements) for _, start, elements, _ in parts]


def hook(state, bucket):
    """The hook for `model.register_comm_hook(farwire.torch.State(...), farwire.torch.hook)`."""
    return state.reduce(bucket)
