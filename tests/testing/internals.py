"""The private names that tests of this package use; everything else is public."""

from phalanx import _faultpoints
from phalanx.testing._actions import faults_from_json, faults_to_json
from phalanx.testing._faulty_worker import current_worker
from phalanx.testing._marked_processes import MarkedProcesses

__all__ = [
    "MarkedProcesses",
    "_faultpoints",
    "current_worker",
    "faults_from_json",
    "faults_to_json",
]
