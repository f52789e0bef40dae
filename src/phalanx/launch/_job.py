"""The job of a launcher: the command, and the environment of each rank.

On several machines `exec_torchrun` replaces this process by torchrun. Ranks find the same
variables in their environment either way.
"""

from __future__ import annotations

import math
import os
import sys
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, NoReturn

from ..env import ELASTIC_VARIABLE, ElasticEnv, find_accelerator, is_drop_in, usable_cores
from ..errors import InvalidArgument, InvalidState

GRACE = 30.0
"""Default seconds between SIGTERM and SIGKILL: enough for a step and a save, and what most
schedulers grant."""
LINGER = 2.0  # default seconds that the other ranks have to report after one failed

AUTOLOAD_SWITCH = "TORCH_DEVICE_BACKEND_AUTOLOAD"  # torch's: whether it loads entry points

_STORE = ("MASTER_ADDR", "MASTER_PORT", ELASTIC_VARIABLE)
"""Variables that say where the store is. Those of an outer launcher are not inherited."""
OWN_VARIABLES = frozenset({"RANK", "LOCAL_RANK", "ROLE_RANK", ELASTIC_VARIABLE})
"""Variables that differ between the ranks of a job."""
_RUN_ID = "TORCHELASTIC_RUN_ID"
_MANY = 2**31 - 1  # restarts, where others expect a number

RankCount = int | Literal["auto"]


@dataclass(frozen=True, kw_only=True)
class Job:
    """A command for several ranks, and how to supervise it."""

    command: tuple[str, ...]
    world_size: int
    max_restarts: int | None
    """None is without limit, in an elastic run."""
    grace: float
    linger: float
    prefix: bool
    full_tracebacks: bool
    environ: Mapping[str, str]
    timeout: float | None = None
    """Seconds until all ranks must have exited."""
    stack_signal: int | None = None
    """A signal on which ranks print their stacks and end; sent when the time is over."""
    descriptors: Sequence[Sequence[int]] = ()
    """What each rank inherits; the numbers are the last arguments of its command."""
    script: str = ""
    min_ranks: int | None = None
    """The run is elastic and pauses with fewer members; None if it is not elastic."""
    keeps_standby: bool = False
    """Of an elastic run: whether a process waits to replace a lost rank."""
    id: str = field(default_factory=lambda: uuid.uuid4().hex)

    def __post_init__(self) -> None:
        for name in ("max_restarts", "grace", "linger"):
            if (getattr(self, name) or 0) < 0:
                raise InvalidArgument(f"{name} must not be negative, got {getattr(self, name)}")
        if math.isnan(self.grace):
            raise InvalidArgument(
                "grace must be a number of seconds, or inf to never kill a rank, got nan"
            )
        if not math.isfinite(self.linger):
            raise InvalidArgument(f"linger must be a finite number of seconds, got {self.linger}")
        if self.timeout is not None and not self.timeout > 0:
            raise InvalidArgument(f"timeout must be positive or None, got {self.timeout}")
        if self.min_ranks is not None and not 1 <= self.min_ranks <= self.world_size:
            raise InvalidArgument(
                f"min_ranks must be from 1 to the number of ranks ({self.world_size}), "
                f"got {self.min_ranks}"
            )

    @property
    def mark(self) -> str:
        """A variable in the environment of every process of the job, by which they are found."""
        return f"{_RUN_ID}={self.id}"

    def store_env(self) -> dict[str, str]:
        return {**self.environ, _RUN_ID: self.id}

    def rank_descriptors(self, rank: int) -> Sequence[int]:
        return self.descriptors[rank] if self.descriptors else ()

    def rank_command(self, rank: int) -> tuple[str, ...]:
        return (*self.command, *map(str, self.rank_descriptors(rank)))

    def rank_env(
        self, rank: int, *, attempt: int, port: int, elastic: ElasticEnv | None = None
    ) -> dict[str, str]:
        """Return the environment of one rank: what `torchrun` sets on one machine.

        A worker of an elastic run does not get MASTER_ADDR and MASTER_PORT: with them, other
        libraries would wait for ranks that are not started together.
        """
        world_size = max(self.world_size, rank + 1)
        place: dict[str, object] = {
            "RANK": rank,
            "LOCAL_RANK": rank,
            "ROLE_RANK": rank,
            "WORLD_SIZE": world_size,
            "LOCAL_WORLD_SIZE": world_size,
            "ROLE_WORLD_SIZE": world_size,
            "ROLE_NAME": "default",
            "GROUP_RANK": 0,
            "GROUP_WORLD_SIZE": 1,
            "TORCHELASTIC_RESTART_COUNT": attempt,
            "TORCHELASTIC_MAX_RESTARTS": _MANY if self.max_restarts is None else self.max_restarts,
            _RUN_ID: self.id,
            # The launcher hosts the store, so every rank is a client of it.
            "TORCHELASTIC_USE_AGENT_STORE": True,
            # stdout is a pipe; without this its lines would appear minutes later.
            "PYTHONUNBUFFERED": 1,
        }
        if elastic is None:
            place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        else:
            place |= elastic.to_variables()
        own = {name: str(value) for name, value in place.items()}
        inherited = {name: self.environ[name] for name in self.environ if name not in _STORE}
        return {**self._default_env, **inherited, **own}

    @cached_property
    def _default_env(self) -> dict[str, str]:
        # Once: ranks that are started later get the same.
        return default_env(self.world_size, self.environ)


