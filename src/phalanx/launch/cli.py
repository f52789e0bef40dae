"""The command line: `phalanx run`, `phalanx doctor`, `phalanx mesh`, `phalanx checkpoint`.

Importing this module must not import torch: `phalanx run` starts the ranks before anything
else. What a single command needs is imported in that command.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from ..errors import MisuseError, RanksFailed
from . import run as run_ranks
from ._checkpoint_cli import checkpoint
from ._job import GRACE, LINGER, Ranks, TorchrunOptions, exec_torchrun
from ._outcome import describe

__all__ = [
    "main",
]


_EXAMPLES = """\b
Examples:
  phalanx run -n 4 train.py --lr 0.1
  phalanx run -n auto -m package.train
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
    """Train on several processes at once, and know why when it fails.

    \b
    phalanx run -n 4 train.py       start four ranks of a script
    phalanx doctor                  check this machine and measure it
    phalanx mesh 8x16x8 --rank 513  show where a rank of a mesh is, and its groups
    phalanx checkpoint ls run       list checkpoints; show, verify, diff, prune
    """


main.add_command(checkpoint)


def _ranks(_ctx: click.Context, _param: click.Parameter, value: str) -> Ranks:
    if value == "auto":
        return "auto"
    if not value.isdecimal() or int(value) < 1:
        raise click.BadParameter(f"{value!r} is neither 'auto' nor a number of at least 1.")
    return int(value)


