"""Stateless hooks (allreduce, no-op, 16-bit), `chain`, and hooks by name (`DDPCommHookType`)."""

import enum
from collections.abc import Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.futures import Future

from ...errors import InvalidArgument, InvalidType
from .._comm_hook import hook_name
from . import _base as base
from ._power_sgd import PowerSGDState, batched_powerSGD_hook, powerSGD_hook
from ._quantization import quantization_perchannel_hook, quantization_pertensor_hook


def allreduce_hook(process_group: base.OptionalGroup, bucket: GradBucket) -> Future[Tensor]:
    """Average the gradients without compression."""
    return base.average(base.hook_group(process_group, bucket), bucket.buffer())


def noop_hook(_: Any, bucket: GradBucket) -> Future[Tensor]:
    """Keep each rank's own gradients, for local SGD or to measure communication."""
    return base.completed(bucket.buffer())


def fp16_compress_hook(process_group: base.OptionalGroup, bucket: GradBucket) -> Future[Tensor]:
    """Average the gradients as float16 (11 significant bits, at most 65504)."""
    return fp16_compress_wrapper(allreduce_hook)(process_group, bucket)


def bf16_compress_hook(process_group: base.OptionalGroup, bucket: GradBucket) -> Future[Tensor]:
    """Average the gradients as bfloat16 (8 significant bits, the range of float32)."""
    return bf16_compress_wrapper(allreduce_hook)(process_group, bucket)


def fp16_compress_wrapper(hook: base.Hook) -> base.Hook:
    """Run a hook on gradients cast to float16, and cast its result back."""
    return _compress_wrapper(hook, "fp16", torch.float16)


def bf16_compress_wrapper(hook: base.Hook) -> base.Hook:
    """Run a hook on gradients cast to bfloat16, and cast its result back."""
    return _compress_wrapper(hook, "bf16", torch.bfloat16)


def _compress_wrapper(hook: base.Hook, kind: str, dtype: torch.dtype) -> base.Hook:
    name = f"{kind}_compress_wrapper({hook_name(hook)})"

    def compressed(state: Any, bucket: GradBucket) -> Future[Tensor]:
        full = base.dense_buffer(bucket, name)
        bucket.set_buffer(full.to(dtype))

        def decompress(ended: Future[Tensor]) -> Tensor:
            result = ended.wait()
            bucket.set_buffer(full)  # outer wrappers read it again
            return full.copy_(result)

        return base.then(hook(state, bucket), decompress, full.device)

    compressed.__name__ = compressed.__qualname__ = name
    return compressed


def chain(*parts: base.HookWrapper | base.Hook) -> base.Hook:
    """Put wrappers around a hook: ``chain(a, b, hook)`` is ``a(b(hook))``.

    Only the last part communicates. Gradients pass through the wrappers from left to right, the
    result from right to left. The state is that of the last part; wrappers hold their own.
    """
    if not parts:
        raise InvalidArgument("chain needs at least one hook")
    for part in parts:
        if not callable(part):
            raise InvalidType(f"parts of a chain must be callable, got {part!r}")
    *wrappers, hook = cast("Sequence[Any]", parts)
    for wrapper in reversed(wrappers):
        try:
            hook = wrapper(hook)
        except TypeError as error:
            raise InvalidType(
                f"{hook_name(wrapper)} is not a hook wrapper: all parts of a chain but the last "
                f"take a hook and return one ({error})"
            ) from error
        if not callable(hook):
            raise InvalidType(f"{hook_name(wrapper)} must return a hook, got {hook!r}")
    return cast("base.Hook", hook)


def _register(hook: base.Hook, matrix_rank: int | None, model: Any, state: Any) -> None:
    """Register a hook whose state is a group; with a matrix rank, PowerSGD in that group."""
    if matrix_rank is not None:
        state = PowerSGDState(state, matrix_approximation_rank=matrix_rank)
    model.register_comm_hook(state, hook)


def _member(hook: base.Hook, matrix_rank: int | None = None) -> Any:
    return enum.member(partial(_register, hook, matrix_rank))


class DDPCommHookType(enum.Enum):
    """Hooks that need only a group; a value is called with ``model=, state=group``."""

    ALLREDUCE = _member(allreduce_hook)
    FP16_COMPRESS = _member(fp16_compress_hook)
    BF16_COMPRESS = _member(bf16_compress_hook)
    QUANTIZE_PER_TENSOR = _member(quantization_pertensor_hook)
    QUANTIZE_PER_CHANNEL = _member(quantization_perchannel_hook)
    POWER_SGD = _member(powerSGD_hook, matrix_rank=1)
    POWER_SGD_RANK2 = _member(powerSGD_hook, matrix_rank=2)
    BATCHED_POWER_SGD = _member(batched_powerSGD_hook, matrix_rank=1)
    BATCHED_POWER_SGD_RANK2 = _member(batched_powerSGD_hook, matrix_rank=2)
    NOOP = _member(noop_hook)


def register_ddp_comm_hook(comm_hook_type: DDPCommHookType, model: Any, state: Any = None) -> None:
    """Register a hook with a module; `state` is the group, or None for the module's."""
    if not isinstance(comm_hook_type, DDPCommHookType):
        raise InvalidType(f"comm_hook_type must be a DDPCommHookType, got {comm_hook_type!r}")
    comm_hook_type.value(model=model, state=state)
