"""The environment of a rank: variables of the launcher, cores, accelerators. Imports no torch.

``phalanx run``, ``torchrun`` and batch systems describe each rank in environment variables. Only
this module reads them.
"""

from __future__ import annotations

import json
import math
import os
import re
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path

from phalanx.errors import InvalidArgument, InvalidState

__all__ = [
    "ELASTIC_VARIABLE",
    "ElasticEnv",
    "RankEnv",
    "changed_variables",
    "find_accelerator",
    "is_drop_in",
    "is_launched",
    "job_id",
    "launched_rank",
    "local_ranks",
    "read_elastic_env",
    "read_rank_env",
    "refuse_in_elastic_run",
    "usable_cores",
]

_RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE",
                   "MASTER_ADDR", "MASTER_PORT")  # fmt: skip
_OTHER_WORLD_SIZE_VARIABLES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS")
"""The world size as MPI and Slurm name it."""
_JOB_VARIABLES = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "SLURM_JOB_ID")
_PMIX_RANK_VARIABLE = "PMIX_RANK"
"""Set by all PMIx launchers; some of them do not set the world size."""
_DROP_IN_VARIABLE = "PHALANX_DROP_IN"
ELASTIC_VARIABLE = "PHALANX_ELASTIC"
_DEVICE_FILES = {
    "cuda": ("nvidiactl", "nvidia[0-9]*", "dxg", "nvmap"),  # also under WSL and on Jetson
    "hip": ("kfd",),
    "xpu": ("dri/renderD*",),
}
"""By the name in torch's version file: what a machine with such a device has in /dev."""
_VISIBLE_DEVICES = {"cuda": "CUDA_VISIBLE_DEVICES", "hip": "HIP_VISIBLE_DEVICES"}
_ACCELERATOR_PACKAGES = (
    "habana_frameworks", "torch_mlu", "torch_musa", "torch_neuronx", "torch_npu", "torch_sdaa",
    "torch_xla",
)  # fmt: skip
"""Packages that bring a device to torch; nobody installs one without having the device."""


@dataclass(frozen=True, kw_only=True)
class RankEnv:
    """The rank of this process, as its launcher describes it.

    The fields are the variables of the same names; where they differ, the variable is in brackets.
    """

    rank: int
    world_size: int
    local_rank: int | None = None
    """The rank on this machine."""
    local_world_size: int | None = None
    node_rank: int | None = None
    """The rank of this machine (``GROUP_RANK``)."""
    master_addr: str | None = None
    """The host of the store."""
    master_port: int | None = None
    restart_count: int = 0
    """How often the launcher restarted all ranks (``TORCHELASTIC_RESTART_COUNT``)."""
    agent_store: bool = False
    """The launcher hosts the store, every rank is a client (``TORCHELASTIC_USE_AGENT_STORE``)."""


def read_rank_env(environ: Mapping[str, str] = os.environ) -> RankEnv:
    """Read the variables of the launcher; raise `InvalidArgument` if they are missing."""
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


@dataclass(frozen=True, kw_only=True)
class ElasticEnv:
    """A worker of an elastic run, as ``phalanx run --elastic`` describes it (``PHALANX_ELASTIC``).

    A worker is one process. Its rank in the group depends on which other workers are members.
    """

    worker: str
    """The name of the process, unique in the run: ``2.1`` is the first replacement of ``2.0``."""
    store: str
    """The address of the launcher's store, ``host:port``."""
    ranks: int
    """How many workers the launcher has started, or starts, together."""
    min_ranks: int
    """The run pauses while fewer workers are members."""
    has_begun: bool
    """Whether any worker of the run has been a member before this one was started."""
    is_initial: bool
    """Whether the launcher started it with all others, and not to replace or to add a worker."""
    channel: int
    """A descriptor: one end of a socket whose other end the supervisor has. Each line is JSON."""

    def to_variables(self) -> dict[str, str]:
        """Return the variables to start the worker with."""
        return {ELASTIC_VARIABLE: json.dumps(asdict(self))}


