"""The ranks that use a folder together."""

from __future__ import annotations

import logging
import os
from typing import Any

import torch.distributed as dist

from ..env import read_rank_env
from ..errors import InvalidType
from ..groups import ProcessGroup, current_process_group
from ._types import RankInfo
from .barriers import DistBarrier, GroupBarrier

__all__ = ["default_group", "meet_in"]

_log = logging.getLogger(__name__)


def meet_in(group: dist.ProcessGroup | None, *, timeout_secs: float) -> tuple[RankInfo, Any]:
    """Return this rank's place in a group, and a barrier for all of its ranks, which call this.

    Without a group it is the default one; a rank that is alone has no barrier.
    """
    group = default_group() if group is None else group
    if group is None or group.size() == 1:
        return RankInfo(0, 1), None
    return RankInfo(group.rank(), group.size()), _barrier(group, timeout_secs)


def default_group() -> dist.ProcessGroup | None:
    """Return the current group, or else torch's default group, if there is one."""
    group = current_process_group()
    if group is None and dist.is_available() and dist.is_initialized():
        return dist.group.WORLD
    if group is None and {"RANK", "WORLD_SIZE"} <= os.environ.keys():
        launched = read_rank_env()
        if launched.world_size > 1:
            _log.warning(
                "rank %d of %d takes itself for the only one, as it was given no group; pass "
                "group=..., or the ranks will not agree",
                launched.rank,
                launched.world_size,
            )
    return group


def _barrier(group: dist.ProcessGroup, timeout: float) -> Any:
    if isinstance(group, ProcessGroup):
        return GroupBarrier(group, timeout_secs=timeout)
    if group is dist.group.WORLD:
        return DistBarrier(timeout_secs=timeout)
    raise InvalidType(
        "group is one of phalanx.groups.new_group or torch's default group, not another "
        f"{type(group).__name__} of torch"
    )
