"""What a hook remembers from step to step, and how that is saved."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch.distributed as dist
from torch import Tensor

from ...errors import InvalidArgument, InvalidType
from ._communicate import check_group
from ._hook import GradBucket

__all__ = ["HookState", "check_count", "check_state"]


class HookState:
    """A group, the number of steps, and tensors that belong to buckets.

    Ranks remember different things: each saves and loads its own. A group cannot be saved; where
    a state is loaded, the hook uses the one that was given there, or the module's.
    """

    counts: ClassVar[tuple[str, ...]] = ("iter",)
    """Attributes that hold a number which changes in training."""
    memories: ClassVar[tuple[str, ...]] = ()
    """Attributes that hold tensors by the index of their bucket."""

    def __init__(self, process_group: dist.ProcessGroup | None) -> None:
        self.process_group = check_group(process_group)
        """Where the hook communicates; None for the group of the module."""
        self.iter = 0
        """How many steps there have been."""
        for name in self.memories:
            setattr(self, name, {})

    def maybe_increase_iter(self, bucket: GradBucket) -> None:
        """Count a step when its last bucket comes."""
        if bucket.is_last():
            self.iter += 1

    def state_dict(self) -> dict[str, Any]:
        """Copy what this rank remembers: numbers, and tensors by bucket; nothing needs pickle."""
        saved: dict[str, Any] = {name: getattr(self, name) for name in self.counts}
        for name in self.memories:
            tensors: Mapping[int, Tensor] = getattr(self, name)
            saved[name] = {str(index): tensor.clone() for index, tensor in tensors.items()}
        return saved

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from what was saved, on the same rank."""
        expected = {*self.counts, *self.memories}
        if set(state_dict) != expected:
            raise InvalidArgument(
                f"the state of a {type(self).__name__} has {sorted(expected)}, and what is to be "
                f"loaded has {sorted(state_dict)}"
            )
        for name in self.counts:
            setattr(self, name, state_dict[name])
        for name in self.memories:
            tensors: Mapping[str, Tensor] = state_dict[name]
            setattr(self, name, {int(index): t.clone() for index, t in tensors.items()})

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "process_group"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, process_group=None)


def check_count(name: str, value: Any, *, least: int = 0) -> int:
    """Refuse what is not a whole number, or too small a one."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise InvalidArgument(f"{name} is a whole number, {least} or more, not {value!r}")
    return value


def check_state(state: Any, kind: type[HookState], hook: str) -> None:
    """Refuse a state that is another hook's, or a group."""
    if not isinstance(state, kind):
        raise InvalidType(f"the state of {hook} is a {kind.__name__}, not {state!r}")
