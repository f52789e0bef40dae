"""Mutation check: make one small mistake in the library at a time, and see whether a test notices.

`mutants.toml` lists the mutants. Each is one edit in one function: the text `find`, which occurs
exactly once in that function, becomes `replace`. The tests of the mutant's package then run until
the first failure:

    python tools/mutants/run.py --results tools/mutants/after.json

Outcomes:

    caught     a test failed within the time limit
    survived   all tests of the package passed
    undecided  neither happened within the limit; counts as not caught
    broken     pytest itself failed, so the run says nothing; counts as not caught

The files in a mutant's `tests` run first, since one of them probably catches it; the whole package
follows if none did. Both runs share one limit. Results are written after every mutant, and a
second run skips mutants that the results file has already.

pytest runs with `-v` because only then does xdist print a failure when it happens: a failure
counts even if the other worker is still busy when time is up.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import signal
import subprocess
import sys
import time
import tomllib
import uuid
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PACKAGES = ("groups", "mesh", "join", "ddp", "checkpoint", "elastic", "launch", "testing")
LIMIT = 90.0
"""Seconds for the tests of one mutant."""
MARK = "PHALANX_MUTANT_RUN"
"""Environment variable that every process of a test run inherits, by which it is found again."""

FAILURE = re.compile(r"^(?:\[gw\d+\] \[ *\d+%\] )?(?:FAILED|ERROR) (tests/.+?)(?: - .*)?\s*$", re.M)
"""A failed test, both as it happens and in the summary."""


@dataclass(frozen=True)
class Mutant:
    """One mistake."""

    id: str
    package: str
    function: str
    """Qualified name within the file, such as `Reducer.begin`."""
    file: str
    find: str
    replace: str
    breaks: str
    """What goes wrong, in one sentence."""
    tests: tuple[str, ...] = ()
    """Test files to run first, relative to `tests/<package>`; missing ones are left out."""

    @property
    def path(self) -> Path:
        """The file to edit."""
        return ROOT / self.file


def load_mutants(path: Path) -> list[Mutant]:
    """Read the list."""
    entries = tomllib.loads(path.read_text())["mutant"]
    return [Mutant(**{**entry, "tests": tuple(entry.get("tests", ()))}) for entry in entries]


# -- the edit ------------------------------------------------------------------------------


def functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.AST]]:
    """Yield all functions of a module with their qualified names."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ClassDef):
            yield from functions(node, f"{prefix}{node.name}.")
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield f"{prefix}{node.name}", node
            yield from functions(node, f"{prefix}{node.name}.")
        else:
            yield from functions(node, prefix)


def mutated(mutant: Mutant, source: str) -> str:
    """Return the source with the mutant's edit; raise ValueError if it does not fit."""
    lines = source.splitlines(keepends=True)
    # A property and its setter have the same name, so there may be several.
    bodies = [
        (node.lineno - 1, node.end_lineno)
        for name, node in functions(ast.parse(source))
        if name == mutant.function
    ]
    if not bodies:
        raise ValueError(f"{mutant.file} has no function {mutant.function}")
    texts = ["".join(lines[start:end]) for start, end in bodies]
    count = sum(text.count(mutant.find) for text in texts)
    if count != 1:
        raise ValueError(f"{mutant.function} has {count} times {mutant.find!r}, not once")
    [(start, end)] = [body for body, text in zip(bodies, texts, strict=True) if mutant.find in text]
    body = "".join(lines[start:end]).replace(mutant.find, mutant.replace)
    result = "".join(lines[:start]) + body + "".join(lines[end:])
    if result == source:
        raise ValueError("find and replace are the same")
    ast.parse(result)  # raises SyntaxError if the edit makes no sense
    return result


@contextmanager
def applied(mutant: Mutant) -> Iterator[None]:
    """Have the mistake in the file while the block runs."""
    original, times = mutant.path.read_bytes(), mutant.path.stat()
    edited = mutated(mutant, original.decode())
    try:
        mutant.path.write_bytes(edited.encode())
        yield
    finally:
        mutant.path.write_bytes(original)
        os.utime(mutant.path, ns=(times.st_atime_ns, times.st_mtime_ns))


def problems(mutants: list[Mutant]) -> list[str]:
    """List what is wrong with the list itself."""
    counts = Counter(mutant.id for mutant in mutants)
    found = [f"{name}: listed {count} times" for name, count in counts.items() if count > 1]
    for mutant in mutants:
        if mutant.package not in PACKAGES:
            found.append(f"{mutant.id}: no package {mutant.package!r}")
        try:
            mutated(mutant, mutant.path.read_text())
        except (OSError, SyntaxError, ValueError) as error:
            found.append(f"{mutant.id}: {error}")
    return found


# -- the tests -----------------------------------------------------------------------------


def pytest_command(targets: list[str]) -> list[str]:
    """Return the command that runs tests until the first failure."""
    options = ["-x", "-v", "-n", "2", "--dist", "loadfile", "-p", "no:cacheprovider"]
    return [sys.executable, "-m", "pytest", *options, *targets]


