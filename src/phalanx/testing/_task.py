"""What a rank process is sent: a function by reference, its arguments, the caller's environment.

Functions travel as module and qualified name and are imported on the other side, with pytest's
assertion rewriting if the caller had it.

Arguments and results are pickled. This is the one place in this package where pickles are read.
It is safe because they travel only between a process and its own children, over inherited
socket pairs that no other process can open.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import os
import pickle
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import reduce
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from ..errors import InvalidArgument, InvalidType
from ._results import Raised, RankResult, Returned, format_traceback
from .faults import Fault


@dataclass(frozen=True)
class FunctionReference:
    """Where to find a function, in this process or in another."""

    module: str
    qualname: str
    file: str | None
    rewritten: bool
    """Whether pytest has rewritten the module's assertions, so that they explain themselves."""

    @classmethod
    def of(cls, function: Callable[..., Any]) -> FunctionReference:
        """Refer to a function that can be reached by name from its module."""
        module = sys.modules.get(function.__module__)
        for name in (function.__qualname__, f"{function.__qualname__}.body"):
            if module is not None and _find_attribute(module, name) is function:
                file = getattr(module, "__file__", None)
                rewritten = "@pytest_ar" in vars(module)
                return cls(function.__module__, name, file, rewritten)
        raise InvalidArgument(
            f"ranks find their body by name, but {function.__module__}.{function.__qualname__} "
            "is not there; make it a function of the module, and pass what it needs as args"
        )

    def __str__(self) -> str:
        return f"{self.module}.{self.qualname.removesuffix('.body')}"

    def load(self) -> Callable[..., Any]:
        """Find the function, importing its module if need be."""
        found = _find_attribute(self._module(), self.qualname)
        assert callable(found), f"{self} is not there any more"
        return found

    def _module(self) -> ModuleType:
        known = sys.modules.get(self.module)
        if known is not None and getattr(known, "__file__", None) == self.file:
            return known
        if self.file is None:
            return importlib.import_module(self.module)
        return self._from_file(self.file)

    def _from_file(self, file: str) -> ModuleType:
        # By file and not by search: with some of pytest's import modes no search would find it.
        # The packages above it, if they are any, must be there first, for its relative imports.
        package, _, _ = self.module.rpartition(".")
        if package:
            with suppress(ModuleNotFoundError):
                importlib.import_module(package)
        # A script's functions are wanted, not what it does when it is run.
        name = "__ranks_main__" if self.module == "__main__" else self.module
        loader = (_AssertRewritingLoader if self.rewritten else SourceFileLoader)(name, file)
        spec = importlib.util.spec_from_loader(name, loader)
        assert spec is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[self.module] = module
        try:
            loader.exec_module(module)
        except BaseException:
            del sys.modules[self.module]
            raise
        return module


def _find_attribute(module: ModuleType, qualname: str) -> object:
    try:
        return reduce(getattr, qualname.split("."), module)
    except AttributeError:
        return None


class _AssertRewritingLoader(SourceFileLoader):
    """Load a test module the way that pytest does, with assertions that show their values."""

    def get_code(self, fullname: str) -> CodeType:
        """Compile the rewritten source, past the cache of the plain one."""
        from _pytest.assertion.rewrite import rewrite_asserts

        path = self.get_filename(fullname)
        source = Path(path).read_bytes()
        tree = ast.parse(source, path)
        rewrite_asserts(tree, source, path)
        code: CodeType = compile(tree, path, "exec", dont_inherit=True)
        return code


# Ranks share the machine; and a library that starts no threads of its own can be forked safely.
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}

# For every connection to a TCPStore, torch asks a name server about the loopback address, and a
# slow one holds up the ranks for seconds. They need none; and torch need not remark on it.
_NO_NAME_SERVER = {"RES_OPTIONS": "attempts:0", "TORCH_CPP_LOG_LEVEL": "ERROR"}


def rank_environment() -> dict[str, str]:
    """Make the environment of a rank from that of this process."""
    return {**_NO_NAME_SERVER, **os.environ, **_ONE_THREAD}


@dataclass(frozen=True)
class CallerEnvironment:
    """What a body may take for granted to be the same in a rank as in the caller."""

    environ: Mapping[str, str]
    directory: str
    path: Sequence[str]
    argv: Sequence[str]

    @classmethod
    def here(cls) -> CallerEnvironment:
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

    body: FunctionReference
    arguments: bytes
    size: int
    backend: str
    timeout: float
    caller_environment: CallerEnvironment
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


def pack_report(report: RankResult) -> bytes:
    """Pickle a report, or one that says why it cannot be."""
    # Not the pickler of multiprocessing: torch teaches that one to share a tensor's memory.
    try:
        return pickle.dumps(report)
    except Exception as error:  # noqa: BLE001 - a result's __reduce__ may raise anything
        assert isinstance(report.outcome, Returned)
        kind = type(report.outcome.value).__qualname__
        problem = InvalidType(f"the result, of type {kind}, cannot be sent back: {error}")
        return pickle.dumps(RankResult(Raised(format_traceback(problem))))


def unpack_report(packed: bytes) -> RankResult:
    """Unpickle a report, or make one that says why it cannot be."""
    try:
        report: RankResult = pickle.loads(packed)  # noqa: S301 - see the module's docstring
        return report
    except Exception as error:  # noqa: BLE001 - a result's constructor may raise anything
        return RankResult(Raised(f"its result cannot be read here\n{format_traceback(error)}"))


def unpack_task(packed: bytes) -> Task:
    """Unpickle a task."""
    task: Task = pickle.loads(packed)  # noqa: S301 - see the module's docstring
    return task
