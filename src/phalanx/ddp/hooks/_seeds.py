"""Randomness that all ranks share, and that a checkpoint need not hold."""

from __future__ import annotations

import math
import zlib

import torch
from torch import Tensor

__all__ = ["draw", "shared_generator"]

_MANY = 1000
"""From how many on a shuffle of all costs more than to go through them."""


def shared_generator(seed: int, step: int, key: int | str) -> torch.Generator:
    """Make a generator that depends on nothing but the seed, the step and what it is for."""
    mixed = zlib.crc32(f"{seed} {step} {key}".encode())
    return torch.Generator().manual_seed(mixed)  # numbers are drawn on the CPU for every device


def draw(count: int, among: int, generator: torch.Generator) -> Tensor:
    """Draw different whole numbers from 0 on, every choice of them as likely as any other."""
    if 20 * count < among:
        # Few among many: some are drawn twice, which costs less than to shuffle all.
        some = torch.randint(among, (count + count // 2 + 16,), generator=generator)
        different: Tensor = torch.unique(some)
        if len(different) >= count:
            return different[torch.randperm(len(different), generator=generator)[:count]]
    elif among > _MANY:
        # Each by itself is taken or not; of those who are too many, some are dropped again.
        likely = count / among
        wanted = count + 6 * math.sqrt(count * (1 - likely)) + 1
        taken = torch.rand(among, generator=generator) < wanted / among
        places = taken.nonzero().view(-1)
        if len(places) >= count:
            places[draw(len(places) - count, len(places), generator)] = -1
            return places[places >= 0]
    return torch.randperm(among, generator=generator)[:count]
