"""Groups made of some ranks of a parent group, which is ours or torch's; used by device meshes.

A `ParentGroup` knows this rank's place and how to make a group of some of its ranks. Only those
ranks call it. They meet in the parent's store under a name that all of them derive from the
ranks and the options alone. torch's own function counts the groups of the process into the
name, so ranks with different numbers of groups would wait for each other forever.
"""

from __future__ import annotations

import uuid
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch._C._distributed_c10d import Backend, PrefixStore, Store, _resolve_process_group

from ..errors import InvalidArgument, InvalidState, InvalidType
from ._backend_registry import find_backend
from ._factory import (
    default_group,
    derive_config,
    new_group,
    rendezvous_only,
    split_from_store,
    split_group,
)
from ._flight_recorder import user_site
from ._process_group import GroupConfig, ProcessGroup
from ._rendezvous import Purpose, RendezvousTerms
from ._store_client import StoreClient, clone_connection


@dataclass(frozen=True)
class GroupOptions:
    """What is set here differs from the base's group; two groups are one if these are equal."""

    backend: str | None = None
    timeout: timedelta | None = None
    options: tuple[tuple[str, Any], ...] = ()
    native: Backend.Options | None = None
    """Options as torch has them, for an engine that is torch's."""

    @property
    def label(self) -> str:
        """Tell the difference in short: part of the name of a group, the same on every rank."""
        parts = [] if self.backend is None else [self.backend]
        parts += [f"{name}={value}" for name, value in self.options]
        parts += [] if self.timeout is None else [f"{self.timeout.total_seconds():g}s"]
        return "".join(f" {part}" for part in parts)

    def applied_to(self, recipe: GroupConfig) -> GroupConfig:
        """Return a recipe with these differences."""
        options = dict(self.options)
        return derive_config(recipe, backend=self.backend, options=options, timeout=self.timeout)


DEFAULT_OPTIONS = GroupOptions()


class ParentGroup(ABC):
    """A group that others are made of."""

    def __init__(self, group: dist.ProcessGroup, *, label: str, store: Store | None) -> None:
        self.group = group
        self.rank = group.rank()
        self.size = group.size()
        self.label = label
        """The name of the group, the same on every rank."""
        self._store = store

    @property
    def talks(self) -> bool:
        """Tell whether its ranks can meet at all: those of a fake group are not there."""
        return self._store is not None

    def connect(self) -> StoreClient:
        """Return the store that its ranks meet in, on a connection of its own: others may wait."""
        assert self._store is not None, "they talk"
        return StoreClient(clone_connection(self._store))

    @property
    def is_gone(self) -> bool:
        """Tell whether no group can be made of it any more; of ours, survivors always can."""
        return False

    @property
    @abstractmethod
    def global_ranks(self) -> Sequence[int]:
        """The launcher's number of every rank."""

    @abstractmethod
    def takes(self, device_type: str) -> bool:
        """Tell whether the group itself can serve where all of its ranks are wanted."""

    @abstractmethod
    def check(self, options: GroupOptions) -> None:
        """Refuse what no group of this base could be made with."""

    @abstractmethod
    def make(
        self,
        ranks: Sequence[int],
        options: GroupOptions,
        *,
        name: str,
        desc: str,
        device_type: str,
        purpose: Purpose | None,
    ) -> dist.ProcessGroup:
        """Make a group of some ranks, this one among them; only they call it."""


class _PhalanxParent(ParentGroup):
    """A group of ours."""

    def __init__(self, group: ProcessGroup) -> None:
        super().__init__(group, label=group.label, store=group.get_group_store())
        self._ours = group

    @property
    def global_ranks(self) -> Sequence[int]:
        return self._ours.global_ranks

    def takes(self, device_type: str) -> bool:
        return device_type in self._ours.devices

    def check(self, options: GroupOptions) -> None:
        options.applied_to(self._ours._recipe)

    def make(
        self,
        ranks: Sequence[int],
        options: GroupOptions,
        *,
        name: str,
        desc: str,
        device_type: str,
        purpose: Purpose | None,
    ) -> dist.ProcessGroup:
        device = None if self.takes(device_type) else device_type
        recipe = derive_config(options.applied_to(self._ours._recipe), device=device)
        made = split_group(self._ours, ranks, recipe, name=name, desc=desc, purpose=purpose)
        assert made is not None, "this rank is one of them"
        return made


