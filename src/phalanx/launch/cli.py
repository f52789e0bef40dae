"""The command line: `phalanx run`, `phalanx doctor`, `phalanx mesh`, `phalanx checkpoint`.

Importing this module must not import torch, so that `phalanx run` starts at once. Each command
imports what only it needs.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from ..errors import MisuseError, RanksFailed
from . import _job
from . import run as run_ranks
from ._checkpoint_cli import checkpoint
from ._job import GRACE, LINGER, TORCHRUN_OPTIONS, RankCount
from ._outcome import describe

__all__ = ["main"]


_EXAMPLES = """\b
Examples:
  phalanx run -n 4 train.py --lr 0.1
  phalanx run -n auto -m package.train
  phalanx run -n 4 --drop-in train.py
  phalanx run -n 4 --max-restarts 3 train.py
  phalanx run -n 8 --nnodes 2 --rdzv-endpoint host0:29400 train.py
"""

_MESH_EXAMPLES = """\b
Examples:
  phalanx mesh 8x16x8 --names dp,pp,tp --rank 513
  phalanx mesh 8x16x8 --names dp,pp,tp --rank 513 --hosts 128
  phalanx mesh 2x4 --hosts 2 --draw --svg mesh.svg
"""


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="phalanx", message="phalanx %(version)s")
def main() -> None:
    """Data-parallel training for PyTorch.

    \b
    phalanx run -n 4 train.py       run a script on four ranks
    phalanx doctor                  check this machine and measure its backends
    phalanx mesh 8x16x8 --rank 513  show a rank's coordinates and groups in a mesh
    phalanx checkpoint ls run       list checkpoints; show, verify, diff, prune
    """


main.add_command(checkpoint)


def _ranks(_ctx: click.Context, _param: click.Parameter, value: str) -> RankCount:
    if value == "auto":
        return "auto"
    if not value.isdecimal() or int(value) < 1:
        raise click.BadParameter(f"must be 'auto' or a positive integer, got {value!r}")
    return int(value)


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
    metavar="N",
    help="Number of ranks; 'auto' for one per usable core.",
)
@click.option("-m", "--module", is_flag=True, help="SCRIPT is a module, as in python -m.")
@click.option(
    "--drop-in",
    is_flag=True,
    help="Run a script for torch on phalanx: on CPUs, replace Gloo and torch's DDP in it.",
)
@click.option(
    "--max-restarts",
    type=click.IntRange(min=0),
    default=0,
    metavar="N",
    help="Restart all ranks up to N times after a failure.",
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

    --drop-in sets PHALANX_DROP_IN=1; see `phalanx doctor --drop-in SCRIPT`.

    Forwards SIGTERM, SIGINT and SIGHUP to the ranks, which have --grace seconds to save a
    checkpoint. If all of them exit through phalanx.checkpoint.PreemptionGuard, the exit code is
    75: run the job again. A signal that is ignored at the start (SIGHUP under nohup, SIGINT in a
    background job) stays ignored; use SIGTERM there.

    With any of the options from --nnodes to --master-port, torchrun takes over. It has no
    --prefix, --linger and --full-tracebacks.
    """
    torchrun_args = _job.torchrun_options(**{name: options.pop(name) for name in TORCHRUN_OPTIONS})
    with _errors_as_usage():
        if torchrun_args:
            _reject_launcher_options(torchrun_args[0].partition("=")[0])
            shared = {name: options[name] for name in ("ranks", "module", "max_restarts")}
            command = _job.torchrun_command(
                script, args, torchrun_args=torchrun_args, grace=grace, **shared
            )
            _job.exec_torchrun(command, ranks=options["ranks"], drop_in=options["drop_in"])
        grace = GRACE if grace is None else grace
        outcome = run_ranks(script, args, grace=grace, check=False, **options)
    if outcome.preempted:
        click.secho(f"phalanx: {describe(outcome)}", err=True, bold=True, color=_colour())
    elif outcome.exit_code:
        _print_failure(describe(outcome))
    click.get_current_context().exit(outcome.exit_code)


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
