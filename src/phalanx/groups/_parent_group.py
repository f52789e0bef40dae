"""Parent groups: groups, ours or torch's, from which a device mesh makes the groups of its axes.

A `ParentGroup` knows this rank and how to create a group of some of the parent's ranks. Only those
ranks call it. They meet in the parent's store under a name that depends on the ranks and the
options alone. torch's own function includes the number of groups of the process in the name, so
ranks with different numbers of groups would wait for each other forever.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypedDict, Unpack

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch._C._distributed_c10d import Backend, PrefixStore, Store, _resolve_process_group

from ..errors import InvalidState, InvalidType
from ._backend_registry import find_backend, is_plugin, is_registered
from ._call_site import user_site
from ._current_group import default_group
from ._factory import derive_config, form_group, new_group, split_group
from ._process_group import GroupConfig, ProcessGroup
from ._rendezvous import FormationCheck, Rendezvous, RendezvousTerms
from ._store import StoreClient, clone_connection


@dataclass(frozen=True)
class GroupOptions:
    """Differences from the parent group; subgroups with equal options are the same group."""

    backend: str | None = None
    timeout: timedelta | None = None
    options: tuple[tuple[str, Any], ...] = ()
    torch_options: Backend.Options | None = None  # torch's options object, for an engine of torch's

    @property
    def label(self) -> str:
        """A short description, the same on every rank; part of the group's name."""
        parts = [] if self.backend is None else [self.backend]
        parts += [f"{name}={value}" for name, value in self.options]
        parts += [] if self.timeout is None else [f"{self.timeout.total_seconds():g}s"]
        return "".join(f" {part}" for part in parts)

    def applied_to(self, config: GroupConfig) -> GroupConfig:
        options = dict(self.options)
        if self.torch_options is not None and is_plugin(self.backend or config.backend):
            options["pg_options"] = self.torch_options
        return derive_config(config, backend=self.backend, options=options, timeout=self.timeout)


DEFAULT_OPTIONS = GroupOptions()


class Subgroup(TypedDict):
    """What a subgroup has of its own, besides its ranks and options."""

    name: str  # in the store, below the parent's
    desc: str
    device_type: str
    formation_check: FormationCheck | None


class _Parent:
    def __init__(self, group: dist.ProcessGroup, *, label: str, store: Store | None) -> None:
        self.group = group
        self.rank = group.rank()
        self.size = group.size()
        self.label = label  # the name of the group, the same on every rank
        self.talks = store is not None  # the ranks of a fake group do not exist
        self._store = store

    def connect(self) -> StoreClient:
        """Return the group's store, on a new connection that no wait can block."""
        assert self._store is not None, "its ranks communicate"
        return StoreClient(clone_connection(self._store))


class PhalanxParent(_Parent):
    """A group of phalanx."""

    is_gone = False  # survivors of our groups can always create subgroups

    def __init__(self, group: ProcessGroup) -> None:
        super().__init__(group, label=group.label, store=group.get_group_store())
        self._ours = group
        self.global_ranks: Sequence[int] = group.global_ranks

    @property
    def ranks_are_threads(self) -> bool:
        return find_backend(self._ours.backend).traits.ranks_are_threads

    def takes(self, device_type: str) -> bool:
        """Whether the group itself can serve as the subgroup of all its ranks."""
        return device_type in self._ours.devices

    def check(self, options: GroupOptions) -> None:
        """Raise for options with which no subgroup can be created."""
        options.applied_to(self._ours._config)

    def make(
        self, ranks: Sequence[int], options: GroupOptions, **subgroup: Unpack[Subgroup]
    ) -> dist.ProcessGroup:
        """Create a group of some ranks, including this one; only those ranks call it."""
        device_type = subgroup["device_type"]
        device = None if self.takes(device_type) else device_type
        made = split_group(
            self._ours,
            ranks,
            derive_config(options.applied_to(self._ours._config), device=device),
            name=subgroup["name"],
            desc=subgroup["desc"],
            formation_check=subgroup["formation_check"],
        )
        assert made is not None, "this rank is a member"
        return made