class _TorchParent(ParentGroup):
    """A group of torch's; what is made of it is ours where we have the engine that it uses."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._is_fake = "fake" in dist.get_backend(group)
        label = "default" if group is c10d._get_default_group() else group.group_desc
        store = None if self._is_fake else PrefixStore("phalanx", c10d._world.pg_map[group][1])
        super().__init__(group, label=label, store=store)

    @property
    def is_gone(self) -> bool:
        return not _is_in_torch_tables(self.group)

    @property
    def global_ranks(self) -> Sequence[int]:
        return dist.get_process_group_ranks(self.group)

    def takes(self, device_type: str) -> bool:
        return self._is_fake or device_type in self._backends()

    def check(self, options: GroupOptions) -> None:
        backend = options.backend
        if backend is None or options.native is not None:
            return
        if _has_backend(backend):
            options.applied_to(self._recipe(backend, "cpu"))
        elif backend not in dist.Backend.backend_list:
            find_backend(backend)  # raises, and lists those that there are

    def make(
        self,
        ranks: Sequence[int],
        options: GroupOptions,
        *,
        name: str,
        desc: str,
        device_type: str,
        purpose: Purpose | None,
    ) -> dist.ProcessGroup:
        backend, label = options.backend or self._backend_for(device_type), f"{self.label}/{name}"
        if options.native is not None or not _has_backend(backend):
            return self._torch_group(ranks, options, backend, label, desc, purpose)
        return split_from_store(
            self._store,
            options.applied_to(self._recipe(backend, device_type)),
            label,
            rank=self.rank,
            ranks=ranks,
            global_ranks=self.global_ranks,
            desc=desc,
            purpose=purpose,
        )

    def _backends(self) -> dict[str, str]:
        """Read what torch writes as ``cpu:gloo,cuda:nccl``."""
        config = dist.get_backend_config(self.group)
        return dict(pair.split(":", 1) for pair in config.split(",") if ":" in pair)

    def _backend_for(self, device_type: str) -> str:
        return "fake" if self._is_fake else self._backends().get(device_type, "auto")

    def _recipe(self, backend: str, device_type: str) -> GroupConfig:
        return GroupConfig(backend, torch.device(device_type), self._timeout(), None, {})

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
        options: GroupOptions,
        backend: str,
        label: str,
        desc: str,
        purpose: Purpose | None,
    ) -> dist.ProcessGroup:
        """Make a group of torch's, under a name that does not depend on what this process has."""
        mine, everyone = list(ranks).index(self.rank), self.global_ranks
        members = [everyone[rank] for rank in ranks]
        timeout = options.timeout or self._timeout()
        token = uuid.uuid4().hex
        if self._store is not None:
            terms = RendezvousTerms(label, tuple(ranks), backend, options.label, user_site())
            store = clone_connection(self._store)
            token = rendezvous_only(store, mine, terms, timeout=timeout, purpose=purpose)
        group, _ = c10d._new_process_group_helper(
            len(ranks),
            mine,
            members,
            dist.Backend(backend),
            c10d._get_default_store(),
            # torch takes no name twice, and what was left in the store under one could be mistaken.
            c10d.GroupName(f"{label} {token}"),
            backend_options=options.native,
            timeout=timeout,
            group_desc=desc,
        )
        c10d._world.pg_group_ranks[group] = {each: rank for rank, each in enumerate(members)}
        made: dist.ProcessGroup = group
        return made


def _has_backend(backend: str) -> bool:
    try:
        find_backend(backend)
    except InvalidArgument:
        return False
    return True


def _is_in_torch_tables(group: dist.ProcessGroup) -> bool:
    """Tell whether a group is in torch's tables, which it is until it ends."""
    return group in c10d._world.pg_map


def parent_group(group: dist.ProcessGroup) -> ParentGroup:
    """Return what makes it possible to make groups of a group."""
    if isinstance(group, ProcessGroup):
        return _PhalanxParent(group)
    if not isinstance(group, dist.ProcessGroup):
        raise InvalidType(f"group is a process group, not {group!r}")
    if not _is_in_torch_tables(group):
        raise InvalidState("group was destroyed, or is not a group that torch has made")
    return _TorchParent(group)


def default_parent_group(device_type: str) -> ParentGroup:
    """Return the base where no group is given.

    That is the group that this thread works in, torch's default group, or else a new group of all
    ranks that the launcher has started.
    """
    group = default_group()
    return parent_group(new_group(device=device_type) if group is None else group)


def resolve_group(name: str) -> dist.ProcessGroup | None:
    """Return the group that torch knows by a name in this process, if there is one."""
    try:
        return _resolve_process_group(c10d.GroupName(name))
    except (RuntimeError, ValueError):
        return None


def end_group(group: dist.ProcessGroup) -> None:
    """End this rank's part in a group that a base has made, unless it has ended already."""
    if isinstance(group, ProcessGroup):
        group.shutdown()
    elif _is_in_torch_tables(group):
        dist.destroy_process_group(group)
