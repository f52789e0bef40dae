"""Creating groups: from a store, by splitting a group, by merging groups, and on behalf of torch.

`form_group` is the one path to a `ProcessGroup` whose ranks communicate: rendezvous, engine, group.
The module also holds the thread's current group, which is what `default_group` returns wherever no
group is given.

If a rank fails after its peers have their engines, it must tell them (`EngineSetup.give_up`),
or they would wait in their first call.
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
from ._store import HostedStore, OpenStore, check_rank_and_size, open_and_reserve_store, open_store
from ._store_client import StoreClient, clone_connection
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
    """Make a group of all ranks that call this alike.

    Ranks meet in `store`: an open one (with `rank` and `world_size`), a URL (``tcp://host:port``,
    ``file:///path``), or, by default, what the launcher put into the environment (``env://``). A
    process that was started without a launcher is the only rank, and says so.
    `backend` is the fastest that these ranks can have, unless one is named.
    `timeout` is the default deadline of every call. `checks` compares operation, shape and dtype
    of every call across ranks: by default where that is free, with True everywhere, at the price
    of a round trip. Other arguments go to the backend.
    """
    recipe = _checked_config(GroupConfig(backend, torch.device(device), timeout, checks, kwargs))
    found = find_backend(backend)
    if not found.traits.needs_store:
        rank, world_size = check_rank_and_size(rank, world_size)
        return _make_without_store(found, recipe, name or backend, rank, range(world_size))
    meeting = open_and_reserve_store(store, rank=rank, size=world_size, timeout=timeout)
    try:
        seats = range(meeting.size)
        own = StoreClient(meeting.store, patience=timeout.total_seconds())
        label = name or next_default_name(own, meeting.rank)
        return form_group(found, recipe, meeting, label, seats=seats, global_ranks=seats)
    finally:
        # The group has a lease of its own. An error that somebody keeps must not keep the store:
        # those who may yet read there why are visitors.
        if meeting.lease is not None:
            meeting.lease.end()
        if meeting.visit is not None:
            meeting.visit.end()


def derive_config(
    recipe: GroupConfig,
    *,
    backend: str | None = None,
    options: Mapping[str, object] | None = None,
    timeout: timedelta | None = None,
    device: str | torch.device | None = None,
) -> GroupConfig:
    """Return a recipe with some changes; options of another backend are left behind."""
    same = backend in (None, recipe.backend)
    return _checked_config(
        replace(
            recipe,
            backend=backend or recipe.backend,
            device=recipe.device if device is None else torch.device(device),
            timeout=recipe.timeout if timeout is None else timeout,
            options={**(recipe.options if same else {}), **(options or {})},
        )
    )


def _checked_config(recipe: GroupConfig) -> GroupConfig:
    """Refuse what no group can be made with, before anybody waits for this rank."""
    _validation.seconds(recipe.timeout)
    check_options = find_backend(recipe.backend).traits.check_options
    if check_options is not None:
        check_options(recipe.options)
    return recipe


def split_group(
    parent: ProcessGroup,
    ranks: Sequence[int],
    recipe: GroupConfig,
    *,
    name: str | None = None,
    given_name: str = "",
    desc: str = "",
    purpose: Purpose | None = None,
) -> ProcessGroup | None:
    """Make a group of some ranks of another; None for the ranks that are not among them.

    Its keys are under a `name` within the parent's; torch gets to know it by its `given_name`.
    """
    ranks = list(ranks)
    if not ranks or len(set(ranks)) != len(ranks):
        raise InvalidArgument(f"split_group takes different ranks, at least one, not {ranks}")
    for rank in ranks:
        _validation.rank("split_group", rank, parent.size(), word="rank")
    if parent.rank() not in ranks:
        return None
    label = f"{parent.label}/{name or parent._name_split(ranks)}"
    return split_from_store(
        parent.get_group_store(),
        recipe,
        label,
        rank=parent.rank(),
        ranks=ranks,
        global_ranks=parent.global_ranks,
        family=parent._roster.members,
        next_turn=parent._count_split,
        lent_store=parent._lent_store,
        hosted=parent._hosted,
        given_name=given_name,
        desc=desc,
        purpose=purpose,
    )


def split_from_store(
    store: Store | None,
    recipe: GroupConfig,
    label: str,
    *,
    rank: int,
    ranks: Sequence[int],
    global_ranks: Sequence[int],
    family: Sequence[Member] | None = None,
    next_turn: Callable[[str], int] | None = None,
    lent_store: Store | None = None,
    hosted: HostedStore | None = None,
    given_name: str = "",
    desc: str = "",
    purpose: Purpose | None = None,
) -> ProcessGroup:
    """Make a group of `ranks`, which number those who share a store; `rank` is one of them.

    If it is known which processes those who share it are, the `family`, there is less to say.
    """
    backend = find_backend(recipe.backend)
    seats = list(ranks)
    mine, theirs = seats.index(rank), [global_ranks[each] for each in seats]
    if not backend.traits.needs_store:
        return _make_without_store(
            backend, recipe, label, mine, theirs, given_name=given_name, desc=desc
        )
    if store is None:
        raise UnknownOption(
            f"backend {recipe.backend!r} needs ranks that can meet, and those of this group are "
            "not there: what is split from a 'fake' group is 'fake' too"
        )
    kin = None
    if not family or next_turn is None:
        store = clone_connection(store)
    else:
        kin = KnownPeers(
            tuple(family[each] for each in seats),
            next_turn=partial(next_turn, f"{label} {seats}"),
            crowd=sum(member.machine == family[rank].machine for member in family),
        )
    lease = None if hosted is None else hosted.lease()
    meeting = OpenStore(store, mine, len(seats), lent_store=lent_store, hosted=hosted, lease=lease)
    try:
        return form_group(
            backend,
            recipe,
            meeting,
            label,
            seats=seats,
            global_ranks=theirs,
            given_name=given_name,
            desc=desc,
            kin=kin,
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
    """Bring together ranks that go on to make a group by other means.

    Return a name that they have for it alone.
    """
    forming = Rendezvous(store, rank=rank, terms=terms, timeout=timeout, purpose=purpose)
    verdict = forming.run_in_background(lambda: forming.meet(lambda: None))
    contradiction = None if verdict.alike else forming.contradiction()
    if contradiction is not None:
        raise contradiction
    return verdict.token


def merge_groups(
    group: ProcessGroup,
    store: Store,
    size: int,
    *,
    timeout: timedelta | None,
    name: str = "",
    desc: str = "",
) -> ProcessGroup:
    """Make one group of several that meet in `store`."""
    recipe = derive_config(group._recipe, timeout=timeout)
    label = name or "merged"
    own = StoreClient(clone_connection(store), patience=recipe.timeout.total_seconds())
    lobby, blocks = gather_merging_groups(
        own.under(f"phalanx/merge/{label}"),
        MergingGroup(group._roster.token, group.label, list(group.global_ranks)),
        leads=group.rank() == 0,
        size=size,
        timeout=recipe.timeout,
    )
    first = 0
    global_ranks: list[int] = []
    for block in blocks:
        if block.token == group._roster.token:
            first = len(global_ranks)
        global_ranks += block.global_ranks
    if len(set(global_ranks)) < size:  # the groups come from different launchers
        global_ranks = list(range(size))
    meeting = OpenStore(lobby.raw, first + group.rank(), size, lent_store=store)
    found = find_backend(recipe.backend)
    return form_group(
        found, recipe, meeting, label, seats=range(size), global_ranks=global_ranks, desc=desc
    )


def form_group(
    backend: Backend,
    recipe: GroupConfig,
    meeting: OpenStore,
    label: str,
    *,
    seats: Sequence[int],
    global_ranks: Sequence[int],
    torch_name: str = "",
    given_name: str = "",
    desc: str = "",
    kin: KnownPeers | None = None,
    purpose: Purpose | None = None,
) -> ProcessGroup:
    """Form a group with those who meet; `torch_name` is for one that torch keeps account of."""
    terms = RendezvousTerms(
        name=label,
        seats=tuple(seats),
        backend=backend.name,
        options=_options_text(recipe, backend.traits.own_options),
        site=user_site(),
    )
    forming = Rendezvous(
        meeting.store,
        rank=meeting.rank,
        terms=terms,
        timeout=recipe.timeout,
        kin=kin,
        purpose=purpose,
        name_number=0 if torch_name else next_free_number(given_name or label),
    )
    connecting = _engine_setup(forming, backend, recipe, kin)
    engine = connecting.run(
        lambda: _require_one_process(backend, forming),
        background=backend.traits.connects_in_background,
    )
    assert forming.roster is not None, "they have met"
    tell = backend.traits.name_of
    chosen = backend if tell is None else find_backend(tell(engine))
    store = connecting.room.raw
    try:
        group = ProcessGroup(
            name=label,
            rank=meeting.rank,
            size=meeting.size,
            recipe=recipe,
            backend=chosen.name,
            engine=engine,
            traits=chosen.traits,
            devices=chosen.traits.devices | {recipe.device.type},
            store=store,
            lent_store=meeting.lent_store,
            hosted=meeting.hosted,
            board=StatusStore(
                StoreClient(PrefixStore("board", store)), rank=meeting.rank, size=meeting.size
            ),
            roster=forming.roster,
            global_ranks=global_ranks,
            torch_name=torch_name,
            given_name=given_name,
            name_number=connecting.verdict.name_number,
            desc=desc,
        )
    except BaseException as error:  # the others have theirs, and would wait in their first call
        connecting.give_up(error)
        raise
    contradiction = None if connecting.verdict.alike else forming.contradiction()
    if contradiction is not None:
        group.abort()
        group._end_lease()  # though the error's traceback keeps the group
        raise contradiction
    return group


def _engine_setup(
    forming: Rendezvous, backend: Backend, recipe: GroupConfig, kin: KnownPeers | None
) -> EngineSetup:
    rank, size = forming.rank, forming.terms.size
    make_offer = backend.traits.offer
    offer = None
    if make_offer is not None and recipe.device.type == "cpu" and kin and kin.one_machine:
        offer = make_offer(rank, kin.members, kin.crowd, recipe.options)
    return EngineSetup(
        forming,
        make=lambda store: backend.factory(
            store, rank, size, recipe.timeout, recipe.device, **recipe.options
        ),
        offer=offer,
        lends_store=kin is not None,
    )


def _require_one_process(backend: Backend, forming: Rendezvous) -> None:
    members = () if forming.roster is None else forming.roster.members
    if backend.traits.ranks_are_threads and len({(m.machine, m.pid) for m in members}) > 1:
        raise InvalidState(
            f"ranks of a {backend.name!r} group are threads of one process: use 'gloo' for several"
        )


def _make_without_store(
    backend: Backend,
    recipe: GroupConfig,
    label: str,
    rank: int,
    global_ranks: Sequence[int],
    *,
    given_name: str = "",
    desc: str = "",
) -> ProcessGroup:
    """Make a group whose ranks need not meet, for they never talk."""
    size = len(global_ranks)
    engine = backend.factory(
        cast("Store", None),  # there is nothing to say
        rank,
        size,
        recipe.timeout,
        recipe.device,
        **recipe.options,
    )
    return ProcessGroup(
        name=label,
        rank=rank,
        size=size,
        recipe=recipe,
        backend=backend.name,
        engine=engine,
        traits=backend.traits,
        devices=backend.traits.devices | {recipe.device.type},
        store=None,
        board=None,
        roster=Roster(token=uuid.uuid4().hex),
        global_ranks=global_ranks,
        given_name=given_name,
        desc=desc,
    )


def _options_text(recipe: GroupConfig, own: frozenset[str]) -> str:
    """Tell what ranks must agree on beyond the backend's name."""
    shared = {name: value for name, value in recipe.options.items() if name not in own}
    told = {"device": recipe.device.type, **shared}
    if recipe.checks is not None:
        told["checks"] = recipe.checks
    return ", ".join(f"{key}={value!r}" for key, value in sorted(told.items()))


def make_for_torch(backend: str, asked: Any, options: Any) -> ProcessGroup:
    """Make the group that torch asks for, of this and the other ranks that torch has told to."""
    if options is not None:
        raise InvalidArgument(
            f"{backend} has no options: leave out pg_options (got {type(options).__name__})"
        )
    found = find_backend(backend)
    if found.traits.check_options is not None:
        found.traits.check_options({})
    seats = list(asked.global_ranks_in_group) or list(range(asked.group_size))
    whole = not asked.global_ranks_in_group
    return form_group(
        found,
        GroupConfig(backend, torch.device("cpu"), asked.timeout, None, {}),
        open_store(
            asked.store, rank=asked.group_rank, size=asked.group_size, timeout=asked.timeout
        ),
        "world" if whole else f"world/{format_rank_ranges(seats)}",
        seats=seats,
        global_ranks=seats,
        torch_name=asked.group_id,
    )


class _Current(threading.local):
    # torch keeps the current group too, but only its C++ part: should the Python object go away
    # meanwhile, what comes back has lost its methods. So the object is kept here.
    group: dist.ProcessGroup | None = None


_current = _Current()


def current_process_group() -> dist.ProcessGroup | None:
    """Return the group that this thread entered last, or None."""
    return _current.group


def default_group() -> dist.ProcessGroup | None:
    """Return the group that is meant where none is given.

    This thread's current group; else torch's default group; else None. Whatever takes an optional
    group asks here, so that two objects of one program are never on different groups.
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
    # torch's own APIs see the same group. Its stub forgets that None is how to leave.
    _set_process_group(cast("dist.ProcessGroup", group))
