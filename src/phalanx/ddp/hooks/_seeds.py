"""Randomness that all ranks share, and that a checkpoint need not hold."""

from __future__ import annotations

import zlib

import torch

__all__ = ["shared_generator"]


def shared_generator(seed: int, step: int, index: int) -> torch.Generator:
    """Make a generator that depends on nothing but the seed, the step and the bucket."""
    mixed = zlib.crc32(f"{seed} {step} {index}".encode())
    return torch.Generator().manual_seed(mixed)  # numbers are drawn on the CPU for every device
