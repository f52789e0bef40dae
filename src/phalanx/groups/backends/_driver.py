"""Who does a rank's share in shared memory: whoever enters the engine, or a thread of its own.

A thread overlaps with what the rank computes if there is a core for it. Where every core has a
rank to run, it takes the time from them; what that costs is measured by ``benchmarks/entries/
overlap.py``. The choice is a rank's own: to its peers it makes no difference.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from ...env import local_ranks, usable_cores
from ...errors import InvalidArgument, InvalidState, UnknownOption

if TYPE_CHECKING:
    from ...native import _engine

__all__ = ["OPTION", "Driver", "check_driver", "choose_driver", "start_driver"]

Driver = Literal["thread", "caller"]
OPTION = "driver"


def check_driver(options: dict[str, object]) -> None:
    """Refuse options that are none, and drivers that there are not."""
    unknown = sorted(set(options) - {OPTION})
    if unknown:
        raise UnknownOption(f"shm takes no options but {OPTION}, and was given {unknown[0]}")
    asked = options.get(OPTION)
    if asked not in (None, "thread", "caller"):
        raise InvalidArgument(f"{OPTION} is 'thread', 'caller' or None, not {asked!r}")


def choose_driver(size: int, cores: int) -> Driver:
    """Choose for `size` ranks with `cores` between them: a thread if there are more cores."""
    if size == 1 or usable_cores() == 1:  # never waits for anybody; has no core for a thread
        return "caller"
    return "thread" if cores > max(size, local_ranks() or 0) else "caller"


def start_driver(engine: _engine.Engine, asked: object, size: int) -> Driver:
    """Start the thread of an engine if it is asked for, or chosen; tell who drives."""
    if (asked or choose_driver(size, engine.cores)) == "caller":
        return "caller"
    try:
        engine.start_driver()
    except RuntimeError as error:  # what nanobind makes of a system error
        if asked is None:
            return "caller"
        raise InvalidState(f"no thread could be started to drive this rank: {error}") from error
    return "thread"
