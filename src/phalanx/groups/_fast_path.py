"""The native fast path for plain sums, means and barriers.

The extension (`native/fast_path.hpp`) does what `Issuer.issue` and `Work.wait` do for a plain call
that ends soon. Everything else takes the slow path in Python. This module passes the extension
the parts of a group that it needs and turns its handle into a `Work` on demand.

The extension reads slots of `Call` and `FlightRecorder` by name; renaming one of them means
renaming it in `native/fast_path.cpp` too.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .. import _faultpoints as faultpoints
from .. import native
from . import _call_site, _profiler
from ._engine import Engine
from ._failure_detector import PRUNE_IN_FLIGHT_ABOVE, FailureDetector
from ._flight_recorder import Call, FlightRecorder
from ._work import Work
from .backends.shm import DTYPES

if TYPE_CHECKING:
    from ..native._engine import FastPath, FastPathWork
    from ._issuer import Issuer


def make_fast_path(issuer: Issuer) -> FastPath | None:
    if not hasattr(issuer.engine, "make_fast_path") or not configure_fast_path():
        return None
    if issuer.checks_before_call:
        return None  # the comparison dominates the cost of a call
    fast_path: FastPath = issuer.engine.make_fast_path(
        issue_lock=issuer.issue_lock,
        recorder=issuer.recorder,
        calls=issuer.recorder.calls,
        in_flight=issuer.detector.in_flight,
        # Bound to the detector: a call that is waited for outlives the group without keeping it.
        make_work=functools.partial(_make_work, issuer.detector),
        timeout=issuer.timeout,
    )
    return fast_path


def _make_work(
    detector: FailureDetector,
    engine: Engine,
    call: Call,
    timeout: float,
    ticket: int,
    tensor: Tensor | None,
    settled: bool,
) -> Work:
    """Make the `Work` that a call would have had on the slow path."""
    tensors = [] if tensor is None else [tensor]
    work = Work(detector, call, timeout, engine.work_for_ticket(ticket, tensors), tensors)
    work._settled = settled
    return work


@functools.cache
def configure_fast_path() -> bool:
    """Set up the extension for all groups; return whether it can read torch's tensors."""
    if native.engine is None:
        return False
    # The other attributes of `Work` are forwarded to the `Work` that a native handle turns into.
    handle = native.engine.FastPathWork
    for name in set(dir(Work)) - set(dir(handle)):
        if not name.startswith("__"):
            setattr(handle, name, property(functools.partial(_forward, name)))
    exchange = getattr(Tensor, "__dlpack_c_exchange_api__", None)
    return exchange is not None and native.engine.configure_fast_path(
        call=Call,
        recorder=FlightRecorder,
        files=_call_site.known_files,
        user_frame=_call_site.user_frame,
        fault_points=vars(faultpoints),
        profiler_flags=_profiler.flags,
        profiler_flag=_profiler.ENABLED,
        work=Work,
        tensors=(Tensor, torch.nn.Parameter),
        strided=torch.strided,
        dtypes=tuple(DTYPES),
        exchange=exchange,
        max_in_flight=PRUNE_IN_FLIGHT_ABOVE,
    )


def _forward(name: str, work: FastPathWork) -> Any:
    return getattr(work.as_work(), name)