class TorchParent(_Parent):
    """A group of torch's; subgroups are ours if we have a backend of the same name."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._is_fake = "fake" in dist.get_backend(group)
        label = "default" if group is c10d._get_default_group() else group.group_desc
        store = None if self._is_fake else PrefixStore("phalanx", c10d._world.pg_map[group][1])
        super().__init__(group, label=label, store=store)

    @property
    def is_gone(self) -> bool:
        return self.group not in c10d._world.pg_map

    @property
    def global_ranks(self) -> Sequence[int]:
        return dist.get_process_group_ranks(self.group)

    @property
    def ranks_are_threads(self) -> bool:
        return "threaded" in dist.get_backend(self.group)  # the backend of torch's own tests

    def takes(self, device_type: str) -> bool:
        return self._is_fake or device_type in self._backends()

    def check(self, options: GroupOptions) -> None:
        backend = options.backend
        if backend is None or (options.torch_options is not None and not is_plugin(backend)):
            return
        if is_registered(backend):
            options.applied_to(self._config(backend, "cpu"))
        elif backend not in dist.Backend.backend_list:
            find_backend(backend)  # raises

    def make(
        self, ranks: Sequence[int], options: GroupOptions, **subgroup: Unpack[Subgroup]
    ) -> dist.ProcessGroup:
        device_type = subgroup["device_type"]
        default = "fake" if self._is_fake else self._backends().get(device_type, "auto")
        backend = options.backend or default
        label = f"{self.label}/{subgroup['name']}"
        ranks = tuple(ranks)
        rank = ranks.index(self.rank)
        everyone = self.global_ranks  # a property that lists all ranks
        members = [everyone[each] for each in ranks]
        store = None if self._store is None else clone_connection(self._store)
        has_options = options.torch_options is not None  # and our own backends take none
        if store is not None if is_plugin(backend) else is_registered(backend) and not has_options:
            config = options.applied_to(self._config(backend, device_type))
            return form_group(
                config,
                store,
                rank,
                label,
                store_ranks=ranks,
                global_ranks=members,
                desc=subgroup["desc"],
                formation_check=subgroup["formation_check"],
            )
        timeout = options.timeout or self._timeout()
        token = uuid.uuid4().hex
        if store is not None:
            terms = RendezvousTerms(label, ranks, backend, options.label, user_site())
            check = subgroup["formation_check"]
            rendezvous = Rendezvous(store, rank, terms, timeout, formation_check=check)
            rendezvous.meet()
            mismatch = rendezvous.find_mismatch()
            if mismatch is not None:
                raise mismatch
            token = rendezvous.roster.token
        group, _ = c10d._new_process_group_helper(
            len(ranks),
            rank,
            members,
            dist.Backend(backend),
            c10d._get_default_store(),
            # Unique, since torch refuses a used name, and old keys in the store could be misread.
            # It does not depend on this process's groups, as the names that torch chooses do.
            c10d.GroupName(f"{label} {token}"),
            backend_options=options.torch_options,
            timeout=timeout,
            group_desc=subgroup["desc"],
        )
        c10d._world.pg_group_ranks[group] = {each: rank for rank, each in enumerate(members)}
        made: dist.ProcessGroup = group
        return made

    def _backends(self) -> dict[str, str]:
        """Parse torch's ``cpu:gloo,cuda:nccl``."""
        config = dist.get_backend_config(self.group)
        return dict(pair.split(":", 1) for pair in config.split(",") if ":" in pair)

    def _config(self, backend: str, device_type: str) -> GroupConfig:
        return GroupConfig(backend, torch.device(device_type), self._timeout(), None, {})

    def _timeout(self) -> timedelta:
        for device in self._backends():
            options = getattr(self.group._get_backend(torch.device(device)), "options", None)
            if options is not None:
                timeout: timedelta = options._timeout
                return timeout
        return c10d.default_pg_timeout


ParentGroup = PhalanxParent | TorchParent


def parent_group(group: dist.ProcessGroup) -> ParentGroup:
    if isinstance(group, ProcessGroup):
        return PhalanxParent(group)
    if not isinstance(group, dist.ProcessGroup):
        raise InvalidType(f"group must be a process group, got {group!r}")
    if group not in c10d._world.pg_map:
        raise InvalidState("group was destroyed, or was not created by torch.distributed")
    return TorchParent(group)


def default_parent_group(device_type: str) -> ParentGroup:
    """Return the default group, or else a new group of all ranks, as a parent."""
    group = default_group()
    return parent_group(new_group(device=device_type) if group is None else group)


def resolve_group(name: str) -> dist.ProcessGroup | None:
    """Return the group of that name in torch's tables, if any."""
    try:
        return _resolve_process_group(c10d.GroupName(name))
    except (RuntimeError, ValueError):
        return None


def end_group(group: dist.ProcessGroup) -> None:
    """Close a subgroup on this rank, unless it is closed."""
    if isinstance(group, ProcessGroup):
        group.shutdown()
    elif group in c10d._world.pg_map:
        dist.destroy_process_group(group)
