"""Fixtures with factories for our meshes and torch's."""

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from .kits import WORLD, Ours, Theirs


@pytest.fixture
def ours():
    kit = Ours(3)
    yield kit
    kit.group.shutdown()


@pytest.fixture(scope="module")
def pair():
    dist.init_process_group("fake", rank=5, world_size=WORLD, store=FakeStore())
    kit = Ours(5)
    yield Theirs(), kit
    kit.group.shutdown()
    dist.destroy_process_group()
