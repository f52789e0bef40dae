"""The task of a rank process: a function by reference, its arguments, the caller's environment.

Functions are sent as module and qualified name and imported by the rank, with pytest's assertion
rewriting if the caller had it.

Arguments and results are pickled, and only this module of the package unpickles. It is safe
because pickles pass only between a process and its own children, over inherited socket pairs that
no other process can open.
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
from ._results import RankResult, Returned, raised
from .faults import Fault


@dataclass(frozen=True)
class FunctionReference:
    """A function by module and name, which another process can import."""

    module: str
    qualname: str
    file: str | None
    rewritten: bool
    """Whether pytest rewrote the assertions of the module."""

    @classmethod
    def of(cls, function: Callable[..., Any]) -> FunctionReference:
        """Return a reference to a function that is an attribute of its module."""
        module = sys.modules.get(function.__module__)
        for name in (function.__qualname__, f"{function.__qualname__}.body"):
            if module is not None and _find_attribute(module, name) is function:
                file = getattr(module, "__file__", None)
                rewritten = "@pytest_ar" in vars(module)
                return cls(function.__module__, name, file, rewritten)
        raise InvalidArgument(
            f"ranks cannot import {function.__module__}.{function.__qualname__}; "
            "make it a top-level function of its module and pass its data as args"
        )

    def __str__(self) -> str:
        return f"{self.module}.{self.qualname.removesuffix('.body')}"

    def load(self) -> Callable[..., Any]:
        """Return the function; import its module if necessary."""
        module = sys.modules.get(self.module)
        if module is None or getattr(module, "__file__", None) != self.file:
            module = self._import_module()
        function = _find_attribute(module, self.qualname)
        assert callable(function), f"{self} does not exist"
        return function

    def _import_module(self) -> ModuleType:
        if self.file is None:
            return importlib.import_module(self.module)
        # By file: with some of pytest's import modes the module is not on the import path. Its
        # parent packages must be imported first for relative imports.
        package, _, _ = self.module.rpartition(".")
        if package:
            with suppress(ModuleNotFoundError):
                importlib.import_module(package)
        # Import a script without running its main block.
        name = "__ranks_main__" if self.module == "__main__" else self.module
        loader = (_AssertRewritingLoader if self.rewritten else SourceFileLoader)(name, self.file)
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
    """Loads a test module with pytest's assertion rewriting."""

    def get_code(self, fullname: str) -> CodeType:
        """Compile the rewritten source, bypassing the bytecode cache."""
        from _pytest.assertion.rewrite import rewrite_asserts

        path = self.get_filename(fullname)
        source = Path(path).read_bytes()
        tree = ast.parse(source, path)
        rewrite_asserts(tree, source, path)
        code: CodeType = compile(tree, path, "exec", dont_inherit=True)
        return code


# Ranks share the machine, and a library without threads can be forked safely.
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}

# torch asks a name server about the loopback address for every connection to a TCPStore; a slow
# server delays the ranks by seconds. Disable the lookup, and torch's warning about it.
_NO_NAME_SERVER = {"RES_OPTIONS": "attempts:0", "TORCH_CPP_LOG_LEVEL": "ERROR"}


def rank_environment() -> dict[str, str]:
    """Return the environment of a rank, based on that of this process."""
    return {**_NO_NAME_SERVER, **os.environ, **_ONE_THREAD}


@dataclass(frozen=True)
class CallerEnvironment:
    """The process state of the caller that bodies find in their rank."""

    environ: Mapping[str, str]
    directory: str
    path: Sequence[str]
    argv: Sequence[str]

    @classmethod
    def here(cls) -> CallerEnvironment:
        """Return the state of this process."""
        return cls(rank_environment(), os.getcwd(), tuple(sys.path), tuple(sys.argv))

    def enter(self) -> None:
        """Apply the state to this process."""
        for name in os.environ.keys() - self.environ.keys():
            del os.environ[name]
        os.environ.update(self.environ)
        os.chdir(self.directory)
        sys.path[:] = self.path
        sys.argv[:] = self.argv


@dataclass(frozen=True)
class Task:
    """What one rank has to run."""

    body: FunctionReference
    arguments: bytes
    size: int
    backend: str
    timeout: float
    caller_environment: CallerEnvironment
    rank: int = 0
    port: int = 0
    """The port of the store."""
    prefix: str = ""
    """Prefix of the run's keys in the store."""
    faults: tuple[Fault, ...] = ()
    generation: int = 0
    """Increases when a rank process is replaced."""


def pack_arguments(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bytes:
    """Pickle the arguments of a body and the caller's warning filters."""
    try:
        return pickle.dumps((tuple(args), dict(kwargs), list(warnings.filters)))
    except Exception as error:
        raise InvalidType(f"an argument of the body is not picklable: {error}") from error


@contextmanager
def unpacked_arguments(packed: bytes) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Unpickle the arguments of a body and apply the caller's warning filters."""
    args, kwargs, filters = pickle.loads(packed)  # noqa: S301 - see the module's docstring
    with warnings.catch_warnings():
        warnings.resetwarnings()
        warnings.filters[:] = filters  # type: ignore[index]
        yield args, kwargs


def pack_report(report: RankResult) -> bytes:
    """Pickle a result, or an error if it is not picklable."""
    # Not the pickler of multiprocessing: torch makes that one share the memory of tensors.
    try:
        return pickle.dumps(report)
    except Exception as error:  # noqa: BLE001 - a result's __reduce__ may raise anything
        assert isinstance(report.outcome, Returned)
        kind = type(report.outcome.value).__qualname__
        problem = InvalidType(f"the result of type {kind} is not picklable: {error}")
        return pickle.dumps(RankResult(raised(problem)))


def unpack_report(packed: bytes) -> RankResult:
    """Unpickle a result, or return an error if that fails."""
    try:
        report: RankResult = pickle.loads(packed)  # noqa: S301 - see the module's docstring
        return report
    except Exception as error:  # noqa: BLE001 - a result's constructor may raise anything
        return RankResult(raised(error, "result cannot be unpickled"))


def unpack_task(packed: bytes) -> Task:
    task: Task = pickle.loads(packed)  # noqa: S301 - see the module's docstring
    return task
