"""The processes of a rank pool: the template, the rank processes forked from it, and their tasks.

The template imports torch once and then waits. A new rank is a fork of it, which takes
milliseconds where a new interpreter takes seconds, so a rank that died or hung is cheap to
replace. Forking is safe because the template never starts a thread.

The template also reaps the ranks and sends them signals: until it has waited for a rank, that
rank's pid cannot belong to another process.

A rank process waits for a task, runs it, reports, and resets what a body may have changed.

Functions are sent as module and qualified name and imported by the rank, with pytest's assertion
rewriting if the caller had it.

Arguments and results are pickled, and only this module of the package unpickles. It is safe
because pickles pass only between a process and its own children, over inherited socket pairs that
no other process can open.
"""

from __future__ import annotations

import ast
import contextlib
import ctypes
import faulthandler
import gc
import importlib
import importlib.util
import json
import os
import pickle
import random
import selectors
import signal
import socket
import sys
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial, reduce
from importlib.machinery import SourceFileLoader
from multiprocessing.connection import Connection
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from ..errors import InvalidArgument, InvalidType
from ._context import RankContext, run_body
from ._results import RankResult, Returned, error_outcome
from .faults import Fault

# One that neither torch nor a test is likely to use.
DUMP_SIGNAL = signal.SIGRTMIN + 6

_PR_SET_PDEATHSIG = 1

# Ranks share the machine, and a library without threads can be forked safely.
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}

# torch asks a name server about the loopback address for every connection to a TCPStore; a slow
# server delays the ranks by seconds. Disable the lookup, and torch's warning about it.
_NO_NAME_SERVER = {"RES_OPTIONS": "attempts:0", "TORCH_CPP_LOG_LEVEL": "ERROR"}


def rank_environment() -> dict[str, str]:
    return {**_NO_NAME_SERVER, **os.environ, **_ONE_THREAD}


@dataclass(frozen=True)
class FunctionReference:
    """A function by module and name, which another process can import."""

    module: str
    qualname: str
    file: str | None
    rewritten: bool  # whether pytest rewrote the assertions of the module

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
            with contextlib.suppress(ModuleNotFoundError):
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


@dataclass(frozen=True)
class Task:
    """What one rank has to run, and the process state of the caller that the body finds."""

    body: FunctionReference
    arguments: bytes
    size: int
    backend: str
    timeout: float
    rank: int = 0
    port: int = 0  # of the store
    prefix: str = ""  # of the run's keys in the store
    faults: tuple[Fault, ...] = ()
    generation: int = 0  # increases when a rank process is replaced
    environment: Mapping[str, str] = field(default_factory=rank_environment)
    directory: str = field(default_factory=os.getcwd)
    path: Sequence[str] = field(default_factory=lambda: tuple(sys.path))
    argv: Sequence[str] = field(default_factory=lambda: tuple(sys.argv))

    def enter_environment(self) -> None:
        """Give this process the state of the caller."""
        for name in os.environ.keys() - self.environment.keys():
            del os.environ[name]
        os.environ.update(self.environment)
        os.chdir(self.directory)
        sys.path[:] = self.path
        sys.argv[:] = self.argv


