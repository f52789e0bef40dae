"""The command line: ``python -m interop``, in the environment that ``make interop`` makes."""

from __future__ import annotations

import re
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import click

HERE = Path(__file__).parent
_NOTHING_RAN = "no program was run; make the environment again (make clean, make interop)"


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("names", nargs=-1)
@click.option("--rounds", default=1, type=click.IntRange(min=1), help="How often to run each.")
@click.option(
    "--docs",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Bring the tables of this page up to date.",
)
@click.option(
    "--speed", "launches", default=0, metavar="N", help="Also compare speeds, in N launches."
)
@click.option(
    "--only-speed",
    is_flag=True,
    help="Run no programs: compare speeds, with --speed, and that is all.",
)
@click.option("--verbose", is_flag=True, help="Print the output of what failed.")
def main(
    *,
    names: tuple[str, ...],
    rounds: int,
    docs: Path | None,
    launches: int,
    only_speed: bool,
    verbose: bool,
) -> None:
    """Run the programs in every mode; with NAMES, those whose name contains one of them.

    Exits with 1 if a program that passes with torch fails or gives other results on phalanx.
    """
    check_versions()
    from . import speed, table
    from .catalog import REPORTING, THIRD_PARTY
    from .runner import describe, measure, verdicts

    if names and docs is not None:
        raise click.UsageError("--docs needs all programs: the tables are written as a whole")
    if only_speed:
        if not launches:
            raise click.UsageError("--only-speed needs --speed N")
        conditions = table.Conditions()
        figures = speed.table(speed.measure(launches, _tell))
        text = f"{conditions.describe()}\n\n{figures}"
        click.echo(text)
        if docs is not None:
            docs.write_text(table.refresh(docs.read_text(), "speed", text))
        return
    conditions = table.Conditions()
    chosen = [
        [each for each in programs if not names or any(name in describe(each) for name in names)]
        for programs in (REPORTING, THIRD_PARTY)
    ]
    reporting = list(measure(chosen[0], rounds, _tell))
    scripts = list(measure(chosen[1], 1, _tell))
    blocks = {
        "programs": f"{conditions.describe()}\n\n{table.reporting_table(reporting)}",
        "scripts": table.script_table(scripts),
    }
    gains = {
        f"gain of {framework}": table.gain(reporting, framework)
        for framework in {row.program.framework for row in reporting}
    }
    if launches:
        conditions = table.Conditions()
        figures = speed.table(speed.measure(launches, _tell))
        blocks["speed"] = f"{conditions.describe()}\n\n{figures}"
    for text in blocks.values():
        click.echo(f"\n{text}")
    if docs is not None:
        page = docs.read_text()
        for name, text in {**blocks, **gains}.items():
            page = table.refresh(page, name, text)
        docs.write_text(page)
    failures = list(verdicts([*reporting, *scripts]))
    if verbose:
        _show_output([*reporting, *scripts])
    for failure in failures:
        click.echo(f"interop: {failure}", err=True)
    sys.exit(1 if failures else 0)


def check_versions() -> None:
    """Refuse to compare with other versions than those that are pinned."""
    for line in (HERE / "requirements.txt").read_text().splitlines():
        pinned = re.match(r"([\w.-]+)==(\S+)", line)
        if pinned is None:
            continue
        try:
            found = version(pinned[1])
        except PackageNotFoundError:
            sys.exit(f"interop: {pinned[1]} is not installed: {_NOTHING_RAN}")
        if found != pinned[2]:
            sys.exit(f"interop: {pinned[1]} is {found}, not {pinned[2]}: {_NOTHING_RAN}")


def _show_output(rows: list) -> None:  # type: ignore[type-arg]
    shown = set()
    for row in rows:
        for mode, runs in row.runs.items():
            for run in runs:
                if row.problem(mode) and id(run) not in shown:
                    shown.add(id(run))
                    click.echo(f"\n== {row.program.title}, {mode}\n{run.output[-6000:]}", err=True)


def _tell(text: str) -> None:
    click.echo(text, err=True)


if __name__ == "__main__":
    main(prog_name="python -m interop")
