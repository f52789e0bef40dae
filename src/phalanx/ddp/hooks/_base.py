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

import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d as c10d
from torch._C._distributed_c10d import GradBucket
from torch.futures import Future, collect_all

from ...errors import InvalidArgument, InvalidState, InvalidType
from ...groups import ProcessGroup, _work
from .._communicator import AnyWork, Communicator

Hook = Callable[[Any, Any], Future[Tensor]]
"""Called with its state and a bucket; returns a future of the bucket's mean.

Hooks say that a bucket is torch's `GradBucket`, for torch's DDP insists on it; ours has the same
methods.
"""
HookWrapper = Callable[[Hook], Hook]
"""Makes of a hook another one, which does something before and after it."""


def dense_buffer(bucket: GradBucket, hook: str) -> Tensor:
    """Return the buffer of a bucket that can be compressed; refuse sparse and complex ones."""
    buffer = bucket.buffer()
    if buffer.is_sparse or not buffer.is_floating_point():
        kind = str(buffer.dtype).removeprefix("torch.")
        told = f"sparse {kind}" if buffer.is_sparse else kind
        raise InvalidArgument(
            f"{hook} compresses dense gradients of real numbers, and bucket {bucket.index()} "
            f"is {told}: use allreduce_hook for a module with such parameters"
        )
    return buffer


def hook_name(hook: Any) -> str:
    """Tell what a hook is called."""
    return str(getattr(hook, "__name__", None) or repr(hook))


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


def start_average(group: dist.ProcessGroup, tensor: Tensor) -> AnyWork:
    """Begin to replace a tensor by its mean over the ranks."""
    channel = Communicator(group, tensor.device)
    # A sum of halves may be too large for a half; not all groups and layouts have a mean.
    if isinstance(group, ProcessGroup) and not (tensor.dtype in _HALVES or tensor.is_sparse):
        return channel.mean(tensor)
    return channel.sum(tensor.div_(channel.size))


def average(group: dist.ProcessGroup, tensor: Tensor) -> Future[Tensor]:
    """Replace a tensor by its mean over the ranks."""
    return when_done([start_average(group, tensor)], lambda: tensor, tensor.device)


def gather(group: dist.ProcessGroup, tensor: Tensor) -> tuple[AnyWork, Tensor]:
    """Begin to collect a flat tensor of the same size from every rank, in rows by rank."""
    # Zeros: whoever has left the group sends nothing, and its row stays as it is.
    rows = tensor.new_zeros(group.size(), tensor.numel())
    return group.allgather([list(rows.unbind())], [tensor], c10d.AllgatherOptions()), rows


def completed(tensor: Tensor) -> Future[Tensor]:
    """Wrap a tensor that needs no communication."""
    return _resolve(_future(tensor.device), lambda: tensor)


def when_done(
    calls: Sequence[AnyWork], finish: Callable[[], Tensor], device: torch.device
) -> Future[Tensor]:
    """Return a future of what `finish` makes when all calls have ended."""
    if all(call.is_completed() for call in calls):
        # A future of the engine's may cost a thread.
        return _resolve(_future(device), lambda: _after(calls, finish))
    # Not the calls, once their futures have ended: to wait for one there may be for ever.
    parts = [call.get_future() for call in calls]
    whole: Future[Any] = parts[0] if len(parts) == 1 else collect_all(parts)
    return then(whole, lambda _: _after(parts, finish), device)


def _after(ended: Sequence[AnyWork | Future[Any]], finish: Callable[[], Tensor]) -> Tensor:
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
        _resolve(result, lambda: finish(ended))

    future.add_done_callback(settle)
    return result


def _future(device: torch.device) -> Future[Tensor]:
    return Future() if device.type == "cpu" else Future(devices=[device])


def _resolve(future: Future[Tensor], make: Callable[[], Tensor]) -> Future[Tensor]:
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


MemoryKey = int | str
"""The name of a parameter, or the number of a bucket whose parameters have none."""
HookMemory = dict[MemoryKey, Tensor]


def names_of(bucket: Any) -> Sequence[str] | None:
    """Tell what the parameters of a bucket are called, if that is known."""
    names: Sequence[str] | None = getattr(bucket, "names", None)
    return names


def bucket_key(bucket: Any) -> MemoryKey:
    """Tell under what to remember that which belongs to these parameters in this order only."""
    names = names_of(bucket)
    return bucket.index() if names is None else "\n".join(names)


def parts_by_name(bucket: Any, flat: Tensor) -> dict[MemoryKey, Tensor]:
    """Show what belongs to each parameter in a tensor that lies as the bucket's buffer does."""
    names = names_of(bucket)
    if names is None:
        return {bucket.index(): flat}
    start = flat.storage_offset() - bucket.buffer().storage_offset()
    return {
        name: flat.as_strided(like.shape, like.stride(), start + like.storage_offset())
        for name, like in zip(names, bucket.gradients(), strict=True)
    }


def known_parts(memory: HookMemory, parts: Mapping[MemoryKey, Tensor]) -> dict[MemoryKey, Tensor]:
    """Recall what is remembered of some parts, where it has their shape."""
    found = {key: memory[key].to(part.device) for key, part in parts.items() if key in memory}
    return {key: known for key, known in found.items() if known.shape == parts[key].shape}


def add_residuals(held: HookMemory, gradients: Mapping[MemoryKey, Tensor]) -> None:
    """Add to gradients, in place, what was held back of them; what does not fit is forgotten."""
    known = known_parts(held, gradients)
    if known:
        torch._foreach_add_([gradients[key] for key in known], list(known.values()))
    for key in gradients.keys() - known.keys():
        held.pop(key, None)


