"""Uneven inputs: ranks that have run out of data leave, or keep the others company.

The names and meanings of ``torch.distributed.algorithms.join``. Either's `Join` takes either's
joinables: torch's DDP and ZeroRedundancyOptimizer work in ours, and ours in torch's. Beyond them,
`gather_uneven` collects what ranks have different amounts of.
"""

from ._gather import gather_uneven
from ._join import Join, JoinReport, uneven
from ._joinable import Joinable, JoinHook, _JoinConfig

__all__ = ["Join", "JoinHook", "JoinReport", "Joinable", "_JoinConfig", "gather_uneven", "uneven"]
