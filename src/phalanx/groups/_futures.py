"""Futures that fail for torch's C++ too.

``Future.set_exception`` is a matter of Python's: to C++ such a future has succeeded, with the error
for its result. torch's DDP looks for tensors in there, finds none, and the process crashes.
"""

from __future__ import annotations

from copy import copy
from typing import Any, NoReturn

from torch.futures import Future

__all__ = ["fail"]


def fail(future: Future[Any], error: Exception) -> None:
    """End a future badly: whoever waits for it, in Python or C++, gets the error."""
    future._set_unwrap_func(_Failed.tell)
    # A copy, and copies of that for those who ask: what is raised refers to the frames it went
    # through, those to the future, and a circle through C++ is never collected.
    future.set_result(_Failed(copy(error)))


class _Failed:
    """Stands where the result would be."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def tell(self) -> NoReturn:
        """Raise the error."""
        raise copy(self._error)

    def __reduce__(self) -> NoReturn:
        self.tell()  # C++ pickles a result to find the tensors in it
