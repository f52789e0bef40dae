"""Uneven batches: ranks have different numbers of batches; one process is the oracle."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import cycle
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import InvalidArgument

PATTERNS = {
    "even": (2, 2, 2, 2),
    "rising": (1, 2, 3, 5),
    "falling": (4, 2, 2, 1),
    "one has none": (2, 0, 3, 2),
    "all but one have none": (0, 3, 0, 0),
    "all are empty": (0, 0, 0, 0),
}
"""Numbers of batches per rank; shorter prefixes are valid too."""


class Batch(NamedTuple):
    """The samples of one step."""

    ids: Tensor
    """The numbers of the samples, which can index a dataset of your own."""
    inputs: Tensor
    """Random numbers, one row per sample."""
    targets: Tensor
    """The sum of each row of the inputs."""


@dataclass(frozen=True)
class UnevenBatches:
    """The batches of all ranks, equal in every process; see `uneven_batches`."""

    lengths: tuple[int, ...]
    """The number of batches of each rank."""
    batch_sizes: tuple[int, ...]
    """The numbers of samples of the batches, repeated cyclically."""
    shape: tuple[int, ...]
    """The shape of a sample."""
    seed: int
    dtype: torch.dtype

    @cached_property
    def steps(self) -> list[dict[int, Batch]]:
        """For each step, the batches by rank, of the ranks that have one."""
        rows = cycle(self.batch_sizes)
        counts = [
            {rank: next(rows) for rank, length in enumerate(self.lengths) if length > step}
            for step in range(max(self.lengths, default=0))
        ]
        flat = [count for step in counts for count in step.values()]
        generator = torch.Generator().manual_seed(self.seed)
        inputs = torch.randn(sum(flat), *self.shape, generator=generator, dtype=self.dtype)
        targets = inputs.reshape(len(inputs), math.prod(self.shape)).sum(dim=1, keepdim=True)
        parts = [torch.split(each, flat) for each in (torch.arange(len(inputs)), inputs, targets)]
        batches = map(Batch, *parts)
        return [{rank: next(batches) for rank in step} for step in counts]

    def loader(self, rank: int) -> list[Batch]:
        """Return the batches of a rank."""
        if not 0 <= rank < len(self.lengths):
            raise InvalidArgument(f"rank must be 0 to {len(self.lengths) - 1}, got {rank}")
        return [step[rank] for step in self.steps if rank in step]

    def first_ranks(self, size: int) -> UnevenBatches:
        """Return the batches of the first `size` ranks."""
        if not 0 < size <= len(self.lengths):
            raise InvalidArgument(f"size must be 1 to {len(self.lengths)}, got {size}")
        return replace(self, lengths=self.lengths[:size])


def uneven_batches(
    lengths: Sequence[int],
    *,
    batch_size: int | Sequence[int] = 2,
    shape: Sequence[int] = (4,),
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
) -> UnevenBatches:
    """Make batches for testing loops in which ranks run out of data at different steps.

    Rank i has ``lengths[i]`` batches of `batch_size` samples; a list of sizes is repeated
    cyclically. Equal arguments give equal batches in every process. The oracle of a training loop
    is one process that takes the same steps; samples are numbered in its order::

        batches = uneven_batches((3, 1, 0))

        def body(ctx):  # on every rank
            for batch in batches.loader(ctx.rank):
                train_step(batch.inputs, batch.targets)

        for step in batches.steps:  # in one process
            losses = [loss(model(b.inputs), b.targets) for b in step.values()]
            (sum(losses) / len(losses)).backward()  # the mean over the ranks that took part
            optimizer.step()

    The fixture of the same name in ``phalanx.testing.pytest_plugin`` runs a test with several
    kinds of unevenness, each for four ranks; `first_ranks` makes them fewer.
    """
    sizes = (batch_size,) if isinstance(batch_size, int) else tuple(batch_size)
    if not all(isinstance(length, int) and length >= 0 for length in lengths) or not lengths:
        raise InvalidArgument(f"lengths must be one number of batches per rank, got {lengths!r}")
    if not all(isinstance(size, int) and size >= 0 for size in sizes) or not sizes:
        raise InvalidArgument(f"batch_size must be a size or a list of sizes, got {batch_size!r}")
    return UnevenBatches(tuple(lengths), sizes, tuple(shape), seed, dtype)
