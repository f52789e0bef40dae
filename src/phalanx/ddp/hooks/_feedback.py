"""Error feedback: what is not sent now is sent later.

What a lossy hook holds back of a parameter's gradient is added to that in the next step, so that
over time everything is sent (Seide et al. 2014; Karimireddy et al., arXiv:1901.09847).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ._memory import Key, Memory, known_parts

__all__ = ["add_held", "hold", "is_finite"]


def add_held(held: Memory, gradients: Mapping[Key, Tensor]) -> None:
    """Add to gradients, in place, what was held back of them; what does not fit is forgotten."""
    known = known_parts(held, gradients)
    if known:
        torch._foreach_add_([gradients[key] for key in known], list(known.values()))
    for key in gradients.keys() - known.keys():
        held.pop(key, None)


def hold(held: Memory, rest: Tensor, parts: Mapping[Key, Tensor]) -> None:
    """Hold back what is not sent of a bucket: the rest, by its parts.

    What is not finite would never leave again. A step with that in it is skipped by those who scale
    their losses, and here it is as if it had not been.
    """
    if is_finite(rest):
        held.update(parts)


def is_finite(tensor: Tensor) -> bool:
    """Tell whether all elements are finite, by their sum: in a fiftieth of the time."""
    wide = torch.promote_types(tensor.dtype, torch.float32)
    return bool(tensor.sum(dtype=wide).isfinite())
