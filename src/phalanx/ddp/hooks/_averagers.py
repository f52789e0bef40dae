"""Averagers: models that train apart are made one again, every so many steps."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any

import torch.distributed as dist
from torch import Tensor

from ...errors import InvalidArgument, InvalidType
from ...groups import ProcessGroup
from ._averaging import Averaging
from ._communicate import group_of, new_subgroup
from ._state import check_count

__all__ = ["HierarchicalModelAverager", "ModelAverager", "PeriodicModelAverager"]

Parameters = Iterable[Tensor] | Iterable[dict[str, Any]]


class ModelAverager(ABC):
    """What averagers have in common: a group, and the number of steps."""

    def __init__(
        self, process_group: dist.ProcessGroup | None = None, *, warmup_steps: int = 0
    ) -> None:
        self.process_group = group_of(process_group)
        """Where models are averaged; torch's default group unless another was given."""
        self.warmup_steps = check_count("warmup_steps", warmup_steps)
        self.step = 0
        """How many steps there have been."""

    @abstractmethod
    def group_of_step(self) -> dist.ProcessGroup | None:
        """Tell in which group models are averaged in this step, if they are."""

    def average_parameters(self, params: Parameters) -> None:
        """Average parameters, or those of an optimizer's groups, if it is time; once a step."""
        group = self.group_of_step() if self.step >= self.warmup_steps else None
        if group is not None:
            Averaging(trained(params), group).finish()
        self.step += 1


class PeriodicModelAverager(ModelAverager):
    """Averages models every `period` steps, from the end of the warm-up on."""

    def __init__(
        self,
        period: int,
        warmup_steps: int = 0,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__(process_group, warmup_steps=warmup_steps)
        self.period = check_count("period", period, least=1)
        if period == 1:
            _warn_of_every_step()

    def group_of_step(self) -> dist.ProcessGroup | None:
        """Tell in which group models are averaged in this step, if they are."""
        return None if (self.step - self.warmup_steps) % self.period else self.process_group


class HierarchicalModelAverager(ModelAverager):
    """Averages models in small groups often and in large ones seldom (arXiv:2010.12998).

    ``{2: 4, 8: 16}`` averages fours of neighbouring ranks every 2 steps, and all 16 every 8. The
    last group is the whole one.
    """

    def __init__(
        self,
        period_group_size_dict: Mapping[int, int] | None = None,
        warmup_steps: int = 0,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__(process_group, warmup_steps=warmup_steps)
        levels = dict(period_group_size_dict or {})
        _check_levels(levels, self.process_group.size())
        if max(levels) == 1:
            _warn_of_every_step()
        self.period_process_group_dict = {
            period: _neighbours(self.process_group, size) for period, size in levels.items()
        }

    def group_of_step(self) -> dist.ProcessGroup | None:
        """Tell in which group models are averaged in this step: the largest whose turn it is."""
        for period in reversed(self.period_process_group_dict):
            if self.step % period == 0:
                return self.period_process_group_dict[period]
        return None


def trained(params: Parameters) -> list[Tensor]:
    """List the parameters that training changes.

    Torch leaves out those without a gradient. Whether there is one may differ between ranks, and
    after ``zero_grad`` there is none; then nothing would be averaged, and nobody told.
    """
    found: list[Tensor] = []
    for each in params:
        if isinstance(each, Tensor):
            found.append(each)
        elif isinstance(each, dict):
            found.extend(each["params"])
        else:
            raise InvalidType(
                f"parameters, or groups of them, can be averaged, not {type(each).__name__}"
            )
    return [each for each in found if each.requires_grad]


def _check_levels(levels: Mapping[int, int], whole: int) -> None:
    if not levels:
        raise InvalidArgument("period_group_size_dict has no period: what should be averaged when?")
    sizes = list(levels.values())
    for period, size in levels.items():
        check_count("a period of period_group_size_dict", period, least=1)
        check_count("a group size of period_group_size_dict", size, least=1)
        if whole % size:
            raise InvalidArgument(f"{whole} ranks cannot be divided into groups of {size}")
    if list(levels) != sorted(levels) or sizes != sorted(sizes):
        raise InvalidArgument(
            f"periods and group sizes of period_group_size_dict rise together, not {dict(levels)}"
        )
    if sizes[-1] != whole:
        raise InvalidArgument(
            f"the last group of period_group_size_dict has all {whole} ranks, not {sizes[-1]}"
        )


def _neighbours(group: dist.ProcessGroup, size: int) -> dist.ProcessGroup:
    """Make the group of the `size` neighbouring ranks that this one belongs to."""
    if size == group.size():
        return group
    if isinstance(group, ProcessGroup):
        first = group.rank() // size * size
        mine = group.split_group(range(first, first + size))
        assert mine is not None, "a rank is among its neighbours"
        return mine
    return new_subgroup(group_size=size, group=group)


def _warn_of_every_step() -> None:
    warnings.warn(
        "a period of 1 averages the model in every step, which costs as much as averaging the "
        "gradients: plain data parallel training does that during backward",
        stacklevel=3,
    )
