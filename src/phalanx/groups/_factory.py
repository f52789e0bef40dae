"""Creating groups: from a store, by splitting a group, by merging groups, and on behalf of torch.

`form_group` is the one path to a `ProcessGroup`: rendezvous, engine, group.

A rank that fails after its peers have their engines must report it (`Rendezvous.give_up`);
otherwise they would wait in their first call.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any, TypedDict, Unpack, cast

import torch
from torch._C._distributed_c10d import Store

from .._formatting import format_rank_ranges
from ..errors import InvalidArgument, UnknownOption
from . import _validation
from ._backend_registry import Backend, find_backend, is_plugin
from ._call_site import user_site
from ._peers import Roster
from ._process_group import GroupConfig, ProcessGroup
from ._rendezvous import (
    FormationCheck,
    KnownPeers,
    MergingGroup,
    Rendezvous,
    RendezvousTerms,
    gather_merging_groups,
)
from ._store import (
    HostedStore,
    StoreClient,
    check_rank_and_size,
    clone_connection,
    open_and_reserve_store,
)
from ._torch_integration import next_free_suffix

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
            caller_store=opened.caller_store,
            hosted=opened.hosted,
        )
    finally:
        # The group has its own lease. Ended here, since the traceback of an error would keep the
        # store open; peers that still read from it hold reservations.
        if opened.reservation is not None:
            opened.reservation.end()


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
    _validation.as_seconds(config.timeout)
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
    formation_check: FormationCheck | None = None,
    **names: Unpack[GroupNames],
) -> ProcessGroup | None:
    """Create a group of some ranks of another; returns None on the other ranks.

    `name` is its name in the store, below the parent's.
    """
    ranks = list(ranks)
    if not ranks or len(set(ranks)) != len(ranks):
        raise InvalidArgument(f"split_group: ranks must be distinct and not empty, got {ranks}")
    for rank in ranks:
        _validation.as_rank("split_group", rank, parent.size(), word="rank")
    if parent.rank() not in ranks:
        return None
    label = f"{parent.label}/{name or parent._name_split(ranks)}"
    processes = parent._roster.processes
    known_peers = None
    if processes:
        machine = processes[parent.rank()].machine
        known_peers = KnownPeers(
            tuple(processes[each] for each in ranks),
            next_attempt=partial(parent._count_split, f"{label} {ranks}"),
            ranks_on_machine=sum(process.machine == machine for process in processes),
        )
    needs_store = find_backend(config.backend).traits.needs_store
    lease = parent._hosted.lease() if parent._hosted is not None and needs_store else None
    try:
        return form_group(
            config,
            parent.get_group_store(),
            ranks.index(parent.rank()),
            label,
            store_ranks=ranks,
            global_ranks=[parent.global_ranks[each] for each in ranks],
            caller_store=parent._caller_store,
            hosted=parent._hosted,
            known_peers=known_peers,
            formation_check=formation_check,
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
    config = derive_config(group._config, timeout=timeout)
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
    part = merge_store.raw
    return form_group(
        config, part, rank, label, global_ranks=global_ranks, caller_store=store, desc=desc
    )


def make_for_torch(backend: str, asked: Any, options: Any) -> ProcessGroup:
    if options is not None:
        raise InvalidArgument(
            f"backend {backend!r} has no pg_options, got {type(options).__name__}"
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
        caller_store=asked.store,
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
    caller_store: Store | None = None,
    hosted: HostedStore | None = None,
    known_peers: KnownPeers | None = None,
    formation_check: FormationCheck | None = None,
    check: Callable[[], None] | None = None,
    forming_timeout: timedelta | None = None,
    **names: Unpack[GroupNames],
) -> ProcessGroup:
    """Form a group; `store` is a connection of its own, or None for ranks of a fake group.

    `store_ranks` are its ranks in the numbering of all users of the store, by default all. `check`
    is called while this rank waits, and raises if the group cannot form. `forming_timeout` is that
    of calls by default.
    """
    backend = find_backend(config.backend)
    size = len(global_ranks)
    if is_plugin(config.backend):
        config = replace(config, options={**config.options, "global_ranks": list(global_ranks)})
    if not backend.traits.needs_store:
        return _form_without_store(config, backend, rank, label, global_ranks, **names)
    if store is None:
        raise UnknownOption(
            f"backend {config.backend!r} needs ranks that communicate; a group split from a 'fake' "
            "group must be 'fake' too"
        )
    ranks = tuple(range(size) if store_ranks is None else store_ranks)
    options = _options_text(config, backend.traits.own_options)
    given_name = names.get("given_name") or label
    rendezvous = Rendezvous(
        store,
        rank=rank,
        terms=RendezvousTerms(label, ranks, backend.name, options, user_site()),
        timeout=forming_timeout or config.timeout,
        known_peers=known_peers,
        formation_check=formation_check,
        check=check,
        name_suffix=0 if names.get("torch_name") else next_free_suffix(given_name),
    )
    engine = rendezvous.connect(backend, config)
    if backend.traits.name_of is not None:
        backend = find_backend(backend.traits.name_of(engine))
    try:
        group = ProcessGroup(
            name=label,
            rank=rank,
            config=config,
            backend=backend,
            engine=engine,
            store=rendezvous.group_store.raw,
            caller_store=caller_store,
            hosted=hosted,
            roster=rendezvous.roster,
            global_ranks=global_ranks,
            name_suffix=rendezvous.result.name_suffix,
            **names,
        )
    except BaseException as error:
        rendezvous.give_up(error)
        raise
    if (mismatch := rendezvous.find_mismatch()) is not None:
        group.abort()
        group._end_lease()  # since the error's traceback keeps the group
        raise mismatch
    return group


def _form_without_store(
    config: GroupConfig,
    backend: Backend,
    rank: int,
    label: str,
    global_ranks: Sequence[int],
    **names: Unpack[GroupNames],
) -> ProcessGroup:
    """Form a group whose other ranks do not exist."""
    size = len(global_ranks)
    engine = backend.factory(
        cast("Store", None), rank, size, config.timeout, config.device, **config.options
    )
    return ProcessGroup(
        name=label,
        rank=rank,
        config=config,
        backend=backend,
        engine=engine,
        roster=Roster(uuid.uuid4().hex),
        global_ranks=global_ranks,
        **names,
    )


def _options_text(config: GroupConfig, own: frozenset[str]) -> str:
    """Describe what ranks must agree on besides the backend."""
    shared = {name: value for name, value in config.options.items() if name not in own}
    facts = {"device": config.device.type, **shared}
    if config.checks is not None:
        facts["checks"] = config.checks
    return ", ".join(f"{key}={value!r}" for key, value in sorted(facts.items()))
