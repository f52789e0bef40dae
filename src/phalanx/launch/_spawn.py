"""Call a function on several ranks from a notebook, a REPL, a test or a script.

`spawn` is the launcher's supervisor with another command: each rank is a new interpreter that runs
`main` below, loads the function, calls it and leaves the result to the caller.

The function and the results are pickled by cloudpickle, which copies what was defined
interactively or in ``__main__`` instead of naming it. So ranks never run the caller's script
again. Only this module of the launcher unpickles. It is safe because pickles pass only between a
process and its own children, in anonymous memory (memfd) that they inherit, which has no name
that another user could open. It disappears with the last process, whatever ends it.

A failure is not pickled: a rank prints its traceback, and `RanksFailed` has the text.
"""

from __future__ import annotations

import faulthandler
import inspect
import io
import json
import linecache
import mmap
import os
import pickle
import signal
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any, TextIO, TypeVar

from .._formatting import format_ranks
from ..errors import InvalidState, InvalidType, RanksFailed, RanksTimeout
from ._job import GRACE, LINGER, Job, RankCount, count_ranks
from ._outcome import Outcome, describe
from ._output import Screen
from ._supervisor import standard_descriptors, supervise

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

_Result = TypeVar("_Result")

_STACK_SIGNAL = signal.SIGRTMIN + 6  # one that user code is unlikely to handle
_PROGRAM = "from phalanx.launch._spawn import main; main()"

_is_loading = False  # whether this process is a rank that loads its function


def spawn(
    fn: Callable[..., _Result],
    args: Sequence[Any] = (),
    n: RankCount = "auto",
    *,
    kwargs: Mapping[str, Any] | None = None,
    timeout: float | None = None,
    grace: float = GRACE,
    linger: float = LINGER,
    prefix: bool = True,
    full_tracebacks: bool = False,
    env: Mapping[str, str] | None = None,
) -> list[_Result]:
    """Call ``fn(*args, **kwargs)`` on `n` ranks of this machine and return the results by rank.

    ::

        def train(lr):
            group = phalanx.groups.new_group()  # rank and world size come from the environment
            ...
            return loss

        losses = phalanx.spawn(train, (0.1,), n=4)

    Each rank is a new process with the variables of `phalanx run`. Its output appears in the
    caller's `sys.stdout` and `sys.stderr`. `fn` may be a lambda, a closure, or a function of a
    notebook or script; ranks get copies of it, of the globals that it uses and of its arguments,
    and do not run the script. A function of an imported module is imported by name.

    Args:
        fn: the function. It gets no rank; see `phalanx.groups.new_group` or ``RANK``.
        args: its positional arguments.
        n: how many ranks; ``"auto"`` for one per usable core.
        kwargs: its keyword arguments.
        timeout: seconds that the ranks have, including their start.
        grace: seconds between asking a rank to stop and killing it.
        linger: seconds that the other ranks have to report after one failed.
        prefix: whether to print the rank before each line.
        full_tracebacks: show tracebacks of phalanx errors with internal frames, and on each rank.
        env: environment of the ranks; by default that of this process.

    Raises:
        RanksFailed: a rank failed; the message has its number and traceback. The others have been
            stopped.
        RanksTimeout: ranks did not finish in time; the message has their stacks.
        KeyboardInterrupt: after Ctrl-C, when all ranks have ended.
        InvalidType: `fn` or an argument cannot be pickled, or does not fit.
    """
    if _is_loading:
        raise InvalidState(
            "phalanx.spawn was called while a rank imports the module of its function. "
            'Move the call under `if __name__ == "__main__":`'
        )
    kwargs = {} if kwargs is None else kwargs
    _check_call(fn, args, kwargs)
    if n != "auto" and (not isinstance(n, int) or isinstance(n, bool)):
        raise InvalidType(f"n must be a number of ranks or 'auto', got {n!r}")
    world_size = count_ranks(n)
    environ = dict(os.environ if env is None else env)
    # Reports are recognized by their text, and notebooks set FORCE_COLOR.
    environ.setdefault("PYTHON_COLORS", "0")
    with ExitStack() as stack:
        stack.enter_context(standard_descriptors())
        request = stack.enter_context(_anonymous_file("request"))
        classes = _write_request(request, fn, args, kwargs)
        results = [
            stack.enter_context(_anonymous_file(f"result-{rank}")) for rank in range(world_size)
        ]
        job = Job(
            command=(sys.executable, "-P", "-c", _PROGRAM),
            world_size=world_size,
            max_restarts=0,
            grace=grace,
            linger=linger,
            prefix=prefix,
            full_tracebacks=full_tracebacks,
            environ=environ,
            timeout=timeout,
            stack_signal=_STACK_SIGNAL,
            descriptors=[(request.fileno(), result.fileno()) for result in results],
        )
        screen = Screen(_CallerStream(sys.stdout), _CallerStream(sys.stderr))
        _raise_failure(supervise(job, screen=screen))
        return _read_results(results, classes)


