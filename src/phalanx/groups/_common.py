"""One tensor for all ranks: the same bytes, wherever they are looked at.

`allocate` gives a rank memory of its own, which the engine reaches on behalf of the others. Here
the others get a tensor of it themselves. What one of them writes all see, and it is up to them to
do so in turn.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import InvalidState
from ._group import ProcessGroup

__all__ = ["allocate_common"]

NOWHERE = -1


def allocate_common(group: ProcessGroup, nbytes: int, *, owner: int) -> Tensor:
    """Make a tensor of bytes in the owner's shared memory, on every rank; all call it.

    Its contents are not set. If the owner has no room, every rank raises.
    """
    if not group.shares_memory:
        raise InvalidState(f"{group.label} does not share memory")
    slab = group._engine._slab
    place = torch.tensor([NOWHERE], dtype=torch.int64)
    why: InvalidState | None = None
    if group.rank() == owner:
        try:
            place.fill_(slab.allocate_common(nbytes))
        except InvalidState as error:
            why = error
    group.broadcast(place, root=owner).wait()
    if place.item() == NOWHERE:
        raise why or InvalidState(f"rank {owner} has no shared memory for {nbytes} bytes")
    tensor: Tensor = slab.reach(owner, int(place.item()), nbytes)
    return tensor
