"""The code blocks of docs/ddp_hooks.md run and are short."""

import re
from pathlib import Path

import torch
from torch import nn

from phalanx.ddp import DDP
from phalanx.testing import over_groups

PAGE = Path(__file__).parents[3] / "docs" / "ddp_hooks.md"
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)[1:]
"""All but the first, which is a standalone program with its own test."""


def test_doc_blocks_are_short():
    assert len(BLOCKS) >= 7
    assert max(len(block.splitlines()) for block in BLOCKS) <= 30


@over_groups(backends=("shm",), sizes=(2,), reuse=True)
def test_every_doc_block_trains(group, tmp_path):
    for block in BLOCKS:
        model = DDP(nn.Linear(8, 8), process_group=group)
        names = {"model": model, "group": group, "path": tmp_path / str(group.rank())}
        exec(block, names)  # noqa: S102 - our own document
        optimizer = names.get("optimizer") or torch.optim.SGD(model.parameters(), lr=0.01)
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(4, 8)).square().mean().backward()
            optimizer.step()
        assert all(p.isfinite().all() for p in model.parameters()), block
