"""Buckets without a module, and seeded gradients that every rank can compute for all."""

import torch
from torch.nn import Parameter

from cases import over_cases
from phalanx.testing import over_groups

from ..internals import GradBucket

everywhere = over_cases("local-4", "shm-2")
"""Threads and processes, world sizes 2 and 4."""
on_threads = over_groups(backends=("local",), sizes=(2, 4))
"""For tests that do not depend on shared memory."""

SHAPES = ((6, 5), (7,), (3, 2, 4))


def bucket_of(*gradients, index=0, is_last=True, group=None, names=None):
    """Make a bucket of gradients, as the reducer does."""
    flat = torch.cat([each.reshape(-1) for each in gradients])
    parts = flat.split([each.numel() for each in gradients])
    views = [part.view(each.shape) for part, each in zip(parts, gradients, strict=True)]
    parameters = [Parameter(torch.zeros_like(each)) for each in gradients]
    return GradBucket(index, flat, views, parameters, is_last, group=group, names=names)


def gradients(rank, step=0, *, shapes=SHAPES, dtype=torch.float32):
    """Return a rank's gradients of a step, from a seeded generator."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def flat_gradients(size, step=0, **options):
    """Return the flat gradients of a step for every rank."""
    everyones = (gradients(rank, step, **options) for rank in range(size))
    return [torch.cat([each.reshape(-1) for each in mine]) for mine in everyones]


def mean_of(tensors):
    """Average tensors in float64, as the oracle does."""
    return torch.stack([each.double() for each in tensors]).mean(0)


def run(hook, state, group, step=0, *, index=0, is_last=True, **options):
    """Run a hook on this rank's gradients of a step, and wait for its result."""
    mine = bucket_of(
        *gradients(group.rank(), step, **options), index=index, is_last=is_last, group=group
    )
    return hook(state, mine).wait()


def assert_near(result, expected):
    """Compare a float32 result with the oracle."""
    torch.testing.assert_close(result.double(), expected.double(), rtol=1e-5, atol=1e-6)
