"""Ranks, tensors, tables and quantities in messages and command output. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Sequence

PACKAGE_ROOT = __file__.removesuffix("_formatting.py")
"""A traceback frame whose file starts with this is phalanx's own. Not resolved: frames are not."""

_MAX_RANKS_LISTED = 8
_MAX_RANGES_LISTED = 16


def first_line(error: BaseException) -> str:
    """Return an error's message without the stack trace that torch appends."""
    return str(error).partition("\n")[0]


def format_ranks(ranks: Sequence[int]) -> str:
    """Format sorted ranks for a sentence: ``rank 2``, ``ranks 1, 2``, ``ranks 0-15``."""
    noun = "ranks" if len(ranks) > 1 else "rank"
    if len(ranks) <= _MAX_RANKS_LISTED:
        return f"{noun} {', '.join(map(str, ranks))}"
    ranges = format_rank_ranges(ranks).split(",")
    if len(ranges) > _MAX_RANGES_LISTED:
        ranges[_MAX_RANGES_LISTED:] = [f"... ({len(ranks):,} ranks)"]
    return f"{noun} {','.join(ranges)}"


def format_rank_ranges(ranks: Sequence[int]) -> str:
    """Format sorted ranks as ranges: ``0-3,7``."""
    parts: list[list[int]] = []
    for rank in ranks:
        if parts and rank == parts[-1][-1] + 1:
            parts[-1][1:] = [rank]
        else:
            parts.append([rank])
    return ",".join("-".join(map(str, part)) for part in parts)


def format_tensor(dtype: object, shape: Sequence[int]) -> str:
    """Format a tensor: ``float32[10, 3]``."""
    return f"{dtype_name(dtype)}{list(shape)}"


def dtype_name(dtype: object) -> str:
    """Format a dtype of torch: ``float32``."""
    return str(dtype).removeprefix("torch.")


def mask_rank(text: str, rank: int | None) -> str:
    """Replace a rank's own number, so that equal errors of two ranks compare equal."""
    return text if rank is None else re.sub(rf"\brank ?{rank}\b", "rank *", text)


def format_table(
    header: Sequence[str], rows: Sequence[Sequence[str]], *, right: str = ""
) -> list[str]:
    """Align rows under a header; columns named in `right` are right-aligned."""
    lines = [header, *rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    is_right = [name in right.split() for name in header]
    return [
        "  ".join(
            cell.rjust(width) if flush_right else cell.ljust(width)
            for cell, width, flush_right in zip(line, widths, is_right, strict=True)
        ).rstrip()
        for line in lines
    ]


def format_size(count: float) -> str:
    """Format a number of bytes: ``512 B``, ``1.50 KiB``, ``23.4 GiB``."""
    units = iter(("B", "KiB", "MiB", "GiB", "TiB"))
    unit = next(units)
    while count >= 999.5 and unit != "TiB":
        count, unit = count / 1024, next(units)
    digits = 0 if unit == "B" or count >= 99.95 else 1 if count >= 9.995 else 2
    return f"{count:.{digits}f} {unit}"


def format_age(seconds: float) -> str:
    """Format an age: ``12 s``, ``3 min``, ``5 h``, ``2 d``."""
    for unit, length, limit in (("s", 1, 120), ("min", 60, 7200), ("h", 3600, 172800)):
        if seconds < limit:
            return f"{max(0, seconds) / length:.0f} {unit}"
    return f"{seconds / 86400:.0f} d"


def format_count(number: int, noun: str) -> str:
    """Format a number of things: ``1 rank``, ``2,000 ranks``."""
    return f"{number} {noun}" if number == 1 else f"{number:,} {noun}s"
