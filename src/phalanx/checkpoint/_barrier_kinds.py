"""The kinds of barriers, and how a configuration names them.

`_barrier_line` tells how ranks meet in a store, `_barrier_group` how they do in a group.
"""

from __future__ import annotations

import abc
import math
import operator
import threading
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch._C._distributed_c10d import Store
from torch.distributed.distributed_c10d import _get_default_group, _get_default_store

from ..errors import InvalidArgument, InvalidState, InvalidType, Unprepared
from ..groups import ProcessGroup
from ..groups._factory import default_group
from ..groups._store import check_rank_and_size, open_store
from ..groups._store_client import clone_connection
from ._barrier_connection import address_of
from ._barrier_group import GroupLine
from ._barrier_line import Line
from ._barrier_words import check_text

__all__ = [
    "BARRIER_REGISTRY",
    "Barrier",
    "BarrierConfig",
    "DistBarrier",
    "GroupBarrier",
    "TCPStoreBarrier",
    "create_barrier_from_config",
    "register_barrier",
]

DEFAULT_TIMEOUT = 600.0  # seconds; what a checkpoint's writer gives a barrier, too
LONGEST = 1e6  # seconds: torch's store cannot count to a month

BARRIER_REGISTRY: dict[str, type] = {}
"""The classes of barriers, by the name that a configuration gives them."""

C = TypeVar("C", bound=type)


def register_barrier(barrier_class: C) -> C:
    """Make a class known under its ``barrier_type``; used as a decorator."""
    name = getattr(barrier_class, "barrier_type", None)
    if not isinstance(name, str) or not name:
        raise InvalidArgument(
            f"{barrier_class.__name__} needs a class attribute barrier_type, the name that a "
            "BarrierConfig will call it by"
        )
    holder = BARRIER_REGISTRY.setdefault(name, barrier_class)
    if holder is not barrier_class and not _is_same_code(holder, barrier_class):
        raise InvalidArgument(
            f"barrier_type {name!r} of {barrier_class.__name__} is that of "
            f"{holder.__module__}.{holder.__qualname__}: choose another"
        )
    BARRIER_REGISTRY[name] = barrier_class
    return barrier_class


def _is_same_code(one: type, other: type) -> bool:
    """Tell whether a class is another's successor, as after a module was reloaded."""
    return (one.__module__, one.__qualname__) == (other.__module__, other.__qualname__)


@dataclass
class BarrierConfig:
    """Which barrier to make, and the arguments to make it with; none by default."""

    barrier_type: str | None = None
    barrier_args: dict[str, Any] = field(default_factory=dict)


def create_barrier_from_config(barrier_config: BarrierConfig) -> Barrier | None:
    """Make the barrier that a configuration names, or None if it names none."""
    name = barrier_config.barrier_type
    if name is None:
        return None
    if name not in BARRIER_REGISTRY:
        known = ", ".join(sorted(map(repr, BARRIER_REGISTRY)))
        raise InvalidArgument(f"there is no barrier_type {name!r}: there are {known}")
    barrier: Barrier = BARRIER_REGISTRY[name](**barrier_config.barrier_args)
    return barrier


class Barrier(abc.ABC):
    """A place where every rank waits until all have come."""

    @abc.abstractmethod
    def __init__(self, **kwargs: dict[str, Any]):
        """Take what a configuration's ``barrier_args`` are for this kind of barrier."""

    @abc.abstractmethod
    def execute_barrier(self) -> None:
        """Wait until every rank has come."""


class _StoreBarrier(Barrier):
    """A barrier whose ranks meet in a store."""

    _line: Line
    _timeout: float

    def execute_barrier(self) -> None:
        """Wait until every rank has come; raise `BarrierTimeout`, on all alike, if some do not."""
        self._line.meet(None, self._timeout)

    def exchange(self, text: str) -> list[str]:
        """Do the same, and return what every rank has said, by rank."""
        with self._line.counting():
            check_text(text)
        return self._line.meet(text, self._timeout)


