"""What is to be run: the command, and the environment that tells each rank its place.

On several machines torch's launcher takes over: `exec_torchrun` replaces this process by
torchrun. Ranks find the same variables in their environment either way.
"""

from __future__ import annotations

import os
import sys
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, NoReturn

from ..env import usable_cores
from ..errors import InvalidArgument

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
        if not _module_may_exist(target, environ):
            raise InvalidArgument(f"there is no module {target.partition('.')[0]!r}")
        return (sys.executable, "-m", target, *args)
    if Path(target).is_dir():
        raise InvalidArgument(f"{target!r} is a directory; name the script in it, or use -m")
    if not Path(target).is_file():
        raise InvalidArgument(f"there is no script {target!r}")
    return (sys.executable, target, *args)


def _module_may_exist(name: str, environ: Mapping[str, str]) -> bool:
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


@dataclass(frozen=True, kw_only=True)
class TorchrunOptions:
    """How several machines find each other: torchrun's options, by their names."""

    nnodes: str | None = None
    node_rank: int | None = None
    rdzv_endpoint: str | None = None
    rdzv_backend: str | None = None
    rdzv_id: str | None = None
    master_addr: str | None = None
    master_port: int | None = None

    def __bool__(self) -> bool:
        return any(getattr(self, each.name) is not None for each in fields(self))

    def options(self) -> list[str]:
        """Return the options that were given, as torchrun spells them."""
        given = {each.name: getattr(self, each.name) for each in fields(self)}
        if self._implies_c10d():
            given["rdzv_backend"] = "c10d"
        return [
            f"--{name.replace('_', '-')}={value}"
            for name, value in given.items()
            if value is not None
        ]

    def _implies_c10d(self) -> bool:
        # torchrun's default backend wants a number for each machine. Where somebody names an
        # endpoint and no number, the backend that hands out numbers is what was meant.
        return bool(self.rdzv_endpoint) and self.rdzv_backend is None and self.node_rank is None


def torchrun_command(
    script: str | os.PathLike[str],
    args: Sequence[str] = (),
    *,
    machines: TorchrunOptions,
    ranks: int,
    module: bool = False,
    max_restarts: int = 0,
    grace: float | None = None,
) -> list[str]:
    """Return the command line of torchrun that does the same on several machines."""
    python, *target = python_command(script, args, module=module)
    options = [*machines.options(), f"--nproc-per-node={ranks}", f"--max-restarts={max_restarts}"]
    if grace is not None:
        options.append(f"--shutdown-timeout={round(grace)}")
    # A module is "-m name" to torchrun too, so what Python would be given can follow as it is.
    return [python, "-m", "torch.distributed.run", *options, *target]


def exec_torchrun(
    script: str | os.PathLike[str],
    args: Sequence[str],
    *,
    machines: TorchrunOptions,
    ranks: Ranks,
    module: bool,
    max_restarts: int,
    grace: float | None,
) -> NoReturn:
    """Become torchrun."""
    count = count_ranks(ranks)
    command = torchrun_command(
        script,
        args,
        machines=machines,
        ranks=count,
        module=module,
        max_restarts=max_restarts,
        grace=grace,
    )
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(command[0], command, {**thread_env(count), **os.environ})
