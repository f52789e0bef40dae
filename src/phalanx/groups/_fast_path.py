"""The native fast path for plain sums, means and barriers.

The extension (`native/fast_path.hpp`) does what `ProcessGroup._issue` and `Work.wait` do for a
call that needs nothing special and ends soon. Everything else takes the slow path in Python.
This module hands the extension the parts of a group that it needs and turns its handle into a
`Work` on demand.

The extension reads slots of `Call` and `FlightRecorder` by name; renaming one of them means
renaming it in `native/fast_path.cpp` too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .. import _faultpoints as faultpoints
from .. import native
from . import _flight_recorder
from ._engine import Engine
from ._failure_detector import PRUNE_IN_FLIGHT_ABOVE, FailureDetector
from ._flight_recorder import Call, FlightRecorder
from ._work import Work

if TYPE_CHECKING:
    from ..native._engine import FastPath, FastPathWork
    from ._process_group import ProcessGroup


# The numbers of `native/types.hpp` are the places in this list.
_NATIVE_DTYPES = (
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


DTYPE_NUMBERS = {dtype: number for number, dtype in enumerate(_NATIVE_DTYPES)}
"""What the native side calls the types whose tensors it reads."""


def fast_path_for(group: ProcessGroup) -> FastPath | None:
    """Make the short way of a group whose engine has one."""
    if not hasattr(group._engine, "shortcut") or not can_read_tensors():
        return None
    if group._agreement is not None:
        return None  # what is compared beforehand takes long anyway
    shortcut: FastPath = group._engine.shortcut(
        issue_lock=group._order,
        recorder=group._recorder,
        calls=group._recorder.calls,
        in_flight=group._detector.in_flight,
        # Not of the group itself: a call that is waited for outlives it, but does not keep it.
        make_work=functools.partial(_make_work, group._detector),
        timeout=group._timeout,
    )
    return shortcut


def _make_work(
    health: FailureDetector,
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
        work.mark_settled()
    return work


@functools.cache
def can_read_tensors() -> bool:
    """Tell the native side what all groups share, and whether it can read torch's tensors."""
    if native.engine is None:
        return False
    _add_work_attributes(native.engine.FastPathWork)
    exchange = getattr(Tensor, "__dlpack_c_exchange_api__", None)
    return exchange is not None and native.engine.configure_fast_path(
        call=Call,
        recorder=FlightRecorder,
        files=_flight_recorder.known_files,
        user_frame=_flight_recorder.user_frame,
        fault_points=vars(faultpoints),
        work=Work,
        tensors=(Tensor, torch.nn.Parameter),
        strided=torch.strided,
        dtypes=_NATIVE_DTYPES,
        exchange=exchange,
        max_in_flight=PRUNE_IN_FLIGHT_ABOVE,
    )


def _add_work_attributes(short: type[FastPathWork]) -> None:
    """Give the native class what else a `Work` has: the attributes of the one it grows into."""
    for name in set(dir(Work)) - set(dir(short)):
        if not name.startswith("__"):
            setattr(short, name, property(_forwarded(name)))


def _forwarded(name: str) -> Callable[[FastPathWork], Any]:
    return lambda short: getattr(short.as_work(), name)
