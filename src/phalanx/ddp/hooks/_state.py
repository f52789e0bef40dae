"""What a hook remembers from step to step, and how that is saved."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch.distributed as dist
from torch import Tensor

from ...errors import InvalidArgument, InvalidType
from ._communicate import check_group
from ._hook import GradBucket
from ._memory import Key, Memory, bucket_key, names_of

__all__ = ["HookState", "check_count", "check_state"]

NAMED = "_by_name"
"""Follows the name of a memory in a saved state."""


class HookState:
    """A group, the number of steps, and tensors that belong to parameters or buckets.

    Ranks remember different things: each saves and loads its own. A group cannot be saved; where
    a state is loaded, the hook uses the one that was given there, or the module's.
    """

    counts: ClassVar[tuple[str, ...]] = ("iter",)
    """Attributes that hold a number which changes in training."""
    memories: ClassVar[tuple[str, ...]] = ()
    """Attributes that hold tensors by the names of parameters, or by bucket."""

    def __init__(self, process_group: dist.ProcessGroup | None) -> None:
        self.process_group = check_group(process_group)
        """Where the hook communicates; None for the group of the module."""
        self.iter = 0
        """How many steps there have been."""
        self._seen: set[Key] = set()
        for name in self.memories:
            setattr(self, name, {})

    def maybe_increase_iter(self, bucket: GradBucket) -> None:
        """Count a step when its last bucket comes, and forget what was in no bucket of it."""
        self._seen |= {bucket_key(bucket), *(names_of(bucket) or ())}
        if bucket.is_last():
            self.iter += 1
            for name in self.memories:
                memory: Memory = getattr(self, name)
                for gone in memory.keys() - self._seen:
                    del memory[gone]
            self._seen = set()

    def state_dict(self) -> dict[str, Any]:
        """Copy what this rank remembers: numbers, and tensors by name; nothing needs pickle."""
        saved: dict[str, Any] = {name: getattr(self, name) for name in self.counts}
        for name in self.memories:
            memory: Memory = getattr(self, name)
            # Apart, for a parameter may be called 0.
            saved[name] = {str(k): t.clone() for k, t in memory.items() if isinstance(k, int)}
            saved[name + NAMED] = {k: t.clone() for k, t in memory.items() if isinstance(k, str)}
        return saved

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from what was saved, on the same rank."""
        expected = {*self.counts, *self.memories}
        optional = {name + NAMED for name in self.memories}  # older states have none
        if set(state_dict) - optional != expected:
            raise InvalidArgument(
                f"the state of a {type(self).__name__} has {sorted(expected)}, and what is to be "
                f"loaded has {sorted(state_dict)}"
            )
        for name in self.counts:
            setattr(self, name, state_dict[name])
        for name in self.memories:
            tensors: Mapping[str, Tensor] = state_dict[name]
            named: Mapping[str, Tensor] = state_dict.get(name + NAMED, {})
            memory: Memory = {int(index): tensor.clone() for index, tensor in tensors.items()}
            setattr(self, name, memory | {key: tensor.clone() for key, tensor in named.items()})

    def __getstate__(self) -> dict[str, Any]:
        # Tensors that are parts of one would each be pickled with the whole.
        copies = {name: _cloned(getattr(self, name)) for name in self.memories}
        state = vars(self) | copies
        return {name: state[name] for name in state if name not in ("process_group", "_seen")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, process_group=None, _seen=set())


def _cloned(memory: Memory) -> Memory:
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
