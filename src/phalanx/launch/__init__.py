"""Start ranks on this machine and see to it that they end together.

The command line is `phalanx run`; `run` is the same for programs. Nothing in this package imports
torch into the launcher: it has to be there at once, and to stay out of the ranks' way.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping, Sequence

from ..errors import RanksFailed
from ._job import GRACE, LINGER, Job, Ranks, count_ranks, python_command
from ._outcome import Outcome, RankExit, describe
from ._output import OutputSink, Screen
from ._supervisor import supervise

__all__ = ["Outcome", "RankExit", "run"]


def run(
    script: str | os.PathLike[str],
    args: Sequence[str] = (),
    *,
    ranks: Ranks,
    module: bool = False,
    max_restarts: int = 0,
    grace: float = GRACE,
    linger: float = LINGER,
    prefix: bool = True,
    full_tracebacks: bool = False,
    env: Mapping[str, str] | None = None,
    stdout: OutputSink | None = None,
    stderr: OutputSink | None = None,
    check: bool = True,
) -> Outcome:
    """Run a script on several ranks of this machine and return how they ended.

    `script` is a path, or a module's name with `module`. `ranks` may be ``"auto"``: one per core.
    `max_restarts` is how often all are started again when one has failed. A rank that is asked to
    end is killed after `grace` seconds. When one has failed, the others get `linger` seconds to
    say what it did to them. Tracebacks of errors of phalanx are shown without internal frames, and
    once if ranks raise the same, unless `full_tracebacks`. `env` replaces this process's
    environment. `stdout` and `stderr`, both unbuffered, replace descriptors 1 and 2.

    With `check`, a failure raises `RanksFailed`, which says who was first and why, and Ctrl-C
    raises `KeyboardInterrupt`; without, look at the outcome. Ranks that were asked to stop and
    have saved their work have not failed: `Outcome.stopped` tells.
    """
    environ = dict(os.environ if env is None else env)
    job = Job(
        command=python_command(script, args, module=module, environ=environ),
        ranks=count_ranks(ranks),
        max_restarts=max_restarts,
        grace=grace,
        linger=linger,
        prefix=prefix,
        full_tracebacks=full_tracebacks,
        environ=environ,
    )
    screen = Screen(stdout or _descriptor(1), stderr or _descriptor(2))
    outcome = supervise(job, screen=screen)
    if check and outcome.exit_code and not outcome.stopped:
        was_interrupted = outcome.first is None and outcome.signal == signal.SIGINT
        raise KeyboardInterrupt if was_interrupted else RanksFailed(describe(outcome))
    return outcome


def _descriptor(fd: int) -> OutputSink:
    return open(fd, "wb", buffering=0, closefd=False)


def __dir__() -> list[str]:
    # What is imported to make this package is no part of it; a module of it is, once it is loaded.
    loaded = [name for name in globals() if f"{__name__}.{name}" in sys.modules]
    return sorted({*__all__, *loaded})
