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
from ._base import Hook, HookWrapper, average, completed, dense_buffer, hook_group, hook_name, then


def allreduce_hook(process_group: dist.ProcessGroup | None, bucket: GradBucket) -> Future[Tensor]:
    """Average the gradients without compression."""
    return average(hook_group(process_group, bucket), bucket.buffer())


def noop_hook(_: Any, bucket: GradBucket) -> Future[Tensor]:
    """Keep each rank's own gradients, for local SGD or to measure communication."""
    return completed(bucket.buffer())


def fp16_compress_hook(
    process_group: dist.ProcessGroup | None, bucket: GradBucket
) -> Future[Tensor]:
    """Average the gradients as float16 (11 significant bits, at most 65504)."""
    return fp16_compress_wrapper(allreduce_hook)(process_group, bucket)


def bf16_compress_hook(
    process_group: dist.ProcessGroup | None, bucket: GradBucket
) -> Future[Tensor]:
    """Average the gradients as bfloat16 (8 significant bits, the range of float32)."""
    return bf16_compress_wrapper(allreduce_hook)(process_group, bucket)


def fp16_compress_wrapper(hook: Hook) -> Hook:
    """Run a hook on gradients cast to float16, and cast its result back."""
    return _compress_wrapper(hook, torch.float16)


def bf16_compress_wrapper(hook: Hook) -> Hook:
    """Run a hook on gradients cast to bfloat16, and cast its result back."""
    return _compress_wrapper(hook, torch.bfloat16)


def _compress_wrapper(hook: Hook, dtype: torch.dtype) -> Hook:
    def compressed(state: Any, bucket: GradBucket) -> Future[Tensor]:
        full = dense_buffer(bucket, name)
        bucket.set_buffer(full.to(dtype))

        def decompress(ended: Future[Tensor]) -> Tensor:
            result = ended.wait()
            bucket.set_buffer(full)  # outer wrappers read it again
            return full.copy_(result)

        return then(hook(state, bucket), decompress, full.device)

    kind = {torch.float16: "fp16", torch.bfloat16: "bf16"}[dtype]
    name = f"{kind}_compress_wrapper({hook_name(hook)})"
    compressed.__name__ = compressed.__qualname__ = name
    return compressed


def chain(*parts: HookWrapper | Hook) -> Hook:
    """Put wrappers around a hook: ``chain(a, b, hook)`` is ``a(b(hook))``.

    Only the last part communicates. Gradients pass through the wrappers from left to right, the
    result from right to left. The state is that of the last part; wrappers hold their own.
    """
    if not parts:
        raise InvalidArgument("chain needs at least one hook")
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
            f"{hook_name(wrapper)} is not a hook wrapper: all parts of a chain but the last take a "
            f"hook and return one ({error})"
        ) from error
    _check_callable(made, wrapper)
    return made


def _check_callable(made: object, part: object) -> None:
    if not callable(made):
        source = "" if made is part else f" from {hook_name(part)}"
        raise InvalidType(f"parts of a chain must be callable, got {made!r}{source}")


def _register(hook: Hook, model: Any, state: Any) -> None:
    model.register_comm_hook(state, hook)


def _register_power_sgd(hook: Hook, rank: int, model: Any, state: Any) -> None:
    # `state` is the group.
    hook_state = power_sgd.PowerSGDState(state, matrix_approximation_rank=rank)
    model.register_comm_hook(hook_state, hook)


class DDPCommHookType(enum.Enum):
    """Hooks that need only a group; a value is called with ``model=, state=group``."""

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
        raise InvalidType(f"comm_hook_type must be a DDPCommHookType, got {comm_hook_type!r}")
    comm_hook_type.value(model=model, state=state)
