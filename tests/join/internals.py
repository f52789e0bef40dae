"""Private names used by the tests of this package."""

from phalanx.join import _join, _JoinConfig

__all__ = ["_JoinConfig", "_join"]
