"""Makes groups: from a store, out of a group, of several groups."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from typing import cast

import torch
from torch._C._distributed_c10d import PrefixStore, Store

from ..errors import InvalidArgument, InvalidState
from . import _validate as validate
from ._board import Board
from ._forming import Terms, connect, form, next_default_name
from ._group import ProcessGroup, Recipe
from ._merging import Block, line_up
from ._patient import ANSWER_WITHIN, PatientStore
from ._record import user_site
from ._registry import Backend, find_backend
from ._roster import Member, Roster
from ._stores import Meeting, check_place, meet, own_connection

__all__ = ["DEFAULT_TIMEOUT", "build", "merge", "new_group", "split"]

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
    ``file:///path``), or, by default, what the launcher put into the environment (``env://``).
    `backend` is the fastest that these ranks can have, unless one is named.
    `timeout` is the default deadline of every call. `checks` compares operation, shape and dtype
    of every call across ranks: by default where that is free, with True everywhere, at the price
    of a round trip. Other arguments go to the backend.
    """
    found = find_backend(backend)
    validate.seconds(timeout)
    if found.traits.check_options is not None:
        found.traits.check_options(kwargs)
    recipe = Recipe(backend, torch.device(device), timeout, checks, kwargs)
    if not found.traits.needs_store:
        rank, world_size = check_place(rank, world_size)
        return _build_alone(found, recipe, name or backend, rank, range(world_size))
    meeting = meet(store, rank=rank, size=world_size, timeout=timeout)
    seats = range(meeting.size)
    patience = timeout.total_seconds()
    label = name or next_default_name(PatientStore(meeting.store, patience=patience), meeting.rank)
    return build(found, recipe, meeting, label, seats=seats, global_ranks=seats)


def split(
    parent: ProcessGroup, ranks: list[int], *, timeout: timedelta | None, name: str | None
) -> ProcessGroup | None:
    """Make a group of some ranks of another; None for the ranks that are not among them."""
    if not ranks or len(set(ranks)) != len(ranks):
        raise InvalidArgument(f"split_group takes different ranks, at least one, not {ranks}")
    for rank in ranks:
        validate.rank("split_group", rank, parent.size(), word="rank")
    if parent.rank() not in ranks:
        return None
    recipe = parent._recipe if timeout is None else replace(parent._recipe, timeout=timeout)
    label = f"{parent.label}/{name or parent._name_split(ranks)}"
    global_ranks = [parent.global_ranks[rank] for rank in ranks]
    found = find_backend(recipe.backend)
    store = parent.get_group_store()
    mine = ranks.index(parent.rank())
    if store is None:
        return _build_alone(found, recipe, label, mine, global_ranks)
    meeting = Meeting(own_connection(store), mine, len(ranks), lent_store=parent._lent_store)
    return build(found, recipe, meeting, label, seats=ranks, global_ranks=global_ranks)


def merge(
    group: ProcessGroup, store: Store, size: int, *, timeout: timedelta | None, name: str | None
) -> ProcessGroup:
    """Make one group of several that meet in `store`."""
    recipe = group._recipe if timeout is None else replace(group._recipe, timeout=timeout)
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
    return build(found, recipe, meeting, label, seats=range(size), global_ranks=global_ranks)


def build(
    backend: Backend,
    recipe: Recipe,
    meeting: Meeting,
    label: str,
    *,
    seats: Sequence[int],
    global_ranks: Sequence[int],
    torch_name: str = "",
) -> ProcessGroup:
    """Form a group with those who meet; `torch_name` is for one that torch keeps account of."""
    terms = Terms(
        name=label,
        seats=tuple(seats),
        backend=backend.name,
        options=_options_text(recipe, backend.traits.own_options),
        site=user_site(),
    )
    roster, room = form(
        PatientStore(meeting.store, patience=recipe.timeout.total_seconds()),
        rank=meeting.rank,
        terms=terms,
        member=Member.here(),
        timeout=recipe.timeout,
    )
    if backend.traits.ranks_are_threads and len({(m.machine, m.pid) for m in roster.members}) > 1:
        raise InvalidState(
            f"ranks of a {backend.name!r} group are threads of one process: use 'gloo' for several"
        )
    engine = connect(
        lambda: backend.factory(
            PrefixStore("engine", room.raw),
            meeting.rank,
            meeting.size,
            recipe.timeout,
            recipe.device,
            **recipe.options,
        ),
        room,
        terms=terms,
        rank=meeting.rank,
        roster=roster,
        timeout=recipe.timeout,
        background=backend.traits.connects_in_background,
    )
    tell = backend.traits.name_of
    chosen = backend if tell is None else find_backend(tell(engine))
    return ProcessGroup(
        name=label,
        rank=meeting.rank,
        size=meeting.size,
        recipe=recipe,
        backend=chosen.name,
        engine=engine,
        traits=chosen.traits,
        devices=chosen.traits.devices | {recipe.device.type},
        store=room.raw,
        lent_store=meeting.lent_store,
        board=Board(
            room.under("board", patience=ANSWER_WITHIN), rank=meeting.rank, size=meeting.size
        ),
        roster=roster,
        global_ranks=global_ranks,
        torch_name=torch_name,
    )


def _build_alone(
    backend: Backend, recipe: Recipe, label: str, rank: int, global_ranks: Sequence[int]
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
    )


def _options_text(recipe: Recipe, own: frozenset[str]) -> str:
    """Tell what ranks must agree on beyond the backend's name."""
    shared = {name: value for name, value in recipe.options.items() if name not in own}
    told = {"device": recipe.device.type, **shared}
    if recipe.checks is not None:
        told["checks"] = recipe.checks
    return ", ".join(f"{key}={value!r}" for key, value in sorted(told.items()))
