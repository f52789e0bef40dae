"""The short way of plain sums and barriers on engines of our own: what it needs of a group.

It is native (``native/shortcut.hpp`` tells how it works) and does what `_issue` and `Work.wait` do
for a call that is nothing special and ends at once. Everything else goes the long way, here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .. import _faultpoints as faultpoints
from .. import native
from . import _record as record
from ._engine import Engine
from ._health import Health
from ._record import Call, Recorder
from ._work import Work

if TYPE_CHECKING:
    from ..native._engine import Shortcut, ShortWork
    from ._group import ProcessGroup

__all__ = ["NUMBERS", "can_read_tensors", "shortcut_for"]

# The numbers of `native/types.hpp` are the places in this list.
_DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint8,
)


NUMBERS = {dtype: number for number, dtype in enumerate(_DTYPES)}
"""What the native side calls the types whose tensors it reads."""


def shortcut_for(group: ProcessGroup) -> Shortcut | None:
    """Make the short way of a group whose engine has one."""
    if not hasattr(group._engine, "shortcut") or not can_read_tensors():
        return None
    if group._agreement is not None:
        return None  # what is compared beforehand takes long anyway
    shortcut: Shortcut = group._engine.shortcut(
        order=group._order,
        recorder=group._recorder,
        calls=group._recorder.calls,
        in_flight=group._health.in_flight,
        # Not of the group itself: a call that is waited for outlives it, but does not keep it.
        grow=functools.partial(_grow, group._health),
        timeout=group._timeout,
    )
    return shortcut


def _grow(
    health: Health,
    engine: Engine,
    call: Call,
    timeout: float,
    ticket: int,
    tensor: Tensor | None,
    settled: bool,
) -> Work:
    """Make the work that a call would have had on the long way."""
    mine = [] if tensor is None else [tensor]
    work = Work(health, call, timeout, engine.adopt(ticket, mine), mine)
    if settled:
        work.is_settled()
    return work


@functools.cache
def can_read_tensors() -> bool:
    """Tell the native side what all groups share, and whether it can read torch's tensors."""
    if native.engine is None:
        return False
    _complete(native.engine.ShortWork)
    exchange = getattr(Tensor, "__dlpack_c_exchange_api__", None)
    return exchange is not None and native.engine.prepare_shortcuts(
        call=Call,
        recorder=Recorder,
        files=record.known_files,
        user_frame=record.user_frame,
        fault_points=vars(faultpoints),
        work=Work,
        tensors=(Tensor, torch.nn.Parameter),
        strided=torch.strided,
        dtypes=_DTYPES,
        exchange=exchange,
    )


def _complete(short: type[ShortWork]) -> None:
    """Give the native class what else a `Work` has: the attributes of the one it grows into."""
    for name in set(dir(Work)) - set(dir(short)):
        if not name.startswith("__"):
            setattr(short, name, property(_grown(name)))


def _grown(name: str) -> Callable[[ShortWork], Any]:
    return lambda short: getattr(short.as_work(), name)
