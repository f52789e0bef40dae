"""The ranks that use a folder together."""

from __future__ import annotations

import logging
import os
from typing import Any

import torch.distributed as dist

from ..env import read_rank_env
from ..errors import InvalidType
from ..groups import ProcessGroup
from ..groups._factory import default_group
from ._barrier_kinds import DistBarrier, GroupBarrier
from ._types import RankInfo

__all__ = ["find_group", "meet_in"]

_log = logging.getLogger(__name__)


def meet_in(group: dist.ProcessGroup | None, *, timeout_secs: float) -> tuple[RankInfo, Any]:
    """Return this rank's place in a group, and a barrier for all of its ranks, which call this.

    Without a group it is the default one; a rank that is alone has no barrier.
    """
    group = find_group() if group is None else group
    if group is None or group.size() == 1:
        return RankInfo(0, 1), None
    return RankInfo(group.rank(), group.size()), _barrier(group, timeout_secs)


def find_group() -> dist.ProcessGroup | None:
    """Return the default group; warn if there is none, though other ranks were launched."""
    group = default_group()
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