def _machine_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options of `TorchrunOptions`, which mean what they mean to torchrun."""
    options = [
        click.option("--nnodes", metavar="N[:MAX]", help="How many machines."),
        click.option("--node-rank", type=int, metavar="K", help="Which of them this is."),
        click.option("--rdzv-endpoint", metavar="HOST:PORT", help="Where they meet."),
        click.option("--rdzv-backend", metavar="NAME", help="How they meet: c10d, static."),
        click.option("--rdzv-id", metavar="ID", help="A name that they share."),
        click.option("--master-addr", metavar="HOST", help="Machine 0, with --node-rank."),
        click.option("--master-port", type=int, metavar="PORT", help="A free port there."),
    ]
    for option in reversed(options):
        command = option(command)
    return command


# Options end at the script's name: what follows is the script's own, whatever it looks like.
@main.command(
    epilog=_EXAMPLES,
    short_help="Start ranks of a script and see that they end together.",
    context_settings={"allow_interspersed_args": False},
)
@click.option(
    "-n",
    "--nproc-per-node",
    "ranks",
    required=True,
    callback=_ranks,
    metavar="N",
    help="How many ranks; 'auto' for one per usable core.",
)
@click.option("-m", "--module", is_flag=True, help="SCRIPT is a module, as in python -m.")
@click.option(
    "--max-restarts",
    type=click.IntRange(min=0),
    default=0,
    metavar="N",
    help="Start all ranks again, up to N times, when one has failed.",
)
@click.option(
    "--prefix/--no-prefix", default=True, help="Put the rank before each line (the default)."
)
@click.option(
    "--full-tracebacks",
    is_flag=True,
    help="Show tracebacks as ranks write them: with internal frames, and repeated on every rank.",
)
@click.option(
    "--grace",
    type=click.FloatRange(min=0),
    show_default=f"{GRACE:g}",
    metavar="SECONDS",
    help="Time between asking a rank to end and killing it.",
)
@click.option(
    "--linger",
    type=click.FloatRange(min=0),
    default=LINGER,
    show_default=True,
    metavar="SECONDS",
    help="Time that ranks get to report when another one has failed.",
)
@_machine_options
@click.argument("script")
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def run(
    *,
    script: str,
    args: tuple[str, ...],
    ranks: Ranks,
    module: bool,
    max_restarts: int,
    grace: float | None,
    linger: float,
    prefix: bool,
    full_tracebacks: bool,
    **machines: Any,
) -> None:
    """Start N ranks of SCRIPT on this machine and see that they end together.

    Each rank finds its place in RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and so on, as under
    torchrun. The cores are divided between the ranks (OMP_NUM_THREADS, unless it is set). When a
    rank fails, its traceback is shown, the others are stopped, and the exit code is its own.

    SIGTERM, SIGINT and SIGHUP are passed on to the ranks, which have --grace seconds to save their
    work. If they leave by phalanx.checkpoint.PreemptionGuard, the exit code is 75: start it
    again. What
    is ignored at the start (SIGHUP by nohup, SIGINT by a script's &) stays so; SIGTERM works there.

    With any of the options from --nnodes to --master-port, torchrun takes over.
    """
    with _errors_as_usage():
        if others := TorchrunOptions(**machines):
            exec_torchrun(
                script,
                args,
                machines=others,
                ranks=ranks,
                module=module,
                max_restarts=max_restarts,
                grace=grace,
            )
        outcome = run_ranks(
            script,
            args,
            ranks=ranks,
            module=module,
            max_restarts=max_restarts,
            grace=GRACE if grace is None else grace,
            linger=linger,
            prefix=prefix,
            full_tracebacks=full_tracebacks,
            check=False,
        )
    if outcome.stopped:
        click.secho(f"phalanx: {describe(outcome)}", err=True, bold=True, color=_colour())
    elif outcome.exit_code:
        _complain(describe(outcome))
    click.get_current_context().exit(outcome.exit_code)


def _colour() -> bool | None:
    """Return False where the user wants no colour, else None: then it takes a terminal."""
    return False if os.environ.get("NO_COLOR") else None


@contextmanager
def _errors_as_usage() -> Iterator[None]:
    try:
        yield
    except MisuseError as error:
        raise click.UsageError(str(error)) from error
    except RanksFailed as error:
        _complain(str(error))
        raise click.exceptions.Exit(1) from error


def _complain(report: str) -> None:
    head, *rest = [line if line[:1] == " " else f"phalanx: {line}" for line in report.splitlines()]
    click.secho(head, err=True, fg="red", bold=True, color=_colour())
    for line in rest:
        click.echo(line, err=True)


@main.command()
@click.option("--json", "as_json", is_flag=True, help="Write it for a program to read.")
def doctor(*, as_json: bool) -> None:
    """Check this machine, test two ranks on it, and measure them.

    The exit code is 1 if anything is wrong; each such line says what to do about it.
    """
    # Not needed to start ranks, so not loaded for it.
    from ._doctor import examine, render, render_json

    examination = examine()
    click.echo(render_json(examination) if as_json else render(examination), color=_colour())
    click.get_current_context().exit(0 if examination.ok else 1)


# A shape with a minus is no option, but a mistake that deserves a better answer.
@main.command(
    epilog=_MESH_EXAMPLES,
    short_help="Show a mesh, where a rank of it is, and its groups.",
    context_settings={"ignore_unknown_options": True},
)
@click.option("--names", metavar="NAME,...", help="A name for each axis.")
@click.option("--rank", type=int, metavar="RANK", help="Show where this rank is, and its groups.")
@click.option("--hosts", type=int, metavar="N", help="How many hosts share the ranks evenly.")
@click.option("--draw", is_flag=True, help="Draw the mesh, too.")
@click.option(
    "--svg",
    type=click.Path(dir_okay=False, writable=True),
    metavar="FILE",
    help="Write a picture of the mesh to a file.",
)
@click.argument("shape")
def mesh(
    *,
    shape: str,
    names: str | None,
    rank: int | None,
    hosts: int | None,
    draw: bool,
    svg: str | None,
) -> None:
    """Show the mesh of a SHAPE such as 8x16x8, without starting anything.

    The last axis runs fastest: its groups are of consecutive ranks. Hosts hold consecutive ranks,
    so the last axes are those that can stay on one host.
    """
    # Not needed to start ranks, so not loaded for it.
    from ..mesh._plan import plan_mesh

    with _errors_as_usage():
        planned = plan_mesh(shape, names=names, rank=rank, hosts=hosts)
    click.echo(planned.text(picture=draw))
    if svg is not None:
        try:
            Path(svg).write_text(planned.svg(), encoding="utf-8")
        except OSError as error:
            raise click.FileError(svg, error.strerror or str(error)) from error
