"""Tables and quantities in the output of commands."""

from __future__ import annotations

from collections.abc import Sequence


def table(head: Sequence[str], rows: Sequence[Sequence[str]], *, right: str = "") -> list[str]:
    """Lay out rows under a head; columns whose names are in `right` end at the same place."""
    lines = [head, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    to_the_right = [name in right.split() for name in head]
    return [
        "  ".join(
            cell.rjust(width) if at_right else cell.ljust(width)
            for cell, width, at_right in zip(line, widths, to_the_right, strict=True)
        ).rstrip()
        for line in lines
    ]


def size(count: float) -> str:
    """Write a number of bytes: ``512 B``, ``1.50 KiB``, ``23.4 GiB``."""
    units = iter(("B", "KiB", "MiB", "GiB", "TiB"))
    unit = next(units)
    while count >= 999.5 and unit != "TiB":
        count, unit = count / 1024, next(units)
    digits = 0 if unit == "B" or count >= 99.95 else 1 if count >= 9.995 else 2
    return f"{count:.{digits}f} {unit}"


def age(seconds: float) -> str:
    """Write how long ago something was: ``12 s``, ``3 min``, ``5 h``, ``2 d``."""
    for unit, length, most in (("s", 1, 120), ("min", 60, 7200), ("h", 3600, 172800)):
        if seconds < most:
            return f"{max(0, seconds) / length:.0f} {unit}"
    return f"{seconds / 86400:.0f} d"


def count(number: int, word: str) -> str:
    """Write a number of things."""
    return f"{number} {word}" if number == 1 else f"{number:,} {word}s"
