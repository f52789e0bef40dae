"""Arithmetic of nested loops, which is what a layout is inside.

A loop is a pair ``(count, step)``: it adds 0, step, 2 * step and so on. Of several loops the
outermost comes first, and what they add up to in turn are the ranks of a layout, in its order:
``((2, 4), (3, 1))`` runs through 0, 1, 2, 4, 5, 6. A position in that list is an *index*, and its
*digits* are the turn that each loop is in.

Everything here takes time in the number of loops, whatever their counts, unless it says otherwise.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeAlias

__all__ = [
    "Loop",
    "Loops",
    "add_up",
    "compose",
    "digits_at",
    "enumerate_ranks",
    "find_digits",
    "gaps",
    "has_repeats",
    "merge",
    "place_in_tile",
    "reach",
    "tiles",
]

Loop: TypeAlias = tuple[int, int]
Loops: TypeAlias = tuple[Loop, ...]


def merge(loops: Iterable[Loop]) -> Loops:
    """Return the fewest loops that give the same ranks in the same order."""
    merged: list[Loop] = []
    for count, step in reversed(tuple(loops)):
        if count == 1:
            continue
        if merged and merged[-1][0] * merged[-1][1] == step:
            merged[-1] = (count * merged[-1][0], merged[-1][1])
        else:
            merged.append((count, step))
    return tuple(reversed(merged))


def reach(loops: Iterable[Loop]) -> int:
    """Return the largest rank."""
    return sum((count - 1) * step for count, step in loops)


def enumerate_ranks(loops: Iterable[Loop]) -> list[int]:
    """Return all ranks in order, in time that grows with their number."""
    ranks = [0]
    for count, step in loops:
        turns = [turn * step for turn in range(count)]
        ranks = [rank + turn for rank in ranks for turn in turns]
    return ranks


def tiles(loops: Iterable[Loop]) -> bool:
    """Tell whether copies of the ranks, each moved, can cover 0, 1, 2, ... once each.

    That is so if and only if every step is a multiple of the whole extent of the next smaller
    loop, since the copies have to fill the gaps between its turns before the larger one moves on.
    """
    extent = 1
    for step, count in _ascending(loops):
        if step == 0 or step % extent:
            return False
        extent = step * count
    return True


def gaps(loops: Iterable[Loop], world_size: int) -> Loops | None:
    """Return loops over where the copies start that cover a world, or None if none do.

    The loops must tile.
    """
    extent = 1
    found: list[Loop] = []
    for step, count in _ascending(loops):
        found.append((step // extent, extent))
        extent = step * count
    if world_size % extent:
        return None
    found.append((world_size // extent, extent))
    return merge(reversed(found))


def has_repeats(loops: Loops) -> bool:
    """Tell whether any rank comes twice, enumerating them only where steps interleave."""
    below = 0
    for step, count in _ascending(loops):
        if step == 0:
            return True
        if step <= below:
            ranks = enumerate_ranks(loops)
            return len(set(ranks)) < len(ranks)
        below += (count - 1) * step
    return False


def digits_at(loops: Sequence[Loop], index: int) -> list[int]:
    """Return the digits of an index; that of the outermost loop is too large beyond the end."""
    digits = []
    for count, _ in reversed(loops[1:]):
        index, digit = divmod(index, count)
        digits.append(digit)
    if loops:
        digits.append(index)
    return digits[::-1]


def add_up(loops: Sequence[Loop], digits: Sequence[int]) -> int:
    """Return the rank at these digits."""
    return sum([digit * step for digit, (_, step) in zip(digits, loops, strict=True)])


def place_in_tile(loops: Sequence[Loop], rank: int) -> tuple[int, list[int]]:
    """Return where the copy starts that holds a rank, and its digits in it; the loops must tile."""
    digits = [rank // step % count for count, step in loops]
    return rank - add_up(loops, digits), digits


def find_digits(loops: Loops, rank: int) -> list[int] | None:
    """Return digits that add up to a rank, or None if there are none.

    The work stays in the number of loops if no rank comes twice because of interleaving steps.
    """
    order = sorted(range(len(loops)), key=lambda position: loops[position][1], reverse=True)
    digits = [0] * len(loops)

    def search(depth: int, rest: int, below: int) -> bool:
        if depth == len(order):
            return rest == 0
        count, step = loops[order[depth]]
        below -= (count - 1) * step
        # The smaller loops can make up for no more than what they reach together.
        least = max(0, -((below - rest) // step)) if step else 0
        most = min(count - 1, rest // step) if step else 0
        for digit in range(least, most + 1):
            digits[order[depth]] = digit
            if search(depth + 1, rest - digit * step, below):
                return True
        return False

    return digits if search(0, rank, reach(loops)) else None


def compose(loops: Loops, selectors: Iterable[Loops]) -> list[Loops] | None:
    """Return the ranks at the indices that each of several other loops run through.

    Return None if the indices add up to one beyond the last, or if no loops would give the ranks.
    """
    used = [0] * len(loops)
    composed = []
    for selector in selectors:
        found: list[Loop] = []
        for count, step in selector:
            pieces = _linear_pieces(loops, count, step)
            if pieces is None:
                return None
            for size, stride in pieces:
                digits = digits_at(loops, stride)
                used = [sum_ + (size - 1) * each for sum_, each in zip(used, digits, strict=True)]
                found.append((size, add_up(loops, digits)))
        composed.append(tuple(found))
    # Ranks add up as their indices do only while no digit carries into the next.
    fits = all(digit < count for digit, (count, _) in zip(used, loops, strict=True))
    return composed if fits else None


def _linear_pieces(loops: Loops, count: int, step: int) -> list[Loop] | None:
    """Split a loop over indices into loops along which the rank grows evenly, outermost first.

    Return None if it leads beyond the last index, or if no loops would give its ranks.
    """
    pieces: list[Loop] = []
    while count > 1:
        digits = digits_at(loops, step)
        # Nothing carries into the next loop until one digit, added to itself, is full.
        turns = [
            (size - 1) // digit + 1 for digit, (size, _) in zip(digits, loops, strict=True) if digit
        ]
        run = min([count, *turns]) if loops or step == 0 else 1
        if run < 2 or count % run:
            return None
        pieces.append((run, step))
        count //= run
        step *= run
    return pieces[::-1]


def _ascending(loops: Iterable[Loop]) -> list[tuple[int, int]]:
    """Return pairs of step and count, the smallest step first."""
    return sorted((step, count) for count, step in loops if count > 1)
