"""The command `phalanx checkpoint`: list, show, verify, diff and prune checkpoints.

`cli` imports this module to start ranks too, so whatever reads checkpoints is imported inside the
commands (`_checkpoint_inspection`).
"""

from __future__ import annotations

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
    """Look at checkpoints, verify them, and remove old ones.

    PATH is a checkpoint or a folder of them, or a URL that fsspec knows.
    """


_json_option = click.option(
    "--json", "as_json", is_flag=True, help="Write it for a program to read."
)
_path_argument = click.argument("path")


@contextmanager
def _inspection() -> Iterator[Any]:
    """Give what the commands need, loaded now and not to start ranks; errors become sentences."""
    from . import _checkpoint_inspection

    try:
        yield _checkpoint_inspection
    except BrokenPipeError:
        raise  # whoever reads has seen enough; click leaves quietly
    except (CheckpointError, OSError, EOFError) as error:
        raise click.ClickException(str(error)) from error
    except MisuseError as error:
        raise click.UsageError(str(error)) from error


def _echo(about: Any, lines: Callable[[], Any], *, as_json: bool) -> None:
    click.echo(
        json.dumps(about(), indent=2)
        if as_json
        else "\n".join(map(_escape_control_characters, lines()))
    )


def _escape_control_characters(line: str) -> str:
    """Escape what a terminal would obey: names and values are whatever somebody has saved."""
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in line)


@checkpoint.command()
@_json_option
@_path_argument
def ls(*, path: str, as_json: bool) -> None:
    """List the checkpoints at PATH with their sizes."""
    with _inspection() as views:
        found = views.find(path)
        _echo(
            lambda: [each.about() for each in found],
            lambda: views.listing(found),
            as_json=as_json,
        )


@checkpoint.command(short_help="Show what is in a checkpoint.")
@_json_option
@_path_argument
def show(*, path: str, as_json: bool) -> None:
    """Show what is in the checkpoint at PATH, or in the newest one there."""
    with _inspection() as views:
        listing = views.Listing(views.newest(path))
        _echo(listing.about, listing.lines, as_json=as_json)


@checkpoint.command(short_help="Read checkpoints again and compare all checksums.")
@_json_option
@_path_argument
def verify(*, path: str, as_json: bool) -> None:
    """Read all of the checkpoints at PATH again, and compare every checksum.

    The exit code is 1 if anything is damaged; each such line names the file and the tensor.
    """
    with _inspection() as views:
        found = views.find(path)
        with _progress(sum(each.bytes for each in found)) as advance:
            problems = views.verify_all(found, advance)
        _echo(lambda: problems, lambda: views.verdict(found, problems), as_json=as_json)
    click.get_current_context().exit(1 if any(problems.values()) else 0)


@contextmanager
def _progress(total: int) -> Iterator[Callable[[int], None]]:
    """Show a bar on a terminal, and nothing elsewhere."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    with click.progressbar(length=total, label="reading", file=sys.stderr) as bar:
        yield bar.update


@checkpoint.command()
@_json_option
@_path_argument
@click.argument("other", required=False)
def diff(*, path: str, other: str | None, as_json: bool) -> None:
    """Tell how the checkpoint at OTHER differs from the one at PATH.

    Without OTHER, PATH is a folder, and the newest two in it are compared. Names, shapes, types and
    checksums are compared; data is read only where another number of ranks has cut it otherwise.
    The exit code is 1 if they differ.
    """
    with _inspection() as views:
        one, two = views.pair(path, other)
        found = views.differences(one, two)
        _echo(lambda: found, lambda: views.changes(one, two, found), as_json=as_json)
    click.get_current_context().exit(1 if found else 0)


@checkpoint.command()
@click.option(
    "--keep-last",
    type=int,
    default=3,
    show_default=True,
    metavar="N",
    help="Keep the N greatest steps.",
)
@click.option(
    "--keep-every",
    type=int,
    default=0,
    metavar="N",
    help="Keep multiples of N, too.",
)
@click.option("--dry-run", is_flag=True, help="Only say what would be done.")
@_json_option
@_path_argument
def prune(*, path: str, keep_last: int, keep_every: int, dry_run: bool, as_json: bool) -> None:
    """Remove checkpoints from the folder at PATH, except the last ones.

    What is damaged, being read, or has files that are not ours is never removed. The newest one is
    read and verified first, so that a good one is among those that stay.
    """
    with _inspection() as views:
        from ..checkpoint._retention import RetentionPolicy
        from ..checkpoint._retention import prune as prune_folder

        shelf, found = views.folder(path)
        before = {each.step: each for each in found}
        verdicts = prune_folder(
            shelf, RetentionPolicy(keep_last, keep_every or None), dry_run=dry_run
        )
        _echo(
            lambda: [{"step": each.step, "kept": each.kept} for each in verdicts],
            lambda: views.pruned(verdicts, before, dry_run=dry_run),
            as_json=as_json,
        )
