"""What a rank process is sent: a body by reference, its arguments, and the caller's surroundings.

Tasks and reports are pickled. That is against the rule that nothing unpickles what came from a
wire, and safe here: they travel only between a process and the children that it started, of the
same user on the same machine, over socket pairs that nobody else can open.
"""

from __future__ import annotations

import os
import pickle
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ..errors import InvalidType
from ._function_reference import Reference
from ._outcome import Raised, Report, Returned, describe
from .faults import Fault

__all__ = [
    "Surroundings",
    "Task",
    "pack_arguments",
    "pack_report",
    "pack_task",
    "rank_environment",
    "unpack_report",
    "unpack_task",
    "unpacked_arguments",
]


# Ranks share the machine; and a library that starts no threads of its own can be forked safely.
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}

# For every connection to a TCPStore, torch asks a name server about the loopback address, and a
# slow one holds up the ranks for seconds. They need none; and torch need not remark on it.
_NO_NAME_SERVER = {"RES_OPTIONS": "attempts:0", "TORCH_CPP_LOG_LEVEL": "ERROR"}


def rank_environment() -> dict[str, str]:
    """Make the environment of a rank from that of this process."""
    return {**_NO_NAME_SERVER, **os.environ, **_ONE_THREAD}


@dataclass(frozen=True)
class Surroundings:
    """What a body may take for granted to be the same in a rank as in the caller."""

    environ: Mapping[str, str]
    directory: str
    path: Sequence[str]
    argv: Sequence[str]

    @classmethod
    def here(cls) -> Surroundings:
        """Describe those of this process."""
        return cls(rank_environment(), os.getcwd(), tuple(sys.path), tuple(sys.argv))

    def enter(self) -> None:
        """Make this process like the one described, whatever the last body did to it."""
        for name in os.environ.keys() - self.environ.keys():
            del os.environ[name]
        os.environ.update(self.environ)
        os.chdir(self.directory)
        sys.path[:] = self.path
        sys.argv[:] = self.argv


@dataclass(frozen=True)
class Task:
    """One rank's part of a run."""

    body: Reference
    arguments: bytes
    size: int
    backend: str
    timeout: float
    surroundings: Surroundings
    rank: int = 0
    port: int = 0
    """Where the store of the run listens on this machine."""
    prefix: str = ""
    """What keeps the keys of this run apart from those of others."""
    faults: tuple[Fault, ...] = ()
    generation: int = 0
    """Grows when a rank process is replaced."""


def pack_task(task: Task) -> bytes:
    """Pickle a task."""
    return pickle.dumps(task)


def pack_arguments(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bytes:
    """Pickle a body's arguments, and the caller's warning filters with them."""
    try:
        return pickle.dumps((tuple(args), dict(kwargs), list(warnings.filters)))
    except Exception as error:
        raise InvalidType(
            f"an argument of the body cannot be sent to the ranks: {error}"
        ) from error


@contextmanager
def unpacked_arguments(packed: bytes) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Unpickle a body's arguments, and apply the caller's warning filters."""
    args, kwargs, filters = pickle.loads(packed)  # noqa: S301 - see the module's docstring
    with warnings.catch_warnings():
        warnings.resetwarnings()
        warnings.filters[:] = filters  # type: ignore[index]
        yield args, kwargs


def pack_report(report: Report) -> bytes:
    """Pickle a report, or one that says why it cannot be."""
    # Not the pickler of multiprocessing: torch teaches that one to share a tensor's memory.
    try:
        return pickle.dumps(report)
    except Exception as error:  # noqa: BLE001 - a result's __reduce__ may raise anything
        assert isinstance(report.outcome, Returned)
        kind = type(report.outcome.value).__qualname__
        problem = InvalidType(f"the result, of type {kind}, cannot be sent back: {error}")
        return pickle.dumps(Report(Raised(describe(problem))))


def unpack_report(packed: bytes) -> Report:
    """Unpickle a report, or make one that says why it cannot be."""
    try:
        report: Report = pickle.loads(packed)  # noqa: S301 - see the module's docstring
        return report
    except Exception as error:  # noqa: BLE001 - a result's constructor may raise anything
        return Report(Raised(f"its result cannot be read here\n{describe(error)}"))


def unpack_task(packed: bytes) -> Task:
    """Unpickle a task."""
    task: Task = pickle.loads(packed)  # noqa: S301 - see the module's docstring
    return task
