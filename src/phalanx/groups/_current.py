"""The group that a thread works in by default."""

from __future__ import annotations

import threading
from collections.abc import Generator
from contextlib import contextmanager
from typing import cast

import torch.distributed as dist
from torch._C._distributed_c10d import _set_process_group

__all__ = ["current_process_group", "default_group", "process_group"]


class _Current(threading.local):
    # torch keeps the current group too, but only its C++ part: should the Python object go away
    # meanwhile, what comes back has lost its methods. So the object is kept here.
    group: dist.ProcessGroup | None = None


_current = _Current()


def current_process_group() -> dist.ProcessGroup | None:
    """Return the group that this thread entered last, or None."""
    return _current.group


def default_group() -> dist.ProcessGroup | None:
    """Return the group that is meant where none is given.

    This thread's current group; else torch's default group; else None. Whatever takes an optional
    group asks here, so that two objects of one program are never on different groups.
    """
    if _current.group is None and dist.is_initialized():
        return dist.group.WORLD
    return _current.group


@contextmanager
def process_group(pg: dist.ProcessGroup) -> Generator[None, None, None]:
    """Make `pg` this thread's current group for the body of a ``with`` statement."""
    before = _current.group
    _enter(pg)
    try:
        yield
    finally:
        _enter(before)


def _enter(group: dist.ProcessGroup | None) -> None:
    _current.group = group
    # torch's own APIs see the same group. Its stub forgets that None is how to leave.
    _set_process_group(cast(dist.ProcessGroup, group))
