"""What communication hooks share: group calls that end in futures, state, error feedback.

Calls of a group are matched by their order. So a hook makes all of its calls itself, on the
thread that runs it, where buckets come in the same order on every rank. A callback on a future
must never make a call.

State is kept by parameter name, because parameters change buckets after the first step, after a
restart, or when some are frozen. torch's buckets have no names; their state is kept by index.

Error feedback: what a lossy hook does not send is added to the gradient of the next step, so
that over time everything is sent (Seide et al. 2014; Karimireddy et al., arXiv:1901.09847).

Random numbers depend on seed, step and key only, so ranks agree and a checkpoint need not hold
them.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d as c10d
from torch._C._distributed_c10d import GradBucket
from torch.futures import Future, collect_all

from ...errors import InvalidArgument, InvalidState, InvalidType
from ...groups import _work
from ...groups._current_group import default_group
from .._comm_hook import Hook as Hook
from .._communicator import AnyWork, Communicator

# Hooks are annotated with torch's `GradBucket`, as torch's DDP requires; ours has the same methods.
HookWrapper = Callable[[Hook], Hook]
OptionalGroup = dist.ProcessGroup | None


def dense_buffer(bucket: GradBucket, hook: str) -> Tensor:
    """Return the buffer of a bucket; raise if it is sparse or complex."""
    buffer = bucket.buffer()
    if buffer.is_sparse or not buffer.is_floating_point():
        kind = "sparse " * buffer.is_sparse + str(buffer.dtype).removeprefix("torch.")
        raise InvalidArgument(
            f"{hook} compresses dense real gradients only, but bucket {bucket.index()} is {kind}. "
            "Use allreduce_hook for this module."
        )
    return buffer


def check_group(group: Any) -> None:
    if not isinstance(group, dist.ProcessGroup | None):
        raise InvalidType(f"process_group must be a ProcessGroup or None, got {group!r}")


def hook_group(given: OptionalGroup, bucket: Any = None) -> dist.ProcessGroup:
    """Return the given group, else the module's, else the current or torch's default group."""
    check_group(given)
    # torch's own bucket has no group.
    found: OptionalGroup = given or getattr(bucket, "group", None) or default_group()
    if found is None:
        raise InvalidState(
            "the hook has no group: pass process_group, or enter one with "
            "phalanx.groups.process_group(group)"
        )
    return found


def start_average(group: dist.ProcessGroup, tensor: Tensor) -> AnyWork:
    comm = Communicator(group, tensor.device)
    if tensor.element_size() > 2 and not tensor.is_sparse:
        return comm.mean(tensor)
    # A sum of 16-bit numbers may overflow, and engines only sum sparse tensors.
    return comm.sum(tensor.div_(comm.size))


def average(group: dist.ProcessGroup, tensor: Tensor) -> Future[Tensor]:
    return when_done([start_average(group, tensor)], lambda: tensor, tensor.device)


def start_gather(group: dist.ProcessGroup, tensor: Tensor) -> tuple[AnyWork, Tensor]:
    """Start to gather a flat tensor of the same size from every rank, one row per rank."""
    # The rows of ranks that have left the group stay zero.
    rows = tensor.new_zeros(group.size(), tensor.numel())
    return group.allgather([list(rows.unbind())], [tensor], c10d.AllgatherOptions()), rows


def completed(tensor: Tensor) -> Future[Tensor]:
    return _resolve(_future(tensor.device), lambda: tensor)


def when_done(
    calls: Sequence[AnyWork], finish: Callable[[], Tensor], device: torch.device
) -> Future[Tensor]:
    """Return a future of the result of `finish`, which runs when all calls have completed."""

    def finish_after(ended: Sequence[AnyWork | Future[Any]]) -> Tensor:
        for each in ended:
            each.wait()  # raises its error
        return finish()

    if all(call.is_completed() for call in calls):
        # A future of the engine may cost a thread.
        return _resolve(_future(device), lambda: finish_after(calls))
    # Wait for the futures, not the calls: in a callback, waiting for a call may never return.
    parts = [call.get_future() for call in calls]
    whole: Future[Any] = parts[0] if len(parts) == 1 else collect_all(parts)
    return then(whole, lambda _: finish_after(parts), device)


def then(
    future: Future[Any], finish: Callable[[Future[Any]], Tensor], device: torch.device
) -> Future[Tensor]:
    """Return a future of what `finish` makes of a completed one."""
    # Unlike torch's method of this name, it preserves the type of an error.
    result = _future(device)
    future.add_done_callback(
        lambda ended: _resolve(result, lambda: finish(ended))  # type: ignore[arg-type]
    )
    return result


def _future(device: torch.device) -> Future[Tensor]:
    return Future() if device.type == "cpu" else Future(devices=[device])


def _resolve(future: Future[Tensor], make: Callable[[], Tensor]) -> Future[Tensor]:
    """Complete a future with what a function returns or raises."""
    try:
        with torch.no_grad():  # this may be any thread
            value = make()
    except Exception as error:  # noqa: BLE001 - raised where the future is waited for
        _work.fail_future(future, error)
        # The traceback refers to this frame and so to the future: a cycle that is never collected.
        error.__traceback__ = None
    else:
        future.set_result(value)  # runs callbacks, whose errors are not ours
    return future


MemoryKey = int | str  # the name of a parameter, or the index of a bucket without names
HookMemory = dict[MemoryKey, Tensor]


def names_of(bucket: Any) -> Sequence[str] | None:
    return getattr(bucket, "names", None)


def bucket_key(bucket: Any) -> MemoryKey:
    """Return the key of what belongs to these parameters in this order only."""
    names = names_of(bucket)
    return bucket.index() if names is None else "\n".join(names)


def parts_by_name(bucket: Any, flat: Tensor) -> dict[MemoryKey, Tensor]:
    """Return a view for each parameter of a tensor with the layout of the bucket's buffer."""
    names = names_of(bucket)
    if names is None:
        return {bucket.index(): flat}
    start = flat.storage_offset() - bucket.buffer().storage_offset()
    return {
        name: flat.as_strided(like.shape, like.stride(), start + like.storage_offset())
        for name, like in zip(names, bucket.gradients(), strict=True)
    }


