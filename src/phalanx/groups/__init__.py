"""Process groups as objects.

The names and meanings of ``torch.distributed._dist2``, and beyond them: groups from any store,
backends for threads and for planning, deadlines on every call, a flight recorder that is always
on, and errors that name the rank, the operation and the line of code.
"""

from torch.distributed import ReduceOp

from ._backend_registry import ProcessGroupFactory, register_backend
from ._current_group import current_process_group, process_group
from ._engine import Traits
from ._factory import DEFAULT_TIMEOUT, new_group
from ._flight_recorder import Record
from ._process_group import ProcessGroup
from ._work import Work

__all__ = [
    "DEFAULT_TIMEOUT",
    "ProcessGroup",
    "ProcessGroupFactory",
    "Record",
    "ReduceOp",
    "Traits",
    "Work",
    "current_process_group",
    "new_group",
    "process_group",
    "register_backend",
]
