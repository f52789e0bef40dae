"""Named points of a save, at which a test may make a rank fail."""

from __future__ import annotations

from .. import _faultpoints

__all__ = ["reach"]


def reach(point: str) -> None:
    """Say that a save has come to a point."""
    if _faultpoints.armed:
        _faultpoints.reach(f"checkpoint:{point}")
