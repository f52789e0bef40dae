"""Hooks by name, for whoever chooses one in a configuration."""

from __future__ import annotations

import enum
from functools import partial
from typing import Any

from ...errors import InvalidType
from . import _allreduce as allreduce
from . import _half as half
from . import _power_sgd as power_sgd
from . import _quantization as quantization
from ._hook import Hook

__all__ = ["DDPCommHookType", "register_ddp_comm_hook"]


def _register(hook: Hook, model: Any, state: Any) -> None:
    model.register_comm_hook(state, hook)


def _register_power_sgd(hook: Hook, rank: int, model: Any, state: Any) -> None:
    """Register with a state of its own; what comes as state is the group."""
    made = power_sgd.PowerSGDState(state, matrix_approximation_rank=rank)
    model.register_comm_hook(made, hook)


class DDPCommHookType(enum.Enum):
    """The hooks that need no more than a group; a value is called with ``model=, state=group``."""

    ALLREDUCE = enum.member(partial(_register, allreduce.allreduce_hook))
    FP16_COMPRESS = enum.member(partial(_register, half.fp16_compress_hook))
    BF16_COMPRESS = enum.member(partial(_register, half.bf16_compress_hook))
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
    NOOP = enum.member(partial(_register, allreduce.noop_hook))


def register_ddp_comm_hook(comm_hook_type: DDPCommHookType, model: Any, state: Any = None) -> None:
    """Register a hook with a module; `state` is the group, or None for the module's."""
    if not isinstance(comm_hook_type, DDPCommHookType):
        raise InvalidType(f"comm_hook_type is a DDPCommHookType, not {comm_hook_type!r}")
    comm_hook_type.value(model=model, state=state)