def keep_residuals(held: HookMemory, rest: Tensor, parts: Mapping[MemoryKey, Tensor]) -> None:
    """Hold back what is not sent of a bucket: the rest, by its parts.

    What is not finite would never leave again. A step with that in it is skipped by those who scale
    their losses, and here it is as if it had not been.
    """
    if is_finite(rest):
        held.update(parts)


def is_finite(tensor: Tensor) -> bool:
    """Tell whether all elements are finite, by their sum: in a fiftieth of the time."""
    wide = torch.promote_types(tensor.dtype, torch.float32)
    return bool(tensor.sum(dtype=wide).isfinite())


_SHUFFLE_MAX = 1000
"""From how many on a shuffle of all costs more than to go through them."""


def shared_generator(seed: int, step: int, key: int | str) -> torch.Generator:
    """Make a generator that depends on nothing but the seed, the step and what it is for."""
    mixed = zlib.crc32(f"{seed} {step} {key}".encode())
    return torch.Generator().manual_seed(mixed)  # numbers are drawn on the CPU for every device


def draw(count: int, among: int, generator: torch.Generator) -> Tensor:
    """Draw different whole numbers from 0 on, every choice of them as likely as any other."""
    if 20 * count < among:
        # Few among many: some are drawn twice, which costs less than to shuffle all.
        some = torch.randint(among, (count + count // 2 + 16,), generator=generator)
        different: Tensor = torch.unique(some)
        if len(different) >= count:
            return different[torch.randperm(len(different), generator=generator)[:count]]
    elif among > _SHUFFLE_MAX:
        # Each by itself is taken or not; of those who are too many, some are dropped again.
        likely = count / among
        wanted = count + 6 * math.sqrt(count * (1 - likely)) + 1
        taken = torch.rand(among, generator=generator) < wanted / among
        places = taken.nonzero().view(-1)
        if len(places) >= count:
            places[draw(len(places) - count, len(places), generator)] = -1
            return places[places >= 0]
    return torch.randperm(among, generator=generator)[:count]


NAMED_SUFFIX = "_by_name"
"""Follows the name of a memory in a saved state."""


class HookState:
    """A group, the number of steps, and tensors that belong to parameters or buckets.

    Ranks remember different things: each saves and loads its own. A group cannot be saved; where
    a state is loaded, the hook uses the one that was given there, or the module's.
    """

    counts: ClassVar[tuple[str, ...]] = ("iter",)
    """Attributes that hold a number which changes in training."""
    memory_fields: ClassVar[tuple[str, ...]] = ()
    """Attributes that hold tensors by the names of parameters, or by bucket."""

    def __init__(self, process_group: dist.ProcessGroup | None) -> None:
        self.process_group = check_group(process_group)
        """Where the hook communicates; None for the group of the module."""
        self.iter = 0
        """How many steps there have been."""
        self._seen: set[MemoryKey] = set()
        for name in self.memory_fields:
            setattr(self, name, {})

    def maybe_increase_iter(self, bucket: GradBucket) -> None:
        """Count a step when its last bucket comes, and forget what was in no bucket of it."""
        self._seen |= {bucket_key(bucket), *(names_of(bucket) or ())}
        if bucket.is_last():
            self.iter += 1
            for name in self.memory_fields:
                memory: HookMemory = getattr(self, name)
                for gone in memory.keys() - self._seen:
                    del memory[gone]
            self._seen = set()

    def state_dict(self) -> dict[str, Any]:
        """Copy what this rank remembers: numbers, and tensors by name; nothing needs pickle."""
        saved: dict[str, Any] = {name: getattr(self, name) for name in self.counts}
        for name in self.memory_fields:
            memory: HookMemory = getattr(self, name)
            # Apart, for a parameter may be called 0.
            saved[name] = {str(k): t.clone() for k, t in memory.items() if isinstance(k, int)}
            saved[name + NAMED_SUFFIX] = {
                k: t.clone() for k, t in memory.items() if isinstance(k, str)
            }
        return saved

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from what was saved, on the same rank."""
        expected = {*self.counts, *self.memory_fields}
        optional = {name + NAMED_SUFFIX for name in self.memory_fields}  # older states have none
        if set(state_dict) - optional != expected:
            raise InvalidArgument(
                f"the state of a {type(self).__name__} has {sorted(expected)}, and what is to be "
                f"loaded has {sorted(state_dict)}"
            )
        for name in self.counts:
            setattr(self, name, state_dict[name])
        for name in self.memory_fields:
            tensors: Mapping[str, Tensor] = state_dict[name]
            named: Mapping[str, Tensor] = state_dict.get(name + NAMED_SUFFIX, {})
            memory: HookMemory = {int(index): tensor.clone() for index, tensor in tensors.items()}
            setattr(self, name, memory | {key: tensor.clone() for key, tensor in named.items()})

    def __getstate__(self) -> dict[str, Any]:
        # Tensors that are parts of one would each be pickled with the whole.
        copies = {name: _cloned(getattr(self, name)) for name in self.memory_fields}
        state = vars(self) | copies
        return {name: state[name] for name in state if name not in ("process_group", "_seen")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, process_group=None, _seen=set())


def _cloned(memory: HookMemory) -> HookMemory:
    return {key: tensor.clone() for key, tensor in memory.items()}


def check_count(name: str, value: Any, *, least: int = 0) -> int:
    """Refuse what is not a whole number, or too small a one."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise InvalidArgument(f"{name} is a whole number, {least} or more, not {value!r}")
    return value


def check_state(state: Any, kind: type[HookState], hook: str) -> None:
    """Refuse a state that is another hook's, or a group."""
    if not isinstance(state, kind):
        raise InvalidType(f"the state of {hook} is a {kind.__name__}, not {state!r}")
