"""Stateless hooks (allreduce, no-op, 16-bit), `chain`, and hooks by name (`DDPCommHookType`)."""

import enum
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.futures import Future

from ...errors import InvalidArgument, InvalidType
from . import _power_sgd as power_sgd
from . import _quantization as quantization
from ._base import Hook, HookWrapper, average, completed, dense_buffer, group_of, hook_name, then


def allreduce_hook(process_group: dist.ProcessGroup | None, bucket: GradBucket) -> Future[Tensor]:
    """Average the gradients, all bits of them."""
    return average(group_of(process_group, bucket), bucket.buffer())


def noop_hook(_: Any, bucket: GradBucket) -> Future[Tensor]:
    """Leave every rank its own gradients: for local SGD, and to see what communication costs."""
    return completed(bucket.buffer())


def fp16_compress_hook(
    process_group: dist.ProcessGroup | None, bucket: GradBucket
) -> Future[Tensor]:
    """Average the gradients as float16: eleven bits, and nothing above 65504."""
    return fp16_compress_wrapper(allreduce_hook)(process_group, bucket)


def bf16_compress_hook(
    process_group: dist.ProcessGroup | None, bucket: GradBucket
) -> Future[Tensor]:
    """Average the gradients as bfloat16: eight bits, and the range of float32."""
    return bf16_compress_wrapper(allreduce_hook)(process_group, bucket)


def fp16_compress_wrapper(hook: Hook) -> Hook:
    """Have a hook see the gradients as float16; what comes of it is of the type they had."""
    return _compress_wrapper(hook, torch.float16)


def bf16_compress_wrapper(hook: Hook) -> Hook:
    """Have a hook see the gradients as bfloat16; what comes of it is of the type they had."""
    return _compress_wrapper(hook, torch.bfloat16)


def _compress_wrapper(hook: Hook, dtype: torch.dtype) -> Hook:
    def compressed(state: Any, bucket: GradBucket) -> Future[Tensor]:
        full = dense_buffer(bucket, name)
        bucket.set_buffer(full.to(dtype))

        def decompress(ended: Future[Tensor]) -> Tensor:
            result = ended.wait()
            bucket.set_buffer(full)  # whoever wrapped this looks at the gradients again
            return full.copy_(result)

        return then(hook(state, bucket), decompress, full.device)

    kind = {torch.float16: "fp16", torch.bfloat16: "bf16"}[dtype]
    name = f"{kind}_compress_wrapper({hook_name(hook)})"
    compressed.__name__ = compressed.__qualname__ = name
    return compressed


def chain(*parts: HookWrapper | Hook) -> Hook:
    """Put wrappers around a hook: ``chain(a, b, hook)`` is ``a(b(hook))``.

    The last one communicates, and there can be but one who does: its result is the mean, of which
    another would take the mean again. Gradients pass through the wrappers from left to right, the
    result from right to left. The state is the last one's; a wrapper that has one keeps it itself.
    """
    if not parts:
        raise InvalidArgument("a chain ends with a hook, and this one has no part at all")
    for part in parts:
        _check_callable(part, part)
    *wrappers, last = parts
    hook = cast("Hook", last)
    for wrapper in reversed(wrappers):
        hook = _wrapped(cast("HookWrapper", wrapper), hook)
    return hook


def _wrapped(wrapper: HookWrapper, hook: Hook) -> Hook:
    try:
        made = wrapper(hook)
    except TypeError as error:
        raise InvalidType(
            f"{hook_name(wrapper)} does not wrap a hook: what stands before the last part of a "
            f"chain takes a hook and returns one ({error})"
        ) from error
    _check_callable(made, wrapper)
    return made


def _check_callable(made: object, part: object) -> None:
    if not callable(made):
        told = f"{made!r} is none" if made is part else f"{hook_name(part)} returned {made!r}"
        raise InvalidType(f"a chain is made of hooks, and {told}")


def _register(hook: Hook, model: Any, state: Any) -> None:
    model.register_comm_hook(state, hook)


def _register_power_sgd(hook: Hook, rank: int, model: Any, state: Any) -> None:
    """Register with a state of its own; what comes as state is the group."""
    made = power_sgd.PowerSGDState(state, matrix_approximation_rank=rank)
    model.register_comm_hook(made, hook)


class DDPCommHookType(enum.Enum):
    """The hooks that need no more than a group; a value is called with ``model=, state=group``."""

    ALLREDUCE = enum.member(partial(_register, allreduce_hook))
    FP16_COMPRESS = enum.member(partial(_register, fp16_compress_hook))
    BF16_COMPRESS = enum.member(partial(_register, bf16_compress_hook))
    QUANTIZE_PER_TENSOR = enum.member(partial(_register, quantization.quantization_pertensor_hook))
    QUANTIZE_PER_CHANNEL = enum.member(
        partial(_register, quantization.quantization_perchannel_hook)
    )
    POWER_SGD = enum.member(partial(_register_power_sgd, power_sgd.powerSGD_hook, 1))
    POWER_SGD_RANK2 = enum.member(partial(_register_power_sgd, power_sgd.powerSGD_hook, 2))
    BATCHED_POWER_SGD = enum.member(
        partial(_register_power_sgd, power_sgd.batched_powerSGD_hook, 1)
    )
    BATCHED_POWER_SGD_RANK2 = enum.member(
        partial(_register_power_sgd, power_sgd.batched_powerSGD_hook, 2)
    )
    NOOP = enum.member(partial(_register, noop_hook))


def register_ddp_comm_hook(comm_hook_type: DDPCommHookType, model: Any, state: Any = None) -> None:
    """Register a hook with a module; `state` is the group, or None for the module's."""
    if not isinstance(comm_hook_type, DDPCommHookType):
        raise InvalidType(f"comm_hook_type is a DDPCommHookType, not {comm_hook_type!r}")
    comm_hook_type.value(model=model, state=state)
