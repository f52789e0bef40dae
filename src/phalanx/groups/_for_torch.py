"""Groups that torch asks for: what ``dist.init_process_group("shm")`` and ``dist.new_group`` get.

torch takes our `ProcessGroup` for its own and hands it out. It also names it and keeps it in its
tables, until ``dist.destroy_process_group`` takes it out again and shuts it down.
"""

from __future__ import annotations

from typing import Any

import torch

from ..errors import InvalidArgument
from ._create import build
from ._group import ProcessGroup, Recipe
from ._registry import find_backend
from ._stores import meet
from ._words import runs

__all__ = ["make"]


def make(backend: str, asked: Any, options: Any) -> ProcessGroup:
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
    return build(
        found,
        Recipe(backend, torch.device("cpu"), asked.timeout, None, {}),
        meet(asked.store, rank=asked.group_rank, size=asked.group_size, timeout=asked.timeout),
        "world" if whole else f"world/{runs(seats)}",
        seats=seats,
        global_ranks=seats,
        torch_name=asked.group_id,
    )