def run_tests(targets: list[str], deadline: float) -> tuple[int | None, str]:
    """Run tests; return the exit code, or None if they were cut short, and the output."""
    mark = uuid.uuid4().hex
    # Without bytecode files, no stale one can stand in for an edited source.
    env = {**os.environ, MARK: mark, "PYTHONDONTWRITEBYTECODE": "1"}
    with TemporaryFile() as output:
        process = subprocess.Popen(
            pytest_command(targets),
            cwd=ROOT,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code: int | None = _wait(process, output, deadline)
        finally:
            kill_all(process, mark)
        return code, _text(output)


def _wait(process: subprocess.Popen[bytes], output: IO[bytes], deadline: float) -> int | None:
    """Wait for pytest to end, a test to fail, or time to be up; return pytest's exit code."""
    while True:
        try:
            return process.wait(timeout=min(2.0, max(0.0, deadline - time.monotonic())))
        except subprocess.TimeoutExpired:
            if time.monotonic() >= deadline or FAILURE.search(_text(output)):
                return None


def _text(output: IO[bytes]) -> str:
    return os.pread(output.fileno(), os.fstat(output.fileno()).st_size, 0).decode(errors="replace")


def kill_all(process: subprocess.Popen[bytes], mark: str) -> None:
    """Kill pytest, its process group, and the ranks, which lead sessions of their own."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    while left := marked_processes(mark):
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)


def marked_processes(mark: str) -> list[int]:
    """Find the living processes that were started with a mark in their environment."""
    wanted = f"{MARK}={mark}".encode()
    found = []
    for environ in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):  # it has ended, or is somebody else's; a zombie reads as empty
            if wanted in environ.read_bytes():
                found.append(int(environ.parent.name))
    return found


def check(mutant: Mutant, limit: float) -> dict[str, Any]:
    """Run a mutant's tests, and return the result."""
    folder = f"tests/{mutant.package}"
    hints = [name for test in mutant.tests if (ROOT / (name := f"{folder}/{test}")).exists()]
    began = time.monotonic()
    result: dict[str, Any] = {"outcome": "undecided"}
    with applied(mutant):
        for targets in (hints, [folder]):
            if not targets:
                continue
            code, output = run_tests(targets, began + limit)
            failure = FAILURE.search(output)
            if failure:
                result = {"outcome": "caught", "test": failure[1]}
            elif code == 0:
                result = {"outcome": "survived"}
            elif code is None:
                result = {"outcome": "undecided"}
            else:
                result = {"outcome": "broken", "output": output[-2000:]}
            if result["outcome"] != "survived":
                break
    return {**result, "seconds": round(time.monotonic() - began, 1)}


# -- the command ---------------------------------------------------------------------------


def read_results(path: Path) -> dict[str, Any]:
    """Read results of earlier runs."""
    return json.loads(path.read_text()) if path.exists() else {}


def write_results(path: Path, results: dict[str, Any]) -> None:
    """Write results, in the order of their names."""
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(results, indent=2, sort_keys=True) + "\n")
    temporary.replace(path)


def show_table(mutants: list[Mutant], results: dict[str, Any]) -> None:
    """Print the counts by package, and the mutants that were not caught."""
    outcomes = ("caught", "survived", "undecided", "broken")
    print(f"\n{'package':12}{'mutants':>9}" + "".join(f"{each:>11}" for each in outcomes))
    for package in (*PACKAGES, "all"):
        names = [mutant.id for mutant in mutants if package in (mutant.package, "all")]
        counts = Counter(results[name]["outcome"] for name in names if name in results)
        print(f"{package:12}{len(names):9}" + "".join(f"{counts[each]:11}" for each in outcomes))
    for mutant in mutants:
        outcome = results.get(mutant.id, {}).get("outcome", "not run")
        if outcome != "caught":
            print(f"{outcome}: {mutant.id} ({mutant.function}): {mutant.breaks}")


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Check that the tests notice small mistakes.")
    parser.add_argument("--only", action="append", metavar="ID", help="only this mutant")
    parser.add_argument("--package", action="append", choices=PACKAGES, help="only this package")
    parser.add_argument("--list", action="store_true", help="list the mutants, and run nothing")
    parser.add_argument("--check", action="store_true", help="check the list, and run nothing")
    parser.add_argument("--table", action="store_true", help="show the results, and run nothing")
    parser.add_argument("--again", action="store_true", help="also run what has a result already")
    parser.add_argument("--results", type=Path, default=HERE / "results.json", metavar="FILE")
    parser.add_argument("--limit", type=float, default=LIMIT, metavar="SECONDS")
    return parser.parse_args()


def main() -> int:
    """Run the mutants that were asked for."""
    arguments = parse_arguments()
    every = load_mutants(HERE / "mutants.toml")
    wrong = problems(every)
    print("\n".join(wrong), end="\n" if wrong else "", file=sys.stderr)
    if arguments.check or wrong:
        print(f"{len(every)} mutants, {len(wrong)} problems")
        return 1 if wrong else 0
    chosen = [
        mutant
        for mutant in every
        if (not arguments.only or mutant.id in arguments.only)
        and (not arguments.package or mutant.package in arguments.package)
    ]
    if arguments.list:
        for mutant in chosen:
            print(f"{mutant.id:42} {mutant.function:42} {mutant.breaks}")
        return 0
    if not arguments.table:
        # A signal must not leave a mistake in the source: as an exception it passes all `finally`.
        signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
        for mutant in chosen:
            results = read_results(arguments.results)
            if mutant.id in results and not arguments.again:
                continue
            result = check(mutant, arguments.limit)
            write_results(arguments.results, {**read_results(arguments.results), mutant.id: result})
            told = f" by {result['test']}" if "test" in result else ""
            print(f"{mutant.id}: {result['outcome']}{told} ({result['seconds']} s)", flush=True)
    results = read_results(arguments.results)
    if arguments.table or not arguments.only:
        show_table(chosen, results)
    return 0 if all(results[m.id]["outcome"] == "caught" for m in chosen if m.id in results) else 1


if __name__ == "__main__":
    sys.exit(main())
