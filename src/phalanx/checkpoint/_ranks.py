"""Which ranks save and load together, and the barrier between them.

They are those of the given group, else of the current group, else of torch's default group. Without
any, a checkpointer takes the rank that the launcher gave this process: its ranks exchange files. A
`CheckpointManager` or `PreemptionGuard` acts alone, as in a job in which only rank 0 saves, and
warns; the lock on a directory keeps two managers that act alone from saving to the same one.
"""

from __future__ import annotations

import logging
from typing import Any

import torch.distributed as dist

from ..env import launched_rank
from ..errors import InvalidType
from ..groups import ProcessGroup
from ..groups._current_group import default_group
from ._barriers import DistBarrier, GroupBarrier
from ._types import RankInfo

_log = logging.getLogger(__name__)


def find_ranks(group: dist.ProcessGroup | None = None) -> RankInfo:
    """Return this process's rank in a group or the default group, else as launched, else 0 of 1."""
    group = group or default_group()
    if group is not None:
        return RankInfo(group.rank(), group.size())
    launched = launched_rank()
    return RankInfo(0, 1) if launched is None else RankInfo(launched.rank, launched.world_size)


def find_group(group: dist.ProcessGroup | None = None) -> dist.ProcessGroup | None:
    """Return the group whose ranks agree; None, and a warning, if a launched rank has none."""
    group = group or default_group()
    ranks = find_ranks(group)
    if group is None and ranks.global_world_size > 1:
        _log.warning("%s has no process group and acts as the only rank; pass group=...", ranks)
    return group


def make_barrier(group: dist.ProcessGroup | None, *, timeout_secs: float) -> tuple[RankInfo, Any]:
    """Return this process's rank and, unless it is the only one, a barrier. All ranks call this."""
    group = find_group(group)
    if group is None or group.size() == 1:
        return RankInfo(0, 1), None
    rank_info = find_ranks(group)
    if isinstance(group, ProcessGroup):
        return rank_info, GroupBarrier(group, timeout_secs=timeout_secs)
    if group is dist.group.WORLD:
        return rank_info, DistBarrier(timeout_secs=timeout_secs)
    raise InvalidType(
        "group must come from phalanx.groups.new_group or be torch's default group, got "
        f"another {type(group).__name__} of torch"
    )
