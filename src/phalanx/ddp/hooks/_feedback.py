"""Error feedback: what is not sent now is sent later.

What a lossy hook holds back of a bucket is added to that bucket's gradients in the next step, so
that over time everything is sent (Seide et al. 2014; Karimireddy et al., arXiv:1901.09847).
"""

from __future__ import annotations

from collections.abc import MutableMapping

import torch
from torch import Tensor

__all__ = ["add_held", "hold", "is_finite"]


def add_held(held: MutableMapping[int, Tensor], index: int, gradients: Tensor) -> Tensor | None:
    """Add to gradients, in place, what was held back of their bucket; returns that."""
    error = held.get(index)
    # Modules plan their buckets anew after the first step: what is of another size is of others.
    if error is None or error.shape != gradients.shape:
        return None
    gradients.add_(error.to(gradients.device))  # a checkpoint may have been loaded elsewhere
    return error


def hold(
    held: MutableMapping[int, Tensor], index: int, rest: Tensor, before: Tensor | None
) -> None:
    """Hold back what is not sent of a bucket, where `before` was held until now.

    What is not finite would never leave again. A step with that in it is skipped by those who scale
    their losses, and here it is as if it had not been.
    """
    if is_finite(rest):
        held[index] = rest
    elif before is not None:
        held[index] = before
    else:
        held.pop(index, None)


def is_finite(tensor: Tensor) -> bool:
    """Tell whether all elements are finite, by their sum: in a fiftieth of the time."""
    wide = torch.promote_types(tensor.dtype, torch.float32)
    return bool(tensor.sum(dtype=wide).isfinite())
