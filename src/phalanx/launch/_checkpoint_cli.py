"""The command `phalanx checkpoint`: list, show, verify, diff and prune checkpoints.

`cli` imports this module for `phalanx run` too, so the commands import `_checkpoint_inspection`
when they run.
"""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import click

from ..errors import CheckpointError, MisuseError

_EXAMPLES = """\b
Examples:
  phalanx checkpoint ls run
  phalanx checkpoint show run/step-00001000
  phalanx checkpoint verify run
  phalanx checkpoint diff run/step-00001000 run/step-00002000
  phalanx checkpoint prune run --keep-last 3 --keep-every 1000 --dry-run
"""


@click.group(epilog=_EXAMPLES)
def checkpoint() -> None:
    """List, inspect, verify, compare and prune checkpoints.

    PATH is a checkpoint or a directory of checkpoints, or a URL that fsspec supports.
    """


_json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
_path_argument = click.argument("path")


@contextmanager
def _inspection() -> Iterator[Any]:
    """Import `_checkpoint_inspection`; turn its errors into messages without a traceback."""
    from . import _checkpoint_inspection

    try:
        yield _checkpoint_inspection
    except BrokenPipeError:
        raise  # the reader closed the pipe; click exits silently
    except (CheckpointError, OSError, EOFError) as error:
        raise click.ClickException(str(error)) from error
    except MisuseError as error:
        raise click.UsageError(str(error)) from error


def _echo(as_json: bool, to_json: Callable[[], Any], lines: Callable[[], Any]) -> None:
    if as_json:
        click.echo(json.dumps(to_json(), indent=2))
    else:
        click.echo("\n".join(map(_escape_control_characters, lines())))


def _escape_control_characters(line: str) -> str:
    """Escape control characters: names and values come from an untrusted file."""
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in line)


@checkpoint.command()
@_json_option
@_path_argument
def ls(*, path: str, as_json: bool) -> None:
    """List the checkpoints at PATH with their sizes."""
    with _inspection() as inspection:
        found = inspection.find_checkpoints(path)
        _echo(
            as_json,
            lambda: [each.to_json() for each in found],
            lambda: inspection.listing_lines(found),
        )


@checkpoint.command(short_help="Show the contents of a checkpoint.")
@_json_option
@_path_argument
def show(*, path: str, as_json: bool) -> None:
    """Show the contents of the checkpoint at PATH, or of the newest one in that directory."""
    with _inspection() as inspection:
        found = inspection.newest_checkpoint(path)
        _echo(
            as_json,
            lambda: found.to_json(with_state=True),
            lambda: inspection.detail_lines(found),
        )


@checkpoint.command(short_help="Read checkpoints and compare all checksums.")
@_json_option
@_path_argument
def verify(*, path: str, as_json: bool) -> None:
    """Read all checkpoints at PATH and compare every checksum.

    The exit code is 1 if any is damaged; the output names the file and the tensor.
    """
    with _inspection() as inspection:
        found = inspection.find_checkpoints(path)
        total = sum(each.bytes for each in found)
        output = sys.stderr if sys.stderr.isatty() else io.StringIO()
        with click.progressbar(length=total, label="reading", file=output) as bar:
            problems = inspection.verify_all(found, bar.update)
        _echo(as_json, lambda: problems, lambda: inspection.verify_lines(found, problems))
    click.get_current_context().exit(1 if any(problems.values()) else 0)


@checkpoint.command()
@_json_option
@_path_argument
@click.argument("other", required=False)
def diff(*, path: str, other: str | None, as_json: bool) -> None:
    """Show how the checkpoint at OTHER differs from the one at PATH.

    Without OTHER, PATH is a directory, and its newest two checkpoints are compared. Compares names,
    shapes, types and checksums; reads data only if another number of ranks sharded it differently.
    The exit code is 1 if they differ.
    """
    with _inspection() as inspection:
        one, two = inspection.checkpoints_to_compare(path, other)
        found = inspection.differences(one, two)
        _echo(as_json, lambda: found, lambda: inspection.diff_lines(one, two, found))
    click.get_current_context().exit(1 if found else 0)


@checkpoint.command()
@click.option(
    "--keep-last", default=3, show_default=True, metavar="N", help="Newest steps to keep."
)
@click.option("--keep-every", default=0, metavar="N", help="Also keep multiples of N.")
@click.option("--dry-run", is_flag=True, help="Only show what would be removed.")
@_json_option
@_path_argument
def prune(*, path: str, keep_last: int, keep_every: int, dry_run: bool, as_json: bool) -> None:
    """Remove old checkpoints from the directory at PATH.

    Never removes a checkpoint that is damaged, being read, or contains unknown files. Verifies the
    newest one first, so that at least one good checkpoint remains.
    """
    with _inspection() as inspection:
        from ..checkpoint._step_directory import RetentionPolicy
        from ..checkpoint._step_directory import prune as prune_directory

        directory, found = inspection.checkpoint_directory(path)
        policy = RetentionPolicy(keep_last, keep_every or None)
        decisions = prune_directory(directory, policy, dry_run=dry_run)
        _echo(
            as_json,
            lambda: [{"step": each.step, "kept": each.kept} for each in decisions],
            lambda: inspection.prune_lines(decisions, found, dry_run=dry_run),
        )