def read_elastic_env(environ: Mapping[str, str] = os.environ) -> ElasticEnv | None:
    """Read the description of this worker; None if the run is not elastic."""
    text = _text(environ, ELASTIC_VARIABLE)
    if not text:
        return None
    try:
        return ElasticEnv(**json.loads(text))
    except (TypeError, ValueError) as error:
        raise InvalidArgument(
            f"environment variable {ELASTIC_VARIABLE} is for `phalanx run --elastic` to set, got "
            f"{text!r}"
        ) from error


def refuse_in_elastic_run(call: str) -> None:
    """Raise `InvalidState` for a call that forms a group of the launcher's ranks."""
    if read_elastic_env() is not None:
        raise InvalidState(
            f"{call} is not available under `phalanx run --elastic`: a replacement would wait in "
            "it for ranks that have passed it. ElasticRun forms the groups; instead of collectives "
            "of your own, use run.evaluate(), step.loss, run.is_leader and run.world_size, or "
            "start the script without --elastic"
        )


_HARMLESS_VARIABLES = re.compile(
    "LC_CTYPE|TORCHINDUCTOR_CACHE_DIR|_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR"
    "|KMP_DUPLICATE_LIB_OK|KMP_INIT_AT_FORK|TEARDOWN_CUPTI|DISABLE_CUPTI_LAZY_REINIT"
)
"""What Python, torch's compiler, scikit-learn and torch's profiler set by themselves.

Other variables of the compiler (``TORCHINDUCTOR_*``) change its kernels, and so the bits.
"""


def changed_variables() -> list[str]:
    """Return the variables that this process has set, changed or removed since it started.

    Without those that are known to be set by libraries and not to change what torch computes.
    """
    try:
        text = Path("/proc/self/environ").read_bytes()
    except OSError:
        return []
    if ELASTIC_VARIABLE in os.environ and ELASTIC_VARIABLE.encode() not in text:
        # setproctitle writes its title there.
        return ["unknown variables"]
    entries = [entry.partition(b"=") for entry in text.split(b"\0") if b"=" in entry]
    # Of several entries with one name Python takes the first.
    before = {os.fsdecode(name): os.fsdecode(value) for name, _, value in reversed(entries)}
    names = {
        name for name in before.keys() | os.environ if before.get(name) != os.environ.get(name)
    }
    return sorted(name for name in names if not _HARMLESS_VARIABLES.fullmatch(name))


def launched_rank(environ: Mapping[str, str] = os.environ) -> RankEnv | None:
    """Read the variables of the launcher; None if there is no ``RANK`` or no ``WORLD_SIZE``."""
    return read_rank_env(environ) if {"RANK", "WORLD_SIZE"} <= environ.keys() else None


def job_id(environ: Mapping[str, str] = os.environ) -> str:
    """Return what distinguishes this job from others, the same on all ranks; "" if unknown."""
    return " ".join(f"{name}={environ[name]}" for name in _JOB_VARIABLES if name in environ)


