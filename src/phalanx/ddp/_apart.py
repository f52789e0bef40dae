"""Gradients that are reduced already, and wait outside of a pass that adds to them.

They are on every rank alike, and in a pass each rank brings its share of them to the sum. Where
ranks may leave, nobody knows beforehand how many shares there will be. So they are kept apart, and
added when the pass is over.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

__all__ = ["put_apart", "put_back"]


def put_apart(parameters: Sequence[Parameter]) -> dict[Parameter, Tensor]:
    """Take the gradients off parameters, and keep what is in them."""
    kept = {p: p.grad.detach().clone() for p in parameters if p.grad is not None}
    for parameter in kept:
        parameter.grad = None
    return kept


def put_back(kept: dict[Parameter, Tensor]) -> dict[Parameter, Tensor]:
    """Add what was kept to what has come since, and keep nothing."""
    with torch.no_grad():
        for parameter, old in kept.items():
            if parameter.grad is None:
                parameter.grad = old
            elif parameter.grad.is_sparse:
                parameter.grad = parameter.grad + old
            else:
                parameter.grad.add_(old)
    return {}
