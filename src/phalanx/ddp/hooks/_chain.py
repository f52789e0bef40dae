"""Hooks made of hooks."""

from __future__ import annotations

from typing import cast

from ...errors import InvalidArgument, InvalidType
from ._hook import Hook, Wrapper, name_of

__all__ = ["chain"]


def chain(*parts: Wrapper | Hook) -> Hook:
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
        hook = _wrapped(cast("Wrapper", wrapper), hook)
    return hook


def _wrapped(wrapper: Wrapper, hook: Hook) -> Hook:
    try:
        made = wrapper(hook)
    except TypeError as error:
        raise InvalidType(
            f"{name_of(wrapper)} does not wrap a hook: what stands before the last part of a "
            f"chain takes a hook and returns one ({error})"
        ) from error
    _check_callable(made, wrapper)
    return made


def _check_callable(made: object, part: object) -> None:
    if not callable(made):
        told = f"{made!r} is none" if made is part else f"{name_of(part)} returned {made!r}"
        raise InvalidType(f"a chain is made of hooks, and {told}")
