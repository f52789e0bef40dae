"""Uneven inputs: ranks without data leave the group, or shadow the steps of the others.

The API of ``torch.distributed.algorithms.join``. Each `Join` accepts the other's joinables: torch's
DDP and ZeroRedundancyOptimizer work in ours, and ours in torch's. `gather_uneven` gathers tensors
of which ranks have different numbers of rows.
"""

from torch.distributed.algorithms.join import JoinHook

from ._gather import gather_uneven
from ._join import Join, Joinable, JoinReport, _JoinConfig, uneven

__all__ = ["Join", "JoinHook", "JoinReport", "Joinable", "_JoinConfig", "gather_uneven", "uneven"]
