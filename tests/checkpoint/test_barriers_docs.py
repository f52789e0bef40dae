"""The programs in docs/checkpoint_barriers.md run."""

import os
import re
import tempfile
from pathlib import Path

from phalanx.checkpoint import barriers
from ports import free_port

PAGE = Path(__file__).parents[2] / "docs/checkpoint_barriers.md"


def programs():
    return re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)


def run_as_a_rank(ctx, source, folder):
    os.environ |= {
        "RANK": str(ctx.rank),
        "WORLD_SIZE": str(ctx.size),
        "MASTER_PORT": "0",
    }
    tempfile.tempdir = folder
    known = dict(barriers.BARRIER_REGISTRY)
    try:
        exec(source, {"__name__": "program"})  # noqa: S102 - our own page
        assert "folder" in barriers.BARRIER_REGISTRY
    finally:
        tempfile.tempdir = None
        barriers.BARRIER_REGISTRY.clear()
        barriers.BARRIER_REGISTRY.update(known)


def test_documented_custom_barrier_runs_and_is_short(ranks, tmp_path):
    _, source = programs()
    assert len(source.splitlines()) <= 30
    ranks.run(run_as_a_rank, 2, args=(source, str(tmp_path)))
    assert len(list((tmp_path / "barrier-0").iterdir())) == 2


def test_documented_config_creates_a_barrier():
    source, _ = programs()
    assert "29411" in source
    exec(source.replace("29411", str(free_port())), {})  # noqa: S102 - our own page
