"""Tools for testing distributed code: reusable ranks and fault injection.

::

    def body(ctx):
        group = ctx.group("gloo")
        tensor = torch.full((3,), float(ctx.rank))
        group.allreduce(tensor).wait()
        assert tensor.tolist() == [3.0] * 3

    with RankPool(4) as pool:
        pool.run(body, 3)
        pool.run(body, 3, faults=[Fault("allreduce:before", kill(), rank=2)])

The ranks of `RankPool` are processes, those of `ThreadRanks` threads; both run the same bodies.
`over_groups` parametrizes a pytest test over backends and group sizes. `uneven_batches` makes
loaders of different lengths, and the equivalent steps of one process.
"""

from . import faults
from ._context import RankContext
from ._over_groups import over_groups
from ._pool import RankPool
from ._results import Died, RankFailures, Stopped
from ._threads import ThreadRanks
from ._uneven_batches import Batch, UnevenBatches, uneven_batches
from .faults import Fault, delay, kill, stop

__all__ = [
    "Batch",
    "Died",
    "Fault",
    "RankContext",
    "RankFailures",
    "RankPool",
    "Stopped",
    "ThreadRanks",
    "UnevenBatches",
    "delay",
    "faults",
    "kill",
    "over_groups",
    "stop",
    "uneven_batches",
]
