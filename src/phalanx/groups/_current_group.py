"""The thread's current group, which is the default wherever no group is given."""

from __future__ import annotations

import threading
from collections.abc import Generator
from contextlib import contextmanager
from typing import cast

import torch.distributed as dist
from torch._C._distributed_c10d import _set_process_group


class _Current(threading.local):
    # torch keeps only the C++ part of its current group. Without this reference the Python object
    # could die, and what torch returns then has lost its methods.
    group: dist.ProcessGroup | None = None


_current = _Current()


def current_process_group() -> dist.ProcessGroup | None:
    """Return this thread's current group, or None."""
    return _current.group


def default_group() -> dist.ProcessGroup | None:
    """Return the group to use where none is given.

    This thread's current group; else torch's default group; else None. Everything that takes an
    optional group calls this, so that all objects of a program use the same default.
    """
    if _current.group is None and dist.is_initialized():
        return dist.group.WORLD
    return _current.group


@contextmanager
def process_group(pg: dist.ProcessGroup) -> Generator[None, None, None]:
    """Make `pg` this thread's current group for the body of a ``with`` statement."""
    before = _current.group
    _set_current(pg)
    try:
        yield
    finally:
        _set_current(before)


def _set_current(group: dist.ProcessGroup | None) -> None:
    _current.group = group
    # torch's own APIs use the same group. Its stub does not allow None.
    _set_process_group(cast("dist.ProcessGroup", group))
