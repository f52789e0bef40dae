"""Start ranks on this machine and supervise them.

`phalanx run` is the command line, `run` the same for programs. The launcher never imports torch:
it must start at once and leave the memory to the ranks.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping, Sequence

from ..errors import InvalidArgument, RanksFailed
from ._job import GRACE, LINGER, Job, RankCount, count_ranks, drop_in_env, python_command
from ._outcome import Outcome, RankExit, describe
from ._output import OutputSink, Screen
from ._supervisor import standard_descriptors, supervise

__all__ = ["Outcome", "RankExit", "run"]


def run(
    script: str | os.PathLike[str],
    args: Sequence[str] = (),
    *,
    ranks: RankCount,
    module: bool = False,
    max_restarts: int | None = None,
    elastic: bool = False,
    min_ranks: int | None = None,
    standby: bool = False,
    grace: float = GRACE,
    linger: float = LINGER,
    prefix: bool = True,
    full_tracebacks: bool = False,
    drop_in: bool = False,
    env: Mapping[str, str] | None = None,
    stdout: OutputSink | None = None,
    stderr: OutputSink | None = None,
    check: bool = True,
) -> Outcome:
    """Run a script on several ranks of this machine and return how they ended.

    Args:
        script: a path, or with `module` the name of a module.
        args: arguments of the script.
        ranks: how many ranks; ``"auto"`` for one per usable core.
        module: whether `script` is a module, as in ``python -m``.
        max_restarts: how often to restart all ranks after a failure; by default not at all. With
            `elastic`, the limit on replacements and full restarts together; by default none.
        elastic: replace ranks that die while the others go on. The script trains with
            `phalanx.elastic.ElasticRun`.
        min_ranks: an elastic run pauses with fewer ranks; by default 1.
        standby: in an elastic run, keep a process ready that has imported torch, so that a lost
            rank is replaced sooner.
        grace: seconds between asking a rank to stop and killing it.
        linger: seconds that the other ranks have to report after one failed.
        prefix: whether to print the rank before each line.
        full_tracebacks: show tracebacks of phalanx errors with internal frames, and on each rank.
        drop_in: replace Gloo and torch's DDP in the ranks, as ``PHALANX_DROP_IN=1`` does.
        env: environment of the ranks; by default that of this process.
        stdout: unbuffered binary stream instead of descriptor 1.
        stderr: unbuffered binary stream instead of descriptor 2.
        check: raise `RanksFailed` after a failure and `KeyboardInterrupt` after Ctrl-C.

    Ranks that saved a checkpoint on request have not failed: see `Outcome.preempted`.
    """
    environ = dict(os.environ if env is None else env)
    drop_in_variables = drop_in_env(environ, drop_in=drop_in)
    if elastic and drop_in_variables:
        raise InvalidArgument(
            "elastic runs have no drop-in: it replaces torch's DDP, and elastic scripts use "
            "phalanx.elastic.ElasticRun"
        )
    if min_ranks is not None and not elastic:
        raise InvalidArgument("min_ranks is for elastic runs: set elastic=True")
    if standby and not elastic:
        raise InvalidArgument("standby is for elastic runs: set elastic=True")
    job = Job(
        command=python_command(script, args, module=module, environ=environ),
        world_size=count_ranks(ranks),
        max_restarts=0 if max_restarts is None and not elastic else max_restarts,
        grace=grace,
        linger=linger,
        prefix=prefix,
        full_tracebacks=full_tracebacks,
        environ={**environ, **drop_in_variables},
        script=os.fspath(script),
        min_ranks=(1 if min_ranks is None else min_ranks) if elastic else None,
        keeps_standby=standby,
    )
    with standard_descriptors():  # a closed stdout or stderr is no reason not to run
        screen = Screen(stdout or _descriptor(1), stderr or _descriptor(2))
        outcome = supervise(job, screen=screen)
    if check and outcome.exit_code and not outcome.preempted:
        was_interrupted = outcome.first_failure is None and outcome.signal == signal.SIGINT
        raise KeyboardInterrupt if was_interrupted else RanksFailed(describe(outcome))
    return outcome


def _descriptor(fd: int) -> OutputSink:
    return open(fd, "wb", buffering=0, closefd=False)


def __dir__() -> list[str]:
    # Only public names and loaded submodules, not what this module imports.
    loaded = [name for name in globals() if f"{__name__}.{name}" in sys.modules]
    return sorted({*__all__, *loaded})
