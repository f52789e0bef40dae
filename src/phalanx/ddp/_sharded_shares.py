"""Whose parameter is it: shares of about the same size, the same on every rank."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["divide"]


def divide(sizes: Sequence[int], loads: list[int]) -> list[int]:
    """Tell the owner of each; `loads` is what ranks have already, and is brought up to date.

    The largest goes first, to whoever has least: at worst a third more than the best that could be
    done (Graham, 1969). Among equals the earlier one and the lower rank come first.
    """
    owners = [0] * len(sizes)
    for place in sorted(range(len(sizes)), key=lambda place: -sizes[place]):
        owners[place] = loads.index(min(loads))
        loads[owners[place]] += sizes[place]
    return owners
