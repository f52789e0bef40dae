"""The private names that tests of this package use; everything else is public."""

from phalanx.join import _join, _JoinConfig

__all__ = ["_JoinConfig", "_join"]
