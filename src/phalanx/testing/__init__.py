"""Test distributed code: ranks that outlive a test, and faults that strike where you say.

::

    def body(ctx):
        group = ctx.group("gloo")
        tensor = torch.full((3,), float(ctx.rank))
        group.allreduce(tensor).wait()
        assert tensor.tolist() == [3.0] * 3

    with RankPool(4) as pool:
        pool.run(body, 3)
        pool.run(body, 3, faults=[Fault("allreduce:before", kill(), rank=2)])

`RankPool` has processes for ranks and `ThreadRanks` threads of this process; both run the same
bodies. `over_groups` makes one pytest test of a body for each of many groups. `uneven_batches`
makes loaders of different lengths, and what one process makes of the same batches.
"""

from . import faults
from ._over_groups import over_groups
from ._pool import RankPool
from ._results import Died, RankFailures, Stopped
from ._run import RankContext
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
