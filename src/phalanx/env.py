"""What the process's surroundings say: its place among the ranks, and the cores it may use.

Whoever starts the ranks (``phalanx run``, ``torchrun``, a batch system) describes each one's place
in the environment. It is read here and nowhere else, without importing torch.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from phalanx.errors import InvalidArgument

__all__ = ["RankEnv", "is_launched", "local_ranks", "read_rank_env", "usable_cores"]

_RANK_VARIABLES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
)
_OTHER_WORLD_SIZE_VARIABLES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS")
"""What MPI and Slurm call the number of processes that they have started."""
_PMIX_RANK_VARIABLE = "PMIX_RANK"
"""What a launcher that speaks PMIx always sets; some of them do not tell the number of ranks."""


@dataclass(frozen=True, kw_only=True)
class RankEnv:
    """The place of this process among the ranks, as its launcher describes it."""

    rank: int
    """``RANK``: the global rank."""
    world_size: int
    """``WORLD_SIZE``: how many ranks there are."""
    local_rank: int | None = None
    """``LOCAL_RANK``: position among the ranks of this machine."""
    local_world_size: int | None = None
    """``LOCAL_WORLD_SIZE``: how many ranks this machine has."""
    node_rank: int | None = None
    """``GROUP_RANK``: which machine this is."""
    master_addr: str | None = None
    """``MASTER_ADDR``: where the store is."""
    master_port: int | None = None
    """``MASTER_PORT``: the store's port."""
    restart_count: int = 0
    """``TORCHELASTIC_RESTART_COUNT``: how often the launcher has started all ranks again."""
    agent_store: bool = False
    """``TORCHELASTIC_USE_AGENT_STORE``: the launcher hosts the store, so every rank is a client."""


def read_rank_env(environ: Mapping[str, str] = os.environ) -> RankEnv:
    """Return this process's place among the ranks; raise `InvalidArgument` if it has none."""
    world_size = _required(environ, "WORLD_SIZE", minimum=1)
    local_world_size = _number(environ, "LOCAL_WORLD_SIZE", minimum=1, maximum=world_size)
    return RankEnv(
        rank=_required(environ, "RANK", maximum=world_size - 1),
        world_size=world_size,
        local_rank=_number(environ, "LOCAL_RANK", maximum=(local_world_size or world_size) - 1),
        local_world_size=local_world_size,
        node_rank=_number(environ, "GROUP_RANK"),
        master_addr=_text(environ, "MASTER_ADDR") or None,
        master_port=_number(environ, "MASTER_PORT", maximum=65535),
        restart_count=_number(environ, "TORCHELASTIC_RESTART_COUNT") or 0,
        agent_store=environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
    )


def is_launched(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether anything tells that this process is one of several ranks, or which one."""
    if any(_text(environ, name) for name in _RANK_VARIABLES):
        return True
    sizes = {_text(environ, name) for name in _OTHER_WORLD_SIZE_VARIABLES} - {""}
    rank = _text(environ, _PMIX_RANK_VARIABLE)
    return bool(sizes - {"1"}) or rank not in ("", "0") or (rank == "0" and not sizes)


def local_ranks(environ: Mapping[str, str] = os.environ) -> int | None:
    """Return how many ranks the launcher has started on this machine; None if it does not say."""
    return _number(environ, "LOCAL_WORLD_SIZE", minimum=1)


def usable_cores(among: int | None = None) -> int:
    """Return how many cores this process may keep busy: affinity and cgroup quota, at least 1.

    Of `among` cores, if given, instead of those that it may run on.
    """
    # macOS has no affinity to ask for.
    affinity = getattr(os, "sched_getaffinity", None)
    allowed = among or (len(affinity(0)) if affinity else os.cpu_count() or 1)
    return max(1, min([allowed, *_own_quotas()]))


@lru_cache(maxsize=1)
def _own_quotas() -> tuple[int, ...]:
    """Read the quotas of this process once: it takes longer than to make a group."""
    return tuple(_quotas(Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")))


def _required(
    environ: Mapping[str, str], name: str, *, minimum: int = 0, maximum: int | None = None
) -> int:
    value = _number(environ, name, minimum=minimum, maximum=maximum)
    if value is None:
        raise InvalidArgument(
            f"{name} is not in the environment: start the script with `phalanx run` or `torchrun`, "
            "or pass store, rank and world_size yourself"
        )
    return value


def _number(
    environ: Mapping[str, str], name: str, *, minimum: int = 0, maximum: int | None = None
) -> int | None:
    text = _text(environ, name)
    if not text:
        return None
    bounds = f"of at least {minimum}" if maximum is None else f"from {minimum} to {maximum}"
    # isdecimal: int() would also take "1_0" and "+1", which no launcher writes on purpose.
    if not text.isdecimal() or int(text) < minimum or (maximum is not None and int(text) > maximum):
        raise InvalidArgument(f"{name}={text!r} in the environment is not a number {bounds}")
    return int(text)


def _text(environ: Mapping[str, str], name: str) -> str:
    return environ.get(name, "").strip()


def _quotas(root: Path, membership: Path) -> Iterator[int]:
    """Yield the core quota, rounded up, of every cgroup this process is in (version 2, then 1)."""
    own = _own_cgroup(membership)
    # A limit may be set on any ancestor. Inside a container `own` may lie outside of what is
    # mounted at `root`; then only `root` itself exists, and it is the container's.
    for directory in [root / own, *(root / parent for parent in own.parents)]:
        yield from _quota(directory / "cpu.max")
    yield from _quota(root / "cpu/cpu.cfs_quota_us", root / "cpu/cpu.cfs_period_us")


def _own_cgroup(membership: Path) -> Path:
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return Path()
    unified = [line.removeprefix("0::/") for line in lines if line.startswith("0::/")]
    return Path(unified[0]) if unified else Path()


def _quota(*files: Path) -> Iterator[int]:
    try:
        quota, period = (int(word) for file in files for word in file.read_text().split())
    except (OSError, ValueError):  # no such controller, or "max": no limit
        return
    if quota > 0 and period > 0:
        yield -(-quota // period)
