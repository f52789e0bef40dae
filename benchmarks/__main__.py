"""The command line: ``python -m benchmarks``."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

import click

from phalanx.errors import InvalidArgument

from . import entry, page, picture, runner
from .results import Results
from .table import render

__all__ = ["main"]


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("names", nargs=-1)
@click.option("--list", "list_only", is_flag=True, help="List the benchmarks and stop.")
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Keep every sample.")
@click.option("--repeats", type=click.IntRange(min=1), help="How many rounds.")
@click.option("--quick", is_flag=True, help="See that it works; the figures mean nothing.")
@click.option("--markdown", is_flag=True, help="Write Markdown, to paste into a page.")
@click.option(
    "--docs",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Draw into this folder, and bring the figures in its benchmarks.md up to date.",
)
@click.option(
    "--show",
    type=click.Path(exists=True, path_type=Path),
    help="Show what --json kept, without measuring.",
)
def main(
    *,
    names: tuple[str, ...],
    list_only: bool,
    json_path: Path | None,
    repeats: int | None,
    quick: bool,
    markdown: bool,
    docs: Path | None,
    show: Path | None,
) -> None:
    """Measure ours and its peers side by side; without NAMES, everything that there is."""
    if docs is not None:  # before the work is done, so that it is not done for nothing
        _check_docs(quick=quick)
    try:
        if show is not None:
            _publish(Results.from_json(show.read_text()), markdown=markdown, docs=docs)
            return
        entries = [entry.find(name) for name in names or entry.names()]
    except InvalidArgument as error:
        raise click.UsageError(str(error)) from error
    if list_only:
        for each in entries:
            click.echo(f"{each.name}: {each.title}")
        return
    if json_path is not None:
        json_path.parent.mkdir(parents=True, exist_ok=True)
    results = runner.run(entries, repeats=repeats, quick=quick, tell=_progress)
    _progress("")
    if json_path is not None:
        json_path.write_text(results.to_json())
    _publish(results, markdown=markdown, docs=docs)


def _check_docs(*, quick: bool) -> None:
    if quick:
        raise click.UsageError("the figures of a quick run mean nothing: keep them out of the docs")
    if find_spec("matplotlib") is None:
        raise click.UsageError("--docs needs matplotlib: pip install 'phalanx[bench]'")


def _publish(results: Results, *, markdown: bool, docs: Path | None) -> None:
    """Print results, and put them into the docs if they are to go there."""
    click.echo(render(results, markdown=markdown))
    if docs is not None:
        text = docs / "benchmarks.md"
        text.write_text(page.refresh(text.read_text(), results))
        for drawn in picture.draw(results, docs):
            click.echo(f"drew {drawn}", err=True)


def _progress(text: str) -> None:
    """Show what is at work, in one line that the next one replaces."""
    if sys.stderr.isatty():
        click.echo(f"\r\x1b[K{text[:99]}", err=True, nl=False)


if __name__ == "__main__":
    main(prog_name="python -m benchmarks")
