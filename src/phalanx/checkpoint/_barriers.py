"""The kinds of barriers, their registry, and the one that runs on a process group.

`TCPStoreBarrier` and `DistBarrier` are thin: `_store_barrier` has the protocol. `GroupBarrier` runs
on a group of its own at the speed of its engine. A group that failed stays failed, so after a
failure the ranks use the store protocol; once a call has passed there, they form a new group.
"""

from __future__ import annotations

import abc
import math
import operator
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store
from torch.distributed.distributed_c10d import _get_default_group, _get_default_store

from ..errors import (
    BarrierError,
    BarrierTimeout,
    CollectiveTimeout,
    GroupError,
    InvalidArgument,
    InvalidState,
    InvalidType,
    RankMismatch,
    RendezvousError,
    Unprepared,
)
from ..groups import ProcessGroup, Work
from ..groups._factory import default_group
from ..groups._formatting import first_line
from ..groups._store import check_rank_and_size, open_store
from ..groups._store_client import clone_connection
from ._store_barrier import StoreBarrierMember, check_text
from ._store_connection import store_address

FRAME_BYTES = 512
"""Bytes in which what a rank says travels at first, with its length; the rest goes after it."""

LENGTH_BYTES = 4  # bytes

NOTIFY_TIMEOUT = 1.0  # seconds for which an error may be held back to tell others of it


class GroupBarrierMember:
    """One rank's place at a barrier of a group; for one thread at a time, as a group is."""

    def __init__(self, group: ProcessGroup, timeout: timedelta) -> None:
        self.prefix = f"{group.label}/barrier-{group._count_split('barrier')}"
        self._group = group
        self._timeout = timeout
        self._number = 0  # of the last use
        self._passed = 0  # the last use that had passed when the group failed
        self._line: StoreBarrierMember | None = None
        self._own: ProcessGroup | None = None
        self._start: Callable[[], Work | None] = _no_fast_path
        self._form()

    def execute_barrier(self) -> None:
        """Wait until every rank has come; raise `BarrierTimeout` if some do not."""
        # At memory speed every line counts: no lock, no call of our own, nothing kept that can be
        # told afterwards.
        self._number += 1
        own = self._own
        if own is None:
            self._meet_in_store(None)
            return
        try:
            (self._start() or own.barrier()).wait()
        except GroupError as error:
            raise self._failed(own, error) from error
        except BaseException as error:
            self._leave(own, error)
            raise

    def exchange(self, text: str) -> list[str]:
        """Do the same, and return what every rank has said, by rank."""
        self._number += 1
        own = self._own
        if own is None:
            return self._meet_in_store(check_text(text))
        try:
            return _exchange(own, check_text(text))
        except GroupError as error:
            raise self._failed(own, error) from error
        except BaseException as error:
            self._leave(own, error)
            raise

    def _failed(self, own: ProcessGroup, error: GroupError) -> BarrierError:
        """Leave the group that has failed, and say why."""
        self._leave(own, error)
        kind = BarrierTimeout if isinstance(error, CollectiveTimeout) else BarrierError
        # Ranks that disagree have come, and so has one that is too late by now.
        missing = set() if isinstance(error, RankMismatch) else set(error.ranks) - {own.rank()}
        progress = dict.fromkeys(missing, self._passed)
        return self._error(kind, first_line(error), progress)

    def _leave(self, own: ProcessGroup, error: BaseException) -> None:
        """Go over to the store, and have everybody do so: nobody knows who has passed the use."""
        self._own = None
        self._passed = self._number - 1  # for the group was formed after one that has passed
        own.abort(f"its barrier raised {type(error).__name__}")
        with suppress(BarrierError):  # the store's host may be the one that is dead
            self._reach_store(patience=NOTIFY_TIMEOUT).note(self._number)

    def _error(
        self, kind: type[BarrierError], told: str, progress: dict[int, int] | None = None
    ) -> BarrierError:
        use, rank = self._number, self._group.rank()
        told = f"barrier {self.prefix!r}, use {use}, rank {rank}: {told}"
        return kind(told, barrier=self.prefix, use=use, progress=progress)

    def _meet_in_store(self, text: str | None) -> list[str]:
        began, timeout = time.monotonic(), self._timeout.total_seconds()
        line = self._reach_store(patience=timeout)
        line.skip_to(self._number, passed=self._passed)
        took = time.monotonic() - began
        texts = line.meet(
            text, timeout if took < NOTIFY_TIMEOUT else max(timeout - took, NOTIFY_TIMEOUT)
        )
        self._passed = self._number
        with suppress(Exception):  # the use has passed; the next one meets in the store, too
            self._form()
            if self._group.rank() == 0:  # nobody forms a group before it has left the use
                line.forget()
        return texts

    def _reach_store(self, *, patience: float) -> StoreBarrierMember:
        if self._line is None:
            store = self._group.get_group_store()
            assert store is not None, "a group that can fail was formed in a store"
            try:
                self._line = StoreBarrierMember(
                    lambda: clone_connection(store),
                    self.prefix,
                    rank=self._group.rank(),
                    size=self._group.size(),
                    host=f"the store of group {self._group.label!r}",
                    patience=patience,
                    address=store_address(store),
                )
            except RendezvousError as error:
                kind = BarrierTimeout if isinstance(error, TimeoutError) else BarrierError
                raise self._error(kind, first_line(error)) from error
        return self._line

    def _form(self) -> None:
        """Make the barrier's own group, together with all other ranks."""
        name = f"{self.prefix.rpartition('/')[2]}-{self._number}"
        ranks = range(self._group.size())
        self._own = own = self._group.split_group(ranks, timeout=self._timeout, group_name=name)
        # The first thing that `own.barrier` tries, without the call; it has nothing to say where
        # the long way has to be taken.
        self._start = (
            own._issuer.fast_path.barrier
            if own is not None and own._issuer.fast_path
            else _no_fast_path
        )


