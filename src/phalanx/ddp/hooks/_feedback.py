"""Error feedback: what is not sent now is sent later.

What a lossy hook holds back of a bucket is added to that bucket's gradients in the next step, so
that over time everything is sent (Seide et al. 2014; Karimireddy et al., arXiv:1901.09847).
"""

from __future__ import annotations

from collections.abc import MutableMapping

from torch import Tensor

__all__ = ["add_held"]


def add_held(held: MutableMapping[int, Tensor], index: int, gradients: Tensor) -> Tensor:
    """Add to gradients what was held back of their bucket, in place; it is then nobody's."""
    error = held.pop(index, None)
    # Modules plan their buckets anew after the first step: what is of another size is of others.
    if error is not None and error.shape == gradients.shape:
        gradients.add_(error)
    return gradients