def is_launched(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether a launcher started this process as one of several ranks."""
    if any(_text(environ, name) for name in _RANK_VARIABLES):
        return True
    sizes = {_text(environ, name) for name in _OTHER_WORLD_SIZE_VARIABLES} - {""}
    rank = _text(environ, _PMIX_RANK_VARIABLE)
    return bool(sizes - {"1"}) or rank not in ("", "0") or (rank == "0" and not sizes)


def is_drop_in(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether ``PHALANX_DROP_IN`` is on; raise `InvalidArgument` unless it is 0 or 1."""
    return bool(_number(environ, _DROP_IN_VARIABLE, maximum=1))


def find_accelerator(
    environ: Mapping[str, str] = os.environ, *, dev: Path = Path("/dev")
) -> str | None:
    """Return the kind of accelerator that torch would use on this machine; None if it has none.

    Looks for what torch was built for and for device files, and never starts a driver: a script
    may still choose its devices.
    """
    if sys.platform == "darwin":
        return "mps"
    for kind in _torch_build():
        hidden = environ.get(_VISIBLE_DEVICES.get(kind, ""), "0").strip() in ("", "-1")
        if not hidden and any(any(dev.glob(pattern)) for pattern in _DEVICE_FILES[kind]):
            return kind
    return next((name for name in _ACCELERATOR_PACKAGES if _is_installed(name)), None)


def local_ranks(environ: Mapping[str, str] = os.environ) -> int | None:
    """Return the number of ranks on this machine; None if the launcher does not set it."""
    return _number(environ, "LOCAL_WORLD_SIZE", minimum=1)


def usable_cores(among: int | None = None) -> int:
    """Return the number of cores that affinity and cgroup quota allow, at least 1.

    With `among`, the quota applies to that many cores instead of those of the affinity mask.
    """
    # macOS has no sched_getaffinity.
    affinity = getattr(os, "sched_getaffinity", None)
    allowed = among or (len(affinity(0)) if affinity else os.cpu_count() or 1)
    return max(1, min([allowed, *_quotas()]))


def _required(environ: Mapping[str, str], name: str, **bounds: int) -> int:
    value = _number(environ, name, **bounds)
    if value is None:
        raise InvalidArgument(
            f"{name} is not set: start the script with `phalanx run` or `torchrun`, "
            "or pass store, rank and world_size"
        )
    return value


def _number(
    environ: Mapping[str, str], name: str, *, minimum: int = 0, maximum: int | None = None
) -> int | None:
    text = _text(environ, name)
    if not text:
        return None
    highest = math.inf if maximum is None else maximum
    # isdecimal: int() would also accept "1_0" and "+1".
    if not text.isdecimal() or not minimum <= int(text) <= highest:
        bounds = f"of at least {minimum}" if maximum is None else f"from {minimum} to {maximum}"
        raise InvalidArgument(
            f"environment variable {name} must be a number {bounds}, got {text!r}"
        )
    return int(text)


def _text(environ: Mapping[str, str], name: str) -> str:
    return environ.get(name, "").strip()


def _is_installed(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except ValueError:  # a stub that the program put into sys.modules
        return False


@lru_cache
def _torch_build() -> list[str]:
    """Return which kinds of accelerator the installed torch was built for."""
    spec = find_spec("torch")
    text = ""
    if spec is not None and spec.origin is not None:
        with suppress(OSError):
            text = (Path(spec.origin).parent / "version.py").read_text()
    built = re.findall(r"^(\w+)\s*(?::.*?)?=\s*['\"]", text, flags=re.MULTILINE)
    return [kind for kind in _DEVICE_FILES if kind in built]


@lru_cache  # reading them takes longer than forming a group
def _quotas(
    root: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")
) -> list[int]:
    """Return the core quotas, rounded up, of all cgroups of this process (version 2, then 1)."""
    lines: list[str] = []
    with suppress(OSError):
        lines = membership.read_text().splitlines()
    unified = [line.removeprefix("0::/") for line in lines if line.startswith("0::/")]
    own = Path(*unified[:1])
    # Any ancestor may have a limit. Inside a container `own` may lie outside of what is mounted at
    # `root`; then only `root` exists, which is the container's cgroup.
    places = [[root / directory / "cpu.max"] for directory in (own, *own.parents)]
    places.append([root / "cpu/cpu.cfs_quota_us", root / "cpu/cpu.cfs_period_us"])
    quotas = []
    for files in places:
        with suppress(OSError, ValueError):  # no such controller, or "max": no limit
            quota, period = (int(word) for file in files for word in file.read_text().split())
            if quota > 0 and period > 0:
                quotas.append(-(-quota // period))
    return quotas
