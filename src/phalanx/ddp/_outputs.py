"""Finds tensors in whatever a module returns."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor

__all__ = ["find_tensors", "is_reference", "on_backward"]


def find_tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested lists, tuples, mappings, dataclasses and plain objects."""
    seen: set[int] = set()
    pending = [value]
    while pending:
        item = pending.pop()
        if isinstance(item, Tensor):
            yield item
        elif isinstance(item, (str, bytes, int, float, complex, type(None))) or id(item) in seen:
            continue
        else:
            seen.add(id(item))
            pending.extend(reversed(_parts(item)))


def _parts(item: Any) -> list[Any]:
    if isinstance(item, Mapping):
        return list(item.values())
    if isinstance(item, (list, tuple, set, frozenset)):
        return list(item)
    if dataclasses.is_dataclass(item) and not isinstance(item, type):
        return [getattr(item, field.name, None) for field in dataclasses.fields(item)]
    if is_reference(item):
        return [item.local_value()] if item.is_owner() else []
    return []


def is_reference(item: Any) -> bool:
    """Tell whether something is an ``RRef``, without importing what makes one."""
    return type(item).__module__.startswith("torch.distributed.rpc") and hasattr(item, "is_owner")


def on_backward(value: Any, notice: Callable[[], None]) -> None:
    """Call `notice` when autograd comes to any of the tensors in `value`."""
    nodes = {tensor.grad_fn for tensor in find_tensors(value) if tensor.grad_fn is not None}
    for node in nodes:
        node.register_prehook(lambda _: notice())
