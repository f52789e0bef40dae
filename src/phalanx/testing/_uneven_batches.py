"""Batches of which ranks have different numbers, and the order in which one process sees them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
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
    "nobody has any": (0, 0, 0, 0),
}
"""Numbers of batches per rank, by what is hard about them; any first ranks of them will do."""


class Batch(NamedTuple):
    """Some samples: what a loader gives in one step."""

    ids: Tensor
    """The samples' numbers: what they are the rows of, if you have a dataset of your own."""
    inputs: Tensor
    """Random numbers, a row per sample."""
    targets: Tensor
    """The sum of each row of inputs, so that there is something to be learnt."""


@dataclass(frozen=True)
class UnevenBatches:
    """The batches of all ranks; made by `uneven_batches`, equal wherever it is made."""

    lengths: tuple[int, ...]
    """How many batches each rank has."""
    batch_sizes: tuple[int, ...]
    """How many samples batches have, in turn."""
    shape: tuple[int, ...]
    """Of a sample."""
    seed: int
    dtype: torch.dtype

    @property
    def steps(self) -> list[dict[int, Batch]]:
        """List what one process does: per step, the batches of the ranks that have one, by rank."""
        rows = cycle(self.batch_sizes)
        counts = [
            {rank: next(rows) for rank, length in enumerate(self.lengths) if length > step}
            for step in range(max(self.lengths, default=0))
        ]
        samples = iter(self._samples([count for step in counts for count in step.values()]))
        return [{rank: next(samples) for rank in step} for step in counts]

    def loader(self, rank: int) -> list[Batch]:
        """List the batches of a rank; a list can be looped over again, for the next epoch."""
        if not 0 <= rank < len(self.lengths):
            raise InvalidArgument(
                f"there are batches for {len(self.lengths)} ranks, not for {rank}"
            )
        return [step[rank] for step in self.steps if rank in step]

    def among(self, size: int) -> UnevenBatches:
        """Make the batches of fewer ranks: of the first ones."""
        if not 0 < size <= len(self.lengths):
            raise InvalidArgument(
                f"there are batches for {len(self.lengths)} ranks, not for {size}"
            )
        return replace(self, lengths=self.lengths[:size])

    def _samples(self, counts: list[int]) -> list[Batch]:
        """Make batches of so many samples each, numbered one after the other."""
        generator = torch.Generator().manual_seed(self.seed)
        inputs = torch.randn(sum(counts), *self.shape, generator=generator, dtype=self.dtype)
        targets = inputs.reshape(len(inputs), math.prod(self.shape)).sum(dim=1, keepdim=True)
        ids = torch.arange(len(inputs))
        parts = [torch.split(each, counts) for each in (ids, inputs, targets)]
        return [Batch(*batch) for batch in zip(*parts, strict=True)]


def uneven_batches(
    lengths: Sequence[int],
    *,
    batch_size: int | Sequence[int] = 2,
    shape: Sequence[int] = (4,),
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
) -> UnevenBatches:
    """Make batches to test a loop with in which ranks run out of data at different steps.

    Rank i has ``lengths[i]`` batches, of `batch_size` samples or of as many as a list says in turn.
    Every process that calls it with the same arguments has the same. The oracle of a training loop
    is one process that takes the same steps; samples are numbered in the order in which it does::

        batches = uneven_batches((3, 1, 0))

        def body(ctx):  # on every rank
            for batch in batches.loader(ctx.rank):
                train_step(batch.inputs, batch.targets)

        for step in batches.steps:  # in one process
            losses = [loss(model(b.inputs), b.targets) for b in step.values()]
            (sum(losses) / len(losses)).backward()  # the mean over the ranks that took part
            optimizer.step()

    The fixture of the same name in ``phalanx.testing.pytest_plugin`` runs a test with several
    kinds of unevenness, each for four ranks; `among` makes them fewer.
    """
    sizes = (batch_size,) if isinstance(batch_size, int) else tuple(batch_size)
    if not all(isinstance(length, int) and length >= 0 for length in lengths) or not lengths:
        raise InvalidArgument(f"lengths are numbers of batches, one per rank, not {lengths!r}")
    if not all(isinstance(size, int) and size >= 0 for size in sizes) or not sizes:
        raise InvalidArgument(f"batch_size is a number of samples, or several, not {batch_size!r}")
    return UnevenBatches(tuple(lengths), sizes, tuple(shape), seed, dtype)
