"""What only meshes raise.

::

    MisuseError
    ├── InvalidMesh (ValueError, RuntimeError, AssertionError)  contradicts itself, or its group
    ├── UnknownAxis (KeyError, IndexError, ValueError, AssertionError)  there is no such axis
    └── NotInMesh (RuntimeError, IndexError)  this rank has no place in the mesh

The built-ins are what upstream raises for the same mistakes: for one and the same mistake they
differ from method to method, so a class here has all of them.
"""

from __future__ import annotations

from ..errors import MisuseError

__all__ = ["InvalidMesh", "NotInMesh", "UnknownAxis"]


class InvalidMesh(MisuseError, ValueError, RuntimeError, AssertionError):
    """A mesh cannot be like this: it contradicts itself, or the group that it is made on."""


class UnknownAxis(MisuseError, KeyError, IndexError, ValueError, AssertionError):
    """A mesh has no axis of that name or number, or not in that order."""

    __str__ = Exception.__str__  # KeyError would print the message's repr


class NotInMesh(MisuseError, RuntimeError, IndexError):
    """The calling rank is not in the mesh, so there is no answer for it."""
