"""Whose parameter is it: shares of about the same size, the same on every rank."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

__all__ = ["divide", "share_out"]


def share_out(parameters: Sequence[Tensor], loads: list[int]) -> list[int]:
    """Tell the owner of each; parameters that overlap in memory have one and the same."""
    units = _overlapping(parameters)
    sizes = [sum(parameters[place].nbytes for place in unit) for unit in units]
    owners = [0] * len(parameters)
    for unit, owner in zip(units, divide(sizes, loads), strict=True):
        for place in unit:
            owners[place] = owner
    return owners


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


def _overlapping(parameters: Sequence[Tensor]) -> list[list[int]]:
    """Bring places together whose memory overlaps; in the order of the first of each.

    Addresses decide only that. Whatever else depended on them would differ between ranks.
    """
    spans = sorted((p.data_ptr(), place) for place, p in enumerate(parameters) if p.numel())
    units: list[list[int]] = [[place] for place, p in enumerate(parameters) if not p.numel()]
    end = 0
    for start, place in spans:
        if start >= end:
            units.append([])
        units[-1].append(place)
        end = max(end, start + _extent(parameters[place]))
    return sorted(map(sorted, units))


def _extent(tensor: Tensor) -> int:
    """Tell how many bytes there are from a tensor's first element to the end of its last."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return (1 + sum((count - 1) * stride for count, stride in steps)) * tensor.itemsize