def _check_call(fn: object, args: object, kwargs: object) -> None:
    if not callable(fn):
        raise InvalidType(f"fn must be callable, got {type(fn).__name__}")
    if not isinstance(args, Sequence) or isinstance(args, str | bytes):
        raise InvalidType(
            f"args must be a tuple or list, got {type(args).__name__}; write args=(value,) for one"
        )
    if not isinstance(kwargs, Mapping):
        raise InvalidType(f"kwargs must be a mapping, got {type(kwargs).__name__}")
    try:
        signature = inspect.signature(fn)
    except (ValueError, TypeError):  # some functions in C have none
        return
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        raise InvalidType(
            f"{_name(fn)}{signature} does not accept the given args and kwargs: {error}. "
            "Ranks are not passed as an argument"
        ) from None


def _name(fn: object) -> str:
    return getattr(fn, "__qualname__", None) or type(fn).__qualname__


def _anonymous_file(name: str) -> IO[bytes]:
    return open(os.memfd_create(f"phalanx-spawn-{name}"), "w+b")


@cache
def _picklers() -> tuple[type[Any], type[Any]]:
    """Return the picklers of requests and of results; made on first use, for cloudpickle.

    cloudpickle would send a class of ``__main__`` back as a copy and assign its attributes to the
    caller's class, whose methods would then use copies of the caller's globals. So a result
    refers to such a class by its number in the request.
    """
    import cloudpickle

    class RequestPickler(cloudpickle.Pickler):  # type: ignore[misc]
        def __init__(self, file: IO[bytes]) -> None:
            super().__init__(file)
            self.classes: list[type] = []  # those that are copied

        def reducer_override(self, obj: Any) -> Any:
            reduced = super().reducer_override(obj)
            if isinstance(obj, type) and reduced is not NotImplemented:
                self.classes.append(obj)
            return reduced

    class ResultPickler(cloudpickle.Pickler):  # type: ignore[misc]
        def __init__(self, file: IO[bytes], classes: Sequence[type]) -> None:
            super().__init__(file)
            self._numbers = {id(each): number for number, each in enumerate(classes)}

        def persistent_id(self, obj: Any) -> int | None:
            return self._numbers.get(id(obj)) if isinstance(obj, type) else None

    return RequestPickler, ResultPickler


class _ResultUnpickler(pickle.Unpickler):
    def __init__(self, file: IO[bytes], classes: Sequence[type]) -> None:
        super().__init__(file)
        self._classes = classes

    def persistent_load(self, pid: int) -> type:
        return self._classes[pid]


