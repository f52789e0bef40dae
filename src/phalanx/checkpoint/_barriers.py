"""The kinds of barriers and their registry.

`TCPStoreBarrier` and `DistBarrier` run the protocol of `_store_barrier`. `GroupBarrier` runs on a
process group of its own, at the speed of its engine. A failed group stays failed, so after a
failure the ranks use the store protocol; once a call has passed there, they form a new group.

The ranks that save and load together are those of the given group, else of the current or torch's
default group. Without any, a checkpointer takes the rank that the launcher gave this process; a
`CheckpointManager` or `PreemptionGuard` warns and acts alone, as if only rank 0 saved, and the lock
on the directory keeps two of them apart.
"""

from __future__ import annotations

import abc
import logging
import math
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch._C._distributed_c10d import Store
from torch.distributed.distributed_c10d import _get_default_group, _get_default_store

from .. import errors
from .._formatting import first_line
from ..env import launched_rank
from ..groups import ProcessGroup, Work
from ..groups._current_group import default_group
from ..groups._store import check_rank_and_size, clone_connection, open_store
from ..groups._text_exchange import exchange_texts
from ._store_barrier import BarrierTimings, StoreBarrierMember
from ._store_connection import store_address
from ._types import RankInfo, check_integer

_log = logging.getLogger(__name__)

DEFAULT_TIMEOUT = 600.0  # seconds
MAX_TIMEOUT = 1e6  # seconds; torch's stores overflow at about a month

BARRIER_REGISTRY: dict[str, type] = {}
"""Barrier classes by their ``barrier_type``."""

C = TypeVar("C", bound=type)


def register_barrier(barrier_class: C) -> C:
    """Register a class under its ``barrier_type``; a decorator."""
    name = getattr(barrier_class, "barrier_type", None)
    if not isinstance(name, str) or not name:
        raise errors.InvalidArgument(
            f"{barrier_class.__name__} has no class attribute barrier_type, the name by which a "
            "BarrierConfig selects it"
        )
    holder = BARRIER_REGISTRY.get(name, barrier_class)
    taken, ours = (f"{each.__module__}.{each.__qualname__}" for each in (holder, barrier_class))
    if taken != ours:  # equal after a reload
        raise errors.InvalidArgument(
            f"barrier_type {name!r} of {barrier_class.__name__} is taken by {taken}"
        )
    BARRIER_REGISTRY[name] = barrier_class
    return barrier_class


@dataclass
class BarrierConfig:
    """Select a barrier class and its arguments; no barrier by default."""

    barrier_type: str | None = None
    barrier_args: dict[str, Any] = field(default_factory=dict)


def create_barrier_from_config(barrier_config: BarrierConfig) -> Barrier | None:
    """Create the barrier that a configuration selects, or None if it selects none."""
    name = barrier_config.barrier_type
    if name is None:
        return None
    if name not in BARRIER_REGISTRY:
        known = ", ".join(sorted(map(repr, BARRIER_REGISTRY)))
        raise errors.InvalidArgument(f"unknown barrier_type {name!r}. Registered: {known}")
    barrier: Barrier = BARRIER_REGISTRY[name](**barrier_config.barrier_args)
    return barrier


class Barrier(abc.ABC):
    """A point at which every rank waits until all ranks have arrived."""

    @abc.abstractmethod
    def __init__(self, **kwargs: dict[str, Any]):
        """Accept the ``barrier_args`` of a `BarrierConfig`."""

    @abc.abstractmethod
    def execute_barrier(self) -> None:
        """Wait until every rank has arrived."""


class _StoreBarrier(Barrier):
    _member: StoreBarrierMember
    _timeout: float

    def execute_barrier(self) -> None:
        """Wait until every rank has arrived; raise `BarrierTimeout` if some do not in time."""
        self._member.wait(None, self._timeout)

    def exchange(self, text: str) -> list[str]:
        """Wait as `execute_barrier` does, and return the texts of all ranks, by rank."""
        try:
            return self._member.wait(_check_text(text), self._timeout)
        except errors.InvalidType:
            self._member.fail_call("raised InvalidType")
            raise


