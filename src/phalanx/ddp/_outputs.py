"""Finds tensors in whatever a module returns."""

from __future__ import annotations

import dataclasses
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from types import BuiltinFunctionType, FunctionType, MemberDescriptorType, ModuleType
from typing import Any

from torch import Tensor, nn

__all__ = ["find_tensors", "is_reference", "on_backward"]

_LIMIT = 10_000
"""How many more values to visit after the first object that is not a container: it can reach
anything, a tokenizer's vocabulary for example. A pass whose outputs were not found begins at its
first parameter."""
_ATOMS = (str, bytes, int, float, complex, type(None), type, ModuleType)
_OPAQUE = (FunctionType, BuiltinFunctionType, nn.Module)
"""What is no output, although it may lead to tensors."""


def find_tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested lists, tuples, mappings, dataclasses and plain objects."""
    seen: dict[int, Any] = {}  # kept alive: what is made on the fly must not share an identity
    pending = [value]
    left: float = math.inf
    while pending and left > 0:
        left -= 1
        item = pending.pop()
        if isinstance(item, Tensor):
            yield item
        elif isinstance(item, _ATOMS) or id(item) in seen:
            continue
        else:
            seen[id(item)] = item
            parts = _parts(item)
            if parts is None:
                left = min(left, _LIMIT)
                parts = _attributes(item)
            pending.extend(reversed(parts))


def _parts(item: Any) -> list[Any] | None:
    """List what a container holds; None of what is not one."""
    if isinstance(item, Mapping):
        return list(item.values())
    if isinstance(item, (list, tuple, set, frozenset, deque)):
        return [*item, *vars(item).values()] if hasattr(item, "__dict__") else list(item)
    if dataclasses.is_dataclass(item):
        return [getattr(item, field.name, None) for field in dataclasses.fields(item)]
    if is_reference(item):
        return [item.local_value()] if item.is_owner() else []
    return None


def _attributes(item: Any) -> list[Any]:
    """List the values of an object's attributes, without running code of its class."""
    if isinstance(item, _OPAQUE):
        return []
    try:
        found = list(object.__getattribute__(item, "__dict__").values())
    except AttributeError:
        found = []
    for kind in type(item).__mro__:
        if "__slots__" not in vars(kind):
            continue
        for slot in vars(kind).values():
            if isinstance(slot, MemberDescriptorType):
                try:
                    found.append(slot.__get__(item))
                except AttributeError:  # not set
                    continue
    return found


def is_reference(item: Any) -> bool:
    """Tell whether something is an ``RRef``, without importing what makes one."""
    return type(item).__module__.startswith("torch.distributed.rpc") and hasattr(item, "is_owner")


def on_backward(value: Any, notice: Callable[[], None]) -> None:
    """Call `notice` when autograd comes to any of the tensors in `value`."""
    nodes = {tensor.grad_fn for tensor in find_tensors(value) if tensor.grad_fn is not None}
    for node in nodes:
        node.register_prehook(lambda _: notice())
