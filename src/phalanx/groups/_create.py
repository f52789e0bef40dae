"""Makes groups: from a store, out of a group, of several groups."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import cast

import torch
from torch._C._distributed_c10d import PrefixStore, Store

from ..errors import InvalidArgument, InvalidState, UnknownOption
from . import _validate as validate
from ._board import Board
from ._connecting import Connecting
from ._forming import Forming, Kin, Purpose, next_default_name
from ._group import ProcessGroup, Recipe
from ._hosting import Hosted
from ._merging import Block, line_up
from ._patient import PatientStore
from ._record import user_site
from ._registry import Backend, find_backend
from ._roster import Member, Roster
from ._stores import Meeting, check_place, own_connection, visit
from ._telling import Terms
from ._torch import next_number

__all__ = [
    "DEFAULT_TIMEOUT",
    "adjusted",
    "assemble",
    "build",
    "merge",
    "new_group",
    "split",
    "split_off",
]

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
    recipe = _checked(Recipe(backend, torch.device(device), timeout, checks, kwargs))
    found = find_backend(backend)
    if not found.traits.needs_store:
        rank, world_size = check_place(rank, world_size)
        return _build_alone(found, recipe, name or backend, rank, range(world_size))
    meeting = visit(store, rank=rank, size=world_size, timeout=timeout)
    try:
        seats = range(meeting.size)
        own = PatientStore(meeting.store, patience=timeout.total_seconds())
        label = name or next_default_name(own, meeting.rank)
        return build(found, recipe, meeting, label, seats=seats, global_ranks=seats)
    finally:
        # The group has a lease of its own. An error that somebody keeps must not keep the store:
        # those who may yet read there why are visitors.
        if meeting.lease is not None:
            meeting.lease.end()
        if meeting.visit is not None:
            meeting.visit.end()


def adjusted(
    recipe: Recipe,
    *,
    backend: str | None = None,
    options: Mapping[str, object] | None = None,
    timeout: timedelta | None = None,
    device: str | torch.device | None = None,
) -> Recipe:
    """Return a recipe with some changes; options of another backend are left behind."""
    same = backend in (None, recipe.backend)
    return _checked(
        replace(
            recipe,
            backend=backend or recipe.backend,
            device=recipe.device if device is None else torch.device(device),
            timeout=recipe.timeout if timeout is None else timeout,
            options={**(recipe.options if same else {}), **(options or {})},
        )
    )


def _checked(recipe: Recipe) -> Recipe:
    """Refuse what no group can be made with, before anybody waits for this rank."""
    validate.seconds(recipe.timeout)
    check_options = find_backend(recipe.backend).traits.check_options
    if check_options is not None:
        check_options(recipe.options)
    return recipe


def split(
    parent: ProcessGroup,
    ranks: Sequence[int],
    recipe: Recipe,
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
        validate.rank("split_group", rank, parent.size(), word="rank")
    if parent.rank() not in ranks:
        return None
    label = f"{parent.label}/{name or parent._name_split(ranks)}"
    return split_off(
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


def split_off(
    store: Store | None,
    recipe: Recipe,
    label: str,
    *,
    rank: int,
    ranks: Sequence[int],
    global_ranks: Sequence[int],
    family: Sequence[Member] | None = None,
    next_turn: Callable[[str], int] | None = None,
    lent_store: Store | None = None,
    hosted: Hosted | None = None,
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
        return _build_alone(backend, recipe, label, mine, theirs, given_name=given_name, desc=desc)
    if store is None:
        raise UnknownOption(
            f"backend {recipe.backend!r} needs ranks that can meet, and those of this group are "
            "not there: what is split from a 'fake' group is 'fake' too"
        )
    kin = None
    if not family or next_turn is None:
        store = own_connection(store)
    else:
        kin = Kin(
            tuple(family[each] for each in seats),
            next_turn=partial(next_turn, f"{label} {seats}"),
            crowd=sum(member.machine == family[rank].machine for member in family),
        )
    lease = None if hosted is None else hosted.lease()
    meeting = Meeting(store, mine, len(seats), lent_store=lent_store, hosted=hosted, lease=lease)
    try:
        return build(
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


def assemble(
    store: Store, rank: int, terms: Terms, *, timeout: timedelta, purpose: Purpose | None = None
) -> str:
    """Bring together ranks that go on to make a group by other means.

    Return a name that they have for it alone.
    """
    forming = Forming(store, rank=rank, terms=terms, timeout=timeout, purpose=purpose)
    verdict = forming.carry_out(lambda: forming.meet(lambda: None))
    contradiction = None if verdict.alike else forming.contradiction()
    if contradiction is not None:
        raise contradiction
    return verdict.token


def merge(
    group: ProcessGroup,
    store: Store,
    size: int,
    *,
    timeout: timedelta | None,
    name: str = "",
    desc: str = "",
) -> ProcessGroup:
    """Make one group of several that meet in `store`."""
    recipe = adjusted(group._recipe, timeout=timeout)
    label = name or "merged"
    own = PatientStore(own_connection(store), patience=recipe.timeout.total_seconds())
    lobby, blocks = line_up(
        own.under(f"phalanx/merge/{label}"),
        Block(group._roster.token, group.label, list(group.global_ranks)),
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
    meeting = Meeting(lobby.raw, first + group.rank(), size, lent_store=store)
    found = find_backend(recipe.backend)
    return build(
        found, recipe, meeting, label, seats=range(size), global_ranks=global_ranks, desc=desc
    )


def build(
    backend: Backend,
    recipe: Recipe,
    meeting: Meeting,
    label: str,
    *,
    seats: Sequence[int],
    global_ranks: Sequence[int],
    torch_name: str = "",
    given_name: str = "",
    desc: str = "",
    kin: Kin | None = None,
    purpose: Purpose | None = None,
) -> ProcessGroup:
    """Form a group with those who meet; `torch_name` is for one that torch keeps account of."""
    terms = Terms(
        name=label,
        seats=tuple(seats),
        backend=backend.name,
        options=_options_text(recipe, backend.traits.own_options),
        site=user_site(),
    )
    forming = Forming(
        meeting.store,
        rank=meeting.rank,
        terms=terms,
        timeout=recipe.timeout,
        kin=kin,
        purpose=purpose,
        name_number=0 if torch_name else next_number(given_name or label),
    )
    connecting = _connecting(forming, backend, recipe, kin)
    engine = connecting.run(
        lambda: _refuse_processes(backend, forming),
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
            board=Board(
                PatientStore(PrefixStore("board", store)), rank=meeting.rank, size=meeting.size
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


def _connecting(forming: Forming, backend: Backend, recipe: Recipe, kin: Kin | None) -> Connecting:
    rank, size = forming.rank, forming.terms.size
    make_offer = backend.traits.offer
    offer = None
    if make_offer is not None and recipe.device.type == "cpu" and kin and kin.one_machine:
        offer = make_offer(rank, kin.members, kin.crowd, recipe.options)
    return Connecting(
        forming,
        make=lambda store: backend.factory(
            store, rank, size, recipe.timeout, recipe.device, **recipe.options
        ),
        offer=offer,
        lends_store=kin is not None,
    )


def _refuse_processes(backend: Backend, forming: Forming) -> None:
    members = () if forming.roster is None else forming.roster.members
    if backend.traits.ranks_are_threads and len({(m.machine, m.pid) for m in members}) > 1:
        raise InvalidState(
            f"ranks of a {backend.name!r} group are threads of one process: use 'gloo' for several"
        )


def _build_alone(
    backend: Backend,
    recipe: Recipe,
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
        cast(Store, None),  # there is nothing to say
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


def _options_text(recipe: Recipe, own: frozenset[str]) -> str:
    """Tell what ranks must agree on beyond the backend's name."""
    shared = {name: value for name, value in recipe.options.items() if name not in own}
    told = {"device": recipe.device.type, **shared}
    if recipe.checks is not None:
        told["checks"] = recipe.checks
    return ", ".join(f"{key}={value!r}" for key, value in sorted(told.items()))
