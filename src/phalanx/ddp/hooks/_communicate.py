"""How hooks communicate: any group, any engine, and a future at the end.

Calls of a group are paired by their order. So a hook makes all its calls itself, on the thread that
runs it, where buckets come in the same order on every rank; what hangs on a future runs when it
likes, and never makes a call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d as c10d
from torch.futures import Future, collect_all

from ...errors import InvalidState, InvalidType
from ...groups import ProcessGroup, _work
from .._channel import Channel, Handle

__all__ = [
    "Handle",
    "average",
    "check_group",
    "completed",
    "gather",
    "group_of",
    "new_subgroup",
    "start_average",
    "then",
    "when_done",
]

_HALVES = (torch.float16, torch.bfloat16)


def check_group(group: Any) -> dist.ProcessGroup | None:
    """Refuse what is not a group, where it is given and not in the middle of backward."""
    if group is None or isinstance(group, dist.ProcessGroup):
        return group
    raise InvalidType(f"process_group is a ProcessGroup or None, not {group!r}")


def group_of(given: dist.ProcessGroup | None, bucket: Any = None) -> dist.ProcessGroup:
    """Choose the group: the one that was given, else the module's, else torch's default group."""
    if given is not None:
        return cast("dist.ProcessGroup", check_group(given))
    # Torch's own bucket does not know its group.
    found: dist.ProcessGroup | None = getattr(bucket, "group", None)
    found = found or dist.group.WORLD
    if found is None:
        raise InvalidState(
            "there is no group to communicate in: pass process_group, or call "
            "torch.distributed.init_process_group first"
        )
    return found


def new_subgroup(**options: Any) -> dist.ProcessGroup:
    """Have torch divide a group of its own into equal parts, and return this rank's."""
    mine, _ = dist.new_subgroups(**options)  # type: ignore[no-untyped-call]
    return cast("dist.ProcessGroup", mine)


def start_average(group: dist.ProcessGroup, tensor: Tensor) -> Handle:
    """Begin to replace a tensor by its mean over the ranks."""
    channel = Channel(group, tensor.device)
    # A sum of halves may be too large for a half; not all groups and layouts have a mean.
    if isinstance(group, ProcessGroup) and not (tensor.dtype in _HALVES or tensor.is_sparse):
        return channel.mean(tensor)
    return channel.sum(tensor.div_(channel.size))


def average(group: dist.ProcessGroup, tensor: Tensor) -> Future[Tensor]:
    """Replace a tensor by its mean over the ranks."""
    return when_done([start_average(group, tensor)], lambda: tensor, tensor.device)


def gather(group: dist.ProcessGroup, tensor: Tensor) -> tuple[Handle, Tensor]:
    """Begin to collect a flat tensor of the same size from every rank, in rows by rank."""
    # Zeros: whoever has left the group sends nothing, and its row stays as it is.
    rows = tensor.new_zeros(group.size(), tensor.numel())
    return group.allgather([list(rows.unbind())], [tensor], c10d.AllgatherOptions()), rows


def completed(tensor: Tensor) -> Future[Tensor]:
    """Wrap a tensor that needs no communication."""
    return _settled(_future(tensor.device), lambda: tensor)


def when_done(
    calls: Sequence[Handle], finish: Callable[[], Tensor], device: torch.device
) -> Future[Tensor]:
    """Return a future of what `finish` makes when all calls have ended."""
    if all(call.is_completed() for call in calls):
        # A future of the engine's may cost a thread.
        return _settled(_future(device), lambda: _after(calls, finish))
    # Not the calls, once their futures have ended: to wait for one there may be for ever.
    parts = [call.get_future() for call in calls]
    whole: Future[Any] = parts[0] if len(parts) == 1 else collect_all(parts)
    return then(whole, lambda _: _after(parts, finish), device)


def _after(ended: Sequence[Handle | Future[Any]], finish: Callable[[], Tensor]) -> Tensor:
    for each in ended:
        each.wait()  # raises what it ended with
    return finish()


def then(
    future: Future[Any], finish: Callable[[Future[Any]], Tensor], device: torch.device
) -> Future[Tensor]:
    """Return a future of what `finish` makes of one that has ended.

    As torch's method of this name, but the kind of error that either ends with is kept.
    """
    result = _future(device)

    def settle(ended: Future[Any]) -> None:
        _settled(result, lambda: finish(ended))

    future.add_done_callback(settle)
    return result


def _future(device: torch.device) -> Future[Tensor]:
    return Future() if device.type == "cpu" else Future(devices=[device])


def _settled(future: Future[Tensor], make: Callable[[], Tensor]) -> Future[Tensor]:
    """End a future with what a function returns or raises."""
    try:
        with torch.no_grad():  # the thread may be anybody's
            value = make()
    except Exception as error:  # noqa: BLE001 - whoever waits for the future gets it
        _work.fail_future(future, error)
        # It leads to this frame, and that to the future which holds it, where nobody collects.
        error.__traceback__ = None
    else:
        future.set_result(value)  # runs what hangs on it, whose errors are not ours
    return future
