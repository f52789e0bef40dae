"""This rank's local tensor of a DTensor.

torch's DTensor module is never imported here, only looked up if something else has imported it.
"""

from __future__ import annotations

import sys
from typing import Any, TypeGuard, cast

from torch import Tensor


def is_dtensor(tensor: object) -> TypeGuard[Any]:
    module: Any = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def to_local(dtensor: Any) -> Tensor:
    part = dtensor.to_local()
    return cast("Tensor", part.wait() if hasattr(part, "wait") else part)  # it may be async


def from_local(part: Tensor, like: Any) -> Tensor:
    """Return the DTensor with this local tensor and the placements and shape of another."""
    layout = {"shape": like.shape, "stride": like.stride()}
    whole = type(like).from_local(
        part, like.device_mesh, like.placements, run_check=False, **layout
    )
    return cast("Tensor", whole)
