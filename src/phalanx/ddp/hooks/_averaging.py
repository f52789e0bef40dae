"""Many tensors averaged together, now or while something else is done."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor

from ._communicate import start_average

__all__ = ["Averaging"]


class Averaging:
    """Tensors on their way to their means over the ranks, all of one dtype and device at once."""

    def __init__(self, tensors: Iterable[Tensor], group: dist.ProcessGroup) -> None:
        self.tensors = [tensor.detach() for tensor in tensors]
        """What was given; it holds the means when all is finished."""
        alike: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
        for tensor in self.tensors:
            alike.setdefault((tensor.dtype, tensor.device), []).append(tensor)
        self._parts = list(alike.values())
        self._flats = [torch.cat([each.reshape(-1) for each in parts]) for parts in self._parts]
        self._calls = [start_average(group, flat) for flat in self._flats]

    def finish(self) -> list[Tensor]:
        """Wait for the means and put them in place, once; returns the tensors."""
        for parts, flat, call in zip(self._parts, self._flats, self._calls, strict=True):
            call.wait()
            means = torch.split(flat, [each.numel() for each in parts])
            # Into the memory that they have, which may be shared, or shown in views.
            shaped = [mean.view(each.shape) for mean, each in zip(means, parts, strict=True)]
            torch._foreach_copy_(parts, shaped)
        return self.tensors
