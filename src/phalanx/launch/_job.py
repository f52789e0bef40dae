"""What is to be run, and the environment that tells each rank its place."""

from __future__ import annotations

import os
import sys
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from ..env import usable_cores
from ..errors import InvalidArgument

__all__ = ["GRACE", "LINGER", "Job", "Ranks", "count_ranks", "python_command", "thread_env"]

GRACE = 30.0
"""Seconds from asking a rank to end to killing it, unless the user says otherwise: time for a step
and a save, and what schedulers of clusters give, too."""
LINGER = 2.0
"""Seconds that the others have to report when a rank has failed, unless the user says otherwise."""

Ranks = int | Literal["auto"]


@dataclass(frozen=True, kw_only=True)
class Job:
    """One command, to be run by several ranks at once."""

    command: tuple[str, ...]
    ranks: int
    max_restarts: int
    grace: float
    linger: float
    prefix: bool
    full_tracebacks: bool
    environ: Mapping[str, str]
    id: str = field(default_factory=lambda: uuid.uuid4().hex)

    def __post_init__(self) -> None:
        for name in ("max_restarts", "grace", "linger"):
            if getattr(self, name) < 0:
                raise InvalidArgument(f"{name} is {getattr(self, name)}; it cannot be negative")

    def rank_env(self, rank: int, *, attempt: int, port: int) -> dict[str, str]:
        """Return the environment of one rank: what `torchrun` would set for one machine."""
        place: dict[str, object] = {
            "RANK": rank,
            "LOCAL_RANK": rank,
            "ROLE_RANK": rank,
            "WORLD_SIZE": self.ranks,
            "LOCAL_WORLD_SIZE": self.ranks,
            "ROLE_WORLD_SIZE": self.ranks,
            "ROLE_NAME": "default",
            "GROUP_RANK": 0,
            "GROUP_WORLD_SIZE": 1,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            "TORCHELASTIC_RESTART_COUNT": attempt,
            "TORCHELASTIC_MAX_RESTARTS": self.max_restarts,
            "TORCHELASTIC_RUN_ID": self.id,
            # The store is ours, so torch makes every rank a client of it and none its host.
            "TORCHELASTIC_USE_AGENT_STORE": True,
            # A rank's stdout is a pipe here; nobody wants to see its lines minutes later.
            "PYTHONUNBUFFERED": 1,
        }
        own = {name: str(value) for name, value in place.items()}
        return {**thread_env(self.ranks), **self.environ, **own}


def count_ranks(ranks: Ranks) -> int:
    """Return how many ranks are meant; raise `InvalidArgument` if that makes no sense."""
    if ranks == "auto":
        return usable_cores()
    if ranks < 1:
        raise InvalidArgument(
            f"{ranks} ranks cannot run anything; ask for 1 or more, or for 'auto'"
        )
    return ranks


def thread_env(ranks: int) -> dict[str, str]:
    """Return what keeps ranks from using each other's cores, for a user who has not decided."""
    return {"OMP_NUM_THREADS": str(max(1, usable_cores() // ranks))}


def python_command(
    script: str | os.PathLike[str],
    args: Sequence[str],
    *,
    module: bool,
    environ: Mapping[str, str] = os.environ,
) -> tuple[str, ...]:
    """Return the command that runs a script or a module; raise `InvalidArgument` if it cannot."""
    target = os.fspath(script)
    if module:
        if not _may_be_a_module(target, environ):
            raise InvalidArgument(f"there is no module {target.partition('.')[0]!r}")
        return (sys.executable, "-m", target, *args)
    if Path(target).is_dir():
        raise InvalidArgument(f"{target!r} is a directory; name the script in it, or use -m")
    if not Path(target).is_file():
        raise InvalidArgument(f"there is no script {target!r}")
    return (sys.executable, target, *args)


def _may_be_a_module(name: str, environ: Mapping[str, str]) -> bool:
    """Return whether a module may exist, as far as can be known without importing anything."""
    top = name.partition(".")[0]
    # As the ranks will look: python -m begins where the user is.
    places = [os.getcwd(), *environ.get("PYTHONPATH", "").split(os.pathsep)]
    if PathFinder.find_spec(top, places) is not None:
        return True
    try:
        return find_spec(top) is not None
    except (ImportError, ValueError):  # a module that is loaded, but not from a file
        return True
