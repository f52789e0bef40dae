"""The command line: `phalanx run`, `ps`, `scale`, `doctor`, `mesh` and `checkpoint`.

Importing this module must not import torch, so that `phalanx run` starts at once. Each command
imports what only it needs.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import click
from click.core import ParameterSource

from .._formatting import format_age, format_count, format_ranks, format_table
from ..errors import MisuseError, RanksFailed
from . import _job
from . import run as run_ranks
from ._checkpoint_cli import checkpoint
from ._job import GRACE, LINGER, TORCHRUN_OPTIONS, RankCount
from ._outcome import describe
from ._restart_policy import MAX_RANKS

__all__ = ["main"]


_EXAMPLES = """\b
Examples:
  phalanx run -n 4 train.py --lr 0.1
  phalanx run -n auto -m package.train
  phalanx run -n 4 --drop-in train.py
  phalanx run -n 4 --max-restarts 3 train.py
  phalanx run -n 2:4 --elastic train.py
  phalanx run -n 8 --nnodes 2 --rdzv-endpoint host0:29400 train.py
"""

_MESH_EXAMPLES = """\b
Examples:
  phalanx mesh 8x16x8 --names dp,pp,tp --rank 513
  phalanx mesh 8x16x8 --names dp,pp,tp --rank 513 --hosts 128
  phalanx mesh 2x4 --hosts 2 --draw --svg mesh.svg