def count_ranks(ranks: RankCount) -> int:
    """Return the number of ranks; ``"auto"`` is one per usable core."""
    if ranks == "auto":
        return usable_cores()
    if ranks < 1:
        raise InvalidArgument(f"the number of ranks must be at least 1 or 'auto', got {ranks}")
    return ranks


def default_env(ranks: int, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return variables that ranks get unless the user has set them.

    OMP_NUM_THREADS divides the cores between the ranks. Without ACCELERATE_USE_CPU, Accelerate
    trains an independent model on each rank of a machine without accelerators.
    """
    defaults = {"OMP_NUM_THREADS": str(max(1, usable_cores() // ranks))}
    if find_accelerator(environ) is None:
        defaults["ACCELERATE_USE_CPU"] = "true"
    return defaults


def drop_in_env(environ: Mapping[str, str] = os.environ, *, drop_in: bool) -> dict[str, str]:
    """Return the switch of the drop-in for ranks; raise where it would have no effect."""
    if not drop_in and not is_drop_in(environ):
        return {}
    if environ.get(AUTOLOAD_SWITCH, "1") != "1":
        raise InvalidState(
            f"drop-in has no effect with {AUTOLOAD_SWITCH}={environ[AUTOLOAD_SWITCH]}, which keeps "
            "torch from loading phalanx. Unset it"
        )
    if not has_entry_point():
        raise InvalidState(
            "drop-in has no effect: this installation of phalanx has no entry point in "
            "'torch.backends'. Install phalanx again"
        )
    return {"PHALANX_DROP_IN": "1"}


def has_entry_point() -> bool:
    """Return whether ``import torch`` will find phalanx."""
    from importlib.metadata import entry_points

    found = entry_points(group="torch.backends")
    return any(each.value.partition(":")[0] == "phalanx_autoload" for each in found)


def python_command(
    script: str | os.PathLike[str],
    args: Sequence[str],
    *,
    module: bool,
    environ: Mapping[str, str] = os.environ,
) -> tuple[str, ...]:
    target = os.fspath(script)
    if module:
        top = target.partition(".")[0]
        # python -m searches the working directory first: "", since it may have been deleted.
        # Nothing is imported here.
        places = ["", *environ.get("PYTHONPATH", "").split(os.pathsep)]
        try:
            exists = PathFinder.find_spec(top, places) is not None or find_spec(top) is not None
        except (ImportError, ValueError):  # a loaded module without a file
            exists = True
        if not exists:
            raise InvalidArgument(f"module {top!r} not found")
        return (sys.executable, "-m", target, *args)
    if Path(target).is_dir():
        raise InvalidArgument(f"{target!r} is a directory; give the script in it, or use -m")
    if not Path(target).is_file():
        raise InvalidArgument(f"script {target!r} not found")
    return (sys.executable, target, *args)


TORCHRUN_OPTIONS = (
    "nnodes",
    "node_rank",
    "rdzv_endpoint",
    "rdzv_backend",
    "rdzv_id",
    "master_addr",
    "master_port",
)
"""Options that only torchrun has. With one of them, torchrun runs the ranks."""


def torchrun_options(**given: str | int | None) -> list[str]:
    """Return the options that are not None as arguments of torchrun."""
    options = {name: given[name] for name in TORCHRUN_OPTIONS if given.get(name) is not None}
    # torchrun's default backend needs --node-rank. An endpoint without it means c10d, which
    # assigns the node ranks.
    if "rdzv_endpoint" in options and not options.keys() & {"rdzv_backend", "node_rank"}:
        options["rdzv_backend"] = "c10d"
    return [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]


def torchrun_command(
    script: str | os.PathLike[str],
    args: Sequence[str] = (),
    *,
    torchrun_args: Sequence[str],
    ranks: RankCount,
    module: bool = False,
    max_restarts: int = 0,
    grace: float | None = None,
) -> list[str]:
    python, *target = python_command(script, args, module=module)
    options = [*torchrun_args, f"--nproc-per-node={count_ranks(ranks)}"]
    options.append(f"--max-restarts={max_restarts}")
    if grace is not None:
        if not 0 <= grace < math.inf:
            raise InvalidArgument(
                f"grace must be a finite number of seconds for torchrun, at least 0, got {grace}"
            )
        options.append(f"--shutdown-timeout={round(grace)}")
    # torchrun accepts "-m name" too, so Python's arguments follow unchanged.
    return [python, "-m", "torch.distributed.run", *options, *target]


def exec_torchrun(command: list[str], *, ranks: RankCount, drop_in: bool = False) -> NoReturn:
    switch = drop_in_env(drop_in=drop_in)
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:  # its descriptor is closed
            stream.flush()
    os.execve(command[0], command, {**default_env(count_ranks(ranks)), **os.environ, **switch})
