"""Processes that keep the cores busy, for measuring under competition."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator

__all__ = ["busy_cores"]

_SPIN = """
import os, sys
os.sched_setaffinity(0, {int(sys.argv[1])})
print(flush=True)
while True:
    pass
"""


@contextlib.contextmanager
def busy_cores() -> Iterator[None]:
    """Keep one process spinning on every core that this one may use."""
    with contextlib.ExitStack() as stack:
        for core in sorted(os.sched_getaffinity(0)):
            spinner = subprocess.Popen(
                [sys.executable, "-S", "-c", _SPIN, str(core)], stdout=subprocess.PIPE
            )
            stack.enter_context(spinner)  # last of all, it waits for the end
            stack.callback(spinner.kill)
            assert spinner.stdout is not None
            spinner.stdout.readline()  # it spins
        yield
