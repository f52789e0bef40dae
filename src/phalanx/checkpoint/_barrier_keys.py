"""What a barrier keeps in its store.

==================  ===========================================================================
``record``          what the ranks have agreed on: see `_barrier_record`
``word/E``          `OPEN`, and the arrivals in epoch E: what `step_of` tells for each
``at/R``            the last use that rank R came to, and what it says there
``said/N/R/I``      a piece of what rank R says at use N, if that is long
``use/E/N``         there once use N is over in epoch E: what everybody said, `PASSED` or `FAILED`
``instances/R``     how many barriers rank R has made
==================  ===========================================================================
"""

from __future__ import annotations

from torch._C._distributed_c10d import Store

__all__ = ["FAILED", "OPEN", "PASSED", "Keys", "arrivals", "peek", "read_all", "step_of"]

OPEN = 1 << 62
PASSED, FAILED = "passed", "failed"

_SPOKEN = 1 << 31  # arrivals with a text are counted above this bit, and all below it
_NEVER = "-0"  # what no key holds


def step_of(text: str | None) -> int:
    """Tell what a rank adds to the word when it comes, with or without something to say."""
    return 1 if text is None else _SPOKEN + 1


def arrivals(word: int) -> int:
    """Count the arrivals in a word, or in a part of one."""
    return word & (_SPOKEN - 1)


def peek(store: Store, key: str) -> bytes | None:
    """Read a key that may not be there, in one round trip where `get` takes two, and waits."""
    found: bytes = store.compare_set(key, _NEVER, _NEVER)
    return None if found == _NEVER.encode() else found


def read_all(store: Store, keys: list[str], *, default: str) -> list[bytes]:
    """Read keys, some of which may not be there; those are then set to the default."""
    if store.check(keys):
        return store.multi_get(keys)
    return [store.compare_set(key, "", default) for key in keys]


class Keys:
    """The keys of one barrier."""

    def __init__(self, prefix: str) -> None:
        # The length keeps one prefix's keys from being those of another that it is the start of.
        self.root = f"barrier:{len(prefix)}:{prefix}:"
        self.record = f"{self.root}record"

    def word(self, epoch: int) -> str:
        """Name the counter of an epoch."""
        return f"{self.root}word/{epoch}"

    def at(self, rank: int) -> str:
        """Name a rank's progress."""
        return f"{self.root}at/{rank}"

    def said(self, use: int, rank: int, pieces: int) -> list[str]:
        """Name the pieces of what a rank says at a use."""
        return [f"{self.root}said/{use}/{rank}/{piece}" for piece in range(pieces)]

    def uses(self, epoch: int) -> str:
        """Name the ends of all uses in an epoch; each one's number follows."""
        return f"{self.root}use/{epoch}/"

    def instances(self, rank: int) -> str:
        """Name the number of barriers that a rank has made."""
        return f"{self.root}instances/{rank}"
