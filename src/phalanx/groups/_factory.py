"""Creating groups: from a store, by splitting a group, by merging groups, and on behalf of torch.

`form_group` is the one path to a `ProcessGroup` whose ranks communicate: rendezvous, engine, group.
The module also holds the thread's current group, which is what `default_group` returns wherever no
group is given.

A rank that fails after its peers have their engines must report it (`EngineSetup.give_up`);
otherwise they would wait in their first call.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, _set_process_group

from ..errors import InvalidArgument, InvalidState, UnknownOption
from . import _validation
from ._backend_registry import Backend, find_backend
from ._flight_recorder import user_site
from ._formatting import format_rank_ranges
from ._peers import Member, Roster
from ._process_group import GroupConfig, ProcessGroup
from ._rendezvous import (
    EngineSetup,
    KnownPeers,
    MergingGroup,
    Purpose,
    Rendezvous,
    RendezvousTerms,
    gather_merging_groups,
    next_default_name,
)
from ._status_store import StatusStore
from ._store import (
    HostedStore,
    OpenStore,
    StoreClient,
    check_rank_and_size,
    clone_connection,
    open_and_reserve_store,
    open_store,
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
    found = find_backend(backend)
    if not found.traits.needs_store:
        rank, world_size = check_rank_and_size(rank, world_size)
        return _make_without_store(found, config, name or backend, rank, range(world_size))
    opened = open_and_reserve_store(store, rank=rank, size=world_size, timeout=timeout)
    try:
        ranks = range(opened.size)
        client = StoreClient(opened.store, timeout=timeout.total_seconds())
        label = name or next_default_name(client, opened.rank)
        return form_group(found, config, opened, label, store_ranks=ranks, global_ranks=ranks)
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


def split_group(
    parent: ProcessGroup,
    ranks: Sequence[int],
    config: GroupConfig,
    *,
    name: str | None = None,
    given_name: str = "",
    desc: str = "",
    purpose: Purpose | None = None,
) -> ProcessGroup | None:
    """Create a group of some ranks of another; returns None on the other ranks.

    `name` is its name in the store, below the parent's; `given_name` its name in torch's tables.
    """
    ranks = list(ranks)
    if not ranks or len(set(ranks)) != len(ranks):
        raise InvalidArgument(f"split_group: ranks must be distinct and not empty, got {ranks}")
    for rank in ranks:
        _validation.rank("split_group", rank, parent.size(), word="rank")
    if parent.rank() not in ranks:
        return None
    label = f"{parent.label}/{name or parent._name_split(ranks)}"
    return split_from_store(
        parent.get_group_store(),
        config,
        label,
        rank=parent.rank(),
        ranks=ranks,
        global_ranks=parent.global_ranks,
        members=parent._roster.members,
        next_attempt=parent._count_split,
        lent_store=parent._lent_store,
        hosted=parent._hosted,
        given_name=given_name,
        desc=desc,
        purpose=purpose,
    )


def split_from_store(
    store: Store | None,
    config: GroupConfig,
    label: str,
    *,
    rank: int,
    ranks: Sequence[int],
    global_ranks: Sequence[int],
    members: Sequence[Member] | None = None,
    next_attempt: Callable[[str], int] | None = None,
    lent_store: Store | None = None,
    hosted: HostedStore | None = None,
    given_name: str = "",
    desc: str = "",
    purpose: Purpose | None = None,
) -> ProcessGroup:
    """Create a group of `ranks`, numbered as all users of the store are; `rank` is one of them.

    `members` are the processes of all users of the store, if known; that makes it faster.
    """
    backend = find_backend(config.backend)
    ranks = list(ranks)
    group_rank, members_global = ranks.index(rank), [global_ranks[each] for each in ranks]
    if not backend.traits.needs_store:
        return _make_without_store(
            backend, config, label, group_rank, members_global, given_name=given_name, desc=desc
        )
    if store is None:
        raise UnknownOption(
            f"backend {config.backend!r} needs ranks that communicate; a group split from a 'fake' "
            "group must be 'fake' too"
        )
    known_peers = None
    if not members or next_attempt is None:
        store = clone_connection(store)
    else:
        machine = members[rank].machine
        known_peers = KnownPeers(
            tuple(members[each] for each in ranks),
            next_attempt=partial(next_attempt, f"{label} {ranks}"),
            ranks_on_machine=sum(member.machine == machine for member in members),
        )
    lease = None if hosted is None else hosted.lease()
    opened = OpenStore(store, group_rank, len(ranks), lent_store=lent_store, hosted=hosted)
    try:
        return form_group(
            backend,
            config,
            opened,
            label,
            store_ranks=ranks,
            global_ranks=members_global,
            given_name=given_name,
            desc=desc,
            known_peers=known_peers,
            purpose=purpose,
        )
    finally:
        if lease is not None:
            lease.end()


def rendezvous_only(
    store: Store,
    rank: int,
    terms: RendezvousTerms,
    *,
    timeout: timedelta,
    purpose: Purpose | None = None,
) -> str:
    """Rendezvous of ranks that create the group by other means; returns a unique token."""
    rendezvous = Rendezvous(store, rank=rank, terms=terms, timeout=timeout, purpose=purpose)
    result = rendezvous.run_in_background(lambda: rendezvous.join(lambda: None))
    contradiction = None if result.same_purpose else rendezvous.contradiction()
    if contradiction is not None:
        raise contradiction
    return result.token


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
    opened = OpenStore(merge_store.raw, first + group.rank(), size, lent_store=store)
    backend = find_backend(config.backend)
    return form_group(
        backend,
        config,
        opened,
        label,
        store_ranks=range(size),
        global_ranks=global_ranks,
        desc=desc,
    )


def form_group(
    backend: Backend,
    config: GroupConfig,
    opened: OpenStore,
    label: str,
    *,
    store_ranks: Sequence[int],
    global_ranks: Sequence[int],
    torch_name: str = "",
    given_name: str = "",
    desc: str = "",
    known_peers: KnownPeers | None = None,
    purpose: Purpose | None = None,
) -> ProcessGroup:
    """Form a group; `torch_name` is the name of one that torch itself registers."""
    terms = RendezvousTerms(
        name=label,
        store_ranks=tuple(store_ranks),
        backend=backend.name,
        options=_options_text(config, backend.traits.own_options),
        site=user_site(),
    )
    rendezvous = Rendezvous(
        opened.store,
        rank=opened.rank,
        terms=terms,
        timeout=config.timeout,
        known_peers=known_peers,
        purpose=purpose,
        name_number=0 if torch_name else next_free_number(given_name or label),
    )
    setup = _engine_setup(rendezvous, backend, config, known_peers)
    engine = setup.run(
        lambda: _require_one_process(backend, rendezvous),
        background=backend.traits.connects_in_background,
    )
    assert rendezvous.roster is not None, "the ranks have met"
    name_of = backend.traits.name_of
    chosen = backend if name_of is None else find_backend(name_of(engine))
    store = setup.group_store.raw
    try:
        group = ProcessGroup(
            name=label,
            rank=opened.rank,
            size=opened.size,
            recipe=config,
            backend=chosen.name,
            engine=engine,
            traits=chosen.traits,
            devices=chosen.traits.devices | {config.device.type},
            store=store,
            lent_store=opened.lent_store,
            hosted=opened.hosted,
            board=StatusStore(
                StoreClient(PrefixStore("status", store)), rank=opened.rank, size=opened.size
            ),
            roster=rendezvous.roster,
            global_ranks=global_ranks,
            torch_name=torch_name,
            given_name=given_name,
            name_number=setup.result.name_number,
            desc=desc,
        )
    except BaseException as error:
        setup.give_up(error)
        raise
    contradiction = None if setup.result.same_purpose else rendezvous.contradiction()
    if contradiction is not None:
        group.abort()
        group._end_lease()  # since the error's traceback keeps the group
        raise contradiction
    return group


def _engine_setup(
    rendezvous: Rendezvous, backend: Backend, config: GroupConfig, known_peers: KnownPeers | None
) -> EngineSetup:
    rank, size = rendezvous.rank, rendezvous.terms.size
    offer_type = backend.traits.offer
    offer = None
    on_cpu = config.device.type == "cpu"
    if offer_type is not None and on_cpu and known_peers and known_peers.one_machine:
        offer = offer_type(rank, known_peers.members, known_peers.ranks_on_machine, config.options)
    return EngineSetup(
        rendezvous,
        make=lambda store: backend.factory(
            store, rank, size, config.timeout, config.device, **config.options
        ),
        offer=offer,
        lends_store=known_peers is not None,
    )


def _require_one_process(backend: Backend, rendezvous: Rendezvous) -> None:
    members = () if rendezvous.roster is None else rendezvous.roster.members
    if backend.traits.ranks_are_threads and len({(m.machine, m.pid) for m in members}) > 1:
        raise InvalidState(
            f"ranks of a {backend.name!r} group must be threads of one process; use 'gloo' for "
            "several processes"
        )


def _make_without_store(
    backend: Backend,
    config: GroupConfig,
    label: str,
    rank: int,
    global_ranks: Sequence[int],
    *,
    given_name: str = "",
    desc: str = "",
) -> ProcessGroup:
    """Create a group whose ranks never communicate."""
    size = len(global_ranks)
    engine = backend.factory(
        cast("Store", None),
        rank,
        size,
        config.timeout,
        config.device,
        **config.options,
    )
    return ProcessGroup(
        name=label,
        rank=rank,
        size=size,
        recipe=config,
        backend=backend.name,
        engine=engine,
        traits=backend.traits,
        devices=backend.traits.devices | {config.device.type},
        store=None,
        board=None,
        roster=Roster(token=uuid.uuid4().hex),
        global_ranks=global_ranks,
        given_name=given_name,
        desc=desc,
    )


def _options_text(config: GroupConfig, own: frozenset[str]) -> str:
    """Describe what ranks must agree on besides the backend."""
    shared = {name: value for name, value in config.options.items() if name not in own}
    facts = {"device": config.device.type, **shared}
    if config.checks is not None:
        facts["checks"] = config.checks
    return ", ".join(f"{key}={value!r}" for key, value in sorted(facts.items()))


def make_for_torch(backend: str, asked: Any, options: Any) -> ProcessGroup:
    """Create the group that `torch.distributed` asks for."""
    if options is not None:
        raise InvalidArgument(
            f"backend {backend!r} has no pg_options; got {type(options).__name__}"
        )
    found = find_backend(backend)
    if found.traits.check_options is not None:
        found.traits.check_options({})
    ranks = list(asked.global_ranks_in_group) or list(range(asked.group_size))
    is_world = not asked.global_ranks_in_group
    return form_group(
        found,
        GroupConfig(backend, torch.device("cpu"), asked.timeout, None, {}),
        open_store(
            asked.store, rank=asked.group_rank, size=asked.group_size, timeout=asked.timeout
        ),
        "world" if is_world else f"world/{format_rank_ranges(ranks)}",
        store_ranks=ranks,
        global_ranks=ranks,
        torch_name=asked.group_id,
    )


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
