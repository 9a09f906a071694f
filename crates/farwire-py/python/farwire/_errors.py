"""What can go wrong."""

from __future__ import annotations


class Error(RuntimeError):
    """Something that farwire could not do. The text says what failed, where, and what to do.

    `rank` is the rank at fault, numbered in the communicator of the call; `world_rank` is its
    number among all processes. Each is None if no rank is at fault, or if it is not known.
    `advice` is what to do.
    """

    rank: int | None
    world_rank: int | None

    def __init__(self, message: str, rank: int | None = None, world_rank: int | None = None):
        super().__init__(message)
        self.rank = rank
        self.world_rank = world_rank

    def __reduce__(self):
        return type(self), (str(self), self.rank, self.world_rank)

    @property
    def advice(self) -> str:
        """What to do."""
        return str(self).partition("; ")[2]


class LostRank(Error):
    """A rank died, stopped answering or cannot be reached."""


class Desync(Error):
    """Ranks made different calls for the same operation."""


class Timeout(Error, TimeoutError):
    """A rank waited longer than its deadline."""


class NotFinite(Error):
    """A rank's gradient holds a NaN or an infinity. All ranks get the same error."""


class CallError(Error, ValueError):
    """A call that makes no sense; nothing was sent."""


class JoinError(Error):
    """The job could not be joined."""


class Forked(Error):
    """farwire was used in a process that was forked from the one that joined."""
