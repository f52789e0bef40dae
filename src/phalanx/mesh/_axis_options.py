"""What an axis wants of its groups: a backend, options and a timeout of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import Backend

from ..errors import InvalidMesh, InvalidType
from ..groups._subgroups import DEFAULT_OPTIONS, GroupOptions

__all__ = ["Override", "Overrides", "for_axes", "for_one_axis"]

Override = (
    str
    | timedelta
    | Mapping[str, Any]
    | Backend.Options
    | tuple[str | None, Backend.Options | Mapping[str, Any] | timedelta | None]
)
"""A backend, its options (torch's, or ours by name), a timeout, or a backend with one of these."""

Overrides = Mapping[int | str, Override] | Sequence[Override | tuple[None, None] | None]


def for_axes(
    overrides: Overrides | None, ndim: int, names: Sequence[str] | None
) -> tuple[GroupOptions, ...]:
    """Return the options of every axis, from overrides by name or number or one for each axis."""
    if overrides is None:
        return (DEFAULT_OPTIONS,) * ndim
    if not isinstance(overrides, Mapping):
        if isinstance(overrides, str) or not isinstance(overrides, Sequence):
            raise InvalidType(
                "backend_override is a dict from axes to backends and options, or has one of these "
                f"for every axis: not {overrides!r}"
            )
        if len(overrides) != ndim:
            raise InvalidMesh(
                f"backend_override has {len(overrides)} entries for a mesh of {ndim} axes: give "
                "one for each, or a dict for some of them"
            )
        return tuple(map(for_one_axis, overrides))
    found = [DEFAULT_OPTIONS] * ndim
    given: dict[int, int | str] = {}
    for key, value in overrides.items():
        axis = _axis(key, ndim, names)
        if axis in given:
            raise InvalidMesh(
                f"backend_override names axis {axis} twice, as {given[axis]!r} and as {key!r}"
            )
        given[axis] = key
        found[axis] = for_one_axis(value)
    return tuple(found)


def _axis(key: object, ndim: int, names: Sequence[str] | None) -> int:
    if isinstance(key, str) and names is not None and key in names:
        return names.index(key)
    if type(key) is int and 0 <= key < ndim:
        return key
    allowed = f"0 to {ndim - 1}" + (f" or one of {', '.join(map(repr, names))}" if names else "")
    raise InvalidMesh(f"backend_override has the key {key!r}: an axis is {allowed}")


def for_one_axis(value: Override | Sequence[Any] | None) -> GroupOptions:
    """Read one override."""
    if value is None:
        return DEFAULT_OPTIONS
    if isinstance(value, str):
        return GroupOptions(backend=value)
    if isinstance(value, tuple | list) and len(value) == 2:
        backend, options = value
        if backend is None or isinstance(backend, str):
            return replace(_options(options), backend=backend)
    return _options(value)


def _options(value: object) -> GroupOptions:
    if value is None:
        return DEFAULT_OPTIONS
    if isinstance(value, timedelta):
        return GroupOptions(timeout=value)
    if isinstance(value, Backend.Options):
        return GroupOptions(timeout=value._timeout, native=value)
    if isinstance(value, Mapping):
        timeout = value.get("timeout")
        if timeout is None or isinstance(timeout, timedelta):
            rest = tuple(sorted((k, v) for k, v in value.items() if k != "timeout"))
            return GroupOptions(timeout=timeout, options=rest)
    raise InvalidType(
        f"backend_override has the value {value!r}: give the name of a backend, its options (an "
        "Options of torch, or a dict), a timeout, or a pair of a backend and one of these"
    )