@register_barrier
class TCPStoreBarrier(_StoreBarrier):
    """A barrier in a `TCPStore` that rank 0 hosts; no group is needed.

    Barriers with different prefixes may share a port, and then share the server. Rank 0 serves for
    as long as its process lives. torch's server always uses libuv; upstream's argument for it is
    accepted, and means as little here as there.
    """

    barrier_type = "tcp_store"

    def __init__(
        self,
        global_rank: int,
        global_world_size: int,
        barrier_prefix: str,
        timeout_barrier_init_secs: int,
        use_checkpoint_barrier_tcpstore_libuv: bool,
        tcpstore_port: int,
        master_address: str,
        timeout_secs: int,
    ):
        del use_checkpoint_barrier_tcpstore_libuv
        rank, size = check_rank_and_size(
            _whole("global_rank", global_rank), _whole("global_world_size", global_world_size)
        )
        prefix = _text("barrier_prefix", barrier_prefix)
        self._timeout = _seconds("timeout_secs", timeout_secs)
        patience = _seconds("timeout_barrier_init_secs", timeout_barrier_init_secs)
        host, port = _text("master_address", master_address), _port(tcpstore_port)
        url = f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"
        within = timedelta(seconds=patience)
        self._line = Line(
            lambda: _open(url, rank, size, within),
            prefix,
            rank=rank,
            size=size,
            host=f"the store at {host}:{port}, which rank 0 hosts,",
            patience=patience,
            address=None if rank == 0 else (host, port),
        )


def _open(url: str, rank: int, size: int, within: timedelta) -> Store:
    meeting = open_store(url, rank=rank, size=size, timeout=within)
    if meeting.hosted is not None:
        meeting.hosted.stays = True  # for peers may use it when this rank's barrier is gone
    return meeting.store


@register_barrier
class DistBarrier(_StoreBarrier):
    """A barrier of the ranks of ``torch.distributed``'s default group, in that group's store.

    The group itself is not used: a barrier that fails leaves it as it was. All barriers of this
    kind are one and the same, as upstream's are.
    """

    barrier_type = "dist_barrier"

    def __init__(self, *, timeout_secs: float = DEFAULT_TIMEOUT) -> None:
        if not dist.is_initialized():
            raise Unprepared(
                "DistBarrier needs torch.distributed's default group: call "
                "torch.distributed.init_process_group first, or take a TCPStoreBarrier"
            )
        self._timeout = _seconds("timeout_secs", timeout_secs)
        group = _get_default_group()
        with _making_line:
            if group not in _default_lines:
                _default_lines[group] = _default_line()
            self._line = _default_lines[group]


_making_line = threading.Lock()  # so that threads which come at once share one
_default_lines: WeakKeyDictionary[dist.ProcessGroup, Line] = WeakKeyDictionary()


def _default_line() -> Line:
    store = _get_default_store()
    return Line(
        lambda: clone_connection(store),
        "dist_barrier",
        rank=dist.get_rank(),
        size=dist.get_world_size(),
        host="the store of the default group",
        address=address_of(store),
    )


@register_barrier
class GroupBarrier(GroupLine, Barrier):
    """A barrier of the ranks of a phalanx group: in shared memory, if that is what the group uses.

    `group` is by default the thread's current one, or else torch's default group. The barrier has a
    group of its own, made of the same ranks, so that a barrier that fails leaves `group` as it was.
    All ranks make it together.
    """

    barrier_type = "group"

    def __init__(
        self, group: dist.ProcessGroup | None = None, *, timeout_secs: float = DEFAULT_TIMEOUT
    ) -> None:
        within = timedelta(seconds=_seconds("timeout_secs", timeout_secs))
        found = default_group() if group is None else group
        if found is None:
            raise InvalidState(
                "GroupBarrier needs a group: pass one as group=, or make one the current group "
                "with phalanx.groups.process_group"
            )
        if not isinstance(found, ProcessGroup):
            raise InvalidType(
                f"GroupBarrier takes a group of phalanx.groups.new_group, not a "
                f"{type(found).__name__}: for torch's default group there is DistBarrier"
            )
        super().__init__(found, within)


def _seconds(name: str, value: float) -> float:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise InvalidType(f"{name} is a number of seconds, not {value!r}")
    if not 0 < value < math.inf:
        raise InvalidArgument(f"{name} must be a positive number of seconds, not {value!r}")
    return min(float(value), LONGEST)


def _whole(name: str, value: int) -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise InvalidType(f"{name} is a whole number, not {value!r}") from None


def _port(value: int | str) -> int:
    with suppress(ValueError, TypeError):
        if 0 < (port := int(value)) < 1 << 16:
            return port
    raise InvalidArgument(
        f"tcpstore_port must be a port that all ranks know, from 1 to 65535, not {value!r}"
    )


def _text(name: str, value: str) -> str:
    if not isinstance(value, str):
        raise InvalidType(f"{name} is a string, not {value!r}")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise InvalidArgument(f"{name} must be text that UTF-8 can write, not {value!r}") from None
    return value
