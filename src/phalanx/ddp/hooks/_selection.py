"""How many elements of a bucket are sent by hooks that send some of them, and since when."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor

from ...errors import InvalidArgument
from ._memory import Memory
from ._state import HookState, check_count

__all__ = ["SelectionState"]


class SelectionState(HookState):
    """What hooks that send some elements have in common."""

    memories = ("error_dict",)

    error_dict: Memory
    """What was held back, by the names of parameters, or by bucket where they have none."""

    def __init__(
        self,
        process_group: dist.ProcessGroup | None = None,
        k: int | float = 0.01,
        *,
        start_iter: int = 2,
        use_error_feedback: bool = True,
    ) -> None:
        """Set it up.

        Of each bucket are sent `k` elements if that is a whole number, or that share of them if it
        is a fraction. The first `start_iter` steps send everything: torch's modules plan their
        buckets anew after the first one, and what was held back of old ones would be lost there.
        """
        super().__init__(process_group)
        self.k = _checked(k)
        self.start_iter = check_count("start_iter", start_iter)
        self.use_error_feedback = use_error_feedback

    def count_of(self, buffer: Tensor) -> int:
        """Tell how many elements of a buffer are sent: one at least, if there is one."""
        wanted = self.k if isinstance(self.k, int) else max(1, round(self.k * buffer.numel()))
        return min(wanted, buffer.numel())


def _checked(k: Any) -> int | float:
    if isinstance(k, int) and not isinstance(k, bool) and k >= 1:
        return k
    if isinstance(k, float) and 0 < k < 1:
        return k
    raise InvalidArgument(
        f"k is a number of elements, 1 or more, or a share of them between 0.0 and 1.0, not {k!r}"
    )
