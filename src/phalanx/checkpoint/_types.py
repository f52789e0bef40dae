"""Types and checks that all of checkpointing shares."""

from __future__ import annotations

import operator
import os
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, TypeVar

from .. import errors
from ..errors import InvalidArgument, InvalidState, InvalidType, PhalanxError

E = TypeVar("E", bound=PhalanxError)

STATE_DICT: TypeAlias = dict[str, Any]
"""Nested dicts, lists and tuples of tensors, JSON-like values and objects with a ``state_dict``."""


@dataclass
class RankInfo:
    """A rank and the world size."""

    global_rank: int
    """This rank among those that save and load together."""
    global_world_size: int
    """The number of ranks that save and load together."""

    def __str__(self) -> str:
        return f"rank {self.global_rank} of {self.global_world_size}"

    def __post_init__(self) -> None:
        if not 0 <= self.global_rank < self.global_world_size:
            raise InvalidArgument(
                f"rank must be in [0, {self.global_world_size}), got {self.global_rank}"
            )


class BarrierLike(Protocol):
    """What a writer needs of a barrier. If it has `exchange`, ranks need no message files."""

    def execute_barrier(self) -> None:
        """Wait until every rank has arrived."""


def check_integer(name: str, value: object, *, hint: str = "") -> int:
    """Return `value` as an int; raise `InvalidType` if it is not an integer."""
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        # Not its value, which may be a whole state.
        kind = type(value).__name__
        raise InvalidType(f"{name} must be an integer, got {kind}{hint}") from None


def error_name(error: BaseException) -> str:
    """Return the name by which `error_class` finds the class of an error, or its nearest base."""
    classes = type(error).__mro__
    return next((c.__name__ for c in classes if getattr(errors, c.__name__, None) is c), "")


def error_class(name: str, base: type[E]) -> type[E]:
    """Return the error class of that name if it derives from `base`, else `base`."""
    found = getattr(errors, name, None)
    return found if isinstance(found, type) and issubclass(found, base) else base


def check_not_forked(pid: int, what: str) -> None:
    """Raise in a fork of process `pid`, which lacks its threads and shares its sockets."""
    if pid != os.getpid():
        raise InvalidState(
            f"this {what} belongs to process {pid} and cannot be used in its fork {os.getpid()}. "
            f"Create a {what} in the forked process"
        )
