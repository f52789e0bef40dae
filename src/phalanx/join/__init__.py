"""Uneven inputs: ranks without data leave the group, or shadow the steps of the others.

The API of ``torch.distributed.algorithms.join``: torch's `Join` accepts our joinables, and ours
accepts torch's. `gather_uneven` gathers tensors whose number of rows differs between ranks.
"""

from torch.distributed.algorithms.join import JoinHook

from ._gather import gather_uneven
from ._join import Join, Joinable, JoinReport, _JoinConfig, uneven

__all__ = ["Join", "JoinHook", "JoinReport", "Joinable", "_JoinConfig", "gather_uneven", "uneven"]
