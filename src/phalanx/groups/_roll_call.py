"""Everybody says whether they stay; the group goes on among those who do.

Where a rank may leave by itself it does so now. Elsewhere the rest go on with an engine of their
own (`_narrowing`), and who has left waits in the hall to come back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ._membership import depart
from ._narrowing import narrow

if TYPE_CHECKING:
    from ._group import ProcessGroup

__all__ = ["roll_call"]

LEAVES, STAYS = 1, 2


def roll_call(group: ProcessGroup, stays: bool) -> tuple[int, ...]:
    """Find out who stays, and go on among those."""
    device = group._recipe.device
    said = torch.tensor([STAYS if stays else LEAVES], dtype=torch.uint8, device=device)
    heard = torch.zeros(group._size, dtype=torch.uint8, device=device)  # who has left says nothing
    work = group._gather_into("roll_call", [heard], [said], None, None)
    work.wait()
    answers = list(enumerate(heard.tolist()))
    staying = tuple(rank for rank, answer in answers if answer == STAYS)
    leaving = {rank for rank, answer in answers if answer == LEAVES}
    if not stays:
        depart(group, "roll_call")
        if not group._can_leave:
            group._health.take_part(staying)
    elif leaving and not group._can_leave:
        narrow(group, staying, work.call)
    group._announced |= leaving
    return staying
