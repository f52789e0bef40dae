"""Data-parallel training for PyTorch.

The layers, from the top; each imports only from those below it::

    launch      starts ranks: phalanx run, phalanx doctor
    testing     ranks for tests, and faults for them
    groups      process groups as objects; one file per backend
    native      the shared-memory engine, where it could be built
    errors, env what goes wrong, and what the launcher says
"""

from importlib.metadata import version

from . import errors
from ._registration import register_with_torch as _register_with_torch

__all__ = ["__version__", "errors"]

__version__ = version("phalanx")

_register_with_torch()
