"""How groups find each other to become one: in a lobby of the store that they meet in."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import NoReturn

from ..errors import InvalidArgument, RendezvousTimeout
from ._patient import PatientStore

__all__ = ["Block", "line_up"]


@dataclass(frozen=True)
class Block:
    """One of the groups that merge."""

    token: str
    name: str
    global_ranks: list[int]


def line_up(
    hall: PatientStore, mine: Block, *, leads: bool, size: int, timeout: timedelta
) -> tuple[PatientStore, list[Block]]:
    """Wait until the groups of `size` ranks have come; every rank returns the same list.

    The first rank of each group `leads` it in. A lobby holds one merge: the counter of its ranks
    shows whether there is room, so that a later merge in the same store gets the next one.
    """
    if len(mine.global_ranks) > size:
        raise InvalidArgument(_too_many(size, len(mine.global_ranks)))
    until = time.monotonic() + timeout.total_seconds()
    if leads:
        _enter(hall, mine, size)
    number: bytes | None = None
    blocks: list[Block] = []
    while sum(len(block.global_ranks) for block in blocks) < size:
        if time.monotonic() >= until:
            _give_up(hall, number, blocks, leads=leads, size=size, timeout=timeout)
        number = number or hall.read(f"entered/{mine.token}")
        refused = hall.read(f"refused/{mine.token}")
        if refused is not None:
            raise InvalidArgument(refused.decode())
        data = number and _lobby(hall, number).read(f"block/{len(blocks)}")
        if data:
            blocks.append(Block(**json.loads(data)))
        else:
            time.sleep(0.005)
    assert number is not None
    ordered = sorted(blocks, key=lambda block: (block.global_ranks[0], block.name, block.token))
    return _lobby(hall, number), ordered


def _enter(hall: PatientStore, mine: Block, size: int) -> None:
    number, ranks = 0, len(mine.global_ranks)
    while (count := (lobby := _lobby(hall, str(number).encode())).add("ranks", ranks)) > size:
        if count - ranks < size:
            lobby.add("ranks", -ranks)
            hall.set(f"refused/{mine.token}", _too_many(size, count))
            return
        number += 1
    lobby.set(f"block/{lobby.add('blocks', 1) - 1}", json.dumps(asdict(mine)))
    hall.set(f"entered/{mine.token}", str(number))


def _too_many(size: int, count: int) -> str:
    return f"merge_remote_group: size is {size}, but the groups have at least {count} ranks"


def _lobby(hall: PatientStore, number: bytes) -> PatientStore:
    return hall.under(f"lobby/{number.decode()}")


def _give_up(
    hall: PatientStore,
    number: bytes | None,
    blocks: list[Block],
    *,
    leads: bool,
    size: int,
    timeout: timedelta,
) -> NoReturn:
    if leads and number is not None:  # nobody shall wait for this lobby to fill: it is closed
        _lobby(hall, number).add("ranks", size)
    present = sum(len(block.global_ranks) for block in blocks)
    names = ", ".join(f"{block.name!r} ({len(block.global_ranks)})" for block in blocks)
    raise RendezvousTimeout(
        f"merge_remote_group waits for {size} ranks, {present} came within "
        f"{timeout.total_seconds():g} s: {names or 'nobody'}"
    )
