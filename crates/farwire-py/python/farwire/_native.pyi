"""The extension module. Programs use `farwire` instead."""

from typing import Any, Callable, Generator, Sequence

View = tuple[int, int, str, Any]

class Operation:
    """An operation in flight: `wait()` for it, `await` it, or have it call back."""

    def wait(self, timeout: float | None = None) -> Any: ...
    def done(self) -> bool: ...
    def add_done_callback(self, callback: Callable[[Operation], Any]) -> None: ...
    def __await__(self) -> Generator[Any, None, Any]: ...

class Comm:
    rank: int
    size: int
    def all_reduce(self, view: View, op: str, result: Any) -> Operation: ...
    def all_reduce_compressed(
        self, view: View, op: str, compressor: Compressor, name: str, result: Any
    ) -> Operation: ...
    def reduce(self, view: View, op: str, root: int, result: Any) -> Operation: ...
    def reduce_scatter(self, view: View, op: str, result: Any) -> Operation: ...
    def all_gather(self, view: View, result: Any) -> Operation: ...
    def all_gather_into(self, block: View, whole: View, result: Any) -> Operation: ...
    def broadcast(self, view: View, root: int, result: Any) -> Operation: ...
    def send(self, view: View, to: int, tag: int, result: Any) -> Operation: ...
    def recv(self, view: View, source: int, tag: int, result: Any) -> Operation: ...
    def apart(
        self,
        kind: str,
        dtype: str,
        input: View | None,
        output: View | None,
        result: Any,
        *,
        op: str = "sum",
        root: int = 0,
        send: Sequence[int] | None = None,
        recv: Sequence[int] | None = None,
    ) -> Operation: ...
    def barrier(self) -> Operation: ...
    def split(self, color: int, key: int) -> Comm: ...
    def subgroup(self, ranks: Sequence[int], name: str) -> Comm: ...
    def with_options(
        self,
        *,
        deadline: float | None = None,
        algorithm: str | None = None,
        segment: int | None = None,
    ) -> Comm: ...
    def is_in_sync(self, view: View) -> bool: ...
    def traffic(self) -> tuple[int, int]: ...
    def close(self) -> None: ...

class Compressor:
    def __new__(
        cls,
        codec: str,
        *,
        comm: Comm | None = None,
        feedback: bool = True,
        dense_below: int = 0,
        seed: int = 0,
    ) -> Compressor: ...
    @property
    def name(self) -> str:
        """The codec's name; a list of names if the codec depends on the length."""
    def owed(self, name: str) -> tuple[float, float] | None:
        """How much is owed for a tensor: the Euclidean norms of what this rank's messages left
        out, and of what it left out of sums. None if nothing was compressed under that name."""
    def state_dict(self) -> dict[str, Any]:
        """Everything that is owed. Each rank has its own."""
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from what `state_dict` returned."""

class Parts:
    def __new__(cls, parts: Sequence[tuple[str, int, int, Sequence[int]]]) -> Parts: ...

class Gradients:
    @property
    def step(self) -> int: ...
    def __new__(
        cls,
        comm: Comm,
        codec: str,
        rules: Sequence[tuple[str, str]],
        *,
        dense_steps: int | None = None,
        falling_steps: int | None = None,
        steps: int = 0,
        raise_on_nan: bool = False,
        seed: int = 0,
    ) -> Gradients: ...
    def begin_step(self) -> None: ...
    def end_step(self) -> bool: ...
    def bucket(
        self, comm: Comm, view: View, parts: Parts, result: Any, *, unused: bool = False
    ) -> Operation: ...
    def dense(self, parts: Parts, dtype: str) -> list[bool]: ...
    def bucket_on_card(
        self,
        comm: Comm,
        card: tuple[int, int, str, int, int, Any],
        dense: View | None,
        parts: Parts,
        result: Any,
        *,
        used: Sequence[bool] | None = None,
    ) -> tuple[Operation, CardOutcome] | str: ...
    def spoil(self) -> None: ...
    def bus(self) -> tuple[int, int]: ...
    def codec(self, name: str, elements: int, shape: Sequence[int]) -> tuple[str, float]: ...
    def residuals(self) -> bytes: ...
    def load(self, residuals: bytes, number: int) -> None: ...

class CardOutcome:
    def missing(self) -> list[tuple[int, int]]: ...
    def unused(self) -> list[tuple[int, int]]: ...

def join(
    *,
    rank: int | None = None,
    size: int | None = None,
    address: tuple[str, int] | None = None,
    job: str | None = None,
    token: str | None = None,
    link: str | None = None,
    preset: str | None = None,
    port: int | None = None,
    join_timeout: float | None = None,
    deadline: float | None = None,
) -> Comm: ...
def free_port(host: str) -> int: ...
def codec_help() -> str:
    """A text that lists the codecs by name and says what they do."""

def exit() -> None: ...