def _no_fast_path() -> None:
    """Do what a group without a short way does."""


def _exchange(group: ProcessGroup, text: str) -> list[str]:
    """Bring to all ranks what each says."""
    mine = text.encode(errors="surrogatepass")  # a name of a file may have some
    framed = len(mine).to_bytes(LENGTH_BYTES, "little") + mine
    frames = _gather(group, framed[:FRAME_BYTES], FRAME_BYTES)
    lengths = [int.from_bytes(frame[:LENGTH_BYTES], "little") for frame in frames]
    rest = LENGTH_BYTES + max(lengths) - FRAME_BYTES
    if rest > 0:
        tails = _gather(group, framed[FRAME_BYTES:], rest)
        frames = [frame + tail for frame, tail in zip(frames, tails, strict=True)]
    told = zip(frames, lengths, strict=True)
    return [
        frame[LENGTH_BYTES : LENGTH_BYTES + length].decode(errors="surrogatepass")
        for frame, length in told
    ]


def _gather(group: ProcessGroup, part: bytes, width: int) -> list[bytes]:
    mine = torch.frombuffer(bytearray(part.ljust(width, b"\0")), dtype=torch.uint8)
    every = [torch.empty_like(mine) for _ in range(group.size())]
    group.allgather(every, mine).wait()
    return [bytes(each.tolist()) for each in every]


DEFAULT_TIMEOUT = 600.0  # seconds; what a checkpoint's writer gives a barrier, too
MAX_TIMEOUT = 1e6  # seconds: torch's store cannot count to a month

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
    if holder is not barrier_class and not _is_reloaded(holder, barrier_class):
        raise InvalidArgument(
            f"barrier_type {name!r} of {barrier_class.__name__} is that of "
            f"{holder.__module__}.{holder.__qualname__}: choose another"
        )
    BARRIER_REGISTRY[name] = barrier_class
    return barrier_class


def _is_reloaded(one: type, other: type) -> bool:
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

    _line: StoreBarrierMember
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
            _check_integer("global_rank", global_rank),
            _check_integer("global_world_size", global_world_size),
        )
        prefix = _check_string("barrier_prefix", barrier_prefix)
        self._timeout = _check_seconds("timeout_secs", timeout_secs)
        patience = _check_seconds("timeout_barrier_init_secs", timeout_barrier_init_secs)
        host, port = _check_string("master_address", master_address), _check_port(tcpstore_port)
        url = f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"
        within = timedelta(seconds=patience)
        self._line = StoreBarrierMember(
            lambda: _open_store(url, rank, size, within),
            prefix,
            rank=rank,
            size=size,
            host=f"the store at {host}:{port}, which rank 0 hosts,",
            patience=patience,
            address=None if rank == 0 else (host, port),
        )


def _open_store(url: str, rank: int, size: int, within: timedelta) -> Store:
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
        self._timeout = _check_seconds("timeout_secs", timeout_secs)
        group = _get_default_group()
        with _default_members_lock:
            if group not in _default_members:
                _default_members[group] = _make_default_member()
            self._line = _default_members[group]


_default_members_lock = threading.Lock()  # so that threads which come at once share one
_default_members: WeakKeyDictionary[dist.ProcessGroup, StoreBarrierMember] = WeakKeyDictionary()


def _make_default_member() -> StoreBarrierMember:
    store = _get_default_store()
    return StoreBarrierMember(
        lambda: clone_connection(store),
        "dist_barrier",
        rank=dist.get_rank(),
        size=dist.get_world_size(),
        host="the store of the default group",
        address=store_address(store),
    )


@register_barrier
class GroupBarrier(GroupBarrierMember, Barrier):
    """A barrier of the ranks of a phalanx group: in shared memory, if that is what the group uses.

    `group` is by default the thread's current one, or else torch's default group. The barrier has a
    group of its own, made of the same ranks, so that a barrier that fails leaves `group` as it was.
    All ranks make it together.
    """

    barrier_type = "group"

    def __init__(
        self, group: dist.ProcessGroup | None = None, *, timeout_secs: float = DEFAULT_TIMEOUT
    ) -> None:
        within = timedelta(seconds=_check_seconds("timeout_secs", timeout_secs))
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


def _check_seconds(name: str, value: float) -> float:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise InvalidType(f"{name} is a number of seconds, not {value!r}")
    if not 0 < value < math.inf:
        raise InvalidArgument(f"{name} must be a positive number of seconds, not {value!r}")
    return min(float(value), MAX_TIMEOUT)


def _check_integer(name: str, value: int) -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise InvalidType(f"{name} is a whole number, not {value!r}") from None


def _check_port(value: int | str) -> int:
    with suppress(ValueError, TypeError):
        if 0 < (port := int(value)) < 1 << 16:
            return port
    raise InvalidArgument(
        f"tcpstore_port must be a port that all ranks know, from 1 to 65535, not {value!r}"
    )


def _check_string(name: str, value: str) -> str:
    if not isinstance(value, str):
        raise InvalidType(f"{name} is a string, not {value!r}")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise InvalidArgument(f"{name} must be text that UTF-8 can write, not {value!r}") from None
    return value
