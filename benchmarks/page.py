"""Figures in the documentation: what stands between two marks is replaced, the prose is left."""

from __future__ import annotations

import re

from .results import Results
from .table import entry_text, machine_line

__all__ = ["refresh", "replace_figures"]

END = "<!-- end of figures -->"


def refresh(page: str, results: Results) -> str:
    """Replace the figures of the entries that were measured; a new one goes to the end."""
    where = machine_line(results.machine)
    for entry in results.entries:
        text = f"{where}\n\n{entry_text(entry, markdown=True)}"
        page = replace_figures(page, entry.name, entry.title, text)
    return page


def replace_figures(page: str, name: str, title: str, text: str) -> str:
    """Replace what stands between two marks; without marks, it goes to the end under a title."""
    begin = f"<!-- figures: {name} -->"
    place = re.compile(f"{re.escape(begin)}.*?{re.escape(END)}", re.DOTALL)
    if not place.search(page):
        page = f"{page.rstrip()}\n\n## {title}\n\n{begin}\n{END}\n"
    block = f"{begin}\n{text}\n\n{END}"
    return place.sub(block.replace("\\", r"\\"), page)
