"""The private names that tests of this package use; everything else is public."""

from phalanx import _faultpoints

__all__ = ["_faultpoints"]
