"""Creating groups: from a store, by splitting a group, by merging groups, and on behalf of torch.

`form_group` is the one path to a `ProcessGroup`: rendezvous, engine, group. The module also holds
the thread's current group, which is what `default_group` returns wherever no group is given.

A rank that fails after its peers have their engines must report it (`Rendezvous.give_up`);
otherwise they would wait in their first call.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any, TypedDict, Unpack, cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store, _set_process_group

from ..errors import InvalidArgument, UnknownOption
from . import _validation
from ._backend_registry import find_backend
from ._call_site import user_site
from ._formatting import format_rank_ranges
from ._peers import Roster
from ._process_group import GroupConfig, ProcessGroup
from ._rendezvous import (
    KnownPeers,
    MergingGroup,
    Purpose,
    Rendezvous,
    RendezvousTerms,
    gather_merging_groups,
)
from ._status_store import StatusStore
from ._store import (
    HostedStore,
    StoreClient,
    check_rank_and_size,
    clone_connection,
    open_and_reserve_store,
)
from ._torch_integration import next_free_number

DEFAULT_TIMEOUT = timedelta(minutes=5)


def new_group(
    backend: str = "auto",
    timeout: timedelta = DEFAULT_TIMEOUT,
    device: str | torch.device = "cpu",
    *,
    store: Store | str | None = None,
    rank: int | None = None,
    world_size: int | None = None,
    name: str | None = None,
    checks: bool | None = None,
    **kwargs: object,
) -> ProcessGroup:
    """Create a group of all ranks that make the same call.

    Ranks meet in `store`: an open store (with `rank` and `world_size`), a URL
    (``tcp://host:port``, ``file:///path``), or by default the store that the launcher put into
    the environment (``env://``). A process that was started without a launcher is the only rank
    and logs a warning. The default `backend` is the fastest that all ranks can use. `timeout` is
    the default deadline of every call. `checks` compares operation, shape and dtype of every call
    across ranks: by default where that is free, with True everywhere, at the price of a round
    trip. Other arguments go to the backend.
    """
    config = _checked_config(GroupConfig(backend, torch.device(device), timeout, checks, kwargs))
    if not find_backend(backend).traits.needs_store:
        if rank is None or world_size is None:
            raise InvalidArgument(f"backend {backend!r} needs rank= and world_size=")
        rank, world_size = check_rank_and_size(rank, world_size)
        return form_group(config, None, rank, name or backend, global_ranks=range(world_size))
    opened = open_and_reserve_store(store, rank=rank, size=world_size, timeout=timeout)
    try:
        client = StoreClient(opened.store, timeout=timeout.total_seconds())
        return form_group(
            config,
            opened.store,
            opened.rank,
            name or f"group{client.add(f'phalanx/unnamed/{opened.rank}', 1) - 1}",
            global_ranks=range(opened.size),
            lent_store=opened.lent_store,
            hosted=opened.hosted,
        )
    finally:
        # The group has its own lease. Ended here, since the traceback of an error would keep the
        # store open; peers that still read from it hold reservations.
        if opened.hold is not None:
            opened.hold.end()


def derive_config(
    config: GroupConfig,
    *,
    backend: str | None = None,
    options: Mapping[str, object] | None = None,
    timeout: timedelta | None = None,
    device: str | torch.device | None = None,
) -> GroupConfig:
    """Return a config with some changes; options of another backend are dropped."""
    same = backend in (None, config.backend)
    return _checked_config(
        replace(
            config,
            backend=backend or config.backend,
            device=config.device if device is None else torch.device(device),
            timeout=config.timeout if timeout is None else timeout,
            options={**(config.options if same else {}), **(options or {})},
        )
    )


def _checked_config(config: GroupConfig) -> GroupConfig:
    """Raise for invalid arguments before other ranks wait for this one."""
    _validation.seconds(config.timeout)
    check_options = find_backend(config.backend).traits.check_options
    if check_options is not None:
        check_options(config.options)
    return config


class GroupNames(TypedDict, total=False):
    """What a group is called besides its label."""

    torch_name: str  # of a group that torch itself registers
    given_name: str  # in torch's tables; the label by default
    desc: str


def split_group(
    parent: ProcessGroup,
    ranks: Sequence[int],
    config: GroupConfig,
    *,
    name: str | None = None,
    purpose: Purpose | None = None,
    **names: Unpack[GroupNames],
) -> ProcessGroup | None:
    """Create a group of some ranks of another; returns None on the other ranks.

    `name` is its name in the store, below the parent's.
    """
    ranks = list(ranks)
    if not ranks or len(set(ranks)) != len(ranks):
        raise InvalidArgument(f"split_group: ranks must be distinct and not empty, got {ranks}")
    for rank in ranks:
        _validation.rank("split_group", rank, parent.size(), word="rank")
    if parent.rank() not in ranks:
        return None
    label = f"{parent.label}/{name or parent._name_split(ranks)}"
    members, known_peers = parent._roster.members, None
    if members:
        machine = members[parent.rank()].machine
        known_peers = KnownPeers(
            tuple(members[each] for each in ranks),
            next_attempt=partial(parent._count_split, f"{label} {ranks}"),
            ranks_on_machine=sum(member.machine == machine for member in members),
        )
    lease = None if parent._hosted is None else parent._hosted.lease()
    try:
        return form_group(
            config,
            parent.get_group_store(),
            ranks.index(parent.rank()),
            label,
            store_ranks=ranks,
            global_ranks=[parent.global_ranks[each] for each in ranks],
            lent_store=parent._lent_store,
            hosted=parent._hosted,
            known_peers=known_peers,
            purpose=purpose,
            **names,
        )
    finally:
        if lease is not None:
            lease.end()


def merge_groups(
    group: ProcessGroup,
    store: Store,
    size: int,
    *,
    timeout: timedelta | None,
    name: str = "",
    desc: str = "",
) -> ProcessGroup:
    """Create one group of several that meet in `store`."""
    config = derive_config(group._recipe, timeout=timeout)
    label = name or "merged"
    client = StoreClient(clone_connection(store), timeout=config.timeout.total_seconds())
    merge_store, groups = gather_merging_groups(
        client.under(f"phalanx/merge/{label}"),
        MergingGroup(group._roster.token, group.label, list(group.global_ranks)),
        leads=group.rank() == 0,
        size=size,
        timeout=config.timeout,
    )
    first = 0
    global_ranks: list[int] = []
    for each in groups:
        if each.token == group._roster.token:
            first = len(global_ranks)
        global_ranks += each.global_ranks
    if len(set(global_ranks)) < size:  # the groups come from different launchers
        global_ranks = list(range(size))
    rank = first + group.rank()
    return form_group(
        config, merge_store.raw, rank, label, global_ranks=global_ranks, lent_store=store, desc=desc
    )


def make_for_torch(backend: str, asked: Any, options: Any) -> ProcessGroup:
    """Create the group that `torch.distributed` asks for."""
    if options is not None:
        raise InvalidArgument(
            f"backend {backend!r} has no pg_options; got {type(options).__name__}"
        )
    ranks = list(asked.global_ranks_in_group)
    label = f"world/{format_rank_ranges(ranks)}" if ranks else "world"
    ranks = ranks or list(range(asked.group_size))
    return form_group(
        _checked_config(GroupConfig(backend, torch.device("cpu"), asked.timeout, None, {})),
        clone_connection(asked.store),
        asked.group_rank,
        label,
        store_ranks=ranks,
        global_ranks=ranks,
        lent_store=asked.store,
        torch_name=asked.group_id,
    )


def form_group(
    config: GroupConfig,
    store: Store | None,
    rank: int,
    label: str,
    *,
    global_ranks: Sequence[int],
    store_ranks: Sequence[int] | None = None,
    lent_store: Store | None = None,
    hosted: HostedStore | None = None,
    known_peers: KnownPeers | None = None,
    purpose: Purpose | None = None,
    **names: Unpack[GroupNames],
) -> ProcessGroup:
    """Form a group; `store` is a connection of its own, or None for ranks of a fake group.

    `store_ranks` are its ranks in the numbering of all users of the store, by default all.
    """
    chosen = backend = find_backend(config.backend)
    size, traits = len(global_ranks), backend.traits
    if not traits.needs_store:
        rendezvous = status_store = store = None
        roster, name_number = Roster(uuid.uuid4().hex), 0
        engine = backend.factory(
            cast("Store", None), rank, size, config.timeout, config.device, **config.options
        )
    elif store is None:
        raise UnknownOption(
            f"backend {config.backend!r} needs ranks that communicate; a group split from a 'fake' "
            "group must be 'fake' too"
        )
    else:
        ranks = tuple(range(size) if store_ranks is None else store_ranks)
        options = _options_text(config, traits.own_options)
        given_name = names.get("given_name") or label
        name_number = 0 if names.get("torch_name") else next_free_number(given_name)
        rendezvous = Rendezvous(
            store,
            rank=rank,
            terms=RendezvousTerms(label, ranks, backend.name, options, user_site()),
            timeout=config.timeout,
            known_peers=known_peers,
            purpose=purpose,
            name_number=name_number,
        )
        engine = rendezvous.connect(backend, config)
        if traits.name_of is not None:
            chosen = find_backend(traits.name_of(engine))
        store, roster = rendezvous.group_store.raw, rendezvous.roster
        name_number = rendezvous.result.name_number
        status_store = StatusStore(StoreClient(store).under("status"), rank=rank, size=size)
    try:
        group = ProcessGroup(
            name=label,
            rank=rank,
            size=size,
            recipe=config,
            backend=chosen.name,
            engine=engine,
            traits=chosen.traits,
            devices=chosen.traits.devices | {config.device.type},
            store=store,
            lent_store=lent_store,
            hosted=hosted,
            board=status_store,
            roster=roster,
            global_ranks=global_ranks,
            name_number=name_number,
            **names,
        )
    except BaseException as error:
        if rendezvous is not None:
            rendezvous.give_up(error)
        raise
    contradiction = None if rendezvous is None else rendezvous.contradiction()
    if contradiction is not None:
        group.abort()
        group._end_lease()  # since the error's traceback keeps the group
        raise contradiction
    return group


def _options_text(config: GroupConfig, own: frozenset[str]) -> str:
    """Describe what ranks must agree on besides the backend."""
    shared = {name: value for name, value in config.options.items() if name not in own}
    facts = {"device": config.device.type, **shared}
    if config.checks is not None:
        facts["checks"] = config.checks
    return ", ".join(f"{key}={value!r}" for key, value in sorted(facts.items()))


class _Current(threading.local):
    # torch keeps only the C++ part of its current group. Without this reference the Python object
    # could die, and what torch returns then has lost its methods.
    group: dist.ProcessGroup | None = None


_current = _Current()


def current_process_group() -> dist.ProcessGroup | None:
    """Return this thread's current group, or None."""
    return _current.group


def default_group() -> dist.ProcessGroup | None:
    """Return the group to use where none is given.

    This thread's current group; else torch's default group; else None. Everything that takes an
    optional group calls this, so that all objects of a program use the same default.
    """
    if _current.group is None and dist.is_initialized():
        return dist.group.WORLD
    return _current.group


@contextmanager
def process_group(pg: dist.ProcessGroup) -> Generator[None, None, None]:
    """Make `pg` this thread's current group for the body of a ``with`` statement."""
    before = _current.group
    _set_current(pg)
    try:
        yield
    finally:
        _set_current(before)


def _set_current(group: dist.ProcessGroup | None) -> None:
    _current.group = group
    # torch's own APIs use the same group. Its stub does not allow None.
    _set_process_group(cast("dist.ProcessGroup", group))
