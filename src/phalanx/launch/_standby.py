"""A warm standby: a process that has imported torch and waits to become a rank of an elastic run.

``phalanx run --elastic --standby`` keeps one. A new interpreter takes seconds to import torch, and
torch's compiler with the first optimizer; a standby has done that before it is needed. The
supervisor then sends it, on its channel, the environment of the rank that it becomes, and it runs
the script as ``python SCRIPT`` would have.

What is imported early finds the environment that the launcher has set, without the variables of a
rank. A script that sets variables itself may do so before it imports torch, which reads some of
them once. The first workers report such variables, and then there is no standby: see `ReplaceLost`.

`main` runs as a script, with nothing but the standard library until it preloads. Its module is not
``__main__`` any more when the user's script runs.
"""

from __future__ import annotations

import builtins
import io
import json
import os
import pkgutil
import runpy
import sys
import zipfile
from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.machinery import SourceFileLoader
from types import ModuleType, TracebackType

PRELOADED = ("torch", "phalanx.elastic", "torch._dynamo")
"""What every worker imports: the last one with its first optimizer."""
_CHUNK = 1 << 16


def standby_command(command: Sequence[str], descriptor: int) -> list[str]:
    """Return the command of a standby for a command of `python_command`."""
    python, *target = command
    return [python, __file__, str(descriptor), *target]


def encode_assignment(before: Mapping[str, str], after: Mapping[str, str]) -> bytes:
    """Return the message that changes the environment of a standby into that of a rank.

    A standby has no variables that ranks lack.
    """
    assert before.keys() <= after.keys()
    changes = {name: value for name, value in after.items() if before.get(name) != value}
    return json.dumps(changes).encode() + b"\n"


def main() -> None:
    """Prepare, wait for an assignment, and run the script."""
    descriptor, *target = sys.argv[1:]
    os.set_inheritable(int(descriptor), False)
    is_module = target[0] == "-m"
    name, *args = target[1:] if is_module else target
    is_archive = not is_module and zipfile.is_zipfile(name)
    if is_archive:
        sys.path[0] = name
    elif not sys.flags.safe_path:  # otherwise there is no entry for the script
        sys.path[0] = _current_directory() if is_module else _directory_of(name)
    # If this raises, modules are half imported, and the standby ends: the script would fail where a
    # new process might not.
    for each in PRELOADED:
        import_module(each)
    os.environ.update(_await_assignment(int(descriptor)))
    # torch was imported without PHALANX_ELASTIC, so its entry point has not done this.
    import_module("phalanx_autoload").refuse_rendezvous()
    if os.environ["RANK"] != "0":  # only rank 0 has the terminal
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.close(null)
    sys.excepthook = _print_error
    sys.argv[:] = [name, *args]
    sys.orig_argv[1:] = target
    main_module = ModuleType("__main__")
    main_module.__annotations__ = {}  # as in a new interpreter
    # multiprocessing has imported the second name for the first.
    sys.modules["__main__"] = sys.modules["__mp_main__"] = main_module
    if is_module:
        runpy._run_module_as_main(name)  # type: ignore[attr-defined]  # what `python -m` calls
    elif is_archive:
        runpy._run_module_as_main("__main__", alter_argv=False)  # type: ignore[attr-defined]
    else:
        # Not abspath(): "link/../train.py" may be another file than "train.py".
        path = os.path.join(_current_directory(), name)
        _run_script(path, vars(main_module))


def _current_directory() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError:  # it was deleted
        return ""


def _directory_of(script: str) -> str:
    return os.path.dirname(os.path.realpath(script))


def _await_assignment(descriptor: int) -> dict[str, str]:
    """Read the environment of the rank to become; exit if the supervisor is gone."""
    line = b""
    while not line.endswith(b"\n"):
        data = os.read(descriptor, _CHUNK)
        if not data:
            os._exit(0)
        line += data
    changes: dict[str, str] = json.loads(line)
    return changes


def _run_script(path: str, names: dict[str, object]) -> None:
    """Run a file of source or byte code with the names of a module."""
    names |= {
        "__file__": path,
        "__cached__": None,
        "__builtins__": builtins,
        "__loader__": SourceFileLoader("__main__", path),
    }
    with io.open_code(path) as file:
        code = pkgutil.read_code(file)
    if code is None:
        with io.open_code(path) as file:
            code = compile(file.read(), path, "exec", dont_inherit=True)
    exec(code, names)  # noqa: S102 - as the interpreter does


def _print_error(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """Print an uncaught exception without the frames that called the script."""
    own = {__file__, runpy.__file__, "<frozen runpy>"}
    while trace is not None and trace.tb_frame.f_code.co_filename in own:
        trace = trace.tb_next
    sys.__excepthook__(kind, error.with_traceback(trace), trace)


if __name__ == "__main__":
    main()