"""


_MODES = {
    "elastic": "for an elastic run",
    "standby": "for a run with a standby",
    "drop_in": "for a run with the drop-in",
}
"""Options of `phalanx run` without which a script runs, too, but differently."""


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="phalanx", message="phalanx %(version)s")
def main() -> None:
    """Data-parallel training for PyTorch.

    \b
    phalanx run -n 4 train.py       run a script on four ranks
    phalanx ps                      list elastic runs
    phalanx scale RUN 8             change the number of ranks of one
    phalanx doctor                  check this machine and measure its backends
    phalanx mesh 8x16x8 --rank 513  show a rank's coordinates and groups in a mesh
    phalanx checkpoint ls run       list checkpoints; show, verify, diff, prune
    """


main.add_command(checkpoint)


class _RanksOption(NamedTuple):
    """The value of -n: N, or MIN:N for an elastic run."""

    ranks: RankCount
    min_ranks: int | None = None


def _ranks(_ctx: click.Context, _param: click.Parameter, value: str) -> _RanksOption:
    minimum, separator, number = value.rpartition(":")
    words = ([minimum] if separator else []) + ([number] if number != "auto" else [])
    # int() raises for thousands of digits.
    if any(word.isdecimal() and (len(word) > 9 or int(word) > MAX_RANKS) for word in words):
        raise click.BadParameter(f"the number of ranks must be at most {MAX_RANKS}")
    if not all(word.isdecimal() and int(word) >= 1 for word in words):
        raise click.BadParameter(
            f"must be N, MIN:N or 'auto', with positive integers, got {value!r}"
        )
    ranks: RankCount = "auto" if number == "auto" else int(number)
    if separator and ranks != "auto" and int(minimum) > ranks:
        raise click.BadParameter(f"MIN must not be greater than N, got {value!r}")
    return _RanksOption(ranks, int(minimum) if separator else None)


# Everything after the script's name is an argument of the script.
@main.command(
    epilog=_EXAMPLES,
    short_help="Run a script on several ranks and supervise them.",
    context_settings={"allow_interspersed_args": False},
)
@click.option(
    "-n",
    "--nproc-per-node",
    "ranks",
    required=True,
    callback=_ranks,
    metavar="[MIN:]N",
    help="Number of ranks; 'auto' for one per usable core. With --elastic, the run pauses while "
    "fewer than MIN ranks are members (default: 1).",
)
@click.option("-m", "--module", is_flag=True, help="SCRIPT is a module, as in python -m.")
@click.option(
    "--drop-in",
    is_flag=True,
    help="Run a script for torch on phalanx: on CPUs, replace Gloo and torch's DDP in it.",
)
@click.option(
    "--elastic",
    is_flag=True,
    help="Replace ranks that die while the others go on.",
)
@click.option(
    "--standby",
    is_flag=True,
    help="With --elastic, keep a process ready that has imported torch, so that a lost rank is "
    "replaced sooner.",
)
@click.option(
    "--max-restarts",
    type=click.IntRange(min=0),
    metavar="N",
    help="Restart all ranks up to N times after a failure (default: 0). With --elastic, the limit "
    "on replacements and full restarts together (default: none).",
)
@click.option(
    "--prefix/--no-prefix", default=True, help="Print the rank before each line (the default)."
)
@click.option(
    "--full-tracebacks",
    is_flag=True,
    help="Show unchanged tracebacks: with internal frames, and repeated on every rank.",
)
@click.option(
    "--grace",
    type=click.FloatRange(min=0),
    metavar="SECONDS",
    help=f"Time between asking a rank to stop and killing it (default: {GRACE:g}).",
)
@click.option(
    "--linger",
    type=click.FloatRange(min=0),
    default=LINGER,
    metavar="SECONDS",
    help=f"Time that the other ranks have to report after one failed (default: {LINGER:g}).",
)
@click.option("--nnodes", metavar="N[:MAX]", help="Number of machines.")
@click.option("--node-rank", type=int, metavar="K", help="Rank of this machine.")
@click.option("--rdzv-endpoint", metavar="HOST:PORT", help="Rendezvous endpoint.")
@click.option("--rdzv-backend", metavar="NAME", help="Rendezvous backend: c10d, static.")
@click.option("--rdzv-id", metavar="ID", help="Rendezvous id, equal on all machines.")
@click.option("--master-addr", metavar="HOST", help="Address of machine 0, with --node-rank.")
@click.option("--master-port", type=int, metavar="PORT", help="Free port on machine 0.")
@click.argument("script")
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def run(*, script: str, args: tuple[str, ...], grace: float | None, **options: Any) -> None:
    """Run SCRIPT on N ranks of this machine and supervise them.

    Sets RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and so on, as torchrun does, and divides the
    cores between the ranks (OMP_NUM_THREADS, unless it is set). On a machine without accelerators
    also sets ACCELERATE_USE_CPU, which Accelerate needs to train one model on all ranks. When a
    rank fails, shows its traceback, stops the others, and exits with its exit code.

    --elastic is for scripts that train with phalanx.elastic.ElasticRun. A rank that is killed or
    crashes is replaced; one that raises an exception fails the job as usual. `phalanx scale`
    changes the number of ranks. MASTER_ADDR and MASTER_PORT are not set.

    --drop-in sets PHALANX_DROP_IN=1; see `phalanx doctor --drop-in SCRIPT`.

    Forwards SIGTERM, SIGINT and SIGHUP to the ranks, which have --grace seconds to save a
    checkpoint. If all of them exit through phalanx.checkpoint.PreemptionGuard, or leave an
    elastic run, the exit code is 75: run the job again. A signal that is ignored at the start
    (SIGHUP under nohup, SIGINT in a background job) stays ignored; use SIGTERM there.

    With any of the options from --nnodes to --master-port, torchrun takes over. It has no
    --prefix, --linger and --full-tracebacks.
    """
    torchrun_args = _job.torchrun_options(**{name: options.pop(name) for name in TORCHRUN_OPTIONS})
    options |= options.pop("ranks")._asdict()
    _check_elastic_options(torchrun_args, options)
    _note_misplaced_options(script, args, options)
    with _errors_as_usage():
        if torchrun_args:
            _reject_launcher_options(torchrun_args[0].partition("=")[0])
            command = _job.torchrun_command(
                script,
                args,
                torchrun_args=torchrun_args,
                ranks=options["ranks"],
                module=options["module"],
                max_restarts=options["max_restarts"] or 0,
                grace=grace,
            )
            _job.exec_torchrun(command, ranks=options["ranks"], drop_in=options["drop_in"])
        grace = GRACE if grace is None else grace
        outcome = run_ranks(script, args, grace=grace, check=False, **options)
    if outcome.preempted:
        click.secho(f"phalanx: {describe(outcome)}", err=True, bold=True, color=_colour())
    elif outcome.exit_code:
        _print_failure(describe(outcome))
    click.get_current_context().exit(outcome.exit_code)


def _check_elastic_options(torchrun_args: Sequence[str], options: Mapping[str, Any]) -> None:
    if not options["elastic"]:
        if options["min_ranks"] is not None:
            raise click.UsageError("-n MIN:N is for elastic runs: add --elastic")
        if options["standby"]:
            raise click.UsageError("--standby is for elastic runs: add --elastic")
        return
    if torchrun_args:
        option = torchrun_args[0].partition("=")[0]
        raise click.UsageError(
            f"--elastic cannot be used with {option}: elastic runs are on one machine"
        )
    if options["drop_in"]:
        raise click.UsageError(
            "--elastic cannot be used with --drop-in, which replaces torch's DDP: elastic scripts "
            "use phalanx.elastic.ElasticRun"
        )


def _note_misplaced_options(script: str, args: Sequence[str], options: Mapping[str, Any]) -> None:
    """Print a note if the script is given what may be meant for the launcher."""
    for name, purpose in _MODES.items():
        option = f"--{name.replace('_', '-')}"
        if option in args and not options[name]:
            click.echo(
                f"phalanx: note: {option} after the script is an argument of the script; "
                f"put it before {script} {purpose}",
                err=True,
            )
            return  # it says enough about the others, too


def _reject_launcher_options(torchrun_option: str) -> None:
    context = click.get_current_context()
    for option in context.command.params:
        is_given = context.get_parameter_source(option.name or "") is ParameterSource.COMMANDLINE
        if is_given and option.name in ("prefix", "linger", "full_tracebacks"):
            raise click.UsageError(
                f"{'/'.join([*option.opts, *option.secondary_opts])} cannot be used with "
                f"{torchrun_option}: torchrun runs the ranks and has no such option"
            )


def _colour() -> bool | None:
    """Return False if the user wants no colour, else None: colour on a terminal only."""
    return False if os.environ.get("NO_COLOR") else None


@contextmanager
def _errors_as_usage() -> Iterator[None]:
    try:
        yield
    except MisuseError as error:
        raise click.UsageError(str(error)) from error
    except RanksFailed as error:
        _print_failure(str(error))
        raise click.exceptions.Exit(1) from error


def _print_failure(report: str) -> None:
    head, *rest = [line if line[:1] == " " else f"phalanx: {line}" for line in report.splitlines()]
    click.secho(head, err=True, fg="red", bold=True, color=_colour())
    for line in rest:
        click.echo(line, err=True)


@main.command(short_help="List the elastic runs of this user.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def ps(*, as_json: bool) -> None:
    """List the elastic runs of this user on this machine.

    RANKS is how many are members of the group now, and how many there should be.

    Runs are found in XDG_RUNTIME_DIR, /run/user and the temporary directory. One that was started
    with another XDG_RUNTIME_DIR or TMPDIR is listed with the same setting.
    """
    from .._control_client import send_request
    from ._run_directory import find_runs

    found = []
    with _errors_as_usage():
        for run in find_runs():
            known = {"id": run.info.id, "script": run.info.script}
            try:
                found.append({**known, **send_request(run.socket, command="status")})
            except OSError as error:
                found.append({**known, "error": str(error)})
    if as_json:
        click.echo(json.dumps(found))
    elif found:
        header = ("ID", "SCRIPT", "RANKS", "STEP", "UPTIME", "RESTARTS")
        rows = [_describe_run(each) for each in found]
        lines = format_table(header, rows, right="RANKS STEP UPTIME RESTARTS")
        click.echo("\n".join(lines))
    else:
        click.echo("no elastic runs")


def _describe_run(status: Mapping[str, Any]) -> tuple[str, ...]:
    if "ranks" not in status:  # it has just started, is ending, or is suspended
        return status["id"], status["script"], "?", "?", "?", "?"
    step = "-" if status["step"] is None else str(status["step"])
    ranks = f"{status['members']}/{status['ranks']}"
    uptime = format_age(time.time() - status["started"])
    return status["id"], status["script"], ranks, step, uptime, str(status["restarts"])


# -1 is not an option but a number with a better error message.
@main.command(
    short_help="Change the number of ranks of an elastic run.",
    context_settings={"ignore_unknown_options": True},
)
@click.argument("run")
@click.argument("ranks", type=int)
def scale(*, run: str, ranks: int) -> None:
    """Change the number of ranks of an elastic RUN.

    RUN is an id that `phalanx ps` lists, or the beginning of one. New ranks join after a step. When
    the run shrinks, ranks that have not joined leave first, then the highest ranks, each after its
    current step.
    """
    from .._control_client import send_request
    from ._run_directory import find_run

    with _errors_as_usage():
        found = find_run(run)
    try:
        reply = send_request(found.socket, command="scale", ranks=ranks)
    except OSError as error:
        raise click.ClickException(f"run {found.info.id} does not answer: {error}") from error
    if "error" in reply:
        raise click.UsageError(f"run {found.info.id}: {reply['error']}")
    changes = [
        f"{format_ranks(reply[key])} {verb}"
        for key, verb in (("started", "started"), ("leaving", "leaving"))
        if reply[key]
    ]
    limit = reply.get("max_members")  # a launcher of an earlier version does not tell
    if limit is not None and reply["ranks"] > limit:
        spares = format_count(reply["ranks"] - limit, "rank")
        changes.append(f"micro_batches={limit}, so {spares} will wait as hot spares")
    text = "; ".join([format_count(reply["ranks"], "rank"), *changes])
    click.echo(f"{found.info.id}: {text}")


@main.command(short_help="Check this machine and measure its backends.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option(
    "--drop-in",
    "script",
    type=click.Path(exists=True, dir_okay=False),
    metavar="SCRIPT",
    help="Tell what --drop-in would replace in SCRIPT instead. The script is read, not run.",
)
def doctor(*, as_json: bool, script: str | None) -> None:
    """Check this machine, run two ranks on it, and measure the backends.

    The exit code is 1 if a check fails; its line says what to do.
    """
    from ._doctor import Finding, format_finding, format_summary, run_checks, run_drop_in_checks

    def show(finding: Finding) -> None:
        if not as_json:
            click.echo(format_finding(finding), color=_colour())

    if script is None:
        report = run_checks(show)
    else:
        with _errors_as_usage():
            report = run_drop_in_checks(Path(script), show)
    click.echo(report.to_json() if as_json else format_summary(report))
    click.get_current_context().exit(0 if report.ok else 1)


# A shape such as -1x2 is not an option but a mistake with a better error message.
@main.command(
    epilog=_MESH_EXAMPLES,
    short_help="Show a mesh, and a rank's coordinates and groups in it.",
    context_settings={"ignore_unknown_options": True},
)
@click.option("--names", metavar="NAME,...", help="Names of the axes.")
@click.option(
    "--rank", type=int, metavar="RANK", help="Show the coordinates and groups of this rank."
)
@click.option(
    "--hosts", type=int, metavar="N", help="Number of hosts; each has the same number of ranks."
)
@click.option("--draw", is_flag=True, help="Also draw the mesh.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead.")
@click.option(
    "--svg",
    type=click.Path(dir_okay=False, writable=True),
    metavar="FILE",
    help="Write a picture of the mesh to FILE.",
)
@click.argument("shape")
def mesh(*, shape: str, draw: bool, as_json: bool, svg: str | None, **options: Any) -> None:
    """Show the mesh of a SHAPE such as 8x16x8, without starting ranks.

    The last axis varies fastest: its groups have consecutive ranks. Hosts have consecutive ranks
    too, so the groups of the last axes can stay on one host.
    """
    from ..mesh._plan import plan_mesh

    with _errors_as_usage():
        planned = plan_mesh(shape, **options)
    click.echo(planned.to_json() if as_json else planned.text(picture=draw))
    if svg is not None:
        try:
            Path(svg).write_text(planned.draw(svg=True), encoding="utf-8")
        except OSError as error:
            raise click.FileError(svg, error.strerror or str(error)) from error