def known_parts(memory: HookMemory, parts: Mapping[MemoryKey, Tensor]) -> dict[MemoryKey, Tensor]:
    """Return what the memory has for some parts, where the shape matches."""
    found = {key: memory[key].to(part.device) for key, part in parts.items() if key in memory}
    return {key: known for key, known in found.items() if known.shape == parts[key].shape}


def add_residuals(held: HookMemory, gradients: Mapping[MemoryKey, Tensor]) -> None:
    """Add residuals to gradients in place; drop those of another shape."""
    known = known_parts(held, gradients)
    if known:
        torch._foreach_add_([gradients[key] for key in known], list(known.values()))
    for key in gradients.keys() - known.keys():
        held.pop(key, None)


def keep_residuals(held: HookMemory, rest: Tensor, parts: Mapping[MemoryKey, Tensor]) -> None:
    """Keep what is not sent of a bucket, by parameter, unless it is not finite."""
    # It would stay forever. A GradScaler skips the step that caused it.
    if is_finite(rest):
        held.update(parts)


def is_finite(tensor: Tensor) -> bool:
    """Whether all elements are finite, by their sum, which takes a fiftieth of the time."""
    wide = torch.promote_types(tensor.dtype, torch.float32)
    return bool(tensor.sum(dtype=wide).isfinite())


def shared_generator(seed: int, step: int, key: int | str) -> torch.Generator:
    mixed = zlib.crc32(f"{seed} {step} {key}".encode())
    return torch.Generator().manual_seed(mixed)  # on the CPU, whatever the device


@dataclass(eq=False, repr=False)
class HookState:
    """A group, the number of steps, and tensors by parameter or bucket.

    Each rank saves and loads its own state. The group is not saved: a loaded state uses the group
    given to it, or the module's.
    """

    counter_fields: ClassVar[tuple[str, ...]] = ("iter",)
    """Attributes with numbers that change in training."""
    memory_fields: ClassVar[tuple[str, ...]] = ()
    """Attributes with tensors by parameter name, or by bucket."""

    process_group: OptionalGroup
    """None for the group of the module."""
    iter: int = field(default=0, init=False)
    """The number of steps so far."""
    _seen: set[MemoryKey] = field(default_factory=set, init=False)

    def __post_init__(self) -> None:
        check_group(self.process_group)
        for name in self.memory_fields:
            setattr(self, name, {})

    def maybe_increase_iter(self, bucket: GradBucket) -> None:
        """Count a step at its last bucket; drop the memory of parameters in no bucket of it."""
        self._seen |= {bucket_key(bucket), *(names_of(bucket) or ())}
        if bucket.is_last():
            self.iter += 1
            for name in self.memory_fields:
                memory: HookMemory = getattr(self, name)
                for gone in memory.keys() - self._seen:
                    del memory[gone]
            self._seen = set()

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of this rank's counters and tensors; nothing needs pickle."""
        counters = {name: getattr(self, name) for name in self.counter_fields}
        return counters | {name: _cloned(getattr(self, name)) for name in self.memory_fields}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned on the same rank."""
        expected = {*self.counter_fields, *self.memory_fields}
        if set(state_dict) != expected:
            kind, given = type(self).__name__, sorted(state_dict)
            raise InvalidArgument(f"state_dict of {kind} must have {sorted(expected)}, got {given}")
        for name in self.counter_fields:
            setattr(self, name, state_dict[name])
        for name in self.memory_fields:
            setattr(self, name, _cloned(state_dict[name]))

    def __getstate__(self) -> dict[str, Any]:
        # A view would be pickled with the whole storage.
        copies = {name: _cloned(getattr(self, name)) for name in self.memory_fields}
        return {**vars(self), **copies, "process_group": None, "_seen": set()}


def _cloned(memory: HookMemory) -> HookMemory:
    return {key: tensor.clone() for key, tensor in memory.items()}


def begin_step(state: Any, kind: type[HookState], bucket: GradBucket, hook: str) -> int:
    """Return the number of the step that a bucket belongs to; count it at its last bucket."""
    if not isinstance(state, kind):
        raise InvalidType(f"the state of {hook} must be a {kind.__name__}, got {state!r}")
    step = state.iter
    state.maybe_increase_iter(bucket)
    return step


def check_count(name: str, value: Any, *, least: int = 0) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise InvalidArgument(f"{name} must be an integer of at least {least}, got {value!r}")
    return value
