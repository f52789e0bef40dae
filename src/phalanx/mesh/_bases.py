"""What a mesh stands on: a group of ours, one of torch's, or nothing but a rank.

A base knows this rank's place and how to make a group of some of its ranks. Only those ranks call,
whatever the base: ranks meet in the base's store, under a name that all of them derive from the
ranks and the options alone. torch's own function for that counts the groups of the process into the
name, so that ranks with different numbers of groups would wait for each other for ever.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch._C._distributed_c10d import PrefixStore, Store, _resolve_process_group

from ..errors import InvalidArgument, InvalidState, InvalidType
from ..groups import ProcessGroup, current_process_group, new_group
from ..groups._create import assemble, split_off
from ..groups._forming import Purpose
from ..groups._group import Recipe
from ..groups._record import user_site
from ..groups._registry import find_backend
from ..groups._stores import own_connection
from ..groups._telling import Terms
from ._axis_options import AxisOptions

__all__ = ["Base", "base_of", "find_base", "resolve"]


class Base(Protocol):
    """A group that meshes are made on."""

    @property
    def group(self) -> dist.ProcessGroup:
        """The group itself."""

    @property
    def rank(self) -> int:
        """This rank in the group."""

    @property
    def size(self) -> int:
        """How many ranks the group has."""

    @property
    def label(self) -> str:
        """The name of the group, the same on every rank."""

    @property
    def global_ranks(self) -> Sequence[int]:
        """The launcher's number of every rank."""

    @property
    def store(self) -> Store | None:
        """Where its ranks meet, if they talk at all."""

    def takes(self, device_type: str) -> bool:
        """Tell whether the group itself can serve an axis that has all of its ranks."""

    def check(self, options: AxisOptions) -> None:
        """Refuse what no group of this base could be made with."""

    def make(
        self,
        ranks: Sequence[int],
        options: AxisOptions,
        *,
        name: str,
        device_type: str,
        purpose: Purpose | None,
    ) -> dist.ProcessGroup:
        """Make a group of some ranks, this one among them; only they call it."""


class _OurBase:
    """A group of ours."""

    def __init__(self, group: ProcessGroup) -> None:
        self.group = group
        self.rank = group.rank()
        self.size = group.size()
        self.label = group.label
        self.store = group.get_group_store()

    @property
    def global_ranks(self) -> Sequence[int]:
        return self.group.global_ranks

    def takes(self, device_type: str) -> bool:
        return device_type in self.group.devices

    def check(self, options: AxisOptions) -> None:
        options.applied_to(self.group._recipe)

    def make(
        self,
        ranks: Sequence[int],
        options: AxisOptions,
        *,
        name: str,
        device_type: str,
        purpose: Purpose | None,
    ) -> dist.ProcessGroup:
        made = self.group.split_group(
            ranks,
            options.timeout,
            group_name=name,
            backend=options.backend,
            options=dict(options.options),
            device=None if self.takes(device_type) else device_type,
            purpose=purpose,
        )
        assert made is not None, "this rank is one of them"
        return made


class _TorchBase:
    """A group of torch's; what is made of it is ours where we have the engine that it uses."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank = group.rank()
        self.size = group.size()
        self.label = "default" if group is c10d._get_default_group() else group.group_desc
        self._is_fake = "fake" in dist.get_backend(group)
        self.store = None if self._is_fake else PrefixStore("phalanx", c10d._world.pg_map[group][1])

    @property
    def global_ranks(self) -> Sequence[int]:
        return dist.get_process_group_ranks(self.group)

    def takes(self, device_type: str) -> bool:
        return self._is_fake or device_type in self._backends()

    def check(self, options: AxisOptions) -> None:
        if options.backend is None or options.native is not None:
            return
        if not _is_ours(options.backend) and options.backend not in dist.Backend.backend_list:
            find_backend(options.backend)  # raises, and lists those that there are
        if _is_ours(options.backend):
            options.applied_to(self._recipe(options.backend, "cpu"))

    def make(
        self,
        ranks: Sequence[int],
        options: AxisOptions,
        *,
        name: str,
        device_type: str,
        purpose: Purpose | None,
    ) -> dist.ProcessGroup:
        backend, label = options.backend or self._backend_for(device_type), f"{self.label}/{name}"
        if options.native is not None or not _is_ours(backend):
            return self._torch_group(ranks, options, backend, label, purpose)
        return split_off(
            self.store,
            options.applied_to(self._recipe(backend, device_type)),
            label,
            rank=self.rank,
            ranks=ranks,
            global_ranks=self.global_ranks,
            purpose=purpose,
        )

    def _backends(self) -> dict[str, str]:
        return _device_map(dist.get_backend_config(self.group))

    def _backend_for(self, device_type: str) -> str:
        return "fake" if self._is_fake else self._backends().get(device_type, "auto")

    def _recipe(self, backend: str, device_type: str) -> Recipe:
        return Recipe(backend, torch.device(device_type), self._timeout(), None, {})

    def _timeout(self) -> timedelta:
        for device in self._backends():
            options = getattr(self.group._get_backend(torch.device(device)), "options", None)
            if options is not None:
                timeout: timedelta = options._timeout
                return timeout
        return c10d.default_pg_timeout

    def _torch_group(
        self,
        ranks: Sequence[int],
        options: AxisOptions,
        backend: str,
        label: str,
        purpose: Purpose | None,
    ) -> dist.ProcessGroup:
        """Make a group of torch's, under a name that does not depend on what this process has."""
        mine, everyone = list(ranks).index(self.rank), self.global_ranks
        members = [everyone[rank] for rank in ranks]
        timeout = options.timeout or self._timeout()
        if self.store is not None:
            terms = Terms(label, tuple(ranks), backend, options.label, user_site())
            store = own_connection(self.store)
            assemble(store, mine, terms, timeout=timeout, purpose=purpose)
        group, _ = c10d._new_process_group_helper(
            len(ranks),
            mine,
            members,
            dist.Backend(backend),
            c10d._get_default_store(),
            c10d.GroupName(label),
            backend_options=options.native,
            timeout=timeout,
            group_desc=label,
        )
        c10d._world.pg_group_ranks[group] = {each: rank for rank, each in enumerate(members)}
        made: dist.ProcessGroup = group
        return made


def _device_map(config: str) -> dict[str, str]:
    """Read what torch writes as ``cpu:gloo,cuda:nccl``."""
    return dict(pair.split(":", 1) for pair in config.split(",") if ":" in pair)


def _is_ours(backend: str) -> bool:
    try:
        find_backend(backend)
    except InvalidArgument:
        return False
    return True


def base_of(group: dist.ProcessGroup) -> Base:
    """Return what makes a mesh on a group possible."""
    if isinstance(group, ProcessGroup):
        return _OurBase(group)
    if not isinstance(group, dist.ProcessGroup):
        raise InvalidType(f"group is a process group, not {group!r}")
    if group not in c10d._world.pg_map:
        raise InvalidState("group was destroyed, or is not a group that torch has made")
    return _TorchBase(group)


def find_base(device_type: str) -> Base:
    """Return the base of a mesh that was given no group.

    That is the group that this thread works in, torch's default group, or else a new group of all
    ranks that the launcher has started.
    """
    group = current_process_group()
    if group is None and dist.is_initialized():
        group = c10d._get_default_group()
    if group is None:
        group = new_group(device=device_type)
    return base_of(group)


def resolve(name: str) -> Base | None:
    """Return the base on the group that torch knows by a name in this process, or None."""
    try:
        return base_of(_resolve_process_group(c10d.GroupName(name)))
    except (RuntimeError, ValueError, InvalidType):
        return None