def pack_arguments(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bytes:
    """Pickle the arguments of a body and the caller's warning filters."""
    try:
        return pickle.dumps((tuple(args), dict(kwargs), list(warnings.filters)))
    except Exception as error:
        raise InvalidType(f"an argument of the body is not picklable: {error}") from error


def pack_report(report: RankResult) -> bytes:
    """Pickle a result, or an error if it is not picklable."""
    # Not the pickler of multiprocessing: torch makes that one share the memory of tensors.
    try:
        return pickle.dumps(report)
    except Exception as error:  # noqa: BLE001 - a result's __reduce__ may raise anything
        assert isinstance(report.outcome, Returned)
        kind = type(report.outcome.value).__qualname__
        problem = InvalidType(f"the result of type {kind} is not picklable: {error}")
        return pickle.dumps(RankResult(error_outcome(problem)))


def unpack_report(packed: bytes) -> RankResult:
    """Unpickle a result, or return an error if that fails."""
    try:
        report: RankResult = pickle.loads(packed)  # noqa: S301 - see the docstring
        return report
    except Exception as error:  # noqa: BLE001 - a result's constructor may raise anything
        return RankResult(error_outcome(error, "result cannot be unpickled"))


def rank_main(tasks: int, output: int, stacks: int, *, parent: int) -> None:
    """Run tasks until the pool closes the connection."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before prctl
        os._exit(1)
    os.setsid()  # so that its process group has all that a body starts
    os.dup2(output, 1)
    os.dup2(output, 2)
    # The handler is in C, so it also works if the rank is blocked outside of Python.
    faulthandler.enable(stacks)
    faulthandler.register(DUMP_SIGNAL, stacks, all_threads=True)
    with Connection(tasks) as connection:
        while True:
            try:
                task: Task = pickle.loads(connection.recv_bytes())  # noqa: S301 - see the docstring
            except EOFError:
                return
            connect = partial(_connect_to_store, task)
            context = RankContext(
                task.rank, task.size, task.backend, task.timeout, connect, task.generation
            )
            result = run_body(partial(_call_body, task), context, faults=task.faults)
            if not result.is_failure():  # otherwise this process is replaced
                gc.collect()
                # What remains, now that the groups are closed, is permanent. Scanning it after
                # every body would dominate the run.
                gc.freeze()
            connection.send_bytes(pack_report(result))


def _call_body(task: Task, context: RankContext) -> Any:
    task.enter_environment()
    torch.set_num_threads(1)  # ranks share the machine
    torch.manual_seed(0)
    random.seed(0)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(0)
    body = task.body.load()  # first: arguments may refer to its module
    args, kwargs, filters = pickle.loads(task.arguments)  # noqa: S301 - see the docstring
    with warnings.catch_warnings():
        warnings.resetwarnings()
        warnings.filters[:] = filters  # type: ignore[index]
        result = body(context, *args, **kwargs)
    # Garbage of the body must not be the last owner of a group: see `RankContext.keep`.
    gc.collect()
    # Reset torch's state, but not after a failure: the process is replaced then.
    torch.set_grad_enabled(True)
    torch.set_default_dtype(torch.float32)
    if dist.is_initialized():
        dist.destroy_process_group()
    return result


def _connect_to_store(task: Task) -> Store:
    timeout = timedelta(seconds=task.timeout)
    store = TCPStore("127.0.0.1", task.port, wait_for_workers=False, timeout=timeout)
    return PrefixStore(task.prefix, store)


_hosted_stores: list[TCPStore] = []


def host_store(_: RankContext) -> int:
    """Open a store for the life of this process and return its port."""
    _hosted_stores.append(TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False))
    return _hosted_stores[-1].port


def template_main(control: int, preload: list[str]) -> None:
    """Serve the pool until it closes its end of `control`."""
    for name in preload:
        importlib.import_module(name)
    # torch detects the CPU's features at the first conversion and never tries again. A rank whose
    # body has used up its descriptors by then could not convert until the process ends.
    torch.zeros(1).to(torch.float16)
    gc.collect()
    gc.freeze()
    TemplateServer(socket.socket(fileno=control)).serve()
    os._exit(0)  # unloading torch takes a while


class TemplateServer:
    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._ranks: dict[int, int] = {}  # pid to pidfd
        self._selector = selectors.DefaultSelector()
        self._selector.register(control, selectors.EVENT_READ)

    def serve(self) -> None:
        """Fork, signal and reap ranks until the pool disconnects, then kill them."""
        try:
            while True:
                for key, _ in self._selector.select():
                    if key.data is not None:
                        self._reap(key.data)
                        continue
                    message, descriptors, _, _ = socket.recv_fds(self._control, 4096, 3)
                    if not message:
                        return
                    request = json.loads(message)
                    if request["do"] == "fork":
                        self._fork(descriptors)
                    elif request["rank"] in self._ranks:
                        os.kill(request["rank"], request["signal"])
        finally:
            for pid in self._ranks:
                _kill_rank(pid)

    def _fork(self, descriptors: list[int]) -> None:
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                # Close the template's descriptors, or the pool would not notice its death.
                self._selector.close()
                self._control.close()
                for descriptor in self._ranks.values():
                    os.close(descriptor)
                rank_main(*descriptors, parent=parent)
                status = 0
            except BaseException:  # noqa: BLE001 - must not return into the template's loop
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                os._exit(status)
        for descriptor in descriptors:
            os.close(descriptor)
        self._ranks[pid] = os.pidfd_open(pid)
        self._selector.register(self._ranks[pid], selectors.EVENT_READ, pid)
        self._control.send(json.dumps({"forked": pid}).encode())

    def _reap(self, pid: int) -> None:
        descriptor = self._ranks.pop(pid)
        self._selector.unregister(descriptor)
        os.close(descriptor)
        _kill_rank(pid)
        _, status = os.waitpid(pid, 0)
        message = {"ended": pid, "status": os.waitstatus_to_exitcode(status)}
        self._control.send(json.dumps(message).encode())


def _kill_rank(pid: int) -> None:
    """Kill a rank and what it started. Its pid cannot be reused before it is reaped."""
    os.kill(pid, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError):  # it died before setsid
        os.killpg(pid, signal.SIGKILL)
