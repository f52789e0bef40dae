"""The command `phalanx checkpoint`: list, show, verify, diff, prune and convert checkpoints.

`cli` imports this module for `phalanx run` too, so each command imports `_checkpoint_commands`
when it runs.
"""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable, Iterable
from functools import partial
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
  phalanx checkpoint convert dcp_folder run/step-00001000
"""


@click.group(epilog=_EXAMPLES)
def checkpoint() -> None:
    """List, show, verify, diff, prune and convert checkpoints.

    PATH is a checkpoint or a directory of checkpoints, or a URL that fsspec supports. Folders of
    torch.distributed.checkpoint and of its experimental checkpointer are checkpoints too.
    """


_json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
_path_argument = click.argument("path")


def _print(as_json: bool, command: Callable[[], tuple[Any, Iterable[str]]]) -> Any:
    """Run a command, print its output, and return it as JSON.

    Errors become messages without a traceback.
    """
    try:
        output, lines = command()
        text = "\n".join(map(_escape_control_characters, lines))
        click.echo(json.dumps(output, indent=2) if as_json else text)
    except BrokenPipeError:
        raise  # the reader closed the pipe; click exits silently
    except (CheckpointError, OSError, EOFError) as error:
        raise click.ClickException(str(error)) from error
    except MisuseError as error:
        raise click.UsageError(str(error)) from error
    return output


def _escape_control_characters(line: str) -> str:
    """Escape control characters: names and values come from an untrusted file."""
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in line)


@checkpoint.command()
@_json_option
@_path_argument
def ls(*, path: str, as_json: bool) -> None:
    """List the checkpoints at PATH with their sizes."""
    from ._checkpoint_commands import list_checkpoints

    _print(as_json, partial(list_checkpoints, path))


@checkpoint.command(short_help="Show the contents of a checkpoint.")
@_json_option
@_path_argument
def show(*, path: str, as_json: bool) -> None:
    """Show the contents of the checkpoint at PATH, or of the newest one in that directory."""
    from ._checkpoint_commands import show_checkpoint

    _print(as_json, partial(show_checkpoint, path))


@checkpoint.command(short_help="Read checkpoints and compare all checksums.")
@_json_option
@_path_argument
def verify(*, path: str, as_json: bool) -> None:
    """Read all checkpoints at PATH and compare every checksum.

    The exit code is 1 if any is damaged; the output names the file and the tensor.
    """
    from ._checkpoint_commands import verify_checkpoints

    file = sys.stderr if sys.stderr.isatty() else io.StringIO()
    bar = partial(click.progressbar, label="reading", file=file)
    problems = _print(as_json, partial(verify_checkpoints, path, lambda size: bar(length=size)))
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
    from ._checkpoint_commands import compare_checkpoints

    found = _print(as_json, partial(compare_checkpoints, path, other))
    click.get_current_context().exit(1 if found else 0)


@checkpoint.command()
@click.option("--keep-last", default=3, metavar="N", help="Keep the newest N (default 3).")
@click.option("--keep-every", type=int, metavar="N", help="Also keep multiples of N.")
@click.option("--dry-run", is_flag=True, help="Only show what would be removed.")
@_json_option
@_path_argument
def prune(
    *, path: str, keep_last: int, keep_every: int | None, dry_run: bool, as_json: bool
) -> None:
    """Remove old checkpoints from the directory at PATH.

    Never removes a checkpoint that is damaged, being read, or contains unknown files. Verifies the
    newest one first, so that at least one good checkpoint remains.
    """
    from ._checkpoint_commands import prune_checkpoints

    _print(as_json, partial(prune_checkpoints, path, keep_last, keep_every, dry_run=dry_run))


@checkpoint.command(short_help="Write a checkpoint of torch in the format of phalanx.")
@_json_option
@click.argument("source")
@click.argument("destination")
def convert(*, source: str, destination: str, as_json: bool) -> None:
    """Write the checkpoint at SOURCE, of torch or of phalanx, to DESTINATION.

    Nothing may exist at DESTINATION, and nothing is there before the checkpoint is complete. Keeps
    the state of each rank where ranks differ. Holds one tensor in memory at a time. The checkpoint
    at SOURCE is never unpickled beyond tensors and plain values.
    """
    from ._checkpoint_commands import convert as convert_checkpoint

    _print(as_json, partial(convert_checkpoint, source, destination))