@register_barrier
class TCPStoreBarrier(_StoreBarrier):
    """A barrier in a `TCPStore` that rank 0 hosts; it needs no process group.

    Barriers with different prefixes may share a port, and then share the server, which lives as
    long as rank 0's process. torch's server always uses libuv; upstream's argument for it is
    accepted and ignored, as upstream does.
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
        *,
        timings: BarrierTimings | None = None,
    ):
        del use_checkpoint_barrier_tcpstore_libuv
        rank, size = check_rank_and_size(
            check_integer("global_rank", global_rank),
            check_integer("global_world_size", global_world_size),
        )
        prefix = _check_string("barrier_prefix", barrier_prefix)
        self._timeout = _check_seconds("timeout_secs", timeout_secs)
        init_timeout = _check_seconds("timeout_barrier_init_secs", timeout_barrier_init_secs)
        host, port = _check_string("master_address", master_address), 0
        with suppress(ValueError, TypeError):
            port = int(tcpstore_port)
        if not 0 < port < 1 << 16:
            raise errors.InvalidArgument(
                f"tcpstore_port must be from 1 to 65535, got {tcpstore_port!r}"
            )
        url = f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"

        def connect() -> Store:
            opened = open_store(url, rank=rank, size=size, timeout=timedelta(seconds=init_timeout))
            if opened.hosted is not None:
                opened.hosted.keep_open = True  # peers may use it when this rank's barrier is gone
            return opened.store

        self._member = StoreBarrierMember(
            connect,
            prefix,
            rank=rank,
            size=size,
            host=f"the store at {host}:{port} (hosted by rank 0)",
            timeout=init_timeout,
            address=None if rank == 0 else (host, port),
            timings=timings,
        )


@register_barrier
class DistBarrier(_StoreBarrier):
    """A barrier of the ranks of ``torch.distributed``'s default group, in that group's store.

    It does not use the group itself, so a barrier that fails leaves the group intact. All barriers
    of this class are one barrier, as upstream's are.
    """

    barrier_type = "dist_barrier"

    def __init__(self, *, timeout_secs: float = DEFAULT_TIMEOUT) -> None:
        if not dist.is_initialized():
            raise errors.Unprepared(
                "DistBarrier needs torch.distributed's default group. Call "
                "torch.distributed.init_process_group first, or use a TCPStoreBarrier"
            )
        self._timeout = _check_seconds("timeout_secs", timeout_secs)
        group = _get_default_group()
        with _default_members_lock:
            if group not in _default_members:
                store = _get_default_store()
                _default_members[group] = StoreBarrierMember(
                    lambda: clone_connection(store),
                    "dist_barrier",
                    rank=dist.get_rank(),
                    size=dist.get_world_size(),
                    host="the store of the default group",
                    address=store_address(store),
                )
            self._member = _default_members[group]


_default_members_lock = threading.Lock()  # threads that create barriers at once share one member
_default_members: WeakKeyDictionary[dist.ProcessGroup, StoreBarrierMember] = WeakKeyDictionary()


@register_barrier
class GroupBarrier(Barrier):
    """A barrier of the ranks of a phalanx process group, on the group's backend.

    `group` defaults to the thread's current group, or else to torch's default group. All ranks of
    the group must create the barrier together. It runs on a new group of the same ranks, so a
    barrier that fails leaves `group` intact. Like a group, it serves one thread at a time.
    """

    barrier_type = "group"

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        *,
        timeout_secs: float = DEFAULT_TIMEOUT,
        timings: BarrierTimings | None = None,
    ) -> None:
        self._timeout = _check_seconds("timeout_secs", timeout_secs)
        found = default_group() if group is None else group
        if found is None:
            raise errors.InvalidState(
                "GroupBarrier needs a process group. Pass group=, or set the current group with "
                "phalanx.groups.process_group"
            )
        if not isinstance(found, ProcessGroup):
            raise errors.InvalidType(
                f"GroupBarrier takes a group of phalanx.groups.new_group, got a "
                f"{type(found).__name__}. For torch's default group use DistBarrier"
            )
        self.prefix = f"{found.label}/barrier-{found._count_split('barrier')}"
        self._timings = timings or BarrierTimings()
        self._group = found
        self._number = 0  # of the last round
        self._passed = 0  # the last round that had passed when the barrier's group failed
        self._member: StoreBarrierMember | None = None
        self._own_group: ProcessGroup | None = None
        self._start: Callable[[], Work | None]
        self._form_group()

    def execute_barrier(self) -> None:
        """Wait until every rank has arrived; raise `BarrierTimeout` if some do not in time."""
        # A hot path of about 2 us: no lock, no extra call, no bookkeeping that can be done later.
        self._number += 1
        own = self._own_group
        if own is None:
            self._wait_in_store(None)
            return
        try:
            (self._start() or own.barrier()).wait()
        except BaseException as error:
            failure = self._fail_over(own, error)
            if failure is error:
                raise
            raise failure from error

    def exchange(self, text: str) -> list[str]:
        """Wait as `execute_barrier` does, and return the texts of all ranks, by rank."""
        self._number += 1
        own = self._own_group
        if own is None:
            return self._wait_in_store(_check_text(text))
        try:
            return list(exchange_texts(_check_text(text), own).values())
        except BaseException as error:
            failure = self._fail_over(own, error)
            if failure is error:
                raise
            raise failure from error

    def _fail_over(self, own: ProcessGroup, error: BaseException) -> BaseException:
        """Move to the store, since no rank knows which ones passed; return the error to raise."""
        self._own_group = None
        self._passed = self._number - 1  # every round on the group before this one passed
        own.abort(f"its barrier raised {type(error).__name__}")
        with suppress(errors.BarrierError):  # the store's host may be the rank that died
            self._reach_store(self._timings.notify_timeout).record_arrival(self._number)
        if isinstance(error, errors.GroupError):
            # On a mismatch all ranks have arrived; so has this rank, if it was too late.
            missing = (
                set() if isinstance(error, errors.RankMismatch) else set(error.ranks) - {own.rank()}
            )
            return self._error(error, dict.fromkeys(missing, self._passed))
        return error

    def _error(
        self, cause: Exception, progress: dict[int, int] | None = None
    ) -> errors.BarrierError:
        kind = errors.BarrierTimeout if isinstance(cause, TimeoutError) else errors.BarrierError
        number, rank = self._number, self._group.rank()
        message = f"barrier {self.prefix!r}, round {number}, rank {rank}: {first_line(cause)}"
        return kind(message, barrier=self.prefix, round=number, progress=progress)

    def _wait_in_store(self, text: str | None) -> list[str]:
        began = time.monotonic()
        member = self._reach_store(self._timeout)
        member.skip_to(self._number, passed=self._passed)
        took, slack = time.monotonic() - began, self._timings.notify_timeout
        left = self._timeout if took < slack else max(self._timeout - took, slack)
        texts = member.wait(text, left)
        self._passed = self._number
        with suppress(Exception):  # the round has passed; the next one runs in the store, too
            self._form_group()
            if self._group.rank() == 0:  # no rank forms a group before it has left the round
                member.delete_last_round()
        return texts

    def _reach_store(self, timeout: float) -> StoreBarrierMember:
        if self._member is None:
            store = self._group.get_group_store()
            assert store is not None, "a group that can fail was formed in a store"
            try:
                self._member = StoreBarrierMember(
                    lambda: clone_connection(store),
                    self.prefix,
                    rank=self._group.rank(),
                    size=self._group.size(),
                    host=f"the store of group {self._group.label!r}",
                    timeout=timeout,
                    address=store_address(store),
                    timings=self._timings,
                )
            except errors.RendezvousError as error:
                raise self._error(error) from error
        return self._member

    def _form_group(self) -> None:
        name = f"{self.prefix.rpartition('/')[2]}-{self._number}"
        ranks, timeout = range(self._group.size()), timedelta(seconds=self._timeout)
        self._own_group = own = self._group.split_group(ranks, timeout=timeout, group_name=name)
        # What `own.barrier` tries first, without that call; it returns None for the slow path.
        fast_path = own._issuer.fast_path if own is not None else None
        self._start = fast_path.barrier if fast_path else lambda: None


def _check_text(text: str) -> str:
    if not isinstance(text, str):
        raise errors.InvalidType(f"exchange takes a str, got {type(text).__name__}")
    return text


def _check_seconds(name: str, value: float) -> float:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise errors.InvalidType(f"{name} must be a number of seconds, got {value!r}")
    if not 0 < value < math.inf:
        raise errors.InvalidArgument(f"{name} must be positive and finite, got {value!r}")
    return min(float(value), MAX_TIMEOUT)


def _check_string(name: str, value: str) -> str:
    if not isinstance(value, str):
        raise errors.InvalidType(f"{name} must be a str, got {value!r}")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise errors.InvalidArgument(f"{name} must be encodable as UTF-8, got {value!r}") from None
    return value


def find_ranks(group: dist.ProcessGroup | None = None) -> RankInfo:
    """Return this process's rank in a group or the default group, else as launched, else 0 of 1."""
    group = group or default_group()
    if group is not None:
        return RankInfo(group.rank(), group.size())
    launched = launched_rank()
    return RankInfo(0, 1) if launched is None else RankInfo(launched.rank, launched.world_size)


def find_group(group: dist.ProcessGroup | None = None) -> dist.ProcessGroup | None:
    """Return the group whose ranks agree; None, and a warning, if a launched rank has none."""
    group = group or default_group()
    ranks = find_ranks(group)
    if group is None and ranks.global_world_size > 1:
        _log.warning("%s has no process group and acts as the only rank; pass group=...", ranks)
    return group


def make_barrier(group: dist.ProcessGroup | None, *, timeout_secs: float) -> tuple[RankInfo, Any]:
    """Return this process's rank and, unless it is the only one, a barrier. All ranks call this."""
    group = find_group(group)
    if group is None or group.size() == 1:
        return RankInfo(0, 1), None
    rank_info = find_ranks(group)
    if isinstance(group, ProcessGroup):
        return rank_info, GroupBarrier(group, timeout_secs=timeout_secs)
    if group is dist.group.WORLD:
        return rank_info, DistBarrier(timeout_secs=timeout_secs)
    raise errors.InvalidType(
        "group must come from phalanx.groups.new_group or be torch's default group, got "
        f"another {type(group).__name__} of torch"
    )