def _write_request(
    file: IO[bytes], fn: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> list[type]:
    """Write what ranks need to call a function; return the classes that ranks get as copies."""
    pickler_class, _ = _picklers()
    # Sources that were typed in; inspect and tracebacks find them here only.
    typed = {
        name: entry[2]
        for name, entry in [*linecache.cache.items()]
        if len(entry) == 4 and entry[1] is None
    }
    path = [each for each in sys.path if isinstance(each, str)]  # Python ignores the others
    header = {"fn": _name(fn), "path": path, "argv": [*map(str, sys.argv)], "sources": typed}
    file.write(json.dumps(header).encode() + b"\n")
    pickler = pickler_class(file)
    try:
        pickler.dump((fn, tuple(args), dict(kwargs)))
    except Exception as error:
        raise InvalidType(_describe_unpicklable(fn, args, kwargs, error)) from error
    classes = [*pickler.classes]
    pickler.dump(classes)
    file.flush()
    return classes


def _describe_unpicklable(
    fn: Any, args: Sequence[Any], kwargs: Mapping[str, Any], error: Exception
) -> str:
    pickler_class, _ = _picklers()
    parts = {
        f"fn ({_name(fn)}), with the globals and the closure that it uses,": fn,
        **{f"args[{index}] of type {type(each).__name__}": each for index, each in enumerate(args)},
        **{
            f"kwargs[{name!r}] of type {type(each).__name__}": each for name, each in kwargs.items()
        },
    }
    for part, value in parts.items():
        try:
            pickler_class(io.BytesIO()).dump(value)
        except Exception as own:  # noqa: BLE001 - an object's __reduce__ may raise anything
            return f"{part} cannot be pickled: {own}"
    return f"fn and its arguments cannot be pickled: {error}"


class _CallerStream(io.RawIOBase):
    """A binary stream that writes to a text stream: a notebook has no other way to its cells.

    `sys.stdout` may be any object with a `write`. What it raises becomes OSError, which the output
    thread handles; another error would end the thread, and ranks would block in their next print.
    """

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = None if getattr(stream, "closed", False) else stream

    def isatty(self) -> bool:
        try:
            return self._stream is not None and bool(self._stream.isatty())
        except Exception:  # noqa: BLE001
            return False

    def fileno(self) -> int:
        try:
            return super().fileno() if self._stream is None else self._stream.fileno()
        except Exception as error:
            raise OSError(str(error)) from error

    def write(self, data: ReadableBuffer, /) -> int:
        content = bytes(data)
        text = content.decode(errors="replace")
        if self._stream is not None:
            try:
                self._stream.write(_encodable(text, self._stream))
                self._stream.flush()
            except Exception as error:
                raise OSError(str(error)) from error
        return len(content)


def _encodable(text: str, stream: TextIO) -> str:
    encoding = getattr(stream, "encoding", None) or "utf-8"
    return text.encode(encoding, errors="backslashreplace").decode(encoding)


def _raise_failure(outcome: Outcome) -> None:
    failure = RanksTimeout if outcome.first_failure is None and outcome.timeout else RanksFailed
    error = failure(describe(outcome)) if outcome.exit_code else None
    if outcome.signal == signal.SIGINT:
        raise KeyboardInterrupt from (error if outcome.first_failure else None)
    if outcome.signal is not None:
        # The supervisor has taken the signal. Without a handler it ends this process now.
        signal.raise_signal(outcome.signal)
    if error is not None:
        raise error


def _read_results(files: Sequence[IO[bytes]], classes: Sequence[type]) -> list[Any]:
    empty = [rank for rank, file in enumerate(files) if os.fstat(file.fileno()).st_size == 0]
    if empty:
        raise RanksFailed(
            f"{format_ranks(empty)} exited with code 0 before fn returned. "
            "Return from fn instead of calling sys.exit or os._exit"
        )
    results = []
    for rank, file in enumerate(files):
        file.seek(0)  # the position is shared with the rank
        kind = json.loads(file.readline())["type"]
        try:
            results.append(_ResultUnpickler(file, classes).load())
        except Exception as error:
            raise RanksFailed(
                f"the result of rank {rank}, of type {kind}, cannot be unpickled: "
                f"{type(error).__name__}: {error}"
            ) from error
        file.close()  # it holds as much memory as the result
    return results


@dataclass
class _Request:
    fn: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    classes: list[type]


def main() -> None:
    """Run as a rank; the last arguments are the descriptors of the request and the result."""
    sys.excepthook = _print_error
    faulthandler.enable()
    faulthandler.register(_STACK_SIGNAL, chain=True)  # the signal then ends the process
    rank = int(os.environ["RANK"])
    request, result = (int(each) for each in sys.argv[-2:])
    for fd in (request, result):
        os.set_inheritable(fd, False)
    call = _load_request(rank, request)
    value = call.fn(*call.args, **call.kwargs)
    _write_result(rank, result, value, call.classes)


def _print_error(_: type[BaseException], error: BaseException, tb: TracebackType | None) -> None:
    """Print the traceback of an error that ends a rank, without the frames that called fn.

    Python's own hook would not find the lines that were typed in.
    """
    inner = tb and tb.tb_next and tb.tb_next.tb_next  # within _PROGRAM, within main
    traceback.print_exception(error.with_traceback(inner))


def _load_request(rank: int, fd: int) -> _Request:
    """Give this process the caller's import path and load the function."""
    global _is_loading  # noqa: PLW0603 - a property of the process
    # Mapped, since ranks share the position of the descriptor.
    with mmap.mmap(fd, 0, access=mmap.ACCESS_READ) as memory:
        header = json.loads(memory.readline())
        sys.path[:] = header["path"]
        sys.argv[:] = header["argv"]
        for name, lines in header["sources"].items():
            linecache.cache[name] = (sum(map(len, lines)), None, lines, name)
        unpickler = pickle.Unpickler(memory)  # noqa: S301 - see the docstring
        _is_loading = True
        try:
            (fn, args, kwargs), classes = unpickler.load(), unpickler.load()
        except Exception as error:
            error.add_note(f"(rank {rank} was loading {header['fn']} and its arguments)")
            raise
        finally:
            _is_loading = False
    os.close(fd)
    return _Request(fn, args, kwargs, classes)


def _write_result(rank: int, fd: int, value: Any, classes: Sequence[type]) -> None:
    _, pickler_class = _picklers()
    kind = type(value).__qualname__
    with open(fd, "wb") as file:
        file.write(json.dumps({"type": kind}).encode() + b"\n")
        try:
            pickler_class(file, classes).dump(value)
        except Exception as error:
            raise InvalidType(
                f"the result of rank {rank}, of type {kind}, cannot be pickled: {error}"
            ) from error
