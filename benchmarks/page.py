"""Figures in the documentation: what stands between two marks is replaced, the prose is left."""

from __future__ import annotations

import re

from .results import Results
from .table import entry_text, machine_line

__all__ = ["refresh"]

END = "<!-- end of figures -->"


def refresh(page: str, results: Results) -> str:
    """Replace the figures of the entries that were measured; a new one goes to the end."""
    for entry in results.entries:
        begin = f"<!-- figures: {entry.name} -->"
        where = machine_line(results.machine)
        block = f"{begin}\n{where}\n\n{entry_text(entry, markdown=True)}\n\n{END}"
        place = re.compile(f"{re.escape(begin)}.*?{re.escape(END)}", re.DOTALL)
        if not place.search(page):
            page = f"{page.rstrip()}\n\n## {entry.title}\n\n{begin}\n{END}\n"
        page = place.sub(block.replace("\\", r"\\"), page)
    return page
